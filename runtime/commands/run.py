"""``moesaic run``: a layer on random tensors, on any backend, and compared with the reference."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from moesaic.ir import environment
from moesaic.ir.errors import InputError, ToolchainError, UsageError
from moesaic.runtime import reproducer
from moesaic.runtime.commands import console, inputs
from moesaic.runtime.commands.verbs import Verbs

if TYPE_CHECKING:
    import torch

    from moesaic.runtime.commands.tensors import Comparison

_EXAMPLES = """
Logits are normal, biases small; the backward pass gets random cotangents. With --check, exits with
1 if outputs or gradients differ from the reference by more than the tolerance it prints.

examples:
  moesaic run router.moe                             on the GPU if there is one, else the reference
  moesaic run router.moe --backend emulate --check   the generated CUDA on the CPU, checked
  moesaic run router.py --dtype bf16 --tokens 1000 --seed 7 --json
"""


def add(verbs: Verbs) -> None:
    """Declares the verb."""
    parser = verbs.add("run", run, "run a layer on random tensors, forward and backward", _EXAMPLES, "FILE")
    parser.add_argument("file", metavar="FILE", help=inputs.FILE_HELP)
    parser.add_argument(
        "--backend",
        choices=("auto", "reference", "emulate", "cuda"),
        default="auto",
        help="default: as MOESAIC_BACKEND says, else cuda where there is a GPU, else reference (with --check: emulate)",
    )
    parser.add_argument("--tokens", metavar="T", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--check", action="store_true", help="compare with the reference backend")
    parser.add_argument("--dtype", help="of the logits, for a .py router declared without one")
    parser.add_argument("--json", action="store_true", help="as JSON")


def require_torch() -> None:
    """Raises:
    ToolchainError: torch cannot be imported.
    """
    try:
        with console.progress("importing torch"):
            import torch  # noqa: F401
    except ImportError as error:
        raise ToolchainError(f"running a layer needs torch ({error}): pip install 'moesaic[torch]'") from None


def run(arguments: argparse.Namespace) -> int:
    """The verb."""
    if arguments.tokens < 0:
        raise UsageError(f"--tokens must be 0 or more, found {arguments.tokens}")
    module = inputs.read_module(arguments.file, arguments.dtype)
    require_torch()
    import torch

    from moesaic.runtime.commands import tensors

    backend = arguments.backend
    if backend == "auto":
        backend = environment.BACKEND.get()
    if backend == "auto":
        backend = "cuda" if torch.cuda.is_available() else "emulate" if arguments.check else "reference"
    if backend == "reference" and arguments.check:
        console.say("--check compares the reference with itself; name another --backend", kind="warning")
    if backend == "cuda" and not torch.cuda.is_available():
        raise ToolchainError(
            "backend cuda needs a GPU that torch can see, and there is none; "
            "--backend emulate runs the same CUDA on the CPU"
        )
    function = module.entry
    given = tensors.draw_inputs(function, arguments.tokens, arguments.seed, "cuda" if backend == "cuda" else "cpu")
    with (
        reproducer.kept(str(module), "default", f"moesaic run --backend {backend}"),
        console.progress(f"running on {backend}"),
    ):
        ours = tensors.execute(module, backend, given, arguments.seed)
    comparison = None
    if arguments.check:
        with console.progress("running the reference"):
            reference = tensors.execute(module, "reference", given, arguments.seed)
        comparison = tensors.compare(function, given, ours, reference)
    records = [_record(name, tensor) for name, tensor in ours.all().items()]
    if arguments.json:
        report: dict[str, Any] = {
            "backend": backend,
            "tokens": arguments.tokens,
            "seed": arguments.seed,
            "tensors": records,
        }
        if comparison is not None:
            report["check"] = _check_record(comparison)
        console.print_json(_finite(report))
    else:
        title = f"@{function.name} on {backend}"
        print(console.heading(title, f"{arguments.tokens} tokens, seed {arguments.seed}"))
        rows = [
            [r["name"], r["shape"], r["dtype"], *map(_short, (r["mean"], r["min"], r["max"])), _first(r)]
            for r in records
        ]
        print(console.table(("tensor", "shape", "dtype", "mean", "min", "max", "first values"), rows, right={3, 4, 5}))
        if comparison is not None:
            print()
            _print_check(comparison)
    return 0 if comparison is None or comparison.ok else InputError.exit_code


def _record(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    from moesaic.runtime.commands import tensors

    shape, _, dtype = tensors.describe(tensor).rpartition(" ")
    values = tensor.detach().cpu().double().flatten()
    some = bool(values.numel())
    return {
        "name": name,
        "shape": shape,
        "dtype": dtype,
        "mean": float(values.mean()) if some else None,
        "min": float(values.min()) if some else None,
        "max": float(values.max()) if some else None,
        "first": values[:4].tolist(),
    }


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _first(record: dict[str, Any]) -> str:
    return " ".join(_short(v) for v in record["first"]) + (" ..." if record["first"] else "")


def _check_record(comparison: Comparison) -> dict[str, Any]:
    return {
        "ok": comparison.ok,
        "near_ties": list(comparison.near_ties),
        "tokens_with_other_picks": list(comparison.differing),
        "tensors": [
            {"name": f.name, "error": f.error, "allowed": f.allowed, "ok": f.ok, "note": f.note}
            for f in comparison.findings
        ],
    }


def _finite(value: Any) -> Any:
    """The same with texts for NaN and infinities, which JSON does not know."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _print_check(comparison: Comparison) -> None:
    from moesaic.runtime.commands import tensors

    print(console.heading("against the reference"))
    rows = [
        (f.name, "-" if f.error != f.error else f"{f.error:.2g}", f"{f.allowed:.2g}", "ok" if f.ok else "FAIL", f.note)
        for f in comparison.findings
    ]
    print(console.table(("tensor", "max difference", "allowed", "", ""), rows, right={1, 2}))
    print(tensors.TOLERANCES)
    if comparison.near_ties:
        print(f"near-ties: tokens {_listed(comparison.near_ties)} pick otherwise where rounding decides; set aside")
    if comparison.differing:
        print(f"tokens {_listed(comparison.differing)} pick other experts than the reference")
    verdict = "agrees with the reference" if comparison.ok else "differs from the reference"
    word = console.styled("PASS", "bold", "green") if comparison.ok else console.styled("FAIL", "bold", "red")
    print(f"{word}: {verdict}")


def _listed(tokens: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, tokens[:8]))
    return f"{shown}, ... ({len(tokens)} in all)" if len(tokens) > 8 else shown

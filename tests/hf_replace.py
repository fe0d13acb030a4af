"""Whole language models before and after `moesaic.hf.replace`: logits, gradients, router logits, greedy generation.

In float32; in bf16, logits of both against those in float32.

python tests/hf_replace.py                  every family
python tests/hf_replace.py mixtral jamba    some of them
python tests/hf_replace.py --device cuda    on a GPU
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

import tiny_models
import torch

import moesaic as mo

LOGITS, GRADIENT = 1e-5, 1e-4
"""Of the largest value: float32, two layers, sums in another order."""

WRITTEN = 5
STAY = {"JetMoeMoA"}
"""Blocks in these models that are known to stay."""


@dataclass(frozen=True)
class Compared:
    """Largest differences, as parts of the largest values."""

    logits: float
    gradient: float
    router_logits: int
    """How many layers recorded them."""
    report: mo.hf.Report


def tokens(device: str = "cpu", rows: int = 2) -> torch.Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randint(2, tiny_models.VOCABULARY, (rows, 7), generator=g).to(device)


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, (
        ours.shape,
        theirs.shape,
        ours.dtype,
        theirs.dtype,
    )
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12)).item()


def gradients(model: Any, values: list[torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """Of all parameters, from random cotangents of some values."""
    model.zero_grad(set_to_none=True)
    g = torch.Generator().manual_seed(9)
    torch.autograd.backward(values, [torch.randn(v.shape, generator=g).to(v) for v in values])
    return {n: p.grad for n, p in model.named_parameters()}


def compare(family: str, *, backend: str = "auto", device: str = "cpu") -> Compared:
    """Holds a family's model to itself.

    Raises:
        AssertionError: something differs.
    """
    theirs = tiny_models.build(family).to(device)
    ours = copy.deepcopy(theirs)
    before = {n: id(p) for n, p in ours.named_parameters()}
    report = mo.hf.replace(ours, backend=backend)
    assert {b.kind for b in report.blocks if not b.replaced} <= STAY, report
    assert sum(bool(b.replaced) for b in report.blocks) >= 2, report
    assert {n: id(p) for n, p in ours.named_parameters()} == before
    assert list(ours.state_dict()) == list(theirs.state_dict())

    plans = [m._moesaic_block for m in ours.modules() if hasattr(m, "_moesaic_block")]
    ids = tokens(device)
    results = [model(ids) for model in (ours, theirs)]
    logits = difference(results[0].logits, results[1].logits)
    recorded = [_recorded(model, ids) for model in (ours, theirs)]
    assert len(recorded[0]) == len(recorded[1])
    for found, wanted in zip(*recorded, strict=True):
        logits = max(logits, difference(found, wanted))
    wide = 1 if device == "cpu" else 10  # every product of the model is summed in another order there
    assert logits < wide * LOGITS, f"logits differ by {logits:.1e}"

    found, wanted = (
        gradients(model, [r.logits, *(s for s in states if s.requires_grad)])
        for model, r, states in zip((ours, theirs), results, recorded, strict=True)
    )
    gradient = 0.0
    for name, grad in wanted.items():
        got = found[name]
        assert (got is None) == (grad is None), name
        if grad is not None and got is not None and grad.any():
            error = difference(got, grad)
            assert error < wide * GRADIENT, f"the gradient of {name} differs by {error:.1e}"
            gradient = max(gradient, error)
    for plan in (p for p in plans if hasattr(p, "layers")):  # none of them ran as transformers has it
        assert any(layer.backend in ("reference", "emulate", "cuda") for layer in plan.layers.values()), plan
    names = [b.name for b in report.blocks if b.replaced]
    for name in names:  # all of them took part
        inside = [g for n, g in found.items() if f"{name}." in n and g is not None and g.dim() > 1]
        assert inside and all(g.any() for g in inside), name

    effect = difference(_without(ours, report, ids), results[1].logits)
    assert effect > 100 * LOGITS, f"without the blocks' output, logits differ by {effect:.1e} alone"

    written = [tiny_models.greedy(model, ids, WRITTEN) for model in (ours, theirs)]
    assert torch.equal(*written) and written[0].shape == (2, 7 + WRITTEN)
    report.restore()
    assert torch.equal(ours(ids).logits, results[1].logits) or device != "cpu"
    return Compared(logits, gradient, len(recorded[1]), report)


def compare_rounded(family: str, *, backend: str = "auto", device: str = "cpu") -> tuple[float, float]:
    """Errors of a family's model in bf16, with and without replaced blocks, against itself in float32.

    Raises:
        AssertionError: the first is larger.
    """
    exact = tiny_models.build(family).to(device)
    theirs = copy.deepcopy(exact).to(torch.bfloat16)
    ours = copy.deepcopy(theirs)
    assert mo.hf.replace(ours, backend=backend, check=False).replaced
    return errors_of_rounding(ours, theirs, exact, tokens(device, 16))


def errors_of_rounding(ours: Any, theirs: Any, exact: Any, ids: torch.Tensor) -> tuple[float, float]:
    """The median of tokens' relative errors: picks that rounding decides make some large, here or there.

    Raises:
        AssertionError: ours is larger.
    """
    with torch.no_grad():
        wanted = exact(ids).logits
        results = [m(ids).logits for m in (ours, theirs)]
    assert results[0].dtype == results[1].dtype
    errors = [(r.float() - wanted).norm(dim=-1).div(wanted.norm(dim=-1)).median().item() for r in results]
    assert 0 < errors[0] < 1.3 * errors[1] + 1e-3, (
        f"errors of bf16 are {errors[0]:.1e}, without replaced {errors[1]:.1e}"
    )
    return errors[0], errors[1]


def _recorded(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What transformers records of routers, by hooks on their modules; none where it does not."""
    if isinstance(model, tiny_models.Headed):
        model = model.model
    states = getattr(model(ids, output_router_logits=True), "router_logits", None)
    return tuple(states) if states is not None else ()


def _without(model: Any, report: mo.hf.Report, ids: torch.Tensor) -> torch.Tensor:
    """Logits with zeros for what the replaced modules put out."""

    def zeros(module: Any, args: Any, result: Any) -> Any:
        return (torch.zeros_like(result[0]), *result[1:]) if isinstance(result, tuple) else torch.zeros_like(result)

    names = [b.name for b in report.blocks if b.replaced in ("block", "experts")]
    hooks = [model.get_submodule(n).register_forward_hook(zeros) for n in names]
    logits: torch.Tensor = model(ids).logits.detach()
    for hook in hooks:
        hook.remove()
    return logits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", default=sorted(tiny_models.FAMILIES))
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    failed = []
    for family in asked.families:
        start = time.perf_counter()
        try:
            made = compare(family, backend=asked.backend, device=asked.device)
            rounded = compare_rounded(family, backend=asked.backend, device=asked.device)
        except Exception as error:  # noqa: BLE001 - a report goes on
            failed.append(family)
            where = traceback.extract_tb(error.__traceback__)[-1]
            print(f"{family:22} {type(error).__name__}: {error} ({where.filename}:{where.lineno})", flush=True)
            continue
        how = ", ".join(dict.fromkeys(b.text for b in made.report.blocks if b.replaced))
        print(
            f"{family:22} logits {made.logits:.1e}  gradients {made.gradient:.1e}  {made.router_logits} recorded  "
            f"bf16 {rounded[0]:.1e} ({rounded[1]:.1e} before)  "
            f"{time.perf_counter() - start:4.1f} s  {how}",
            flush=True,
        )
    print(
        f"{len(asked.families) - len(failed)} of {len(asked.families)} families: logits, gradients, greedy tokens alike"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

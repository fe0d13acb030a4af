"""Layers drawn at random: lowered, printed as CUDA, and run on the emulator and on a GPU beside float64.

A seed that fails stands in the name of its test. From the command line, any number of them::

    python tests/test_random_layers.py 100 400                          # those seeds, on the emulator
    python tests/test_random_layers.py 0 2000 --backend cuda --jobs 8   # on a GPU: minutes
    python tests/test_random_layers.py 0 2000 --seconds 600 --save failures
    python tests/test_random_layers.py 10000 10300                      # with one expert, one pick, rows of one column

What fails is shrunk, printed, and with ``--save`` written as ``SEED.moe``, which ``moesaic opt``, ``compile`` and
``run`` read. The exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import multiprocessing
import random
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import random_layers
import torch
from random_layers import OF_ROUTER, Case
from routing import device_of

import moesaic as mo
from moesaic.runtime.program import program_of, with_gradients
from moesaic.runtime.signature import signature_of
from moesaic.runtime.torch_ops import _recording, _reversal

LOWERED = 40
EMULATED = (7, 253, random_layers.NARROW + 44, 70774)
"""The second sends no cotangent to one of its losses; the third has one expert, the last one number, in which four
picks cancel."""
ON_GPU = (*range(200), 484, 746, *range(random_layers.NARROW, random_layers.NARROW + 20))
ALLOWED = {torch.float32: 2.0**-17, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}
"""Of the largest value: a few products after one another, of operands rounded to 2^-24, 2^-11 and 2^-9."""
STORED = {torch.float32: 0.0, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float64: 0.0}
"""What four roundings to the type may change: autograd adds up gradients from several sides in it."""
FEW = 8
"""So few numbers, such as sums over all tokens, may be what is left of larger ones, and do not say how large."""
CANCELLED = 1.0
"""Cotangents and what they meet are near 1, gradients differences of such numbers: smaller ones are not more exact."""

Tensors = dict[str, torch.Tensor]


def run(case: Case, given: Tensors, backend: str, device: str, stored: Tensors | None = None) -> Tensors:
    """Results, and the gradients for random cotangents, which are rounded to the types of the results `stored`; of a
    third of the cases for some of the cotangents alone, and of some inputs alone."""
    inputs = {n: t.detach().to(device) for n, t in given.items()}
    frozen = random_layers.frozen(case, list(inputs))
    for name, tensor in inputs.items():
        tensor.requires_grad_(tensor.is_floating_point() and name not in ("bias", "num_tokens", *frozen))
    result = mo.compile(case.declared, backend=backend)(**inputs)
    fields = result._asdict() if hasattr(result, "_asdict") else {"hidden": result}
    made: Tensors = {n: v for n, v in fields.items() if n != "losses"}
    made |= {f"loss {n}": v for n, v in fields.get("losses", {}).items()}
    g = torch.Generator().manual_seed(case.seed)
    floats = {n: v for n, v in made.items() if v.requires_grad}
    sent = [
        torch.randn(v.shape, generator=g, dtype=torch.float64).to((stored or made)[n].dtype).to(v.device, v.dtype)
        for n, v in floats.items()
    ]
    names = random_layers.sent(case, list(floats))
    kept = [(value, cotangent) for (name, value), cotangent in zip(floats.items(), sent, strict=True) if name in names]
    torch.autograd.backward(*map(list, zip(*kept, strict=True)))
    made = {n: v.detach().cpu() for n, v in made.items()}
    return made | {f"d {n}": t.grad.cpu() for n, t in inputs.items() if t.grad is not None}


def check(case: Case, backend: str) -> None:
    """Compares a backend with the reference in float64."""
    given = case.inputs()
    wide = {n: t.double() if t.is_floating_point() and n not in OF_ROUTER else t for n, t in given.items()}
    if "weights" in given:
        wide["weights"] = given["weights"].float()
    found = run(case, given, backend, device_of(backend))
    wanted = run(case, wide, "reference", "cpu", found)
    assert found.keys() == wanted.keys()
    # Rounding before the picks may turn one, rounding elsewhere a clamp or a sign: rows that it did not must be right.
    rounded = case.dtype != torch.float32 and not isinstance(case.declared, mo.Router)
    for name, right in wanted.items():
        assert found[name].shape == right.shape, name
        if not right.is_floating_point():
            if not rounded or isinstance(case.declared, mo.Experts):
                assert torch.equal(found[name], right), name
            continue
        if not right.numel():
            continue
        largest = right.abs().max().item()
        error = (found[name].double() - right).abs()
        assert not error.isnan().any(), f"{name}: not a number"
        if rounded:
            allowed = 0.15 * max(largest, 1.0) if right.numel() < FEW else ALLOWED[case.dtype] * max(largest, 1e-6)
            steps = torch.finfo(found[name].dtype)  # numbers so small are multiples of one
            allowed = max(allowed, 2 * steps.smallest_normal * steps.eps)
            wrong = (error > allowed).double().mean().item()
            assert wrong < 0.25, f"{name}: {wrong:.0%} of it is off"
        else:
            allowed = ALLOWED[torch.float32] + STORED[found[name].dtype]
            cancels = name.startswith("d ") or right.numel() < FEW
            least = CANCELLED if cancels else 1e-3  # a sum of products near 1 may cancel, too
            worst = error.max().item()
            assert worst <= allowed * max(largest, least), f"{name}: off by {worst:.3g} of {largest:.3g}"


def test_cases_hold_every_kind() -> None:
    """Of what can be drawn, nothing is missing among those that are tried on a GPU."""
    seen: Counter[Any] = Counter()
    for seed in ON_GPU:
        case = random_layers.case(seed)
        declared = case.declared
        seen.update([type(declared).__name__, case.dtype, case.masked, case.tokens > 24, len(case.shape)])
        if isinstance(declared, mo.Experts):
            seen.update(
                [case.ids, case.indices, case.weights, case.top_k, declared.weight_on, declared.capacity is not None]
            )
        else:
            router = declared.router if isinstance(declared, mo.MoE) else declared
            seen.update([str(router.score), router.order, *declared.outputs, *map(str, router.losses.values())])
    wanted = [
        "Router", "Experts", "MoE", torch.float32, torch.bfloat16, torch.float16, True, False, 1, 2, *random_layers.IDS,
        torch.int16, torch.int64, "input", "middle", "sigmoid", "softmax", "topk_then_score", "bitmap", "logsumexp",
        str(mo.LoadBalance(num_tokens="given")), str(mo.LoadBalance(convention="transformers")),
        str(mo.LoadBalance(coef=0.3, segments="batch_first")), str(mo.LoadBalance(coef=0.3, segments="sequence_first")),
        str(mo.Entropy(coef=-0.2)),
    ]  # fmt: skip
    assert [w for w in wanted if not seen[w]] == []


@pytest.mark.parametrize("seed", [*range(0, LOWERED, 10), random_layers.NARROW])
def test_they_become_kernels(seed: int) -> None:
    for number in range(seed, seed + 10):
        program = program_of(random_layers.case(number).module)
        reached = program.backward_function(program.float_results) is not None  # a constant has no gradient
        for kind in ("forward", "training", *(("backward",) if reached else ())):
            kernels = program.executable(kind, "sm_90a", ()).kernels
            assert kernels and len({k.symbol for k in kernels}) == len(kernels), number


@pytest.mark.parametrize("seed", [*range(0, LOWERED, 10), 250, 390, random_layers.NARROW])
def test_backward_of_some_cotangents_does_with_what_is_kept(seed: int) -> None:
    """Forward knows nothing of which results will have one: it keeps what backward of all of them takes."""
    for number in range(seed, seed + 10):
        program = program_of(random_layers.case(number).module)
        recording = _recording(program.key, True)
        rng, count = random.Random(number), len(recording.floats)
        some = [s for n in range(1, count) for s in itertools.combinations(recording.floats, n)]
        matrices = [n for n, _ in signature_of(program.key).matrices]
        frozen = tuple(n for n in matrices if rng.random() < 0.5)
        keys = [program.key, *([with_gradients(program.key, "", (), frozen)] if frozen else [])]
        for given, key in itertools.product(rng.sample(some, min(3, len(some))), keys):
            _reversal(key, given)  # raises where it cannot be lowered


@pytest.mark.emulate
@pytest.mark.parametrize("seed", EMULATED)
def test_on_the_emulator(seed: int) -> None:
    check(random_layers.case(seed), "emulate")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", ON_GPU)
def test_on_a_gpu(seed: int) -> None:
    check(random_layers.case(seed), "cuda")


def test_a_failure_shrinks_and_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To what it takes to fail: here, a loss on z beside experts that have biases."""
    found = next(
        seed
        for seed in range(1000)
        if isinstance(c := random_layers.case(seed).declared, mo.MoE) and "z" in c.router.losses and c.experts.bias
    )

    def broken(case: Case, backend: str) -> None:
        run(case, case.inputs(), "reference", "cpu")  # every attempt can be declared and called
        declared = case.declared
        assert not (isinstance(declared, mo.MoE) and "z" in declared.router.losses and declared.experts.bias), "broken"

    monkeypatch.setattr(f"{__name__}.check", broken)
    assert tried(found, "reference", str(tmp_path), attempts=200) is not None
    text = (tmp_path / f"{found}.moe").read_text(encoding="utf-8")
    module = mo.parse(text)
    assert "AssertionError: broken" in text and "z_loss" in str(module) and "down_proj_bias" in str(module)
    assert len(str(module).splitlines()) < len(str(random_layers.case(found).module).splitlines())
    monkeypatch.setattr(f"{__name__}.check", lambda case, backend: None)
    assert tried(found, "reference", None) is None


# From the command line ------------------------------------------------------------------------------------------------

LAYERS_OF_PROCESS = 200
FAULTS = (AssertionError, RuntimeError, ValueError, TypeError, mo.MoesaicError)


def tried(seed: int, backend: str, save: str | None, attempts: int = 60) -> str | None:
    """What is wrong with the layer of a seed, shrunk; None if nothing is."""
    case = random_layers.case(seed)

    def fault_of(case: Case) -> str | None:
        try:
            check(case, backend)
        except FAULTS:
            return traceback.format_exc(limit=-2)
        return None

    first = fault_of(case)
    if first is None:
        return None
    small = random_layers.shrunk(case, lambda c: fault_of(c) is not None, attempts)
    fault = fault_of(small) or f"{first}which it did not do again"
    text = f"seed {seed}, on {backend}\n{small}\n{fault}"
    if save is not None:
        Path(save).mkdir(parents=True, exist_ok=True)
        comment = "".join(f"// {line}".rstrip() + "\n" for line in text.splitlines())
        (Path(save) / f"{seed}.moe").write_text(f"{comment}{small.module}\n", encoding="utf-8")
    return text


def _one_thread() -> None:
    torch.set_num_threads(1)


def main() -> int:
    """Tries seeds in several processes; gives the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int, help="the first seed that is not tried")
    parser.add_argument("--backend", choices=("emulate", "cuda", "reference"), default="emulate")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no seed is started after that")
    parser.add_argument("--save", metavar="FOLDER", help="write what fails there")
    args = parser.parse_args()
    start, done, bad = time.monotonic(), 0, 0
    seeds = iter(range(args.first, args.last))
    context = multiprocessing.get_context("spawn")
    # A process keeps the kernels of every layer, and may map so many: after a while there is a new one.
    with concurrent.futures.ProcessPoolExecutor(
        args.jobs, mp_context=context, initializer=_one_thread, max_tasks_per_child=LAYERS_OF_PROCESS
    ) as pool:
        running: set[concurrent.futures.Future[str | None]] = set()
        while True:
            while len(running) < args.jobs and time.monotonic() - start < args.seconds:
                seed = next(seeds, None)
                if seed is None:
                    break
                running.add(pool.submit(tried, seed, args.backend, args.save))
            if not running:
                break
            finished, running = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in finished:
                done += 1
                fault = future.result()
                if fault is not None:
                    bad += 1
                    print(fault, flush=True)
                if done % 20 == 0:
                    took = time.monotonic() - start
                    print(f"{done} tried, {bad} failed, {took:.0f} s", file=sys.stderr, flush=True)
    print(f"{bad} of {done} failed")
    return 1 if bad or not done else 0


if __name__ == "__main__":
    sys.exit(main())

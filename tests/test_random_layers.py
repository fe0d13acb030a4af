"""Layers drawn at random: lowered, printed as CUDA, and run on the emulator and on a GPU beside float64.

A seed that fails stands in the name of its test; ``python tests/test_random_layers.py 100 400`` tries those seeds on
the emulator and prints what fails.
"""

from __future__ import annotations

import sys
import traceback

import pytest
import random_layers
import torch
from routing import device_of

import moesaic as mo
from moesaic.ir.types import DType
from moesaic.runtime.program import program_of

TOKENS = 11
LOWERED = 150
EMULATED = (3, 14)
ON_GPU = tuple(range(200))
ALLOWED = {torch.float32: 2.0**-17, torch.bfloat16: 2.0**-5}
"""Of the largest value: a few products after one another, of operands rounded to 2^-24 and 2^-9."""

Tensors = dict[str, torch.Tensor]


def run(drawn: mo.MoE | mo.Experts, given: Tensors, seed: int, backend: str, device: str) -> Tensors:
    """Results, and the gradients for random cotangents."""
    inputs = {n: t.detach().to(device) for n, t in given.items()}
    for name, tensor in inputs.items():
        tensor.requires_grad_(tensor.is_floating_point() and name != "bias")
    result = mo.compile(drawn, backend=backend)(**inputs)
    fields = result._asdict() if hasattr(result, "_asdict") else {"hidden": result}
    made: Tensors = {n: v for n, v in fields.items() if n != "losses"}
    made |= {f"loss {n}": v for n, v in fields.get("losses", {}).items()}
    g = torch.Generator().manual_seed(seed)
    floats = [v for v in made.values() if v.requires_grad]
    torch.autograd.backward(
        floats, [torch.randn(v.shape, generator=g, dtype=torch.float64).to(v.device, v.dtype) for v in floats]
    )
    made = {n: v.detach().cpu() for n, v in made.items()}
    return made | {f"d {n}": t.grad.cpu() for n, t in inputs.items() if t.grad is not None}


def check(seed: int, backend: str) -> None:
    drawn = random_layers.layer(seed)
    masked = isinstance(drawn, mo.MoE) and seed % 4 == 1
    dtype = torch.bfloat16 if seed % 5 == 2 else torch.float32
    given = random_layers.inputs_of(drawn, TOKENS, dtype, seed, masked=masked)
    of_router = ("bias", "gate_bias", "expert_scale", "router_scale", "weights")
    wide = {n: t.double() if t.is_floating_point() and n not in of_router else t for n, t in given.items()}
    wanted = run(drawn, wide, seed, "reference", "cpu")
    found = run(drawn, given, seed, backend, device_of(backend))
    assert found.keys() == wanted.keys()
    for name, right in wanted.items():
        if not right.is_floating_point():
            if dtype is torch.float32:
                assert torch.equal(found[name], right), name
            continue
        largest = right.abs().max().item() if right.numel() else 0.0
        error = (found[name].double() - right).abs()
        if dtype is torch.bfloat16:  # rounding may turn a pick, a clamp or a sign: rows that it did not must be right
            few = right.numel() < 8  # sums over all tokens, in which much cancels
            allowed = 0.15 * max(largest, 1.0) if few else ALLOWED[dtype] * max(largest, 1e-6)
            wrong = (error > allowed).double().mean().item() if right.numel() else 0.0
            assert wrong < 0.25, f"{name}: {wrong:.0%} of it is off"
        else:
            worst = error.max().item() if right.numel() else 0.0
            assert worst <= ALLOWED[dtype] * max(largest, 1e-6), f"{name}: off by {worst:.3g} of {largest:.3g}"


@pytest.mark.parametrize("seed", range(0, LOWERED, 10))
def test_they_become_kernels(seed: int) -> None:
    for number in range(seed, seed + 10):
        drawn = random_layers.layer(number)
        dtype = (DType.F32, DType.BF16)[number % 2]
        program = program_of(
            random_layers.module_of(drawn, dtype, masked=number % 4 == 1 and isinstance(drawn, mo.MoE))
        )
        for kind in ("forward", "training", "backward"):
            kernels = program.executable(kind, "sm_90a", ()).kernels
            assert kernels and len({k.symbol for k in kernels}) == len(kernels), number


@pytest.mark.emulate
@pytest.mark.parametrize("seed", EMULATED)
def test_on_the_emulator(seed: int) -> None:
    check(seed, "emulate")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", ON_GPU)
def test_on_a_gpu(seed: int) -> None:
    check(seed, "cuda")


if __name__ == "__main__":
    bad = 0
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        try:
            check(number, "emulate")
        except (AssertionError, RuntimeError, ValueError, mo.MoesaicError):
            bad += 1
            print(f"seed {number}: {random_layers.layer(number)}", traceback.format_exc(limit=-2), sep="\n", flush=True)
    print(f"{bad} of {int(sys.argv[2]) - int(sys.argv[1])} failed")

"""Rows that an expert's last tile has besides its own: how many tiles there are, and results to the bit."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from device_kernels import Run, everywhere

import moesaic as mo
from moesaic.codegen.disassemble import disassemble
from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.target import Target
from moesaic.ir.errors import UnsupportedError
from moesaic.ir.ops.launch import Kernel
from moesaic.ir.types import DType
from moesaic.passes.card import H100
from moesaic.passes.cost import Extents
from moesaic.passes.cost_model import estimated_us
from moesaic.passes.product_shape import TAIL_ROWS
from moesaic.passes.space import spaces_of
from moesaic.passes.specialize import Specialize
from moesaic.runtime.kernels import compiled_kernel
from moesaic.runtime.program import Program, program_of

KERNELS = ("experts_down_proj", "experts_backward_gate_up_proj")
TAILS = "points=" + ",".join(f"{kernel}:tail={TAIL_ROWS}" for kernel in KERNELS)

COUNTING = """#include "moesaic/experts.cuh"

extern "C" __global__ void __launch_bounds__(32) counting(const int* rows, int* out, int count) {
  for (int i = threadIdx.x; i < count; i += 32) {
    moesaic::store_one(out + i, moesaic::tiles_with_tail<128, 32>(moesaic::load_one(rows + i)));
  }
}
"""


@everywhere
def test_tiles_of_an_expert(run: Run) -> None:
    """As few as there can be; all but the last have 128 rows, and that has one at least."""
    rows = np.concatenate([np.arange(900), [2**31 - 129, 2**31 - 128]]).astype(np.int32)
    tiles = run(COUNTING, "counting", [rows], np.full(len(rows), -7, np.int32), [len(rows)], block=32)
    assert tiles[0] == 0 and tiles[-1] == 2**24 - 1
    last = rows[1:].astype(np.int64) - 128 * (tiles[1:].astype(np.int64) - 1)
    assert last.min() == 1 and last.max() == 160
    assert (last[tiles[1:] > 1] > TAIL_ROWS).all(), "or they would need no tile of their own"


def gradients(
    backend: str, passes: str, hidden: int, counts: tuple[int, ...], dtype: torch.dtype
) -> list[torch.Tensor]:
    """The result and all gradients of experts with so many rows each."""
    device, generator = ("cpu" if backend == "emulate" else "cuda"), torch.Generator().manual_seed(1)
    experts, inner = len(counts), 136
    picks = torch.repeat_interleave(torch.arange(experts), torch.tensor(counts))
    picks = picks[torch.randperm(len(picks), generator=generator)].to(torch.int32)[:, None].to(device)
    shapes = ((len(picks), hidden), (len(picks), 1), (experts, 2 * inner, hidden), (experts, hidden, inner))
    drawn = [0.3 * torch.randn(*shape, generator=generator) for shape in shapes]
    x, weights, *matrices = (t.to(dtype).to(device).requires_grad_() for t in drawn)
    layer = mo.compile(mo.Experts(experts, hidden, inner), backend=backend, passes=passes)
    stored = "bf16" if dtype is torch.bfloat16 else "fp16"
    made = layer.layer(1, dtype=stored, weights_dtype=stored).kernels
    tails = [symbol for symbol, kernel in made.items() if "kTail" in kernel.source]
    assert tails == (list(KERNELS) if TAILS in passes else [])
    y = layer(x, picks, weights, *matrices)
    cotangent = torch.randn(y.shape, generator=generator).to(dtype).to(device)
    return [y.detach(), *torch.autograd.grad(y, (x, weights, *matrices), cotangent)]


@pytest.mark.parametrize(
    ("hidden", "counts", "dtype"),
    [
        (512, (160, 1, 0, 33, 129, 289, 161), torch.bfloat16),
        (328, (32, 128, 288, 0, 127, 300, 159), torch.float16),  # columns end within a tile, and within a box
    ],
)
@pytest.mark.parametrize(
    "backend", [pytest.param("emulate", marks=pytest.mark.emulate), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_the_same_bits(hidden: int, counts: tuple[int, ...], dtype: torch.dtype, backend: str) -> None:
    if backend == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is Hopper's")
    common = "target=sm_90a tokens=many" if backend == "emulate" else "tokens=many"
    found, wanted = (gradients(backend, f"specialize{{{common} {p}}}", hidden, counts, dtype) for p in (TAILS, ""))
    for made, one in zip(found, wanted, strict=True):
        assert torch.equal(made, one) and bool(one.abs().max() > 0)


def program(passes: str = "") -> Program:
    module = mo.Experts(128, 2048, 768, dtype="bf16").module(DType.BF16, 8, DType.I32, DType.BF16)
    return program_of(module, passes) if passes else program_of(module)


def kernels(passes: str) -> dict[str, GeneratedKernel]:
    made = program(passes)
    given = (("training", ()), ("backward", made.float_results))
    both = (made.executable(kind, "sm_90a", (), cotangents) for kind, cotangents in given)
    return {kernel.symbol: kernel for executable in both for kernel in executable.kernels}


@pytest.mark.nvrtc
def test_they_stay_in_registers_and_in_flight() -> None:
    made = kernels(f"specialize{{{TAILS}}}")
    for symbol in KERNELS:
        compiled = compiled_kernel(made[symbol], Target.parse("sm_90a"))
        assert not compiled.resources.uses_local_memory and "(C75" not in compiled.log, compiled.log
        products = re.findall(r"HGMMA\.64x(\d+)x16|WARPGROUP\.ARRIVE", disassemble(compiled.cubin))
        groups = ["", *["256"] * 4, "", *["32", "32", "256"] * 4]
        assert products == groups, "one group of products a stage, without a tail and with one"


def test_which_kernels_may_have_them() -> None:
    made = program()
    spaces = {}
    for kind in ("training", "backward"):
        function = made.planned(kind, made.float_results if kind == "backward" else ())
        planned = [op for op in function.body.ops if isinstance(op, Kernel)]
        spaces |= {s.op.symbol: s for s in spaces_of(planned, Specialize(), Target.parse("sm_90a"), {})}
    takes = {symbol for symbol, space in spaces.items() if any(p.get("tail") == str(TAIL_ROWS) for p in space.points())}
    assert takes == set(KERNELS)
    down = spaces[KERNELS[0]]
    assert down.default["tail"] == "0"
    in_turn = {**down.default, "schedule": "pingpong", "rows": "64", "tail": str(TAIL_ROWS)}
    assert "two warpgroups share" in down.problem(in_turn)
    assert "shared memory" in down.problem({**down.default, "stages": "5", "tail": str(TAIL_ROWS)})
    # Of 264 rows or so, most experts take two tiles for three; of 300, none does.
    gains = []
    for rows in (264, 300):
        load = Extents(16 * rows, 128 * rows, experts=128)
        with_tails = estimated_us(down, {**down.default, "tail": str(TAIL_ROWS)}, load, H100)
        gains.append(estimated_us(down, down.default, load, H100) / with_tails)
    assert gains[0] > 1.1 > gains[1]
    assert "has 32 rows besides, or none" in down.problem({**down.default, "tail": "16"})
    for wrong in ("experts_gate_up_proj:tail=32", "experts_down_proj:tail=16"):
        with pytest.raises(UnsupportedError, match="a tile has 32 rows besides, found"):
            kernels(f"specialize{{points={wrong}}}")

"""Rows that an expert's last pair of tiles has besides: how many tiles there are, and results to the bit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from device_kernels import ORDERS, Run, changed_headers, everywhere, skip_without_wgmma

import moesaic as mo
from moesaic.codegen import nvrtc
from moesaic.codegen.disassemble import disassemble
from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.target import Target
from moesaic.ir.errors import EmulationError, UnsupportedError
from moesaic.ir.ops.launch import Kernel
from moesaic.ir.types import DType
from moesaic.passes import product_shape
from moesaic.passes.card import H100
from moesaic.passes.cost import Extents
from moesaic.passes.cost_model import estimated_us
from moesaic.passes.product_shape import TAIL_ROWS
from moesaic.passes.space import spaces_of
from moesaic.passes.specialize import Specialize
from moesaic.runtime.execute import RUNNERS
from moesaic.runtime.kernels import compiled_kernel
from moesaic.runtime.program import Program, program_of

KERNELS = ("experts_down_proj", "experts_backward_gate_up_proj")
NONE = "points=" + ",".join(f"{kernel}:tail=0" for kernel in KERNELS)

IN_BANDS = 264
"""The hidden size of experts whose products take rows in bands."""

COUNTING = """#include "moesaic/experts.cuh"

extern "C" __global__ void __launch_bounds__(32) counting(const int* rows, int* out, int count) {
  for (int i = threadIdx.x; i < count; i += 32) {
    const int count_of_rows = moesaic::load_one(rows + i), tiles = moesaic::tiles_with_tail<128, 32>(count_of_rows);
    moesaic::store_one(out + i, tiles);
    for (int back = 1; back <= 3; ++back) {  // of the last tile, the one before, and the one before that
      const int tail = tiles < back ? 0 : moesaic::rows_of_tail<128>(count_of_rows, tiles, tiles - back);
      moesaic::store_one(out + back * count + i, tail);
    }
  }
}
"""


@everywhere
def test_tiles_of_an_expert(run: Run) -> None:
    """Whole pairs have a tail of so few rows; each row is in one tile, or in the tail of the last pair."""
    rows = np.concatenate([np.arange(900), [2**31 - 129, 2**31 - 128]]).astype(np.int32)
    found = run(COUNTING, "counting", [rows], np.full(4 * len(rows), -7, np.int32), [len(rows)], block=32)
    tiles, *tails = found.reshape(4, -1).astype(np.int64)
    left = rows - 128 * tiles
    has_tail = left > 0
    assert list(rows[has_tail]) == [*range(257, 289), *range(513, 545), *range(769, 801)]
    assert (tiles[has_tail] % 2 == 0).all() and (left[~has_tail] > -128).all()
    assert tiles[-1] == 2**24 - 1
    for tail, wanted in zip(tails, (left, left, 0 * left), strict=True):
        assert (tail == np.where(has_tail, wanted, 0)).all()


def drawn(counts: Sequence[int], hidden: int, inner: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """x, one pick and a weight for each row of it, in any order, and the matrices of experts with so many rows each."""
    generator = torch.Generator().manual_seed(1)
    picks = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    picks = picks[torch.randperm(len(picks), generator=generator)].to(torch.int32)[:, None]
    shapes = ((len(picks), hidden), (len(picks), 1), (len(counts), 2 * inner, hidden), (len(counts), hidden, inner))
    x, *others = ((0.3 * torch.randn(*shape, generator=generator)).to(dtype).to(device) for shape in shapes)
    return [x, picks.to(device), *others]


def gradients(
    backend: str, passes: str, hidden: int, counts: Sequence[int], dtype: torch.dtype, times: int = 1
) -> list[torch.Tensor]:
    """The result and all gradients of experts with so many rows each, the same so many times."""
    experts, inner, device = len(counts), 200, "cpu" if backend == "emulate" else "cuda"
    x, picks, *others = drawn(counts, hidden, inner, dtype, device)
    sent = [t.requires_grad_() for t in (x, *others)]
    layer = mo.compile(mo.Experts(experts, hidden, inner), backend=backend, passes=passes)
    stored = "bf16" if dtype is torch.bfloat16 else "fp16"
    made = layer.layer(1, dtype=stored, weights_dtype=stored).kernels
    tails = [symbol for symbol, kernel in made.items() if "kTail" in kernel.source]
    assert tails == ([] if NONE in passes else list(KERNELS))
    assert all(("kBand" in made[symbol].source) == (hidden == IN_BANDS) for symbol in KERNELS)
    cotangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(dtype).to(device)

    def once() -> list[torch.Tensor]:
        y = layer(x, picks, *others)
        return [y.detach(), *torch.autograd.grad(y, sent, cotangent)]

    found = once()
    for _ in range(times - 1):
        assert all(torch.equal(again, one) for again, one in zip(once(), found, strict=True))
    return found


def assert_the_same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for made, one in zip(found, wanted, strict=True):
        assert torch.equal(made, one) and bool(one.abs().max() > 0)


@pytest.mark.parametrize(
    ("hidden", "counts", "dtype"),
    [
        (512, (288, 1, 0, 257, 160, 289, 33), torch.bfloat16),
        (328, (32, 129, 272, 0, 300, 541, 159), torch.float16),  # columns end within a tile, and within a box
        (IN_BANDS, (2324, 5, 257), torch.bfloat16),
    ],
)
@pytest.mark.parametrize(
    "backend", [pytest.param("emulate", marks=pytest.mark.emulate), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_the_same_bits(
    hidden: int, counts: tuple[int, ...], dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hidden == IN_BANDS:  # as if weights were large ones
        monkeypatch.setattr(product_shape, "_LARGE_WEIGHT", 0)
    if backend == "cuda":
        skip_without_wgmma()
    common = "target=sm_90a tokens=many" if backend == "emulate" else "tokens=many"
    found, wanted = (gradients(backend, f"specialize{{{common} {p}}}", hidden, counts, dtype) for p in ("", NONE))
    assert_the_same(found, wanted)


@pytest.mark.gpu
def test_the_same_bits_200_times() -> None:
    """Many pairs of blocks, each with several tiles, of which half have a tail; and those of kernels without."""
    skip_without_wgmma()
    counts = tuple(257 + 5 * e % 64 for e in range(64))  # up to 288 and beyond
    found = gradients("cuda", "specialize{tokens=many}", 2048, counts, torch.bfloat16, times=200)
    assert_the_same(found, gradients("cuda", f"specialize{{tokens=many {NONE}}}", 2048, counts, torch.bfloat16))


# In which header a statement is replaced, by nothing where no other is given.
MISTAKES: dict[str, tuple[str, ...]] = {
    "comes_at_once": ("wgmma_stages.cuh", "mbarrier_wait(vacated(), tails_++ % 2);"),
    "left_too_early": ("staged.cuh", "stored_wait<0>();\n      then();", "then();"),
    "counted_wrongly": ("wgmma_stages.cuh", "Shape::kStages * kTailBytes);", "kTailBytes);"),
    "read_at_once": ("tile_wgmma.cuh", "mbarrier_wait(tail_there(), tails_++ % 2);"),
    "of_another_tail": ("tile_wgmma.cuh", "tail_there(), tails_++ % 2", "tail_there(), 0"),
    "released_early": ("tile_wgmma.cuh", "    wgmma_wait<1>(pending);\n#pragma unroll", "\n#pragma unroll"),
    "not_released": ("tile_wgmma.cuh", "release(stages[n]);"),
    "leaves_while_read": ("tile_wgmma.cuh", "sync_threads<kWorkers>(kGroups + 1);"),
}


@pytest.mark.emulate
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Three pairs of blocks: results are on their way when a tail comes, and one block has several.
    counts = (256, 256, 256, 288, 257, 288, 272, 288, 260)
    inner = 264 + 8 * list(MISTAKES).index(mistake)  # other kernels for each: what has been made is not made again
    given = drawn(counts, 256, inner, torch.bfloat16, "cpu")

    def result(passes: str) -> torch.Tensor:
        passes = f"specialize{{target=sm_90a tokens=many {passes}}}"
        return mo.compile(mo.Experts(len(counts), 256, inner), backend="emulate", passes=passes)(*given)

    wanted = result(NONE)
    assert torch.equal(result(""), wanted) and bool(wanted.abs().max() > 0)
    folder = changed_headers(tmp_path, *MISTAKES[mistake])
    monkeypatch.setattr(nvrtc, "helper_include_dirs", lambda: [folder])

    def is_wrong(order: int) -> bool:
        monkeypatch.setattr(RUNNERS["emulate"], "order", order)
        try:
            return not torch.equal(result("points=experts_down_proj:tail=32"), wanted)
        except EmulationError:
            return True

    assert any(is_wrong(order) for order in ORDERS)


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
    made = kernels("")
    for symbol in KERNELS:
        compiled = compiled_kernel(made[symbol], Target.parse("sm_90a"))
        assert not compiled.resources.uses_local_memory and "(C75" not in compiled.log, compiled.log
        products = re.findall(r"HGMMA\.64x(\d+)x16|WARPGROUP\.ARRIVE", disassemble(compiled.cubin))
        stage, tails_stage = ["", *["256"] * 4], ["", *["32", "256"] * 4]
        begins = [*stage, *stage, "", *["32"] * 8, *tails_stage]  # the tail's of the first two stages come late
        groups = [*stage, *begins, *tails_stage]
        assert products == groups, "one group of products a stage in either loop"


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
    assert down.default["tail"] == str(TAIL_ROWS)
    in_turn = {**down.default, "schedule": "pingpong", "rows": "64", "tail": str(TAIL_ROWS)}
    assert "two warpgroups share" in down.problem(in_turn)
    assert "shared memory" in down.problem({**down.default, "stages": "5", "tail": str(TAIL_ROWS)})
    # Of 264 rows or so, most experts take two tiles for three; of 300, none does.
    gains = []
    for rows in (264, 300):
        load = Extents(16 * rows, 128 * rows, experts=128)
        without = estimated_us(down, {**down.default, "tail": "0"}, load, H100)
        gains.append(without / estimated_us(down, down.default, load, H100))
    assert gains[0] > 1.1 > gains[1]
    assert "have 32 rows besides, or none" in down.problem({**down.default, "tail": "16"})
    wrong = {"experts_gate_up_proj:tail=32": "all there is", "experts_down_proj:tail=16": "tiles have 32 rows besides"}
    for point, problem in wrong.items():
        with pytest.raises(UnsupportedError, match=problem):
            kernels(f"specialize{{points={point}}}")


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("experts", "inner", "alignment", "tails"),
    [
        (4, 256, (), KERNELS),
        (4, 204, (), KERNELS[1:]),
        (4, 256, (4,) * 6, ()),
        (4, 192, (), KERNELS[1:]),
        (5000, 256, (), ()),
    ],
    ids=["whole", "rows", "addresses", "short", "many"],
)
def test_what_comes_in_no_boxes_has_none(
    experts: int, inner: int, alignment: tuple[int, ...], tails: tuple[str, ...]
) -> None:
    """Tiles by wgmma are asked for: lines that are no whole chunks come one by one, and long tables leave no room."""
    declared = mo.Experts(experts, 256, inner, dtype="bf16").module(DType.BF16, 2, DType.I32, DType.BF16)
    asked = program_of(declared, "specialize{tile=cooperative}")
    given = (("training", ()), ("backward", asked.float_results))
    executables = [asked.executable(kind, "sm_90a", alignment, cotangents) for kind, cotangents in given]
    made = {kernel.symbol: kernel for executable in executables for kernel in executable.kernels}
    assert {symbol for symbol, kernel in made.items() if "kTail" in kernel.source} == set(tails)
    for symbol in KERNELS:
        assert "WgmmaTile" in made[symbol].source
        compiled_kernel(made[symbol], Target.parse("sm_90a"))

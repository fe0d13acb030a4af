"""SimtTile and MmaTile of tile.cuh, on the emulator and on a GPU; mistakes in all tiles, and their machine code."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

import numpy as np
import pytest
from device_kernels import changed_headers, emulate
from tiles import (
    DEFAULT_MMA,
    DEFAULT_SIMT,
    DEFAULT_WGMMA,
    ORDERS,
    TYPES,
    Case,
    Run,
    assert_right,
    check,
    drawn_cases,
    everywhere,
    kernel_of,
    product,
    whole,
)

from moesaic.codegen import disassemble, nvrtc
from moesaic.codegen.target import Target
from moesaic.ir.errors import EmulationError
from moesaic.runtime.kernels import NVRTC_OPTIONS

# SimtTile -------------------------------------------------------------------------------------------------------------

SIMT_SHAPES = ((32, 64, 16, 2, 64), (64, 128, 16, 2, 256), (16, 64, 8, 2, 32))
SIMT = [
    case for dtype in TYPES for case in drawn_cases("SimtTile", dtype, SIMT_SHAPES)[:: 1 if dtype == "float" else 2]
]


@everywhere
@pytest.mark.parametrize("case", SIMT, ids=str)
def test_simt_tiles(run: Run, case: Case) -> None:
    check(run, case, SIMT)


# One multiply-add after the other: what every element of a SimtTile is, whatever its shape.
IN_ORDER = """#include "moesaic/base.cuh"
extern "C" __global__ void in_order(const float* a, const float* b, float* y, int m, int n, int depth) {
  for (int i = threadIdx.x; i < m * n; i += 32) {
    float sum = 0.0f;
    for (int k = 0; k < depth; ++k) {
      sum = fmaf(moesaic::load_one(a + i / n * depth + k), moesaic::load_one(b + k * n + i % n), sum);
    }
    moesaic::store_one(y + i, sum);
  }
}
"""


@everywhere
@pytest.mark.parametrize("dtype", ["float", "bf16"])
def test_simt_tiles_of_any_shape_are_bit_equal(run: Run, dtype: str) -> None:
    size = 4 if dtype == "float" else 2
    shapes = (*SIMT_SHAPES, (128, 32, 32, 2, 128))
    cases = [
        Case("SimtTile", dtype, m, n, k, stages, 1, False, i % 2 == 0, size, size, threads)
        for i, (m, n, k, stages, threads) in enumerate(shapes)
    ]
    for which, case in enumerate(cases):
        found = product(run, kernel_of(cases), which, case, (35, 71, 45), split=16)
        a, b = (np.ascontiguousarray(x, np.float32) for x in (found.left, found.right[0]))
        expected = run(IN_ORDER, "in_order", [a, b], np.zeros((35, 71), np.float32), [35, 71, 45])
        np.testing.assert_array_equal(found.y[0].view(np.uint32), expected.view(np.uint32))


@everywhere
def test_simt_tiles_keep_a_negative_zero(run: Run) -> None:
    """A product that underflows to -0 would become 0 if zeros past the end of the sum were added to it."""
    case = dataclasses.replace(DEFAULT_SIMT, left_across=False, right_across=False, left_align=4, right_align=4)
    scalars = [1, 1, 1, 0, 0, 1, 0, 1, 0]
    inputs = [np.array([-1e-30], np.float32), np.array([1e-30], np.float32), *np.zeros((2, 1), np.int32)]
    y = np.zeros(1 + 2 * case.m, np.float32)
    out = run(kernel_of([case]), "tiles", inputs, y, scalars, block=case.threads, shared_bytes=case.shared_bytes)
    assert out[0] == 0.0
    assert np.signbit(out[0])


# MmaTile --------------------------------------------------------------------------------------------------------------

MMA_SHAPES = ((32, 64, 32, 3, 64), (64, 128, 32, 2, 128), (32, 128, 64, 4, 128))
MMA = [case for dtype in TYPES for case in drawn_cases("MmaTile", dtype, MMA_SHAPES)[:: 1 if dtype == "bf16" else 2]]


@everywhere
@pytest.mark.parametrize("case", MMA, ids=str)
def test_mma_tiles(run: Run, case: Case) -> None:
    check(run, case, MMA)


@everywhere
@pytest.mark.parametrize("case", DEFAULT_MMA, ids=str)
def test_default_mma_tiles(run: Run, case: Case) -> None:
    """Sums of small integers are exact, on tensor cores, too."""
    size = whole(case, case.m + 2, case.n - 3, 4 * case.k + 21)
    found = product(run, kernel_of([case]), 0, case, size, split=2 * case.k, integers=True)
    np.testing.assert_array_equal(found.y, found.left @ found.right)


# Mistakes -------------------------------------------------------------------------------------------------------------

SMALL_MMA = Case("MmaTile", "bf16", 64, 128, 32, 3, 1, False, True, 16, 16, 128)
SMALL_WGMMA = Case("WgmmaTile", "bf16", 128, 64, 64, 3, 1, False, True, 16, 16, 384, "lines", "boxes")
SMALL_PINGPONG = dataclasses.replace(SMALL_WGMMA, m=64, pingpong=True)
SMALL_PAIR = Case("WgmmaTile", "bf16", 64, 128, 64, 3, 1, False, True, 16, 16, 256, "boxes", "shared")
SMALL_TOKENS = Case("WgmmaTile", "bf16", 64, 64, 64, 3, 1, True, True, 16, 16, 256, "tokens", "boxes+rows")
DONE = "__syncthreads(); // whoever used shared memory before is done with it"
COPIES_THERE = "copy_wait<Shape::kStages - 2>();"
COPIED = "mbarrier_arrive_after_copies(full(stage_));"
FULL = "mbarrier_wait(full(stage_), parity_);"
EMPTY = "mbarrier_wait(empty(stage_), parity_ ^ 1);"
RELEASED = "if (read >= 0) release(read); read = stage_;"
TURN = "mbarrier_wait(turn_of(own_group()), (tiles_ - 1) / 2 % 2 ^ (own_group() == 0 ? 1 : 0));"
ANNOUNCED = "mbarrier_arrive_and_expect(full(stage_), bytes + (with_tail ? kTailBytes : 0));"

# In which header a statement is replaced, by nothing where no other is given. Spaces stand for any.
BARRIERS: dict[str, tuple[str, ...]] = {
    "simt_start": ("tile_simt.cuh", DONE),
    "simt_step": ("tile_simt.cuh", "__syncthreads(); // this step is there, and the one before it has been read"),
    "mma_start": ("tile_mma.cuh", DONE),
    "mma_first": ("tile_mma.cuh", "__syncthreads(); // the first steps are there"),
    "mma_step": ("tile_mma.cuh", f"{COPIES_THERE} __syncthreads(); }}", f"{COPIES_THERE} }}"),
    "mma_wait": ("tile_mma.cuh", f"{COPIES_THERE} __syncthreads(); }}", "__syncthreads(); }"),
    "sums_start": ("tile_common.cuh", DONE),
    "sums_partial": ("tile_common.cuh", "__syncthreads(); // the sums of all warps are there"),
    "wgmma_set_up": ("wgmma_stages.cuh", " sync();"),
    "wgmma_full": ("tile_wgmma.cuh", f"first += Shape::kK) {{ {FULL}", "first += Shape::kK) {"),
    "wgmma_empty": ("wgmma_stages.cuh", EMPTY),
    "wgmma_copies": ("wgmma_stages.cuh", COPIED),
    "wgmma_boxes": ("wgmma_stages.cuh", ANNOUNCED),
    "wgmma_fewer_bytes": ("wgmma_stages.cuh", ANNOUNCED, ANNOUNCED.replace("bytes +", "bytes - 128 +")),
    "wgmma_wait": ("tile_wgmma.cuh", "wgmma_wait<1>(pending); } if (read", "} if (read"),
    "wgmma_last": ("tile_wgmma.cuh", "wgmma_wait<0>(pending); for_all", "for_all"),
    "wgmma_released": ("tile_wgmma.cuh", RELEASED, "read = stage_;"),
    "wgmma_released_while_read": ("tile_wgmma.cuh", RELEASED, "release(stage_);"),
    "wgmma_released_last": (
        "tile_wgmma.cuh",
        "if (read >= 0) release(read); if constexpr (kVector == 8)",
        "if constexpr (kVector == 8)",
    ),
    "wgmma_released_by_some": ("wgmma_stages.cuh", "__syncwarp(); const int lane", "const int lane"),
    "wgmma_phase": ("wgmma_stages.cuh", "parity_ ^= 1;"),
    "pingpong_turn": ("tile_wgmma.cuh", TURN),
    "pingpong_over": ("tile_wgmma.cuh", "arrive_once(turn_of(1 - own_group()));"),
    "pingpong_passed": ("tile_wgmma.cuh", "stage_ += (depth + Shape::kK - 1) / Shape::kK;"),
    "pingpong_phase": ("tile_wgmma.cuh", "parity_ ^= stage_ / Shape::kStages % 2;"),
    "pair_set_up": ("wgmma_stages.cuh", "{ sync_cluster(); } else {", "{ __syncthreads(); } else {"),
    "pair_released": ("wgmma_stages.cuh", "if (lane < kPair)", "if (lane < 1)"),
    "pair_released_by_one": ("wgmma_stages.cuh", "kOwners / 32 * kPair);", "kOwners / 32);"),
    "pair_halves": ("wgmma_stages.cuh", "halves ? rank * (kBoxes / kPair) : 0;", "0;"),
    "pair_over": ("wgmma_stages.cuh", "if constexpr (kPair == 2) sync_cluster();"),
    "tokens_wait": ("token_rows.cuh", "copy_wait<2 * kAhead - 1>();"),
    "tokens_wait_for_fewer": ("token_rows.cuh", "copy_wait<2 * kAhead - 1>();", "copy_wait<2 * kAhead>();"),
    "tokens_there": ("token_rows.cuh", "__syncwarp(); // the other lanes' are there, too"),
    "tokens_read": ("token_rows.cuh", "__syncwarp(); // all lanes have read those"),
    "tokens_slot": ("token_rows.cuh", "slot_ = slot_ == kAhead - 1 ? 0 : slot_ + 1;"),
    "tokens_taken": ("wgmma_stages.cuh", "numbers_.next();"),
    "tokens_whole": ("wgmma_stages.cuh", "steps >= kK && extent >= kRows", "steps > 0"),
}


@functools.cache
def is_wrong(case: Case, order: int, helpers: Path | None = None) -> bool:
    """Whether the emulator finds something wrong with a product, by headers that may have been changed."""
    size = (70, 130, (5 if case.tile == "WgmmaTile" else 4) * case.k)  # a stage is filled again before the end
    run = functools.partial(emulate, order=order, include_dirs=None if helpers is None else [helpers])
    try:
        assert_right(product(run, kernel_of([case]), 0, case, whole(case, *size), split=case.k))
    except (AssertionError, EmulationError):
        return True
    return False


@pytest.mark.emulate
@pytest.mark.parametrize("barrier", BARRIERS)
def test_a_missing_barrier_or_wait_shows(barrier: str, tmp_path: Path) -> None:
    changed_headers(tmp_path, *BARRIERS[barrier])
    tiles = {
        "mma": SMALL_MMA,
        "wgmma": SMALL_WGMMA,
        "pingpong": SMALL_PINGPONG,
        "pair": SMALL_PAIR,
        "tokens": SMALL_TOKENS,
    }
    case = tiles.get(barrier.partition("_")[0], DEFAULT_SIMT)
    assert not any(is_wrong(case, order) for order in ORDERS)
    assert any(is_wrong(case, order, tmp_path) for order in ORDERS)


# What the compiler makes of them --------------------------------------------------------------------------------------


def compiled_for(case: Case, target: str, blocks: int) -> nvrtc.CompiledKernel:
    """Compiled such that so many blocks share a multiprocessor."""
    source = re.sub(r"__launch_bounds__\([^)]*\)", f"__launch_bounds__({case.threads}, {blocks})", kernel_of([case]))
    return nvrtc.compile_source(source, name="tiles", target=Target.parse(target), extra_options=NVRTC_OPTIONS)


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", ["float", "bf16"])
@pytest.mark.parametrize("layout", range(4))
def test_default_simt_tiles_stay_in_registers(dtype: str, layout: int) -> None:
    left, right = layout % 2 == 1, layout // 2 == 1
    parts = 1 + (left ^ right)
    case = dataclasses.replace(
        DEFAULT_SIMT, dtype=dtype, n=128 // parts, parts=parts, left_across=left, right_across=right
    )
    compiled = compiled_for(case, "sm_80" if left and right else "sm_90a", 2)
    assert not compiled.resources.uses_local_memory, compiled.log


# Those of the rule that differ most; the kernels themselves are compiled in test_experts.py.
COMPILED_WGMMA = ("sums", "wgrad_tall", "gathered_pingpong", "unaligned")


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", COMPILED_WGMMA)
def test_default_wgmma_tiles_stay_in_registers(name: str) -> None:
    """Products stay asynchronous, and warps that multiply get registers of those that fetch: the compiler says where it
    has to wait for each product, and where it takes no notice of setmaxnreg."""
    case = DEFAULT_WGMMA[name]
    compiled = compiled_for(case, "sm_90a", 1)
    if case.ways_apart != "lines-lines":  # both out of tables, as no kernel has them, are too many addresses
        assert not compiled.resources.uses_local_memory, compiled.log
    assert compiled.resources.registers == 168  # of 384 threads, a multiple of 8
    assert "wgmma" not in compiled.log and "setmaxnreg" not in compiled.log, compiled.log
    boxes = {case.left_way, case.right_way} != {"lines"}
    if not disassemble.disassemblers():
        pytest.skip("needs cuobjdump or nvdisasm")
    sass = disassemble.disassemble(compiled.cubin)
    found = {name for name in ("HGMMA", "USETMAXREG", "UTMALDG", "MULTICAST", "LDGSTS") if name in sass}
    copied = "lines" in case.left_way + case.right_way and min(case.left_align, case.right_align) >= 4
    assert found == {
        "HGMMA",
        "USETMAXREG",
        *(["UTMALDG"] if boxes else []),
        *(["MULTICAST"] if case.paired else []),
        *(["LDGSTS"] if copied else []),
    }


@pytest.mark.nvrtc
@pytest.mark.parametrize("case", [*DEFAULT_MMA][::2], ids=str)
def test_default_mma_tiles_stay_in_registers(case: Case) -> None:
    for target in ("sm_80", "sm_90a") if case == next(iter(DEFAULT_MMA)) else ("sm_90a",):
        compiled = compiled_for(case, target, DEFAULT_MMA[case])
        assert not compiled.resources.uses_local_memory, compiled.log

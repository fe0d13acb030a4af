"""WgmmaTile of tile_wgmma.cuh: tiles of products by wgmma, on the emulator and on Hopper; see `tiles`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_kernels import run_on_gpu, skip_without_wgmma
from tiles import (
    DEFAULT_WGMMA,
    Case,
    Run,
    assert_right,
    check,
    drawn_cases,
    kernel_of,
    product,
    run_in_some_orders,
    whole,
)

# WgmmaTile ------------------------------------------------------------------------------------------------------------

# Of one warpgroup that multiplies; of two, one of them idle where there are few rows; of one with two blocks of rows.
WGMMA_SHAPES = ((64, 64, 64, 3, 256), (128, 128, 64, 4, 384), (128, 128, 64, 2, 256))
WGMMA = [case for dtype in ("bf16", "half") for case in drawn_cases("WgmmaTile", dtype, WGMMA_SHAPES)]
WGMMA = [case for case in WGMMA if case.n % 64 == 0][::2]  # the body of the instruction takes its time
WGMMA_SIZES = ((67, 1, 7), (150, 170, 97), (5, 131, 200), (70, 70, 16), (130, 65, 64), (2, 3, 0))

# Every way of fetching, for operands that lie either way: m, n, stages, parts, threads (384 have a tile together, or of
# 64 rows in turn), what lies across, the two ways.
_WAYS = (
    (64, 64, 3, 2, 256, "", "boxes", "boxes"),
    (64, 64, 3, 2, 256, "", "lines", "shared"),
    (128, 64, 2, 1, 384, "", "boxes", "shared"),
    (64, 64, 3, 1, 256, "", "shared", "boxes"),
    (64, 64, 4, 1, 256, "", "boxes", "lines"),
    (64, 128, 2, 1, 256, "right", "boxes", "shared"),
    (64, 64, 3, 2, 256, "right", "lines", "shared"),
    (64, 64, 2, 1, 256, "right", "lines", "boxes+rows"),
    (128, 64, 3, 1, 384, "", "boxes+rows", "shared"),
    (64, 64, 3, 2, 256, "", "shared+rows", "boxes"),
    (64, 128, 2, 1, 256, "", "lines", "boxes+rows"),
    (64, 128, 3, 1, 256, "right", "shared", "boxes"),
    (128, 64, 3, 1, 384, "left", "shared", "lines"),
    (64, 64, 3, 1, 256, "left", "boxes", "boxes"),
    (64, 64, 2, 1, 256, "left", "boxes+rows", "lines"),
    (128, 128, 3, 1, 256, "both", "boxes+rows", "shared+rows"),
    (64, 128, 3, 1, 256, "both", "lines", "shared+rows"),
    (128, 64, 2, 1, 256, "both", "shared+rows", "lines"),
    (64, 64, 3, 1, 256, "both", "boxes+rows", "lines"),
    (64, 64, 3, 1, 384, "", "lines", "boxes"),
    (64, 64, 2, 2, 384, "right", "boxes", "shared"),
    (64, 128, 3, 1, 384, "both", "lines", "shared+rows"),
    (64, 128, 3, 1, 256, "both", "tokens", "shared+rows"),
    (128, 64, 4, 1, 256, "both", "shared+rows", "tokens"),
    (64, 64, 2, 1, 256, "both", "boxes+rows", "tokens"),
    (64, 64, 3, 1, 256, "left", "tokens", "boxes"),
    (64, 64, 3, 1, 384, "both", "tokens", "lines"),
    (128, 128, 4, 1, 384, "right", "lines", "tokens"),
    (128, 128, 3, 1, 384, "both", "lines", "tokens"),
)
BOXED = [
    Case("WgmmaTile", dtype, m, n, 64, stages, parts, lies in ("left", "both"), lies in ("right", "both"), align, align,
         threads, left, right, pingpong=(m, threads) == (64, 384))
    for i, (m, n, stages, parts, threads, lies, left, right) in enumerate(_WAYS)
    for align in ((2, 4, 8, 16)[i % 4],)
    for dtype in (("bf16", "half") if i in (2, 13) else ("bf16",))
]  # fmt: skip

EMULATED_WGMMA = ("gathered", "transposed", "wgrad_tall", "wgrad_tokens", "unaligned", "transposed_pingpong")


def run_on_hopper(*args: Any, **options: Any) -> np.ndarray:
    skip_without_wgmma()
    return run_on_gpu(*args, **{"grid": (4, 1), **options})


on_emulator = pytest.param(run_in_some_orders, marks=pytest.mark.emulate, id="emulator")
on_hopper = pytest.param(run_on_hopper, marks=pytest.mark.gpu, id="gpu")
hopper_too = pytest.mark.parametrize("run", [on_emulator, on_hopper])


@hopper_too
@pytest.mark.parametrize("case", WGMMA, ids=str)
def test_wgmma_tiles(run: Run, case: Case) -> None:
    check(run, case, WGMMA, WGMMA_SIZES)


@hopper_too
@pytest.mark.parametrize("case", BOXED, ids=str)
def test_wgmma_tiles_fetched_by_the_copy_engine(run: Run, case: Case) -> None:
    check(run, case, BOXED, WGMMA_SIZES)


@hopper_too
@pytest.mark.parametrize("case", [case for case in BOXED if "+rows" in case.ways_apart], ids=str)
def test_rows_of_others_are_not_multiplied(run: Run, case: Case) -> None:
    """Not with zeros either: they are another's, and may be infinite."""
    alike = [c for c in BOXED if (c.dtype, c.paired) == (case.dtype, case.paired)]
    for depth in (8, 24, 40, 56, 64, 72, 104, 128, 184):
        size = whole(case, 20, 72, depth)
        assert_right(product(run, kernel_of(alike), alike.index(case), case, size))


@pytest.mark.parametrize(
    ("run", "name"),
    [pytest.param(*on_emulator.values, n, marks=on_emulator.marks, id=f"{n}-emulator") for n in EMULATED_WGMMA]
    + [pytest.param(*on_hopper.values, n, marks=on_hopper.marks, id=f"{n}-gpu") for n in DEFAULT_WGMMA],
)
def test_default_wgmma_tiles(run: Run, name: str) -> None:
    """Sums of small integers are exact. Of the second tile's rows a warpgroup has none."""
    case = DEFAULT_WGMMA[name]
    size = whole(case, case.m + 2, case.n - 3, 4 * case.k + 21)
    found = product(run, kernel_of([case]), 0, case, size, integers=True)
    np.testing.assert_array_equal(found.y, found.left @ found.right)


@pytest.mark.parametrize("run", [on_hopper])
@pytest.mark.parametrize("blocks", [2, 64])
@pytest.mark.parametrize("name", DEFAULT_WGMMA)
def test_large_products_on_hopper(run: Run, name: str, blocks: int) -> None:
    """Many tiles a block, pairs of them and those left over, in more steps than there are stages."""
    case = DEFAULT_WGMMA[name]
    size = whole(case, 5 * case.m - 9, 5 * case.n - 21, 1000)
    found = product(run, kernel_of([case]), 0, case, size, integers=True, grid=(blocks, 1))
    np.testing.assert_array_equal(found.y, found.left @ found.right)

"""experts.cuh: which block has which tile of an expert, on the emulator and on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from device_kernels import Run, everywhere

# What there is to do for each expert, here the pairs of its rows and one more, by blocks of different sizes.
COUNTING = """#include "moesaic/experts.cuh"

template <int kExperts, int kThreads>
__device__ __forceinline__ void count(const int* counts, int* out) {
  __shared__ int first[kExperts + 1 + kThreads / 32];
  moesaic::count_before<kExperts, kThreads>(counts, first, [](int rows) { return rows == 0 ? 0 : rows / 2 + 1; });
  for (int i = threadIdx.x; i <= kExperts; i += kThreads) moesaic::store_one(out + i, first[i]);
}

extern "C" __global__ void __launch_bounds__(384) counting(const int* counts, int* out, int which) {
  switch (which) {
    case 0: count<1, 32>(counts, out); break;
    case 1: count<5, 64>(counts, out); break;
    case 2: count<128, 384>(counts, out); break;
    case 3: count<384, 384>(counts, out); break;
    case 4: count<385, 384>(counts, out); break;
    case 5: count<1000, 128>(counts, out); break;
  }
}
"""
COUNTED = ((1, 32), (5, 64), (128, 384), (384, 384), (385, 384), (1000, 128))


@everywhere
@pytest.mark.parametrize("which", range(len(COUNTED)), ids=lambda which: "experts{}-threads{}".format(*COUNTED[which]))
def test_what_comes_before_an_expert(run: Run, which: int) -> None:
    experts, threads = COUNTED[which]
    rng = np.random.default_rng(which)
    for counts in (rng.integers(0, 1000, experts) * (rng.random(experts) < 0.7), np.zeros(experts)):
        rows = counts.astype(np.int32)
        out = run(COUNTING, "counting", [rows], np.full(experts + 1, -7, np.int32), [which], block=threads)
        np.testing.assert_array_equal(out, np.concatenate([[0], np.cumsum(np.where(rows == 0, 0, rows // 2 + 1))]))


# The number of items, then [item][rank]: four numbers of each, of all items or of the `last`.
ITEMS = """#include "moesaic/experts.cuh"

template <int kPair, int kBand>
__device__ __forceinline__ void list_items(long long* out, long long row_tiles, int column_tiles, int last) {
  const long long items = moesaic::items_of<kPair>(row_tiles, column_tiles);
  const long long skip = last == 0 ? 0 : items - last;
  if (threadIdx.x == 0) moesaic::store_one(out, items);
  for (long long i = threadIdx.x; i < (items - skip) * kPair; i += 32) {
    const int rank = static_cast<int>(i % kPair);
    const auto item = moesaic::item_of<kPair, kBand>(skip + i / kPair, rank, row_tiles, column_tiles);
    moesaic::store_one(out + 1 + 4 * i, item.row_tile);
    moesaic::store_one(out + 2 + 4 * i, static_cast<long long>(item.column_tile));
    moesaic::store_one(out + 3 + 4 * i, static_cast<long long>(item.together));
    moesaic::store_one(out + 4 + 4 * i, static_cast<long long>(item.idle));
  }
}

extern "C" __global__ void __launch_bounds__(32) items(const int* given, long long* out) {
  const long long row_tiles = (static_cast<long long>(given[0]) << 32) + given[1];
  switch (10 * given[3] + given[5]) {
    case 11: list_items<1, 1>(out, row_tiles, given[2], given[4]); break;
    case 13: list_items<1, 3>(out, row_tiles, given[2], given[4]); break;
    case 21: list_items<2, 1>(out, row_tiles, given[2], given[4]); break;
    case 22: list_items<2, 2>(out, row_tiles, given[2], given[4]); break;
  }
}
"""


def items_of(
    run: Run, pair: int, row_tiles: int, column_tiles: int, last: int | None = None, band: int = 1
) -> tuple[int, np.ndarray]:
    """The number of items, and all of them (or the `last`): [item, rank, (row tile, column tile, together, idle)]."""
    most = (row_tiles // pair + 1) * column_tiles if last is None else last
    given = np.array([row_tiles >> 32, row_tiles & 0x7FFFFFFF, column_tiles, pair, last or 0, band], np.int32)
    out = run(ITEMS, "items", [given], np.full(1 + 4 * pair * most, -7, np.int64))
    number, found = int(out[0]), out[1:].reshape(-1, pair, 4)
    shown = number if last is None else last
    assert (found[shown:] == -7).all()
    return number, found[:shown]


@everywhere
@pytest.mark.parametrize(("pair", "band"), [(1, 1), (1, 3), (2, 1), (2, 2)])
def test_every_tile_is_one_item_of_one_block(run: Run, pair: int, band: int) -> None:
    for row_tiles in (*range(6), 8, 11):
        for column_tiles in range(1, 6):
            number, found = items_of(run, pair, row_tiles, column_tiles, band=band)
            odd = row_tiles % pair
            assert number == len(found) == row_tiles // pair * column_tiles + odd * -(-column_tiles // pair)
            rows, columns, together, idle = np.moveaxis(found, 2, 0)
            assert ((rows >= 0) & (rows < max(row_tiles, 1)) & (columns >= 0) & (columns < column_tiles)).all()
            tiles = sorted(zip(rows[idle == 0].tolist(), columns[idle == 0].tolist(), strict=True))
            assert tiles == [(r, c) for r in range(row_tiles) for c in range(column_tiles)]
            # Idle is a block of the last item alone, beside another.
            assert idle.sum() == odd * (-column_tiles % pair)
            assert not idle[:, 0].any() and not idle[:-1].any()
            # What a pair fetches together, both of it want: the same columns, two rows of tiles below each other.
            assert (together == together[:, :1]).all()
            for item, shared in zip(found, together[:, 0], strict=True):
                below = pair == 2 and item[1, 0] == item[0, 0] + 1 and item[1, 1] == item[0, 1]
                assert bool(shared) == below
                assert below or (item[:, 0] == item[0, 0]).all()
            # Of each band, first all rows of a column, then those of the next one.
            pairs = row_tiles // pair
            bands = [range(first, min(first + band, pairs)) for first in range(0, pairs, band)]
            wanted = [(row * pair, column) for rows in bands for column in range(column_tiles) for row in rows]
            assert [tuple(item) for item in found[: len(wanted), 0, :2].tolist()] == wanted


@everywhere
def test_items_of_more_tiles_than_32_bits_count(run: Run) -> None:
    row_tiles, column_tiles = (1 << 40) + 1, 3
    number, found = items_of(run, 2, row_tiles, column_tiles, last=3)
    assert number == (row_tiles // 2) * 3 + 2
    wanted = [
        [[row_tiles - 3, 2, 1, 0], [row_tiles - 2, 2, 1, 0]],
        [[row_tiles - 1, 0, 0, 0], [row_tiles - 1, 1, 0, 0]],
        [[row_tiles - 1, 2, 0, 0], [row_tiles - 1, 2, 0, 1]],
    ]
    np.testing.assert_array_equal(found, wanted)


EVEN_TILES = """#include "moesaic/experts.cuh"

template <int kPair>
__device__ __forceinline__ void list_tiles(const int* counts, int* out, int experts) {
  for (int e = threadIdx.x; e < experts; e += 32) {
    const auto tiles = moesaic::even_tiles<144, kPair>(moesaic::load_one(counts + e));
    moesaic::store_one(out + 2 * e, tiles.rows);
    moesaic::store_one(out + 2 * e + 1, tiles.count);
  }
}

extern "C" __global__ void __launch_bounds__(32) even(const int* counts, int* out, int experts, int pair) {
  if (pair == 1) list_tiles<1>(counts, out, experts);
  if (pair == 2) list_tiles<2>(counts, out, experts);
}
"""


@everywhere
@pytest.mark.parametrize("pair", [1, 2])
def test_rows_of_an_expert_are_shared_out_evenly(run: Run, pair: int) -> None:
    counts = np.array([*range(2000), 3_000_000, 2**31 - 300], np.int32)
    out = run(EVEN_TILES, "even", [counts], np.full(2 * len(counts), -7, np.int32), [len(counts), pair])
    rows, tiles = out.reshape(-1, 2).astype(np.int64).T
    assert (rows <= 144).all() and (rows % 8 == 0).all()
    # Every row is in a tile, and the last tile is not empty.
    assert (rows * tiles >= counts).all() and (rows * (tiles - 1) < np.maximum(counts, 1)).all()
    assert tiles[0] == 0 and (tiles[1:145] == 1).all()
    # No more tiles than pairs of the tallest have, and fewer rows past the last than 8 for each.
    assert (tiles[145:] <= -(-counts[145:] // (144 * pair)) * pair).all()
    assert (rows * tiles - counts < 8 * np.maximum(tiles, 1) + rows).all()
    assert pair == 1 or (tiles[145:289] == 2).all()

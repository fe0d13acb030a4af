// Where the rows of experts are, from the counts alone: no block is told, and an expert without rows costs nothing.
#pragma once

#include "moesaic/base.cuh"

namespace moesaic {

// first[e] = what `of(rows)` says there is to do for the experts before e, from the rows of each; first[kExperts] = how much
// there is in all. For the whole block, which may read them when this returns. `first` has kExperts + 1 + kThreads / 32
// elements.
template <int kExperts, int kThreads, typename T, class Of>
__device__ __forceinline__ void count_before(const int* counts, T* first, const Of& of) {
  constexpr int kOwn = (kExperts + kThreads - 1) / kThreads;  // neighbouring experts of a thread
  constexpr int kWarps = kThreads / kWarp;
  const int warp = threadIdx.x / kWarp;
  T* const warp_totals = first + kExperts + 1;

  int before[kOwn];
  int total = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int expert = threadIdx.x * kOwn + i;
    before[i] = total;
    if (expert < kExperts) total += of(load_one(counts + expert));
  }
  int of_warp;
  int base = warp_before(total, of_warp);
  if (threadIdx.x % kWarp == 0) warp_totals[warp] = static_cast<T>(of_warp);
  __syncthreads();
  for (int i = 0; i < kWarps; ++i) base += i < warp ? warp_totals[i] : 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int expert = threadIdx.x * kOwn + i;
    if (expert < kExperts) first[expert] = static_cast<T>(base + before[i]);
  }
  if (threadIdx.x == kThreads - 1) first[kExperts] = static_cast<T>(base + total);
  __syncthreads();
}

// The same of tiles of kRows rows.
template <int kExperts, int kRows, int kThreads>
__device__ __forceinline__ void count_row_tiles(const int* counts, int* first) {
  count_before<kExperts, kThreads>(counts, first, [](int rows) { return (rows + kRows - 1) / kRows; });
}

// long_before[e] = how many of the experts before e are long, with more than twice the mean of rows. As `count_before`.
template <int kExperts, int kThreads>
__device__ __forceinline__ void count_long(const int* counts, const int* offsets, unsigned short* long_before) {
  const long long all = load_one(offsets + kExperts);
  count_before<kExperts, kThreads>(counts, long_before, [&](int rows) {
    return static_cast<long long>(rows) * kExperts > 2 * all ? 1 : 0;
  });
}

// What kPair blocks do at a time, of the tiles of one expert.
//
// A pair of blocks has two tiles below each other, which multiply the same columns of a weight: `together` they fetch them
// once. Of an odd last row of tiles they have two beside each other. Items follow one another columns inside rows; or, where
// an expert's weight is large, rows inside columns, in bands of kBand pairs: blocks that run at the same time then want as
// many rows as columns, fewer bytes in all than one pair's rows and all columns.
struct Item {
  long long row_tile;
  int column_tile;
  bool together;
  bool idle;  // the tile is another block's
};

template <int kPair>
__device__ __forceinline__ long long items_of(long long row_tiles, int column_tiles) {
  return row_tiles / kPair * column_tiles + row_tiles % kPair * ((column_tiles + kPair - 1) / kPair);
}

// `Number` is int where tiles are counted by experts, and long long where tokens alone say how many there are.
template <int kPair, int kBand = 1, typename Number>
__device__ __forceinline__ Item item_of(Number number, int rank, Number row_tiles, int column_tiles) {
  const Number pairs = row_tiles / kPair;
  const Number below = pairs * column_tiles;
  if (number < below) {
    const Number first = number / (static_cast<Number>(kBand) * column_tiles) * kBand;  // pair of the band
    const int rest = static_cast<int>(number - first * column_tiles);
    const int high = kBand == 1 ? 1 : static_cast<int>(at_most(kBand, pairs - first));  // pairs of the band
    return {(first + rest % high) * kPair + rank, rest / high, kPair > 1, false};
  }
  const int column_tile = static_cast<int>(number - below) * kPair + rank;
  return {row_tiles - 1, smaller(column_tile, column_tiles - 1), false, column_tile >= column_tiles};
}

// How many tiles of kRows an expert has whose rows go in pairs of tiles: the odd last one's are the last pair's tail, where
// there is one and they are kTail at most. Both blocks of the pair have them, and either half of their columns.
template <int kRows, int kTail>
__device__ __forceinline__ int tiles_with_tail(int rows) {
  const int tiles = (rows + kRows - 1) / kRows;
  return tiles % 2 == 1 && tiles > 1 && rows - (tiles - 1) * kRows <= kTail ? tiles - 1 : tiles;
}

// The rows of that tail, for a tile of any pair; else 0.
template <int kRows>
__device__ __forceinline__ int rows_of_tail(int rows, int row_tiles, int row_tile) {
  return row_tile / 2 * 2 + 2 == row_tiles && rows > row_tiles * kRows ? rows - row_tiles * kRows : 0;
}

// An expert's rows in tiles of as many rows each, of kMost at most: an even number of tiles where there is more than one, for
// pairs of blocks. Rows of a tile are a multiple of 8.
struct EvenTiles {
  int rows;   // of each but the last
  int count;
};

template <int kMost, int kPair>
__device__ __forceinline__ EvenTiles even_tiles(int rows) {
  if (rows <= 0) return {0, 0};
  const int least = rows <= kMost ? 1 : ((rows - 1) / (kPair * kMost) + 1) * kPair;
  const int each = ((rows - 1) / least + 8) / 8 * 8;
  return {each, (rows - 1) / each + 1};
}

// The last expert for whom `before(e)`, which does not fall from one to the next, is not more than n.
template <int kExperts, typename Number, class Before>
__device__ __forceinline__ int last_expert(Number n, const Before& before) {
  int low = 0, high = kExperts;  // before(low) <= n < before(high)
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (before(middle) <= n) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// The expert that a tile (or an item) belongs to: the last one whose first tile is not after it and that has tiles.
template <int kExperts>
__device__ __forceinline__ int expert_of_tile(const int* first, int tile) {
  return last_expert<kExperts>(tile, [&](int e) { return first[e]; });
}

// The expert that a slot in use belongs to, from the first slots of all.
template <int kExperts>
__device__ __forceinline__ int expert_of_slot(const int* offsets, long long slot) {
  return last_expert<kExperts>(slot, [&](int e) { return load_one(offsets + e); });
}

}  // namespace moesaic

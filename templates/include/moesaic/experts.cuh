// Where the rows of experts are, from the counts alone: no block is told, and an expert without rows costs nothing.
#pragma once

#include "moesaic/base.cuh"

namespace moesaic {

// first[e] = what `of(rows)` says there is to do for the experts before e, from the rows of each; first[kExperts] = how much
// there is in all. For the whole block, which may read them when this returns. `first` has kExperts + 1 + kThreads / 32
// elements.
template <int kExperts, int kThreads, class Of>
__device__ __forceinline__ void count_before(const int* counts, int* first, const Of& of) {
  constexpr int kOwn = (kExperts + kThreads - 1) / kThreads;  // neighbouring experts of a thread
  constexpr int kWarps = kThreads / 32;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  int* const warp_totals = first + kExperts + 1;

  int before[kOwn];
  int total = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int expert = threadIdx.x * kOwn + i;
    before[i] = total;
    if (expert < kExperts) total += of(load_one(counts + expert));
  }
  int upto = total;  // of the lanes up to this one
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, upto, distance);
    if (lane >= distance) upto += other;
  }
  if (lane == 31) warp_totals[warp] = upto;
  __syncthreads();
  int base = upto - total;
  for (int i = 0; i < kWarps; ++i) base += i < warp ? warp_totals[i] : 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int expert = threadIdx.x * kOwn + i;
    if (expert < kExperts) first[expert] = base + before[i];
  }
  if (threadIdx.x == kThreads - 1) first[kExperts] = base + total;
  __syncthreads();
}

// The same of tiles of kRows rows.
template <int kExperts, int kRows, int kThreads>
__device__ __forceinline__ void count_row_tiles(const int* counts, int* first) {
  count_before<kExperts, kThreads>(counts, first, [](int rows) { return (rows + kRows - 1) / kRows; });
}

// What kPair blocks do at a time, of the tiles of one expert: columns inside rows.
//
// A pair of blocks has two tiles below each other, which multiply the same columns of a weight: `together` they fetch them
// once. Of an odd last row of tiles they have two beside each other.
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
template <int kPair, typename Number>
__device__ __forceinline__ Item item_of(Number number, int rank, Number row_tiles, int column_tiles) {
  const Number below = row_tiles / kPair * column_tiles;
  if (number < below) {
    return {number / column_tiles * kPair + rank, static_cast<int>(number % column_tiles), kPair > 1, false};
  }
  const int column_tile = static_cast<int>(number - below) * kPair + rank;
  return {row_tiles - 1, smaller(column_tile, column_tiles - 1), false, column_tile >= column_tiles};
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

// The expert that a tile (or an item) belongs to: the last one whose first tile is not after it and that has tiles.
template <int kExperts>
__device__ __forceinline__ int expert_of_tile(const int* first, int tile) {
  int low = 0, high = kExperts;  // first[low] <= tile < first[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (first[middle] <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// The expert that a slot in use belongs to, from the first slots of all.
template <int kExperts>
__device__ __forceinline__ int expert_of_slot(const int* offsets, long long slot) {
  int low = 0, high = kExperts;  // offsets[low] <= slot < offsets[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (load_one(offsets + middle) <= slot) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace moesaic

// Sums over tokens, from the partial rows that the blocks of a row program left, and reductions of a whole block.
#pragma once

#include "moesaic/cluster.cuh"

namespace moesaic {

// partial[0][c] + partial[1][c] + ... for a column c of one tile of kTile, in the thread whose number is that of the column in
// the tile. A thread adds some rows of up to four neighbouring columns; then its warp, and then what warps have, are added up.
// It asks for up to nine rows at once, mostly all that it has: waiting for them is most of what a finish takes. The order
// follows from the number of rows: equal input gives equal bits.
template <int kColumns, int kTile, int kThreads, typename T>
__device__ __forceinline__ T sum_partial_rows(const T* partial, long long rows, int tile) {
  constexpr int kVec = kColumns % 4 == 0 ? 4 : kColumns % 2 == 0 ? 2 : 1;
  constexpr int kAcross = kTile / kVec;               // threads that have a row together
  constexpr int kRows = kThreads / kAcross;           // rows at a time
  constexpr int kSums = kAcross < 32 ? kThreads / 32 : kRows;
  constexpr int kUsual = 264;                         // rows: two blocks of each multiprocessor
  constexpr int kAtOnce = smaller(9, (kUsual + kRows - 1) / kRows);
  static_assert(sizeof(T) == 4, "rows of 4-byte numbers");
  static_assert(kTile <= kThreads && kThreads % kAcross == 0, "a thread for each column, whole rows");
  __shared__ T sums[kSums][kTile];
  const int own = threadIdx.x % kAcross * kVec;       // first column in the tile
  const int column = tile * kTile + own;
  T sum[kVec] = {};
  if (column < kColumns) {
    const int count = static_cast<int>(rows);
    const T* next_row = partial + static_cast<int>(threadIdx.x) / kAcross * kColumns + column;
#pragma unroll 1
    for (int row = threadIdx.x / kAcross; row < count; row += kAtOnce * kRows) {
      T found[kAtOnce][kVec] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (row + i * kRows < count) load<kVec, sizeof(T) * kVec>(next_row + i * kRows * kColumns, found[i]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int v = 0; v < kVec; ++v) sum[v] += found[i][v];
      }
      next_row += kAtOnce * kRows * kColumns;
    }
  }
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
#pragma unroll
    for (int distance = kAcross; distance < 32; distance *= 2) {
      sum[v] += __shfl_xor_sync(0xffffffffu, sum[v], distance);
    }
    if (threadIdx.x % 32 < kAcross) sums[threadIdx.x / (kThreads / kSums)][own + v] = sum[v];
  }
  __syncthreads();
  T total = 0;
  if (threadIdx.x < kTile) {
#pragma unroll 8
    for (int i = 0; i < kSums; ++i) total += sums[i][threadIdx.x];
  }
  return total;
}

// The sums of a tile go to memory; `total` as sum_partial_rows leaves it.
template <int kColumns, int kTile, typename T>
__device__ __forceinline__ void store_totals(T* address, int tile, T total) {
  const int column = tile * kTile + static_cast<int>(threadIdx.x);
  if (threadIdx.x < kTile && column < kColumns) store_one(address + column, total);
}

// Or they go to the first block of the cluster, which `sums` is of, and which runs.
template <int kTile, int kColumns, typename T>
__device__ __forceinline__ void hand_to_first_block(T (&sums)[kColumns], int tile, T total) {
  const int column = tile * kTile + static_cast<int>(threadIdx.x);
  if (threadIdx.x < kTile && column < kColumns) store_to_block(&sums[column], total, 0);
}

// Or each block has left a row of them there, which the first adds up in the order of the blocks. A thread may then read
// the totals of the columns that it would have in `store_sums`; all may after a barrier.
template <int kThreads, int kBlocks, int kColumns, typename T>
__device__ __forceinline__ void add_up_blocks(T (&rows)[kBlocks][kColumns]) {
  for (int column = threadIdx.x; column < kColumns; column += kThreads) {
    T total = rows[0][column];
#pragma unroll
    for (int block = 1; block < kBlocks; ++block) total += rows[block][column];
    rows[0][column] = total;
  }
}

// What it has got, to memory.
template <int kThreads, int kColumns, typename T>
__device__ __forceinline__ void store_sums(const T (&sums)[kColumns], T* address) {
  for (int column = threadIdx.x; column < kColumns; column += kThreads) store_one(address + column, sums[column]);
}

// Whether this block is the last of the grid to get here; it then sees what the others wrote before. `ticket` is 0 at first.
__device__ __forceinline__ bool is_last_block(int* ticket) {
  __shared__ bool last;
  __threadfence();   // what this thread wrote, before the count
  __syncthreads();
  if (threadIdx.x == 0) {
    check_access(ticket, sizeof(int), true);
    last = atomicAdd(ticket, 1) == static_cast<int>(gridDim.x) - 1;
  }
  __syncthreads();
  __threadfence();   // the count, before what the others wrote is read
  return last;
}

// What another block of the same kernel wrote: not from a cache that may hold an older value.
template <typename T>
__device__ __forceinline__ T load_written(const T* address) {
  check_access(address, sizeof(T), false);
  return *static_cast<const volatile T*>(address);
}

// The sum over the threads of a block, in one order; every thread gets it.
template <int kThreads>
__device__ __forceinline__ float block_sum(float x) {
  __shared__ float sums[kThreads / 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  __syncthreads();   // the sum before has been read
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  float total = sums[0];
#pragma unroll
  for (int warp = 1; warp < kThreads / 32; ++warp) total += sums[warp];
  return total;
}

}  // namespace moesaic

// Sums over tokens, from the partial rows that the blocks of a row program left, and reductions of a whole block.
#pragma once

#include "moesaic/cluster.cuh"

namespace moesaic {

constexpr int kTileColumns = 32;  // columns that a block adds up

// total[c] = partial[0][c] + partial[1][c] + ... for the 32 columns of one tile. Each warp adds every 32nd row, a lane a
// column; then each warp adds what the warps have for one column. The order is fixed: equal input gives equal bits.
template <int kColumns, int kThreads, typename T>
__device__ __forceinline__ void sum_partial_rows(const T* partial, long long rows, int tile, T* total) {
  static_assert(kThreads == 32 * kTileColumns, "as many warps as a tile has columns");
  __shared__ T sums[kTileColumns][kTileColumns + 1];  // one more: columns are read, too
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int column = tile * kTileColumns + lane;
  T sum = 0;
  if (column < kColumns) {
#pragma unroll 8
    for (long long row = warp; row < rows; row += kTileColumns) sum += load_one(partial + row * kColumns + column);
  }
  sums[warp][lane] = sum;
  __syncthreads();
  sum = sums[lane][warp];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (lane == 0 && tile * kTileColumns + warp < kColumns) store_one(total + tile * kTileColumns + warp, sum);
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

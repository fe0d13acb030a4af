// What the tiles of products share: their shape, the way of an operand into shared memory, and sums of rows.
//
// An operand is a set of lines in memory. Where they lie *along* the sum, a line is a row of the tile (for the right
// operand: a column of one part of it) and its elements are the steps of the sum. Where they lie *across* it, a line is a
// step of the sum and its elements are rows of the tile.
#pragma once

#include "moesaic/base.cuh"

namespace moesaic {

// A block of kThreads computes kM rows and kParts times kN columns, kK steps of the sum at a time, with kStages times
// kK steps in shared memory. The address of every line is a multiple of k...Align bytes, and so is what is valid of it
// (`depth` elements along the sum, the extent across it): 16 is fast, an element's size always allowed.
template <int kM_, int kN_, int kK_, int kStages_, int kParts_, bool kLeftAcross_, bool kRightAcross_, int kLeftAlign_,
          int kRightAlign_, int kThreads_>
struct TileShape {
  static constexpr int kM = kM_;
  static constexpr int kN = kN_;
  static constexpr int kK = kK_;
  static constexpr int kStages = kStages_;
  static constexpr int kParts = kParts_;
  static constexpr bool kLeftAcross = kLeftAcross_;
  static constexpr bool kRightAcross = kRightAcross_;
  static constexpr int kLeftAlign = kLeftAlign_;
  static constexpr int kRightAlign = kRightAlign_;
  static constexpr int kThreads = kThreads_;
};

// How the warps of a block share its tile: they form a grid, such that what a warp reads for its part is least.
// kRowUnit and kColumnUnit are the least that a warp may own of each.
template <class Shape, int kRowUnit, int kColumnUnit>
struct WarpGrid {
  static constexpr int kWarps = Shape::kThreads / 32;
  static_assert(Shape::kThreads % 32 == 0, "a block is whole warps");

  static __host__ __device__ constexpr bool fits(int columns) {
    return kWarps % columns == 0 && Shape::kN % (columns * kColumnUnit) == 0 &&
           Shape::kM % (kWarps / columns * kRowUnit) == 0;
  }
  static __host__ __device__ constexpr int read_by_warp(int columns) {
    return Shape::kM / (kWarps / columns) + Shape::kParts * Shape::kN / columns;
  }
  static __host__ __device__ constexpr int best() {
    int found = 0;
    for (int columns = 1; columns <= kWarps; ++columns) {
      if (fits(columns) && (found == 0 || read_by_warp(columns) < read_by_warp(found))) found = columns;
    }
    return found;
  }

  static constexpr int kColumns = best();
  static_assert(kColumns > 0, "the tile cannot be shared by so many warps");
  static constexpr int kRows = kWarps / kColumns;

  static __device__ __forceinline__ int row() { return static_cast<int>(threadIdx.x) / 32 / kColumns; }
  static __device__ __forceinline__ int column() { return static_cast<int>(threadIdx.x) / 32 % kColumns; }
};

// What a thread brings of an operand into shared memory in each kK steps of the sum: kOwn chunks of kChunk elements, and
// neighbouring threads neighbouring chunks of a line. kRows are the rows of the tile (or columns, of one part).
template <typename T, bool kAcross, int kRows, int kParts, int kK, int kChunk, int kThreads>
class OperandChunks {
 public:
  static constexpr int kLines = kAcross ? kK : kParts * kRows;
  static constexpr int kLineChunks = (kAcross ? kParts * kRows : kK) / kChunk;
  static constexpr int kOwn = (kLines * kLineChunks + kThreads - 1) / kThreads;
  static_assert((kAcross ? kRows : kK) % kChunk == 0, "a line is whole chunks");

  static __device__ __forceinline__ int line(int i) { return number(i) / kLineChunks; }
  static __device__ __forceinline__ int chunk(int i) { return number(i) % kLineChunks; }
  static __device__ __forceinline__ bool exists(int i) {
    return kLines * kLineChunks % kThreads == 0 || number(i) < kLines * kLineChunks;
  }

  // Asks for the addresses of lines: `row(part, r)`, r below `extent`, once for all steps; or, across, `row(part, k)`, k
  // below `depth`, for the steps from `first` on, once for each kK of them. Asking early hides what the answer takes.
  template <class Row>
  __device__ __forceinline__ void find(const Row& row, int first, int depth, int extent) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int element = chunk(i) * kChunk;
      addresses_[i] = nullptr;
      if constexpr (kAcross) {
        const int k = first + line(i);
        if (exists(i) && k < depth && element % kRows < extent) {
          const T* const address = row(element / kRows, k);
          if (address != nullptr) addresses_[i] = address + element % kRows;
        }
      } else {
        const int r = line(i) % kRows;
        if (exists(i) && r < extent) {
          const T* const address = row(line(i) / kRows, r);
          if (address != nullptr) addresses_[i] = address + element;
        }
      }
    }
  }

  // Where own chunk i of the steps from `first` on lies, and how many of its elements are valid: none if 0 or less.
  __device__ __forceinline__ const T* address(int i, int first) const { return addresses_[i] + (kAcross ? 0 : first); }
  __device__ __forceinline__ int valid(int i, int first, int depth, int extent) const {
    if (addresses_[i] == nullptr) return 0;
    return kAcross ? extent - chunk(i) * kChunk % kRows : depth - first - chunk(i) * kChunk;
  }

 private:
  static __device__ __forceinline__ int number(int i) { return static_cast<int>(threadIdx.x) + i * kThreads; }

  const T* addresses_[kOwn];
};

// Adds up what the threads that share a row hold, and calls `store(row, total)` once for each row of the tile: kLanes
// neighbouring lanes in pairs, then the warps of a row of the grid one after the other. `rows` are a thread's own.
template <class Shape, class Grid, int kLanes, int kOwnRows, class Store>
__device__ __forceinline__ void sum_rows_of_tile(const float (&own)[kOwnRows], const int (&rows)[kOwnRows],
                                                 void* shared, const Store& store) {
  const bool first_lane = threadIdx.x % kLanes == 0;
  float sums[kOwnRows];
#pragma unroll
  for (int i = 0; i < kOwnRows; ++i) {
    sums[i] = own[i];
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], lanes);
  }
  if constexpr (Grid::kColumns == 1) {
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      if (first_lane) store(rows[i], sums[i]);
    }
  } else {
    float* const partial = static_cast<float*>(shared);  // [Grid::kColumns][kM]
    __syncthreads();  // whoever used shared memory before is done with it
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      if (first_lane) partial[Grid::column() * Shape::kM + rows[i]] = sums[i];
    }
    __syncthreads();  // the sums of all warps are there
    for (int r = threadIdx.x; r < Shape::kM; r += Shape::kThreads) {
      float total = partial[r];
#pragma unroll
      for (int column = 1; column < Grid::kColumns; ++column) total += partial[column * Shape::kM + r];
      store(r, total);
    }
  }
}

}  // namespace moesaic

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
          int kRightAlign_, int kThreads_, int kTail_ = 0>
struct TileShape {
  static constexpr int kM = kM_;
  static constexpr int kTail = kTail_;  // rows that a tile may have besides
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

// How the warps of a block share its tile: they form a grid, such that what a warp reads for its part is least; of equal
// ones, that with more rows a warp. kRowUnit and kColumnUnit are what a warp owns whole multiples of.
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
      if (fits(columns) && (found == 0 || read_by_warp(columns) <= read_by_warp(found))) found = columns;
    }
    return found;
  }

  static constexpr int kColumns = best();
  static_assert(kColumns > 0, "the tile cannot be shared by so many warps");
  static constexpr int kRows = kWarps / kColumns;

  static __device__ __forceinline__ int row() { return static_cast<int>(threadIdx.x) / 32 / kColumns; }
  static __device__ __forceinline__ int column() { return static_cast<int>(threadIdx.x) / 32 % kColumns; }
};

// What a thread brings of an operand into shared memory in each kK steps of the sum: kOwn chunks of kChunk elements.
// kTeam lanes share a line, up to 128 bytes of it at a time, so that a thread needs few addresses. kRows are the rows of
// the tile (or columns, of one part). The threads are kThreads from kFirstThread on, a multiple of a warp.
template <typename T, bool kAcross, int kRows, int kParts, int kK, int kChunk, int kThreads, int kFirstThread = 0>
class OperandChunks {
  static constexpr int kPartChunks = (kAcross ? kRows : kK) / kChunk;  // of a line, that follow one another in memory

 public:
  static constexpr int kTeam = smaller(kPartChunks, smaller(32, 128 / (kChunk * static_cast<int>(sizeof(T)))));
  static constexpr int kTeams = kThreads / kTeam;
  static_assert((kAcross ? kRows : kK) % kChunk == 0 && kPartChunks % kTeam == 0 && kThreads % kTeam == 0,
                "teams share lines evenly");

  static constexpr int kLines = kAcross ? kK : kParts * kRows;
  static constexpr int kLineChunks = kAcross ? kParts * kPartChunks : kPartChunks;
  static constexpr int kOwnLines = (kLines + kTeams - 1) / kTeams;
  static constexpr int kOwn = kOwnLines * (kLineChunks / kTeam);

  // Line and chunk of own chunk i.
  static __device__ __forceinline__ int line(int i) { return own_line(i / (kLineChunks / kTeam)); }
  static __device__ __forceinline__ int chunk(int i) { return first_chunk() + i % (kLineChunks / kTeam) * kTeam; }
  static __device__ __forceinline__ bool exists(int i) { return kLines % kTeams == 0 || line(i) < kLines; }
  static __device__ __forceinline__ int own_element() { return first_chunk() * kChunk; }

  // Asks for the addresses of lines: `row(part, r)`, r below `extent`, once for all steps; or, across, `row(part, k)`, k
  // below `depth`, for the steps from `first` on, once for each kK of them. Asking early hides what the answer takes; where
  // there is none, another line is asked for, so that no branch keeps one answer waiting for another.
  template <class Row>
  __device__ __forceinline__ void find(const Row& row, int first, int depth, int extent) {
    if ((kAcross ? depth : extent) > 0) {
      find_some(row, first, depth, extent);
    } else {
#pragma unroll
      for (int l = 0; l < kOwnLines; ++l) {
#pragma unroll
        for (int p = 0; p < kLineParts; ++p) addresses_[l][p] = nullptr;
      }
    }
  }
  // The same where there is a line at all.
  template <class Row>
  __device__ __forceinline__ void find_some(const Row& row, int first, int depth, int extent) {
    const int element = first_chunk() * kChunk;
    const int end = kAcross ? depth : extent;
#pragma unroll
    for (int l = 0; l < kOwnLines; ++l) {
      const int line = smaller(own_line(l), kLines - 1);
#pragma unroll
      for (int p = 0; p < kLineParts; ++p) {
        const int part = kAcross ? p : line / kRows;
        const int r = kAcross ? first + line : line % kRows;
        const T* const address = row(part, smaller(r, end - 1));
        const bool there = own_line(l) < kLines && r < end && (!kAcross || element < extent) && address != nullptr;
        addresses_[l][p] = there ? address + element : nullptr;
      }
    }
  }
  // Takes addresses that are at hand, across: `row(line)` is where own chunks of a line begin, `own_element` of it; of all
  // lines, where there are no more than the `steps` that are left from the stage's first one on. With kWhole, all are there.
  template <bool kWhole, class Row>
  __device__ __forceinline__ void place(const Row& row, int steps, int extent) {
    static_assert(kAcross && kParts == 1, "lines of a stage");
    const int element = own_element();
#pragma unroll
    for (int l = 0; l < kOwnLines; ++l) {
      const T* const address = row(own_line(l));
      addresses_[l][0] = kWhole || (own_line(l) < smaller(steps, kLines) && element < extent) ? address : nullptr;
    }
  }

  // Whether all of a thread's lines are there.
  __device__ __forceinline__ bool all_lines() const {
    bool all = kLines % kTeams == 0;
#pragma unroll
    for (int l = 0; l < kOwnLines; ++l) all = all && addresses_[l][0] != nullptr;
    return all;
  }

  // Where own chunk i of the steps from `first` on lies, and how many of its elements are valid: none if 0 or less.
  __device__ __forceinline__ const T* address(int i, int first) const {
    return line_address(i) + (kAcross ? 0 : first) + part_chunk(i) * kChunk;
  }
  __device__ __forceinline__ int valid(int i, int first, int depth, int extent) const {
    if (line_address(i) == nullptr) return 0;
    return (kAcross ? extent : depth - first) - (first_chunk() + part_chunk(i)) * kChunk;
  }

 private:
  static constexpr int kLineParts = kAcross ? kParts : 1;

  static __device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x) - kFirstThread; }
  static __device__ __forceinline__ int own_line(int l) { return thread() / kTeam + l * kTeams; }
  static __device__ __forceinline__ int first_chunk() { return thread() % kTeam; }
  // How far own chunk i lies behind the first one of its part.
  static __device__ __forceinline__ int part_chunk(int i) { return i % (kPartChunks / kTeam) * kTeam; }
  __device__ __forceinline__ const T* line_address(int i) const {
    return addresses_[i / (kLineChunks / kTeam)][i % (kLineChunks / kTeam) / (kPartChunks / kTeam)];
  }

  const T* addresses_[kOwnLines][kLineParts];
};

// Adds up what the threads that share a row hold, and calls `store(row, total)` once for each row of the tile: kLanes
// neighbouring lanes in pairs, then the warps of a row of the grid one after the other. `row(i)` are a thread's own.
template <class Shape, class Grid, int kLanes, int kOwnRows, class Row, class Store>
__device__ __forceinline__ void sum_rows_of_tile(const float (&own)[kOwnRows], const Row& row, void* shared,
                                                 const Store& store) {
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
      if (first_lane) store(row(i), sums[i]);
    }
  } else {
    float* const partial = static_cast<float*>(shared);  // [Grid::kColumns][kM]
    __syncthreads();  // whoever used shared memory before is done with it
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      if (first_lane) partial[Grid::column() * Shape::kM + row(i)] = sums[i];
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

// A tile of a product on Hopper's tensor cores by wgmma (sm_90a): bf16 and half.
//
// A warpgroup of 128 threads has kM / (kThreads / 128) rows and all columns. Both operands wait in shared memory, kStages of
// 64 steps each, brought by asynchronous copies of all threads. While the tensor cores work on a stage, the products of
// the one before are waited for, and copies into that of two before are under way: it is free, as every warpgroup has
// waited for its products before the last barrier. So copies start kStages - 2 stages ahead.
//
// What bounds it: per 64 x 128 x 16, 64 cycles of a tensor core, 6 KiB are read from shared memory, 48 cycles.
#pragma once

#include "moesaic/tile_copied.cuh"
#include "moesaic/wgmma.cuh"

namespace moesaic {

// The steps of one operand in a stage: groups of lines of 128 bytes, swizzled.
template <typename T, bool kAcross, int kRows, int kParts, int kAlign, int kThreads>
class WgmmaOperand {
  static constexpr int kK = kSwizzledLine / static_cast<int>(sizeof(T));
  using Chunks = OperandChunks<T, kAcross, kRows, kParts, kK, 8, kThreads>;
  static constexpr int kGroupBytes = kK * kSwizzledLine;  // of 64 rows that lie across
  static_assert(kRows % 64 == 0, "groups of 64 rows");

 public:
  static constexpr int kBytes = kParts * kRows * kSwizzledLine;

  template <class Row>
  __device__ __forceinline__ void find(const Row& row, int first, int depth, int extent) {
    copied_.find(row, first, depth, extent);
  }
  template <class Row>
  __device__ __forceinline__ void fetch(unsigned char* stage, const Row& row, int first, int depth, int extent) {
    copied_.fetch(stage, row, first, depth, extent, [](int line, int chunk) {
      return kAcross ? chunk / 8 * kGroupBytes + swizzled(line, chunk % 8) : swizzled(line, chunk);
    });
  }

  // Of the rows from `first_row` on, a multiple of 64.
  static __device__ __forceinline__ SharedMatrix matrix(const unsigned char* stage, int first_row) {
    return shared_matrix(stage + first_row * kSwizzledLine, kGroupBytes);
  }
  // How much further the next 16 steps lie.
  static constexpr int kStepBytes = kAcross ? 16 * kSwizzledLine : 16 * static_cast<int>(sizeof(T));

 private:
  CopiedOperand<T, kAcross, kK, kAlign, Chunks> copied_;
};

template <typename T, class Shape>
class WgmmaTile {
  static_assert(sizeof(T) == 2, "elements of 16 bits");
  static_assert(Shape::kK == 64 && Shape::kStages >= 3, "stages of 64 steps: read, still read, fetched");
  using Left = WgmmaOperand<T, Shape::kLeftAcross, Shape::kM, 1, Shape::kLeftAlign, Shape::kThreads>;
  using Right = WgmmaOperand<T, Shape::kRightAcross, Shape::kN, Shape::kParts, Shape::kRightAlign, Shape::kThreads>;
  static constexpr int kGroups = Shape::kThreads / 128;
  static constexpr int kGroupRows = Shape::kM / kGroups;
  static constexpr int kBlocks = kGroupRows / 64;
  static_assert(Shape::kThreads % 128 == 0 && kGroupRows % 64 == 0, "a warpgroup has blocks of 64 rows");
  static constexpr int kStageBytes = Left::kBytes + Right::kBytes;
  static_assert(Left::kBytes % kSwizzledBlock == 0 && Right::kBytes % kSwizzledBlock == 0, "stages stay aligned");

  struct Grid {  // of warps: each has whole rows
    static constexpr int kColumns = 1;
  };

 public:
  static constexpr int kParts = Shape::kParts;
  static constexpr int kVector = 2;
  static constexpr int kOwnRows = 2 * kBlocks;
  static constexpr int kOwnVectors = Shape::kN / 8;
  static constexpr int kSharedBytes = Shape::kStages * kStageBytes + kSwizzledBlock - 16;  // to begin at a whole block

  float values[kParts][kOwnRows][kOwnVectors][kVector];

  __device__ __forceinline__ int row(int i) const {
    const int thread = static_cast<int>(threadIdx.x);
    return thread / 128 * kGroupRows + i / 2 * 64 + thread % 128 / 32 * 16 + i % 2 * 8 + thread % 32 / 4;
  }
  __device__ __forceinline__ int column(int j) const { return 8 * j + 2 * (static_cast<int>(threadIdx.x) % 4); }

  __device__ __forceinline__ void clear() {
    for_all([](float& value) { value = 0.0f; });
  }

  // values[p][row][column] += the sum over k < depth of left(row, k) * right_p(column, k). See tile.cuh.
  template <class LeftRow, class RightRow>
  __device__ __forceinline__ void multiply(const LeftRow& left_row, const RightRow& right_row, int depth,
                                           int left_extent, int right_extent, void* shared) {
    const size_t misaligned = reinterpret_cast<size_t>(__cvta_generic_to_shared(shared)) % kSwizzledBlock;
    unsigned char* const stages =
        static_cast<unsigned char*>(shared) + (kSwizzledBlock - misaligned) % kSwizzledBlock;
    const auto left_line = [&](int, int r) { return left_row(r); };
    Left left;
    Right right;
    left.find(left_line, 0, depth, left_extent);
    right.find(right_row, 0, depth, right_extent);

    int fetched = 0;  // the next steps to fetch, and the offset of the stage they go to
    int to = 0;
    const auto fetch = [&]() {
      if (fetched < depth) {
        left.fetch(stages + to, left_line, fetched, depth, left_extent);
        right.fetch(stages + to + Left::kBytes, right_row, fetched, depth, right_extent);
      }
      copy_commit();
      fetched += Shape::kK;
      to = next_stage(to);
    };

    PendingProducts pending;
    __syncthreads();  // whoever used shared memory before is done with it
#pragma unroll 1
    for (int i = 0; i < Shape::kStages - 2; ++i) fetch();
    const int group = static_cast<int>(threadIdx.x) / 128;
    int from = 0;
#pragma unroll 1
    for (int first = 0; first < depth; first += Shape::kK) {
      copy_wait<Shape::kStages - 3>();
      shared_to_async_proxy();
      __syncthreads();  // these steps are there, and all products but those of the last steps are done
      for_all(wgmma_pin);
      wgmma_fence();
      const SharedMatrix rows = Left::matrix(stages + from, group * kGroupRows);
      const SharedMatrix columns = Right::matrix(stages + from + Left::kBytes, 0);
#pragma unroll
      for (int k = 0; k < Shape::kK / 16; ++k) multiply_blocks(pending, rows, columns, k, Blocks<kBlocks>());
      wgmma_commit(pending);
      fetch();
      wgmma_wait<1>(pending);
      from = next_stage(from);
    }
    wgmma_wait<0>(pending);
    for_all(wgmma_pin);
  }

  // The sum over the tile's columns of `own`, a number for each own row; `store(row, total)` is called once a row.
  template <class Store>
  __device__ __forceinline__ void sum_rows(const float (&own)[kOwnRows], void* shared, const Store& store) {
    int rows[kOwnRows];
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) rows[i] = row(i);
    sum_rows_of_tile<Shape, Grid, 4>(own, rows, shared, store);
  }

 private:
  template <int kCount>
  struct Blocks {};

  static __device__ __forceinline__ int next_stage(int offset) {
    return offset == (Shape::kStages - 1) * kStageBytes ? 0 : offset + kStageBytes;
  }

  // Block after block of 64 rows: which one is a constant of the instruction's registers.
  template <int kCount>
  __device__ __forceinline__ void multiply_blocks(PendingProducts& pending, SharedMatrix rows, SharedMatrix columns,
                                                  int k, Blocks<kCount>) {
    if constexpr (kCount > 1) multiply_blocks(pending, rows, columns, k, Blocks<kCount - 1>());
    constexpr int kBlock = kCount - 1;
    wgmma<T, Shape::kLeftAcross, Shape::kRightAcross, kBlock>(
        pending, values, rows + (kBlock * 64 * kSwizzledLine + k * Left::kStepBytes), columns + k * Right::kStepBytes);
  }

  template <class Function>
  __device__ __forceinline__ void for_all(const Function& function) {
#pragma unroll
    for (int p = 0; p < kParts; ++p)
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i)
#pragma unroll
        for (int j = 0; j < kOwnVectors; ++j)
#pragma unroll
          for (int v = 0; v < kVector; ++v) function(values[p][i][j][v]);
  }
};

}  // namespace moesaic

// A tile of a product on Hopper's tensor cores by wgmma (sm_90a), the operands swapped: the tile's columns are the
// instruction's rows, its rows the instruction's columns.
//
//   144 rows      of a product over an expert's rows. An instruction has as many columns as there are, in small steps, so that
//                 an expert's rows are shared out evenly (`EvenTiles` in experts.cuh): where rows come in steps of 128, an
//                 expert of 257 takes a third tile, which reads the weight once more for one row
//   256 rows      of a gradient. An instruction reads 10 KiB of shared memory in 128 cycles, where one of 64 x 128 reads
//                 6 in 64: too much beside what arrives there
//
// Used like a cooperative tile of tile_wgmma.cuh. Both warpgroups have all rows; each has half of the columns: 64 of both
// parts, or 128. Where values are: row 8 j + 2 t + v, v < 2, column 64 b + 16 w + g + 8 r of the warpgroup's is
// values[b][j][2 r + v], with w the warp, g = lane / 4, t = lane % 4; of two parts, b is the part. They leave by
// `StagedColumns` (staged.cuh).
//
// What bounds it: per 256 x 136 x 64, 1088 cycles of the tensor cores, a pair wants 33 KiB a block from the L2 cache. Per
// 256 x 128 x 64, 1024 cycles, in which 80 KiB of shared memory are read and 48 written, of 128 that there are.
#pragma once

#include "moesaic/staged.cuh"
#include "moesaic/wgmma_stages.cuh"

namespace moesaic {

template <typename T, class Shape, Fetch kLeft, Fetch kRight, int kStagedBytes>
class SwappedTile
    : public WgmmaStages<T, Shape, kLeft, kRight, kStagedBytes, Shape::kThreads - kFetchThreads, 0> {
  using Stages = WgmmaStages<T, Shape, kLeft, kRight, kStagedBytes, Shape::kThreads - kFetchThreads, 0>;
  using typename Stages::Left;
  using typename Stages::Right;
  using Stages::advance, Stages::full, Stages::kCopies, Stages::kStageBytes, Stages::own_group, Stages::parity_,
      Stages::release, Stages::stage_, Stages::stages_;

 public:
  using Stages::kGroups, Stages::kPair, Stages::kShortFirst, Stages::kWorkers;
  static constexpr int kParts = Shape::kParts;
  static constexpr int kGroupColumns = Shape::kN / kGroups;           // of a warpgroup, in each part
  static constexpr int kBlocks = kParts * kGroupColumns / 64;         // of 64 columns of a part
  static constexpr int kColumnBlocks = kBlocks / kParts;
  static_assert(kGroupColumns % 64 == 0 && (kParts == 1 || kColumnBlocks == 1), "a warpgroup has blocks of 64 columns");
  static_assert(Shape::kLeftAcross ? Shape::kM == 256 : Shape::kM == 144, "widths of wgmma_columns");

  float values[kBlocks][Shape::kM / 8][4];

  __device__ __forceinline__ explicit SwappedTile(void* shared) : Stages(shared) {}

  // The warpgroup's first column, of each part.
  static __device__ __forceinline__ int first_column() { return own_group() * kGroupColumns; }

  // values[..] = the sum over k < depth of left(row, k) * right_p(column, k), of what is being fetched, for the `rows` of
  // the tile that are there; without any, only the waiting. See tile_wgmma.cuh for kShortFirst.
  __device__ __forceinline__ void multiply(int depth, long long rows) {
    if constexpr (Shape::kM == 256) {
      if (rows > 0) {
        multiply_rows<256>(depth);
      } else {
        multiply_rows<0>(depth);
      }
    } else if (rows > 136) {
      multiply_rows<144>(depth);
    } else if (rows > 128) {
      multiply_rows<136>(depth);
    } else if (rows > 120) {
      multiply_rows<128>(depth);
    } else if (rows > 96) {
      multiply_rows<120>(depth);
    } else if (rows > 64) {
      multiply_rows<96>(depth);
    } else if (rows > 32) {
      multiply_rows<64>(depth);
    } else if (rows > 0) {
      multiply_rows<32>(depth);
    } else {
      multiply_rows<0>(depth);
    }
  }

 private:
  friend Stages;
  template <int kRows>
  __device__ __forceinline__ void multiply_rows(int depth) {
    PendingProducts pending;
    if (Shape::kLeftAcross && depth <= 0) for_all([](float& value) { value = 0.0f; });  // no product begins the sums
    int read = -1;  // the stage before
    const SharedMatrix rows_there = Left::matrix(stages_, 0);  // in the first stage
    const SharedMatrix columns_there = Right::matrix(stages_ + Left::kBytes, first_column());
    const int short_steps = kShortFirst ? Stages::short_steps(depth) : 0;
    if (short_steps > 0) {
      mbarrier_wait(full(stage_), parity_);
      if constexpr (kRows > 0) {
        Stages::template multiply_short<Shape::kK / 16 - 1, kRows>(*this, short_steps, pending, rows_there, columns_there);
      }
      release(stage_);
      advance();
    }
#pragma unroll 1
    for (int first = short_steps; first < depth; first += Shape::kK) {
      mbarrier_wait(full(stage_), parity_);
      if constexpr (kRows > 0) {
        multiply_stage<Shape::kK / 16, kRows>(pending, rows_there, columns_there, first == 0);
        wgmma_wait<1>(pending);
      }
      if (read >= 0) release(read);
      read = stage_;
      advance();
    }
    if constexpr (kRows > 0) {
      wgmma_wait<0>(pending);
      for_all(wgmma_pin);
    }
    if (read >= 0) release(read);
  }

  template <int kCount>
  struct Blocks {};

  // The first kSteps products of a stage, from where its operands would lie in the first one.
  template <int kSteps, int kRows>
  __device__ __forceinline__ void multiply_stage(PendingProducts& pending, SharedMatrix rows, SharedMatrix columns,
                                                 bool begins) {
    if constexpr (kCopies) shared_to_async_proxy();
    for_all(wgmma_pin);
    wgmma_fence();
    const SharedMatrix rows_here = rows + stage_ * kStageBytes;
    const SharedMatrix columns_here = columns + stage_ * kStageBytes;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      multiply_blocks<kRows>(pending, columns_here, rows_here, k, begins && k == 0, Blocks<kBlocks>());
    }
    wgmma_commit(pending);
  }

  // Block after block of 64 columns: which one is a constant of the instruction's registers.
  template <int kRows, int kCount>
  __device__ __forceinline__ void multiply_blocks(PendingProducts& pending, SharedMatrix columns, SharedMatrix rows, int k,
                                                  bool begins, Blocks<kCount>) {
    if constexpr (kCount > 1) multiply_blocks<kRows>(pending, columns, rows, k, begins, Blocks<kCount - 1>());
    constexpr int kBlock = kCount - 1;
    constexpr int kFurther = kParts == 1 ? 64 : Shape::kN;  // where the next block's columns lie in a stage
    wgmma_columns<T, Shape::kRightAcross, Shape::kLeftAcross, kRows>(
        pending, values[kBlock], columns + (kBlock * kFurther * kSwizzledLine + k * Right::kStepBytes),
        rows + k * Left::kStepBytes, begins);
  }

  template <class Function>
  __device__ __forceinline__ void for_all(const Function& function) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int j = 0; j < Shape::kM / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) function(values[b][j][i]);
  }
};

}  // namespace moesaic

// A tile of a product on Hopper's tensor cores by wgmma (sm_90a): bf16 and half.
//
// Of the warpgroups that multiply there are two:
//
//   cooperative   both have one tile, half of its rows each
//   ping-pong     they have tiles in turn: one multiplies while the other is busy with what follows
//
//   Tile tile(shared);                       // all threads; Tile::kSharedBytes, aligned to 16
//   if (Tile::fetches()) {                   // registers go from here ...
//     give_registers<...>();
//     for (...) tile.fetch(left, right, depth, left_extent, right_extent, together);
//   } else {
//     take_registers<...>();                 // ... to here
//     for (...) {
//       if (tile.passes(depth)) continue;    // it is the other warpgroup's
//       tile.multiply(depth, rows);
//       ... tile.values ...
//     }
//   }
//   tile.finish();                           // all threads
//
// With Shape::kTail, a pair of tiles that both have may have that many rows besides, `tile.tail`. Then `tile.vacate(staged)`
// comes before the product, and gives them the memory from which results of the one before have left.
//
// What bounds it: per 64 x 256 x 16, 128 cycles of the tensor cores, 10 KiB are read from shared memory, 80 cycles. A tile
// of 128 x 256 wants 48 KiB from the L2 cache each 1024 cycles, of a pair 32 KiB.
#pragma once

#include "moesaic/staged.cuh"
#include "moesaic/wgmma_stages.cuh"

namespace moesaic {

// Where `kStagedBytes` are for what leaves by `StagedBoxes`, the tile's values stay where the tensor cores leave them, two
// neighbouring columns with each thread; else a thread has eight, 16 bytes of a row.
template <typename T, class Shape, Fetch kLeft = Fetch::kLines, Fetch kRight = Fetch::kLines, bool kPingPong = false,
          int kStagedBytes = 0>
class WgmmaTile : public WgmmaStages<T, Shape, kLeft, kRight, kStagedBytes,
                                     kPingPong ? 128 : Shape::kThreads - kFetchThreads, kPingPong ? 2 : 0> {
  using Stages = WgmmaStages<T, Shape, kLeft, kRight, kStagedBytes, kPingPong ? 128 : Shape::kThreads - kFetchThreads,
                             kPingPong ? 2 : 0>;
  using typename Stages::Left;
  using typename Stages::Right;
  using Stages::advance, Stages::full, Stages::kCopies, Stages::kStageBytes, Stages::own_group, Stages::parity_,
      Stages::release, Stages::stage_, Stages::stages_, Stages::tail_of, Stages::tail_there, Stages::tails_,
      Stages::turn_of;

 public:
  using Stages::kGroups, Stages::kPair, Stages::kShortFirst, Stages::kWorkers;
  static constexpr int kGroupRows = kPingPong ? Shape::kM : Shape::kM / kGroups;  // rows of a warpgroup
  static constexpr int kParts = Shape::kParts;
  static constexpr int kVector = kStagedBytes > 0 ? 2 : 8;
  static_assert(!kPingPong || kGroups == 2, "two warpgroups in turn");
  static_assert(kGroupRows % 64 == 0, "a warpgroup has blocks of 64 rows");
  static_assert(Shape::kN % 32 == 0, "four neighbouring lanes have 32 columns");
  // Rows that the last pair of an expert has besides, where they are so few that they need no tile of their own: their
  // products have operands swapped, and take what lies there of the right one, a part of its columns in each warpgroup of
  // both blocks.
  static constexpr int kTail = Shape::kTail;
  static constexpr int kTailColumns = Shape::kN / kGroups / kPair;
  static constexpr int kTailBlocks = kTailColumns / 64;
  static constexpr int kTailBegins = Shape::kStages - 1;  // with so many stages, the last of which comes while it does
  static_assert(kTail == 0 || (!kPingPong && Shape::kParts == 1 && kStagedBytes > 0 && kTailColumns % 64 == 0),
                "a tail is that of a tile that both warpgroups share, of one part");

 private:
  friend Stages;
  static constexpr bool kClears = kPingPong || kStagedBytes == 0;
  struct Grid {  // of warps: each has whole rows
    static constexpr int kColumns = 1;
  };

 public:
  static constexpr int kBlocks = kGroupRows / 64;  // of 64 rows that a warpgroup has
  static constexpr int kOwnRows = 2 * kBlocks;
  static constexpr int kOwnVectors = Shape::kN / (4 * kVector);

  float values[kParts][kOwnRows][kOwnVectors][kVector];
  // Of the tail: row 8 j + 2 t + v, v < 2, column 64 b + 16 w + g + 8 r of the warpgroup's is tail[b][j][2 r + v], with w the
  // warp, g = lane / 4, t = lane % 4, as in tile_swapped.cuh.
  float tail[kTail > 0 ? kTailBlocks : 1][kTail > 0 ? kTail / 8 : 1][4];

  __device__ __forceinline__ explicit WgmmaTile(void* shared) : Stages(shared) {}

  __device__ __forceinline__ int row(int i) const { return first_row() + i / 2 * 64 + row_of_block(i); }
  // The row within its block.
  static __device__ __forceinline__ int row_of_block(int i) {
    return static_cast<int>(threadIdx.x) % 128 / 32 * 16 + i % 2 * 8 + static_cast<int>(threadIdx.x) % 32 / 4;
  }
  __device__ __forceinline__ int column(int j) const {
    return kVector * (4 * j + static_cast<int>(threadIdx.x) % 4);
  }
  // The warpgroup's first column of the tail.
  static __device__ __forceinline__ int first_column() { return (Stages::rank() * kGroups + own_group()) * kTailColumns; }
  // The warpgroup's first row.
  static __device__ __forceinline__ int first_row() { return kPingPong ? 0 : own_group() * kGroupRows; }

  // Whether a tile is the other warpgroup's; then its steps are passed over. Once for each tile.
  __device__ __forceinline__ bool passes(int depth) {
    if constexpr (!kPingPong) return false;
    const bool mine = tiles_ % 2 == own_group();
    ++tiles_;
    if (mine) return false;
    stage_ += (depth + Shape::kK - 1) / Shape::kK;
    parity_ ^= stage_ / Shape::kStages % 2;
    stage_ %= Shape::kStages;
    return true;
  }

  // values[p][row][column] = the sum over k < depth of left(row, k) * right_p(column, k), of what is being fetched.
  // `rows` of the tile are there: warpgroups without any only take part in the waiting. The first product begins the sums,
  // where the compiler keeps products asynchronous even so: clearing sums takes 300 cycles. With kShortFirst, products of
  // zeros in the first stage are left out, where sums need not be cleared. `tail` likewise, where there are rows of it.
  __device__ __forceinline__ void multiply(int depth, long long rows, int tail_rows = 0) {
    if constexpr (kTail > 0) {
      if (tail_rows > 0) return multiply_rows<true>(depth, rows);
    }
    multiply_rows<false>(depth, rows);
  }

  // The sum over the tile's columns of `own`, a number for each own row; `store(row, total)` is called once a row.
  template <class Store>
  __device__ __forceinline__ void sum_rows(const float (&own)[kOwnRows], void* shared, const Store& store) {
    sum_rows_of_tile<Shape, Grid, 4>(own, [this](int i) { return row(i); }, shared, store);
  }

 private:
  template <int kCount>
  struct Blocks {};

  template <bool kWithTail>
  __device__ __forceinline__ void multiply_rows(int depth, long long rows) {
    const bool idle = first_row() >= rows;
    PendingProducts pending;
    if (kClears || depth <= 0) for_all([](float& value) { value = 0.0f; });
    // A stage's parity says nothing to who is two rounds of stages behind: no waiting for it out of turn.
    if constexpr (kPingPong) mbarrier_wait(turn_of(own_group()), (tiles_ - 1) / 2 % 2 ^ (own_group() == 0 ? 1 : 0));
    int read = -1;  // the stage before
    const SharedMatrix rows_there = Left::matrix(stages_, first_row());  // in the first stage
    const SharedMatrix columns_there = Right::matrix(stages_ + Left::kBytes, 0);
    const int short_steps = kShortFirst && !kClears ? Stages::short_steps(depth) : 0;
    if (short_steps > 0) {
      mbarrier_wait(full(stage_), parity_);
      if (!idle) {
        Stages::template multiply_short<Shape::kK / 16 - 1>(*this, short_steps, pending, rows_there, columns_there);
      }
      release(stage_);
      advance();
    }
    if constexpr (kWithTail) read = begin_with_tail(pending, rows_there, columns_there);
#pragma unroll 1
    for (int first = kWithTail ? kTailBegins * Shape::kK : short_steps; first < depth; first += Shape::kK) {
      mbarrier_wait(full(stage_), parity_);
      if (!idle) {
        multiply_stage<Shape::kK / 16, kWithTail>(pending, rows_there, columns_there, !kClears && first == 0);
        wgmma_wait<1>(pending);
      }
      if (read >= 0) release(read);
      read = stage_;
      advance();
    }
    if constexpr (kPingPong) arrive_once(turn_of(1 - own_group()));
    wgmma_wait<0>(pending);
    for_all(wgmma_pin);
    if constexpr (kWithTail) {
      for_tail(wgmma_pin);
      sync_threads<kWorkers>(kGroups + 1);  // what leaves now comes to where either warpgroup has read rows
    }
    if (read >= 0) release(read);
    if constexpr (kVector == 8) share_columns();
  }

  // The first kTailBegins stages. A tail's lines come late, for they wait until results have left: its products begin with
  // the last of these stages, for all of them. Returns the stage that is still being read.
  __device__ __forceinline__ int begin_with_tail(PendingProducts& pending, SharedMatrix rows, SharedMatrix columns) {
    int stages[kTailBegins];
#pragma unroll
    for (int n = 0; n < kTailBegins; ++n) {
      stages[n] = stage_;
      mbarrier_wait(full(stage_), parity_);
      if (n + 1 < kTailBegins) {
        multiply_stage<Shape::kK / 16>(pending, rows, columns, /*begins=*/n == 0);
        advance();
      }
    }
    mbarrier_wait(tail_there(), tails_++ % 2);
    for_tail(wgmma_pin);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n + 1 < kTailBegins; ++n) {
#pragma unroll
      for (int k = 0; k < Shape::kK / 16; ++k) multiply_tail(pending, stages[n], k, /*begins=*/n == 0 && k == 0);
    }
    wgmma_commit(pending);
    multiply_stage<Shape::kK / 16, true>(pending, rows, columns, /*begins=*/false);
    advance();
    wgmma_wait<1>(pending);
#pragma unroll
    for (int n = 0; n + 1 < kTailBegins; ++n) release(stages[n]);
    return stages[kTailBegins - 1];
  }

  template <class Function>
  __device__ __forceinline__ void for_tail(const Function& function) {
#pragma unroll
    for (int b = 0; b < kTailBlocks; ++b)
#pragma unroll
      for (int j = 0; j < kTail / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) function(tail[b][j][i]);
  }

  // One arrival of a warp.
  static __device__ __forceinline__ void arrive_once(Mbarrier* barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive_and_expect(barrier, 0);
  }

  // The first kSteps products of a stage, from where its operands would lie in the first one.
  template <int kSteps, bool kWithTail = false>
  __device__ __forceinline__ void multiply_stage(PendingProducts& pending, SharedMatrix rows, SharedMatrix columns,
                                                 bool begins) {
    if constexpr (kCopies) shared_to_async_proxy();
    for_all(wgmma_pin);
    if constexpr (kWithTail) for_tail(wgmma_pin);
    wgmma_fence();
    const SharedMatrix rows_here = rows + stage_ * kStageBytes;
    const SharedMatrix columns_here = columns + stage_ * kStageBytes;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if constexpr (kWithTail) multiply_tail(pending, stage_, k, begins && k == 0);
      multiply_blocks(pending, rows_here, columns_here, k, begins && k == 0, Blocks<kBlocks>());
    }
    wgmma_commit(pending);
  }

  // Block after block of 64 columns, which are the instruction's rows.
  __device__ __forceinline__ void multiply_tail(PendingProducts& pending, int stage, int k, bool begins) {
    const unsigned char* const there = stages_ + stage * kStageBytes + Left::kBytes;
    const SharedMatrix rows = Left::matrix(tail_of(stage), 0) + k * Left::kStepBytes;
    const SharedMatrix columns = Right::matrix(there, first_column()) + k * Right::kStepBytes;
#pragma unroll
    for (int b = 0; b < kTailBlocks; ++b) {
      wgmma_columns<T, Shape::kRightAcross, Shape::kLeftAcross, kTail>(pending, tail[b], columns + b * 64 * kSwizzledLine,
                                                                       rows, begins);
    }
  }

  // Block after block of 64 rows: which one is a constant of the instruction's registers.
  template <int kCount>
  __device__ __forceinline__ void multiply_blocks(PendingProducts& pending, SharedMatrix rows, SharedMatrix columns,
                                                  int k, bool begins, Blocks<kCount>) {
    if constexpr (kCount > 1) multiply_blocks(pending, rows, columns, k, begins, Blocks<kCount - 1>());
    constexpr int kBlock = kCount - 1;
    wgmma<T, Shape::kLeftAcross, Shape::kRightAcross, kBlock>(
        pending, values, rows + (kBlock * 64 * kSwizzledLine + k * Left::kStepBytes), columns + k * Right::kStepBytes,
        begins);
  }

  // The tensor cores leave columns 8 j + 2 t and 8 j + 2 t + 1, j < 4, of each 32 with lane t of four; from here on it has
  // columns 8 t to 8 t + 7, 16 bytes of a row in memory. A transposition of 4 x 4 pairs, in two rounds.
  __device__ __forceinline__ void share_columns() {
    exchange<1>();
    exchange<2>();
  }
  template <int kDistance>
  __device__ __forceinline__ void exchange() {
    const bool upper = static_cast<int>(threadIdx.x) & kDistance;
#pragma unroll
    for (int p = 0; p < kParts; ++p)
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i)
#pragma unroll
        for (int g = 0; g < kOwnVectors; ++g)
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if (j & kDistance) continue;
#pragma unroll
            for (int v = 0; v < 2; ++v) {
              float& low = values[p][i][g][2 * j + v];
              float& high = values[p][i][g][2 * (j | kDistance) + v];
              const float found = __shfl_xor_sync(0xffffffffu, upper ? low : high, kDistance);
              if (upper) {
                low = found;
              } else {
                high = found;
              }
            }
          }
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

  int tiles_ = 0;  // seen so far, of both warpgroups in turn
};

}  // namespace moesaic

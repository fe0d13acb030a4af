// What follows a product, on its way out: a warpgroup puts kColumns of rows into shared memory, from where the copy engine takes
// them, in boxes of 64 columns at most, while the next product is under way.
//
//   StagedBoxes<T, kColumns, kOutputs, kBuffers> staged(memory);    // of the warpgroup's own
//   for (...) {                                                     // as much as leaves at a time
//     staged.begin();
//     ... staged.put(output, r, w, pair) ...
//     staged.written();
//     staged.store(output, map, column, row, matrix);     // each output, or `store_rows`
//     staged.sent();
//   }
//   staged.finish();
//
// Everything is for all 128 threads. What a box has outside of the matrix, or more than an operand's rows, is not written. Pairs
// of numbers go into shared memory in blocks of 8 x 8, four at a time, by one instruction.
#pragma once

#include "moesaic/boxes.cuh"

namespace moesaic {

template <typename T, int kColumns_, int kOutputs, int kBuffers, int kRows_ = 64>
class StagedBoxes {
  static constexpr int kBoxColumns = kColumns_ < 64 ? kColumns_ : 64;
  static_assert(sizeof(T) == 2 && kBoxColumns % 32 == 0 && kColumns_ % kBoxColumns == 0, "lines of 64 or 128 bytes");
  static constexpr int kLine = kBoxColumns * 2;
  static constexpr int kBoxes = kColumns_ / kBoxColumns;
  static constexpr int kBoxBytes = kRows_ * kLine;

 public:
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kVectors = kColumns / 8;
  static constexpr int kBytes = kBuffers * kOutputs * kBoxes * kBoxBytes;

  // `memory` is aligned to 1024 bytes.
  __device__ __forceinline__ explicit StagedBoxes(unsigned char* memory) : boxes_(memory) {}

  // Waits until a buffer is free.
  __device__ __forceinline__ void begin() {
    buffer_ = buffer_ + 1 == kBuffers ? 0 : buffer_ + 1;
    by_one_lane([] { stored_wait<kBuffers - 1>(); });
    sync();
  }

  // Columns 8 w + 2 t and the next, with t the lane of four, of this thread's row r of two; in the order of r, and of w for
  // each. No bank is written twice at once.
  __device__ __forceinline__ void put(int output, int r, int w, const float (&pair)[2]) {
    keep(output, w % 4, pair);
    if (w % 4 != 3) return;
    const int first_line = static_cast<int>(threadIdx.x) % 128 / 32 * 16 + r * 8;
    constexpr int kVectorsOfBox = kBoxColumns / 8;
    unsigned char* const to = box(output, w / kVectorsOfBox);
    store_kept<false>(output, [&](int block, int line) { return to + place(first_line + line, w % kVectorsOfBox - 3 + block); });
  }

  __device__ __forceinline__ void written() {
    shared_to_async_proxy();
    sync();
  }

  // What leaves begins at (column, row) of a matrix, and every box of it before the last column.
  __device__ __forceinline__ void store(int output, const TensorMap& map, int column, int row, int matrix) {
    by_one_lane([&] {
#pragma unroll
      for (int n = 0; n < kBoxes; ++n) store_box(box(output, n), map, column + n * kBoxColumns, row, matrix);
    });
  }
  // It has `count` rows of an operand from `first_row` on, kRows at most, whose map is one of rows (tensor_map.cuh).
  __device__ __forceinline__ void store_rows(int output, const TensorMap& map, int column, int first_row, int count) {
    by_one_lane([&] {
#pragma unroll
      for (int n = 0; n < kBoxes; ++n) {
        store_box_of_rows(box(output, n), map, column + n * kBoxColumns, first_row, count);
      }
    });
  }

  __device__ __forceinline__ void sent() {
    by_one_lane([] { stored_commit(); });
  }
  // No thread ends while its boxes are read.
  __device__ __forceinline__ void finish() {
    finish([] {});
  }
  // The memory is free: the lane that knows calls `then`.
  template <class Then>
  __device__ __forceinline__ void finish(const Then& then) {
    by_one_lane([&] {
      stored_wait<0>();
      then();
    });
  }

 protected:
  // Done by one lane, always the same, of a warp which the compiler knows to be all there (see `elect_lane`).
  template <class Ask>
  __device__ __forceinline__ void by_one_lane(const Ask& ask) const {
    if (warp_ != 0) return;
    if (elect_lane()) ask();
  }
  static __device__ __forceinline__ void sync() { sync_threads<128>(1 + static_cast<int>(threadIdx.x) / 128); }
  // Of a chunk of 8 columns of a line, as the copy engine swizzles it.
  static __device__ __forceinline__ int place(int line, int chunk) {
    return line * kLine + 16 * (chunk ^ (kBoxColumns == 64 ? line % 8 : line / 2 % 4));
  }
  __device__ __forceinline__ unsigned char* box(int output, int n = 0) const {
    return boxes_ + ((buffer_ * kOutputs + output) * kBoxes + n) * kBoxBytes;
  }

  __device__ __forceinline__ void keep(int output, int block, const float (&pair)[2]) {
    const T elements[2] = {from_float<T>(pair[0]), from_float<T>(pair[1])};
    memcpy(&kept_[output][block], elements, sizeof(unsigned));
  }
  // Lane 4 c + t's pair of a block goes to line c, places 2 t and 2 t + 1; turned, to lines 2 t and 2 t + 1, place c.
  // `place(b, n)` is where line n of block b begins, 16 bytes. PTX ISA, "Warp Level Matrix Store Instruction: stmatrix".
  template <bool kTurned, class Place>
  __device__ __forceinline__ void store_kept(int output, const Place& place) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const unsigned(&kept)[4] = kept_[output];
#ifdef MOESAIC_EMULATE
    for (int b = 0; b < 4; ++b) {
      T elements[2];
      memcpy(elements, &kept[b], sizeof(unsigned));
      for (int v = 0; v < 2; ++v) {
        const int line = kTurned ? lane % 4 * 2 + v : lane / 4;
        const int at = kTurned ? lane / 4 : lane % 4 * 2 + v;
        memcpy(place(b, line) + at * sizeof(T), &elements[v], sizeof(T));
      }
    }
#else
    const auto to = static_cast<unsigned>(__cvta_generic_to_shared(place(lane / 8, lane % 8)));
    if constexpr (kTurned) {
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                   :: "r"(to), "r"(kept[0]), "r"(kept[1]), "r"(kept[2]), "r"(kept[3])
                   : "memory");
    } else {
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                   :: "r"(to), "r"(kept[0]), "r"(kept[1]), "r"(kept[2]), "r"(kept[3])
                   : "memory");
    }
#endif
  }

  unsigned char* boxes_;
  int buffer_ = 0;
  const unsigned warp_ = of_warp(threadIdx.x % 128 / 32);  // of the warpgroup
  unsigned kept_[kOutputs][4];  // pairs that wait for others
};

// The same for a tile whose threads hold neighbouring rows of a column (tile_swapped.cuh): blocks are turned on their way.
template <typename T, int kColumns, int kOutputs, int kBuffers, int kRows>
class StagedColumns : public StagedBoxes<T, kColumns, kOutputs, kBuffers, kRows> {
  using Boxes = StagedBoxes<T, kColumns, kOutputs, kBuffers, kRows>;
  static_assert(kColumns == 64 && kRows % 16 == 0, "a warp has 16 columns, and puts 16 rows at a time");

 public:
  __device__ __forceinline__ explicit StagedColumns(unsigned char* memory) : Boxes(memory) {}

  // Rows 8 w + 2 t and the next, with t the lane of four, of column 16 times the warp + 8 r + lane / 4; in the order of w, and
  // of r for each.
  __device__ __forceinline__ void put(int output, int r, int w, const float (&pair)[2]) {
    this->keep(output, w % 2 * 2 + r, pair);
    if (w % 2 == 0 || r == 0) return;
    const int first_chunk = static_cast<int>(threadIdx.x) % 128 / 32 * 2;
    unsigned char* const box = this->box(output);
    this->template store_kept<true>(output, [&](int block, int line) {
      return box + Boxes::place(8 * (w - 1 + block / 2) + line, first_chunk + block % 2);
    });
  }
};

}  // namespace moesaic

// What follows a product, on its way out: a warpgroup puts boxes of rows into shared memory, from where the copy engine takes
// them, while the next product is under way.
//
//   StagedBoxes<T, kColumns, kOutputs, kBuffers> staged(memory);    // of the warpgroup's own
//   for (...) {                                                     // boxes
//     staged.begin();
//     ... staged.put(output, r, w, pair) ...
//     staged.written();
//     staged.store(output, map, column, row, matrix, valid, columns_left, address, stride);     // each output
//     staged.sent();
//   }
//   staged.finish();
//
// Everything is for all 128 threads. Of a box with fewer valid rows than it has the threads store the valid ones.
#pragma once

#include "moesaic/boxes.cuh"

namespace moesaic {

template <typename T, int kColumns_, int kOutputs, int kBuffers, int kRows_ = 64>
class StagedBoxes {
  static_assert(sizeof(T) == 2 && (kColumns_ == 32 || kColumns_ == 64), "lines of 64 or 128 bytes");
  static constexpr int kLine = kColumns_ * 2;

 public:
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kVectors = kColumns / 8;
  static constexpr int kBytes = kOutputs * kBuffers * kRows * kLine;

  // `memory` is aligned to 1024 bytes.
  __device__ __forceinline__ explicit StagedBoxes(unsigned char* memory) : boxes_(memory) {}

  // Waits until a buffer is free.
  __device__ __forceinline__ void begin() {
    buffer_ = buffer_ + 1 == kBuffers ? 0 : buffer_ + 1;
    if (first()) stored_wait<kBuffers - 1>();
    sync();
  }

  // Columns 8 w + 2 t and the next, with t the lane of four, of this thread's row r of two: no bank is written twice at once.
  __device__ __forceinline__ void put(int output, int r, int w, const float (&pair)[2]) {
    const T elements[2] = {from_float<T>(pair[0]), from_float<T>(pair[1])};
    unsigned word;
    memcpy(&word, elements, sizeof(word));
    const int thread = static_cast<int>(threadIdx.x) % 128;
    const int line = thread / 32 * 16 + r * 8 + thread % 32 / 4;
    *reinterpret_cast<unsigned*>(box(output) + place(line, w) + thread % 4 * 4) = word;
  }

  __device__ __forceinline__ void written() {
    shared_to_async_proxy();
    sync();
  }

  // The box begins at (column, row) of a matrix; `address` is that of its first element, rows are `stride` elements apart.
  __device__ __forceinline__ void store(int output, const TensorMap& map, int column, int row, int matrix, long long valid,
                                        int columns_left, T* address, long long stride) {
    if (valid >= kRows) {
      if (first()) store_box(box(output), map, column, row, matrix);
      return;
    }
    const int thread = static_cast<int>(threadIdx.x) % 128;
#pragma unroll 1
    for (int n = 0; n < kRows * kVectors / 128; ++n) {
      const int line = (thread + n * 128) / kVectors, chunk = thread % kVectors;
      if (line >= valid || 8 * chunk >= columns_left) continue;
      T* const at = address + line * stride + 8 * chunk;
      check_access(at, 16, true);
      *reinterpret_cast<uint4*>(at) = *reinterpret_cast<const uint4*>(box(output) + place(line, chunk));
    }
  }

  __device__ __forceinline__ void sent() {
    if (first()) stored_commit();
  }
  // No thread ends while its boxes are read.
  __device__ __forceinline__ void finish() {
    if (first()) stored_wait<0>();
  }

 protected:
  static __device__ __forceinline__ bool first() { return threadIdx.x % 128 == 0; }
  static __device__ __forceinline__ void sync() { sync_threads<128>(1 + static_cast<int>(threadIdx.x) / 128); }
  // Of a chunk of 8 columns of a line, as the copy engine swizzles it.
  static __device__ __forceinline__ int place(int line, int chunk) {
    return line * kLine + 16 * (chunk ^ (kColumns == 64 ? line % 8 : line / 2 % 4));
  }
  __device__ __forceinline__ unsigned char* box(int output) const {
    return boxes_ + (buffer_ * kOutputs + output) * (kRows * kLine);
  }

  unsigned char* boxes_;
  int buffer_ = 0;
};

// The same for a tile whose threads hold neighbouring rows of a column (tile_swapped.cuh).
template <typename T, int kColumns, int kOutputs, int kBuffers, int kRows>
class StagedColumns : public StagedBoxes<T, kColumns, kOutputs, kBuffers, kRows> {
  using Boxes = StagedBoxes<T, kColumns, kOutputs, kBuffers, kRows>;
  static_assert(kColumns == 64 && kRows % 8 == 0, "a warp has 16 columns");

 public:
  __device__ __forceinline__ explicit StagedColumns(unsigned char* memory) : Boxes(memory) {}

  // Rows 8 w + 2 t and the next, with t the lane of four, of column 16 times the warp + 8 r + lane / 4.
  __device__ __forceinline__ void put(int output, int r, int w, const float (&pair)[2]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int chunk = static_cast<int>(threadIdx.x) % 128 / 32 * 2 + r;
    unsigned char* const box = this->box(output);
    store_turned(pair, [&](int row) { return box + Boxes::place(8 * w + row, chunk); }, lane);
  }

 private:
  // Element v of lane 4 c + t goes to line 2 t + v, place c of it; `line(n)` is where line n of 8 begins, 16 bytes.
  // PTX ISA, "Warp Level Matrix Store Instruction: stmatrix".
  template <class Line>
  static __device__ __forceinline__ void store_turned(const float (&pair)[2], const Line& line, int lane) {
    const T elements[2] = {from_float<T>(pair[0]), from_float<T>(pair[1])};
#ifdef MOESAIC_EMULATE
    for (int v = 0; v < 2; ++v) memcpy(line(2 * (lane % 4) + v) + lane / 4 * sizeof(T), &elements[v], sizeof(T));
#else
    unsigned word;
    memcpy(&word, elements, sizeof(word));
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};"
                 :: "r"(static_cast<unsigned>(__cvta_generic_to_shared(line(lane % 8)))), "r"(word)
                 : "memory");
#endif
  }
};

}  // namespace moesaic

// An operand of a product on its way to shared memory by asynchronous copies, 16 bytes of a line at a time.
#pragma once

#include "moesaic/copy.cuh"
#include "moesaic/tile_common.cuh"

namespace moesaic {

// `Chunks` says what a thread brings; where in a stage of shared memory a chunk of a line goes, the caller does.
template <typename T, bool kAcross, int kK, int kAlign, class Chunks>
class CopiedOperand {
  static constexpr int kSize = static_cast<int>(sizeof(T));
  static constexpr int kChunk = 16 / kSize;
  static_assert(kAlign >= kSize && kAlign <= 16, "from an element to 16 bytes");

 public:
  template <class Row>
  __device__ __forceinline__ void find(const Row& row, int first, int depth, int extent) {
    chunks_.find(row, first, depth, extent);
  }

  __device__ __forceinline__ bool all_lines() const { return chunks_.all_lines(); }

  // Starts copies of the steps from `first` on; zeros where nothing is valid; with kWhole, all is. `place(i)` is how many bytes
  // after `stage` own chunk i goes.
  template <bool kWhole = false, class Place>
  __device__ __forceinline__ void fetch(unsigned char* stage, int first, int depth, int extent, const Place& place) {
    constexpr int kPiece = kAlign / kSize;
    const CopyPlace start(stage);
#pragma unroll
    for (int i = 0; i < Chunks::kOwn; ++i) {
      if (!Chunks::exists(i)) continue;
      const T* const from = chunks_.address(i, first);
      const int valid = kWhole ? kChunk : chunks_.valid(i, first, depth, extent);
      if constexpr (kAlign >= 4) {
#pragma unroll
        for (int v = 0; v < kChunk; v += kPiece) copy_async<kAlign>(start, place(i) + v * kSize, from + v, v < valid);
      } else {
        copy_elements(stage + place(i), from, valid);
      }
    }
  }

  // Lines across the sum are others in every stage. `ask` for those of the next one's steps, from `next` on, before copies of
  // this one's are started, `take` them after: the answer, which may be a token's number, takes its time.
  template <class Row>
  __device__ __forceinline__ void ask(const Row& row, int next, int depth, int extent) {
    if constexpr (kAcross) next_.find_some(row, next, depth, extent);
  }
  __device__ __forceinline__ void take() {
    if constexpr (kAcross) chunks_ = next_;
  }
  // Or it is at hand: see `OperandChunks::place`.
  template <bool kWhole, class Row>
  __device__ __forceinline__ void place(const Row& row, int steps, int extent) {
    chunks_.template place<kWhole>(row, steps, extent);
  }

 private:
  // What is aligned to less than a copy's four bytes goes through registers.
  static __device__ __forceinline__ void copy_elements(unsigned char* to, const T* from, int valid) {
    T elements[kChunk];
#pragma unroll
    for (int v = 0; v < kChunk; ++v) elements[v] = v < valid ? load_one(from + v) : from_float<T>(0.0f);
    uint4 word;
    memcpy(&word, elements, sizeof(word));
    *reinterpret_cast<uint4*>(to) = word;
  }

  Chunks chunks_, next_;
};

}  // namespace moesaic

// What the epilogue of a product does with memory: neighbouring columns of a row, gates and ups beside them, and what a slot
// has by way of its token and its pick.
#pragma once

#include "moesaic/base.cuh"

namespace moesaic {

// The row of a slot's token, which stands at `token`.
template <typename T>
__device__ __forceinline__ const T* token_row(const T* rows, long long stride, const int* token) {
  return rows + static_cast<long long>(load_one(token)) * stride;
}
// The number of a pick, of which each token has kTopK.
template <int kTopK, typename T>
__device__ __forceinline__ float pick_number(const T* numbers, long long stride, int pick) {
  return to_float(load_one(numbers + static_cast<long long>(pick / kTopK) * stride + pick % kTopK));
}

// A word of 16 or of 8 bytes to global memory, in one instruction: what the compiler knows part by part it also stores so,
// or by way of the stack. Nothing that a kernel writes is read again, so that loads may pass this.
__device__ __forceinline__ void store_16(void* address, const unsigned* parts) {
  check_access(static_cast<uint4*>(address), 16, true);
#ifdef MOESAIC_EMULATE
  memcpy(address, parts, 16);
#else
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
               :: "l"(address), "r"(parts[0]), "r"(parts[1]), "r"(parts[2]), "r"(parts[3]));
#endif
}
__device__ __forceinline__ void store_8(void* address, const unsigned* parts) {
  check_access(static_cast<uint2*>(address), 8, true);
#ifdef MOESAIC_EMULATE
  memcpy(address, parts, 8);
#else
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" :: "l"(address), "r"(parts[0]), "r"(parts[1]));
#endif
}

// Neighbouring elements as they lie in memory, in whole words: what has been read, and is not needed yet.
template <typename T, int kCount>
struct Stored {
  static constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  using Part = typename Word<smaller(4, kBytes)>::type;
  static constexpr int kWords = kBytes / static_cast<int>(sizeof(Part));
  Part words[kWords];

  __device__ __forceinline__ void put(const T (&elements)[kCount]) { memcpy(words, elements, sizeof(words)); }
  template <int kAlign>
  __device__ __forceinline__ void store_to(T* address) const {
    if constexpr (kAlign >= 16 && kBytes % 16 == 0) {
#pragma unroll
      for (int i = 0; i < kBytes / 16; ++i) store_16(reinterpret_cast<uint4*>(address) + i, words + 4 * i);
    } else if constexpr (kAlign >= 8 && kBytes == 8) {
      store_8(address, words);
    } else {
      T elements[kCount];
      memcpy(elements, words, sizeof(words));
      store<kCount, kAlign>(address, elements);
    }
  }
  __device__ __forceinline__ void to_floats(float (&values)[kCount]) const {
    T elements[kCount];
    memcpy(elements, words, sizeof(words));
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = to_float(elements[i]);
  }
};

// kCount neighbouring elements of a row of which `left` are there; the others are 0 and not read. With kWhole the row's
// length is a multiple of kCount, so that all are there or none.
template <int kCount, int kAlign, bool kWhole, typename T>
__device__ __forceinline__ void read_columns(const T* address, int left, T (&elements)[kCount]) {
  if (kWhole || left >= kCount) {
    load<kCount, kAlign>(address, elements);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) elements[i] = i < left ? load_one(address + i) : from_float<T>(0.0f);
  }
}
template <int kCount, int kAlign, bool kWhole, typename T>
__device__ __forceinline__ void read_columns(const T* address, int left, Stored<T, kCount>& stored) {
  T elements[kCount];
  read_columns<kCount, kAlign, kWhole>(address, left, elements);
  stored.put(elements);
}
template <int kCount, int kAlign, bool kWhole, typename T>
__device__ __forceinline__ void load_columns(const T* address, int left, float (&values)[kCount]) {
  T elements[kCount];
  read_columns<kCount, kAlign, kWhole>(address, left, elements);
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = to_float(elements[i]);
}

template <int kCount, int kAlign, bool kWhole, typename T>
__device__ __forceinline__ void store_columns(T* address, int left, const float (&values)[kCount]) {
  if (kWhole || left >= kCount) {
    T elements[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) elements[i] = from_float<T>(values[i]);
    Stored<T, kCount> stored;
    stored.put(elements);
    stored.template store_to<kAlign>(address);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < left) store_one(address + i, from_float<T>(values[i]));
    }
  }
}

// Gates and ups of kCount neighbouring columns: in two halves of a row of 2 kHalf elements, or in turn.
template <int kCount, int kAlign, bool kWhole, int kHalf, bool kInTurn, typename T>
__device__ __forceinline__ void read_halves(const T* row, int column, Stored<T, 2 * kCount>& stored) {
  T both[2 * kCount];
  if constexpr (kInTurn) {
    read_columns<2 * kCount, kAlign, kWhole>(row + 2 * column, 2 * (kHalf - column), both);
  } else {
    T gate[kCount], up[kCount];
    read_columns<kCount, kAlign, kWhole>(row + column, kHalf - column, gate);
    read_columns<kCount, kAlign, kWhole>(row + kHalf + column, kHalf - column, up);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      both[i] = gate[i];
      both[kCount + i] = up[i];
    }
  }
  stored.put(both);
}
template <int kCount, bool kInTurn, typename T>
__device__ __forceinline__ void take_halves(const Stored<T, 2 * kCount>& stored, float (&gate)[kCount],
                                            float (&up)[kCount]) {
  float both[2 * kCount];
  stored.to_floats(both);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    gate[i] = both[kInTurn ? 2 * i : i];
    up[i] = both[kInTurn ? 2 * i + 1 : kCount + i];
  }
}
template <int kCount, int kAlign, bool kWhole, int kHalf, bool kInTurn, typename T>
__device__ __forceinline__ void load_halves(const T* row, int column, float (&gate)[kCount], float (&up)[kCount]) {
  Stored<T, 2 * kCount> stored;
  read_halves<kCount, kAlign, kWhole, kHalf, kInTurn>(row, column, stored);
  take_halves<kCount, kInTurn>(stored, gate, up);
}

template <int kCount, int kAlign, bool kWhole, int kHalf, bool kInTurn, typename T>
__device__ __forceinline__ void store_halves(T* row, int column, const float (&gate)[kCount], const float (&up)[kCount]) {
  if constexpr (kInTurn) {
    float both[2 * kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      both[2 * i] = gate[i];
      both[2 * i + 1] = up[i];
    }
    store_columns<2 * kCount, kAlign, kWhole>(row + 2 * column, 2 * (kHalf - column), both);
  } else {
    store_columns<kCount, kAlign, kWhole>(row + column, kHalf - column, gate);
    store_columns<kCount, kAlign, kWhole>(row + kHalf + column, kHalf - column, up);
  }
}

}  // namespace moesaic

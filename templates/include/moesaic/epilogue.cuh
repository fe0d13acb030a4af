// What the epilogue of a product does with memory: neighbouring columns of a row, and gates and ups beside them.
#pragma once

#include "moesaic/base.cuh"

namespace moesaic {

// kCount neighbouring elements of a row of which `left` are there; the others are 0 and not read. With kWhole the row's
// length is a multiple of kCount, so that all are there or none.
template <int kCount, int kAlign, bool kWhole, typename T>
__device__ __forceinline__ void load_columns(const T* address, int left, float (&values)[kCount]) {
  if (kWhole || left >= kCount) {
    T stored[kCount];
    load<kCount, kAlign>(address, stored);
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = to_float(stored[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = i < left ? to_float(load_one(address + i)) : 0.0f;
  }
}

template <int kCount, int kAlign, bool kWhole, typename T>
__device__ __forceinline__ void store_columns(T* address, int left, const float (&values)[kCount]) {
  if (kWhole || left >= kCount) {
    T stored[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) stored[i] = from_float<T>(values[i]);
    store<kCount, kAlign>(address, stored);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < left) store_one(address + i, from_float<T>(values[i]));
    }
  }
}

// Gates and ups of kCount neighbouring columns: in two halves of a row of 2 kHalf elements, or in turn.
template <int kCount, int kAlign, bool kWhole, int kHalf, bool kInTurn, typename T>
__device__ __forceinline__ void load_halves(const T* row, int column, float (&gate)[kCount], float (&up)[kCount]) {
  if constexpr (kInTurn) {
    float both[2 * kCount];
    load_columns<2 * kCount, kAlign, kWhole>(row + 2 * column, 2 * (kHalf - column), both);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      gate[i] = both[2 * i];
      up[i] = both[2 * i + 1];
    }
  } else {
    load_columns<kCount, kAlign, kWhole>(row + column, kHalf - column, gate);
    load_columns<kCount, kAlign, kWhole>(row + kHalf + column, kHalf - column, up);
  }
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

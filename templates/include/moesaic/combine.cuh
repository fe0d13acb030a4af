// Sums over a token's picks of rows that lie in the order of experts.
#pragma once

#include "moesaic/row.cuh"

namespace moesaic {

constexpr int kRowsAtOnce = 8;  // rows that a thread waits for at a time

// The weights of a token's picks; kAlign is what their address is aligned to, in bytes.
template <int kAlign, typename T>
struct Weights {
  static constexpr bool kAny = true;
  const T* of_token;
};
struct NoWeights {
  static constexpr bool kAny = false;
};

// kCount of a token's kTopK numbers, from the first-th on; `none` past the last.
template <int kTopK, int kAlign, int kCount, typename T>
__device__ __forceinline__ void load_of_picks(const T* of_token, int first, T none, T (&values)[kCount]) {
  if constexpr (kTopK % kCount == 0) {
    load<kCount, kAlign>(of_token + first, values);
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] = first + j < kTopK ? load_one(of_token + first + j) : none;
  }
}

template <int kTopK, int kCount, int kAlign, typename T>
__device__ __forceinline__ void load_weights(Weights<kAlign, T> weights, int first, float (&values)[kCount]) {
  T stored[kCount];
  load_of_picks<kTopK, kAlign>(weights.of_token, first, T{}, stored);
  widen(stored, values);
}
template <int kTopK, int kCount>
__device__ __forceinline__ void load_weights(NoWeights, int, float (&)[kCount]) {}

// y = w_0 x_{slot 0} + w_1 x_{slot 1} + ..., in this order, for the kVec columns of a thread. Of a pick without a slot no
// row is read, and its weight may be anything. `x` is where the thread's columns of slot 0 are.
template <int kTopK, int kVec, int kAlign, int kSlotsAlign, typename T, class W>
__device__ __forceinline__ void combine(const T* x, long long stride, const int* slots, W weights, float (&y)[kVec]) {
  constexpr int kCount = smaller(kTopK, kRowsAtOnce);
  constexpr int kGroups = ceil_div(kTopK, kCount);
  constexpr int kUnrolled = kTopK <= 2 * kRowsAtOnce ? kGroups : 1;
#pragma unroll
  for (int v = 0; v < kVec; ++v) y[v] = 0.0f;
  int ahead[kCount];  // slots of the next rows: their loads wait for nothing
  load_of_picks<kTopK, kSlotsAlign>(slots, 0, -1, ahead);
#pragma unroll kUnrolled
  for (int group = 0; group < kGroups; ++group) {
    const int first = group * kCount;
    T rows[kCount][kVec];
    float weight[kCount];
    bool here[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      T values[kVec] = {};
      here[j] = ahead[j] >= 0;
      if (here[j]) load<kVec, kAlign>(x + ahead[j] * stride, values);
      memcpy(rows[j], values, sizeof(values));
    }
    load_weights<kTopK>(weights, first, weight);
    if (group + 1 < kGroups) load_of_picks<kTopK, kSlotsAlign>(slots, first + kCount, -1, ahead);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const float w = W::kAny && here[j] ? weight[j] : 0.0f;
#pragma unroll
      for (int v = 0; v < kVec; ++v) y[v] += W::kAny ? w * to_float(rows[j][v]) : to_float(rows[j][v]);
    }
  }
}

// A number of a slot that lies in kParts, which are added in order.
template <int kParts, int kAlign>
__device__ __forceinline__ float sum_parts(const float* parts) {
  constexpr int kCount = smaller(kParts, 16);
  float sum = 0.0f;
#pragma unroll 1
  for (int first = 0; first < kParts; first += kCount) {
    float values[kCount];
    load_of_picks<kParts, kAlign>(parts, first, 0.0f, values);
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum = first + j == 0 ? values[0] : first + j < kParts ? sum + values[j] : sum;
  }
  return sum;
}

}  // namespace moesaic

// Sums over the rows of all tokens in parts: which rows a part has, and adding up what the parts have left.
#pragma once

#include "moesaic/base.cuh"

namespace moesaic {

// The rows of a part: `count` from `first` on.
struct Part {
  long long first;
  int count;
};

// Part `number` of kParts has whole stages of kStage rows, as many as any other, but for the last rows of all: so what is
// fetched stage by stage is another part's nowhere. Of few rows, the last parts have none.
template <int kParts, int kStage>
__device__ __forceinline__ Part part_of(long long rows, int number) {
  constexpr long long kRound = static_cast<long long>(kParts) * kStage;
  const long long each = (rows + kRound - 1) / kRound * kStage;
  const long long first = number * each < rows ? number * each : rows;
  const long long left = rows - first;
  return {first, static_cast<int>(left < each ? left : each)};
}

// x_0 + x_1 + ..., in this order, of kVec neighbouring elements; x_p lies `apart` elements after x_{p - 1}.
template <int kParts, int kVec>
__device__ __forceinline__ void add_parts(const float* x, long long apart, float (&sum)[kVec]) {
  float values[kParts][kVec];  // all of them are waited for at once
#pragma unroll
  for (int p = 0; p < kParts; ++p) load<kVec, 4 * kVec>(x + p * apart, values[p]);
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    sum[v] = values[0][v];
#pragma unroll
    for (int p = 1; p < kParts; ++p) sum[v] += values[p][v];
  }
}

}  // namespace moesaic

// A token's row in the registers of the lanes that share it, and the reductions over it.
//
// These lanes are a team: up to a warp, beside others in the block; or 2 to 32 warps, which are then the whole block. What
// a team does together it does with all of its lanes.
#pragma once

#include "moesaic/base.cuh"

namespace moesaic {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarp = 32;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int next_power_of_two(int n) {
  int p = 1;
  while (p < n) p *= 2;
  return p;
}

// Columns of a row over kLanes lanes, in chunks of kVec: slot (chunk c, j) of lane l is column (c*kLanes + l)*kVec + j.
// A warp's loads of one chunk are consecutive in memory. Slots past the last column are dead.
//
// Every sum is taken in one order that depends on kColumns and kVec alone: within a chunk first, then halving over the
// chunk number from its top bit down. The top bits are slots of a lane and the low bits are lanes, so the order is the
// same however many lanes share the row.
template <int kColumns_, int kLanes_, int kVec_>
struct Row {
  static constexpr int kColumns = kColumns_;
  static constexpr int kLanes = kLanes_;
  static constexpr int kVec = kVec_;
  static constexpr int kChunks = ceil_div(next_power_of_two(ceil_div(kColumns, kVec)), kLanes);
  static constexpr int kSlots = kChunks * kVec;
  static_assert(kColumns % kVec == 0, "a chunk must not straddle the end of the row");

  static __device__ __forceinline__ int column(int slot, int lane) {
    return ((slot / kVec) * kLanes + lane) * kVec + slot % kVec;
  }
  static __device__ __forceinline__ bool live(int slot, int lane) {
    const int first = (slot / kVec) * kLanes * kVec;             // known once loops over slots are unrolled
    if (first + kLanes * kVec <= kColumns) return true;
    return first < kColumns && column(slot - slot % kVec, lane) < kColumns;  // a chunk lives or is dead as a whole
  }
};

// --------------------------------------------------------------------------------------------------------- lanes

// What a team wrote to shared memory before, all of its lanes may read after.
template <int kLanes>
__device__ __forceinline__ void team_sync() {
  if constexpr (kLanes <= kWarp) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// Reductions over the kLanes lanes that share a token; every lane gets the result.
template <int kLanes, typename T, class Combine>
__device__ __forceinline__ T shuffle_reduce(T x, Combine combine) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    x = combine(x, __shfl_xor_sync(kAllLanes, x, distance));
  }
  return x;
}

// In any order. A block's warps leave one value each.
template <int kLanes, typename T, class Combine>
__device__ __forceinline__ T lanes_reduce(T x, Combine combine) {
  if constexpr (kLanes <= kWarp) {
    return shuffle_reduce<kLanes>(x, combine);
  } else {
    constexpr int kWarps = kLanes / kWarp;
    __shared__ T of_warp[kWarps];
    x = shuffle_reduce<kWarp>(x, combine);
    __syncthreads();  // the values of the reduction before have been read
    if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = x;
    __syncthreads();
    return shuffle_reduce<kWarps>(of_warp[threadIdx.x % kWarps], combine);
  }
}

template <int kLanes>
__device__ __forceinline__ float lanes_max(float x) {
  return lanes_reduce<kLanes>(x, [](float a, float b) { return maximum(a, b); });
}

template <int kLanes, typename Key>
__device__ __forceinline__ Key lanes_max_key(Key x) {
  return lanes_reduce<kLanes>(x, [](Key a, Key b) { return b > a ? b : a; });
}

// x[0] = the sum of all, adding the upper half to the lower until one is left. A recursion: as loops, long sums would not
// be unrolled, and x would move to local memory.
template <int kCount, int N>
__device__ __forceinline__ void sum_by_halves(float (&x)[N]) {
  if constexpr (kCount > 1) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) x[i] += x[i + kCount / 2];
    sum_by_halves<kCount / 2>(x);
  }
}

// From the top bit of the lane down, as `Row` says: over warps first, where a block has several.
template <int kLanes>
__device__ __forceinline__ float lanes_sum(float x) {
  if constexpr (kLanes > kWarp) {
    constexpr int kWarps = kLanes / kWarp;
    __shared__ float beside[kWarps][kWarp];
    __syncthreads();  // the values of the sum before have been read
    beside[threadIdx.x / kWarp][threadIdx.x % kWarp] = x;
    __syncthreads();
    float part[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) part[w] = beside[w][threadIdx.x % kWarp];
    sum_by_halves<kWarps>(part);
    x = part[0];
  }
  return shuffle_reduce<smaller(kLanes, kWarp)>(x, [](float a, float b) { return a + b; });
}

// ---------------------------------------------------------------------------------------------------------- rows

template <class R>
__device__ __forceinline__ float row_sum(const float (&x)[R::kSlots], int lane) {
  float chunk[R::kChunks];
#pragma unroll
  for (int c = 0; c < R::kChunks; ++c) {
    float part[R::kVec];
#pragma unroll
    for (int j = 0; j < R::kVec; ++j) {
      // -0 is the neutral element of float addition; +0 would turn a sum of -0 into +0.
      part[j] = R::live(c * R::kVec + j, lane) ? x[c * R::kVec + j] : -0.0f;
    }
    sum_by_halves<R::kVec>(part);
    chunk[c] = part[0];
  }
  sum_by_halves<R::kChunks>(chunk);
  return lanes_sum<R::kLanes>(chunk[0]);
}

template <class R>
__device__ __forceinline__ float row_max(const float (&x)[R::kSlots], int lane) {
  float best = -infinity();
#pragma unroll
  for (int i = 0; i < R::kSlots; ++i) best = R::live(i, lane) ? maximum(best, x[i]) : best;
  return lanes_max<R::kLanes>(best);
}

// A row of global memory into registers as it is stored; kAlign is what the row's address is aligned to, in bytes.
template <class R, int kAlign, typename T>
__device__ __forceinline__ void fetch_row(const T* row, T (&stored)[R::kSlots], int lane) {
#pragma unroll
  for (int c = 0; c < R::kChunks; ++c) {
    T values[R::kVec] = {};
    if (R::live(c * R::kVec, lane)) load<R::kVec, kAlign>(row + R::column(c * R::kVec, lane), values);
#pragma unroll
    for (int j = 0; j < R::kVec; ++j) stored[c * R::kVec + j] = values[j];
  }
}

template <int kSlots, typename T>
__device__ __forceinline__ void widen(const T (&stored)[kSlots], float (&x)[kSlots]) {
#pragma unroll
  for (int i = 0; i < kSlots; ++i) x[i] = to_float(stored[i]);
}

// Fetches and widens; dead slots become 0.
template <class R, int kAlign, typename T>
__device__ __forceinline__ void load_row(const T* row, float (&x)[R::kSlots], int lane) {
  T stored[R::kSlots];
  fetch_row<R, kAlign>(row, stored, lane);
  widen(stored, x);
}
template <class R, int kAlign>
__device__ __forceinline__ void load_row(const int* row, int (&x)[R::kSlots], int lane) {
  fetch_row<R, kAlign>(row, x, lane);
}

template <typename T>
__device__ __forceinline__ T to_element(float x) { return from_float<T>(x); }
template <typename T>
__device__ __forceinline__ T to_element(int x) { return static_cast<T>(x); }
template <typename T>
__device__ __forceinline__ T to_element(bool x) { return static_cast<T>(x); }

template <class R, int kAlign, typename T, typename X>
__device__ __forceinline__ void store_row(T* row, const X (&x)[R::kSlots], int lane) {
#pragma unroll
  for (int c = 0; c < R::kChunks; ++c) {
    if (!R::live(c * R::kVec, lane)) continue;
    T values[R::kVec];
#pragma unroll
    for (int j = 0; j < R::kVec; ++j) values[j] = to_element<T>(x[c * R::kVec + j]);
    store<R::kVec, kAlign>(row + R::column(c * R::kVec, lane), values);
  }
}

// A row of 4-byte values to a row of shared memory and back, in words as wide as chunks are: single values would meet
// in the same banks, since a lane's chunk is as long as its neighbour's distance.
template <class R, typename T>
__device__ __forceinline__ void to_shared(const T (&x)[R::kSlots], T* shared_row, int lane) {
  constexpr int kCount = smaller(R::kVec, 4);
  using W = typename Word<kCount * 4>::type;
#pragma unroll
  for (int first = 0; first < R::kSlots; first += kCount) {
    W word;
    memcpy(&word, &x[first], sizeof(word));
    if (R::live(first, lane)) *reinterpret_cast<W*>(shared_row + R::column(first, lane)) = word;
  }
}

template <class R, typename T>
__device__ __forceinline__ void from_shared(const T* shared_row, T (&x)[R::kSlots], int lane) {
  constexpr int kCount = smaller(R::kVec, 4);
  using W = typename Word<kCount * 4>::type;
#pragma unroll
  for (int first = 0; first < R::kSlots; first += kCount) {
    W word = {};
    if (R::live(first, lane)) word = *reinterpret_cast<const W*>(shared_row + R::column(first, lane));
    memcpy(&x[first], &word, sizeof(word));
  }
}

// --------------------------------------------------------------------------------------- between experts and picks

// x[indices] of a row or a vector in global memory. Dead picks read nothing and give 0.
template <class Picks, typename T>
__device__ __forceinline__ void gather(const T* row, const int (&indices)[Picks::kSlots], float (&y)[Picks::kSlots],
                                       int lane) {
#pragma unroll
  for (int p = 0; p < Picks::kSlots; ++p) y[p] = Picks::live(p, lane) ? to_float(load_one(row + indices[p])) : 0.0f;
}

// x[indices] of a row in registers, through a row of shared memory of the token's own.
template <class Experts, class Picks>
__device__ __forceinline__ void gather_registers(const float (&x)[Experts::kSlots], const int (&indices)[Picks::kSlots],
                                                 float (&y)[Picks::kSlots], float* shared_row, int lane) {
  team_sync<Experts::kLanes>();
  to_shared<Experts>(x, shared_row, lane);
  team_sync<Experts::kLanes>();
#pragma unroll
  for (int p = 0; p < Picks::kSlots; ++p) y[p] = Picks::live(p, lane) ? shared_row[indices[p]] : 0.0f;
}

// y = x at its indices, 0 elsewhere. The token's row of shared memory is zero before and after.
template <class Experts, class Picks>
__device__ __forceinline__ void scatter(const float (&x)[Picks::kSlots], const int (&indices)[Picks::kSlots],
                                        float (&y)[Experts::kSlots], float* zero_row, int lane) {
  team_sync<Experts::kLanes>();
#pragma unroll
  for (int p = 0; p < Picks::kSlots; ++p) {
    if (Picks::live(p, lane)) zero_row[indices[p]] = x[p];
  }
  team_sync<Experts::kLanes>();
  from_shared<Experts>(zero_row, y, lane);
  team_sync<Experts::kLanes>();
#pragma unroll
  for (int p = 0; p < Picks::kSlots; ++p) {
    if (Picks::live(p, lane)) zero_row[indices[p]] = 0.0f;
  }
}

// Which of a lane's experts are among the picks, from the indices alone.
template <class Experts, class Picks>
__device__ __forceinline__ void membership(const int (&indices)[Picks::kSlots], bool (&member)[Experts::kSlots],
                                           int lane) {
  static_assert(Experts::kSlots <= 32, "one bit a slot");
  constexpr int kVec = Experts::kVec;
  unsigned bits = 0;
  if constexpr (Experts::kLanes <= kWarp) {
#pragma unroll
    for (int p = 0; p < Picks::kSlots; ++p) {
#pragma unroll(Picks::kColumns <= 32 ? Picks::kLanes : 1)
      for (int source = 0; source < Picks::kLanes; ++source) {
        if (Picks::column(p, source) >= Picks::kColumns) break;
        const int expert = __shfl_sync(kAllLanes, indices[p], source, Picks::kLanes);
        const int chunk = expert / kVec;
        if (chunk % Experts::kLanes == lane) bits |= 1u << ((chunk / Experts::kLanes) * kVec + expert % kVec);
      }
    }
  } else {
    // Every lane tells the owners of its picks. Nobody else touches a lane's word once it has been read and cleared.
    __shared__ unsigned of_lane[Experts::kLanes];
    of_lane[lane] = 0;
    __syncthreads();
#pragma unroll
    for (int p = 0; p < Picks::kSlots; ++p) {
      const int chunk = indices[p] / kVec;
      const unsigned bit = 1u << ((chunk / Experts::kLanes) * kVec + indices[p] % kVec);
      if (Picks::live(p, lane)) atomicOr(&of_lane[chunk % Experts::kLanes], bit);
    }
    __syncthreads();
    bits = of_lane[lane];
  }
#pragma unroll
  for (int i = 0; i < Experts::kSlots; ++i) member[i] = (bits >> i) & 1u;
}

// ------------------------------------------------------------------------------------------------- sums over tokens

// Adds up what the lanes of a block collected for the same columns, in a fixed order, into one row of partial sums.
// `scratch` holds [warps][kColumns] floats of shared memory.
template <class R, int kThreads>
__device__ __forceinline__ void store_column_sums(const float (&x)[R::kSlots], float* scratch, float* partial,
                                                  int lane) {
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < R::kSlots; ++i) {
    float total = x[i];
#pragma unroll
    for (int distance = R::kLanes; distance < 32; distance *= 2) {
      total += __shfl_xor_sync(kAllLanes, total, distance);
    }
    if (threadIdx.x % 32 < R::kLanes && R::live(i, lane)) scratch[warp * R::kColumns + R::column(i, lane)] = total;
  }
  __syncthreads();
  for (int column = threadIdx.x; column < R::kColumns; column += kThreads) {
    float total = scratch[column];
    for (int w = 1; w < kThreads / 32; ++w) total += scratch[w * R::kColumns + column];
    store_one(partial + column, total);
  }
}

}  // namespace moesaic

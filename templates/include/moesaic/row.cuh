// A token's row in the registers of the lanes that share it, and the reductions over it.
//
// These lanes are a team: up to a warp, beside others in the block; or 2 to 32 warps, which are then the whole block. What
// a team does together it does with all of its lanes.
#pragma once

#include "moesaic/base.cuh"

namespace moesaic {

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

// Two 16-bit values in one register.
__device__ __forceinline__ __nv_bfloat162 pair_of(__nv_bfloat16 low, __nv_bfloat16 high) {
  return __halves2bfloat162(low, high);
}
__device__ __forceinline__ __half2 pair_of(__half low, __half high) { return __halves2half2(low, high); }

// row_max of 16-bit values as they are stored, two an instruction.
template <class R, typename T>
__device__ __forceinline__ float row_max_of_stored(const T (&x)[R::kSlots], int lane) {
  const T none = from_float<T>(-infinity());
  auto best = pair_of(none, none);
#pragma unroll
  for (int i = 0; i < R::kSlots; i += 2) {
    const T low = R::live(i, lane) ? x[i] : none;
    const T high = i + 1 < R::kSlots && R::live(i + 1, lane) ? x[(i + 1) % R::kSlots] : none;
    best = __hmax2_nan(best, pair_of(low, high));
  }
  return lanes_max<R::kLanes>(maximum(to_float(best.x), to_float(best.y)));
}

// A chunk as it lies in memory.
template <class R, typename T>
struct Chunk {
  static constexpr int kWord = smaller(4, R::kVec * static_cast<int>(sizeof(T)));
  typename Word<kWord>::type words[R::kVec * static_cast<int>(sizeof(T)) / kWord];
};

// A row of global memory into registers as it is stored; kAlign is what the row's address is aligned to, in bytes. Dead
// slots become 0.
template <class R, int kAlign, typename T>
__device__ __forceinline__ void fetch_row(const T* row, Chunk<R, T> (&chunks)[R::kChunks], int lane) {
#pragma unroll
  for (int c = 0; c < R::kChunks; ++c) {
    T values[R::kVec] = {};
    if (R::live(c * R::kVec, lane)) load<R::kVec, kAlign>(row + R::column(c * R::kVec, lane), values);
    memcpy(&chunks[c], values, sizeof(values));
  }
}

template <class R, typename T>
__device__ __forceinline__ void unpack(const Chunk<R, T> (&chunks)[R::kChunks], T (&stored)[R::kSlots]) {
#pragma unroll
  for (int c = 0; c < R::kChunks; ++c) {
    Chunk<R, T> chunk = chunks[c];
#pragma unroll
    for (auto& word : chunk.words) keep_whole(word);
    memcpy(&stored[c * R::kVec], &chunk, sizeof(chunk));
  }
}

template <int kSlots, typename T>
__device__ __forceinline__ void widen(const T (&stored)[kSlots], float (&x)[kSlots]) {
#pragma unroll
  for (int i = 0; i < kSlots; ++i) x[i] = to_float(stored[i]);
}

// A row as it is stored; widened; of integers.
template <class R, int kAlign, typename T>
__device__ __forceinline__ void load_stored(const T* row, T (&stored)[R::kSlots], int lane) {
  Chunk<R, T> chunks[R::kChunks];
  fetch_row<R, kAlign>(row, chunks, lane);
  unpack<R>(chunks, stored);
}
template <class R, int kAlign, typename T>
__device__ __forceinline__ void load_row(const T* row, float (&x)[R::kSlots], int lane) {
  T stored[R::kSlots];
  load_stored<R, kAlign>(row, stored, lane);
  widen(stored, x);
}

template <typename T>
__device__ __forceinline__ T to_element(float x) { return from_float<T>(x); }
template <typename T>
__device__ __forceinline__ T to_element(short x) { return static_cast<T>(x); }
template <typename T>
__device__ __forceinline__ T to_element(int x) { return static_cast<T>(x); }
template <typename T>
__device__ __forceinline__ T to_element(long long x) { return static_cast<T>(x); }
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

// A row of kCount elements of shared memory to zeros.
template <int kLanes, int kCount, typename T>
__device__ __forceinline__ void clear(T* shared_row, int lane) {
  constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  constexpr int kWord = smaller(16, kBytes & -kBytes);
  using W = typename Word<kWord>::type;
  W* const words = reinterpret_cast<W*>(shared_row);
#pragma unroll
  for (int i = 0; i < ceil_div(kBytes / kWord, kLanes); ++i) {
    const int word = i * kLanes + lane;
    if (word < kBytes / kWord) words[word] = W{};
  }
}

// --------------------------------------------------------------------------------------- between experts and picks

// With kMayBeAway, picks may be -1, "not here".

template <class Picks, bool kMayBeAway>
__device__ __forceinline__ bool reads(int p, int index, int lane) {
  return Picks::live(p, lane) && (!kMayBeAway || index >= 0);
}

// x[indices] of a row or a vector in global memory. Picks that are dead or not here read nothing and give 0.
template <class Picks, bool kMayBeAway = false, typename T>
__device__ __forceinline__ void gather(const T* row, const int (&indices)[Picks::kSlots], float (&y)[Picks::kSlots],
                                       int lane) {
#pragma unroll
  for (int p = 0; p < Picks::kSlots; ++p) {
    y[p] = reads<Picks, kMayBeAway>(p, indices[p], lane) ? to_float(load_one(row + indices[p])) : 0.0f;
  }
}

// x[indices] of a row in registers, through a row of shared memory of the token's own.
template <class Experts, class Picks, bool kMayBeAway = false>
__device__ __forceinline__ void gather_registers(const float (&x)[Experts::kSlots], const int (&indices)[Picks::kSlots],
                                                 float (&y)[Picks::kSlots], float* shared_row, int lane) {
  team_sync<Experts::kLanes>();
  to_shared<Experts>(x, shared_row, lane);
  team_sync<Experts::kLanes>();
#pragma unroll
  for (int p = 0; p < Picks::kSlots; ++p) {
    y[p] = reads<Picks, kMayBeAway>(p, indices[p], lane) ? shared_row[indices[p]] : 0.0f;
  }
}

// y = x at its indices, 0 elsewhere. The token's row of shared memory is zero before and after.
template <class Experts, class Picks, bool kMayBeAway = false>
__device__ __forceinline__ void scatter(const float (&x)[Picks::kSlots], const int (&indices)[Picks::kSlots],
                                        float (&y)[Experts::kSlots], float* zero_row, int lane) {
  team_sync<Experts::kLanes>();
#pragma unroll
  for (int p = 0; p < Picks::kSlots; ++p) {
    if (reads<Picks, kMayBeAway>(p, indices[p], lane)) zero_row[indices[p]] = x[p];
  }
  team_sync<Experts::kLanes>();
  from_shared<Experts>(zero_row, y, lane);
  team_sync<Experts::kLanes>();
#pragma unroll
  for (int p = 0; p < Picks::kSlots; ++p) {
    if (reads<Picks, kMayBeAway>(p, indices[p], lane)) zero_row[indices[p]] = 0.0f;
  }
}

// y = base + x at its indices, base elsewhere. The token's row of shared memory is that base before and after, which so takes
// no registers.
template <class Experts, class Picks, bool kMayBeAway = false>
__device__ __forceinline__ void scatter_onto(const float (&x)[Picks::kSlots], const int (&indices)[Picks::kSlots],
                                             float (&y)[Experts::kSlots], float* base_row, int lane) {
  float base[Picks::kSlots];
  team_sync<Experts::kLanes>();
#pragma unroll
  for (int p = 0; p < Picks::kSlots; ++p) {
    if (!reads<Picks, kMayBeAway>(p, indices[p], lane)) continue;
    base[p] = base_row[indices[p]];
    base_row[indices[p]] = base[p] + x[p];
  }
  team_sync<Experts::kLanes>();
  from_shared<Experts>(base_row, y, lane);
  team_sync<Experts::kLanes>();
#pragma unroll
  for (int p = 0; p < Picks::kSlots; ++p) {
    if (reads<Picks, kMayBeAway>(p, indices[p], lane)) base_row[indices[p]] = base[p];
  }
}

// As scatter, for given picks: what goes to one expert is added in the order of the picks, by each of its picks alike.
template <class Experts, class Picks>
__device__ __forceinline__ void scatter_added(const float (&x)[Picks::kSlots], const int (&indices)[Picks::kSlots],
                                              float (&y)[Experts::kSlots], float* zero_row, int lane) {
  constexpr bool kBlock = Picks::kLanes > kWarp;
  __shared__ int shown_places[kBlock ? Picks::kLanes : 1];
  __shared__ float shown_values[kBlock ? Picks::kLanes : 1];
  int places[Picks::kSlots];
  float totals[Picks::kSlots];
#pragma unroll
  for (int p = 0; p < Picks::kSlots; ++p) {
    places[p] = Picks::live(p, lane) ? indices[p] : -1;
    totals[p] = -0.0f;                                               // the neutral element of float addition
  }
#pragma unroll
  for (int q = 0; q < Picks::kSlots; ++q) {
    if constexpr (kBlock) {
      __syncthreads();  // those before have been read
      shown_places[lane] = places[q];
      shown_values[lane] = x[q];
      __syncthreads();
    }
#pragma unroll 1
    for (int source = 0; source < Picks::kLanes; ++source) {
      if (Picks::column(q, source) >= Picks::kColumns) break;
      int place;
      float value;
      if constexpr (kBlock) {
        place = shown_places[source];
        value = shown_values[source];
      } else {
        place = __shfl_sync(kAllLanes, places[q], source, Picks::kLanes);
        value = __shfl_sync(kAllLanes, x[q], source, Picks::kLanes);
      }
#pragma unroll
      for (int p = 0; p < Picks::kSlots; ++p) totals[p] = places[p] == place ? totals[p] + value : totals[p];
    }
  }
  team_sync<Experts::kLanes>();
#pragma unroll
  for (int p = 0; p < Picks::kSlots; ++p) {
    if (places[p] >= 0) zero_row[places[p]] = totals[p];
  }
  team_sync<Experts::kLanes>();
  from_shared<Experts>(zero_row, y, lane);
  team_sync<Experts::kLanes>();
#pragma unroll
  for (int p = 0; p < Picks::kSlots; ++p) {
    if (places[p] >= 0) zero_row[places[p]] = 0.0f;
  }
}

// The same straight to a row of global memory, for rows that are zeros but for the picks: no lane holds any of it in
// registers. x is rounded to the elements of the row.
template <class Experts, class Picks, int kAlign, bool kMayBeAway = false, typename T, typename X>
__device__ __forceinline__ void store_scattered(T* row, const X (&x)[Picks::kSlots],
                                                const int (&indices)[Picks::kSlots], T* zero_row, int lane,
                                                bool active) {
  constexpr int kVec = Experts::kVec;
  team_sync<Experts::kLanes>();
#pragma unroll
  for (int p = 0; p < Picks::kSlots; ++p) {
    if (reads<Picks, kMayBeAway>(p, indices[p], lane)) zero_row[indices[p]] = to_element<T>(x[p]);
  }
  team_sync<Experts::kLanes>();
#pragma unroll
  for (int c = 0; c < Experts::kChunks; ++c) {
    const int column = Experts::column(c * kVec, lane);
    if (!Experts::live(c * kVec, lane) || !active) continue;
    constexpr int kBytes = kVec * static_cast<int>(sizeof(T)), kWord = smaller(kBytes, 16);
    T values[kVec];
#pragma unroll
    for (int b = 0; b < kBytes; b += kWord) {
      typename Word<kWord>::type word;
      memcpy(&word, reinterpret_cast<const unsigned char*>(zero_row + column) + b, kWord);
      memcpy(reinterpret_cast<unsigned char*>(values) + b, &word, kWord);
    }
    store<kVec, kAlign>(row + column, values);
  }
  team_sync<Experts::kLanes>();
#pragma unroll
  for (int p = 0; p < Picks::kSlots; ++p) {
    if (reads<Picks, kMayBeAway>(p, indices[p], lane)) zero_row[indices[p]] = T();
  }
}

// Which of a lane's experts are among the picks, from the indices alone.
template <class Experts, class Picks, bool kMayBeAway = false>
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
        if (kMayBeAway && expert < 0) continue;
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
      if (!reads<Picks, kMayBeAway>(p, indices[p], lane)) continue;
      const int chunk = indices[p] / kVec;
      const unsigned bit = 1u << ((chunk / Experts::kLanes) * kVec + indices[p] % kVec);
      atomicOr(&of_lane[chunk % Experts::kLanes], bit);
    }
    __syncthreads();
    bits = of_lane[lane];
  }
#pragma unroll
  for (int i = 0; i < Experts::kSlots; ++i) member[i] = (bits >> i) & 1u;
}

// The picks as bits, 8 experts a byte. From the indices, whoever owns the experts: a bit each costs less than packing
// the flags of all experts of a lane. Four bytes of a lane share a word until the end.
template <class Bytes, class Picks>
__device__ __forceinline__ void bitmap(const int (&indices)[Picks::kSlots], int (&bytes)[Bytes::kSlots], int lane) {
  constexpr int kWords = ceil_div(Bytes::kSlots, 4);
  unsigned words[kWords] = {};
  if constexpr (Bytes::kLanes <= kWarp) {
#pragma unroll
    for (int p = 0; p < Picks::kSlots; ++p) {
#pragma unroll(Picks::kColumns <= 32 ? Picks::kLanes : 1)
      for (int source = 0; source < Picks::kLanes; ++source) {
        if (Picks::column(p, source) >= Picks::kColumns) break;
        // -1, "not here", becomes a byte that no lane has.
        const unsigned expert = static_cast<unsigned>(__shfl_sync(kAllLanes, indices[p], source, Picks::kLanes));
        const unsigned byte = expert / 8;
        const unsigned slot = byte / Bytes::kLanes;
        if (byte % Bytes::kLanes != static_cast<unsigned>(lane)) continue;
#pragma unroll
        for (int w = 0; w < kWords; ++w) words[w] |= slot / 4 == w ? 1u << (slot % 4 * 8 + expert % 8) : 0u;
      }
    }
  } else {
    static_assert(kWords == 1, "a lane of a block has up to 32 experts");
    __shared__ unsigned of_lane[Bytes::kLanes];  // as in membership
    of_lane[lane] = 0;
    __syncthreads();
#pragma unroll
    for (int p = 0; p < Picks::kSlots; ++p) {
      if (!reads<Picks, /*kMayBeAway=*/true>(p, indices[p], lane)) continue;
      const int byte = indices[p] / 8;
      atomicOr(&of_lane[byte % Bytes::kLanes], 1u << (byte / Bytes::kLanes * 8 + indices[p] % 8));
    }
    __syncthreads();
    words[0] = of_lane[lane];
  }
#pragma unroll
  for (int i = 0; i < Bytes::kSlots; ++i) bytes[i] = static_cast<int>(words[i / 4] >> (i % 4 * 8) & 0xffu);
}

// -------------------------------------------------------------------------------------------------- in shared memory

// Rows of floats in shared memory, where registers would cost more: one for each thread, or one for each lane that shares a
// token. Slot i of a holder is part i % kWord of word [i / kWord][holder], so that a warp's words are consecutive. Slots that
// are dead in all lanes have no room there.
template <class R, int kHolders>
struct SharedSlots {
  static constexpr int kLive = ceil_div(R::kColumns, R::kLanes * R::kVec) * R::kVec;
  static constexpr int kWord = kLive % 4 == 0 ? 4 : kLive % 2 == 0 ? 2 : 1;  // slots that are read together
  struct alignas(4 * kWord) Word {
    float part[kWord];
  };
  Word words[kLive / kWord][kHolders];

  __device__ __forceinline__ void clear(int holder) {
#pragma unroll
    for (int i = 0; i < kLive / kWord; ++i) words[i][holder] = Word{};
  }
  // Each slot becomes what `made(slot, value)` says.
  template <class Made>
  __device__ __forceinline__ void update(int holder, const Made& made) {
#pragma unroll
    for (int i = 0; i < kLive / kWord; ++i) {
      Word word = words[i][holder];
#pragma unroll
      for (int part = 0; part < kWord; ++part) word.part[part] = made(kWord * i + part, word.part[part]);
      words[i][holder] = word;
    }
  }
  __device__ __forceinline__ void write(int holder, const float (&x)[R::kSlots]) {
#pragma unroll
    for (int i = 0; i < kLive; ++i) words[i / kWord][holder].part[i % kWord] = x[i];
  }
  __device__ __forceinline__ float at(int holder, int i) const {
    return i < kLive ? words[i / kWord][holder].part[i % kWord] : 0.0f;
  }
  __device__ __forceinline__ void read(int holder, float (&x)[R::kSlots]) const {
#pragma unroll
    for (int i = 0; i < R::kSlots; ++i) x[i] = at(holder, i);
  }
};

// ------------------------------------------------------------------------------------------------- sums over tokens

// Adds up what the lanes of a warp collected for the same columns: those kDistance apart, then those twice as far apart, and
// so on. With each step a lane gives away half of its slots and keeps the sums of the other half, so that at the end
// none has what another has: a quarter of the shuffles that it takes for every lane to have all. Slots from `first` on
// then go to `row`, from lanes that `writes` is true for.
template <class R, int kDistance, int kCount>
__device__ __forceinline__ void add_up_columns(const float (&x)[kCount], int first, bool writes, float* row, int lane) {
  if constexpr (kDistance >= kWarp) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (writes && R::live(first + i, lane)) row[R::column(first + i, lane)] = x[i];
    }
  } else if constexpr (kCount % 2 == 0) {
    constexpr int kHalf = kCount / 2;
    const bool upper = (threadIdx.x & kDistance) != 0;
    float kept[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float given = upper ? x[i] : x[i + kHalf];
      kept[i] = (upper ? x[i + kHalf] : x[i]) + __shfl_xor_sync(kAllLanes, given, kDistance);
    }
    add_up_columns<R, 2 * kDistance>(kept, upper ? first + kHalf : first, writes, row, lane);
  } else {  // no halves: lanes have the same from here on
    float sums[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] = x[i] + __shfl_xor_sync(kAllLanes, x[i], kDistance);
    add_up_columns<R, 2 * kDistance>(sums, first, writes && (threadIdx.x & kDistance) == 0, row, lane);
  }
}

// Adds up what the lanes of a block collected for the same columns, in a fixed order, into one row of partial sums, at
// whatever `store_one` takes as an address. `scratch` holds [warps][kColumns] floats of shared memory.
template <class R, int kThreads, class Partial>
__device__ __forceinline__ void store_column_sums(const float (&x)[R::kSlots], float* scratch, Partial partial,
                                                  int lane) {
  add_up_columns<R, R::kLanes>(x, 0, true, scratch + threadIdx.x / kWarp * R::kColumns, lane);
  __syncthreads();
  for (int column = threadIdx.x; column < R::kColumns; column += kThreads) {
    float total = scratch[column];
    for (int w = 1; w < kThreads / 32; ++w) total += scratch[w * R::kColumns + column];
    store_one(partial + column, total);
  }
}

}  // namespace moesaic

// Top-k of a row: the k first in the order (value descending, column ascending), NaN below -inf, -0 equal to +0.
//
// A value and its column are packed into one integer key whose order is that order. Keys of a row are distinct, so
// selection needs no tie rules, and an expert is among the picks exactly if its key is at least the last pick's.
// Key 0 stands for "cannot be picked"; every real key is larger.
#pragma once

#include "moesaic/row.cuh"

namespace moesaic {

// Bits of a float such that a larger value has the larger unsigned number; NaN gives 0, below -inf.
__device__ __forceinline__ unsigned ordered_bits(float x) {
  unsigned bits = __float_as_uint(x + 0.0f);                      // -0 + 0 is +0: the two are one value
  bits ^= static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000u;
  return x != x ? 0u : bits;
}
__device__ __forceinline__ float from_ordered_bits(unsigned ordered) {
  if (ordered == 0) return not_a_number();
  return __uint_as_float(ordered & 0x80000000u ? ordered ^ 0x80000000u : ~ordered);
}

// The key of a value that has as many bits of information as the storage type T: 32-bit keys where T has 16 bits.
template <typename T>
struct RankKey;

template <>
struct RankKey<float> {
  using Key = unsigned long long;
  static __device__ __forceinline__ Key make(float value, int column) {
    return static_cast<Key>(ordered_bits(value)) << 32 | static_cast<unsigned>(~column);
  }
  static __device__ __forceinline__ float value(Key key) { return from_ordered_bits(static_cast<unsigned>(key >> 32)); }
  static __device__ __forceinline__ int column(Key key) { return static_cast<int>(~static_cast<unsigned>(key)); }
};

template <>
struct RankKey<__nv_bfloat16> {
  using Key = unsigned;
  static __device__ __forceinline__ Key make(float value, int column) {
    // A bf16 is the upper half of the float; the lower half of a negative one becomes ones, which are masked off.
    return (ordered_bits(value) & 0xffff0000u) | static_cast<unsigned>(0xffff - column);
  }
  static __device__ __forceinline__ float value(Key key) {
    const unsigned ordered = key & 0xffff0000u;
    if (ordered == 0) return not_a_number();
    return __uint_as_float(ordered & 0x80000000u ? ordered ^ 0x80000000u : ~ordered & 0xffff0000u);
  }
  static __device__ __forceinline__ int column(Key key) { return 0xffff - static_cast<int>(key & 0xffffu); }
};

template <>
struct RankKey<__half> {
  using Key = unsigned;
  static __device__ __forceinline__ Key make(float value, int column) {
    unsigned bits = __half_as_ushort(__float2half_rn(value));     // exact: the value came from a half
    if (value == 0.0f) bits = 0;
    bits = bits & 0x8000u ? ~bits & 0xffffu : bits | 0x8000u;
    return (value != value ? 0u : bits << 16) | static_cast<unsigned>(0xffff - column);
  }
  static __device__ __forceinline__ float value(Key key) {
    const unsigned ordered = key >> 16;
    if (ordered == 0) return not_a_number();
    const unsigned bits = ordered & 0x8000u ? ordered ^ 0x8000u : ~ordered & 0xffffu;
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  }
  static __device__ __forceinline__ int column(Key key) { return 0xffff - static_cast<int>(key & 0xffffu); }
};

// ------------------------------------------------------------------------------------------------ sorting networks

template <typename Key>
__device__ __forceinline__ void order_descending(Key& a, Key& b) {
  const Key high = a > b ? a : b;
  b = a > b ? b : a;
  a = high;
}

// Sorts a bitonic sequence (Batcher's merge); N is a power of two.
template <int N, typename Key>
__device__ __forceinline__ void merge_bitonic(Key (&keys)[N]) {
#pragma unroll
  for (int stride = N / 2; stride > 0; stride /= 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if ((i & stride) == 0) order_descending(keys[i], keys[i + stride]);
    }
  }
}

template <int N, typename Key>
__device__ __forceinline__ void sort_descending(Key (&keys)[N]) {
#pragma unroll
  for (int size = 2; size <= N; size *= 2) {
    // Comparing i with its mirror image in the run makes each half bitonic without a second direction.
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int mirror = i ^ (size - 1);
      if (i < mirror) order_descending(keys[i], keys[mirror]);
    }
#pragma unroll
    for (int stride = size / 4; stride > 0; stride /= 2) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if ((i & stride) == 0) order_descending(keys[i], keys[i + stride]);
      }
    }
  }
}

// best = the N largest of best and other, both sorted; sorted again.
template <int N, typename Key>
__device__ __forceinline__ void keep_largest(Key (&best)[N], const Key (&other)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const Key candidate = other[N - 1 - i];
    best[i] = candidate > best[i] ? candidate : best[i];
  }
  merge_bitonic(best);
}

// ------------------------------------------------------------------------------------------------------- selection
//
// One contract: `picked` gets the key of each of a lane's picks (0 in dead slots), `last` the key of the last pick.

// By merging sorted lists: every lane sorts its own keys, keeps the best, and lanes merge pairwise.
template <class Experts, class Picks, typename Key>
__device__ __forceinline__ void top_k_merge(const Key (&keys)[Experts::kSlots], int lane, Key (&picked)[Picks::kSlots],
                                            Key& last) {
  constexpr int kList = next_power_of_two(Picks::kColumns);
  Key best[kList];
#pragma unroll
  for (int first = 0; first < Experts::kSlots; first += kList) {
    Key run[kList];
#pragma unroll
    for (int i = 0; i < kList; ++i) run[i] = first + i < Experts::kSlots ? keys[first + i] : Key(0);
    sort_descending(run);
    if (first == 0) {
#pragma unroll
      for (int i = 0; i < kList; ++i) best[i] = run[i];
    } else {
      keep_largest(best, run);
    }
  }
#pragma unroll
  for (int distance = 1; distance < Experts::kLanes; distance *= 2) {
    Key other[kList];
#pragma unroll
    for (int i = 0; i < kList; ++i) other[i] = __shfl_xor_sync(kAllLanes, best[i], distance);
    keep_largest(best, other);
  }
  last = best[Picks::kColumns - 1];
#pragma unroll
  for (int p = 0; p < Picks::kSlots; ++p) {
    picked[p] = 0;
#pragma unroll
    for (int source = 0; source < Picks::kLanes; ++source) {
      const int pick = Picks::column(p, source);
      if (pick < Picks::kColumns && source == lane) picked[p] = best[pick];
    }
  }
}

// By rounds of maxima, each over the keys below the one before; nothing is marked or moved.
template <class Experts, class Picks, typename Key>
__device__ __forceinline__ void top_k_rounds(const Key (&keys)[Experts::kSlots], int lane, Key (&picked)[Picks::kSlots],
                                             Key& last) {
  last = ~Key(0);
#pragma unroll
  for (int p = 0; p < Picks::kSlots; ++p) {
    picked[p] = 0;
#pragma unroll 1
    for (int source = 0; source < Picks::kLanes; ++source) {
      if (Picks::column(p, source) >= Picks::kColumns) break;
      Key best = 0;
#pragma unroll
      for (int i = 0; i < Experts::kSlots; ++i) {
        if (keys[i] < last && keys[i] > best) best = keys[i];
      }
      last = lanes_max_key<Experts::kLanes>(best);
      if (source == lane) picked[p] = last;
    }
  }
}

// By sorting the whole row in shared memory, for many picks. `shared_row` holds a power of two of keys, >= kColumns.
template <class Experts, class Picks, typename Key>
__device__ __forceinline__ void top_k_sort(const Key (&keys)[Experts::kSlots], int lane, Key (&picked)[Picks::kSlots],
                                           Key& last, Key* shared_row) {
  constexpr int kLength = Experts::kSlots * Experts::kLanes;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < Experts::kSlots; ++i) shared_row[Experts::column(i, lane)] = keys[i];
  __syncwarp();
#pragma unroll 1
  for (int size = 2; size <= kLength; size *= 2) {
#pragma unroll 1
    for (int stride = size / 2; stride > 0; stride /= 2) {
      for (int pair = lane; pair < kLength / 2; pair += Experts::kLanes) {
        const int low = (pair / stride) * 2 * stride + pair % stride;
        // The first step of each size compares mirror images, the others neighbours at the stride.
        const int high = stride == size / 2 ? (low ^ (size - 1)) : low + stride;
        const Key a = shared_row[low];
        const Key b = shared_row[high];
        shared_row[low] = a > b ? a : b;
        shared_row[high] = a > b ? b : a;
      }
      __syncwarp();
    }
  }
#pragma unroll
  for (int p = 0; p < Picks::kSlots; ++p) {
    picked[p] = Picks::live(p, lane) ? shared_row[Picks::column(p, lane)] : Key(0);
  }
  last = shared_row[Picks::kColumns - 1];
}

// ---------------------------------------------------------------------------------------------------------- groups

// Which of a lane's experts lie in the kKeep best of kGroups groups; a group scores the sum of its kBest best values.
// `shared_row` holds kColumns floats, `shared_kept` kGroups flags, both the token's own.
template <class Experts, int kGroups, int kKeep, int kBest>
__device__ __forceinline__ void group_limit(const float (&x)[Experts::kSlots], bool (&allowed)[Experts::kSlots],
                                            float* shared_row, unsigned char* shared_kept, int lane) {
  using Groups = Row<kGroups, Experts::kLanes, 1>;
  using Rank = RankKey<float>;
  using Key = Rank::Key;
  constexpr int kSize = Experts::kColumns / kGroups;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < Experts::kSlots; ++i) {
    if (Experts::live(i, lane)) shared_row[Experts::column(i, lane)] = x[i];
  }
  __syncwarp();

  Key group_keys[Groups::kSlots];
#pragma unroll
  for (int s = 0; s < Groups::kSlots; ++s) {
    const int group = Groups::column(s, lane);
    group_keys[s] = 0;
    if (!Groups::live(s, lane)) continue;
    const float* members = shared_row + group * kSize;
    float score = 0.0f;
    if constexpr (kBest <= 8) {
      Key best[kBest] = {};
      for (int j = 0; j < kSize; ++j) {
        const int member = (j + lane) % kSize;                      // lanes start apart: fewer bank conflicts
        Key key = Rank::make(members[member], member);
#pragma unroll
        for (int r = 0; r < kBest; ++r) order_descending(best[r], key);
      }
      score = Rank::value(best[0]);
#pragma unroll
      for (int r = 1; r < kBest; ++r) score += Rank::value(best[r]);
    } else {
      Key bound = ~Key(0);
      for (int r = 0; r < kBest; ++r) {
        Key next = 0;
        for (int j = 0; j < kSize; ++j) {
          const Key key = Rank::make(members[j], j);
          if (key < bound && key > next) next = key;
        }
        bound = next;
        score = r == 0 ? Rank::value(next) : score + Rank::value(next);
      }
    }
    group_keys[s] = Rank::make(score, group);
  }

  Key last = ~Key(0);
#pragma unroll 1
  for (int round = 0; round < kKeep; ++round) {
    Key best = 0;
#pragma unroll
    for (int s = 0; s < Groups::kSlots; ++s) {
      if (group_keys[s] < last && group_keys[s] > best) best = group_keys[s];
    }
    last = lanes_max_key<Experts::kLanes>(best);
  }
#pragma unroll
  for (int s = 0; s < Groups::kSlots; ++s) {
    if (Groups::live(s, lane)) shared_kept[Groups::column(s, lane)] = group_keys[s] >= last;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < Experts::kSlots; ++i) {
    allowed[i] = Experts::live(i, lane) && shared_kept[Experts::column(i, lane) / kSize];
  }
}

}  // namespace moesaic

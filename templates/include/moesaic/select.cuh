// Top-k of a row: the k first in the order (value descending, column ascending), NaN below -inf, -0 equal to +0.
//
// Values become integers in that order. A 16-bit value and its column fit one word: such keys are distinct, so nothing
// below needs a rule for ties. A 32-bit value fills a word by itself; its column joins it once few candidates are left.
// Key 0 stands for "cannot be picked"; every real key is larger, also than 0 and the offset of a lane.
#pragma once

#include "moesaic/row.cuh"

namespace moesaic {

using Wide = unsigned long long;

// Bits of a float such that a larger value has the larger unsigned number, but NaN, which comes above +inf.
__device__ __forceinline__ unsigned sortable_bits(float x) {
  // Adding 0 makes -0 to +0 and, on a GPU, every NaN to the one with all bits set but the sign.
  unsigned bits = __float_as_uint(x + 0.0f);
#ifdef MOESAIC_EMULATE
  if (x != x) bits = 0x7fffffffu;
#endif
  return bits ^ (static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000u);
}
__device__ __forceinline__ float from_sortable_bits(unsigned bits) {
  return __uint_as_float(bits & 0x80000000u ? bits ^ 0x80000000u : ~bits);
}

// A turn of the number circle brings +inf to its end and NaN to its start, below -inf and above 0.
constexpr unsigned kTurn = 0x007fffffu;

__device__ __forceinline__ unsigned ordered_bits(float x) { return sortable_bits(x) + kTurn; }
__device__ __forceinline__ float from_ordered_bits(unsigned ordered) { return from_sortable_bits(ordered - kTurn); }

// How values of a storage type are ranked. Key: what a slot of a row is ranked by. Keys order the slots of one lane; with
// the lane's `offset` added they order the row. Pick: key and column of a pick.
template <typename T>
struct Rank;

template <>
struct Rank<float> {
  using Key = unsigned;
  using Pick = Wide;
  static constexpr Key kSmallest = 1;        // of a value that can be picked
  static constexpr int kFirst = 0x7fffffff;  // of column 0; with all bits set, +inf there would be no less than ~Pick(0)
  template <class Experts>
  static __device__ __forceinline__ Key offset(int) { return 0; }
  template <class Experts>
  static __device__ __forceinline__ void make(const float (&values)[Experts::kSlots], Key (&keys)[Experts::kSlots]) {
#pragma unroll
    for (int i = 0; i < Experts::kSlots; ++i) keys[i] = ordered_bits(values[i]);
  }
  static __device__ __forceinline__ Pick pick(Key key, int column) {
    return key == 0 ? 0 : static_cast<Wide>(key) << 32 | static_cast<unsigned>(kFirst - column);
  }
  static __device__ __forceinline__ bool is_pick(Pick pick) { return pick != 0; }
  static __device__ __forceinline__ float value(Pick pick) {
    return from_ordered_bits(static_cast<unsigned>(pick >> 32));
  }
  static __device__ __forceinline__ int column(Pick pick) { return kFirst - static_cast<int>(pick & 0xffffffffu); }
  // Whether a slot comes no later than the last pick, less the lane's offset.
  static __device__ __forceinline__ bool reaches(Key key, int column, Pick last) {
    const unsigned bound = static_cast<unsigned>(last >> 32);
    return key > bound || (key == bound && column <= Rank::column(last));
  }
};

// PTX ISA, "Half Precision Floating Point Instructions: fma": 0 - x of both halves, as -1 * x + 0.
#ifndef MOESAIC_EMULATE
template <typename T>
__device__ __forceinline__ unsigned negate_halves(unsigned x);
template <>
__device__ __forceinline__ unsigned negate_halves<__nv_bfloat16>(unsigned x) {
  unsigned y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(0xbf80bf80u), "r"(0u));
  return y;
}
template <>
__device__ __forceinline__ unsigned negate_halves<__half>(unsigned x) {
  unsigned y;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(0xbc00bc00u), "r"(0u));
  return y;
}
#endif

// 0 - x for two values in one word, the first in the lower half. A zero becomes +0, and every NaN the one with all bits
// set but the sign.
template <typename T>
__device__ __forceinline__ unsigned negate_pair(T low, T high) {
#ifdef MOESAIC_EMULATE
  const auto negated = [](T x) -> unsigned {
    const T y = from_float<T>(0.0f - to_float(x));
    unsigned short bits;
    memcpy(&bits, &y, sizeof(bits));
    return to_float(x) != to_float(x) ? 0x7fffu : bits;
  };
  return negated(low) | negated(high) << 16;
#else
  const T pair[2] = {low, high};
  unsigned x;
  memcpy(&x, pair, sizeof(x));
  return negate_halves<T>(x);
#endif
}

// Two values as 16-bit numbers in selection order: a larger value has the larger one, and NaN has 0.
//
// A float is a sign and a magnitude, so that of -x a negative one is in order as it is, and of the others all bits but
// the sign have to be turned. PTX ISA, "prmt" (mode 8: a byte's sign) and "lop3".
template <typename T>
__device__ __forceinline__ unsigned order_pair(T low, T high) {
  const unsigned y = negate_pair(low, high);
#ifdef MOESAIC_EMULATE
  const unsigned signs = (y & 0x8000u ? 0xffffu : 0u) | (y & 0x80000000u ? 0xffff0000u : 0u);
  return y ^ (~signs & 0x7fff7fffu);
#else
  unsigned signs, ordered;
  asm("prmt.b32 %0, %1, 0, 0xBB99;" : "=r"(signs) : "r"(y));
  // As C++, the inversion would move past what follows and become an instruction a value.
  asm("lop3.b32 %0, %1, %2, %3, 0xD2;" : "=r"(ordered) : "r"(y), "r"(signs), "r"(0x7fff7fffu));
  return ordered;
#endif
}

// One word for both: the value above, the inverted column below. A lane counts its columns as if it were the last lane:
// the halves below are then constants, and the offset is added to what is left of a row, not to all of it.
template <typename T>
struct PackedRank {
  using Key = unsigned;
  using Pick = unsigned;
  static constexpr Key kSmallest = 0x8000;  // a row is not as long, and an offset is less than that
  template <class Experts>
  static __device__ __forceinline__ Key offset(int lane) {
    return static_cast<unsigned>((Experts::kLanes - 1 - lane) * Experts::kVec);
  }
  template <class Experts>
  static __device__ __forceinline__ void make(const T (&values)[Experts::kSlots], Key (&keys)[Experts::kSlots]) {
#pragma unroll
    for (int i = 0; i < Experts::kSlots; i += 2) {
      const int next = i + 1 < Experts::kSlots ? i + 1 : i;
      const unsigned pair = order_pair(values[i], values[next]);
      keys[next] = __byte_perm(pair, 0xffff - Experts::column(next, Experts::kLanes - 1), 0x3254);
      keys[i] = __byte_perm(pair, 0xffff - Experts::column(i, Experts::kLanes - 1), 0x1054);
    }
  }
  static __device__ __forceinline__ Pick pick(Key key, int) { return key; }
  static __device__ __forceinline__ bool is_pick(Pick pick) { return pick >= kSmallest; }
  static __device__ __forceinline__ float value(Pick pick) {
    const unsigned ordered = pick >> 16;
    const auto bits = static_cast<unsigned short>(ordered & 0x8000u ? ordered ^ 0x8000u : ~ordered);
    T value;
    memcpy(&value, &bits, sizeof(value));
    return to_float(value) + 0.0f;  // a zero comes back as -0
  }
  static __device__ __forceinline__ int column(Pick pick) { return 0xffff - static_cast<int>(pick & 0xffffu); }
  static __device__ __forceinline__ bool reaches(Key key, int, Pick last) { return key >= last; }
};
template <>
struct Rank<__nv_bfloat16> : PackedRank<__nv_bfloat16> {};
template <>
struct Rank<__half> : PackedRank<__half> {};

// Keys of a lane's slots, 0 in dead ones.
template <class R, class Experts, typename T>
__device__ __forceinline__ void rank_row(const T (&values)[Experts::kSlots], typename R::Key (&keys)[Experts::kSlots],
                                         int lane) {
  R::template make<Experts>(values, keys);
#pragma unroll
  for (int i = 0; i < Experts::kSlots; ++i) keys[i] = Experts::live(i, lane) ? keys[i] : 0;
}

// Which of a lane's experts were picked: those that come no later than the last pick.
template <class R, class Experts>
__device__ __forceinline__ void picked_slots(const typename R::Key (&keys)[Experts::kSlots], typename R::Pick last,
                                             bool (&member)[Experts::kSlots], int lane) {
  const typename R::Pick bound = last - R::template offset<Experts>(lane);
#pragma unroll
  for (int i = 0; i < Experts::kSlots; ++i) member[i] = R::reaches(keys[i], Experts::column(i, lane), bound);
}

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

// Batcher's odd-even merge sort: fewer exchanges than the bitonic sort. The recursion makes every index a constant;
// nested loops of this depth would not be unrolled, and the keys would move to local memory.
template <int kRun, int kStride, int N, typename Key>
__device__ __forceinline__ void sort_steps(Key (&keys)[N]) {
  if constexpr (kRun < N) {
#pragma unroll
    for (int i = 0; i < N - kStride; ++i) {
      const bool starts = kStride == kRun ? (i & kRun) == 0 : (i % (2 * kStride)) >= kStride;
      if (starts && i / (2 * kRun) == (i + kStride) / (2 * kRun)) order_descending(keys[i], keys[i + kStride]);
    }
    if constexpr (kStride > 1) {
      sort_steps<kRun, kStride / 2>(keys);
    } else {
      sort_steps<kRun * 2, kRun * 2>(keys);
    }
  }
}

template <int N, typename Key>
__device__ __forceinline__ void sort_descending(Key (&keys)[N]) {
  sort_steps<1, 1>(keys);
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

// Sorts what Row spreads over lanes, column 0 the largest; columns past the end hold 0.
template <class R, typename Key>
__device__ __forceinline__ void sort_over_lanes(Key (&keys)[R::kSlots], int lane) {
  constexpr int kLength = next_power_of_two(R::kColumns);
#pragma unroll
  for (int size = 2; size <= kLength; size *= 2) {
#pragma unroll
    for (int stride = size / 2; stride > 0; stride /= 2) {
      // The first step of a size compares mirror images, the others neighbours at the stride.
      const int flip = stride == size / 2 ? size - 1 : stride;
      Key other[R::kSlots];
#pragma unroll
      for (int s = 0; s < R::kSlots; ++s) {
        other[s] = __shfl_xor_sync(kAllLanes, keys[s ^ (flip / R::kLanes)], flip % R::kLanes);
      }
#pragma unroll
      for (int s = 0; s < R::kSlots; ++s) {
        const int here = R::column(s, lane);
        const bool keeps_larger = here < (here ^ flip);
        if ((other[s] > keys[s]) == keeps_larger) keys[s] = other[s];
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------------- selection
//
// One contract: `picked` gets each of a lane's picks (0 in dead slots), `last` the last pick of the row. Rows that a
// block shares are selected by rounds, by sorting, or as select_block.cuh does.

// The kList best of kCount slots in descending order. Places past kKeep are set to 0 on the way, so that the compiler
// drops the exchanges that feed them only.
template <int kCount, int kKeep, int kList, int N, typename Key>
__device__ __forceinline__ void best_of_slots(const Key (&keys)[N], int begin, Key (&best)[kList]) {
#pragma unroll
  for (int first = 0; first < kCount; first += kList) {
    Key run[kList];
#pragma unroll
    for (int i = 0; i < kList; ++i) run[i] = first + i < kCount ? keys[begin + first + i] : Key(0);
    sort_descending(run);
#pragma unroll
    for (int i = kKeep; i < kList; ++i) run[i] = 0;
    if (first == 0) {
#pragma unroll
      for (int i = 0; i < kList; ++i) best[i] = run[i];
    } else {
      keep_largest(best, run);
    }
#pragma unroll
    for (int i = kKeep; i < kList; ++i) best[i] = 0;
  }
}

// How `group` neighbouring lanes hold one descending list of up to `length` places, after each began with a list of
// `list` of its own. The lane of rank r holds the `own` places from r * own on. Lists double until they have the length;
// from then on the better half of two lists is kept, and a lane holds half as many; at one place a lane, lists repeat.
//
// Ranks are no lane numbers: two lists merge by comparing mirror images, and each of a mirrored pair of lanes keeps half
// of what the pair compares, so that nothing is compared twice. A bit of a rank is the parity of some bits of the lane.
struct Ranks {
  int own = 0;
  int bits = 0;
  int mirror = 0;       // lane ^ mirror has the opposite rank
  int flip[5] = {};     // lane ^ flip[b] has the rank that differs in bit b
  int parity[5] = {};   // bit b of a rank is the parity of lane & parity[b]
};

__host__ __device__ constexpr Ranks ranks_of(int list, int length, int group) {
  Ranks r;
  r.own = list;
  for (int g = 1; g < group; g *= 2) {
    if (r.own * g < length) {  // the second list goes below the first
      r.flip[r.bits] = g;
      r.parity[r.bits] = g;
      r.mirror ^= g;
      r.bits += 1;
    } else if (r.own > 1) {    // the first list's lanes get the upper half of each lane's places
      for (int b = r.bits; b > 0; --b) {
        r.flip[b] = r.flip[b - 1];
        r.parity[b] = r.parity[b - 1] ^ g;
      }
      r.flip[0] = r.mirror ^ g;
      r.parity[0] = g;
      r.mirror = g;
      r.bits += 1;
      r.own /= 2;
    }
  }
  return r;
}

template <int kList, int kLength, int kLanes>
__device__ __forceinline__ int lane_of_rank(int rank) {
  constexpr Ranks kRanks = ranks_of(kList, kLength, kLanes);
  int lane = 0;
#pragma unroll
  for (int b = 0; b < kRanks.bits; ++b) lane ^= (rank >> b & 1) * kRanks.flip[b];
  return lane;
}

template <int kBits>
__device__ __forceinline__ bool even(int lane) { return (__popc(lane & kBits) & 1) == 0; }

// x[i] = the larger or the smaller of x[i] and other[i].
template <int N, typename Key>
__device__ __forceinline__ void keep(bool larger, Key (&x)[N], const Key (&other)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const Key high = other[i] > x[i] ? other[i] : x[i];
    const Key low = other[i] > x[i] ? x[i] : other[i];
    x[i] = larger ? high : low;
  }
}

// Sorts a bitonic sequence over lanes, from the stride of rank bit kBit down. If kFolded, the lanes of odd rank hold
// their places in reverse, until the last stride over lanes has been compared.
template <int kList, int kLength, int kGroup, int kBit, bool kFolded, int N, typename Key>
__device__ __forceinline__ void merge_bitonic_over_lanes(Key (&x)[N], int lane) {
  if constexpr (kBit >= 0) {
    constexpr Ranks kRanks = ranks_of(kList, kLength, kGroup);
    Key other[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      other[i] = __shfl_xor_sync(kAllLanes, x[kFolded && kBit == 0 ? N - 1 - i : i], kRanks.flip[kBit]);
    }
    keep(even<kRanks.parity[kBit]>(lane), x, other);
    merge_bitonic_over_lanes<kList, kLength, kGroup, kBit - 1, kFolded>(x, lane);
  } else {
    merge_bitonic(x);
  }
}

// Merges the lists of kGroup lanes each until the lanes of a token hold one.
template <int kList, int kLength, int kGroup, int kLanes, int N, int M, typename Key>
__device__ __forceinline__ void merge_lists(const Key (&list)[N], Key (&merged)[M], int lane) {
  if constexpr (kGroup == kLanes) {
    static_assert(N == M, "what Ranks says a lane holds");
#pragma unroll
    for (int i = 0; i < N; ++i) merged[i] = list[i];
  } else {
    constexpr Ranks kBefore = ranks_of(kList, kLength, kGroup);
    constexpr Ranks kAfter = ranks_of(kList, kLength, 2 * kGroup);
    constexpr bool kDoubled = N * kGroup < kLength;
    Key kept[kAfter.own], other[kAfter.own];
#pragma unroll
    for (int i = 0; i < kAfter.own; ++i) {
      kept[i] = list[i];
      other[i] = __shfl_xor_sync(kAllLanes, list[N - 1 - i], kBefore.mirror ^ kGroup);
    }
    keep(!kDoubled || (lane & kGroup) == 0, kept, other);
    constexpr bool kHalved = kAfter.own < N;
    constexpr int kTop = kAfter.bits - 1 - (kDoubled ? 1 : 0);  // doubled, each half is a list by now
    merge_bitonic_over_lanes<kList, kLength, 2 * kGroup, kTop, kHalved>(kept, lane);
    merge_lists<kList, kLength, 2 * kGroup, kLanes>(kept, merged, lane);
  }
}

// The picks of a row from the kList best of each lane, and the last of them. False where a lane's list does not do: what
// the lane left out may belong to the picks.
template <class R, class Experts, class Picks, int kList>
__device__ __forceinline__ bool picks_from_lists(unsigned (&list)[kList], int lane, unsigned (&picked)[Picks::kSlots],
                                                 unsigned& last) {
  constexpr int kLanes = Experts::kLanes;
  constexpr int kLength = next_power_of_two(Picks::kColumns);
  static_assert(kList * kLanes >= kLength, "the lists of all lanes hold all picks");
  constexpr int kOwn = ranks_of(kList, kLength, kLanes).own;
  const unsigned offset = R::template offset<Experts>(lane);
#pragma unroll
  for (int i = 0; i < kList; ++i) list[i] += offset;
  unsigned merged[kOwn];
  merge_lists<kList, kLength, 1, kLanes>(list, merged, lane);

  // From where the places are to where picks live.
#pragma unroll
  for (int p = 0; p < Picks::kSlots; ++p) {
    const int place = Picks::column(p, lane);
    picked[p] = 0;
#pragma unroll
    for (int i = 0; i < smaller(kOwn, kLanes); ++i) {
      const int own = (p * kLanes + i) % kOwn;  // the places of the lanes from 0 on begin there
      const unsigned found =
          __shfl_sync(kAllLanes, merged[own], lane_of_rank<kList, kLength, kLanes>(place / kOwn), kLanes);
      if (Picks::live(p, lane) && place % kOwn == own) picked[p] = found;
    }
  }
  constexpr int kEnd = Picks::kColumns - 1;
  last = __shfl_sync(kAllLanes, merged[kEnd % kOwn], lane_of_rank<kList, kLength, kLanes>(kEnd / kOwn), kLanes);
  return kList >= Picks::kColumns || list[kList - 1] <= last || list[kList - 1] < R::kSmallest;
}

// The picks of a row from lists of kList, or from full lists where those did not do.
template <class R, class Experts, class Picks, int kList>
__device__ __forceinline__ void merge_best(const unsigned (&keys)[Experts::kSlots], int lane,
                                           unsigned (&picked)[Picks::kSlots], unsigned& last) {
  unsigned list[kList];
  best_of_slots<Experts::kSlots, smaller(Picks::kColumns, kList)>(keys, 0, list);
  const bool enough = picks_from_lists<R, Experts, Picks>(list, lane, picked, last);
  if constexpr (kList < Picks::kColumns) {
    constexpr int kFull = next_power_of_two(Picks::kColumns);
    if (__any_sync(kAllLanes, !enough)) merge_best<R, Experts, Picks, kFull>(keys, lane, picked, last);
  }
}

// By rounds of maxima, each over the picks after the one before; nothing is marked or moved.
template <class R, class Experts, class Picks>
__device__ __forceinline__ void top_k_rounds(const typename R::Key (&keys)[Experts::kSlots], int lane,
                                             typename R::Pick (&picked)[Picks::kSlots], typename R::Pick& last) {
  using Pick = typename R::Pick;
  const Pick offset = R::template offset<Experts>(lane);
  last = ~Pick(0);
#pragma unroll
  for (int p = 0; p < Picks::kSlots; ++p) {
    picked[p] = 0;
#pragma unroll 1
    for (int source = 0; source < Picks::kLanes; ++source) {
      if (Picks::column(p, source) >= Picks::kColumns) break;
      Pick best = 0;
      const Pick bound = last - offset;
#pragma unroll
      for (int i = 0; i < Experts::kSlots; ++i) {
        const Pick candidate = R::pick(keys[i], Experts::column(i, lane));
        if (candidate < bound && candidate > best) best = candidate;
      }
      last = lanes_max_key<Experts::kLanes>(best + offset);
      if (source == lane) picked[p] = last;
    }
  }
}

// By merging sorted lists of packed keys.
template <class R, class Experts, class Picks, int kList>
__device__ __forceinline__ void top_k_merge(const typename R::Key (&keys)[Experts::kSlots], int lane,
                                            typename R::Pick (&picked)[Picks::kSlots], typename R::Pick& last) {
  merge_best<R, Experts, Picks, kList>(keys, lane, picked, last);
}

// The picks of a row in shared memory by rounds of maxima: few registers and little code, for the rare case.
template <class R, class Experts, class Picks>
__device__ __forceinline__ void top_k_rounds_shared(const unsigned* shared_row, int lane, Wide (&picked)[Picks::kSlots],
                                                    Wide& last) {
  last = ~Wide(0);
#pragma unroll
  for (int p = 0; p < Picks::kSlots; ++p) {
    picked[p] = 0;
#pragma unroll 1
    for (int source = 0; source < Picks::kLanes; ++source) {
      if (Picks::column(p, source) >= Picks::kColumns) break;
      Wide best = 0;
#pragma unroll 1
      for (int column = lane; column < Experts::kColumns; column += Experts::kLanes) {
        const Wide candidate = R::pick(shared_row[column], column);
        if (candidate < last && candidate > best) best = candidate;
      }
      last = lanes_max_key<Experts::kLanes>(best);
      if (source == lane) picked[p] = last;
    }
  }
}

// One bit for each slot with a key of at least `bound`.
template <class Experts>
__device__ __forceinline__ unsigned slots_from(const unsigned (&keys)[Experts::kSlots], unsigned bound) {
  static_assert(Experts::kSlots <= 32, "one bit a slot");
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < Experts::kSlots; ++i) bits |= (keys[i] >= bound ? 1u : 0u) << i;
  return bits;
}

// By merging sorted lists of bare values, which finds the k-th largest value; the elements that reach it are collected
// with their columns and sorted. If more than k reach it (a tie at the end), rounds decide.
//
// `reaching` has a bit a slot. `shared_row` holds a row of keys and `shared_picks` kColumns picks, both the token's own.
template <class R, class Experts, class Picks>
__device__ __forceinline__ void collect_picks(const unsigned (&keys)[Experts::kSlots], unsigned reaching, int lane,
                                              Wide (&picked)[Picks::kSlots], Wide& last, unsigned* shared_row,
                                              Wide* shared_picks) {
  __syncwarp();  // the picks of the token before have been read
  // A register cannot be indexed by a number known only at run time; shared memory can.
  to_shared<Experts>(keys, shared_row, lane);
  int before = __popc(reaching);                                   // becomes how many the lanes below have
  const int own = before;
#pragma unroll
  for (int distance = 1; distance < Experts::kLanes; distance *= 2) {
    const int other = __shfl_up_sync(kAllLanes, before, distance, Experts::kLanes);
    if (lane >= distance) before += other;
  }
  const int total = __shfl_sync(kAllLanes, before, Experts::kLanes - 1, Experts::kLanes);
  if (__any_sync(kAllLanes, total > Picks::kColumns)) {
    unsigned left[Experts::kSlots];
#pragma unroll
    for (int i = 0; i < Experts::kSlots; ++i) left[i] = reaching >> i & 1u ? keys[i] : 0;
    to_shared<Experts>(left, shared_row, lane);
    __syncwarp();
    top_k_rounds_shared<R, Experts, Picks>(shared_row, lane, picked, last);
    return;
  }
  before -= own;
  for (unsigned left = reaching; left != 0; left &= left - 1) {
    const int column = Experts::column(__ffs(static_cast<int>(left)) - 1, lane);
    shared_picks[before++] = R::pick(shared_row[column], column);
  }
  __syncwarp();
#pragma unroll
  for (int p = 0; p < Picks::kSlots; ++p) {
    picked[p] = Picks::column(p, lane) < total ? shared_picks[Picks::column(p, lane)] : 0;
  }
  sort_over_lanes<Picks>(picked, lane);
  constexpr int kEnd = Picks::kColumns - 1;
  last = __shfl_sync(kAllLanes, picked[kEnd / Picks::kLanes], kEnd % Picks::kLanes, Picks::kLanes);
}

template <class R, class Experts, class Picks, int kList>
__device__ __forceinline__ void top_k_collect(const unsigned (&keys)[Experts::kSlots], int lane,
                                              Wide (&picked)[Picks::kSlots], Wide& last, unsigned* shared_row,
                                              Wide* shared_picks) {
  unsigned places[Picks::kSlots], bound;
  merge_best<R, Experts, Picks, kList>(keys, lane, places, bound);
  bound = bound > R::kSmallest ? bound : R::kSmallest;               // where too few can be picked
  collect_picks<R, Experts, Picks>(keys, slots_from<Experts>(keys, bound), lane, picked, last, shared_row, shared_picks);
}

// The same among the experts that `allowed` says, which is one for all of a chunk. Each chunk's best are sorted already:
// `runs` has them.
template <class R, class Experts, class Picks, int kList>
__device__ __forceinline__ void top_k_collect_runs(const unsigned (&keys)[Experts::kSlots],
                                                   const unsigned (&runs)[Experts::kChunks][kList],
                                                   const bool (&allowed)[Experts::kSlots], int lane,
                                                   Wide (&picked)[Picks::kSlots], Wide& last, unsigned* shared_row,
                                                   Wide* shared_picks) {
  constexpr int kVec = Experts::kVec;
  constexpr unsigned kChunkBits = kVec == 32 ? ~0u : (1u << kVec) - 1;
  unsigned list[kList] = {};
  unsigned open = 0;
#pragma unroll
  for (int c = 0; c < Experts::kChunks; ++c) {
    open |= allowed[c * kVec] ? kChunkBits << c * kVec : 0;
    unsigned run[kList];
#pragma unroll
    for (int i = 0; i < kList; ++i) run[i] = allowed[c * kVec] ? runs[c][i] : 0;
    if (c == 0) {
#pragma unroll
      for (int i = 0; i < kList; ++i) list[i] = run[i];
    } else {
      keep_largest(list, run);
    }
  }
  unsigned places[Picks::kSlots], bound;
  const bool enough = picks_from_lists<R, Experts, Picks>(list, lane, places, bound);
  if constexpr (kList < Picks::kColumns) {
    if (__any_sync(kAllLanes, !enough)) {
      unsigned left[Experts::kSlots];
#pragma unroll
      for (int i = 0; i < Experts::kSlots; ++i) left[i] = allowed[i] ? keys[i] : 0;
      merge_best<R, Experts, Picks, next_power_of_two(Picks::kColumns)>(left, lane, places, bound);
    }
  }
  const unsigned reaching = slots_from<Experts>(keys, bound) & open;
  collect_picks<R, Experts, Picks>(keys, reaching, lane, picked, last, shared_row, shared_picks);
}

// Sorts `length` values of the team's shared memory, a power of two, the largest first.
template <int kLanes, typename Pick>
__device__ __forceinline__ void sort_shared(Pick* values, int length, int lane) {
#pragma unroll 1
  for (int size = 2; size <= length; size *= 2) {
#pragma unroll 1
    for (int stride = size / 2; stride > 0; stride /= 2) {
#pragma unroll 1
      for (int pair = lane; pair < length / 2; pair += kLanes) {
        const int low = 2 * pair - (pair & (stride - 1));
        // The first step of a size compares mirror images, the others neighbours at the stride.
        const int high = stride == size / 2 ? (low ^ (size - 1)) : low + stride;
        const Pick a = values[low];
        const Pick b = values[high];
        values[low] = a > b ? a : b;
        values[high] = a > b ? b : a;
      }
      team_sync<kLanes>();
    }
  }
}

// By sorting the whole row in shared memory, for many picks. `shared_row` holds all slots of all lanes.
template <class R, class Experts, class Picks>
__device__ __forceinline__ void top_k_sort(const typename R::Key (&keys)[Experts::kSlots], int lane,
                                           typename R::Pick (&picked)[Picks::kSlots], typename R::Pick& last,
                                           typename R::Pick* shared_row) {
  using Pick = typename R::Pick;
  team_sync<Experts::kLanes>();
#pragma unroll
  for (int i = 0; i < Experts::kSlots; ++i) {
    const int column = Experts::column(i, lane);
    shared_row[column] = R::pick(keys[i], column) + R::template offset<Experts>(lane);
  }
  team_sync<Experts::kLanes>();
  sort_shared<Experts::kLanes>(shared_row, Experts::kSlots * Experts::kLanes, lane);
#pragma unroll
  for (int p = 0; p < Picks::kSlots; ++p) {
    picked[p] = Picks::live(p, lane) ? shared_row[Picks::column(p, lane)] : Pick(0);
  }
  last = shared_row[Picks::kColumns - 1];
}

// ---------------------------------------------------------------------------------------------------------- groups

// Sum of the kBest best values of a sorted list of ordered bits, from the best down.
template <int kBest, int N>
__device__ __forceinline__ float sum_of_best(const unsigned (&best)[N]) {
  float score = from_ordered_bits(best[0]);
#pragma unroll
  for (int r = 1; r < kBest; ++r) score += from_ordered_bits(best[r]);
  return score;
}

// Which of a lane's experts lie in the kKeep best of kGroups groups; a group scores the sum of its kBest best values.
//
// For groups that neighbouring lanes hold whole chunks of: kBest is 1, 2 or 4, a group is kSpan chunks, and kSpan lanes
// divide the token's lanes. Every lane learns all scores and counts which are better than its own. `runs` are the best
// of each chunk of a lane, in descending order.
template <class Experts, int kGroups, int kKeep, int kBest, int kList>
__device__ __forceinline__ void group_limit_lanes(const unsigned (&runs)[Experts::kChunks][kList],
                                                  bool (&allowed)[Experts::kSlots], int lane) {
  constexpr int kVec = Experts::kVec;
  constexpr int kSpan = Experts::kColumns / kGroups / kVec;        // lanes that share a group
  constexpr int kBeside = Experts::kLanes / kSpan;                 // groups side by side in one chunk of all lanes
  static_assert(kSpan * kVec * kGroups == Experts::kColumns && kSpan * kBeside == Experts::kLanes, "whole chunks");
  constexpr int kChunks = kGroups / kBeside;                       // those that are not all dead
  static_assert(kBeside * kChunks == kGroups, "no chunk is dead in some lanes only");
  static_assert(kBest <= kList, "a chunk's best are in its run");

  unsigned scores[kGroups], own[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    unsigned best[kBest];
#pragma unroll
    for (int r = 0; r < kBest; ++r) best[r] = runs[c][r];
#pragma unroll
    for (int distance = 1; distance < kSpan; distance *= 2) {
      unsigned other[kBest];
#pragma unroll
      for (int r = 0; r < kBest; ++r) other[r] = __shfl_xor_sync(kAllLanes, best[r], distance);
      keep_largest(best, other);
    }
    own[c] = ordered_bits(sum_of_best<kBest>(best));
#pragma unroll
    for (int b = 0; b < kBeside; ++b) {
      scores[c * kBeside + b] = kBeside == 1 ? own[c] : __shfl_sync(kAllLanes, own[c], b * kSpan, Experts::kLanes);
    }
  }

#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    int better = 0;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const bool earlier = g / kBeside < c || (g / kBeside == c && g % kBeside < lane / kSpan);
      better += scores[g] > own[c] || (scores[g] == own[c] && earlier) ? 1 : 0;
    }
#pragma unroll
    for (int j = 0; j < kVec; ++j) allowed[c * kVec + j] = better < kKeep;
  }
#pragma unroll
  for (int i = kChunks * kVec; i < Experts::kSlots; ++i) allowed[i] = false;
}

// The best of each chunk of a lane, in descending order.
template <class Experts, int kList>
__device__ __forceinline__ void sort_chunks(const unsigned (&keys)[Experts::kSlots],
                                            unsigned (&runs)[Experts::kChunks][kList]) {
#pragma unroll
  for (int c = 0; c < Experts::kChunks; ++c) {
    best_of_slots<Experts::kVec, kList>(keys, c * Experts::kVec, runs[c]);
  }
}

// The same for any groups, through a row of shared memory: a lane scores whole groups.
// `shared_row` holds kColumns words, `shared_kept` kGroups flags, both the token's own.
template <class Experts, int kGroups, int kKeep, int kBest>
__device__ __forceinline__ void group_limit_shared(const float (&x)[Experts::kSlots], bool (&allowed)[Experts::kSlots],
                                                   unsigned* shared_row, unsigned char* shared_kept, int lane) {
  using Groups = Row<kGroups, Experts::kLanes, 1>;
  constexpr int kSize = Experts::kColumns / kGroups;
  unsigned ordered[Experts::kSlots];
#pragma unroll
  for (int i = 0; i < Experts::kSlots; ++i) ordered[i] = ordered_bits(x[i]);
  __syncwarp();
  to_shared<Experts>(ordered, shared_row, lane);
  __syncwarp();

  Wide scores[Groups::kSlots];
#pragma unroll
  for (int s = 0; s < Groups::kSlots; ++s) {
    const int group = Groups::column(s, lane);
    scores[s] = 0;
    if (!Groups::live(s, lane)) continue;
    const unsigned* members = shared_row + group * kSize;
    float score = 0.0f;
    if constexpr (kBest <= 8) {
      unsigned best[kBest] = {};
      for (int j = 0; j < kSize; ++j) {
        unsigned key = members[(j + lane) % kSize];                 // lanes start apart: fewer bank conflicts
#pragma unroll
        for (int r = 0; r < kBest; ++r) order_descending(best[r], key);
      }
      score = sum_of_best<kBest>(best);
    } else {
      Wide bound = ~Wide(0);
      for (int r = 0; r < kBest; ++r) {
        Wide next = 0;
        for (int j = 0; j < kSize; ++j) {
          const Wide key = Rank<float>::pick(members[j], j);
          if (key < bound && key > next) next = key;
        }
        bound = next;
        score = r == 0 ? Rank<float>::value(next) : score + Rank<float>::value(next);
      }
    }
    scores[s] = Rank<float>::pick(ordered_bits(score), group);
  }

  Wide last = ~Wide(0);
#pragma unroll 1
  for (int round = 0; round < kKeep; ++round) {
    Wide best = 0;
#pragma unroll
    for (int s = 0; s < Groups::kSlots; ++s) {
      if (scores[s] < last && scores[s] > best) best = scores[s];
    }
    last = lanes_max_key<Experts::kLanes>(best);
  }
#pragma unroll
  for (int s = 0; s < Groups::kSlots; ++s) {
    if (Groups::live(s, lane)) shared_kept[Groups::column(s, lane)] = scores[s] >= last;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < Experts::kSlots; ++i) {
    allowed[i] = Experts::live(i, lane) && shared_kept[Experts::column(i, lane) / kSize];
  }
}

}  // namespace moesaic

// Top-k of a row: the k first in the order (value descending, column ascending), NaN below -inf, -0 equal to +0.
//
// Values become integers in that order. A 16-bit value and its column fit one word: such keys are distinct, so nothing
// below needs a rule for ties. A 32-bit value fills a word by itself; its column joins it once few candidates are left.
// Key 0 stands for "cannot be picked"; every real key is larger.
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
constexpr unsigned kTurnOfUpperHalf = 0x007f0000u;

__device__ __forceinline__ unsigned ordered_bits(float x) { return sortable_bits(x) + kTurn; }
__device__ __forceinline__ float from_ordered_bits(unsigned ordered) { return from_sortable_bits(ordered - kTurn); }

// How values of a storage type are ranked. Key: what a slot of a row is ranked by. Pick: key and column of a pick.
template <typename T>
struct Rank;

template <>
struct Rank<float> {
  using Key = unsigned;
  using Pick = Wide;
  static __device__ __forceinline__ Key make(float value, int) { return ordered_bits(value); }
  static __device__ __forceinline__ Pick pick(Key key, int column) {
    return key == 0 ? 0 : static_cast<Wide>(key) << 32 | static_cast<unsigned>(~column);
  }
  static __device__ __forceinline__ float value(Pick pick) {
    return from_ordered_bits(static_cast<unsigned>(pick >> 32));
  }
  static __device__ __forceinline__ int column(Pick pick) { return static_cast<int>(~static_cast<unsigned>(pick)); }
  // Whether a slot comes no later than the last pick.
  static __device__ __forceinline__ bool reaches(Key key, int column, Pick last) {
    const unsigned bound = static_cast<unsigned>(last >> 32);
    return key > bound || (key == bound && column <= Rank::column(last));
  }
};

// One word for both: the value above, the inverted column below.
template <typename T>
struct PackedRank {
  using Key = unsigned;
  using Pick = unsigned;
  static __device__ __forceinline__ Pick pick(Key key, int) { return key; }
  static __device__ __forceinline__ int column(Pick pick) { return 0xffff - static_cast<int>(pick & 0xffffu); }
  static __device__ __forceinline__ bool reaches(Key key, int, Pick last) { return key >= last; }
};

template <>
struct Rank<__nv_bfloat16> : PackedRank<__nv_bfloat16> {
  static __device__ __forceinline__ Key make(float value, int column) {
    // A bf16 is the upper half of a float; inverting a negative one leaves ones below, which are masked off.
    return (sortable_bits(value) & 0xffff0000u) + (kTurnOfUpperHalf | static_cast<unsigned>(0xffff - column));
  }
  static __device__ __forceinline__ float value(Pick pick) {
    const unsigned bits = (pick & 0xffff0000u) - kTurnOfUpperHalf;
    return __uint_as_float(bits & 0x80000000u ? bits ^ 0x80000000u : ~bits & 0xffff0000u);
  }
};

template <>
struct Rank<__half> : PackedRank<__half> {
  static __device__ __forceinline__ Key make(float value, int column) {
    unsigned bits = __half_as_ushort(__float2half_rn(value + 0.0f));  // exact: the value came from a half
    bits = bits & 0x8000u ? ~bits & 0xffffu : bits | 0x8000u;
    return (value != value ? 0u : bits << 16) | static_cast<unsigned>(0xffff - column);
  }
  static __device__ __forceinline__ float value(Pick pick) {
    const unsigned ordered = pick >> 16;
    if (ordered == 0) return not_a_number();
    const unsigned bits = ordered & 0x8000u ? ordered ^ 0x8000u : ~ordered & 0xffffu;
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  }
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

// The kKeep best of a row in descending order, in every lane: each lane sorts its own, keeps the best, and lanes merge.
// Places past kKeep are set to 0 on the way, so that the compiler drops the exchanges and shuffles that feed them only.
template <class Experts, int kKeep, int kList, typename Key>
__device__ __forceinline__ void merge_best(const Key (&keys)[Experts::kSlots], Key (&best)[kList]) {
  static_assert(kList == next_power_of_two(kKeep), "the networks are for powers of two");
#pragma unroll
  for (int first = 0; first < Experts::kSlots; first += kList) {
    Key run[kList];
#pragma unroll
    for (int i = 0; i < kList; ++i) run[i] = first + i < Experts::kSlots ? keys[first + i] : Key(0);
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
#pragma unroll
  for (int distance = 1; distance < Experts::kLanes; distance *= 2) {
    Key other[kList];
#pragma unroll
    for (int i = 0; i < kList; ++i) other[i] = i < kKeep ? __shfl_xor_sync(kAllLanes, best[i], distance) : Key(0);
    keep_largest(best, other);
#pragma unroll
    for (int i = kKeep; i < kList; ++i) best[i] = 0;
  }
}

// By rounds of maxima, each over the picks after the one before; nothing is marked or moved.
template <class R, class Experts, class Picks>
__device__ __forceinline__ void top_k_rounds(const typename R::Key (&keys)[Experts::kSlots], int lane,
                                             typename R::Pick (&picked)[Picks::kSlots], typename R::Pick& last) {
  using Pick = typename R::Pick;
  last = ~Pick(0);
#pragma unroll
  for (int p = 0; p < Picks::kSlots; ++p) {
    picked[p] = 0;
#pragma unroll 1
    for (int source = 0; source < Picks::kLanes; ++source) {
      if (Picks::column(p, source) >= Picks::kColumns) break;
      Pick best = 0;
#pragma unroll
      for (int i = 0; i < Experts::kSlots; ++i) {
        const Pick candidate = R::pick(keys[i], Experts::column(i, lane));
        if (candidate < last && candidate > best) best = candidate;
      }
      last = lanes_max_key<Experts::kLanes>(best);
      if (source == lane) picked[p] = last;
    }
  }
}

// By merging sorted lists of packed keys.
template <class R, class Experts, class Picks>
__device__ __forceinline__ void top_k_merge(const typename R::Key (&keys)[Experts::kSlots], int lane,
                                            typename R::Pick (&picked)[Picks::kSlots], typename R::Pick& last) {
  unsigned best[next_power_of_two(Picks::kColumns)];
  merge_best<Experts, Picks::kColumns>(keys, best);
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

// By merging sorted lists of bare values, which finds the k-th largest value; the elements that reach it are collected
// with their columns and sorted. If more than k reach it (a tie at the end), rounds decide.
// `shared_row` holds a row of keys and `shared_picks` kColumns picks, both the token's own.
template <class R, class Experts, class Picks>
__device__ __forceinline__ void top_k_collect(const unsigned (&keys)[Experts::kSlots], int lane,
                                              Wide (&picked)[Picks::kSlots], Wide& last, unsigned* shared_row,
                                              Wide* shared_picks) {
  static_assert(Experts::kSlots <= 32, "one bit a slot");
  unsigned best[next_power_of_two(Picks::kColumns)];
  merge_best<Experts, Picks::kColumns>(keys, best);
  const unsigned bound = best[Picks::kColumns - 1];

  __syncwarp();  // the picks of the token before have been read
  unsigned reaching = 0;
#pragma unroll
  for (int i = 0; i < Experts::kSlots; ++i) reaching |= (keys[i] >= bound ? 1u : 0u) << i;
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
    picked[p] = Picks::live(p, lane) ? shared_picks[Picks::column(p, lane)] : 0;
  }
  sort_over_lanes<Picks>(picked, lane);
  constexpr int kEnd = Picks::kColumns - 1;
  last = __shfl_sync(kAllLanes, picked[kEnd / Picks::kLanes], kEnd % Picks::kLanes, Picks::kLanes);
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
    shared_row[column] = R::pick(keys[i], column);
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
// divide the token's lanes. Every lane learns all scores and counts which are better than its own.
template <class Experts, int kGroups, int kKeep, int kBest>
__device__ __forceinline__ void group_limit_lanes(const float (&x)[Experts::kSlots], bool (&allowed)[Experts::kSlots],
                                                  int lane) {
  constexpr int kVec = Experts::kVec;
  constexpr int kSpan = Experts::kColumns / kGroups / kVec;        // lanes that share a group
  constexpr int kBeside = Experts::kLanes / kSpan;                 // groups side by side in one chunk of all lanes
  static_assert(kSpan * kVec * kGroups == Experts::kColumns && kSpan * kBeside == Experts::kLanes, "whole chunks");
  constexpr int kChunks = kGroups / kBeside;                       // those that are not all dead
  static_assert(kBeside * kChunks == kGroups, "no chunk is dead in some lanes only");

  unsigned scores[kGroups];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    unsigned best[kBest] = {};
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      unsigned key = ordered_bits(x[c * kVec + j]);
#pragma unroll
      for (int r = 0; r < kBest; ++r) order_descending(best[r], key);
    }
#pragma unroll
    for (int distance = 1; distance < kSpan; distance *= 2) {
      unsigned other[kBest];
#pragma unroll
      for (int r = 0; r < kBest; ++r) other[r] = __shfl_xor_sync(kAllLanes, best[r], distance);
      keep_largest(best, other);
    }
    const unsigned own = ordered_bits(sum_of_best<kBest>(best));
#pragma unroll
    for (int b = 0; b < kBeside; ++b) {
      scores[c * kBeside + b] = kBeside == 1 ? own : __shfl_sync(kAllLanes, own, b * kSpan, Experts::kLanes);
    }
  }

#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int group = c * kBeside + lane / kSpan;
    unsigned own = scores[c * kBeside];
#pragma unroll
    for (int b = 1; b < kBeside; ++b) own = lane / kSpan == b ? scores[c * kBeside + b] : own;
    int better = 0;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) better += scores[g] > own || (scores[g] == own && g < group) ? 1 : 0;
#pragma unroll
    for (int j = 0; j < kVec; ++j) allowed[c * kVec + j] = better < kKeep;
  }
#pragma unroll
  for (int i = kChunks * kVec; i < Experts::kSlots; ++i) allowed[i] = false;
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

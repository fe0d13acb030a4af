// Top-k and groups of rows that one warp or a whole block shares: for long rows, and for many picks.
//
// The contract is that of select.cuh. Whatever is counted or collected here with atomics comes out in any order, and is
// sorted afterwards: keys with their columns are distinct, so no result depends on that order.
#pragma once

#include "moesaic/select.cuh"

namespace moesaic {

// ----------------------------------------------------------------------------------------------------- radix select

constexpr int kDigits = 256;

// A team's shared words for a radix select: how often each digit occurs, from the largest digit down, and what a lane
// tells the others. The counts are zero between selections.
struct Digits {
  static constexpr int kFound = kDigits;       // the digit
  static constexpr int kWanted = kDigits + 1;  // how many of its elements are wanted
  static constexpr int kCount = kDigits + 2;   // how many it has
  static constexpr int kListed = kDigits + 3;  // elements collected so far
  static constexpr int kWords = kDigits + 4;
};

// Largest digit such that it and those above occur `wanted` times; the smallest that exists, if all together do not.
// The team's first warp adds up and clears the counts; `wanted` becomes how many of the digit's own are wanted.
template <int kLanes>
__device__ __forceinline__ unsigned find_digit(unsigned* digits, int lane, unsigned& wanted, unsigned& count) {
  constexpr int kOwn = kDigits / kWarp;
  team_sync<kLanes>();
  if (kLanes == kWarp || lane < kWarp) {
    unsigned counts[kOwn];
    unsigned own = 0;
#pragma unroll
    for (int i = 0; i < kOwn; i += 4) {
      uint4* const place = reinterpret_cast<uint4*>(digits + lane * kOwn + i);
      const uint4 four = *place;
      *place = uint4{};
      memcpy(&counts[i], &four, sizeof(four));
      own += (four.x + four.y) + (four.z + four.w);
    }
    unsigned through = own;  // becomes the count of all digits down to the last of this lane
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const unsigned other = __shfl_up_sync(kAllLanes, through, distance);
      if (lane >= distance) through += other;
    }
    unsigned left = wanted - (through - own);
    if (through - own < wanted && (wanted <= through || lane == kWarp - 1)) {
      int i = 0;
#pragma unroll
      for (int j = 0; j < kOwn - 1; ++j) {
        if (i == j && left > counts[j]) {
          left -= counts[j];
          ++i;
        }
      }
      unsigned at = counts[0];
#pragma unroll
      for (int j = 1; j < kOwn; ++j) at = i == j ? counts[j] : at;
      digits[Digits::kFound] = static_cast<unsigned>(kDigits - 1 - (lane * kOwn + i));
      digits[Digits::kWanted] = left;
      digits[Digits::kCount] = at;
    }
    if (lane == 0) digits[Digits::kListed] = 0;
  }
  team_sync<kLanes>();
  wanted = digits[Digits::kWanted];
  count = digits[Digits::kCount];
  return digits[Digits::kFound];
}

// The bits from `kTop` down to `kEnd` of the `wanted`-th largest of a team's keys, with zeros below; keys 0 do not
// count. `wanted` becomes how many are wanted of the `count` keys that have these bits.
template <int kLanes, int kTop, int kEnd, int kCount>
__device__ __forceinline__ unsigned radix_select(const unsigned (&keys)[kCount], unsigned* digits, int lane,
                                                 unsigned& wanted, unsigned& count) {
  unsigned found = 0;
  unsigned known = 0;  // which bits of `found` are
#pragma unroll 1
  for (int shift = kTop - 8; shift >= kEnd; shift -= 8) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (keys[i] != 0 && ((keys[i] ^ found) & known) == 0) atomicAdd(&digits[(~keys[i] >> shift) % kDigits], 1u);
    }
    found |= find_digit<kLanes>(digits, lane, wanted, count) << shift;
    known |= static_cast<unsigned>(kDigits - 1) << shift;
  }
  return found;
}

// Writes the picks of a lane's slots for which `takes(slot)` holds to the team's list, as far as it is long enough.
// Gives how many the whole team has.
template <class R, class Experts, class Takes>
__device__ __forceinline__ unsigned list_picks(const typename R::Key (&keys)[Experts::kSlots], int lane, Takes takes,
                                               typename R::Pick* list, int length, unsigned* digits) {
  int own = 0;
#pragma unroll
  for (int i = 0; i < Experts::kSlots; ++i) own += takes(i) ? 1 : 0;
  if (own > 0) {
    int place = static_cast<int>(atomicAdd(&digits[Digits::kListed], static_cast<unsigned>(own)));
    if (place + own <= length) {
#pragma unroll
      for (int i = 0; i < Experts::kSlots; ++i) {
        if (takes(i)) list[place++] = R::pick(keys[i], Experts::column(i, lane));
      }
    }
  }
  team_sync<Experts::kLanes>();
  return digits[Digits::kListed];
}

// A list of few is put in order by counting, for each, how many come before it. It ends with zeros, and so will `sorted`.
template <int kLanes, typename Pick>
__device__ __forceinline__ void rank_shared(const Pick* list, Pick* sorted, int count, int lane) {
  constexpr int kWide = 16 / sizeof(Pick);  // read in words of 16 bytes
#pragma unroll 1
  for (int own = lane; own < count; own += kLanes) {
    const Pick pick = list[own];
    int before = 0;
#pragma unroll 2
    for (int first = 0; first < count; first += kWide) {
      const uint4 word = *reinterpret_cast<const uint4*>(list + first);
      Pick others[kWide];
      memcpy(others, &word, sizeof(others));
#pragma unroll
      for (int j = 0; j < kWide; ++j) before += others[j] > pick ? 1 : 0;
    }
    sorted[before] = pick;
  }
  team_sync<kLanes>();
}

// By a bound on the k-th largest key; what reaches it is listed and sorted.
//
// The bound comes from the maxima of kRuns equal parts of each lane's slots: at least k elements reach the k-th largest of
// those maxima, and mostly few more. If more reach it than the list holds, or if every slot is a part of its own, the last
// pick itself is looked for: by its value, then by its column, where elements with that value have to be left out.
//
// `digits` are Digits::kWords words, zero at first; `list` holds kList picks, twice as many where kCounted: those lists
// are put in order by counting. Both are the token's own. kLanes is 32 or more.
template <class R, class Experts, class Picks, int kRuns, int kList, bool kCounted>
__device__ __forceinline__ void top_k_radix(const typename R::Key (&keys)[Experts::kSlots], int lane,
                                            typename R::Pick (&picked)[Picks::kSlots], typename R::Pick& last,
                                            unsigned* digits, typename R::Pick* list) {
  using Pick = typename R::Pick;
  constexpr int kLanes = Experts::kLanes;
  constexpr int kWanted = Picks::kColumns;
  static_assert(kLanes >= kWarp && Experts::kSlots % kRuns == 0, "a warp or more; parts are equal");
  const auto clear = [&](Pick* picks, int length) {
    for (int i = lane; kCounted && i < length; i += kLanes) picks[i] = 0;
  };
  unsigned listed = ~0u;
  unsigned wanted, count;
  team_sync<kLanes>();  // the picks of the token before have been read
  clear(list, 2 * kList);
  if constexpr (kRuns < Experts::kSlots) {
    constexpr int kRun = Experts::kSlots / kRuns;
    unsigned largest[kRuns];
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      largest[r] = keys[r * kRun];
#pragma unroll
      for (int i = 1; i < kRun; ++i) largest[r] = max(largest[r], keys[r * kRun + i]);
    }
    wanted = kWanted;
    const unsigned bound = max(radix_select<kLanes, 32, 16>(largest, digits, lane, wanted, count), 1u);
    listed = list_picks<R, Experts>(keys, lane, [&](int i) { return keys[i] >= bound; }, list, kList, digits);
  }
  if (listed > kList) {
    clear(list, kList);
    wanted = kWanted;
    const unsigned bound = radix_select<kLanes, 32, 0>(keys, digits, lane, wanted, count);
    int last_column = Experts::kColumns;
    if constexpr (sizeof(Pick) > sizeof(keys[0])) {  // else keys hold their columns, and are distinct
      if (count > wanted) {
        unsigned ties[Experts::kSlots];
#pragma unroll
        for (int i = 0; i < Experts::kSlots; ++i) {
          ties[i] = keys[i] == bound ? 0xffffu - static_cast<unsigned>(Experts::column(i, lane)) : 0;
        }
        last_column = 0xffff - static_cast<int>(radix_select<kLanes, 16, 0>(ties, digits, lane, wanted, count));
      }
    }
    const auto takes = [&](int i) {
      return keys[i] != 0 && (keys[i] > bound || (keys[i] == bound && Experts::column(i, lane) <= last_column));
    };
    listed = list_picks<R, Experts>(keys, lane, takes, list, kList, digits);
  }
  const int length = static_cast<int>(listed);
  const Pick* sorted = list;
  if constexpr (kCounted) {
    rank_shared<kLanes>(list, list + kList, length, lane);
    sorted = list + kList;
  } else {
    for (int i = length + lane; i < kList; i += kLanes) list[i] = 0;
    team_sync<kLanes>();
    sort_shared<kLanes>(list, kList, lane);
  }
#pragma unroll
  for (int p = 0; p < Picks::kSlots; ++p) {
    picked[p] = Picks::live(p, lane) ? sorted[Picks::column(p, lane)] : Pick(0);
  }
  last = sorted[kWanted - 1];
}

// ---------------------------------------------------------------------------------------------------------- groups

// Which of a lane's experts lie in the kKeep best of kGroups groups, as group_limit_shared says: for a row that a block
// shares. A warp scores whole groups. `shared_row` holds kColumns words, `shared_scores` kGroups.
template <class Experts, int kGroups, int kKeep, int kBest>
__device__ __forceinline__ void group_limit_block(const float (&x)[Experts::kSlots], bool (&allowed)[Experts::kSlots],
                                                  unsigned* shared_row, unsigned* shared_scores, int lane) {
  constexpr int kLanes = Experts::kLanes;
  constexpr int kSize = Experts::kColumns / kGroups;
  unsigned ordered[Experts::kSlots];
#pragma unroll
  for (int i = 0; i < Experts::kSlots; ++i) ordered[i] = ordered_bits(x[i]);
  team_sync<kLanes>();
  to_shared<Experts>(ordered, shared_row, lane);
  team_sync<kLanes>();

  const int place = lane % kWarp;
#pragma unroll 1
  for (int group = lane / kWarp; group < kGroups; group += kLanes / kWarp) {
    const unsigned* members = shared_row + group * kSize;
    float score = 0.0f;
    // The kBest best, one after another, each over what comes after the one before.
    Wide bound = ~Wide(0);
#pragma unroll 1
    for (int r = 0; r < kBest; ++r) {
      Wide next = 0;
#pragma unroll 1
      for (int j = place; j < kSize; j += kWarp) {
        const Wide key = Rank<float>::pick(members[j], j);
        if (key < bound && key > next) next = key;
      }
      bound = lanes_max_key<kWarp>(next);
      score = r == 0 ? Rank<float>::value(bound) : score + Rank<float>::value(bound);
    }
    if (place == 0) shared_scores[group] = ordered_bits(score);
  }
  team_sync<kLanes>();

  // A group is kept if fewer than kKeep come before it. The row's first words become the flags.
  for (int group = lane; group < kGroups; group += kLanes) {
    const unsigned own = shared_scores[group];
    int better = 0;
    for (int other = 0; other < kGroups; ++other) {
      const unsigned score = shared_scores[other];
      better += score > own || (score == own && other < group) ? 1 : 0;
    }
    shared_row[group] = better < kKeep ? 1u : 0u;
  }
  team_sync<kLanes>();
#pragma unroll
  for (int i = 0; i < Experts::kSlots; ++i) {
    allowed[i] = Experts::live(i, lane) && shared_row[Experts::column(i, lane) / kSize] != 0;
  }
}

}  // namespace moesaic

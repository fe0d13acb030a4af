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

// Takes `own` places in the team's list of picks; gives the first.
__device__ __forceinline__ unsigned take_places(unsigned* digits, unsigned own) {
  return own == 0 ? 0 : atomicAdd(&digits[Digits::kListed], own);
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
      unsigned ahead = 0;  // a bit each: cheaper than adding them up one by one
#pragma unroll
      for (int j = 0; j < kWide; ++j) ahead |= (others[j] > pick ? 1u : 0u) << j;
      before += __popc(ahead);
    }
    sorted[before] = pick;
  }
  team_sync<kLanes>();
}

// What is picked for sure, in the list: by the last pick's key, then by its column, where elements with that key have to
// be left out. `members` gets a bit for each of a lane's slots that is picked. Gives how many are, which is k unless
// fewer may be picked.
template <class R, class Experts>
__device__ __forceinline__ unsigned list_exactly(const unsigned (&keys)[Experts::kSlots], int lane, unsigned k,
                                                 unsigned* digits, typename R::Pick* list, unsigned& members) {
  constexpr int kLanes = Experts::kLanes;
  const unsigned offset = R::template offset<Experts>(lane);
  unsigned ranked[Experts::kSlots];
#pragma unroll
  for (int i = 0; i < Experts::kSlots; ++i) ranked[i] = keys[i] == 0 ? 0 : keys[i] + offset;
  unsigned count;
  const unsigned bound = radix_select<kLanes, 32, 0>(ranked, digits, lane, k, count);
  int last_column = Experts::kColumns;
  if constexpr (sizeof(typename R::Pick) > sizeof(unsigned)) {  // else keys hold their columns, and are distinct
    if (count > k) {
      unsigned ties[Experts::kSlots];
#pragma unroll
      for (int i = 0; i < Experts::kSlots; ++i) {
        ties[i] = ranked[i] == bound ? 0xffffu - static_cast<unsigned>(Experts::column(i, lane)) : 0;
      }
      last_column = 0xffff - static_cast<int>(radix_select<kLanes, 16, 0>(ties, digits, lane, k, count));
    }
  }
  members = 0;
#pragma unroll
  for (int i = 0; i < Experts::kSlots; ++i) {
    const bool ahead = ranked[i] > bound || (ranked[i] == bound && Experts::column(i, lane) <= last_column);
    members |= (ahead && ranked[i] != 0 ? 1u : 0u) << i;
  }
  unsigned place = take_places(digits, __popc(members));
#pragma unroll
  for (int i = 0; i < Experts::kSlots; ++i) {
    if (members >> i & 1u) list[place++] = R::pick(ranked[i], Experts::column(i, lane));
  }
  team_sync<kLanes>();
  return digits[Digits::kListed];
}

// By a bound on the k-th largest key; what reaches it is listed and sorted.
//
// The bound comes from the maxima of kParts equal parts of each lane's slots: at least k elements reach the k-th largest
// of those maxima, and mostly few more. If more reach it than the list holds, or fewer than k (elements that may not be
// picked), or if every slot is a part of its own, the picks are found by the digits of all keys.
//
// `members` gets a bit for each of a lane's slots that is picked. `digits` are Digits::kWords words, zero at first; `list`
// holds kPlaces picks, twice as many where kCounted: those lists are put in order by counting; `shared_row` holds kColumns
// keys, unless every slot is a part. All are the token's own.
template <class R, class Experts, class Picks, int kParts, int kPlaces, bool kCounted>
__device__ __forceinline__ void top_k_radix(const unsigned (&keys)[Experts::kSlots], int lane,
                                            typename R::Pick (&picked)[Picks::kSlots], unsigned& members,
                                            unsigned* digits, typename R::Pick* list, unsigned* shared_row) {
  using Pick = typename R::Pick;
  constexpr int kLanes = Experts::kLanes;
  constexpr int kPart = Experts::kSlots / kParts;
  static_assert(kLanes >= kWarp && Experts::kSlots % kParts == 0, "a warp or more; parts are equal");
  const unsigned offset = R::template offset<Experts>(lane);
  const auto clear = [&](int length) {
    for (int i = lane; kCounted && i < length; i += kLanes) list[i] = 0;
  };
  // A register cannot be indexed by a number known only at run time; shared memory can.
  const auto of_slot = [&](int slot) {
    const int column = Experts::column(slot, lane);
    return R::pick(shared_row[column] + offset, column);
  };
  unsigned listed = 0;
  unsigned first = 0;  // of this lane's places in the list
  unsigned reaching = 0;
  team_sync<kLanes>();  // the picks of the token before have been read
  clear(2 * kPlaces);
  if constexpr (kPart > 1) {
    unsigned largest[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      largest[part] = 0;
#pragma unroll
      for (int i = part * kPart; i < (part + 1) * kPart; ++i) {
        largest[part] = keys[i] > largest[part] ? keys[i] : largest[part];
      }
    }
    unsigned bound;
    if constexpr (kLanes == kWarp && kParts == 1) {
      // One key a lane: sorting them takes fewer instructions than counting digits.
      largest[0] += offset;
      sort_over_lanes<Row<kWarp, kWarp, 1>>(largest, lane);
      bound = __shfl_sync(kAllLanes, largest[0], Picks::kColumns - 1);
      if (lane == 0) digits[Digits::kListed] = 0;
      team_sync<kLanes>();
    } else {
      unsigned k = Picks::kColumns;
      unsigned count;
      bound = radix_select<kLanes, 32, 16>(largest, digits, lane, k, count);  // offsets do not reach these digits
    }
    bound = bound > R::kSmallest ? bound : R::kSmallest;  // where too few can be picked
    reaching = slots_from<Experts>(keys, bound - offset);
    to_shared<Experts>(keys, shared_row, lane);
    const unsigned own = __popc(reaching);
    first = take_places(digits, own);
    if (first + own <= kPlaces) {
      unsigned place = first;
      for (unsigned left = reaching; left != 0; left &= left - 1) {
        list[place++] = of_slot(__ffs(static_cast<int>(left)) - 1);
      }
    }
    team_sync<kLanes>();
    listed = digits[Digits::kListed];
  }
  const bool bounded = listed >= Picks::kColumns && listed <= kPlaces;
  if (!bounded) {
    if (kPart > 1) clear(kPlaces);
    listed = list_exactly<R, Experts>(keys, lane, Picks::kColumns, digits, list, members);
  }
  const Pick* sorted = list;
  if constexpr (kCounted) {
    rank_shared<kLanes>(list, list + kPlaces, static_cast<int>(listed), lane);
    sorted = list + kPlaces;
  } else {
    for (int i = static_cast<int>(listed) + lane; i < kPlaces; i += kLanes) list[i] = 0;
    team_sync<kLanes>();
    sort_shared<kLanes>(list, kPlaces, lane);
  }
#pragma unroll
  for (int p = 0; p < Picks::kSlots; ++p) {
    picked[p] = Picks::live(p, lane) ? sorted[Picks::column(p, lane)] : Pick(0);
  }
  if (bounded) {
    const Pick last = sorted[Picks::kColumns - 1];
    members = reaching;
    for (unsigned left = reaching; left != 0; left &= left - 1) {
      const Pick pick = kCounted ? list[first++] : of_slot(__ffs(static_cast<int>(left)) - 1);
      if (pick < last) members &= ~(left & (0u - left));
    }
  }
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

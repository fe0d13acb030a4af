"""How a top-k picks: the ways that ``select.cuh`` and ``select_block.cuh`` have, and what they cost."""

from __future__ import annotations

import functools
import math as python_math
from collections.abc import Iterator
from dataclasses import dataclass

from moesaic.ir.core import Block, BlockArgument
from moesaic.ir.ops import row
from moesaic.ir.types import DType

WARP = 32
"""Lanes of a warp."""

DIGIT_WORDS = 260
"""Words of shared memory in which a team counts digits (``Digits`` of select_block.cuh)."""

_RARE_MISS = {"dense": 1 / 256, "compact": 1 / 1024}  # of warps, that select again: few tokens are hundreds of warps
_AGAIN = 2.0  # what selecting again costs, of its instructions
_LISTED_PICKS = 8  # so few are always merged from lists or found by rounds
_LISTED_EXPERTS = 512  # rows so short are, where ranks are wide
_MERGED_PICKS = 16  # so few are, unless ranks are wide and the row is long
_SORTED_EXPERTS = 128  # rows so short are sorted for many picks
_SCANNED_EXPERTS = 256  # rows so short are scanned for more than are merged
_SCANNED_EXPERTS_OF_WIDE_RANKS = 128
_MAXIMA_A_PICK = 2  # then 1.4 elements a pick, or fewer, reach the bound
BOUNDED_PICKS = 256
"""By radix, more are found from all of the keys."""
_SCANNED_PICKS = 32  # at most, by rounds
_LISTED = 64  # places for picks by radix, at least
_COUNTED = 128  # so long a list is put in order by counting


def power_of_two(n: int) -> int:
    """The smallest that is not below n."""
    return 1 << (n - 1).bit_length()


def padded_columns(experts: int, vec: int, lanes: int) -> int:
    """Slots of all lanes of a row together."""
    return -(-power_of_two(-(-experts // vec)) // lanes) * lanes * vec


def is_packed(op: row.TopK) -> bool:
    """Whether what is ranked has 16 bits, so that value and column share a word."""
    return isinstance(op.x, BlockArgument) and op.x.type.dtype in (DType.BF16, DType.F16)


def groups_in_lanes(op: row.GroupLimit, experts: int, vec: int, lanes: int) -> bool:
    """Whether neighbouring lanes hold a group in whole chunks, so that scoring needs no shared memory."""
    size = experts // op.groups
    span = size // vec
    whole = size % vec == 0 and span > 0 and span & (span - 1) == 0 and lanes % span == 0
    return whole and experts % (vec * lanes) == 0 and op.best in (1, 2, 4) and op.best <= size and op.groups <= 32


def is_by_radix(op: row.TopK, experts: int) -> bool:
    """Whether a warp had better pick by radix than in any other way."""
    packed = is_packed(op)
    if op.k > _SCANNED_PICKS:
        longest = _SORTED_EXPERTS
    elif op.k > _MERGED_PICKS:
        longest = _SCANNED_EXPERTS if packed else _SCANNED_EXPERTS_OF_WIDE_RANKS
    elif packed or op.k <= _LISTED_PICKS:  # lists of 16-bit keys take fewer instructions
        return False
    else:
        longest = _LISTED_EXPERTS
    return experts > longest and 2 * op.k <= experts


@dataclass(frozen=True)
class RadixShape:
    """How a top-k by radix finds its bound, and the list of what reaches it (``top_k_radix`` of select_block.cuh).

    Attributes:
        parts: equal parts of a lane's slots, whose maxima give the bound.
        places: picks that the list holds; a power of two.
        counted: whether the list is put in order by counting, into a second one.
        bounded: whether there is a bound at all; with as many parts as slots the picks are found from all of the keys.
    """

    parts: int
    places: int
    counted: bool
    bounded: bool

    @property
    def length(self) -> int:
        """Picks that both lists hold."""
        return self.places * (2 if self.counted else 1)

    @classmethod
    def of(cls, op: row.TopK, experts: int, vec: int, lanes: int) -> RadixShape:
        slots = padded_columns(experts, vec, lanes) // lanes
        parts = 1 if op.k <= BOUNDED_PICKS else slots
        while parts < slots:
            firsts = range(0, slots, slots // parts)  # slots that parts begin with, in all lanes or some
            live = [-(-(experts - i % vec - i // vec * vec * lanes) // vec) for i in firsts]
            if sum(min(max(0, n), lanes) for n in live) >= _MAXIMA_A_PICK * op.k:
                break
            parts *= 2
        bounded = parts < slots
        places = max(_LISTED, power_of_two(2 * op.k if bounded else op.k))
        return cls(parts, places, places <= _COUNTED, bounded)


def way_to_select(op: row.TopK, experts: int, slots: int, lanes: int, listed: int) -> tuple[str, int]:
    """The cheapest way to select by an estimate of instructions a lane, and how many of its values a lane lists for
    merging: `listed`, unless that is 0. Most picks of all sort the row in shared memory."""
    picks = op.k
    full = power_of_two(picks)
    if lanes > WARP:
        return ("rounds" if picks <= 2 else "radix" if 2 * picks <= experts else "sort"), full
    packed = is_packed(op)
    steps = lanes.bit_length() - 1
    lengths = [n for n in (1, 2, 4, 8, 16, 32) if n <= full <= n * lanes and picks <= _SCANNED_PICKS]
    costs = {n: merging_instructions(n, picks, slots, lanes) for n in lengths}
    best = listed or min(costs, key=lambda n: (costs[n], n), default=full)
    if lanes == WARP and is_by_radix(op, experts):
        return "radix", best
    if picks > _SCANNED_PICKS:
        return "sort", best
    merge = costs.get(best, 0.0) + (0 if packed else 4 * slots + 80)
    rounds = picks * ((4 if packed else 7) * slots + (4 if packed else 10) * steps)
    return ("merge" if full <= 16 and merge <= rounds else "rounds"), best


@functools.cache
def merging_instructions(listed: int, picks: int, slots: int, lanes: int) -> float:
    """Instructions of a lane that lists its best values and merges lists with the other lanes, shuffles included.

    A list shorter than the picks may miss some; then the warp selects again from full lists, while others wait for it.
    How often, for picks that fall on lanes as they like, is bounded by the sum over the lanes of its tokens.
    """
    full = power_of_two(picks)
    runs = -(-slots // listed)
    depth = listed.bit_length() - 1
    exchanges = (depth * depth - depth + 4) * listed // 4 - 1 if depth else 0  # Batcher's odd-even merge sort
    cost = 2.0 * runs * exchanges + (runs - 1) * listed * (1 + depth)
    for own, strides, doubled in _merges(listed, picks, lanes):
        cost += own * (2 + (1 if doubled else 0) + 3 * strides + own.bit_length() - 1)
    missed = merging_misses(listed, picks, lanes)
    return cost + _AGAIN * missed * merging_instructions(full, picks, slots, lanes) if missed else cost


@functools.cache
def merging_misses(listed: int, picks: int, lanes: int) -> float:
    """How likely a warp is, at most, to select again from full lists, for picks that fall on lanes as they like."""
    share = 1 / lanes
    missed = sum(
        python_math.comb(picks, n) * share**n * (1 - share) ** (picks - n) for n in range(listed + 1, picks + 1)
    )
    return min(1.0, WARP * missed)


def never_missing(region: Block, op: row.TopK, listed: int, lanes: int, dense: bool) -> int:
    """The length of lists, from `listed` on, with which few tokens hardly ever wait for a warp that selects again: a
    short call ends with its slowest warp. Lists as long as the picks never miss one; beside dense results nothing
    between pays. Picks of a router with groups fall on the lanes of the groups that are kept."""
    for limit in (o for o in region.ops if isinstance(o, row.GroupLimit)):
        lanes = max(1, lanes * limit.keep // limit.groups)
    full = power_of_two(op.k)
    while listed < full and merging_misses(listed, op.k, lanes) > _RARE_MISS["dense" if dense else "compact"]:
        listed = full if dense else 2 * listed
    return listed


def merging_shuffles(listed: int, picks: int, lanes: int) -> int:
    """Shuffles among those, where no list is too short."""
    return sum(own * (1 + strides) for own, strides, _ in _merges(listed, picks, lanes)) + 2


def _merges(listed: int, picks: int, lanes: int) -> Iterator[tuple[int, int, bool]]:
    """Each step that merges the lists of two groups of lanes: values a lane holds after it, strides over lanes, and
    whether the lists double; ``Ranks`` in ``select.cuh`` says how."""
    full, own, group = power_of_two(picks), listed, 1
    while group < lanes:
        doubled = own * group < full
        own = own if doubled else max(1, own // 2)
        group *= 2
        yield own, min(group, full // own).bit_length() - 1 - (1 if doubled else 0), doubled

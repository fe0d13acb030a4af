"""The rule for row programs: how many lanes share a token, how they pick, and how large blocks are.

What was measured is in ``docs/tuning.md``; the numbers below follow from it.
"""

from __future__ import annotations

import math as python_math
from collections.abc import Mapping
from typing import Protocol

from moesaic.ir.core import Block, BlockArgument, Value, columns_of
from moesaic.ir.errors import InternalError, UnsupportedError, UsageError
from moesaic.ir.ops import col, math, row
from moesaic.ir.ops.kernel import finish_in, segments_of
from moesaic.ir.ops.launch import Kernel
from moesaic.passes.clusters import MOST_BLOCKS
from moesaic.passes.row_layout import Layout, experts_columns, infer_layouts, sparse_results
from moesaic.passes.selection_shape import (
    BOUNDED_PICKS,
    DIGIT_WORDS,
    WARP,
    RadixShape,
    groups_in_lanes,
    is_by_radix,
    is_packed,
    never_missing,
    padded_columns,
    power_of_two,
    way_to_select,
)

MAX_EXPERTS = 16384
"""Longest row that fits the registers of one block."""

_SHARED_LIMIT = 48 * 1024  # static shared memory of a block, on every target
_LANES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_WARP_EXPERTS = 1024  # longer rows are spread over a block
# Values of a row a lane should hold: many, since fewer lanes then talk, as far as registers allow. Ranking float32
# scores beside dense results takes more registers. Few tokens need more lanes to fill a GPU. So do short rows where
# [T, E] is read or written: a warp's lanes would be at too many rows at once for the memory.
_SLOTS = 32
_SLOTS_OF_SHORT_ROWS = 16
_SLOTS_OF_FEW = {"short": 8, "long": 16}
_SHORT_ROW = {"few": 32, "many": 64}
_NARROW_RANKS = 128  # columns; shorter rows of float32 ranks leave too few lanes busy
# More are too many for few tokens, as long as they leave a lane no more than `_SLOTS`. 16-bit ranks are short work.
_LANES_OF_FEW = {"packed": 8, "other": 16}
_BLOCK_SLOTS = {"few": 16, "many": 24}  # live ones; registers for 24 leave room for 20 warps or so
_BLOCK_LANES = (64, 512)  # twice as many leave 64 registers a thread, too few for 16 slots
_USUAL_LANES = 128  # of a block
_LONG_ROW_OF_FEW = 256  # columns from which on a block of few tokens has more threads; half as many where it is compact
_UNEVEN = range(256, 512)  # columns of a dense row: few tokens are two blocks a multiprocessor, which has room for more
_TOKENS_OF_UNEVEN = 32  # of a block, at least, where few tokens are a block for each multiprocessor
_LONG_ROW = 512  # columns: longer ones have few lanes to spare
_PICKS_A_LANE = 8  # many picks need registers of their own
_RESIDENT_WITH_GROUPS = 4  # blocks a multiprocessor; without the bound, registers leave it half empty
_GROUPED_EXPERTS = 256  # longer rows spill under that bound
_RESIDENT_LANES = 768  # the same for blocks that select by radix
_RESIDENT_LANES_WITH_SUMS = 1024  # in shared memory
_RESIDENT_LANES_OF_CROWDED = 512  # with ranks of float32, or with sums in registers
_RESIDENT_LANES_OF_GRADIENT = 896  # of a loss: it reads a row for all tokens, and keeps it
_BOUNDED_SLOTS = 18  # of a lane, at most: more do not fit these registers
_RESIDENT_WITH_SUMS = 4  # blocks of 128 threads that sum: what a fourth hides is worth more
_RESIDENT_WHERE_COMPACT = 8  # a kernel that only selects waits for what it loads: more warps hide more of that
# The same for gradients, by columns; others gain nothing by it, or spill. By whether it is a loss's, too, what makes
# scores, whether it reads picks in place of a second row, and whether it goes back through others, such as a cap.
_RESIDENT_OF_GRADIENT: dict[tuple[bool, type, bool, bool], dict[range, int]] = {
    (False, row.Max, True, False): {range(256, 897): 5},
    (True, row.Max, True, False): {range(64, 65): 8, range(256, 897): 5},
    (True, row.Max, True, True): {range(256, 897): 4},
    (True, row.Max, False, False): {range(256, 897): 4},
    (True, math.Sigmoid, True, False): {range(64, 65): 7, range(128, 897): 5},
    (True, math.Sigmoid, False, False): {range(128, 897): 4},
}
_SUMMED_SLOTS = 16  # from so many on, a lane of a warp keeps its sums in shared memory, if registers are scarce
_LARGE_BLOCKS = range(256, 1024)  # columns of a dense row: fewer have registers to spare, more have not enough
_LARGEST_BLOCK = 512  # threads
_TOKENS_OF_LARGE_BLOCKS = 64  # at a time: of more, what is not many times as many tokens keeps few blocks busy
_LANES_BY_WARPS = 8  # of a token, at least, where warps go through the tokens on their own
_SUMMING_BLOCK = 256  # threads, at least: a partial row each
_USUAL_THREADS = 128
_THREADS_OF_FEW = 64
_TOKENS_OF_CLUSTER = 256  # at a time: as many as the smallest bucket of T has, where blocks can be as large as that
_PREFETCH_EXPERTS = range(128, 4097)  # shorter rows leave enough loads in flight as it is, longer ones no registers
_PREFETCH_WITH_LOSS = range(64, 4097)


class Options(Protocol):
    """What options of ``specialize`` decide in the rule's place; 0 or empty: the rule does."""

    @property
    def target(self) -> str: ...

    @property
    def tokens(self) -> str: ...

    @property
    def lanes(self) -> int: ...

    @property
    def threads(self) -> int: ...

    @property
    def select(self) -> str: ...

    @property
    def listed(self) -> int: ...

    @property
    def prefetch(self) -> str: ...

    @property
    def resident(self) -> int: ...


def row_config(
    op: Kernel, options: Options, aligned: Mapping[Value, int], layouts: dict[Value, Layout] | None = None
) -> dict[str, str]:
    """The configuration of a row program.

    Args:
        op: the kernel.
        options: what is decided already.
        aligned: bytes that inputs are known to be aligned to.
        layouts: of the region's values, where they are known already.

    Raises:
        UnsupportedError: the row is too long, or does not fit lanes or lists that were asked for.
        UsageError: what was asked for does not go together.
    """
    if op.region is None:
        raise InternalError(f"{op.symbol}: a row program without a region")
    rule = _Rule(op.region, options, infer_layouts(op.region) if layouts is None else layouts)
    alignment = (aligned.get(v, _row_alignment(v)) for v in op.operands[: op.reads])
    return {**rule.config(), "alignment": ",".join(map(str, alignment))}


class _Rule:
    """The choices for one region.

    Attributes:
        experts, picks: columns of rows over experts, and of rows over picks.
        vec, slots: neighbouring columns that a lane holds, and columns of all lanes, in use or not.
        few: whether few tokens are there.
        dense: whether [T, E] is written.
        wide: whether ranks have 32 bits.
        packed: whether lanes of a warp pick by 16-bit ranks, from all experts.
        cluster: blocks of the cluster that has all tokens and finishes sums over them; 0 where there is none.
        lanes, block: that share a token; whether these are a whole block.
    """

    def __init__(self, region: Block, options: Options, layouts: dict[Value, Layout]) -> None:
        self.region = region
        self.options = options
        self.layouts = layouts
        self.experts = experts_columns(layouts)
        if self.experts > MAX_EXPERTS:
            raise UnsupportedError(
                f"rows of {self.experts} experts: a row program holds up to {MAX_EXPERTS} in registers"
            )
        self.picks = max((x.columns for x in layouts.values() if x.kind == "picks"), default=1)
        self.vec = _vector(self.experts, region, layouts)
        self.slots = power_of_two(-(-self.experts // self.vec)) * self.vec
        self.few = options.tokens != "many"
        self.selections = [o for o in region.ops if isinstance(o, row.TopK)]
        self.limits = [o for o in region.ops if isinstance(o, row.GroupLimit)]
        self.columns = [o for o in region.ops if isinstance(o, col.ColumnReduction)]
        self.sums = [o for o in self.columns if isinstance(o, col.Sum)]
        self.rows = [a for a in region.arguments if layouts[a].kind == "experts"]
        self.dense = any(layouts[v].kind == "experts" for v in region.terminator.operands if v in layouts)
        self.wide = any(not is_packed(o) for o in self.selections)
        # With groups scored across lanes, 16-bit logits leave registers for long rows in few lanes even so.
        few_lanes = max(1, self.slots // _SLOTS)
        self.grouped = _width(region, layouts) == 2 and any(
            groups_in_lanes(o, self.experts, self.vec, few_lanes) for o in self.limits
        )
        self.cluster = MOST_BLOCKS if finish_in(region) is not None else 0
        self.lanes = self._lanes()
        self.block = self.lanes > WARP
        if self.cluster and self.block:
            raise UsageError(
                f"specialize: {self.lanes} lanes that share a token are a whole block; in a cluster that finishes sums "
                f"over tokens it is up to {WARP}"
            )
        self.packed = bool(self.selections) and not (self.wide or self.limits or self.block)

    def config(self) -> dict[str, str]:
        """The configuration, all but the alignment."""
        select = self._select()
        threads, memory = self._threads(select)
        prefetch = self.options.prefetch or ("on" if self._prefetches() else "off")
        in_turn = bool(self.columns) or bool(segments_of(self.region)) or prefetch == "on" or self._reads_for_all
        return {
            "lanes": str(self.lanes),
            "vec": str(self.vec),
            "threads": str(threads),
            "grid": "fixed" if self.cluster else "persistent" if in_turn else "cover",
            **({"cluster": str(self.cluster)} if self.cluster else {}),
            "prefetch": prefetch,
            "resident": str(self.options.resident or self._resident(threads, select, "sums" in memory)),
            **({"rounds": "warps"} if in_turn and self._goes_by_warps(threads) else {}),
            **({"next": "late"} if self._shares_out_badly(threads) else {}),
            **select,
            **memory,
        }

    # ---------------------------------------------------------------------------------------------- lanes, picking

    def _lanes(self) -> int:
        lanes = self.options.lanes or self._usual_lanes()
        if lanes not in _LANES:
            raise UsageError(f"specialize: lanes must be a power of two, at most {_LANES[-1]}, found {lanes}")
        if self.slots // lanes > 32:  # membership packs one bit a slot into a word
            raise UnsupportedError(f"specialize: {lanes} lanes cannot hold a row of {self.experts} experts")
        return lanes

    def _usual_lanes(self) -> int:
        if self.experts > _WARP_EXPERTS:
            lanes, most = _BLOCK_LANES
            wanted = _BLOCK_SLOTS["few" if self.few else "many"]
            while lanes < most and -(-self.experts // (self.vec * lanes)) * self.vec > wanted:
                lanes *= 2
            return lanes
        if any(is_by_radix(o, self.experts) for o in self.selections):
            return WARP
        for_picks = power_of_two(self.picks) // _PICKS_A_LANE
        lanes = min(WARP, self.slots // self.vec, max(1, self.slots // self._slots_of_lane(), for_picks))
        if self.few:
            most = _LANES_OF_FEW["packed" if self.selections and not self.wide else "other"]
            lanes = min(lanes, max(most, self.slots // _SLOTS, for_picks))
        return lanes

    @property
    def _reads_for_all(self) -> bool:
        """Whether a block that shares a token reads a row that all tokens have in common, as gradients of losses do:
        for each token anew that would be half as much again as what it reads of its own."""
        return self.block and not self.selections and any(x.kind == "vector" for x in self._of_arguments)

    @property
    def _of_arguments(self) -> list[Layout]:
        return [self.layouts[a] for a in self.region.arguments]

    @property
    def _live_slots(self) -> int:
        """How many values of a row a lane holds, but for a whole row's dead ones."""
        return -(-self.experts // (self.vec * self.lanes)) * self.vec

    def _slots_of_lane(self) -> int:
        """How many values of a row a lane should hold."""
        short = self.slots <= _SHORT_ROW["few" if self.few else "many"]
        if self.few:
            return _SLOTS_OF_FEW["short" if short else "long"]
        wide = self.wide and not self.grouped
        crowded = short or wide if self.dense else wide and self.slots < _NARROW_RANKS
        return _SLOTS_OF_SHORT_ROWS if crowded else _SLOTS

    def _select(self) -> dict[str, str]:
        """How picks are found, and groups scored."""
        chosen: dict[str, str] = {}
        if self.selections:  # one way for all: what suits the most picks
            most = max(self.selections, key=lambda o: o.k)
            if 0 < self.options.listed * self.lanes < most.k:
                raise UnsupportedError(
                    f"specialize: lists of {self.options.listed} in {self.lanes} lanes cannot hold {most.k} picks; "
                    "list more"
                )
            live = -(-self.slots // (self.vec * self.lanes)) * self.vec
            way, listed = way_to_select(most, self.experts, live, self.lanes, self.options.listed)
            way = chosen["select"] = self.options.select or way
            if way == "merge":
                if self.few and not self.options.listed:
                    listed = never_missing(self.region, most, listed, self.lanes, self.dense)
                chosen["listed"] = str(listed)
            if (self.block and way == "merge") or (self.lanes < WARP and way == "radix"):
                raise UsageError(
                    f"specialize: select={way} does not work over {self.lanes} lanes: merge is for up to {WARP}, radix "
                    f"for {WARP} or more"
                )
        if self.limits:
            in_lanes = all(groups_in_lanes(o, self.experts, self.vec, self.lanes) for o in self.limits)
            chosen["groups"] = "block" if self.block else "lanes" if in_lanes else "shared"
        return chosen

    # -------------------------------------------------------------------------------------------- threads, memory

    def _threads(self, select: dict[str, str]) -> tuple[int, dict[str, str]]:
        """Threads of a block, and where tables and sums over tokens are."""
        if self.block and self.options.threads not in (0, self.lanes):
            raise UsageError(
                f"specialize: {self.lanes} lanes that share a token are a whole block, not {self.options.threads} "
                "threads"
            )
        per_token = _shared_bytes_per_token(self.region, self.experts, self.vec, self.lanes, select)
        in_shared = self._sums_in_shared()
        if self.block:  # a lane is the only one with its columns
            used = per_token + exchanged_bytes(self.region, self.lanes)
            where = {"tables": "dynamic" if used > _SHARED_LIMIT else "static"}
            fits = used + 4 * self.lanes * self._live_slots * in_shared <= _SHARED_LIMIT
            return self.lanes, {**where, **({"sums": "shared"} if in_shared and fits else {})}
        threads = self.options.threads or self._usual_threads()
        fixed = sum(4 * self.experts for o in self.columns if isinstance(o, col.Count))
        if self.cluster:  # the first has a row of each sum from each, and adds up what its threads have
            fixed += sum(4 * self.cluster * columns_of(o.result) for o in self.columns) + 4 * WARP
        per_warp = sum(4 * columns_of(o.x) for o in self.sums)
        per_warp += WARP * 4 * self._live_slots * in_shared
        vectors = self._vectors_in_shared()
        fixed += 4 * self.lanes * self._live_slots * vectors
        while threads > WARP and fixed + per_warp * threads // WARP + per_token * threads // self.lanes > _SHARED_LIMIT:
            threads //= 2
        return threads, {
            **({"sums": "shared"} if in_shared else {}),
            **({"vectors": "shared"} if vectors else {}),
        }

    def _usual_threads(self) -> int:
        if self.cluster:
            return max(WARP, min(_LARGEST_BLOCK, self.lanes * _TOKENS_OF_CLUSTER // self.cluster))
        if self._is_large:
            least = _SUMMING_BLOCK if self._is_summing and self.sums else _USUAL_THREADS
            return max(least, min(_LARGEST_BLOCK, self.lanes * _TOKENS_OF_LARGE_BLOCKS))
        long = _LONG_ROW_OF_FEW if self.dense else _LONG_ROW_OF_FEW // 2
        broad = self.experts >= long and not (self.dense and self.limits)
        broad |= self.packed and bool(self.sums) and self.lanes > 1
        return _THREADS_OF_FEW if self.few and not (self.selections and broad) else _USUAL_THREADS

    @property
    def _is_summing(self) -> bool:
        """Whether blocks leave partial rows of many tokens: large ones, for these are read again."""
        return self.packed and bool(self.columns) and not self.few

    @property
    def _is_large(self) -> bool:
        """Whether blocks are large, as they are for long dense rows, whose registers that bounds."""
        crowded = self.dense and self.experts in _LARGE_BLOCKS and self.options.target.startswith("sm_90")
        return self._is_summing or (self.packed and crowded and not self.few)

    def _sums_in_shared(self) -> int:
        """How many rows over experts are summed in shared memory: where they leave registers for too few warps. Each
        sum is then read and written for each token, which takes as long as the shuffles that find picks.

        What picks by 16-bit ranks has registers enough, and so has a cluster, whose blocks have a multiprocessor each.
        A block that shares a token waits for its picks, which only other blocks hide: there none is to spare.
        """
        if self.cluster or not (self.selections if self.block else self._is_crowded):
            return 0
        return sum(self.layouts[o.x].kind == "experts" for o in self.sums)

    def _vectors_in_shared(self) -> int:
        """How many rows that all tokens have in common, such as a selection bias, lie in shared memory.

        Not those of few tokens, which have warps to spare, and for which it takes 0.2 us to put them there; nor beside
        sums, which keep shared memory busy.
        """
        if self.few or not self._is_crowded or self._sums_in_shared():
            return 0
        return sum(x.kind == "vector" for x in self._of_arguments)

    @property
    def _is_crowded(self) -> bool:
        """Whether lanes of a warp need most of their registers for finding picks: of groups, or of float32 ranks."""
        spare = not self.limits and (self.dense or not self.wide)
        return not (spare or self.cluster or self.block or self.slots // self.lanes < _SUMMED_SLOTS)

    def _goes_by_warps(self, threads: int) -> bool:
        """Whether warps go through the tokens on their own, where blocks do so in rounds: of long rows that are picked
        from, so that the last round leaves few warps idle.

        With 256 to 896 experts and 4096 to 65536 tokens that was worth 1 to 12 %; it cost 1 to 2 % with fewer experts,
        with groups, and in gradients.
        """
        picks = bool(self.selections) and not (self.limits or self.block or self.cluster)
        return picks and self.lanes >= _LANES_BY_WARPS and threads > WARP

    def _shares_out_badly(self, threads: int) -> bool:
        """Whether the next launch's blocks would come to where this one's happen to be few, and those of the one behind
        it the other way round, so that a multiprocessor has three blocks of a launch where two each would do. Then the
        next one is let begin when this one's blocks leave: some 0.2 us later, which is less than what it costs grouped
        routers (2 to 8 %) and (256,8) dense (23 % at T = 4096).

        Launches with a block for each multiprocessor, or with as many as there is room for, share out by themselves.
        """
        few_blocks = self.options.tokens == "few" and threads // self.lanes < _TOKENS_OF_UNEVEN
        return bool(self.limits) or (few_blocks and self.dense and self.packed and self.experts in _UNEVEN)

    # --------------------------------------------------------------------------------------------- rows in flight

    def _prefetches(self) -> bool:
        """Whether the next token's row is fetched while this one's is worked on."""
        if segments_of(self.region):  # the next token of a sequence may lie far away
            return False
        compact = bool(self.selections) and not (self.dense or self.wide or self.limits or self.block)
        if self.few:  # a short call that selects and counts begins with its loads, ahead of clearing its counters
            return compact and any(isinstance(o, col.Count) for o in self.columns)
        if self._is_summing and self.sums and not self.dense:
            return True
        if self._is_gradient_of_loss and self.experts in _PREFETCH_WITH_LOSS:
            return True
        if self.experts not in _PREFETCH_EXPERTS:
            return False
        # A dense result keeps memory busy with stores, behind which the next row's loads would wait.
        return self.dense and len(self.rows) == 1 and not self.wide

    @property
    def _is_gradient(self) -> bool:
        """Whether it is a gradient of rows, 16-bit like all that it reads."""
        rows = self.dense and not self.block and not self.selections
        return rows and all(a.type.dtype.bytes == 2 for a in self.rows)

    @property
    def _is_gradient_of_loss(self) -> bool:
        """Whether it is that of a loss, too: it computes enough for the next rows to come meanwhile."""
        return self._is_gradient and any(x.kind == "vector" for x in self._of_arguments)

    @property
    def _resident_of_gradient(self) -> int:
        """Blocks a multiprocessor for a gradient, where it stays in registers: without dead slots, and sums over tokens
        of its own. Others spill up to 400 bytes, and take 15 % longer. 1 for what is none."""
        if not self._is_gradient:
            return 1
        functions = {
            type(o) for o in self.region.ops if isinstance(o, math.Unary) and self.layouts[o.y].kind == "experts"
        }
        score = row.Max if any(isinstance(o, row.Max) for o in self.region.ops) else math.Sigmoid
        if (score is math.Sigmoid and score not in functions) or self.sums or self.experts % (self.lanes * self.vec):
            return 1
        key = (self._is_gradient_of_loss, score, len(self.rows) == 1, bool(functions - {score}))
        bounds = _RESIDENT_OF_GRADIENT.get(key, {})
        return next((blocks for columns, blocks in bounds.items() if self.experts in columns), 1)

    def _resident(self, threads: int, select: dict[str, str], in_shared: bool) -> int:
        """Blocks that a multiprocessor should hold at least, which bounds registers."""
        way = select.get("select", "")
        if self.block:
            one_row = [x.kind for x in self._of_arguments] == ["experts"]
            spare = self._live_slots <= _BOUNDED_SLOTS and self.picks <= BOUNDED_PICKS and not self.limits
            if self._reads_for_all:
                return max(1, _RESIDENT_LANES_OF_GRADIENT // self.lanes) if spare and not self.sums else 1
            lanes = _RESIDENT_LANES_WITH_SUMS if in_shared else _RESIDENT_LANES
            if self.wide or (self.sums and not in_shared):
                lanes = _RESIDENT_LANES_OF_CROWDED
            return max(1, lanes // self.lanes) if one_row and spare and way == "radix" else 1
        many_picks = self.limits and self.dense and self.picks > _PICKS_A_LANE  # spill up to 170 bytes
        in_registers = self._is_summing and self.sums and self.dense
        if in_registers or (in_shared and not (self.few or many_picks)):
            return max(1, _RESIDENT_WITH_SUMS * _USUAL_THREADS // threads)
        if self.few or not (threads == _USUAL_THREADS or self._is_large):
            return 1
        if (blocks := self._resident_of_gradient) > 1:
            return blocks
        if way == "merge" and not (self.wide or self.dense or self.limits or self.sums) and self.vec > 1:
            return max(1, _RESIDENT_WHERE_COMPACT * _USUAL_THREADS // threads)
        if self.grouped and self.experts <= _GROUPED_EXPERTS and not self.sums:
            return _RESIDENT_WITH_GROUPS
        return 1


def _row_alignment(value: Value) -> int:
    """Of rows that a kernel before has written, one after the other; of inputs that nobody has said anything about."""
    if isinstance(value, BlockArgument) or value.type.rank != 2:
        return 16
    return python_math.gcd(16, columns_of(value) * value.type.dtype.bytes)


def _width(region: Block, layouts: dict[Value, Layout]) -> int:
    """Bytes of an element of the narrowest row of floats that is read."""
    rows = [a for a in region.arguments if layouts[a].kind == "experts" and a.type.dtype.is_float]
    return min((a.type.dtype.bytes for a in rows), default=4)


def _vector(experts: int, region: Block, layouts: dict[Value, Layout]) -> int:
    """Columns in one chunk: what 16 bytes of the narrowest row hold, as far as E divides.

    Chunks of a long row are shorter, down to 4 bytes, where that leaves fewer slots dead at the end of the row: 2304
    columns are 2.25 chunks of 8 for each of 128 lanes, which take the time of 3, or 9 chunks of 2. What counts is how
    many lanes there usually are: sums depend on the chunks, and must not depend on the lanes.
    """
    width = _width(region, layouts)
    longest = python_math.gcd(experts, 16 // width)
    if experts <= _LONG_ROW:
        return longest
    lanes = WARP if experts <= _WARP_EXPERTS else _USUAL_LANES
    shorter = [longest >> halvings for halvings in range(longest.bit_length())]
    return min(
        (vec for vec in shorter if vec * width >= 4 or vec == longest),
        key=lambda vec: -(-experts // (vec * lanes)) * vec,
    )


def exchanged_bytes(region: Block, lanes: int) -> int:
    """Shared memory in which the lanes of a block exchange sums, maxima and picks, at most."""
    words = 1
    for op in region.ops:
        if isinstance(op, row.Membership | row.Bitmap):
            words += 1
        elif isinstance(op, row.Scatter) and row.are_given(op.indices):
            words += 2
    return 4 * words * lanes + 1024


def _shared_bytes_per_token(region: Block, experts: int, vec: int, lanes: int, choices: dict[str, str]) -> int:
    """Shared memory of the tables that code generation declares, a token."""
    total = 0
    staged = False
    for op in region.ops:
        if isinstance(op, row.TopK):
            collects = choices["select"] == "merge" and not is_packed(op)
            if choices["select"] == "sort":
                total += 8 * padded_columns(experts, vec, lanes)
            elif collects:
                total += 8 * op.k
            elif choices["select"] == "radix":
                shape = RadixShape.of(op, experts, vec, lanes)
                total += 8 * shape.length + 4 * DIGIT_WORDS
                staged |= shape.bounded
            staged |= collects
        elif isinstance(op, row.GroupLimit) and choices["groups"] != "lanes":
            total += 4 * op.groups
            staged = True
    sparse = sparse_results(region)
    total += sum(value.type.dtype.bytes * experts for value in sparse)
    if any(isinstance(o, row.Scatter) and o not in sparse.values() for o in region.ops):
        total += 4 * experts
    if any(isinstance(o, row.Gather) and not isinstance(o.x, BlockArgument) for o in region.ops):
        total += 4 * experts
    return total + (4 * experts if staged else 0)

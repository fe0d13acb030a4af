"""``specialize``: a configuration for each kernel, by a built-in rule.

Functions are planned for any target. Where the target has clusters of blocks, the three launches of a dispatch become
one here (``merge_dispatch.py``), and blocks that add up sums over tokens wait for each other in one
(``finish_in_cluster.py``). A gradient with few tiles becomes two launches, for its tiles depend on the target, too
(``split_wgrads.py``).

Nothing here changes the arithmetic of a row: sums have one order whatever the lanes (see ``row.cuh``), and every way of
selecting gives the same picks. What it decides is how the work is spread.
"""

from __future__ import annotations

import functools
import math as python_math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from moesaic.ir.core import Block, BlockArgument, Function, Module, Value
from moesaic.ir.errors import UnsupportedError, UsageError, suggestion
from moesaic.ir.ops import col, row, slot
from moesaic.ir.ops.kernel import segments_of
from moesaic.ir.ops.launch import Kernel
from moesaic.ir.types import DType
from moesaic.passes.dispatch_shape import dispatch_config
from moesaic.passes.finish_in_cluster import cluster_of_finish, drop_tickets, tiles_of
from moesaic.passes.manager import Pass, PassContext
from moesaic.passes.merge_dispatch import merge_dispatches
from moesaic.passes.product_shape import ProductShape, product_shape
from moesaic.passes.row_layout import Layout, experts_columns, infer_layouts, sparse_results
from moesaic.passes.split_wgrads import split_wgrads

MAX_EXPERTS = 16384
"""Longest row that fits the registers of one block."""

_SHARED_LIMIT = 48 * 1024  # static shared memory of a block, on every target
_WARP = 32
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
_LONG_ROW = 512  # columns: longer ones have few lanes to spare
_RARE_MISS = {"dense": 1 / 256, "compact": 1 / 1024}  # of warps, that select again: few tokens are hundreds of warps
_AGAIN = 2.0  # what selecting again costs, of its instructions
_LISTED_PICKS = 8  # so few are always merged from lists or found by rounds
_MERGED_PICKS = 16  # so few are, unless ranks are wide and the row is long
_SORTED_EXPERTS = 128  # rows so short are sorted for many picks
_SCANNED_EXPERTS = 256  # rows so short are scanned for more than are merged
_SCANNED_EXPERTS_OF_WIDE_RANKS = 128
_MAXIMA_A_PICK = 2  # then 1.4 elements a pick, or fewer, reach the bound
_BOUNDED_PICKS = 256  # more are found from all of the keys
_SCANNED_PICKS = 32  # at most, by rounds
_LISTED = 64  # places for picks by radix, at least
_COUNTED = 128  # so long a list is put in order by counting
_PICKS_A_LANE = 8  # many picks need registers of their own
_RESIDENT_WITH_GROUPS = 4  # blocks a multiprocessor; without the bound, registers leave it half empty
_RESIDENT_LANES = 768  # the same for blocks that select by radix
_RESIDENT_LANES_OF_WIDE_RANKS = 512
_BOUNDED_SLOTS = 18  # of a lane, at most: more do not fit these registers
_RESIDENT_WITH_SUMS = 4  # blocks of 128 threads that have rows of sums: the bound costs less than what a fourth hides
_RESIDENT_WHERE_COMPACT = 8  # a kernel that only selects waits for what it loads: more warps hide more of that
_SUMMED_SLOTS = 16  # from so many on, a lane of a warp keeps its sums over tokens in shared memory
_SUMMED_WHERE_COMPACT = 128  # columns; lanes that share so short a row keep them in registers even so
_LARGE_BLOCKS = range(256, 1024)  # columns of a dense row: fewer have registers to spare, more have not enough
_LARGEST_BLOCK = 512  # threads
_TOKENS_OF_LARGE_BLOCKS = 64  # at a time: of more, what is not many times as many tokens keeps few blocks busy
_PREFETCH_EXPERTS = range(128, 4097)  # shorter rows leave enough loads in flight as it is, longer ones no registers
# Of a block that adds up partial rows, by how many tiles there are: few threads find room beside the last blocks of the
# kernel before, and wait there; what follows long sums takes more.
_FINISH_THREADS = {"few": 512, "many": 1024}
_FINISHED_AT_ONCE = 16  # tiles

DIGIT_WORDS = 260
"""Words of shared memory in which a team counts digits (``Digits`` of select_block.cuh)."""

_CHOICES = {
    "select": ("", "merge", "rounds", "sort", "radix"),
    "prefetch": ("", "on", "off"),
    "tokens": ("few", "many"),
    "tile": ("", "simt", "mma", "cooperative", "pingpong", "swapped"),
    "dispatch": ("", "steps"),
}


@dataclass(frozen=True)
class Specialize(Pass):
    """Chooses template parameters.

    Options:
        target: the GPU architecture the kernels are for.
        lanes, threads: override the rule for row programs (0: the rule decides). More than 32 lanes are a whole block.
        select: override how a top-k selects: merge (up to 32 lanes), rounds, sort or radix (32 lanes or more); empty:
            the rule decides.
        listed: override how many of its values a lane lists for merging, a power of two (0: the rule decides).
        prefetch: override whether a row is fetched while the one before is worked on: on or off (empty: the rule).
        resident: override how many blocks a multiprocessor should hold at least, which bounds registers (0: rule).
        tile: override what tiles of products are computed by, where it is possible: simt, mma, or,
            on Hopper, wgmma by its schedule, cooperative or pingpong, or with its operands swapped (empty: the rule).
        dispatch: override whether a dispatch may be one launch: steps, which takes three (empty: the rule).
        allow_tf32: whether products of float32 operands may round them to tf32.
        tokens: few or many: few tokens fill a GPU only if many lanes share one.
        alignment: bytes each input of the first function is known to be aligned to (its address and its row stride);
            an input without an entry has 16.
        points: what was found to be fast for single kernels, in place of the rule, as ``kernel:name=value:...``; see
            ``space.py`` for the names. An override above goes before it.
    """

    name: ClassVar[str] = "specialize"
    requires: ClassVar[str | None] = "planned"
    establishes: ClassVar[str | None] = "planned"

    target: str = "sm_90a"
    lanes: int = 0
    threads: int = 0
    select: str = ""
    listed: int = 0
    prefetch: str = ""
    resident: int = 0
    tile: str = ""
    dispatch: str = ""
    allow_tf32: bool = False
    tokens: str = "many"
    alignment: tuple[int, ...] = ()
    points: tuple[str, ...] = ()

    def run(self, module: Module, context: PassContext) -> bool:
        for option, known in _CHOICES.items():
            value = getattr(self, option)
            if value not in known:
                shown = ", ".join(repr(k) for k in known if k)
                raise UsageError(
                    f"specialize: {option} must be one of {shown}, found {value!r}{suggestion(value, known)}"
                )
        if self.listed & (self.listed - 1) or self.listed < 0:
            raise UsageError(f"specialize: listed must be a power of two, found {self.listed}")
        if self.threads % 32 or not 0 <= self.threads <= 1024:
            raise UsageError(f"specialize: threads must be a multiple of 32, at most 1024, found {self.threads}")
        points = dict(map(parse_point, self.points))
        for function in module.functions:
            given = self.alignment if function is module.entry else ()
            aligned: dict[Value, int] = dict(zip(function.arguments, given, strict=False))
            self.rewrite(function, aligned)
            for op in function.body.ops:
                if isinstance(op, Kernel):
                    self.configure(op, aligned, points.get(op.symbol, {}))
        return True

    def rewrite(self, function: Function, aligned: Mapping[Value, int]) -> None:
        """Makes the launches of a planned function those of the target. What is rewritten stays as it is."""
        if self.dispatch != "steps":
            merge_dispatches(function, self.target)
        drop_tickets(function, self.target)
        split_wgrads(function, lambda op: self._tile(op, aligned), self.tokens)

    @property
    def overrides(self) -> bool:
        """Whether an option takes a choice out of the rule's hands."""
        plain = Specialize()
        names = ("lanes", "threads", "select", "listed", "prefetch", "resident", "tile", "points")
        return any(getattr(self, n) != getattr(plain, n) for n in names)

    def configure(self, op: Kernel, aligned: Mapping[Value, int], point: Mapping[str, str]) -> None:
        """Writes the configuration of a kernel into it."""
        config = self.config(op, aligned, point)
        op.attributes["config"] = ("target=" + self.target, *(f"{k}={v}" for k, v in config.items()))

    def config(
        self,
        op: Kernel,
        aligned: Mapping[Value, int],
        point: Mapping[str, str],
        layouts: dict[Value, Layout] | None = None,
    ) -> dict[str, str]:
        """The configuration of a kernel: that of the rule, but for the choices of a point of its space.

        Args:
            op: the kernel.
            aligned: bytes that inputs are known to be aligned to.
            point: choices by name; those that it lacks are the rule's.
            layouts: of a row program, where they are known already.

        Raises:
            UsageError, UnsupportedError: the kernel cannot be configured like that; says why.
        """
        if op.template == "row_program":
            typed: dict[str, Any] = {n: int(v) if v.isdigit() else v for n, v in point.items()}
            free = {n: v for n, v in typed.items() if not getattr(self, n)}
            return replace(self, points=(), **free)._row_program(op, aligned, layouts)
        if op.template == "col_finish":
            cluster = cluster_of_finish(op, self.target)
            tiles = sum(tiles_of(_columns(v)) for v in op.operands[: op.partials])
            threads = _FINISH_THREADS["few" if tiles <= _FINISHED_AT_ONCE else "many"]
            return {"threads": str(threads), **({"cluster": str(cluster)} if cluster else {})}
        if op.template.startswith("dispatch"):
            return dispatch_config(op, self.tokens)
        alignment = {"alignment": ",".join(str(aligned.get(v, 16)) for v in op.operands[: op.reads])}
        assert op.region is not None
        if op.template in ("product", "wgrad"):
            shape = self._tile(op, aligned)
            return {**shape.chosen(shape.config(), point), **alignment}
        return {"threads": point.get("threads", "256"), **alignment}

    def _tile(self, op: Kernel, aligned: Mapping[Value, int]) -> ProductShape:
        """The rule's tile of a product or of a gradient."""
        assert op.region is not None
        # Rows in pieces of less than 16 bytes keep warps that fetch too busy. Numbers of picks are no such rows.
        read = [
            v
            for v, inner in zip(op.operands[: op.reads], op.region.arguments, strict=True)
            if v.type.dtype.bytes == 2 and v.type.rank > 1 and _in_rows(op.region, inner)
        ]
        whole = all(aligned.get(v, 16) >= 16 and _row_bytes(v) % 16 == 0 for v in read)
        hopper = self.target == "sm_90a" and whole
        return product_shape(op.region, tile=self.tile, hopper=hopper, allow_tf32=self.allow_tf32)

    def _row_program(
        self, op: Kernel, aligned: Mapping[Value, int], layouts: dict[Value, Layout] | None
    ) -> dict[str, str]:
        assert op.region is not None
        layouts = infer_layouts(op.region) if layouts is None else layouts
        experts = experts_columns(layouts)
        if experts > MAX_EXPERTS:
            raise UnsupportedError(f"rows of {experts} experts: a row program holds up to {MAX_EXPERTS} in registers")
        vec = _vector(experts, op.region, layouts)
        chunks = _power_of_two(-(-experts // vec))
        wide = any(isinstance(o, row.TopK) and not _packed(o) for o in op.region.ops)
        # With groups scored across lanes, 16-bit logits leave registers for long rows in few lanes even so.
        few_lanes = max(1, chunks * vec // _SLOTS)
        grouped = _width(op.region, layouts) == 2 and any(
            isinstance(o, row.GroupLimit) and _groups_in_lanes(o, experts, vec, few_lanes) for o in op.region.ops
        )
        dense = any(layouts[v].kind == "experts" for v in op.region.terminator.operands if v in layouts)
        slots = _slots_wanted(self.tokens, chunks * vec, dense=dense, wide=wide and not grouped)
        picks = max((x.columns for x in layouts.values() if x.kind == "picks"), default=1)
        selections = [o for o in op.region.ops if isinstance(o, row.TopK)]
        lanes = self.lanes or min(_WARP, chunks, max(1, chunks * vec // slots, _power_of_two(picks) // _PICKS_A_LANE))
        if self.tokens == "few" and not self.lanes:
            most_lanes = _LANES_OF_FEW["packed" if selections and not wide else "other"]
            lanes = min(lanes, max(most_lanes, chunks * vec // _SLOTS, _power_of_two(picks) // _PICKS_A_LANE))
        if not self.lanes and any(_by_radix(o, experts) for o in selections):
            lanes = _WARP
        if not self.lanes and experts > _WARP_EXPERTS:
            lanes, most_lanes = _BLOCK_LANES
            while lanes < most_lanes and -(-experts // (vec * lanes)) * vec > _BLOCK_SLOTS[self.tokens]:
                lanes *= 2
        # Membership packs one bit a slot into a word.
        if lanes not in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) or chunks * vec // lanes > 32:
            raise UnsupportedError(f"specialize: {lanes} lanes cannot hold a row of {experts} experts")
        block = lanes > _WARP
        if block and self.threads not in (0, lanes):
            raise UsageError(
                f"specialize: {lanes} lanes that share a token are a whole block, not {self.threads} threads"
            )
        select = {}
        if selections:  # one way for all: what suits the most picks
            most = max(selections, key=lambda o: o.k)
            if 0 < self.listed * lanes < most.k:
                raise UnsupportedError(
                    f"specialize: lists of {self.listed} in {lanes} lanes cannot hold {most.k} picks; list more"
                )
            way, listed = _selection(most, experts, -(-chunks // lanes) * vec, lanes, self.listed)
            select["select"] = self.select or way
            if select["select"] == "merge":
                if self.tokens == "few" and not self.listed:
                    listed = _never_missing(op.region, most, listed, lanes, dense)
                select["listed"] = str(listed)
            if (block and select["select"] == "merge") or (lanes < _WARP and select["select"] == "radix"):
                raise UsageError(
                    f"specialize: select={select['select']} does not work over {lanes} lanes: merge is for up to "
                    f"{_WARP}, radix for {_WARP} or more"
                )
        limits = [o for o in op.region.ops if isinstance(o, row.GroupLimit)]
        if limits:
            in_lanes = all(_groups_in_lanes(o, experts, vec, lanes) for o in limits)
            select["groups"] = "block" if block else "lanes" if in_lanes else "shared"
        columns = [o for o in op.region.ops if isinstance(o, col.ColumnReduction)]
        sums = [o for o in columns if isinstance(o, col.Sum)]
        broad = experts >= (_LONG_ROW_OF_FEW if dense else _LONG_ROW_OF_FEW // 2) and not (dense and limits)
        packed = bool(selections) and not (wide or limits or block)
        # Blocks that leave partial rows are large, for these are read again; so are those of long dense rows, whose
        # registers are bounded by that.
        summing = packed and bool(columns) and self.tokens == "many"
        crowded = dense and experts in _LARGE_BLOCKS and self.target.startswith("sm_90")
        large = summing or (packed and crowded and self.tokens == "many")
        broad = broad or (packed and bool(sums) and lanes > 1)
        usual = 64 if self.tokens == "few" and not (selections and broad) else 128
        if large:
            usual = max(usual, min(_LARGEST_BLOCK, lanes * _TOKENS_OF_LARGE_BLOCKS))
        threads = self.threads or usual
        per_token = _shared_bytes_per_token(op.region, experts, vec, lanes, select)
        if block:  # a lane is the only one with its columns: what is summed over tokens needs no shared memory
            threads = lanes
            exchanged = exchanged_bytes(op.region, lanes)
            select["tables"] = "dynamic" if per_token + exchanged > _SHARED_LIMIT else "static"
        else:
            fixed = sum(4 * experts for o in columns if isinstance(o, col.Count))
            per_warp = sum(4 * _columns(o.x) for o in sums)
            slots_a_lane = chunks * vec // lanes
            # What waits for memory has registers to spare, and so have short rows that only pick.
            spare = not limits and (dense or (experts <= _SUMMED_WHERE_COMPACT and not wide))
            if not spare and slots_a_lane >= _SUMMED_SLOTS and any(layouts[o.x].kind == "experts" for o in sums):
                # In registers, the sums of long rows would leave room for fewer warps.
                select["sums"] = "shared"
                per_warp += 32 * 4 * slots_a_lane * sum(layouts[o.x].kind == "experts" for o in sums)
            while threads > 32 and fixed + per_warp * threads // 32 + per_token * threads // lanes > _SHARED_LIMIT:
                threads //= 2
        alignment = [aligned.get(v, _row_alignment(v)) for v in op.operands[: op.reads]]
        rows = [a for a in op.region.arguments if layouts[a].kind == "experts"]
        # A gradient of rows that a loss is of, too, computes enough for the next two rows to come meanwhile.
        of_loss = not selections and len(rows) == 2 and any(layouts[a].kind == "vector" for a in op.region.arguments)
        of_loss = of_loss and not block and self.tokens == "many" and experts in _PREFETCH_EXPERTS
        of_loss = of_loss and all(a.type.dtype.bytes == 2 for a in rows)
        # A dense result keeps memory busy with stores, behind which the next row's loads would wait.
        wanted = dense and len(rows) == 1 and experts in _PREFETCH_EXPERTS and not wide and self.tokens == "many"
        many = self.tokens == "many" and (threads == 128 or large)
        bounded = grouped and many and experts <= 256 and not sums
        # A short call of a kernel that selects and counts begins with its loads, ahead of clearing its counters.
        counts = any(isinstance(o, col.Count) for o in columns)
        wanted |= self.tokens == "few" and bool(selections) and counts and not (dense or wide or limits or block)
        wanted |= of_loss or (summing and bool(sums) and not dense)
        wanted = wanted and not segments_of(op.region)  # the next token of a sequence may lie far away
        prefetch = self.prefetch or ("on" if wanted else "off")
        resident = _RESIDENT_WITH_GROUPS if bounded else 1
        if select.get("select") == "merge" and not (wide or dense or limits or sums) and many and vec > 1:
            resident = max(1, _RESIDENT_WHERE_COMPACT * 128 // threads)
        if summing and sums and dense:
            resident = max(1, _RESIDENT_WITH_SUMS * 128 // threads)
        one_row = [layouts[a].kind for a in op.region.arguments] == ["experts"]
        spare = -(-experts // (vec * lanes)) * vec <= _BOUNDED_SLOTS and picks <= _BOUNDED_PICKS and not limits
        if block and one_row and spare and select.get("select") == "radix":
            resident = max(1, (_RESIDENT_LANES_OF_WIDE_RANKS if wide else _RESIDENT_LANES) // lanes)
        return {
            "lanes": str(lanes),
            "vec": str(vec),
            "threads": str(threads),
            "grid": "persistent" if columns or segments_of(op.region) or prefetch == "on" else "cover",
            "prefetch": prefetch,
            "resident": str(self.resident or resident),
            **select,
            "alignment": ",".join(map(str, alignment)),
        }


def point_text(symbol: str, point: Mapping[str, str]) -> str:
    """A point as an element of the option `points`."""
    return ":".join((symbol, *(f"{name}={value}" for name, value in point.items())))


def parse_point(text: str) -> tuple[str, dict[str, str]]:
    """The kernel and the choices that an element of the option `points` names.

    Raises:
        UsageError: it is not written like one.
    """
    symbol, *choices = text.split(":")
    pairs = [c.partition("=") for c in choices]
    if not symbol or not pairs or not all(name and value for name, _, value in pairs):
        raise UsageError(f"specialize: points are written kernel:name=value:..., found {text!r}")
    return symbol, {name: value for name, _, value in pairs}


def _in_rows(region: Block, argument: Value) -> bool:
    """Whether a kernel reads an operand in rows, rather than one number of it for each slot."""
    users = region.users(argument)
    return not users or any(not isinstance(user, slot.OfPick) for user in users)


def _slots_wanted(tokens: str, columns: int, *, dense: bool, wide: bool) -> int:
    """How many values of a row a lane should hold: of few tokens or many, of float32 ranks if `wide`."""
    short = columns <= _SHORT_ROW[tokens]
    if tokens == "few":
        return _SLOTS_OF_FEW["short" if short else "long"]
    crowded = short or wide if dense else wide and columns < _NARROW_RANKS
    return _SLOTS_OF_SHORT_ROWS if crowded else _SLOTS


def _row_alignment(value: Value) -> int:
    """Of rows that a kernel before has written, one after the other; of inputs that nobody has said anything about."""
    if isinstance(value, BlockArgument) or value.type.rank != 2:
        return 16
    return python_math.gcd(16, _columns(value) * value.type.dtype.bytes)


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
    lanes = _WARP if experts <= _WARP_EXPERTS else _USUAL_LANES
    shorter = [longest >> halvings for halvings in range(longest.bit_length())]
    return min(
        (vec for vec in shorter if vec * width >= 4 or vec == longest),
        key=lambda vec: -(-experts // (vec * lanes)) * vec,
    )


def _columns(rows: Value) -> int:
    columns = rows.type.shape[-1]
    assert isinstance(columns, int)
    return columns


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def padded_columns(experts: int, vec: int, lanes: int) -> int:
    """Slots of all lanes of a row together."""
    return -(-_power_of_two(-(-experts // vec)) // lanes) * lanes * vec


def _by_radix(op: row.TopK, experts: int) -> bool:
    """Whether a warp had better pick by radix than in any other way."""
    packed = _packed(op)
    if op.k > _SCANNED_PICKS:
        longest = _SORTED_EXPERTS
    elif op.k > _MERGED_PICKS:
        longest = _SCANNED_EXPERTS if packed else _SCANNED_EXPERTS_OF_WIDE_RANKS
    else:  # lists of 16-bit keys take fewer instructions
        longest = MAX_EXPERTS if packed or op.k <= _LISTED_PICKS else _LONG_ROW
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
        parts = 1 if op.k <= _BOUNDED_PICKS else slots
        while parts < slots:
            firsts = range(0, slots, slots // parts)  # slots that parts begin with, in all lanes or some
            live = [-(-(experts - i % vec - i // vec * vec * lanes) // vec) for i in firsts]
            if sum(min(max(0, n), lanes) for n in live) >= _MAXIMA_A_PICK * op.k:
                break
            parts *= 2
        bounded = parts < slots
        places = max(_LISTED, _power_of_two(2 * op.k if bounded else op.k))
        return cls(parts, places, places <= _COUNTED, bounded)


def _selection(op: row.TopK, experts: int, slots: int, lanes: int, listed: int) -> tuple[str, int]:
    """The cheapest way to select by an estimate of instructions a lane, and how many of its values a lane lists for
    merging: `listed`, unless that is 0. Most picks of all sort the row in shared memory."""
    picks = op.k
    full = _power_of_two(picks)
    if lanes > _WARP:
        return ("rounds" if picks <= 2 else "radix" if 2 * picks <= experts else "sort"), full
    packed = _packed(op)
    steps = lanes.bit_length() - 1
    lengths = [n for n in (1, 2, 4, 8, 16, 32) if n <= full <= n * lanes and picks <= _SCANNED_PICKS]
    costs = {n: merging_instructions(n, picks, slots, lanes) for n in lengths}
    best = listed or min(costs, key=lambda n: (costs[n], n), default=full)
    if lanes == _WARP and _by_radix(op, experts):
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
    full = _power_of_two(picks)
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
    return min(1.0, _WARP * missed)


def _never_missing(region: Block, op: row.TopK, listed: int, lanes: int, dense: bool) -> int:
    """The length of lists, from `listed` on, with which few tokens hardly ever wait for a warp that selects again: a
    short call ends with its slowest warp. Lists as long as the picks never miss one; beside dense results nothing
    between pays. Picks of a router with groups fall on the lanes of the groups that are kept."""
    for limit in (o for o in region.ops if isinstance(o, row.GroupLimit)):
        lanes = max(1, lanes * limit.keep // limit.groups)
    full = _power_of_two(op.k)
    while listed < full and merging_misses(listed, op.k, lanes) > _RARE_MISS["dense" if dense else "compact"]:
        listed = full if dense else 2 * listed
    return listed


def merging_shuffles(listed: int, picks: int, lanes: int) -> int:
    """Shuffles among those, where no list is too short."""
    return sum(own * (1 + strides) for own, strides, _ in _merges(listed, picks, lanes)) + 2


def _merges(listed: int, picks: int, lanes: int) -> Iterator[tuple[int, int, bool]]:
    """Each step that merges the lists of two groups of lanes: values a lane holds after it, strides over lanes, and
    whether the lists double; ``Ranks`` in ``select.cuh`` says how."""
    full, own, group = _power_of_two(picks), listed, 1
    while group < lanes:
        doubled = own * group < full
        own = own if doubled else max(1, own // 2)
        group *= 2
        yield own, min(group, full // own).bit_length() - 1 - (1 if doubled else 0), doubled


def _packed(op: row.TopK) -> bool:
    """Whether what is ranked has 16 bits, so that value and column share a word."""
    return isinstance(op.x, BlockArgument) and op.x.type.dtype in (DType.BF16, DType.F16)


def _groups_in_lanes(op: row.GroupLimit, experts: int, vec: int, lanes: int) -> bool:
    """Whether neighbouring lanes hold a group in whole chunks, so that scoring needs no shared memory."""
    size = experts // op.groups
    span = size // vec
    whole = size % vec == 0 and span > 0 and span & (span - 1) == 0 and lanes % span == 0
    return whole and experts % (vec * lanes) == 0 and op.best in (1, 2, 4) and op.best <= size and op.groups <= 32


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
            collects = choices["select"] == "merge" and not _packed(op)
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


def _row_bytes(value: Value) -> int:
    columns = value.type.shape[-1]
    assert isinstance(columns, int)
    return columns * value.type.dtype.bytes

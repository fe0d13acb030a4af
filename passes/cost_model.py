"""About how long a kernel takes at a point of its space, and what it must take at least.

It is there to put points in order before any is compiled, not to be right: what it leaves out (caches, the compiler,
the card's power limit) is found out by timing. Of a card that nobody knows, the order matters, which depends on ratios.

Row programs wait for memory, for instructions to be issued, or for blocks to be started::

    memory       bytes over bandwidth, which needs so many bytes of loads in flight on a multiprocessor
    issue        warp instructions, 4 a clock of a multiprocessor where enough warps are resident, on the one that has
                 the most of few blocks; and what is left over when blocks end at different times
    start        blocks are started one after the other; the last of them then loads and computes its tokens
    slowest      what a warp has more to do that selects again as its lists were too short: of so many warps, one will

Products do tiles, each block one after the other: a stage takes as long as the tensor cores need for it, or as its
operands need from the L2 cache; what follows the product is added where nothing hides it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from moesaic.ir.core import Block
from moesaic.ir.errors import MoesaicError
from moesaic.ir.ops import col, math, row, slot
from moesaic.ir.ops.kernel import narrow_columns
from moesaic.ir.ops.launch import Kernel
from moesaic.passes.card import Card
from moesaic.passes.cost import Extents, cost_of
from moesaic.passes.product_shape import ProductShape
from moesaic.passes.selection_shape import merging_instructions, merging_misses, padded_columns
from moesaic.passes.space import Limits, Point, Space, experts_of, longest_row, parts_of

_ISSUES = 4  # warp instructions a clock
_FILLING_WARPS = 6  # of a multiprocessor, which then issues all it can: a lane has a few instructions at a time
_STARTING = 2.0  # clocks from the start of a block to that of the next one, on the whole card
_BYTES_IN_FLIGHT = 20 * 1024  # of a multiprocessor, for all of the bandwidth
_TOKEN_INSTRUCTIONS = 50.0  # of a lane, whatever its part of the row
_HIDDEN = 0.25  # of the smaller of two times, what does not overlap
_EPILOGUE = 14.0  # clocks for 128 elements of a tile that leave
_TAIL = 0.4  # of a tile, what both blocks of a pair take longer for rows besides
_MMA_SHARE = 0.6  # of what wgmma reaches, by mma.sync
_SIMT_FLOPS = 200.0  # a clock of a multiprocessor
_MEMORY_LATENCY = 700.0  # clocks until the first stage of a tile is there
_QUARTERS = (-1.27, -0.32, 0.32, 1.27)  # means of a quarter of normal deviates each
_DISTANCE = 0.01  # of its time, for each choice in which a point differs from the rule's


def estimated_us(space: Space, point: Point, load: Extents, card: Card) -> float:
    """About the time of a kernel at a point, in microseconds.

    Raises:
        UsageError, UnsupportedError: the point cannot be.
    """
    op, config = space.op, space.config(point)
    if op.template == "row_program":
        us = _row_program(op, config, load, card, space.limits)
    elif op.template in ("product", "wgrad"):
        us = _product(op, ProductShape.parse(config), load, card)
    else:
        us = floor_us(op, load, card)
    changed = sum(space.default.get(name) != value for name, value in point.items())
    return us * (1.0 + _DISTANCE * changed)


def ordered(space: Space, points: list[Point], load: Extents, card: Card) -> list[tuple[Point, float]]:
    """The points with their estimates, the shortest first; the rule's before all others."""
    found = [(p, _estimate_or_none(space, p, load, card)) for p in points]
    known = [(p, us) for p, us in found if us is not None]
    return sorted(known, key=lambda item: (item[0] != space.default, item[1], tuple(item[0].items())))


def _estimate_or_none(space: Space, point: Point, load: Extents, card: Card) -> float | None:
    try:
        return estimated_us(space, point, load, card)
    except MoesaicError:
        return None


# ------------------------------------------------------------------------------------------------------------ floors


def floor_us(op: Kernel, load: Extents, card: Card) -> float:
    """What bytes and FLOPs need at least, and a launch."""
    cost = cost_of(op, load)
    return max(1e6 * cost.bytes / card.bandwidth, 1e6 * cost.product_flops / card.dense, card.launch_us)


# -------------------------------------------------------------------------------------------------------- row programs


def _row_program(op: Kernel, config: Mapping[str, str], load: Extents, card: Card, limits: Limits) -> float:
    assert op.region is not None
    experts = longest_row(op)
    lanes, vec, threads, resident = (int(config[n]) for n in ("lanes", "vec", "threads", "resident"))
    slots = padded_columns(experts, vec, lanes) // lanes
    rows, picked, sums = _counted(op.region, experts)
    steps = lanes.bit_length() - 1
    instructions = _TOKEN_INSTRUCTIONS + slots * rows + picked * 8 + sums * (slots + 3 * steps)
    for inner in op.region.ops:
        if isinstance(inner, row.TopK):
            instructions += _selecting(inner, config, slots, lanes)
        elif isinstance(inner, row.GroupLimit):
            instructions += 4 * slots + 3 * inner.groups
    registers = max(
        32.0, min(24 + 1.4 * slots * max(1.0, _live_rows(op)), limits.registers_per_sm / (resident * threads))
    )
    blocks = max(
        1,
        min(
            int(limits.registers_per_sm / registers / threads),
            limits.max_threads_per_sm // threads,
            limits.max_blocks_per_sm,
        ),
    )
    needed = 24 + 1.1 * slots
    spilled = max(0.0, needed - registers) * 4  # instructions that save and restore what does not fit
    instructions += spilled
    clock = card.clock_hz * 1e-6
    tokens_of_block = max(1, threads // lanes)
    to_do = -(-load.tokens // tokens_of_block)  # blocks
    multiprocessors = int(config.get("cluster", card.multiprocessors))
    most = -(-to_do // multiprocessors)  # of the multiprocessor that has the most of them
    waves = most / blocks
    uneven = 1.0 if waves > 8 or config["grid"] != "cover" or waves <= 1 else -(-waves // 1) / waves

    def issuing(tokens: float, warps: float) -> float:
        """Of tokens on a multiprocessor with so many warps."""
        rate = _ISSUES * clock * min(1.0, max(warps, 1) / _FILLING_WARPS)
        return tokens * lanes / 32 * instructions / rate

    # Few blocks do not share out evenly: a multiprocessor has another one, or none.
    tokens = most * tokens_of_block if waves <= 1 else load.tokens / multiprocessors
    warps = min(blocks, most) * threads / 32
    moved = cost_of(op, load).bytes
    ahead = 2 if config["prefetch"] == "on" else 1
    rows = min(blocks * tokens_of_block * ahead, load.tokens / multiprocessors)  # that a multiprocessor asks for
    in_flight = rows * moved / max(load.tokens, 1)
    memory = 1e6 * moved / card.bandwidth / min(1.0, max(in_flight, 1) / _BYTES_IN_FLIGHT)
    work = _overlapping(issuing(tokens, warps), memory) * uneven
    started = to_do if config["grid"] == "cover" else min(to_do, multiprocessors * blocks)
    waiting = 1e6 * _BYTES_IN_FLIGHT * multiprocessors / card.bandwidth
    last = started * _STARTING / clock + _overlapping(issuing(tokens_of_block, threads / 32), waiting)
    all_warps = min(load.tokens * lanes / 32, multiprocessors * warps)
    again = sum(_selecting_again(o, config, slots, lanes, all_warps) for o in op.region.ops if isinstance(o, row.TopK))
    return max(work, last) + again * _FILLING_WARPS / _ISSUES / clock + card.launch_us


def _overlapping(a: float, b: float) -> float:
    return max(a, b) + _HIDDEN * min(a, b)


@functools.lru_cache(maxsize=256)
def _counted(region: Block, experts: int) -> tuple[float, int, int]:
    """Instructions for each value of a row, ops on picks, and sums and maxima of rows."""
    each, picked, sums = 3.0, 0, 0  # a load and a store
    for inner in region.ops[:-1]:
        wide = any(r.type.rank > 1 and r.type.shape[-1] == experts for r in inner.results)
        if isinstance(inner, math.Elementwise):
            each += 1.5 if wide else 0.0
            picked += not wide
        elif isinstance(inner, row.Scatter | row.Membership | col.Sum):
            each += 1.0
        elif not isinstance(inner, row.TopK | row.GroupLimit):
            sums += 1
    return each, picked, sums


def _live_rows(op: Kernel) -> int:
    rows = [v for v in op.operands[: op.reads] if v.type.rank == 2 and v.type.leading == "T"]
    return sum(v.type.shape[-1] == longest_row(op) for v in rows)


def _selecting(op: row.TopK, config: Mapping[str, str], slots: int, lanes: int) -> float:
    steps = lanes.bit_length() - 1
    way = config["select"]
    if way == "merge":
        return merging_instructions(int(config["listed"]), op.k, slots, lanes) + 2.5 * slots
    if way == "rounds":
        return float(op.k * (4 * slots + 6 * steps + (20 if lanes > 32 else 0)) + 2.5 * slots)
    if way == "radix":
        return 400.0 + 8.0 * slots + 6.0 * op.k * 32 / lanes
    depth = (slots * lanes - 1).bit_length()
    return slots / 2 * depth * (depth + 1) / 2 * 8.0


def _selecting_again(op: row.TopK, config: Mapping[str, str], slots: int, lanes: int, warps: float) -> float:
    """Instructions that the slowest of so many warps has more than the others, as its lists were too short."""
    listed = int(config["listed"]) if config["select"] == "merge" else op.k
    missed = merging_misses(listed, op.k, lanes)
    full = 1 << (op.k - 1).bit_length()
    one_will = 1 - float((1 - missed) ** warps)
    return (one_will - missed) * merging_instructions(full, op.k, slots, lanes)


# ------------------------------------------------------------------------------------------------------------ products


def _product(op: Kernel, shape: ProductShape, load: Extents, card: Card) -> float:
    assert op.region is not None
    tiles, height, depth, parts, grouped_sum = 1.0, float(shape.rows), 0.0, 1, False
    experts = max(1, load.live_experts(experts_of(op)))
    each = (load.rows if experts_of(op) > 1 else load.tokens) / experts
    for inner in op.region.ops:
        if isinstance(inner, slot.Product):
            depth, outer = inner.sizes()
            narrow = narrow_columns(op.region)
            in_turn = any(o.interleaved for o in op.region.ops if isinstance(o, slot.Split | slot.Join))
            parts = 2 if outer != narrow and not in_turn else 1
            row_tiles, height = _row_tiles(shape, each, spread=experts_of(op) > 1)
            tiles = experts * row_tiles * -(-outer // (parts * shape.columns))
        elif isinstance(inner, slot.Outer):
            below, beside = shape.tiles_of_matrix(*inner.sizes())
            depth, grouped_sum = each / parts_of(op), True
            tiles = experts_of(op) * parts_of(op) * below * beside
    wide = parts * shape.columns
    steps = -(-depth // shape.depth)
    tensor = card.tensor_flops * (1.0 if shape.fetches else _MMA_SHARE)
    if shape.tile == "SimtTile":
        tensor = _SIMT_FLOPS
    tensor_clocks = 2.0 * height * wide * shape.depth / tensor
    # Few columns a warpgroup read the left operand again and again; a pair of blocks shares one operand.
    fetched = 2.0 * shape.depth * (height + wide) - (shape.depth * min(height, wide) if shape.fetches else 0.0)
    l2_clocks = fetched / card.l2_bytes * (shape.blocks if not shape.fetches else 1)
    latency = _MEMORY_LATENCY / max(1, shape.stages - 1)  # a stage is asked for so many stages ahead
    stage = max(tensor_clocks * (shape.blocks if not shape.fetches else 1), l2_clocks, latency)
    epilogue = height * wide / 128 * _EPILOGUE * (0.35 if shape.pingpong else 1.0) / (2 if shape.blocks > 1 else 1)
    tile_clocks = steps * stage + epilogue + (0.0 if grouped_sum else 100.0)
    resident = card.multiprocessors * shape.blocks
    rounds = -(-tiles // resident) if tiles > resident / 2 else 1.0
    compute = rounds * tile_clocks / (card.clock_hz * 1e-6)
    memory = 1e6 * cost_of(op, load).bytes / card.bandwidth
    return max(compute, memory) + _HIDDEN * min(compute, memory) / 2 + card.launch_us


def _row_tiles(shape: ProductShape, each: float, *, spread: bool) -> tuple[float, float]:
    """Tiles of an expert below each other, and rows that one computes: means over experts, of which none has the mean.

    A number of rows that picks fall on as they like deviates by its root; here are the means of its four quarters.
    """
    found: list[tuple[float, float]] = []
    for deviation in _QUARTERS if spread else (0.0,):
        rows = max(1.0, each + deviation * each**0.5)
        tiles = max(1.0, -(-rows // shape.rows))
        if tiles > 1 and tiles % 2 and rows - (tiles - 1) * shape.rows <= shape.tail:
            tiles -= 1 - _TAIL
        if shape.swapped and tiles > 1:
            tiles = 2.0 * -(-rows // (2 * shape.rows))  # for pairs of blocks
        height = min(float(shape.rows), -(-rows // tiles // 8) * 8) if shape.swapped else float(shape.rows)
        found.append((tiles, height))
    return sum(t for t, _ in found) / len(found), sum(h for _, h in found) / len(found)

"""A row program and the kernel that finishes its sums over tokens become one launch, where one cluster has all tokens.

Of few tokens, two launches take longer than what they do. So the row program's blocks are one cluster: each hands the
sums of its tokens to the first, which adds them up in the order of the blocks, and computes what follows from them. No
partial row lies in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moesaic.ir.core import Block, Function, OpResult, Value, Yield, columns_of
from moesaic.ir.errors import UnsupportedError, UsageError
from moesaic.ir.ops.kernel import ColFinish, Ticket, segments_of
from moesaic.ir.ops.launch import Alloc, Kernel
from moesaic.passes.clusters import MOST_BLOCKS, has_clusters

MOST_COLUMNS = 576
"""Of all sums together: counts and scores of 256 experts, and a few numbers. The first block has a row of them from
each, 18 KiB, which leaves room for the rest."""

_LEAST_TOKENS = 128
"""That a cluster has at a time, at least. Where it has fewer, for tables in shared memory, the tokens of the smallest
bucket take it more than two rounds, and more blocks are faster, though that is another launch."""

ConfigOf = Callable[[Kernel], Mapping[str, str]]


def merge_finishes(function: Function, target: str, config_of: ConfigOf) -> None:
    """Puts each ``col_finish`` that may be there at the end of its row program, and drops what lay between them.

    Functions are planned without a target; so this is left to ``specialize``.

    Args:
        function: a planned one.
        target: of the kernels.
        config_of: the rule's configuration of a row program; what is tuned has no say.
    """
    if not has_clusters(target):
        return
    body = function.body
    kernels = [op for op in body.ops if isinstance(op, Kernel)]
    for finish in kernels:
        rows = _row_program(body, finish) if finish.template == "col_finish" else None
        if rows is None:
            continue
        merged, kept = _merged(body, rows, finish)
        if _fits(merged, config_of):
            _replace(body, rows, finish, merged, kept)


def _row_program(body: Block, finish: Kernel) -> Kernel | None:
    """The row program whose sums a kernel finishes, if it may finish them itself."""
    partials, others = finish.operands[: finish.partials], finish.operands[finish.partials : finish.reads]
    kernels = [op for op in body.ops if isinstance(op, Kernel)]
    writers = [op for op in kernels if any(v in op.written for v in partials)]
    if len(writers) != 1 or writers[0].template != "row_program":
        return None
    rows = writers[0]
    assert rows.region is not None and finish.region is not None
    tickets = _tickets(rows)
    between = kernels[kernels.index(rows) + 1 : kernels.index(finish)]
    # What the finish reads must be there for the row program, and what it writes must not lie where others still read.
    late = {v for op in (rows, *between) for v in op.written if v not in tickets}
    taken = {_slot(v) for op in (rows, *between) for v in op.operands} - {None}
    by_sequence = segments_of(rows.region) or any(v.type.rank > 1 for v in finish.region.arguments[: finish.partials])
    columns = sum(map(columns_of, partials))
    may = (
        not by_sequence
        and columns <= MOST_COLUMNS
        and all(body.users(v) == [rows, finish] for v in (*partials, *tickets))
        and not any(v in late for v in others)
        and not any(_slot(v) in taken for v in finish.written)
    )
    return rows if may else None


def _tickets(rows: Kernel) -> list[Value]:
    """What a row program sets to 0 for the blocks of the finish to count up."""
    assert rows.region is not None
    pairs = zip(rows.written, rows.region.terminator.operands, strict=True)
    return [v for v, zero in pairs if isinstance(zero, OpResult) and isinstance(zero.op, Ticket)]


def _slot(value: Value) -> int | None:
    """Where in the workspace a buffer lies; ``None`` for what is no part of it."""
    op = value.op if isinstance(value, OpResult) else None
    return op.slot if isinstance(op, Alloc) and op.space == "workspace" else None


def _merged(body: Block, rows: Kernel, finish: Kernel) -> tuple[Kernel, list[Value]]:
    """Both in one launch; and the buffers that the finish still writes in it. No other kernel reads what it computes
    with: that stays where it is."""
    assert rows.region is not None and finish.region is not None
    partials, tickets = finish.operands[: finish.partials], _tickets(rows)
    region = Block()
    inside: dict[Value, Value] = {}
    read: dict[Value, Value] = {}  # by operand of the launch
    for given, argument in zip(rows.operands[: rows.reads], rows.region.arguments, strict=True):
        if given not in read:
            read[given] = region.add_argument(argument.type, argument.name)
        inside[argument] = read[given]
    for op in rows.region.ops[:-1]:
        if not isinstance(op, Ticket):
            region.append(op.clone(inside))
    leaving = {v: inside.get(y, y) for v, y in zip(rows.written, rows.region.terminator.operands, strict=True)}

    last = finish.region.clone()
    operands: list[Value] = []
    arguments = list(last.arguments)
    for given, argument in zip(finish.operands[: finish.reads], arguments, strict=True):
        if given in tickets:
            last.arguments.remove(argument)
        elif given in partials:
            operands.append(leaving[given])
        else:
            if given not in read:
                read[given] = region.add_argument(argument.type, argument.name)
            operands.append(read[given])
    kept = [v for v in finish.written if _slot(v) is None or body.users(v) != [finish]]
    made = dict(zip(finish.written, last.terminator.operands, strict=True))
    last.terminator.operands = [made[v] for v in kept]
    names = [v.name for v in kept]
    end = region.append(ColFinish(operands, {"partials": finish.partials}, region=last, result_names=names))
    left = {v: y for v, y in leaving.items() if v not in partials and v not in tickets}
    region.append(Yield([*left.values(), *end.results]))
    merged = Kernel(
        [*read, *left, *kept],
        {"symbol": rows.symbol, "template": rows.template, "reads": len(read)},
        region=region,
        location=rows.location,
    )
    return merged, kept


def _fits(merged: Kernel, config_of: ConfigOf) -> bool:
    """Whether a cluster has enough tokens at a time."""
    try:
        config = config_of(merged)
    except (UnsupportedError, UsageError):
        return False
    return MOST_BLOCKS * int(config["threads"]) // int(config["lanes"]) >= _LEAST_TOKENS


def _replace(body: Block, rows: Kernel, finish: Kernel, merged: Kernel, kept: list[Value]) -> None:
    gone = {*rows.written, *finish.operands} - {*merged.operands}
    for value in kept:  # the row program runs before their place
        if isinstance(value, OpResult):
            body.ops.remove(value.op)
            body.insert(body.ops.index(rows), value.op)
    body.insert(body.ops.index(rows), merged)
    body.ops.remove(rows)
    body.ops.remove(finish)
    for value in gone:
        if isinstance(value, OpResult) and isinstance(value.op, Alloc):
            body.ops.remove(value.op)

"""Where each value of a row program lives: the layouts of design section "inside a row program".

- ``experts``: a token's E values over the lanes of a token;
- ``picks``: its K values over the same lanes;
- ``bytes``: a bit for each of its E experts, the bytes over the same lanes;
- ``scalar``: one number per token, the same in every lane;
- ``vector``: one number per column, the same for all tokens a block works on: for all, or for those of a sequence;
- ``uniform``: one number for all of them;
- ``column``: a sum over tokens, complete only at the end of the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.ir.core import Block, BlockArgument, Constant, Op, OpResult, Value
from moesaic.ir.errors import InternalError, UnsupportedError
from moesaic.ir.ops import col, math, row
from moesaic.ir.ops.kernel import ColFinish, is_column_value

SPARSE = 8
"""Experts a pick from which a row of zeros but for the picks is written through shared memory."""


@dataclass(frozen=True)
class Layout:
    """A kind and, for all but the numbers, the number of columns."""

    kind: str
    columns: int = 1

    @property
    def is_row(self) -> bool:
        """Spread over the lanes of a token."""
        return self.kind in ("experts", "picks", "bytes")


def infer_layouts(region: Block) -> dict[Value, Layout]:
    """The layout of every value of a row program's region.

    Shapes alone do not decide (K may equal E, or be 1): what a value comes from or goes into does, and elementwise ops
    hand it on in both directions.

    Raises:
        UnsupportedError: the region has rows of more than one number of experts.
    """
    classes = _Classes()
    seeds: dict[Value, str] = {}
    for op in region.ops:
        if isinstance(op, math.Elementwise):
            rows = [v for v in [*op.operands, *op.results] if _columns(v) > 1 and v.type.leading == "T"]
            for other in rows[1:]:
                classes.join(rows[0], other)
        for value, kind in _demands(op):
            seeds[value] = kind
    by_class: dict[Value, str] = {}
    for value, kind in seeds.items():
        if _columns(value) > 1:
            root = classes.root(value)
            if by_class.setdefault(root, kind) != kind:
                raise UnsupportedError(f"a value of type {value.type} is used both as a row of experts and as picks")

    layouts: dict[Value, Layout] = {}
    largest = max((_columns(v) for v in _values(region) if v.type.leading == "T"), default=1)

    def assign(value: Value) -> None:
        columns = _columns(value)
        if is_column_value(value):
            layouts[value] = Layout("column", columns)
        elif value.type.leading == "T" and value.type.rank == 1:
            layouts[value] = Layout("scalar")
        elif value.type.leading != "T":
            # A vector of one number is a number: with one expert, rows of experts are numbers per token.
            layouts[value] = Layout("vector", columns) if columns > 1 else Layout("uniform")
        elif columns > 1:
            kind = by_class.get(classes.root(value)) or ("experts" if columns == largest else "picks")
            layouts[value] = Layout(kind, columns)
        else:
            layouts[value] = Layout(seeds.get(value, "scalar"), columns)

    for argument in region.arguments:
        assign(argument)
    for op in region.ops:
        for result in op.results:
            assign(result)
            if layouts[result].kind == "scalar" and isinstance(op, math.Elementwise):
                # With one pick (or one expert) a row looks like a number per token; it stays what its operands are.
                kinds = {layouts[v].kind for v in op.operands if not isinstance(v, Constant)}
                for kind in ("picks", "experts"):
                    if kind in kinds:
                        layouts[result] = Layout(kind, 1)
    experts = {x.columns for x in layouts.values() if x.kind == "experts"}
    if len(experts) > 1:
        raise UnsupportedError(f"one row program handles rows of one length, found experts of {sorted(experts)}")
    return layouts


def experts_columns(layouts: dict[Value, Layout]) -> int:
    """E of a row program."""
    for layout in layouts.values():
        if layout.kind == "experts":
            return layout.columns
    return max((x.columns for x in layouts.values()), default=1)


def _demands(op: object) -> list[tuple[Value, str]]:
    """Which operands and results of a collective are rows of experts, and which are picks."""
    if isinstance(op, row.TopK):
        found: list[tuple[Value, str]] = [(op.x, "experts"), (op.values, "picks"), (op.indices, "picks")]
        of_token = isinstance(op.allowed, OpResult) and isinstance(op.allowed.op, row.Unsqueeze)  # also of one expert
        per_expert = op.allowed is not None and op.allowed.type.shape == op.x.type.shape and not of_token
        return [*found, (op.allowed, "experts")] if op.allowed is not None and per_expert else found
    if isinstance(op, row.GroupLimit):
        return [(op.x, "experts"), (op.allowed, "experts")]
    if isinstance(op, row.Gather):
        found = [(op.indices, "picks"), (op.y, "picks")]
        return [*found, (op.x, "experts")] if op.x.type.leading == "T" else found
    if isinstance(op, row.Scatter):
        return [(op.x, "picks"), (op.indices, "picks"), (op.y, "experts")]
    if isinstance(op, row.Membership):
        return [(op.indices, "picks"), (op.y, "experts")]
    if isinstance(op, row.Bitmap):
        return [(op.indices, "picks"), (op.y, "bytes")]
    if isinstance(op, row.Given | row.Append):
        return [(op.indices, "picks"), (op.y, "picks")]
    if isinstance(op, row.First):
        return [(op.like, "experts"), (op.y, "experts")]
    if isinstance(op, col.Count):
        return [(op.indices, "picks")]
    return []


def _columns(value: Value) -> int:
    if value.type.rank == 0 or (value.type.rank == 1 and not isinstance(value.type.shape[0], int)):
        return 1  # a number, or one a token
    last = value.type.shape[-1]
    if not isinstance(last, int):
        raise InternalError(f"a row program needs constant row lengths, found {value.type}")
    return last


def _values(region: Block) -> list[Value]:
    values: list[Value] = list(region.arguments)
    for op in region.ops:
        values.extend(op.results)
    return values


def only_written(block: Block, value: Value) -> bool:
    """Whether a value's only use is to leave the block, as it is or rounded."""
    users = [op for op in block.ops if value in op.operands]
    casts = [op for op in users if isinstance(op, math.Cast)]
    return bool(users) and all(
        op is block.terminator or (op in casts and only_written(block, op.results[0])) for op in users
    )


def sparse_results(region: Block) -> dict[Value, row.Scatter | row.Membership]:
    """Results of a row program that are zeros but for the picks, and need not be in registers; with what makes them."""
    found: dict[Value, row.Scatter | row.Membership] = {}
    for value in region.terminator.operands:
        made = value.op if isinstance(value, OpResult) else None
        if isinstance(made, math.Cast):
            made = made.x.op if isinstance(made.x, OpResult) else None
        if not isinstance(made, row.Scatter | row.Membership) or not only_written(region, made.y):
            continue
        adds_up = isinstance(made, row.Scatter) and row.are_given(made.indices)
        if not adds_up and (isinstance(made, row.Scatter) or made.size >= SPARSE * _columns(made.indices)):
            found[value] = made
    return found


class _Classes:
    """Union-find over values."""

    def __init__(self) -> None:
        self._parent: dict[Value, Value] = {}

    def root(self, value: Value) -> Value:
        while value in self._parent:
            value = self._parent[value]
        return value

    def join(self, a: Value, b: Value) -> None:
        a, b = self.root(a), self.root(b)
        if a is not b:
            self._parent[b] = a


def read_in_registers(region: Block, argument: BlockArgument) -> bool:
    """Whether the values of an input are used other than by a gather, which reads memory itself."""
    for op in region.ops:
        if isinstance(op, row.Gather):
            if argument is op.indices:
                return True
        elif argument in op.operands[: operands_read(op)]:
            return True
    return False


def operands_read(op: Op) -> int | None:
    """How many operands an op reads the values of; those after them only say how many rows there are."""
    if isinstance(op, col.ColumnReduction | col.Spread | math.Broadcast):
        return 1
    if isinstance(op, ColFinish):  # after all rows
        return 0
    return 0 if isinstance(op, col.Rows | row.First) else None

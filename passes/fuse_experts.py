"""``fuse-experts``: dispatch, products with prologue and epilogue, combine, and what is left, become kernels.

A value that has to lie in memory (an operand of a product or of combine, a result, what backward keeps) is written by
the latest product or combine it depends on; if it depends on none, by a product that has what it is computed from at
hand, and else by a ``kernel.slot_rows``. Whatever else is elementwise is computed again wherever it is needed. A
gather in front of a product is its prologue: rows are read where they are. The ops of a router are left, one after
the other and in their place between the kernels, for ``fuse-score-topk``: in two places, where a loss needs what a
dispatch has counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from moesaic.ir.core import Block, BlockArgument, Constant, Function, Module, Op, OpResult, Value, Yield, create_one
from moesaic.ir.ops import kernel, math, row, slot
from moesaic.passes.manager import Pass, PassContext
from moesaic.passes.rewriting import inserting_before, replace_op
from moesaic.passes.row_part import row_part

_PRODUCTS = (slot.GroupedLinear, slot.Linear)
_WGRADS = (slot.GroupedWgrad, slot.Wgrad)
_HEAVY = (*_PRODUCTS, slot.Combine)
_LIGHT = (math.Elementwise, slot.Split, slot.Join, slot.OfPick, slot.ExpertRows, slot.Gather, row.Sum)


@dataclass(frozen=True)
class FuseExperts(Pass):
    """Outlines every op over slots into ``kernel.`` ops."""

    name: ClassVar[str] = "fuse-experts"
    requires: ClassVar[str | None] = "expanded"

    def run(self, module: Module, context: PassContext) -> bool:
        changed = False
        for number, function in enumerate(module.functions):
            if any(op.name.startswith("slot.") for op in function.body.ops):
                _Fusion(function, f"C{number or ''}").run()
                changed = True
        return changed


class _Fusion:
    """One function: what lies in memory and who writes it, then the kernels."""

    def __init__(self, function: Function, blocks_symbol: str) -> None:
        self.function = function
        self.body = function.body
        self.blocks_symbol = blocks_symbol
        self.homes: dict[Value, Op | None] = {}
        """Values that are to lie in memory, and the product or combine that writes each; None is a slot_rows."""
        self.memory: dict[Value, Value] = {}
        """Where values lie, once the kernel that writes them is made."""
        self.made: list[Op] = []
        self.wgrad_sums: dict[Op, list[Op]] = {}
        self.shared: set[Value] = set()
        """Products that other kernels read, as they lie in memory."""
        self.routers = _routers(self.body)
        _drop_sums_of_one(self.body)

    def run(self) -> None:
        self._store_operands()
        self._place()
        ops = self.body.ops[:-1]
        terminator = self.body.terminator
        waiting: list[_Unit] = list(self.routers)
        waiting += [_Dispatch(op, self.blocks_symbol) for op in ops if isinstance(op, slot.Dispatch)]
        waiting += self._kernels(ops)
        while waiting:
            ready = [unit for unit in waiting if all(map(self._is_there, unit.reads))]
            if not ready:
                self.function.body.ops[0].fail("no order of kernels computes every value before it is read")
            for unit in ready:
                ops_made, values = unit.make(self.memory)
                self.memory.update(zip(unit.values, values, strict=True))
                self.made += ops_made
            waiting = [unit for unit in waiting if unit not in ready]
        self.body.ops = []
        for op in self.made:
            self.body.append(op)
        terminator.operands = [self.memory.get(v, v) for v in terminator.operands]
        self.body.append(terminator)

    def _is_there(self, value: Value) -> bool:
        made = any(value in router.values for router in self.routers)
        return value in self.memory or (isinstance(value, BlockArgument) and not made)

    # ------------------------------------------------------------------------------------------- what is in memory

    def _store_operands(self) -> None:
        """Has sums over experts read what is stored: the rows of a wgrad's operand where they are the same."""
        for op in list(self.body.ops):
            if not isinstance(op, slot.ExpertSums):
                continue
            wgrads = [w for w in self.body.ops if isinstance(w, _WGRADS)]
            found = next((w for w in wgrads if _summed(w, op.x) is not None), None)
            if found is None:  # rows of their own, beside a gradient of as many columns
                columns = op.x.type.shape[-1]
                found = next((w for w in wgrads if any(v.type.shape[-1] == columns for v in w.operands[:2])), None)
                if found is None:
                    op.fail(
                        "sums rows that no gradient of a weight has as many columns as",
                        "the bias of a product has its gradient beside that of its weight",
                    )
                with inserting_before(self.body, op):
                    op.operands[0] = slot.stored(op.x, found.operands[0].type.dtype)
            self.wgrad_sums.setdefault(found, []).append(op)
            operand = _summed(found, op.x)
            if operand is not None and op.x is _unrounded(operand):
                op.operands[0] = operand

    def _needed(self) -> list[Value]:
        """Values that have to lie in memory, in the order of the ops that make them."""
        wanted: dict[Value, None] = {}

        def need(value: Value) -> None:
            if isinstance(value, OpResult) and not isinstance(value.op, slot.Dispatch | row.Given):
                wanted[value] = None

        def operand(value: Value) -> None:
            op = _op(value)
            need(op.x if isinstance(op, slot.Gather) else value)

        for value in self.shared:
            need(value)
        for value in [v for router in self.routers for v in router.reads]:
            if not self._after_wgrad(value):
                need(value)
        for op in self.body.ops:
            if isinstance(op, row.Sum) and op.y.type.leading != slot.SLOTS:
                need(op.y)
            elif isinstance(op, slot.Gather):
                need(op.x)
            elif isinstance(op, _PRODUCTS):
                operand(op.x)
            elif isinstance(op, _WGRADS):
                operand(op.a)
                operand(op.b)
                for sums in self.wgrad_sums.get(op, ()):
                    if _summed(op, sums.operands[0]) is None:
                        operand(sums.operands[0])
            elif isinstance(op, slot.OfPick):
                need(op.x)
            elif isinstance(op, slot.Combine):
                need(op.x)
                if op.weights is not None:
                    need(op.weights)
            elif isinstance(op, slot.ToPicks):
                for value in _numbers(op.x):
                    need(value)
        for value in self.body.terminator.operands:
            made_by = _op(value)
            if isinstance(made_by, (*_LIGHT, *_HEAVY)) and not self._after_wgrad(value):
                need(value)
        order: dict[Value, int] = {r: i for i, op in enumerate(self.body.ops) for r in op.results}
        return sorted(wanted, key=lambda v: order[v])

    def _after_wgrad(self, value: Value) -> bool:
        """Whether a value is elementwise after a weight's gradient, sums over experts, or numbers of picks."""
        op = _op(value)
        while isinstance(op, math.Elementwise | slot.Accumulate):
            inside = [o for o in map(_op, op.operands) if o is not None]
            if len(inside) != 1:
                return False
            op = inside[0]
        return isinstance(op, (*_WGRADS, slot.ExpertSums, slot.ToPicks))

    def _place(self) -> None:
        index = {op: i for i, op in enumerate(self.body.ops)}
        again = True
        while again:  # a product that another one's epilogue reads becomes one more value in memory
            again = False
            self.homes = {}
            free: list[Value] = []
            for value in self._needed():
                latest = self._latest(value, index)
                self.homes[value] = latest
                if latest is None:
                    free.append(value)
            for value in free:
                self.homes[value] = self._beside(value)
            for value, home in self.homes.items():
                for product in self._crossing(value, home):
                    self._round(product)
                    again = True
                if again:
                    break
            index = {op: i for i, op in enumerate(self.body.ops)}

    def _latest(self, value: Value, index: dict[Op, int]) -> Op | None:
        found: Op | None = None
        op = _op(value)
        if isinstance(op, _HEAVY):
            return op
        if isinstance(op, slot.Gather | slot.OfPick):  # from memory, and for other rows
            return None
        for operand in op.operands if isinstance(op, _LIGHT) else ():
            if operand in self.homes:
                # A sum of a row is complete, and read, only after the kernel that makes it.
                other = None if _is_sum(operand) else self.homes[operand]
            else:
                other = self._latest(operand, index)
            if other is not None and (found is None or index[other] > index[found]):
                found = other
        return found

    def _beside(self, value: Value) -> Op | None:
        """A product that loads what a value is computed from, and does not depend on the value."""
        leaves = self._leaves(value)
        for op in self.body.ops:
            if not isinstance(op, _PRODUCTS) or op.x.type.shape[0] != value.type.shape[0]:
                continue
            columns = op.sizes()[1]
            if value.type.shape[-1] not in (1, columns, 2 * columns, columns // 2):
                continue
            loaded = {leaf for v, home in self.homes.items() if home is op for leaf in self._leaves(v)}
            if leaves & loaded and value not in _ancestors(op):
                return op
        return None

    def _leaves(self, value: Value) -> set[Value]:
        """Rows of several columns in memory that a value is computed from by elementwise ops."""
        op = _op(value)
        if isinstance(op, slot.OfPick) or (_is_sum(value) and value in self.homes):
            return set()  # a number
        if op is None or not isinstance(op, _LIGHT) or isinstance(op, slot.Gather):
            source = op.operands[0] if isinstance(op, slot.Gather) else value
            return {source} if value.type.rank == 2 and value.type.shape[1] != 1 else set()
        return {leaf for operand in op.operands for leaf in self._leaves(operand)}

    def _crossing(self, value: Value, home: Op | None) -> list[slot.Product | slot.Combine]:
        """Products and combines other than its home whose bare results a value is computed from."""
        found: list[slot.Product | slot.Combine] = []

        def visit(v: Value, top: bool) -> None:
            if not top and v in self.homes and self.homes[v] is not home:
                return
            op = _op(v)
            if isinstance(op, slot.Product | slot.Combine) and op is not home:
                found.append(op)
            elif isinstance(op, _LIGHT):
                for operand in op.operands:
                    visit(operand, False)

        visit(value, True)
        return found

    def _round(self, product: slot.Product | slot.Combine) -> None:
        """Lets other kernels read a product as it lies in memory: in the type of its operands, or as it is where it has
        one column only."""
        result = product.result
        if result.type.shape[-1] == 1:
            self.shared.add(result)
            return
        after = self.body.ops[self.body.ops.index(product) + 1]
        with inserting_before(self.body, after):
            stored = slot.stored(result, product.x.type.dtype)
            read = create_one("math.cast", stored, dtype=result.type.dtype.value)
        self.shared.add(stored)
        kept = {_op(stored), _op(read)}
        for op in self.body.ops:
            if op not in kept:
                op.operands = [read if v is result else v for v in op.operands]

    # ------------------------------------------------------------------------------------------------------ kernels

    def _kernels(self, ops: Sequence[Op]) -> list[_Outline]:
        outlines: list[_Outline] = []
        in_memory = set(self.homes) | {r for op in ops if isinstance(op, slot.Dispatch) for r in op.results}
        for op in ops:
            if isinstance(op, _HEAVY):
                values = [v for v, home in self.homes.items() if home is op]
                kind: type[kernel.Region] = kernel.Combine if isinstance(op, slot.Combine) else kernel.Product
                if values:
                    outlines.append(_Outline(kind, values, in_memory - set(values)))
            elif isinstance(op, _WGRADS):
                sources = [op.result, *(s.result for s in self.wgrad_sums.get(op, ()))]
                outlines.append(_Outline(kernel.Wgrad, [self._last(v) for v in sources], in_memory))
            elif isinstance(op, slot.ToPicks):
                outlines.append(_Outline(kernel.ToPicks, [self._last(op.result)], in_memory))
        homeless: dict[tuple[object, ...], list[Value]] = {}
        for value, home in self.homes.items():
            if home is None:
                summed = _op(value)
                source = summed.x if isinstance(summed, row.Sum) else value
                widest = max(_columns(leaf) for leaf in (source, *self._leaves(source)))
                homeless.setdefault((value.type.shape[0], widest), []).append(value)
        for values in homeless.values():
            outlines.append(_Outline(kernel.SlotRows, values, in_memory - set(values)))
        return outlines

    def _last(self, value: Value) -> Value:
        """A value after the casts that only it goes through."""
        users = self.body.users(value)
        after = (math.Elementwise, slot.Accumulate)
        while len(users) == 1 and isinstance(users[0], after) and value not in self.body.terminator.operands:
            value = users[0].results[0]
            users = self.body.users(value)
        return value


class _Unit:
    """What is made at once: the values it leaves in memory, from those that it reads there."""

    values: Sequence[Value]
    reads: Sequence[Value]

    def make(self, memory: dict[Value, Value]) -> tuple[Sequence[Op], Sequence[Value]]:
        """The ops, and where the values are then, once all that is read lies where `memory` says."""
        raise NotImplementedError


def _routers(body: Block) -> list[_Router]:
    """The ops of a router that a body has, in one unit or in two: those after a dispatch need what it has counted."""
    part = row_part(body)
    after: set[Op] = set()
    for op in body.ops:
        if op in part and any(isinstance(_op(v), slot.Dispatch) or _op(v) in after for v in op.operands):
            after.add(op)
    return [_Router(body, ops) for ops in (part - after, after) if ops]


class _Router(_Unit):
    """Ops of a router, taken out of a body: to the others, their results are arguments."""

    def __init__(self, body: Block, part: set[Op]) -> None:
        self.ops = [op for op in body.ops if op in part]
        others = [op for op in body.ops if op not in part]
        outside = Block()
        stand_ins: dict[Value, Value] = {}
        for op in self.ops:
            for r in op.results:
                if any(r in other.operands for other in others):
                    stand_ins[r] = outside.add_argument(r.type, r.name)
        self.results = list(stand_ins)
        self.values = list(stand_ins.values())
        made_inside = {r for op in self.ops for r in op.results}
        read = (v for op in self.ops for v in op.operands if not isinstance(v, Constant) and v not in made_inside)
        self.reads = list(dict.fromkeys(read))
        body.ops = others
        for op in others:
            op.operands = [stand_ins.get(v, v) for v in op.operands]

    def make(self, memory: dict[Value, Value]) -> tuple[Sequence[Op], Sequence[Value]]:
        for op in self.ops:
            op.operands = [memory.get(v, v) for v in op.operands]
        return self.ops, self.results


class _Dispatch(_Unit):
    """The three steps of a dispatch."""

    def __init__(self, op: slot.Dispatch, blocks_symbol: str) -> None:
        given = _op(op.indices)
        guarded = isinstance(given, row.Given) and given.allowed is None
        self.op = op
        self.blocks_symbol = blocks_symbol
        self.indices = given.indices if guarded else op.indices  # type: ignore[union-attr]
        self.reads = [self.indices]
        self.values = op.results

    def make(self, memory: dict[Value, Value]) -> tuple[Sequence[Op], Sequence[Value]]:
        indices = memory.get(self.indices, self.indices)
        attributes = dict(self.op.attributes)
        count = kernel.DispatchCount([indices], {**attributes, "blocks": self.blocks_symbol})
        scan = kernel.DispatchScan([count.table], attributes)
        names = [r.name for r in self.op.results]
        scatter = kernel.DispatchScatter([indices, scan.bases, scan.found], attributes, result_names=names)
        return (count, scan, scatter), scatter.results


class _Outline(_Unit):
    """A kernel to be: the values it writes, and the ops they are computed by, from what is in memory."""

    def __init__(
        self,
        kind: type[kernel.Region],
        values: Sequence[Value],
        in_memory: Iterable[Value],
    ) -> None:
        self.kind = kind
        self.values = list(values)
        outside = set(in_memory)
        ops: dict[Op, None] = {}
        reads: dict[Value, None] = {}

        def visit(value: Value) -> None:
            if isinstance(value, Constant):
                return
            made_by = _op(value)
            if made_by is None or value in outside:
                reads[value] = None
                return
            if made_by in ops:
                return
            for operand in made_by.operands:
                visit(operand)
            ops[made_by] = None

        for value in self.values:
            visit(value)
        self.ops = list(ops)
        self.reads = list(reads)

    def make(self, memory: dict[Value, Value]) -> tuple[Sequence[Op], Sequence[Value]]:
        region = Block()
        inside: dict[Value, Value] = {v: region.add_argument(v.type, v.name) for v in self.reads}
        for op in self.ops:
            region.append(op.clone(inside))
        region.append(Yield([inside[v] for v in self.values]))
        names = [v.name for v in self.values]
        operands = [memory.get(v, v) for v in self.reads]
        op = self.kind(operands, {}, region=region, result_names=names)
        return [op], op.results


def _op(value: Value) -> Op | None:
    return value.op if isinstance(value, OpResult) else None


def _drop_sums_of_one(body: Block) -> None:
    """A row of one column is its own sum: then there is nothing to wait for before the sum is read."""
    for op in list(body.ops):
        if isinstance(op, row.Sum) and op.x.type.shape[-1] == 1:
            value = op.x
            if value.type != op.y.type:
                with inserting_before(body, op):
                    value = create_one("math.cast", value, dtype=op.y.type.dtype.value)
            replace_op(body, op, [value])


def _is_sum(value: Value) -> bool:
    return isinstance(_op(value), row.Sum)


def _summed(wgrad: Op, rows: Value) -> Value | None:
    """The operand of a weight's gradient whose rows these are, perhaps rounded or without a number a row."""
    for operand in wgrad.operands[:2]:
        if rows is operand or rows is _unrounded(operand):
            return operand
        op = _op(rows)
        if isinstance(op, math.Mul) and isinstance(_op(operand), slot.Gather) and operand in op.operands:
            return operand
    return None


def _unrounded(value: Value) -> Value:
    op = _op(value)
    return op.x if isinstance(op, math.Cast) and op.x.type.dtype.is_float else value


def _numbers(value: Value) -> list[Value]:
    """The numbers of slots in memory that others are computed from: sums of rows, and what has one column anyway."""
    op = _op(value)
    if isinstance(op, math.Elementwise):
        return [n for operand in op.operands for n in _numbers(operand)]
    return [value] if op is not None else []


def _columns(rows: Value) -> int:
    columns = rows.type.shape[-1] if rows.type.rank == 2 else 1
    return columns if isinstance(columns, int) else 1


def _ancestors(op: Op) -> set[Value]:
    found: set[Value] = set()
    waiting = list(op.operands)
    while waiting:
        value = waiting.pop()
        if value not in found:
            found.add(value)
            made_by = _op(value)
            waiting += made_by.operands if made_by is not None else []
    return found

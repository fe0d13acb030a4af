"""Elementwise ops of a row program: those in one layout that follow one another share a loop over a lane's slots."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from moesaic.codegen.lines import INTEGERS, definition, register
from moesaic.codegen.row_program.text import Text
from moesaic.ir.core import Constant, Op, OpResult, Value
from moesaic.ir.ops import col, math, row
from moesaic.ir.types import DType
from moesaic.passes.row_layout import Layout, operands_read


class Runs:
    """Takes the ops of a region apart into runs of elementwise ops, and collectives on their own."""

    def __init__(self, text: Text) -> None:
        self.text = text

    def emit(self, collective: Callable[[Op], list[str]]) -> None:
        """Writes the sections of the loop body; `collective` has the lines of an op that is not elementwise."""
        text = self.text
        casts = [op for op in text.region.ops[:-1] if self._is_store_cast(op)]
        onto = {op: text.scattered_onto(op) for op in text.region.ops[:-1]}
        added = {o for found in onto.values() if found is not None for o in (found.add, found.broadcast)}
        left_out = {*casts, *added}
        ops = [op for op in self._in_order() if op not in left_out and not self._is_within_sums(op)]
        late = self._late(ops)
        waiting = [op for op in ops if op not in late]
        for op in casts:
            text.parameters.share(op.results[0], op.operands[0])
        ready: set[Value] = set(text.region.arguments)
        while waiting:
            head = waiting[0]
            if not isinstance(head, math.Elementwise):
                if head not in text.sparse.values():
                    self._add(collective(head))
                waiting.pop(0)
                ready.update(head.results)
                found = onto[head]
                if found is not None:
                    ready.add(found.add.y)
                continue
            layout = text.layouts[head.results[0]]
            run: list[math.Elementwise] = []
            rest: list[Op] = []
            for op in waiting:
                fits = isinstance(op, math.Elementwise) and text.layouts[op.results[0]] == layout
                made = self._behind(op, late) if fits else set()
                if fits and self._can_be_made(made, ready):
                    run += [o for o in ops if o in made and o not in run and isinstance(o, math.Elementwise)]
                    ready.update(op.results)
                else:
                    rest.append(op)
            self._add(self._run(run, layout, late))
            waiting = rest

    def _in_order(self) -> list[Op]:
        """The ops of the region. Sums in shared memory come ahead of the first selection, with what they need, unless
        that is a selection: nothing waits for them there, and no row of scores lives while picks are found."""
        text = self.text
        ops = list(text.region.ops[:-1])
        first = next((number for number, op in enumerate(ops) if isinstance(op, row.TopK | row.GroupLimit)), 0)
        early: set[Op] = set()
        for op in ops[first:]:
            if isinstance(op, col.Sum) and text.in_shared(op):
                needed = self._behind(op, ops[first:])
                if not any(isinstance(o, row.TopK | row.GroupLimit) for o in needed):
                    early |= needed
        behind = ops[first:]
        return [*ops[:first], *(o for o in behind if o in early), *(o for o in behind if o not in early)]

    def _late(self, ops: Sequence[Op]) -> set[Op]:
        """Elementwise ops that make rows over experts of nothing but numbers, of all tokens or of one, for other such
        ops: each run that needs them computes them, for a row in registers costs more than an instruction or two."""
        layouts, late = self.text.layouts, set[Op]()
        of_rows = {op for op in ops if isinstance(op, math.Elementwise) and layouts[op.results[0]].kind == "experts"}
        for op in (o for o in ops if o in of_rows):
            read = [v for v in op.operands[: operands_read(op)] if not isinstance(v, Constant)]
            rows = [v for v in read if layouts[v].kind == "experts"]
            if all(isinstance(v, OpResult) and v.op in late for v in rows) and of_rows.issuperset(
                self.text.region.users(op.results[0])
            ):
                late.add(op)
        return late

    @staticmethod
    def _can_be_made(ops: Collection[Op], ready: Collection[Value]) -> bool:
        """Whether all that some ops read is there, or made by one of them."""
        read = (v for op in ops for v in op.operands[: operands_read(op)] if not isinstance(v, Constant))
        return all(v in ready or (isinstance(v, OpResult) and v.op in ops) for v in read)

    @staticmethod
    def _behind(op: Op, among: Collection[Op]) -> set[Op]:
        """An op and those of some that it needs, by whatever way."""
        found, known = {op}, set(among)
        open_ops = [op]
        while open_ops:
            op = open_ops.pop()
            for value in op.operands[: operands_read(op)]:
                if isinstance(value, OpResult) and value.op in known and value.op not in found:
                    found.add(value.op)
                    open_ops.append(value.op)
        return found

    def _add(self, section: list[str]) -> None:
        if section:
            self.text.body.append(section)

    def _is_store_cast(self, op: Op) -> bool:
        """A rounding that only feeds a store, or another width of integers: the store converts."""
        if not isinstance(op, math.Cast) or op.y.type.dtype not in (DType.BF16, DType.F16, DType.I16, DType.I64):
            return False
        if op.y.type.dtype in INTEGERS and op.x.type.dtype not in INTEGERS:
            return False
        users = self.text.region.users(op.results[0])
        return all(u is self.text.region.terminator for u in users) and not isinstance(op.operands[0], Constant)

    def _is_within_sums(self, op: Op) -> bool:
        return any(self.text.quotient_of_sums(v) is op for v in op.results)

    def _run(self, run: Sequence[math.Elementwise], layout: Layout, late: Collection[Op]) -> list[str]:
        text = self.text
        if layout.kind in ("vector", "uniform"):
            self._before_the_loop(run, layout)
            return []
        if not layout.is_row:
            return [self._number(op) for op in run]
        inside = set(run)
        index = "i" if layout.kind == "experts" else "p"
        rows = text.rows(layout)
        declared: list[str] = []
        body: list[str] = []
        for op in run:
            value = op.results[0]
            users = text.region.users(value)
            if op not in late and any(self._is_store_cast(u) or u not in inside for u in users):
                declared.append(f"{register(value)} {text.keep(value)}[{rows}::kSlots];")
            body.append("  " + self._element(op, index))
        return [
            *declared,
            "#pragma unroll",
            f"for (int {index} = 0; {index} < {rows}::kSlots; ++{index}) {{",
            *body,
            "}",
        ]

    def _before_the_loop(self, run: Sequence[math.Elementwise], layout: Layout) -> None:
        """What is the same for all tokens is computed once."""
        text = self.text
        if layout.kind == "uniform":
            text.setup += [self._number(op) for op in run]
            return
        rows = text.vector_rows(layout)
        text.setup += [f"{register(op.results[0])} {text.keep(op.results[0])}[{rows}::kSlots];" for op in run]
        text.setup += ["#pragma unroll", f"for (int i = 0; i < {rows}::kSlots; ++i) {{"]
        text.setup += ["  " + self._element(op, "i") for op in run] + ["}"]

    def _number(self, op: math.Elementwise) -> str:
        return definition(op, self.text.read, self.text.name)

    def _element(self, op: math.Elementwise, index: str) -> str:
        """The line of an element: of an array that outlives the loop, or a number within it."""
        text = self.text
        if op.results[0] not in text.kept:
            return definition(op, lambda v: text.read(v, index), text.name)
        expression = op.cuda_expression(*(text.read(v, index) for v in op.operands))
        return f"{text.read(op.results[0], index)} = {expression};  // {text.comment(op)}"

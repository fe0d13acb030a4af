"""Picks that come from elsewhere, and values on their way from the experts' layout to the picks' and back."""

from __future__ import annotations

from moesaic.codegen.row_program.tables import Tables
from moesaic.codegen.row_program.text import MAY_BE_AWAY, Text
from moesaic.ir.core import BlockArgument
from moesaic.ir.ops import row


class Picks:
    """The lines of these ops."""

    def __init__(self, text: Text, tables: Tables) -> None:
        self.text = text
        self.tables = tables

    def given(self, op: row.Given) -> list[str]:
        text = self.text
        picks, name = text.rows_of(op.y), text.keep(op.y)
        source = text.array(op.indices)
        allowed = f"{text.read(op.allowed)} && " if op.allowed is not None else ""
        return [
            f"int {name}[{picks}::kSlots];",
            "#pragma unroll",
            f"for (int p = 0; p < {picks}::kSlots; ++p) {{",
            f"  const bool here = {allowed}{source}[p] >= 0 && {source}[p] < {op.size};",
            f"  {name}[p] = here ? static_cast<int>({source}[p]) : -1;",
            "}",
        ]

    def append(self, op: row.Append) -> list[str]:
        text = self.text
        name, picks = text.keep(op.y), text.rows_of(op.y)
        before = text.layouts[op.indices].columns
        source = text.array(op.indices)
        slots = f"{text.rows_of(op.indices)}::kSlots"
        return [
            f"int {name}[{picks}::kSlots];",
            "#pragma unroll",
            f"for (int p = 0; p < {picks}::kSlots; ++p) {{",
            f"  const int place = {picks}::column(p, lane);",
            f"  {name}[p] = place < {before} ? {source}[p < {slots} ? p : 0] : {op.first} + place - {before};",
            "}",
        ]

    def first(self, op: row.First) -> list[str]:
        name = self.text.keep(op.y)
        return [
            f"bool {name}[Experts::kSlots];",
            "#pragma unroll",
            f"for (int i = 0; i < Experts::kSlots; ++i) {name}[i] = Experts::column(i, lane) < {op.n};",
        ]

    def bitmap(self, op: row.Bitmap) -> list[str]:
        text = self.text
        picks, bytes, name = text.rows_of(op.indices), text.rows_of(op.y), text.keep(op.y)
        return [
            f"int {name}[{bytes}::kSlots];",
            f"moesaic::bitmap<{bytes}, {picks}>({text.array(op.indices)}, {name}, lane);",
        ]

    def gather(self, op: row.Gather) -> list[str]:
        text = self.text
        picks, name = text.rows_of(op.y), text.keep(op.y)
        lines = [f"float {name}[{picks}::kSlots];"]
        indices = text.array(op.indices)
        away = MAY_BE_AWAY if row.may_be_away(op.indices) else ""
        if isinstance(op.x, BlockArgument):
            pointer = text.pointers[op.x]
            where = pointer if op.x.type.rank == 1 else f"{pointer} + token * {pointer}_stride"
            return [*lines, f"moesaic::gather<{picks}{away}>({where}, {indices}, {name}, lane);"]
        staged = self.tables.of_experts("gathered_from", "float", "a token's row that is gathered from")
        source = text.array(op.x)
        call = f"moesaic::gather_registers<Experts, {picks}{away}>({source}, {indices}, {name}, {staged}, lane);"
        return [*lines, call]

    def scatter(self, op: row.Scatter) -> list[str]:
        text = self.text
        onto = text.scattered_onto(op)
        picks, name = text.rows_of(op.indices), text.keep(op.y if onto is None else onto.add.y)
        source, lines = text.picks_array(op.x, picks)
        if onto is not None:
            function, why = "scatter_onto", f"%{text.name(onto.base)}, which picks are added to and taken off again"
            table = self.tables.of_experts("base", "float", why, holds=text.array(onto.base))
            lines = [f"// {text.comment(o)}" for o in (onto.broadcast, onto.add)] + lines
        else:
            function = "scatter_added" if row.are_given(op.indices) else "scatter"
            why = "zeros, which picks are put into and cleared again"
            table = self.tables.of_experts("scattered", "float", why, zeroed=True)
        away = MAY_BE_AWAY if function != "scatter_added" and row.may_be_away(op.indices) else ""
        return [
            *lines,
            f"float {name}[Experts::kSlots];",
            f"moesaic::{function}<Experts, {picks}{away}>({source}, {text.array(op.indices)}, {name}, {table}, lane);",
        ]

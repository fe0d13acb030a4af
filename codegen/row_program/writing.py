"""What a row program writes: rows and numbers of the token at the end of the loop, sums over tokens after it."""

from __future__ import annotations

from moesaic.codegen.row_program.sums import Sums
from moesaic.codegen.row_program.tables import Tables
from moesaic.codegen.row_program.text import MAY_BE_AWAY, Text
from moesaic.ir.core import OpResult, Value
from moesaic.ir.errors import UnsupportedError
from moesaic.ir.ops import row
from moesaic.ir.ops.kernel import Ticket


class Writing:
    """Stores of the region's results."""

    def __init__(self, text: Text, tables: Tables, sums: Sums) -> None:
        self.text = text
        self.tables = tables
        self.sums = sums

    def emit(self) -> None:
        """Writes all stores."""
        text = self.text
        section: list[str] = []
        for value, pointer in text.results:
            if isinstance(value, OpResult) and value.op is text.finishing:
                continue  # the first block writes it, at the end
            layout = text.layout(value)
            name = text.name(value)
            if value in text.sparse:
                text.body.append(self._sparse(text.sparse[value], value, pointer))
            elif layout.kind == "column":
                self.sums.store(value, self.sums.in_memory(value, pointer))
            elif isinstance(value, OpResult) and isinstance(value.op, Ticket):
                text.finish += ["", f"if (blockIdx.x == 0 && threadIdx.x == 0) moesaic::store_one({pointer}, 0);"]
            elif layout.is_row:
                rows = text.rows(layout)
                where = f"{pointer} + token * {layout.columns}"
                align = text.result_align(layout, value)
                section.append(f"moesaic::store_row<{rows}, /*align=*/{align}>({where}, {name}, lane);")
            elif layout.kind == "scalar":
                cast = f"moesaic::from_float<{text.storage(value)}>({name})"
                section.append(f"if (lane == 0) moesaic::store_one({pointer} + token, {cast});")
            else:
                raise UnsupportedError(f"{text.op.symbol}: a row program cannot return {value.type}")
        if section:
            text.body.append(["if (active) {", *("  " + line for line in section), "}"])

    def _sparse(self, op: row.Scatter | row.Membership, value: Value, pointer: str) -> list[str]:
        """A result of zeros but for the picks, by way of a row of shared memory."""
        text = self.text
        layout = text.layout(value)
        picks = text.rows_of(op.indices)
        if isinstance(op, row.Scatter):
            source, lines = text.picks_array(op.x, picks)
        else:
            source = text.unique("picked_ones")
            lines = [
                f"bool {source}[{picks}::kSlots];",
                "#pragma unroll",
                f"for (int p = 0; p < {picks}::kSlots; ++p) {source}[p] = true;",
            ]
        size = value.type.dtype.bytes * text.experts
        why = f"zeros, which %{text.name(value)} is put into and cleared again"
        table = self.tables.row(f"{text.name(value)}_row", text.storage(value), "kExperts", size, why, zeroed=True)
        where = f"{pointer} + token * {layout.columns}"
        away = MAY_BE_AWAY if row.may_be_away(op.indices) else ""
        arguments = f"Experts, {picks}, /*align=*/{text.result_align(layout, value)}{away}"
        return [
            f"// {text.comment(op)}",
            *lines,
            f"moesaic::store_scattered<{arguments}>(",
            f"    {where}, {source}, {text.array(op.indices)}, {table}, lane, active);",
        ]

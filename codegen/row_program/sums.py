"""Sums and maxima of a row, which all of its lanes get; and sums over tokens, of which a block writes a partial row."""

from __future__ import annotations

from moesaic.codegen.lines import register
from moesaic.codegen.row_program.text import Text
from moesaic.ir.core import OpResult, Value
from moesaic.ir.ops import col, row


class Sums:
    """The lines of reductions; what sums over tokens need ahead of the loop and after it is written."""

    def __init__(self, text: Text) -> None:
        self.text = text

    def of_row(self, op: row.Sum | row.Max) -> list[str]:
        text = self.text
        [x] = op.operands
        layout = text.layout(x)
        if not layout.is_row:  # a row of one number
            return [f"const float {text.name(op.results[0])} = {text.read(x)};"]
        name, function = text.name(x), "row_sum" if isinstance(op, row.Sum) else "row_max"
        if isinstance(op, row.Max) and x in text.stored_rows:
            name, function = text.stored[x], "row_max_of_stored"
        call = f"moesaic::{function}<{text.rows(layout)}>({name}, lane)"
        return [f"const float {text.name(op.results[0])} = {call};"]

    # ----------------------------------------------------------------------------------------------- over tokens

    def count(self, op: col.Count) -> list[str]:
        text = self.text
        picks, name, indices = text.rows_of(op.indices), text.name(op.y), text.array(op.indices)
        size = self._counted(op)
        here = f" && {indices}[p] >= 0" if row.may_be_away(op.indices) else ""
        if text.block:  # long rows leave no shared memory for it
            pointer = next(p for value, p in text.results if value is op.y)
            row_of_block = self.in_memory(op.y, pointer)
            text.setup += [
                f"int* const {name} = {row_of_block};  // %{op.y.name or name}, picks of this block's tokens",
                f"for (int e = lane; e < {size}; e += kLanes) moesaic::store_one({name} + e, 0);",
                "__syncthreads();",
            ]
        else:
            text.setup += [
                f"__shared__ int {name}[{size}];  // %{op.y.name or name}, picks of this block's tokens",
                f"for (int e = threadIdx.x; e < {size}; e += kThreads) {name}[e] = 0;",
                "__syncthreads();",
            ]
        return [
            "#pragma unroll",
            f"for (int p = 0; p < {picks}::kSlots; ++p) {{",
            f"  if (active && {picks}::live(p, lane){here}) atomicAdd(&{name}[{indices}[p]], 1);",
            "}",
        ]

    def _counted(self, op: col.Count) -> str:
        """Among how many experts picks are counted: those of a row, but for who says otherwise."""
        return "kExperts" if op.size == self.text.experts else str(op.size)

    def over_tokens(self, op: col.Sum) -> list[str]:
        text = self.text
        name, note = text.name(op.y), f"  // %{op.y.name or text.name(op.y)}, "
        rows, index = self._summed_rows(op)
        if text.in_shared(op):
            text.setup += [
                f"__shared__ moesaic::SharedSlots<{rows}, kThreads> {name};{note}each lane's share",
                f"{name}.clear(threadIdx.x);",
            ]
            added, why = self._added(op, "sum", index)
            return [f"if (active) {name}.update(threadIdx.x, [&](int {index}, float sum) {{ return {added}; }});{why}"]
        text.setup += [
            f"float {name}[{rows}::kSlots];{note}this lane's share of the sums over tokens",
            "#pragma unroll",
            f"for (int i = 0; i < {rows}::kSlots; ++i) {name}[i] = 0.0f;",
        ]
        if not index:
            return [f"if (active) {name}[0] += {text.read(op.x)};"]
        added, why = self._added(op, f"{name}[{index}]", index)
        return [
            "#pragma unroll",
            f"for (int {index} = 0; {index} < {rows}::kSlots; ++{index}) {{",
            f"  if (active) {name}[{index}] = {added};{why}",
            "}",
        ]

    def _added(self, op: col.Sum, sum: str, index: str) -> tuple[str, str]:
        """A sum with a token's value, and a comment where that is made within."""
        read, quotient = self.text.read, self.text.quotient_of_sums(op.x)
        if quotient is None:
            return f"{sum} + {read(op.x, index)}", ""
        divided = f"moesaic::add_quotient({sum}, {read(quotient.a, index)}, {read(quotient.b)})"
        return divided, f"  // {self.text.comment(quotient)}"

    def rows(self, op: col.Rows) -> list[str]:
        """How many tokens or sequences there are, ahead of the loop."""
        count = "tokens" if op.x.type.leading == "T" else "sequences"
        name, said = self.text.name(op.y), self.text.comment(op)
        self.text.setup.append(f"const float {name} = static_cast<float>({count});  // {said}")
        return []

    def store(self, value: Value, row_of_block: str) -> None:
        """Writes a block's partial row after the loop over tokens, to where `in_memory` or `in_first_block` says."""
        text = self.text
        assert isinstance(value, OpResult)
        name = text.name(value)
        if text.block and isinstance(value.op, col.Sum):  # each column is summed in one lane
            rows, _ = self._summed_rows(value.op)
            align = text.result_align(text.layout(value.op.x), value)
            text.finish.append("")
            name = self._in_registers(value.op)
            text.finish.append(f"moesaic::store_row<{rows}, /*align=*/{align}>({row_of_block}, {name}, lane);")
            return
        if text.block:  # counts are where they belong
            return
        if isinstance(value.op, col.Count):
            text.finish += [
                "",
                "__syncthreads();",
                f"for (int e = threadIdx.x; e < {self._counted(value.op)}; e += kThreads) {{",
                f"  moesaic::store_one({row_of_block} + e, {name}[e]);",
                "}",
            ]
            return
        assert isinstance(value.op, col.Sum)
        rows, _ = self._summed_rows(value.op)
        scratch = text.unique(f"{name}_scratch")
        text.finish.append("")
        name = self._in_registers(value.op)
        text.finish += [
            f"__shared__ float {scratch}[kThreads / 32 * {rows}::kColumns];",
            f"moesaic::store_column_sums<{rows}, kThreads>({name}, {scratch}, {row_of_block}, lane);",
        ]

    def _in_registers(self, op: col.Sum) -> str:
        """A lane's share of sums as a register array, after the loop over tokens."""
        text, name = self.text, self.text.name(op.y)
        if not text.in_shared(op):
            return name
        rows, _ = self._summed_rows(op)
        collected = text.unique(f"{name}_collected")
        text.finish += [f"float {collected}[{rows}::kSlots];", f"{name}.read(threadIdx.x, {collected});"]
        return collected

    def in_memory(self, value: Value, pointer: str) -> str:
        """A block's own row of the partial rows of a sum over tokens."""
        return f"{pointer} + static_cast<long long>(blockIdx.x) * {self.text.layouts[value].columns}"

    def in_first_block(self, value: Value, rows: str) -> str:
        """The same where the first block of a cluster has all of them, an array in shared memory."""
        return f"moesaic::InFirstBlock<{register(value)}>{{{rows}[blockIdx.x]}}"

    def _summed_rows(self, op: col.Sum) -> tuple[str, str]:
        """The row type of what is summed, and the index of its slots; a number per token is a row of one."""
        layout = self.text.layout(op.x)
        if layout.is_row:
            return self.text.rows(layout), "i"
        return self.text.alias("Single", "moesaic::Row</*columns=*/1, kLanes, /*vec=*/1>", "a number per token"), ""

"""What a row program whose blocks are one cluster does after the rows: the first finishes the sums over tokens."""

from __future__ import annotations

from moesaic.codegen.column_values import ColumnValues
from moesaic.codegen.lines import register
from moesaic.codegen.row_program.sums import Sums
from moesaic.codegen.row_program.text import Text
from moesaic.ir.core import Value, columns_of
from moesaic.ir.ops.kernel import ColFinish


class Finishing:
    """The lines of a ``kernel.col_finish`` at the end of a row program.

    Attributes:
        read: by value of the finish's region, what it reads in memory, an argument of the row program's.
    """

    def __init__(self, text: Text, op: ColFinish, sums: Sums) -> None:
        assert op.region is not None
        self.text = text
        self.op = op
        self.region = op.region
        self.sums = sums
        finished = self.region.arguments[: op.partials]
        self.computed = ColumnValues(self.region, finished, text.parameters)
        self.read: dict[Value, Value] = {}
        for value, given in zip(self.region.arguments[op.partials :], op.operands[op.partials :], strict=True):
            if value in self.computed.loaded:
                self.read[value] = given
            else:  # only asked for the number of its rows
                text.parameters.share(value, given)

    def emit(self) -> None:
        """Writes all of it, behind what is written after the loop already."""
        text = self.text
        rows: dict[Value, str] = {}  # by sum in the finish's region, those that the blocks leave
        declared, added, stored = [], [], []
        for value, given in zip(self.region.arguments, self.op.operands[: self.op.partials], strict=False):
            name = rows[value] = text.unique(f"{text.name(given)}_of_blocks")
            declared.append(f"__shared__ {register(value)} {name}[kBlocks][{columns_of(value)}];")
            added.append(f"moesaic::add_up_blocks<kThreads>({name});")
        text.finish += ["", *declared, "moesaic::cluster_wait();  // the first block runs"]
        for value, given in zip(self.region.arguments, self.op.operands[: self.op.partials], strict=False):
            self.sums.store(given, self.sums.in_first_block(given, rows[value]))
        pointers = {result: pointer for result, pointer in text.results if result in self.op.results}
        results = [
            (inside, pointers[result])
            for inside, result in zip(self.region.terminator.operands, self.op.results, strict=True)
        ]
        stored = [f"moesaic::store_sums<kThreads>({rows[v]}[0], {pointer});" for v, pointer in results if v in rows]
        text.finish += [
            "",
            "moesaic::sync_cluster();  // sums are with the first block",
            "if (blockIdx.x > 0) return;",
            *added,
            *stored,
        ]
        if self.computed.ops:
            read = {v: text.pointers[given] for v, given in self.read.items()}
            totals = {v: f"{name}[0]" for v, name in rows.items()}
            text.finish += ["__syncthreads();  // totals are there", "", *self.computed.lines(read, totals, results)]

"""The kernel of a row program: in which order its parts are written, and which part an op belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.lines import Line, fused_ops, in_words, register
from moesaic.codegen.render import banner, indented, render
from moesaic.codegen.row_program.finishing import Finishing
from moesaic.codegen.row_program.picks import Picks
from moesaic.codegen.row_program.reading import Reading, has_stride
from moesaic.codegen.row_program.runs import Runs
from moesaic.codegen.row_program.selection import Selection
from moesaic.codegen.row_program.sums import Sums
from moesaic.codegen.row_program.tables import Tables
from moesaic.codegen.row_program.text import Text
from moesaic.codegen.row_program.writing import Writing
from moesaic.codegen.target import WARP_THREADS
from moesaic.ir.core import BlockArgument, Op
from moesaic.ir.errors import UnsupportedError
from moesaic.ir.ops import col, row
from moesaic.ir.ops.kernel import ColFinish, Ticket
from moesaic.ir.ops.launch import Kernel
from moesaic.passes.row_layout import read_in_registers


def generate(op: Kernel) -> GeneratedKernel:
    """CUDA of one row program.

    Raises:
        UnsupportedError: the region holds something the template family has no form for; names the op.
    """
    return _Program(op).generate()


class _Program:
    def __init__(self, op: Kernel) -> None:
        self.text = text = Text(op)
        self.tables = tables = Tables(text)
        sums, picks, selection = Sums(text), Picks(text, tables), Selection(text, tables)
        self.reading, self.runs, self.writing = Reading(text), Runs(text), Writing(text, tables, sums)
        self.finishing = None if text.finishing is None else Finishing(text, text.finishing, sums)
        self.collectives: Mapping[type[Op], Callable[[Any], list[str]]] = {
            row.Sum: sums.of_row,
            row.Max: sums.of_row,
            row.TopK: selection.top_k,
            row.GroupLimit: selection.group_limit,
            row.Membership: selection.membership,
            row.Gather: picks.gather,
            row.Scatter: picks.scatter,
            row.Bitmap: picks.bitmap,
            row.Given: picks.given,
            row.Append: picks.append,
            row.First: picks.first,
            row.Squeeze: self._reshape,
            row.Unsqueeze: self._reshape,
            col.Count: sums.count,
            col.Sum: sums.over_tokens,
            col.Rows: sums.rows,
            col.Spread: self._spread,
            Ticket: lambda op: [],  # a zero, which is written after the loop
            ColFinish: lambda op: [],  # after the loop, too
        }

    def generate(self) -> GeneratedKernel:
        text = self.text
        self._constants()
        self._parameters()
        self.reading.emit()
        self.runs.emit(self._collective)
        self.writing.emit()
        if self.finishing is not None:
            self.finishing.emit()
        self.tables.place()
        parameters = {
            "banner": banner(text.op, self._what()),
            "symbol": text.op.symbol,
            "headers": [text.header, *(["columns.cuh"] if text.finishing is not None else [])],
            "cluster": text.finishing is not None,
            "segments": text.segments,
            "by_warps": text.by_warps,
            "constants": text.constants,
            "aliases": text.aliases,
            "parameters": text.parameters.lines,
            "bounds": f"kThreads, /*blocks per multiprocessor, at least=*/{text.config['resident']}",
            "setup": indented(["", *text.setup] if text.setup else [], 2),
            "body": [line for section in text.body for line in indented(["", *section], 4)],
            "finish": indented(text.finish, 2),
            "next": text.config.get("next", "early"),
        }
        return GeneratedKernel(
            symbol=text.op.symbol,
            source=render("row_program.cu.j2", parameters),
            arguments=tuple(text.parameters.arguments),
            threads=text.threads,
            rows_per_block=text.threads // text.lanes,
            grid=text.config["grid"],
            blocks=text.cluster,
            by_sequence=bool(text.segments),
            shared_bytes=self.tables.shared_bytes,
            cluster=max(1, text.cluster),
            ops=fused_ops(text.region, text.name),
        )

    def _what(self) -> str:
        """What the kernel is for, in a line: what it reads of a token, and what it makes of that."""
        reads = [a.name for a in self.text.pointers if a.type.leading == "T"]
        made = in_words([value.name or self.text.name(value) for value, _ in self.text.results])
        what = f"all steps from a token's {in_words(reads)} to {made}" if reads else f"{made}, for each token"
        return what + (", and what follows from sums over tokens" if self.text.finishing is not None else "")

    def _constants(self) -> None:
        text = self.text
        text.constants += [
            Line("kExperts", str(text.experts)),
            Line("kLanes", str(text.lanes), why="lanes that share a token"),
            Line("kVec", text.config["vec"], why="consecutive experts of a chunk; chunk n is lane n % kLanes's"),
            Line("kThreads", str(text.threads)),
            Line("kTokensPerBlock", str(text.threads // text.lanes)),
        ]
        if text.by_warps:
            text.constants.append(Line("kTokensPerWarp", f"{WARP_THREADS // text.lanes}"))
        if text.finishing is not None:
            text.constants.append(Line("kBlocks", str(text.cluster), why="which are one cluster"))
        text.aliases.append(Line("Experts", definition="moesaic::Row<kExperts, kLanes, kVec>"))
        for layout in sorted({x for x in text.layouts.values() if x.kind in ("picks", "bytes")}, key=str):
            row_type = f"moesaic::Row</*columns=*/{layout.columns}, kLanes, /*vec=*/1>"
            text.aliases.append(Line(text.rows(layout), definition=row_type))

    def _parameters(self) -> None:
        text = self.text
        for index, argument in enumerate(text.region.arguments):
            if not self._is_loaded(argument):
                continue  # only its number of rows is asked for
            pointer = text.pointers[argument] = text.parameters.pointer(index)
            if has_stride(argument):
                self._stride(index, f"{pointer}_stride")
        for number, value in enumerate(text.region.terminator.operands):
            text.results.append((value, text.parameters.pointer(text.op.reads + number)))
        text.parameters.tokens()
        by_sequence = [i for i, a in enumerate(text.region.arguments) if a.type.leading == "N"]
        if by_sequence:
            text.parameters.rows("sequences", by_sequence[0])

    def _stride(self, index: int, name: str) -> None:
        """Elements between the rows of an operand: an input's are told, what a kernel before has written is dense."""
        given = self.text.op.operands[index]
        if isinstance(given, BlockArgument):
            self.text.parameters.stride(index, name)
        else:
            self.text.constants.append(Line(name, str(given.type.shape[1]), definition="long long"))

    def _is_loaded(self, argument: BlockArgument) -> bool:
        region = self.text.region
        gathered = any(isinstance(o, row.Gather) and argument is o.x for o in region.ops)
        finished = self.finishing is not None and argument in self.finishing.read.values()
        return gathered or finished or read_in_registers(region, argument)

    def _collective(self, op: Op) -> list[str]:
        emit = self.collectives.get(type(op))
        if emit is None:
            raise UnsupportedError(f"{op.name} has no form in a row program")
        lines = emit(op)
        return [f"// {self.text.comment(op)}", *lines] if lines else []

    def _reshape(self, op: row.Squeeze | row.Unsqueeze) -> list[str]:
        """One number a token, with or without an axis of columns: the same register."""
        [value] = op.results
        return [f"const {register(value)} {self.text.name(value)} = {self.text.read(op.operands[0])};"]

    def _spread(self, op: col.Spread) -> list[str]:
        text = self.text
        layout = text.layouts[op.y]
        name = text.name(op.y)
        if not layout.is_row:
            return [f"const float {name} = {text.read(op.x)};"]
        text.kept.add(op.y)
        rows = text.rows(layout)
        return [
            f"float {name}[{rows}::kSlots];",
            "#pragma unroll",
            f"for (int i = 0; i < {rows}::kSlots; ++i) {name}[i] = {text.read(op.x, 'i')};",
        ]

"""The kernel after a row program: sums over tokens from its partial rows, and what is computed from them.

A block adds up a tile, some columns of one sum. Where something follows, one block computes it once all sums are there,
the first of a cluster, or the last of a grid to finish.
"""

from __future__ import annotations

from moesaic.codegen.column_values import ColumnValues
from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.lines import fused_ops, register
from moesaic.codegen.parameters import Parameters
from moesaic.codegen.render import banner, render
from moesaic.ir.core import Value, columns_of
from moesaic.ir.errors import InternalError
from moesaic.ir.ops import col
from moesaic.ir.ops.launch import Kernel
from moesaic.passes.finish_in_cluster import tiles_of


def generate(op: Kernel) -> GeneratedKernel:
    """CUDA of one finish kernel.

    Raises:
        UnsupportedError: the region holds something that has no form over column values; names the op.
    """
    return _Emitter(op).generate()


class _Emitter:
    def __init__(self, op: Kernel) -> None:
        if op.region is None:
            raise InternalError(f"{op.symbol}: a finish kernel without a region")
        self.op = op
        self.region = op.region
        self.threads = int(op.configuration["threads"])
        self.cluster = int(op.configuration.get("cluster", "0"))
        self.tile = int(op.configuration["columns"])
        self.sums = op.region.arguments[: op.partials]
        self.parameters = Parameters(op, ("i", "tile", "number", "rows", "sequences", "kThreads", "kTile"))
        self.computed = ColumnValues(op.region, self.sums, self.parameters)
        self.pointers: dict[Value, str] = {}  # of what is read; of a sum, once it is finished
        self.shared: dict[Value, str] = {}  # of sums that the first block of a cluster has
        self.partials: list[str] = []
        self.results: list[tuple[Value, str]] = []
        self.ticket = ""

    def generate(self) -> GeneratedKernel:
        self._ask()
        body, blocks, per_sequence = self._summing()
        if self.computed.ops:
            if self.cluster:
                body += self._collecting()
            elif self.sums:
                body += ["", f"if (!moesaic::is_last_block({self.ticket})) return;"]
            else:
                blocks = 1
            body += ["", *self.computed.lines(self.pointers, self.shared, self.results)]
        source = render(
            "col_finish.cu.j2",
            {
                "banner": banner(self.op, "sums over tokens from partial rows, and what is computed from them"),
                "symbol": self.op.symbol,
                "threads": self.threads,
                "cluster": self.cluster,
                "tile": self.tile if self.sums else 0,
                "parameters": self.parameters.lines,
                "body": ["  " + line if line and not line.startswith("#") else line for line in body],
            },
        )
        return GeneratedKernel(
            symbol=self.op.symbol,
            source=source,
            arguments=tuple(self.parameters.arguments),
            threads=self.threads,
            rows_per_block=1,
            grid="fixed",
            blocks=blocks,
            blocks_per_sequence=per_sequence,
            cluster=max(1, self.cluster),
            ops=fused_ops(self.region, self.parameters.of),
        )

    # ------------------------------------------------------------------------------------------------ parameters

    def _ask(self) -> None:
        loaded = self.computed.loaded
        for index, value in enumerate(self.region.arguments):
            if index < self.op.partials:
                self.partials.append(self.parameters.pointer(index))
            elif index == self.op.partials and self.sums and self.computed.ops and not self.cluster:
                self.ticket = self.parameters.pointer(index, written=True)
            elif value in loaded:
                self.pointers[value] = self.parameters.pointer(index)
        for number, result in enumerate(self.region.terminator.operands):
            pointer = self.parameters.pointer(self.op.reads + number)
            self.results.append((result, pointer))
            if result in self.sums:
                self.pointers[result] = pointer
        if self.sums:
            self.parameters.rows("rows", 0, "partial rows: blocks of the kernel before")
        if any(isinstance(op, col.Rows) and op.x.type.leading == "T" for op in self.computed.ops):
            self.parameters.tokens()
        by_sequence = [i for i, v in enumerate(self.op.operands) if v.type.leading == "N"]
        if by_sequence:
            self.parameters.rows("sequences", by_sequence[0])

    # ------------------------------------------------------------------------------------------------------ sums

    def _summing(self) -> tuple[list[str], int, int]:
        """Lines that add up partial rows, and how many blocks they need: in all, and for each sequence."""
        lines: list[str] = []
        if self.cluster:
            self.shared = {v: self.parameters.unique(f"{self.parameters.of(v)}_total") for v in self.sums}
        blocks = per_sequence = 0
        for number, (value, partial) in enumerate(zip(self.sums, self.partials, strict=True)):
            columns = columns_of(value)
            tiles = tiles_of(columns, self.tile)
            total = self.pointers[value]
            last = number == len(self.sums) - 1
            stored = f"moesaic::store_totals</*columns=*/{columns}, kTile>"
            summed = f"moesaic::sum_partial_rows</*columns=*/{columns}, kTile, kThreads>"
            if value.type.leading == "N":
                per_sequence += tiles
                own = [
                    f"const long long sequence = tile / {tiles}, own = rows / sequences;",
                    f"const auto total = {summed}({partial} + sequence * own * {columns}, own, tile % {tiles});",
                    f"{stored}({total} + sequence * {columns}, tile % {tiles}, total);",
                ]
                size = f"{tiles} * sequences" if tiles > 1 else "sequences"
            else:
                blocks += tiles
                handed = f"moesaic::hand_to_first_block<kTile>({self.shared[value]}" if self.cluster else ""
                to = handed or f"{stored}({total}"
                own = [f"{to}, tile, {summed}({partial}, rows, tile));"]
                size = str(tiles)
            lines.append(f"if (tile >= 0 && tile < {size}) {{  // %{value.name or 'sums'}")
            lines += ["  " + line for line in own] + ["}"]
            if not last:
                lines.append(f"tile -= {size};")
        if not self.cluster:
            return ["int tile = blockIdx.x;", *lines] if lines else [], blocks, per_sequence
        first = [f"__shared__ {register(v)} {name}[{columns_of(v)}];" for v, name in self.shared.items()]
        first.append("moesaic::cluster_wait();  // so do the others")
        return [*first, "int tile = blockIdx.x;", *lines], self.cluster, 0

    def _collecting(self) -> list[str]:
        """Lines after which the first block of the cluster has all sums, and the others have ended."""
        stores = [
            f"moesaic::store_sums<kThreads>({self.shared[value]}, {self.pointers[value]});" for value in self.sums
        ]
        return [
            "",
            "moesaic::sync_cluster();  // sums are with the first block",
            "if (blockIdx.x > 0) return;",
            *stores,
        ]

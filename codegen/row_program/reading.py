"""What a row program reads: the token's rows and numbers, in the loop; what is the same for all tokens, ahead of it."""

from __future__ import annotations

from moesaic.codegen.lines import INTEGERS, register
from moesaic.codegen.row_program.text import Text
from moesaic.ir.core import BlockArgument, Value
from moesaic.ir.ops import math, row
from moesaic.passes.row_layout import read_in_registers


def has_stride(value: Value) -> bool:
    """Whether rows may be anywhere; numbers of single tokens follow one another."""
    return value.type.rank == 2


class Reading:
    """Loads of the region's arguments that are wanted in registers."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self.prefetch = text.config["prefetch"] == "on"

    def emit(self) -> None:
        """Writes all loads."""
        section: list[str] = []
        for index, argument in enumerate(self.text.region.arguments):
            if read_in_registers(self.text.region, argument):
                section += self._load(index, argument)
        if section:
            self.text.body.append(section)

    def _load(self, index: int, argument: BlockArgument) -> list[str]:
        """The lines of the loop; those ahead of it are written."""
        text = self.text
        layout = text.layouts[argument]
        pointer, name = text.pointers[argument], text.name(argument)
        kind = register(argument) if argument.type.dtype in INTEGERS else "float"
        align = self._align(index, argument)
        place = f"{pointer} + token * {pointer}_stride"
        sequence = f" + sequence * {pointer}_stride" if argument.type.leading == "N" else ""
        if layout.kind == "experts" and self.prefetch and kind == "float":
            text.kept.add(argument)
            return self._prefetched(argument, align)
        if argument in text.stored_rows:
            text.kept.add(argument)
            stored = self._as_stored(argument)
            return [
                f"{text.storage(argument)} {stored}[Experts::kSlots];  // %{argument.name}",
                f"moesaic::load_stored<Experts, /*align=*/{align}>({place}, {stored}, lane);",
                *self._widened(argument),
            ]
        if layout.is_row:
            text.kept.add(argument)
            rows = text.rows(layout)
            load = "load_row" if kind == "float" else "load_stored"  # integers stay as they are
            return [
                f"{kind} {name}[{rows}::kSlots];  // %{argument.name}",
                f"moesaic::{load}<{rows}, /*align=*/{align}>({place}, {name}, lane);",
            ]
        if layout.kind == "scalar":
            where = place if has_stride(argument) else f"{pointer} + token"
            return [f"const {register(argument)} {name} = {_loaded(argument, where)};  // %{argument.name}"]
        if layout.kind == "vector":
            rows = text.vector_rows(layout)
            whose = "of this block's sequence" if sequence else "the same for all tokens"
            if text.config.get("vectors") == "shared" and self._is_elementwise(argument):
                text.shared.add(argument)
                loaded = text.unique(f"{name}_loaded")
                text.setup += [
                    f"__shared__ moesaic::SharedSlots<{rows}, kLanes> {name};  // %{argument.name}, {whose}",
                    "if (threadIdx.x < kLanes) {",
                    f"  float {loaded}[{rows}::kSlots];",
                    f"  moesaic::load_row<{rows}, /*align=*/{align}>({pointer}{sequence}, {loaded}, lane);",
                    f"  {name}.write(lane, {loaded});",
                    "}",
                    "__syncthreads();",
                ]
                return []
            text.setup += [
                f"float {name}[{rows}::kSlots];  // %{argument.name}, {whose}",
                f"moesaic::load_row<{rows}, /*align=*/{align}>({pointer}{sequence}, {name}, lane);",
            ]
            text.kept.add(argument)
        else:
            text.setup.append(f"const float {name} = {_loaded(argument, pointer + sequence)};")
        return []

    def _is_elementwise(self, argument: BlockArgument) -> bool:
        """Whether all that uses it are elementwise ops in the loop over tokens, and gathers, which read memory."""
        users = [u for u in self.text.region.users(argument) if not isinstance(u, row.Gather)]
        return all(isinstance(u, math.Elementwise) and self.text.layout(u.results[0]).kind == "experts" for u in users)

    def _prefetched(self, argument: BlockArgument, align: int) -> list[str]:
        """A row that was fetched during the token before; the next one's fetch is issued before its values are used."""
        text = self.text
        pointer, name = text.pointers[argument], text.name(argument)
        ahead = text.unique(f"{name}_ahead")
        fetch = (
            f"moesaic::fetch_row<Experts, /*align=*/{align}>({pointer} + {{token}} * {pointer}_stride, {ahead}, lane);"
        )
        storage, stored = text.storage(argument), self._as_stored(argument)
        text.setup += [
            f"moesaic::Chunk<Experts, {storage}> {ahead}[Experts::kChunks];  // %{argument.name} of the next token",
            "if (tokens > 0) {",
            "  " + fetch.format(token="moesaic::at_most(first_token, tokens - 1)"),
            "}",
        ]
        return [
            f"{storage} {stored}[Experts::kSlots];  // %{argument.name}",
            f"moesaic::unpack<Experts>({ahead}, {stored});",
            *self._widened(argument),
            # Unconditional: behind a branch the compiler waits for the load. The last round fetches the last row again.
            fetch.format(token="moesaic::at_most(token + stride, tokens - 1)"),
        ]

    def _as_stored(self, argument: BlockArgument) -> str:
        if argument not in self.text.stored:
            self.text.stored[argument] = self.text.unique(f"{self.text.name(argument)}_stored")
        return self.text.stored[argument]

    def _widened(self, argument: BlockArgument) -> list[str]:
        """The floats of a row that is kept as it lies in memory, where anything wants them."""
        name = self.text.name(argument)
        return [f"float {name}[Experts::kSlots];", f"moesaic::widen({self._as_stored(argument)}, {name});"]

    def _align(self, index: int, argument: BlockArgument) -> int:
        known = self.text.parameters.alignment
        return max(known[index] if index < len(known) else 16, argument.type.dtype.bytes)


def _loaded(argument: BlockArgument, where: str) -> str:
    """One element of an input in the type it has in registers."""
    loaded = f"moesaic::load_one({where})"
    return f"moesaic::to_float({loaded})" if register(argument) == "float" else loaded

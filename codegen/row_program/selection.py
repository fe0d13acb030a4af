"""Which experts are picked: top-k by one of five ways, groups that limit it, and who was picked afterwards."""

from __future__ import annotations

from moesaic.codegen.row_program.tables import Tables
from moesaic.codegen.row_program.text import MAY_BE_AWAY, Text
from moesaic.ir.core import Op, OpResult, Value
from moesaic.ir.ops import row
from moesaic.passes.selection_shape import DIGIT_WORDS, RadixShape, padded_columns


class Selection:
    """Top-ks of a kernel, and what they leave in registers for each other and for membership."""

    def __init__(self, text: Text, tables: Tables) -> None:
        self.text = text
        self.tables = tables
        self._found: dict[Op, tuple[str, str, str]] = {}  # rank type, keys and last pick of a top-k
        self._members: dict[Op, str] = {}  # of a top-k by radix: a bit for each slot that is picked
        self._runs: dict[Value, tuple[str, str]] = {}  # by what is allowed: keys, and the best of each chunk

    def top_k(self, op: row.TopK) -> list[str]:
        text = self.text
        picks = text.rows_of(op.indices)
        raw = op.x in text.stored_rows
        rank = self._rank(op.x if raw else None)
        select = text.config["select"]
        picked, last = text.unique("picked"), text.unique("members" if select == "radix" else "last")
        if select == "merge" and not raw:
            select = "collect"  # values that fill a word are merged alone and collected with their columns
        numbers = f", /*listed=*/{self._listed(op)}" if select in ("merge", "collect") else ""
        arguments = ["lane", picked, last]
        lines: list[str] = []
        if self._sorts_chunks(op):
            assert op.allowed is not None
            select = "collect_runs"
            keys, runs = self._runs[op.allowed]
            arguments = [keys, runs, text.name(op.allowed), *arguments]
        else:
            keys = text.unique("keys")
            arguments = [keys, *arguments]
            lines += self._keys(op, rank, keys, text.stored[op.x] if raw else text.array(op.x))
        # Top-ks of one kernel may rank different types, and pick different numbers.
        of_rank, of_picks, pick_bytes = rank.removeprefix("Rank"), picks.removeprefix("Picks"), 4 if raw else 8
        if select == "sort":
            places = padded_columns(text.experts, text.vec, text.lanes)
            size = pick_bytes * places
            length, why = "Experts::kSlots * kLanes", "a token's experts, in order"
            arguments.append(self.tables.row(f"sorted{of_rank}", f"{rank}::Pick", length, size, why))
        elif select.startswith("collect"):
            arguments += [
                self.tables.staged(),
                self.tables.row(f"reached{of_picks}", "moesaic::Wide", f"{picks}::kColumns", 8 * op.k, "who is picked"),
            ]
        elif select == "radix":
            shape = RadixShape.of(op, text.experts, text.vec, text.lanes)
            counted = str(shape.counted).lower()
            numbers = f", /*parts=*/{shape.parts}, /*places=*/{shape.places}, /*counted=*/{counted}"
            name, size = f"listed{of_rank}{of_picks}", pick_bytes * shape.length
            arguments += [
                self.tables.row(
                    "digits", "unsigned", "moesaic::Digits::kWords", 4 * DIGIT_WORDS, "ranks of each digit", zeroed=True
                ),
                self.tables.row(name, f"{rank}::Pick", str(shape.length), size, "who may be picked", kept=True),
                self.tables.staged() if shape.bounded else "nullptr",
            ]
            text.header = "select_block.cuh"
        if select == "radix":
            self._members[op] = last
            lines += [f"{rank}::Pick {picked}[{picks}::kSlots];", f"unsigned {last};  // a bit for each slot"]
        else:
            self._found[op] = (rank, keys, last)
            lines.append(f"{rank}::Pick {picked}[{picks}::kSlots], {last};")
        lines.append(f"moesaic::top_k_{select}<{rank}, Experts, {picks}{numbers}>({', '.join(arguments)});")
        return [*lines, *self._columns_and_values(op, rank, picks, picked)]

    def _keys(self, op: row.TopK, rank: str, keys: str, values: str) -> list[str]:
        """A row's values as integers in the order of selection; 0 where an expert is not allowed."""
        lines = [
            f"{rank}::Key {keys}[Experts::kSlots];",
            f"moesaic::rank_row<{rank}, Experts>({values}, {keys}, lane);",
        ]
        if op.allowed is not None:
            lines += [
                "#pragma unroll",
                "for (int i = 0; i < Experts::kSlots; ++i) {",
                f"  {keys}[i] = {self.text.read(op.allowed, 'i')} ? {keys}[i] : 0;",
                "}",
            ]
        return lines

    def _columns_and_values(self, op: row.TopK, rank: str, picks: str, picked: str) -> list[str]:
        """What picks say, as far as anybody asks."""
        text = self.text
        lines: list[str] = []
        fills: list[str] = []
        if text.region.users(op.indices):
            name = text.keep(op.indices)
            lines.append(f"int {name}[{picks}::kSlots];")
            none = -1 if op.may_fall_short else 0
            fills.append(f"  {name}[p] = here ? {rank}::column({picked}[p]) : {none};")
        if text.region.users(op.values):
            name = text.keep(op.values)
            lines.append(f"float {name}[{picks}::kSlots];")
            fills.append(f"  {name}[p] = here ? {rank}::value({picked}[p]) : 0.0f;")
        if fills:
            here = f"{picks}::live(p, lane)" + (f" && {rank}::is_pick({picked}[p])" if op.may_fall_short else "")
            fills.insert(0, f"  const bool here = {here};")
            lines += ["#pragma unroll", f"for (int p = 0; p < {picks}::kSlots; ++p) {{", *fills, "}"]
        return lines

    def group_limit(self, op: row.GroupLimit) -> list[str]:
        text = self.text
        name = text.keep(op.allowed)
        arguments = f"Experts, /*groups=*/{op.groups}, /*keep=*/{op.keep}, /*best=*/{op.best}"
        form = text.config["groups"]
        if form != "lanes":
            tables = [self.tables.staged()]
            if form == "shared":
                tables.append(
                    self.tables.row("kept_groups", "unsigned char", str(op.groups), op.groups, "which groups are kept")
                )
            else:
                tables.append(
                    self.tables.row("group_scores", "unsigned", str(op.groups), 4 * op.groups, "of groups", kept=True)
                )
                text.header = "select_block.cuh"
            call = ", ".join([text.array(op.x), name, *tables, "lane"])
            return [f"bool {name}[Experts::kSlots];", f"moesaic::group_limit_{form}<{arguments}>({call});"]
        selection = next((o for o in text.region.ops if isinstance(o, row.TopK) and o.allowed is op.allowed), None)
        length = op.best
        keys, runs = text.unique("keys"), text.unique("runs")
        if selection is not None and self._sorts_chunks(selection):
            self._runs[op.allowed] = (keys, runs)
            length = self._listed(selection)
        return [
            f"unsigned {keys}[Experts::kSlots], {runs}[Experts::kChunks][{length}];",
            f"moesaic::rank_row<{self._rank(None)}, Experts>({text.array(op.x)}, {keys}, lane);",
            f"moesaic::sort_chunks<Experts>({keys}, {runs});",
            f"bool {name}[Experts::kSlots];",
            f"moesaic::group_limit_lanes<{arguments}>({runs}, {name}, lane);",
        ]

    def membership(self, op: row.Membership) -> list[str]:
        """Whether an expert was picked: its key reaches the last pick's; picks from elsewhere are looked up."""
        text = self.text
        name = text.keep(op.y)
        lines = [f"bool {name}[Experts::kSlots];"]
        made_by = op.indices.op if isinstance(op.indices, OpResult) else None
        if not isinstance(made_by, row.TopK):
            picks = text.rows_of(op.indices)
            away = MAY_BE_AWAY if row.may_be_away(op.indices) else ""
            call = f"moesaic::membership<Experts, {picks}{away}>({text.array(op.indices)}, {name}, lane);"
            return [*lines, call]
        if made_by in self._members:
            return [
                *lines,
                "#pragma unroll",
                f"for (int i = 0; i < Experts::kSlots; ++i) {name}[i] = ({self._members[made_by]} & 1u << i) != 0;",
            ]
        rank, keys, last = self._found[made_by]
        lines.append(f"moesaic::picked_slots<{rank}, Experts>({keys}, {last}, {name}, lane);")
        also = ""
        if made_by.allowed in self._runs:  # these keys are of all experts
            also = f"{text.name(made_by.allowed)}[i]"
        elif made_by.may_fall_short:  # the last pick may be none, which every key reaches
            also = f"{keys}[i] != 0"
        if also:
            lines += [
                "#pragma unroll",
                f"for (int i = 0; i < Experts::kSlots; ++i) {name}[i] = {name}[i] && {also};",
            ]
        return lines

    def _sorts_chunks(self, op: row.TopK) -> bool:
        """Whether the groups that limit a top-k score what it ranks, so that both can use the same sorted chunks."""
        limit = op.allowed.op if isinstance(op.allowed, OpResult) else None
        return (
            isinstance(limit, row.GroupLimit)
            and limit.x is op.x
            and op.x not in self.text.stored_rows
            and (self.text.config["select"], self.text.config["groups"]) == ("merge", "lanes")
            and self._listed(op) >= limit.best
        )

    def _listed(self, op: row.TopK) -> int:
        """Values of a lane in a list. The choice is for the top-k with the most picks; more than picks never help."""
        return min(int(self.text.config["listed"]), 1 << (op.k - 1).bit_length())

    def _rank(self, stored: Value | None) -> str:
        """How values are ranked: of 16 bits as they are stored, or floats."""
        if stored is None:
            return self.text.alias("Rank", "moesaic::Rank<float>", "")
        definition = f"moesaic::Rank<{self.text.storage(stored)}>"
        return self.text.alias("Rank", definition, "16-bit values rank with their column in one word")

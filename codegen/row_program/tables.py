"""Tables in shared memory: a token's row of each, for helpers that exchange between its lanes."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.codegen.row_program.text import Text
from moesaic.codegen.target import Target
from moesaic.ir.errors import UnsupportedError
from moesaic.passes.row_shape import exchanged_bytes


@dataclass(frozen=True)
class _Dynamic:
    """A table in dynamic shared memory; `alone` if no other may have its place."""

    name: str
    type: str
    bytes: int
    why: str
    alone: bool


class Tables:
    """The tables so far; `shared_bytes` of them are dynamic, once they have their places."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self.shared_bytes = 0
        self._rows: dict[str, str] = {}
        self._dynamic: list[_Dynamic] = []

    def row(
        self,
        name: str,
        type: str,
        length: str,
        bytes: int,
        why: str,
        *,
        zeroed: bool = False,
        holds: str = "",
        kept: bool = False,
    ) -> str:
        """The token's own row of a table, which is declared once; `why` says there what it is for.

        In dynamic shared memory, which long rows need, tables share a place unless they are `zeroed`, or what `holds`,
        an array of registers, has at first (and so again when a helper returns), or are `kept` beside another: a
        helper waits for all lanes before it writes to its table.
        """
        if name not in self._rows:
            unique = self.text.unique(name)
            if self.text.config.get("tables") == "dynamic":
                self._rows[name] = unique
                self._dynamic.append(_Dynamic(unique, type, bytes, why, alone=zeroed or bool(holds) or kept))
            else:
                self._rows[name] = f"{unique}[slot]"
                array = f"{unique}[kTokensPerBlock][{length}]"
                self.text.setup.append(f"__shared__ __align__(16) {type} {array};  // {why}")
            filled = f"to_shared<Experts>({holds}, " if holds else f"clear<kLanes, {length}>("
            if zeroed or holds:
                self.text.setup += [f"moesaic::{filled}{self._rows[name]}, lane);", "moesaic::team_sync<kLanes>();"]
        return self._rows[name]

    def of_experts(self, name: str, type: str, why: str, *, zeroed: bool = False, holds: str = "") -> str:
        """A row of 4 bytes an expert."""
        return self.row(name, type, "kExperts", 4 * self.text.experts, why, zeroed=zeroed, holds=holds)

    def staged(self) -> str:
        """Where lanes show each other what they rank."""
        return self.of_experts("staged", "unsigned", "ranks of a token's experts")

    def place(self) -> None:
        """Declares the tables in dynamic shared memory: first those of their own, then those that share a place.

        Raises:
            UnsupportedError: a block of the target has not enough.
        """
        if not self._dynamic:
            return
        text = self.text
        memory = text.unique("tables")
        lines = [f"MOESAIC_DYNAMIC_SHARED(unsigned char, {memory});"]
        offset = 0
        for table in sorted(self._dynamic, key=lambda t: not t.alone):
            place = f"reinterpret_cast<{table.type}*>({memory} + {offset})"
            lines.append(f"{table.type}* const {table.name} = {place};  // {table.why}")
            self.shared_bytes = max(self.shared_bytes, offset + table.bytes)
            if table.alone:
                offset = -(-(offset + table.bytes) // 16) * 16
        text.setup[:0] = lines
        target = Target.parse(text.config["target"])
        needed = self.shared_bytes + exchanged_bytes(text.region, text.lanes)
        if needed > target.shared_optin:
            raise UnsupportedError(
                f"{text.op.symbol}: rows of {text.experts} experts need {needed} bytes of shared memory a block, but "
                f"{target} has {target.shared_optin}; up to half as many picks as experts, or 16-bit logits that are "
                "ranked as they are, need less"
            )

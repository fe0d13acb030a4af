"""Numbers of slots, for the picks that have them: from a ``launch.kernel`` to CUDA text.

A thread has a pick. It reads the slot's numbers, adds up those that come in parts, and computes what follows.
"""

from __future__ import annotations

from moesaic.codegen.elementwise import Region
from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.lines import register
from moesaic.codegen.render import banner, indented, render
from moesaic.ir.core import BlockArgument, Value
from moesaic.ir.errors import InternalError, UnsupportedError
from moesaic.ir.ops import math, slot
from moesaic.ir.ops.kernel import is_partial_sum
from moesaic.ir.ops.launch import Kernel


def generate(op: Kernel) -> GeneratedKernel:
    """CUDA of one to_picks.

    Configuration: ``threads``; ``alignment``, bytes that each operand read is known to be aligned to (16 where absent).

    Raises:
        UnsupportedError: the region holds something that has no form here; names the op.
    """
    return _Emitter(op).generate()


class _Emitter:
    def __init__(self, op: Kernel) -> None:
        self.op = op
        self.region = Region(op, ("item", "token", "k", "slot", "kThreads", "kTopK", "kTokens"))
        self.moves = [inner for inner in self.region.body.ops if isinstance(inner, slot.ToPicks)]
        if not self.moves or any(move.slots is not self.moves[0].slots for move in self.moves):
            raise InternalError(f"{op.symbol}: numbers go from the slots of one dispatch to its picks")
        top_k = self.moves[0].y.type.shape[-1]
        assert isinstance(top_k, int)
        self.top_k = top_k
        self.threads = int(op.configuration["threads"])

    def generate(self) -> GeneratedKernel:
        region = self.region
        slots = self.moves[0].slots
        read = region.values_read() | {move.x for move in self.moves}
        region.add_pointers({slots, *read})
        results = region.results()
        region.parameters.tokens()
        pointer, stride = region.pointers[slots]
        body = [
            f"const int slot = moesaic::load_one({pointer} + token * {stride} + k);",
            *self._of_pick_or_all(read),
            *self._of_slot(read),
            *self._assignments("T"),
        ]
        for index, value, result in results:
            if value.type.shape != self.moves[0].y.type.shape:
                raise UnsupportedError(f"{self.op.symbol}: this kernel returns numbers of picks, not {value.type}")
            body.append(f"moesaic::store_one({result} + token * kTopK + k, {region.stored(index, value)});")
        tokens = max(1, self.threads // self.top_k)
        source = render(
            "to_picks.cu.j2",
            {
                "banner": banner(self.op, "numbers of slots, for the picks that have them"),
                "symbol": self.op.symbol,
                "threads": self.threads,
                "top_k": self.top_k,
                "tokens": tokens,
                "parameters": region.parameters.lines,
                "body": indented(body, 4),
            },
        )
        return GeneratedKernel(
            symbol=self.op.symbol,
            source=source,
            arguments=tuple(region.parameters.arguments),
            threads=self.threads,
            rows_per_block=tokens,
            grid="cover",
            ops=region.fused_ops(),
        )

    def _of_pick_or_all(self, read: set[Value]) -> list[str]:
        """What is read for the pick, and what is the same for all."""
        arguments = [a for a in self.region.body.arguments if a in read and a.type.leading != slot.SLOTS]
        return [*(self._load(a, self._place(a)) for a in arguments), *self._assignments("")]

    def _of_slot(self, read: set[Value]) -> list[str]:
        """What is read and computed for the slot: nothing where the pick has none, which then gets 0."""
        region = self.region
        arguments = [a for a in region.body.arguments if a in read and a.type.leading == slot.SLOTS]
        inside = [*(self._load_slot(a) for a in arguments), *self._assignments(slot.SLOTS)]
        for move in self.moves:
            number = (
                region.read(move.x) if register(move.x) == "float" else f"static_cast<float>({region.read(move.x)})"
            )
            inside.append(f"{region.name(move.y)} = {number};  // {region.comment(move)}")
        declared = [f"float {region.name(move.y)} = 0.0f;" for move in self.moves]
        return [*declared, "if (slot >= 0) {", *indented(inside, 2), "}"]

    def _assignments(self, leading: str) -> list[str]:
        """The elementwise ops on what slots ("M") have, picks or tokens ("T"), or all share ("")."""
        lines = []
        for inner in self.region.body.ops[:-1]:
            if isinstance(inner, slot.ToPicks) or inner.results[0].type.leading != leading:
                continue
            if not isinstance(inner, math.Elementwise):
                raise UnsupportedError(f"{self.op.symbol}: {inner.name} has no form beside a to_picks")
            lines.append(self.region.assignment(inner))
        return [line for line in lines if line]

    def _place(self, value: BlockArgument) -> str:
        pointer, stride = self.region.pointers[value]
        where = f"{pointer} + token * {stride}" if stride else pointer
        return f"{where} + k" if value.type.shape and value.type.shape[-1] == self.top_k else where

    def _load(self, value: BlockArgument, where: str) -> str:
        loaded = self.region.widened(value, f"moesaic::load_one({where})")
        return f"const {register(value)} {self.region.name(value)} = {loaded};"

    def _load_slot(self, value: BlockArgument) -> str:
        region = self.region
        pointer, stride = region.pointers[value]
        where = f"{pointer} + slot * {stride}"
        given = self.op.operands[region.body.arguments.index(value)].type
        if given != value.type and is_partial_sum(given, value.type):
            parts = given.shape[1]
            call = f"moesaic::sum_parts</*parts=*/{parts}, /*align=*/{region.align(value)}>({where})"
            return f"const float {region.name(value)} = {call};"
        return self._load(value, where)

"""Sums that a gradient has left in parts, and what is elementwise after them: from a ``launch.kernel`` to CUDA text.

A thread has a few neighbouring elements, and waits for those of all parts at once.
"""

from __future__ import annotations

import math as python_math

from moesaic.codegen.elementwise import Region
from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.parameters import storage
from moesaic.codegen.render import banner, indented, render
from moesaic.ir.core import BlockArgument
from moesaic.ir.errors import InternalError, UnsupportedError
from moesaic.ir.ops import math, slot
from moesaic.ir.ops.launch import Kernel

_VECTOR = 4  # elements, 16 bytes
_RESIDENT_THREADS = 512  # of a multiprocessor, at least; left alone, the compiler waits for a few parts at a time


def generate(op: Kernel) -> GeneratedKernel:
    """CUDA of one sum over parts.

    Configuration: ``threads``; ``alignment``, bytes that each operand read is known to be aligned to (16 where absent).

    Raises:
        UnsupportedError: the region holds something that has no form here; names the op.
    """
    return _Emitter(op).generate()


class _Emitter:
    def __init__(self, op: Kernel) -> None:
        self.op = op
        self.region = Region(op, ("element", "kThreads", "kParts", "kElements", "kVec"))
        found = [inner for inner in self.region.body.ops if isinstance(inner, slot.SumParts)]
        if len(found) != 1 or not isinstance(found[0].x, BlockArgument):
            raise InternalError(f"{op.symbol}: one slot.sum_parts is what this kernel is for, found {len(found)}")
        self.sum = found[0]
        rows, columns = self.sum.y.type.shape
        assert isinstance(rows, int) and isinstance(columns, int)
        self.elements = rows * columns
        self.vec = python_math.gcd(self.elements, _VECTOR)  # so that every part is aligned alike, and there is no rest
        self.threads = int(op.configuration["threads"])

    def generate(self) -> GeneratedKernel:
        region = self.region
        region.add_pointers({self.sum.x})
        results = region.results()
        pointer, _ = region.pointers[self.sum.x]
        total = region.name(self.sum.y)
        region.arrays.add(self.sum.y)
        before: list[str] = []
        inside: list[str] = []
        for inner in region.body.ops[:-1]:
            if isinstance(inner, slot.Accumulate):
                before += self._load_main(inner)
                what = f"{region.read(inner.main)} + {region.read(inner.x)}"
                inside.append(f"const float {region.name(inner.y)} = {what};  // {region.comment(inner)}")
            elif isinstance(inner, math.Elementwise):
                inside.append(region.assignment(inner))
            elif inner is not self.sum:
                raise UnsupportedError(f"{self.op.symbol}: {inner.name} has no form after a sum over parts")
        stores: list[str] = []
        for index, value, result in results:
            array = region.unique(f"{result.removesuffix('_ptr')}_stored")
            before.append(f"{storage(self.op, index)} {array}[kVec];")
            inside.append(f"{array}[v] = moesaic::from_float<{storage(self.op, index)}>({region.read(value)});")
            stores.append(f"moesaic::store<kVec, /*align=*/{self._align(index)}>({result} + element, {array});")
        body = [
            f"float {total}[kVec];  // {region.comment(self.sum)}",
            f"moesaic::add_parts<kParts>({pointer} + element, kElements, {total});",
            *before,
            "#pragma unroll",
            "for (int v = 0; v < kVec; ++v) {",
            *indented([line for line in inside if line], 2),
            "}",
            *stores,
        ]
        source = render(
            "sum_parts.cu.j2",
            {
                "banner": banner(self.op, "sums over tokens, of which parts have been added up apart"),
                "symbol": self.op.symbol,
                "parts": self.sum.parts,
                "elements": self.elements,
                "vec": self.vec,
                "threads": self.threads,
                "resident": max(1, _RESIDENT_THREADS // self.threads),
                "parameters": region.parameters.lines,
                "body": indented(body, 2),
            },
        )
        return GeneratedKernel(
            symbol=self.op.symbol,
            source=source,
            arguments=tuple(region.parameters.arguments),
            threads=self.threads,
            rows_per_block=1,
            grid="fixed",
            blocks=-(-self.elements // (self.vec * self.threads)),
            ops=region.fused_ops(),
        )

    def _load_main(self, op: slot.Accumulate) -> list[str]:
        """What a sum of the caller's holds so far: it lies where the result goes."""
        region = self.region
        index = self.op.reads + region.body.terminator.operands.index(op.y)
        name = region.name(op.main)
        region.arrays.add(op.main)
        where = f"{region.parameters.pointer(index)} + element"
        return [f"float {name}[kVec];", f"moesaic::load<kVec, /*align=*/{self._align(index)}>({where}, {name});"]

    def _align(self, index: int) -> int:
        """Bytes that a thread's elements of a result are aligned to: an input's, where they lie in one."""
        value = self.op.operands[index]
        size = value.type.dtype.bytes
        read = self.op.operands[: self.op.reads]
        known = self.region.parameters.align(read.index(value)) if value in read else 16
        return max(size, python_math.gcd(known, self.vec * size))

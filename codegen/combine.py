"""Sums over a token's picks, and what is elementwise after them: from a ``launch.kernel`` to CUDA text.

A thread has the columns of one vector of one token, and waits for several rows of slots at a time.
"""

from __future__ import annotations

import math as python_math
from dataclasses import dataclass

from moesaic.codegen.elementwise import Region, aligned_rows
from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.lines import register
from moesaic.codegen.parameters import storage
from moesaic.codegen.render import banner, indented, render
from moesaic.ir.core import Value
from moesaic.ir.errors import InternalError, UnsupportedError
from moesaic.ir.ops import math, slot
from moesaic.ir.ops.launch import Kernel

_VECTOR_BYTES = 16
_MORE_TOKENS = 8
_IDLE = 1 / 8  # of a block's threads
# Of a multiprocessor, at least. Left alone, the compiler takes few registers and waits for two rows at a time; told
# that so few threads will do, it has all rows of a token in flight: 63 registers for 8 rows of bf16, 128 KiB a
# multiprocessor.
_RESIDENT_THREADS = 512


def generate(op: Kernel) -> GeneratedKernel:
    """CUDA of one combine.

    Configuration: ``threads``; ``alignment``, bytes that each operand read is known to be aligned to (16 where absent).

    Raises:
        UnsupportedError: the region holds something that has no form here; names the op.
    """
    return _Emitter(op).generate()


@dataclass(frozen=True)
class _Result:
    """A value that is written: the operand, its parameter, and the array its elements are collected in."""

    index: int
    value: Value
    pointer: str
    array: str


class _Emitter:
    def __init__(self, op: Kernel) -> None:
        self.op = op
        self.region = Region(op, ("item", "token", "column", "kThreads", "kTopK", "kColumns", "kVec", "kTokens"))
        found = [inner for inner in self.region.body.ops if isinstance(inner, slot.Combine)]
        if len(found) != 1:
            raise InternalError(f"{op.symbol}: one slot.combine is what this kernel is for, found {len(found)}")
        self.combine = found[0]
        columns, top_k = self.combine.y.type.shape[-1], self.combine.slots.type.shape[-1]
        assert isinstance(columns, int) and isinstance(top_k, int)
        self.columns, self.top_k = columns, top_k
        self.vec = python_math.gcd(columns, _VECTOR_BYTES // self.combine.x.type.dtype.bytes)
        self.threads = int(op.configuration["threads"])

    def generate(self) -> GeneratedKernel:
        region = self.region
        weights = [] if self.combine.weights is None else [self.combine.weights]
        read = region.values_read()
        region.add_pointers({self.combine.x, self.combine.slots, *weights, *read})
        results = [self._result(number, value) for number, value in enumerate(region.body.terminator.operands)]
        region.parameters.tokens()
        loads = [line for a in region.body.arguments if a in read for line in self._load(a)]
        sections = [loads, self._combine(), self._elementwise(results), [x for r in results for x in self._store(r)]]
        tokens = tokens_per_block(self.columns // self.vec, self.threads)
        source = render(
            "combine.cu.j2",
            {
                "banner": banner(self.op, "sums over a token's picks, of rows that lie in the order of experts"),
                "symbol": self.op.symbol,
                "threads": self.threads,
                "top_k": self.top_k,
                "columns": self.columns,
                "vec": self.vec,
                "tokens": tokens,
                "resident": max(1, _RESIDENT_THREADS // self.threads),
                "parameters": region.parameters.lines,
                "body": indented([line for section in sections if section for line in ["", *section]], 4),
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

    def _in_columns(self, value: Value) -> bool:
        """Whether a value has an element for each column; else it is a number of the token, or of all tokens."""
        return value.type.rank > 0 and value.type.shape[-1] == self.columns

    def _load(self, value: Value) -> list[str]:
        region = self.region
        pointer, stride = region.pointers[value]
        name, storage = region.name(value), region.storage(value)
        where = f"{pointer} + token * {stride}" if stride else pointer
        if not self._in_columns(value):
            loaded = region.widened(value, f"moesaic::load_one({where})")
            return [f"const {register(value)} {name} = {loaded};"]
        region.arrays.add(value)
        same = register(value) == storage
        stored = name if same else region.unique(f"{name}_stored")
        lines = [
            f"{storage} {stored}[kVec];  // %{name}",
            f"moesaic::load<kVec, /*align=*/{region.align(value)}>({where} + column, {stored});",
        ]
        return lines if same else [*lines, f"float {name}[kVec];", f"moesaic::widen({stored}, {name});"]

    def _combine(self) -> list[str]:
        op, region = self.combine, self.region
        x, x_stride = region.pointers[op.x]
        slots, slots_stride = region.pointers[op.slots]
        y = region.name(op.y)
        region.arrays.add(op.y)
        lines = [f"float {y}[kVec];  // {region.comment(op)}"]
        weights = "moesaic::NoWeights()"
        if op.weights is not None:
            pointer, stride = region.pointers[op.weights]
            weights = region.unique("weights_of_token")
            kind = f"moesaic::Weights</*align=*/{region.align(op.weights)}, {region.storage(op.weights)}>"
            lines.append(f"const {kind} {weights}{{{pointer} + token * {stride}}};")
        aligned = f"/*align=*/{region.align(op.x)}, /*slots_align=*/{region.align(op.slots)}"
        return [
            *lines,
            f"moesaic::combine<kTopK, kVec, {aligned}>(",
            f"    {x} + column, {x_stride}, {slots} + token * {slots_stride}, {weights}, {y});",
        ]

    def _elementwise(self, results: list[_Result]) -> list[str]:
        """Numbers of the token first, then those of its columns in one loop, in which the results collect theirs."""
        single: list[str] = []
        inside: list[str] = []
        for inner in self.region.body.ops[:-1]:
            if inner is self.combine:
                continue
            if not isinstance(inner, math.Elementwise):
                raise UnsupportedError(f"{self.op.symbol}: {inner.name} has no form after a combine")
            line = self.region.assignment(inner)
            if line:
                (inside if self._in_columns(inner.results[0]) else single).append(line)
        wide = [r for r in results if self._in_columns(r.value)]
        declared = [f"{storage(self.op, r.index)} {r.array}[kVec];" for r in wide]
        inside += [f"{r.array}[v] = {self.region.stored(r.index, r.value)};" for r in wide]
        loop = ["#pragma unroll", "for (int v = 0; v < kVec; ++v) {", *indented(inside, 2), "}"]
        return [*single, *declared, *(loop if wide else [])]

    def _result(self, number: int, value: Value) -> _Result:
        pointer = self.region.parameters.pointer(self.op.reads + number)
        array = self.region.unique(f"{pointer.removesuffix('_ptr')}_stored")
        return _Result(self.op.reads + number, value, pointer, array)

    def _store(self, result: _Result) -> list[str]:
        value, pointer = result.value, result.pointer
        if self._in_columns(value) and value.type.rank == 2:
            align = aligned_rows(self.op, result.index)
            where = f"{pointer} + token * kColumns + column"
            return [f"moesaic::store<kVec, /*align=*/{align}>({where}, {result.array});"]
        if value.type.leading != "T":
            raise UnsupportedError(f"{self.op.symbol}: a combine returns rows of tokens, not {value.type}")
        return [f"if (column == 0) moesaic::store_one({pointer} + token, {self.region.stored(result.index, value)});"]


def tokens_per_block(vectors: int, threads: int) -> int:
    """Tokens of a block whose threads take one vector after the other: few, with few threads idle in the last round."""
    least = max(1, threads // vectors)

    def idle(tokens: int) -> float:
        rounds = -(-tokens * vectors // threads)
        return 1 - tokens * vectors / (rounds * threads)

    choices = range(least, least + _MORE_TOKENS)
    return next((n for n in choices if idle(n) <= _IDLE), min(choices, key=idle))

"""``col.``: reductions across tokens, per expert, and what is done with their results.

A *column value* is complete only after a kernel over all tokens: sums and counts [E], and everything computed from
them. With ``segments`` each of N sequences of equal length is reduced alone, [N, E]: ``batch_first`` where the tokens
of a sequence follow one another (logits [N, S, E]), ``sequence_first`` where they lie N apart (logits [S, N, E]).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moesaic.ir import core
from moesaic.ir.arrays import Array, ArrayNamespace
from moesaic.ir.core import Function, Op, Value, create_one, operand, optional_operand, result
from moesaic.ir.errors import InputError
from moesaic.ir.ops.row import check_picks
from moesaic.ir.types import Dim, DType, TensorType

SEGMENTS = ("", "batch_first", "sequence_first")


def order_of_sequences(function: Function) -> str:
    """In which order the sequences of a function's tokens lie; empty where nothing is by sequence.

    Raises:
        InputError: it computes by sequence in two orders.
    """
    found = {str(op.attributes["segments"]) for op in function.body.ops if op.attributes.get("segments")}
    if len(found) > 1:
        raise InputError(f"@{function.name} computes by sequence in two orders of tokens: {', '.join(sorted(found))}")
    return found.pop() if found else ""


class ColumnReduction(Op):
    """Base: a reduction over all tokens, or over those of each sequence."""

    segments = core.string("order of tokens where each sequence is reduced alone", choices=SEGMENTS, default="")

    @property
    def rows(self) -> Value:
        """What is reduced."""
        return self.operands[0]

    @property
    def sequences(self) -> Value | None:
        """A value with a row for each sequence; only the number of rows is used."""
        return self.operands[1] if len(self.operands) > 1 else None

    def reduced_shape(self, columns: Dim) -> tuple[Dim, ...]:
        if bool(self.segments) != (self.sequences is not None):
            self.fail("segments go with an operand that has a row for each sequence")
        if self.sequences is None:
            return (columns,)
        if self.sequences.type.leading != "N":
            self.fail(f"expected a value with N rows, one for each sequence, found {self.sequences.type}")
        return (self.sequences.type.shape[0], columns)

    def reduced(self, xp: ArrayNamespace, x: Array, sequences: Sequence[Array]) -> Array:
        """The sum of `x` over all tokens, or over those of each sequence."""
        if not sequences:
            return xp.sum(x, 0)
        grouped, axis = by_sequence(xp, x, xp.shape(sequences[0])[0], self.segments)
        return xp.sum(grouped, axis)


class Sum(ColumnReduction):
    """y_e = sum over tokens of x_{t,e}, float32, in an order fixed by the launch; of each sequence with `segments`."""

    name = "col.sum"
    x = operand("[T, E]")
    sequences_ = optional_operand("[N, ...]: as many rows as there are sequences")
    y = result("[E] or [N, E], f32")

    def flops(self, size: Callable[[TensorType], float]) -> float:
        return size(self.x.type)

    def infer(self) -> Sequence[TensorType]:
        if self.x.type.rank != 2 or not self.x.type.dtype.is_float:
            self.fail(f"expected float rows [T, E], found {self.x.type}")
        dtype = DType.F64 if self.x.type.dtype is DType.F64 else DType.F32
        return [TensorType(self.reduced_shape(self.x.type.shape[1]), dtype)]

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return self.reduced(xp, xp.upcast(operands[0]), operands[1:])

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        dy = cotangents[0]
        if dy is None:
            dx = None
        elif self.segments:
            dx = create_one("col.spread", dy, self.x, segments=self.segments)
        else:
            dx = create_one("math.broadcast", dy, self.x)
        return [dx, None][: len(self.operands)]


class Count(ColumnReduction):
    """y_e = how many picks, over all tokens or those of each sequence, are expert e; those not here count
    nowhere."""

    name = "col.count"
    indices = operand("[T, K] i32 picks")
    sequences_ = optional_operand("[N, ...]: as many rows as there are sequences")
    y = result("[size] or [N, size], i32")
    size = core.integer("number of experts", minimum=1)

    def infer(self) -> Sequence[TensorType]:
        if self.indices.type.rank != 2 or self.indices.type.dtype is not DType.I32:
            self.fail(f"expected picks [T, K] of i32, found {self.indices.type}")
        return [TensorType(self.reduced_shape(self.size), DType.I32)]

    def verify(self) -> None:
        check_picks(self, self.indices, self.size)

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return xp.cast(self.reduced(xp, xp.count(operands[0], self.size), operands[1:]), DType.I32)


class Rows(Op):
    """y = the number of rows of x: of tokens, or of sequences."""

    name = "col.rows"
    x = operand("[T, ...] or [N, ...]; its values are not used")
    y = result("scalar, f32")

    def infer(self) -> Sequence[TensorType]:
        if not self.x.type.leading:
            self.fail(f"expected a value with a row for each token or sequence, found {self.x.type}")
        return [TensorType((), DType.F32)]

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return xp.constant(1.0 * xp.shape(operands[0])[0], operands[0])  # float() would make torch.compile fix it


class Spread(Op):
    """y_{t,e} = x_{n(t),e}: what belongs to a sequence, for each of its tokens."""

    name = "col.spread"
    x = operand("[N, E]")
    like = operand("[T, E]; gives the shape, its values are not used")
    y = result("[T, E], f32")
    segments = core.string("order of tokens", choices=SEGMENTS[1:])

    def infer(self) -> Sequence[TensorType]:
        if self.x.type.leading != "N" or self.like.type.leading != "T":
            self.fail(f"expected a value [N, E] of sequences and rows [T, E], found {self.x.type} and {self.like.type}")
        return [TensorType(self.like.type.shape, self.x.type.dtype)]

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        x, like = operands
        sequences, columns = xp.shape(x)
        grouped, axis = by_sequence(xp, like, sequences, self.segments)
        rows = xp.reshape(x, (sequences, 1, columns) if axis == 1 else (1, sequences, columns))
        return xp.reshape(xp.broadcast_to(rows, xp.shape(grouped)), xp.shape(like))

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        dy = cotangents[0]
        return [None if dy is None else create_one("col.sum", dy, self.x, segments=self.segments), None]


class Total(Op):
    """y = sum of all elements of a column value, float32, in one order."""

    name = "col.total"
    x = operand("[E] or [N, E]")
    y = result("scalar, f32")

    def flops(self, size: Callable[[TensorType], float]) -> float:
        return size(self.x.type)

    def infer(self) -> Sequence[TensorType]:
        if self.x.type.leading == "T" or not self.x.type.dtype.is_float:
            self.fail(f"expected a float column value [E] or [N, E], found {self.x.type}")
        return [TensorType((), DType.F64 if self.x.type.dtype is DType.F64 else DType.F32)]

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        x = xp.upcast(operands[0])
        elements = 1
        for n in xp.shape(x):
            elements *= n
        return xp.sum(xp.reshape(x, (elements,)), 0)

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        dy = cotangents[0]
        return [None if dy is None else create_one("math.broadcast", dy, self.x)]


def by_sequence(xp: ArrayNamespace, x: Array, sequences: int, segments: str) -> tuple[Array, int]:
    """Rows [T, n] as [N, S, n] or [S, N, n], and the axis of it along which the tokens of a sequence lie."""
    tokens, columns = xp.shape(x)
    length = tokens // sequences if sequences else 0
    if segments == "batch_first":
        return xp.reshape(x, (sequences, length, columns)), 1
    return xp.reshape(x, (length, sequences, columns)), 0

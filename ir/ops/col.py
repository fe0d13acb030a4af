"""``col.``: reductions across tokens, per expert."""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.ir import core
from moesaic.ir.arrays import Array, ArrayNamespace
from moesaic.ir.core import Op, Value, operand, result
from moesaic.ir.ops.row import check_picks
from moesaic.ir.types import DType, TensorType


class Sum(Op):
    """y_e = sum over tokens of x_{t,e}, float32, in an order fixed by the launch."""

    name = "col.sum"
    x = operand("[T, E]")
    y = result("[E], f32")

    def infer(self) -> Sequence[TensorType]:
        if self.x.type.rank != 2 or not self.x.type.dtype.is_float:
            self.fail(f"expected float rows [T, E], found {self.x.type}")
        dtype = DType.F64 if self.x.type.dtype is DType.F64 else DType.F32
        return [TensorType(self.x.type.shape[1:], dtype)]

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return xp.sum(xp.upcast(operands[0]), 0)

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        dy = cotangents[0]
        return [None if dy is None else core.create_one("math.broadcast", dy, self.x)]


class Count(Op):
    """y_e = how many picks, over all tokens, are expert e; those not here count nowhere."""

    name = "col.count"
    indices = operand("[T, K] i32 picks")
    y = result("[size], i32")
    size = core.integer("number of experts", minimum=1)

    def infer(self) -> Sequence[TensorType]:
        if self.indices.type.rank != 2 or self.indices.type.dtype is not DType.I32:
            self.fail(f"expected picks [T, K] of i32, found {self.indices.type}")
        return [TensorType((self.size,), DType.I32)]

    def verify(self) -> None:
        check_picks(self, self.indices, self.size)

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        # Shifted by one, so that the first count is of those not here.
        return xp.cast(xp.count(operands[0] + 1, self.size + 1)[1:], DType.I32)

"""``math.``: elementwise ops, any shape, NumPy broadcasting.

A score function or an activation that cannot be composed of these is one class here: the equation, the reference, the
gradient and the CUDA expression (``docs/tutorial.md``). Arithmetic is float32 whatever the storage type of the operands
(float64 stays float64, on the reference backend only).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from moesaic.ir import core
from moesaic.ir.arrays import Array, ArrayNamespace
from moesaic.ir.attributes import format_float
from moesaic.ir.core import Op, Value, create_one, operand, result
from moesaic.ir.errors import InputError
from moesaic.ir.types import DType, TensorType, broadcast_shapes

SMALLEST_NORMAL = 2.0**-126
"""Of float32. Below it a divisor counts as zero."""

_TWO_OVER_ROOT_PI = 1.1283791670955126


class Elementwise(Op):
    """Base: one result, of the broadcast shape of the operands."""

    cuda: ClassVar[str] = ""
    """C++ expression over ``{0}``, ``{1}``, …: float operands, float result."""
    strictly_increasing: ClassVar[bool] = False
    """In its only operand, in exact arithmetic: ranking the operand ranks the result."""
    needs_positive: ClassVar[bool] = False
    """Is increasing only where the operand is not negative; elsewhere it is NaN."""
    gives_positive: ClassVar[bool] = False
    """Its result is never negative."""
    arithmetic: ClassVar[bool] = True
    """Computes, rather than compares, selects or converts."""

    def result_dtype(self) -> DType:
        return DType.F64 if any(v.type.dtype is DType.F64 for v in self.operands) else DType.F32

    def infer(self) -> Sequence[TensorType]:
        try:
            shape = broadcast_shapes(*(v.type.shape for v in self.operands))
        except InputError as error:
            self.fail(str(error))
        return [TensorType(shape, self.result_dtype())]

    def cuda_expression(self, *operands: str) -> str:
        """The C++ expression of one element."""
        return self.cuda.format(*operands)

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        given = [xp.upcast(x) for x in operands]
        if self.result_dtype().is_float and not any(v.type.dtype.is_float for v in self.operands):
            given = [xp.cast(x, DType.F32) for x in given]  # arithmetic is that of floats
        return self.formula(xp, *given)

    def flops(self, size: Callable[[TensorType], float]) -> float:
        return size(self.results[0].type) if self.arithmetic else 0.0

    def formula(self, xp: ArrayNamespace, *operands: Array) -> Array:
        """:meth:`reference` on operands already in the type of the arithmetic."""
        raise NotImplementedError


class Unary(Elementwise):
    x = operand("any shape")
    y = result("same shape, f32")


class Binary(Elementwise):
    a = operand("any shape")
    b = operand("broadcasts against a")
    y = result("broadcast shape, f32")


class Add(Binary):
    """y = a + b."""

    name = "math.add"
    cuda = "{0} + {1}"

    def formula(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return operands[0] + operands[1]

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        return [cotangents[0], cotangents[0]]


class Sub(Binary):
    """y = a - b."""

    name = "math.sub"
    cuda = "{0} - {1}"

    def formula(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return operands[0] - operands[1]

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        dy = _only(cotangents)
        return [dy, -dy]


class Mul(Binary):
    """y = a * b."""

    name = "math.mul"
    cuda = "{0} * {1}"

    def formula(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return operands[0] * operands[1]

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        dy = _only(cotangents)
        return [dy * self.b, dy * self.a]


class Div(Binary):
    """y = a / b, as IEEE 754 has it (0/0 is NaN)."""

    name = "math.div"
    cuda = "moesaic::divide({0}, {1})"

    def formula(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return operands[0] / operands[1]

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        da = _only(cotangents) / self.b
        # Two divisions by b: its square overflows long before b does.
        return [da, -(da * self.a / self.b)]


class SafeDiv(Binary):
    """y = a / b, and 0 where |b| < 2^-126: a sum of weights that underflowed divides nothing."""

    name = "math.safe_div"
    cuda = "moesaic::safe_divide({0}, {1})"

    def formula(self, xp: ArrayNamespace, *operands: Array) -> Array:
        a, b = operands
        zero = xp.abs(b) < SMALLEST_NORMAL
        # The divisor is replaced too, so that the derivative of the branch not taken stays finite.
        quotient = a / xp.where(zero, xp.constant(1.0, b), b)
        return xp.where(zero, xp.constant(0.0, quotient), quotient)

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        da = create_one("math.safe_div", _only(cotangents), self.b)
        return [da, -create_one("math.safe_div", da * self.a, self.b)]


class Maximum(Binary):
    """y = max(a, b); NaN if either is. The gradient goes to a where a >= b, else to b."""

    name = "math.maximum"
    cuda = "moesaic::maximum({0}, {1})"

    def formula(self, xp: ArrayNamespace, *operands: Array) -> Array:
        a, b = operands
        return xp.where((a < b) | xp.isnan(b), b, a)

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        dy = _only(cotangents)
        second = create_one("math.less", self.a, self.b)
        return [select(second, 0.0, dy), select(second, dy, 0.0)]


class Minimum(Binary):
    """y = min(a, b); NaN if either is. The gradient goes to a where a <= b, else to b."""

    name = "math.minimum"
    cuda = "moesaic::minimum({0}, {1})"

    def formula(self, xp: ArrayNamespace, *operands: Array) -> Array:
        a, b = operands
        return xp.where((b < a) | xp.isnan(b), b, a)

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        dy = _only(cotangents)
        second = create_one("math.less", self.b, self.a)
        return [select(second, 0.0, dy), select(second, dy, 0.0)]


class Less(Binary):
    """y = a < b (false with NaN)."""

    name = "math.less"
    arithmetic = False
    cuda = "{0} < {1}"

    def result_dtype(self) -> DType:
        return DType.I1

    def formula(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return operands[0] < operands[1]


class Equal(Binary):
    """y = a == b (false with NaN; -0 equals +0)."""

    name = "math.equal"
    arithmetic = False
    cuda = "{0} == {1}"

    def result_dtype(self) -> DType:
        return DType.I1

    def formula(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return operands[0] == operands[1]


class Select(Elementwise):
    """y = a where the condition holds, else b; the other side is not looked at, so its NaN does not spread."""

    name = "math.select"
    arithmetic = False
    cuda = "{0} ? {1} : {2}"
    condition = operand("i1 or u8")
    a = operand("taken where the condition holds")
    b = operand("taken elsewhere")
    y = result("broadcast shape, f32")

    def verify(self) -> None:
        if self.condition.type.dtype not in (DType.I1, DType.U8):
            self.fail(f"condition must be i1 or u8, found {self.condition.type}")

    def formula(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return xp.where(operands[0] != 0, operands[1], operands[2])

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        dy = _only(cotangents)
        return [None, select(self.condition, dy, 0.0), select(self.condition, 0.0, dy)]


class Neg(Unary):
    """y = -x."""

    name = "math.neg"
    cuda = "-{0}"

    def formula(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return -operands[0]

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        return [-_only(cotangents)]


class Abs(Unary):
    """y = |x|. The derivative at 0 is 0."""

    name = "math.abs"
    cuda = "fabsf({0})"
    gives_positive = True

    def formula(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return xp.abs(operands[0])

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        dy = _only(cotangents)
        signed = select(create_one("math.less", self.x, 0.0), -dy, dy)
        return [select(create_one("math.equal", self.x, 0.0), 0.0, signed)]


class Pow(Unary):
    """y = x^exponent, for x >= 0; elsewhere as IEEE 754 has it."""

    name = "math.pow"
    exponent = core.number("a constant")

    def cuda_expression(self, *operands: str) -> str:
        if self.exponent == 2:  # cheaper than a power, and as exact as a product
            return f"{operands[0]} * {operands[0]}"
        if self.exponent == 0.5:
            return f"moesaic::square_root({operands[0]})"
        return f"powf({operands[0]}, {format_float(float(self.exponent))}f)"

    def formula(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return operands[0] ** self.exponent

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        if self.exponent == 1:
            return [_only(cotangents)]
        slope = create_one("math.pow", self.x, exponent=self.exponent - 1) * float(self.exponent)
        return [_only(cotangents) * slope]


class Exp(Unary):
    """y = e^x."""

    name = "math.exp"
    cuda = "moesaic::exp({0})"
    strictly_increasing = True
    gives_positive = True

    def formula(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return xp.exp(operands[0])

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        return [_only(cotangents) * self.y]


class ExpDifference(Elementwise):
    """y = e^(x - shift), for x <= shift: cheap, since an error that grows with shift - x matters less as y shrinks.

    The error relative to 1 is at most 2^-23; results below 2^-126 become 0.
    """

    name = "math.exp_difference"
    cuda = "moesaic::exp_difference({0}, {1})"
    x = operand("any shape")
    shift = operand("broadcasts against x; an upper limit of it")
    y = result("broadcast shape, f32")

    def formula(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return xp.exp(operands[0] - operands[1])

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        dx = _only(cotangents) * self.y
        return [dx, -dx]


class Log(Unary):
    """y = ln(x)."""

    name = "math.log"
    cuda = "logf({0})"
    strictly_increasing = True
    needs_positive = True

    def formula(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return xp.log(operands[0])

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        return [_only(cotangents) / self.x]


class Log1p(Unary):
    """y = ln(1 + x)."""

    name = "math.log1p"
    cuda = "log1pf({0})"
    strictly_increasing = True
    needs_positive = True

    def formula(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return xp.log1p(operands[0])

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        return [_only(cotangents) / (self.x + 1.0)]


class Sqrt(Unary):
    """y = sqrt(x). The derivative at 0 is taken as 0, so that an underflowed score gives no infinite gradient."""

    name = "math.sqrt"
    cuda = "moesaic::square_root({0})"
    strictly_increasing = True
    needs_positive = True
    gives_positive = True

    def formula(self, xp: ArrayNamespace, *operands: Array) -> Array:
        x = operands[0]
        zero = x == 0
        root = xp.sqrt(xp.where(zero, xp.constant(1.0, x), x))
        return xp.where(zero, xp.constant(0.0, x), root)

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        return [create_one("math.safe_div", _only(cotangents) * 0.5, self.y)]


class Tanh(Unary):
    """y = tanh(x)."""

    name = "math.tanh"
    cuda = "tanhf({0})"
    strictly_increasing = True

    def formula(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return xp.tanh(operands[0])

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        return [_only(cotangents) * (1.0 - self.y * self.y)]


class Sigmoid(Unary):
    """y = 1 / (1 + e^-x)."""

    name = "math.sigmoid"
    cuda = "moesaic::sigmoid({0})"
    strictly_increasing = True
    gives_positive = True

    def formula(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return xp.sigmoid(operands[0])

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        return [_only(cotangents) * (self.y * (1.0 - self.y))]


class Softplus(Unary):
    """y = ln(1 + e^x), computed as max(x, 0) + log1p(e^-|x|), so that it neither overflows nor loses its tail."""

    name = "math.softplus"
    cuda = "moesaic::softplus({0})"
    strictly_increasing = True
    gives_positive = True

    def formula(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return xp.softplus(operands[0])

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        return [_only(cotangents) * create_one("math.sigmoid", self.x)]


class Relu(Unary):
    """y = max(x, 0); NaN stays NaN. The derivative at 0 is 0."""

    name = "math.relu"
    cuda = "moesaic::maximum({0}, 0.0f)"

    def formula(self, xp: ArrayNamespace, *operands: Array) -> Array:
        x = operands[0]
        return xp.where(x <= 0, xp.constant(0.0, x), x)

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        return [select(create_one("math.less", 0.0, self.x), _only(cotangents), 0.0)]


class Silu(Unary):
    """y = x / (1 + e^-x)."""

    name = "math.silu"
    cuda = "{0} * moesaic::sigmoid({0})"

    def formula(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return operands[0] * xp.sigmoid(operands[0])

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        s = create_one("math.sigmoid", self.x)
        return [_only(cotangents) * (s + self.y * (1.0 - s))]


class Erf(Unary):
    """y = 2 / sqrt(pi) * integral of e^(-s^2) from 0 to x."""

    name = "math.erf"
    cuda = "erff({0})"
    strictly_increasing = True

    def formula(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return xp.erf(operands[0])

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        slope = create_one("math.exp", -(self.x * self.x)) * _TWO_OVER_ROOT_PI
        return [_only(cotangents) * slope]


class GeluTanh(Unary):
    """y = x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))."""

    name = "math.gelu_tanh"
    cuda = "moesaic::gelu_tanh({0})"
    ROOT_2_OVER_PI: ClassVar[float] = 0.7978845608028654
    CUBIC: ClassVar[float] = 0.044715

    def formula(self, xp: ArrayNamespace, *operands: Array) -> Array:
        x = operands[0]
        return 0.5 * x * (1.0 + xp.tanh(self.ROOT_2_OVER_PI * (x + self.CUBIC * x * x * x)))

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        x = self.x
        square = x * x
        t = create_one("math.tanh", (x + square * x * self.CUBIC) * self.ROOT_2_OVER_PI)
        slope = (1.0 - t * t) * (1.0 + square * (3.0 * self.CUBIC)) * self.ROOT_2_OVER_PI
        return [_only(cotangents) * ((t + 1.0) * 0.5 + x * slope * 0.5)]


class Clamp(Unary):
    """y = min(max(x, min), max); NaN stays NaN. The derivative outside the limits is 0, at a limit 1."""

    name = "math.clamp"
    min = core.number("lower limit", default=-3.4028234663852886e38)
    max = core.number("upper limit", default=3.4028234663852886e38)

    def verify(self) -> None:
        if self.min > self.max:
            self.fail(f"min {format_float(self.min)} is above max {format_float(self.max)}")

    def cuda_expression(self, *operands: str) -> str:
        low, high = (format_float(float(v)) + "f" for v in (self.min, self.max))
        return f"moesaic::minimum(moesaic::maximum({operands[0]}, {low}), {high})"

    def formula(self, xp: ArrayNamespace, *operands: Array) -> Array:
        x = operands[0]
        low = xp.where(x < self.min, xp.constant(self.min, x), x)
        return xp.where(low > self.max, xp.constant(self.max, x), low)

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        inside = select(create_one("math.less", self.max, self.x), 0.0, _only(cotangents))
        return [select(create_one("math.less", self.x, self.min), 0.0, inside)]


class Cast(Elementwise):
    """y = x rounded to another element type (to nearest, ties to even)."""

    name = "math.cast"
    arithmetic = False
    x = operand("any shape")
    y = result("same shape, of the type asked")
    dtype = core.string("element type of the result", choices=tuple(d.value for d in DType))

    def result_dtype(self) -> DType:
        return DType.parse(self.dtype)

    def cuda_expression(self, *operands: str) -> str:
        target = {"bf16": "moesaic::round_to<__nv_bfloat16>", "f16": "moesaic::round_to<__half>"}.get(self.dtype)
        if target is not None:
            return f"{target}({operands[0]})"
        plain = {"f32": "float", "i16": "short", "i64": "long long"}.get(self.dtype, "int")
        return f"static_cast<{plain}>({operands[0]})"

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return xp.cast(operands[0], DType.parse(self.dtype))

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        return [cotangents[0] if DType.parse(self.dtype).is_float else None]


class Broadcast(Elementwise):
    """y = x repeated to the shape of another value."""

    name = "math.broadcast"
    arithmetic = False
    cuda = "{0}"
    x = operand("broadcasts to the other's shape")
    like = operand("gives the shape; its values are not used")
    y = result("shape of `like`, f32")

    def infer(self) -> Sequence[TensorType]:
        [type] = super().infer()
        if type.shape != self.like.type.shape:
            self.fail(f"{self.x.type} cannot be repeated to the shape of {self.like.type}")
        return [type]

    def cuda_expression(self, *operands: str) -> str:
        return operands[0]

    def formula(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return xp.broadcast_to(operands[0], xp.shape(operands[1]))

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        return [cotangents[0], None]


class And(Binary):
    """y = a and b, of two flags."""

    name = "math.and"
    arithmetic = False
    cuda = "{0} && {1}"

    def result_dtype(self) -> DType:
        return DType.I1

    def verify(self) -> None:
        for flag in self.operands:
            if flag.type.dtype is not DType.I1:
                self.fail(f"expected flags (i1), found {flag.type}")

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return operands[0] & operands[1]


def select(condition: Value, a: Value | float, b: Value | float) -> Value:
    """``math.select`` with constants allowed on either side."""
    return create_one("math.select", condition, a, b)


def safe_div(a: Value | float, b: Value | float) -> Value:
    """``math.safe_div`` with constants allowed on either side."""
    return create_one("math.safe_div", a, b)


def _only(cotangents: Sequence[Value | None]) -> Value:
    """The cotangent of the single result; the pass never asks for a gradient without one."""
    value = cotangents[0]
    if value is None:
        raise InputError("the gradient of an op with one result needs its cotangent")
    return value

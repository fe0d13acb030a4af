"""``row.``: collectives within one token; nothing crosses tokens.

Operands have the shape [T, E] (a token's experts), [T, K] (its picks) or [T, 1]. Selection follows one order
everywhere: value descending, index ascending; -0 equals +0; NaN ranks below -inf; what is not allowed ranks last.

Picks are made by ``row.topk``, which are distinct, or elsewhere and come in through ``row.given``: these may repeat. -1
stands for "not here": a given id that is no expert, or no pick where too few were allowed. Whatever takes picks says
what it does with both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moesaic.ir import core
from moesaic.ir.arrays import Array, ArrayNamespace
from moesaic.ir.attributes import Call
from moesaic.ir.core import Op, OpResult, Value, create_one, operand, optional_operand, result
from moesaic.ir.ops.math import SMALLEST_NORMAL
from moesaic.ir.types import DType, TensorType


class RowOp(Op):
    """Base: checks that the first operand has rows."""

    def columns(self, value: Value) -> int:
        """The static length of a value's rows; a diagnostic if there is none."""
        if value.type.rank != 2:
            self.fail(f"expected rows [T, n], found {value.type}")
        size = value.type.shape[-1]
        if not isinstance(size, int):
            self.fail(f"rows need a constant length, found {value.type}")
        return size

    def float_dtype(self, value: Value) -> DType:
        if not value.type.dtype.is_float:
            self.fail(f"expected floats, found {value.type}")
        return DType.F64 if value.type.dtype is DType.F64 else DType.F32


class Reduction(RowOp):
    """Base of reductions of a row to one value."""

    x = operand("[T, n]")
    y = result("[T, 1], f32")

    def infer(self) -> Sequence[TensorType]:
        self.columns(self.x)
        return [TensorType((self.x.type.shape[0], 1), self.float_dtype(self.x))]


class Sum(Reduction):
    """y = sum of the row, in float32, in an order fixed by the row's length alone."""

    name = "row.sum"

    def flops(self, size: Callable[[TensorType], float]) -> float:
        return size(self.x.type)

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return xp.expand_dims(xp.sum(xp.upcast(operands[0]), -1))

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        dy = cotangents[0]
        return [None if dy is None else create_one("math.broadcast", dy, self.x)]


class Max(Reduction):
    """y = largest of the row; NaN if the row holds one. Its gradient goes to every element that equals it, in equal
    parts (torch.amax does the same)."""

    name = "row.max"

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return xp.expand_dims(xp.max(xp.upcast(operands[0]), -1))

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        dy = cotangents[0]
        if dy is None:
            return [None]
        hit = create_one("math.select", create_one("math.equal", self.x, self.y), 1.0, 0.0)
        return [dy * hit / create_one("row.sum", hit)]


class Softmax(RowOp):
    """y_e = exp(x_e - m) / sum_j exp(x_j - m) with m = max_j x_j. A row of only -inf gives zeros."""

    name = "row.softmax"
    x = operand("[T, n] logits")
    y = result("[T, n], f32")
    # Not elementwise, but within a row it keeps the order of its operand; see Router's ranking rule.
    strictly_increasing = True
    gives_positive = True

    def infer(self) -> Sequence[TensorType]:
        self.columns(self.x)
        return [TensorType(self.x.type.shape, self.float_dtype(self.x))]

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        x = xp.upcast(operands[0])
        largest = xp.detach(xp.expand_dims(xp.max(x, -1)))
        e = xp.exp(x - xp.where(largest == float("-inf"), xp.constant(0.0, x), largest))
        total = xp.expand_dims(xp.sum(e, -1))
        zero = total == 0
        return xp.where(zero, xp.constant(0.0, e), e / xp.where(zero, xp.constant(1.0, e), total))

    def decompose(self) -> Value:
        """The same in simpler ops, appended to the op's block."""
        largest = named("largest", create_one("row.max", self.x))
        # A row of only -inf would give -inf - -inf = NaN; shifting it by 0 gives exp(-inf) = 0.
        none = create_one("math.equal", largest, float("-inf"))
        shift = named("shift", create_one("math.select", none, 0.0, largest))
        e = named("exponentials", create_one("math.exp_difference", self.x, shift))
        return create_one("math.safe_div", e, named("total", create_one("row.sum", e)))

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        dy = cotangents[0]
        if dy is None:
            return [None]
        inner = create_one("row.sum", dy * self.y)
        return [self.y * (dy - inner)]


class LogSumExp(RowOp):
    """y = m + ln sum_j exp(x_j - m) with m = max_j x_j; -inf for a row of only -inf."""

    name = "row.logsumexp"
    x = operand("[T, n] logits")
    y = result("[T, 1], f32")

    def infer(self) -> Sequence[TensorType]:
        self.columns(self.x)
        return [TensorType((self.x.type.shape[0], 1), self.float_dtype(self.x))]

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        x = xp.upcast(operands[0])
        largest = xp.detach(xp.expand_dims(xp.max(x, -1)))
        shift = xp.where(largest == float("-inf"), xp.constant(0.0, x), largest)
        total = xp.expand_dims(xp.sum(xp.exp(x - shift), -1))
        # The logarithm of an empty sum is not taken, so that its derivative stays finite.
        zero = total == 0
        return xp.where(zero, xp.constant(float("-inf"), x), shift + xp.log(xp.where(zero, xp.constant(1.0, x), total)))

    def decompose(self) -> Value:
        """The same in simpler ops, appended to the op's block."""
        largest = named("largest", create_one("row.max", self.x))
        none = create_one("math.equal", largest, float("-inf"))
        shift = named("shift", create_one("math.select", none, 0.0, largest))
        total = create_one("row.sum", create_one("math.exp_difference", self.x, shift))
        return shift + create_one("math.log", total)

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        dy = cotangents[0]
        return [None if dy is None else dy * create_one("row.softmax", self.x)]


class Normalize(RowOp):
    """y_k = x_k / d with d = max(sum_j x_j + eps, min). Zero where d < 2^-126."""

    name = "row.normalize"
    x = operand("[T, K] weights, not negative")
    y = result("[T, K], f32")
    eps = core.number("added to the sum", minimum=0.0, default=0.0)
    min = core.number("lower limit of the divisor; 0 for none", minimum=0.0, default=0.0)

    def infer(self) -> Sequence[TensorType]:
        self.columns(self.x)
        return [TensorType(self.x.type.shape, self.float_dtype(self.x))]

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        x = xp.upcast(operands[0])
        total = xp.expand_dims(xp.sum(x, -1)) + self.eps
        if self.min > 0:
            total = xp.where(total < self.min, xp.constant(self.min, total), total)  # at the limit, the sum
        zero = xp.abs(total) < SMALLEST_NORMAL
        quotient = x / xp.where(zero, xp.constant(1.0, total), total)
        return xp.where(zero, xp.constant(0.0, quotient), quotient)

    def divisor(self) -> Value:
        """d of the equation, appended to the op's block."""
        divisor = create_one("row.sum", self.x)
        if self.eps > 0:
            divisor = divisor + self.eps
        return named("divisor", create_one("math.maximum", divisor, self.min) if self.min > 0 else divisor)

    def decompose(self) -> Value:
        """The same in simpler ops, appended to the op's block."""
        return create_one("math.safe_div", self.x, self.divisor())

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        dy = cotangents[0]
        if dy is None:
            return [None]
        divisor = self.divisor()
        # dx = (dy - <dy, y>) / d: y already holds one division by d, so d is never squared.
        inner = create_one("row.sum", dy * self.y)
        if self.min > 0:
            # At the lower limit the divisor is a constant. `maximum` gives ties to its first operand, the sum.
            limited = create_one("math.less", create_one("row.sum", self.x) + self.eps, self.min)
            inner = create_one("math.select", limited, 0.0, inner)
        return [create_one("math.safe_div", dy - inner, divisor)]


class LpNormalize(RowOp):
    """y_k = x_k / n with n = (sum_j |x_j|^p)^(1/p), the largest |x_j| for p = inf. Zero where n < 2^-126."""

    name = "row.lp_normalize"
    x = operand("[T, K] weights")
    y = result("[T, K], f32")
    p = core.number("exponent of the norm, at least 1; inf for the largest", minimum=1.0, infinite=True)

    def infer(self) -> Sequence[TensorType]:
        self.columns(self.x)
        return [TensorType(self.x.type.shape, self.float_dtype(self.x))]

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        x = xp.upcast(operands[0])
        size = xp.abs(x)
        n = xp.expand_dims(xp.max(size, -1))
        if self.p < float("inf"):
            # Relative to the largest, no power overflows and not all underflow. n does not depend on the unit.
            unit = xp.detach(n)
            none = unit < SMALLEST_NORMAL
            unit = xp.where(none, xp.constant(1.0, unit), unit)
            total = xp.expand_dims(xp.sum((size / unit) ** self.p, -1))
            n = xp.where(
                none, xp.constant(0.0, unit), unit * xp.where(none, xp.constant(1.0, total), total) ** (1 / self.p)
            )
        zero = n < SMALLEST_NORMAL
        quotient = x / xp.where(zero, xp.constant(1.0, n), n)
        return xp.where(zero, xp.constant(0.0, quotient), quotient)

    def norm(self) -> Value:
        """n of the equation, appended to the op's block."""
        size = create_one("math.abs", self.x)
        if self.p == 1:
            return named("norm", create_one("row.sum", size))
        largest = named("largest", create_one("row.max", size))
        if self.p == float("inf"):
            return largest
        relative = create_one("math.safe_div", size, largest)
        total = create_one("row.sum", create_one("math.pow", relative, exponent=self.p))
        return named("norm", largest * create_one("math.pow", total, exponent=1 / self.p))

    def decompose(self) -> Value:
        """The same in simpler ops, appended to the op's block."""
        return create_one("math.safe_div", self.x, self.norm())

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        dy = cotangents[0]
        if dy is None:
            return [None]
        # dx = (dy - <dy, y> dn/dx) / n, and dn/dx_k = sign(x_k) |y_k|^(p - 1): |y| is at most 1, so that nothing
        # overflows, and y already holds one division by n, so that n is never squared.
        n = self.norm()
        if self.p == 2:
            slope: Value = self.y
        else:
            sign = create_one("math.select", create_one("math.less", self.x, 0.0), -1.0, 1.0)
            sign = create_one("math.select", create_one("math.equal", self.x, 0.0), 0.0, sign)
            if self.p == float("inf"):
                hit = create_one("math.select", create_one("math.equal", create_one("math.abs", self.x), n), 1.0, 0.0)
                slope = sign * hit / create_one("row.sum", hit)
            elif self.p == 1:
                slope = sign
            else:
                slope = sign * create_one("math.pow", create_one("math.abs", self.y), exponent=self.p - 1)
        inner = create_one("row.sum", dy * self.y)
        return [create_one("math.safe_div", dy - inner * slope, n)]


class TopK(RowOp):
    """The k first of a row in selection order: values descending, then index ascending; NaN below -inf.

    values_k = x[indices_k]. Where `allowed` is given, other positions are never picked; where fewer than k are allowed,
    the last indices are -1 and their values 0.
    """

    name = "row.topk"
    x = operand("[T, E] values to rank")
    allowed = optional_operand("[T, E] or [T, 1], i1: what may be picked")
    values = result("[T, k], f32")
    indices = result("[T, k], i32, distinct, in [0, E) or -1")
    k = core.integer("picks per token", minimum=1)

    def infer(self) -> Sequence[TensorType]:
        experts = self.columns(self.x)
        if self.k > experts:
            self.fail(f"k must be between 1 and the {experts} experts, found k = {self.k}")
        tokens = self.x.type.shape[0]
        return [TensorType((tokens, self.k), self.float_dtype(self.x)), TensorType((tokens, self.k), DType.I32)]

    def verify(self) -> None:
        flags = self.x.type.with_dtype(DType.I1)
        if self.allowed is not None and self.allowed.type not in (flags, TensorType((flags.shape[0], 1), DType.I1)):
            self.fail(f"allowed must be {flags}, or one flag a token, found {self.allowed.type}")

    @property
    def may_fall_short(self) -> bool:
        """Whether a row may have fewer than k picks, as far as the op that says what is allowed tells."""
        limit = self.allowed.op if isinstance(self.allowed, core.OpResult) else None
        if isinstance(limit, GroupLimit):
            return limit.keep * (self.columns(self.x) // limit.groups) < self.k
        if isinstance(limit, First):
            return limit.n < self.k
        return self.allowed is not None

    def reference(self, xp: ArrayNamespace, *operands: Array) -> tuple[Array, ...]:
        x = xp.upcast(operands[0])
        if len(operands) == 1:
            picks = selection_order(xp, xp.detach(x), None)[..., : self.k]
        else:
            allowed = xp.broadcast_to(operands[1], xp.shape(x))
            picks = selection_order(xp, xp.detach(x), allowed)[..., : self.k]
            here = xp.take(xp.where(allowed, xp.constant(1.0, x), xp.constant(0.0, x)), picks) > 0
            picks = xp.where(here, picks, xp.constant(-1.0, x))  # numbers below 2^24: exact as floats
        return xp.take(x, picks), xp.cast(picks, DType.I32)

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        dvalues = cotangents[0]
        dx = None
        if dvalues is not None:
            dx = create_one("row.scatter", dvalues, self.indices, size=self.columns(self.x))
        return [dx, None][: len(self.operands)]


class Given(RowOp):
    """Picks made elsewhere: y_k = indices_k where that lies in [0, size), else -1, which is "not here".

    All are -1 in rows that are not allowed.
    """

    name = "row.given"
    indices = operand("[T, K] i16, i32 or i64, any numbers")
    allowed = optional_operand("[T, 1] i1")
    y = result("[T, K], i32, in [-1, size), may repeat")
    size = core.integer("number of experts", minimum=1)

    def infer(self) -> Sequence[TensorType]:
        self.columns(self.indices)
        return [self.indices.type.with_dtype(DType.I32)]

    def verify(self) -> None:
        if self.indices.type.dtype not in (DType.I16, DType.I32, DType.I64):
            self.fail(f"indices must be i16, i32 or i64, found {self.indices.type}")
        if self.allowed is not None and self.allowed.type != TensorType((self.indices.type.shape[0], 1), DType.I1):
            self.fail(f"allowed must be one flag a token, found {self.allowed.type}")

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        indices = operands[0]
        here = (indices >= 0) & (indices < self.size)
        if len(operands) > 1:
            here = here & operands[1]
        return xp.cast(xp.where(here, indices, xp.zeros((), self.indices.type.dtype, indices) - 1), DType.I32)


class First(RowOp):
    """y_e = whether e < n: the first columns of a row, as what may be picked."""

    name = "row.first"
    like = operand("[T, E]; gives the shape, its values are not used")
    y = result("[T, E], i1")
    n = core.integer("how many", minimum=1)

    def infer(self) -> Sequence[TensorType]:
        if self.n > self.columns(self.like):
            self.fail(f"n must be at most the {self.columns(self.like)} columns, found n = {self.n}")
        return [self.like.type.with_dtype(DType.I1)]

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        tokens, columns = xp.shape(operands[0])
        ones = xp.zeros((tokens, columns), DType.I32, operands[0]) + 1
        return xp.cumsum(ones) <= self.n


class Append(RowOp):
    """The picks of a row and, after them, `count` columns from `first` on, which every token goes to."""

    name = "row.append"
    indices = operand("[T, K] i32 picks, below `first`")
    y = result("[T, K + count], i32")
    first = core.integer("the first column appended", minimum=0)
    count = core.integer("how many", minimum=1)

    def infer(self) -> Sequence[TensorType]:
        tokens = self.indices.type.shape[0]
        return [TensorType((tokens, self.columns(self.indices) + self.count), DType.I32)]

    def verify(self) -> None:
        check_picks(self, self.indices, self.first + self.count)

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        indices = operands[0]
        shape = (xp.shape(indices)[0], self.count)
        more = xp.cumsum(xp.zeros(shape, DType.I32, indices) + 1) + (self.first - 1)
        return xp.cast(xp.concatenate(indices, more), DType.I32)


class GroupLimit(RowOp):
    """Which experts lie in the `keep` best of `groups` equal, contiguous groups.

    A group's score is its largest value (``max``) or the sum of its n best (``sum_top<n>``, added from the best down);
    groups rank in selection order like experts do. NaN ranks below -inf inside a group, too.
    """

    name = "row.group_limit"
    x = operand("[T, E] values the groups are scored on")
    allowed = result("[T, E], i1")
    groups = core.integer("number of groups; divides E", minimum=1)
    keep = core.integer("groups kept", minimum=1)
    score = core.call("score of a group", {"max": 0, "sum_top": 1}, default=Call("sum_top", (2,)))

    @property
    def best(self) -> int:
        """How many values of a group form its score."""
        call = self.score if isinstance(self.score, Call) else Call(self.score)
        return call.arguments[0] if call.name == "sum_top" else 1

    def infer(self) -> Sequence[TensorType]:
        experts = self.columns(self.x)
        self.float_dtype(self.x)
        if experts % self.groups:
            self.fail(f"groups must divide the {experts} experts, found groups = {self.groups}")
        if self.keep > self.groups:
            self.fail(f"keep must be at most groups = {self.groups}, found keep = {self.keep}")
        if self.best > experts // self.groups:
            self.fail(
                f"score sums the best {self.best} of a group, but a group holds {experts // self.groups} experts "
                f"({experts} experts in {self.groups} groups)"
            )
        return [self.x.type.with_dtype(DType.I1)]

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        x = xp.detach(xp.upcast(operands[0]))
        tokens, experts = xp.shape(x)
        size = experts // self.groups
        grouped = xp.reshape(x, (tokens, self.groups, size))
        order = selection_order(xp, grouped, None)
        ranked = xp.take(grouped, order[..., : self.best])
        score = ranked[..., 0]
        for i in range(1, self.best):
            score = score + ranked[..., i]
        kept = selection_order(xp, score, None)[..., : self.keep]
        flags = xp.put(kept, xp.constant(1.0, x) + xp.zeros(xp.shape(kept), DType.F32, x), self.groups)
        spread = xp.broadcast_to(xp.expand_dims(flags), (tokens, self.groups, size))
        return xp.reshape(spread, (tokens, experts)) > 0


class Gather(RowOp):
    """y_k = x[indices_k], row by row, and 0 where the pick is not here; x may also be a vector [E] that all tokens
    share."""

    name = "row.gather"
    x = operand("[T, E], or [E]")
    indices = operand("[T, K] i32 picks")
    y = result("[T, K], f32")

    def infer(self) -> Sequence[TensorType]:
        self.columns(self.indices)
        if self.x.type.rank not in (1, 2):
            self.fail(f"expected rows [T, E] or a vector [E], found {self.x.type}")
        return [TensorType(self.indices.type.shape, self.float_dtype(self.x))]

    def verify(self) -> None:
        size = self.x.type.shape[-1]
        if isinstance(size, int):
            check_picks(self, self.indices, size)

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        x, indices = xp.upcast(operands[0]), operands[1]
        return xp.take_vector(x, indices) if self.x.type.rank == 1 else xp.take(x, indices)

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        dy = cotangents[0]
        if dy is None:
            return [None, None]
        size = self.x.type.shape[-1]
        if not isinstance(size, int):
            self.fail(f"rows need a constant length, found {self.x.type}")
        return [create_one("row.scatter", dy, self.indices, size=size), None]


class Scatter(RowOp):
    """y_e = sum of the x_k with indices_k = e, in the order of the picks; those not here go nowhere."""

    name = "row.scatter"
    x = operand("[T, K]")
    indices = operand("[T, K] i32 picks")
    y = result("[T, size], f32")
    size = core.integer("length of the resulting rows", minimum=1)

    def infer(self) -> Sequence[TensorType]:
        self.columns(self.indices)
        return [TensorType((self.indices.type.shape[0], self.size), self.float_dtype(self.x))]

    def verify(self) -> None:
        if self.x.type.shape != self.indices.type.shape:
            self.fail(f"x and indices differ in shape: {self.x.type} and {self.indices.type}")
        check_picks(self, self.indices, self.size)

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return xp.put(operands[1], xp.upcast(operands[0]), self.size)

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        dy = cotangents[0]
        return [None if dy is None else create_one("row.gather", dy, self.indices), None]


class Membership(RowOp):
    """y_e = 1 where e is among the picks of the row, else 0: the byte map of a routing."""

    name = "row.membership"
    indices = operand("[T, K] i32 picks")
    y = result("[T, size], u8")
    size = core.integer("length of the resulting rows", minimum=1)

    def infer(self) -> Sequence[TensorType]:
        self.columns(self.indices)
        return [TensorType((self.indices.type.shape[0], self.size), DType.U8)]

    def verify(self) -> None:
        check_picks(self, self.indices, self.size)

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return xp.cast(picked(xp, operands[0], self.size), DType.U8)


class Bitmap(RowOp):
    """Bit e mod 8 of y_(e div 8) is 1 where e is among the picks of the row, else 0; bits past the end are 0."""

    name = "row.bitmap"
    indices = operand("[T, K] i32 picks")
    y = result("[T, ceil(size / 8)], u8")
    size = core.integer("number of experts", minimum=1)

    def infer(self) -> Sequence[TensorType]:
        self.columns(self.indices)
        return [TensorType((self.indices.type.shape[0], -(-self.size // 8)), DType.U8)]

    def verify(self) -> None:
        check_picks(self, self.indices, self.size)

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        indices = operands[0]
        tokens, _ = xp.shape(indices)
        bytes = -(-self.size // 8)
        bits = xp.reshape(xp.cast(picked(xp, indices, 8 * bytes), DType.I32), (tokens, bytes, 8))
        y = bits[..., 0]
        for bit in range(1, 8):
            y = y + bits[..., bit] * 2**bit
        return xp.cast(y, DType.U8)


class Squeeze(RowOp):
    """y_t = x_t0: one number a token, without the axis of columns. How such a number leaves a function."""

    name = "row.squeeze"
    x = operand("[T, 1]")
    y = result("[T], f32")

    def infer(self) -> Sequence[TensorType]:
        if self.columns(self.x) != 1:
            self.fail(f"expected one number a token [T, 1], found {self.x.type}")
        return [TensorType(self.x.type.shape[:1], self.float_dtype(self.x))]

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return xp.upcast(operands[0])[..., 0]

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        dy = cotangents[0]
        return [None if dy is None else create_one("row.unsqueeze", dy)]


class Unsqueeze(RowOp):
    """y_t0 = x_t: one number, or flag, a token as a column, which is how it enters arithmetic with rows."""

    name = "row.unsqueeze"
    x = operand("[T]")
    y = result("[T, 1], f32 or i1")

    def infer(self) -> Sequence[TensorType]:
        if self.x.type.rank != 1 or isinstance(self.x.type.shape[0], int):
            self.fail(f"expected one number a token [T], found {self.x.type}")
        dtype = DType.I1 if self.x.type.dtype is DType.I1 else self.float_dtype(self.x)
        return [TensorType((self.x.type.shape[0], 1), dtype)]

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return xp.expand_dims(xp.upcast(operands[0]))

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        dy = cotangents[0]
        return [None if dy is None else create_one("row.squeeze", dy)]


def are_given(indices: Value) -> bool:
    """Whether picks were made elsewhere: they may repeat."""
    made_by = indices.op if isinstance(indices, OpResult) else None
    return isinstance(made_by, Given) or (isinstance(made_by, Append) and are_given(made_by.indices))


def may_be_away(indices: Value) -> bool:
    """Whether some picks may be -1, "not here", as far as can be told from where they come from."""
    made_by = indices.op if isinstance(indices, OpResult) else None
    if isinstance(made_by, Append):
        return may_be_away(made_by.indices)
    return not isinstance(made_by, TopK) or made_by.may_fall_short


def check_picks(op: Op, indices: Value, experts: int) -> None:
    """Fails unless `indices` are i32 and, as far as the op that makes them tells, below `experts`."""
    if indices.type.dtype is not DType.I32:
        op.fail(f"indices must be i32, found {indices.type}")
    made_by = indices.op if isinstance(indices, OpResult) else None
    limit: object = 0
    if isinstance(made_by, TopK):
        limit = made_by.x.type.shape[-1]
    elif isinstance(made_by, Given):
        limit = made_by.size
    elif isinstance(made_by, Append):
        limit = made_by.first + made_by.count
    if isinstance(limit, int) and limit > experts:
        op.fail(f"these picks are among {limit} experts, which do not fit into {experts}")


def picked(xp: ArrayNamespace, indices: Array, size: int) -> Array:
    """[T, size] bool: whether each is among the picks of the row."""
    ones = xp.zeros(xp.shape(indices), DType.F32, indices) + 1.0
    return xp.put(indices, ones, size) > 0


def named(name: str, value: Value) -> Value:
    """The value, called `name` in printed IR and generated code."""
    value.name = name
    return value


def selection_order(xp: ArrayNamespace, x: Array, allowed: Array | None) -> Array:
    """Positions of the last axis in selection order: allowed first, then no NaN first, then value, then index."""
    nan = xp.isnan(x)
    # NaN is replaced by -inf for the sort by value; a second stable sort by class puts it below every -inf.
    order = xp.argsort_descending(xp.where(nan, xp.constant(float("-inf"), x), x))
    rank = xp.where(nan, xp.constant(1.0, x), xp.constant(2.0, x))
    if allowed is not None:
        rank = xp.where(allowed, rank, xp.constant(0.0, x))
    by_class = xp.argsort_descending(xp.take(rank, order))
    return xp.take(order, by_class)

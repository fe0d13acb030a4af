"""``moe.``: what a person declares and a pass takes apart: the auxiliary losses of a router.

Scores are rows that sum to 1 (0 where a token is masked), counts are those of the picks, and `tokens` is the number of
tokens that count: a scalar, or one for each of N sequences, [N, 1]. Every loss is 0 where there is no token.
"""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.ir import core
from moesaic.ir.arrays import Array, ArrayNamespace
from moesaic.ir.core import Op, Value, create_one, operand, result
from moesaic.ir.ops import math
from moesaic.ir.ops.col import SEGMENTS, by_sequence
from moesaic.ir.types import DType, TensorType


class Loss(Op):
    """Base of losses: a scalar, made of simpler ops by :meth:`decompose`."""

    y = result("scalar, f32")
    coef = core.number("factor of the loss")

    def infer(self) -> Sequence[TensorType]:
        rows = self.operands[0].type
        if rows.leading != "T" or not rows.dtype.is_float:
            self.fail(f"expected float rows [T, n], found {rows}")
        wide = any(v.type.dtype is DType.F64 for v in self.operands)
        return [TensorType((), DType.F64 if wide else DType.F32)]

    def decompose(self) -> Value:
        """The same in simpler ops, appended to the op's block."""
        raise NotImplementedError

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        self.fail("is differentiated after lower-aux-loss took it apart")


class LoadBalanceLoss(Loss):
    """L = coef * E / (K n^2) * sum_e c_e sum_t s_{t,e}, with scores s, counts c, and n tokens.

    With `segments`, the mean over sequences of the same for each. Uniform routing gives coef; the convention of
    transformers, in which counts are divided by n alone, is top_k = 1. Source: Switch Transformers, eq. 4 to 6, with
    counts of all K picks; DeepSeek-V3, eq. 17 to 20, for the form by sequence.
    """

    name = "moe.load_balance_loss"
    scores = operand("[T, E] rows that sum to 1")
    counts = operand("[E] or [N, E]: picks of each expert")
    number = operand("scalar or [N, 1]: tokens that count")
    sequences = core.optional_operand("[N, ...], with segments: as many rows as there are sequences")
    top_k = core.integer("picks per token that the counts are divided by", minimum=1)
    segments = core.string("order of tokens if each sequence has its loss", choices=SEGMENTS, default="")

    def verify(self) -> None:
        experts = self.scores.type.shape[-1]
        if bool(self.segments) != (self.sequences is not None):
            self.fail("segments go with an operand that has a row for each sequence")
        if self.counts.type.shape[-1:] != (experts,) or self.counts.type.leading != ("N" if self.segments else ""):
            wanted = "[N, E]" if self.segments else "[E]"
            self.fail(f"counts must be {wanted} with E = {experts}, found {self.counts.type}")

    @property
    def factor(self) -> float:
        """coef * E / K."""
        experts = self.scores.type.shape[-1]
        assert isinstance(experts, int)
        return self.coef * experts / self.top_k

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        scores, counts, number = operands[:3]
        x = xp.upcast(scores)
        if not self.segments:
            share = xp.sum(xp.sum(x, 0) * counts, 0)
            return self.factor * _divided(xp, _divided(xp, share, number), number)
        sequences = xp.shape(counts)[0]
        grouped, axis = by_sequence(xp, x, sequences, self.segments)
        share = xp.expand_dims(xp.sum(xp.sum(grouped, axis) * counts, -1))
        each = _divided(xp, _divided(xp, share, number), number)
        return self.factor * xp.sum(xp.reshape(each, (sequences,)), 0) / max(sequences, 1)

    def decompose(self) -> Value:
        by = () if self.sequences is None else (self.sequences,)
        sums = create_one("col.sum", self.scores, *by, segments=self.segments or None)
        sums.name = "score_sums"
        share = self.counts * sums
        if self.sequences is None:
            total = create_one("col.total", share)
            return math.safe_div(math.safe_div(total, self.number), self.number) * self.factor
        each = math.safe_div(math.safe_div(share, self.number), self.number)
        return math.safe_div(create_one("col.total", each), create_one("col.rows", self.sequences)) * self.factor


class ZLoss(Loss):
    """L = coef / n * sum_t z_t^2, with z the log-sum-exp of a token's logits. A row of only -inf adds nothing.

    Source: ST-MoE, eq. 5.
    """

    name = "moe.z_loss"
    logsumexp = operand("[T, 1]")
    number = operand("scalar: tokens that count")

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        z, number = operands
        none = z == float("-inf")
        z = xp.where(none, xp.constant(0.0, z), z)
        tokens = xp.shape(z)[0]
        return self.coef * _divided(xp, xp.sum(xp.reshape(z * z, (tokens,)), 0), number)

    def decompose(self) -> Value:
        none = create_one("math.equal", self.logsumexp, float("-inf"))
        z = math.select(none, 0.0, self.logsumexp)
        total = create_one("col.total", create_one("col.sum", z * z))
        return math.safe_div(total, self.number) * self.coef


class EntropyLoss(Loss):
    """L = coef / n * sum_t H_t, H_t = -sum_e s_{t,e} ln s_{t,e}, 0 ln 0 = 0. A negative coef favours even scores."""

    name = "moe.entropy_loss"
    scores = operand("[T, E] rows that sum to 1")
    number = operand("scalar: tokens that count")

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        scores, number = operands
        s = xp.upcast(scores)
        none = s <= 0
        logarithm = xp.log(xp.where(none, xp.constant(1.0, s), s))
        return -self.coef * _divided(xp, xp.sum(xp.sum(s * logarithm, -1), 0), number)

    def decompose(self) -> Value:
        some = create_one("math.less", 0.0, self.scores)
        logarithm = create_one("math.log", math.select(some, self.scores, 1.0))
        entropy = create_one("row.sum", self.scores * logarithm)
        total = create_one("col.total", create_one("col.sum", entropy))
        return math.safe_div(total, self.number) * -self.coef


def _divided(xp: ArrayNamespace, a: Array, b: Array) -> Array:
    """a / b, and 0 where b is 0: no token, no loss."""
    zero = b == 0
    return xp.where(zero, xp.constant(0.0, a), a / xp.where(zero, xp.constant(1.0, a), b))

"""``slot.``: rows in the order of experts, between dispatch and combine.

A *slot* is a row of a buffer in which the rows of an expert follow one another. Of M rows, those of expert e are
``offsets[e]`` to ``offsets[e] + counts[e]``; M bounds what T tokens can need, so that nothing is sized by data. Rows
between are *dead*: an op gives 0 there, and a kernel neither reads nor writes them.

M is a symbol: how many rows it stands for, ``slot.dispatch`` says. Values [M, n] go through elementwise ops and sums of
rows as any others. They come from tokens by ``slot.gather``, and go back by ``slot.combine``; numbers that belong to
picks come and go by ``slot.of_pick`` and ``slot.to_picks``.
"""

from __future__ import annotations

import functools
import math as python_math
import operator
from collections.abc import Callable, Sequence

from moesaic.ir import core
from moesaic.ir.arrays import Array, ArrayNamespace
from moesaic.ir.core import Op, Value, create_one, operand, optional_operand, result
from moesaic.ir.types import Dim, DType, TensorType, symbol

SLOTS = "M"
"""The symbol of the number of slots."""

ALIGNMENTS = (1, 16, 64, 128)

PART_ROWS = 64
"""What the rows of a part of a sum are a multiple of, but for the last rows: a stage of what fetches them."""


class SlotOp(Op):
    """Base: checks that operands are what they are called."""

    def check_rows(self, value: Value, what: str) -> None:
        if value.type.rank != 2 or value.type.leading != SLOTS:
            self.fail(f"{what} must be rows of slots [M, n], found {value.type}")

    def check_picks(self, value: Value, what: str) -> int:
        """K of a [T, K] operand."""
        size = value.type.shape[-1] if value.type.rank == 2 else None
        if value.type.leading != "T" or not isinstance(size, int):
            self.fail(f"{what} must be [T, K] with a constant K, found {value.type}")
        return size

    def check_slots(self, value: Value) -> int:
        """K of the slots of picks."""
        if value.type.dtype is not DType.I32:
            self.fail(f"slots must be [T, K] of i32, found {value.type}")
        return self.check_picks(value, "slots")

    def check_integers(self, value: Value, shape: tuple[Dim, ...], what: str) -> None:
        if value.type != TensorType(shape, DType.I32):
            self.fail(f"{what} must be {TensorType(shape, DType.I32)}, found {value.type}")

    def check_groups(self, counts: Value, offsets: Value, of_experts: Value | None = None, rank: int = 0) -> None:
        """Checks that counts and offsets are of as many experts as there are weights, if given."""
        shape = counts.type.shape if of_experts is None else of_experts.type.shape
        experts = shape[0] if shape else None
        if of_experts is not None and (len(shape) != rank or not isinstance(experts, int)):
            what = "vector an expert [E, n]" if rank == 2 else "matrix an expert [E, m, n]"
            self.fail(f"expected one {what}, found {of_experts.type}")
        if not isinstance(experts, int):
            self.fail(f"counts must be [E] with a constant E, found {counts.type}")
        self.check_integers(counts, (experts,), "counts")
        self.check_integers(offsets, (experts + 1,), "offsets")


def _wide(*values: Value) -> DType:
    """What sums of products of values are: float32, float64 if one is."""
    return DType.F64 if any(v.type.dtype is DType.F64 for v in values) else DType.F32


def slots_needed(experts: int, top_k: int, align: int, capacity: float, pad: bool) -> tuple[int, int]:
    """a and b of M = a T + b, the slots that T tokens can need."""
    each = python_math.ceil(capacity * top_k) if pad else top_k
    return each, experts * (align if pad else align - 1)


class Dispatch(SlotOp):
    """Slots for the picks of T tokens, by a stable counting sort.

    c_e = min(|{(t,k): i_{t,k} = e}|, C);  o_0 = 0, o_{e+1} = o_e + ceil(c_e / align) align (with `pad`: of C in place
    of c_e). The r-th pick of expert e, in the order of t K + k, has slot o_e + r if r < C, else none. Picks outside
    [0, E) have none. C = min(T, ceil(capacity T K / E)), or unbounded if capacity is 0.
    """

    name = "slot.dispatch"
    indices = operand("[T, K] picks; any integer that is no expert is not here")
    counts = result("[E] i32: slots in use of each expert")
    offsets = result("[E + 1] i32: first slot of each expert")
    tokens = result("[M] i32: token of each slot, -1 where dead")
    picks = result("[M] i32: t K + k of each slot, -1 where dead")
    slots = result("[T, K] i32: slot of each pick, -1 where it has none")
    dropped = result("[1] i32: picks that found no place within the capacity")
    experts = core.integer("E", minimum=1)
    align = core.integer("rows that each expert's first slot is a multiple of", minimum=1, default=1)
    capacity = core.number("C over an even share of the picks; 0 for no bound", minimum=0.0, default=0.0)
    pad = core.boolean("whether every expert has C rows, in use or not", default=False)

    def infer(self) -> Sequence[TensorType]:
        picks = self.check_picks(self.indices, "indices")
        if self.indices.type.dtype not in (DType.I16, DType.I32, DType.I64):
            self.fail(f"indices must be i16, i32 or i64, found {self.indices.type}")
        slots = symbol(SLOTS)
        shapes: list[tuple[Dim, ...]] = [
            (self.experts,),
            (self.experts + 1,),
            (slots,),
            (slots,),
            (self.indices.type.shape[0], picks),
            (1,),
        ]
        return [TensorType(shape, DType.I32) for shape in shapes]

    def verify(self) -> None:
        if self.align not in ALIGNMENTS:
            self.fail(f"align must be one of {', '.join(map(str, ALIGNMENTS))}, found {self.align}")
        if self.pad and not self.capacity:
            self.fail("pad gives every expert as many rows as the capacity, and needs one")

    @property
    def top_k(self) -> int:
        return self.check_picks(self.indices, "indices")

    @property
    def slots_per_token(self) -> int:
        """a of M = a T + b."""
        return self._needed[0]

    @property
    def more_slots(self) -> int:
        """b of M = a T + b."""
        return self._needed[1]

    @property
    def _needed(self) -> tuple[int, int]:
        return slots_needed(self.experts, self.top_k, self.align, self.capacity, self.pad)

    def rows(self, tokens: int) -> int:
        """C for T tokens; T K if it is unbounded."""
        if not self.capacity:
            return tokens * self.top_k
        return min(tokens, python_math.ceil(self.capacity * (tokens * self.top_k) / self.experts))

    def reference(self, xp: ArrayNamespace, *operands: Array) -> tuple[Array, ...]:
        (ids,) = operands
        tokens, top_k = xp.shape(ids)
        experts, picked = self.experts, tokens * top_k
        bound = self.rows(tokens)
        ids = xp.cast(ids, DType.I64)
        outside = (ids < 0) | (ids >= experts)
        key = xp.reshape(xp.where(outside, ids * 0 + experts, ids), (1, picked))
        found = xp.reshape(xp.count(key, experts), (experts,))
        counts = xp.minimum(found, found * 0 + bound)
        blocks = counts * 0 + bound if self.pad else counts
        ends = xp.cumsum((blocks + (self.align - 1)) // self.align * self.align)
        offsets = xp.concatenate(ends[:1] * 0, ends)

        order = xp.argsort_descending(-key)
        expert = xp.take(key, order)
        rank = xp.cumsum(order * 0 + 1) - 1 - xp.take_vector(xp.cumsum(found) - found, expert)
        has_slot = (rank < bound) & (expert < experts)
        slot = xp.where(has_slot, xp.take_vector(offsets[:-1], expert) + rank, rank * 0 - 1)
        slots = xp.reshape(xp.put(order, slot + 1, picked) - 1, (tokens, top_k))
        total = self.slots_per_token * tokens + self.more_slots
        picks = xp.reshape(xp.put(slot, order + 1, total) - 1, (total,))
        by_token = xp.where(picks < 0, picks, picks // top_k)
        dropped = xp.reshape(xp.sum(found - counts, 0), (1,))
        return tuple(xp.cast(x, DType.I32) for x in (counts, offsets, by_token, picks, slots, dropped))


class Gather(SlotOp):
    """y_m = x_{token of m}; 0 where dead."""

    name = "slot.gather"
    x = operand("[T, n]")
    tokens = operand("[M] i32, of slot.dispatch")
    slots = operand("[T, K] i32, of slot.dispatch")
    y = result("[M, n], in the type of x")

    def infer(self) -> Sequence[TensorType]:
        if self.x.type.rank != 2 or self.x.type.leading != "T":
            self.fail(f"expected rows of tokens [T, n], found {self.x.type}")
        self.check_integers(self.tokens, (symbol(SLOTS),), "tokens")
        self.check_slots(self.slots)
        return [TensorType((symbol(SLOTS), self.x.type.shape[1]), self.x.type.dtype)]

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return xp.take_rows(operands[0], operands[1])

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        dy = cotangents[0]
        if dy is None:
            return [None, None, None]
        return [create_one("slot.combine", stored(dy, self.x.type.dtype), self.slots, self.tokens), None, None]


class Combine(SlotOp):
    """y_t = sum_k w_{t,k} x_{slot of (t,k)}, in float32 and in the order of k; picks without a slot add nothing.

    Without weights they are 1.
    """

    name = "slot.combine"
    x = operand("[M, n]")
    slots = operand("[T, K] i32, of slot.dispatch")
    tokens = operand("[M] i32, of slot.dispatch")
    weights = optional_operand("[T, K]")
    picks = optional_operand("[M] i32, of slot.dispatch, with weights")
    y = result("[T, n], f32")

    def flops(self, size: Callable[[TensorType], float]) -> float:
        return (1 if self.weights is None else 2) * size(self.x.type)

    def infer(self) -> Sequence[TensorType]:
        self.check_rows(self.x, "x")
        picks = self.check_slots(self.slots)
        self.check_integers(self.tokens, (symbol(SLOTS),), "tokens")
        if self.weights is not None and self.check_picks(self.weights, "weights") != picks:
            self.fail(f"weights {self.weights.type} and slots {self.slots.type} differ in K")
        if self.picks is not None:
            self.check_integers(self.picks, (symbol(SLOTS),), "picks")
        return [TensorType((self.slots.type.shape[0], self.x.type.shape[1]), _wide(self.x))]

    def verify(self) -> None:
        if (self.weights is None) != (self.picks is None):
            self.fail("weights go with picks, which the gradient needs")

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        x, slots = xp.upcast(operands[0]), operands[1]
        tokens, top_k = xp.shape(slots)
        rows = xp.take_rows(x, xp.reshape(slots, (tokens * top_k,)))
        rows = xp.reshape(rows, (tokens, top_k, xp.shape(x)[1]))
        if self.weights is not None:
            # A weight of a pick without a slot may be anything.
            weights = xp.where(slots < 0, xp.constant(0.0, rows), xp.upcast(operands[3]))
            rows = rows * xp.expand_dims(weights)
        return xp.sum(rows, 1)

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        dy = cotangents[0]
        none: list[Value | None] = [None] * len(self.operands)
        if dy is None:
            return none
        rows = create_one("slot.gather", dy, self.tokens, self.slots)
        if self.weights is None or self.picks is None:
            return [rows, *none[1:]]
        weight = create_one("slot.of_pick", self.weights, self.picks, self.slots)
        share = create_one("row.sum", rows * self.x)
        return [rows * weight, None, None, create_one("slot.to_picks", share, self.slots, self.picks), None]


class OfPick(SlotOp):
    """y_m = w_{pick of m}; 0 where dead."""

    name = "slot.of_pick"
    x = operand("[T, K]")
    picks = operand("[M] i32, of slot.dispatch")
    slots = operand("[T, K] i32, of slot.dispatch")
    y = result("[M, 1], f32")

    def infer(self) -> Sequence[TensorType]:
        picks = self.check_picks(self.x, "x")
        self.check_integers(self.picks, (symbol(SLOTS),), "picks")
        if self.check_slots(self.slots) != picks:
            self.fail(f"x {self.x.type} and slots {self.slots.type} differ in K")
        return [TensorType((symbol(SLOTS), 1), _wide(self.x))]

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        x = xp.upcast(operands[0])
        tokens, top_k = xp.shape(x)
        return xp.expand_dims(xp.take_vector(xp.reshape(x, (tokens * top_k,)), operands[1]))

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        dy = cotangents[0]
        return [None if dy is None else create_one("slot.to_picks", dy, self.slots, self.picks), None, None]


class ToPicks(SlotOp):
    """y_{t,k} = x_{slot of (t,k)}; 0 where it has none."""

    name = "slot.to_picks"
    x = operand("[M, 1]")
    slots = operand("[T, K] i32, of slot.dispatch")
    picks = operand("[M] i32, of slot.dispatch")
    y = result("[T, K], f32")

    def infer(self) -> Sequence[TensorType]:
        self.check_rows(self.x, "x")
        if self.x.type.shape[1] != 1:
            self.fail(f"expected a number for each slot, [M, 1], found {self.x.type}")
        self.check_slots(self.slots)
        self.check_integers(self.picks, (symbol(SLOTS),), "picks")
        return [TensorType(self.slots.type.shape, _wide(self.x))]

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        x = xp.upcast(operands[0])
        return xp.take_vector(xp.reshape(x, (xp.shape(x)[0],)), operands[1])

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        dy = cotangents[0]
        return [None if dy is None else create_one("slot.of_pick", dy, self.picks, self.slots), None, None]


class Product(SlotOp):
    """Base of products with a weight: sums of products in float32, whatever the operands are."""

    x = operand("[R, n]: rows")
    weight = operand("the weight")
    y = result("[R, m], f32")
    transposed = core.boolean("whether the weight lies as [n, m], for y = x W; else as [m, n], for y = x W^T")

    def sizes(self) -> tuple[int, int]:
        """n and m."""
        shape = self.weight.type.shape[-2:]
        if len(shape) != 2 or not all(isinstance(d, int) for d in shape):
            self.fail(f"the weight must be a matrix of constant size, or one an expert, found {self.weight.type}")
        inner, outer = shape if self.transposed else shape[::-1]
        assert isinstance(inner, int) and isinstance(outer, int)
        return inner, outer

    def flops(self, size: Callable[[TensorType], float]) -> float:
        return 2 * size(self.x.type) * self.sizes()[1]

    def infer(self) -> Sequence[TensorType]:
        inner, outer = self.sizes()
        if self.x.type.rank != 2 or self.x.type.shape[1] != inner:
            lies = "[n, m]" if self.transposed else "[m, n]"
            self.fail(f"rows of {self.x.type} do not fit a weight {self.weight.type}, which lies as {lies}")
        if self.x.type.dtype is not self.weight.type.dtype:
            self.fail(f"rows are {self.x.type.dtype.value}, the weight is {self.weight.type.dtype.value}; cast one")
        if not self.x.type.dtype.is_float:
            self.fail(f"rows must be floats, found {self.x.type}")
        return [TensorType((self.x.type.shape[0], outer), _wide(self.x))]


class Linear(Product):
    """y_r = W x_r."""

    name = "slot.linear"

    def verify(self) -> None:
        if self.weight.type.rank != 2:
            self.fail(f"the weight must be a matrix, found {self.weight.type}")

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        x, weight = (xp.upcast(o) for o in operands)
        return xp.matmul(x, weight if self.transposed else xp.transpose(weight))

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        dy = cotangents[0]
        if dy is None:
            return [None, None]
        dy = stored(dy, self.x.type.dtype)
        dx = create_one("slot.linear", dy, self.weight, transposed=not self.transposed)
        pair = (self.x, dy) if self.transposed else (dy, self.x)
        return [dx, create_one("slot.wgrad", *pair)]


class GroupedLinear(Product):
    """y_m = W_e x_m with e the expert of slot m; 0 where dead."""

    name = "slot.grouped_linear"
    counts = operand("[E] i32, of slot.dispatch")
    offsets = operand("[E + 1] i32, of slot.dispatch")

    def verify(self) -> None:
        self.check_rows(self.x, "x")
        self.check_groups(self.counts, self.offsets, self.weight, 3)

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        x, weight = (xp.upcast(o) for o in operands[:2])
        return xp.grouped_matmul(x, weight if self.transposed else xp.transpose(weight), operands[2], operands[3])

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        dy = cotangents[0]
        if dy is None:
            return [None] * 4
        dy = stored(dy, self.x.type.dtype)
        groups = (self.counts, self.offsets)
        dx = create_one("slot.grouped_linear", dy, self.weight, *groups, transposed=not self.transposed)
        pair = (self.x, dy) if self.transposed else (dy, self.x)
        return [dx, create_one("slot.grouped_wgrad", *pair, *groups), None, None]


class Outer(SlotOp):
    """Base of sums of outer products, gradients of weights."""

    a = operand("[R, m]: rows")
    b = operand("[R, n], in the type of a")

    def flops(self, size: Callable[[TensorType], float]) -> float:
        return 2 * size(self.a.type) * self.sizes()[1]

    def sizes(self) -> tuple[int, int]:
        """m and n."""
        if self.a.type.rank != 2 or self.b.type.rank != 2 or self.a.type.shape[0] != self.b.type.shape[0]:
            self.fail(f"expected rows [R, m] and [R, n], found {self.a.type} and {self.b.type}")
        if self.a.type.dtype is not self.b.type.dtype:
            self.fail(f"operands differ in type: {self.a.type} and {self.b.type}; cast one")
        rows, columns = self.a.type.shape[1], self.b.type.shape[1]
        if not isinstance(rows, int) or not isinstance(columns, int):
            self.fail(f"rows must be of constant length, found {self.a.type} and {self.b.type}")
        return rows, columns


class Wgrad(Outer):
    """y = sum_r a_r b_r^T."""

    name = "slot.wgrad"
    y = result("[m, n], f32")

    def infer(self) -> Sequence[TensorType]:
        return [TensorType(self.sizes(), _wide(self.a))]

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        a, b = (xp.upcast(o) for o in operands)
        return xp.matmul(xp.transpose(a), b)


class WgradParts(Outer):
    """y_p = sum of a_r b_r^T over the rows r of part p, p s to (p + 1) s of the R there are; s is ceil(R / P), rounded
    up to a multiple of 64. A part without rows is 0."""

    name = "slot.wgrad_parts"
    y = result("[P, m, n], f32")
    parts = core.integer("P", minimum=2)

    def infer(self) -> Sequence[TensorType]:
        return [TensorType((self.parts, *self.sizes()), _wide(self.a))]

    def rows_of_part(self, rows: int) -> int:
        """s for R rows."""
        return -(-rows // (self.parts * PART_ROWS)) * PART_ROWS

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        a, b = (xp.upcast(o) for o in operands)
        each = self.rows_of_part(xp.shape(a)[0])
        parts = [slice(part * each, (part + 1) * each) for part in range(self.parts)]
        m, n = self.sizes()
        sums = (xp.reshape(xp.matmul(xp.transpose(a[rows]), b[rows]), (m * n,)) for rows in parts)
        return xp.reshape(functools.reduce(xp.concatenate, sums), (self.parts, m, n))


class SumParts(SlotOp):
    """y = sum_p x_p, in the order of p."""

    name = "slot.sum_parts"
    x = operand("[P, m, n], of slot.wgrad_parts")
    y = result("[m, n], f32")

    def flops(self, size: Callable[[TensorType], float]) -> float:
        return size(self.x.type)

    def infer(self) -> Sequence[TensorType]:
        shape = self.x.type.shape
        if len(shape) != 3 or not all(isinstance(d, int) for d in shape) or shape[0] == 0:
            self.fail(f"expected a matrix for each part, [P, m, n], found {self.x.type}")
        if self.x.type.dtype is not _wide(self.x):
            self.fail(f"what is added up must be f32, found {self.x.type}")
        return [TensorType(shape[1:], self.x.type.dtype)]

    @property
    def parts(self) -> int:
        """P."""
        parts = self.x.type.shape[0]
        assert isinstance(parts, int)
        return parts

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        (x,) = operands
        return functools.reduce(operator.add, (x[part] for part in range(self.parts)))


class GroupedWgrad(Outer):
    """y_e = sum over the slots m of expert e of a_m b_m^T; 0 for an expert without slots."""

    name = "slot.grouped_wgrad"
    counts = operand("[E] i32, of slot.dispatch")
    offsets = operand("[E + 1] i32, of slot.dispatch")
    y = result("[E, m, n], f32")

    def infer(self) -> Sequence[TensorType]:
        self.check_rows(self.a, "a")
        self.check_rows(self.b, "b")
        self.check_groups(self.counts, self.offsets)
        return [TensorType((*self.counts.type.shape, *self.sizes()), _wide(self.a))]

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        a, b, counts, offsets = operands
        return xp.grouped_outer(xp.upcast(a), xp.upcast(b), counts, offsets)


class Accumulate(SlotOp):
    """y = main + x, written where main lies: a gradient that is added to a sum of the caller's."""

    name = "slot.accumulate"
    main = operand("f32")
    x = operand("of the shape of main")
    y = result("f32")

    def flops(self, size: Callable[[TensorType], float]) -> float:
        return size(self.main.type)

    def infer(self) -> Sequence[TensorType]:
        if self.main.type != TensorType(self.x.type.shape, DType.F32):
            self.fail(f"main must be {TensorType(self.x.type.shape, DType.F32)}, found {self.main.type}")
        return [self.main.type]

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return operands[0] + xp.upcast(operands[1])


class ExpertRows(SlotOp):
    """y_m = v_e with e the expert of slot m; 0 where dead."""

    name = "slot.expert_rows"
    x = operand("[E, n]")
    tokens = operand("[M] i32, of slot.dispatch")
    counts = operand("[E] i32, of slot.dispatch")
    offsets = operand("[E + 1] i32, of slot.dispatch")
    y = result("[M, n], f32")

    def infer(self) -> Sequence[TensorType]:
        self.check_groups(self.counts, self.offsets, self.x, 2)
        self.check_integers(self.tokens, (symbol(SLOTS),), "tokens")
        return [TensorType((symbol(SLOTS), self.x.type.shape[1]), _wide(self.x))]

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        x, tokens, counts, offsets = operands
        return xp.take_rows(xp.upcast(x), xp.group_of_rows(counts, offsets, xp.shape(tokens)[0]))

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        dy = cotangents[0]
        dx = None if dy is None else create_one("slot.expert_sums", dy, self.counts, self.offsets)
        return [dx, None, None, None]


class ExpertSums(SlotOp):
    """y_e = sum over the slots m of expert e of x_m; 0 for an expert without slots."""

    name = "slot.expert_sums"
    x = operand("[M, n]")
    counts = operand("[E] i32, of slot.dispatch")
    offsets = operand("[E + 1] i32, of slot.dispatch")
    y = result("[E, n], f32")

    def flops(self, size: Callable[[TensorType], float]) -> float:
        return size(self.x.type)

    def infer(self) -> Sequence[TensorType]:
        self.check_rows(self.x, "x")
        self.check_groups(self.counts, self.offsets)
        return [TensorType((*self.counts.type.shape, self.x.type.shape[1]), _wide(self.x))]

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        x, counts, offsets = operands
        group = xp.group_of_rows(counts, offsets, xp.shape(x)[0])
        return xp.sum_rows(xp.upcast(x), group, xp.shape(counts)[0])


class Halves(SlotOp):
    """Base: a row of gates and ups, first all gates and then all ups, or column by column in turn."""

    interleaved = core.boolean("whether gates and ups alternate", default=False)


class Split(Halves):
    """g_i = x_i, u_i = x_{I+i}; interleaved: g_i = x_{2i}, u_i = x_{2i+1}."""

    name = "slot.split"
    x = operand("[R, 2I]")
    gate = result("[R, I], in the type of x")
    up = result("[R, I], in the type of x")

    def infer(self) -> Sequence[TensorType]:
        size = self.x.type.shape[-1] if self.x.type.rank == 2 else None
        if not isinstance(size, int) or size % 2:
            self.fail(f"expected rows of an even, constant length, found {self.x.type}")
        return [TensorType((self.x.type.shape[0], size // 2), self.x.type.dtype)] * 2

    def reference(self, xp: ArrayNamespace, *operands: Array) -> tuple[Array, ...]:
        (x,) = operands
        if self.interleaved:
            return x[..., 0::2], x[..., 1::2]
        half = xp.shape(x)[-1] // 2
        return x[..., :half], x[..., half:]

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        gate, up = (create_one("math.broadcast", 0.0, self.gate) if c is None else c for c in cotangents)
        return [create_one("slot.join", gate, up, interleaved=self.interleaved or None)]


class Join(Halves):
    """The inverse of slot.split."""

    name = "slot.join"
    gate = operand("[R, I]")
    up = operand("[R, I]")
    y = result("[R, 2I], in the type of the operands")

    def infer(self) -> Sequence[TensorType]:
        size = self.gate.type.shape[-1] if self.gate.type.rank == 2 else None
        if self.gate.type != self.up.type or not isinstance(size, int):
            self.fail(f"expected two times the same rows, found {self.gate.type} and {self.up.type}")
        return [TensorType((self.gate.type.shape[0], 2 * size), self.gate.type.dtype)]

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        gate, up = operands
        if not self.interleaved:
            return xp.concatenate(gate, up)
        rows, size = xp.shape(gate)
        return xp.reshape(xp.concatenate(xp.expand_dims(gate), xp.expand_dims(up)), (rows, 2 * size))

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        dy = cotangents[0]
        if dy is None:
            return [None, None]
        return list(core.create("slot.split", dy, interleaved=self.interleaved or None).results)


def stored(value: Value, dtype: DType) -> Value:
    """A value as it lies in memory: rounded once to the type of a product's operands."""
    return value if value.type.dtype is dtype else create_one("math.cast", value, dtype=dtype.value)

"""What a kernel must move and compute: bytes of its operands and FLOPs of the ops it fuses, from its launch alone.

Each operand is read or written once: rows of tokens whole, rows of slots as far as they are live, matrices of experts
as far as an expert has a row (what is written of them: all). An input of which a kernel only gathers elements counts
these. Where the kernel's text is there, operands that it has no address of do not count. Whatever a cache holds between
two kernels counts all the same: it is a floor of the kernel, not of the layer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from moesaic.ir.core import Value
from moesaic.ir.ops import row, slot
from moesaic.ir.ops.launch import Kernel
from moesaic.ir.types import DType, TensorType


@dataclass(frozen=True)
class Extents:
    """How much there is to do: what symbols of shapes stand for.

    Attributes:
        tokens: T.
        rows: live slots, of which M is a bound.
        sequences: N.
        blocks: of kernels whose number of blocks is a dimension, by symbol; what is not here counts nothing.
        experts: that have a row; ``None``: as many as there are rows, or all.
    """

    tokens: int
    rows: int
    sequences: int = 0
    blocks: Mapping[str, int] = field(default_factory=dict)
    experts: int | None = None

    def size(self, type: TensorType) -> float:
        """Elements of a type, rows that are dead left out."""
        symbols = [name for dim in type.shape if not isinstance(dim, int) for name, _ in dim.terms]
        blocks = dict.fromkeys(symbols, 0) | dict(self.blocks)
        return float(type.elements(blocks | {"T": self.tokens, "M": self.rows, "N": self.sequences}))

    def bytes_of(self, type: TensorType, *, of_experts: bool) -> float:
        """Of a tensor; `of_experts`: of matrices [E, m, n], those that a row is multiplied by."""
        share = 1.0
        if of_experts and isinstance(type.shape[0], int):
            share = self.live_experts(type.shape[0]) / max(1, type.shape[0])
        return share * self.size(type) * type.dtype.bytes

    def live_experts(self, experts: int) -> int:
        """How many of so many experts have a row."""
        return min(experts, self.rows if self.experts is None else self.experts)


@dataclass(frozen=True)
class Cost:
    """Bytes read and written by operand number of the launch, and FLOPs.

    Attributes:
        read, written: bytes by number of the operand.
        product_flops: of matrix products and gradients of matrices.
        other_flops: of everything else, one for each element that an op computes.
        product_type: what products multiply: ``bf16``, ``f16``, ``tf32`` or ``f32``; empty without products.
    """

    read: Mapping[int, float]
    written: Mapping[int, float]
    product_flops: float
    other_flops: float
    product_type: str

    @property
    def bytes_read(self) -> float:
        return sum(self.read.values())

    @property
    def bytes_written(self) -> float:
        return sum(self.written.values())

    @property
    def bytes(self) -> float:
        return self.bytes_read + self.bytes_written


def cost_of(op: Kernel, extents: Extents, addressed: Collection[int] | None = None) -> Cost:
    """What one launch must move and compute; see the module.

    Args:
        op: the launch.
        extents: how much there is to do.
        addressed: numbers of the operands that the kernel's text has an address of; ``None``: all.
    """
    read: dict[int, float] = {}
    written: dict[int, float] = {}
    operands = op.operands[: op.reads + len(op.stored)]  # counts of items are four bytes, whatever the layer
    for number, value in enumerate(operands):
        if addressed is not None and number not in addressed:
            continue
        if number < op.reads:
            read[number] = _bytes_read(op, number, extents)
        else:
            written[number] = extents.bytes_of(value.type, of_experts=False)
            if value in op.operands[: op.reads]:  # what it holds is added to
                read[op.operands.index(value)] = written[number]
    products = others = 0.0
    kind = ""
    for inner in op.region.walk() if op.region is not None else ():
        flops = inner.flops(extents.size)
        if isinstance(inner, slot.Product | slot.Outer):
            products += flops
            kind = _multiplied(op, inner.operands[0])
        else:
            others += flops
    return Cost(read, written, products, others, kind)


def _bytes_read(op: Kernel, number: int, extents: Extents) -> float:
    type = op.operands[number].type
    if op.region is not None and number < len(op.region.arguments):
        argument = op.region.arguments[number]
        users = op.region.users(argument)
        if users and all(isinstance(u, row.Gather) and u.x is argument for u in users):
            return sum(extents.size(u.results[0].type) for u in users) * type.dtype.bytes
        if any(isinstance(u, slot.GroupedLinear) and u.weight is argument for u in users):
            return extents.bytes_of(type, of_experts=True)
    return extents.bytes_of(type, of_experts=False)


def _multiplied(op: Kernel, rows: Value) -> str:
    """What the kernel multiplies rows as: float32 operands go to tensor cores as tf32, or nowhere near them."""
    dtype = rows.type.dtype
    if dtype is DType.F32 and op.configuration.get("tile") not in (None, "SimtTile"):
        return "tf32"
    return dtype.value

"""What a kernel is to the tuner: two kernels with equal keys have equal spaces, and about equal times at each point.

A key says shapes and types of operands, what moves data between lanes or tiles, and how inputs are aligned. It does not
say what is elementwise: routers with another score share what was found for one of them. Points are held against the
kernel's own space before they are used, so that a key which says too little costs speed at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from moesaic.ir.attributes import format_attributes
from moesaic.ir.core import BlockArgument, Function, Op, Value
from moesaic.ir.ops import math, row, slot
from moesaic.ir.ops.launch import Kernel
from moesaic.ir.types import DType
from moesaic.passes.space import FAMILIES, Space, experts_of, known_alignment, longest_row

_PICKS = (DType.I16, DType.I32, DType.I64)


@dataclass(frozen=True, order=True)
class KernelKey:
    """See the module.

    Attributes:
        template: of the kernel.
        version: of the template's parameters.
        experts: E.
        picks: K; 0 where a function does not know it.
        inner: elements of a row that a product multiplies (H before the first product, I before the second); else 0.
        outer: columns of a product; else 0.
        operands: types, those read and those written.
        alignment: bytes that rows of what is read are aligned to: one number if all are, else one each.
        tokens: the bucket of T.
        features: the ops of the kernel that are not elementwise, in order.
    """

    template: str
    version: int
    experts: int
    picks: int
    inner: int
    outer: int
    operands: str
    alignment: str
    tokens: str
    features: str

    @classmethod
    def of(cls, space: Space, picks: int, tokens: str) -> KernelKey:
        """The key of a kernel of a function that gives each token so many picks, for a bucket of T."""
        op = space.op
        assert op.region is not None
        inner, outer = _product_sizes(op)
        rows = op.template == "row_program"
        alignment = sorted(set(known_alignment(op, space.aligned)))
        found = known_alignment(op, space.aligned)
        return cls(
            template=op.template,
            version=FAMILIES[op.template].version,
            experts=longest_row(op) if rows else experts_of(op),
            picks=picks,
            inner=inner,
            outer=outer,
            operands=f"{_types(op.operands[: op.reads])} -> {_types(op.stored)}",
            alignment=str(alignment[0]) if len(alignment) == 1 else ",".join(map(str, found)),
            tokens=tokens,
            features=" ".join(_feature(o) for o in op.region.ops[:-1] if not isinstance(o, math.Elementwise)),
        )

    def as_dict(self) -> dict[str, str | int]:
        """By name, for tables."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def parse(cls, values: Mapping[str, object]) -> KernelKey:
        """The key that a table says.

        Raises:
            ValueError: a field is missing or of the wrong type.
        """
        given: dict[str, str | int] = {}
        for field in fields(cls):
            value = values.get(field.name)
            wanted = int if field.type == "int" else str
            if not isinstance(value, wanted) or isinstance(value, bool):
                raise ValueError(f"{field.name} must be {wanted.__name__}, found {value!r}")
            given[field.name] = value
        return cls(**given)  # type: ignore[arg-type]  # types were looked at

    def __str__(self) -> str:
        sizes = f"E={self.experts}" + (f" K={self.picks}" if self.picks else "")
        if self.inner:
            sizes += f" {self.inner}x{self.outer}"
        return f"{self.template} {sizes} T{self.tokens}"


def picks_of(function: Function) -> int:
    """K of a planned function: the length of its rows of picks; 0 if it has none."""
    values = [*function.arguments, *(r for op in function.body.ops for r in op.results)]
    rows = [v.type for v in values if v.type.rank == 2 and v.type.leading == "T" and v.type.dtype in _PICKS]
    return min((t.shape[-1] for t in rows if isinstance(t.shape[-1], int)), default=0)


def _types(values: list[Value]) -> str:
    return " ".join("x".join([*map(str, v.type.shape), v.type.dtype.value]).replace(" ", "") for v in values)


def _feature(op: Op) -> str:
    name = op.name
    if isinstance(op, row.TopK):  # 16 bits that are ranked as they are take half the work
        name += f"@{op.x.type.dtype.value if isinstance(op.x, BlockArgument) else 'f32'}"
    return f"{name}{format_attributes(op.attributes).replace(' ', '')}" if op.attributes else name


def _product_sizes(op: Kernel) -> tuple[int, int]:
    assert op.region is not None
    for inner in op.region.ops:
        if isinstance(inner, slot.Product):
            depth, outer = inner.sizes()
            return depth, outer
        if isinstance(inner, slot.Outer):
            return inner.sizes()
    return 0, 0

"""What lines of CUDA are made of: types of elements, constants, ops as expressions and as comments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moesaic.codegen.kernel import FusedOp
from moesaic.ir.attributes import format_attributes, format_float
from moesaic.ir.core import Block, Constant, Op, Value, Yield
from moesaic.ir.ops import math
from moesaic.ir.types import DType

STORAGE = {
    DType.BF16: "__nv_bfloat16",
    DType.F16: "__half",
    DType.F32: "float",
    DType.I1: "bool",
    DType.U8: "unsigned char",
    DType.I16: "short",
    DType.I32: "int",
    DType.I64: "long long",
}
"""C++ type of an element in memory."""

INTEGERS = (DType.I16, DType.I32, DType.I64)


@dataclass(frozen=True)
class Line:
    """A named constant, alias or parameter, with the reason it is there."""

    name: str = ""
    value: str = ""
    definition: str = ""
    declaration: str = ""
    why: str = ""


def in_words(names: Sequence[str]) -> str:
    """Names as a sentence has them: a, b and c."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def register(value: Value) -> str:
    """C++ type of an element in a register."""
    if value.type.dtype in (DType.I1, DType.U8):
        return "bool"
    return STORAGE[value.type.dtype] if value.type.dtype in INTEGERS else "float"


def literal(value: float) -> str:
    """A float32 as C++ has it."""
    if value != value:
        return "moesaic::not_a_number()"
    if value in (float("inf"), float("-inf")):
        return "moesaic::infinity()" if value > 0 else "-moesaic::infinity()"
    text = format_float(value)
    return f"{text}f" if value >= 0 and not text.startswith("-") else f"({text}f)"


def definition(op: math.Elementwise, read: Callable[[Value], str], name: Callable[[Value], str]) -> str:
    """The line that computes one element of an op's result and names it; `read` is how an operand's is read."""
    [result] = op.results
    operands = [read(v) for v in op.operands]
    if result.type.dtype.is_float and all(v.type.dtype in INTEGERS for v in op.operands):
        operands = [f"static_cast<float>({text})" for text in operands]  # arithmetic is that of floats
    expression = op.cuda_expression(*operands)
    return f"const {register(result)} {name(result)} = {expression};  // {comment(op, name)}"


def comment(op: Op, name: Callable[[Value], str]) -> str:
    """The op as text, with the names its values have in the code."""
    results = ", ".join("%" + name(r) for r in op.results)
    operands = ", ".join(format_float(v.value) if isinstance(v, Constant) else "%" + name(v) for v in op.operands)
    attributes = f" {format_attributes(op.attributes)}" if op.attributes else ""
    return f"{results} = {op.name} {operands}{attributes}"


def fused_ops(region: Block, name: Callable[[Value], str]) -> tuple[FusedOp, ...]:
    """All ops of a region, in order, with the names that values have in the code; in place of one with a region of its
    own, the ops of that."""
    ops = [op for op in region.walk() if op.region is None and not isinstance(op, Yield)]
    return tuple(FusedOp(comment(op, name), ", ".join(str(r.type) for r in op.results)) for op in ops)

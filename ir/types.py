"""Types of the IR: element types, affine dimensions and tensors.

A dimension is an ``int`` where a kernel specialises on it, or an :class:`Affine` expression over named symbols
where it is known only at launch (``T`` tokens, ``B`` blocks). Text form: ``tensor<Tx256xbf16>``,
``tensor<T*8 + 127x64xf32>``, ``tensor<f32>`` for a scalar.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass

from moesaic.ir.errors import InputError, suggestion


class DType(enum.Enum):
    """Element type; the value is its name in IR text."""

    BF16 = "bf16"
    F16 = "f16"
    F32 = "f32"
    F64 = "f64"
    I1 = "i1"
    U8 = "u8"
    I16 = "i16"
    I32 = "i32"
    I64 = "i64"

    @property
    def is_float(self) -> bool:
        return self in (DType.BF16, DType.F16, DType.F32, DType.F64)

    @property
    def bytes(self) -> int:
        """Bytes of one element in memory."""
        return _BYTES[self]

    @property
    def public_name(self) -> str:
        """The name users write in Python, such as ``fp32`` and ``bool`` where the IR says ``f32`` and ``i1``."""
        return {DType.F16: "fp16", DType.F32: "fp32", DType.F64: "fp64", DType.I1: "bool"}.get(self, self.value)

    @staticmethod
    def parse(name: object) -> DType:
        """The element type of an IR name, a public name, or a torch dtype (by its printed name).

        Raises:
            InputError: the name is not an element type.
        """
        if isinstance(name, DType):
            return name
        text = str(name).removeprefix("torch.")
        text = _ALIASES.get(text, text)
        for dtype in DType:
            if dtype.value == text:
                return dtype
        known = [d.value for d in DType] + sorted(_ALIASES)
        raise InputError(f"unknown dtype {text!r}{suggestion(text, known)}; known: {', '.join(d.value for d in DType)}")


_BYTES = {
    DType.BF16: 2,
    DType.F16: 2,
    DType.F32: 4,
    DType.F64: 8,
    DType.I1: 1,
    DType.U8: 1,
    DType.I16: 2,
    DType.I32: 4,
    DType.I64: 8,
}
_ALIASES = {
    "fp16": "f16",
    "fp32": "f32",
    "fp64": "f64",
    "bfloat16": "bf16",
    "float16": "f16",
    "half": "f16",
    "float32": "f32",
    "float": "f32",
    "float64": "f64",
    "double": "f64",
    "uint8": "u8",
    "bool": "i1",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
}


@dataclass(frozen=True)
class Affine:
    """``sum(coefficient * symbol) + constant`` with at least one symbol; build it with :func:`affine`."""

    terms: tuple[tuple[str, int], ...]
    constant: int = 0

    def __str__(self) -> str:
        parts = [symbol if coefficient == 1 else f"{symbol}*{coefficient}" for symbol, coefficient in self.terms]
        if self.constant:
            parts.append(str(self.constant))
        return " + ".join(parts)


Dim = int | Affine

_SYMBOL = re.compile(r"[A-Z][A-Z0-9_]*")


def affine(terms: Mapping[str, int], constant: int = 0) -> Dim:
    """The canonical dimension of a sum: symbols sorted, zero terms dropped, an ``int`` where no symbol is left."""
    kept = tuple(sorted((symbol, c) for symbol, c in terms.items() if c))
    return Affine(kept, constant) if kept else constant


def symbol(name: str) -> Dim:
    """The dimension that is one symbol: capital letters, digits and underscores, without an ``x``."""
    if not _SYMBOL.fullmatch(name):
        raise InputError(f"{name!r} is not a dimension symbol; use capital letters, digits and '_', such as 'T'")
    return Affine(((name, 1),))


def dim_add(a: Dim, b: Dim) -> Dim:
    terms: dict[str, int] = {}
    for part in (a, b):
        if isinstance(part, Affine):
            for name, coefficient in part.terms:
                terms[name] = terms.get(name, 0) + coefficient
    return affine(terms, _constant(a) + _constant(b))


def dim_scale(a: Dim, factor: int) -> Dim:
    if isinstance(a, int):
        return a * factor
    return affine({name: c * factor for name, c in a.terms}, a.constant * factor)


def dim_value(dim: Dim, symbols: Mapping[str, int]) -> int:
    """The number a dimension stands for, given its symbols.

    Raises:
        InputError: a symbol of the dimension has no value.
    """
    if isinstance(dim, int):
        return dim
    total = dim.constant
    for name, coefficient in dim.terms:
        if name not in symbols:
            raise InputError(f"dimension {dim} needs a value for {name}; given: {', '.join(sorted(symbols)) or 'none'}")
        total += coefficient * symbols[name]
    return total


def _constant(dim: Dim) -> int:
    return dim if isinstance(dim, int) else dim.constant


def parse_dim(text: str) -> Dim:
    """A dimension from text such as ``T``, ``256`` or ``T*8 + 127``.

    Raises:
        InputError: the text is not a sum of constants and symbols with constant factors.
    """
    total: Dim = 0
    for part in text.split("+"):
        factors = [f.strip() for f in part.split("*")]
        names = [f for f in factors if _SYMBOL.fullmatch(f)]
        numbers = [f for f in factors if re.fullmatch(r"-?[0-9]+", f)]
        if len(names) > 1 or len(names) + len(numbers) != len(factors):
            raise InputError(
                f"{text.strip()!r} is not a dimension; write a number or an affine expression such as 'T*8 + 127'"
            )
        product = 1
        for number in numbers:
            product *= int(number)
        total = dim_add(total, dim_scale(symbol(names[0]) if names else 1, product))
    return total


@dataclass(frozen=True)
class TensorType:
    """A dense tensor; rank 0 is a scalar."""

    shape: tuple[Dim, ...]
    dtype: DType

    def __str__(self) -> str:
        return f"tensor<{''.join(f'{d}x' for d in self.shape)}{self.dtype.value}>"

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def leading(self) -> str:
        """The symbol of the first dimension: ``T`` for tokens, ``N`` for sequences; empty if that is a number."""
        first = self.shape[0] if self.shape else 0
        return first.terms[0][0] if isinstance(first, Affine) else ""

    def with_dtype(self, dtype: DType) -> TensorType:
        return TensorType(self.shape, dtype)

    def elements(self, symbols: Mapping[str, int]) -> int:
        """The number of elements, given the symbols of the dimensions."""
        count = 1
        for dim in self.shape:
            count *= dim_value(dim, symbols)
        return count

    @staticmethod
    def parse(text: str) -> TensorType:
        """A type from text such as ``tensor<Tx256xbf16>``.

        Raises:
            InputError: the text is not a tensor type.
        """
        match = re.fullmatch(r"\s*tensor\s*<([^<>]*)>\s*", text)
        if not match:
            raise InputError(f"{text.strip()!r} is not a type; write one such as tensor<Tx256xbf16>")
        *dims, dtype = match.group(1).split("x")
        shape = tuple(parse_dim(d) for d in dims)
        if any(isinstance(d, int) and d < 0 for d in shape):
            raise InputError(f"{text.strip()!r} has a negative dimension")
        return TensorType(shape, DType.parse(dtype.strip()))


def tensor(dtype: DType | str, *shape: Dim | str) -> TensorType:
    """Short form: ``tensor("bf16", "T", 256)``."""
    return TensorType(tuple(parse_dim(d) if isinstance(d, str) else d for d in shape), DType.parse(dtype))


def broadcast_shapes(*shapes: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """NumPy's rule over dimensions: aligned at the last one, equal or 1.

    Raises:
        InputError: two dimensions differ and neither is 1.
    """
    rank = max(len(s) for s in shapes)
    result: list[Dim] = []
    for axis in range(rank):
        found: Dim = 1
        for shape in shapes:
            offset = axis - (rank - len(shape))
            dim = shape[offset] if offset >= 0 else 1
            if dim == 1 or dim == found:
                continue
            if found != 1:
                shown = " and ".join("[" + ", ".join(str(d) for d in s) + "]" for s in shapes)
                raise InputError(f"shapes {shown} do not broadcast: {found} against {dim}")
            found = dim
        result.append(found)
    return tuple(result)

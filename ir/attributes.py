"""Attributes: the compile-time values of an op, and the constraints an op declares on them.

Values are plain Python (``int``, ``float``, ``bool``, ``str``, tuples of these) plus :class:`Call` for a name with
integer arguments, such as ``sum_top<2>``. Text form: ``{k = 8, score = sum_top<2>, order = [0, 1], exact = true}``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moesaic.ir.errors import suggestion


@dataclass(frozen=True)
class Call:
    """A named choice with integer arguments: ``sum_top<2>``."""

    name: str
    arguments: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}<{', '.join(map(str, self.arguments))}>"


Attribute = int | float | bool | str | Call | tuple["Attribute", ...]

_BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
_RESERVED = {"true", "false", "inf", "nan"}
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r"}


def unescape(body: str) -> str:
    """What stands between the quotes of a string in IR text, read back."""
    return re.sub(r"\\(.)", lambda m: {"n": "\n", "r": "\r"}.get(m[1], m[1]), body)


def format_float(value: float) -> str:
    """Shortest text that reads back as the same float, always with a sign of being one (``.``, ``e``, inf, nan)."""
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    text = repr(value)
    return text if any(c in text for c in ".en") else text + ".0"


def format_attribute(value: Attribute) -> str:
    """IR text of an attribute value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return format_float(value)
    if isinstance(value, Call):
        return str(value)
    if isinstance(value, str):
        if _BARE.fullmatch(value) and value not in _RESERVED:
            return value
        return '"' + "".join(_ESCAPES.get(c, c) for c in value) + '"'
    return "[" + ", ".join(format_attribute(v) for v in value) + "]"


def format_attributes(attributes: Mapping[str, Attribute]) -> str:
    """``{a = 1, b = x}``; names sorted so that equal ops print equally."""
    return "{" + ", ".join(f"{k} = {format_attribute(v)}" for k, v in sorted(attributes.items())) + "}"


@dataclass(frozen=True)
class AttributeSpec:
    """One declared attribute of an op: its name, what it means, and whether it may be left out."""

    name: str
    doc: str
    required: bool = True
    default: Attribute | None = None

    def problem(self, value: Attribute) -> str | None:
        """What is wrong with a value, or ``None``."""
        raise NotImplementedError

    @property
    def expects(self) -> str:
        """The accepted values in words, for messages and for ``moesaic ops``."""
        raise NotImplementedError

    def check(self, value: Attribute) -> str | None:
        found = self.problem(value)
        return None if found is None else f"attribute {self.name!r} expects {self.expects}, found {found}"


@dataclass(frozen=True)
class IntSpec(AttributeSpec):
    minimum: int | None = None

    @property
    def expects(self) -> str:
        return "an integer" + (f" >= {self.minimum}" if self.minimum is not None else "")

    def problem(self, value: Attribute) -> str | None:
        if isinstance(value, bool) or not isinstance(value, int):
            return described(value)
        return str(value) if self.minimum is not None and value < self.minimum else None


@dataclass(frozen=True)
class FloatSpec(AttributeSpec):
    minimum: float | None = None
    infinite: bool = False

    @property
    def expects(self) -> str:
        kind = "a number" if self.infinite else "a finite number"
        return kind + (f" >= {format_float(self.minimum)}" if self.minimum is not None else "")

    def problem(self, value: Attribute) -> str | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return described(value)
        try:
            number = float(value)
        except OverflowError:
            return "an integer beyond every float"
        allowed = not math.isnan(number) if self.infinite else math.isfinite(number)
        if not allowed or (self.minimum is not None and number < self.minimum):
            return format_float(number)
        return None


@dataclass(frozen=True)
class StringSpec(AttributeSpec):
    choices: tuple[str, ...] = ()

    @property
    def expects(self) -> str:
        return "one of " + ", ".join(self.choices) if self.choices else "a name"

    def problem(self, value: Attribute) -> str | None:
        if not isinstance(value, str):
            return described(value)
        if self.choices and value not in self.choices:
            return f"{value!r}{suggestion(value, self.choices)}"
        return None


@dataclass(frozen=True)
class BoolSpec(AttributeSpec):
    @property
    def expects(self) -> str:
        return "true or false"

    def problem(self, value: Attribute) -> str | None:
        return None if isinstance(value, bool) else described(value)


@dataclass(frozen=True)
class ListSpec(AttributeSpec):
    """A list of integers, or of names."""

    of: type[int] | type[str] = int

    @property
    def expects(self) -> str:
        return "a list of integers" if self.of is int else "a list of names"

    def problem(self, value: Attribute) -> str | None:
        if not isinstance(value, tuple) or not all(type(v) is self.of for v in value):
            return described(value)
        return None


@dataclass(frozen=True)
class CallSpec(AttributeSpec):
    """``name`` or ``name<int, ...>``; `arity` maps each accepted name to its number of arguments."""

    arity: tuple[tuple[str, int], ...] = ()

    @property
    def expects(self) -> str:
        return "one of " + ", ".join(n if a == 0 else f"{n}<{', '.join('n' * a)}>" for n, a in self.arity)

    def problem(self, value: Attribute) -> str | None:
        call = value if isinstance(value, Call) else Call(value) if isinstance(value, str) else None
        if call is None:
            return described(value)
        arity = dict(self.arity)
        if call.name not in arity:
            return f"{call.name!r}{suggestion(call.name, arity)}"
        if len(call.arguments) != arity[call.name] or any(a < 1 for a in call.arguments):
            return str(call) if call.arguments else f"{call.name!r} without arguments"
        return None


def described(value: Attribute) -> str:
    """A value with its kind, as a message names it."""
    kind = {bool: "bool", int: "integer", float: "float", str: "string", tuple: "list", Call: "call"}[type(value)]
    return f"{kind} {format_attribute(value) if kind != 'string' else repr(value)}"


def names(specs: Sequence[AttributeSpec]) -> list[str]:
    return [s.name for s in specs]

"""Names in a kernel's text: those of the IR where C++ can have them, and none twice."""

from __future__ import annotations

from collections.abc import Iterable

from moesaic.ir.core import OpResult, Value

# What a value might be called and means something else in every kernel.
_WORDS = frozenset(
    """
    threadIdx blockIdx blockDim gridDim int float double bool char long short signed unsigned const auto void for if
    else while do switch case default break continue return goto new delete this class struct union enum template
    typename using namespace static extern register volatile inline operator public private protected virtual try
    catch throw true false sizeof and or not xor min max exp log sqrt moesaic mutable asm nullptr decltype friend
    explicit constexpr consteval constinit concept requires noexcept static_cast const_cast dynamic_cast
    reinterpret_cast alignas alignof wchar_t char8_t char16_t char32_t export typeid thread_local static_assert compl
    bitand bitor not_eq or_eq xor_eq and_eq co_await co_return co_yield NULL INFINITY NAN EOF warpSize
    atomicAdd atomicOr memcpy fabsf powf assert
    """.split()  # noqa: SIM905 - a list of strings would take a page
)


class Names:
    """Names that are given so far.

    Args:
        taken: names that the kernel's template or its helpers use.
    """

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self.taken: set[str] = {*_WORDS, *taken}
        self._of: dict[Value, str] = {}

    def of(self, value: Value) -> str:
        """The name of a value: what the IR calls it, or what makes it."""
        if value not in self._of:
            base = _letters(value.name)
            self._of[value] = self.unique(base if base and not base[0].isdigit() else short_name(value))
        return self._of[value]

    def share(self, value: Value, other: Value) -> None:
        """Has a value go by the name of another, which it only rounds."""
        self._of[value] = self.of(other)

    def unique(self, base: str) -> str:
        """A name like `base` that nothing has yet."""
        base = _letters(base)
        if not base or base[0].isdigit():
            base = f"v{base}"
        name, number = base, 2
        while name in self.taken:
            name = f"{base}{number}"
            number += 1
        self.taken.add(name)
        return name


def _letters(text: str) -> str:
    """The text as C++ can have it: without what begins with two underscores, which is the compiler's."""
    letters = "".join(c if c.isalnum() or c == "_" else "_" for c in text)
    return f"v{letters}" if letters.startswith("__") else letters


def short_name(value: Value) -> str:
    """A name for a value that has none: after the op that makes it."""
    if isinstance(value, OpResult):
        return {
            "add": "sum",
            "sub": "difference",
            "mul": "product",
            "div": "quotient",
            "safe_div": "quotient",
            "select": "chosen",
            "equal": "is_equal",
            "less": "is_less",
            "neg": "negated",
            "exp": "exponential",
            "sqrt": "root",
            "log": "logarithm",
            "max": "largest",
            "sum": "total",
            "cast": "rounded",
            "membership": "picked_here",
            "bitmap": "bits",
            "given": "picks",
            "squeeze": "number",
            "unsqueeze": "number",
            "gather": "gathered",
            "scatter": "spread",
            "combine": "combined",
            "to_picks": "of_pick",
            "sum_parts": "total",
        }.get(value.op.name.split(".")[1], value.op.name.split(".")[1])
    return "x"

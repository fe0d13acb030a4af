"""The ``math.`` ops as functions of IR values: ``moesaic.math.sqrt(moesaic.math.softplus(x))``.

Generated from the op registry, so that an op added in ``ir/ops/math.py`` is here at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moesaic.ir.core import OPS, Value, create_one
from moesaic.ir.errors import suggestion


def __getattr__(name: str) -> Callable[..., Value]:
    import moesaic.ir.ops  # noqa: F401  (registers every group)

    if f"math.{name}" not in OPS:
        known = __dir__()
        raise AttributeError(f"no op math.{name}{suggestion(name, known)}; known: {', '.join(known)}")

    def function(*operands: Value | float, **attributes: Any) -> Value:
        return create_one(f"math.{name}", *operands, **attributes)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = OPS[f"math.{name}"].__doc__
    return function


def __dir__() -> list[str]:
    import moesaic.ir.ops  # noqa: F401

    return sorted(n.removeprefix("math.") for n in OPS if n.startswith("math."))

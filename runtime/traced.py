"""What torch.compile has to know of functions of ours.

torch's own decorators say the same, but import ``torch._dynamo`` to do so, with sympy and what else it takes: 1.5 s of
a process that may never compile a model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_in_graphs: list[Callable[..., Any]] = []


def constant(function: Function) -> Function:
    """Runs while torch.compile traces, and its result is a constant: ``torch.compiler.assume_constant_result``."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def in_graph(function: Function) -> Function:
    """Is not looked into: the torch functions that it calls become the graph (``torch.compiler.allow_in_graph``). Who
    calls it while torch.compile traces calls `announce` first."""
    _in_graphs.append(function)
    return function


@constant
def announce() -> None:
    """Tells torch.compile of every function that is `in_graph`."""
    import torch._dynamo

    for function in _in_graphs:
        torch._dynamo.allow_in_graph(function)

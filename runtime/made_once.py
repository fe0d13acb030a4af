"""Layers made from static arguments at the first call, and kept, in a way that torch.compile follows."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import types
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from moesaic.ir.errors import InputTypeError
from moesaic.runtime.traced import constant

Layer = TypeVar("Layer")

# Layers by attribute. To torch.compile a layer has to be a part of something in a module, and what finds it a constant;
# what is made while it traces it would not find in a dict, which it has copied by then.
_layers = types.SimpleNamespace()
_numbers = itertools.count()
_handles: dict[Hashable, str] = {}
_by_handle: dict[str, Any] = {}


def made_once(make: Callable[..., Layer]) -> Callable[..., Layer]:
    """A function that makes a layer from static arguments, which keeps what it made.

    Under torch.compile the layer is made while tracing, which has to know every argument as a constant. Not every
    release does so for objects: arguments are numbers, strings, bools, ``None`` and functions, and `handle_of` stands
    for what is none of these.
    """

    @functools.lru_cache(maxsize=None, typed=True)
    def made(*arguments: Any) -> str:
        return _keep(make, arguments)

    names = list(inspect.signature(make).parameters)

    @constant
    def find(*arguments: Any) -> str:
        for name, argument in zip(names, arguments, strict=True):
            if not isinstance(argument, Hashable):
                raise InputTypeError(f"{name} must be a number, a name or a function, found {type(argument).__name__}")
        return made(*arguments)

    @functools.wraps(make)
    def once(*arguments: Any) -> Layer:
        fixed = [_constant(a) for a in arguments] if torch.compiler.is_compiling() else arguments
        layer: Layer = getattr(_layers, find(*fixed))
        return layer

    return once


def handle_of(declared: Hashable) -> str:
    """A string that stands for a declaration, for good, in this process; equal declarations have the same.

    It is for where torch.compile does not trace, such as where an object that will be called is made.
    """
    handle = _handles.setdefault(declared, f"{type(declared).__name__}_{next(_numbers)}")
    _by_handle[handle] = declared
    return handle


def by_handle(handle: str) -> Any:
    """What a handle stands for."""
    return _by_handle[handle]


def _keep(make: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    """Makes a layer; the name that it is kept by."""
    name = f"{make.__name__}_{next(_numbers)}"
    setattr(_layers, name, make(*arguments))
    return name


def _constant(argument: Any) -> Any:
    """The same; torch.compile, which may take numbers to vary, has to settle on their value for this."""
    if isinstance(argument, float):
        return float.fromhex(argument.hex())
    return operator.index(argument) if isinstance(argument, int) and not isinstance(argument, bool) else argument

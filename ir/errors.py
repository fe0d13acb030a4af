"""Every error moesaic raises.

An error says what was found, what was expected, where, and what to do. The classes also carry the exit
code the command line ends with, so that a script can tell a mistake in its input from a missing tool.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import ClassVar


class MoesaicError(Exception):
    """Base of all errors raised on purpose."""

    exit_code: ClassVar[int] = 1


class InputError(MoesaicError, ValueError):
    """A value the caller passed cannot be used: an argument, a shape, an attribute."""


class InputTypeError(MoesaicError, TypeError):
    """An argument of the wrong kind, or one that was not declared."""


class UsageError(MoesaicError):
    """The command line or a pipeline string is not well formed."""

    exit_code = 2


class ToolchainError(MoesaicError, RuntimeError):
    """Something outside the project is missing: NVRTC, headers, a driver, a GPU, a C++ compiler."""

    exit_code = 3


class UnsupportedError(MoesaicError, RuntimeError):
    """The request is well formed, but this version cannot do it; the message names what can."""


class KernelCompileError(MoesaicError, RuntimeError):
    """NVRTC or the host compiler rejected a generated kernel: a fault of ours, never of the input."""

    exit_code = 70


class InternalError(MoesaicError, RuntimeError):
    """An invariant of the compiler does not hold."""

    exit_code = 70


class NotKeptError(MoesaicError, RuntimeError):
    """A backward function needs what its forward function has not kept; another one has to do its work."""


class EmulationError(MoesaicError, RuntimeError):
    """The emulator caught a kernel doing something a GPU would not forgive."""

    exit_code = 70


def suggestion(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the nearest of `known`, else the empty string."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def check_choice(what: str, value: object, known: Mapping[str, object] | tuple[str, ...]) -> None:
    """Raises unless a value is one of those known, with a near one as a suggestion.

    Raises:
        InputError: it is not.
    """
    if value not in known:
        raise InputError(
            f"unknown {what} {value!r}{suggestion(str(value), known)}; known: {', '.join(map(repr, known))}"
        )


def check_number(what: str, value: object) -> None:
    """Raises `InputError` unless the value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -float("inf") < value < float("inf"):
        raise InputError(f"{what} must be a finite number, found {value!r}")


def check_flag(what: str, value: object, more: str = "") -> None:
    """Raises `InputError` unless the value is True or False; `more` is said besides."""
    if not isinstance(value, bool):
        found = repr(value) if isinstance(value, int | float | str) or value is None else type(value).__name__
        raise InputError(f"{what} must be True or False, found {found}{more}")


def check_names(what: str, value: object) -> tuple[str, ...]:
    """Some names as a tuple.

    Raises:
        InputError: it is none, or a single text.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InputError(f"{what} must be a tuple of names, found {value!r}")
    return tuple(value)


def is_identifier(value: object) -> bool:
    """Whether a name can stand in the IR and in CUDA."""
    return isinstance(value, str) and value.isidentifier() and value.isascii()


def check_identifier(what: str, value: object) -> None:
    """Raises `InputError` unless the value can stand in the IR and in CUDA as a name."""
    if not is_identifier(value):
        raise InputError(f"{what} must be an identifier of ASCII letters, found {value!r}")

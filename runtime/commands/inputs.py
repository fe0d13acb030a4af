"""Reading what a verb is given: IR text, a Python file that declares a layer, or stdin; and writing what it makes."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from moesaic.ir.diagnostics import Diagnostic, DiagnosticError, Location, Source
from moesaic.ir.errors import InputError, MoesaicError, UsageError
from moesaic.passes.instruments import read_reproducer

if TYPE_CHECKING:
    from moesaic.ir.core import Module
    from moesaic.ir.declare import Router

SPLIT_MARK = "// -----"
_DECLARED = ("router", "layer")
FILE_HELP = "IR text (.moe), a Python file that declares `router` or `layer` (.py), or - for IR on stdin"


def is_python(file: str) -> bool:
    return file.endswith(".py")


def read_source(file: str) -> Source:
    """The text of a file, or of stdin for ``-``.

    Raises:
        InputError: it cannot be read.
    """
    try:
        if file == "-":
            return Source(sys.stdin.read(), "<stdin>")
        return Source(Path(file).read_text(encoding="utf-8"), file)
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read {file}: it is not UTF-8 text ({error.reason} at byte {error.start})") from None


def stored_pipeline(file: str) -> str | None:
    """The pipeline on the first line of a reproducer; None of any other file, and of stdin."""
    return None if file == "-" or is_python(file) else read_reproducer(read_source(file).text)


def split(source: Source) -> Iterator[Source]:
    """The parts between lines that say ``// -----``, empty ones left out; each keeps its line numbers in the file."""
    lines = source.text.splitlines(keepends=True)
    start = 0
    for end in [*(i for i, line in enumerate(lines) if line.rstrip() == SPLIT_MARK), len(lines)]:
        part = "".join(lines[start:end])
        if part.strip():
            yield Source("\n" * start + part, source.name)
        start = end + 1


def parse_source(source: Source, *, verify: bool = True) -> Module:
    """The module of a text.

    Raises:
        DiagnosticError: the text is not IR, or (with `verify`) the IR is not legal.
    """
    from moesaic.ir.parser import parse

    return parse(source.text, name=source.name, verify=verify)


def read_module(file: str, dtype: str | None = None) -> Module:
    """The module of a file of either kind; `dtype` is for a router declared without one.

    Raises:
        InputError: the file cannot be read, or what it says is not legal.
        UsageError: `dtype` is given where the file decides.
    """
    from moesaic.ir.core import Module

    declared = read_declared(file, dtype)
    return declared if isinstance(declared, Module) else declared.module(dtype)


def read_declared(file: str, dtype: str | None = None) -> Module | Router:
    """What a file of either kind declares, as it does.

    Raises:
        InputError: the file cannot be read, or what it says is not legal.
        UsageError: `dtype` is given where the file decides.
    """
    if is_python(file):
        return _python_module(file, dtype)
    if dtype is not None:
        raise UsageError("--dtype goes with a .py file whose router has no dtype; IR text states its types")
    return parse_source(read_source(file))


def _python_module(file: str, dtype: str | None) -> Module | Router:
    from moesaic.ir.core import Module
    from moesaic.ir.declare import Router
    from moesaic.ir.moe import MoE
    from moesaic.ir.types import DType

    source = read_source(file)
    try:
        names = runpy.run_path(file, run_name="__moesaic__")
    except Exception as error:  # noqa: BLE001 - the user's own program may raise anything
        kind = "" if isinstance(error, MoesaicError) else f"{type(error).__name__}: "
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        raise DiagnosticError([Diagnostic(f"{kind}{message}", _place(error, source))]) from None
    name = next((n for n in _DECLARED if names.get(n) is not None), None)
    if name is None:
        raise InputError(
            f"{file} declares no `router`; give it one, such as: router = moesaic.Router(...), "
            "or a whole layer: layer = moesaic.MoE(...)"
        )
    declared = names[name]
    if isinstance(declared, Module):
        if dtype is not None:
            raise UsageError(f"--dtype goes with a router that has no dtype; the module in {file} states its types")
        return declared
    if not isinstance(declared, Router | MoE):
        found = type(declared).__name__
        of_experts = '; Experts become one by their number of picks: layer = experts.module("bf16", top_k=8)'
        more = of_experts if found == "Experts" else ""
        raise InputError(f"`{name}` in {file} must be a moesaic.Router, a moesaic.MoE or a module, found {found}{more}")
    if dtype is not None and declared.dtype is not None:
        raise UsageError(f"--dtype {dtype}: the {name} in {file} is declared for {declared.dtype}")
    if isinstance(declared, MoE):
        if dtype is None and declared.dtype is None:
            raise UsageError(f"the layer in {file} is declared without a dtype; say which: --dtype bf16")
        return declared.module(DType.parse(dtype or declared.dtype))
    return declared


def _place(error: BaseException, source: Source) -> Location | None:
    """The innermost place in the user's file that led to an error."""
    if isinstance(error, SyntaxError) and error.filename == source.name:
        return Location(source, error.lineno or 1, error.offset or 1)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename == source.name:
            return Location(source, frame.lineno or 1, (frame.colno or 0) + 1)
    return None


def write_output(text: str, output: str | None) -> None:
    """To the file `output`, or to stdout if there is none (or it is ``-``).

    Raises:
        InputError: the file cannot be written.
    """
    if output is None or output == "-":
        sys.stdout.write(text)
    else:
        write_file(Path(output), text.encode())


def write_file(path: Path, content: bytes) -> None:
    """Writes a file in one step, making its folder.

    Raises:
        InputError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # a pipe or a device
            path.write_bytes(content)
            return
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None

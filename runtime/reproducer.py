"""What is left behind when the compiler itself fails: a file that shows the fault again."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from moesaic import __version__
from moesaic.ir import environment
from moesaic.ir.errors import InternalError, MoesaicError
from moesaic.passes.instruments import REPRODUCER_MARK, CrashReproducer
from moesaic.passes.manager import Pass
from moesaic.runtime import folders

FOLDER = "reproducers"
_NOTE = "reproducer: "


def is_internal(error: BaseException) -> bool:
    """Whether an error is a fault of ours rather than of the input, the command line or the machine."""
    if isinstance(error, MoesaicError):
        return error.exit_code == InternalError.exit_code
    return isinstance(error, Exception)


def folder() -> Path:
    """Where reproducers go: ``MOESAIC_REPRODUCER_DIR``, else a folder of the cache."""
    return environment.REPRODUCER_DIR.get() or environment.cache_root() / FOLDER


def path_of(error: BaseException) -> str | None:
    """The file that was written for an error, if one was."""
    notes = (note for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE))
    return next((note.removeprefix(_NOTE) for note in notes), None)


def write(error: BaseException, text: str) -> None:
    """Keeps `text`, named by its content, and notes on `error` where."""
    path = folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.moe"
    try:
        folders.make_private(
            path.parent
        )  # it may be the first to make the cache, which distrusts what others can write
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        error.add_note(f"a reproducer could not be written: {problem}")
    else:
        error.add_note(f"{_NOTE}{path}")


class Reproduce(CrashReproducer):
    """Writes the reproducer of a failing pass.

    With a path, for any failure, to that path; without one, for internal errors only, to :func:`folder`.
    """

    def __init__(self, path: Path | None) -> None:
        super().__init__(path if path is not None else Path())
        self._chosen = path

    def on_failure(self, index: int, current: Pass, passes: Sequence[Pass], error: Exception) -> None:
        if self._chosen is None:
            if not is_internal(error):
                return
            # The name follows from what it holds, so that the same fault does not leave a file a run.
            digest = hashlib.sha256(f"{current}\n{self._before}".encode()).hexdigest()[:16]
            self.path = folder() / f"{digest}.moe"
        try:
            if self._chosen is None:
                folders.make_private(self.path.parent)
            super().on_failure(index, current, passes, error)
        except OSError as problem:
            error.add_note(f"a reproducer could not be written: {problem}")
        else:
            error.add_note(f"{_NOTE}{self.path}")
            _say_how(error, "moesaic opt --run-reproducer")


@contextlib.contextmanager
def kept(text: str, pipeline: str, again: str) -> Iterator[None]:
    """Writes IR and its pipeline as a reproducer if what is done inside fails by a fault of ours.

    `again` is the command that does it once more, given the file; what is already told by a reproducer is left alone.
    """
    try:
        yield
    except Exception as error:
        if is_internal(error) and path_of(error) is None:
            summary = (str(error).splitlines() or [type(error).__name__])[0]
            write(error, f"{REPRODUCER_MARK}{pipeline}\n// {type(error).__name__}: {summary}\n{text}")
            _say_how(error, again)
        raise


def _say_how(error: BaseException, command: str) -> None:
    path = path_of(error)
    if path is not None:
        error.add_note(f"it fails again with: {command} {path}")


def write_report(error: BaseException, arguments: Sequence[str]) -> None:
    """For a fault that no IR reproduces: the command and the traceback, as comments."""
    trace = "".join(traceback.format_exception(error)).rstrip()
    lines = [
        f"moesaic {' '.join(arguments)}",
        f"moesaic {__version__}, Python {platform.python_version()}, {sys.platform}",
        *trace.splitlines(),
    ]
    write(error, "".join(f"// {line}\n" for line in lines))

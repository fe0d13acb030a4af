"""What can watch a pipeline: checks, prints, differences, times, files, and a reproducer when it breaks.

Everything prints to the stream it is given (the command line passes stderr); results belong on stdout.
"""

from __future__ import annotations

import difflib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from moesaic.ir import environment
from moesaic.ir.core import Module
from moesaic.ir.errors import UsageError, suggestion
from moesaic.ir.verifier import verify_module
from moesaic.passes.manager import REGISTRY, Instrument, Pass, PassContext, pipeline_text

_log = logging.getLogger("moesaic.passes")


class VerifyEach(Instrument):
    """Verifies the module before the first pass and after each one."""

    def before_pipeline(self, module: Module, passes: Sequence[Pass]) -> None:
        verify_module(module)

    def after_pass(self, index: int, current: Pass, module: Module, changed: bool) -> None:
        verify_module(module)


class PrintIR(Instrument):
    """Prints the module before or after passes: all of them, those that changed it, or the named ones."""

    def __init__(
        self,
        stream: TextIO,
        *,
        after: Sequence[str] = (),
        before: Sequence[str] = (),
        after_all: bool = False,
        after_change: bool = False,
    ) -> None:
        self._stream = stream
        self._after, self._before = set(after), set(before)
        self._all, self._change = after_all, after_change

    def before_pass(self, index: int, current: Pass, module: Module) -> None:
        if current.name in self._before:
            print(f"// ----- IR before {current} -----\n{module}", file=self._stream)

    def after_pass(self, index: int, current: Pass, module: Module, changed: bool) -> None:
        if self._all or current.name in self._after or (self._change and changed):
            note = "" if changed else " (no change)"
            print(f"// ----- IR after {current}{note} -----\n{module}", file=self._stream)


def print_by_environment(stream: TextIO) -> PrintIR | None:
    """The prints that ``MOESAIC_PRINT_IR`` asks for; ``None`` if it asks for none.

    Raises:
        UsageError: it is neither after-all, after-change nor the name of a pass.
    """
    asked = environment.PRINT_IR.get()
    if asked is None:
        return None
    if asked not in ("after-all", "after-change", *REGISTRY):
        near = suggestion(asked, ["after-all", "after-change", *REGISTRY])
        raise UsageError(
            f"environment variable {environment.PRINT_IR.name} is {asked!r}, expected after-all, after-change or the "
            f"name of a pass{near}"
        )
    if asked in REGISTRY:
        return PrintIR(stream, after=[asked])
    return PrintIR(stream, after_all=asked == "after-all", after_change=asked == "after-change")


class DiffIR(Instrument):
    """Prints what each pass changed, as a unified difference."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._before = ""

    def before_pass(self, index: int, current: Pass, module: Module) -> None:
        self._before = str(module)

    def after_pass(self, index: int, current: Pass, module: Module, changed: bool) -> None:
        lines = ir_difference(self._before, str(module))
        if lines:
            print(f"// ----- changed by {current} -----\n" + "\n".join(lines), file=self._stream)


def ir_difference(before: str, after: str) -> list[str]:
    """Lines of a unified difference without its file header; empty if the texts are equal."""
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1))
    return [line for line in lines[2:] if not line.startswith("@@")]


class Timing(Instrument):
    """Wall-clock time of each pass, printed as a table at the end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._start = 0.0
        self.times: list[tuple[str, float]] = []

    def before_pass(self, index: int, current: Pass, module: Module) -> None:
        self._start = time.perf_counter()

    def after_pass(self, index: int, current: Pass, module: Module, changed: bool) -> None:
        self.times.append((current.name, time.perf_counter() - self._start))

    def after_pipeline(self, module: Module) -> None:
        total = sum(t for _, t in self.times) or 1e-9
        print("     ms      %  pass", file=self._stream)
        for name, seconds in self.times:
            print(f"{1e3 * seconds:7.2f} {100 * seconds / total:6.1f}  {name}", file=self._stream)
        print(f"{1e3 * total:7.2f}  100.0  total", file=self._stream)


class LogPasses(Instrument):
    """Says of each pass to the logger ``moesaic.passes`` whether it changed the module, how long it took, and what it
    decided; in detail, the module after it, too."""

    def __init__(self, context: PassContext) -> None:
        self._context = context
        self._said = 0
        self._start = 0.0

    def before_pass(self, index: int, current: Pass, module: Module) -> None:
        self._start = time.perf_counter()

    def after_pass(self, index: int, current: Pass, module: Module, changed: bool) -> None:
        took = 1e3 * (time.perf_counter() - self._start)
        what = "changed it" if changed else "changed nothing"
        _log.info("@%s: %s %s, %.1f ms", module.entry.name, current, what, took)
        for remark in self._context.remarks[self._said :]:
            _log.info("@%s: %s", module.entry.name, remark)
        self._said = len(self._context.remarks)
        if changed and _log.isEnabledFor(logging.DEBUG):
            _log.debug("@%s after %s:\n%s", module.entry.name, current.name, module)


class SaveTree(Instrument):
    """Writes the module before the pipeline and after each pass as numbered files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def before_pipeline(self, module: Module, passes: Sequence[Pass]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "00_input.moe").write_text(str(module))

    def after_pass(self, index: int, current: Pass, module: Module, changed: bool) -> None:
        (self._folder / f"{index + 1:02d}_{current.name}.moe").write_text(f"// after {current}\n{module}")


class History(Instrument):
    """Keeps the text of the module after each pass that changed it, for `.stages` and the demo."""

    def __init__(self) -> None:
        self.stages: dict[str, str] = {}

    def before_pipeline(self, module: Module, passes: Sequence[Pass]) -> None:
        self.stages["declared"] = str(module)

    def after_pass(self, index: int, current: Pass, module: Module, changed: bool) -> None:
        if changed:
            name = current.name
            repeat = 2
            while name in self.stages:
                name = f"{current.name}-{repeat}"
                repeat += 1
            self.stages[name] = str(module)


REPRODUCER_MARK = "// moesaic-pipeline: "


class CrashReproducer(Instrument):
    """When a pass fails, writes the IR it started from with the rest of the pipeline on the first line.

    ``moesaic opt --run-reproducer FILE`` runs it again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written = False
        self._before = ""

    def before_pass(self, index: int, current: Pass, module: Module) -> None:
        self._before = str(module)

    def on_failure(self, index: int, current: Pass, passes: Sequence[Pass], error: Exception) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        summary = str(error).splitlines()[0] if str(error) else type(error).__name__
        self.path.write_text(
            f"{REPRODUCER_MARK}{pipeline_text(passes[index:])}\n"
            f"// {type(error).__name__} in {current.name}: {summary}\n{self._before}"
        )
        self.written = True


def read_reproducer(text: str) -> str | None:
    """The pipeline text stored in a reproducer, or ``None`` if the text is not one."""
    first = text.split("\n", 1)[0]
    return first.removeprefix(REPRODUCER_MARK).strip() if first.startswith(REPRODUCER_MARK) else None

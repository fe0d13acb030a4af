"""How a search goes, for people: a bar on a terminal where rich is installed, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from moesaic.runtime.tuning.search import Trial
from moesaic.runtime.tuning.tuner import Tuned, Watch

if TYPE_CHECKING:
    from collections.abc import Callable

_EVERY_SECONDS = 5.0  # a plain line, at most


class Progress(Watch):
    """A context that shows the searches within; `total_seconds` is the time they have together, 0 for no limit."""

    def __init__(
        self, total_seconds: float, stream: TextIO | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream or sys.stderr
        self._total = total_seconds
        self._now = now
        self._start = now()
        self._said = now()
        self._kernel = ""
        self._most = 0
        self._done = 0
        self._best: float | None = None
        self._default: float | None = None
        self._bar: Any = _bar(self._stream)
        self._task: Any = None

    def __enter__(self) -> Self:
        self._start = self._said = self._now()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def seconds_left(self) -> float:
        """Of the total."""
        return max(0.0, self._total - (self._now() - self._start))

    @property
    def left(self) -> str:
        """The time that is left, in words."""
        if not self._total:
            return f"{self._now() - self._start:.0f} s so far"
        return f"{self.seconds_left:.0f} s left"

    def begin(self, kernel: str, points: int, most_trials: int, seconds: float) -> None:
        self._kernel, self._most = kernel, min(points, most_trials) if most_trials else points
        self._done, self._best, self._default = 0, None, None
        if self._bar is not None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(kernel, total=self._most, said=self.left)

    def trial(self, trial: Trial) -> None:
        if trial.verdict == "begun":
            return
        self._done += trial.verdict != "same"
        if trial.us is not None:
            self._default = trial.us if self._default is None else self._default
            self._best = trial.us if self._best is None else min(self._best, trial.us)
        said = self.left if self._best is None else f"{self._default:.2f} -> {self._best:.2f} us, {self.left}"
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, said=said)
        elif self._now() - self._said >= _EVERY_SECONDS:
            self._said = self._now()
            self._line(f"{self._kernel}: {self._done} of {self._most} tried, {said}")

    def end(self, tuned: Tuned) -> None:
        entry = tuned.entry
        if tuned.found is None:
            said = f"{tuned.kernel} ({tuned.kind}): known, {entry.us:.2f} us"
        else:
            gain = 100 * (1 - entry.us / entry.default_us)
            said = f"{tuned.kernel} ({tuned.kind}): {entry.default_us:.2f} -> {entry.us:.2f} us, {gain:.1f} % less"
        self._line(f"{said}, {self.left}")

    def _line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        else:
            print(text, file=self._stream, flush=True)


def _bar(stream: TextIO) -> Any:
    """A progress bar of rich; None where the stream is no terminal, or rich is not installed."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
    except ImportError:
        return None
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[said]}"),
    )
    return Progress(*columns, console=Console(file=stream), transient=True)

"""Every trial of a search, a line of JSON each, as it happens: a search that was cut off goes on where it stopped.

A candidate that was begun and never ended has taken the process with it, and is not tried again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from moesaic.passes.kernel_key import KernelKey
from moesaic.runtime.tuning.search import Trial, key_of


class Journal:
    """The trials of a file, and those that are added to it. Lines that cannot be read are passed over: cut ones."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, dict[str, Trial]] = {}
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            lines = []
        for line in lines:
            try:
                row = json.loads(line)
                key = KernelKey.parse(row["key"])
                trial = Trial(row["point"], float(row["estimate"]), row["us"], str(row["verdict"]))
            except (ValueError, KeyError, TypeError):
                continue
            self._known.setdefault(_text(key), {})[key_of(trial.point)] = trial

    def known(self, key: KernelKey) -> dict[str, Trial]:
        """Trials of a kernel by their points."""
        found = self._known.get(_text(key), {})
        crashed = "failed: it took the process with it"
        return {p: replace(t, verdict=crashed) if t.verdict == "begun" else t for p, t in found.items()}

    def noting(self, key: KernelKey) -> Callable[[Trial], None]:
        """Adds trials of a kernel."""

        def note(trial: Trial) -> None:
            self._known.setdefault(_text(key), {})[key_of(trial.point)] = trial
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key.as_dict(), **asdict(trial)}) + "\n")

        return note


def _text(key: KernelKey) -> str:
    return json.dumps(key.as_dict(), sort_keys=True)

"""What came of tuning: as text, as a plot in a terminal, and as a plot in a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moesaic.runtime.tuning.tuner import Tuned


@dataclass
class Report:
    """Kernels that were tuned, or looked up, in order."""

    tuned: list[Tuned] = field(default_factory=list)

    def add(self, found: Sequence[Tuned]) -> None:
        """Adds kernels; one that is there already is left out."""
        known = {(t.key, t.kind) for t in self.tuned}
        self.tuned += [t for t in found if (t.key, t.kind) not in known]

    def __len__(self) -> int:
        return len(self.tuned)

    def rows(self) -> list[dict[str, Any]]:
        """A record for each kernel."""
        return [
            {
                "kernel": t.kernel,
                "function": t.kind,
                **t.key.as_dict(),
                "us": t.entry.us,
                "default_us": t.entry.default_us,
                "floor_us": round(t.floor_us, 3),
                "tuned_at": t.entry.tuned_at,
                "trials": t.entry.trials,
                "points": t.entry.points,
                "point": dict(t.entry.point),
                "default": dict(t.default),
                "searched": t.found is not None,
            }
            for t in self.tuned
        ]

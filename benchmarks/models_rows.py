"""Numbers of models in tables: times of each part, gains, and what Amdahl's law allows of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from models_cases import IMPLEMENTATIONS, PAIRS
from timing import Timing

GAIN_GOAL = 1.2
"""Of the layer's training: the best of the others over the best of ours."""
REACHED_GOAL = 0.95
"""Of the model's training: what is reached of the gain that Amdahl's law allows."""


def experts_of(name: str) -> str:
    """Whose experts an implementation has: blocks have none that run alone."""
    return name.replace("-blocks", "")


@dataclass
class Row:
    """One number of tokens of a section: the timing of each part with each implementation, or why there is none.

    `cells` has keys (part, implementation); parts are ``experts``, ``rest``, ``layer`` and ``model``.
    """

    section: str
    tokens: int
    layers: int
    cells: dict[tuple[str, str], Timing | str] = field(default_factory=dict)

    def us(self, part: str, name: str) -> float | None:
        cell = self.cells.get((part, name))
        return cell.us if isinstance(cell, Timing) else None

    def best(self, part: str, ours: bool) -> tuple[str, float] | None:
        """The fastest of ours or of the others, and its time."""
        found = [
            (us, name)
            for name in IMPLEMENTATIONS
            if name.startswith("moesaic") == ours and (us := self.us(part, name)) is not None
        ]
        return (min(found)[1], min(found)[0]) if found else None

    def gain(self, part: str) -> float | None:
        """The best of the others over the best of ours."""
        ours, others = self.best(part, True), self.best(part, False)
        return others[1] / ours[1] if ours and others else None

    def amdahl(self, part: str, peer: str, ours: str) -> tuple[float, float] | None:
        """What the experts' gain allows of a part, and what was measured of it."""
        count = self.layers if part == "model" else 1
        whole, mine = self.us(part, peer), self.us(part, ours)
        theirs, own = self.us("experts", peer), self.us("experts", experts_of(ours))
        if whole is None or mine is None or theirs is None or own is None:
            return None
        return whole / max(whole - count * (theirs - own), 1e-9), whole / mine

    def as_dict(self) -> dict[str, Any]:
        cells = {
            f"{part}/{name}": asdict(cell) if isinstance(cell, Timing) else cell
            for (part, name), cell in self.cells.items()
        }
        bounds = {
            f"{part}: {ours} beside {peer}": dict(zip(("allowed", "gain"), found, strict=True))
            for part in ("layer", "model")
            for peer, ours in PAIRS
            if (found := self.amdahl(part, peer, ours)) is not None
        }
        return {"section": self.section, "tokens": self.tokens, "layers": self.layers, "cells": cells, "amdahl": bounds}


def _ms(row: Row, part: str, name: str) -> str:
    cell = row.cells.get((part, name), "-")
    return f"{cell.us / 1e3:.3f}" if isinstance(cell, Timing) else cell.partition(":")[0]


def print_training(row: Row, names: Sequence[str]) -> None:
    """Times of all parts, rates, gains, and what Amdahl's law allows."""
    print(f"{'':22}  experts, ms   rest, ms  layer, ms     tokens/s  model, ms     tokens/s")
    for name in names:
        rates = [f"{row.tokens / us * 1e6:,.0f}" if (us := row.us(p, name)) else "-" for p in ("layer", "model")]
        times = [_ms(row, p, name) for p in ("experts", "rest", "layer", "model")]
        print(f"{name:22}  {times[0]:>11}  {times[1]:>9}  {times[2]:>9}  {rates[0]:>11}  {times[3]:>9}  {rates[1]:>11}")
    for part, goal in (("layer", GAIN_GOAL), ("model", None)):
        gain, ours, others = row.gain(part), row.best(part, True), row.best(part, False)
        if gain is not None and ours is not None and others is not None:
            verdict = "" if goal is None else f"; goal: >= {goal:.2f} x, {'met' if gain >= goal else 'no'}"
            print(f"{part}: {ours[0]} is {gain:.2f} x {others[0]}, the best of the others{verdict}")
    for part, least in (("layer", None), ("model", REACHED_GOAL)):
        for peer, mine in PAIRS:
            found = row.amdahl(part, peer, mine)
            if found is None:
                continue
            allowed, gain = found
            verdict = "" if least is None else f"; goal: >= {least:.0%}, {'met' if gain / allowed >= least else 'no'}"
            experts = (row.us("experts", peer) or 0.0) / (row.us("experts", experts_of(mine)) or 1.0)
            print(
                f"{part}, {mine} beside {peer}: experts {experts:.2f} x, allowed {allowed:.2f} x, gain {gain:.2f} x, "
                f"reached {gain / allowed:.0%}{verdict}"
            )
    _print_reasons(row)


def print_serving_header(names: Sequence[str]) -> None:
    print(f"{'T':>4}  {'part':7}  " + "  ".join(f"{name:>22}" for name in names) + "   gain  allowed  reached")


def print_serving(row: Row, names: Sequence[str]) -> None:
    """The experts and the layer of a number of tokens; the bound is that of ours beside the best of the others."""
    for part in ("experts", "layer"):
        cells = [row.cells.get((part, name), "-") for name in names]
        said = [f"{c.us:.1f}" if isinstance(c, Timing) else c.partition(":")[0] for c in cells]
        gain, bound = row.gain(part), None
        ours, others = row.best("layer", True), row.best("layer", False)
        if part == "layer" and ours is not None and others is not None:
            bound = row.amdahl("layer", others[0], ours[0])
        end = f"  {gain:4.2f}x" if gain is not None else ""
        end += f"  {bound[0]:6.2f}x  {bound[1] / bound[0]:7.0%}" if bound is not None else ""
        print(f"{row.tokens:4}  {part:7}  " + "  ".join(f"{t:>22}" for t in said) + end, flush=True)
    _print_reasons(row)


def _print_reasons(row: Row) -> None:
    for (part, name), cell in row.cells.items():
        if isinstance(cell, str) and ":" in cell:
            print(f"    {part}, {name}: {cell}")

"""The tables of experts: their goals, their rows, and how they are printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from experts_bounds import NOMINAL_DENSE, Cost, Load
from experts_cases import Case
from experts_kernels import Launch
from timing import Machine, Timing

DENSE = 8192
DENSE_FLOPS = 2.0 * DENSE**3

# -------------------------------------------------------------------------------------------------------------- goals


@dataclass(frozen=True)
class Goal:
    """``share`` of the dense product's rate at least, ``us`` at most, or ``ratio`` to another time at most."""

    kind: str
    value: float
    expected: bool = False
    """What a kernel was expected to reach, rather than what it shall."""

    def __str__(self) -> str:
        if self.kind == "us":
            return f"<= {self.value / 1e3:.2f} ms" if self.value >= 400 else f"<= {self.value:.0f} us"
        return f">= {self.value:.2f}" if self.kind == "share" else f"<= {self.value:.2f} x"

    def verdict(self, us: float | None, share: float | None = None, ratio: float | None = None) -> str:
        """``met`` or ``no``; empty if there is no such number."""
        found = {"us": us, "share": share, "ratio": ratio}[self.kind]
        if found is None:
            return ""
        met = found >= self.value if self.kind == "share" else found <= self.value
        return "met" if met else "expect" if self.expected else "no"


GOALS: Mapping[tuple[str, int, str], Goal] = {
    ("qwen3", 16384, "fwd"): Goal("share", 0.78),
    ("qwen3", 16384, "fwd+bwd"): Goal("share", 0.74),
    ("qwen3", 4096, "fwd"): Goal("us", 680),
    ("qwen3", 4096, "fwd+bwd"): Goal("us", 2200),
    ("qwen3", 512, "fwd"): Goal("us", 500),
    ("olmoe", 16384, "fwd"): Goal("share", 0.82),
    ("olmoe", 16384, "fwd+bwd"): Goal("share", 0.78),
    ("mixtral", 16384, "fwd"): Goal("share", 0.87),
    ("mixtral", 16384, "fwd+bwd"): Goal("share", 0.85),
    ("deepseek", 16384, "fwd"): Goal("share", 0.84),
    ("deepseek", 16384, "fwd+bwd"): Goal("share", 0.80),
}
KERNEL_GOALS: Mapping[tuple[str, str], Goal] = {
    ("forward", "metadata"): Goal("us", 20),
    ("forward", "gate_up_proj"): Goal("share", 0.90),
    ("training", "gate_up_proj"): Goal("share", 0.85),
    ("forward", "down_proj"): Goal("share", 0.87),
    ("forward", "combine"): Goal("us", 300),
    ("backward", "down_proj"): Goal("share", 0.65, expected=True),
    ("backward", "d_down_proj"): Goal("share", 0.75, expected=True),
    ("backward", "gate_up_proj"): Goal("share", 0.80, expected=True),
    ("backward", "d_gate_up_proj"): Goal("share", 0.75, expected=True),
    ("backward", "combine"): Goal("us", 300),
}
"""For qwen3 at T = 16384: 131072 slots."""
LIVE_GOALS: Mapping[tuple[float, str], Goal] = {
    (0.125, "spread"): Goal("ratio", 0.35),
    (0.125, "local"): Goal("ratio", 0.20),
}
SKEW_GOAL = Goal("ratio", 1.05)
SAVED_GOAL = 410e6
HOST_GOAL_US = 40.0


# --------------------------------------------------------------------------------------------------------------- rows


@dataclass
class Row:
    """One pass of a case with one kind of picks, with the cell of each implementation: a timing, or a reason."""

    section: str
    case: Case
    tokens: int
    which: str
    picks: str
    load: Load
    goal: Goal | None = None
    cells: dict[str, Timing | str] = field(default_factory=dict)
    dense: Timing | None = None
    first_us: float | None = None
    """Time of ours in the first row of the section and pass."""

    @property
    def cost(self) -> Cost:
        return self.case.cost(self.load, self.which != "fwd")

    @property
    def dense_rate(self) -> float:
        """FLOPs a second of the dense product of the rotation."""
        return NOMINAL_DENSE if self.dense is None else 1e6 * DENSE_FLOPS / self.dense.us

    def us(self, implementation: str) -> float | None:
        """A time, if there is one."""
        cell = self.cells.get(implementation)
        return cell.us if isinstance(cell, Timing) else None

    @property
    def share(self) -> float | None:
        """Of the dense rate, of ours."""
        mine = self.us("ours")
        return self.cost.flops / (1e-6 * mine) / self.dense_rate if mine else None

    @property
    def to_first(self) -> float | None:
        mine = self.us("ours")
        return mine / self.first_us if mine and self.first_us else None

    @property
    def verdict(self) -> str:
        return self.goal.verdict(self.us("ours"), self.share, self.to_first) if self.goal else ""

    def as_dict(self, machine: Machine) -> dict[str, Any]:
        """For JSON."""
        mine = self.us("ours")
        floor = self.cost.floor_us(machine, self.dense_rate)
        return {
            "section": self.section,
            "case": self.case.name,
            "tokens": self.tokens,
            "pass": self.which,
            "picks": self.picks,
            **{f"load_{name}": value for name, value in asdict(self.load).items() if name != "tokens"},
            "flops": self.cost.flops,
            "bytes": self.cost.bytes,
            "floor_us": floor,
            "bound_by": self.cost.limit(machine, self.dense_rate),
            "dense_flops_per_s": self.dense_rate if self.dense else None,
            "share": self.share,
            "of_floor": floor / mine if mine else None,
            "to_first": self.to_first,
            "goal": str(self.goal) if self.goal else None,
            "verdict": self.verdict,
            **{name: asdict(c) if isinstance(c, Timing) else c for name, c in self.cells.items()},
        }


_COLUMNS = (
    ("case", -8), ("T", 5), ("pass", -7), ("picks", -12), ("rows", 6), ("max", 4), ("ours", 7), ("+-", 5), ("TF/s", 5),
    ("dense", 5), ("share", 5), ("floor", 6), ("by", -5), ("of floor", 8), ("hf", 7), ("x", 5), ("compile", 7),
    ("x", 5), ("to 1st", 6), ("goal", -10), ("", -6),
)  # fmt: skip


def print_rows(rows: Sequence[Row], machine: Machine, *, header: bool) -> None:
    """Lines of the table of layers."""
    if header:
        print(line([name for name, _ in _COLUMNS], _COLUMNS))
    for row in rows:
        mine, us, rate = row.cells.get("ours", "-"), row.us("ours"), row.dense_rate
        floor = row.cost.floor_us(machine, rate)
        cells = [
            row.case.name,
            str(row.tokens),
            row.which,
            row.picks,
            f"{row.load.rows / row.case.experts:.0f}",
            f"{row.load.skew:.1f}",
            _ms(mine.us) if isinstance(mine, Timing) else mine.partition(":")[0],
            f"{50 * mine.spread:.1f}%" if isinstance(mine, Timing) else "-",
            f"{row.cost.flops / us / 1e6:.0f}" if us else "-",
            f"{rate / 1e12:.0f}",
            f"{row.share:.2f}" if row.share else "-",
            _ms(floor),
            row.cost.limit(machine, rate),
            f"{floor / us:.0%}" if us else "-",
        ]
        for name in ("hf", "compile"):
            cell, peer = row.cells.get(name, "-"), row.us(name)
            cells.append(_ms(peer) if peer is not None else str(cell).partition(":")[0])
            cells.append(f"{peer / us:.2f}" if peer is not None and us else "-")
        cells.append(f"{row.to_first:.3f}" if row.to_first else "-")
        cells += [str(row.goal or ""), row.verdict]
        print(line(cells, _COLUMNS), flush=True)
        for name, cell in row.cells.items():
            if isinstance(cell, str) and ":" in cell:
                print(f"    {name}: {cell}", flush=True)


def line(cells: Sequence[str], columns: Sequence[tuple[str, int]]) -> str:
    return "  ".join(
        c.ljust(-width) if width < 0 else c.rjust(width) for c, (_, width) in zip(cells, columns, strict=True)
    ).rstrip()


def _ms(us: float) -> str:
    ms = us / 1e3
    return f"{ms:.3f}" if ms < 10 else f"{ms:.2f}" if ms < 100 else f"{ms:.0f}"


def _us(us: float) -> str:
    return f"{us:.2f}" if us < 100 else f"{us:.1f}" if us < 1000 else f"{us:.0f}"


@dataclass
class KernelRow:
    """One launch, or all of a dispatch together."""

    case: Case
    load: Load
    kind: str
    name: str
    tile: str
    cost: Cost
    goal: Goal | None
    cell: Timing | str = "-"
    dense: Timing | None = None

    @classmethod
    def of(cls, case: Case, load: Load, launch: Launch) -> KernelRow:
        return cls(case, load, launch.kind, launch.name, launch.tile, launch.cost(load), _kernel_goal(case, launch))

    @classmethod
    def metadata(cls, case: Case, load: Load, launches: Sequence[Launch]) -> KernelRow:
        """Of the launches of one dispatch."""
        picks = 4.0 * load.tokens * case.top_k
        cost = Cost(0.0, 2 * picks + 8.0 * load.rows)  # picks in; a slot for each, and token and pick of a slot out
        goal = KERNEL_GOALS.get(("forward", "metadata"))
        return cls(case, load, "forward", "metadata", f"{len(launches)} launches", cost, goal)

    @property
    def dense_rate(self) -> float:
        return NOMINAL_DENSE if self.dense is None else 1e6 * DENSE_FLOPS / self.dense.us

    @property
    def us(self) -> float | None:
        return self.cell.us if isinstance(self.cell, Timing) else None

    @property
    def share(self) -> float | None:
        return self.cost.flops / (1e-6 * self.us) / self.dense_rate if self.us and self.cost.flops else None

    @property
    def verdict(self) -> str:
        return self.goal.verdict(self.us, self.share) if self.goal else ""

    def as_dict(self, machine: Machine) -> dict[str, Any]:
        """For JSON."""
        return {
            "section": "kernels",
            "case": self.case.name,
            "tokens": self.load.tokens,
            "rows": self.load.rows,
            "kind": self.kind,
            "kernel": self.name,
            "tile": self.tile,
            "flops": self.cost.flops,
            "bytes": self.cost.bytes,
            "floor_us": self.cost.floor_us(machine, self.dense_rate),
            "dense_flops_per_s": self.dense_rate if self.dense else None,
            "share": self.share,
            "goal": str(self.goal) if self.goal else None,
            "verdict": self.verdict,
            "ours": asdict(self.cell) if isinstance(self.cell, Timing) else self.cell,
        }


def _kernel_goal(case: Case, launch: Launch) -> Goal | None:
    return KERNEL_GOALS.get((launch.kind, launch.name)) if case.name == "qwen3" else None


_KERNEL_COLUMNS = (
    ("case", -8), ("T", 5), ("of", -8), ("kernel", -16), ("as", -24), ("us", 8), ("+-", 5), ("TF/s", 5), ("share", 5),
    ("GB/s", 5), ("floor", 8), ("by", -5), ("of floor", 8), ("goal", -10), ("", -6),
)  # fmt: skip


def print_kernels(rows: Sequence[KernelRow], machine: Machine) -> None:
    """The table of kernels."""
    print(line([name for name, _ in _KERNEL_COLUMNS], _KERNEL_COLUMNS))
    for row in rows:
        floor, us, cell = row.cost.floor_us(machine, row.dense_rate), row.us, row.cell
        cells = [
            row.case.name,
            str(row.load.tokens),
            row.kind,
            row.name,
            row.tile,
            _us(us) if us else str(cell).partition(":")[0],
            f"{50 * cell.spread:.1f}%" if isinstance(cell, Timing) else "-",
            f"{row.cost.flops / us / 1e6:.0f}" if us and row.cost.flops else "-",
            f"{row.share:.2f}" if row.share else "-",
            f"{row.cost.bytes / us / 1e3:.0f}" if us else "-",
            _us(floor),
            row.cost.limit(machine, row.dense_rate),
            f"{floor / us:.0%}" if us else "-",
            str(row.goal or ""),
            row.verdict,
        ]
        print(line(cells, _KERNEL_COLUMNS), flush=True)

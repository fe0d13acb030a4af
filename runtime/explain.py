"""What a layer's kernels must do and what they take: bytes, FLOPs, floors, occupancy, memory, and times where there is
a GPU. Needs neither torch nor a GPU.

The floor of a kernel is the larger of its bytes (each operand once, see `passes/cost.py`) at the bandwidth of a copy
kernel, and the FLOPs of its products at the rate of a large dense product. The floor of a direction counts only what
the caller gives and gets, as if nothing between its kernels went through memory.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.resources import Resources
from moesaic.codegen.target import WARP_THREADS, Target
from moesaic.ir.errors import InputError, ToolchainError
from moesaic.ir.ops import slot
from moesaic.ir.ops.launch import Kernel
from moesaic.passes.card import H100, Card
from moesaic.passes.cost import Cost, Extents, cost_of
from moesaic.runtime import token_buckets
from moesaic.runtime.kernels import compiled_kernel
from moesaic.runtime.memory import Memory, memory_of
from moesaic.runtime.plan import LaunchPlan
from moesaic.runtime.program import Executable, Program
from moesaic.runtime.side_by_side import side_by_side

TOKENS = 16384
"""T where nobody says how many."""

_WORTH_SAYING = 0.02  # of a direction's floors: what a tensor between kernels must cost to be called a gap

Times = Mapping[str, float]
"""Microseconds by symbol of the kernel."""

Tuned = Callable[[str, tuple[str, ...], int], tuple[str, ...]]
"""Of a kind of function, its cotangents, and a bucket of T: the option `points` of ``specialize``."""


@dataclass(frozen=True)
class KernelReport:
    """One launch.

    Attributes:
        symbol: of the kernel.
        template: the family it is of.
        configuration: what `specialize` chose, as in the banner of its text.
        bytes_read, bytes_written: of its operands, each once.
        product_flops, other_flops: of matrix products, and of everything else.
        floor_us: microseconds that it needs at least.
        limit: what the floor is made of: ``bytes`` or ``FLOPs``.
        threads, cluster: of a block; of blocks.
        shared_bytes: of a block, static and dynamic; without a compiler, what the launch asks for.
        resources: registers, spills, static shared memory; ``None`` without a compiler.
        blocks_per_sm: blocks that a multiprocessor holds at once.
        occupancy: the warps of these over those that it could hold.
        occupancy_limit: what bounds them: ``registers``, ``shared memory``, ``threads`` or ``blocks``.
        early: whether it begins beside the kernels before it.
        us: microseconds measured, that it adds to those before it; ``None`` where nothing was.
    """

    symbol: str
    template: str
    configuration: tuple[str, ...]
    bytes_read: float
    bytes_written: float
    product_flops: float
    other_flops: float
    floor_us: float
    limit: str
    threads: int
    cluster: int
    shared_bytes: int
    resources: Resources | None
    blocks_per_sm: int | None
    occupancy: float | None
    occupancy_limit: str | None
    early: bool
    us: float | None

    @property
    def bytes(self) -> float:
        return self.bytes_read + self.bytes_written

    @property
    def flops(self) -> float:
        return self.product_flops + self.other_flops

    @property
    def share(self) -> float | None:
        """The floor over the measured time."""
        return None if self.us is None else self.floor_us / self.us


@dataclass(frozen=True)
class Between:
    """A tensor that one kernel leaves in memory for others.

    Attributes:
        name, type: of it.
        writer, readers: the kernels.
        bytes: that all of them move of it.
        us: by how much the floors of these kernels would be lower without.
    """

    name: str
    type: str
    writer: str
    readers: tuple[str, ...]
    bytes: float
    us: float


@dataclass(frozen=True)
class Direction:
    """Forward, forward in training, or backward.

    Attributes:
        name: ``forward``, ``training`` or ``backward``.
        kernels: its launches, in order.
        bytes: of what the caller gives and gets, each once.
        floor_us: what the direction needs at least, whatever its kernels are.
        between: tensors that only its kernels see, those first that raise floors most.
    """

    name: str
    kernels: tuple[KernelReport, ...]
    bytes: float
    floor_us: float
    between: tuple[Between, ...]

    @property
    def product_flops(self) -> float:
        return sum(k.product_flops for k in self.kernels)

    @property
    def kernels_floor_us(self) -> float:
        """The floors of its kernels, one after the other."""
        return sum(k.floor_us for k in self.kernels)

    @property
    def us(self) -> float | None:
        """The measured times of its kernels, one after the other; ``None`` unless all were measured."""
        return _sum(k.us for k in self.kernels)

    @property
    def share(self) -> float | None:
        """The floor over the measured time."""
        return None if not self.us else self.floor_us / self.us


@dataclass(frozen=True)
class Explanation:
    """What `explain` gives; prints as a table, and shows as one in a notebook.

    Attributes:
        name: of the layer's function.
        target: architecture that the kernels are compiled for.
        card: whose rates the floors are computed from.
        tokens: T.
        rows: live slots of experts; 0 where there are none.
        directions: forward alone, or forward in training and backward.
        memory: what calls with so many tokens allocate, in training.
        notes: what could not be found out, and why.
    """

    name: str
    target: str
    card: Card
    tokens: int
    rows: int
    directions: tuple[Direction, ...]
    memory: Memory
    notes: tuple[str, ...] = field(default=())

    @property
    def kernels(self) -> Mapping[str, KernelReport]:
        """All launches by symbol."""
        return {k.symbol: k for d in self.directions for k in d.kernels}

    @property
    def floor_us(self) -> float:
        return sum(d.floor_us for d in self.directions)

    @property
    def kernels_floor_us(self) -> float:
        return sum(d.kernels_floor_us for d in self.directions)

    @property
    def us(self) -> float | None:
        return _sum(d.us for d in self.directions)

    @property
    def share(self) -> float | None:
        return None if not self.us else self.floor_us / self.us

    @property
    def biggest_gap(self) -> str:
        """Where most is to be had: the kernel furthest above its floor; without times, the tensor between kernels that
        costs most, or the kernel with the highest floor."""
        measured = [k for k in self.kernels.values() if k.us is not None]
        if measured:
            worst = max(measured, key=lambda k: (k.us or 0.0) - k.floor_us)
            assert worst.us is not None
            gap = worst.us - worst.floor_us
            return (
                f"{worst.symbol}: {_us(worst.us)} us for a floor of {_us(worst.floor_us)} ({worst.limit}), "
                f"{_us(gap)} above it"
            )
        between = [(d, b) for d in self.directions for b in d.between]
        if between:
            direction, largest = max(between, key=lambda pair: pair[1].us)
            if largest.us > _WORTH_SAYING * direction.kernels_floor_us:
                return (
                    f"%{largest.name} {largest.type} goes through memory from {largest.writer} to "
                    f"{', '.join(largest.readers)}: {_bytes(largest.bytes)}, {_us(largest.us)} us of floors"
                )
        if not self.kernels:
            return "nothing: there is no kernel"
        highest = max(self.kernels.values(), key=lambda k: k.floor_us)
        return (
            f"not measured; the highest floor is that of {highest.symbol}: {_us(highest.floor_us)} us ({highest.limit})"
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        made = dataclasses.asdict(self)
        made["memory"] = self.memory._asdict()
        for direction, given in zip(made["directions"], self.directions, strict=True):
            direction |= {"kernels_floor_us": given.kernels_floor_us, "us": given.us, "share": given.share}
            for kernel, report in zip(direction["kernels"], given.kernels, strict=True):
                kernel |= {"share": report.share}
        return made | {"us": self.us, "share": self.share, "biggest_gap": self.biggest_gap}

    def __str__(self) -> str:
        return "\n".join([self._title(), "", *_aligned(self._rows(), _RIGHT), "", *self._closing()])

    def _repr_html_(self) -> str:
        def cells(row: Sequence[str], tag: str) -> str:
            return "".join(
                f'<{tag} style="text-align: {"right" if i in _RIGHT else "left"}">{html.escape(cell)}</{tag}>'
                for i, cell in enumerate(row)
            )

        header, *rows = self._rows()
        body = "".join(f"<tr>{cells(row, 'th' if row[0] in _TOTALS else 'td')}</tr>" for row in rows)
        closing = "".join(f"<li>{html.escape(line)}</li>" for line in self._closing())
        return (
            f"<p>{html.escape(self._title())}</p><table><thead><tr>{cells(header, 'th')}</tr></thead>"
            f"<tbody>{body}</tbody></table><ul>{closing}</ul>"
        )

    def _title(self) -> str:
        rows = f", {self.rows} live rows" if self.rows else ""
        return (
            f"@{self.name} for {self.target}, T = {self.tokens}{rows}; rates of {self.card.name} ({self.card.source})"
        )

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [_HEADER]
        for direction in self.directions:
            for kernel in direction.kernels:
                used = kernel.resources
                rows.append(
                    (
                        kernel.symbol,
                        _bytes(kernel.bytes),
                        _flops(kernel.flops),
                        _us(kernel.floor_us),
                        kernel.limit,
                        _us(kernel.us),
                        _percent(kernel.share),
                        "-" if used is None else str(used.registers),
                        "-" if used is None else str(used.spill_store_bytes + used.spill_load_bytes),
                        _bytes(kernel.shared_bytes, "KiB"),
                        str(kernel.threads),
                        _percent(kernel.occupancy),
                        kernel.occupancy_limit or "-",
                    )
                )
            totals = (
                (
                    f"{direction.name}: kernels",
                    sum(k.bytes for k in direction.kernels),
                    sum(k.flops for k in direction.kernels),
                    direction.kernels_floor_us,
                    _ratio(direction.kernels_floor_us, direction.us),
                ),
                (
                    f"{direction.name}: layer",
                    direction.bytes,
                    direction.product_flops,
                    direction.floor_us,
                    direction.share,
                ),
            )
            for name, moved, flops, floor, share in totals:
                rows.append(
                    (name, _bytes(moved), _flops(flops), _us(floor), "", _us(direction.us), _percent(share), *[""] * 6)
                )
        return rows

    def _closing(self) -> list[str]:
        memory = self.memory
        lines = [
            "floors: bytes of each operand once, or FLOPs of products; of a layer: what the caller gives and gets",
            (
                f"memory in training: results {_bytes(memory.results)}, saved {_bytes(memory.saved)}, "
                f"workspace {_bytes(memory.workspace)}, gradients {_bytes(memory.gradients)}, "
                f"workspace of backward {_bytes(memory.backward_workspace)}"
            ),
            f"biggest gap: {self.biggest_gap}",
        ]
        early = [k.symbol for k in self.kernels.values() if k.early]
        if early:
            lines.append(f"begin beside the kernels before them: {', '.join(early)}")
        return [*lines, *self.notes]


_HEADER = (
    "kernel",
    "bytes",
    "FLOPs",
    "floor us",
    "of",
    "us",
    "share",
    "regs",
    "spills",
    "shared",
    "threads",
    "occupancy",
    "limited by",
)
_RIGHT = frozenset({1, 2, 3, 5, 6, 7, 8, 9, 10, 11})


def by_the_rule(kind: str, cotangents: tuple[str, ...], bucket: int) -> tuple[str, ...]:
    """No kernel is tuned."""
    return ()


def explain(
    program: Program,
    target: Target,
    tokens: int = TOKENS,
    *,
    training: bool = True,
    live: float = 1.0,
    card: Card = H100,
    times: Times | None = None,
    notes: Sequence[str] = (),
    lineinfo: bool | None = None,
    tuned: Tuned = by_the_rule,
) -> Explanation:
    """Explains a program; see the module.

    Args:
        program: the layer.
        target: to compile for.
        tokens: T.
        training: forward that keeps what backward needs, and backward; else forward alone.
        live: the share of picks that are of experts which are here.
        card: whose rates count.
        times: microseconds of kernels that were measured.
        notes: to be handed on.
        lineinfo: whether kernels are compiled with line information, which changes nothing that is told here.
        tuned: what was tuned for the kernels of a function in a bucket of T, see `Specialize`.

    Raises:
        InputError: a negative number of tokens, or a share that is none.
    """
    if tokens < 0:
        raise InputError(f"tokens must be 0 or more, found {tokens}")
    if not 0.0 <= live <= 1.0:
        raise InputError(f"live is the share of picks that are here, from 0 to 1, found {live}")
    rows = round(live * tokens * picks_of(program))
    said = list(notes)
    directions = [
        _direction(name, executable, target, card, tokens, rows, times or {}, said, lineinfo)
        for name, executable in executables(program, target, tokens, training=training, tuned=tuned)
    ]
    memory = memory_of(program, target.name, tokens)
    return Explanation(
        program.function.name, target.name, card, tokens, rows, tuple(directions), memory, tuple(dict.fromkeys(said))
    )


def picks_of(program: Program) -> int:
    """K of a layer that has slots, else 0."""
    found = [op for op in program.function.body.ops if isinstance(op, slot.Dispatch)]
    if found:
        return sum(op.top_k for op in found)
    gathers = [op for op in program.function.body.ops if isinstance(op, slot.Gather | slot.Combine)]
    return max((op.check_slots(op.slots) for op in gathers), default=0)


def executables(
    program: Program, target: Target, tokens: int, *, training: bool, tuned: Tuned = by_the_rule
) -> Iterator[tuple[str, Executable]]:
    """What a call with so many tokens launches: ``forward``, or ``training`` and ``backward``."""
    bucket = token_buckets.number_of(tokens, token_buckets.FEW_TOKENS)
    kinds: list[tuple[str, tuple[str, ...]]] = [("training" if training else "forward", ())]
    if training and program.backward_function(program.float_results) is not None:
        kinds.append(("backward", program.float_results))
    for kind, cotangents in kinds:
        points = tuned(kind, cotangents, bucket)
        rule = program.rule(kind, cotangents, target.name, bucket)
        yield kind, program.executable(kind, target.name, (), cotangents, rule, points)


def _direction(
    name: str,
    executable: Executable,
    target: Target,
    card: Card,
    tokens: int,
    rows: int,
    times: Times,
    notes: list[str],
    lineinfo: bool | None,
) -> Direction:
    plan = executable.plan
    launches = [op for op in executable.module.entry.body.ops if isinstance(op, Kernel)]
    used = side_by_side(lambda step: _resources(step.kernel, target, notes, lineinfo), plan.steps)
    blocks = {
        step.blocks_symbol: _blocks(step.kernel, target, card, resources, tokens)
        for step, resources in zip(plan.steps, used, strict=True)
        if step.blocks_symbol
    }
    extents = Extents(tokens, rows, 1 if any(i.type.leading == "N" for i in plan.inputs) else 0, blocks)
    costs = [cost_of(op, extents, step.kernel.addressed) for op, step in zip(launches, plan.steps, strict=True)]
    kernels = [
        _report(op, step.kernel, cost, target, card, resources, times.get(step.kernel.symbol))
        for op, step, cost, resources in zip(launches, plan.steps, costs, used, strict=True)
    ]
    moved = _moved_by_caller(plan, costs)
    flops_us = sum(_flops_us(cost, card) for cost in costs)
    return Direction(
        name,
        tuple(kernels),
        moved,
        max(1e6 * moved / card.bandwidth, flops_us),
        tuple(_between(plan, costs, card)),
    )


def _report(
    op: Kernel,
    kernel: GeneratedKernel,
    cost: Cost,
    target: Target,
    card: Card,
    resources: Resources | None,
    us: float | None,
) -> KernelReport:
    floor_us = _floor_us(cost, card)
    shared = kernel.shared_bytes + (0 if resources is None else resources.static_shared_bytes)
    blocks = occupancy = limit = None
    if resources is not None:
        limits = target.occupancy_limits(resources.registers, shared, kernel.threads)
        limit = min(limits, key=lambda name: limits[name])
        blocks = limits[limit]
        occupancy = blocks * -(-kernel.threads // WARP_THREADS) / target.max_warps_per_sm
    return KernelReport(
        symbol=kernel.symbol,
        template=op.template,
        configuration=tuple(op.config),
        bytes_read=cost.bytes_read,
        bytes_written=cost.bytes_written,
        product_flops=cost.product_flops,
        other_flops=cost.other_flops,
        floor_us=floor_us,
        limit="FLOPs" if 0.0 < floor_us == _flops_us(cost, card) else "bytes",
        threads=kernel.threads,
        cluster=kernel.cluster,
        shared_bytes=shared,
        resources=resources,
        blocks_per_sm=blocks,
        occupancy=occupancy,
        occupancy_limit=limit,
        early=op.early,
        us=us,
    )


def _floor_us(cost: Cost, card: Card, without: float = 0.0) -> float:
    return max(1e6 * (cost.bytes - without) / card.bandwidth, _flops_us(cost, card))


def _flops_us(cost: Cost, card: Card) -> float:
    return 1e6 * cost.product_flops / card.flops(cost.product_type) if cost.product_flops else 0.0


def _resources(kernel: GeneratedKernel, target: Target, notes: list[str], lineinfo: bool | None) -> Resources | None:
    try:
        return compiled_kernel(kernel, target, lineinfo=lineinfo).resources
    except ToolchainError as error:
        reason = str(error).splitlines()[0].partition(" (")[0]
        notes.append(f"no registers, spills or occupancy: {reason}; see moesaic doctor")
        return None


def _blocks(kernel: GeneratedKernel, target: Target, card: Card, resources: Resources | None, tokens: int) -> int:
    """Blocks of a launch that leaves a row of partial sums for each."""
    if kernel.grid == "fixed":
        return kernel.blocks
    covering = max(1, -(-tokens // max(1, kernel.rows_per_block)))
    if kernel.grid not in ("persistent", "device"):
        return covering
    shared = kernel.shared_bytes + (0 if resources is None else resources.static_shared_bytes)
    held = target.occupancy(0 if resources is None else resources.registers, shared, kernel.threads)
    return min(covering, card.multiprocessors * max(1, held))


def _moved_by_caller(plan: LaunchPlan, costs: Sequence[Cost]) -> float:
    """Bytes of inputs and results, each once: as much of an input as the kernel reads that reads most of it."""
    inputs: dict[int, float] = {}
    results: dict[int, float] = {}
    for step, cost in zip(plan.steps, costs, strict=True):
        for operand, size in cost.read.items():
            number = step.operands[operand]
            if number < len(plan.inputs):
                inputs[number] = max(inputs.get(number, 0.0), size)
        for operand, size in cost.written.items():
            number = step.operands[operand]
            if number < len(plan.inputs) or plan.buffers[number - len(plan.inputs)].is_result:
                results[number] = size
    return sum(inputs.values()) + sum(results.values())


def _between(plan: LaunchPlan, costs: Sequence[Cost], card: Card) -> list[Between]:
    found = []
    for number, buffer in enumerate(plan.buffers, start=len(plan.inputs)):
        if buffer.is_result:
            continue
        moved = us = 0.0
        writer, readers = "", []
        for step, cost in zip(plan.steps, costs, strict=True):
            read = sum(size for operand, size in cost.read.items() if step.operands[operand] == number)
            written = sum(size for operand, size in cost.written.items() if step.operands[operand] == number)
            if written:
                writer = step.kernel.symbol
            if read:
                readers.append(step.kernel.symbol)
            moved += read + written
            us += _floor_us(cost, card) - _floor_us(cost, card, without=read + written)
        name = buffer.name or str(number)
        found.append(Between(name, str(buffer.type), writer, tuple(readers), moved, us))
    return sorted(found, key=lambda b: (-b.us, -b.bytes))


# Printing -------------------------------------------------------------------------------------------------------------

_TOTALS = tuple(f"{d}: {w}" for d in ("forward", "training", "backward") for w in ("kernels", "layer"))


def _aligned(rows: Sequence[Sequence[str]], right: frozenset[int]) -> list[str]:
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        "  ".join(
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _ratio(floor: float, us: float | None) -> float | None:
    return None if not us else floor / us


def _bytes(value: float, unit: str = "MB") -> str:
    if unit == "KiB":
        return f"{value / 1024:.1f} KiB"
    return _scaled(value, ("B", "kB", "MB", "GB", "TB"))


def _flops(value: float) -> str:
    return "-" if not value else _scaled(value, ("", "k", "M", "G", "T", "P"))


def _scaled(value: float, units: Sequence[str]) -> str:
    for unit in units:
        if value < 999.5 or unit == units[-1]:
            return f"{value:.0f} {unit}".rstrip() if unit == units[0] else f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def _sum(values: Iterable[float | None]) -> float | None:
    total = 0.0
    for value in values:
        if value is None:
            return None
        total += value
    return total

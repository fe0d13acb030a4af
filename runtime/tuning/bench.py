"""One kernel of a layer, alone, on the operands that it has in a call of the layer.

A call is recorded once for each set of inputs: every kernel runs as the rule configures it, and its operands stay. Then
any candidate for any of the kernels can be run on them, in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from moesaic.codegen.kernel import GeneratedKernel
from moesaic.ir.core import Module
from moesaic.ir.ops.launch import Kernel
from moesaic.runtime.execute import Grid, Loaded, Prepared, Runner, Value
from moesaic.runtime.graph_timer import Bursts, Call, GraphTimer, Shared
from moesaic.runtime.plan import BufferSpec, Input, LaunchPlan, Step
from moesaic.runtime.program import Executable

Timers = Callable[[Call, int], Bursts]
"""Makes a timer of a call that goes round so many input sets."""

_SUM_TOLERANCE = 2e-5  # of the largest: sums over tokens follow the number of blocks

Tensors = Sequence[torch.Tensor]


def graph_timers() -> Timers:
    """Timers by CUDA graphs that share a stream and memory."""
    shared = Shared()
    return lambda call, sets: GraphTimer(call, sets, least_ms=0.3, shared=shared)


class Recording:
    """The kernels of an executable with their operands, for several sets of inputs.

    Args:
        executable: as the rule configures it.
        sets: the inputs of the function, one sequence a set.
        runner, device: what runs it.
        turn: what it runs in, see `Search`.
    """

    def __init__(
        self,
        executable: Executable,
        sets: Sequence[Tensors],
        runner: Runner,
        device: torch.device,
        turn: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.runner = runner
        self.device = device
        # No buffer takes over the memory of another: operands stay as they were.
        buffers = tuple(replace(b, slot=n) for n, b in enumerate(executable.plan.buffers))
        self.executable = replace(executable, plan=replace(executable.plan, buffers=buffers))
        self.ops = [op for op in executable.module.entry.body.ops if isinstance(op, Kernel)]
        seen = _Seen()
        loaded: list[Loaded] = [_Watched(runner.load(k, device), seen) for k in executable.kernels]
        prepared = Prepared(self.executable, loaded, runner, device)
        self.operands: list[list[torch.Tensor]] = []
        with turn():
            for inputs in sets:
                runner.enter(prepared, inputs, self.index)
                self.operands.append(list(seen.tensors))

    @property
    def index(self) -> int:
        """Of the device."""
        return -1 if self.device.index is None else self.device.index

    def bench(self, number: int, timers: Timers) -> KernelBench:
        """What runs candidates for the kernel of that number."""
        return KernelBench(self, number, timers)


class _Seen:
    tensors: Tensors = ()


class _Watched(Loaded):
    """A loaded kernel that says what the operands of the plan are."""

    def __init__(self, loaded: Loaded, seen: _Seen) -> None:
        self.most_blocks = loaded.most_blocks
        self._loaded = loaded
        self._seen = seen

    def launch(self, grid: Grid, stream: int, values: Sequence[Value], tensors: Tensors, read: frozenset[int]) -> None:
        self._seen.tensors = tensors
        self._loaded.launch(grid, stream, values, tensors, read)


class _Poisoning:
    """The runner, but fresh memory has all bits set: what a candidate leaves unwritten is the same for all of them."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def fresh(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        tensor = self._runner.fresh(shape, dtype, device)
        tensor.view(-1).view(torch.uint8).fill_(0xFF)
        return tensor

    def order_of(self, plan: LaunchPlan) -> Sequence[int]:
        return self._runner.order_of(plan)


class KernelBench:
    """A `search.Bench` on a `Recording`."""

    def __init__(self, recording: Recording, number: int, timers: Timers) -> None:
        self._recording = recording
        self._timers = timers
        self._op = recording.ops[number]
        self._plan, kept = _plan_of(recording.executable.plan, number, self._op)
        self._sets = [[operands[n] for n in kept] for operands in recording.operands]
        self._expected: list[torch.Tensor] | None = None
        self._last: tuple[GeneratedKernel, Loaded] | None = None

    def check(self, kernel: GeneratedKernel) -> str:
        """The first kernel that is checked is the one that the others are held against."""
        results = self._run(self._prepared(kernel, poisoned=True), 0)
        if self._recording.device.type == "cuda":
            torch.cuda.synchronize(self._recording.device)
        if self._expected is None:
            self._expected = results
            return ""
        for buffer, found, expected in zip(self._plan.buffers, results, self._expected, strict=True):
            problem = _differs(buffer, found, expected)
            if problem:
                return problem
        return ""

    def timer(self, kernel: GeneratedKernel) -> Bursts:
        """Goes round the sets."""
        prepared = self._prepared(kernel, poisoned=False)
        return self._timers(lambda i: self._run(prepared, i), len(self._sets))

    def _prepared(self, kernel: GeneratedKernel, *, poisoned: bool) -> Prepared:
        recording = self._recording
        [step] = self._plan.steps
        plan = replace(self._plan, steps=(replace(step, kernel=kernel),))
        executable = Executable(plan, recording.executable.target, (kernel,), Module([]))
        runner: Any = _Poisoning(recording.runner) if poisoned else recording.runner
        if self._last is None or self._last[0] is not kernel:  # it is checked, then timed
            self._last = (kernel, recording.runner.load(kernel, recording.device))
        return Prepared(executable, [self._last[1]], runner, recording.device)

    def _run(self, prepared: Prepared, number: int) -> list[torch.Tensor]:
        return self._recording.runner.enter(prepared, self._sets[number], self._recording.index)


def _plan_of(plan: LaunchPlan, number: int, op: Kernel) -> tuple[LaunchPlan, list[int]]:
    """The plan of one step alone, and which operands of the whole plan are its inputs: those that the step reads are
    inputs after those of the function, and so is a count of items, which is 0 before and after; what it writes are its
    results."""
    step = plan.steps[number]
    inputs = len(plan.inputs)
    counts = [] if op.counter is None else [step.operands[op.counter]]
    read = sorted({n for n in [*step.operands[: op.reads], *counts] if n >= inputs})
    written = [n for n in step.operands[op.reads :] if n not in counts]
    kept = [*range(inputs), *read]
    places = {n: place for place, n in enumerate([*kept, *written])}
    specs = [plan.buffers[n - inputs] for n in read]
    made = [plan.buffers[n - inputs] for n in written]
    return LaunchPlan(
        name=plan.name,
        inputs=(*plan.inputs, *(Input(s.name, s.type, True) for s in specs)),
        buffers=tuple(replace(b, is_result=True, slot=n) for n, b in enumerate(made)),
        steps=(Step(step.kernel, tuple(places[n] for n in step.operands), step.blocks_symbol, after=0),),
        results=tuple(places[n] for n in written),
        result_names=tuple(b.name for b in made),
        slots=plan.slots,
        written=frozenset(),
    ), kept


def _differs(buffer: BufferSpec, found: torch.Tensor, expected: torch.Tensor) -> str:
    """How results differ from those expected: in any bit, or, where each block has a row of its own, in their sum."""
    name = buffer.name or "a result"
    if buffer.type.leading != "B":
        if found.shape != expected.shape:
            return f"{name} has the shape {list(found.shape)}, not {list(expected.shape)}"
        bytes_found, bytes_expected = (t.contiguous().view(-1).view(torch.uint8) for t in (found, expected))
        if torch.equal(bytes_found, bytes_expected):
            return ""
        return f"{name} differs in {int((bytes_found != bytes_expected).sum())} of {bytes_found.numel()} bytes"
    a, b = (t.double().sum(0) for t in (found, expected))
    largest = float(b.abs().nan_to_num(0.0, 0.0, 0.0).max()) if b.numel() else 0.0
    allowed = _SUM_TOLERANCE * largest if buffer.type.dtype.is_float else 0.0
    off = torch.where(a.isnan() & b.isnan() | (a == b), 0.0, (a - b).abs().nan_to_num(float("inf")))
    error = float(off.max()) if off.numel() else 0.0
    return "" if error <= allowed else f"the sums of {name} differ by {error:.3g}, of {largest:.3g}"

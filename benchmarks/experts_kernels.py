"""The launches of a layer of experts, one by one: recorded in a call, and made again on the same operands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from experts_bounds import Cost, Load, kernel_cost
from experts_cases import Case, Inputs, Matrices
from torch import Tensor

from moesaic.codegen.generate import generate_kernels
from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.target import Target
from moesaic.ir.core import Module, Op
from moesaic.ir.ops.launch import Kernel
from moesaic.passes.begin_early import begin_in_turn
from moesaic.runtime import driver, token_buckets
from moesaic.runtime.execute import RUNNERS, Grid, Loaded, Prepared, Runner, Value, alignments
from moesaic.runtime.plan import LaunchPlan, build_plan
from moesaic.runtime.program import Executable

KINDS = ("forward", "training", "backward")
"""Inference, the forward function of training, and its backward."""


@dataclass(frozen=True)
class Launch:
    """One kernel of one of `KINDS`."""

    kind: str
    name: str
    op: Kernel
    kernel: GeneratedKernel

    @property
    def is_metadata(self) -> bool:
        return self.op.template.startswith("dispatch")

    @property
    def tile(self) -> str:
        """How the kernel is configured, short."""
        chosen = self.op.configuration
        if "tile" not in chosen:
            return f"{self.kernel.threads} threads"
        sizes = "x".join(chosen[n] for n in ("rows", "columns", "depth"))
        return f"{chosen['tile'].removesuffix('Tile').lower()} {sizes}, {chosen['stages']} stages"

    def cost(self, load: Load) -> Cost:
        """What it needs at least."""
        return kernel_cost(self.op, self.kernel, load)


def executable_of(
    case: Case, kind: str, target: Target, alignment: Sequence[int] = (), tokens: int | None = None
) -> Executable:
    """As the layer asks for it; for aligned inputs and many tokens if nothing else is said."""
    cotangents = case.program.float_results if kind == "backward" else ()
    bucket = token_buckets.COUNT - 1 if tokens is None else token_buckets.number_of(tokens, Runner.few_tokens)
    rule = case.program.rule(kind, cotangents, target.name, bucket)
    return case.program.executable(kind, target.name, tuple(alignment), cotangents, rule)


def launches_of(kind: str, executable: Executable) -> list[Launch]:
    """The launch list of a function."""
    ops: list[Op] = list(executable.module.entry.body.ops)
    kernels = [op for op in ops if isinstance(op, Kernel)]
    prefix = executable.plan.name + "_"
    return [
        Launch(kind, kernel.symbol.removeprefix(prefix), op, kernel)
        for op, kernel in zip(kernels, executable.kernels, strict=True)
    ]


def distinct_launches(case: Case, target: Target, tokens: int | None = None) -> list[Launch]:
    """Of all kinds; one of training that inference has, too, is left out."""
    found: list[Launch] = []
    for kind in KINDS:
        found += _new(found, launches_of(kind, executable_of(case, kind, target, tokens=tokens)))
    return found


def _new(known: Sequence[Launch], found: Sequence[Launch]) -> list[Launch]:
    sources = {launch.kernel.source for launch in known}
    return [launch for launch in found if launch.kernel.source not in sources]


class Recorded(Loaded):
    """A loaded kernel that remembers its last launch."""

    def __init__(self, loaded: Loaded) -> None:
        self.most_blocks = loaded.most_blocks
        self._loaded = loaded
        self._last: tuple[Grid, Sequence[Value], Sequence[Tensor], frozenset[int]] | None = None

    def launch(
        self, grid: Grid, stream: int, values: Sequence[Value], tensors: Sequence[Tensor], read: frozenset[int]
    ) -> None:
        self._last = (grid, list(values), list(tensors), read)
        self._loaded.launch(grid, stream, values, tensors, read)

    @property
    def launched(self) -> bool:
        return self._last is not None

    def again(self) -> None:
        """The same launch, on torch's current stream."""
        assert self._last is not None
        grid, values, tensors, read = self._last
        index = tensors[0].get_device()
        with _on(index) as stream:
            self._loaded.launch(grid, stream, values, tensors, read)


@contextmanager
def _on(index: int) -> Iterator[int]:
    if index < 0:
        yield 0
    else:
        with driver.current(index):
            yield torch._C._cuda_getCurrentRawStream(index)


def record(case: Case, given: Inputs, matrices: Matrices, backend: str) -> list[tuple[Launch, Recorded]]:
    """Runs inference, training and backward once; gives what `distinct_launches` gives, ready to be launched again.

    No buffer takes over the memory of another, so that every launch finds its operands as they were, in any order.
    """
    runner, device = RUNNERS[backend], given.x.device
    device = runner.place(device)
    known: dict[str, Tensor] = {
        "x": given.x.detach(),
        "indices": given.indices,
        "weights": given.weights.detach(),
        "gate_up_proj": matrices.gate_up.detach(),
        "down_proj": matrices.down.detach(),
        "d_hidden": given.cotangent,
    }
    found: list[tuple[Launch, Recorded]] = []
    for kind in KINDS:
        plan = executable_of(case, kind, runner.target(device)).plan
        inputs = [known[declared.name] for declared in plan.inputs]
        executable = executable_of(case, kind, runner.target(device), alignments(inputs), given.x.shape[0])
        executable = in_turn(executable)
        executable = replace(executable, plan=_without_reuse(executable.plan))
        loaded = [Recorded(runner.load(kernel, device)) for kernel in executable.kernels]
        prepared = Prepared(executable, loaded, runner, device)
        results = runner.enter(prepared, inputs, -1 if device.index is None else device.index)
        known |= dict(zip(executable.plan.result_names, results, strict=True))
        launches = launches_of(kind, executable)
        new = _new([launch for launch, _ in found], launches)
        found += [(launch, one) for launch, one in zip(launches, loaded, strict=True) if launch in new and one.launched]
    return found


def in_turn(executable: Executable) -> Executable:
    """The same, but each kernel waits for the one before: launched behind itself, it would begin beside itself."""
    module = Module([executable.module.entry.clone()])
    begin_in_turn(module.entry)
    kernels = generate_kernels(module.entry)
    return replace(executable, plan=build_plan(module.entry, kernels), kernels=tuple(kernels), module=module)


def _without_reuse(plan: LaunchPlan) -> LaunchPlan:
    return replace(plan, buffers=tuple(replace(b, slot=n) for n, b in enumerate(plan.buffers)))

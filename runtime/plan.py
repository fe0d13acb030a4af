"""A launch plan: what to allocate and what to launch, in order. Knows addresses, shapes and counts, not torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.codegen.kernel import GeneratedKernel
from moesaic.ir.core import Constant, Function, Value
from moesaic.ir.errors import InternalError, UnsupportedError
from moesaic.ir.ops.launch import Alloc, Kernel
from moesaic.ir.types import TensorType
from moesaic.passes.begin_early import ended_before


@dataclass(frozen=True)
class Input:
    """An input the caller passes; `read` is false where no kernel looks at it."""

    name: str
    type: TensorType
    read: bool


@dataclass(frozen=True)
class BufferSpec:
    """A buffer the plan needs: handed out as a result, or a slot of the workspace."""

    name: str
    type: TensorType
    is_result: bool
    slot: int


@dataclass(frozen=True)
class Step:
    """One launch.

    Attributes:
        kernel: what is launched.
        operands: numbers into inputs followed by buffers.
        blocks_symbol: symbol that stands for the number of blocks, if any does.
        after: how many of the steps have ended before it touches memory: all before it, unless it begins early.
    """

    kernel: GeneratedKernel
    operands: tuple[int, ...]
    blocks_symbol: str
    after: int


@dataclass(frozen=True)
class LaunchPlan:
    """A function as buffers and launches.

    Attributes:
        name: of the function.
        inputs: what the caller passes, in order.
        buffers: what is allocated, numbered after the inputs.
        steps: launches, in order.
        results: numbers of the function's results.
        result_names: their names.
        slots: a and b of M = a T + b, where the plan makes slots of its own.
        written: numbers of the inputs that are written.
    """

    name: str
    inputs: tuple[Input, ...]
    buffers: tuple[BufferSpec, ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]
    result_names: tuple[str, ...]
    slots: tuple[int, int] | None = None
    written: frozenset[int] = frozenset()

    @property
    def earliest(self) -> list[int]:
        """Numbers of the steps in the order in which each comes as early as it may."""
        return sorted(range(len(self.steps)), key=lambda n: (self.steps[n].after, self.steps[n].after == n, n))


def made_slots(function: Function) -> tuple[int, int] | None:
    """a and b of M = a T + b, where a planned function makes slots of its own."""
    for op in function.body.ops:
        if isinstance(op, Kernel) and "slots_per_token" in op.known:
            return int(op.known["slots_per_token"]), int(op.known["more_slots"])
    return None


def build_plan(function: Function, kernels: Sequence[GeneratedKernel]) -> LaunchPlan:
    """The plan of a planned and specialised function, given the kernels generated from it, in order."""
    numbers: dict[Value, int] = {a: i for i, a in enumerate(function.arguments)}
    read = {v for op in function.body.ops for v in op.operands}
    inputs = tuple(Input(a.name, a.type, a in read) for a in function.arguments)
    buffers: list[BufferSpec] = []
    steps: list[Step] = []
    launches = [op for op in function.body.ops if isinstance(op, Kernel)]
    ended = iter(ended_before(launches))
    generated = iter(kernels)
    for op in function.body.ops[:-1]:
        if isinstance(op, Alloc):
            numbers[op.results[0]] = len(inputs) + len(buffers)
            buffers.append(BufferSpec(op.results[0].name, op.results[0].type, op.space == "result", op.slot))
        elif isinstance(op, Kernel):
            steps.append(Step(next(generated), tuple(numbers[v] for v in op.operands), op.blocks, next(ended)))
        else:
            raise InternalError(f"@{function.name} is not planned: {op.summary()}")
    for value in function.returned:
        if isinstance(value, Constant):
            raise UnsupportedError(
                f"@{function.name} returns the constant {value.value}, which no kernel makes; return what is computed "
                "from an input, or take the constant out of the results"
            )
    return LaunchPlan(
        function.name,
        inputs,
        tuple(buffers),
        tuple(steps),
        tuple(numbers[v] for v in function.returned),
        tuple(function.result_names),
        made_slots(function),
        frozenset(numbers[v] for op in launches for v in op.written if numbers[v] < len(inputs)),
    )

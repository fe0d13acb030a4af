"""What a call of a layer allocates, from its plans alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from moesaic.runtime.plan import LaunchPlan
from moesaic.runtime.program import Program


class Memory(NamedTuple):
    """Bytes.

    Attributes:
        results: what forward gives the caller.
        saved: what forward in training keeps for backward besides inputs and results.
        workspace: what forward in training needs while it runs, and is free afterwards.
        gradients: what backward gives.
        backward_workspace: what backward needs while it runs.
    """

    results: int
    saved: int
    workspace: int
    gradients: int
    backward_workspace: int


def memory_of(program: Program, target: str, tokens: int) -> Memory:
    """What calls with so many tokens allocate; sums over tokens with few blocks, as of a small GPU, are left out."""
    forward = program.executable("training", target, ()).plan
    declared = set(program.function.result_names)
    symbols = _symbols(forward, tokens)
    results = saved = 0
    for name, number in zip(forward.result_names, forward.results, strict=True):
        if number >= len(forward.inputs):
            size = _bytes(forward, number - len(forward.inputs), symbols)
            results, saved = (results + size, saved) if name in declared else (results, saved + size)
    if program.backward_function(program.float_results) is None:
        return Memory(results, saved, _workspace(forward, symbols), 0, 0)
    backward = program.executable("backward", target, (), program.float_results).plan
    gradients = sum(
        _bytes(backward, n - len(backward.inputs), symbols) for n in backward.results if n >= len(backward.inputs)
    )
    return Memory(results, saved, _workspace(forward, symbols), gradients, _workspace(backward, symbols))


def _symbols(plan: LaunchPlan, tokens: int) -> Mapping[str, int]:
    symbols = {"T": tokens}
    if plan.slots is not None:
        symbols["M"] = plan.slots[0] * tokens + plan.slots[1]
    for step in plan.steps:
        if step.blocks_symbol:
            rows = step.kernel.rows_per_block
            symbols[step.blocks_symbol] = max(1, -(-tokens // rows)) if step.kernel.grid == "cover" else 0
    return symbols


def _bytes(plan: LaunchPlan, number: int, symbols: Mapping[str, int]) -> int:
    type = plan.buffers[number].type
    known = {name: 0 for dim in type.shape if not isinstance(dim, int) for name, _ in dim.terms} | dict(symbols)
    return type.elements(known) * type.dtype.bytes


def _workspace(plan: LaunchPlan, symbols: Mapping[str, int]) -> int:
    slots: dict[int, int] = {}
    for number, buffer in enumerate(plan.buffers):
        if not buffer.is_result:
            slots[buffer.slot] = max(slots.get(buffer.slot, 0), _bytes(plan, number, symbols))
    return sum(slots.values())

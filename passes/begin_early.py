"""Products that need nothing of the kernels right before them begin beside these, and wait for them at their end.

The last round of a product leaves multiprocessors without a tile (13.1 rounds keep them busy for 14), and those are
free to take the next product's, unless it has to wait for this one. Two gradients of one layer do not.
"""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.ir.core import Function, OpResult, Value
from moesaic.ir.ops.launch import Alloc, Kernel

_LONG = ("product", "wgrad")  # templates that take rounds of tiles, which is what there is to fill up

_Place = int | Value  # a slot of the workspace; an input or a result has memory of its own


def begin_early(function: Function) -> None:
    """Marks the products of a planned function that may begin early, in order.

    Kernel k begins once all blocks of k - 1 have. If k - 1 waited for its turn then, all kernels before it had ended,
    their results can be read, and k only has to leave alone what k - 1 touches. If k - 1 began early, what had ended
    when it did is all there is to know. Whoever waits for k waits for k - 1, too, for which k waits at its end.
    """
    kernels = [op for op in function.body.ops if isinstance(op, Kernel)]
    for number, op in enumerate(kernels):
        ended = _ended_at_begin(kernels, number)
        beside = kernels[max(ended, 0) : number]
        op.attributes.pop("early", None)
        if op.template in _LONG and ended >= 0 and not any(_meet(op, other) for other in beside):
            op.attributes["early"] = True


def begin_in_turn(function: Function) -> None:
    """Takes the marks away, for kernels that are run one by one: behind itself, one would count and write what the
    launch before still does."""
    for op in function.body.ops:
        if isinstance(op, Kernel):
            op.attributes.pop("early", None)


def ended_before(kernels: Sequence[Kernel]) -> list[int]:
    """How many of the first kernels of a function have ended before each one touches memory."""
    return [_ended_at_begin(kernels, number) if op.early else number for number, op in enumerate(kernels)]


def _ended_at_begin(kernels: Sequence[Kernel], number: int) -> int:
    """How many of the first kernels have ended when a kernel's blocks begin; -1: what is before the first may run."""
    for before in range(number - 1, -1, -1):
        if not kernels[before].early and not _may_be_absent(kernels[before]):
            return before
    return -1


def _may_be_absent(op: Kernel) -> bool:
    """Whether a launch may have no blocks: a kernel with blocks for each sequence has none where there is none."""
    return any(value.type.leading == "N" for value in op.operands)


def _meet(a: Kernel, b: Kernel) -> bool:
    """Whether one writes where the other reads or writes."""
    written = _places(a.written), _places(b.written)
    return not (written[0].isdisjoint(_places(b.operands)) and written[1].isdisjoint(_places(a.operands)))


def _places(values: Sequence[Value]) -> set[_Place]:
    return {
        value.op.slot
        if isinstance(value, OpResult) and isinstance(value.op, Alloc) and value.op.space == "workspace"
        else value
        for value in values
    }

"""What tables know of a function's kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moesaic.ir.core import Function, Value
from moesaic.ir.ops.launch import Kernel
from moesaic.passes.begin_early import begin_in_turn
from moesaic.passes.kernel_key import KernelKey, picks_of
from moesaic.passes.space import Limits, Space, spaces_of
from moesaic.passes.specialize import Specialize, point_text
from moesaic.runtime.tuning.tables import Entry

_log = logging.getLogger("moesaic.tuner")


@dataclass(frozen=True)
class Tunable:
    """A kernel of a function that has something to choose.

    Attributes:
        number: among the kernels of the function.
        space: what there is to choose.
        key: what it is to tables.
    """

    number: int
    space: Space
    key: KernelKey


def tunables(
    function: Function, specialize: Specialize, limits: Limits, alignment: Sequence[int], tokens: str
) -> list[Tunable]:
    """The kernels of a planned function that have something to choose, for a bucket of T by its label: as the target
    launches them, one by one, so that it makes no difference whether the function is specialised already."""
    function = function.clone()
    specialize.rewrite(function, dict(zip(function.arguments, alignment, strict=False)))
    begin_in_turn(function)
    kernels = [op for op in function.body.ops if isinstance(op, Kernel)]
    aligned: dict[Value, int] = dict(zip(function.arguments, alignment, strict=False))
    picks = picks_of(function)
    numbers = {id(op): n for n, op in enumerate(kernels)}
    return [
        Tunable(numbers[id(space.op)], space, KernelKey.of(space, picks, tokens))
        for space in spaces_of(kernels, specialize, limits, aligned)
    ]


def points_for(found: Sequence[Tunable], find: Callable[[KernelKey], Entry | None]) -> tuple[str, ...]:
    """The option `points` of ``specialize``: what tables know, where it differs from the rule and is still valid."""
    points = []
    for one in found:
        entry = find(one.key)
        if entry is None or dict(entry.point) == dict(one.space.default):
            continue
        problem = one.space.problem(entry.point)
        if problem:
            _log.warning("what was tuned for %s is not used: %s", one.key, problem)
        else:
            points.append(point_text(one.space.op.symbol, entry.point))
            _log.info("%s: as tuned, %s", one.key, points[-1])
    return tuple(points)

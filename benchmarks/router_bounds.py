"""What a router must cost at least: bytes of device memory, instructions and shuffles.

Bytes a token, with E experts, K picks and s bytes a logit; each input is read once and each output written once::

    dense forward     E*s + E*s + E              logits in; probabilities and the 1-byte map out
    dense backward    2*E*s + E*s + 4*K          cotangents and logits in, gradient out; the picks in
    compact forward   E*s + 4*K + 4*K            logits in; float32 weights and int32 indices out
    compact backward  E*s + E*s + 4*K + 4*K      logits in, gradient out; cotangents and indices in

The picks that a dense forward keeps for backward (4*K more, written) and inputs of [E] are not counted.

Instructions and shuffles come from the fused ops of the kernels as they are configured: L lanes share a token, a lane
holds S slots of its row, 32/L tokens share a warp. What a lane executes for its token counts L/32 warp instructions a
token. With l = log2(L), and a key of one word (bf16 and fp16 logits that are ranked themselves) or two (float32)::

                       instructions of a lane                                                shuffles of a lane
    top-k by merging   sorting, merging and exchanging lists (merging_instructions)          one a value exchanged
    top-k by rounds    K * (S*r + l*m), and the shuffles                                     K * l * words
    top-k by sorting   S/2 * D*(D+1)/2 * (4+c), D = log2(S*L)                                none
    keys               2.5 or 4 a slot
    groups in lanes    what ranks a lane's groups among all: 2 a pair                        all groups, and the best
    groups elsewhere   4 + b*c for each value of a group of the lane, then `keep` rounds     keep * l * 2
    sum, maximum       1 a slot + l (half as much for the maximum of stored 16 bits)         l
    membership         1 a slot; from indices alone 4*K more, and the shuffles               K from indices alone
    gather, scatter    1 a slot that goes through shared memory; 1 a chunk where only written
    elementwise ops    1 a slot (a division or an exponential is several)

    one word:  c = 2 (a compare-exchange), m = 1 (a maximum), r = 3 (a step of a round)
    two words: c = 6,                      m = 4,             r = 6

A multiprocessor issues 4 warp instructions a clock and 1 warp-wide shuffle a clock. Loads, stores, conversions,
addresses and the long elementwise ops are left out or undercounted: these are estimates from below for this
configuration, and the real number of instructions is larger (``--resources`` counts what ptxas emitted).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from timing import Machine

from moesaic.ir.core import BlockArgument, Op, OpResult, Value
from moesaic.ir.ops import math, row
from moesaic.ir.ops.launch import Kernel
from moesaic.ir.types import DType
from moesaic.passes.row_layout import Layout, experts_columns, infer_layouts, sparse_results
from moesaic.passes.selection_shape import merging_instructions, merging_shuffles

ISSUES_PER_CLOCK = 4
SHUFFLES_PER_CLOCK = 1


@dataclass(frozen=True)
class Work:
    """Warp instructions (shuffles included) and warp-wide shuffles of one token."""

    instructions: float = 0.0
    shuffles: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.instructions + other.instructions, self.shuffles + other.shuffles)


@dataclass(frozen=True)
class Bounds:
    """Microseconds that each resource alone needs for all tokens."""

    bytes_per_token: float
    work: Work
    memory_us: float
    issue_us: float
    shuffle_us: float
    launch_us: float

    @property
    def us(self) -> float:
        """The largest of them."""
        return max(self.memory_us, self.issue_us, self.shuffle_us, self.launch_us)

    @property
    def limit(self) -> str:
        """Which one that is."""
        named = {
            "memory": self.memory_us,
            "issue": self.issue_us,
            "shuffle": self.shuffle_us,
            "launch": self.launch_us,
        }
        return max(named, key=lambda name: named[name])


def bytes_per_token(experts: int, picks: int, element_bytes: int, dense: bool) -> tuple[int, int]:
    """Forward and backward; see the module."""
    logits, pick = experts * element_bytes, 4 * picks
    if dense:
        return 2 * logits + experts, 3 * logits + pick
    return logits + 2 * pick, 2 * logits + 2 * pick


def bounds(machine: Machine, tokens: int, bytes_per_token: float, work: Work, launches: int) -> Bounds:
    """What the machine needs at least for `tokens`."""
    clocks = 1e-6 * machine.sms * machine.clock_hz  # of all multiprocessors in a microsecond
    return Bounds(
        bytes_per_token=bytes_per_token,
        work=work,
        memory_us=1e6 * tokens * bytes_per_token / machine.bandwidth,
        issue_us=tokens * work.instructions / (ISSUES_PER_CLOCK * clocks),
        shuffle_us=tokens * work.shuffles / (SHUFFLES_PER_CLOCK * clocks),
        launch_us=launches * machine.node_us,
    )


def total_work(kernels: Iterable[Kernel]) -> Work:
    """The work of several row programs on one token; other kernels count nothing."""
    total = Work()
    for kernel in kernels:
        if kernel.template == "row_program":
            total += _Counter(kernel).count()
    return total


class _Counter:
    """Counts one row program; see the module."""

    def __init__(self, kernel: Kernel) -> None:
        assert kernel.region is not None
        self._region = kernel.region
        self._layouts = infer_layouts(kernel.region)
        self._select = kernel.configuration.get("select", "")
        self._listed = int(kernel.configuration.get("listed", 0))
        self._groups = kernel.configuration.get("groups", "")
        self._sparse = set(sparse_results(kernel.region).values())
        self._lanes = int(kernel.configuration["lanes"])
        self._steps = _log2(self._lanes)
        self._vec = int(kernel.configuration["vec"])
        self._experts = experts_columns(self._layouts)
        self._experts_slots = -(-_power_of_two(-(-self._experts // self._vec)) // self._lanes) * self._vec

    def count(self) -> Work:
        lane = Work()
        for op in self._region.ops[:-1]:
            lane += self._lane(op)
        return Work(lane.instructions * self._lanes / 32, lane.shuffles * self._lanes / 32)

    def _lane(self, op: Op) -> Work:
        """What a lane does for one op."""
        if op in self._sparse:
            return Work(self._experts_slots / self._vec + 2 * self._slots(op.operands[-1]))
        if isinstance(op, math.Elementwise):
            return Work(self._slots(op.results[0]))
        if isinstance(op, row.TopK):
            return self._top_k(op)
        if isinstance(op, row.GroupLimit):
            return self._group_limit(op)
        if isinstance(op, row.Sum | row.Max):
            return Work(self._slots(op.operands[0]) + 2 * self._steps, self._steps)
        if isinstance(op, row.Membership):
            if isinstance(op.indices, OpResult) and isinstance(op.indices.op, row.TopK):
                return Work(self._experts_slots)
            picks = self._layouts[op.indices].columns
            return Work(self._experts_slots + 5 * picks, picks)
        if isinstance(op, row.Gather):
            staged = 0 if isinstance(op.x, BlockArgument) else self._experts_slots
            return Work(staged + self._slots(op.y))
        if isinstance(op, row.Scatter):
            return Work(self._experts_slots + 2 * self._slots(op.indices))
        return Work()

    def _top_k(self, op: row.TopK) -> Work:
        # Values of 16 bits rank with their column in one word.
        short = isinstance(op.x, BlockArgument) and op.x.type.dtype in (DType.BF16, DType.F16)
        words, exchange, maximum, step = (1, 2, 1, 3) if short else (2, 6, 4, 6)
        slots, steps = self._experts_slots, self._steps
        keys = (2.5 if short else 4) * slots
        if self._select == "merge":
            listed = min(self._listed, _power_of_two(op.k))
            return Work(
                keys + merging_instructions(listed, op.k, slots, self._lanes),
                merging_shuffles(listed, op.k, self._lanes),
            )
        if self._select == "rounds":
            shuffles = op.k * steps * words
            return Work(keys + op.k * (slots * step + steps * maximum) + shuffles, shuffles)
        depth = _log2(slots * self._lanes)
        return Work(keys + slots / 2 * depth * (depth + 1) / 2 * (4 + exchange))

    def _group_limit(self, op: row.GroupLimit) -> Work:
        if self._groups == "lanes":
            own = self._experts_slots // self._vec
            shuffles = op.groups + own * op.best * _log2(self._experts // op.groups // self._vec)
            return Work(2 * own * op.groups + 3 * shuffles, shuffles)
        groups = -(-_power_of_two(op.groups) // self._lanes)
        members = groups * (self._experts // op.groups)
        shuffles = op.keep * self._steps * 2
        scoring = members * (4 + 6 * op.best)
        rounds = op.keep * (6 * groups + 4 * self._steps)
        return Work(2 * self._experts_slots + scoring + rounds + shuffles, shuffles)

    def _slots(self, value: Value) -> int:
        layout = self._layouts.get(value, Layout("scalar"))
        if layout.kind == "experts":
            return self._experts_slots
        return -(-_power_of_two(layout.columns) // self._lanes) if layout.kind == "picks" else 1


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _log2(n: int) -> int:
    return n.bit_length() - 1

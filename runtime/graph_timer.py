"""Times calls on a GPU: replays of CUDA graphs over rotating inputs.

A call is captured many times in one graph, each time on another input set, and the graph is replayed between pairs of
events. So neither the host nor the gaps between launches from it are in the numbers, and inputs and outputs together
are larger than the L2 cache wherever the number of sets allows it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Call = Callable[[int], object]
"""Does the work on input set `i` and returns every tensor it makes, so that these stay distinct between sets."""

MOST_SETS = 128
"""Input sets of one measurement; tiny inputs stay in the L2 cache even so, as they do behind a gate product."""

SETTLE_MS = 60.0
"""After which a card at its limit of power has the clock that a call keeps: an H200 takes some 50 ms to lower it."""

_MOST_CALLS = 2048  # nodes cost host memory and time to capture
_MOST_REPLAYS = 60
_WARM_UPS = 3


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median over replays, and how far the middle 80 % of them lie apart, relative."""

    us: float
    spread: float
    replays: int
    calls: int

    def __str__(self) -> str:
        return f"{self.us:.2f} us (± {100 * self.spread / 2:.1f} %)"


class Shared:
    """A stream and a pool of memory for graphs that are never replayed at the same time.

    What a call makes and drops lies where the other graphs' calls have theirs; what it returns does not.
    """

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        # A pool that no graph uses any more takes no other: this one stays while timers capture theirs again.
        self._holder = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._holder, pool=self.pool, stream=self.stream):
            self._held = torch.zeros(1, device="cuda")


class GraphTimer:
    """A call captured in a CUDA graph, ready to be timed as often as one likes.

    Everything the call compiles or loads is compiled and loaded by warm-up calls before the capture, on the stream
    that captures.

    Args:
        call: see `Call`; it must neither synchronise nor change between calls.
        sets: how many input sets to go round.
        least_ms: a replay shall take at least this long; the rounds over the sets are repeated until it does.
        shared: what timers that exist at once and are replayed in turn have in common, see `Shared`.
    """

    def __init__(self, call: Call, sets: int = 1, least_ms: float = 1.0, shared: Shared | None = None) -> None:
        self._call = call
        self._sets = sets
        self._pool = None if shared is None else shared.pool
        self._stream = torch.cuda.Stream() if shared is None else shared.stream
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for i in range(_WARM_UPS):
                call(i % sets)
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        self._rounds = 1
        self._kept: list[object] = []
        self._last_ms = 1.0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._graph = self._capture()
        for _ in range(3):
            ms = self._replay_ms()
            more = min(math.ceil(1.1 * least_ms / ms), max(1, _MOST_CALLS // (self._rounds * sets)))
            if more <= 1:
                break
            self._rounds *= more
            self._graph = self._capture()

    @property
    def calls(self) -> int:
        """Calls in one replay."""
        return self._rounds * self._sets

    def _capture(self) -> torch.cuda.CUDAGraph:
        # What the graph made before goes first, or the two would need memory at once. The last results of each set
        # are kept during the capture: freed, their memory would serve the next call and stay in the cache.
        self._graph = None
        self._kept = [None] * self._sets
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            for n in range(self.calls):
                self._kept[n % self._sets] = self._call(n % self._sets)
        graph.replay()
        torch.cuda.synchronize()
        return graph

    @property
    def results(self) -> Sequence[object]:
        """What the call returned for each set; the memory holds what the last replay wrote."""
        return self._kept

    def replay(self, seconds: float) -> None:
        """Enqueues replays that take about that long, and does not wait for them."""
        for _ in range(max(1, int(1e3 * seconds / self._replay_ms()))):
            assert self._graph is not None
            self._graph.replay()

    @property
    def replay_ms(self) -> float:
        """About how long a replay takes."""
        return self._last_ms

    def burst(self, ms: float) -> list[float]:
        """Microseconds a call of replays that follow one another and together take about `ms`; at least one."""
        times = self._events(max(1, min(_MOST_REPLAYS, round(ms / self._last_ms))))
        self._last_ms = max(statistics.median(times), 1e-3)
        return [1e3 * t / self.calls for t in times]

    def _replay_ms(self) -> float:
        """The shorter of two replays."""
        self._last_ms = max(min(self._events(2)), 1e-3)
        return self._last_ms

    def _events(self, replays: int) -> list[float]:
        assert self._graph is not None
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
        self._graph.replay()  # the host gets ahead of the GPU, so that its launches lie in no interval
        for start, end in pairs:
            start.record()
            self._graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]

    def sample(self, target_ms: float = 30.0) -> list[float]:
        """Microseconds a call of several replays that together take about `target_ms`."""
        replays = int(min(60, max(7, target_ms / self._replay_ms())))
        return [1e3 * ms / self.calls for ms in self._events(replays)]

    def time(self, target_ms: float = 30.0) -> Timing:
        """The median over the replays of about `target_ms`."""
        return summary(self.sample(target_ms), self.calls)


def summary(samples: Sequence[float], calls: int) -> Timing:
    """Median and spread of samples in microseconds a call."""
    ordered = sorted(samples)
    cut = len(ordered) // 10
    middle = ordered[cut : len(ordered) - cut]
    median = statistics.median(ordered)
    return Timing(median, (middle[-1] - middle[0]) / median, len(ordered), calls)


class Bursts(Protocol):
    """What can be timed in turn with others: a `GraphTimer`, or what a test puts in its place."""

    @property
    def calls(self) -> int: ...

    @property
    def replay_ms(self) -> float: ...

    def burst(self, ms: float) -> list[float]: ...


def in_turn(
    timers: Mapping[str, Bursts], ms: float, rounds: int = 5, least_rounds: int = 3, settle_ms: float = SETTLE_MS
) -> dict[str, Timing]:
    """Times all of them in short bursts, one after the other, so that what a card does meanwhile is the same for each.

    Each begins with replays that are not counted: else the numbers would say who came before. Behind a product that
    draws all the power there is, a call has a lower clock at first than it keeps by itself, and a higher one behind
    what waits for memory.

    Args:
        ms: of replays for each of them, in all rounds together. A replay that takes longer than that is timed
            `least_rounds` times.
        rounds: how often each has its turn.
        settle_ms: of replays that are not counted, in each round.
    """
    longest = max((timer.replay_ms for timer in timers.values()), default=0.0)
    turns = max(least_rounds, min(rounds, int(rounds * ms / max(longest, 1e-3))))
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(turns):
        for name, timer in timers.items():
            if settle_ms > 0.0:
                timer.burst(settle_ms)
            samples[name] += timer.burst(ms / turns)
    return {name: summary(found, timers[name].calls) for name, found in samples.items()}


def sets_for(bytes_per_set: float, l2_bytes: int) -> tuple[int, bool]:
    """How many input sets exceed the L2 cache twice, at most `MOST_SETS`; and whether they do exceed it."""
    sets = max(2, min(MOST_SETS, math.ceil(2 * l2_bytes / max(bytes_per_set, 1))))
    return sets, sets * bytes_per_set > 1.5 * l2_bytes

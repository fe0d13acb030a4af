"""The search through one kernel's space: what is built, in which order, when it is given up, and what may win.

It knows neither GPUs nor compilers: both come as functions, so that its decisions can be tested without either.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

from moesaic.codegen.kernel import GeneratedKernel
from moesaic.passes.space import Point
from moesaic.runtime.graph_timer import Bursts, in_turn

TRIALS = 20
"""Candidates that are tried unless more are asked for."""

WORTH = 0.01
"""Of its time, by which another point has to be faster than the rule's to be chosen."""

_FIRST_MS = 1.5
_LONG_MS = 6.0
_LAST_MS = 30.0
_HOPELESS = 1.12  # times the best: no more time for it
_FINALISTS = 3
_NEAR = 1.04  # times the best: may turn out to be it
_KEPT_FOR_THE_END = 0.15  # of the time
_INFORMATIVE = 100  # trials after which the order matters no more
_CLOSENESS = 4.0  # how much less a trial says of a point, for each choice in which they differ
_DOUBT = 0.2  # of its time, by which a point is preferred of which trials say nothing
_NEW = 0.1  # of its time, by which a neighbour of the best is preferred if it has a value that was never tried


@dataclass(frozen=True)
class Built:
    """A candidate that compiled.

    Attributes:
        kernel: what it is.
        identity: equal for candidates that run alike: of their machine code and of how it is launched.
        spills: whether it keeps more than a few registers in local memory.
    """

    kernel: GeneratedKernel
    identity: str
    spills: bool = False


class Bench(Protocol):
    """Runs candidates of one kernel on tensors of the layer."""

    def check(self, kernel: GeneratedKernel) -> str:
        """What is wrong with its results; empty if they are the default's."""

    def timer(self, kernel: GeneratedKernel) -> Bursts:
        """Times it."""


Build = Callable[[Sequence[Point]], Sequence[Built | str]]
"""Builds candidates side by side; text says why one cannot be built."""


@dataclass(frozen=True)
class Trial:
    """What is known of a candidate.

    Attributes:
        point: what it is.
        estimate: microseconds by the cost model.
        us: microseconds measured, if it was timed.
        verdict: ``timed``; ``stopped``: slower than the best from the start; ``same``: as another one, so not timed
            again; ``spills``; ``refused: ...`` by the compiler; ``wrong: ...``; ``failed: ...`` as it ran; ``begun``,
            and never ended.
    """

    point: Point
    estimate: float
    us: float | None = None
    verdict: str = ""


@dataclass(frozen=True)
class Found:
    """What a search came to.

    Attributes:
        best: the point to use: the rule's, unless another is faster by more than `WORTH`.
        us, default_us: microseconds of it and of the rule's point, measured in turn.
        trials: all, in order.
        points: how many there are in the space.
        ended: why: ``all`` were tried, ``trials`` or ``time`` were used up.
    """

    best: Point
    us: float
    default_us: float
    trials: tuple[Trial, ...]
    points: int
    ended: str


@dataclass
class Search:
    """See the module.

    Attributes:
        candidates: points with their estimates; the rule's first, which always works.
        build, bench: see `Build` and `Bench`.
        most_trials: candidates that are built at most; 0 for all.
        seconds: that it may take; 0 for no limit.
        batch: candidates that are built at a time.
        stop_losers: whether candidates that are slow from the start, or spill, are given up.
        known: trials of a search that was cut off, by `key_of` their points. What had begun and never ended is not
            tried again.
        note: is told of each trial that begins and ends.
        turn: what a trial, and what is timed at the end, happens in: a card's times are of one process at a time.
        now: a clock, in seconds.
    """

    candidates: Sequence[tuple[Point, float]]
    build: Build
    bench: Bench
    most_trials: int = TRIALS
    seconds: float = 0.0
    batch: int = 4
    stop_losers: bool = True
    known: Mapping[str, Trial] = field(default_factory=dict)
    note: Callable[[Trial], None] = lambda trial: None
    turn: Callable[[], AbstractContextManager[None]] = nullcontext
    now: Callable[[], float] = time.monotonic

    def run(self) -> Found:
        """Raises what building, or running, the rule's own point raises."""
        start = self.now()
        self._trials: list[Trial] = []
        self._built: dict[str, Built] = {}
        self._identities: dict[str, Trial] = {}
        ended = self._try_all(start)
        best, us, default_us = self._final(start)
        return Found(best, us, default_us, tuple(self._trials), len(self.candidates), ended)

    # ------------------------------------------------------------------------------------------------- candidates

    def _try_all(self, start: float) -> str:
        left = list(self.candidates)
        first = True
        while left:
            if self.most_trials and self._tried() >= self.most_trials:
                return "trials"
            if self.seconds and not first and self.now() - start > self.seconds * (1 - _KEPT_FOR_THE_END):
                return "time"
            count = 1 if first else self.batch
            if self.most_trials:
                count = min(count, self.most_trials - self._tried())
            chosen = left[:1] if first else self._likeliest(left, count)
            left = [c for c in left if c not in chosen]
            # The rule's own is tried even if it is known: the others are held against its results.
            again = [(p, e) for p, e in chosen if key_of(p) in self.known and not first]
            fresh = [(p, e) for p, e in chosen if key_of(p) not in self.known or first]
            for point, estimate in again:
                self._remember(replace(self.known[key_of(point)], point=point, estimate=estimate))
            for (point, estimate), built in zip(fresh, self.build([p for p, _ in fresh]), strict=True):
                if self.seconds and not first and self.now() - start > self.seconds * (1 - _KEPT_FOR_THE_END):
                    return "time"
                with self.turn():
                    self._try(Trial(point, estimate), built, required=first)
            first = False
        return "all"

    def _tried(self) -> int:
        return sum(t.verdict != "same" for t in self._trials)

    def _likeliest(self, left: Sequence[tuple[Point, float]], count: int) -> list[tuple[Point, float]]:
        """Those with the least expected time: the estimate, corrected by what it was off at points nearby.

        Trials say little of points far from them, so that doubt counts, too: a point that is like none which was tried,
        or chosen in this batch, may be faster than expected, and teaches more. And an estimate that is wrong about one
        value of a parameter would keep the search from all points with it. So each value is tried early, in the one
        point that is otherwise like the best so far.
        """
        timed = [(t.point, t.us, math.log(t.us / t.estimate)) for t in self._trials if t.us is not None]

        if not self.most_trials or len(timed) > _INFORMATIVE:  # most will be tried anyway
            return list(left[:count])

        best, _, _ = min(timed, key=lambda t: t[1])
        expected: dict[int, float] = {}
        known: dict[int, float] = {}  # how much trials say of a point; one that differs in one choice says 1
        for number, (point, estimate) in enumerate(left):
            weights = [_CLOSENESS ** (1 - distance(point, other)) for other, _, _ in timed]
            off = sum(w * o for w, (_, _, o) in zip(weights, timed, strict=True)) / max(sum(weights), 1e-30)
            expected[number], known[number] = math.log(estimate) + off, sum(weights)
        seen = {value for t in self._trials for value in t.point.items()}
        near = {n for n in expected if distance(left[n][0], best) == 1}

        def hoped(number: int) -> float:
            new = number in near and not seen.issuperset(left[number][0].items())
            return expected[number] - _DOUBT / (1 + known[number]) - (_NEW if new else 0.0)

        chosen: list[tuple[Point, float]] = []
        while expected and len(chosen) < count:
            number = min(expected, key=hoped)
            del expected[number]
            point, _ = left[number]
            chosen.append(left[number])
            seen |= set(point.items())
            for other in expected:
                known[other] += _CLOSENESS ** (1 - distance(point, left[other][0]))
        return chosen

    def _try(self, trial: Trial, built: Built | str, *, required: bool) -> None:
        self.note(replace(trial, verdict="begun"))
        ended = self._tried_out(trial, built, required)
        self._remember(ended)
        self.note(ended)

    def _tried_out(self, trial: Trial, built: Built | str, required: bool) -> Trial:
        if isinstance(built, str):
            if required:
                raise RuntimeError(f"the kernel does not compile as it is: {built}")
            return replace(trial, verdict=f"refused: {built}")
        self._built[key_of(trial.point)] = built
        same = self._identities.get(built.identity)
        if same is not None:
            return replace(trial, us=same.us, verdict="same")
        if built.spills and self.stop_losers and not required and not self._default_spills():
            return replace(trial, verdict="spills")
        try:
            wrong = self.bench.check(built.kernel)
            if wrong:
                return replace(trial, verdict=f"wrong: {wrong}")
            ended = self._timed(trial, self.bench.timer(built.kernel))
        except Exception as error:  # whatever a candidate does wrong, the others are worth trying
            if required:
                raise
            return replace(trial, verdict=f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        self._identities[built.identity] = ended
        return ended

    def _timed(self, trial: Trial, timer: Bursts) -> Trial:
        best = self._best_us()
        samples = timer.burst(_FIRST_MS)
        if self.stop_losers and min(samples) > _HOPELESS * best:
            return replace(trial, us=statistics.median(samples), verdict="stopped")
        samples += timer.burst(_LONG_MS)
        return replace(trial, us=statistics.median(samples), verdict="timed")

    def _remember(self, trial: Trial) -> None:
        self._trials.append(trial)

    def _best_us(self) -> float:
        return min((t.us for t in self._trials if t.us is not None), default=math.inf)

    def _default_spills(self) -> bool:
        built = self._built.get(key_of(self.candidates[0][0]))
        return built is not None and built.spills

    # ------------------------------------------------------------------------------------------------- the end

    def _final(self, start: float) -> tuple[Point, float, float]:
        """The fastest few, and the rule's point, in turn: a card's clock drifts more than they differ."""
        default = self.candidates[0][0]
        timed = sorted((t for t in self._trials if t.verdict == "timed"), key=lambda t: t.us or 0.0)
        rule = next((t for t in self._trials if t.point == default and t.us is not None), None)
        if rule is None or rule.us is None:
            raise RuntimeError("the rule's own point could not be timed")
        near = [t for t in timed if (t.us or 0.0) <= _NEAR * self._best_us() and t.point != default][:_FINALISTS]
        if not near:
            return default, rule.us, rule.us
        entrants = {key_of(t.point): t.point for t in (rule, *near)}
        missing = [p for k, p in entrants.items() if k not in self._built]
        for point, built in zip(missing, self.build(missing) if missing else [], strict=True):
            if not isinstance(built, str):
                self._built[key_of(point)] = built
        late = self.seconds and self.now() - start > self.seconds
        if not late and all(k in self._built for k in entrants):
            with self.turn():
                timers = {k: self.bench.timer(self._built[k].kernel) for k in entrants}
                times = {k: t.us for k, t in in_turn(timers, _LAST_MS).items()}
        else:
            times = {key_of(t.point): t.us or math.inf for t in (rule, *near)}
        default_us = times[key_of(default)]
        winner = min(times, key=lambda k: times[k])
        if times[winner] > (1 - WORTH) * default_us:
            return default, default_us, default_us
        return entrants[winner], times[winner], default_us


def key_of(point: Point) -> str:
    """A point as text."""
    return ":".join(f"{name}={value}" for name, value in point.items())


def distance(a: Point, b: Point) -> int:
    """In how many choices two points differ."""
    return sum(a.get(n) != b.get(n) for n in a.keys() | b.keys())

"""Tunes the kernels of a function on the tensors of a call."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from moesaic.codegen.generate import generate_kernel
from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.target import Target
from moesaic.ir.errors import MoesaicError
from moesaic.ir.types import Affine
from moesaic.passes.card import Card
from moesaic.passes.cost import Extents
from moesaic.passes.cost_model import floor_us, ordered
from moesaic.passes.kernel_key import KernelKey
from moesaic.passes.space import Point, Space
from moesaic.passes.specialize import point_text
from moesaic.runtime import cache, locks, token_buckets
from moesaic.runtime.execute import Runner, alignments, tokens_of
from moesaic.runtime.graph_timer import sets_for
from moesaic.runtime.program import Program
from moesaic.runtime.tuning.bench import Recording, Timers, graph_timers
from moesaic.runtime.tuning.compilers import Compilers, workers_allowed
from moesaic.runtime.tuning.journal import Journal
from moesaic.runtime.tuning.lookup import Tunable, tunables
from moesaic.runtime.tuning.search import TRIALS, Built, Found, Search, Trial
from moesaic.runtime.tuning.tables import Entry, Tables

_log = logging.getLogger("moesaic.tuner")

_MOST_COPIED = 2**28  # bytes of one input that each set has of its own; larger ones are larger than any cache
_MOST_OF_SETS = 2**33  # bytes of all sets together
_L2_BYTES = 50 * 2**20  # where no GPU says


class Watch:
    """Is told how a search goes; a subclass shows it."""

    def begin(self, kernel: str, points: int, most_trials: int, seconds: float) -> None:
        """A kernel's search begins."""

    def searching(self, search: Search) -> None:
        """What is about to run."""

    def trial(self, trial: Trial) -> None:
        """A trial begins (its verdict is ``begun``), or has ended."""

    def end(self, tuned: Tuned) -> None:
        """A kernel's search has ended, or was not needed."""


@dataclass
class Settings:
    """How to search.

    Attributes:
        seconds: for all kernels of a function together; 0 for no limit.
        trials: candidates a kernel at most; 0 for all.
        workers: processes that compile; None: as the environment says.
        force: search also where a table has an answer.
        stop_losers: see `Search`.
        journal: where trials are noted, and known from.
        watch: is told of progress.
        timers: what times calls; None: CUDA graphs.
        kernels: names of those to tune; empty for all.
    """

    seconds: float = 0.0
    trials: int = TRIALS
    workers: int | None = None
    force: bool = False
    stop_losers: bool = True
    journal: Journal | None = None
    watch: Watch = field(default_factory=Watch)
    timers: Timers | None = None
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tuned:
    """What came of one kernel.

    Attributes:
        kernel: its name.
        kind: ``forward``, ``training`` or ``backward``: the function it belongs to.
        key: what it is to tables.
        experts: E of the function.
        entry: what was found, now or before.
        floor_us: what its bytes and FLOPs need at least.
        default: the rule's point.
        found: the search; None if a table knew.
    """

    kernel: str
    kind: str
    key: KernelKey
    experts: int
    entry: Entry
    floor_us: float
    default: Point
    found: Found | None


def tune(
    runner: Runner,
    tables: Tables,
    program: Program,
    kind: str,
    cotangents: tuple[str, ...],
    inputs: Sequence[torch.Tensor],
    settings: Settings,
    card: Card,
) -> list[Tuned]:
    """Searches for each kernel of a function that tables do not know, and adds what was found to the user's table.

    Args:
        runner: what runs it.
        tables: of the card.
        program, kind, cotangents: the function.
        inputs: of a call of it, which say T and alignment. They are only read.
        settings: see `Settings`.
        card: what floors and estimates are computed from.
    """
    start = time.monotonic()
    device = runner.place(inputs[0].device)
    target = runner.target(device)
    aligned, tokens = alignments(inputs), tokens_of(inputs)
    bucket = token_buckets.number_of(tokens, runner.few_tokens)
    rule = program.rule(kind, cotangents, target.name, bucket)
    specialize = program.specialize(target.name, aligned, rule)
    executable = program.executable(kind, target.name, aligned, cotangents, rule)
    if executable.plan.written or specialize.overrides or not tokens:
        return []
    label = token_buckets.label(bucket, runner.few_tokens)
    # Its launches are clones, which are configured again for each candidate.
    found = tunables(executable.module.entry, specialize, target, aligned, label)
    found = [f for f in found if not settings.kernels or f.space.op.symbol in settings.kernels]
    experts = max((f.key.experts for f in found), default=1)
    load = _load(found, experts, tokens)

    def tuned(one: Tunable, entry: Entry, outcome: Found | None) -> Tuned:
        floor = floor_us(one.space.op, load, card)
        return Tuned(one.space.op.symbol, kind, one.key, experts, entry, floor, one.space.default, outcome)

    results: list[Tuned] = []
    wanted: list[Tunable] = []
    for one in found:
        known = None if settings.force else tables.find(one.key)
        if known is not None and known.complete:
            results.append(tuned(one, known, None))
            settings.watch.end(results[-1])
        elif one.key not in [w.key for w in wanted]:
            wanted.append(one)
    if not wanted:
        return results
    turn = _turn_at(device)
    recording = Recording(executable, _sets(inputs, executable.plan, load, device), runner, device, turn)
    timers = settings.timers or graph_timers()
    with Compilers(target, workers_allowed(settings.workers)) as compilers:
        for number, one in enumerate(wanted):
            left = settings.seconds - (time.monotonic() - start)
            if settings.seconds and left <= 0:
                break
            seconds = left / (len(wanted) - number) if settings.seconds else 0.0
            candidates = ordered(one.space, one.space.points(), load, card)
            settings.watch.begin(one.space.op.symbol, len(candidates), settings.trials, seconds)
            search = Search(
                candidates,
                partial(_build, one.space, compilers=compilers),
                recording.bench(one.number, timers),
                most_trials=settings.trials,
                seconds=seconds,
                batch=_batch(settings.trials, compilers.workers),
                stop_losers=settings.stop_losers,
                known=settings.journal.known(one.key) if settings.journal else {},
                note=_note(settings, one.key),
                turn=turn,
            )
            settings.watch.searching(search)
            outcome = search.run()
            entry = Entry(
                dict(outcome.best),
                round(outcome.us, 3),
                round(outcome.default_us, 3),
                tokens,
                len(outcome.trials),
                outcome.points,
                outcome.ended != "time",
            )
            tables.add({one.key: entry}, about_here(target))
            _log.info(
                "%s: %.2f us instead of %.2f after %d trials of %d points: %s",
                one.key,
                entry.us,
                entry.default_us,
                entry.trials,
                entry.points,
                point_text(one.space.op.symbol, entry.point),
            )
            results.append(tuned(one, entry, outcome))
            settings.watch.end(results[-1])
    return results


def about_here(target: Target) -> dict[str, Any]:
    """What a table says of the software it was made with."""
    from moesaic import __version__
    from moesaic.codegen import nvrtc

    return {"moesaic": __version__, "nvrtc": ".".join(map(str, nvrtc.nvrtc_version()))}


def _turn_at(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """The context in which this process alone times a device."""
    if device.type != "cuda":
        return nullcontext
    name = str(getattr(torch.cuda.get_device_properties(device), "uuid", device.index))
    return partial(locks.card_turn, re.sub(r"[^A-Za-z0-9-]", "", name))


def _batch(trials: int, workers: int) -> int:
    """Candidates at a time: as many as compile side by side, but few of all, since each batch learns from the last."""
    return max(4, min(workers, trials // 4) if trials else workers)


def _note(settings: Settings, key: KernelKey) -> Any:
    noting = settings.journal.noting(key) if settings.journal else None

    def note(trial: Trial) -> None:
        if noting is not None:
            noting(trial)
        settings.watch.trial(trial)

    return note


def _load(found: Sequence[Tunable], experts: int, tokens: int) -> Extents:
    picks = max((f.key.picks for f in found), default=1) or 1
    return Extents(tokens, tokens * picks, experts=min(experts, tokens * picks))


def _build(space: Space, points: Sequence[Point], compilers: Compilers) -> list[Built | str]:
    """Text of every point, then machine code side by side."""
    built: list[Built | str] = []
    texts: dict[int, GeneratedKernel] = {}
    before = space.op.attributes["config"]
    try:
        for number, point in enumerate(points):
            built.append("")
            try:
                space.specialize.configure(space.op, space.aligned, point)
                texts[number] = generate_kernel(space.op)
            except MoesaicError as error:
                built[number] = str(error)
    finally:
        space.op.attributes["config"] = before
    for (number, kernel), made in zip(texts.items(), compilers.compile([*texts.values()]), strict=True):
        if isinstance(made, str):
            built[number] = made
            continue
        launched = (kernel.threads, kernel.rows_per_block, kernel.grid, kernel.shared_bytes, kernel.cluster)
        built[number] = Built(kernel, cache.sha256(f"{made.cubin_sha256} {launched}"), made.spills)
    return built


def _sets(inputs: Sequence[torch.Tensor], plan: Any, load: Extents, device: torch.device) -> list[list[torch.Tensor]]:
    """The inputs, and as many copies as exceed the L2 cache together with what is made of them."""
    own = sum(t.numel() * t.element_size() for t in inputs if t.numel() * t.element_size() <= _MOST_COPIED)
    made = 0
    for buffer in plan.buffers:
        numbers = 1
        for size in buffer.type.shape:
            rows = {"T": load.tokens, "M": load.rows}.get(buffer.type.leading, 1)
            numbers *= rows if isinstance(size, Affine) else size
        made += numbers * buffer.type.dtype.bytes
    l2_bytes = _L2_BYTES
    if device.type == "cuda":
        l2_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or _L2_BYTES
    sets, _ = sets_for(own + made, l2_bytes)
    sets = max(1, min(sets, _MOST_OF_SETS // max(own + made, 1), 2 if device.type == "cpu" else sets))
    found = [list(inputs)]
    for _ in range(sets - 1):
        found.append([t.clone() if t.numel() * t.element_size() <= _MOST_COPIED else t for t in inputs])
    return found

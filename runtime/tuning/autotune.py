"""What users hold of the tuner: ``moesaic.autotune``, ``with moesaic.autotuning():``, and ``MOESAIC_AUTOTUNE``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from moesaic.ir import environment
from moesaic.ir.core import Module
from moesaic.ir.declare import Router
from moesaic.ir.errors import InputError, InputTypeError, ToolchainError
from moesaic.ir.types import DType
from moesaic.passes.card import H100, Card
from moesaic.runtime import token_buckets
from moesaic.runtime.compile import compile
from moesaic.runtime.execute import RUNNERS, Runner, alignments, tokens_of
from moesaic.runtime.layer import CompiledLayer
from moesaic.runtime.measure import call, draw_inputs, measured_card
from moesaic.runtime.per_call import PerCall
from moesaic.runtime.program import Program
from moesaic.runtime.tuning.report import Report
from moesaic.runtime.tuning.tuner import Settings, tune

_SHARE = 3  # of the time that is left, a function gets one over so many where nobody knows how many will come


def _card(device: torch.device) -> Card:
    """What the cost model knows of a device; an H100 where there is no GPU."""
    if device.type != "cuda":
        return H100
    return measured_card(torch.cuda.current_device() if device.index is None else device.index)


@dataclass
class Session:
    """Tunes every function that runs while it lasts, once for each bucket of T and alignment.

    Attributes:
        settings: how; their seconds are for all functions together.
        functions: how many are expected; 0 if nobody knows.
        report: what has come of it.
    """

    settings: Settings
    functions: int = 0
    report: Report = field(default_factory=Report)

    def __post_init__(self) -> None:
        self._start = time.monotonic()
        self._seen: set[tuple[Any, ...]] = set()
        self._busy = False

    @property
    def left(self) -> float:
        """Seconds that are left; 0 where there is no limit."""
        if not self.settings.seconds:
            return 0.0
        return max(0.0, self.settings.seconds - (time.monotonic() - self._start))

    def first(
        self,
        runner: Runner,
        program: Program,
        kind: str,
        cotangents: tuple[str, ...],
        inputs: Sequence[torch.Tensor],
    ) -> None:
        """Tunes a function before it runs, if it has not been, and there is time."""
        bucket = token_buckets.number_of(tokens_of(inputs), runner.few_tokens)
        key = (program.key, kind, cotangents, bucket, alignments(inputs), inputs[0].device)
        if key in self._seen or self._busy or (self.settings.seconds and not self.left):
            return
        runner.check_may_compile()
        self._seen.add(key)
        self._busy = True
        try:
            tables = runner.tables_of(runner.place(inputs[0].device))
            if tables is None:
                return
            parts = self.functions - len(self._seen) + 1 if self.functions else _SHARE
            settings = replace(self.settings, seconds=self.left / max(1, parts))
            with torch.no_grad():
                found = tune(runner, tables, program, kind, cotangents, inputs, settings, _card(inputs[0].device))
            self.report.add(found)
            if any(one.found is not None for one in found):
                runner.prepare_again(program)
        finally:
            self._busy = False


@contextmanager
def autotuning(budget: float | None = None, **options: Any) -> Iterator[Report]:
    """Every layer that is called in this context on a GPU is tuned first, forward and backward, on its own tensors.

        with mo.autotuning(budget=60) as report:
            model(tokens).loss.backward()

    What is found is kept on disk, and used from now on by every process. What tables know is not searched again.

    Args:
        budget: seconds in all; None: as ``MOESAIC_AUTOTUNE_BUDGET`` says, else 30.
        options: fields of `Settings`: ``trials``, ``workers``, ``force``, ``watch``, ...

    Raises:
        InputError: another context is active.
    """
    seconds = environment.AUTOTUNE_BUDGET.get() if budget is None else budget
    session = Session(Settings(seconds=float(seconds or _DEFAULT_SECONDS), **options))
    with active(session):
        yield session.report


@contextmanager
def active(session: Session) -> Iterator[None]:
    """A context in which the session tunes what runs."""
    if any(runner.session is not None for runner in RUNNERS.values()):
        raise InputError("moesaic.autotuning() is active already; leave one of the two out")
    for runner in RUNNERS.values():
        runner.session = session
    try:
        yield
    finally:
        for runner in RUNNERS.values():
            runner.session = None


_DEFAULT_SECONDS = 30.0


def tune_call(
    runner: Runner,
    program: Program,
    kind: str,
    cotangents: tuple[str, ...],
    inputs: Sequence[torch.Tensor],
    *,
    force: bool,
) -> None:
    """What ``MOESAIC_AUTOTUNE`` asks for, before the first call of a function in a bucket of T."""
    seconds = float(environment.AUTOTUNE_BUDGET.get() or _DEFAULT_SECONDS)
    session = Session(Settings(seconds=seconds, force=force), functions=1)
    session.first(runner, program, kind, cotangents, inputs)


def autotune(
    what: CompiledLayer | PerCall | Router | Module,
    *,
    tokens: int | Sequence[int] = (1024, 16384, 65536),
    budget: float = 60.0,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cuda",
    backward: bool = True,
    **options: Any,
) -> Report:
    """Tunes a layer's kernels for numbers of tokens, on random tensors of its shapes.

    A number of tokens stands for its bucket: up to 256, up to 4096, up to 16384, or more. What is found is kept on
    disk, and every process uses it that has not called such a layer yet; the layer itself does from now on.

    Args:
        what: a compiled layer, or a router or module to compile. Of compiled experts or a whole layer, its
            ``layer(...)``, or the one that was called last.
        tokens: T, one or several.
        budget: seconds in all.
        dtype: of the logits, where none was declared.
        device: where to tune.
        backward: also tune the training forward and backward functions.
        options: fields of `Settings`: ``trials``, ``workers``, ``force``, ``watch``, ...

    Raises:
        InputTypeError: `what` is something else.
        ToolchainError: there is no GPU.
    """
    layer = _layer_of(what)
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ToolchainError("tuning measures a GPU, and torch can see none here; see 'moesaic doctor'")
    counts = [tokens] if isinstance(tokens, int) else [*tokens]
    if not counts or min(counts) < 1:
        raise InputError(f"tokens must be numbers of 1 or more, found {tokens}")
    session = Session(Settings(seconds=float(budget), **options), functions=len(counts) * (3 if backward else 1))
    function = layer._program(DType.parse(dtype) if dtype is not None else None).function
    with active(session):
        for seed, count in enumerate(counts):
            given = draw_inputs(function, count, seed=seed, device=str(place))
            for training in (False, True) if backward else (False,):
                call(layer, given, training)
    return session.report


def _layer_of(what: object) -> CompiledLayer:
    if isinstance(what, PerCall):
        return what._last()
    if isinstance(what, CompiledLayer):
        return what
    if isinstance(what, Router | Module):
        return compile(what)
    raise InputTypeError(
        f"autotune takes a compiled layer, a Router or a Module, found {type(what).__name__}; of experts and of whole "
        "layers it takes compile(...).layer(...)"
    )

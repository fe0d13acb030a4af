"""Runs the sections of ``models.py``: checks each part, then times it with all implementations in turn."""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from models_cases import IMPLEMENTATIONS, LEFT_OUT, SHAPES, Inputs, furthest, left_out, with_experts
from models_rows import Row, print_serving, print_serving_header, print_training
from router_cases import WrongResult
from timing import Bursts, Clock, GraphTimer, Shared, in_turn, short
from torch import Tensor

import moesaic as mo

_SLACK = 2e-3  # of a norm: how far two ways of rounding to bf16 may lie apart
_SERVED_ERROR = 0.05  # of a norm, beside eager: one pick of a token may be another one
_CHECKED = 512  # tokens of a model that are compared with float32
_SETS = 4  # inputs of inference that replays go round
_MOST_CALLS = 60


class EventTimer:
    """A call timed as it runs, between two events; what it costs the host counts where the host is slower."""

    calls = 1

    def __init__(self, call: Callable[[int], object]) -> None:
        self._call = call
        for i in range(3):
            call(i)
        self._last_ms = statistics.median(self._events(3))

    @property
    def replay_ms(self) -> float:
        return self._last_ms

    def burst(self, ms: float) -> list[float]:
        times = self._events(max(1, min(_MOST_CALLS, round(ms / self._last_ms))))
        self._last_ms = max(statistics.median(times), 1e-3)
        return [1e3 * t for t in times]

    def _events(self, calls: int) -> list[float]:
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
        self._call(0)  # the host gets ahead of the GPU
        for number, (start, end) in enumerate(pairs):
            start.record()
            self._call(number)
            end.record()
        torch.cuda.synchronize()
        return [max(start.elapsed_time(end), 1e-3) for start, end in pairs]


Timers = Callable[[Callable[[int], object], bool, Any], Bursts]
"""Makes a timer of a call, of whether it shall be captured in a graph, and of what graphs have in common."""


def _timer(call: Callable[[int], object], graph: bool, shared: Any) -> Bursts:
    return GraphTimer(call, _SETS, shared=shared) if graph else EventTimer(call)


class Bench:
    """Runs the sections.

    `device`, `timers`, `shared`, `compiler` and `dtype` are for tests, which have no GPU.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        *,
        device: str = "cuda",
        timers: Timers = _timer,
        shared: Callable[[], Any] = Shared,
        compiler: str = "inductor",
    ) -> None:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        self._args = args
        self._device = device
        self._timers = timers
        self._shared = shared
        self._compiler = compiler
        self._shape = SHAPES[args.shape]
        self.clock = Clock(args.budget, args.compile_budget)
        self.rows: list[Row] = []
        self.wrong = 0
        self.not_started: list[str] = []
        mo.hf.register()
        ALL_EXPERTS_FUNCTIONS.register(LEFT_OUT, left_out)
        torch.manual_seed(args.seed)
        self.model = self._shape.model(device, torch.bfloat16)
        mo.hf.prepare(self.model)
        self._generator = torch.Generator(device=device).manual_seed(args.seed)
        self._problems: dict[tuple[str, str], str] = {}
        self._modules: dict[tuple[str, str, bool], tuple[Any, list[Tensor]]] = {}

    def run(self) -> None:
        """All sections that are asked for."""
        for name, section in (("training", self._training), ("serving", self._serving)):
            if getattr(self._args, name):
                try:
                    section()
                except Exception as error:  # noqa: BLE001 - the other section is worth having
                    self.wrong += 1
                    print(f"    ERROR: {short(error)}", flush=True)
                    traceback.print_exc()

    # ---------------------------------------------------------------------------------------------------- the parts

    def _normal(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=self._device).normal_(generator=self._generator)

    def _part(self, part: str, name: str) -> Any:
        """The layer, the layer without experts, or its experts, as an implementation runs them; not compiled yet."""
        implementation, _ = IMPLEMENTATIONS[name]
        whole = self.model if part == "model" else self.model.model.layers[0]
        if implementation == "blocks":
            made = with_experts(whole, "eager")
            mo.hf.replace(made)
            return made
        made = with_experts(whole, LEFT_OUT if part == "rest" else implementation)
        return made.mlp.experts if part == "experts" else made

    def _ready(self, part: str, name: str, dynamic: bool) -> tuple[Any, list[Tensor]]:
        """The same, compiled at its first call if it shall be, and its parameters."""
        if (part, name, dynamic) not in self._modules:
            module = self._part(part, name)
            parameters = list(module.parameters())
            if IMPLEMENTATIONS[name][1]:
                options: dict[str, Any] = {"backend": self._compiler, "dynamic": dynamic}
                if part == "model":
                    for layer in module.model.layers:
                        layer.compile(**options)
                else:
                    module = torch.compile(module, **options)
            self._modules[part, name, dynamic] = module, parameters
        return self._modules[part, name, dynamic]

    def _inputs(self, part: str, batch: int, length: int) -> Inputs:
        """Random inputs of a part."""
        if part == "model":
            size = (batch, length)
            ids = torch.randint(self._shape.vocabulary, size, device=self._device, generator=self._generator)
            return Inputs((ids,), {"labels": ids}, (), torch.ones((), device=self._device))
        x, cotangent = (self._normal(batch, length, self._shape.hidden) for _ in range(2))
        if part == "experts":
            rows = x.flatten(0, 1).requires_grad_()
            with torch.no_grad():
                _, weights, picks = self.model.model.layers[0].mlp.gate(rows)
            weights.requires_grad_()
            return Inputs((rows, picks, weights), {}, (rows, weights), cotangent.flatten(0, 1))
        positions = torch.arange(length, device=self._device).expand(batch, -1)
        places = self.model.model.rotary_emb(x, positions)
        return Inputs((x.requires_grad_(),), {"position_embeddings": places}, (x,), cotangent)

    def _add(self, row: Row, part: str, name: str, graph: bool, shared: Any, make: Callable[[], Any]) -> Bursts | None:
        """A timer of a part with an implementation, after everything it compiles; None, and a reason in the row, if
        there is none."""
        compiles = IMPLEMENTATIONS[name][1]
        if (part, name) in self._problems:
            row.cells[part, name] = self._problems[part, name]
            return None
        if compiles and not self.clock.may_compile:
            row.cells[part, name] = "skipped"
            return None
        self.clock.say(f"{row.section}, T = {row.tokens}: {part}, {name}")
        start = time.monotonic()
        try:
            call = make()
            call(0)
        except Exception as error:  # noqa: BLE001 - the other cells are worth having
            self._failed(row, part, name, error)
            return None
        finally:
            if compiles:
                self.clock.compiling += time.monotonic() - start
        try:
            return self._timers(call, graph and name != "eager", shared)
        except Exception as error:  # noqa: BLE001
            self._failed(row, part, name, error)
            return None

    def _failed(self, row: Row, part: str, name: str, error: Exception) -> None:
        row.cells[part, name] = f"ERROR: {short(error)}"
        self.wrong += name.startswith("moesaic") and not isinstance(error, WrongResult)  # which counts for everybody
        self.clock.say(f"{part}, {name}: {short(error)}")

    def _names(self, part: str) -> list[str]:
        """The implementations that a part is timed with; for what is around experts, one with and one without
        torch.compile."""
        if part in ("layer", "model"):
            return list(self._args.only)
        alone = [name for name in self._args.only if IMPLEMENTATIONS[name][0] != "blocks"]
        found = {IMPLEMENTATIONS[name][1]: name for name in reversed(alone)}
        return alone if part == "experts" else list(found.values())

    # ----------------------------------------------------------------------------------------------------- training

    def _training(self) -> None:
        batch, length = self._args.batch, self._args.length
        row = Row("training", batch * length, self._shape.layers)
        self.rows.append(row)
        print(f"\n{self._shape.name}, {batch} x {length} tokens, forward + backward", flush=True)
        for parts in (("experts", "rest", "layer"), ("model",)):
            if self.clock.over:
                self.not_started += parts
                continue
            for part in parts:
                self._check(part)
            timers: dict[str, Bursts] = {}
            for part in parts:
                given = self._inputs(part, batch, length)
                for name in self._names(part):

                    def make(part: str = part, name: str = name, given: Inputs = given) -> Callable[[int], object]:
                        module, parameters = self._ready(part, name, dynamic=False)

                        def call(i: int) -> None:
                            given.run(module).backward(given.cotangent)
                            for leaf in (*given.leaves, *parameters):
                                leaf.grad = None

                        return call

                    timer = self._add(row, part, name, False, None, make)
                    if timer is not None:
                        timers[f"{part}/{name}"] = timer
            for key, timing in in_turn(timers, self._args.ms).items():
                part, name = key.split("/")
                row.cells[part, name] = timing
            timers.clear()
            _free()
        for name in self._names("experts"):  # what is around is the same for all
            [same] = [n for n in self._names("rest") if IMPLEMENTATIONS[n][1] == IMPLEMENTATIONS[name][1]]
            if ("rest", same) in row.cells:
                row.cells["rest", name] = row.cells["rest", same]
        print_training(row, self._args.only)

    # ------------------------------------------------------------------------------------------------------ serving

    def _serving(self) -> None:
        print(f"\n{self._shape.name}, inference of the layer, T sequences with a token each, microseconds", flush=True)
        print_serving_header(self._args.only)
        for tokens in self._args.served:
            if self.clock.over:
                self.not_started.append(f"serving, T = {tokens}")
                continue
            row = Row("serving", tokens, self._shape.layers)
            self.rows.append(row)
            shared, timers = self._shared(), {}
            for part in ("experts", "layer"):
                sets = [self._inputs(part, tokens, 1) for _ in range(_SETS)]
                with torch.no_grad():
                    right = sets[0].run(self._part(part, "eager"))
                for name in self._names(part):

                    def make(
                        part: str = part, name: str = name, sets: list[Inputs] = sets, right: Tensor = right
                    ) -> Callable[[int], object]:
                        module, _ = self._ready(part, name, dynamic=True)

                        def call(i: int) -> Tensor:
                            with torch.no_grad():
                                return sets[i % _SETS].run(module)

                        [error] = furthest([call(0)], [right])
                        if not error <= _SERVED_ERROR:
                            self.wrong += 1
                            raise WrongResult(f"off by {error:.3g} of the norm of eager's")
                        return call

                    timer = self._add(row, part, name, True, shared, make)
                    if timer is not None:
                        timers[f"{part}/{name}"] = timer
            # So few tokens wait for memory: no clock has to settle.
            for key, timing in in_turn(timers, self._args.ms / 8, settle_ms=0.0).items():
                part, name = key.split("/")
                row.cells[part, name] = timing
            timers.clear()
            _free()
            print_serving(row, self._args.only)

    # ------------------------------------------------------------------------------------------------------- checks

    def _check(self, part: str) -> None:
        """Compares a part with its float32 copy: each implementation may be as far off as eager in bf16, and a bit.

        torch.compile may round elsewhere before the router, and turn picks of which two are nearly alike: as many as
        bf16 itself does.
        """
        if part == "rest":
            return
        size = self._args.batch, self._args.length
        if part == "model":  # with a float32 copy of it, there is memory for few tokens
            size = 1, min(_CHECKED, self._args.length)
        given = self._inputs(part, *size)
        eager = self._part(part, "eager")
        wide = copy.deepcopy(eager).float()
        wanted = given.widened().train(wide, list(wide.parameters()))
        del wide
        allowed = furthest(given.train(eager, list(eager.parameters())), wanted)
        names = ["result", *(f"input {i}" for i in range(len(given.leaves))), *dict(eager.named_parameters())]
        factor = 1.3 if part == "experts" else 2.0  # alone they have the same picks
        for name in self._names(part):
            compiles = IMPLEMENTATIONS[name][1]
            # The layers of a compiled model are the one that is compared alone.
            if name == "eager" or (compiles and (part == "model" or not self.clock.may_compile)):
                continue
            start = time.monotonic()
            try:
                found = furthest(given.train(*self._ready(part, name, dynamic=False)), wanted)
            except Exception as error:  # noqa: BLE001
                self._problems[part, name] = f"ERROR: {short(error)}"
                self.wrong += name.startswith("moesaic")
                self.clock.say(f"{part}, {name}: {short(error)}")
                continue
            finally:
                if compiles:
                    self.clock.compiling += time.monotonic() - start
            over = [
                f"{what} is off by {f:.3g} of its norm, eager by {a:.3g}"
                for what, f, a in zip(names, found, allowed, strict=True)
                if not f <= factor * a + _SLACK
            ]
            if over:
                self._problems[part, name] = f"WRONG: {over[0]}"
                self.wrong += 1
                self.clock.say(f"{part}, {name}: {'; '.join(over)}")
        del wanted
        _free()


def _free() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

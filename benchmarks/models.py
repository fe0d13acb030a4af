"""Times experts where they are used: a decoder layer and a small model of transformers, with its experts and with ours.

    python benchmarks/models.py                      # everything, about 3 minutes, half of them torch.compile
    python benchmarks/models.py --training           # the layer, then the model, forward + backward
    python benchmarks/models.py --serving            # inference of the layer for few tokens, in CUDA graphs
    python benchmarks/models.py --training --only grouped_mm,moesaic       # without torch.compile: half a minute
    python benchmarks/models.py --batch 2 --length 2048 --out numbers.json

moesaic has to be importable (``pip install -e .``), and transformers 5.17. Weights are random, bf16. The layer and the
model are Qwen3-MoE's (``--shape``); the model has few layers and as small a vocabulary, so that its head has the share
of the time that it has in the whole one. All implementations share the weights:

    eager                   the model's own loop over experts
    grouped_mm              transformers' default
    grouped_mm+compile      the same under torch.compile
    moesaic                 ours, ``mo.hf.register()``
    moesaic+compile         ours under torch.compile
    moesaic-blocks          ours with the router, ``mo.hf.replace(model)``
    moesaic-blocks+compile  the same under torch.compile

torch.compile compiles the layers of a model one by one, which is enough for experts and compiles once for all of them.
Before anything is timed, results and all gradients of the experts, of the layer and of the model are compared with
those of float32 copies: no implementation may be further off than eager in bf16 by more than a small factor. One that
is says WRONG, is not timed, and the exit code is 1.

Times are medians of pairs of CUDA events, all implementations and all parts in turn, in short bursts. Training is timed
as it runs, call after call without waiting; inference of few tokens as replays of CUDA graphs, but for the eager loop,
which reads sizes on the host and cannot be captured. Training makes the gradients of all weights anew each time.

*experts* is the time of the layer's experts alone, with the picks of its router; *rest* that of the layer whose experts
are left out. By Amdahl's law a layer of time t whose experts take e gains at most t / (t - e + e') where they take e':
*allowed* is that number for ours beside a peer, *gain* what was measured, *reached* the one over the other. For a model
of L layers e counts L times. Of blocks e' is the time of their experts; that of the router they have besides. Goals are
those of the project for an H100. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from experts_bench import Clock
from experts_cases import short
from router_cases import WrongResult
from timing import Bursts, GraphTimer, Machine, Shared, Timing, in_turn, measure_machine
from torch import Tensor

import moesaic as mo

IMPLEMENTATIONS = {
    "eager": ("eager", False),
    "grouped_mm": ("grouped_mm", False),
    "grouped_mm+compile": ("grouped_mm", True),
    "moesaic": ("moesaic", False),
    "moesaic+compile": ("moesaic", True),
    "moesaic-blocks": ("blocks", False),
    "moesaic-blocks+compile": ("blocks", True),
}
PAIRS = tuple(
    (f"grouped_mm{how}", f"{ours}{how}") for ours in ("moesaic", "moesaic-blocks") for how in ("", "+compile")
)
SERVED = (1, 2, 4, 8, 16, 32, 64, 128, 256)
GAIN_GOAL = 1.2
"""Of the layer's training: the best of the others over the best of ours."""
REACHED_GOAL = 0.95
"""Of the model's training: what is reached of the gain that Amdahl's law allows."""

_LEFT_OUT = "moesaic_benchmark_left_out"
_SLACK = 2e-3  # of a norm: how far two ways of rounding to bf16 may lie apart
_SERVED_ERROR = 0.05  # of a norm, beside eager: one pick of a token may be another one
_CHECKED = 512  # tokens of a model that are compared with float32
_SETS = 4  # inputs of inference that replays go round
_MOST_CALLS = 60


@dataclass(frozen=True)
class Shape:
    """Of a model. `vocabulary` and `layers` are those of the small one that is timed."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocabulary: int

    def model(self, device: str, dtype: torch.dtype) -> Any:
        """The model with random weights, in training mode."""
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        config = Qwen3MoeConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=4 * self.hidden,
            moe_intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            num_experts=self.experts,
            num_experts_per_tok=self.top_k,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            use_cache=False,
        )
        with torch.device(device):
            return Qwen3MoeForCausalLM._from_config(config, dtype=dtype, attn_implementation="sdpa").train()


SHAPES = {
    # A 12th of 48 layers, and of 151936 rows of the head.
    "qwen3": Shape("Qwen3-30B-A3B", 2048, 768, 128, 8, 32, 4, 128, layers=4, vocabulary=12672),
    "tiny": Shape("tiny", 32, 24, 8, 2, 4, 2, 8, layers=2, vocabulary=64),
}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="models.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--shape", choices=SHAPES, default="qwen3")
    p.add_argument("--batch", type=int, default=4, help="sequences of a step of training (default: 4)")
    p.add_argument("--length", type=int, default=4096, help="tokens of each (default: 4096)")
    p.add_argument("--served", type=_tokens, default=SERVED, metavar="T,T,...", help="numbers of tokens of --serving")
    p.add_argument("--only", type=_implementations, default=list(IMPLEMENTATIONS), metavar="NAME,NAME,...",
                   help=f"of {', '.join(IMPLEMENTATIONS)}")  # fmt: skip
    p.add_argument("--budget", type=float, default=540.0, metavar="SECONDS",
                   help="nothing is started after that, 0 for no limit (default: 540)")  # fmt: skip
    p.add_argument("--compile-budget", type=float, default=300.0, metavar="SECONDS",
                   help="nothing is given to torch.compile after it has taken so long (default: 300)")  # fmt: skip
    p.add_argument("--ms", type=float, default=400.0, help="milliseconds of calls for one number (default: 400)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", metavar="FILE", help="write all numbers there as JSON, whatever ends the run")
    sections = p.add_argument_group("sections (default: all)")
    sections.add_argument("--training", action="store_true", help="forward + backward of the layer and of the model")
    sections.add_argument("--serving", action="store_true", help="inference of the layer for few tokens")
    args = p.parse_args(arguments)
    if not args.training and not args.serving:
        args.training = args.serving = True
    return args


def _implementations(text: str) -> list[str]:
    asked = text.split(",")
    for name in asked:
        if name not in IMPLEMENTATIONS:
            raise argparse.ArgumentTypeError(f"unknown implementation {name!r}; known: {', '.join(IMPLEMENTATIONS)}")
    return [name for name in IMPLEMENTATIONS if name in asked]


def _tokens(text: str) -> tuple[int, ...]:
    if not all(t.isdigit() and int(t) > 0 for t in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers of tokens")
    return tuple(map(int, text.split(",")))


# ------------------------------------------------------------------------------------------------------------- timing


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


# --------------------------------------------------------------------------------------------------------------- rows


def experts_of(name: str) -> str:
    """Whose experts an implementation has: blocks have none that run alone."""
    return name.replace("-blocks", "")


@dataclass
class Row:
    """One number of tokens of a section: the timing of each part with each implementation, or why there is none.

    `cells` has keys (part, implementation); parts are ``experts``, ``rest``, ``layer`` and ``model``.
    """

    section: str
    tokens: int
    layers: int
    cells: dict[tuple[str, str], Timing | str] = field(default_factory=dict)

    def us(self, part: str, name: str) -> float | None:
        cell = self.cells.get((part, name))
        return cell.us if isinstance(cell, Timing) else None

    def best(self, part: str, ours: bool) -> tuple[str, float] | None:
        """The fastest of ours or of the others, and its time."""
        found = [
            (us, name)
            for name in IMPLEMENTATIONS
            if name.startswith("moesaic") == ours and (us := self.us(part, name)) is not None
        ]
        return (min(found)[1], min(found)[0]) if found else None

    def gain(self, part: str) -> float | None:
        """The best of the others over the best of ours."""
        ours, others = self.best(part, True), self.best(part, False)
        return others[1] / ours[1] if ours and others else None

    def amdahl(self, part: str, peer: str, ours: str) -> tuple[float, float] | None:
        """What the experts' gain allows of a part, and what was measured of it."""
        count = self.layers if part == "model" else 1
        whole, mine = self.us(part, peer), self.us(part, ours)
        theirs, own = self.us("experts", peer), self.us("experts", experts_of(ours))
        if whole is None or mine is None or theirs is None or own is None:
            return None
        return whole / max(whole - count * (theirs - own), 1e-9), whole / mine

    def as_dict(self) -> dict[str, Any]:
        cells = {
            f"{part}/{name}": asdict(cell) if isinstance(cell, Timing) else cell
            for (part, name), cell in self.cells.items()
        }
        bounds = {
            f"{part}: {ours} beside {peer}": dict(zip(("allowed", "gain"), found, strict=True))
            for part in ("layer", "model")
            for peer, ours in PAIRS
            if (found := self.amdahl(part, peer, ours)) is not None
        }
        return {"section": self.section, "tokens": self.tokens, "layers": self.layers, "cells": cells, "amdahl": bounds}


# -------------------------------------------------------------------------------------------------------------- parts


def with_experts(module: Any, implementation: str) -> Any:
    """The module once more, with the same weights and another implementation of experts."""
    shared = {id(t): t for t in (*module.parameters(), *module.buffers())}
    made = copy.deepcopy(module, shared)
    for part in made.modules():
        if hasattr(part, "config"):
            part.config._experts_implementation = implementation
    return made


def _left_out(module: Any, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """In place of experts: x itself, and a use of the weights, so that everything around has its gradients."""
    return hidden * weights.sum(-1, keepdim=True).to(hidden.dtype)


@dataclass(frozen=True)
class Inputs:
    """What a part is called with. `leaves` are those of its tensors that want gradients."""

    given: tuple[Tensor, ...]
    named: Mapping[str, Any]
    leaves: tuple[Tensor, ...]
    cotangent: Tensor

    def run(self, module: Any) -> Tensor:
        """The result, of a model its loss."""
        result = module(*self.given, **self.named)
        return result if isinstance(result, Tensor) else result.loss

    def train(self, module: Any, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The result, and the gradients of leaves and parameters, which are made anew; zeros where there is none."""
        result = self.run(module)
        result.backward(self.cotangent)
        found = [result.detach()]
        for leaf in (*self.leaves, *parameters):
            found.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
            leaf.grad = None
        return found

    def widened(self) -> Inputs:
        """The same numbers in float32."""
        copies = {id(t): t.detach().float().requires_grad_() for t in self.leaves}

        def wide(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(wide, value))
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            return copies[id(value)] if id(value) in copies else value.float()

        named = {name: wide(value) for name, value in self.named.items()}
        return Inputs(wide(self.given), named, tuple(copies.values()), self.cotangent.float())


def furthest(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[float]:
    """How far off each tensor is, relative to its norm; infinite where it has numbers that are none."""
    errors = []
    for a, b in zip(found, wanted, strict=True):
        error = ((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-30)).item()
        errors.append(error if error == error else float("inf"))
    return errors


# -------------------------------------------------------------------------------------------------------------- bench


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
        ALL_EXPERTS_FUNCTIONS.register(_LEFT_OUT, _left_out)
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
        made = with_experts(whole, _LEFT_OUT if part == "rest" else implementation)
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
            for key, timing in in_turn(timers, self._args.ms / 8).items():
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


# ------------------------------------------------------------------------------------------------------------- tables


def _ms(row: Row, part: str, name: str) -> str:
    cell = row.cells.get((part, name), "-")
    return f"{cell.us / 1e3:.3f}" if isinstance(cell, Timing) else cell.partition(":")[0]


def print_training(row: Row, names: Sequence[str]) -> None:
    """Times of all parts, rates, gains, and what Amdahl's law allows."""
    print(f"{'':22}  experts, ms   rest, ms  layer, ms     tokens/s  model, ms     tokens/s")
    for name in names:
        rates = [f"{row.tokens / us * 1e6:,.0f}" if (us := row.us(p, name)) else "-" for p in ("layer", "model")]
        times = [_ms(row, p, name) for p in ("experts", "rest", "layer", "model")]
        print(f"{name:22}  {times[0]:>11}  {times[1]:>9}  {times[2]:>9}  {rates[0]:>11}  {times[3]:>9}  {rates[1]:>11}")
    for part, goal in (("layer", GAIN_GOAL), ("model", None)):
        gain, ours, others = row.gain(part), row.best(part, True), row.best(part, False)
        if gain is not None and ours is not None and others is not None:
            verdict = "" if goal is None else f"; goal: >= {goal:.2f} x, {'met' if gain >= goal else 'no'}"
            print(f"{part}: {ours[0]} is {gain:.2f} x {others[0]}, the best of the others{verdict}")
    for part, least in (("layer", None), ("model", REACHED_GOAL)):
        for peer, mine in PAIRS:
            found = row.amdahl(part, peer, mine)
            if found is None:
                continue
            allowed, gain = found
            verdict = "" if least is None else f"; goal: >= {least:.0%}, {'met' if gain / allowed >= least else 'no'}"
            experts = (row.us("experts", peer) or 0.0) / (row.us("experts", experts_of(mine)) or 1.0)
            print(
                f"{part}, {mine} beside {peer}: experts {experts:.2f} x, allowed {allowed:.2f} x, gain {gain:.2f} x, "
                f"reached {gain / allowed:.0%}{verdict}"
            )
    _print_reasons(row)


def print_serving_header(names: Sequence[str]) -> None:
    print(f"{'T':>4}  {'part':7}  " + "  ".join(f"{name:>22}" for name in names) + "   gain  allowed  reached")


def print_serving(row: Row, names: Sequence[str]) -> None:
    """The experts and the layer of a number of tokens; the bound is that of ours beside the best of the others."""
    for part in ("experts", "layer"):
        cells = [row.cells.get((part, name), "-") for name in names]
        said = [f"{c.us:.1f}" if isinstance(c, Timing) else c.partition(":")[0] for c in cells]
        gain, bound = row.gain(part), None
        ours, others = row.best("layer", True), row.best("layer", False)
        if part == "layer" and ours is not None and others is not None:
            bound = row.amdahl("layer", others[0], ours[0])
        end = f"  {gain:4.2f}x" if gain is not None else ""
        end += f"  {bound[0]:6.2f}x  {bound[1] / bound[0]:7.0%}" if bound is not None else ""
        print(f"{row.tokens:4}  {part:7}  " + "  ".join(f"{t:>22}" for t in said) + end, flush=True)
    _print_reasons(row)


def _print_reasons(row: Row) -> None:
    for (part, name), cell in row.cells.items():
        if isinstance(cell, str) and ":" in cell:
            print(f"    {part}, {name}: {cell}")


def summarise(bench: Bench) -> int:
    """The last lines, and the exit code."""
    print(f"\n{bench.clock.elapsed:.0f} s, {bench.clock.compiling:.0f} s of them torch.compile")
    if bench.not_started:
        print(f"not measured, --budget is spent: {'; '.join(bench.not_started)}")
    if bench.wrong:
        print(f"{bench.wrong} results are wrong or failed")
    return 1 if bench.wrong else 0


def write_json(args: argparse.Namespace, machine: Machine, bench: Bench) -> None:
    """All numbers, where asked for."""
    if not args.out:
        return
    asked = {"shape": asdict(SHAPES[args.shape]), "batch": args.batch, "length": args.length}
    with open(args.out, "w", encoding="utf-8") as file:
        json.dump(
            {"machine": machine.as_dict(), "asked": asked, "rows": [r.as_dict() for r in bench.rows]},
            file,
            indent=1,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the sections; gives the exit code."""
    args = parse_arguments(arguments)
    if not torch.cuda.is_available():
        print("no GPU: nothing to time", file=sys.stderr)
        return 3
    for name in ("recompile_limit", "cache_size_limit", "accumulated_recompile_limit"):
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, 1024)  # parts share their code, which counts as recompiling
    machine = measure_machine()
    machine.print()
    bench = Bench(args)
    try:
        bench.run()
    finally:
        write_json(args, machine, bench)
    return summarise(bench)


if __name__ == "__main__":
    sys.exit(main())

"""Times the sections of ``experts.py``: rows of layers, kernels alone, live shares, skew, memory, host time."""

from __future__ import annotations

import argparse
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from experts_cases import (
    Case,
    Inputs,
    Matrices,
    Run,
    check,
    forward,
    forward_backward,
    keep_share,
    load_of,
    make_inputs,
    make_matrices,
    make_picks,
    ours,
    transformers,
)
from experts_kernels import record
from experts_options import PASSES, tokens_of
from experts_rows import (
    DENSE,
    GOALS,
    HOST_GOAL_US,
    LIVE_GOALS,
    SAVED_GOAL,
    SKEW_GOAL,
    Goal,
    KernelRow,
    Row,
    print_kernels,
    print_rows,
)
from experts_views import print_planned_memory
from timing import (
    Bursts,
    Clock,
    GraphTimer,
    Machine,
    Shared,
    host_us,
    in_turn,
    short,
)
from torch import Tensor

from moesaic.codegen.target import Target
from moesaic.ir import environment

_HOST_TOKENS = 16
_MOST_RESULTS = 4e9  # bytes of gradients of one set, above which there is one set only


Timers = Callable[[Callable[[int], object], int, Any], Bursts]
"""Makes a timer of a call, a number of sets, and what timers have in common."""


class Bench:
    """Runs the sections.

    `device`, `timers` and `shared` are for tests, which have no GPU: a clock of theirs, and the emulator.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        machine: Machine,
        *,
        device: str = "cuda",
        timers: Timers = lambda call, sets, shared: GraphTimer(call, sets, shared=shared),
        shared: Callable[[], Any] = Shared,
    ) -> None:
        self._args = args
        self._machine = machine
        self._device = device
        self._backend = "cuda" if device == "cuda" else "emulate"
        self._timers = timers
        self._shared = shared
        self._generator = torch.Generator(device=device).manual_seed(args.seed)
        self._compiled: set[str] = set()
        self._matrices: tuple[Case, Matrices, dict[str, Run]] | None = None
        self._dense_operands: tuple[Tensor, Tensor] | None = None
        self.clock = Clock(args.budget, args.compile_budget)
        self.rows: list[Row] = []
        self.kernels: list[KernelRow] = []
        self.memory: list[dict[str, Any]] = []
        self.host: list[dict[str, Any]] = []
        self.wrong = 0
        self.not_started: list[str] = []

    def run(self) -> None:
        """All sections that are asked for: what matters most comes first."""
        first, *others = self._args.cases
        largest = max(tokens_of(self._args, first))
        self._section("rows", "Experts", lambda: self._layers([first]))
        self._section("kernels", "Kernels alone", lambda: self._kernels(first, largest))
        self._section("live", "Live picks", lambda: self._live(first, largest))
        self._section("skew", "Skewed routing", lambda: self._skew(first, largest))
        self._section("memory", "Memory", lambda: self._memory(first, largest))
        self._section("host", "Host time of a call", lambda: self._host(first))
        if others:
            self._section("rows", "Experts, other configurations", lambda: self._layers(others))

    def _section(self, name: str, title: str, run: Callable[[], None]) -> None:
        if name not in self._args.sections:
            return
        print(f"\n{title}", flush=True)
        try:
            run()
        except Exception as error:  # noqa: BLE001 - the other sections are worth having
            self.wrong += 1
            print(f"    ERROR: {short(error)}", flush=True)
            traceback.print_exc()

    def _may_start(self, what: str) -> bool:
        if self.clock.over:
            self.not_started.append(what)
            return False
        self.clock.say(what)
        return True

    def _runs(self, case: Case) -> tuple[Matrices, dict[str, Run]]:
        """Matrices of a case, and the implementations; those of another case go."""
        if self._matrices is None or self._matrices[0] != case:
            self._matrices = None
            torch.cuda.empty_cache()
            matrices = make_matrices(case, self._generator)
            runs: dict[str, Run] = {}
            if "ours" in self._args.only:
                runs["ours"] = ours(case, matrices, self._backend)
            if "hf" in self._args.only:
                runs["hf"] = transformers(case, matrices, "grouped_mm")
            if "compile" in self._args.only:
                runs["compile"] = transformers(case, matrices, "grouped_mm", compiled=True)
            self._matrices = (case, matrices, runs)
        return self._matrices[1], self._matrices[2]

    # ---------------------------------------------------------------------------------------------------- layers

    def _layers(self, cases: Sequence[Case]) -> None:
        header = True
        for case in cases:
            for tokens in tokens_of(self._args, case):
                if not self._may_start(f"{case.name}, T = {tokens}"):
                    continue
                picks = make_picks(case, tokens, self._generator)
                rows = self._measure("rows", case, tokens, {"random": picks}, PASSES, self._args.only, sets=2)
                for row in rows:
                    row.goal = GOALS.get((case.name, tokens, row.which))
                print_rows(rows, self._machine, header=header)
                header = False

    def _live(self, case: Case, tokens: int) -> None:
        every = make_picks(case, tokens, self._generator)
        found: dict[str, tuple[Tensor, Goal | None]] = {}
        for share in sorted(self._args.live, reverse=True):
            for how in ("spread", "local") if share < 1 else ("",):
                picks = keep_share(case, every, share, how, self._generator)
                found[f"{share:g} {how}".strip()] = picks, LIVE_GOALS.get((share, how))
        self._variants("live", case, tokens, found)

    def _skew(self, case: Case, tokens: int) -> None:
        self._variants(
            "skew",
            case,
            tokens,
            {
                routing: (make_picks(case, tokens, self._generator, routing), SKEW_GOAL if routing == "zipf" else None)
                for routing in ("even", "random", "zipf", "one")
            },
        )

    def _variants(
        self, section: str, case: Case, tokens: int, variants: Mapping[str, tuple[Tensor, Goal | None]]
    ) -> None:
        """Kinds of picks beside each other, without torch.compile; fwd+bwd only where there is time for it."""
        if not self._may_start(f"{section}: {case.name}, T = {tokens}"):
            return
        picks = {label: given for label, (given, _) in variants.items()}
        passes = PASSES[:1] if self._args.quick else PASSES
        only = [name for name in self._args.only if name != "compile"]
        rows = self._measure(section, case, tokens, picks, passes, only, sets=1)
        for row in rows:
            firsts = [r for r in rows if r.which == row.which]
            row.first_us = firsts[0].us("ours")
            row.goal = variants[row.picks][1] if row.which == "fwd" else None
        print_rows(rows, self._machine, header=True)

    def _measure(
        self,
        section: str,
        case: Case,
        tokens: int,
        picks: Mapping[str, Tensor],
        passes: Sequence[str],
        only: Sequence[str],
        sets: int,
    ) -> list[Row]:
        """Checks, then times all implementations with all picks in turn, pass by pass."""
        matrices, every = self._runs(case)
        if case.matrix_bytes > _MOST_RESULTS:
            sets = 1
        inputs = {
            label: [make_inputs(case, given, self._generator) for _ in range(sets)] for label, given in picks.items()
        }
        reasons: dict[tuple[str, str], str] = {}
        for label, given in inputs.items():
            runs = {name: run for name, run in every.items() if name in only}
            if "compile" in runs and not self._compile(case, runs["compile"], given, matrices):
                reasons[label, "compile"] = "skipped"
                del runs["compile"]
            problems = check(case, given[0], matrices, runs)
            reasons |= {(label, name): said for name, said in problems.items()}
            # A peer that cannot run is no fault; a result that differs is one, whoever made it.
            self.wrong += sum(name == "ours" or said.startswith("WRONG") for name, said in problems.items())
        made = []
        for which in passes:
            rows = {
                label: Row(section, case, tokens, which, label, load_of(case, given)) for label, given in picks.items()
            }
            for (label, name), reason in reasons.items():
                rows[label].cells[name] = reason
            self._time(which, rows, inputs, matrices, {n: r for n, r in every.items() if n in only})
            made += list(rows.values())
            torch.cuda.empty_cache()
        self.rows += made
        return made

    def _time(
        self,
        which: str,
        rows: Mapping[str, Row],
        inputs: Mapping[str, Sequence[Inputs]],
        matrices: Matrices,
        runs: Mapping[str, Run],
    ) -> None:
        shared = self._shared()
        timers: dict[str, Bursts] = {}
        own: dict[str, tuple[str, Callable[[int], object]]] = {}
        for label, row in rows.items():
            for name, run in runs.items():
                if name in row.cells:
                    continue

                def call(i: int, run: Run = run, given: Sequence[Inputs] = inputs[label]) -> object:
                    if which == "fwd":
                        return (forward(run, given[i]),)
                    return forward_backward(run, given[i], matrices)

                try:
                    timers[f"{label}/{name}"] = self._timers(call, len(inputs[label]), shared)
                    if name == "ours":
                        own[label] = f"{label}/{name}", call
                except Exception as error:  # noqa: BLE001 - the other cells are worth having
                    self._failed(row, name, error)
        timers["dense"] = self._dense(shared)
        timings = in_turn(timers, self._args.ms)
        for label, row in rows.items():
            row.dense = timings["dense"]
            for name in runs:
                if f"{label}/{name}" in timings:
                    row.cells[name] = timings[f"{label}/{name}"]
            if label in own:
                timer, plain = own[label]
                self._require_equal(row, timers[timer], plain)

    def _failed(self, row: Row, name: str, error: Exception) -> None:
        row.cells[name] = f"ERROR: {short(error)}"
        self.wrong += name == "ours"

    def _require_equal(self, row: Row, timer: Bursts, call: Callable[[int], object]) -> None:
        """What the last replay of ours wrote is what a plain call gives."""
        results: Any = getattr(timer, "results", None)
        if results is None:
            return
        try:
            timer.burst(0.0)  # others may have written where results of earlier replays lay
            plain: Any = call(0)
            if not all(torch.equal(a, b) for a, b in zip(results[0], plain, strict=True)):
                row.cells["ours"] = "WRONG: the replayed graph and a plain call give different results"
                self.wrong += 1
        except Exception as error:  # noqa: BLE001
            self._failed(row, "ours", error)

    def _dense(self, shared: Any) -> Bursts:
        size = DENSE if self._device == "cuda" else 16
        if self._dense_operands is None:
            a, b = (
                torch.empty(size, size, dtype=torch.bfloat16, device=self._device).normal_(generator=self._generator)
                for _ in range(2)
            )
            self._dense_operands = a, b
        a, b = self._dense_operands
        return self._timers(lambda i: torch.mm(a, b), 1, shared)

    def _compile(self, case: Case, run: Run, given: Sequence[Inputs], matrices: Matrices) -> bool:
        """Has torch.compile compile both passes of a case if it has not; whether they are compiled now."""
        if case.name in self._compiled:
            return True
        if not self.clock.may_compile:
            return False
        self.clock.say(f"torch.compile: {case.name}")
        for one in given:
            for tensor in (one.x, one.wide, one.weights, one.cotangent):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        start = time.monotonic()
        try:
            forward(run, given[0])
            forward_backward(run, given[0], matrices)
        except Exception as error:  # noqa: BLE001 - `check` meets it again and says so
            self.clock.say(f"torch.compile: {short(error)}")
        finally:  # what fails takes its time too
            self.clock.compiling += time.monotonic() - start
        self._compiled.add(case.name)
        return True

    # --------------------------------------------------------------------------------------------------- kernels

    def _kernels(self, case: Case, tokens: int) -> None:
        if not self._may_start(f"kernels: {case.name}, T = {tokens}"):
            return
        matrices, runs = self._runs(case)
        picks = make_picks(case, tokens, self._generator)
        load = load_of(case, picks)
        given = make_inputs(case, picks, self._generator)
        run = runs.get("ours") or ours(case, matrices, self._backend)
        problem = check(case, given, matrices, {"ours": run}).get("ours")
        if problem is not None:
            self.wrong += 1
            print(f"    ours: {problem}", flush=True)
            return
        recorded = record(case, given, matrices, self._backend)
        metadata = [one for launch, one in recorded if launch.is_metadata]

        def metadata_again(i: int) -> None:
            for one in metadata:
                one.again()

        calls: list[tuple[KernelRow, Callable[[int], object]]] = [
            (
                KernelRow.metadata(case, load, [launch for launch, _ in recorded if launch.is_metadata]),
                metadata_again,
            ),
            *((KernelRow.of(case, load, launch), lambda i, one=one: one.again()) for launch, one in recorded),
        ]
        shared = self._shared()
        timers: dict[str, Bursts] = {"dense": self._dense(shared)}
        for number, (row, call) in enumerate(calls):
            try:
                timers[str(number)] = self._timers(call, 1, shared)
            except Exception as error:  # noqa: BLE001
                row.cell = f"ERROR: {short(error)}"
                self.wrong += 1
        timings = in_turn(timers, self._args.ms / 2)
        for number, (row, _) in enumerate(calls):
            row.dense = timings["dense"]
            row.cell = timings.get(str(number), row.cell)
            self.kernels.append(row)
        print_kernels(self.kernels, self._machine)
        torch.cuda.empty_cache()

    # ---------------------------------------------------------------------------------------------------- memory

    def _memory(self, case: Case, tokens: int) -> None:
        if not self._may_start(f"memory: {case.name}, T = {tokens}"):
            return
        print_planned_memory([case], lambda case: [tokens], Target.parse(self._args.arch))
        matrices, runs = self._runs(case)
        given = make_inputs(case, make_picks(case, tokens, self._generator), self._generator)
        print(
            f"{'measured, MB':28}  {'saved':>8}  {'forward':>8}  {'fwd+bwd':>8}   fwd+bwd without gradients of matrices"
        )
        for name, run in runs.items():
            if name == "compile" and case.name not in self._compiled:
                continue
            try:
                found = _measured_memory(case, run, given, matrices)
            except Exception as error:  # noqa: BLE001
                print(f"{name:28}  ERROR: {short(error)}", flush=True)
                continue
            self.memory.append(
                {"section": "memory", "case": case.name, "tokens": tokens, "implementation": name} | found
            )
            said = ""
            if name == "ours" and (case.name, tokens) == ("qwen3", 16384):
                said = f"   goal: saved <= {SAVED_GOAL / 1e6:.0f}, {'met' if found['saved'] <= SAVED_GOAL else 'no'}"
            print(f"{name:28}  " + "  ".join(f"{found[k] / 1e6:8.1f}" for k in ("saved", "forward", "both")) + said)

    # ------------------------------------------------------------------------------------------------------ host

    def _host(self, case: Case) -> None:
        """Host time of a call of ours, with each launcher, beside transformers' and an operator of torch."""
        if not self._may_start("host"):
            return
        matrices, runs = self._runs(case)
        given = make_inputs(case, make_picks(case, _HOST_TOKENS, self._generator), self._generator)
        print(
            f"median microseconds of host time, {case.name}, T = {_HOST_TOKENS}; goal: inference <= {HOST_GOAL_US:.0f}"
        )
        print(f"{'':16}  {'inference':>9}  {'training':>9}  {'fwd+bwd':>9}")
        with torch.no_grad():
            plain = self._host_us(lambda: given.x * 2)
        print(f"{'x * 2':16}  {plain:9.1f}", flush=True)
        for name, launcher in (("ours, native", "native"), ("ours, python", "python"), ("hf", "")):
            if name.partition(",")[0] not in runs:
                continue
            try:
                with _launcher(launcher):
                    run = ours(case, matrices, self._backend) if launcher else runs["hf"]
                    times = {
                        "inference": self._host_us(partial(forward, run, given)),
                        "training": self._host_us(partial(run, given)),
                        "both": self._host_us(partial(forward_backward, run, given, matrices)),
                    }
            except Exception as error:  # noqa: BLE001
                print(f"{name:16}  ERROR: {short(error)}", flush=True)
                continue
            self.host.append({"section": "host", "case": case.name, "tokens": _HOST_TOKENS, "name": name} | times)
            verdict = ""
            if launcher == "native":
                verdict = "  met" if times["inference"] <= HOST_GOAL_US else "  no"
            print(f"{name:16}  " + "  ".join(f"{t:9.1f}" for t in times.values()) + verdict, flush=True)

    def _host_us(self, call: Callable[[], object]) -> float:
        return host_us(call, calls=300) if self._device == "cuda" else 1.0


@contextmanager
def _launcher(choice: str) -> Iterator[None]:
    before = os.environ.get(environment.LAUNCHER.name)
    os.environ[environment.LAUNCHER.name] = choice
    try:
        yield
    finally:
        if before is None:
            del os.environ[environment.LAUNCHER.name]
        else:
            os.environ[environment.LAUNCHER.name] = before


def _measured_memory(case: Case, run: Run, given: Inputs, matrices: Matrices) -> dict[str, float]:
    """Bytes above what was there: kept after forward besides the result, peak of forward, peak of both."""
    forward_backward(run, given, matrices)  # what is compiled and loaded now does not count
    on_gpu = given.x.device.type == "cuda"
    if not on_gpu:
        return {"saved": 0.0, "forward": 0.0, "both": 0.0}
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    hidden = run(given)
    torch.cuda.synchronize()
    saved = torch.cuda.memory_allocated() - before - hidden.numel() * hidden.element_size()
    peak = torch.cuda.max_memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    wanted = (given.x, given.weights, matrices.gate_up, matrices.down)
    gradients = torch.autograd.grad(hidden, wanted, given.cotangent)
    torch.cuda.synchronize()
    both = max(peak, torch.cuda.max_memory_allocated() - before) - case.matrix_bytes
    del gradients
    return {"saved": float(saved), "forward": float(peak), "both": float(both)}

"""Times experts: ours beside transformers' grouped_mm, as it is and under torch.compile, on one card in one run.

    python benchmarks/experts.py                     # everything, about 4 minutes
    python benchmarks/experts.py --quick             # qwen3, T = 16384: layer, kernels, live shares; no torch.compile
    python benchmarks/experts.py --rows --cases olmoe,mixtral --tokens 16384 --no-peers
    python benchmarks/experts.py --kernels           # each kernel of the launch list alone
    python benchmarks/experts.py --quick --no-peers --passes 'specialize{tile=mma}'   # other choices than the rules'
    python benchmarks/experts.py --live 1.0,0.5,0.125   # a share of the picks is here, the rest are sentinels
    python benchmarks/experts.py --skew              # even routing, all to one expert, popularity 1 / rank
    python benchmarks/experts.py --memory            # what is kept for backward; without a GPU what is planned
    python benchmarks/experts.py --host              # host time of a call
    python benchmarks/experts.py --check             # results only; without a GPU small sizes on the emulator
    python benchmarks/experts.py --dry-run           # floors and goals; needs no GPU
    python benchmarks/experts.py --resources         # registers, spills, occupancy through NVRTC; needs no GPU

moesaic has to be importable (``pip install -e .``), and transformers 5.17 for the peers. Sections may be combined;
those but ``--rows`` and ``--host`` take the first case at its largest number of tokens. Every result, peers' too, is
compared with float64 arithmetic in torch before it is timed: inference, training, and all gradients. One that is wrong
is reported as WRONG and not timed, and the exit code is 1. ``--check`` checks transformers' eager loop, too. Progress
goes to stderr.

Times are medians over replays of CUDA graphs (see ``timing.py``). All implementations of a row and a dense bf16 product
of 8192^3 are replayed in turn, in short bursts, for a card at its power limit drifts in seconds; ``+-`` is half of what
the middle 80 % of the bursts span. Inputs rotate; the matrices, which every call shares, are larger than the L2 cache
alone. Weights of picks are bf16 and want a gradient; ours gets int32 picks, peers int64, as either's router makes them.
fwd+bwd gives the gradients of x, of the weights, and of both matrices. What the last replay wrote is compared with a
plain call. torch.compile compiles a case once, with the number of tokens dynamic; after ``--compile-budget`` seconds
cells say ``skipped``. Nothing is started after ``--budget`` seconds.

Columns: ``rows`` live rows of an expert on average, ``max`` the longest over the mean; ``TF/s`` FLOPs of live rows over
time (6 R H I forward, three times that for fwd+bwd); ``dense`` the same of the dense product of the rotation; ``share``
the one over the other; ``floor`` the larger of FLOPs at that rate and bytes at the rate of a copy kernel of this run
(formulas in ``experts_bounds.py``), ``by`` which; ``of floor`` floor over time of ours; ``x`` a peer's time over
ours; ``to 1st`` time of ours over that of the section's first line. Times of layers are milliseconds, of kernels
microseconds. Goals are those of the project for an H100; ``expect`` is what a kernel was expected to reach.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from compiled import needs_of
from experts_bounds import NOMINAL_DENSE
from experts_cases import (
    CASES,
    ROUTINGS,
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
    short,
    transformers,
)
from experts_kernels import KINDS, distinct_launches, executable_of, launches_of, record
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
    line,
    print_kernels,
    print_rows,
)
from timing import (
    Bursts,
    GraphTimer,
    Machine,
    Shared,
    commit,
    host_us,
    in_turn,
    measure_machine,
)
from torch import Tensor

from moesaic.codegen.target import Target
from moesaic.ir import environment
from moesaic.runtime.memory import memory_of

TOKENS = {"qwen3": (16384, 4096, 512), "olmoe": (16384, 4096), "mixtral": (16384, 512), "deepseek": (16384, 4096)}
IMPLEMENTATIONS = ("ours", "hf", "compile")
SECTIONS = ("rows", "kernels", "live", "skew", "memory", "host")
PASSES = ("fwd", "fwd+bwd")
SHARES = (1.0, 0.5, 0.125)
_HOST_TOKENS = 16
_EMULATED_TOKENS = 37
_MOST_RESULTS = 4e9  # bytes of gradients of one set, above which there is one set only


# ------------------------------------------------------------------------------------------------------------ options


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    names = [c.name for c in CASES]
    p = argparse.ArgumentParser(
        prog="experts.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--cases", type=_some_of("case", names), default=None, help=f"of {', '.join(names)}")
    p.add_argument("--tokens", type=_numbers(int, 1, 2**24), default=None, help="default: those of the case")
    p.add_argument("--only", type=_some_of("implementation", IMPLEMENTATIONS), default=None,
                   help="of ours, hf, compile")  # fmt: skip
    p.add_argument(
        "--passes",
        default="",
        metavar="PASSES",
        help="options of passes that ours is compiled with, e.g. 'specialize{tile=cooperative}'",
    )
    p.add_argument("--no-peers", action="store_true", help="the same as --only ours")
    p.add_argument(
        "--quick", action="store_true", help="qwen3 at T = 16384: rows, kernels, live; without torch.compile"
    )
    p.add_argument("--compile-budget", type=float, default=75.0, metavar="SECONDS", help="for torch.compile")
    p.add_argument("--budget", type=float, default=None, metavar="SECONDS",
                   help="the whole run, 0 for no limit (default: 240; quick 60)")  # fmt: skip
    p.add_argument("--ms", type=float, default=None, help="milliseconds of replays for one number (default: 150)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", metavar="FILE", help="write all numbers there, whatever ends the run")
    p.add_argument("--arch", default="sm_90a", help="target of the views that need no GPU (default: sm_90a)")
    sections = p.add_argument_group("sections (default: all)")
    sections.add_argument("--rows", action="store_true", help="layers, forward and fwd+bwd")
    sections.add_argument("--kernels", action="store_true", help="each kernel alone")
    sections.add_argument("--live", type=_numbers(float, 0.0, 1.0), nargs="?", const=list(SHARES), default=None,
                          metavar="SHARES", help="shares of picks that are here (default: 1.0,0.5,0.125)")  # fmt: skip
    sections.add_argument("--skew", action="store_true", help=", ".join(ROUTINGS))
    sections.add_argument("--memory", action="store_true", help="bytes kept for backward")
    sections.add_argument("--host", action="store_true", help="host time of a call")
    mode = p.add_mutually_exclusive_group()
    mode.add_argument("--dry-run", action="store_true", help="floors and goals alone")
    mode.add_argument("--resources", action="store_true", help="registers, spills, shared memory, occupancy")
    mode.add_argument("--check", action="store_true", help="check results, time nothing")
    args = p.parse_args(arguments)
    args.sections = [s for s in SECTIONS if getattr(args, s)]
    if not args.sections:
        args.sections = ["rows", "kernels", "live"] if args.quick else list(SECTIONS)
    args.live = args.live or list(SHARES)
    if args.quick:
        args.cases, args.tokens = args.cases or ["qwen3"], args.tokens or [16384]
    args.cases = [replace(c, passes=args.passes) for c in CASES if args.cases is None or c.name in args.cases]
    if args.only is None:
        args.only = ["ours"] if args.no_peers else ["ours", "hf"] if args.quick else list(IMPLEMENTATIONS)
    if args.budget is None:
        args.budget = 60.0 if args.quick else 240.0
    if args.ms is None:
        args.ms = 100.0 if args.quick else 150.0
    return args


def _some_of(what: str, known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        asked = text.split(",")
        for name in asked:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown {what} {name!r}; known: {', '.join(known)}")
        return [name for name in known if name in asked]

    return parse


def _numbers(kind: Callable[[str], Any], least: float, most: float) -> Callable[[str], list[Any]]:
    def parse(text: str) -> list[Any]:
        try:
            found = [kind(t) for t in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers") from None
        if not all(least <= n <= most for n in found):
            raise argparse.ArgumentTypeError(f"numbers must be from {least} to {most}, found {text}")
        return found

    return parse


def tokens_of(args: argparse.Namespace, case: Case) -> list[int]:
    """Numbers of tokens of a case."""
    return list(args.tokens or TOKENS[case.name])


# ------------------------------------------------------------------------------------------------------------ timing


class Clock:
    """The run's time and what of it torch.compile has taken."""

    def __init__(self, budget: float, compile_budget: float) -> None:
        self._start = time.monotonic()
        self._budget = budget
        self._compile_budget = compile_budget
        self.compiling = 0.0

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    @property
    def over(self) -> bool:
        return 0 < self._budget <= self.elapsed

    @property
    def may_compile(self) -> bool:
        return self.compiling < self._compile_budget and not self.over

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"[{self.elapsed:6.1f} s] {text}", file=sys.stderr, flush=True)


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


def run_timing(args: argparse.Namespace) -> int:
    """The sections."""
    if "compile" in args.only:
        for name in ("recompile_limit", "cache_size_limit", "accumulated_recompile_limit"):
            if hasattr(torch._dynamo.config, name):
                setattr(torch._dynamo.config, name, 1024)  # the cases share their code, which counts as recompiling
    print("measuring the copy kernel", file=sys.stderr, flush=True)
    machine = measure_machine()
    print_machine(machine)
    bench = Bench(args, machine)
    try:
        bench.run()
    finally:
        write_json(args, machine, bench)
    return summarise(bench)


def summarise(bench: Bench) -> int:
    """The last lines, and the exit code."""
    print(f"\n{bench.clock.elapsed:.0f} s, {bench.clock.compiling:.0f} s of them torch.compile")
    if bench.not_started:
        print(f"not measured, --budget is spent: {'; '.join(bench.not_started)}")
    if bench.wrong:
        print(f"{bench.wrong} results are wrong or failed")
    return 1 if bench.wrong else 0


def print_machine(machine: Machine) -> None:
    """Where the numbers are from."""
    print(machine)
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, commit {commit()}", flush=True)


def write_json(args: argparse.Namespace, machine: Machine, bench: Bench) -> None:
    """All numbers, where asked for."""
    if not args.json:
        return
    about = {"torch": torch.__version__, "cuda": torch.version.cuda, "commit": commit()}
    rows = [*(r.as_dict(machine) for r in bench.rows), *(k.as_dict(machine) for k in bench.kernels)]
    with open(args.json, "w", encoding="utf-8") as file:
        json.dump({"machine": asdict(machine) | about, "rows": [*rows, *bench.memory, *bench.host]}, file, indent=1)


# ------------------------------------------------------------------------------------------------------- other modes


def run_dry(args: argparse.Namespace) -> int:
    """Floors and goals, at the nominal rate of a dense product and, without a GPU, of a copy kernel."""
    machine = measure_machine() if torch.cuda.is_available() else Machine()
    print_machine(machine)
    print(f"dense bf16 product: {NOMINAL_DENSE / 1e12:.0f} TFLOP/s, assumed")
    generator = torch.Generator().manual_seed(args.seed)
    target = Target.parse(args.arch)
    rows = [
        Row("rows", case, tokens, which, "random", load_of(case, picks), GOALS.get((case.name, tokens, which)))
        for case in args.cases
        for tokens in tokens_of(args, case)
        for picks in [make_picks(case, tokens, generator)]
        for which in PASSES
    ]
    print("\nExperts")
    print_rows(rows, machine, header=True)
    first = args.cases[0]
    tokens = max(tokens_of(args, first))
    load = load_of(first, make_picks(first, tokens, generator))
    launches = distinct_launches(first, target, tokens)
    print("\nKernels alone")
    metadata = KernelRow.metadata(first, load, [launch for launch in launches if launch.is_metadata])
    print_kernels([metadata, *(KernelRow.of(first, load, launch) for launch in launches)], machine)
    print("\nMemory")
    print_planned_memory(args.cases, lambda case: tokens_of(args, case), target)
    return 0


def print_planned_memory(cases: Sequence[Case], tokens_of: Callable[[Case], Sequence[int]], target: Target) -> None:
    """What plans of ours allocate."""
    print(
        f"{'planned, MB':12}  {'T':>5}  {'saved':>8}  {'least':>8}  {'workspace':>9}  {'of bwd':>8}  "
        "least: h; x is the caller's"
    )
    for case in cases:
        for tokens in tokens_of(case):
            planned = memory_of(case.program, target.name, tokens)
            least = 4 * tokens * case.top_k * case.intermediate
            numbers = (planned.saved, least, planned.workspace, planned.backward_workspace)
            saved, kept, workspace, backward = (n / 1e6 for n in numbers)
            goal = ""
            if (case.name, tokens) == ("qwen3", 16384):
                goal = f"  goal: <= {SAVED_GOAL / 1e6:.0f}, {'met' if planned.saved <= SAVED_GOAL else 'no'} by plan"
            print(
                f"{case.name:12}  {tokens:5}  {saved:8.1f}  {kept:8.1f}  {workspace:9.1f}  {backward:8.1f}{goal}",
                flush=True,
            )


def run_check(args: argparse.Namespace) -> int:
    """Results of all implementations: on the GPU, or in small, ours on the emulator."""
    gpu = torch.cuda.is_available()
    generator = torch.Generator(device="cuda" if gpu else "cpu").manual_seed(args.seed)
    clock = Clock(0, 0)
    wrong = 0
    for case in args.cases if gpu else [case.small for case in args.cases]:
        matrices = make_matrices(case, generator)
        runs = {"ours": ours(case, matrices, "cuda" if gpu else "emulate")}
        if "hf" in args.only:
            runs["hf"] = transformers(case, matrices, "grouped_mm")
            runs["eager"] = transformers(case, matrices, "eager")
        for tokens in tokens_of(args, case) if gpu else [_EMULATED_TOKENS]:
            for routing in (*ROUTINGS, "spread", "local"):
                clock.say(f"{case.name}, T = {tokens}, {routing}")
                picks = make_picks(case, tokens, generator, routing if routing in ROUTINGS else "random")
                if routing not in ROUTINGS:
                    picks = keep_share(case, picks, 0.25, routing, generator)
                # transformers' loop knows no pick that is not here.
                asked = {n: r for n, r in runs.items() if n != "eager" or routing in ROUTINGS}
                problems = check(case, make_inputs(case, picks, generator), matrices, asked)
                wrong += sum(name == "ours" or said.startswith("WRONG") for name, said in problems.items())
                said = ", ".join(f"{name} {problems.get(name, 'right')}" for name in asked)
                sizes = f"{case.hidden}/{case.intermediate}/{case.experts}/{case.top_k}"
                print(f"{case.name:8}  {sizes:16}  {tokens:5}  {routing:7}  {said}", flush=True)
    return 1 if wrong else 0


_NEEDS = (
    ("case", -8), ("T", -4), ("of", -8), ("kernel", -16), ("as", -24), ("threads", 7), ("regs", 4), ("spills", 6),
    ("stack", 5), ("shared", 6), ("blocks/SM", 9), ("warps", 5), ("SASS", 5), ("MMA", 4), ("", -12),
)  # fmt: skip


def run_resources(args: argparse.Namespace) -> int:
    """What each kernel needs of the hardware, compiled here; fails if one uses local memory."""
    target = Target.parse(args.arch)
    print(
        f"target {target}; SASS and MMA: instructions and matrix products in the text of the kernel, loops counted once"
    )
    print(line([name for name, _ in _NEEDS], _NEEDS))
    local = 0
    for case in args.cases:
        known: set[str] = set()
        for bucket, tokens in (("many", None), ("few", 1)):
            for kind in KINDS:
                for launch in launches_of(kind, executable_of(case, kind, target, tokens=tokens)):
                    if launch.kernel.source in known:  # the same for inference and training, for few and many
                        continue
                    known.add(launch.kernel.source)
                    needs = needs_of(launch.kernel, target)
                    used = needs.used
                    local += used.uses_local_memory
                    cells = [
                        case.name,
                        bucket,
                        kind,
                        launch.name,
                        launch.tile,
                        launch.kernel.threads,
                        used.registers,
                        used.spill_store_bytes + used.spill_load_bytes,
                        used.stack_bytes,
                        needs.shared_bytes,
                        needs.blocks,
                        f"{needs.warps:.0%}",
                        needs.count(),
                        needs.count("HMMA", "HGMMA"),
                        "LOCAL MEMORY" if used.uses_local_memory else "",
                    ]
                    print(line([str(c) for c in cells], _NEEDS), flush=True)
    print(f"{local} kernels use local memory")
    return 1 if local else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the mode asked for; gives the exit code."""
    args = parse_arguments(arguments)
    if args.dry_run:
        return run_dry(args)
    if args.resources:
        return run_resources(args)
    if args.check:
        return run_check(args)
    if torch.cuda.is_available():
        return run_timing(args)
    if args.sections == ["memory"]:
        print_planned_memory(args.cases, lambda case: tokens_of(args, case), Target.parse(args.arch))
        return 0
    print("no GPU: use --dry-run, --resources, --check or --memory", file=sys.stderr)
    return 3


if __name__ == "__main__":
    sys.exit(main())

"""Times routers: ours, eager torch and torch.compile, forward and forward + backward, on one card in one run.

    python benchmarks/router.py                      # everything, about 6 minutes
    python benchmarks/router.py --quick              # bf16 at two sizes, torch.compile for one case; about 90 s
    python benchmarks/router.py --no-peers --cases 128x8,512x10 --tokens 65536 --outputs dense
    python benchmarks/router.py --json results.json  # all numbers; the table is long, so redirect it too
    python benchmarks/router.py --no-peers --cases 512x10 --variants 'specialize{listed=4};specialize{listed=8}'
    python benchmarks/router.py --host --cases 128x8,256x8-groups --outputs compact   # host time of a call instead
    python benchmarks/router.py --check              # results only; without a GPU few tokens on the emulator
    python benchmarks/router.py --dry-run            # floors and bounds; needs no GPU
    python benchmarks/router.py --resources          # registers, spills, occupancy through NVRTC; needs no GPU

moesaic has to be importable (``pip install -e .``). Every result of ours is checked against the eager peer and against
float64 arithmetic before it is timed; one that is wrong is reported as WRONG and not timed, and the exit code is 1.

Times are medians over replays of CUDA graphs that go round input sets (see ``timing.py``). Ours is timed before and
after the peers of its row, and the two samples are one: ``+-`` is half of what the middle 80 % of it spans. What the
last replay wrote is compared with a plain call. torch.compile compiles a case once, with the number of tokens dynamic;
after ``--compile-budget`` seconds spent on that, the cells of cases not compiled yet say ``skipped``. Nothing is
started after ``--budget`` seconds.

``--variants`` times each case as it is and with options of passes in place of the compiler's choices, side by side in
one run; the last column numbers them.

Columns: ``B/token`` fewest bytes of device memory a token; ``floor`` their time at the bandwidth of a copy kernel
measured in this run; ``issue`` and ``shuffle`` estimates from below of the time for instructions and shuffles (formulas
in ``router_bounds.py``); ``of floor`` floor over time of ours, ``of bound`` the same for the largest of floor, issue,
shuffle and launches; ``x`` a peer's time over ours. ``data``: inputs and outputs of the rotation exceed the L2 cache
(memory) or not (L2: the floor says little there). Where the data of a single call fits, backward finds the logits in
the cache, and ``of floor`` of fwd+bwd can exceed 100 %. Times are microseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from compiled import needs_of
from router_bounds import Bounds, Work, bounds, bytes_per_token, total_work
from router_cases import (
    CASES,
    DTYPES,
    OUTPUTS,
    Case,
    Inputs,
    Route,
    WrongResult,
    check,
    forward,
    forward_backward,
    make_bias,
    make_inputs,
)
from timing import GraphTimer, Machine, Timing, commit, driver_version, host_us, measure_machine, sets_for, summary
from torch import Tensor

from moesaic.codegen.target import Target
from moesaic.ir import environment
from moesaic.ir.core import Op
from moesaic.ir.errors import MoesaicError
from moesaic.ir.ops.launch import Kernel
from moesaic.passes.manager import parse_pipeline
from moesaic.runtime.program import Executable, Program, program_of

TOKENS = (65536, 16384, 4096, 256)
IMPLEMENTATIONS = ("ours", "eager", "compile")
PASSES: dict[str, Callable[[Route, Inputs, Tensor | None], tuple[Tensor, ...]]] = {
    "fwd": forward,
    "fwd+bwd": forward_backward,
}
_KINDS = {"fwd": ("forward",), "fwd+bwd": ("training", "backward")}
_EMULATED_TOKENS = 37


# ------------------------------------------------------------------------------------------------------------ options


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    names = [c.name for c in CASES]
    p = argparse.ArgumentParser(
        prog="router.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--cases", type=_some_of("case", names), default=names, help=f"of {', '.join(names)}")
    p.add_argument("--tokens", type=_integers, default=None, help="default: " + ",".join(map(str, TOKENS)))
    p.add_argument("--dtype", type=_some_of("dtype", list(DTYPES)), default=None, help="bf16,f32 (default: both)")
    p.add_argument("--outputs", type=_some_of("outputs", list(OUTPUTS)), default=list(OUTPUTS), help="dense,compact")
    p.add_argument("--only", type=_some_of("implementation", list(IMPLEMENTATIONS)), default=list(IMPLEMENTATIONS),
                   help="of ours, eager, compile")  # fmt: skip
    p.add_argument("--no-peers", action="store_true", help="the same as --only ours")
    p.add_argument("--quick", action="store_true", help="bf16, 65536 and 4096 tokens; torch.compile for 128x8 dense")
    p.add_argument("--compile-budget", type=float, default=None, metavar="SECONDS",
                   help="compiling by torch.compile (default: 120; quick 35)")  # fmt: skip
    p.add_argument("--budget", type=float, default=None, metavar="SECONDS",
                   help="the whole run, 0 for no limit (default: 345; quick 85)")  # fmt: skip
    p.add_argument("--ms", type=float, default=25.0, help="milliseconds of replays for one sample (default: 25)")
    p.add_argument("--variants", type=_variants, default=[""], metavar="PASSES;...",
                   help="passes with options, for ours: 'specialize{lanes=8};sink-gathers{sparse=0}'")  # fmt: skip
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", metavar="FILE", help="write all numbers there, whatever ends the run")
    p.add_argument("--arch", default=None, help="target of the views that need no GPU (default: sm_90a)")
    mode = p.add_mutually_exclusive_group()
    mode.add_argument("--dry-run", action="store_true", help="floors and bounds alone")
    mode.add_argument("--resources", action="store_true", help="registers, spills, shared memory, occupancy")
    mode.add_argument("--host", action="store_true", help="host time of a call")
    mode.add_argument("--check", action="store_true", help="check results, time nothing")
    args = p.parse_args(arguments)
    if args.no_peers:
        args.only = ["ours"]
    args.tokens = args.tokens or ([65536, 4096] if args.quick else list(TOKENS))
    args.dtype = args.dtype or (["bf16"] if args.quick else list(DTYPES))
    if args.compile_budget is None:
        args.compile_budget = 35.0 if args.quick else 120.0
    if args.budget is None:
        args.budget = 85.0 if args.quick else 345.0
    return args


def _some_of(what: str, known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        asked = text.split(",")
        for name in asked:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown {what} {name!r}; known: {', '.join(known)}")
        return [name for name in known if name in asked]

    return parse


def _variants(text: str) -> list[str]:
    found = [""]
    for passes in text.split(";"):
        try:
            parse_pipeline(passes)
        except MoesaicError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        found.append(passes)
    return found


def _integers(text: str) -> list[int]:
    try:
        found = [int(t) for t in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers") from None
    if min(found) < 1:
        raise argparse.ArgumentTypeError("tokens must be at least 1")
    return found


# --------------------------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class Variant:
    """A case in one dtype with one kind of outputs: what is compiled once and run at several numbers of tokens."""

    case: Case
    dtype: str
    outputs: str
    passes: str = ""
    number: int = 0

    def __str__(self) -> str:
        return f"{self.case.name} {self.dtype} {self.outputs}" + (f" [{self.passes}]" if self.passes else "")

    @property
    def program(self) -> Program:
        """What moesaic makes of it; the one that the layer runs."""
        return program_of(self.case.module(self.outputs, self.dtype), self.passes)

    def executable(self, kind: str, target: Target) -> Executable:
        """``forward``, ``training`` or ``backward``, for aligned inputs, as the layer asks for it."""
        cotangents = (OUTPUTS[self.outputs][0],) if kind == "backward" else ()
        return self.program.executable(kind, target.name, (), cotangents)

    def bytes_per_token(self, which: str) -> int:
        """Of one pass: ``fwd`` or ``fwd+bwd``."""
        one, other = bytes_per_token(
            self.case.experts, self.case.top_k, DTYPES[self.dtype].itemsize, self.outputs == "dense"
        )
        return one if which == "fwd" else one + other

    def bounds(self, which: str, tokens: int, machine: Machine, target: Target) -> Bounds:
        """Of one pass."""
        kernels = [op for kind in _KINDS[which] for op in _kernel_ops(self.executable(kind, target))]
        work: Work = total_work(kernels)
        return bounds(machine, tokens, self.bytes_per_token(which), work, launches=len(kernels))


@dataclass
class Row:
    """One pass of a variant at one number of tokens, with the cell of each implementation: a timing, or a reason."""

    variant: Variant
    tokens: int
    which: str
    bounds: Bounds
    cold: bool = True
    sets: int = 0
    cells: dict[str, Timing | str] = field(default_factory=dict)

    def us(self, implementation: str) -> float | None:
        """A time, if there is one."""
        cell = self.cells.get(implementation)
        return cell.us if isinstance(cell, Timing) else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        case = self.variant.case
        ours = self.us("ours")
        return {
            "case": case.name,
            "experts": case.experts,
            "top_k": case.top_k,
            "dtype": self.variant.dtype,
            "outputs": self.variant.outputs,
            "passes": self.variant.passes,
            "tokens": self.tokens,
            "pass": self.which,
            "bytes_per_token": self.bounds.bytes_per_token,
            "floor_us": self.bounds.memory_us,
            "issue_us": self.bounds.issue_us,
            "shuffle_us": self.bounds.shuffle_us,
            "launch_us": self.bounds.launch_us,
            "bound_by": self.bounds.limit,
            "warp_instructions_per_token": self.bounds.work.instructions,
            "shuffles_per_token": self.bounds.work.shuffles,
            "sets": self.sets,
            "data": "memory" if self.cold else "L2",
            "of_floor": self.bounds.memory_us / ours if ours else None,
            "of_bound": self.bounds.us / ours if ours else None,
            **{name: asdict(c) if isinstance(c, Timing) else c for name, c in self.cells.items()},
        }


def variants(args: argparse.Namespace) -> Iterator[Variant]:
    """In the order in which they matter, so that what runs out of time is what matters least."""
    for dtype in args.dtype:
        for outputs in args.outputs:
            for case in CASES:
                if case.name in args.cases:
                    for number, passes in enumerate(args.variants):
                        yield Variant(case, dtype, outputs, passes, number)


def _kernel_ops(executable: Executable) -> list[Kernel]:
    ops: list[Op] = list(executable.module.entry.body.ops)
    return [op for op in ops if isinstance(op, Kernel)]


_WIDTHS = (
    ("case", -12), ("dtype", -5), ("outputs", -7), ("T", 5), ("pass", -7), ("B/token", 7), ("floor", 7), ("issue", 7),
    ("shuffle", 7), ("ours", 8), ("+-", 5), ("of floor", 8), ("of bound", 8), ("eager", 8), ("x", 6), ("compile", 8),
    ("x", 6), ("data", -6), ("variant", -7),
)  # fmt: skip


def print_header() -> None:
    """Names of the columns."""
    print(_line([name for name, _ in _WIDTHS]))


def print_row(row: Row) -> None:
    """One line of the table."""
    found, ours = row.bounds, row.us("ours")
    mine = row.cells.get("ours", "-")
    cells = [
        row.variant.case.name,
        row.variant.dtype,
        row.variant.outputs,
        str(row.tokens),
        row.which,
        f"{found.bytes_per_token:.0f}",
        _number(found.memory_us),
        _number(found.issue_us),
        _number(found.shuffle_us),
        _number(mine.us) if isinstance(mine, Timing) else mine.partition(":")[0],
        f"{50 * mine.spread:.1f}%" if isinstance(mine, Timing) else "-",
        f"{found.memory_us / ours:.0%}" if ours else "-",
        f"{found.us / ours:.0%}" if ours else "-",
    ]
    for name in ("eager", "compile"):
        cell, peer = row.cells.get(name, "-"), row.us(name)
        cells.append(_number(peer) if peer is not None else str(cell).partition(":")[0])
        cells.append(f"{peer / ours:.1f}x" if peer is not None and ours else "-")
    cells.append(("memory" if row.cold else "L2") if row.sets else "-")
    cells.append(str(row.variant.number) if row.variant.number else "")
    print(_line(cells), flush=True)
    for name, cell in row.cells.items():
        if isinstance(cell, str) and ":" in cell:
            print(f"    {name}: {cell}", flush=True)


def _line(cells: Sequence[str]) -> str:
    return "  ".join(
        c.ljust(-width) if width < 0 else c.rjust(width) for c, (_, width) in zip(cells, _WIDTHS, strict=True)
    ).rstrip()


def _number(us: float) -> str:
    return f"{us:.2f}" if us < 100 else f"{us:.1f}" if us < 1000 else f"{us:.0f}"


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
        return bool(self._budget) and self.elapsed > self._budget

    @property
    def may_compile(self) -> bool:
        return self.compiling < self._compile_budget and not self.over


class Bench:
    """Runs the variants on the first GPU."""

    def __init__(self, args: argparse.Namespace, machine: Machine, target: Target) -> None:
        self._args = args
        self._machine = machine
        self._target = target
        self._clock = Clock(args.budget, args.compile_budget)
        self._generator = torch.Generator(device="cuda").manual_seed(args.seed)
        self._compiled: set[str] = set()
        self.rows: list[Row] = []
        self.wrong = 0
        self.not_started = 0

    @property
    def seconds(self) -> float:
        return self._clock.elapsed

    @property
    def compile_seconds(self) -> float:
        return self._clock.compiling

    def run(self) -> None:
        """All variants; prints each row as it is known."""
        print_header()
        for variant in variants(self._args):
            routes = self._routes(variant)
            for tokens in self._args.tokens:
                if self._clock.over:
                    self.not_started += len(PASSES)
                else:
                    self._variant_at(variant, tokens, routes)
                torch.cuda.empty_cache()

    def _routes(self, variant: Variant) -> dict[str, Route]:
        case, outputs = variant.case, variant.outputs
        made: dict[str, Route] = {}
        if "ours" in self._args.only:
            made["ours"] = case.ours(outputs, variant.dtype, "cuda", variant.passes)
        if "eager" in self._args.only:
            made["eager"] = case.eager(outputs)
        if "compile" in self._args.only and (not self._args.quick or (case.name, outputs) == ("128x8", "dense")):
            made["compile"] = torch.compile(case.eager(outputs))
        return made

    def _variant_at(self, variant: Variant, tokens: int, routes: dict[str, Route]) -> None:
        case, outputs = variant.case, variant.outputs
        sets, cold = sets_for(tokens * variant.bytes_per_token("fwd"), self._machine.l2_bytes)
        bias = make_bias(case, self._generator)
        inputs = [make_inputs(case, outputs, variant.dtype, tokens, self._generator) for _ in range(sets)]
        problem = self._problem(case, outputs, routes["ours"], inputs[0], bias) if "ours" in routes else ""
        for which in PASSES:
            found = variant.bounds(which, tokens, self._machine, self._target)
            row = Row(variant, tokens, which, found, cold, sets)
            if problem:
                row.cells["ours"] = problem
            self._time(row, {k: v for k, v in routes.items() if k != "ours" or not problem}, inputs, bias)
            self.rows.append(row)
            print_row(row)

    def _problem(self, case: Case, outputs: str, ours: Route, inputs: Inputs, bias: Tensor | None) -> str:
        """Empty if the result of ours is right."""
        try:
            check(case, outputs, ours, inputs, bias)
        except WrongResult as error:
            self.wrong += 1
            return f"WRONG: {error}"
        except Exception as error:  # noqa: BLE001 - the other rows are worth having
            self.wrong += 1
            return f"ERROR: {_short(error)}"
        return ""

    def _time(self, row: Row, routes: dict[str, Route], inputs: list[Inputs], bias: Tensor | None) -> None:
        ours: GraphTimer | None = None
        samples: list[float] = []
        run = PASSES[row.which]
        for name, route in routes.items():
            try:
                if name == "compile" and not self._compile(row, route, inputs, bias):
                    row.cells[name] = "skipped"
                    continue

                def call(i: int, route: Route = route) -> object:
                    return run(route, inputs[i], bias)

                timer = GraphTimer(call, len(inputs))
                if name == "ours":
                    ours = timer
                    samples = timer.sample(self._args.ms)
                    _require_equal(timer.results[0], call(0))
                else:
                    row.cells[name] = timer.time(self._args.ms)
                del timer
            except Exception as error:  # noqa: BLE001 - whatever fails in a peer, or in ours, becomes its cell
                kind = "WRONG" if isinstance(error, WrongResult) else "ERROR"
                row.cells[name] = f"{kind}: {_short(error)}"
                if name == "ours":
                    self.wrong += 1
                    ours = None
        if ours is not None:
            if len(routes) > 1:
                samples += ours.sample(self._args.ms)
            row.cells["ours"] = summary(samples, ours.calls)

    def _compile(self, row: Row, route: Route, inputs: list[Inputs], bias: Tensor | None) -> bool:
        """Has torch.compile compile the pass if it has not; whether it is compiled now."""
        key = f"{row.variant} {row.which}"
        if key not in self._compiled and not self._clock.may_compile:
            return False
        for one in inputs:
            for tensor in (one.logits, one.leaf, one.cotangent):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        start = time.monotonic()
        try:
            PASSES[row.which](route, inputs[0], bias)
            torch.cuda.synchronize()
        finally:  # what fails takes its time too
            self._clock.compiling += time.monotonic() - start
        self._compiled.add(key)
        return True


def _require_equal(replayed: object, plain: object) -> None:
    assert isinstance(replayed, tuple) and isinstance(plain, tuple)
    if not all(torch.equal(one, other) for one, other in zip(replayed, plain, strict=True)):
        raise WrongResult("the replayed graph and a plain call give different results")


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:200]


def run_timing(args: argparse.Namespace, target: Target) -> int:
    """The table."""
    if "compile" in args.only:
        for name in ("recompile_limit", "cache_size_limit", "accumulated_recompile_limit"):
            if hasattr(torch._dynamo.config, name):
                setattr(torch._dynamo.config, name, 1024)  # the cases share their code, which counts as recompiling
    machine = measure_machine()
    machine.print()
    bench = Bench(args, machine, target)
    try:
        bench.run()
    finally:
        write_json(args, machine, bench.rows)
    print(f"{len(bench.rows)} rows in {bench.seconds:.0f} s, {bench.compile_seconds:.0f} s of them torch.compile")
    if bench.not_started:
        print(f"{bench.not_started} rows were not measured: --budget is spent")
    if bench.wrong:
        print(f"{bench.wrong} results of ours are wrong or failed")
    return 1 if bench.wrong else 0


def write_json(args: argparse.Namespace, machine: Machine, rows: Sequence[Row]) -> None:
    """All rows, where asked for."""
    if not args.json:
        return
    with open(args.json, "w", encoding="utf-8") as file:
        json.dump({"machine": machine.as_dict(), "rows": [r.as_dict() for r in rows]}, file, indent=1)


# ------------------------------------------------------------------------------------------------------- other modes


def run_dry(args: argparse.Namespace, target: Target) -> int:
    """Floors and bounds: of this card if there is one, else of a nominal one."""
    machine = measure_machine() if torch.cuda.is_available() else Machine()
    machine.print()
    print_header()
    rows = []
    for variant in variants(args):
        for tokens in args.tokens:
            for which in PASSES:
                rows.append(Row(variant, tokens, which, variant.bounds(which, tokens, machine, target)))
                print_row(rows[-1])
    write_json(args, machine, rows)
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Results of ours: on the GPU, or on the emulator with few tokens."""
    gpu = torch.cuda.is_available()
    generator = torch.Generator(device="cuda" if gpu else "cpu").manual_seed(args.seed)
    wrong = 0
    for variant in variants(args):
        case, outputs = variant.case, variant.outputs
        route = case.ours(outputs, variant.dtype, "cuda" if gpu else "emulate", variant.passes)
        for tokens in args.tokens if gpu else [_EMULATED_TOKENS]:
            said = "right"
            try:
                inputs = make_inputs(case, outputs, variant.dtype, tokens, generator)
                check(case, outputs, route, inputs, make_bias(case, generator))
            except WrongResult as error:
                said = f"WRONG: {error}"
            except (MoesaicError, RuntimeError) as error:
                said = f"ERROR: {_short(error)}"
            wrong += said != "right"
            print(f"{variant!s:26}  {tokens:5}  {said}", flush=True)
    return 1 if wrong else 0


_HOST = {"ours, native": "native", "ours, python": "python", "eager": ""}
"""Rows of the table of host times, with the launcher of each."""


def run_host(args: argparse.Namespace) -> int:
    """Host time of a call of ours, with each launcher, next to operators of torch, at the smallest number of tokens."""
    print(f"{torch.cuda.get_device_name(0)}, driver {driver_version()}; torch {torch.__version__}, commit {commit()}")
    generator = torch.Generator(device="cuda").manual_seed(args.seed)
    tokens = min(args.tokens)
    print(f"median microseconds of host time of 1000 calls, T = {tokens}")
    print(f"{'':36}  {'inference':>9}  {'training':>9}  {'fwd+bwd':>9}")
    x = torch.randn(tokens, 128, device="cuda", generator=generator)
    leaf, ones = x.clone().requires_grad_(), torch.ones_like(x)
    with torch.no_grad():
        allocation, plain = host_us(lambda: torch.empty_like(x)), host_us(lambda: x * 2)
    both = host_us(lambda: torch.autograd.grad(leaf * 2, leaf, ones))
    print(f"{'torch.empty_like(x)':36}  {allocation:9.1f}")
    print(f"{'x * 2':36}  {plain:9.1f}  {host_us(lambda: leaf * 2):9.1f}  {both:9.1f}", flush=True)
    for variant in variants(args):
        case, outputs = variant.case, variant.outputs
        inputs = make_inputs(case, outputs, variant.dtype, tokens, generator)
        bias = make_bias(case, generator)
        for name, launcher in _HOST.items():
            if name.partition(",")[0] in args.only:
                with _launcher(launcher):
                    route = case.ours(outputs, variant.dtype, "cuda") if launcher else case.eager(outputs)
                    times = _host_times(route, inputs, bias)
                print(f"{variant!s:22} {name:12}  " + "  ".join(f"{t:9.1f}" for t in times), flush=True)
    return 0


@contextmanager
def _launcher(choice: str) -> Iterator[None]:
    before = os.environ.get(environment.LAUNCHER.name, "")
    os.environ[environment.LAUNCHER.name] = choice
    try:
        yield
    finally:
        os.environ[environment.LAUNCHER.name] = before


def _host_times(route: Route, inputs: Inputs, bias: Tensor | None) -> tuple[float, float, float]:
    """Inference, training (forward alone), forward and backward."""
    with torch.no_grad():
        inference = host_us(lambda: route(inputs.logits, bias))
    training = host_us(lambda: route(inputs.leaf, bias))
    both = host_us(lambda: forward_backward(route, inputs, bias))
    return inference, training, both


def run_resources(args: argparse.Namespace, target: Target) -> int:
    """What each kernel needs of the hardware, compiled here; fails if one uses local memory."""
    print(f"target {target}; SASS and SHFL: instructions and shuffles in the text of the kernel, loops counted once")
    print(
        f"{'case':12}  {'dtype':5}  {'outputs':7}  {'kernel':8}  {'lanes':>5}  {'threads':>7}  {'select':6}  "
        f"{'regs':>4}  {'spills':>6}  {'stack':>5}  {'shared':>6}  {'blocks/SM':>9}  {'warps':>5}  "
        f"{'SASS':>5}  {'SHFL':>4}"
    )
    spilling = 0
    for variant in variants(args):
        for kind in ("forward", "training", "backward"):
            executable = variant.executable(kind, target)
            for kernel, op in zip(executable.kernels, _kernel_ops(executable), strict=True):
                needs = needs_of(kernel, target)
                used = needs.used
                spilling += used.uses_local_memory
                print(
                    f"{variant.case.name:12}  {variant.dtype:5}  {variant.outputs:7}  {kind:8}  "
                    f"{op.configuration.get('lanes', '-'):>5}  {kernel.threads:7}  "
                    f"{op.configuration.get('select', '-'):6}  {used.registers:4}  "
                    f"{used.spill_store_bytes + used.spill_load_bytes:6}  {used.stack_bytes:5}  "
                    f"{needs.shared_bytes:6}  {needs.blocks:9}  {needs.warps:5.0%}  "
                    f"{needs.count():>5}  {needs.count('SHFL'):>4}{'  LOCAL MEMORY' if used.uses_local_memory else ''}",
                    flush=True,
                )
    print(f"{spilling} kernels use local memory")
    return 1 if spilling else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the mode asked for; gives the exit code."""
    args = parse_arguments(arguments)
    for number, passes in enumerate(args.variants[1:], start=1):
        print(f"variant {number}: {passes}")
    target = Target.parse(args.arch) if args.arch else Target.parse("sm_90a")
    if args.dry_run:
        return run_dry(args, target)
    if args.resources:
        return run_resources(args, target)
    if args.check:
        return run_check(args)
    if not torch.cuda.is_available():
        print("no GPU: use --dry-run, --resources or --check", file=sys.stderr)
        return 3
    return run_host(args) if args.host else run_timing(args, target)


if __name__ == "__main__":
    sys.exit(main())

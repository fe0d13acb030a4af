"""Times routers: each row's implementations in turn, after their results were checked."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping

import torch
from router_cases import (
    Case,
    Inputs,
    Route,
    WrongResult,
    check,
    make_bias,
    make_inputs,
)
from router_rows import KINDS, PASSES, Row, Tuned, Variant, print_header, print_row, variants, write_json
from timing import (
    Clock,
    GraphTimer,
    Machine,
    allow_recompiling,
    measure_machine,
    sets_for,
    short,
    summary,
)
from torch import Tensor

import moesaic as mo
from moesaic.codegen.target import Target
from moesaic.runtime.token_buckets import FEW_TOKENS, label, number_of


class Bench:
    """Runs the variants on the first GPU.

    `device` and `timers` are for tests, which have no GPU: a clock of theirs, and the emulator.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        machine: Machine,
        target: Target,
        *,
        device: str = "cuda",
        timers: type[GraphTimer] = GraphTimer,
    ) -> None:
        self._args = args
        self._device = device
        self._timers = timers
        self._machine = machine
        self._target = target
        self._clock = Clock(args.budget, args.compile_budget)
        self._generator = torch.Generator(device=device).manual_seed(args.seed)
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
            tuned = self._tuned(variant)
            for tokens in self._args.tokens:
                if self._clock.over:
                    self.not_started += len(PASSES)
                else:
                    bucket = label(number_of(tokens, FEW_TOKENS), FEW_TOKENS)
                    self._variant_at(variant, tokens, routes, tuned.get(bucket, {}))
                if self._device == "cuda":
                    torch.cuda.empty_cache()

    def _routes(self, variant: Variant) -> dict[str, Route]:
        case, outputs = variant.case, variant.outputs
        made: dict[str, Route] = {}
        if "ours" in self._args.only:
            backend = "cuda" if self._device == "cuda" else "emulate"
            made["ours"] = case.ours(outputs, variant.dtype, backend, variant.passes)
        if "eager" in self._args.only:
            made["eager"] = case.eager(outputs)
        if "compile" in self._args.only and (not self._args.quick or (case.name, outputs) == ("128x8", "dense")):
            made["compile"] = torch.compile(case.eager(outputs))
        return made

    def _variant_at(self, variant: Variant, tokens: int, routes: dict[str, Route], tuned: Tuned) -> None:
        case, outputs = variant.case, variant.outputs
        sets, cold = sets_for(tokens * variant.bytes_per_token("fwd"), self._machine.l2_bytes)
        bias = make_bias(case, self._generator)
        inputs = [make_inputs(case, outputs, variant.dtype, tokens, self._generator) for _ in range(sets)]
        problem = self._problem(case, outputs, routes["ours"], inputs[0], bias) if "ours" in routes else ""
        for which in PASSES:
            found = variant.bounds(which, tokens, self._machine, self._target)
            row = Row(variant, tokens, which, found, cold, sets)
            row.tuned = {kind: tuned[kind] for kind in KINDS[which] if kind in tuned}
            if problem:
                row.cells["ours"] = problem
            self._time(row, {k: v for k, v in routes.items() if k != "ours" or not problem}, inputs, bias)
            self.rows.append(row)
            print_row(row)

    def _tuned(self, variant: Variant) -> Mapping[str, Tuned]:
        """What tables of this GPU chose, by bucket of T."""
        if "ours" not in self._args.only:
            return {}
        return mo.compile(variant.case.module(variant.outputs, variant.dtype), passes=variant.passes).tuned

    def _problem(self, case: Case, outputs: str, ours: Route, inputs: Inputs, bias: Tensor | None) -> str:
        """Empty if the result of ours is right."""
        try:
            check(case, outputs, ours, inputs, bias)
        except WrongResult as error:
            self.wrong += 1
            return f"WRONG: {error}"
        except Exception as error:  # noqa: BLE001 - the other rows are worth having
            self.wrong += 1
            return f"ERROR: {short(error)}"
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

                timer = self._timers(call, len(inputs))
                if name == "ours":
                    ours = timer
                    samples = timer.sample(self._args.ms)
                    _require_equal(timer.results[0], call(0))
                else:
                    row.cells[name] = timer.time(self._args.ms)
                del timer
            except Exception as error:  # noqa: BLE001 - whatever fails in a peer, or in ours, becomes its cell
                kind = "WRONG" if isinstance(error, WrongResult) else "ERROR"
                row.cells[name] = f"{kind}: {short(error)}"
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
            if self._device == "cuda":
                torch.cuda.synchronize()
        finally:  # what fails takes its time too
            self._clock.compiling += time.monotonic() - start
        self._compiled.add(key)
        return True


def _require_equal(replayed: object, plain: object) -> None:
    assert isinstance(replayed, tuple) and isinstance(plain, tuple)
    if not all(torch.equal(one, other) for one, other in zip(replayed, plain, strict=True)):
        raise WrongResult("the replayed graph and a plain call give different results")


def run_timing(args: argparse.Namespace, target: Target) -> int:
    """The table."""
    if "compile" in args.only:
        allow_recompiling()
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

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

Times are medians over replays of CUDA graphs (see ``timing.py``). All implementations of a row and a dense bf16
product of 8192^3 are replayed in turn, in short bursts, for a card at its power limit drifts in seconds; each
begins with 60 ms that are not counted, after which it has the clock that it keeps by itself. ``+-`` is half of
what the middle 80 % of the bursts span. Inputs rotate; the matrices, which every call shares, are larger than the
L2 cache alone. Weights of picks are bf16 and want a gradient; ours gets int32 picks, peers int64, as either's
router makes them. fwd+bwd gives the gradients of x, of the weights, and of both matrices. What the last replay
wrote is compared with a plain call. torch.compile compiles a case once, with the number of tokens dynamic; after
``--compile-budget`` seconds cells say ``skipped``. Nothing is started after ``--budget`` seconds.

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
import sys
from collections.abc import Sequence

import torch
from experts_bench import Bench
from experts_cases import (
    ROUTINGS,
    check,
    keep_share,
    make_inputs,
    make_matrices,
    make_picks,
    ours,
    transformers,
)
from experts_options import parse_arguments, tokens_of
from experts_views import print_planned_memory, run_dry, run_resources
from timing import (
    Clock,
    Machine,
    allow_recompiling,
    measure_machine,
)

from moesaic.codegen.target import Target

_EMULATED_TOKENS = 37


def run_timing(args: argparse.Namespace) -> int:
    """The sections."""
    if "compile" in args.only:
        allow_recompiling()
    print("measuring the copy kernel", file=sys.stderr, flush=True)
    machine = measure_machine()
    machine.print()
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


def write_json(args: argparse.Namespace, machine: Machine, bench: Bench) -> None:
    """All numbers, where asked for."""
    if not args.json:
        return
    rows = [*(r.as_dict(machine) for r in bench.rows), *(k.as_dict(machine) for k in bench.kernels)]
    with open(args.json, "w", encoding="utf-8") as file:
        json.dump({"machine": machine.as_dict(), "rows": [*rows, *bench.memory, *bench.host]}, file, indent=1)


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the mode asked for; gives the exit code."""
    args = parse_arguments(arguments, __doc__)
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

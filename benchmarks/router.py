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
the cache, and ``of floor`` of fwd+bwd can exceed 100 %. ``tuned``: for how many of a pass's kernels a table of tuned
choices had one in the rule's place. Times are microseconds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import torch
from router_bench import run_timing
from router_cases import (
    CASES,
    DTYPES,
    OUTPUTS,
)
from router_views import run_check, run_dry, run_host, run_resources

from moesaic.codegen.target import Target
from moesaic.ir.errors import MoesaicError
from moesaic.passes.manager import parse_pipeline

TOKENS = (65536, 16384, 4096, 256)
IMPLEMENTATIONS = ("ours", "eager", "compile")


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

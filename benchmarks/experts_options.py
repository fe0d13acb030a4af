"""What may be asked of ``experts.py``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from experts_cases import (
    CASES,
    ROUTINGS,
    Case,
)

TOKENS = {"qwen3": (16384, 4096, 512), "olmoe": (16384, 4096), "mixtral": (16384, 512), "deepseek": (16384, 4096)}
IMPLEMENTATIONS = ("ours", "hf", "compile")
SECTIONS = ("rows", "kernels", "live", "skew", "memory", "host")
PASSES = ("fwd", "fwd+bwd")
SHARES = (1.0, 0.5, 0.125)


def parse_arguments(arguments: Sequence[str] | None = None, description: str | None = None) -> argparse.Namespace:
    """The command line, with what its help says first."""
    names = [c.name for c in CASES]
    p = argparse.ArgumentParser(
        prog="experts.py", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
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

"""``moesaic tune``: finds the fastest choices for a layer's kernels on this card, and says what they gain."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING

from moesaic.ir.errors import ToolchainError
from moesaic.runtime import token_buckets
from moesaic.runtime.commands import console, inputs
from moesaic.runtime.commands.verbs import Verbs

if TYPE_CHECKING:
    from moesaic.ir.core import Module
    from moesaic.ir.declare import Router

_EXAMPLES = """
Candidates are compiled side by side, checked bit by bit against the built-in choice, and timed on
this card with random tensors. What is found is kept in the disk cache, and every process uses it
from then on. What is known already is not searched again, unless with --force. Needs a GPU.

examples:
  moesaic tune router.moe                                      three numbers of tokens, one minute
  moesaic tune router.moe --experts 8,64,256 --budget 2m       with other numbers of experts, too
  moesaic tune router.py --dtype bf16 --tokens 1024:65536 --plot tuned.svg
  moesaic tune router.moe --tokens 16384 --forward --trials 50 --json
"""

_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def add(verbs: Verbs) -> None:
    """Declares the verb."""
    parser = verbs.add("tune", run, "tune a layer's kernels on this GPU", _EXAMPLES, "FILE")
    parser.add_argument("file", metavar="FILE", help=inputs.FILE_HELP)
    parser.add_argument("--experts", metavar="E,...", type=_counts, help="tune it for these numbers of experts")
    parser.add_argument(
        "--tokens",
        metavar="T",
        type=_tokens,
        default=(1024, 16384, 65536),
        help="numbers, as 1024,65536, or a range, as 1024:65536, of which each bucket gets its turn "
        "(default: 1024,16384,65536)",
    )
    parser.add_argument(
        "--budget", metavar="TIME", type=_seconds, default=60.0, help="for everything: 60s, 2m (default: 60s)"
    )
    parser.add_argument(
        "--trials", metavar="N", type=int, default=20, help="a kernel, 0 for all (default: %(default)s)"
    )
    parser.add_argument("--jobs", metavar="N", type=int, help="processes that compile (default: MOESAIC_TUNE_WORKERS)")
    parser.add_argument("--forward", action="store_true", help="leave out training")
    parser.add_argument("--force", action="store_true", help="search for what is known, too")
    parser.add_argument("--dtype", help="of the logits, for a .py router declared without one")
    parser.add_argument("--plot", metavar="FILE", help="write time over experts: .svg, or .png with matplotlib")
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> int:
    """The verb."""
    from moesaic.runtime.commands.run import require_torch

    declared = inputs.read_declared(arguments.file, arguments.dtype)
    layers = [declared] if arguments.experts is None else [_resized(declared, e) for e in arguments.experts]
    require_torch()
    import torch

    if not torch.cuda.is_available():
        raise ToolchainError(
            "tune measures a GPU, and torch can see none here; tuned tables of another machine of the same kind can be "
            "copied into the cache ('moesaic doctor' says where it is)"
        )
    from moesaic.runtime.tuning.autotune import autotune
    from moesaic.runtime.tuning.progress import Progress
    from moesaic.runtime.tuning.report import Report

    report = Report()
    with Progress(arguments.budget) as progress:
        for number, layer in enumerate(layers):
            left = progress.seconds_left / (len(layers) - number)
            found = autotune(
                layer,
                tokens=arguments.tokens,
                budget=max(left, 1.0),
                dtype=arguments.dtype,
                backward=not arguments.forward,
                trials=arguments.trials,
                workers=arguments.jobs,
                force=arguments.force,
                watch=progress,
            )
            report.add(found.tuned)
    if arguments.plot:
        report.save(Path(arguments.plot))
    if arguments.json:
        console.print_json({"kernels": report.rows()})
        return 0
    print(report.table())
    if arguments.experts is not None and len(arguments.experts) > 1:
        print(f"\n{report.plot()}")
    return 0


def _resized(declared: Module | Router, experts: int) -> Module | Router:
    from moesaic.ir.declare import Router
    from moesaic.ir.resize import with_experts

    if isinstance(declared, Router):
        return dataclasses.replace(declared, num_experts=experts)
    return with_experts(declared, experts)


def _counts(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers with commas between, found {text!r}") from None
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"numbers must be 1 or more, found {text!r}")
    return found


def _tokens(text: str) -> tuple[int, ...]:
    """Numbers, or those of a range that stand for the buckets of T in it."""
    if ":" not in text:
        return _counts(text)
    low, high = (_counts(part)[0] for part in text.split(":", 1))
    if low > high:
        raise argparse.ArgumentTypeError(f"a range goes from few to many, found {text!r}")
    return token_buckets.in_range(low, high, token_buckets.FEW_TOKENS)


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"expected a time such as 60s or 2m, found {text!r}")
    return float(match[1]) * _SECONDS[match[2]]

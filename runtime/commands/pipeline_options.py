"""The options of ``mlir-opt`` that ``opt`` and ``compile`` share: what watches a pipeline while it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO, cast

from moesaic.ir import environment
from moesaic.passes.instruments import DiffIR, PrintIR, SaveTree, Timing, VerifyEach, print_by_environment
from moesaic.passes.manager import Instrument, Pass, pass_class
from moesaic.runtime.commands import console
from moesaic.runtime.reproducer import Reproduce


def add(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    group = parser.add_argument_group("watching passes (all of it goes to stderr)")
    group.add_argument("--print-ir-before", metavar="PASS", action="append", default=[], help="print before a pass")
    group.add_argument("--print-ir-after", metavar="PASS", action="append", default=[], help="print after a pass")
    group.add_argument("--print-ir-after-all", action="store_true", help="print after every pass")
    group.add_argument("--print-ir-after-change", action="store_true", help="print after passes that changed it")
    group.add_argument("--print-ir-diff", action="store_true", help="print what each pass changed")
    group.add_argument("--print-ir-tree-dir", metavar="DIR", type=Path, help="write numbered files into a folder")
    group.add_argument(
        "--verify-each",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="verify after every pass (default: as MOESAIC_VERIFY_EACH says, on)",
    )
    group.add_argument("--time-passes", action="store_true", help="print the time of each pass")
    group.add_argument(
        "--crash-reproducer",
        metavar="FILE",
        type=Path,
        help="where a failing pass leaves the IR it started from; without this, faults of the compiler leave one in "
        "MOESAIC_REPRODUCER_DIR or the cache",
    )


def instruments(arguments: argparse.Namespace, passes: Sequence[Pass], part: str = "") -> list[Instrument]:
    """What the options and ``MOESAIC_PRINT_IR`` ask for; `part` is a folder inside that of ``--print-ir-tree-dir``.

    Raises:
        UsageError: a name that is not a pass.
    """
    after, before = list(arguments.print_ir_after), list(arguments.print_ir_before)
    after_all, after_change = arguments.print_ir_after_all, arguments.print_ir_after_change
    for option, names in (("--print-ir-after", after), ("--print-ir-before", before)):
        for name in names:
            pass_class(name)
            if name not in [p.name for p in passes]:
                console.say(f"{option} {name}: the pipeline has no such pass", kind="warning")
    made: list[Instrument] = [Reproduce(arguments.crash_reproducer)]
    if environment.VERIFY_EACH.get() if arguments.verify_each is None else arguments.verify_each:
        made.append(VerifyEach())
    asked = print_by_environment(sys.stderr)
    if asked is not None:
        made.append(asked)
    if after or before or after_all or after_change:
        made.append(PrintIR(sys.stderr, after=after, before=before, after_all=after_all, after_change=after_change))
    if arguments.print_ir_diff:
        made.append(DiffIR(cast(TextIO, _ColoredDifference(sys.stderr))))
    if arguments.print_ir_tree_dir is not None:
        made.append(SaveTree(arguments.print_ir_tree_dir / part))
    if arguments.time_passes:
        made.append(Timing(sys.stderr))
    return made


class _ColoredDifference:
    """A stream that colours the lines of a difference where the one behind it is a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            body = line.rstrip("\n")
            style = {"+": ("green",), "-": ("red",), "/": ("bold",)}.get(body[:1], ())
            self._stream.write(console.styled(body, *style, stream=self._stream) + line[len(body) :])
        return len(text)

"""``moesaic doctor``: what this machine has, what is missing, and what to do about it."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from moesaic.ir.errors import ToolchainError
from moesaic.runtime.commands import console
from moesaic.runtime.commands.verbs import Verbs

if TYPE_CHECKING:
    from moesaic.runtime.doctor import Check

_EXAMPLES = """
Exits with 3 if something keeps kernels from being compiled. A 'warn' costs a feature only.

examples:
  moesaic doctor
  moesaic doctor --json
"""


def add(verbs: Verbs) -> None:
    """Declares the verb."""
    parser = verbs.add("doctor", run, "check NVRTC, headers, driver, GPUs, tools and the cache", _EXAMPLES)
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> int:
    """The verb."""
    with console.progress("looking at this machine"):
        from moesaic.runtime import doctor

        found = doctor.checks()
    worst = doctor.worst(found)
    if arguments.json:
        console.print_json({"status": worst, "checks": [dataclasses.asdict(check) for check in found]})
    else:
        print(_table(found))
    return ToolchainError.exit_code if worst == "fail" else 0


def _table(found: Iterable[Check]) -> str:
    rows = []
    for check in found:
        rows.append((f"{check.status:4}", check.name, check.detail))
        if check.remedy:
            rows.append(("", "", f"-> {check.remedy}"))
    styles = {"ok": ("green",), "warn": ("yellow",), "fail": ("bold", "red")}
    lines = []
    for line in console.described_table((), rows).splitlines():
        word = line[:4].strip()
        lines.append(console.styled(line[:4], *styles[word]) + line[4:] if word in styles else line)
    return "\n".join(lines)

"""Writes the pages that come from the code: references of ops and passes, and the table of environment variables.

    python docs/generate.py            write them
    python docs/generate.py --check    write nothing; exit with 1 and name those that are not current

Needs what the compiler needs, neither torch nor a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import moesaic.ir.ops  # noqa: F401  (registers every group)
from moesaic.ir import environment
from moesaic.ir.core import OPS
from moesaic.passes.manager import PIPELINES, REGISTRY, pass_class
from moesaic.passes.stages import STAGES
from moesaic.runtime.commands.listings import op_record, pass_record

HERE = Path(__file__).resolve().parent

_GROUPS = ("math", "row", "col", "moe", "slot", "kernel", "launch")
_MADE = "<!-- Made by docs/generate.py from the classes; edit these, then run it again. -->"


def pages() -> dict[str, str]:
    """The pages by name, as they have to be."""
    return {"ops.md": ops_page(), "passes.md": passes_page(), "environment.md": environment_page()}


def ops_page() -> str:
    """Every op: its docstring, operands, results and attributes."""
    known = [cls for cls in OPS.values() if cls.__module__.startswith("moesaic.ir.ops.")]
    lines = [
        "# Ops",
        "",
        _MADE,
        "",
        "`moesaic ops NAME` prints the same in a terminal. Names in brackets are shapes: T tokens, E experts, K picks,",
        "M slots, N sequences. How to add an op: [tutorial.md](tutorial.md).",
        "",
        " · ".join(f"[`{group}.`](#{group})" for group in _GROUPS),
        "",
    ]
    for group in _GROUPS:
        module = importlib.import_module(f"moesaic.ir.ops.{group}")
        about = (inspect.getdoc(module) or "").partition(": ")[2].partition("\n\n")[0].replace("\n", " ")
        lines += [f"## {group}", "", _prose(about), ""]
        for cls in known:
            if cls.__module__ == module.__name__:
                lines += _op(op_record(cls))
    return _finished(lines)


def _op(record: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"### `{record['name']}`", "", "```text", *record["description"].splitlines(), "```", "")
    rows = []
    for operand in record["operands"]:
        optional = "; may be left out" if operand["optional"] else ""
        rows.append((f"`{operand['name']}`", "operand", operand["description"] + optional))
    if record["variadic"]:
        rows.append(("...", "operands", "any number"))
    rows += [(f"`{result['name']}`", "result", result["description"]) for result in record["results"]]
    for attribute in record["attributes"]:
        default = "" if attribute["required"] else f"; default `{attribute['default']}`"
        meaning = f"{attribute['description']}; {attribute['expects']}{default}"
        rows.append((f"`{attribute['name']}`", "attribute", meaning))
    if rows:
        yield from (*_table(("", "", ""), rows), "")
    said = []
    if record["region"]:
        said.append("It holds a region with the ops that were fused.")
    if not record["differentiable"]:
        said.append("No gradient flows through it.")
    if said:
        yield from (" ".join(said), "")


def passes_page() -> str:
    """The pipelines, the stages, and every pass: what its file says, and its options."""
    lines = [
        "# Passes",
        "",
        _MADE,
        "",
        "`moesaic passes NAME` prints the same in a terminal; `moesaic opt FILE -p default --print-ir-diff` shows what",
        "each does to a layer. How to add a pass: [tutorial.md](tutorial.md).",
        "",
        "## Pipelines",
        "",
    ]
    for name, text in PIPELINES.items():
        lines += [f"`{name}`:", "", "```text", *_wrapped(text), "```", ""]
    stages = [(f"`{stage}`", ", ".join(f"`{ops}`" for ops in allowed)) for stage, allowed in STAGES.items()]
    lines += ["## Stages", "", "Which ops are legal at the top of a function; checked between passes.", ""]
    lines += [*_table(("stage", "ops"), stages), ""]
    for name in REGISTRY:
        record = pass_record(pass_class(name))
        lines += [f"## {name}", "", *_prose(record["description"].removeprefix(f"``{name}``: ")).splitlines(), ""]
        required = f"Takes a module in stage `{record['requires']}`" if record["requires"] else "Takes any module"
        reached = f"makes one in `{record['establishes']}`" if record["establishes"] else "leaves it in its stage"
        lines += [f"{required} and {reached}.", ""]
        if record["options"]:
            lines += ["```text", *record["options_help"].splitlines(), "```", ""]
            rows = [(f"`{o['name']}`", o["type"], o["default"]) for o in record["options"]]
            lines += [*_table(("option", "type", "default"), rows), ""]
    return _finished(lines)


def environment_page() -> str:
    """The page that is there, with the table of the declarations."""
    page = (HERE / "environment.md").read_text(encoding="utf-8")
    return re.sub(
        r"\| variable \| type \|.*?\n(?=\n)", lambda match: environment.markdown(), page, count=1, flags=re.DOTALL
    )


def _prose(text: str) -> str:
    text = text.replace("``", "`")
    return text[:1].upper() + text[1:]


def _wrapped(pipeline: str, width: int = 118) -> list[str]:
    lines = [""]
    for item in pipeline.split(","):
        if len(lines[-1]) + len(item) + 1 > width:
            lines.append("")
        lines[-1] += item + ","
    return ["".join(lines).rstrip(",")] if len(lines) == 1 else [*lines[:-1], lines[-1].rstrip(",")]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(_cell(cell) for cell in cells) + " |"

    return [line(header), line(["---"] * len(header)), *map(line, rows)]


def _cell(text: str) -> str:
    """Text in a table: nothing in it is markup but what stands between backticks."""
    parts = text.replace("\n", " ").split("`")
    for number in range(0, len(parts), 2):
        parts[number] = re.sub(r"([*<])", r"\\\1", parts[number])
    return "`".join(parts).replace("|", r"\|")


def _finished(lines: Sequence[str]) -> str:
    return "\n".join(line.rstrip() for line in lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes the pages that come from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is not current")
    arguments = parser.parse_args()
    stale = []
    for name, content in pages().items():
        path = HERE / name
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            stale.append(name)
            if not arguments.check:
                path.write_text(content, encoding="utf-8")
                print(f"wrote docs/{name}")
    if stale and arguments.check:
        print(f"not current: {', '.join(stale)}; run python docs/generate.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

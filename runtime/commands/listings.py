"""``moesaic passes``, ``ops`` and ``env``: what there is, from the registries themselves."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import textwrap
from typing import Any, get_type_hints

from moesaic.ir.errors import UsageError, suggestion
from moesaic.runtime.commands import console
from moesaic.runtime.commands.verbs import Verbs


def add(verbs: Verbs) -> None:
    """Declares the verbs."""
    passes = verbs.add(
        "passes",
        run_passes,
        "list passes with their options, and the named pipelines",
        """
        examples:
          moesaic passes
          moesaic passes specialize       all about one pass
          moesaic passes --json
        """,
        "[NAME]",
    )
    passes.add_argument("name", metavar="NAME", nargs="?", help="one pass")
    passes.add_argument("--json", action="store_true", help="as JSON")
    ops = verbs.add(
        "ops",
        run_ops,
        "list ops with their equations, or explain one",
        """
        examples:
          moesaic ops                     every op
          moesaic ops row                 one group
          moesaic ops row.topk            operands, results, attributes and what these accept
        """,
        "[NAME]",
    )
    ops.add_argument("name", metavar="NAME", nargs="?", help="an op, or a group such as row")
    ops.add_argument("--json", action="store_true", help="as JSON")
    env = verbs.add(
        "env",
        run_env,
        "list the environment variables that moesaic reads",
        """
        examples:
          moesaic env
          moesaic env --json
        """,
    )
    env.add_argument("--json", action="store_true", help="as JSON")


# Passes ---------------------------------------------------------------------------------------------------------------


def run_passes(arguments: argparse.Namespace) -> int:
    """``moesaic passes``."""
    from moesaic.passes.manager import PIPELINES, REGISTRY, pass_class

    names = [arguments.name] if arguments.name else list(REGISTRY)
    records = [pass_record(pass_class(n)) for n in names]
    if arguments.json:
        console.print_json(records[0] if arguments.name else {"passes": records, "pipelines": PIPELINES})
        return 0
    if arguments.name:
        _print_pass(records[0])
        return 0
    rows = []
    for r in records:
        rows.append((r["name"], r["summary"]))
        if r["options"]:
            rows.append(("", "options: " + ", ".join(o["name"] for o in r["options"])))
    print(console.described_table(("pass", "what it does"), rows))
    print()
    for name, text in PIPELINES.items():
        print(f"{console.styled(f'{name:12}', 'bold')}  {textwrap.indent(_after_commas(text), ' ' * 14).lstrip()}")
    return 0


def pass_record(cls: Any) -> dict[str, Any]:
    """All about a pass, as plain values."""
    module_doc = inspect.getdoc(inspect.getmodule(cls)) or ""
    hints = get_type_hints(cls)
    options = [
        {"name": f.name.replace("_", "-"), "type": _type_name(hints[f.name]), "default": _default_text(f.default)}
        for f in dataclasses.fields(cls)
    ]
    return {
        "name": cls.name,
        "summary": _pass_summary(cls),
        "description": module_doc,
        "options": options,
        "options_help": (inspect.getdoc(cls) or "") if options else "",
        "requires": cls.requires,
        "establishes": cls.establishes,
    }


def pass_summary(stage: str) -> str:
    """What the pass of a stage does, in a line; the stage may be that of a repeated pass, such as ``cse-2``."""
    from moesaic.passes.manager import REGISTRY, pass_class

    name = stage if stage in REGISTRY else stage.rpartition("-")[0]
    return _pass_summary(pass_class(name)) if name in REGISTRY else ""


def _pass_summary(cls: Any) -> str:
    # A pass's module is named like the pass and starts with "``name``: what it does."
    doc = inspect.getdoc(inspect.getmodule(cls)) or ""
    return doc.partition("\n\n")[0].replace("\n", " ").removeprefix(f"``{cls.name}``: ").rstrip(".")


def _print_pass(record: dict[str, Any]) -> None:
    print(console.styled(record["name"], "bold"))
    print(textwrap.indent(record["description"], "  "))
    print(f"\n  requires stage {record['requires'] or 'any'}, establishes {record['establishes'] or 'no other'}")
    if record["options"]:
        print()
        print(textwrap.indent(record["options_help"], "  "))
        print()
        rows = [(o["name"], o["type"], o["default"]) for o in record["options"]]
        print(textwrap.indent(console.table(("option", "type", "default"), rows), "  "))


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not getattr(hint, "__args__", ()) else str(hint)


def _default_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "empty"
    return str(value) or "empty"


def _after_commas(text: str) -> str:
    """Pipeline text in lines, broken behind commas."""
    lines = [""]
    for item in text.split(","):
        if len(lines[-1]) + len(item) + 1 > console.width() - 14:
            lines.append("")
        lines[-1] += item + ","
    return "\n".join(lines).rstrip(",")


# Ops ------------------------------------------------------------------------------------------------------------------


def run_ops(arguments: argparse.Namespace) -> int:
    """``moesaic ops``."""
    import moesaic.ir.ops  # noqa: F401  (registers every group)
    from moesaic.ir.core import OPS

    known = {name: cls for name, cls in OPS.items() if "." in name}
    groups = list(dict.fromkeys(name.partition(".")[0] for name in known))
    asked = (arguments.name or "").rstrip(".")
    if asked and asked not in known and asked not in groups:
        raise UsageError(
            f"unknown op {asked!r}{suggestion(asked, [*known, *groups])}; list them with 'moesaic ops', "
            f"or a group: {', '.join(groups)}"
        )
    if asked in known:
        record = op_record(known[asked])
        console.print_json(record) if arguments.json else _print_op(record)
        return 0
    shown = [op_record(cls) for name, cls in known.items() if not asked or name.startswith(f"{asked}.")]
    if arguments.json:
        console.print_json(shown)
        return 0
    for group in groups:
        rows = [(r["name"], _signature(r), r["summary"]) for r in shown if r["name"].startswith(f"{group}.")]
        if rows:
            print(console.described_table((f"{group}.", "operands", "meaning"), rows))
            print()
    return 0


def op_record(cls: Any) -> dict[str, Any]:
    """All about an op, as plain values."""
    from moesaic.ir.attributes import format_attribute
    from moesaic.ir.core import OptionalOperandDef

    doc = inspect.cleandoc(cls.__doc__ or "")
    return {
        "name": cls.name,
        "summary": doc.partition("\n\n")[0].replace("\n", " ").partition(". ")[0].rstrip("."),
        "description": doc,
        "variadic": cls.variadic,
        "region": cls.has_region,
        "operands": [
            {"name": d.name, "description": d.doc, "optional": isinstance(d, OptionalOperandDef)}
            for d in cls.operand_defs
        ],
        "results": [{"name": d.name, "description": d.doc} for d in cls.result_defs],
        "attributes": [
            {
                "name": spec.name,
                "description": spec.doc,
                "expects": spec.expects,
                "required": spec.required,
                "default": None if spec.required or spec.default is None else format_attribute(spec.default),
            }
            for spec in cls.attribute_defs.values()
        ],
        "differentiable": _has_gradient(cls),
    }


def _has_gradient(cls: Any) -> bool:
    from moesaic.ir.core import Op

    return cls.gradient is not Op.gradient


def _signature(record: dict[str, Any]) -> str:
    operands = [f"{o['name']}?" if o["optional"] else o["name"] for o in record["operands"]]
    return ", ".join(operands) if operands else "..." if record["variadic"] else "-"


def _print_op(record: dict[str, Any]) -> None:
    print(console.styled(record["name"], "bold"))
    print(textwrap.indent(record["description"], "  "))
    for kind in ("operands", "results"):
        rows = [
            (x["name"], x["description"] + (" (may be left out)" if x.get("optional") else "")) for x in record[kind]
        ]
        if kind == "operands" and record["variadic"]:
            rows = [("...", "any number"), *rows]
        if rows:
            print()
            print(textwrap.indent(console.described_table((kind, ""), rows, console.width() - 2), "  "))
    if record["attributes"]:
        described = [
            (
                a["name"],
                "required" if a["required"] else f"default {a['default']}",
                f"{a['description']}; {a['expects']}",
            )
            for a in record["attributes"]
        ]
        print()
        print(textwrap.indent(console.described_table(("attributes", "", ""), described, console.width() - 2), "  "))
    if record["region"]:
        print("\n  holds a region with the ops that were fused")
    if not record["differentiable"]:
        print("\n  no gradient flows through it")


# Environment ----------------------------------------------------------------------------------------------------------


def run_env(arguments: argparse.Namespace) -> int:
    """``moesaic env``."""
    from moesaic.ir import environment

    if arguments.json:
        console.print_json([dataclasses.asdict(row) for row in environment.rows()])
    else:
        print(environment.table())
    for stray in environment.unknown() if arguments.json else ():
        console.say(stray, kind="warning")
    return 0

"""``moesaic cache``: what lies in the cache folder, and a way to be rid of it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re

from moesaic.ir.environment import cache_root
from moesaic.ir.errors import UsageError
from moesaic.runtime.commands import console
from moesaic.runtime.commands.verbs import Verbs

_EXAMPLES = """
examples:
  moesaic cache path
  moesaic cache list
  moesaic cache show 3f9c2a              any unambiguous beginning of a key
  moesaic cache clear --older-than 30d   also 12h, 45m, 2w; without it, everything
"""

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def add(verbs: Verbs) -> None:
    """Declares the verb."""
    parser = verbs.add("cache", run, "look into the cache, or clear it", _EXAMPLES, "ACTION")
    actions = parser.add_subparsers(dest="action", metavar="path|list|show|clear", required=True, prog="moesaic cache")
    actions.add_parser("path", help="print the folder")
    listing = actions.add_parser("list", help="list entries, the newest first")
    listing.add_argument("--json", action="store_true", help="as JSON")
    show = actions.add_parser("show", help="print what is known about an entry")
    show.add_argument("key", metavar="KEY", help="the beginning of a key")
    show.add_argument("--json", action="store_true", help="as JSON")
    clear = actions.add_parser("clear", help="remove entries")
    clear.add_argument("--older-than", metavar="AGE", help="only those older than this: 30d, 12h, 45m, 2w")


def run(arguments: argparse.Namespace) -> int:
    """The verb."""
    if arguments.action == "path":
        print(cache_root())
    elif arguments.action == "list":
        _list(arguments.json)
    elif arguments.action == "show":
        _show(arguments.key, arguments.json)
    else:
        _clear(None if arguments.older_than is None else _seconds(arguments.older_than))
    return 0


def _list(as_json: bool) -> None:
    from moesaic.runtime import cache

    found = cache.entries()
    if as_json:
        listed = [{**dataclasses.asdict(entry), "path": str(entry.path)} for entry in found]
        console.print_json({"root": str(cache_root()), "entries": listed})
        return
    if not found:
        print(f"{cache_root()} holds no entries")
        return
    rows = [(e.key[:16], e.kind, e.name or "-", e.target or "-", console.size(e.bytes), _age(e.age)) for e in found]
    print(console.table(("key", "kind", "name", "target", "size", "age"), rows, right={4, 5}))
    print(f"{_count(len(found))}, {console.size(sum(e.bytes for e in found))} in {cache_root()}")


def _show(key: str, as_json: bool) -> None:
    from moesaic.runtime import cache

    details = cache.show(key)
    entry = details.entry
    if as_json:
        made = {**dataclasses.asdict(entry), "path": str(entry.path), "files": dict(details.files)}
        console.print_json({**made, "damage": details.damage, "description": details.description})
        return
    rows = [
        ("key", entry.key),
        ("kind", entry.kind),
        ("path", str(entry.path)),
        ("age", _age(entry.age)),
        ("files", ", ".join(f"{name} ({console.size(count)})" for name, count in details.files.items())),
    ]
    if details.damage is not None:
        rows.append(("damage", f"{details.damage}; it will be made again"))
    print(console.described_table((), rows))
    if details.description is not None:
        print()
        print(json.dumps(details.description, indent=2))


def _clear(older_than: float | None) -> None:
    from moesaic.runtime import cache

    removed, freed = cache.clear(older_than)
    print(f"removed {_count(removed)}, {console.size(freed)}, from {cache_root()}")


def _count(entries: int) -> str:
    return "1 entry" if entries == 1 else f"{entries} entries"


def _seconds(age: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", age.strip().lower())
    if match is None:
        raise UsageError(f"--older-than {age!r}: expected a number and a unit, such as 30d, 12h, 45m or 2w")
    return float(match[1]) * _UNITS[match[2]]


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"

"""``moesaic cache``: what lies in the cache folder, and a way to be rid of it."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moesaic.ir.errors import InputError, UsageError
from moesaic.runtime.commands import console
from moesaic.runtime.commands.verbs import Verbs

_EXAMPLES = """
An entry is a file or folder named by a digest; nothing else in the folder is listed or removed.

examples:
  moesaic cache path
  moesaic cache list
  moesaic cache show 3f9c2a                 any unambiguous beginning of a key
  moesaic cache clear --older-than 30d      also 12h, 45m, 2w; without it, everything
"""

_DIGEST = re.compile(r"[0-9a-f]{12,64}")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DEPTH = 3  # folders below the root in which entries are looked for


@dataclass(frozen=True)
class Entry:
    """One thing in the cache: the folder it lies in, relative to the root, tells its kind."""

    key: str
    kind: str
    path: Path
    bytes: int
    modified: float

    @property
    def files(self) -> list[Path]:
        if not self.path.is_dir():
            return [self.path]
        return sorted(p for p in self.path.rglob("*") if p.is_file() and not p.is_symlink())


def add(verbs: Verbs) -> None:
    """Declares the verb."""
    parser = verbs.add("cache", run, "look into the cache, or clear it", _EXAMPLES)
    actions = parser.add_subparsers(dest="action", metavar="path|list|show|clear", required=True)
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
    from moesaic.ir.environment import cache_root

    root = cache_root()
    if arguments.action == "path":
        print(root)
    elif arguments.action == "list":
        _list(root, arguments.json)
    elif arguments.action == "show":
        _show(_find(root, arguments.key), arguments.json)
    else:
        _clear(root, arguments.older_than)
    return 0


def entries(root: Path) -> list[Entry]:
    """Every entry below `root`, the newest first."""
    return sorted(_entries(root, root, 0), key=lambda e: (-e.modified, e.key))


def _entries(root: Path, folder: Path, depth: int) -> Iterator[Entry]:
    try:
        children = sorted(folder.iterdir())
    except OSError:
        return
    for path in children:
        if path.is_symlink():
            continue
        if _DIGEST.fullmatch(path.name.partition(".")[0]) and folder != root:
            yield _entry(root, path)
        elif path.is_dir() and depth < _DEPTH:
            yield from _entries(root, path, depth + 1)


def _entry(root: Path, path: Path) -> Entry:
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    sizes, times = 0, [0.0]
    for file in files:
        try:
            status = file.stat()
        except OSError:  # another process took it away
            continue
        sizes += status.st_size
        times.append(status.st_mtime)
    return Entry(path.name, str(path.parent.relative_to(root)), path, sizes, max(times))


def _list(root: Path, as_json: bool) -> None:
    found = entries(root)
    now = time.time()
    if as_json:
        listed = [
            {
                "key": e.key,
                "kind": e.kind,
                "bytes": e.bytes,
                "age_seconds": round(now - e.modified),
                "path": str(e.path),
            }
            for e in found
        ]
        console.print_json({"root": str(root), "entries": listed})
        return
    if not found:
        print(f"{root} holds no entries")
        return
    rows = [(e.key[:16], e.kind, _what(e), console.size(e.bytes), _age(now - e.modified)) for e in found]
    print(console.table(("key", "kind", "what", "size", "age"), rows, right={3, 4}))
    count = f"{len(found)} entries" if len(found) != 1 else "1 entry"
    print(f"{count}, {console.size(sum(e.bytes for e in found))} in {root}")


def _what(entry: Entry) -> str:
    """What an entry is about: a name out of its description, else its source file's."""
    described = _sidecar(entry) or {}
    for field in ("kernel", "name", "symbol"):
        if isinstance(described.get(field), str):
            return str(described[field])
    sources = [p.stem for p in entry.files if p.suffix == ".cu"]
    kind = described.get("kind")
    return sources[0] if sources else str(kind) if isinstance(kind, str) else "-"


def _sidecar(entry: Entry) -> dict[str, object] | None:
    """The JSON that lies beside what an entry holds."""
    for path in entry.files:
        if path.suffix == ".json":
            try:
                read = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            if isinstance(read, dict):
                return read
    return None


def _find(root: Path, key: str) -> Entry:
    matching = [e for e in entries(root) if e.key.startswith(key.lower())]
    if not matching:
        raise InputError(f"no entry of {root} has a key that starts with {key!r}; see 'moesaic cache list'")
    if len(matching) > 1:
        shown = ", ".join(e.key[:16] for e in matching[:5])
        raise InputError(f"{len(matching)} keys start with {key!r}; write more of one: {shown}")
    return matching[0]


def _show(entry: Entry, as_json: bool) -> None:
    described = _sidecar(entry)
    if as_json:
        files = {str(p.relative_to(entry.path.parent)): p.stat().st_size for p in entry.files}
        console.print_json(
            {"key": entry.key, "kind": entry.kind, "path": str(entry.path), "files": files, "entry": described}
        )
        return
    print(f"{console.styled('key', 'bold')}    {entry.key}")
    print(f"{console.styled('kind', 'bold')}   {entry.kind}")
    print(f"{console.styled('path', 'bold')}   {entry.path}")
    print(f"{console.styled('age', 'bold')}    {_age(time.time() - entry.modified)}")
    files = [(p.name, console.size(p.stat().st_size)) for p in entry.files]
    print(f"{console.styled('files', 'bold')}  " + ", ".join(f"{name} ({size})" for name, size in files))
    if described is not None:
        print()
        print(json.dumps(described, indent=2))


def _clear(root: Path, older_than: str | None) -> None:
    limit = _seconds(older_than) if older_than is not None else None
    now = time.time()
    removed = [e for e in entries(root) if limit is None or now - e.modified > limit]
    problems = []
    for entry in removed:
        try:
            if entry.path.is_dir():
                shutil.rmtree(entry.path)
            else:
                entry.path.unlink()
        except FileNotFoundError:
            pass  # another process was faster
        except OSError as error:
            problems.append(f"{entry.path}: {error.strerror or error}")
    freed = console.size(sum(e.bytes for e in removed))
    count = f"{len(removed)} entries" if len(removed) != 1 else "1 entry"
    if problems:
        raise InputError("could not remove\n  " + "\n  ".join(problems))
    print(f"removed {count}, {freed}, from {root}")


def _seconds(age: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", age.strip().lower())
    if match is None:
        raise UsageError(f"--older-than {age!r}: expected a number and a unit, such as 30d, 12h, 45m or 2w")
    return float(match[1]) * _UNITS[match[2]]


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"

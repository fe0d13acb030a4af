"""Libraries on disk.

An entry is a folder named by the sha256 of everything that went into it. ``entry.json`` is written last and holds
the digest of the library: an entry without it, or whose library differs from it, is damaged and is built again.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

SCHEMA = 1
LIBRARY_NAME = "library.so"
_ENTRY_NAME = "entry.json"


def key_of(parts: Mapping[str, object]) -> str:
    """sha256 of the canonical JSON of `parts` (64 hex digits)."""
    text = json.dumps({"schema": SCHEMA, **parts}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def cache_root() -> Path:
    """The emulator's folder in the cache; a temporary one for this process if the cache cannot be used."""
    configured = os.environ.get("MOESAIC_CACHE_DIR")
    if configured:
        base = Path(configured).expanduser()
    else:
        xdg = os.environ.get("XDG_CACHE_HOME")
        base = (Path(xdg) if xdg else Path("~/.cache").expanduser()) / "moesaic"
    root = base / "emulator"
    problem = _problem_with(root)
    if problem is None:
        return root
    return _temporary_root(str(root), problem)


def _problem_with(root: Path) -> str | None:
    """Why libraries cannot be kept in `root`; None if they can. Creates the folder."""
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = root.stat()
    except OSError as error:
        return str(error)
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "it belongs to, or can be written by, somebody else, and libraries in it would be run"
    if not os.access(root, os.W_OK | os.X_OK):
        return "it cannot be written"
    return None


@functools.cache
def _temporary_root(refused: str, problem: str) -> Path:
    warnings.warn(f"moesaic keeps emulator libraries for this process only: {refused}: {problem}", stacklevel=2)
    folder = Path(tempfile.mkdtemp(prefix="moesaic-emulator-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def find(root: Path, key: str) -> Path | None:
    """The library of an entry, or None if there is none or it is damaged."""
    folder = root / key
    try:
        entry = json.loads((folder / _ENTRY_NAME).read_text(encoding="utf-8"))
        library = folder / LIBRARY_NAME
        digest = hashlib.sha256(library.read_bytes()).hexdigest()
        if entry["schema"] == SCHEMA and entry["library_sha256"] == digest:
            return library
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def publish(root: Path, key: str, built: Path, description: Mapping[str, object], sources: Mapping[str, str]) -> Path:
    """Adds a finished library, with its sources beside it, and returns where it lies now."""
    folder = root / key
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, text in sources.items():
        _write(folder / name, text.encode())
    content = built.read_bytes()
    _write(folder / LIBRARY_NAME, content)
    entry = {"schema": SCHEMA, "library_sha256": hashlib.sha256(content).hexdigest(), **description}
    _write(folder / _ENTRY_NAME, json.dumps(entry, indent=1, sort_keys=True).encode())
    return folder / LIBRARY_NAME


def save_rejected(root: Path, key: str, name: str, text: str) -> Path:
    """Keeps a source that did not compile, for a person to look at."""
    folder = root / "rejected" / key[:16]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _write(folder / name, text.encode())
    return folder / name


def _write(path: Path, content: bytes) -> None:
    """Replaces `path` in one step: no reader ever sees half of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise

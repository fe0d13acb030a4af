"""The cache on disk, of kernels compiled by NVRTC and of libraries compiled by the host's compiler.

::

    <root>/kernels/<key>/    <symbol>.cu  <symbol>.cubin  <symbol>.ptx  entry.json
    <root>/emulator/<key>/   <symbol>.cu  library.so  entry.json
    <root>/launcher/<key>/   library.so  entry.json
    <root>/tuned/            what was tuned, see tuning/tables.py
    <root>/locks/<key>.lock  held while an entry is made
    <root>/tmp/              entries being written, and those being removed

A key is the sha256 of everything that decides what comes out. An entry is written into ``tmp``, flushed to the disk
and renamed: it is there as a whole or not at all. ``entry.json`` holds the digest of every file and of itself, so an
entry that is cut, changed, or copied from elsewhere is found out when it is read, and is made again. Nothing in an
entry says where it lies: the root may be moved.

The cache is an optimisation: no state of the disk makes a compile fail. Where it cannot be used, what is compiled is
kept for this process only, and one warning says so.
"""

from __future__ import annotations

import atexit
import dataclasses
import errno
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from moesaic import __version__
from moesaic.ir import environment
from moesaic.ir.errors import InputError
from moesaic.runtime import folders, locks

SCHEMA = 2
"""Of keys and entries. Raise it whenever the layout of an entry, or the meaning of a field of a key, changes."""

ENTRY_FILE = "entry.json"
LOCK_SECONDS = 600.0
"""How long to wait for another process that makes the same entry before making it all the same."""
LEFTOVER_SECONDS = 3600.0
"""Age at which a file in ``tmp`` has lost its owner."""

_DIGEST = re.compile(r"[0-9a-f]{64}")

_log = logging.getLogger("moesaic.cache")
_threads = locks.KeyedLocks()
_fresh: set[Path] = set()  # entries made by this process, which MOESAIC_ALWAYS_COMPILE may read
_swept: set[Path] = set()
_warned: set[Path] = set()
_warned_guard = threading.Lock()


# Keys and contents ----------------------------------------------------------------------------------------------------


def canonical_json(value: object) -> str:
    """The one JSON text of a value: keys sorted, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def sha256(content: bytes | str) -> str:
    """In hex; text counts as UTF-8."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What decides the content of an entry. A subclass adds fields; all are part of the digest."""

    kind: ClassVar[str]
    """The folder below the root that holds entries of this kind."""

    symbol: str
    """The kernel's name."""
    target: str
    """What the code is for: a GPU, or a host."""
    source_sha256: str

    @property
    def fields(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "kind": self.kind, **dataclasses.asdict(self)}

    @property
    def digest(self) -> str:
        """64 hex digits."""
        return sha256(canonical_json(self.fields))


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelKey(Key):
    """A kernel compiled by NVRTC."""

    kind: ClassVar[str] = "kernels"

    options: tuple[str, ...]
    """Those that decide what comes out; no folders."""
    nvrtc: str
    """Version of the compiler."""
    headers: str
    """Digest of the headers, which makes where they lie irrelevant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryKey(Key):
    """A library compiled by the host's C++ compiler: an emulated kernel, or the emulator's runtime."""

    kind: ClassVar[str] = "emulator"

    flags: tuple[str, ...]
    compiler: str
    """What the compiler says of itself."""
    command_sha256: str
    """Digest of the command that starts it: two compilers may say the same of themselves."""
    headers: str
    runtime: str = ""
    """Digest of the key of the runtime that a kernel is linked with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherKey(LibraryKey):
    """The native launcher; its `headers` name the releases of torch and Python that it is built against."""

    kind: ClassVar[str] = "launcher"


KINDS = (KernelKey.kind, LibraryKey.kind, LauncherKey.kind)


@dataclass(frozen=True, slots=True)
class Content:
    """What goes into an entry: files by plain name, and facts for people and for readers, as JSON has them."""

    files: Mapping[str, bytes]
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stored(Content):
    """An entry as read, or as made."""

    folder: Path | None = None
    """Where its files lie; None if they could not be kept on disk."""


class _Damaged(Exception):
    """An entry that cannot be used; says why."""


# Using the cache ------------------------------------------------------------------------------------------------------


def obtain(key: Key, make: Callable[[], Content], *, on_disk: bool = False) -> Stored:
    """The entry of a key: read if it is there, else made, and kept if possible.

    Of all processes that ask for one key at once, one makes it, and no more entries are made at a time than
    ``MOESAIC_COMPILE_JOBS`` says. What `make` raises is passed on, and nothing is kept. `make` must not itself ask for
    an entry.

    Args:
        key: what decides the content.
        make: makes the content.
        on_disk: the content is of use only as files. Where the cache cannot be used, they lie in a temporary folder,
            and `Stored.folder` is None only if that cannot be written either.

    Raises:
        OSError: the files are needed, and no temporary folder can be made.
    """
    with _threads.holding(key.digest):
        store = None if environment.DISABLE_CACHE.get() else _usable(key.kind)
        if store is not None and not (on_disk and store.root in _warned):
            stored = store.obtain(key, make)
            if stored.folder is not None or not on_disk:
                return stored
            return _private_store().write(key, stored)
        if not on_disk:
            with locks.compile_slot():
                content = make()
            return Stored(content.files, content.facts)
        found = store.peek(key) if store is not None else None
        return found or _private_store().obtain(key, make)


def _usable(kind: str) -> _Store | None:
    """The store in the cache folder; None, with a warning, if code in it cannot be trusted or it cannot be made."""
    root = Path("~/.cache/moesaic")  # as a warning calls it
    problem: object = None
    try:
        root = environment.cache_root()
        folders.make_private(root)
        for folder in (root, root / kind, root / "tmp"):
            if problem is None and folder.exists():
                problem = folders.distrust(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        problem = error
    if problem is not None:
        _warn(root, problem)
        return None
    return _Store(root)


@functools.cache
def _private_store() -> _Store:
    folder = Path(tempfile.mkdtemp(prefix="moesaic-"))
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child also comes by here
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return _Store(folder)


def _warn(root: Path, problem: object) -> None:
    with _warned_guard:
        if root in _warned:
            return
        _warned.add(root)
    warnings.warn(f"moesaic keeps what it compiles for this process only: {root}: {problem}", stacklevel=2)


@dataclass(frozen=True)
class _Store:
    """A root that may be used."""

    root: Path

    def obtain(self, key: Key, make: Callable[[], Content]) -> Stored:
        folder = self.root / key.kind / key.digest
        may_read = folder in _fresh or not environment.ALWAYS_COMPILE.get()
        if may_read and (found := self.peek(key)) is not None:
            return found
        with self._lock(key.digest):
            if may_read:
                try:
                    if (found := _read(folder)) is not None:
                        return found
                except _Damaged as damage:
                    _log.warning("made again: cache entry %s/%s (%s): %s", key.kind, key.digest, key.symbol, damage)
                    with suppress(OSError):
                        self.remove(folder)
            with locks.compile_slot():
                content = make()
            return self.write(key, content, replace=not may_read)

    def peek(self, key: Key) -> Stored | None:
        """The entry, if it is there and sound. Changes nothing."""
        try:
            return _read(self.root / key.kind / key.digest)
        except _Damaged:  # perhaps only about to be replaced: who wants to repair it looks again under the lock
            return None

    def write(self, key: Key, content: Content, *, replace: bool = False) -> Stored:
        """Adds an entry, or takes the one that somebody else added meanwhile; only warns if it cannot be kept."""
        try:
            folders.make_private(self.root / key.kind)
            with self._temporary(key.digest) as temporary:
                digests = {}
                for name, data in content.files.items():
                    _write_file(temporary / name, data)
                    digests[name] = {"sha256": sha256(data), "bytes": len(data)}
                entry: dict[str, Any] = {
                    "name": key.symbol,
                    "target": key.target,
                    "moesaic": __version__,
                    "key": key.fields,
                    "files": digests,
                    **content.facts,
                }
                entry["entry_sha256"] = sha256(canonical_json(entry))
                _write_file(temporary / ENTRY_FILE, (json.dumps(entry, indent=1) + "\n").encode())
                _flush_folder(temporary)
                return self._publish(temporary, key, content, replace)
        except OSError as error:
            _warn(self.root, error)
            return Stored(content.files, content.facts)

    def _publish(self, temporary: Path, key: Key, content: Content, replace: bool) -> Stored:
        folder = self.root / key.kind / key.digest
        for _ in range(5):  # each time round, another process was faster with something that cannot be used
            try:
                os.rename(temporary, folder)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
            else:
                _flush_folder(folder.parent)
                _fresh.add(folder)
                return Stored(content.files, content.facts, folder)
            if not replace and (winner := self.peek(key)) is not None:
                return winner
            self.remove(folder)
        raise OSError(errno.EEXIST, "another process keeps replacing it", str(folder))

    def remove(self, folder: Path) -> None:
        """Takes an entry away in one step, so that nobody reads half of it."""
        with self._temporary("removed") as temporary, suppress(FileNotFoundError):  # another process was faster
            os.rename(folder, temporary / folder.name)
        _fresh.discard(folder)

    def sweep(self) -> None:
        """Removes what killed processes left behind."""
        for path in _children(self.root / "tmp"):
            with suppress(OSError):
                if time.time() - path.lstat().st_mtime > LEFTOVER_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)
        for path in _children(self.root / "locks"):
            with suppress(OSError):
                if time.time() - path.lstat().st_mtime > LEFTOVER_SECONDS and (lock := locks.acquire(path, 0)):
                    path.unlink(missing_ok=True)
                    lock.release()

    @contextmanager
    def _temporary(self, name: str) -> Iterator[Path]:
        """A folder beside the entries, gone at the end if it was not renamed."""
        parent = self.root / "tmp"
        folders.make_private(parent)
        if self.root not in _swept:
            _swept.add(self.root)
            self.sweep()
        temporary = Path(tempfile.mkdtemp(prefix=f"{name[:16]}-", dir=parent))
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    @contextmanager
    def _lock(self, digest: str) -> Iterator[None]:
        """Keeps other processes from making this entry too, as far as that is possible."""
        path = self.root / "locks" / f"{digest}.lock"
        lock = None
        try:
            folders.make_private(path.parent)
            lock = locks.acquire(path, LOCK_SECONDS)
            if lock is None:
                _log.warning("compiling without the lock %s: another process held it for %g s", path.name, LOCK_SECONDS)
        except OSError as error:  # read-only, full, or a file system without locks
            _log.info("compiling without the lock %s: %s", path.name, error)
        try:
            yield
        finally:
            if lock is not None:
                # Whoever waits for this file finds the entry when its turn comes, and so does whoever makes a new one.
                with suppress(OSError):
                    path.unlink(missing_ok=True)
                lock.release()


# Files ----------------------------------------------------------------------------------------------------------------


def _read(folder: Path) -> Stored | None:
    """An entry whose every byte was checked; None if there is none."""
    try:
        text = (folder / ENTRY_FILE).read_bytes()
    except FileNotFoundError:
        if os.path.lexists(folder):
            raise _Damaged(f"it has no {ENTRY_FILE}") from None
        return None
    except OSError as error:
        raise _Damaged(f"{ENTRY_FILE}: {error.strerror}") from error
    try:
        entry = json.loads(text)
        stated = entry.pop("entry_sha256")
        key, listed = entry.pop("key"), entry.pop("files")
        whole = {**entry, "key": key, "files": listed}
        if stated != sha256(canonical_json(whole)):
            raise _Damaged(f"{ENTRY_FILE} was changed")
        if key["schema"] != SCHEMA:
            raise _Damaged(f"schema {key['schema']}, not {SCHEMA}")
        if sha256(canonical_json(key)) != folder.name or key["kind"] != folder.parent.name:
            raise _Damaged("it belongs under another key")
        expected = {str(name): str(about["sha256"]) for name, about in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _Damaged(f"{ENTRY_FILE} is not whole") from None
    files = {}
    for name, digest in expected.items():
        try:
            files[name] = (folder / name).read_bytes()
        except OSError as error:
            raise _Damaged(f"{name}: {error.strerror}") from error
        if sha256(files[name]) != digest:
            raise _Damaged(f"{name} was changed or cut")
    return Stored(files, entry, folder)


def _write_file(path: Path, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(handle, left) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def save_rejected(name: str, text: str) -> Path:
    """Keeps a source that did not compile, for a person to look at; in a temporary folder if the cache is unusable."""
    stem = f"{name}-{sha256(text)[:12]}"
    try:
        folder = environment.cache_root() / "failed"
        folders.make_private(folder)
        path = folder / f"{stem}.cu"
        path.write_text(text, encoding="utf-8")
    except (OSError, RuntimeError):
        path = Path(tempfile.mkdtemp(prefix="moesaic-failed-")) / f"{stem}.cu"
        path.write_text(text, encoding="utf-8")
    return path


# Looking into the cache -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry as a list shows it. `name` and `target` are empty if its description cannot be read."""

    kind: str
    key: str
    name: str
    target: str
    bytes: int
    age: float
    """Seconds since it was made."""
    path: Path


@dataclass(frozen=True, slots=True)
class Details:
    """All that is known about an entry."""

    entry: Entry
    files: Mapping[str, int]
    """Bytes of each file."""
    description: Mapping[str, Any] | None
    """What its ``entry.json`` says; None if that is not JSON."""
    damage: str | None
    """Why it would be made again instead of being used; None if it is sound."""


def entries() -> list[Entry]:
    """Every entry of the cache, the newest first."""
    root = environment.cache_root()
    found = [
        entry
        for kind in KINDS
        for path in _children(root / kind)
        if _DIGEST.fullmatch(path.name) and (entry := _entry(kind, path)) is not None
    ]
    return sorted(found, key=lambda entry: (entry.age, entry.key))


def show(prefix: str) -> Details:
    """The entry whose key starts with `prefix`. Raises `InputError` unless there is exactly one."""
    root = environment.cache_root()
    matching = [entry for entry in entries() if entry.key.startswith(prefix.lower())]
    if not matching:
        raise InputError(f"no entry of {root} has a key that starts with {prefix!r}; see 'moesaic cache list'")
    if len(matching) > 1:
        shown = ", ".join(entry.key[:16] for entry in matching[:5])
        raise InputError(f"{len(matching)} keys start with {prefix!r}; write more of one: {shown}")
    entry = matching[0]
    try:
        damage = None if _read(entry.path) is not None else "it was just removed"
    except _Damaged as error:
        damage = str(error)
    return Details(entry, _sizes(entry.path), _description(entry.path), damage)


def clear(older_than: float | None = None) -> tuple[int, int]:
    """Removes entries older than so many seconds, or all: how many, and their bytes. Processes may be using them.

    Raises:
        InputError: some could not be removed; says which, and why.
    """
    store = _Store(environment.cache_root())
    count = size = 0
    problems = []
    for entry in entries():
        if older_than is not None and entry.age <= older_than:
            continue
        try:
            store.remove(entry.path)
        except OSError as error:
            problems.append(f"{entry.path}: {error.strerror or error}")
        else:
            count += 1
            size += entry.bytes
    store.sweep()
    if problems:
        raise InputError("could not remove\n  " + "\n  ".join(problems))
    return count, size


def _entry(kind: str, path: Path) -> Entry | None:
    sizes = _sizes(path)
    try:
        described = path / ENTRY_FILE
        made = (described if described.exists() else path).lstat().st_mtime
    except OSError:  # another process took it away
        return None
    description = _description(path) or {}
    name, target = (str(description.get(field, "")) for field in ("name", "target"))
    return Entry(kind, path.name, name, target, sum(sizes.values()), max(0.0, time.time() - made), path)


def _sizes(path: Path) -> dict[str, int]:
    sizes = {}
    for file in _children(path):
        with suppress(OSError):
            sizes[file.name] = file.lstat().st_size
    return sizes


def _description(path: Path) -> dict[str, Any] | None:
    try:
        described = json.loads((path / ENTRY_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return described if isinstance(described, dict) else None

"""Who may compile when: one thread a key, one process a key, and a bound on all compiles of this host. And who may time
a card: one process.

Locks between processes are locks of the operating system on files: they end with their holder, however it ends.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import tempfile
import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from moesaic.ir import environment
from moesaic.runtime import folders
from moesaic.runtime.side_by_side import cores

if TYPE_CHECKING:
    from filelock import BaseFileLock

SLOT_SECONDS = 300.0
"""How long a compile waits for its turn before it starts without one."""

TURN_SECONDS = 120.0
"""How long a process waits for its turn at a card before it times there beside another."""

_BYTES_PER_COMPILE = 1 << 30  # a host compiler reading the CUDA headers stays below half of it
_SLOT_POLL_SECONDS = (0.01, 0.1)  # first and longest pause
_TURN_POLL_SECONDS = 0.002  # a turn lasts some 30 ms

_log = logging.getLogger("moesaic.cache")


class KeyedLocks:
    """A lock for each key, for the threads of this process; a key nobody holds costs nothing."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[Hashable, tuple[threading.Lock, list[None]]] = {}

    @contextmanager
    def holding(self, key: Hashable) -> Iterator[None]:
        """Lets one thread at a time go on with this key. Not reentrant."""
        with self._guard:
            lock, users = self._locks.setdefault(key, (threading.Lock(), []))
            users.append(None)
        try:
            with lock:
                yield
        finally:
            with self._guard:
                users.pop()
                if not users:
                    del self._locks[key]


def acquire(path: Path, seconds: float, poll: float = 0.05) -> BaseFileLock | None:
    """The lock of a file, held; None if another holds it all the time. Raises `OSError` if files cannot be locked."""
    from filelock import FileLock, Timeout

    lock = FileLock(path, timeout=seconds)
    try:
        lock.acquire(poll_interval=poll)
    except Timeout:
        return None
    except NotImplementedError as error:  # a file system without locks
        raise OSError(str(error)) from error
    return lock


_this_thread = threading.local()


@contextmanager
def compile_slot() -> Iterator[None]:
    """One of the places for compiles on this host, for as long as the context lasts.

    There are ``MOESAIC_COMPILE_JOBS`` places for all processes of a user, whichever compiler and cache they use. A
    place that does not come free in `SLOT_SECONDS`, or cannot be asked for, is done without.
    """
    if getattr(_this_thread, "compiles", False):  # a second place for the same compile could be waited for in vain
        yield
        return
    jobs = environment.COMPILE_JOBS.get() or default_jobs()
    lock = None
    try:
        lock = _free_slot(_host_folder(), jobs)
        if lock is None:
            _log.warning("no place for a compile came free in %g s; compiling without one", SLOT_SECONDS)
    except OSError as error:
        _log.info("the number of compiles cannot be bounded: %s", error)
    _this_thread.compiles = True
    try:
        yield
    finally:
        _this_thread.compiles = False
        if lock is not None:
            lock.release()


@contextmanager
def card_turn(card: str) -> Iterator[None]:
    """A card of this host, for as long as the context lasts: what times kernels there takes turns with other processes.

    A turn that does not come in `TURN_SECONDS`, or cannot be asked for, is done without.

    Args:
        card: what names it, in letters, digits and dashes.
    """
    lock = None
    try:
        lock = acquire(_host_folder() / f"card-{card}.lock", TURN_SECONDS, _TURN_POLL_SECONDS)
        if lock is None:
            _log.warning("card %s was busy for %g s; timing beside whatever runs there", card, TURN_SECONDS)
    except OSError as error:
        _log.info("other processes may time card %s, too: %s", card, error)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _host_folder() -> Path:
    # Not in the cache: the bound is for one host's memory, while hosts may share a cache, and a cache may be unusable.
    folder = Path(tempfile.gettempdir()) / f"moesaic-{os.geteuid()}"
    folders.make_private(folder)
    problem = "it is a link" if folder.is_symlink() else folders.distrust(folder)
    if problem is not None:
        raise OSError(f"{folder}: {problem}")
    return folder


def _free_slot(folder: Path, jobs: int) -> BaseFileLock | None:
    deadline = time.monotonic() + SLOT_SECONDS
    pause, longest = _SLOT_POLL_SECONDS
    order = list(range(jobs))
    while True:
        random.shuffle(order)
        for number in order:
            lock = acquire(folder / f"compile-{number}.lock", 0)
            if lock is not None:
                return lock
        if time.monotonic() > deadline:
            return None
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, longest)


@functools.cache
def default_jobs() -> int:
    """As many compiles as cores this process may use, and as fit into the memory that was free at its first one."""
    return max(1, min(cores(), free_memory() // _BYTES_PER_COMPILE))


def free_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be allocated now, on this machine and in this container; 4 GiB where it cannot be told."""
    free = []
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) * 1024)
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limits, used = _lines(cgroup / limit), _lines(cgroup / usage)
        if limits and used and limits[0].isdigit():
            cached = 0  # pages of files, which give way
            for line in _lines((cgroup / usage).with_name("memory.stat")):
                if line.startswith(("inactive_file ", "total_inactive_file ")):
                    cached = int(line.split()[1])
            free.append(max(0, int(limits[0]) - int(used[0]) + cached))
    return min(free, default=4 << 30)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []

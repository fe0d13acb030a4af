"""The cache on disk: many processes and threads at once, and what killed ones leave."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cached import (
    HOPPER,
    KERNEL,
    KEY,
    Maker,
    arguments,
    empty_cache,
    folder_of,
    no_leftovers,
    said_since,
)

from moesaic.codegen import nvrtc
from moesaic.codegen.target import Target
from moesaic.runtime import cache, folders, kernels, locks
from moesaic.runtime.cache import Content, Stored


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    return empty_cache(monkeypatch, tmp_path)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return said_since(caplog)


# Many processes -------------------------------------------------------------------------------------------------------

PROCESSES = """
import os, sys, time, traceback
import filelock, json  # once, before the forks
from moesaic.runtime import cache

log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
count, keys, on_disk = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "files"
start = time.monotonic() + 0.2

def work(number):
    time.sleep(max(0, start - time.monotonic()))
    for step in range(keys):
        n = (number + step) % keys
        def make():
            os.write(log, f"+ {n}\\n".encode())
            time.sleep(0.03)
            os.write(log, f"- {n}\\n".encode())
            return cache.Content({"k.cubin": b"%d" % n * 5000})
        about = dict(symbol=f"k{n}", target="t", source_sha256="")
        if on_disk and n % 2:
            key = cache.LibraryKey(flags=(), compiler="", command_sha256="", headers="", **about)
        else:
            key = cache.KernelKey(options=(), nvrtc="", headers="", **about)
        stored = cache.obtain(key, make, on_disk=on_disk)
        assert stored.files["k.cubin"] == b"%d" % n * 5000 and stored.folder is not None

children = []
for number in range(count):
    child = os.fork()
    if not child:
        try:
            work(number)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    children.append(child)
sys.exit(sum(os.waitpid(child, 0)[1] != 0 for child in children))
"""


def run_processes(tmp_path: Path, count: int, keys: int, jobs: int, what: str = "bytes") -> tuple[list[int], int]:
    """The keys that were made, in order, and how many at once."""
    log = tmp_path / "log"
    environ = {**os.environ, "MOESAIC_COMPILE_JOBS": str(jobs)}
    command = [sys.executable, "-c", PROCESSES, str(log), str(count), str(keys), what]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    made, now, most = [], 0, 0
    for sign, number in (line.split() for line in log.read_text().splitlines()):
        now += 1 if sign == "+" else -1
        most = max(most, now)
        if sign == "+":
            made.append(int(number))
    assert now == 0
    return made, most


def test_of_32_processes_one_makes_each_entry(root: Path, tmp_path: Path) -> None:
    made, _ = run_processes(tmp_path, count=32, keys=8, jobs=8)
    assert sorted(made) == list(range(8))
    assert len(list((root / "kernels").iterdir())) == 8
    assert no_leftovers(root)


@pytest.mark.parametrize("jobs", [1, 3])
def test_the_number_of_compiles_at_once_is_bounded(tmp_path: Path, jobs: int) -> None:
    """Case 52: 32 kernels and libraries by 8 processes; both kinds count."""
    made, most = run_processes(tmp_path, count=8, keys=32, jobs=jobs, what="files")
    assert sorted(made) == list(range(32))
    assert most == jobs


@pytest.mark.parametrize("disable", [False, True])
def test_the_bound_holds_for_threads(monkeypatch: pytest.MonkeyPatch, disable: bool) -> None:
    monkeypatch.setenv("MOESAIC_COMPILE_JOBS", "2")
    if disable:
        monkeypatch.setenv("MOESAIC_DISABLE_CACHE", "1")
    guard, now, most = threading.Lock(), 0, 0

    def make() -> Content:
        nonlocal now, most
        with guard:
            now += 1
            most = max(most, now)
        time.sleep(0.05)
        with guard:
            now -= 1
        return Content({})

    run_threads([lambda n=n: cache.obtain(replace(KEY, symbol=f"k{n}"), make) for n in range(6)])
    assert most == 2  # no more, and no less: different entries are made side by side


def run_threads(calls: list[Callable[[], object]]) -> list[object]:
    results: list[object] = [None] * len(calls)

    def run(number: int) -> None:
        results[number] = calls[number]()

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_threads_compile_different_kernels_side_by_side_and_equal_ones_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESAIC_COMPILE_JOBS", "4")
    monkeypatch.setattr(kernels, "key_of", lambda symbol, *others, **options: replace(KEY, symbol=symbol))
    monkeypatch.setattr(nvrtc, "cuda_include_dirs", list)
    together = threading.Barrier(3)
    compiled = []

    def compile_source(source: str, *, name: str, target: Target, **options: Any) -> nvrtc.CompiledKernel:
        together.wait(30)  # passes only if three are here at once
        compiled.append(name)
        return nvrtc.CompiledKernel(name, target, b"cubin", "ptx", "", {}, (), 0.1)

    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    wanted = [replace(KERNEL, symbol=f"k{n % 3}") for n in range(9)]
    results = run_threads([lambda k=k: kernels.compiled_kernel(k, HOPPER) for k in wanted])
    assert sorted(compiled) == ["k0", "k1", "k2"]
    assert results[0] is results[3] is results[6] is not results[1]
    assert kernels._compiled and not kernels._locks._locks


def test_a_lost_race_takes_the_winners(root: Path) -> None:
    def make_slowly() -> Content:
        cache._Store(root).write(KEY, Content({"k.cubin": b"winner"}))
        return Content({"k.cubin": b"loser"})

    assert cache.obtain(KEY, make_slowly).files == {"k.cubin": b"winner"}
    assert no_leftovers(root)


def test_a_killed_holder_of_the_lock_stops_nobody(root: Path, tmp_path: Path) -> None:
    code = textwrap.dedent(f"""
        import sys, time
        from moesaic.runtime import cache
        def make():
            print("made", flush=True)
            time.sleep(600)
        cache.obtain(cache.KernelKey(**{arguments(KEY)!r}), make)
    """)
    environ = {**os.environ, "MOESAIC_COMPILE_JOBS": "1"}
    with subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "made\n"
        assert locks.acquire(root / "locks" / f"{KEY.digest}.lock", 0) is None
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    start = time.monotonic()
    assert cache.obtain(KEY, Maker()).folder is not None
    assert time.monotonic() - start < 30
    assert no_leftovers(root)


def test_a_lock_that_never_comes_free_is_done_without(
    root: Path, monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.1)
    folders.make_private(root / "locks")
    path = root / "locks" / f"{KEY.digest}.lock"
    held = locks.acquire(path, 0)
    assert held is not None
    [stored] = run_threads([lambda: cache.obtain(KEY, Maker())])
    assert isinstance(stored, Stored) and stored.folder == folder_of(root)
    [line] = lines()
    assert path.name in line
    assert path.exists()  # another's lock is not removed
    held.release()


def test_a_place_that_never_comes_free_is_done_without(
    monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(locks, "SLOT_SECONDS", 0.1)
    monkeypatch.setenv("MOESAIC_COMPILE_JOBS", "1")
    with locks.compile_slot():
        [stored] = run_threads([lambda: cache.obtain(KEY, Maker())])
        with locks.compile_slot():  # of this thread: no second place
            pass
    assert isinstance(stored, Stored) and stored.folder is not None
    [line] = lines()
    assert "no place" in line


def test_one_process_at_a_time_times_a_card(
    monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]], tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = textwrap.dedent("""
        import sys
        from moesaic.runtime import locks
        with locks.card_turn("GPU-1"):
            print("mine", flush=True)
            sys.stdin.readline()
    """)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], env=environ, **pipes) as other:  # type: ignore[call-overload]
        assert other.stdout.readline() == "mine\n"
        with locks.card_turn("GPU-2"):
            pass
        assert not lines()
        monkeypatch.setattr(locks, "TURN_SECONDS", 0.1)
        with locks.card_turn("GPU-1"):
            pass
        assert "GPU-1 was busy" in lines()[0]
        monkeypatch.setattr(locks, "TURN_SECONDS", 30.0)
        timer = threading.Timer(0.2, lambda: other.communicate("\n"))
        timer.start()
        with locks.card_turn("GPU-1"):
            timer.join()
            assert other.poll() == 0, "it had ended before"
        assert not lines()


@pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "no locks"), OSError(errno.ENOSPC, "full")])
def test_a_file_system_without_locks(root: Path, monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    def acquire(*_: object) -> None:
        raise error

    monkeypatch.setattr(locks, "acquire", acquire)
    assert cache.obtain(KEY, Maker()).folder == folder_of(root)


def test_the_default_bound_follows_cores_and_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16), raising=False)
    for gigabytes, jobs in ((0.2, 1), (5.5, 5), (100, 16)):
        monkeypatch.setattr(locks, "free_memory", lambda g=gigabytes: int(g * 2**30))
        assert locks.default_jobs.__wrapped__() == jobs
    monkeypatch.undo()
    proc, group = tmp_path / "proc", tmp_path / "cgroup"
    for folder in (proc, group / "memory"):
        folder.mkdir(parents=True)
    assert locks.free_memory(proc, group) == 4 << 30
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1000\n")
    assert locks.free_memory(proc, group) == 8000 * 1024
    (group / "memory.max").write_text("5000\n")
    (group / "memory.stat").write_text("anon 700\ninactive_file 300\n")
    assert locks.free_memory(proc, group) == 4300


def test_leftovers_of_killed_processes_are_swept(root: Path) -> None:
    for folder in ("tmp", "locks"):
        folders.make_private(root / folder)
    old, young = root / "tmp" / "old", root / "tmp" / "young"
    for path in (old, young):
        path.mkdir()
        (path / "k.cubin").write_text("half")
    (root / "locks" / "old.lock").write_text("")
    held = locks.acquire(root / "locks" / "held.lock", 0)
    assert held is not None
    hour_ago = time.time() - cache.LEFTOVER_SECONDS - 60
    for path in (old, root / "locks" / "old.lock", root / "locks" / "held.lock"):
        os.utime(path, (hour_ago, hour_ago))
    [_] = run_threads([lambda: cache.obtain(KEY, Maker())])
    assert not old.exists() and young.exists()
    assert [p.name for p in (root / "locks").iterdir()] == ["held.lock"]
    held.release()

"""The cache on disk: keys, damage, disks that fail, many processes, and what the command line sees of it."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moesaic.codegen import nvrtc
from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.target import Target
from moesaic.ir import environment
from moesaic.ir.errors import InputError, KernelCompileError, UsageError
from moesaic.runtime import cache, folders, kernels, locks
from moesaic.runtime.cache import Content, KernelKey, LibraryKey, Stored
from moesaic.runtime.emulator import toolchain

HOPPER = Target.parse("sm_90a")
SOURCE = 'extern "C" __global__ void store(int* out) { out[threadIdx.x] = 7; }\n'
KERNEL = GeneratedKernel("store", SOURCE, (), 32, 1, "cover")
KEY = KernelKey(symbol="k", target="sm_90a", source_sha256="0" * 64, options=("-a", "-b"), nvrtc="13.0", headers="h")


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache that does not exist yet, and a process that has compiled nothing."""
    for variable in environment.variables():
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("MOESAIC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # places for compiles: no other test's
    monkeypatch.setattr("tempfile.tempdir", None)
    for module, name in ((cache, "_fresh"), (cache, "_swept"), (cache, "_warned"), (kernels, "_said")):
        monkeypatch.setattr(module, name, set())
    for name in ("_compiled", "_dumped"):
        monkeypatch.setattr(kernels, name, {})
    return tmp_path / "cache"


class Maker:
    """Makes the content of an entry, and counts."""

    def __init__(self, text: bytes = b"binary" * 20) -> None:
        self.calls = 0
        self.text = text

    def __call__(self) -> Content:
        self.calls += 1
        return Content({"k.cubin": self.text, "k.cu": b"source", "k.ptx": b""}, {"log": "said", "seconds": 0.5})


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was logged, at warning or above, since the last call."""

    def since() -> list[str]:
        found = [r.getMessage() for r in caplog.records if r.name == "moesaic.cache" and r.levelno >= logging.WARNING]
        caplog.clear()
        return found

    return since


@pytest.fixture
def one_warning() -> Iterator[None]:
    """Fails unless exactly one warning was given, and it says that nothing is kept."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert ["for this process only" in str(w.message) for w in caught] == [True], [str(w.message) for w in caught]


def folder_of(root: Path, key: cache.Key = KEY) -> Path:
    return root / key.kind / key.digest


def same(stored: Stored, maker: Maker) -> bool:
    made = maker.__class__(maker.text)()
    return dict(stored.files) == dict(made.files) and stored.facts["seconds"] == 0.5


def no_leftovers(root: Path) -> bool:
    return not list((root / "tmp").glob("*")) and not list((root / "locks").glob("*"))


# Keys -----------------------------------------------------------------------------------------------------------------


def test_every_field_is_part_of_the_key() -> None:
    changed = [
        replace(KEY, symbol="l"),
        replace(KEY, target="sm_80"),
        replace(KEY, source_sha256="1" * 64),
        replace(KEY, options=("-a",)),
        replace(KEY, options=("-b", "-a")),
        replace(KEY, nvrtc="13.1"),
        replace(KEY, headers="i"),
    ]
    assert len({key.digest for key in [KEY, *changed]}) == 1 + len(changed)
    assert replace(KEY).digest == KEY.digest
    assert set(KEY.fields) == {"schema", "kind", "symbol", "target", "source_sha256", "options", "nvrtc", "headers"}


def test_a_new_schema_changes_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = KEY.digest
    monkeypatch.setattr(cache, "SCHEMA", cache.SCHEMA + 1)
    assert KEY.digest != before


def test_keys_do_not_depend_on_the_process() -> None:
    code = f"from moesaic.runtime.cache import KernelKey\nprint(KernelKey(**{arguments(KEY)!r}).digest)"
    for seed in ("0", "1"):
        environ = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == KEY.digest


@pytest.mark.nvrtc
def test_what_makes_an_entry_stale(monkeypatch: pytest.MonkeyPatch, root: Path, tmp_path: Path) -> None:
    """Case 48: one character, one option, the compiler's version, the target, a header; and then only times."""
    (tmp_path / "include" / "moesaic").mkdir(parents=True)
    header = tmp_path / "include" / "moesaic" / "help.cuh"
    header.write_text("// one\n")
    monkeypatch.setattr(nvrtc, "helper_include_dirs", lambda: [tmp_path / "include"])
    compiles = []
    compile_source = nvrtc.compile_source

    def counting(source: str, **more: Any) -> nvrtc.CompiledKernel:
        compiles.append(source)
        return compile_source(source, **more)

    monkeypatch.setattr(nvrtc, "compile_source", counting)

    def compiled(kernel: GeneratedKernel = KERNEL, target: Target = HOPPER) -> int:
        """How many compiles a process needs that has compiled nothing yet."""
        kernels._compiled.clear()
        before = len(compiles)
        assert kernels.compiled_kernel(kernel, target).cubin.startswith(b"\x7fELF")
        return len(compiles) - before

    assert compiled() == 1
    assert compiled() == 0
    assert compiled(replace(KERNEL, source=SOURCE.replace("7", "8"))) == 1
    assert compiled(target=Target.parse("sm_80")) == 1
    with monkeypatch.context() as patch:
        patch.setenv("MOESAIC_LINEINFO", "1")
        assert compiled() == 1
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "nvrtc_version", lambda: (13, 99))
        assert compiled() == 1
    header.write_text("// two\n")
    assert compiled() == 1
    header.write_text("// one\n")
    for path in [header, *root.rglob("*")]:
        os.utime(path, (1e9, 1e9))
    assert compiled() == 0
    assert len(list((root / "kernels").iterdir())) == 6


# Entries --------------------------------------------------------------------------------------------------------------


def test_an_entry_is_complete_readable_and_private(root: Path) -> None:
    maker = Maker()
    first = cache.obtain(KEY, maker)
    folder = folder_of(root)
    assert first.folder == folder
    assert sorted(p.name for p in folder.iterdir()) == ["entry.json", "k.cu", "k.cubin", "k.ptx"]
    entry = json.loads((folder / "entry.json").read_text())
    assert entry["key"] == json.loads(json.dumps(KEY.fields))
    assert entry["files"]["k.cu"] == {"sha256": cache.sha256("source"), "bytes": 6}
    assert {"name", "target", "moesaic", "log", "seconds", "entry_sha256"} <= set(entry)
    second = cache.obtain(KEY, maker)
    assert maker.calls == 1 and same(first, maker) and same(second, maker)
    assert no_leftovers(root)


@pytest.mark.parametrize("mask", [0o000, 0o022])
def test_every_new_folder_is_private(root: Path, mask: int, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = root / "a" / "b"
    monkeypatch.setenv("MOESAIC_CACHE_DIR", str(deep))
    before = os.umask(mask)
    try:
        cache.obtain(KEY, Maker())
    finally:
        os.umask(before)
    for path in [root, *root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_moving_the_root_keeps_the_entries(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = Maker()
    cache.obtain(KEY, maker)
    for path in root.rglob("entry.json"):
        assert str(tmp_path) not in path.read_text()
    shutil.move(root, tmp_path / "elsewhere")
    monkeypatch.setenv("MOESAIC_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert cache.obtain(KEY, maker).folder == folder_of(tmp_path / "elsewhere")
    assert maker.calls == 1


def test_what_make_raises_is_passed_on_and_nothing_is_kept(root: Path) -> None:
    def fail() -> Content:
        raise KernelCompileError("no")

    with pytest.raises(KernelCompileError, match="no"):
        cache.obtain(KEY, fail)
    assert not folder_of(root).exists() and no_leftovers(root)
    assert cache.obtain(KEY, Maker()).folder is not None


# Damage ---------------------------------------------------------------------------------------------------------------


def cut(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def flip(path: Path, place: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 1
    path.write_bytes(content)


def foreign_schema(folder: Path) -> None:
    entry = json.loads((folder / "entry.json").read_text())
    entry["key"]["schema"] += 1
    del entry["entry_sha256"]
    entry["entry_sha256"] = cache.sha256(cache.canonical_json(entry))
    (folder / "entry.json").write_text(json.dumps(entry))


def other_entry(folder: Path) -> None:
    other = replace(KEY, symbol="other")
    cache.obtain(other, Maker(b"wrong"))
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name(other.digest), folder)


def as_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "metadata cut to nothing": lambda f: cut(f / "entry.json", 0),
    "metadata cut to half": lambda f: cut(f / "entry.json", 0.5),
    "metadata is not an object": lambda f: (f / "entry.json").write_text("[1]"),
    "metadata is not text": lambda f: (f / "entry.json").write_bytes(b"\xff\xfe"),
    "fact changed": lambda f: (f / "entry.json").write_text((f / "entry.json").read_text().replace("0.5", "0.6")),
    "binary cut to half": lambda f: cut(f / "k.cubin", 0.5),
    "binary cut to nothing": lambda f: cut(f / "k.cubin", 0),
    "bit flipped": lambda f: flip(f / "k.cubin"),
    "source changed": lambda f: flip(f / "k.cu"),
    "half written": lambda f: (f / "entry.json").unlink(),
    "file missing": lambda f: (f / "k.ptx").unlink(),
    "wrong schema": foreign_schema,
    "entry of another key": other_entry,
    "a file": as_file,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_a_miss_with_one_line(
    root: Path, lines: Callable[[], list[str]], damage: Callable[[Path], object]
) -> None:
    maker = Maker()
    folder = folder_of(root)
    cache.obtain(KEY, maker)
    damage(folder)
    assert not lines()
    again = cache.obtain(KEY, maker)
    assert maker.calls == 2 and same(again, maker) and again.folder == folder
    [line] = lines()
    assert KEY.digest in line
    assert same(cache.obtain(KEY, maker), maker) and maker.calls == 2
    assert not lines() and no_leftovers(root)


def test_a_flipped_byte_is_found_wherever_it_is(root: Path) -> None:
    maker = Maker(b"ab")
    folder = folder_of(root)
    cache.obtain(KEY, maker)
    for path in folder.iterdir():
        whole = path.read_bytes()
        for place in range(0, len(whole), 3):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
            try:
                stored = cache._read(folder)
            except cache._Damaged:
                continue
            assert stored is not None and same(stored, maker)  # white space of the JSON may become other white space
        path.write_bytes(whole)


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "damage",
    [
        lambda f: cut(f / "entry.json", 0),
        lambda f: cut(f / "entry.json", 0.5),
        lambda f: cut(f / "store.cubin", 0.5),
        lambda f: flip(f / "store.cubin", 0.7),
    ],
    ids=["metadata cut to nothing", "metadata cut to half", "binary cut to half", "byte flipped"],
)
def test_a_damaged_kernel_is_compiled_again(
    root: Path, lines: Callable[[], list[str]], damage: Callable[[Path], object]
) -> None:
    """Case 47, with NVRTC."""
    first = kernels.compiled_kernel(KERNEL, HOPPER)
    [folder] = (root / "kernels").iterdir()
    assert sorted(p.name for p in folder.iterdir()) == ["entry.json", "store.cu", "store.cubin", "store.ptx"]
    assert json.loads((folder / "entry.json").read_text())["resources"]["store"]["registers"] > 0
    damage(folder)
    kernels._compiled.clear()
    assert kernels.compiled_kernel(KERNEL, HOPPER) == first
    assert len(lines()) == 1
    kernels._compiled.clear()
    assert kernels.compiled_kernel(KERNEL, HOPPER) == first
    assert not lines()
    assert (folder / "store.cubin").read_bytes() == first.cubin


@pytest.mark.emulate
def test_a_damaged_library_is_built_again_and_may_be_moved(root: Path, tmp_path: Path) -> None:
    """Case 47, with the host's compiler: each time in a process that has loaded nothing."""
    code = textwrap.dedent(f"""
        import logging, numpy, sys
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        from moesaic.runtime.emulator import build, toolchain
        run = toolchain.Compiler.run
        toolchain.Compiler.run = lambda *arguments: print("compiled") or run(*arguments)
        out = numpy.zeros(32, numpy.int32)
        build({SOURCE!r}, "store", []).launch((1, 1, 1), (32, 1, 1), [out.ctypes.data])
        assert out.tolist() == [7] * 32, out
    """)

    def run(root: Path) -> list[str]:
        environ = {**os.environ, "MOESAIC_CACHE_DIR": str(root)}
        done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and not done.stderr, done.stderr
        return done.stdout.splitlines()

    headers = toolchain.find_compiler().precompiles
    assert run(root) == ["compiled"] * (3 if headers else 2)  # the runtime, the headers, and the kernel
    assert run(root) == []
    [folder] = [path.parent for path in (root / "emulator").glob("*/store.cu")]
    flip(folder / "library.so", 0.3)
    line, compiled = run(root)
    assert "library.so was changed or cut" in line and compiled == "compiled"
    assert run(root) == []
    for path in root.rglob("entry.json"):
        assert not [word for word in path.read_text().split('"') if word.startswith("/")]
    shutil.move(root, tmp_path / "elsewhere")
    assert run(tmp_path / "elsewhere") == []


# Disks that fail ------------------------------------------------------------------------------------------------------


def refuse_writes(monkeypatch: pytest.MonkeyPatch, root: Path, number: int) -> None:
    """Has the file system below `root` refuse to make anything, for the superuser too."""

    def refusing(name: str, writes: Callable[..., bool]) -> None:
        real = getattr(os, name)

        def call(path: Any, *rest: Any, **more: Any) -> Any:
            if isinstance(path, str | os.PathLike) and Path(path).is_relative_to(root) and writes(path, *rest):
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *rest, **more)

        monkeypatch.setattr(os, name, call)

    refusing("mkdir", lambda path, *_: not os.path.exists(path))
    refusing("open", lambda path, flags, *_: flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR))
    refusing("rename", lambda *_: True)


@pytest.mark.usefixtures("one_warning")
def test_a_read_only_cache_is_read(root: Path, monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]) -> None:
    maker, other = Maker(), Maker(b"other")
    cache.obtain(KEY, maker)
    refuse_writes(monkeypatch, root, errno.EROFS)
    assert same(cache.obtain(KEY, maker), maker) and maker.calls == 1
    for symbol in ("x", "y"):
        stored = cache.obtain(replace(KEY, symbol=symbol), other)
        assert stored.folder is None and same(stored, other)
    assert other.calls == 2
    assert same(cache.obtain(KEY, maker), maker) and maker.calls == 1
    assert not lines()


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not stop the superuser")
@pytest.mark.usefixtures("one_warning")
def test_a_cache_without_permission_to_write(root: Path) -> None:
    maker = Maker()
    root.mkdir(mode=0o500)
    assert cache.obtain(KEY, maker).folder is None
    assert cache.obtain(KEY, maker).folder is None


@pytest.mark.usefixtures("one_warning")
def test_a_cache_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOESAIC_CACHE_DIR", str(tmp_path / "file" / "cache"))
    maker = Maker()
    assert same(cache.obtain(KEY, maker), maker)
    assert same(cache.obtain(KEY, maker), maker)


@pytest.mark.usefixtures("one_warning")
def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOESAIC_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", lambda _: (_ for _ in ()).throw(RuntimeError("no home")))
    assert cache.obtain(KEY, Maker()).folder is None
    assert cache.save_rejected("k", "text").read_text() == "text"


@pytest.mark.parametrize("call", ["write", "fsync"])
@pytest.mark.usefixtures("one_warning")
def test_a_full_disk(root: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    maker = Maker()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        for _ in range(2):
            stored = cache.obtain(KEY, maker)
            assert stored.folder is None and same(stored, maker)
    assert not folder_of(root).exists() and no_leftovers(root)
    cache.obtain(KEY, maker)  # there is room again
    assert cache.obtain(KEY, maker).folder == folder_of(root) and maker.calls == 3


@pytest.mark.usefixtures("one_warning")
def test_a_full_disk_and_what_is_of_use_only_as_a_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = Maker()
    with monkeypatch.context() as patch:
        refuse_writes(patch, root, errno.ENOSPC)
        stored = cache.obtain(KEY, maker, on_disk=True)
        assert stored.folder is not None and not stored.folder.is_relative_to(root)
        assert (stored.folder / "k.cubin").read_bytes() == maker.text
        assert cache.obtain(KEY, maker, on_disk=True).folder == stored.folder
    assert maker.calls == 1


def test_a_write_that_fails_half_way_for_real() -> None:
    """A file may not grow beyond 4 KiB: the first bytes of the binary are written, the rest fails."""
    code = textwrap.dedent("""
        import resource, warnings
        from moesaic.runtime import cache
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        make = lambda: cache.Content({"k.cubin": b"x" * 10000})
        key = cache.KernelKey(symbol="k", target="t", source_sha256="", options=(), nvrtc="", headers="")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                assert cache.obtain(key, make).files["k.cubin"] == b"x" * 10000
        assert len(caught) == 1 and "File too large" in str(caught[0].message), caught
        from moesaic.ir.environment import cache_root
        assert not [p for p in cache_root().rglob("*") if p.is_file()]
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# Trust ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [".", "kernels", "tmp"])
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
@pytest.mark.usefixtures("one_warning")
def test_folders_that_others_may_write_are_refused(root: Path, where: str, mode: int) -> None:
    maker = Maker()
    cache.obtain(KEY, maker)
    os.chmod(root / where, mode)
    for calls in (2, 3):
        stored = cache.obtain(KEY, maker)
        assert stored.folder is None and maker.calls == calls
    os.chmod(root / where, 0o755)
    assert cache.obtain(KEY, maker).folder is not None and maker.calls == 3


@pytest.mark.usefixtures("one_warning")
def test_a_root_of_somebody_else_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = Maker()
    cache.obtain(KEY, maker)
    if os.geteuid() == 0:
        os.chown(root, 12345, -1)
    else:
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert cache.obtain(KEY, maker).folder is None and maker.calls == 2


# Switches -------------------------------------------------------------------------------------------------------------


def test_no_cache_at_all(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = Maker()
    cache.obtain(KEY, maker)
    monkeypatch.setenv("MOESAIC_DISABLE_CACHE", "1")
    before = sorted(root.rglob("*"))
    for calls in (2, 3):
        stored = cache.obtain(KEY, maker)
        assert stored.folder is None and maker.calls == calls
    cache.obtain(replace(KEY, symbol="new"), maker)
    assert sorted(root.rglob("*")) == before
    kept = cache.obtain(KEY, maker, on_disk=True).folder
    assert kept is not None and not kept.is_relative_to(root)


def test_always_compile_writes_and_never_reads(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = Maker(b"old"), Maker(b"new")
    cache.obtain(KEY, old)
    cache._fresh.clear()  # as in another process
    monkeypatch.setenv("MOESAIC_ALWAYS_COMPILE", "1")
    assert same(cache.obtain(KEY, new), new) and new.calls == 1
    assert same(cache.obtain(KEY, new), new) and new.calls == 1  # made by this process
    monkeypatch.delenv("MOESAIC_ALWAYS_COMPILE")
    assert same(cache.obtain(KEY, old), new) and old.calls == 1
    assert no_leftovers(root)


def test_the_number_of_jobs_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.COMPILE_JOBS.get() is None
    for text in ("0", "-1", "many"):
        monkeypatch.setenv("MOESAIC_COMPILE_JOBS", text)
        with pytest.raises(UsageError, match=f"MOESAIC_COMPILE_JOBS is '{text}', expected a positive number"):
            cache.obtain(KEY, Maker())


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


def arguments(key: KernelKey) -> dict[str, Any]:
    return {name: value for name, value in key.fields.items() if name not in ("schema", "kind")}


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


# Kernels --------------------------------------------------------------------------------------------------------------


@pytest.mark.nvrtc
def test_a_kernel_from_the_disk_equals_the_compiled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = kernels.compiled_kernel(KERNEL, HOPPER)
    assert kernels.compiled_kernel(KERNEL, HOPPER) is made
    assert made == nvrtc.compile_source(SOURCE, name="store", target=HOPPER, extra_options=kernels.NVRTC_OPTIONS)
    kernels._compiled.clear()
    monkeypatch.setattr(nvrtc, "compile_source", None)
    read = kernels.compiled_kernel(KERNEL, HOPPER)
    assert read == made and read.resources.registers > 0
    assert read.seconds == pytest.approx(made.seconds)


@pytest.mark.nvrtc
def test_local_memory_is_checked_in_what_comes_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    source = """extern "C" __global__ void local(const int* at, int* y, int n) {
      int a[64];
      for (int i = 0; i < n; ++i) a[at[i]] = i;
      y[threadIdx.x] = a[at[threadIdx.x]];
    }"""
    kernel = replace(KERNEL, symbol="local", source=source)
    kernels.compiled_kernel(kernel, HOPPER)
    monkeypatch.setenv("MOESAIC_PTXAS_CHECK", "1")
    for _ in range(2):
        with pytest.raises(KernelCompileError, match="MOESAIC_PTXAS_CHECK"):
            kernels.compiled_kernel(kernel, HOPPER)
        kernels._compiled.clear()


@pytest.mark.nvrtc
def test_dump(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: Callable[[], list[str]]) -> None:
    kernels.compiled_kernel(KERNEL, HOPPER)
    monkeypatch.setenv("MOESAIC_DUMP_DIR", str(tmp_path / "dump"))
    made = kernels.compiled_kernel(KERNEL, HOPPER)  # compiled before, but not dumped
    dump = tmp_path / "dump"
    assert (dump / "store.cu").read_text() == SOURCE
    assert (dump / "store.ptx").read_text() == made.ptx
    assert (dump / "store.cubin").read_bytes() == made.cubin
    report = json.loads((dump / "store.resources.json").read_text())
    assert report["target"] == "sm_90a" and report["entries"]["store"]["registers"] == made.resources.registers
    other = replace(KERNEL, source=SOURCE.replace("7", "8"))
    kernels.compiled_kernel(other, HOPPER)  # of the same name: both are kept
    assert (dump / "store.cu").read_text() == SOURCE
    [second] = dump.glob("store-*.cu")
    assert second.read_text() == other.source
    assert len(list(dump.iterdir())) == 8
    monkeypatch.setenv("MOESAIC_DUMP_DIR", str(dump / "store.cu" / "below"))
    for kernel in (KERNEL, other):
        kernels.compiled_kernel(kernel, HOPPER)
    [line] = lines()
    assert "MOESAIC_DUMP_DIR" in line


@pytest.mark.nvrtc
def test_override(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: Callable[[], list[str]]) -> None:
    generated = kernels.compiled_kernel(KERNEL, HOPPER)
    monkeypatch.setenv("MOESAIC_OVERRIDE_DIR", str(tmp_path))
    assert kernels.compiled_kernel(KERNEL, HOPPER) is generated
    (tmp_path / "store.cu").write_text(SOURCE.replace("7", "70000"))
    edited = kernels.compiled_kernel(KERNEL, HOPPER)
    assert edited.ptx != generated.ptx and "70000" in edited.ptx
    assert kernels.compiled_kernel(KERNEL, HOPPER) is edited
    [line] = lines()
    assert str(tmp_path / "store.cu") in line
    (tmp_path / "store.cu").write_text("not a kernel")
    with pytest.raises(KernelCompileError, match=r"store\.cu:1(.|\n)*The text was edited by hand"):
        kernels.compiled_kernel(KERNEL, HOPPER)
    monkeypatch.delenv("MOESAIC_OVERRIDE_DIR")
    assert kernels.compiled_kernel(KERNEL, HOPPER) is generated


# Looking into the cache -----------------------------------------------------------------------------------------------

LIBRARY = LibraryKey(
    symbol="lib", target="x86_64", source_sha256="", flags=(), compiler="c++ 1", command_sha256="", headers=""
)


def test_list_show_clear(root: Path) -> None:
    assert cache.entries() == [] and cache.clear() == (0, 0)
    assert not root.exists()
    cache.obtain(KEY, Maker())
    cache.obtain(LIBRARY, Maker(b"library"), on_disk=True)
    (root / "kernels" / "notes.txt").write_text("not an entry")
    day = 86400
    for path, age in ((folder_of(root), 40 * day), (folder_of(root, LIBRARY), day)):
        os.utime(path / "entry.json", (time.time() - age,) * 2)
    newest, oldest = cache.entries()
    assert (newest.kind, newest.key, newest.name, newest.target) == ("emulator", LIBRARY.digest, "lib", "x86_64")
    assert (oldest.kind, oldest.key, oldest.name, oldest.target) == ("kernels", KEY.digest, "k", "sm_90a")
    assert oldest.age == pytest.approx(40 * day, abs=60)
    assert oldest.bytes == sum(p.stat().st_size for p in folder_of(root).iterdir())

    details = cache.show(KEY.digest[:10].upper())
    assert details.entry.key == KEY.digest and details.damage is None
    assert details.files["k.cu"] == 6
    assert details.description is not None and details.description["key"]["nvrtc"] == "13.0"
    cut(folder_of(root) / "k.cubin", 0.5)
    assert cache.show(KEY.digest).damage == "k.cubin was changed or cut"
    with pytest.raises(InputError, match="no entry"):
        cache.show("xyz")
    with pytest.raises(InputError, match="2 keys start"):
        cache.show("")

    oldest = cache.entries()[1]
    assert cache.clear(older_than=30 * day) == (1, oldest.bytes)
    assert [entry.key for entry in cache.entries()] == [LIBRARY.digest]
    assert cache.clear(older_than=30 * day) == (0, 0)
    assert cache.clear() == (1, newest.bytes)
    assert cache.entries() == [] and no_leftovers(root)
    assert (root / "kernels" / "notes.txt").exists()


def test_damaged_entries_are_listed_and_cleared(root: Path) -> None:
    for symbol, content in (("a", b""), ("b", b"[]"), ("c", b"{")):
        key = replace(KEY, symbol=symbol)
        cache.obtain(key, Maker())
        (folder_of(root, key) / "entry.json").write_bytes(content)
    cache.obtain(replace(KEY, symbol="d"), Maker())
    (folder_of(root, replace(KEY, symbol="d")) / "entry.json").unlink()
    assert [entry.name for entry in cache.entries()] == [""] * 4
    assert all(cache.show(entry.key).damage for entry in cache.entries())
    assert cache.clear()[0] == 4
    assert cache.entries() == []


def test_what_cannot_be_removed_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.obtain(KEY, Maker())
    refuse_writes(monkeypatch, root, errno.EROFS)
    with pytest.raises(InputError, match=KEY.digest):
        cache.clear()
    assert len(cache.entries()) == 1

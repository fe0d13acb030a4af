"""The cache on disk: entries that are damaged, disks that fail, folders that others may write."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cached import (
    HOPPER,
    KERNEL,
    KEY,
    SOURCE,
    Maker,
    cut,
    empty_cache,
    folder_of,
    no_leftovers,
    refuse_writes,
    said_since,
    same,
)

from moesaic.runtime import cache, kernels
from moesaic.runtime.emulator import toolchain


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    return empty_cache(monkeypatch, tmp_path)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return said_since(caplog)


@pytest.fixture
def one_warning() -> Iterator[None]:
    """Fails unless exactly one warning was given, and it says that nothing is kept."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert ["for this process only" in str(w.message) for w in caught] == [True], [str(w.message) for w in caught]


# Damage ---------------------------------------------------------------------------------------------------------------


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

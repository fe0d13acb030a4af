"""The cache on disk: keys, entries, switches, kernels, and what the command line sees of it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
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
    SOURCE,
    Maker,
    arguments,
    cut,
    empty_cache,
    folder_of,
    no_leftovers,
    refuse_writes,
    said_since,
    same,
)

from moesaic.codegen import nvrtc
from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.target import Target
from moesaic.ir import environment
from moesaic.ir.errors import InputError, KernelCompileError, UsageError
from moesaic.runtime import cache, kernels
from moesaic.runtime.cache import Content, LibraryKey


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    return empty_cache(monkeypatch, tmp_path)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return said_since(caplog)


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

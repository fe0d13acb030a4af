"""Building emulated kernels: errors of the compiler, the cache, toolchains that are missing."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from moesaic.ir.errors import InputError, KernelCompileError, ToolchainError
from moesaic.runtime.emulator import EmulatedKernel, build, toolchain

pytestmark = pytest.mark.emulate

HEADER = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n"
FIRST_LINE = 4  # of a body, behind the header and the kernel's own line


def compile_kernel(body: str, parameters: str, name: str = "kernel", **more: object) -> EmulatedKernel:
    """A kernel whose body starts in line `FIRST_LINE` of its source."""
    text = f'{HEADER}extern "C" __global__ void {name}({parameters}) {{\n{textwrap.dedent(body).strip(chr(10))}\n}}\n'
    return build(text, name, [], **more)  # type: ignore[arg-type]


def run(kernel: EmulatedKernel, out: np.ndarray, grid: int = 1, block: int = 32, **options: object) -> np.ndarray:
    """Launches a kernel with `out` as its only argument; returns `out`."""
    kernel.launch((grid, 1, 1), (block, 1, 1), [out.ctypes.data], **options)  # type: ignore[arg-type]
    return out


ONE = 'extern "C" __global__ void one(int* out) { out[0] = 1; }\n'


def test_syntax_error() -> None:
    with pytest.raises(KernelCompileError) as caught:
        compile_kernel("\nout[0] = undeclared_name;\n", "int* out", "does_not_compile")
    report = str(caught.value)
    assert "'does_not_compile'" in report
    assert f"does_not_compile.cu:{FIRST_LINE}" in report
    assert "undeclared_name" in report
    assert len(report.splitlines()) < 40
    saved = Path(report.split("source saved as ")[1].splitlines()[0])
    assert "undeclared_name" in saved.read_text()


def test_unknown_kernel_name() -> None:
    with pytest.raises(KernelCompileError, match="missing_kernel"):
        build(ONE, "missing_kernel", [])
    with pytest.raises(InputError, match="identifier"):
        build(ONE, "one two", [])


def test_extern_shared_is_refused() -> None:
    with pytest.raises(KernelCompileError):
        compile_kernel("extern __shared__ int values[]; out[0] = values[0];", "int* out", "extern_shared")


def test_the_cache_is_used_and_heals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESAIC_CACHE_DIR", str(tmp_path / "cache"))
    first = build(ONE, "one", [])
    written = first.library.stat().st_mtime_ns
    assert first.library.is_relative_to(tmp_path / "cache" / "emulator")
    assert first.source.read_text() == ONE
    assert build(ONE, "one", []) is first

    prepare = "from moesaic.runtime.emulator import build, toolchain\n"
    forbid = "def no_compile(*_): raise AssertionError('compiled again')\ntoolchain.Compiler.run = no_compile\n"
    show = f"print(build({ONE!r}, 'one', []).library)\n"
    for script in (prepare + show, prepare + forbid + show):  # the first may have to build the runtime library here
        again = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
        assert again.stdout.strip() == str(first.library)
        assert first.library.stat().st_mtime_ns == written

    content = first.library.read_bytes()
    # A new file, as a damaged disk or a killed writer would leave it; the loaded library keeps the old one.
    damaged = first.library.with_suffix(".tmp")
    damaged.write_bytes(content[: len(content) // 2])
    damaged.replace(first.library)
    second = build(ONE, "one", [])
    assert second.library == first.library
    assert second.library.stat().st_size == len(content)
    assert run(second, np.zeros(1, np.int32), block=1)[0] == 1

    (first.library.parent / "entry.json").write_text("{")
    assert run(build(ONE, "one", []), np.zeros(1, np.int32), block=1)[0] == 1


def test_precompiled_headers_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies beside the header is read in its place: the header itself may then hold anything."""
    if not toolchain.find_compiler().precompiles:
        pytest.skip("this compiler reads the headers themselves")
    monkeypatch.setenv("MOESAIC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys.modules[build.__module__], "_headers", {})  # as in a new process
    build(ONE, "one", [])
    [header] = (tmp_path / "cache").rglob("prefix.h")
    header.write_text("#error is not read")
    other = ONE.replace("one", "other")
    assert run(build(other, "other", []), np.zeros(1, np.int32), block=1)[0] == 1


def test_an_unusable_cache_is_replaced_by_a_temporary_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("MOESAIC_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="for this process only"):
        kernel = build(ONE, "one", [])
    assert not kernel.library.is_relative_to(tmp_path)

    shared = tmp_path / "shared"
    (shared / "emulator").mkdir(parents=True)
    os.chmod(shared / "emulator", 0o777)
    monkeypatch.setenv("MOESAIC_CACHE_DIR", str(shared))
    with pytest.warns(UserWarning, match="somebody else"):
        build(ONE, "one", [])


def test_a_library_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a process has mapped all that it may: the error is ours, and the next try may be better."""

    def refuse(path: str) -> None:
        raise OSError(f"{path}: failed to map segment from shared object")

    text = ONE.replace("one", "one_not_loaded")
    with monkeypatch.context() as without:
        without.setattr(ctypes, "CDLL", refuse)
        with pytest.raises(ToolchainError, match=r"(?s)cannot load .*failed to map.* kernels, .*max_map_count.*noexec"):
            build(text, "one_not_loaded", [])
    assert run(build(text, "one_not_loaded", []), np.zeros(1, np.int32)) == 1


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.raises(ToolchainError, match="/no/such/compiler"):
        build(ONE, "one", [])
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ToolchainError, match="install one"):
        build(ONE, "one", [])

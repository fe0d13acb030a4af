"""Compiling with NVRTC: what comes out, what is reported when nothing does, and finding the headers."""

from __future__ import annotations

import builtins
import os
import platform
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from moesaic.codegen import disassemble, nvrtc, resources
from moesaic.codegen.resources import Resources
from moesaic.codegen.target import Target
from moesaic.ir.errors import InternalError, KernelCompileError, ToolchainError

HOPPER = Target.parse("sm_90a")

KERNEL = """#include <cuda_bf16.h>
extern "C" __global__ void __launch_bounds__(128) scale(const __nv_bfloat16* x, float* y, float by) {
  __shared__ float tile[128];
  tile[threadIdx.x] = __bfloat162float(x[blockIdx.x * 128 + threadIdx.x]) * by;
  __syncthreads();
  y[blockIdx.x * 128 + threadIdx.x] = tile[127 - threadIdx.x];
}
"""

LOCAL = """extern "C" __global__ void local(const int* at, int* y, int n) {
  int a[64];
  for (int i = 0; i < n; ++i) a[at[i]] = i;
  y[threadIdx.x] = a[at[threadIdx.x]];
}
"""


@pytest.fixture(autouse=True)
def private_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("MOESAIC_PTXAS_CHECK", "MOESAIC_LINEINFO", "MOESAIC_CUOBJDUMP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MOESAIC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _no_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_wheel_roots", list)
    monkeypatch.setattr(nvrtc, "_toolkit_roots", list)


def _report(**changed: Any) -> str:
    arguments: dict[str, Any] = {"source": KERNEL, "name": "scale", "target": HOPPER, **changed}
    with pytest.raises(KernelCompileError) as caught:
        nvrtc.compile_source(arguments.pop("source"), **arguments)
    report = str(caught.value)
    assert len(report.splitlines()) < 40
    assert max(map(len, report.splitlines())) < 320
    return report


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", ["sm_80", "sm_90a", "sm_100a"])
def test_a_bfloat16_kernel_compiles_without_a_gpu(name: str) -> None:
    kernel = nvrtc.compile_source(KERNEL, name="scale", target=Target.parse(name))
    assert kernel.cubin.startswith(b"\x7fELF")
    assert f".target {name}" in kernel.ptx
    assert "\0" not in kernel.ptx
    assert list(kernel.entries) == ["scale"]
    assert kernel.resources.static_shared_bytes == 512
    assert 0 < kernel.resources.registers < 40
    assert kernel.resources.barriers == 1
    assert not kernel.resources.uses_local_memory
    assert not [option for option in kernel.options if "fast" in option or "ftz" in option]


@pytest.mark.nvrtc
def test_compiling_twice_gives_the_same() -> None:
    first, second = (nvrtc.compile_source(KERNEL, name="scale", target=HOPPER) for _ in range(2))
    assert first == second


@pytest.mark.nvrtc
def test_line_information(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = nvrtc.compile_source(KERNEL, name="scale", target=HOPPER)
    asked = nvrtc.compile_source(KERNEL, name="scale", target=HOPPER, lineinfo=True)
    assert ".loc" in asked.ptx
    assert ".loc" not in plain.ptx
    monkeypatch.setenv("MOESAIC_LINEINFO", "1")
    assert nvrtc.compile_source(KERNEL, name="scale", target=HOPPER).ptx == asked.ptx
    assert "--generate-line-info" in nvrtc.compile_options(HOPPER)


@pytest.mark.nvrtc
def test_a_syntax_error_is_reported_in_under_40_lines(private_cache: Path) -> None:
    broken = KERNEL.replace("* by;", "* ;") + "void unused() { undeclared(); }\n" * 100
    report = _report(source=broken)
    assert "kernel 'scale' for sm_90a at scale.cu:4" in report
    assert "tile[threadIdx.x] = __bfloat162float(x[blockIdx.x * 128 + threadIdx.x]) * ;" in report
    assert "expected an expression" in report
    assert "undeclared" not in report
    assert "--gpu-architecture=sm_90a" in report
    (saved,) = (private_cache / "failed").glob("scale-*.cu")
    assert str(saved) in report
    assert saved.read_text() == broken
    assert "undeclared" in saved.with_suffix(".log").read_text()
    assert stat.S_IMODE(private_cache.stat().st_mode) & 0o022 == 0


@pytest.mark.nvrtc
def test_an_error_within_templates_shows_the_line() -> None:
    source = """template <class T> __device__ void inner(T x) { x.missing(); }
template <class T> __device__ void outer(T x) { inner(x); }
extern "C" __global__ void k() { outer(1); }
"""
    report = _report(source=source, name="k")
    assert "at k.cu:1" in report
    assert "x.missing();" in report


@pytest.mark.nvrtc
@pytest.mark.parametrize("option", ["--no-such-option", "--ptxas-options=--no-such-option"])
def test_a_bad_option_is_reported(option: str) -> None:
    report = _report(extra_options=[option, *(f"-DMANY_{n}" for n in range(100))])
    assert "'scale'" in report
    assert "no-such-option" in report
    assert "more" in report
    assert "source: " in report


@pytest.mark.nvrtc
def test_an_assembler_error_shows_the_ptx(private_cache: Path) -> None:
    report = _report(source='extern "C" __global__ void k() { asm volatile("bogus.f32 1;"); }', name="k")
    assert "of the PTX" in report
    assert "bogus.f32 1;" in report
    assert list((private_cache / "failed").glob("k-*.ptx"))


@pytest.mark.nvrtc
def test_a_missing_header_is_reported() -> None:
    assert 'cannot open source file "moesaic/none.cuh"' in _report(source='#include "moesaic/none.cuh"\n', name="k")


@pytest.mark.nvrtc
def test_helpers_are_included_below_moesaic(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "moesaic").mkdir()
    (tmp_path / "moesaic" / "twice.cuh").write_text("__device__ int twice(int x) { return 2 * x; }\n")
    monkeypatch.setattr(nvrtc, "helper_include_dirs", lambda: [tmp_path])
    source = '#include "moesaic/twice.cuh"\nextern "C" __global__ void k(int* x) { *x = twice(*x); }\n'
    before = nvrtc.header_digest()
    nvrtc.compile_source(source, name="k", target=HOPPER)
    (tmp_path / "moesaic" / "twice.cuh").write_text("__device__ int twice(int x) { return 3 * x; }\n")
    assert nvrtc.header_digest() != before


@pytest.mark.nvrtc
def test_files_in_the_working_directory_are_not_included(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "stray.h").write_text("#define FOUND\n")
    monkeypatch.chdir(tmp_path)
    assert "cannot open source file" in _report(source='#include "stray.h"\n', name="k")


@pytest.mark.nvrtc
def test_a_failure_is_saved_elsewhere_where_the_cache_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOESAIC_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    report = _report(source="broken")
    (saved,) = tmp_path.glob("moesaic-failed-*/scale-*.cu")
    assert str(saved) in report


@pytest.mark.nvrtc
def test_spills_and_local_memory_fail_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = nvrtc.compile_source(LOCAL, name="local", target=HOPPER)
    assert kernel.resources.stack_bytes >= 256
    monkeypatch.setenv("MOESAIC_PTXAS_CHECK", "1")
    nvrtc.compile_source(KERNEL, name="scale", target=HOPPER)
    report = _report(source=LOCAL, name="local")
    assert "MOESAIC_PTXAS_CHECK" in report
    assert str(kernel.resources.stack_bytes) in report


def test_a_kernel_name_is_an_identifier() -> None:
    with pytest.raises(InternalError, match="C identifier"):
        nvrtc.compile_source(KERNEL, name="../scale", target=HOPPER)


@pytest.mark.nvrtc
def test_the_version_and_the_library() -> None:
    assert nvrtc.nvrtc_version() >= (13, 0)
    path = nvrtc.nvrtc_path()
    assert path is None or path.exists()


# Finding headers


@pytest.mark.parametrize("layout", ["include", f"targets/{platform.machine()}-linux/include"])
def test_headers_from_a_wheel_in_either_layout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, layout: str) -> None:
    folder = tmp_path / "site" / "nvidia" / "cu13" / layout
    folder.mkdir(parents=True)
    (folder / "cuda_bf16.h").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "empty"), str(tmp_path / "site")])
    monkeypatch.setattr(nvrtc, "_toolkit_roots", list)
    assert nvrtc.cuda_include_dirs() == [folder]


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
@pytest.mark.parametrize("layout", ["include", f"targets/{platform.machine()}-linux/include"])
def test_headers_from_a_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, layout: str, variable: str) -> None:
    folder = tmp_path / layout
    folder.mkdir(parents=True)
    (folder / "cuda_bf16.h").write_text("")
    monkeypatch.setattr(nvrtc, "_wheel_roots", list)
    for name in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    assert nvrtc.cuda_include_dirs() == [folder]


@pytest.mark.nvrtc
@pytest.mark.parametrize("layout", ["include", f"targets/{platform.machine()}-linux/include"])
def test_a_kernel_compiles_with_headers_of_either_layout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, layout: str
) -> None:
    (real,) = nvrtc.cuda_include_dirs()
    link = tmp_path / "nvidia" / "cu13" / layout
    link.parent.mkdir(parents=True)
    link.symlink_to(real)
    monkeypatch.setattr(nvrtc, "_wheel_roots", lambda: [tmp_path / "nvidia" / "cu13"])
    monkeypatch.setattr(nvrtc, "_toolkit_roots", list)
    kernel = nvrtc.compile_source(KERNEL, name="scale", target=HOPPER)
    assert f"--include-path={link}" in kernel.options


def test_missing_headers_are_one_error_with_folders_and_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(nvrtc, "_wheel_roots", lambda: [tmp_path / "wheel"])
    monkeypatch.setattr(nvrtc, "_toolkit_roots", lambda: [tmp_path / "toolkit"])
    with pytest.raises(ToolchainError) as caught:
        nvrtc.cuda_include_dirs()
    message = str(caught.value)
    for part in ("wheel/include", "toolkit/include", "toolkit/targets", "nvidia-cuda-runtime", "CUDA_HOME"):
        assert part in message
    assert caught.value.exit_code == 3


@pytest.mark.nvrtc
def test_compiling_without_headers_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    _no_wheels(monkeypatch)
    with pytest.raises(ToolchainError, match="nvidia-cuda-runtime"):
        nvrtc.compile_source(KERNEL, name="scale", target=HOPPER)


def test_missing_bindings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("cuda"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ToolchainError, match="pip install 'cuda-bindings"):
        nvrtc.nvrtc_version()


def test_the_digest_of_headers_ignores_where_they_lie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    digests = []
    for folder, text in (("one", "a"), ("two", "a"), ("three", "b")):
        include = tmp_path / folder / "include"
        include.mkdir(parents=True)
        (include / "cuda_bf16.h").write_text(text)
        monkeypatch.setattr(nvrtc, "_wheel_roots", lambda root=tmp_path / folder: [root])
        digests.append(nvrtc.header_digest())
    assert digests[0] == digests[1] != digests[2]


# Reading the log


def test_parsing_a_log() -> None:
    log = """ptxas info    : 8 bytes gmem, 12 bytes cmem[4]
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
ptxas         .     648 bytes stack frame, 1044 bytes spill stores, 1068 bytes spill loads
ptxas info    : Used 64 registers, used 2 barriers, 648 bytes cumulative stack size, 256 bytes smem, 8 bytes cmem[2]
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers, 360 bytes cmem[0], 16 bytes cmem[2]
"""
    found = resources.parse_ptxas_log(log)
    assert found == {
        "first": Resources(64, 1044, 1068, 648, 256, 8, 2),
        "second": Resources(registers=8, constant_bytes=376),
    }
    assert resources.largest(found.values()) == Resources(64, 1044, 1068, 648, 256, 376, 2)
    assert resources.parse_ptxas_log("") == {}
    lines = resources.table(found).splitlines()
    assert len(lines) == 3
    assert len({len(line) for line in lines}) == 1
    assert lines[1].split() == ["first", "64", "1044", "1068", "648", "256", "8", "2"]


# SASS


def _fake_program(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_disassemblers_are_searched_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    site = tmp_path / "site"
    _fake_program(site / "nvidia/cu13/bin/cuobjdump", "echo wheel")
    _fake_program(site / "triton/backends/nvidia/bin/cuobjdump", "echo triton")
    _fake_program(tmp_path / "path" / "nvdisasm", "echo path")
    _fake_program(tmp_path / "mine" / "cuobjdump", 'echo "mine $1"')
    monkeypatch.setattr(sys, "path", [str(site)])
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}{os.pathsep}/usr/bin{os.pathsep}/bin")
    assert [tool.origin for tool in disassemble.disassemblers()] == ["wheel", "PATH", "triton"]
    assert disassemble.disassemble(b"cubin").strip() == "wheel"
    _fake_program(site / "nvidia/cu13/bin/cuobjdump", "echo too new >&2; exit 1")
    assert disassemble.disassemble(b"cubin").strip() == "path"
    monkeypatch.setenv("MOESAIC_CUOBJDUMP", str(tmp_path / "mine" / "cuobjdump"))
    assert disassemble.disassemble(b"cubin").strip() == "mine -sass"


def test_no_disassembler_names_the_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"nvidia-cuda-cuobjdump.*nvidia-cuda-nvdisasm"):
        disassemble.disassemble(b"cubin")


def test_what_every_disassembler_said_is_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _fake_program(tmp_path / "cuobjdump", "echo this cubin is too new >&2; exit 1")
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    with pytest.raises(ToolchainError, match="this cubin is too new"):
        disassemble.disassemble(b"cubin")


def test_a_chosen_disassembler_has_to_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESAIC_CUOBJDUMP", "/nowhere/cuobjdump")
    with pytest.raises(ToolchainError, match="MOESAIC_CUOBJDUMP"):
        disassemble.disassemblers()


@pytest.mark.nvrtc
def test_sass() -> None:
    if not disassemble.disassemblers():
        pytest.skip("no cuobjdump or nvdisasm")
    kernel = nvrtc.compile_source(KERNEL, name="scale", target=HOPPER)
    assert "EXIT" in disassemble.disassemble(kernel.cubin)

"""CUDA source to cubin, PTX and a resource report with NVRTC; needs neither a GPU nor a driver.

NVRTC and the CUDA headers come from wheels or from a toolkit. The bindings are imported inside functions, so that
importing this module loads nothing of CUDA.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moesaic.codegen import resources
from moesaic.codegen.resources import Resources
from moesaic.codegen.target import Target
from moesaic.ir import environment
from moesaic.ir.errors import InternalError, KernelCompileError, ToolchainError

HEADER_PACKAGE = "nvidia-cuda-runtime"
NVRTC_PACKAGE = "nvidia-cuda-nvrtc"

# What generated kernels include. The first one marks a folder as the one with the CUDA headers.
OUR_FAULT = "This is a fault in moesaic or in its toolchain, not in the layer: please report it with these files."
"""The end of the message where generated text is rejected."""

_HEADERS = ("cuda_bf16.h", "cuda_bf16.hpp", "cuda_fp16.h", "cuda_fp16.hpp", "cuda_fp8.h", "cuda_fp8.hpp")
_SBSA = ("sbsa-linux", "aarch64-linux")
_ERROR_LINE = re.compile(r"^(?P<file>[^()\n]+)\((?P<line>\d+)\): (?:catastrophic |internal )?error\b")
_SUMMARY = re.compile(r"errors? detected in the compilation|^Compilation terminated|assembly aborted due to errors")
_COMPLAINT = re.compile(r"\b(?:error|fatal)\b")  # what NVRTC and ptxas say that is not about a line of the source
_PTX_LINE = re.compile(r"^ptxas .*, line (?P<line>\d+); (?:error|fatal)")
_WIDTH = 200  # longest line of a message
_OPTIONS_SHOWN = 12


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A cubin with what was learnt while making it."""

    name: str
    target: Target
    cubin: bytes
    ptx: str
    log: str
    """What NVRTC and ptxas said, warnings included; lines that differ from run to run (compile times) are left out."""
    entries: Mapping[str, Resources]
    """The resources of each ``__global__`` function, by its name in the cubin."""
    options: tuple[str, ...]
    """Every option NVRTC was given, folders included."""
    seconds: float = field(compare=False)
    """Wall-clock time of the compilation."""

    @property
    def resources(self) -> Resources:
        """The resources of the kernel `name`; where no entry has this name, the largest of each over all entries."""
        return self.entries.get(self.name) or resources.largest(self.entries.values())


def compile_source(
    source: str,
    *,
    name: str,
    target: Target,
    lineinfo: bool | None = None,
    extra_options: Sequence[str] = (),
    include_dirs: Sequence[Path] | None = None,
) -> CompiledKernel:
    """Compile one generated file. `name` is the kernel in it, and ``<name>.cu`` is what messages call the file.

    `lineinfo` adds line information for profilers (None: as ``MOESAIC_LINEINFO`` says). `include_dirs` replaces the
    folders that are searched for headers (None: ours and CUDA's).

    Raises `KernelCompileError`, a report of under 40 lines, if the source or an option is rejected, and also, with
    ``MOESAIC_PTXAS_CHECK=1``, if the kernel spills; `ToolchainError` if NVRTC or the headers are missing.
    """
    if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) is None:
        raise InternalError(f"{name!r} cannot name a kernel: it has to be a C identifier")
    nvrtc = _bindings()
    if include_dirs is None:
        include_dirs = [*helper_include_dirs(), *cuda_include_dirs()]
    options = (
        *compile_options(target, lineinfo=lineinfo, extra_options=extra_options),
        *(f"--include-path={folder}" for folder in include_dirs),
    )
    start = time.perf_counter()
    result, program = nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, None, None)
    _check(nvrtc, result, "create a program")
    try:
        # NVRTC's own cache would give the code back without the log, and with it without registers and spills.
        encoded = [option.encode() for option in (*options, "--no-cache")]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = _clean(_text(nvrtc, program, "ProgramLog"))
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            # PTX exists where it was ptxas that failed, and is then what its line numbers are about.
            ptx = _text(nvrtc, program, "PTX")
            raise KernelCompileError(_report(name, target, source, options, log or _describe(nvrtc, result), ptx))
        cubin = _bytes(nvrtc, program, "CUBIN")
        ptx = _text(nvrtc, program, "PTX")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    kernel = CompiledKernel(
        name=name,
        target=target,
        cubin=cubin,
        ptx=ptx,
        log=log,
        entries=resources.parse_ptxas_log(log),
        options=options,
        seconds=time.perf_counter() - start,
    )
    if environment.PTXAS_CHECK.get():
        check_local_memory(kernel, source)
    return kernel


def compile_options(
    target: Target, *, lineinfo: bool | None = None, extra_options: Sequence[str] = ()
) -> tuple[str, ...]:
    """The options that decide what comes out, without folders: these belong in a cache key, beside `header_digest`.

    There is no fast-math flag: what a kernel computes may not depend on how it was compiled. Files beside the working
    directory cannot be included by accident.
    """
    if lineinfo is None:
        lineinfo = environment.LINEINFO.get()
    return (
        f"--gpu-architecture={target.name}",
        "--std=c++17",
        "--no-source-include",
        "--ptxas-options=-v",
        *(("--generate-line-info",) if lineinfo else ()),
        *extra_options,
    )


def check_local_memory(kernel: CompiledKernel, source: str) -> None:
    """Raise `KernelCompileError` if an entry of `kernel` spills registers or uses local memory.

    `source` is saved for reading; the message says where.
    """
    guilty = {entry: used for entry, used in kernel.entries.items() if used.uses_local_memory}
    if guilty:
        raise KernelCompileError(
            f"kernel {kernel.name!r} uses local memory on {kernel.target}, and {environment.PTXAS_CHECK.name} is set\n"
            f"{resources.table(guilty)}\n{_saved(kernel.name, source, kernel.log)}"
        )


def nvrtc_version() -> tuple[int, int]:
    """The version of the NVRTC that is loaded, such as ``(13, 0)``. Raises `ToolchainError` if it is missing."""
    nvrtc = _bindings()
    result, major, minor = nvrtc.nvrtcVersion()
    _check(nvrtc, result, "tell its version")
    return int(major), int(minor)


def nvrtc_path() -> Path | None:
    """The NVRTC library in use, as far as this process can tell. Raises `ToolchainError` if NVRTC is missing."""
    _bindings()
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    for line in maps.splitlines():
        path = line.partition("/")[2]
        if "libnvrtc.so" in path:
            return Path("/" + path)
    return None


def cuda_include_dirs() -> list[Path]:
    """The folders to search for ``cuda_bf16.h`` and its kin: from wheels, else from a toolkit.

    Wheels come first because NVRTC itself is a wheel, and headers of another version need not match it. A wheel and a
    toolkit may each be flat (``include``) or hold a folder a platform (``targets/x86_64-linux/include``).

    Raises `ToolchainError` naming every folder tried and the package to install.
    """
    tried = []
    for root in [*_wheel_roots(), *_toolkit_roots()]:
        for folder in _layouts(root):
            if (folder / _HEADERS[0]).is_file():
                return [folder]
            tried.append(str(folder))
    raise ToolchainError(
        f"the CUDA headers were not found: no {_HEADERS[0]} in any of\n  "
        + "\n  ".join(tried or ["(no folder of this machine looks like a CUDA installation)"])
        + f"\nInstall them with: pip install '{HEADER_PACKAGE}>=13.0,<14' (or set CUDA_HOME to a CUDA 13 toolkit)"
    )


def helper_include_dirs() -> list[Path]:
    """The folder that ``#include "moesaic/x.cuh"`` is relative to; empty where the package ships none."""
    folder = Path(str(importlib.resources.files("moesaic.templates"))) / "include"
    return [folder] if folder.is_dir() else []


def header_digest() -> str:
    """SHA-256, in hex, of the headers kernels include, CUDA's and ours; it does not depend on where they lie.

    Raises `ToolchainError` if the CUDA headers are missing.
    """
    digest = hashlib.sha256()
    files = [(folder, folder / header) for folder in cuda_include_dirs() for header in _HEADERS]
    for folder in helper_include_dirs():
        files += [(folder, path) for path in sorted(folder.rglob("*")) if path.is_file()]
    for folder, path in files:
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


def _wheel_roots() -> list[Path]:
    """Where NVIDIA's wheels unpack, whether they are there or not: CUDA 13 in one folder, earlier in one a package."""
    names = ("nvidia/cu13", "nvidia/cuda_runtime")
    # sys.path rather than the module `nvidia`: importing that may find the one folder of several that lacks the wheel.
    places = [Path(entry) for entry in sys.path if entry and os.path.isdir(entry)]
    roots = [place / name for place in places for name in names if (place / "nvidia").is_dir()]
    return list(dict.fromkeys(roots))


def _toolkit_roots() -> list[Path]:
    """Where a toolkit may be: as the environment says, else where the installer puts it."""
    named = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX")]
    return list(dict.fromkeys([*(Path(root) for root in named if root), Path("/usr/local/cuda")]))


def _layouts(root: Path) -> list[Path]:
    machine = platform.machine()
    platforms = _SBSA if machine == "aarch64" else (f"{machine}-linux",)
    return [root / "include", *(root / "targets" / name / "include" for name in platforms)]


def _bindings() -> Any:
    """The module ``cuda.bindings.nvrtc``, with its library loaded; `ToolchainError` otherwise."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise ToolchainError(
            f"the CUDA bindings for Python cannot be imported ({error}); install them with: "
            "pip install 'cuda-bindings>=13.0.3,<14'"
        ) from error
    try:
        nvrtc.nvrtcVersion()
    except (OSError, RuntimeError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ToolchainError(
            f"the NVRTC library cannot be loaded ({first}); install it with: pip install '{NVRTC_PACKAGE}>=13.0.88,<14'"
        ) from error
    return nvrtc


def _describe(nvrtc: Any, result: Any) -> str:
    _, text = nvrtc.nvrtcGetErrorString(result)
    return str(text.decode() if isinstance(text, bytes) else text)


def _check(nvrtc: Any, result: Any, action: str) -> None:
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise ToolchainError(f"NVRTC could not {action}: {_describe(nvrtc, result)}")


def _bytes(nvrtc: Any, program: Any, what: str) -> bytes:
    """One product of a program (``CUBIN``, ``PTX``, ``ProgramLog``); empty if it was not made."""
    result, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS or size == 0:
        return b""
    buffer = bytearray(size)
    (result,) = getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    _check(nvrtc, result, f"hand over its {what}")
    return bytes(buffer)


def _text(nvrtc: Any, program: Any, what: str) -> str:
    return _bytes(nvrtc, program, what).rstrip(b"\0").decode(errors="replace")


def _clean(log: str) -> str:
    kept = [line.rstrip() for line in log.splitlines() if line.strip() and "Compile time =" not in line]
    return "\n".join(kept)


def _report(name: str, target: Target, source: str, options: Sequence[str], log: str, ptx: str) -> str:
    """What went wrong, in under 40 lines however long the log is."""
    lines = [line for line in log.splitlines() if not _SUMMARY.search(line)] or [""]
    errors = [number for number, line in enumerate(lines) if _ERROR_LINE.match(line)]
    first = next(iter(errors), next((n for n, line in enumerate(lines) if _COMPLAINT.search(line)), 0))
    shown = lines[first : first + 6]
    place = ""
    if match := _ERROR_LINE.match(lines[first]):
        place = f" at {match['file']}:{match['line']}"
        # NVRTC prints the source line under the message; where it did not (a long template trace), it is put there.
        number = int(match["line"])
        text = _line(source, number) if match["file"] == f"{name}.cu" else ""
        if text and text.strip() not in "\n".join(shown):
            shown[1:] = [f"{number:5d} | {text}", *shown[1:5]]
        # Stop before the next error: its place is in the log.
        for index, line in enumerate(shown[1:], start=1):
            if _ERROR_LINE.match(line):
                del shown[index:]
                break
    elif match := _PTX_LINE.match(lines[first]):
        number = int(match["line"])
        place = f" at line {number} of the PTX"
        shown.insert(1, f"{number:5d} | {_line(ptx, number)}")
    count = f" (the first of {len(errors)} errors)" if len(errors) > 1 else ""
    given = list(options[:_OPTIONS_SHOWN])
    if len(options) > len(given):
        given.append(f"... and {len(options) - len(given)} more")
    return "\n".join(
        [
            f"NVRTC rejected kernel {name!r} for {target}{place}{count}:",
            *(f"  {line[:_WIDTH]}" for line in shown),
            "options:",
            *(f"  {option[:_WIDTH]}" for option in given),
            _saved(name, source, log, ptx),
            OUR_FAULT,
        ]
    )


def _line(text: str, number: int) -> str:
    lines = text.splitlines()
    return lines[number - 1].rstrip() if 0 < number <= len(lines) else ""


def _saved(name: str, source: str, log: str, ptx: str = "") -> str:
    """Save what failed for reading, and say where; never raises."""
    stem = f"{name}-{hashlib.sha256(source.encode()).hexdigest()[:12]}"
    try:
        try:
            path = _write_failed(environment.cache_root() / "failed", stem, source, log, ptx)
        except OSError:
            # A cache that is read-only or full must not hide the error itself.
            path = _write_failed(Path(tempfile.mkdtemp(prefix="moesaic-failed-")), stem, source, log, ptx)
    except OSError as error:
        return f"source: could not be saved ({error.strerror})"
    return f"source: {path} (the log lies beside it)"


def _write_failed(folder: Path, stem: str, source: str, log: str, ptx: str) -> Path:
    # `mode` does not apply to the parents it makes, and a cache that others may write is refused: so one at a time.
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{stem}.cu"
    path.write_text(source)
    path.with_suffix(".log").write_text(log + "\n")
    if ptx:
        path.with_suffix(".ptx").write_text(ptx)
    return path

"""The host C++ compiler, the CUDA headers and the emulator's own headers."""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moesaic.ir.errors import ToolchainError

PACKAGE_DIR = Path(__file__).resolve().parent
SHIM_INCLUDE_DIR = PACKAGE_DIR / "include"
RUNTIME_SOURCE_DIR = PACKAGE_DIR / "src"

_COMPILE_TIMEOUT_SECONDS = 600
# Gives variables that were never written a value far from any right one, the same in every run.
_OPTIONAL_KERNEL_FLAGS = ("-ftrivial-auto-var-init=pattern",)
_CUDA_HEADERS_OF_INTEREST = ("cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h", "cuda_bf16.hpp", "vector_types.h")


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler.

    Attributes:
        command: what starts it.
        version: the first line that it says of itself.
        kernel_flags: those of the optional flags for kernels that it knows.
    """

    command: tuple[str, ...]
    version: str
    kernel_flags: tuple[str, ...] = ()

    @property
    def precompiles(self) -> bool:
        """Whether it reads a precompiled header in the place of one that it is told to include, as GCC does."""
        return "clang" not in self.version.lower()

    def run(
        self,
        arguments: Sequence[str],
        directory: Path,
        started: Callable[[subprocess.Popen[str]], object] = lambda process: None,
    ) -> subprocess.CompletedProcess[str]:
        """Compiles in `directory`; never raises for a failed compile, only for one that does not end.

        `started` is given the process, so that another thread can `end` it.
        """
        command = [*self.command, *arguments]
        with subprocess.Popen(
            command,
            cwd=directory,
            env=dict(os.environ, LC_ALL="C"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,  # of its own, so that it can be ended with its children
        ) as process:
            started(process)
            try:
                out, err = process.communicate(timeout=_COMPILE_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired as error:
                end(process)
                raise ToolchainError(
                    f"the host compiler {self.command[0]} did not finish in {_COMPILE_TIMEOUT_SECONDS} s"
                ) from error
            except BaseException:
                end(process)
                raise
            return subprocess.CompletedProcess(command, process.returncode, out, err)


def end(process: subprocess.Popen[str]) -> None:
    """Ends a compiler and what it has started; it may have ended by itself."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)


def find_compiler() -> Compiler:
    """``$CXX`` if set, else ``g++``, else ``clang++``.

    Raises:
        ToolchainError: there is none, or the named one does not run.
    """
    if not sys.platform.startswith("linux"):
        raise ToolchainError(f"the emulator runs on Linux only, not on {sys.platform}; use the 'reference' backend")
    chosen = os.environ.get("CXX", "").strip()
    if chosen:
        return _probe(tuple(shlex.split(chosen)))
    for name in ("g++", "clang++", "c++"):
        path = shutil.which(name)
        if path is not None:
            return _probe((path,))
    raise ToolchainError(
        "a C++ compiler is needed, but neither $CXX, g++ nor clang++ was found; "
        "install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++) or set CXX"
    )


@functools.cache
def _probe(command: tuple[str, ...]) -> Compiler:
    try:
        result = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainError(f"the C++ compiler {' '.join(command)!r} cannot be run: {error}; check CXX") from error
    if result.returncode != 0:
        raise ToolchainError(f"the C++ compiler {' '.join(command)!r} failed: {result.stderr.strip()}; check CXX")
    known = (flag for flag in _OPTIONAL_KERNEL_FLAGS if _accepts(command, flag))
    return Compiler(command, result.stdout.splitlines()[0], tuple(known))


def _accepts(command: tuple[str, ...], flag: str) -> bool:
    preprocess = [*command, "-Werror", flag, "-E", "-x", "c++", os.devnull]
    return subprocess.run(preprocess, capture_output=True, timeout=60, check=False).returncode == 0


def cuda_include_dirs() -> list[Path]:
    """Folders with ``cuda_fp16.h`` and what it includes, from the installed wheels.

    Raises:
        ToolchainError: the headers, or the ``crt`` folder that the host compiler needs beside them, are missing.
    """
    directories = _cuda_include_candidates()
    fitting = [path for path in directories if (path / "cuda_fp16.h").is_file()]
    if not fitting:
        raise ToolchainError(
            "the CUDA headers (cuda_fp16.h) were not found; pip install 'nvidia-cuda-runtime>=13.0.96,<14'"
        )
    if not any((path / "crt" / "host_defines.h").is_file() for path in directories):
        raise ToolchainError(
            f"crt/host_defines.h was not found in {fitting[0]}; the emulator needs it: pip install "
            "nvidia-cuda-crt of the same minor version as nvidia-cuda-runtime (13.0.*)"
        )
    return directories


def _cuda_include_candidates() -> list[Path]:
    try:
        from moesaic.codegen.nvrtc import cuda_include_dirs as codegen_include_dirs
    except ImportError:
        pass
    else:
        return [Path(path) for path in codegen_include_dirs()]
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:
        pass
    else:
        found = find_nvidia_header_directory("cudart")
        if found is not None:
            return [Path(found)]
    try:
        import nvidia
    except ImportError:
        return []
    roots = [Path(root) for root in nvidia.__path__]
    return sorted({header.parent for root in roots for header in root.glob("**/include/cuda_fp16.h")})


def digest_of_directories(directories: Iterable[Path]) -> str:
    """sha256 over names and contents of all files below `directories`, in order.

    CUDA's headers and the emulator's own files are read once a process. Of the former, those that kernels include stand
    for all: the folder is large and changes only with the wheel.
    """
    digest = hashlib.sha256()
    for directory in directories:
        if (directory / "cuda_fp16.h").is_file():
            digest.update(_digest_of_cuda_headers(directory).encode())
        elif directory in (SHIM_INCLUDE_DIR, RUNTIME_SOURCE_DIR):
            digest.update(_digest_of_own_files(directory).encode())
        else:
            digest.update(_digest_of_files(directory).encode())
    return digest.hexdigest()


def _digest_of_files(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(path.relative_to(directory).as_posix().encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


_digest_of_own_files = functools.cache(_digest_of_files)


@functools.cache
def _digest_of_cuda_headers(directory: Path) -> str:
    digest = hashlib.sha256()
    for name in _CUDA_HEADERS_OF_INTEREST:
        path = directory / name
        if path.is_file():
            digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()

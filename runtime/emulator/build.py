"""From a kernel's text to a loaded library."""

from __future__ import annotations

import ctypes
import json
import platform
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from moesaic.ir.errors import InputError, KernelCompileError, ToolchainError
from moesaic.runtime import cache
from moesaic.runtime.emulator import toolchain
from moesaic.runtime.emulator.launch import EmulatedKernel

# -O1 gives the least of compiling plus running. Frame pointers and line tables lead a report from a helper to the
# kernel's line. No contraction and no unique symbols: results and shared variables must not depend on what else is
# loaded. Hidden by default: two kernels may hold different helpers of the same name.
_COMMON_FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-g1",
    "-fno-omit-frame-pointer",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-pthread",
)
_KERNEL_FLAGS = (
    "-O1",
    "-DMOESAIC_EMULATE=1",
    "-w",  # CUDA's pragmas and attributes would fill the screen
    "-fsanitize=bounds",  # an index outside an array of known size becomes a trap, hence a report
    "-fsanitize-undefined-trap-on-error",
)
_RUNTIME_FLAGS = ("-O2", "-DNDEBUG")
_SHOWN_LINES = 30
_LIBRARY = "library.so"

_lock = threading.Lock()
_runtimes: dict[str, tuple[ctypes.CDLL, Path]] = {}
_kernels: dict[Path, EmulatedKernel] = {}


def build(
    source: str, kernel_name: str, include_dirs: Sequence[Path], defines: Mapping[str, str] | None = None
) -> EmulatedKernel:
    """Compiles a kernel for the CPU, or takes it from the cache.

    Args:
        source: the whole text, the same that NVRTC would get, with one ``extern "C" __global__`` function to launch.
        kernel_name: the name of that function.
        include_dirs: folders of the device helper headers. Those of CUDA and of the emulator are added.
        defines: preprocessor definitions beside ``MOESAIC_EMULATE``.

    Raises:
        KernelCompileError: the compiler rejects the text.
        ToolchainError: there is no compiler, or no CUDA headers.
    """
    if re.fullmatch(r"[A-Za-z_]\w*", kernel_name) is None:
        raise InputError(f"kernel name {kernel_name!r} is not a C identifier")
    compiler = toolchain.find_compiler()
    cuda_dirs = toolchain.cuda_include_dirs()
    own_dirs = [Path(path).resolve() for path in include_dirs]
    for path in own_dirs:
        if not path.is_dir():
            raise InputError(f"include folder {path} does not exist")

    definitions = tuple(f"-D{name}={value}" for name, value in sorted((defines or {}).items()))
    flags = (*_COMMON_FLAGS, *_KERNEL_FLAGS, *compiler.kernel_flags, *definitions)
    with _lock:
        runtime_key, runtime_path = _runtime(compiler)
    key = _key(
        compiler,
        flags,
        symbol=kernel_name,
        source_sha256=cache.sha256(source),
        headers=toolchain.digest_of_directories([*own_dirs, *cuda_dirs]),
        runtime=runtime_key,
    )
    includes = [f"-I{path}" for path in (toolchain.SHIM_INCLUDE_DIR, *own_dirs, *cuda_dirs)]
    library = _library(
        key, lambda: _compile_kernel(compiler, source, kernel_name, [*flags, *includes], runtime_path)
    )  # outside the lock: threads may compile side by side
    known = _kernels.get(library)
    if known is None:
        known = EmulatedKernel(kernel_name, ctypes.CDLL(str(library)), library, library.with_name(f"{kernel_name}.cu"))
        known = _kernels.setdefault(library, known)
    return known


def _key(compiler: toolchain.Compiler, flags: Sequence[str], **more: str) -> cache.LibraryKey:
    return cache.LibraryKey(
        target=platform.machine(),
        flags=tuple(flags),
        compiler=compiler.version,
        command_sha256=cache.sha256(json.dumps(compiler.command)),
        **more,
    )


def _library(key: cache.LibraryKey, make: Callable[[], cache.Content]) -> Path:
    """Where the library of a key lies, built or taken from the cache."""
    try:
        folder = cache.obtain(key, make, on_disk=True).folder
    except OSError as error:
        raise ToolchainError(f"the emulator has no folder to build in: {error}") from error
    if folder is None:
        raise ToolchainError(
            "the emulator's libraries can be written neither into the cache nor into a temporary folder: free some "
            "space, or set MOESAIC_CACHE_DIR or TMPDIR"
        )
    return folder / _LIBRARY


def _compile_kernel(
    compiler: toolchain.Compiler, source: str, kernel_name: str, flags: Sequence[str], runtime_path: Path
) -> cache.Content:
    file_name = f"{kernel_name}.cu"
    entry = f'#include "{file_name}"\n#include "moesaic_emulate/entry.h"\nMOESAIC_EMULATE_ENTRY({kernel_name})\n'
    with tempfile.TemporaryDirectory(prefix="moesaic-build-") as temporary:
        folder = Path(temporary)
        (folder / file_name).write_text(source, encoding="utf-8")
        (folder / "entry.cpp").write_text(entry, encoding="utf-8")
        command = [
            *flags,
            f"-ffile-prefix-map={folder}=.",
            "-include",
            "moesaic_emulate/shim.h",
            "entry.cpp",
            "-o",
            _LIBRARY,
            # The runtime is loaded before, by its full path; the loader finds it again by its soname.
            str(runtime_path),
        ]
        start = time.perf_counter()
        result = compiler.run(command, folder)
        if result.returncode != 0:
            saved = cache.save_rejected(kernel_name, source)
            raise KernelCompileError(
                f"the host compiler rejected kernel {kernel_name!r} for the emulator; source saved as {saved}\n"
                + _first_errors(result.stderr)
            )
        files = {_LIBRARY: (folder / _LIBRARY).read_bytes(), file_name: source.encode()}
        return cache.Content(files, {"seconds": round(time.perf_counter() - start, 4)})


def _first_errors(text: str) -> str:
    """The compiler's output from its first error on, cut to a readable length."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if "error" in line.lower()), 0)
    shown = lines[start : start + _SHOWN_LINES]
    left = len(lines) - start - len(shown)
    if left > 0:
        shown.append(f"... {left} more lines")
    return "\n".join(shown)


def _runtime(compiler: toolchain.Compiler) -> tuple[str, Path]:
    """The emulator's own library (scheduler, checks, reports), loaded: the digest of its key, and its path."""
    flags = (*_COMMON_FLAGS, *_RUNTIME_FLAGS)
    key = _key(
        compiler,
        flags,
        symbol="runtime",
        source_sha256=toolchain.digest_of_directories([toolchain.RUNTIME_SOURCE_DIR]),
        headers=toolchain.digest_of_directories([toolchain.SHIM_INCLUDE_DIR]),
    )
    digest = key.digest
    if digest in _runtimes and _runtimes[digest][1].is_file():
        return digest, _runtimes[digest][1]
    library = _library(key, lambda: _compile_runtime(compiler, flags, digest))
    if digest in _runtimes:  # built anew because its file is gone; what is loaded stays
        _runtimes[digest] = (_runtimes[digest][0], library)
    else:
        _runtimes[digest] = (ctypes.CDLL(str(library)), library)
    return digest, library


def _compile_runtime(compiler: toolchain.Compiler, flags: Sequence[str], digest: str) -> cache.Content:
    with tempfile.TemporaryDirectory(prefix="moesaic-build-") as temporary:
        folder = Path(temporary)
        command = [
            *flags,
            f"-ffile-prefix-map={toolchain.PACKAGE_DIR}=.",
            f"-I{toolchain.SHIM_INCLUDE_DIR}",
            *map(str, sorted(toolchain.RUNTIME_SOURCE_DIR.glob("*.cpp"))),
            f"-Wl,-soname,libmoesaic_emulate_{digest[:16]}.so",
            "-o",
            _LIBRARY,
        ]
        start = time.perf_counter()
        result = compiler.run(command, folder)
        if result.returncode != 0:
            raise ToolchainError(
                f"{' '.join(compiler.command)} ({compiler.version}) cannot build the emulator's runtime:\n"
                + _first_errors(result.stderr)
            )
        content = (folder / _LIBRARY).read_bytes()
        return cache.Content({_LIBRARY: content}, {"seconds": round(time.perf_counter() - start, 4)})

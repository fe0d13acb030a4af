"""From a kernel's text to a loaded library."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from moesaic.ir.errors import InputError, KernelCompileError, ToolchainError
from moesaic.runtime import cache, host_library
from moesaic.runtime.emulator import toolchain
from moesaic.runtime.emulator.launch import EmulatedKernel

# Frame pointers and line tables lead a report from a helper to the kernel's line. No contraction and no unique symbols:
# results and shared variables must not depend on what else is loaded. Hidden by default: two kernels may hold different
# helpers of the same name.
_COMMON_FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-g1",
    "-fno-omit-frame-pointer",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-pthread",
)
_KERNEL_FLAGS = (
    "-Og",  # the least of compiling plus running: most kernels run once on small inputs
    "-DMOESAIC_EMULATE=1",
    "-w",  # CUDA's pragmas and attributes would fill the screen
    "-fsanitize=bounds",  # an index outside an array of known size becomes a trap, hence a report
    "-fsanitize-undefined-trap-on-error",
)
# What a kernel calls is in the emulator's runtime or in the libraries of C and C++ that this brings with it, where the
# loader finds it. The linker need not read those for every kernel: that takes it longer than all else.
_KERNEL_LINK_FLAGS = ("-nostdlib",)
_RUNTIME_FLAGS = ("-O2", "-DNDEBUG")
_WHOSE = "the emulator"

# What every kernel begins with: reading it takes half of the time that a small kernel needs. GCC reads what lies beside
# a header under this name in its place, if that was made with the same flags.
_HEADER = "prefix.h"
_PRECOMPILED = f"{_HEADER}.gch"
_HEADER_TEXT = """\
#include "moesaic_emulate/shim.h"
#include <cuda_bf16.h>
#include <cuda_fp16.h>
"""

_lock = threading.Lock()
_runtimes: dict[str, tuple[ctypes.CDLL, Path]] = {}
_headers: dict[str, Path] = {}
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
        ToolchainError: there is no compiler, there are no CUDA headers, or what was compiled cannot be loaded.
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
        header = str(_header(compiler, flags, cuda_dirs)) if compiler.precompiles else "moesaic_emulate/shim.h"
    key = host_library.key(
        cache.LibraryKey,
        compiler,
        (*flags, *_KERNEL_LINK_FLAGS),
        symbol=kernel_name,
        source_sha256=cache.sha256(source),
        headers=toolchain.digest_of_directories([*own_dirs, *cuda_dirs]),
        runtime=runtime_key,
    )
    includes = [f"-I{path}" for path in (toolchain.SHIM_INCLUDE_DIR, *own_dirs, *cuda_dirs)]
    library = host_library.obtain(
        key, lambda: _compile_kernel(compiler, source, kernel_name, [*flags, *includes], header, runtime_path), _WHOSE
    )  # outside the lock: threads may compile side by side
    known = _kernels.get(library)
    if known is None:
        known = EmulatedKernel(kernel_name, _loaded(library), library, library.with_name(f"{kernel_name}.cu"))
        known = _kernels.setdefault(library, known)
    return known


def _loaded(library: Path) -> ctypes.CDLL:
    """A library in this process, where it stays."""
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise ToolchainError(
            f"the emulator cannot load {library}: {error}; this process has {len(_kernels)} kernels, which stay. With "
            "thousands, the system may map no more for it (Linux: vm.max_map_count): run the rest in another process. "
            "With few, the folder may be one that no program may be loaded from (noexec): set MOESAIC_CACHE_DIR"
        ) from error


def _compile_kernel(
    compiler: toolchain.Compiler, source: str, kernel_name: str, flags: Sequence[str], header: str, runtime_path: Path
) -> cache.Content:
    file_name = f"{kernel_name}.cu"
    entry = f'#include "{file_name}"\n#include "moesaic_emulate/entry.h"\nMOESAIC_EMULATE_ENTRY({kernel_name})\n'

    def failed(errors: str) -> KernelCompileError:
        saved = cache.save_rejected(kernel_name, source)
        return KernelCompileError(
            f"the host compiler rejected kernel {kernel_name!r} for the emulator; source saved as {saved}\n{errors}"
        )

    # The runtime is loaded before, by its full path; the loader finds it again by its soname.
    command = ["-shared", *flags, "-include", header, "entry.cpp", str(runtime_path), *_KERNEL_LINK_FLAGS]
    made = host_library.compile_in(compiler, command, {file_name: source, "entry.cpp": entry}, failed)
    return cache.Content({**made.files, file_name: source.encode()}, made.facts)


def _header(compiler: toolchain.Compiler, flags: Sequence[str], cuda_dirs: Sequence[Path]) -> Path:
    """A header with what every kernel begins with; what the compiler made of it lies beside it."""
    key = host_library.key(
        cache.LibraryKey,
        compiler,
        flags,
        symbol="headers",
        source_sha256=cache.sha256(_HEADER_TEXT),
        headers=toolchain.digest_of_directories([toolchain.SHIM_INCLUDE_DIR, *cuda_dirs]),
    )
    known = _headers.get(key.digest)
    if known is None or not known.is_file():  # the cache may have been cleared
        includes = [f"-I{path}" for path in (toolchain.SHIM_INCLUDE_DIR, *cuda_dirs)]
        command = [*flags, *includes, "-x", "c++-header", _HEADER]
        known = host_library.obtain(key, lambda: _compile_header(compiler, command), _WHOSE, _HEADER)
        _headers[key.digest] = known
    return known


def _compile_header(compiler: toolchain.Compiler, command: Sequence[str]) -> cache.Content:
    def failed(errors: str) -> ToolchainError:
        return ToolchainError(
            f"{' '.join(compiler.command)} ({compiler.version}) cannot precompile the emulator's headers:\n{errors}"
        )

    made = host_library.compile_in(compiler, command, {_HEADER: _HEADER_TEXT}, failed, name=_PRECOMPILED)
    return cache.Content({**made.files, _HEADER: _HEADER_TEXT.encode()}, made.facts)


def _runtime(compiler: toolchain.Compiler) -> tuple[str, Path]:
    """The emulator's own library (scheduler, checks, reports), loaded: the digest of its key, and its path."""
    flags = (*_COMMON_FLAGS, *_RUNTIME_FLAGS)
    key = host_library.key(
        cache.LibraryKey,
        compiler,
        flags,
        symbol="runtime",
        source_sha256=toolchain.digest_of_directories([toolchain.RUNTIME_SOURCE_DIR]),
        headers=toolchain.digest_of_directories([toolchain.SHIM_INCLUDE_DIR]),
    )
    digest = key.digest
    if digest in _runtimes and _runtimes[digest][1].is_file():
        return digest, _runtimes[digest][1]
    library = host_library.obtain(key, lambda: _compile_runtime(compiler, flags, digest), _WHOSE)
    if digest in _runtimes:  # built anew because its file is gone; what is loaded stays
        _runtimes[digest] = (_runtimes[digest][0], library)
    else:
        _runtimes[digest] = (_loaded(library), library)
    return digest, library


def _compile_runtime(compiler: toolchain.Compiler, flags: Sequence[str], digest: str) -> cache.Content:
    def failed(errors: str) -> ToolchainError:
        return ToolchainError(
            f"{' '.join(compiler.command)} ({compiler.version}) cannot build the emulator's runtime:\n{errors}"
        )

    # One text of all: the headers of the C++ library, which take longer than our lines, are read once.
    names = sorted(path.name for path in toolchain.RUNTIME_SOURCE_DIR.glob("*.cpp"))
    source = {"runtime.cpp": "".join(f'#include "{name}"\n' for name in names)}
    command = [
        "-shared",
        *flags,
        f"-ffile-prefix-map={toolchain.PACKAGE_DIR}=.",
        f"-I{toolchain.SHIM_INCLUDE_DIR}",
        f"-I{toolchain.RUNTIME_SOURCE_DIR}",
        "runtime.cpp",
        f"-Wl,-soname,libmoesaic_emulate_{digest[:16]}.so",
    ]
    return host_library.compile_in(compiler, command, source, failed)

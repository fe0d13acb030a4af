"""From a kernel's text to a loaded library."""

from __future__ import annotations

import ctypes
import re
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from moesaic.ir.errors import InputError, KernelCompileError, ToolchainError
from moesaic.runtime.emulator import store, toolchain
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

_lock = threading.Lock()
_runtimes: dict[str, tuple[ctypes.CDLL, Path]] = {}
_kernels: dict[tuple[str, str], EmulatedKernel] = {}


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
    root = store.cache_root()
    with _lock:
        runtime_key, runtime_path = _runtime(compiler, root)
    description = {
        "kind": "kernel",
        "kernel": kernel_name,
        "source": source,
        "headers": toolchain.digest_of_directories([*own_dirs, *cuda_dirs]),
        "runtime": runtime_key,
        "compiler": [*compiler.command, compiler.version],
        "flags": flags,
    }
    key = store.key_of(description)
    library = store.find(root, key)
    if library is None:
        # Outside the lock: threads may compile side by side; two that compile the same text replace like with like.
        includes = [f"-I{path}" for path in (toolchain.SHIM_INCLUDE_DIR, *own_dirs, *cuda_dirs)]
        library = _compile_kernel(
            compiler, root, key, source, kernel_name, [*flags, *includes], runtime_path, description
        )
        known = None
    else:
        known = _kernels.get((str(root), key))
    if known is None:
        known = EmulatedKernel(kernel_name, ctypes.CDLL(str(library)), library, library.with_name(f"{kernel_name}.cu"))
        _kernels[str(root), key] = known
    return known


def _compile_kernel(
    compiler: toolchain.Compiler,
    root: Path,
    key: str,
    source: str,
    kernel_name: str,
    flags: Sequence[str],
    runtime_path: Path,
    description: Mapping[str, object],
) -> Path:
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
            store.LIBRARY_NAME,
            # The runtime is loaded before, by its full path; the loader finds it again by its soname.
            str(runtime_path),
        ]
        result = compiler.run(command, folder)
        if result.returncode != 0:
            saved = store.save_rejected(root, key, file_name, source)
            raise KernelCompileError(
                f"the host compiler rejected kernel {kernel_name!r} for the emulator; source saved as {saved}\n"
                + _first_errors(result.stderr)
            )
        shown = {name: value for name, value in description.items() if name != "source"}
        return store.publish(root, key, folder / store.LIBRARY_NAME, shown, {file_name: source})


def _first_errors(text: str) -> str:
    """The compiler's output from its first error on, cut to a readable length."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if "error" in line.lower()), 0)
    shown = lines[start : start + _SHOWN_LINES]
    left = len(lines) - start - len(shown)
    if left > 0:
        shown.append(f"... {left} more lines")
    return "\n".join(shown)


def _runtime(compiler: toolchain.Compiler, root: Path) -> tuple[str, Path]:
    """The emulator's own library (scheduler, checks, reports), loaded: its key and its path."""
    flags = (*_COMMON_FLAGS, *_RUNTIME_FLAGS)
    description = {
        "kind": "runtime",
        "sources": toolchain.digest_of_directories([toolchain.RUNTIME_SOURCE_DIR, toolchain.SHIM_INCLUDE_DIR]),
        "compiler": [*compiler.command, compiler.version],
        "flags": flags,
    }
    key = store.key_of(description)
    if key in _runtimes and _runtimes[key][1].is_file():
        return key, _runtimes[key][1]
    library = store.find(root, key)
    if library is None:
        sources = sorted(toolchain.RUNTIME_SOURCE_DIR.glob("*.cpp"))
        with tempfile.TemporaryDirectory(prefix="moesaic-build-") as temporary:
            folder = Path(temporary)
            command = [
                *flags,
                f"-ffile-prefix-map={toolchain.PACKAGE_DIR}=.",
                f"-I{toolchain.SHIM_INCLUDE_DIR}",
                *map(str, sources),
                f"-Wl,-soname,libmoesaic_emulator_{key[:16]}.so",
                "-o",
                store.LIBRARY_NAME,
            ]
            result = compiler.run(command, folder)
            if result.returncode != 0:
                raise ToolchainError(
                    f"{' '.join(compiler.command)} ({compiler.version}) cannot build the emulator's runtime:\n"
                    + _first_errors(result.stderr)
                )
            library = store.publish(root, key, folder / store.LIBRARY_NAME, description, {})
    if key in _runtimes:  # built anew because its file is gone; what is loaded stays
        _runtimes[key] = (_runtimes[key][0], library)
    else:
        _runtimes[key] = (ctypes.CDLL(str(library)), library)
    return key, library

"""What the host's C++ compiler makes, libraries mostly, kept in the cache on disk."""

from __future__ import annotations

import json
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from moesaic.ir.errors import ToolchainError
from moesaic.runtime import cache
from moesaic.runtime.emulator import toolchain

FILE_NAME = "library.so"
"""Of the library in its entry."""

_SHOWN_LINES = 30
_Key = TypeVar("_Key", bound=cache.LibraryKey)


def key(kind: type[_Key], compiler: toolchain.Compiler, flags: Sequence[str], **more: str) -> _Key:
    """The key of what a compiler makes with these flags; `more` are its other fields."""
    return kind(
        target=platform.machine(),
        flags=tuple(flags),
        compiler=compiler.version,
        command_sha256=cache.sha256(json.dumps(compiler.command)),
        **more,
    )


def obtain(key: cache.LibraryKey, make: Callable[[], cache.Content], whose: str, name: str = FILE_NAME) -> Path:
    """Where the file `name` of a key lies, built or taken from the cache; `whose` names the part of ours it belongs to.

    Raises:
        ToolchainError: there is no folder for it.
    """
    try:
        folder = cache.obtain(key, make, on_disk=True).folder
    except OSError as error:
        raise ToolchainError(f"{whose} has no folder to build in: {error}") from error
    if folder is None:
        raise ToolchainError(
            f"the libraries of {whose} can be written neither into the cache nor into a temporary folder: free some "
            "space, or set MOESAIC_CACHE_DIR or TMPDIR"
        )
    return folder / name


def compile_in(
    compiler: toolchain.Compiler,
    arguments: Sequence[str],
    sources: Mapping[str, str],
    failed: Callable[[str], Exception],
    started: Callable[[subprocess.Popen[str]], object] = lambda process: None,
    name: str = FILE_NAME,
) -> cache.Content:
    """Compiles in a temporary folder that holds `sources` by name: the file `name`, and how long it took.

    `started` is given the compiler's process.

    Raises:
        Exception: the one that `failed` makes of the compiler's errors.
        ToolchainError: the compiler does not end.
    """
    with tempfile.TemporaryDirectory(prefix="moesaic-build-") as temporary:
        folder = Path(temporary)
        for file_name, text in sources.items():
            (folder / file_name).write_text(text, encoding="utf-8")
        start = time.perf_counter()
        result = compiler.run([*arguments, f"-ffile-prefix-map={folder}=.", "-o", name], folder, started)
        if result.returncode != 0:
            raise failed(_first_errors(result.stderr))
        content = (folder / name).read_bytes()
        return cache.Content({name: content}, {"seconds": round(time.perf_counter() - start, 4)})


def _first_errors(text: str) -> str:
    """The compiler's output from its first error on, cut to a readable length."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if "error" in line.lower()), 0)
    shown = lines[start : start + _SHOWN_LINES]
    left = len(lines) - start - len(shown)
    if left > 0:
        shown.append(f"... {left} more lines")
    return "\n".join(shown)

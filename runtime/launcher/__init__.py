"""The native launcher: what launches kernels on a GPU in place of Python, once it is built. See ``launcher.cpp``.

It is built once for each torch and Python, in about ten seconds, and kept in the cache. Until then, and where it
cannot be built, kernels are launched from Python, with equal results.
"""

from __future__ import annotations

import atexit
import logging
import subprocess
import threading
from types import ModuleType

from moesaic.ir import environment
from moesaic.ir.errors import MoesaicError, ToolchainError
from moesaic.runtime.emulator import toolchain
from moesaic.runtime.launcher import build

_EXIT_SECONDS = 5.0
"""How long the end of the process waits for an unfinished build to be taken down."""

_log = logging.getLogger("moesaic.launcher")
_lock = threading.Lock()
_module: ModuleType | None = None
_failure = ""
_builder: threading.Thread | None = None
_compiler: subprocess.Popen[str] | None = None
_ending = False


def module() -> ModuleType | None:
    """The types of ``launcher.cpp``; None while kernels are launched from Python.

    The first call has it built: in the background, unless ``MOESAIC_LAUNCHER`` says ``native``.

    Raises:
        ToolchainError: ``MOESAIC_LAUNCHER`` asks for it, and it cannot be built.
    """
    if _module is not None:
        return _module
    choice = environment.LAUNCHER.get()
    if choice == "native":
        return wait()
    if choice == "auto":
        _started()
    return None


def is_built() -> bool:
    """Whether `module` gives it."""
    return _module is not None


def wait() -> ModuleType | None:
    """As `module`, after the build has ended.

    Raises:
        ToolchainError: ``MOESAIC_LAUNCHER`` asks for it, and it cannot be built.
    """
    choice = environment.LAUNCHER.get()
    if choice == "python":
        return None
    _started().join()
    if _module is None and choice == "native":
        raise ToolchainError(f"{environment.LAUNCHER.name} is 'native', but {_failure}")
    return _module


def _started() -> threading.Thread:
    """The thread that builds, of which there is one a process."""
    global _builder
    with _lock:
        if _builder is None:
            _builder = threading.Thread(target=_build, name="moesaic-launcher", daemon=True)
            _builder.start()
            atexit.register(_end)
        return _builder


def _build() -> None:
    global _module, _failure
    try:
        _module = build.load(_watch)
    except (MoesaicError, OSError) as error:
        _failure = str(error)
        if not _ending:
            _log.warning("kernels are launched from Python, which takes more host time: %s", _failure)


def _watch(process: subprocess.Popen[str]) -> None:
    global _compiler
    _compiler = process
    if _ending:
        toolchain.end(process)


def _end() -> None:
    """Leaves no compiler and no folder behind."""
    global _ending
    _ending = True
    if _builder is not None and _builder.is_alive():
        if _compiler is not None:
            toolchain.end(_compiler)
        _builder.join(_EXIT_SECONDS)

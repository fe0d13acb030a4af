"""From ``launcher.cpp`` to a loaded extension module, built for the torch and the Python that run."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from moesaic.ir.errors import ToolchainError
from moesaic.runtime import cache, host_library
from moesaic.runtime.emulator import toolchain

SOURCE = Path(__file__).with_name("launcher.cpp")

_NAME = "moesaic_launcher"
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-fvisibility-inlines-hidden")
# By name alone: they are loaded already, wherever they lie. All of them, for weak symbols do not ask for a library.
_LIBRARIES = ("-Wl,--no-as-needed", "-lc10", "-ltorch_cpu", "-ltorch_python")


@dataclass(frozen=True)
class Recipe:
    """What builds the launcher here: the compiler, the flags that decide what comes out, and where things lie."""

    compiler: toolchain.Compiler
    flags: tuple[str, ...]
    libraries: tuple[str, ...]
    folders: tuple[str, ...]

    @property
    def key(self) -> cache.LauncherKey:
        """Of the library in the cache."""
        return host_library.key(
            cache.LauncherKey,
            self.compiler,
            (*self.flags, *self.libraries),
            symbol="launcher",
            source_sha256=cache.sha256(SOURCE.read_bytes()),
            headers=f"torch {torch.__version__} {torch.version.git_version}, {sysconfig.get_config_var('SOABI')}",
        )


def recipe() -> Recipe:
    """How to build the launcher here.

    Raises:
        ToolchainError: the compiler, or the headers of Python or torch, are missing.
    """
    compiler = toolchain.find_compiler()
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").is_file():
        raise ToolchainError(
            f"Python.h was not found in {python}; install Python's headers (Debian, Ubuntu: apt install python3-dev; "
            "Fedora: dnf install python3-devel)"
        )
    home = Path(torch.__file__).parent
    if not (home / "include" / "ATen" / "core" / "TensorBase.h").is_file():
        raise ToolchainError(f"this torch has no headers in {home / 'include'}; install torch from its wheel")
    flags = (*_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}")
    libraries = (*_LIBRARIES, "-ltorch_cuda") if torch.version.cuda is not None else _LIBRARIES
    return Recipe(compiler, flags, libraries, (f"-isystem{home / 'include'}", f"-I{python}", f"-L{home / 'lib'}"))


def load(started: Callable[[subprocess.Popen[str]], object]) -> ModuleType:
    """The launcher, built or taken from the cache; `started` is given the compiler's process.

    Raises:
        ToolchainError: it cannot be built, or not be loaded.
    """
    how = recipe()
    library = host_library.obtain(how.key, lambda: _compile(how, started), "the native launcher")
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(library))
    spec = importlib.util.spec_from_loader(_NAME, loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise ToolchainError(f"the native launcher cannot be loaded: {error}") from error
    return module


def _compile(how: Recipe, started: Callable[[subprocess.Popen[str]], object]) -> cache.Content:
    def failed(errors: str) -> ToolchainError:
        return ToolchainError(
            f"{' '.join(how.compiler.command)} ({how.compiler.version}) cannot build the native launcher:\n{errors}"
        )

    command = [*how.flags, *how.folders, SOURCE.name, *how.libraries]
    return host_library.compile_in(how.compiler, command, {SOURCE.name: SOURCE.read_text("utf-8")}, failed, started)

"""A CUDA driver for machines without one: ``fake_driver.c`` as a library that takes the place of libcuda."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def build(folder: Path) -> Path:
    """The folder, with the library in it; skips where it cannot be built."""
    compiler = shutil.which("gcc") or shutil.which("g++") or shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler and Linux")
    source = Path(__file__).with_name("fake_driver.c")
    options = ["-D_GNU_SOURCE", "-x", "c", source, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-ldl", "-pthread"]
    subprocess.run([compiler, *options, "-o", folder / "libcuda.so.1"], check=True)
    return folder


def environment(folder: Path) -> dict[str, str]:
    """Of a process that shall find the fake driver."""
    # In front of, not instead of: the interpreter itself may need what is there.
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")]))
    return {**os.environ, "LD_LIBRARY_PATH": path}

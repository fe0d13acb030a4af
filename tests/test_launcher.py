"""The native launcher: how it is built and chosen, and, on a fake driver, that it does what the one in Python does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fake_driver
import pytest

from moesaic.runtime import doctor
from moesaic.runtime.launcher import build

TESTS = Path(__file__).resolve().parent

pytestmark = pytest.mark.emulate  # what it needs is what the emulator needs: a C++ compiler


def _python(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    base = fake_driver.environment(folder)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**base, **environment}, check=False
    )


def test_on_a_fake_driver(tmp_path: Path) -> None:
    """Those in ``on_fake_cuda``; in a process of its own, for the bindings load one driver."""
    folder = fake_driver.build(tmp_path)
    command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [sys.executable, *command, "--rootdir", TESTS.parent, *sorted((TESTS / "on_fake_cuda").glob("[!c]*.py"))],
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        env=fake_driver.environment(folder),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# Building -------------------------------------------------------------------------------------------------------------

_SETUP = """
import logging, os, sys, time
logging.basicConfig(format="%(name)s: %(message)s")
from moesaic.runtime import launcher
"""


def _write_compiler(path: Path, does: str) -> None:
    """A program that says its version, and does this when it is to compile."""
    path.write_text(f'#!/bin/sh\ncase "$*" in *-shared*) {does};; *) echo made up 1.0;; esac\n')
    path.chmod(0o755)


def test_without_a_compiler_python_launches_and_says_so_once(tmp_path: Path) -> None:
    code = _SETUP + "print([launcher.module(), launcher.wait(), launcher.module(), launcher.wait()])"
    done = _python(code, tmp_path, CXX="/no/compiler", MOESAIC_LAUNCHER="auto")
    assert done.stdout.strip() == "[None, None, None, None]"
    (line,) = done.stderr.splitlines()
    assert line.startswith("moesaic.launcher: kernels are launched from Python, which takes more host time: ")
    assert "/no/compiler" in line


def test_native_without_a_compiler_is_our_error(tmp_path: Path) -> None:
    code = (
        _SETUP
        + """
from moesaic.ir.errors import ToolchainError
for ask in (launcher.module, launcher.wait):
    try: ask()
    except ToolchainError as error: print(error)
"""
    )
    said = _python(code, tmp_path, CXX="/no/compiler", MOESAIC_LAUNCHER="native").stdout.splitlines()
    assert len(said) == 2 and said[0] == said[1]
    assert said[0].startswith("MOESAIC_LAUNCHER is 'native', but ") and "/no/compiler" in said[0]


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    _write_compiler(compiler, "echo 'x.h: error: no such thing' >&2; exit 1")
    done = _python(_SETUP + "launcher.wait()", tmp_path, CXX=str(compiler), MOESAIC_LAUNCHER="auto")
    assert "(made up 1.0) cannot build the native launcher:" in done.stderr
    assert "x.h: error: no such thing" in done.stderr


def test_python_builds_nothing(tmp_path: Path) -> None:
    code = _SETUP + "print([launcher.module(), launcher.wait(), launcher._builder])"
    assert _python(code, tmp_path, CXX="/no/compiler", MOESAIC_LAUNCHER="python").stdout == "[None, None, None]\n"


def test_the_background_does_not_outlive_the_process(tmp_path: Path) -> None:
    """A compiler that takes for ever is ended with the process, and leaves nothing behind."""
    compiler = tmp_path / "c++"
    started = tmp_path / "started"
    _write_compiler(compiler, f"touch {started}; sleep 100 & wait")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    code = (
        _SETUP
        + f"""
before = time.monotonic()
assert launcher.module() is None and time.monotonic() - before < 1
while not os.path.exists({str(started)!r}): time.sleep(0.01)
"""
    )
    done = _python(code, tmp_path, CXX=str(compiler), MOESAIC_LAUNCHER="auto", TMPDIR=str(temporary))
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(temporary.glob("moesaic-build-*"))
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=False).stdout
    assert str(compiler) not in running


def test_the_key_knows_torch_and_python() -> None:
    import torch

    key = build.recipe().key
    assert torch.__version__ in key.headers and f"cpython-{sys.version_info[0]}{sys.version_info[1]}" in key.headers
    assert key.kind == "launcher"


# Doctor ---------------------------------------------------------------------------------------------------------------


def _doctor() -> doctor.Check:
    return next(check for check in doctor.checks() if check.name == "launcher")


def test_doctor_says_whether_it_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _doctor().status == "ok"
    monkeypatch.setenv("MOESAIC_LAUNCHER", "python")
    assert "MOESAIC_LAUNCHER" in _doctor().detail
    monkeypatch.setenv("MOESAIC_LAUNCHER", "auto")
    monkeypatch.setenv("CXX", "/no/compiler")
    found = _doctor()
    assert found.status == "warn" and "/no/compiler" in found.remedy

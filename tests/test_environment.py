"""The declared environment variables: reading, refusing, and the tables made of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moesaic.ir import environment
from moesaic.ir.errors import UsageError


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in environment.variables():
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("MOESAIC_CACHE_DIR", str(tmp_path))


def test_defaults() -> None:
    assert environment.BACKEND.get() == "auto"
    assert environment.VERIFY_EACH.get() is True
    assert environment.LINEINFO.get() is False
    assert environment.ARCH.get() is None


def test_values_are_read_at_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESAIC_BACKEND", "Emulate")
    assert environment.BACKEND.get() == "emulate"
    monkeypatch.setenv("MOESAIC_BACKEND", "cuda")
    assert environment.BACKEND.get() == "cuda"
    monkeypatch.setenv("MOESAIC_BACKEND", "")
    assert environment.BACKEND.get() == "auto"


@pytest.mark.parametrize(("text", "value"), [("1", True), ("on", True), ("No", False), ("0", False), ("TRUE", True)])
def test_flags(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    monkeypatch.setenv("MOESAIC_VERIFY_EACH", text)
    assert environment.VERIFY_EACH.get() is value


def test_bad_choice_names_variable_value_choices_and_a_near_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESAIC_BACKEND", "emulat")
    with pytest.raises(UsageError) as caught:
        environment.BACKEND.get()
    message = str(caught.value)
    for part in ("MOESAIC_BACKEND", "'emulat'", "auto, cuda, emulate, reference", "did you mean 'emulate'?"):
        assert part in message
    assert caught.value.exit_code == 2


def test_bad_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESAIC_LINEINFO", "maybe")
    with pytest.raises(UsageError, match=r"MOESAIC_LINEINFO is 'maybe', expected one of 1, 0, true"):
        environment.LINEINFO.get()


def test_table_shows_every_variable_and_survives_bad_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESAIC_BACKEND", "nonsense")
    monkeypatch.setenv("MOESAIC_BACKEN", "cuda")
    text = environment.table()
    assert all(variable.name in text for variable in environment.variables())
    assert "MOESAIC_BACKEND=nonsense (not valid)" in text
    assert "MOESAIC_BACKEN is set, but moesaic reads no such variable; did you mean 'MOESAIC_BACKEND'?" in text


def test_markdown_is_the_same_whatever_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    before = environment.markdown()
    monkeypatch.setenv("MOESAIC_BACKEND", "cuda")
    monkeypatch.setenv("MOESAIC_ARCH", "sm_80")
    assert environment.markdown() == before
    lines = before.splitlines()
    assert len(lines) == 2 + len(environment.variables())
    assert {line.replace("\\|", "").count("|") for line in lines} == {5}


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert environment.cache_root() == tmp_path
    monkeypatch.delenv("MOESAIC_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert environment.cache_root() == tmp_path / "xdg" / "moesaic"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert environment.cache_root() == tmp_path / "home" / ".cache" / "moesaic"
    monkeypatch.setenv("MOESAIC_CACHE_DIR", "~/mine")
    assert environment.cache_root() == tmp_path / "home" / "mine"


def test_importing_loads_neither_torch_nor_cuda() -> None:
    modules = (
        "moesaic.ir.environment, moesaic.codegen.nvrtc, moesaic.codegen.disassemble, moesaic.runtime.driver, "
        "moesaic.runtime.doctor"
    )
    code = f"import sys, {modules}\nprint([m for m in sys.modules if m.split('.')[0] in ('cuda', 'torch', 'jinja2')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""Logs, hand-edited kernels, and what a fault leaves behind, in calls from Python."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import moesaic as mo
from moesaic.cli import main
from moesaic.ir import environment
from moesaic.ir.errors import InputError, UsageError
from moesaic.ir.types import DType
from moesaic.passes.sink_gathers import SinkGathers
from moesaic.runtime import kernels, logs, reproducer
from moesaic.runtime.program import program_of


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernels, "_said", set())
    yield
    monkeypatch.delenv("MOESAIC_LOGS", raising=False)
    logs.configure()


def test_what_can_be_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.LOGS.get() == {}
    monkeypatch.setenv("MOESAIC_LOGS", "passes, +cache")
    assert environment.LOGS.get() == {"passes": logging.INFO, "cache": logging.DEBUG}
    monkeypatch.setenv("MOESAIC_LOGS", "all,+hf")
    levels = environment.LOGS.get()
    assert set(levels) == set(environment.LOGGERS) and levels["hf"] == logging.DEBUG
    monkeypatch.setenv("MOESAIC_LOGS", "pases")
    with pytest.raises(UsageError, match="did you mean 'passes'"):
        environment.LOGS.get()


def test_every_logger_has_a_name_that_can_be_asked_for() -> None:
    root = Path(environment.__file__).resolve().parents[1]
    used = {
        name
        for folder in ("ir", "passes", "codegen", "runtime")
        for path in (root / folder).rglob("*.py")
        for name in re.findall(r'getLogger\("moesaic\.(\w+)"\)', path.read_text())
    }
    assert used == set(environment.LOGGERS)


def test_logs_are_printed_and_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MOESAIC_LOGS", "passes")
    _ = mo.compile(mo.Router(11, 3)).stages
    err = capsys.readouterr().err
    assert "[moesaic.passes] @route: expand-rows changed it, " in err
    assert "[moesaic.passes] @route: choose-saved: keeps indices" in err
    assert "moe.func" not in err
    monkeypatch.setenv("MOESAIC_LOGS", "+passes")
    _ = mo.compile(mo.Router(11, 4)).stages
    assert "after expand-rows:\nmoe.func @route(" in capsys.readouterr().err
    monkeypatch.delenv("MOESAIC_LOGS")
    _ = mo.compile(mo.Router(11, 5)).stages
    assert capsys.readouterr().err == ""
    assert logging.getLogger("moesaic.passes").propagate


# Edited by hand -------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MOESAIC_OVERRIDE_DIR", str(tmp_path))
    return tmp_path


def of_tokens(tokens: str):
    program = program_of(mo.Router(9, 2, outputs=("weights", "indices")).module(DType.F32))
    return program.executable("forward", "sm_90a", (), tokens=tokens).kernels[0]


@pytest.mark.parametrize("name", ["missing", "file"])
def test_no_folder_of_edited_kernels(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").write_text("")
    monkeypatch.setenv("MOESAIC_OVERRIDE_DIR", str(folder / name))
    with pytest.raises(InputError, match=rf"MOESAIC_OVERRIDE_DIR is .*{name}, which is no folder; .* route_rows\.cu"):
        kernels.source_of(of_tokens("many"))


def test_an_edited_kernel_is_used_where_it_fits(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    many, few = of_tokens("many"), of_tokens("few")
    assert many.symbol == few.symbol and many.source != few.source
    edited = many.source.replace("  const int lane", "  // by hand\n  const int lane", 1)
    (folder / "route_rows.cu").write_text(edited)
    assert kernels.source_of(many) == edited
    # Few tokens go by another configuration, with other threads: that text would be launched wrongly.
    assert kernels.source_of(few) == few.source
    assert [r.message.partition(" ")[2][:11] for r in caplog.records] == ["is used ins", "is not used"]
    (folder / "route_rows-0123abcd.cu").write_text(few.source + "// by hand\n")
    assert kernels.source_of(few) == few.source + "// by hand\n"
    bare = re.sub(r"^//.*\n", "", edited, flags=re.MULTILINE)  # without a banner it is taken at its word
    (folder / "route_rows.cu").write_text(bare)
    assert kernels.source_of(few) == bare


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (r", int tokens)", r"number \d is 'longlong', found 'int'"),
        (r")", r"launched with \d parameters, of which number \d is 'longlong', found none"),
    ],
)
def test_other_parameters_are_refused(folder: Path, new: str, message: str) -> None:
    kernel = of_tokens("many")
    edited = re.sub(r",[^,\n]*(//.*)?\n +long long tokens\)", new, kernel.source)
    assert edited != kernel.source
    (folder / "route_rows.cu").write_text(edited)
    with pytest.raises(InputError, match=message):
        kernels.source_of(kernel)
    (folder / "route_rows.cu").write_text(kernel.source.replace("long long tokens", "long  long /*T*/ rows"))
    assert "rows" in kernels.source_of(kernel)


@pytest.mark.emulate
def test_an_edited_kernel_runs(folder: Path) -> None:
    logits = torch.randn(3, 9)
    declared = mo.Router(9, 2, outputs=("weights", "indices"))
    edited = of_tokens("few").source.replace("moesaic::safe_divide(", "2.0f * moesaic::safe_divide(")
    # Without a banner: rows of nine numbers have another alignment in a call than the text was made for.
    (folder / "route_rows.cu").write_text(re.sub(r"^//.*\n", "", edited, flags=re.MULTILINE))
    found = mo.compile(declared, backend="emulate")(logits)
    expected = mo.compile(declared, backend="reference")(logits)
    torch.testing.assert_close(found.weights, 2.0 * expected.weights)
    assert torch.equal(found.indices, expected.indices)


# Faults ---------------------------------------------------------------------------------------------------------------


def test_a_fault_in_a_call_leaves_what_shows_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(self: object, module: object, context: object) -> bool:
        raise ZeroDivisionError("broken on purpose")

    monkeypatch.setattr(SinkGathers, "run", broken)
    with pytest.raises(ZeroDivisionError) as caught:
        mo.compile(mo.Router(10, 3), backend="emulate")(torch.randn(3, 10))
    path = reproducer.path_of(caught.value)
    assert path is not None and f"it fails again with: moesaic opt --run-reproducer {path}" in caught.value.__notes__
    assert Path(path).read_text().startswith("// moesaic-pipeline: sink-gathers,")
    assert main(["opt", "--run-reproducer", path]) == 70
    assert "broken on purpose" in capsys.readouterr().err


def test_a_fault_in_code_generation_does_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from moesaic.codegen import generate

    def broken(op: object) -> object:
        raise LookupError("broken on purpose")

    monkeypatch.setitem(generate.FAMILIES, "row_program", broken)
    layer = mo.compile(mo.Router(10, 4), backend="emulate", passes="sink-gathers{sparse=0}")
    with pytest.raises(LookupError) as caught:
        layer(torch.randn(3, 10))
    [command] = [note for note in caught.value.__notes__ if note.startswith("it fails again with: moesaic run")]
    path = Path(reproducer.path_of(caught.value))
    assert command.endswith(str(path))
    assert "sink-gathers{sparse=0}" in path.read_text().splitlines()[0]
    # The command that compiles takes the pipeline of the file.
    assert main(["compile", str(path), "--emit", "cuda"]) == 70
    assert "broken on purpose" in capsys.readouterr().err

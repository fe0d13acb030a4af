"""The command line itself: results and reports, exit codes, faults of ours, colour."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import ROUTER, SMALL, WRONG, Invoke, process, write

from moesaic.runtime.commands import console

# The command itself ---------------------------------------------------------------------------------------------------


def test_a_process_separates_results_from_reports(small: Path) -> None:
    done = process("opt", small, "--print-ir-after", "cse", "-p", "canonicalize,cse")
    assert done.returncode == 0
    assert done.stdout == SMALL
    assert done.stderr == f"// ----- IR after cse (no change) -----\n{SMALL}\n"


@pytest.mark.parametrize(
    "verb", ["passes", "ops", "env", "cache path", "cache list", "opt -", "compile - --emit ir", "show -"]
)
def test_what_needs_no_torch_does_not_import_it(verb: str) -> None:
    code = (
        "import sys; from moesaic.cli import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'transformers', 'cuda'} & set(sys.modules); assert not heavy, heavy; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *verb.split()], input=SMALL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_verb_shows_an_example(moesaic: Invoke) -> None:
    code, out, _ = moesaic("--help")
    assert code == 0
    verbs = re.findall(r"^    (\w+) {3,}", out, re.MULTILINE)
    assert verbs == [
        *("demo", "opt", "compile", "show", "explain", "run", "tune"),
        *("passes", "ops", "env", "doctor", "cache"),
    ]
    for verb in verbs:
        code, out, _ = moesaic(verb, "--help")
        assert code == 0
        assert f"\nexamples:\n  moesaic {verb}" in out
        assert all(len(line) <= 100 for line in out.splitlines()), verb


def test_version(moesaic: Invoke) -> None:
    import moesaic as package

    assert moesaic("--version") == (0, f"moesaic {package.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: moesaic"),
        (["optt"], "error: unknown command 'optt'; did you mean 'opt'?"),
        (["opt"], "the following arguments are required: FILE"),
        (["opt", "FILE", "--verify"], "unrecognized arguments: --verify"),
        (["opt", "FILE", "-p", "csee"], "error: unknown pass 'csee'; did you mean 'cse'?"),
        (["opt", "FILE", "-p", "cse{"], "'{' is not closed"),
        (["opt", "FILE", "-p", "specialize{lane=4}"], "unknown option 'lane'; did you mean 'lanes'?"),
        (["opt", "FILE", "--print-ir-after", "dec"], "unknown pass 'dec'; did you mean 'dce'?"),
        (["opt", "FILE", "--dtype", "bf16"], "--dtype goes with a .py file"),
        (["compile", "FILE", "--emit", "cubins"], "invalid choice: 'cubins'"),
        (["compile", "FILE", "--emit", "ir", "--json"], "--json goes with resources"),
        (["compile", "FILE", "--emit", "cubin"], "choose one with --kernel"),
        (["compile", "FILE", "--kernel", "route_row", "--emit", "cuda"], "did you mean 'route_rows'?"),
        (["compile", "FILE", "-p", "cse"], "has to end in specialize"),
        (["run", "FILE", "--tokens", "-1"], "--tokens must be 0 or more"),
        (["demo", "--family", "deepseek"], "no family 'deepseek'; did you mean 'deepseek_v3'?"),
        (["ops", "row.topkk"], "did you mean 'row.topk'?"),
        (["passes", "csee"], "did you mean 'cse'?"),
        (["cache", "clear", "--older-than", "soon"], "expected a number and a unit"),
    ],
)
def test_faults_in_the_command_line(moesaic: Invoke, small: Path, arguments: list[str], message: str) -> None:
    code, out, err = moesaic(*[small if a == "FILE" else a for a in arguments])
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("MOESAIC_VERIFY_EACH", "maybe", "environment variable MOESAIC_VERIFY_EACH is 'maybe'"),
        ("MOESAIC_PRINT_IR", "after-al", "did you mean 'after-all'?"),
    ],
)
def test_faults_in_the_environment(
    moesaic: Invoke, small: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)
    code, out, err = moesaic("opt", small, "-p", "cse")
    assert (code, out) == (2, "")
    assert message in err


def test_a_reader_that_leaves_is_no_error(small: Path) -> None:
    command = f"'{sys.executable}' -m moesaic ops --json | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[\n", "")


# Reading and writing --------------------------------------------------------------------------------------------------


def test_opt_reads_stdin() -> None:
    done = process("opt", "-", "-p", "cse", stdin=SMALL)
    assert (done.returncode, done.stdout, done.stderr) == (0, SMALL, "")
    done = process("opt", "-", stdin="moe.func @f(")
    assert done.returncode == 1
    assert done.stderr.startswith("<stdin>:1:13: error: ")


def test_opt_writes_a_file_only_if_all_went_well(moesaic: Invoke, small: Path, tmp_path: Path) -> None:
    output = tmp_path / "out" / "small.moe"
    assert moesaic("opt", small, "-o", output) == (0, "", "")
    assert output.read_text() == SMALL
    wrong = write(tmp_path / "wrong.moe", WRONG)
    assert moesaic("opt", wrong, "-o", output)[:2] == (1, "")
    assert output.read_text() == SMALL
    code, _, err = moesaic("opt", small, "-o", small / "below")
    assert code == 1 and "error: cannot write " in err


def test_files_that_cannot_be_read(moesaic: Invoke, tmp_path: Path) -> None:
    assert moesaic("opt", tmp_path / "none.moe") == (
        1,
        "",
        f"error: cannot read {tmp_path}/none.moe: No such file or directory\n",
    )
    (tmp_path / "bytes.moe").write_bytes(b"\xff\xfe")
    code, _, err = moesaic("show", tmp_path / "bytes.moe")
    assert code == 1 and "it is not UTF-8 text" in err
    assert moesaic("compile", tmp_path)[0] == 1


def test_python_files(moesaic: Invoke, tmp_path: Path) -> None:
    file = write(tmp_path / "router.py", ROUTER)
    code, out, _ = moesaic("opt", file, "--dtype", "bf16")
    assert code == 0 and "%logits: tensor<Tx8xbf16>" in out
    assert "%logits: tensor<Tx8xf32>" in moesaic("opt", file)[1]

    file.write_text(ROUTER.replace("top_k=2", "top_k=2, dtype='fp16'"))
    assert "tensor<Tx8xf16>" in moesaic("compile", file, "--emit", "ir")[1]
    code, _, err = moesaic("opt", file, "--dtype", "bf16")
    assert code == 2 and "is declared for fp16" in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (ROUTER.replace("top_k=2", "top_k=9"), "3:10: error: top_k must be an integer between 1 and num_experts = 8"),
        (ROUTER + "x = 1 / 0\n", "4:5: error: ZeroDivisionError: division by zero\nx = 1 / 0\n    ^"),
        (ROUTER + "x = (\n", "4:5: error: SyntaxError: '(' was never closed"),
        ("x = 1\n", "declares no `router`"),
        ("router = 1\n", "must be a moesaic.Router, a moesaic.MoE or a module, found int"),
    ],
)
def test_python_files_with_faults(moesaic: Invoke, tmp_path: Path, content: str, message: str) -> None:
    file = write(tmp_path / "router.py", content)
    code, out, err = moesaic("opt", file)
    assert (code, out) == (1, "")
    assert message in err


# Faults of ours -------------------------------------------------------------------------------------------------------


@pytest.fixture
def broken_cse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """`cse` fails; reproducers go to the folder returned."""
    from moesaic.passes.cse import CommonSubexpressions

    def run(self: object, module: object, context: object) -> bool:
        raise ZeroDivisionError("broken on purpose")

    monkeypatch.setattr(CommonSubexpressions, "run", run)
    monkeypatch.setenv("MOESAIC_REPRODUCER_DIR", str(tmp_path / "reproducers"))
    return tmp_path / "reproducers"


@pytest.mark.parametrize(
    "arguments", [["opt", "-p", "canonicalize,cse,dce"], ["compile"], ["show"]], ids=lambda a: a[0]
)
def test_a_reproducer_round_trip(moesaic: Invoke, small: Path, broken_cse: Path, arguments: list[str]) -> None:
    verb, *options = arguments
    code, out, err = moesaic(verb, small, *options)
    assert (code, out) == (70, "")
    assert "Traceback" in err and "ZeroDivisionError: broken on purpose" in err
    [file] = broken_cse.iterdir()
    assert f"moesaic opt --run-reproducer {file}\n" in err
    stored = file.read_text()
    assert stored.startswith("// moesaic-pipeline: cse,dce") and "\nmoe.func @route(" in stored

    assert moesaic("opt", "--run-reproducer", file)[0] == 70
    assert [*broken_cse.iterdir()] == [file]  # the same fault leaves the same file


def test_a_mended_reproducer_runs(moesaic: Invoke, small: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "r.moe", f"// moesaic-pipeline: cse,expand-rows\n// was broken\n{SMALL}")
    code, out, err = moesaic("opt", "--run-reproducer", file)
    assert (code, err) == (0, "") and "row.max" in out
    code, _, err = moesaic("opt", "--run-reproducer", small)
    assert code == 1 and "is not a reproducer" in err
    assert moesaic("opt", "--run-reproducer", file, "-p", "cse")[0] == 2


def test_crash_reproducer_of_a_fault_in_the_input(moesaic: Invoke, tmp_path: Path) -> None:
    file = write(tmp_path / "wide.moe", SMALL.replace("Tx8x", "Tx16385x"))
    reproducer = tmp_path / "r.moe"
    code, _, err = moesaic("opt", file, "-p", "forward", "--crash-reproducer", reproducer)
    assert code == 1
    assert f"  note: reproducer written: {reproducer}" in err
    assert reproducer.read_text().startswith("// moesaic-pipeline: specialize\n")
    assert moesaic("opt", "--run-reproducer", reproducer)[0] == 1


def test_a_fault_without_ir_leaves_a_report(moesaic: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail() -> list[object]:
        raise LookupError("broken on purpose")

    monkeypatch.setattr("moesaic.ir.environment.rows", fail)
    monkeypatch.setenv("MOESAIC_CACHE_DIR", str(tmp_path))
    code, out, err = moesaic("env", "--json")
    assert (code, out) == (70, "")
    [file] = (tmp_path / "reproducers").iterdir()
    assert str(file) in err
    assert "// moesaic env --json" in file.read_text() and "LookupError: broken on purpose" in file.read_text()


# Colour ---------------------------------------------------------------------------------------------------------------


class _Terminal:
    def isatty(self) -> bool:
        return True


def test_colour_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal = _Terminal()
    assert console.styled("x", "red", stream=terminal) == "\x1b[31mx\x1b[0m"  # type: ignore[arg-type]
    monkeypatch.setenv("NO_COLOR", "1")
    assert console.styled("x", "red", stream=terminal) == "x"  # type: ignore[arg-type]


def test_no_colour_in_a_pipe_and_none_with_no_color(small: Path) -> None:
    import pty

    assert "\x1b" not in process("show", small).stdout
    for extra, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm"} | extra
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "moesaic", "passes"]
        with subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=theirs, env=environment) as running:
            os.close(theirs)
            seen = b""
            while True:
                try:
                    part = os.read(ours, 4096)
                except OSError:
                    break
                if not part:
                    break
                seen += part
        os.close(ours)
        assert running.returncode == 0
        assert (b"\x1b[" in seen) is coloured

"""The command line: results and reports, exit codes, diagnostics, and what each verb prints."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moesaic.cli import main
from moesaic.ir.errors import UsageError
from moesaic.runtime.commands import cache, console, text

SMALL = """\
moe.func @route(%logits: tensor<Tx8xf32>) -> (weights: tensor<Tx2xf32>, indices: tensor<Tx2xi32>) {
  %s = row.softmax %logits : tensor<Tx8xf32>
  %v, %i = row.topk %logits {k = 2} : tensor<Tx2xf32>, tensor<Tx2xi32>
  %w = row.gather %s, %i : tensor<Tx2xf32>
  return %w, %i
}
"""
WRONG = SMALL.replace("k = 2", 'k = "two"')
ROUTER = "import moesaic as mo\n\nrouter = mo.Router(num_experts=8, top_k=2)\n"

Invoke = Callable[..., tuple[int, str, str]]


@pytest.fixture
def moesaic(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Runs a command in this process: exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "100")

    def invoke(*arguments: object) -> tuple[int, str, str]:
        code = main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return invoke


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.moe"
    path.write_text(SMALL)
    return path


def write(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


def process(*arguments: object, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moesaic", *map(str, arguments)]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


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


# Diagnostics ----------------------------------------------------------------------------------------------------------


def test_diagnostics_point_at_their_place(moesaic: Invoke, tmp_path: Path) -> None:
    file = write(tmp_path / "wrong.moe", WRONG)
    for verb in ("opt", "compile", "show", "explain", "run"):
        code, out, err = moesaic(verb, file)
        assert (code, out) == (1, "")
        place, line, caret = err.splitlines()
        assert place == f"{file}:3:30: error: row.topk: attribute 'k' expects an integer >= 1, found string 'two'"
        assert line == '  %v, %i = row.topk %logits {k = "two"} : tensor<Tx2xf32>, tensor<Tx2xi32>'
        assert caret == " " * 29 + "^"


def test_faults_found_by_passes_have_a_place(moesaic: Invoke, tmp_path: Path) -> None:
    file = write(tmp_path / "wide.moe", SMALL.replace("Tx8x", "Tx16385x"))
    for arguments in (["opt", file, "-p", "default"], ["compile", file], ["show", file]):
        code, out, err = moesaic(*arguments)
        assert (code, out) == (1, "")
        assert f"{file}:1:1: error: rows of 16385 experts" in err
    code, _, err = moesaic("opt", file, "-p", "fuse-score-topk,differentiate")  # an op that a pass made has no place
    assert code == 1
    assert err.startswith("error: kernel.row_program: not legal in stage 'summed'")


def test_split_input_file(moesaic: Invoke, tmp_path: Path) -> None:
    file = write(tmp_path / "parts.moe", f"// first\n{SMALL}// -----\n{WRONG}// -----\n\n{SMALL}// -----\n\n")
    code, out, err = moesaic("opt", file, "--split-input-file", "-p", "cse")
    assert code == 1
    assert out == f"{SMALL}// -----\n{SMALL}"
    assert f"{file}:11:30: error: " in err  # lines are those of the file, not of the part
    code, _, err = moesaic("opt", file)
    assert code == 1 and "defined twice" not in err  # as one text, the first fault is all that a parser can tell


EXPECTING = """\
moe.func @f(%x: tensor<Tx8xf32>) -> (y: tensor<Tx8xf32>) {
  // expected-error@+1 {{unknown op 'math.exq'; did you mean 'math.exp'?}}
  %y = math.exq %x : tensor<Tx8xf32>
  return %y
}
// -----
moe.func @f(%x: tensor<Tx8xf32>) -> (y: tensor<Tx1xf32>) {
  %y = row.softmax %x : tensor<Tx1xf32> // expected-error {{result 1 has type tensor<Tx8xf32>}}
  return %y
}
// -----
moe.func @f(%x: tensor<Tx8xf32>) -> (y: tensor<Tx8xf32>) {
  return %x
  // expected-error@above {{the signature has}}
}
"""


def test_verify_diagnostics(moesaic: Invoke, tmp_path: Path) -> None:
    right = EXPECTING.replace("return %x\n", "return %x, %x\n")
    file = write(tmp_path / "right.moe", right)
    assert moesaic("opt", file, "--split-input-file", "--verify-diagnostics") == (0, "", "")

    file = write(tmp_path / "unmet.moe", EXPECTING)
    code, _, err = moesaic("opt", file, "--split-input-file", "--verify-diagnostics")
    assert code == 1
    assert err.splitlines()[0] == f'{file}:14:6: error: expected error "the signature has" was not produced'

    file = write(tmp_path / "unexpected.moe", WRONG)
    code, _, err = moesaic("opt", file, "--verify-diagnostics")
    assert code == 1
    assert f"{file}:3:30: error: unexpected error: row.topk" in err

    file = write(tmp_path / "elsewhere.moe", right.replace("@+1", "@+2"))
    code, _, err = moesaic("opt", file, "--split-input-file", "--verify-diagnostics")
    assert code == 1
    assert "unexpected error: unknown op" in err and "was not produced" in err


@pytest.mark.parametrize(
    ("comment", "message"),
    [
        ("// expected-eror {{x}}", "expected-eror: kinds are error, warning, remark"),
        ("// expected-error x", "expected-error needs its text as {{text}}"),
        ("// expected-error@beside {{x}}", "'@beside' is no place"),
    ],
)
def test_expectations_that_are_not_well_formed(moesaic: Invoke, tmp_path: Path, comment: str, message: str) -> None:
    file = write(tmp_path / "a.moe", f"{comment}\n{SMALL}")
    code, _, err = moesaic("opt", file, "--verify-diagnostics")
    assert code == 1
    assert f"{file}:1:4: error: {message}" in err


def test_expected_remarks_and_warnings(moesaic: Invoke, tmp_path: Path) -> None:
    one = SMALL.replace("k = 2", "k = 1").replace("Tx2x", "Tx1x")
    one = one.replace("  return %w", "  %n = row.normalize %w : tensor<Tx1xf32>\n  return %n")
    file = write(tmp_path / "one.moe", one)
    code, _, err = moesaic("opt", file, "-p", "canonicalize")
    assert code == 0
    assert err.startswith(f"{file}: warning: ")
    code, _, err = moesaic("opt", file, "-p", "canonicalize", "--verify-diagnostics")
    assert code == 1 and "unexpected warning" in err
    file.write_text(f"// expected-warning@unknown {{{{constant 1}}}}\n{one}")
    code, _, err = moesaic("opt", file, "-p", "canonicalize", "--verify-diagnostics")
    assert code == 0, err


# Watching passes ------------------------------------------------------------------------------------------------------


def test_prints_go_to_stderr(moesaic: Invoke, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = moesaic("opt", small, "-p", "cse,expand-rows,dce", "--print-ir-after-all")
    assert code == 0 and out.startswith("moe.func @route")
    assert re.findall(r"^// -----.*", err, re.MULTILINE) == [
        "// ----- IR after cse (no change) -----",
        "// ----- IR after expand-rows -----",
        "// ----- IR after dce (no change) -----",
    ]
    err = moesaic("opt", small, "-p", "cse,expand-rows,dce", "--print-ir-after-change")[2]
    assert re.findall(r"IR after (\S+)", err) == ["expand-rows"]
    err = moesaic("opt", small, "-p", "cse,expand-rows", "--print-ir-before", "expand-rows")[2]
    assert err == f"// ----- IR before expand-rows -----\n{SMALL}\n"
    err = moesaic("opt", small, "-p", "cse,expand-rows", "--print-ir-diff")[2]
    assert err.startswith("// ----- changed by expand-rows -----\n")
    assert "-  %s = row.softmax %logits : tensor<Tx8xf32>\n" in err

    monkeypatch.setenv("MOESAIC_PRINT_IR", "expand-rows")
    err = moesaic("opt", small, "-p", "cse,expand-rows")[2]
    assert re.findall(r"IR after (\S+)", err) == ["expand-rows"]
    err = moesaic("compile", small, "--emit", "ir")[2]
    assert re.findall(r"IR after (\S+)", err) == ["expand-rows"]


def test_a_pass_that_is_not_in_the_pipeline_is_pointed_out(moesaic: Invoke, small: Path) -> None:
    err = moesaic("opt", small, "-p", "cse", "--print-ir-after", "dce")[2]
    assert err == "warning: --print-ir-after dce: the pipeline has no such pass\n"


def test_tree_and_times(moesaic: Invoke, small: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    code, _, err = moesaic("opt", small, "-p", "cse,dce", "--print-ir-tree-dir", tree, "--time-passes")
    assert code == 0
    assert sorted(p.name for p in tree.iterdir()) == ["00_input.moe", "01_cse.moe", "02_dce.moe"]
    assert re.findall(r"(\w+)$", err, re.MULTILINE) == ["pass", "cse", "dce", "total"]
    parts = write(tmp_path / "parts.moe", f"{SMALL}// -----\n{SMALL}")
    assert moesaic("opt", parts, "-p", "cse", "--split-input-file", "--print-ir-tree-dir", tree)[0] == 0
    assert (tree / "02" / "01_cse.moe").exists()


def test_named_pipelines(moesaic: Invoke, small: Path) -> None:
    assert "launch.kernel" in moesaic("opt", small, "-p", "forward")[1]
    assert "@route_backward" in moesaic("opt", small, "-p", "default")[1]
    assert moesaic("opt", small, "-p", "canonicalize,forward")[1] == moesaic("opt", small, "-p", "forward")[1]


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


# Listings -------------------------------------------------------------------------------------------------------------


def test_passes(moesaic: Invoke) -> None:
    from moesaic.passes.manager import PIPELINES, REGISTRY

    code, out, err = moesaic("passes")
    assert (code, err) == (0, "")
    assert all(re.search(rf"^{name} ", out, re.MULTILINE) for name in [*REGISTRY, *PIPELINES])
    assert all(len(line) <= 100 for line in out.splitlines())
    listed = json.loads(moesaic("passes", "--json")[1])
    assert [p["name"] for p in listed["passes"]] == list(REGISTRY)
    assert all(p["summary"] and not p["summary"].startswith("``") for p in listed["passes"])
    assert listed["pipelines"] == PIPELINES
    code, out, _ = moesaic("passes", "specialize")
    assert code == 0 and re.search(r"target +str +sm_90a", out)


def test_ops(moesaic: Invoke) -> None:
    from moesaic.ir.core import OPS

    code, out, err = moesaic("ops")
    assert (code, err) == (0, "")
    assert all(re.search(rf"^{re.escape(name)} ", out, re.MULTILINE) for name in OPS if "." in name)
    assert all(len(line) <= 100 for line in out.splitlines())
    assert "math.add" not in moesaic("ops", "row")[1]
    record = json.loads(moesaic("ops", "row.topk", "--json")[1])
    assert [o["name"] for o in record["operands"]] == ["x", "allowed"]
    assert record["attributes"][0]["expects"] == "an integer >= 1"
    assert {r["name"] for r in json.loads(moesaic("ops", "--json")[1])} == {n for n in OPS if "." in n}
    out = moesaic("ops", "row.group_limit")[1]
    assert re.search(r"score +default sum_top<2> +score of a group; one of max, sum_top<n>", out)


def test_env(moesaic: Invoke) -> None:
    code, out, _ = moesaic("env")
    assert code == 0 and "MOESAIC_CACHE_DIR=" in out
    rows = json.loads(moesaic("env", "--json")[1])
    assert {"MOESAIC_ARCH", "MOESAIC_PRINT_IR"} <= {row["name"] for row in rows}


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("fail", 3)])
def test_doctor(moesaic: Invoke, monkeypatch: pytest.MonkeyPatch, status: str, code: int) -> None:
    from moesaic.runtime import doctor

    check = doctor.Check("nvrtc", status, "13.0 " * 30, "install it")  # type: ignore[arg-type]
    monkeypatch.setattr(doctor, "checks", lambda: [check])
    found, out, _ = moesaic("doctor")
    assert found == code
    assert out.startswith(f"{status:4}  nvrtc  13.0") and out.rstrip().endswith("-> install it")
    assert all(len(line) <= 100 for line in out.splitlines())
    found, out, _ = moesaic("doctor", "--json")
    assert found == code and json.loads(out)["status"] == status


# The cache ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with a kernel of 40 days, a new library, and a file that is no entry."""
    root = tmp_path / "cache"
    monkeypatch.setenv("MOESAIC_CACHE_DIR", str(root))
    old, new = root / "kernels" / ("a1" * 32), root / "emulator" / ("a2" * 32)
    for folder in (old, new, root / "notes"):
        folder.mkdir(parents=True)
    (old / "entry.json").write_text('{"name": "route_rows", "target": "sm_90a"}')
    (old / "route_rows.cubin").write_bytes(bytes(5000))
    (new / "entry.json").write_text("{broken")
    (root / "notes" / "mine.txt").write_text("keep me")
    then = old.stat().st_mtime - 40 * 86400
    for path in old.iterdir():
        os.utime(path, (then, then))
    return root


def test_cache_list_and_show(moesaic: Invoke, filled: Path) -> None:
    assert moesaic("cache", "path") == (0, f"{filled}\n", "")
    code, out, _ = moesaic("cache", "list")
    assert code == 0
    header, new, old, total = out.splitlines()
    assert header.split() == ["key", "kind", "name", "target", "size", "age"]
    assert new.split()[:4] == ["a2" * 8, "emulator", "-", "-"]
    assert old.split() == ["a1" * 8, "kernels", "route_rows", "sm_90a", "4.9", "KiB", "40", "d"]
    assert total == f"2 entries, 4.9 KiB in {filled}"
    listed = json.loads(moesaic("cache", "list", "--json")[1])
    assert [e["kind"] for e in listed["entries"]] == ["emulator", "kernels"]

    code, out, _ = moesaic("cache", "show", "a1a1")
    assert code == 0 and '"target": "sm_90a"' in out and "route_rows.cubin (4.9 KiB)" in out
    assert re.search(r"^damage +.*it will be made again", out, re.MULTILINE)
    assert json.loads(moesaic("cache", "show", "a1a1", "--json")[1])["description"]["name"] == "route_rows"
    assert json.loads(moesaic("cache", "show", "a2", "--json")[1])["description"] is None
    code, _, err = moesaic("cache", "show", "a")
    assert code == 1 and "2 keys start with 'a'" in err
    code, _, err = moesaic("cache", "show", "c")
    assert code == 1 and "no entry" in err


def test_cache_clear(moesaic: Invoke, filled: Path) -> None:
    code, out, _ = moesaic("cache", "clear", "--older-than", "30d")
    assert (code, out) == (0, f"removed 1 entry, 4.9 KiB, from {filled}\n")
    assert [e["kind"] for e in json.loads(moesaic("cache", "list", "--json")[1])["entries"]] == ["emulator"]
    assert moesaic("cache", "clear")[0] == 0
    assert (filled / "notes" / "mine.txt").exists()
    assert moesaic("cache", "list")[1] == f"{filled} holds no entries\n"


def test_ages() -> None:
    assert [cache._seconds(a) for a in ("30d", "1.5h", "45m", "2w", "9s")] == [2592000, 5400, 2700, 1209600, 9]
    with pytest.raises(UsageError):
        cache._seconds("30")


# Compiling and showing ------------------------------------------------------------------------------------------------


@pytest.mark.nvrtc
def test_compile_resources(moesaic: Invoke, small: Path) -> None:
    code, out, err = moesaic("compile", small, "--arch", "sm_80")
    assert code == 0
    header, *rows = out.splitlines()
    assert header.split()[:4] == ["kernel", "target", "regs", "spills"]
    assert [row.split()[:2] for row in rows] == [["route_rows", "sm_80"], ["route_backward_rows", "sm_80"]]
    assert "remark: choose-saved: " in err
    report = json.loads(moesaic("compile", small, "--json", "-p", "forward")[1])
    assert report["target"] == "sm_90a"
    assert [k["kernel"] for k in report["kernels"]] == ["route_rows"]
    assert report["kernels"][0]["registers"] > 0 and report["kernels"][0]["spill_store_bytes"] == 0


@pytest.mark.nvrtc
def test_compile_writes_everything(
    moesaic: Invoke, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOESAIC_DUMP_DIR", str(tmp_path / "dump"))
    code, _, err = moesaic("compile", small, "-p", "forward", "-o", tmp_path / "out")
    assert code == 0 and f"wrote {tmp_path}/out\n" in err
    names = {p.name for p in (tmp_path / "out").iterdir()} - {"route_rows.sass"}  # needs a tool that may be missing
    assert names == {"ir", "route_rows.cu", "route_rows.ptx", "route_rows.cubin", "resources.json"}
    for folder in (tmp_path / "out", tmp_path / "dump"):
        assert (folder / "ir" / "00_input.moe").read_text() == SMALL
        assert (folder / "route_rows.cubin").read_bytes().startswith(b"\x7fELF")


@pytest.mark.nvrtc
def test_compile_emits(moesaic: Invoke, small: Path, tmp_path: Path) -> None:
    assert "launch.kernel" in moesaic("compile", small, "--emit", "ir")[1]
    out = moesaic("compile", small, "--emit", "cuda")[1]
    assert out.count('extern "C" __global__') == 2 and out.startswith("// route_rows: ")
    out = moesaic("compile", small, "--emit", "ptx", "--arch", "sm_100a", "--kernel", "route_rows")[1]
    assert ".target sm_100a" in out
    folder = tmp_path / "cubins"
    assert moesaic("compile", small, "--emit", "cubin", "-o", f"{folder}/")[0] == 0
    assert sorted(p.name for p in folder.iterdir()) == ["route_backward_rows.cubin", "route_rows.cubin"]
    file = tmp_path / "one.cubin"
    assert moesaic("compile", small, "--emit", "cubin", "--kernel", "route_rows", "-o", file)[0] == 0
    assert file.read_bytes() == (folder / "route_rows.cubin").read_bytes()


def test_compile_for_an_unknown_target(moesaic: Invoke, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = moesaic("compile", small, "--arch", "sm_91")
    assert code == 1 and "unknown target 'sm_91'" in err
    monkeypatch.setenv("MOESAIC_ARCH", "sm_80")
    assert "target=sm_80" in moesaic("compile", small, "--emit", "ir")[1]


def test_a_pipeline_may_name_its_target(moesaic: Invoke, small: Path) -> None:
    pipeline = "fuse-score-topk,plan-workspace,specialize{target=sm_80 lanes=1}"
    out = moesaic("compile", small, "--emit", "cuda", "-p", f"expand-rows,{pipeline}")[1]
    assert "// Configuration: target=sm_80  lanes=1 " in out
    assert "for sm_80" in moesaic("show", small, "-p", f"expand-rows,{pipeline}")[1]


def test_show(moesaic: Invoke, small: Path) -> None:
    code, out, err = moesaic("show", small)
    assert (code, err) == (0, "")
    headings = re.findall(r"^── (\S+)", out, re.MULTILINE)
    assert headings[:2] == ["declared", "differentiate"]
    assert headings[-3:] == ["decisions", "route_rows.cu", "route_backward_rows.cu"]
    assert "- choose-saved: keeps" in out and "// %largest = row.max %logits" in out
    assert moesaic("show", small, "--stage", "declared")[1] == SMALL
    assert "row.softmax" not in moesaic("show", small, "--stage", "expand-rows")[1]
    assert moesaic("show", small, "--stage", "cuda")[1].startswith("// route_rows: ")
    code, _, err = moesaic("show", small, "--stage", "expand-row")
    assert code == 1 and "did you mean 'expand-rows'?" in err


def test_show_side_by_side(moesaic: Invoke, small: Path) -> None:
    code, out, _ = moesaic("show", small, "--side-by-side")
    assert code == 0
    assert re.search(
        r"^%largest = row\.max %logits +│ .*moesaic::row_max<Experts>\(logits, lane\);$", out, re.MULTILINE
    )
    out = moesaic("show", small, "--stage", "expand-rows", "--side-by-side")[1]
    assert re.search(r"%s = row\.softmax %logits : tensor<Tx8xf32> +\| +%largest = row\.max %logits", out)


def test_differences_for_reading() -> None:
    before = "f {\n  %0 = a.x %p\n  %1 = a.y %0\n  %2 = a.z %1\n  return %2\n}"
    after = "f {\n  k {\n    %0 = b.new %p\n    %1 = a.x %p\n    %2 = a.y %1\n    %3 = a.z %2\n  }\n  return %3\n}"
    assert text.readable_difference(before, after) == [
        "  f {",
        "+   k {",
        "+     %0 = b.new %p",
        "      %1 = a.x %p",
        "      %2 = a.y %1",
        "      %3 = a.z %2",
        "+   }",
        "    return %3",
        "  }",
    ]
    assert text.readable_difference(before, before.replace("  ", "    ")) == []


def test_wrapped_ir_is_the_same_ir() -> None:
    from moesaic.ir.parser import parse

    narrow = "\n".join(piece for line in SMALL.splitlines() for piece in text.wrapped(line, 40))
    assert max(map(len, narrow.splitlines())) <= 40
    assert parse(narrow) == parse(SMALL)


# Running --------------------------------------------------------------------------------------------------------------


def test_run_on_the_reference(moesaic: Invoke, small: Path) -> None:
    code, out, _ = moesaic("run", small, "--backend", "reference", "--tokens", 5)
    assert code == 0
    _, header, *rows = out.splitlines()
    assert header.split()[:4] == ["tensor", "shape", "dtype", "mean"]
    assert [row.split()[0] for row in rows] == ["weights", "indices", "d_logits"]
    report = json.loads(moesaic("run", small, "--backend", "reference", "--tokens", 5, "--json")[1])
    assert [(t["name"], t["shape"], t["dtype"]) for t in report["tensors"]] == [
        ("weights", "[5, 2]", "f32"),
        ("indices", "[5, 2]", "i32"),
        ("d_logits", "[5, 8]", "f32"),
    ]
    again = json.loads(moesaic("run", small, "--backend", "reference", "--tokens", 5, "--json")[1])
    other = json.loads(moesaic("run", small, "--backend", "reference", "--tokens", 5, "--json", "--seed", 1)[1])
    assert report == again and report["tensors"] != other["tensors"]
    code, out, _ = moesaic("run", small, "--backend", "reference", "--tokens", 0, "--json")
    assert code == 0 and json.loads(out)["tensors"][0]["mean"] is None


def test_run_gives_legal_json_for_numbers_that_json_does_not_know(moesaic: Invoke, tmp_path: Path) -> None:
    never = SMALL.replace("  return %w", "  %z = math.mul %w, inf : tensor<Tx2xf32>\n  return %z")
    file = write(tmp_path / "inf.moe", never)
    out = moesaic("run", file, "--backend", "reference", "--tokens", 2, "--json")[1]
    weights = json.loads(out, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))["tensors"][0]
    assert weights["max"] == "inf"


def test_run_without_a_gpu(moesaic: Invoke, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = moesaic("run", small, "--backend", "cuda")
    assert (code, out) == (3, "")
    assert "backend cuda needs a GPU" in err


def test_run_without_torch(moesaic: Invoke, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for arguments in (["run", small], ["demo"]):
        code, out, err = moesaic(*arguments)
        assert (code, out) == (3, "")
        assert "pip install 'moesaic[torch]'" in err


@pytest.mark.emulate
def test_run_checks_the_kernels(moesaic: Invoke, small: Path) -> None:
    code, out, err = moesaic("run", small, "--backend", "emulate", "--check", "--tokens", 33)
    assert code == 0, out + err
    assert "PASS: agrees with the reference" in out and "tolerance: " in out
    report = json.loads(moesaic("run", small, "--backend", "emulate", "--check", "--json")[1])
    assert report["check"]["ok"] and [t["name"] for t in report["check"]["tensors"]] == [
        "weights",
        "indices",
        "d_logits",
    ]


def test_run_has_tokens_in_sequences_where_a_loss_does(moesaic: Invoke, tmp_path: Path) -> None:
    from moesaic.ir.declare import Router
    from moesaic.ir.losses import LoadBalance
    from moesaic.ir.types import DType
    from moesaic.runtime.commands import tensors

    path = tmp_path / "sequences.moe"
    for order, tokens in (("batch_first", 12), ("sequence_first", 13)):
        router = Router(6, 2, losses={"balance": LoadBalance(segments=order)})
        path.write_text(str(router.module(DType.F32)))
        status, out, _ = moesaic("run", path, "--backend", "reference", "--tokens", tokens, "--json")
        found = {t["name"]: t for t in json.loads(out)["tensors"]}
        assert status == 0 and found["d_logits"]["shape"] == f"[{tokens}, 6]" and found["loss_balance"]["mean"] > 0
    module = router.module(DType.F32)
    # Two outcomes of tokens in sequences are held against each other by token, near-ties too.
    inputs = tensors.draw_inputs(module.entry, 12, 0)
    ours, reference = (tensors.execute(module, "reference", inputs, 0) for _ in range(2))
    assert tensors.compare(module.entry, inputs, ours, reference).ok
    ours.outputs["indices"][5, 0] += 1
    wrong = tensors.compare(module.entry, inputs, ours, reference)
    assert not wrong.ok and wrong.differing == (5,)


@pytest.fixture
def outcomes(small: Path):
    """A function, inputs for it, and two equal outcomes of the reference."""
    from moesaic.ir.parser import parse
    from moesaic.runtime.commands import tensors

    module = parse(SMALL)
    inputs = tensors.draw_inputs(module.entry, 16, 0)
    made = [tensors.execute(module, "reference", inputs, 0) for _ in range(2)]
    return module, inputs, made[0], made[1]


def test_check_finds_wrong_values(outcomes) -> None:
    from moesaic.runtime.commands import tensors

    module, inputs, ours, reference = outcomes
    assert tensors.compare(module.entry, inputs, ours, reference).ok
    for name in ("weights", "d_logits"):
        mine = ours.outputs if name == "weights" else ours.gradients
        kept = mine[name].clone()
        for value in (kept[3, 1] + 1e-3, float("nan")):
            mine[name][3, 1] = value
            comparison = tensors.compare(module.entry, inputs, ours, reference)
            assert [f.name for f in comparison.findings if not f.ok] == [name]
            assert "at [3, 1]" in next(f.note for f in comparison.findings if not f.ok)
        mine[name].copy_(kept)


def test_check_knows_near_ties_from_wrong_picks(outcomes) -> None:
    import torch

    from moesaic.runtime.commands import tensors

    module, _, _, _ = outcomes
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    top = logits.argmax(1)
    logits[1, (top[1] + 1) % 8] = torch.nextafter(logits[1, top[1]], torch.tensor(-9.0))  # as good as the best
    logits[2, (top[2] + 1) % 8] = logits[2, top[2]]  # an exact tie, which the lower index wins
    inputs = {"logits": logits}
    reference = tensors.execute(module, "reference", inputs, 0)

    def swapped(row: int) -> tensors.Outcome:
        ours = tensors.execute(module, "reference", inputs, 0)
        for name in ("weights", "indices"):
            ours.outputs[name][row] = ours.outputs[name][row].flip(0)
        return ours

    near = tensors.compare(module.entry, inputs, swapped(1), reference)
    assert near.ok and near.near_ties == (1,)
    for row in (0, 2):
        wrong = tensors.compare(module.entry, inputs, swapped(row), reference)
        assert not wrong.ok and wrong.differing == (row,)


def test_a_failed_check_is_an_exit_code(moesaic: Invoke, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moesaic.runtime.commands import tensors

    real = tensors.execute

    def execute(module, backend, inputs, seed):
        outcome = real(module, "reference", inputs, seed)
        if backend == "emulate":
            outcome.outputs["weights"][0, 0] += 0.5
        return outcome

    monkeypatch.setattr(tensors, "execute", execute)
    code, out, _ = moesaic("run", small, "--backend", "emulate", "--check")
    assert code == 1
    assert "FAIL: differs from the reference" in out and "1 beyond; at [0, 0]" in out


# The demo -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.emulate
@pytest.mark.nvrtc
def test_demo(moesaic: Invoke) -> None:
    pytest.importorskip("transformers")
    code, out, err = moesaic("demo", "--tokens", 40)
    assert code == 0, out + err
    headings = re.findall(r"^── (.+?)  ", out, re.MULTILINE)
    assert headings[:1] == ["declared"] and headings[-2:] == ["compiled", "the same tokens through both"]
    for part in ("%allowed = row.group_limit", "sm_80", "sm_90a", "sm_100a", "40 of 40 tokens alike"):
        assert part in out
    assert out.splitlines()[-1].startswith("PASS: the generated CUDA routes like DeepseekV3TopkRouter of transformers")


@pytest.mark.emulate
@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "gpt_oss"])
def test_demo_without_transformers(moesaic: Invoke, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    from moesaic.runtime.commands import demo

    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(demo, "_resources", lambda router: None)
    code, out, err = moesaic("demo", "--family", family, "--tokens", 24)
    assert code == 0, out + err
    assert "pip install 'transformers==5.17.*'" in err
    assert out.splitlines()[-1] == "PASS: the generated CUDA routes like the router in plain torch"


@pytest.mark.emulate
def test_demo_fails_when_the_kernel_is_wrong(moesaic: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    from moesaic.runtime.commands import demo

    right = demo._in_torch

    def wrong(*arguments):
        logits, weights, indices = right(*arguments)
        return logits, weights * 1.001, indices

    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(demo, "_in_torch", wrong)
    monkeypatch.setattr(demo, "_resources", lambda router: None)
    code, out, _ = moesaic("demo", "--family", "mixtral", "--tokens", 24)
    assert code == 1
    assert out.splitlines()[-1].startswith("FAIL: ")

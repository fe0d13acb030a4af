"""The command line: diagnostics, watching passes, and listings of ops and passes."""

import json
import re
from pathlib import Path

import pytest
from command_line import SMALL, WRONG, Invoke, write

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

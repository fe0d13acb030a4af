"""The command line: kernels in the cache, compiled, and shown."""

import json
import os
import re
from pathlib import Path

import pytest
from command_line import SMALL, Invoke

from moesaic.ir.errors import UsageError
from moesaic.runtime.commands import cache, text

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

"""Every example runs, and its text says what its Python says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Invoke
from routing import EXACT, EXAMPLES, example

import moesaic as mo

TRAINING = "train_tiny_moe"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != TRAINING)


def test_each_example_comes_as_text_and_as_python() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.moe")) == NAMES
    assert {"mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4", "log_score"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_text_is_the_router_for_bf16_logits(name: str) -> None:
    parsed = mo.parse((EXAMPLES / f"{name}.moe").read_text(encoding="utf-8"))
    declared = example(name).router.module("bf16")
    assert str(parsed) == str(declared)


@pytest.mark.parametrize("name", NAMES)
def test_python_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("MOESAIC_BACKEND", raising=False)
    example(name).main()
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert 3 <= len(lines) <= 12, out
    assert max(map(len, lines)) <= 120, out
    assert "nan" not in out.lower(), out


@pytest.mark.parametrize("command", ["opt examples/deepseek_v3.moe", "compile examples/deepseek_v3.moe --emit cuda"])
def test_the_readme_shows_what_commands_print(command: str, moesaic: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    [shown] = re.findall(rf"^`moesaic {command}` prints[^\n]*\n\n```\w*\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert shown.count("\n") > 5
    monkeypatch.chdir(EXAMPLES.parent)
    code, printed, _ = moesaic(*command.split())
    assert code == 0
    pattern = re.escape(shown).replace(re.escape("..."), ".*")
    assert re.search(pattern, printed, re.DOTALL), f"the README has, and {command} does not print:\n{shown}"


def test_training_beside_plain_torch(tmp_path: Path) -> None:
    """Losses of both models after a few steps, as the table says them."""
    small = ["--hidden", "64", "--layers", "2", "--steps", "13", "--plot", "curves.svg"]
    command = [sys.executable, "-P", str(EXAMPLES / f"{TRAINING}.py"), *small]
    environment = {k: v for k, v in os.environ.items() if k != "MOESAIC_BACKEND"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _, table = done.stdout.split("largest load over mean\n")
    rows = [[float(x) for x in line.split()] for line in table.splitlines()]
    assert [int(row[0]) for row in rows] == [0, 1, 3, 6, 12]
    for _, ours, plain, load in rows:
        assert abs(ours - plain) < 2e-3
        assert 1 <= load <= 4
    assert rows[-1][1] < rows[0][1] - 1
    assert (tmp_path / "curves.svg").read_text(encoding="utf-8").count("<polyline") == 2


@pytest.mark.emulate
@pytest.mark.parametrize("name", NAMES)
def test_text_runs_as_generated_code(name: str) -> None:
    """The text, compiled and emulated, picks what the Python declaration picks with torch's own arithmetic."""
    import torch

    router = example(name).router
    random = torch.Generator().manual_seed(3)
    logits = torch.randn(13, router.num_experts, generator=random).bfloat16()
    inputs = {}
    if router.selection_bias:
        inputs["bias"] = 0.1 * torch.randn(router.num_experts, generator=random)
    if router.gate_bias:
        inputs["gate_bias"] = torch.randn(router.num_experts, generator=random)
    module = mo.parse((EXAMPLES / f"{name}.moe").read_text(encoding="utf-8"))
    with torch.no_grad():
        got = mo.compile(module, backend="emulate")(logits, **inputs)
        wanted = mo.compile(router, backend="reference")(logits, **inputs)
    assert torch.equal(got.indices, wanted.indices)
    assert torch.equal(got.counts, wanted.counts)
    torch.testing.assert_close(got.weights, wanted.weights, rtol=EXACT, atol=0)

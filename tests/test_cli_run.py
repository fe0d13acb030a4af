"""The command line: running layers, and the demo."""

import json
import re
import sys
from pathlib import Path

import pytest
from command_line import SMALL, Invoke, write

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

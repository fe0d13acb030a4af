"""`explain`: bytes and FLOPs from launches, floors beside those that were published, occupancy, and how it prints."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import torch

import moesaic as mo
from moesaic.cli import main
from moesaic.codegen.target import Target, known_targets
from moesaic.ir.errors import InputError
from moesaic.ir.types import DType
from moesaic.passes.card import H100
from moesaic.runtime import explain as explaining
from moesaic.runtime import measure
from moesaic.runtime.explain import explain
from moesaic.runtime.measure import draw_inputs
from moesaic.runtime.program import program_of

PERFORMANCE = Path(__file__).resolve().parent.parent / "docs" / "performance.md"
HOPPER = Target.parse("sm_90a")
TOKENS = 65536
GROUPED = {"score": "sigmoid", "selection_bias": True, "groups": 8, "groups_kept": 4}


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes and FLOPs need none, and a compile takes a second."""
    monkeypatch.setattr(explaining, "_resources", lambda *arguments: None)


def published(section: str, router: str) -> tuple[float, float]:
    """The floors of a row of the page: forward, and forward with backward."""
    text = PERFORMANCE.read_text()
    table = text[text.index(section) :]
    row = next(line for line in table.splitlines() if line.startswith(f"| {router} |"))
    cells = [cell.strip() for cell in row.split("|")]
    numbers = [float(c) for c in cells if re.fullmatch(r"\d+(\.\d+)?", c)]
    return numbers[0], numbers[1]


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize(
    ("router", "experts", "picks", "options"),
    [
        ("(128,8) softmax", 128, 8, {}),
        ("(64,6) softmax", 64, 6, {}),
        ("(256,8) sigmoid + bias, 8 groups, 4 kept", 256, 8, GROUPED),
    ],
)
def test_floors_of_routers_are_the_published_ones(
    router: str, experts: int, picks: int, options: dict, dense: bool, dtype: str
) -> None:
    logits = {"bf16": "bf16", "fp32": "float32"}[dtype]
    section = f"H100, {logits} logits, {'dense' if dense else 'compact'} outputs"
    forward, both = published(section, router)
    outputs = ("probs", "map") if dense else ("weights", "indices")
    declared = mo.Router(experts, picks, outputs=outputs, **options)
    program = program_of(declared.module(DType.parse(dtype)))
    inference = explain(program, HOPPER, TOKENS, training=False)
    assert inference.floor_us == pytest.approx(forward, rel=2e-3)
    assert inference.kernels_floor_us == pytest.approx(forward, rel=2e-3)
    # The page leaves out the picks that a dense forward keeps for backward.
    kept = 1e6 * 4 * picks * TOKENS / H100.bandwidth if dense else 0.0
    training = explain(program, HOPPER, TOKENS)
    if options and not dense:
        # Compact backward of a score that stands alone needs logits at the picks only, and the page counts them all.
        assert training.floor_us < both
    else:
        assert training.floor_us == pytest.approx(both + kept, rel=2e-3)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(("tokens", "forward_ms", "both_ms"), [(16384, 1.58, 4.74), (512, 0.402, 1.212)])
def test_floors_of_experts_are_the_published_ones(tokens: int, forward_ms: float, both_ms: float) -> None:
    assert f"| {forward_ms} |" in PERFORMANCE.read_text()
    experts = mo.Experts(num_experts=128, hidden=2048, intermediate=768)
    program = program_of(experts.module(DType.BF16, 8))
    inference = explain(program, HOPPER, tokens, training=False)
    assert inference.rows == 8 * tokens
    assert inference.directions[0].product_flops == 6 * inference.rows * 2048 * 768
    assert inference.floor_us == pytest.approx(1e3 * forward_ms, rel=5e-3)
    training = explain(program, HOPPER, tokens)
    assert sum(d.product_flops for d in training.directions) == 18 * inference.rows * 2048 * 768
    assert training.floor_us == pytest.approx(1e3 * both_ms, rel=2e-2)


@pytest.mark.usefixtures("no_compiler")
def test_less_is_live_less_is_moved() -> None:
    experts = mo.Experts(num_experts=13, hidden=40, intermediate=24)
    program = program_of(experts.module(DType.BF16, 3))
    whole, part = (explain(program, HOPPER, 1009, live=share) for share in (1.0, 0.25))
    assert part.rows == round(0.25 * 3 * 1009)
    for symbol, kernel in whole.kernels.items():
        assert part.kernels[symbol].product_flops == pytest.approx(
            kernel.product_flops * part.rows / whole.rows, rel=1e-9
        )
    assert part.floor_us < whole.floor_us
    nothing = explain(program, HOPPER, 0)
    assert all(k.flops == 0 for k in nothing.kernels.values())
    assert all(math.isfinite(k.floor_us) for k in nothing.kernels.values())
    for wrong in ({"live": 1.5}, {"tokens": -1}):
        with pytest.raises(InputError):
            explain(program, HOPPER, **wrong)


def test_float32_products_go_at_the_rate_of_what_multiplies_them() -> None:
    assert H100.flops("bf16") == H100.flops("f16") == 2 * H100.flops("tf32")
    assert H100.flops("f32") < H100.flops("tf32") / 4


@pytest.mark.usefixtures("no_compiler")
def test_what_goes_between_kernels_is_named() -> None:
    program = program_of(mo.Experts(num_experts=8, hidden=64, intermediate=32).module(DType.BF16, 2))
    forward = explain(program, HOPPER, 4099, training=False).directions[0]
    rows = 2 * 4099
    middle = next(b for b in forward.between if b.writer == "experts_gate_up_proj")
    assert middle.readers == ("experts_down_proj",)
    assert middle.bytes == 2 * rows * 32 * 2  # written and read, bf16
    # Kernels move what the caller sees and what lies between; no more.
    seen = sum(k.bytes for k in forward.kernels)
    assert seen >= forward.bytes + sum(b.bytes for b in forward.between)


def test_occupancy_is_the_least_of_its_limits() -> None:
    for target in known_targets():
        for registers, shared, threads in [(0, 0, 1), (32, 0, 1024), (255, 100_000, 384), (64, 48 * 1024, 96)]:
            limits = target.occupancy_limits(registers, shared, threads)
            assert target.occupancy(registers, shared, threads) == min(limits.values())
    assert HOPPER.occupancy_limits(128, 0, 256)["registers"] == 2
    assert HOPPER.occupancy_limits(16, 0, 256)["threads"] == 8
    assert HOPPER.occupancy_limits(32, 100 * 1024, 32)["shared memory"] == 2
    assert HOPPER.occupancy_limits(256, 0, 32)["registers"] == 0


@pytest.mark.nvrtc
def test_a_compiled_layer_explains_itself(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    router = mo.Router(num_experts=61, top_k=5, score="sigmoid")
    layer = mo.compile(router, target="sm_90a", backend="reference")
    made = layer.explain(TOKENS)
    assert set(made.kernels) == set(layer.kernels) and len(made.kernels) >= 2
    for symbol, kernel in made.kernels.items():
        used = layer.resources[symbol]
        shared = used.static_shared_bytes + layer.kernels[symbol].shared_bytes
        assert kernel.resources == used and kernel.shared_bytes == shared
        assert kernel.blocks_per_sm == HOPPER.occupancy(used.registers, shared, kernel.threads) > 0
        assert 0 < kernel.occupancy <= 1
        assert kernel.us is None and kernel.share is None
    assert made.memory == layer.memory(TOKENS)
    assert "docs/performance.md" in str(made)

    text = str(made)
    for symbol, kernel in made.kernels.items():
        row = next(line for line in text.splitlines() if line.startswith(f"{symbol} "))
        assert f" {kernel.resources.registers} " in row
    assert "biggest gap: " in text and "memory in training: " in text
    markup = made._repr_html_()
    assert markup.count("<tr>") == text.count("\nroute_") + 1 + 2 * len(made.directions)

    file = tmp_path / "router.py"
    file.write_text("import moesaic as mo\nrouter = mo.Router(61, 5, score='sigmoid', dtype='fp32')\n")
    assert main(["explain", str(file), "--tokens", "65536", "--no-measure"]) == 0
    assert capsys.readouterr().out == text + "\n"
    assert main(["explain", str(file), "--tokens", "65536", "--no-measure", "--json", "--forward"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [d["name"] for d in record["directions"]] == ["forward"]
    assert record["directions"][0]["kernels"][0]["bytes_read"] == 4 * 61 * TOKENS
    for wrong in (["--tokens", "-1"], ["--live", "2"]):
        assert main(["explain", str(file), *wrong]) == 2
    with pytest.raises(InputError, match="nothing can be measured"):
        mo.compile(router, target="sm_80").explain(measure=True)


@pytest.mark.usefixtures("no_compiler")
def test_measured_times_give_shares_and_the_biggest_gap() -> None:
    program = program_of(mo.Router(64, 6).module(DType.BF16))
    plain = explain(program, HOPPER, TOKENS)
    times = {s: 2.0 * k.floor_us for s, k in plain.kernels.items()}
    slow = max(times)
    times[slow] += 100.0
    card = dataclasses.replace(H100, source="measured here")
    made = explain(program, HOPPER, TOKENS, card=card, times=times)
    assert made.biggest_gap.startswith(f"{slow}: ")
    assert made.us == pytest.approx(sum(times.values()))
    assert made.share == pytest.approx(made.floor_us / made.us)
    for symbol, kernel in made.kernels.items():
        assert symbol == slow or kernel.share == pytest.approx(0.5)
    some = explain(program, HOPPER, TOKENS, times={slow: 1.0})  # not all were seen
    assert some.us is None and some.kernels[slow].us == 1.0


def test_what_a_launch_adds_to_those_before_it() -> None:
    """One waits for another, one begins early and fills its last round, one ends within another."""
    spans = [("a", 10.0, 20.0), ("b", 12.0, 25.0), ("c", 24.0, 40.0), ("d", 26.0, 39.0), ("a", 50.0, 53.0)]
    wanted = {"a": [10.0, 3.0], "b": [5.0], "c": [15.0], "d": [0.0]}
    assert measure.added_times(spans) == measure.added_times(reversed(spans)) == wanted
    assert sum(map(sum, wanted.values())) == 40.0 - 10.0 + 3.0


@pytest.mark.usefixtures("no_compiler")
def test_what_begins_early_is_said() -> None:
    experts = mo.Experts(num_experts=8, hidden=64, intermediate=32, dtype="bf16")
    made = mo.compile(experts, target="sm_90a").layer(2).explain(512, measure=False)
    early = [symbol for symbol, kernel in made.kernels.items() if kernel.early]
    assert early == [f"experts_backward_{name}" for name in ("d_down_proj", "gate_up_proj", "d_gate_up_proj")]
    assert f"begin beside the kernels before them: {', '.join(early)}" in str(made)
    assert "begin beside" not in str(mo.compile(mo.Router(8, 2, dtype="bf16")).explain(512, measure=False))


@pytest.mark.usefixtures("no_compiler")
def test_what_is_tuned_is_what_is_told() -> None:
    program = program_of(mo.Router(128, 8).module("bf16"))
    asked = []

    def tuned(kind: str, cotangents: tuple[str, ...], bucket: int) -> tuple[str, ...]:
        asked.append((kind, bucket))
        return ("route_rows:threads=64",) if kind == "training" else ()

    told = explain(program, HOPPER, TOKENS, tuned=tuned)
    by_rule = explain(program, HOPPER, TOKENS)
    assert asked == [("training", 3), ("backward", 3)]
    threads = [[k.threads for d in found.directions for k in d.kernels] for found in (told, by_rule)]
    assert threads[0][0] == 64 != threads[1][0] and threads[0][1:] == threads[1][1:]


def test_a_layer_of_the_last_call_explains_itself() -> None:
    ffn = mo.compile(mo.Experts(num_experts=5, hidden=16, intermediate=8), target="sm_90a")
    with pytest.raises(InputError, match="nothing has run yet"):
        ffn.explain()


def test_inputs_are_drawn_as_a_router_gives_them() -> None:
    function = mo.Experts(num_experts=12, hidden=16, intermediate=8).module(DType.BF16, 5).entry
    drawn = draw_inputs(function, 211, 0.5, device="cpu")
    assert set(drawn) == {a.name for a in function.arguments}
    picks = drawn["indices"]
    here = picks >= 0
    assert picks.shape == (211, 5) and picks.max() < 12
    assert 0.4 < here.float().mean() < 0.6
    assert all(len(set(row.tolist())) == 5 for row in draw_inputs(function, 50, device="cpu")["indices"])
    assert drawn["gate_up_proj"].float().std() == pytest.approx(0.25, rel=0.1)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "declared",
    [
        mo.Router(10, 2, losses={"balance": mo.LoadBalance(coef=0.1)}, dtype="fp32"),
        mo.Router(10, 2, losses={"balance": mo.LoadBalance(coef=0.1, segments="batch_first")}, dtype="fp32"),
        mo.Router(10, 2, losses={"balance": mo.LoadBalance(coef=0.1, segments="sequence_first")}, dtype="fp32"),
        mo.Router(12, 3, selection_bias=True, score="sigmoid", dtype="fp32"),
        mo.Experts(num_experts=5, hidden=16, intermediate=8).module(DType.F32, 2),
        mo.MoE(mo.Router(6, 2), mo.Experts(num_experts=6, hidden=16, intermediate=8)).module(DType.F32),
    ],
    ids=["losses", "sequences", "sequences_inside", "bias", "experts", "layer"],
)
def test_layers_are_called_on_what_is_drawn(declared: object, training: bool) -> None:
    layer = mo.compile(declared, backend="reference")
    inputs = draw_inputs(layer._program().function, 17, device="cpu")
    calls = []

    def recorded(x: torch.Tensor, **named: torch.Tensor) -> object:
        calls.append([t for t in (x, *named.values()) if t.requires_grad])
        return layer(x, **named)

    measure.call(recorded, inputs, training)
    [leaves] = calls
    assert bool(leaves) == training
    if training:
        assert leaves[0].grad is not None and leaves[0].grad.abs().max() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True])
def test_kernels_are_timed_on_a_gpu(training: bool) -> None:
    capability = torch.cuda.get_device_capability()
    layer = mo.compile(mo.Router(num_experts=128, top_k=8, dtype="bf16"), target=Target.from_capability(*capability))
    made = layer.explain(TOKENS, training=training, measure=True)
    assert made.card.source == "measured here"
    assert 1e11 < made.card.bandwidth < 2e13
    assert all(k.us is not None and k.us > 0 for k in made.kernels.values()), str(made)
    # Clocks and a measured bandwidth may be a little off, a floor not more than that.
    assert 0.05 < made.share < 1.1, str(made)
    experts = mo.Experts(num_experts=16, hidden=512, intermediate=256, dtype="bf16")
    ffn = mo.compile(experts, target=Target.from_capability(*capability)).layer(top_k=4)
    assert all(k.us for k in ffn.explain(8192, training=training, measure=True).kernels.values())

"""Faults that users of other libraries met in whole layers and in training loops, each as one small input.

Numbers of cases are those of the table in README.md beside this file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from expert_calls import KINDS, TOP_K, check, cotangent_for, exact, run, tensors_for
from routing import BACKENDS, COMPILED, EXACT, assert_close, device_of
from torch.utils.checkpoint import checkpoint
from torch_calls import logits_of, others_of, step

import moesaic as mo
from moesaic.runtime.execute import RUNNERS

LN3 = math.log(3)
TWO = mo.Experts(2, 2, 3)
"""Two experts on rows of two numbers. Where the gate's weight is the identity, those are the logits."""


def layer_of(router: mo.Router, experts: mo.Experts = TWO, **options: Any) -> Any:
    """With the identity for the gate's weight."""
    torch.manual_seed(0)
    layer = mo.nn.MoELayer(mo.MoE(router, experts, **options), std=0.5)
    with torch.no_grad():
        layer.gate_weight.copy_(torch.eye(2))
    return layer


def to(*experts: int) -> torch.Tensor:
    """Tokens that a layer with the identity for a gate sends there."""
    return torch.tensor([[LN3, 0.0] if expert == 0 else [0.0, LN3] for expert in experts])


# Losses and counts over micro-batches ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(6, 2, 4), (4, 4, 4)], ids=str)
def test_case_12_a_window_is_longer_than_a_micro_batch(sizes: tuple[int, ...]) -> None:
    """Fractions are those of all micro-batches so far; divided by the last one's tokens they would be [1, 1]."""
    layer = layer_of(mo.Router(2, 1, outputs=("counts",)))
    tracker = mo.nn.LoadTracker(torch.nn.ModuleDict({"mlp": layer}))
    losses = []
    for tokens in sizes:
        x = to(*[0, 1] * (tokens // 2))
        layer(x)
        fractions = tracker.fractions()["mlp"]
        assert fractions.tolist() == [0.5, 0.5]
        losses.append((2 * fractions * mo.scores(x, score="softmax").mean(0)).sum().item())
    assert losses == pytest.approx([1.0] * 3, abs=1e-6)
    assert tracker.counts["mlp"].tolist() == [6, 6] and tracker.passes["mlp"].item() == 3
    tracker.reset()
    assert tracker.counts["mlp"].tolist() == [0, 0] and tracker.passes["mlp"].item() == 0
    # Uneven micro-batches that are even together; alone, the last one would be [1, 0].
    for experts in ((1, 1, 0), (1,), (0, 0)):
        layer(to(*experts))
    assert tracker.fractions()["mlp"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("reentrant", [False, True])
def test_case_13_recomputation_counts_once(reentrant: bool) -> None:
    layer = layer_of(mo.Router(2, 1, losses={"balance": mo.LoadBalance()}))
    tracker = mo.nn.LoadTracker(torch.nn.ModuleDict({"mlp": layer}))
    found = []
    for again in (False, True):
        layer.zero_grad()
        tracker.reset()
        x = to(0, 1, 0, 0).requires_grad_()

        def body(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            result = layer(x)
            return result.hidden, result.losses["balance"]

        hidden, loss = checkpoint(body, x, use_reentrant=reentrant) if again else body(x)
        (hidden.square().sum() + 3 * loss).backward()
        gradients = {n: p.grad.clone() for n, p in layer.named_parameters()} | {"x": x.grad}
        found.append((tracker.counts["mlp"].tolist(), tracker.losses["mlp"]["balance"].item(), gradients))
    (counts, loss, plain), (counted_again, loss_again, recomputed) = found
    assert counts == counted_again == [3, 1]
    assert loss == loss_again == pytest.approx(2 * (0.75 * (3 * 0.75 + 0.25) + 0.25 * (3 * 0.25 + 0.75)) / 4)
    for name, gradient in plain.items():
        assert gradient.count_nonzero() and torch.equal(gradient, recomputed[name]), name


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("backend", ["reference", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_case_16_capacity_stays_out_of_the_loss(pad: bool, backend: str) -> None:
    """All four tokens go to an expert with room for two: the loss is that of [1, 0], before anything is dropped."""
    router = mo.Router(2, 1, losses={"balance": mo.LoadBalance()})
    moe = mo.MoE(router, replace(TWO, capacity=1.0, pad=pad), outputs=("hidden", "counts", "dropped"))
    layer = mo.nn.MoELayer(moe, std=0.5, backend=backend).to(device_of(backend))
    with torch.no_grad():
        layer.gate_weight.copy_(torch.eye(2))
    result = layer(to(0, 0, 0, 0).to(device_of(backend)))
    assert result.losses["balance"].item() == pytest.approx(2 * 0.75, abs=1e-6)
    assert (result.counts.tolist(), result.dropped.tolist()) == ([4, 0], [2])
    assert result.hidden[:2].count_nonzero() and not result.hidden[2:].count_nonzero()


def test_case_17_a_bias_moves_once_a_step() -> None:
    """The sign, the mean, the place and the time of an update of the second layer; the first has no bias."""
    layers = {
        "first": layer_of(mo.Router(2, 1)),
        "second": layer_of(mo.Router(2, 1, score="sigmoid", selection_bias=True)),
    }
    model = torch.nn.ModuleDict(layers).train()
    tracker = mo.nn.LoadTracker(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    bias, place = layers["second"].bias, layers["second"].bias.data_ptr()
    for experts in ((0, 0), (0, 1)):
        for layer in layers.values():
            layer(to(*experts)).hidden.square().sum().backward()
        assert bias.tolist() == [0, 0]
    assert tracker.counts["second"].tolist() == [3, 1]
    optimizer.step()
    tracker.update_biases(0.3)
    moved = torch.tensor([-0.3, 0.3])
    assert torch.equal(bias, moved) and bias.mean() == 0
    assert layers["second"].bias is bias and (bias.dtype, bias.data_ptr()) == (torch.float32, place)
    assert torch.equal(model.state_dict()["second.bias"], moved) and "first.bias" not in model.state_dict()
    assert tracker.counts["second"].tolist() == tracker.counts["first"].tolist() == [0, 0]
    assert layers["second"](to(0)).counts.tolist() == [0, 1]  # sigmoid(ln 3) - 0.3 against 0.5 + 0.3
    tracker.reset()

    model.eval()
    for layer in layers.values():
        layer(to(0, 1, 1))
    assert torch.equal(bias, moved) and tracker.counts["second"].tolist() == [0, 0]


# Backward -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_34_a_cotangent_may_lie_anywhere(backend: str) -> None:
    """What a sum sends back has strides of 0; other cotangents are transposed, or columns of wider rows."""
    experts, device = KINDS["swiglu"], device_of(backend)
    layer = mo.compile(experts, backend=backend)
    given = {n: t.to(device) for n, t in tensors_for(experts, 4, TOP_K, torch.float32).items()}
    leaves = {n: t.requires_grad_() for n, t in given.items() if t.is_floating_point()}

    def gradients(send: Callable[[torch.Tensor], None]) -> list[torch.Tensor]:
        for leaf in leaves.values():
            leaf.grad = None
        send(layer(**given))
        return [leaf.grad for leaf in leaves.values() if leaf.grad is not None]

    ones = gradients(lambda hidden: hidden.backward(torch.ones(4, 24, device=device)))
    assert len(ones) == 4 and all(gradient.count_nonzero() for gradient in ones)
    assert all(map(torch.equal, gradients(lambda hidden: hidden.sum().backward()), ones))
    sent = cotangent_for(4, 24, torch.float32).to(device)
    wanted = gradients(lambda hidden: hidden.backward(sent))
    wide = torch.full((4, 41), math.nan, device=device)
    wide[:, 1:25] = sent
    for moved in (sent.t().contiguous().t(), wide[:, 1:25]):
        assert all(map(torch.equal, gradients(lambda hidden, moved=moved: hidden.backward(moved)), wanted))


# Tests that can fail --------------------------------------------------------------------------------------------------

SPOILT = ["hidden", "counts", "dropped", "d_x", "d_weights", "d_gate_up_proj", "d_down_proj"]


@pytest.mark.emulate
@pytest.mark.parametrize("spoil", ["not", "zeros", "off by one"])
@pytest.mark.parametrize("spoilt", SPOILT)
def test_case_59_a_spoilt_result_of_experts_is_found_out(
    spoilt: str, spoil: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any one result zeroed, or one number of it changed, the comparison that tests of experts make fails."""
    runner = RUNNERS["emulate"]
    launch, seen = runner.run, []

    def spoiling(program: Any, kind: str, cotangents: tuple[str, ...], inputs: Any) -> list[torch.Tensor]:
        results = launch(program, kind, cotangents, inputs)
        backward = program.backward_function(cotangents) if kind == "backward" else None
        names = program.function.result_names if backward is None else backward.result_names
        if spoilt in names:
            seen.append(spoilt)
            tensor = results[names.index(spoilt)]
            if spoil == "zeros":
                tensor.zero_()
            elif spoil == "off by one":
                tensor.view(-1)[0] += 1
        return results

    monkeypatch.setattr(runner, "run", spoiling)
    experts = KINDS["capacity"]
    given, cotangent = tensors_for(experts, 13, TOP_K, torch.float32), cotangent_for(13, 24, torch.float32)
    found, wanted = (
        run(mo.compile(experts, backend="emulate"), given, cotangent, "cpu"),
        exact(experts, given, cotangent),
    )
    assert seen
    if spoil == "not":
        check(found, wanted, torch.float32)
    else:
        with pytest.raises(AssertionError, match=spoilt):
            check(found, wanted, torch.float32)


# How often things are compiled ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", COMPILED)
def test_case_60_few_kernels_serve_any_number_of_tokens(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever T, backward is prepared twice at most, forward and training once more: they count picks, for which the
    fewest tokens have a launch of their own. A second round prepares nothing."""
    runner, device = RUNNERS[backend], device_of(backend)
    for made in ("_prepared", "_distinct"):
        monkeypatch.setattr(runner, made, {})
    router = mo.Router(43, 5, renormalize=True)  # no other test has it: the native launcher keeps what it has seen
    layer = mo.compile(router, backend=backend)
    numbers = [*range(1, 65), 100, 1000, 4097]
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(60)).tolist()
    for tokens in (numbers[i] for i in order):
        logits = logits_of(router, tokens, device=device)
        weights = step(layer, logits, others_of(router, device))[0]
        assert_close("weights", weights.sum(-1).cpu(), torch.ones(tokens), EXACT)
        with torch.no_grad():
            layer(logits)
    kinds = [key[1] for key in runner._distinct]
    most = {"forward": 3, "training": 3, "backward": 2}
    assert {*kinds} == {*most} and all(kinds.count(kind) <= n for kind, n in most.items())
    for tokens in (numbers[i] for i in reversed(order)):
        step(layer, logits_of(router, tokens, device=device), others_of(router, device))
    assert len(runner._distinct) == len(kinds)


# Logits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_case_62_logits_of_bf16_select_what_float32_selects() -> None:
    """Operands of bf16, added up in float32, beside the same numbers in float32, at the size of a model."""
    tokens, hidden, experts = 8192, 4096, 128
    moe = mo.MoE(mo.Router(experts, 8), mo.Experts(experts, hidden, 8), outputs=("logits", "indices"))
    g = torch.Generator(device="cuda").manual_seed(62)
    shapes = {"x": (tokens, hidden), "gate_weight": (experts, hidden)}
    shapes |= {"gate_up_proj": (experts, 16, hidden), "down_proj": (experts, hidden, 8)}
    given = {
        n: (torch.randn(s, generator=g, device="cuda") * (1.0 if n == "x" else s[-1] ** -0.5)).bfloat16()
        for n, s in shapes.items()
    }
    layer = mo.compile(moe, backend="cuda")
    with torch.no_grad():
        narrow, wide = layer(**given), layer(**{n: t.float() for n, t in given.items()})
    assert narrow.logits.dtype == torch.float32 and narrow.logits.std() > 0.5
    assert (narrow.logits - given["x"].double() @ given["gate_weight"].double().T).abs().max() < 1e-4
    same = (narrow.indices.sort(-1).values == wide.indices.sort(-1).values).all(-1)
    assert same.double().mean() >= 0.999

"""Auxiliary losses, token masks and sums over tokens: values and gradients on every backend, and known cases."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from routing import (
    BACKENDS,
    COMPILED,
    DIGITS,
    EXACT,
    GRADIENT,
    assert_close,
    assert_same,
    assert_zero,
    cotangent,
    device_of,
    run,
    sweep,
)

import moesaic as mo
from moesaic.ir.core import Module
from moesaic.ir.ops.launch import Kernel
from moesaic.ir.parser import parse
from moesaic.ir.types import DType
from moesaic.passes.specialize import Specialize
from moesaic.passes.stages import check_stage
from moesaic.runtime.execute import RUNNERS
from moesaic.runtime.program import program_of
from moesaic.runtime.token_buckets import FEW_TOKENS, number_of

LN2, LN3 = math.log(2), math.log(3)

LOSSES = {
    "balance": mo.LoadBalance(coef=0.5),
    "like transformers": mo.LoadBalance(convention="transformers"),
    "given tokens": mo.LoadBalance(num_tokens="given"),
    "batch first": mo.LoadBalance(coef=2.0, segments="batch_first"),
    "sequence first": mo.LoadBalance(segments="sequence_first"),
    "z": mo.ZLoss(coef=0.1),
    "entropy": mo.Entropy(coef=-0.3),
}

# The formulas once more, in plain torch and float64 -------------------------------------------------------------------


def oracle(
    loss: object,
    logits: torch.Tensor,
    indices: torch.Tensor,
    mask: torch.Tensor,
    score: str,
    given: float = 0.0,
) -> torch.Tensor:
    """The loss of logits [T, E] and picks [T, K]; `mask` says which tokens count."""
    experts, k = logits.shape[-1], indices.shape[-1]
    logits, indices = logits[mask], indices[mask]
    raw = torch.softmax(logits, -1) if score == "softmax" else torch.sigmoid(logits)
    scores = raw / raw.sum(-1, keepdim=True)
    n = len(logits)
    if isinstance(loss, mo.ZLoss):
        return loss.coef * (torch.logsumexp(logits, -1) ** 2).sum() / n
    if isinstance(loss, mo.Entropy):
        return loss.coef * torch.special.entr(scores).sum() / n
    assert isinstance(loss, mo.LoadBalance)
    if loss.convention == "transformers":
        scores, indices = torch.softmax(logits, -1), logits.topk(k).indices
        k = 1
    counts = torch.bincount(indices.flatten(), minlength=experts).to(logits.dtype)
    n = given or n
    return loss.coef * experts / (k * n**2) * (counts * scores.sum(0)).sum()


def by_sequence(order: str, x: torch.Tensor, sequences: int) -> list[torch.Tensor]:
    """The rows [T, ...] of each sequence."""
    grouped = x.unflatten(0, (sequences, -1) if order == "batch_first" else (-1, sequences))
    return list(grouped if order == "batch_first" else grouped.transpose(0, 1))


@pytest.mark.parametrize(("name", "masked", "backend"), sweep(itertools.product(LOSSES, [False, True]), 2, of=3))
def test_losses_and_their_gradients(backend: str, name: str, masked: bool) -> None:
    """With a gate bias, whose gradient is itself a sum over tokens, and weights that train, too."""
    loss, sequences, length, experts, k = LOSSES[name], 3, 11, 13, 3
    score = "softmax" if name in ("batch first", "entropy") else "sigmoid"
    tokens = sequences * length
    generator = torch.Generator().manual_seed(4)
    x = 2 * torch.randn(tokens, experts, generator=generator)
    gate_bias = torch.randn(experts, generator=generator)
    mask = torch.rand(tokens, generator=generator) < (0.6 if masked else 2.0)
    router = mo.Router(experts, k, score=score, gate_bias=True, losses={"it": loss}, outputs=("weights", "indices"))
    order = router.segments or "batch_first"
    shape = (sequences, length) if order == "batch_first" else (length, sequences)
    if not router.segments:
        shape = (tokens,)

    device = device_of(backend)
    logits = x.to(device).reshape(*shape, experts).requires_grad_()
    bias = gate_bias.to(device).requires_grad_()
    inputs = {"gate_bias": bias} | ({"num_tokens": 50} if "given" in name else {})
    mask_given = mask.to(device).reshape(shape) if masked else None
    r = mo.compile(router, backend=backend)(logits, token_mask=mask_given, **inputs)
    d_weights = cotangent(r.weights, 3)
    torch.autograd.backward([r.losses["it"], r.weights], [torch.tensor(1.5, device=device), d_weights])

    leaf, leaf_bias = x.detach().double().requires_grad_(), gate_bias.detach().double().requires_grad_()
    biased = leaf + leaf_bias
    indices = biased.topk(k).indices
    if router.segments:
        every = zip(*(by_sequence(order, t, sequences) for t in (biased, indices, mask)), strict=True)
        expected = torch.stack([oracle(loss, b, i, m, score) for b, i, m in every]).mean()
    else:
        expected = oracle(loss, biased, indices, mask, score, given=50.0 if "given" in name else 0.0)
    raw = torch.softmax(biased, -1) if score == "softmax" else torch.sigmoid(biased)
    weights = raw.gather(-1, indices)
    torch.autograd.backward(
        [expected, weights], [torch.tensor(1.5).double(), d_weights.cpu().double().reshape(tokens, k) * mask[:, None]]
    )
    assert_close("loss", r.losses["it"].reshape(1), expected.reshape(1), EXACT)
    assert torch.equal(r.indices.cpu().reshape(tokens, k)[mask], indices[mask].int())
    assert (r.indices.cpu().reshape(tokens, k)[~mask] == -1).all()
    assert logits.grad is not None and bias.grad is not None
    found = logits.grad.cpu().reshape(tokens, experts)
    assert leaf.grad is not None and leaf_bias.grad is not None
    assert_close("gradient of the logits", found, leaf.grad, GRADIENT)
    if masked:
        assert_zero("gradient of masked tokens", found[~mask])
    assert_close("gradient of the gate bias", bias.grad, leaf_bias.grad, GRADIENT)


# Cases ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_tokens_do_not_count(backend: str) -> None:
    """Nor does it matter what they hold."""
    router = mo.Router(2, 1, losses={"balance": mo.LoadBalance(), "z": mo.ZLoss()})
    for padding in ([10.0, 0.0], [math.nan, -math.inf], [math.inf, 3e38]):
        logits = torch.tensor([[LN3, 0.0], [0.0, LN3], padding, padding], device=device_of(backend)).requires_grad_()
        mask = torch.tensor([True, True, False, False], device=logits.device)
        r = mo.compile(router, backend=backend)(logits, token_mask=mask)
        assert r.losses["balance"].item() == pytest.approx(1.0, abs=1e-6)
        assert r.losses["z"].item() == pytest.approx(LN2**2 * 4, abs=1e-5)  # 1.92181
        assert r.counts.tolist() == [1, 1]
        assert r.indices.tolist() == [[0], [1], [-1], [-1]] and r.weights[2:].tolist() == [[0.0], [0.0]]
        (r.losses["balance"] + r.losses["z"] + r.weights.sum()).backward()
        assert logits.grad is not None and logits.grad[:2].abs().sum() > 0
        assert_zero("gradient of padding", logits.grad[2:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_underflowing_scores_cannot_cheat_the_loss(backend: str) -> None:
    router = mo.Router(4, 1, score="sigmoid", outputs=("indices",), losses={"balance": mo.LoadBalance()})
    logits = torch.full((4, 4), -60.0, device=device_of(backend))
    assert mo.compile(router, backend=backend)(logits).losses["balance"].item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_z_loss_does_not_overflow(backend: str, dtype: torch.dtype) -> None:
    router = mo.Router(2, 1, outputs=("indices",), losses={"z": mo.ZLoss()})
    logits = torch.tensor([[200.0, 0.0]], dtype=dtype, device=device_of(backend), requires_grad=True)
    loss = mo.compile(router, backend=backend)(logits).losses["z"]
    loss.backward()
    assert loss.item() == 40000.0 and logits.grad is not None and logits.grad.tolist() == [[400.0, 0.0]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [0, 4])
def test_no_token_that_counts(backend: str, tokens: int) -> None:
    losses = {
        "balance": mo.LoadBalance(),
        "z": mo.ZLoss(),
        "h": mo.Entropy(),
        "s": mo.LoadBalance(segments="batch_first"),
    }
    router = mo.Router(5, 2, gate_bias=True, losses=losses)
    device = device_of(backend)
    logits = torch.randn(1 if tokens else 0, tokens, 5, device=device).requires_grad_()
    bias = torch.zeros(5, device=device, requires_grad=True)
    mask = torch.zeros(logits.shape[:-1], dtype=torch.bool, device=device)
    r = mo.compile(router, backend=backend)(logits, gate_bias=bias, token_mask=mask)
    assert all(loss.item() == 0.0 for loss in r.losses.values()) and r.counts.tolist() == [0] * 5
    torch.autograd.backward([*r.losses.values(), r.weights], [*map(torch.ones_like, r.losses.values()), r.weights + 1])
    assert logits.grad is not None and logits.grad.shape == logits.shape and bias.grad is not None
    assert_zero("gradient of the logits", logits.grad)
    assert_zero("gradient of the gate bias", bias.grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_weights_and_losses_add_up(backend: str) -> None:
    values = torch.tensor([[LN3, LN2, 0.0, 0.0]], device=device_of(backend))

    def gradient(**factors: float) -> torch.Tensor:
        router = mo.Router(4, 1, losses={"balance": mo.LoadBalance(coef=0.7), "z": mo.ZLoss(coef=0.3)})
        logits = values.clone().requires_grad_()
        r = mo.compile(router, backend=backend)(logits)
        total = sum(f * (r.weights.sum() if n == "weight" else r.losses[n]) for n, f in factors.items())
        assert isinstance(total, torch.Tensor)
        total.backward()
        assert logits.grad is not None
        return logits.grad

    main = gradient(weight=1.0)
    assert_close("main part", main, torch.tensor([[0.24490, -0.12245, -0.06122, -0.06122]]), DIGITS)
    alone = main + gradient(balance=1.0) + gradient(z=1.0)
    assert_close("sum of separate backward passes", gradient(weight=1.0, balance=1.0, z=1.0), alone, EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_only_expert(name: str, score: str, backend: str) -> None:
    """Its share is 1 whatever its logit, so that backward of most losses has no row to read: it reads none."""
    loss, device = LOSSES[name], device_of(backend)
    x = torch.randn(2 if "first" in name else 1, 3, 1, generator=torch.Generator().manual_seed(5))
    logits = x.to(device, copy=True).requires_grad_()
    number = torch.tensor(5.0, device=device, requires_grad=True)
    router = mo.Router(1, 1, score=score, losses={"it": loss})
    r = mo.compile(router, backend=backend)(logits, **({"num_tokens": number} if "given" in name else {}))
    r.losses["it"].backward()
    assert logits.grad is not None
    expected, gradient = {"z": (0.1 * x.square().mean(), 0.2 * x / 3), "entropy": (torch.zeros(()), 0 * x)}.get(
        name, (torch.tensor(loss.coef), 0 * x)
    )
    if "given" in name:
        expected = expected * 9 / 25
        assert number.grad is not None and number.grad.item() == pytest.approx(-2 * loss.coef * 9 / 125)
    assert r.losses["it"].item() == pytest.approx(expected.item(), abs=1e-6)
    assert (logits.grad.cpu() - gradient).abs().max() < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("name", ["balance", "like transformers", "batch first", "entropy"])
def test_losses_are_about_experts_that_can_be_picked(name: str, score: str, backend: str) -> None:
    """Columns of shared experts, which every token goes to, do not count and have no gradient, whatever they hold."""
    loss, generator = LOSSES[name], torch.Generator().manual_seed(6)
    x = torch.randn(2, 7, 7, generator=generator)
    x[..., 5:] += 90.0
    mask = torch.rand(2, 7, generator=generator) < 0.7
    outputs = ("weights", "indices", "counts", "score_sums")
    router = mo.Router(5, 2, score=score, shared_experts=2, losses={"it": loss}, outputs=outputs)
    device = device_of(backend)
    logits = x.to(device, copy=True).requires_grad_()
    r = mo.compile(router, backend=backend)(logits, token_mask=mask.to(device))
    r.losses["it"].backward()
    assert not r.counts[5:].any() and not r.score_sums[5:].any() and (r.score_sums[:5] > 0).all()

    leaf = x.detach().double().requires_grad_()
    own = leaf[..., :5].flatten(0, 1)  # shares of a softmax over all columns are a softmax over these
    parts = (own, own.topk(2).indices, mask.flatten())
    every = zip(*(t.unflatten(0, (2, -1)) for t in parts), strict=True) if name == "batch first" else [parts]
    expected = torch.stack([oracle(loss, *part, score) for part in every]).mean()
    expected.backward()
    assert_close("loss", r.losses["it"].reshape(1), expected.reshape(1), EXACT)
    assert logits.grad is not None and leaf.grad is not None
    assert_close("gradient", logits.grad, leaf.grad, GRADIENT)
    assert not logits.grad[..., 5:].any()


@pytest.mark.parametrize("backend", COMPILED)
def test_a_loss_of_your_own_trains_through_sums_of_scores(backend: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(37, 12, generator=generator)
    router = mo.Router(12, 4, score="sigmoid", outputs=("score_sums", "counts"))
    logits = x.to(device_of(backend)).requires_grad_()
    r = mo.compile(router, backend=backend)(logits)
    (r.score_sums.square() * r.counts).sum().backward()
    leaf = x.detach().double().requires_grad_()
    scores = torch.sigmoid(leaf)
    counts = torch.bincount(leaf.topk(4).indices.flatten(), minlength=12)
    ((scores / scores.sum(-1, keepdim=True)).sum(0).square() * counts).sum().backward()
    assert logits.grad is not None and leaf.grad is not None
    assert_close("gradient", logits.grad, leaf.grad, GRADIENT)


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("number", [2.5, torch.tensor(2.5), torch.tensor([2.5])])
def test_a_learned_factor_of_all_weights(backend: str, number: object) -> None:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(37, 12, generator=generator)
    router = mo.Router(12, 4, score="sigmoid", renormalize=True, expert_scale=True, router_scale=True)
    device = device_of(backend)
    factor = number.to(device).requires_grad_() if isinstance(number, torch.Tensor) else number
    scales = (torch.rand(12, generator=generator) + 0.5).to(device).requires_grad_()
    logits = x.clone().to(device).requires_grad_()
    r = mo.compile(router, backend=backend)(logits, router_scale=factor, expert_scale=scales)
    sent = cotangent(r.weights, 3)
    r.weights.backward(sent)
    leaf, scale = x.double().requires_grad_(), scales.detach().cpu().double().requires_grad_()
    learned = torch.tensor(2.5, dtype=torch.float64, requires_grad=True)
    picked, indices = torch.sigmoid(leaf).topk(4)
    weights = picked / picked.sum(-1, keepdim=True) * scale[indices] * learned
    weights.backward(sent.cpu().double())
    assert_close("weights", r.weights, weights, EXACT)
    assert logits.grad is not None and leaf.grad is not None and scales.grad is not None and scale.grad is not None
    assert_close("gradient of the logits", logits.grad, leaf.grad, GRADIENT)
    assert_close("gradient of the experts' factors", scales.grad, scale.grad, GRADIENT)
    if isinstance(factor, torch.Tensor):
        assert factor.grad is not None and learned.grad is not None and factor.grad.shape == factor.shape
        assert_close("gradient of the factor", factor.grad.reshape(1), learned.grad.reshape(1), GRADIENT)


@pytest.mark.parametrize("backend", COMPILED)
def test_losses_are_equal_bits_on_every_run(backend: str) -> None:
    router = mo.Router(60, 4, losses={"balance": mo.LoadBalance(), "z": mo.ZLoss()}, outputs=("score_sums",))
    logits = torch.randn(3001 if backend == "cuda" else 301, 60, device=device_of(backend))
    layer = mo.compile(router, backend=backend)
    first = layer(logits)
    for _ in range(100 if backend == "cuda" else 3):
        again = layer(logits)
        assert torch.equal(first.score_sums, again.score_sums)
        assert all(torch.equal(first.losses[n], again.losses[n]) for n in router.losses)


def test_masks_hold_in_dense_outputs_groups_and_given_picks() -> None:
    generator = torch.Generator().manual_seed(8)
    x, mask = torch.randn(29, 16, generator=generator), torch.rand(29, generator=generator) < 0.5
    outputs = ("weights", "indices", "counts", "probs", "map", "scores", "bitmap", "logsumexp")
    for router, inputs in (
        (mo.Router(16, 4, groups=4, groups_kept=2, renormalize=True, outputs=outputs), {}),
        (mo.Router(16, 9, score="sigmoid", selection_bias=True, outputs=outputs), {"bias": torch.randn(16)}),
        (mo.Router(16, 2, selection="given", outputs=outputs), {"indices": torch.randint(-1, 17, (29, 2)).int()}),
    ):
        whole = mo.compile(router, backend="emulate")(x, **inputs, token_mask=mask)
        rows = {n: t[mask] if t.shape[:1] == mask.shape else t for n, t in inputs.items()}
        kept = mo.compile(router, backend="emulate")(x[mask], **rows)
        for name in outputs:
            if name == "counts":
                assert torch.equal(whole.counts, kept.counts)
                continue
            assert torch.equal(getattr(whole, name)[mask], getattr(kept, name)), name
            assert (getattr(whole, name)[~mask] == (-1 if name == "indices" else 0)).all(), name


# Declaring ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mo.LoadBalance(coef=math.nan), "coef must be a finite number, found nan"),
        (lambda: mo.LoadBalance(segments="batchfirst"), r"unknown LoadBalance: segments 'batchfirst'"),
        (lambda: mo.LoadBalance(segments="batch_first", num_tokens="given"), "by sequence counts the tokens of each"),
        (lambda: mo.Router(4, 1, losses={"a b": mo.ZLoss()}), "named by identifiers of ASCII letters, found 'a b'"),
        (lambda: mo.Router(4, 1, losses={"z": 0.1}), "loss 'z' must be a LoadBalance, ZLoss or Entropy, found 0.1"),
        (
            lambda: mo.Router(4, 1, losses={o: mo.LoadBalance(segments=o) for o in ("batch_first", "sequence_first")}),
            "must agree in the order of tokens",
        ),
    ],
)
def test_losses_that_mean_nothing_are_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(mo.MoesaicError, match=message):
        make()


def test_logits_without_sequences_are_refused() -> None:
    layer = mo.compile(mo.Router(4, 1, losses={"s": mo.LoadBalance(segments="sequence_first")}))
    with pytest.raises(mo.MoesaicError, match=r"logits must have the shape \[S, N, E\], found \[6, 4\]"):
        layer(torch.randn(6, 4))


def test_masks_of_other_shapes_and_types_are_refused() -> None:
    layer = mo.compile(mo.Router(4, 1))
    with pytest.raises(mo.MoesaicError, match=r"token_mask must have shape \[6\], found \[5\]"):
        layer(torch.randn(6, 4), token_mask=torch.ones(5, dtype=torch.bool))
    with pytest.raises(mo.MoesaicError, match=r"token_mask must be bool, found fp32"):
        layer(torch.randn(6, 4), token_mask=torch.ones(6))


@pytest.mark.emulate
def test_losses_under_torch_compile() -> None:
    router = mo.Router(8, 2, losses={"balance": mo.LoadBalance(segments="batch_first"), "z": mo.ZLoss()})
    layer = mo.compile(router, backend="emulate")

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def step(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        r = layer(logits, token_mask=mask)
        return r.losses["balance"] + r.losses["z"]

    for n, s in ((2, 5), (3, 7)):
        logits, mask = torch.randn(n, s, 8).requires_grad_(), torch.rand(n, s) < 0.7
        loss = step(logits, mask)
        loss.backward()
        eager = layer(logits.detach(), token_mask=mask).losses
        assert torch.equal(loss, eager["balance"] + eager["z"])
        assert logits.grad is not None and logits.grad[mask].abs().sum() > 0 and (logits.grad[~mask] == 0).all()


# Long rows of many tokens ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("outputs", [("weights", "indices"), ("probs", "map")], ids=["compact", "dense"])
@pytest.mark.parametrize(("experts", "k"), [(256, 8), (320, 5)])
def test_rows_that_warps_go_through_on_their_own(experts: int, k: int, outputs: tuple[str, ...], backend: str) -> None:
    """Each token is somebody's, once, whatever is left of the last round; quotients are summed without being there."""
    router = mo.Router(
        experts, k, losses={"it": mo.LoadBalance(coef=2.0)}, outputs=(*outputs, "counts", "score_sums"), dtype="bf16"
    )
    layer = mo.compile(router, backend=backend, passes="specialize{tokens=many}")
    source = layer.kernels["route_rows"].source
    assert "first = first_of_warp" in source and "add_quotient" in source
    for tokens in (1, 3, 131, 421):
        logits = 2 * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(tokens))
        logits = logits.bfloat16()
        r = layer(logits.to(device_of(backend)))
        scores = torch.softmax(logits.double(), -1)
        indices = mo.compile(mo.Router(experts, k, dtype="bf16"), backend="reference")(logits).indices.long()
        assert torch.equal(r.counts.cpu().long(), torch.bincount(indices.flatten(), minlength=experts))
        assert_close("sums of scores", r.score_sums.cpu()[None], scores.sum(0)[None], EXACT)
        mask = torch.ones(tokens, dtype=torch.bool)
        expected = oracle(router.losses["it"], logits.double(), indices, mask, "softmax")
        assert_close("loss", r.losses["it"].reshape(1), expected.reshape(1), EXACT)
        picked = scores.gather(-1, indices)
        if outputs[0] == "weights":
            assert torch.equal(r.indices.cpu().long(), indices)
            assert_close("weights", r.weights, picked, EXACT)
        else:
            assert torch.equal(r.map.cpu(), torch.zeros(tokens, experts).scatter(-1, indices, 1.0).bool())
            assert_close("probs", r.probs, torch.zeros(tokens, experts).double().scatter(-1, indices, picked), 8e-3)


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("coef", [0.0, 30.0])
@pytest.mark.parametrize(("experts", "k", "score"), [(61, 6, "sigmoid"), (128, 8, "softmax")])
def test_gradients_of_many_tokens_in_the_same_row(experts: int, k: int, score: str, coef: float, backend: str) -> None:
    """What picks send back goes through a row of shared memory, on top of what a loss sends to all tokens alike;
    nothing of a token stays there for the next one."""
    losses = {"it": mo.LoadBalance(coef=coef)} if coef else {}
    router = mo.Router(experts, k, score=score, renormalize=True, losses=losses)
    layer = mo.compile(router, backend=backend, passes="specialize{tokens=many prefetch=on}")
    assert layer.kernels["route_backward_rows"].grid == "persistent"
    logits = 2 * torch.randn(421, experts, generator=torch.Generator().manual_seed(experts))
    found = run(layer, logits.to(device_of(backend)))
    right = run(mo.compile(router, backend="reference"), logits.double(), storage={"weights": torch.float32})
    assert torch.equal(found["indices"], right["indices"])
    assert_close("gradient", found.gradients["logits"], right.gradients["logits"], GRADIENT)


# The kernel that finishes ---------------------------------------------------------------------------------------------


def test_who_computes_what_follows_sums() -> None:
    """The first block of a cluster where there are clusters and tiles for one; else whoever is last, by a ticket."""

    def finish(experts: int, target: str = "sm_90a", **losses: object) -> tuple[int, int, bool, bool]:
        router = mo.Router(experts, 2, losses=losses or {"balance": mo.LoadBalance()}, outputs=("weights",))
        made = program_of(router.module("bf16")).executable("forward", target, ())
        again = made.module.entry.clone()
        Specialize(target=target).rewrite(again, {})  # what is rewritten stays as it is: the tuner starts from it
        assert str(Module([again])) == str(Module([made.module.entry]))
        rows, finish = made.kernels
        tickets = {"ticket" in kernel.source for kernel in (rows, finish)}
        assert len(tickets) == 1  # who sets it to 0, and who counts it up
        waits = "sync_cluster" in finish.source
        assert waits == (f"__cluster_dims__({finish.cluster}, 1, 1)" in finish.source)
        return finish.cluster, finish.blocks, waits, tickets == {True}

    assert finish(128) == (8, 8, True, False)  # 4 tiles of counts, 4 of scores
    assert finish(129) == (6, 6, True, False)  # of 64 columns
    assert finish(257) == (6, 6, True, False)  # of 128
    assert finish(512) == (8, 8, True, False)
    assert finish(513) == (1, 34, False, True)
    assert finish(128, "sm_80") == (1, 8, False, True)
    assert finish(7) == (2, 2, True, False)
    assert finish(7, z=mo.ZLoss()) == (1, 1, True, False)
    assert finish(7, balance=mo.LoadBalance(segments="batch_first"))[2:] == (False, True)


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("experts", [65, 130, 257, 510, 513])
def test_tiles_of_a_finish_add_up_any_number_of_columns(experts: int, backend: str) -> None:
    """Tiles of 32, 64 and 128, of rows of 1, 2 and 4 columns a thread, in a cluster and by a ticket."""
    outputs = ("weights", "counts", "score_sums")
    router = mo.Router(experts, 3, losses={"balance": mo.LoadBalance()}, outputs=outputs)
    logits = 2 * torch.randn(300, experts, generator=torch.Generator().manual_seed(experts))
    found = mo.compile(router, backend=backend)(logits.to(device_of(backend)))
    right = mo.compile(router, backend="reference")(logits.double())
    assert torch.equal(found.counts.cpu(), right.counts)
    assert_close("sums of scores", found.score_sums[None], right.score_sums[None], EXACT)
    assert_close("loss", found.losses["balance"].reshape(1), right.losses["balance"].reshape(1), EXACT)


# The fewest tokens: all of it in one launch ---------------------------------------------------------------------------

_ALL = {"balance": mo.LoadBalance(coef=0.5), "z": mo.ZLoss(coef=0.1), "entropy": mo.Entropy()}

ONE_LAUNCH: dict[str, tuple[mo.Router, tuple[str, ...]]] = {  # a router, and what it takes beside logits
    "every loss, masked": (
        mo.Router(61, 4, score="sigmoid", losses=_ALL, outputs=("weights", "score_sums")),
        ("token_mask",),
    ),
    "groups, a given number of tokens": (
        mo.Router(
            64,
            1,
            groups=8,
            groups_kept=2,
            score="sigmoid",
            losses={"given": mo.LoadBalance(num_tokens="given")},
            outputs=("probs", "counts"),
        ),
        ("num_tokens",),
    ),
    "sums in both directions": (
        mo.Router(128, 4, gate_bias=True, router_scale=True, losses={"z": mo.ZLoss()}),
        ("gate_bias", "router_scale"),
    ),
}


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("case", ONE_LAUNCH)
def test_the_fewest_tokens_in_one_launch(backend: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the reference, however they fall on blocks; equal bits when it is called again."""
    monkeypatch.setattr(RUNNERS[backend], "few_tokens", FEW_TOKENS)
    router, names = ONE_LAUNCH[case]
    generator = torch.Generator().manual_seed(5)
    experts, device = router.num_experts, device_of(backend)
    compiled, reference = (mo.compile(router, backend=b) for b in (backend, "reference"))
    for tokens in (0, 1, 7, 255, 256):
        drawn = {
            "token_mask": torch.rand(tokens, generator=generator) < 0.6,
            "num_tokens": torch.tensor(50.0),
            "gate_bias": torch.randn(experts, generator=generator),
            "router_scale": torch.tensor([1.5]),
        }
        given = {name: drawn[name] for name in names}
        logits = torch.randn(tokens, experts, generator=generator)
        here = {name: tensor.to(device) for name, tensor in given.items()}
        found, again = (run(compiled, logits.to(device), **here) for _ in range(2))
        assert_same(found, again)
        exact = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in given.items()}
        wanted = run(reference, logits.double(), **exact)
        assert found.outputs.keys() == wanted.outputs.keys() and found.gradients.keys() == wanted.gradients.keys()
        for left, right, tolerance in (
            (found.outputs, wanted.outputs, EXACT),
            (found.gradients, wanted.gradients, GRADIENT),
        ):
            for name, expected in right.items():
                if expected.any():
                    assert_close(f"{name} of {tokens} tokens", left[name], expected, tolerance)
                else:
                    assert left[name].shape == expected.shape
                    assert_zero(f"{name} of {tokens} tokens", left[name])


def test_who_gets_by_with_one_launch() -> None:
    """A cluster that has the fewest tokens, if the target has clusters and their sums find room in the first block."""

    def symbols(declared: Module, tokens: int = 256, target: str = "sm_90a", passes: str = "") -> list[str]:
        program = program_of(declared, passes)
        made = []
        for kind in ("training", "backward"):
            cotangents = program.float_results if kind == "backward" else ()
            rule = program.rule(kind, cotangents, target, number_of(tokens, FEW_TOKENS))
            executable = program.executable(kind, target, (), cotangents, rule)
            again = executable.module.entry.clone()
            program.specialize(target, (), rule).rewrite(again, {})
            assert str(Module([again])) == str(Module([executable.module.entry]))
            assert parse(str(executable.module)) == executable.module
            check_stage(executable.module, "planned")
            made += [kernel.symbol.partition("_")[2] for kernel in executable.kernels]
            if rule == "fewest":
                [rows] = [kernel for kernel in executable.kernels if kernel.cluster > 1 and "rows" in kernel.symbol]
                assert (rows.grid, rows.blocks, rows.cluster) == ("fixed", 8, 8)
                assert "__cluster_dims__(kBlocks, 1, 1)" in rows.source and "sync_cluster" in rows.source
                assert not any(word in rows.source for word in ("ticket", "partial", "[B, "))
                partial = [b for b in executable.plan.buffers if str(b.type.leading).startswith("B")]
                assert not partial, "partial rows have a place in memory"
        return made

    def router(experts: int, **options: object) -> Module:
        return mo.Router(experts, 2, **{"losses": {"balance": mo.LoadBalance()}, **options}).module("bf16")

    once, twice = ["rows", "backward_rows"], ["rows", "finish", "backward_rows"]
    assert symbols(router(128)) == once and symbols(router(128), tokens=257) == twice
    assert symbols(router(128), target="sm_80") == twice and symbols(router(128), target="sm_100a") == once
    assert symbols(router(256, losses={"balance": mo.LoadBalance(), "z": mo.ZLoss()})) == once
    assert symbols(router(320)) == twice, "640 sums"
    assert symbols(router(2000, losses={"z": mo.ZLoss()}, outputs=("indices",))) == twice, "a row takes a whole block"
    assert symbols(router(128, losses={"balance": mo.LoadBalance(segments="batch_first")})) == twice
    assert symbols(router(128), passes="specialize{lanes=16 threads=64}") == twice, "32 tokens at a time"
    assert symbols(router(128), passes="specialize{lanes=64}") == twice, "a row takes a whole block"
    biased = router(128, losses={}, gate_bias=True, outputs=("weights",))
    assert symbols(biased) == ["rows", "backward_rows"] and symbols(biased, tokens=257)[1:] == [
        "backward_rows",
        "backward_finish",
    ]
    plain = router(128, losses={}, outputs=("weights", "indices"))
    assert program_of(plain).rule("training", (), "sm_90a", 0) == "few", "one set of kernels for both buckets"


def test_kernels_between_a_row_program_and_what_finishes_it() -> None:
    """What needs the counts of a dispatch comes after it; what does not is moved ahead of it."""

    def kernels(**losses: object) -> list[str]:
        layer = mo.MoE(mo.Router(8, 2, losses=losses), mo.Experts(8, 64, 32), outputs=("hidden",))
        program = program_of(layer.module(DType.BF16))
        rule = program.rule("forward", (), "sm_90a", 0)
        entry = program.executable("forward", "sm_90a", (), tokens=rule).module.entry
        return [op.template for op in entry.body.ops if isinstance(op, Kernel)]

    experts = ["product", "product", "combine"]
    assert kernels(balance=mo.LoadBalance()) == ["product", "row_program", "dispatch", "col_finish", *experts]
    assert kernels(z=mo.ZLoss()) == ["product", "row_program", "dispatch", *experts]

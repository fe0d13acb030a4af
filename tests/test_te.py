"""``moesaic.te``: Transformer Engine's router functions against their formulas, and where those functions fail."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from routing import BACKENDS, EXACT, GRADIENT, INF, NAN, ROUNDING, assert_close, assert_zero, cotangent, device_of

import moesaic as mo
from moesaic import te
from moesaic.ir.errors import InputError, InputTypeError, UnsupportedError
from moesaic.runtime.layer import CompiledLayer
from moesaic.runtime.transformer_engine import aux_loss_layer, scores_layer, topk_layer

EPS = 1e-20
F64 = torch.float64


@pytest.fixture(params=BACKENDS)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The functions name no backend, so the environment does; tensors have to be on this device."""
    monkeypatch.setenv("MOESAIC_BACKEND", request.param)
    return device_of(request.param)


# The formulas, in float64 ---------------------------------------------------------------------------------------------


def score_of(name: str, x: torch.Tensor) -> torch.Tensor:
    if name == "softmax":
        return torch.softmax(x, -1)
    return torch.sigmoid(x) if name == "sigmoid" else torch.logaddexp(x, torch.zeros_like(x)).sqrt()


def slope_of(name: str, x: torch.Tensor) -> torch.Tensor:
    """The derivative of a score that is no softmax."""
    y = score_of(name, x)
    return y * (1 - y) if name == "sigmoid" else torch.sigmoid(x) / (2 * y + EPS)


def best(values: torch.Tensor, k: int) -> torch.Tensor:
    """0 and 1: the k largest of each row; of equal ones those of the lower index."""
    order = values.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return torch.zeros_like(values).scatter(-1, order, 1.0)


@dataclass(frozen=True)
class Case:
    """Arguments of `fused_topk_with_score_function`, and what to call it on."""

    score: str
    experts: int
    topk: int
    pre: bool = False
    groups: int | None = None
    kept: int | None = None
    scale: float | None = None
    bias: torch.dtype | None = None
    dtype: torch.dtype = torch.float32

    def logits(self, *leading: int, seed: int = 3) -> torch.Tensor:
        drawn = torch.randn(*leading, self.experts, generator=torch.Generator().manual_seed(seed))
        return (2 * drawn).to(self.dtype)

    def bias_tensor(self, size: float = 0.3) -> torch.Tensor | None:
        if self.bias is None:
            return None
        return (size * torch.randn(self.experts, generator=torch.Generator().manual_seed(4))).to(self.bias)

    def call(self, logits: torch.Tensor, bias: torch.Tensor | None = None, **others: Any) -> Any:
        bias = None if bias is None else bias.to(logits.device)
        return te.fused_topk_with_score_function(
            logits, self.topk, self.pre, self.groups, self.kept, self.scale, self.score, bias, **others
        )

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(probs, map of 0 and 1)."""
        post = self.score == "softmax" and not self.pre
        u = x if post else score_of(self.score, x)
        if bias is not None:
            u = u + bias.to(F64)
        if self.groups is not None and self.kept:
            grouped = u.unflatten(-1, (self.groups, -1))
            group_score = grouped.topk(self.topk // self.kept, dim=-1).values.sum(-1)
            u = grouped.masked_fill(best(group_score, self.kept).unsqueeze(-1) == 0, -INF).flatten(-2)
        m = best(u, self.topk)
        if post:
            weights = torch.softmax(x.masked_fill(m == 0, -INF), -1)
        else:
            weights = m * score_of(self.score, x)
            if self.score != "softmax" and self.topk > 1:
                weights = weights / (weights.sum(-1, keepdim=True) + EPS)
        return (self.scale or 1.0) * weights, m

    def backward(self, x: torch.Tensor, m: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """The gradient of the logits, with `g` that of probs."""
        h = (self.scale or 1.0) * torch.where(m == 1, g, 0.0)
        if self.score == "softmax":
            a = torch.softmax(x if self.pre else x.masked_fill(m == 0, -INF), -1)
            return a * (h - (h * a).sum(-1, keepdim=True))
        y = m * score_of(self.score, x)
        if self.topk > 1:
            d = y.sum(-1, keepdim=True) + EPS
            h = m * (h / d - (h * y).sum(-1, keepdim=True) / d**2)
        return h * slope_of(self.score, x)


CASES = {
    "softmax_post": Case("softmax", 12, 3, scale=1.25),
    "softmax_pre_groups": Case("softmax", 32, 8, pre=True, groups=8, kept=4, scale=1.2, dtype=torch.bfloat16),
    "sigmoid_bias_groups": Case("sigmoid", 16, 4, groups=4, kept=2, scale=2.5, bias=torch.float16, dtype=torch.float16),
    "sqrtsoftplus_bias": Case("sqrtsoftplus", 60, 3, bias=torch.float32),
    "softmax_pre": Case("softmax", 33, 5, pre=True),
    "softmax_post_groups": Case("softmax", 16, 4, groups=4, kept=1, dtype=torch.bfloat16),
    "softmax_all": Case("softmax", 5, 5, pre=True),
    "sigmoid_one": Case("sigmoid", 7, 1, bias=torch.bfloat16),
    "sigmoid_one_group": Case("sigmoid", 8, 3, groups=1, kept=1, pre=True),
    "sigmoid_groups_named_alone": Case("sigmoid", 8, 3, groups=4),
    "sqrtsoftplus_one": Case("sqrtsoftplus", 31, 1, scale=0.5, dtype=torch.bfloat16),
    "sqrtsoftplus_large_k": Case("sqrtsoftplus", 64, 17, bias=F64),
}
EMULATED = ("softmax_post", "softmax_pre_groups", "sigmoid_bias_groups", "sqrtsoftplus_bias")
"""What is run as CUDA text; all are run on the reference."""

ROWS = 29
"""Of most tests, so that they share the kernels that were built for one of them."""


def skip_emulating(request: pytest.FixtureRequest, *, unless: bool) -> None:
    if request.node.callspec.params["device"] == "emulate" and not unless:
        pytest.skip("its kernels are like others that are emulated")


@pytest.mark.parametrize("name", CASES)
def test_topk_is_its_formula(name: str, device: str, request: pytest.FixtureRequest) -> None:
    skip_emulating(request, unless=name in EMULATED)
    case = CASES[name]
    logits, bias = case.logits(ROWS), case.bias_tensor()
    leaf = logits.to(device).requires_grad_()
    probs, picked = case.call(leaf, bias)
    wanted, m = case.forward(logits.to(F64), bias)
    assert (probs.dtype, picked.dtype) == (case.dtype, torch.bool)
    assert torch.equal(picked.cpu(), m == 1)
    assert_close("probs", probs, wanted, EXACT + ROUNDING[case.dtype])
    assert_zero("probs of what is not picked", probs[~picked])
    g = cotangent(probs, seed=9)
    # What comes back for experts that were not picked is ignored, whatever it is.
    probs.backward(torch.where(picked, g, NAN))
    assert leaf.grad is not None and leaf.grad.dtype == case.dtype
    gradient = case.backward(logits.to(F64), m, g.cpu().to(F64))
    assert_close("gradient", leaf.grad, gradient, GRADIENT + ROUNDING[case.dtype])


@pytest.mark.parametrize("name", ["softmax_post", "sigmoid_bias_groups"])
def test_maps_and_index_buffers_say_the_same(name: str, device: str, request: pytest.FixtureRequest) -> None:
    skip_emulating(request, unless=name == "softmax_post")
    case = CASES[name]
    logits, bias = case.logits(1, ROWS).to(device), case.bias_tensor()
    probs, as_bytes = case.call(logits, bias)
    assert probs.shape == as_bytes.shape == (1, ROWS, case.experts)
    formats: list[Any] = [te.RoutingMapFormat.BITMAP_U8, 1, "bitmap_u8"]
    for bitmap_format in formats:
        same, bitmap = case.call(logits, bias, routing_map_format=bitmap_format)
        assert (bitmap.dtype, bitmap.shape) == (torch.uint8, (1, ROWS, -(-case.experts // 8)))
        bits = torch.stack([(bitmap >> i) & 1 for i in range(8)], -1).flatten(-2)[..., : case.experts]
        assert torch.equal(bits.bool(), as_bytes) and torch.equal(same, probs)
    for bytes_format in (te.RoutingMapFormat.BYTEMAP, 0, "bytemap"):
        assert torch.equal(case.call(logits, bias, routing_map_format=bytes_format)[1], as_bytes)
    emulated = request.node.callspec.params["device"] == "emulate"
    for dtype in (torch.int16, torch.int32) if emulated else (torch.int16, torch.int32, torch.int64):
        buffer = torch.full((1, ROWS, case.topk), -7, dtype=dtype, device=device)
        version = buffer._version
        same, returned = case.call(logits, bias, topk_indices=buffer)
        assert returned is buffer and buffer._version > version
        filled = torch.zeros_like(as_bytes).scatter(-1, buffer.long(), True)
        assert torch.equal(filled, as_bytes) and torch.equal(same, probs)


def test_gradients_do_not_need_the_index_buffer(device: str) -> None:
    case = CASES["softmax_post"]
    leaf = case.logits(ROWS).to(device).requires_grad_()
    buffer = torch.empty(ROWS, 3, dtype=torch.int32, device=device)
    probs, _ = case.call(leaf, topk_indices=buffer)
    again, _ = case.call(leaf)
    g = cotangent(probs, seed=9)
    [wanted] = torch.autograd.grad(again, leaf, g)
    buffer.fill_(-1)
    [found] = torch.autograd.grad(probs, leaf, g)
    assert torch.equal(found, wanted)


# Where Transformer Engine fails ---------------------------------------------------------------------------------------


def test_ties_go_to_the_lower_index(device: str) -> None:
    post = CASES["softmax_post"]
    logits = torch.zeros(ROWS, 12, device=device)
    logits[1, 9] = 1.0
    logits[2, 1::2] = -0.0
    _, picked = post.call(logits)
    assert [row.nonzero().flatten().tolist() for row in picked[:3]] == [[0, 1, 2], [0, 1, 9], [0, 1, 2]]
    grouped = CASES["softmax_pre_groups"]
    _, picked = grouped.call(torch.zeros(ROWS, 32, dtype=torch.bfloat16, device=device))
    assert picked[0].nonzero().flatten().tolist() == list(range(8))


@pytest.mark.parametrize("topk", [15, 16])
def test_ties_have_one_rule_for_every_k(topk: int) -> None:
    logits = torch.randn(200, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    for score in ("softmax", "sigmoid", "sqrtsoftplus"):
        _, picked = te.fused_topk_with_score_function(logits, topk, False, None, None, None, score, None)
        assert torch.equal(picked, best(logits.to(F64), topk) == 1)


def test_masked_experts_leave_a_row_clean(device: str) -> None:
    case = CASES["softmax_post"]
    logits = torch.full((ROWS, 12), -INF, device=device)
    logits[0, [5, 7]] = torch.tensor([0.0, 1.0], device=device)
    logits[1, 3:] = case.logits(1)[0, 3:].to(device)
    logits[3:] = case.logits(ROWS - 3).to(device)
    leaf = logits.requires_grad_()
    probs, picked = case.call(leaf)
    probs.backward(cotangent(probs, seed=9))
    assert picked.sum(-1).tolist() == [3] * ROWS
    assert picked[0].nonzero().flatten().tolist() == [0, 5, 7]
    x = logits.detach().cpu().to(F64)
    assert_close("two experts", probs[0, [5, 7]], 1.25 * torch.softmax(x[0, [5, 7]], -1), EXACT)
    assert_zero("no expert", probs[2])
    assert leaf.grad is not None and bool(leaf.grad.isfinite().all())
    assert_zero("gradient of what is masked", leaf.grad[x == -INF])


@pytest.mark.parametrize("function", ["topk", "scores"])
def test_a_masked_expert_does_not_poison_a_softmax_over_all(function: str) -> None:
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(1))
    logits[:, [0, 39]] = -INF
    leaf = logits.requires_grad_()
    if function == "topk":
        values, _ = te.fused_topk_with_score_function(leaf, 40, True, None, None, None, "softmax", None)
    else:
        _, values = te.fused_compute_score_for_moe_aux_loss(leaf, 4, "softmax")
    assert_close("softmax", values, torch.softmax(logits.detach().to(F64), -1), EXACT)
    [gradient] = torch.autograd.grad(values, leaf, cotangent(values, seed=2))
    assert bool(gradient.isfinite().all())
    assert_zero("gradient of what is masked", gradient[:, [0, 39]])


@pytest.mark.parametrize("size", [1e4, 1e8, INF])
def test_a_bias_of_any_size_only_selects(size: float, device: str) -> None:
    case = CASES["sqrtsoftplus_bias"]
    logits = case.logits(ROWS).to(device)
    bias = torch.zeros(120, device=device)[::2]
    bias[[3, 40, 59]] = size
    leaf = logits.requires_grad_()
    probs, picked = case.call(leaf, bias)
    m = torch.zeros(ROWS, 60, dtype=F64)
    m[:, [3, 40, 59]] = 1.0
    assert torch.equal(picked.cpu(), m == 1)
    x = logits.detach().cpu().to(F64)
    y = m * score_of("sqrtsoftplus", x)
    assert_close("probs", probs, y / y.sum(-1, keepdim=True), EXACT)
    g = cotangent(probs, seed=9)
    probs.backward(g)
    assert leaf.grad is not None
    assert_close("gradient", leaf.grad, case.backward(x, m, g.cpu().to(F64)), GRADIENT)


def test_scores_that_underflow_give_zeros(device: str) -> None:
    case = CASES["sqrtsoftplus_bias"]
    leaf = torch.full((ROWS, 60), -300.0, device=device).requires_grad_()
    probs, picked = case.call(leaf, torch.zeros(60))
    probs.backward(cotangent(probs, seed=1))
    assert picked.sum(-1).tolist() == [3] * ROWS
    assert leaf.grad is not None
    assert_zero("probs", probs)
    assert_zero("gradient", leaf.grad)


def test_the_bias_gets_no_gradient() -> None:
    bias = torch.zeros(60, requires_grad=True)
    leaf = torch.randn(5, 60, generator=torch.Generator().manual_seed(1)).requires_grad_()
    probs, _ = CASES["sqrtsoftplus_bias"].call(leaf, bias)
    probs.backward(cotangent(probs, seed=1))
    assert bias.grad is None


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_few_tokens_rows_apart_and_leading_dimensions(tokens: int, device: str) -> None:
    case = CASES["softmax_post"]
    rows = case.logits(2 * tokens, seed=5).to(device)
    wide = torch.full((2, tokens, 30), NAN, device=device)
    apart = wide[..., 1:25:2]
    apart.copy_(rows.view(2, tokens, 12))
    assert apart.stride(-1) == 2
    leaf = apart.detach().requires_grad_()
    probs, picked = case.call(leaf)
    plain, plain_picked = case.call(rows)
    assert probs.shape == picked.shape == (2, tokens, 12)
    assert torch.equal(probs.reshape(-1, 12), plain) and torch.equal(picked.reshape(-1, 12), plain_picked)
    probs.backward(cotangent(probs, seed=1).transpose(0, 1).contiguous().transpose(0, 1))
    assert leaf.grad is not None and leaf.grad.shape == leaf.shape
    one, _ = case.call(torch.zeros(12, device=device))
    assert one.shape == (12,)


def test_float64_runs_on_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESAIC_BACKEND", "emulate")
    case = CASES["sigmoid_bias_groups"]
    x = case.logits(ROWS).to(F64).requires_grad_()
    bias = case.bias_tensor()
    probs, picked = case.call(x, bias)
    wanted, m = case.forward(x.detach(), bias)
    assert probs.dtype == F64 and torch.equal(picked, m == 1)
    torch.testing.assert_close(probs, wanted, rtol=1e-12, atol=0.0)
    _, scores = te.fused_compute_score_for_moe_aux_loss(x, 2, "sigmoid")
    counts = torch.arange(16)
    loss = te.fused_moe_aux_loss(scores, counts, torch.tensor(29), 16, 2, 0.1)
    assert scores.dtype == loss.dtype == F64
    torch.testing.assert_close(loss, aux_loss(scores.detach(), counts, 29, 16, 2, 0.1), rtol=1e-12, atol=0.0)


# Scores for the loss --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_scores_for_the_loss_are_their_formula(
    score: str, dtype: torch.dtype, device: str, request: pytest.FixtureRequest
) -> None:
    skip_emulating(request, unless=(score, dtype) == ("sigmoid", torch.bfloat16))
    logits = (2 * torch.randn(2, 17, 33, generator=torch.Generator().manual_seed(6))).to(dtype)
    leaf = logits.to(device).requires_grad_()
    picked, scores = te.fused_compute_score_for_moe_aux_loss(leaf, 4, score)
    x = logits.to(F64)
    y = score_of(score, x)
    p = y if score == "softmax" else y / (y.sum(-1, keepdim=True) + EPS)
    assert (picked.dtype, scores.dtype) == (torch.bool, torch.float32)
    assert torch.equal(picked.cpu(), best(p, 4) == 1)
    assert_close("scores", scores, p, EXACT)
    g = cotangent(scores, seed=2)
    scores.backward(g)
    h = g.cpu().to(F64)
    if score == "softmax":
        wanted = p * (h - (h * p).sum(-1, keepdim=True))
    else:
        d = y.sum(-1, keepdim=True) + EPS
        wanted = (h / d - (h * y).sum(-1, keepdim=True) / d**2) * slope_of(score, x)
    assert leaf.grad is not None and leaf.grad.dtype == dtype
    assert_close("gradient", leaf.grad, wanted, GRADIENT + ROUNDING[dtype])


def test_scores_for_the_loss_are_divided_for_one_pick_too() -> None:
    logits = torch.randn(29, 8, generator=torch.Generator().manual_seed(6))
    bitmap, scores = te.fused_compute_score_for_moe_aux_loss(logits, 1, "sigmoid", "bitmap_u8")
    assert_close("sums", scores.sum(-1), torch.ones(29), EXACT)
    assert bitmap.shape == (29, 1)
    assert torch.equal(bitmap.flatten(), (1 << scores.argmax(-1)).to(torch.uint8))


# The loss -------------------------------------------------------------------------------------------------------------


def aux_loss(
    probs: torch.Tensor, counts: torch.Tensor, tokens: float, experts: int, topk: int, coeff: float
) -> torch.Tensor:
    factor = experts * coeff / (topk * tokens**2)
    return factor * (counts.to(F64) * probs.to(F64).sum(0)).sum()


def probs_of(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(8)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("experts", [12, 6])
def test_loss_is_its_formula(experts: int, dtype: torch.dtype, device: str, request: pytest.FixtureRequest) -> None:
    """Of 12 columns: one sequence, or two of 6 experts each."""
    skip_emulating(request, unless=(experts, dtype) == (6, torch.bfloat16))
    probs = probs_of(29, 12, dtype)
    counts = torch.arange(12) * 3
    leaf = probs.to(device).requires_grad_()
    loss = te.fused_moe_aux_loss(leaf, counts.to(device), 31, experts, 4, 0.7)
    assert loss.shape == () and loss.dtype == dtype
    assert_close("loss", loss, aux_loss(probs, counts, 31, experts, 4, 0.7), EXACT + ROUNDING[dtype])
    g = torch.tensor(1.5, dtype=dtype, device=device)
    loss.backward(g)
    assert leaf.grad is not None and leaf.grad.dtype == dtype
    wanted = 1.5 * experts * 0.7 / (4 * 31**2) * counts.to(F64).expand(29, 12)
    assert_close("gradient", leaf.grad, wanted, EXACT + ROUNDING[dtype])


@pytest.mark.parametrize(
    "counts_dtype", [torch.int16, torch.int32, torch.int64, torch.uint8, torch.float32, torch.bfloat16, F64]
)
def test_counts_and_numbers_of_tokens_of_any_type(counts_dtype: torch.dtype) -> None:
    probs, counts = probs_of(29, 12, torch.float32), torch.arange(12).to(counts_dtype)
    wanted = aux_loss(probs, counts, 29, 12, 2, 1.0)
    numbers: list[Any] = [29, *(torch.tensor(29, dtype=t) for t in (torch.int64, torch.int32, torch.float32, F64))]
    for tokens in [*numbers, torch.tensor([29]), torch.tensor([29.0])]:
        assert_close("loss", te.fused_moe_aux_loss(probs, counts, tokens, 12, 2, 1.0), wanted, EXACT)


def test_loss_of_no_rows_and_of_no_tokens(device: str) -> None:
    counts = torch.arange(12, device=device)
    empty = torch.empty(0, 12, dtype=torch.bfloat16, device=device).requires_grad_()
    loss = te.fused_moe_aux_loss(empty, counts, 31, 6, 4, 0.7)
    loss.backward()
    assert loss.item() == 0.0
    assert empty.grad is not None and empty.grad.shape == (0, 12)
    leaf = probs_of(29, 12, torch.bfloat16).to(device).requires_grad_()
    loss = te.fused_moe_aux_loss(leaf, counts, torch.zeros((), dtype=torch.int64, device=device), 6, 4, 0.7)
    loss.backward()
    assert loss.item() == 0.0
    assert leaf.grad is not None
    assert_zero("gradient", leaf.grad)


def test_loss_is_the_same_every_time_and_for_strided_probs(device: str) -> None:
    probs = probs_of(501, 12, torch.bfloat16).to(device)
    counts = torch.arange(12, device=device)
    first = te.fused_moe_aux_loss(probs, counts, 501, 6, 4, 0.7)
    for _ in range(3):
        assert torch.equal(te.fused_moe_aux_loss(probs, counts, 501, 6, 4, 0.7), first)
    for apart in (torch.stack([probs, probs], 1)[:, 0], probs.t().contiguous().t()):
        assert not apart.is_contiguous()
        assert torch.equal(te.fused_moe_aux_loss(apart, counts, 501, 6, 4, 0.7), first)


def test_losses_of_ranks_add_up() -> None:
    """Rows are local, the number of tokens is of all."""
    probs, counts = probs_of(30, 12, torch.float32), torch.arange(12)
    parts = [te.fused_moe_aux_loss(p, counts, 30, 12, 2, 1.0) for p in probs.chunk(3)]
    assert_close("sum", sum(parts), te.fused_moe_aux_loss(probs, counts, 30, 12, 2, 1.0), EXACT)


# torch.compile --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "device",
    [pytest.param("emulate", marks=pytest.mark.emulate), pytest.param("cuda", marks=pytest.mark.gpu)],
    indirect=True,
)
def test_one_graph_holds_all_three(device: str) -> None:
    torch._dynamo.reset()  # a graph of another backend would fit, too: what the environment names is no guard
    case = CASES["softmax_post"]

    def step(logits: torch.Tensor, others: torch.Tensor, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        probs, _ = case.call(logits, topk_indices=buffer)
        picked, scores = te.fused_compute_score_for_moe_aux_loss(others, 4, "sigmoid", te.RoutingMapFormat.BYTEMAP)
        rows = scores[..., :12].flatten(0, 1).bfloat16()
        counts = picked[..., :12].flatten(0, 1).sum(0)
        return probs, picked, te.fused_moe_aux_loss(rows, counts, rows.shape[0], 6, 4, 0.7)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (13, 17):
        results = []
        for call in (step, compiled):
            leaf = case.logits(2, tokens).to(device).requires_grad_()
            others = torch.randn(2, tokens, 33, generator=torch.Generator().manual_seed(6)).bfloat16()
            others = others.to(device).requires_grad_()
            buffer = torch.zeros(2, tokens, 3, dtype=torch.int32, device=device)
            probs, picked, loss = call(leaf, others, buffer)
            torch.autograd.backward([probs, loss], [cotangent(probs, seed=1), cotangent(loss, seed=2)])
            results.append((probs.detach(), picked, loss.detach(), buffer, leaf.grad, others.grad))
        for eager, made in zip(*results, strict=True):
            assert torch.equal(eager, made)


# Compiling ------------------------------------------------------------------------------------------------------------


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "layer",
    [
        topk_layer("bf16", 256, 8, False, 8, 4, 2.5, "sigmoid", True, "map", "int32"),
        topk_layer("f32", 128, 8, False, None, None, None, "softmax", False, "indices", "int64"),
        scores_layer("bf16", 128, 8, "sqrtsoftplus", "bitmap"),
        aux_loss_layer("bf16", True, False, 256, 8, 1e-2),
        aux_loss_layer("f32", True, True, 128, 8, 1e-2),
    ],
    ids=["sigmoid", "softmax", "scores", "loss", "loss_by_sequence"],
)
def test_layers_of_models_do_not_spill(layer: CompiledLayer) -> None:
    resources = mo.compile(layer._declared, target="sm_90a").resources
    assert len(resources) >= 2
    assert not [name for name, r in resources.items() if r.uses_local_memory]


# What is refused ------------------------------------------------------------------------------------------------------


def test_signatures_are_transformer_engines() -> None:
    def described(function: Callable[..., Any]) -> list[tuple[str, Any]]:
        return [(n, p.default) for n, p in inspect.signature(function).parameters.items()]

    required = inspect.Parameter.empty
    names = "logits topk use_pre_softmax num_groups group_topk scaling_factor score_function expert_bias"
    optional = ("topk_indices", "qb_histogram", "qb_bin_bounds", "qb_histogram_mode")
    bytemap = ("routing_map_format", te.RoutingMapFormat.BYTEMAP)
    assert described(te.fused_topk_with_score_function) == [
        *((n, required) for n in names.split()),
        bytemap,
        *((n, None) for n in optional),
    ]
    assert described(te.fused_compute_score_for_moe_aux_loss) == [
        *((n, required) for n in ("logits", "topk", "score_function")),
        bytemap,
    ]
    names = "probs tokens_per_expert total_num_tokens num_experts topk coeff"
    assert described(te.fused_moe_aux_loss) == [(n, required) for n in names.split()]
    assert [(f.name, f.value) for f in te.RoutingMapFormat] == [("BYTEMAP", 0), ("BITMAP_U8", 1)]


GOOD = {
    "logits": torch.zeros(3, 8),
    "topk": 4,
    "use_pre_softmax": False,
    "num_groups": None,
    "group_topk": None,
    "scaling_factor": None,
    "score_function": "sigmoid",
    "expert_bias": None,
}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"qb_histogram": torch.zeros(8, 4)}, UnsupportedError, "qb_histogram: quantile balancing is not available"),
        ({"qb_bin_bounds": torch.zeros(2)}, UnsupportedError, "qb_bin_bounds: "),
        ({"qb_histogram_mode": "two_kernel"}, UnsupportedError, "qb_histogram_mode: "),
        ({"topk": 0}, InputError, "topk must be an integer between 1 and the 8 experts of the logits, found topk = 0"),
        ({"topk": 9}, InputError, "found topk = 9"),
        ({"score_function": "Sigmoid"}, InputError, "unknown score_function 'Sigmoid'.*did you mean 'sigmoid'"),
        ({"score_function": "softmax", "expert_bias": torch.zeros(8)}, InputError, "expert_bias goes with .*'softmax'"),
        (
            {"expert_bias": torch.zeros(7)},
            InputError,
            r"floats of shape \[8\], found float32 \[7\]",
        ),
        ({"expert_bias": torch.zeros(8, dtype=torch.int32)}, InputError, "expert_bias must be floats"),
        ({"expert_bias": 0.5}, InputTypeError, "expert_bias must be a tensor, found float"),
        ({"group_topk": 2}, InputError, "group_topk = 2 needs num_groups >= 1, found num_groups = None"),
        ({"group_topk": 2, "num_groups": 0}, InputError, "found num_groups = 0"),
        ({"group_topk": 2, "num_groups": 3}, InputError, "num_groups must divide the 8 experts, found num_groups = 3"),
        ({"group_topk": 4, "num_groups": 2}, InputError, "group_topk must be at most num_groups = 2"),
        ({"group_topk": 3, "num_groups": 4}, InputError, "group_topk must divide topk = 4, found group_topk = 3"),
        ({"group_topk": 1, "num_groups": 4}, InputError, "topk / group_topk = 4 experts .* a group holds 2"),
        ({"group_topk": "1", "num_groups": 2}, InputError, "group_topk must be an integer, found '1'"),
        ({"group_topk": 1, "num_groups": "2"}, InputError, "num_groups must be an integer, found '2'"),
        ({"score_function": ["softmax"]}, InputTypeError, "score_function must be .* a name .*, found list"),
        (
            {"topk_indices": torch.zeros(1, 4, dtype=torch.int32).expand(3, 4)},
            InputError,
            "topk_indices must have memory of their own .* expanded",
        ),
        ({"scaling_factor": NAN}, InputError, "scaling_factor must be a finite number, found nan"),
        ({"routing_map_format": 2}, InputError, "routing_map_format must be .* found 2"),
        ({"routing_map_format": "BYTEMAP"}, InputError, "routing_map_format must be .* found 'BYTEMAP'"),
        ({"topk_indices": torch.zeros(3, 4)}, InputError, "topk_indices must be int16, int32 or int64, found float32"),
        (
            {"topk_indices": torch.zeros(3, 3, dtype=torch.int32)},
            InputError,
            r"topk_indices must have shape \[3, 4\], found \[3, 3\]",
        ),
        (
            {"topk_indices": torch.zeros(3, 4, dtype=torch.int32), "routing_map_format": "bitmap_u8"},
            InputError,
            "topk_indices are returned in place of a map",
        ),
        ({"logits": torch.zeros(3, 8, dtype=torch.int32)}, InputError, "logits must be .* found int32"),
        ({"logits": torch.zeros(3, 0)}, InputError, r"logits must have shape .* found \[3, 0\]"),
        ({"logits": [0.0]}, InputTypeError, "logits must be a tensor, found list"),
        (
            {
                "logits": torch.zeros(1, 2**15),
                "topk": 1,
                "topk_indices": torch.zeros(1, 1, dtype=torch.int16),
            },
            InputError,
            "topk_indices of int16 hold ids up to 32767, found 32768 experts",
        ),
    ],
)
def test_topk_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        te.fused_topk_with_score_function(**{**GOOD, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"total_num_tokens": 0}, InputError, "total_num_tokens must be above 0, found 0"),
        ({"total_num_tokens": -1.0}, InputError, "total_num_tokens must be above 0, found -1.0"),
        ({"total_num_tokens": torch.tensor(True)}, InputError, "total_num_tokens must be an integer or a float"),
        ({"total_num_tokens": torch.ones(2)}, InputError, r"one element, found shape \[2\]"),
        ({"total_num_tokens": "29"}, InputTypeError, "total_num_tokens must be a number or a tensor .* found str"),
        ({"num_experts": 5}, InputError, "probs must have a multiple of num_experts = 5 columns .* found 12"),
        ({"num_experts": 0}, InputError, "num_experts must be an integer >= 1, found 0"),
        ({"topk": 0}, InputError, "topk must be an integer >= 1, found 0"),
        ({"coeff": INF}, InputError, "coeff must be a finite number, found inf"),
        ({"tokens_per_expert": torch.ones(11)}, InputError, r"tokens_per_expert must have shape \[12\], found \[11\]"),
        ({"tokens_per_expert": torch.ones(12).bool()}, InputError, "tokens_per_expert must be integers or floats"),
    ],
)
def test_loss_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    good = {
        "probs": torch.ones(29, 12),
        "tokens_per_expert": torch.ones(12),
        "total_num_tokens": 29,
        "num_experts": 12,
        "topk": 2,
        "coeff": 1.0,
    }
    with pytest.raises(error, match=message):
        te.fused_moe_aux_loss(**{**good, **changes})


def test_scores_for_the_loss_refuse() -> None:
    with pytest.raises(InputError, match="topk must be an integer between 1 and the 8 experts"):
        te.fused_compute_score_for_moe_aux_loss(torch.zeros(3, 8), 9, "softmax")
    with pytest.raises(InputError, match="unknown score_function 'tanh'"):
        te.fused_compute_score_for_moe_aux_loss(torch.zeros(3, 8), 2, "tanh")

"""``selection="given"``: picks that come from outside, may repeat, and may name experts that are not here."""

from __future__ import annotations

import pytest
import torch
from routing import (
    BACKENDS,
    EXACT,
    GRADIENT,
    INF,
    NAN,
    ROUNDING,
    assert_close,
    assert_same,
    assert_zero,
    device_of,
    run,
    softsign_score,
    sweep,
)

import moesaic as mo
from moesaic.ir.diagnostics import DiagnosticError
from moesaic.ir.errors import InputError, InputTypeError
from moesaic.runtime.execute import RUNNERS

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
OUTPUTS = ("weights", "indices", "counts", "probs", "map", "bitmap", "scores")


def drawn(tokens: int, picks: int, experts: int, dtype: torch.dtype, seed: int = 2) -> torch.Tensor:
    """Ids with repetitions and, about a third, outside [0, experts)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-max(1, experts // 5), experts + max(1, experts // 5), (tokens, picks), generator=generator)
    ids[0] = -1  # a row of nothing
    ids[1] = experts - 1  # a row of one expert
    return ids.to(dtype)


CASES = [
    # experts, picks, tokens, order, score, renormalize, logits, ids
    (13, 4, 29, "score_then_topk", "softmax", True, "fp32", torch.int64),
    (64, 6, 67, "score_then_topk", "sigmoid", mo.norm.sum(eps=1e-20), "bf16", torch.int32),
    (96, 33, 13, "score_then_topk", "sqrtsoftplus", mo.norm.lp(2), "fp32", torch.int16),
    (7, 1, 29, "score_then_topk", "sigmoid", False, "bf16", torch.int64),
    (257, 8, 13, "topk_then_score", "softmax", False, "fp32", torch.int32),
    (60, 4, 29, "topk_then_score", "softmax", False, "bf16", torch.int64),
    (128, 3, 29, "topk_then_score", softsign_score, True, "fp32", torch.int16),
    (1, 1, 13, "score_then_topk", "sigmoid", False, "fp32", torch.int32),
    (40, 40, 29, "score_then_topk", softsign_score, True, "bf16", torch.int64),
]


@pytest.mark.parametrize(
    ("experts", "picks", "tokens", "order", "score", "renormalize", "dtype", "ids_dtype", "backend"),
    sweep(CASES, 2, of=3),
)
def test_given_picks_agree_with_float64(
    monkeypatch: pytest.MonkeyPatch,
    experts: int,
    picks: int,
    tokens: int,
    order: str,
    score: object,
    renormalize: object,
    dtype: str,
    ids_dtype: torch.dtype,
    backend: str,
) -> None:
    monkeypatch.setattr(RUNNERS[backend], "few_tokens", 24)
    router = mo.Router(
        experts, picks, score=score, order=order, renormalize=renormalize, scale=2.0, expert_scale=True,
        gate_bias=True, selection="given", indices_dtype=str(ids_dtype).removeprefix("torch."), outputs=OUTPUTS,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(tokens, experts, generator=generator).to(DTYPES[dtype])
    learned = {
        "gate_bias": 0.3 * torch.randn(experts, generator=generator),
        "expert_scale": 0.5 + torch.rand(experts, generator=generator),
    }
    ids = drawn(tokens, picks, experts, ids_dtype)
    wide = drawn(tokens, picks + 3, experts, ids_dtype)
    wide[:, 2 : 2 + picks] = ids
    device = device_of(backend)
    got = run(
        mo.compile(router, backend=backend),
        logits.to(device),
        indices=wide.to(device)[:, 2 : 2 + picks],  # rows need not follow one another
        storage={"probs": DTYPES[dtype]},
        **{n: t.to(device) for n, t in learned.items()},
    )
    exact = run(
        mo.compile(router, backend="reference"),
        logits.double(),
        indices=ids,
        storage={"probs": DTYPES[dtype]},
        **{n: t.double() for n, t in learned.items()},
    )
    here = (ids >= 0) & (ids < experts)
    assert got["indices"].dtype == ids_dtype
    assert torch.equal(got["indices"], torch.where(here, ids, torch.tensor(-1, dtype=ids_dtype)))
    for name in ("counts", "map", "bitmap"):
        assert torch.equal(got[name], exact[name]), name
    counted = torch.bincount(ids[here].long(), minlength=experts)
    assert torch.equal(got["counts"].long(), counted), "an expert that is picked twice counts twice"
    for name in ("weights", "probs", "scores"):
        assert_close(name, got[name], exact[name], EXACT + ROUNDING[got[name].dtype])
    assert_zero("weights of what is not here", got["weights"][~here])
    assert got.gradients.keys() == {"logits", *learned}
    for name, gradient in exact.gradients.items():
        tolerance = GRADIENT + ROUNDING[got.gradients[name].dtype]
        assert_close(f"gradient of {name}", got.gradients[name], gradient, tolerance)


def test_the_reference_is_what_is_written_here() -> None:
    """Scores at the ids, divided by their sum; independent of any op of ours."""
    router = mo.Router(7, 3, score="sigmoid", renormalize=True, selection="given", outputs=("weights", "probs", "map"))
    x = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[0, 6, 3], [2, 2, 5], [-1, 4, 7], [-1, -1, 100]], dtype=torch.int32)
    r = mo.compile(router, backend="reference")(x, indices=ids)
    s = torch.sigmoid(x)
    wanted = torch.zeros(4, 3, dtype=torch.float64)
    wanted[0] = s[0, [0, 6, 3]] / s[0, [0, 6, 3]].sum()
    wanted[1] = s[1, [2, 2, 5]] / (2 * s[1, 2] + s[1, 5])
    wanted[2, 1] = 1.0
    torch.testing.assert_close(r.weights, wanted)
    assert r.probs[1, 2] == 2 * r.weights[1, 0]
    assert r.map.sum(-1).tolist() == [3, 2, 1, 0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", ["score_then_topk", "topk_then_score"])
def test_what_is_not_here_passes_no_gradient_whatever_arrives(order: str, backend: str) -> None:
    """Cotangents of NaN and infinity at such picks change nothing, nor does any of the ids that mean the same."""
    device = device_of(backend)
    router = mo.Router(12, 3, order=order, renormalize=True, selection="given", expert_scale=True, outputs=("weights",))
    layer = mo.compile(router, backend=backend)
    generator = torch.Generator().manual_seed(3)
    values, factors = torch.randn(29, 12, generator=generator), torch.rand(12, generator=generator)
    sent = torch.randn(29, 3, generator=generator)
    away = torch.rand(29, 3, generator=generator) < 0.4

    def gradients(id: int, cotangent: float) -> tuple[torch.Tensor, ...]:
        ids = torch.randint(0, 12, (29, 3), generator=torch.Generator().manual_seed(5), dtype=torch.int32)
        leaves = [t.to(device).requires_grad_() for t in (values, factors)]
        indices = ids.masked_fill(away, id).to(device)
        weights = layer(leaves[0], expert_scale=leaves[1], indices=indices).weights
        assert_zero("weights of what is not here", weights[away.to(device)])
        return torch.autograd.grad(weights, leaves, sent.masked_fill(away, cotangent).to(device))

    wanted = gradients(-1, 0.0)
    assert all(bool(g.isfinite().all()) and bool((g != 0).any()) for g in wanted)
    for id, cotangent in ((12, NAN), (-1, INF), (2**31 - 1, NAN), (-(2**31), 1.0)):
        for found, expected in zip(gradients(id, cotangent), wanted, strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_of_other_experts_may_be_anything(backend: str) -> None:
    """NaN and infinities at experts that no id names reach neither weights nor gradients of a sigmoid."""
    router = mo.Router(12, 2, score="sigmoid", renormalize=True, selection="given", outputs=("weights",))
    logits = torch.randn(29, 12, generator=torch.Generator().manual_seed(3))
    ids = torch.randint(0, 6, (29, 2), generator=torch.Generator().manual_seed(5), dtype=torch.int32)
    ids[::3, 1] = -1
    spoilt = logits.clone()
    spoilt[:, 6], spoilt[:, 7] = NAN, INF
    layer, device = mo.compile(router, backend=backend), device_of(backend)
    clean = run(layer, logits.to(device), indices=ids.to(device))
    other = run(layer, spoilt.to(device), indices=ids.to(device))
    assert torch.equal(clean["weights"], other["weights"])
    assert torch.equal(clean.gradients["logits"][:, :6], other.gradients["logits"][:, :6])


@pytest.mark.emulate
def test_results_do_not_depend_on_the_order_of_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Picks of one expert in several lanes add up in one order and write one place."""
    router = mo.Router(16, 12, score="sigmoid", selection="given", outputs=("weights", "probs", "map", "bitmap"))
    layer = mo.compile(router, backend="emulate")
    logits = torch.randn(29, 16, generator=torch.Generator().manual_seed(3))
    ids = drawn(29, 12, 5, torch.int32)
    found = []
    for order in (0, 1, 77):
        monkeypatch.setattr(RUNNERS["emulate"], "order", order)
        found.append(run(layer, logits, indices=ids))
    for other in found[1:]:
        assert_same(other, found[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes(backend: str) -> None:
    """Leading dimensions of the logits, no tokens, expanded ids."""
    device = device_of(backend)
    layer = mo.compile(mo.Router(8, 2, selection="given", indices_dtype="int64"), backend=backend)
    logits = torch.randn(2, 3, 8, device=device)
    ids = torch.tensor([1, 5], device=device).expand(2, 3, 2)
    r = layer(logits, indices=ids)
    assert r.weights.shape == r.indices.shape == (2, 3, 2)
    assert torch.equal(r.indices, ids)
    assert r.counts.tolist() == [0, 6, 0, 0, 0, 6, 0, 0]
    empty = layer(logits[:0], indices=ids[:0])
    assert empty.weights.shape == (0, 3, 2)
    assert empty.counts.tolist() == [0] * 8
    with pytest.raises(InputError, match=r"indices must have shape \[2, 3, 2\], found \[6, 2\]"):
        layer(logits, indices=ids.flatten(0, 1))
    with pytest.raises(InputError, match="indices must be i64, found i32"):
        layer(logits, indices=ids.int())
    with pytest.raises(InputTypeError, match=r"input 'indices' .* is missing"):
        layer(logits)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"selection_bias": True},
            "selection_bias = True decides which experts are picked, but with selection='given'",
        ),
        ({"groups": 4, "groups_kept": 2}, "groups = 4 decides which experts are picked"),
        ({"rank": "score"}, "rank = 'score' decides which experts are picked"),
        ({"selection": "hash"}, "unknown selection 'hash'; known: 'topk', 'given'"),
        ({"top_k": 9}, "top_k must be an integer between 1 and num_experts = 8"),
    ],
)
def test_what_decides_picks_does_not_go_with_given_ones(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        mo.Router(**{"num_experts": 8, "top_k": 2, "selection": "given", **arguments})


def test_numbers_from_outside_have_to_come_in_through_given() -> None:
    """A kernel would read and write at any place that a caller names."""
    module = mo.parse("""
        moe.func @route(%x: tensor<Tx8xf32>, %ids: tensor<Tx2xi32>) -> (y: tensor<Tx2xf32>) {
          %y = row.gather %x, %ids
          return %y
        }
    """)
    with pytest.raises(DiagnosticError, match=r"row.gather: takes its picks from %ids, which may hold any numbers"):
        mo.compile(module).source  # noqa: B018 - looking at it generates it

"""Scores, losses and balancing on tensors that a user already has."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from routing import (
    BACKENDS,
    EXACT,
    GRADIENT,
    INF,
    NAN,
    ROUNDING,
    SCORES,
    assert_close,
    assert_zero,
    cotangent,
    device_of,
)

import moesaic as mo
from moesaic.ir import declare
from moesaic.ir.errors import InputError, InputTypeError
from moesaic.ir.types import DType
from moesaic.runtime import functional

F64 = torch.float64


def normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def compare(
    what: str,
    function: Callable[[torch.Tensor], torch.Tensor],
    oracle: Callable[[torch.Tensor], torch.Tensor],
    rows: torch.Tensor,
    device: str,
) -> torch.Tensor:
    """Result and gradient of a function beside those of its formula in float64; gives the gradient."""
    leaf = rows.to(device).requires_grad_()
    exact = rows.detach().to(F64).requires_grad_()
    found, wanted = function(leaf), oracle(exact)
    assert found.dtype == torch.float32
    assert_close(what, found, wanted, EXACT)
    g = cotangent(found, seed=3)
    found.backward(g)
    wanted.backward(g.cpu().to(F64))
    assert leaf.grad is not None and exact.grad is not None and leaf.grad.dtype == rows.dtype
    assert_close("gradient", leaf.grad, exact.grad, GRADIENT + ROUNDING[rows.dtype])
    return leaf.grad.cpu()


MASK = torch.arange(30) % 4 > 0


# Scores ---------------------------------------------------------------------------------------------------------------


def test_each_name_has_an_oracle() -> None:
    missing = set(declare.SCORES) - set(SCORES)
    assert not missing, f"say in SCORES of tests/routing.py what torch computes for {', '.join(sorted(missing))}"
    for owner in (mo.Router, mo.scores):
        assert all(f'``"{name}"``' in (owner.__doc__ or "") for name in declare.SCORES), "docstrings name them"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_scores(score: str, normalize: bool, backend: str) -> None:
    if backend == "emulate" and (score, normalize) != ("sigmoid", True):
        pytest.skip("one of them is emulated")

    def oracle(x: torch.Tensor) -> torch.Tensor:
        s = SCORES[score](x)
        return s / s.sum(-1, keepdim=True) if normalize else s

    def ours(x: torch.Tensor) -> torch.Tensor:
        return mo.scores(x, score, normalize=normalize, backend=backend)

    compare("scores", ours, oracle, normal(2, 15, 33, dtype=torch.bfloat16), device_of(backend))


def test_scores_that_sum_to_zero_are_zero() -> None:
    leaf = torch.full((2, 4), -INF).requires_grad_()
    s = mo.scores(leaf, "sigmoid", normalize=True)
    s.backward(cotangent(s, seed=1))
    assert leaf.grad is not None
    assert_zero("scores", s)
    assert_zero("gradient", leaf.grad)


def test_scores_of_ones_own() -> None:
    def squared(x: mo.ir.core.Value) -> mo.ir.core.Value:
        return mo.math.exp(x) * mo.math.exp(x)

    logits = normal(30, 7)
    assert_close("scores", mo.scores(logits, squared, normalize=True), torch.softmax(2 * logits.to(F64), -1), EXACT)
    with pytest.raises(InputError, match=r"unknown score 'sigmoide'.*did you mean 'sigmoid'"):
        mo.scores(logits, "sigmoide", normalize=True)


# Losses ---------------------------------------------------------------------------------------------------------------


def test_layers_in_any_collection() -> None:
    biases = {"a": torch.zeros(4), "b": torch.zeros(6)}
    counts = {n: torch.arange(len(b)) for n, b in biases.items()}
    mo.update_bias(biases.values(), (counts[n] for n in biases), 0.5)
    for name, bias in biases.items():
        wanted = torch.zeros_like(bias)
        mo.update_bias(wanted, counts[name], 0.5)
        assert torch.equal(bias, wanted) and bias.any()


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int16, torch.float32])
def test_counts_of_any_type(dtype: torch.dtype) -> None:
    """Many batches' counts exceed 2^31."""
    scores = torch.softmax(normal(4, 8), -1).detach()
    largest = 2**33 if dtype in (torch.int64, torch.float32) else 100
    counts = torch.full((8,), largest, dtype=dtype)
    counts[0] = largest // 4
    found = mo.load_balance_loss(scores, counts, top_k=2, num_tokens=2**33)
    wanted = 8 / (2 * 2.0**66) * (scores.double().sum(0) * counts.double()).sum()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5) and wanted > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s, n: mo.pooled_load_balance(s, n, 4, top_k=0), "top_k must be an integer >= 1, found 0"),
        (lambda s, n: mo.pooled_load_balance(s, n, 4, top_k="2"), "top_k must be an integer >= 1, found '2'"),
        (lambda s, n: mo.pooled_load_balance(s, n, 4, top_k=2, coef=NAN), "coef must be a finite number, found nan"),
        (lambda s, n: mo.pooled_load_balance(s, n, -4, top_k=2), "num_tokens must be a number >= 0, found -4"),
        (lambda s, n: mo.pooled_load_balance(None, n, 4, top_k=2), "score_sums must be a tensor, or one for each"),
        (lambda s, n: mo.pooled_load_balance([[1.0]], n, 4, top_k=2), "score_sums must be a tensor, or one for each"),
        (lambda s, n: mo.update_bias([[0.0]], [n], 0.3), "update_bias: bias must be a tensor, or one for each"),
        (lambda s, n: mo.update_bias(s, 3, 0.3), "update_bias: counts must be a tensor, or one for each"),
        (lambda s, n: mo.load_metrics([3, 1]), "counts must be a tensor, found list"),
        (lambda s, n: mo.load_metrics(n.sum()), r"counts must have shape \[E\] or \[L, E\], found \[\]"),
        (lambda s, n: mo.load_metrics(n, num_tokens=s, top_k=2), r"one for each layer of counts \[4\], found \[4\]"),
        (lambda s, n: mo.load_balance_loss(s, n, top_k=2, num_tokens=n.sum() > 0), "an integer or a float, found bool"),
        (lambda s, n: mo.load_balance_loss(s, n, top_k=2, num_tokens=-1.0), "num_tokens must be a number >= 0"),
        (lambda s, n: mo.scores(s, ["softmax"]), "score must be a number, a name or a function, found list"),
    ],
)
def test_what_has_no_meaning(call: Callable[..., Any], message: str) -> None:
    with pytest.raises((InputError, InputTypeError), match=message):
        call(torch.full((4,), 0.25), torch.ones(4, dtype=torch.int64))


def balance(
    scores: torch.Tensor,
    counts: torch.Tensor,
    top_k: int,
    coef: float,
    mask: torch.Tensor | None,
    n: float | None = None,
) -> torch.Tensor:
    """Of one sequence, [S, E] and [E]."""
    kept = scores if mask is None else scores[mask]
    n = kept.shape[0] if n is None else n
    return coef * scores.shape[-1] / (top_k * n * n) * (counts.to(F64) * kept.sum(0)).sum()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("masked", [False, True])
def test_load_balance(masked: bool, backend: str) -> None:
    device = device_of(backend)
    if backend == "emulate" and not masked:
        pytest.skip("the masked one is emulated")
    counts = torch.arange(12) * 5
    rows = torch.softmax(normal(30, 12), -1).bfloat16()
    mask = MASK if masked else None
    if masked:
        rows[~MASK] = NAN
    given = {} if mask is None else {"token_mask": mask.to(device)}

    def ours(s: torch.Tensor) -> torch.Tensor:
        return mo.load_balance_loss(s, counts.to(device), top_k=3, coef=0.3, backend=backend, **given)

    gradient = compare("loss", ours, lambda s: balance(s, counts, 3, 0.3, mask), rows, device)
    if masked:
        assert_zero("gradient of masked rows", gradient[~MASK])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", ["batch_first", "sequence_first"])
def test_load_balance_by_sequence(order: str, backend: str) -> None:
    device, by_sequence = device_of(backend), 0 if order == "batch_first" else 1
    masked = order == "sequence_first"
    rows = torch.softmax(normal(*((3, 10) if by_sequence == 0 else (10, 3)), 7), -1)
    mask = MASK.view(rows.shape[:2]) if masked else None
    counts = torch.arange(21).view(3, 7)
    given = {} if mask is None else {"token_mask": mask.to(device)}

    def oracle(s: torch.Tensor) -> torch.Tensor:
        each = [
            balance(part, c, 2, 1.0, None if mask is None else mask.unbind(by_sequence)[i])
            for i, (part, c) in enumerate(zip(s.unbind(by_sequence), counts, strict=True))
        ]
        return torch.stack(each).mean()

    def ours(s: torch.Tensor) -> torch.Tensor:
        return mo.load_balance_loss(s, counts.to(device), top_k=2, segments=order, backend=backend, **given)

    compare("loss", ours, oracle, rows, device)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64, torch.float32, torch.bfloat16, F64])
def test_load_balance_takes_counts_and_numbers_of_any_type(dtype: torch.dtype) -> None:
    rows, counts = torch.softmax(normal(30, 12), -1), torch.arange(12)
    wanted = balance(rows.to(F64), counts, 2, 1.0, None, n=90.0)
    numbers: list[Any] = [90, torch.tensor(90), torch.tensor([90.0]), torch.tensor(90, dtype=dtype)]
    for n in numbers:
        assert_close("loss", mo.load_balance_loss(rows, counts.to(dtype), top_k=2, num_tokens=n), wanted, EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["z", "entropy"])
def test_means_over_tokens(kind: str, backend: str) -> None:
    device = device_of(backend)
    rows = normal(30, 33, dtype=torch.bfloat16)
    if kind == "entropy":
        rows = torch.softmax(rows.float(), -1)
        rows[:, 5] = 0.0  # 0 ln 0 = 0
    rows = torch.where(MASK.unsqueeze(-1), rows, NAN).view(2, 15, 33)

    def oracle(x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(0, 1)[MASK]
        if kind == "z":
            return 0.3 * torch.logsumexp(x, -1).square().mean()
        return -0.3 * torch.where(x > 0, x * torch.where(x > 0, x, 1.0).log(), 0.0).sum(-1).mean()

    function = mo.z_loss if kind == "z" else mo.entropy_loss
    mask = MASK.view(2, 15).to(device)
    leaf, exact = rows.to(device).clone().requires_grad_(), rows.to(F64).requires_grad_()
    found, wanted = function(leaf, coef=0.3, token_mask=mask, backend=backend), oracle(exact)
    assert_close("loss", found, wanted, EXACT)
    torch.autograd.backward([found, wanted], [torch.tensor(1.5, device=device), torch.tensor(1.5, dtype=F64)])
    assert leaf.grad is not None and exact.grad is not None
    # A score of 0 has an infinite slope in the formula, but none counts here.
    some = (rows > 0) | torch.tensor(kind == "z")
    tolerance = GRADIENT + ROUNDING[rows.dtype]
    assert_close("gradient", torch.where(some, leaf.grad.cpu(), 0.0), torch.where(some, exact.grad, 0.0), tolerance)
    assert_zero("gradient of masked rows", leaf.grad[~mask])


def test_losses_in_numbers() -> None:
    """Cases 11, 14 and 15."""
    three = math.log(3)
    logits = torch.tensor([[three, 0.0], [0.0, three], [10.0, 0.0], [10.0, 0.0]])
    real = torch.tensor([True, True, False, False])
    scores, counts = mo.scores(logits), torch.tensor([1, 1])
    assert mo.load_balance_loss(scores, counts, top_k=1, token_mask=real).item() == pytest.approx(1.0)
    assert mo.z_loss(logits, token_mask=real).item() == pytest.approx(1.92181, abs=1e-5)

    tiny = mo.scores(torch.full((4, 4), -60.0), "sigmoid", normalize=True)
    assert mo.load_balance_loss(tiny, torch.tensor([4, 0, 0, 0]), top_k=1).item() == pytest.approx(1.0)

    for dtype in (torch.float32, torch.bfloat16):
        large = torch.tensor([[200.0, 0.0]], dtype=dtype, requires_grad=True)
        loss = mo.z_loss(large)
        loss.backward()
        assert loss.item() == 40000.0
        assert large.grad is not None and large.grad.tolist() == [[400.0, 0.0]]


@pytest.mark.parametrize("masked", [False, True])
def test_no_token_no_loss(masked: bool) -> None:
    """Case 18."""
    rows = torch.softmax(normal(4 if masked else 0, 6), -1)
    given = {"token_mask": torch.zeros(4, dtype=torch.bool)} if masked else {}
    calls = [
        lambda x: mo.load_balance_loss(x, torch.zeros(6, dtype=torch.int64), top_k=2, **given),
        lambda x: mo.z_loss(x, **given),
        lambda x: mo.entropy_loss(x, **given),
    ]
    for call in calls:
        leaf = rows.clone().requires_grad_()
        loss = call(leaf)
        loss.backward()
        assert loss.item() == 0.0
        assert leaf.grad is not None and leaf.grad.shape == rows.shape
        assert_zero("gradient", leaf.grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_sequence_no_loss(backend: str) -> None:
    device = device_of(backend)
    for order, shape in (("batch_first", (0, 4, 7)), ("sequence_first", (4, 0, 7)), ("batch_first", (2, 0, 7))):
        leaf = torch.empty(shape, device=device, requires_grad=True)
        counts = torch.zeros(shape[order == "sequence_first"], 7, dtype=torch.int32, device=device)
        loss = mo.load_balance_loss(leaf, counts, top_k=2, segments=order, backend=backend)
        loss.backward()
        assert loss.item() == 0.0
        assert leaf.grad is not None and leaf.grad.shape == shape


def test_float64_runs_on_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESAIC_BACKEND", "emulate")
    x = normal(30, 6, dtype=F64)
    s = mo.scores(x, "sigmoid", normalize=True)
    loss = mo.load_balance_loss(s, torch.arange(6.0, dtype=F64), top_k=2, token_mask=MASK)
    assert s.dtype == loss.dtype == mo.z_loss(x).dtype == mo.entropy_loss(s).dtype == F64
    torch.testing.assert_close(loss, balance(s, torch.arange(6), 2, 1.0, MASK), rtol=1e-13, atol=0.0)


def test_losses_in_one_graph() -> None:
    def loss(x: torch.Tensor, counts: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        s = mo.scores(x, "sigmoid", normalize=True)
        total = mo.load_balance_loss(s, counts, top_k=2, segments="batch_first", token_mask=mask)
        return total + mo.z_loss(x, token_mask=mask) + mo.entropy_loss(s, coef=-0.1)

    counts, mask = torch.arange(18).view(3, 6), MASK.view(3, 10)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    results = []
    for call in (loss, compiled):
        leaf = normal(3, 10, 6).requires_grad_()
        value = call(leaf, counts, mask)
        value.backward()
        results.append((value.detach(), leaf.grad))
    for eager, made in zip(*results, strict=True):
        assert_close("compiled", made, eager, EXACT)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"counts": torch.ones(5)}, InputError, r"counts must have shape \[6\], found \[5\]"),
        ({"counts": [1] * 6}, InputTypeError, "counts must be a tensor, found list"),
        ({"counts": torch.ones(6).bool()}, InputError, "counts must be integers or floats, found bool"),
        ({"scores": torch.ones(4, 6).int()}, InputError, "scores must be .* found int32"),
        ({"top_k": 0}, InputError, "load_balance_loss: top_k must be an integer >= 1, found 0"),
        ({"coef": NAN}, InputError, "load_balance_loss: coef must be a finite number, found nan"),
        ({"num_tokens": torch.ones(3)}, InputError, r"num_tokens must be .* found shape \[3\]"),
        ({"num_tokens": True}, InputTypeError, "num_tokens must be .* found bool"),
        ({"segments": "batch"}, InputError, "segments must be None, 'batch_first' or 'sequence_first', found 'batch'"),
        ({"segments": "batch_first", "num_tokens": 4}, InputError, "leave out num_tokens"),
        ({"segments": "batch_first"}, InputError, r"must have the shape \[N, S, E\], found \[4, 6\]"),
        (
            {"segments": "batch_first", "scores": torch.ones(2, 2, 6), "counts": torch.ones(3, 6)},
            InputError,
            r"counts must have shape \[2, 6\], found \[3, 6\]",
        ),
        ({"token_mask": torch.ones(3).bool()}, InputError, r"token_mask must have shape \[4\], found \[3\]"),
    ],
)
def test_load_balance_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"scores": torch.ones(4, 6), "counts": torch.ones(6), "top_k": 2, **changes}
    with pytest.raises(error, match=message):
        mo.load_balance_loss(given.pop("scores"), given.pop("counts"), **given)


@pytest.mark.emulate
def test_a_loss_by_sequence_can_be_warmed_up() -> None:
    """With inputs of tokens and of sequences beside the scores."""
    b = mo.Builder("loss")
    scores, counts = b.input("scores", "tensor<Tx7xf32>"), b.input("counts", "tensor<Nx7xi32>")
    mask = b.op("row.unsqueeze", b.input("token_mask", "tensor<Txi1>"))
    sums = b.op("col.sum", mo.math.select(mask, scores, 0.0), counts, segments="sequence_first")
    layer = mo.compile(b.build(loss=b.op("col.total", sums * counts)), backend="emulate")
    layer.warmup("cpu", backward=False)


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", ["z_loss", "entropy_loss"])
def test_losses_of_models_do_not_spill(name: str) -> None:
    mean = functional._mean_layer(name, "rows", DType.BF16, 256, 1.0, True, "auto")
    balance = functional._load_balance_layer(DType.F32, 256, True, 8, 1.0, False, True, "batch_first", "auto")
    for layer in (mean, balance):
        resources = mo.compile(layer._declared, target="sm_90a").resources
        assert len(resources) >= 3
        assert not [n for n, r in resources.items() if r.uses_local_memory]


# Pooled over layers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_pooled_is_what_transformers_does(masked: bool, layers: int) -> None:
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    experts, top_k = 6, 2
    mask = torch.ones(2, 15, dtype=torch.int64)
    if masked:
        mask[0, 9:] = 0
        mask[1, :4] = 0
    rows = [normal(30, experts, seed=i).requires_grad_() for i in range(layers)]
    wanted = modeling.load_balancing_loss_func(tuple(rows), experts, top_k, mask if masked else None)
    wanted_gradients = torch.autograd.grad(wanted, rows)

    route = mo.compile(mo.Router(experts, top_k, outputs=("score_sums", "counts")))
    made = [route(x, token_mask=mask.flatten().bool()) for x in rows]
    sums, counts = [r.score_sums for r in made], [r.counts for r in made]
    n = int(mask.sum())
    forms: list[tuple[Any, Any, Any]] = [
        (sums, counts, n),
        (sums, counts, [n] * layers),
        (torch.stack(sums), torch.stack(counts), mask.sum()),
        (torch.stack(sums), torch.stack(counts), mask.sum().expand(layers)),
        (sums, counts, [mask.sum().float()] * layers),
    ]
    for form in forms:
        loss = mo.pooled_load_balance(*form, top_k=top_k, convention="transformers")
        assert_close("loss", loss, wanted, EXACT)
        gradients = torch.autograd.grad(loss, rows, retain_graph=True)
        for found, expected in zip(gradients, wanted_gradients, strict=True):
            assert_close("gradient", found, expected, GRADIENT)
        ours = mo.pooled_load_balance(*form, top_k=top_k, coef=0.5)
        assert_close("the convention of moesaic", ours * 2 * top_k, wanted, EXACT)


def test_pooled_is_not_a_mean_over_layers() -> None:
    """Every layer sends all tokens to one expert, but not to the same."""
    sums = torch.tensor([[4.0, 0.0], [0.0, 4.0]])
    assert mo.pooled_load_balance(sums, sums.int(), 4, top_k=1).item() == 1.0
    assert mo.pooled_load_balance(sums[0], sums[0].int(), 4, top_k=1).item() == 2.0


def test_pooled_without_a_token_is_zero() -> None:
    sums = torch.zeros(3, 6, requires_grad=True)
    none: list[Any] = [0, torch.tensor(0), [0, 0, 0]]
    for n in none:
        loss = mo.pooled_load_balance(sums, torch.zeros(3, 6), n, top_k=2)
        [gradient] = torch.autograd.grad(loss, sums)
        assert loss.item() == 0.0
        assert_zero("gradient", gradient)


def test_pooled_refuses() -> None:
    six = torch.ones(6)
    with pytest.raises(InputError, match="convention must be 'moesaic' or 'transformers', found 'mean'"):
        mo.pooled_load_balance(six, six, 4, top_k=1, convention="mean")
    with pytest.raises(InputError, match=r"score_sums must be .* all of one E, found shapes \[\[6\], \[5\]\]"):
        mo.pooled_load_balance([six, torch.ones(5)], [six, six], 4, top_k=1)
    with pytest.raises(InputError, match=r"the same shape, found \[2, 6\] and \[1, 6\]"):
        mo.pooled_load_balance([six, six], [six], 4, top_k=1)
    with pytest.raises(InputError, match="one for each of 2 layers, found 3"):
        mo.pooled_load_balance([six, six], [six, six], [4, 4, 4], top_k=1)


# Balancing by the bias ------------------------------------------------------------------------------------------------


def test_bias_of_the_second_layer() -> None:
    """Case 17: the first layer has no balancing; the second moves once, in place, and keeps its mean."""
    first, second = torch.zeros(2), torch.zeros(2)
    place, counts = second.data_ptr(), torch.tensor([3, 1])
    mo.update_bias(second, counts, 0.3)
    assert torch.equal(second, torch.tensor([-0.3, 0.3]))
    assert (second.dtype, second.data_ptr(), second.mean().item()) == (torch.float32, place, 0.0)
    assert_zero("the bias of the first layer", first)
    assert counts.tolist() == [3, 1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, F64])
def test_bias_is_its_formula_in_every_form(dtype: torch.dtype) -> None:
    loads = [torch.randint(0, 9, (e,), generator=torch.Generator().manual_seed(e)).to(dtype) for e in (8, 6, 8, 7)]
    starts = [normal(e.numel(), seed=i) for i, e in enumerate(loads)]
    wanted = []
    for b, c in zip(starts, loads, strict=True):
        step = 1e-3 * torch.sign(c.to(F64).mean() - c.to(F64))
        wanted.append((b.to(F64) + step - step.mean()).float())
    biases = [torch.nn.Parameter(b.clone()) for b in starts]
    mo.update_bias(biases, loads, 1e-3)
    for found, expected, start in zip(biases, wanted, starts, strict=True):
        torch.testing.assert_close(found.detach(), expected, rtol=0.0, atol=1e-7)
        torch.testing.assert_close(found.mean(), start.mean(), rtol=0.0, atol=1e-7)
        assert found.is_leaf and found.grad_fn is None
    stacked = torch.stack([starts[0], starts[2]])
    mo.update_bias(stacked, torch.stack([loads[0], loads[2]]), 1e-3)
    assert torch.equal(stacked, torch.stack([biases[0], biases[2]]))
    alone = starts[1].clone()
    mo.update_bias(alone, loads[1], 1e-3)
    assert torch.equal(alone, biases[1])


def test_even_loads_move_no_bias() -> None:
    bias = torch.full((3,), 0.5)
    for counts in (torch.zeros(3), torch.full((3,), 2**25 + 1), torch.full((3,), 1 / 3)):
        mo.update_bias(bias, counts, 0.1)
    assert bias.tolist() == [0.5] * 3


def test_bias_launches_do_not_grow_with_layers() -> None:
    """Case 64."""

    def operators(layers: int) -> int:
        biases = [torch.zeros(6 + 2 * (i % 2)) for i in range(layers)]
        counts = [torch.arange(6 + 2 * (i % 2)) for i in range(layers)]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            mo.update_bias(biases, counts, 1e-3)
        # Views launch nothing; on a GPU one call adds to all tensors of a list.
        names = [e.name for e in seen.events() if e.name.startswith("aten::")]
        return sum(n in ("aten::cat", "aten::mean", "aten::sub", "aten::sign", "aten::mul") for n in names)

    assert 0 < operators(60) == operators(4)


def test_bias_is_checked() -> None:
    with pytest.raises(InputError, match=r"bias must be fp32, found bfloat16, which would lose steps"):
        mo.update_bias(torch.zeros(4, dtype=torch.bfloat16), torch.ones(4), 1e-3)
    with pytest.raises(InputError, match=r"bias of layer 1 has shape \[6\] on cpu, but its counts have shape \[4\]"):
        mo.update_bias([torch.zeros(4), torch.zeros(6)], [torch.ones(4), torch.ones(4)], 1e-3)
    with pytest.raises(InputError, match="2 biases and counts of 1 layers"):
        mo.update_bias([torch.zeros(4)] * 2, [torch.ones(4)], 1e-3)
    with pytest.raises(InputError, match="rate must be a finite number, found inf"):
        mo.update_bias(torch.zeros(4), torch.ones(4), INF)


# How even a load is ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_load_metrics(dtype: torch.dtype) -> None:
    counts = torch.tensor([[4, 4, 4, 4], [16, 0, 0, 0], [0, 0, 0, 0]], dtype=dtype)
    m = mo.load_metrics(counts, num_tokens=9, top_k=2)
    assert m.max.tolist() == [4, 16, 0]
    assert m.mean.tolist() == [4, 4, 0]
    assert m.max_over_mean.tolist() == [1, 4, 0]
    assert m.entropy.tolist() == pytest.approx([math.log(4), 0, 0])
    assert m.dropped is not None and m.dropped.tolist() == [2, 2, 18]
    one = mo.load_metrics(counts[1])
    assert (one.max.item(), one.max_over_mean.item(), one.dropped) == (16, 4, None)
    per_layer = mo.load_metrics(counts, num_tokens=torch.tensor([8, 8, 0]), top_k=2)
    assert per_layer.dropped is not None and per_layer.dropped.tolist() == [0, 0, 0]
    assert m._fields == ("max", "mean", "max_over_mean", "entropy", "dropped")
    with pytest.raises(InputError, match="num_tokens and top_k go together"):
        mo.load_metrics(counts, num_tokens=9)

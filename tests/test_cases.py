"""Small inputs with the right answer worked out by hand; each is a fault that users met in some MoE router."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from expert_calls import EXPERT_BACKENDS, run_experts
from routing import BACKENDS, DIGITS, EXACT, GRADIENT, INF, assert_close, assert_same, assert_zero, device_of, run

import moesaic as mo
from moesaic.ir.builder import Builder
from moesaic.ir.experts import ClampedSwiGLU, Experts
from moesaic.runtime.reference import evaluate

LN2, LN3 = math.log(2), math.log(3)


def route(backend: str, router: mo.Router, logits: list[list[float]], dtype=torch.float32, **inputs):
    """(layer, result) on logits that get a gradient; `.grad` of the logits is that of `leaf(result)`."""
    device = device_of(backend)
    leaf = torch.tensor(logits, dtype=dtype, device=device).requires_grad_()
    layer = mo.compile(router, backend=backend)
    return leaf, layer(leaf, **{n: torch.tensor(v, device=device) for n, v in inputs.items()})


# Selection ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_excluded_groups_lose_to_negative_scores(backend: str) -> None:
    """A mask of 0 instead of -inf would win against biased scores below zero."""
    router = mo.Router(4, 2, score="sigmoid", selection_bias=True, groups=2, groups_kept=1)
    _, r = route(backend, router, [[0.0] * 4], bias=[-1.0, -0.9, -2.0, -2.0])
    assert r.indices.tolist() == [[1, 0]]
    assert r.weights.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_that_underflow_are_not_divided(backend: str, dtype: torch.dtype) -> None:
    """Sigmoid of -200 is 0 in float32; 0 / 0 would be NaN, in the weights or in the gradient."""
    layer = mo.compile(mo.Router(4, 2, score="sigmoid", renormalize=True), backend=backend)
    rows = torch.tensor([[-200.0] * 4, [2, 1, 0, -1]], dtype=dtype, device=device_of(backend))
    both, alone = run(layer, rows), run(layer, rows[1:])
    assert both["weights"][0].tolist() == [0, 0]
    assert both["indices"][0].tolist() == [0, 1]
    assert_zero("gradient of the row that underflows", both.gradients["logits"][0])
    # The row beside it: as if the other were not there.
    assert torch.equal(both["weights"][1], alone["weights"][0])
    assert torch.equal(both["indices"][1], alone["indices"][0])
    s = [1 / (1 + math.exp(-x)) for x in (2, 1)]
    assert_close("weights", both["weights"][1], torch.tensor([s[0] / sum(s), s[1] / sum(s)]), EXACT)
    assert bool(both.gradients["logits"].isfinite().all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_selection_bias_stays_out_of_the_weights(backend: str) -> None:
    router = mo.Router(4, 2, score="sigmoid", selection_bias=True)
    _, r = route(backend, router, [[2.0, 1, 0, -1]], bias=[0.0, 0, 0, 10])
    assert r.indices.tolist() == [[3, 0]]
    assert_close("weights", r.weights, torch.tensor([[0.26894, 0.88080]]), DIGITS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, [0.42857, 0.28571]),
        ({"order": "topk_then_score"}, [0.6, 0.4]),
        ({"renormalize": True}, [0.6, 0.4]),
    ],
    ids=["softmax, top-k", "top-k, softmax", "softmax, top-k, divide"],
)
def test_softmax_before_and_after_topk_differ(backend: str, arguments: dict, expected: list[float]) -> None:
    _, r = route(backend, mo.Router(4, 2, **arguments), [[LN3, LN2, 0.0, 0.0]])
    assert r.indices.tolist() == [[0, 1]]
    assert_close("weights", r.weights, torch.tensor([expected]), DIGITS)


ODD_SIZES = [(e, k) for e in (1, 3, 5, 6, 12, 60, 96, 160, 384) for k in (1, 2, 3, 5, 6, 7, 10) if k <= e]


def odd_size(experts: int, picks: int, backend: str) -> None:
    """Picks and weights against a plain softmax and a stable sort in float64."""
    logits = torch.randn(7, experts, generator=torch.Generator().manual_seed(experts * 100 + picks))
    with torch.no_grad():
        r = mo.compile(mo.Router(experts, picks), backend=backend)(logits.to(device_of(backend)))
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :picks]
    assert torch.equal(r.indices.cpu().long(), order)
    expected = logits.double().softmax(-1).gather(-1, order)
    assert_close("weights", r.weights, expected, EXACT)
    assert torch.equal(r.counts.cpu(), order.flatten().bincount(minlength=experts).int())


@pytest.mark.parametrize(("experts", "picks"), ODD_SIZES)
def test_sizes_need_not_be_powers_of_two_on_reference(experts: int, picks: int) -> None:
    odd_size(experts, picks, "reference")


@pytest.mark.gpu
@pytest.mark.parametrize(("experts", "picks"), ODD_SIZES)
def test_sizes_need_not_be_powers_of_two_on_cuda(experts: int, picks: int) -> None:
    odd_size(experts, picks, "cuda")


# Each E with its own number of picks, all seven numbers twice or once: every pair would take a minute to build.
EMULATED_SIZES = [
    (1, 1), (3, 2), (3, 3), (5, 3), (5, 5), (6, 5), (6, 6), (12, 7), (12, 10), (60, 6), (60, 1), (96, 10), (96, 5),
    (160, 2), (160, 7), (384, 3), (384, 10),
]  # fmt: skip


@pytest.mark.emulate
@pytest.mark.parametrize(("experts", "picks"), EMULATED_SIZES)
def test_sizes_need_not_be_powers_of_two_on_emulate(experts: int, picks: int) -> None:
    assert (experts, picks) in ODD_SIZES
    odd_size(experts, picks, "emulate")


def test_groups_of_one_expert_have_no_two_best() -> None:
    with pytest.raises(ValueError, match=r"sums the best 2 of a group, but a group holds 1 experts"):
        mo.Router(8, 4, groups=8, groups_kept=4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_of_one_expert_scored_by_their_best(backend: str) -> None:
    """Four groups of one are the four best experts; one group of four is no restriction."""
    logits = torch.randn(7, 8, generator=torch.Generator().manual_seed(6)).tolist()
    _, limited = route(backend, mo.Router(8, 4, groups=8, groups_kept=4, group_score="max"), logits)
    _, free = route(backend, mo.Router(8, 4), logits)
    assert torch.equal(limited.indices, free.indices)
    assert torch.equal(limited.weights, free.weights)
    four = [row[:4] for row in logits]
    _, one = route(backend, mo.Router(4, 2, groups=1, groups_kept=1), four)
    _, free = route(backend, mo.Router(4, 2), four)
    assert torch.equal(one.indices, free.indices)
    assert torch.equal(one.weights, free.weights)


@pytest.mark.parametrize("rank", ["auto", "score"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_selection_is_not_done_in_half_precision(backend: str, rank: str) -> None:
    """In bf16 the four probabilities would all round to 0.25, and the first expert would win."""
    _, r = route(backend, mo.Router(4, 1, rank=rank), [[0, 0.001, 0, 0]])
    assert r.indices.tolist() == [[1]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("score", "group"), [("sum_top2", 0), (mo.sum_top(4), 1), ("max", 0)])
def test_how_many_experts_make_a_group_score(backend: str, score: object, group: int) -> None:
    """The two best sum to 1.0 against 0.9, all four to 1.2 against 1.5."""
    scores = torch.tensor([[0.9, 0.1, 0.1, 0.1, 0.6, 0.3, 0.3, 0.3]], dtype=torch.float64)
    router = mo.Router(8, 2, score="sigmoid", groups=2, groups_kept=1, group_score=score)
    _, r = route(backend, router, scores.logit().tolist())
    assert {e // 4 for e in r.indices[0].tolist()} == {group}


@pytest.mark.parametrize("k", [0, -1, 9, 16])
def test_impossible_top_k_is_refused_when_declared(k: int) -> None:
    with pytest.raises(ValueError, match=rf"num_experts = 8, found top_k = {k}"):
        mo.Router(8, k)


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_hold_when_the_score_comes_after(backend: str) -> None:
    """The best logit lies in the weaker group (5 against 8)."""
    router = mo.Router(4, 2, order="topk_then_score", groups=2, groups_kept=1)
    _, r = route(backend, router, [[5.0, 0, 4, 4]])
    assert r.indices.tolist() == [[2, 3]]
    assert r.weights.tolist() == [[0.5, 0.5]]


# Gradients ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_pick_keeps_its_gradient_unless_it_is_divided_by_itself(backend: str) -> None:
    leaf, r = route(backend, mo.Router(2, 1), [[LN3, 0.0]])
    r.weights.sum().backward()
    assert_close("gradient", leaf.grad, torch.tensor([[0.1875, -0.1875]]), GRADIENT)

    for arguments in ({"order": "topk_then_score"}, {"renormalize": True}):
        router = mo.Router(2, 1, **arguments)
        leaf, r = route(backend, router, [[LN3, 0.0]])
        assert r.weights.tolist() == [[1.0]]
        r.weights.sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [[0.0, 0.0]]
        [warning] = mo.compile(router, backend=backend).warnings
        assert "over one pick is the constant 1" in warning


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_of_a_softmax_reaches_experts_not_picked(backend: str) -> None:
    leaf, r = route(backend, mo.Router(4, 1), [[LN3, LN2, 0.0, 0.0]])
    r.weights.sum().backward()
    # p0 (1 - p0), -p0 p1, -p0 p2, -p0 p3 with p = (3, 2, 1, 1) / 7
    assert_close("gradient", leaf.grad, torch.tensor([[0.24490, -0.12245, -0.06122, -0.06122]]), DIGITS)
    assert_close("gradient", leaf.grad, torch.tensor([[12.0, -6, -3, -3]]) / 49, GRADIENT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_two_outputs_add_up(backend: str) -> None:
    """One backward pass over weights and probs gives the sum of two separate ones."""
    router = mo.Router(4, 2, outputs=("weights", "probs"))
    weights_part = torch.tensor([[1.0, -2.0]], device=device_of(backend))
    probs_part = torch.tensor([[0.5, 3.0, -1.0, 2.0]], device=device_of(backend))
    parts = []
    for use_weights, use_probs in ((True, True), (True, False), (False, True)):
        leaf, r = route(backend, router, [[LN3, LN2, 0.0, 0.0]])
        pairs = [(r.weights, weights_part)] * use_weights + [(r.probs, probs_part)] * use_probs
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        parts.append(leaf.grad)
    assert_close("gradient", parts[0], parts[1] + parts[2], GRADIENT)


# Experts --------------------------------------------------------------------------------------------------------------

EVERY_EXPERT_BACKEND = pytest.mark.parametrize("backend", EXPERT_BACKENDS)


def feed(
    backend: str, experts: Experts, x: list[list[float]], ids: list[list[int]], weights: list[list[float]], **learned
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(hidden, inputs): every float input takes a gradient, and has that of `hidden.sum()`."""
    inputs = {n: torch.tensor(v, dtype=torch.float32).requires_grad_() for n, v in learned.items()}
    inputs |= {"x": torch.tensor(x).requires_grad_(), "weights": torch.tensor(weights).requires_grad_()}
    indices = torch.tensor(ids, dtype=torch.int32)
    hidden = run_experts(experts, {**inputs, "indices": indices}, backend)["hidden"]
    hidden.sum().backward()
    return hidden.detach(), inputs


def dispatched(ids: list[list[int]], experts: int) -> dict[str, list]:
    b = Builder("dispatch")
    names = ("counts", "offsets", "tokens", "picks", "slots", "dropped")
    made = b.op("slot.dispatch", b.input("ids", f"tensor<Tx{len(ids[0])}xi32>"), experts=experts)
    results = evaluate(b.build(**dict(zip(names, made))).entry, {"ids": torch.tensor(ids, dtype=torch.int32)})
    return {name: r.tolist() for name, r in zip(names, results)}


def linear_experts(experts: int, hidden: int = 1) -> Experts:
    """Two products and nothing between."""
    return Experts(experts, hidden, hidden, gated=False, activation="identity")


ONES = {"up_proj": [[[1.0]], [[1.0]]], "down_proj": [[[1.0]], [[1.0]]]}


@EVERY_EXPERT_BACKEND
def test_minus_one_is_no_row(backend: str) -> None:
    """Sorted as a number it would come first, and shift the rows of all experts."""
    ids = [[0, -1], [1, 0], [-1, -1], [-1, 1]]
    d = dispatched(ids, 2)
    assert (d["counts"], d["offsets"]) == ([2, 2], [0, 2, 4])
    assert d["tokens"][:4] == [0, 1, 1, 3]
    assert d["slots"] == [[0, -1], [2, 1], [-1, -1], [-1, 3]]
    y, given = feed(backend, linear_experts(2), [[1.0], [2], [3], [4]], ids, [[1.0, 1]] * 4, **ONES)
    assert y.tolist() == [[1], [4], [0], [4]]
    assert given["weights"].grad.tolist() == [[1, 0], [2, 2], [0, 0], [0, 4]]
    assert given["x"].grad.tolist() == [[1], [2], [0], [1]]


@EVERY_EXPERT_BACKEND
def test_the_number_of_experts_is_no_expert(backend: str) -> None:
    """It marks picks of other devices, just as -1 does."""
    d = dispatched([[2, 0], [1, 2]], 2)
    assert (d["counts"], d["slots"]) == ([1, 1], [[-1, 0], [1, -1]])
    assert d == dispatched([[-1, 0], [1, -1]], 2)
    results = [
        feed(backend, linear_experts(2), [[1.0], [2]], ids, [[1.0, 1]] * 2, **ONES)
        for ids in ([[2, 0], [1, 2]], [[-1, 0], [1, -1]])
    ]
    for y, given in results:
        assert y.tolist() == [[1], [2]]
        assert given["weights"].grad.tolist() == [[0, 1], [2, 0]]


@EVERY_EXPERT_BACKEND
def test_an_expert_may_be_picked_twice_by_one_token(backend: str) -> None:
    learned = {"gate_up_proj": [[[9.0], [9]], [[1.0], [3]]], "down_proj": [[[9.0]], [[5.0]]]}
    y, given = feed(backend, Experts(2, 1, 1), [[1.0]], [[1, 1]], [[0.25, 0.5]], **learned)
    expert = 5 * 3 / (1 + math.exp(-1))  # silu(1) 3 5
    assert_close("hidden", y, torch.tensor([[0.75 * expert]]), EXACT)
    assert_close("gradient of the weights", given["weights"].grad, torch.tensor([[expert, expert]]), EXACT)
    assert_close("gradient", given["down_proj"].grad, torch.tensor([[[0.0]], [[0.75 * expert / 5]]]), EXACT)


@EVERY_EXPERT_BACKEND
def test_an_expert_that_is_not_picked_may_be_infinite(backend: str) -> None:
    """A pick from elsewhere that became expert 0 with weight 0 would give 0 times infinity."""
    learned = {"up_proj": [[[INF]], [[2.0]]], "down_proj": [[[INF]], [[3.0]]]}
    y, given = feed(backend, linear_experts(2), [[1.0]], [[-1, 1]], [[0.5, 0.5]], **learned)
    assert y.tolist() == [[3.0]]
    assert dispatched([[-1, 1]], 2)["counts"] == [0, 1]
    assert given["weights"].grad.tolist() == [[0, 6]]
    assert given["x"].grad.tolist() == [[3]]
    for name in learned:
        assert given[name].grad[0].tolist() == [[0]]


@EVERY_EXPERT_BACKEND
@pytest.mark.parametrize(
    ("gate", "up", "gating", "expected"),
    [
        (8.0, -9.0, None, -71.97585),
        (8.0, -9.0, ClampedSwiGLU(7.0, 1.702, 1.0), -41.99972),
        (-8.0, 9.0, ClampedSwiGLU(7.0, 1.702, 1.0), -7.8131e-5),  # a gate has no lower bound
    ],
)
def test_activations_are_declared(backend: str, gate: float, up: float, gating: object, expected: float) -> None:
    def run_with(first: list[float], **options) -> torch.Tensor:
        experts = Experts(1, 1, len(first) // 2, gating=gating, **options)
        learned = {"gate_up_proj": [[[v] for v in first]], "down_proj": [[[1.0] * (len(first) // 2)]]}
        return feed(backend, experts, [[1.0]], [[0]], [[1.0]], **learned)[0]

    assert_close("hidden", run_with([gate, up]), torch.tensor([[expected]]), DIGITS)
    assert abs(run_with([up, gate]).item() - expected) > 1e-4
    # Of two columns, halves are [g g u u], and in turn [g u g u]; each read as the other is another number.
    halves, in_turn = [gate, gate, up, up], [gate, up, gate, up]
    assert_close("halves", run_with(halves), torch.tensor([[2 * expected]]), DIGITS)
    assert_close("in turn", run_with(in_turn, interleaved=True), torch.tensor([[2 * expected]]), DIGITS)
    assert abs(run_with(halves, interleaved=True).item() - 2 * expected) > 1e-4
    assert abs(run_with(in_turn).item() - 2 * expected) > 1e-4


@EVERY_EXPERT_BACKEND
@pytest.mark.parametrize(("weight_on", "expected"), [("output", 1.76159), ("input", 0.73106), ("middle", 1.76159)])
def test_a_weight_counts_once(backend: str, weight_on: str, expected: float) -> None:
    """On both sides it would give 0.36553."""
    learned = {"gate_up_proj": [[[1.0], [1]]], "down_proj": [[[1.0]]]}
    y, _ = feed(backend, Experts(1, 1, 1, weight_on=weight_on), [[2.0]], [[0]], [[0.5]], **learned)
    assert_close("hidden", y, torch.tensor([[expected]]), DIGITS)


@EVERY_EXPERT_BACKEND
@pytest.mark.parametrize("align", [1, 16, 128])
@pytest.mark.parametrize("sizes", [(128, 130, 65), (64, 0, 64)])
def test_every_row_meets_its_own_expert(backend: str, sizes: tuple[int, ...], align: int) -> None:
    """Groups end inside tiles; expert g multiplies by g + 1."""
    experts = Experts(3, 4, 4, gated=False, activation="identity", align=align)
    ids = torch.arange(3).repeat_interleave(torch.tensor(sizes))
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(3))]
    x = torch.randint(1, 9, (len(ids), 4), generator=torch.Generator().manual_seed(4)).float()
    scaled = [((g + 1.0) * torch.eye(4)).tolist() for g in range(3)]
    learned = {"up_proj": scaled, "down_proj": [torch.eye(4).tolist()] * 3}
    y, given = feed(backend, experts, x.tolist(), ids.unsqueeze(1).tolist(), [[1.0]] * len(ids), **learned)
    assert torch.equal(y, x * (ids + 1.0).unsqueeze(1))
    assert torch.equal(given["x"].grad, (ids + 1.0).unsqueeze(1).expand(-1, 4))
    sums = torch.stack([x[ids == g].sum(0) for g in range(3)])
    assert torch.equal(given["up_proj"].grad, sums.unsqueeze(1).expand(-1, 4, -1))


@EVERY_EXPERT_BACKEND
@pytest.mark.parametrize("tokens", [3, 0])
def test_experts_without_tokens_have_gradients_of_zero(backend: str, tokens: int) -> None:
    experts = Experts(4, 2, 3, bias=True)
    generator = torch.Generator().manual_seed(1)
    shapes = {"gate_up_proj": (4, 6, 2), "down_proj": (4, 2, 3), "gate_up_proj_bias": (4, 6), "down_proj_bias": (4, 2)}
    inputs = {n: torch.randn(s, generator=generator).requires_grad_() for n, s in shapes.items()}
    inputs |= {"x": torch.randn(tokens, 2).requires_grad_(), "weights": torch.ones(tokens, 1).requires_grad_()}
    indices = torch.zeros(tokens, 1, dtype=torch.int32)
    run_experts(experts, {**inputs, "indices": indices}, backend)["hidden"].sum().backward()
    for name, values in inputs.items():
        assert values.grad is not None and values.grad.shape == values.shape, name
    for name in shapes:
        assert_zero(f"gradient of {name}", inputs[name].grad[1:])
        assert bool(inputs[name].grad[0].any()) == (tokens > 0)


# What was built, and what ran -----------------------------------------------------------------------------------------

_PRINT_SOURCES = """
import sys
import moesaic as mo
from moesaic.runtime.program import program_of
routers = [
    mo.Router(8, 2, renormalize=True),
    mo.Router(256, 8, score="sigmoid", selection_bias=True, groups=8, groups_kept=4, renormalize=True, scale=2.5,
              outputs=("weights", "indices", "counts", "probs", "map")),
    mo.Router(96, 6, order="topk_then_score", gate_bias=True, dtype="bf16", outputs=("probs", "indices")),
    mo.Router(60, 40, score=lambda x: mo.math.sqrt(mo.math.softplus(x)), rank="score"),
]
for router in routers:
    program = program_of(router.module())
    print(program.key)
    for kind in ("forward", "training", "backward"):
        for kernel in program.executable(kind, "sm_90a", ()).kernels:
            print(kernel.symbol)
            sys.stdout.write(kernel.source)
assert "torch" not in sys.modules  # it takes longer to load than all of this
"""


def test_generated_text_does_not_depend_on_hash_seeds() -> None:
    """Equal layers give equal text, byte for byte, in every process: else no cache would ever hit."""
    texts = []
    for seed in ("0", "1", "2", "3", "12345"):
        done = subprocess.run(
            [sys.executable, "-P", "-c", _PRINT_SOURCES],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        texts.append(done.stdout)
    assert texts[0].count(b"__global__") >= 16
    assert all(text == texts[0] for text in texts[1:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_ran_can_be_read(backend: str) -> None:
    layer = mo.compile(mo.Router(4, 1), backend=backend)
    assert layer.backend == backend
    layer(torch.zeros(3, 4, device=device_of(backend)))
    assert layer.backend == backend


@pytest.mark.emulate
def test_auto_follows_the_tensors_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOESAIC_BACKEND", raising=False)
    layer = mo.compile(mo.Router(4, 1))
    assert layer.backend == "auto"
    first = run(layer, torch.zeros(3, 4))
    assert layer.backend == "reference"
    monkeypatch.setenv("MOESAIC_BACKEND", "emulate")
    second = run(layer, torch.zeros(3, 4))
    assert layer.backend == "emulate"
    assert_same(second, first)


@pytest.mark.gpu
def test_auto_runs_cuda_tensors_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOESAIC_BACKEND", raising=False)
    layer = mo.compile(mo.Router(4, 1))
    layer(torch.zeros(3, 4, device="cuda"))
    assert layer.backend == "cuda"


def test_a_backend_that_cannot_serve_raises() -> None:
    """Nothing falls back in silence."""
    router = mo.Router(4, 1)
    with pytest.raises(ValueError, match="backend 'cuda' needs CUDA tensors, found logits on 'cpu'"):
        mo.compile(router, backend="cuda")(torch.zeros(3, 4))
    for backend in ("emulate", "cuda"):
        with pytest.raises(ValueError, match=r"float64 logits run on backend 'reference' only|needs CUDA tensors"):
            mo.compile(router, backend=backend)(torch.zeros(3, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="unknown backend 'emulator'; did you mean 'emulate'"):
        mo.compile(router, backend="emulator")
    long = mo.Router(16385, 1)
    with pytest.raises(RuntimeError, match="up to 16384"):  # too long a row for the generated code; reference runs it
        mo.compile(long, backend="emulate")(torch.zeros(3, 16385))
    assert mo.compile(long, backend="reference")(torch.zeros(3, 16385)).indices.tolist() == [[0]] * 3


@pytest.mark.gpu
def test_the_emulator_refuses_cuda_tensors() -> None:
    with pytest.raises(ValueError, match="backend 'emulate' needs CPU tensors, found logits on 'cuda'"):
        mo.compile(mo.Router(4, 1), backend="emulate")(torch.zeros(3, 4, device="cuda"))


# A comparison can fail ------------------------------------------------------------------------------------------------


def test_comparisons_see_zeros_and_refuse_to_expect_them() -> None:
    values = torch.tensor([1e-6, -2e-6])
    assert_close("values", values.clone(), values, EXACT)
    with pytest.raises(AssertionError, match="of the largest value"):
        assert_close("values", torch.zeros(2), values, 1e-3)  # relative to their size, however small that is
    with pytest.raises(AssertionError, match="which tests nothing"):
        assert_close("values", torch.zeros(2), torch.zeros(2), 1e-3)
    with pytest.raises(AssertionError, match="NaN"):
        assert_close("values", torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]), 1e-3)
    with pytest.raises(AssertionError, match="infinities"):
        assert_close("values", torch.tensor([1.0, -INF]), torch.tensor([1.0, INF]), 1e-3)
    with pytest.raises(AssertionError, match="shape"):
        assert_close("values", torch.ones(1), torch.ones(2), 1e-3)

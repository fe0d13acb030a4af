"""Small inputs with the right answer worked out by hand; each is a fault that users met in some MoE router."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from routing import BACKENDS, DIGITS, EXACT, GRADIENT, INF, assert_close, assert_same, assert_zero, device_of, run

import moesaic as mo

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


# Each E with a number of picks of its own: every pair would take a minute to build.
EMULATED_SIZES = [(1, 1), (3, 3), (5, 3), (6, 5), (12, 10), (60, 6), (96, 5), (160, 7), (384, 2)]


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


# What was built, and what ran -----------------------------------------------------------------------------------------

_PRINT_SOURCES = """
import sys
from pathlib import Path
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
    for seed in ("0", "1", "12345"):
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


# The table of cases ---------------------------------------------------------------------------------------------------

TESTS = Path(__file__).resolve().parent


def test_the_table_of_cases_names_tests_that_exist() -> None:
    """A row for each case, in order; each names tests, or says what the case waits for."""
    rows = re.findall(r"^\| (\d+) \| [^|]+ \| ([^|]+) \|$", (TESTS / "README.md").read_text(encoding="utf-8"), re.M)
    assert [int(number) for number, _ in rows] == list(range(1, 65))
    for number, cell in rows:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", cell)
        assert cell.count("::") == len(named), f"case {number}: {cell}"
        if not named:
            assert cell.startswith("waits"), f"case {number} names no test: {cell}"
        for file, test in named:
            text = (TESTS / file).read_text(encoding="utf-8") if (TESTS / file).is_file() else ""
            assert re.search(rf"^def {test}\(", text, re.M), f"case {number}: {file} has no {test}"

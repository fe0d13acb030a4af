"""The rules that every router keeps, whatever its input, its configuration or where it runs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from routing import (
    BACKENDS,
    COMPILED,
    EXACT,
    GRADIENT,
    INF,
    NAN,
    assert_close,
    assert_same,
    assert_zero,
    cotangent,
    device_of,
    run,
    same_bits,
    sweep,
)

import moesaic as mo
from moesaic.codegen.kernel import GeneratedKernel
from moesaic.ir.errors import EmulationError
from moesaic.runtime import execute
from moesaic.runtime.execute import RUNNERS, EmulatedRunner

EVERY_OUTPUT = ("weights", "indices", "counts", "probs", "map")

# Two routers with every kind of step between them; the rules below are checked on both.
GROUPED = mo.Router(
    96, 6, score="sigmoid", selection_bias=True, groups=8, groups_kept=3, renormalize=True, renorm_eps=1e-20, scale=2.5,
    outputs=EVERY_OUTPUT,
)  # fmt: skip
SOFTMAX = mo.Router(60, 4, renormalize=mo.norm.sum(min=0.5), gate_bias=True, outputs=EVERY_OUTPUT)

both_routers = pytest.mark.parametrize("router", [GROUPED, SOFTMAX], ids=["grouped", "softmax"])
every_backend = pytest.mark.parametrize("backend", BACKENDS)
compiled_backend = pytest.mark.parametrize("backend", COMPILED)


@pytest.fixture(autouse=True)
def both_kinds_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for few tokens run up to 24 of them, on every backend: tests with 13 and with 67 rows see both kinds."""
    for runner in RUNNERS.values():
        monkeypatch.setattr(runner, "few_tokens", 24)


def logits_for(router: mo.Router, tokens: int, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(tokens, router.num_experts, generator=generator)).to(device)


def others_for(router: mo.Router, device: str = "cpu") -> dict[str, torch.Tensor]:
    vector = 0.3 * torch.randn(router.num_experts, generator=torch.Generator().manual_seed(99)).to(device)
    name = "bias" if router.selection_bias else "gate_bias"
    return {name: vector} if router.selection_bias or router.gate_bias else {}


@functools.cache
def compiled(router: mo.Router, backend: str) -> object:
    return mo.compile(router, backend=backend)


def route(router: mo.Router, backend: str, logits: torch.Tensor, **options: object) -> object:
    device = device_of(backend)
    return run(compiled(router, backend), logits.to(device), **others_for(router, device), **options)


# Arithmetic -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("router", [GROUPED], ids=["grouped"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_backend
def test_arithmetic_is_float32_whatever_is_stored(router: mo.Router, dtype: torch.dtype, backend: str) -> None:
    """16-bit logits give the bits that the same numbers in float32 give; each output is rounded once, at the end."""
    narrow = logits_for(router, 13).to(dtype)
    storage = {"probs": dtype}
    got = route(router, backend, narrow)
    wide = route(router, backend, narrow.float(), storage=storage)
    for name in ("weights", "indices", "counts", "map"):
        assert same_bits(got[name], wide[name]), name
    assert same_bits(got["probs"], wide["probs"].to(dtype))
    for name, gradient in wide.gradients.items():
        assert same_bits(got.gradients[name], gradient.to(got.gradients[name].dtype)), name


@compiled_backend
def test_saturated_scores_are_ranked_by_their_logits(backend: str) -> None:
    """Sigmoid of 20, 30 and 25 is 1 in float32: as scores they tie, as logits they do not."""
    logits = torch.tensor([[20.0, 30.0, 25.0, 0.0]])
    fine = route(mo.Router(4, 3, score="sigmoid"), backend, logits, backward=False)
    coarse = route(mo.Router(4, 3, score="sigmoid", rank="score"), backend, logits, backward=False)
    assert fine["indices"].tolist() == [[1, 2, 0]]
    assert coarse["indices"].tolist() == [[0, 1, 2]]


# Selection order ------------------------------------------------------------------------------------------------------

ALL_OF_EIGHT = mo.Router(8, 8, outputs=EVERY_OUTPUT)
THREE_OF_EIGHT = mo.Router(8, 3, outputs=EVERY_OUTPUT)
BY_SCORE = mo.Router(8, 3, rank="score", outputs=EVERY_OUTPUT)

ORDERS = {  # logits -> the order of all eight experts
    "ties": ([1, 1, 1, 1, 1, 1, 1, 1], [0, 1, 2, 3, 4, 5, 6, 7]),
    "two levels": ([0, 1, 0, 1, 0, 1, 0, 1], [1, 3, 5, 7, 0, 2, 4, 6]),
    "signed zeros": ([-0.0, 0.0, -0.0, 0.0, -1, 1, 0.0, -0.0], [5, 0, 1, 2, 3, 6, 7, 4]),
    "minus infinity": ([-INF, 0, -INF, 1, -INF, -INF, -INF, -INF], [3, 1, 0, 2, 4, 5, 6, 7]),
    "only minus infinity": ([-INF] * 8, [0, 1, 2, 3, 4, 5, 6, 7]),
    "NaN is last": ([NAN, 0, 5, NAN, -INF, -1, NAN, 2], [2, 7, 1, 5, 4, 0, 3, 6]),
    "only NaN": ([NAN] * 8, [0, 1, 2, 3, 4, 5, 6, 7]),
    "NaN of either sign": ([-NAN, NAN, -INF, -NAN, 1, -NAN, NAN, -NAN], [4, 2, 0, 1, 3, 5, 6, 7]),
    "infinity": ([0, INF, 1, INF, -INF, 2, INF, 3], [1, 3, 6, 7, 5, 2, 0, 4]),
    "tiny": ([1e-45, 0, -1e-45, 1e-38, -1e-38, 0, 3e-45, 1], [7, 3, 6, 0, 1, 5, 2, 4]),
}


@pytest.mark.parametrize("router", [ALL_OF_EIGHT, THREE_OF_EIGHT], ids=["all", "three"])
@every_backend
def test_order_is_value_descending_then_index_ascending(router: mo.Router, backend: str) -> None:
    r = route(router, backend, torch.tensor([logits for logits, _ in ORDERS.values()]))
    for row, (name, (_, order)) in enumerate(ORDERS.items()):
        assert r["indices"][row].tolist() == order[: router.top_k], name


@every_backend
def test_ties_keep_index_order_however_long_the_row(backend: str) -> None:
    """Equal logits pick experts 0 to K-1, through every way of selecting."""
    for experts, picks in ((7, 7), (257, 5), (256, 20), (160, 40)):
        r = route(mo.Router(experts, picks), backend, torch.zeros(3, experts), backward=False)
        assert r["indices"].tolist() == [list(range(picks))] * 3, (experts, picks)


@pytest.mark.parametrize("router", [THREE_OF_EIGHT, BY_SCORE], ids=["by logit", "by score"])
@every_backend
def test_picks_are_distinct_experts_whatever_the_input(router: mo.Router, backend: str) -> None:
    """Rows of anything that a float can hold."""
    generator = torch.Generator().manual_seed(3)
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 3.4e38, -3.4e38, 1e-45, 80.0, -200.0])
    logits = values[torch.randint(len(values), (61, 8), generator=generator)]
    bits = torch.randint(-(2**31), 2**31 - 1, (60, 8), generator=generator).int().view(torch.float32)
    indices = route(router, backend, torch.cat([logits, bits]), backward=False)["indices"]
    assert bool(((indices >= 0) & (indices < 8)).all())
    assert bool((indices.sort(-1).values.diff(dim=-1) > 0).all())


# Rows that hold no number ---------------------------------------------------------------------------------------------


@both_routers
@every_backend
def test_a_row_of_nan_harms_no_other(router: mo.Router, backend: str) -> None:
    logits = logits_for(router, 13)
    clean = route(router, backend, logits)
    spoilt_logits = logits.clone()
    spoilt_logits[5] = NAN
    spoilt = route(router, backend, spoilt_logits)
    assert bool(spoilt["weights"][5].isnan().all())
    if router.groups is None:
        assert spoilt["indices"][5].tolist() == list(range(router.top_k))
    rest = torch.arange(13) != 5
    for name in ("weights", "indices", "probs", "map"):
        assert same_bits(spoilt[name][rest], clean[name][rest]), name
    assert same_bits(spoilt.gradients["logits"][rest], clean.gradients["logits"][rest])
    assert int(spoilt["counts"].sum()) == 13 * router.top_k


@every_backend
def test_minus_infinity_weighs_nothing_and_is_counted(backend: str) -> None:
    r = route(THREE_OF_EIGHT, backend, torch.tensor([[-INF, 0, -INF, -INF, 0, -INF, -INF, -INF], [-INF] * 8]))
    assert r["indices"].tolist() == [[1, 4, 0], [0, 1, 2]]
    assert r["weights"].tolist() == [[0.5, 0.5, 0], [0, 0, 0]]
    assert r["counts"].tolist() == [2, 2, 1, 0, 1, 0, 0, 0]
    assert_zero("probs of a row of only -inf", r["probs"][1])
    assert bool(r.gradients["logits"].isfinite().all())
    assert_zero("gradient of a row of only -inf", r.gradients["logits"][1])


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("order", ["score_then_topk", "topk_then_score"])
@compiled_backend
def test_a_row_without_a_finite_logit_gives_zero_weights(score: str, order: str, backend: str) -> None:
    """Also after a division: 0 / 0 is 0. Extreme but finite logits beside it stay finite."""
    router = mo.Router(5, 2, score=score, order=order, renormalize=True)
    r = route(router, backend, torch.tensor([[-INF] * 5, [-3e38, -3e38, -3e38, -1e38, -2e38], [90.0, -90, 0, 88, 1]]))
    assert_zero("weights", r["weights"][0])
    assert_zero("gradient", r.gradients["logits"][0])
    assert r["indices"].tolist() == [[0, 1], [3, 4], [0, 3]]
    assert bool(r["weights"].isfinite().all())
    assert bool(r.gradients["logits"].isfinite().all())


# The selection bias ---------------------------------------------------------------------------------------------------


@every_backend
def test_the_bias_only_selects(backend: str) -> None:
    """The weights of picks are those that the same picks have without a bias, and the bias gets no gradient."""
    router = mo.Router(60, 6, score="sigmoid", selection_bias=True, outputs=EVERY_OUTPUT)
    device = device_of(backend)
    logits = logits_for(router, 13, device)
    bias = others_for(router, device)["bias"].requires_grad_()
    r = compiled(router, backend)(logits, bias=bias)
    assert_close("weights", r.weights, logits.sigmoid().gather(-1, r.indices.long()), EXACT)
    wanted = (logits.sigmoid() + bias).topk(6).indices.sort(-1).values
    assert torch.equal(r.indices.long().sort(-1).values, wanted)
    assert not r.weights.requires_grad or torch.autograd.grad(r.weights.sum(), bias, allow_unused=True) == (None,)


# No tokens, one token, other shapes -----------------------------------------------------------------------------------


@both_routers
@every_backend
def test_no_tokens(router: mo.Router, backend: str) -> None:
    """Empty outputs, zero counts, and gradients that are zero rather than missing."""
    r = route(router, backend, logits_for(router, 0))
    assert r["weights"].shape == r["indices"].shape == (0, router.top_k)
    assert r["probs"].shape == r["map"].shape == (0, router.num_experts)
    assert r["counts"].tolist() == [0] * router.num_experts
    assert r.gradients["logits"].shape == (0, router.num_experts)
    if router.gate_bias:
        assert r.gradients["gate_bias"].tolist() == [0.0] * router.num_experts


@every_backend
def test_experts_without_tokens_have_zero_gradients(backend: str) -> None:
    """All tokens to two experts: top-k first sends nothing to the other logits, nor to the other biases."""
    router = mo.Router(8, 2, order="topk_then_score", gate_bias=True)
    logits = logits_for(router, 7)
    logits[:, 2:4] += 100
    r = route(router, backend, logits)
    assert r["counts"].tolist() == [0, 0, 7, 7, 0, 0, 0, 0]
    for name in ("logits", "gate_bias"):
        gradient = r.gradients[name]
        assert_zero(name, gradient[..., [0, 1, 4, 5, 6, 7]])
        assert bool((gradient[..., 2:4] != 0).any())


@both_routers
@every_backend
def test_leading_dimensions_are_kept(router: mo.Router, backend: str) -> None:
    flat = logits_for(router, 12)
    rows = route(router, backend, flat)
    for leading in ((3, 4), (2, 1, 6), (12, 1)):
        r = route(router, backend, flat.view(*leading, -1))
        for name in ("weights", "indices", "probs", "map"):
            assert r[name].shape[:-1] == leading
            assert same_bits(r[name].flatten(0, -2), rows[name]), name
        assert torch.equal(r["counts"], rows["counts"])
        assert r.gradients["logits"].shape == (*leading, router.num_experts)
    one = route(router, backend, flat[5])
    assert one["weights"].shape == (router.top_k,)
    assert same_bits(one["weights"], rows["weights"][5])


@both_routers
@every_backend
def test_a_row_depends_neither_on_the_others_nor_on_its_place(router: mo.Router, backend: str) -> None:
    logits = logits_for(router, 67)
    cotangents = {
        n: cotangent(torch.empty(67, w), 5) for n, w in (("weights", router.top_k), ("probs", router.num_experts))
    }

    def rows(chosen: torch.Tensor) -> dict[str, torch.Tensor]:
        device = device_of(backend)
        leaf = logits[chosen].to(device).requires_grad_()
        r = compiled(router, backend)(leaf, **others_for(router, device))
        sent = [cotangents[n][chosen].to(device) for n in ("weights", "probs")]
        (gradient,) = torch.autograd.grad([r.weights, r.probs], leaf, sent)
        found = {**r._asdict(), "gradient": gradient}
        return {n: t.detach().cpu() for n, t in found.items() if n != "counts"}

    every = rows(torch.arange(67))
    shuffled = torch.randperm(67, generator=torch.Generator().manual_seed(1))
    for chosen in (shuffled, torch.tensor([66]), torch.arange(1, 5), torch.arange(66, 0, -2)):
        for name, values in rows(chosen).items():
            assert same_bits(values, every[name][chosen]), name


@both_routers
@every_backend
def test_equal_calls_give_equal_bits(router: mo.Router, backend: str) -> None:
    logits = logits_for(router, 67)
    first = route(router, backend, logits)
    for _ in range(3):
        assert_same(route(router, backend, logits), first)


# Memory ---------------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows in a wider tensor": lambda x: torch.nn.functional.pad(x, (0, 4))[:, : x.shape[1]],
    "rows at odd strides": lambda x: torch.nn.functional.pad(x, (0, 5))[:, : x.shape[1]],
    "off by one element": lambda x: torch.nn.functional.pad(x.flatten(), (1, 0))[1:].view(x.shape),
    "columns in between": lambda x: torch.nn.functional.pad(x, (3, 2))[:, 3 : 3 + x.shape[1]],
    "transposed": lambda x: x.t().contiguous().t(),
    "every second row": lambda x: x.repeat_interleave(2, 0)[::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@compiled_backend
def test_where_logits_lie_changes_nothing(layout: str, dtype: torch.dtype, backend: str) -> None:
    logits = logits_for(SOFTMAX, 13).to(dtype)
    moved = LAYOUTS[layout](logits.to(device_of(backend)))
    assert torch.equal(moved.cpu(), logits)
    assert_same(route(SOFTMAX, backend, moved), route(SOFTMAX, backend, logits), but=("gate_bias",))


@compiled_backend
def test_rows_that_share_memory(backend: str) -> None:
    """Logits expanded from one row: a row stride of 0."""
    one = logits_for(SOFTMAX, 1)
    r = route(SOFTMAX, backend, one.to(device_of(backend)).expand(5, -1))
    assert same_bits(r["weights"], route(SOFTMAX, backend, one)["weights"].expand(5, -1))


@compiled_backend
def test_cotangents_may_lie_anywhere(backend: str) -> None:
    """A sum sends back one number for all elements (strides 0); others are transposed, or columns of a wider tensor."""
    device = device_of(backend)
    router = SOFTMAX
    others = {n: t.requires_grad_() for n, t in others_for(router, device).items()}
    logits = logits_for(router, 13, device).requires_grad_()
    r = compiled(router, backend)(logits, **others)

    def gradients(weights: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sent = [weights.to(device), probs.to(device)]
        return torch.autograd.grad([r.weights, r.probs], [logits, others["gate_bias"]], sent, retain_graph=True)

    base = [cotangent(r.weights.cpu(), 1), cotangent(r.probs.cpu(), 2)]
    wanted = gradients(*base)
    for change in (LAYOUTS["transposed"], LAYOUTS["rows at odd strides"], LAYOUTS["off by one element"]):
        found = gradients(*(change(g) for g in base))
        assert same_bits(found[0], wanted[0])
        assert_close("gate bias", found[1], wanted[1], GRADIENT)
    for row in (torch.tensor(1.5), base[1][0]):  # one number everywhere; one row for all tokens
        dense = row.expand(13, router.num_experts)
        found, wanted = gradients(base[0], dense), gradients(base[0], dense.contiguous())
        assert same_bits(found[0], wanted[0])


@both_routers
@compiled_backend
def test_a_cotangent_for_some_outputs_only(router: mo.Router, backend: str) -> None:
    """Gradients of a part of the outputs are those with zeros for the rest, and sum to those of all of them."""
    device = device_of(backend)
    logits = logits_for(router, 13, device).requires_grad_()
    r = compiled(router, backend)(logits, **others_for(router, device))
    sent = [cotangent(r.weights, 1), cotangent(r.probs, 2)]

    def gradient(outputs: list[torch.Tensor], cotangents: list[torch.Tensor]) -> torch.Tensor:
        return torch.autograd.grad(outputs, logits, cotangents, retain_graph=True)[0]

    parts = gradient([r.weights], sent[:1]), gradient([r.probs], sent[1:])
    for i, part in enumerate(parts):
        zeros = [g if i == j else torch.zeros_like(g) for j, g in enumerate(sent)]
        assert_close("gradient", part, gradient([r.weights, r.probs], zeros), GRADIENT)
    assert_close("gradient", parts[0] + parts[1], gradient([r.weights, r.probs], sent), GRADIENT)


@both_routers
@compiled_backend
def test_inference_gives_what_training_gives(router: mo.Router, backend: str) -> None:
    logits = logits_for(router, 13)
    training = route(router, backend, logits)
    inference = route(router, backend, logits, backward=False)
    for name in EVERY_OUTPUT:
        assert same_bits(inference[name], training[name]), name


# Configurations -------------------------------------------------------------------------------------------------------

CONFIGURATIONS: list[dict[str, object]] = [
    {"lanes": 4, "threads": 32},
    {"lanes": 8, "threads": 64, "select": "rounds"},
    {"lanes": 16, "select": "sort"},
    {"lanes": 32, "threads": 256, "select": "merge"},
    {"prefetch": "on"},
]


@pytest.mark.parametrize(
    ("number", "router", "backend"), sweep(itertools.product(range(len(CONFIGURATIONS)), [GROUPED, SOFTMAX]), 2, of=3)
)
def test_the_configuration_changes_no_bit_of_a_row(router: mo.Router, number: int, backend: str) -> None:
    """Lanes, threads and the way of selecting spread the work; sums keep their order."""
    logits = logits_for(router, 67)
    logits[3], logits[4, ::3], logits[5, ::2] = 1.0, -INF, NAN
    wanted = route(router, backend, logits)
    options = CONFIGURATIONS[number]
    chosen = f"specialize{{{' '.join(f'{n}={v}' for n, v in options.items())}}}"
    layer = mo.compile(dataclasses.replace(router, dtype="fp32"), backend=backend, passes=chosen)
    for name, value in options.items():
        assert f"{name}={value}" in layer.ir("specialize")
    device = device_of(backend)
    got = run(layer, logits.to(device), **others_for(router, device))
    assert_same(got, wanted, but=("gate_bias",))
    if router.gate_bias:  # summed over tokens, in an order that follows the grid
        finite = wanted.gradients["gate_bias"].isfinite()
        assert torch.equal(got.gradients["gate_bias"].isfinite(), finite)


@both_routers
@pytest.mark.emulate
@pytest.mark.parametrize("order", [-1, 1, 2, 3])
def test_the_order_of_threads_changes_nothing(monkeypatch: pytest.MonkeyPatch, router: mo.Router, order: int) -> None:
    """Lanes, warps and blocks backwards, or shuffled: a race would show."""
    logits = logits_for(router, 67)
    wanted = route(router, "emulate", logits)
    monkeypatch.setattr(EmulatedRunner, "order", order)
    assert_same(route(router, "emulate", logits), wanted)


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [pytest.param("reference"), pytest.param("emulate", marks=pytest.mark.emulate)])
class TestRefused:
    """One error, before anything runs: what was found, what was expected, what to do."""

    def test_inputs_missing_or_not_declared(self, backend: str) -> None:
        plain = mo.compile(mo.Router(8, 2), backend=backend)
        biased = mo.compile(mo.Router(8, 2, selection_bias=True, gate_bias=True), backend=backend)
        x, b = torch.zeros(3, 8), torch.zeros(8)
        with pytest.raises(TypeError, match="'bias' was not declared"):
            plain(x, bias=b)
        with pytest.raises(TypeError, match="'gate_bais' was not declared; did you mean 'gate_bias'"):
            biased(x, bias=b, gate_bais=b)
        with pytest.raises(TypeError, match=r"'gate_bias' .*is missing"):
            biased(x, bias=b)
        with pytest.raises(TypeError, match=r"'bias' .*is missing"):
            biased(x, gate_bias=b)
        for args in ((), (x, b)):
            with pytest.raises(TypeError, match=f"found {len(args)} positional"):
                biased(*args, bias=b)
        with pytest.raises(TypeError, match="must be a tensor, found list"):
            plain([[0.0] * 8])
        with pytest.raises(TypeError, match="bias must be a tensor, found float"):
            biased(x, bias=0.5, gate_bias=b)

    def test_shapes(self, backend: str) -> None:
        layer = mo.compile(mo.Router(8, 2, selection_bias=True), backend=backend)
        b = torch.zeros(8)
        for shape in ((3, 7), (3, 9), (8, 3), ()):
            with pytest.raises(ValueError, match=r"logits must have shape \[\.\.\., 8\], found"):
                layer(torch.zeros(shape), bias=b)
        for shape in ((7,), (3, 8), (8, 1), (1, 8)):
            with pytest.raises(ValueError, match=r"bias must have shape \[8\], found"):
                layer(torch.zeros(3, 8), bias=torch.zeros(shape))

    def test_dtypes(self, backend: str) -> None:
        x = torch.zeros(3, 8)
        bf16 = mo.compile(mo.Router(8, 2, dtype="bf16"), backend=backend)
        with pytest.raises(ValueError, match=r"declared for bf16 logits, found fp32; .*dtype='fp32'"):
            bf16(x)
        free = mo.compile(mo.Router(8, 2, selection_bias=True), backend=backend)
        for dtype in (torch.int32, torch.bool):
            with pytest.raises(ValueError, match="logits must be bf16, fp16 or fp32, found"):
                free(x.to(dtype), bias=torch.zeros(8))
        with pytest.raises(ValueError, match="bias must be fp32, found bf16"):
            free(x, bias=torch.zeros(8).bfloat16())

    def test_devices(self, backend: str) -> None:
        layer = mo.compile(mo.Router(8, 2, selection_bias=True), backend=backend)
        with pytest.raises(ValueError, match="bias is on meta, but logits are on cpu"):
            layer(torch.zeros(3, 8), bias=torch.zeros(8, device="meta"))


@pytest.mark.emulate
def test_float64_runs_on_the_reference_only() -> None:
    router = mo.Router(8, 2)
    logits = torch.randn(3, 8, dtype=torch.float64)
    assert mo.compile(router, backend="reference")(logits).weights.dtype == torch.float64
    with pytest.raises(ValueError, match="float64 logits run on backend 'reference' only"):
        mo.compile(router, backend="emulate")(logits)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top_k": 9}, "top_k must be an integer between 1 and num_experts = 8, found top_k = 9"),
        ({"top_k": 2.0}, "found top_k = 2.0"),
        ({"num_experts": 0}, "num_experts must be an integer >= 1"),
        ({"score": "sigmiod"}, "unknown score 'sigmiod'; did you mean 'sigmoid'"),
        ({"order": "topk_first"}, "unknown order 'topk_first'"),
        ({"outputs": ("weights", "index")}, "unknown outputs 'index'; did you mean 'indices'"),
        ({"outputs": ()}, "outputs is empty"),
        ({"outputs": ("map", "map")}, "names one twice"),
        ({"groups": 4}, "groups and groups_kept go together"),
        ({"groups": 3, "groups_kept": 1}, "groups must divide num_experts = 8"),
        ({"groups": 4, "groups_kept": 5}, "groups_kept must be between 1 and groups = 4"),
        ({"groups": 4, "groups_kept": 1, "top_k": 3}, "top_k = 3 is more than the 2 experts of 1 groups kept"),
        ({"groups": 4, "groups_kept": 2, "group_score": "sum_top3"}, "sums the best 3 of a group, but a group holds 2"),
        ({"scale": INF}, "scale must be a finite number"),
        ({"renormalize": "yes"}, "renormalize must be True, False, norm.sum"),
        ({"renorm_eps": 1e-6}, "renorm_eps goes with renormalize=True"),
        ({"dtype": "int32"}, "dtype must be a float type"),
    ],
)
def test_declarations_without_a_meaning(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mo.Router(**{"num_experts": 8, "top_k": 2, **arguments})


# The rest of the grammar ----------------------------------------------------------------------------------------------

CAPPED = [
    mo.Router(
        64, 6, score="sigmoid", logit_cap=2.0, expert_scale=True, renormalize=True,
        outputs=("weights", "probs", "scores"),
    ),
    mo.Router(60, 4, logit_cap=3.0, gate_bias=True, expert_scale=True, outputs=("weights", "indices", "scores")),
    mo.Router(17, 3, order="topk_then_score", logit_cap=5.0, expert_scale=True, outputs=("weights", "indices")),
]  # fmt: skip


@compiled_backend
@pytest.mark.parametrize("router", CAPPED, ids=["sigmoid", "gate_bias", "topk_then_score"])
def test_caps_scores_and_learned_factors(router: mo.Router, backend: str) -> None:
    """Values and all gradients against float64: the logits', the gate bias's and the factors'."""
    device = device_of(backend)
    logits = logits_for(router, 67, device)
    generator = torch.Generator().manual_seed(5)
    others = {"expert_scale": (0.5 + torch.rand(router.num_experts, generator=generator)).to(device)}
    if router.gate_bias:
        others["gate_bias"] = 0.3 * torch.randn(router.num_experts, generator=generator).to(device)
    got = run(mo.compile(router, backend=backend), logits, **others)
    exact = run(mo.compile(router, backend="reference"), logits.double(), **{n: t.double() for n, t in others.items()})
    assert got.gradients.keys() == {"logits", *others}
    for name, value in exact.outputs.items():
        if value.dtype.is_floating_point:
            assert_close(name, got.outputs[name], value, EXACT)
    for name, gradient in exact.gradients.items():
        assert_close(f"gradient of {name}", got.gradients[name], gradient, GRADIENT)


def test_a_cap_does_not_decide_ties() -> None:
    """Both logits are 3 after the cap in float32; the larger one is still the first pick."""
    logits = torch.tensor([[200.0, 400.0, 0.0, 0.0]])
    result = mo.compile(mo.Router(4, 2, logit_cap=3.0), backend="reference")(logits)
    assert result.indices.tolist() == [[1, 0]]


@compiled_backend
def test_what_all_tokens_share_is_computed_before_the_loop(backend: str) -> None:
    """Arithmetic on vectors over experts and on single numbers, used for whole rows and at the picks."""
    module = mo.parse("""
        moe.func @route(%logits: tensor<Tx16xf32>, %bias: tensor<16xf32>, %temperature: tensor<f32>)
            -> (weights: tensor<Tx3xf32>, indices: tensor<Tx3xi32>, all: tensor<Tx16xf32>) {
          %half = math.mul %temperature, 0.5
          %positive = math.sigmoid %bias
          %factor = math.mul %positive, %half
          %x = math.mul %logits, %half
          %s = math.sigmoid %x
          %selection = math.add %s, %factor
          %v, %i = row.topk %selection {k = 3}
          %w = row.gather %s, %i
          %f = row.gather %factor, %i
          %weights = math.mul %w, %f
          %all = math.mul %s, %factor
          return %weights, %i, %all
        }
    """)
    device = device_of(backend)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(67, 16, generator=generator).to(device)
    others = {"bias": torch.randn(16, generator=generator).to(device), "temperature": torch.tensor(3.0, device=device)}
    got = run(mo.compile(module, backend=backend), logits, backward=False, **others)
    exact = run(mo.compile(module, backend="reference"), logits, backward=False, **others)
    assert torch.equal(got.outputs["indices"], exact.outputs["indices"])
    for name in ("weights", "all"):
        assert_close(name, got.outputs[name], exact.outputs[name], EXACT)


@compiled_backend
@pytest.mark.parametrize("many", [5, 40])
def test_two_selections_in_one_kernel(many: int, backend: str) -> None:
    """Of different numbers of picks, one ranking the 16-bit logits and one float32 scores."""
    module = mo.parse(f"""
        moe.func @route(%logits: tensor<Tx60xbf16>, %bias: tensor<60xf32>)
            -> (first: tensor<Tx3xi32>, second: tensor<Tx{many}xi32>, weights: tensor<Tx{many}xf32>) {{
          %s = math.sigmoid %logits
          %selection = math.add %s, %bias
          %v, %first = row.topk %logits {{k = 3}}
          %u, %second = row.topk %selection {{k = {many}}}
          %weights = row.gather %s, %second
          return %first, %second, %weights
        }}
    """)
    device = device_of(backend)
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(67, 60, generator=generator).bfloat16().to(device)
    bias = torch.randn(60, generator=generator).to(device)
    got = run(mo.compile(module, backend=backend), logits, backward=False, bias=bias)
    exact = run(mo.compile(module, backend="reference"), logits, backward=False, bias=bias)
    assert torch.equal(got.outputs["first"], exact.outputs["first"])
    assert torch.equal(got.outputs["second"], exact.outputs["second"])
    assert_close("weights", got.outputs["weights"], exact.outputs["weights"], EXACT)


@pytest.mark.emulate
def test_a_kernel_that_writes_an_input_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator knows which operands a launch only reads."""
    whole = execute.source_of

    def overwriting(kernel: GeneratedKernel) -> str:
        text = whole(kernel).replace("picked_scores_ptr + token * 3", "const_cast<float*>(logits_ptr) + token * 3")
        assert text != whole(kernel)
        return text

    monkeypatch.setattr(execute, "source_of", overwriting)
    layer = mo.compile(mo.Router(19, 3, name="overwrites", outputs=("weights",)), backend="emulate")
    with pytest.raises(EmulationError, match="operand 0"):
        layer(torch.randn(5, 19))

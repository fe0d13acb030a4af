"""Outputs beside weights: indices of every integer type, the bitmap, the log-sum-exp; and division by an Lp norm."""

from __future__ import annotations

import itertools

import pytest
import torch
from routing import (
    BACKENDS,
    COMPILED,
    EXACT,
    GRADIENT,
    INF,
    ROUNDING,
    Run,
    assert_close,
    assert_zero,
    device_of,
    run,
    sweep,
)

import moesaic as mo
from moesaic.ir.errors import InputError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
INDICES = {"int16": torch.int16, "int32": torch.int32, "int64": torch.int64}


def compare(router: mo.Router, backend: str, logits: torch.Tensor, **inputs: torch.Tensor) -> Run:
    """Runs a router and checks every output and gradient against the reference in float64."""
    device = device_of(backend)
    there = {n: t.to(device) for n, t in inputs.items()}
    got = run(mo.compile(router, backend=backend), logits.to(device), **there)
    wide = {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}
    exact = run(mo.compile(router, backend="reference"), logits.double(), **wide)
    for name, value in exact.outputs.items():
        if value.dtype.is_floating_point:
            assert_close(name, got[name], value, EXACT + ROUNDING[got[name].dtype])
        else:
            assert got[name].dtype == value.dtype
            assert torch.equal(got[name], value), f"{name} differs"
    assert got.gradients.keys() == exact.gradients.keys()
    for name, gradient in exact.gradients.items():
        tolerance = GRADIENT + ROUNDING[got.gradients[name].dtype]
        assert_close(f"gradient of {name}", got.gradients[name], gradient, tolerance)
    return got


def normal(tokens: int, experts: int, dtype: str = "fp32", seed: int = 3) -> torch.Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])


# Indices --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("experts", "picks", "indices_dtype"),
    [(7, 1, "int64"), (60, 4, "int16"), (60, 4, "int32"), (60, 4, "int64"), (96, 33, "int16")],
)
def test_indices_of_each_type(experts: int, picks: int, indices_dtype: str, backend: str) -> None:
    router = mo.Router(
        experts, picks, score="sigmoid", indices_dtype=indices_dtype, outputs=("weights", "indices", "counts", "map")
    )
    got = compare(router, backend, normal(29, experts, "bf16"))
    assert got["indices"].dtype == INDICES[indices_dtype]
    assert int(got["counts"].sum()) == 29 * picks


@pytest.mark.parametrize("indices_dtype", ["int16", "int64"])
def test_backward_reads_the_indices_that_went_out(indices_dtype: str) -> None:
    """Picks are not kept a second time, in the type that the kernels work with."""
    layer = mo.compile(mo.Router(64, 6, indices_dtype=indices_dtype))
    [remark] = [r for r in layer.remarks if r.startswith("choose-saved")]
    width = {"int16": 2, "int64": 8}[indices_dtype]
    assert f"keeps indices tensor<Tx6xi{8 * width}> ({6 * width} B/token)" in remark
    hidden = mo.compile(mo.Router(64, 6, indices_dtype=indices_dtype, outputs=("weights",)))
    assert any("keeps saved_indices tensor<Tx6xi32> (24 B/token)" in r for r in hidden.remarks)


@pytest.mark.parametrize("backend", COMPILED)
def test_backward_of_one_output_reads_them_too(backend: str) -> None:
    """The backward of a single cotangent gets along with what forward keeps for all."""
    device = device_of(backend)
    router = mo.Router(60, 4, indices_dtype="int16", outputs=("weights", "indices", "scores"))
    logits = normal(29, 60).to(device).requires_grad_()
    r = mo.compile(router, backend=backend)(logits)
    sent = torch.randn(29, 4, generator=torch.Generator().manual_seed(1))
    [found] = torch.autograd.grad(r.weights, logits, sent.to(device))
    wide = normal(29, 60).double().requires_grad_()
    exact = mo.compile(router, backend="reference")(wide)
    [wanted] = torch.autograd.grad(exact.weights, wide, sent.double())
    assert_close("gradient", found, wanted, GRADIENT)


def test_indices_dtype_is_checked() -> None:
    with pytest.raises(InputError, match="unknown indices_dtype 'int8'; did you mean"):
        mo.Router(8, 2, indices_dtype="int8")
    assert mo.Router(32767, 2, indices_dtype="int16").columns == 32767
    with pytest.raises(InputError, match="'int16' holds ids up to 32767, found num_experts = 32768; use 'int32'"):
        mo.Router(32768, 2, indices_dtype="int16")
    with pytest.raises(InputError, match=r"found num_experts \+ zero_experts = 32768"):
        mo.Router(32000, 2, zero_experts=768, indices_dtype="int16")


# Bitmap ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experts", "picks", "dtype", "backend"),
    sweep([
        (1, 1, "fp32"), (7, 3, "bf16"), (8, 8, "bf16"), (9, 2, "fp32"), (60, 4, "bf16"), (64, 6, "fp32"),
        (128, 8, "bf16"), (130, 8, "fp32"), (130, 4, "bf16"), (257, 40, "bf16"), (1000, 3, "bf16"), (1024, 10, "fp32"),
    ], 2, of=3),
)  # fmt: skip
def test_bitmap_is_the_map_in_bits(experts: int, picks: int, dtype: str, backend: str) -> None:
    """For every number of consecutive experts that a lane can hold; pad bits are 0."""
    router = mo.Router(experts, picks, outputs=("bitmap", "map"))
    r = mo.compile(router, backend=backend)(normal(29, experts, dtype).to(device_of(backend)))
    assert r.bitmap.shape == (29, -(-experts // 8))
    assert r.bitmap.dtype == torch.uint8
    bits = torch.stack([(r.bitmap >> bit) & 1 for bit in range(8)], dim=-1).flatten(1)
    assert torch.equal(bits[:, :experts], r.map)
    assert_zero("pad bits", bits[:, experts:])
    assert int(bits.sum()) == 29 * picks


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_token_without_a_dimension_of_tokens(backend: str) -> None:
    router = mo.Router(12, 2, outputs=("weights", "indices", "probs", "bitmap", "logsumexp", "counts"))
    logits = normal(31, 12).to(device_of(backend))
    layer = mo.compile(router, backend=backend)
    one, row = layer(logits[0]), layer(logits[:1])
    for found, wanted in zip(one, row, strict=True):
        assert torch.equal(found, wanted if found is one.counts else wanted[0])
    assert (
        one.logsumexp.shape == ()
        and one.weights.shape == (2,)
        and one.logsumexp.item() != 0
        and one.weights.any()
        and one.probs.any()
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_bitmap_keeps_leading_dimensions(backend: str) -> None:
    router = mo.Router(12, 2, outputs=("bitmap", "indices", "logsumexp"))
    r = mo.compile(router, backend=backend)(normal(30, 12).reshape(2, 3, 5, 12).to(device_of(backend)))
    assert r.bitmap.shape == (2, 3, 5, 2)
    assert r.logsumexp.shape == (2, 3, 5)
    bits = torch.stack([(r.bitmap >> bit) & 1 for bit in range(8)], dim=-1).flatten(-2)
    assert torch.equal(bits.sum(-1), torch.full((2, 3, 5), 2, device=bits.device))
    assert bool(bits.gather(-1, r.indices.long()).all())


# Log-sum-exp ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize(
    "arguments",
    [
        {"num_experts": 60, "top_k": 4},
        {"num_experts": 96, "top_k": 6, "score": "sigmoid", "selection_bias": True, "renormalize": True},
        {"num_experts": 17, "top_k": 3, "order": "topk_then_score", "gate_bias": True, "logit_cap": 3.0},
        {"num_experts": 1, "top_k": 1, "score": "sigmoid"},
    ],
)
def test_logsumexp_is_of_the_capped_and_biased_logits(arguments: dict[str, object], backend: str) -> None:
    router = mo.Router(**arguments, outputs=("logsumexp", "weights", "indices"))
    generator = torch.Generator().manual_seed(5)
    names = {"bias": router.selection_bias, "gate_bias": router.gate_bias}
    inputs = {n: 0.3 * torch.randn(router.columns, generator=generator) for n, is_there in names.items() if is_there}
    logits = 2 * normal(29, router.columns)
    got = compare(router, backend, logits, **inputs)
    x = logits.double() + inputs.get("gate_bias", torch.zeros(())).double()
    if router.logit_cap is not None:
        x = router.logit_cap * torch.tanh(x / router.logit_cap)
    assert got["logsumexp"].shape == (29,)
    assert got["logsumexp"].dtype == torch.float32
    assert_close("logsumexp", got["logsumexp"], torch.logsumexp(x, -1), EXACT)


@pytest.mark.parametrize("backend", COMPILED)
def test_a_loss_on_the_logsumexp_alone(backend: str) -> None:
    """What a z-loss sends back, here expanded from one number; masked experts have no gradient, empty rows neither."""
    device = device_of(backend)
    logits = normal(29, 60, "bf16")
    logits[3, 7:] = -INF
    logits[5] = -INF
    layer = mo.compile(mo.Router(60, 4, outputs=("logsumexp", "weights")), backend=backend)
    leaf = logits.to(device).requires_grad_()
    r = layer(leaf)
    assert r.logsumexp[5].item() == -INF
    r.logsumexp.sum().backward()
    wanted = torch.softmax(logits.double(), -1).nan_to_num()
    assert leaf.grad is not None
    assert_close("gradient", leaf.grad, wanted, GRADIENT + ROUNDING[torch.bfloat16])
    assert_zero("gradient of what is masked", leaf.grad[3, 7:])
    assert_zero("gradient of an empty row", leaf.grad[5])


# Lp norms -------------------------------------------------------------------------------------------------------------


def signed(x: mo.ir.core.Value) -> mo.ir.core.Value:
    """A score that may be negative."""
    return mo.math.tanh(x)


@pytest.mark.parametrize(
    ("p", "score", "backend"),
    sweep([(1, signed), (2, "softmax"), (3.5, signed), (2, signed), (INF, signed), (3.5, "sigmoid")]),
)
def test_division_by_an_lp_norm(p: float, score: object, backend: str) -> None:
    router = mo.Router(
        61,
        5,
        score=score,
        renormalize=mo.norm.lp(p),
        scale=2.5,
        gate_bias=True,
        outputs=("weights", "indices", "probs"),
    )
    gate_bias = 0.3 * torch.randn(61, generator=torch.Generator().manual_seed(5))
    got = compare(router, backend, 0.2 * normal(29, 61), gate_bias=gate_bias)
    norms = torch.linalg.vector_norm(got["weights"].double(), p, dim=-1)
    assert_close("norms", norms, torch.full((29,), 2.5), EXACT * 3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("p", [1, 2, 3.5, INF])
def test_an_lp_norm_of_zero_gives_zero_weights(p: float, backend: str) -> None:
    """And no gradient; beside such a row, scores so small that their squares would be 0 are divided as others are."""
    router = mo.Router(8, 3, score="sigmoid", renormalize=mo.norm.lp(p))
    logits = torch.full((2, 8), -INF)
    logits[1] = -75.0 - torch.arange(8.0) / 4
    got = run(mo.compile(router, backend=backend), logits.to(device_of(backend)))
    assert_zero("weights", got["weights"][0])
    assert_zero("gradient", got.gradients["logits"][0])
    exact = run(mo.compile(router, backend="reference"), logits.double())
    assert_close("weights", got["weights"][1], exact["weights"][1], 2e-5)  # exp(-75) in float32
    assert_close("gradient", got.gradients["logits"][1], exact.gradients["logits"][1], 2e-5)


@pytest.mark.parametrize("backend", COMPILED)
def test_one_weight_divided_by_its_lp_norm_is_its_sign(backend: str) -> None:
    layer = mo.compile(mo.Router(8, 1, score=signed, renormalize=mo.norm.lp(2), rank="score"), backend=backend)
    assert any("row.lp_normalize over one pick is the constant 1" in w for w in layer.warnings)
    logits = torch.tensor([[1.0] + [-1.0] * 7, [-3.0] * 8, [0.0] + [-2.0] * 7])
    logits = logits.to(device_of(backend)).requires_grad_()
    weights = layer(logits).weights
    assert weights.flatten().tolist() == [1.0, -1.0, 0.0]
    [gradient] = torch.autograd.grad(weights, logits, torch.ones_like(weights))
    assert_zero("gradient", gradient)


@pytest.mark.parametrize("p", [0, 0.5, -1, float("nan"), True, "two"])
def test_p_of_a_norm_is_checked(p: object) -> None:
    with pytest.raises(InputError, match=r"norm.lp: p must be a number >= 1, or inf, found"):
        mo.norm.lp(p)  # type: ignore[arg-type]


# Zero experts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_experts_are_columns_like_others(backend: str) -> None:
    router = mo.Router(
        12, 3, zero_experts=5, selection_bias=True, groups=17, groups_kept=9, group_score="max",
        outputs=("weights", "indices", "counts", "probs", "bitmap"),
    )  # fmt: skip
    assert (router.num_experts, router.columns) == (12, 17)
    got = run(
        mo.compile(router, backend=backend),
        normal(29, 17).to(device_of(backend)),
        bias=torch.zeros(17, device=device_of(backend)),
    )
    assert got["counts"].shape == (17,)
    assert got["probs"].shape == got.gradients["logits"].shape == (29, 17)
    assert got["bitmap"].shape == (29, 3)
    assert 0 < int((got["indices"] >= 12).sum()) < got["indices"].numel()
    same = mo.Router(17, 3, groups=17, groups_kept=9, group_score="max", selection_bias=True, outputs=router.outputs)
    assert same.module() == router.module()


def test_zero_experts_are_checked() -> None:
    assert mo.Router(4, 6, zero_experts=2).columns == 6
    with pytest.raises(InputError, match=r"between 1 and num_experts \+ zero_experts = 6, found top_k = 7"):
        mo.Router(4, 7, zero_experts=2)
    with pytest.raises(InputError, match="zero_experts must be an integer >= 0, found -1"):
        mo.Router(4, 2, zero_experts=-1)


def test_every_output_can_be_asked_for_together() -> None:
    """In any order of two, too: none depends on another being there."""
    from moesaic.ir.declare import OUTPUTS

    for outputs in [OUTPUTS, *itertools.permutations(OUTPUTS, 2)]:
        module = mo.Router(12, 3, outputs=outputs).module()
        assert module.entry.result_names == list(outputs)


@pytest.mark.parametrize("backend", COMPILED)
def test_a_mask_is_no_row_of_one_expert(backend: str) -> None:
    """[T, 1] both: what is selected by a mask stays a number of the token."""
    router = mo.compile(mo.Router(1, 1, outputs=("weights", "logsumexp")), backend=backend)
    logits, mask = torch.linspace(-2, 3, 7)[:, None], torch.arange(7) % 3 > 0
    result = router(logits.to(device_of(backend)), token_mask=mask.to(device_of(backend)))
    torch.testing.assert_close(result.logsumexp.cpu(), torch.where(mask, logits[:, 0], 0.0))
    assert torch.equal(result.weights.cpu(), mask[:, None].float())

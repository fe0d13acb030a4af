"""Whole layers: the product that makes logits, router, experts and shared expert as one function.

Values and gradients against the reference in float64, on the emulator and on a GPU; against the blocks of open models;
and what a user sees of a compiled layer. Sizes are odd or prime where that matters, cotangents are random.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from routing import COMPILED, device_of

import moesaic as mo
from moesaic.ir.errors import InputError, InputTypeError
from moesaic.ir.types import DType
from moesaic.runtime.moe import CompiledMoE
from moesaic.runtime.program import program_of

Tensors = dict[str, torch.Tensor]

EXACT = 2.0**-19
"""Of the largest value, for float32: three products after one another, and a router between."""

ROUNDED = 2.0**-6
"""Of the largest value, for bf16: every operand of a product is rounded to 2^-9."""

# Sizes are those of tests/test_experts.py, so that kernels which do not depend on the router are built once.
E, H, INNER, K = 5, 24, 16, 3
EXPERTS = mo.Experts(E, H, INNER)
SOFTMAX = mo.Router(E, K, renormalize=True)
DEEPSEEK = mo.Router(
    6, 3, score="sigmoid", selection_bias=True, groups=3, groups_kept=2, renormalize=True, renorm_eps=1e-20, scale=2.5
)
LOSSES = {"balance": mo.LoadBalance(coef=0.1), "z": mo.ZLoss(coef=0.01)}

LAYERS: dict[str, mo.MoE] = {
    "plain": mo.MoE(SOFTMAX, EXPERTS, outputs=("hidden", "counts", "logits")),
    "losses": mo.MoE(replace(SOFTMAX, losses=LOSSES), EXPERTS),
    "deepseek": mo.MoE(DEEPSEEK, mo.Experts(6, H, INNER), shared=mo.SharedExpert(20)),
    "gated": mo.MoE(SOFTMAX, EXPERTS, shared=mo.SharedExpert(150, gate=True), residual=True),
    "mean": mo.MoE(
        mo.Router(E, K, order="topk_then_score", gate_bias=True, expert_scale=True),
        mo.Experts(E, H, INNER, weight_on="input", bias=True),
        shared=mo.SharedExpert(17, gated=False, activation="relu2"),
        mean=True,
    ),
    "local": mo.MoE(mo.Router(2 * E, K), EXPERTS, outputs=("hidden",)),
}


def drawn(layer: mo.MoE, tokens: int, dtype: torch.dtype, *, seed: int = 0) -> Tensors:
    """Inputs whose products have values near 1."""
    g = torch.Generator().manual_seed(seed)
    made: Tensors = {}
    for argument in layer.module(DType.F32).entry.arguments:
        sizes = [d if isinstance(d, int) else tokens for d in argument.type.shape]
        scale = 1.0 if argument.name in ("x", "residual") else sizes[-1] ** -0.5 if len(sizes) > 1 else 0.3
        values = scale * torch.randn(sizes, generator=g, dtype=torch.float64)
        of_router = argument.name in ("bias", "gate_bias", "expert_scale")
        made[argument.name] = values.to(torch.float32 if of_router else dtype)
    return made


def run(layer: CompiledMoE, given: Tensors, cotangent: torch.Tensor, device: str) -> Tensors:
    """Results, and the gradient of every input that has one."""
    inputs = {n: t.detach().to(device).requires_grad_(t.is_floating_point() and n != "bias") for n, t in given.items()}
    result = layer(**inputs)
    if isinstance(result, torch.Tensor):
        made: Tensors = {"hidden": result}
    else:
        made = {n: getattr(result, n) for n in result._fields if n != "losses"}
        made |= {f"loss {n}": v for n, v in getattr(result, "losses", {}).items()}
    total = (made["hidden"] * cotangent.to(device, made["hidden"].dtype)).sum()
    for number, (name, value) in enumerate(made.items()):
        if name.startswith("loss") or name == "logits":  # each with a cotangent of its own
            total = total + (value * torch.linspace(-1, 1, value.numel(), device=device).view_as(value)).sum() * number
            total = total + value.sum() * 0.7
    total.backward()
    made = {n: v.detach().cpu() for n, v in made.items()}
    for name, tensor in inputs.items():
        if tensor.requires_grad:
            assert tensor.grad is not None, f"no gradient of {name}"
            made[f"d {name}"] = tensor.grad.cpu()
    return made


def exact(layer: mo.MoE, given: Tensors, cotangent: torch.Tensor) -> Tensors:
    """The same by the reference, in float64."""
    wide = {n: t.double() if t.is_floating_point() and n not in _OF_ROUTER else t for n, t in given.items()}
    return run(mo.compile(replace(layer, dtype=None), backend="reference"), wide, cotangent.double(), "cpu")


_OF_ROUTER = ("bias", "gate_bias", "expert_scale", "router_scale")


def check(found: Tensors, wanted: Tensors, allowed: float) -> None:
    assert found.keys() == wanted.keys()
    for name, right in wanted.items():
        if not right.is_floating_point():
            assert torch.equal(found[name], right), name
            continue
        largest = right.abs().max().item() if right.numel() else 0.0
        error = (found[name].double() - right).abs().max().item() if right.numel() else 0.0
        assert error <= allowed * largest, f"{name}: off by {error:.3g} where the largest is {largest:.3g}"


def cotangent_for(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("name", [n for n in LAYERS if n not in ("losses", "local")])  # which others below run
def test_values_and_gradients(name: str, backend: str) -> None:
    layer = LAYERS[name]
    given, cotangent = drawn(layer, 13, torch.float32), cotangent_for(13, H)
    check(
        run(mo.compile(layer, backend=backend), given, cotangent, device_of(backend)),
        exact(layer, given, cotangent),
        EXACT,
    )


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param("plain", "emulate", marks=pytest.mark.emulate),
        *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in ("plain", "gated")),
    ],
)
def test_bf16(name: str, backend: str) -> None:
    layer = LAYERS[name]
    given, cotangent = drawn(layer, 29, torch.bfloat16), cotangent_for(29, H)
    found = run(mo.compile(layer, backend=backend), given, cotangent, device_of(backend))
    assert found["hidden"].dtype == found["d x"].dtype == torch.bfloat16
    check(found, exact(layer, given, cotangent), ROUNDED)


def test_case_62_logits_of_bf16_are_added_up_in_float32() -> None:
    """Products of bf16 operands are exact in float32, so that logits are as far off as their sum, not as bf16."""
    layer = replace(LAYERS["plain"], outputs=("logits", "indices"))
    given = drawn(layer, 64, torch.bfloat16)
    by_kernel = mo.compile(layer, backend="reference")(**given)
    wide = mo.compile(layer, backend="reference")(**{n: t.double() for n, t in given.items()})
    assert by_kernel.logits.dtype == torch.float32
    assert (by_kernel.logits - wide.logits).abs().max() < 1e-6
    assert torch.equal(by_kernel.indices, wide.indices)
    rounded = mo.compile(replace(layer, logits_dtype="bf16"), backend="reference")(**given)
    assert rounded.logits.dtype == torch.bfloat16
    assert torch.equal(rounded.logits, by_kernel.logits.bfloat16())


@pytest.mark.parametrize("backend", COMPILED)
def test_token_mask(backend: str) -> None:
    """A masked token gives its residual alone, and has no share in counts, losses or gradients, whatever it holds."""
    layer = mo.MoE(replace(SOFTMAX, losses=LOSSES), EXPERTS, residual=True, outputs=("hidden", "counts", "indices"))
    given, cotangent = drawn(layer, 13, torch.float32), cotangent_for(13, H)
    mask = torch.arange(13) % 3 != 1
    device = device_of(backend)
    compiled = mo.compile(layer, backend=backend)
    found = run(compiled, {**given, "token_mask": mask}, cotangent, device)
    few = {n: t[mask] if n in ("x", "residual") else t for n, t in given.items()}
    check(
        {n: t[mask] if n in ("hidden", "indices", "d x", "d residual") else t for n, t in found.items()},
        exact(layer, few, cotangent[mask]),
        EXACT,
    )
    assert torch.equal(found["hidden"][~mask], given["residual"][~mask])
    assert (found["indices"][~mask] == -1).all()
    assert not found["d x"][~mask].any()


@pytest.mark.parametrize("backend", COMPILED)
def test_few_tokens(backend: str) -> None:
    layer = LAYERS["losses"]
    compiled = mo.compile(layer, backend=backend)
    for tokens in (0, 1):
        given, cotangent = drawn(layer, tokens, torch.float32), cotangent_for(tokens, H)
        found = run(compiled, given, cotangent, device_of(backend))
        check(found, exact(layer, given, cotangent), EXACT)
        assert tokens or not any(v.any() for n, v in found.items() if n.startswith("d "))


@pytest.mark.parametrize("backend", COMPILED)
def test_ranks_add_up(backend: str) -> None:
    """The first experts on one rank, the others, with their ids moved, on another: together they are the whole."""
    whole = mo.MoE(mo.Router(2 * E, K), mo.Experts(2 * E, H, INNER), outputs=("hidden", "indices", "weights"))
    given = drawn(whole, 13, torch.float32)
    device = device_of(backend)
    given = {n: t.to(device) for n, t in given.items()}
    both = mo.compile(whole, backend=backend)(**given)
    first = {**given, "gate_up_proj": given["gate_up_proj"][:E], "down_proj": given["down_proj"][:E]}
    part = mo.compile(LAYERS["local"], backend=backend)(**first)
    rest = mo.compile(EXPERTS, backend=backend)(
        given["x"], both.indices - E, both.weights, given["gate_up_proj"][E:], given["down_proj"][E:]
    )
    assert (part - both.hidden).abs().max() > 0.1
    torch.testing.assert_close(part + rest, both.hidden, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", COMPILED)
def test_main_grads(backend: str) -> None:
    """Of the product that makes logits and of the shared expert, too."""
    layer = LAYERS["gated"]
    given, cotangent = drawn(layer, 13, torch.float32), cotangent_for(13, H)
    device = device_of(backend)
    names = ("gate_weight", "down_proj", "shared_gate_up_proj", "shared_gate")
    mains = {n: torch.ones(given[n].shape, device=device) for n in names}
    inputs = {n: t.detach().to(device).requires_grad_() for n, t in given.items()}
    result = mo.compile(layer, backend=backend)(**inputs, main_grads=mains)
    result.hidden.backward(cotangent.to(device, torch.float32))
    wanted = exact(layer, given, cotangent)
    found = {
        f"d {n}": mains[n].cpu() - 1 if n in names else t.grad.cpu()
        for n, t in inputs.items()
        if n in names or t.grad is not None
    }
    check(found, {n: t for n, t in wanted.items() if n.startswith("d ")}, EXACT)
    assert all(inputs[n].grad is None for n in names)


# Open models ----------------------------------------------------------------------------------------------------------


def _swiglu(block: Any, name: str, prefix: str) -> Tensors:
    part = getattr(block, name)
    return {f"{prefix}{n}": getattr(part, n).weight for n in ("gate_proj", "up_proj", "down_proj")}


def _experts(block: Any) -> Tensors:
    return {
        "gate_weight": block.gate.weight,
        "gate_up_proj": block.experts.gate_up_proj,
        "down_proj": block.experts.down_proj,
    }


@dataclass(frozen=True)
class Block:
    """A block of a family, and how it is declared."""

    model: str
    config: str
    block: str
    options: Mapping[str, Any]
    layer: mo.MoE
    tensors: Callable[[Any], Tensors]


SIZES = {"num_experts_per_tok": 3, "hidden_size": 20, "moe_intermediate_size": 6}
BLOCKS = [
    Block(
        "qwen3_moe",
        "Qwen3MoeConfig",
        "Qwen3MoeSparseMoeBlock",
        {**SIZES, "num_experts": 8, "norm_topk_prob": True},
        mo.MoE(mo.Router(8, 3, renormalize=True), mo.Experts(8, 20, 6)),
        _experts,
    ),
    Block(
        "qwen2_moe",
        "Qwen2MoeConfig",
        "Qwen2MoeSparseMoeBlock",
        {**SIZES, "num_experts": 8, "shared_expert_intermediate_size": 10},
        mo.MoE(mo.Router(8, 3), mo.Experts(8, 20, 6), shared=mo.SharedExpert(10, separate=True, gate=True)),
        lambda b: {**_experts(b), **_swiglu(b, "shared_expert", "shared_"), "shared_gate": b.shared_expert_gate.weight},
    ),
    Block(
        "deepseek_v3",
        "DeepseekV3Config",
        "DeepseekV3MoE",
        {**SIZES, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 2},
        mo.MoE(
            mo.Router.preset("deepseek_v3", num_experts=8, top_k=3, groups=4, groups_kept=2),
            mo.Experts(8, 20, 6),
            shared=mo.SharedExpert(12, separate=True),
        ),
        lambda b: {
            **_experts(b),
            **_swiglu(b, "shared_experts", "shared_"),
            "bias": b.gate.e_score_correction_bias.float(),
        },
    ),
    Block(
        "cohere2_moe",
        "Cohere2MoeConfig",
        "Cohere2MoeSparseMoeBlock",
        {
            "num_experts_per_tok": 3,
            "hidden_size": 20,
            "intermediate_size": 6,
            "num_experts": 8,
            "num_shared_experts": 2,
            "shared_expert_combination_strategy": "average",
            "expert_selection_fn": "softmax",
        },
        mo.MoE(
            mo.Router(8, 3, order="topk_then_score"),
            mo.Experts(8, 20, 6),
            shared=mo.SharedExpert(12, separate=True),
            mean=True,
        ),
        lambda b: {**_experts(b), **_swiglu(b, "shared_experts", "shared_")},
    ),
    Block(
        "hy_v3",
        "HYV3Config",
        "HYV3MoE",
        {
            **SIZES,
            "num_experts": 8,
            "num_local_experts": 8,
            "num_shared_experts": 1,
            "enable_moe_fp32_combine": True,
            "router_scaling_factor": 2.5,
        },
        mo.MoE(
            mo.Router(8, 3, score="sigmoid", selection_bias=True, renormalize=True, renorm_eps=1e-20, scale=2.5),
            mo.Experts(8, 20, 6),
            shared=mo.SharedExpert(6, separate=True),
        ),
        lambda b: {
            **_experts(b),
            **_swiglu(b, "shared_experts", "shared_"),
            "bias": b.e_score_correction_bias.float(),
        },
    ),
]


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("family", BLOCKS, ids=lambda f: f.model)
def test_blocks_of_open_models(family: Block) -> None:
    try:
        parts = [
            importlib.import_module(f"transformers.models.{family.model}.{p}_{family.model}")
            for p in ("configuration", "modeling")
        ]
    except ModuleNotFoundError:
        pytest.skip(f"this transformers has no {family.model}")
    block = getattr(parts[1], family.block)(getattr(parts[0], family.config)(**family.options)).eval()
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in (*block.parameters(), *block.buffers()):
            tensor.copy_(0.5 * torch.randn(tensor.shape, generator=g))
    x = torch.randn(2, 7, 20, generator=g)
    cotangent = torch.randn(2, 7, 20, generator=g)

    theirs = x.clone().requires_grad_()
    right = block(theirs)
    right = right[0] if isinstance(right, tuple) else right
    right.backward(cotangent)

    given = {
        n: t.detach().clone().requires_grad_(t.requires_grad and n != "bias") for n, t in family.tensors(block).items()
    }
    ours = x.clone().requires_grad_()
    found = mo.compile(family.layer, backend="reference")(ours, **given).hidden
    found.backward(cotangent)
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3)
    for name, tensor in family.tensors(block).items():
        if tensor.requires_grad:
            assert tensor.grad is not None and tensor.grad.any()
            torch.testing.assert_close(given[name].grad, tensor.grad, rtol=1e-3, atol=1e-3, msg=name)


# What a user sees -----------------------------------------------------------------------------------------------------


@pytest.mark.emulate
def test_saved_for_backward_is_little() -> None:
    """x and the weights are the caller's, and so are results. Beside them: the dispatch, logits, picks and their
    weights, and h."""
    layer = mo.MoE(SOFTMAX, EXPERTS)
    given = {n: t.requires_grad_() for n, t in drawn(layer, 13, torch.float32).items()}
    kept: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)
        return t

    compiled = mo.compile(layer, backend="emulate")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = compiled(**given)
    callers = {t.data_ptr() for t in (*given.values(), *result)}
    saved = [t for t in kept if t.data_ptr() not in callers]
    floats = sorted(tuple(t.shape) for t in saved if t.is_floating_point())
    assert floats == [(13, K), (13, E), (13 * K, 2 * INNER)]  # weights, logits, h
    assert compiled.memory(13).saved == sum(t.numel() * t.element_size() for t in saved)


def test_leading_dimensions_are_kept() -> None:
    layer = LAYERS["gated"]
    given = drawn(layer, 12, torch.float32)
    flat = mo.compile(layer, backend="reference")(**given)
    given["x"], given["residual"] = given["x"].view(3, 4, H), given["residual"].view(3, 4, H)
    found = mo.compile(layer, backend="reference")(**given)
    assert found.hidden.shape == (3, 4, H)
    assert torch.equal(found.hidden.view(12, H), flat.hidden)


def test_matrices_go_by_place_or_by_name() -> None:
    layer = LAYERS["deepseek"]
    assert layer.parameters == (
        "gate_weight",
        "gate_up_proj",
        "down_proj",
        "shared_gate_up_proj",
        "shared_down_proj",
    )
    given = drawn(layer, 4, torch.float32)
    compiled = mo.compile(layer, backend="reference")
    by_name = compiled(**given)
    by_place = compiled(given["x"], *(given[n] for n in layer.parameters), bias=given["bias"])
    assert torch.equal(by_name.hidden, by_place.hidden)
    assert by_name._fields == ("hidden", "counts")
    with pytest.raises(InputTypeError, match=r"given twice"):
        compiled(given["x"], given["gate_weight"], **{n: t for n, t in given.items() if n != "x"})
    with pytest.raises(InputTypeError, match=r"missing.*bias|bias.*missing|'bias'"):
        compiled(**{n: t for n, t in given.items() if n != "bias"})
    with pytest.raises(InputTypeError, match="shared_down_proj"):
        compiled(**given, shared_down_prj=given["x"])
    with pytest.raises(InputError, match="gate_weight"):
        compiled(**{**given, "gate_weight": given["gate_weight"][:, :-1]})


def test_losses_come_as_a_mapping() -> None:
    layer = LAYERS["losses"]
    result = mo.compile(layer, backend="reference")(**drawn(layer, 9, torch.float32))
    assert list(result.losses) == ["balance", "z"]
    assert result._fields == ("hidden", "counts", "losses")


def test_autocast_decides_the_type() -> None:
    """Case 53: a product's operands are cast, what a router computes stays in float32."""
    layer = replace(LAYERS["deepseek"], outputs=("hidden", "weights", "logits"))
    given = drawn(layer, 9, torch.float32)
    compiled = mo.compile(layer, backend="reference")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = compiled(**given)
    assert (found.hidden.dtype, found.weights.dtype, found.logits.dtype) == (
        torch.bfloat16,
        torch.float32,
        torch.float32,
    )
    cast = {n: t if n == "bias" else t.bfloat16() for n, t in given.items()}
    assert torch.equal(found.hidden, compiled(**cast).hidden)


def test_copies_and_pickles() -> None:
    layer = LAYERS["gated"]
    given = drawn(layer, 5, torch.float32)
    compiled = mo.compile(layer, backend="reference")
    right = compiled(**given).hidden
    for copied in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        assert torch.equal(copied(**given).hidden, right)


def test_what_has_no_meaning_is_refused() -> None:
    router, experts = mo.Router(5, 2), mo.Experts(5, 16, 8)
    for wrong, message in (
        ({"mean": "x"}, "mean must be True or False, found 'x'"),
        ({"residual": 2}, "residual must be True or False, found 2"),
        ({"outputs": "hidden"}, "outputs must be a tuple of names, found 'hidden'"),
        ({"name": "é"}, "name must be an identifier of ASCII letters, found 'é'"),
    ):
        with pytest.raises(InputError, match=message):
            mo.MoE(router, experts, **wrong)
    for flag in ("gate", "transposed"):
        with pytest.raises(InputError, match=f"{flag} must be True or False, found 'x'"):
            mo.SharedExpert(8, **{flag: "x"})
    for wrong, message in (
        ({"backend": 3}, "unknown backend 3"),
        ({"passes": 3}, "passes must be a text, found int"),
        ({"target": 3}, "target must be a text, found int"),
        ({"allow_tf32": "yes"}, "allow_tf32 must be True or False, found 'yes'"),
        ({"tune": 1}, "tune must be True or False, found 1"),
    ):
        with pytest.raises((InputError, InputTypeError), match=message):
            mo.compile(router, **wrong)
    with pytest.raises(InputTypeError, match="router must be a Router, found Experts"):
        mo.MoE(EXPERTS, EXPERTS)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="picks among 5 experts, found 6"):
        mo.MoE(SOFTMAX, mo.Experts(6, H, INNER))
    with pytest.raises(InputError, match="mean"):
        mo.MoE(SOFTMAX, EXPERTS, mean=True)
    with pytest.raises(InputError, match="shared_experts and zero_experts"):
        mo.MoE(mo.Router(5, 3, zero_experts=2), EXPERTS)
    with pytest.raises(InputError, match=r"outputs.*'hiden'"):
        mo.MoE(SOFTMAX, EXPERTS, outputs=("hiden",))
    with pytest.raises(InputError, match="logits_dtype"):
        mo.MoE(SOFTMAX, EXPERTS, logits_dtype="fp8")
    with pytest.raises(InputError, match="intermediate"):
        mo.SharedExpert(0)
    with pytest.raises(InputError, match="declared for bf16"):
        layer = replace(LAYERS["plain"], dtype="bf16")
        mo.compile(layer, backend="reference")(**drawn(layer, 3, torch.float32))


def test_one_row_program_and_no_more_products_than_needed() -> None:
    """Of forward: logits, router, dispatch in three, two products, combine. Backward repeats no product."""
    forward, backward = _lowered(LAYERS["plain"])
    assert _kernels(forward) == ["product", "row_program", *DISPATCH, "product", "product", "combine"]
    assert backward.count("= kernel.product") == 3  # two of experts, one for logits
    assert backward.count("= kernel.wgrad") == 3
    assert backward.count("= kernel.row_program") == 1
    assert "row.topk" not in backward


@pytest.mark.parametrize(
    ("experts", "tile"),
    [(64, "MmaTile  rows=128  columns=64"), (128, "schedule=pingpong  rows=128  columns=128"),
     (256, "schedule=cooperative  rows=128  columns=256")],
)  # fmt: skip
def test_a_gate_has_as_many_tiles_as_rows_allow(experts: int, tile: str) -> None:
    """Of 256 rows and 128 columns, 16384 tokens would be 64 tiles: half of the multiprocessors would do nothing."""
    layer = mo.MoE(mo.Router(experts, 8), mo.Experts(experts, 256, 128), outputs=("hidden",), dtype="bf16")
    assert re.search(f"tile=.*{tile}", mo.compile(layer, target="sm_90a").layer().kernels["moe_gate_weight"].source)


def test_sums_that_meet_their_row_are_a_routers() -> None:
    """One pick over itself is 1, and backward has no op that only routers have, but sums over rows, as experts do."""
    router = mo.Router(E, 1, score="sigmoid", renormalize=True)
    _, backward = _lowered(mo.MoE(router, EXPERTS, outputs=("hidden", "score_sums")))
    assert _kernels(backward)[0] == "row_program" and "row.sum" in backward and "kernel.slot_rows" not in backward


@pytest.mark.parametrize("weight_on", ["input", "middle", "output"])
@pytest.mark.parametrize(("hidden", "inner"), [(1, 1), (1, INNER), (H, 1), (H, INNER)])
def test_one_expert(hidden: int, inner: int, weight_on: str) -> None:
    """Its weights come from no pick, but lie in memory like others; a row of one column is its own sum."""
    given = {"balance": mo.LoadBalance(num_tokens="given")}  # the gradient of a number of all tokens, and of no row
    for options in ({}, {"renormalize": True}, {"losses": given}):
        router = mo.Router(1, 1, score="sigmoid", **options)
        program = program_of(mo.MoE(router, mo.Experts(1, hidden, inner, weight_on=weight_on)).module(DType.F32))
        for kind in ("forward", "training", "backward"):
            symbols = [k.symbol for k in program.executable(kind, "sm_90a", ()).kernels]
            assert [s for s in symbols if s.endswith(("down_proj", "combine"))], symbols


DISPATCH = ["dispatch_count", "dispatch_scan", "dispatch_scatter"]


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("options", [{"router_scale": True}, {"gate_bias": True, "renormalize": True}], ids=str)
def test_one_expert_with_inputs_of_the_router(options: dict[str, bool], backend: str) -> None:
    """No row is left to rank: what is computed from numbers and vectors is beside products, and by rows of tokens."""
    layer = mo.MoE(mo.Router(1, 1, score="sigmoid", **options), mo.Experts(1, H, INNER), outputs=("hidden", "weights"))
    given, cotangent = drawn(layer, 13, torch.float32), cotangent_for(13, H)
    found = run(mo.compile(layer, backend=backend), given, cotangent, device_of(backend))
    wanted = exact(layer, given, cotangent)
    assert found["d gate_up_proj"].any()
    if "renormalize" in options:  # a weight that is 1 whatever the logits are
        for name in ("d gate_weight", "d gate_bias"):
            assert found.pop(name).abs().max() < 1e-6 > wanted.pop(name).abs().max()
    check(found, wanted, EXACT)


def _lowered(layer: mo.MoE) -> tuple[str, str]:
    """Forward and backward, as kernels."""
    forward, backward = (
        mo.compile(layer, backend="reference").layer(dtype="bf16").stages["choose-saved"].split("moe.func")[1:]
    )
    return forward, backward


def _kernels(function: str) -> list[str]:
    found = [line.split("kernel.")[1].split()[0] for line in function.splitlines() if " = kernel." in line]
    return [kernel for kernel in found if kernel != "ticket"]


def test_picks_are_counted_once() -> None:
    """The counts of a router are a dispatch's, also where a loss needs them, which then comes after the dispatch."""
    forward, backward = _lowered(LAYERS["losses"])
    products = ["product", "product", "combine"]
    assert _kernels(forward) == ["product", "row_program", *DISPATCH, "col_finish", *products]
    assert "col.count" not in forward + backward and "saved_counts" not in forward + backward
    # Where a dispatch counts less than the router, or not the same experts, the router counts, too.
    for layer in (
        replace(LAYERS["plain"], experts=mo.Experts(E, H, INNER, capacity=1.5)),
        replace(LAYERS["local"], outputs=("hidden", "counts")),
    ):
        forward, _ = _lowered(layer)
        assert "col.count" in forward
        assert _kernels(forward)[:6] == ["product", "row_program", "col_finish", *DISPATCH]


@pytest.mark.gpu
def test_captured_in_a_graph_after_warmup() -> None:
    layer = replace(LAYERS["gated"], router=replace(SOFTMAX, losses=LOSSES))
    compiled = mo.compile(layer)
    compiled.warmup("cuda", dtype="fp32")
    given = {n: t.cuda().requires_grad_() for n, t in drawn(layer, 64, torch.float32).items()}
    cotangent = cotangent_for(64, H).float().cuda()

    def step() -> list[torch.Tensor]:
        result = compiled(**given)
        total = (result.hidden * cotangent).sum() + sum(result.losses.values())
        return [result.hidden.detach(), *torch.autograd.grad(total, list(given.values()))]

    # Backward joins the stream that a leaf was first used on as long as anything recorded there lives. On a stream of
    # its own, and detached, none does: the default one must not wait for a capture.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        right = [t.clone() for t in step()]
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for tensor in found:
        tensor.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(found, right, strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_no_synchronisation() -> None:
    layer = LAYERS["losses"]
    compiled = mo.compile(layer)
    given = {n: t.cuda().requires_grad_() for n, t in drawn(layer, 64, torch.float32).items()}
    compiled(**given).hidden.sum().backward()  # prepares everything
    torch.cuda.set_sync_debug_mode("error")
    try:
        compiled(**given).hidden.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Backward of what forward has kept ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("mean", [False, True])
def test_products_again_beside_a_shared_expert_with_a_gate(mean: bool, backend: str) -> None:
    """Its logit is kept: backward of it waits for the product that has to be computed again for the rest."""
    layer = mo.MoE(mo.Router(5, 2), mo.Experts(5, 16, 8), shared=mo.SharedExpert(8, gate=True), mean=mean)
    given = drawn(layer, 13, torch.float32)
    cotangent = cotangent_for(13, 16)
    wanted = exact(layer, given, cotangent)
    for recompute in (None, "h"):
        check(
            run(mo.compile(layer, backend=backend, recompute=recompute), given, cotangent, device_of(backend)),
            wanted,
            1e-4,
        )


def test_what_nobody_picks_may_hold_anything() -> None:
    """In a graph of torch.compile as well, where the reference has all rows go through all experts."""
    given = {n: t.float() for n, t in drawn(mo.MoE(mo.Router(3, 1), mo.Experts(3, 16, 8)), 7, torch.float32).items()}
    ids = torch.tensor([[0], [2]] * 3 + [[0]])
    matrices = [given[n].index_fill(0, torch.tensor(1), float("inf")) for n in ("gate_up_proj", "down_proj")]
    layer = mo.compile(mo.Experts(3, 16, 8), backend="reference")
    found = []
    for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        x = given["x"].clone().requires_grad_()
        y = call(x, ids, torch.ones(7, 1), *matrices)
        y.square().sum().backward()
        assert x.grad is not None and x.grad.isfinite().all() and x.grad.any()
        found.append(x.grad)
    torch.testing.assert_close(*found)


SOME = {
    "one expert": (mo.MoE(mo.Router(1, 1), mo.Experts(1, 16, 8), outputs=("hidden", "weights")), "weights", None),
    "scores": (
        mo.MoE(
            mo.Router(3, 2, score="sigmoid", losses={"z": mo.ZLoss(coef=0.1)}),
            mo.Experts(3, 16, 8),
            outputs=("indices", "scores"),
        ),
        "scores",
        "h",
    ),
}


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("name", SOME)
def test_some_cotangents_where_matrices_are_frozen(name: str, backend: str) -> None:
    """What forward has kept for all cotangents may be too little for some alone: the others' are zeros then."""
    layer, result, recompute = SOME[name]
    given = drawn(layer, 7, torch.float32)
    found = []
    for how, device in ((backend, device_of(backend)), ("reference", "cpu")):
        inputs = {n: t.to(device, copy=True) for n, t in given.items()}
        inputs["x"].requires_grad_()
        value = getattr(mo.compile(layer, backend=how, recompute=recompute)(**inputs), result)
        value.backward(torch.randn(value.shape, generator=torch.Generator().manual_seed(3)).to(device))
        assert inputs["x"].grad is not None
        found.append(inputs["x"].grad.cpu())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert found[1].any() == (name != "one expert")


@pytest.mark.parametrize("backend", ["reference", *COMPILED])
def test_experts_of_ones_own_with_changing_numbers_of_slots(backend: str) -> None:
    """As many tokens, and more or fewer slots from call to call."""
    g, device = torch.Generator().manual_seed(4), device_of(backend)
    ids = torch.randint(0, 3, (4, 2), generator=g).to(device)
    for align in (1, 64, 16, 1):
        dispatched = mo.dispatch(ids, 3, align=align, backend=backend)
        x = torch.randn(len(dispatched.tokens), 8, generator=g).to(device).requires_grad_()
        weights = torch.rand(4, 2, generator=g).to(device)
        y = mo.combine(x, dispatched, weights, backend=backend)
        cotangent = torch.randn(4, 8, generator=g).to(device)
        y.backward(cotangent)
        slots, wanted = dispatched.slots.long(), torch.zeros_like(x)
        wanted.index_put_((slots.flatten(),), (weights[..., None] * cotangent[:, None]).flatten(0, 1), accumulate=True)
        torch.testing.assert_close(y.detach(), (weights[..., None] * x.detach()[slots]).sum(1))
        torch.testing.assert_close(x.grad, wanted)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda ids, d, x: mo.dispatch(ids, 3, capacity="1"),
            "capacity must be a finite number > 0, or None, found '1'",
        ),
        (lambda ids, d, x: mo.dispatch(ids, 3, align=True), "align must be one of 1, 16, 64, 128, found True"),
        (lambda ids, d, x: mo.dispatch(ids, 3, align=16.0), "align must be one of 1, 16, 64, 128, found 16.0"),
        (lambda ids, d, x: mo.dispatch(ids, 3, capacity=1.0, pad=1), "pad must be True or False, found 1"),
        (lambda ids, d, x: mo.combine(x, None), "dispatched must be what dispatch gave, found NoneType"),
        (lambda ids, d, x: mo.combine(None, d), "x must be a tensor, found NoneType"),
        (lambda ids, d, x: mo.combine(x[:, :0], d), r"x must have shape \[8, n\] with n >= 1, found \[8, 0\]"),
        (lambda ids, d, x: mo.combine(x, d._replace(picks=d.picks[1:])), r"picks must have shape \[8\].* found \[7\]"),
    ],
)
def test_dispatches_and_combines_that_have_no_meaning(call: Callable[..., Any], message: str) -> None:
    ids = torch.zeros(4, 2, dtype=torch.int64)
    with pytest.raises((InputError, InputTypeError), match=message):
        call(ids, mo.dispatch(ids, 3), torch.zeros(8, 4))

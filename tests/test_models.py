"""Routers of open models: what a declared router computes is what the model's own module in `transformers` computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from families import (
    TOKENS,
    Family,
    assert_routes_like_the_model,
    correction_of,
    given_bias,
    of_module,
    read_llama4,
    rows_that_a_bias_changes,
)
from routing import (
    BACKENDS,
    EXACT,
    GRADIENT,
    TIE,
    assert_close,
    by_expert,
    cotangent,
    device_of,
    example,
    near_cut,
    selection,
)

import moesaic as mo

pytest.importorskip("transformers")


def declared(**arguments: object) -> Callable[[], mo.Router]:
    return lambda: mo.Router(**arguments)


def of_example(name: str) -> Callable[[], mo.Router]:
    return lambda: example(name).router


FAMILIES = {
    "mixtral": Family("mixtral", "MixtralConfig", "MixtralTopKRouter", of_example("mixtral")),
    "qwen3_moe": Family(
        "qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeTopKRouter", of_example("qwen3_moe"), (("norm_topk_prob", True),)
    ),
    "qwen3_moe-not-divided": Family(
        "qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeTopKRouter", declared(num_experts=128, top_k=8)
    ),
    "olmoe": Family("olmoe", "OlmoeConfig", "OlmoeTopKRouter", declared(num_experts=64, top_k=8)),
    "deepseek_v3": Family("deepseek_v3", "DeepseekV3Config", "DeepseekV3TopkRouter", of_example("deepseek_v3")),
    "glm4_moe": Family(
        "glm4_moe",
        "Glm4MoeConfig",
        "Glm4MoeTopkRouter",
        declared(
            num_experts=128,
            top_k=8,
            score="sigmoid",
            selection_bias=True,
            renormalize=True,
            renorm_eps=1e-20,
            scale=1.5,
        ),
        (("routed_scaling_factor", 1.5),),
    ),
    "gpt_oss": Family("gpt_oss", "GptOssConfig", "GptOssTopKRouter", of_example("gpt_oss")),
    "minimax_m2": Family(
        "minimax_m2",
        "MiniMaxM2Config",
        "MiniMaxM2TopKRouter",
        declared(num_experts=256, top_k=8, score="sigmoid", selection_bias=True, renormalize=True),
        read=given_bias,
    ),
    "ernie4_5_moe": Family(
        "ernie4_5_moe",
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeTopKRouter",
        declared(num_experts=64, top_k=6, selection_bias=True, renormalize=mo.norm.sum(min=1e-12)),
    ),
    "llama4": Family("llama4", "Llama4TextConfig", "Llama4Router", of_example("llama4"), read=read_llama4),
}

SIZES = {
    "mixtral": (8, 2),
    "qwen3_moe": (128, 8),
    "qwen3_moe-not-divided": (128, 8),
    "olmoe": (64, 8),
    "deepseek_v3": (256, 8),
    "glm4_moe": (128, 8),
    "gpt_oss": (128, 4),
    "minimax_m2": (256, 8),
    "ernie4_5_moe": (64, 6),
    "llama4": (16, 1),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_routes_like_the_model(name: str, backend: str) -> None:
    family = FAMILIES[name]
    router = family.router()
    assert (router.num_experts, router.top_k) == SIZES[name]
    assert_routes_like_the_model(family, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dense_weights_like_llama4(backend: str) -> None:
    """Llama 4 takes the sigmoid of logits that are -inf where not picked: exactly 0 there, and so are our `probs`."""
    family = FAMILIES["llama4"]
    router = family.router()
    wanted = of_module(family, family.build(), None)
    logits = wanted.logits.to(device_of(backend)).requires_grad_()
    r = mo.compile(router, backend=backend)(logits)
    assert not near_cut(router, selection(router, wanted.logits), TIE).any()
    assert torch.equal(r.probs.cpu() == 0, ~wanted.picked)
    assert_close("probs", r.probs, wanted.dense, EXACT)
    (d_logits,) = torch.autograd.grad(r.probs, logits, cotangent(r.probs, seed=9))
    assert_close("gradient of the logits", d_logits, wanted.d_logits, GRADIENT)


def test_selection_biases_change_picks() -> None:
    """Else a router without the bias would pass, too."""
    for name in ("deepseek_v3", "glm4_moe", "minimax_m2", "ernie4_5_moe"):
        assert rows_that_a_bias_changes(FAMILIES[name]) > TOKENS // 2, name


def test_a_wrong_router_is_found_out() -> None:
    """The comparison sees a missing scale, a missing division and missing groups."""
    family = FAMILIES["deepseek_v3"]
    module = family.build()
    correction = correction_of(family, module)
    wanted = of_module(family, module, correction)
    arguments = {"num_experts": 256, "top_k": 8, "score": "sigmoid", "groups": 8, "groups_kept": 4}
    for wrong in (
        {"renormalize": True},
        {"scale": 2.5},
        {"renormalize": True, "scale": 2.5, "groups": None, "groups_kept": None},
    ):
        router = mo.Router(**{**arguments, **wrong}, selection_bias=True)
        r = mo.compile(router, backend="reference")(wanted.logits, bias=correction)
        dense = by_expert(r.weights, r.indices, 256)
        with pytest.raises(AssertionError, match="weights"):
            assert_close("weights", dense, wanted.dense, EXACT)

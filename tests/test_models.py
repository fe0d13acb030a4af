"""Routers of open models: what a declared router computes is what the model's own module in `transformers` computes.

Modules get random weights; nothing is downloaded. They run on the CPU in float32 and are fed hidden states; a declared
router gets the logits of the same product. Expert sets must be equal except where rounding decides (see `TIE`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
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

HIDDEN = 64
TOKENS = 67

MOST_LEFT_OUT = 2
"""Rows of 67 that may be left out because the last pick, or the last group kept, leads by less than `TIE`: with gaps of
about 1e-2 between neighbours at the cut, a row is this close once in ten thousand."""

CORRECTION = 0.05  # spread of selection biases: it changes many picks, and does not decide them alone


@dataclass(frozen=True)
class Family:
    """A model's router module, and the router that is declared to equal it."""

    model: str
    config: str
    module: str
    router: Callable[[], mo.Router]
    options: tuple[tuple[str, object], ...] = ()

    def build(self) -> torch.nn.Module:
        """The module with random weights and, where the family has one, a random selection bias."""
        configuration = importlib.import_module(f"transformers.models.{self.model}.configuration_{self.model}")
        modeling = importlib.import_module(f"transformers.models.{self.model}.modeling_{self.model}")
        config = getattr(configuration, self.config)(hidden_size=HIDDEN, **dict(self.options))
        module = getattr(modeling, self.module)(config)
        random = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for name, values in [*module.named_parameters(), *module.named_buffers()]:
                spread = HIDDEN**-0.5 if name == "weight" else 0.5 if name == "bias" else CORRECTION
                values.copy_(spread * torch.randn(values.shape, generator=random))
        return module


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
    ),
    "ernie4_5_moe": Family(
        "ernie4_5_moe",
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeTopKRouter",
        declared(num_experts=64, top_k=6, selection_bias=True, renormalize=mo.norm.sum(min=1e-12)),
    ),
    "llama4": Family("llama4", "Llama4TextConfig", "Llama4Router", of_example("llama4")),
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


@dataclass(frozen=True)
class Routed:
    """What a model's module computed, and the gradients of random cotangents of its weights."""

    dense: torch.Tensor
    """[T, E]: weights by expert, 0 where not picked."""
    picked: torch.Tensor
    """[T, E]: True where picked."""
    logits: torch.Tensor
    d_logits: torch.Tensor
    d_hidden: torch.Tensor
    d_weight: torch.Tensor
    d_bias: torch.Tensor | None


def of_module(family: Family, module: torch.nn.Module, bias: torch.Tensor | None) -> tuple[Routed, torch.Tensor]:
    """The module's results on random hidden states, and those hidden states."""
    hidden = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(5)).requires_grad_()
    if family.module == "Llama4Router":  # (dense weights, logits)
        dense, logits = module(hidden)
        picked = dense.detach() > 0
    else:
        logits, weights, indices = module(hidden, bias) if family.model == "minimax_m2" else module(hidden)
        dense = torch.zeros_like(logits).scatter(-1, indices, weights)
        picked = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, indices, True)
    reached = [logits, hidden, module.weight]
    if isinstance(getattr(module, "bias", None), torch.Tensor):
        reached.append(module.bias)
    # The cotangent of a weight is drawn by its expert: families order their picks differently.
    gradients = torch.autograd.grad(dense, reached, cotangent(dense, seed=9))
    results = Routed(dense.detach(), picked, logits.detach(), *gradients[:3], (*gradients[3:], None)[0])
    return results, hidden.detach()


def correction_of(family: Family, module: torch.nn.Module) -> torch.Tensor | None:
    """The selection bias: a buffer of the module, of a part of it, or (MiniMax) of the block that calls it."""
    if family.model == "minimax_m2":
        return CORRECTION * torch.randn(module.num_experts, generator=torch.Generator().manual_seed(13))
    found = [t for n, t in [*module.named_buffers(), *module.named_parameters()] if "correction_bias" in n]
    return found[0].detach().flatten() if found else None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_routes_like_the_model(name: str, backend: str) -> None:
    family = FAMILIES[name]
    router = family.router()
    assert (router.num_experts, router.top_k) == SIZES[name]
    module = family.build()
    correction = correction_of(family, module)
    assert (correction is not None) == router.selection_bias
    wanted, hidden = of_module(family, module, correction)

    # The same hidden states through the same product and the declared router.
    device = device_of(backend)
    hidden = hidden.requires_grad_()
    weight = module.weight.detach().clone().requires_grad_()
    product = torch.nn.functional.linear(hidden, weight)
    logits = product.detach().to(device).requires_grad_()
    inputs = {"bias": correction.to(device)} if correction is not None else {}
    if router.gate_bias:
        inputs["gate_bias"] = module.bias.detach().to(device).requires_grad_()
    layer = mo.compile(router, backend=backend)
    r = layer(logits, **inputs)
    assert layer.backend == backend
    indices = r.indices.cpu()
    dense = by_expert(r.weights.cpu(), indices, router.num_experts)
    picked = torch.zeros_like(wanted.picked).scatter(-1, indices.long(), True)

    # Where rounding decides, both choices are right; those rows, and only those, are left out.
    compared = ~near_cut(router, selection(router, product, correction, inputs.get("gate_bias")), TIE)
    assert int((~compared).sum()) <= MOST_LEFT_OUT
    assert torch.equal(picked[compared], wanted.picked[compared])
    assert torch.equal(r.counts.cpu(), picked.sum(0, dtype=torch.int32))
    assert_close("weights", dense[compared], wanted.dense[compared], EXACT)

    # Gradients, from the same cotangents.
    sent = cotangent(wanted.dense, seed=9).gather(-1, indices.long()).to(device)
    reached = [logits, inputs["gate_bias"]] if router.gate_bias else [logits]
    d_logits, *d_bias = (g.cpu() for g in torch.autograd.grad(r.weights, reached, sent))
    d_hidden, d_weight = torch.autograd.grad(product, [hidden, weight], d_logits)
    assert_close("gradient of the logits", d_logits[compared], wanted.d_logits[compared], GRADIENT)
    assert_close("gradient of the hidden states", d_hidden[compared], wanted.d_hidden[compared], GRADIENT)
    if compared.all():
        assert_close("gradient of the gate's weight", d_weight, wanted.d_weight, GRADIENT)
        if wanted.d_bias is not None:
            assert_close("gradient of the gate's bias", d_bias[0], wanted.d_bias, GRADIENT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dense_weights_like_llama4(backend: str) -> None:
    """Llama 4 takes the sigmoid of logits that are -inf where not picked: exactly 0 there, and so are our `probs`."""
    family = FAMILIES["llama4"]
    router = family.router()
    wanted, _ = of_module(family, family.build(), None)
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
        family = FAMILIES[name]
        module = family.build()
        correction = correction_of(family, module)
        wanted, _ = of_module(family, module, correction)
        scores = selection(family.router(), wanted.logits)
        unbiased = torch.zeros_like(wanted.picked).scatter(-1, scores.topk(family.router().top_k).indices, True)
        assert int((unbiased != wanted.picked).any(-1).sum()) > TOKENS // 2, name


def test_a_wrong_router_is_found_out() -> None:
    """The comparison sees a missing scale, a missing division and missing groups."""
    family = FAMILIES["deepseek_v3"]
    module = family.build()
    correction = correction_of(family, module)
    wanted, _ = of_module(family, module, correction)
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

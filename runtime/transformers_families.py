"""The sparse blocks of transformers' models, by family: a block's class, and where it has what declares a layer.

A family is one entry. What nearly all have in common is a default or is looked for by its usual name (`SCALES` and the
others); `runtime/transformers_checks.py` compares a block with what was made of its entry before it runs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from moesaic.ir.core import Value, create_one
from moesaic.ir.declare import Normalization, norm
from moesaic.ir.experts import Experts
from moesaic.ir.presets import WITHOUT

# The names that routers have for the same thing; an attribute of the router, or else of the block.
TOP_K = ("top_k",)
SCALES = ("routed_scaling_factor", "route_scale", "router_scaling_factor")
DIVIDES = ("norm_topk_prob",)
GROUPS = ("num_group", "topk_group")
BIASES = ("e_score_correction_bias", "moe_statics.e_score_correction_bias", "expert_bias")

Tensors = Mapping[str, torch.Tensor]
Place = str | Callable[[Any], torch.Tensor]
"""Where a block has a tensor: a path of attributes, or a function of the block."""


class Routed(NamedTuple):
    """What a router found, as it is told to those who watch the module it stands for."""

    logits: torch.Tensor
    """[T, E], before a gate bias and a cap."""
    weights: torch.Tensor
    """[T, K], float32."""
    indices: torch.Tensor
    """[T, K], int64."""


@dataclass(frozen=True)
class Family:
    """How a block is read.

    Attributes:
        name: the folder in transformers, and the preset of `Router`.
        block: the class; that of the router alone where routers and experts are no block of their own.
        gate: path of the router's module.
        weight, gate_bias, expert_scale, router_scale: paths of its tensors.
        norm: what the weights are divided by where the router's flag says so, and the preset does not know it.
        arguments: other arguments of `Router`, from the block.
        refused: why a block of this family is not declarable, or ``None``, from the block.
        experts: path of the module of experts; empty for a router alone.
        declared: `Experts` of a block and where their tensors are, for modules that transformers does not dispatch.
        shared: path of the shared expert, and of the layer that makes its gate.
        mean: whether the block puts out the mean of both.
        jitter: path of the width of the noise that x is multiplied by in training.
        apart: whether something stands between the router and the experts, so that they are no one layer: `into`, or
            what it `adds`.
        into, out_of: what the block does to x before the experts, and to their sum after them, where they are apart.
        into_gate: what it does to x before the router's product.
        after: what it does to the result.
        adds: what else it adds to the experts' sum, from (block, x, what the router found).
        given: inputs of the layer from the other arguments of the block's call.
        example: such other arguments, for a number of tokens.
        returns: the block's result, from (block, y [T, H], shape of x, what the router found).
        watched: the result of the router's module, from (block, x, what the router found).
        always: whether `returns` needs what the router found.
        narrow: the shapes of the experts' parameters for another I, by their names in the block, where `declared` has
            functions for places.
        widths: paths of numbers in the block that are I.
        calls: parts that the block's forward still calls, and that may do what they like.
        float32: whether the product that makes logits is one in float32.
        no_autocast: whether it stays so under autocast.
    """

    name: str
    block: str
    gate: str = "gate"
    weight: str = "gate.weight"
    gate_bias: str = ""
    expert_scale: str = ""
    router_scale: str = ""
    norm: Normalization | None = None
    arguments: Callable[[Any], Mapping[str, Any]] | None = None
    refused: Callable[[Any], str | None] | None = None
    experts: str = "experts"
    declared: Callable[[Any], tuple[Experts, Mapping[str, Place]]] | None = None
    shared: str = ""
    shared_gate: str = ""
    mean: Callable[[Any], bool] | None = None
    jitter: str = ""
    apart: Callable[[Any], bool] = lambda block: False
    into: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
    into_gate: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
    out_of: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
    after: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
    adds: Callable[[Any, torch.Tensor, Routed], torch.Tensor] | None = None
    given: Callable[..., Mapping[str, torch.Tensor]] | None = None
    example: Callable[[Any, int, torch.Generator], Mapping[str, torch.Tensor]] | None = None
    returns: Callable[[Any, torch.Tensor, torch.Size, Routed | None], Any] | None = None
    watched: Callable[[Any, torch.Tensor, Routed], Any] = lambda block, x, r: tuple(r)
    always: bool = False
    narrow: Callable[[Any, int], Mapping[str, list[int]]] | None = None
    widths: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    float32: bool = False
    no_autocast: bool = False
    key: tuple[str, str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", (f"transformers.models.{self.name}.modeling_{self.name}", self.block))

    def __reduce__(self) -> tuple[Any, ...]:
        return _at_key, self.key  # functions of the table are not pickled


def _at_key(module: str, block: str) -> Family:
    return FAMILIES[module, block]


def at(root: Any, path: str) -> Any:
    """The attribute at a path; the root itself for an empty one."""
    for name in path.split(".") if path else ():
        root = getattr(root, name)
    return root


# What routers' modules return -----------------------------------------------------------------------------------------


def _rounded(block: Any, x: torch.Tensor, r: Routed) -> Any:
    """Logits and weights in the type of x."""
    return r.logits.to(x.dtype), r.weights.to(x.dtype), r.indices


def _rounded_weights(block: Any, x: torch.Tensor, r: Routed) -> Any:
    return r.logits, r.weights.to(x.dtype), r.indices


def _rounded_logits(block: Any, x: torch.Tensor, r: Routed) -> Any:
    return r.logits.to(x.dtype), r.weights, r.indices


def _granite(block: Any, x: torch.Tensor, r: Routed) -> Any:
    return r.indices, r.weights.to(x.dtype), r.logits


def _logits(block: Any, x: torch.Tensor, r: Routed) -> Any:
    return r.logits.to(x.dtype)


def _gpt_oss(block: Any, x: torch.Tensor, r: Routed) -> Any:
    return (r.logits + block.router.bias.float()).to(x.dtype), r.weights.to(x.dtype), r.indices


def _privacy_filter(block: Any, x: torch.Tensor, r: Routed) -> Any:
    return r.logits + block.router.bias.float(), r.weights / block.router.top_k, r.indices


def _outside(path: str, logits: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """Of blocks that multiply the experts' sum by a factor, which the layer's weights have in them."""

    def watched(block: Any, x: torch.Tensor, r: Routed) -> Any:
        return logits(block, r.logits), (r.weights / at(block, path)), r.indices

    return watched


def _capped(block: Any, logits: torch.Tensor) -> torch.Tensor:
    cap = block.gate.router_logit_softcapping
    return torch.tanh(logits / cap) * cap if cap > 0 else logits


def _jetmoe(block: Any, x: torch.Tensor, r: Routed) -> Any:
    _, order = r.indices.flatten().sort()
    tokens = order.div(block.router.top_k, rounding_mode="trunc")
    found = torch.bincount(r.indices.flatten(), minlength=block.router.num_experts)
    return order, tokens, r.weights.to(x.dtype).flatten()[order], found, r.logits


def _llama4(block: Any, x: torch.Tensor, r: Routed) -> Any:
    logits = r.logits.to(x.dtype)
    return torch.zeros_like(logits).scatter(1, r.indices, r.weights.to(x.dtype)), logits


def _inkling(block: Any, x: torch.Tensor, r: Routed) -> Any:
    k, experts = block.gate.top_k, block.gate.num_experts
    weights = r.weights.to(x.dtype)
    return r.logits[:, :experts].to(x.dtype), weights[:, :k], r.indices, weights[:, k:]


def _longcat(block: Any, x: torch.Tensor, r: Routed) -> Any:
    return r.weights, r.indices


def _gemma(router: Any, x: torch.Tensor, r: Routed) -> Any:
    return r.logits.softmax(-1, dtype=torch.float32), r.weights, r.indices


# What blocks return ---------------------------------------------------------------------------------------------------


def _with_weights(block: Any, y: torch.Tensor, shape: torch.Size, r: Routed | None) -> Any:
    assert r is not None
    return y.view(shape), r.weights.to(y.dtype)


def _with_shares(block: Any, y: torch.Tensor, shape: torch.Size, r: Routed | None) -> Any:
    assert r is not None
    return y.view(shape), r.weights / block.router.top_k


def _with_logits(block: Any, y: torch.Tensor, shape: torch.Size, r: Routed | None) -> Any:
    assert r is not None
    return y, r.logits.to(y.dtype)


def _flat(block: Any, y: torch.Tensor, shape: torch.Size, r: Routed | None) -> Any:
    assert r is not None
    return y.flatten(), r.logits.flatten()


# Arguments of routers -------------------------------------------------------------------------------------------------


def _two_group_methods(block: Any) -> Mapping[str, Any]:
    if block.gate.topk_method == "greedy":
        return {"groups": None, "groups_kept": None}
    return {"group_score": "max"}


def _unknown_method(block: Any) -> str | None:
    method = block.gate.topk_method
    return None if method in ("greedy", "group_limited_greedy") else f"its topk_method is {method!r}"


def _masked_with_zero(block: Any) -> str | None:
    if block.gate.num_group is None:
        return None
    return "groups that are not kept are masked with 0, not -inf, and can be picked; such a router is not declarable"


def _cohere2(block: Any) -> Mapping[str, Any]:
    if block.gate.expert_selection_fn == "softmax":
        return {"score": "softmax", "renormalize": False}
    return {"score": block.gate.expert_selection_fn}


def _dbrx(block: Any) -> Mapping[str, Any]:
    p = block.moe_normalize_expert_weights
    return {"renormalize": False if p is None else norm.lp(p)}


def _deepseek_v4(block: Any) -> Mapping[str, Any]:
    given = {"selection": "given", "selection_bias": False, "indices_dtype": "int64"} if block.is_hash else {}
    return {"score": _activation_name(block.gate.score_fn), **given}


def _activation_name(module: Any) -> str:
    """The name of a score by its class, as transformers' table of activations has them."""
    kind = type(module).__name__.lower().removesuffix("activation")
    return {"sqrtsoftplus": "sqrtsoftplus", "sigmoid": "sigmoid", "softmax": "softmax"}.get(kind, kind)


def _of_tokens(block: Any, input_ids: torch.Tensor | None = None, **_: Any) -> Mapping[str, torch.Tensor]:
    """Picks by token id."""
    if not block.is_hash:
        return {}
    assert input_ids is not None
    picks: torch.Tensor = block.gate.tid2eid[input_ids.reshape(-1)]
    return {"indices": picks.long()}


def _token_ids(block: Any, tokens: int, g: torch.Generator) -> Mapping[str, torch.Tensor]:
    if not block.is_hash:
        return {}
    return {"input_ids": torch.randint(0, block.gate.tid2eid.shape[0], (1, tokens), generator=g)}


def _laguna(block: Any) -> Mapping[str, Any]:
    cap = block.gate.router_logit_softcapping
    return {"logit_cap": cap if cap > 0 else None}


def _ernie(block: Any) -> Mapping[str, Any]:
    return {"renormalize": norm.sum(min=block.gate.norm_min)}


def _inkling_router(block: Any) -> Mapping[str, Any]:
    return {"num_experts": block.gate.num_experts, "shared_experts": block.gate.n_shared_experts}


def _longcat_router(block: Any) -> Mapping[str, Any]:
    experts = block.experts
    return {"num_experts": experts.num_routed_experts, "zero_experts": experts.zero_expert_num}


def _no_experts_or_bias(block: Any) -> str | None:
    if block.experts.gate_up_proj is None:
        return "it has no routed experts"
    return None


def _gemma_router(router: Any) -> Mapping[str, Any]:
    return {"top_k": router.config.top_k_experts}


# Experts of classes that transformers does not dispatch ---------------------------------------------------------------


@dataclass(frozen=True)
class CappedSwiGLU:
    """min(silu(g), limit) clamp(u, -limit, limit): what step3p7 has."""

    limit: float

    def __call__(self, gate: Value, up: Value) -> Value:
        gate = create_one("math.minimum", create_one("math.silu", gate), self.limit)
        return gate * create_one("math.maximum", create_one("math.minimum", up, self.limit), -self.limit)


def _aria_experts(block: Any) -> tuple[Experts, Mapping[str, Place]]:
    experts, hidden, wide = block.experts.fc1.weight.shape
    places = {"gate_up_proj": "experts.fc1.weight", "down_proj": "experts.fc2.weight"}
    return Experts(experts, hidden, wide // 2, transposed=True), places


def _dbrx_matrix(name: str, block: Any) -> torch.Tensor:
    mlp = block.experts.mlp
    tensor: torch.Tensor = getattr(mlp, name)
    return tensor.view(mlp.moe_num_experts, mlp.ffn_hidden_size, mlp.hidden_size)


_DBRX: Mapping[str, Place] = {
    "gate_proj": functools.partial(_dbrx_matrix, "w1"),
    "up_proj": functools.partial(_dbrx_matrix, "v1"),
    "down_proj": functools.partial(_dbrx_matrix, "w2"),
}


def _dbrx_experts(block: Any) -> tuple[Experts, Mapping[str, Place]]:
    mlp = block.experts.mlp
    sizes = (mlp.moe_num_experts, mlp.hidden_size, mlp.ffn_hidden_size)
    return Experts(*sizes, separate=True, transposed="down"), _DBRX


def _dbrx_shapes(block: Any, inner: int) -> Mapping[str, list[int]]:
    mlp = block.experts.mlp
    return {f"experts.mlp.{name}": [mlp.moe_num_experts * inner, mlp.hidden_size] for name in ("w1", "v1", "w2")}


def _jetmoe_experts(block: Any) -> tuple[Experts, Mapping[str, Place]]:
    experts, wide, hidden = block.input_linear.weight.shape
    places = {"gate_up_proj": "input_linear.weight", "down_proj": "output_linear.weight"}
    return Experts(experts, hidden, wide // 2), places


_STACKED: Mapping[str, Place] = {"gate_up_proj": "experts.gate_up_proj", "down_proj": "experts.down_proj"}


def _llama4_experts(block: Any) -> tuple[Experts, Mapping[str, Place]]:
    experts, inner, hidden = block.experts.down_proj.shape
    return Experts(experts, hidden, inner, transposed=True, weight_on="input"), _STACKED


def _without_identities(block: Any) -> torch.Tensor:
    experts = block.experts
    matrix: torch.Tensor = experts.gate_up_proj[: experts.num_routed_experts]
    return matrix


_LONGCAT: Mapping[str, Place] = {"gate_up_proj": _without_identities, "down_proj": "experts.down_proj"}


def _longcat_experts(block: Any) -> tuple[Experts, Mapping[str, Place]]:
    return Experts(*block.experts.down_proj.shape), _LONGCAT


def _longcat_shapes(block: Any, inner: int) -> Mapping[str, list[int]]:
    (rows, _, hidden), experts = block.experts.gate_up_proj.shape, block.experts.num_routed_experts
    return {"experts.gate_up_proj": [rows, 2 * inner, hidden], "experts.down_proj": [experts, hidden, inner]}


def _step3p7_experts(block: Any) -> tuple[Experts, Mapping[str, Place]]:
    (experts, hidden, inner), limit = block.experts.down_proj.shape, block.experts.limit
    gating = CappedSwiGLU(limit) if limit != float("inf") else None
    return Experts(experts, hidden, inner, gating=gating), _STACKED


# What stands around the experts ---------------------------------------------------------------------------------------


def _identities(block: Any, x: torch.Tensor, r: Routed) -> torch.Tensor:
    """x times the weights of the picks that return it."""
    identity = r.indices >= block.experts.num_routed_experts
    return x * r.weights.masked_fill(~identity, 0.0).sum(-1, keepdim=True)


def _weighed_shared(block: Any, x: torch.Tensor, r: Routed) -> torch.Tensor:
    gammas = r.weights[:, block.gate.top_k :].to(x.dtype)
    y: torch.Tensor = block.shared_experts(x, gammas=gammas)
    return y


def _always(block: Any) -> bool:
    return True


def _is_latent(block: Any) -> bool:
    return not isinstance(block.fc1_latent_proj, torch.nn.Identity)


def _into_latent(block: Any, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = block.fc1_latent_proj(x)
    return y


def _out_of_latent(block: Any, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = block.fc2_latent_proj(x)
    return y


def _normed(block: Any, y: torch.Tensor) -> torch.Tensor:
    normed: torch.Tensor = block.post_mlp_layernorm(y)
    return normed


def _biased(block: Any, y: torch.Tensor) -> torch.Tensor:
    biased: torch.Tensor = y + block.bias
    return biased


def _gemma_input(router: Any, x: torch.Tensor) -> torch.Tensor:
    normed: torch.Tensor = router.norm(x) * router.scale * router.scalar_root_size
    return normed


# The table ------------------------------------------------------------------------------------------------------------


def _softmax(name: str, block: str, **others: Any) -> Family:
    return Family(name, block, watched=others.pop("watched", _rounded), **others)


def _deepseek(name: str, block: str, **others: Any) -> Family:
    """Logits by a product in float32, and shared experts that are added."""
    return Family(name, block, shared=others.pop("shared", "shared_experts"), float32=True, **others)


def _granites(name: str, block: str, watched: Callable[..., Any] = _granite) -> Family:
    return Family(name, block, gate="router", weight="router.weight", watched=watched)


def _qwen(name: str, block: str) -> Family:
    return _softmax(name, block, shared="shared_expert", shared_gate="shared_expert_gate")


_ERNIE: Mapping[str, Any] = {"arguments": _ernie, "watched": _rounded_weights, "float32": True, "no_autocast": True}

TABLE: tuple[Family, ...] = (
    Family("afmoe", "AfmoeSparseMoeBlock", "router", "router.gate.weight", shared="shared_experts"),
    Family(
        "aria", "AriaTextMoELayer", "router", "router.weight", arguments=lambda b: {"top_k": b.config.moe_topk},
        declared=_aria_experts, shared="shared_experts", watched=_logits,
    ),
    _deepseek("axk1", "AXK1MoE", after=_normed, calls=("post_mlp_layernorm",)),
    _deepseek("axk2", "AXK2MoE", refused=_masked_with_zero),
    Family(
        "cohere2_moe", "Cohere2MoeSparseMoeBlock", arguments=_cohere2, norm=norm.sum(), shared="shared_experts",
        mean=lambda b: b.shared_expert_combination_strategy == "average", watched=_rounded,
    ),
    Family(
        "dbrx", "DbrxFFN", "router", "router.layer.weight", arguments=_dbrx, declared=_dbrx_experts,
        narrow=_dbrx_shapes, widths=("experts.ffn_hidden_size", "experts.mlp.ffn_hidden_size"),
        jitter="router.moe_jitter_eps", watched=_logits,
    ),
    _deepseek("deepseek_ocr2", "DeepseekOcr2TextMoe", arguments=_two_group_methods, refused=_unknown_method),
    _deepseek("deepseek_v2", "DeepseekV2Moe", arguments=_two_group_methods, refused=_unknown_method),
    _deepseek("deepseek_v3", "DeepseekV3MoE"),
    _deepseek("deepseek_v32", "DeepseekV32MoE"),
    Family(
        "deepseek_v4", "DeepseekV4SparseMoeBlock", arguments=_deepseek_v4, shared="shared_experts", given=_of_tokens,
        example=_token_ids, watched=_rounded,
    ),
    Family(
        "diffusion_gemma", "DiffusionGemmaTextRouter", "", "proj.weight", expert_scale="per_expert_scale",
        arguments=_gemma_router, experts="", into_gate=_gemma_input, calls=("norm",), watched=_gemma,
    ),
    _deepseek("dots1", "Dots1MoE", norm=norm.sum(eps=1e-20)),
    Family("ernie4_5_moe", "Ernie4_5_MoeSparseMoeBlock", shared="shared_experts", **_ERNIE),
    Family("ernie4_5_vl_moe", "Ernie4_5_VLMoeSparseMoeBlock", returns=_flat, always=True, **_ERNIE),
    _deepseek("exaone_moe", "ExaoneMoeSparseMoEBlock"),
    _softmax("flex_olmo", "FlexOlmoSparseMoeBlock"),
    Family(
        "gemma4", "Gemma4TextRouter", "", "proj.weight", expert_scale="per_expert_scale",
        arguments=_gemma_router, experts="", into_gate=_gemma_input, calls=("norm",), watched=_gemma,
    ),
    _deepseek("glm4_moe", "Glm4MoeMoE"),
    _deepseek("glm4_moe_lite", "Glm4MoeLiteMoE"),
    _deepseek("glm4v_moe", "Glm4vMoeTextMoE"),
    _deepseek("glm5_next", "Glm5NextTextMoE"),
    _deepseek("glm_moe_dsa", "GlmMoeDsaMoE"),
    Family(
        "gpt_oss", "GptOssMLP", "router", "router.weight", "router.bias", returns=_with_weights, always=True,
        watched=_gpt_oss,
    ),
    _granites("granitemoe", "GraniteMoeMoE"),
    _granites("granitemoe_swa", "GraniteMoeSWAMoE", _rounded_weights),
    _granites("granitemoehybrid", "GraniteMoeHybridMoE"),
    _granites("granitemoeshared", "GraniteMoeSharedMoE"),
    Family("hunyuan_v1_moe", "HunYuanMoEV1Moe", "gate", "gate.wg.weight", shared="shared_mlp"),
    _deepseek("hy_v3", "HYV3MoE"),
    _deepseek("hy_v4", "HYV4MoE"),
    Family(
        "inkling", "InklingMoE", arguments=_inkling_router, router_scale="gate.global_scale", apart=_always,
        adds=_weighed_shared, calls=("shared_experts",),
        watched=_inkling,
    ),
    Family("jamba", "JambaSparseMoeBlock", "router", "router.weight", watched=_logits),
    Family(
        "jetmoe", "JetMoeMoE", "router", "router.layer.weight", experts="input_linear", declared=_jetmoe_experts,
        after=_biased, watched=_jetmoe,
    ),
    _deepseek("kimi_linear", "KimiLinearMoE"),
    Family(
        "laguna", "LagunaSparseMoeBlock", arguments=_laguna, shared="shared_experts",
        watched=_outside("routed_scaling_factor", _capped),
    ),
    Family("lfm2_moe", "Lfm2MoeSparseMoeBlock", watched=_rounded),
    Family(
        "llama4", "Llama4TextMoe", "router", "router.weight", declared=_llama4_experts, shared="shared_expert",
        returns=_with_logits, always=True, watched=_llama4,
    ),
    Family(
        "longcat_flash", "LongcatFlashMoE", "router", "router.classifier.weight", arguments=_longcat_router,
        refused=_no_experts_or_bias, declared=_longcat_experts, narrow=_longcat_shapes, apart=_always, adds=_identities,
        watched=_longcat, float32=True,
    ),
    _softmax("mellum", "MellumSparseMoeBlock"),
    _deepseek("mimo_v2_flash", "MiMoV2FlashMoE", shared=""),
    Family("minimax", "MiniMaxSparseMoeBlock", jitter="jitter_noise", watched=_rounded_logits),
    Family("minimax_m2", "MiniMaxM2SparseMoeBlock", jitter="jitter_noise", watched=_rounded_logits),
    Family(
        "minimax_m3_vl", "MiniMaxM3VLSparseMoeBlock", shared="shared_experts",
        watched=_outside("routed_scaling_factor", lambda block, logits: logits.to(block.gate.weight.dtype)),
    ),
    Family("mistral4", "Mistral4MoE", shared="shared_experts", watched=_rounded),
    Family("mixtral", "MixtralSparseMoeBlock", jitter="jitter_noise", watched=_rounded_logits),
    _deepseek(
        "nemotron_h", "NemotronHMoE", apart=_is_latent, into=_into_latent, out_of=_out_of_latent,
        calls=("fc1_latent_proj", "fc2_latent_proj"),
    ),
    _softmax("olmoe", "OlmoeSparseMoeBlock"),
    Family(
        "openai_privacy_filter", "OpenAIPrivacyFilterMLP", "router", "router.weight", "router.bias",
        returns=_with_shares, always=True, watched=_privacy_filter, float32=True,
    ),
    _qwen("qwen2_moe", "Qwen2MoeSparseMoeBlock"),
    _qwen("qwen3_5_moe", "Qwen3_5MoeSparseMoeBlock"),
    _softmax("qwen3_moe", "Qwen3MoeSparseMoeBlock"),
    _qwen("qwen3_next", "Qwen3NextSparseMoeBlock"),
    _softmax("qwen3_omni_moe", "Qwen3OmniMoeThinkerTextSparseMoeBlock"),
    _qwen("qwen3_omni_moe", "Qwen3OmniMoeTalkerTextSparseMoeBlock"),
    _softmax("qwen3_vl_moe", "Qwen3VLMoeTextSparseMoeBlock"),
    _qwen("qwen4_exp", "Qwen4ExpTextSparseMoeBlock"),
    _deepseek("solar_open", "SolarOpenMoE"),
    Family(
        "step3p7", "Step3p7SparseMoeBlock", declared=_step3p7_experts, shared="shared_experts",
        watched=_outside("routed_scaling_factor", lambda block, logits: logits),
    ),
)  # fmt: skip
"""Every family whose routers are declarable."""

FAMILIES: Mapping[tuple[str, str], Family] = {f.key: f for f in TABLE}
"""By module and name of the class."""

LEFT: Mapping[tuple[str, str], str] = {
    (f"transformers.models.{name}.modeling_{name}", block): WITHOUT[name]
    for name, block in (
        ("doge", "DogeCDMoE"),
        ("nllb_moe", "NllbMoeSparseMLP"),
        ("phimoe", "PhimoeSparseMoeBlock"),
        ("switch_transformers", "SwitchTransformersSparseMLP"),
        ("vitpose_backbone", "VitPoseBackboneMoeMLP"),
        ("zaya", "ZayaSparseMoeBlock"),
    )
} | {
    (
        "transformers.models.jetmoe.modeling_jetmoe",
        "JetMoeMoA",
    ): "its experts are products around attention, not a layer"
}
"""Blocks that are known and stay, and why."""

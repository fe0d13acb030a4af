"""The arguments of `Router` for families of open models, with the defaults that their configurations ship.

A preset gives the weight that multiplies an expert's output. Constant factors that a model applies to the sum of its
routed experts instead (laguna, minimax_m3_vl, step3p7), or divides by and multiplies back (openai_privacy_filter), are
folded into ``scale``: the sum is linear in its weights. A configuration's single group limits nothing and is left out.
Switches that a configuration has and does not set by default are overrides:

- ``renormalize=True``: ``norm_topk_prob`` of qwen2_moe, qwen3_moe, olmoe and flex_olmo; with ``norm.sum(eps=1e-20)``
  that of dots1. ``renormalize=False``: the talker of qwen3_omni_moe, and ``norm_topk_prob`` where a preset divides.
- ``groups=, groups_kept=``: ``n_group`` and ``topk_group``; with ``group_score="max"`` in deepseek_v2 and deepseek_ocr2
  (``topk_method="group_limited_greedy"``).
- ``score="sigmoid"``: ``expert_selection_fn`` of cohere2_moe, there with ``renormalize=True`` unless its
  ``norm_topk_prob`` is false.
- ``selection_bias=False``: ``use_expert_bias`` of lfm2_moe.
- ``logit_cap=``: ``moe_router_logit_softcapping`` of laguna.
- ``renormalize=norm.lp(p)``, or ``False``: ``moe_normalize_expert_weights`` of dbrx.
- ``selection="given", selection_bias=False``: the layers of deepseek_v4 that take experts from a table by token id; the
  layer is called with ``indices=table[ids]``.
- ``zero_experts=``: ``zero_expert_num`` of longcat_flash.

Sizes have to be given where a configuration ships none (top_k in deepseek_v2 and deepseek_ocr2; both in dots1, gemma4
and diffusion_gemma) or a single expert (hunyuan_v1_moe).

Parts that lie outside a router's arguments: what gemma4 and diffusion_gemma do to the hidden states before the product;
which of ernie4_5_vl_moe's two pools (a router each) a token goes to; that llama4 weights the expert's input, for which
it needs ``outputs=("probs",)``; and that longcat_flash's last 256 experts return their input.

`WITHOUT` has the families that no arguments of `Router` express, and why.

axk2's own groups are not expressible either: it masks the other groups with 0 instead of -inf, so that its picks leave
the groups it kept where scores plus bias are negative. With ``groups=`` the preset masks with -inf.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moesaic.ir.declare import norm


def _sizes(num_experts: int | None, top_k: int | None) -> dict[str, Any]:
    """The sizes that a configuration ships; None where it ships none."""
    given = {"num_experts": num_experts, "top_k": top_k}
    return {name: size for name, size in given.items() if size is not None}


def _divided(num_experts: int | None, top_k: int | None) -> dict[str, Any]:
    """Softmax, picks, division by their sum."""
    return {**_sizes(num_experts, top_k), "renormalize": True}


def _picks_first(num_experts: int, top_k: int, **others: Any) -> dict[str, Any]:
    """Picks among the logits, then the score of these alone."""
    return {**_sizes(num_experts, top_k), "order": "topk_then_score", **others}


def _sigmoid(num_experts: int, top_k: int, *, eps: float = 0.0, **others: Any) -> dict[str, Any]:
    """Sigmoid, picks by score plus bias, division by the sum of the scores."""
    return {
        **_sizes(num_experts, top_k),
        "score": "sigmoid",
        "selection_bias": True,
        "renormalize": norm.sum(eps=eps),
        **others,
    }


def _deepseek(num_experts: int, top_k: int, scale: float = 1.0, **others: Any) -> dict[str, Any]:
    return _sigmoid(num_experts, top_k, eps=1e-20, scale=scale, **others)


_ERNIE = {**_sizes(64, 6), "selection_bias": True, "renormalize": norm.sum(min=1e-12)}
_EIGHT_GROUPS = {"groups": 8, "groups_kept": 4}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "afmoe": _deepseek(64, 6),
    "aria": _picks_first(8, 2),
    "axk1": _deepseek(192, 8, 2.5, **_EIGHT_GROUPS),
    "axk2": _deepseek(128, 8, 2.5),
    "cohere2_moe": _picks_first(8, 2),
    "dbrx": {**_sizes(4, 1), "renormalize": norm.lp(1)},
    "deepseek_ocr2": _sizes(64, None),
    "deepseek_v2": _sizes(64, None),
    "deepseek_v3": _deepseek(256, 8, 2.5, **_EIGHT_GROUPS),
    "deepseek_v32": _deepseek(256, 8, 2.5, **_EIGHT_GROUPS),
    "deepseek_v4": _deepseek(256, 6, 1.5, score="sqrtsoftplus"),
    "diffusion_gemma": {**_divided(None, None), "expert_scale": True},
    "dots1": {"score": "sigmoid", "selection_bias": True},
    "ernie4_5_moe": _ERNIE,
    "ernie4_5_vl_moe": _ERNIE,
    "exaone_moe": _deepseek(64, 8, 2.5),
    "flex_olmo": _sizes(7, 5),
    "gemma4": {**_divided(None, None), "expert_scale": True},
    "glm4_moe": _deepseek(128, 8),
    "glm4_moe_lite": _deepseek(64, 4, 1.8),
    "glm4v_moe": _deepseek(128, 8),
    "glm5_next": _deepseek(288, 8, 2.5),
    "glm_moe_dsa": _deepseek(256, 8, 2.5),
    "gpt_oss": _picks_first(128, 4, gate_bias=True),
    "granitemoe": _picks_first(8, 2),
    "granitemoe_swa": _picks_first(8, 2),
    "granitemoehybrid": _picks_first(8, 2),
    "granitemoeshared": _picks_first(8, 2),
    "hunyuan_v1_moe": _divided(None, None),
    "hy_v3": _deepseek(192, 8, 2.826),
    "hy_v4": _deepseek(256, 8, 2.827),
    "jamba": _sizes(16, 2),
    "jetmoe": _picks_first(8, 2),
    "kimi_linear": _deepseek(256, 8, 2.446),
    "laguna": _sigmoid(256, 8),
    "lfm2_moe": _sigmoid(32, 4, eps=1e-6),
    "llama4": _picks_first(16, 1, score="sigmoid"),
    "longcat_flash": {**_sizes(512, 12), "zero_experts": 256, "selection_bias": True, "scale": 6.0},
    "mellum": _divided(64, 8),
    "mimo_v2_flash": _deepseek(256, 8),
    "minimax": _divided(8, 2),
    "minimax_m2": _sigmoid(256, 8),
    "minimax_m3_vl": _sigmoid(128, 4, scale=2.0),
    "mistral4": {**_sizes(128, 4), "renormalize": norm.sum(eps=1e-20)},
    "mixtral": _divided(8, 2),
    "nemotron_h": _deepseek(8, 2),
    "olmoe": _sizes(64, 8),
    "openai_privacy_filter": _picks_first(128, 4, gate_bias=True),
    "qwen2_moe": _sizes(60, 4),
    "qwen3_5_moe": _divided(256, 8),
    "qwen3_moe": _sizes(128, 8),
    "qwen3_next": _divided(512, 10),
    "qwen3_omni_moe": _divided(128, 8),
    "qwen3_vl_moe": _divided(60, 4),
    "qwen4_exp": _divided(512, 10),
    "solar_open": _deepseek(128, 8),
    "step3p7": _sigmoid(288, 8),
}
"""Family, by the name of its folder in `transformers`, to arguments of `Router`."""

ALL = tuple(PRESETS)

WITHOUT: Mapping[str, str] = {
    "doge": "picks are made among sums of two half scores (product keys)",
    "inkling": "the weights are normalised together with those of shared experts, and multiplied by a learned scalar",
    "nllb_moe": "the second expert depends on capacity and, in training, on chance",
    "phimoe": "the weights are two softmaxes, each over what a threshold leaves, and training samples",
    "switch_transformers": "tokens over an expert's capacity are dropped",
    "vitpose_backbone": "the expert is an input",
    "zaya": (
        "the logits come from an MLP with a state that layers hand on, and picks of the last class, 'no expert', have "
        "weight 0 and the id of another expert; on the MLP's logits, num_experts=17, top_k=1 and selection_bias=True "
        "pick the same classes, and leave 'no expert' its id, 16, and its probability"
    ),
}
"""Families that no arguments of `Router` express, and why."""

"""`Router.preset`: for every family in its table, what the family's own module in `transformers` computes.

Modules are made from their configuration's own defaults, so that a preset with another size, scale or switch fails;
sizes are given only where the configuration has none. Where a family's router is part of a larger block, the block is
made and its own routing is called.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import (
    HIDDEN,
    TOKENS,
    Family,
    assert_routes_like_the_model,
    correction_of,
    given_bias,
    read_llama4,
    rows_that_a_bias_changes,
)
from routing import BACKENDS, COMPILED, EXACT, GRADIENT, assert_close, by_expert, cotangent, device_of
from torch.nn.functional import linear

import moesaic as mo
from moesaic.ir.errors import InputError, InputTypeError
from moesaic.ir.presets import ALL, WITHOUT

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)

Read = tuple[torch.Tensor, torch.Tensor]

# Modules that take or return something else ---------------------------------------------------------------------------


def with_sequences(module: Any, hidden: torch.Tensor, bias: torch.Tensor | None) -> Read:
    return given_bias(module, hidden.unsqueeze(0), bias)


def indices_first(module: Any, hidden: torch.Tensor, bias: torch.Tensor | None) -> Read:
    indices, weights, _ = module(hidden)
    return weights, indices


def no_logits(module: Any, hidden: torch.Tensor, bias: torch.Tensor | None) -> Read:
    weights, indices = module(hidden)
    return weights, indices


def sorted_by_expert(module: Any, hidden: torch.Tensor, bias: torch.Tensor | None) -> Read:
    """JetMoE returns picks in the order of their experts: the token and the weight of each, and how many an expert
    has."""
    _, tokens, weights, counts, logits = module(hidden)
    experts = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    dense = torch.zeros_like(logits).index_put((tokens, experts), weights)
    return dense, torch.zeros_like(logits, dtype=torch.bool).index_put((tokens, experts), torch.tensor(True))


def routed_by_the_block(module: Any, hidden: torch.Tensor, bias: torch.Tensor | None) -> Read:
    indices, weights = module.route_tokens_to_experts(hidden, module.router(hidden))
    return weights, indices


def routed_by_the_feed_forward(module: Any, hidden: torch.Tensor, bias: torch.Tensor | None) -> Read:
    weights, indices = module.route_tokens_to_experts(module.router(hidden))
    return weights, indices


def routed_by_the_experts(module: Any, hidden: torch.Tensor, bias: torch.Tensor | None) -> Read:
    indices, weights = module.experts.route_tokens_to_experts(module.router(hidden))
    return weights, indices


# Cases ----------------------------------------------------------------------------------------------------------------


def family(
    model: str,
    config: str,
    module: str,
    options: Mapping[str, object] | None = None,
    overrides: Mapping[str, Any] | None = None,
    **others: Any,
) -> Family:
    """The preset `model` with `overrides`, beside a module whose configuration has `options`."""
    return Family(
        model,
        config,
        module,
        lambda: mo.Router.preset(model, **(overrides or {})),
        tuple((options or {}).items()),
        **others,
    )


TWELVE = {"num_experts": 12, "top_k": 3}
GROUPS = {"n_group": 4, "topk_group": 2}
SIZED = {"n_routed_experts": 12, "num_experts_per_tok": 3}
GEMMA = {"num_experts": 12, "top_k_experts": 3}
FOUR_GROUPS = {"groups": 4, "groups_kept": 2}
BY_MAXIMUM = {
    "options": {
        "num_experts_per_tok": 6,
        "topk_method": "group_limited_greedy",
        **GROUPS,
        "routed_scaling_factor": 16.0,
    },
    "overrides": {"top_k": 6, **FOUR_GROUPS, "group_score": "max", "scale": 16.0},
}
NARROW = {"ffn_hidden_size": 8}
DBRX = {
    "config": "DbrxFFNConfig",
    "module": "DbrxFFN",
    "read": routed_by_the_feed_forward,
    "arguments": lambda config: (SimpleNamespace(ffn_config=config),),
}
SMALL_EXPERTS = {"intermediate_size": 8}  # they are made with the router and not used

# A case is named by its family, or by the family and what differs from its defaults.
CASES = {
    "afmoe": family("afmoe", "AfmoeConfig", "AfmoeTokenChoiceRouter", read=with_sequences),
    "aria": family("aria", "AriaTextConfig", "AriaTextMoELayer", SMALL_EXPERTS, read=routed_by_the_experts),
    "axk1": family("axk1", "AXK1Config", "AXK1TopkRouter"),
    "axk2": family("axk2", "AXK2Config", "AXK2TopkRouter"),
    "cohere2_moe": family("cohere2_moe", "Cohere2MoeConfig", "Cohere2MoeTopKRouter"),
    "cohere2_moe/sigmoid": family(
        "cohere2_moe",
        "Cohere2MoeConfig",
        "Cohere2MoeTopKRouter",
        {"expert_selection_fn": "sigmoid"},
        {"score": "sigmoid", "renormalize": True},
    ),
    "cohere2_moe/sigmoid-not-divided": family(
        "cohere2_moe",
        "Cohere2MoeConfig",
        "Cohere2MoeTopKRouter",
        {"expert_selection_fn": "sigmoid", "norm_topk_prob": False},
        {"score": "sigmoid"},
    ),
    # Of one pick, as its configuration has it, the weight is 1 if it is divided, and no gradient reaches the router.
    "dbrx": family("dbrx", options={**NARROW, "moe_top_k": 2}, overrides={"top_k": 2}, **DBRX),
    "dbrx/square": family(
        "dbrx",
        options={**NARROW, "moe_num_experts": 12, "moe_top_k": 3, "moe_normalize_expert_weights": 2.0},
        overrides={**TWELVE, "renormalize": mo.norm.lp(2)},
        **DBRX,
    ),
    "dbrx/not-divided": family(
        "dbrx",
        options={**NARROW, "moe_normalize_expert_weights": None},
        overrides={"renormalize": False},
        **DBRX,
    ),
    "deepseek_ocr2": family(
        "deepseek_ocr2",
        "DeepseekOcr2TextConfig",
        "DeepseekOcr2TextTopkRouter",
        {"num_experts_per_tok": 6},
        {"top_k": 6},
    ),
    "deepseek_ocr2/groups": family(
        "deepseek_ocr2", "DeepseekOcr2TextConfig", "DeepseekOcr2TextTopkRouter", **BY_MAXIMUM
    ),
    "deepseek_v2": family(
        "deepseek_v2", "DeepseekV2Config", "DeepseekV2TopkRouter", {"num_experts_per_tok": 6}, {"top_k": 6}
    ),
    "deepseek_v2/groups": family("deepseek_v2", "DeepseekV2Config", "DeepseekV2TopkRouter", **BY_MAXIMUM),
    "deepseek_v3": family("deepseek_v3", "DeepseekV3Config", "DeepseekV3TopkRouter"),
    "deepseek_v3/not-divided": family(
        "deepseek_v3", "DeepseekV3Config", "DeepseekV3TopkRouter", {"norm_topk_prob": False}, {"renormalize": False}
    ),
    "deepseek_v32": family("deepseek_v32", "DeepseekV32Config", "DeepseekV32TopkRouter"),
    "deepseek_v4": family("deepseek_v4", "DeepseekV4Config", "DeepseekV4TopKRouter"),
    "diffusion_gemma": family("diffusion_gemma", "DiffusionGemmaTextConfig", "DiffusionGemmaTextRouter", GEMMA, TWELVE),
    "dots1": family("dots1", "Dots1Config", "Dots1TopkRouter", SIZED, TWELVE),
    "dots1/divided": family(
        "dots1",
        "Dots1Config",
        "Dots1TopkRouter",
        {**SIZED, "norm_topk_prob": True},
        {**TWELVE, "renormalize": mo.norm.sum(eps=1e-20)},
    ),
    "ernie4_5_moe": family("ernie4_5_moe", "Ernie4_5_MoeConfig", "Ernie4_5_MoeTopKRouter"),
    "ernie4_5_vl_moe": family("ernie4_5_vl_moe", "Ernie4_5_VLMoeTextConfig", "Ernie4_5_VLMoeMoeTopKRouter"),
    "exaone_moe": family("exaone_moe", "ExaoneMoeConfig", "ExaoneMoeTopkRouter"),
    "exaone_moe/groups": family("exaone_moe", "ExaoneMoeConfig", "ExaoneMoeTopkRouter", GROUPS, FOUR_GROUPS),
    "flex_olmo": family("flex_olmo", "FlexOlmoConfig", "FlexOlmoTopKRouter"),
    "gemma4": family("gemma4", "Gemma4TextConfig", "Gemma4TextRouter", GEMMA, TWELVE),
    "glm4_moe": family("glm4_moe", "Glm4MoeConfig", "Glm4MoeTopkRouter"),
    "glm4_moe_lite": family("glm4_moe_lite", "Glm4MoeLiteConfig", "Glm4MoeLiteTopkRouter"),
    "glm4v_moe": family("glm4v_moe", "Glm4vMoeTextConfig", "Glm4vMoeTextTopkRouter"),
    "glm5_next": family("glm5_next", "Glm5NextTextConfig", "Glm5NextTextTopkRouter"),
    "glm_moe_dsa": family("glm_moe_dsa", "GlmMoeDsaConfig", "GlmMoeDsaTopkRouter"),
    "gpt_oss": family("gpt_oss", "GptOssConfig", "GptOssTopKRouter"),
    "granitemoe": family("granitemoe", "GraniteMoeConfig", "GraniteMoeTopKRouter", read=indices_first),
    "granitemoe_swa": family("granitemoe_swa", "GraniteMoeSWAConfig", "GraniteMoeSWATopKRouter"),
    "granitemoehybrid": family(
        "granitemoehybrid", "GraniteMoeHybridConfig", "GraniteMoeHybridTopKRouter", read=indices_first
    ),
    "granitemoeshared": family(
        "granitemoeshared", "GraniteMoeSharedConfig", "GraniteMoeSharedTopKRouter", read=indices_first
    ),
    "hunyuan_v1_moe": family(
        "hunyuan_v1_moe",
        "HunYuanMoEV1Config",
        "HunYuanMoEV1Gate",
        {"num_experts": 12, "moe_topk": 3},
        TWELVE,
    ),
    "hy_v3": family("hy_v3", "HYV3Config", "HYV3TopKRouter", read=given_bias),
    "hy_v4": family("hy_v4", "HYV4Config", "HYV4TopkRouter"),
    "jamba": family("jamba", "JambaConfig", "JambaSparseMoeBlock", SMALL_EXPERTS, read=routed_by_the_block),
    "jetmoe": family(
        "jetmoe",
        "JetMoeConfig",
        "JetMoeTopKGating",
        read=sorted_by_expert,
        arguments=lambda config: (config.hidden_size, config.num_local_experts, config.num_experts_per_tok),
    ),
    "kimi_linear": family("kimi_linear", "KimiLinearConfig", "KimiLinearTopkRouter"),
    "laguna": family("laguna", "LagunaConfig", "LagunaTopKRouter", factor="moe_routed_scaling_factor"),
    "laguna/cap": family(
        "laguna",
        "LagunaConfig",
        "LagunaTopKRouter",
        {"moe_router_logit_softcapping": 1.5, "moe_routed_scaling_factor": 2.5},
        {"logit_cap": 1.5, "scale": 2.5},
        factor="moe_routed_scaling_factor",
    ),
    "lfm2_moe": family("lfm2_moe", "Lfm2MoeConfig", "Lfm2MoeTopKRouter", read=given_bias),
    "lfm2_moe/no-bias": family(
        "lfm2_moe",
        "Lfm2MoeConfig",
        "Lfm2MoeTopKRouter",
        {"use_expert_bias": False, "norm_topk_prob": False},
        {"selection_bias": False, "renormalize": False},
        read=given_bias,
    ),
    "llama4": family("llama4", "Llama4TextConfig", "Llama4Router", read=read_llama4),
    "llama4/two": family(
        "llama4", "Llama4TextConfig", "Llama4Router", {"num_experts_per_tok": 2}, {"top_k": 2}, read=read_llama4
    ),
    # Probabilities of 768 experts are near 1e-3: a bias of the usual spread would decide the picks alone.
    "longcat_flash": family(
        "longcat_flash", "LongcatFlashConfig", "LongcatFlashTopkRouter", read=no_logits, correction=2e-3
    ),
    "mellum": family("mellum", "MellumConfig", "MellumTopKRouter"),
    "mimo_v2_flash": family("mimo_v2_flash", "MiMoV2FlashConfig", "MiMoV2FlashTopkRouter"),
    "minimax": family("minimax", "MiniMaxConfig", "MiniMaxTopKRouter"),
    "minimax_m2": family("minimax_m2", "MiniMaxM2Config", "MiniMaxM2TopKRouter", read=given_bias),
    "minimax_m3_vl": family(
        "minimax_m3_vl", "MiniMaxM3VLTextConfig", "MiniMaxM3VLTopKRouter", factor="routed_scaling_factor"
    ),
    "mistral4": family("mistral4", "Mistral4Config", "Mistral4TopkRouter"),
    "mistral4/groups": family(
        "mistral4",
        "Mistral4Config",
        "Mistral4TopkRouter",
        {**GROUPS, "routed_scaling_factor": 2.0},
        {**FOUR_GROUPS, "scale": 2.0},
    ),
    "mixtral": family("mixtral", "MixtralConfig", "MixtralTopKRouter"),
    "nemotron_h": family("nemotron_h", "NemotronHConfig", "NemotronHTopkRouter"),
    "olmoe": family("olmoe", "OlmoeConfig", "OlmoeTopKRouter"),
    "openai_privacy_filter": family(
        "openai_privacy_filter",
        "OpenAIPrivacyFilterConfig",
        "OpenAIPrivacyFilterTopKRouter",
        factor="num_experts_per_tok",
    ),
    "qwen2_moe": family("qwen2_moe", "Qwen2MoeConfig", "Qwen2MoeTopKRouter"),
    "qwen3_5_moe": family("qwen3_5_moe", "Qwen3_5MoeTextConfig", "Qwen3_5MoeTopKRouter"),
    "qwen3_moe": family("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeTopKRouter"),
    "qwen3_moe/divided": family(
        "qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeTopKRouter", {"norm_topk_prob": True}, {"renormalize": True}
    ),
    "qwen3_next": family("qwen3_next", "Qwen3NextConfig", "Qwen3NextTopKRouter"),
    "qwen3_omni_moe": family("qwen3_omni_moe", "Qwen3OmniMoeTextConfig", "Qwen3OmniMoeThinkerTextTopKRouter"),
    "qwen3_omni_moe/talker": family(
        "qwen3_omni_moe",
        "Qwen3OmniMoeTalkerTextConfig",
        "Qwen3OmniMoeTalkerTextTopKRouter",
        overrides={"renormalize": False},
    ),
    "qwen3_vl_moe": family("qwen3_vl_moe", "Qwen3VLMoeTextConfig", "Qwen3VLMoeTextTopKRouter"),
    "qwen4_exp": family("qwen4_exp", "Qwen4ExpTextConfig", "Qwen4ExpTextTopKRouter"),
    "solar_open": family("solar_open", "SolarOpenConfig", "SolarOpenTopkRouter"),
    "step3p7": family("step3p7", "Step3p7TextConfig", "Step3p7TopKRouter", factor="moe_router_scaling_factor"),
}

# One for each feature that no example has: group maxima, expert scales, a cap, odd sizes, softmax in groups.
COMPILED_CASES = (
    "dbrx/square",
    "deepseek_v2/groups",
    "deepseek_v4",
    "flex_olmo",
    "gemma4",
    "laguna/cap",
    "lfm2_moe",
    "longcat_flash",
    "mistral4/groups",
)


@needs_transformers
@pytest.mark.parametrize("name", CASES)
def test_preset_routes_like_the_model(name: str) -> None:
    assert_routes_like_the_model(CASES[name], "reference")


@needs_transformers
@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("name", COMPILED_CASES)
def test_compiled_preset_routes_like_the_model(name: str, backend: str) -> None:
    assert_routes_like_the_model(CASES[name], backend)


@needs_transformers
@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_that_take_experts_from_a_table(backend: str) -> None:
    """deepseek_v4's hash layers: scores of the experts that a table has for each token id."""
    modeling = importlib.import_module("transformers.models.deepseek_v4.modeling_deepseek_v4")
    configuration = importlib.import_module("transformers.models.deepseek_v4.configuration_deepseek_v4")
    config = configuration.DeepseekV4Config(hidden_size=HIDDEN, vocab_size=97)
    module = modeling.DeepseekV4HashRouter(config)
    random = torch.Generator().manual_seed(11)
    with torch.no_grad():
        module.weight.copy_(HIDDEN**-0.5 * torch.randn(module.weight.shape, generator=random))
    # Some rows of the table name an expert twice.
    module.tid2eid = torch.randint(0, 40, module.tid2eid.shape, generator=random)
    hidden = torch.randn(3, 23, HIDDEN, generator=random)
    ids = torch.randint(0, 97, (3, 23), generator=random)
    logits, weights, indices = module(hidden, ids)

    router = mo.Router.preset("deepseek_v4", selection="given", selection_bias=False, indices_dtype="int64")
    device = device_of(backend)
    given = logits.detach().reshape(3, 23, -1).to(device).requires_grad_()
    r = mo.compile(router, backend=backend)(given, indices=module.tid2eid[ids].to(device))
    assert torch.equal(r.indices.cpu().flatten(0, 1), indices)
    assert torch.equal(r.counts.cpu(), torch.bincount(indices.flatten(), minlength=router.columns))
    assert_close("weights", r.weights.flatten(0, 1), weights, EXACT)
    sent = cotangent(weights, seed=9)
    [wanted] = torch.autograd.grad(weights, logits, sent)
    [found] = torch.autograd.grad(r.weights, given, sent.reshape(r.weights.shape).to(device))
    assert_close("gradient of the logits", found.flatten(0, 1), wanted, GRADIENT)


@needs_transformers
@pytest.mark.parametrize("name", [n for n in CASES if CASES[n].router().selection_bias])
def test_selection_biases_change_picks(name: str) -> None:
    """Else a preset without the bias would pass, too."""
    assert rows_that_a_bias_changes(CASES[name]) > TOKENS // 4


@needs_transformers
@pytest.mark.parametrize(
    ("name", "shift", "first"),
    [("lfm2_moe", -14.0, 0.0), ("deepseek_v3", -46.0, 0.0), ("minimax_m2", -46.0, 0.0), ("ernie4_5_moe", 0.0, 34.0)],
)
def test_division_of_small_sums(name: str, shift: float, first: float) -> None:
    """What is added to a sum, or bounds it, shows only where all picks have scores as small: where all logits are moved
    by `shift`, or the first expert, which a bias keeps from being picked, takes all probability but e^-34."""
    case = CASES[name]
    router, module = case.router(), case.build()
    hidden = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(5))
    hidden[:, 0] = 1.0
    correction = correction_of(case, module)
    assert correction is not None
    with torch.no_grad():
        module.weight[:, 0] = shift
        module.weight[0, 0] += first
        if first:
            correction[0] = -2.0  # shares its memory with the module's
    weights, indices = case.read(module, hidden, correction)
    expected = by_expert(weights, indices, router.num_experts)
    logits = linear(hidden, module.weight.detach())

    def dense(router: mo.Router) -> torch.Tensor:
        r = mo.compile(router, backend="reference")(logits, bias=correction)
        return by_expert(r.weights, r.indices, router.num_experts)

    assert_close("weights", dense(router), expected, EXACT)
    other = mo.norm.sum(eps=0.0 if name != "minimax_m2" else 1e-20)
    with pytest.raises(AssertionError, match="weights"):
        assert_close("weights", dense(dataclasses.replace(router, renormalize=other)), expected, 1e-3)


@needs_transformers
@pytest.mark.parametrize("name", sorted({*ALL, *WITHOUT}))
def test_family_is_one_of_transformers(name: str) -> None:
    assert importlib.util.find_spec(f"transformers.models.{name}.modeling_{name}") is not None


# Without transformers -------------------------------------------------------------------------------------------------


def test_every_preset_is_compared_with_its_model() -> None:
    assert {case.model for case in CASES.values()} == set(ALL)
    assert [name for name in CASES if "/" not in name] == list(ALL)
    assert not set(ALL) & set(WITHOUT)


def test_overrides_replace_arguments() -> None:
    router = mo.Router.preset("deepseek_v3", num_experts=64, top_k=6, scale=1.0, outputs=("probs",), name="mine")
    assert router == mo.Router(
        64,
        6,
        score="sigmoid",
        selection_bias=True,
        groups=8,
        groups_kept=4,
        renormalize=mo.norm.sum(eps=1e-20),
        outputs=("probs",),
        name="mine",
    )
    assert mo.Router.preset("deepseek_v3", groups=None, groups_kept=None).groups is None
    assert mo.Router.preset("deepseek_v3").groups == 8  # an override does not stay
    with pytest.raises(InputError, match="top_k must be an integer between 1 and num_experts = 4, found top_k = 8"):
        mo.Router.preset("deepseek_v3", num_experts=4)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("deepseek_v2", ("top_k",)),
        ("deepseek_ocr2", ("top_k",)),
        *((name, ("num_experts", "top_k")) for name in ("dots1", "gemma4", "diffusion_gemma", "hunyuan_v1_moe")),
    ],
)
def test_sizes_that_no_family_ships_have_to_be_given(name: str, missing: tuple[str, ...]) -> None:
    message = (
        f"preset '{name}' has no default for {' and '.join(missing)}: .* give {', '.join(f'{m}=...' for m in missing)}"
    )
    with pytest.raises(InputError, match=message):
        mo.Router.preset(name)
    assert mo.Router.preset(name, **{m: {"num_experts": 16, "top_k": 4}[m] for m in missing}).top_k == 4


def test_every_other_preset_needs_no_arguments() -> None:
    sizeless = {"deepseek_v2", "deepseek_ocr2", "dots1", "gemma4", "diffusion_gemma", "hunyuan_v1_moe"}
    for name in set(ALL) - sizeless:
        mo.Router.preset(name).module()


def test_errors() -> None:
    with pytest.raises(InputError, match="unknown preset 'deepseekv3'; did you mean 'deepseek_v3'"):
        mo.Router.preset("deepseekv3")
    with pytest.raises(InputError, match="unknown preset 3; known: afmoe, aria, "):
        mo.Router.preset(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"no arguments of Router express the router of 'doge': .*half scores"):
        mo.Router.preset("doge")
    with pytest.raises(InputTypeError, match="preset 'mixtral': Router has no argument 'topk'; did you mean 'top_k'"):
        mo.Router.preset("mixtral", topk=2)

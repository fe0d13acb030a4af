"""Language models of every sparse family, with two layers and random weights: nothing is downloaded."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

VOCABULARY, HIDDEN, LAYERS, EXPERTS, TOP_K = 37, 32, 2, 8, 2

# What configurations call sizes, where they have them.
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "d_model"), HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_heads"), 4),
    "num_key_value_heads": 2,
    "head_dim": 8,
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "dense_intermediate_size", "intermediate_size_mlp"), 24),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "shared_intermediate_size",
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "share_expert_dim",
            "expert_ffn_hidden_size",
        ),
        12,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"), TOP_K
    ),
    **dict.fromkeys(("num_shared_experts", "n_shared_experts", "moe_num_shared_experts"), 1),
    "n_group": 4,
    "topk_group": 2,
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 0),
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    **dict.fromkeys(("max_position_embeddings", "max_seq_len"), 64),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}

_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


@dataclass(frozen=True)
class Tiny:
    """How to build a family's model.

    Attributes:
        options: of its configuration, in place of `SIZES` and defaults.
        config, model: names of the classes, where they are not those of the family's causal language model. A model
            that has no head gets its embedding for one.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    config: str = ""
    model: str = ""


FAMILIES: Mapping[str, Tiny] = {
    "afmoe": Tiny(),
    "aria": Tiny(),
    "axk1": Tiny(),
    "axk2": Tiny({"n_group": None, "topk_group": None, "mlp_layer_types": ["sparse", "sparse"]}),
    "cohere2_moe": Tiny({"shared_expert_combination_strategy": "average", "expert_selection_fn": "sigmoid"}),
    "dbrx": Tiny(
        {
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
            "ffn_config": {
                "hidden_size": HIDDEN,
                "ffn_hidden_size": 12,
                "moe_num_experts": EXPERTS,
                "moe_top_k": TOP_K,
            },
        }
    ),
    "deepseek_ocr2": Tiny({"mlp_layer_types": ["sparse", "sparse"]}, "DeepseekOcr2TextConfig", "DeepseekOcr2TextModel"),
    "deepseek_v2": Tiny({"topk_method": "group_limited_greedy"}),
    "deepseek_v3": Tiny(),
    "deepseek_v32": Tiny(),
    "deepseek_v4": Tiny({"mlp_layer_types": ["hash_moe", "moe"]}),
    "diffusion_gemma": Tiny(
        {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 8},
        "DiffusionGemmaTextConfig",
        "DiffusionGemmaEncoderTextModel",
    ),
    "dots1": Tiny(),
    "ernie4_5_moe": Tiny(),
    "ernie4_5_vl_moe": Tiny(
        {"moe_intermediate_size": [12, 8], "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}},
        "Ernie4_5_VLMoeTextConfig",
        "Ernie4_5_VLMoeTextModel",
    ),
    "exaone_moe": Tiny(),
    "flex_olmo": Tiny(),
    "gemma4": Tiny(
        {
            "enable_moe_block": True,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 0,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "Gemma4TextConfig",
    ),
    "glm4_moe": Tiny(),
    "glm4_moe_lite": Tiny({"mlp_layer_types": ["sparse", "sparse"]}),
    "glm4v_moe": Tiny(
        {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}},
        "Glm4vMoeTextConfig",
        "Glm4vMoeTextModel",
    ),
    "glm5_next": Tiny(
        {
            "qk_rope_head_dim": 0,
            "mlp_layer_types": ["sparse", "sparse"],
            "index_head_dim": 8,
            "index_n_heads": 2,
            "layer_types": ["linear_attention", "deepseek_sparse_attention"],
            "linear_head_dim": 8,
            "linear_num_heads": 4,
        },
        "Glm5NextTextConfig",
        "Glm5NextTextModel",
    ),
    "glm_moe_dsa": Tiny(),
    "gpt_oss": Tiny(),
    "granitemoe": Tiny(),
    "granitemoe_swa": Tiny(),
    "granitemoehybrid": Tiny(
        {
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 8,
        }
    ),
    "granitemoeshared": Tiny(),
    "hunyuan_v1_moe": Tiny(),
    "hy_v3": Tiny({"mlp_layer_types": ["sparse", "sparse"]}),
    "hy_v4": Tiny({"mlp_layer_types": ["sparse", "sparse"]}),
    "inkling": Tiny(
        {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "rel_extent": 16},
        "InklingTextConfig",
    ),
    "jamba": Tiny(
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 1,
            "expert_layer_offset": 0,
            "use_mamba_kernels": False,
            "mamba_d_state": 4,
        }
    ),
    "jetmoe": Tiny(),
    "kimi_linear": Tiny(
        {
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["sparse", "sparse"],
            "linear_head_dim": 8,
            "linear_num_heads": 4,
        }
    ),
    "laguna": Tiny({"moe_router_logit_softcapping": 2.0, "mlp_layer_types": ["sparse", "sparse"]}),
    "lfm2_moe": Tiny({"layer_types": ["conv", "full_attention"]}),
    "llama4": Tiny({}, "Llama4TextConfig"),
    "longcat_flash": Tiny({"zero_expert_num": 4, "head_dim": 8}),
    "mellum": Tiny(),
    "mimo_v2_flash": Tiny({"mlp_layer_types": ["sparse", "sparse"]}),
    "minimax": Tiny(),
    "minimax_m2": Tiny(),
    "minimax_m3_vl": Tiny({}, "MiniMaxM3VLTextConfig"),
    "mistral4": Tiny(),
    "mixtral": Tiny(),
    "nemotron_h": Tiny(
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 8,
            "chunk_size": 8,
            "moe_latent_size": 16,
            "use_mamba_kernels": False,
        }
    ),
    "olmoe": Tiny(),
    "openai_privacy_filter": Tiny({}, "OpenAIPrivacyFilterConfig", "OpenAIPrivacyFilterModel"),
    "qwen2_moe": Tiny(),
    "qwen3_5_moe": Tiny(_LINEAR, "Qwen3_5MoeTextConfig"),
    "qwen3_moe": Tiny(),
    "qwen3_next": Tiny(_LINEAR),
    "qwen3_omni_moe": Tiny({}, "Qwen3OmniMoeTextConfig", "Qwen3OmniMoeThinkerTextModel"),
    "qwen3_vl_moe": Tiny({}, "Qwen3VLMoeTextConfig", "Qwen3VLMoeTextModel"),
    "qwen4_exp": Tiny(
        {
            **_LINEAR,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
            "hc_lowrank": 8,
        },
        "Qwen4ExpTextConfig",
    ),
    "solar_open": Tiny(),
    "step3p7": Tiny(
        {
            "sliding_window": 16,
            "mlp_layer_types": ["sparse", "sparse"],
            "swiglu_limits": [1.0, 0.0],
            "swiglu_limits_shared": [1.0, 0.0],
        },
        "Step3p7TextConfig",
        "Step3p7TextModel",
    ),
}
"""Families whose blocks `moesaic.hf.replace` takes, by their folder in transformers."""


class Headed(torch.nn.Module):
    """A model without a head, its embedding being one."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.config = model.config

    def forward(self, input_ids: torch.Tensor, **others: Any) -> Any:
        if type(self.model).__name__ == "Ernie4_5_VLMoeTextModel":  # text and pictures have experts of their own
            others["moe_mm_token_type_ids"] = input_ids % 2
        states = self.model(input_ids, **others).last_hidden_state
        return _Logits(states @ self.model.get_input_embeddings().weight.mT)


@dataclass
class _Logits:
    logits: torch.Tensor


def build(family: str, **more: Any) -> Any:
    """The model of a family, in evaluation."""
    tiny = FAMILIES[family]
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    configs = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    heads = (n for n, v in vars(modeling).items() if n.endswith("ForCausalLM") and v.__module__ == modeling.__name__)
    kind = getattr(modeling, tiny.model or next(heads))
    config = getattr(configs, tiny.config) if tiny.config else kind.config_class
    model = kind._from_config(
        config(**_sizes(config, {**tiny.options, **more})), attn_implementation="eager", experts_implementation="eager"
    )
    fill(model)
    return (model if hasattr(model, "lm_head") else Headed(model)).eval()


def _sizes(config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    known = {n for c in config.__mro__ for n in getattr(c, "__annotations__", {})} | set(config.attribute_map)
    sizes = {n: v for n, v in SIZES.items() if n in known}
    if "kv_lora_rank" in known:  # attention with latent keys derives the width of heads from its parts
        sizes |= {"num_key_value_heads": sizes["num_attention_heads"]}
        sizes.pop("head_dim", None)
    # A name that stands for another one is given once.
    sizes = {n: v for n, v in sizes.items() if config.attribute_map.get(n) not in sizes}
    return {**sizes, **options}


@torch.no_grad()
def fill(model: torch.nn.Module, seed: int = 3) -> None:
    """Random numbers where a model may start with equal ones: picks have no ties, and biases decide some of them."""
    g = torch.Generator().manual_seed(seed)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        noise = torch.randn(tensor.shape, generator=g)
        if "correction_bias" in name or "expert_bias" in name:
            tensor.copy_(0.2 * noise)
        elif name.endswith("tid2eid"):
            tensor.copy_(torch.rand(len(tensor), EXPERTS, generator=g).topk(tensor.shape[1]).indices)
        elif not isinstance(tensor, torch.nn.Parameter):
            continue
        elif tensor.dim() < 2:
            tensor.add_(0.1 * noise)
        elif "embed" in name:
            tensor.copy_(noise)
        else:
            tensor.copy_(1.5 * noise / math.sqrt(tensor.shape[-1]))


@torch.no_grad()
def greedy(model: Any, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Tokens [B, S + count]: by the model's own `generate`, or one after another without one."""
    if hasattr(model, "generate"):
        written: torch.Tensor = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
        return written
    for _ in range(count):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    return tokens

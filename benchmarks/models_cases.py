"""What is compared inside of models: shapes, implementations of experts, and the parts that are timed."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IMPLEMENTATIONS = {
    "eager": ("eager", False),
    "grouped_mm": ("grouped_mm", False),
    "grouped_mm+compile": ("grouped_mm", True),
    "moesaic": ("moesaic", False),
    "moesaic+compile": ("moesaic", True),
    "moesaic-blocks": ("blocks", False),
    "moesaic-blocks+compile": ("blocks", True),
}
PAIRS = tuple(
    (f"grouped_mm{how}", f"{ours}{how}") for ours in ("moesaic", "moesaic-blocks") for how in ("", "+compile")
)
LEFT_OUT = "moesaic_benchmark_left_out"
"""The implementation of experts that does nothing; see `left_out`."""


@dataclass(frozen=True)
class Shape:
    """Of a model. `vocabulary` and `layers` are those of the small one that is timed."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocabulary: int

    def model(self, device: str, dtype: torch.dtype) -> Any:
        """The model with random weights, in training mode."""
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        config = Qwen3MoeConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=4 * self.hidden,
            moe_intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            num_experts=self.experts,
            num_experts_per_tok=self.top_k,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            use_cache=False,
        )
        with torch.device(device):
            return Qwen3MoeForCausalLM._from_config(config, dtype=dtype, attn_implementation="sdpa").train()


SHAPES = {
    # A 12th of 48 layers, and of 151936 rows of the head.
    "qwen3": Shape("Qwen3-30B-A3B", 2048, 768, 128, 8, 32, 4, 128, layers=4, vocabulary=12672),
    "tiny": Shape("tiny", 32, 24, 8, 2, 4, 2, 8, layers=2, vocabulary=64),
}


def with_experts(module: Any, implementation: str) -> Any:
    """The module once more, with the same weights and another implementation of experts."""
    shared = {id(t): t for t in (*module.parameters(), *module.buffers())}
    made = copy.deepcopy(module, shared)
    for part in made.modules():
        if hasattr(part, "config"):
            part.config._experts_implementation = implementation
    return made


def left_out(module: Any, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """In place of experts: x itself, and a use of the weights, so that everything around has its gradients."""
    return hidden * weights.sum(-1, keepdim=True).to(hidden.dtype)


@dataclass(frozen=True)
class Inputs:
    """What a part is called with. `leaves` are those of its tensors that want gradients."""

    given: tuple[Tensor, ...]
    named: Mapping[str, Any]
    leaves: tuple[Tensor, ...]
    cotangent: Tensor

    def run(self, module: Any) -> Tensor:
        """The result, of a model its loss."""
        result = module(*self.given, **self.named)
        return result if isinstance(result, Tensor) else result.loss

    def train(self, module: Any, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The result, and the gradients of leaves and parameters, which are made anew; zeros where there is none."""
        result = self.run(module)
        result.backward(self.cotangent)
        found = [result.detach()]
        for leaf in (*self.leaves, *parameters):
            found.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
            leaf.grad = None
        return found

    def widened(self) -> Inputs:
        """The same numbers in float32."""
        copies = {id(t): t.detach().float().requires_grad_() for t in self.leaves}

        def wide(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(wide, value))
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            return copies[id(value)] if id(value) in copies else value.float()

        named = {name: wide(value) for name, value in self.named.items()}
        return Inputs(wide(self.given), named, tuple(copies.values()), self.cotangent.float())


def furthest(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[float]:
    """How far off each tensor is, relative to its norm; infinite where it has numbers that are none."""
    errors = []
    for a, b in zip(found, wanted, strict=True):
        error = ((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-30)).item()
        errors.append(error if error == error else float("inf"))
    return errors

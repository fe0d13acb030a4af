"""Layers that are made at the first call, while torch.compile traces it: from constants that every release knows."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

import pytest
import torch
from torch.nn import functional

import moesaic as mo
from moesaic import te
from moesaic.runtime import made_once
from moesaic.runtime.transformers_experts import Plan, experts_forward, plan_of

RUNTIME = Path(made_once.__file__).parent

E, K, H, INNER, TOKENS = 11, 3, 26, 7, 9  # together of no other test: what is there is not made again
PLAIN = (int, float, bool, str, NoneType)

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def picks() -> tuple[torch.Tensor, torch.Tensor]:
    weights, indices = normal(TOKENS, E).softmax(-1).topk(K)
    return indices, weights


class Module(torch.nn.Module):
    """Experts as transformers has them."""

    has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.activation = activation
        self.gate_up_proj = torch.nn.Parameter(normal(E, 2 * INNER, H))
        self.down_proj = torch.nn.Parameter(normal(E, H, INNER))

    def _apply_gate(self, h: torch.Tensor) -> torch.Tensor:
        gate, up = h.chunk(2, -1)
        return self.activation(gate) * up

    def forward(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return experts_forward(self, x, indices, weights, backend="auto", recompute=None, allow_tf32=False)


def experts() -> Case:
    return mo.compile(mo.Experts(E, H, INNER)), (normal(TOKENS, H), *picks(), normal(E, 2 * INNER, H), normal(E, H, 7))


def whole_layer() -> Case:
    """Declarations that hold functions, other declarations and a mapping."""
    router = mo.Router(E, K, score=lambda x: mo.math.softplus(x), losses={"balance": mo.LoadBalance(coef=0.1)})
    layer = mo.compile(mo.MoE(router, mo.Experts(E, H, INNER, activation=lambda x: mo.math.silu(x) * 2.0)))
    return layer, (normal(TOKENS, H), normal(E, H), normal(E, 2 * INNER, H), normal(E, H, INNER))


def of_transformers(activation: Callable[[torch.Tensor], torch.Tensor]) -> Case:
    module = Module(activation)
    plan_of(module)
    return module, (normal(TOKENS, H), *picks())


def dispatch_and_combine() -> Case:
    def call(x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        d = mo.dispatch(indices, E, align=16, capacity=1.25)
        return mo.combine(torch.where(d.tokens[:, None] < 0, 0.0, x[d.tokens.clamp(min=0).long()]), d, weights)

    return call, (normal(TOKENS, H), *picks())


def losses() -> Case:
    def call(logits: torch.Tensor) -> torch.Tensor:
        scores = mo.scores(logits, "sigmoid", normalize=True)
        balance = mo.load_balance_loss(scores, torch.ones(E), top_k=K, coef=0.5)
        return balance + mo.z_loss(logits, coef=0.25) + mo.entropy_loss(scores)

    return call, (normal(TOKENS, E),)


def transformer_engine() -> Case:
    def call(logits: torch.Tensor, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        probs, picked = te.fused_topk_with_score_function(
            logits, K, False, None, None, 2.5, "sigmoid", None, topk_indices=buffer
        )
        chosen, scores = te.fused_compute_score_for_moe_aux_loss(logits, K, "softmax")
        return probs, picked.clone(), chosen, te.fused_moe_aux_loss(scores, chosen.sum(0), TOKENS, E, K, 0.1)

    return call, (normal(TOKENS, E), torch.zeros(TOKENS, K, dtype=torch.int64))


CASES: Mapping[str, tuple[Callable[[], Case], set[str]]] = {
    "experts": (experts, {"experts._layer"}),
    "whole layer": (whole_layer, {"moe._layer"}),
    "of transformers": (lambda: of_transformers(functional.silu), {"transformers_experts._compiled"}),
    "in two parts": (lambda: of_transformers(torch.sin), {"split_experts._before", "split_experts._after"}),
    "dispatch": (dispatch_and_combine, {"dispatch._dispatch_layer", "dispatch._combine_layer"}),
    "losses": (losses, {f"functional.{name}_layer" for name in ("_scores", "_load_balance", "_mean")}),
    "te": (transformer_engine, {f"transformer_engine.{name}_layer" for name in ("topk", "scores", "aux_loss")}),
}


@pytest.mark.parametrize("name", CASES)
def test_made_from_plain_values_while_tracing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What else is a constant depends on the release of torch: in 2.11, no frozen dataclass is."""
    made: dict[str, tuple[Any, ...]] = {}
    keep = made_once._keep

    def recording(make: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
        made[f"{make.__module__.rpartition('.')[2]}.{make.__name__}"] = arguments
        return keep(make, arguments)

    monkeypatch.setattr(made_once, "_keep", recording)
    case, expected = CASES[name]
    call, inputs = case()
    torch._dynamo.reset()
    found = torch.compile(call, fullgraph=True, backend="eager", dynamic=True)(*inputs)
    assert expected <= set(made)
    for maker, arguments in made.items():
        assert all(type(a) in PLAIN for a in arguments), f"{maker} is made from {arguments}"
    torch.testing.assert_close(found, call(*inputs), rtol=0, atol=0)


def test_all_are_tried() -> None:
    declared = {
        f"{path.stem}.{name}"
        for path in RUNTIME.glob("*.py")
        for name in re.findall(r"^@made_once\ndef (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert declared == set().union(*(names for _, names in CASES.values()))


def test_equal_declarations_have_one_handle() -> None:
    one, same, other = (made_once.handle_of(mo.Experts(E, H, n)) for n in (5, 5, 6))
    assert one == same != other
    assert made_once.by_handle(other) == mo.Experts(E, H, 6)


def test_handles_stay_in_their_process() -> None:
    plan = Plan(mo.Experts(E, H, INNER), ((E, H),), ())
    written = pickle.dumps(plan)
    assert plan.handle.encode() not in written
    assert pickle.loads(written) == plan

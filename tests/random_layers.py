"""Random declarations of whole layers and of experts alone, and inputs for them: what the fuzz tests draw from."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

import moesaic as mo
from moesaic.ir.core import Module
from moesaic.ir.types import DType

Tensors = dict[str, torch.Tensor]

SIZES = (1, 2, 7, 8, 16, 17, 24, 33)


def _product_gating(gate: Any, up: Any) -> Any:
    return mo.math.tanh(gate) * up


def experts(rng: random.Random, number: int, hidden: int) -> mo.Experts:
    """Experts of any kind."""
    gated = rng.random() < 0.75
    options: dict[str, Any] = {"gated": gated}
    if gated:
        layout = rng.choice(["halves", "halves", "interleaved", "separate"])
        options |= {layout: True} if layout != "halves" else {}
        gating: Callable[..., Any] | None = rng.choice([None, None, mo.ClampedSwiGLU(1.5, 1.7, 1.0), _product_gating])
        options |= {"gating": gating} if gating is not None else {"activation": rng.choice(["silu", "gelu", "sigmoid"])}
    else:
        options["activation"] = rng.choice(["silu", "relu2", "gelu_tanh", "identity"])
    if rng.random() < 0.3:
        options["capacity"] = rng.choice([0.6, 1.0, 1.7])
        options["pad"] = rng.random() < 0.4
    return mo.Experts(
        number,
        hidden,
        rng.choice(SIZES),
        bias=rng.random() < 0.4,
        transposed=rng.choice([False, False, True, "up", "down"]),
        weight_on=rng.choice(["output", "output", "input", "middle"]),
        align=rng.choice([1, 1, 16]),
        **options,
    )


def router(rng: random.Random) -> mo.Router:
    """A router that has gradients, and perhaps losses."""
    number = rng.choice([2, 3, 6, 8, 12])
    options: dict[str, Any] = {}
    if rng.random() < 0.3 and number % 2 == 0 and number >= 4:
        options |= {"groups": 2, "groups_kept": 1, "group_score": "max"}
    most = number // 2 if options else number
    if rng.random() < 0.6:
        options["renormalize"] = True
    if rng.random() < 0.3:
        options["losses"] = {"balance": mo.LoadBalance(coef=0.3), "z": mo.ZLoss(coef=0.05)}
    order = rng.choice(["score_then_topk", "score_then_topk", "topk_then_score"])
    return mo.Router(
        number,
        rng.randint(1, min(3, most)),
        score=rng.choice(["softmax", "sigmoid", "sqrtsoftplus"]),
        order=order,
        selection_bias=order == "score_then_topk" and rng.random() < 0.4,
        gate_bias=rng.random() < 0.3,
        expert_scale=rng.random() < 0.2,
        router_scale=rng.random() < 0.2,
        scale=rng.choice([1.0, 2.5]),
        **options,
    )


def shared(rng: random.Random) -> mo.SharedExpert | None:
    if rng.random() < 0.4:
        return None
    gated = rng.random() < 0.7
    return mo.SharedExpert(
        rng.choice(SIZES),
        gated=gated,
        activation=rng.choice(["silu", "gelu_tanh"]),
        separate=gated and rng.random() < 0.4,
        transposed=rng.random() < 0.3,
        gate=rng.random() < 0.4,
    )


def layer(seed: int) -> mo.MoE | mo.Experts:
    """The layer of a seed."""
    rng = random.Random(seed)
    hidden = rng.choice(SIZES)
    if rng.random() < 0.3:
        return experts(rng, rng.choice([1, 2, 5]), hidden)
    r = router(rng)
    s = shared(rng)
    local = r.num_experts if rng.random() < 0.8 else max(1, r.num_experts - 1)
    return mo.MoE(
        r,
        experts(rng, local, hidden),
        shared=s,
        mean=s is not None and rng.random() < 0.3,
        residual=rng.random() < 0.3,
        outputs=rng.choice([("hidden",), ("hidden", "counts"), ("hidden", "logits", "indices", "weights")]),
    )


def module_of(drawn: mo.MoE | mo.Experts, dtype: DType, *, masked: bool = False) -> Module:
    if isinstance(drawn, mo.MoE):
        return drawn.module(dtype, masked=masked)
    return drawn.module(dtype, 2)


def inputs_of(drawn: mo.MoE | mo.Experts, tokens: int, dtype: torch.dtype, seed: int, *, masked: bool) -> Tensors:
    """Inputs whose products have values near 1; ids from -1 to E."""
    g = torch.Generator().manual_seed(seed)
    made: Tensors = {}
    for argument in module_of(drawn, DType.F32, masked=masked).entry.arguments:
        sizes = [d if isinstance(d, int) else tokens for d in argument.type.shape]
        if argument.type.dtype is DType.I1:
            made[argument.name] = torch.rand(sizes, generator=g) < 0.7
        elif not argument.type.dtype.is_float:
            assert isinstance(drawn, mo.Experts)
            made[argument.name] = torch.randint(-1, drawn.num_experts + 1, sizes, generator=g, dtype=torch.int32)
        else:
            small = len(sizes) > 1 and argument.name not in ("x", "residual", "weights")
            values = torch.randn(sizes, generator=g, dtype=torch.float64) * (sizes[-1] ** -0.5 if small else 1.0)
            of_router = argument.name in ("bias", "gate_bias", "expert_scale", "router_scale", "weights")
            made[argument.name] = values.to(torch.float32 if of_router else dtype)
    return made

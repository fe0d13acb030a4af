"""What a row program keeps in shared memory in place of registers: sums over tokens, and rows that all tokens have in
common. Against the reference, over more tokens than blocks have at once."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from routing import EXACT, GRADIENT, ROUNDING, assert_close, cotangent, device_of, sweep

import moesaic as mo

T = 61
BIASED = {"score": "sigmoid", "selection_bias": True}


def logits_of(experts: int, dtype: torch.dtype) -> torch.Tensor:
    return (2 * torch.randn(T, experts, generator=torch.Generator().manual_seed(5))).to(dtype)


def biases_of(router: mo.Router, device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    wanted = {"bias": router.selection_bias, "gate_bias": router.gate_bias}
    return {n: (0.1 * torch.randn(router.num_experts, generator=generator)).to(device) for n, w in wanted.items() if w}


def rows_in(router: mo.Router, choice: str) -> int:
    """Slots of a lane in the kernel for many tokens, of which the choice holds."""
    lowered = mo.compile(router, passes="specialize{tokens=many}").ir()
    assert choice in lowered
    [lanes] = set(re.findall(rf"lanes=(\d+)[^\]]*{choice}", lowered))
    [vec] = set(re.findall(rf"vec=(\d+)[^\]]*{choice}", lowered))
    return -(-router.num_experts // (int(lanes) * int(vec))) * int(vec)


@pytest.mark.parametrize(
    ("experts", "word", "options", "dtype", "backend"),
    sweep(
        [
            (1025, 1, {}, torch.bfloat16),  # slots that are read one by one
            (2304, 2, {"order": "topk_then_score"}, torch.bfloat16),
            (1536, 4, BIASED, torch.float32),
            (200, 4, BIASED, torch.bfloat16),  # in a warp, with dead slots
            (64, 4, {"score": "sigmoid", "groups": 8, "groups_kept": 3}, torch.float32),
        ],
        emulated=2,
    ),
)
def test_sums_over_tokens(experts: int, word: int, options: dict[str, Any], dtype: torch.dtype, backend: str) -> None:
    """One token is masked: sums, counts, the loss, and its gradient."""
    outputs, losses = ("weights", "counts", "score_sums"), {"balance": mo.LoadBalance()}
    router = mo.Router(experts, 7, renormalize=True, outputs=outputs, losses=losses, **options)
    slots = rows_in(router, "sums=shared")
    assert word == next(n for n in (4, 2, 1) if slots % n == 0)
    mask = torch.ones(T, dtype=torch.bool)
    mask[17] = False

    def everything(backend: str, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        leaf, device = logits.detach().requires_grad_(), logits.device.type
        r = mo.compile(router, backend=backend)(leaf, token_mask=mask.to(device), **biases_of(router, device))
        sent = [torch.full_like(r.losses["balance"], 3.0), cotangent(r.weights, 0, dtype)]
        torch.autograd.backward([r.losses["balance"], r.weights], sent)
        made = {"counts": r.counts, "sums": r.score_sums, "loss": r.losses["balance"].reshape(1), "d_logits": leaf.grad}
        return {n: x.detach().cpu() for n, x in made.items()}

    logits = logits_of(experts, dtype)
    got, wanted = everything(backend, logits.to(device_of(backend))), everything("reference", logits.double())
    assert torch.equal(got["counts"], wanted["counts"])
    for name in ("sums", "loss"):
        assert_close(name, got[name], wanted[name], EXACT)
    assert_close("d_logits", got["d_logits"], wanted["d_logits"], GRADIENT + ROUNDING[dtype])


@pytest.mark.parametrize(
    ("experts", "options", "dtype", "backend"),
    sweep(
        [
            (200, BIASED, torch.bfloat16),  # with dead slots
            (64, {"score": "sqrtsoftplus", "gate_bias": True}, torch.float32),
            (128, {**BIASED, "gate_bias": True, "groups": 8, "groups_kept": 3}, torch.bfloat16),
            (130, {**BIASED, "gate_bias": True}, torch.float32),  # two columns a chunk
        ],
        emulated=2,
    ),
)
def test_rows_of_all_tokens(experts: int, options: dict[str, Any], dtype: torch.dtype, backend: str) -> None:
    router = mo.Router(experts, 7, renormalize=True, outputs=("weights", "indices"), **options)
    assert rows_in(router, "vectors=shared") >= 16
    logits = logits_of(experts, dtype)

    def everything(backend: str, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        r = mo.compile(router, backend=backend)(logits, **biases_of(router, logits.device.type))
        return r.weights.cpu(), r.indices.cpu()

    weights, indices = everything(backend, logits.to(device_of(backend)))
    wanted, picked = everything("reference", logits.to(torch.float32).double())
    assert torch.equal(indices, picked)
    assert_close("weights", weights, wanted, EXACT)

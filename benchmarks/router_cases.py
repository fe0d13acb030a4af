"""The routers that are timed: as declared for moesaic, as written in eager torch, and how results are checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import moesaic as mo

Routing = tuple[Tensor, Tensor]
"""(probs, map) for dense outputs, (weights, indices) for compact ones."""
Route = Callable[[Tensor, Tensor | None], Routing]
"""Routing of (logits, selection bias or None)."""

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
OUTPUTS = {"dense": ("probs", "map"), "compact": ("weights", "indices")}

# Selection values closer than this, relative, count as a tie: float32 scores of two libraries differ by a few units in
# the last place.
_TIE = 2e-6
_TOLERANCE = {torch.bfloat16: 8e-3, torch.float32: 5e-5}


@dataclass(frozen=True)
class Case:
    """A router: softmax scores, or with `groups` the form of DeepSeek-V3. The weights are divided by their sum."""

    experts: int
    top_k: int
    groups: int = 0
    groups_kept: int = 0
    eps: float = 0.0
    scale: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.experts}x{self.top_k}" + ("-groups" if self.groups else "")

    def router(self, outputs: str, dtype: str) -> mo.Router:
        """The declaration."""
        grouped: dict[str, Any] = (
            {"score": "sigmoid", "selection_bias": True, "groups": self.groups, "groups_kept": self.groups_kept}
            if self.groups
            else {}
        )
        return mo.Router(
            num_experts=self.experts,
            top_k=self.top_k,
            renormalize=True,
            renorm_eps=self.eps,
            scale=self.scale,
            outputs=OUTPUTS[outputs],
            dtype=dtype,
            **grouped,
        )

    def eager(self, outputs: str) -> Route:
        """The same in torch, as models write it."""
        return _eager_groups(self, outputs) if self.groups else _eager_softmax(self, outputs)

    def module(self, outputs: str, dtype: str) -> mo.ir.core.Module:
        """The declared function."""
        module: mo.ir.core.Module = self.router(outputs, dtype).module(dtype)
        return module

    def ours(self, outputs: str, dtype: str, backend: str, passes: str = "") -> Route:
        """The compiled layer."""
        layer = mo.compile(self.module(outputs, dtype), backend=backend, passes=passes)
        if self.groups:
            return lambda logits, bias: layer(logits, bias=bias)
        return lambda logits, bias: layer(logits)


CASES = (
    Case(128, 8),
    Case(256, 8),
    Case(256, 8, groups=8, groups_kept=4, eps=1e-20, scale=2.5),
    Case(512, 10),
    Case(64, 6),
    Case(8, 2),
    Case(896, 16),
    Case(2304, 36),
)


# ------------------------------------------------------------------------------------------------------------- eager


def _eager_softmax(case: Case, outputs: str) -> Route:
    top_k, dense = case.top_k, outputs == "dense"

    def route(logits: Tensor, bias: Tensor | None) -> Routing:
        scores = torch.softmax(logits.float(), dim=-1)
        weights, indices = torch.topk(scores, top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return _scattered(logits, weights, indices) if dense else (weights, indices)

    return route


def _eager_groups(case: Case, outputs: str) -> Route:
    top_k, dense = case.top_k, outputs == "dense"
    groups, kept, eps, scale = case.groups, case.groups_kept, case.eps, case.scale

    def route(logits: Tensor, bias: Tensor | None) -> Routing:
        assert bias is not None
        scores = torch.sigmoid(logits.float())
        selection = scores.detach() + bias
        tokens, experts = selection.shape
        group_scores = selection.view(tokens, groups, experts // groups).topk(2, dim=-1)[0].sum(dim=-1)
        group_indices = group_scores.topk(kept, dim=-1, sorted=False)[1]
        group_mask = torch.zeros_like(group_scores).scatter(1, group_indices, 1.0)
        outside = group_mask.repeat_interleave(experts // groups, dim=1) == 0
        indices = selection.masked_fill(outside, float("-inf")).topk(top_k, dim=-1, sorted=False)[1]
        weights = scores.gather(1, indices)
        weights = weights / (weights.sum(dim=-1, keepdim=True) + eps) * scale
        return _scattered(logits, weights, indices) if dense else (weights, indices)

    return route


def _scattered(logits: Tensor, weights: Tensor, indices: Tensor) -> Routing:
    probs = torch.zeros_like(logits).scatter(1, indices, weights.to(logits.dtype))
    picked = torch.zeros_like(logits, dtype=torch.bool).scatter(1, indices, True)
    return probs, picked


# ------------------------------------------------------------------------------------------------------------ checks


class WrongResult(Exception):
    """A result of ours that differs from the peer's or from float64 arithmetic."""


@dataclass(frozen=True)
class Inputs:
    """One set: logits, the same logits as a leaf that wants a gradient, and the cotangent of the first output."""

    logits: Tensor
    leaf: Tensor
    cotangent: Tensor


def make_inputs(case: Case, outputs: str, dtype: str, tokens: int, generator: torch.Generator) -> Inputs:
    """Random inputs on the generator's device."""
    device = generator.device
    logits = torch.randn(tokens, case.experts, device=device, generator=generator).to(DTYPES[dtype])
    if outputs == "dense":
        cotangent = torch.randn(tokens, case.experts, device=device, generator=generator).to(DTYPES[dtype])
    else:
        cotangent = torch.randn(tokens, case.top_k, device=device, generator=generator)
    return Inputs(logits, logits.detach().requires_grad_(), cotangent)


def make_bias(case: Case, generator: torch.Generator) -> Tensor | None:
    """The selection bias, where the case has one."""
    if not case.groups:
        return None
    return 0.1 * torch.randn(case.experts, device=generator.device, generator=generator)


def forward(route: Route, inputs: Inputs, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Inference; gives all that was made."""
    with torch.no_grad():
        return tuple(route(inputs.logits, bias))


def forward_backward(route: Route, inputs: Inputs, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Training; gives all that was made, the gradient of the logits last."""
    values, picks = route(inputs.leaf, bias)
    (gradient,) = torch.autograd.grad(values, inputs.leaf, inputs.cotangent)
    return values.detach(), picks, gradient


def check(case: Case, outputs: str, ours: Route, inputs: Inputs, bias: Tensor | None) -> None:
    """Compares ours with the eager peer and with float64 arithmetic at our own picks, forward and backward.

    The sets of experts must be those of the peer except where the selection values are near a tie. The memory that
    ours is likely to get is filled with ones first, so that what is not written shows.

    Raises:
        WrongResult: says what differs, in which token.
    """
    dense = outputs == "dense"
    experts, tokens = case.experts, inputs.logits.shape[0]
    peer = case.eager(outputs)
    peer_values, peer_picks = forward(peer, inputs, bias)
    _poison(inputs, case)
    inference = forward(ours, inputs, bias)
    _poison(inputs, case)
    values, picks, gradient = forward_backward(ours, inputs, bias)
    for name, one, other in zip(OUTPUTS[outputs], inference, (values, picks), strict=True):
        if not torch.equal(one, other):
            raise WrongResult(f"{name} of inference and of training differ, or hold NaN")

    if dense:
        if not bool(((picks == 0) | (picks == 1)).all()):
            raise WrongResult("the map holds something other than 0 and 1")
        chosen = picks.bool()
        _require(chosen.sum(dim=-1) == case.top_k, f"the map does not hold {case.top_k} experts")
        indices = chosen.nonzero()[:, 1].view(tokens, case.top_k)
        _require((values.masked_fill(chosen, 0) == 0).all(dim=-1), "probs is not 0 outside of the map")
    else:
        indices = picks.long()
        _require(((indices >= 0) & (indices < experts)).all(dim=-1), "an index is out of range")
        chosen = _membership(indices, experts)
        _require(chosen.sum(dim=-1) == case.top_k, "an expert is picked twice")
    peer_chosen = peer_picks.bool() if dense else _membership(peer_picks, experts)

    selection, group_tie = _selection(case, inputs.logits.double(), bias)
    best = selection.topk(case.top_k + 1, dim=-1)[0]
    kth, next_best = best[:, -2], best[:, -1]
    near = kth.abs() * _TIE
    worst_pick = selection.gather(1, indices).amin(dim=-1)
    _require((worst_pick >= kth - near) | group_tie, "a pick is not among the best")
    same = (chosen == peer_chosen).all(dim=-1)
    _require(same | (kth - next_best <= near) | group_tie, "other experts than torch's, without a tie")

    # Values and gradients everywhere, in float64 at our picks; then against the peer where the picks are the same.
    leaf = inputs.logits.double().requires_grad_()
    exact: Tensor = _weights(case, leaf, indices)
    if dense:
        exact = torch.zeros(tokens, experts, dtype=torch.float64, device=leaf.device).scatter(1, indices, exact)
    (exact_gradient,) = torch.autograd.grad(exact, leaf, inputs.cotangent.double())
    value_tolerance, gradient_tolerance = _TOLERANCE[values.dtype], _TOLERANCE[gradient.dtype]
    _close("values", values, exact.detach(), value_tolerance)
    _close("gradient", gradient, exact_gradient, gradient_tolerance)

    peer_cotangent = inputs.cotangent
    if not dense:  # the peer may hand out its picks in another order
        spread = torch.zeros(tokens, experts, device=leaf.device)
        values, peer_values = spread.scatter(1, indices, values), spread.scatter(1, peer_picks, peer_values)
        peer_cotangent = spread.scatter(1, indices, inputs.cotangent).gather(1, peer_picks)
    peer_inputs = Inputs(inputs.logits, inputs.leaf, peer_cotangent)
    _, _, peer_gradient = forward_backward(peer, peer_inputs, bias)
    _close("values (against torch)", values[same], peer_values[same], 2 * value_tolerance)
    _close("gradient (against torch)", gradient[same], peer_gradient[same], 2 * gradient_tolerance)


def _selection(case: Case, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Selection values in float64, and for which tokens the choice of groups is near a tie."""
    if not case.groups:
        return torch.softmax(logits, dim=-1), torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
    assert bias is not None
    tokens, experts = logits.shape
    selection = torch.sigmoid(logits) + bias.double()
    scores = selection.view(tokens, case.groups, experts // case.groups).topk(2, dim=-1)[0].sum(dim=-1)
    best, order = scores.topk(case.groups_kept + 1, dim=-1)
    tie = best[:, -2] - best[:, -1] <= 2 * _TIE * best[:, -2].abs()
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter(1, order[:, :-1], True)
    return selection.masked_fill(~kept.repeat_interleave(experts // case.groups, dim=1), float("-inf")), tie


def _weights(case: Case, logits: Tensor, indices: Tensor) -> Tensor:
    scores = torch.sigmoid(logits) if case.groups else torch.softmax(logits, dim=-1)
    picked = scores.gather(1, indices)
    return picked / (picked.sum(dim=-1, keepdim=True) + case.eps) * case.scale


def _membership(indices: Tensor, experts: int) -> Tensor:
    counts = torch.zeros(indices.shape[0], experts, dtype=torch.int32, device=indices.device)
    return counts.scatter(1, indices, torch.ones_like(indices, dtype=torch.int32)) > 0


def _poison(inputs: Inputs, case: Case) -> None:
    """Leaves blocks of the sizes that a call makes, all bits set, for the allocator to hand out next."""
    tokens, experts = inputs.logits.shape
    element = inputs.logits.element_size()
    sizes = [tokens * experts * element, tokens * experts * element, tokens * experts, *[4 * tokens * case.top_k] * 2]
    blocks = [torch.full((size,), 0xFF, dtype=torch.uint8, device=inputs.logits.device) for size in sizes]
    del blocks


def _require(holds: Tensor, message: str) -> None:
    """Every token must hold."""
    if not bool(holds.all()):
        bad = (~holds).nonzero()[:, 0]
        raise WrongResult(f"{message}: {len(bad)} of {len(holds)} tokens, the first {int(bad[0])}")


def _close(name: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Each row's error must be small against that row and the mean row together."""
    if not len(found):
        return
    error = (found.double() - expected.double()).norm(dim=-1)
    size = expected.double().norm(dim=-1)
    allowed = tolerance * (size + size.mean())
    if not bool((error <= allowed).all()):  # so that NaN fails
        ratio = (error / allowed).nan_to_num(nan=float("inf"))
        token = int(ratio.argmax())
        raise WrongResult(
            f"{name} of ours: token {token} is off by {float(error[token]):.3g}, allowed is {float(allowed[token]):.3g}"
        )

"""What holds for experts whatever the picks: on drawn routings, of one declaration."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from expert_calls import KINDS, TOP_K, Tensors, check, cotangent_for, exact, run, tensors_for
from hypothesis import given, settings
from hypothesis import strategies as st
from routing import COMPILED, assert_close, device_of

import moesaic as mo

EXPERTS = KINDS["odd"]
E = EXPERTS.num_experts
MATRICES = ("gate_up_proj", "down_proj")
OF_TOKENS = ("hidden", "d_x", "d_weights")

REORDERED = 2.0**-20
"""Of the largest value: the same few float32 numbers, added up in another order."""

few = settings(max_examples=8)
every_backend = pytest.mark.parametrize("backend", COMPILED)


@dataclass(frozen=True)
class Drawn:
    """Inputs and a cotangent, and an order of the tokens and of the experts."""

    inputs: Tensors
    cotangent: torch.Tensor
    tokens: torch.Tensor
    experts: torch.Tensor

    def gradients(self, backend: str, inputs: Tensors | None = None, cotangent: torch.Tensor | None = None) -> Tensors:
        given = inputs or self.inputs
        sent = self.cotangent if cotangent is None else cotangent
        found = run(mo.compile(EXPERTS, backend=backend), given, sent, device_of(backend))
        here = bool(((given["indices"] >= 0) & (given["indices"] < E)).any())
        for name in (*OF_TOKENS, *(f"d_{matrix}" for matrix in MATRICES)):
            assert bool(found[name].any()) == here, f"{name} is 0, or is not although nobody is here"
        return found


@st.composite
def routings(draw: st.DrawFn) -> Drawn:
    """1 to 9 tokens. Picks repeat, leave experts out, and lie outside [0, E)."""
    tokens = draw(st.integers(1, 9))
    picks = draw(st.lists(st.integers(-1, E), min_size=tokens * TOP_K, max_size=tokens * TOP_K))
    indices = torch.tensor(picks, dtype=torch.int32).reshape(tokens, TOP_K)
    inputs = tensors_for(EXPERTS, tokens, TOP_K, torch.float32, seed=draw(st.integers(0, 99)), ids=indices)
    orders = (torch.tensor(draw(st.permutations(range(n)))) for n in (tokens, E))
    return Drawn(inputs, cotangent_for(tokens, EXPERTS.hidden, torch.float32), *orders)


def assert_same_sums(name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal but for the order in which numbers were added up; all zeros where nobody is here."""
    if wanted.any():
        assert_close(name, found, wanted, REORDERED)
    else:
        assert not found.any(), name


@every_backend
@few
@given(drawn=routings())
def test_tokens_in_another_order(backend: str, drawn: Drawn) -> None:
    """Results of a token are its own, bit for bit; gradients of matrices are sums over tokens in another order."""
    before = drawn.gradients(backend)
    moved = {n: t[drawn.tokens] if n in ("x", "indices", "weights") else t for n, t in drawn.inputs.items()}
    after = drawn.gradients(backend, moved, drawn.cotangent[drawn.tokens])
    for name in OF_TOKENS:
        assert torch.equal(after[name], before[name][drawn.tokens]), name
    for matrix in MATRICES:
        assert_same_sums(matrix, after[f"d_{matrix}"], before[f"d_{matrix}"])
    wanted = exact(EXPERTS, drawn.inputs, drawn.cotangent)
    check({"hidden": before["hidden"]}, {"hidden": wanted["hidden"]}, torch.float32)


@every_backend
@few
@given(drawn=routings())
def test_experts_under_other_numbers(backend: str, drawn: Drawn) -> None:
    """Experts change their places together with their matrices: nothing changes, bit for bit."""
    before = drawn.gradients(backend)
    indices, to = drawn.inputs["indices"], drawn.experts
    here = (indices >= 0) & (indices < E)
    moved = {**drawn.inputs, "indices": torch.where(here, to[indices.clamp(0, E - 1).long()].int(), indices)}
    for matrix in MATRICES:
        moved[matrix] = torch.empty_like(moved[matrix]).index_copy_(0, to, drawn.inputs[matrix])
    after = drawn.gradients(backend, moved)
    for name in OF_TOKENS:
        assert torch.equal(after[name], before[name]), name
    for matrix in MATRICES:
        assert torch.equal(after[f"d_{matrix}"][to], before[f"d_{matrix}"]), matrix


@every_backend
@few
@given(drawn=routings(), cuts=st.lists(st.integers(0, E), min_size=2, max_size=2))
def test_ranks_add_up(backend: str, drawn: Drawn, cuts: list[int]) -> None:
    """Experts are split over three ranks, some with none. A rank has its own first, then NaN, and the
    picks of others are not here, by a sentinel of the rank's own. The parts add up to the whole, and gradients of
    matrices are bit-equal."""
    whole = drawn.gradients(backend)
    indices = drawn.inputs["indices"]
    bounds = [0, *sorted(cuts), E]
    parts = []
    for first, end, sentinel in zip(bounds, bounds[1:], (-1, E, 2**31 - 1)):
        mine = (indices >= first) & (indices < end)
        local = {**drawn.inputs, "indices": torch.where(mine, indices - first, sentinel).int()}
        for matrix in MATRICES:
            local[matrix] = torch.full_like(drawn.inputs[matrix], float("nan"))
            local[matrix][: end - first] = drawn.inputs[matrix][first:end]
        parts.append(drawn.gradients(backend, local))
    for name in OF_TOKENS:
        assert_same_sums(name, sum(p[name] for p in parts), whole[name])
    for matrix in MATRICES:
        own = [p[f"d_{matrix}"][: end - first] for p, first, end in zip(parts, bounds, bounds[1:])]
        assert torch.equal(torch.cat(own), whole[f"d_{matrix}"]), matrix

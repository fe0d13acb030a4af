"""Faults that users of other libraries met in experts, each as one input and its one right result.

They run on the reference, the emulator and a GPU. Numbers are exact where all of them are small integers. Cases 28, 38,
39 and 57 are in ``test_experts.py``; ``test_dispatch_kernels.py`` has 19 to 25 for kernels alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from expert_calls import KINDS, TOP_K, Tensors, check, cotangent_for, exact, ids, run, tensors_for
from routing import BACKENDS, EXACT, NAN, assert_close, device_of
from torch.nn import functional

import moesaic as mo

every_backend = pytest.mark.parametrize("backend", BACKENDS)

IDENTITY = mo.Experts(3, 1, 1, gated=False, activation="identity", outputs=("hidden", "counts", "dropped"))
"""Expert e multiplies by up_e and by down_e: what comes out is known without a reference."""


def numbers(
    indices: torch.Tensor,
    x: Sequence[float],
    up: Sequence[float],
    weights: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensors:
    """Inputs of 1 x 1 experts; the second factor of each is 1. Tokens of fewer picks than kernels are compiled for have
    others that are not here, with NaN for a weight."""
    missing = (0, max(0, TOP_K - indices.shape[1]))
    weights = torch.ones(indices.shape) if weights is None else weights
    return {
        "x": torch.tensor(x, dtype=dtype)[:, None],
        "indices": functional.pad(indices, missing, value=-1),
        "weights": functional.pad(weights, missing, value=NAN),
        "up_proj": torch.tensor(up, dtype=dtype)[:, None, None],
        "down_proj": torch.ones(len(up), 1, 1, dtype=dtype),
    }


def run_identity(
    given: Tensors, backend: str, cotangent: Sequence[float] | None = None, experts: mo.Experts = IDENTITY
) -> dict[str, list[float]]:
    """Results and gradients as plain numbers."""
    sent = None if cotangent is None else torch.tensor(cotangent)[:, None]
    found = run(mo.compile(experts, backend=backend), given, sent, device_of(backend))
    return {n: t.flatten().tolist() for n, t in found.items()}


# Picks that are not here ----------------------------------------------------------------------------------------------


@every_backend
def test_case_19_picks_that_are_not_here_take_no_rows(backend: str) -> None:
    indices = ids([0, -1], [1, 0], [-1, -1], [-1, 1])
    found = run_identity(numbers(indices, [1, 2, 3, 4], [1, 1, NAN]), backend, [1, 10, 100, 1000])
    assert found == {
        "hidden": [1, 4, 0, 4],
        "counts": [2, 2, 0],
        "dropped": [0],
        "d_x": [1, 20, 0, 1000],
        "d_weights": [1, 0, 0, 20, 20, 0, 0, 0, 0, 0, 4000, 0],
        "d_up_proj": [21, 4020, 0],
        "d_down_proj": [21, 4020, 0],
    }


@every_backend
def test_case_20_the_number_of_experts_is_not_here(backend: str) -> None:
    given = numbers(ids([3, 0], [1, 3]), [3, 5], [2, 7, NAN])
    found = run_identity(given, backend, [1, 10])
    away = numbers(ids([-1, 0], [1, -1]), [3, 5], [2, 7, NAN])
    assert found == run_identity(away, backend, [1, 10])
    assert found["hidden"] == [6, 35]
    assert found["counts"] == [1, 1, 0]
    assert found["d_weights"] == [0, 6, 0, 350, 0, 0]


@every_backend
def test_case_21_idle_lanes_count_nothing(backend: str) -> None:
    found = run_identity(numbers(ids([1], [1], [1]), [1, 2, 3], [NAN, 2, NAN]), backend)
    assert found["counts"] == [0, 3, 0]
    assert found["hidden"] == [2, 4, 6]
    indices = torch.randint(0, 3, (500, 2), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    found = run_identity(numbers(indices, [1] * 500, [1, 2, 3]), backend)
    assert found["counts"] == torch.bincount(indices.flatten()).tolist()
    assert found["hidden"] == (indices + 1).sum(1).tolist()


@every_backend
def test_case_22_one_expert_twice_in_a_token(backend: str) -> None:
    given = numbers(ids([1, 1]), [2], [NAN, 4, NAN], torch.tensor([[0.25, 0.5]]))
    found = run_identity(given, backend, [1])
    assert found["hidden"] == [6]
    assert found["counts"] == [0, 2, 0]
    assert found["d_weights"] == [8, 8, 0]
    assert found["d_x"] == [3]
    assert found["d_up_proj"] == [0, 1.5, 0] and found["d_down_proj"] == [0, 6, 0]


@every_backend
@pytest.mark.parametrize("pad", [False, True])
def test_case_23_capacity_is_at_most_the_tokens(pad: bool, backend: str) -> None:
    """A factor of 2 is 8 rows for 12 picks of 3 experts, cut to 4: distinct picks all fit, repeated ones do not."""
    layer = mo.compile(replace(IDENTITY, capacity=2.0, pad=pad), backend=backend)
    for indices, hidden, dropped in (
        (ids(*[[0, 1]] * 4), [11, 22, 33, 44], 0),
        (ids(*[[1, 1]] * 4), [20, 40, 0, 0], 4),
    ):
        given = {n: t.to(device_of(backend)) for n, t in numbers(indices, [1, 2, 3, 4], [1, 10, NAN]).items()}
        found = layer(**given)
        assert found.hidden.flatten().tolist() == hidden
        assert found.dropped.tolist() == [dropped]
        assert found.counts.sum().item() == 8 - dropped


@every_backend
def test_case_24_sums_over_picks_are_float32(backend: str) -> None:
    """263, rounded once to bf16. Rounded after each pick it would be 256; the gradient of x is the same sum."""
    indices = ids([0, 1, 1, 1, 1, 1, 1, 1])
    found = run_identity(numbers(indices, [1], [256, 1, NAN], dtype=torch.bfloat16), backend, [1])
    assert found["hidden"] == [264]
    assert found["d_x"] == [264]
    assert found["d_weights"] == [256, 1, 1, 1, 1, 1, 1, 1]


@every_backend
def test_case_25_a_weight_of_an_expert_that_nobody_picked_may_be_infinite(backend: str) -> None:
    given = numbers(ids([-1, 1]), [3], [float("inf"), 4, NAN], torch.tensor([[0.5, 0.5]]))
    given["down_proj"][0] = float("inf")
    found = run_identity(given, backend, [1])
    assert found["hidden"] == [6]
    assert found["d_x"] == [2]
    assert found["d_weights"] == [0, 12, 0]
    assert found["d_up_proj"] == [0, 1.5, 0] and found["d_down_proj"] == [0, 6, 0]


# Products -------------------------------------------------------------------------------------------------------------


def fill_free_memory(device: str) -> None:
    """What torch hands out next is NaN. The emulator's memory always is."""
    if device == "cuda":
        sizes = [2**n for n in range(7, 23)]
        held = [torch.full((size,), NAN, device=device) for size in sizes for _ in range(8)]
        del held


@every_backend
def test_case_26_rows_without_a_pick_are_no_part_of_anything(backend: str) -> None:
    """Each expert's rows begin at a multiple of 16, so that most rows are nobody's."""
    experts = KINDS["aligned"]
    given = tensors_for(experts, 2, TOP_K, torch.float32, ids=ids([0, 3, 0], [-1, 3, 1]))
    cotangent = cotangent_for(2, experts.hidden, torch.float32)
    fill_free_memory(device_of(backend))
    found = run(mo.compile(experts, backend=backend), given, cotangent, device_of(backend))
    check(found, exact(experts, given, cotangent), torch.float32)


def ids_of_groups(sizes: Sequence[int]) -> torch.Tensor:
    """Tokens with one pick each, so many of each expert, in any order and at any place of the token's picks."""
    chosen = [expert for expert, size in enumerate(sizes) for _ in range(size)]
    indices = torch.full((len(chosen), TOP_K), -1, dtype=torch.int32)
    for token in torch.randperm(len(chosen), generator=torch.Generator().manual_seed(4)).tolist():
        indices[token, token % TOP_K] = chosen.pop()
    return indices


@every_backend
@pytest.mark.parametrize(
    ("name", "dtype", "sizes"),
    [
        ("odd", torch.bfloat16, [1, 3, 0, 5, 0, 2, 0]),  # sums of 33 and of 17
        ("narrow", torch.float32, [1, 0, 5]),  # of 1, and one column
    ],
    ids=["33-17", "1-1"],
)
def test_cases_27_and_55_odd_sizes_need_no_padding(
    name: str, dtype: torch.dtype, sizes: list[int], backend: str
) -> None:
    experts = KINDS[name]
    indices = ids_of_groups(sizes)
    given = tensors_for(experts, len(indices), TOP_K, dtype, ids=indices)
    cotangent = cotangent_for(len(indices), experts.hidden, dtype)
    found = run(mo.compile(experts, backend=backend), given, cotangent, device_of(backend))
    check(found, exact(experts, given, cotangent), dtype)


def gate_and_up(backend: str, experts: mo.Experts, weights: float = 1.0) -> torch.Tensor:
    """Of 1 x 1 experts: (gate 8, up -9), (gate -8, up 9), and (gate 2, up 2) of an x of 2, each for a token of its
    own."""
    given = {
        "x": torch.tensor([[1.0], [1.0], [2.0]]),
        "indices": ids([0, -1, -1], [-1, 1, -1], [-1, -1, 2]),
        "weights": torch.full((3, 3), weights),
        "gate_up_proj": torch.tensor([[8.0, -9.0], [-8.0, 9.0], [1.0, 1.0]])[:, :, None],
        "down_proj": torch.ones(3, 1, 1),
    }
    layer = mo.compile(experts, backend=backend)
    hidden: torch.Tensor = layer(**{n: t.to(device_of(backend)) for n, t in given.items()})
    return hidden.cpu().flatten()


@every_backend
def test_case_29_gates_and_ups(backend: str) -> None:
    """A gate is bounded from above alone, an up on both sides."""
    plain = gate_and_up(backend, KINDS["narrow"])
    assert_close("silu(gate) up", plain[0], torch.tensor(-71.97585), EXACT)
    clamped = gate_and_up(backend, replace(KINDS["narrow"], gating=mo.ClampedSwiGLU(7.0, 1.702, 1.0)))
    assert_close("clamped", clamped[0], torch.tensor(-41.99972), EXACT)
    assert_close("clamped, gate below -7", clamped[1], torch.tensor(-7.8131e-5), 1e-5)


@every_backend
def test_case_29_where_gates_and_ups_lie_is_declared(backend: str) -> None:
    experts = KINDS["interleaved"]
    given = tensors_for(experts, 13, TOP_K, torch.float32)
    layer, device = mo.compile(experts, backend=backend), device_of(backend)
    in_turn = {**given, "gate_up_proj": torch.stack(given["gate_up_proj"].chunk(2, 1), 2).flatten(1, 2)}
    cotangent = cotangent_for(13, experts.hidden, torch.float32)
    wanted = exact(replace(experts, interleaved=False), given, cotangent)
    found = run(layer, in_turn, cotangent, device)
    found["d_gate_up_proj"] = torch.cat([found["d_gate_up_proj"][:, 0::2], found["d_gate_up_proj"][:, 1::2]], 1)
    check(found, wanted, torch.float32)
    swapped = run(layer, given, cotangent, device)["hidden"]
    assert (swapped - wanted["hidden"]).abs().max() > 0.1


@every_backend
def test_case_30_a_weight_counts_once_and_where_it_is_declared(backend: str) -> None:
    """Twice would be 0.36553."""
    after = gate_and_up(backend, KINDS["narrow"], weights=0.5)[2]
    between = gate_and_up(backend, replace(KINDS["narrow"], weight_on="middle"), weights=0.5)[2]
    before = gate_and_up(backend, replace(KINDS["narrow"], weight_on="input"), weights=0.5)[2]
    assert_close("on the output", after, torch.tensor(1.76159), 1e-5)
    assert_close("in the middle", between, torch.tensor(1.76159), 1e-5)
    assert_close("on the input", before, torch.tensor(0.73106), 1e-5)


@every_backend
@pytest.mark.parametrize("align", [1, 128])
@pytest.mark.parametrize("sizes", [[128, 130, 65], [64, 0, 64]], ids=str)
def test_case_31_rows_of_a_tile_are_those_of_one_expert(sizes: list[int], align: int, backend: str) -> None:
    indices = ids_of_groups(sizes)
    expert = indices.amax(1)
    x = torch.arange(1.0, len(expert) + 1)
    experts = replace(IDENTITY, align=align)
    found = run_identity(numbers(indices, x.tolist(), [1, 2, 3]), backend, [1] * len(expert), experts)
    assert found["counts"] == sizes
    assert found["hidden"] == (x * (expert + 1)).tolist()
    assert found["d_x"] == (expert + 1).tolist()
    sums = [x[expert == e].sum().item() for e in range(3)]
    assert found["d_up_proj"] == sums
    assert found["d_down_proj"] == [(e + 1) * total for e, total in enumerate(sums)]


def at_the_end_of_memory(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A copy whose last byte is the last one of what the driver gave. The emulator checks every access against the
    tensor, so there it is a plain copy."""
    if device != "cuda":
        return tensor.clone()
    size = tensor.numel() * tensor.element_size()
    whole = torch.empty(2**25, dtype=torch.uint8, device=device)  # so large that it shares a segment with nothing
    return whole[-size:].view(tensor.dtype).view(tensor.shape).copy_(tensor)


@every_backend
def test_case_32_sums_shorter_than_the_pipeline(backend: str) -> None:
    """Sums of 16 and of 8, one step of a product or less, of operands with nothing behind them."""
    experts = mo.Experts(5, 16, 8)
    given = tensors_for(experts, 10, TOP_K, torch.bfloat16)
    cotangent = cotangent_for(10, experts.hidden, torch.bfloat16)
    placed = {n: at_the_end_of_memory(t, device_of(backend)) for n, t in given.items()}
    sent = at_the_end_of_memory(cotangent, device_of(backend))
    found = run(mo.compile(experts, backend=backend), placed, sent, device_of(backend))
    check(found, exact(experts, given, cotangent), torch.bfloat16)


@every_backend
def test_case_33_equal_calls_give_equal_bits(backend: str) -> None:
    """Also right after an elementwise op on memory that the next call gets."""
    experts = KINDS["swiglu"]
    given = tensors_for(experts, 13, TOP_K, torch.bfloat16)
    cotangent = cotangent_for(13, experts.hidden, torch.bfloat16)
    layer, device = mo.compile(experts, backend=backend), device_of(backend)
    first = run(layer, given, cotangent, device)
    check(first, exact(experts, given, cotangent), torch.bfloat16)
    for number in range(200 if backend == "cuda" else 3):
        scratch = [torch.full_like(t, number, device=device) * 3 for t in first.values()]
        del scratch
        again = run(layer, given, cotangent, device)
        assert all(torch.equal(again[n], first[n]) for n in first)


# Types ----------------------------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("wide", ["x", "matrices"])
def test_case_53_autocast_decides_the_type(wide: str, backend: str) -> None:
    """x is float32 and the matrices bf16, or the other way round: as if both were bf16. Weights of picks stay float32,
    and gradients come in the type of what they belong to."""
    experts = KINDS["swiglu"]
    given = tensors_for(experts, 11, TOP_K, torch.bfloat16)
    cotangent = cotangent_for(11, experts.hidden, torch.bfloat16)
    layer, device = mo.compile(experts, backend=backend), device_of(backend)
    wanted = run(layer, given, cotangent, device)
    check(wanted, exact(experts, given, cotangent), torch.bfloat16)
    widened = ("x",) if wide == "x" else ("gate_up_proj", "down_proj")
    mixed = {n: t.float() if n in widened else t for n, t in given.items()}

    def under_autocast(**inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            hidden: torch.Tensor = layer(**inputs)
        return hidden

    found = run(under_autocast, mixed, cotangent, device)
    assert found["hidden"].dtype == torch.bfloat16
    assert torch.equal(found["hidden"], wanted["hidden"])
    for name, tensor in mixed.items():
        if tensor.is_floating_point():
            assert found[f"d_{name}"].dtype == tensor.dtype
            assert torch.equal(found[f"d_{name}"], wanted[f"d_{name}"].to(tensor.dtype)), name

"""Ways to select, lists and lanes: each gives the picks of the reference, on rows made to be hard for some of them."""

from __future__ import annotations

import pytest
import torch

import moesaic as mo
from moesaic.ir.errors import UnsupportedError, UsageError
from moesaic.passes.manager import PassManager
from moesaic.passes.selection_shape import merging_instructions
from moesaic.runtime.program import program_of

OUTPUTS = ("weights", "indices", "map")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Experts, picks, dtype, options of specialize: lists that are full and short, that double and are halved over lanes,
# more lanes than picks and fewer, rows with dead slots and rows without vectors.
CASES = [
    (256, 8, "bf16", "listed=4"),
    (512, 10, "fp16", "lanes=16 listed=8"),
    (512, 10, "fp32", "lanes=32 listed=2"),
    (64, 6, "fp16", "lanes=16 listed=2"),
    (61, 5, "fp32", "lanes=8 listed=1"),
    (61, 6, "bf16", "lanes=4 listed=2"),
    (96, 16, "bf16", "lanes=4 select=merge listed=4"),
    (64, 16, "fp32", "lanes=2 select=merge listed=16"),
    (128, 4, "fp32", "lanes=32 listed=1"),
    (96, 12, "fp32", "select=rounds"),
    (96, 12, "fp16", "select=sort"),
]


def hard_rows(experts: int, dtype: torch.dtype) -> torch.Tensor:
    """Random rows, rows of few values, and rows whose best lie side by side, at either end, or are no numbers."""
    generator = torch.Generator().manual_seed(experts)
    x = torch.randn(37, experts, generator=generator)
    x[10:20] = (2 * x[10:20]).round() / 2
    x[0] = float("nan")
    x[1, ::3] = float("-inf")
    x[2] = -0.0
    x[2, ::2] = 0.0
    x[3] = torch.arange(experts)
    x[4] = -torch.arange(experts)
    x[5, ::5] = float("nan")
    x[6] = float("inf")
    x[7] = float("-inf")
    x[8, :16] += 100.0
    x[9, experts // 2 : experts // 2 + 8] += 100.0
    return x.to(dtype)


def assert_same_picks(router: mo.Router, dtype: str, passes: str, logits: torch.Tensor, **inputs: torch.Tensor) -> None:
    module = router.module(dtype)
    wanted = mo.compile(module, backend="reference")(logits, **inputs)
    found = mo.compile(module, backend="emulate", passes=passes)(logits, **inputs)
    assert torch.equal(found.indices, wanted.indices)
    assert torch.equal(found.map, wanted.map)


@pytest.mark.emulate
@pytest.mark.parametrize(("experts", "k", "dtype", "options"), CASES, ids=lambda v: str(v).replace(" ", ","))
def test_every_way_gives_the_same_picks(experts: int, k: int, dtype: str, options: str) -> None:
    router = mo.Router(experts, k, outputs=OUTPUTS)
    assert_same_picks(router, dtype, f"specialize{{{options}}}", hard_rows(experts, DTYPES[dtype]))


@pytest.mark.emulate
@pytest.mark.parametrize("options", ["listed=2", "listed=4", "listed=8", "listed=4 lanes=16"])
def test_groups_that_share_sorted_chunks(options: str) -> None:
    router = mo.Router(256, 8, score="sigmoid", selection_bias=True, groups=8, groups_kept=4, outputs=OUTPUTS)
    bias = torch.zeros(256)
    bias[32:40] = 2.0  # the best of a group in one chunk
    logits = hard_rows(256, torch.bfloat16)
    # Scores of two libraries differ in the last place: values far apart, so that no pick hangs on it.
    logits[20:] = torch.linspace(-4, 4, 256)[torch.rand(17, 256).argsort(-1)].bfloat16()
    assert_same_picks(router, "bf16", f"specialize{{{options}}}", logits, bias=bias)


@pytest.mark.emulate
def test_rows_of_zeros_but_for_the_picks_are_written_either_way() -> None:
    router = mo.Router(128, 8, renormalize=True, outputs=("probs", "map"))
    logits = hard_rows(128, torch.bfloat16)
    scattered = mo.compile(router, backend="emulate")(logits)
    module, dense = router.module("bf16"), "sink-gathers{sparse=0}"
    assert "row.scatter" not in str(program_of(module, dense).lower("forward").module)
    assert "row.scatter" in str(program_of(module).lower("forward").module)
    selected = mo.compile(router, backend="emulate", passes=dense)(logits)
    assert torch.equal(scattered.map, selected.map)
    torch.testing.assert_close(scattered.probs, selected.probs, rtol=0, atol=0, equal_nan=True)


def test_options_of_lists() -> None:
    module = mo.Router(64, 8).module("bf16")
    with pytest.raises(UsageError, match="listed must be a power of two, found 3"):
        PassManager("specialize{listed=3}").run(program_of(module).lower("forward").module)
    with pytest.raises(UnsupportedError, match="lists of 2 in 2 lanes cannot hold 8 picks"):
        PassManager("specialize{listed=2 lanes=2}").run(program_of(module).lower("forward").module)


def test_short_lists_cost_less_unless_they_often_miss() -> None:
    assert merging_instructions(4, 10, 32, 16) < merging_instructions(16, 10, 32, 16)
    assert merging_instructions(4, 8, 32, 4) > merging_instructions(8, 8, 32, 4)

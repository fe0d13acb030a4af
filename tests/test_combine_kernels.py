"""The kernels of combine and of to_picks: on the emulator against the ops they carry out, and NVRTC."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
from slot_kernels import (
    FLOATS,
    HALF_OF_THREADS,
    IDS,
    compiled,
    operands,
    plain_combine,
    region_op,
    routed,
    run,
)

from moesaic.codegen import combine, to_picks
from moesaic.ir.core import Block, BlockArgument, Value, create_one
from moesaic.ir.errors import UnsupportedError
from moesaic.ir.ops.launch import Kernel
from moesaic.ir.ops.slot import Combine, ToPicks
from moesaic.runtime.emulator import FORWARD, REVERSE
from moesaic.runtime.reference import TorchArrays


def rows_of_slots(found: dict[str, torch.Tensor], columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Random rows in use; dead ones are NaN."""
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn((len(found["tokens"]), columns), generator=generator).to(dtype)
    return torch.where((found["tokens"] < 0)[:, None], torch.nan, x)


def in_order(x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """The sum over picks, rounded after each."""
    y = torch.zeros((slots.shape[0], x.shape[1]))
    for k in range(slots.shape[1]):
        here = (slots[:, k] >= 0)[:, None]
        row = x.float()[slots[:, k].clamp(min=0).long()] if x.shape[0] else y
        if weights is not None:
            row = row * weights[:, k, None].float()
        y = torch.where(here, y + row, y)
    return y


@pytest.mark.emulate
@pytest.mark.parametrize(
    ("tokens", "top_k", "columns", "weights", "dtype"),
    [
        (37, 3, 24, "f32", "bf16"),
        (37, 3, 24, "bf16", "f32"),
        (11, 1, 1, "bf16", "f16"),
        (7, 8, 520, "", "bf16"),
        (5, 16, 7, "f16", "f16"),
        (13, 11, 40, "f32", "f32"),
        (3, 35, 64, "bf16", "bf16"),
        (2, 301, 12, "", "f32"),
    ],
)
def test_combine(tokens: int, top_k: int, columns: int, weights: str, dtype: str) -> None:
    """Bit for bit, with dead rows and weights of picks without a slot being NaN."""
    found = routed(tokens, top_k, 5, align=16, capacity=0.75)
    x = rows_of_slots(found, columns, FLOATS[dtype])
    inputs = [x, found["slots"], found["tokens"]]
    given = None
    if weights:
        given = torch.randn((tokens, top_k)).to(FLOATS[weights])
        given = torch.where(found["slots"] < 0, torch.nan, given)
        inputs += [given, found["picks"]]
    expected = in_order(x, found["slots"], given)
    for order in (FORWARD, REVERSE, 1):
        [y] = run(plain_combine(columns, top_k, dtype, weights), inputs, order)
        assert torch.equal(y, expected)
        [y] = run(plain_combine(columns, top_k, dtype, weights, out="bf16"), inputs, order)
        assert torch.equal(y, expected.bfloat16())
    exact = Combine(op_values(inputs), {}).reference(
        TorchArrays, *(x.double() if x.is_floating_point() else x for x in inputs)
    )
    torch.testing.assert_close(expected.double(), exact, atol=1e-5, rtol=1e-5)


def op_values(tensors: Sequence[torch.Tensor]) -> list[BlockArgument]:
    """Values of a combine for tensors like these."""
    names = {v: k for k, v in FLOATS.items()} | IDS
    texts = []
    for number, x in enumerate(tensors):
        rows = "M" if number in (0, 2, 4) else "T"
        texts.append("x".join([f"v{number}:{rows}", *map(str, x.shape[1:]), names[x.dtype]]))
    return operands(" ".join(texts))


@pytest.mark.emulate
@pytest.mark.parametrize(("columns", "offset", "align"), [(24, 0, 16), (24, 4, 8), (24, 1, 2), (20, 0, 8), (6, 2, 4)])
def test_combine_of_rows_that_lie_anywhere(columns: int, offset: int, align: int) -> None:
    """Vectors are as wide as the alignment allows; the emulator reports wider ones. Weights and slots are strided."""
    found = routed(29, 2, 5)
    wide = rows_of_slots(found, columns + 8, torch.bfloat16)
    buffer = torch.empty(wide.numel() + 16, dtype=torch.bfloat16)
    start = -buffer.data_ptr() % 16 // 2 + offset
    x = buffer[start : start + wide.numel()].view(wide.shape)
    x.copy_(wide)
    x = x[:, :columns]
    weights = torch.randn(29, 5)[:, 1:3]
    slots = torch.cat([found["slots"], found["slots"] + 1], 1)[:, :2]
    config = (f"alignment={align},4,16,4,16",)
    inputs = [x, slots, found["tokens"], weights, found["picks"]]
    [y] = run(plain_combine(columns, 2, "bf16", "f32", config=config), inputs, 1)
    assert torch.equal(y, in_order(x, slots, weights))


@pytest.mark.emulate
def test_what_follows_a_combine() -> None:
    """Rows, a number of each token, a vector and a scalar; two results of two types, one of them of single tokens."""

    def build(region: Block, x, slots, tokens, residual, gate, bias, scale) -> list[Value]:
        make = functools.partial(create_one, block=region)
        y = make("slot.combine", x, slots, tokens)
        gated = make("math.mul", make("math.sigmoid", gate), make("math.add", y, bias))
        total = make("math.add", make("math.mul", gated, scale), residual)
        return [
            make("math.cast", total, dtype="bf16"),
            make("math.mul", y, 2.0),
            make("math.mul", make("math.cast", gated, dtype="f16"), 1.0),
            make("math.neg", gate),
        ]

    columns, top_k = 40, 3
    reads = (
        f"x:Mx{columns}xbf16 slots:Tx{top_k}xi32 slot_tokens:Mxi32 residual:Tx{columns}xf16 gate:Tx1xf32 "
        f"bias:{columns}xbf16 scale:f32"
    )
    op = region_op("combine", reads, build, ("threads=32", "alignment=16,4,16,4,4,16,16"))
    found = routed(31, top_k, 5)
    x = rows_of_slots(found, columns, torch.bfloat16)
    residual, gate = torch.randn(31, 50).half()[:, :columns], torch.randn(31, 3)[:, 1:2]
    bias, scale = torch.randn(columns).bfloat16(), torch.tensor(0.75)
    y = in_order(x, found["slots"], None)
    gated = gate.sigmoid() * (y + bias.float())
    inputs = [x, found["slots"], found["tokens"], residual, gate, bias, scale]
    for order in (FORWARD, 2):
        total, doubled, rounded, negated = run(op, inputs, order)
        torch.testing.assert_close(total, (gated * scale + residual.float()).bfloat16(), atol=1e-2, rtol=1e-2)
        assert torch.equal(doubled, 2 * y)
        torch.testing.assert_close(rounded, gated.half().float(), atol=2e-3, rtol=2e-3)
        assert torch.equal(negated, -gate)


@pytest.mark.emulate
def test_combine_of_no_tokens() -> None:
    [y] = run(
        plain_combine(24, 2, "bf16"), [torch.empty(0, 24).bfloat16(), torch.empty(0, 2).int(), torch.empty(0).int()], 0
    )
    assert y.shape == (0, 24)


def test_threads_of_a_combine_have_work() -> None:
    for columns in (1, 7, 64, 96, 200, 256, 384, 896, 1000, 2048):
        tokens = combine.tokens_per_block(columns, 256)
        rounds = -(-tokens * columns // 256)
        assert tokens * columns >= 0.7 * rounds * 256, columns
    assert combine.tokens_per_block(256, 256) == 1


def to_picks_op(parts: int, top_k: int) -> Kernel:
    """(share * scale) of each pick's slot, less a number of the pick; and the share alone, rounded."""

    def build(region: Block, share, other, scale, slots, picks, bias) -> list[Value]:
        make = functools.partial(create_one, block=region)
        number = make("math.add", make("math.mul", share, make("math.mul", scale, 2.0)), other)
        y = make("slot.to_picks", number, slots, picks)
        alone = make("slot.to_picks", share, slots, picks)
        return [make("math.sub", y, bias), make("math.cast", y, dtype="bf16"), alone]

    reads = (
        f"share:Mx{parts}xf32:Mx1xf32 other:Mx1xbf16 scale:f32 slots:Tx{top_k}xi32 slot_picks:Mxi32 bias:Tx{top_k}xbf16"
    )
    return region_op("to_picks", reads, build)


@pytest.mark.emulate
@pytest.mark.parametrize(("tokens", "top_k", "parts"), [(41, 3, 1), (13, 8, 16), (5, 1, 7), (3, 100, 37), (0, 2, 4)])
def test_to_picks(tokens: int, top_k: int, parts: int) -> None:
    found = routed(tokens, top_k, 5, align=16, capacity=0.75)
    share, other = rows_of_slots(found, parts, torch.float32), rows_of_slots(found, 1, torch.bfloat16)
    bias, scale = torch.randn(tokens, top_k).bfloat16(), torch.tensor(0.5)
    total = share[:, :1].clone()
    for part in range(1, parts):
        total += share[:, part : part + 1]
    numbers = total * (scale * 2.0) + other.float()
    at = found["slots"].clamp(min=0).long()
    here = found["slots"] >= 0
    y, alone = (torch.where(here, x[:, 0][at], 0.0) for x in (numbers, total))
    inputs = [share, other, scale, found["slots"], found["picks"], bias]
    for order in (FORWARD, REVERSE, 1):
        first, second, third = run(to_picks_op(parts, top_k), inputs, order)
        assert torch.equal(first, y - bias.float())
        assert torch.equal(second, y.bfloat16())
        assert torch.equal(third, alone)
    exact = ToPicks(operands(f"x:Mx1xf32 s:Tx{top_k}xi32 p:Mxi32"), {}).reference(TorchArrays, total, *inputs[3:5])
    assert torch.equal(alone, exact)


def test_an_op_without_a_form_is_named() -> None:
    def build(region: Block, x, slots, tokens) -> list[Value]:
        y = create_one("slot.combine", x, slots, tokens, block=region)
        return [create_one("row.sum", y, block=region)]

    with pytest.raises(UnsupportedError, match=r"row\.sum has no form after a combine"):
        combine.generate(region_op("combine", "x:Mx8xf32 slots:Tx2xi32 tokens:Mxi32", build))


@pytest.mark.nvrtc
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_combine_and_to_picks_compile(target: str, record_property) -> None:
    usual = ("threads=256", f"target={target}")
    kernels = [
        combine.generate(plain_combine(2048, 8, "bf16", "f32", out="bf16", config=usual)),
        combine.generate(plain_combine(2048, 8, "bf16", config=usual)),
        combine.generate(plain_combine(7168, 16, "f32", "bf16", config=usual)),
        combine.generate(plain_combine(1536, 64, "f16", "f32", config=usual)),
        combine.generate(plain_combine(7, 2, "bf16", "f32", config=(*usual, "alignment=2,4,4,4,4"))),
        to_picks.generate(to_picks_op(16, 8)),
    ]
    for kernel in kernels:
        made = compiled(kernel, target)
        record_property("registers", (kernel.symbol, target, str(made.resources)))
        assert made.resources.registers <= 2 * HALF_OF_THREADS

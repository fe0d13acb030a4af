"""Sums over tokens in parts: the gradients of weights that all tokens have in common, where their tiles are few.

Sizes are odd or prime where that matters: parts are without rows, have a stage of 64 or a token more, and rows of
matrices are no whole words.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from device_kernels import emulate, run_on_gpu
from routing import COMPILED, device_of
from slot_kernels import ORDERS, launch, operands, poisoned, region_op

import moesaic as mo
from moesaic.codegen import sum_parts
from moesaic.codegen.target import Target
from moesaic.ir.core import Block, Function, Value, create_one
from moesaic.ir.errors import UnsupportedError
from moesaic.ir.ops import slot
from moesaic.ir.ops.launch import Alloc, Kernel
from moesaic.ir.types import DType
from moesaic.passes.card import H100
from moesaic.passes.cost import Extents, cost_of
from moesaic.passes.cost_model import estimated_us
from moesaic.passes.kernel_key import KernelKey
from moesaic.passes.specialize import Specialize
from moesaic.runtime.kernels import compiled_kernel
from moesaic.runtime.program import program_of
from moesaic.runtime.tuning.lookup import tunables

FLOATS = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def gradient(m: int, n: int, dtype: str = "bf16") -> mo.ir.core.Module:
    """The gradient of a weight [m, n]."""
    rounded = "" if dtype == "f32" else f"%w = math.cast %y {{dtype = {dtype}}} : tensor<{m}x{n}x{dtype}>"
    return mo.parse(f"""
        moe.func @gate(%x: tensor<Tx{n}x{dtype}>, %dy: tensor<Tx{m}x{dtype}>) -> (w: tensor<{m}x{n}x{dtype}>) {{
          %y = slot.wgrad %dy, %x : tensor<{m}x{n}xf32>
          {rounded}
          return %{"w" if rounded else "y"}
        }}
    """)


def specialized(module: mo.ir.core.Module, target: str, tokens: str = "many", passes: str = "") -> Function:
    return program_of(module, passes).executable("forward", target, (), tokens=tokens).module.entry


def kernels(function: Function) -> list[Kernel]:
    return [op for op in function.body.ops if isinstance(op, Kernel)]


def parts(function: Function) -> list[int]:
    """Of each gradient that is split."""
    inner = (o for op in kernels(function) if op.region is not None for o in op.region.ops)
    return [o.parts for o in inner if isinstance(o, slot.WgradParts)]


# The pass -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("m", "n", "target", "many", "few"),
    [
        (128, 2048, "sm_90a", 16, 4),  # 8 tiles of 128 x 256, in pairs beside each other
        (60, 2048, "sm_90a", 16, 4),  # rows of 120 bytes: 16 tiles of 128 x 128, two a multiprocessor
        (64, 7168, "sm_90a", 4, 4),  # 28 tiles
        (384, 7168, "sm_90a", 1, 1),  # 84 tiles
        (384, 2048, "sm_90a", 4, 4),  # 3 x 8: beside each other, none is left alone
        (256, 4096, "sm_90a", 4, 4),  # 2 x 16
        (2048, 1024, "sm_90a", 2, 2),  # 16 x 4
        (640, 3328, "sm_90a", 1, 1),  # 5 x 13: 65 tiles, but 70 blocks
        (128, 2048, "sm_80", 16, 4),
        (384, 2048, "sm_80", 4, 4),  # 48 tiles
        (512, 2048, "sm_120", 4, 4),  # 64
        (640, 2048, "sm_120", 1, 1),  # 80, more than half of the multiprocessors
        (1, 24, "sm_80", 16, 4),
    ],
)
def test_as_many_parts_as_run_at_once(m: int, n: int, target: str, many: int, few: int) -> None:
    for tokens, wanted in (("many", many), ("few", few)):
        assert parts(specialized(gradient(m, n), target, tokens)) == [wanted] * (wanted > 1)


def test_two_launches_stand_for_one() -> None:
    function = specialized(gradient(128, 2048), "sm_90a")
    first, second = kernels(function)
    assert (first.symbol, first.template, second.symbol, second.template) == (
        *("gate_w", "wgrad"),
        *("gate_w_sum", "sum_parts"),
    )
    [alloc] = [op for op in function.body.ops if isinstance(op, Alloc) and op.space == "workspace"]
    assert alloc.type == "tensor<16x128x2048xf32>" and first.written == second.operands[:1] == [alloc.buffer]
    assert second.written == function.returned
    for op in (first, second):
        op.verify()
        assert op.region is not None
    assert [o.name for o in second.region.ops[:-1]] == ["slot.sum_parts", "math.cast"]  # type: ignore[union-attr]
    before = str(mo.ir.core.Module([function]))
    assert str(mo.parse(before)).strip() == before.strip()
    Specialize().rewrite(function, {})  # twice is once
    assert str(mo.ir.core.Module([function])) == before


def test_what_is_tuned_changes_no_part() -> None:
    """Parts decide on bits: those of a gradient with other tiles are the rule's. What a user decides is not tuned."""
    points = "specialize{points=gate_w:rows=256:columns=128}"
    function = specialized(gradient(640, 2048), "sm_90a", passes=points)
    assert parts(function) == [2] and "rows=256" in kernels(function)[0].config
    assert parts(specialized(gradient(128, 2048), "sm_90a", passes="specialize{tile=mma}")) == [16]


def test_what_is_left_alone() -> None:
    """Gradients of experts, and those with sums of rows beside them; rows that no token has."""
    experts = mo.Experts(2, 24, 16, bias=True).module(DType.F32, 2)
    program = program_of(experts)
    function = program.executable("backward", "sm_80", (), program.float_results).module.entry
    assert not parts(function) and "sum_parts" not in str(mo.ir.core.Module([function]))

    def rows_of_slots(region: Block, a: Value, b: Value) -> list[Value]:
        return [create_one("slot.wgrad", a, b, block=region)]

    for rows, wanted in (("T", 16), ("M", 1)):
        op = region_op("wgrad", f"a:{rows}x8xf32 b:{rows}x8xf32", rows_of_slots)
        function = Function("f")
        function.body.append(op)
        Specialize(target="sm_80").rewrite(function, {})
        assert (parts(function) or [1]) == [wanted]


def test_workspaces_of_equal_size_are_one() -> None:
    """Of what lies in parts, only one gradient's is there at a time."""
    layer = mo.MoE(mo.Router(128, 8), mo.Experts(128, 2048, 768), shared=mo.SharedExpert(768, separate=True, gate=True))
    program = program_of(layer.module(DType.BF16))
    function = program.executable("backward", "sm_90a", (), program.float_results).module.entry
    allocs = [op for op in function.body.ops if isinstance(op, Alloc) and op.space == "workspace"]
    by_type: dict[str, set[int]] = {}
    for op in allocs:
        if op.buffer.name.endswith("_parts"):
            by_type.setdefault(op.type, set()).add(op.slot)
    others = {op.slot for op in allocs if not op.buffer.name.endswith("_parts")}
    assert {t: len(slots) for t, slots in by_type.items()} == {
        "tensor<2x2048x768xf32>": 1,
        "tensor<2x768x2048xf32>": 1,
        "tensor<16x1x2048xf32>": 1,
        "tensor<16x128x2048xf32>": 1,
    }
    assert by_type["tensor<2x2048x768xf32>"] == by_type["tensor<2x768x2048xf32>"]
    assert not others & set().union(*by_type.values())
    names = [op.symbol for op in kernels(function)]
    assert len(names) == len(set(names)) and sum(n.endswith("_sum") for n in names) == 5


def test_a_part_has_a_space_and_a_cost() -> None:
    """The key says the parts, and is the same before and after the function is specialised."""
    program = program_of(gradient(128, 2048))
    target, specialize = Target.parse("sm_90a"), Specialize()
    planned = program.planned("forward")
    [one] = tunables(planned, specialize, target, (16, 16), ">16384")
    assert "sum_parts" not in str(mo.ir.core.Module([planned])), "the planned function is left as it is"
    [again] = tunables(specialized(gradient(128, 2048), "sm_90a"), specialize, target, (16, 16), ">16384")
    assert one.key == again.key and one.key.features == "slot.wgrad_parts{parts=16}"
    assert (one.number, one.key.experts, one.key.inner, one.key.outer) == (0, 1, 128, 2048)
    assert isinstance(one.key, KernelKey) and len(one.space.points()) > 4
    assert all(one.space.problem(p) == "" for p in one.space.points())

    load, half = Extents(16384, 0), Extents(8192, 0)
    first, second = kernels(specialized(gradient(128, 2048), "sm_90a"))
    whole = 128 * 2048
    assert dict(cost_of(first, load).written) == {2: 16 * whole * 4}
    assert cost_of(first, load).product_flops == 2 * 16384 * whole and cost_of(first, load).product_type == "bf16"
    assert dict(cost_of(second, load).read) == {0: 16 * whole * 4} and cost_of(second, load).other_flops == 16 * whole
    assert estimated_us(one.space, one.space.default, half, H100) < estimated_us(
        one.space, one.space.default, load, H100
    )
    assert 15 < estimated_us(one.space, one.space.default, load, H100) < 60  # 193 us whole, measured


# Rows of a part -------------------------------------------------------------------------------------------------------

ROWS_OF_PARTS = """#include "moesaic/parts.cuh"
extern "C" __global__ void rows_of_parts(const long long* rows, long long* found, int cases) {
  for (int n = threadIdx.x; n < cases; n += 32) {
    for (int part = 0; part < PARTS; ++part) {
      const moesaic::Part it = moesaic::part_of<PARTS, 64>(moesaic::load_one(rows + n), part);
      moesaic::store_one(found + (n * PARTS + part) * 2, it.first);
      moesaic::store_one(found + (n * PARTS + part) * 2 + 1, static_cast<long long>(it.count));
    }
  }
}
"""


@pytest.mark.parametrize(
    "run", [pytest.param(emulate, marks=pytest.mark.emulate), pytest.param(run_on_gpu, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("parts", [2, 16])
def test_rows_of_parts(parts: int, run) -> None:
    edges = [64 * parts * k + d for k in (0, 1, 2, 1024) for d in (-65, -64, -1, 0, 1, 63, 64, 65)]
    rows = [n for n in (*range(70), 997, 2**31 - 1, 2**31 + 7, *edges) if n >= 0]
    out = np.full((len(rows), parts, 2), -7, np.int64)
    source = ROWS_OF_PARTS.replace("PARTS", str(parts))
    found = run(source, "rows_of_parts", [np.array(rows, np.int64)], out, [len(rows)])
    for n, split in zip(rows, found.reshape(out.shape).tolist(), strict=True):
        each = -(-n // (64 * parts)) * 64
        assert split == [[min(p * each, n), max(0, min(each, n - p * each))] for p in range(parts)], n
        op = slot.WgradParts(operands("a:Tx3xf32 b:Tx5xf32"), {"parts": parts})
        assert op.rows_of_part(n) == each
        assert all(first % 64 == 0 and count % 64 == 0 for (first, count), after in pairwise(split) if after[1])


# Kernels --------------------------------------------------------------------------------------------------------------


def sum_op(count: int, m: int, n: int, out: str, main: bool, config: Sequence[str] = ()) -> Kernel:
    """The sum over parts, rounded, or added to a sum of the caller's."""

    def build(region: Block, x: Value, *mains: Value) -> list[Value]:
        make = functools.partial(create_one, block=region)
        y = make("slot.sum_parts", x)
        if main:
            return [make("slot.accumulate", mains[0], y)]
        return [y if out == "f32" else make("math.cast", y, dtype=out)]

    reads = f"x:{count}x{m}x{n}xf32" + (f" main:{m}x{n}xf32" if main else "")
    op = region_op("sum_parts", reads, build, config)
    if main:
        op.operands[-1] = op.operands[1]  # it is written where it lies
    return op


@pytest.mark.emulate
@pytest.mark.parametrize(
    ("count", "m", "n", "out", "main"),
    [(16, 7, 20, "bf16", False), (2, 3, 11, "f32", False), (4, 13, 22, "f16", False), (16, 5, 52, "f32", True)],
)
def test_parts_are_added_up_in_order(count: int, m: int, n: int, out: str, main: bool) -> None:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn((count, m, n), generator=generator) * 10.0 ** torch.arange(count)[:, None, None].remainder(7)
    total = x[0].clone()
    for part in x[1:]:
        total += part
    op = slot.SumParts(operands(f"x:{count}x{m}x{n}xf32"), {})
    from moesaic.runtime.reference import TorchArrays

    assert torch.equal(op.reference(TorchArrays(), x), total)
    held = torch.randn((m, n + 3), generator=generator).view(-1)[1 : 1 + m * n].view(m, n)  # aligned to 4 bytes alone
    kernel = sum_parts.generate(sum_op(count, m, n, out, main, ("alignment=16,4",) if main else ()))
    assert kernel.blocks == -(-m * n // (int(np.gcd(m * n, 4)) * 64)) and kernel.grid == "fixed"
    for order in ORDERS:
        if main:
            found = held.clone()
            buffer = torch.empty(m * n + 8)
            start = -buffer.data_ptr() % 16 // 4 + 1
            found = buffer[start : start + m * n].view(m, n).copy_(held)
            tensors, wanted = [x, found, found], held + total
        else:
            found = poisoned((m, n), FLOATS[out])
            tensors, wanted = [x, found], total.to(FLOATS[out])
        launch(kernel, 1, tensors, 0, order)
        assert torch.equal(found, wanted)


def test_an_op_without_a_form_is_named() -> None:
    def build(region: Block, x: Value) -> list[Value]:
        return [create_one("row.sum", create_one("slot.sum_parts", x, block=region), block=region)]

    with pytest.raises(UnsupportedError, match=r"row\.sum has no form after a sum over parts"):
        sum_parts.generate(region_op("sum_parts", "x:2x3x5xf32", build))


def drawn(tokens: int, m: int, n: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens + n)
    x, dy = (torch.randn((tokens, size), generator=generator).to(FLOATS[dtype]) for size in (n, m))
    return x, dy


def check(found: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> None:
    """Products of 16-bit numbers are exact in float32: what is left is the order of the sum, and one rounding."""
    a, b = dy.double(), x.double()
    exact, size = a.T @ b, a.abs().T @ b.abs()
    once = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}[found.dtype]
    error = (found.double() - exact).abs()
    assert (error <= once * exact.abs() + 2.0**-22 * size).all()


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize(("m", "n", "dtype"), [(5, 23, "f32"), (7, 24, "bf16")])
def test_gradients_in_parts(m: int, n: int, dtype: str, backend: str) -> None:
    """By tiles that any target has, for few tokens and for many: up to 24 tokens are few here."""
    layer = mo.compile(gradient(m, n, dtype), backend=backend, target="sm_80")
    for tokens in (0, 1, 24, 25, 64, 65, 257, 1023, 1024, 1025, 1031):
        x, dy = (t.to(device_of(backend)) for t in drawn(tokens, m, n, dtype))
        found = layer(x, dy=dy).w
        check(found, x, dy)
        assert torch.equal(found, layer(x, dy=dy).w) and (tokens == 0) == (not found.any())


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize(("m", "n"), [(24, 264), (136, 136)])
def test_gradients_in_parts_by_wgmma(m: int, n: int, backend: str) -> None:
    """Both operands come in boxes, the last of which ends with the tokens, and NaNs behind them are nobody's."""
    layer = mo.compile(gradient(m, n), backend=backend)
    few = (0, 20, 200) if m > 128 else (25, 1100)  # of 1100, two stages a part
    for tokens in few if backend == "emulate" else (0, 1, 20, 25, 64, 65, 200, 1024, 1031, 5003):
        wide = [torch.cat([t, torch.full((5, t.shape[1]), torch.nan).bfloat16()]) for t in drawn(tokens, m, n, "bf16")]
        x, dy = (t.to(device_of(backend))[:tokens] for t in wide)
        check(layer(x, dy=dy).w, x, dy)
    if backend == "emulate" or torch.cuda.get_device_capability() == (9, 0):
        ways = re.findall(r"WgmmaTile<Element, Shape, moesaic::Fetch::(\w+), moesaic::Fetch::(\w+)", layer.source)
        assert set(ways) == {("kBoxes", "kShared") if m > 128 else ("kShared", "kBoxes")}


@pytest.mark.nvrtc
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_120"])
def test_kernels_of_parts_compile(target: str, record_property) -> None:
    """None spills, and all parts are in flight: 16 words of 16 bytes a thread are 64 registers."""
    program = program_of(gradient(128, 2048))
    first, second = program.executable("forward", target, ()).kernels
    for kernel in (first, second):
        made = compiled_kernel(kernel, Target.parse(target))
        record_property("registers", (kernel.symbol, target, str(made.resources)))
        assert not made.resources.uses_local_memory, made.resources
        if kernel is second:
            assert 64 <= made.resources.registers <= 128
        elif target == "sm_90a":
            assert "WgmmaTile" in kernel.source and "(C75" not in made.log


def test_layers_tell_of_parts() -> None:
    layer = mo.compile(gradient(128, 2048), target="sm_90a")
    told = str(layer.explain(16384))
    assert "gate_w_sum" in told and "16.8 MB" in told and "gate_w_sum" in layer.source
    assert set(layer.resources) == {"gate_w", "gate_w_sum"}
    [between] = layer.explain(16384).directions[0].between
    assert (between.name, between.writer, between.readers) == ("w_parts", "gate_w", ("gate_w_sum",))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("experts", "hidden"), [(64, 2048), (128, 2048), (384, 2048), (256, 2048), (128, 2304), (60, 2048), (1, 2048)]
)
def test_gates_of_real_size(experts: int, hidden: int) -> None:
    """Within one rounding of the exact sums, and the same bits each time. Pairs of tiles lie below each other or beside
    each other, of nine one is left alone; where rows are no whole words, tiles are by mma."""
    layer = mo.compile(gradient(experts, hidden), backend="cuda")
    for tokens in (1031, 16384 + 37):
        x, dy = (t.cuda() for t in drawn(tokens, experts, hidden, "bf16"))
        found = layer(x, dy=dy).w
        check(found, x, dy)
        for _ in range(20):
            assert torch.equal(layer(x, dy=dy).w, found)

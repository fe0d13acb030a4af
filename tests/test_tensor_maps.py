"""Tensor maps: what a kernel finds by one, on the emulator, and on a GPU by the copy engine itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from moesaic.codegen.kernel import Argument, GeneratedKernel, TensorMap
from moesaic.ir.errors import EmulationError, InternalError
from moesaic.ir.types import DType, TensorType, symbol
from moesaic.runtime import execute
from moesaic.runtime.emulator import build
from moesaic.runtime.plan import BufferSpec, Input, LaunchPlan, Step

# Every box of the operand, one a block, as it lies in shared memory but for the swizzle; zeros where there are no rows.
# By a map of rows, those of the run that ends before row END, from 0 on.
SOURCE = """#include "moesaic/boxes.cuh"

constexpr int kBoxRows = BOX_ROWS, kAcross = ACROSS, kDown = DOWN;  // kDown: boxes in a matrix, from its first row
constexpr int kEnd = END;

extern "C" __global__ void __launch_bounds__(64)
    boxes(const __grid_constant__ moesaic::TensorMap map, unsigned short* __restrict__ out, long long tokens) {
  MOESAIC_DYNAMIC_SHARED(unsigned char, shared);
  __shared__ moesaic::Mbarrier arrived;
  const size_t misaligned = reinterpret_cast<size_t>(__cvta_generic_to_shared(shared)) % 1024;
  auto* const box = reinterpret_cast<unsigned short*>(shared + (1024 - misaligned) % 1024);
  const int thread = static_cast<int>(threadIdx.x);
  const int column = static_cast<int>(blockIdx.x) % kAcross * 64;
  const int row = static_cast<int>(blockIdx.x) / kAcross % kDown * kBoxRows;
  const int matrix = static_cast<int>(blockIdx.x) / kAcross / kDown;
  out += static_cast<long long>(blockIdx.x) * (kBoxRows * 64);
  if (tokens == 0) {
    for (int i = 0; i < kBoxRows; ++i) moesaic::store_one(out + i * 64 + thread, (unsigned short)0);
    return;
  }
  if (thread == 0) {
    moesaic::mbarrier_init(&arrived, 1);
    moesaic::mbarrier_ready();
    moesaic::mbarrier_arrive_and_expect(&arrived, kBoxRows * 128);
    if (kEnd < 0) {
      moesaic::copy_box(box, map, column, row, matrix, &arrived);
    } else {
      moesaic::copy_rows(box, map, column, row, row < kEnd ? moesaic::smaller(kBoxRows, kEnd - row) : 0, &arrived);
    }
  }
  __syncthreads();
  moesaic::mbarrier_wait(&arrived, 0);
  for (int i = 0; i < kBoxRows; ++i) {
    moesaic::store_one(out + i * 64 + thread, box[i * 64 + (thread / 8 ^ (i & 7)) * 8 + thread % 8]);
  }
}
"""

BACKENDS = [pytest.param("emulate", marks=pytest.mark.emulate), pytest.param("cuda", marks=pytest.mark.gpu)]
backends = pytest.mark.parametrize("backend", BACKENDS)


def text_of(map: TensorMap, across: int, down: int, end: int) -> str:
    names = {"BOX_ROWS": map.box_rows, "ACROSS": across, "DOWN": down, "END": -1 if map.rows else end}
    return re.sub(r"\b(?:" + "|".join(names) + r")\b", lambda name: str(names[name[0]]), SOURCE)


def boxes_of(
    operand: torch.Tensor, map: TensorMap, most_rows: int, backend: str, end: int | None = None
) -> torch.Tensor:
    """Every box of an operand with up to so many rows: [matrices, down, across, box_rows, 64]; of one of rows, of those
    before `end`."""
    across, down = -(-map.columns // 64), max(1, -(-most_rows // map.box_rows))
    blocks = map.matrices * down * across
    source = text_of(map, across, down, operand.shape[0] if end is None else end)
    arguments = (Argument("tensor_map", 0, map), Argument("pointer", 1), Argument("tokens"))
    shared = 1024 + map.box_rows * 128
    kernel = GeneratedKernel("boxes", source, arguments, 64, 0, "fixed", blocks, shared_bytes=shared)
    dtype = DType.BF16 if operand.dtype == torch.bfloat16 else DType.F16
    stacked = operand.dim() == 3
    types = (
        TensorType((*operand.shape[:-1], operand.shape[-1]) if stacked else (symbol("T"), operand.shape[1]), dtype),
        TensorType((symbol("T"), 1), dtype),
        TensorType((blocks, map.box_rows, 64), dtype),
    )
    inputs = (Input("x", types[0], True), Input("t", types[1], True))
    plan = LaunchPlan(
        "made", inputs, (BufferSpec("out", types[2], True, 0),), (Step(kernel, (0, 2), "", 0),), (2,), ("out",)
    )
    device = operand.device
    runner = execute.RUNNERS[backend]
    prepared = execute.Prepared(SimpleNamespace(plan=plan), [runner.load(kernel, device)], runner, device)  # type: ignore[arg-type]
    tokens = torch.empty(1 if stacked else operand.shape[0], 1, dtype=operand.dtype, device=device)
    if device.index is None:
        [out] = prepared.run([operand, tokens], 0)
    else:
        [out] = runner.enter(prepared, [operand, tokens], device.index)
    return out.view(map.matrices, down, across, map.box_rows, 64)


def expected(operand: torch.Tensor, map: TensorMap, most_rows: int, end: int | None = None) -> torch.Tensor:
    across, down = -(-map.columns // 64), max(1, -(-most_rows // map.box_rows))
    matrices = operand if operand.dim() == 3 else operand[None]
    padded = operand.new_zeros(map.matrices, down * map.box_rows, across * 64)
    rows = map.rows or (operand.shape[0] if end is None else end)
    padded[:, :rows, : map.columns] = matrices[: map.matrices, :rows, : map.columns]
    return padded.view(map.matrices, down, map.box_rows, across, 64).transpose(2, 3)


def drawn(shape: Sequence[int], dtype: torch.dtype, backend: str) -> torch.Tensor:
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "cuda" else torch.device("cpu")
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)


@backends
@pytest.mark.parametrize("name", ["bf16", "f16"])
@pytest.mark.parametrize("tokens", [0, 1, 8, 13, 37])
def test_rows_of_tokens(tokens: int, name: str, backend: str) -> None:
    """As many as there are, in boxes that go over the edges of the operand; a map all zero where there are none."""
    operand = drawn((tokens, 136), {"bf16": torch.bfloat16, "f16": torch.float16}[name], backend)
    map = TensorMap(136, 0, 1, 16, element=name)
    if tokens:
        assert torch.equal(boxes_of(operand, map, tokens, backend), expected(operand, map, tokens))
    else:
        assert not boxes_of(operand, map, tokens, backend).any()


@backends
@pytest.mark.parametrize("box_rows", [16, 48, 128])
def test_rows_of_others_come_as_zeros(box_rows: int, backend: str) -> None:
    """Of those that follow a run, a box has none, wherever the run ends."""
    operand, map = drawn((150, 72), torch.bfloat16, backend), TensorMap(72, 0, 1, box_rows)
    for end in (0, 1, 15, 16, 63, 64, 100, 149):
        assert torch.equal(boxes_of(operand, map, 150, backend, end), expected(operand, map, 150, end))


@backends
def test_rows_apart_and_rows_of_which_the_kernel_wants_a_part(backend: str) -> None:
    wide = drawn((24, 200), torch.bfloat16, backend)
    for operand in (wide[:, :96], wide[:, 8:104], wide[3:20, 104:]):
        for columns in (96, 64, 40):
            map = TensorMap(columns, 0, 1, 8)
            assert torch.equal(boxes_of(operand, map, 24, backend), expected(operand, map, 24))


@backends
def test_rows_that_lie_on_each_other(backend: str) -> None:
    """Such are gradients of a sum."""
    operand = drawn((1, 96), torch.bfloat16, backend).expand(20, 96)
    map = TensorMap(96, 0, 1, 8)
    assert torch.equal(boxes_of(operand, map, 20, backend), expected(operand, map, 20))


@backends
@pytest.mark.parametrize("matrices", [1, 3])
def test_matrices_apart(matrices: int, backend: str) -> None:
    """Weights [E, R, C] as they are, and with other things between their matrices and rows."""
    wide = drawn((2 * matrices, 40, 144), torch.bfloat16, backend)
    whole = wide[:matrices].contiguous()
    for operand in (whole, wide[::2], wide[::2, :30], wide[:matrices, 1::2, 16:]):
        for rows in (operand.shape[1], operand.shape[1] - 5):
            map = TensorMap(operand.shape[2], rows, matrices, 16)
            found = boxes_of(operand, map, operand.shape[1], backend)
            assert torch.equal(found, expected(operand, map, operand.shape[1]))


@pytest.mark.emulate
def test_address_and_strides_are_multiples_of_16_bytes() -> None:
    wide = drawn((8, 100), torch.bfloat16, "emulate")
    for operand in (wide[:, :64], drawn((8, 72), torch.bfloat16, "emulate")[:, 1:65]):
        with pytest.raises(
            InternalError, match=r"multiples of 16 bytes: it has address 0x.*, dimensions \(64, 1073741824, 9, "
        ):
            boxes_of(operand, TensorMap(64, 0, 1, 8), 8, "emulate")


@pytest.mark.emulate
def test_the_operand_of_a_map_is_a_buffer() -> None:
    """Read beside it, and the emulator says so; written to, too."""
    operand = drawn((2, 8, 64), torch.bfloat16, "emulate")[:1]
    with pytest.raises(EmulationError, match="operand 0"):
        boxes_of(operand, TensorMap(64, 9, 1, 8), 16, "emulate")


@pytest.mark.emulate
def test_the_struct_is_of_128_bytes() -> None:
    include = execute.nvrtc.helper_include_dirs()
    text = text_of(TensorMap(64, 0, 1, 8), 1, 1, 8)
    assert build(text, "boxes", include).parameters == ("s128", "p8", "i8")


@pytest.mark.nvrtc
def test_the_copy_engine_is_told_by_address() -> None:
    """The kernel for a GPU compiles, and copies nothing of the map to its own memory."""
    from moesaic.codegen.target import Target

    text = text_of(TensorMap(64, 0, 1, 8), 1, 1, 8)
    compiled = execute.nvrtc.compile_source(text, name="boxes", target=Target.parse("sm_90a"))
    assert (compiled.resources.stack_bytes, compiled.resources.spill_store_bytes) == (0, 0)


def test_what_no_map_is() -> None:
    for changed in ({"box_columns": 16}, {"box_rows": 0}, {"box_rows": 257}, {"element": "f32"}, {"columns": 0}):
        with pytest.raises(InternalError, match="cannot read by"):
            TensorMap(**{"columns": 64, "rows": 0, "matrices": 1, "box_rows": 8, **changed})  # type: ignore[arg-type]
    for kind, map in (("tensor_map", None), ("pointer", TensorMap(64, 0, 1, 8))):
        with pytest.raises(InternalError, match="tensor map"):
            Argument(kind, 0, map)
    rows, stacked = TensorType((symbol("T"), 64), DType.BF16), TensorType((2, 8, 64), DType.BF16)
    for map, type in (
        (TensorMap(64, 0, 1, 8, element="f16"), rows),
        (TensorMap(64, 8, 2, 8), rows),
        (TensorMap(64, 0, 2, 8), stacked),
    ):
        with pytest.raises(InternalError, match="is none of"):
            execute._Boxes.of(map, type)

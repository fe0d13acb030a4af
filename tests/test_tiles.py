"""tile.cuh: tiles of products, on the emulator and on a GPU.

Operands lie in buffers of NaN, line for line in a drawn order, and end with the last line: whatever is read beside
them shows, as a NaN or as a report. Sums are compared with float64, within ``depth * 2^-23`` of the sum of the
products' magnitudes; those of `SimtTile` also bit for bit with one multiply-add after the other.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_device_helpers import emulate, run_on_gpu, stored

from moesaic.codegen import nvrtc
from moesaic.codegen.target import Target
from moesaic.ir.errors import EmulationError
from moesaic.runtime.emulator import FORWARD, REVERSE
from moesaic.runtime.kernels import NVRTC_OPTIONS

Run = Callable[..., np.ndarray]
ORDERS = (FORWARD, REVERSE, 1)
TYPES = {"float": "float", "bf16": "__nv_bfloat16", "half": "__half"}


def run_in_some_orders(*args: Any, **options: Any) -> np.ndarray:
    """Runs on the emulator; the order of lanes and warps must not change a bit."""
    source, name, inputs, out, scalars = args
    results = [emulate(source, name, inputs, out.copy(), scalars, order=order, **options) for order in (REVERSE, 1)]
    np.testing.assert_array_equal(results[1].view(np.uint32), results[0].view(np.uint32))
    return results[0]


everywhere = pytest.mark.parametrize(
    "run",
    [
        pytest.param(run_in_some_orders, marks=pytest.mark.emulate, id="emulator"),
        pytest.param(run_on_gpu, marks=pytest.mark.gpu, id="gpu"),
    ],
)


# Cases ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A tile, and how its operands lie."""

    tile: str
    dtype: str
    m: int
    n: int
    k: int
    stages: int
    parts: int
    left_across: bool
    right_across: bool
    left_align: int
    right_align: int
    threads: int

    def __str__(self) -> str:
        lies = "".join("across" if across else "along" for across in (self.left_across, self.right_across))
        return f"{self.dtype}-{self.m}x{self.parts}x{self.n}x{self.k}-{lies}-{self.left_align}-{self.right_align}"

    @property
    def cpp(self) -> str:
        shape = [self.m, self.n, self.k, self.stages, self.parts, self.left_across, self.right_across]
        shape += [self.left_align, self.right_align, self.threads]
        return f"moesaic::{self.tile}<{TYPES[self.dtype]}, moesaic::TileShape<{', '.join(str(int(x)) for x in shape)}>>"

    @property
    def shared_bytes(self) -> int:
        if self.tile == "SimtTile":  # floats, in rows of whole 32; gaps where lines lie along
            floats = self.k * (-(-self.m // 32) * 32 + -(-self.parts * self.n // 32) * 32)
            for across, align in ((self.left_across, self.left_align), (self.right_across, self.right_align)):
                floats += 0 if across else max(32, 4 * (self.k * self.size // align))
            return 4 * self.stages * floats
        stages = self.size * self.stages * self.k * (self.m + self.parts * self.n)
        return stages + 1008 if self.tile == "WgmmaTile" else stages  # which begin at a multiple of 1024

    @property
    def size(self) -> int:
        return 4 if self.dtype == "float" else 2


# The block goes over its tiles, in two products each; sums of rows leave through `store`, which counts its calls.
KERNEL = """#include "moesaic/tile.cuh"

struct Operand {{
  const int* lines;   // where each line lies, or -1
  int start, stride;  // in elements
  template <typename T>
  __device__ const T* line(const T* data, int i) const {{
    const int at = moesaic::load_one(lines + i);
    return at < 0 ? nullptr : data + start + static_cast<long long>(at) * stride;
  }}
}};

template <class Tile, class Shape, typename T>
__device__ __forceinline__ void products(const T* a, const T* b, Operand left, Operand right, float* y, int m, int n,
                                         int depth, int split) {{
  constexpr int kM = Shape::kM, kN = Shape::kN, kParts = Shape::kParts;
  MOESAIC_DYNAMIC_SHARED(unsigned char, shared);
  float* const sums = y + static_cast<long long>(kParts) * m * n;   // [column of tiles][row of a whole tile]
  const int tile_rows = (m + kM - 1) / kM, tile_columns = (n + kN - 1) / kN;
  float* const calls = sums + tile_rows * tile_columns * kM;
  for (int number = 0; number < tile_rows * tile_columns; ++number) {{
    const int m0 = number / tile_columns * kM, n0 = number % tile_columns * kN;
    Tile tile;
    tile.clear();
    for (int pass = 0; pass < 2; ++pass) {{
      const int first = pass == 0 ? 0 : split, end = pass == 0 ? split : depth;
      const auto left_line = [&](int r) {{
        if constexpr (Shape::kLeftAcross) {{
          const T* const line = left.line(a, first + r);
          return line == nullptr ? line : line + m0;
        }} else {{
          const T* const line = left.line(a, m0 + r);
          return line == nullptr ? line : line + first;
        }}
      }};
      const auto right_line = [&](int part, int r) {{
        if constexpr (Shape::kRightAcross) {{
          const T* const line = right.line(b, part * depth + first + r);
          return line == nullptr ? line : line + n0;
        }} else {{
          const T* const line = right.line(b, part * n + n0 + r);
          return line == nullptr ? line : line + first;
        }}
      }};
      tile.multiply(left_line, right_line, end - first, moesaic::smaller(kM, m - m0), moesaic::smaller(kN, n - n0),
                    shared);
    }}

    float own[Tile::kOwnRows] = {{}};
#pragma unroll
    for (int p = 0; p < kParts; ++p) {{
#pragma unroll
      for (int i = 0; i < Tile::kOwnRows; ++i) {{
#pragma unroll
        for (int j = 0; j < Tile::kOwnVectors; ++j) {{
#pragma unroll
          for (int v = 0; v < Tile::kVector; ++v) {{
            const int row = m0 + tile.row(i), column = n0 + tile.column(j) + v;
            if (row >= m || column >= n) continue;
            moesaic::store_one(y + (static_cast<long long>(p) * m + row) * n + column, tile.values[p][i][j][v]);
            own[i] += tile.values[p][i][j][v];
          }}
        }}
      }}
    }}
    tile.sum_rows(own, shared, [&](int row, float total) {{
      moesaic::store_one(sums + number * kM + row, total);
      moesaic::store_one(calls + number * kM + row, moesaic::load_one(calls + number * kM + row) + 1);
    }});
  }}
}}

template <typename T, class Shape>
using Chosen = moesaic::{tile}<T, Shape>;

template <typename T, class Shape, int kSharedBytes>
__device__ __forceinline__ void run(const void* a, const void* b, Operand left, Operand right, float* y, int m, int n,
                                    int depth, int split) {{
  using Tile = Chosen<T, Shape>;
  static_assert(Tile::kSharedBytes == kSharedBytes, "what the test asks for");
  products<Tile, Shape>(static_cast<const T*>(a), static_cast<const T*>(b), left, right, y, m, n, depth, split);
}}

extern "C" __global__ void __launch_bounds__(256) tiles(
    const void* a, const void* b, const int* left_lines, const int* right_lines, float* y, int m, int n, int depth,
    int split, int left_start, int left_stride, int right_start, int right_stride, int which) {{
  const Operand left = {{left_lines, left_start, left_stride}};
  const Operand right = {{right_lines, right_start, right_stride}};
  switch (which) {{
{cases}
  }}
}}
"""


def kernel_of(cases: Sequence[Case]) -> str:
    """A kernel `tiles` that runs the `which`-th of the cases, which are of one tile and type."""
    lines = []
    for i, case in enumerate(cases):
        shape = case.cpp.partition(", ")[2].removesuffix(">")
        lines.append(
            f"    case {i}: run<{TYPES[case.dtype]}, {shape}, {case.shared_bytes}>(a, b, left, right, y, m, n, depth, "
            "split); break;"
        )
    return KERNEL.format(tile=cases[0].tile, cases="\n".join(lines))


# Operands -------------------------------------------------------------------------------------------------------------


@dataclass
class Lines:
    """Lines of an operand in memory, amid NaNs."""

    data: np.ndarray  # of bits
    at: np.ndarray
    start: int
    stride: int


def laid_out(lines: np.ndarray, null: np.ndarray, align: int, rng: np.random.Generator) -> Lines:
    """`lines` of bits in a drawn order; what is aligned to `align` bytes is aligned to no more, up to 8."""
    unit = align // lines.dtype.itemsize
    length = lines.shape[1]
    assert length % unit == 0, "valid elements are whole units of the alignment"
    stride = unit * ((length // unit + 1) | 1)
    at = rng.permutation(len(lines)).astype(np.int32)
    start = unit
    nan = {np.dtype(np.uint16): 0x7FFF, np.dtype(np.float32): np.nan}[lines.dtype]
    data = np.full(start + max(len(lines) - 1, 0) * stride + length, nan, lines.dtype)
    base = np.full(data.nbytes + 64, 0xFF, np.uint8)
    skip = -base.ctypes.data % 64
    aligned = base[skip : skip + data.nbytes].view(lines.dtype)
    aligned[:] = nan
    for line, place, absent in zip(lines, at, null, strict=True):
        if not absent:
            aligned[start + place * stride :][:length] = line
    at[null] = -1
    return Lines(aligned, at, start, stride)


def operand(
    shape: tuple[int, ...], null: np.ndarray, case: Case, rng: np.random.Generator, integers: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Lines [lines, elements] of bits, and the numbers that a tile sees, zeros where a line is null."""
    x = rng.integers(-9, 10, shape).astype(np.float32) if integers else rng.standard_normal(shape).astype(np.float32)
    kind = "tf32" if case.dtype == "float" else case.dtype
    bits, seen = stored(x, kind)
    if case.tile == "SimtTile" and case.dtype == "float":
        seen = x.astype(np.float64)
    return bits, np.where(null[:, None], 0.0, seen)


@dataclass
class Product:
    """What a kernel made of a case: the result [parts, m, n], and its operands as the tile sees them."""

    y: np.ndarray
    left: np.ndarray
    right: np.ndarray


def product(
    run: Run,
    source: str,
    which: int,
    case: Case,
    size: tuple[int, int, int],
    *,
    split: int = 0,
    integers: bool = False,
    seed: int = 0,
    **options: object,
) -> Product:
    """Runs a case for m, n, depth, and checks the sums of rows."""
    m, n, depth = size
    rng = np.random.default_rng((seed, *size))
    left_null = rng.random(depth if case.left_across else m) < 0.15
    right_null = rng.random(case.parts * (depth if case.right_across else n)) < 0.15
    left, left_seen = operand((len(left_null), m if case.left_across else depth), left_null, case, rng, integers)
    right, right_seen = operand((len(right_null), n if case.right_across else depth), right_null, case, rng, integers)
    a = laid_out(left, left_null, case.left_align, rng)
    b = laid_out(right, right_null, case.right_align, rng)

    tile_rows, tile_columns = -(-m // case.m), -(-n // case.n)
    y = np.zeros(case.parts * m * n + 2 * tile_rows * tile_columns * case.m, np.float32)
    y[: case.parts * m * n] = np.nan
    scalars = [m, n, depth, split, a.start, a.stride, b.start, b.stride, which]
    inputs = [a.data, b.data, a.at, b.at]
    out = run(source, "tiles", inputs, y, scalars, block=case.threads, shared_bytes=case.shared_bytes, **options)

    values = out[: case.parts * m * n].reshape(case.parts, m, n)
    sums, calls = out[case.parts * m * n :].reshape(2, tile_rows, tile_columns, case.m)
    np.testing.assert_array_equal(calls, 1.0)
    for column in range(tile_columns):
        part = values[:, :, column * case.n : (column + 1) * case.n].astype(np.float64)
        found = sums[:, column].reshape(-1)
        bound = case.parts * case.n * 2.0**-23 * np.abs(part).sum((0, 2))
        assert (np.abs(found[:m] - part.sum((0, 2))) <= bound).all()
        np.testing.assert_array_equal(found[m:], 0.0)

    left_seen = left_seen.T if case.left_across else left_seen
    parts = np.stack(np.split(right_seen, case.parts))
    return Product(values, left_seen, parts if case.right_across else parts.transpose(0, 2, 1))


def assert_right(found: Product) -> None:
    depth = found.left.shape[1]
    bound = max(depth, 1) * 2.0**-23 * (np.abs(found.left) @ np.abs(found.right))
    difference = np.abs(found.y - found.left @ found.right)
    assert (difference <= bound).all(), f"{(~(difference <= bound)).sum()} of {difference.size} are wrong"


def whole(case: Case, m: int, n: int, depth: int) -> tuple[int, int, int]:
    """A size of valid lines of whole units of the alignments, no less than the given one."""
    left, right = case.left_align // case.size, case.right_align // case.size
    units = [1, 1, 1]
    units[0 if case.left_across else 2] = left
    units[1 if case.right_across else 2] = max(units[1 if case.right_across else 2], right)
    m, n, depth = (-(-x // unit) * unit for x, unit in zip((m, n, depth), units, strict=True))
    return m, n, depth


def half_depth(depth: int) -> int:
    """Where a sum can be cut in two without leaving its alignment."""
    return depth // 2 // 8 * 8


SIZES = ((1, 1, 1), (37, 83, 33), (67, 1, 7), (5, 131, 129), (33, 70, 16), (2, 3, 0))


def drawn_cases(tile: str, dtype: str, shapes: Sequence[tuple[int, int, int, int, int]]) -> list[Case]:
    """Every layout with one and two parts; in each of these, each operand has every alignment.

    What is done for half differs from what is done for bf16 by the conversions alone: a few cases are enough.
    """
    aligns = [align for align in (2, 4, 8, 16) if align >= (4 if dtype == "float" else 2)]
    cases = []
    for left, right, parts, j in itertools.product((False, True), (False, True), (1, 2), (0, 1)):
        if dtype == "half" and (j, parts) != (left, 1 + (left ^ right)):
            continue
        m, n, k, stages, threads = shapes[len(cases) % len(shapes)]
        left_align = aligns[(2 * j + right) % len(aligns)]
        right_align = aligns[(2 * j + left + parts) % len(aligns)]
        cases.append(Case(tile, dtype, m, n // parts, k, stages, parts, left, right, left_align, right_align, threads))
    return cases


def check(run: Run, case: Case, cases: Sequence[Case]) -> None:
    """Two sizes; one kernel holds all cases of an element type."""
    alike = [c for c in cases if c.dtype == case.dtype]
    which = alike.index(case)
    for size in (SIZES[1], SIZES[which % len(SIZES)]):
        m, n, depth = whole(case, *size)
        assert_right(product(run, kernel_of(alike), which, case, (m, n, depth), split=half_depth(depth)))


# Shapes for large products, and how many blocks of them share a multiprocessor.
DEFAULT_SIMT = Case("SimtTile", "float", 64, 128, 16, 2, 1, False, True, 16, 16, 256)
DEFAULT_MMA = {
    Case("MmaTile", "bf16", 128, 128, 32, 4, 1, False, True, 16, 16, 128): 2,
    Case("MmaTile", "half", 128, 64, 32, 4, 2, False, False, 16, 16, 128): 2,
    Case("MmaTile", "bf16", 128, 256, 32, 3, 1, True, True, 16, 16, 256): 1,
    Case("MmaTile", "bf16", 128, 128, 32, 4, 1, False, False, 16, 16, 256): 1,
    Case("MmaTile", "bf16", 64, 128, 32, 4, 1, False, False, 16, 16, 128): 2,
    Case("MmaTile", "float", 128, 128, 16, 4, 1, False, False, 16, 16, 128): 2,
    Case("MmaTile", "float", 128, 128, 32, 3, 1, True, True, 16, 16, 256): 1,
}


# SimtTile -------------------------------------------------------------------------------------------------------------

SIMT_SHAPES = ((32, 64, 16, 2, 64), (64, 128, 16, 2, 256), (16, 64, 8, 2, 32))
SIMT = [case for dtype in TYPES for case in drawn_cases("SimtTile", dtype, SIMT_SHAPES)]


@everywhere
@pytest.mark.parametrize("case", SIMT, ids=str)
def test_simt_tiles(run: Run, case: Case) -> None:
    check(run, case, SIMT)


# One multiply-add after the other: what every element of a SimtTile is, whatever its shape.
IN_ORDER = """#include "moesaic/base.cuh"
extern "C" __global__ void in_order(const float* a, const float* b, float* y, int m, int n, int depth) {
  for (int i = threadIdx.x; i < m * n; i += 32) {
    float sum = 0.0f;
    for (int k = 0; k < depth; ++k) {
      sum = fmaf(moesaic::load_one(a + i / n * depth + k), moesaic::load_one(b + k * n + i % n), sum);
    }
    moesaic::store_one(y + i, sum);
  }
}
"""


@everywhere
@pytest.mark.parametrize("dtype", ["float", "bf16"])
def test_simt_tiles_of_any_shape_are_bit_equal(run: Run, dtype: str) -> None:
    size = 4 if dtype == "float" else 2
    shapes = (*SIMT_SHAPES, (128, 32, 32, 2, 128))
    cases = [
        Case("SimtTile", dtype, m, n, k, stages, 1, False, i % 2 == 0, size, size, threads)
        for i, (m, n, k, stages, threads) in enumerate(shapes)
    ]
    for which, case in enumerate(cases):
        found = product(run, kernel_of(cases), which, case, (35, 71, 45), split=16)
        a, b = (np.ascontiguousarray(x, np.float32) for x in (found.left, found.right[0]))
        expected = run(IN_ORDER, "in_order", [a, b], np.zeros((35, 71), np.float32), [35, 71, 45])
        np.testing.assert_array_equal(found.y[0].view(np.uint32), expected.view(np.uint32))


@everywhere
def test_simt_tiles_keep_a_negative_zero(run: Run) -> None:
    """A product that underflows to -0 would become 0 if zeros past the end of the sum were added to it."""
    case = dataclasses.replace(DEFAULT_SIMT, left_across=False, right_across=False, left_align=4, right_align=4)
    scalars = [1, 1, 1, 0, 0, 1, 0, 1, 0]
    inputs = [np.array([-1e-30], np.float32), np.array([1e-30], np.float32), *np.zeros((2, 1), np.int32)]
    y = np.zeros(1 + 2 * case.m, np.float32)
    out = run(kernel_of([case]), "tiles", inputs, y, scalars, block=case.threads, shared_bytes=case.shared_bytes)
    assert out[0] == 0.0
    assert np.signbit(out[0])


# MmaTile --------------------------------------------------------------------------------------------------------------

MMA_SHAPES = ((32, 64, 32, 3, 64), (64, 128, 32, 2, 128), (32, 128, 64, 4, 128))
MMA = [case for dtype in TYPES for case in drawn_cases("MmaTile", dtype, MMA_SHAPES)[:: 2 if dtype == "float" else 1]]


@everywhere
@pytest.mark.parametrize("case", MMA, ids=str)
def test_mma_tiles(run: Run, case: Case) -> None:
    check(run, case, MMA)


@everywhere
@pytest.mark.parametrize("case", DEFAULT_MMA, ids=str)
def test_default_mma_tiles(run: Run, case: Case) -> None:
    """Sums of small integers are exact, on tensor cores, too."""
    size = whole(case, case.m + 2, case.n - 3, 4 * case.k + 21)
    found = product(run, kernel_of([case]), 0, case, size, split=2 * case.k, integers=True)
    np.testing.assert_array_equal(found.y, found.left @ found.right)


# WgmmaTile ------------------------------------------------------------------------------------------------------------

WGMMA_SHAPES = ((64, 64, 64, 3, 128), (128, 128, 64, 3, 256), (128, 128, 64, 4, 128))
WGMMA = [case for dtype in ("bf16", "half") for case in drawn_cases("WgmmaTile", dtype, WGMMA_SHAPES)]
WGMMA = [case for case in WGMMA if case.n % 64 == 0][::2]  # the body of the instruction takes its time

# Shapes for large products, and how many blocks of them share a multiprocessor.
DEFAULT_WGMMA = {
    Case("WgmmaTile", "bf16", 128, 128, 64, 3, 1, False, False, 16, 16, 128): 2,
    Case("WgmmaTile", "bf16", 128, 64, 64, 3, 2, False, True, 16, 16, 128): 2,
    Case("WgmmaTile", "bf16", 128, 128, 64, 3, 1, True, True, 16, 16, 128): 2,
    Case("WgmmaTile", "half", 128, 256, 64, 4, 1, False, False, 16, 16, 256): 1,
    Case("WgmmaTile", "bf16", 128, 128, 64, 4, 2, False, False, 16, 16, 256): 1,
}


def run_on_hopper(*args: Any, **options: Any) -> np.ndarray:
    import torch

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is Hopper's")
    return run_on_gpu(*args, **options)


hopper_too = pytest.mark.parametrize(
    "run",
    [
        pytest.param(run_in_some_orders, marks=pytest.mark.emulate, id="emulator"),
        pytest.param(run_on_hopper, marks=pytest.mark.gpu, id="gpu"),
    ],
)


@hopper_too
@pytest.mark.parametrize("case", WGMMA, ids=str)
def test_wgmma_tiles(run: Run, case: Case) -> None:
    check(run, case, WGMMA)


@hopper_too
@pytest.mark.parametrize("case", DEFAULT_WGMMA, ids=str)
def test_default_wgmma_tiles(run: Run, case: Case) -> None:
    size = whole(case, case.m + 2, 70, case.k + 21)
    found = product(run, kernel_of([case]), 0, case, size, split=case.k // 2, integers=True)
    np.testing.assert_array_equal(found.y, found.left @ found.right)


# Mistakes -------------------------------------------------------------------------------------------------------------

SMALL_MMA = Case("MmaTile", "bf16", 64, 128, 32, 3, 1, False, True, 16, 16, 128)
SMALL_WGMMA = Case("WgmmaTile", "bf16", 128, 64, 64, 3, 1, False, True, 16, 16, 256)
DONE = "    __syncthreads();  // whoever used shared memory before is done with it\n"

# What is deleted from which header.
BARRIERS = {
    "simt_start": ("tile_simt.cuh", DONE),
    "simt_step": (
        "tile_simt.cuh",
        "      __syncthreads();  // this step is there, and the one before it has been read\n",
    ),
    "mma_start": ("tile_mma.cuh", DONE),
    "mma_first": ("tile_mma.cuh", "    __syncthreads();  // the first steps are there\n"),
    "mma_step": ("tile_mma.cuh", "          __syncthreads();\n"),
    "mma_wait": ("tile_mma.cuh", "          copy_wait<Shape::kStages - 2>();\n"),
    "wgmma_start": ("tile_wgmma.cuh", DONE),
    "wgmma_step": (
        "tile_wgmma.cuh",
        "      __syncthreads();  // these steps are there, and all products but those of the last steps are done\n",
    ),
    "wgmma_copies": ("tile_wgmma.cuh", "      copy_wait<Shape::kStages - 3>();\n"),
    "wgmma_wait": ("tile_wgmma.cuh", "      wgmma_wait<1>(pending);\n"),
    "wgmma_last": ("tile_wgmma.cuh", "    wgmma_wait<0>(pending);\n"),
    "sums_start": ("tile_common.cuh", DONE),
    "sums_partial": ("tile_common.cuh", "    __syncthreads();  // the sums of all warps are there\n"),
}


@pytest.mark.emulate
@pytest.mark.parametrize("barrier", BARRIERS)
def test_a_missing_barrier_or_wait_shows(barrier: str, tmp_path: Path) -> None:
    header, line = BARRIERS[barrier]
    (helpers,) = nvrtc.helper_include_dirs()
    shutil.copytree(helpers, tmp_path, dirs_exist_ok=True)
    text = (tmp_path / "moesaic" / header).read_text()
    assert text.count(line) == 1
    (tmp_path / "moesaic" / header).write_text(text.replace(line, ""))
    case = {"mma": SMALL_MMA, "wgmma": SMALL_WGMMA}.get(barrier.partition("_")[0], DEFAULT_SIMT)
    size = (70, 130, (5 if case is SMALL_WGMMA else 4) * case.k)  # a stage is filled again before the end

    def wrong(order: int, **options: object) -> bool:
        try:
            run = functools.partial(emulate, order=order, **options)
            assert_right(product(run, kernel_of([case]), 0, case, whole(case, *size), split=case.k))
        except (AssertionError, EmulationError):
            return True
        return False

    assert not any(wrong(order) for order in ORDERS)
    assert any(wrong(order, include_dirs=[tmp_path]) for order in ORDERS)


# What the compiler makes of them --------------------------------------------------------------------------------------


def compiled_for(case: Case, target: str, blocks: int) -> nvrtc.CompiledKernel:
    """Compiled such that so many blocks share a multiprocessor."""
    source = kernel_of([case]).replace("__launch_bounds__(256)", f"__launch_bounds__({case.threads}, {blocks})")
    return nvrtc.compile_source(source, name="tiles", target=Target.parse(target), extra_options=NVRTC_OPTIONS)


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", ["float", "bf16"])
@pytest.mark.parametrize("layout", range(4))
def test_default_simt_tiles_stay_in_registers(dtype: str, layout: int) -> None:
    left, right = layout % 2 == 1, layout // 2 == 1
    parts = 1 + (left ^ right)
    case = dataclasses.replace(
        DEFAULT_SIMT, dtype=dtype, n=128 // parts, parts=parts, left_across=left, right_across=right
    )
    compiled = compiled_for(case, "sm_80" if left and right else "sm_90a", 2)
    assert not compiled.resources.uses_local_memory, compiled.log


@pytest.mark.nvrtc
@pytest.mark.parametrize("case", DEFAULT_WGMMA, ids=str)
def test_default_wgmma_tiles_stay_in_registers(case: Case) -> None:
    """And their products stay asynchronous: the compiler says where it has to wait for each."""
    compiled = compiled_for(case, "sm_90a", DEFAULT_WGMMA[case])
    assert not compiled.resources.uses_local_memory, compiled.log
    assert "wgmma" not in compiled.log, compiled.log


@pytest.mark.nvrtc
@pytest.mark.parametrize("case", DEFAULT_MMA, ids=str)
def test_default_mma_tiles_stay_in_registers(case: Case) -> None:
    for target in ("sm_80", "sm_90a") if case == next(iter(DEFAULT_MMA)) else ("sm_90a",):
        compiled = compiled_for(case, target, DEFAULT_MMA[case])
        assert not compiled.resources.uses_local_memory, compiled.log

"""Products by the tiles of tile.cuh: kernels, operands in buffers of NaN, and what is right.

Operands lie in buffers of NaN, line for line in a drawn order, and end with the last line: whatever is read beside
them shows, as a NaN or as a report. Sums are compared with float64, within ``depth * 2^-23`` of the sum of the
products' magnitudes; those of `SimtTile` also bit for bit with one multiply-add after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from device_kernels import Map, emulate, run_on_gpu, stored

from moesaic.codegen.fetching import box_rows
from moesaic.ir.types import DType
from moesaic.passes import product_shape
from moesaic.passes.product_shape import ProductShape
from moesaic.runtime.emulator import FORWARD, REVERSE

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
    # Of a WgmmaTile: lines, tokens (lines by numbers in memory, all of which are there), boxes, shared (boxes of a pair
    # of blocks); "+rows": by a map of rows.
    left_way: str = "lines"
    right_way: str = "lines"
    pingpong: bool = False

    def __str__(self) -> str:
        lies = "".join("across" if across else "along" for across in (self.left_across, self.right_across))
        ways = "" if self.ways_apart == "lines-lines" else f"-{self.ways_apart}"
        ways += "-pingpong" if self.pingpong else ""
        shape = f"{self.m}x{self.parts}x{self.n}x{self.k}"
        return f"{self.dtype}-{shape}-{lies}-{self.left_align}-{self.right_align}{ways}"

    @property
    def ways_apart(self) -> str:
        return f"{self.left_way}-{self.right_way}"

    @property
    def shape(self) -> str:
        shape = [self.m, self.n, self.k, self.stages, self.parts, self.left_across, self.right_across]
        shape += [self.left_align, self.right_align, self.threads]
        return f"moesaic::TileShape<{', '.join(str(int(x)) for x in shape)}>"

    @property
    def ways(self) -> str:
        """Those of both operands, as the kernel's text has them."""
        names = {"lines": "kLines", "tokens": "kLines", "boxes": "kBoxes", "shared": "kShared"}

        def text(way: str, rows: int) -> str:
            name = names[way.removesuffix("+rows")]
            return f"Way<moesaic::Fetch::{name}, {int('+' in way)}, {rows}, {int(way == 'tokens')}>"

        return ", ".join(map(text, (self.left_way, self.right_way), self.box_rows))

    @property
    def box_rows(self) -> tuple[int, int]:
        """Rows of a box of each operand."""
        left = 64 if self.left_across else box_rows(self.m)
        return left, 64 if self.right_across else box_rows(self.n, self.parts)

    @property
    def paired(self) -> bool:
        return any(way.startswith("shared") for way in (self.left_way, self.right_way))

    @property
    def shared_bytes(self) -> int:
        if self.tile == "SimtTile":  # floats, in rows of whole 32; gaps where lines lie along
            floats = self.k * (-(-self.m // 32) * 32 + -(-self.parts * self.n // 32) * 32)
            for across, align in ((self.left_across, self.left_align), (self.right_across, self.right_align)):
                floats += 0 if across else max(32, 4 * (self.k * self.size // align))
            return 4 * self.stages * floats
        shape = ProductShape(self.tile, self.m, self.n, self.k, self.stages, self.threads, pingpong=self.pingpong)
        left = product_shape.Lines(self.left_across, self.left_align)
        right = product_shape.Lines(self.right_across, self.right_align)
        return shape.shared_bytes(self.size, self.parts, left, right)

    @property
    def size(self) -> int:
        return 4 if self.dtype == "float" else 2


# Where lines are, and what is done with a tile: sums of rows leave through `store`, which counts its calls.
OPERANDS = """#include "moesaic/experts.cuh"
#include "moesaic/tile.cuh"

struct Operand {
  const int* lines;   // where each line lies, or -1
  int start, stride;  // in elements
  template <typename T>
  __device__ const T* line(const T* data, int i) const {
    const int at = moesaic::load_one(lines + i);
    return at < 0 ? nullptr : data + start + static_cast<long long>(at) * stride;
  }
};

struct Result {
  float* y;            // [part][m][n]
  int m, n;
  float *sums, *calls;  // [tile][row of a whole tile]
};

template <class Shape>
__device__ Result result_in(float* y, int m, int n, int tiles) {
  float* const sums = y + static_cast<long long>(Shape::kParts) * m * n;
  return {y, m, n, sums, sums + tiles * Shape::kM};
}

template <class Shape, class Tile>
__device__ __forceinline__ void store_tile(Tile& tile, const Result& to, int number, int m0, int n0, void* shared) {
  float own[Tile::kOwnRows] = {};
#pragma unroll
  for (int p = 0; p < Shape::kParts; ++p) {
#pragma unroll
    for (int i = 0; i < Tile::kOwnRows; ++i) {
#pragma unroll
      for (int j = 0; j < Tile::kOwnVectors; ++j) {
#pragma unroll
        for (int v = 0; v < Tile::kVector; ++v) {
          const int row = m0 + tile.row(i), column = n0 + tile.column(j) + v;
          if (row >= to.m || column >= to.n) continue;
          moesaic::store_one(to.y + (static_cast<long long>(p) * to.m + row) * to.n + column, tile.values[p][i][j][v]);
          own[i] += tile.values[p][i][j][v];
        }
      }
    }
  }
  tile.sum_rows(own, shared, [&](int row, float total) {
    float* const calls = to.calls + number * Shape::kM + row;
    moesaic::store_one(to.sums + number * Shape::kM + row, total);
    moesaic::store_one(calls, moesaic::load_one(calls) + 1);
  });
}
"""

# The block goes over its tiles, in two products each.
KERNEL = (
    OPERANDS
    + """
template <class Tile, class Shape, typename T>
__device__ __forceinline__ void products(const T* a, const T* b, Operand left, Operand right, float* y, int m, int n,
                                         int depth, int split) {
  constexpr int kM = Shape::kM, kN = Shape::kN;
  MOESAIC_DYNAMIC_SHARED(unsigned char, shared);
  const int tile_rows = (m + kM - 1) / kM, tile_columns = (n + kN - 1) / kN;
  const Result result = result_in<Shape>(y, m, n, tile_rows * tile_columns);
  for (int number = 0; number < tile_rows * tile_columns; ++number) {
    const int m0 = number / tile_columns * kM, n0 = number % tile_columns * kN;
    Tile tile;
    tile.clear();
    for (int pass = 0; pass < 2; ++pass) {
      const int first = pass == 0 ? 0 : split, end = pass == 0 ? split : depth;
      const auto left_line = [&](int r) {
        if constexpr (Shape::kLeftAcross) {
          const T* const line = left.line(a, first + r);
          return line == nullptr ? line : line + m0;
        } else {
          const T* const line = left.line(a, m0 + r);
          return line == nullptr ? line : line + first;
        }
      };
      const auto right_line = [&](int part, int r) {
        if constexpr (Shape::kRightAcross) {
          const T* const line = right.line(b, part * depth + first + r);
          return line == nullptr ? line : line + n0;
        } else {
          const T* const line = right.line(b, part * n + n0 + r);
          return line == nullptr ? line : line + first;
        }
      };
      tile.multiply(left_line, right_line, end - first, moesaic::smaller(kM, m - m0), moesaic::smaller(kN, n - n0),
                    shared);
    }
    store_tile<Shape>(tile, result, number, m0, n0, shared);
  }
}

template <typename T, class Shape, int kSharedBytes>
__device__ __forceinline__ void run(const void* a, const void* b, Operand left, Operand right, float* y, int m, int n,
                                    int depth, int split) {
  using Tile = moesaic::TILE<T, Shape>;
  static_assert(Tile::kSharedBytes == kSharedBytes, "what the test asks for");
  products<Tile, Shape>(static_cast<const T*>(a), static_cast<const T*>(b), left, right, y, m, n, depth, split);
}

extern "C" __global__ void __launch_bounds__(256) tiles(
    const void* a, const void* b, const int* left_lines, const int* right_lines, float* y, int m, int n, int depth,
    int split, int left_start, int left_stride, int right_start, int right_stride, int which) {
  const Operand left = {left_lines, left_start, left_stride};
  const Operand right = {right_lines, right_start, right_stride};
  switch (which) {
CASES
  }
}
"""
)

# Blocks, or pairs of them, go over the tiles, a product each; a pair has two tiles beside or below each other.
FETCHING_KERNEL = (
    OPERANDS
    + """
using moesaic::Fetch;
using moesaic::TensorMap;

template <Fetch kHow_, bool kOfRows_, int kBoxRows_, bool kTokens_>
struct Way {
  static constexpr Fetch kHow = kHow_;
  static constexpr bool kOfRows = kOfRows_;
  static constexpr int kBoxRows = kBoxRows_;
  static constexpr bool kTokens = kTokens_;
};

// Where boxes of an operand begin: at this row (or column) of the product, at this step of the sum.
struct Placed {
  int first, step, apart;
};

// An operand as a tile fetches it, from its lines.
template <class How, class Lines, typename T>
__device__ __forceinline__ auto fetched(const TensorMap& map, const Placed& at, int first, const Lines& lines,
                                        const moesaic::TokenRows<T>& tokens) {
  if constexpr (How::kTokens) {
    return tokens;
  } else if constexpr (How::kHow == Fetch::kLines) {
    return lines;
  } else {
    return moesaic::Boxes<How::kBoxRows, How::kOfRows>{map, 1, at.first + first, at.step, at.apart};
  }
}

template <class Tile, class Shape, class LeftWay, class RightWay, bool kRegisters, typename T>
__device__ __forceinline__ void products(const T* a, const T* b, Operand left, Operand right, float* y, int m, int n,
                                         int depth, const TensorMap& left_map, const Placed& left_boxes,
                                         const TensorMap& right_map, const Placed& right_boxes) {
  constexpr int kM = Shape::kM, kN = Shape::kN;
  constexpr bool kBeside = LeftWay::kHow == Fetch::kShared;
  MOESAIC_DYNAMIC_SHARED(unsigned char, shared);
  const int tile_rows = (m + kM - 1) / kM, tile_columns = (n + kN - 1) / kN;
  const Result result = result_in<Shape>(y, m, n, tile_rows * tile_columns);
  const int lines = kBeside ? tile_columns : tile_rows, across = kBeside ? tile_rows : tile_columns;
  const int items = static_cast<int>(moesaic::items_of<Tile::kPair>(lines, across));
  struct Place {
    int row, column;  // of tiles
    bool together, idle;
  };
  const auto place_of = [&](int i) -> Place {
    const auto item = moesaic::item_of<Tile::kPair>(i, Tile::rank(), lines, across);
    const int line = static_cast<int>(item.row_tile);
    return {kBeside ? item.column_tile : line, kBeside ? line : item.column_tile, item.together, item.idle};
  };

  Tile tile(shared);
  if (Tile::fetches()) {
    if constexpr (kRegisters) moesaic::give_registers<Tile::kFetchRegisters>();
    for (int i = blockIdx.x / Tile::kPair; i < items; i += gridDim.x / Tile::kPair) {
      const Place at = place_of(i);
      const int m0 = at.row * kM, n0 = at.column * kN;
      const auto left_line = [&](int r) {
        const T* const line = left.line(a, Shape::kLeftAcross ? r : m0 + r);
        return line == nullptr || !Shape::kLeftAcross ? line : line + m0;
      };
      const auto right_line = [&](int part, int r) {
        const T* const line = right.line(b, Shape::kRightAcross ? part * depth + r : part * n + n0 + r);
        return line == nullptr || !Shape::kRightAcross ? line : line + n0;
      };
      const moesaic::TokenRows<T> left_tokens{a + left.start + m0, left.stride, left.lines};
      const moesaic::TokenRows<T> right_tokens{b + right.start + n0, right.stride, right.lines};
      const auto left_operand = fetched<LeftWay>(left_map, left_boxes, m0, left_line, left_tokens);
      const auto right_operand = fetched<RightWay>(right_map, right_boxes, n0, right_line, right_tokens);
      const int rows = at.idle ? 0 : moesaic::smaller(kM, m - m0);
      tile.fetch(left_operand, right_operand, depth, rows, n - n0, at.together);
    }
  } else {
    if constexpr (kRegisters) moesaic::take_registers<Tile::kWorkRegisters>();
    for (int i = blockIdx.x / Tile::kPair; i < items; i += gridDim.x / Tile::kPair) {
      if (tile.passes(depth)) continue;
      const Place at = place_of(i);
      const int m0 = at.row * kM, n0 = at.column * kN;
      tile.multiply(depth, at.idle ? 0 : m - m0);
      if (!at.idle) store_tile<Shape>(tile, result, at.row * tile_columns + at.column, m0, n0, shared);
    }
  }
  tile.finish();
}

template <typename T, class Shape, int kSharedBytes, class LeftWay, class RightWay, bool kPingPong, bool kRegisters>
__device__ __forceinline__ void run(const void* a, const void* b, Operand left, Operand right, float* y, int m, int n,
                                    int depth, const TensorMap& left_map, const Placed& left_boxes,
                                    const TensorMap& right_map, const Placed& right_boxes) {
  using Tile = moesaic::TILE<T, Shape, LeftWay::kHow, RightWay::kHow, kPingPong>;
  static_assert(Tile::kSharedBytes == kSharedBytes, "what the test asks for");
  products<Tile, Shape, LeftWay, RightWay, kRegisters>(static_cast<const T*>(a), static_cast<const T*>(b), left, right,
                                                       y, m, n, depth, left_map, left_boxes, right_map, right_boxes);
}

extern "C" __global__ void CLUSTER __launch_bounds__(384, 1) tiles(
    const void* a, const void* b, const int* left_lines, const int* right_lines, float* y, int m, int n, int depth,
    int left_start, int left_stride, int right_start, int right_stride, int left_first, int left_step, int right_first,
    int right_step, int apart, int which, const __grid_constant__ TensorMap left_map,
    const __grid_constant__ TensorMap right_map) {
  const Operand left = {left_lines, left_start, left_stride};
  const Operand right = {right_lines, right_start, right_stride};
  const Placed left_boxes = {left_first, left_step, 0}, right_boxes = {right_first, right_step, apart};
  switch (which) {
CASES
  }
}
"""
)


def kernel_of(cases: Sequence[Case]) -> str:
    """A kernel `tiles` that runs the `which`-th of the cases, which are of one tile, type and kind of cluster."""
    fetches = cases[0].tile == "WgmmaTile"
    lines = []
    for i, case in enumerate(cases):
        types, arguments = (
            f"{TYPES[case.dtype]}, {case.shape}, {case.shared_bytes}",
            "a, b, left, right, y, m, n, depth",
        )
        if fetches:  # registers are a matter of all warps of a kernel
            types += f", {case.ways}, {int(case.pingpong)}, {int(len(cases) == 1 and case.threads == 384)}"
            arguments += ", left_map, left_boxes, right_map, right_boxes"
        else:
            arguments += ", split"
        lines.append(f"    case {i}: run<{types}>({arguments}); break;")
    cluster = "__cluster_dims__(2, 1, 1)" if cases[0].paired else ""
    text = FETCHING_KERNEL if fetches else KERNEL
    return text.replace("TILE", cases[0].tile).replace("CLUSTER", cluster).replace("CASES", "\n".join(lines))


# Operands -------------------------------------------------------------------------------------------------------------


@dataclass
class Lines:
    """Lines of an operand in memory, amid NaNs."""

    data: np.ndarray  # of bits
    at: np.ndarray
    start: int
    stride: int
    # Where boxes are: those of one matrix of a map.
    map: Map | None = None
    first: int = 0
    step: int = 0
    apart: int = 0


def filled(count: int, dtype: np.dtype, value: object) -> np.ndarray:
    """Memory at a multiple of 64."""
    base = np.zeros(count * dtype.itemsize + 64, np.uint8)
    skip = -base.ctypes.data % 64
    found = base[skip : skip + count * dtype.itemsize].view(dtype)
    found[:] = value
    return found


def laid_out(lines: np.ndarray, null: np.ndarray, align: int, rng: np.random.Generator) -> Lines:
    """`lines` of bits in a drawn order; what is aligned to `align` bytes is aligned to no more, up to 8."""
    unit = align // lines.dtype.itemsize
    length = lines.shape[1]
    assert length % unit == 0, "valid elements are whole units of the alignment"
    stride = unit * ((length // unit + 1) | 1)
    at = rng.permutation(len(lines)).astype(np.int32)
    start = unit
    nan = {np.dtype(np.uint16): 0x7FFF, np.dtype(np.float32): np.nan}[lines.dtype]
    data = filled(start + max(len(lines) - 1, 0) * stride + length, lines.dtype, nan)
    for line, place, absent in zip(lines, at, null, strict=True):
        if not absent:
            data[start + place * stride :][:length] = line
    at[null] = -1
    return Lines(data, at, start, stride)


def in_boxes(lines: np.ndarray, number: int, case: Case, rng: np.random.Generator) -> Lines:
    """`lines` of bits of operand `number`, one after the other in the second of two matrices, amid NaNs and infinities.

    Of these, some belong to the matrix: those before the operand on either side. In a map of rows, which has no
    matrices, there are rows behind it, too.
    """
    way = (case.left_way, case.right_way)[number]
    across = (case.left_across, case.right_across)[number]
    parts = 1 if number == 0 else case.parts
    count, length = len(lines) // parts, lines.shape[1]
    of_rows = way.endswith("+rows")
    assert parts == 1 or not of_rows
    if across:
        first, step = 8, 3
        apart = -(-length // 8) * 8 + 8
        row, column, row_apart, column_apart = step, first, 0, apart
        matrix_rows, columns = step + count + 9 * of_rows, first + (parts - 1) * apart + length
    else:
        first, step, apart = 3, 8, count + 2
        row, column, row_apart, column_apart = first, step, apart, 0
        matrix_rows, columns = first + (parts - 1) * apart + count + 1 + 9 * of_rows, step + length
    stride = -(-columns // 8) * 8 + 8
    start = 0 if of_rows else (matrix_rows + 1) * stride  # there is a row between the matrices
    infinite = 0x7F80 if case.dtype == "bf16" else 0x7C00
    data = filled(start + (matrix_rows - 1) * stride + columns, lines.dtype, 0)
    data[:] = rng.choice(np.array([0x7FFF, infinite, infinite | 0x8000], np.uint16), data.size)
    for p, part in enumerate(lines.reshape(parts, count, length)):
        for i, line in enumerate(part):
            data[start + (row + p * row_apart + i) * stride + column + p * column_apart :][:length] = line
    name = {"bf16": "bf16", "half": "f16"}[case.dtype]
    matrices = 0 if of_rows else 2
    map = Map(number, columns, matrix_rows, matrices, 2 * stride, 2 * start, case.box_rows[number], name)
    return Lines(data, np.zeros(1, np.int32), start + row * stride + column, 8, map, first, step, apart)


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
    left_null = rng.random(depth if case.left_across else m) < 0.15 * (case.left_way == "lines")
    right_null = rng.random(case.parts * (depth if case.right_across else n)) < 0.15 * (case.right_way == "lines")
    left, left_seen = operand((len(left_null), m if case.left_across else depth), left_null, case, rng, integers)
    right, right_seen = operand((len(right_null), n if case.right_across else depth), right_null, case, rng, integers)
    line_by_line = ("lines", "tokens")
    a = (
        laid_out(left, left_null, case.left_align, rng)
        if case.left_way in line_by_line
        else in_boxes(left, 0, case, rng)
    )
    b = (
        laid_out(right, right_null, case.right_align, rng)
        if case.right_way in line_by_line
        else in_boxes(right, 1, case, rng)
    )

    tile_rows, tile_columns = -(-m // case.m), -(-n // case.n)
    y = np.zeros(case.parts * m * n + 2 * tile_rows * tile_columns * case.m, np.float32)
    y[: case.parts * m * n] = np.nan
    places = [a.start, a.stride, b.start, b.stride]
    if case.tile == "WgmmaTile":
        scalars = [m, n, depth, *places, a.first, a.step, b.first, b.step, b.apart, which]
        options = {**options, "maps": [a.map, b.map]}
    else:
        scalars = [m, n, depth, split, *places, which]
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
    left, right = (
        1 if way not in ("lines", "tokens") else align // case.size
        for way, align in ((case.left_way, case.left_align), (case.right_way, case.right_align))
    )
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


def check(run: Run, case: Case, cases: Sequence[Case], sizes: Sequence[tuple[int, int, int]] = SIZES) -> None:
    """Two sizes; one kernel holds all cases of an element type."""
    alike = [c for c in cases if (c.dtype, c.paired) == (case.dtype, case.paired)]
    which = alike.index(case)
    for size in (sizes[1], sizes[which % len(sizes)]):
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


def of_rule(
    columns: int,
    parts: int,
    lies: str,
    left: str,
    right: str,
    *,
    tile: str = "cooperative",
    tall: bool = False,
    align: int = 16,
    dtype: str = "bf16",
) -> Case:
    """The tile that `ProductShape` has for a product of so many columns a part."""
    shape = ProductShape.of({"bf16": DType.BF16, "half": DType.F16}[dtype], parts, columns, tile=tile, tall=tall)
    sizes = (shape.rows, shape.columns, shape.depth, shape.stages, parts)
    across = (lies in ("left", "both"), lies in ("right", "both"))
    return Case(shape.tile, dtype, *sizes, *across, align, align, shape.threads, left, right, shape.pingpong)


# Shapes for large products, as kernels have them: gates and ups of gathered rows, products of rows that follow one
# another, of narrow weights, with sums of rows; gradients of weights, of an expert and of all tokens.
DEFAULT_WGMMA = {
    "gathered": of_rule(768, 2, "", "lines", "shared"),
    "forward": of_rule(2048, 1, "", "boxes+rows", "shared", dtype="half"),
    "transposed": of_rule(2048, 1, "right", "boxes+rows", "shared"),
    "narrow": of_rule(64, 2, "right", "lines", "shared"),
    "sums": of_rule(2048, 1, "right", "boxes+rows", "shared", tall=True),
    "wgrad": of_rule(2048, 1, "both", "lines", "shared+rows"),
    "wgrad_tall": of_rule(2048, 1, "both", "shared+rows", "lines", tall=True),
    "wgrad_tokens": of_rule(2048, 1, "both", "tokens", "shared+rows"),
    "wgrad_tokens_tall": of_rule(2048, 1, "both", "shared+rows", "tokens", tall=True),
    "wgrad_dense": of_rule(2048, 1, "both", "boxes+rows", "shared+rows"),
    "wgrad_beside": of_rule(2048, 1, "both", "shared+rows", "boxes+rows"),
    "unaligned": of_rule(2048, 1, "", "lines", "lines", align=8),
    "wgrad_unaligned": of_rule(2048, 1, "both", "lines", "lines", align=8),
    "gathered_pingpong": of_rule(768, 2, "", "lines", "shared", tile="pingpong"),
    "transposed_pingpong": of_rule(2048, 1, "right", "boxes", "shared", tile="pingpong"),
    "wgrad_pingpong": of_rule(2048, 1, "both", "lines", "shared+rows", tile="pingpong"),
}

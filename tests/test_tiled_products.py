"""copy.cuh and mma.cuh together: a whole product in tiles, and what the compiler makes of the helpers."""

from __future__ import annotations

import numpy as np
import pytest
from device_kernels import Run, everywhere, relative_error, stored
from test_mma_helpers import MATRICES, PRODUCTS
from test_staged_copies import COPIES

from moesaic.codegen import nvrtc
from moesaic.codegen.target import Target

# Two warps, a tile of 32 x 16, steps of 128 bytes of the inner dimension in two stages of asynchronous copies.
TILED = """#include "moesaic/copy.cuh"
#include "moesaic/mma.cuh"

constexpr int kThreads = 64;
constexpr int kStages = 2;
constexpr int kRows = 32;
constexpr int kColumns = 16;
constexpr int kChunks = 8;                 // of 16 bytes, of a step
constexpr int kStageBytes = kRows * (kChunks + 1) * 16;

enum Right { kByFour, kByTwo, kTransposed };

// Where a chunk lies in a tile: a chunk of padding behind each row, or chunks swapped within a row. Either way the same
// chunk of eight rows lies in eight different groups of banks.
template <bool kSwizzled, int kRowChunks>
__device__ __forceinline__ int place(int row, int chunk) {
  if (!kSwizzled) return 16 * (row * (kRowChunks + 1) + chunk);
  return 16 * (row * kRowChunks + (chunk ^ (row / (8 / kRowChunks) % kRowChunks)));
}

// A tile of a matrix of rows x chunks; zeros past its end.
template <bool kSwizzled, int kTileRows, int kTileChunks>
__device__ __forceinline__ void fetch(unsigned char* tile, const unsigned char* matrix, int first_row, int rows,
                                      int first_chunk, int chunks) {
  for (int i = threadIdx.x; i < kTileRows * kTileChunks; i += kThreads) {
    const int row = first_row + i / kTileChunks;
    const int chunk = first_chunk + i % kTileChunks;
    moesaic::copy_async<16>(tile + place<kSwizzled, kTileChunks>(i / kTileChunks, i % kTileChunks),
                            matrix + 16ll * (static_cast<long long>(row) * chunks + chunk),
                            row < rows && chunk < chunks);
  }
}

// As the products of this type want it.
template <typename T, int N>
__device__ __forceinline__ void round_words(unsigned (&words)[N]) {
  if constexpr (sizeof(T) != 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) words[i] = moesaic::to_tf32(__uint_as_float(words[i]));
  }
}

// y = a b: a is rows x depth, b is columns x depth, or depth x columns for kTransposed.
template <typename T, bool kSwizzled, Right kRight>
__device__ __forceinline__ void multiply(const unsigned char* a, const unsigned char* b, float* y, int rows,
                                         int columns, int depth, unsigned char* shared) {
  constexpr int kPerChunk = sizeof(T) == 2 ? 8 : 4;
  constexpr int kStep = kChunks * kPerChunk;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int first_row = blockIdx.x * kRows;
  const int first_column = blockIdx.y * kColumns;
  const int steps = (depth + kStep - 1) / kStep;
  unsigned char* const right = shared + kStages * kStageBytes;

  const auto fetch_step = [&](int step) {
    if (step < steps) {
      const int at = step % kStages * kStageBytes;
      fetch<kSwizzled, kRows, kChunks>(shared + at, a, first_row, rows, step * kChunks, depth / kPerChunk);
      if constexpr (kRight == kTransposed) {
        fetch<kSwizzled, kStep, 2>(right + at, b, step * kStep, depth, first_column / kPerChunk, columns / kPerChunk);
      } else {
        fetch<kSwizzled, kColumns, kChunks>(right + at, b, first_column, columns, step * kChunks, depth / kPerChunk);
      }
    }
    moesaic::copy_commit();
  };

  float sums[2][4] = {};
  fetch_step(0);
  for (int step = 0; step < steps; ++step) {
    moesaic::copy_wait<kStages - 2>();
    __syncthreads();
    fetch_step(step + 1);
    const unsigned char* const a_tile = shared + step % kStages * kStageBytes;
    const unsigned char* const b_tile = right + step % kStages * kStageBytes;
#pragma unroll
    for (int k = 0; k < kChunks; k += 2) {
      unsigned a_words[4], b_words[4];
      moesaic::ldmatrix_x4(a_words, a_tile + place<kSwizzled, kChunks>(16 * warp + lane % 16, k + lane / 16));
      if constexpr (kRight == kByFour) {
        const int row = lane % 8 + lane / 16 * 8;
        moesaic::ldmatrix_x4(b_words, b_tile + place<kSwizzled, kChunks>(row, k + lane / 8 % 2));
      } else if constexpr (kRight == kTransposed) {
        moesaic::ldmatrix_x4_transposed(b_words, b_tile + place<kSwizzled, 2>(8 * k + lane % 16, lane / 16));
      } else {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          unsigned words[2];
          moesaic::ldmatrix_x2(words, b_tile + place<kSwizzled, kChunks>(8 * n + lane % 8, k + lane / 8 % 2));
          b_words[2 * n] = words[0];
          b_words[2 * n + 1] = words[1];
        }
      }
      round_words<T>(a_words);
      round_words<T>(b_words);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const unsigned b_pair[2] = {b_words[2 * n], b_words[2 * n + 1]};
        moesaic::mma<T>(sums[n], a_words, b_pair);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = first_row + 16 * warp + lane / 4 + i / 2 % 2 * 8;
    const int column = first_column + i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (row < rows && column < columns) moesaic::store_one(y + row * columns + column, sums[i / 4][i % 4]);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) tiled(const unsigned char* a, const unsigned char* b, float* y,
                                                             int rows, int columns, int depth, int which) {
  __shared__ __align__(16) unsigned char shared[2 * kStages * kStageBytes];
  switch (which) {
    case 0: multiply<__nv_bfloat16, false, kByFour>(a, b, y, rows, columns, depth, shared); break;
    case 1: multiply<__nv_bfloat16, true, kByTwo>(a, b, y, rows, columns, depth, shared); break;
    case 2: multiply<__nv_bfloat16, false, kTransposed>(a, b, y, rows, columns, depth, shared); break;
    case 3: multiply<__nv_bfloat16, true, kTransposed>(a, b, y, rows, columns, depth, shared); break;
    case 4: multiply<__half, true, kByFour>(a, b, y, rows, columns, depth, shared); break;
    case 5: multiply<__half, false, kByTwo>(a, b, y, rows, columns, depth, shared); break;
    case 6: multiply<moesaic::Tf32, true, kByFour>(a, b, y, rows, columns, depth, shared); break;
    case 7: multiply<moesaic::Tf32, false, kByTwo>(a, b, y, rows, columns, depth, shared); break;
  }
}
"""

VARIANTS = {  # as in the switch: the type, and whether b is stored as depth x columns
    "bf16-padded-x4": ("bf16", False),
    "bf16-swizzled-x2": ("bf16", False),
    "bf16-padded-transposed": ("bf16", True),
    "bf16-swizzled-transposed": ("bf16", True),
    "half-swizzled-x4": ("half", False),
    "half-padded-x2": ("half", False),
    "tf32-swizzled-x4": ("tf32", False),
    "tf32-padded-x2": ("tf32", False),
}


@everywhere
@pytest.mark.parametrize("variant", VARIANTS)
def test_tiled_products(run: Run, variant: str) -> None:
    kind, transposed = VARIANTS[variant]
    which = list(VARIANTS).index(variant)
    rows, columns = 45, 24  # the last tiles are not full
    depth = 21 * (4 if kind == "tf32" else 8)  # nor is the last of three steps
    rng = np.random.default_rng(which)

    def tiled(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        (a_bits, a_seen), (b_bits, b_seen) = stored(a, kind), stored(b if transposed else b.T, kind)
        y = np.full((rows, columns), np.nan, np.float32)
        run(TILED, "tiled", [a_bits, b_bits], y, [rows, columns, depth, which], grid=(2, 2), block=64)
        return y, relative_error(y, a_seen, b_seen if transposed else b_seen.T)

    a = rng.integers(-30, 31, (rows, depth)).astype(np.float32)
    b = rng.integers(-30, 31, (depth, columns)).astype(np.float32)
    y, _ = tiled(a, b)
    np.testing.assert_array_equal(y, a @ b)

    a = rng.standard_normal((rows, depth)).astype(np.float32)
    b = rng.standard_normal((depth, columns)).astype(np.float32)
    _, error = tiled(a, b)
    assert error.max() < 1


INSTRUCTIONS = {
    "copies": (
        COPIES,
        ["cp.async.ca.shared.global", "cp.async.cg.shared.global", "cp.async.commit_group", "cp.async.wait_group"],
    ),
    "products": (
        PRODUCTS,
        [
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
            "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
            "cvt.rna.tf32.f32",
        ],
    ),
    "matrices": (
        MATRICES,
        [f"ldmatrix.sync.aligned.m8n8.{form}.shared.b16" for form in ("x4", "x2", "x4.trans")],
    ),
    "tiled": (TILED, ["cp.async.cg.shared.global", "ldmatrix.sync.aligned.m8n8.x4", "mma.sync.aligned.m16n8k16"]),
}


@pytest.mark.nvrtc
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_instructions(name: str, target: str) -> None:
    source, instructions = INSTRUCTIONS[name]
    compiled = nvrtc.compile_source(source, name=name, target=Target.parse(target))
    assert not any(used.uses_local_memory for used in compiled.entries.values()), compiled.log
    assert [text for text in instructions if text not in compiled.ptx] == []

"""mma.cuh: single matrix products and their fragments, on the emulator and on a GPU.

The emulator adds the products of a matrix product one after the other and rounds each sum; tensor cores add several at
once and cut off. So sums are compared bit for bit where they are exact (small integers), and otherwise with float64,
within ``depth * 2^-23`` of the sum of the products' magnitudes.
"""

from __future__ import annotations

import numpy as np
import pytest
from device_kernels import ORDERS, Run, emulate, everywhere, relative_error, stored, tf32_bits

KINDS = ("bf16", "half", "tf32")
DEPTH = {"bf16": 16, "half": 16, "tf32": 8}

# Loads the fragments from global memory, each element from the place that the PTX manual's formulas name.
PRODUCTS = """#include "moesaic/mma.cuh"

template <typename T>
struct Place {
  static constexpr int kPerWord = 2;
  static __device__ int a_row(int g, int i) { return (0 <= i && i < 2) || (4 <= i && i < 6) ? g : g + 8; }
  static __device__ int a_column(int t, int i) { return i < 4 ? t * 2 + (i & 1) : t * 2 + (i & 1) + 8; }
  static __device__ int b_row(int t, int i) { return i < 2 ? t * 2 + (i & 1) : t * 2 + (i & 1) + 8; }
  static __device__ unsigned load(const void* x, int at) {
    return moesaic::load_one(static_cast<const unsigned short*>(x) + at);
  }
};
template <>
struct Place<moesaic::Tf32> {
  static constexpr int kPerWord = 1;
  static __device__ int a_row(int g, int i) { return i == 0 || i == 2 ? g : g + 8; }
  static __device__ int a_column(int t, int i) { return i == 0 || i == 1 ? t : t + 4; }
  static __device__ int b_row(int t, int i) { return i == 0 ? t : t + 4; }
  static __device__ unsigned load(const void* x, int at) {
    return moesaic::to_tf32(moesaic::load_one(static_cast<const float*>(x) + at));
  }
};

template <typename T>
__device__ __forceinline__ void product(const void* a, const void* b, const float* c, float* y) {
  using P = Place<T>;
  constexpr int kDepth = moesaic::Mma<T>::kDepth;
  const int g = threadIdx.x >> 2;
  const int t = threadIdx.x % 4;
  unsigned a_words[4] = {}, b_words[2] = {};
  float sums[4];
#pragma unroll
  for (int i = 0; i < 4 * P::kPerWord; ++i) {
    const int at = (blockIdx.x * 16 + P::a_row(g, i)) * kDepth + P::a_column(t, i);
    a_words[i / P::kPerWord] |= P::load(a, at) << 16 * (i % P::kPerWord);
  }
#pragma unroll
  for (int i = 0; i < 2 * P::kPerWord; ++i) {
    const int at = (blockIdx.x * kDepth + P::b_row(t, i)) * 8 + g;
    b_words[i / P::kPerWord] |= P::load(b, at) << 16 * (i % P::kPerWord);
  }
  const auto c_place = [&](int i) { return (blockIdx.x * 16 + (i < 2 ? g : g + 8)) * 8 + t * 2 + (i & 1); };
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] = moesaic::load_one(c + c_place(i));
  moesaic::mma<T>(sums, a_words, b_words);
#pragma unroll
  for (int i = 0; i < 4; ++i) moesaic::store_one(y + c_place(i), sums[i]);
}

extern "C" __global__ void __launch_bounds__(32) products(const void* a, const void* b, const float* c, float* y,
                                                          int kind) {
  if (kind == 0) product<__nv_bfloat16>(a, b, c, y);
  if (kind == 1) product<__half>(a, b, c, y);
  if (kind == 2) product<moesaic::Tf32>(a, b, c, y);
}

extern "C" __global__ void round_tf32(const float* x, unsigned* y) {
  y[threadIdx.x] = moesaic::to_tf32(x[threadIdx.x]);
}
"""


def multiply(run: Run, kind: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A batch of c + a @ b by the kernel, and its error as a multiple of what is allowed."""
    (a_bits, a_seen), (b_bits, b_seen) = stored(a, kind), stored(b, kind)
    y = np.full(c.shape, np.nan, np.float32)
    run(PRODUCTS, "products", [a_bits, b_bits, c], y, [KINDS.index(kind)], grid=(len(c), 1))
    return y, relative_error(y, a_seen, b_seen, c)


@everywhere
@pytest.mark.parametrize("kind", KINDS)
def test_every_element_of_a_fragment_has_its_place(run: Run, kind: str) -> None:
    """One 1 in a picks a row of b and puts it into a row of the result, and the other way round."""
    depth = DEPTH[kind]
    c = 1000 + np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
    ones_a = np.eye(16 * depth, dtype=np.float32).reshape(-1, 16, depth)
    numbers_b = np.broadcast_to(1 + np.arange(depth * 8, dtype=np.float32).reshape(depth, 8), (16 * depth, depth, 8))
    y, _ = multiply(run, kind, ones_a, numbers_b, np.broadcast_to(c, (16 * depth, 16, 8)).copy())
    np.testing.assert_array_equal(y, c + ones_a @ numbers_b)

    ones_b = np.eye(depth * 8, dtype=np.float32).reshape(-1, depth, 8)
    numbers_a = np.broadcast_to(1 + np.arange(16 * depth, dtype=np.float32).reshape(16, depth), (depth * 8, 16, depth))
    y, _ = multiply(run, kind, numbers_a, ones_b, np.broadcast_to(c, (depth * 8, 16, 8)).copy())
    np.testing.assert_array_equal(y, c + numbers_a @ ones_b)


@everywhere
@pytest.mark.parametrize("kind", KINDS)
def test_random_products(run: Run, kind: str) -> None:
    rng = np.random.default_rng(KINDS.index(kind))
    shapes = ((20, 16, DEPTH[kind]), (20, DEPTH[kind], 8), (20, 16, 8))
    integers = [rng.integers(-100, 101, shape).astype(np.float32) for shape in shapes]
    y, _ = multiply(run, kind, *integers)
    a, b, c = integers
    np.testing.assert_array_equal(y, c + a @ b)

    _, error = multiply(run, kind, *(rng.standard_normal(shape).astype(np.float32) for shape in shapes))
    assert error.max() < 1


@everywhere
def test_rounding_to_tf32(run: Run) -> None:
    special = np.array(
        # Ties and their neighbours, the largest numbers, infinities and NaNs, zero, subnormals, a carry.
        [
            0x3F801000,
            0x3F800FFF,
            0x3F803000,
            0xBF801000,
            0x7F7FFFFF,
            0x7F7FEFFF,
            0x7F800000,
            0xFF800000,
            0x7FC00000,
            0x7FFFFFFF,
            0x80000000,
            0x00001000,
            0x00000FFF,
            0x007FFFFF,
            0x00800000,
            0x3FFFFFFF,
        ],
        np.uint32,
    ).view(np.float32)
    x = np.concatenate([special, np.random.default_rng(0).standard_normal(256 - len(special)).astype(np.float32)])
    y = run(PRODUCTS, "round_tf32", [x], np.zeros(256, np.uint32), block=256)
    np.testing.assert_array_equal(y & np.uint32(0xFFFFE000), tf32_bits(x))  # the bits below do not count


MATRICES = """#include "moesaic/mma.cuh"
extern "C" __global__ void __launch_bounds__(32) matrices(const unsigned short* in, unsigned* out) {
  __shared__ __align__(16) unsigned short rows[32][8];
  const int lane = threadIdx.x;
  for (int i = lane; i < 32 * 8; i += 32) rows[i / 8][i % 8] = moesaic::load_one(in + i);
  __syncwarp();
  unsigned plain[4], transposed[4], two[2];
  moesaic::ldmatrix_x4(plain, rows[lane]);
  moesaic::ldmatrix_x4_transposed(transposed, rows[31 - lane]);
  moesaic::ldmatrix_x2(two, lane < 16 ? rows[16 + lane] : nullptr);
  for (int i = 0; i < 4; ++i) {
    moesaic::store_one(out + lane * 10 + i, plain[i]);
    moesaic::store_one(out + lane * 10 + 4 + i, transposed[i]);
    if (i < 2) moesaic::store_one(out + lane * 10 + 8 + i, two[i]);
  }
}
"""


@everywhere
def test_ldmatrix(run: Run) -> None:
    rows = np.arange(1, 257, dtype=np.uint16).reshape(32, 8)
    out = run(MATRICES, "matrices", [rows], np.zeros((32, 10), np.uint32))

    def spread(matrices: np.ndarray) -> np.ndarray:
        """Lane l's words of matrices of 8 rows: row l / 4, columns 2 (l mod 4) and the next."""
        return np.ascontiguousarray(matrices).view(np.uint32).reshape(-1, 32).T

    np.testing.assert_array_equal(out[:, :4], spread(rows.reshape(4, 8, 8)))
    np.testing.assert_array_equal(out[:, 4:8], spread(rows[::-1].reshape(4, 8, 8).transpose(0, 2, 1)))
    np.testing.assert_array_equal(out[:, 8:], spread(rows[16:].reshape(2, 8, 8)))


@pytest.mark.emulate
def test_ldmatrix_without_a_barrier_shows() -> None:
    source = MATRICES.replace("  __syncwarp();\n", "")
    rows = np.arange(1, 257, dtype=np.uint16).reshape(32, 8)
    right = emulate(MATRICES, "matrices", [rows], np.zeros((32, 10), np.uint32))
    for order in ORDERS:
        out = emulate(source, "matrices", [rows], np.zeros((32, 10), np.uint32), order=order)
        assert not np.array_equal(out, right)

"""copy.cuh, mma.cuh, experts.cuh: asynchronous copies, matrix products and their fragments, and which block has which
tile of an expert, on the emulator and on a GPU.

The emulator adds the products of a matrix product one after the other and rounds each sum; tensor cores add several at
once and cut off. So sums are compared bit for bit where they are exact (small integers), and otherwise with float64,
within ``depth * 2^-23`` of the sum of the products' magnitudes.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from moesaic.codegen import nvrtc
from moesaic.codegen.target import Target
from moesaic.ir.errors import EmulationError
from moesaic.runtime import driver
from moesaic.runtime.emulator import FORWARD, REVERSE, Buffer, build
from moesaic.runtime.kernels import NVRTC_OPTIONS

ORDERS = (FORWARD, REVERSE, 1, 2, 3)
Run = Callable[..., np.ndarray]


@dataclass(frozen=True)
class Map:
    """A tensor map of an input [matrices, rows, columns] of 16-bit elements, whose rows and matrices lie apart."""

    input: int
    columns: int
    rows: int
    matrices: int
    row_bytes: int
    matrix_bytes: int
    box_rows: int
    element: str = "bf16"
    box_columns: int = 64

    def boxes(self, address: int) -> driver.TensorBoxes:
        sizes = (self.columns, self.rows, self.matrices, self.row_bytes, self.matrix_bytes)
        box = (self.box_columns, self.box_rows)
        return driver.TensorBoxes(address, *sizes, *box, driver.TENSOR_MAP_TYPES[self.element])


def emulate(
    source: str,
    name: str,
    inputs: Sequence[np.ndarray],
    out: np.ndarray,
    scalars: Sequence[int] = (),
    grid: tuple[int, int] = (1, 1),
    block: int = 32,
    order: int = FORWARD,
    shared_bytes: int = 0,
    include_dirs: Sequence[Path] | None = None,
    maps: Sequence[Map | None] = (),
) -> np.ndarray:
    """Runs a kernel of parameters (inputs..., out, scalars..., maps...) on the CPU; returns `out`. None is a map of
    nothing."""
    kernel = build(source, name, include_dirs or nvrtc.helper_include_dirs())
    buffers = [Buffer(x.ctypes.data, x.nbytes, f"input{i}", False) for i, x in enumerate(inputs)]
    buffers.append(Buffer(out.ctypes.data, out.nbytes, "out"))
    boxes = [None if m is None else m.boxes(buffers[m.input].address) for m in maps]
    structs = [bytes(128) if b is None else struct.pack("=Q7q64x", *b[:8]) for b in boxes]  # as tensor_map.cuh says
    args = [*(b.address for b in buffers), *scalars, *structs]
    kernel.launch((*grid, 1), (block, 1, 1), args, shared_bytes=shared_bytes, buffers=buffers, order=order)
    return out


def run_in_every_order(*args: object, **options: object) -> np.ndarray:
    """Runs on the emulator; the order of lanes, warps and blocks must not change a bit."""
    results = [emulate(*args, order=order, **options).copy() for order in ORDERS]  # type: ignore[arg-type]
    for result in results[1:]:
        np.testing.assert_array_equal(result.view(np.uint8), results[0].view(np.uint8))
    return results[0]


@functools.cache
def loaded(source: str, name: str, ordinal: int) -> driver.Module:
    compiled = nvrtc.compile_source(
        source, name=name, target=driver.device_target(ordinal), extra_options=NVRTC_OPTIONS
    )
    return driver.Module.load(compiled.cubin, name, ordinal)


def run_on_gpu(
    source: str,
    name: str,
    inputs: Sequence[np.ndarray],
    out: np.ndarray,
    scalars: Sequence[int] = (),
    grid: tuple[int, int] = (1, 1),
    block: int = 32,
    shared_bytes: int = 0,
    maps: Sequence[Map | None] = (),
) -> np.ndarray:
    """Runs the same kernel on the current GPU."""
    import torch

    ordinal = torch.cuda.current_device()
    held = [torch.from_numpy(x.reshape(-1).view(np.uint8).copy()).cuda() for x in (*inputs, out)]
    with driver.current(ordinal):
        structs = [
            bytes(128) if m is None else driver.encode_tensor_map(m.boxes(held[m.input].data_ptr())) for m in maps
        ]
    args = driver.Arguments(["ptr"] * len(held) + ["i32"] * len(scalars) + ["tensormap"] * len(maps))
    args.pack(*(x.data_ptr() for x in held), *scalars, *structs)
    stream = torch.cuda.current_stream().cuda_stream
    loaded(source, name, ordinal).kernel.launch((*grid, 1), (block, 1, 1), shared_bytes, stream, args)
    torch.cuda.synchronize()
    out.reshape(-1).view(np.uint8)[:] = held[-1].cpu().numpy()
    return out


everywhere = pytest.mark.parametrize(
    "run",
    [
        pytest.param(run_in_every_order, marks=pytest.mark.emulate, id="emulator"),
        pytest.param(run_on_gpu, marks=pytest.mark.gpu, id="gpu"),
    ],
)


# Staged copies --------------------------------------------------------------------------------------------------------

TILE = 80  # units of a tile; no multiple of the threads, so that they copy unevenly
COPY_THREADS = 64

# Reverses every tile: a thread reads what others copied. What lies past the end arrives as zeros.
PIPELINE = f"""
constexpr int kTile = {TILE};
constexpr int kThreads = {COPY_THREADS};

template <int kBytes, int kStages>
__device__ __forceinline__ void reverse_tiles(const unsigned char* in, unsigned char* out, int units,
                                              unsigned char* shared) {{
  using Unit = typename moesaic::Word<kBytes>::type;
  Unit* const stages = reinterpret_cast<Unit*>(shared);
  const int tiles = (units + kTile - 1) / kTile;
  const auto fetch = [&](int tile) {{
    Unit* const stage = stages + tile % kStages * kTile;
    for (int i = threadIdx.x; tile < tiles && i < kTile; i += kThreads) {{
      const int unit = tile * kTile + i;
      moesaic::copy_async<kBytes>(stage + i, in + kBytes * unit, unit < units);
    }}
    moesaic::copy_commit();
  }};
  for (int tile = 0; tile < kStages - 1; ++tile) fetch(tile);
  for (int tile = 0; tile < tiles; ++tile) {{
    moesaic::copy_wait<kStages - 2>();
    __syncthreads();
    fetch(tile + kStages - 1);
    const Unit* const stage = stages + tile % kStages * kTile;
    for (int i = threadIdx.x; i < kTile; i += kThreads) {{
      moesaic::store_one(reinterpret_cast<Unit*>(out) + tile * kTile + i, stage[kTile - 1 - i]);
    }}
  }}
}}

__device__ __forceinline__ void reverse_tiles(const unsigned char* in, unsigned char* out, int units,
                                              unsigned char* shared, int bytes, int stages) {{
  if (bytes == 4) {{
    if (stages == 2) reverse_tiles<4, 2>(in, out, units, shared);
    if (stages == 4) reverse_tiles<4, 4>(in, out, units, shared);
  }} else if (bytes == 8) {{
    if (stages == 2) reverse_tiles<8, 2>(in, out, units, shared);
    if (stages == 3) reverse_tiles<8, 3>(in, out, units, shared);
  }} else {{
    if (stages == 2) reverse_tiles<16, 2>(in, out, units, shared);
    if (stages == 3) reverse_tiles<16, 3>(in, out, units, shared);
  }}
}}
"""

# What is deleted or changed -> by what. `__syncthreads` after a fetch no longer keeps it from a tile still being read.
MISTAKES = {
    "no_wait": ("    moesaic::copy_wait<kStages - 2>();\n", ""),
    "wait_leaves_one_too_many": ("copy_wait<kStages - 2>", "copy_wait<kStages - 1>"),
    "no_commit": ("    moesaic::copy_commit();\n", ""),
    "no_barrier": ("    __syncthreads();\n", ""),
    "barrier_before_wait": (
        "    moesaic::copy_wait<kStages - 2>();\n    __syncthreads();\n",
        "    __syncthreads();\n    moesaic::copy_wait<kStages - 2>();\n",
    ),
    "fetch_before_barrier": (
        "    __syncthreads();\n    fetch(tile + kStages - 1);\n",
        "    fetch(tile + kStages - 1);\n    __syncthreads();\n",
    ),
    "fetch_too_far_ahead": ("    fetch(tile + kStages - 1);\n", "    fetch(tile + kStages);\n"),
    "stages_overlap": ("stages + tile % kStages * kTile;\n    for", "stages + tile % 1 * kTile;\n    for"),
    "reads_past_the_end": ("unit < units", "true"),
}


def kernel_with_copies(texts: dict[str, str]) -> str:
    """A kernel `copies` that runs the `which`-th text."""
    spaces = "\n".join(f"namespace {name} {{{text}}}" for name, text in texts.items())
    calls = "\n".join(
        f"  if (which == {i}) {name}::reverse_tiles(in, out, units, shared, bytes, stages);"
        for i, name in enumerate(texts)
    )
    return f"""#include "moesaic/copy.cuh"
{spaces}
extern "C" __global__ void __launch_bounds__({COPY_THREADS}) copies(
    const unsigned char* in, unsigned char* out, int units, int bytes, int stages, int which) {{
  __shared__ __align__(16) unsigned char shared[3 * {TILE} * 16];
{calls}
}}
"""


COPIES = kernel_with_copies({"right": PIPELINE})


def mutant(name: str) -> str:
    old, new = MISTAKES[name]
    assert old in PIPELINE
    return PIPELINE.replace(old, new)


COPIES_WITH_MISTAKES = kernel_with_copies({"right": PIPELINE, **{name: mutant(name) for name in MISTAKES}})


def copy_input(units: int, size: int) -> np.ndarray:
    return np.random.default_rng(units).integers(0, 256, (units, size), np.uint8)


def reversed_tiles(x: np.ndarray) -> np.ndarray:
    tiles = -(-len(x) // TILE)
    padded = np.zeros((tiles * TILE, x.shape[1]), np.uint8)
    padded[: len(x)] = x
    return padded.reshape(tiles, TILE, -1)[:, ::-1].reshape(padded.shape)


@everywhere
@pytest.mark.parametrize(("size", "stages"), [(4, 2), (4, 4), (8, 2), (8, 3), (16, 2), (16, 3)])
def test_staged_copies(run: Run, size: int, stages: int) -> None:
    for units in (1, TILE - 1, TILE, 2 * TILE + 1, 5 * TILE + 37):
        x = copy_input(units, size)
        expected = reversed_tiles(x)
        out = np.full_like(expected, 0xAA)
        run(COPIES, "copies", [x], out, [units, size, stages, 0], block=COPY_THREADS)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.emulate
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_with_copies_show(mistake: str) -> None:
    """Wrong or reported, in whatever order the lanes run."""
    which = 1 + list(MISTAKES).index(mistake)
    units = 4 * TILE + 5
    for size, stages in ((4, 4), (8, 3), (16, 2)):
        x = copy_input(units, size)
        expected = reversed_tiles(x)
        for order in ORDERS:
            out = np.zeros_like(expected)
            try:
                emulate(
                    COPIES_WITH_MISTAKES, "copies", [x], out, [units, size, stages, which], (1, 1), COPY_THREADS, order
                )
            except EmulationError:
                continue
            assert not np.array_equal(out, expected), (size, stages, order)


# One warp, one mistake a case. The line of each is what a report must name.
MISUSE = """#include "moesaic/copy.cuh"
#include "moesaic/mma.cuh"
using moesaic::copy_async;
extern "C" __global__ void misuse(const unsigned* in, unsigned* out, int which) {
  __shared__ __align__(16) unsigned tile[32 * 4 + 4];
  const int lane = threadIdx.x;
  unsigned a[4] = {}, b[2] = {};
  float c[4] = {};
  switch (which) {
    case 0: copy_async<16>(tile + 1, in, true); break;
    case 1: copy_async<16>(tile, in + 1, true); break;
    case 2: copy_async<8>(out, in, true); break;
    case 3: copy_async<4>(tile, in + 128, true); break;
    case 4: copy_async<4>(tile + lane, in + lane, true); tile[lane] = 7; moesaic::copy_commit();
      moesaic::copy_wait<0>(); break;
    case 5: copy_async<4>(tile, in, true); moesaic::copy_commit(); __syncwarp();
      moesaic::copy_wait<0>(); break;
    case 6: copy_async<4>(tile + lane, out + lane, true); out[lane] = 7; moesaic::copy_commit();
      moesaic::copy_wait<0>(); break;
    case 7: moesaic::ldmatrix_x4(a, in + 4 * lane); break;
    case 8: moesaic::ldmatrix_x4(a, tile + 4 * lane + 1); break;
    case 9: if (lane < 16) moesaic::mma<__half>(c, a, b); break;
    case 10: if (lane < 16) moesaic::mma<__half>(c, a, b); else moesaic::ldmatrix_x2(b, tile); break;
    case 11: if (lane < 16) moesaic::mma<__half>(c, a, b); else __syncwarp(); break;
    case 12: copy_async<4>(tile + lane, in + 4096, false); moesaic::copy_commit(); moesaic::copy_wait<0>(); break;
  }
  out[lane] = lane;
}
"""

REPORTS = {
    0: "misaligned access to 16 bytes of shared memory",
    1: "misaligned read of 16 bytes",
    2: "do not lie in the block's shared memory",
    3: "out of bounds: read of 4 bytes at byte 512 of 'input0'",
    4: "its destination was written meanwhile",
    5: "is that of another copy in flight",
    6: "its source was written meanwhile",
    7: "do not lie in the block's shared memory",
    8: "misaligned access to 16 bytes of shared memory",
    9: "an instruction of the whole warp meets lane 16, which has exited",
    10: "which is at another one",
    11: "an instruction of the whole warp",
}


@pytest.mark.emulate
@pytest.mark.parametrize("which", REPORTS)
def test_misuse_is_reported(which: int) -> None:
    for order in ORDERS:
        with pytest.raises(EmulationError, match=r"misuse\.cu:") as caught:
            emulate(MISUSE, "misuse", [np.zeros(128, np.uint32)], np.zeros(128, np.uint32), [which], order=order)
        assert REPORTS[which] in str(caught.value)
        first = next(n for n, line in enumerate(MISUSE.splitlines(), 1) if f"case {which}:" in line)
        assert re.search(rf"misuse\.cu:({first}|{first + 1})\b", str(caught.value))


@pytest.mark.emulate
def test_a_copy_that_is_not_valid_reads_nothing() -> None:
    out = emulate(MISUSE, "misuse", [np.zeros(128, np.uint32)], np.zeros(128, np.uint32), [12])
    np.testing.assert_array_equal(out[:32], np.arange(32))


# Single products ------------------------------------------------------------------------------------------------------

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


def tf32_bits(x: np.ndarray) -> np.ndarray:
    """float32 rounded to nearest, ties away from zero, at bit 13."""
    bits = x.astype(np.float32).view(np.uint32)
    return np.where(np.isfinite(x), bits + np.uint32(0x1000), bits) & np.uint32(0xFFFFE000)


def stored(x: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """`x` as a kernel reads it, and the numbers that a product sees."""
    x = np.ascontiguousarray(x, np.float32)
    if kind == "bf16":  # cut off: how a test's inputs are rounded does not matter
        bits = (x.view(np.uint32) >> 16).astype(np.uint16)
        return bits, (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if kind == "half":
        half = x.astype(np.float16)
        return half.view(np.uint16), half.astype(np.float64)
    return x, tf32_bits(x).view(np.float32).astype(np.float64)


def multiply(run: Run, kind: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A batch of c + a @ b by the kernel, and its error as a multiple of what is allowed."""
    (a_bits, a_seen), (b_bits, b_seen) = stored(a, kind), stored(b, kind)
    y = np.full(c.shape, np.nan, np.float32)
    run(PRODUCTS, "products", [a_bits, b_bits, c], y, [KINDS.index(kind)], grid=(len(c), 1))
    return y, relative_error(y, a_seen, b_seen, c)


def relative_error(y: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray | float = 0.0) -> np.ndarray:
    exact = np.float64(c) + a @ b
    size = np.abs(c) + np.abs(a) @ np.abs(b)
    return np.abs(y - exact) / (a.shape[-1] * 2.0**-23 * size + 1e-300)


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


# Fragments from shared memory -----------------------------------------------------------------------------------------

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


# Tiled products -------------------------------------------------------------------------------------------------------

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


# Experts and their tiles ----------------------------------------------------------------------------------------------

# What there is to do for each expert, here the pairs of its rows and one more, by blocks of different sizes.
COUNTING = """#include "moesaic/experts.cuh"

template <int kExperts, int kThreads>
__device__ __forceinline__ void count(const int* counts, int* out) {
  __shared__ int first[kExperts + 1 + kThreads / 32];
  moesaic::count_before<kExperts, kThreads>(counts, first, [](int rows) { return rows == 0 ? 0 : rows / 2 + 1; });
  for (int i = threadIdx.x; i <= kExperts; i += kThreads) moesaic::store_one(out + i, first[i]);
}

extern "C" __global__ void __launch_bounds__(384) counting(const int* counts, int* out, int which) {
  switch (which) {
    case 0: count<1, 32>(counts, out); break;
    case 1: count<5, 64>(counts, out); break;
    case 2: count<128, 384>(counts, out); break;
    case 3: count<384, 384>(counts, out); break;
    case 4: count<385, 384>(counts, out); break;
    case 5: count<1000, 128>(counts, out); break;
  }
}
"""
COUNTED = ((1, 32), (5, 64), (128, 384), (384, 384), (385, 384), (1000, 128))


@everywhere
@pytest.mark.parametrize("which", range(len(COUNTED)), ids=lambda which: "experts{}-threads{}".format(*COUNTED[which]))
def test_what_comes_before_an_expert(run: Run, which: int) -> None:
    experts, threads = COUNTED[which]
    rng = np.random.default_rng(which)
    for counts in (rng.integers(0, 1000, experts) * (rng.random(experts) < 0.7), np.zeros(experts)):
        rows = counts.astype(np.int32)
        out = run(COUNTING, "counting", [rows], np.full(experts + 1, -7, np.int32), [which], block=threads)
        np.testing.assert_array_equal(out, np.concatenate([[0], np.cumsum(np.where(rows == 0, 0, rows // 2 + 1))]))


# The number of items, then [item][rank]: four numbers of each, of all items or of the `last`.
ITEMS = """#include "moesaic/experts.cuh"

template <int kPair>
__device__ __forceinline__ void list_items(long long* out, long long row_tiles, int column_tiles, int last) {
  const long long items = moesaic::items_of<kPair>(row_tiles, column_tiles);
  const long long skip = last == 0 ? 0 : items - last;
  if (threadIdx.x == 0) moesaic::store_one(out, items);
  for (long long i = threadIdx.x; i < (items - skip) * kPair; i += 32) {
    const auto item = moesaic::item_of<kPair>(skip + i / kPair, static_cast<int>(i % kPair), row_tiles, column_tiles);
    moesaic::store_one(out + 1 + 4 * i, item.row_tile);
    moesaic::store_one(out + 2 + 4 * i, static_cast<long long>(item.column_tile));
    moesaic::store_one(out + 3 + 4 * i, static_cast<long long>(item.together));
    moesaic::store_one(out + 4 + 4 * i, static_cast<long long>(item.idle));
  }
}

extern "C" __global__ void __launch_bounds__(32) items(const int* given, long long* out) {
  const long long row_tiles = (static_cast<long long>(given[0]) << 32) + given[1];
  if (given[3] == 1) list_items<1>(out, row_tiles, given[2], given[4]);
  if (given[3] == 2) list_items<2>(out, row_tiles, given[2], given[4]);
}
"""


def items_of(run: Run, pair: int, row_tiles: int, column_tiles: int, last: int | None = None) -> tuple[int, np.ndarray]:
    """The number of items, and all of them (or the `last`): [item, rank, (row tile, column tile, together, idle)]."""
    most = (row_tiles // pair + 1) * column_tiles if last is None else last
    given = np.array([row_tiles >> 32, row_tiles & 0x7FFFFFFF, column_tiles, pair, last or 0], np.int32)
    out = run(ITEMS, "items", [given], np.full(1 + 4 * pair * most, -7, np.int64))
    number, found = int(out[0]), out[1:].reshape(-1, pair, 4)
    shown = number if last is None else last
    assert (found[shown:] == -7).all()
    return number, found[:shown]


@everywhere
@pytest.mark.parametrize("pair", [1, 2])
def test_every_tile_is_one_item_of_one_block(run: Run, pair: int) -> None:
    for row_tiles in range(6):
        for column_tiles in range(1, 6):
            number, found = items_of(run, pair, row_tiles, column_tiles)
            odd = row_tiles % pair
            assert number == len(found) == row_tiles // pair * column_tiles + odd * -(-column_tiles // pair)
            rows, columns, together, idle = np.moveaxis(found, 2, 0)
            assert ((rows >= 0) & (rows < max(row_tiles, 1)) & (columns >= 0) & (columns < column_tiles)).all()
            tiles = sorted(zip(rows[idle == 0].tolist(), columns[idle == 0].tolist(), strict=True))
            assert tiles == [(r, c) for r in range(row_tiles) for c in range(column_tiles)]
            # Idle is a block of the last item alone, beside another.
            assert idle.sum() == odd * (-column_tiles % pair)
            assert not idle[:, 0].any() and not idle[:-1].any()
            # What a pair fetches together, both of it want: the same columns, two rows of tiles below each other.
            assert (together == together[:, :1]).all()
            for item, shared in zip(found, together[:, 0], strict=True):
                below = pair == 2 and item[1, 0] == item[0, 0] + 1 and item[1, 1] == item[0, 1]
                assert bool(shared) == below
                assert below or (item[:, 0] == item[0, 0]).all()


@everywhere
def test_items_of_more_tiles_than_32_bits_count(run: Run) -> None:
    row_tiles, column_tiles = (1 << 40) + 1, 3
    number, found = items_of(run, 2, row_tiles, column_tiles, last=3)
    assert number == (row_tiles // 2) * 3 + 2
    wanted = [
        [[row_tiles - 3, 2, 1, 0], [row_tiles - 2, 2, 1, 0]],
        [[row_tiles - 1, 0, 0, 0], [row_tiles - 1, 1, 0, 0]],
        [[row_tiles - 1, 2, 0, 0], [row_tiles - 1, 2, 0, 1]],
    ]
    np.testing.assert_array_equal(found, wanted)


EVEN_TILES = """#include "moesaic/experts.cuh"

template <int kPair>
__device__ __forceinline__ void list_tiles(const int* counts, int* out, int experts) {
  for (int e = threadIdx.x; e < experts; e += 32) {
    const auto tiles = moesaic::even_tiles<144, kPair>(moesaic::load_one(counts + e));
    moesaic::store_one(out + 2 * e, tiles.rows);
    moesaic::store_one(out + 2 * e + 1, tiles.count);
  }
}

extern "C" __global__ void __launch_bounds__(32) even(const int* counts, int* out, int experts, int pair) {
  if (pair == 1) list_tiles<1>(counts, out, experts);
  if (pair == 2) list_tiles<2>(counts, out, experts);
}
"""


@everywhere
@pytest.mark.parametrize("pair", [1, 2])
def test_rows_of_an_expert_are_shared_out_evenly(run: Run, pair: int) -> None:
    counts = np.array([*range(2000), 3_000_000, 2**31 - 300], np.int32)
    out = run(EVEN_TILES, "even", [counts], np.full(2 * len(counts), -7, np.int32), [len(counts), pair])
    rows, tiles = out.reshape(-1, 2).astype(np.int64).T
    assert (rows <= 144).all() and (rows % 8 == 0).all()
    # Every row is in a tile, and the last tile is not empty.
    assert (rows * tiles >= counts).all() and (rows * (tiles - 1) < np.maximum(counts, 1)).all()
    assert tiles[0] == 0 and (tiles[1:145] == 1).all()
    # No more tiles than pairs of the tallest have, and fewer rows past the last than 8 for each.
    assert (tiles[145:] <= -(-counts[145:] // (144 * pair)) * pair).all()
    assert (rows * tiles - counts < 8 * np.maximum(tiles, 1) + rows).all()
    assert pair == 1 or (tiles[145:289] == 2).all()


# What the compiler makes of them --------------------------------------------------------------------------------------

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

"""copy.cuh: asynchronous copies to shared memory, on the emulator and on a GPU."""

from __future__ import annotations

import re

import numpy as np
import pytest
from device_kernels import ORDERS, Run, emulate, everywhere

from moesaic.ir.errors import EmulationError

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

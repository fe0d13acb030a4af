"""columns.cuh: sums over partial rows, of any number of them, on the emulator and on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from device_kernels import Run, everywhere

SUMMING = """#include "moesaic/columns.cuh"

extern "C" __global__ void __launch_bounds__({threads}) summing(const {type}* partial, {type}* out, int rows) {{
  const int tile = blockIdx.x;
  const {type} total = moesaic::sum_partial_rows<{columns}, {tile}, {threads}>(partial, rows, tile);
  moesaic::store_totals<{columns}, {tile}>(out, tile, total);
}}
"""

# Columns, of them in a tile, threads; and how many rows these ask for before they wait.
SHAPES = {(128, 32, 512): 320, (61, 32, 512): 144, (96, 64, 512): 288, (130, 128, 1024): 144}


@everywhere
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_number_of_partial_rows(run: Run, shape: tuple[int, int, int]) -> None:
    columns, tile, threads = shape
    once = SHAPES[shape]
    rng = np.random.default_rng(columns)
    for rows in (0, 1, 65, once - 1, once, once + 1, 2 * once + 5):
        for dtype, type in ((np.int32, "int"), (np.float32, "float")):
            partial = rng.integers(-1000, 1000, (rows + 1, columns)).astype(dtype)  # sums are exact
            partial[rows] = 1 << 22  # is no row
            source = SUMMING.format(type=type, columns=columns, tile=tile, threads=threads)
            totals = np.full(columns, -7, dtype)
            grid = (-(-columns // tile), 1)
            out = run(source, "summing", [partial], totals, [rows], grid, threads)
            np.testing.assert_array_equal(out, partial[:rows].sum(axis=0))

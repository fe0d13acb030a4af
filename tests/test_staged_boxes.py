"""staged.cuh: boxes that leave through shared memory, on the emulator and on a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from device_kernels import Map, changed_headers, emulate, run_on_gpu, stored

import moesaic as mo
from moesaic.ir.errors import EmulationError
from moesaic.runtime.emulator import FORWARD, REVERSE

Run = Callable[..., np.ndarray]
ORDERS = (FORWARD, REVERSE, 1)
MORE_ROWS = 5  # of the matrix, which belong to somebody else

# Two warpgroups have 64 rows in turn, and send OUTPUTS times COLUMNS of them, side by side, at a time.
KERNEL = """#include "moesaic/staged.cuh"
using Staged = moesaic::StagedBoxes<__nv_bfloat16, COLUMNS, OUTPUTS, BUFFERS>;

extern "C" __global__ void staged_boxes(const float* x, __nv_bfloat16* y, int rows, int columns,
                                        const __grid_constant__ moesaic::TensorMap map) {
  MOESAIC_DYNAMIC_SHARED(unsigned char, shared);
  const size_t misaligned = reinterpret_cast<size_t>(__cvta_generic_to_shared(shared)) % 1024;
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
  Staged staged(shared + (1024 - misaligned) % 1024 + group * Staged::kBytes);
  for (int first = group * 64; first < rows; first += 128) {
    for (int column = 0; column < columns; column += OUTPUTS * COLUMNS) {
      staged.begin();
      for (int output = 0; output < OUTPUTS; ++output) {
        for (int r = 0; r < 2; ++r) {
          for (int w = 0; w < Staged::kVectors; ++w) {
            const int row = first + thread / 32 * 16 + r * 8 + thread % 32 / 4;
            const int at = column + output * COLUMNS + 8 * w + thread % 4 * 2;
            float pair[2];
            for (int v = 0; v < 2; ++v) {
              pair[v] = row < rows && at + v < columns ? moesaic::load_one(x + row * columns + at + v) : 7.0f;
            }
            staged.put(output, r, w, pair);
          }
        }
      }
      staged.written();
      for (int output = 0; output < OUTPUTS; ++output) {
        const int at = column + output * COLUMNS;
        if (at >= columns) continue;
        STORE;
      }
      staged.sent();
    }
  }
  staged.finish();
}
"""


# By what map they leave: of a matrix that has so many rows, or of rows that go on after these.
STORES = {
    "matrix": "staged.store(output, map, at, first, 0)",
    "rows": "staged.store_rows(output, map, at, BEFORE + first, moesaic::smaller(64, rows - first))",
}
BEFORE = 3  # rows


def leave(
    run: Run, form: tuple[int, int, int], rows: int, columns: int, *, into: str = "rows", **options: object
) -> None:
    """Runs a kernel for so many columns at a time, outputs and buffers, and checks what arrives."""
    width, outputs, buffers = form
    names = {"STORE": STORES[into].replace("BEFORE", str(BEFORE))}
    names |= {"COLUMNS": str(width), "OUTPUTS": str(outputs), "BUFFERS": str(buffers)}
    source = re.sub("|".join(names), lambda name: names[name[0]], KERNEL)
    rng = np.random.default_rng((rows, columns))
    bits, x = stored(rng.standard_normal((rows, columns)), "bf16")
    first = {"matrix": 0, "rows": BEFORE}[into]
    y = np.full((first + rows + MORE_ROWS, columns), 0x7FFF, np.uint16)
    if into == "matrix":
        map = Map(1, columns, rows, 1, 2 * columns, 2 * columns * rows, 64, box_columns=min(width, 64))
    else:
        map = Map(1, columns, len(y), 0, 2 * columns, 0, 64, box_columns=min(width, 64))
    shared = 1024 + 2 * outputs * buffers * 64 * 2 * width
    found = run(
        source,
        "staged_boxes",
        [x.astype(np.float32)],
        y,
        [rows, columns],
        block=256,
        shared_bytes=shared,
        maps=[map],
        **options,
    )
    np.testing.assert_array_equal(found[first : first + rows], bits)
    np.testing.assert_array_equal(found[:first], 0x7FFF)
    np.testing.assert_array_equal(found[first + rows :], 0x7FFF)


def in_some_orders(source: str, name: str, inputs: list[np.ndarray], out: np.ndarray, *args: object, **options: object):
    return [emulate(source, name, inputs, out.copy(), *args, order=o, **options) for o in ORDERS][-1]  # type: ignore[arg-type]


def on_hopper(*args: object, **options: object) -> np.ndarray:
    import torch

    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the copy engine is Hopper's")
    return run_on_gpu(*args, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(in_some_orders, marks=pytest.mark.emulate, id="emulator"),
        pytest.param(on_hopper, marks=pytest.mark.gpu, id="gpu"),
    ],
)
@pytest.mark.parametrize("form", [(64, 1, 2), (64, 2, 1), (32, 3, 1), (32, 1, 2), (128, 1, 1), (128, 2, 2)])
@pytest.mark.parametrize("into", STORES)
def test_boxes_leave(run: Run, into: str, form: tuple[int, int, int]) -> None:
    """No row is written but those that boxes have. Of two boxes, the second has columns, too."""
    for rows, columns in ((64, 64), (67, 200), (300, 72), (1, 8), (192, 104)):
        leave(run, form, rows, columns + (form[0] > 64 and columns <= 64) * 64, into=into)


# What is deleted, and what an order of lanes then finds.
WAITS = (
    "by_one_lane([] { stored_wait<kBuffers - 1>(); });\n    sync();",
    "by_one_lane([] { stored_wait<kBuffers - 1>(); });",
    "shared_to_async_proxy();\n    sync();",
    "stored_wait<0>();",
)


@pytest.mark.emulate
@pytest.mark.parametrize("wait", WAITS)
def test_a_missing_wait_shows(wait: str, tmp_path: Path) -> None:
    changed_headers(tmp_path, "staged.cuh", wait)

    def is_wrong(order: int, **options: object) -> bool:
        try:
            leave(emulate, (64, 1, 2), 300, 200, order=order, **options)
        except (AssertionError, EmulationError):
            return True
        return False

    assert not any(is_wrong(order) for order in ORDERS)
    assert any(is_wrong(order, include_dirs=[tmp_path]) for order in ORDERS)


# What results of up in training leave by, three outputs of which two are halves of one operand, and those of down.
FORMS = {
    ("cooperative", 2048, 768): ("32, 3, 1", "128, 1, 1"),
    ("cooperative", 192, 160): ("32, 3, 1", "64, 1, 2"),  # 128 columns would end past the last one
    ("cooperative", 200, 136): ("", "64, 1, 2"),  # halves that no box ends with
    ("swapped", 2048, 768): ("64, 3, 2, 16", "64, 1, 1, 48"),
}


@pytest.mark.parametrize(("tile", "hidden", "intermediate"), FORMS)
def test_as_much_leaves_at_a_time_as_there_is_room_for(tile: str, hidden: int, intermediate: int) -> None:
    experts = mo.Experts(8, hidden, intermediate, dtype="bf16")
    layer = mo.compile(experts, target="sm_90a", passes=f"specialize{{tile={tile}}}").layer(2, weights_dtype="bf16")
    sources = (layer.kernels[f"experts_{name}_proj"].source for name in ("gate_up", "down"))
    found = (re.search(r"Staged(?:Boxes|Columns)<__nv_bfloat16, (.*)>;", source) for source in sources)
    numbers = (re.sub(r"/\*\w+=\*/", "", match[1]) if match else "" for match in found)
    assert tuple(numbers) == FORMS[tile, hidden, intermediate]

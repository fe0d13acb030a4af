"""Runs a kernel of a test on the emulator, in every order, and on a GPU; its operands as they are stored."""

from __future__ import annotations

import functools
import re
import shutil
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from moesaic.codegen import nvrtc
from moesaic.runtime import driver
from moesaic.runtime.emulator import FORWARD, REVERSE, Buffer, build
from moesaic.runtime.kernels import NVRTC_OPTIONS

ORDERS = (FORWARD, REVERSE, 1, 2, 3)
Run = Callable[..., np.ndarray]


@dataclass(frozen=True)
class Map:
    """A tensor map of an input [matrices, rows, columns] of 16-bit elements, whose rows and matrices lie apart; of one
    of rows, if it has no matrices."""

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
    nothing. There are as many blocks as the grid says, or a cluster, if the text has larger ones."""
    clusters = re.search(r"__cluster_dims__\((\d+)", source)
    cluster = int(clusters[1]) if clusters else 1
    grid = (max(grid[0], cluster), grid[1])
    kernel = build(source, name, include_dirs or nvrtc.helper_include_dirs())
    buffers = [Buffer(x.ctypes.data, x.nbytes, f"input{i}", False) for i, x in enumerate(inputs)]
    buffers.append(Buffer(out.ctypes.data, out.nbytes, "out"))
    boxes = [None if m is None else m.boxes(buffers[m.input].address) for m in maps]
    structs = [bytes(128) if b is None else struct.pack("=Q7q64x", *b[:8]) for b in boxes]  # as tensor_map.cuh says
    args = [*(b.address for b in buffers), *scalars, *structs]
    kernel.launch(
        (*grid, 1), (block, 1, 1), args, shared_bytes=shared_bytes, cluster=cluster, buffers=buffers, order=order
    )
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


def skip_without_wgmma() -> None:
    """Skips a test on a GPU that is none of Hopper's."""
    import torch

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is Hopper's")


def changed_headers(folder: Path, header: str, old: str, new: str = ";") -> Path:
    """A copy of the helpers in `folder`, in whose `header` the one statement `old`, with spaces that stand for any, is
    `new`; an empty one if nothing is said."""
    (helpers,) = nvrtc.helper_include_dirs()
    shutil.copytree(helpers, folder, dirs_exist_ok=True)
    path = folder / "moesaic" / header
    pattern = r"\s+".join(map(re.escape, re.split(r"\s+", old)))
    text, count = re.subn(pattern, lambda _: new, path.read_text())
    assert count == 1
    path.write_text(text)
    return folder


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


def relative_error(y: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray | float = 0.0) -> np.ndarray:
    exact = np.float64(c) + a @ b
    size = np.abs(c) + np.abs(a) @ np.abs(b)
    return np.abs(y - exact) / (a.shape[-1] * 2.0**-23 * size + 1e-300)

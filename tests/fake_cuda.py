"""A CUDA device without a GPU: layers "run" on CPU tensors, through everything but the kernels.

For a process that has the fake driver, which loads anything as a kernel and records what it is asked to launch. So the
launchers can be compared argument by argument.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.target import Target
from moesaic.runtime import driver, execute
from moesaic.runtime.tuning.tables import Tables

fake = ctypes.CDLL("libcuda.so.1")
fake.fake_name.restype = ctypes.c_char_p
fake.fake_name.argtypes = [ctypes.c_void_p]
fake.fake_use_stream.argtypes = [ctypes.c_void_p]


class Map(ctypes.Structure):
    """What the fake driver makes a tensor map of: what it was encoded from."""

    _fields_ = [
        ("address", ctypes.c_uint64),
        ("dims", ctypes.c_uint64 * 4),
        ("strides", ctypes.c_uint64 * 3),
        ("box", ctypes.c_uint32 * 4),
        ("element_strides", ctypes.c_uint32 * 4),
        ("type", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("interleave", ctypes.c_uint32),
        ("swizzle", ctypes.c_uint32),
        ("promotion", ctypes.c_uint32),
        ("fill", ctypes.c_uint32),
        ("unused", ctypes.c_uint64),
    ]

    def shape(self) -> tuple[int, ...]:
        """Dimensions, strides in bytes, box, type."""
        n = self.rank
        return (*self.dims[:n], *self.strides[: n - 1], *self.box[:n], self.type)


class _Record(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("dependent", ctypes.c_uint),
        ("arguments", ctypes.c_uint64 * 32),
        ("map_count", ctypes.c_int),
        ("maps", Map * 4),
    ]


fake.fake_records.restype = ctypes.POINTER(_Record)


@dataclass(frozen=True)
class Launched:
    """One launch as the driver saw it; among the arguments, tensor maps are 0."""

    kernel: str
    stream: int
    context: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    dependent: bool
    """Whether it may begin before the one ahead of it in the stream has ended."""
    arguments: tuple[int, ...]
    maps: tuple[Map, ...]


def launches() -> list[Launched]:
    """Those since the last call."""
    count = ctypes.c_int()
    records = fake.fake_records(ctypes.byref(count))
    return [
        Launched(
            fake.fake_name(r.function).decode(), r.stream or 0, r.context or 0, tuple(r.grid), tuple(r.block),
            bool(r.dependent), tuple(r.arguments), tuple(Map.from_buffer_copy(m) for m in r.maps[: r.map_count]),
        )
        for r in records[: count.value]
    ]  # fmt: skip


class FakeCudaRunner(execute.CudaRunner):
    """The CUDA backend with the tensors' memory on the CPU, and the driver's streams numbered by the test."""

    stream = 0x77

    def target(self, device: torch.device) -> Target:
        return driver.device_target(0)

    def tables_of(self, device: torch.device) -> Tables | None:
        return self.tables

    def check_may_compile(self) -> None:
        pass

    def load(self, kernel: GeneratedKernel, device: torch.device) -> execute.Loaded:
        maps = sum(1 << i for i, a in enumerate(kernel.arguments) if a.map is not None)
        fake.fake_kernel(kernel.symbol.encode(), len(kernel.arguments), maps)
        return execute._CudaKernel(kernel, 0)

    def enter(self, prepared: execute.Prepared, inputs: Sequence[torch.Tensor], index: int) -> list[torch.Tensor]:
        with driver.current(0):
            return prepared.run(inputs, self.stream)

    def native_points(self, index: int) -> tuple[int, ...]:
        *functions, context = driver.entry_points(0)
        stream = ctypes.cast(fake.fake_current_stream, ctypes.c_void_p).value
        assert stream is not None
        return (*functions, stream, context)


def install() -> FakeCudaRunner:
    """Makes it what runs layers of backend ``emulate``, the one that takes CPU tensors."""
    runner = FakeCudaRunner()
    execute.RUNNERS["emulate"] = runner
    execute.compiled_kernel = lambda kernel, target: SimpleNamespace(cubin=b"\x7fELF")  # type: ignore[assignment]
    fake.fake_use_stream(FakeCudaRunner.stream)
    return runner

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

fake = ctypes.CDLL("libcuda.so.1")
fake.fake_name.restype = ctypes.c_char_p
fake.fake_name.argtypes = [ctypes.c_void_p]
fake.fake_use_stream.argtypes = [ctypes.c_void_p]


class _Record(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("arguments", ctypes.c_uint64 * 32),
    ]


fake.fake_records.restype = ctypes.POINTER(_Record)


@dataclass(frozen=True)
class Launched:
    """One launch as the driver saw it."""

    kernel: str
    stream: int
    context: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    arguments: tuple[int, ...]


def launches() -> list[Launched]:
    """Those since the last call."""
    count = ctypes.c_int()
    records = fake.fake_records(ctypes.byref(count))
    return [
        Launched(
            fake.fake_name(r.function).decode(), r.stream or 0, r.context or 0, tuple(r.grid), tuple(r.block),
            tuple(r.arguments),
        )
        for r in records[: count.value]
    ]  # fmt: skip


class FakeCudaRunner(execute.CudaRunner):
    """The CUDA backend with the tensors' memory on the CPU, and the driver's streams numbered by the test."""

    stream = 0x77

    def target(self, device: torch.device) -> Target:
        return driver.device_target(0)

    def check_may_compile(self) -> None:
        pass

    def load(self, kernel: GeneratedKernel, device: torch.device) -> execute.Loaded:
        fake.fake_kernel(kernel.symbol.encode(), len(kernel.arguments))
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

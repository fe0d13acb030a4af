"""Running launch plans on torch tensors: on a GPU through the driver, or on the CPU through the emulator.

Both backends share everything but how a kernel is made ready and launched, so the emulator exercises the same argument
order, strides, grids and workspace as the GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moesaic.codegen import nvrtc
from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.target import Target
from moesaic.ir.errors import InputError, InternalError
from moesaic.ir.types import dim_value
from moesaic.runtime.plan import LaunchPlan
from moesaic.runtime.program import Executable, Program
from moesaic.runtime.reference import TORCH_DTYPES

NVRTC_OPTIONS = ("--fmad=false",)
"""Contraction to fused multiply-adds would depend on the code around an expression, hence on the configuration."""

_SLOT_ALIGNMENT = 256
_EMULATED_BLOCKS = 3  # an odd, small number: persistent loops go round several times even on small inputs

Grid = tuple[int, int, int]
Launcher = Callable[[Grid, Sequence[int]], None]


def alignments(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Bytes that the address and the row stride of each tensor are both aligned to, at most 16."""
    found = []
    for tensor in tensors:
        bits = tensor.data_ptr() | 16
        if tensor.dim() == 2:
            bits |= tensor.stride(0) * tensor.element_size()
        found.append(bits & -bits)
    return tuple(found)


@dataclass(frozen=True)
class _Prepared:
    """An executable with its kernels loaded: ready to launch without compiling anything."""

    executable: Executable
    launchers: tuple[Launcher, ...]
    most_blocks: tuple[int, ...]


class Runner:
    """Executes plans for one backend. Subclasses say how kernels are loaded and what memory looks like."""

    def __init__(self) -> None:
        self._prepared: dict[tuple[Any, ...], _Prepared] = {}
        self._lock = threading.RLock()

    def run(
        self, program: Program, kind: str, cotangents: tuple[str, ...], inputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Runs ``forward``, ``training`` or ``backward`` of a program; gives the function's results in order."""
        device = inputs[0].device
        key = (program.key, kind, cotangents, device.index, alignments(inputs))
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = self._prepare(key, program, kind, cotangents, device)
        return self._execute(prepared, inputs)

    def _prepare(
        self, key: tuple[Any, ...], program: Program, kind: str, cotangents: tuple[str, ...], device: torch.device
    ) -> _Prepared:
        with self._lock:
            if key not in self._prepared:
                self.check_may_compile(device)
                executable = program.executable(kind, self.target(device).name, key[-1], cotangents)
                loaded = [self.load(k, device) for k in executable.kernels]
                self._prepared[key] = _Prepared(
                    executable, tuple(launch for launch, _ in loaded), tuple(blocks for _, blocks in loaded)
                )
            return self._prepared[key]

    def _execute(self, prepared: _Prepared, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        plan = prepared.executable.plan
        device = inputs[0].device
        tokens = _token_count(plan, inputs)
        symbols = {"T": tokens}
        grids: list[int] = []
        for step, most in zip(plan.steps, prepared.most_blocks, strict=True):
            grids.append(_blocks(step.kernel, tokens, most))
            if step.blocks_symbol:
                symbols[step.blocks_symbol] = grids[-1]
        tensors: list[torch.Tensor] = [*inputs, *self._allocate(plan, symbols, device)]
        for step, launch, grid in zip(plan.steps, prepared.launchers, grids, strict=True):
            values: list[int] = []
            for argument in step.kernel.arguments:
                if argument.kind == "tokens":
                    values.append(tokens)
                    continue
                tensor = tensors[step.operands[argument.operand]]
                if argument.kind == "pointer":
                    values.append(tensor.data_ptr())
                elif argument.kind == "stride":
                    values.append(tensor.stride(0))
                else:
                    values.append(tensor.shape[0])
            self.launch(launch, (grid, 1, 1), values, tensors, device)
        return [tensors[i] for i in plan.results]

    def _allocate(self, plan: LaunchPlan, symbols: Mapping[str, int], device: torch.device) -> list[torch.Tensor]:
        sizes: dict[int, int] = {}
        for buffer in plan.buffers:
            if not buffer.is_result:
                size = buffer.type.elements(symbols) * buffer.type.dtype.bytes
                sizes[buffer.slot] = max(sizes.get(buffer.slot, 0), -(-size // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT)
        offsets: dict[int, int] = {}
        total = 0
        for slot, size in sorted(sizes.items()):
            offsets[slot] = total
            total += size
        workspace = self.empty((total,), torch.uint8, device)
        made = []
        for buffer in plan.buffers:
            shape = tuple(dim_value(d, symbols) for d in buffer.type.shape)
            dtype = TORCH_DTYPES[buffer.type.dtype]
            if buffer.is_result:
                made.append(self.empty(shape, dtype, device))
            else:
                start = offsets[buffer.slot]
                count = buffer.type.elements(symbols) * buffer.type.dtype.bytes
                made.append(workspace[start : start + count].view(dtype).view(shape))
        return made

    # What a backend supplies.

    def target(self, device: torch.device) -> Target:
        raise NotImplementedError

    def check_may_compile(self, device: torch.device) -> None:
        """Raises if compiling or loading now would do harm."""

    def load(self, kernel: GeneratedKernel, device: torch.device) -> tuple[Launcher, int]:
        """Something that launches the kernel, and how many blocks a persistent grid should have at most."""
        raise NotImplementedError

    def launch(
        self,
        launch: Launcher,
        grid: Grid,
        values: Sequence[int],
        tensors: Sequence[torch.Tensor],
        device: torch.device,
    ) -> None:
        launch(grid, values)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)


def _token_count(plan: LaunchPlan, inputs: Sequence[torch.Tensor]) -> int:
    for declared, tensor in zip(plan.inputs, inputs, strict=True):
        if declared.type.rank == 2:
            return tensor.shape[0]
    raise InternalError(f"@{plan.name} has no input with rows")


def _blocks(kernel: GeneratedKernel, tokens: int, most: int) -> int:
    if kernel.grid == "columns":
        return -(-kernel.columns // kernel.rows_per_block)
    blocks = -(-tokens // kernel.rows_per_block)
    return min(blocks, most if kernel.grid == "persistent" else 2**31 - 1)


class CudaRunner(Runner):
    """Compiles with NVRTC for the tensor's own device and launches on its current stream."""

    def target(self, device: torch.device) -> Target:
        from moesaic.runtime import driver

        return driver.device_target(_ordinal(device))

    def check_may_compile(self, device: torch.device) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise InputError(
                "this layer is not compiled yet for these inputs, and a CUDA graph is being captured: compiling now "
                "would break the capture. Call layer.warmup(...) with the same dtype and alignment before capturing"
            )

    def load(self, kernel: GeneratedKernel, device: torch.device) -> tuple[Launcher, int]:
        from moesaic.runtime import driver

        ordinal = _ordinal(device)
        target = driver.device_target(ordinal)
        compiled = compiled_kernel(kernel, target)
        module = driver.Module.load(compiled.cubin, kernel.symbol, ordinal)
        kinds = [driver.POINTER if a.kind == "pointer" else "i64" for a in kernel.arguments]
        launch = module.kernel.prepare((kernel.threads, 1, 1), 0, kinds)
        resident = target.occupancy(module.kernel.registers, module.kernel.static_shared_bytes, kernel.threads)

        def run(grid: Grid, values: Sequence[int]) -> None:
            launch(grid, torch.cuda.current_stream(device).cuda_stream, *values)

        return run, max(1, resident) * driver.device(ordinal).sm_count

    def launch(
        self,
        launch: Launcher,
        grid: Grid,
        values: Sequence[int],
        tensors: Sequence[torch.Tensor],
        device: torch.device,
    ) -> None:
        if 0 not in grid:
            from moesaic.runtime import driver

            with driver.current(_ordinal(device)):
                launch(grid, values)


class EmulatedRunner(Runner):
    """Runs the same kernel text on the CPU. Memory is poisoned, and every access is checked against its buffer."""

    order: int | None = None
    """Order of lanes and blocks, see the emulator; tests shuffle it."""

    def target(self, device: torch.device) -> Target:
        return Target.default()

    def load(self, kernel: GeneratedKernel, device: torch.device) -> tuple[Launcher, int]:
        from moesaic.runtime.emulator import build

        emulated = build(kernel.source, kernel.symbol, nvrtc.helper_include_dirs())
        return _EmulatedLaunch(emulated, kernel), _EMULATED_BLOCKS

    def launch(
        self,
        launch: Launcher,
        grid: Grid,
        values: Sequence[int],
        tensors: Sequence[torch.Tensor],
        device: torch.device,
    ) -> None:
        from moesaic.runtime.emulator import Buffer

        assert isinstance(launch, _EmulatedLaunch)
        buffers = []
        for number, tensor in enumerate(tensors):
            if tensor.numel() and tensor.data_ptr() in values:
                span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
                buffers.append(Buffer(tensor.data_ptr(), span * tensor.element_size(), f"operand {number}"))
        launch.run(grid, values, buffers, self.order)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        # All bits set: NaN as a float, -1 as an integer. What a kernel leaves unwritten shows.
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if tensor.numel():
            tensor.view(torch.uint8).fill_(0xFF) if dtype.itemsize == 1 else tensor.view(-1).view(torch.uint8).fill_(255)
        return tensor


class _EmulatedLaunch:
    """A built kernel of the emulator; called through :meth:`run`, which knows the buffers."""

    def __init__(self, emulated: Any, kernel: GeneratedKernel) -> None:
        self._emulated = emulated
        self._kernel = kernel

    def __call__(self, grid: Grid, values: Sequence[int]) -> None:
        raise InternalError("an emulated kernel is launched with its buffers")

    def run(self, grid: Grid, values: Sequence[int], buffers: Sequence[Any], order: int | None) -> None:
        self._emulated.launch(grid, (self._kernel.threads, 1, 1), list(values), buffers=buffers, order=order)


_compiled: dict[tuple[str, str], nvrtc.CompiledKernel] = {}
_compiled_lock = threading.Lock()


def compiled_kernel(kernel: GeneratedKernel, target: Target) -> nvrtc.CompiledKernel:
    """The kernel compiled by NVRTC, once per text and target in a process."""
    key = (kernel.source, target.name)
    with _compiled_lock:
        if key not in _compiled:
            _compiled[key] = nvrtc.compile_source(
                kernel.source, name=kernel.symbol, target=target, extra_options=NVRTC_OPTIONS
            )
        return _compiled[key]


def _ordinal(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()


RUNNERS: dict[str, Runner] = {"cuda": CudaRunner(), "emulate": EmulatedRunner()}

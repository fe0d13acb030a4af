"""Running launch plans on torch tensors: on a GPU through the driver, or on the CPU through the emulator.

Both backends share everything but how a kernel is made ready and launched, so the emulator exercises the same argument
order, strides, grids and workspace as the GPU.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from moesaic.codegen import nvrtc
from moesaic.codegen.kernel import Argument, GeneratedKernel, TensorMap
from moesaic.codegen.target import Target
from moesaic.ir import environment
from moesaic.ir.core import Function
from moesaic.ir.errors import InputError, InternalError
from moesaic.ir.types import TensorType
from moesaic.passes.specialize import parse_point
from moesaic.runtime import driver, launcher, reproducer, token_buckets
from moesaic.runtime.kernels import compiled_kernel, source_of
from moesaic.runtime.locks import KeyedLocks
from moesaic.runtime.plan import LaunchPlan
from moesaic.runtime.program import Executable, Program
from moesaic.runtime.reference import TORCH_DTYPES
from moesaic.runtime.side_by_side import side_by_side
from moesaic.runtime.tuning.lookup import points_for, tunables
from moesaic.runtime.tuning.tables import CardName, Tables

if TYPE_CHECKING:
    from moesaic.runtime.tuning.autotune import Session

_log = logging.getLogger("moesaic.launch")

Grid = tuple[int, int, int]


def alignments(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Bytes that the address and the strides of each tensor are all aligned to, at most 16.

    Also at most what contiguous rows would be aligned to: an expanded cotangent (rows 0 bytes apart) then needs no
    kernel of its own, which a graph capture could not compile.
    """
    found = []
    for tensor in tensors:
        bits = tensor.data_ptr() | 16
        if tensor.dim() >= 2:
            rows = tensor.shape[-1]
            for stride in tensor.stride()[:-1]:
                rows |= stride
            bits |= rows * tensor.element_size()
        found.append(bits & -bits)
    return tuple(found)


def usual_alignments(function: Function) -> tuple[int, ...]:
    """`alignments` of contiguous inputs as torch allocates them."""
    found = []
    for argument in function.arguments:
        last = argument.type.shape[-1] if argument.type.rank >= 2 else 0
        assert isinstance(last, int)
        bits = last * argument.type.dtype.bytes | 16
        found.append(bits & -bits)
    return tuple(found)


def tokens_of(inputs: Sequence[torch.Tensor]) -> int:
    """T: the rows of the first input that has rows; no other comes before those of tokens."""
    for tensor in inputs:
        if tensor.dim() == 2:
            return tensor.shape[0]
    return 0


ARGUMENTS: dict[str, Callable[[Sequence[torch.Tensor], int, int], int]] = {
    "pointer": lambda operands, number, tokens: operands[number].data_ptr(),
    "stride": lambda operands, number, tokens: operands[number].stride(0),
    "tokens": lambda operands, number, tokens: tokens,
    "inner_stride": lambda operands, number, tokens: operands[number].stride(1),
    "rows": lambda operands, number, tokens: operands[number].shape[0],
}
"""What a kernel's argument of a kind is, from all operands, the number of its own, and T; ``launcher.cpp`` has the same
table. Tensor maps are not here: see `_Boxes`."""

Value = int | driver.TensorBoxes
"""An argument of a launch."""


class Loaded:
    """A kernel that is ready to launch on one device."""

    most_blocks: int
    """Blocks that a persistent grid should have at most."""

    def launch(
        self, grid: Grid, stream: int, values: Sequence[Value], tensors: Sequence[torch.Tensor], read: frozenset[int]
    ) -> None:
        """Launches with the argument values; `tensors` are all operands of the plan, those numbered in `read` only
        read."""
        raise NotImplementedError

    def native_launch(self) -> driver.Launch:
        """What the native launcher starts from, where there is one."""
        raise NotImplementedError


class Prepared:
    """An executable with its kernels loaded, and everything about a call that does not depend on its inputs."""

    def __init__(self, executable: Executable, loaded: Sequence[Loaded], runner: Runner, device: torch.device) -> None:
        plan = executable.plan
        self.executable = executable
        self.runner = runner
        self.results = plan.results
        self.read = frozenset(range(len(plan.inputs))) - plan.written
        rows = {declared.type.leading: i for i, declared in reversed(list(enumerate(plan.inputs)))}
        self.tokens_from = rows.get("T", -1)
        self.sequences_from = rows.get("N", -1)
        self.slots_from = rows.get("M", -1)
        types = [*(i.type for i in plan.inputs), *(b.type for b in plan.buffers)]
        self.steps = [
            _Step(
                kernel,
                tuple(_argument(a, step.operands, types) for a in step.kernel.arguments),
                _Blocks.of(step.kernel, kernel.most_blocks),
                step.blocks_symbol,
            )
            for step, kernel in zip(plan.steps, loaded, strict=True)
        ]
        self.order = runner.order_of(plan)
        self.slots = _slots(plan)
        counted = {slot.rows for slot in self.slots} | {kind for s in self.steps for kind, *_ in s.arguments}
        if self.tokens_from < 0 and counted & {"T", "M", "tokens"}:
            raise InternalError(f"@{plan.name} has no input with rows")
        self.device = device
        self.sized: _Sized | None = None

    def run(self, inputs: Sequence[torch.Tensor], stream: int) -> list[torch.Tensor]:
        """Allocates, launches every step on the stream, and gives the results."""
        tokens = 0 if self.tokens_from < 0 else inputs[self.tokens_from].shape[0]
        sequences = 0 if self.sequences_from < 0 else inputs[self.sequences_from].shape[0]
        slots = 0 if self.slots_from < 0 else inputs[self.slots_from].shape[0]
        sized = self.sized
        if sized is None or (sized.tokens, sized.sequences, sized.slots) != (tokens, sequences, slots):
            sized = self.sized = self._size(tokens, sequences, slots)
        fresh = self.runner.fresh
        tensors = [*inputs]
        for shape, slot in zip(sized.shapes, self.slots, strict=True):
            if slot.reuses < 0:
                tensors.append(fresh(shape, dtype=slot.dtype, device=self.device))
            else:  # of the same size, see plan-workspace
                tensors.append(tensors[len(inputs) + slot.reuses].view(slot.dtype).view(shape))
        for n in self.order:
            step, grid = self.steps[n], sized.grids[n]
            if grid[0]:
                values = [
                    ARGUMENTS[kind](tensors, number, tokens) if boxes is None else boxes(tensors[number])
                    for kind, number, boxes in step.arguments
                ]
                step.loaded.launch(grid, stream, values, tensors, self.read)
        return [tensors[i] for i in self.results]

    def native(self, types: ModuleType, points: Sequence[int]) -> Any:
        """The same for the native launcher: a ``Plan``, one of the `types` of ``launcher.cpp``.

        `points` are the addresses of the functions it calls, see `CudaRunner.native_points`.
        """
        by_symbol = {
            "": -4,
            "M": -3,
            "N": -2,
            "T": -1,
            **{step.symbol: n for n, step in enumerate(self.steps) if step.symbol},
        }
        inputs = len(self.executable.plan.inputs)
        launches = [step.loaded.native_launch() for step in self.steps]

        def failed(step: int, code: int, blocks: int, boxes: tuple[int, ...] | None) -> None:
            if boxes is not None:
                asked = driver.TensorBoxes(*boxes)
                asked.check()
                raise asked.failed(code)
            raise driver.fault(code, launches[step].action((blocks, 1, 1)) if step >= 0 else "enter a context")

        # Tensors say dtypes and the device. They hold no memory: a layer may be prepared while torch warms up a CUDA
        # graph, whose memory nothing may keep.
        empty = {s.dtype: torch.empty(0, dtype=s.dtype, device=self.device) for s in self.slots}
        return types.Plan(
            next(iter(empty.values())),
            tuple(points),
            (inputs, self.tokens_from, self.sequences_from, self.slots_from, *(self.executable.plan.slots or (0, 0))),
            tuple(
                (by_symbol[s.rows], s.columns, empty[s.dtype], -1 if s.reuses < 0 else inputs + s.reuses)
                for s in self.slots
            ),
            tuple(
                (
                    launch.config_address,
                    int(launch.kernel.function),
                    astuple(step.blocks),
                    tuple((kind, n) if b is None else (kind, n, astuple(b)) for kind, n, b in step.arguments),
                )
                for step, launch in zip(self.steps, launches, strict=True)
            ),
            tuple(self.results),
            failed,
            launches,
        )

    def _size(self, tokens: int, sequences: int, slots: int) -> _Sized:
        made = self.executable.plan.slots
        symbols = {"T": tokens, "N": sequences, "M": slots if made is None else made[0] * tokens + made[1]}
        grids: list[Grid] = []
        for step in self.steps:
            blocks = step.blocks(tokens, sequences)
            grids.append((blocks, 1, 1))
            if step.symbol:
                symbols[step.symbol] = blocks
        shapes = [(symbols[slot.rows], *slot.columns) if slot.rows else slot.columns for slot in self.slots]
        return _Sized(tokens, sequences, slots, tuple(grids), tuple(shapes))


@dataclass(frozen=True, slots=True)
class _Sized:
    """What a call works out from its number of tokens; the next call mostly has as many.

    Attributes:
        tokens: T.
        sequences: N; 0 where tokens belong to no sequences.
        slots: M, where it is the caller's; else 0.
        grids: of each launch.
        shapes: of each buffer.
    """

    tokens: int
    sequences: int
    slots: int
    grids: tuple[Grid, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class _Slot:
    """A buffer as a call allocates it: its first dimension may be a symbol with a value at launch."""

    rows: str
    columns: tuple[int, ...]
    dtype: torch.dtype
    reuses: int
    """Number of an earlier workspace buffer whose memory it takes over, or -1."""


def _slots(plan: LaunchPlan) -> list[_Slot]:
    first: dict[int, int] = {}
    slots = []
    for number, buffer in enumerate(plan.buffers):
        rows, columns = "", buffer.type.shape
        if columns and not isinstance(columns[0], int):
            rows, columns = str(columns[0]), columns[1:]
        fixed = tuple(c for c in columns if isinstance(c, int))
        if len(fixed) != len(columns) or (rows and not rows.isalnum()):
            raise InternalError(f"@{plan.name}: a buffer of {buffer.type} has a dimension that is not a symbol")
        reuses = -1 if buffer.is_result else first.setdefault(buffer.slot, number)
        slots.append(_Slot(rows, fixed, TORCH_DTYPES[buffer.type.dtype], -1 if reuses == number else reuses))
    return slots


@dataclass(frozen=True, slots=True)
class _Blocks:
    """How many blocks a launch has; ``launcher.cpp`` has the same formula.

    Attributes:
        rows: tokens of a block; 0 for a grid that does not follow T, of `fixed` blocks and `per_sequence` a sequence.
        most: blocks for tokens; there is one at least, see `GeneratedKernel`.
        by_sequence: each sequence has blocks of its own, as many as any other; `most` is for all of them.
        cluster: blocks that stand for one of all these, where a grid that follows T has whole clusters.
    """

    rows: int = 0
    most: int = 0
    by_sequence: bool = False
    fixed: int = 0
    per_sequence: int = 0
    cluster: int = 1

    @classmethod
    def of(cls, kernel: GeneratedKernel, most: int) -> _Blocks:
        if kernel.grid == "fixed":
            return cls(fixed=kernel.blocks, per_sequence=kernel.blocks_per_sequence)
        if kernel.grid == "device":
            return cls(fixed=most)
        if kernel.by_sequence or kernel.grid == "persistent":
            return cls(kernel.rows_per_block, most, kernel.by_sequence)
        if kernel.grid == "clusters":
            size = kernel.cluster
            return cls(size * kernel.rows_per_block, max(1, min(kernel.blocks, most) // size), cluster=size)
        return cls(kernel.rows_per_block, 2**31 - 1)

    def __call__(self, tokens: int, sequences: int) -> int:
        if not self.rows:
            return self.fixed + sequences * self.per_sequence
        parts = max(sequences, 1) if self.by_sequence else 1
        blocks = max(1, min(-(-tokens // parts // self.rows), self.most // parts))
        return sequences * blocks if self.by_sequence else self.cluster * blocks


@dataclass(frozen=True, slots=True)
class _Boxes:
    """A `TensorMap` as a launch makes it of an operand; ``launcher.cpp`` has the same formula.

    `data_type` is the driver's number, `stacked` says whether the operand has a dimension of matrices.
    """

    columns: int
    rows: int
    matrices: int
    box_columns: int
    box_rows: int
    data_type: int
    stacked: bool

    @classmethod
    def of(cls, map: TensorMap, type: TensorType) -> _Boxes:
        stacked = type.rank == 3
        if type.dtype.value != map.element or (not map.rows if stacked else type.rank != 2 or map.matrices != 1):
            raise InternalError(f"{map} is none of {type}")
        number = driver.TENSOR_MAP_TYPES[map.element]
        return cls(map.columns, map.rows, map.matrices, map.box_columns, map.box_rows, number, stacked)

    def __call__(self, tensor: torch.Tensor) -> driver.TensorBoxes:
        row_bytes = 2 * tensor.stride(1 if self.stacked else 0)
        rows, matrices = self.rows or tensor.shape[0], self.matrices if self.rows else 0
        matrix_bytes = (rows * row_bytes if matrices == 1 else 2 * tensor.stride(0)) if matrices else 0
        distances, box = (row_bytes, matrix_bytes), (self.box_columns, self.box_rows)
        boxes = driver.TensorBoxes(tensor.data_ptr(), self.columns, rows, matrices, *distances, *box, self.data_type)
        boxes.check()
        return boxes


Bound = tuple[str, int, _Boxes | None]
"""An argument as a call makes it: its kind, the number of its operand, and a tensor map's boxes."""


def _argument(argument: Argument, operands: Sequence[int], types: Sequence[TensorType]) -> Bound:
    """That of a step on the operands of those numbers; `types` are those of all operands of the plan."""
    number = -1 if argument.operand < 0 else operands[argument.operand]
    return argument.kind, number, None if argument.map is None else _Boxes.of(argument.map, types[number])


@dataclass(frozen=True, slots=True)
class _Step:
    """A launch as a call makes it; `symbol` names the number of blocks where a buffer has as many rows."""

    loaded: Loaded
    arguments: tuple[Bound, ...]
    blocks: _Blocks
    symbol: str


class Runner:
    """Executes programs for one backend. Subclasses say how kernels are loaded and what memory looks like.

    Kernels come in buckets of T, which differ in speed only: few tokens are spread over more lanes each, or a GPU would
    stand half empty. Buckets also bound how often a layer is compiled: those that the rule, and what was tuned,
    configure alike share their kernels.
    """

    few_tokens = token_buckets.FEW_TOKENS
    """Up to so many tokens are few; see ``token_buckets.py``."""

    session: Session | None = None
    """What tunes every function that runs now; see ``tuning/autotune.py``."""

    tables: Tables | None = None
    """What was tuned; None: what the backend finds for the device."""

    def __init__(self) -> None:
        self._prepared: dict[tuple[Any, ...], Prepared] = {}
        self._distinct: dict[tuple[Any, ...], Prepared] = {}
        self._preparing = KeyedLocks()
        self.tuned_first: set[str] = set()
        """Programs whose functions are tuned before they first run in a bucket of T."""

    def run(
        self, program: Program, kind: str, cotangents: tuple[str, ...], inputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Runs ``forward``, ``training`` or ``backward`` of a program; gives the function's results in order."""
        if self.session is not None:
            self.session.first(self, program, kind, cotangents, inputs)
        table = self.table(program, kind, cotangents)
        if table is not None:
            results: list[torch.Tensor] | None = table(inputs)
            if results is not None:
                return results
        index = inputs[0].get_device()
        bucket = token_buckets.number_of(tokens_of(inputs), self.few_tokens)
        key = (program.key, kind, cotangents, index, bucket, alignments(inputs))
        prepared = self._prepared.get(key)
        if prepared is None:
            self.check_may_compile()
            self.tune_first(program, kind, cotangents, inputs)
            prepared = self._prepare(key, program, inputs[0].device)
        if table is not None:
            self.add_native(table, key, prepared)
        return self.enter(prepared, inputs, index)

    def prepare_all(self, program: Program, device: torch.device, backward: bool) -> None:
        """Prepares calls with contiguous, aligned inputs, whatever T: inference, training, and backward for all
        cotangents."""
        device = self.place(device)
        wanted: list[tuple[str, tuple[str, ...], Function]] = [
            ("forward", (), program.forward_function(training=False))
        ]
        if backward:
            wanted.append(("training", (), program.forward_function(training=True)))
            function = program.backward_function(program.float_results)
            if function is not None:
                wanted.append(("backward", program.float_results, function))
        index = -1 if device.index is None else device.index
        for kind, cotangents, function in wanted:
            for bucket in range(token_buckets.COUNT):
                key = (program.key, kind, cotangents, index, bucket, usual_alignments(function))
                prepared = self._prepare(key, program, device)
                table = self.table(program, kind, cotangents)
                if table is not None:
                    self.add_native(table, key, prepared)

    def prepare_buckets(self, program: Program, device: torch.device) -> None:
        """Prepares, for every bucket of T, the calls that are prepared for some."""
        for key in [k for k in self._prepared if k[0] == program.key]:
            place = device if key[3] < 0 else torch.device(device.type, key[3])
            for bucket in range(token_buckets.COUNT):
                other = (*key[:4], bucket, key[5])
                prepared = self._prepare(other, program, place)
                table = self.table(program, key[1], key[2])
                if table is not None:
                    self.add_native(table, other, prepared)

    def place(self, device: torch.device) -> torch.device:
        """The device with its number."""
        return device

    def _prepare(self, key: tuple[Any, ...], program: Program, device: torch.device) -> Prepared:
        with self._preparing.holding(key):  # other layers may compile at the same time
            if key not in self._prepared:
                self.check_may_compile()
                _, kind, cotangents, index, bucket, aligned = key
                target = self.target(device)
                rule = program.rule(kind, cotangents, target.name, bucket)
                points = self.points(program, kind, cotangents, bucket, aligned, device)
                distinct = (program.key, kind, cotangents, index, aligned, rule, points)
                with self._preparing.holding(distinct):
                    if distinct not in self._distinct:
                        with reproducer.kept(str(program.module), program.pipeline(kind), self.again(target.name)):
                            executable = program.executable(kind, target.name, aligned, cotangents, rule, points)
                            loaded = self.load_all(executable.kernels, device)
                        self._distinct[distinct] = Prepared(executable, loaded, self, device)
                        _log.info(
                            "@%s, %s for %s tokens on %s: %s",
                            program.function.name,
                            kind,
                            token_buckets.label(bucket, self.few_tokens),
                            device,
                            ", ".join(f"{k.symbol} ({k.threads} threads, grid {k.grid})" for k in executable.kernels),
                        )
                self._prepared[key] = self._distinct[distinct]
            return self._prepared[key]

    def points(
        self,
        program: Program,
        kind: str,
        cotangents: tuple[str, ...],
        bucket: int,
        aligned: tuple[int, ...],
        device: torch.device,
    ) -> tuple[str, ...]:
        """What was tuned for the kernels of a function in a bucket of T: the option `points` of ``specialize``."""
        tables = None if environment.AUTOTUNE.get() == "off" else self.tables_of(device)
        if tables is None:
            return ()
        target = self.target(device)
        rule = program.rule(kind, cotangents, target.name, bucket)
        specialize = program.specialize(target.name, aligned, rule)
        if specialize.overrides:
            return ()
        label = token_buckets.label(bucket, self.few_tokens)
        found = tunables(program.planned(kind, cotangents), specialize, target, aligned, label)
        return points_for(found, tables.find)

    def usual_points(
        self, program: Program, kind: str, cotangents: tuple[str, ...], bucket: int, device: torch.device
    ) -> tuple[str, ...]:
        """`points` for contiguous inputs."""
        aligned = usual_alignments(program.planned(kind, cotangents))
        return self.points(program, kind, cotangents, bucket, aligned, device)

    def tuned(self, program: Program, device: torch.device) -> dict[str, dict[str, dict[str, dict[str, str]]]]:
        """By bucket of T, function (``forward``, ``training``, ``backward``) and kernel, what was tuned for contiguous
        inputs; buckets and functions that the rule decides are left out."""
        kinds: list[tuple[str, tuple[str, ...]]] = [("forward", ()), ("training", ())]
        if program.backward_function(program.float_results) is not None:
            kinds.append(("backward", program.float_results))
        found: dict[str, dict[str, dict[str, dict[str, str]]]] = {}
        for bucket in range(token_buckets.COUNT):
            for kind, cotangents in kinds:
                points = self.usual_points(program, kind, cotangents, bucket, device)
                if points:
                    label = token_buckets.label(bucket, self.few_tokens)
                    found.setdefault(label, {})[kind] = dict(map(parse_point, points))
        return found

    def prepare_again(self, program: Program) -> None:
        """Has the calls of a program choose their kernels anew, by what has been tuned meanwhile.

        What they ran before stays loaded: a CUDA graph may hold it.
        """
        for key in [k for k in self._prepared if k[0] == program.key]:
            del self._prepared[key]

    # What a backend supplies.

    def again(self, target: str) -> str:
        """The command that does once more, given a file with IR, what failed here."""
        raise NotImplementedError

    def tables_of(self, device: torch.device) -> Tables | None:
        """What was tuned for a device."""
        return self.tables

    def tune_first(
        self, program: Program, kind: str, cotangents: tuple[str, ...], inputs: Sequence[torch.Tensor]
    ) -> None:
        """Tunes a function before its first call in a bucket of T, where the environment asks for it."""

    def target(self, device: torch.device) -> Target:
        raise NotImplementedError

    def table(self, program: Program, kind: str, cotangents: tuple[str, ...]) -> Any:
        """The ``Table`` of the native launcher for a function; None where kernels are launched from Python."""
        return None

    def add_native(self, table: Any, key: tuple[Any, ...], prepared: Prepared) -> None:
        """Has calls like this one go through the native launcher from now on."""

    def wait_for_native(self) -> None:
        """Has the native launcher built, where this backend has one."""

    def check_may_compile(self) -> None:
        """Raises if compiling or loading now would do harm."""

    def load(self, kernel: GeneratedKernel, device: torch.device) -> Loaded:
        raise NotImplementedError

    def load_all(self, kernels: Sequence[GeneratedKernel], device: torch.device) -> list[Loaded]:
        """The same of several, whose compilers run side by side."""
        return [self.load(kernel, device) for kernel in kernels]

    def enter(self, prepared: Prepared, inputs: Sequence[torch.Tensor], index: int) -> list[torch.Tensor]:
        """Runs on the device of that index, on its current stream."""
        return prepared.run(inputs, 0)

    def fresh(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """New memory for a buffer."""
        return torch.empty(shape, dtype=dtype, device=device)

    def order_of(self, plan: LaunchPlan) -> Sequence[int]:
        """Numbers of the steps in the order in which they are launched."""
        return range(len(plan.steps))


class CudaRunner(Runner):
    """Compiles with NVRTC for the tensor's own device and launches on its current stream."""

    def __init__(self) -> None:
        super().__init__()
        self._tables: dict[tuple[str, str, tuple[str, ...], int], Any] = {}
        self._tuned: dict[CardName, Tables] = {}
        self._native: set[tuple[Any, tuple[Any, ...]]] = set()

    def again(self, target: str) -> str:
        return f"moesaic compile --arch {target}"

    def table(self, program: Program, kind: str, cotangents: tuple[str, ...]) -> Any:
        key = (program.key, kind, cotangents, self.few_tokens)
        found = self._tables.get(key)
        if found is None:
            native = launcher.module()
            if native is not None:
                edges = token_buckets.edges(self.few_tokens)
                found = self._tables.setdefault(key, native.Table(edges))
        return found

    def prepare_again(self, program: Program) -> None:
        super().prepare_again(program)
        for key in [k for k in self._tables if k[0] == program.key]:
            self._tables[key].clear()
        self._native = {(table, key) for table, key in self._native if key[0] != program.key}

    def tables_of(self, device: torch.device) -> Tables | None:
        if self.tables is not None:
            return self.tables
        found = driver.device(self.place(device).index)
        card = CardName(found.target.name, found.sm_count, found.name)
        tables = self._tuned.get(card)
        if tables is None:
            tables = self._tuned[card] = Tables(card)
        return tables

    def tune_first(
        self, program: Program, kind: str, cotangents: tuple[str, ...], inputs: Sequence[torch.Tensor]
    ) -> None:
        mode = environment.AUTOTUNE.get()
        if mode in ("1", "force") or (mode != "off" and program.key in self.tuned_first):
            from moesaic.runtime.tuning.autotune import tune_call  # which is made of runners

            tune_call(self, program, kind, cotangents, inputs, force=mode == "force")

    def add_native(self, table: Any, key: tuple[Any, ...], prepared: Prepared) -> None:
        with self._preparing.holding(key):
            if (table, key) in self._native:
                return
            _, _, _, index, bucket, aligned = key
            native = launcher.module()
            assert native is not None
            plan = prepared.native(native, self.native_points(index))
            table.add(index, bucket, aligned, plan)
            self._native.add((table, key))

    def native_points(self, index: int) -> tuple[int, ...]:
        """Addresses for the native launcher: those of `driver.entry_points`, and before the context the function that
        gives the current stream of a device."""
        *functions, context = driver.entry_points(index)
        # Of torch's stable interface in C. Found by its name alone, for torch has loaded it.
        library = ctypes.CDLL("libtorch_cuda.so", mode=os.RTLD_NOLOAD)
        stream = ctypes.cast(library.aoti_torch_get_current_cuda_stream, ctypes.c_void_p).value
        assert stream is not None
        return (*functions, stream, context)

    def wait_for_native(self) -> None:
        launcher.wait()

    def target(self, device: torch.device) -> Target:
        return driver.device_target(device.index)

    def place(self, device: torch.device) -> torch.device:
        return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())

    def check_may_compile(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise InputError(
                "this layer is not compiled yet for these inputs, and a CUDA graph is being captured: compiling now "
                "would break the capture. Call layer.warmup(...) with the same dtype and alignment before capturing"
            )

    def load(self, kernel: GeneratedKernel, device: torch.device) -> Loaded:
        return _CudaKernel(kernel, device.index)

    def load_all(self, kernels: Sequence[GeneratedKernel], device: torch.device) -> list[Loaded]:
        target = self.target(device)
        side_by_side(lambda kernel: compiled_kernel(kernel, target), kernels)
        return super().load_all(kernels, device)

    def enter(self, prepared: Prepared, inputs: Sequence[torch.Tensor], index: int) -> list[torch.Tensor]:
        # The driver launches into the current context; torch may have another device's, or none on this thread yet.
        with driver.current(index):
            return prepared.run(inputs, torch._C._cuda_getCurrentRawStream(index))


_CUDA_KINDS = {"pointer": driver.POINTER, "tensor_map": "tensormap"}


class _CudaKernel(Loaded):
    def __init__(self, kernel: GeneratedKernel, ordinal: int) -> None:
        target = driver.device_target(ordinal)
        module = driver.Module.load(compiled_kernel(kernel, target).cubin, kernel.symbol, ordinal)
        kinds = [_CUDA_KINDS.get(a.kind, "i64") for a in kernel.arguments]
        shared = module.kernel.static_shared_bytes + kernel.shared_bytes
        if kernel.cluster > 1:
            clusters = module.kernel.clusters_at_once((kernel.threads, 1, 1), kernel.shared_bytes, kernel.cluster)
            self.most_blocks = clusters * kernel.cluster
        else:
            resident = target.occupancy(module.kernel.registers, shared, kernel.threads)
            self.most_blocks = max(1, resident) * driver.device(ordinal).sm_count
        self._maps = tuple(i for i, a in enumerate(kernel.arguments) if a.map is not None)
        self._encoded = functools.lru_cache(maxsize=64)(driver.encode_tensor_map)  # mostly, tensors come again
        # Every kernel waits for those before it: `after_kernels_before`.
        attributes = [driver.dependent_launch()] if target.has_dependent_launch else []
        self._launch = module.kernel.prepare((kernel.threads, 1, 1), kernel.shared_bytes, kinds, attributes)

    def launch(
        self, grid: Grid, stream: int, values: Sequence[Value], tensors: Sequence[torch.Tensor], read: frozenset[int]
    ) -> None:
        if self._maps:
            packed: list[Any] = [*values]
            for i in self._maps:
                packed[i] = self._encoded(packed[i])
            values = packed
        self._launch(grid, stream, *values)

    def native_launch(self) -> driver.Launch:
        return self._launch


class EmulatedRunner(Runner):
    """Runs the same kernel text on the CPU. Memory is poisoned, and every access is checked against its buffer. Kernels
    that begin early run as early as they may."""

    few_tokens = 24  # the kernels for many tokens have to be seen on small inputs, too

    def again(self, target: str) -> str:
        return "moesaic run --backend emulate"

    order: int | None = None
    """Order of lanes and blocks, see the emulator; tests shuffle it."""

    def target(self, device: torch.device) -> Target:
        return Target.default()

    def load(self, kernel: GeneratedKernel, device: torch.device) -> Loaded:
        return _EmulatedKernel(kernel, self)

    def load_all(self, kernels: Sequence[GeneratedKernel], device: torch.device) -> list[Loaded]:
        return side_by_side(lambda kernel: self.load(kernel, device), kernels)

    def fresh(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        # All bits set: NaN as a float, -1 as an integer. What a kernel leaves unwritten shows.
        tensor = super().fresh(shape, dtype, device)
        tensor.view(-1).view(torch.uint8).fill_(0xFF)
        return tensor

    def order_of(self, plan: LaunchPlan) -> Sequence[int]:
        return plan.earliest


class _EmulatedKernel(Loaded):
    def __init__(self, kernel: GeneratedKernel, runner: EmulatedRunner) -> None:
        from moesaic.runtime.emulator import build

        # Odd and small: persistent loops go round several times even on small inputs.
        self.most_blocks = 3 * kernel.cluster
        self._kernel = kernel
        self._runner = runner
        self._emulated = build(source_of(kernel), kernel.symbol, nvrtc.helper_include_dirs())

    def launch(
        self, grid: Grid, stream: int, values: Sequence[Value], tensors: Sequence[torch.Tensor], read: frozenset[int]
    ) -> None:
        from moesaic.runtime.emulator import Buffer

        addresses = {v if isinstance(v, int) else v.address for v in values}
        buffers = []
        for number, tensor in enumerate(tensors):
            if tensor.numel() and tensor.data_ptr() in addresses:
                span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
                name, size = f"operand {number}", span * tensor.element_size()
                buffers.append(Buffer(tensor.data_ptr(), size, name, writable=number not in read))
        threads = (self._kernel.threads, 1, 1)
        shared, order = self._kernel.shared_bytes, self._runner.order
        cluster = self._kernel.cluster
        given = [v if isinstance(v, int) else struct.pack("=Q7q64x", *v[:8]) for v in values]  # as tensor_map.cuh says
        self._emulated.launch(grid, threads, given, shared_bytes=shared, cluster=cluster, buffers=buffers, order=order)


RUNNERS: dict[str, Runner] = {"cuda": CudaRunner(), "emulate": EmulatedRunner()}

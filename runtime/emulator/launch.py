"""Launching an emulated kernel: arguments, registered buffers, errors."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from moesaic.ir.errors import EmulationError, InputError, InputTypeError
from moesaic.runtime.emulator.places import resolve_places
from moesaic.runtime.side_by_side import cores

FORWARD = 0
"""Order of a launch: lanes, warps and blocks by rising index. The same as None."""

REVERSE = -1
"""Order of a launch: lanes, warps and blocks by falling index. Any positive number is the seed of a shuffle."""

Pointer: TypeAlias = int
"""An address as an int, such as ``tensor.data_ptr()`` or ``array.ctypes.data``."""

MAX_THREADS = 1024
MAX_CLUSTER = 16
MAX_SHARED_BYTES = 227 * 1024
_REPORT_BYTES = 64 * 1024


@dataclass(frozen=True)
class Buffer:
    """Global memory that a kernel may touch.

    Attributes:
        address: first byte.
        bytes: size.
        name: what reports call it.
        writable: whether a store or atomic is allowed.
    """

    address: int
    bytes: int
    name: str
    writable: bool = True


class _Index3(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint32), ("y", ctypes.c_uint32), ("z", ctypes.c_uint32)]


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("writable", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


class _LaunchRequest(ctypes.Structure):
    """Mirrors ``LaunchRequest`` in context.h: keep the two alike."""

    _fields_ = [
        ("grid", _Index3),
        ("block", _Index3),
        ("workers", ctypes.c_uint32),
        ("buffer_count", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("order", ctypes.c_int64),
        ("shared_bytes", ctypes.c_uint64),
        ("timeout_seconds", ctypes.c_double),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("arguments", ctypes.POINTER(ctypes.c_uint64)),
        ("message", ctypes.c_char_p),
        ("message_bytes", ctypes.c_uint64),
    ]


class EmulatedKernel:
    """A kernel compiled for the CPU.

    Attributes:
        name: the kernel function.
        library: the shared library on disk.
        source: its text on disk, to which the lines in reports refer.
        parameters: one code a parameter: ``p8`` a pointer, ``i4`` ``u8`` an integer of so many bytes, ``f4`` ``f8``
            ``f2`` a float, ``s24`` a struct of so many bytes by value.
    """

    def __init__(self, name: str, handle: ctypes.CDLL, library: Path, source: Path) -> None:
        self.name = name
        self.library = library
        self.source = source
        self._launch = handle.moesaic_emulate_launch
        self._launch.argtypes = [ctypes.POINTER(_LaunchRequest)]
        self._launch.restype = ctypes.c_int
        text = ctypes.create_string_buffer(4096)
        handle.moesaic_emulate_signature.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        handle.moesaic_emulate_signature(text, len(text))
        self.parameters: tuple[str, ...] = tuple(code for code in text.value.decode().split(",") if code)

    def __repr__(self) -> str:
        return f"EmulatedKernel({self.name!r}, parameters={self.parameters})"

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        args: Sequence[Pointer | float | bytes],
        *,
        shared_bytes: int = 0,
        cluster: int = 1,
        buffers: Sequence[Buffer] = (),
        order: int | None = None,
        workers: int | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        """Runs the kernel to its end.

        Args:
            grid: blocks in x, y, z. A grid without blocks does nothing.
            block: threads of a block in x, y, z; at most 1,024 together.
            args: one value a parameter: an address for a pointer (keep the memory alive), an int or a float for a
                scalar, bytes for a struct.
            shared_bytes: dynamic shared memory of a block, in bytes.
            cluster: blocks of a cluster, which follow one another in x.
            buffers: global memory that checked accesses may touch. Without any, only alignment is checked.
            order: None or FORWARD, REVERSE, or a positive seed that shuffles lanes, warps and blocks.
            workers: OS threads, each running one cluster at a time. Default: as many as the process may use.
            timeout_s: seconds after which a launch that still runs is given up.

        Raises:
            EmulationError: the kernel did something a GPU would not forgive; the message says where.
            InputError: grid, block, cluster, arguments or order cannot be used.
        """
        grid_index, block_index = _index3("grid", grid), _index3("block", block)
        threads = block[0] * block[1] * block[2]
        if not 1 <= threads <= MAX_THREADS:
            raise InputError(f"{self.name}: block {tuple(block)} has {threads} threads; expected 1 to {MAX_THREADS}")
        if grid[0] * grid[1] * grid[2] == 0:
            return
        if grid[0] * grid[1] * grid[2] >= 2**32:
            raise InputError(f"{self.name}: grid {tuple(grid)} has 2^32 blocks or more")
        if not 0 <= shared_bytes <= MAX_SHARED_BYTES:
            raise InputError(
                f"{self.name}: {shared_bytes} bytes of dynamic shared memory; expected 0 to {MAX_SHARED_BYTES}"
            )
        if not 1 <= cluster <= MAX_CLUSTER or grid[0] % cluster:
            raise InputError(
                f"{self.name}: clusters of {cluster} blocks in grid {tuple(grid)}; expected a divisor of its extent in "
                f"x, 1 to {MAX_CLUSTER}"
            )
        order = FORWARD if order is None else order
        if order < REVERSE:
            raise InputError(f"{self.name}: order {order}; expected None, FORWARD, REVERSE or a positive seed")

        words, kept = self._encode(args)
        records = (_Buffer * max(1, len(buffers)))(
            *(_Buffer(item.address, item.bytes, item.name.encode(), int(item.writable), 0) for item in buffers)
        )
        message = ctypes.create_string_buffer(_REPORT_BYTES)
        request = _LaunchRequest(
            grid=grid_index,
            block=block_index,
            workers=workers if workers is not None else cores(),
            buffer_count=len(buffers),
            cluster=cluster,
            reserved=0,
            order=order,
            shared_bytes=shared_bytes,
            timeout_seconds=timeout_s,
            buffers=records,
            arguments=words,
            message=ctypes.cast(message, ctypes.c_char_p),
            message_bytes=_REPORT_BYTES,
        )
        failed = self._launch(ctypes.byref(request))  # ctypes releases the GIL
        del kept
        if failed:
            raise EmulationError(resolve_places(message.value.decode(errors="replace"), self.library, self.source.name))

    def _encode(self, args: Sequence[Pointer | float | bytes]) -> tuple[ctypes.Array[ctypes.c_uint64], list[object]]:
        """Argument words, and what must stay alive while they are used."""
        if len(args) != len(self.parameters):
            raise InputError(f"{self.name}: {len(args)} arguments; the kernel has {len(self.parameters)} parameters")
        words = (ctypes.c_uint64 * max(1, len(args)))()
        kept: list[object] = []
        for position, (value, code) in enumerate(zip(args, self.parameters, strict=True)):
            words[position] = self._encode_one(position, value, code, kept)
        return words, kept

    def _encode_one(self, position: int, value: Pointer | float | bytes, code: str, kept: list[object]) -> int:
        kind, size = code[0], int(code[1:])
        if kind == "s":
            if not isinstance(value, bytes) or len(value) != size:
                raise self._argument_error(position, value, f"{size} bytes of a struct")
            copy = ctypes.create_string_buffer(value, size)
            kept.append(copy)
            return ctypes.addressof(copy)
        if kind == "f":
            if isinstance(value, bytes):
                raise self._argument_error(position, value, "a float")
            return int(struct.unpack("<Q", struct.pack("<d", float(value)))[0])
        if isinstance(value, (bytes, float)) or not hasattr(value, "__index__"):
            raise self._argument_error(position, value, "an address" if kind == "p" else "an int")
        number = value.__index__()
        bits = 8 * size
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if kind == "i" else (0, 2**bits - 1)
        if not low <= number <= high:
            raise self._argument_error(position, value, f"a value from {low} to {high}")
        return int(number) & (2**64 - 1)

    def _argument_error(self, position: int, value: object, expected: str) -> InputTypeError:
        return InputTypeError(f"{self.name}: argument {position} is {value!r}; expected {expected}")


def _index3(what: str, value: tuple[int, int, int]) -> _Index3:
    if len(value) != 3 or any(not 0 <= extent < 2**31 for extent in value):
        raise InputError(f"{what} {tuple(value)}; expected three extents from 0 to 2^31 - 1")
    return _Index3(*value)

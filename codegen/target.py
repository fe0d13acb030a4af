"""What a kernel may use on a GPU: an object that answers questions, instead of a name compared in many places.

The numbers are those of the "Technical Specifications per Compute Capability" tables of the CUDA programming guide and
of ``cuda_occupancy.h``; the instructions are those that the PTX manual lists for each target.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from moesaic.ir import environment
from moesaic.ir.errors import InputError, UnsupportedError, UsageError, suggestion

WARP_THREADS = 32
"""Threads in a warp, on every target."""

_KIB = 1024
_REGISTER_UNIT = 256  # registers are handed to a warp in multiples of this
_SHARED_UNIT = 128  # shared memory is handed to a block in multiples of this many bytes
_SHARED_RESERVED = 1 * _KIB  # bytes of every block that the system keeps for itself, since compute capability 8.0


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU architecture as NVRTC names it. Get one from `parse`, `from_capability` or `default`.

    Sizes are bytes; registers are 32 bits wide. ``a`` targets are *architecture specific*: they unlock instructions
    such as wgmma, and their cubins run on that compute capability alone.
    """

    name: str
    major: int
    minor: int
    shared_per_sm: int
    """Shared memory of a multiprocessor, the system's share of each block included."""
    shared_optin: int
    """Most shared memory a block can have, static and dynamic together, after asking the driver for it."""
    max_warps_per_sm: int
    max_blocks_per_sm: int

    shared_static: int = 48 * _KIB
    """Most shared memory a block can have without asking the driver."""
    registers_per_sm: int = 64 * _KIB
    registers_per_block: int = 64 * _KIB
    max_registers_per_thread: int = 255
    max_threads_per_block: int = 1024
    partitions_per_sm: int = 4
    """Schedulers of a multiprocessor; each owns its share of the registers."""

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability, for instance ``(9, 0)``."""
        return self.major, self.minor

    @property
    def is_specific(self) -> bool:
        """Whether this is an architecture specific (``a``) target."""
        return self.name.endswith("a")

    @property
    def max_threads_per_sm(self) -> int:
        return self.max_warps_per_sm * WARP_THREADS

    # What instructions there are. Each name says what it is about; none of them is about speed.

    @property
    def has_cp_async(self) -> bool:
        """``cp.async``: 4, 8 or 16 bytes a thread from global to shared memory without registers in between."""
        return self.major >= 8

    @property
    def has_redux(self) -> bool:
        """``redux.sync``: an integer sum, minimum, maximum, and, or, xor over a warp in one instruction."""
        return self.major >= 8

    @property
    def has_redux_f32(self) -> bool:
        """``redux.sync`` minimum and maximum on float32."""
        return self.major == 10 and self.is_specific

    @property
    def has_fp8_mma(self) -> bool:
        """``mma.sync`` on e4m3 and e5m2 operands."""
        return self.capability >= (8, 9)

    @property
    def has_tma(self) -> bool:
        """``cp.async.bulk`` (with and without tensor maps) and transaction barriers."""
        return self.major >= 9

    @property
    def has_clusters(self) -> bool:
        """Thread block clusters and distributed shared memory."""
        return self.major >= 9

    @property
    def has_dependent_launch(self) -> bool:
        """``griddepcontrol``: a kernel may start while the one before it drains (programmatic dependent launch)."""
        return self.major >= 9

    @property
    def has_vector_red(self) -> bool:
        """``red.global.add`` on 2 or 4 float32 or on bf16 pairs as a vector."""
        return self.major >= 9

    @property
    def has_setmaxnreg(self) -> bool:
        """``setmaxnreg``: warpgroups hand registers to one another."""
        return self.major >= 9 and self.is_specific

    @property
    def has_wgmma(self) -> bool:
        """``wgmma.mma_async``: Hopper's warpgroup matrix product out of shared memory."""
        return self.name == "sm_90a"

    @property
    def has_tcgen05(self) -> bool:
        """``tcgen05``: data centre Blackwell's matrix product with accumulators in tensor memory."""
        return self.major == 10 and self.is_specific

    @property
    def matrix_kinds(self) -> tuple[str, ...]:
        """The families of matrix instructions, the plainest first: ``mma.sync``, ``wgmma``, ``tcgen05``."""
        kinds = ["mma.sync"]
        if self.has_wgmma:
            kinds.append("wgmma")
        if self.has_tcgen05:
            kinds.append("tcgen05")
        return tuple(kinds)

    def runs_on(self, major: int, minor: int) -> bool:
        """Whether a cubin for this target loads on a GPU of that compute capability.

        An architecture specific cubin needs the very same capability; a plain one the same major and no lower minor.
        """
        if self.is_specific:
            return self.capability == (major, minor)
        return self.major == major and self.minor <= minor

    def occupancy(self, registers: int, shared_bytes: int, threads: int) -> int:
        """How many blocks of a kernel a multiprocessor holds at once; 0 if not even one fits.

        The least of :meth:`occupancy_limits`, with its arguments and errors.
        """
        return min(self.occupancy_limits(registers, shared_bytes, threads).values())

    def occupancy_limits(self, registers: int, shared_bytes: int, threads: int) -> dict[str, int]:
        """How many blocks a multiprocessor holds as far as ``blocks``, ``threads``, ``registers`` and ``shared memory``
        go, each alone.

        `registers` is per thread as ptxas reports it, `shared_bytes` is static plus dynamic shared memory of a block,
        and `threads` is the size of a block. Counted as the hardware hands things out: warps are whole; registers go to
        a warp in multiples of 256 out of its scheduler's quarter of the file; shared memory goes to a block in
        multiples of 128 bytes with 1 KiB for the system on top. Named barriers are not looked at.

        Raises `InputError` for a negative amount or a block without threads.
        """
        if registers < 0 or shared_bytes < 0 or threads < 1:
            raise InputError(
                f"occupancy of {registers} registers, {shared_bytes} bytes and {threads} threads: "
                "registers and bytes cannot be negative, and a block has at least 1 thread"
            )
        warps = -(-threads // WARP_THREADS)
        limits = {
            "blocks": self.max_blocks_per_sm,
            "threads": self.max_warps_per_sm // warps if threads <= self.max_threads_per_block else 0,
        }
        if registers > 0:
            per_warp = _round_up(registers * WARP_THREADS, _REGISTER_UNIT)
            # The launch check takes every scheduler to hold equally many of the block's warps.
            fits = per_warp * _round_up(warps, self.partitions_per_sm) <= self.registers_per_block
            fits = fits and registers <= self.max_registers_per_thread
            per_partition = self.registers_per_sm // self.partitions_per_sm // per_warp
            limits["registers"] = per_partition * self.partitions_per_sm // warps if fits else 0
        taken = _round_up(shared_bytes + _SHARED_RESERVED, _SHARED_UNIT)
        limits["shared memory"] = self.shared_per_sm // taken if shared_bytes <= self.shared_optin else 0
        return limits

    def __str__(self) -> str:
        return self.name

    @classmethod
    def parse(cls, name: str) -> Target:
        """The target called `name`, such as ``sm_90a``; ``90a`` and ``compute_90a`` mean the same.

        Raises `InputError`, with the nearest known name, for one that is not known.
        """
        found = _KNOWN.get(_canonical(name))
        if found is None:
            raise InputError(
                f"unknown target {name!r}; known targets: {', '.join(_KNOWN)}{suggestion(_canonical(name), _KNOWN)}"
            )
        return found

    @classmethod
    def from_capability(cls, major: int, minor: int) -> Target:
        """The best target for a GPU of that compute capability: the ``a`` variant where there is one.

        A GPU that is not listed gets the nearest lower plain target of the same generation, whose cubins it can run.
        Raises `UnsupportedError` if there is none, with the targets there are.
        """
        exact = [target for target in _KNOWN.values() if target.capability == (major, minor)]
        if exact:
            return max(exact, key=lambda target: target.is_specific)
        older = [target for target in _KNOWN.values() if target.runs_on(major, minor)]
        if older:
            return max(older, key=lambda target: target.minor)
        raise UnsupportedError(
            f"a GPU of compute capability {major}.{minor} is not supported; known targets: {', '.join(_KNOWN)}"
        )

    @classmethod
    def default(cls) -> Target:
        """The target to compile for where no GPU was asked: ``MOESAIC_ARCH``, else ``sm_90a``.

        Raises `UsageError` if the variable names no known target.
        """
        chosen = environment.ARCH.get()
        if chosen is None:
            return _KNOWN["sm_90a"]
        try:
            return cls.parse(chosen)
        except InputError as error:
            raise UsageError(f"environment variable {environment.ARCH.name}: {error}") from None


def known_targets() -> tuple[Target, ...]:
    """Every known target, oldest first, each plain one before its architecture specific variant."""
    return tuple(_KNOWN.values())


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _canonical(name: str) -> str:
    match = re.fullmatch(r"(?:sm|compute)?[_-]?(\d+\w*)", name.strip().lower())
    return f"sm_{match[1]}" if match else name.strip().lower()


def _target(name: str, capability: tuple[int, int], shared_kib: int, warps: int, blocks: int) -> Target:
    return Target(
        name=name,
        major=capability[0],
        minor=capability[1],
        shared_per_sm=shared_kib * _KIB,
        shared_optin=shared_kib * _KIB - _SHARED_RESERVED,
        max_warps_per_sm=warps,
        max_blocks_per_sm=blocks,
    )


_KNOWN: dict[str, Target] = {
    target.name: target
    for target in (
        #       name       capability  KiB  warps  blocks
        _target("sm_80", (8, 0), 164, 64, 32),
        _target("sm_86", (8, 6), 100, 48, 16),
        _target("sm_89", (8, 9), 100, 48, 24),
        _target("sm_90", (9, 0), 228, 64, 32),
        _target("sm_90a", (9, 0), 228, 64, 32),
        _target("sm_100", (10, 0), 228, 64, 32),
        _target("sm_100a", (10, 0), 228, 64, 32),
        _target("sm_103a", (10, 3), 228, 64, 32),
        _target("sm_120", (12, 0), 100, 48, 24),
        _target("sm_120a", (12, 0), 100, 48, 24),
    )
}

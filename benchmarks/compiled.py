"""What a compiled kernel needs of the hardware, and what its text holds; through NVRTC, without a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.codegen.disassemble import disassemble
from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.resources import Resources
from moesaic.codegen.target import WARP_THREADS, Target
from moesaic.ir.errors import ToolchainError
from moesaic.runtime.kernels import compiled_kernel


@dataclass(frozen=True)
class Needs:
    """Of one kernel. `instructions` are those in its text, loops counted once; ``None`` without a disassembler."""

    used: Resources
    shared_bytes: int
    blocks: int
    """Blocks that a multiprocessor holds at once."""
    warps: float
    """The share of its warps that these are."""
    instructions: tuple[str, ...] | None

    def count(self, *parts: str) -> str:
        """How many instructions have one of the parts in their text, all without any; ``-`` where not known."""
        if self.instructions is None:
            return "-"
        return str(sum(not parts or any(p in line for p in parts) for line in self.instructions))


def needs_of(kernel: GeneratedKernel, target: Target) -> Needs:
    """Compiles a kernel and looks at it."""
    compiled = compiled_kernel(kernel, target)
    used = compiled.resources
    shared = used.static_shared_bytes + kernel.shared_bytes
    blocks = target.occupancy(used.registers, shared, kernel.threads)
    warps = blocks * -(-kernel.threads // WARP_THREADS) / target.max_warps_per_sm
    try:
        lines = [line.split("*/", 1)[1] for line in disassemble(compiled.cubin).splitlines() if "*/" in line]
    except ToolchainError:
        return Needs(used, shared, blocks, warps, None)
    return Needs(used, shared, blocks, warps, tuple(line for line in lines if ";" in line and "NOP" not in line))

"""What a GPU can do at most: the rates that floors and estimates are computed from; the runtime measures a GPU's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """Rates of one GPU.

    Attributes:
        name: of the GPU.
        multiprocessors: it has.
        bandwidth: bytes a second that a copy kernel reads and writes, together.
        dense: FLOPs a second of a large product of bf16 or fp16 matrices.
        float32: FLOPs a second of float32 multiply-adds outside of tensor cores.
        launch_us: microseconds of a kernel that does nothing, as a node of a graph.
        source: where the rates come from.
        clock_hz: clocks a second of a multiprocessor that is busy.
        l2_bytes: from the L2 cache, a clock of a multiprocessor.
    """

    name: str
    multiprocessors: int
    bandwidth: float
    dense: float
    float32: float
    launch_us: float
    source: str
    clock_hz: float = 1.6e9
    l2_bytes: float = 48.0

    @property
    def tensor_flops(self) -> float:
        """Of 16-bit operands, a clock of a multiprocessor."""
        return self.dense / self.multiprocessors / self.clock_hz

    def flops(self, kind: str) -> float:
        """FLOPs a second of products of operands of a kind: ``bf16``, ``f16``, ``tf32`` (half as fast) or ``f32``."""
        return {"bf16": self.dense, "f16": self.dense, "tf32": self.dense / 2}.get(kind, self.float32)


LANES = 128
"""Float32 multiply-adds a multiprocessor starts in a clock, on every card with as many as Hopper."""

H100 = Card(
    name="NVIDIA H100 80GB HBM3",
    multiprocessors=132,
    bandwidth=3.02e12,
    dense=7.83e14,
    float32=132 * LANES * 2 * 1.7e9,
    launch_us=1.17,
    source="docs/performance.md; nothing was measured here",
)
"""What the last section of `docs/performance.md` was measured on: copy bandwidth and graph node of its runs, its
fastest dense product; float32 from 132 multiprocessors at 1.7 GHz."""

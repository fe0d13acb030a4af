"""Runs generated CUDA kernels on the CPU.

The identical text of a kernel is compiled by the host C++ compiler against a header shim and run with one fiber a
thread: barriers and warp collectives keyed by mask, poisoned shared memory, checked accesses to registered buffers,
and lanes and blocks in a chosen or shuffled order. Asynchronous copies arrive at the wait that covers them and not
before. What a GPU would leave undefined (a divergent barrier, a read from an inactive lane, an access outside a
buffer, a buffer changed under a copy in flight) raises :class:`~moesaic.ir.errors.EmulationError` naming the line.

It proves semantics, not hardware behaviour: no memory-model races, register limits or approximate maths, and none of
inline PTX, TMA, mbarrier, wgmma and clusters, whose helpers bring a portable body for ``MOESAIC_EMULATE``. That of
tensor cores adds products in order and rounds each sum; hardware does neither. Clusters run to their end one after the
other on a few OS threads, the blocks of each in turn: no block may wait for one of a cluster that has not started.
"""

from moesaic.runtime.emulator.build import build
from moesaic.runtime.emulator.launch import FORWARD, REVERSE, Buffer, EmulatedKernel, Pointer

__all__ = ["FORWARD", "REVERSE", "Buffer", "EmulatedKernel", "Pointer", "build"]

"""How the picks of a dispatch are spread over blocks."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.ir.ops.launch import Kernel

_PICKS = 1024  # of a block
_PICKS_OF_LONG_TABLES = 2048
_LONG_TABLE = 4096  # experts
_THREADS = 256
_SCAN_THREADS = 1024
_HISTOGRAMS = 8
_COUNTERS = 16384  # of 16 bits, in all histograms of a block


@dataclass(frozen=True)
class DispatchShape:
    """Threads of the three steps of a dispatch, and what a block of the first and the last has of the picks.

    A block takes about 1024 picks. 131072 of them, 16384 tokens with 8 picks each, are then 128 blocks: all run at
    once on a GPU of 132 multiprocessors, and none has more to do than another. Smaller blocks would not end sooner, for
    a step takes as long as its chain of loads and barriers; they would only write longer tables. Larger blocks leave
    multiprocessors idle. A table has 4 E bytes a block, and goes through memory four times: at 128 experts that is 2
    bytes a pick, at 4096 already 64. Blocks of more experts take twice as many picks, which halves that.

    In the last step a warp ranks picks one after the other, 32 at a time, in a histogram of its own; 8 warps do 4 such
    rounds. Counters have 16 bits, and all histograms together 32 KiB, so that what a block keeps for 16384 experts fits
    the shared memory of every data centre GPU; beyond 2048 experts fewer warps rank.

    Attributes:
        threads: of a block of the first and the last step.
        scan_threads: of a block of the step between, whose warps share the rows of the table.
        tokens: of a block.
        histograms: warps of a block that rank picks; a power of two.
    """

    threads: int
    scan_threads: int
    tokens: int
    histograms: int

    @classmethod
    def of(cls, experts: int, top_k: int) -> DispatchShape:
        picks = _PICKS if experts <= _LONG_TABLE else _PICKS_OF_LONG_TABLES
        histograms = _HISTOGRAMS
        while histograms > 1 and histograms * experts > _COUNTERS:
            histograms //= 2
        return cls(_THREADS, _SCAN_THREADS, max(1, picks // top_k), histograms)


def dispatch_config(op: Kernel) -> dict[str, str]:
    """The configuration of one step of a dispatch."""
    if op.template == "dispatch_scan":
        return {"threads": str(DispatchShape.of(int(op.known["experts"]), 1).scan_threads)}
    top_k = op.operands[0].type.shape[-1]
    assert isinstance(top_k, int)
    shape = DispatchShape.of(int(op.known["experts"]), top_k)
    return {"threads": str(shape.threads), "tokens": str(shape.tokens)}

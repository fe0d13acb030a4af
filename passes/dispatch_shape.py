"""How the picks of a dispatch are spread over blocks."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.ir.ops.launch import Kernel
from moesaic.passes.clusters import MOST_BLOCKS, has_clusters

_PICKS = 1024  # of a block
_PICKS_OF_LONG_TABLES = 2048
_LONG_TABLE = 4096  # experts
_THREADS = 256
_SCAN_THREADS = 1024
_HISTOGRAMS = 8
_COUNTERS = 16384  # of 16 bits, in all histograms of a block

_MOST_CLUSTERS = 16
_SHARE = 512  # picks of a block
_PICKS_AT_ONCE = {"few": 1024, "many": 2048}
_CLUSTER_THREADS = {"few": 512, "many": 1024}
_CLUSTER_HISTOGRAMS = 16
_LOADS = 8
_CLUSTER_EXPERTS = 2048


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


@dataclass(frozen=True)
class OneLaunchShape:
    """How a dispatch in one launch is spread over clusters of blocks.

    Each cluster counts all picks, and gives slots to its own part of them; ``docs/experts.md`` has the reasons and the
    clocks. 16 clusters are 128 blocks, about as many as multiprocessors: more would count everything once more, while
    no block stores for longer than it counts. Fewer picks have fewer clusters, 512 picks a block.

    Attributes:
        threads: of a block; few picks end sooner in fewer warps, and in shorter runs of each.
        cluster: blocks of a cluster.
        clusters: the most of a grid.
        share: tokens of a block, until there are as many clusters as that.
        tokens: that a block ranks at a time, and gives slots.
        histograms: warps of a block that rank picks; a power of two.
        loads: picks that a thread asks for at once.
    """

    threads: int
    cluster: int
    clusters: int
    share: int
    tokens: int
    histograms: int
    loads: int

    @classmethod
    def of(cls, experts: int, top_k: int, tokens: str) -> OneLaunchShape:
        """`tokens`: what is known of T, few or many."""
        histograms = _CLUSTER_HISTOGRAMS
        while histograms > 1 and histograms * experts > _COUNTERS:
            histograms //= 2
        share, at_once = (max(1, picks // top_k) for picks in (_SHARE, _PICKS_AT_ONCE[tokens]))
        return cls(_CLUSTER_THREADS[tokens], MOST_BLOCKS, _MOST_CLUSTERS, share, at_once, histograms, _LOADS)


def in_one_launch(target: str, experts: int) -> bool:
    """Whether a dispatch is one launch: where there are clusters, unless its tables are long.

    Each block reads 4 E bytes of every block of its cluster; beyond 2048 experts, these 64 KiB take as long as two more
    launches.
    """
    return has_clusters(target) and experts <= _CLUSTER_EXPERTS


def dispatch_config(op: Kernel, tokens: str) -> dict[str, str]:
    """The configuration of a dispatch, or of one step of it; `tokens` is what is known of T, few or many."""
    experts, top_k = int(op.known["experts"]), op.operands[0].type.shape[-1]
    assert isinstance(top_k, int)
    if op.template == "dispatch_scan":
        return {"threads": str(DispatchShape.of(experts, 1).scan_threads)}
    if op.template == "dispatch":
        at_once = OneLaunchShape.of(experts, top_k, tokens)
        names = ("threads", "cluster", "clusters", "share", "tokens", "loads")
        return {name: str(getattr(at_once, name)) for name in names}
    shape = DispatchShape.of(experts, top_k)
    return {"threads": str(shape.threads), "tokens": str(shape.tokens)}

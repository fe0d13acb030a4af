"""The three kernels of a dispatch: from a ``launch.kernel`` of one of its steps to CUDA text.

Their regions are empty: `facts` say what there is to know. What a kernel is made of lies in ``dispatch.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.parameters import Parameters, storage
from moesaic.codegen.render import banner, render
from moesaic.codegen.target import WARP_THREADS, Target
from moesaic.ir.errors import InternalError, UnsupportedError
from moesaic.ir.ops.launch import Kernel
from moesaic.passes.dispatch_shape import DispatchShape

_SHORT = 1 << 16  # counters, experts and ranks within a block have 16 bits


def generate_count(op: Kernel) -> GeneratedKernel:
    """CUDA of the first step: a block's picks of each expert.

    Configuration: ``threads``, and the ``tokens`` of a block.
    """
    facts = _Facts.of(op)
    parameters = Parameters(op)
    indices, stride = parameters.rows_pointer(0)
    table = parameters.pointer(1)
    parameters.tokens()
    source = render(
        "dispatch_count.cu.j2",
        {
            **_common(op, facts, "how many picks of each expert every block of tokens has"),
            "parameters": parameters.lines,
            "top_k": _top_k(op),
            "tokens": op.configuration["tokens"],
            "index": storage(op, 0),
            "indices": indices,
            "stride": stride,
            "table": table,
        },
    )
    return _kernel(op, source, parameters, rows_per_block=int(op.configuration["tokens"]), shared=4 * facts.experts)


def generate_scan(op: Kernel) -> GeneratedKernel:
    """CUDA of the second step: what comes before each block.

    Configuration: ``threads``.
    """
    facts = _Facts.of(op)
    parameters = Parameters(op, {"blocks"})
    table, bases, found = (parameters.pointer(index) for index in range(3))
    parameters.rows("blocks", 0, "rows of the table")
    source = render(
        "dispatch_scan.cu.j2",
        {
            **_common(op, facts, "how many picks of each expert come before every block, and how many there are"),
            "parameters": parameters.lines,
            "table": table,
            "bases": bases,
            "found": found,
        },
    )
    return GeneratedKernel(
        symbol=op.symbol,
        source=source,
        arguments=tuple(parameters.arguments),
        threads=int(op.configuration["threads"]),
        rows_per_block=1,
        grid="fixed",
        blocks=-(-facts.experts // WARP_THREADS),
    )


def generate_scatter(op: Kernel) -> GeneratedKernel:
    """CUDA of the last step: the results of the dispatch.

    Configuration: ``threads``, the ``tokens`` of a block (those that the first step counted), ``target``.

    Raises:
        UnsupportedError: more experts, or more picks of a token, than a block can keep.
    """
    facts = _Facts.of(op)
    top_k = _top_k(op)
    threads, tokens = int(op.configuration["threads"]), int(op.configuration["tokens"])
    picks = tokens * top_k
    if picks >= _SHORT or facts.experts >= _SHORT:
        raise UnsupportedError(
            f"{op.symbol}: {facts.experts} experts and {picks} picks a block; both must be below {_SHORT}"
        )
    runs = min(DispatchShape.of(facts.experts, top_k).histograms, threads // WARP_THREADS)
    run = -(-picks // (runs * WARP_THREADS)) * WARP_THREADS
    tables = [_Table("int", "starts", facts.experts + 1, 4, "first slot of each expert, then of its first pick here")]
    tables.append(_Table("unsigned", "ranked", runs * run, 4, "the block's picks: expert and rank within the run"))
    tables.append(_Table("unsigned short", "histograms", runs * facts.experts, 2, "[kRuns][kExperts]"))
    if facts.bounded:
        tables.append(_Table("unsigned short", "rooms", facts.experts, 2, "picks of the block with a place"))
    placed, shared = [], 0
    for table in tables:
        placed.append({"type": table.type, "name": table.name, "offset": shared, "why": table.why})
        shared += -(-table.length * table.bytes // 16) * 16

    parameters = Parameters(op)
    indices, stride = parameters.rows_pointer(0)
    names = ("bases", "found", "counts", "offsets", "slot_tokens", "slot_picks", "slots", "dropped")
    pointers = {name: parameters.pointer(1 + number) for number, name in enumerate(names)}
    parameters.tokens()
    parameters.rows("rows", 1 + names.index("slot_tokens"), "slots, dead ones too")
    bounded = str(facts.bounded).lower()
    source = render(
        "dispatch_scatter.cu.j2",
        {
            **_common(op, facts, "a slot for each pick, and what lies in each slot"),
            **pointers,
            "parameters": parameters.lines,
            "top_k": top_k,
            "tokens": tokens,
            "index": storage(op, 0),
            "indices": indices,
            "stride": stride,
            "align": facts.align,
            "bounded": facts.bounded,
            "capacity": repr(facts.capacity),
            "pad": str(facts.pad).lower(),
            "pad_name": "kPad" if facts.bounded else "/*kPad=*/false",
            "bounded_name": f"/*kBounded=*/{bounded}",
            "rooms": "rooms" if facts.bounded else "nullptr",
            "runs": runs,
            "run": run,
            "tables": placed,
        },
    )
    return _kernel(op, source, parameters, rows_per_block=tokens, shared=shared)


@dataclass(frozen=True)
class _Table:
    """A table in shared memory."""

    type: str
    name: str
    length: int
    bytes: int
    """Of an element."""
    why: str


@dataclass(frozen=True)
class _Facts:
    """The attributes of the dispatch."""

    experts: int
    align: int
    capacity: float
    pad: bool

    @property
    def bounded(self) -> bool:
        return self.capacity > 0

    @classmethod
    def of(cls, op: Kernel) -> _Facts:
        known = op.known
        return cls(int(known["experts"]), int(known["align"]), float(known["capacity"]), known["pad"] == "1")


def _top_k(op: Kernel) -> int:
    top_k = op.operands[0].type.shape[-1]
    if not isinstance(top_k, int):
        raise InternalError(f"{op.symbol}: picks without a constant number for each token: {op.operands[0].type}")
    return top_k


def _common(op: Kernel, facts: _Facts, what: str) -> dict[str, object]:
    return {
        "banner": banner(op, what),
        "symbol": op.symbol,
        "experts": facts.experts,
        "threads": op.configuration["threads"],
    }


def _kernel(op: Kernel, source: str, parameters: Parameters, *, rows_per_block: int, shared: int) -> GeneratedKernel:
    """A step whose blocks have tokens: at least one block, for what it writes must be there without any token, too."""
    target = Target.parse(op.configuration["target"])
    most = target.shared_optin - 1024  # helpers have some of their own
    if shared > most:
        raise UnsupportedError(
            f"{op.symbol}: a dispatch to {op.known['experts']} experts needs {shared} bytes of shared memory a block, "
            f"but {target} has {most}"
        )
    return GeneratedKernel(
        symbol=op.symbol,
        source=source,
        arguments=tuple(parameters.arguments),
        threads=int(op.configuration["threads"]),
        rows_per_block=rows_per_block,
        grid="chunks",
        shared_bytes=shared,
    )

"""The kernels of a dispatch: from a ``launch.kernel`` of one of its three steps, or of all at once, to CUDA text.

Their regions are empty: `facts` say what there is to know. What a kernel is made of lies in ``dispatch.cuh``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.parameters import Parameters, storage
from moesaic.codegen.render import banner, render
from moesaic.codegen.target import WARP_THREADS, Target
from moesaic.ir.core import columns_of
from moesaic.ir.errors import InternalError, UnsupportedError
from moesaic.ir.ops.launch import Kernel
from moesaic.passes.dispatch_shape import DispatchShape, OneLaunchShape

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
            "align_of_picks": _align(parameters),
        },
    )
    shared = 4 * (facts.experts + 1)  # with one for picks that are not here
    return _kernel(op, source, parameters, rows_per_block=int(op.configuration["tokens"]), shared=shared)


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
    ranking = _Ranking.of(op, facts, DispatchShape.of(facts.experts, _top_k(op)).histograms)
    starts = _Table("int", "starts", facts.experts + 1, 4, _STARTS_AND_DISTANCES)
    placed, shared = _place([starts, _HERE, *ranking.tables])
    parameters = Parameters(op)
    indices, stride = parameters.rows_pointer(0)
    names = ("bases", "found", *_RESULTS)
    pointers = {name: parameters.pointer(1 + number) for number, name in enumerate(names)}
    parameters.tokens()
    parameters.rows("rows", 1 + names.index("slot_tokens"), "slots, dead ones too")
    zeroed = parameters.zeroed()
    source = render(
        "dispatch_scatter.cu.j2",
        {
            **_common(op, facts, "a slot for each pick, and what lies in each slot"),
            **pointers,
            **ranking.variables,
            "parameters": parameters.lines,
            "zeroed": zeroed,
            "index": storage(op, 0),
            "indices": indices,
            "stride": stride,
            "tables": placed,
        },
    )
    return _kernel(op, source, parameters, rows_per_block=int(op.configuration["tokens"]), shared=shared)


def generate_at_once(op: Kernel) -> GeneratedKernel:
    """CUDA of all steps in one launch.

    Configuration: ``threads``; ``cluster``, blocks of one, and ``clusters``, the most of them; the tokens that a block
    has for itself where there are few enough clusters, ``share``, and those that it ranks at a time, ``tokens``;
    ``loads``, picks that a thread loads together; ``target``.

    Raises:
        UnsupportedError: more experts, or more picks of a token, than a block can keep.
    """
    facts = _Facts.of(op)
    config = {name: int(op.configuration[name]) for name in ("threads", "cluster", "clusters", "share", "loads")}
    shape = OneLaunchShape.of(facts.experts, _top_k(op), "many")
    ranking = _Ranking.of(op, facts, shape.histograms)
    placed, shared = _place(
        [
            _Table("int", "counted", facts.experts + 1, 4, "the block's run of picks, for its cluster"),
            _Table("int", "bases", facts.experts + 1, 4, "those before the picks that it gives slots"),
            _Table("int", "found", facts.experts, 4, "all picks"),
            _Table("int", "starts", facts.experts + 1, 4, "first slot of each expert"),
            _Table("int", "distances", facts.experts, 4, "from a place among the block's picks to its slot"),
            _HERE,
            *ranking.tables,
        ]
    )
    _check_shared(op, facts, shared)
    parameters = Parameters(op)
    indices, stride = parameters.rows_pointer(0)
    pointers = {name: parameters.pointer(1 + number) for number, name in enumerate(_RESULTS)}
    parameters.tokens()
    parameters.rows("rows", 1 + _RESULTS.index("slot_tokens"), "slots, dead ones too")
    zeroed = parameters.zeroed()
    source = render(
        "dispatch.cu.j2",
        {
            **_common(op, facts, "a slot for each pick, and what lies in each slot"),
            **pointers,
            **ranking.variables,
            "parameters": parameters.lines,
            "zeroed": zeroed,
            "index": storage(op, 0),
            "indices": indices,
            "stride": stride,
            "cluster": config["cluster"],
            "loads": config["loads"],
            "align_of_picks": _align(parameters),
            "tables": placed,
        },
    )
    return GeneratedKernel(
        symbol=op.symbol,
        source=source,
        arguments=tuple(parameters.arguments),
        threads=config["threads"],
        rows_per_block=config["share"],
        grid="clusters",
        blocks=config["cluster"] * config["clusters"],
        shared_bytes=shared,
        cluster=config["cluster"],
    )


_RESULTS = ("counts", "offsets", "slot_tokens", "slot_picks", "slots", "dropped")
_STARTS_AND_DISTANCES = "first slot of each expert, then from a place among the block's picks to its slot"


@dataclass(frozen=True)
class _Table:
    """A table in shared memory."""

    type: str
    name: str
    length: int
    bytes: int
    """Of an element."""
    why: str


_HERE = _Table("int", "here", 1, 4, "how many of the picks that it gives slots are here")


def _place(tables: Sequence[_Table]) -> tuple[list[dict[str, object]], int]:
    """Where tables lie behind each other, for the template, and the bytes of them all."""
    placed: list[dict[str, object]] = []
    shared = 0
    for table in tables:
        placed.append({"type": table.type, "name": table.name, "offset": shared, "why": table.why})
        shared += -(-table.length * table.bytes // 16) * 16
    return placed, shared


@dataclass(frozen=True)
class _Ranking:
    """How a block ranks its picks and gives them slots: what templates need to know of it, and its tables."""

    variables: dict[str, object]
    tables: list[_Table]

    @classmethod
    def of(cls, op: Kernel, facts: _Facts, histograms: int) -> _Ranking:
        top_k = _top_k(op)
        threads, tokens = int(op.configuration["threads"]), int(op.configuration["tokens"])
        picks = tokens * top_k
        if picks >= _SHORT or facts.experts >= _SHORT:
            raise UnsupportedError(
                f"{op.symbol}: {facts.experts} experts and {picks} picks a block; a dispatch has fewer than {_SHORT} "
                "of both"
            )
        runs = min(histograms, threads // WARP_THREADS)
        run = -(-picks // (runs * WARP_THREADS)) * WARP_THREADS
        tables = [
            _Table(
                "unsigned", "ranked", runs * run, 4, "the block's picks: expert and rank within the run, then place"
            ),
            _Table("unsigned", "ordered", picks, 4, "by place: expert and pick"),
            _Table("unsigned short", "histograms", runs * facts.experts, 2, "[kRuns][kExperts]"),
        ]
        if facts.bounded:
            tables.append(_Table("unsigned short", "ends", facts.experts, 2, "places with room within the capacity"))
        bounded = str(facts.bounded).lower()
        variables: dict[str, object] = {
            "top_k": top_k,
            "tokens": tokens,
            "align": facts.align,
            "bounded": facts.bounded,
            "capacity": repr(facts.capacity),
            "pad": str(facts.pad).lower(),
            "pad_name": "kPad" if facts.bounded else "/*kPad=*/false",
            "bounded_name": f"/*kBounded=*/{bounded}",
            "ends": "ends" if facts.bounded else "/*ends=*/nullptr",
            "runs": runs,
            "run": run,
        }
        return cls(variables, tables)


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


def _align(parameters: Parameters) -> int:
    """Bytes that the rows of picks are multiples of, wherever they lie."""
    given = parameters.given(0)
    return math.gcd(parameters.align(0), columns_of(given) * given.type.dtype.bytes)


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
    """A step whose blocks have tokens: at least one, for what it writes must be there without any token, too."""
    _check_shared(op, _Facts.of(op), shared)
    return GeneratedKernel(
        symbol=op.symbol,
        source=source,
        arguments=tuple(parameters.arguments),
        threads=int(op.configuration["threads"]),
        rows_per_block=rows_per_block,
        grid="cover",
        shared_bytes=shared,
    )


def _check_shared(op: Kernel, facts: _Facts, shared: int) -> None:
    target = Target.parse(op.configuration["target"]) if "target" in op.configuration else Target.default()
    most = target.shared_optin - 1024  # helpers have some of their own
    if shared > most:
        raise UnsupportedError(
            f"{op.symbol}: a dispatch to {facts.experts} experts needs {shared} bytes of shared memory a block, but "
            f"{target} has {most}"
        )

"""``choose-saved``: what forward keeps for backward, and what backward computes again.

Recomputing inside a fused kernel costs no memory traffic, keeping a value costs its bytes twice. So the question is a
minimum cut: between the inputs, which live anyway, and what backward needs of the forward computation, cut the values
of fewest bytes per token. Ops that must not run twice (a top-k: the slow part of a router) have no edge from their
operands, so their results are always on the kept side.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from moesaic.ir.attributes import format_attributes
from moesaic.ir.core import Block, BlockArgument, Constant, Function, Module, OpResult, Value, create_one
from moesaic.ir.errors import NotKeptError
from moesaic.ir.ops import math, row
from moesaic.ir.ops.kernel import RowProgram
from moesaic.passes.dce import sweep
from moesaic.passes.differentiate import SUFFIX
from moesaic.passes.manager import Pass, PassContext
from moesaic.passes.rewriting import inserting_before
from moesaic.passes.sink_gathers import at_picks


@dataclass(frozen=True)
class ChooseSaved(Pass):
    """Hands values from the forward kernel to the backward kernel instead of computing them twice.

    Options:
        kept: what a backward function that was lowered before takes, inputs and results of its forward function, from
            which this one must do; empty if this pass is free to choose. A value has one name wherever the same
            function is lowered.
    """

    name: ClassVar[str] = "choose-saved"
    requires: ClassVar[str | None] = "fused"
    establishes: ClassVar[str | None] = "fused"

    kept: tuple[str, ...] = ()

    def run(self, module: Module, context: PassContext) -> bool:
        forward = module.entry
        if not module.has_function(forward.name + SUFFIX):
            return False
        backward = module.function(forward.name + SUFFIX)
        producer, consumer = _row_program(forward), _row_program(backward)
        if producer is None or consumer is None or producer.region is None or consumer.region is None:
            return _drop_unused(backward)
        _values_from_picks(consumer.region)
        sweep(consumer.region)

        known = {key: value for value, key in value_keys(producer.region, _outside(forward, producer)).items()}
        names = {key: _name(forward, producer, _as_returned(producer, value)) for key, value in known.items()}
        shared: dict[Value, Value] = {}
        name_of: dict[Value, str] = {}
        for value, key in value_keys(consumer.region, _outside(backward, consumer)).items():
            if not isinstance(value, OpResult) or value.type.leading != "T":
                continue  # what is the same for all tokens is computed once a block
            if key in known:
                shared[value], name_of[value] = known[key], names[key]
        missing: set[Value] = set()
        if self.kept:
            inputs_of_forward = {a.name for a in forward.arguments}
            missing = {value for value in shared if name_of[value] not in self.kept}
            for given, inside in zip(consumer.operands, consumer.region.arguments, strict=True):
                if isinstance(given, BlockArgument) and given.name in inputs_of_forward - {*self.kept}:
                    missing.add(inside)
        saved = _minimum_cut(consumer.region, shared, missing)
        replaced: dict[Value, Value] = {}
        handed_over: list[str] = []
        bytes_per_token = 0
        for value in saved:
            name = name_of[value]
            handed = _as_returned(producer, shared[value])
            _expose(forward, handed, name)
            consumer.operands.append(backward.body.add_argument(handed.type, name))
            replaced[value] = consumer.region.add_argument(handed.type, name)
            handed_over.append(f"{name} {handed.type}")
            bytes_per_token += _bytes_per_token(handed)
            if handed.type != value.type:
                with inserting_before(consumer.region, consumer.region.ops[0]):
                    replaced[value] = create_one("math.cast", replaced[value], dtype=value.type.dtype.value)
                replaced[value].name = value.name
        consumer.region.replace(replaced)
        sweep(backward.body)
        _drop_unused(backward)
        kept = ", ".join(handed_over) or "nothing"
        recomputed = sum(1 for v in shared if isinstance(v, OpResult) and v.op in consumer.region.ops)
        inputs = [a.name for a in backward.arguments if a.name in {f.name for f in forward.arguments}]
        again = f"computes {recomputed} forward values again" if recomputed else "repeats nothing of forward"
        context.remarks.append(
            f"choose-saved: keeps {kept} ({bytes_per_token} B/token); backward {again}, and reads "
            f"{', '.join(inputs) or 'no input'}"
        )
        return True


def _drop_unused(function: Function) -> bool:
    """Takes away the arguments that nothing uses: forward need not keep them. Says whether there were any."""
    used = {v for op in function.body.ops for v in op.operands}
    before = len(function.body.arguments)
    function.body.arguments = [a for a in function.body.arguments if a in used]
    return len(function.body.arguments) < before


def _row_program(function: Function) -> RowProgram | None:
    return next((op for op in function.body.ops if isinstance(op, RowProgram)), None)


def _values_from_picks(region: Block) -> None:
    """Values of a top-k become a gather at its indices, so that the indices alone stand for the selection."""
    for op in list(region.ops):
        if isinstance(op, row.TopK) and region.users(op.values):
            after = region.ops[region.ops.index(op) + 1]
            with inserting_before(region, after):
                values = at_picks(op.x, op.indices, use_values=False)
                gathered = isinstance(values, OpResult) and isinstance(values.op, row.Gather)
                if op.may_fall_short and not gathered:  # a gather is 0 by itself where there is no pick
                    values = math.select(create_one("math.less", op.indices, 0.0), 0.0, values)
            region.replace({op.values: values})


def _outside(function: Function, kernel: RowProgram) -> dict[Value, str]:
    """What both functions call that which a kernel takes: an input, or a result of forward that backward takes."""
    assert kernel.region is not None
    handed_out = dict(zip(function.returned, function.result_names, strict=True))
    return {
        inside: handed_out.get(given, given.name)
        for given, inside in zip(kernel.operands, kernel.region.arguments, strict=True)
        if not isinstance(given, BlockArgument)
    }


def value_keys(region: Block, names: Mapping[Value, str] = {}) -> dict[Value, str]:
    """A digest for each value of how it is computed from the region's arguments: `names`, or else their own."""
    keys: dict[Value, str] = {a: _digest("argument", names.get(a, a.name), str(a.type)) for a in region.arguments}
    for op in region.ops:
        operands = [f"constant {v.value!r}" if isinstance(v, Constant) else keys[v] for v in op.operands]
        for r in op.results:
            keys[r] = _digest(op.name, format_attributes(op.attributes), str(r.index), *operands)
    return keys


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _bytes_per_token(value: Value) -> int:
    shape = value.type.shape
    if not shape or isinstance(shape[0], int):
        return 0
    columns = shape[1] if len(shape) == 2 else 1
    return (columns if isinstance(columns, int) else 0) * value.type.dtype.bytes


def _minimum_cut(region: Block, shared: dict[Value, Value], missing: set[Value]) -> list[Value]:
    """The forward values that backward should be given, by a minimum cut over bytes per token.

    Args:
        region: of backward.
        shared: its values that forward has, too, and what they are there.
        missing: those of them, and arguments, that nobody has kept.
    """
    import networkx as nx  # only here: importing it takes longer than most pipelines

    graph = nx.DiGraph()
    graph.add_nodes_from(["source", "sink"])
    ids = {v: i for i, v in enumerate([*region.arguments, *(r for op in region.ops for r in op.results)])}

    def available(value: Value) -> bool:
        return isinstance(value, BlockArgument) or value in shared

    def limit(value: Value, size: int) -> dict[str, int]:
        """What it costs to keep a value: without a limit, it is not cut."""
        return {} if value in missing else {"capacity": size}

    for value, number in ids.items():
        if not available(value):
            continue
        if isinstance(value, BlockArgument):
            graph.add_edge("source", ("in", number))
            graph.add_edge(("in", number), ("out", number), **limit(value, 0))  # lives anyway
            continue
        graph.add_edge(("in", number), ("out", number), **limit(value, _bytes_per_token(value)))
        assert isinstance(value, OpResult)
        if isinstance(value.op, row.TopK):
            graph.add_edge("source", ("in", number))
        else:
            for operand in value.op.operands:
                if not isinstance(operand, Constant):
                    graph.add_edge(("out", ids[operand]), ("in", number))
    for op in region.ops:
        if any(r in shared for r in op.results):
            continue
        for operand in op.operands:
            if operand in ids and available(operand):
                graph.add_edge(("out", ids[operand]), "sink")

    try:
        _, (reachable, _) = nx.minimum_cut(graph, "source", "sink")
    except nx.NetworkXUnbounded:
        raise NotKeptError("choose-saved: backward needs more than what forward has kept for it") from None
    cut = [
        value
        for value, number in ids.items()
        if value in shared and ("in", number) in reachable and ("out", number) not in reachable
    ]
    return cut


def _name(forward: Function, kernel: RowProgram, value: Value) -> str:
    """What the forward function calls a value of its kernel when it hands it out: the same for every backward."""
    assert kernel.region is not None
    returned = kernel.region.terminator.operands
    if value in returned:
        result = kernel.results[returned.index(value)]
        if result in forward.returned:
            return forward.result_names[forward.returned.index(result)]
    alike = [r for op in kernel.region.ops for r in op.results if r.name == value.name]
    number = alike.index(value) if value in alike else 0
    name = f"saved_{value.name or 'value'}" + (f"_{number}" if number else "")
    while name in forward.result_names:  # somebody declared a result of this name
        name += "_"
    return name


def _as_returned(kernel: RowProgram, value: Value) -> Value:
    """The value, or what the kernel hands out anyway and holds the same: integers in another type."""
    assert kernel.region is not None
    returned = kernel.region.terminator.operands
    if value not in returned and not value.type.dtype.is_float:
        for op in kernel.region.users(value):
            if isinstance(op, math.Cast) and op.y in returned and not op.y.type.dtype.is_float:
                return op.y
    return value


def _expose(forward: Function, value: Value, name: str) -> None:
    """Makes a value of the forward kernel's region a result of the function, if it is none yet."""
    if name in forward.result_names:
        return
    kernel = _row_program(forward)
    assert kernel is not None and kernel.region is not None
    body = forward.body
    terminator = kernel.region.terminator
    if value not in terminator.operands:
        terminator.operands.append(value)
        wider = RowProgram(
            kernel.operands,
            kernel.attributes,
            region=kernel.region,
            location=kernel.location,
            result_names=[*(r.name for r in kernel.results), value.name],
        )
        body.replace(dict(zip(kernel.results, wider.results, strict=False)))
        body.ops[body.ops.index(kernel)] = wider
        wider.parent = body
        kernel = wider
    body.terminator.operands.append(kernel.results[terminator.operands.index(value)])
    forward.result_names.append(name)

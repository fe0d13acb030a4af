"""``plan-workspace``: kernels become launches over buffers; values that stay inside get a place in one workspace.

What is accumulated is written into the input it is added to. Buffers of the workspace are assigned to slots: a buffer
may take over a slot of the same size once the slot's last reader has run. Sizes are affine in symbols known at launch;
nothing is sized by data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.ir.core import Block, Constant, Function, Module, Op, OpResult, Value, Yield
from moesaic.ir.ops import slot
from moesaic.ir.ops.kernel import (
    ColFinish,
    DispatchCount,
    DispatchKernel,
    DispatchScatter,
    Product,
    RowProgram,
    Wgrad,
)
from moesaic.ir.ops.launch import Alloc, Kernel
from moesaic.ir.types import TensorType
from moesaic.passes.manager import Pass, PassContext


@dataclass(frozen=True)
class PlanWorkspace(Pass):
    """Rewrites each function from ``kernel.`` values to ``launch.`` buffers."""

    name: ClassVar[str] = "plan-workspace"
    requires: ClassVar[str | None] = "fused"
    establishes: ClassVar[str | None] = "planned"

    def run(self, module: Module, context: PassContext) -> bool:
        changed = False
        for function in module.functions:
            changed |= _plan(function)
        return changed


def _plan(function: Function) -> bool:
    body = function.body
    kernels = body.ops[:-1]
    if not kernels:
        return False
    terminator = body.terminator
    slots = _Slots(body)
    symbols: set[str] = set()
    body.ops = []
    buffers: dict[Value, Value] = {}
    for index, op in enumerate(kernels):
        written: list[Value] = []
        into = _written_inputs(op)
        for value in op.results:
            if value in into:
                buffers[value] = into[value]
                written.append(into[value])
                continue
            returned = value in terminator.operands
            alloc = Alloc(
                [],
                {
                    "type": str(value.type),
                    "space": "result" if returned else "workspace",
                    **({} if returned else {"slot": slots.take(value.type, index, _last_use(kernels, value))}),
                },
                result_names=[value.name],
            )
            body.append(alloc)
            buffers[value] = alloc.results[0]
            written.append(alloc.results[0])
        body.append(_launch(function.name, op, [buffers.get(v, v) for v in op.operands], written, symbols))
    terminator.operands = [v if isinstance(v, Constant) else buffers.get(v, v) for v in terminator.operands]
    body.append(terminator)
    return True


def _written_inputs(op: Op) -> dict[Value, Value]:
    """The results of a kernel that are written into its operands, and these."""
    found: dict[Value, Value] = {}
    if op.region is not None:
        for value, inside in zip(op.results, op.region.terminator.operands, strict=True):
            if isinstance(inside, OpResult) and isinstance(inside.op, slot.Accumulate):
                arguments: list[Value] = [*op.region.arguments]
                found[value] = op.operands[arguments.index(inside.op.main)]
    return found


def _launch(function: str, op: Op, read: list[Value], written: list[Value], symbols: set[str]) -> Kernel:
    template = op.name.removeprefix("kernel.")
    symbol, number = f"{function}_{_suffix(op)}", 2
    while symbol in symbols:
        symbol = f"{function}_{_suffix(op)}{number}"
        number += 1
    symbols.add(symbol)
    region = op.region
    if isinstance(op, DispatchKernel):
        region = Block()
        region.append(Yield([]))
    return Kernel(
        [*read, *written],
        {
            "symbol": symbol,
            "template": template,
            "reads": len(read),
            **({"blocks": op.blocks} if isinstance(op, RowProgram | DispatchCount) else {}),
            **({"partials": op.partials} if isinstance(op, ColFinish) else {}),
            **({"facts": _facts(op)} if isinstance(op, DispatchKernel) else {}),
        },
        region=region,
        location=op.location,
    )


def _suffix(op: Op) -> str:
    """What a kernel does, in a word: the end of its name."""
    if isinstance(op, Product | Wgrad) and op.region is not None:
        product = next((o for o in op.region.ops if isinstance(o, slot.Product)), None)
        if product is not None:
            return product.weight.name or "product"
        return next((v.name for v in op.region.terminator.operands if v.name), "wgrad")
    return {"row_program": "rows", "col_finish": "finish"}.get(op.name.removeprefix("kernel."), op.name.split(".")[1])


def _facts(op: DispatchKernel) -> tuple[str, ...]:
    facts = {"experts": op.experts, "align": op.align, "capacity": float(op.capacity), "pad": int(op.pad)}
    if isinstance(op, DispatchScatter):
        declared = op.as_declared()
        facts |= {"slots_per_token": declared.slots_per_token, "more_slots": declared.more_slots}
    return tuple(f"{name}={value!r}" for name, value in facts.items())


def _last_use(kernels: list[Op], value: Value) -> int:
    """The last kernel that touches a value: the one that writes it, if none reads it."""
    return max(i for i, op in enumerate(kernels) if value in op.operands or value in op.results)


class _Slots:
    """Workspace slots: the type size each holds and until which kernel it is taken."""

    def __init__(self, body: Block) -> None:
        self._slots: list[tuple[str, int]] = []

    def take(self, type: TensorType, first: int, last: int) -> int:
        # Two buffers of one size share a slot if the earlier is read for the last time before the later is written.
        size = f"{'x'.join(map(str, type.shape))}*{type.dtype.bytes}"
        for number, (held, until) in enumerate(self._slots):
            if held == size and until < first:
                self._slots[number] = (size, last)
                return number
        self._slots.append((size, last))
        return len(self._slots) - 1

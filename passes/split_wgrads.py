"""The gradient of a weight that all tokens have in common keeps many multiprocessors busy, where its tiles are few: the
sum over tokens is taken in parts."""

from __future__ import annotations

import math as python_math
from collections.abc import Callable

from moesaic.ir.core import Block, BlockArgument, Function, Value, Yield
from moesaic.ir.ops import slot
from moesaic.ir.ops.launch import Alloc, Kernel
from moesaic.passes.product_shape import ProductShape

MULTIPROCESSORS = 132
"""Of an H100 or an H200. It is no question to the card: how a sum is split decides on its bits, which a layer has
alike on all cards that run the same kernels. An A100 with its 108 has some of the parts in a second round."""

MOST_PARTS = {"few": 4, "many": 16}
"""By what is known of T. A thread that adds parts up waits for all of them at once, and 16 are 64 registers. Of few
tokens, a part would have too few to be worth the memory it goes through."""


def split_wgrads(function: Function, shape_of: Callable[[Kernel], ProductShape], tokens: str) -> None:
    """Makes two kernels of each gradient that `parts_by_rule` splits: one for the sums of parts, and one that adds them
    up and does what followed.

    Functions are planned without a target; so this is left to ``specialize``.

    Args:
        function: a planned one.
        shape_of: the tile that the rule has for a gradient. What is tuned has no say: it may not change bits.
        tokens: few or many.
    """
    kernels = [op for op in function.body.ops if isinstance(op, Kernel)]
    symbols = {op.symbol for op in kernels}
    slots = [op.slot for op in function.body.ops if isinstance(op, Alloc) and op.space == "workspace"]
    slot_of: dict[int, int] = {}  # by elements: parts are added up at once, and the next gradient's may lie there
    for op in kernels:
        wgrad = splits(op)
        parts = 1 if wgrad is None else parts_by_rule(wgrad, shape_of(op), tokens)
        if wgrad is None or parts == 1:
            continue
        size = parts * python_math.prod(wgrad.sizes())
        number = slot_of.setdefault(size, max(slots, default=-1) + 1 + len(slot_of))
        _split(function.body, op, wgrad, parts, number, _unused(f"{op.symbol}_sum", symbols))


def splits(op: Kernel) -> slot.Wgrad | None:
    """The sum over tokens that a kernel may take in parts: it has no other sums of rows beside it."""
    if op.template != "wgrad" or op.region is None:
        return None
    found = [inner for inner in op.region.ops if isinstance(inner, slot.Wgrad)]
    alone = not any(isinstance(inner, slot.ExpertSums) for inner in op.region.ops)
    read = all(isinstance(v, BlockArgument) and v.type.leading == "T" for w in found for v in (w.a, w.b))
    return found[0] if len(found) == 1 and alone and read else None


def parts_by_rule(wgrad: slot.Wgrad, shape: ProductShape, tokens: str) -> int:
    """A power of two, so many that the blocks of all parts run at once; 1 where blocks of the whole keep more than half
    of the multiprocessors busy."""
    blocks = shape.blocks_of_matrix(*wgrad.sizes())
    if 2 * blocks > MULTIPROCESSORS:
        return 1
    parts = MOST_PARTS[tokens]
    while parts * blocks > MULTIPROCESSORS * shape.blocks:
        parts //= 2
    return parts


def _split(body: Block, op: Kernel, wgrad: slot.Wgrad, parts: int, number: int, symbol: str) -> None:
    region = op.region
    assert region is not None
    given: dict[Value, Value] = dict(zip(region.arguments, op.operands, strict=False))
    name = next((v.name for v in region.terminator.operands if v.name), wgrad.y.name) or "wgrad"

    first = Block()
    operands = [first.add_argument(v.type, v.name) for v in (wgrad.a, wgrad.b)]
    sums = slot.WgradParts(operands, {"parts": parts}, result_names=[wgrad.y.name], location=wgrad.location)
    first.append(sums)
    first.append(Yield([sums.y]))

    last = Block()
    others = [a for a in region.arguments if any(user is not wgrad for user in region.users(a))]
    total = slot.SumParts(
        [last.add_argument(sums.y.type, f"{name}_parts")], result_names=[wgrad.y.name], location=wgrad.location
    )
    last.append(total)
    mapping: dict[Value, Value] = {a: last.add_argument(a.type, a.name) for a in others}
    mapping[wgrad.y] = total.y
    for inner in region.ops:
        if inner is not wgrad:
            last.append(inner.clone(mapping))

    buffer = Alloc(
        [],
        {"type": str(sums.y.type), "space": "workspace", "slot": number},
        result_names=[f"{name}_parts"],
        location=op.location,
    )
    wgrad_kernel = Kernel(
        [*(given[v] for v in (wgrad.a, wgrad.b)), buffer.buffer],
        {"symbol": op.symbol, "template": "wgrad", "reads": 2},
        region=first,
        location=op.location,
    )
    sum_kernel = Kernel(
        [buffer.buffer, *(given[a] for a in others), *op.written],
        {"symbol": symbol, "template": "sum_parts", "reads": 1 + len(others)},
        region=last,
        location=op.location,
    )
    at = body.ops.index(op)
    body.ops.remove(op)
    for offset, made in enumerate((buffer, wgrad_kernel, sum_kernel)):
        body.insert(at + offset, made)


def _unused(symbol: str, taken: set[str]) -> str:
    """A symbol like that which no kernel has yet."""
    found, number = symbol, 2
    while found in taken:
        found, number = f"{symbol}{number}", number + 1
    taken.add(found)
    return found

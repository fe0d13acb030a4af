"""Shared by passes: walking all blocks, replacing ops, inserting new ones in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from moesaic.ir.core import Block, Module, Op, Value


def blocks(module: Module) -> Iterator[Block]:
    """Every function body and every region."""
    for function in module.functions:
        yield function.body
        for op in list(function.body.walk()):
            if op.region is not None:
                yield op.region


def in_every_block(module: Module, rewrite: Callable[[Block], bool]) -> bool:
    """Runs a rewrite that says whether it changed its block on all of them; says whether any did."""
    changed = False
    for block in blocks(module):
        changed |= rewrite(block)
    return changed


@contextmanager
def inserting_before(block: Block, op: Op) -> Iterator[None]:
    """Ops appended to `block` inside the context land right before `op`."""
    index = block.ops.index(op)
    tail = block.ops[index:]
    del block.ops[index:]
    try:
        yield
    finally:
        block.ops.extend(tail)


def replace_op(block: Block, op: Op, values: Sequence[Value]) -> None:
    """Lets `values` stand for the results of `op`, which leaves the block. Names move to values without one."""
    for old, new in zip(op.results, values, strict=True):
        if old.name and not new.name:
            new.name = old.name
    block.replace(dict(zip(op.results, values, strict=True)))
    block.ops.remove(op)
    op.parent = None

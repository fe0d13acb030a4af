"""What code generation hands to compilers and launchers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Argument:
    """One kernel parameter, in order.

    Kinds: ``pointer`` (address of operand `operand`), ``stride`` (elements between rows of operand `operand`),
    ``inner_stride`` (elements between rows of the matrices of operand `operand`), ``tokens`` (T), ``rows`` (the number
    of rows of operand `operand`: of partial rows, of sequences, of slots).
    """

    kind: str
    operand: int = -1


@dataclass(frozen=True)
class GeneratedKernel:
    """CUDA text and how to launch it.

    Attributes:
        symbol: name of the ``extern "C"`` kernel.
        source: the CUDA text; byte-identical for equal IR and configuration.
        arguments: the parameters.
        threads: threads a block.
        rows_per_block: tokens a block handles at a time.
        grid: ``cover`` (as many blocks as the tokens need), ``chunks`` (the same, but at least one: what is written
            for no token, too), ``persistent`` (at most what the GPU holds at once, at least one), ``device`` (as many
            as the GPU holds at once), or ``fixed``.
        blocks, blocks_per_sequence: a fixed grid has the sum of the first and, for each sequence, the second.
        by_sequence: whether each sequence has as many blocks of its own as any other.
        shared_bytes: dynamic shared memory of a block, in bytes.
    """

    symbol: str
    source: str
    arguments: tuple[Argument, ...]
    threads: int
    rows_per_block: int
    grid: str
    blocks: int = 0
    blocks_per_sequence: int = 0
    by_sequence: bool = False
    shared_bytes: int = 0

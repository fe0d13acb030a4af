"""What code generation hands to compilers and launchers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Argument:
    """One kernel parameter, in order.

    Kinds: ``pointer`` (address of operand `operand`), ``stride`` (elements between rows of operand `operand`),
    ``tokens`` (T), ``blocks`` (the number of partial rows of operand `operand`).
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
        rows_per_block: tokens (row programs) or columns (finish kernels) a block handles at a time.
        grid: ``cover`` (as many blocks as the work needs), ``persistent`` (at most what the GPU holds at once) or
            ``columns`` (by the columns of the result).
        columns: columns of the result, for grid ``columns``.
        shared_bytes: dynamic shared memory of a block, in bytes.
    """

    symbol: str
    source: str
    arguments: tuple[Argument, ...]
    threads: int
    rows_per_block: int
    grid: str
    columns: int = 0
    shared_bytes: int = 0

"""What code generation hands to compilers and launchers."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.ir.errors import InternalError


@dataclass(frozen=True)
class TensorMap:
    """How the copy engine finds boxes of an operand [matrices, rows, columns] of 16-bit elements.

    The lines of a box, 128 or 64 bytes each, lie in shared memory with a swizzle of as many bytes; what lies outside
    the operand lands there as zeros, and is not written. Address and strides of the operand are multiples of 16 bytes.
    Where the operand has no rows, the kernel gets a map all zero, and must not use it.

    An operand [rows, columns] with as many rows as a launch says has a map of rows (``tensor_map.cuh``): a box is of a
    run of them, an expert's, and zeros come, or nothing leaves, in place of the rows that follow.

    Attributes:
        columns: elements of a row.
        rows: rows of a matrix; 0: a map of rows.
        matrices: of the operand; 1 where it is [rows, columns].
        box_columns, box_rows: of a box, which lies in one matrix: 64 or 32, and 1 to 256.
        element: ``bf16`` or ``f16``.
    """

    columns: int
    rows: int
    matrices: int
    box_rows: int
    box_columns: int = 64
    element: str = "bf16"

    def __post_init__(self) -> None:
        sizes = self.columns > 0 and self.rows >= 0 and self.matrices > 0
        if (
            not sizes
            or self.box_columns not in (32, 64)
            or not 0 < self.box_rows <= 256
            or self.element not in ("bf16", "f16")
        ):
            raise InternalError(f"the copy engine cannot read by {self}")


@dataclass(frozen=True)
class Argument:
    """One kernel parameter, in order.

    Kinds: ``pointer`` (address of operand `operand`), ``stride`` (elements between rows of operand `operand`),
    ``inner_stride`` (elements between rows of the matrices of operand `operand`), ``tokens`` (T), ``rows`` (the number
    of rows of operand `operand`: of partial rows, of sequences, of slots),
    ``tensor_map`` (`map` of operand `operand`, by value: ``const __grid_constant__ moesaic::TensorMap``; a kernel has 8
    of them at most).
    """

    kind: str
    operand: int = -1
    map: TensorMap | None = None

    def __post_init__(self) -> None:
        if (self.kind == "tensor_map") != (self.map is not None):
            raise InternalError(f"a kernel's argument is a tensor map, or has none: {self}")


ADDRESSES = ("pointer", "tensor_map")
"""Kinds of arguments through which a kernel reaches memory."""


@dataclass(frozen=True)
class FusedOp:
    """An op of a kernel's region: as the comments of the kernel's text write it, and the types of its results."""

    comment: str
    types: str

    def __str__(self) -> str:
        return f"{self.comment} : {self.types}"


@dataclass(frozen=True)
class GeneratedKernel:
    """CUDA text and how to launch it.

    Attributes:
        symbol: name of the ``extern "C"`` kernel.
        source: the CUDA text; byte-identical for equal IR and configuration.
        arguments: the parameters.
        threads: threads a block.
        rows_per_block: tokens a block handles at a time.
        grid: ``cover`` (as many blocks as the tokens need), ``persistent`` (the same, but at most what the GPU holds at
            once), ``clusters`` (whole ones, at most `blocks` blocks and what the GPU holds at once), ``device`` (as
            many as the GPU holds at once), or ``fixed``. All have a block for no token, too: it writes sums of nothing,
            and later kernels may count on its having waited for those before.
        blocks, blocks_per_sequence: a fixed grid has the sum of the first and, for each sequence, the second.
        by_sequence: whether each sequence has as many blocks of its own as any other.
        shared_bytes: dynamic shared memory of a block, in bytes.
        cluster: blocks of a cluster, as the text's ``__cluster_dims__`` say; 1 without. A grid of ``device`` has whole
            clusters.
        ops: the ops of its region in order. The text has no comment of one that no line stands for: a rounding that a
            store does, rows that are gathered as they are fetched.
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
    cluster: int = 1
    ops: tuple[FusedOp, ...] = ()

    @property
    def addressed(self) -> frozenset[int]:
        """Numbers of the operands that the text has an address of."""
        return frozenset(a.operand for a in self.arguments if a.kind in ADDRESSES)

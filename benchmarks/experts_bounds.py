"""What experts must cost at least: FLOPs of live rows, and bytes of device memory.

With R live rows (picks that are here), T tokens, E' experts that have a row, H, I, and 2 bytes a number::

    FLOPs, forward                6 R H I         up 4 R H I, down 2 R H I (not gated: 2 and 2)
    FLOPs, forward + backward    18 R H I         each product has two more in backward
    bytes, forward                W + 2 T H       the matrices of E' experts, W = 3 E' H I; x in, y out
    bytes, forward + backward     2 W + G         both directions read the matrices, G = 3 E H I: their gradients
                                  + 5 T H         x twice, y, the cotangent, the gradient of x
                                  + 4 R I         h = the first product's [R, 2I], written and read

What lies between the kernels (activations, outputs of experts before they are added up, the routing) is not counted: a
kernel may keep it on the chip. The floor is the larger of the FLOPs at the rate of a dense product and the bytes at the
rate of a copy kernel.

A kernel's own floor takes each operand that its text has an address of once (``moesaic/passes/cost.py``): [T, ..]
whole, [M, ..] as far as rows are live, and matrices of experts that have a row (gradients of matrices: all). Its FLOPs
are those of the products in its region.
"""

from __future__ import annotations

from dataclasses import dataclass

from timing import Machine

from moesaic.codegen.kernel import GeneratedKernel
from moesaic.ir.ops.launch import Kernel
from moesaic.passes.cost import Extents, cost_of

NOMINAL_DENSE = 7.0e14
"""FLOPs a second of a dense bf16 product on an H100 where none was measured."""


@dataclass(frozen=True)
class Load:
    """What a routing asks for: tokens, live rows, experts that have one, and the longest of them over the mean."""

    tokens: int
    rows: int
    experts: int
    skew: float


@dataclass(frozen=True)
class Cost:
    """FLOPs and bytes that are needed at least."""

    flops: float
    bytes: float

    def floor_us(self, machine: Machine, dense: float) -> float:
        """Microseconds, with `dense` FLOPs a second."""
        return 1e6 * max(self.flops / dense, self.bytes / machine.bandwidth)

    def limit(self, machine: Machine, dense: float) -> str:
        """Which of the two the floor is made of."""
        return "FLOPs" if self.flops / dense >= self.bytes / machine.bandwidth else "bytes"


def layer_cost(experts: int, hidden: int, intermediate: int, load: Load, backward: bool, element: int = 2) -> Cost:
    """Of gated experts; see the module."""
    matrix = 3 * hidden * intermediate
    flops = 6.0 * load.rows * hidden * intermediate
    tokens = load.tokens * hidden
    if not backward:
        return Cost(flops, element * (load.experts * matrix + 2.0 * tokens))
    numbers = (2 * load.experts + experts) * matrix + 5.0 * tokens + 4.0 * load.rows * intermediate
    return Cost(3 * flops, element * numbers)


def kernel_cost(op: Kernel, kernel: GeneratedKernel, load: Load) -> Cost:
    """Of one launch; see the module."""
    made = cost_of(op, Extents(load.tokens, load.rows, experts=load.experts), kernel.addressed)
    return Cost(made.product_flops, made.bytes)

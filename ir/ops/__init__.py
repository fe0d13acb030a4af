"""Every op, one file a group: importing this package registers them all."""

from moesaic.ir.ops import col, kernel, launch, math, moe, row, slot

__all__ = ["col", "kernel", "launch", "math", "moe", "row", "slot"]

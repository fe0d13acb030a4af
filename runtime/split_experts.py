"""Experts whose activation is somebody else's torch function: the products before and after it, each a layer.

Between them lies h [M, n], rows of slots; rows that are not in use hold anything, before and after the function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from moesaic.ir.builder import Builder
from moesaic.ir.core import Value, create_one
from moesaic.ir.ops.slot import SLOTS, stored
from moesaic.ir.types import DType, tensor
from moesaic.runtime.compile import compile
from moesaic.runtime.layer import CompiledLayer
from moesaic.runtime.made_once import made_once
from moesaic.runtime.reference import DTYPES


def split_experts(
    x: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    matrices: Mapping[str, torch.Tensor],
    function: Callable[[torch.Tensor], torch.Tensor],
    *,
    transposed: bool,
    backend: str = "auto",
) -> torch.Tensor:
    """y_t = sum_k w_{t,k} (V_e f(W_e x_t + b_e) + c_e) with e = i_{t,k}, [T, H] in the type of x.

    Args:
        x: [T, H].
        indices, weights: [T, K]; an id outside [0, E) is not here.
        matrices: ``up`` [E, n, H] and ``down`` [E, H, I] ([E, H, n] and [E, I, H] if `transposed`), perhaps
            ``up_bias`` [E, n] and ``down_bias`` [E, H], all in the type of x.
        function: f, from [M, n] to [M, I], a row at a time.
    """
    dtype, biased = DTYPES[x.dtype].value, "up_bias" in matrices
    common = (dtype, indices.shape[-1], DTYPES[indices.dtype].value)
    before = _before(*common, *matrices["up"].shape, transposed, biased, backend)
    biases = {"up_bias": matrices["up_bias"]} if biased else {}
    h, counts, offsets, tokens, picks, slots = before(x, indices=indices, up=matrices["up"], **biases)
    weighted = DTYPES[weights.dtype].value
    after = _after(*common, weighted, *matrices["down"].shape, transposed, biased, backend)
    biases = {"down_bias": matrices["down_bias"]} if biased else {}
    groups = {"counts": counts, "offsets": offsets, "tokens": tokens, "picks": picks}
    y: torch.Tensor = after(slots, weights=weights, a=function(h), down=matrices["down"], **groups, **biases)[0]
    return y


@made_once
def _before(
    dtype: str,
    top_k: int,
    indices: str,
    experts: int,
    rows: int,
    columns: int,
    transposed: bool,
    biased: bool,
    backend: str,
) -> CompiledLayer:
    hidden, outer = (rows, columns) if transposed else (columns, rows)
    b = Builder("experts_before")
    x = b.input("x", tensor(DType(dtype), "T", hidden))
    ids = b.input("indices", tensor(DType(indices), "T", top_k))
    up = b.input("up", tensor(DType(dtype), experts, rows, columns))
    counts, offsets, tokens, picks, slots, _ = b.op("slot.dispatch", ids, experts=experts)
    gathered = b.op("slot.gather", x, tokens, slots)
    h: Value = b.op("slot.grouped_linear", gathered, up, counts, offsets, transposed=transposed)
    if biased:
        bias = b.input("up_bias", tensor(DType(dtype), experts, outer))
        h = h + create_one("slot.expert_rows", bias, tokens, counts, offsets)
    h = stored(h, DType(dtype))
    return compile(
        b.build(h=h, counts=counts, offsets=offsets, tokens=tokens, picks=picks, slots=slots), backend=backend
    )


@made_once
def _after(
    dtype: str,
    top_k: int,
    indices: str,
    weights: str,
    experts: int,
    rows: int,
    columns: int,
    transposed: bool,
    biased: bool,
    backend: str,
) -> CompiledLayer:
    inner, hidden = (rows, columns) if transposed else (columns, rows)
    b = Builder("experts_after")
    slots = b.input("slots", tensor(DType.I32, "T", top_k))
    factors = b.input("weights", tensor(DType(weights), "T", top_k))
    a = b.input("a", tensor(DType(dtype), SLOTS, inner))
    down = b.input("down", tensor(DType(dtype), experts, rows, columns))
    counts = b.input("counts", tensor(DType.I32, experts))
    offsets = b.input("offsets", tensor(DType.I32, experts + 1))
    tokens = b.input("tokens", tensor(DType.I32, SLOTS))
    picks = b.input("picks", tensor(DType.I32, SLOTS))
    y: Value = b.op("slot.grouped_linear", a, down, counts, offsets, transposed=transposed)
    if biased:
        bias = b.input("down_bias", tensor(DType(dtype), experts, hidden))
        y = y + create_one("slot.expert_rows", bias, tokens, counts, offsets)
    y = b.op("slot.combine", stored(y, DType(dtype)), slots, tokens, factors, picks)
    return compile(b.build(y=stored(y, DType(dtype))), backend=backend)

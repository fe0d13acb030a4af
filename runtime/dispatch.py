"""``moesaic.dispatch`` and ``moesaic.combine``, for people who have expert kernels of their own."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moesaic.ir.builder import Builder
from moesaic.ir.core import Value
from moesaic.ir.errors import InputError, InputTypeError
from moesaic.ir.experts import Experts
from moesaic.ir.ops.slot import SLOTS, stored
from moesaic.ir.types import DType, tensor
from moesaic.runtime.compile import compile
from moesaic.runtime.layer import CompiledLayer
from moesaic.runtime.made_once import made_once
from moesaic.runtime.reference import FLOATS, INDICES


class Dispatch(NamedTuple):
    """Slots for picks: rows in the order of experts. All are int32.

    Attributes:
        counts: [E], slots in use of each expert.
        offsets: [E + 1], first slot of each expert.
        tokens: [M], the token of each slot; -1 where it is not in use.
        picks: [M], the pick t K + k of each slot; -1 where it is not in use.
        slots: [..., K], the slot of each pick; -1 where it has none.
        dropped: [1], picks that found no place within the capacity.
    """

    counts: torch.Tensor
    offsets: torch.Tensor
    tokens: torch.Tensor
    picks: torch.Tensor
    slots: torch.Tensor
    dropped: torch.Tensor


def dispatch(
    indices: torch.Tensor,
    num_experts: int,
    *,
    align: int = 1,
    capacity: float | None = None,
    pad: bool = False,
    backend: str = "auto",
) -> Dispatch:
    """Sorts picks by expert, stably, without a synchronisation and in an order that no race decides.

    ``x[tokens.clamp(min=0)]`` are the rows of experts; M = T K + E (align - 1) bounds how many there can be, or with
    `pad` T ceil(capacity K) + E align.

    Args:
        indices: [..., K], int16, int32 or int64. An id outside [0, E) is not here and gets no slot.
        num_experts: E.
        align: what each expert's first slot is a multiple of: 1, 16, 64 or 128.
        capacity: at most C = min(T, ceil(capacity T K / E)) picks an expert, the first ones; ``None`` for no bound.
        pad: every expert has C slots, in use or not.
        backend: as in ``moesaic.compile``.

    Raises:
        InputError, InputTypeError: an argument that does not fit.
    """
    if not isinstance(indices, torch.Tensor):
        raise InputTypeError(f"indices must be a tensor, found {type(indices).__name__}")
    if indices.dtype not in INDICES:
        raise InputError(f"indices must be int16, int32 or int64, found {str(indices.dtype).removeprefix('torch.')}")
    if indices.dim() < 1 or indices.shape[-1] < 1:
        raise InputError(f"indices must have shape [..., K] with K >= 1, found {list(indices.shape)}")
    layer = _dispatch_layer(INDICES[indices.dtype].value, indices.shape[-1], num_experts, align, capacity, pad, backend)
    return Dispatch(*layer(indices))


def combine(
    x: torch.Tensor, dispatched: Dispatch, weights: torch.Tensor | None = None, *, backend: str = "auto"
) -> torch.Tensor:
    """y_t = sum over k of w_{t,k} x_{slot of (t,k)}, in float32 and in the order of k; [..., n] in the type of x.

    Picks without a slot add nothing, whatever their weight. Gradients flow to x (zeros in slots not in use) and
    weights.

    Args:
        x: [M, n], what experts made of the slots.
        dispatched: of `dispatch`.
        weights: [..., K], float32 or the type of x; ``None`` for ones.
        backend: as in ``moesaic.compile``.

    Raises:
        InputError, InputTypeError: an argument that does not fit.
    """
    if not isinstance(dispatched, Dispatch):
        raise InputTypeError(f"dispatched must be what dispatch gave, found {type(dispatched).__name__}")
    for name, given in (("x", x), *((("weights", weights),) if weights is not None else ())):
        if not isinstance(given, torch.Tensor):
            raise InputTypeError(f"{name} must be a tensor, found {type(given).__name__}")
        if given.dtype not in FLOATS:
            raise InputError(f"{name} must be floats, found {str(given.dtype).removeprefix('torch.')}")
    slots = dispatched.tokens.shape[0]
    if x.dim() != 2 or x.shape[0] != slots or x.shape[1] < 1:
        raise InputError(f"x must have shape [{slots}, n] with n >= 1, found {list(x.shape)}")
    if dispatched.picks.shape[0] != slots:
        raise InputError(f"picks must have shape [{slots}], as tokens have, found {list(dispatched.picks.shape)}")
    weighted = "" if weights is None else FLOATS[weights.dtype].value
    layer = _combine_layer(FLOATS[x.dtype].value, x.shape[1], dispatched.slots.shape[-1], weighted, backend)
    given = {"x": x, "tokens": dispatched.tokens}
    if weights is not None:
        given |= {"picks": dispatched.picks, "weights": weights}
    y: torch.Tensor = layer(dispatched.slots, **given)[0]
    return y


@made_once
def _dispatch_layer(
    indices: str, top_k: int, num_experts: int, align: int, capacity: float | None, pad: bool, backend: str
) -> CompiledLayer:
    Experts(num_experts, 1, 1, capacity=capacity, pad=pad, align=align)  # to which they mean the same, and checks them
    b = Builder("dispatch")
    ids = b.input("indices", tensor(DType(indices), "T", top_k))
    results = b.op("slot.dispatch", ids, experts=num_experts, align=align, capacity=capacity, pad=pad)
    return compile(b.build(**dict(zip(Dispatch._fields, results, strict=True))), backend=backend)


@made_once
def _combine_layer(dtype: str, columns: int, top_k: int, weights: str, backend: str) -> CompiledLayer:
    b = Builder("combine")
    slots = b.input("slots", tensor(DType.I32, "T", top_k))
    x = b.input("x", tensor(DType(dtype), SLOTS, columns))
    tokens = b.input("tokens", tensor(DType.I32, SLOTS))
    weighted: tuple[Value, ...] = ()
    if weights:
        picks = b.input("picks", tensor(DType.I32, SLOTS))
        weighted = (b.input("weights", tensor(DType(weights), "T", top_k)), picks)
    y = b.op("slot.combine", x, slots, tokens, *weighted)
    return compile(b.build(y=stored(y, DType(dtype))), backend=backend)

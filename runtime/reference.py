"""The ``reference`` backend: a function's ops evaluated one by one with torch.

Differentiable through torch autograd over the forward semantics, so that it checks our gradient rules rather than
repeating them. float64 inputs are computed in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moesaic.ir.core import Constant, Function, Value
from moesaic.ir.types import DType

TORCH_DTYPES = {
    DType.BF16: torch.bfloat16,
    DType.F16: torch.float16,
    DType.F32: torch.float32,
    DType.F64: torch.float64,
    DType.I1: torch.bool,
    DType.U8: torch.uint8,
    DType.I16: torch.int16,
    DType.I32: torch.int32,
    DType.I64: torch.int64,
}


class TorchArrays:
    """The array namespace of ``moesaic.ir.arrays`` over torch tensors."""

    exp = staticmethod(torch.exp)
    log = staticmethod(torch.log)
    log1p = staticmethod(torch.log1p)
    sqrt = staticmethod(torch.sqrt)
    tanh = staticmethod(torch.tanh)
    sigmoid = staticmethod(torch.sigmoid)
    abs = staticmethod(torch.abs)
    maximum = staticmethod(torch.maximum)
    minimum = staticmethod(torch.minimum)
    where = staticmethod(torch.where)
    isnan = staticmethod(torch.isnan)

    @staticmethod
    def softplus(x: torch.Tensor) -> torch.Tensor:
        # torch's softplus switches to the identity above a threshold; this is the exact form at every x.
        return torch.logaddexp(x, torch.zeros((), dtype=x.dtype, device=x.device))

    @staticmethod
    def detach(x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def upcast(x: torch.Tensor) -> torch.Tensor:
        return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x

    @staticmethod
    def cast(x: torch.Tensor, dtype: DType) -> torch.Tensor:
        if dtype.is_float and x.dtype == torch.float64:
            return x  # a float64 reference stays exact
        return x.to(TORCH_DTYPES[dtype])

    @staticmethod
    def constant(value: float, like: torch.Tensor) -> torch.Tensor:
        dtype = like.dtype if like.dtype.is_floating_point else torch.float32
        return torch.full((), value, dtype=dtype, device=like.device)  # unlike torch.tensor, no copy from the host

    @staticmethod
    def zeros(shape: Sequence[int], dtype: DType, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=TORCH_DTYPES[dtype], device=like.device)

    @staticmethod
    def broadcast_to(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        return x.expand(tuple(shape))

    @staticmethod
    def sum(x: torch.Tensor, axis: int) -> torch.Tensor:
        return x.sum(axis, dtype=x.dtype)

    @staticmethod
    def max(x: torch.Tensor, axis: int) -> torch.Tensor:
        return x.amax(axis)

    @staticmethod
    def expand_dims(x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(-1)

    @staticmethod
    def reshape(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        return x.reshape(tuple(shape))

    @staticmethod
    def shape(x: torch.Tensor) -> tuple[int, ...]:
        return tuple(x.shape)

    @staticmethod
    def argsort_descending(x: torch.Tensor) -> torch.Tensor:
        return torch.sort(x, dim=-1, descending=True, stable=True).indices

    @staticmethod
    def take(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        inside, places = _inside(indices, x.shape[-1])
        return torch.gather(x, -1, places).masked_fill(~inside, 0)

    @staticmethod
    def put(indices: torch.Tensor, values: torch.Tensor, size: int) -> torch.Tensor:
        inside, places = _inside(indices, size)
        zeros = torch.zeros((*values.shape[:-1], size), dtype=values.dtype, device=values.device)
        return zeros.scatter_add(-1, places, values.masked_fill(~inside, 0))

    @staticmethod
    def take_vector(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        inside, places = _inside(indices, x.shape[0])
        return x[places].masked_fill(~inside, 0)

    @staticmethod
    def count(indices: torch.Tensor, size: int) -> torch.Tensor:
        # Not bincount: its size depends on data, which stops a GPU's queue and cannot be traced.
        inside, places = _inside(indices, size)
        zeros = torch.zeros((*indices.shape[:-1], size), dtype=torch.int64, device=indices.device)
        return zeros.scatter_add(-1, places, inside.long())


def _inside(indices: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which indices lie in [0, size), and all of them as int64 with the others brought there."""
    places = indices.long()
    return (places >= 0) & (places < size), places.clamp(0, size - 1)


def evaluate(function: Function, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The results of a function of declared ops (``math.``, ``row.``, ``col.``) on tensors given by input name."""
    xp: Any = TorchArrays()
    values: dict[Value, torch.Tensor] = {a: inputs[a.name] for a in function.arguments}
    like = next(iter(values.values()))

    def read(value: Value) -> torch.Tensor:
        if isinstance(value, Constant):
            wide = any(v.dtype == torch.float64 for v in values.values())
            return torch.full((), value.value, dtype=torch.float64 if wide else torch.float32, device=like.device)
        return values[value]

    for op in function.body.ops[:-1]:
        computed = op.reference(xp, *(read(v) for v in op.operands))
        results = computed if isinstance(computed, tuple) else (computed,)
        values.update(zip(op.results, results, strict=True))
    return [read(v) for v in function.returned]

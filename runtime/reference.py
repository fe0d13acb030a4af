"""The ``reference`` backend: a function's ops evaluated one by one with torch.

Differentiable through torch autograd over the forward semantics, so that it checks our gradient rules rather than
repeating them. float64 inputs are computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from moesaic.ir.core import Constant, Function, Value
from moesaic.ir.types import DType

_LARGEST = torch.finfo(torch.float32).max
_ROUNDS_TO_INFINITY = 2.0**128 - 2.0**103  # the smallest number that does, in float32

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

DTYPES = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}
FLOATS = {torch_dtype: dtype for torch_dtype, dtype in DTYPES.items() if dtype.is_float}
INDICES = {t: DTYPES[t] for t in (torch.int16, torch.int32, torch.int64)}
"""What ids of experts may be."""


class TorchArrays:
    """The array namespace of ``moesaic.ir.arrays`` over torch tensors."""

    exp = staticmethod(torch.exp)
    log = staticmethod(torch.log)
    log1p = staticmethod(torch.log1p)
    sqrt = staticmethod(torch.sqrt)
    tanh = staticmethod(torch.tanh)
    erf = staticmethod(torch.erf)
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
        return _scalar(value, like.dtype if like.dtype.is_floating_point else torch.float32, like.device)

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
    def cumsum(x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(-1, dtype=x.dtype)

    @staticmethod
    def concatenate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.cat([a, b], -1)

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
        if not x.shape[0]:  # concatenated, so that x gets a gradient
            return torch.cat([x, x.new_zeros(indices.numel())]).reshape(indices.shape)
        inside, places = _inside(indices, x.shape[0])
        return _summable(x)[places].masked_fill(~inside, 0).to(x.dtype)

    @staticmethod
    def count(indices: torch.Tensor, size: int) -> torch.Tensor:
        # Not bincount: its size depends on data, which stops a GPU's queue and cannot be traced.
        inside, places = _inside(indices, size)
        zeros = torch.zeros((*indices.shape[:-1], size), dtype=torch.int64, device=indices.device)
        return zeros.scatter_add(-1, places, inside.long())

    @staticmethod
    def take_rows(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        if not x.shape[0]:
            return torch.cat([x, x.new_zeros((indices.shape[0], x.shape[1]))])
        inside, places = _inside(indices, x.shape[0])
        return _summable(x)[places].masked_fill(~inside.unsqueeze(-1), 0).to(x.dtype)

    @staticmethod
    def sum_rows(x: torch.Tensor, indices: torch.Tensor, size: int) -> torch.Tensor:
        inside, places = _inside(indices, size)
        zeros = torch.zeros((size, x.shape[1]), dtype=x.dtype, device=x.device)
        return zeros.index_add(0, places, x.masked_fill(~inside.unsqueeze(-1), 0))

    @staticmethod
    def group_of_rows(counts: torch.Tensor, offsets: torch.Tensor, rows: int) -> torch.Tensor:
        row = torch.arange(rows, device=counts.device)
        group = torch.searchsorted(offsets[1:].long(), row, right=True).clamp(max=counts.shape[0] - 1)
        return torch.where(row < offsets[group] + counts[group], group, -1)

    @staticmethod
    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    @staticmethod
    def transpose(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(-1, -2)

    @staticmethod
    def grouped_matmul(
        x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        if _is_traced(counts):
            group = TorchArrays.group_of_rows(counts, offsets, x.shape[0])
            y = x.new_zeros((x.shape[0], weight.shape[-1]))
            for expert in range(weight.shape[0]):
                matrix = torch.where(counts[expert] > 0, weight[expert], 0.0)  # whatever one holds that nobody picks
                y = torch.where((group == expert).unsqueeze(-1), x @ matrix, y)
            return y
        parts = []
        done = 0
        each = weight.unbind()  # whose gradients become one by a stack; those of slices are added up, each as large
        for expert, (first, last) in _groups(counts, offsets):
            parts += [x.new_zeros((first - done, weight.shape[-1])), x[first:last] @ each[expert]]
            done = last
        return torch.cat([*parts, x.new_zeros((x.shape[0] - done, weight.shape[-1]))])

    @staticmethod
    def grouped_outer(a: torch.Tensor, b: torch.Tensor, counts: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        if _is_traced(counts):
            group = TorchArrays.group_of_rows(counts, offsets, a.shape[0])
            groups = [(group == expert).unsqueeze(-1) for expert in range(counts.shape[0])]
            return torch.stack([a.masked_fill(~mine, 0).T @ b.masked_fill(~mine, 0) for mine in groups])
        return torch.stack([a[first:last].T @ b[first:last] for _, (first, last) in _groups(counts, offsets)])


def _inside(indices: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which indices lie in [0, size), and all of them as int64 with the others brought there."""
    places = indices.long()
    return (places >= 0) & (places < size), places.clamp(0, size - 1)


def _summable(x: torch.Tensor) -> torch.Tensor:
    """A row that is taken several times gets a sum of gradients: of 16 bits each, in float32, rounded once."""
    return x.float() if x.is_floating_point() and x.element_size() == 2 else x


def _is_traced(counts: torch.Tensor) -> bool:
    """Whether there are no numbers yet, because torch.compile makes a graph: groups are then not cut out, but all rows
    go through all experts, which is right and slow."""
    return torch.compiler.is_compiling() or torch._guards.detect_fake_mode((counts,)) is not None


def _groups(counts: torch.Tensor, offsets: torch.Tensor) -> Iterator[tuple[int, tuple[int, int]]]:
    """Number, first row and end of each group. Reads them on the host: the reference may."""
    for number, (count, first) in enumerate(zip(counts.tolist(), offsets.tolist(), strict=False)):
        yield number, (first, first + count)


def _scalar(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A number as a tensor; one that float32 cannot hold is rounded, as a kernel does, where torch refuses."""
    if dtype == torch.float32 and abs(value) > _LARGEST:
        value = math.copysign(_LARGEST if abs(value) < _ROUNDS_TO_INFINITY else math.inf, value)
    return torch.full((), value, dtype=dtype, device=device)  # unlike torch.tensor, no copy from the host


def evaluate(function: Function, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The results of a function of declared ops (``math.``, ``row.``, ``col.``, ``slot.``) on tensors by input name."""
    xp: Any = TorchArrays()
    values: dict[Value, torch.Tensor] = {a: inputs[a.name] for a in function.arguments}
    like = next(iter(values.values()))

    def read(value: Value) -> torch.Tensor:
        if isinstance(value, Constant):
            wide = any(v.dtype == torch.float64 for v in values.values())
            return _scalar(value.value, torch.float64 if wide else torch.float32, like.device)
        return values[value]

    # Types are those of the IR: autocast would multiply float32 operands in another.
    with torch.autocast(like.device.type, enabled=False):
        for op in function.body.ops[:-1]:
            computed = op.reference(xp, *(read(v) for v in op.operands))
            results = computed if isinstance(computed, tuple) else (computed,)
            values.update(zip(op.results, results, strict=True))
    return [read(v) for v in function.returned]

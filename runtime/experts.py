"""What ``moesaic.compile`` makes of ``Experts``: a function of tokens, picks, weights of picks, and matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moesaic.codegen.target import Target
from moesaic.ir.errors import InputError
from moesaic.ir.experts import Experts
from moesaic.ir.types import DType
from moesaic.runtime.layer import CompiledLayer, check_can_pickle, result_type
from moesaic.runtime.made_once import by_handle, handle_of, made_once
from moesaic.runtime.per_call import PerCall, autocast_dtype, check_slots, check_tensor, shown
from moesaic.runtime.reference import FLOATS, INDICES


@made_once
def _layer(
    handle: str,
    dtype: str,
    top_k: int,
    indices: str,
    weights: str,
    target: str | None,
    backend: str,
    passes: str,
    tune: bool,
) -> CompiledLayer:
    declared: Experts = by_handle(handle)
    module = declared.module(DType(dtype), top_k, DType(indices), DType(weights))
    return CompiledLayer(module, None if target is None else Target.parse(target), backend, passes, tune)


class CompiledExperts(PerCall):
    """Experts that run on tensors.

    Call it with x [..., H], the picks [..., K] (int16, int32 or int64; an id outside [0, E) is not here), the weights
    of picks [..., K] (float32, or the type of x), and the matrices as declared; biases follow, or go by name. The
    result is [..., H] in the type of x, or a tuple with a field for each of ``outputs`` if others than ``hidden`` were
    declared. Gradients flow to x, the weights of picks, the matrices and the biases; every one that is asked for is
    given, zeros where no token went. K is that of each call. Under autocast, x, matrices and biases are cast to its
    type."""

    def __init__(
        self, declared: Experts, target: Target | None, backend: str, passes: str = "", tune: bool = False
    ) -> None:
        matrices = (*declared.up_names, "down_proj")
        biases = (f"{name}_bias" for name in matrices if declared.bias)
        super().__init__("layer of experts", (*matrices, *biases), target, backend, passes, tune)
        self._declared = declared
        self._handle = handle_of(declared)
        self._result_type = result_type("ExpertsResult", declared.outputs)

    def __reduce__(self) -> tuple[Any, ...]:
        check_can_pickle("activation", self._declared.activation)
        check_can_pickle("gating", self._declared.gating)
        return _restore, (self._declared, self._target, self._asked, self._passes, self._tune)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledExperts:
        return _restore(self._declared, self._target, self._asked, self._passes, self._tune)

    # ------------------------------------------------------------------------------------------------- running

    def __call__(
        self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, *parameters: torch.Tensor, **named: Any
    ) -> Any:
        """Runs the experts; see the class.

        Raises:
            InputTypeError: an input is missing, was not declared, or is not a tensor.
            InputError: an input has the wrong shape, dtype or device.
        """
        given = self._by_name(("x", "indices", "weights"), parameters, named)
        main_grads = given.pop("main_grads", None)
        for name, tensor in (("x", x), ("indices", indices), ("weights", weights), *given.items()):
            check_tensor(name, tensor)
        dtype = autocast_dtype(x)
        if dtype is not None:
            x = x.to(dtype)
            given = {name: tensor.to(dtype) for name, tensor in given.items()}
        kind = (x.dtype, indices.dtype, weights.dtype, indices.shape[-1:])
        layer = self._layer_of(kind, lambda: self._layer_for(x, indices, weights))
        if not torch.compiler.is_compiling():
            check_slots(self._declared, indices.numel() // indices.shape[-1], indices.shape[-1])
        if main_grads is not None:
            given["main_grads"] = main_grads
        result = layer(x, indices=indices, weights=weights, **given)
        return result[0] if len(self._declared.outputs) == 1 else self._result_type(*result)

    def _layer_for(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> CompiledLayer:
        declared = self._declared
        dtype = self._check_x(x, declared.dtype)
        if indices.dtype not in INDICES:
            raise InputError(f"indices must be int16, int32 or int64, found {shown(indices.dtype)}")
        if weights.dtype not in FLOATS:
            raise InputError(f"weights must be floats, found {shown(weights.dtype)}")
        if indices.dim() < 1 or indices.shape[-1] < 1:
            raise InputError(f"indices must have shape [..., K] with K >= 1, found {list(indices.shape)}")
        return _layer(
            self._handle,
            dtype,
            indices.shape[-1],
            INDICES[indices.dtype].value,
            FLOATS[weights.dtype].value,
            self._target,
            self._asked,
            self._passes,
            self._tune,
        )

    def warmup(
        self,
        device: torch.device | str = "cuda",
        *,
        top_k: int,
        dtype: torch.dtype | str | None = None,
        indices_dtype: str = "int32",
        weights_dtype: str = "fp32",
        backward: bool = True,
        frozen: Sequence[str] = (),
    ) -> None:
        """Lowers, compiles and loads everything a call needs, for contiguous inputs on a device, whatever T.

        Call it before capturing a CUDA graph.

        Args:
            device: where the experts will run.
            top_k: K.
            dtype: of x; needed if they were declared without one.
            indices_dtype, weights_dtype: of the picks and of their weights.
            backward: also prepare the backward function.
            frozen: matrices that take no gradient.
        """
        self._used = self.layer(top_k, dtype=dtype, indices_dtype=indices_dtype, weights_dtype=weights_dtype)
        self._used.warmup(device, backward=backward, frozen=frozen)

    def layer(
        self,
        top_k: int,
        *,
        dtype: torch.dtype | str | None = None,
        indices_dtype: str = "int32",
        weights_dtype: str = "fp32",
    ) -> CompiledLayer:
        """What calls with such inputs run: a layer that can be looked into.

        Raises:
            InputError: no dtype was declared, and none is given.
        """
        asked = self._asked_dtype(dtype, self._declared.dtype)
        first, second, third = (DType.parse(t).value for t in (asked, indices_dtype, weights_dtype))
        return _layer(self._handle, first, top_k, second, third, self._target, self._asked, self._passes, self._tune)

    def __repr__(self) -> str:
        return f"CompiledExperts({self._declared}, backend={self.backend!r})"


def _restore(declared: Experts, target: str | None, backend: str, passes: str, tune: bool) -> CompiledExperts:
    return CompiledExperts(declared, None if target is None else Target.parse(target), backend, passes, tune)

"""What ``moesaic.compile`` makes of ``Experts``: a function of tokens, picks, weights of picks, and matrices."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from moesaic.codegen.target import Target
from moesaic.ir.errors import InputError, InputTypeError
from moesaic.ir.experts import Experts
from moesaic.ir.ops.slot import slots_needed
from moesaic.ir.types import DType
from moesaic.runtime import compile as compiling
from moesaic.runtime.made_once import made_once
from moesaic.runtime.reference import TORCH_DTYPES

if TYPE_CHECKING:
    from moesaic.codegen.kernel import GeneratedKernel
    from moesaic.codegen.resources import Resources
    from moesaic.runtime.memory import Memory

_INDICES = {torch.int16: "i16", torch.int32: "i32", torch.int64: "i64"}
_FLOATS = {t: d.value for d, t in TORCH_DTYPES.items() if d.is_float}
_MOST = 2**31 - 1
"""Picks and slots are numbered in 32 bits."""


@made_once
def _layer(
    experts: Experts, dtype: str, top_k: int, indices: str, weights: str, target: str | None, backend: str
) -> compiling.CompiledLayer:
    module = experts.module(DType(dtype), top_k, DType(indices), DType(weights))
    return compiling.CompiledLayer(module, None if target is None else Target.parse(target), backend)


class CompiledExperts:
    """Experts that run on tensors.

    Call it with x [..., H], the picks [..., K] (int16, int32 or int64; an id outside [0, E) is not here), the weights
    of picks [..., K] (float32, or the type of x), and the matrices as declared; biases follow, or go by name. The
    result is [..., H] in the type of x, or a tuple with a field for each of ``outputs`` if others than ``hidden`` were
    declared. Gradients flow to x, the weights of picks, the matrices and the biases; every one that is asked for is
    given, zeros where no token went. K is that of each call. Under autocast, x, matrices and biases are cast to its
    type."""

    def __init__(self, declared: Experts, target: Target | None, backend: str) -> None:
        self._declared = declared
        self._target = None if target is None else target.name
        self._asked = backend
        matrices = (*declared.up_names, "down_proj")
        self._parameters = (*matrices, *(f"{name}_bias" for name in matrices if declared.bias))
        self._result_type = namedtuple("ExpertsResult", declared.outputs)  # type: ignore[misc]
        self._used: compiling.CompiledLayer | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        compiling.check_can_pickle("activation", self._declared.activation)
        compiling.check_can_pickle("gating", self._declared.gating)
        return _restore, (self._declared, self._target, self._asked)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledExperts:
        return _restore(self._declared, self._target, self._asked)

    # ------------------------------------------------------------------------------------------------- running

    def __call__(
        self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, *parameters: torch.Tensor, **named: Any
    ) -> Any:
        """Runs the experts; see the class.

        Raises:
            InputTypeError: an input is missing, was not declared, or is not a tensor.
            InputError: an input has the wrong shape, dtype or device.
        """
        given = self._named(parameters, named)
        for name, tensor in (("x", x), ("indices", indices), ("weights", weights), *given.items()):
            if not isinstance(tensor, torch.Tensor):
                raise InputTypeError(f"{name} must be a tensor, found {type(tensor).__name__}")
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x = x.to(dtype)
            given = {name: tensor.to(dtype) for name, tensor in given.items()}
        layer = self._layer_for(x, indices, weights)
        if not torch.compiler.is_compiling():
            self._used = layer
        result = layer(x, indices=indices, weights=weights, **given)
        return result[0] if len(self._declared.outputs) == 1 else self._result_type(*result)

    def _named(self, parameters: tuple[torch.Tensor, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        if len(parameters) > len(self._parameters):
            raise InputTypeError(
                f"expected x, indices, weights, {', '.join(self._parameters)}; found {3 + len(parameters)} inputs"
            )
        given = dict(zip(self._parameters, parameters, strict=False))
        for name, tensor in named.items():
            if name in given:
                raise InputTypeError(f"input {name!r} is given twice, by place and by name")
            given[name] = tensor
        return given

    def _layer_for(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> compiling.CompiledLayer:
        declared = self._declared
        if declared.dtype is not None and x.dtype != torch.float64:
            wanted = DType.parse(declared.dtype)
            if x.dtype != TORCH_DTYPES[wanted]:
                raise InputError(
                    f"these experts were declared for {wanted.public_name}, found x in {_shown(x.dtype)}; cast it, or "
                    "declare them without a dtype"
                )
        if x.dtype not in _FLOATS:
            raise InputError(f"x must be bf16, fp16 or fp32, found {_shown(x.dtype)}")
        if indices.dtype not in _INDICES:
            raise InputError(f"indices must be int16, int32 or int64, found {_shown(indices.dtype)}")
        if weights.dtype not in _FLOATS:
            raise InputError(f"weights must be floats, found {_shown(weights.dtype)}")
        if indices.dim() < 1 or indices.shape[-1] < 1:
            raise InputError(f"indices must have shape [..., K] with K >= 1, found {list(indices.shape)}")
        if not torch.compiler.is_compiling():
            self._check_size(indices.numel() // indices.shape[-1], indices.shape[-1])
        return _layer(
            declared,
            _FLOATS[x.dtype],
            indices.shape[-1],
            _INDICES[indices.dtype],
            _FLOATS[weights.dtype],
            self._target,
            self._asked,
        )

    def _check_size(self, tokens: int, top_k: int) -> None:
        declared = self._declared
        each, more = slots_needed(declared.num_experts, top_k, declared.align, declared.capacity or 0.0, declared.pad)
        if max(tokens * top_k, tokens * each + more) > _MOST:
            raise InputError(
                f"T K, and the rows that experts need for so many picks, may be at most {_MOST}, found "
                f"{tokens * top_k} and {tokens * each + more}; split the call"
            )

    @property
    def backend(self) -> str:
        """The backend of the last call; before any, the one asked for."""
        return self._asked if self._used is None else self._used.backend

    def warmup(
        self,
        device: torch.device | str = "cuda",
        *,
        top_k: int,
        dtype: torch.dtype | str | None = None,
        indices_dtype: str = "int32",
        weights_dtype: str = "fp32",
        backward: bool = True,
    ) -> None:
        """Lowers, compiles and loads everything a call needs, for contiguous inputs on a device, whatever T.

        Call it before capturing a CUDA graph.

        Args:
            device: where the experts will run.
            top_k: K.
            dtype: of x; needed if they were declared without one.
            indices_dtype, weights_dtype: of the picks and of their weights.
            backward: also prepare the backward function.
        """
        self._used = self.layer(top_k, dtype=dtype, indices_dtype=indices_dtype, weights_dtype=weights_dtype)
        self._used.warmup(device, backward=backward)

    def layer(
        self,
        top_k: int,
        *,
        dtype: torch.dtype | str | None = None,
        indices_dtype: str = "int32",
        weights_dtype: str = "fp32",
    ) -> compiling.CompiledLayer:
        """What calls with such inputs run: a layer that can be looked into.

        Raises:
            InputError: no dtype was declared, and none is given.
        """
        asked = dtype if dtype is not None else self._declared.dtype
        if asked is None:
            raise InputError("these experts were declared without a dtype; say which: dtype='bf16'")
        types = (DType.parse(t).value for t in (asked, indices_dtype, weights_dtype))
        first, second, third = types
        return _layer(self._declared, first, top_k, second, third, self._target, self._asked)

    # ------------------------------------------------------------------------------------------------- looking

    def _last(self) -> compiling.CompiledLayer:
        if self._used is None:
            raise InputError("nothing has run yet, and K is that of a call; use layer(top_k, dtype=...)")
        return self._used

    @property
    def stages(self) -> Mapping[str, str]:
        """IR text after each pass, of the last call."""
        return self._last().stages

    def ir(self, stage: str = "specialize") -> str:
        """IR text of one stage, of the last call."""
        return self._last().ir(stage)

    @property
    def kernels(self) -> Mapping[str, GeneratedKernel]:
        """The generated kernels of the last call, forward then backward, by symbol."""
        return self._last().kernels

    @property
    def source(self) -> str:
        """CUDA text of all kernels of the last call."""
        return self._last().source

    @property
    def asm(self) -> Mapping[str, Mapping[str, Any]]:
        """``asm["ptx"]``, ``asm["cubin"]``, ``asm["sass"]`` of the last call: each by kernel symbol."""
        return self._last().asm

    @property
    def resources(self) -> Mapping[str, Resources]:
        """Registers, spills and shared memory of each kernel of the last call."""
        return self._last().resources

    @property
    def remarks(self) -> list[str]:
        """Decisions of the passes, one line each, of the last call."""
        return self._last().remarks

    def memory(self, tokens: int) -> Memory:
        """What a call with so many tokens allocates, of the layer of the last call."""
        return self._last().memory(tokens)

    def __repr__(self) -> str:
        return f"CompiledExperts({self._declared}, backend={self.backend!r})"


def _shown(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _restore(declared: Experts, target: str | None, backend: str) -> CompiledExperts:
    return CompiledExperts(declared, None if target is None else Target.parse(target), backend)

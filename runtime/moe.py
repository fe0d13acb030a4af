"""What ``moesaic.compile`` makes of a ``MoE``: a function of tokens, the weight that makes logits, and matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moesaic.codegen.target import Target
from moesaic.ir.moe import MoE
from moesaic.ir.types import DType
from moesaic.runtime.layer import CompiledLayer, check_can_pickle, result_type
from moesaic.runtime.made_once import by_handle, handle_of, made_once
from moesaic.runtime.per_call import PerCall, autocast_dtype, check_slots, check_tensor


@made_once
def _layer(
    handle: str, dtype: str, masked: bool, target: str | None, backend: str, passes: str, tune: bool
) -> CompiledLayer:
    declared: MoE = by_handle(handle)
    module = declared.module(DType(dtype), masked=masked)
    return CompiledLayer(module, None if target is None else Target.parse(target), backend, passes, tune)


class CompiledMoE(PerCall):
    """A whole layer that runs on tensors.

    Call it with x [..., H], ``gate_weight`` [E, H] and the matrices of experts and of the shared expert as declared, by
    place in this order or by name; biases of experts, ``residual`` [..., H] and what the router declares go by name. A
    ``token_mask`` [...], bool, takes tokens out: their routed output is 0. The result has a field for each of
    ``outputs``, and after them ``losses``, a mapping, if any are declared; it is a tensor if ``hidden`` is all there
    is. Gradients flow to x, all weights and biases, and the learned inputs of the router. Under autocast, x and the
    matrices are cast to its type."""

    def __init__(
        self, declared: MoE, target: Target | None, backend: str, passes: str = "", tune: bool = False
    ) -> None:
        super().__init__("layer", declared.parameters, target, backend, passes, tune)
        self._declared = declared
        self._handle = handle_of(declared)
        names = (*declared.outputs, "losses") if declared.losses else declared.outputs
        self._result_type = result_type("MoEResult", names)

    def __reduce__(self) -> tuple[Any, ...]:
        declared = self._declared
        check_can_pickle("score", declared.router.score)
        for part in (declared.experts, *(() if declared.shared is None else (declared.shared,))):
            check_can_pickle("activation", part.activation)
            check_can_pickle("gating", part.gating)
        return _restore, (declared, self._target, self._asked, self._passes, self._tune)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledMoE:
        return _restore(self._declared, self._target, self._asked, self._passes, self._tune)

    def __call__(self, x: torch.Tensor, *parameters: torch.Tensor, **named: Any) -> Any:
        """Runs the layer; see the class.

        Raises:
            InputTypeError: an input is missing, was not declared, or is not a tensor.
            InputError: an input has the wrong shape, dtype or device.
        """
        declared = self._declared
        given = self._by_name(("x",), parameters, named)
        if given.get("token_mask", x) is None:
            del given["token_mask"]
        main_grads = given.pop("main_grads", None)
        for name, tensor in (("x", x), *given.items()):
            check_tensor(name, tensor)
        dtype = autocast_dtype(x)
        if dtype is not None:
            x = x.to(dtype)
            cast = {*self._parameters, "residual"}
            given = {name: tensor.to(dtype) if name in cast else tensor for name, tensor in given.items()}
        masked = "token_mask" in given
        layer = self._layer_of((x.dtype, masked), lambda: self._layer_for(x, masked))
        if not torch.compiler.is_compiling() and x.dim() > 0:
            check_slots(declared.experts, x.numel() // max(x.shape[-1], 1), declared.router.top_k)
        if main_grads is not None:
            given["main_grads"] = main_grads
        result = layer(x, **given)
        if declared.outputs == ("hidden",) and not declared.losses:
            return result[0]
        count = len(declared.outputs)
        if not declared.losses:
            return self._result_type(*result)
        return self._result_type(*result[:count], dict(zip(declared.losses, result[count:], strict=True)))

    def _layer_for(self, x: torch.Tensor, masked: bool) -> CompiledLayer:
        found = self._check_x(x, self._declared.dtype)
        return _layer(self._handle, found, masked, self._target, self._asked, self._passes, self._tune)

    def warmup(
        self,
        device: torch.device | str = "cuda",
        *,
        dtype: torch.dtype | str | None = None,
        backward: bool = True,
        token_mask: bool = False,
        frozen: Sequence[str] = (),
    ) -> None:
        """Lowers, compiles and loads everything a call needs, for contiguous inputs on a device, whatever T.

        Call it before capturing a CUDA graph.

        Args:
            device: where the layer will run.
            dtype: of x; needed if the layer was declared without one.
            backward: also prepare the backward functions.
            token_mask: prepare calls with a token mask instead of calls without.
            frozen: matrices that take no gradient.
        """
        self._used = self.layer(dtype=dtype, token_mask=token_mask)
        self._used.warmup(device, backward=backward, frozen=frozen)

    def layer(self, *, dtype: torch.dtype | str | None = None, token_mask: bool = False) -> CompiledLayer:
        """What calls with such inputs run: a layer that can be looked into.

        Raises:
            InputError: no dtype was declared, and none is given.
        """
        asked = self._asked_dtype(dtype, self._declared.dtype)
        return _layer(self._handle, asked.value, token_mask, self._target, self._asked, self._passes, self._tune)

    def __repr__(self) -> str:
        return f"CompiledMoE({self._declared}, backend={self.backend!r})"


def _restore(declared: MoE, target: str | None, backend: str, passes: str, tune: bool) -> CompiledMoE:
    return CompiledMoE(declared, None if target is None else Target.parse(target), backend, passes, tune)

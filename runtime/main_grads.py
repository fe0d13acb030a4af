"""Gradients that are added to float32 sums of the caller's, instead of being handed to autograd.

Training in 16 bits over several micro-batches adds up gradients in float32. Handed out, a gradient would be rounded
first and read again for the sum; the kernel that makes it can add it itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moesaic.ir.errors import InputError, InputTypeError, suggestion


def by_number(
    inputs: Sequence[str], tensors: Sequence[torch.Tensor], matrices: Sequence[str], given: object
) -> dict[int, torch.Tensor]:
    """The sums by the number of their input.

    Args:
        inputs: names of all inputs, and `tensors` what they are.
        matrices: names of those that may have a sum.
        given: what the caller passed as ``main_grads``.

    Raises:
        InputTypeError: it is no mapping from names to tensors.
        InputError: a name is of no matrix, or its sum is not float32, dense, of its shape and on its device.
    """
    if not isinstance(given, Mapping):
        raise InputTypeError(f"main_grads must map names of matrices to tensors, found {type(given).__name__}")
    found: dict[int, torch.Tensor] = {}
    for name, main in given.items():
        if name not in matrices:
            raise InputError(
                f"main_grads: {name!r} is no matrix of this layer{suggestion(str(name), matrices)}; "
                f"these are: {', '.join(matrices)}"
            )
        if not isinstance(main, torch.Tensor):
            raise InputTypeError(f"main_grads[{name!r}] must be a tensor, found {type(main).__name__}")
        number = inputs.index(name)
        wanted = tensors[number]
        if main.dtype != torch.float32 or main.shape != wanted.shape or main.device != wanted.device:
            raise InputError(
                f"main_grads[{name!r}] must be float32 {list(wanted.shape)} on {wanted.device}, found "
                f"{str(main.dtype).removeprefix('torch.')} {list(main.shape)} on {main.device}"
            )
        if not main.is_contiguous() or main.requires_grad:
            raise InputError(f"main_grads[{name!r}] must be contiguous and take no gradient itself")
        found[number] = main
    return found


def added_by_autograd(tensors: Sequence[torch.Tensor], mains: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
    """The inputs, such that autograd adds the gradients of some to their sums: what the reference does."""
    return [_Into.apply(t, mains[i]) if i in mains else t for i, t in enumerate(tensors)]


class _Into(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, main: torch.Tensor) -> torch.Tensor:
        ctx.main = main
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        ctx.main.add_(gradients[0])
        return None, None

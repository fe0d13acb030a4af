"""What torch may have around a call: modes and transforms that have to see it, and some that must not be there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd import forward_ad

from moesaic.ir.errors import UnsupportedError


def refuse_transforms(tensors: Sequence[torch.Tensor]) -> None:
    """Raises under transforms that would pass our gradients by, some of them without a word."""
    interpreter = torch._C._functorch.peek_interpreter_stack()
    if interpreter is not None:
        kind = interpreter.key()
        if kind == torch._C._functorch.TransformType.Grad:
            raise UnsupportedError(
                "torch.func.grad, vjp and jacrev over a compiled layer are not available; use torch.autograd.grad or "
                "backward(), or backend='reference'"
            )
        if kind == torch._C._functorch.TransformType.Jvp:
            raise UnsupportedError(_NO_FORWARD_MODE)
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise UnsupportedError(_NO_FORWARD_MODE)


_NO_FORWARD_MODE = (
    "forward-mode derivatives of a compiled layer are not available; use reverse mode (torch.autograd.grad or "
    "backward()), or backend='reference'"
)


def must_dispatch(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether torch has to see the call: a mode or a transform (fake tensors, vmap, a profiler of operators), or a
    tensor whose memory does not hold its values (a lazy negation)."""
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    for tensor in tensors:  # not `any` of a generator, which takes as long as all the rest here
        kind = type(tensor)
        if (kind is not torch.Tensor and kind is not torch.nn.Parameter) or tensor.is_neg():
            return True
    return False

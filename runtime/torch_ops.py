"""The torch operators every compiled layer goes through: ``moesaic::forward`` and ``moesaic::backward``.

They are functional and take the program as a content-hash handle, so that equal layers look equal to torch. Fakes give
shapes without running; the autograd formula of forward calls backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moesaic.ir.core import Function
from moesaic.ir.errors import UnsupportedError
from moesaic.ir.types import Affine, Dim
from moesaic.runtime.execute import RUNNERS
from moesaic.runtime.program import program_by_key
from moesaic.runtime.reference import TORCH_DTYPES

_library = torch.library.Library("moesaic", "DEF")
_library.define("forward(str program, str backend, bool training, Tensor[] inputs) -> Tensor[]")
_library.define("backward(str program, str backend, str[] cotangents, Tensor[] inputs) -> Tensor[]")


def _forward(program: str, backend: str, training: bool, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    kind = "training" if training else "forward"
    return RUNNERS[backend].run(program_by_key(program), kind, (), inputs)


def _backward(
    program: str, backend: str, cotangents: Sequence[str], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    return RUNNERS[backend].run(program_by_key(program), "backward", tuple(cotangents), inputs)


for _key in ("CUDA", "CPU"):
    _library.impl("forward", _forward, _key)
    _library.impl("backward", _backward, _key)


@torch.library.register_fake("moesaic::forward", lib=_library)
def _forward_fake(program: str, backend: str, training: bool, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return _fake_results(program_by_key(program).forward_function(training=training), inputs)


@torch.library.register_fake("moesaic::backward", lib=_library)
def _backward_fake(
    program: str, backend: str, cotangents: Sequence[str], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    function = program_by_key(program).backward_function(tuple(cotangents))
    assert function is not None
    return _fake_results(function, inputs)


def _fake_results(function: Function, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    tokens = next(t.shape[0] for t, a in zip(inputs, function.arguments, strict=True) if a.type.rank == 2)

    def size(dim: Dim) -> Any:
        if isinstance(dim, Affine):
            return sum(coefficient * tokens for _, coefficient in dim.terms) + dim.constant
        return dim

    return [inputs[0].new_empty([size(d) for d in t.shape], dtype=TORCH_DTYPES[t.dtype]) for t in function.result_types]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Sequence[torch.Tensor]) -> None:
    program_key, backend, training, tensors = inputs
    ctx.program, ctx.backend, ctx.training = program_key, backend, training
    ctx.shapes = [(t.shape, t.dtype) for t in tensors]
    ctx.set_materialize_grads(False)
    if not training:
        return
    program = program_by_key(program_key)
    forward = program.forward_function(training=True)
    backward = program.backward_function(program.float_results)
    named = dict(zip([a.name for a in forward.arguments], tensors, strict=True))
    named.update(zip(forward.result_names, output, strict=True))
    needed = [a.name for a in backward.arguments if a.name in named] if backward is not None else []
    ctx.saved_names = needed
    ctx.save_for_backward(*(named[n] for n in needed))


def _autograd(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
    grads: Sequence[torch.Tensor | None] = cotangents[0] if len(cotangents) == 1 else cotangents
    program = program_by_key(ctx.program)
    if not ctx.training and program.backward_function(program.float_results) is not None:
        raise UnsupportedError("this layer was run for inference and has nothing saved; call it with grad enabled")
    outputs = program.forward_function(training=ctx.training).result_names
    given = {
        name: grad
        for name, grad in zip(outputs, grads, strict=True)
        if grad is not None and name in program.float_results
    }
    names = tuple(n for n in program.float_results if n in given)
    by_name: dict[str, torch.Tensor] = {}
    backward = program.backward_function(names) if names else None
    if backward is not None:
        saved = dict(zip(ctx.saved_names, ctx.saved_tensors, strict=True))
        operands = [
            _rows(given[a.name.removeprefix("d_")]) if a.name not in saved else saved[a.name]
            for a in backward.arguments
        ]
        results = torch.ops.moesaic.backward(ctx.program, ctx.backend, list(names), operands)
        by_name = dict(zip(backward.result_names, results, strict=True))
    gradients: list[torch.Tensor | None] = []
    for argument, (shape, dtype) in zip(program.function.arguments, ctx.shapes, strict=True):
        gradient = by_name.get(f"d_{argument.name}")
        if gradient is None and argument.name in program.differentiable_inputs(names):
            gradient = given[names[0]].new_zeros(shape, dtype=dtype)
        gradients.append(gradient)
    return None, None, None, gradients


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with elements of a row next to each other; rows may be anywhere (a stride of 0 included)."""
    return tensor if tensor.dim() == 0 or tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


torch.library.register_autograd("moesaic::forward", _autograd, setup_context=_setup_context, lib=_library)


def _refuse_vmap(info: Any, in_dims: Any, *args: Any) -> Any:
    raise UnsupportedError(
        "vmap over a compiled layer is not available; it takes leading dimensions itself: pass the batched logits"
    )


torch.library.register_vmap("moesaic::forward", _refuse_vmap, lib=_library)
torch.library.register_vmap("moesaic::backward", _refuse_vmap, lib=_library)


def _refuse_batched_cotangents(*args: Any) -> Any:
    raise UnsupportedError(
        "batched cotangents (is_grads_batched=True, jacobian(vectorize=True)) through a compiled layer are not "
        "available; send them back one by one, or use backend='reference'"
    )


# What torch.autograd.grad(is_grads_batched=True) uses is older than torch.vmap and has a key of its own.
_library.impl("backward", _refuse_batched_cotangents, "Batched")


def _refuse_double_backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
    raise UnsupportedError(
        "second derivatives of a compiled layer are not available; use backend='reference' for double backward"
    )


torch.library.register_autograd("moesaic::backward", _refuse_double_backward, lib=_library)

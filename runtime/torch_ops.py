"""The torch operators every compiled layer goes through: ``moesaic::forward`` and ``moesaic::backward``.

They are functional and take the program as a content-hash handle, so that equal layers look equal to torch. Fakes give
shapes without running; the autograd formula of forward calls backward.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moesaic.ir.core import Function
from moesaic.ir.errors import NotKeptError, UnsupportedError
from moesaic.ir.types import Affine, Dim
from moesaic.runtime.execute import RUNNERS
from moesaic.runtime.plan import made_slots
from moesaic.runtime.program import Program, program_by_key
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
    sizes = _sizes(function, [tensor.shape for tensor in inputs])
    return [
        inputs[0].new_empty(size, dtype=TORCH_DTYPES[t.dtype])
        for size, t in zip(sizes, function.result_types, strict=True)
    ]


def _sizes(function: Function, shapes: Sequence[torch.Size]) -> list[list[Any]]:
    """The shapes of the results of a function, from those of its inputs."""
    symbols: dict[str, Any] = {}
    for shape, argument in zip(shapes, function.arguments, strict=True):
        symbols.setdefault(argument.type.leading, shape[0] if len(shape) else 1)
    slots = made_slots(function)
    if slots is not None:
        symbols["M"] = symbols["T"] * slots[0] + slots[1]

    def size(dim: Dim) -> Any:
        if isinstance(dim, Affine):
            return sum(coefficient * symbols[symbol] for symbol, coefficient in dim.terms) + dim.constant
        return dim

    return [[size(d) for d in t.shape] for t in function.result_types]


@dataclass(frozen=True)
class _Recording:
    """What forward keeps for backward, worked out once a program.

    Attributes:
        saved: where each saved value comes from: an input or a result, by number.
        names: of the saved values.
        results: names of the results of forward.
        floats: numbers of the results that can have a cotangent.
        has_backward: whether a gradient reaches any input.
    """

    saved: tuple[tuple[str, int], ...]
    names: tuple[str, ...]
    results: tuple[str, ...]
    floats: tuple[int, ...]
    has_backward: bool


@functools.cache
def _recording(program_key: str, training: bool) -> _Recording:
    program = program_by_key(program_key)
    forward = program.forward_function(training=training)
    backward = program.backward_function(program.float_results)
    places = {a.name: ("input", i) for i, a in enumerate(forward.arguments)}
    places.update({n: ("result", i) for i, n in enumerate(forward.result_names)})
    names = [a.name for a in backward.arguments if a.name in places] if backward is not None and training else []
    return _Recording(
        saved=tuple(places[n] for n in names),
        names=tuple(names),
        results=tuple(forward.result_names),
        floats=tuple(i for i, n in enumerate(forward.result_names) if n in program.float_results),
        has_backward=backward is not None,
    )


@dataclass(frozen=True)
class _Reversal:
    """One backward function, for the cotangents that exist.

    Attributes:
        cotangents: their names, in the order of the results.
        operands: where each operand comes from: a saved value or a cotangent, by number, or a main gradient, by that
            of the input.
        gradients: for each input the number of the result that is its gradient, or -1.
        zeros: inputs whose gradient is zero rather than missing.
    """

    cotangents: tuple[str, ...]
    operands: tuple[tuple[str, int], ...]
    gradients: tuple[int, ...]
    zeros: tuple[bool, ...]


@functools.cache
def _reversal(program_key: str, given: tuple[int, ...]) -> _Reversal:
    program = program_by_key(program_key)
    recording = _recording(program_key, True)
    names = tuple(recording.results[i] for i in given)
    try:
        return _reversal_of(program, recording, names)
    except NotKeptError:  # forward has kept what backward of all cotangents takes: that one, with zeros for the others
        every = _reversal_of(program, recording, program.float_results)
        reached = [a.name in program.differentiable_inputs(names) for a in program.function.arguments]
        return replace(
            every,
            gradients=tuple(g if r else -1 for g, r in zip(every.gradients, reached, strict=True)),
            zeros=tuple(z and r for z, r in zip(every.zeros, reached, strict=True)),
        )


def _reversal_of(program: Program, recording: _Recording, names: tuple[str, ...]) -> _Reversal:
    """Of the cotangents with these names.

    Raises:
        NotKeptError: what it takes is not what forward has kept.
    """
    backward = program.backward_function(names) if names else None
    inputs = [a.name for a in program.function.arguments]
    reached = program.differentiable_inputs(names)
    made = {n: i for i, n in enumerate(backward.result_names)} if backward is not None else {}
    operands = []
    for argument in backward.arguments if backward is not None else ():
        if argument.name in recording.names:
            operands.append(("saved", recording.names.index(argument.name)))
        elif argument.name in made:  # written into
            operands.append(("main", inputs.index(argument.name.removeprefix("main_"))))
        elif argument.name.removeprefix("d_") in names:
            operands.append(("cotangent", recording.results.index(argument.name.removeprefix("d_"))))
        else:
            raise NotKeptError(f"backward of {', '.join(names)} takes {argument.name}, which forward does not keep")
    gradients = tuple(made.get(f"d_{n}", -1) for n in inputs)
    zeros = tuple(g < 0 and n in reached and f"main_{n}" not in made for n, g in zip(inputs, gradients, strict=True))
    return _Reversal(names, tuple(operands), gradients, zeros)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Sequence[torch.Tensor]) -> None:
    program_key, backend, training, tensors = inputs
    ctx.program, ctx.backend, ctx.training = program_key, backend, training
    ctx.mains = {}
    ctx.shapes = [(t.shape, t.dtype) for t in tensors]
    ctx.set_materialize_grads(False)
    if training:
        saved = _recording(program_key, True).saved
        ctx.save_for_backward(*[tensors[i] if kind == "input" else output[i] for kind, i in saved])


def _autograd(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
    grads: Sequence[torch.Tensor | None] = cotangents[0] if len(cotangents) == 1 else cotangents
    return None, None, None, _gradients(ctx, grads, dispatched=True)


def _gradients(ctx: Any, grads: Sequence[torch.Tensor | None], *, dispatched: bool) -> list[torch.Tensor | None]:
    """The gradient of each input, from the cotangents that exist; through the dispatcher or straight to the runner."""
    recording = _recording(ctx.program, ctx.training)
    if not ctx.training and recording.has_backward:
        raise UnsupportedError("this layer was run for inference and has nothing saved; call it with grad enabled")
    given = tuple([i for i in recording.floats if grads[i] is not None])
    reversal = _reversal(ctx.program, given)
    results: Sequence[torch.Tensor] = ()
    if reversal.operands:
        saved = ctx.saved_tensors
        operands = [
            saved[i] if kind == "saved" else _cotangent(ctx, grads, i) if kind == "cotangent" else _main(ctx, i)
            for kind, i in reversal.operands
        ]
        if dispatched and ctx.mains:
            raise UnsupportedError(
                "main_grads are written in place, by a plain backward; leave them out for create_graph or batched "
                "cotangents"
            )
        if dispatched:
            results = torch.ops.moesaic.backward(ctx.program, ctx.backend, list(reversal.cotangents), operands)
        else:
            results = _backward(ctx.program, ctx.backend, reversal.cotangents, operands)
    gradients: list[torch.Tensor | None] = [results[i] if i >= 0 else None for i in reversal.gradients]
    for number, zero in enumerate(reversal.zeros):
        if zero:
            shape, dtype = ctx.shapes[number]
            cotangent = grads[given[0]]
            assert cotangent is not None
            gradients[number] = cotangent.new_zeros(shape, dtype=dtype)
    return gradients


def _cotangent(ctx: Any, grads: Sequence[torch.Tensor | None], number: int) -> torch.Tensor:
    """The cotangent of a result, as kernels read it; zeros where there is none."""
    given = grads[number]
    if given is None:
        forward = program_by_key(ctx.program).forward_function(training=True)
        size = _sizes(forward, [shape for shape, _ in ctx.shapes])[number]
        dtype = TORCH_DTYPES[forward.result_types[number].dtype]
        given = next(g for g in grads if g is not None).new_zeros(size, dtype=dtype)
    return _rows(given)


def _main(ctx: Any, number: int) -> torch.Tensor:
    """The sum that the gradient of an input is added to; one for nobody, if this backward does not want that gradient:
    ``torch.autograd.grad`` of other inputs leaves sums as they are."""
    main: torch.Tensor = ctx.mains[number]
    node, _ = ctx.next_functions[number]
    return main if torch._C._will_engine_execute_node(node) else torch.zeros_like(main)


class _Recorded(torch.autograd.Function):
    """`moesaic::forward` with its autograd formula, without the dispatcher: what an eager call with gradients takes.

    The operator's own way through ``torch.library`` costs several times the host time of the kernels' launches.
    """

    @staticmethod
    def forward(
        ctx: Any, program: str, backend: str, mains: dict[int, torch.Tensor], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        outputs = _forward(program, backend, True, tensors)
        _setup_context(ctx, (program, backend, True, tensors), outputs)
        ctx.mains = mains
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        # The operator refuses what it cannot do: to be differentiated again, and batched cotangents (which have no
        # memory of their own).
        batched = any(g is not None and not torch._C._has_storage(g) for g in cotangents)
        return None, None, None, *_gradients(ctx, cotangents, dispatched=batched or torch.is_grad_enabled())


def record(
    program: str, backend: str, tensors: Sequence[torch.Tensor], mains: dict[int, torch.Tensor] | None = None
) -> Sequence[torch.Tensor]:
    """Runs the training forward of a program eagerly, on the tape of autograd.

    Backward of a program made for it adds the gradient of an input to its tensor in `mains`, by the input's number.
    """
    if mains:  # a node of their own tells whether their gradients are wanted
        tensors = [_Through.apply(t) if i in mains else t for i, t in enumerate(tensors)]
    outputs: Sequence[torch.Tensor] = _Recorded.apply(program, backend, mains or {}, *tensors)
    return outputs


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return gradients[0]


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with elements of a row next to each other; rows may be anywhere (a stride of 0 included)."""
    if tensor.is_neg():  # a view that torch negates as it reads
        return tensor.resolve_neg().contiguous()
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

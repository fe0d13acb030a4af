"""The tensors of a call: checked, in the order of the function's inputs, with rows that kernels can read."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moesaic.ir.errors import InputError, InputTypeError, suggestion
from moesaic.runtime.reference import DTYPES
from moesaic.runtime.signature import Input, Signature
from moesaic.runtime.traced import constant


def bind(signature: Signature, logits: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The tensors in the order of the function's inputs, checked, with rows that are dense inside."""
    if logits.dim() < 1 or logits.shape[-1] != signature.columns:
        name = signature.inputs[0].name
        raise InputError(f"{name} must have shape [..., {signature.columns}], found {list(logits.shape)}")
    rows = logits if logits.dim() == 2 else logits.reshape(-1, signature.columns)
    tensors = [_dense_rows(rows)]
    made = 0
    for wanted in signature.inputs[1:]:
        given = inputs.get(wanted.name)
        sequences = _sequences(signature, logits) if wanted.kind == "sequences" else 0
        if given is None and wanted.name == signature.sequences:
            # An empty batch counts as one empty sequence, here and below.
            tensors.append(logits.new_empty((sequences or 1, 0), dtype=torch.float32))
            made += 1
            continue
        if given is None:
            if wanted.kind == "sequences":
                tensors.append(_sequences(signature, logits))
                made += 1
                continue
            _refuse_undeclared(signature, inputs)  # a slip of the pen is the likeliest reason
            raise InputTypeError(f"input {wanted.name!r} ({wanted.text}) is missing")
        leading = (sequences,) if wanted.kind == "sequences" else tuple(logits.shape[:-1])
        checked = _checked(wanted, given, rows, leading)
        if wanted.kind == "sequences" and sequences == 0:
            checked = checked.new_zeros((1, *wanted.columns))
        tensors.append(_dense_rows(checked))
    if len(inputs) >= len(tensors) - made:
        _refuse_undeclared(signature, inputs)
    return tensors


def _sequences(signature: Signature, logits: torch.Tensor) -> int:
    """N, from the shape of the logits."""
    axis = 0 if signature.segments == "batch_first" else 1
    if logits.dim() != 3:
        order = "[N, S, E]" if axis == 0 else "[S, N, E]"
        raise InputError(
            f"a loss by sequence is declared, {signature.segments}: {signature.inputs[0].name} must have the shape "
            f"{order}, found {list(logits.shape)}"
        )
    return logits.shape[axis]


def _refuse_undeclared(signature: Signature, inputs: Mapping[str, torch.Tensor]) -> None:
    known = [wanted.name for wanted in signature.inputs[1:]]
    for name in inputs:
        if name not in known:
            raise InputTypeError(
                f"input {name!r} was not declared{_suggestion(name, known)}; declared: {', '.join(known) or 'none'}"
            )


# torch.compile cannot trace a search for near misses, and would report that in place of our error.
_suggestion = constant(suggestion)


def _dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Elements of a row must be next to each other; rows may be anywhere."""
    if tensor.dim() == 0 or tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        return tensor
    if tensor.layout is not torch.strided:
        raise InputError(f"inputs must be dense tensors, found layout {tensor.layout}; call to_dense() on it")
    return tensor.contiguous()


def as_number(name: str, given: object, rows: torch.Tensor) -> torch.Tensor:
    """A number, or a tensor of one, as a float scalar on the device of `rows`; without a synchronisation.

    Raises:
        InputTypeError: it is neither.
        InputError: it is a tensor of more than one element, of none, or of no numbers; or a number of tokens below 0.
    """
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    if isinstance(given, torch.Tensor):
        if given.numel() != 1:
            raise InputError(f"{name} must be a number or a tensor of one element, found shape {list(given.shape)}")
        if given.dtype == torch.bool or given.dtype.is_complex:
            raise InputError(f"{name} must be an integer or a float, found {str(given.dtype).removeprefix('torch.')}")
        return given.reshape(()).to(dtype)
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise InputTypeError(f"{name} must be a number or a tensor of one element, found {type(given).__name__}")
    if name.endswith("num_tokens") and not 0 <= given < float("inf"):
        raise InputError(f"{name} must be a number >= 0, found {given}")
    return rows.new_full((), float(given), dtype=dtype)


def _checked(wanted: Input, given: object, rows: torch.Tensor, leading: tuple[int, ...]) -> torch.Tensor:
    """An input as the function takes it; `leading` is what stands in a call for the T or N of its rows."""
    name = wanted.name
    if wanted.kind == "number":
        given = as_number(name, given, rows)
    if not isinstance(given, torch.Tensor):
        raise InputTypeError(f"{name} must be a tensor, found {type(given).__name__}")
    tensor: torch.Tensor = given
    has_rows = wanted.kind in ("rows", "sequences")
    expected = [*leading, *wanted.columns] if has_rows else [*wanted.columns]
    if wanted.kind == "slots":
        expected = [*tensor.shape[:1], *wanted.columns]
    if list(tensor.shape) != expected:
        raise InputError(f"{name} must have shape {expected}, found {list(tensor.shape)}")
    if wanted.kind == "rows" and len(leading) != 1:
        tensor = tensor.reshape(rows.shape[0], *wanted.columns)
    wide = tensor.dtype == torch.float64 and rows.dtype == torch.float64
    if tensor.dtype != wanted.dtype and not wide:
        known = DTYPES.get(tensor.dtype)
        found = known.public_name if known is not None else str(tensor.dtype).removeprefix("torch.")
        raise InputError(f"{name} must be {wanted.type_name}, found {found}")
    if tensor.device != rows.device:
        raise InputError(f"{name} is on {tensor.device}, but logits are on {rows.device}; move one of them")
    return tensor

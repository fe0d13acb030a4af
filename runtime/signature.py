"""What a call has to know of a program, as plain values that torch.compile can follow or guard."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from moesaic.ir.errors import InputError
from moesaic.ir.ops import col
from moesaic.ir.types import TensorType
from moesaic.runtime.program import Program, program_by_key, with_gradients
from moesaic.runtime.reference import TORCH_DTYPES
from moesaic.runtime.traced import constant


class Input(NamedTuple):
    """An input as plain values, which torch.compile can follow.

    Attributes:
        name: of it.
        text: its type, for messages.
        kind: ``rows`` (one for each token), ``sequences`` (one for each sequence; made from the shape of the logits if
            it is not given), ``slots`` (one for each slot), ``vector`` or ``number``.
        columns: its shape, without the axis of tokens.
        dtype: what it has to be.
        type_name: the same, as users write it.
    """

    name: str
    text: str
    kind: str
    columns: tuple[int, ...]
    dtype: torch.dtype
    type_name: str

    @classmethod
    def of(cls, name: str, declared: TensorType) -> Input:
        kinds = {"T": "rows", "N": "sequences", "M": "slots"}
        kind = kinds.get(declared.leading, "vector" if declared.rank else "number")
        columns = tuple(d for d in declared.shape if isinstance(d, int))
        return cls(name, str(declared), kind, columns, TORCH_DTYPES[declared.dtype], declared.dtype.public_name)


@dataclass(frozen=True, eq=False)
class Signature:
    """What a call has to know of a program, as plain values."""

    program: Program
    inputs: tuple[Input, ...]
    columns: int
    has_rows: tuple[bool, ...]
    segments: str
    """How the tokens of sequences lie in the logits, if anything is computed by sequence; else empty."""
    matrices: tuple[tuple[str, int], ...]
    """The inputs that are weights of products, and biases of experts, with their numbers."""
    sequences: str
    """The input that has a row for each sequence and nothing in it, and is made from the logits' shape; empty if none
    is."""


_signatures: dict[str, Signature] = {}


@constant
def signature_of(handle: str) -> Signature:
    """The signature of a program by its handle. Under torch.compile it runs while tracing: the handle, which torch
    guards, decides everything in it."""
    found = _signatures.get(handle)
    if found is None:
        program = program_by_key(handle)
        function = program.function
        first = function.arguments[0].type
        columns = first.shape[-1] if first.rank == 2 else None
        if not isinstance(columns, int):
            raise InputError(
                f"the first input of @{function.name} must be rows [T, E] with a constant E, found {first}"
            )
        found = _signatures[handle] = Signature(
            program=program,
            inputs=tuple(Input.of(a.name, a.type) for a in function.arguments),
            columns=columns,
            has_rows=tuple(t.leading == "T" for t in function.result_types),
            segments=col.order_of_sequences(function),
            matrices=tuple(
                (a.name, number)
                for number, a in enumerate(function.arguments)
                if a.type.rank > 1 and isinstance(a.type.shape[0], int)
            ),
            sequences=next((a.name for a in function.arguments if _is_only_a_number_of_sequences(a.type)), ""),
        )
    return found


def _is_only_a_number_of_sequences(type: TensorType) -> bool:
    return type.leading == "N" and type.shape[1:] == (0,)


@constant
def has_backward(handle: str) -> bool:
    """Whether a gradient reaches an input. Lowers the program, which the reference must not depend on."""
    return _has_backward(handle)


@functools.cache
def _has_backward(handle: str) -> bool:
    program = program_by_key(handle)
    return program.backward_function(program.float_results) is not None


def for_wanted_gradients(
    handle: str, passes: str, tensors: Sequence[torch.Tensor], mains: Mapping[int, torch.Tensor] | None = None
) -> str:
    """The handle of the same function with a backward for the matrices that take a gradient: the product that makes one
    costs as much as the layer's own. Those in `mains`, by number, have a sum that theirs is added to."""
    signature = signature_of(handle)
    if not signature.matrices:
        return handle
    without = [name for name, number in signature.matrices if not tensors[number].requires_grad]
    into = [n for n, number in signature.matrices if number in mains and n not in without] if mains else ()
    return _with_gradients(handle, passes, ",".join(into), ",".join(without)) if into or without else handle


@constant
def _with_gradients(handle: str, passes: str, into: str, without: str) -> str:
    """`with_gradients`, from plain constants."""
    return with_gradients(
        handle, passes, tuple(into.split(",")) if into else (), tuple(without.split(",")) if without else ()
    )

"""What runs a call: the backends, and which of them a layer's tensors go to."""

from __future__ import annotations

import os

import torch

from moesaic.ir import environment
from moesaic.ir.errors import InputError
from moesaic.runtime.traced import constant

BACKENDS = ("auto", "cuda", "emulate", "reference")


@constant
def resolve_backend(asked: str, device: str, dtype: torch.dtype) -> str:
    """The backend that runs tensors of a device and dtype.

    Raises:
        InputError: the backend asked for cannot.
    """
    backend = asked
    if asked == "auto" and environment.BACKEND.name in os.environ:
        backend = environment.BACKEND.get()
    if backend == "auto":
        backend = "cuda" if device == "cuda" else "reference"
    if backend == "cuda" and device != "cuda":
        raise InputError(f"backend 'cuda' needs CUDA tensors, found logits on {device!r}")
    if backend == "emulate" and device != "cpu":
        raise InputError(f"backend 'emulate' needs CPU tensors, found logits on {device!r}")
    if backend != "reference" and dtype == torch.float64:
        raise InputError(f"float64 logits run on backend 'reference' only, not on {backend!r}")
    return backend


traced: dict[tuple[str, str], str] = {}
"""Where programs run in graphs of torch.compile, by handle and the backend asked for; equal layers share a graph."""


@constant
def note_traced(handle: str, asked: str, backend: str) -> bool:
    traced[handle, asked] = backend
    return True

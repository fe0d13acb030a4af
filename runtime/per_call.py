"""What compiled experts and whole layers have in common: which layer runs is decided by the tensors of a call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from moesaic.codegen.target import Target
from moesaic.ir.errors import InputError, InputTypeError
from moesaic.ir.experts import Experts
from moesaic.ir.ops.slot import slots_needed
from moesaic.ir.types import DType
from moesaic.runtime.explain import TOKENS, Explanation
from moesaic.runtime.layer import CompiledLayer
from moesaic.runtime.reference import FLOATS, TORCH_DTYPES

if TYPE_CHECKING:
    from moesaic.codegen.kernel import GeneratedKernel
    from moesaic.codegen.resources import Resources
    from moesaic.runtime.memory import Memory

MOST_SLOTS = 2**31 - 1
"""Picks and slots are numbered in 32 bits."""


class PerCall:
    """Base: looks into the layer of the last call.

    Args:
        what: what errors call it, such as ``"experts"``.
        parameters: the inputs after the first ones that a call takes by place, too.
    """

    def __init__(
        self, what: str, parameters: Sequence[str], target: Target | None, backend: str, passes: str, tune: bool
    ) -> None:
        self._what = what
        self._parameters = tuple(parameters)
        self._target = None if target is None else target.name
        self._asked = backend
        self._passes = passes
        self._tune = tune
        self._used: CompiledLayer | None = None
        # By what decides between layers: to find one anew takes longer than its launches.
        self._found: dict[Hashable, CompiledLayer] = {}

    # ------------------------------------------------------------------------------------------------- inputs

    def _by_name(
        self, first: Sequence[str], parameters: Sequence[torch.Tensor], named: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Inputs given by place and by name, by name; `first` are those before."""
        if len(parameters) > len(self._parameters):
            expected = ", ".join((*first, *self._parameters))
            raise InputTypeError(f"expected {expected}; found {len(first) + len(parameters)} inputs")
        given: dict[str, Any] = dict(zip(self._parameters, parameters, strict=False))
        for name, tensor in named.items():
            if name in given:
                raise InputTypeError(f"input {name!r} is given twice, by place and by name")
            given[name] = tensor
        return given

    def _check_x(self, x: torch.Tensor, declared: str | None) -> str:
        """The type of x, which has to be the declared one."""
        if declared is not None and x.dtype != torch.float64:
            wanted = DType.parse(declared)
            if x.dtype != TORCH_DTYPES[wanted]:
                raise InputError(
                    f"the {self._what} was declared for {wanted.public_name}, found x in {shown(x.dtype)}; cast it, or "
                    "declare it without a dtype"
                )
        if x.dtype not in FLOATS:
            raise InputError(f"x must be bf16, fp16 or fp32, found {shown(x.dtype)}")
        return FLOATS[x.dtype].value

    def _layer_of(self, kind: Hashable, find: Callable[[], CompiledLayer]) -> CompiledLayer:
        """The layer of calls of a kind, which `find` checks and finds for the first of them."""
        if torch.compiler.is_compiling():
            return find()
        self._used = self._found.get(kind) or self._found.setdefault(kind, find())
        return self._used

    def _asked_dtype(self, given: torch.dtype | str | None, declared: str | None) -> DType:
        asked = given if given is not None else declared
        if asked is None:
            raise InputError(f"the {self._what} was declared without a dtype; say which: dtype='bf16'")
        return DType.parse(asked)

    # ------------------------------------------------------------------------------------------------- looking

    @property
    def backend(self) -> str:
        """The backend of the last call; before any, the one asked for."""
        return self._asked if self._used is None else self._used.backend

    def _last(self) -> CompiledLayer:
        if self._used is None:
            raise InputError("nothing has run yet, and a call decides what does; look at layer(...)")
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

    def explain(
        self, tokens: int = TOKENS, *, training: bool = True, live: float = 1.0, measure: bool | None = None
    ) -> Explanation:
        """Bytes, FLOPs, floors and resources of each kernel, of the layer of the last call; see
        :meth:`CompiledLayer.explain`."""
        return self._last().explain(tokens, training=training, live=live, measure=measure)


def check_tensor(name: str, given: object) -> None:
    """Raises InputTypeError for what is no tensor."""
    if not isinstance(given, torch.Tensor):
        raise InputTypeError(f"{name} must be a tensor, found {type(given).__name__}")


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """What autocast casts operands of products to; ``None`` if it is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def shown(dtype: torch.dtype) -> str:
    """A dtype as torch calls it, in short."""
    return str(dtype).removeprefix("torch.")


def check_slots(experts: Experts, tokens: int, top_k: int) -> None:
    """Refuses a call with more picks, or slots for them, than can be numbered."""
    each, more = slots_needed(experts.num_experts, top_k, experts.align, experts.capacity or 0.0, experts.pad)
    picks, slots = tokens * top_k, tokens * each + more
    if max(picks, slots) > MOST_SLOTS:
        raise InputError(
            f"T K, and the rows that experts need for so many picks, may be at most {MOST_SLOTS}, found {picks} and "
            f"{slots}; split the call"
        )

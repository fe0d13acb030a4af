"""What ``experts_implementation="moesaic"`` of transformers runs: the experts of a module, as they are declared here.

A module says how its weights lie; what it does between its products, it only does. So what we would declare is tried on
random numbers beside the module's own function, and taken if both agree.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from moesaic.ir.builder import Builder
from moesaic.ir.core import Value
from moesaic.ir.errors import InputError
from moesaic.ir.experts import ACTIVATIONS, Activation, ClampedSwiGLU, Experts, Gating, activated, create_split
from moesaic.ir.types import DType, tensor
from moesaic.runtime.compile import compile
from moesaic.runtime.experts import CompiledExperts
from moesaic.runtime.made_once import by_handle, handle_of, made_once
from moesaic.runtime.reference import evaluate
from moesaic.runtime.split_experts import split_experts

_log = logging.getLogger("moesaic.hf")

_PLAN = "_moesaic_plan"
_PROBED = (64, 16)  # rows and columns of the random numbers
_SPREAD = 6.0  # of them, so that every clamp is met


@dataclass(frozen=True)
class Plan:
    """How the experts of a module run.

    Attributes:
        experts: as declared here; ``None`` if the module's own function runs between two products.
        shapes: of the module's weights when this was found out.
        numbers: the module's plain attributes then, and what its activation was.
        handle: of `experts`.
    """

    experts: Experts | None
    shapes: tuple[tuple[int, ...], ...]
    numbers: tuple[tuple[str, Any], ...]
    handle: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", handle_of(self.experts))

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, (self.experts, self.shapes, self.numbers)  # a handle is of one process


def experts_forward(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    backend: str,
    recompute: str | None,
    allow_tf32: bool,
) -> torch.Tensor:
    """The forward function of a module of experts, as transformers calls it: [T, H] in the type of hidden_states."""
    plan = plan_of(module)
    parameters = parameters_of(module)
    dtype = parameters["down_proj"].dtype
    x = hidden_states if hidden_states.dtype == dtype else hidden_states.to(dtype)
    if plan.experts is not None:
        layer = _compiled(plan.handle, backend, recompute, allow_tf32)
        y: torch.Tensor = layer(x, top_k_index, top_k_weights, **parameters)
    else:
        up = "gate_up_proj" if module.has_gate else "up_proj"
        renamed = {n.replace(up, "up").replace("down_proj", "down"): t for n, t in parameters.items()}
        function: Any = module._apply_gate if module.has_gate else module.act_fn
        y = split_experts(
            x, top_k_index, top_k_weights, renamed, function, transposed=bool(module.is_transposed), backend=backend
        )
    return y if y.dtype == hidden_states.dtype else y.to(hidden_states.dtype)


@made_once
def _compiled(handle: str, backend: str, recompute: str | None, allow_tf32: bool) -> CompiledExperts:
    experts: Experts = by_handle(handle)
    return compile(experts, backend=backend, recompute=recompute, allow_tf32=allow_tf32)


def plan_of(module: torch.nn.Module) -> Plan:
    """The plan of a module, made at its first call, and whenever its weights have got other shapes, its numbers other
    values, or it has another activation; under torch.compile nothing but shapes is looked at.

    Raises:
        InputError: torch.compile is tracing a module that has none.
    """
    shapes = tuple(tuple(t.shape) for t in parameters_of(module).values())
    known: Plan | None = getattr(module, _PLAN, None)
    compiling = torch.compiler.is_compiling()
    if known is not None and known.shapes == shapes and (compiling or known.numbers == _numbers(module)):
        return known
    if compiling:
        raise InputError(
            "torch.compile met experts that moesaic has not looked at yet: call moesaic.hf.prepare(model) before"
        )
    made = Plan(declared(module), shapes, _numbers(module))
    setattr(module, _PLAN, made)
    if made.experts is None:
        _log.warning(
            "%s computes something between its products that no declaration of ours does; it runs as it is, between "
            "two layers",
            type(module).__name__,
        )
    return made


def plain_attributes(module: torch.nn.Module, but: Sequence[str] = ()) -> tuple[tuple[str, Any], ...]:
    """Names and values of a module's numbers and texts, which its forward may read, `but` for some."""
    without = ("training", *but)
    return tuple(
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, int | float | str) and not name.startswith("_") and name not in without
    )


def _numbers(module: torch.nn.Module) -> tuple[tuple[str, Any], ...]:
    activation: Any = getattr(module, "act_fn", None)
    kind = type(activation) if isinstance(activation, torch.nn.Module) else activation
    return (*plain_attributes(module), ("act_fn", kind))


def parameters_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of a module of experts, by the names of the inputs of `Experts`."""
    matrices = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    names = (*matrices, *(f"{n}_bias" for n in matrices)) if module.has_bias else matrices
    return {name: getattr(module, name) for name in names}


@torch.no_grad()
def declared(module: torch.nn.Module) -> Experts | None:
    """The experts of a module as we declare them; ``None`` if what it computes between its products is none of ours."""
    parameters = parameters_of(module)
    down = parameters["down_proj"]
    experts, hidden, intermediate = down.shape if not module.is_transposed else (down.shape[0], *down.shape[:0:-1])
    function: Any = module._apply_gate if module.has_gate else module.act_fn
    for activation, gating in candidates(module, gated=bool(module.has_gate)):
        if computes(
            function,
            activation,
            gating,
            gated=bool(module.has_gate),
            interleaved=not module.is_concatenated,
            device="cpu" if down.is_meta else down.device,
        ):
            return Experts(
                experts,
                hidden,
                intermediate,
                activation=activation,
                gated=bool(module.has_gate),
                gating=gating,
                bias=bool(module.has_bias),
                transposed=bool(module.is_transposed),
                interleaved=not module.is_concatenated,
            )
    return None


def candidates(module: torch.nn.Module, *, gated: bool) -> Iterator[tuple[str, Gating | None]]:
    """What a module could compute between its products: limits and alphas are numbers that it has."""
    yield from ((name, None) for name in ACTIVATIONS)
    if not gated:
        return
    numbers = {n: float(v) for n, v in vars(module).items() if isinstance(v, int | float) and not isinstance(v, bool)}
    limits = {v for n, v in numbers.items() if "limit" in n and v > 0}
    alphas = {1.0, *(v for n, v in numbers.items() if "alpha" in n)}
    yield from (
        ("silu", ClampedSwiGLU(limit, alpha, offset))
        for limit in sorted(limits)
        for alpha in sorted(alphas)
        for offset in (0.0, 1.0)
    )


@torch.no_grad()
def computes(
    function: Callable[[torch.Tensor], torch.Tensor],
    activation: Activation,
    gating: Gating | None,
    *,
    gated: bool,
    interleaved: bool = False,
    device: torch.device | str = "cpu",
) -> bool:
    """Whether a function of rows [M, 16] does what would be declared, on numbers that meet every clamp."""
    generator = torch.Generator().manual_seed(0)
    x = (_SPREAD * torch.randn(_PROBED, generator=generator, dtype=torch.float32, device="cpu")).to(device)
    b = Builder("between")
    h = b.input("h", tensor(DType.F32, "T", _PROBED[1]))
    first: list[Value] = list(create_split(h, interleaved)) if gated else [h]
    ours = evaluate(b.build(y=activated(first, activation, gating)).entry, {"h": x})[0]
    return torch.allclose(ours, function(x), rtol=1e-5, atol=1e-6)

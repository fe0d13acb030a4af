"""How the tests of experts call them: the one place that says what runs a declaration."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moesaic.ir.core import Module
from moesaic.ir.experts import Experts
from moesaic.passes.differentiate import derive
from moesaic.runtime.reference import TORCH_DTYPES, evaluate

DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

EXPERT_BACKENDS = ["reference"]


def declared(experts: Experts, inputs: Mapping[str, torch.Tensor]) -> Module:
    """The function that experts declare for inputs of these types."""
    indices, weights = inputs["indices"], inputs["weights"]
    return experts.module(DTYPES[inputs["x"].dtype], indices.shape[1], DTYPES[indices.dtype], DTYPES[weights.dtype])


def run_experts(
    experts: Experts, inputs: Mapping[str, torch.Tensor], backend: str = "reference"
) -> dict[str, torch.Tensor]:
    """Outputs by name, through which torch differentiates. Inputs are used as they lie in memory."""
    assert backend in EXPERT_BACKENDS, f"nothing runs experts on {backend!r} yet"
    function = declared(experts, inputs).entry
    return dict(zip(function.result_names, evaluate(function, inputs), strict=True))


def gradients_by_rule(
    experts: Experts, inputs: Mapping[str, torch.Tensor], d_hidden: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Gradients by the names of the inputs, from the backward function that is derived from the declared one."""
    backward = derive(declared(experts, inputs).entry)
    assert backward is not None
    given = {**{n: t.detach() for n, t in inputs.items()}, "d_hidden": d_hidden}
    results = evaluate(backward, {a.name: given[a.name] for a in backward.arguments})
    return {n.removeprefix("d_"): g for n, g in zip(backward.result_names, results, strict=True)}


def random_inputs(
    experts: Experts,
    tokens: int,
    top_k: int,
    *,
    dtype: torch.dtype = torch.float64,
    indices: torch.dtype = torch.int32,
    weights: torch.dtype | None = None,
    seed: int = 1,
) -> dict[str, torch.Tensor]:
    """Inputs of a declaration: floats of spread 1 that take a gradient, and ids from -1 to E."""
    generator = torch.Generator().manual_seed(seed)
    function = experts.module(DTYPES[dtype], top_k, DTYPES[indices], DTYPES[weights or dtype]).entry
    inputs: dict[str, torch.Tensor] = {}
    for argument in function.arguments:
        shape = [d if isinstance(d, int) else tokens for d in argument.type.shape]
        kind = TORCH_DTYPES[argument.type.dtype]
        if kind.is_floating_point:
            inputs[argument.name] = torch.randn(shape, dtype=torch.float64, generator=generator).to(kind)
            inputs[argument.name].requires_grad_()
        else:
            inputs[argument.name] = torch.randint(-1, experts.num_experts + 1, shape, generator=generator).to(kind)
    return inputs


def learned(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inputs that take a gradient."""
    return {n: t for n, t in inputs.items() if t.requires_grad}

"""How the tests of experts call them: the one place that says what runs a declaration, and what they share.

A kernel that was compiled once is kept, so tests share few declarations and numbers of picks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from routing import device_of

import moesaic as mo
from moesaic.ir.core import Module
from moesaic.ir.experts import Experts
from moesaic.passes.differentiate import derive
from moesaic.runtime.reference import TORCH_DTYPES, evaluate

Tensors = dict[str, torch.Tensor]

DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

EXPERT_BACKENDS = ["reference"]
"""What runs every declaration in every type; a kernel takes no float64."""


def declared(experts: Experts, inputs: Mapping[str, torch.Tensor]) -> Module:
    """The function that experts declare for inputs of these types."""
    indices, weights = inputs["indices"], inputs["weights"]
    return experts.module(DTYPES[inputs["x"].dtype], indices.shape[1], DTYPES[indices.dtype], DTYPES[weights.dtype])


def run_experts(
    experts: Experts, inputs: Mapping[str, torch.Tensor], backend: str = "reference"
) -> dict[str, torch.Tensor]:
    """Outputs by name, through which torch differentiates. Inputs are used as they lie in memory."""
    if backend == "reference":
        function = declared(experts, inputs).entry
        for argument in function.arguments:  # which a compiled layer checks, and the reference alone does not
            found = inputs[argument.name].shape
            fits = [d == n for d, n in zip(argument.type.shape, found, strict=True) if isinstance(d, int)]
            assert all(fits), f"{argument.name} is declared {argument.type}, found {list(found)}"
        return dict(zip(function.result_names, evaluate(function, inputs), strict=True))
    device = device_of(backend)
    result = mo.compile(experts, backend=backend)(**{n: t.to(device) for n, t in inputs.items()})
    found = {experts.outputs[0]: result} if isinstance(result, torch.Tensor) else result._asdict()
    return {n: t.to(inputs["x"].device) for n, t in found.items()}


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


# Compiled layers ------------------------------------------------------------------------------------------------------

PRODUCT = 2.0**-20
"""Of the largest value, for float32: sums of a few hundred products, and an activation between two of them."""

ROUNDED = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
"""Of the largest value: operands are rounded between products (2^-9 and 2^-12 each), and errors of a sum of n add up
like the root of n where the values do."""


def relu2(x: Any) -> Any:
    return mo.math.relu(x) * mo.math.relu(x)


def clamped_after(gate: Any, up: Any) -> Any:
    return mo.math.minimum(mo.math.silu(gate), 0.5) * mo.math.maximum(mo.math.minimum(up, 0.4), -0.4)


GPT_OSS = mo.ClampedSwiGLU(limit=0.6, alpha=1.702, offset=1.0)
# Of one size, and with as many picks in most tests, they share the kernels of dispatch and combine, which the emulator
# builds once.
SIZES = (5, 24, 16)
TOP_K = 3
KINDS: dict[str, mo.Experts] = {
    "swiglu": mo.Experts(*SIZES),
    "odd": mo.Experts(7, 33, 17),
    "narrow": mo.Experts(3, 1, 1),
    "wide": mo.Experts(2, 40, 150),
    "bias": mo.Experts(*SIZES, bias=True),
    "gpt_oss": mo.Experts(*SIZES, bias=True, transposed=True, interleaved=True, gating=GPT_OSS),
    "interleaved": mo.Experts(5, 21, 11, interleaved=True),
    "transposed": mo.Experts(*SIZES, transposed=True),
    "clamped_after": mo.Experts(*SIZES, gating=clamped_after),
    "relu2": mo.Experts(*SIZES, gated=False, activation=relu2, bias=True),
    "input": mo.Experts(*SIZES, weight_on="input", transposed=True, bias=True),
    "middle": mo.Experts(*SIZES, weight_on="middle"),
    "aligned": mo.Experts(*SIZES, align=16),
    "capacity": mo.Experts(*SIZES, capacity=0.7, outputs=("hidden", "counts", "dropped")),
    "padded": mo.Experts(*SIZES, capacity=1.2, pad=True, align=16),
    "separate": mo.Experts(*SIZES, separate=True, transposed="down", bias=True),
    "one": mo.Experts(1, 24, 16),
}


def tensors_for(
    experts: mo.Experts, tokens: int, top_k: int, dtype: torch.dtype, *, seed: int = 0, ids: torch.Tensor | None = None
) -> Tensors:
    """Inputs whose products have values near 1; ids from -1 to E + 1, with repeats."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=g, dtype=torch.float64)).to(dtype)

    e, h, i = experts.num_experts, experts.hidden, experts.intermediate
    wide = 2 * i if experts.gated and not experts.separate else i
    up, down = (e, wide, h), (e, h, i)
    if experts.transposed in (True, "up"):
        up = (e, h, wide)
    if experts.transposed in (True, "down"):
        down = (e, i, h)
    made = {
        "x": normal(tokens, h),
        "indices": torch.randint(-1, e + 2, (tokens, top_k), generator=g, dtype=torch.int32) if ids is None else ids,
        "weights": torch.rand((tokens, top_k), generator=g, dtype=torch.float64).float(),
        **{name: normal(*up, scale=h**-0.5) for name in experts.up_names},
        "down_proj": normal(*down, scale=i**-0.5),
    }
    if experts.bias:
        for name in experts.up_names:
            made[f"{name}_bias"] = normal(e, wide, scale=0.3)
        made["down_proj_bias"] = normal(e, h, scale=0.3)
    return made


def run(layer: Callable[..., Any], given: Tensors, cotangent: torch.Tensor | None, device: str) -> Tensors:
    """The result, and the gradient of every float input."""
    inputs = {n: t.detach().to(device).requires_grad_(t.is_floating_point()) for n, t in given.items()}
    result = layer(**inputs)
    hidden = result if isinstance(result, torch.Tensor) else result.hidden
    made = {"hidden": hidden.detach().cpu()}
    if not isinstance(result, torch.Tensor):
        made |= {n: getattr(result, n).cpu() for n in result._fields if n != "hidden"}
    if cotangent is not None:
        hidden.backward(cotangent.to(device, hidden.dtype))
        for name, tensor in inputs.items():
            if tensor.is_floating_point():
                assert tensor.grad is not None, f"no gradient of {name}"
                made[f"d_{name}"] = tensor.grad.cpu()
    return made


def exact(experts: mo.Experts, given: Tensors, cotangent: torch.Tensor) -> Tensors:
    """The same by the reference, in float64."""
    layer = mo.compile(replace(experts, dtype=None), backend="reference")
    wide = {n: t.double() if t.is_floating_point() else t for n, t in given.items()}
    return run(layer, wide, cotangent.double(), "cpu")


def check(found: Tensors, wanted: Tensors, dtype: torch.dtype) -> None:
    assert found.keys() == wanted.keys()
    for name, right in wanted.items():
        if not right.is_floating_point():
            assert torch.equal(found[name], right), name
            continue
        allowed = ROUNDED.get(dtype, PRODUCT)
        largest = right.abs().max().item() if right.numel() else 0.0
        error = (found[name].double() - right).abs().max().item() if right.numel() else 0.0
        assert error <= allowed * largest, f"{name}: off by {error:.3g} where the largest is {largest:.3g}"


def cotangent_for(tokens: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(dtype)


def ids(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)

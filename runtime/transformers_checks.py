"""Whether a block of a transformers' model and the layer that would take its place compute the same: a small copy with
random weights goes through both forwards, and a block whose results differ is left alone.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from moesaic.ir.declare import Router
from moesaic.ir.moe import MoE
from moesaic.ir.types import DType
from moesaic.runtime.transformers_blocks import FAILURES, Plan, install, remove, replaces
from moesaic.runtime.transformers_families import at

_INNER, _TOKENS = 8, 9  # of the small copy
_MANY = 2**22  # numbers in a weight: each expert's part of a gradient of all of them would take this memory
_OUTPUT, _GRADIENT = 2e-4, 1e-3  # of the largest value, in float32


def differs(block: nn.Module, plan: Plan) -> str | None:
    """What differs between a block and its plan on random numbers, weights and inputs, with gradients; ``None`` if all
    agree.

    The block's own weights are not used: it runs on the CPU in float32 with others, which are narrower where they can
    be.
    """
    found = None
    for seed in (0, 1):  # picks among logits that are equal but for rounding may differ once
        try:
            found = _difference(block, plan, seed)
        except FAILURES as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if found is None:
            break
    return found


def _difference(block: nn.Module, plan: Plan, seed: int) -> str | None:
    g = torch.Generator().manual_seed(seed)
    small, weights = _narrowed(block, plan, g)
    hidden = weights[plan.family.weight].shape[1]
    x = _random((_TOKENS, hidden), g)
    x = x if plan.experts is None else x.view(1, _TOKENS, hidden)
    given = dict(plan.family.example(block, _TOKENS, g)) if plan.family.example is not None else {}
    with _as_it_would_run(block, plan):
        theirs = _run_with(block, weights, x, given, g.initial_seed()) | _routes_with(block, plan, weights, x, given)
        changed = replaces(block, small)
        for module, base, made in changed:
            install(module, base, made)
        try:
            ours = _run_with(block, weights, x, given, g.initial_seed()) | _routes_with(block, plan, weights, x, given)
        finally:
            for module, _, _ in changed:
                remove(module)
    for name, wanted in theirs.items():
        got = ours.get(name)
        if got is None or got.shape != wanted.shape:
            return f"{name} is {None if got is None else list(got.shape)} in place of {list(wanted.shape)}"
        size = wanted.abs().max().item()
        error = (got - wanted).abs().max().item()
        limit = _OUTPUT if name.startswith("output") else _GRADIENT
        if not error <= limit * max(size, 1e-6):
            return f"{name} differs by {error:.1e}, its largest value being {size:.1e}"
    return None


def _random(shape: Sequence[int], g: torch.Generator) -> torch.Tensor:
    """Normal float32 numbers on the CPU, whatever torch makes by default."""
    return torch.randn(shape, generator=g, dtype=torch.float32, device="cpu")


def _narrowed(block: nn.Module, plan: Plan, g: torch.Generator) -> tuple[Plan, dict[str, torch.Tensor]]:
    """The plan with narrow experts, and random tensors for all that the block has, by their names there."""
    shapes: dict[str, list[int]] = {}
    experts, shared = plan.experts, plan.shared
    if experts is not None:
        experts = replace(experts, intermediate=_INNER)
        shared = None if shared is None else replace(shared, intermediate=_INNER)
        paths = dict(plan.places)
        for argument in MoE(Router(experts.num_experts, 1), experts, shared).module(DType.F32).entry.arguments:
            path = paths.get(argument.name)
            if isinstance(path, str) and argument.name != "gate_weight":
                shapes[path] = [d for d in argument.type.shape if isinstance(d, int)]
        if plan.family.narrow is not None:
            shapes |= plan.family.narrow(block, _INNER)
    options = replace(plan.options, backend="reference", allow_tf32=False)
    made: dict[str, torch.Tensor] = {}
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        shape = shapes.get(name, list(tensor.shape))
        if not tensor.is_floating_point():
            made[name] = torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.detach().cpu()
            continue
        values = _random(shape, g)
        if "bias" in name:
            made[name] = 0.7 * values
        elif len(shape) < 2:
            made[name] = 1.0 + 0.2 * values
        else:  # logits near 1; what stands between products goes beyond every clamp
            made[name] = values * ((1.5 if name == plan.family.weight else 6.0) * shape[-1] ** -0.5)
    return replace(plan, experts=experts, shared=shared, options=options, numbers=()), made


@contextlib.contextmanager
def _as_it_would_run(block: nn.Module, plan: Plan) -> Iterator[None]:
    """In evaluation, without hooks, with narrow experts and their own loop."""
    training = [(m, m.training) for m in block.modules()]
    hooks = [(m, n, vars(m)[n]) for m in block.modules() for n in ("_forward_hooks", "_forward_pre_hooks")]
    config: Any = getattr(at(block, plan.family.experts), "config", None)
    chosen = getattr(config, "_experts_implementation", None)
    widths = [(at(block, path.rpartition(".")[0]), path.rpartition(".")[2]) for path in plan.family.widths]
    were = [getattr(part, name) for part, name in widths]
    for part, name in widths:
        setattr(part, name, _INNER)
    for module, name, _ in hooks:
        vars(module)[name] = OrderedDict()
    block.eval()
    if chosen is not None:
        config._experts_implementation = "eager"
    try:
        yield
    finally:
        if chosen is not None:
            config._experts_implementation = chosen
        for (part, name), was in zip(widths, were, strict=True):
            setattr(part, name, was)
        for module, name, held in hooks:
            vars(module)[name] = held
        for module, mode in training:
            module.training = mode


@torch.no_grad()
def _routes_with(
    block: nn.Module, plan: Plan, weights: Mapping[str, torch.Tensor], x: torch.Tensor, given: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """What a hook on the router's module sees: rows of tokens, in ascending order, as picks may come in any."""
    seen: list[Any] = []
    hook = at(block, plan.family.gate).register_forward_hook(lambda module, args, result: seen.append(result))
    with torch.autocast("cpu", enabled=False):
        torch.func.functional_call(block, dict(weights), (x.clone(),), dict(given))
    hook.remove()
    (result,) = seen
    results = enumerate(result if isinstance(result, tuple) else (result,))
    rows = {i: r for i, r in results if isinstance(r, torch.Tensor) and r.dim() == 2}
    return {f"output {i} of the router": r.float().sort(-1)[0] for i, r in rows.items()}


def _run_with(
    block: nn.Module, weights: Mapping[str, torch.Tensor], x: torch.Tensor, given: Mapping[str, Any], seed: int
) -> dict[str, torch.Tensor]:
    """Outputs, and gradients of random cotangents: of x, and of all weights but those of many experts."""
    learned = {
        n: t.clone().requires_grad_(t.is_floating_point() and "bias" not in n and t.numel() < _MANY)
        for n, t in weights.items()
    }
    wanted = {n: t for n, t in learned.items() if t.requires_grad}
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        leaf = x.clone().requires_grad_()
        result = torch.func.functional_call(block, learned, (leaf.clone(),), dict(given))
        results = result if isinstance(result, tuple) else (result,)
        outputs = [r for r in results if r.is_floating_point()]
        made = {f"output {i}": r.detach() for i, r in enumerate(outputs)}
        differentiable = [r for r in outputs if r.requires_grad]
        g = torch.Generator().manual_seed(seed + 100)
        cotangents = [_random(r.shape, g) for r in differentiable]
        grads = torch.autograd.grad(differentiable, [leaf, *wanted.values()], cotangents, allow_unused=True)
    for name, tensor, grad in zip(("x", *wanted), (leaf, *wanted.values()), grads, strict=True):
        made[f"gradient of {name}"] = torch.zeros_like(tensor) if grad is None else grad
    return made

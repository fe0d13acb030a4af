"""Routers of open models beside declared ones: a model's own module in `transformers`, and the comparison with it.

Modules get random weights; nothing is downloaded. They run on the CPU in float32 and are fed hidden states; a declared
router gets the logits of the same product. Expert sets must be equal except where rounding decides (see `TIE`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from routing import EXACT, GRADIENT, TIE, assert_close, by_expert, cotangent, device_of, near_cut, selection
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

import moesaic as mo

HIDDEN = 64
TOKENS = 67

MOST_LEFT_OUT = 2
"""Rows of 67 that may be left out because the last pick, or the last group kept, leads by less than `TIE`: with gaps of
about 1e-2 between neighbours at the cut, a row is this close once in ten thousand."""

CORRECTION = 0.05  # spread of selection biases: it changes many picks, and does not decide them alone

Read = Callable[[Any, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]

# What modules take and return ----------------------------------------------------------------------------------------


def usual(module: Any, hidden: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, indices) of a module that returns (logits, weights, indices)."""
    _, weights, indices = module(hidden)
    return weights, indices


def given_bias(module: Any, hidden: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The same where the selection bias belongs to the block that calls the module."""
    _, weights, indices = module(hidden, bias)
    return weights, indices


def read_llama4(module: Any, hidden: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights over all experts, where picked): Llama 4 returns the former, exactly 0 elsewhere."""
    dense, _ = module(hidden)
    return dense, dense.detach() > 0


@dataclass(frozen=True)
class Family:
    """A model's router module, and the router that is declared to equal it."""

    model: str
    config: str
    module: str
    router: Callable[[], mo.Router]
    options: tuple[tuple[str, object], ...] = ()
    read: Read = usual
    """Calls the module: (weights, indices), or (weights over all experts, where picked)."""
    arguments: Callable[[Any], tuple[object, ...]] = lambda config: (config,)
    """What the module is made from."""
    factor: str | None = None
    """The field of the configuration that the block multiplies the sum of its routed experts by."""
    correction: float = CORRECTION

    def configuration(self) -> Any:
        module = importlib.import_module(f"transformers.models.{self.model}.configuration_{self.model}")
        return getattr(module, self.config)(hidden_size=HIDDEN, **dict(self.options))

    def build(self) -> torch.nn.Module:
        """The module with random weights and, where the family has one, a random selection bias."""
        modeling = importlib.import_module(f"transformers.models.{self.model}.modeling_{self.model}")
        module: torch.nn.Module = getattr(modeling, self.module)(*self.arguments(self.configuration()))
        random = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for path, values in [*module.named_parameters(), *module.named_buffers()]:
                name = path.rpartition(".")[2]
                spread = {"weight": HIDDEN**-0.5, "bias": 0.5, "scale": 0.2, "per_expert_scale": 0.2}
                values.copy_(spread.get(name, self.correction) * torch.randn(values.shape, generator=random))
                if name.endswith("scale"):
                    values.add_(1.0)
        return module


@dataclass(frozen=True)
class Routed:
    """What a model's module computed, and the gradients of random cotangents of its weights."""

    dense: torch.Tensor
    """[T, E]: weights by expert, 0 where not picked."""
    picked: torch.Tensor
    """[T, E]: True where picked."""
    hidden: torch.Tensor
    """Left side of the product that gives the logits."""
    weight: torch.Tensor
    """Right side of it."""
    logits: torch.Tensor
    """The product, with the gate's bias where there is one."""
    learned: Mapping[str, torch.Tensor]
    """Inputs of the declared router that get a gradient."""
    d_logits: torch.Tensor
    d_hidden: torch.Tensor
    d_weight: torch.Tensor
    d_learned: Mapping[str, torch.Tensor]


class _Product(TorchFunctionMode):
    """Keeps the operands and the result of the last call of `linear`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is linear:
            self.hidden, self.weight, self.bias = (*args, *(kwargs or {}).values(), None)[:3]
            self.logits = result
        return result


def of_module(family: Family, module: torch.nn.Module, bias: torch.Tensor | None) -> Routed:
    """The module's results on random hidden states."""
    hidden = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(5)).requires_grad_()
    with _Product() as product:
        weights, indices = family.read(module, hidden, bias)
    if indices.dtype is torch.bool:
        dense, picked = weights, indices
    else:
        dense = torch.zeros_like(product.logits).scatter(-1, indices, weights)
        picked = torch.zeros_like(product.logits, dtype=torch.bool).scatter(-1, indices, True)
    if family.factor is not None:
        dense = dense * getattr(family.configuration(), family.factor)
    learned = {"gate_bias": product.bias, "expert_scale": getattr(module, "per_expert_scale", None)}
    learned = {name: values for name, values in learned.items() if values is not None}
    # The cotangent of a weight is drawn by its expert: families order their picks differently.
    reached = [product.logits, product.hidden, product.weight, *learned.values()]
    d_logits, d_hidden, d_weight, *others = torch.autograd.grad(dense, reached, cotangent(dense, seed=9))
    return Routed(
        dense=dense.detach(),
        picked=picked,
        hidden=product.hidden.detach(),
        weight=product.weight.detach(),
        logits=product.logits.detach(),
        learned={name: values.detach() for name, values in learned.items()},
        d_logits=d_logits,
        d_hidden=d_hidden,
        d_weight=d_weight,
        d_learned=dict(zip(learned, others)),
    )


def correction_of(family: Family, module: torch.nn.Module) -> torch.Tensor | None:
    """The selection bias: of the module or of a part of it, or what the block that calls the module would give it."""
    found = [t for n, t in [*module.named_buffers(), *module.named_parameters()] if "correction_bias" in n]
    if found:
        return found[0].detach().flatten()
    router = family.router()
    if not router.selection_bias:
        return None
    return family.correction * torch.randn(router.columns, generator=torch.Generator().manual_seed(13))


def assert_routes_like_the_model(family: Family, backend: str) -> None:
    """Picks, counts, weights and gradients of the declared router are those of the module."""
    router = family.router()
    module = family.build()
    correction = correction_of(family, module)
    assert (correction is not None) == router.selection_bias
    wanted = of_module(family, module, correction)
    declared = {"gate_bias": router.gate_bias, "expert_scale": router.expert_scale}
    assert set(wanted.learned) == {name for name, is_declared in declared.items() if is_declared}
    assert wanted.logits.shape == (TOKENS, router.columns)

    # The same hidden states through the same product and the declared router.
    device = device_of(backend)
    hidden = wanted.hidden.clone().requires_grad_()
    weight = wanted.weight.clone().requires_grad_()
    product = linear(hidden, weight)
    logits = product.detach().to(device).requires_grad_()
    learned = {name: values.to(device).requires_grad_() for name, values in wanted.learned.items()}
    inputs = {"bias": correction.to(device)} if correction is not None else {}
    layer = mo.compile(router, backend=backend)
    r = layer(logits, **inputs, **learned)
    assert layer.backend == backend
    indices = r.indices.cpu()
    dense = by_expert(r.weights.cpu(), indices, router.columns)
    picked = torch.zeros_like(wanted.picked).scatter(-1, indices.long(), True)

    # Where rounding decides, both choices are right; those rows, and only those, are left out.
    compared = ~near_cut(router, selection(router, product, correction, learned.get("gate_bias")), TIE)
    assert int((~compared).sum()) <= MOST_LEFT_OUT
    assert torch.equal(picked[compared], wanted.picked[compared])
    assert torch.equal(r.counts.cpu(), picked.sum(0, dtype=torch.int32))
    assert_close("weights", dense[compared], wanted.dense[compared], EXACT)

    # Gradients, from the same cotangents.
    sent = cotangent(wanted.dense, seed=9).gather(-1, indices.long()).to(device)
    d_logits, *others = (g.cpu() for g in torch.autograd.grad(r.weights, [logits, *learned.values()], sent))
    d_hidden, d_weight = torch.autograd.grad(product, [hidden, weight], d_logits)
    assert_close("gradient of the logits", d_logits[compared], wanted.d_logits[compared], GRADIENT)
    assert_close("gradient of the hidden states", d_hidden[compared], wanted.d_hidden[compared], GRADIENT)
    if compared.all():
        assert_close("gradient of the gate's weight", d_weight, wanted.d_weight, GRADIENT)
        for name, gradient in zip(learned, others):
            assert_close(f"gradient of {name}", gradient, wanted.d_learned[name], GRADIENT)


def rows_that_a_bias_changes(family: Family) -> int:
    """How many of the module's rows the picks without the selection bias differ from."""
    module = family.build()
    wanted = of_module(family, module, correction_of(family, module))
    router = family.router()
    scores = selection(router, wanted.logits)
    unbiased = torch.zeros_like(wanted.picked).scatter(-1, scores.topk(router.top_k).indices, True)
    return int((unbiased != wanted.picked).any(-1).sum())

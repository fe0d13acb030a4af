"""What the tests of the torch integration share: a few small routers, inputs for them, and what torch made of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from routing import BACKENDS, COMPILED, cotangent, softsign_score
from torch._dynamo.utils import counters

import moesaic as mo
from moesaic.runtime.execute import RUNNERS
from moesaic.runtime.layer import CompiledLayer
from moesaic.runtime.program import program_by_key

ROUTERS = {
    "softmax": mo.Router(8, 2, renormalize=True),
    "grouped": mo.Router(
        16,
        4,
        score="sigmoid",
        selection_bias=True,
        groups=4,
        groups_kept=2,
        renormalize=True,
        renorm_eps=1e-20,
        scale=2.5,
    ),
    "gate_bias": mo.Router(12, 3, order="topk_then_score", gate_bias=True),
    "dense": mo.Router(8, 2, score="sigmoid", outputs=("probs", "weights", "indices", "counts", "map")),
    "user_score": mo.Router(7, 3, score=softsign_score),
}
"""Few and small, for every kernel is built for the emulator once a run: no loss of kinds, odd sizes among them."""

FORWARD = torch.ops.moesaic.forward.default
BACKWARD = torch.ops.moesaic.backward.default


def logits_of(
    router: mo.Router,
    tokens: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    *,
    seed: int = 1,
    strided: bool = False,
) -> torch.Tensor:
    """Random logits [T, E]; with rows further apart than they are long, if `strided`."""
    columns = router.num_experts
    drawn = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    if not strided:
        return drawn
    wide = torch.full((tokens, 2 * columns + 1), float("nan"), dtype=dtype, device=device)
    wide[:, :columns] = drawn
    return wide[:, :columns]


def others_of(router: mo.Router, device: str = "cpu", *, seed: int = 2) -> dict[str, torch.Tensor]:
    """Random values of the other inputs, by name."""
    generator = torch.Generator().manual_seed(seed)
    names = ["gate_bias"] * router.gate_bias + ["bias"] * router.selection_bias
    return {n: torch.randn(router.num_experts, generator=generator).to(device) for n in names}


def handle_of(layer: CompiledLayer, dtype: torch.dtype = torch.float32) -> str:
    return layer._handles[dtype]


def leaves(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies that take a gradient, but for the selection bias."""
    return {n: t.detach().clone().requires_grad_(n != "bias") for n, t in tensors.items()}


def floats_of(result: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [r for r in result if r.is_floating_point()]


def step(
    call: Callable[..., tuple[torch.Tensor, ...]], logits: torch.Tensor, others: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Outputs of a call and the gradients of its inputs, from random cotangents of every float output."""
    given = leaves({"logits": logits, **others})
    result = call(given["logits"], **{n: t for n, t in given.items() if n != "logits"})
    floats = floats_of(result)
    torch.autograd.backward(floats, [cotangent(f, seed=31 + i) for i, f in enumerate(floats)])
    found = [*(r.detach() for r in result), *(t.grad for n, t in given.items() if n != "bias")]
    assert all(f is not None for f in found)
    return found


def backward_arguments(
    layer: CompiledLayer, router: mo.Router, logits: torch.Tensor, names: tuple[str, ...] | None = None
) -> tuple[str, str, list[str], list[torch.Tensor]]:
    """Arguments for ``moesaic::backward``, as the autograd formula would pass them."""
    handle = handle_of(layer, logits.dtype)
    program = program_by_key(handle)
    names = names or program.float_results
    forward, backward = program.forward_function(training=True), program.backward_function(names)
    assert backward is not None
    named = {"logits": logits, **others_of(router, str(logits.device))}
    results = FORWARD(handle, layer._asked, True, [named[a.name] for a in forward.arguments])
    named.update(zip(forward.result_names, results, strict=True))
    for name in names:
        named[f"d_{name}"] = cotangent(named[name], seed=5)
    return handle, layer._asked, list(names), [named[a.name] for a in backward.arguments]


compiled_backends = pytest.mark.parametrize("backend", COMPILED)
all_backends = pytest.mark.parametrize("backend", BACKENDS)
routers = pytest.mark.parametrize("name", ROUTERS)


def fresh_torch() -> Iterator[None]:
    """No graph of another test, and counters that start at 0."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled(call: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(call, fullgraph=True, **{"backend": "aot_eager", "dynamic": True, **options})


def graphs() -> int:
    """How many graphs torch.compile made so far; a recompilation makes another."""
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(actual) == len(expected) and all(
        a.dtype == e.dtype and torch.equal(a, e) for a, e in zip(actual, expected, strict=True)
    )


def recorded_calls(monkeypatch: pytest.MonkeyPatch, backend: str) -> list[tuple[str, tuple[str, ...]]]:
    """What the runner is asked for from now on: the kind of function, and the cotangents of a backward."""
    runner = RUNNERS[backend]
    calls: list[tuple[str, tuple[str, ...]]] = []
    run = type(runner).run

    def spy(program: Any, kind: str, cotangents: tuple[str, ...], inputs: Any) -> Any:
        calls.append((kind, cotangents))
        return run(runner, program, kind, cotangents, inputs)

    monkeypatch.setattr(runner, "run", spy)
    return calls


class LayerModule(torch.nn.Module):
    """A gate and a router, with a residual path."""

    def __init__(self, router: mo.Router, backend: str) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(router.num_experts, router.num_experts, bias=False)
        self.route = mo.compile(router, backend=backend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.route(self.gate(x)).weights.sum(-1, keepdim=True)

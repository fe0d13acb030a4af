"""Compiled layers under autograd: what gives a gradient, what is saved, checkpointing; and what is refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from routing import EXACT, assert_close, cotangent, device_of
from torch_calls import (
    ROUTERS,
    compiled_backends,
    equal,
    fresh_torch,
    leaves,
    logits_of,
    others_of,
    recorded_calls,
    routers,
    step,
)

import moesaic as mo
from moesaic.ir.errors import InputError, UnsupportedError


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    yield from fresh_torch()


# What is refused ------------------------------------------------------------------------------------------------------


def second_derivative(weights: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    x = x.requires_grad_()
    (first,) = torch.autograd.grad(weights(x).pow(2).sum(), x, create_graph=True)
    torch.autograd.grad(first.pow(2).sum(), x)


def forward_mode(weights: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(weights(forward_ad.make_dual(x, x))).tangent.count_nonzero()


TRANSFORMS = {
    "second derivative": (second_derivative, "second derivatives"),
    "hessian": (lambda f, x: torch.autograd.functional.hessian(lambda y: f(y).pow(2).sum(), x), "second derivatives"),
    "vmap": (lambda f, x: torch.vmap(f)(torch.stack([x, x])), "vmap"),
    "func.grad": (lambda f, x: torch.func.grad(lambda y: f(y).pow(2).sum())(x), "torch.func.grad"),
    "vmap of grad": (
        lambda f, x: torch.vmap(torch.func.grad(lambda y: f(y).pow(2).sum()))(torch.stack([x, x])),
        "torch.func.grad",
    ),
    "vjp": (lambda f, x: torch.func.vjp(f, x), "torch.func.grad, vjp"),
    "jacrev": (lambda f, x: torch.func.jacrev(f)(x), "jacrev"),
    "jvp": (lambda f, x: torch.func.jvp(f, (x,), (x,)), "forward-mode"),
    "jacfwd": (lambda f, x: torch.func.jacfwd(f)(x), "forward-mode"),
    "dual": (forward_mode, "forward-mode"),
    "batched cotangents": (
        lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True),
        "batched cotangents",
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@compiled_backends
def test_transforms_are_refused_with_a_remedy(transform: str, backend: str) -> None:
    router, device = ROUTERS["softmax"], device_of(backend)
    layer = mo.compile(router, backend=backend)
    attempt, message = TRANSFORMS[transform]
    with pytest.raises(UnsupportedError, match=message) as caught:
        attempt(lambda x: layer(x).weights, logits_of(router, 3, device=device))
    remedy = "leading dimensions" if transform == "vmap" else "backend='reference'"
    assert remedy in str(caught.value)
    # The remedy works.
    reference = mo.compile(router, backend="reference")
    attempt(lambda x: reference(x).weights, logits_of(router, 3, device=device))


@compiled_backends
def test_a_gradient_may_be_part_of_a_graph(backend: str) -> None:
    """``create_graph`` alone, without a second derivative through the layer, is no reason to refuse."""
    router, device = ROUTERS["softmax"], device_of(backend)
    layer = mo.compile(router, backend=backend)
    x = logits_of(router, 3, device=device).requires_grad_()
    (plain,) = torch.autograd.grad(layer(x).weights.pow(2).sum(), x)
    (kept,) = torch.autograd.grad(layer(x).weights.pow(2).sum(), x, create_graph=True)
    assert torch.equal(plain, kept)
    assert plain.count_nonzero()
    rows = torch.autograd.functional.jacobian(lambda y: layer(y).weights, x.detach())
    assert rows.shape == (3, 2, 3, 8)


@compiled_backends
def test_layouts_that_are_refused(backend: str) -> None:
    router, device = ROUTERS["softmax"], device_of(backend)
    layer = mo.compile(router, backend=backend)
    with pytest.raises(InputError, match=r"dense.*sparse.*to_dense"):
        layer(logits_of(router, 3, device=device).to_sparse())
    with pytest.raises(InputError, match="found logits on 'meta'"):
        layer(torch.empty(3, 8, device="meta"))


@compiled_backends
def test_changing_saved_logits_in_place_is_noticed(backend: str) -> None:
    router, device = ROUTERS["softmax"], device_of(backend)
    leaf = logits_of(router, 3, device=device).requires_grad_()
    logits = leaf * 1
    weights = mo.compile(router, backend=backend)(logits).weights
    with torch.no_grad():
        logits.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        weights.sum().backward()


# Autograd -------------------------------------------------------------------------------------------------------------


@compiled_backends
@routers
def test_gradients_do_not_depend_on_how_cotangents_lie_in_memory(name: str, backend: str) -> None:
    router, device = ROUTERS[name], device_of(backend)
    given = leaves({"logits": logits_of(router, 6, device=device), **others_of(router, device)})
    logits = given.pop("logits")
    weights = mo.compile(router, backend=backend)(logits, **given).weights
    tokens, picks = weights.shape

    def gradient(of: torch.Tensor) -> torch.Tensor:
        assert of.shape == weights.shape
        return torch.autograd.grad(weights, logits, of, retain_graph=True)[0]

    random = cotangent(weights, seed=3)
    wide = torch.full((tokens, 2 * picks + 1), float("nan"), device=device)
    wide[:, ::2] = torch.nn.functional.pad(random, (0, 1))
    cases = {
        "ones": torch.ones((), device=device).expand(tokens, picks),
        "one value a token": random[:, :1].expand(tokens, picks),
        "one row": random[:1].expand(tokens, picks),
        "transposed": random.t().contiguous().t(),
        "every other column": wide[:, ::2][:, :picks],
        "overlapping rows": torch.randn(tokens + picks, device=device).as_strided((tokens, picks), (1, 1)),
        "every other row": torch.stack([random, random], 1).flatten(0, 1)[::2],
        "backwards": random.flip(0),
        "negated": torch._neg_view(random),
        "off by one element": torch.nn.functional.pad(random.flatten(), (1, 0))[1:].view(tokens, picks),
    }
    for how, case in cases.items():
        plain = case.resolve_neg().clone(memory_format=torch.contiguous_format)
        assert torch.equal(gradient(case), gradient(plain)), how
    assert gradient(random).count_nonzero()


@compiled_backends
def test_logits_of_any_layout_give_the_same(backend: str) -> None:
    router, device = ROUTERS["softmax"], device_of(backend)
    layer = mo.compile(router, backend=backend)
    plain = logits_of(router, 6, device=device)
    expected = step(layer, plain, {})
    cases = {
        "strided": logits_of(router, 6, device=device, strided=True),
        "transposed": plain.t().contiguous().t(),
        "off by one element": torch.nn.functional.pad(plain.flatten(), (1, 0))[1:].view(6, 8),
        "negated": torch._neg_view(-plain),
        "a parameter": torch.nn.Parameter(plain),
        "a subclass": plain.as_subclass(type("Own", (torch.Tensor,), {})),
    }
    for how, case in cases.items():
        assert equal([r.as_subclass(torch.Tensor) for r in layer(case.detach())], expected[:-1]), how
        leaf = case.detach().requires_grad_()
        result = layer(leaf)
        assert equal([r.detach().as_subclass(torch.Tensor) for r in result], expected[:-1]), how
        result.weights.backward(cotangent(expected[0], seed=31))
        assert torch.equal(leaf.grad.as_subclass(torch.Tensor), expected[-1]), how
    row = plain[:1].expand(6, 8)
    assert equal(list(layer(row)), list(layer(row.contiguous())))


@compiled_backends
def test_some_outputs_used(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward of what was used is the one that runs; the gradients of parts add up to that of all."""
    router, device = ROUTERS["dense"], device_of(backend)
    layer = mo.compile(router, backend=backend)
    logits = logits_of(router, 6, device=device).requires_grad_()
    result = layer(logits)
    sent = {n: cotangent(getattr(result, n), seed=i) for i, n in enumerate(("probs", "weights"))}
    calls = recorded_calls(monkeypatch, backend)

    def gradient(*names: str) -> torch.Tensor:
        outputs, given = [getattr(result, n) for n in names], [sent[n] for n in names]
        return torch.autograd.grad(outputs, logits, given, retain_graph=True)[0]

    parts = [gradient("probs"), gradient("weights")]
    every = gradient("probs", "weights")
    assert calls == [("backward", ("probs",)), ("backward", ("weights",)), ("backward", ("probs", "weights"))]
    assert all(p.count_nonzero() for p in parts)
    assert_close("sum of the parts", parts[0] + parts[1], every, EXACT)
    assert [o.requires_grad for o in result] == [True, True, False, False, False]
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(result.counts.sum(), logits)


@compiled_backends
@pytest.mark.parametrize("learned", ["logits", "gate_bias"])
def test_some_inputs_require_a_gradient(learned: str, backend: str) -> None:
    router, device = ROUTERS["gate_bias"], device_of(backend)
    layer = mo.compile(router, backend=backend)
    given = {"logits": logits_of(router, 6, device=device), **others_of(router, device)}
    every = dict(zip(given, step(layer, given["logits"], {"gate_bias": given["gate_bias"]})[-2:], strict=True))
    given[learned] = given[learned].clone().requires_grad_()
    weights = layer(given["logits"], gate_bias=given["gate_bias"]).weights
    weights.backward(cotangent(weights, seed=31))
    assert torch.equal(given[learned].grad, every[learned])
    assert every[learned].count_nonzero()
    assert all(t.grad is None for n, t in given.items() if n != learned)


@compiled_backends
def test_the_selection_bias_gets_no_gradient(backend: str) -> None:
    router, device = ROUTERS["grouped"], device_of(backend)
    logits, bias = logits_of(router, 6, device=device), others_of(router, device)["bias"].requires_grad_()
    layer = mo.compile(router, backend=backend)
    layer(logits.requires_grad_(), bias=bias).weights.sum().backward()
    assert bias.grad is None
    assert logits.grad is not None


@compiled_backends
@routers
def test_a_graph_can_be_walked_twice(name: str, backend: str) -> None:
    router, device = ROUTERS[name], device_of(backend)
    given = leaves({"logits": logits_of(router, 6, device=device), **others_of(router, device)})
    logits = given.pop("logits")
    weights = mo.compile(router, backend=backend)(logits, **given).weights
    sent = cotangent(weights, seed=4)
    weights.backward(sent, retain_graph=True)
    once = logits.grad.clone()
    weights.backward(sent)
    assert torch.equal(logits.grad, once + once)
    assert once.count_nonzero()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        weights.backward(sent)


@compiled_backends
@routers
def test_what_training_saves(name: str, backend: str) -> None:
    """The inputs, the picks and vectors: no other float [T, E]."""
    router, device = ROUTERS[name], device_of(backend)
    layer = mo.compile(router, backend=backend)
    given = leaves({"logits": logits_of(router, 6, device=device), **others_of(router, device)})
    logits = given.pop("logits")
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        result = layer(logits, **given)
    assert saved
    addresses = {logits.data_ptr(), result.indices.data_ptr(), *(t.data_ptr() for t in given.values())}
    extra = [t for t in saved if t.data_ptr() not in addresses]
    assert all(t.dim() == 1 or (t.dim() == 2 and t.shape[1] <= router.top_k) for t in extra), [t.shape for t in extra]
    assert len(saved) == len({t.data_ptr() for t in saved})
    result.weights.backward(cotangent(result.weights, seed=4))
    assert logits.grad.count_nonzero()


@compiled_backends
@routers
def test_inference_saves_nothing(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESAIC_LAUNCHER", "python")  # whose calls can be watched
    router, device = ROUTERS[name], device_of(backend)
    layer = mo.compile(router, backend=backend)
    logits, others = logits_of(router, 6, device=device), others_of(router, device)
    expected = step(layer, logits, others)
    calls = recorded_calls(monkeypatch, backend)
    learned = logits.clone().requires_grad_()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        results = [layer(logits, **others)]
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                results.append(layer(learned, **others))
    assert not saved
    assert calls == [("forward", ())] * 3
    for result in results:
        assert equal(list(result), expected[: len(result)])
        assert not any(r.requires_grad for r in result)
    forgotten = weakref.ref(results[0][0])
    del results, result
    assert forgotten() is None


@compiled_backends
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_routes_alike(reentrant: bool, backend: str) -> None:
    """Ties everywhere, 50 times: recomputation picks the same experts, and gradients are those of the plain run."""
    router, device = mo.Router(8, 3), device_of(backend)
    layer = mo.compile(router, backend=backend)
    logits = torch.zeros(64, 8, device=device)
    picked: list[torch.Tensor] = []

    def body(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = layer(x)
        picked.append(result.indices)
        return result.weights, result.counts

    plain = logits.clone().requires_grad_()
    weights, counts = body(plain)
    sent = cotangent(weights, seed=8)
    weights.backward(sent)
    assert counts.tolist() == [64, 64, 64, 0, 0, 0, 0, 0]
    assert plain.grad.count_nonzero()
    for _ in range(50):
        picked.clear()
        leaf = logits.clone().requires_grad_()
        with torch.utils.checkpoint.set_checkpoint_early_stop(False):
            again, counted = torch.utils.checkpoint.checkpoint(body, leaf, use_reentrant=reentrant)
        again.backward(sent)
        assert len(picked) == 2
        assert torch.equal(picked[0], picked[1])
        assert equal([again.detach(), counted, leaf.grad], [weights.detach(), counts, plain.grad])

"""Calls that are not plain go through Python, or say what Python says."""

from __future__ import annotations

from typing import Any

import fake_cuda
import pytest
import torch
from native_calls import GROUPED, compiled, from_python, odd_calls, outcome, ready, variants
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch_calls import ROUTERS, floats_of, logits_of, others_of

from moesaic.runtime import launcher


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("odd", odd_calls(torch.zeros(8, 16), torch.zeros(16)))
def test_what_is_not_plain_goes_through_python(odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, bias = logits_of(GROUPED, 8), others_of(GROUPED)["bias"]
    layer = ready(GROUPED, logits, {"bias": bias})
    args, inputs = odd_calls(logits, bias)[odd]
    assert layer._native(args, inputs) is None
    assert fake_cuda.launches() == []
    outcome(layer, args, inputs)  # prepares what is missing
    fake_cuda.launches()
    natively = outcome(layer, args, inputs)
    from_python(monkeypatch)
    assert natively == outcome(layer, args, inputs)


def test_modes_and_transforms_see_the_call() -> None:
    logits, others = logits_of(GROUPED, 8), others_of(GROUPED)
    native = ready(GROUPED, logits, others)._native
    with _Mode():
        assert native((logits,), others) is None
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert native((logits,), others) is None

    def refused(x: torch.Tensor) -> torch.Tensor:
        assert native((x,), others) is None
        assert native((logits,), others) is None
        return x.sum()

    torch.func.vmap(refused)(logits[None])
    torch.func.grad(refused)(logits)
    torch.func.jvp(refused, (logits,), (logits,))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(logits, torch.ones_like(logits))
        assert native((dual,), others) is None
        assert native((logits,), {"bias": forward_ad.make_dual(others["bias"], others["bias"])}) is None
        assert native((logits[:],), others) is not None
    assert native((torch._to_functional_tensor(logits),), others) is None
    assert native((logits,), others) is not None


def test_gradients_are_recorded_where_they_are_needed() -> None:
    router = ROUTERS["softmax"]
    layer = ready(router, logits_of(router, 8), {})
    leaf = torch.nn.Parameter(logits_of(router, 8))
    assert [t is leaf for t in layer._native((leaf,), {})] == [True]
    assert fake_cuda.launches() == []
    assert layer(leaf).weights.requires_grad
    assert (layer.backend, layer._last) == ("emulate", torch.float32)
    with torch.no_grad():
        assert not layer._native((leaf,), {}).weights.requires_grad
    with torch.inference_mode():
        result = layer._native((leaf,), {})
        assert all(r.is_inference() for r in result)
    floats_of(layer(leaf))[0].sum().backward()
    assert leaf.grad is not None


def test_a_layer_that_only_trains_is_native_too() -> None:
    router = ROUTERS["softmax"]
    layer = compiled(router)
    leaf = logits_of(router, 8).requires_grad_()
    layer(leaf)
    assert type(layer._native((leaf,), {})) is list


def test_the_environment_is_followed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    router = ROUTERS["softmax"]
    logits = logits_of(router, 8)
    layer = ready(router, logits, {})
    for text, there in (("", True), ("auto", True), ("native", True), ("python", False), ("other", False)):
        monkeypatch.setenv("MOESAIC_LAUNCHER", text)
        assert (layer._native((logits,), {}) is not None) == there
    monkeypatch.delenv("MOESAIC_LAUNCHER")
    following = launcher.module().Caller(  # type: ignore[union-attr]
        logits, "emulate", layer._result_type, variants(layer)
    )
    for text, there in (("", True), ("auto", True), ("emulate", True), ("reference", False)):
        monkeypatch.setenv("MOESAIC_BACKEND", text)
        assert (following((logits,), {}) is not None) == there
        assert layer._native((logits,), {}) is not None  # it was compiled for a backend


def test_out_of_memory_is_torchs_own_error() -> None:
    """Rows 0 bytes apart, so many of them that the results fit into no memory."""
    router = ROUTERS["softmax"]
    layer = ready(router, logits_of(router, 1 << 10), {})
    logits = logits_of(router, 1).expand(1 << 48, 8)
    assert layer._native((logits,), {}) is None
    with pytest.raises(RuntimeError, match=r"allocate|memory"):
        layer(logits)
    assert fake_cuda.launches() == []

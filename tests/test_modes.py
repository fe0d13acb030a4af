"""Compiled layers under modes of torch, in threads, and once they are warm."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from routing import cotangent, device_of
from torch_calls import (
    ROUTERS,
    LayerModule,
    all_backends,
    compiled,
    compiled_backends,
    equal,
    floats_of,
    fresh_torch,
    leaves,
    logits_of,
    others_of,
    step,
)

import moesaic as mo
from moesaic.ir.errors import InputError
from moesaic.runtime.execute import RUNNERS


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    yield from fresh_torch()


# Modes and threads ----------------------------------------------------------------------------------------------------


@all_backends
def test_fake_tensors(backend: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    router, device = ROUTERS["dense"], device_of(backend)
    layer = mo.compile(router, backend=backend)
    with FakeTensorMode():
        logits = torch.randn(5, 8, device=device, requires_grad=True)
        result = layer(logits)
        (result.weights.sum() + result.probs.sum()).backward()
        assert [list(r.shape) for r in result] == [[5, 8], [5, 2], [5, 2], [8], [5, 8]]
        assert logits.grad.shape == (5, 8)
        assert layer(torch.randn(2, 3, 8, device=device)).weights.shape == (2, 3, 2)


@all_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype: torch.dtype, backend: str) -> None:
    """A router is float32 arithmetic on logits as they come: float32 logits are not rounded under autocast, and no
    logits are widened. Whoever wants other logits casts them, or has autocast do so in the product before."""
    router, device = ROUTERS["dense"], device_of(backend)
    layer = mo.compile(router, backend=backend)
    logits = logits_of(router, 6, dtype, device)
    expected = step(layer, logits, {})
    with torch.autocast(device, dtype=torch.bfloat16):
        actual = step(layer, logits, {})
        assert equal(step(compiled(layer), logits, {}), expected)
    assert equal(actual, expected)
    assert [t.dtype for t in actual] == [dtype, torch.float32, torch.int32, torch.int32, torch.uint8, dtype]


@all_backends
def test_float64_is_for_the_reference(backend: str) -> None:
    device = device_of(backend)
    for declared in (None, "bf16"):
        layer = mo.compile(mo.Router(8, 2, dtype=declared), backend=backend)
        logits = torch.randn(3, 8, dtype=torch.float64, device=device)
        if backend == "reference":
            assert layer(logits).weights.dtype == torch.float64
            assert compiled(layer)(logits).weights.dtype == torch.float64
        else:
            with pytest.raises(InputError, match="float64 logits run on backend 'reference' only"):
                layer(logits)


def in_threads(work: Callable[[int], None], count: int = 6) -> None:
    """Runs `work` in threads that start together; what one raises is raised here."""
    failures: list[BaseException] = []
    barrier = threading.Barrier(count)

    def guarded(number: int) -> None:
        try:
            barrier.wait(timeout=60)
            work(number)
        except BaseException as error:  # noqa: BLE001 - raised again below
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


@all_backends
def test_threads_share_a_layer(backend: str) -> None:
    """Forward and backward of different inputs at once, as torch.nn.DataParallel does."""
    router, device = ROUTERS["gate_bias"], device_of(backend)
    layer = mo.compile(router, backend=backend)
    others = others_of(router, device)
    inputs = [logits_of(router, 3 + i, device=device, seed=i) for i in range(6)]
    expected = [step(layer, logits, others) for logits in inputs]

    def work(number: int) -> None:
        for _ in range(10):
            assert equal(step(layer, inputs[number], others), expected[number])

    in_threads(work, len(inputs))


@compiled_backends
def test_threads_meet_at_a_first_call(backend: str) -> None:
    """Nothing is lowered, compiled or loaded yet; each thread has a layer of its own, equal to all others."""
    device = device_of(backend)
    seen: list[list[torch.Tensor]] = []

    def work(number: int) -> None:
        router = mo.Router(11, 3, score="sigmoid", scale=1.25, name="met_first_by_threads")
        seen.append(step(mo.compile(router, backend=backend), logits_of(router, 5, device=device), {}))

    in_threads(work)
    assert len(seen) == 6
    assert all(equal(s, seen[0]) for s in seen)


@compiled_backends
def test_grad_mode_is_each_threads_own(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    router, device = ROUTERS["softmax"], device_of(backend)
    layer = mo.compile(router, backend=backend)
    logits = logits_of(router, 4, device=device).requires_grad_()

    def work(number: int) -> None:
        for _ in range(10):
            with torch.set_grad_enabled(number % 2 == 0):
                assert layer(logits).weights.requires_grad == (number % 2 == 0)

    in_threads(work)


@compiled_backends
def test_data_parallel_replicas(backend: str) -> None:
    torch.manual_seed(0)
    device = device_of(backend)
    model = LayerModule(ROUTERS["softmax"], backend).to(device)
    replicas = [copy.deepcopy(model) for _ in range(3)]
    batches = [(torch.randn(4, 8, device=device),) for _ in replicas]
    if device == "cuda":
        outputs = torch.nn.parallel.parallel_apply(replicas, batches, devices=[0] * len(replicas))
    else:
        outputs = [None] * len(replicas)

        def work(number: int) -> None:
            outputs[number] = replicas[number](*batches[number])

        in_threads(work, len(replicas))
    assert all(torch.equal(o, model(*b)) for o, b in zip(outputs, batches, strict=True))


@compiled_backends
def test_a_warm_layer_compiles_nothing(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any T, all or one of the float outputs used, and cotangents that autograd makes itself (expanded scalars)."""
    device = device_of(backend)
    for name in ("dense", "gate_bias", "softmax"):
        router = ROUTERS[name]
        layer = mo.compile(router, backend=backend)
        layer.warmup(device, dtype=torch.float32)
        with monkeypatch.context() as patch:
            patch.setattr(RUNNERS[backend], "load", lambda *arguments: pytest.fail("compiled after warmup"))
            for tokens in (0, 1, 2, 65):
                logits, others = logits_of(router, tokens, device=device), others_of(router, device)
                step(layer, logits, others)
                given = leaves({"logits": logits, **others})
                result = layer(given.pop("logits"), **given)
                for output in floats_of(result):
                    output.sum().backward(retain_graph=True)
                    output[:, 0].sum().backward(retain_graph=True)
                    output.mul(output.detach()[:1]).sum().backward(retain_graph=True)
                    output.sum(0).backward(cotangent(output[:0].sum(0), seed=1), retain_graph=True)


@pytest.mark.emulate
def test_results_of_one_element_have_ordinary_strides() -> None:
    """One token, one expert, one pick: `empty_like` of a repeated element would hand its strides of 0 on."""
    router = mo.Router(1, 1, outputs=("weights", "indices", "probs", "map"))
    result = mo.compile(router, backend="emulate")(torch.tensor([[0.5]]))
    assert all(output.stride() == (1, 1) for output in result)
    assert result.weights.tolist() == [[1.0]] and result.indices.tolist() == [[0]] and result.map.tolist() == [[1]]

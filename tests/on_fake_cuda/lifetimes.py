"""Threads, copies, and what is kept."""

from __future__ import annotations

import copy
import gc
import pickle
import resource
import sys
import threading
from typing import Any

import fake_cuda
import pytest
import torch
from native_calls import GROUPED, RUNNER, compiled, odd_calls, ready, shapes, variants
from torch_calls import ROUTERS, handle_of, logits_of, others_of

import moesaic as mo
from moesaic.runtime.program import program_by_key


def test_threads_share_a_layer() -> None:
    """Stream, tokens and addresses of a launch belong to one call, whatever other threads do meanwhile."""
    router = ROUTERS["dense"]
    layer = ready(router, logits_of(router, 8), {})
    inputs = {n: logits_of(router, n) for n in range(1, 9)}
    for logits in inputs.values():  # of one token, and of more, rows are aligned to other bytes
        layer(logits)
    fake_cuda.launches()
    wrong: list[Any] = []

    def work(n: int) -> None:
        fake_cuda.fake.fake_use_stream(n)
        for _ in range(150):
            result = layer._native((inputs[n],), {})
            if result is None or result.indices.shape[0] != n:
                wrong.append((n, result))

    threads = [threading.Thread(target=work, args=(n,)) for n in inputs]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    rows = [launch for launch in fake_cuda.launches() if launch.kernel.endswith("rows")]
    assert len(rows) == 150 * len(inputs)
    addresses = {t.data_ptr(): n for n, t in inputs.items()}
    assert all(addresses[launch.arguments[0]] == launch.stream for launch in rows)
    assert all(launch.stream in launch.arguments[1:] for launch in rows)


def test_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, others = logits_of(GROUPED, 8), others_of(GROUPED)
    layer = ready(GROUPED, logits, others)
    misses = odd_calls(logits, others["bias"])
    program = program_by_key(handle_of(layer))
    table = RUNNER.table(program, "training", ())
    inputs = [logits, others["bias"]]
    RUNNER.run(program, "training", (), inputs)

    def work(times: int) -> None:
        for _ in range(times):
            layer._native((logits,), others)
            table(inputs)
        for args, given in misses.values():
            for _ in range(times // 20):
                layer._native(args, given)

    objects = [logits, others["bias"], layer._result_type, inputs, None, "bias", torch.float32]
    work(4096)  # the fake driver has touched all of its records then
    gc.collect()
    before = [sys.getrefcount(o) for o in objects], len(gc.get_objects())
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work(20000)
    gc.collect()
    after = [sys.getrefcount(o) for o in objects], len(gc.get_objects())
    assert max(abs(b - a) for b, a in zip(before[0], after[0], strict=True)) < 20
    assert abs(after[1] - before[1]) < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident < 4096  # KiB


def test_types_go_when_nobody_holds_them(native: Any) -> None:
    logits, others = logits_of(GROUPED, 8), others_of(GROUPED)
    layer = ready(GROUPED, logits, others)
    before = sys.getrefcount(native.Caller), sys.getrefcount(layer._result_type)
    for _ in range(50):
        native.Caller(logits, "", layer._result_type, variants(compiled(ROUTERS["softmax"])))
        native.Table((3,))
        with pytest.raises(TypeError):
            native.Caller(3, "", layer._result_type, ())
        with pytest.raises(ValueError, match="'strides'"):
            native.Plan(
                logits,
                (0,) * 7,
                (1, 0, -1, 0, 0, 0),
                (),
                ((id(logits), 0, (1, 1, False, 0, 0, 1), (("strides", 0),)),),
                (),
                None,
                None,
            )
    assert (sys.getrefcount(native.Caller), sys.getrefcount(layer._result_type)) == before


def test_copies_start_anew() -> None:
    logits, others = logits_of(GROUPED, 8), others_of(GROUPED)
    layer = ready(GROUPED, logits, others)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert copied._native is None
        assert shapes(copied(logits, **others)) == shapes(layer(logits, **others))
        assert copied._native is not None


def test_a_layer_says_what_ran_last() -> None:
    router = ROUTERS["softmax"]
    layer = compiled(router)
    for dtype in (torch.float32, torch.bfloat16):
        layer(logits_of(router, 8, dtype))
    for dtype in (torch.float32, torch.bfloat16):
        logits = logits_of(router, 8, dtype)
        assert layer._native((logits,), {}) is not None
        layer(logits)
        assert (layer.backend, layer._last) == ("emulate", dtype)


def test_warm_up_prepares_native_calls() -> None:
    layer = compiled(mo.Router(6, 2, renormalize=True, name="warm"))
    layer.warmup("cpu", dtype="bf16")
    for tokens in (1, 24, 25, 1000):
        assert layer._native((torch.randn(tokens, 6, dtype=torch.bfloat16),), {}) is not None


def test_torch_compile_does_not_see_it() -> None:
    router = ROUTERS["softmax"]
    logits = logits_of(router, 8)
    layer = ready(router, logits, {})
    fresh = compiled(router)
    torch._dynamo.reset()
    with torch.no_grad():
        for used in (layer, fresh, fresh):
            result = torch.compile(used, fullgraph=True, backend="eager")(logits)
            assert shapes(result) == shapes(layer(logits))

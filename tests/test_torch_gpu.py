"""What only a GPU has: graph capture, streams, several devices, an allocator with memory of others, asynchrony."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from routing import EXACT, GRADIENT, ROUNDING, assert_close, cotangent
from torch_calls import ROUTERS, floats_of, leaves, logits_of, others_of, step

import moesaic as mo
from moesaic.ir.errors import InputError, ToolchainError
from moesaic.runtime import launcher as native_launcher

pytestmark = pytest.mark.gpu

routers = pytest.mark.parametrize("name", ROUTERS)

# Sizes of a real model; the routers of ROUTERS are tiny.
LARGE = mo.Router(
    256, 8, score="sigmoid", selection_bias=True, groups=8, groups_kept=4, renormalize=True, renorm_eps=1e-20, scale=2.5
)


@pytest.fixture(autouse=True, params=["native", "python"])
def launcher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Everything here holds for both launchers."""
    monkeypatch.setenv("MOESAIC_LAUNCHER", request.param)
    try:
        native_launcher.wait()
    except ToolchainError as missing:
        pytest.skip(str(missing))
    return str(request.param)


def fresh(router: mo.Router, name: str) -> mo.Router:
    """An equal router of another name, hence one that no test has compiled yet."""
    arguments = {f: getattr(router, f) for f in router.__dataclass_fields__ if f != "name"}
    return mo.Router(**arguments, name=f"{name}_{os.environ['MOESAIC_LAUNCHER']}")


def equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(actual) == len(expected) and all(
        a.dtype == e.dtype and torch.equal(a, e) for a, e in zip(actual, expected, strict=True)
    )


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Against the emulator -------------------------------------------------------------------------------------------------


@pytest.mark.emulate
@routers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gpu_agrees_with_the_emulator(name: str, dtype: torch.dtype) -> None:
    """The same kernel text: picks, counts and maps are equal; floats differ by the two machines' exp and log."""
    router = ROUTERS[name]
    logits, others = logits_of(router, 67, dtype), others_of(router)
    try:
        emulated = step(mo.compile(router, backend="emulate"), logits, others)
    except ToolchainError as missing:
        pytest.skip(str(missing))
    actual = step(mo.compile(router, backend="cuda"), logits.cuda(), {n: t.cuda() for n, t in others.items()})
    for number, (a, e) in enumerate(zip(actual, emulated, strict=True)):
        if e.dtype.is_floating_point:
            result = number < len(router.outputs)
            assert_close(f"value {number}", a, e, (EXACT if result else GRADIENT) + ROUNDING[e.dtype])
        else:
            assert torch.equal(a.cpu(), e)


# The two launchers ----------------------------------------------------------------------------------------------------


@routers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strided", [False, True])
def test_launchers_agree_bit_for_bit(
    name: str, dtype: torch.dtype, strided: bool, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = ROUTERS[name]
    for tokens in (0, 1, 67, 4096, 4099):
        logits, others = logits_of(router, tokens, dtype, "cuda", strided=strided), others_of(router, "cuda")
        layer = mo.compile(router)
        with torch.no_grad():
            layer(logits, **others)
            assert (layer._native is not None and layer._native((logits,), others) is not None) == (
                launcher == "native"
            )
            plain = layer(logits, **others)
            leading = layer(logits[None, :, None], **others)
        found = [
            *step(layer, logits, others),
            *plain,
            *(r.reshape(p.shape) for r, p in zip(leading, plain, strict=True)),
        ]
        monkeypatch.setenv("MOESAIC_LAUNCHER", "python")
        again = mo.compile(router)(logits, **others)
        assert equal(found, [*step(mo.compile(router), logits, others), *again, *again])
        monkeypatch.setenv("MOESAIC_LAUNCHER", launcher)


def test_no_memory_left_is_torchs_error() -> None:
    router = ROUTERS["softmax"]
    layer = mo.compile(router)
    layer(logits_of(router, 5000, device="cuda"))
    logits = logits_of(router, 1, device="cuda").expand(1 << 41, 8)
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
        layer(logits)
    torch.cuda.synchronize()
    layer(logits_of(router, 5, device="cuda"))


# Graph capture --------------------------------------------------------------------------------------------------------


def captured(work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        kept = work()
    return graph, kept


@routers
def test_captured_forward_follows_its_inputs(name: str) -> None:
    router = fresh(ROUTERS[name], f"captured_{name}")
    layer = mo.compile(router, backend="cuda")
    layer.warmup("cuda", dtype=torch.float32)
    plain = mo.compile(ROUTERS[name], backend="cuda")
    for tokens in (1, 37):  # warm-up saw neither
        logits, others = logits_of(router, tokens, device="cuda"), others_of(router, "cuda")
        with torch.no_grad():
            graph, result = captured(lambda: layer(logits, **others))  # noqa: B023 - runs at once
        for seed in (3, 4, 5):
            logits.copy_(logits_of(router, tokens, seed=seed))
            for n, t in others_of(router, seed=seed + 10).items():
                others[n].copy_(t)
            for r in result:
                r.fill_(77)
            graph.replay()
            torch.cuda.synchronize()
            assert equal(list(result), list(plain(logits, **others)))


@routers
def test_captured_training_step_follows_its_inputs(name: str) -> None:
    router = fresh(ROUTERS[name], f"captured_step_{name}")
    layer = mo.compile(router, backend="cuda")
    layer.warmup("cuda", dtype=torch.float32)
    plain = mo.compile(ROUTERS[name], backend="cuda")
    given = leaves({"logits": logits_of(router, 37, device="cuda"), **others_of(router, "cuda")})
    sent = [cotangent(f, seed=1) for f in floats_of(plain(**given))]
    learned = [t for t in given.values() if t.requires_grad]

    def work() -> tuple[Any, Any]:
        result = layer(**given)
        return result, torch.autograd.grad(floats_of(result), learned, sent)

    graph, (result, gradients) = captured(work)
    for seed in (3, 4, 5):
        with torch.no_grad():
            given["logits"].copy_(logits_of(router, 37, seed=seed))
            for n, t in others_of(router, seed=seed + 10).items():
                given[n].copy_(t)
            for number, s in enumerate(sent):
                s.copy_(cotangent(s, seed=seed + number))
            for written in (*result, *gradients):
                written.fill_(77)
        graph.replay()
        torch.cuda.synchronize()
        expected = plain(**given)
        assert equal([r.detach() for r in result], [r.detach() for r in expected])
        assert equal(list(gradients), list(torch.autograd.grad(floats_of(expected), learned, sent)))


def test_capture_with_expanded_cotangents_and_one_output() -> None:
    """What ``weights.sum().backward()`` sends back, in a layer whose other output is not used."""
    router = fresh(ROUTERS["dense"], "captured_sum")
    layer = mo.compile(router, backend="cuda")
    layer.warmup("cuda", dtype=torch.float32)
    logits = logits_of(router, 37, device="cuda").requires_grad_()
    factor = torch.ones(37, 1, device="cuda")
    for used in ("weights", "probs"):
        graph, gradient = captured(
            lambda: torch.autograd.grad((getattr(layer(logits), used) * factor).sum(), logits)[0]  # noqa: B023
        )
        graph.replay()
        torch.cuda.synchronize()
        (expected,) = torch.autograd.grad(getattr(layer(logits), used).sum(), logits)
        assert torch.equal(gradient, expected)
        assert expected.count_nonzero()


@pytest.mark.parametrize("learned", [False, True])
def test_capture_without_warmup_is_refused_and_leaves_no_harm(learned: bool) -> None:
    layer = mo.compile(fresh(ROUTERS["softmax"], f"never_warm_{learned}"), backend="cuda")
    logits = logits_of(ROUTERS["softmax"], 5, device="cuda").requires_grad_(learned)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with pytest.raises(InputError, match=r"Call layer\.warmup"), torch.cuda.graph(graph):
        doubled = logits * 2  # the capture has something in it
        layer(doubled)
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.synchronize()

    # The device, the layer and captures work as if nothing had been.
    layer.warmup("cuda", dtype=torch.float32)
    graph, result = captured(lambda: layer(logits * 2))
    graph.replay()
    torch.cuda.synchronize()
    expected = mo.compile(ROUTERS["softmax"], backend="cuda")(logits * 2)
    assert equal([r.detach() for r in result], [r.detach() for r in expected])


def test_backward_without_warmup_is_refused_in_a_capture() -> None:
    router = fresh(ROUTERS["softmax"], "forward_only_warm")
    layer = mo.compile(router, backend="cuda")
    layer.warmup("cuda", dtype=torch.float32, backward=False)
    logits = logits_of(router, 5, device="cuda")
    with torch.no_grad():
        captured(lambda: layer(logits))
    leaf = logits.clone().requires_grad_()
    sent = torch.ones(5, 2, device="cuda")
    layer(leaf)  # now the training forward is ready, too
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with pytest.raises(InputError, match=r"Call layer\.warmup"), torch.cuda.graph(graph):
        torch.autograd.grad(layer(leaf).weights, leaf, sent)
    assert not torch.cuda.is_current_stream_capturing()
    expected = torch.autograd.grad(layer(leaf).weights, leaf, sent)
    graph, gradient = captured(lambda: torch.autograd.grad(layer(leaf).weights, leaf, sent))
    graph.replay()
    torch.cuda.synchronize()
    assert equal(list(gradient), list(expected))


def test_other_alignment_in_a_capture_is_refused() -> None:
    """Warm-up prepares contiguous rows; rows at odd addresses need a kernel of their own."""
    router = fresh(ROUTERS["softmax"], "aligned_warm")
    layer = mo.compile(router, backend="cuda")
    layer.warmup("cuda", dtype=torch.float32)
    logits = logits_of(router, 5, device="cuda", strided=True)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.no_grad():
        with pytest.raises(InputError, match="same dtype and alignment"), torch.cuda.graph(graph):
            layer(logits)
        expected = list(layer(logits))  # one plain call is a warm-up, too
        graph, result = captured(lambda: layer(logits))
    graph.replay()
    torch.cuda.synchronize()
    assert equal(list(result), expected)


def test_graphed_callable() -> None:
    """``make_graphed_callables`` warms up by itself, captures backward in another graph, and replays both."""
    router = ROUTERS["softmax"]
    layer = mo.compile(router, backend="cuda")
    sample = logits_of(router, 16, device="cuda").requires_grad_()
    graphed = torch.cuda.make_graphed_callables(lambda logits: layer(logits).weights, (sample,))
    for seed in (3, 4):
        logits = logits_of(router, 16, device="cuda", seed=seed)
        one, two = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        weights, expected = graphed(one), layer(two).weights
        assert torch.equal(weights, expected)
        sent = cotangent(weights, seed=seed)
        weights.backward(sent)
        expected.backward(sent)
        assert torch.equal(one.grad, two.grad)
        assert two.grad.count_nonzero()


def test_cuda_graphs_of_torch_compile() -> None:
    """``mode="reduce-overhead"`` captures what inductor makes of the layer."""
    torch._dynamo.reset()
    router = ROUTERS["softmax"]
    layer = mo.compile(router, backend="cuda")
    call = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for seed in range(5):
        logits = logits_of(router, 16, device="cuda", seed=seed)
        torch.compiler.cudagraph_mark_step_begin()
        assert equal([r.clone() for r in step(call, logits, {})], step(layer, logits, {}))
    torch._dynamo.reset()


# Synchronisation, streams, threads, devices ---------------------------------------------------------------------------


@routers
def test_nothing_waits_for_the_device(name: str) -> None:
    """Not even the first call of a layer: compiling and loading need no synchronisation of torch's."""
    router = fresh(ROUTERS[name], f"waits_{name}")
    layer = mo.compile(router, backend="cuda")
    logits, others = logits_of(router, 65, device="cuda"), others_of(router, "cuda")
    plain = step(mo.compile(ROUTERS[name], backend="cuda"), logits, others)
    given = leaves({"logits": logits, **others})
    sent = [cotangent(p, seed=31 + i) for i, p in enumerate(floats_of(tuple(plain[: len(router.outputs)])))]
    with no_synchronisation():
        for _ in range(3):
            result = layer(**given)
            learned = [t for t in given.values() if t.requires_grad]
            gradients = torch.autograd.grad(floats_of(result), learned, sent)
            floats_of(result)[0].detach().sum()
            with torch.no_grad():
                layer(**given)
        layer(**given).weights.sum().backward()
    assert equal([*(r.detach() for r in result), *gradients], plain)


def test_the_reference_does_not_wait_either() -> None:
    layer = mo.compile(ROUTERS["grouped"], backend="reference")
    given = leaves(
        {"logits": logits_of(ROUTERS["grouped"], 65, device="cuda"), **others_of(ROUTERS["grouped"], "cuda")}
    )
    layer(**given)
    with no_synchronisation():
        layer(**given).weights.sum().backward()


def test_calls_run_on_the_current_stream() -> None:
    """Logits come late, from the side stream itself: a launch on any other stream would read what was there before."""
    router = LARGE
    layer = mo.compile(router, backend="cuda")
    layer.warmup("cuda", dtype=torch.float32)
    logits, others = logits_of(router, 2048, device="cuda"), others_of(router, "cuda")
    expected = step(layer, logits, others)
    sent = cotangent(expected[0], seed=31)
    late = leaves({"logits": torch.full_like(logits, float("nan")), **others})
    wanted = late["logits"]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        with torch.no_grad():
            wanted.copy_(logits)
        result = layer(**late)
        gradient = torch.autograd.grad(result.weights, wanted, sent)[0]
        squares = gradient.square().sum()
    stream.synchronize()
    assert equal([*(r.detach() for r in result), gradient], expected)
    assert torch.equal(squares, expected[-1].square().sum())


def test_streams_of_several_threads() -> None:
    """Each thread with a stream of its own; threads that never touched the device have no context yet."""
    router = ROUTERS["gate_bias"]
    layer = mo.compile(router, backend="cuda")
    others = others_of(router, "cuda")
    inputs = [logits_of(router, 100 + i, device="cuda", seed=i) for i in range(6)]
    expected = [step(layer, logits, others) for logits in inputs]
    torch.cuda.synchronize()
    failures: list[Any] = []

    def work(number: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    assert equal(step(layer, inputs[number], others), expected[number])
                torch.cuda.current_stream().synchronize()
        except BaseException as error:  # noqa: BLE001 - raised again below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    if failures:
        raise failures[0]


def test_a_first_call_on_another_thread() -> None:
    router = fresh(ROUTERS["softmax"], "first_on_a_thread")
    logits = logits_of(router, 9, device="cuda")
    expected = step(mo.compile(ROUTERS["softmax"], backend="cuda"), logits, {})
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(step(mo.compile(router), logits, {})))
    thread.start()
    thread.join(timeout=120)
    assert equal(found[0], expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_decide_the_device() -> None:
    """The current device stays 0 all along."""
    router = ROUTERS["gate_bias"]
    layer = mo.compile(router)
    logits, others = logits_of(router, 65, device="cuda:0"), others_of(router, "cuda:0")
    expected = step(layer, logits, others)
    for index in range(1, torch.cuda.device_count()):
        device = f"cuda:{index}"
        found = step(layer, logits.to(device), {n: t.to(device) for n, t in others.items()})
        assert all(f.device == torch.device(device) for f in found)
        assert equal([f.to("cuda:0") for f in found], expected)
        layer.warmup(device, dtype=torch.bfloat16)
        assert torch.cuda.current_device() == 0
    with pytest.raises(InputError, match="gate_bias is on cuda:1, but logits are on cuda:0"):
        layer(logits, gate_bias=others["gate_bias"].to("cuda:1"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_data_parallel() -> None:
    torch.manual_seed(0)
    router = ROUTERS["softmax"]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = torch.nn.Linear(8, 8)
            self.route = mo.compile(router)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.route(self.gate(x)).weights

    model = Model().cuda()
    x = torch.randn(64, 8, device="cuda")
    found = torch.nn.DataParallel(model)(x)
    assert_close("weights", found, model(x), EXACT)  # the product before may sum in another order
    found.square().sum().backward()
    assert model.gate.weight.grad.count_nonzero()


def test_cpu_and_gpu_inputs_do_not_mix() -> None:
    router = ROUTERS["gate_bias"]
    with pytest.raises(InputError, match="gate_bias is on cpu, but logits are on cuda:0"):
        mo.compile(router)(logits_of(router, 3, device="cuda"), **others_of(router))


# Memory ---------------------------------------------------------------------------------------------------------------


def poison(megabytes: int = 64) -> None:
    """Fills memory with NaN (and, read as integers, nonsense) and gives it back to torch's allocator, in many sizes."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    blocks = [torch.full((megabytes << 18,), float("nan"), device="cuda")]
    for exponent in range(9, 21):
        blocks += [torch.full((1 << (exponent - 2),), float("nan"), device="cuda") for _ in range(16)]
    del blocks


@routers
@pytest.mark.parametrize("tokens", [0, 1, 67])
def test_nothing_is_read_that_was_not_written(name: str, tokens: int) -> None:
    router = ROUTERS[name]
    layer = mo.compile(router, backend="cuda")
    logits, others = logits_of(router, tokens, device="cuda"), others_of(router, "cuda")
    expected = step(layer, logits, others)
    assert not any(e.isnan().any() for e in expected)
    for _ in range(3):
        poison()
        assert equal(step(layer, logits, others), expected)


def test_equal_calls_give_equal_bits() -> None:
    """200 times, after an operation whose freed memory the call gets, with other work on the device meanwhile."""
    router = LARGE
    layer = mo.compile(router, backend="cuda")
    logits, others = logits_of(router, 1031, device="cuda"), others_of(router, "cuda")
    expected = step(layer, logits, others)
    noise = torch.randn(1031, 256, device="cuda")
    beside = torch.cuda.Stream()
    for repeat in range(200):
        (noise * repeat).exp_()  # a result of the logits' size, freed at once
        if repeat % 4 == 0:
            with torch.cuda.stream(beside):
                noise @ noise.t()
        assert equal(step(layer, logits, others), expected), f"repeat {repeat}"
    torch.cuda.synchronize()


def allocated() -> int:
    """Bytes in use, after which peaks count anew; no free block is left that a small request could take whole."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


MARGIN = 64 * 1024  # counts, and the allocator's rounding


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_a_call_keeps_and_needs(dtype: torch.dtype, learned: bool) -> None:
    """Its results and nothing else, in training too: the picks, and logits that live anyway, are all backward needs."""
    tokens, experts = 1 << 18, LARGE.num_experts
    layer = mo.compile(LARGE, backend="cuda")
    layer.warmup("cuda", dtype=dtype)
    others = others_of(LARGE, "cuda")
    logits = logits_of(LARGE, tokens, dtype, "cuda").requires_grad_(learned)
    results = tokens * LARGE.top_k * 8  # weights and indices, four bytes each
    # A row of counts from each block of a persistent grid, whatever T.
    workspace = 16 * torch.cuda.get_device_properties(0).multi_processor_count * experts * 4
    before = allocated()
    result = layer(logits, **others)
    assert results <= torch.cuda.memory_allocated() - before <= results + MARGIN
    assert torch.cuda.max_memory_allocated() - before <= results + workspace + MARGIN
    if learned:
        result.weights.backward(cotangent(result.weights, seed=1))
        assert logits.grad.count_nonzero()


def test_backward_needs_the_gradient_and_nothing_else() -> None:
    tokens = 1 << 16
    layer = mo.compile(LARGE, backend="cuda")
    layer.warmup("cuda", dtype=torch.bfloat16)
    logits = logits_of(LARGE, tokens, torch.bfloat16, "cuda").requires_grad_()
    weights = layer(logits, **others_of(LARGE, "cuda")).weights
    sent = cotangent(weights, seed=1)
    before = allocated()
    (gradient,) = torch.autograd.grad(weights, logits, sent)
    assert torch.cuda.max_memory_allocated() - before <= gradient.numel() * 2 + MARGIN


def test_freed_results_do_not_pile_up() -> None:
    router = ROUTERS["gate_bias"]
    layer = mo.compile(router, backend="cuda")
    logits, others = logits_of(router, 257, device="cuda"), others_of(router, "cuda")
    step(layer, logits, others)
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        step(layer, logits, others)
    gc.collect()
    assert torch.cuda.memory_allocated() == before

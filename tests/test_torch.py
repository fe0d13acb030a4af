"""Compiled layers as torch sees them: the operators, torch.compile, export.

What the layers compute is tested elsewhere; here a result is compared with what the plain call gave, bit for bit.
"""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from routing import device_of, sweep
from torch._dynamo.utils import counters
from torch_calls import (
    BACKWARD,
    FORWARD,
    ROUTERS,
    LayerModule,
    all_backends,
    backward_arguments,
    compiled,
    compiled_backends,
    equal,
    floats_of,
    fresh_torch,
    graphs,
    handle_of,
    leaves,
    logits_of,
    others_of,
    recorded_calls,
    routers,
    step,
)

import moesaic as mo
from moesaic.ir.errors import InputError, InputTypeError
from moesaic.runtime.program import program_by_key


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    yield from fresh_torch()


# Operators ------------------------------------------------------------------------------------------------------------


@compiled_backends
@pytest.mark.parametrize(
    ("name", "tokens", "dtype", "strided"),
    [
        ("softmax", 5, torch.float32, False),
        ("softmax", 0, torch.float32, False),
        ("softmax", 1, torch.bfloat16, True),
        ("grouped", 7, torch.float32, True),
        ("gate_bias", 5, torch.float32, False),
        ("gate_bias", 0, torch.float32, False),
        ("gate_bias", 1, torch.float32, False),
        ("dense", 5, torch.float32, False),
        ("user_score", 5, torch.float32, False),
    ],
)
def test_operators_pass_opcheck(name: str, tokens: int, dtype: torch.dtype, strided: bool, backend: str) -> None:
    router, device = ROUTERS[name], device_of(backend)
    layer = mo.compile(router, backend=backend)
    handle = handle_of(layer, dtype)
    given = {"logits": logits_of(router, tokens, dtype, device, strided=strided), **others_of(router, device)}
    inputs = [given[a.name] for a in program_by_key(handle).function.arguments]
    torch.library.opcheck(FORWARD, (handle, backend, False, inputs))
    learned = [t.requires_grad_(n != "bias") for n, t in given.items()]
    assert any(t.requires_grad for t in learned)
    torch.library.opcheck(FORWARD, (handle, backend, True, inputs))
    torch.library.opcheck(BACKWARD, backward_arguments(layer, router, given["logits"].detach()))


@compiled_backends
@routers
def test_fakes_describe_what_runs(name: str, backend: str) -> None:
    """Shape, dtype, device and strides, for the functions of inference, training and backward."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    router, device = ROUTERS[name], device_of(backend)
    layer = mo.compile(router, backend=backend)
    logits = logits_of(router, 5, device=device)
    handle = handle_of(layer)
    given = {"logits": logits, **others_of(router, device)}
    inputs = [given[a.name] for a in program_by_key(handle).function.arguments]
    every = [(FORWARD, (handle, backend, training, inputs)) for training in (False, True)]
    every.append((BACKWARD, backward_arguments(layer, router, logits)))
    for operator, (*plain, tensors) in every:
        real = operator(*plain, tensors)
        with FakeTensorMode() as mode:
            fake = operator(*plain, [mode.from_tensor(t) for t in tensors])
        described = [(list(t.shape), t.dtype, t.device.type, t.stride()) for t in fake]
        assert described == [(list(t.shape), t.dtype, t.device.type, t.stride()) for t in real]


# torch.compile --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "backend"), [("grouped", "reference"), *sweep(((name,) for name in ROUTERS), 1, of=3)]
)
def test_one_graph_for_any_number_of_tokens(name: str, backend: str) -> None:
    router, device = ROUTERS[name], device_of(backend)
    layer = mo.compile(router, backend=backend)
    call = compiled(layer)
    for seed, tokens in enumerate((5, 128, 7)):
        logits, others = logits_of(router, tokens, device=device, seed=seed), others_of(router, device, seed=seed)
        expected = step(layer, logits, others)
        assert equal(step(call, logits, others), expected)
        assert all(f.count_nonzero() for f in expected)
    assert graphs() == 1
    for tokens in (0, 1):  # torch makes graphs of their own for these
        logits, others = logits_of(router, tokens, device=device), others_of(router, device)
        assert equal(step(call, logits, others), step(layer, logits, others))


@compiled_backends
def test_inductor_gives_the_bits_of_the_plain_call(backend: str) -> None:
    router, device = ROUTERS["grouped"], device_of(backend)
    layer = mo.compile(router, backend=backend)

    def around(logits: torch.Tensor, **others: torch.Tensor) -> Any:
        return layer(logits + logits, **others)

    call = compiled(around, backend="inductor")
    for tokens in (5, 6, 128):
        logits, others = logits_of(router, tokens, device=device), others_of(router, device)
        assert equal(step(call, logits, others), step(around, logits, others))
    assert graphs() == 1


@compiled_backends
def test_automatic_dynamic_shapes_make_two_graphs(backend: str) -> None:
    """Without being told that T changes, torch makes one graph for the first T and one for all others."""
    router, device = ROUTERS["softmax"], device_of(backend)
    layer = mo.compile(router, backend=backend)
    call = compiled(layer, dynamic=None)
    for tokens in (5, 6, 128, 7, 33):
        logits = logits_of(router, tokens, device=device)
        assert equal(step(call, logits, {}), step(layer, logits, {}))
    assert graphs() == 2


@compiled_backends
def test_grad_mode_decides_what_a_graph_runs(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    router, device = ROUTERS["softmax"], device_of(backend)
    layer = mo.compile(router, backend=backend)
    call = compiled(layer)
    logits = logits_of(router, 5, device=device).requires_grad_()
    layer(logits).weights.sum().backward()  # whatever is made on first use is made
    calls = recorded_calls(monkeypatch, backend)

    result = call(logits)
    floats_of(result)[0].sum().backward()
    assert calls == [("training", ()), ("backward", ("weights",))]
    plain = [r.detach() for r in result]
    for mode in (torch.no_grad, torch.inference_mode):
        calls.clear()
        with mode():
            result = call(logits)
        assert calls == [("forward", ())]
        assert not any(r.requires_grad for r in result)
        assert equal(list(result), plain)
    calls.clear()
    assert equal(list(call(logits.detach())), plain)
    assert calls == [("forward", ())]


@compiled_backends
def test_leading_dimensions_in_one_graph(backend: str) -> None:
    router, device = ROUTERS["gate_bias"], device_of(backend)
    layer = mo.compile(router, backend=backend)
    call = compiled(layer)
    others = others_of(router, device)
    for batch, length in ((2, 3), (3, 5), (7, 2)):
        flat = logits_of(router, batch * length, device=device)
        logits = flat.reshape(batch, length, -1)
        actual, expected = step(call, logits, others), step(layer, logits, others)
        assert equal(actual, expected)
        by_rows = step(layer, flat, others)
        # A cotangent is drawn by shape and seed: the same numbers in the same order.
        assert equal([a.reshape(b.shape) for a, b in zip(actual, by_rows, strict=True)], by_rows)
        assert actual[0].shape == (batch, length, 3)
        assert actual[2].shape == (12,)
    assert graphs() == 1


@compiled_backends
def test_sixty_equal_layers_share_one_graph(backend: str) -> None:
    """Each layer is compiled by itself, as large models do; the router is declared anew in each."""
    torch.manual_seed(0)
    layers = [LayerModule(mo.Router(8, 2, score="sigmoid"), backend) for _ in range(60)]
    assert len({handle_of(layer.route) for layer in layers}) == 1
    model = torch.nn.Sequential(*layers).to(device_of(backend))
    x = torch.randn(5, 8).to(device_of(backend))
    expected = leaves({"x": x})["x"]
    out = model(expected)
    out.sum().backward()
    gradient = layers[0].gate.weight.grad.clone()
    model.zero_grad()

    for layer in layers:
        layer.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (5, 9):
        actual = leaves({"x": torch.cat([x, x])[:tokens]})["x"]
        result = model(actual)
        result[:5].sum().backward()
        # The gate's product may round otherwise for another number of rows; sixty layers carry that on.
        rounding = 0.0 if tokens == 5 else 1e-5
        torch.testing.assert_close(result[:5], out, rtol=rounding, atol=0.0)
        torch.testing.assert_close(actual.grad[:5], expected.grad, rtol=0.0, atol=rounding * float(expected.grad.max()))
    assert gradient.count_nonzero()
    assert graphs() == 1
    assert counters["aot_autograd"]["ok"] == 1


@pytest.mark.emulate
def test_twenty_different_layers_in_one_graph() -> None:
    """More than torch compiles one function anew for. Traced, but not run: the emulator builds a kernel for each."""
    layers = [mo.compile(mo.Router(8 + i, 2 + i % 3), backend="emulate") for i in range(20)]
    assert len(layers) > torch._dynamo.config.recompile_limit
    seen: list[torch.fx.GraphModule] = []

    def model(x: torch.Tensor) -> torch.Tensor:
        return sum(layer(x[:, : 8 + i]).weights.sum(-1) for i, layer in enumerate(layers))

    def only_look(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        seen.append(graph)
        return lambda *arguments: (torch.zeros(5),)

    compiled(model, backend=only_look)(torch.randn(5, 30).requires_grad_())
    assert graphs() == 1
    calls = [n for n in seen[0].graph.nodes if n.target in (FORWARD, torch.ops.moesaic.forward)]
    assert [n.args[0] for n in calls] == [handle_of(layer) for layer in layers]
    assert len({n.args[0] for n in calls}) == 20
    assert all(n.args[1:3] == ("emulate", True) for n in calls)


@compiled_backends
def test_another_layer_never_runs_in_a_graph_made_before(backend: str) -> None:
    class Model:
        route: Any = None

    model = Model()
    call = compiled(lambda logits: model.route(logits))
    two, three, sigmoid = (
        mo.compile(r, backend=backend) for r in (mo.Router(8, 2), mo.Router(8, 3), mo.Router(8, 2, score="sigmoid"))
    )
    logits = logits_of(mo.Router(8, 2), 6, device=device_of(backend))
    for count, layer in enumerate((two, three, sigmoid), start=1):
        model.route = layer
        assert equal(list(call(logits)), list(layer(logits)))
        assert graphs() == count
    for layer in (three, two, sigmoid, copy.deepcopy(two), mo.compile(mo.Router(8, 2), backend=backend)):
        model.route = layer  # equal ones do share
        assert equal(list(call(logits)), list(layer(logits)))
    assert graphs() == 3
    call(logits.bfloat16())
    assert graphs() == 4


@all_backends
def test_errors_show_through_torch_compile(backend: str) -> None:
    """As they are where the graph may break; inside torch's own where it may not."""
    device = device_of(backend)
    layer = mo.compile(mo.Router(8, 2, dtype="fp32"), backend=backend)
    logits = torch.randn(3, 8, device=device)
    for fault, message in (
        (lambda call: call(torch.randn(3, 9, device=device)), "logits must have shape [..., 8], found [3, 9]"),
        (lambda call: call(logits, bias=logits[0]), "input 'bias' was not declared"),
        (lambda call: call(logits.half()), "declared for fp32 logits, found fp16"),
    ):
        with pytest.raises((InputError, InputTypeError), match=re.escape(message)):
            fault(torch.compile(layer, backend="aot_eager"))
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=re.escape(message)):
            fault(compiled(layer, dynamic=None))


@all_backends
def test_what_ran_can_be_read_after_a_compiled_call(backend: str) -> None:
    layer = mo.compile(ROUTERS["softmax"], backend="auto" if backend == "cuda" else backend)
    compiled(layer)(logits_of(ROUTERS["softmax"], 3, device=device_of(backend)))
    assert layer.backend == backend


def test_a_graph_of_another_version_finds_no_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps compiled graphs on disk, by handle; what forward saves may change with our version."""
    from moesaic.runtime import program

    before = program.program_of(ROUTERS["softmax"].module()).key
    monkeypatch.setattr(program, "_compiler_digest", lambda: b"another version")
    assert program.program_of(ROUTERS["softmax"].module()).key != before
    with pytest.raises(InputError, match=r"no compiled layer has the handle 'unheard of'.*moesaic\.compile"):
        program_by_key("unheard of")


@compiled_backends
@pytest.mark.parametrize("strict", [False, True])
def test_export_of_a_module(backend: str, strict: bool) -> None:
    torch.manual_seed(0)
    device = device_of(backend)
    model = LayerModule(ROUTERS["softmax"], backend).to(device).eval()
    x = torch.randn(5, 8, device=device)
    with torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes={"x": {0: torch.export.Dim("T")}}, strict=strict)
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        loaded = torch.export.load(file).module()
        for tokens in (5, 9):
            x = torch.randn(tokens, 8, device=device)
            assert torch.equal(loaded(x), model(x))

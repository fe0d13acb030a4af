"""Compiled layers as torch sees them: the operators, torch.compile, autograd, copies, modes and threads.

What the layers compute is tested elsewhere; here a result is compared with what the plain call gave, bit for bit.
"""

from __future__ import annotations

import copy
import io
import pickle
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from routing import BACKENDS, COMPILED, EXACT, assert_close, cotangent, device_of, softsign_score, sweep
from torch._dynamo.utils import counters
from torch_calls import (
    BACKWARD,
    FORWARD,
    ROUTERS,
    backward_arguments,
    floats_of,
    handle_of,
    leaves,
    logits_of,
    others_of,
    step,
)

import moesaic as mo
from moesaic.ir.errors import InputError, InputTypeError, UnsupportedError
from moesaic.runtime.execute import RUNNERS
from moesaic.runtime.program import program_by_key

compiled_backends = pytest.mark.parametrize("backend", COMPILED)
all_backends = pytest.mark.parametrize("backend", BACKENDS)
routers = pytest.mark.parametrize("name", ROUTERS)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
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
    ("name", "backend"), [*((name, "reference") for name in ROUTERS), *sweep(((name,) for name in ROUTERS), 1, of=3)]
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


class Layer(torch.nn.Module):
    """A gate and a router, with a residual path."""

    def __init__(self, router: mo.Router, backend: str) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(router.num_experts, router.num_experts, bias=False)
        self.route = mo.compile(router, backend=backend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.route(self.gate(x)).weights.sum(-1, keepdim=True)


@compiled_backends
def test_sixty_equal_layers_share_one_graph(backend: str) -> None:
    """Each layer is compiled by itself, as large models do; the router is declared anew in each."""
    torch.manual_seed(0)
    layers = [Layer(mo.Router(8, 2, score="sigmoid"), backend) for _ in range(60)]
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
def test_sixty_different_layers_in_one_graph() -> None:
    """Traced, but not run: sixty kernels for the emulator take a minute."""
    layers = [mo.compile(mo.Router(8 + i, 2 + i % 3), backend="emulate") for i in range(60)]
    seen: list[torch.fx.GraphModule] = []

    def model(x: torch.Tensor) -> torch.Tensor:
        return sum(layer(x[:, : 8 + i]).weights.sum(-1) for i, layer in enumerate(layers))

    def only_look(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        seen.append(graph)
        return lambda *arguments: (torch.zeros(5),)

    compiled(model, backend=only_look)(torch.randn(5, 70).requires_grad_())
    assert graphs() == 1
    calls = [n for n in seen[0].graph.nodes if n.target in (FORWARD, torch.ops.moesaic.forward)]
    assert [n.args[0] for n in calls] == [handle_of(layer) for layer in layers]
    assert len({n.args[0] for n in calls}) == 60
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
    model = Layer(ROUTERS["softmax"], backend).to(device).eval()
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


# Copies ---------------------------------------------------------------------------------------------------------------


def copies(layer: Any) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return {
        "copy": copy.copy(layer),
        "deepcopy": copy.deepcopy(layer),
        "pickle": pickle.loads(pickle.dumps(layer)),
        "torch.save": torch.load(file, weights_only=False),
    }


@routers
def test_copies_share_the_program(name: str) -> None:
    router = ROUTERS[name]
    layer = mo.compile(router, backend="reference", target="sm_80")
    logits, others = logits_of(router, 5), others_of(router)
    expected = list(layer(logits, **others))
    for how, other in copies(layer).items():
        assert other is not layer, how
        assert other._handles == layer._handles, how
        assert (other._asked, other.target, repr(other)) == ("reference", layer.target, repr(layer)), how
        assert equal(list(other(logits, **others)), expected), how


def test_copies_of_a_layer_from_text() -> None:
    layer = mo.compile(mo.parse(str(ROUTERS["grouped"].module("bf16"))))
    for how, other in copies(layer).items():
        assert other._handles == layer._handles, how


def test_a_copied_module_keeps_its_layer() -> None:
    model = Layer(ROUTERS["softmax"], "reference")
    x = torch.randn(3, 8)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), model(x))
    assert set(model.state_dict()) == {"gate.weight"}


def test_a_pickled_layer_in_another_process() -> None:
    """With a score function that the other process can import."""
    layer = mo.compile(mo.Router(7, 3, score=softsign_score), backend="reference")
    logits = logits_of(ROUTERS["user_score"], 4)
    text = (
        "import pickle, sys, moesaic as mo; layer, logits, router = pickle.load(sys.stdin.buffer);"
        "assert layer._handles == mo.compile(router)._handles;"
        "sys.stdout.buffer.write(pickle.dumps([layer.backend, list(layer(logits))]))"
    )
    path = [p for p in sys.path if p]
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {text}"],
        input=pickle.dumps((layer, logits, mo.Router(7, 3, score=softsign_score))),
        capture_output=True,
        check=True,
    )
    backend, results = pickle.loads(run.stdout)
    assert backend == "reference"
    assert equal(results, list(layer(logits)))


def test_a_lambda_as_score_can_be_copied_but_not_pickled() -> None:
    layer = mo.compile(mo.Router(8, 2, score=lambda x: mo.math.sqrt(mo.math.softplus(x))), backend="reference")
    assert copy.deepcopy(layer)._handles == layer._handles
    assert handle_of(layer) == handle_of(mo.compile(mo.Router(8, 2, score="sqrtsoftplus")))
    for store in (pickle.dumps, lambda it: torch.save(it, io.BytesIO())):
        with pytest.raises(InputError, match=r"<lambda>.*lambda.*cannot store; define the score with def"):
            store(layer)


def test_equal_layers_are_one_program() -> None:
    layers = [mo.compile(mo.Router(16, 4, score="sigmoid", scale=2.0)) for _ in range(3)]
    layers.append(mo.compile(layers[0]._declared.module()))
    programs = [program_by_key(handle_of(layer)) for layer in layers]
    assert all(p is programs[0] for p in programs)
    for other in (mo.Router(16, 4, score="sigmoid", scale=2.5), mo.Router(16, 5, score="sigmoid", scale=2.0)):
        assert handle_of(mo.compile(other)) != programs[0].key


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
    model = Layer(ROUTERS["softmax"], backend).to(device)
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

"""Plain calls launch what the launcher in Python does: kernels, arguments, results."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_cuda
import pytest
import torch
from native_calls import GROUPED, RUNNER, compiled, from_python, ready, routers, seen, shapes, table_of
from torch_calls import ROUTERS, floats_of, handle_of, leaves, logits_of, others_of

import moesaic as mo
from moesaic.codegen.kernel import Argument, GeneratedKernel
from moesaic.ir.types import DType, TensorType, symbol
from moesaic.runtime import execute
from moesaic.runtime.plan import BufferSpec, Input, LaunchPlan, Step
from moesaic.runtime.program import program_by_key
from moesaic.runtime.reference import TORCH_DTYPES
from moesaic.runtime.tuning.lookup import tunables
from moesaic.runtime.tuning.tables import CardName, Entry, Tables


@routers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strided", [False, True])
def test_a_call_launches_the_same(
    name: str, dtype: torch.dtype, strided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = ROUTERS[name]
    layer = compiled(router)
    for tokens in (1, 2, 23, 24, 25, 97, 4099):
        logits, others = logits_of(router, tokens, dtype, strided=strided), others_of(router)
        with torch.no_grad():
            monkeypatch.setenv("MOESAIC_LAUNCHER", "native")
            layer(logits, **others)
            fake_cuda.launches()
            result = layer._native((logits,), others)
            assert type(result) is layer._result_type
            natively = seen([logits, *others.values()], result), shapes(result)
            from_python(monkeypatch)
            assert layer._native((logits,), others) is None
            expected = layer(logits, **others)
            assert natively == (seen([logits, *others.values()], expected), shapes(expected))


@routers
def test_leading_dimensions_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    router = ROUTERS[name]
    drawn, others = logits_of(router, 6), others_of(router)
    for shape in ((-1,), (2, 3, -1), (3, 1, 2, -1), (1, 6, -1)):
        logits = (drawn[0] if len(shape) == 1 else drawn).reshape(shape)
        layer = ready(router, logits, others)
        result = layer(logits, **others)
        natively = seen([logits, *others.values()], result), shapes(result)
        from_python(monkeypatch)
        expected = layer(logits, **others)
        assert natively == (seen([logits, *others.values()], expected), shapes(expected))
        monkeypatch.setenv("MOESAIC_LAUNCHER", "native")


@routers
def test_no_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    router = ROUTERS[name]
    logits, others = logits_of(router, 0), others_of(router)
    result = ready(router, logits, others)(logits, **others)
    natively = seen(list(others.values()), result), shapes(result)
    from_python(monkeypatch)
    expected = compiled(router)(logits, **others)
    assert natively == (seen(list(others.values()), expected), shapes(expected))


@routers
def test_training_and_backward_launch_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    router = ROUTERS[name]
    program = program_by_key(handle_of(compiled(router)))
    for tokens in (1, 23, 97):
        named = {"logits": logits_of(router, tokens), **others_of(router)}
        forward = [named[a.name] for a in program.forward_function(training=True).arguments]
        results = _both(program, "training", (), forward, monkeypatch)
        named.update(zip(program.forward_function(training=True).result_names, results, strict=True))
        for n in program.float_results:
            named[f"d_{n}"] = torch.randn(named[n].shape)
        backward = program.backward_function(program.float_results)
        assert backward is not None
        _both(program, "backward", program.float_results, [named[a.name] for a in backward.arguments], monkeypatch)
        # Every row the same cotangent: rows 0 bytes apart.
        for n in program.float_results:
            named[f"d_{n}"] = torch.randn(named[n].shape[1:]).expand(named[n].shape)
        _both(program, "backward", program.float_results, [named[a.name] for a in backward.arguments], monkeypatch)


def _both(
    program: Any, kind: str, cotangents: tuple[str, ...], inputs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> list[torch.Tensor]:
    monkeypatch.setenv("MOESAIC_LAUNCHER", "native")
    RUNNER.run(program, kind, cotangents, inputs)
    fake_cuda.launches()
    results = RUNNER.table(program, kind, cotangents)(inputs)
    assert isinstance(results, list)
    natively = seen(inputs, results), shapes(results)
    from_python(monkeypatch)
    assert RUNNER.table(program, kind, cotangents)(inputs) is None
    expected = RUNNER.run(program, kind, cotangents, inputs)
    assert natively == (seen(inputs, expected), shapes(expected))
    return expected


@pytest.mark.parametrize("mask", [False, True])
def test_a_token_mask_chooses_the_program(mask: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, others = logits_of(GROUPED, 7), others_of(GROUPED)
    given = {**others, **({"token_mask": torch.arange(7) != 3} if mask else {})}
    layer = ready(GROUPED, logits, given)
    result = layer(logits, **given)
    natively = seen([logits, *given.values()], result), shapes(result)
    leaf = logits.clone().requires_grad_()
    gradient = torch.autograd.grad(layer(leaf, **given).weights.sum(), leaf)
    launched = [launch.kernel for launch in fake_cuda.launches()]
    assert layer._native((logits[None],), {**given, "token_mask": torch.ones(1, 7, dtype=torch.bool)}) is None
    assert layer._native((logits[None],), {**given, "token_mask": torch.ones(7, dtype=torch.bool)}) is None
    from_python(monkeypatch)
    expected = layer(logits, **given)
    assert natively == (seen([logits, *given.values()], expected), shapes(expected))
    assert shapes(gradient) == shapes(torch.autograd.grad(layer(leaf, **given).weights.sum(), leaf))
    assert launched == [launch.kernel for launch in fake_cuda.launches()]


@pytest.mark.parametrize("segments", [None, "batch_first", "sequence_first"])
def test_losses_launch_the_same(segments: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their result is a mapping, which Python makes; the launches are native."""
    router = mo.Router(8, 2, losses={"balance": mo.LoadBalance(segments=segments), "z": mo.ZLoss()}, name="with_losses")
    layer = compiled(router)
    program = program_by_key(handle_of(layer))
    tables = [RUNNER.table(program, "training", ()), RUNNER.table(program, "backward", program.float_results)]
    for shape in ((5, 3, 8), (1, 60, 8), (40, 1, 8), (0, 3, 8), (3, 0, 8)):
        logits = torch.randn(shape, requires_grad=True)
        found = []
        for choice in ("native", "native", "python"):  # the first prepares
            monkeypatch.setenv("MOESAIC_LAUNCHER", choice)
            fake_cuda.launches()
            result = layer(logits)
            used = [result.weights, *result.losses.values()]
            gradient = torch.autograd.grad(used, logits, [torch.ones_like(u) for u in used])
            made = [(launch.kernel, launch.stream, launch.grid, launch.block) for launch in fake_cuda.launches()]
            found.append((made, shapes([*result[:-1], *result.losses.values(), *gradient])))
        assert found[1] == found[2]
        assert found[1][0]
    monkeypatch.setenv("MOESAIC_LAUNCHER", "native")
    # Each direction with what it was called with: nothing of it goes through Python.
    for table, kind, cotangents in zip(tables, ("training", "backward"), ((), program.float_results), strict=True):
        function = program.backward_function(cotangents) if cotangents else program.forward_function(training=True)
        assert function is not None
        inputs = [_input(a.type) for a in function.arguments]
        RUNNER.run(program, kind, cotangents, inputs)
        fake_cuda.launches()
        results = table(inputs)
        natively = seen(inputs, results), shapes(results)
        from_python(monkeypatch)
        expected = RUNNER.run(program, kind, cotangents, inputs)
        assert natively == (seen(inputs, expected), shapes(expected))
        monkeypatch.setenv("MOESAIC_LAUNCHER", "native")


def _input(declared: TensorType) -> torch.Tensor:
    """Of 15 tokens in 3 sequences."""
    sizes = {"T": 15, "N": 3}
    shape = [sizes[str(d)] if not isinstance(d, int) else d for d in declared.shape]
    return torch.zeros(shape, dtype=TORCH_DTYPES[declared.dtype])


@routers
def test_a_training_step_launches_the_same_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    router = ROUTERS[name]
    layer = ready(router, logits_of(router, 97), others_of(router))
    given = leaves({"logits": logits_of(router, 97), **others_of(router)})
    learned = [t for t in given.values() if t.requires_grad]
    found = []
    for choice in ("native", "native", "python"):  # the first prepares
        monkeypatch.setenv("MOESAIC_LAUNCHER", choice)
        fake_cuda.launches()
        result = layer(given["logits"], **{n: t for n, t in given.items() if n != "logits"})
        floats = floats_of(result)
        gradients = torch.autograd.grad(floats, learned, [torch.ones_like(f) for f in floats])
        made = [(launch.kernel, launch.stream, launch.grid, launch.block) for launch in fake_cuda.launches()]
        found.append((made, shapes(result), shapes(gradients), type(result), type(result[0].grad_fn).__name__))
    assert found[1] == found[2]
    assert len(found[1][0]) > 1


def test_slots_grids_and_every_kind_of_argument(native: Any) -> None:
    """A plan made by hand, with what no router has today: memory taken over, results that are inputs, many kinds."""
    tokens, blocks = symbol("T"), symbol("B")
    rows = TensorType((tokens, 6), DType.F32)
    partial, same = TensorType((blocks, 5), DType.F32), TensorType((blocks, 5), DType.I32)
    every = [Argument(kind, n) for n in range(8) for kind in ("pointer", "stride", "rows")] + [Argument("tokens")]
    kernels = [
        GeneratedKernel("made_rows", "", tuple(every), 64, 4, "persistent"),
        GeneratedKernel("made_cover", "", tuple(every), 32, 3, "cover"),
        GeneratedKernel("made_fixed", "", tuple(every), 96, 0, "fixed", 5, 3),
        GeneratedKernel("made_sequences", "", tuple(every), 96, 2, "persistent", by_sequence=True),
        GeneratedKernel("made_clusters", "", tuple(every), 64, 3, "clusters", blocks=16, cluster=4),
    ]
    plan = LaunchPlan(
        "made",
        (
            Input("v", TensorType((6,), DType.F32), True),
            Input("x", rows, True),
            Input("sequences", TensorType((symbol("N"), 0), DType.F32), True),
        ),
        (
            BufferSpec("y", TensorType((tokens, 3), DType.BF16), True, 0),
            BufferSpec("p", partial, False, 0),
            BufferSpec("q", same, False, 0),
            BufferSpec("c", TensorType((5,), DType.I32), True, 0),
            BufferSpec("s", TensorType((symbol("N"), 2), DType.F32), True, 0),
        ),
        tuple(Step(k, tuple(range(8)), "B" if k.symbol == "made_rows" else "", n) for n, k in enumerate(kernels)),
        (3, 6, 7, 1),
        ("y", "c", "s", "x"),
    )
    loaded = [RUNNER.load(k, torch.device("cpu")) for k in kernels]
    for kernel in loaded:
        kernel.most_blocks = 7
    prepared = execute.Prepared(SimpleNamespace(plan=plan), loaded, RUNNER, torch.device("cpu"))  # type: ignore[arg-type]
    table = native.Table((62, 1000, 4000))
    for tokens_now, sequences in ((0, 1), (1, 1), (4, 2), (5, 5), (29, 1), (31, 9), (0, 0)):
        inputs = [torch.randn(6), torch.randn(tokens_now, 9)[:, :6], torch.empty(sequences, 0)]
        table.add(-1, 0, execute.alignments(inputs), prepared.native(native, RUNNER.native_points(-1)))
        results = table(inputs)
        assert results[3] is inputs[1]
        natively = seen([*inputs, *results[:3]], ()), shapes(results)
        workspace = [a for a in natively[0] if str(a).startswith("workspace")]
        assert len(workspace) == 2 * sum(isinstance(a, tuple) for a in natively[0])
        assert len(set(workspace)) == 1  # `p` and `q` share memory
        expected = RUNNER.enter(prepared, inputs, -1)
        assert natively == (seen([*inputs, *expected[:3]], ()), shapes(expected))


def test_small_buffers_of_the_workspace_lie_in_one_block(native: Any) -> None:
    """Each in its place: none reaches into another, where they have so many bytes; results and large ones are alone."""
    tokens = symbol("T")
    sizes = {"a": (3, DType.I32), "b": (300, DType.BF16), "large": (1 << 20, DType.F32), "c": (1, DType.I32)}
    buffers = tuple(BufferSpec(n, TensorType((tokens, c), d), False, i) for i, (n, (c, d)) in enumerate(sizes.items()))
    result = BufferSpec("y", TensorType((tokens, 5), DType.F32), True, 0)
    pointers = tuple(Argument("pointer", 1 + i) for i in range(5))
    plan = LaunchPlan(
        "small",
        (Input("x", TensorType((tokens, 8), DType.F32), True),),
        (*buffers, result),
        (Step(GeneratedKernel("small", "", pointers, 64, 4, "cover"), tuple(range(6)), "", 0),),
        (5,),
        ("y",),
    )
    loaded = [RUNNER.load(plan.steps[0].kernel, torch.device("cpu"))]
    prepared = execute.Prepared(SimpleNamespace(plan=plan), loaded, RUNNER, torch.device("cpu"))  # type: ignore[arg-type]
    inputs = [torch.randn(2, 8)]
    (y,) = table_of(native, prepared, inputs)(inputs)
    [launch] = fake_cuda.launches()
    a, b, large, c, last = launch.arguments[:5]
    assert last == y.data_ptr()
    assert (b - a, c - b) == (256, 1280)  # 24 and 1200 bytes, in whole pieces of 256
    assert not a - (2 << 22) < large < c + 256
    empty = [torch.randn(0, 8)]
    table_of(native, prepared, empty)(empty)
    [launch] = fake_cuda.launches()
    assert launch.arguments[:4] == (0, 0, 0, 0)


def test_what_was_tuned_replaces_what_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For calls in its bucket of T alone; the native launcher forgets what it had."""
    router = mo.Router(12, 3, renormalize=True, outputs=("weights", "indices"), name="tuned_again")
    few, many = torch.randn(8, 12), torch.randn(200, 12)
    layer = ready(router, few, {})
    program = program_by_key(layer._handles[torch.float32])

    def threads(logits: torch.Tensor) -> int:
        with torch.no_grad():
            layer(logits)
        [launch] = fake_cuda.launches()
        return int(launch.block[0])

    before = threads(few), threads(many)
    target = RUNNER.target(torch.device("cpu"))
    function = program.planned("forward")
    aligned = execute.alignments([few])
    [found] = tunables(function, program.specialize(target.name, aligned, "few"), target, aligned, "<=24")
    assert before[0] == int(found.space.default["threads"])
    point = {**found.space.default, "threads": "32"}
    tables = Tables(CardName(target.name, 132, "false"), tmp_path / "user.json", tmp_path / "none.json")
    tables.add({found.key: Entry(point, 1.0, 2.0, 8, 2, 9)})
    monkeypatch.setattr(RUNNER, "tables", tables)
    assert threads(few) == before[0], "what is prepared stays"
    RUNNER.prepare_again(program)
    assert layer._native((few,), {}) is None
    assert (threads(few), threads(many)) == (32, before[1])
    assert layer._native((few,), {}) is not None
    [launch] = fake_cuda.launches()
    assert launch.block[0] == 32


def test_the_kinds_of_arguments_are_those_of_python(native: Any) -> None:
    assert set(native.ARGUMENT_KINDS) == {*execute.ARGUMENTS, "tensor_map"}

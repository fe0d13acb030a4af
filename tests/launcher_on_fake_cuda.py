"""The native launcher beside the one in Python, on a fake driver; ``test_launcher.py`` runs it in another process."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import resource
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_cuda
import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch_calls import ROUTERS, floats_of, handle_of, leaves, logits_of, others_of

import moesaic as mo
from moesaic.codegen.kernel import Argument, GeneratedKernel, TensorMap
from moesaic.ir.errors import InternalError
from moesaic.ir.types import DType, TensorType, symbol
from moesaic.runtime import driver, execute, launcher
from moesaic.runtime.layer import CompiledLayer
from moesaic.runtime.plan import BufferSpec, Input, LaunchPlan, Step
from moesaic.runtime.program import program_by_key
from moesaic.runtime.reference import TORCH_DTYPES
from moesaic.runtime.tuning.lookup import tunables
from moesaic.runtime.tuning.tables import CardName, Entry, Tables

RUNNER = fake_cuda.install()
RUNNER.few_tokens = 24

routers = pytest.mark.parametrize("name", ROUTERS)
GROUPED = ROUTERS["grouped"]


@pytest.fixture(scope="session", autouse=True)
def cache_dir() -> Iterator[Path]:
    """That of the test run which started this one: it has the launcher, perhaps."""
    yield Path(os.environ["MOESAIC_CACHE_DIR"])


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MOESAIC_LAUNCHER", "native")
    found = launcher.module()
    fake_cuda.launches()
    return found


def compiled(router: mo.Router) -> CompiledLayer:
    return mo.compile(router, backend="emulate")


def ready(router: mo.Router, logits: torch.Tensor, others: dict[str, torch.Tensor]) -> CompiledLayer:
    """A layer that runs inputs like these natively."""
    layer = compiled(router)
    with torch.no_grad():
        layer(logits, **others)
        assert layer._native((logits,), others) is not None
    fake_cuda.launches()
    return layer


def seen(inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[Any]:
    """The launches since the last look, with a name in place of each address."""
    names = {t.data_ptr(): f"input {i}" for i, t in enumerate(inputs)}
    names |= {t.data_ptr(): f"result {i}" for i, t in enumerate(results) if t.data_ptr() not in names}

    def name(value: int) -> int | str:
        if value < 1 << 20:
            return value
        return names.setdefault(value, f"workspace {len(names)}")

    found = []
    for launch in fake_cuda.launches():
        found.append((launch.kernel, launch.stream, launch.context, launch.grid, launch.block, launch.dependent))
        found.extend(name(a) for a in launch.arguments)
        found.extend((name(m.address), m.shape()) for m in launch.maps)
    return found


def shapes(tensors: Sequence[torch.Tensor]) -> list[Any]:
    return [(type(t), t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.storage_offset()) for t in tensors]


def from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESAIC_LAUNCHER", "python")


# Equal to the launcher in Python --------------------------------------------------------------------------------------


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
        GeneratedKernel("made_chunks", "", tuple(every), 64, 5, "chunks"),
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
        tuple(Step(k, tuple(range(8)), "B" if k.symbol == "made_rows" else "") for k in kernels),
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
        (Step(GeneratedKernel("small", "", pointers, 64, 4, "chunks"), tuple(range(6)), ""),),
        (5,),
        ("y",),
    )
    loaded = [RUNNER.load(plan.steps[0].kernel, torch.device("cpu"))]
    prepared = execute.Prepared(SimpleNamespace(plan=plan), loaded, RUNNER, torch.device("cpu"))  # type: ignore[arg-type]
    inputs = [torch.randn(2, 8)]
    (y,) = _table(native, prepared, inputs)(inputs)
    [launch] = fake_cuda.launches()
    a, b, large, c, last = launch.arguments[:5]
    assert last == y.data_ptr()
    assert (b - a, c - b) == (256, 1280)  # 24 and 1200 bytes, in whole pieces of 256
    assert not a - (2 << 22) < large < c + 256
    empty = [torch.randn(0, 8)]
    _table(native, prepared, empty)(empty)
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


# Tensor maps ----------------------------------------------------------------------------------------------------------


def _mapped(*arguments: Argument, shape: tuple[Any, ...] = (8, 40, 136)) -> execute.Prepared:
    """A plan of one kernel on: x [T, 264], weights, a buffer [T, 64] and a workspace [T, 2, 72]."""
    tokens = symbol("T")
    plan = LaunchPlan(
        "mapped",
        (Input("x", TensorType((tokens, 264), DType.BF16), True), Input("w", TensorType(shape, DType.F16), True)),
        (
            BufferSpec("y", TensorType((tokens, 64), DType.BF16), True, 0),
            BufferSpec("p", TensorType((3, 24, 72), DType.F16), False, 0),
        ),
        (Step(GeneratedKernel("mapped", "", arguments, 64, 4, "chunks"), (0, 1, 2, 3), ""),),
        (2,),
        ("y",),
    )
    loaded = [RUNNER.load(step.kernel, torch.device("cpu")) for step in plan.steps]
    return execute.Prepared(SimpleNamespace(plan=plan), loaded, RUNNER, torch.device("cpu"))  # type: ignore[arg-type]


def _map(operand: int, *sizes: int, element: str = "bf16") -> Argument:
    return Argument("tensor_map", operand, TensorMap(*sizes, element=element))


def _table(native: Any, prepared: execute.Prepared, inputs: Sequence[torch.Tensor]) -> Any:
    table = native.Table((62, 1000, 4000))
    table.add(-1, 0, execute.alignments(inputs), prepared.native(native, RUNNER.native_points(-1)))
    return table


def test_tensor_maps_say_where_operands_lie(native: Any) -> None:
    for name, shape in (("stacked", (8, 40, 136)), ("alone", (1, 40, 136))):
        prepared = _mapped(
            Argument("tokens"),
            _map(0, 264, 0, 1, 128),
            Argument("pointer", 1),
            _map(1, 136, 40, shape[0], 64, element="f16"),
            _map(2, 64, 0, 1, 8),
            Argument("rows", 0),
            _map(3, 72, 24, 3, 256, element="f16"),
            shape=shape,
        )
        for tokens in (0, 1, 29):
            x = torch.empty(tokens, 272, dtype=torch.bfloat16)[:, 8:]
            w = torch.empty(16, 48, 144, dtype=torch.float16)[: 2 * shape[0] : 2, 8:, :136]
            results = _table(native, prepared, (x, w))((x, w))
            [launched] = fake_cuda.launches()
            assert launched.arguments[:7] == (tokens, 0, w.data_ptr(), 0, 0, tokens, 0)
            rows, weights, made, workspace = launched.maps
            apart = 2 * 48 * 144 * 2 if name == "stacked" else 40 * 144 * 2
            assert weights.address == w.data_ptr()
            assert weights.shape() == (136, 40, shape[0], 144 * 2, apart, 64, 64, 1, 6)
            assert workspace.shape() == (72, 24, 3, 72 * 2, 24 * 72 * 2, 64, 256, 1, 6)
            if tokens:
                assert (rows.address, made.address) == (x.data_ptr(), results[0].data_ptr())
                assert rows.shape() == (264, tokens, 1, 272 * 2, tokens * 272 * 2, 64, 128, 1, 9)
                assert made.shape() == (64, tokens, 1, 64 * 2, tokens * 64 * 2, 64, 8, 1, 9)
            else:  # nothing to find, all zero
                assert bytes(rows) == bytes(made) == bytes(128)
            for map in (weights, workspace):
                assert (map.rank, map.interleave, map.swizzle, map.promotion, map.fill) == (3, 0, 3, 3, 0)
                assert tuple(map.element_strides) == (1, 1, 1)
            # From Python the same, whose own buffers lie elsewhere.
            expected = RUNNER.enter(prepared, (x, w), -1)
            [again] = fake_cuda.launches()
            assert again.arguments == launched.arguments
            assert [m.shape() for m in again.maps] == [m.shape() for m in launched.maps]
            assert [m.address for m in again.maps[:2]] == [m.address for m in launched.maps[:2]]
            assert again.maps[2].address == expected[0].data_ptr()


def test_a_map_is_encoded_again_when_its_operand_changes() -> None:
    """From Python, which remembers those it has made."""
    prepared = _mapped(_map(0, 264, 0, 1, 128))
    w, encoded = torch.empty(8, 40, 136, dtype=torch.float16), fake_cuda.fake.fake_encodes
    wide = torch.empty(40, 272, dtype=torch.bfloat16)
    before = encoded()
    for operand, more in ((wide[:8, :264], 1), (wide[:8, :264], 1), (wide[:9, :264], 2), (wide[:8, 8:], 3)):
        RUNNER.enter(prepared, (operand, w), -1)
        assert encoded() - before == more
        [launched] = fake_cuda.launches()
        assert (launched.maps[0].address, launched.maps[0].dims[1]) == (operand.data_ptr(), operand.shape[0])


def test_a_map_that_cannot_be_gives_the_error_of_python(native: Any) -> None:
    prepared = _mapped(_map(0, 264, 0, 1, 128), _map(1, 136, 40, 8, 64, element="f16"))
    w = torch.empty(8, 40, 136, dtype=torch.float16)
    for operand, refused, words in (
        (
            torch.empty(5, 268, dtype=torch.bfloat16)[:, 4:],
            0,
            "(264, 5, 1), strides of (536, 2680) bytes, boxes (64, 128",
        ),
        (torch.empty(5, 264, dtype=torch.bfloat16), 1, "CUDA_ERROR_INVALID_VALUE"),
        (torch.empty(5, 264, dtype=torch.bfloat16), 700, "CUDA_ERROR_ILLEGAL_ADDRESS"),
    ):
        table, said = _table(native, prepared, (operand, w)), []
        fake_cuda.fake.fake_fail_encode(refused)
        try:
            for call in (lambda: table((operand, w)), lambda: RUNNER.enter(prepared, (operand, w), -1)):  # noqa: B023
                with pytest.raises(InternalError) as caught:
                    call()
                said.append(str(caught.value))
        finally:
            fake_cuda.fake.fake_fail_encode(0)
        assert said[0] == said[1]
        assert f"address {operand.data_ptr():#x}, dimensions (264, 5, 1)" in said[0] and words in said[0]
    assert fake_cuda.launches() == []
    assert fake_cuda.fake.fake_depth() == 0


def test_threads_encode_maps_of_their_own(native: Any) -> None:
    prepared = _mapped(_map(0, 264, 0, 1, 128), Argument("pointer", 0))
    w = torch.empty(8, 40, 136, dtype=torch.float16)
    inputs = {n: torch.empty(n, 264, dtype=torch.bfloat16) for n in range(1, 9)}
    table = _table(native, prepared, (inputs[1], w))

    def work(n: int) -> None:
        for _ in range(150):
            table((inputs[n], w))

    threads = [threading.Thread(target=work, args=(n,)) for n in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    launched = fake_cuda.launches()
    assert len(launched) == 150 * len(inputs)
    assert all(launch.maps[0].address == launch.arguments[1] for launch in launched)
    assert all(inputs[launch.maps[0].dims[1]].data_ptr() == launch.arguments[1] for launch in launched)


def test_a_kernel_has_so_many_maps_at_most(native: Any) -> None:
    _mapped(*[_map(0, 264, 0, 1, 8)] * 8).native(native, RUNNER.native_points(-1))
    with pytest.raises(ValueError, match="more than 8 tensor maps"):
        _mapped(*[_map(0, 264, 0, 1, 8)] * 9).native(native, RUNNER.native_points(-1))


def test_a_grid_for_the_device_has_whole_clusters() -> None:
    """As many as the driver says: the fake one knows of one fewer than there is room for."""
    most = {}
    for cluster in (1, 2, 5, 1000, 100000):
        kernel = GeneratedKernel("clusters", "", (), 64, 0, "device", cluster=cluster)
        most[cluster] = RUNNER.load(kernel, torch.device("cpu")).most_blocks
    assert most[1] % 132 == 0
    assert most == {c: max(1, most[1] // c - (c > 1)) * c for c in most}
    assert most[100000] == 100000


# What is not plain ----------------------------------------------------------------------------------------------------


class _Subclass(torch.Tensor):
    pass


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def _odd_calls(logits: torch.Tensor, bias: torch.Tensor) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Calls that are not plain, by what is odd about them."""
    columns = logits.shape[1]
    return {
        "no logits": ((), {"bias": bias}),
        "two": ((logits, bias), {}),
        "by name": ((), {"logits": logits, "bias": bias}),
        "list": (([1.0],), {"bias": bias}),
        "missing": ((logits,), {}),
        "misspelt": ((logits,), {"bais": bias}),
        "undeclared": ((logits,), {"bias": bias, "other": bias}),
        "none": ((logits,), {"bias": None}),
        "float64": ((logits.double(),), {"bias": bias}),
        "integers": ((logits.int(),), {"bias": bias}),
        "bias of another dtype": ((logits,), {"bias": bias.half()}),
        "meta": ((logits.to("meta"),), {"bias": bias}),
        "bias elsewhere": ((logits,), {"bias": bias.to("meta")}),
        "scalar": ((torch.tensor(1.0),), {"bias": bias}),
        "columns": ((logits[:, 1:],), {"bias": bias}),
        "bias of another length": ((logits,), {"bias": bias[1:]}),
        "bias of another rank": ((logits,), {"bias": bias[None]}),
        "columns apart": ((logits.repeat(1, 2)[:, ::2],), {"bias": bias}),
        "transposed": ((logits.t().contiguous().t(),), {"bias": bias}),
        "bias apart": ((logits,), {"bias": bias.repeat(2)[::2]}),
        "blocks apart": ((torch.randn(3, 4, columns)[:, :2],), {"bias": bias}),
        "subclass": ((logits.as_subclass(_Subclass),), {"bias": bias}),
        "sparse": ((logits.to_sparse(),), {"bias": bias}),
        "negated": ((torch._neg_view(logits),), {"bias": bias}),
        "needs a gradient, and leads": ((logits[None].clone().requires_grad_(),), {"bias": bias}),
    }


def outcome(layer: CompiledLayer, args: tuple[Any, ...], inputs: dict[str, Any]) -> Any:
    try:
        result = layer(*args, **inputs)
    except Exception as error:  # noqa: BLE001 - whatever it is has to be the same
        return type(error), str(error)
    return shapes(result), [(e[:5] if isinstance(e, tuple) else None) for e in seen((), result)]


@pytest.mark.parametrize("odd", _odd_calls(torch.zeros(8, 16), torch.zeros(16)))
def test_what_is_not_plain_goes_through_python(odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, bias = logits_of(GROUPED, 8), others_of(GROUPED)["bias"]
    layer = ready(GROUPED, logits, {"bias": bias})
    args, inputs = _odd_calls(logits, bias)[odd]
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
        logits, "emulate", layer._result_type, _variants(layer)
    )
    for text, there in (("", True), ("auto", True), ("emulate", True), ("reference", False)):
        monkeypatch.setenv("MOESAIC_BACKEND", text)
        assert (following((logits,), {}) is not None) == there
        assert layer._native((logits,), {}) is not None  # it was compiled for a backend


def _variants(layer: CompiledLayer) -> tuple[Any, ...]:
    program = program_by_key(handle_of(layer))
    declared = (("logits", (-1, 8), torch.empty(0)),)
    return ((declared, (True, True, False), RUNNER.table(program, "forward", ())),)


def test_out_of_memory_is_torchs_own_error() -> None:
    """Rows 0 bytes apart, so many of them that the results fit into no memory."""
    router = ROUTERS["softmax"]
    layer = ready(router, logits_of(router, 1 << 10), {})
    logits = logits_of(router, 1).expand(1 << 48, 8)
    assert layer._native((logits,), {}) is None
    with pytest.raises(RuntimeError, match=r"allocate|memory"):
        layer(logits)
    assert fake_cuda.launches() == []


# The driver -----------------------------------------------------------------------------------------------------------


def test_a_failed_launch_gives_the_error_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, others = logits_of(GROUPED, 8), others_of(GROUPED)
    layer = ready(GROUPED, logits, others)
    for code in (700, 1, 2):
        said = []
        for choice in ("native", "python"):
            monkeypatch.setenv("MOESAIC_LAUNCHER", choice)
            fake_cuda.fake.fake_fail(code)
            try:
                said.append(outcome(layer, (logits,), others))
            finally:
                fake_cuda.fake.fake_fail(0)
        assert said[0] == said[1]
        assert "could not launch kernel" in said[0][1]
    assert fake_cuda.fake.fake_depth() == 0


def test_the_context_before_comes_back() -> None:
    logits, others = logits_of(GROUPED, 8), others_of(GROUPED)
    layer = ready(GROUPED, logits, others)
    with driver.current(1):
        layer(logits, **others)
        assert fake_cuda.fake.fake_depth() == 1
    with driver.current(0):
        layer(logits, **others)
        assert fake_cuda.fake.fake_depth() == 1
    assert {launch.context for launch in fake_cuda.launches()} == {0x1000}
    assert fake_cuda.fake.fake_depth() == 0


def test_threads_share_a_layer() -> None:
    """Stream, tokens and addresses of a launch belong to one call, whatever other threads do meanwhile."""
    router = ROUTERS["dense"]
    layer = ready(router, logits_of(router, 8), {})
    inputs = {n: logits_of(router, n) for n in range(1, 9)}
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


# Life -----------------------------------------------------------------------------------------------------------------


def test_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, others = logits_of(GROUPED, 8), others_of(GROUPED)
    layer = ready(GROUPED, logits, others)
    misses = _odd_calls(logits, others["bias"])
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
    work(200)
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
        native.Caller(logits, "", layer._result_type, _variants(compiled(ROUTERS["softmax"])))
        native.Table((3,))
        with pytest.raises(TypeError):
            native.Caller(3, "", layer._result_type, ())
        with pytest.raises(ValueError, match="'strides'"):
            native.Plan(
                logits,
                (0,) * 7,
                (1, 0, -1, 0, 0, 0),
                (),
                ((id(logits), 0, (1, 0, 1, False, 0, 0, 1), (("strides", 0),)),),
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

"""Tensor maps that the native launcher encodes, and grids that the driver decides."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import fake_cuda
import pytest
import torch
from native_calls import RUNNER, table_of

from moesaic.codegen.kernel import Argument, GeneratedKernel, TensorMap
from moesaic.ir.errors import InternalError
from moesaic.ir.types import DType, TensorType, symbol
from moesaic.runtime import execute
from moesaic.runtime.plan import BufferSpec, Input, LaunchPlan, Step


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
        (Step(GeneratedKernel("mapped", "", arguments, 64, 4, "cover"), (0, 1, 2, 3), "", 0),),
        (2,),
        ("y",),
    )
    loaded = [RUNNER.load(step.kernel, torch.device("cpu")) for step in plan.steps]
    return execute.Prepared(SimpleNamespace(plan=plan), loaded, RUNNER, torch.device("cpu"))  # type: ignore[arg-type]


def _map(operand: int, *sizes: int, element: str = "bf16") -> Argument:
    return Argument("tensor_map", operand, TensorMap(*sizes, element=element))


def _of_rows(columns: int, rows: int, row_bytes: int) -> tuple[int, ...]:
    """Dimensions and strides of a map of rows; see ``tensor_map.cuh``."""
    ends = 2**30
    return columns, ends, rows + 1, ends + 1, row_bytes, row_bytes, 2**34 - row_bytes


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
            results = table_of(native, prepared, (x, w))((x, w))
            [launched] = fake_cuda.launches()
            assert launched.arguments[:7] == (tokens, 0, w.data_ptr(), 0, 0, tokens, 0)
            rows, weights, made, workspace = launched.maps
            apart = 2 * 48 * 144 * 2 if name == "stacked" else 40 * 144 * 2
            assert weights.address == w.data_ptr()
            assert weights.shape() == (136, 40, shape[0], 144 * 2, apart, 64, 64, 1, 6)
            assert workspace.shape() == (72, 24, 3, 72 * 2, 24 * 72 * 2, 64, 256, 1, 6)
            if tokens:
                assert (rows.address, made.address) == (x.data_ptr(), results[0].data_ptr())
                assert rows.shape() == (*_of_rows(264, tokens, 272 * 2), 64, 128, 1, 1, 9)
                assert made.shape() == (*_of_rows(64, tokens, 64 * 2), 64, 8, 1, 1, 9)
            else:  # nothing to find, all zero
                assert bytes(rows) == bytes(made) == bytes(128)
            for map, rank in ((weights, 3), (workspace, 3), *([(rows, 4), (made, 4)] if tokens else [])):
                assert (map.rank, map.interleave, map.swizzle, map.promotion, map.fill) == (rank, 0, 3, 3, 0)
                assert tuple(map.element_strides[:rank]) == (1,) * rank
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
        assert (launched.maps[0].address, launched.maps[0].dims[2]) == (operand.data_ptr(), operand.shape[0] + 1)


def test_a_map_that_cannot_be_gives_the_error_of_python(native: Any) -> None:
    prepared = _mapped(_map(0, 264, 0, 1, 128), _map(1, 136, 40, 8, 64, element="f16"))
    w = torch.empty(8, 40, 136, dtype=torch.float16)
    for operand, refused, words in (
        (
            torch.empty(5, 268, dtype=torch.bfloat16)[:, 4:],
            0,
            f"(264, {2**30}, 6, {2**30 + 1}), strides of (536, 536, {2**34 - 536}) bytes, boxes (64, 128",
        ),
        (torch.empty(5, 264, dtype=torch.bfloat16), 1, "CUDA_ERROR_INVALID_VALUE"),
        (torch.empty(5, 264, dtype=torch.bfloat16), 700, "CUDA_ERROR_ILLEGAL_ADDRESS"),
    ):
        table, said = table_of(native, prepared, (operand, w)), []
        fake_cuda.fake.fake_fail_encode(refused)
        try:
            for call in (lambda: table((operand, w)), lambda: RUNNER.enter(prepared, (operand, w), -1)):  # noqa: B023
                with pytest.raises(InternalError) as caught:
                    call()
                said.append(str(caught.value))
        finally:
            fake_cuda.fake.fake_fail_encode(0)
        assert said[0] == said[1]
        assert f"address {operand.data_ptr():#x}, dimensions (264, {2**30}, 6, " in said[0] and words in said[0]
    assert fake_cuda.launches() == []
    assert fake_cuda.fake.fake_depth() == 0


def test_threads_encode_maps_of_their_own(native: Any) -> None:
    prepared = _mapped(_map(0, 264, 0, 1, 128), Argument("pointer", 0))
    w = torch.empty(8, 40, 136, dtype=torch.float16)
    inputs = {n: torch.empty(n, 264, dtype=torch.bfloat16) for n in range(1, 9)}
    table = table_of(native, prepared, (inputs[1], w))

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
    assert all(inputs[launch.maps[0].dims[2] - 1].data_ptr() == launch.arguments[1] for launch in launched)


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

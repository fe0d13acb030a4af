"""Layers that the native launcher runs on a fake driver, and what it has been asked to launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import fake_cuda
import pytest
import torch
from torch_calls import ROUTERS, handle_of

import moesaic as mo
from moesaic.runtime import execute
from moesaic.runtime.layer import CompiledLayer
from moesaic.runtime.program import program_by_key

RUNNER = fake_cuda.install()
RUNNER.few_tokens = 24

routers = pytest.mark.parametrize("name", ROUTERS)
GROUPED = ROUTERS["grouped"]


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


class Subclass(torch.Tensor):
    pass


def odd_calls(logits: torch.Tensor, bias: torch.Tensor) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
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
        "subclass": ((logits.as_subclass(Subclass),), {"bias": bias}),
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


def variants(layer: CompiledLayer) -> tuple[Any, ...]:
    program = program_by_key(handle_of(layer))
    declared = (("logits", (-1, 8), torch.empty(0)),)
    return ((declared, (True, True, False), RUNNER.table(program, "forward", ())),)


def table_of(native: Any, prepared: execute.Prepared, inputs: Sequence[torch.Tensor]) -> Any:
    table = native.Table((62, 1000, 4000))
    table.add(-1, 0, execute.alignments(inputs), prepared.native(native, RUNNER.native_points(-1)))
    return table

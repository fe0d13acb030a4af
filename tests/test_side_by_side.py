"""Kernels of a layer are compiled at the same time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

import moesaic as mo
from moesaic.runtime import execute, kernels, side_by_side


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(side_by_side, "cores", lambda: 4)
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("moesaic")], "a thread is left"


@pytest.mark.usefixtures("four_cores")
def test_items_are_made_at_once_and_come_in_order() -> None:
    meeting = threading.Barrier(4, timeout=60)

    def make(item: int) -> int:
        meeting.wait()  # of nobody who works alone
        return item * item

    assert side_by_side.side_by_side(make, iter(range(8))) == [n * n for n in range(8)]
    assert side_by_side.side_by_side(make, []) == []


@pytest.mark.usefixtures("four_cores")
def test_the_first_failure_is_raised_when_nothing_runs_any_more() -> None:
    last = threading.Event()
    ended: list[int] = []

    def make(item: int) -> None:
        if item == 2:
            last.set()
            raise ValueError("the third")
        assert last.wait(60)
        ended.append(item)
        if item == 1:
            raise ValueError("the second")

    with pytest.raises(ValueError, match="the second"):
        side_by_side.side_by_side(make, range(4))
    assert {0, 1} <= set(ended) <= {0, 1, 3}  # the last one may not have begun


def test_one_core_makes_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "cores", lambda: 1)
    assert side_by_side.side_by_side(lambda _: threading.current_thread(), range(3)) == [threading.current_thread()] * 3


@pytest.mark.nvrtc
@pytest.mark.usefixtures("four_cores")
def test_a_layer_compiles_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    compiled = kernels.nvrtc.compile_source

    def watched(*arguments: object, **options: object) -> object:
        names.add(threading.current_thread().name)
        return compiled(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(kernels.nvrtc, "compile_source", watched)
    layer = mo.compile(mo.Router(61, 3, losses={"balance": mo.LoadBalance(coef=0.123)}, name="beside"), target="sm_90a")
    assert set(layer.resources) == set(layer.kernels) and len(layer.kernels) > 1
    assert names and all(name.startswith("moesaic") for name in names)


@pytest.mark.emulate
@pytest.mark.usefixtures("four_cores")
def test_a_call_builds_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    load = execute.EmulatedRunner.load

    def watched(self: execute.EmulatedRunner, *arguments: object) -> object:
        names.add(threading.current_thread().name)
        return load(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(execute.EmulatedRunner, "load", watched)
    router = mo.Router(5, 2, losses={"balance": mo.LoadBalance(coef=0.321)}, name="beside")
    logits = torch.randn(40, 5, requires_grad=True)
    found = [mo.compile(router, backend=backend)(logits) for backend in ("emulate", "reference")]
    torch.testing.assert_close(found[0].weights, found[1].weights)
    assert names and all(name.startswith("moesaic") for name in names)

"""Copies of compiled layers: what they share, pickles, and layers that are equal."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from routing import softsign_score
from torch_calls import (
    ROUTERS,
    LayerModule,
    equal,
    fresh_torch,
    handle_of,
    logits_of,
    others_of,
    routers,
)

import moesaic as mo
from moesaic.ir.errors import InputError
from moesaic.runtime.program import program_by_key


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    yield from fresh_torch()


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
    model = LayerModule(ROUTERS["softmax"], "reference")
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

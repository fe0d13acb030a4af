"""What the driver refuses, and the context that it is asked in."""

from __future__ import annotations

import fake_cuda
import pytest
from native_calls import GROUPED, outcome, ready
from torch_calls import logits_of, others_of

from moesaic.runtime import driver


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

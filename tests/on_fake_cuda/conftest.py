"""What tests of this folder run with: the launcher, native, and the cache of the run that started them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moesaic.runtime import launcher


@pytest.fixture(scope="session", autouse=True)
def cache_dir() -> Iterator[Path]:
    """That of the test run which started this one: it has the launcher, perhaps."""
    yield Path(os.environ["MOESAIC_CACHE_DIR"])


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> Any:
    import fake_cuda  # where there is its driver: a run of all tests looks into this folder, too

    monkeypatch.setenv("MOESAIC_LAUNCHER", "native")
    found = launcher.module()
    fake_cuda.launches()
    return found

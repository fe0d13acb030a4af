"""What tests of the cache share: an entry, what makes it, and a cache that does not exist yet."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.target import Target
from moesaic.ir import environment
from moesaic.runtime import cache, kernels
from moesaic.runtime.cache import Content, KernelKey, Stored

HOPPER = Target.parse("sm_90a")
SOURCE = 'extern "C" __global__ void store(int* out) { out[threadIdx.x] = 7; }\n'
KERNEL = GeneratedKernel("store", SOURCE, (), 32, 1, "cover")
KEY = KernelKey(symbol="k", target="sm_90a", source_sha256="0" * 64, options=("-a", "-b"), nvrtc="13.0", headers="h")


def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache that does not exist yet, and a process that has compiled nothing."""
    for variable in environment.variables():
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("MOESAIC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # places for compiles: no other test's
    monkeypatch.setattr("tempfile.tempdir", None)
    for module, name in ((cache, "_fresh"), (cache, "_swept"), (cache, "_warned"), (kernels, "_said")):
        monkeypatch.setattr(module, name, set())
    cache._private_store.cache_clear()
    for name in ("_compiled", "_dumped"):
        monkeypatch.setattr(kernels, name, {})
    return tmp_path / "cache"


def said_since(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was logged, at warning or above, since the last call."""

    def since() -> list[str]:
        found = [r.getMessage() for r in caplog.records if r.name == "moesaic.cache" and r.levelno >= logging.WARNING]
        caplog.clear()
        return found

    return since


class Maker:
    """Makes the content of an entry, and counts."""

    def __init__(self, text: bytes = b"binary" * 20) -> None:
        self.calls = 0
        self.text = text

    def __call__(self) -> Content:
        self.calls += 1
        return Content({"k.cubin": self.text, "k.cu": b"source", "k.ptx": b""}, {"log": "said", "seconds": 0.5})


def folder_of(root: Path, key: cache.Key = KEY) -> Path:
    return root / key.kind / key.digest


def same(stored: Stored, maker: Maker) -> bool:
    made = maker.__class__(maker.text)()
    return dict(stored.files) == dict(made.files) and stored.facts["seconds"] == 0.5


def no_leftovers(root: Path) -> bool:
    return not list((root / "tmp").glob("*")) and not list((root / "locks").glob("*"))


def arguments(key: KernelKey) -> dict[str, Any]:
    return {name: value for name, value in key.fields.items() if name not in ("schema", "kind")}


def cut(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def refuse_writes(monkeypatch: pytest.MonkeyPatch, root: Path, number: int) -> None:
    """Has the file system below `root` refuse to make anything, for the superuser too."""

    def refusing(name: str, writes: Callable[..., bool]) -> None:
        real = getattr(os, name)

        def call(path: Any, *rest: Any, **more: Any) -> Any:
            if isinstance(path, str | os.PathLike) and Path(path).is_relative_to(root) and writes(path, *rest):
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *rest, **more)

        monkeypatch.setattr(os, name, call)

    refusing("mkdir", lambda path, *_: not os.path.exists(path))
    refusing("open", lambda path, flags, *_: flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR))
    refusing("rename", lambda *_: True)

"""The tutorial runs: its Python from top to bottom, with its template where the others are."""

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import jinja2
import pytest

from moesaic.codegen import generate, render
from moesaic.ir.core import OPS
from moesaic.passes.manager import PIPELINES, REGISTRY

PAGE = Path(__file__).resolve().parent.parent / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def nothing_stays() -> Iterator[None]:
    """What the page adds is gone afterwards."""
    tables: list[dict] = [OPS, REGISTRY, PIPELINES, generate.FAMILIES]
    before = [dict(table) for table in tables]
    yield
    for table, old in zip(tables, before, strict=True):
        table.clear()
        table.update(old)


@pytest.mark.emulate
@pytest.mark.usefixtures("nothing_stays")
def test_the_tutorial_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGE.read_text(encoding="utf-8")
    blocks = [(match[1], match[2], match[3], page.count("\n", 0, match.start(3))) for match in BLOCK.finditer(page)]
    assert {kind for kind, *_ in blocks} == {"python", "cuda"} and len(blocks) > 10
    environment = render.environment()
    templates = {name: text for kind, name, text, _ in blocks if kind == "cuda"}
    loaders = [jinja2.DictLoader(templates), environment.loader]
    monkeypatch.setattr(environment, "loader", jinja2.ChoiceLoader(loaders))
    module = types.ModuleType("moesaic_tutorial")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for kind, _, text, line in blocks:
        if kind == "python":  # empty lines in front, so that a traceback names lines of the page
            exec(compile("\n" * line + text, str(PAGE), "exec"), module.__dict__)

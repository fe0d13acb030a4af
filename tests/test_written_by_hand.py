"""IR that no declaration makes: valid and unusual, on both backends that need no GPU; and what is refused, in words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from routing import COMPILED, device_of

import moesaic as mo
from moesaic.ir.diagnostics import DiagnosticError
from moesaic.ir.errors import InputError, UnsupportedError


def run(body: str, results: str, logits: torch.Tensor, backend: str) -> list[torch.Tensor]:
    """What a function of logits gives; the reference is asked for the same."""
    dtype = {torch.float32: "f32", torch.bfloat16: "bf16"}[logits.dtype]
    text = f"moe.func @route(%logits: tensor<Tx{logits.shape[1]}x{dtype}>) -> ({results}) {{\n{body}\n}}"
    found = mo.compile(mo.parse(text), backend=backend)(logits.to(device_of(backend)))
    wanted = mo.compile(mo.parse(text), backend="reference")(logits)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.cpu(), b, rtol=1e-6, atol=1e-6)
    return [t.cpu() for t in found]


def normal(tokens: int, experts: int) -> torch.Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("experts", [8, 1056])
def test_counts_among_more_experts_than_a_row_has(experts: int, backend: str) -> None:
    """As after columns that are appended to the picks."""
    body = f"""
      %v, %i = row.topk %logits {{k = 2}}
      %more = row.append %i {{first = {experts}, count = 2}}
      %c = col.count %more {{size = {experts + 4}}}
      return %c"""
    logits = normal(37, experts)
    [counts] = run(body, f"c: tensor<{experts + 4}xi32>", logits, backend)
    assert counts[-4:].tolist() == [37, 37, 0, 0]
    assert torch.equal(counts[:experts], torch.bincount(logits.topk(2).indices.flatten(), minlength=experts).int())


def test_appended_picks_have_to_fit() -> None:
    text = """moe.func @route(%logits: tensor<Tx8xf32>) -> (c: tensor<8xi32>) {
      %v, %i = row.topk %logits {k = 2}
      %more = row.append %i {first = 8, count = 2}
      %c = col.count %more {size = 8}
      return %c
    }"""
    with pytest.raises(DiagnosticError, match=r":4:12: error: col.count: .* among 10 experts, which do not fit into 8"):
        mo.parse(text)


@pytest.mark.parametrize("backend", COMPILED)
def test_arithmetic_of_integers_is_that_of_floats(backend: str) -> None:
    body = """
      %v, %i = row.topk %logits {k = 2}
      %c = col.count %i {size = 8}
      %squares = math.mul %c, %c
      %total = col.total %squares
      return %total"""
    [total] = run(body, "total: tensor<f32>", torch.zeros(50000, 8), backend)
    assert total.item() == 2 * 50000.0**2  # beyond 2^31


@pytest.mark.parametrize("backend", COMPILED)
def test_constants_beyond_float32_are_infinite(backend: str) -> None:
    body = "%y = math.minimum %logits, 1e39\n%z = math.maximum %y, -3.4028235677973366e38\nreturn %z"
    [found] = run(body, "y: tensor<Tx8xf32>", normal(3, 8), backend)
    assert torch.equal(found, normal(3, 8))


@pytest.mark.parametrize("backend", COMPILED)
def test_rows_and_flags_of_other_types(backend: str) -> None:
    """A row of float32 beside one of bf16, whose chunks have twice the bytes; a flag of each token."""
    body = """
      %v, %i = row.topk %logits {k = 4}
      %p = row.scatter %v, %i {size = 64}
      %s = row.sum %logits
      %m = math.less %s, 0.0
      return %p, %m"""
    logits = normal(9, 64).bfloat16()
    probs, flags = run(body, "p: tensor<Tx64xf32>, m: tensor<Tx1xi1>", logits, backend)
    assert torch.equal(probs.sum(-1), logits.float().topk(4).values.sum(-1))
    assert flags.dtype == torch.bool and flags.any() and not flags.all()


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("name", ["mutable", "nullptr", "requires", "NULL", "static_cast", "__restrict__", "self"])
def test_any_name_can_be_that_of_a_value(name: str, backend: str) -> None:
    body = f"%{name}, %i = row.topk %logits {{k = 2}}\n%b = math.add %{name}, 1.0\nreturn %b"
    [found] = run(body, "b: tensor<Tx2xf32>", normal(5, 8), backend)
    assert torch.equal(found, normal(5, 8).topk(2).values + 1.0)


def test_an_input_may_be_called_as_python_calls_objects() -> None:
    text = "moe.func @f(%logits: tensor<Tx8xf32>, %self: tensor<8xf32>) -> (y: tensor<Tx8xf32>) {\n"
    layer = mo.compile(mo.parse(text + "%y = math.add %logits, %self\nreturn %y\n}"), backend="reference")
    assert torch.equal(layer(torch.zeros(2, 8), self=torch.ones(8)).y, torch.ones(2, 8))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("moe.func @f() -> (a: tensor<f32>) { return 1.0 }", r"@f has no input; the first one must be rows \[T, E\]"),
        *(
            (f"moe.func @f(%x: tensor<Tx8xf32>) -> ({name}: tensor<Tx8xf32>) {{ return %x }}", "called .* in Python")
            for name in ("class", "_x", "None")
        ),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        mo.compile(mo.parse(text))


def test_constants_are_no_results_of_kernels() -> None:
    text = """moe.func @f(%x: tensor<Tx8xf32>) -> (a: tensor<f32>, y: tensor<Tx8xf32>) {
      %y = math.exp %x
      return 1.5, %y
    }"""
    assert mo.compile(mo.parse(text), backend="reference")(torch.zeros(1, 8)).a.item() == 1.5
    with pytest.raises(UnsupportedError, match=r"@f returns the constant 1\.5, which no kernel makes"):
        mo.compile(mo.parse(text), backend="emulate")(torch.zeros(1, 8))


def test_a_function_without_kernels_is_explained() -> None:
    text = "moe.func @f(%x: tensor<Tx8xf32>) -> (y: tensor<Tx8xf32>) { return %x }"
    assert "there is no kernel" in str(mo.compile(mo.parse(text)).explain(16))


def test_a_dump_that_cannot_be_written_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOESAIC_DUMP_DIR", str(tmp_path / "file"))
    assert mo.compile(mo.Router(13, 2)).source
    assert "MOESAIC_DUMP_DIR" in caplog.text and "cannot be written" in caplog.text


@pytest.mark.parametrize("backend", COMPILED)
def test_a_gradient_onto_what_lies_in_shared_memory(backend: str) -> None:
    """Scores that are summed over tokens, picked among, and shown where groups are kept."""
    results = "r: tensor<Tx16xf32>, v: tensor<Tx2xf32>, c: tensor<16xf32>"
    text = f"""moe.func @route(%logits: tensor<Tx16xf32>) -> ({results}) {{
      %kept = row.group_limit %logits {{groups = 8, keep = 6}}
      %scores = row.softmax %logits
      %r = math.select %kept, %scores, 0.5
      %c = col.sum %scores
      %v, %i = row.topk %scores {{k = 2}}
      return %r, %v, %c
    }}"""
    found = []
    for how in (backend, "reference"):
        logits = normal(7, 16).to(device_of(how)).requires_grad_()
        made = mo.compile(mo.parse(text), backend=how)(logits)
        g = torch.Generator().manual_seed(2)
        cotangents = [torch.randn(t.shape, generator=g).to(t.device) for t in made]
        torch.autograd.backward([*made], cotangents)
        assert logits.grad is not None and logits.grad.any()
        found.append(logits.grad.cpu())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)

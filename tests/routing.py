"""What the tests of routers share: where to run, one run with random cotangents, and comparisons that can fail."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import moesaic as mo
from moesaic.ir.attributes import Call
from moesaic.runtime.layer import CompiledLayer

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

COMPILED = [
    pytest.param("emulate", marks=pytest.mark.emulate),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
BACKENDS = [pytest.param("reference"), *COMPILED]

INF = float("inf")
NAN = float("nan")

# Tolerances -----------------------------------------------------------------------------------------------------------
# All of them, each with its reason: a test that needs another one states it here.

EXACT = 1e-6
"""Of the largest value, for float32 results: a few units in the last place (6e-8 each) of a short chain of float32
operations. A float32 result against float64 has no more error than that; a wrong formula has far more."""

GRADIENT = 1e-5
"""Of the largest value, for float32 gradients: they subtract sums of up to E products from one of their terms."""

ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Twice what one rounding to the type may change, relative to the value."""

SATURATED = 4e-7
"""Absolute error of a gradient, for scale 1: s (1 - s) of a saturated float32 score s has only the digits of 1 - s, and
cotangents reach 4 or so. Tests that allow it have gradients above 1e-3."""

TIE = 1e-6
"""Two experts may change places if what they are ranked by differs by less: such values lie within 5 of zero in tests,
where two float32 ways to one sum differ by a few units in the last place (5e-7)."""

SENT = 2.0**-22
"""Of the largest cotangent of a row: a gradient subtracts their weighted mean from one of them, two roundings of sums
of as many terms as there are picks. Where a weight is near 1, that difference is near 0."""

ULPS = 4 * 2.0**-23
"""Four units in the last place, of the largest weight of a row: scores are as exact as one or two, a quotient adds two
units, a sum of up to K terms and a factor the rest."""

DEPTH = 2.0**-23
"""Of an exponential e^-d, times d: the exponent is rounded when it is subtracted, and when its base becomes 2."""

UNDECIDED = 2.0**-21
"""Of the values compared and the scores in them: two float32 ways to one score plus a bias differ by less."""

DIGITS = 5e-5
"""Of the largest value, for numbers written down with five digits after the point, the largest of them above 0.1."""

DOUBLE = 1e-13
"""Relative and absolute, for float64 values near 1 before and after a rewrite: it reorders no sum and reassociates
nothing, so that they agree to a few roundings (1e-16 each)."""

DOUBLE_GRADIENT = 1e-10
"""Of the largest value (or of 1e-3, if all are smaller), for float64 gradients by two ways: they subtract nearly equal
numbers."""

# ----------------------------------------------------------------------------------------------------------------------


def sweep(cases: Iterable[tuple[Any, ...]], emulated: int = 1, of: int = 2) -> list[Any]:
    """The cases of a sweep, each with a backend at its end: so many of `of` for the emulator, whose kernels take
    seconds to compile, all of them for a GPU."""
    every = list(cases)
    few = [case for number, case in enumerate(every) if number % of < emulated]
    return [
        *(pytest.param(*case, "emulate", marks=pytest.mark.emulate) for case in few),
        *(pytest.param(*case, "cuda", marks=pytest.mark.gpu) for case in every),
    ]


def device_of(backend: str) -> str:
    return "cuda" if backend == "cuda" else "cpu"


def example(name: str) -> ModuleType:
    """The Python file of an example, imported by its path."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Running --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Outputs and input gradients of one call, on the CPU, by name."""

    outputs: Mapping[str, torch.Tensor]
    gradients: Mapping[str, torch.Tensor]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.outputs[name]


def cotangent(like: torch.Tensor, seed: int, storage: torch.dtype | None = None) -> torch.Tensor:
    """Random numbers of a tensor's shape, the same for every backend; rounded to `storage` first, if given.

    Random, because many sums over a row of weights are constant: a cotangent of ones would test nothing.
    """
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(storage or like.dtype).to(like.dtype).to(like.device)


def run(
    layer: CompiledLayer,
    logits: torch.Tensor,
    *,
    seed: int = 7,
    storage: Mapping[str, torch.dtype] | None = None,
    backward: bool = True,
    **inputs: torch.Tensor,
) -> Run:
    """Calls a layer and sends random cotangents back from every float output.

    Args:
        layer: the compiled layer.
        logits, inputs: used where and as they lie in memory; all floats but `bias` get a gradient.
        seed: of the cotangents.
        storage: type that the cotangent of an output is rounded to, so that a float64 run gets what the other got.
        backward: False runs forward alone, without grad.
    """
    leaves = {"logits": logits, **inputs}
    learned = {n: backward and t.is_floating_point() and n != "bias" for n, t in leaves.items()}
    leaves = {n: t.detach().requires_grad_(learned[n]) for n, t in leaves.items()}
    with torch.set_grad_enabled(backward):
        result = layer(leaves["logits"], **{n: t for n, t in leaves.items() if n != "logits"})
    outputs = result._asdict()
    outputs |= outputs.pop("losses", {})
    floats = {n: o for n, o in outputs.items() if o.requires_grad}
    if floats:
        wanted = storage or {}
        cotangents = [cotangent(o, seed + i, wanted.get(n)) for i, (n, o) in enumerate(sorted(floats.items()))]
        torch.autograd.backward([o for _, o in sorted(floats.items())], cotangents)
    gradients = {n: t.grad for n, t in leaves.items() if t.grad is not None}
    return Run({n: o.detach().cpu() for n, o in outputs.items()}, {n: g.cpu() for n, g in gradients.items()})


# Comparing ------------------------------------------------------------------------------------------------------------


def assert_close(
    what: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: float, *, noise: float = 0.0
) -> None:
    """Every element within `tolerance` times the largest expected magnitude, plus `noise`, an absolute error that the
    arithmetic has even where all results are small; NaN and infinities at the same places.

    An expectation without a finite value other than 0 is refused: such a comparison passes when nothing was computed.
    """
    __tracebackhide__ = True
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    assert actual.shape == expected.shape, f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    finite = expected.isfinite()
    scale = expected[finite].abs().max().item() if finite.any() else 0.0
    assert scale > 0, f"{what}: nothing but zeros is expected, which tests nothing; use assert_zero"
    assert torch.equal(actual.isnan(), expected.isnan()), f"{what}: NaN at other places than expected"
    infinite = expected.isinf()
    assert torch.equal(actual[infinite], expected[infinite]), f"{what}: other infinities than expected"
    error = torch.where(finite, actual - torch.where(finite, expected, 0.0), 0.0).abs()
    worst = int(error.argmax())
    assert error.max().item() <= tolerance * scale + noise, (
        f"{what}: {actual.flatten()[worst]:.9g} at element {worst}, expected {expected.flatten()[worst]:.9g}: "
        f"{error.max().item() / scale:.2g} of the largest value, allowed {tolerance:.2g}"
    )


def assert_zero(what: str, actual: torch.Tensor) -> None:
    """Every element is exactly 0."""
    __tracebackhide__ = True
    assert bool((actual == 0).all()), f"{what}: expected zeros, found {actual[actual != 0][:4].tolist()}"


def assert_same(actual: Run, expected: Run, *, but: tuple[str, ...] = ()) -> None:
    """Bit for bit the same outputs and gradients, NaN included; `but` names what is left out."""
    __tracebackhide__ = True
    for kind in ("outputs", "gradients"):
        left, right = getattr(actual, kind), getattr(expected, kind)
        assert left.keys() == right.keys()
        for name in left.keys() - set(but):
            assert same_bits(left[name], right[name]), f"{kind[:-1]} {name} differs in its bits"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, type and bits; all NaN count as equal, and so do -0 and +0."""
    return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def by_expert(weights: torch.Tensor, indices: torch.Tensor, experts: int) -> torch.Tensor:
    """[T, E]: the weight where an expert was picked, else 0; where picks are in another order, these agree."""
    return torch.zeros(*weights.shape[:-1], experts, dtype=weights.dtype).scatter(-1, indices.long(), weights)


# Ties -----------------------------------------------------------------------------------------------------------------

SCORES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)).sqrt(),
}
"""What torch computes for each named score."""


def selection(
    router: mo.Router,
    logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    gate_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """What experts are ranked by, [T, E], in float64, written independently of the compiler."""
    x = logits.detach().cpu().double()
    if gate_bias is not None:
        x = x + gate_bias.detach().cpu().double()
    if router.logit_cap is not None:
        x = router.logit_cap * torch.tanh(x / router.logit_cap)
    if router.order == "score_then_topk":
        score = SCORES[router.score] if isinstance(router.score, str) else SOFTSIGN_ORACLE
        x = score(x)
    return x if bias is None else x + bias.detach().cpu().double()


def near_cut(router: mo.Router, values: torch.Tensor, gap: float) -> torch.Tensor:
    """[T] bool: rows where the last pick and the first expert left out, or the last group kept and the first one left
    out, are less than `gap` apart. Which of them is taken is then a matter of rounding."""
    close = torch.zeros(values.shape[0], dtype=torch.bool)
    if router.groups is not None and router.groups_kept is not None:
        grouped = values.unflatten(-1, (router.groups, -1))
        best = _best(router.group_score)
        score = grouped.topk(best, dim=-1).values.sum(-1)
        close |= _gap_after(score, router.groups_kept) < gap
        kept = score.topk(router.groups_kept, dim=-1).indices
        outside = torch.ones_like(score, dtype=torch.bool).scatter(-1, kept, False)
        values = grouped.masked_fill(outside.unsqueeze(-1), -INF).flatten(-2)
    return close | (_gap_after(values, router.top_k) < gap)


def _best(group_score: str | Call) -> int:
    if isinstance(group_score, Call):
        return group_score.arguments[0] if group_score.name == "sum_top" else 1
    return 1 if group_score == "max" else int(group_score.removeprefix("sum_top"))


def _gap_after(values: torch.Tensor, n: int) -> torch.Tensor:
    ordered = values.sort(-1, descending=True).values
    if n >= values.shape[-1]:
        return torch.full(values.shape[:-1], INF, dtype=values.dtype)
    return ordered[..., n - 1] - ordered[..., n]


# A score that nobody ships: half of 1 + softsign. It is no chain of increasing ops, so picks are ranked on its value.


def softsign_score(x: mo.ir.core.Value) -> mo.ir.core.Value:
    size = mo.math.maximum(x, -x)
    return (x / (size + 1.0) + 1.0) * 0.5


def SOFTSIGN_ORACLE(x: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.softsign(x) + 1) / 2

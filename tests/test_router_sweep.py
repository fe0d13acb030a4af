"""Routers of many sizes and every option, as generated code against torch in float64.

Sizes, scores and special values against each other are `test_router_matrix`'s; here it is what a declaration can say,
and where logits lie in memory. The full product has millions of routers; these are drawn from it by seed, two or three
for each number of experts, and a test makes sure that every choice of every option is among them.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from routing import (
    EXACT,
    GRADIENT,
    ROUNDING,
    SATURATED,
    TIE,
    Run,
    assert_close,
    by_expert,
    device_of,
    run,
    selection,
    softsign_score,
    sweep,
)

import moesaic as mo
from moesaic.runtime.execute import RUNNERS

SIZES = (1, 2, 3, 5, 7, 8, 12, 60, 96, 127, 128, 160, 256, 257, 384, 512, 1000, 1024)

TOKENS = (13, 29)
FEW = 24
"""Kernels for few tokens run up to so many, those for many above: each sample runs one kind."""

LONG = (  # rows that a block shares, a sample each: experts and picks
    *((1025, 1), (1025, 257), (1531, 8), (1531, 1531), (2048, 2), (2048, 36)),
    *((2304, 36), (2304, 64), (4096, 15), (8192, 257), (16384, 36)),
)
LONG_TOKENS = {13: 3, 29: 5}
LONG_FEW = 4
MANY_PICKS = 64
"""More picks than that are ranked on the logits: among so many scores, some are equal after rounding in most rows."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

PLACES: dict[str, tuple[int, int]] = {  # (columns before, columns after) the logits in a wider tensor
    "dense": (0, 0),
    "gap after rows": (0, 8),
    "odd stride": (0, 3),
    "misaligned": (1, 4),
}


@dataclass(frozen=True)
class Sample:
    """One router and how its logits lie in memory."""

    number: int
    dtype: str
    place: str
    router: mo.Router
    tokens: int
    chosen: dict[str, object] = field(repr=False)

    def __str__(self) -> str:
        return f"{self.number}-E{self.router.num_experts}-K{self.router.top_k}-{self.dtype}"

    def inputs(self, device: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Logits where `place` says, and the other inputs."""
        generator = torch.Generator().manual_seed(self.number)
        experts = self.router.num_experts
        before, after = PLACES[self.place]
        wide = 2 * torch.randn(self.tokens, before + experts + after, generator=generator)
        logits = wide.to(DTYPES[self.dtype]).to(device)[:, before : before + experts]
        others = {}
        if self.router.selection_bias:
            others["bias"] = 0.3 * torch.randn(experts, generator=generator)
        if self.router.gate_bias:
            others["gate_bias"] = torch.randn(experts, generator=generator)
        return logits, {n: t.to(device) for n, t in others.items()}


def draw(number: int, experts: int) -> Sample:
    """A router from the whole space, by its number."""
    chance = random.Random(1000 * experts + number)
    chosen: dict[str, object] = {}

    def choose(name: str, *choices: object) -> object:
        chosen[name] = chance.choice(choices)
        return chosen[name]

    order = choose("order", "score_then_topk", "topk_then_score")
    score = choose("score", "softmax", "sigmoid", "sqrtsoftplus", softsign_score)
    picks = min(experts, choose("top_k", 1, 2, 4, 6, 8, 31, experts))
    long = number < len(LONG) and LONG[number][0] == experts
    if long:
        picks = LONG[number][1]
    if picks > MANY_PICKS and long:
        score = choose("score", "softmax", "sigmoid", "sqrtsoftplus")
    if experts == 1 or (picks == 1 and order == "topk_then_score"):
        score = choose("score", "sigmoid", "sqrtsoftplus", softsign_score)  # softmax of one number has no gradient
    arguments = {
        "selection_bias": choose("selection_bias", False, True),
        "gate_bias": choose("gate_bias", False, True),
        "scale": choose("scale", 1.0, 2.5),
        "rank": choose("rank", "auto", "score"),
        "weights_dtype": choose("weights_dtype", "fp32", "fp32", "bf16"),
    }
    if picks > MANY_PICKS and long:
        arguments |= {"selection_bias": False, "gate_bias": False, "rank": "auto"}
    if picks > 1:  # one weight divided by itself has no gradient either
        arguments["renormalize"] = choose("renormalize", False, True, mo.norm.sum(eps=0.01), mo.norm.sum(min=0.8))
    groups = choose("groups", None, *(g for g in (2, 4, 8) if experts % g == 0 and experts > g))
    if groups is not None:
        size = experts // groups
        group_score = choose("group_score", "max", *(["sum_top2", "sum_top2"] * (size >= 2)), mo.sum_top(min(3, size)))
        kept = chance.choice([n for n in range(1, groups + 1) if n * size >= picks])
        arguments |= {"groups": groups, "groups_kept": kept, "group_score": group_score}
    outputs = [o for o in ("weights", "counts", "probs", "map") if chance.random() < 0.6]
    if not {"weights", "probs"} & set(outputs):
        outputs.append(chance.choice(["weights", "probs"]))
    outputs.append("indices")
    chance.shuffle(outputs)
    chosen["outputs"] = frozenset(outputs)
    router = mo.Router(experts, picks, score=score, order=order, outputs=tuple(outputs), **arguments)
    dtype, place, tokens = choose("dtype", *DTYPES), choose("place", *PLACES), choose("tokens", *TOKENS)
    return Sample(number, dtype, place, router, LONG_TOKENS[tokens] if long else tokens, chosen)


LONG_SAMPLES = [draw(number, experts) for number, (experts, _) in enumerate(LONG)]
SAMPLES = [
    *(draw(number, experts) for experts in SIZES for number in range(3 if experts in (8, 96, 256) else 2)),
    *LONG_SAMPLES,
]


def test_samples_hold_every_choice() -> None:
    seen: dict[str, set] = {}
    for sample in SAMPLES:
        for option, value in sample.chosen.items():
            seen.setdefault(option, set()).add(value)
    assert seen["score"] == {"softmax", "sigmoid", "sqrtsoftplus", softsign_score}
    assert seen["order"] == {"score_then_topk", "topk_then_score"}
    assert seen["dtype"] == set(DTYPES)
    assert seen["place"] == set(PLACES)
    assert seen["tokens"] == set(TOKENS)
    assert seen["rank"] == {"auto", "score"}
    assert seen["weights_dtype"] == {"fp32", "bf16"}
    assert seen["scale"] == {1.0, 2.5}
    assert len(seen["renormalize"]) == 4
    assert seen["groups"] == {None, 2, 4, 8}
    assert {"max", "sum_top2", mo.sum_top(3)} <= seen["group_score"]
    for name in ("selection_bias", "gate_bias"):
        assert seen[name] == {False, True}
    for name in ("weights", "counts", "probs", "map"):
        assert {name in outputs for outputs in seen["outputs"]} == {False, True}
    combined = {(s.chosen["order"], s.chosen["score"]) for s in SAMPLES}
    assert len(combined) == 8
    assert sum(s.router.top_k == s.router.num_experts for s in SAMPLES) >= 5
    assert sum(s.router.groups is not None and s.router.selection_bias for s in SAMPLES) >= 5
    assert {s.tokens for s in LONG_SAMPLES} == set(LONG_TOKENS.values())
    assert {s.dtype for s in LONG_SAMPLES} == set(DTYPES)
    assert {"counts" in s.router.outputs for s in LONG_SAMPLES} == {False, True}
    assert sum(s.router.groups is not None for s in LONG_SAMPLES) >= 2
    assert sum(s.router.gate_bias for s in LONG_SAMPLES) >= 2
    assert sum(s.router.selection_bias for s in LONG_SAMPLES) >= 2


# The comparison -------------------------------------------------------------------------------------------------------


@functools.cache
def expected(number: int, experts: int) -> Run:
    """The reference in float64, from the same logits and the same (rounded) cotangents."""
    sample = draw(number, experts)
    logits, inputs = sample.inputs("cpu")
    storage = {"probs": DTYPES[sample.dtype], "weights": DTYPES[sample.router.weights_dtype]}
    layer = mo.compile(sample.router, backend="reference")
    return run(layer, logits.double(), storage=storage, **inputs)


def check(sample: Sample, got: Run) -> None:
    """Every output and gradient of a sample against the reference."""
    __tracebackhide__ = True
    router = sample.router
    experts, picks = router.num_experts, router.top_k
    wanted = expected(sample.number, experts)
    logits, inputs = sample.inputs("cpu")
    assert got.outputs.keys() == wanted.outputs.keys() == set(router.outputs)

    indices = got["indices"]
    assert indices.dtype == torch.int32
    assert indices.shape == (sample.tokens, picks)
    assert bool(((indices >= 0) & (indices < experts)).all()), "an index outside [0, E)"
    assert bool((indices.sort(-1).values.diff(dim=-1) > 0).all()), "an expert picked twice"
    moved = indices != wanted["indices"]
    ranked = selection(router, logits, inputs.get("bias"), inputs.get("gate_bias"))
    apart = (ranked.gather(-1, indices.long()) - ranked.gather(-1, wanted["indices"].long())).abs()
    assert apart[moved].numel() == 0 or apart[moved].max() < TIE, "picks differ where there is no tie"
    same = ~moved.any(-1)
    assert int(same.sum()) >= sample.tokens * 3 // 4, "most rows have ties, which tests little"

    mask = torch.zeros(sample.tokens, experts, dtype=torch.uint8).scatter(-1, indices.long(), 1)
    if "map" in got.outputs:
        assert torch.equal(got["map"], mask), "map is not the picks"
    if "counts" in got.outputs:
        assert torch.equal(got["counts"], mask.sum(0, dtype=torch.int32)), "counts are not those of the picks"
    kinds = {"weights": DTYPES[router.weights_dtype], "probs": DTYPES[sample.dtype]}
    for name, dtype in kinds.items():
        if name in got.outputs:
            assert got[name].dtype == dtype
            assert_close(name, got[name][same], wanted[name][same], EXACT + ROUNDING[dtype])
    if {"weights", "probs"} <= got.outputs.keys():
        dense = by_expert(got["weights"].double(), indices, experts)
        coarse = max(ROUNDING[d] for d in kinds.values())
        assert_close("probs and weights", got["probs"], dense, EXACT + coarse)

    assert got.gradients.keys() == wanted.gradients.keys()
    d_logits = got.gradients["logits"]
    assert d_logits.dtype == DTYPES[sample.dtype]
    tolerance = GRADIENT + ROUNDING[d_logits.dtype]
    noise = SATURATED * router.scale
    assert_close("gradient of the logits", d_logits[same], wanted.gradients["logits"][same], tolerance, noise=noise)
    if router.gate_bias and same.all():
        # Column sums of the unrounded rows.
        d_bias = wanted.gradients["gate_bias"]
        assert_close("gradient of the gate bias", got.gradients["gate_bias"], d_bias, GRADIENT, noise=noise)


@pytest.mark.parametrize(("sample", "backend"), sweep(((sample,) for sample in SAMPLES), 3, of=5), ids=str)
def test_generated_code_agrees_with_float64(monkeypatch: pytest.MonkeyPatch, sample: Sample, backend: str) -> None:
    monkeypatch.setattr(RUNNERS[backend], "few_tokens", LONG_FEW if sample in LONG_SAMPLES else FEW)
    logits, inputs = sample.inputs(device_of(backend))
    check(sample, run(mo.compile(sample.router, backend=backend), logits, **inputs))


# The comparison can fail ----------------------------------------------------------------------------------------------

EVERYTHING = Sample(
    number=1,
    dtype="fp32",
    place="dense",
    router=mo.Router(12, 3, gate_bias=True, scale=2.0, outputs=("weights", "indices", "counts", "probs", "map")),
    tokens=13,
    chosen={},
)


def _zero(tensor: torch.Tensor) -> None:
    tensor.zero_()


def _off_by_one(tensor: torch.Tensor) -> None:
    tensor[0] += 1


@pytest.mark.emulate
@pytest.mark.parametrize("spoil", [None, _zero, _off_by_one])
@pytest.mark.parametrize("spoilt", ["weights", "indices", "counts", "probs", "map", "d_logits", "d_gate_bias"])
def test_a_spoilt_output_is_found_out(
    monkeypatch: pytest.MonkeyPatch, spoilt: str, spoil: Callable[[torch.Tensor], None] | None
) -> None:
    """With any one output zeroed, or one element of it changed, the comparison above fails; untouched, it passes."""
    runner = RUNNERS["emulate"]
    launch = runner.run

    def spoiling(program, kind, cotangents, inputs):
        results = launch(program, kind, cotangents, inputs)
        names = program.function.result_names
        if kind == "backward":
            names = program.backward_function(cotangents).result_names
        if spoil is not None and spoilt in names:
            spoil(results[names.index(spoilt)])
        return results

    monkeypatch.setattr(runner, "run", spoiling)
    monkeypatch.setattr(f"{__name__}.expected", lambda number, experts: EXPECTED)
    logits, inputs = EVERYTHING.inputs("cpu")
    EXPECTED = run(mo.compile(EVERYTHING.router, backend="reference"), logits.double(), **inputs)
    got = run(mo.compile(EVERYTHING.router, backend="emulate"), logits, **inputs)
    if spoil is None:
        check(EVERYTHING, got)
    else:
        with pytest.raises((AssertionError, RuntimeError)):
            check(EVERYTHING, got)

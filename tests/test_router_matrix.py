"""The router over sizes and special values: every pair of values of any two factors, against torch in float64.

Factors are what numbers depend on: storage, score, sizes, groups, tokens, the magnitude of a selection bias, the kind
of logits and of cotangents. The full product has millions of cases; some 1,500 are drawn such that any value of one
factor meets any value of another, as far as a router of both exists. A GPU runs them all; the emulator runs a few
routers on every kind of input. Options of a declaration, and how logits lie in memory, are `test_router_sweep`'s.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from routing import DEPTH, GRADIENT, INF, NAN, ROUNDING, SATURATED, SENT, ULPS, UNDECIDED, device_of

import moesaic as mo
from moesaic.passes.row_shape import MAX_EXPERTS
from moesaic.runtime.execute import RUNNERS

# The factors ----------------------------------------------------------------------------------------------------------

SIZES = (1, 2, 7, 8, 31, 32, 33, 60, 64, 100, 128, 130, 160, 256, 384, 512, 896, 1000, 1024, 2048, 2304, 4096, 8192)
SIZES += (16384,)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

FACTORS: dict[str, tuple] = {
    "dtype": tuple(DTYPES),
    "score": ("softmax", "softmax of picks", "sigmoid", "sqrtsoftplus"),
    "experts": tuple(e for e in SIZES if e <= MAX_EXPERTS),
    "picks": (1, 2, 3, 4, 6, 8, 10, 15, 16, 17, 22, 32, 36, 64, "all"),
    "groups": (None, (1, 1), (4, 1), (4, 2), (8, 4), (8, 3), (16, 8)),
    "tokens": (0, 1, 3, 4, 5, 127, 4096, 8191, 131072),
    "bias": ("none", "small", "1e3", "1e8", "masks"),
    "inputs": ("normal", "equal", "tied", "saturated", "masked", "one nan", "zeros"),
    "cotangent": ("random", "one-hot", "nan off the picks"),
}

MOST_ELEMENTS = 2**25
"""Of the logits: the float64 reference holds a dozen such tensors, several cases at a time."""

CASES = 1536
BATCHES = 32
SEED = 1


@dataclass(frozen=True)
class Case:
    """One value of each factor; see `FACTORS`."""

    dtype: str
    score: str
    experts: int
    picks: int | str
    groups: tuple[int, int] | None
    tokens: int
    bias: str
    inputs: str
    cotangent: str

    def __str__(self) -> str:
        return ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self))

    @property
    def top_k(self) -> int:
        return self.experts if isinstance(self.picks, str) else self.picks

    @property
    def exists(self) -> bool:
        """Whether there is such a router, and the reference can hold its logits."""
        if self.top_k > self.experts or self.tokens * self.experts > MOST_ELEMENTS:
            return False
        if self.groups is None:
            return True
        groups, kept = self.groups
        return self.experts % groups == 0 and self.top_k <= kept * self.experts // groups

    def router(self) -> mo.Router:
        groups: dict[str, object] = {}
        if self.groups is not None:
            size = self.experts // self.groups[0]
            groups = {"groups": self.groups[0], "groups_kept": self.groups[1], "group_score": mo.sum_top(min(2, size))}
        softmax = self.score.startswith("softmax")
        return mo.Router(
            self.experts,
            self.top_k,
            score="softmax" if softmax else self.score,
            order="topk_then_score" if self.score == "softmax of picks" else "score_then_topk",
            selection_bias=self.bias != "none",
            renormalize=False if softmax or self.top_k == 1 else mo.norm.sum(eps=1e-20),
            scale=1.25,
            outputs=("weights", "indices", "counts", "probs", "map"),
            **groups,
        )


# Pairs ----------------------------------------------------------------------------------------------------------------

Pair = tuple[str, object, str, object]

CONSTRAINED = ("experts", "picks", "groups", "tokens")


def pairs_of(case: Case) -> Iterator[Pair]:
    for a, b in itertools.combinations(FACTORS, 2):
        yield a, getattr(case, a), b, getattr(case, b)


@functools.cache
def shapes() -> tuple[dict[str, object], ...]:
    """Every choice of the factors that decide whether a case exists."""
    free = {name: values[0] for name, values in FACTORS.items()}
    found = (dict(zip(CONSTRAINED, chosen)) for chosen in itertools.product(*(FACTORS[n] for n in CONSTRAINED)))
    return tuple(shape for shape in found if Case(**{**free, **shape}).exists)


@functools.cache
def feasible_pairs() -> frozenset[Pair]:
    """Pairs of values that some case holds."""
    possible = {(a, s[a], b, s[b]) for s in shapes() for a, b in itertools.combinations(CONSTRAINED, 2)}
    alone = {name: {s[name] for s in shapes()} if name in CONSTRAINED else set(FACTORS[name]) for name in FACTORS}
    for a, b in itertools.combinations(FACTORS, 2):
        if a not in CONSTRAINED or b not in CONSTRAINED:
            possible |= {(a, x, b, y) for x in alone[a] for y in alone[b]}
    return frozenset(possible)


@functools.cache
def cases() -> tuple[Case, ...]:
    """Greedily: around a pair not seen yet, of some random cases the one with most new pairs; then random ones."""
    chance = random.Random(SEED)

    def around(fixed: dict[str, object]) -> Case:
        shape = chance.choice(matching(tuple((n, v) for n, v in fixed.items() if n in CONSTRAINED)))
        others = {name: chance.choice(values) for name, values in FACTORS.items() if name not in CONSTRAINED}
        return Case(**{**others, **shape, **fixed})

    @functools.cache
    def matching(fixed: tuple[tuple[str, object], ...]) -> list[dict[str, object]]:
        return [s for s in shapes() if all(s[n] == v for n, v in fixed)]

    waiting = dict.fromkeys(sorted(feasible_pairs(), key=repr))  # a set that keeps an order
    found: list[Case] = []
    while waiting:
        a, x, b, y = chance.choice([*itertools.islice(waiting, 50)])
        best = max((around({a: x, b: y}) for _ in range(20)), key=lambda c: sum(p in waiting for p in pairs_of(c)))
        for pair in pairs_of(best):
            waiting.pop(pair, None)
        found.append(best)
    while len(found) < CASES:
        found.append(around({}))
    chance.shuffle(found)
    return tuple(found)


def test_every_pair_occurs() -> None:
    drawn = cases()
    assert len(drawn) == CASES
    assert all(case.exists for case in drawn)
    missing = feasible_pairs() - {pair for case in drawn for pair in pairs_of(case)}
    assert not missing
    for name, values in FACTORS.items():
        assert {getattr(case, name) for case in drawn} == set(values)


def test_longer_rows_join_by_themselves() -> None:
    """Sizes are left out by the compiler's own limit, and by nothing else."""
    assert set(SIZES) - set(FACTORS["experts"]) == {e for e in SIZES if e > MAX_EXPERTS}


# Inputs ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """What a case is run on, on its device: logits [T, E], the bias [E] or None, and a number for each expert of each
    token [T, E], from which cotangents are taken. By expert, since two backends may order near ties differently."""

    logits: torch.Tensor
    bias: torch.Tensor | None
    sent: torch.Tensor


def inputs_of(case: Case, device: str) -> Inputs:
    generator = torch.Generator(device).manual_seed(17)
    tokens, experts = case.tokens, case.experts

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def chance(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device)

    x = 2 * normal(tokens, experts)
    if case.inputs == "equal":
        x = normal(tokens, 1).expand(tokens, experts).clone()
    elif case.inputs == "tied":
        x = x.round() / 2
    elif case.inputs == "saturated":
        x = x.sign() * (40 + 40 * chance(tokens, experts))  # e^-80 is still a normal float32
    elif case.inputs == "masked":
        x = x.masked_fill(chance(tokens, experts) < 0.3, -INF)
        x[1::3] = -INF
    elif case.inputs == "one nan" and tokens:
        x[tokens // 2, experts // 3] = NAN
    elif case.inputs == "zeros":
        x = torch.where(chance(tokens, experts) < 0.6, 0.0 * x, x.abs())  # zeros of either sign
    bias = None
    if case.bias != "none":
        bias = normal(experts) * {"small": 0.1, "1e3": 1e3, "1e8": 1e8, "masks": 0.1}[case.bias]
        if case.bias == "masks":
            bias = bias.masked_fill(chance(experts) < 0.5, -INF)
    return Inputs(x.to(DTYPES[case.dtype]), bias, normal(tokens, experts))


# Running and comparing ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """Results of a case by name, with the gradient of the logits."""

    outputs: dict[str, torch.Tensor]
    gradient: torch.Tensor


def found_by(case: Case, backend: str, inputs: Inputs, storage: torch.dtype) -> Found:
    """A case on a backend; cotangents are rounded to what `storage`, the logits' dtype, can hold."""
    logits = inputs.logits.detach().requires_grad_()
    result = mo.compile(case.router(), backend=backend)(
        logits, **({} if inputs.bias is None else {"bias": inputs.bias})
    )
    picks = result.indices.long()
    d_weights = inputs.sent.gather(-1, picks)
    d_probs = -inputs.sent.flip(-1).to(storage).to(result.probs.dtype)
    if case.cotangent == "one-hot":
        d_probs = torch.zeros_like(d_probs)
        d_weights = torch.zeros_like(d_weights)
        # The pick that is sent most, which is the same expert whatever the order of picks.
        d_weights.scatter_(-1, inputs.sent.gather(-1, picks).argmax(-1, keepdim=True), 1.0)
    elif case.cotangent == "nan off the picks":
        d_probs = torch.where(result.map != 0, d_probs, NAN)
    floats = [result.weights, result.probs]
    torch.autograd.backward(floats, [d_weights.to(result.weights.dtype), d_probs])
    assert logits.grad is not None
    return Found({n: o.detach() for n, o in result._asdict().items()}, logits.grad)


def undecided(router: mo.Router, logits: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[T] bool: rows where rounding decides which expert, or which group, is the last one in.

    Equal values are no such case: their order is by index, on every backend.
    """
    x = logits.double()
    scores = {
        "softmax": lambda x: torch.softmax(x, -1).nan_to_num(),
        "sigmoid": torch.sigmoid,
        "sqrtsoftplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)).sqrt(),
    }
    scored = scores[str(router.score)](x) if router.order == "score_then_topk" else x
    values = scored if bias is None else scored + bias.double()
    ranked = x if bias is None else values
    size = scored.nan_to_num(0.0, 0.0, 0.0).abs().amax(-1, keepdim=True)
    exact = 0.0 if bias is None else UNDECIDED  # logits are ranked as they are

    def close(values: torch.Tensor, n: int, relative: float, size: torch.Tensor) -> torch.Tensor:
        if n >= values.shape[-1]:
            return torch.zeros(values.shape[:-1], dtype=torch.bool, device=values.device)
        ordered = values.nan_to_num(-INF, INF, -INF).sort(-1, descending=True).values
        last, first_out = ordered[..., n - 1], ordered[..., n]
        gap = last - first_out  # NaN where both are infinite
        return (gap > 0) & (gap < relative * (last.abs() + size.squeeze(-1)))

    if router.groups is None or router.groups_kept is None:
        return close(ranked, router.top_k, exact, size)
    grouped = values.nan_to_num(-INF, INF, -INF).unflatten(-1, (router.groups, -1))
    best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    largest = torch.where(values.isfinite(), values.abs(), 0.0).amax(-1, keepdim=True)  # of sums that cancel
    kept = best.nan_to_num(-INF, INF, -INF).topk(router.groups_kept, dim=-1).indices
    inside = torch.zeros_like(best, dtype=torch.bool).scatter(-1, kept, True).unsqueeze(-1).expand_as(grouped)
    left = ranked.masked_fill(~inside.flatten(-2), -INF)
    return close(best, router.groups_kept, UNDECIDED, largest + size) | close(left, router.top_k, exact, size)


def compare(case: Case, backend: str) -> int:
    """Every output and gradient of a case against the reference in float64; gives the number of rows compared."""
    device = device_of(backend)
    storage = DTYPES[case.dtype]
    inputs = inputs_of(case, device)
    wide = dataclasses.replace(inputs, logits=inputs.logits.double())
    got = found_by(case, backend, inputs, storage)
    wanted = found_by(case, "reference", wide, storage)
    router = case.router()
    tokens, experts, picks = case.tokens, case.experts, case.top_k

    indices = got.outputs["indices"]
    assert indices.shape == (tokens, picks)
    assert bool(((indices >= 0) & (indices < experts)).all()), "an index outside [0, E)"
    assert bool((indices.sort(-1).values.diff(dim=-1) > 0).all()), "an expert picked twice"
    mask = torch.zeros(tokens, experts, dtype=torch.uint8, device=device).scatter(-1, indices.long(), 1)
    assert torch.equal(got.outputs["map"], mask), "map is not the picks"
    assert torch.equal(got.outputs["counts"], mask.sum(0, dtype=torch.int32)), "counts are not those of the picks"

    rows = ~undecided(router, inputs.logits, inputs.bias)
    different = (mask != wanted.outputs["map"]).any(-1) & rows
    assert not different.any(), f"other picks than expected in row {int(different.int().argmax())}"

    dense = {}
    for name, found in (("got", got), ("wanted", wanted)):
        weights, places = found.outputs["weights"], found.outputs["indices"].long()
        zeros = torch.zeros(tokens, experts, dtype=weights.dtype, device=device)
        dense[name] = zeros.scatter(-1, places, weights)
    depth = torch.zeros_like(wide.logits)
    if case.score == "softmax":  # a bias may pick experts of small probability
        depth = (wide.logits.amax(-1, keepdim=True) - wide.logits).nan_to_num(0.0, 0.0, 0.0)
    elif case.score == "sigmoid":  # all scores of a row may be far below 1
        depth = wide.logits.nan_to_num(0.0, 0.0, 0.0).clamp(max=0.0).abs().amax(-1, keepdim=True)
    noise = (DEPTH * depth * dense["wanted"].abs()).nan_to_num(0.0)
    close_rows("weights", dense["got"][rows], dense["wanted"][rows], ULPS, noise=noise[rows])
    probs = got.outputs["probs"]
    assert probs.dtype == storage
    close_rows("probs", probs[rows], wanted.outputs["probs"][rows], ULPS, storage, noise=noise[rows])

    assert got.gradient.dtype == storage
    # The reference and the rules need not agree on what a NaN does to its own row; no other row may notice it.
    clean = rows & ~inputs.logits.isnan().any(-1)
    digits = router.scale * (SATURATED + SENT * inputs.sent.abs().amax(-1, keepdim=True)[clean])
    close_rows("gradient", got.gradient[clean], wanted.gradient[clean], GRADIENT + ULPS, storage, noise=digits)
    return int(rows.sum())


def close_rows(
    what: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    tolerance: float,
    storage: torch.dtype = torch.float32,
    *,
    noise: torch.Tensor | float = 0.0,
) -> None:
    """Every element within `tolerance` of its row's largest, plus one rounding to `storage`, plus `noise`, plus what
    is too small for a normal float32 or for `storage`."""
    if not actual.numel():
        return
    actual, expected = actual.double(), expected.double()
    assert torch.equal(actual.isnan(), expected.isnan()), f"{what}: NaN at other places than expected"
    actual, expected = actual.nan_to_num(0.0), expected.nan_to_num(0.0)
    scale = expected.abs().amax(-1, keepdim=True)
    kind = torch.finfo(storage)
    smallest = max(torch.finfo(torch.float32).smallest_normal, kind.smallest_normal * kind.eps)
    allowed = tolerance * scale + ROUNDING[storage] * expected.abs() + noise + smallest
    error = (actual - expected).abs()
    worst = int((error / allowed).argmax())
    assert bool((error <= allowed).all()), (
        f"{what}: {actual.flatten()[worst]:.9g} in row {worst // expected.shape[-1]}, column "
        f"{worst % expected.shape[-1]}, expected {expected.flatten()[worst]:.9g}: off by "
        f"{error.flatten()[worst]:.2g}, allowed {allowed.flatten()[worst]:.2g}"
    )


def problems(several: list[Case], backend: str, threads: int = 1) -> list[str]:
    """What is wrong with each of several cases, by its name; each is compiled on its own thread."""

    def problem(case: Case) -> str | None:
        try:
            compared = compare(case, backend)
        except Exception as error:  # noqa: BLE001 - a case that cannot run is as wrong as one with other results
            return f"{case}\n    {type(error).__name__}: {error}"
        few = compared < case.tokens * 2 // 3 - 2
        return f"{case}\n    only {compared} rows are decided, which tests little" if few else None

    with ThreadPoolExecutor(threads) as pool:
        return [found for found in pool.map(problem, several) if found]


@pytest.mark.gpu
@pytest.mark.parametrize("batch", range(BATCHES))
def test_matrix(batch: int) -> None:
    wrong = problems([*cases()[batch::BATCHES]], "cuda", threads=16)
    assert not wrong, f"{len(wrong)} of {CASES // BATCHES} cases:\n" + "\n".join(wrong)


# A sample for the emulator --------------------------------------------------------------------------------------------

ROUTERS = 8
TOKENS = (13, 29, 3, 5, 1, 0, 31)


def sample(number: int) -> list[Case]:
    """One router of the matrix with every kind of input: these share their kernels, which take longest."""
    small = [case for case in cases() if case.experts <= 260 and case.top_k <= 40]
    case = small[number]
    biases = itertools.cycle(["none"] if case.bias == "none" else FACTORS["bias"][1:])
    cotangents = itertools.cycle(FACTORS["cotangent"])
    return [
        dataclasses.replace(case, inputs=kind, tokens=tokens, bias=next(biases), cotangent=next(cotangents))
        for kind, tokens in zip(FACTORS["inputs"], TOKENS, strict=True)
    ]


@pytest.mark.emulate
@pytest.mark.parametrize("number", range(ROUTERS))
def test_sample(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    # One bucket of tokens each: half of the routers as for few tokens, half as for many.
    monkeypatch.setattr(RUNNERS["emulate"], "few_tokens", 10**9 if number % 2 else -1)
    wrong = problems(sample(number), "emulate")
    assert not wrong, f"{len(wrong)} cases:\n" + "\n".join(wrong)


@pytest.mark.parametrize("spoilt", ["weights", "indices", "counts", "probs", "map", "d_logits"])
@pytest.mark.emulate
def test_a_spoilt_result_is_found_out(monkeypatch: pytest.MonkeyPatch, spoilt: str) -> None:
    """With one element of one result changed, the comparison fails; untouched, it passes."""
    case = Case("fp32", "softmax", 12, 3, None, 13, "none", "normal", "random")
    assert compare(case, "emulate") == 13
    runner = RUNNERS["emulate"]
    launch = runner.run

    def spoiling(program, kind, cotangents, inputs):
        results = launch(program, kind, cotangents, inputs)
        function = program.backward_function(cotangents) if kind == "backward" else program.function
        if spoilt in function.result_names:
            changed = results[function.result_names.index(spoilt)].view(-1)
            changed[0] = changed[0] + 1
        return results

    monkeypatch.setattr(runner, "run", spoiling)
    with pytest.raises(AssertionError):
        compare(case, "emulate")

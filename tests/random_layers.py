"""Random layers of every kind, inputs for them, and simpler ones like them: what the fuzz tests draw from."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import moesaic as mo
from moesaic.ir.core import Module
from moesaic.ir.errors import InputError
from moesaic.runtime.reference import DTYPES

Tensors = dict[str, torch.Tensor]
Declared = mo.Router | mo.Experts | mo.MoE

SIZES = (1, 2, 7, 8, 16, 17, 24, 33)
OF_ROUTER = ("bias", "gate_bias", "expert_scale", "router_scale", "weights", "num_tokens")
"""Inputs that are float32 whatever the layer's type."""

IDS = ("any", "any", "here", "repeated", "one", "nobody", "far")
"""Which picks are given: from -1 to E, all of them here, one expert a token, one for all, none here, or far outside."""


NARROW = 10000
"""Seeds from here on have sizes at their ends, see `case`."""


@dataclass(frozen=True)
class Case:
    """A layer and what it is called with.

    Attributes:
        declared: the layer.
        shape: of the tokens, [T] or, where a loss is by sequence, [N, S] or [S, N].
        dtype: of x and the matrices, or of logits.
        masked: whether there is a token mask.
        top_k, ids, indices, weights: of experts alone: K, a kind of `IDS`, and the types of picks and of their weights.
        seed: of the values.
    """

    declared: Declared
    shape: tuple[int, ...]
    dtype: torch.dtype
    masked: bool
    top_k: int
    ids: str
    indices: torch.dtype
    weights: torch.dtype
    seed: int

    @property
    def tokens(self) -> int:
        return math.prod(self.shape)

    @property
    def module(self) -> Module:
        """The declared function."""
        dtype = DTYPES[self.dtype]
        if isinstance(self.declared, mo.Experts):
            return self.declared.module(dtype, self.top_k, DTYPES[self.indices], DTYPES[self.weights])
        return self.declared.module(dtype, masked=self.masked)

    def inputs(self) -> Tensors:
        """Values near 1, products of them too."""
        g = torch.Generator().manual_seed(self.seed)
        made: Tensors = {}
        for argument in self.module.entry.arguments:
            name, kind = argument.name, argument.type
            if kind.leading == "N":  # made from the shape of the tokens
                continue
            rows = self.shape if kind.leading == "T" else ()
            sizes = [*rows, *(d for d in kind.shape if isinstance(d, int))]
            if name == "token_mask":
                made[name] = torch.rand(self.shape, generator=g) < 0.7
            elif name == "num_tokens":
                made[name] = torch.tensor(self.tokens + 3.0)
            elif not kind.dtype.is_float:
                made[name] = self._picks(sizes, g)
            else:
                small = not rows and len(sizes) > 1
                values = torch.randn(sizes, generator=g, dtype=torch.float64) * (sizes[-1] ** -0.5 if small else 1.0)
                wide = self.weights if name == "weights" else torch.float32 if name in OF_ROUTER else self.dtype
                made[name] = values.to(wide)
        return made

    def _picks(self, sizes: list[int], g: torch.Generator) -> torch.Tensor:
        number = self.declared.experts.num_experts if isinstance(self.declared, mo.MoE) else self.declared.num_experts
        if self.ids in ("one", "nobody"):
            return torch.full(sizes, number - 1 if self.ids == "one" else -1, dtype=self.indices)
        low, high = (0, number) if self.ids in ("here", "repeated") else (-1, number + 1)
        picks = torch.randint(low, high, sizes, generator=g)
        if self.ids == "repeated":
            picks = picks[..., :1].expand(sizes)
        if self.ids == "far":
            far = torch.tensor([torch.iinfo(self.indices).min, torch.iinfo(self.indices).max, -7, number + 5])
            picks = torch.where(torch.rand(sizes, generator=g) < 0.5, picks, far[torch.randint(4, sizes, generator=g)])
        return picks.to(self.indices)

    def __str__(self) -> str:
        of_picks = f", {self.ids} picks of {self.indices}, weights {self.weights}, K = {self.top_k}"
        return (
            f"{self.declared}\non tokens {list(self.shape)} of {self.dtype}{', masked' if self.masked else ''}"
            f"{of_picks if isinstance(self.declared, mo.Experts) else ''}, seed {self.seed}"
        )


# Drawing --------------------------------------------------------------------------------------------------------------


def _product_gating(gate: Any, up: Any) -> Any:
    return mo.math.tanh(gate) * up


def _own_score(x: Any) -> Any:
    return mo.math.log1p(mo.math.softplus(x))


def experts(rng: random.Random, number: int, hidden: int) -> mo.Experts:
    """Experts of any kind."""
    gated = rng.random() < 0.75
    options: dict[str, Any] = {"gated": gated}
    if gated:
        layout = rng.choice(["halves", "halves", "interleaved", "separate"])
        options |= {layout: True} if layout != "halves" else {}
        gating: Callable[..., Any] | None = rng.choice([None, None, mo.ClampedSwiGLU(1.5, 1.7, 1.0), _product_gating])
        options |= {"gating": gating} if gating is not None else {"activation": rng.choice(["silu", "gelu", "sigmoid"])}
    else:
        options["activation"] = rng.choice(["silu", "relu2", "gelu_tanh", "identity"])
    if rng.random() < 0.3:
        options["capacity"] = rng.choice([0.6, 1.0, 1.7])
        options["pad"] = rng.random() < 0.4
    return mo.Experts(
        number,
        hidden,
        rng.choice(SIZES),
        bias=rng.random() < 0.4,
        transposed=rng.choice([False, False, True, "up", "down"]),
        weight_on=rng.choice(["output", "output", "input", "middle"]),
        align=rng.choice([1, 1, 16]),
        **options,
    )


def losses(rng: random.Random, segments: str | None) -> dict[str, Any]:
    """Some losses; those that balance by sequence where `segments` says how sequences lie."""
    balance = mo.LoadBalance(coef=0.3, segments=segments)
    if segments is None and rng.random() < 0.4:
        balance = rng.choice([mo.LoadBalance(convention="transformers"), mo.LoadBalance(num_tokens="given")])
    drawn = {"balance": balance, "z": mo.ZLoss(coef=0.05), "entropy": mo.Entropy(coef=-0.2)}
    return {n: loss for n, loss in drawn.items() if rng.random() < 0.7 or (segments and n == "balance")}


def router(rng: random.Random, segments: str | None) -> mo.Router:
    """A router that has gradients, and perhaps losses."""
    number = rng.choice([2, 3, 6, 8, 12, 31, 40])
    options: dict[str, Any] = {}
    if rng.random() < 0.3 and number % 2 == 0 and number >= 4:
        options |= {"groups": 2, "groups_kept": 1, "group_score": rng.choice(["max", "sum_top2"])}
    most = number // 2 if options else number
    if rng.random() < 0.6:
        options["renormalize"] = rng.choice([True, True, mo.norm.lp(2.0), mo.norm.sum(eps=0.1)])
    if segments is not None or rng.random() < 0.4:
        options["losses"] = losses(rng, segments)
    order = rng.choice(["score_then_topk", "score_then_topk", "topk_then_score"])
    return mo.Router(
        number,
        rng.randint(1, min(rng.choice([3, 3, 9]), most)),
        score=rng.choice(["softmax", "sigmoid", "sqrtsoftplus", _own_score]),
        order=order,
        selection_bias=order == "score_then_topk" and rng.random() < 0.4,
        gate_bias=rng.random() < 0.3,
        logit_cap=rng.choice([None, None, None, 2.0]),
        expert_scale=rng.random() < 0.2,
        router_scale=rng.random() < 0.2,
        scale=rng.choice([1.0, 2.5]),
        **options,
    )


def shared(rng: random.Random) -> mo.SharedExpert | None:
    if rng.random() < 0.4:
        return None
    gated = rng.random() < 0.7
    return mo.SharedExpert(
        rng.choice(SIZES),
        gated=gated,
        activation=rng.choice(["silu", "gelu_tanh"]),
        separate=gated and rng.random() < 0.4,
        transposed=rng.random() < 0.3,
        gate=rng.random() < 0.4,
    )


def outputs(rng: random.Random, of_layer: bool) -> tuple[str, ...]:
    """Some outputs, a float one among them."""
    more = ["counts", "indices", "probs", "map", "bitmap", "scores", "score_sums", "logsumexp"]
    first = ["hidden"] if of_layer else ["weights"]
    more += ["logits", "weights", "dropped"] if of_layer else []
    return (*first, *rng.sample(more, rng.choice([0, 1, 1, 2, 4])))


def case(seed: int) -> Case:
    """The case of a seed. From `NARROW` on, those before once more, with a size at one of its ends."""
    if seed >= NARROW:
        return replace(_narrowed(case(seed - NARROW), random.Random(seed)), seed=seed)
    rng = random.Random(seed)
    hidden = rng.choice(SIZES)
    kind = rng.choice(["experts"] * 3 + ["router"] * 2 + ["layer"] * 5)
    segments = rng.choice([None, None, None, "batch_first", "sequence_first"]) if kind != "experts" else None
    declared: Declared
    if kind == "experts":
        declared = experts(rng, rng.choice([1, 2, 5]), hidden)
        declared = replace(declared, outputs=rng.choice([("hidden",), ("hidden", "counts", "dropped")]))
    elif kind == "router":
        declared = replace(router(rng, segments), outputs=outputs(rng, False))
        declared = _with_shared_experts(declared, random.Random(f"{seed}, shared"))
    else:
        r, s = router(rng, segments), shared(rng)
        local = r.num_experts if rng.random() < 0.8 else max(1, r.num_experts - 1)
        declared = mo.MoE(
            r,
            experts(rng, local, hidden),
            shared=s,
            mean=s is not None and rng.random() < 0.3,
            residual=rng.random() < 0.3,
            outputs=outputs(rng, True),
        )
    tokens = rng.choice([0, 1, 5, 11, 11, 11, 29, 67])
    return Case(
        declared,
        shape=(tokens,) if segments is None else rng.choice([(3, 5), (1, 11), (4, 1)]),
        dtype=rng.choice([torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16]),
        masked=kind != "experts" and rng.random() < 0.3,
        top_k=rng.choice([1, 2, 2, 3, 4]),
        ids=rng.choice(IDS),
        indices=rng.choice([torch.int32, torch.int32, torch.int64, torch.int16]),
        weights=rng.choice([torch.float32, torch.float32, torch.bfloat16]),
        seed=seed,
    )


def sent(given: Case, results: Sequence[str]) -> set[str]:
    """The results of a case that are sent a cotangent, of those that may have one: mostly all."""
    rng = random.Random(f"{given.seed}, sent")
    some = {name for name in results if rng.random() < 0.5} if given.seed % 3 == 1 else set(results)
    return some or {rng.choice(sorted(results))}


def frozen(given: Case, inputs: Sequence[str]) -> set[str]:
    """The inputs of a case that get no gradient, of those that could: mostly none, and never all."""
    rng = random.Random(f"{given.seed}, frozen")
    return {name for name in inputs[1:] if rng.random() < 0.6} if given.seed % 3 == 2 else set()


def _with_shared_experts(declared: mo.Router, rng: random.Random) -> mo.Router:
    """Perhaps the same with columns for experts that every token goes to, if it can have them."""
    if rng.random() < 0.7 or declared.groups is not None or declared.order != "score_then_topk":
        return declared
    kept = tuple(name for name in declared.outputs if name not in ("probs", "map", "bitmap"))
    return replace(declared, shared_experts=rng.choice([1, 3]), outputs=kept or ("weights",))


def _narrowed(given: Case, rng: random.Random) -> Case:
    """One expert, one pick, a pick of every expert, or rows of one column: where sums are over one number, or nothing
    is chosen."""
    declared = given.declared
    router = declared.router if isinstance(declared, mo.MoE) else declared
    if not isinstance(router, mo.Router):
        return replace(given, declared=replace(router, **{rng.choice(["hidden", "intermediate"]): 1}))
    few = min(router.num_experts, 8)
    plain: dict[str, Any] = {"groups": None, "groups_kept": None, "zero_experts": 0}
    narrow = rng.choice([{"num_experts": 1, "top_k": 1}, {"top_k": 1}, {"num_experts": few, "top_k": few}])
    router = replace(router, **plain, **narrow)
    if not isinstance(declared, mo.MoE):
        return replace(given, declared=router)
    sizes = {"num_experts": min(declared.experts.num_experts, router.num_experts)}
    sizes |= {name: 1 for name in ("hidden", "intermediate") if rng.random() < 0.3}
    return replace(given, declared=replace(declared, router=router, experts=replace(declared.experts, **sizes)))


# Simpler ones ---------------------------------------------------------------------------------------------------------


def simpler(given: Case) -> Iterator[Case]:
    """Cases with one thing less, the largest steps first. All of them can be declared."""
    declared = given.declared
    if isinstance(declared, mo.MoE):
        yield replace(given, declared=replace(declared.router, outputs=("weights", "indices")))
        yield replace(given, declared=declared.experts, masked=False, shape=(given.tokens,))
    for shape in (
        (1,) * len(given.shape),
        tuple(max(1, n // 2) for n in given.shape),
        tuple(n - 1 for n in given.shape),
    ):
        if min(shape) > 0 and math.prod(shape) < given.tokens:
            yield replace(given, shape=shape)
    for name, value in (
        ("dtype", torch.float32),
        ("masked", False),
        ("ids", "here"),
        ("indices", torch.int32),
        ("weights", torch.float32),
        ("top_k", 1),
    ):
        if getattr(given, name) != value:
            yield replace(given, **{name: value})
    for changed in _simpler(declared):
        if isinstance(changed, mo.Router | mo.MoE) and not _by_sequence(changed):
            yield replace(given, declared=changed, shape=(given.tokens,))
        else:
            yield replace(given, declared=changed)


def _by_sequence(declared: mo.Router | mo.MoE) -> bool:
    router = declared.router if isinstance(declared, mo.MoE) else declared
    return any(getattr(loss, "segments", None) for loss in router.losses.values())


def _simpler(declared: Any) -> Iterator[Any]:
    """The declaration with one field at its default, or smaller, or one of its parts simpler."""
    for field in dataclasses.fields(declared):
        value = getattr(declared, field.name)
        tries: list[Any] = []
        if dataclasses.is_dataclass(value) and field.name in ("router", "experts", "shared"):
            tries += _simpler(value)
        if field.name == "losses":
            tries += [{n: v for n, v in value.items() if n != left_out} for left_out in value]
        elif field.name == "outputs":
            tries += [tuple(v for v in value if v != left_out) for left_out in value[1:]]
        elif isinstance(value, int) and not isinstance(value, bool) and value > 1 and field.name != "align":
            tries += [1, value // 2, value - 1]
        if field.default is not dataclasses.MISSING:
            tries.append(field.default)
        for attempt in tries:
            if attempt is value or attempt == value:
                continue
            changed = {field.name: attempt}
            if field.name == "num_experts" and isinstance(declared, mo.Router):
                changed["top_k"] = min(declared.top_k, attempt)
            if isinstance(declared, mo.MoE) and field.name == "router":
                changed["experts"] = replace(
                    declared.experts, num_experts=min(declared.experts.num_experts, attempt.num_experts)
                )
            try:
                yield replace(declared, **changed)
            except InputError:  # it goes with another field
                continue


def shrunk(given: Case, fails: Callable[[Case], bool], attempts: int = 60) -> Case:
    """The simplest case found that fails as well, after so many attempts."""
    while True:
        for candidate in simpler(given):
            attempts -= 1
            if attempts < 0:
                return given
            if fails(candidate):
                given = candidate
                break
        else:
            return given

"""What a person declares: a router by its arguments, turned into IR.

The grammar, in order: logits (+ gate bias) -> cap -> score over all experts -> selection score (+ selection bias) ->
group filter -> top-k (or picks that are given) -> weight of each pick, from the score without the selection bias ->
division -> scale, constant and per expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from moesaic.ir.attributes import Call
from moesaic.ir.builder import Builder
from moesaic.ir.core import Constant, Module, OpResult, Value, create_one
from moesaic.ir.errors import (
    InputError,
    InputTypeError,
    check_choice,
    check_flag,
    check_identifier,
    check_names,
    check_number,
    is_identifier,
    suggestion,
)
from moesaic.ir.losses import Entropy, LoadBalance, Loss
from moesaic.ir.ops import math, row
from moesaic.ir.types import DType, symbol, tensor

Score = str | Callable[[Value], Value]

OUTPUTS = ("weights", "indices", "counts", "probs", "map", "bitmap", "scores", "score_sums", "logsumexp")

INDICES = {"int16": DType.I16, "int32": DType.I32, "int64": DType.I64}
"""Names of the types that indices can have."""

LOSS_PREFIX = "loss_"
"""Results of the function that are losses, by the names they are declared under."""


def _sqrtsoftplus(x: Value) -> Value:
    return create_one("math.sqrt", create_one("math.softplus", x))


# A score function is an expression over the logits; to add one, compose ops here or pass the function itself.
SCORES: Mapping[str, Callable[[Value], Value]] = {
    "softmax": lambda x: create_one("row.softmax", x),
    "sigmoid": lambda x: create_one("math.sigmoid", x),
    "sqrtsoftplus": _sqrtsoftplus,
}


@dataclass(frozen=True)
class Normalization:
    """w_k / max(sum_j w_j + eps, min); make it with ``norm.sum``."""

    eps: float = 0.0
    min: float = 0.0


@dataclass(frozen=True)
class LpNormalization:
    """w_k / (sum_j |w_j|^p)^(1/p); make it with ``norm.lp``."""

    p: float


class _Norms:
    """Ways to renormalise the weights of the picks."""

    @staticmethod
    def sum(eps: float = 0.0, min: float = 0.0) -> Normalization:
        """w_k / max(sum_j w_j + eps, min); zero weights where the divisor is 0.

        Raises:
            InputError: eps or min is negative or not finite.
        """
        for name, value in (("eps", eps), ("min", min)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise InputError(f"norm.sum: {name} must be a finite number >= 0, found {value!r}")
        return Normalization(eps, min)

    @staticmethod
    def lp(p: float) -> LpNormalization:
        """w_k / (sum_j |w_j|^p)^(1/p), the largest |w_j| for p = inf; zero weights where the divisor is 0.

        Raises:
            InputError: p is below 1.
        """
        if isinstance(p, bool) or not isinstance(p, int | float) or not p >= 1:
            raise InputError(f"norm.lp: p must be a number >= 1, or inf, found {p!r}")
        return LpNormalization(float(p))


norm = _Norms()


def sum_top(n: int) -> Call:
    """Group score: the sum of the n best values of a group.

    Raises:
        InputError: n is not a positive integer.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise InputError(f"sum_top: n must be an integer >= 1, found {n!r}")
    return Call("sum_top", (n,))


@dataclass(frozen=True)
class Router:
    """Which experts a token goes to, and with what weight.

    With x the logits [T, E] in float32 (plus the gate bias, capped), s the score function, b the selection bias::

        score_then_topk:  i = topk(s(x) + b),  w_k = s(x)[i_k]
        topk_then_score:  i = topk(x + b),     w   = s(x[i])
        given:            i is an input, w as above
        weights_k = scale * router_scale * expert_scale[i_k] * w_k / max(sum w + eps, min)      (what is declared of it)

    Selection order is (value descending, index ascending), -0 equal to +0, NaN below -inf. Where the score is strictly
    increasing in the logit and nothing is added to it, picks are ranked on the logits: the same order in exact
    arithmetic, finer where float32 scores saturate. ``rank="score"`` forces ranking on the score.

    Picks that are given may repeat: the same expert twice in a row counts twice, and its weights and gradients add up.
    An id outside [0, E) is "not here": it weighs 0, is counted nowhere, passes no gradient, and comes back as -1.

    Args:
        num_experts: E, without `zero_experts`.
        top_k: K, picks per token, 1 <= K <= E.
        score: ``"softmax"``, ``"sigmoid"``, ``"sqrtsoftplus"``, or a function of an IR value.
        order: ``"score_then_topk"`` or ``"topk_then_score"``.
        selection_bias: input ``bias`` [E] f32, added for selection only; it gets no gradient.
        gate_bias: input ``gate_bias`` [E] f32, added to the logits; it gets a gradient.
        logit_cap: c of c * tanh(x / c), which bounds the logits; ``None`` for no cap.
        groups, groups_kept: only the best `groups_kept` of `groups` equal groups of experts can be picked.
        group_score: ``"max"``, ``"sum_top2"`` or ``sum_top(n)``.
        renormalize: ``True`` (divide by the sum), ``False``, ``norm.sum(eps=, min=)`` or ``norm.lp(p)`` (divide by the
            Lp norm).
        renorm_eps: added to the sum, with ``renormalize=True``.
        scale: constant factor of the weights.
        expert_scale: input ``expert_scale`` [E] f32, a learned factor of each expert's weight; it gets a gradient.
        router_scale: input ``router_scale``, f32, a learned factor of all weights; it gets a gradient.
        outputs: any of ``weights`` [T, K], ``indices`` [T, K], ``counts`` [E] i32, ``probs`` [T, E] in the logits'
            dtype (the weight where picked, else 0), ``map`` [T, E] u8 (1 where picked), ``bitmap`` [T, ceil(E / 8)] u8
            (bit e mod 8 of byte e div 8 is 1 where e is picked), ``scores`` [T, E] f32 (s(x) over all experts, whatever
            is picked), ``score_sums`` [E] f32 (the sum over tokens of s(x) divided by its sum over experts, with
            gradient: what a loss of your own may be made of), ``logsumexp`` [T] f32 (of x over all experts; it has a
            gradient).
        losses: by name, `LoadBalance`, `ZLoss` or `Entropy`; results come as one mapping after the outputs, scalars.
        dtype: of the logits; ``None`` takes it from each call.
        weights_dtype: of ``weights``.
        rank: ``"auto"`` or ``"score"``, see above.
        indices_dtype: of the indices, given or put out: ``"int16"``, ``"int32"`` or ``"int64"``.
        selection: ``"topk"``, or ``"given"``: the picks are the input ``indices`` [T, K], say of a table by token id.
        zero_experts: Z experts more, with ids from `num_experts` on, that return their input. To a router they are
            experts like others: wherever E stands above for a length (of the logits, of counts), it is E + Z.
        shared_experts: S columns more, after the experts, for experts that every token goes to: they are never picked,
            and weights [T, K + S] have theirs after those of the picks, divided with these. Wherever E stands for a
            length, it is E + S; a selection bias is not used there. Losses and ``score_sums`` are about the E that can
            be picked, and so are `update_bias` and `load_metrics`: give them ``bias[:E]`` and ``counts[:E]``.

    Raises:
        InputError: an argument, or a combination of them, that has no meaning.
    """

    num_experts: int
    top_k: int
    score: Score = "softmax"
    order: str = "score_then_topk"
    selection_bias: bool = False
    gate_bias: bool = False
    logit_cap: float | None = None
    groups: int | None = None
    groups_kept: int | None = None
    group_score: str | Call = "sum_top2"
    renormalize: bool | Normalization | LpNormalization = False
    renorm_eps: float = 0.0
    scale: float = 1.0
    expert_scale: bool = False
    router_scale: bool = False
    outputs: tuple[str, ...] = ("weights", "indices", "counts")
    losses: Mapping[str, Loss] = field(default_factory=dict, hash=False)
    dtype: str | None = None
    weights_dtype: str = "fp32"
    rank: str = "auto"
    indices_dtype: str = "int32"
    selection: str = "topk"
    zero_experts: int = 0
    shared_experts: int = 0
    name: str = field(default="route", kw_only=True)

    def __post_init__(self) -> None:
        e, k, z = self.num_experts, self.top_k, self.zero_experts
        if not _is_int(e) or e < 1:
            raise InputError(f"num_experts must be an integer >= 1, found {e!r}")
        if not _is_int(z) or z < 0:
            raise InputError(f"zero_experts must be an integer >= 0, found {z!r}")
        self._check_shared()
        if not _is_int(k) or not 1 <= k <= e + z:
            raise InputError(f"top_k must be an integer between 1 and {self._experts}, found top_k = {k!r}")
        if isinstance(self.score, str):
            check_choice("score", self.score, SCORES)
        elif not callable(self.score):
            raise InputError(f"score must be a name or a function of an IR value, found {self.score!r}")
        check_choice("order", self.order, ("score_then_topk", "topk_then_score"))
        check_choice("rank", self.rank, ("auto", "score"))
        check_choice("selection", self.selection, ("topk", "given"))
        self._check_groups()
        self._check_indices()
        if not isinstance(self.renormalize, bool | Normalization | LpNormalization):
            raise InputError(
                f"renormalize must be True, False, norm.sum(...) or norm.lp(p), found {self.renormalize!r}"
            )
        if self.renorm_eps and self.renormalize is not True:
            raise InputError("renorm_eps goes with renormalize=True; otherwise give eps in norm.sum(eps=...)")
        norm.sum(eps=self.renorm_eps)
        check_number("scale", self.scale)
        if self.logit_cap is not None and not (_is_number(self.logit_cap) and 0 < self.logit_cap < float("inf")):
            raise InputError(f"logit_cap must be a finite number > 0, or None, found {self.logit_cap!r}")
        for flag in ("selection_bias", "gate_bias", "expert_scale", "router_scale"):
            check_flag(flag, getattr(self, flag), "; its values are an input of each call")
        check_identifier("name", self.name)
        object.__setattr__(self, "outputs", check_names("outputs", self.outputs))
        if not self.outputs:
            raise InputError(f"outputs is empty; name at least one of {', '.join(OUTPUTS)}")
        for output in self.outputs:
            check_choice("outputs", output, OUTPUTS)
        if len(set(self.outputs)) != len(self.outputs):
            raise InputError(f"outputs names one twice: {self.outputs}")
        if not isinstance(self.losses, Mapping):
            raise InputError(f"losses must map names to losses, found {self.losses!r}")
        object.__setattr__(self, "losses", dict(self.losses))
        for name, loss in self.losses.items():
            if not is_identifier(name):
                raise InputError(f"losses are named by identifiers of ASCII letters, found {name!r}")
            if not isinstance(loss, Loss):
                raise InputError(f"loss {name!r} must be a LoadBalance, ZLoss or Entropy, found {loss!r}")
        if len({s for s in map(_segments, self.losses.values()) if s}) > 1:
            raise InputError("losses by sequence must agree in the order of tokens: batch_first or sequence_first")
        for field_name in ("dtype", "weights_dtype"):
            value = getattr(self, field_name)
            if value is not None and not DType.parse(value).is_float:
                raise InputError(f"{field_name} must be a float type, found {value}")

    def _check_shared(self) -> None:
        s = self.shared_experts
        if not _is_int(s) or s < 0:
            raise InputError(f"shared_experts must be an integer >= 0, found {s!r}")
        if not s:
            return
        for name, unused in (
            ("groups", None),
            ("zero_experts", 0),
            ("order", "score_then_topk"),
            ("selection", "topk"),
        ):
            if getattr(self, name) != unused:
                raise InputError(
                    f"shared_experts go with {name} = {unused!r}, found {getattr(self, name)!r}; leave one of them out"
                )
        if {"probs", "map", "bitmap"} & set(self.outputs):
            raise InputError("shared_experts have no place in probs, map and bitmap; use weights and indices")

    @property
    def columns(self) -> int:
        """Length of a row of logits: all experts, those that return their input and the shared ones included."""
        return self.num_experts + self.zero_experts + self.shared_experts

    @property
    def _experts(self) -> str:
        """How errors call the number of columns."""
        if not self.zero_experts:
            return f"num_experts = {self.num_experts}"
        return f"num_experts + zero_experts = {self.columns}"

    def _check_indices(self) -> None:
        """The type of the indices, and what goes with picks that are given."""
        object.__setattr__(self, "indices_dtype", str(self.indices_dtype).removeprefix("torch."))
        check_choice("indices_dtype", self.indices_dtype, INDICES)
        if self.indices_dtype == "int16" and self.columns > 2**15 - 1:
            raise InputError(
                f"indices_dtype 'int16' holds ids up to 32767, found {self._experts}; use 'int32' or 'int64'"
            )
        if self.selection == "topk":
            return
        for name, unused in (("selection_bias", False), ("groups", None), ("groups_kept", None), ("rank", "auto")):
            if getattr(self, name) != unused:
                raise InputError(
                    f"{name} = {getattr(self, name)!r} decides which experts are picked, but with selection='given' "
                    "these are an input; leave it out, or use selection='topk'"
                )

    def _check_groups(self) -> None:
        e, k = self.columns, self.top_k
        if (self.groups is None) != (self.groups_kept is None):
            raise InputError("groups and groups_kept go together: give both or neither")
        best = _group_score(self.group_score)
        if self.groups is None or self.groups_kept is None:
            return
        if not _is_int(self.groups) or self.groups < 1 or e % self.groups:
            raise InputError(f"groups must divide {self._experts}, found groups = {self.groups!r}")
        if not _is_int(self.groups_kept) or not 1 <= self.groups_kept <= self.groups:
            raise InputError(
                f"groups_kept must be between 1 and groups = {self.groups}, found groups_kept = {self.groups_kept!r}"
            )
        size = e // self.groups
        if k > self.groups_kept * size:
            raise InputError(
                f"top_k = {k} is more than the {self.groups_kept * size} experts of {self.groups_kept} groups kept "
                f"({e} experts in {self.groups} groups of {size})"
            )
        if best.name == "sum_top" and best.arguments[0] > size:
            raise InputError(
                f"group_score sums the best {best.arguments[0]} of a group, but a group holds {size} experts "
                f"({e} experts in {self.groups} groups); use 'max' or sum_top(n) with n <= {size}"
            )

    @classmethod
    def preset(cls, family: str, /, **overrides: Any) -> Self:
        """The router of a family of open models, with the defaults of its configuration.

        Args:
            family: the name of its folder in `transformers`, such as ``"deepseek_v3"``; `moesaic.ir.presets` has the
                table, what each preset covers, and the families that these arguments do not express.
            overrides: arguments of this class, in place of the family's.

        Raises:
            InputError: an unknown family, or one that ships no sizes and none are given.
            InputTypeError: an override that is no argument of this class.
        """
        from moesaic.ir.presets import PRESETS, WITHOUT  # which imports this module

        if family in WITHOUT:
            raise InputError(f"no arguments of Router express the router of {family!r}: {WITHOUT[family]}")
        if family not in PRESETS:
            raise InputError(
                f"unknown preset {family!r}{suggestion(str(family), PRESETS)}; known: {', '.join(PRESETS)}"
            )
        known = [f.name for f in fields(cls)]
        for name in overrides:
            if name not in known:
                raise InputTypeError(f"preset {family!r}: Router has no argument {name!r}{suggestion(name, known)}")
        arguments = {**PRESETS[family], **overrides}
        if missing := [name for name in ("num_experts", "top_k") if name not in arguments]:
            raise InputError(
                f"preset {family!r} has no default for {' and '.join(missing)}: its configuration has none of use; "
                f"give {', '.join(f'{name}=...' for name in missing)}"
            )
        return cls(**arguments)

    @property
    def normalization(self) -> Normalization | LpNormalization | None:
        """The division of the weights, or ``None``."""
        if isinstance(self.renormalize, Normalization | LpNormalization):
            return self.renormalize
        return Normalization(eps=self.renorm_eps) if self.renormalize else None

    @property
    def segments(self) -> str:
        """The order of tokens, if a loss is taken by sequence; else empty."""
        return next((s for s in map(_segments, self.losses.values()) if s), "")

    def module(self, dtype: DType | str | None = None, *, masked: bool = False) -> Module:
        """The router as IR, for logits of the given dtype (default: the declared one, else float32).

        `masked` adds the input ``token_mask`` [T], i1: tokens where it is false have indices -1, weights 0, and no
        share in counts, losses or gradients.
        """
        b = Builder(self.name)
        logits = b.input("logits", tensor(DType.parse(dtype or self.dtype or "f32"), symbol("T"), self.columns))
        made, _, _ = self.add_to(b, logits, masked=masked)
        return b.build(**{name: made[name] for name in self.result_names})

    @property
    def result_names(self) -> tuple[str, ...]:
        """What the function returns: the outputs, then the losses."""
        return (*self.outputs, *(LOSS_PREFIX + name for name in self.losses))

    def add_to(self, b: Builder, logits: Value, *, masked: bool = False) -> tuple[dict[str, Value], Value, Value]:
        """Adds the router to a function that has the logits [T, E]: its results by name, and the picks [T, K] i32 and
        their weights [T, K] f32. Whatever else was declared becomes an input."""
        return _Declaration(self, b, logits, masked).results()


class _Declaration:
    """A router turned into IR, step by step in the order of the grammar."""

    def __init__(self, router: Router, b: Builder, logits: Value, masked: bool) -> None:
        self.router = router
        self.dtype = logits.type.dtype
        self.b = b
        self.experts = router.columns
        tokens = symbol("T")
        self.raw: Value = logits
        self.mask: Value | None = None
        if masked:
            self.mask = _op(b, "row.unsqueeze", b.input("token_mask", tensor(DType.I1, tokens)))
        self.sequences: Value | None = None
        if router.segments:
            self.sequences = b.input("sequences", tensor(DType.F32, symbol("N"), 0))
        # A masked token takes part with logits of 0, so that whatever it holds stays out of every result.
        kept: Value = self.raw if self.mask is None else math.select(self.mask, self.raw, 0.0)
        self.biased = kept
        if router.gate_bias:
            self.biased = kept + b.input("gate_bias", tensor(DType.F32, self.experts))
        self.logits = self.biased
        if router.logit_cap is not None:
            self.logits = create_one("math.tanh", self.biased / float(router.logit_cap)) * float(router.logit_cap)
            self.logits.name = "capped"
        self.weighed: Value | None = None  # picks and shared experts, where there are some
        # Picks are ranked on what is in memory where they can be: masked tokens have none.
        self.ranked_as = {kept: self.raw}

    def results(self) -> tuple[dict[str, Value], Value, Value]:
        router, b = self.router, self.b
        given = router.selection == "given"
        self.indices, weights = self._given() if given else self._select()
        n = router.normalization
        if isinstance(n, LpNormalization):
            weights = b.op("row.lp_normalize", weights, p=n.p)
        elif n is not None:
            weights = b.op("row.normalize", weights, eps=n.eps or None, min=n.min or None)
        if router.scale != 1.0:
            weights = weights * float(router.scale)
        if router.expert_scale:
            factors = b.input("expert_scale", tensor(DType.F32, self.experts))
            weights = weights * b.op("row.gather", factors, self.weighed or self.indices)
        if router.router_scale:
            weights = weights * b.input("router_scale", tensor(DType.F32))
        # Last, so that a cotangent of a weight that is none reaches nothing, whatever it is.
        self.weights = math.select(_is_away(self.indices), 0.0, weights) if given else self._masked(weights)
        made = {name: self._output(name) for name in router.outputs}
        made |= {LOSS_PREFIX + name: self._loss(loss) for name, loss in router.losses.items()}
        return made, self.indices, self.weights

    def _given(self) -> tuple[Value, Value]:
        """(indices, weights before the division) of picks that are an input; weights are 0 where they are not here."""
        router, b = self.router, self.b
        ids = b.input("indices", tensor(INDICES[router.indices_dtype], symbol("T"), router.top_k))
        among = () if self.mask is None else (self.mask,)
        indices = _op(b, "row.given", ids, *among, size=self.experts)
        if router.order == "score_then_topk":
            return indices, _op(b, "row.gather", self.scores, indices, named="picked_scores")
        picked = math.select(_is_away(indices), float("-inf"), b.op("row.gather", self.logits, indices))
        return indices, math.select(_is_away(indices), 0.0, self._score(picked))

    def _select(self) -> tuple[Value, Value]:
        """(indices, weights before the division)."""
        router, b = self.router, self.b
        bias = b.input("bias", tensor(DType.F32, self.experts)) if router.selection_bias else None
        if router.order == "topk_then_score":
            selection = self.logits if bias is None else self.logits + bias
            values, indices = self._topk(selection, selection)
            picked = values if bias is None else b.op("row.gather", self.logits, indices)
            return indices, self._score(picked)
        scores = self.scores
        selection = scores
        if bias is not None:
            selection = scores + bias
            selection.name = "selection"
        monotone = bias is None and router.rank == "auto" and _increasing(scores, self.biased)
        _, indices = self._topk(self.biased if monotone else selection, selection)
        if router.shared_experts:
            self.weighed = b.op("row.append", indices, first=router.num_experts, count=router.shared_experts)
        return indices, b.op("row.gather", scores, self.weighed or indices, named="picked_scores")

    def _topk(self, ranked: Value, selection: Value) -> tuple[Value, Value]:
        """The K best by `ranked`, among the groups that are best by `selection`."""
        router, b = self.router, self.b
        allowed: Value | None = None
        if router.groups is not None and router.groups_kept is not None:
            score = _group_score(router.group_score)
            allowed = b.op(
                "row.group_limit",
                selection,
                groups=router.groups,
                keep=router.groups_kept,
                score=score if score.arguments else score.name,
                named="allowed",
            )
        return self._topk_among(ranked, allowed)

    def _topk_among(self, ranked: Value, allowed: Value | None) -> tuple[Value, Value]:
        """The K best of a token that counts, among those that are allowed and can be picked."""
        for also in (self.routed, self.mask):
            if also is not None:
                allowed = also if allowed is None else create_one("math.and", also, allowed)
        among = () if allowed is None else (allowed,)
        values, indices = self.b.op("row.topk", self.ranked_as.get(ranked, ranked), *among, k=self.router.top_k)
        return values, indices

    def _score(self, x: Value) -> Value:
        score = self.router.score
        function = SCORES[score] if isinstance(score, str) else score
        scores = function(x)
        if not isinstance(scores, Value):
            raise InputError(f"score must return an IR value, found {type(scores).__name__} {scores!r}")
        if scores.type.shape != x.type.shape:
            raise InputError(f"score must keep the shape {x.type}, found {scores.type}")
        if isinstance(scores, OpResult):
            scores.name = "scores"
        return scores

    @functools.cached_property
    def scores(self) -> Value:
        """s(x) over all experts."""
        return self._score(self.logits)

    @functools.cached_property
    def routed(self) -> Value | None:
        """Which columns can be picked, where there are shared experts besides."""
        if not self.router.shared_experts:
            return None
        return _op(self.b, "row.first", self.logits, n=self.router.num_experts)

    @functools.cached_property
    def logsumexp(self) -> Value:
        return _op(self.b, "row.logsumexp", self.logits)

    def _masked(self, rows: Value) -> Value:
        """Rows that are 0 for masked tokens."""
        return rows if self.mask is None else math.select(self.mask, rows, 0.0)

    def _output(self, name: str) -> Value:
        b = self.b
        if name == "scores":
            return self._masked(self.scores)
        if name == "score_sums":
            return _op(b, "col.sum", self.normalized)
        if name == "weights":
            target = DType.parse(self.router.weights_dtype)
            if self.weights.type.dtype is target:
                return self.weights
            return _op(b, "math.cast", self.weights, dtype=target.value)
        if name == "indices":
            target = INDICES[self.router.indices_dtype]
            return self.indices if target is DType.I32 else _op(b, "math.cast", self.indices, dtype=target.value)
        if name == "counts":
            return _op(b, "col.count", self.indices, size=self.experts)
        if name in ("map", "bitmap"):
            return _op(b, "row.membership" if name == "map" else "row.bitmap", self.indices, size=self.experts)
        if name == "logsumexp":
            return _op(b, "row.squeeze", self._masked(self.logsumexp))
        probs = _op(b, "row.scatter", self.weights, self.indices, size=self.experts)
        return probs if self.dtype is DType.F32 else _op(b, "math.cast", probs, dtype=self.dtype.value)

    # ---------------------------------------------------------------------------------------------------- losses

    @functools.cached_property
    def normalized(self) -> Value:
        """Scores over all experts that can be picked, divided by their sum; 0 elsewhere, and for masked tokens."""
        scores = self.scores
        if isinstance(scores, OpResult) and isinstance(scores.op, row.Softmax):
            return self._masked(scores if self.routed is None else self._softmax_of_routed())
        if self.routed is not None:
            scores = math.select(self.routed, scores, 0.0)
        return self._masked(_op(self.b, "row.normalize", scores))

    def _softmax_of_routed(self) -> Value:
        """The softmax over the experts that can be picked, however large the logits of others are."""
        among = self.logits if self.routed is None else math.select(self.routed, self.logits, float("-inf"))
        return create_one("row.softmax", among)

    def _loss(self, loss: Loss) -> Value:
        if isinstance(loss, LoadBalance):
            return self._load_balance(loss)
        if isinstance(loss, Entropy):
            return _op(self.b, "moe.entropy_loss", self.normalized, self.tokens, coef=float(loss.coef))
        return _op(self.b, "moe.z_loss", self._masked(self.logsumexp), self.tokens, coef=float(loss.coef))

    def _load_balance(self, loss: LoadBalance) -> Value:
        b, k = self.b, self.router.top_k
        scores, indices = self.normalized, self.indices
        if loss.convention == "transformers":
            scores = self._masked(self._softmax_of_routed())
            _, indices = self._topk_among(self.biased, None)
        by: tuple[Value, ...] = ()
        if loss.segments is not None:
            assert self.sequences is not None
            by = (self.sequences,)
        counts = _op(b, "col.count", indices, *by, size=self.experts, segments=loss.segments)
        if loss.num_tokens == "given":
            known = [a for a in b.function.arguments if a.name == "num_tokens"]
            tokens: Value = known[0] if known else b.input("num_tokens", tensor(DType.F32))
        else:
            tokens = self.tokens_by_sequence if by else self.tokens
        coef = float(loss.coef)
        if self.routed is not None:  # the op's factor E is the number of columns
            coef *= self.router.num_experts / self.experts
        return _op(
            b,
            "moe.load_balance_loss",
            scores,
            counts,
            tokens,
            *by,
            coef=coef,
            top_k=1 if loss.convention == "transformers" else k,
            segments=loss.segments,
        )

    @functools.cached_property
    def tokens(self) -> Value:
        """How many tokens count."""
        if self.mask is None:
            return _op(self.b, "col.rows", self.raw)
        return _op(self.b, "col.total", _op(self.b, "col.sum", math.select(self.mask, 1.0, 0.0)))

    @functools.cached_property
    def tokens_by_sequence(self) -> Value:
        """How many of each sequence count: [N, 1], or a scalar where all are as long."""
        assert self.sequences is not None
        if self.mask is None:
            return _op(self.b, "col.rows", self.raw) / _op(self.b, "col.rows", self.sequences)
        counting = math.select(self.mask, 1.0, 0.0)
        return _op(self.b, "col.sum", counting, self.sequences, segments=self.router.segments)


def _op(b: Builder, name: str, *operands: Value, **attributes: Any) -> Value:
    value: Value = b.op(name, *operands, **attributes)
    return value


def _is_away(indices: Value) -> Value:
    """Where given picks are not here."""
    return create_one("math.less", indices, 0.0)


def _segments(loss: Loss) -> str:
    return (loss.segments or "") if isinstance(loss, LoadBalance) else ""


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _group_score(value: str | Call) -> Call:
    if isinstance(value, Call):
        return value
    if not isinstance(value, str):
        raise InputError(f"group_score must be 'max', 'sum_top2' or sum_top(n), found {value!r}")
    if value == "max":
        return Call("max")
    digits = value.removeprefix("sum_top")
    if value.startswith("sum_top") and digits.isascii() and digits.isdigit():
        return sum_top(int(digits))
    raise InputError(f"unknown group_score {value!r}{suggestion(value, ['max', 'sum_top2'])}; use 'max' or sum_top(n)")


def _increasing(scores: Value, logits: Value) -> bool:
    """Whether the scores are a chain of strictly increasing ops over the logits, each where it is defined."""
    value = scores
    while value is not logits:
        if not isinstance(value, OpResult):
            return False
        op, operand = value.op, value.op.operands[0]
        if op.name in ("math.mul", "math.div"):
            factor = op.operands[1]
            if not isinstance(factor, Constant) or not 0 < factor.value < float("inf"):
                return False
        elif len(op.operands) != 1 or not getattr(op, "strictly_increasing", False):
            return False
        if getattr(op, "needs_positive", False):
            made_by = operand.op if isinstance(operand, OpResult) else None
            if not getattr(made_by, "gives_positive", False):
                return False
        value = operand
    return True

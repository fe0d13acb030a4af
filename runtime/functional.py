"""Losses, and what keeps loads even, on tensors that a user already has.

What goes over the rows is a compiled layer of its own, made from its static arguments at the first call and kept. What
is done with a handful of numbers per expert is plain torch. Nothing here synchronises with the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from moesaic.ir.builder import Builder
from moesaic.ir.core import Value, create_one
from moesaic.ir.declare import SCORES, Router, Score
from moesaic.ir.errors import InputError, InputTypeError, check_number
from moesaic.ir.losses import CONVENTIONS, ORDERS
from moesaic.ir.ops import math
from moesaic.ir.types import DType, symbol, tensor
from moesaic.runtime.compile import compile
from moesaic.runtime.inputs import as_number
from moesaic.runtime.layer import CompiledLayer
from moesaic.runtime.made_once import made_once
from moesaic.runtime.reference import FLOATS

"""Types that rows can have."""


def check_rows(name: str, rows: object) -> int:
    """E of a tensor [..., E] of floats.

    Raises:
        InputTypeError: it is no tensor.
        InputError: its type or shape does not fit.
    """
    if not isinstance(rows, torch.Tensor):
        raise InputTypeError(f"{name} must be a tensor, found {type(rows).__name__}")
    if rows.dtype not in FLOATS:
        raise InputError(f"{name} must be bf16, fp16, fp32 or fp64, found {str(rows.dtype).removeprefix('torch.')}")
    if rows.dim() == 0 or rows.shape[-1] == 0:
        raise InputError(f"{name} must have shape [..., E] with E >= 1, found {list(rows.shape)}")
    return rows.shape[-1]


def backend_for(dtype: torch.dtype, asked: str = "auto") -> str:
    """float64 runs on the reference, whatever the environment says, unless a call names a backend."""
    return "reference" if asked == "auto" and dtype == torch.float64 else asked


def as_counts(name: str, counts: object, rows: torch.Tensor) -> torch.Tensor:
    """Counts of any type of numbers, as int32, or as float32 (float64 beside float64 rows) where they may not fit.

    Raises:
        InputTypeError: they are no tensor.
        InputError: they are no numbers.
    """
    if not isinstance(counts, torch.Tensor):
        raise InputTypeError(f"{name} must be a tensor, found {type(counts).__name__}")
    if counts.dtype == torch.bool or counts.dtype.is_complex:
        raise InputError(f"{name} must be integers or floats, found {str(counts.dtype).removeprefix('torch.')}")
    if counts.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        return counts.int()
    return counts.detach().to(torch.float64 if rows.dtype == torch.float64 else torch.float32)


def normalized(score: Score, eps: float = 0.0) -> Score:
    """A score divided by its sum over all experts plus `eps`; the softmax as it is."""
    if score == "softmax":
        return score
    function = SCORES.get(score) if isinstance(score, str) else score
    if function is None:
        return score  # which the router refuses, with the names it knows

    def divided(x: Value) -> Value:
        return create_one("row.normalize", function(x), eps=eps or None)

    return divided


# Scores ---------------------------------------------------------------------------------------------------------------


def scores(
    logits: torch.Tensor, score: Score = "softmax", *, normalize: bool = False, backend: str = "auto"
) -> torch.Tensor:
    """Scores over all experts, [..., E] float32 (float64 for float64 logits), with gradient.

    Args:
        logits: [..., E], bf16, fp16, fp32 or fp64.
        score: ``"softmax"``, ``"sigmoid"``, ``"sqrtsoftplus"``, or a function of an IR value.
        normalize: divide by the sum over the experts, so that rows sum to 1; a row whose sum is 0 is 0.
        backend: as in ``moesaic.compile``.

    Raises:
        InputError, InputTypeError: an argument that does not fit.
    """
    experts = check_rows("logits", logits)
    layer = _scores_layer(experts, score, normalize, backend_for(logits.dtype, backend))
    found: torch.Tensor = layer(logits).scores
    return found


@made_once
def _scores_layer(experts: int, score: Score, normalize: bool, backend: str) -> CompiledLayer:
    wanted = normalized(score) if normalize else score
    return compile(Router(experts, 1, score=wanted, outputs=("scores",), name="scores"), backend=backend)


# Losses ---------------------------------------------------------------------------------------------------------------


def load_balance_loss(
    scores: torch.Tensor,
    counts: torch.Tensor,
    *,
    top_k: int,
    coef: float = 1.0,
    num_tokens: int | torch.Tensor | None = None,
    token_mask: torch.Tensor | None = None,
    segments: str | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """coef * E / (K n^2) * sum_e c_e sum_t s_{t,e}, the loss of ``LoadBalance``; a scalar, float32 (float64 for
    float64 scores). 0 where no token counts. Its gradient is that of the scores; counts have none.

    Args:
        scores: [..., E], bf16, fp16, fp32 or fp64, rows that sum to 1; `moesaic.scores` makes them.
        counts: picks of each expert, [E], or [N, E] with `segments`; integers or floats.
        top_k: K, picks per token.
        coef: the factor. It is compiled in: where it follows a schedule, multiply the loss instead.
        num_tokens: n, where it is not the number of rows: an int, or a scalar tensor on the device.
        token_mask: bool, the shape of the scores without experts: where it is false, a row counts nowhere. It says
            nothing about `counts`, which must leave such tokens out.
        segments: ``"batch_first"`` (scores [N, S, E]) or ``"sequence_first"`` ([S, N, E]): the mean over the N
            sequences of the loss of each.
        backend: as in ``moesaic.compile``.

    Raises:
        InputError, InputTypeError: an argument that does not fit.
    """
    experts = check_rows("scores", scores)
    counts = as_counts("counts", counts, scores)
    inputs: dict[str, Any] = {"counts": counts}
    if token_mask is not None:
        inputs["token_mask"] = token_mask
    if num_tokens is not None:
        inputs["num_tokens"] = num_tokens
    layer = _load_balance_layer(
        FLOATS[scores.dtype].value,
        experts,
        counts.dtype == torch.int32,
        top_k,
        coef,
        num_tokens is not None,
        token_mask is not None,
        segments,
        backend_for(scores.dtype, backend),
    )
    loss: torch.Tensor = layer(scores, **inputs).loss
    return loss


@made_once
def _load_balance_layer(
    dtype: str,
    experts: int,
    integers: bool,
    top_k: int,
    coef: float,
    given: bool,
    masked: bool,
    segments: str | None,
    backend: str,
) -> CompiledLayer:
    check_number("load_balance_loss: coef", coef)
    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
        raise InputError(f"load_balance_loss: top_k must be an integer >= 1, found {top_k!r}")
    if segments not in (None, *ORDERS):
        raise InputError(
            f"load_balance_loss: segments must be None, {' or '.join(map(repr, ORDERS))}, found {segments!r}"
        )
    if segments and given:
        raise InputError("load_balance_loss by sequence counts the tokens of each sequence; leave out num_tokens")
    loss = _Loss("load_balance_loss", "scores", dtype, experts, masked)
    b = loss.builder
    shape = (symbol("N"), experts) if segments else (experts,)
    counts = b.input("counts", tensor(DType.I32 if integers else DType.F32, *shape))
    by = (counts,) if segments else ()
    if given:
        number: Value = b.input("num_tokens", tensor(DType.F32))
    elif not segments:
        number = loss.tokens
    elif loss.mask is None:
        number = b.op("col.rows", loss.rows) / b.op("col.rows", counts)
    else:
        number = b.op("col.sum", math.select(loss.mask, 1.0, 0.0), counts, segments=segments)
    value = b.op(
        "moe.load_balance_loss", loss.rows, counts, number, *by, coef=float(coef), top_k=top_k, segments=segments
    )
    return compile(b.build(loss=value), backend=backend)


def z_loss(
    logits: torch.Tensor, *, coef: float = 1.0, token_mask: torch.Tensor | None = None, backend: str = "auto"
) -> torch.Tensor:
    """coef / n * sum_t (log sum_e exp x_{t,e})^2 over the n tokens that count; a scalar, float32 (float64 for float64
    logits), with gradient. 0 where no token counts.

    Args:
        logits: [..., E], bf16, fp16, fp32 or fp64.
        coef: the factor. It is compiled in: where it follows a schedule, multiply the loss instead.
        token_mask: bool, the shape of the logits without experts: where it is false, a token does not count.
        backend: as in ``moesaic.compile``.

    Raises:
        InputError, InputTypeError: an argument that does not fit.
    """
    return _mean_over_tokens("z_loss", "logits", logits, coef, token_mask, backend)


def entropy_loss(
    scores: torch.Tensor, *, coef: float = 1.0, token_mask: torch.Tensor | None = None, backend: str = "auto"
) -> torch.Tensor:
    """-coef / n * sum_t sum_e s_{t,e} ln s_{t,e} over the n tokens that count; a scalar, float32 (float64 for float64
    scores), with gradient. 0 where no token counts; coef < 0 favours even scores.

    Args:
        scores: [..., E], bf16, fp16, fp32 or fp64, rows that sum to 1; `moesaic.scores` makes them.
        coef, token_mask, backend: as in `z_loss`.

    Raises:
        InputError, InputTypeError: an argument that does not fit.
    """
    return _mean_over_tokens("entropy_loss", "scores", scores, coef, token_mask, backend)


def _mean_over_tokens(
    name: str, operand: str, rows: torch.Tensor, coef: float, token_mask: torch.Tensor | None, backend: str
) -> torch.Tensor:
    experts = check_rows(operand, rows)
    masked = token_mask is not None
    dtype = FLOATS[rows.dtype].value
    layer = _mean_layer(name, operand, dtype, experts, coef, masked, backend_for(rows.dtype, backend))
    loss: torch.Tensor = (layer(rows) if token_mask is None else layer(rows, token_mask=token_mask)).loss
    return loss


@made_once
def _mean_layer(
    name: str, operand: str, dtype: str, experts: int, coef: float, masked: bool, backend: str
) -> CompiledLayer:
    check_number(f"{name}: coef", coef)
    loss = _Loss(name, operand, dtype, experts, masked)
    b, per_token = loss.builder, loss.rows
    if name == "z_loss":
        per_token = b.op("row.logsumexp", per_token)
        if loss.mask is not None:
            per_token = math.select(loss.mask, per_token, 0.0)
    return compile(b.build(loss=b.op(f"moe.{name}", per_token, loss.tokens, coef=float(coef))), backend=backend)


class _Loss:
    """What the functions of losses have in common.

    Attributes:
        rows: of the tokens; 0 where a token is masked, so that whatever it holds stays out of the loss.
        mask: [T, 1], or None.
        tokens: how many count.
    """

    def __init__(self, name: str, operand: str, dtype: str, experts: int, masked: bool) -> None:
        self.builder = b = Builder(name)
        self.rows: Value = b.input(operand, tensor(DType(dtype), symbol("T"), experts))
        self.mask: Value | None = None
        if masked:
            self.mask = b.op("row.unsqueeze", b.input("token_mask", tensor(DType.I1, symbol("T"))))
            self.rows = math.select(self.mask, self.rows, 0.0)

    @property
    def tokens(self) -> Value:
        b = self.builder
        value: Value
        if self.mask is None:
            value = b.op("col.rows", self.rows)
        else:
            value = b.op("col.total", b.op("col.sum", math.select(self.mask, 1.0, 0.0)))
        return value


def pooled_load_balance(
    score_sums: torch.Tensor | Iterable[torch.Tensor],
    counts: torch.Tensor | Iterable[torch.Tensor],
    num_tokens: int | torch.Tensor | Sequence[int | torch.Tensor],
    *,
    top_k: int,
    coef: float = 1.0,
    convention: str = "moesaic",
) -> torch.Tensor:
    """One load-balancing loss over all layers, whose sums are pooled before they are multiplied; a scalar.

    With S and c the sums over the layers of `score_sums` and `counts`, and n that of their tokens::

        moesaic:       coef * E / (K n^2) * sum_e c_e S_e
        transformers:  coef * E / n^2     * sum_e c_e S_e      (K times as much)

    With scores that are a softmax, and counts of the K best of them, the second is `load_balancing_loss_func` there.
    0 where no token counts.

    Args:
        score_sums: [E] of each layer, as a list or stacked [L, E]: the router's output of that name. It has a gradient.
        counts: likewise, integers or floats.
        num_tokens: tokens that count in every layer, or in each, if there is one for each; ints, or tensors on the
            device.
        top_k: K, picks per token.
        coef: the factor.
        convention: ``"moesaic"`` or ``"transformers"``.

    Raises:
        InputError, InputTypeError: an argument that does not fit.
    """
    if convention not in CONVENTIONS:
        known = " or ".join(map(repr, CONVENTIONS))
        raise InputError(f"pooled_load_balance: convention must be {known}, found {convention!r}")
    check_number("pooled_load_balance: coef", coef)
    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
        raise InputError(f"pooled_load_balance: top_k must be an integer >= 1, found {top_k!r}")
    sums, picks = _stacked("score_sums", score_sums), _stacked("counts", counts)
    if sums.shape != picks.shape:
        raise InputError(
            f"score_sums and counts must have the same shape, found {list(sums.shape)} and {list(picks.shape)}"
        )
    layers, experts = sums.shape
    dtype = torch.float64 if sums.dtype == torch.float64 else torch.float32
    n = _pooled_tokens(num_tokens, layers, sums)
    share = (sums.to(dtype).sum(0) * picks.to(dtype).sum(0)).sum()
    none = n == 0
    divisor = torch.where(none, 1.0, n)
    factor = coef * experts / (1 if convention == "transformers" else top_k)
    return torch.where(none, 0.0, factor * share / divisor / divisor)


def _stacked(name: str, given: torch.Tensor | Iterable[torch.Tensor]) -> torch.Tensor:
    """[L, E] of a tensor [E] or [L, E], or of a sequence of [E]."""
    if not isinstance(given, torch.Tensor):
        given = _tensors(name, given)
        shapes = [list(t.shape) for t in given]
        if not shapes or any(s != shapes[0] or len(s) != 1 for s in shapes):
            raise InputError(f"{name} must be one tensor [E] for each layer, all of one E, found shapes {shapes}")
        given = torch.stack(given)
    if given.dim() not in (1, 2):
        raise InputError(f"{name} must have shape [E] or [L, E], found {list(given.shape)}")
    return given if given.dim() == 2 else given.unsqueeze(0)


def _tensors(name: str, given: object) -> list[torch.Tensor]:
    """A tensor, or several of them, as a list.

    Raises:
        InputTypeError: it is neither.
    """
    found = [given] if isinstance(given, torch.Tensor) else [*given] if isinstance(given, Iterable) else [given]
    if not all(isinstance(t, torch.Tensor) for t in found):
        raise InputTypeError(f"{name} must be a tensor, or one for each layer, found {type(given).__name__}")
    return found


def _pooled_tokens(
    given: int | torch.Tensor | Sequence[int | torch.Tensor], layers: int, like: torch.Tensor
) -> torch.Tensor:
    """The number of tokens of all layers together, as a scalar on the device."""
    if isinstance(given, torch.Tensor) and given.dim() == 1 and given.numel() == layers:
        return as_number("num_tokens", given.sum(), like)
    if isinstance(given, torch.Tensor) or not isinstance(given, Sequence):
        return as_number("num_tokens", given, like) * layers
    if len(given) != layers:
        raise InputError(f"num_tokens must be one number, or one for each of {layers} layers, found {len(given)}")
    return torch.stack([as_number("num_tokens", n, like) for n in given]).sum()


# Balancing without a loss ---------------------------------------------------------------------------------------------


def update_bias(
    bias: torch.Tensor | Iterable[torch.Tensor], counts: torch.Tensor | Iterable[torch.Tensor], rate: float
) -> None:
    """Moves selection biases towards even loads, in place: of each layer ::

        step = rate * sign(mean(counts) - counts)
        bias += step - mean(step)

    so that the mean of a bias stays. The number of launches depends on how many different E there are, not on the
    number of layers.

    Args:
        bias: float32 [E], stacked [L, E], or a list of [E] whose E may differ.
        counts: of the picks since the last update, in the form of `bias`; integers or floats.
        rate: how far a bias moves, 1e-3 in DeepSeek-V3.

    Raises:
        InputTypeError: a bias or counts are no tensor.
        InputError: shapes or devices differ, or a bias is not float32.
    """
    check_number("update_bias: rate", rate)
    biases, loads = _tensors("update_bias: bias", bias), _tensors("update_bias: counts", counts)
    if len(biases) != len(loads):
        raise InputError(f"update_bias: found {len(biases)} biases and counts of {len(loads)} layers")
    for number, (b, c) in enumerate(zip(biases, loads, strict=True)):
        where = "" if isinstance(bias, torch.Tensor) else f" of layer {number}"
        if b.dtype != torch.float32:
            raise InputError(
                f"update_bias: bias{where} must be fp32, found {str(b.dtype).removeprefix('torch.')}, which would lose "
                "steps as small as the rate; keep the bias in float32"
            )
        if b.shape != c.shape or b.device != c.device:
            raise InputError(
                f"update_bias: bias{where} has shape {list(b.shape)} on {b.device}, but its counts have shape "
                f"{list(c.shape)} on {c.device}"
            )
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[int]] = {}
    for number, c in enumerate(loads):
        alike.setdefault((c.shape, c.dtype, c.device), []).append(number)
    with torch.no_grad():
        for members in alike.values():
            load = torch.stack([loads[i] for i in members]).double()
            step = rate * torch.sign(load.mean(-1, keepdim=True) - load)  # float64: a mean of equal counts equals them
            step = (step - step.mean(-1, keepdim=True)).float()
            torch._foreach_add_([biases[i] for i in members], list(step.unbind(0)))


class LoadMetrics(NamedTuple):
    """How even a load is, for each layer: tensors of the shape of the counts without experts.

    Attributes:
        max: picks of the expert that has most, float32.
        mean: picks of an expert on average, float32.
        max_over_mean: 1 where all have as many; 0 without a pick.
        entropy: of the distribution of picks over experts, in nats: ln E where all have as many; 0 without a pick.
        dropped: num_tokens * top_k less the picks that were counted, or None where these were not given.
    """

    max: torch.Tensor
    mean: torch.Tensor
    max_over_mean: torch.Tensor
    entropy: torch.Tensor
    dropped: torch.Tensor | None


def load_metrics(
    counts: torch.Tensor, *, num_tokens: int | torch.Tensor | None = None, top_k: int | None = None
) -> LoadMetrics:
    """How even a load is, as tensors on the device, without a synchronisation.

    Args:
        counts: picks of each expert, [E], or [L, E] of L layers; integers or floats.
        num_tokens: tokens routed in every layer: an int, or a tensor on the device (of one element, or [L]).
        top_k: K, picks per token.

    Raises:
        InputTypeError: counts are no tensor.
        InputError: one of `num_tokens` and `top_k` without the other, or as many of them as there are no layers.
    """
    if not isinstance(counts, torch.Tensor):
        raise InputTypeError(f"load_metrics: counts must be a tensor, found {type(counts).__name__}")
    if counts.dim() not in (1, 2):
        raise InputError(f"load_metrics: counts must have shape [E] or [L, E], found {list(counts.shape)}")
    if isinstance(num_tokens, torch.Tensor) and num_tokens.numel() != 1 and num_tokens.shape != counts.shape[:-1]:
        raise InputError(
            f"load_metrics: num_tokens must be one number, or one for each layer of counts {list(counts.shape)}, found "
            f"{list(num_tokens.shape)}"
        )
    if (num_tokens is None) != (top_k is None):
        raise InputError("load_metrics: num_tokens and top_k go together: give both or neither")
    load = counts.float()
    total, largest, mean = load.sum(-1), load.amax(-1), load.mean(-1)
    some = total > 0
    share = load / torch.where(some, total, 1.0).unsqueeze(-1)
    return LoadMetrics(
        max=largest,
        mean=mean,
        max_over_mean=torch.where(some, largest / torch.where(some, mean, 1.0), 0.0),
        entropy=torch.special.entr(share).sum(-1),
        dropped=None if num_tokens is None or top_k is None else num_tokens * top_k - counts.sum(-1),
    )

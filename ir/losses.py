"""The auxiliary losses that a router declares. Their equations are those of the ops in ``ir/ops/moe.py``."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.ir.errors import InputError, check_number, suggestion

CONVENTIONS = ("moesaic", "transformers")
ORDERS = ("batch_first", "sequence_first")


@dataclass(frozen=True)
class LoadBalance:
    """coef * E / (K n^2) * sum_e c_e sum_t s_{t,e}, with counts c of the picks and scores s over all experts.

    Scores are those of the capped, biased logits without the selection bias, divided by their sum; n is the number of
    tokens that count. Even routing gives coef.

    Args:
        coef: the factor.
        segments: ``"batch_first"`` (logits [N, S, E]) or ``"sequence_first"`` ([S, N, E]): the mean over the N
            sequences of the loss of each. ``None``: one loss over all tokens.
        convention: ``"transformers"`` does what `load_balancing_loss_func` there does with one layer's logits: scores
            are the softmax, counts those of the K best scores whatever the router picks, and not divided by K (even
            routing gives K * coef). To pool layers, see ``moesaic.pooled_load_balance``.
        num_tokens: ``"given"`` makes n the input `num_tokens` (a scalar tensor on the device, or an int), where tokens
            of other ranks count, too: then the sum of the ranks' losses is that of one rank, if counts are local.

    Raises:
        InputError: an argument that has no meaning, or a combination.
    """

    coef: float = 1.0
    segments: str | None = None
    convention: str = "moesaic"
    num_tokens: str = "local"

    def __post_init__(self) -> None:
        check_number("LoadBalance: coef", self.coef)
        _choice("LoadBalance: segments", self.segments, (None, *ORDERS))
        _choice("LoadBalance: convention", self.convention, CONVENTIONS)
        _choice("LoadBalance: num_tokens", self.num_tokens, ("local", "given"))
        if self.segments and (self.convention == "transformers" or self.num_tokens == "given"):
            raise InputError(
                "LoadBalance by sequence counts the tokens of each sequence, in the convention of moesaic; leave out "
                "convention and num_tokens, or segments"
            )


@dataclass(frozen=True)
class ZLoss:
    """coef / n * sum_t (log sum_e exp x_{t,e})^2 over the capped, biased logits x of the n tokens that count.

    Raises:
        InputError: coef is not a finite number.
    """

    coef: float = 1.0

    def __post_init__(self) -> None:
        check_number("ZLoss: coef", self.coef)


@dataclass(frozen=True)
class Entropy:
    """-coef / n * sum_t sum_e s_{t,e} ln s_{t,e} over the scores as in `LoadBalance`; coef < 0 favours even scores.

    Raises:
        InputError: coef is not a finite number.
    """

    coef: float = 1.0

    def __post_init__(self) -> None:
        check_number("Entropy: coef", self.coef)


Loss = LoadBalance | ZLoss | Entropy


def _choice(what: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        names = [k for k in known if isinstance(k, str)]
        raise InputError(
            f"unknown {what} {value!r}{suggestion(str(value), names)}; known: {', '.join(map(repr, known))}"
        )

"""Buckets of T: calls of one bucket run the same kernels, so that a layer is compiled a bounded number of times.

The edges follow from the largest T that is *few* (4096 on a GPU): a sixteenth of it, itself, and four times it. The
rule of ``specialize`` knows the fewest, few and many; what was tuned may differ in each bucket.
"""

from __future__ import annotations

FEW_TOKENS = 4096
"""Up to so many tokens are few, on a GPU."""

COUNT = 4
"""How many there are."""


def edges(few_tokens: int) -> tuple[int, int, int]:
    """The largest T of each bucket but the last."""
    return few_tokens // 16, few_tokens, 4 * few_tokens


def number_of(tokens: int, few_tokens: int) -> int:
    """The bucket of T: 0 to 3."""
    if tokens <= few_tokens:
        return 0 if tokens <= few_tokens // 16 else 1
    return 2 if tokens <= 4 * few_tokens else 3


def rule(bucket: int) -> str:
    """What the rule calls a bucket: ``fewest``, ``few`` or ``many``."""
    return ("fewest", "few")[bucket] if bucket < 2 else "many"


def label(bucket: int, few_tokens: int) -> str:
    """A bucket for people and for tables, such as ``<=4096``."""
    known = edges(few_tokens)
    return f"<={known[bucket]}" if bucket < len(known) else f">{known[-1]}"


def in_range(low: int, high: int, few_tokens: int) -> tuple[int, ...]:
    """A number of tokens for each bucket that a range meets: the largest of the bucket that is in the range."""
    ends = [min(edge, high) for edge in (*edges(few_tokens), high)]
    return tuple(dict.fromkeys(tokens for tokens in ends if tokens >= low))

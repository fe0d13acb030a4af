"""The layers behind ``moesaic.te``: its arguments, checked and turned into what moesaic declares."""

from __future__ import annotations

from typing import Any

import torch

from moesaic.ir.builder import Builder
from moesaic.ir.declare import SCORES, Router, sum_top
from moesaic.ir.errors import InputError, check_number, suggestion
from moesaic.ir.ops import math
from moesaic.ir.types import DType, symbol, tensor
from moesaic.runtime.compile import compile
from moesaic.runtime.functional import backend_for, normalized
from moesaic.runtime.layer import CompiledLayer
from moesaic.runtime.made_once import made_once
from moesaic.runtime.reference import TORCH_DTYPES
from moesaic.runtime.traced import constant

EPSILON = 1e-20
"""Transformer Engine's, added to the sums that scores are divided by."""

FORMATS = ("bytemap", "bitmap_u8")
"""Of a routing map, by the numbers they have in Transformer Engine."""

INDEX_DTYPES = {torch.int16: "int16", torch.int32: "int32", torch.int64: "int64"}


@constant
def map_output(routing_map_format: object) -> str:
    """The router's output that a map format stands for: ``map`` or ``bitmap``.

    Raises:
        InputError: an unknown format.
    """
    known = isinstance(routing_map_format, int | str) and not isinstance(routing_map_format, bool)
    for number, name in enumerate(FORMATS):
        if known and routing_map_format in (number, name):
            return ("map", "bitmap")[number]
    raise InputError(
        f"routing_map_format must be RoutingMapFormat.BYTEMAP or BITMAP_U8, 0 or 1, 'bytemap' or 'bitmap_u8', found "
        f"{routing_map_format!r}"
    )


@made_once
def topk_layer(
    dtype: str,
    experts: int,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    biased: bool,
    output: str,
    index_dtype: str,
) -> CompiledLayer:
    """The router of `fused_topk_with_score_function`, with outputs ``probs`` and the one named.

    Raises:
        InputError: a combination that Transformer Engine refuses.
    """
    _check_score(score_function)
    _check_topk(topk, experts)
    if biased and score_function == "softmax":
        raise InputError("expert_bias goes with score_function 'sigmoid' or 'sqrtsoftplus', found 'softmax'")
    if scaling_factor is not None:
        check_number("scaling_factor", scaling_factor)
    groups: dict[str, Any] = {}
    if group_topk is not None and (not isinstance(group_topk, int) or group_topk > 0):
        _check_groups(topk, experts, num_groups, group_topk)
        if group_topk != num_groups:  # else all groups are kept
            best = sum_top(topk // group_topk)
            groups = {"groups": num_groups, "groups_kept": group_topk, "group_score": best}
    post = score_function == "softmax" and not use_pre_softmax
    divided = score_function != "softmax" and topk > 1
    router = Router(
        experts,
        topk,
        score=score_function,
        order="topk_then_score" if post else "score_then_topk",
        selection_bias=biased,
        renormalize=divided,
        renorm_eps=EPSILON if divided else 0.0,
        scale=1.0 if scaling_factor is None else float(scaling_factor),
        outputs=("probs", output),
        indices_dtype=index_dtype,
        name="topk_with_score_function",
        **groups,
    )
    return compile(router, backend=_backend_for(dtype))


@made_once
def scores_layer(dtype: str, experts: int, topk: int, score_function: str, output: str) -> CompiledLayer:
    """The router of `fused_compute_score_for_moe_aux_loss`: scores divided over all experts, and the best of them."""
    _check_score(score_function)
    _check_topk(topk, experts)
    score = normalized(score_function, EPSILON)
    router = Router(experts, topk, score=score, outputs=(output, "scores"), name="score_for_moe_aux_loss")
    return compile(router, backend=_backend_for(dtype))


@made_once
def aux_loss_layer(
    dtype: str, integers: bool, by_sequence: bool, num_experts: int, topk: int, coeff: float
) -> CompiledLayer:
    """`fused_moe_aux_loss` of probs [rows, E], or by sequence of [rows, N, E] with counts [N, E]."""
    check_number("coeff", coeff)
    if isinstance(topk, bool) or not isinstance(topk, int) or topk < 1:
        raise InputError(f"topk must be an integer >= 1, found {topk!r}")
    rows = DType(dtype)
    b = Builder("moe_aux_loss")
    probs = b.input("probs", tensor(rows, symbol("T"), num_experts))
    sequences = (symbol("N"),) if by_sequence else ()
    counts = b.input("tokens_per_expert", tensor(DType.I32 if integers else DType.F32, *sequences, num_experts))
    number = b.input("total_num_tokens", tensor(DType.F32))
    by = {"segments": "sequence_first"} if by_sequence else {}
    sums = b.op("col.sum", probs, *((counts,) if by_sequence else ()), **by)
    loss = b.op("col.total", counts * sums)
    loss = math.safe_div(math.safe_div(loss, number), number) * (num_experts * float(coeff) / topk)
    if rows not in (DType.F32, DType.F64):
        loss = b.op("math.cast", loss, dtype=rows.value)
    return compile(b.build(loss=loss), backend=_backend_for(dtype))


def _backend_for(dtype: str) -> str:
    return backend_for(TORCH_DTYPES[DType(dtype)])


def _check_score(score_function: str) -> None:
    if not isinstance(score_function, str) or score_function not in SCORES:
        known = ", ".join(map(repr, SCORES))
        raise InputError(
            f"unknown score_function {score_function!r}{suggestion(str(score_function), SCORES)}; known: {known}"
        )


def _check_topk(topk: int, experts: int) -> None:
    if isinstance(topk, bool) or not isinstance(topk, int) or not 1 <= topk <= experts:
        raise InputError(
            f"topk must be an integer between 1 and the {experts} experts of the logits, found topk = {topk!r}"
        )


def _check_groups(topk: int, experts: int, num_groups: int | None, group_topk: int) -> None:
    """The rules of Transformer Engine: a group's score is the sum of the topk / group_topk best in it."""
    for name, value in (("num_groups", num_groups), ("group_topk", group_topk)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise InputError(f"{name} must be an integer, found {value!r}")
    if num_groups is None or num_groups < 1:
        raise InputError(f"group_topk = {group_topk} needs num_groups >= 1, found num_groups = {num_groups}")
    if experts % num_groups:
        raise InputError(f"num_groups must divide the {experts} experts, found num_groups = {num_groups}")
    if group_topk > num_groups:
        raise InputError(f"group_topk must be at most num_groups = {num_groups}, found group_topk = {group_topk}")
    if topk % group_topk:
        raise InputError(f"group_topk must divide topk = {topk}, found group_topk = {group_topk}")
    if topk // group_topk > experts // num_groups:
        raise InputError(
            f"topk / group_topk = {topk // group_topk} experts of a group make its score, but a group holds "
            f"{experts // num_groups} ({experts} experts in {num_groups} groups)"
        )

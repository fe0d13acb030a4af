"""Transformer Engine's three router functions, by their names, arguments, defaults and returns.

``from moesaic.te import fused_topk_with_score_function`` takes the place of the import from
``transformer_engine.pytorch.router``. What differs:

- ties go to the lower expert index, and the result is bit for bit the same from run to run; where nothing is added to a
  score, experts are ranked on the logits, which differ where float32 scores round to the same;
- the bias only selects: probs come from the score without it, whatever its size;
- rows with -inf stay clean: such an expert has probability 0, and no expert is picked twice;
- tensors may be strided, empty, of bf16, fp16, fp32 or fp64 (which the plain torch reference computes); a bias, counts
  and a token count may have any type;
- gradients do not need the caller's index buffer after the call;
- all three can be compiled with ``torch.compile(fullgraph=True)``.

A layer is made for each combination of the arguments that are no tensors, at its first call, and kept.
"""

from __future__ import annotations

import enum

import torch

from moesaic.ir.errors import InputError, InputTypeError, UnsupportedError
from moesaic.runtime.functional import as_counts, check_rows
from moesaic.runtime.reference import FLOATS
from moesaic.runtime.transformer_engine import INDEX_DTYPES, aux_loss_layer, map_output, scores_layer, topk_layer

__all__ = [
    "RoutingMapFormat",
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
]


class RoutingMapFormat(enum.IntEnum):
    """How a routing map is stored."""

    BYTEMAP = 0
    """[..., E] bool."""
    BITMAP_U8 = 1
    """[..., ceil(E / 8)] uint8: bit e mod 8 of byte e div 8."""


def fused_topk_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: torch.Tensor | None,
    routing_map_format: RoutingMapFormat | int | str = RoutingMapFormat.BYTEMAP,
    topk_indices: torch.Tensor | None = None,
    qb_histogram: torch.Tensor | None = None,
    qb_bin_bounds: torch.Tensor | None = None,
    qb_histogram_mode: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Routes tokens: probs of the picks among zeros, and which experts were picked.

    Args:
        logits: [..., E].
        topk: K, picks per token, 1 <= K <= E.
        use_pre_softmax: with ``"softmax"``: over all experts, before the picks are made; otherwise over the picks.
        num_groups, group_topk: only experts of the best `group_topk` groups can be picked, if that is above 0. A group
            is E / num_groups experts in a row, and its score the sum of the topk / group_topk best in it.
        scaling_factor: multiplies probs; ``None`` is 1.
        score_function: ``"softmax"``, ``"sigmoid"`` or ``"sqrtsoftplus"``. The last two are divided by their sum over
            the picks + 1e-20 if K > 1.
        expert_bias: [E], floats, added to the score for selection only; not with softmax. It gets no gradient.
        routing_map_format: of the map.
        topk_indices: [..., K], int16, int32 or int64: filled with the picks and returned in place of a map.
        qb_histogram, qb_bin_bounds, qb_histogram_mode: not available.

    Returns:
        (probs, map): probs [..., E] in the logits' dtype, with gradient; map as the format says, or `topk_indices`.

    Raises:
        InputError, InputTypeError: an argument, or a combination of them, that does not fit.
        UnsupportedError: an argument of quantile balancing is given.
    """
    quantile = {
        "qb_histogram": qb_histogram,
        "qb_bin_bounds": qb_bin_bounds,
        "qb_histogram_mode": qb_histogram_mode,
    }
    for name, value in quantile.items():
        if value is not None:
            raise UnsupportedError(
                f"{name}: quantile balancing is not available; leave it out, and move expert_bias with "
                "moesaic.update_bias instead"
            )
    experts = check_rows("logits", logits)
    output = map_output(routing_map_format)
    index_dtype = "int32"
    if topk_indices is not None:
        if output == "bitmap":
            raise InputError("topk_indices are returned in place of a map; leave out routing_map_format BITMAP_U8")
        _check_buffer(topk_indices, logits, topk)
        output, index_dtype = "indices", INDEX_DTYPES[topk_indices.dtype]
    layer = topk_layer(
        FLOATS[logits.dtype].value,
        experts,
        topk,
        use_pre_softmax,
        num_groups,
        group_topk,
        scaling_factor,
        score_function,
        expert_bias is not None,
        output,
        index_dtype,
    )
    if expert_bias is None:
        probs, picked = layer(logits)
    else:
        probs, picked = layer(logits, bias=_bias(expert_bias, logits))
    if topk_indices is not None:
        # A copy: backward has picks of its own, so that nothing depends on what becomes of the buffer.
        return probs, topk_indices.copy_(picked)
    return probs, _as_map(picked, output)


def fused_compute_score_for_moe_aux_loss(
    logits: torch.Tensor,
    topk: int,
    score_function: str,
    routing_map_format: RoutingMapFormat | int | str = RoutingMapFormat.BYTEMAP,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores over all experts that sum to 1, and the map of the K best of them.

    No bias, group or factor takes part, so the map need not be the one of the routing.

    Args:
        logits: [..., E].
        topk: K, 1 <= K <= E.
        score_function: ``"softmax"``, ``"sigmoid"`` or ``"sqrtsoftplus"``; the last two are divided by their sum
            + 1e-20.
        routing_map_format: of the map.

    Returns:
        (map, scores): in this order; scores [..., E] float32 (float64 for float64 logits), with gradient.

    Raises:
        InputError, InputTypeError: an argument that does not fit.
    """
    experts = check_rows("logits", logits)
    output = map_output(routing_map_format)
    picked, scores = scores_layer(FLOATS[logits.dtype].value, experts, topk, score_function, output)(logits)
    return _as_map(picked, output), scores


def fused_moe_aux_loss(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int | torch.Tensor,
    num_experts: int,
    topk: int,
    coeff: float,
) -> torch.Tensor:
    """num_experts * coeff / (topk n^2) * sum_c tokens_per_expert_c * sum_r probs_{r,c}, with n = total_num_tokens.

    Args:
        probs: [rows, columns], where columns are a multiple of `num_experts`: [S, N * E] makes a loss by sequence.
        tokens_per_expert: [columns], integers or floats.
        total_num_tokens: an int > 0, or a tensor of one element, which is read on the device; there 0 makes the loss 0.
        num_experts: E.
        topk: K.
        coeff: the factor. It is compiled in: where it follows a schedule, multiply the loss instead.

    Returns:
        A scalar in the dtype of `probs`, with the gradient of `probs`.

    Raises:
        InputError, InputTypeError: an argument that does not fit.
    """
    columns = check_rows("probs", probs)
    counts = as_counts("tokens_per_expert", tokens_per_expert, probs)
    if list(counts.shape) != [columns]:
        raise InputError(f"tokens_per_expert must have shape [{columns}], found {list(counts.shape)}")
    if isinstance(num_experts, bool) or not isinstance(num_experts, int) or num_experts < 1:
        raise InputError(f"num_experts must be an integer >= 1, found {num_experts!r}")
    if columns % num_experts:
        raise InputError(
            f"probs must have a multiple of num_experts = {num_experts} columns (several of them for a loss by "
            f"sequence), found {columns}"
        )
    if isinstance(total_num_tokens, int | float) and not total_num_tokens > 0:
        raise InputError(f"total_num_tokens must be above 0, found {total_num_tokens}")
    by_sequence = columns != num_experts
    if by_sequence:
        probs = probs.reshape(-1, columns // num_experts, num_experts)
        counts = counts.reshape(-1, num_experts)
    dtype, integers = FLOATS[probs.dtype].value, counts.dtype == torch.int32
    layer = aux_loss_layer(dtype, integers, by_sequence, num_experts, topk, coeff)
    loss: torch.Tensor = layer(probs, tokens_per_expert=counts, total_num_tokens=total_num_tokens).loss
    return loss


def _bias(expert_bias: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The bias as the router takes it."""
    if not isinstance(expert_bias, torch.Tensor):
        raise InputTypeError(f"expert_bias must be a tensor, found {type(expert_bias).__name__}")
    if not expert_bias.dtype.is_floating_point or list(expert_bias.shape) != [logits.shape[-1]]:
        found = f"{str(expert_bias.dtype).removeprefix('torch.')} {list(expert_bias.shape)}"
        raise InputError(f"expert_bias must be floats of shape [{logits.shape[-1]}], found {found}")
    return expert_bias.detach().to(torch.float64 if logits.dtype == torch.float64 else torch.float32)


def _check_buffer(topk_indices: torch.Tensor, logits: torch.Tensor, topk: int) -> None:
    if not isinstance(topk_indices, torch.Tensor):
        raise InputTypeError(f"topk_indices must be a tensor, found {type(topk_indices).__name__}")
    if topk_indices.dtype not in INDEX_DTYPES:
        found = str(topk_indices.dtype).removeprefix("torch.")
        raise InputError(f"topk_indices must be int16, int32 or int64, found {found}")
    if topk_indices.dtype == torch.int16 and logits.shape[-1] > 2**15 - 1:
        raise InputError(f"topk_indices of int16 hold ids up to 32767, found {logits.shape[-1]} experts; use int32")
    if list(topk_indices.shape) != [*logits.shape[:-1], topk]:
        raise InputError(f"topk_indices must have shape {[*logits.shape[:-1], topk]}, found {list(topk_indices.shape)}")
    if any(step == 0 and size > 1 for step, size in zip(topk_indices.stride(), topk_indices.shape, strict=True)):
        raise InputError("topk_indices must have memory of their own for each index, found an expanded tensor")
    if topk_indices.device != logits.device:
        raise InputError(f"topk_indices are on {topk_indices.device}, but logits are on {logits.device}")


def _as_map(picked: torch.Tensor, output: str) -> torch.Tensor:
    """Bytes of 0 and 1 as bool, without a copy; a bitmap as it is."""
    return picked.view(torch.bool) if output == "map" else picked

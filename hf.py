"""moesaic inside transformers: experts of its models through ``experts_implementation="moesaic"``.

    import moesaic as mo
    mo.hf.register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moesaic")

Every module of experts that transformers dispatches runs: weights as they lie, biases, clamps and other gatings, ids of
experts on other ranks, any float type. What a module computes between its products is compared with what would be
declared here, on random numbers, once; a function that nothing here computes runs as it is, between two layers.
"""

from __future__ import annotations

import functools

import torch

from moesaic.ir.errors import InputError
from moesaic.runtime.transformers_experts import experts_forward, plan_of

__all__ = ["prepare", "register"]


def register(
    name: str = "moesaic", *, backend: str = "auto", recompute: str | None = None, allow_tf32: bool = False
) -> None:
    """Makes ``experts_implementation=name`` known to transformers.

    Args:
        name: what models ask for.
        backend, recompute, allow_tf32: as in ``moesaic.compile``.

    Raises:
        InputError: transformers is not installed, or is too old to dispatch experts.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise InputError(
            f"moesaic.hf needs transformers 5 or newer, whose models dispatch their experts ({error}); "
            "pip install 'transformers>=5'"
        ) from error
    ALL_EXPERTS_FUNCTIONS.register(
        name, functools.partial(experts_forward, backend=backend, recompute=recompute, allow_tf32=allow_tf32)
    )


def prepare(model: torch.nn.Module) -> int:
    """Looks at all experts of a model, as their first call would: before ``torch.compile``.

    Returns:
        How many modules of experts there are.
    """
    found = [m for m in model.modules() if all(hasattr(m, n) for n in ("has_gate", "is_concatenated", "down_proj"))]
    for module in found:
        plan_of(module)
    return len(found)

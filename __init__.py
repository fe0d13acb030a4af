"""moesaic: a compiler for Mixture-of-Experts layers.

Everything here is loaded on first use: ``import moesaic`` imports neither torch nor a driver.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> "module" or "module:attribute". Absolute names only: pytest may import this file a second time under
# the name of its folder, and a relative import would then load a second copy of every package.
_TABLE: dict[str, str] = {
    # declaring
    "Router": "moesaic.ir.declare:Router",
    "Experts": "moesaic.ir.experts:Experts",
    "ClampedSwiGLU": "moesaic.ir.experts:ClampedSwiGLU",
    "MoE": "moesaic.ir.moe:MoE",
    "SharedExpert": "moesaic.ir.moe:SharedExpert",
    "norm": "moesaic.ir.declare:norm",
    "sum_top": "moesaic.ir.declare:sum_top",
    "LoadBalance": "moesaic.ir.losses:LoadBalance",
    "ZLoss": "moesaic.ir.losses:ZLoss",
    "Entropy": "moesaic.ir.losses:Entropy",
    "math": "moesaic.ir.math_functions",
    # the IR
    "Builder": "moesaic.ir.builder:Builder",
    "parse": "moesaic.ir.parser:parse",
    # compiling
    "compile": "moesaic.runtime.compile:compile",
    "autotune": "moesaic.runtime.tuning.autotune:autotune",
    "autotuning": "moesaic.runtime.tuning.autotune:autotuning",
    # on tensors that are there: scores, losses, balancing
    "scores": "moesaic.runtime.functional:scores",
    "load_balance_loss": "moesaic.runtime.functional:load_balance_loss",
    "z_loss": "moesaic.runtime.functional:z_loss",
    "entropy_loss": "moesaic.runtime.functional:entropy_loss",
    "pooled_load_balance": "moesaic.runtime.functional:pooled_load_balance",
    "update_bias": "moesaic.runtime.functional:update_bias",
    "load_metrics": "moesaic.runtime.functional:load_metrics",
    # the way of tokens to experts and back
    "dispatch": "moesaic.runtime.dispatch:dispatch",
    "combine": "moesaic.runtime.dispatch:combine",
    # Transformer Engine's names, and transformers' experts
    "te": "moesaic.te",
    "hf": "moesaic.hf",
    # modules
    "nn": "moesaic.nn",
    # errors
    "MoesaicError": "moesaic.ir.errors:MoesaicError",
}

# Sub-packages, so that ``moesaic.ir`` works after a plain ``import moesaic``.
_PACKAGES = ("ir", "passes", "templates", "codegen", "runtime")

__all__ = ["__version__", *_TABLE]  # noqa: PLE0604 - names come from the table

if TYPE_CHECKING:  # `as`: names for others, which strict type checkers want said
    from moesaic import hf as hf
    from moesaic import nn as nn
    from moesaic import te as te
    from moesaic.ir import math_functions as math
    from moesaic.ir.builder import Builder as Builder
    from moesaic.ir.declare import Router as Router
    from moesaic.ir.declare import norm as norm
    from moesaic.ir.declare import sum_top as sum_top
    from moesaic.ir.errors import MoesaicError as MoesaicError
    from moesaic.ir.experts import ClampedSwiGLU as ClampedSwiGLU
    from moesaic.ir.experts import Experts as Experts
    from moesaic.ir.losses import Entropy as Entropy
    from moesaic.ir.losses import LoadBalance as LoadBalance
    from moesaic.ir.losses import ZLoss as ZLoss
    from moesaic.ir.moe import MoE as MoE
    from moesaic.ir.moe import SharedExpert as SharedExpert
    from moesaic.ir.parser import parse as parse
    from moesaic.runtime.compile import compile as compile
    from moesaic.runtime.dispatch import combine as combine
    from moesaic.runtime.dispatch import dispatch as dispatch
    from moesaic.runtime.functional import entropy_loss as entropy_loss
    from moesaic.runtime.functional import load_balance_loss as load_balance_loss
    from moesaic.runtime.functional import load_metrics as load_metrics
    from moesaic.runtime.functional import pooled_load_balance as pooled_load_balance
    from moesaic.runtime.functional import scores as scores
    from moesaic.runtime.functional import update_bias as update_bias
    from moesaic.runtime.functional import z_loss as z_loss
    from moesaic.runtime.tuning.autotune import autotune as autotune
    from moesaic.runtime.tuning.autotune import autotuning as autotuning


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"moesaic.{name}")
    try:
        module_name, _, attribute = _TABLE[name].partition(":")
    except KeyError:
        message = f"module 'moesaic' has no attribute {name!r}"
        raise AttributeError(message, name=name, obj=sys.modules[__name__]) from None
    module = importlib.import_module(module_name)
    value = getattr(module, attribute) if attribute else module
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_TABLE, *_PACKAGES})

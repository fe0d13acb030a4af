"""``moesaic.compile``: from a declaration to something that runs on tensors and can be looked into."""

from __future__ import annotations

from dataclasses import replace
from typing import TypedDict, Unpack, overload

from moesaic.codegen.target import Target
from moesaic.ir.core import Module
from moesaic.ir.declare import Router
from moesaic.ir.errors import InputError, InputTypeError, check_choice, check_flag, suggestion
from moesaic.ir.experts import Experts
from moesaic.ir.moe import MoE
from moesaic.passes.manager import parse_pipeline
from moesaic.passes.save_products import SaveProducts
from moesaic.passes.specialize import Specialize
from moesaic.runtime import logs
from moesaic.runtime.backends import BACKENDS
from moesaic.runtime.experts import CompiledExperts
from moesaic.runtime.layer import CompiledLayer
from moesaic.runtime.moe import CompiledMoE


class Options(TypedDict, total=False):
    """What `compile` takes beside a declaration."""

    target: str | Target | None
    backend: str
    recompute: str | None
    allow_tf32: bool
    passes: str
    tune: bool


@overload
def compile(what: MoE, **options: Unpack[Options]) -> CompiledMoE: ...
@overload
def compile(what: Experts, **options: Unpack[Options]) -> CompiledExperts: ...
@overload
def compile(what: Router | Module, **options: Unpack[Options]) -> CompiledLayer: ...
def compile(
    what: Router | Experts | MoE | Module,
    *,
    target: str | Target | None = None,
    backend: str = "auto",
    recompute: str | None = None,
    allow_tf32: bool = False,
    passes: str = "",
    tune: bool = False,
) -> CompiledLayer | CompiledExperts | CompiledMoE:
    """Compiles a declared layer.

    Nothing is built before the first call (or ``warmup``, or a look inside).

    Args:
        what: a :class:`Router`, :class:`Experts`, :class:`MoE`, or a module from ``moesaic.parse`` or
            ``moesaic.Builder``.
        target: the GPU architecture to look at (``"sm_90a"``); calls on a GPU compile for the tensors' device.
        backend: ``"auto"`` follows the tensors (CUDA tensors run on ``cuda``, CPU tensors on ``reference``), unless
            ``MOESAIC_BACKEND`` names another; ``"emulate"`` runs the generated CUDA on the CPU.
        recompute: ``"h"`` if backward is to compute the first product of experts again instead of keeping it: of what
            forward makes, only the dispatch, logits and weights of picks are kept then.
        allow_tf32: whether products of float32 operands may round them to tf32 (10 bits of mantissa), which tensor
            cores multiply. Sums stay in float32. The reference does not round.
        passes: options of passes in place of the compiler's choices, written as in a pipeline, say
            ``"specialize{lanes=8}"``: for measuring one choice against another.
        tune: whether the first call on a GPU with numbers of tokens of a kind tunes the kernels that it runs, if no
            table knows them; see ``moesaic.autotune``, which does so beforehand. Such a call takes up to
            ``MOESAIC_AUTOTUNE_BUDGET`` seconds.

    Raises:
        InputError: an unknown backend, target or `recompute`.
        InputTypeError: `what` is not a declaration.
        UsageError: `passes` names an unknown pass or option.
    """
    logs.configure()
    if not isinstance(what, Router | Experts | MoE | Module):
        raise InputTypeError(
            f"compile takes a Router, Experts, a MoE or a Module, found {type(what).__name__}; text goes through "
            "moesaic.parse(text)"
        )
    if backend not in BACKENDS:
        near = suggestion(str(backend), BACKENDS)
        raise InputError(f"unknown backend {backend!r}{near}; known: {', '.join(BACKENDS)}")
    if isinstance(target, str):
        target = Target.parse(target)
    for name, value, kind in (("target", target, Target | None), ("passes", passes, str)):
        if not isinstance(value, kind):
            raise InputTypeError(f"{name} must be a text, found {type(value).__name__}")
    for name, flag in (("allow_tf32", allow_tf32), ("tune", tune)):
        check_flag(name, flag)
    chosen = _chosen(passes, recompute, allow_tf32)
    if isinstance(what, Experts):
        return CompiledExperts(what, target, backend, chosen, tune)
    if isinstance(what, MoE):
        return CompiledMoE(what, target, backend, chosen, tune)
    return CompiledLayer(what, target, backend, chosen, tune)


def _chosen(passes: str, recompute: str | None, allow_tf32: bool) -> str:
    """The passes that run with options, as pipeline text."""
    named = {p.name: p for p in parse_pipeline(passes)}
    if recompute is not None:
        check_choice("recompute", recompute, ("h",))
        saving = named.get(SaveProducts.name, SaveProducts())
        assert isinstance(saving, SaveProducts)
        named[saving.name] = replace(saving, recompute=recompute)
    if allow_tf32:
        specializing = named.get(Specialize.name, Specialize())
        assert isinstance(specializing, Specialize)
        named[specializing.name] = replace(specializing, allow_tf32=True)
    return ",".join(map(str, named.values()))

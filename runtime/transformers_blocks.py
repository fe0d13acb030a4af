"""What ``moesaic.hf.replace`` makes of a block of a transformers' model: the same module, with another forward.

A block keeps its parts, and with them its parameters, their names, and what others hold of them; its class becomes one
derived from its own, whose forward reads the parameters and runs a compiled layer. Hooks on the module of its router
are still called, with what the layer found. ``transformers_checks.py`` compares both forwards before.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from moesaic.ir.declare import Router
from moesaic.ir.errors import InputError, MoesaicError
from moesaic.ir.experts import ACTIVATIONS, Experts, Gating
from moesaic.ir.moe import MoE, SharedExpert
from moesaic.ir.presets import PRESETS
from moesaic.runtime.compile import compile
from moesaic.runtime.transformers_experts import (
    candidates,
    computes,
    declared,
    experts_forward,
    parameters_of,
    plain_attributes,
    plan_of,
)
from moesaic.runtime.transformers_families import (
    BIASES,
    DIVIDES,
    GROUPS,
    SCALES,
    TOP_K,
    CappedSwiGLU,
    Family,
    Place,
    Routed,
    at,
)

_log = logging.getLogger("moesaic.hf")

_PLAN = "_moesaic_block"
_CHANGING = "_moesaic_changing_hooks"
_CHANGED_BY_HOOK = "a hook on its router's module changes what that found"
_GONE = object()
_FOUND = ("weights", "indices")
_LEARNED = ("gate_bias", "expert_scale", "router_scale")
_SMALL = ("bias", *_LEARNED)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError, AssertionError)
"""What a module raises that is not what its family's entry says."""


class NotDeclarable(Exception):
    """Why a block cannot be replaced."""


@dataclass(frozen=True)
class Options:
    """How layers are compiled, as in ``moesaic.compile``."""

    backend: str = "auto"
    recompute: str | None = None
    allow_tf32: bool = False


Attributes = tuple[tuple[str, Any], ...]
"""Names and values of plain attributes of a module."""

Numbers = tuple[tuple[str, Attributes], ...]
"""The same of several parts, by their names."""


@dataclass(frozen=True)
class Plan:
    """What a block runs as.

    Attributes:
        family: the entry of the table.
        router, experts: as declared here; no experts for a router alone.
        shared: the shared expert as part of the layer; ``None`` if there is none, or if it runs as it is.
        beside: whether the block has a shared expert that runs as it is.
        whole: whether it all is one layer, as long as all weights have the same type.
        mean: whether y is the mean of the routed and the shared output.
        places: where the inputs of the layers are.
        parts: the parts of the block that are not called any more, and their classes.
        numbers: of the block and these parts, the plain attributes that it was read from, by the parts' names.
        options: how the layers are compiled.
        layers: ``moe`` gives y, ``told`` also what the router found; ``route`` and ``experts`` are for where they are
            apart.
        read, watched: `places`, and `parts` with their numbers, with paths taken apart.
        own: numbers of the block itself.
    """

    family: Family
    router: Router
    experts: Experts | None
    shared: SharedExpert | None
    beside: bool
    whole: bool
    mean: bool
    places: tuple[tuple[str, Place], ...]
    parts: tuple[tuple[str, type], ...]
    options: Options
    numbers: Numbers = field(default=(), repr=False, compare=False)  # layers alike may differ in their place
    layers: Mapping[str, Any] = field(init=False, repr=False, compare=False)
    read: tuple[tuple[str, Any], ...] = field(init=False, repr=False, compare=False)
    watched: tuple[tuple[tuple[str, ...], str, type, Attributes], ...] = field(init=False, repr=False, compare=False)
    own: Attributes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        options = vars(self.options)
        made: dict[str, Any] = {
            "route": compile(replace(self.router, outputs=_FOUND), backend=self.options.backend),
        }
        if self.experts is not None:
            made["experts"] = compile(self.experts, **options)
        if self.experts is not None and self.whole:
            moe = MoE(self.router, self.experts, self.shared, mean=self.mean, residual=self.beside, outputs=("hidden",))
            made["moe"] = compile(moe, **options)
            made["told"] = compile(replace(moe, outputs=("hidden", "logits", *_FOUND)), **options)
        object.__setattr__(self, "layers", made)
        read = tuple((n, tuple(p.split(".")) if isinstance(p, str) else p) for n, p in self.places)
        object.__setattr__(self, "read", read)
        numbers = dict(self.numbers)
        watched = ((tuple(n.split(".")), n, kind, numbers.get(n, ())) for n, kind in self.parts)
        object.__setattr__(self, "watched", tuple(watched))
        object.__setattr__(self, "own", numbers.get("", ()))

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, tuple(getattr(self, f.name) for f in fields(self) if f.init)

    def __str__(self) -> str:
        router, experts = self.router, self.experts
        score = router.score if isinstance(router.score, str) else "its own score"
        parts = [f"{score}, {router.top_k} of {router.num_experts}"]
        if router.groups is not None:
            parts.append(f"{router.groups_kept} of {router.groups} groups")
        if experts is not None:
            parts.append(f"experts {experts.hidden} x {experts.intermediate}")
        if self.shared is not None:
            parts.append(f"shared {self.shared.intermediate}")
        if self.beside:
            parts.append("its own shared expert")
        how = "one layer" if self.whole else "router and experts, each a layer" if experts else "router"
        return f"{how}: {', '.join(parts)}"


# Reading a block ------------------------------------------------------------------------------------------------------


def read(block: nn.Module, family: Family, options: Options) -> Plan:
    """What a block would run as.

    Raises:
        NotDeclarable: it cannot be declared, and why.
    """
    if family.refused is not None and (why := family.refused(block)) is not None:
        raise NotDeclarable(why)
    try:
        return _read(block, family, options)
    except (MoesaicError, *FAILURES) as error:
        raise NotDeclarable(f"it is not what the table says of its family: {error}") from error


def _read(block: nn.Module, family: Family, options: Options) -> Plan:
    places: list[tuple[str, Place]] = [("gate_weight", family.weight)]
    places += [(n, getattr(family, n)) for n in _LEARNED if getattr(family, n)]
    found = (".".join(filter(None, (p, n))) for p in (family.gate, "") for n in BIASES)
    bias = next((path for path in found if _has(block, path)), None)
    router = _router(block, family, bias is not None)
    if router.selection_bias and bias is not None:
        places.append(("bias", bias))
    experts, shared, beside, mean = None, None, False, False
    whole = bool(family.experts) and not family.apart(block)
    if family.experts:
        experts, theirs = _experts(block, family)
        places += theirs
    if family.shared and getattr(block, family.shared, None) is not None:
        mean = family.mean is not None and family.mean(block)
        shared, theirs = _shared(block, family) if whole else (None, [])
        places += theirs
        beside = shared is None
        whole = whole and not (mean and beside)
    calls = (*family.calls, *((family.shared, family.shared_gate) if beside else ()))
    read = {n: m for n, m in block.named_modules() if n.split(".")[0] not in calls or not n}
    parts = tuple((n, _kind_of(m)) for n, m in read.items() if n)
    numbers = tuple((n, plain_attributes(m, but=_read_anew(family, n))) for n, m in read.items())
    return Plan(family, router, experts, shared, beside, whole, mean, tuple(places), parts, options, numbers)


def _read_anew(family: Family, name: str) -> tuple[str, ...]:
    """Attributes of a part that each call reads."""
    path, _, attribute = family.jitter.rpartition(".")
    return (attribute,) if path == name else ()


def _has(root: Any, path: str) -> bool:
    try:
        return at(root, path) is not None
    except AttributeError:
        return False


def _router(block: Any, family: Family, biased: bool) -> Router:
    preset, gate = PRESETS[family.name], at(block, family.gate)

    def found(names: tuple[str, ...]) -> Any:
        return next((getattr(o, n) for o in (gate, block) for n in names if hasattr(o, n)), None)

    arguments: dict[str, Any] = {"num_experts": at(block, family.weight).shape[0], "selection_bias": biased}
    if (top_k := found(TOP_K)) is not None:
        arguments["top_k"] = top_k
    if (scale := found(SCALES)) is not None:
        arguments["scale"] = float(scale)
    if (divides := found(DIVIDES)) is not None:
        arguments["renormalize"] = (preset.get("renormalize") or family.norm or True) if divides else False
    groups, kept = (getattr(gate, name, None) for name in GROUPS)
    # A single group limits nothing.
    arguments["groups"], arguments["groups_kept"] = (groups, kept) if groups and groups > 1 else (None, None)
    return Router.preset(family.name, **arguments | dict(family.arguments(block) if family.arguments else {}))


def _experts(block: Any, family: Family) -> tuple[Experts, list[tuple[str, Place]]]:
    module = at(block, family.experts)
    if family.declared is not None:
        made, places = family.declared(block)
        if made.gating is None:
            made = replace(made, activation=_activation(block, module))
    elif hasattr(module, "is_concatenated"):
        found = declared(module)
        if found is None:
            raise NotDeclarable(
                f"{type(module).__name__} computes something between its products that is not declarable"
            )
        made, places = found, {name: f"{family.experts}.{name}" for name in parameters_of(module)}
    else:
        raise NotDeclarable(f"{type(module).__name__} does not say how its weights lie")
    for name, place in places.items():
        dtype = _tensor(block, place).dtype
        if dtype not in _DTYPES:
            raise NotDeclarable(f"{name} is {dtype}; layers take float32, bfloat16 and float16")
    return made, list(places.items())


def _activation(*modules: Any) -> str:
    """The name of the activation of the first of some modules that has one; SiLU where none says anything."""
    names = ("act_fn", "activation_fn", "activation", "mlp.activation_fn")
    function = next((at(m, n) for m in modules for n in names if _has(m, n)), nn.functional.silu)
    name = next((n for n in ACTIVATIONS if computes(function, n, None, gated=False)), None)
    if name is None:
        raise NotDeclarable(f"its experts' activation, {type(function).__name__}, is not declarable")
    return name


def _shared(block: Any, family: Family) -> tuple[SharedExpert | None, list[tuple[str, Place]]]:
    """The shared expert, and where its weights are; ``None`` if it has to run as it is."""
    module = getattr(block, family.shared)
    layers = {n: m for n, m in module.named_children() if not list(m.children()) and list(m.parameters())}
    ups = _UPS.get(tuple(sorted(layers)))
    gate = [getattr(block, family.shared_gate)] if family.shared_gate else []
    if ups is None or any(type(m) is not nn.Linear or m.bias is not None for m in (*layers.values(), *gate)):
        return None, []
    gated = ups != ("up_proj",)
    places: list[tuple[str, Place]] = [(f"shared_{n}", f"{family.shared}.{n}.weight") for n in (*ups, "down_proj")]
    places += [("shared_gate", f"{family.shared_gate}.weight")] if gate else []

    def between(x: torch.Tensor) -> torch.Tensor:
        """What it does between its products: its layers are given identities for weights."""
        wide = x.shape[1] // 2 if gated else x.shape[1]
        eye = torch.eye(x.shape[1], dtype=torch.float32, device="cpu")
        weights = {"down_proj.weight": eye[:wide, :wide]}
        weights |= dict(zip((f"{n}.weight" for n in ups), eye.split(wide) if len(ups) == 2 else (eye,), strict=True))
        y: torch.Tensor = torch.func.functional_call(module, weights, (x,))
        return y

    try:
        between(torch.zeros(1, 16, dtype=torch.float32, device="cpu"))
    except FAILURES:  # it needs more than rows
        return None, []
    for activation, gating in _shared_candidates(module, gated):
        if computes(between, activation, gating, gated=gated):
            made = SharedExpert(
                layers["down_proj"].in_features,
                activation=activation,
                gated=gated,
                gating=gating,
                separate=len(ups) == 2,
                gate=bool(gate),
            )
            return made, places
    return None, []


_UPS: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("down_proj", "gate_proj", "up_proj"): ("gate_proj", "up_proj"),
    ("down_proj", "gate_up_proj"): ("gate_up_proj",),
    ("down_proj", "up_proj"): ("up_proj",),
}
"""The first products of feed-forward networks, by the names of all their layers."""


def _shared_candidates(module: nn.Module, gated: bool) -> Iterator[tuple[str, Gating | None]]:
    yield from candidates(module, gated=gated)
    limit = getattr(module, "limit", None)
    if gated and limit is not None and 0 < limit < float("inf"):
        yield "silu", CappedSwiGLU(limit)


def _tensor(block: Any, place: Place) -> torch.Tensor:
    tensor: torch.Tensor = at(block, place) if isinstance(place, str) else place(block)
    return tensor


# Running --------------------------------------------------------------------------------------------------------------


class Replaced:
    """What the classes of replaced modules have in common; `_kind` is the class that the module had."""

    _kind: type[nn.Module]
    _first: str
    _signature: inspect.Signature

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Such a class is made in each process; copies and pickles name what it is made from.
        made = super().__reduce_ex__(2)
        assert isinstance(made, tuple)
        _, _, *state = made
        return _restored, (next(c for c in _BASES if isinstance(self, c)), self._kind), *state


class Block(Replaced):
    """A block as one layer, or as two."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plan: Plan = getattr(self, _PLAN)
        if (len(args) != 1 or kwargs) and not torch.compiler.is_compiling():
            self._signature.bind(self, *args, **kwargs)  # as a call of the block's own forward would
        why, tensors = ready(self, plan)
        if why is None:
            hidden_states, *others = args or (kwargs[self._first],)
            rest = {n: v for n, v in kwargs.items() if n != self._first}
            changed, result = _run(self, plan, tensors, hidden_states, *others, **rest)
            if not changed:
                return result
            say_once(self._kind.__name__, _CHANGED_BY_HOOK)
            self.__dict__[_CHANGING] = [*at(self, plan.family.gate)._forward_hooks]  # not tried again with these
            with _without_noise(self, plan.family):  # which is in the input by now
                return self._kind.forward(self, *args, **kwargs)
        say_once(self._kind.__name__, why)
        return self._kind.forward(self, *args, **kwargs)


@contextlib.contextmanager
def _without_noise(block: nn.Module, family: Family) -> Iterator[None]:
    """While a block's own forward has an input that noise has been put on."""
    path, _, name = family.jitter.rpartition(".")
    width = at(block, family.jitter) if name and block.training else None
    if width:
        setattr(at(block, path), name, 0.0)
    try:
        yield
    finally:
        if width:
            setattr(at(block, path), name, width)


class Gate(Replaced):
    """The module of a router: it gives what the block's layer found where it is called with that."""

    def forward(self, *args: Any, moesaic_found: Any = None, **kwargs: Any) -> Any:
        return self._kind.forward(self, *args, **kwargs) if moesaic_found is None else moesaic_found


class RouterAlone(Replaced):
    """A router whose experts are called by somebody else."""

    def forward(self, hidden_states: torch.Tensor) -> Any:
        plan: Plan = getattr(self, _PLAN)
        why, tensors = ready(self, plan)
        if why is not None:
            say_once(self._kind.__name__, why)
            return self._kind.forward(self, hidden_states)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        return plan.family.watched(self, x, _route(self, plan, x, tensors, {}))


class ExpertsAlone(Replaced):
    """Experts whose router is somebody else's."""

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        options: Options = getattr(self, _PLAN)
        return experts_forward(self, hidden_states, top_k_index, top_k_weights, **vars(options))


_BASES = (Block, Gate, RouterAlone, ExpertsAlone)


@functools.cache
def _derived(base: type, kind: type) -> type[nn.Module]:
    module: type[nn.Module] = kind
    signature = inspect.signature(module.forward)
    first = next(iter(list(signature.parameters)[1:]), "")
    body = {
        "_kind": kind,
        "_first": first,
        "_signature": signature,
        "__doc__": f"{kind.__name__}, run by moesaic: {base.__doc__}",
    }
    return type(f"Moesaic{kind.__name__}", (base, kind), {**body, "__module__": __name__})


def _restored(base: type, kind: type) -> Any:
    made: Any = _derived(base, kind)
    return made.__new__(made)


def install(module: nn.Module, base: type, plan: Any) -> None:
    """Makes a module run as planned."""
    if plan is not None:
        setattr(module, _PLAN, plan)
    kind: type = type(module)
    module.__class__ = _derived(base, kind)


def remove(module: nn.Module) -> None:
    """Makes a module what it was; nothing happens if it is that.

    Raises:
        InputError: somebody else has given it another class since.
    """
    if isinstance(module, Replaced):
        if type(module).__mro__[1] not in _BASES:
            raise InputError(f"{module._kind.__name__} is a {type(module).__name__} by now; restore before sharding it")
        module.__class__ = module._kind
        vars(module).pop(_PLAN, None)
        vars(module).pop(_CHANGING, None)


def replaces(block: nn.Module, plan: Plan) -> list[tuple[nn.Module, type, Any]]:
    """The modules that `install` changes for a block, and how."""
    if plan.experts is None:
        return [(block, RouterAlone, plan)]
    return [(block, Block, plan), (at(block, plan.family.gate), Gate, None)]


def experts_alone(module: nn.Module, options: Options) -> list[tuple[nn.Module, type, Any]]:
    """The same for experts whose block stays."""
    plan_of(module)
    return [(module, ExpertsAlone, options)]


def ready(block: nn.Module, plan: Plan) -> tuple[str | None, dict[str, torch.Tensor]]:
    """Why a block cannot run as planned now, or ``None`` and what its layers are called with, beside x.

    Under torch.compile nothing is looked for.
    """
    if torch.compiler.is_compiling():
        return None, inputs(block, plan)
    if (why := _obstacle(block, plan)) is not None:
        return why, {}
    tensors = inputs(block, plan)
    spread = next((name for name, tensor in tensors.items() if hasattr(tensor, "placements")), None)
    return (None, tensors) if spread is None else (f"its {spread} {_SPREAD}", {})


def _obstacle(block: nn.Module, plan: Plan) -> str | None:
    """What of a block's parts others have an interest in, or ``None``."""
    if plan.experts is not None and "forward" in block.__dict__:
        return "somebody else has replaced its forward"
    if (changed := _changed(block, plan.own)) is not None:
        return changed
    for path, name, kind, numbers in plan.watched:
        part: Any = block
        for step in path:
            part = None if part is None else part._modules.get(step)
        if part is None:
            return f"it has no part {name!r} any more"
        if type(part) is not kind and _kind_of(part) is not kind:
            return f"its part {name!r} has become a {type(part).__name__}"
        held = part.__dict__
        if (
            held["_forward_pre_hooks"]
            or held["_backward_hooks"]
            or held["_backward_pre_hooks"]
            or (held["_forward_hooks"] and name != plan.family.gate)
            or "forward" in held
        ):
            return f"its part {name!r} has hooks, or a forward of its own, which a layer would not call"
        if (changed := _changed(part, numbers)) is not None:
            return changed
    gate = at(block, plan.family.gate)
    if gate._forward_hooks and block.__dict__.get(_CHANGING) == [*gate._forward_hooks]:
        return _CHANGED_BY_HOOK
    return None


def _changed(part: nn.Module, numbers: Attributes) -> str | None:
    """Which attribute is not any more what the block was read from, or ``None``."""
    held = part.__dict__
    for name, value in numbers:
        if held.get(name, _GONE) != value:
            now = f"is {held[name]!r}" if name in held else "is gone"
            return f"{_kind_of(part).__name__}.{name} {now}, and was {value!r} when it was replaced; replace it again"
    return None


def _kind_of(module: nn.Module) -> type:
    return module._kind if isinstance(module, Replaced) else type(module)


def obstacle_of_experts(module: nn.Module) -> str | None:
    """Why a module of experts cannot run alone, or ``None``."""
    for name, tensor in parameters_of(module).items():
        if tensor.dtype not in _DTYPES:
            return f"its {name} is {tensor.dtype}; layers take float32, bfloat16 and float16"
        if hasattr(tensor, "placements"):
            return f"its {name} {_SPREAD}"
    return None


_SPREAD = "is spread over devices; replace before, and shard whole blocks or decoder layers"


@functools.cache
def say_once(kind: str, why: str) -> None:
    _log.warning("%s runs as transformers has it: %s", kind, why)


def inputs(block: Any, plan: Plan) -> dict[str, torch.Tensor]:
    """What the layers are called with, beside x."""
    tensors = {name: _held(block, place) if isinstance(place, tuple) else place(block) for name, place in plan.read}
    for name in _SMALL:
        if (tensor := tensors.get(name)) is not None:
            shape = () if name == "router_scale" else (-1,)
            tensors[name] = tensor.float() if tensor.dim() == len(shape) else tensor.float().reshape(shape)
    if "bias" in tensors:
        bias = tensors["bias"].detach()
        columns = plan.router.shared_experts  # shared experts are columns of logits, too, and never picked
        tensors["bias"] = nn.functional.pad(bias, (0, columns)) if columns else bias
    return tensors


def _held(block: Any, path: tuple[str, ...]) -> torch.Tensor:
    """A parameter or a buffer, without what attributes of modules cost."""
    part = block
    for step in path[:-1]:
        part = part._modules[step]
    tensor = part._parameters.get(path[-1])
    if tensor is None:
        tensor = part._buffers.get(path[-1])
    made: torch.Tensor = tensor if tensor is not None else getattr(part, path[-1])
    return made


def _run(
    block: Any, plan: Plan, tensors: dict[str, torch.Tensor], hidden_states: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[bool, Any]:
    """Whether a hook changed what the router found, and the block's result without that."""
    family = plan.family
    noise = at(block, family.jitter) if family.jitter and block.training else None
    if noise:  # in place, as transformers has it: the residual of minimax is this tensor
        hidden_states *= torch.empty_like(hidden_states).uniform_(1.0 - noise, 1.0 + noise)
    x = hidden_states.reshape(-1, tensors["gate_weight"].shape[-1])  # some blocks are given all tokens in one row
    given = dict(family.given(block, *args, **kwargs)) if family.given is not None else {}
    gate = at(block, family.gate)
    told = family.always or bool(gate._forward_hooks)
    y, found = _computed(block, plan, x.to(tensors["down_proj"].dtype), tensors, given, told)
    if family.after is not None:
        y = family.after(block, y)
    y = y.to(hidden_states.dtype)
    shape, changed = hidden_states.shape, False
    if gate._forward_hooks:
        watched = family.watched(block, x, found)
        if torch.compiler.is_compiling():
            gate(x, moesaic_found=watched)
        else:
            watched, tensors_seen = _with_versions(watched)
            before = [t._version for t in tensors_seen]
            seen = gate(x, moesaic_found=watched)
            changed = seen is not watched or [t._version for t in tensors_seen] != before
    return changed, y.view(shape) if family.returns is None else family.returns(block, y, shape, found)


def _with_versions(watched: Any) -> tuple[Any, list[torch.Tensor]]:
    """What a router found, in tensors that count writes to them; and these."""
    parts = list(watched) if isinstance(watched, tuple) else [watched]
    for number, part in enumerate(parts):
        if isinstance(part, torch.Tensor) and part.is_inference():
            with torch.inference_mode(False):
                parts[number] = part.clone()
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    if not isinstance(watched, tuple):
        return parts[0], tensors
    return (type(watched)(*parts) if hasattr(watched, "_fields") else tuple(parts)), tensors


def _computed(
    block: Any,
    plan: Plan,
    x: torch.Tensor,
    tensors: dict[str, torch.Tensor],
    given: dict[str, torch.Tensor],
    told: bool,
) -> tuple[torch.Tensor, Any]:
    """y [T, H], and what the router found if that is asked for or comes along."""
    family = plan.family
    autocast = torch.is_autocast_enabled(x.device.type)
    alike = autocast or all(t.dtype == x.dtype for n, t in tensors.items() if n not in _SMALL)
    if plan.whole and alike and not (autocast and family.no_autocast):
        if plan.beside:
            given["residual"] = _beside(block, family, x).to(x.dtype)
        if not told:
            return plan.layers["moe"](x, **tensors, **given), None
        result = plan.layers["told"](x, **tensors, **given)
        return result.hidden, Routed(result.logits, result.weights, result.indices.long())
    found = _route(block, plan, x, tensors, given)
    weights = found.weights[:, : plan.router.top_k] if plan.router.shared_experts else found.weights
    matrices = {n: t for n, t in tensors.items() if n not in (*_SMALL, "gate_weight") and not n.startswith("shared_")}
    into = x if family.into is None else family.into(block, x)
    y = plan.layers["experts"](into, found.indices, weights.contiguous(), **matrices)
    if family.out_of is not None:
        y = family.out_of(block, y)
    if family.adds is not None:
        y = y + family.adds(block, x, found)
    if plan.beside or plan.shared is not None:
        y = y + _beside(block, family, x)
    return y * 0.5 if plan.mean else y, found


def _route(
    block: Any, plan: Plan, x: torch.Tensor, tensors: dict[str, torch.Tensor], given: dict[str, torch.Tensor]
) -> Routed:
    """What the router finds, apart from experts."""
    family, weight = plan.family, tensors["gate_weight"]
    into = x if family.into_gate is None else family.into_gate(block, x)
    if family.float32:
        with torch.autocast(x.device.type, enabled=False):
            logits = linear(into.float(), weight.float())
    else:
        logits = linear(into.to(weight.dtype), weight)
    learned = {n: tensors[n] for n in _SMALL if n in tensors}
    weights, indices = plan.layers["route"](logits, **learned, **given)[:2]
    return Routed(logits.float(), weights, indices.long())


def _beside(block: Any, family: Family, x: torch.Tensor) -> torch.Tensor:
    """The output of the shared expert as it is."""
    y: torch.Tensor = getattr(block, family.shared)(x)
    return torch.sigmoid(getattr(block, family.shared_gate)(x)) * y if family.shared_gate else y

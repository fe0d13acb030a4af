"""Passes, pipelines and the loop that runs them.

A pass is a frozen dataclass: its fields are its options, ``str(pass)`` is its pipeline text, and
``parse_pipeline(str(pipeline))`` gives it back. Pipeline text: ``canonicalize,cse,specialize{target=sm_90a}``;
options are separated by spaces, list elements by commas.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from moesaic.ir.core import Module
from moesaic.ir.errors import InternalError, UsageError, suggestion
from moesaic.passes.stages import check_stage


@dataclass
class PassContext:
    """What passes tell the user besides the module."""

    warnings: list[str] = field(default_factory=list)
    """Things the user probably did not mean."""
    remarks: list[str] = field(default_factory=list)
    """Decisions, one line each, prefixed with the pass."""


@dataclass(frozen=True)
class Pass:
    """Base of passes.

    Contract: the module verifies before and after :meth:`run`, not within; ``run`` changes the module in place and
    says whether it changed anything; it looks at nothing but the module and its options.
    """

    name: ClassVar[str]
    requires: ClassVar[str | None] = None
    """Stage the module must be in (see ``stages.py``)."""
    establishes: ClassVar[str | None] = None
    """Stage the module is in afterwards, if the pass changes it."""

    def run(self, module: Module, context: PassContext) -> bool:
        raise NotImplementedError

    def __str__(self) -> str:
        options = [
            f"{f.name.replace('_', '-')}={_format(getattr(self, f.name))}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        ]
        return f"{self.name}{{{' '.join(options)}}}" if options else self.name


# Pass name -> "module:class": imported only when used, so that listing passes costs nothing.
REGISTRY: dict[str, str] = {
    "canonicalize": "moesaic.passes.canonicalize:Canonicalize",
    "cse": "moesaic.passes.cse:CommonSubexpressions",
    "dce": "moesaic.passes.dce:DeadCode",
    "lower-aux-loss": "moesaic.passes.lower_aux_loss:LowerAuxLoss",
    "differentiate": "moesaic.passes.differentiate:Differentiate",
    "expand-rows": "moesaic.passes.expand_rows:ExpandRows",
    "sink-gathers": "moesaic.passes.sink_gathers:SinkGathers",
    "drop-sentinel-groups": "moesaic.passes.drop_sentinel_groups:DropSentinelGroups",
    "commute-weights": "moesaic.passes.commute_weights:CommuteWeights",
    "save-products": "moesaic.passes.save_products:SaveProducts",
    "share-counts": "moesaic.passes.share_counts:ShareCounts",
    "fuse-experts": "moesaic.passes.fuse_experts:FuseExperts",
    "fuse-score-topk": "moesaic.passes.fuse_score_topk:FuseScoreTopk",
    "choose-saved": "moesaic.passes.choose_saved:ChooseSaved",
    "plan-workspace": "moesaic.passes.plan_workspace:PlanWorkspace",
    "specialize": "moesaic.passes.specialize:Specialize",
}

FORWARD = (
    "canonicalize,lower-aux-loss,cse,dce,expand-rows,sink-gathers,drop-sentinel-groups,commute-weights,cse,dce,"
    "share-counts,fuse-experts,fuse-score-topk,plan-workspace,specialize"
)
"""The pipeline of a layer that is only run forward."""

DEFAULT = (
    "canonicalize,lower-aux-loss,cse,dce,differentiate,expand-rows,sink-gathers,drop-sentinel-groups,commute-weights,"
    "cse,dce,share-counts,save-products,cse,dce,fuse-experts,fuse-score-topk,choose-saved,dce,plan-workspace,specialize"
)
"""The pipeline of a layer with its backward function."""

PIPELINES = {"default": DEFAULT, "forward": FORWARD}
"""What layers are lowered by. A pass of one's own joins by its name, put into both."""


def pass_class(name: str) -> type[Pass]:
    """The class of a registered pass.

    Raises:
        UsageError: no pass has the name; the message suggests a near one.
    """
    try:
        module, attribute = REGISTRY[name].split(":")
    except KeyError:
        known = [*REGISTRY, *PIPELINES]
        raise UsageError(f"unknown pass {name!r}{suggestion(name, known)}; known: {', '.join(known)}") from None
    found: type[Pass] = getattr(importlib.import_module(module), attribute)
    return found


def parse_pipeline(text: str) -> list[Pass]:
    """The passes that pipeline text names; ``default`` and ``forward`` stand for the named pipelines.

    Raises:
        UsageError: an unknown pass or option, an option of the wrong type, or unbalanced braces.
    """
    passes: list[Pass] = []
    for item in _split(text):
        match = re.fullmatch(r"\s*([A-Za-z0-9\-]+)\s*(?:\{(.*)\})?\s*", item, re.DOTALL)
        if match is None:
            raise UsageError(f"{item.strip()!r} is not a pass; write name or name{{option=value}}")
        name, options = match.groups()
        if name in PIPELINES and not options:
            passes.extend(parse_pipeline(PIPELINES[name]))
        else:
            passes.append(_build(pass_class(name), options or ""))
    return passes


def pipeline_text(passes: Sequence[Pass]) -> str:
    return ",".join(str(p) for p in passes)


class Instrument:
    """Watches a pipeline run; every method is optional."""

    def before_pipeline(self, module: Module, passes: Sequence[Pass]) -> None: ...

    def before_pass(self, index: int, current: Pass, module: Module) -> None: ...

    def after_pass(self, index: int, current: Pass, module: Module, changed: bool) -> None: ...

    def after_pipeline(self, module: Module) -> None: ...

    def on_failure(self, index: int, current: Pass, passes: Sequence[Pass], error: Exception) -> None:
        """A pass, or a check after it, raised; the error goes on to the caller afterwards."""


def _stage_hint(current: Pass) -> str:
    """What to tell somebody whose module is in the wrong stage for a pass."""
    makers = (p for p in parse_pipeline(DEFAULT) if p.establishes == current.requires)
    maker = next((p.name for p in makers), "a declaration")
    return (
        f"{current.name} takes a module in stage {current.requires!r}, which {maker} makes; "
        "the pipelines 'default' and 'forward' have all passes in order"
    )


class PassManager:
    """Runs passes in order over one module, in place."""

    def __init__(self, passes: Sequence[Pass] | str, instruments: Sequence[Instrument] = ()) -> None:
        self.passes = parse_pipeline(passes) if isinstance(passes, str) else list(passes)
        self.instruments = list(instruments)

    def run(self, module: Module, context: PassContext | None = None) -> PassContext:
        """Runs the pipeline; gives the context with what the passes had to say.

        Raises:
            DiagnosticError: the module is not legal for a pass, or an instrument found it broken.
        """
        context = context if context is not None else PassContext()
        for instrument in self.instruments:
            instrument.before_pipeline(module, self.passes)
        for index, current in enumerate(self.passes):
            for instrument in self.instruments:
                instrument.before_pass(index, current, module)
            try:
                if current.requires is not None:
                    check_stage(module, current.requires, functools.partial(_stage_hint, current))
                changed = current.run(module, context)
                if current.establishes is not None:
                    check_stage(module, current.establishes)
                for instrument in self.instruments:
                    instrument.after_pass(index, current, module, changed)
            except Exception as error:
                for instrument in self.instruments:
                    instrument.on_failure(index, current, self.passes, error)
                raise
        for instrument in self.instruments:
            instrument.after_pipeline(module)
        return context


def _split(text: str) -> list[str]:
    """Items at the commas outside braces."""
    items, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c == "{") - (c == "}")
        if depth < 0:
            raise UsageError(f"pipeline {text!r}: '}}' without '{{'")
        if c == "," and depth == 0:
            items.append(text[start:i])
            start = i + 1
    if depth:
        raise UsageError(f"pipeline {text!r}: '{{' is not closed")
    items.append(text[start:])
    return [i for i in items if i.strip()] if text.strip() else []


def _build(cls: type[Pass], options: str) -> Pass:
    fields = {f.name.replace("_", "-"): f for f in dataclasses.fields(cls)}
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for option in options.split():
        key, separator, value = option.partition("=")
        if not separator:
            raise UsageError(f"{cls.name}: option {option!r} has no value; write {key}=value")
        if key not in fields:
            known = ", ".join(fields) or "none"
            raise UsageError(f"{cls.name}: unknown option {key!r}{suggestion(key, fields)}; known: {known}")
        values[fields[key].name] = _parse(cls.name, key, value, hints[fields[key].name])
    return cls(**values)


def _parse(owner: str, key: str, text: str, hint: Any) -> Any:
    if get_origin(hint) is tuple:
        element = get_args(hint)[0]
        return tuple(_parse(owner, key, t, element) for t in text.split(",") if t)
    try:
        if hint is bool:
            return {"true": True, "false": False}[text]
        if hint in (int, float, str):
            return hint(text)
    except (ValueError, KeyError):
        kind = {bool: "true or false", int: "an integer", float: "a number"}[hint]
        raise UsageError(f"{owner}: option {key!r} expects {kind}, found {text!r}") from None
    raise InternalError(f"{owner}: option {key!r} has an unsupported type {hint}")


def _format(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(_format(v) for v in value)
    return str(value)

"""moesaic inside transformers: experts of its models through ``experts_implementation="moesaic"``, or whole blocks.

    import moesaic as mo
    mo.hf.register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moesaic")

Every module of experts that transformers dispatches runs: weights as they lie, biases, clamps and other gatings, ids of
experts on other ranks, any float type. What a module computes between its products is compared with what would be
declared here, on random numbers, once; a function that nothing here computes runs as it is, between two layers.

    report = mo.hf.replace(model)
    print(report)

makes each sparse block of a model that is there one compiled layer: router, experts and shared expert.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field

import torch

from moesaic.ir.errors import InputError, InputTypeError
from moesaic.ir.experts import Experts
from moesaic.runtime import transformers_blocks as blocks
from moesaic.runtime.compile import compile
from moesaic.runtime.transformers_checks import differs
from moesaic.runtime.transformers_experts import experts_forward, plan_of
from moesaic.runtime.transformers_families import FAMILIES, LEFT

__all__ = ["Report", "ReportedBlock", "prepare", "register", "replace"]


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
    found = [m for m in model.modules() if _is_dispatched(m)]
    for module in found:
        plan_of(module)
    return len(found)


def _is_dispatched(module: torch.nn.Module) -> bool:
    """Whether a module is experts that transformers lets others run."""
    return all(hasattr(module, n) for n in ("has_gate", "is_concatenated", "down_proj"))


@dataclass(frozen=True)
class ReportedBlock:
    """What became of a block.

    Attributes:
        name: of the module in the model.
        kind: the name of its class, as transformers has it.
        replaced: ``"block"``, ``"router"`` or ``"experts"``, what of it is compiled now; empty if nothing is.
        text: what it runs as, or why it stays.
    """

    name: str
    kind: str
    replaced: str
    text: str


@dataclass
class Report:
    """What `replace` did and did not, block by block; ``print`` shows it as a table.

    Attributes:
        model: the name of the model's class.
        blocks: in the order of the model.
    """

    model: str
    blocks: list[ReportedBlock] = field(default_factory=list)
    _modules: list[torch.nn.Module] = field(default_factory=list, repr=False)

    @property
    def replaced(self) -> list[str]:
        """Names of the modules that run compiled layers."""
        return [b.name for b in self.blocks if b.replaced]

    @property
    def left(self) -> list[str]:
        """Names of the modules that stay as they were."""
        return [b.name for b in self.blocks if not b.replaced]

    def restore(self) -> None:
        """Makes all of them what they were before.

        Raises:
            InputError: one has been given another class since, as sharding does.
        """
        for module in self._modules:
            blocks.remove(module)
        self._modules.clear()

    def __str__(self) -> str:
        head = f"{self.model}: {len(self.replaced)} of {len(self.blocks)} sparse modules run compiled layers"
        if not self.blocks:
            return f"{self.model}: no sparse module found"
        groups: dict[tuple[str, str, str, str], int] = {}
        for b in self.blocks:
            key = (b.kind, re.sub(r"\d+", "*", b.name), b.replaced or "left", b.text)
            groups[key] = groups.get(key, 0) + 1
        rows = [("", "module", "where", "compiled", "as, or why not")]
        rows += [(str(n), kind, where, what, text) for (kind, where, what, text), n in groups.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = (
            f"{row[0]:>{widths[0]}}  " + "  ".join(f"{c:<{w}}" for c, w in zip(row[1:4], widths[1:], strict=True))
            for row in rows
        )
        return "\n".join([head, *(f"{line}  {row[4]}" for line, row in zip(lines, rows, strict=True))])


def replace(
    model: torch.nn.Module,
    *,
    backend: str = "auto",
    recompute: str | None = None,
    allow_tf32: bool = False,
    check: bool = True,
    experts: bool = True,
) -> Report:
    """Makes the sparse blocks of a transformers' model compiled layers, in place.

    A block keeps its parameters, their names and its parts; only its forward is another one, which runs router,
    experts and shared expert as one layer. So checkpoints, optimizers, ``save_pretrained``, copies and moves go on as
    before, and hooks on the router's module, by which transformers records ``router_logits`` for its balance loss, see
    what the layer found. A block runs as transformers has it, and says so once, while its parts have hooks of somebody
    else's, or parameters that are spread over devices apart from the block.

    Args:
        model: any model of transformers, or a part of one.
        backend, recompute, allow_tf32: as in ``moesaic.compile``.
        check: compare each kind of block, in float32 on the CPU and with random weights, with what would take its
            place, outputs and gradients, and leave those that differ.
        experts: where a block stays, still run its experts, if transformers lets others do so.

    Returns:
        What was and was not replaced, and why. Its `Report.restore` takes it back.

    Raises:
        InputTypeError: `model` is no module.
        InputError: an option has no meaning.
    """
    if not isinstance(model, torch.nn.Module):
        raise InputTypeError(f"replace takes a torch.nn.Module, found {type(model).__name__}")
    options = blocks.Options(backend, recompute, allow_tf32)
    compile(
        Experts(1, 1, 1), backend=backend, recompute=recompute, allow_tf32=allow_tf32
    )  # refuses what has no meaning
    work = _Replacing(Report(type(model).__name__), options, check, experts)
    work.visit("", model, None)
    return work.report


@dataclass
class _Replacing:
    """The way through a model."""

    report: Report
    options: blocks.Options
    check: bool
    experts: bool
    compared: dict[tuple[type, blocks.Plan], str | None] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)

    def visit(self, name: str, module: torch.nn.Module, parent: torch.nn.Module | None) -> None:
        if id(module) in self.seen:
            return
        self.seen.add(id(module))
        key = _key(module)
        if isinstance(module, blocks.Replaced):
            return self.add(name, module._kind.__name__, "", "it is replaced already")
        if key in FAMILIES:
            if self.replaced(name, module):
                return None
        elif key in LEFT:
            self.add(name, type(module).__name__, "", LEFT[key])
        elif _is_dispatched(module):
            return self.of_experts(name, module, parent)
        elif _looks_like_experts(module) and _key(parent) not in LEFT:
            return self.add(name, type(module).__name__, "", _UNKNOWN)
        for child, part in module.named_children():
            self.visit(f"{name}.{child}" if name else child, part, module)
        return None

    def replaced(self, name: str, module: torch.nn.Module) -> bool:
        """Whether a block of the table could be replaced."""
        kind, family = type(module), FAMILIES[_key(module)]
        try:
            plan = blocks.read(module, family, self.options)
            why, _ = blocks.ready(module, plan)
            if why is None and self.check:
                if (kind, plan) not in self.compared:
                    self.compared[kind, plan] = differs(module, plan)
                if (difference := self.compared[kind, plan]) is not None:
                    why = f"what would take its place computes something else: {difference}"
        except blocks.NotDeclarable as error:
            why = str(error)
        if why is not None:
            self.add(name, kind.__name__, "", why)
            return False
        self.install(blocks.replaces(module, plan))
        self.add(name, kind.__name__, "block" if family.experts else "router", str(plan))
        return True

    def of_experts(self, name: str, module: torch.nn.Module, parent: torch.nn.Module | None) -> None:
        """Experts whose block stays, or that have none."""
        kind = type(module).__name__
        keys = {_key(m) for m in (parent, *parent.children())} if parent is not None else set()
        if parent is not None and not keys & (FAMILIES.keys() | LEFT.keys()) and not _has_replaced(parent):
            self.add(name.rpartition(".")[0], type(parent).__name__, "", _UNKNOWN)
        if not self.experts:
            return self.add(name, kind, "", "not asked for (experts=False)")
        if (why := blocks.obstacle_of_experts(module)) is not None:
            return self.add(name, kind, "", why)
        self.install(blocks.experts_alone(module, self.options))
        return self.add(name, kind, "experts", "its experts, for the router that the model has")

    def install(self, changes: list[tuple[torch.nn.Module, type, object]]) -> None:
        for module, base, plan in changes:
            blocks.install(module, base, plan)
            self.report._modules.append(module)

    def add(self, name: str, kind: str, replaced: str, text: str) -> None:
        self.report.blocks.append(ReportedBlock(name, kind, replaced, text))


_UNKNOWN = "no family of the table has it"


def _looks_like_experts(module: torch.nn.Module) -> bool:
    return type(module).__name__.endswith("Experts") and any(p.dim() == 3 for p in module.parameters())


def _key(module: torch.nn.Module | None) -> tuple[str, str]:
    return type(module).__module__, type(module).__name__


def _has_replaced(module: torch.nn.Module) -> bool:
    return any(isinstance(m, blocks.Replaced) for m in module.children())

"""``specialize``: a configuration for each kernel, by a built-in rule.

Functions are planned for any target. Where the target has clusters of blocks, the three launches of a dispatch become
one here (``merge_dispatch.py``). So do, for the fewest tokens, a row program and what finishes its sums over tokens
(``merge_finish.py``); for more, the blocks that add these up wait for each other in a cluster
(``finish_in_cluster.py``). A gradient with few tiles becomes two launches, for its tiles depend on the target, too
(``split_wgrads.py``). Products that need nothing of the kernels right before them begin beside these
(``begin_early.py``). Products of experts count the items that their blocks take (``count_items.py``).

Nothing here changes the arithmetic of a row: sums have one order whatever the lanes (see ``row.cuh``), and every way of
selecting gives the same picks. What it decides is how the work is spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from moesaic.ir.core import Block, Function, Module, Value, columns_of
from moesaic.ir.errors import UsageError, suggestion
from moesaic.ir.ops import slot
from moesaic.ir.ops.launch import Kernel
from moesaic.passes.begin_early import begin_early
from moesaic.passes.count_items import count_items
from moesaic.passes.dispatch_shape import dispatch_config
from moesaic.passes.finish_in_cluster import drop_tickets, finish_config
from moesaic.passes.manager import Pass, PassContext
from moesaic.passes.merge_dispatch import merge_dispatches
from moesaic.passes.merge_finish import merge_finishes
from moesaic.passes.product_shape import ProductShape, product_shape, takes_tail
from moesaic.passes.row_layout import Layout
from moesaic.passes.row_shape import row_config
from moesaic.passes.split_wgrads import split_wgrads

_CHOICES = {
    "select": ("", "merge", "rounds", "sort", "radix"),
    "prefetch": ("", "on", "off"),
    "tokens": ("fewest", "few", "many"),
    "tile": ("", "simt", "mma", "cooperative", "pingpong", "swapped"),
    "dispatch": ("", "steps"),
}

_ALIGNMENTS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Specialize(Pass):
    """Chooses template parameters.

    Options:
        target: the GPU architecture the kernels are for.
        lanes, threads: override the rule for row programs (0: the rule decides). More than 32 lanes are a whole block.
        select: override how a top-k selects: merge (up to 32 lanes), rounds, sort or radix (32 lanes or more); empty:
            the rule decides.
        listed: override how many of its values a lane lists for merging, a power of two (0: the rule decides).
        prefetch: override whether a row is fetched while the one before is worked on: on or off (empty: the rule).
        resident: override how many blocks a multiprocessor should hold at least, which bounds registers (0: rule).
        tile: override what tiles of products are computed by, where it is possible: simt, mma, or,
            on Hopper, wgmma by its schedule, cooperative or pingpong, or with its operands swapped (empty: the rule).
        dispatch: override whether a dispatch may be one launch: steps, which takes three (empty: the rule).
        allow_tf32: whether products of float32 operands may round them to tf32.
        tokens: fewest, few or many: few tokens fill a GPU only if many lanes share one. The fewest are few, too, and
            one cluster has them all, so that sums over them need no second kernel.
        alignment: bytes each input of the first function is known to be aligned to (its address and its row stride);
            an input without an entry has 16.
        points: what was found to be fast for single kernels, in place of the rule, as ``kernel:name=value:...``; see
            ``space.py`` for the names. An override above goes before it.
    """

    name: ClassVar[str] = "specialize"
    requires: ClassVar[str | None] = "planned"
    establishes: ClassVar[str | None] = "planned"

    target: str = "sm_90a"
    lanes: int = 0
    threads: int = 0
    select: str = ""
    listed: int = 0
    prefetch: str = ""
    resident: int = 0
    tile: str = ""
    dispatch: str = ""
    allow_tf32: bool = False
    tokens: str = "many"
    alignment: tuple[int, ...] = ()
    points: tuple[str, ...] = ()

    def run(self, module: Module, context: PassContext) -> bool:
        for option, known in _CHOICES.items():
            value = getattr(self, option)
            if value not in known:
                shown = ", ".join(repr(k) for k in known if k)
                raise UsageError(
                    f"specialize: {option} must be one of {shown}, found {value!r}{suggestion(value, known)}"
                )
        if self.listed & (self.listed - 1) or self.listed < 0:
            raise UsageError(f"specialize: listed must be a power of two, found {self.listed}")
        if self.threads % 32 or not 0 <= self.threads <= 1024:
            raise UsageError(f"specialize: threads must be a multiple of 32, at most 1024, found {self.threads}")
        for found in self.alignment:
            if found not in _ALIGNMENTS:
                shown = ", ".join(map(str, _ALIGNMENTS))
                raise UsageError(f"specialize: alignment must be of {shown} bytes, found {found}")
        points = dict(map(parse_point, self.points))
        for function in module.functions:
            given = self.alignment if function is module.entry else ()
            aligned: dict[Value, int] = dict(zip(function.arguments, given, strict=False))
            self.rewrite(function, aligned)
            for op in function.body.ops:
                if isinstance(op, Kernel):
                    self.configure(op, aligned, points.get(op.symbol, {}))
            begin_early(function)
            count_items(function)
        return True

    def rewrite(self, function: Function, aligned: Mapping[Value, int]) -> None:
        """Makes the launches of a planned function those of the target. What is rewritten stays as it is."""
        if self.dispatch != "steps":
            merge_dispatches(function, self.target)
        if self.tokens == "fewest":
            merge_finishes(function, self.target, lambda op: self.config(op, aligned, {}))
        drop_tickets(function, self.target)
        split_wgrads(function, lambda op: self._tile(op, aligned), self.few_or_many)

    @property
    def few_or_many(self) -> str:
        """What is known of T, for all that does not tell the fewest tokens from few."""
        return "many" if self.tokens == "many" else "few"

    @property
    def overrides(self) -> bool:
        """Whether an option takes a choice out of the rule's hands."""
        plain = Specialize()
        names = ("lanes", "threads", "select", "listed", "prefetch", "resident", "tile", "points")
        return any(getattr(self, n) != getattr(plain, n) for n in names)

    def configure(self, op: Kernel, aligned: Mapping[Value, int], point: Mapping[str, str]) -> None:
        """Writes the configuration of a kernel into it."""
        config = self.config(op, aligned, point)
        op.attributes["config"] = ("target=" + self.target, *(f"{k}={v}" for k, v in config.items()))

    def config(
        self,
        op: Kernel,
        aligned: Mapping[Value, int],
        point: Mapping[str, str],
        layouts: dict[Value, Layout] | None = None,
    ) -> dict[str, str]:
        """The configuration of a kernel: that of the rule, but for the choices of a point of its space.

        Args:
            op: the kernel.
            aligned: bytes that inputs are known to be aligned to.
            point: choices by name; those that it lacks are the rule's.
            layouts: of a row program, where they are known already.

        Raises:
            UsageError, UnsupportedError: the kernel cannot be configured like that; says why.
        """
        if op.template == "row_program":
            typed: dict[str, Any] = {n: int(v) if v.isdigit() else v for n, v in point.items()}
            free = {n: v for n, v in typed.items() if not getattr(self, n)}
            return row_config(op, replace(self, points=(), **free), aligned, layouts)
        if op.template == "col_finish":
            return finish_config(op, self.target)
        alignment = {"alignment": ",".join(str(aligned.get(v, 16)) for v in op.operands[: op.reads])}
        if op.template in ("dispatch", "dispatch_count"):
            return {**dispatch_config(op, self.few_or_many), **alignment}
        if op.template.startswith("dispatch"):
            return dispatch_config(op, self.few_or_many)
        assert op.region is not None
        if op.template in ("product", "wgrad"):
            shape = self._tile(op, aligned)
            tail = {"tail": str(shape.tail)} if shape.fetches and takes_tail(op.region) else {}
            return {**shape.chosen({**shape.config(), **tail}, point), **alignment}
        return {"threads": point.get("threads", "256"), **alignment}

    def _tile(self, op: Kernel, aligned: Mapping[Value, int]) -> ProductShape:
        """The rule's tile of a product or of a gradient."""
        assert op.region is not None
        # Rows in pieces of less than 16 bytes keep warps that fetch too busy. Numbers of picks are no such rows.
        read = [
            v
            for v, inner in zip(op.operands[: op.reads], op.region.arguments, strict=True)
            if v.type.dtype.bytes == 2 and v.type.rank > 1 and _in_rows(op.region, inner)
        ]
        whole = all(aligned.get(v, 16) >= 16 and columns_of(v) * v.type.dtype.bytes % 16 == 0 for v in read)
        hopper = self.target == "sm_90a" and whole
        return product_shape(op.region, tile=self.tile, hopper=hopper, allow_tf32=self.allow_tf32)


def point_text(symbol: str, point: Mapping[str, str]) -> str:
    """A point as an element of the option `points`."""
    return ":".join((symbol, *(f"{name}={value}" for name, value in point.items())))


def parse_point(text: str) -> tuple[str, dict[str, str]]:
    """The kernel and the choices that an element of the option `points` names.

    Raises:
        UsageError: it is not written like one.
    """
    symbol, *choices = text.split(":")
    pairs = [c.partition("=") for c in choices]
    if not symbol or not pairs or not all(name and value for name, _, value in pairs):
        raise UsageError(f"specialize: points are written kernel:name=value:..., found {text!r}")
    return symbol, {name: value for name, _, value in pairs}


def _in_rows(region: Block, argument: Value) -> bool:
    """Whether a kernel reads an operand in rows, rather than one number of it for each slot."""
    users = region.users(argument)
    return not users or any(not isinstance(user, slot.OfPick) for user in users)

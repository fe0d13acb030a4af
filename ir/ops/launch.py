"""``launch.``: after planning, buffers and launches in order.

A ``launch.kernel`` takes what it reads, then what it writes; it has no results. Its region (row programs) still holds
the fused ops, and its yield lists the values in the order of the written buffers. ``specialize`` fills in the
configuration.
"""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.ir import core
from moesaic.ir.core import Op, result
from moesaic.ir.errors import suggestion
from moesaic.ir.types import TensorType


class Alloc(Op):
    """A buffer: a result handed to the caller, or a slot of the workspace that later buffers may reuse."""

    name = "launch.alloc"
    pure = False
    buffer = result("the buffer")
    type = core.string("its tensor type")
    space = core.string("who owns it", choices=("result", "workspace"))
    slot = core.integer("workspace slot; buffers of one slot never live at once", minimum=0, default=0)

    def infer(self) -> Sequence[TensorType]:
        return [TensorType.parse(self.type)]


class Kernel(Op):
    """One launch of one kernel of a template family.

    The region of a dispatch, or of a step of it, is empty: `facts` say all there is to say.
    """

    name = "launch.kernel"
    variadic = True
    pure = False
    has_region = True
    symbol = core.string("name of the kernel")
    template = core.string("template family: the name of the ``kernel.`` op that it carries out")
    reads = core.integer("how many of the operands are read; the rest are written", minimum=0)
    blocks = core.string("symbol that stands for the number of blocks", default="")
    partials = core.integer("how many operands are partial rows of sums: the first", minimum=0, default=0)
    counted = core.boolean("whether blocks count the items they take, in an operand after the results", default=False)
    zeroes = core.integer(
        "how many operands, the last, are such counts of later kernels, set to 0", minimum=0, default=0
    )
    early = core.boolean(
        "whether it begins beside the kernels before, of which it needs nothing, and waits for them at its end",
        default=False,
    )
    facts = core.strings("what does not follow from the region, as name=value", default=())
    config = core.strings("configuration chosen by `specialize`, as name=value", default=())

    def verify(self) -> None:
        if f"kernel.{self.template}" not in core.OPS:
            near = suggestion(self.template, [n.removeprefix("kernel.") for n in core.OPS if n.startswith("kernel.")])
            self.fail(f"there is no op kernel.{self.template}{near}, so no template of that name")
        if self.reads > len(self.operands):
            self.fail(f"reads {self.reads} of {len(self.operands)} operands")
        counts = self.counted + self.zeroes
        if self.reads + counts > len(self.operands):
            self.fail(f"reads {self.reads} and counts items in {counts} of {len(self.operands)} operands")
        if self.region is not None and not self.region.arguments and self.template.startswith("dispatch"):
            return
        if self.region is None or len(self.region.arguments) != self.reads:
            self.fail(f"the region must have one argument for each of the {self.reads} operands read")
        if len(self.region.terminator.operands) != len(self.stored):
            self.fail(f"the region must yield one value for each of the {len(self.stored)} written")

    @property
    def written(self) -> list[core.Value]:
        """What it writes: results, then counts of items."""
        return self.operands[self.reads :]

    @property
    def stored(self) -> list[core.Value]:
        """The buffers of its results."""
        return self.operands[self.reads : len(self.operands) - self.counted - self.zeroes]

    @property
    def counter(self) -> int | None:
        """The number of the operand in which blocks count the items that they take."""
        return len(self.operands) - self.zeroes - 1 if self.counted else None

    @property
    def known(self) -> dict[str, str]:
        """Facts by name."""
        return dict(item.split("=", 1) for item in self.facts)

    @property
    def configuration(self) -> dict[str, str]:
        """The choices of `specialize` by name."""
        return dict(item.split("=", 1) for item in self.config)

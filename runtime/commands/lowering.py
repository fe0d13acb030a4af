"""From a module to kernels and their resources, without torch or a driver."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moesaic.ir.core import Module
from moesaic.ir.errors import InputError, UsageError, suggestion
from moesaic.passes.instruments import History, LogPasses
from moesaic.passes.manager import Instrument, Pass, PassContext, PassManager, parse_pipeline, pipeline_text
from moesaic.passes.specialize import Specialize
from moesaic.runtime import reproducer
from moesaic.runtime.commands import console
from moesaic.runtime.side_by_side import side_by_side

if TYPE_CHECKING:
    from moesaic.codegen.kernel import GeneratedKernel
    from moesaic.codegen.nvrtc import CompiledKernel
    from moesaic.codegen.target import Target


@dataclass(frozen=True)
class Lowered:
    """A module at the end of its pipeline, how it got there, and its kernels in order."""

    module: Module
    stages: Mapping[str, str]
    context: PassContext
    kernels: tuple[GeneratedKernel, ...]
    target: Target


def passes_for(pipeline: str, target: Target) -> list[Pass]:
    """The passes of a pipeline, specialised for `target` where it does not name another.

    Raises:
        UsageError: the pipeline is not well formed, or does not end where code generation starts.
    """
    passes = parse_pipeline(pipeline)
    if not passes or not isinstance(passes[-1], Specialize):
        raise UsageError(
            f"the pipeline {pipeline_text(passes)!r} makes no kernels: it has to end in specialize; "
            "use default, forward, or leave it out"
        )
    plain = Specialize().target
    return [
        dataclasses.replace(p, target=target.name) if isinstance(p, Specialize) and p.target == plain else p
        for p in passes
    ]


def lower(module: Module, passes: Sequence[Pass], instruments: Sequence[Instrument] = ()) -> Lowered:
    """Runs the passes of :func:`passes_for` over `module`, in place, and generates the kernels.

    Raises:
        InputError, UnsupportedError: this module cannot be compiled; says why.
    """
    from moesaic.codegen.generate import generate_kernels
    from moesaic.codegen.target import Target

    last = passes[-1]
    assert isinstance(last, Specialize)
    history, context = History(), PassContext()
    if not any(isinstance(i, reproducer.Reproduce) for i in instruments):
        instruments = [reproducer.Reproduce(None), *instruments]
    with reproducer.kept(str(module), pipeline_text(passes), "moesaic compile"):
        PassManager(passes, [history, LogPasses(context), *instruments]).run(module, context)
        kernels = tuple(k for f in module.functions for k in generate_kernels(f))
    if not kernels:
        raise InputError(f"@{module.entry.name} needs no kernel: it computes nothing")
    return Lowered(module, history.stages, context, kernels, Target.parse(last.target))


def chosen(kernels: Sequence[GeneratedKernel], name: str | None) -> list[GeneratedKernel]:
    """The kernels, or the one of that name.

    Raises:
        UsageError: there is none.
    """
    if name is None:
        return list(kernels)
    known = [k.symbol for k in kernels]
    if name not in known:
        raise UsageError(f"no kernel {name!r}{suggestion(name, known)}; there are: {', '.join(known)}")
    return [k for k in kernels if k.symbol == name]


def all_compiled(
    kernels: Sequence[GeneratedKernel], target: Target, *, lineinfo: bool | None = None
) -> list[CompiledKernel]:
    """Kernels as the runtime would compile them: from the cache, else by NVRTC; `lineinfo` as for `compiled_kernel`."""
    from moesaic.runtime.kernels import compiled_kernel

    what = kernels[0].symbol if len(kernels) == 1 else f"{len(kernels)} kernels"
    with console.progress(f"compiling {what} for {target}"):
        return side_by_side(lambda kernel: compiled_kernel(kernel, target, lineinfo=lineinfo), kernels)


RESOURCE_HEADER = ("kernel", "target", "regs", "spills", "stack", "shared", "threads", "blocks/SM", "cubin", "ms")
RESOURCE_RIGHT = range(2, len(RESOURCE_HEADER))


def resource_record(kernel: GeneratedKernel, made: CompiledKernel) -> dict[str, Any]:
    """What a compiled kernel uses, for JSON and for a row of the table."""
    used = made.resources
    shared = used.static_shared_bytes + kernel.shared_bytes
    blocks = made.target.occupancy(used.registers, shared, kernel.threads)
    return {
        "kernel": kernel.symbol,
        "target": made.target.name,
        **dataclasses.asdict(used),
        "dynamic_shared_bytes": kernel.shared_bytes,
        "threads": kernel.threads,
        "blocks_per_sm": blocks,
        "cubin_bytes": len(made.cubin),
        "compile_ms": round(1e3 * made.seconds, 1),
    }


def resource_row(record: Mapping[str, Any]) -> list[object]:
    """A row under `RESOURCE_HEADER`; spills are bytes stored and loaded per thread, shared memory is per block."""
    return [
        record["kernel"],
        record["target"],
        record["registers"],
        record["spill_store_bytes"] + record["spill_load_bytes"],
        record["stack_bytes"],
        record["static_shared_bytes"],
        record["threads"],
        record["blocks_per_sm"],
        record["cubin_bytes"],
        f"{record['compile_ms']:.0f}",
    ]

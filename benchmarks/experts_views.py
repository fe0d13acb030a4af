"""What can be said of experts without timing them: floors, memory that is planned, what kernels need."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from compiled import needs_of
from experts_bounds import NOMINAL_DENSE
from experts_cases import (
    Case,
    load_of,
    make_picks,
)
from experts_kernels import KINDS, distinct_launches, executable_of, launches_of
from experts_options import PASSES, tokens_of
from experts_rows import (
    GOALS,
    SAVED_GOAL,
    KernelRow,
    Row,
    line,
    print_kernels,
    print_rows,
)
from timing import (
    Machine,
    measure_machine,
)

from moesaic.codegen.target import Target
from moesaic.runtime.memory import memory_of


def run_dry(args: argparse.Namespace) -> int:
    """Floors and goals, at the nominal rate of a dense product and, without a GPU, of a copy kernel."""
    machine = measure_machine() if torch.cuda.is_available() else Machine()
    machine.print()
    print(f"dense bf16 product: {NOMINAL_DENSE / 1e12:.0f} TFLOP/s, assumed")
    generator = torch.Generator().manual_seed(args.seed)
    target = Target.parse(args.arch)
    rows = [
        Row("rows", case, tokens, which, "random", load_of(case, picks), GOALS.get((case.name, tokens, which)))
        for case in args.cases
        for tokens in tokens_of(args, case)
        for picks in [make_picks(case, tokens, generator)]
        for which in PASSES
    ]
    print("\nExperts")
    print_rows(rows, machine, header=True)
    first = args.cases[0]
    tokens = max(tokens_of(args, first))
    load = load_of(first, make_picks(first, tokens, generator))
    launches = distinct_launches(first, target, tokens)
    print("\nKernels alone")
    metadata = KernelRow.metadata(first, load, [launch for launch in launches if launch.is_metadata])
    print_kernels([metadata, *(KernelRow.of(first, load, launch) for launch in launches)], machine)
    print("\nMemory")
    print_planned_memory(args.cases, lambda case: tokens_of(args, case), target)
    return 0


def print_planned_memory(cases: Sequence[Case], tokens_of: Callable[[Case], Sequence[int]], target: Target) -> None:
    """What plans of ours allocate."""
    print(
        f"{'planned, MB':12}  {'T':>5}  {'saved':>8}  {'least':>8}  {'workspace':>9}  {'of bwd':>8}  "
        "least: h; x is the caller's"
    )
    for case in cases:
        for tokens in tokens_of(case):
            planned = memory_of(case.program, target.name, tokens)
            least = 4 * tokens * case.top_k * case.intermediate
            numbers = (planned.saved, least, planned.workspace, planned.backward_workspace)
            saved, kept, workspace, backward = (n / 1e6 for n in numbers)
            goal = ""
            if (case.name, tokens) == ("qwen3", 16384):
                goal = f"  goal: <= {SAVED_GOAL / 1e6:.0f}, {'met' if planned.saved <= SAVED_GOAL else 'no'} by plan"
            print(
                f"{case.name:12}  {tokens:5}  {saved:8.1f}  {kept:8.1f}  {workspace:9.1f}  {backward:8.1f}{goal}",
                flush=True,
            )


_NEEDS = (
    ("case", -8), ("T", -4), ("of", -8), ("kernel", -16), ("as", -24), ("threads", 7), ("regs", 4), ("spills", 6),
    ("stack", 5), ("shared", 6), ("blocks/SM", 9), ("warps", 5), ("SASS", 5), ("MMA", 4), ("", -12),
)  # fmt: skip


def run_resources(args: argparse.Namespace) -> int:
    """What each kernel needs of the hardware, compiled here; fails if one uses local memory."""
    target = Target.parse(args.arch)
    print(
        f"target {target}; SASS and MMA: instructions and matrix products in the text of the kernel, loops counted once"
    )
    print(line([name for name, _ in _NEEDS], _NEEDS))
    local = 0
    for case in args.cases:
        known: set[str] = set()
        for bucket, tokens in (("many", None), ("few", 1)):
            for kind in KINDS:
                for launch in launches_of(kind, executable_of(case, kind, target, tokens=tokens)):
                    if launch.kernel.source in known:  # the same for inference and training, for few and many
                        continue
                    known.add(launch.kernel.source)
                    needs = needs_of(launch.kernel, target)
                    used = needs.used
                    local += used.uses_local_memory
                    cells = [
                        case.name,
                        bucket,
                        kind,
                        launch.name,
                        launch.tile,
                        launch.kernel.threads,
                        used.registers,
                        used.spill_store_bytes + used.spill_load_bytes,
                        used.stack_bytes,
                        needs.shared_bytes,
                        needs.blocks,
                        f"{needs.warps:.0%}",
                        needs.count(),
                        needs.count("HMMA", "HGMMA"),
                        "LOCAL MEMORY" if used.uses_local_memory else "",
                    ]
                    print(line([str(c) for c in cells], _NEEDS), flush=True)
    print(f"{local} kernels use local memory")
    return 1 if local else 0

"""``moesaic show``: a layer from its declaration to its machine code, in a terminal or as one HTML file."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moesaic.ir.errors import InputError, MoesaicError, ToolchainError, UsageError, suggestion
from moesaic.passes.instruments import VerifyEach
from moesaic.runtime.commands import console, inputs, listings, lowering, reporting, text
from moesaic.runtime.commands.verbs import Verbs

if TYPE_CHECKING:
    from moesaic.codegen.kernel import GeneratedKernel
    from moesaic.codegen.listing import Line, Listing
    from moesaic.ir.core import Module

_EXAMPLES = """
Differences ignore indentation and the numbers of unnamed values: what only moved has not changed.

examples:
  moesaic show router.moe                                      every stage, then the CUDA
  moesaic show router.moe --side-by-side                       each op beside its CUDA
  moesaic show router.moe --stage expand-rows                  the IR after one pass, as it is
  moesaic show router.moe --stage expand-rows --side-by-side   the IR before and after it
  moesaic show router.moe --linked --kernel route_rows         CUDA, PTX and SASS of each op
  moesaic show router.moe --linked --side-by-side              the same in four columns
  moesaic show router.moe --op row.topk                        the same of some ops
  moesaic show layer.py --dtype bf16 --html layer.html         everything on one page, linked
"""


def add(verbs: Verbs) -> None:
    """Declares the verb."""
    parser = verbs.add("show", run, "show the IR after each pass and the CUDA, op by op", _EXAMPLES, "FILE")
    parser.add_argument("file", metavar="FILE", help=inputs.FILE_HELP)
    parser.add_argument("--stage", metavar="NAME", help="only this stage: declared, the name of a pass, or cuda")
    parser.add_argument("--side-by-side", action="store_true", help="two columns: op and CUDA, or before and after")
    parser.add_argument("--linked", action="store_true", help="the CUDA, PTX and SASS that come from each op")
    parser.add_argument("--op", metavar="NAME", help="the same of one op: a result such as scores, or row.topk")
    parser.add_argument("--kernel", metavar="NAME", help="only this kernel")
    parser.add_argument("--html", metavar="FILE", help="write one HTML file, which needs nothing but itself")
    parser.add_argument("--arch", metavar="ARCH", help="GPU architecture (default: MOESAIC_ARCH, sm_90a)")
    parser.add_argument("-p", "--pass-pipeline", metavar="PIPELINE", default="default", help="default: %(default)s")
    parser.add_argument("--dtype", help="of the logits, for a .py router declared without one")


def run(arguments: argparse.Namespace) -> int:
    """The verb."""
    from moesaic.codegen.target import Target

    target = Target.parse(arguments.arch) if arguments.arch else Target.default()
    if arguments.html is not None and (arguments.stage or arguments.op or arguments.linked or arguments.side_by_side):
        raise UsageError("--html shows everything; leave --stage, --side-by-side, --linked and --op out")
    module = inputs.read_module(arguments.file, arguments.dtype)
    declared = module.clone()
    passes = lowering.passes_for(arguments.pass_pipeline, target)
    try:
        lowered = lowering.lower(module, passes, [VerifyEach()])
    except MoesaicError as error:
        if error.exit_code != InputError.exit_code:
            raise
        reporting.show(reporting.messages(error, module))
        return error.exit_code
    if arguments.stage is not None:
        _one_stage(lowered, arguments.stage, arguments.side_by_side)
        return 0
    kernels = lowering.chosen(lowered.kernels, arguments.kernel)
    if arguments.html is not None:
        _page(lowered, kernels, declared, arguments)
        return 0
    if arguments.linked and arguments.side_by_side and arguments.op is None:
        _four_columns(lowered, kernels)
        return 0
    if arguments.linked or arguments.op is not None:
        _linked(lowered, kernels, arguments.op)
        return 0
    if arguments.side_by_side:
        for kernel in kernels:
            print(console.heading(kernel.symbol, "IR op │ CUDA"))
            print("\n".join(text.op_beside_code(kernel.source, console.page())))
            print()
        return 0
    stages(lowered)
    decisions(lowered)
    for kernel in kernels:
        print(console.heading(f"{kernel.symbol}.cu", f"for {lowered.target}"))
        print(text.cuda(kernel.source))
        print()
    return 0


def stages(lowered: lowering.Lowered) -> None:
    """Prints the declaration and what each pass changed in it."""
    before = ""
    for name, after in lowered.stages.items():
        if not before:
            print(console.heading(name, "the layer as IR"))
            print(text.ir(after))
            print()
        else:
            changed = text.readable_difference(before, after)
            if changed:
                print(console.heading(name, listings.pass_summary(name)))
                print(text.colored_difference(changed))
                print()
        before = after


def decisions(lowered: lowering.Lowered) -> None:
    """Prints what the passes decided and what they warn of."""
    if lowered.context.remarks or lowered.context.warnings:
        print(console.heading("decisions"))
        for line in lowered.context.remarks:
            print(_item(line))
        for line in lowered.context.warnings:
            print(_item(f"warning: {line}"))
        print()


def _item(line: str) -> str:
    return textwrap.fill(line, console.width(), initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)


def _one_stage(lowered: lowering.Lowered, name: str, side_by_side: bool) -> None:
    if name == "cuda":
        for kernel in lowered.kernels:
            print(text.cuda(kernel.source))
        return
    known = list(lowered.stages)
    if name not in known:
        near = suggestion(name, [*known, "cuda"])
        raise InputError(f"no stage {name!r}{near}; passes that changed this layer: {', '.join([*known, 'cuda'])}")
    if not side_by_side:
        print(lowered.stages[name], end="")
        return
    position = known.index(name)
    before = lowered.stages[known[position - 1]] if position else ""
    columns = console.page() or 200
    half = (columns - 3) // 2
    print(console.styled(f"{(known[position - 1] if position else ''):{half}}   {name}", "bold"))
    print("\n".join(text.beside(before, lowered.stages[name], columns)))


def _listings(
    lowered: lowering.Lowered, kernels: Sequence[GeneratedKernel]
) -> tuple[list[tuple[GeneratedKernel, Listing]], list[str]]:
    """Kernels with their lines, and why some lines are missing, if any are."""
    from moesaic.codegen.listing import listing
    from moesaic.runtime.kernels import source_of

    made, notes = [], []
    every = lowering.all_compiled(kernels, lowered.target, lineinfo=True)
    for kernel, compiled in zip(kernels, every, strict=True):
        source = source_of(kernel)
        try:
            lines = listing(kernel, source, compiled.ptx, compiled.cubin)
        except ToolchainError as error:  # only SASS needs a tool that may be missing
            notes.append(f"no SASS: {str(error).splitlines()[0]}")
            lines = listing(kernel, source, compiled.ptx, None)
        made.append((kernel, lines))
    return made, list(dict.fromkeys(notes))


def _page(
    lowered: lowering.Lowered, kernels: Sequence[GeneratedKernel], declared: Module, arguments: argparse.Namespace
) -> None:
    from moesaic.runtime.commands.page import page
    from moesaic.runtime.explain import explain
    from moesaic.runtime.program import program_of

    made, notes = _listings(lowered, kernels)
    training = arguments.pass_pipeline != "forward"
    explanation = explain(program_of(declared), lowered.target, training=training, lineinfo=True)
    if arguments.pass_pipeline not in ("default", "forward"):
        notes.append(f"costs are those of the default pipeline, kernels those of {arguments.pass_pipeline}")
    title = f"@{declared.entry.name} of {arguments.file}"
    said = [*lowered.context.remarks, *(f"warning: {w}" for w in lowered.context.warnings)]
    content = page(title, lowered.target.name, made, lowered.stages, said, explanation, notes)
    inputs.write_file(Path(arguments.html), content.encode())
    for note in notes:
        console.say(note, kind="warning")
    console.say(f"wrote {arguments.html}, {console.size(len(content.encode()))}")


def _linked(lowered: lowering.Lowered, kernels: Sequence[GeneratedKernel], wanted: str | None) -> None:
    """Prints the lines of ops: of all, or of those that make a result or have a name like `wanted`."""
    from moesaic.codegen.listing import KERNEL

    made, notes = _listings(lowered, kernels)
    known: dict[str, None] = {}
    found = False
    for kernel, lines in made:
        for number, op in enumerate(lines.ops):
            results, _, rest = op.comment.partition(" = ")
            names = [*(r.strip().lstrip("%") for r in results.split(",")), rest.partition(" ")[0]]
            known |= dict.fromkeys(names)
            if wanted is None or wanted.lstrip("%") in names:
                found = True
                print(console.heading(kernel.symbol, str(op)))
                _print_lines(lines, number)
        if wanted is None:
            print(console.heading(kernel.symbol, "around the ops: loops, addresses, stores"))
            _print_lines(lines, KERNEL)
    for note in notes:
        console.say(note, kind="warning")
    if not found and wanted is not None:
        raise InputError(f"no op {wanted!r}{suggestion(wanted, known)}; there are: {', '.join(known)}")


def _four_columns(lowered: lowering.Lowered, kernels: Sequence[GeneratedKernel]) -> None:
    """Prints op, CUDA, PTX and SASS beside one another, line of CUDA by line of CUDA."""
    made, notes = _listings(lowered, kernels)
    columns = console.page() or 200
    widths = [(columns - 9) * share // 10 for share in (2, 3, 2, 3)]
    for kernel, lines in made:
        print(console.heading(kernel.symbol, "IR op │ CUDA │ PTX │ SASS"))
        for cells in text.four_columns(lines):
            shown = (_cut(cell, width) for cell, width in zip(cells, widths, strict=True))
            print(f" {console.styled('│', 'dim')} ".join(shown).rstrip())
        print()
    for note in notes:
        console.say(note, kind="warning")


def _cut(cell: str, width: int) -> str:
    return (cell if len(cell) <= width else cell[: width - 1] + "…").ljust(width)


def _print_lines(lines: Listing, op: int) -> None:
    numbers = lines.cuda_lines(op)
    if not numbers:
        print("no line of its own: done where its operand is loaded or its result stored\n")
        return
    for number in numbers:
        print(f"{number:5}  {lines.cuda[number - 1]}")
    for kind in ("ptx", "sass"):
        found: Sequence[Line] = lines.lines(kind, op)
        print(console.styled(f"{kind.upper()}, {len(found)} lines", "bold"))
        for line in found:
            print(f"{line.source:5}  {line.text.strip()}")
    print()

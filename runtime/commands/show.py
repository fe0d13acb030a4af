"""``moesaic show``: a layer from its declaration to its CUDA, on one page."""

from __future__ import annotations

import argparse
import textwrap

from moesaic.ir.errors import InputError, MoesaicError, suggestion
from moesaic.passes.instruments import VerifyEach
from moesaic.runtime.commands import console, inputs, listings, lowering, reporting, text
from moesaic.runtime.commands.verbs import Verbs

_EXAMPLES = """
Differences ignore indentation and the numbers of unnamed values: what only moved has not changed.

examples:
  moesaic show router.moe                                      every stage, then the CUDA
  moesaic show router.moe --side-by-side                       each op beside its CUDA
  moesaic show router.moe --stage expand-rows                  the IR after one pass, as it is
  moesaic show router.moe --stage expand-rows --side-by-side   the IR before and after it
"""


def add(verbs: Verbs) -> None:
    """Declares the verb."""
    parser = verbs.add("show", run, "show the IR after each pass and the CUDA, op by op", _EXAMPLES, "FILE")
    parser.add_argument("file", metavar="FILE", help=inputs.FILE_HELP)
    parser.add_argument("--stage", metavar="NAME", help="only this stage: declared, the name of a pass, or cuda")
    parser.add_argument("--side-by-side", action="store_true", help="two columns: op and CUDA, or before and after")
    parser.add_argument("--arch", metavar="ARCH", help="GPU architecture (default: MOESAIC_ARCH, sm_90a)")
    parser.add_argument("-p", "--pass-pipeline", metavar="PIPELINE", default="default", help="default: %(default)s")
    parser.add_argument("--dtype", help="of the logits, for a .py router declared without one")


def run(arguments: argparse.Namespace) -> int:
    """The verb."""
    from moesaic.codegen.target import Target

    target = Target.parse(arguments.arch) if arguments.arch else Target.default()
    module = inputs.read_module(arguments.file, arguments.dtype)
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
    if arguments.side_by_side:
        for kernel in lowered.kernels:
            print(console.heading(kernel.symbol, "IR op │ CUDA"))
            print("\n".join(text.op_beside_code(kernel.source, console.page())))
            print()
        return 0
    stages(lowered)
    decisions(lowered)
    for kernel in lowered.kernels:
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

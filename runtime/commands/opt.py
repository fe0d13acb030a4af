"""``moesaic opt``: reads IR, runs passes, prints IR; with the conventions of ``mlir-opt``."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

from moesaic.ir.core import Module
from moesaic.ir.diagnostics import DiagnosticError, Source
from moesaic.ir.errors import InputError, MoesaicError, UsageError
from moesaic.passes.instruments import LogPasses, read_reproducer
from moesaic.passes.manager import Pass, PassContext, PassManager, parse_pipeline
from moesaic.runtime.commands import expectations, inputs, pipeline_options, reporting
from moesaic.runtime.commands.expectations import Message
from moesaic.runtime.commands.verbs import Verbs

_EXAMPLES = """
examples:
  moesaic opt router.moe                              parse, verify, print
  moesaic opt router.moe -p canonicalize,cse,dce      run some passes
  moesaic opt router.moe -p default --print-ir-diff   the whole pipeline; what each pass changed
  moesaic opt cases.moe --split-input-file --verify-diagnostics
"""


def add(verbs: Verbs) -> None:
    """Declares the verb."""
    parser = verbs.add("opt", run, "run passes over IR text and print the result", _EXAMPLES, "FILE")
    parser.add_argument("file", metavar="FILE", help=inputs.FILE_HELP)
    parser.add_argument(
        "-p",
        "--pass-pipeline",
        metavar="PIPELINE",
        help="passes in order, 'a,b{option=value}', or a named pipeline: default, forward (see 'moesaic passes')",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write the result here instead of to stdout")
    parser.add_argument(
        "--split-input-file", action="store_true", help="treat parts between '// -----' lines one by one"
    )
    parser.add_argument(
        "--verify-diagnostics",
        action="store_true",
        help="compare errors and warnings with '// expected-error@+1 {{text}}' comments",
    )
    parser.add_argument("--run-reproducer", action="store_true", help="run the pipeline that the file itself names")
    parser.add_argument("--dtype", help="of the logits, for a .py router declared without one")
    pipeline_options.add(parser)


@dataclass
class _Part:
    """One piece of the input: its text, if it has one, and what came of it."""

    source: Source | None = None
    module: Module | None = None
    messages: list[Message] = field(default_factory=list)
    failed: bool = False


def run(arguments: argparse.Namespace) -> int:
    """The verb."""
    parts, pipeline = _read(arguments)
    passes = parse_pipeline(pipeline)
    for number, part in enumerate(parts, 1):
        _process(part, passes, arguments, f"{number:02d}" if len(parts) > 1 else "")
    if arguments.verify_diagnostics:
        wrong = [m for p in parts if p.source is not None for m in expectations.mismatches(p.source, p.messages)]
        failed = bool(wrong)
        reporting.show(wrong)
    else:
        failed = any(p.failed for p in parts)
        reporting.show(m for p in parts for m in p.messages)
    printed = [str(p.module) for p in parts if p.module is not None and not p.failed]
    if printed and (not failed or arguments.output is None):
        inputs.write_output(f"{inputs.SPLIT_MARK}\n".join(printed), arguments.output)
    return InputError.exit_code if failed else 0


def _read(arguments: argparse.Namespace) -> tuple[list[_Part], str]:
    """The parts of the input and the pipeline to run over them."""
    pipeline = arguments.pass_pipeline or ""
    if inputs.is_python(arguments.file):
        for option in ("split_input_file", "verify_diagnostics", "run_reproducer"):
            if getattr(arguments, option):
                raise UsageError(f"--{option.replace('_', '-')} goes with IR text, not with a .py file")
        return [_Part(module=inputs.read_module(arguments.file, arguments.dtype))], pipeline
    if arguments.dtype is not None:
        raise UsageError("--dtype goes with a .py file whose router has no dtype; IR text states its types")
    source = inputs.read_source(arguments.file)
    if arguments.run_reproducer:
        stored = read_reproducer(source.text)
        if arguments.pass_pipeline is not None:
            raise UsageError("--run-reproducer takes the pipeline from the file; leave --pass-pipeline out")
        if stored is None:
            raise InputError(f"{source.name} is not a reproducer: its first line names no pipeline")
        pipeline = stored
    return [_Part(s) for s in (inputs.split(source) if arguments.split_input_file else [source])], pipeline


def _process(part: _Part, passes: list[Pass], arguments: argparse.Namespace, name: str) -> None:
    context = PassContext()
    try:
        if part.module is None:
            assert part.source is not None
            part.module = inputs.parse_source(part.source)
        watching = [LogPasses(context), *pipeline_options.instruments(arguments, passes, name)]
        PassManager(passes, watching).run(part.module, context)
    except DiagnosticError as error:
        part.failed = True
        part.messages += reporting.messages(error)
    except MoesaicError as error:
        if error.exit_code != InputError.exit_code:
            raise
        part.failed = True
        part.messages += reporting.messages(error, part.module)
    source_name = part.source.name if part.source is not None else arguments.file
    part.messages += reporting.remarks(context, source_name)

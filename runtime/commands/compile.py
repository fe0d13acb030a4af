"""``moesaic compile``: from a declaration to CUDA, PTX, a cubin, SASS, and what the kernels need of the hardware."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from moesaic.ir import environment
from moesaic.ir.errors import InputError, MoesaicError, ToolchainError, UsageError
from moesaic.passes.instruments import SaveTree
from moesaic.runtime import reproducer
from moesaic.runtime.commands import console, inputs, lowering, pipeline_options, reporting
from moesaic.runtime.commands.verbs import Verbs

if TYPE_CHECKING:
    from moesaic.codegen.kernel import GeneratedKernel
    from moesaic.codegen.nvrtc import CompiledKernel

_EXAMPLES = """
Without --emit, prints what each kernel uses; with -o DIR, also writes everything there.

examples:
  moesaic compile router.moe --arch sm_90a                     registers, spills, shared memory
  moesaic compile router.py --dtype bf16 --emit cuda           the CUDA of all kernels
  moesaic compile router.moe --emit sass --kernel route_rows   the machine code of one kernel
  moesaic compile router.moe -o build/                         IR, .cu, .ptx, .cubin, resources.json
"""

KINDS = ("ir", "cuda", "ptx", "cubin", "sass", "resources")
_SUFFIX = {"cuda": ".cu", "ptx": ".ptx", "cubin": ".cubin", "sass": ".sass"}


def add(verbs: Verbs) -> None:
    """Declares the verb."""
    parser = verbs.add("compile", run, "compile a layer for a GPU; needs no GPU", _EXAMPLES, "FILE")
    parser.add_argument("file", metavar="FILE", help=inputs.FILE_HELP)
    parser.add_argument(
        "--arch", metavar="ARCH", help="GPU architecture, such as sm_90a (default: MOESAIC_ARCH, sm_90a)"
    )
    parser.add_argument("--emit", choices=KINDS, help="what to print or write (default: resources)")
    parser.add_argument("--kernel", metavar="NAME", help="only this kernel")
    parser.add_argument(
        "-p", "--pass-pipeline", metavar="PIPELINE", help="default: that of a reproducer's first line, else default"
    )
    parser.add_argument("--dtype", help="of the logits, for a .py router declared without one")
    parser.add_argument("-o", "--output", metavar="DIR|FILE", help="write there; a folder gets a file for each kernel")
    parser.add_argument("--json", action="store_true", help="resources as JSON")
    pipeline_options.add(parser)


def run(arguments: argparse.Namespace) -> int:
    """The verb."""
    from moesaic.codegen.target import Target

    if arguments.json and arguments.emit not in (None, "resources"):
        raise UsageError(f"--json goes with resources, not with --emit {arguments.emit}")
    target = Target.parse(arguments.arch) if arguments.arch else Target.default()
    module = inputs.read_module(arguments.file, arguments.dtype)
    pipeline = arguments.pass_pipeline or inputs.stored_pipeline(arguments.file) or "default"
    passes = lowering.passes_for(pipeline, target)
    instruments = pipeline_options.instruments(arguments, passes)
    output = _folder(arguments)
    # What is compiled goes to MOESAIC_DUMP_DIR anyway.
    instruments += [SaveTree(folder / "ir") for folder in (output, environment.DUMP_DIR.get()) if folder is not None]
    declared = str(module)
    try:
        lowered = lowering.lower(module, passes, instruments)
    except MoesaicError as error:
        if error.exit_code != InputError.exit_code:
            raise
        reporting.show(reporting.messages(error, module))
        return error.exit_code
    reporting.show(reporting.remarks(lowered.context, arguments.file))
    kernels = lowering.chosen(lowered.kernels, arguments.kernel)
    with reproducer.kept(declared, pipeline, f"moesaic compile --arch {target}"):
        if output is not None:
            _write_everything(output, lowered, kernels)
        if arguments.emit in (None, "resources"):
            _resources(lowered, kernels, arguments)
        else:
            _emit(lowered, kernels, arguments)
    return 0


def _folder(arguments: argparse.Namespace) -> Path | None:
    """The folder that gets everything: that of ``-o`` where no kind is asked for."""
    if arguments.emit is not None or arguments.output is None:
        return None
    path = Path(arguments.output)
    if path.is_file():
        raise UsageError(f"{path} is a file; without --emit, -o names a folder")
    return path


def _resources(lowered: lowering.Lowered, kernels: list[GeneratedKernel], arguments: argparse.Namespace) -> None:
    made = lowering.all_compiled(kernels, lowered.target)
    records = [lowering.resource_record(k, m) for k, m in zip(kernels, made, strict=True)]
    if arguments.json:
        text = json.dumps({"target": lowered.target.name, "kernels": records}, indent=2)
    else:
        rows = [lowering.resource_row(r) for r in records]
        text = console.table(lowering.RESOURCE_HEADER, rows, right=lowering.RESOURCE_RIGHT)
    inputs.write_output(text + "\n", arguments.output if arguments.emit else None)


def _emit(lowered: lowering.Lowered, kernels: list[GeneratedKernel], arguments: argparse.Namespace) -> None:
    if arguments.emit == "ir":
        inputs.write_output(str(lowered.module), arguments.output)
        return
    output, suffix = arguments.output, _SUFFIX[arguments.emit]
    to_folder = output is not None and output != "-" and (output.endswith("/") or Path(output).is_dir())
    if arguments.emit == "cubin" and not to_folder:
        if len(kernels) > 1:
            raise UsageError(
                f"{len(kernels)} kernels make as many cubins: choose one with --kernel, or write to -o DIR/"
            )
        if output in (None, "-") and sys.stdout.isatty():
            raise UsageError("a cubin is binary: write it with -o FILE, or send stdout somewhere else")
    made = _contents(kernels, lowered, arguments.emit)
    if to_folder:
        for name, content in made.items():
            inputs.write_file(Path(output) / f"{name}{suffix}", content)
        return
    if output is not None and output != "-":
        inputs.write_file(Path(output), b"\n".join(made.values()))
    elif arguments.emit == "cubin":
        sys.stdout.buffer.write(*made.values())
    else:
        titled = arguments.emit != "cuda" and len(made) > 1  # CUDA says in its banner what it is
        for number, (name, content) in enumerate(made.items()):
            lead = "\n" if number else ""
            title = f"// ----- {name}{suffix} -----\n" if titled else ""
            sys.stdout.write(lead + title + content.decode().rstrip("\n") + "\n")


def _contents(kernels: list[GeneratedKernel], lowered: lowering.Lowered, kind: str) -> dict[str, bytes]:
    """By kernel."""
    if kind == "cuda":
        return {kernel.symbol: kernel.source.encode() for kernel in kernels}
    return {made.name: _view(made, kind) for made in lowering.all_compiled(kernels, lowered.target)}


def _view(made: CompiledKernel, kind: str) -> bytes:
    if kind == "ptx":
        return made.ptx.encode()
    if kind == "cubin":
        return made.cubin
    from moesaic.codegen.disassemble import disassemble

    with console.progress(f"disassembling {made.name}"):
        return disassemble(made.cubin).encode()


def _write_everything(folder: Path, lowered: lowering.Lowered, kernels: list[GeneratedKernel]) -> None:
    records = []
    for kernel, made in zip(kernels, lowering.all_compiled(kernels, lowered.target), strict=True):
        records.append(lowering.resource_record(kernel, made))
        inputs.write_file(folder / f"{kernel.symbol}.cu", kernel.source.encode())
        for kind in ("ptx", "cubin", "sass"):
            try:
                content = _view(made, kind)
            except ToolchainError as error:  # only SASS needs a tool that may be missing
                console.say(f"no {kind} written: {str(error).splitlines()[0]}", kind="warning")
                continue
            inputs.write_file(folder / f"{kernel.symbol}{_SUFFIX[kind]}", content)
    report = {"target": lowered.target.name, "kernels": records}
    inputs.write_file(folder / "resources.json", (json.dumps(report, indent=2) + "\n").encode())
    console.say(f"wrote {folder}")

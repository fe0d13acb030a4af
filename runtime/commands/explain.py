"""``moesaic explain``: what each kernel must move and compute, what it uses, and how far from its floor it is."""

from __future__ import annotations

import argparse

from moesaic.ir.errors import UsageError
from moesaic.runtime import reproducer
from moesaic.runtime.commands import console, inputs
from moesaic.runtime.commands.verbs import Verbs

_EXAMPLES = """
Rates are those of the GPU here, else of an H100; kernels are timed if the GPU here can run them.

examples:
  moesaic explain router.moe                        forward and backward, 16384 tokens
  moesaic explain layer.moe --tokens 512 --forward  inference, few tokens
  moesaic explain layer.py --live 0.125             an eighth of the picks are here
  moesaic explain router.moe --json
"""


def add(verbs: Verbs) -> None:
    """Declares the verb."""
    parser = verbs.add("explain", run, "show bytes, FLOPs, floors and resources of each kernel", _EXAMPLES, "FILE")
    parser.add_argument("file", metavar="FILE", help=inputs.FILE_HELP)
    parser.add_argument("--tokens", metavar="T", type=int, default=16384, help="default: %(default)s")
    parser.add_argument("--forward", action="store_true", help="inference alone, which keeps nothing for backward")
    parser.add_argument("--live", metavar="SHARE", type=float, default=1.0, help="of picks that are here (default: 1)")
    parser.add_argument("--arch", metavar="ARCH", help="GPU architecture (default: MOESAIC_ARCH, the GPU's, sm_90a)")
    parser.add_argument("--dtype", help="of the logits or rows, for a .py file that declares none")
    parser.add_argument("--no-measure", action="store_true", help="time nothing, even if there is a GPU")
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> int:
    """The verb."""
    from moesaic.codegen.target import Target
    from moesaic.runtime.explain import explain
    from moesaic.runtime.program import program_of

    if arguments.tokens < 0:
        raise UsageError(f"--tokens must be 0 or more, found {arguments.tokens}")
    if not 0.0 <= arguments.live <= 1.0:
        raise UsageError(f"--live is a share, from 0 to 1, found {arguments.live:g}")
    module = inputs.read_module(arguments.file, arguments.dtype)
    with reproducer.kept(str(module), "default", "moesaic explain"), console.progress("compiling"):
        if arguments.no_measure or not _has_gpu():
            target = Target.parse(arguments.arch) if arguments.arch else Target.default()
            made = explain(
                program_of(module), target, arguments.tokens, training=not arguments.forward, live=arguments.live
            )
        else:
            from moesaic.runtime.compile import compile

            made = compile(module, target=arguments.arch).explain(
                arguments.tokens, training=not arguments.forward, live=arguments.live
            )
    console.print_json(made.as_dict()) if arguments.json else print(made)
    return 0


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()

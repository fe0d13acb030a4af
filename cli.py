"""The command line: ``moesaic VERB ...``. The verbs are in ``moesaic.runtime.commands``."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from moesaic import __version__
from moesaic.ir.errors import InternalError, MoesaicError, UsageError, suggestion
from moesaic.runtime import logs, reproducer
from moesaic.runtime.commands import (
    cache,
    compile,
    console,
    demo,
    doctor,
    explain,
    listings,
    opt,
    reporting,
    run,
    show,
    tune,
)
from moesaic.runtime.commands.verbs import Verbs

_EPILOG = """\
Results go to stdout, reports to stderr. Exit codes: 0 done, 1 a fault in the input, 2 a fault in
the command line, 3 something is missing here (see 'moesaic doctor'), 70 a fault of moesaic itself.

examples:
  moesaic demo                                   every step for one model's router, without a GPU
  moesaic show router.moe                        the IR after each pass, and the CUDA
  moesaic opt router.moe -p canonicalize,cse     run passes
  moesaic compile router.moe --arch sm_90a       registers, spills and shared memory of each kernel
  moesaic explain router.moe                     bytes, floors and occupancy of each kernel
  moesaic run router.moe --backend emulate --check
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; gives its exit code. `argv` is without the program's name (None: that of the process)."""
    given = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a rule shows a question mark
    try:
        code = _run(given)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read the output has seen enough. Nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _run(given: list[str]) -> int:
    parser, verbs = _parser()
    try:
        if given and not given[0].startswith("-") and given[0] not in verbs:
            near = suggestion(given[0], verbs)
            raise UsageError(f"unknown command {given[0]!r}{near}; there are: {', '.join(verbs)}")
        arguments = parser.parse_args(given)
        logs.configure()
    except SystemExit as stop:  # argparse has said why
        return stop.code if isinstance(stop.code, int) else UsageError.exit_code
    except UsageError as error:
        console.say(str(error), kind="error")
        return error.exit_code
    if not hasattr(arguments, "run"):
        parser.print_help(sys.stderr)
        return UsageError.exit_code
    try:
        code: int = arguments.run(arguments)
        return code
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, a person is told, and a file shows it again
        return _failed(error, given)


def _failed(error: Exception, given: list[str]) -> int:
    """Says what went wrong; gives the exit code."""
    sys.stdout.flush()
    if not reproducer.is_internal(error):
        assert isinstance(error, MoesaicError)
        reporting.show(reporting.messages(error))
        return error.exit_code
    if not isinstance(error, MoesaicError):
        traceback.print_exception(error)
    if reproducer.path_of(error) is None:
        reproducer.write_report(error, given)
    kind = "" if isinstance(error, MoesaicError) else f"{type(error).__name__}: "
    console.say(f"this is a fault of moesaic, not of your input: {kind}{error}", kind="error")
    for note in getattr(error, "__notes__", ()):
        console.say(f"  {note}")
    return InternalError.exit_code


def _parser() -> tuple[argparse.ArgumentParser, list[str]]:
    parser = argparse.ArgumentParser(
        prog="moesaic",
        description="A compiler for Mixture-of-Experts layers.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"moesaic {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    verbs = Verbs(commands)
    for module in (demo, opt, compile, show, explain, run, tune, listings, doctor, cache):
        module.add(verbs)
    return parser, list(commands.choices)

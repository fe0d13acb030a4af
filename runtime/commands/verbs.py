"""How a verb declares itself."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from typing import Any

Run = Callable[[argparse.Namespace], int]


class Verbs:
    """The verbs of one parser."""

    def __init__(self, parsers: argparse._SubParsersAction[Any]) -> None:
        self._parsers = parsers

    def add(self, name: str, run: Run, summary: str, examples: str, operands: str = "") -> argparse.ArgumentParser:
        """A parser for one verb.

        Args:
            name: of the verb.
            run: what the verb does.
            summary: its line in the list of verbs.
            examples: the end of its help.
            operands: what the usage line shows besides options.
        """
        parser: argparse.ArgumentParser = self._parsers.add_parser(
            name,
            help=summary,
            usage=f"%(prog)s [options] {operands}".rstrip(),
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=textwrap.dedent(examples).strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.set_defaults(run=run)
        return parser

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

    def add(self, name: str, run: Run, summary: str, examples: str) -> argparse.ArgumentParser:
        """A parser for one verb: `summary` is its line in the list of verbs, `examples` end its help."""
        parser: argparse.ArgumentParser = self._parsers.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=textwrap.dedent(examples).strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.set_defaults(run=run)
        return parser

"""What moesaic says while it works: loggers under ``moesaic.``, and ``MOESAIC_LOGS``, which prints them to stderr.

Names are `ir.environment.LOGGERS`: ``passes`` (each pass, whether it changed anything, its decisions), ``compile``
(what was compiled, how long that took, what it uses), ``cache`` (what was found there), ``launch`` (kernels made ready
for a device), ``launcher`` and ``hf``. Without the variable they are the application's to configure, like any others.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from moesaic.ir import environment

_ROOT = "moesaic"


class _Handler(logging.StreamHandler[TextIO]):
    """Prints to what stderr is now."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


_handler = _Handler()
_handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
_applied: dict[str, int] = {}


def configure() -> None:
    """Does what ``MOESAIC_LOGS`` says now.

    Raises:
        UsageError: it names no logger.
    """
    wanted = environment.LOGS.get()
    if wanted == _applied:
        return
    for name in _applied:
        logger = logging.getLogger(f"{_ROOT}.{name}")
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(_handler)
        logger.propagate = True
    _applied.clear()
    _applied.update(wanted)
    for name, level in wanted.items():
        logger = logging.getLogger(f"{_ROOT}.{name}")
        logger.setLevel(level)
        logger.addHandler(_handler)
        logger.propagate = False  # a handler of the application would say it twice

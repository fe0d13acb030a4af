"""Kernels of a layer are compiled at the same time: a compiler waits for nobody, and holds no lock of Python's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


def cores() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def side_by_side(make: Callable[[Item], Made], items: Iterable[Item]) -> list[Made]:
    """What `make` makes of each item, in their order, by a thread a processor.

    Raises what it raises for the first item of which it raises, once nothing runs any more.
    """
    given = list(items)
    threads = min(len(given), cores())
    if threads < 2:
        return [make(item) for item in given]
    with ThreadPoolExecutor(threads, thread_name_prefix="moesaic") as pool:
        waiting = [pool.submit(make, item) for item in given]
        try:
            return [one.result() for one in waiting]
        except BaseException:
            for one in waiting:
                one.cancel()
            raise

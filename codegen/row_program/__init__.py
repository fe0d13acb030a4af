"""The row program: from a ``launch.kernel`` of that template to CUDA text.

Each op of the region emits its own lines. Elementwise ops in one layout that follow one another share a loop over the
slots of a lane; collectives call the helpers of ``row.cuh`` and ``select.cuh``. The template itself knows no op::

    program.py     the kernel: in which order things are said, and which op is whose
    text.py        the text as it grows, and what its parts know of each other
    tables.py      tables in shared memory
    reading.py     rows and numbers that come from memory
    runs.py        elementwise ops, in loops
    selection.py   which experts are picked: groups, top-k, membership
    picks.py       picks that are given; values on their way between experts and picks
    sums.py        of a row, and over tokens
    writing.py     results
    finishing.py   sums over tokens that the first block of a cluster finishes
"""

from moesaic.codegen.row_program.program import generate

__all__ = ["generate"]

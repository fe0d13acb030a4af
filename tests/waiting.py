"""What every kernel begins with, as tests of all kinds of them see it."""

from __future__ import annotations

import re

from moesaic.codegen.target import Target


def waits_first(ptx: str, target: Target) -> None:
    """Asserts that a kernel waits for those before it, and touches no memory of theirs until then."""
    accesses = re.search(r"\b(ld|st|red|atom)\.global|cp\.async|griddepcontrol\.wait", ptx)
    assert accesses is not None
    assert target.has_dependent_launch == (accesses.group() == "griddepcontrol.wait")
    if "griddepcontrol.launch_dependents" in ptx:
        assert accesses.start() < ptx.index("griddepcontrol.launch_dependents")

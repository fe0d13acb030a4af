"""What every kernel begins with, or ends with, as tests of all kinds of them see it."""

from __future__ import annotations

import re

from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.nvrtc import CompiledKernel

_WAIT = "griddepcontrol.wait"
_LET_BEGIN = "griddepcontrol.launch_dependents"


def waits(kernel: GeneratedKernel, compiled: CompiledKernel) -> None:
    """Asserts that a kernel waits for those before it, and touches no memory of theirs until then; one that begins
    early waits before any of its threads ends, and sees what had been written when it began."""
    ptx = compiled.ptx
    early = "beside_kernels_before();" in kernel.source
    assert (_WAIT in ptx) == compiled.target.has_dependent_launch
    first = re.search(rf"\b(ld|st|red|atom)\.global|cp\.async|fence\.acq_rel\.gpu|{re.escape(_WAIT)}", ptx)
    assert first is not None
    if not compiled.target.has_dependent_launch:
        return
    assert first.group() == ("fence.acq_rel.gpu" if early else _WAIT)
    if early:
        assert first.start() < ptx.index(_LET_BEGIN)
        assert len(re.findall(r"\b(?:ret|exit);", ptx)) == 1
        assert re.search(rf"{re.escape(_WAIT)};\s*(//[^\n]*\s*)*ret;", ptx)
    elif _LET_BEGIN in ptx:
        assert first.start() < ptx.index(_LET_BEGIN)

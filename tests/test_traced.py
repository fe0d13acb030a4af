"""What torch.compile is told of our functions; that it is, is for the tests of whole graphs."""

from __future__ import annotations

import subprocess
import sys

import torch

from moesaic.runtime.traced import constant


def test_marks_are_those_of_torch() -> None:
    def ours() -> None: ...

    def theirs() -> None: ...

    assert constant(ours) is ours
    assert vars(ours) == vars(torch.compiler.assume_constant_result(theirs)) != {}


_CALLS = """
import sys
import torch
import moesaic as mo
import moesaic.hf, moesaic.nn, moesaic.te

x = torch.randn(5, 16, requires_grad=True)
weights = [torch.randn(4, 16), torch.randn(4, 16, 16), torch.randn(4, 16, 8)]
layer = mo.MoE(mo.Router(4, 2, losses={"balance": mo.LoadBalance()}), mo.Experts(4, 16, 8))
out = mo.compile(layer)(x, *weights)
(out.hidden.sum() + sum(out.losses.values())).backward()
assert x.grad.abs().sum() > 0
print([name for name in ("torch._dynamo", "sympy", "transformers") if name in sys.modules])
"""


def test_a_call_imports_no_compiler_of_torch() -> None:
    """It would take 1.5 s of a process's first call."""
    done = subprocess.run([sys.executable, "-c", _CALLS], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr

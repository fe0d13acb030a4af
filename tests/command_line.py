"""What the tests of the command line have in common."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

SMALL = """\
moe.func @route(%logits: tensor<Tx8xf32>) -> (weights: tensor<Tx2xf32>, indices: tensor<Tx2xi32>) {
  %s = row.softmax %logits : tensor<Tx8xf32>
  %v, %i = row.topk %logits {k = 2} : tensor<Tx2xf32>, tensor<Tx2xi32>
  %w = row.gather %s, %i : tensor<Tx2xf32>
  return %w, %i
}
"""
WRONG = SMALL.replace("k = 2", 'k = "two"')
ROUTER = "import moesaic as mo\n\nrouter = mo.Router(num_experts=8, top_k=2)\n"

Invoke = Callable[..., tuple[int, str, str]]


def write(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


def process(*arguments: object, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moesaic", *map(str, arguments)]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )

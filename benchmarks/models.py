"""Times experts where they are used: a decoder layer and a small model of transformers, with its experts and with ours.

    python benchmarks/models.py                      # everything, about 3 minutes, half of them torch.compile
    python benchmarks/models.py --training           # the layer, then the model, forward + backward
    python benchmarks/models.py --serving            # inference of the layer for few tokens, in CUDA graphs
    python benchmarks/models.py --training --only grouped_mm,moesaic       # without torch.compile: half a minute
    python benchmarks/models.py --batch 2 --length 2048 --out numbers.json

moesaic has to be importable (``pip install -e .``), and transformers 5.17. Weights are random, bf16. The layer and the
model are Qwen3-MoE's (``--shape``); the model has few layers and as small a vocabulary, so that its head has the share
of the time that it has in the whole one. All implementations share the weights:

    eager                   the model's own loop over experts
    grouped_mm              transformers' default
    grouped_mm+compile      the same under torch.compile
    moesaic                 ours, ``mo.hf.register()``
    moesaic+compile         ours under torch.compile
    moesaic-blocks          ours with the router, ``mo.hf.replace(model)``
    moesaic-blocks+compile  the same under torch.compile

torch.compile compiles the layers of a model one by one, which is enough for experts and compiles once for all of them.
Before anything is timed, results and all gradients of the experts, of the layer and of the model are compared with
those of float32 copies: no implementation may be further off than eager in bf16 by more than a small factor. One that
is says WRONG, is not timed, and the exit code is 1.

Times are medians of pairs of CUDA events, all implementations and all parts in turn, in short bursts. Training is
timed as it runs, call after call without waiting, after 60 ms that are not counted; inference of few tokens as
replays of CUDA graphs, but for the eager loop, which reads sizes on the host and cannot be captured. Training makes
the gradients of all weights anew each time.

*experts* is the time of the layer's experts alone, with the picks of its router; *rest* that of the layer whose experts
are left out. By Amdahl's law a layer of time t whose experts take e gains at most t / (t - e + e') where they take e':
*allowed* is that number for ours beside a peer, *gain* what was measured, *reached* the one over the other. For a model
of L layers e counts L times. Of blocks e' is the time of their experts; that of the router they have besides. Goals are
those of the project for an H100. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

import torch
from models_bench import Bench
from models_cases import IMPLEMENTATIONS, SHAPES
from timing import Machine, allow_recompiling, measure_machine

SERVED = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="models.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--shape", choices=SHAPES, default="qwen3")
    p.add_argument("--batch", type=int, default=4, help="sequences of a step of training (default: 4)")
    p.add_argument("--length", type=int, default=4096, help="tokens of each (default: 4096)")
    p.add_argument("--served", type=_tokens, default=SERVED, metavar="T,T,...", help="numbers of tokens of --serving")
    p.add_argument("--only", type=_implementations, default=list(IMPLEMENTATIONS), metavar="NAME,NAME,...",
                   help=f"of {', '.join(IMPLEMENTATIONS)}")  # fmt: skip
    p.add_argument("--budget", type=float, default=540.0, metavar="SECONDS",
                   help="nothing is started after that, 0 for no limit (default: 540)")  # fmt: skip
    p.add_argument("--compile-budget", type=float, default=300.0, metavar="SECONDS",
                   help="nothing is given to torch.compile after it has taken so long (default: 300)")  # fmt: skip
    p.add_argument("--ms", type=float, default=400.0, help="milliseconds of calls for one number (default: 400)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", metavar="FILE", help="write all numbers there as JSON, whatever ends the run")
    sections = p.add_argument_group("sections (default: all)")
    sections.add_argument("--training", action="store_true", help="forward + backward of the layer and of the model")
    sections.add_argument("--serving", action="store_true", help="inference of the layer for few tokens")
    args = p.parse_args(arguments)
    if not args.training and not args.serving:
        args.training = args.serving = True
    return args


def _implementations(text: str) -> list[str]:
    asked = text.split(",")
    for name in asked:
        if name not in IMPLEMENTATIONS:
            raise argparse.ArgumentTypeError(f"unknown implementation {name!r}; known: {', '.join(IMPLEMENTATIONS)}")
    return [name for name in IMPLEMENTATIONS if name in asked]


def _tokens(text: str) -> tuple[int, ...]:
    if not all(t.isdigit() and int(t) > 0 for t in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers of tokens")
    return tuple(map(int, text.split(",")))


def summarise(bench: Bench) -> int:
    """The last lines, and the exit code."""
    print(f"\n{bench.clock.elapsed:.0f} s, {bench.clock.compiling:.0f} s of them torch.compile")
    if bench.not_started:
        print(f"not measured, --budget is spent: {'; '.join(bench.not_started)}")
    if bench.wrong:
        print(f"{bench.wrong} results are wrong or failed")
    return 1 if bench.wrong else 0


def write_json(args: argparse.Namespace, machine: Machine, bench: Bench) -> None:
    """All numbers, where asked for."""
    if not args.out:
        return
    asked = {"shape": asdict(SHAPES[args.shape]), "batch": args.batch, "length": args.length}
    with open(args.out, "w", encoding="utf-8") as file:
        json.dump(
            {"machine": machine.as_dict(), "asked": asked, "rows": [r.as_dict() for r in bench.rows]},
            file,
            indent=1,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the sections; gives the exit code."""
    args = parse_arguments(arguments)
    if not torch.cuda.is_available():
        print("no GPU: nothing to time", file=sys.stderr)
        return 3
    allow_recompiling()
    machine = measure_machine()
    machine.print()
    bench = Bench(args)
    try:
        bench.run()
    finally:
        write_json(args, machine, bench)
    return summarise(bench)


if __name__ == "__main__":
    sys.exit(main())

"""What a declared loss costs: routers with and without it, forward and backward, on one card in one run.

    python benchmarks/losses.py                                   # about two minutes
    python benchmarks/losses.py --tokens 4096 --cases 128x8 --outputs dense

Each line times a router by itself, with counts, and with a load-balance loss (its cotangent beside that of the
weights), in turn, as medians over replays of CUDA graphs (see ``timing.py``); percentages are over the router alone.
*bwd* is a graph of nothing but backward calls, whose operands come from memory unless they all fit the L2 cache. The
loss is checked against its formula in float64 first. Times are microseconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from typing import Any

import torch
from router_cases import CASES, DTYPES, OUTPUTS, Case, Inputs, make_bias, make_inputs
from timing import GraphTimer, Shared, commit, driver_version, sets_for, summary

import moesaic as mo
from moesaic.runtime.layer import CompiledLayer

FORMS = ("alone", "counts", "balance")
PASSES = ("fwd", "fwd+bwd", "bwd")


def layer_of(case: Case, outputs: str, dtype: str, form: str) -> CompiledLayer:
    """The compiled router, with what the form adds."""
    router = case.router(outputs, dtype)
    if form == "alone":
        return mo.compile(router)
    losses = {"balance": mo.LoadBalance(coef=1e-2)} if form == "balance" else {}
    return mo.compile(dataclasses.replace(router, outputs=(*router.outputs, "counts"), losses=losses))


def forward(layer: CompiledLayer, logits: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """One call."""
    return layer(logits) if bias is None else layer(logits, bias=bias)


def backward(result: Any, inputs: Inputs, *, again: bool = False) -> tuple[torch.Tensor, ...]:
    """The gradient of the logits from every float result; `again`: and it may be asked for once more."""
    sent, cotangents = [result[0]], [inputs.cotangent]
    if hasattr(result, "losses"):
        sent.append(result.losses["balance"])
        cotangents.append(one())
    gradients: tuple[torch.Tensor, ...] = torch.autograd.grad(sent, inputs.leaf, cotangents, retain_graph=again)
    return gradients


@functools.cache
def one() -> torch.Tensor:
    """The cotangent of a loss, which no timing makes."""
    return torch.ones((), device="cuda")


def timer_of(layer: CompiledLayer, inputs: list[Inputs], bias: torch.Tensor | None, what: str) -> GraphTimer:
    """A timer of one of `PASSES` that goes round the input sets."""
    if what == "bwd":
        shared = Shared()  # backward runs on the stream that forward ran on, and that a leaf was first used on
        inputs = [dataclasses.replace(one_set, leaf=one_set.logits.detach().requires_grad_()) for one_set in inputs]
        with torch.cuda.stream(shared.stream):
            results = [forward(layer, one_set.leaf, bias) for one_set in inputs]
        return GraphTimer(lambda i: backward(results[i], inputs[i], again=True), len(inputs), shared=shared)
    if what == "fwd+bwd":
        return GraphTimer(lambda i: backward(forward(layer, inputs[i].leaf, bias), inputs[i]), len(inputs))

    def call(i: int) -> object:
        with torch.no_grad():
            return forward(layer, inputs[i].logits, bias)

    return GraphTimer(call, len(inputs))


def check(case: Case, layer: CompiledLayer, inputs: Inputs, bias: torch.Tensor | None) -> None:
    """Compares the loss and its gradient with the formula. Raises `AssertionError`."""
    result = forward(layer, inputs.leaf, bias)
    (found,) = torch.autograd.grad(result.losses["balance"], inputs.leaf, 1e6 * one())
    leaf = inputs.logits.double().requires_grad_()
    scores = torch.sigmoid(leaf) if case.groups else torch.softmax(leaf, -1)
    shares = (scores / scores.sum(-1, keepdim=True)).sum(0)
    exact = 1e-2 * case.experts / case.top_k / len(leaf) ** 2 * (shares * result.counts.double()).sum()
    (gradient,) = torch.autograd.grad(exact, leaf, 1e6 * torch.ones_like(exact))
    assert abs(result.losses["balance"].item() / exact.item() - 1) < 1e-5, "the loss is wrong"
    error, largest = (found.double() - gradient).abs().max(), gradient.abs().max()
    assert error < (8e-3 if found.dtype == torch.bfloat16 else 5e-5) * largest, "the gradient of the loss is wrong"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(c.name for c in CASES), help="names, by commas")
    parser.add_argument("--outputs", default=",".join(OUTPUTS), help="dense, compact")
    parser.add_argument("--passes", default=",".join(PASSES), help=", ".join(PASSES))
    parser.add_argument("--tokens", default="65536", help="numbers, by commas")
    parser.add_argument("--dtype", default="bf16", choices=tuple(DTYPES))
    parser.add_argument("--ms", type=float, default=20.0, help="milliseconds a timing")
    args = parser.parse_args()
    generator = torch.Generator(device="cuda").manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, driver {driver_version()}, commit {commit()}; {args.dtype}, microseconds")
    print(
        f"{'case':14}{'outputs':10}{'T':>7}  {'pass':8}" + "".join(f"{f:>11}" for f in FORMS) + f"{'balance adds':>15}"
    )
    for case in (c for c in CASES if c.name in args.cases.split(",")):
        for outputs in args.outputs.split(","):
            layers = {form: layer_of(case, outputs, args.dtype, form) for form in FORMS}
            for tokens in map(int, args.tokens.split(",")):
                bytes_of_set = tokens * case.experts * DTYPES[args.dtype].itemsize
                sets, _ = sets_for(bytes_of_set, torch.cuda.get_device_properties(0).L2_cache_size)
                inputs = [make_inputs(case, outputs, args.dtype, tokens, generator) for _ in range(sets)]
                bias = make_bias(case, generator)
                check(case, layers["balance"], inputs[0], bias)
                for what in args.passes.split(","):
                    timers = {form: timer_of(layer, inputs, bias, what) for form, layer in layers.items()}
                    samples: dict[str, list[float]] = {form: [] for form in FORMS}
                    for _ in range(3):  # in turn: the clock drifts
                        for form, timer in timers.items():
                            samples[form] += timer.sample(args.ms / 3)
                    us = {form: summary(s, timers[form].calls).us for form, s in samples.items()}
                    print(
                        f"{case.name:14}{outputs:10}{tokens:>7}  {what:8}"
                        + "".join(f"{us[form]:11.2f}" for form in FORMS)
                        + f"{us['balance'] / us['alone'] - 1:14.0%}",
                        flush=True,
                    )
                    del timers
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What can be said of routers beside device time: bounds, results, host time, what kernels need."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from compiled import needs_of
from router_cases import (
    Inputs,
    Route,
    WrongResult,
    check,
    forward_backward,
    make_bias,
    make_inputs,
)
from router_rows import PASSES, Row, kernel_ops, print_header, print_row, variants, write_json
from timing import (
    Machine,
    commit,
    driver_version,
    host_us,
    measure_machine,
    short,
)
from torch import Tensor

from moesaic.codegen.target import Target
from moesaic.ir import environment
from moesaic.ir.errors import MoesaicError

_EMULATED_TOKENS = 37


def run_dry(args: argparse.Namespace, target: Target) -> int:
    """Floors and bounds: of this card if there is one, else of a nominal one."""
    machine = measure_machine() if torch.cuda.is_available() else Machine()
    machine.print()
    print_header()
    rows = []
    for variant in variants(args):
        for tokens in args.tokens:
            for which in PASSES:
                rows.append(Row(variant, tokens, which, variant.bounds(which, tokens, machine, target)))
                print_row(rows[-1])
    write_json(args, machine, rows)
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Results of ours: on the GPU, or on the emulator with few tokens."""
    gpu = torch.cuda.is_available()
    generator = torch.Generator(device="cuda" if gpu else "cpu").manual_seed(args.seed)
    wrong = 0
    for variant in variants(args):
        case, outputs = variant.case, variant.outputs
        route = case.ours(outputs, variant.dtype, "cuda" if gpu else "emulate", variant.passes)
        for tokens in args.tokens if gpu else [_EMULATED_TOKENS]:
            said = "right"
            try:
                inputs = make_inputs(case, outputs, variant.dtype, tokens, generator)
                check(case, outputs, route, inputs, make_bias(case, generator))
            except WrongResult as error:
                said = f"WRONG: {error}"
            except (MoesaicError, RuntimeError) as error:
                said = f"ERROR: {short(error)}"
            wrong += said != "right"
            print(f"{variant!s:26}  {tokens:5}  {said}", flush=True)
    return 1 if wrong else 0


_HOST = {"ours, native": "native", "ours, python": "python", "eager": ""}
"""Rows of the table of host times, with the launcher of each."""


def run_host(args: argparse.Namespace) -> int:
    """Host time of a call of ours, with each launcher, next to operators of torch, at the smallest number of tokens."""
    print(f"{torch.cuda.get_device_name(0)}, driver {driver_version()}; torch {torch.__version__}, commit {commit()}")
    generator = torch.Generator(device="cuda").manual_seed(args.seed)
    tokens = min(args.tokens)
    print(f"median microseconds of host time of 1000 calls, T = {tokens}")
    print(f"{'':36}  {'inference':>9}  {'training':>9}  {'fwd+bwd':>9}")
    x = torch.randn(tokens, 128, device="cuda", generator=generator)
    leaf, ones = x.clone().requires_grad_(), torch.ones_like(x)
    with torch.no_grad():
        allocation, plain = host_us(lambda: torch.empty_like(x)), host_us(lambda: x * 2)
    both = host_us(lambda: torch.autograd.grad(leaf * 2, leaf, ones))
    print(f"{'torch.empty_like(x)':36}  {allocation:9.1f}")
    print(f"{'x * 2':36}  {plain:9.1f}  {host_us(lambda: leaf * 2):9.1f}  {both:9.1f}", flush=True)
    for variant in variants(args):
        case, outputs = variant.case, variant.outputs
        inputs = make_inputs(case, outputs, variant.dtype, tokens, generator)
        bias = make_bias(case, generator)
        for name, launcher in _HOST.items():
            if name.partition(",")[0] in args.only:
                with _launcher(launcher):
                    route = case.ours(outputs, variant.dtype, "cuda") if launcher else case.eager(outputs)
                    times = _host_times(route, inputs, bias)
                print(f"{variant!s:22} {name:12}  " + "  ".join(f"{t:9.1f}" for t in times), flush=True)
    return 0


@contextmanager
def _launcher(choice: str) -> Iterator[None]:
    before = os.environ.get(environment.LAUNCHER.name, "")
    os.environ[environment.LAUNCHER.name] = choice
    try:
        yield
    finally:
        os.environ[environment.LAUNCHER.name] = before


def _host_times(route: Route, inputs: Inputs, bias: Tensor | None) -> tuple[float, float, float]:
    """Inference, training (forward alone), forward and backward."""
    with torch.no_grad():
        inference = host_us(lambda: route(inputs.logits, bias))
    training = host_us(lambda: route(inputs.leaf, bias))
    both = host_us(lambda: forward_backward(route, inputs, bias))
    return inference, training, both


def run_resources(args: argparse.Namespace, target: Target) -> int:
    """What each kernel needs of the hardware, compiled here; fails if one uses local memory."""
    print(f"target {target}; SASS and SHFL: instructions and shuffles in the text of the kernel, loops counted once")
    print(
        f"{'case':12}  {'dtype':5}  {'outputs':7}  {'kernel':8}  {'lanes':>5}  {'threads':>7}  {'select':6}  "
        f"{'regs':>4}  {'spills':>6}  {'stack':>5}  {'shared':>6}  {'blocks/SM':>9}  {'warps':>5}  "
        f"{'SASS':>5}  {'SHFL':>4}"
    )
    spilling = 0
    for variant in variants(args):
        for kind in ("forward", "training", "backward"):
            executable = variant.executable(kind, target)
            for kernel, op in zip(executable.kernels, kernel_ops(executable), strict=True):
                needs = needs_of(kernel, target)
                used = needs.used
                spilling += used.uses_local_memory
                print(
                    f"{variant.case.name:12}  {variant.dtype:5}  {variant.outputs:7}  {kind:8}  "
                    f"{op.configuration.get('lanes', '-'):>5}  {kernel.threads:7}  "
                    f"{op.configuration.get('select', '-'):6}  {used.registers:4}  "
                    f"{used.spill_store_bytes + used.spill_load_bytes:6}  {used.stack_bytes:5}  "
                    f"{needs.shared_bytes:6}  {needs.blocks:9}  {needs.warps:5.0%}  "
                    f"{needs.count():>5}  {needs.count('SHFL'):>4}{'  LOCAL MEMORY' if used.uses_local_memory else ''}",
                    flush=True,
                )
    print(f"{spilling} kernels use local memory")
    return 1 if spilling else 0

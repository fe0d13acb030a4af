"""Which products begin early, and that nothing they need, or spoil, is under way then."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import networkx as nx
import pytest
import random_layers
import torch
from expert_calls import check, cotangent_for, exact, run, tensors_for
from lowering import lower
from waiting import waits

import moesaic as mo
from moesaic.codegen.target import Target
from moesaic.ir.core import Function, OpResult, Value
from moesaic.ir.ops.launch import Alloc, Kernel
from moesaic.ir.parser import parse
from moesaic.ir.types import DType
from moesaic.passes.begin_early import begin_early, ended_before
from moesaic.passes.count_items import count_items
from moesaic.runtime import plan
from moesaic.runtime.execute import _Blocks
from moesaic.runtime.kernels import compiled_kernel
from moesaic.runtime.program import program_of
from moesaic.runtime.tuning.lookup import tunables

LAYER = mo.Experts(num_experts=16, hidden=512, intermediate=256)


def kernels_of(function: Function) -> list[Kernel]:
    return [op for op in function.body.ops if isinstance(op, Kernel)]


def functions(module: mo.ir.core.Module, target: str = "sm_90a", tokens: str = "many") -> Iterator[Function]:
    program = program_of(module)
    for kind in ("forward", "training", "backward"):
        if kind != "backward" or program.backward_function(program.float_results) is not None:
            cotangents = program.float_results if kind == "backward" else ()
            yield program.executable(kind, target, (), cotangents, tokens=tokens).module.entry


def early(module: mo.ir.core.Module) -> list[list[str]]:
    """The symbols of kernels that begin early, of inference, training and backward."""
    return [[op.symbol for op in kernels_of(f) if op.early] for f in functions(module)]


def test_products_of_a_backward_fill_each_others_last_rounds() -> None:
    """Both gradients and the dgrad of up need down's dgrad alone, and what adds up its parts has waited for that. In
    forward, each product needs the one before."""
    assert early(LAYER.module(DType.BF16, 8)) == [
        [],
        [],
        ["experts_backward_d_down_proj", "experts_backward_gate_up_proj", "experts_backward_d_gate_up_proj"],
    ]


def test_products_of_a_layer_begin_beside_what_is_not_theirs() -> None:
    """Those of a shared expert beside the router, the first of the experts beside a loss."""
    layer = mo.MoE(
        mo.Router(64, 6, losses={"balance": mo.LoadBalance(coef=1e-2)}),
        mo.Experts(64, 256, 128),
        shared=mo.SharedExpert(256),
    )
    forward, _, _ = early(layer.module(DType.BF16))
    assert forward == ["moe_shared_gate_up_proj", "moe_shared_down_proj", "moe_gate_up_proj"]


def test_the_tuner_runs_kernels_behind_themselves() -> None:
    program = program_of(LAYER.module(DType.BF16, 8))
    function = program.executable("backward", "sm_90a", (), program.float_results).module.entry
    specialize = program.specialize("sm_90a", (), "many")
    found = tunables(function, specialize, Target.parse("sm_90a"), (), ">16384")
    assert any(op.early for op in kernels_of(function))
    assert found and not any(one.space.op.early for one in found)


# What is there when it is read ----------------------------------------------------------------------------------------


def place(value: Value) -> object:
    made = value.op if isinstance(value, OpResult) else None
    return made.slot if isinstance(made, Alloc) and made.space == "workspace" else value


def in_order(kernels: Sequence[Kernel]) -> nx.DiGraph:
    """What comes before what: a kernel's blocks begin, it touches memory, it ends."""
    order: nx.DiGraph = nx.DiGraph()
    for n, op in enumerate(kernels):
        order.add_edge(("begins", n), ("touches", n))
        order.add_edge(("touches", n), ("ends", n))
        if n:
            order.add_edge(("ends", n - 1), ("ends" if op.early else "touches", n))
            # All blocks of the kernel before have let this one begin, which they do once they have waited, if they do.
            order.add_edge(("begins" if kernels[n - 1].early else "touches", n - 1), ("begins", n))
    return order


def races(kernels: Sequence[Kernel]) -> list[str]:
    """Pairs of kernels that touch the same memory, one of them to write, in no order."""
    order = in_order(kernels)
    before = {n: nx.ancestors(order, ("touches", n)) for n in range(len(kernels))}
    found = []
    for a, b in itertools.combinations(range(len(kernels)), 2):
        written = [{place(v) for v in kernels[n].written} for n in (a, b)]
        touched = [{place(v) for v in kernels[n].operands} for n in (a, b)]
        if (written[0] & touched[1] or written[1] & touched[0]) and ("ends", a) not in before[b]:
            found.append(f"{kernels[a].symbol}, {kernels[b].symbol}")
    return found


def of_sequences(op: Kernel) -> bool:
    return any(v.type.leading == "N" for v in op.operands)


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_no_layer_races(first: int) -> None:
    """Nor without the kernels that have a block for each sequence, where there is none."""
    some = 0
    for seed in range(first, first + 20):
        module = random_layers.case(seed).module
        for target, tokens in (("sm_90a", "many"), ("sm_90a", "few"), ("sm_80", "many")):
            for function in functions(module, target, tokens):
                kernels = kernels_of(function)
                assert races(kernels) == [], seed
                assert races([op for op in kernels if not of_sequences(op)]) == [], seed
                some += sum(op.early for op in kernels)
    assert some > 20


def test_races_are_found() -> None:
    """Whichever kernel of a backward began early without being allowed to."""
    [*_, function] = functions(LAYER.module(DType.BF16, 8))
    kernels = kernels_of(function)
    late = [op for op in kernels[1:] if not op.early]
    assert [op.symbol for op in late] == ["experts_backward_to_picks", "experts_backward_combine"]
    for op in late:
        op.attributes["early"] = True
        assert races(kernels)
        del op.attributes["early"]
    assert races(kernels) == []


ROWS = "tensor<Tx256xbf16>"
WEIGHT = "tensor<256x256xbf16>"


def products(reads: Sequence[int], returned: Sequence[int]) -> Function:
    """Products in a row; `reads[n]` says whose rows product n reads, -1 those given."""
    lines = []
    for n, earlier in enumerate(reads):
        rows = "%x" if earlier < 0 else f"%k{earlier}"
        lines += [
            f"%k{n} = kernel.product {rows}, %w (%a: {ROWS}, %b: {WEIGHT}) {{",
            "  %y = slot.linear %a, %b {transposed = false} : tensor<Tx256xf32>",
            "  %z = math.cast %y {dtype = bf16}",
            "  yield %z",
            "}",
        ]
    results = ", ".join(f"r{n}: {ROWS}" for n in returned)
    values = ", ".join(f"%k{n}" for n in returned)
    body = "\n".join(lines)
    module = parse(f"moe.func @f(%x: {ROWS}, %w: {WEIGHT}) -> ({results}) {{\n{body}\nreturn {values}\n}}\n")
    planned, _ = lower(module, "plan-workspace,specialize")
    return planned.entry


def begin(function: Function) -> list[bool]:
    return [op.early for op in kernels_of(function)]


def test_the_first_waits_for_what_it_is_given() -> None:
    assert begin(products([-1, -1, -1, -1], returned=range(4))) == [False, True, True, True]


def test_what_is_read_has_been_written() -> None:
    assert begin(products([-1, 0, -1, 1, 1], returned=range(5))) == [False, False, True, False, True]
    # What the second reads is there; that the third has begun says nothing of it, nor of those between.
    assert begin(products([-1, -1, -1, 0], returned=range(4))) == [False, True, True, False]


def test_what_is_written_is_read_no_more() -> None:
    """The fourth has the place of the second, which the third, beside which it would begin, reads."""
    function = products([-1, 0, 1, -1, 3], returned=[0, 2, 4])
    slots = {op.buffer.name: op.slot for op in function.body.ops if isinstance(op, Alloc) and op.space == "workspace"}
    assert slots == {"k1": 0, "k3": 0}
    assert begin(function) == [False] * 5
    kernels = kernels_of(function)
    kernels[3].attributes["early"] = True
    assert races(kernels) == ["f_b3, f_b4"]
    assert begin(products([-1, 0, 1, -1, 3], returned=range(5))) == [False, False, False, True, False]


def test_counts_are_set_to_0_by_a_kernel_that_has_ended() -> None:
    [*_, function] = functions(LAYER.module(DType.BF16, 8))
    kernels = kernels_of(function)
    ended = dict(zip(kernels, ended_before(kernels), strict=True))
    zeroing = {buffer: op for op in kernels for buffer in op.operands[len(op.operands) - op.zeroes :]}
    counting = [op for op in kernels if op.counter is not None]
    assert len(counting) == 3
    for op in counting:
        assert op.counter is not None
        assert kernels.index(zeroing[op.operands[op.counter]]) < ended[op]


def test_twice_is_once() -> None:
    for function in functions(LAYER.module(DType.BF16, 8)):
        before = str(mo.ir.core.Module([function]))
        begin_early(function)
        count_items(function)
        assert str(mo.ir.core.Module([function])) == before


def test_every_launch_has_a_block_without_tokens() -> None:
    """Later kernels count on its having waited."""
    for layer in (LAYER.module(DType.BF16, 8), mo.MoE(mo.Router(8, 2), mo.Experts(8, 64, 32)).module(DType.BF16)):
        program = program_of(layer)
        for kind, cotangents in (("training", ()), ("backward", program.float_results)):
            for kernel in program.executable(kind, "sm_90a", (), cotangents).kernels:
                assert _Blocks.of(kernel, 3)(0, 0), kernel.symbol


@pytest.mark.nvrtc
def test_products_without_tensor_cores_wait_at_their_end() -> None:
    """Those with them are looked at in ``test_experts.py``."""
    layer = mo.MoE(mo.Router(5, 2), mo.Experts(5, 33, 17), shared=mo.SharedExpert(9, gate=True))
    program = program_of(layer.module(DType.F32))
    executable = program.executable("backward", "sm_90a", (), program.float_results)
    ops = kernels_of(executable.module.entry)
    some = [(op, k) for op, k in zip(ops, executable.kernels, strict=True) if op.template in ("product", "wgrad")]
    assert {(op.early, op.template) for op, _ in some} >= {(False, "product"), (True, "product"), (True, "wgrad")}
    for op, kernel in some:
        assert op.early == ("beside_kernels_before" in kernel.source)
        waits(kernel, compiled_kernel(kernel, Target.parse("sm_90a")))


# On the emulator, where they run as early as they may -----------------------------------------------------------------


def test_the_earliest_order() -> None:
    program = program_of(LAYER.module(DType.BF16, 8))
    backward = program.executable("backward", "sm_90a", (), program.float_results).plan
    assert [step.after for step in backward.steps] == [0, 1, 1, 1, 1, 5]
    assert backward.earliest == [0, 2, 3, 4, 1, 5]
    forward = program.executable("forward", "sm_90a", ()).plan
    assert forward.earliest == [*range(len(forward.steps))]


@pytest.mark.emulate
def test_a_race_shows_on_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is right when kernels wait is right when they begin early, and wrong where they may not."""
    layer = mo.Experts(3, 24, 16)
    given = tensors_for(layer, 11, 2, torch.float32)
    cotangent = cotangent_for(11, 24, torch.float32)
    wanted = exact(layer, given, cotangent)
    check(run(mo.compile(layer, backend="emulate"), given, cotangent, "cpu"), wanted, torch.float32)

    def too_early(kernels: Sequence[Kernel]) -> list[int]:
        last = len(kernels) - 1  # the sum of a token's rows, before there are any
        return [0 if n == last else ended for n, ended in enumerate(ended_before(kernels))]

    monkeypatch.setattr(plan, "ended_before", too_early)
    changed = replace(layer, align=16)  # nobody has made its plan yet
    with pytest.raises(AssertionError):
        check(run(mo.compile(changed, backend="emulate"), given, cotangent, "cpu"), wanted, torch.float32)

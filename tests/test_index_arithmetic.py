"""Experts with more than 2^31 elements in what belongs to tokens and to slots, without such memory.

Every kernel of a layer runs on the last few tokens of very many, whose slots are the last of very many: pointers say
where row 0 would be, tables name tokens, picks and slots by their large numbers, and blocks are told to be the ones of
these tokens. What comes out has to be, bit for bit, what the same tokens give as the first ones.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from expert_calls import KINDS, ROUNDED, TOP_K, Tensors, check, cotangent_for, exact, ids, tensors_for
from routing import assert_close, same_bits

import moesaic as mo
from moesaic.codegen import nvrtc
from moesaic.codegen.kernel import GeneratedKernel
from moesaic.ir.errors import InputError
from moesaic.ir.types import DType, TensorType
from moesaic.runtime import execute
from moesaic.runtime.emulator import Buffer, build
from moesaic.runtime.plan import Step
from moesaic.runtime.program import Executable, program_of
from moesaic.runtime.reference import TORCH_DTYPES

# Their backward has every kernel there is: products, gradients of weights, sums over picks, and rows of slots alone.
EXPERTS = {
    "f32": (KINDS["bias"], torch.float32, DType.F32, "specialize{dispatch=steps}"),
    # As wide as such tiles are: the copy engine finds rows by their numbers.
    "wgmma": (
        mo.Experts(5, 128, 128, bias=True),
        torch.bfloat16,
        DType.BF16,
        "specialize{tile=cooperative dispatch=steps}",
    ),
}

IDS = ids([1, 4, 1], [4, 2, 2], [2, 1, 4], [1, 1, 2], [4, 4, 2])
"""Every pick has a slot, and expert 0 none of them: it has all slots before, see `Place`."""

TOKENS = len(IDS)

POISON = 0xFF
"""Every byte of fresh memory: NaN, and -1 in tables."""


@dataclass(frozen=True)
class Place:
    """Numbers of the first token, and of the first slot, that there is memory for."""

    token: int
    slot: int

    def first(self, symbol: object, kernel: GeneratedKernel) -> int:
        """How many rows of a buffer come before those that there is memory for."""
        if symbol == "C":  # blocks of a dispatch
            return self.token // kernel.rows_per_block
        return {"T": self.token, "M": self.slot}.get(str(symbol), 0)


def launch(step: Step, operands: Sequence[torch.Tensor], types: Sequence[TensorType], reads: int, at: Place) -> None:
    """One launch; `operands` are the step's own."""
    kernel = step.kernel
    if kernel.grid == "fixed":  # the scan, whose table has a row for a block: never so many
        at = Place(0, 0)
    values: list[int | bytes] = []
    for argument in kernel.arguments:
        if argument.operand < 0:
            values.append(at.token + TOKENS)
            continue
        tensor, type = operands[argument.operand], types[argument.operand]
        first = at.first(type.leading, kernel)
        before = first * tensor.stride(0) * tensor.element_size() if first else 0
        address = (tensor.data_ptr() - before) % 2**64  # where small tensors lie low, addresses wrap
        if argument.kind == "pointer":
            values.append(address)
        elif argument.map is not None:
            boxes = execute._Boxes.of(argument.map, type)(tensor)
            boxes = boxes._replace(address=address, rows=first + boxes.rows)
            values.append(struct.pack("=Q7q64x", *boxes[:8]))
        elif argument.kind == "rows":
            values.append(first + tensor.shape[0])
        else:
            values.append(tensor.stride({"stride": 0, "inner_stride": 1}[argument.kind]))
    buffers = [
        Buffer(t.data_ptr(), t.numel() * t.element_size(), f"operand {i}", writable=i >= reads)
        for i, t in enumerate(operands)
    ]
    emulated = build(moved(kernel, at), kernel.symbol, nvrtc.helper_include_dirs())
    size = kernel.cluster
    emulated.launch(
        (size, 1, 1),
        (kernel.threads, 1, 1),
        values,
        shared_bytes=kernel.shared_bytes,
        cluster=size,
        buffers=buffers,
    )


def moved(kernel: GeneratedKernel, at: Place) -> str:
    """Text whose block 0 is the one of the first token, or slot, that there is memory for.

    Products and gradients of weights need none: their blocks go over the rows that tables tell of.
    """
    if at == Place(0, 0) or "Tile tile" in kernel.source:
        return kernel.source
    rows = kernel.threads // 32 if kernel.grid == "device" else kernel.rows_per_block
    first = at.slot if kernel.grid == "device" else at.token
    assert first % rows == 0
    return f"""#include <cstdint>
static inline uint3 moved_block(uint3 block) {{ return uint3{{block.x + {first // rows}u, block.y, block.z}}; }}
static const auto block_of_lane = [] {{ return blockIdx; }};
#undef blockIdx
#define blockIdx (moved_block(block_of_lane()))
{kernel.source}"""


def run_steps(
    executable: Executable, given: Mapping[str, torch.Tensor], at: Place, by_hand: Mapping[str, torch.Tensor]
) -> Tensors:
    """Buffers and results of a plan after its launches, by name. `by_hand` are contents that a buffer is given instead,
    once the launch that fills it is over."""
    plan = executable.plan
    names = [v.name for v in (*plan.inputs, *plan.buffers)]
    types = [v.type for v in (*plan.inputs, *plan.buffers)]
    tensors = [given[i.name] for i in plan.inputs]
    rows = {"T": TOKENS, "M": TOKENS * TOP_K, "C": 1}
    for buffer in plan.buffers:
        shape = [d if isinstance(d, int) else rows[str(d)] for d in buffer.type.shape]
        tensor = torch.empty(shape, dtype=TORCH_DTYPES[buffer.type.dtype])
        tensor.view(-1).view(torch.uint8).fill_(POISON)
        tensors.append(tensor)
    kernels = [op for op in executable.module.entry.body.ops if hasattr(op, "reads")]
    for step, op in zip(plan.steps, kernels, strict=True):
        launch(step, [tensors[n] for n in step.operands], [types[n] for n in step.operands], op.reads, at)
        for number in step.operands[op.reads :]:
            if names[number] in by_hand:
                tensors[number].copy_(by_hand[names[number]])
    results = {n: tensors[i] for n, i in zip(plan.result_names, plan.results, strict=True)}
    return {**dict(zip(names, tensors, strict=True)), **results}


def far_place(executables: Sequence[Executable]) -> Place:
    """So far that a signed and an unsigned number of 32 bits are both too short for any product of a row's number and
    its length, even for the 4 bytes of an element; T K and the number of slots are as large as may be."""
    kernels = [k for e in executables for k in e.kernels]
    block = math.lcm(*(k.rows_per_block for k in kernels if k.grid == "cover"))
    token = (2**31 - 1) // TOP_K // block * block - block
    assert token * 4 * TOP_K > 2**32
    slot = 2**31 - 2**20
    assert token * TOP_K + TOKENS * TOP_K < 2**31 and slot + TOKENS * TOP_K < 2**31
    return Place(token, slot)


@pytest.mark.emulate
@pytest.mark.parametrize("kind", EXPERTS)
def test_tokens_and_slots_beyond_32_bits(kind: str) -> None:
    """Forward and backward, against the first tokens of few, and these against float64. A dispatch in one launch would
    look at all tokens: here it takes three, and has a test of its own."""
    experts, dtype, name, passes = EXPERTS[kind]
    program = program_of(experts.module(name, TOP_K, DType.I32, DType.F32), passes)
    training, backward = (program.executable(function, "sm_90a", ()) for function in ("training", "backward"))
    maps = [a.map for e in (training, backward) for k in e.kernels for a in k.arguments if a.map is not None]
    assert {m.rows == 0 for m in maps} == ({False, True} if kind == "wgmma" else set())  # of matrices, and of slots
    given = tensors_for(experts, TOKENS, TOP_K, dtype, ids=IDS)
    given["d_hidden"] = cotangent_for(TOKENS, experts.hidden, dtype)
    near, far = Place(0, 0), far_place((training, backward))
    # Expert 0 has all slots before those that there is memory for, and no rows that a product should look at.
    found = torch.bincount(IDS.flatten(), minlength=experts.num_experts).int()
    before = found.clone()
    before[0] = far.slot
    ends = torch.nn.functional.pad(before.cumsum(0), (1, 0))
    tables = {"bases": torch.zeros(1, experts.num_experts), "found": before, "counts": found, "offsets": ends}

    results: list[Tensors] = []
    for at, by_hand in ((near, {}), (far, tables)):
        values = run_steps(training, given, at, by_hand)
        kept = {i.name: values[i.name] for i in backward.plan.inputs if i.name not in given}
        results.append({**values, **run_steps(backward, {**given, **kept}, at, {})})
    first, last = results
    wanted = exact(experts, {n: given[n] for n in given if n != "d_hidden"}, given["d_hidden"])
    check({n: first[n] for n in wanted}, wanted, dtype)
    for name in wanted:
        assert same_bits(last[name], first[name]), name
    assert torch.equal(last["tokens"], first["tokens"] + far.token)
    assert torch.equal(last["picks"], first["picks"] + far.token * TOP_K)
    assert torch.equal(last["slots"], first["slots"] + far.slot)


@pytest.mark.parametrize(
    ("experts", "tokens", "found"),
    [
        (mo.Experts(5, 1, 1), 2**30, "2147483648 and 2147483648"),
        (mo.Experts(5, 1, 1, align=128), 2**30 - 1, "2147483646 and 2147484281"),
        (mo.Experts(5, 1, 1, capacity=1.25, pad=True), 2**30 - 2**20, "2145386496 and 3218079749"),
    ],
    ids=["picks", "aligned", "padded"],
)
def test_more_picks_or_slots_than_can_be_numbered(experts: mo.Experts, tokens: int, found: str) -> None:
    """Slots that nobody uses count, too: they are numbered like any other."""
    x, picks, pair = torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.int32), torch.ones(5, 2, 1)
    wide = {"x": x.expand(tokens, 1), "indices": picks.expand(tokens, 2), "weights": x.expand(tokens, 2)}
    with pytest.raises(InputError, match=f"at most 2147483647, found {found}; split the call"):
        mo.compile(experts)(**wide, gate_up_proj=pair, down_proj=pair[:, :1])


@pytest.mark.gpu
def test_a_layer_with_more_than_2_31_elements_on_a_gpu() -> None:
    """T K H and T K 2 I are beyond 2^31. Only the last tokens' results have a cotangent, so that a call of these alone
    has the same gradients; those of the matrices are sums in which the rows of other tokens count 0."""
    hidden, intermediate, top_k, last = 2048, 1024, 8, 100
    tokens = 2**31 // (top_k * hidden) + 700
    layer = mo.compile(mo.Experts(8, hidden, intermediate), backend="cuda")
    needed = sum(layer.layer(top_k, dtype="bf16").memory(tokens)) + 2**32  # and what the test itself holds
    free, _ = torch.cuda.mem_get_info()
    if free < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free GPU memory, found {free / 2**30:.0f}")
    g = torch.Generator("cuda").manual_seed(1)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(shape, generator=g, device="cuda", dtype=torch.bfloat16)

    given = {
        "x": normal(tokens, hidden),
        "indices": torch.randint(0, 8, (tokens, top_k), generator=g, device="cuda", dtype=torch.int32),
        "weights": torch.rand((tokens, top_k), generator=g, device="cuda"),
        "gate_up_proj": normal(8, 2 * intermediate, hidden, scale=hidden**-0.5),
        "down_proj": normal(8, hidden, intermediate, scale=intermediate**-0.5),
    }
    sent = torch.zeros_like(given["x"])
    sent[-last:] = normal(last, hidden)
    of_tokens = ("x", "indices", "weights")

    def gradients(inputs: Tensors, cotangent: torch.Tensor) -> Tensors:
        leaves = {n: t.detach().requires_grad_(t.is_floating_point()) for n, t in inputs.items()}
        y = layer(**leaves)
        y.backward(cotangent)
        return {"hidden": y.detach(), **{f"d_{n}": t.grad for n, t in leaves.items() if t.grad is not None}}

    whole = gradients(given, sent)
    few = gradients({n: t[-last:] if n in of_tokens else t for n, t in given.items()}, sent[-last:])
    for name in ("hidden", "d_x", "d_weights"):
        assert few[name].any() and same_bits(whole[name][-last:], few[name]), name
    assert not whole["d_x"][:-last].any() and not whole["d_weights"][:-last].any()
    for name in ("d_gate_up_proj", "d_down_proj"):
        assert_close(name, whole[name], few[name], ROUNDED[torch.bfloat16])

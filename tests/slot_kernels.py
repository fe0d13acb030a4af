"""What tests of kernels over slots share: launches built by hand, run on the emulator or compiled.

Results start as 0x5A in every byte: an unwritten -1 has to show, and 0xFF would hide it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moesaic.codegen import generate, nvrtc
from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.target import Target
from moesaic.ir.core import Block, BlockArgument, Value, Yield, create_one
from moesaic.ir.ops.launch import Kernel
from moesaic.ir.ops.slot import Dispatch
from moesaic.ir.types import TensorType
from moesaic.runtime import execute
from moesaic.runtime.emulator import FORWARD, REVERSE
from moesaic.runtime.kernels import NVRTC_OPTIONS
from moesaic.runtime.reference import TorchArrays

ORDERS = (FORWARD, REVERSE, 1, 2)
POISON = 0x5A


def operands(types: str) -> list[BlockArgument]:
    """Buffers from text such as ``indices:Tx8xi32 table:Bx128xi32``."""
    block = Block()
    named = (item.split(":") for item in types.split())
    return [block.add_argument(TensorType.parse(f"tensor<{type}>"), name) for name, type in named]


def launch_op(template: str, reads: int, types: str, config: Sequence[str], facts: Sequence[str] = (), region=None):
    if region is None:
        region = Block()
        region.append(Yield([]))
    attributes = {
        "symbol": template,
        "template": template,
        "reads": reads,
        "facts": tuple(facts),
        "config": ("target=sm_90a", *config) if not any(c.startswith("target=") for c in config) else tuple(config),
    }
    op = Kernel(operands(types), attributes, region=region)
    op.verify()
    return op


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(tuple(shape), dtype=dtype)
    tensor.view(-1).view(torch.uint8).fill_(POISON)
    return tensor


def launch(kernel: GeneratedKernel, reads: int, tensors: Sequence[torch.Tensor], tokens: int, order: int) -> None:
    """One launch on the emulator, with the grid and the arguments that the runtime would give it."""
    runner = execute.EmulatedRunner()
    runner.order = order
    blocks = execute._Blocks.of(kernel, 3 * kernel.cluster)(tokens, 0)
    if blocks:
        values = [execute.ARGUMENTS[a.kind](tensors, a.operand, tokens) for a in kernel.arguments]
        runner.load(kernel, torch.device("cpu")).launch((blocks, 1, 1), 0, values, tensors, frozenset(range(reads)))


RESULTS = ("counts", "offsets", "tokens", "picks", "slots", "dropped")
IDS = {torch.int16: "i16", torch.int32: "i32", torch.int64: "i64"}


def the_op(ids: torch.Tensor, experts: int, align: int = 1, capacity: float = 0.0, pad: bool = False) -> Dispatch:
    [indices] = operands(f"indices:Tx{ids.shape[1]}x{IDS[ids.dtype]}")
    op = Dispatch([indices], {"experts": experts, "align": align, "capacity": capacity, "pad": pad})
    op.verify()
    return op


def random_ids(
    tokens: int, top_k: int, experts: int, dtype: torch.dtype = torch.int32, outside: bool = True, seed: int = 0
) -> torch.Tensor:
    """Picks with repeats in a row; with `outside`, some that are not here, by numbers of every kind."""
    generator = torch.Generator().manual_seed(seed + 31 * tokens + experts)
    ids = torch.randint(0, experts, (tokens, top_k), generator=generator)
    if outside:
        limit = torch.iinfo(dtype)
        pool = [-1, experts, limit.min, limit.max, -experts - 1]
        pool += [2**32, 2**32 + 1, -(2**32)] if dtype is torch.int64 else []
        strange = torch.tensor(pool)[torch.randint(0, len(pool), (tokens, top_k), generator=generator)]
        ids = torch.where(torch.rand((tokens, top_k), generator=generator) < 0.2, strange, ids)
    return ids.to(dtype)


FLOATS = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def region_op(template: str, reads: str, build, config: Sequence[str] = ()) -> Kernel:
    """A launch of a region. `reads` are the buffers, ``name:type`` or ``name:type:type in the region``; `build` makes
    the yielded values from the region's arguments."""
    region = Block()
    buffers = []
    for item in reads.split():
        name, type, *inside = item.split(":")
        buffers.append(f"{name}:{type}")
        region.add_argument(TensorType.parse(f"tensor<{(inside or [type])[0]}>"), name)
    yielded = build(region, *region.arguments)
    region.append(Yield(list(yielded)))
    written = [f"out{i}:{str(v.type).removeprefix('tensor<').removesuffix('>')}" for i, v in enumerate(yielded)]
    config = ("threads=64", *config) if not any(c.startswith("threads") for c in config) else config
    return launch_op(template, len(buffers), " ".join([*buffers, *written]), config, region=region)


def run(op: Kernel, inputs: Sequence[torch.Tensor], order: int) -> list[torch.Tensor]:
    """The results of a launch; rows of M are never written by these kernels."""
    kernel = generate.generate_kernels(_Function(op))[0]  # type: ignore[arg-type]
    tokens = next(
        x.shape[0] for x, v in zip(inputs, op.operands, strict=False) if v.type.leading == "T" and v.type.rank == 2
    )
    results = []
    for value in op.written:
        shape = [d if isinstance(d, int) else tokens for d in value.type.shape]
        results.append(poisoned(shape, FLOATS[value.type.dtype.value]))
    launch(kernel, op.reads, [*inputs, *results], tokens, order)
    return results


class _Function:
    """As much of a function as `generate_kernels` reads."""

    def __init__(self, op: Kernel) -> None:
        self.body = Block()
        self.body.append(op)


def routed(tokens: int, top_k: int, experts: int, seed: int = 0, **options: object) -> dict[str, torch.Tensor]:
    """The results of a dispatch, by its reference; some picks are not here."""
    ids = random_ids(tokens, top_k, experts, seed=seed)
    op = the_op(ids, experts, **options)  # type: ignore[arg-type]
    return dict(zip(RESULTS, op.reference(TorchArrays, ids), strict=True))


def plain_combine(columns: int, top_k: int, dtype: str, weights: str = "", out: str = "f32", config=()) -> Kernel:
    """A combine alone, rounded to the type of its result."""
    reads = f"x:Mx{columns}x{dtype} slots:Tx{top_k}xi32 slot_tokens:Mxi32"
    reads += f" weights:Tx{top_k}x{weights} slot_picks:Mxi32" if weights else ""

    def build(region: Block, *arguments: Value) -> list[Value]:
        y = create_one("slot.combine", *arguments, block=region)
        return [y if out == "f32" else create_one("math.cast", y, dtype=out, block=region)]

    return region_op("combine", reads, build, config)


# Registers that a thread may take of 65536 for a multiprocessor to hold all of its threads, or half of them.
ALL_THREADS, HALF_OF_THREADS = 32, 64


def compiled(kernel: GeneratedKernel, target: str) -> nvrtc.CompiledKernel:
    made = nvrtc.compile_source(
        kernel.source, name=kernel.symbol, target=Target.parse(target), extra_options=NVRTC_OPTIONS
    )
    assert not made.resources.uses_local_memory, made.resources
    return made

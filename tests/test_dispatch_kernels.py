"""The kernels of a dispatch, of combine and of to_picks: on the emulator against the ops they carry out, and NVRTC.

Launches are built by hand. Results start as 0x5A in every byte: an unwritten -1 has to show, and 0xFF would hide it.
"""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from moesaic.codegen import dispatch, nvrtc
from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.target import Target
from moesaic.ir.core import Block, BlockArgument, Yield
from moesaic.ir.errors import EmulationError, UnsupportedError
from moesaic.ir.ops.launch import Kernel
from moesaic.ir.ops.slot import Dispatch
from moesaic.ir.types import TensorType
from moesaic.passes.dispatch_shape import DispatchShape
from moesaic.runtime import execute
from moesaic.runtime.emulator import FORWARD, REVERSE
from moesaic.runtime.kernels import NVRTC_OPTIONS
from moesaic.runtime.reference import TorchArrays

ORDERS = (FORWARD, REVERSE, 1, 2)
HEADER = "dispatch.cuh"
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
        "config": ("target=sm_90a", *config),
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
    blocks = execute._Blocks.of(kernel, 3)(tokens, 0)
    if blocks:
        values = [execute.ARGUMENTS[a.kind](tensors, a.operand, tokens) for a in kernel.arguments]
        runner.load(kernel, torch.device("cpu")).launch((blocks, 1, 1), 0, values, tensors, reads)


# Dispatch -------------------------------------------------------------------------------------------------------------

RESULTS = ("counts", "offsets", "tokens", "picks", "slots", "dropped")
IDS = {torch.int16: "i16", torch.int32: "i32", torch.int64: "i64"}


@functools.cache
def steps(
    experts: int,
    top_k: int,
    ids: str = "i32",
    align: int = 1,
    capacity: float = 0.0,
    pad: bool = False,
    threads: int = 0,
    scan_threads: int = 0,
    tokens: int = 0,
    target: str = "sm_90a",
) -> tuple[GeneratedKernel, GeneratedKernel, GeneratedKernel]:
    """The three kernels; threads and tokens of a block as the rule says, unless given."""
    shape = DispatchShape.of(experts, top_k)
    facts = (f"experts={experts}", f"align={align}", f"capacity={capacity!r}", f"pad={int(pad)}")
    config = (f"threads={threads or shape.threads}", f"tokens={tokens or shape.tokens}", f"target={target}")
    scan_config = (f"threads={scan_threads or shape.scan_threads}", f"target={target}")
    table, vector = f"Bx{experts}xi32", f"{experts}xi32"
    indices = f"indices:Tx{top_k}x{ids}"
    written = f"counts:{vector} offsets:{experts + 1}xi32 tokens:Mxi32 picks:Mxi32 slots:Tx{top_k}xi32 dropped:1xi32"
    count = launch_op("dispatch_count", 1, f"{indices} table:{table}", config, facts)
    scan = launch_op("dispatch_scan", 1, f"table:{table} bases:{table} found:{vector}", scan_config, facts)
    scatter = launch_op("dispatch_scatter", 3, f"{indices} bases:{table} found:{vector} {written}", config, facts)
    return dispatch.generate_count(count), dispatch.generate_scan(scan), dispatch.generate_scatter(scatter)


def the_op(ids: torch.Tensor, experts: int, align: int = 1, capacity: float = 0.0, pad: bool = False) -> Dispatch:
    [indices] = operands(f"indices:Tx{ids.shape[1]}x{IDS[ids.dtype]}")
    op = Dispatch([indices], {"experts": experts, "align": align, "capacity": capacity, "pad": pad})
    op.verify()
    return op


def dispatched(
    ids: torch.Tensor, experts: int, order: int = FORWARD, slack: int = 0, **options: object
) -> dict[str, torch.Tensor]:
    """What the three kernels make of the picks. `slack` asks for more rows of slots than are needed."""
    tokens, top_k = ids.shape
    kernels = steps(experts, top_k, IDS[ids.dtype], **options)  # type: ignore[arg-type]
    known = {k: v for k, v in options.items() if k in ("align", "capacity", "pad")}
    op = the_op(ids, experts, **known)  # type: ignore[arg-type]
    slots = op.slots_per_token * tokens + op.more_slots + slack
    blocks = execute._Blocks.of(kernels[0], 3)(tokens, 0)
    table, bases = (poisoned((blocks, experts), torch.int32) for _ in range(2))
    found = poisoned((experts,), torch.int32)
    shapes = ((experts,), (experts + 1,), (slots,), (slots,), (tokens, top_k), (1,))
    results = [poisoned(shape, torch.int32) for shape in shapes]
    launch(kernels[0], 1, [ids, table], tokens, order)
    launch(kernels[1], 1, [table, bases, found], tokens, order)
    launch(kernels[2], 3, [ids, bases, found, *results], tokens, order)
    return dict(zip(RESULTS, results, strict=True))


def check(
    ids: torch.Tensor, experts: int, orders: Sequence[int] = ORDERS, **options: object
) -> dict[str, torch.Tensor]:
    """Compares every result, bit for bit, with the op's reference; gives them."""
    known = {k: v for k, v in options.items() if k in ("align", "capacity", "pad")}
    expected = the_op(ids, experts, **known).reference(TorchArrays, ids)  # type: ignore[arg-type]
    for order in orders:
        results = dispatched(ids, experts, order, **options)  # type: ignore[arg-type]
        for name, right in zip(RESULTS, expected, strict=True):
            assert torch.equal(results[name], right), (name, order)
    return results


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


# Small blocks, so that few picks are many blocks.
SMALL = {"threads": 64, "scan_threads": 64}


@pytest.mark.emulate
@pytest.mark.parametrize("dtype", IDS)
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "each"),
    [(97, 3, 13, 5), (61, 1, 1, 7), (31, 8, 257, 4), (5, 1, 3, 2), (211, 2, 7, 5), (1, 5, 5, 1), (3, 150, 11, 1)],
)
def test_dispatch(tokens: int, top_k: int, experts: int, each: int, dtype: torch.dtype) -> None:
    """Prime sizes, one expert, one pick, repeats of an expert in a row, and numbers that are no expert."""
    check(random_ids(tokens, top_k, experts, dtype), experts, tokens=each, **SMALL)


@pytest.mark.emulate
@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(8, 2, 1031), (128, 8, 300), (5000, 3, 1499)])
def test_blocks_of_the_built_in_shape(experts: int, top_k: int, tokens: int) -> None:
    orders = (FORWARD, 3)
    check(random_ids(tokens, top_k, experts), experts, orders)
    check(random_ids(tokens, top_k, experts), experts, orders, align=16, capacity=1.25)


@pytest.mark.emulate
@pytest.mark.slow
def test_most_experts() -> None:
    ids = random_ids(1000, 5, 16384)
    check(ids, 16384, (FORWARD,))
    check(ids, 16384, (REVERSE,), align=16, capacity=0.5, pad=True)


@pytest.mark.emulate
@pytest.mark.parametrize("align", [1, 16, 128])
@pytest.mark.parametrize(("capacity", "pad"), [(0.0, False), (0.5, False), (1.0, True), (1.3, True), (4.0, False)])
def test_capacity_alignment_and_padding(capacity: float, pad: bool, align: int) -> None:
    for tokens, top_k, experts in ((67, 3, 5), (23, 2, 37)):
        ids = random_ids(tokens, top_k, experts)
        results = check(ids, experts, (FORWARD, 1), align=align, capacity=capacity, pad=pad, tokens=4, **SMALL)
        if capacity == 0.5:
            assert results["dropped"].item() > 0
    skewed = torch.where(torch.rand(67, 3) < 0.7, 2, random_ids(67, 3, 5, outside=False))
    check(skewed.int(), 5, (REVERSE, 2), align=align, capacity=capacity, pad=pad, tokens=4, **SMALL)


@pytest.mark.emulate
def test_rows_that_are_not_needed_are_dead_too() -> None:
    ids = random_ids(40, 2, 6)
    results = dispatched(ids, 6, slack=77, tokens=4, **SMALL)
    end = results["offsets"][-1].item()
    assert (results["tokens"][end:] == -1).all() and (results["picks"][end:] == -1).all()


@pytest.mark.emulate
@pytest.mark.parametrize("options", [{}, {"align": 16}, {"align": 64, "capacity": 1.5, "pad": True}])
def test_no_tokens(options: dict[str, object]) -> None:
    """A block runs all the same: counts are zeros that somebody has to write, rows are dead."""
    check(torch.empty((0, 4), dtype=torch.int64), 9, **options)


@pytest.mark.emulate
@pytest.mark.parametrize("expert", [0, 10, -1, 11, 2**32, 2**32 + 3])
def test_all_picks_alike(expert: int) -> None:
    """One expert gets all, or none does."""
    ids = torch.full((131, 3), expert, dtype=torch.int64)
    results = check(ids, 11, tokens=8, **SMALL)
    assert results["counts"].sum().item() == (393 if 0 <= expert < 11 else 0)
    check(ids, 11, (REVERSE,), capacity=1.0, tokens=8, **SMALL)


@pytest.mark.emulate
@pytest.mark.parametrize("dtype", IDS)
def test_rows_of_picks_lie_anywhere(dtype: torch.dtype) -> None:
    wide = random_ids(53, 9, 7, dtype)
    check(wide[:, 2:5], 7, tokens=4, **SMALL)
    check(wide[1:2].expand(53, 9), 7, tokens=4, **SMALL)  # rows 0 elements apart


@pytest.mark.emulate
def test_blocks_and_threads_change_nothing() -> None:
    ids = random_ids(200, 3, 19)
    for tokens, threads, scan_threads in ((1, 32, 32), (3, 96, 64), (64, 256, 128), (1000, 1024, 1024)):
        check(ids, 19, (1,), tokens=tokens, threads=threads, scan_threads=scan_threads, capacity=1.0, align=16)


@pytest.mark.emulate
def test_many_blocks() -> None:
    """The table has more rows than the scan takes at a time."""
    check(random_ids(301, 2, 40), 40, tokens=2, **SMALL)


def test_the_shape_bounds_what_a_block_keeps() -> None:
    for experts in (1, 8, 128, 2048, 2049, 4096, 4097, 8192, 16384):
        shape = DispatchShape.of(experts, 8)
        assert shape.histograms * experts <= 16384 or shape.histograms == 1
        kernels = steps(experts, 8, capacity=1.0, target="sm_80")
        assert max(kernel.shared_bytes for kernel in kernels) <= 140 * 1024
    assert DispatchShape.of(128, 8).tokens == 128 and DispatchShape.of(8, 3000).tokens == 1
    assert steps(128, 8)[0].grid == steps(128, 8)[2].grid == "chunks"


def test_what_a_block_cannot_keep_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="dispatch_scatter: 8 experts and 70000 picks a block"):
        steps(8, 70000)
    with pytest.raises(UnsupportedError, match="needs 139280 bytes of shared memory a block, but sm_89 has"):
        steps(16384, 8, capacity=1.0, target="sm_89")


# Mistakes -------------------------------------------------------------------------------------------------------------

HEADERS = Path(nvrtc.__file__).parent.parent / "templates" / "include"
BARRIERS = re.findall(r"^ *__sync(?:threads|warp)\(\);  // (.*)$", (HEADERS / "moesaic" / HEADER).read_text(), re.M)

# Barriers whose need no order of lanes can show, because something else waits at the same place today.
UNSEEN = {"counters are up to date": "the next match waits for all lanes; a warp's memory needs the barrier"}


def test_every_barrier_says_what_it_is_for() -> None:
    text = (HEADERS / "moesaic" / HEADER).read_text()
    assert len(BARRIERS) == len(set(BARRIERS)) == len(re.findall(r"^ *__sync(?:threads|warp)\(\)", text, re.M))
    assert set(UNSEEN) <= set(BARRIERS)


@pytest.mark.emulate
@pytest.mark.parametrize("barrier", [b for b in BARRIERS if b not in UNSEEN])
def test_barriers_of_the_helpers_are_needed(barrier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any of them, some order of lanes gives another result or a report."""
    include = tmp_path / "include"
    shutil.copytree(HEADERS, include)
    path = include / "moesaic" / HEADER
    path.write_text(
        re.sub(rf"^ *__sync(?:threads|warp)\(\);  // {re.escape(barrier)}\n", "", path.read_text(), flags=re.M)
    )
    monkeypatch.setattr(nvrtc, "helper_include_dirs", lambda: [include])
    assert wrong(random_ids(301, 2, 70), 70, tokens=2, **SMALL) or wrong(random_ids(97, 8, 70), 70, tokens=97, **SMALL)


def wrong(ids: torch.Tensor, experts: int, **options: object) -> bool:
    """Whether some order of lanes gives a wrong result, or is reported."""
    for order in (FORWARD, REVERSE, 1, 2, 3):
        try:
            check(ids, experts, (order,), align=16, **options)
        except (AssertionError, EmulationError):
            return True
    return False


@pytest.mark.emulate
@pytest.mark.parametrize("barrier", ["picks are ranked, first slots have been read", "runs have their places"])
def test_barriers_of_the_kernel_are_needed(barrier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps.cache_clear()
    honest = dispatch.generate_scatter

    def mutant(op: Kernel) -> GeneratedKernel:
        kernel = honest(op)
        line = f"  __syncthreads();  // {barrier}\n"
        assert line in kernel.source
        return GeneratedKernel(**{**kernel.__dict__, "source": kernel.source.replace(line, "")})

    monkeypatch.setattr(dispatch, "generate_scatter", mutant)
    try:
        assert wrong(random_ids(97, 8, 70), 70, tokens=97, **SMALL)
    finally:
        steps.cache_clear()


# NVRTC ----------------------------------------------------------------------------------------------------------------

# Registers that a thread may take of 65536 for a multiprocessor to hold all of its threads, or half of them.
ALL_THREADS, HALF_OF_THREADS = 32, 64


def compiled(kernel: GeneratedKernel, target: str) -> nvrtc.CompiledKernel:
    made = nvrtc.compile_source(
        kernel.source, name=kernel.symbol, target=Target.parse(target), extra_options=NVRTC_OPTIONS
    )
    assert not made.resources.uses_local_memory, made.resources
    return made


@pytest.mark.nvrtc
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_dispatch_compiles(target: str, record_property) -> None:
    for options in ({}, {"align": 128}, {"align": 16, "capacity": 1.25, "pad": True}):
        for experts, ids in ((128, "i64"), (16384, "i32"), (1, "i16")):
            for kernel in steps(experts, 8, ids, target=target, **options):  # type: ignore[arg-type]
                made = compiled(kernel, target)
                record_property("registers", (kernel.symbol, target, str(made.resources)))
                assert made.resources.registers <= HALF_OF_THREADS

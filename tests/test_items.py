"""items.cuh: which blocks get which items, on the emulator and on a GPU; and the kernels that count them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from device_kernels import Run, changed_headers, emulate, everywhere, run_on_gpu

import moesaic as mo
from moesaic.codegen.target import Target
from moesaic.ir.errors import EmulationError
from moesaic.ir.ops.launch import Alloc, Kernel
from moesaic.ir.types import DType
from moesaic.passes.count_items import count_items
from moesaic.passes.specialize import Specialize
from moesaic.runtime.emulator import FORWARD, REVERSE
from moesaic.runtime.program import program_of
from moesaic.runtime.tuning.lookup import tunables

WARPS = 4
TILE = 7  # rows

# Every warp keeps a log of what it is told: how many items, then each. `out` is the count of items taken, then logs.
KERNEL = """#include "moesaic/cluster.cuh"
#include "moesaic/items.cuh"

extern "C" __global__ void CLUSTER __launch_bounds__(128) items(const int* counts, const int* offsets, int* out,
                                                                int most) {
  __shared__ int first_item[EXPERTS + 1 + 128 / 32];
  moesaic::count_before<EXPERTS, 128>(counts, first_item, [](int rows) { return (rows + 6) / 7; });
  moesaic::ItemQueue<PAIR, 128 / 32, COUNTED> queue(out);
  if constexpr (PAIR == 2) {
    moesaic::sync_cluster();
  } else {
    __syncthreads();
  }

  const bool tells = threadIdx.x == 96;
  const auto find = [&](int n) { return moesaic::find_item<EXPERTS>(n, first_item, counts, offsets); };
  int* const log = out + 1 + (blockIdx.x * 4 + threadIdx.x / 32) * (1 + 4 * most);
  int seen = 0;
  if (tells) queue.tell(find);
  for (auto next = queue.next(); next.is_one(); next = queue.next()) {
    if (tells) queue.tell(find);
    if (threadIdx.x % 32 == 0) {
      moesaic::store_one(log + 1 + 4 * seen, next.expert);
      moesaic::store_one(log + 2 + 4 * seen, next.number);
      moesaic::store_one(log + 3 + 4 * seen, next.rows);
      moesaic::store_one(log + 4 + 4 * seen, next.first_slot);
    }
    ++seen;
  }
  if (threadIdx.x % 32 == 0) moesaic::store_one(log, seen);
  if (tells) queue.finish(first_item[EXPERTS]);
  if constexpr (PAIR == 2) moesaic::sync_cluster();
}
"""
COUNTS = (
    [3, 0, 22, 7, 8, 0, 0, 61, 1, 14, 0],
    [0] * 11,
    [0] * 10 + [5],
    [400, *[0] * 9, 130],
)


def take(run: Run, counts: list[int], *, pair: int, counted: bool, blocks: int, **options: object) -> list[list]:
    """Runs the kernel, checks that its warps agree, and returns the items of each block, or pair."""
    experts = len(counts)
    names = {
        "EXPERTS": str(experts),
        "PAIR": str(pair),
        "COUNTED": str(counted).lower(),
        "CLUSTER": "__cluster_dims__(2, 1, 1)" if pair == 2 else "",
    }
    source = re.sub("|".join(names), lambda name: names[name[0]], KERNEL)
    offsets = np.cumsum([0, *counts]).astype(np.int32) * 3
    wanted = [
        (e, n, rows, offset)
        for e, (rows, offset) in enumerate(zip(counts, offsets.tolist(), strict=False))
        for n in range(-(-rows // TILE))
    ]
    most = len(wanted)
    out = np.full(1 + blocks * WARPS * (1 + 4 * most), -1, np.int32)
    out[0] = 0
    inputs = [np.array(counts, np.int32), offsets]
    out = run(source, "items", inputs, out, [most], grid=(blocks, 1), block=32 * WARPS, **options)
    assert out[0] == 0  # again
    logs = out[1:].reshape(blocks // pair, pair * WARPS, 1 + 4 * most)
    np.testing.assert_array_equal(logs, np.broadcast_to(logs[:, :1], logs.shape))
    found = [[tuple(item) for item in log[1:].reshape(most, 4)[: log[0]].tolist()] for log in logs[:, 0]]
    assert sorted(item for items in found for item in items) == wanted
    return found


@pytest.mark.emulate
@pytest.mark.parametrize("pair", [1, 2])
@pytest.mark.parametrize("counts", COUNTS, ids=lambda counts: str(sum(counts)))
def test_every_item_is_taken_once(counts: list[int], pair: int) -> None:
    for order in (FORWARD, REVERSE, 1):
        for pairs in (1, 4):
            blocks = pairs * pair
            in_turn = take(emulate, counts, pair=pair, counted=False, blocks=blocks, order=order)
            taken = take(emulate, counts, pair=pair, counted=True, blocks=blocks, order=order)
            assert {len(items) for items in in_turn} <= {sum(map(len, in_turn)) // pairs + n for n in (0, 1)}
            assert [items[:2] for items in taken] == [items[:2] for items in in_turn]


# Of gradients: items of every expert, which may have no rows, three of each.
LONG_FIRST = """#include "moesaic/items.cuh"

extern "C" __global__ void __launch_bounds__(64) items(const int* counts, const int* offsets, int* out) {
  __shared__ unsigned short long_before[EXPERTS + 1 + 64 / 32];
  moesaic::count_long<EXPERTS, 64>(counts, offsets, long_before);
  for (int n = threadIdx.x; n <= 3 * EXPERTS; n += 64) {
    const auto item = moesaic::find_item<EXPERTS, 3>(n, long_before, counts, offsets);
    const int fields[] = {item.expert, item.number, item.rows, item.first_slot};
    for (int i = 0; i < 4; ++i) moesaic::store_one(out + 4 * n + i, fields[i]);
  }
}
"""


@everywhere
@pytest.mark.parametrize(
    "counts",
    [
        [0],
        [7],
        [5] * 12,  # nobody is long
        [20, 21, 0, 39, 41, 0, 20, 19],  # only more than 40 is
        [900, *[1] * 70, 500, 0, 3, 1000],
        [*[0] * 129, 5],
        np.random.default_rng(3).geometric(0.01, 300).tolist(),
    ],
    ids=lambda counts: f"{len(counts)}-{sum(counts)}",
)
def test_long_experts_come_first(run: Run, counts: list[int]) -> None:
    experts, all_rows = len(counts), sum(counts)
    offsets = np.cumsum([0, *counts]).astype(np.int32)
    source = LONG_FIRST.replace("EXPERTS", str(experts))
    out = run(
        source, "items", [np.array(counts, np.int32), offsets], np.full(12 * experts + 4, -7, np.int32), [], block=64
    )
    long = [e for e in range(experts) if counts[e] * experts > 2 * all_rows]
    order = [*long, *(e for e in range(experts) if e not in long)]
    wanted = [[e, n, counts[e], offsets[e]] for e in order for n in range(3)]
    assert out.reshape(-1, 4).tolist() == [*wanted, [-1, 0, 0, 0]]


@pytest.mark.gpu
@pytest.mark.parametrize("pair", [1, 2])
def test_every_item_is_taken_once_by_blocks_at_once(pair: int) -> None:
    import torch

    if pair == 2 and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("pairs are clusters")
    rng = np.random.default_rng(7)
    for counts in (*COUNTS, rng.integers(0, 3000, 60).tolist()):
        for counted in (False, True):
            for _ in range(3):
                take(run_on_gpu, counts, pair=pair, counted=counted, blocks=64)


WAITS = (
    "mbarrier_wait(&memory().read[slot], seen_ / kSlots % 2 ^ 1);",
    "mbarrier_wait(&memory().told[slot], seen_ / kSlots % 2);",
    "if (blockIdx.x % kPair == 0 && next_ == last) store_one(counter_, 0);",
)
ANNOUNCED = "if constexpr (kPair == 2) mbarrier_arrive_and_expect(told, sizeof(QueuedItem));"


@pytest.mark.emulate
@pytest.mark.parametrize(
    ("wait", "pair"), [*((wait, 1) for wait in WAITS), *((wait, 2) for wait in (*WAITS, ANNOUNCED))]
)
def test_a_missing_wait_shows(wait: str, pair: int, tmp_path: Path) -> None:
    changed_headers(tmp_path, "items.cuh", wait)

    def is_wrong(order: int) -> bool:
        try:
            take(emulate, COUNTS[0], pair=pair, counted=True, blocks=4, order=order, include_dirs=[tmp_path])
        except (AssertionError, EmulationError):
            return True
        return False

    assert any(is_wrong(order) for order in (FORWARD, REVERSE, 1))


# Which kernels count --------------------------------------------------------------------------------------------------


def kernels_of(layer: mo.Experts, kind: str, target: str, passes: str = "") -> list[Kernel]:
    program = program_of(layer.module(DType.BF16, 8), passes)
    function = program.executable(kind, target, (), program.float_results if kind == "backward" else ()).module.entry
    return [op for op in function.body.ops if isinstance(op, Kernel)]


def counting(kernels: list[Kernel]) -> dict[str, str]:
    """By the symbol of a kernel that counts, that of the one that sets its count to 0."""
    zeroed = {buffer: op.symbol for op in kernels for buffer in op.operands[len(op.operands) - op.zeroes :]}
    counters = {op.symbol: op.operands[op.counter] for op in kernels if op.counter is not None}
    assert set(counters.values()) == set(zeroed)
    order = [op.symbol for op in kernels]
    found = {symbol: zeroed[buffer] for symbol, buffer in counters.items()}
    assert all(order.index(zeroing) < order.index(symbol) for symbol, zeroing in found.items())
    return found


LAYER = mo.Experts(num_experts=16, hidden=512, intermediate=256)


def test_products_of_experts_count_their_items() -> None:
    """All but the first of a backward, before which nobody sets a count to 0; its warpgroups have tiles in turn."""
    assert counting(kernels_of(LAYER, "forward", "sm_90a")) == {
        "experts_gate_up_proj": "experts_dispatch",
        "experts_down_proj": "experts_gate_up_proj",
    }
    backward = kernels_of(LAYER, "backward", "sm_90a")
    assert counting(backward) == {
        "experts_backward_d_down_proj": "experts_backward_down_proj",
        "experts_backward_gate_up_proj": "experts_backward_down_proj",
        "experts_backward_d_gate_up_proj": "experts_backward_down_proj",
    }
    assert backward[0].counter is None


def test_what_counts_nothing() -> None:
    assert counting(kernels_of(LAYER, "forward", "sm_80")) == {}
    assert counting(kernels_of(LAYER, "forward", "sm_90a", "specialize{tile=mma}")) == {}
    assert counting(kernels_of(LAYER, "forward", "sm_90a", "specialize{tile=pingpong}")) == {}


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_tables_know_no_counts(kind: str) -> None:
    """What was tuned is looked up before kernels have counts, and tuned with them."""
    program = program_of(LAYER.module(DType.BF16, 8))
    cotangents = program.float_results if kind == "backward" else ()
    planned = program.planned(kind, cotangents)
    specialized = program.executable(kind, "sm_90a", (), cotangents).module.entry
    found, again = (
        tunables(function, Specialize(), Target.parse("sm_90a"), (), ">16384") for function in (planned, specialized)
    )
    assert [one.key for one in found] == [one.key for one in again]
    assert any(one.space.op.counter is not None for one in again)


def test_counts_lie_apart() -> None:
    """None shares its place in the workspace: the next one is set to 0 while the one before is still counted up."""
    function = program_of(LAYER.module(DType.BF16, 8)).executable("forward", "sm_90a", ()).module.entry
    allocs = [op for op in function.body.ops if isinstance(op, Alloc) and op.space == "workspace"]
    counts = [op.slot for op in allocs if op.type == "tensor<i32>"]
    assert len(set(counts)) == len(counts) == 2
    assert not set(counts) & {op.slot for op in allocs if op.type != "tensor<i32>"}
    before = str(mo.ir.core.Module([function]))
    count_items(function)  # twice is once
    assert str(mo.ir.core.Module([function])) == before

"""Clusters in the emulator: blocks that run together, their barrier, and each other's shared memory."""

from __future__ import annotations

import numpy as np
import pytest
from test_emulator import ORDERS, compile_kernel, failure, orders_that_differ, run

from moesaic.ir.errors import EmulationError, InputError
from moesaic.runtime.emulator import EmulatedKernel

pytestmark = pytest.mark.emulate

ARRIVE = "moesaic_emulate_cluster_arrive();"
WAIT = "moesaic_emulate_cluster_wait();"
BEHIND = "const int behind = (blockIdx.x % 4 + 1) % 4;"
READ = "out[i] = value = *(const int*)moesaic_emulate_in_block(at, 4, behind);"


def ring(before: str = f"{ARRIVE} {WAIT}", after: str = f"{ARRIVE} {WAIT}", dynamic: bool = False) -> EmulatedKernel:
    """Twice, each thread reads what the one of its number in the next block of a cluster of 4 has written."""
    table = "MOESAIC_DYNAMIC_SHARED(int, table);" if dynamic else "__shared__ int table[64];"
    return compile_kernel(
        f"""
        {table}
        const int i = blockIdx.x * 64 + threadIdx.x;
        int* const at = table + threadIdx.x;
        int value = i;
        {BEHIND}
        for (int round = 0; round < 2; ++round) {{
          *at = value + 1000;
          {before}
          {READ}
          {after}
        }}
        """,
        "int* out",
    )


def results(kernel: EmulatedKernel, **options: int) -> list[np.ndarray]:
    shape = {"grid": 12, "block": 64, "cluster": 4, **options}
    return [run(kernel, np.zeros(768, np.int32), order=order, **shape).copy() for order in ORDERS]  # type: ignore[arg-type]


def expected() -> np.ndarray:
    """Two blocks further, round and round in each cluster, with 1000 for each time."""
    block, thread = np.divmod(np.arange(768), 64)
    return (block // 4 * 4 + (block + 2) % 4) * 64 + thread + 2000


@pytest.mark.parametrize("dynamic", [False, True])
def test_blocks_of_a_cluster_read_each_other(dynamic: bool) -> None:
    found = results(ring(dynamic=dynamic), shared_bytes=256 * dynamic)
    assert not orders_that_differ(found)
    assert np.array_equal(found[0], expected())


def test_halves_of_the_barrier() -> None:
    """What lies between them is done while others arrive; blocks need not have the same number of waits elsewhere."""
    kernel = compile_kernel(
        f"""
        __shared__ int sums[2];
        if (threadIdx.x == 0) sums[0] = 1 + blockIdx.x;
        {ARRIVE}
        if (blockIdx.x % 2) __syncthreads();
        int total = 0;
        {WAIT}
        for (int r = 0; r < 2; ++r) total += *(const int*)moesaic_emulate_in_block(sums, 4, r);
        {ARRIVE}
        atomicAdd(out + blockIdx.x, total);
        {WAIT}
        """,
        "int* out",
    )
    for order in ORDERS:
        out = run(kernel, np.zeros(6, np.int32), grid=6, block=40, cluster=2, order=order)
        assert out.tolist() == [40 * total for total in (3, 3, 7, 7, 11, 11)]


def test_threads_that_have_ended_are_not_waited_for() -> None:
    kernel = compile_kernel(
        f"""
        if (threadIdx.x >= 8 || blockIdx.x == 1) return;
        {ARRIVE} {WAIT}
        out[blockIdx.x * 8 + threadIdx.x] = 1;
        """,
        "int* out",
    )
    for order in ORDERS:
        out = run(kernel, np.zeros(24, np.int32), grid=3, block=40, cluster=3, order=order)
        assert out.reshape(3, 8).sum(1).tolist() == [8, 0, 8]


INIT = "moesaic_emulate_mbarrier_init(&barrier, {});"
ARRIVE_IN = "moesaic_emulate_mbarrier_arrive_in(&barrier, {});"


@pytest.mark.parametrize("memory", ["__shared__ alignas(16) int", "MOESAIC_DYNAMIC_SHARED(int, dynamic); int* const"])
def test_what_a_block_is_sent_counts_for_its_barrier(memory: str) -> None:
    """Each block of 4 sends four numbers to the next, which waits for their bytes and for an arrival of each block."""
    place = "table[4];" if memory.startswith("__shared__") else "table = dynamic;"
    kernel = compile_kernel(
        f"""
        {memory} {place}
        __shared__ unsigned long long barrier;
        const unsigned rank = blockIdx.x % 4;
        if (threadIdx.x == 0) {INIT.format(5)}
        {ARRIVE} {WAIT}
        if (threadIdx.x == 3) {{
          moesaic_emulate_mbarrier_arrive(&barrier, 16);
          for (int other = 0; other < 4; ++other) {ARRIVE_IN.format("other")}
          alignas(16) const int sent[4] = {{(int)rank, 10, 20, 30}};
          moesaic_emulate_mbarrier_store_in(&barrier, table, sent, 16, (rank + 1) % 4);
        }}
        moesaic_emulate_mbarrier_wait(&barrier, 0);
        out[blockIdx.x * 8 + threadIdx.x] = table[threadIdx.x % 4];
        {ARRIVE} {WAIT}
        """,
        "int* out",
    )
    for order in ORDERS:
        shape = {"grid": 8, "block": 8, "cluster": 4, "shared_bytes": 16}
        found = run(kernel, np.zeros(64, np.int32), order=order, **shape)  # type: ignore[arg-type]
        out = found.reshape(8, 2, 4)
        assert out[:, :, 0].T.tolist() == [[3, 0, 1, 2] * 2] * 2
        assert (out[:, :, 1:] == [10, 20, 30]).all()


def test_orders_find_a_missing_barrier() -> None:
    """Blocks that read too early find poison; those that write too early, others find it."""
    for kernel in (ring(before=""), ring(after="__syncthreads();")):
        found = results_or_reports(kernel)
        assert any(isinstance(x, str) or not np.array_equal(x, expected()) for x in found)


def results_or_reports(kernel: EmulatedKernel) -> list[np.ndarray | str]:
    found: list[np.ndarray | str] = []
    for order in ORDERS:
        out = np.zeros(768, np.int32)
        try:
            found.append(run(kernel, out, grid=12, block=64, cluster=4, order=order))
        except EmulationError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize(
    ("body", "reported"),
    [
        (WAIT, "a wait at the barrier of the cluster without an arrival before"),
        (f"{ARRIVE} {ARRIVE} {WAIT}", "a second arrival at the barrier of the cluster, without a wait between"),
        (f"{ARRIVE}", "a thread ends that has arrived at the barrier of the cluster and not waited"),
        ("moesaic_emulate_in_block(table, 4, 2);", "block 2 of a cluster of 2"),
        ("moesaic_emulate_in_block(out, 4, 0);", "do not lie in the block's shared memory"),
        (
            "if (blockIdx.x == 1) moesaic_emulate_in_block(table, 4, 0);",
            "shared memory of block 0 of the cluster, which has ended",
        ),
        (
            f"if (threadIdx.x == 0) {INIT.format(1)} if (blockIdx.x == 1) {ARRIVE_IN.format(0)}",
            "shared memory of block 0 of the cluster, which has ended",
        ),
        (ARRIVE_IN.format(1), "an mbarrier of another block that nobody has set up"),
        (
            f"if (blockIdx.x == 0 && threadIdx.x == 0) __syncthreads(); {ARRIVE} {WAIT}",
            "wait at the barrier of the cluster (63 of 64 threads arrived)",
        ),
    ],
)
def test_what_a_gpu_would_not_forgive(body: str, reported: str) -> None:
    shared = "__shared__ int table[1]; __shared__ unsigned long long barrier; table[0] = 1;"
    kernel = compile_kernel(f"{shared}\n{body}", "int* out")
    report = failure(kernel, np.zeros(64, np.int32), grid=2, block=32, cluster=2)
    assert reported in report and "kernel.cu" in report


def test_sizes_of_clusters() -> None:
    kernel = compile_kernel("out[blockIdx.x] = 1;", "int* out")
    for grid, cluster in ((8, 3), (8, 0), (32, 32)):
        with pytest.raises(InputError, match=f"clusters of {cluster} blocks in grid"):
            run(kernel, np.zeros(32, np.int32), grid=grid, cluster=cluster)
    assert run(kernel, np.zeros(32, np.int32), grid=32, cluster=16).all()

"""The emulator's mbarriers, and what arrives at them by itself: copies of lanes and boxes of the copy engine."""

from __future__ import annotations

import re
import textwrap

import numpy as np
import pytest

from moesaic.ir.errors import EmulationError
from moesaic.runtime.emulator import FORWARD, REVERSE, Buffer, EmulatedKernel, build

pytestmark = pytest.mark.emulate

ORDERS = (FORWARD, REVERSE, 1, 2, 3, 4)
POISON = 0x7FFD
# The hooks by short names.
HEADER = """#define init moesaic_emulate_mbarrier_init
#define arrive moesaic_emulate_mbarrier_arrive
#define arrive_after_copies moesaic_emulate_mbarrier_arrive_after_copies
#define wait moesaic_emulate_mbarrier_wait
#define copy_async moesaic_emulate_copy_async
#define copy_box moesaic_emulate_copy_box
"""
FIRST_LINE = HEADER.count("\n") + 2  # of a body, behind the header and the kernel's own line


def compile_kernel(body: str, parameters: str = "int* out", name: str = "kernel") -> EmulatedKernel:
    """A kernel whose body starts in line `FIRST_LINE` of its source."""
    text = f'{HEADER}extern "C" __global__ void {name}({parameters}) {{\n{textwrap.dedent(body).strip(chr(10))}\n}}\n'
    return build(text, name, [])


def run(kernel: EmulatedKernel, *arrays: np.ndarray, block: int = 32, **options: object) -> np.ndarray:
    """Launches a kernel with arrays as its arguments, of which it may write the last; returns that."""
    last = len(arrays) - 1
    buffers = [Buffer(a.ctypes.data, a.nbytes, f"array{i}", i == last) for i, a in enumerate(arrays)]
    kernel.launch((1, 1, 1), (block, 1, 1), [b.address for b in buffers], buffers=buffers, **options)  # type: ignore[arg-type]
    return arrays[last]


def failure(kernel: EmulatedKernel, *arrays: np.ndarray, **options: object) -> str:
    """The report of a launch that must fail."""
    with pytest.raises(EmulationError) as caught:
        run(kernel, *arrays, **options)  # type: ignore[arg-type]
    return str(caught.value)


def aligned(shape: tuple[int, ...], dtype: type = np.uint16) -> np.ndarray:
    """Zeros whose address is a multiple of 64."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    base = np.zeros(count + 64, np.uint8)
    start = -base.ctypes.data % 64
    return base[start : start + count].view(dtype).reshape(shape)


# Phases ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_waits_return_phase_by_phase(order: int) -> None:
    """One warp writes what the other reads, a number at a time, in turns."""
    kernel = compile_kernel(
        """
        __shared__ unsigned long long full, empty; __shared__ int number;
        const int lane = threadIdx.x % 32;
        if (threadIdx.x == 0) { init(&full, 1); init(&empty, 32); }
        __syncthreads();
        for (int n = 0; n < 7; ++n) {
          if (threadIdx.x == 63) {
            wait(&empty, n % 2 ^ 1);  // for n = 0 the phase before the first, which is over
            number = 100 * n;
            arrive(&full, 0);
          } else if (threadIdx.x < 32) {
            wait(&full, n % 2);
            out[32 * n + lane] = number + lane;
            arrive(&empty, 0);
          }
        }
        """
    )
    out = run(kernel, np.zeros((7, 32), np.int32), block=64, order=order)
    np.testing.assert_array_equal(out, 100 * np.arange(7)[:, None] + np.arange(32))


@pytest.mark.parametrize(("parity", "over"), [(0, False), (1, True)])
def test_before_the_first_phase_that_of_parity_1_is_over(parity: int, over: bool) -> None:
    kernel = compile_kernel(
        f"""
        __shared__ unsigned long long barrier;
        init(&barrier, 2); wait(&barrier, {parity}); out[0] = 5;
        """
    )
    if over:
        assert run(kernel, np.zeros(1, np.int32), block=1)[0] == 5
    else:
        assert "deadlock" in failure(kernel, np.zeros(1, np.int32), block=1)


def test_a_wait_that_never_ends_is_a_deadlock() -> None:
    kernel = compile_kernel(
        """
        __shared__ unsigned long long barriers[2];
        if (threadIdx.x == 0) { init(barriers, 32); init(barriers + 1, 31); arrive(barriers + 1, 64); }
        __syncthreads();
        if (threadIdx.x < 31) arrive(barriers, 0);
        if (threadIdx.x % 2) wait(barriers, 0);
        else wait(barriers + 1, 0);
        """,
        name="never",
    )
    for order in ORDERS:
        report = failure(kernel, np.zeros(1, np.int32), order=order)
        assert "deadlock: 32 of 32 threads alive" in report
        for line, lanes in ((4, "1, 3, 5"), (5, "0, 2, 4")):
            waits = rf"warp 0, lanes {lanes}, .*: wait at an mbarrier for its phase of parity 0 never\.cu:"
            assert re.search(f"{waits}{FIRST_LINE + line}", report)


def test_a_phase_waits_for_its_bytes() -> None:
    """All arrivals are there, but not the 4096 bytes more than the one box has."""
    body = """
        __shared__ __align__(1024) unsigned short box[8][64]; __shared__ unsigned long long barrier;
        init(&barrier, 1); arrive(&barrier, BYTES);
        copy_box(box, in, 8, 128, 128, 8, 128, &barrier);
        wait(&barrier, 0);
        out[0] = box[0][0];
    """
    given = aligned((8, 64))
    given[:] = 7
    parameters = "const unsigned short* in, int* out"
    right = compile_kernel(body.replace("BYTES", "1024"), parameters)
    assert run(right, given, np.zeros(1, np.int32), block=1)[0] == 7
    wrong = compile_kernel(body.replace("BYTES", "1024 + 4096"), parameters)
    assert "deadlock" in failure(wrong, given, np.zeros(1, np.int32), block=1)


def test_bytes_may_come_before_they_are_announced() -> None:
    """Another block's share of a box does: the phase is not over until this block has announced them."""
    kernel = compile_kernel(
        """
        __shared__ __align__(1024) unsigned short box[8][64]; __shared__ unsigned long long barrier;
        if (threadIdx.x == 0) { init(&barrier, 1); copy_box(box, in, 8, 128, 128, 8, 128, &barrier); }
        __syncthreads();
        if (threadIdx.x != 0) { wait(&barrier, 0); out[threadIdx.x] = box[0][threadIdx.x]; return; }
        for (int i = 0; i < 100; ++i) __nanosleep(1);
        arrive(&barrier, 1024);
        """,
        "const unsigned short* in, int* out",
    )
    given = aligned((8, 64))
    given[0] = np.arange(64)
    for order in ORDERS:
        out = run(kernel, given, np.zeros(32, np.int32), order=order)
        np.testing.assert_array_equal(out, np.arange(32))


# What a barrier may not be used for -----------------------------------------------------------------------------------

MISUSE = {
    "not_set_up": ("arrive(&barrier, 0);", "an mbarrier that nobody has set up"),
    "waits_first": ("wait(&barrier, 1);", "an mbarrier that nobody has set up"),
    "no_arrivals": ("init(&barrier, 0);", "an mbarrier expects 1 to 65535 arrivals here"),
    "many_arrivals": ("init(&barrier, 65536);", "an mbarrier expects 1 to 65535 arrivals here"),
    "parity": ("init(&barrier, 1); wait(&barrier, 2);", "the parity of a phase is 0 or 1"),
    "too_many": ("init(&barrier, 1); arrive(&barrier, 128); arrive(&barrier, 0);", "more arrivals at an mbarrier than"),
    "misaligned": ("init(box[0] + 2, 1);", "misaligned access to 8 bytes of shared"),
    "global": ("init(out, 1);", "8 bytes at address 0x.* do not lie in the block's shared memory"),
    "box_of_64_bytes": ("init(&barrier, 1); copy_box(box, out, 8, 64, 64, 8, 64, &barrier);", "lines of 128 bytes"),
    "box_astray": (
        "init(&barrier, 1); copy_box(box[1], out, 2, 128, 128, 2, 128, &barrier);",
        "misaligned access to 256 bytes of shared memory at address 0x.*: expected a multiple of 1024",
    ),
    "box_too_long": (
        "init(&barrier, 1); copy_box(box, out, 4096, 128, 128, 8, 128, &barrier);",
        "524288 bytes at address 0x.* do not lie in the block's shared memory",
    ),
    "source": (
        "init(&barrier, 1); copy_box(box, out, 8, 128, 128, 8, 128, &barrier); wait(&barrier, 0);",
        "out of bounds: read of 16 bytes at byte 512 of 'array0'",
    ),
}


@pytest.mark.parametrize("mistake", MISUSE)
def test_misuse_is_reported(mistake: str) -> None:
    code, message = MISUSE[mistake]
    kernel = compile_kernel(
        f"__shared__ __align__(1024) unsigned short box[8][64]; __shared__ unsigned long long barrier;\n{code}",
        name="misuse",
    )
    report = failure(kernel, aligned((128,), np.int32), block=1)
    assert re.search(rf"misuse\.cu:{FIRST_LINE + 1}\b.*: .*{message}", report)


def test_one_lane_too_many_arrives() -> None:
    """In whatever order, for the phase waits for bytes that nobody brings."""
    kernel = compile_kernel(
        """
        __shared__ unsigned long long barrier;
        if (threadIdx.x == 0) init(&barrier, 31);
        __syncthreads();
        arrive(&barrier, 8);
        """,
    )
    for order in ORDERS:
        report = failure(kernel, np.zeros(1, np.int32), order=order)
        assert "more arrivals at an mbarrier than its phase was set up for" in report


# Copies of lanes ------------------------------------------------------------------------------------------------------

# Each lane of a warp copies a word, which the lanes of the other one read.
COPIES = """
    __shared__ __align__(16) int words[32]; __shared__ unsigned long long barrier;
    const int lane = threadIdx.x % 32;
    if (threadIdx.x == 0) init(&barrier, 32);
    __syncthreads();
    if (threadIdx.x >= 32) {
      copy_async(words + lane, in + lane, 4, true);
      arrive_after_copies(&barrier);
      return;
    }
    wait(&barrier, 0);
    out[lane] = words[31 - lane];
"""


def copies(old: str = "", new: str = "") -> EmulatedKernel:
    assert old in COPIES
    return compile_kernel(COPIES.replace(old, new), "const int* in, int* out")


def test_copies_arrive_by_themselves() -> None:
    given = np.arange(1, 33, dtype=np.int32)
    for order in ORDERS:
        out = run(copies(), given, np.zeros(32, np.int32), block=64, order=order)
        np.testing.assert_array_equal(out, given[::-1])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("wait(&barrier, 0);", ""),
        ("arrive_after_copies(&barrier);", "arrive(&barrier, 0);"),
        ("wait(&barrier, 0);", "wait(&barrier, 1);"),
        (
            "copy_async(words + lane, in + lane, 4, true);\n      arrive_after_copies(&barrier);",
            "arrive_after_copies(&barrier); copy_async(words + lane, in + lane, 4, true);",
        ),
    ],
    ids=["no_wait", "arrives_before_its_copies", "waits_for_the_phase_before", "copies_after_the_arrival"],
)
def test_copies_come_no_sooner_than_somebody_waits(old: str, new: str) -> None:
    """Until then, whoever reads finds poison: in any order, or nothing of a copy that has not started yet."""
    given = np.arange(1, 33, dtype=np.int32)
    for order in ORDERS:
        out = run(copies(old, new), given, np.zeros(32, np.int32), block=64, order=order)
        assert not np.isin(out, given).any()
        np.testing.assert_array_equal(out.view(np.uint32), POISON << 16 | POISON)


def test_an_arrival_counts_the_copies_before_it_alone() -> None:
    """Two stages of copies, each with a barrier of its own: the second's are not there when the first's are."""
    kernel = compile_kernel(
        """
        __shared__ __align__(16) int words[64]; __shared__ unsigned long long barriers[2];
        if (threadIdx.x == 0) { init(barriers, 1); init(barriers + 1, 1); }
        __syncthreads();
        if (threadIdx.x == 32) {
          for (int stage = 0; stage < 2; ++stage) {
            for (int i = 0; i < 32; ++i) copy_async(words + 32 * stage + i, in + 32 * stage + i, 4, true);
            arrive_after_copies(barriers + stage);
          }
          return;
        }
        if (threadIdx.x > 32) return;
        wait(barriers, 0);
        out[threadIdx.x] = words[threadIdx.x];
        out[32 + threadIdx.x] = words[32 + threadIdx.x];
        __syncwarp();
        wait(barriers + 1, 0);
        out[64 + threadIdx.x] = words[32 + threadIdx.x];
        """,
        "const int* in, int* out",
    )
    given = np.arange(1, 65, dtype=np.int32)
    for order in ORDERS:
        out = run(kernel, given, np.zeros(96, np.int32), block=64, order=order)
        np.testing.assert_array_equal(out[:32], given[:32])
        np.testing.assert_array_equal(out[32:64].view(np.uint32), POISON << 16 | POISON)
        np.testing.assert_array_equal(out[64:], given[32:])


# Boxes ----------------------------------------------------------------------------------------------------------------

STRIDE = 72  # elements between the rows of a matrix
BOX = """
    __shared__ __align__(1024) unsigned short box[ROWS][64]; __shared__ unsigned long long barrier;
    if (threadIdx.x == 0) {
      for (int i = 0; i < ROWS * 64; ++i) box[i / 64][i % 64] = 1234;
      init(&barrier, 1);
      arrive(&barrier, ROWS * 128);
      copy_box(box, in, ROWS, 128, STRIDE * 2, VALID_ROWS, VALID_COLUMNS * 2, &barrier);
    }
    __syncthreads();
    wait(&barrier, 0);
    for (int i = threadIdx.x; i < ROWS * 64; i += 32) out[i] = box[i / 64][i % 64];
"""


def box_kernel(rows: int, valid_rows: int, valid_columns: int, old: str = "", new: str = "") -> EmulatedKernel:
    """Brings a box and shows how it lies in shared memory; `old` is replaced by `new`."""
    assert old in BOX
    body = BOX.replace(old, new)
    names = {"VALID_ROWS": valid_rows, "VALID_COLUMNS": valid_columns, "ROWS": rows, "STRIDE": STRIDE}
    for name, value in names.items():
        body = body.replace(name, str(value))
    return compile_kernel(body, "const unsigned short* in, unsigned short* out", "boxes")


@pytest.mark.parametrize(
    ("rows", "valid_rows", "valid_columns"),
    [(16, 16, 64), (16, 11, 64), (24, 24, 37), (8, 3, 8), (8, 0, 64), (8, -3, 64), (8, 8, -5)],
)
def test_boxes_land_swizzled_with_zeros_outside(rows: int, valid_rows: int, valid_columns: int) -> None:
    """Chunk c of line r lies at c ^ r % 8. Nothing is read but what is valid: the buffer ends there."""
    kernel = box_kernel(rows, valid_rows, valid_columns)
    matrix = 1 + np.arange(rows * STRIDE).reshape(rows, STRIDE)
    lines = np.zeros((rows, 64), np.uint16)
    if valid_columns > 0:
        lines[: max(valid_rows, 0), :valid_columns] = matrix[: max(valid_rows, 0), :valid_columns]
    wanted = np.empty_like(lines)
    for r in range(rows):
        for c in range(8):
            wanted[r, 8 * (c ^ r % 8) :][:8] = lines[r, 8 * c :][:8]
    given = aligned((max(1, (valid_rows - 1) * STRIDE + valid_columns),))
    given[:] = matrix.reshape(-1)[: given.size]
    for order in ORDERS:
        np.testing.assert_array_equal(run(kernel, given, np.zeros((rows, 64), np.uint16), order=order), wanted)


WAIT = "    wait(&barrier, 0);\n"
SHOW = "    for (int i = threadIdx.x; i < ROWS * 64; i += 32) out[i] = box[i / 64][i % 64];\n"


def test_a_box_is_poison_until_somebody_waits() -> None:
    """Whatever its place held before."""
    given = aligned((16 * STRIDE,))
    given[:] = 7
    kernel = box_kernel(16, 16, 64, WAIT + SHOW, SHOW + "    __syncthreads();\n" + WAIT)
    for order in ORDERS:
        np.testing.assert_array_equal(run(kernel, given, np.zeros((16, 64), np.uint16), order=order), POISON)


def test_a_box_that_nobody_waits_for_is_reported() -> None:
    kernel = box_kernel(16, 16, 64, WAIT, "")
    for order in ORDERS:
        with pytest.raises(EmulationError, match=r"a box of the copy engine is under way, and the block has ended"):
            run(kernel, aligned((16 * STRIDE,)), np.zeros((16, 64), np.uint16), order=order)


@pytest.mark.parametrize(
    "change",
    [
        "if (threadIdx.x == 9) box[3][5] = 7;\n__syncwarp(); wait(&barrier, 0);",
        "if (threadIdx.x == 9) copy_box(box, in, 8, 128, 128, 8, 128, &barrier);\n__syncwarp(); wait(&barrier, 0);",
    ],
    ids=["written", "of_another_box"],
)
def test_the_place_of_a_box_is_its_own_until_it_has_come(change: str) -> None:
    given = aligned((16 * STRIDE,))
    kernel = box_kernel(16, 16, 64, "wait(&barrier, 0);", change)
    for order in ORDERS:
        report = failure(kernel, given, np.zeros((16, 64), np.uint16), order=order)
        assert "its destination was written meanwhile, or is that of another copy" in report
        assert re.search(r"boxes\.cu:\d+: a box of the copy engine", report)


def test_copies_and_boxes_of_one_phase() -> None:
    """Lanes copy one operand, one of them asks for the other: the phase waits for both."""
    kernel = compile_kernel(
        """
        __shared__ __align__(1024) unsigned short box[8][64]; __shared__ __align__(16) int words[32];
        __shared__ unsigned long long barrier;
        const int lane = threadIdx.x % 32;
        if (threadIdx.x == 0) init(&barrier, 33);
        __syncthreads();
        if (threadIdx.x >= 32) {
          if (lane == 5) { arrive(&barrier, 1024); copy_box(box, in, 8, 128, 128, 8, 128, &barrier); }
          copy_async(words + lane, in + 2 * lane, 4, true);
          arrive_after_copies(&barrier);
        } else {
          wait(&barrier, 0);
          out[lane] = box[0][lane] + 1000 * (words[lane] & 0xffff);
        }
        """,
        "const unsigned short* in, int* out",
    )
    given = aligned((8, 64))
    given[0] = 1 + np.arange(64)
    for order in ORDERS:
        out = run(kernel, given, np.zeros(32, np.int32), block=64, order=order)
        np.testing.assert_array_equal(out, given[0, :32] + 1000 * given[0, ::2].astype(np.int32))

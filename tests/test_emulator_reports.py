"""Every mistake in a kernel that the emulator must catch, and what its reports say."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from moesaic.ir.errors import EmulationError
from moesaic.runtime.emulator import FORWARD, REVERSE, Buffer, EmulatedKernel, build

pytestmark = pytest.mark.emulate

ORDERS = (FORWARD, REVERSE, 1, 2, 3, 4)
HEADER = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n"
FIRST_LINE = 4  # of a body, behind the header and the kernel's own line


def compile_kernel(body: str, parameters: str, name: str = "kernel", **more: object) -> EmulatedKernel:
    """A kernel whose body starts in line `FIRST_LINE` of its source."""
    text = f'{HEADER}extern "C" __global__ void {name}({parameters}) {{\n{textwrap.dedent(body).strip(chr(10))}\n}}\n'
    return build(text, name, [], **more)  # type: ignore[arg-type]


def buffer_of(array: np.ndarray, name: str = "array", writable: bool = True) -> Buffer:
    return Buffer(array.ctypes.data, array.nbytes, name, writable)


def run(kernel: EmulatedKernel, out: np.ndarray, grid: int = 1, block: int = 32, **options: object) -> np.ndarray:
    """Launches a kernel with `out` as its only argument; returns `out`."""
    kernel.launch((grid, 1, 1), (block, 1, 1), [out.ctypes.data], **options)  # type: ignore[arg-type]
    return out


def failure(kernel: EmulatedKernel, out: np.ndarray, grid: int = 1, block: int = 32, **options: object) -> str:
    """The report of a launch that must fail."""
    with pytest.raises(EmulationError) as caught:
        run(kernel, out, grid, block, **options)
    return str(caught.value)


# Mistakes -------------------------------------------------------------------------------------------------------------


def test_skipped_syncthreads_is_a_deadlock() -> None:
    kernel = compile_kernel(
        """
        const int t = threadIdx.x;
        if (t % 32 >= 16 || t >= 32) __syncthreads();
        else out[t] = __shfl_xor_sync(0xffffffffu, t, 1);
        """,
        "int* out",
        "skips_barrier",
    )
    for order in ORDERS:
        report = failure(kernel, np.zeros(64, np.int32), grid=3, block=64, order=order)
        assert "kernel 'skips_barrier', block (" in report
        assert "deadlock: 64 of 64 threads alive" in report
        assert (
            f"warp 0, lanes 16-31: wait at __syncthreads (48 of 64 threads arrived) skips_barrier.cu:{FIRST_LINE + 1}"
            in report
        )
        assert (
            "warp 0, lanes 0-15: wait at __shfl_xor_sync with mask 0xffffffff for lanes 16-31 "
            f"skips_barrier.cu:{FIRST_LINE + 2}"
        ) in report
        assert "warp 1, lanes 0-31: wait at __syncthreads" in report


def test_divergent_syncthreads() -> None:
    kernel = compile_kernel(
        """
        if (threadIdx.x < 40)
          __syncthreads();
        else
          __syncthreads();
        """,
        "int* out",
        "divergent",
    )
    report = failure(kernel, np.zeros(1, np.int32), block=64)
    assert "divergent __syncthreads" in report
    assert f"divergent.cu:{FIRST_LINE + 3}" in report
    assert f"line {FIRST_LINE + 1}" in report


def test_divergent_warp_operations() -> None:
    kernel = compile_kernel(
        """
        if (threadIdx.x < 7) __syncwarp();
        else out[threadIdx.x] = __ballot_sync(~0u, 1);
        """,
        "int* out",
        "mixed",
    )
    report = failure(kernel, np.zeros(32, np.int32))
    assert (
        f"mixed.cu:{FIRST_LINE + 1}: __ballot_sync with mask 0xffffffff meets lane 0 of its warp at __syncwarp"
        in report
    )


def test_syncwarp_that_some_lanes_never_reach() -> None:
    kernel = compile_kernel(
        """
        if (threadIdx.x == 3) { while (true) __syncthreads(); }
        __syncwarp();
        """,
        "int* out",
        "waits",
    )
    report = failure(kernel, np.zeros(1, np.int32))
    assert f"lanes 0-2, 4-31: wait at __syncwarp with mask 0xffffffff for lanes 3 waits.cu:{FIRST_LINE + 1}" in report


def test_read_of_an_inactive_lane() -> None:
    kernel = compile_kernel(
        """
        const int lane = threadIdx.x;
        if (lane < 20) out[lane] = __shfl_down_sync(0xfffffu, lane, 4);
        """,
        "int* out",
        "inactive",
    )
    report = failure(kernel, np.zeros(32, np.int32))
    assert f"(warp 0, lane 16) inactive.cu:{FIRST_LINE + 1}: __shfl_down_sync reads lane 20" in report
    assert "which its mask does not name" in report


def test_read_of_an_exited_lane() -> None:
    kernel = compile_kernel(
        """
        if (threadIdx.x == 9) return;
        out[threadIdx.x] = __shfl_sync(~0u, 5, 9);
        """,
        "int* out",
    )
    assert "reads lane 9, which has exited" in failure(kernel, np.zeros(32, np.int32))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("__shfl_sync(2u, 1, 0)", "mask 0x00000002, which does not name the calling lane"),
        ("__shfl_sync(1u, 1, 0, 12)", "width 12; expected a power of two"),
        ("__any_sync(0u, 1)", "mask 0x00000000, which does not name the calling lane"),
        ("(__trap(), 1)", "__trap()"),
        ("(moesaic_emulate_named_barrier(0, 32), 1)", "expected an id from 1 to 15"),
        ("1 / (out[0] - out[0])", "division by zero"),
        ("*(int*)64", "unmapped memory at address 0x40"),
    ],
)
def test_bad_calls(call: str, message: str) -> None:
    report = failure(compile_kernel(f"\nout[0] = {call};", "int* out", "bad_call"), np.zeros(1, np.int32), block=1)
    assert message in report
    assert f"bad_call.cu:{FIRST_LINE}" in report


def test_stack_overflow() -> None:
    source = """
    __device__ __noinline__ int deeper(volatile int* out, int n) {
      volatile int local[64];
      local[n % 64] = out[0];
      return n < 0 ? 0 : deeper(out, n + 1) + local[n % 64];
    }
    extern "C" __global__ void recursion(int* out) { out[1] = deeper(out, 0); }
    """
    report = failure(build(source, "recursion", []), np.zeros(2, np.int32), grid=4)
    assert "stack of 61440 bytes overflowed" in report
    assert re.search(r"recursion.cu:[2-5]: the thread's stack", report)


@pytest.mark.parametrize(("index", "line"), [(-1, 5), (0, 6), (8, 5), (4, 7)])
def test_index_outside_an_array(index: int, line: int) -> None:
    kernel = compile_kernel(
        """
        __shared__ float shared[8]; float local[4] = {0.0f, 1.0f, 2.0f, 3.0f};
        shared[index] = 1.0f;
        if (index == 0) { out[1] = shared[8 + threadIdx.x]; }
        out[0] = local[index];
        """,
        "float* out, int index",
        "indexed",
    )
    with pytest.raises(EmulationError) as caught:
        kernel.launch((1, 1, 1), (1, 1, 1), [np.zeros(2, np.float32).ctypes.data, index])
    assert f"indexed.cu:{line}: an index outside an array" in str(caught.value)


def test_endless_loop_ends_with_a_report() -> None:
    kernel = compile_kernel("while (*(volatile int*)out == 0) {}", "int* out", "endless")
    report = failure(kernel, np.zeros(1, np.int32), grid=2, timeout_s=0.2)
    assert "time limit of 0.2 s" in report
    assert f"endless.cu:{FIRST_LINE}" in report


HOOKED = """
    const {type}* p = reinterpret_cast<const {type}*>(in{offset}) + threadIdx.x;
    moesaic_emulate_access(p, sizeof({type}), alignof({type}), {write});
    if ({write}) *const_cast<{type}*>(p) = {type}(); else *out = (float)sizeof(*p);
"""


def hooked(type_name: str, offset: str = "", write: bool = False) -> EmulatedKernel:
    body = HOOKED.format(type=type_name, offset=offset, write=str(write).lower())
    return compile_kernel(body, "const float* in, float* out", "hooked")


@pytest.mark.parametrize("order", ORDERS)
def test_read_one_element_out_of_bounds(order: int) -> None:
    source, out = np.ones(31, np.float32), np.zeros(1, np.float32)
    buffers = [buffer_of(source, "source", writable=False), buffer_of(out, "out")]
    kernel = hooked("float")
    args = [source.ctypes.data, out.ctypes.data]
    kernel.launch((1, 1, 1), (31, 1, 1), args, buffers=buffers, order=order)
    with pytest.raises(EmulationError) as caught:
        kernel.launch((1, 1, 1), (32, 1, 1), args, buffers=buffers, order=order)
    report = str(caught.value)
    assert "kernel 'hooked', block (0, 0, 0), thread (31, 0, 0) (warp 0, lane 31)" in report
    assert f"hooked.cu:{FIRST_LINE + 1}: out of bounds: read of 4 bytes at byte 124 of 'source' (124 bytes)" in report


def test_read_before_a_buffer() -> None:
    source, out = np.ones(64, np.float32), np.zeros(1, np.float32)
    buffers = [Buffer(source.ctypes.data + 128, 128, "second half"), buffer_of(out, "out")]
    with pytest.raises(EmulationError, match="8 bytes before the start of 'second half'"):
        hooked("float", " + 30").launch((1, 1, 1), (1, 1, 1), [source.ctypes.data, out.ctypes.data], buffers=buffers)


def test_vector_that_reaches_over_the_end() -> None:
    source, out = np.ones(130, np.float32), np.zeros(1, np.float32)
    start = source.ctypes.data + (-source.ctypes.data) % 16
    buffers = [Buffer(start, 126 * 4, "source"), buffer_of(out, "out")]
    with pytest.raises(EmulationError, match="read of 16 bytes at byte 496 of 'source' \\(504 bytes\\)"):
        hooked("float4").launch((1, 1, 1), (32, 1, 1), [start, out.ctypes.data], buffers=buffers)


@pytest.mark.parametrize("registered", [True, False])
def test_misaligned_vector_load(registered: bool) -> None:
    source, out = np.ones(256, np.float32), np.zeros(1, np.float32)
    buffers = [buffer_of(source, "source"), buffer_of(out, "out")] if registered else []
    start = source.ctypes.data + (-source.ctypes.data) % 16
    kernel = hooked("float4", " + 1")
    with pytest.raises(EmulationError, match=r"misaligned read of 16 bytes .* expected a multiple of 16"):
        kernel.launch((1, 1, 1), (32, 1, 1), [start, out.ctypes.data], buffers=buffers)


def test_write_to_a_read_only_buffer() -> None:
    source, out = np.ones(32, np.float32), np.zeros(1, np.float32)
    buffers = [buffer_of(source, "weights", writable=False), buffer_of(out, "out")]
    with pytest.raises(EmulationError, match="write of 4 bytes at byte 0 of 'weights', which is read-only"):
        hooked("float", write=True).launch(
            (1, 1, 1), (32, 1, 1), [source.ctypes.data, out.ctypes.data], buffers=buffers
        )
    assert source.all()


def test_atomics_and_ldg_are_checked() -> None:
    kernel = compile_kernel("atomicAdd(out + 1, __ldg(out));", "int* out")
    out = np.zeros(2, np.int32)
    run(kernel, out, buffers=[buffer_of(out)])
    assert "write of 4 bytes at byte 4 of 'half'" in failure(kernel, out, buffers=[buffer_of(out[:1], "half")])


def test_shared_and_local_memory_pass_the_check() -> None:
    kernel = compile_kernel(
        """
        __shared__ int shared;
        MOESAIC_DYNAMIC_SHARED(int, dynamic);
        int local = 3;
        if (threadIdx.x == 0) { shared = 0; dynamic[0] = 0; }
        __syncthreads();
        atomicAdd(&shared, 1);
        atomicAdd(dynamic, 2);
        moesaic_emulate_access(&local, 4, 4, true);
        __syncthreads();
        if (threadIdx.x == 0) out[0] = shared + dynamic[0] + local;
        """,
        "int* out",
    )
    out = np.zeros(1, np.int32)
    assert run(kernel, out, buffers=[buffer_of(out)], shared_bytes=4)[0] == 32 + 64 + 3


def test_report_names_the_kernel_line_that_called_a_helper(tmp_path: Path) -> None:
    (tmp_path / "load.cuh").write_text(
        "template <class T> __device__ __forceinline__ T load(const T* p) {\n"
        "  moesaic_emulate_access(p, sizeof(T), alignof(T), false);\n"
        "  return *p;\n"
        "}\n"
        "__device__ __noinline__ void meet() {\n"
        "  __syncthreads();\n"
        "}\n"
    )
    source = (
        '#include "load.cuh"\n'
        'extern "C" __global__ void calls_helper(const int* out) {\n'
        "  if (threadIdx.x == 1)\n"
        "    meet();\n"
        "  load(out + threadIdx.x);\n"
        "  __syncwarp();\n"
        "}\n"
    )
    kernel = build(source, "calls_helper", [tmp_path])
    out = np.zeros(8, np.int32)
    assert "calls_helper.cu:5 (in load.cuh:2): out of bounds" in failure(kernel, out, buffers=[buffer_of(out)])
    report = failure(kernel, np.zeros(32, np.int32))
    assert "lanes 1: wait at __syncthreads (1 of 32 threads arrived) calls_helper.cu:4 (in load.cuh:6)" in report


def test_a_failure_leaves_the_kernel_usable() -> None:
    kernel = compile_kernel("if (out[threadIdx.x] != 0) __trap(); out[threadIdx.x] = 5;", "int* out")
    for _ in range(3):
        out = np.ones(32, np.int32)
        assert "__trap()" in failure(kernel, out, grid=8, block=32)
        out = np.zeros(32, np.int32)
        np.testing.assert_array_equal(run(kernel, out, block=32), 5)


def test_a_fault_elsewhere_still_ends_the_process() -> None:
    script = (
        "import ctypes, numpy as np\n"
        "from moesaic.runtime.emulator import build\n"
        "k = build('extern \"C\" __global__ void k(int* p) { *p = 1; }', 'k', [])\n"
        "out = np.zeros(1, np.int32)\n"
        "k.launch((1, 1, 1), (1, 1, 1), [out.ctypes.data])\n"
        "print('launched', flush=True)\n"
        "ctypes.string_at(8)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert "launched" in result.stdout
    assert result.returncode == -11

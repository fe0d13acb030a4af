"""The emulator itself: the CUDA language on the CPU, and every mistake that it must catch."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from moesaic.ir.errors import EmulationError, InputError, InputTypeError
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


def by_order(kernel: EmulatedKernel, out: np.ndarray, **shape: int) -> list[np.ndarray]:
    """The results under every order."""
    results = []
    for order in ORDERS:
        out[...] = 0
        results.append(run(kernel, out, order=order, **shape).copy())
    return results


def orders_that_differ(results: Sequence[np.ndarray]) -> list[int]:
    return [order for order, result in zip(ORDERS, results, strict=True) if not np.array_equal(result, results[0])]


# The language ---------------------------------------------------------------------------------------------------------


def test_indices_in_three_dimensions() -> None:
    kernel = compile_kernel(
        """
        const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
        out[block * (blockDim.x * blockDim.y * blockDim.z) + thread] = block * 1000 + thread;
        """,
        "int* out",
    )
    out = np.zeros((12, 40), np.int32)
    kernel.launch((2, 3, 2), (5, 4, 2), [out.ctypes.data], buffers=[buffer_of(out)], order=7)
    np.testing.assert_array_equal(out, np.arange(12)[:, None] * 1000 + np.arange(40))


def test_parameters_of_every_kind() -> None:
    kernel = compile_kernel(
        """
        out[0] = a; out[1] = (double)b; out[2] = c; out[3] = d; out[4] = e; out[5] = __bfloat162float(f);
        out[6] = g; out[7] = h.x + h.y;
        """,
        "double* __restrict__ out, int a, const long long b, unsigned char c, float d, double e, __nv_bfloat16 f, "
        "bool g, const __grid_constant__ float2 h",
    )
    assert kernel.parameters == ("p8", "i4", "i8", "u1", "f4", "f8", "f2", "u1", "s8")
    out = np.zeros(8)
    pair = np.array([1.5, 2.0], np.float32).tobytes()
    args = [out.ctypes.data, -3, -(2**40), 255, 0.5, 1e-300, 1.00390625, True, pair]
    kernel.launch((1, 1, 1), (1, 1, 1), args)
    np.testing.assert_array_equal(out, [-3, -(2**40), 255, 0.5, 1e-300, 1.0, 1, 3.5])


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ([0], InputError),
        ([0, 1.5], InputTypeError),
        ([0, 2**31], InputTypeError),
        ([-1, 1], InputTypeError),
        ([b"12345678", 1], InputTypeError),
    ],
)
def test_wrong_arguments(args: list[int], error: type[Exception]) -> None:
    kernel = compile_kernel("out[0] = n;", "int* out, int n", "wrong_arguments")
    with pytest.raises(error, match="wrong_arguments"):
        kernel.launch((1, 1, 1), (1, 1, 1), args)


def test_launch_shapes() -> None:
    kernel = compile_kernel("out[0] = 1;", "int* out", "shapes")
    for block, options, message in (
        ((1025, 1, 1), {}, "1025 threads"),
        ((1, 1, 1), {"shared_bytes": 1 << 20}, "dynamic shared"),
        ((1, 1, 1), {"order": -2}, "order"),
    ):
        with pytest.raises(InputError, match=message):
            kernel.launch((1, 1, 1), block, [0], **options)
    kernel.launch((0, 1, 1), (1, 1, 1), [0])  # an empty grid does nothing


CHECKS = {
    "count bits": "__popc(0xf0f0u) == 8 && __popcll(~0ull) == 64",
    "find bits": "__ffs(8) == 4 && __ffs(0) == 0 && __clz(1) == 31 && __clz(0) == 32 && __clzll(1) == 63",
    "reverse bits": "__brev(1u) == 0x80000000u && __brevll(1ull) == 0x8000000000000000ull",
    "byte_perm": "__byte_perm(0x33221100u, 0x77665544u, 0x7531) == 0x77553311u",
    "byte_perm sign": "__byte_perm(0x000000f0u, 0u, 0x8888) == 0xffffffffu",
    "reinterpret": "__float_as_uint(1.0f) == 0x3f800000u && __uint_as_float(0xff800000u) == -INFINITY",
    "reinterpret signed": "__float_as_int(-0.0f) == (int)0x80000000 && __int_as_float(0x40000000) == 2.0f",
    "saturate": "__saturatef(2.0f) == 1.0f && __saturatef(-1.0f) == 0.0f && __saturatef(NAN) == 0.0f",
    "exp, log": "fabsf(__expf(1.0f) - 2.7182817f) < 1e-6f && fabsf(__logf(2.0f) - 0.6931472f) < 1e-6f",
    "reciprocals": "rsqrtf(4.0f) == 0.5f && __frcp_rn(4.0f) == 0.25f && __fdividef(1.0f, 8.0f) == 0.125f",
    "maths": "exp2f(3.0f) == 8.0f && __fmaf_rn(2.0f, 3.0f, 1.0f) == 7.0f && fmaxf(NAN, 1.0f) == 1.0f",
    "min, max": "min(3, -2) == -2 && max(3u, 7u) == 7u && min(1.5f, 0.5f) == 0.5f && umin(1u, 2u) == 1u",
    "mixed max": "max(-1, 1u) == 0xffffffffu && max(1ll, 2ll) == 2ll && min(2.0, 1.0f) == 1.0",
    "classify": "isnan(NAN) && !isinf(1.0f) && isinf(-INFINITY)",
    "round": "__float2int_rn(2.5f) == 2 && __float2int_rz(-2.7f) == -2 && __float2int_rd(-2.1f) == -3",
    "clamp": "__float2int_rn(1e20f) == 2147483647 && __float2int_rn(NAN) == 0 && __float2uint_rn(-1.0f) == 0",
    "wide": "__umulhi(1u << 31, 4u) == 2 && __funnelshift_l(0x80000000u, 1u, 1) == 3u",
    "vectors": "make_float4(1, 2, 3, 4).w == 4.0f && make_uint2(5, 6).y == 6 && make_int4(1, 2, 3, 4).z == 3",
    "alignment": "sizeof(int4) == 16 && alignof(float4) == 16 && alignof(uint2) == 8",
    "bf16 ties to even": "__bfloat162float(__float2bfloat16_rn(1.00390625f)) == 1.0f",
    "bf16 rounds": "__bfloat162float(__float2bfloat16_rn(1.01171875f)) == 1.015625f",
    "half rounds": "__half2float(__float2half_rn(2049.0f)) == 2048.0f && __half2float(__float2half_rn(1e6f)) > 1e30f",
    "bf16 pairs": "__bfloat1622float2(__floats2bfloat162_rn(1.0f, 2.0f)).y == 2.0f",
    "warpSize": "warpSize == 32",
}


def test_intrinsics() -> None:
    body = "\n".join(f"out[{i}] = {check};" for i, check in enumerate(CHECKS.values()))
    out = run(compile_kernel(body, "int* out", "intrinsics"), np.zeros(len(CHECKS), np.int32), block=1)
    assert [name for name, passed in zip(CHECKS, out, strict=True) if passed != 1] == []


def test_language_that_a_host_compiler_lacks() -> None:
    source = (
        HEADER
        + """
        struct __align__(16) Pair { float a, b; };
        __constant__ int table[4] = {4, 3, 2, 1};
        __device__ __forceinline__ int look_up(const int* __restrict__ values, int i) { return __ldg(values + i); }
        template <int N> __device__ __noinline__ int sum() {
          __shared__ alignas(16) int scratch[N];
          scratch[threadIdx.x] = look_up(table, threadIdx.x);
          __syncthreads();
          int total = 0;
          #pragma unroll
          for (int i = 0; i < N; ++i) total += scratch[i];
          return total;
        }
        extern "C" __global__ void __launch_bounds__(4) language(int* out) {
          __builtin_assume(blockDim.x == 4);
          assert(alignof(Pair) == 16);
          out[threadIdx.x] = sum<4>();
        }
        """
    )
    out = np.zeros(4, np.int32)
    kernel = build(source, "language", [])
    kernel.launch((1, 1, 1), (4, 1, 1), [out.ctypes.data], buffers=[buffer_of(out)])
    np.testing.assert_array_equal(out, [10] * 4)
    with pytest.raises(EmulationError, match="assumption does not hold"):
        kernel.launch((1, 1, 1), (3, 1, 1), [out.ctypes.data])


def test_includes_and_definitions(tmp_path: Path) -> None:
    (tmp_path / "helper.cuh").write_text("__device__ inline int twice(int x) { return 2 * x; }\n")
    source = '#include "helper.cuh"\nextern "C" __global__ void k(int* out) { *out = twice(N); }\n'
    out = np.zeros(1, np.int32)
    run(build(source, "k", [tmp_path], {"N": "21"}), out, block=1)
    assert out[0] == 42
    (tmp_path / "helper.cuh").write_text("__device__ inline int twice(int x) { return 200 * x; }\n")
    assert run(build(source, "k", [tmp_path], {"N": "1"}), out, block=1)[0] == 200
    with pytest.raises(InputError, match="does not exist"):
        build(source, "k", [tmp_path / "missing"])


# Warp collectives -----------------------------------------------------------------------------------------------------

LANE = np.arange(32)


def shuffled(kind: str, operand: np.ndarray | int, width: int) -> np.ndarray:
    """The lane that each lane reads, from the definition in the programming guide."""
    first = LANE // width * width
    if kind == "idx":
        return first + operand % width
    if kind == "up":
        return np.where(LANE - operand >= first, LANE - operand, LANE)
    if kind == "down":
        return np.where(LANE + operand < first + width, LANE + operand, LANE)
    return np.where(LANE ^ operand < first + width, LANE ^ operand, LANE)


def test_every_shuffle_and_width() -> None:
    kinds = {"idx": "__shfl_sync", "up": "__shfl_up_sync", "down": "__shfl_down_sync", "xor": "__shfl_xor_sync"}
    widths, operands = (1, 2, 4, 8, 16, 32), (0, 1, 3, 7, 16, 31)
    lines = ["const int lane = threadIdx.x; int row = 0;"]
    expected = []
    for kind, function in kinds.items():
        for width in widths:
            for operand in operands:
                lines.append(f"out[32 * row++ + lane] = {function}(0xffffffffu, lane * 10, {operand}, {width});")
                expected.append(shuffled(kind, operand, width) * 10)
    out = np.zeros((len(expected), 32), np.int32)
    kernel = compile_kernel("\n".join(lines), "int* out", "shuffles")
    for result in by_order(kernel, out):
        np.testing.assert_array_equal(result, expected)


def test_shuffle_with_an_operand_a_lane() -> None:
    kernel = compile_kernel(
        "out[threadIdx.x] = __shfl_sync(~0u, (int)threadIdx.x, (threadIdx.x * 7 + 3) % 32);", "int* out"
    )
    np.testing.assert_array_equal(run(kernel, np.zeros(32, np.int32), order=5), (LANE * 7 + 3) % 32)


@pytest.mark.parametrize(
    ("type_name", "to_double"),
    [
        ("int", "{}"),
        ("unsigned", "{}"),
        ("float", "{}"),
        ("long long", "{}"),
        ("unsigned long long", "{}"),
        ("double", "{}"),
        ("__nv_bfloat16", "__bfloat162float({})"),
        ("__half", "__half2float({})"),
        ("__nv_bfloat162", "__bfloat1622float2({}).y"),
    ],
)
def test_shuffle_of_every_type(type_name: str, to_double: str) -> None:
    pair = type_name == "__nv_bfloat162"
    value = "__floats2bfloat162_rn(0.0f, x)" if pair else f"({type_name})x"
    kernel = compile_kernel(
        f"""
        const float x = threadIdx.x + 1;
        const {type_name} value = {value};
        const {type_name} got = __shfl_down_sync(0xffffffffu, value, 1);
        out[threadIdx.x] = {to_double.format("got")};
        """,
        "double* out",
    )
    np.testing.assert_array_equal(run(kernel, np.zeros(32)), np.minimum(LANE + 2, 32))


def test_votes_matches_and_reductions() -> None:
    checks = {
        "ballot": "__ballot_sync(all, lane % 3 == 0) == 0x49249249u",
        "ballot counts any non-zero": "__ballot_sync(all, lane * 256) == 0xfffffffeu",
        "any": "__any_sync(all, lane == 31) == 1 && __any_sync(all, lane == 32) == 0",
        "all": "__all_sync(all, lane < 32) == 1 && __all_sync(all, lane < 31) == 0",
        "match_any": "__match_any_sync(all, lane % 4) == 0x11111111u << (lane % 4)",
        "match_any 64": "__match_any_sync(all, (unsigned long long)(lane / 16) << 40) == 0xffffu << (lane / 16 * 16)",
        "match_all": "__match_all_sync(all, 7, &same) == all && same == 1",
        "match_all differs": "__match_all_sync(all, lane, &same) == 0u && same == 0",
        "add": "__reduce_add_sync(all, lane - 20) == -144 && __reduce_add_sync(all, (unsigned)lane) == 496u",
        "min": "__reduce_min_sync(all, lane - 20) == -20 && __reduce_min_sync(all, (unsigned)(lane - 20)) == 0u",
        "max": "__reduce_max_sync(all, lane - 20) == 11 && __reduce_max_sync(all, (unsigned)(lane - 20)) == ~0u",
        "and": "__reduce_and_sync(all, lane == 5 ? 6u : 7u) == 6u",
        "or": "__reduce_or_sync(all, 1u << lane) == ~0u",
        "xor": "__reduce_xor_sync(all, 1u << (lane & 15)) == 0u",
        "activemask": "__activemask() == all",
    }
    lines = ["const int lane = threadIdx.x; const unsigned all = ~0u; int same;"]
    lines += [f"out[{32 * i} + lane] = {check};" for i, check in enumerate(checks.values())]
    kernel = compile_kernel("\n".join(lines), "int* out", "votes")
    for result in by_order(kernel, np.zeros((len(checks), 32), np.int32)):
        assert [name for name, row in zip(checks, result, strict=True) if not row.all()] == []


def test_two_half_warps_wait_apart() -> None:
    kernel = compile_kernel(
        """
        const int lane = threadIdx.x;
        const unsigned mask = lane < 16 ? 0x0000ffffu : 0xffff0000u;
        int value = lane;
        // The halves take different numbers of steps before they meet again.
        for (int step = 0; step < (lane < 16 ? 3 : 8); ++step) value = __shfl_xor_sync(mask, value, 1) + 1;
        __syncwarp(mask);
        out[lane] = value + 1000 * __popc(__ballot_sync(mask, 1)) + 100000 * __reduce_add_sync(~0u, 1);
        """,
        "int* out",
    )
    steps = np.where(LANE < 16, 3, 8)
    expected = np.where(steps % 2 == 1, LANE ^ 1, LANE) + steps + 16000 + 3200000
    for result in by_order(kernel, np.zeros(32, np.int32)):
        np.testing.assert_array_equal(result, expected)


def test_overlapping_masks_do_not_overwrite_unread_values() -> None:
    # Lane 0 meets lane 1, then runs ahead with lane 2 twice before lane 1 is scheduled again.
    kernel = compile_kernel(
        """
        const int lane = threadIdx.x;
        if (lane == 1) out[1] = __shfl_sync(3u, -1, 0);
        if (lane == 0) out[0] = __shfl_sync(3u, 70, 1);
        if (lane != 1) {
          out[lane] += __shfl_sync(5u, 71 + lane, 0);
          out[lane] += __shfl_sync(5u, 80 + lane, 2);
        }
        """,
        "int* out",
    )
    for order in ORDERS:
        out = run(kernel, np.zeros(3, np.int32), block=3, order=order)
        np.testing.assert_array_equal(out, [-1 + 71 + 82, 70, 71 + 82])


def test_partial_warp_and_exited_threads() -> None:
    kernel = compile_kernel(
        """
        if (threadIdx.x % 5 == 4) return;
        __shared__ int total;
        if (threadIdx.x == 0) total = 0;
        __syncthreads();
        atomicAdd(&total, 1);
        out[64 + threadIdx.x] = __popc(__ballot_sync(~0u, 1));
        out[128 + threadIdx.x] = __syncthreads_count(threadIdx.x < 10);
        out[threadIdx.x] = total;
        """,
        "int* out",
    )
    for result in by_order(kernel, np.zeros((3, 64), np.int32), block=48):
        alive = np.arange(48) % 5 != 4
        np.testing.assert_array_equal(result[0, :48], np.where(alive, alive.sum(), 0))
        per_warp = np.repeat([alive[:32].sum(), alive[32:].sum()], [32, 16])
        np.testing.assert_array_equal(result[1, :48], np.where(alive, per_warp, 0))
        np.testing.assert_array_equal(result[2, :48], np.where(alive, alive[:10].sum(), 0))


def test_activemask_sees_the_lanes_of_its_branch() -> None:
    kernel = compile_kernel(
        """
        const int lane = threadIdx.x;
        if (lane % 3 == 0) out[lane] = __popc(__activemask());
        else out[lane] = 100 + __popc(__activemask());
        """,
        "int* out",
    )
    for result in by_order(kernel, np.zeros(32, np.int32)):
        np.testing.assert_array_equal(result, np.where(LANE % 3 == 0, 11, 121))


# Blocks ---------------------------------------------------------------------------------------------------------------


def test_barriers_with_a_predicate() -> None:
    kernel = compile_kernel(
        """
        const int t = threadIdx.x;
        out[t] = __syncthreads_count(t % 7 == 0);
        out[t] += 1000 * __syncthreads_and(t < 100) + 2000 * __syncthreads_and(t < 99);
        out[t] += 10000 * __syncthreads_or(t == 99) + 20000 * __syncthreads_or(t == 100);
        """,
        "int* out",
    )
    for result in by_order(kernel, np.zeros(100, np.int32), block=100):
        np.testing.assert_array_equal(result, 15 + 1000 + 10000)


def test_named_barriers() -> None:
    kernel = compile_kernel(
        """
        __shared__ int value[2];
        const int half = threadIdx.x / 64;
        if (threadIdx.x % 64 == 63) value[half] = half + 5;
        moesaic_emulate_named_barrier(1 + half, 64);
        out[threadIdx.x] = value[half];
        """,
        "int* out",
    )
    for result in by_order(kernel, np.zeros(128, np.int32), block=128):
        np.testing.assert_array_equal(result, np.repeat([5, 6], 64))


def test_atomics_over_many_blocks() -> None:
    kernel = compile_kernel(
        """
        const int t = blockIdx.x * blockDim.x + threadIdx.x;
        atomicAdd(ints + 0, 1);
        atomicMax(ints + 1, t);
        atomicMin(ints + 2, -t);
        atomicOr((unsigned*)ints + 3, 1u << (t % 32));
        atomicAnd((unsigned*)ints + 4, ~(1u << (t % 31)));
        atomicSub(ints + 5, 2);
        atomicXor((unsigned*)ints + 6, (unsigned)t);
        int seen = ints[7];
        while (atomicCAS(ints + 7, seen, seen + 3) != seen) seen = ints[7];
        atomicExch(ints + 8 + t % 4, 9);
        atomicAdd(longs + 0, 1ull << 33);
        atomicMax(longs + 1, (unsigned long long)t << 40);
        atomicAdd(reals, 0.5f);
        atomicAdd(doubles, 0.25);
        """,
        "int* ints, unsigned long long* longs, float* reals, double* doubles",
        "atomics",
    )
    count = 64 * 96
    for order in ORDERS:
        ints, longs = np.zeros(12, np.int32), np.zeros(2, np.uint64)
        ints[4] = -1
        reals, doubles = np.zeros(1, np.float32), np.zeros(1)
        arrays = {"ints": ints, "longs": longs, "reals": reals, "doubles": doubles}
        kernel.launch(
            (64, 1, 1),
            (96, 1, 1),
            [array.ctypes.data for array in arrays.values()],
            buffers=[buffer_of(array, name) for name, array in arrays.items()],
            order=order,
            workers=2,
        )
        xor = int(np.bitwise_xor.reduce(np.arange(count)))
        assert ints.tolist() == [count, count - 1, 1 - count, -1, -(2**31), -2 * count, xor, 3 * count, 9, 9, 9, 9]
        assert longs.tolist() == [count << 33, (count - 1) << 40]
        assert (reals[0], doubles[0]) == (count / 2, count / 4)


def test_last_block_finishes() -> None:
    kernel = compile_kernel(
        """
        __shared__ bool last;
        if (threadIdx.x == 0) {
          out[1 + blockIdx.x] = blockIdx.x + 1;
          __threadfence();
          last = atomicAdd(out, 1) == gridDim.x - 1;
        }
        __syncthreads();
        if (last && threadIdx.x == 0) {
          int total = 0;
          for (unsigned b = 0; b < gridDim.x; ++b) total += ((volatile int*)out)[1 + b];
          out[1 + gridDim.x] = total;
        }
        """,
        "int* out",
    )
    for result in by_order(kernel, np.zeros(102, np.int32), grid=100):
        assert result[101] == 5050


def test_a_lock_is_not_a_hang() -> None:
    kernel = compile_kernel(
        """
        __shared__ int lock, value;
        if (threadIdx.x == 0) { lock = 0; value = 0; }
        __syncthreads();
        while (atomicCAS(&lock, 0, 1) != 0) {}
        const int before = value;
        __nanosleep(20);
        value = before + 1;
        atomicExch(&lock, 0);
        __syncthreads();
        out[threadIdx.x] = value;
        """,
        "int* out",
    )
    for result in by_order(kernel, np.zeros(64, np.int32), block=64):
        np.testing.assert_array_equal(result, 64)


# Shared memory --------------------------------------------------------------------------------------------------------


def test_static_shared_memory_is_poisoned_before_every_block() -> None:
    kernel = compile_kernel(
        """
        __shared__ float values[8];
        __shared__ int index;
        out[blockIdx.x * 2] = isnan(values[threadIdx.x]);
        out[blockIdx.x * 2 + 1] = index > 1000000000;
        __syncthreads();
        values[threadIdx.x] = 1.0f;
        index = 0;
        """,
        "int* out",
    )
    np.testing.assert_array_equal(run(kernel, np.zeros(64, np.int32), grid=32, block=8, workers=2), 1)


def test_dynamic_shared_memory_is_poisoned_aligned_and_guarded() -> None:
    kernel = compile_kernel(
        """
        MOESAIC_DYNAMIC_SHARED(__nv_bfloat16, values);
        out[blockIdx.x] = __hisnan(values[threadIdx.x]) && (size_t)values % 16 == 0;
        __syncthreads();
        values[threadIdx.x] = __float2bfloat16(1.0f);
        if (blockIdx.x == 5) values[threadIdx.x + 8 * (gridDim.x - 6)] = values[0];
        """,
        "int* out",
        "dynamic_shared",
    )
    np.testing.assert_array_equal(run(kernel, np.zeros(6, np.int32), grid=6, block=8, shared_bytes=16), 1)
    report = failure(kernel, np.zeros(7, np.int32), grid=7, block=8, shared_bytes=16)
    assert "behind the end of dynamic shared memory (16 bytes)" in report
    assert f"dynamic_shared.cu:{FIRST_LINE + 4}" in report
    assert "block (5, 0, 0)" in report


REVERSAL = """
    __shared__ int values[64];
    const int t = threadIdx.x;
    values[t] = t * t;
    {barrier}
    out[blockIdx.x * 64 + t] = values[63 - t];
"""


def test_orders_give_equal_results() -> None:
    kernel = compile_kernel(REVERSAL.format(barrier="__syncthreads();"), "int* out", "with_barrier")
    results = by_order(kernel, np.zeros((20, 64), np.int32), grid=20, block=64)
    assert orders_that_differ(results) == []
    np.testing.assert_array_equal(results[0], [np.arange(63, -1, -1) ** 2] * 20)


def test_orders_find_a_missing_barrier() -> None:
    kernel = compile_kernel(REVERSAL.format(barrier=""), "int* out", "without_barrier")
    assert orders_that_differ(by_order(kernel, np.zeros((20, 64), np.int32), grid=20, block=64)) != []


def test_orders_find_a_missing_warp_barrier() -> None:
    body = REVERSAL.replace("63", "31")
    good = compile_kernel(body.format(barrier="__syncwarp();"), "int* out", "with_syncwarp")
    bad = compile_kernel(body.format(barrier=""), "int* out", "without_syncwarp")
    assert orders_that_differ(by_order(good, np.zeros((4, 64), np.int32), grid=4, block=32)) == []
    assert orders_that_differ(by_order(bad, np.zeros((4, 64), np.int32), grid=4, block=32)) != []


def test_a_seed_repeats_itself_whatever_the_workers() -> None:
    kernel = compile_kernel(REVERSAL.format(barrier=""), "int* out", "without_barrier")
    results = [run(kernel, np.zeros(1280, np.int32), 20, 64, order=9, workers=n).copy() for n in (1, 1, 2, 3)]
    assert all(np.array_equal(result, results[0]) for result in results)


# A router -------------------------------------------------------------------------------------------------------------

ROUTER = """
#include <cuda_bf16.h>

constexpr int kExperts = 64;
constexpr int kPicks = 2;
constexpr unsigned kAllLanes = 0xffffffffu;

extern "C" __global__ void __launch_bounds__(256) toy_router(
    const __nv_bfloat16* __restrict__ logits, float* __restrict__ weights, int* __restrict__ indices,
    int* __restrict__ counts, long long tokens) {
  __shared__ int histogram[kExperts];
  for (int e = threadIdx.x; e < kExperts; e += blockDim.x) histogram[e] = 0;
  __syncthreads();

  const int lane = threadIdx.x % 32;
  const long long token = (long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (token < tokens) {
    float value[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) value[i] = __bfloat162float(__ldg(&logits[token * kExperts + i * 32 + lane]));
    float highest = fmaxf(value[0], value[1]);
    for (int d = 16; d > 0; d >>= 1) highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, d));
    float sum = __expf(value[0] - highest) + __expf(value[1] - highest);
    for (int d = 16; d > 0; d >>= 1) sum += __shfl_xor_sync(kAllLanes, sum, d);

    for (int k = 0; k < kPicks; ++k) {
      float best = value[0];
      int expert = lane;
      if (value[1] > best) { best = value[1]; expert = lane + 32; }
      for (int d = 16; d > 0; d >>= 1) {
        const float other = __shfl_xor_sync(kAllLanes, best, d);
        const int other_expert = __shfl_xor_sync(kAllLanes, expert, d);
        if (other > best || (other == best && other_expert < expert)) { best = other; expert = other_expert; }
      }
      if (lane == expert % 32) value[expert / 32] = -INFINITY;
      if (lane == 0) {
        weights[token * kPicks + k] = __expf(best - highest) / sum;
        indices[token * kPicks + k] = expert;
        atomicAdd(&histogram[expert], 1);
      }
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < kExperts; e += blockDim.x) atomicAdd(&counts[e], histogram[e]);
}
"""


@pytest.mark.parametrize("order", [FORWARD, REVERSE, 11])
def test_router_agrees_with_torch(order: int) -> None:
    torch = pytest.importorskip("torch")
    tokens = 1003
    logits = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    weights = torch.full((tokens, 2), float("nan"))
    indices = torch.full((tokens, 2), -7, dtype=torch.int32)
    counts = torch.zeros(64, dtype=torch.int32)
    tensors = {"logits": logits, "weights": weights, "indices": indices, "counts": counts}
    build(ROUTER, "toy_router", []).launch(
        ((tokens + 7) // 8, 1, 1),
        (256, 1, 1),
        [*(tensor.data_ptr() for tensor in tensors.values()), tokens],
        buffers=[
            Buffer(tensor.data_ptr(), tensor.numel() * tensor.element_size(), name, name != "logits")
            for name, tensor in tensors.items()
        ],
        order=order,
    )
    # A stable sort is our rule for ties (lowest index first), which torch.topk leaves open; bf16 logits tie often.
    by_value = torch.sort(logits.float(), dim=-1, descending=True, stable=True)
    assert torch.equal(indices.long(), by_value.indices[:, :2])
    torch.testing.assert_close(
        weights.double(), logits.double().softmax(-1).gather(1, indices.long()), atol=1e-6, rtol=1e-6
    )
    assert torch.equal(counts.long(), torch.bincount(indices.long().flatten(), minlength=64))


def test_portable_context_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ -DMOESAIC_EMULATE_UCONTEXT")
    kernel = compile_kernel(
        """
        __shared__ int values[96];
        values[threadIdx.x] = __shfl_xor_sync(0xffffffffu, (int)threadIdx.x, 5);
        __syncthreads();
        out[96 * blockIdx.x + threadIdx.x] = values[95 - threadIdx.x];
        """,
        "int* out",
    )
    for result in by_order(kernel, np.zeros((9, 96), np.int32), grid=9, block=96):
        np.testing.assert_array_equal(result, [np.arange(95, -1, -1) ^ 5] * 9)
    with pytest.raises(EmulationError, match="deadlock"):
        run(compile_kernel("if (threadIdx.x) __syncwarp(); else __syncthreads();", "int* out"), np.zeros(1, np.int32))

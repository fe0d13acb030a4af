"""The launcher: packing arguments, a fake driver below the real bindings, and, where there is one, a GPU."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_driver as fake_driver_library
import pytest

from moesaic.codegen import nvrtc
from moesaic.codegen.target import Target
from moesaic.ir.errors import InternalError, ToolchainError
from moesaic.runtime import doctor, driver
from moesaic.runtime.driver import Arguments


@pytest.fixture(autouse=True)
def private_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOESAIC_CACHE_DIR", str(tmp_path / "cache"))


# Packing


def test_arguments_lie_as_in_a_c_struct() -> None:
    class Struct(ctypes.Structure):
        _fields_ = [
            ("a", ctypes.c_uint32),
            ("b", ctypes.c_uint64),
            ("c", ctypes.c_float),
            ("d", ctypes.c_int64),
            ("e", ctypes.c_int32),
            ("f", ctypes.c_double),
        ]

    packed = Arguments(["u32", "ptr", "f32", "i64", "i32", "f64"])
    packed.pack(7, 0xFFFF_FFFF_FFFF_FFFF, 1.5, -(2**40), -1, 0.1)
    assert packed.offsets == tuple(getattr(Struct, name).offset for name in "abcdef")
    assert packed.raw() == bytes(Struct(7, 0xFFFF_FFFF_FFFF_FFFF, 1.5, -(2**40), -1, 0.1))


def test_the_table_points_at_the_arguments() -> None:
    packed = Arguments(["i32", "ptr", "tensormap", "f32"])
    packed.pack(-3, 0xDEADBEEF00, bytes(range(128)), 2.5)
    table = (ctypes.c_void_p * 4).from_address(packed.address)
    assert ctypes.c_int32.from_address(table[0]).value == -3
    assert ctypes.c_uint64.from_address(table[1]).value == 0xDEADBEEF00
    assert ctypes.string_at(table[2], 128) == bytes(range(128))
    assert table[2] % 64 == 0
    assert ctypes.c_float.from_address(table[3]).value == 2.5


def test_one_slot_changes_alone_and_nothing_moves() -> None:
    packed = Arguments(["ptr", "i32", "f32"])
    packed.pack(1, 2, 3.0)
    address = packed.address
    packed.set(1, 9)
    assert packed.raw() == struct.pack("=Qif", 1, 9, 3.0)
    assert packed.address == address


def test_no_arguments() -> None:
    packed = Arguments([])
    packed.pack()
    assert packed.raw() == b""
    assert packed.address


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((1, 2), "3 parameters was given 2 arguments"),
        ((1, 2**40, 1.0), r"argument 1 \(i32\) cannot be 1099511627776"),
        (("x", 1, 1.0), r"argument 0 \(ptr\) cannot be 'x'"),
        ((1, 1.5, 1.0), r"argument 1 \(i32\) cannot be 1.5"),
        ((-1, 1, 1.0), r"argument 0 \(ptr\) cannot be -1"),
        ((1, 1, 1e60), r"argument 2 \(f32\) cannot be 1e\+60"),
    ],
)
def test_values_that_do_not_fit(values: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InternalError, match=message):
        Arguments(["ptr", "i32", "f32"]).pack(*values)


def test_unknown_kind() -> None:
    with pytest.raises(InternalError, match=r"unknown kind of kernel argument 'pt'.*did you mean 'ptr'"):
        Arguments(["pt"])


# Without a driver


def _run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_driver_is_a_toolchain_error() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("there is a driver")
    for call in (lambda: driver.device(0), driver.device_count, lambda: driver.Module.load(b"", "k", 0)):
        with pytest.raises(ToolchainError, match="driver cannot be loaded"):
            call()
    found = {check.name: check for check in doctor.checks()}
    assert found["driver"].status == "warn"
    assert found["gpus"].status == "warn"


# With a fake driver, in a process of its own because the bindings load a driver once

_SETUP = """
import ctypes, json, sys, threading
fake = ctypes.CDLL("libcuda.so.1")
fake.fake_last.restype = ctypes.c_char_p
from moesaic.runtime import driver
def last(): return fake.fake_last().decode()
def error(call):
    try: call()
    except Exception as caught: return f"{type(caught).__name__}: {caught}"
def load(ordinal=0): return driver.Module.load(b"\\x7fELF cubin", "kernel", ordinal)
KINDS = ["ptr", "i32", "f32"]
"""


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_driver_library.build(tmp_path_factory.mktemp("fake_driver"))


def _with_fake(folder: Path, code: str) -> Any:
    return json.loads(_run(f"{_SETUP}\n{code}", **fake_driver_library.environment(folder)).splitlines()[-1])


def test_devices(fake_driver: Path) -> None:
    found = _with_fake(
        fake_driver,
        "d = driver.device(1); print(json.dumps([driver.device_count(), d.name, d.capability, d.sm_count, "
        "d.shared_optin, str(driver.device_target(1)), driver.driver_version(), driver.device(1) is d, "
        "error(lambda: driver.device(2))]))",
    )
    assert found[:-1] == [2, "Fake GPU", [9, 0], 132, 232448, "sm_90a", [13, 2], True]
    assert "ToolchainError" in found[-1]
    assert "CUDA_ERROR_INVALID_DEVICE" in found[-1]


def test_a_launch_arrives_as_it_was_asked_for(fake_driver: Path) -> None:
    found = _with_fake(
        fake_driver,
        """
kernel = load().kernel
launch = kernel.prepare((128, 2, 1), 1024, KINDS)
said = []
with driver.current(0):
    launch((3, 2, 1), 0x77, 0xdeadbeef00, -5, 1.5); said.append(last())
    launch((4, 2, 1), 0x77, 0xdeadbeef00, -6, 1.5); said.append(last())
    launch((4, 2, 1), 0, 1, -6, 1.5); said.append(last())
    launch((0, 2, 1), 0, 2, -6, 1.5); said.append(last())
    launch((4, 2, 1), 0, 3, -6, 1.5); said.append(last())
print(json.dumps([*said, fake.fake_depth(), fake.fake_allowed_shared()]))
""",
    )
    tail = "shared 1024 stream {} attributes 0 context 0x1000 args {}"
    assert found == [
        "grid 3 2 1 block 128 2 1 " + tail.format("0x77", "deadbeef00 -5 1.5"),
        "grid 4 2 1 block 128 2 1 " + tail.format("0x77", "deadbeef00 -6 1.5"),
        "grid 4 2 1 block 128 2 1 " + tail.format("(nil)", "1 -6 1.5"),
        "grid 4 2 1 block 128 2 1 " + tail.format("(nil)", "1 -6 1.5"),  # no blocks: no launch
        "grid 4 2 1 block 128 2 1 " + tail.format("(nil)", "3 -6 1.5"),
        0,
        0,
    ]


def test_one_launch_on_another_device_with_attributes(fake_driver: Path) -> None:
    found = _with_fake(
        fake_driver,
        """
args = driver.Arguments(KINDS); args.pack(1, 2, 3.0)
with driver.current(0):
    load(1).kernel.launch((1, 1, 1), (32, 1, 1), 0, 5, args, [driver.dependent_launch()])
print(json.dumps([last(), fake.fake_depth()]))
""",
    )
    assert found == ["grid 1 1 1 block 32 1 1 shared 0 stream 0x5 attributes 1 context 0x1001 args 1 2 3", 0]


def test_shared_memory_above_48_kib_is_asked_for_and_never_lowered(fake_driver: Path) -> None:
    found = _with_fake(
        fake_driver,
        """
kernel = load().kernel
asked = []
for size in (47 * 1024, 47 * 1024 + 1, 200 * 1024, 100 * 1024):
    kernel.prepare((32, 1, 1), size, KINDS); asked.append(fake.fake_allowed_shared())
print(json.dumps([*asked, error(lambda: kernel.prepare((32, 1, 1), 227 * 1024, KINDS))]))
""",
    )
    assert found[:-1] == [0, 47 * 1024 + 1, 200 * 1024, 200 * 1024]
    assert "InternalError: kernel 'kernel' asks for 233472 bytes" in found[-1]


def test_every_failure_is_one_of_ours(fake_driver: Path) -> None:
    found = _with_fake(
        fake_driver,
        """
module = load()
launch = module.kernel.prepare((32, 1, 1), 0, KINDS)
def failing(code):
    fake.fake_fail(code)
    with driver.current(0): launch((1, 1, 1), 0, 1, 1, 1.0)
said = [error(lambda: failing(700)), error(lambda: failing(1)), error(lambda: failing(2))]
fake.fake_fail(0)
said += [error(lambda: driver.Module.load(b"not one", "kernel", 0)),
         error(lambda: driver.Module.load(b"\\x7fELF cubin", "other", 0)),
         error(lambda: module.kernel.prepare((2048, 1, 1), 0, KINDS)),
         error(lambda: module.kernel.prepare((0, 1, 1), 0, KINDS))]
before = fake.fake_unloads()
module.unload(); module.unload()
print(json.dumps([*said, fake.fake_depth(), fake.fake_unloads() - before]))
""",
    )
    for message, parts in zip(
        found,
        [
            ("InternalError", "CUDA_ERROR_ILLEGAL_ADDRESS", "compute-sanitizer", "the fake driver says so", "'kernel'"),
            ("InternalError", "CUDA_ERROR_INVALID_VALUE", "grid (1, 1, 1) and block (32, 1, 1)"),
            ("ToolchainError", "CUDA_ERROR_OUT_OF_MEMORY"),
            ("ToolchainError", "CUDA_ERROR_NO_BINARY_FOR_GPU", "MOESAIC_ARCH"),
            ("InternalError", "CUDA_ERROR_NOT_FOUND", "'other'"),
            ("InternalError", "(2048, 1, 1)", "1 to 1024"),
            ("InternalError", "(0, 1, 1)"),
        ],
        strict=False,
    ):
        assert all(part in message for part in parts), message
    assert found[-2:] == [0, 1]


def test_a_tensor_map_is_encoded_as_it_was_asked_for(fake_driver: Path) -> None:
    found = _with_fake(
        fake_driver,
        """
boxes = driver.TensorBoxes(0x10020, 72, 5, 3, 160, 960, 64, 128, driver.TENSOR_MAP_TYPES["bf16"])
def outcome(boxes): return error(lambda: driver.encode_tensor_map(boxes))
before = outcome(boxes)
with driver.current(0):
    encoded = [driver.encode_tensor_map(boxes) for _ in range(20)]  # wherever memory for it comes to lie
    said = [outcome(boxes._replace(**{n: 24})) for n in ("address", "row_bytes", "matrix_bytes")]
    said.append(outcome(boxes._replace(box_rows=257)))
    fake.fake_fail_encode(1); said.append(outcome(boxes)); fake.fake_fail_encode(0)
    empty = driver.encode_tensor_map(boxes._replace(rows=0, address=0, matrix_bytes=0))
print(json.dumps([len(set(encoded)), encoded[0].hex(), empty.hex(), before, *said]))
""",
    )
    assert found[0] == 1
    #  address, dimensions and strides; box, element strides, bf16, rank 3, interleave, swizzle, promotion, fill
    words = struct.unpack("=8Q14I", bytes.fromhex(found[1])[: 8 * 8 + 14 * 4])
    assert words == (0x10020, 72, 5, 3, 0, 160, 960, 0, 64, 128, 1, 0, 1, 1, 1, 0, 9, 3, 0, 3, 3, 0)
    assert bytes.fromhex(found[2]) == bytes(128)
    assert "CUDA_ERROR_INVALID_CONTEXT" in found[3]
    what = ("address {}, dimensions (72, 5, 3), strides of ({}, {}) bytes", "boxes (64, {}, 1) and data type 9")
    for message, *values in zip(
        found[4:],
        ("0x18", "0x10020", "0x10020", "0x10020", "0x10020"),
        (160, 24, 160, 160, 160),
        (960, 960, 24, 960, 960),
        (128, 128, 128, 257, 128),
        strict=True,
    ):
        assert message.startswith("InternalError: ")
        assert what[0].format(*values[:3]) in message and what[1].format(values[3]) in message
    assert all("multiples of 16 bytes" in message for message in found[4:7])
    assert all("could not encode" in message and "CUDA_ERROR_INVALID_VALUE" in message for message in found[7:])


def test_threads_may_share_a_launch(fake_driver: Path) -> None:
    found = _with_fake(
        fake_driver,
        """
kernel = load().kernel
launch = kernel.prepare((32, 1, 1), 0, KINDS)
wrong = []
real = launch._enter
def enter(config, *rest):
    # Grid, stream and arguments of one call belong together, whatever other threads do meanwhile.
    result = real(config, *rest)
    seen = last().split()
    if not seen[1] == str(int(seen[11], 16)) == str(int(seen[17], 16)): wrong.append(last())
    return result
launch._enter = enter
def work(n):
    with driver.current(0):
        for _ in range(300): launch((n, 1, 1), n, n, 1, 1.0)
threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
sys.setswitchinterval(1e-6)
for t in threads: t.start()
for t in threads: t.join()
print(json.dumps([wrong[:3], last().split()[:2]]))
""",
    )
    assert found[0] == []
    assert found[1][0] == "grid"


# With a GPU

_SAXPY = """extern "C" __global__ void saxpy(const float* x, float* y, float a, int n) {
  extern __shared__ float tile[];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  tile[threadIdx.x] = i < n ? a * x[i] : 0.0f;
  __syncthreads();
  if (i < n) y[i] = tile[threadIdx.x] + y[i];
}
"""


@pytest.mark.gpu
def test_a_kernel_runs_on_torch_memory_and_streams_and_in_a_graph() -> None:
    import torch

    ordinal = torch.cuda.current_device()
    compiled = nvrtc.compile_source(_SAXPY, name="saxpy", target=driver.device_target(ordinal))
    module = driver.Module.load(compiled.cubin, "saxpy", ordinal)
    assert module.kernel.registers == compiled.resources.registers
    launch = module.kernel.prepare((256, 1, 1), 100 * 1024 - 1024, ["ptr", "ptr", "f32", "i32"])
    n = 1000
    x = torch.arange(n, dtype=torch.float32, device="cuda")
    y = torch.ones(n, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def run() -> None:
        with driver.current(ordinal):
            handle = torch.cuda.current_stream().cuda_stream
            launch((4, 1, 1), handle, x.data_ptr(), y.data_ptr(), 2.0, n)

    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    assert torch.equal(y, 2 * x + 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, 4 * x + 1)
    module.unload()


@pytest.mark.gpu
def test_a_cubin_of_another_gpu_is_refused() -> None:
    other = "sm_100a" if driver.compute_capability(0) != (10, 0) else "sm_90a"
    compiled = nvrtc.compile_source(_SAXPY, name="saxpy", target=Target.parse(other))
    with pytest.raises(ToolchainError, match="another GPU"):
        driver.Module.load(compiled.cubin, "saxpy", 0)

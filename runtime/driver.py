"""Loading cubins and launching kernels through the CUDA driver.

Every launch of the project goes through here. The launcher knows addresses, sizes and a stream handle, and nothing of
torch; it shares the *primary* context of each device with torch, which is how both see the same memory and streams.

A launch costs host time, often as much as the kernel takes. So whatever stays the same between calls is prepared once
in a `Launch`: the configuration structure, the buffer that holds the arguments and the table of pointers into it. A
call then packs its arguments with one `struct` call and enters the driver.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from moesaic.codegen.target import Target
from moesaic.ir.errors import InternalError, MoesaicError, ToolchainError, suggestion

Dim3 = tuple[int, int, int]

POINTER = "ptr"
"""The kind of an argument that is a device address."""

_KINDS: dict[str, tuple[str, int]] = {  # kind -> (struct code, bytes)
    POINTER: ("Q", 8),
    "i32": ("i", 4),
    "u32": ("I", 4),
    "i64": ("q", 8),
    "u64": ("Q", 8),
    "f32": ("f", 4),
    "f64": ("d", 8),
    "tensormap": ("128s", 128),
}
_ALIGNMENT = {"tensormap": 64}  # others are aligned to their size
_BUFFER_ALIGNMENT = 64

# Failures that are about the machine, with what to do about them. Any other is a fault of ours.
_MACHINE_FAULTS = {
    "CUDA_ERROR_NO_DEVICE": "no GPU is visible to this process (is CUDA_VISIBLE_DEVICES set?)",
    "CUDA_ERROR_INVALID_DEVICE": "there is no GPU of this number",
    "CUDA_ERROR_NOT_INITIALIZED": "the driver cannot start; a process forked after CUDA was used cannot use it again",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the kernel was compiled for another GPU (is MOESAIC_ARCH set?)",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "the NVIDIA driver is older than NVRTC: update the driver",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the NVIDIA driver and its library differ in version: restart the machine",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "the NVIDIA driver is too old for this CUDA: update the driver",
    "CUDA_ERROR_INSUFFICIENT_DRIVER": "the NVIDIA driver is too old: update the driver",
    "CUDA_ERROR_OUT_OF_MEMORY": "the GPU has no memory left",
    "CUDA_ERROR_SYSTEM_NOT_READY": "the GPU's fabric manager or another system service is not running",
}
_STICKY = {
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_ASSERT",
}

# Of CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion; ``launcher.cpp`` has the last two, too.
TENSOR_MAP_TYPES = {"f16": 6, "bf16": 9}
"""Numbers of the element types of tensor maps."""
_SWIZZLES, _PROMOTE_256B = {32: 2, 64: 3}, 3  # of as many bytes as a line of a box has
_RUN_END = 1 << 30  # ``kRunEnd``

_lock = threading.Lock()
_bindings_loaded: Any = None
_devices: dict[int, Device] = {}


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU by the number this process sees it under, with its primary context, which stays retained for good."""

    ordinal: int
    name: str
    capability: tuple[int, int]
    sm_count: int
    shared_optin: int
    """Most shared memory a block can have, in bytes, after asking for it."""
    context: Any
    context_handle: int

    @property
    def target(self) -> Target:
        """The best target for this GPU. Raises `UnsupportedError` for a GPU that is too old or not known yet."""
        return Target.from_capability(*self.capability)


class TensorBoxes(NamedTuple):
    """What a tensor map says: where the copy engine finds boxes of matrices of 16-bit elements.

    `rows` are those of a matrix; without any, there is nothing to find, and the address need not be one. `row_bytes`
    and `matrix_bytes` are distances; `data_type` is one of `TENSOR_MAP_TYPES`. Without `matrices` it is a map of rows,
    whose dimensions ``tensor_map.cuh`` explains. ``launcher.cpp`` has the same fields.
    """

    address: int
    columns: int
    rows: int
    matrices: int
    row_bytes: int
    matrix_bytes: int
    box_columns: int
    box_rows: int
    data_type: int

    @property
    def dims(self) -> tuple[int, ...]:
        if self.matrices:
            return self.columns, self.rows, self.matrices
        return self.columns, _RUN_END, self.rows + 1, _RUN_END + 1

    @property
    def strides(self) -> tuple[int, ...]:
        if self.matrices:
            return self.row_bytes, self.matrix_bytes
        return self.row_bytes, self.row_bytes, 2**64 // _RUN_END - self.row_bytes

    @property
    def box(self) -> tuple[int, ...]:
        return self.box_columns, self.box_rows, *(1,) * (len(self.dims) - 2)

    def check(self) -> None:
        """Raises `InternalError` if address or distances are not multiples of 16 bytes."""
        if self.rows and (self.address | self.row_bytes | self.matrix_bytes) % 16:
            raise InternalError(
                f"a tensor map needs address and strides in multiples of 16 bytes: it has {self._found}"
            )

    def failed(self, code: int) -> MoesaicError:
        """The error of ours for what the driver said to it."""
        return fault(code, f"encode a tensor map of {self._found}")

    @property
    def _found(self) -> str:
        return (
            f"address {self.address:#x}, dimensions {self.dims}, strides of {self.strides} bytes, boxes {self.box} and "
            f"data type {self.data_type}"
        )


def encode_tensor_map(boxes: TensorBoxes) -> bytes:
    """The 128 bytes that a kernel takes by value; all zero where there are no rows. A context has to be current.

    Raises `InternalError` for an address or strides that cannot be, and for what else the driver reports.
    """
    if not boxes.rows:
        return bytes(128)
    boxes.check()
    rank = len(boxes.dims)
    # Not through the bindings: the driver wants the map aligned to 64 bytes, and theirs lies anywhere.
    buffer = ctypes.create_string_buffer(128 + _BUFFER_ALIGNMENT)
    base = -ctypes.addressof(buffer) % _BUFFER_ALIGNMENT
    code = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(buffer) + base),
        ctypes.c_int(boxes.data_type),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(boxes.address),
        (ctypes.c_uint64 * rank)(*boxes.dims),
        (ctypes.c_uint64 * (rank - 1))(*boxes.strides),
        (ctypes.c_uint32 * rank)(*boxes.box),
        (ctypes.c_uint32 * rank)(*(1,) * rank),
        ctypes.c_int(0),  # not interleaved
        ctypes.c_int(_SWIZZLES[boxes.box_columns]),
        ctypes.c_int(_PROMOTE_256B),
        ctypes.c_int(0),  # zeros outside
    )
    if code != 0:
        raise boxes.failed(code)
    return buffer.raw[base : base + 128]


class Arguments:
    """A buffer that holds the arguments of one kernel, and the table of their addresses that the driver reads.

    `kinds` lists the parameters in order: ``ptr``, ``i32``, ``u32``, ``i64``, ``u64``, ``f32``, ``f64``, or
    ``tensormap`` (128 bytes). The addresses never change. Not safe to change while another thread launches with it;
    `Launch` locks.

    Raises `InternalError` for an unknown kind.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self.kinds = tuple(kinds)
        layout = "="
        offset = 0
        offsets = []
        self._codes = []
        for kind in self.kinds:
            if kind not in _KINDS:
                raise InternalError(
                    f"unknown kind of kernel argument {kind!r}; known: {', '.join(_KINDS)}{suggestion(kind, _KINDS)}"
                )
            code, size = _KINDS[kind]
            padding = -offset % _ALIGNMENT.get(kind, size)
            layout += f"{padding}x{code}"
            offsets.append(offset + padding)
            self._codes.append(struct.Struct("=" + code))
            offset += padding + size
        self.offsets = tuple(offsets)
        """Where each argument lies, in bytes from the start: the layout a C struct of them would have."""
        self.size = offset
        self.buffer = ctypes.create_string_buffer(offset + _BUFFER_ALIGNMENT)
        self.base = -ctypes.addressof(self.buffer) % _BUFFER_ALIGNMENT
        start = ctypes.addressof(self.buffer) + self.base
        self._table = (ctypes.c_void_p * max(len(offsets), 1))(*(start + place for place in offsets))
        self.address = ctypes.addressof(self._table)
        """The ``void**`` that the driver takes. Valid as long as this object lives."""
        self._all = struct.Struct(layout)

    def pack(self, *values: Any) -> None:
        """Set every argument. Raises `InternalError`, naming the argument, if a value does not fit its kind."""
        try:
            self._all.pack_into(self.buffer, self.base, *values)
        except (struct.error, OverflowError, TypeError) as error:
            raise self._misfit(values, error) from None

    def set(self, index: int, value: Any) -> None:
        """Set one argument and leave the others. Raises `InternalError` if the value does not fit its kind."""
        try:
            self._codes[index].pack_into(self.buffer, self.base + self.offsets[index], value)
        except (struct.error, OverflowError, TypeError) as error:
            raise InternalError(f"kernel argument {index} ({self.kinds[index]}) cannot be {value!r}: {error}") from None

    def raw(self) -> bytes:
        """The packed bytes, for tests and reports."""
        return self.buffer.raw[self.base : self.base + self.size]

    def _misfit(self, values: tuple[Any, ...], error: Exception) -> MoesaicError:
        if len(values) != len(self.kinds):
            return InternalError(f"a kernel of {len(self.kinds)} parameters was given {len(values)} arguments")
        for index, (code, value) in enumerate(zip(self._codes, values, strict=True)):
            try:
                code.pack(value)
            except (struct.error, OverflowError, TypeError) as cause:
                return InternalError(f"kernel argument {index} ({self.kinds[index]}) cannot be {value!r}: {cause}")
        return InternalError(f"kernel arguments {values!r} cannot be packed as {self.kinds}: {error}")


class Module:
    """A cubin loaded on one device. Get one from `load`; threads may share it."""

    def __init__(self, device: Device, handle: Any, kernel: Kernel) -> None:
        self.device = device
        self.kernel = kernel
        self._handle = handle

    @classmethod
    def load(cls, cubin: bytes, kernel_name: str, device_ordinal: int) -> Module:
        """Load `cubin` on a device, with its kernel ready to launch: nothing is left to be loaded by the first launch.

        Raises `ToolchainError` if there is no driver or no such device, or if the cubin is for another GPU;
        `InternalError` if it holds no kernel of that name.
        """
        cuda = _driver()
        at = device(device_ordinal)
        with current(device_ordinal):
            handle = _call("load a module", cuda.cuModuleLoadData, cubin)
            try:
                function = _call(f"find kernel {kernel_name!r}", cuda.cuModuleGetFunction, handle, kernel_name.encode())
                # Lazy loading would otherwise happen at the first launch, which may be inside a graph capture.
                _call(f"load kernel {kernel_name!r}", cuda.cuFuncLoad, function)
                kernel = Kernel(kernel_name, at, function)
            except BaseException:
                cuda.cuModuleUnload(handle)
                raise
        return cls(at, handle, kernel)

    def unload(self) -> None:
        """Unload the module; its kernel must neither run nor be launched again. A second call does nothing.

        Not done when the object is collected: at that time a stream may still be running the kernel.
        """
        handle, self._handle = self._handle, None
        if handle is not None:
            with current(self.device.ordinal):
                _call("unload a module", _driver().cuModuleUnload, handle)


class Kernel:
    """A kernel on one device; `registers` and `local_bytes` are a thread's, `static_shared_bytes` a block's."""

    def __init__(self, name: str, device: Device, function: Any) -> None:
        """`function` is a ``CUfunction`` of the device's primary context, which has to be current."""
        self.name = name
        self.device = device
        self.function = function
        attribute = _driver().CUfunction_attribute
        self.max_threads = self._ask(attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)
        self.static_shared_bytes = self._ask(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
        self.local_bytes = self._ask(attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)
        self.registers = self._ask(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS)
        self._dynamic_allowed = max(0, 48 * 1024 - self.static_shared_bytes)
        self._lock = threading.Lock()

    def prepare(self, block: Dim3, shared_bytes: int, kinds: Sequence[str], attributes: Sequence[Any] = ()) -> Launch:
        """Everything about a launch that does not change from call to call.

        `block` is in threads, `shared_bytes` is dynamic shared memory; `kinds` are those of `Arguments`; `attributes`
        are ``CUlaunchAttribute`` objects, for clusters or dependent launches.

        Raises `InternalError` if the block or its shared memory is more than the kernel or the GPU allows.
        """
        return Launch(self, block, shared_bytes, Arguments(kinds), attributes)

    def launch(
        self,
        grid: Dim3,
        block: Dim3,
        shared_bytes: int,
        stream_handle: int,
        args: Arguments,
        attributes: Sequence[Any] = (),
    ) -> None:
        """Launch once, on whatever thread, with arguments packed already. Repeated launches go through `prepare`.

        A grid without blocks launches nothing. Raises as `prepare` does, and for what the driver reports.
        """
        prepared = Launch(self, block, shared_bytes, args, attributes)
        with current(self.device.ordinal):
            prepared.run_packed(grid, stream_handle)

    def clusters_at_once(self, block: Dim3, shared_bytes: int, size: int) -> int:
        """How many clusters of `size` blocks the GPU runs at the same time, at least 1.

        Fewer than its multiprocessors would hold: a cluster lies within one of their groups (GPC), which GPUs of one
        kind have of several sizes. Raises as `prepare` does.
        """
        self.allow_shared(shared_bytes)
        cuda = _driver()
        attribute = cuda.CUlaunchAttribute()
        attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = size, 1, 1
        config = cuda.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = size, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes = shared_bytes
        config.attrs, config.numAttrs = [attribute], 1
        with current(self.device.ordinal):
            found = _call(
                f"say how many clusters of kernel {self.name!r} run at once",
                cuda.cuOccupancyMaxActiveClusters,
                self.function,
                config,
            )
        return max(1, int(found))

    def allow_shared(self, shared_bytes: int) -> None:
        """Have the driver allow blocks of this kernel `shared_bytes` of dynamic shared memory, or leave it at more.

        Raises `InternalError` if the GPU does not have as much.
        """
        # Above 48 KiB, static included, a kernel has to opt in. The lock keeps a smaller request from undoing a larger.
        with self._lock:
            if shared_bytes <= self._dynamic_allowed:
                return
            total = shared_bytes + self.static_shared_bytes
            if total > self.device.shared_optin:
                raise InternalError(
                    f"kernel {self.name!r} asks for {total} bytes of shared memory a block, but GPU "
                    f"{self.device.ordinal} ({self.device.name}) has {self.device.shared_optin}"
                )
            attribute = _driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            with current(self.device.ordinal):
                _call(
                    f"allow kernel {self.name!r} {shared_bytes} bytes of shared memory",
                    _driver().cuFuncSetAttribute,
                    self.function,
                    attribute,
                    shared_bytes,
                )
            self._dynamic_allowed = shared_bytes

    def _ask(self, attribute: Any) -> int:
        return int(_call(f"describe kernel {self.name!r}", _driver().cuFuncGetAttribute, attribute, self.function))


class Launch:
    """A launch with everything prepared but grid, stream and argument values. Threads may share one.

    The caller has the kernel's device current (see `current`), once around as many launches as it likes.
    """

    def __init__(
        self, kernel: Kernel, block: Dim3, shared_bytes: int, args: Arguments, attributes: Sequence[Any]
    ) -> None:
        threads = block[0] * block[1] * block[2]
        if min(block) < 1 or threads > kernel.max_threads:
            raise InternalError(
                f"kernel {kernel.name!r} cannot have blocks of {block} threads: it allows 1 to {kernel.max_threads}"
            )
        kernel.allow_shared(shared_bytes)
        cuda = _driver()
        config = cuda.CUlaunchConfig()
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes = shared_bytes
        config.hStream = 0
        config.attrs = list(attributes)
        config.numAttrs = len(attributes)
        self.kernel = kernel
        self.args = args
        self.block = block
        self.shared_bytes = shared_bytes
        self._config = config
        self._grid: Dim3 | None = None
        self._stream = 0
        self._empty = True
        self._enter = cuda.cuLaunchKernelEx
        self._function = kernel.function
        self._table = args.address
        self._pack = args._all.pack_into
        self._buffer = args.buffer
        self._base = args.base
        self._lock = threading.Lock()

    def __call__(self, grid: Dim3, stream_handle: int, *values: Any) -> None:
        """Pack `values` and launch on a stream, by its handle. A grid without blocks launches nothing.

        Raises `InternalError` for values that do not fit, and for what the driver reports.
        """
        # The driver copies the arguments before it returns, but releases the GIL meanwhile: hence the lock.
        with self._lock:
            try:
                self._pack(self._buffer, self._base, *values)
            except (struct.error, OverflowError, TypeError) as error:
                raise self.args._misfit(values, error) from None
            if grid != self._grid or stream_handle != self._stream:
                self._configure(grid, stream_handle)
            if self._empty:
                return
            (result,) = self._enter(self._config, self._function, self._table, 0)
        if result != 0:
            raise self._failed(result)

    def run_packed(self, grid: Dim3, stream_handle: int) -> None:
        """Launch with the arguments as they were packed last."""
        with self._lock:
            self._configure(grid, stream_handle)
            if self._empty:
                return
            (result,) = self._enter(self._config, self._function, self._table, 0)
        if result != 0:
            raise self._failed(result)

    @property
    def config_address(self) -> int:
        """Of the ``CUlaunchConfig`` in memory, valid as long as this object lives. Grid and stream in it change."""
        return int(self._config.getPtr())

    def _configure(self, grid: Dim3, stream_handle: int) -> None:
        config = self._config
        self._grid = None  # a failure half way must not leave a grid that looks like the one set
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.hStream = stream_handle
        self._stream = stream_handle
        self._empty = 0 in grid
        self._grid = grid

    def _failed(self, result: Any) -> MoesaicError:
        assert self._grid is not None
        return _fault(result, self.action(self._grid))

    def action(self, grid: Dim3) -> str:
        """What a failed launch of this grid could not do, for an error."""
        return f"launch kernel {self.kernel.name!r} with grid {grid} and block {self.block}"


def dependent_launch() -> Any:
    """The attribute of a launch that may begin before the kernel ahead of it in the stream has ended.

    For kernels that wait by themselves for what they read (programmatic dependent launch).
    """
    cuda = _driver()
    attribute = cuda.CUlaunchAttribute()
    attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def device(ordinal: int) -> Device:
    """The GPU numbered `ordinal`; looked up once, then remembered. Its primary context stays retained.

    Raises `ToolchainError` if there is no driver or no such GPU.
    """
    found = _devices.get(ordinal)
    if found is not None:
        return found
    cuda = _driver()
    with _lock:
        if ordinal not in _devices:
            handle = _call(f"open GPU {ordinal}", cuda.cuDeviceGet, ordinal)
            ask = cuda.CUdevice_attribute

            def attribute(which: Any) -> int:
                return int(_call(f"describe GPU {ordinal}", cuda.cuDeviceGetAttribute, which, handle))

            context = _call(f"retain the context of GPU {ordinal}", cuda.cuDevicePrimaryCtxRetain, handle)
            name = _call(f"name GPU {ordinal}", cuda.cuDeviceGetName, 256, handle)
            _devices[ordinal] = Device(
                ordinal=ordinal,
                name=name.partition(b"\0")[0].decode(errors="replace"),
                capability=(
                    attribute(ask.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                    attribute(ask.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
                ),
                sm_count=attribute(ask.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
                shared_optin=attribute(ask.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
                context=context,
                context_handle=int(context),
            )
        return _devices[ordinal]


def entry_points(ordinal: int) -> tuple[int, int, int, int, int, int]:
    """What native code launches with: the addresses of the driver's functions to launch, to encode a tensor map, and to
    ask for, push and pop the current context, and the context of GPU `ordinal`.

    Raises `ToolchainError` if there is no driver or no such GPU.
    """
    context = device(ordinal).context_handle
    library = ctypes.CDLL("libcuda.so.1")  # loaded already
    contexts = ("cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2")
    names = ("cuLaunchKernelEx", "cuTensorMapEncodeTiled", *contexts)
    launch, encode, get, push, pop = (ctypes.cast(getattr(library, n), ctypes.c_void_p).value or 0 for n in names)
    return launch, encode, get, push, pop, context


def fault(code: int, action: str) -> MoesaicError:
    """The error of ours for a result code of the driver; `action` completes "the driver could not"."""
    return _fault(_driver().CUresult(code), action)


def device_count() -> int:
    """How many GPUs this process sees; 0 with a driver but without a GPU. Raises `ToolchainError` without a driver."""
    try:
        cuda = _driver()
    except ToolchainError as error:
        if "CUDA_ERROR_NO_DEVICE" in str(error):
            return 0
        raise
    return int(_call("count GPUs", cuda.cuDeviceGetCount))


def device_target(ordinal: int) -> Target:
    """The best target for GPU `ordinal`. Raises `ToolchainError` or `UnsupportedError`."""
    return device(ordinal).target


def compute_capability(ordinal: int) -> tuple[int, int]:
    """The compute capability of GPU `ordinal`, such as ``(9, 0)``. Raises `ToolchainError`."""
    return device(ordinal).capability


def sm_count(ordinal: int) -> int:
    """How many multiprocessors GPU `ordinal` has. Raises `ToolchainError`."""
    return device(ordinal).sm_count


def driver_version() -> tuple[int, int]:
    """The newest CUDA that the driver knows, such as ``(13, 0)``. Raises `ToolchainError`."""
    version = int(_call("tell its version", _driver().cuDriverGetVersion))
    return version // 1000, version % 1000 // 10


class current:
    """Have GPU `ordinal`'s primary context current on this thread for a while; the one before comes back.

    Where it is current already, as on a torch thread that uses the device, nothing is changed. Used as
    ``with driver.current(0) as device:``. Raises `ToolchainError`.
    """

    # A class, because the generator behind `contextlib.contextmanager` takes longer than the whole launch.
    __slots__ = ("_device", "_pushed")

    def __init__(self, ordinal: int) -> None:
        self._device = _devices.get(ordinal) or device(ordinal)
        self._pushed = False

    def __enter__(self) -> Device:
        found = self._device
        result, now = _bindings_loaded.cuCtxGetCurrent()
        if result != 0:
            raise _fault(result, "ask for the context")
        if int(now) != found.context_handle:
            _call("enter a context", _bindings_loaded.cuCtxPushCurrent, found.context)
            self._pushed = True
        return found

    def __exit__(self, *exception: object) -> None:
        if self._pushed:
            self._pushed = False
            _call("leave a context", _bindings_loaded.cuCtxPopCurrent)


def _driver() -> Any:
    """The module ``cuda.bindings.driver`` with the driver initialised; `ToolchainError` if that is not possible."""
    global _bindings_loaded
    if _bindings_loaded is not None:
        return _bindings_loaded
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ToolchainError(
            f"the CUDA bindings for Python cannot be imported ({error}); install them with: "
            "pip install 'cuda-bindings>=13.0.3,<14'"
        ) from error
    try:
        (result,) = driver.cuInit(0)
    except (OSError, RuntimeError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ToolchainError(
            f"the NVIDIA driver cannot be loaded ({first}); kernels run only on a machine with an NVIDIA GPU and its "
            "driver. Without one use backend 'reference' or 'emulate'"
        ) from error
    if result != 0:
        raise _fault(result, "start", driver)
    _bindings_loaded = driver
    return driver


def _call(action: str, function: Any, *args: Any) -> Any:
    """Call a driver function; its result, or the error of ours that fits. `action` completes "the driver could not"."""
    result, *values = function(*args)
    if result != 0:
        raise _fault(result, action)
    return values[0] if values else None


def _fault(result: Any, action: str, cuda: Any = None) -> MoesaicError:
    cuda = cuda if cuda is not None else _bindings_loaded
    name = getattr(result, "name", str(result))
    _, text = cuda.cuGetErrorString(result)
    said = f": {text.decode(errors='replace')}" if isinstance(text, bytes) else ""
    message = f"the CUDA driver could not {action} ({name}{said})"
    if name in _MACHINE_FAULTS:
        return ToolchainError(f"{message}; {_MACHINE_FAULTS[name]}")
    if name in _STICKY:
        message += (
            "; a kernel launched earlier, ours or another's, failed, and this process cannot use the GPU any more. "
            "Run it under compute-sanitizer to find the kernel"
        )
    return InternalError(message)

"""Times on the GPU that is here: a card's rates, and the kernels of a layer as the profiler sees them in calls."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from moesaic.codegen.target import Target
from moesaic.ir import environment
from moesaic.ir.core import Function, Value
from moesaic.ir.errors import InputError
from moesaic.ir.ops import col, row, slot
from moesaic.ir.types import TensorType, dim_value
from moesaic.passes.card import LANES, Card
from moesaic.runtime.program import Program
from moesaic.runtime.reference import TORCH_DTYPES

Layer = Callable[..., object]

_SETS = 3  # of inputs, so that a call finds little of its own in the L2 cache
_LARGE = 2**28  # bytes of inputs that leave a cache by themselves; matrices of experts may not fit twice
_ROUNDS = 7


@functools.cache
def measured_card(device: int) -> Card:
    """The rates of a GPU: a copy of 512 MiB, a bf16 product of 8192^3, an empty node of a graph. Half a second."""
    with torch.cuda.device(device):
        properties = torch.cuda.get_device_properties(device)
        clock_hz = 1e3 * getattr(properties, "clock_rate", 0) or 1.7e9
        return Card(
            name=properties.name,
            multiprocessors=properties.multi_processor_count,
            bandwidth=_bandwidth(),
            dense=_dense(),
            float32=properties.multi_processor_count * LANES * 2 * clock_hz,
            launch_us=_node_us(),
            source="measured here",
        )


def _bandwidth() -> float:
    source = torch.randn(2**27, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (1e-3 * _ms(lambda: torch.mul(source, 1.5, out=target), 10))


def _dense() -> float:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / (1e-3 * _ms(lambda: torch.mm(a, b), 10))


def _ms(call: Callable[[], object], calls: int) -> float:
    """Milliseconds of a call that takes long enough for the host to be ahead: the fastest of three runs."""
    times = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call()
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return min(times)


def _node_us() -> float:
    one = torch.ones(1, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        one.add_(1.0)
    torch.cuda.current_stream().wait_stream(stream)
    graph, nodes = torch.cuda.CUDAGraph(), 500
    with torch.cuda.graph(graph):
        for _ in range(nodes):
            one.add_(1.0)
    return 1e3 * _ms(graph.replay, 2) / nodes


def target_here() -> Target | None:
    """The best target of the current GPU; ``None`` without one, or where ``MOESAIC_ARCH`` says what to compile for."""
    if environment.ARCH.get() is not None or not torch.cuda.is_available():
        return None
    return Target.from_capability(*torch.cuda.get_device_capability())


def can_measure(target: Target) -> bool:
    """Whether the current GPU runs kernels for `target`."""
    return torch.cuda.is_available() and target == Target.from_capability(*torch.cuda.get_device_capability())


def kernel_times(layer: Layer, program: Program, tokens: int, *, training: bool, live: float = 1.0) -> dict[str, float]:
    """Microseconds of each kernel by symbol, medians over calls on random inputs of the current GPU.

    Kernels are seen where they are, in a whole call, as `added_times` has them; empty where the profiler sees nothing.

    Raises:
        InputError: an input is none that can be drawn.
    """
    sets = [draw_inputs(program.function, tokens, live)]
    if sum(t.nbytes for t in sets[0].values()) < _LARGE:
        sets += [draw_inputs(program.function, tokens, live, seed) for seed in range(1, _SETS)]
    for inputs in sets:
        call(layer, inputs, training)  # compiles and loads
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        for number in range(_ROUNDS * _SETS):
            call(layer, sets[number % len(sets)], training)
        torch.cuda.synchronize()
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return {name: statistics.median(times) for name, times in added_times(spans).items()}


def added_times(spans: Iterable[tuple[str, float, float]]) -> dict[str, list[float]]:
    """What each launch adds to a stream, by the names of kernels: from its beginning, or the end of those before it
    where that is later, to its end. Launches overlap, and one that waits has begun; these times add up nevertheless.

    Args:
        spans: name, beginning and end of each launch on one stream.
    """
    found: dict[str, list[float]] = {}
    ended = float("-inf")
    for name, beginning, end in sorted(spans, key=lambda span: span[1:]):
        found.setdefault(name, []).append(max(0.0, end - max(beginning, ended)))
        ended = max(ended, end)
    return found


def draw_inputs(
    function: Function, tokens: int, live: float = 1.0, seed: int = 0, device: str = "cuda"
) -> dict[str, torch.Tensor]:
    """Random inputs by name, as a layer in training has them: matrices that keep the size of what they multiply, picks
    of distinct experts, of which a share `live` is here. Where anything is by sequence, the tokens are one sequence.

    Raises:
        InputError: an input's type has a dimension other than T.
    """
    segments = col.order_of_sequences(function)
    generator = torch.Generator(device).manual_seed(seed)
    among: dict[Value, int] = {op.indices: op.experts for op in function.body.ops if isinstance(op, slot.Dispatch)}
    among |= {op.indices: op.size for op in function.body.ops if isinstance(op, row.Given)}
    made: dict[str, torch.Tensor] = {}
    for argument in function.arguments:
        experts = among.get(argument)
        if argument.type.leading == "N":
            continue  # the layer makes it of the shape of the logits
        if experts is not None:
            made[argument.name] = _picks(argument.type, tokens, experts, live, generator, device)
        else:
            made[argument.name] = _draw(argument.type, tokens, generator, device)
    if segments:
        rows = {a.name for a in function.arguments if a.type.leading == "T"}
        axis = 0 if segments == "batch_first" else 1
        made = {name: tensor.unsqueeze(axis) if name in rows else tensor for name, tensor in made.items()}
    return made


def _draw(type: TensorType, tokens: int, generator: torch.Generator, device: str) -> torch.Tensor:
    shape = _shape(type, tokens)
    dtype = TORCH_DTYPES[type.dtype]
    if type.dtype.is_float:
        # Matrices scale with what they sum over; biases and the like are small.
        scale = 1.0 if type.leading else shape[-1] ** -0.5 if len(shape) > 1 else 0.1
        drawn = torch.empty(shape, dtype=dtype, device=device)
        return drawn.normal_(0.0, scale, generator=generator)
    if dtype in (torch.bool, torch.uint8):
        return torch.ones(shape, dtype=dtype, device=device)
    return torch.zeros(shape, dtype=dtype, device=device)


def _picks(
    type: TensorType, tokens: int, experts: int, live: float, generator: torch.Generator, device: str
) -> torch.Tensor:
    _, top_k = _shape(type, tokens)
    first = torch.randint(0, experts, (tokens, 1), generator=generator, device=device)
    # Distinct where K <= E, and as even as picks of a trained router.
    step = torch.arange(top_k, device=device) * max(1, experts // max(1, top_k))
    picks = (first + step) % experts
    here = torch.rand(picks.shape, generator=generator, device=device) < live
    return torch.where(here, picks, -1).to(TORCH_DTYPES[type.dtype])


def _shape(type: TensorType, tokens: int) -> tuple[int, ...]:
    if type.leading not in ("", "T"):
        raise InputError(f"cannot draw a {type} for a measurement; time the layer on tensors of its own")
    return tuple(dim_value(d, {"T": tokens}) for d in type.shape)


def call(layer: Layer, inputs: Mapping[str, torch.Tensor], training: bool) -> None:
    """Inference, or training with random cotangents; the first input goes by its place."""
    leaves = {n: t.detach().requires_grad_(training and t.is_floating_point()) for n, t in inputs.items()}
    (_, first), *others = leaves.items()
    with torch.set_grad_enabled(training):
        result = layer(first, **dict(others))
    if not training:
        return
    fields: list[Any] = list(result._asdict().values()) if hasattr(result, "_asdict") else [result]
    flat = [v for field in fields for v in (field.values() if isinstance(field, Mapping) else [field])]
    wanted = [r for r in flat if r.requires_grad]
    if wanted:
        torch.autograd.backward(wanted, [torch.randn_like(r) for r in wanted])

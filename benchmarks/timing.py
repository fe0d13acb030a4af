"""How a GPU is timed: replays of CUDA graphs over rotating inputs, and the ceilings of the card in the same run.

The timers are the tuner's own, see ``runtime/graph_timer.py``.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from moesaic.runtime.graph_timer import (
    MOST_SETS,
    Bursts,
    Call,
    GraphTimer,
    Shared,
    Timing,
    in_turn,
    sets_for,
    summary,
)

__all__ = [
    "MOST_SETS",
    "Bursts",
    "Call",
    "Clock",
    "GraphTimer",
    "Machine",
    "Shared",
    "Timing",
    "allow_recompiling",
    "commit",
    "driver_version",
    "host_us",
    "in_turn",
    "measure_machine",
    "sets_for",
    "short",
    "summary",
]


@dataclass(frozen=True)
class Machine:
    """What a bound is computed from. The defaults are those of an H100 SXM and stand in where no GPU is."""

    name: str = "nominal H100"
    sms: int = 132
    clock_hz: float = 1.7e9
    bandwidth: float = 3.0e12
    """Bytes a second that a copy kernel reads and writes."""
    l2_bytes: int = 50 * 2**20
    node_us: float = 1.3
    """One kernel that does next to nothing, as a node of a graph."""
    driver: str = "none"
    measured: bool = False

    def __str__(self) -> str:
        how = "measured" if self.measured else "assumed"
        return (
            f"{self.name}, driver {self.driver}; {self.sms} SMs at {self.clock_hz / 1e9:.2f} GHz, "
            f"L2 {self.l2_bytes / 2**20:.0f} MiB; {how}: copy {self.bandwidth / 1e12:.3f} TB/s read + written, "
            f"graph node {self.node_us:.2f} us"
        )

    def print(self) -> None:
        """Where the numbers are from."""
        print(self)
        print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, commit {commit()}", flush=True)

    def as_dict(self) -> dict[str, object]:
        """The same for a file."""
        return asdict(self) | {"torch": torch.__version__, "cuda": torch.version.cuda, "commit": commit()}


def host_us(call: Callable[[], object], calls: int = 1000, between: int = 16) -> float:
    """Median microseconds of host time of one call, with the GPU idle again after every `between` calls."""
    for _ in range(50):
        call()
    collecting = gc.isenabled()
    gc.disable()
    try:
        took = []
        for n in range(calls):
            if n % between == 0:
                torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            took.append(time.perf_counter() - start)
    finally:
        if collecting:
            gc.enable()
    torch.cuda.synchronize()
    return 1e6 * statistics.median(took)


# --------------------------------------------------------------------------------------------------------- ceilings


def measure_machine() -> Machine:
    """The card and its ceilings: copy bandwidth, the cost of a graph node, the clock while copying."""
    properties = torch.cuda.get_device_properties(0)
    bandwidth, clock_hz = _copy_bandwidth()
    torch.cuda.empty_cache()
    return Machine(
        name=properties.name,
        sms=properties.multi_processor_count,
        clock_hz=clock_hz or Machine.clock_hz,
        bandwidth=bandwidth,
        l2_bytes=getattr(properties, "L2_cache_size", 0) or Machine.l2_bytes,
        node_us=_node_us(),
        driver=driver_version(),
        measured=True,
    )


def driver_version() -> str:
    """Of the NVIDIA driver."""
    return _ask_nvidia_smi("driver_version") or "unknown"


def _copy_bandwidth() -> tuple[float, float | None]:
    """Bytes a second, read plus written, of a kernel that copies 1 GiB; and the clock in Hz while it runs."""
    source = torch.randn(2**28, device="cuda")  # random: equal bits everywhere can run faster than data does
    target = torch.empty_like(source)
    # A multiplication, because torch's own copy of whole tensors is the copy engine's, which is slower.
    timer = GraphTimer(lambda i: torch.mul(source, 1.5, out=target), least_ms=8.0)
    timing = timer.time(300.0)
    clock = _clock_under_load(timer)
    return 2 * 2**30 / (timing.us * 1e-6), clock


def _clock_under_load(timer: GraphTimer, seconds: float = 1.0) -> float | None:
    timer.replay(seconds)
    answer = _ask_nvidia_smi("clocks.sm")
    torch.cuda.synchronize()
    digits = (answer or "").split()
    return 1e6 * float(digits[0]) if digits and digits[0].isdigit() else None


def _node_us() -> float:
    one = torch.ones(1, device="cuda")
    return GraphTimer(lambda i: one.add_(1.0), least_ms=1.0).time().us


def _ask_nvidia_smi(what: str) -> str | None:
    """One value of the first GPU, or None where it cannot be had."""
    return _output_of(["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader", "--id=0"])


def commit() -> str:
    """The commit of this checkout, marked if files differ from it; ``unknown`` without git."""
    here = str(Path(__file__).resolve().parent)
    found = _output_of(["git", "-C", here, "rev-parse", "--short=12", "HEAD"])
    if found is None:
        return "unknown"
    changed = _output_of(["git", "-C", here, "status", "--porcelain"])
    return f"{found} with changes" if changed else found


def _output_of(command: Sequence[str]) -> str | None:
    """First line a program prints; None if it cannot be run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else None


class Clock:
    """The run's time and what of it torch.compile has taken."""

    def __init__(self, budget: float, compile_budget: float) -> None:
        self._start = time.monotonic()
        self._budget = budget
        self._compile_budget = compile_budget
        self.compiling = 0.0

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    @property
    def over(self) -> bool:
        return 0 < self._budget <= self.elapsed

    @property
    def may_compile(self) -> bool:
        return self.compiling < self._compile_budget and not self.over

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"[{self.elapsed:6.1f} s] {text}", file=sys.stderr, flush=True)


def short(error: BaseException) -> str:
    """The first line of an error."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:200]


def allow_recompiling() -> None:
    """Lets torch.compile compile what shares its code, as cases and parts do, as often as there are of them."""
    for name in ("recompile_limit", "cache_size_limit", "accumulated_recompile_limit"):
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, 1024)

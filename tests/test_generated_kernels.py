"""What NVRTC makes of generated kernels: no spills, no stack, and registers within a budget, on three generations.

Sizes, storage types, outputs, directions and token buckets are spread over the targets, not multiplied with them; a
test makes sure that all of them meet. What the kernels compute is the business of other tests. How long NVRTC took is
printed at the end of the run and checked by nobody.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from waiting import waits

import moesaic as mo
from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.target import WARP_THREADS, Target, known_targets
from moesaic.runtime.kernels import compiled_kernel
from moesaic.runtime.program import program_of

TARGETS = ("sm_80", "sm_90a", "sm_100a")
DIRECTIONS = ("forward", "training", "backward")
BUCKETS = ("few", "many")

WARPS = {64: 12, 256: 10, 16384: 8}
"""Longest row: warps that registers must leave room for on a multiprocessor. Rows of that length are read once and
written once; so many warps with a few loads each in flight keep the memory busy."""

FINISH_REGISTERS = 64  # of a kernel that adds the partial rows of column sums

COMPACT = ("weights", "indices", "counts")
DENSE = ("probs", "map")
GROUPED = {"groups": 8, "groups_kept": 4}
DEEPSEEK = {"score": "sigmoid", "selection_bias": True, "renormalize": True, "scale": 2.5, **GROUPED}


def _log_score(x: mo.ir.core.Value) -> mo.ir.core.Value:
    return mo.math.log1p(mo.math.softplus(x))


ROUTERS: dict[str, tuple[str, mo.Router]] = {  # name: dtype of the logits, router
    "mixtral": ("bf16", mo.Router(8, 2, renormalize=True)),
    "E8-all-picked": ("fp32", mo.Router(8, 8, order="topk_then_score", outputs=DENSE)),
    "llama4": ("bf16", mo.Router(16, 1, score="sigmoid", order="topk_then_score", outputs=("probs", *COMPACT))),
    "E60-user-score": ("bf16", mo.Router(60, 6, score=_log_score, renormalize=True)),
    "E60-all-picked": (
        "bf16",
        mo.Router(60, 60, score="sqrtsoftplus", selection_bias=True, gate_bias=True, renormalize=True, outputs=DENSE),
    ),
    "E64-sort": ("fp16", mo.Router(64, 40, renormalize=True)),
    "E64-bias": ("fp32", mo.Router(64, 6, selection_bias=True, renormalize=mo.norm.sum(min=1e-12))),
    "qwen3": ("bf16", mo.Router(128, 8, renormalize=True)),
    "qwen3-dense": ("bf16", mo.Router(128, 8, renormalize=True, outputs=DENSE)),
    "gpt_oss": ("bf16", mo.Router(128, 4, order="topk_then_score", gate_bias=True)),
    "E127-rounds": ("fp16", mo.Router(127, 31, score="sqrtsoftplus", outputs=("probs", *COMPACT))),
    "deepseek_v3": ("bf16", mo.Router(256, 8, **DEEPSEEK)),
    "deepseek_v3-fp32": ("fp32", mo.Router(256, 8, **DEEPSEEK)),
    "E256-all-outputs": ("bf16", mo.Router(256, 8, gate_bias=True, renormalize=True, outputs=(*COMPACT, *DENSE))),
    "E257": ("bf16", mo.Router(257, 8, score="sigmoid", gate_bias=True, outputs=("weights", "indices"))),
    "E384-sigmoid-bias": ("bf16", mo.Router(384, 8, score="sigmoid", selection_bias=True, renormalize=True, scale=2.8)),
    "E512-softmax": ("bf16", mo.Router(512, 10, renormalize=True, outputs=DENSE)),
    "E1000": ("bf16", mo.Router(1000, 8, score="sqrtsoftplus", gate_bias=True, renormalize=True)),
    "E1024": ("bf16", mo.Router(1024, 8, renormalize=True, outputs=DENSE)),
    "E1024-fp32": ("fp32", mo.Router(1024, 16, score="sigmoid", gate_bias=True, selection_bias=True, outputs=DENSE)),
    "E1024-groups": (
        "fp16",
        mo.Router(1024, 6, order="topk_then_score", **DEEPSEEK, gate_bias=True, outputs=(*DENSE, "counts")),
    ),
    "E1024-many-picks": ("fp16", mo.Router(1024, 64, score="sigmoid", renormalize=True)),
    "E2304-dense": ("bf16", mo.Router(2304, 36, renormalize=True, outputs=DENSE)),
    "E896-dense": ("bf16", mo.Router(896, 16, renormalize=True, outputs=DENSE)),
    "E2304-losses": (
        "bf16",
        mo.Router(
            2304,
            36,
            renormalize=True,
            losses={"balance": mo.LoadBalance(segments="batch_first"), "z": mo.ZLoss()},
            outputs=(*COMPACT, "bitmap"),
        ),
    ),
    "E1531-given": (
        "fp32",
        mo.Router(1531, 8, score="sigmoid", selection="given", outputs=(*COMPACT, *DENSE, "bitmap")),
    ),
    "E896-many-picks": ("bf16", mo.Router(896, 20, renormalize=True, outputs=DENSE)),
    "E2048-groups": ("bf16", mo.Router(2048, 8, **DEEPSEEK, gate_bias=True, outputs=(*COMPACT, *DENSE))),
    "E1531-all-picked": ("fp32", mo.Router(1531, 1531, order="topk_then_score", outputs=("weights", "indices"))),
    "E8192-many-picks": ("fp32", mo.Router(8192, 300, score="sigmoid", renormalize=True, outputs=DENSE)),
    "E16384": ("bf16", mo.Router(16384, 36, renormalize=True, outputs=COMPACT)),
    "E160-groups": (
        "bf16",
        mo.Router(
            160,
            1,
            score="sigmoid",
            gate_bias=True,
            **GROUPED,
            rank="score",
            scale=2.5,
            weights_dtype="bf16",
            outputs=("probs", "indices", "map", "counts", "weights"),
        ),
    ),
}


@dataclass(frozen=True)
class Case:
    """The kernels of one direction of a router, for one token bucket and one target."""

    router: str
    direction: str
    tokens: str
    target: str

    def __str__(self) -> str:
        return f"{self.router}-{self.direction}-{self.tokens}-{self.target}"

    def kernels(self) -> tuple[GeneratedKernel, ...]:
        dtype, router = ROUTERS[self.router]
        return program_of(router.module(dtype)).executable(self.direction, self.target, (), tokens=self.tokens).kernels


def _cases() -> list[Case]:
    """Of each router one direction, token bucket and target, and of every second one the next of each."""
    cases = []
    for number, router in enumerate(ROUTERS):
        for turn in range(2 - number % 2):
            at = number + turn
            bucket, target = BUCKETS[(at // 3 + turn) % len(BUCKETS)], TARGETS[(at // 6 + turn) % len(TARGETS)]
            cases.append(Case(router, DIRECTIONS[at % len(DIRECTIONS)], bucket, target))
    return cases


CASES = _cases()


def parameter(case: Case) -> object:
    return pytest.param(case, id=str(case))


def test_cases_hold_every_choice() -> None:
    choices = set(itertools.product(DIRECTIONS, BUCKETS, TARGETS))
    assert {(c.direction, c.tokens, c.target) for c in CASES} == choices
    assert {c.router for c in CASES} == set(ROUTERS)
    assert {router.num_experts for _, router in ROUTERS.values()} >= {
        *(8, 60, 64, 128, 256, 384, 512, 1000, 1024),
        *(896, 1531, 2048, 2304, 8192, 16384),
    }
    assert {dtype for dtype, _ in ROUTERS.values()} == {"bf16", "fp16", "fp32"}
    text = "".join(kernel.source for case in CASES for kernel in case.kernels())
    for way in ("select=merge", "select=rounds", "select=sort", "select=radix", "tables=static", "tables=dynamic"):
        assert way in text
    for way in (
        "groups=lanes",
        "groups=shared",
        "groups=block",
        "prefetch=on",
        "prefetch=off",
        "grid=cover",
        "grid=persistent",
    ):
        assert way in text


def budget(symbol: str, experts: int, target: Target) -> int:
    """Registers a thread that a kernel may use."""
    if symbol.endswith("_finish"):
        return FINISH_REGISTERS
    warps = next(warps for longest, warps in WARPS.items() if experts <= longest)
    fitting = target.registers_per_sm // (warps * WARP_THREADS) // 8 * 8  # handed out in eights
    return min(fitting, target.max_registers_per_thread)


@pytest.mark.nvrtc
@pytest.mark.parametrize("case", [parameter(case) for case in CASES])
def test_kernels_fit_registers(case: Case, record_property: pytest.RecordProperty) -> None:
    target = Target.parse(case.target)
    _, router = ROUTERS[case.router]
    over = []
    for kernel in case.kernels():
        compiled = compiled_kernel(kernel, target)
        used = compiled.resources
        record_property("nvrtc", [f"{case}: {kernel.symbol}", compiled.seconds])
        allowed = budget(kernel.symbol, router.num_experts, target)
        if used.uses_local_memory or not 0 < used.registers <= allowed:
            over.append(f"{kernel.symbol}: {used}; at most {allowed} registers, no spills and no stack are allowed")
        assert used.static_shared_bytes <= target.shared_static
        waits(kernel, compiled)
    assert not over, "\n".join(over)


IN_ONE_CLUSTER = (
    Case("E60-all-picked", "backward", "fewest", "sm_90a"),
    Case("gpt_oss", "backward", "fewest", "sm_100a"),
    Case("deepseek_v3", "training", "fewest", "sm_90a"),
    Case("E256-all-outputs", "training", "fewest", "sm_90a"),
    Case("E384-sigmoid-bias", "training", "fewest", "sm_100a"),
)
"""Kernels whose blocks are one cluster, which have more threads than others."""


@pytest.mark.nvrtc
@pytest.mark.parametrize("case", [parameter(case) for case in IN_ONE_CLUSTER])
def test_clusters_fit_registers(case: Case, record_property: pytest.RecordProperty) -> None:
    [kernel] = case.kernels()
    assert kernel.cluster == 8
    test_kernels_fit_registers(case, record_property)


@pytest.mark.nvrtc
@pytest.mark.parametrize("target", known_targets(), ids=str)
def test_every_known_target_compiles(target: Target) -> None:
    case = Case("qwen3-dense", "training", "many", target.name)
    for kernel in case.kernels():
        assert not compiled_kernel(kernel, target).resources.uses_local_memory

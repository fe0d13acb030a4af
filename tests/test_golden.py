"""Whole generated files and IR, as they were when somebody last looked at them.

After a change that is meant to show in them::

    pytest tests/test_golden.py --update-golden
    git diff tests/golden

and the difference belongs to the change: read it. The flag writes new files, rewrites those that differ and removes
those that no test makes any more.

Files are compared whole, banner included. The hash in it is that of the kernel's IR: where nothing else of a file
differs, the IR changed and its text did not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import moesaic as mo
from moesaic.ir.types import DType
from moesaic.passes.instruments import History
from moesaic.passes.manager import DEFAULT, PassManager
from moesaic.runtime.program import program_of

GOLDEN = Path(__file__).resolve().parent / "golden"

TARGET = "sm_90a"

STAGES = ("fuse-score-topk", "specialize")


def _log_score(x: mo.ir.core.Value) -> mo.ir.core.Value:
    return mo.math.log1p(mo.math.softplus(x))


ROUTERS: Mapping[str, tuple[str, mo.Router]] = {  # dtype of the logits, and the router; each is here for what it emits
    # a bias that only selects, groups scored across lanes, a row fetched early in backward
    "deepseek_v3": (
        "bf16",
        mo.Router(
            256,
            8,
            score="sigmoid",
            selection_bias=True,
            groups=8,
            groups_kept=4,
            renormalize=True,
            renorm_eps=1e-20,
            scale=2.5,
        ),
    ),
    # ranked on the logits, 16-bit keys, dense results
    "qwen3_dense": ("bf16", mo.Router(128, 8, renormalize=True, outputs=("probs", "map"))),
    # sums over tokens and the kernel that finishes them
    "gate_bias": ("bf16", mo.Router(128, 4, order="topk_then_score", gate_bias=True)),
    # a loss: totals that blocks of a cluster give to the first of them, two tiles a block; backward with a loss
    "load_balance": ("bf16", mo.Router(160, 6, renormalize=True, losses={"balance": mo.LoadBalance(coef=1e-2)})),
    # picks sorted in shared memory
    "large_k": ("fp16", mo.Router(64, 40, renormalize=True, outputs=("weights", "indices"))),
    # a block shares a row, and picks from what reaches a bound
    "long_rows": ("bf16", mo.Router(2304, 36, renormalize=True, outputs=("probs", "map", "counts"))),
    # picks found one after another, groups in shared memory
    "rounds": (
        "fp32",
        mo.Router(
            96, 24, score="sqrtsoftplus", groups=4, groups_kept=2, group_score="max", outputs=("probs", "counts")
        ),
    ),
    # an expression nobody ships, ranked by its value, in rows that no vector divides
    "odd_user_score": ("bf16", mo.Router(61, 6, score=_log_score, rank="score", renormalize=mo.norm.sum(min=1e-12))),
}

EXPERTS: Mapping[str, tuple[str, int, mo.Experts]] = {  # dtype of x, K, and the experts
    # biases, gates and ups in turn, matrices across the sum, rows of any alignment
    "gpt_oss": (
        "bf16",
        4,
        mo.Experts(
            32,
            2880,
            2880,
            bias=True,
            transposed=True,
            interleaved=True,
            gating=mo.ClampedSwiGLU(limit=7.0, alpha=1.702, offset=1.0),
        ),
    ),
    # tiles without tensor cores, weights on the input, rows that no product has at hand, a bound on picks
    "odd_experts": (
        "fp32",
        3,
        mo.Experts(7, 33, 17, gated=False, activation="relu2", weight_on="input", bias=True, capacity=1.5, align=16),
    ),
}

LAYERS: Mapping[str, tuple[str, mo.MoE]] = {  # dtype of x, and the layer
    # a router between products, and a shared expert with a gate
    "qwen2_moe": (
        "bf16",
        mo.MoE(mo.Router(60, 4), mo.Experts(60, 2048, 1408), shared=mo.SharedExpert(5632, separate=True, gate=True)),
    ),
}

OTHER_TARGETS = {"odd_experts": "sm_80"}
"""Layers for another target than Hopper: a dispatch takes three launches there."""

FEW = ("qwen3_dense",)
"""Routers whose kernels for few tokens differ from those for many in more than numbers."""

FEWEST = ("load_balance",)
"""Those whose forward is one launch for the fewest."""

NAMES = (*ROUTERS, *EXPERTS, *LAYERS)


def module_of(name: str) -> mo.ir.core.Module:
    """The declared function."""
    if name in ROUTERS:
        dtype, router = ROUTERS[name]
        return router.module(dtype)
    if name in EXPERTS:
        dtype, top_k, experts = EXPERTS[name]
        return experts.module(DType.parse(dtype), top_k)
    dtype, layer = LAYERS[name]
    return layer.module(DType.parse(dtype))


@functools.cache
def cuda(name: str) -> Mapping[str, str]:
    """Generated files of a layer by their names: training forward and backward."""
    program = program_of(module_of(name))
    files: dict[str, str] = {}
    shown = [("", "many"), *[(".few", "few")] * (name in FEW), *[(".fewest", "fewest")] * (name in FEWEST)]
    for suffix, tokens in shown:
        for kind in ("training", "backward") if tokens != "fewest" else ("training",):
            for kernel in program.executable(kind, OTHER_TARGETS.get(name, TARGET), (), tokens=tokens).kernels:
                if (
                    kernel.source not in files.values()
                ):  # kernels that finish sums are the same for any number of tokens
                    files[f"{name}.{kernel.symbol}{suffix}.cu"] = kernel.source
    return files


@functools.cache
def stages(name: str) -> Mapping[str, str]:
    """The IR of a layer after each of `STAGES`, by file name."""
    history = History()
    PassManager(DEFAULT, [history]).run(module_of(name))
    stages = ("fuse-experts", "specialize") if name in EXPERTS else STAGES  # where nothing is left for the last fusion
    return {f"{name}.{stage}.moe": history.stages[stage] for stage in stages}


@pytest.mark.parametrize("name", NAMES)
def test_cuda(name: str, golden: Callable[[str, str], None]) -> None:
    for file, text in cuda(name).items():
        golden(file, text)


@pytest.mark.parametrize("name", NAMES)
def test_ir(name: str, golden: Callable[[str, str], None]) -> None:
    for file, text in stages(name).items():
        golden(file, text)
        assert str(mo.parse(text)).strip() == text.strip()


def test_golden_files_show_every_emitter() -> None:
    """Else a change of one would go unseen."""
    text = "".join(source for name in NAMES for source in cuda(name).values())
    for shown in (
        *("select=merge", "select=rounds", "select=sort", "groups=lanes", "groups=shared", "prefetch=on", "vec=1 "),
        *("grid=cover", "grid=persistent", "grid=fixed", "_finish(", "row.gather", "row.scatter"),
        *("col.count", "col.sum"),
        *("SimtTile", "MmaTile", "count_picks", "scan_table", "sum_cluster", "slot.combine", "slot.to_picks"),
        "add_parts<",
        *(
            "tokens_ptr + first_slot + r)",
            "_bias_ptr + expert * ",
            "slot.of_pick",
            "slot.expert_sums",
            "load_halves",
            "sum_rows",
        ),
        "a warp a row",
    ):
        assert shown in text, shown


def test_no_golden_file_is_left_over(request: pytest.FixtureRequest) -> None:
    made = {file for name in NAMES for file in (*cuda(name), *stages(name))}
    for path in sorted(GOLDEN.rglob("*")):
        if path.is_file() and path.relative_to(GOLDEN).as_posix() not in made:
            if not request.config.getoption("--update-golden"):
                pytest.fail(f"nothing makes tests/golden/{path.relative_to(GOLDEN)}; --update-golden removes it")
            path.unlink()

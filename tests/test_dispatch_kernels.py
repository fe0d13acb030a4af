"""The kernels of a dispatch: on the emulator against the op they carry out, and NVRTC."""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from slot_kernels import (
    HALF_OF_THREADS,
    IDS,
    ORDERS,
    RESULTS,
    compiled,
    launch,
    launch_op,
    plain_combine,
    poisoned,
    random_ids,
    region_op,
    run,
    the_op,
)
from waiting import waits

import moesaic as mo
from moesaic.codegen import dispatch, nvrtc
from moesaic.codegen.kernel import GeneratedKernel
from moesaic.ir.builder import Builder
from moesaic.ir.core import Block, Value, create_one
from moesaic.ir.errors import EmulationError, UnsupportedError
from moesaic.ir.ops.launch import Kernel
from moesaic.ir.types import DType, tensor
from moesaic.passes.dispatch_shape import DispatchShape, OneLaunchShape, in_one_launch
from moesaic.runtime import driver, execute
from moesaic.runtime.emulator import FORWARD, REVERSE, build
from moesaic.runtime.reference import TorchArrays

HEADER = "dispatch.cuh"


# Dispatch -------------------------------------------------------------------------------------------------------------


@functools.cache
def steps(
    experts: int,
    top_k: int,
    ids: str = "i32",
    align: int = 1,
    capacity: float = 0.0,
    pad: bool = False,
    threads: int = 0,
    scan_threads: int = 0,
    tokens: int = 0,
    target: str = "sm_90a",
) -> tuple[GeneratedKernel, GeneratedKernel, GeneratedKernel]:
    """The three kernels; threads and tokens of a block as the rule says, unless given."""
    shape = DispatchShape.of(experts, top_k)
    facts = (f"experts={experts}", f"align={align}", f"capacity={capacity!r}", f"pad={int(pad)}")
    config = (f"threads={threads or shape.threads}", f"tokens={tokens or shape.tokens}", f"target={target}")
    scan_config = (f"threads={scan_threads or shape.scan_threads}", f"target={target}")
    table, vector = f"Bx{experts}xi32", f"{experts}xi32"
    indices = f"indices:Tx{top_k}x{ids}"
    written = f"counts:{vector} offsets:{experts + 1}xi32 tokens:Mxi32 picks:Mxi32 slots:Tx{top_k}xi32 dropped:1xi32"
    plain = (f"experts={experts}", "align=1", "capacity=0.0", "pad=0")  # the first steps do not depend on the rest
    count = launch_op("dispatch_count", 1, f"{indices} table:{table}", config, plain)
    scan = launch_op("dispatch_scan", 1, f"table:{table} bases:{table} found:{vector}", scan_config, plain)
    scatter = launch_op("dispatch_scatter", 3, f"{indices} bases:{table} found:{vector} {written}", config, facts)
    return dispatch.generate_count(count), dispatch.generate_scan(scan), dispatch.generate_scatter(scatter)


@functools.cache
def at_once(
    experts: int,
    top_k: int,
    ids: str = "i32",
    align: int = 1,
    capacity: float = 0.0,
    pad: bool = False,
    rule: str = "many",
    target: str = "sm_90a",
    **chosen: int,
) -> GeneratedKernel:
    """The kernel of one launch, as the rule for few or many tokens says but for what is chosen."""
    shape = OneLaunchShape.of(experts, top_k, rule)
    facts = (f"experts={experts}", f"align={align}", f"capacity={capacity!r}", f"pad={int(pad)}")
    names = ("threads", "cluster", "clusters", "share", "tokens", "loads")
    config = (*(f"{name}={chosen.get(name, getattr(shape, name))}" for name in names), f"target={target}")
    vector = f"{experts}xi32"
    written = f"counts:{vector} offsets:{experts + 1}xi32 tokens:Mxi32 picks:Mxi32 slots:Tx{top_k}xi32 dropped:1xi32"
    return dispatch.generate_at_once(launch_op("dispatch", 1, f"indices:Tx{top_k}x{ids} {written}", config, facts))


def of_one_launch(options: Mapping[str, object]) -> dict[str, object]:
    """Options of `steps` for `at_once`: as few tokens a block, of several small clusters."""
    known = {k: v for k, v in options.items() if k in ("align", "capacity", "pad", "threads", "target")}
    if "tokens" in options:
        known |= {"share": options["tokens"], "tokens": options["tokens"], "cluster": 4, "clusters": 3, "loads": 2}
    return known


STEPS, ONE_LAUNCH = FORMS = ("steps", "one launch")


def dispatched(
    ids: torch.Tensor, experts: int, order: int = FORWARD, slack: int = 0, form: str = STEPS, **options: object
) -> dict[str, torch.Tensor]:
    """What a form's kernels make of the picks. `slack` asks for more rows of slots than are needed."""
    tokens, top_k = ids.shape
    known = {k: v for k, v in options.items() if k in ("align", "capacity", "pad")}
    op = the_op(ids, experts, **known)  # type: ignore[arg-type]
    slots = op.slots_per_token * tokens + op.more_slots + slack
    shapes = ((experts,), (experts + 1,), (slots,), (slots,), (tokens, top_k), (1,))
    results = [poisoned(shape, torch.int32) for shape in shapes]
    if form == ONE_LAUNCH:
        kernel = at_once(experts, top_k, IDS[ids.dtype], **of_one_launch(options))  # type: ignore[arg-type]
        launch(kernel, 1, [ids, *results], tokens, order)
        return dict(zip(RESULTS, results, strict=True))
    kernels = steps(experts, top_k, IDS[ids.dtype], **options)  # type: ignore[arg-type]
    blocks = execute._Blocks.of(kernels[0], 3)(tokens, 0)
    table, bases = (poisoned((blocks, experts), torch.int32) for _ in range(2))
    found = poisoned((experts,), torch.int32)
    launch(kernels[0], 1, [ids, table], tokens, order)
    launch(kernels[1], 1, [table, bases, found], tokens, order)
    launch(kernels[2], 3, [ids, bases, found, *results], tokens, order)
    return dict(zip(RESULTS, results, strict=True))


def check(
    ids: torch.Tensor,
    experts: int,
    orders: Sequence[int] = ORDERS,
    forms: Sequence[str] = FORMS,
    **options: object,
) -> dict[str, torch.Tensor]:
    """Compares every result, bit for bit, with the op's reference; gives them."""
    known = {k: v for k, v in options.items() if k in ("align", "capacity", "pad")}
    expected = the_op(ids, experts, **known).reference(TorchArrays, ids)  # type: ignore[arg-type]
    for form in forms:
        if form == ONE_LAUNCH and not in_one_launch("sm_90a", experts):
            continue
        for order in orders:
            results = dispatched(ids, experts, order, form=form, **options)  # type: ignore[arg-type]
            for name, right in zip(RESULTS, expected, strict=True):
                assert torch.equal(results[name], right), (form, name, order)
    return results


# Small blocks, so that few picks are many blocks.
SMALL = {"threads": 64, "scan_threads": 64}


@pytest.mark.emulate
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "each", "dtype"),
    [
        (97, 3, 13, 5, torch.int16),
        (97, 3, 13, 5, torch.int32),
        (97, 3, 13, 5, torch.int64),
        (61, 1, 1, 7, torch.int64),
        (31, 8, 257, 4, torch.int64),
        (5, 1, 3, 2, torch.int32),
        (211, 2, 7, 5, torch.int16),
        (3, 150, 11, 1, torch.int32),
    ],
)
def test_dispatch(tokens: int, top_k: int, experts: int, each: int, dtype: torch.dtype) -> None:
    """Prime sizes, one expert, one pick, repeats of an expert in a row, and numbers that are no expert."""
    check(random_ids(tokens, top_k, experts, dtype), experts, tokens=each, **SMALL)


@pytest.mark.emulate
@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(8, 2, 1031), (128, 8, 300), (5000, 3, 1009)])
def test_blocks_of_the_built_in_shape(experts: int, top_k: int, tokens: int) -> None:
    check(random_ids(tokens, top_k, experts), experts, (FORWARD, 3), align=16, capacity=1.25)


@pytest.mark.emulate
@pytest.mark.slow
def test_most_experts() -> None:
    check(random_ids(500, 5, 16384), 16384, (REVERSE,), align=16, capacity=0.5, pad=True)


@pytest.mark.emulate
@pytest.mark.parametrize(
    ("capacity", "pad", "align"),
    [
        (0.0, False, 16),
        (0.0, False, 128),
        (0.5, False, 1),
        (0.5, False, 64),
        (1.0, True, 1),
        (1.3, True, 16),
        (1.3, True, 128),
        (4.0, False, 16),
    ],
)
def test_capacity_alignment_and_padding(capacity: float, pad: bool, align: int) -> None:
    options = {"align": align, "capacity": capacity, "pad": pad, "tokens": 4, **SMALL}
    forms = FORMS if pad or align == 64 or not capacity else (STEPS,)
    results = check(random_ids(67, 3, 37), 37, (FORWARD, 1), forms, **options)
    if capacity == 0.5:
        assert results["dropped"].item() > 0
    generator = torch.Generator().manual_seed(1)
    skewed = torch.where(torch.rand((67, 3), generator=generator) < 0.7, 2, random_ids(67, 3, 37, outside=False))
    check(skewed.int(), 37, (REVERSE, 2), forms, **options)


@pytest.mark.emulate
def test_rows_that_are_not_needed_are_dead_too() -> None:
    ids = random_ids(40, 2, 6)
    results = dispatched(ids, 6, slack=77, tokens=4, **SMALL)
    end = results["offsets"][-1].item()
    assert (results["tokens"][end:] == -1).all() and (results["picks"][end:] == -1).all()


@pytest.mark.emulate
@pytest.mark.parametrize("options", [{}, {"align": 16}, {"align": 64, "capacity": 1.5, "pad": True}])
def test_no_tokens(options: dict[str, object]) -> None:
    """A block runs all the same: counts are zeros that somebody has to write, rows are dead."""
    check(torch.empty((0, 4), dtype=torch.int64), 9, **options)


@pytest.mark.emulate
@pytest.mark.parametrize("expert", [0, 10, -1, 11, 2**32, 2**32 + 3])
def test_all_picks_alike(expert: int) -> None:
    """One expert gets all, or none does."""
    ids = torch.full((131, 3), expert, dtype=torch.int64)
    results = check(ids, 11, tokens=8, **SMALL)
    assert results["counts"].sum().item() == (393 if 0 <= expert < 11 else 0)
    check(ids, 11, (REVERSE,), capacity=1.0, tokens=8, **SMALL)


@pytest.mark.emulate
@pytest.mark.parametrize("dtype", IDS)
def test_rows_of_picks_lie_anywhere(dtype: torch.dtype) -> None:
    wide = random_ids(53, 9, 7, dtype)
    check(wide[:, 2:5], 7, tokens=4, **SMALL)
    check(wide[1:2].expand(53, 9), 7, tokens=4, **SMALL)  # rows 0 elements apart


@pytest.mark.emulate
def test_blocks_and_threads_change_nothing() -> None:
    ids = random_ids(200, 3, 19)
    for tokens, threads, scan_threads in ((1, 32, 32), (3, 96, 64), (64, 256, 128), (1000, 1024, 1024)):
        options = {"tokens": tokens, "threads": threads, "scan_threads": scan_threads, "capacity": 1.0, "align": 16}
        check(ids, 19, (1,), FORMS if threads == 96 else (STEPS,), **options)


@pytest.mark.emulate
def test_many_blocks() -> None:
    """The table has more rows than the scan takes at a time."""
    check(random_ids(301, 2, 40), 40, tokens=2, **SMALL)


def test_the_shape_bounds_what_a_block_keeps() -> None:
    for experts in (1, 8, 128, 2048, 2049, 4096, 4097, 8192, 16384):
        shape = DispatchShape.of(experts, 8)
        assert shape.histograms * experts <= 16384 or shape.histograms == 1
        kernels = steps(experts, 8, capacity=1.0, target="sm_80")
        assert max(kernel.shared_bytes for kernel in kernels) <= 148 * 1024
    assert DispatchShape.of(128, 8).tokens == 128 and DispatchShape.of(8, 3000).tokens == 1
    assert steps(128, 8)[0].grid == steps(128, 8)[2].grid == "cover"


@pytest.mark.emulate
@pytest.mark.parametrize("rule", ["few", "many"])
def test_one_launch_by_the_built_in_rule(rule: str) -> None:
    """Up to several clusters, and no more than there are to be; more picks than a block ranks at a time."""
    for tokens in (1, 700, 1500):
        ids = random_ids(tokens, 8, 60)
        kernel = at_once(60, 8, align=16, rule=rule, clusters=2, tokens=64)
        expected = the_op(ids, 60, align=16).reference(TorchArrays, ids)
        results = [poisoned(x.shape, torch.int32) for x in expected]
        launch(kernel, 1, [ids, *results], tokens, FORWARD if tokens == 1 else REVERSE)
        assert all(map(torch.equal, results, expected))


def test_the_grid_of_one_launch() -> None:
    """Whole clusters: one at least, as many as tokens need, no more than count all picks faster than they write, nor
    than run at once: each would count them once more."""
    kernel = at_once(128, 8)
    blocks = execute._Blocks.of(kernel, 1000)
    assert kernel.cluster == 8 and [blocks(t, 0) for t in (0, 1, 512, 513, 4096, 10**6)] == [8, 8, 8, 16, 64, 128]
    assert [execute._Blocks.of(kernel, most)(10**6, 0) for most in (1, 8, 127)] == [8, 8, 120]
    assert kernel.shared_bytes <= 48 * 1024  # room for a second block, and for no word with the driver
    assert [in_one_launch(t, 128) for t in ("sm_80", "sm_89", "sm_90", "sm_90a", "sm_100a", "sm_120")] == [
        *(False, False, True, True, True, True)
    ]
    assert in_one_launch("sm_90a", 2048) and not in_one_launch("sm_90a", 2049)
    assert at_once(2048, 8, capacity=1.0, target="sm_120").shared_bytes < 99 * 1024
    assert OneLaunchShape.of(8, 3000, "many").tokens == 1


SHARES = """
#include "moesaic/dispatch.cuh"
extern "C" __global__ void shares(const short* last, long long tokens, long long stride, long long* out) {
  const moesaic::Share<4> share(tokens);
  const long long fields[] = {share.rank, share.run, share.run_end, share.first, share.end};
  for (int i = 0; i < 5; ++i) out[blockIdx.x * 6 + i] = fields[i];
  int experts[1] = {-1};  // of the last token's last pick: before it there is no memory
  const moesaic::Picks<9, 3, short> picks(last - (tokens - 1) * stride, stride, tokens - 1, tokens);
  picks.load_experts(2, 1, experts);
  out[blockIdx.x * 6 + 5] = experts[0];
}
"""


@pytest.mark.emulate
@pytest.mark.parametrize("tokens", [1, 1000, 2**31 - 7, 2**33 + 5])
def test_shares_of_any_number_of_tokens(tokens: int) -> None:
    """They follow one another: in each run, clusters in order; together they are all tokens."""
    blocks, stride = 12, 5
    out = torch.full((blocks, 6), -1)
    last = torch.tensor([1, 2, 7], dtype=torch.int16)
    emulated = build(SHARES, "shares", nvrtc.helper_include_dirs())
    emulated.launch((blocks, 1, 1), (1, 1, 1), [last.data_ptr(), tokens, stride, out.data_ptr()], cluster=4)
    found = [tuple(row) for row in out.tolist()]
    assert [f[0] for f in found] == [0, 1, 2, 3] * 3 and {f[5] for f in found} == {7}
    in_order = [found[cluster * 4 + rank] for rank in range(4) for cluster in range(3)]
    ends = [0, *(f[4] for f in in_order)]
    assert [f[3] for f in in_order] == ends[:-1] and ends[-1] == tokens
    for rank in range(4):
        runs = {f[1:3] for f in found if f[0] == rank}
        assert runs == {(in_order[3 * rank][3], in_order[3 * rank + 2][4])}
    assert max(f[4] - f[3] for f in found) == -(-tokens // blocks)


def test_what_a_block_cannot_keep_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="dispatch_scatter: 8 experts and 70000 picks a block"):
        steps(8, 70000)
    with pytest.raises(UnsupportedError, match="dispatch: 8 experts and 70000 picks a block"):
        at_once(8, 70000)
    with pytest.raises(UnsupportedError, match="needs 147488 bytes of shared memory a block, but sm_89 has"):
        steps(16384, 8, capacity=1.0, target="sm_89")


# Mistakes -------------------------------------------------------------------------------------------------------------

HEADERS = Path(nvrtc.__file__).parent.parent / "templates" / "include"
BARRIERS = re.findall(r"^ *__sync(?:threads|warp)\(\);  // (.*)$", (HEADERS / "moesaic" / HEADER).read_text(), re.M)

# Barriers whose need no order of lanes can show, because something else waits at the same place today.
UNSEEN = {"counters are up to date": "the next match waits for all lanes; a warp's memory needs the barrier"}


def test_every_barrier_says_what_it_is_for() -> None:
    text = (HEADERS / "moesaic" / HEADER).read_text()
    assert len(BARRIERS) == len(set(BARRIERS)) == len(re.findall(r"^ *__sync(?:threads|warp)\(\)", text, re.M))
    assert set(UNSEEN) <= set(BARRIERS)


@pytest.mark.emulate
@pytest.mark.parametrize("barrier", [b for b in BARRIERS if b not in UNSEEN])
def test_barriers_of_the_helpers_are_needed(barrier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any of them, some order of lanes gives another result or a report."""
    include = tmp_path / "include"
    shutil.copytree(HEADERS, include)
    path = include / "moesaic" / HEADER
    path.write_text(
        re.sub(rf"^ *__sync(?:threads|warp)\(\);  // {re.escape(barrier)}\n", "", path.read_text(), flags=re.M)
    )
    monkeypatch.setattr(nvrtc, "helper_include_dirs", lambda: [include])
    few, many = random_ids(301, 2, 70), random_ids(97, 8, 70)
    long = random_ids(61, 8, 601)  # of many experts, the block adds up what comes before each
    bounded = {"capacity": 0.5, **SMALL}
    assert any(
        wrong(ids, experts, tokens=each, **options)
        for ids, experts, each, options in (
            *((few, 70, 2, SMALL), (many, 70, 97, SMALL)),
            *((long, 601, 61, SMALL), (long, 601, 61, bounded)),
        )
    )


def wrong(ids: torch.Tensor, experts: int, **options: object) -> bool:
    """Whether some order of lanes gives a wrong result, or is reported."""
    for order in (FORWARD, REVERSE, 1, 2, 3):
        try:
            check(ids, experts, (order,), align=16, **options)
        except (AssertionError, EmulationError):
            return True
    return False


@pytest.mark.emulate
@pytest.mark.parametrize(
    "barrier",
    [
        "nobody has been seen",
        "picks are ranked",
        "sizes are there",
        "sums are there",
        "first slots have been read",
        "picks have their places",
    ],
)
def test_barriers_of_the_kernel_are_needed(barrier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps.cache_clear()
    honest = dispatch.generate_scatter

    def mutant(op: Kernel) -> GeneratedKernel:
        kernel = honest(op)
        line = f"  __syncthreads();  // {barrier}\n"
        assert line in kernel.source
        return GeneratedKernel(**{**kernel.__dict__, "source": kernel.source.replace(line, "")})

    monkeypatch.setattr(dispatch, "generate_scatter", mutant)
    try:
        assert wrong(random_ids(97, 8, 70), 70, tokens=97, **SMALL)
    finally:
        steps.cache_clear()


AT_ONCE = at_once(70, 8, align=16).source
KERNEL_BARRIERS = [
    line.strip() for line in AT_ONCE.splitlines() if re.match(r" +(__syncthreads|moesaic::cluster_\w+)\(\);", line)
]


def test_every_barrier_of_one_launch_says_what_it_is_for() -> None:
    assert len(KERNEL_BARRIERS) == len(set(KERNEL_BARRIERS)) == 11
    assert all("  // " in line for line in KERNEL_BARRIERS)


@pytest.mark.emulate
@pytest.mark.parametrize("barrier", KERNEL_BARRIERS)
def test_barriers_of_one_launch_are_needed(barrier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once.cache_clear()
    honest = dispatch.generate_at_once

    def mutant(op: Kernel) -> GeneratedKernel:
        kernel = honest(op)
        line = next(line for line in kernel.source.splitlines() if line.strip() == barrier)
        return GeneratedKernel(**{**kernel.__dict__, "source": kernel.source.replace(f"{line}\n", "")})

    monkeypatch.setattr(dispatch, "generate_at_once", mutant)
    try:
        assert wrong(random_ids(301, 8, 70), 70, forms=(ONE_LAUNCH,), tokens=9, threads=64)
    finally:
        at_once.cache_clear()


# Cases that users of other libraries met ------------------------------------------------------------------------------


def layer(ids: torch.Tensor, experts: int, weights: torch.Tensor, expert_rows, **options: object):
    """Dispatch, experts as a function of (expert, rows), and combine. Gives the output and what the dispatch gave."""
    found = check(ids, experts, (FORWARD,), **options)
    return found, combined(found, ids, weights, expert_rows)


def combined(found: dict[str, torch.Tensor], ids: torch.Tensor, weights: torch.Tensor, expert_rows) -> torch.Tensor:
    rows = torch.full((len(found["tokens"]), 8), torch.nan)
    for expert, (first, count) in enumerate(zip(found["offsets"], found["counts"], strict=False)):
        own = slice(first.item(), first.item() + count.item())
        rows[own] = expert_rows(expert, found["tokens"][own].float()[:, None].expand(-1, 8))
    op = plain_combine(8, ids.shape[1], "f32", "f32")
    [y] = run(op, [rows, found["slots"], found["tokens"], weights, found["picks"]], FORWARD)
    return y


def weight_gradients(found: dict[str, torch.Tensor], top_k: int, share: torch.Tensor) -> torch.Tensor:
    """What to_picks makes of a number for each slot."""

    def build(region: Block, x, slots, picks) -> list[Value]:
        return [create_one("slot.to_picks", x, slots, picks, block=region)]

    op = region_op("to_picks", f"share:Mx1xf32 slots:Tx{top_k}xi32 slot_picks:Mxi32", build)
    return run(op, [share, found["slots"], found["picks"]], FORWARD)[0]


@pytest.mark.emulate
def test_case_19_picks_that_are_not_here_take_no_rows() -> None:
    ids = torch.tensor([[0, -1], [1, 0], [-1, -1], [-1, 1]], dtype=torch.int32)
    found, y = layer(ids, 2, torch.ones(4, 2), lambda e, token: token + 1)
    assert found["offsets"].tolist() == [0, 2, 4]
    assert found["tokens"].tolist()[:4] == [0, 1, 1, 3]
    assert y[:, 0].tolist() == [1, 4, 0, 4]
    assert ((found["slots"] == -1) == (ids < 0)).all()
    gradients = weight_gradients(found, 2, torch.where(found["tokens"][:, None] < 0, torch.nan, 3.0))
    assert torch.equal(gradients, torch.where(ids < 0, 0.0, 3.0))


@pytest.mark.emulate
def test_case_20_the_number_of_experts_is_not_here() -> None:
    ids = torch.tensor([[2, 0], [1, 2]], dtype=torch.int64)
    found = check(ids, 2)
    away = check(torch.where(ids == 2, -1, ids), 2)
    assert all(torch.equal(found[name], away[name]) for name in RESULTS)
    assert len(found["counts"]) == 2 and found["slots"].numel() == 4


@pytest.mark.emulate
def test_case_21_idle_lanes_count_nothing() -> None:
    assert check(torch.ones((3, 1), dtype=torch.int32), 2)["counts"].tolist() == [0, 3]
    ids = random_ids(1000, 1, 7, outside=False)
    counts = check(ids, 7)["counts"]
    assert counts.sum().item() == 1000 and torch.equal(counts.long(), torch.bincount(ids[:, 0].long(), minlength=7))


@pytest.mark.emulate
def test_case_22_one_expert_twice_in_a_token() -> None:
    ids = torch.tensor([[1, 1]], dtype=torch.int64)
    found, y = layer(ids, 2, torch.tensor([[0.25, 0.5]]), lambda e, token: token + 4.0 * e)
    assert found["counts"].tolist() == [0, 2] and sorted(found["slots"][0].tolist()) == [0, 1]
    assert y[0, 0].item() == 0.75 * 4.0
    gradients = weight_gradients(found, 2, torch.tensor([[4.0], [4.0]]))
    assert gradients.tolist() == [[4.0, 4.0]]


@pytest.mark.emulate
@pytest.mark.parametrize("pad", [False, True])
def test_case_23_capacity_is_at_most_the_tokens(pad: bool) -> None:
    ids = torch.tensor([[0, 1]] * 4, dtype=torch.int32)
    found = check(ids, 2, capacity=2.0, pad=pad)
    assert found["offsets"].tolist() == [0, 4, 8]
    assert found["dropped"].item() == 0 and (found["slots"] >= 0).all()


@pytest.mark.emulate
def test_case_24_sums_are_float32() -> None:
    x = torch.tensor([256.0, *[1.0] * 7]).bfloat16()[:, None].expand(8, 8).contiguous()
    slots = torch.arange(8, dtype=torch.int32)[None]
    [y] = run(plain_combine(8, 8, "bf16", out="bf16"), [x, slots, torch.zeros(8).int()], FORWARD)
    assert (y == 264).all()


@pytest.mark.emulate
def test_case_25_an_expert_without_picks_is_never_read() -> None:
    ids = torch.tensor([[-1, 1]], dtype=torch.int32)
    found, y = layer(ids, 2, torch.tensor([[0.5, 0.5]]), lambda e, token: token + (torch.inf if e == 0 else 6.0))
    assert found["counts"].tolist() == [0, 1]
    assert (y == 3.0).all()


# NVRTC ----------------------------------------------------------------------------------------------------------------


@pytest.mark.nvrtc
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_dispatch_compiles(target: str, record_property) -> None:
    for options in ({}, {"align": 16, "capacity": 1.25, "pad": True}):
        for experts, ids in ((128, "i64"), (16384, "i32")):
            for kernel in steps(experts, 8, ids, target=target, **options):  # type: ignore[arg-type]
                made = compiled(kernel, target)
                record_property("registers", (kernel.symbol, target, str(made.resources)))
                assert made.resources.registers <= HALF_OF_THREADS
                waits(kernel, made)


@pytest.mark.nvrtc
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_one_launch_compiles(target: str, record_property) -> None:
    """Whatever the rule makes of it fits the registers of its threads."""
    for experts, ids, rule, options in (
        (8, "i64", "few", {}),
        (128, "i32", "many", {}),
        (256, "i64", "few", {"align": 16, "capacity": 1.25, "pad": True}),
        (384, "i16", "many", {"align": 128}),
    ):
        kernel = at_once(experts, 8, ids, rule=rule, target=target, **options)  # type: ignore[arg-type]
        made = compiled(kernel, target)
        record_property("registers", (experts, target, str(made.resources)))
        assert made.resources.registers * kernel.threads <= 65536
        waits(kernel, made)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", IDS)
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (60, 4), (128, 8), (384, 8), (2048, 10)])
def test_one_launch_and_three_agree_on_a_gpu(experts: int, top_k: int, dtype: torch.dtype) -> None:
    """Bit by bit, from one token on, with every option; rows of picks lie anywhere, and memory holds what it held."""
    if not in_one_launch(driver.device_target(torch.cuda.current_device()).name, experts):
        pytest.skip("a dispatch takes three launches on this GPU")
    options = ({}, {"align": 16, "capacity": 1.25}, {"align": 128}, {"capacity": 0.7, "pad": True, "align": 1})
    for number, tokens in enumerate((0, 1, 7, 31, 64, 129, 512, 1021, 4096, 4099, 16384, 30011, 99991, 200003)):
        wide = random_ids(tokens, top_k + 3, experts, dtype, seed=number).cuda()
        if number % 3 == 2:
            wide = torch.where(torch.rand(wide.shape, device="cuda") < 0.7, wide[:1, :1], wide)  # one expert has most
        ids = wide[:, 1 : 1 + top_k]
        known = options[number % len(options)]
        made: dict[bool, list[tuple[torch.Tensor, ...]]] = {}
        for merged in (True, False):
            layer = dispatch_layer(ids, experts, merged, **known)
            made[merged] = [tuple(layer(ids)) for _ in range(3)]
            assert ("dispatch_scan" in layer.ir()) != merged
        first = made[False][0]
        for call in (*made[True], *made[False]):
            for name, x, y in zip(RESULTS, call, first, strict=True):
                assert torch.equal(x, y), (name, tokens, known)


def dispatch_layer(ids: torch.Tensor, experts: int, merged: bool, **options: object):
    """A layer of one dispatch."""
    b = Builder("dispatch")
    given = b.input("indices", tensor(DType(IDS[ids.dtype]), "T", ids.shape[1]))
    results = b.op("slot.dispatch", given, experts=experts, **{"align": 1, "capacity": 0.0, "pad": False, **options})
    passes = "" if merged else "specialize{dispatch=steps}"
    return mo.compile(b.build(**dict(zip(RESULTS, results, strict=True))), backend="cuda", passes=passes)

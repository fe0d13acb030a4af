"""Rows that a block shares: ties, special values and groups against the reference, teams of every size against one
another, barriers that cannot be left out, and rows so many that their elements need 64 bits to be counted."""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from routing import (
    COMPILED,
    EXACT,
    GRADIENT,
    INF,
    NAN,
    ROUNDING,
    Run,
    assert_close,
    assert_same,
    assert_zero,
    cotangent,
    device_of,
    run,
    same_bits,
    sweep,
)

import moesaic as mo
from moesaic.codegen import nvrtc
from moesaic.ir.errors import EmulationError, UnsupportedError
from moesaic.runtime.emulator import FORWARD, REVERSE, Buffer, build
from moesaic.runtime.execute import RUNNERS
from moesaic.runtime.program import Executable, program_of
from moesaic.runtime.reference import TORCH_DTYPES

ORDERS = (FORWARD, REVERSE, 1, 2, 3)

compiled_backend = pytest.mark.parametrize("backend", COMPILED)


def difficult_rows(experts: int, dtype: torch.dtype) -> torch.Tensor:
    """[7, E]: all alike, NaN with few numbers, -inf with few numbers, zeros of both signs, and more and more ties."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(7, experts, generator=generator)
    rows[0] = 1.5
    rows[1] = NAN
    rows[1, 7::97] = 1.0
    rows[2] = -INF
    rows[2, 5::61] = 0.0
    rows[3] = torch.where(rows[3] < 0, -0.0, 0.0)
    rows[4] = (3 * rows[4]).round()
    rows[5] = (0.5 * rows[5]).round()
    return rows.to(dtype)


# Ties and special values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experts", "picks", "dtype", "way"),
    [
        (2304, 36, torch.bfloat16, "radix"),  # a bound from one maximum a lane
        (2304, 100, torch.float32, "radix"),  # from one maximum a chunk; a list too long to count
        (1100, 300, torch.float32, "radix"),  # without a bound: ties by their columns
        (1531, 1400, torch.float32, "sort"),
        (1100, 2, torch.float16, "rounds"),
        (896, 20, torch.bfloat16, "radix"),  # a warp shares the row
        (300, 40, torch.float32, "radix"),
    ],
)
@compiled_backend
def test_order_of_picks_among_ties_and_special_values(
    experts: int, picks: int, dtype: torch.dtype, way: str, backend: str
) -> None:
    router = mo.Router(experts, picks, outputs=("indices", "map", "counts"))
    layer = mo.compile(router, backend=backend)
    assert f"select={way}" in layer.source
    rows = difficult_rows(experts, dtype)
    got = run(layer, rows.to(device_of(backend)), backward=False)
    wanted = run(mo.compile(router, backend="reference"), rows, backward=False)
    assert_same(got, wanted)


@pytest.mark.parametrize(
    ("experts", "groups", "kept", "score"),
    [(2048, 8, 4, "sum_top2"), (2304, 256, 100, mo.sum_top(9))],
)
@compiled_backend
def test_groups_of_long_rows(experts: int, groups: int, kept: int, score: object, backend: str) -> None:
    """Ties between groups included: a row of equal values keeps the first groups."""
    limits = {"groups": groups, "groups_kept": kept, "group_score": score, "renormalize": True}
    router = mo.Router(experts, 12, score="sigmoid", gate_bias=True, **limits)
    logits = 2 * torch.randn(5, experts, generator=torch.Generator().manual_seed(8))
    logits[0] = 0.5
    bias = torch.zeros(experts)
    device = device_of(backend)
    got = run(mo.compile(router, backend=backend), logits.to(device), gate_bias=bias.to(device))
    wanted = run(mo.compile(router, backend="reference"), logits.double(), gate_bias=bias.double())
    assert torch.equal(got["indices"], wanted["indices"])
    assert torch.equal(got["counts"], wanted["counts"])
    assert_close("weights", got["weights"], wanted["weights"], EXACT)
    for name in ("logits", "gate_bias"):
        assert_close(name, got.gradients[name], wanted.gradients[name], GRADIENT)


# Masks, losses and outputs --------------------------------------------------------------------------------------------

EVERYTHING = ("weights", "indices", "counts", "probs", "map", "bitmap", "scores")


@pytest.mark.parametrize(
    ("experts", "picks", "dtype", "segments", "backend"),
    sweep(
        [
            (1531, 20, torch.float32, "sequence_first"),
            (2304, 36, torch.bfloat16, "batch_first"),
            (1531, 2, torch.bfloat16, "batch_first"),  # by rounds
            (800, 40, torch.bfloat16, "batch_first"),  # in a warp
        ]
    ),
)
def test_masks_losses_and_outputs(experts: int, picks: int, dtype: torch.dtype, segments: str, backend: str) -> None:
    """Three tokens of two sequences, of which two do not count; with a gate bias, whose gradient is a sum, too."""
    losses = {"balance": mo.LoadBalance(), "each": mo.LoadBalance(coef=0.5, segments=segments), "z": mo.ZLoss(coef=0.1)}
    router = mo.Router(
        experts, picks, score="sigmoid", renormalize=True, gate_bias=True, losses=losses, indices_dtype="int64",
        outputs=EVERYTHING,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(12)
    shape = (2, 3) if segments == "batch_first" else (3, 2)
    logits = 2 * torch.randn(*shape, experts, generator=generator)
    logits[1, 1] = NAN
    bias = torch.randn(experts, generator=generator)
    mask = torch.ones(shape, dtype=torch.bool)
    mask[0, 0] = mask[1, 1] = False

    def everything(backend: str, logits: torch.Tensor, bias: torch.Tensor) -> dict[str, torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in (logits, bias)]
        r = mo.compile(router, backend=backend)(leaves[0], gate_bias=leaves[1], token_mask=mask.to(logits.device))
        sums = [*r.losses.values(), r.weights, r.probs, r.scores]
        sent = [torch.full_like(x, 1.5) if x.dim() == 0 else cotangent(x, i, dtype) for i, x in enumerate(sums)]
        torch.autograd.backward(sums, sent)
        made = {name: getattr(r, name) for name in EVERYTHING} | {n: x.reshape(1) for n, x in r.losses.items()}
        return {n: x.detach().cpu() for n, x in (made | {"d_logits": leaves[0].grad, "d_bias": leaves[1].grad}).items()}

    stored = logits.to(dtype)
    device = device_of(backend)
    got = everything(backend, stored.to(device), bias.to(device))
    wanted = everything("reference", stored.double(), bias.double())
    for name in ("indices", "counts", "map", "bitmap"):
        assert torch.equal(got[name], wanted[name]), name
    assert got["indices"].dtype == torch.int64
    assert bool((got["indices"][~mask] == -1).all())
    for name in ("weights", "probs", "scores", *losses):
        assert_close(name, got[name], wanted[name], EXACT + ROUNDING[got[name].dtype])
    for name in ("d_logits", "d_bias"):
        assert_close(name, got[name], wanted[name], GRADIENT + ROUNDING[got[name].dtype])
    assert_zero("gradient of masked tokens", got["d_logits"][~mask])


@pytest.mark.parametrize(("experts", "picks", "dtype"), [(1531, 40, torch.float32), (2304, 200, torch.bfloat16)])
@compiled_backend
def test_given_picks(experts: int, picks: int, dtype: torch.dtype, backend: str) -> None:
    """Repeated, and some of no expert: also where a lane has several picks."""
    router = mo.Router(
        experts, picks, score="sigmoid", renormalize=True, gate_bias=True, expert_scale=True, selection="given",
        indices_dtype="int64", outputs=EVERYTHING,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(13)
    logits = torch.randn(4, experts, generator=generator).to(dtype)
    ids = torch.randint(-300, experts + 300, (4, picks), generator=generator)
    ids[1] = experts - 1
    ids[2, picks // 2 :] = ids[2, 0]
    learned = {"gate_bias": torch.randn(experts, generator=generator), "expert_scale": torch.rand(experts)}
    device = device_of(backend)
    storage = {"probs": dtype}
    moved = {n: t.to(device) for n, t in learned.items()}
    got = run(mo.compile(router, backend=backend), logits.to(device), indices=ids.to(device), storage=storage, **moved)
    exact = {n: t.double() for n, t in learned.items()}
    wanted = run(mo.compile(router, backend="reference"), logits.double(), indices=ids, storage=storage, **exact)
    for name in ("indices", "counts", "map", "bitmap"):
        assert torch.equal(got[name], wanted[name]), name
    for name in ("weights", "probs", "scores"):
        assert_close(name, got[name], wanted[name], EXACT + ROUNDING[got[name].dtype])
    for name, gradient in wanted.gradients.items():
        assert_close(name, got.gradients[name], gradient, GRADIENT + ROUNDING[got.gradients[name].dtype])


# Teams ----------------------------------------------------------------------------------------------------------------

SHARED_BY_TEAMS = mo.Router(
    1000,
    20,
    score="sigmoid",
    renormalize=True,
    groups=4,
    groups_kept=3,
    outputs=("weights", "indices", "counts", "probs", "map"),
)


@functools.cache
def by_team(backend: str, lanes: int, select: str) -> Run:
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(5))
    logits[1], logits[2, ::3], logits[3, ::2] = 1.0, -INF, NAN
    layer = mo.compile(SHARED_BY_TEAMS, backend=backend, passes=f"specialize{{lanes={lanes} select={select}}}")
    assert f"lanes={lanes}" in layer.source
    return run(layer, logits.to(device_of(backend)))


@pytest.mark.parametrize(("lanes", "select"), [(64, "radix"), (128, "sort"), (1024, "radix")])
@compiled_backend
def test_the_size_of_a_team_changes_no_bit(lanes: int, select: str, backend: str) -> None:
    assert_same(by_team(backend, lanes, select), by_team(backend, 32, "rounds"))


# Barriers -------------------------------------------------------------------------------------------------------------

BARRIER = re.compile(r"^ *(team_sync<\w+(::kLanes)?>|__syncthreads)\(\);.*\n", re.M)

HELPERS = (  # header, what the function's text begins with, which of its barriers
    ("row.cuh", "__device__ __forceinline__ T lanes_reduce(", 1),
    ("row.cuh", "__device__ __forceinline__ float lanes_sum(", 1),
    ("row.cuh", "__device__ __forceinline__ void membership(", 0),
    ("select_block.cuh", "__device__ __forceinline__ unsigned find_digit(", 0),
    ("select_block.cuh", "__device__ __forceinline__ void rank_shared(", 0),
    ("select_block.cuh", "__device__ __forceinline__ void top_k_radix(", 2),
    ("select_block.cuh", "__device__ __forceinline__ void group_limit_block(", 1),
)


@pytest.mark.emulate
@pytest.mark.parametrize(("header", "function", "number"), HELPERS)
def test_a_barrier_that_is_left_out_shows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, header: str, function: str, number: int
) -> None:
    """Wrong, or reported, in some order of the lanes."""
    [folder] = nvrtc.helper_include_dirs()
    mutated = tmp_path / "include"
    shutil.copytree(folder, mutated)
    path = mutated / "moesaic" / header
    text = path.read_text()
    start = text.index(function)
    barrier = list(BARRIER.finditer(text, start, text.index("\n}\n", start) + 1))[number]
    path.write_text(text[: barrier.start()] + text[barrier.end() :])

    router = mo.Router(1100, 6, groups=4, groups_kept=2, renormalize=True, outputs=("probs", "map"), name="barriers")
    logits = torch.randn(4, 1100, generator=torch.Generator().manual_seed(6))
    backward = function.endswith(" membership(")  # the picks of a backward pass are known by their indices alone
    wanted = run(mo.compile(router, backend="emulate"), logits, backward=backward)
    monkeypatch.setattr(nvrtc, "helper_include_dirs", lambda: [mutated])
    for made in ("_prepared", "_distinct"):
        monkeypatch.setattr(RUNNERS["emulate"], made, {})
    layer = mo.compile(router, backend="emulate")
    found = False
    for order in ORDERS:
        monkeypatch.setattr(RUNNERS["emulate"], "order", order)
        try:
            got = run(layer, logits, backward=backward)
        except EmulationError:
            found = True
        else:
            found |= any(
                not same_bits(a[name], b[name])
                for a, b in ((got.outputs, wanted.outputs), (got.gradients, wanted.gradients))
                for name in a
            )
    assert found


# Many rows ------------------------------------------------------------------------------------------------------------

ROWS = mo.Router(1100, 5, renormalize=True, outputs=("weights", "indices", "probs", "map"))


def launched(executable: Executable, inputs: Sequence[torch.Tensor], first: int) -> Mapping[str, torch.Tensor]:
    """Results of the first kernel for the rows `first` and after, of which alone there is memory.

    The kernel's block 0 is told to be the one of row `first`, and its pointers say where row 0 would be.
    """
    [step] = executable.plan.steps
    kernel = step.kernel
    block = "block = blockIdx.x;"
    by_warps = re.search(r"kTokensPerWarp = (\d+)", kernel.source)
    together = int(by_warps[1]) if by_warps is not None else kernel.rows_per_block  # rows that follow one another
    assert kernel.source.count(block) == 1 and first % together == 0
    source = kernel.source.replace(block, f"block = blockIdx.x + {first // together}ll;")
    tensors = list(inputs)
    tokens = inputs[0].shape[0]
    for buffer in executable.plan.buffers:
        columns = [c for c in buffer.type.shape if isinstance(c, int)]
        tensors.append(torch.zeros(tokens, *columns, dtype=TORCH_DTYPES[buffer.type.dtype]))
    values = []
    for argument in kernel.arguments:
        tensor = tensors[step.operands[argument.operand]]
        if argument.kind == "pointer":
            before = first * tensor.stride(0) * tensor.element_size()
            values.append((tensor.data_ptr() - before) % 2**64)  # where small tensors lie low, addresses wrap
        elif argument.kind == "stride":
            values.append(tensor.stride(0))
        else:
            assert argument.kind == "tokens"
            values.append(first + tokens)
    buffers = [Buffer(t.data_ptr(), t.numel() * t.element_size(), f"operand {i}") for i, t in enumerate(tensors)]
    emulated = build(source, kernel.symbol, nvrtc.helper_include_dirs())
    emulated.launch((2, 1, 1), (kernel.threads, 1, 1), values, buffers=buffers)
    return dict(zip(executable.plan.result_names, (tensors[i] for i in executable.plan.results), strict=True))


@pytest.mark.emulate
def test_elements_beyond_32_bits() -> None:
    """Row 2^32 / E and a few on, forward and backward: every address is wrong unless counted in 64 bits."""
    program = program_of(ROWS.module("bf16"))
    logits = torch.randn(5, 1100, generator=torch.Generator().manual_seed(2)).bfloat16()
    first = 2**32 // 1100 + 3
    training = program.executable("training", "sm_90a", ())
    near, far = launched(training, [logits], 0), launched(training, [logits], first)
    assert near.keys() == far.keys() >= {"weights", "indices", "probs", "map"}
    for name, wanted in near.items():
        assert same_bits(far[name], wanted), name
    assert bool((near["map"].sum(-1) == 5).all())

    backward = program.executable("backward", "sm_90a", (), ("weights", "probs"))
    given = {
        "logits": logits,
        "indices": near["indices"],
        "d_weights": torch.randn(5, 5),
        "d_probs": torch.randn(5, 1100).bfloat16(),
    }
    inputs = [given[i.name] for i in backward.plan.inputs]
    near, far = launched(backward, inputs, 0), launched(backward, inputs, first)
    assert same_bits(far["d_logits"], near["d_logits"])
    assert bool((near["d_logits"] != 0).any())


@pytest.mark.emulate
def test_elements_beyond_32_bits_of_rows_by_warps() -> None:
    """The same where the warps of a block go through tokens on their own."""
    rows = mo.Router(512, 5, renormalize=True, outputs=("weights", "indices", "probs", "map"))
    training = program_of(rows.module("bf16")).executable("training", "sm_90a", ())
    assert "first_of_warp" in training.kernels[0].source
    logits = torch.randn(5, 512, generator=torch.Generator().manual_seed(2)).bfloat16()
    near, far = launched(training, [logits], 0), launched(training, [logits], 2**32 // 512 + 4)
    for name, wanted in near.items():
        assert same_bits(far[name], wanted), name
    assert bool((near["map"].sum(-1) == 5).all())


@pytest.mark.emulate
def test_row_strides_beyond_32_bits(tmp_path: Path) -> None:
    """Rows 2^31 + 8 elements apart, in a file that is nearly all holes."""
    apart, rows = 2**31 + 8, 3
    file = tmp_path / "rows"
    with file.open("wb") as empty:
        empty.truncate(2 * apart * rows)
    wide = torch.from_file(str(file), shared=True, size=apart * rows, dtype=torch.bfloat16)
    logits = wide.as_strided((rows, 1100), (apart, 1))
    logits.copy_(torch.randn(rows, 1100, generator=torch.Generator().manual_seed(1)))
    layer = mo.compile(ROWS, backend="emulate")
    assert_same(run(layer, logits, backward=False), run(layer, logits.contiguous(), backward=False))


@pytest.mark.gpu
def test_more_than_2_31_elements_on_a_gpu() -> None:
    experts, rows = 16384, 2**31 // 16384 + 70
    logits = torch.randn(rows, experts, device="cuda", dtype=torch.bfloat16)
    layer = mo.compile(mo.Router(experts, 8, renormalize=True), backend="cuda")
    with torch.no_grad():
        every, last = layer(logits), layer(logits[-100:])
    assert same_bits(every.weights[-100:], last.weights)
    assert torch.equal(every.indices[-100:], last.indices)
    assert int(every.counts.sum()) == 8 * rows


# Limits ---------------------------------------------------------------------------------------------------------------


def test_rows_that_need_more_shared_memory_than_there_is() -> None:
    program = program_of(mo.Router(16384, 16384, order="topk_then_score").module("fp32"))
    large = program.executable("forward", "sm_80", ()).kernels[0]
    assert large.shared_bytes == 8 * 16384
    with pytest.raises(
        UnsupportedError, match=r"need 13\d+ bytes of shared memory a block, but sm_86 has 101376; up to"
    ):
        program.executable("forward", "sm_86", ())
    halved = program_of(mo.Router(16384, 8192, order="topk_then_score").module("fp32"))
    assert halved.executable("forward", "sm_86", ()).kernels[0].shared_bytes < 101376

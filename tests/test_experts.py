"""Experts from declaration to kernels: values and gradients against float64, on the emulator and on a GPU.

Sizes are odd and prime where that matters. Ids lie outside [0, E), repeat within a token, leave experts without tokens.
Cotangents are random. Memory that a kernel is handed is poisoned on the emulator: what it reads too much, or leaves
unwritten, is NaN.
"""

from __future__ import annotations

import copy
import pickle
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from device_kernels import skip_without_wgmma
from expert_calls import KINDS, TOP_K, Tensors, check, cotangent_for, exact, ids, run, tensors_for
from routing import COMPILED, device_of, sweep
from waiting import waits

import moesaic as mo
from moesaic.codegen import nvrtc
from moesaic.codegen.disassemble import disassemble
from moesaic.codegen.target import Target
from moesaic.ir.errors import EmulationError, InputError, InputTypeError, UnsupportedError
from moesaic.ir.types import DType
from moesaic.passes import product_shape
from moesaic.runtime.execute import RUNNERS
from moesaic.runtime.kernels import compiled_kernel
from moesaic.runtime.program import program_by_key, program_of, with_gradients


@pytest.mark.parametrize(("name", "backend"), sweep(((name,) for name in KINDS), 2, of=3))
def test_values_and_gradients(name: str, backend: str) -> None:
    experts = KINDS[name]
    given = tensors_for(experts, 13, TOP_K, torch.float32)
    cotangent = cotangent_for(13, experts.hidden, torch.float32)
    found = run(mo.compile(experts, backend=backend), given, cotangent, device_of(backend))
    check(found, exact(experts, given, cotangent), torch.float32)


# Each takes seconds to compile for the emulator: there, each epilogue and each type once; all of them on a GPU.
SIXTEEN_BITS = [
    *((name, torch.bfloat16) for name in ("swiglu", "gpt_oss", "input")),
    ("odd", torch.float16),
    *((name, torch.bfloat16) for name in ("odd", "wide")),
    ("swiglu", torch.float16),
]


@pytest.mark.parametrize(
    ("name", "dtype", "backend"),
    [
        *(pytest.param(*case, "emulate", marks=pytest.mark.emulate) for case in SIXTEEN_BITS[:4]),
        *(pytest.param(*case, "cuda", marks=pytest.mark.gpu) for case in SIXTEEN_BITS),
    ],
    ids=str,
)
def test_sixteen_bits(name: str, dtype: torch.dtype, backend: str) -> None:
    experts = KINDS[name]
    given = tensors_for(experts, 29, TOP_K, dtype)
    cotangent = cotangent_for(29, experts.hidden, dtype)
    found = run(mo.compile(experts, backend=backend), given, cotangent, device_of(backend))
    assert found["hidden"].dtype == dtype and found["d_x"].dtype == dtype
    check(found, exact(experts, given, cotangent), dtype)


IDS: Mapping[str, Callable[[], torch.Tensor]] = {
    "all dropped": lambda: torch.full((9, TOP_K), -1, dtype=torch.int32),
    "one hot expert": lambda: torch.full((9, TOP_K), 3, dtype=torch.int32),
    "no tokens": lambda: torch.zeros((0, TOP_K), dtype=torch.int32),
    "one row": lambda: ids([4, 1, 0]),
    "E is not here": lambda: torch.full((9, TOP_K), 5, dtype=torch.int32),
    "many": lambda: torch.arange(67 * TOP_K, dtype=torch.int32).reshape(67, TOP_K) % 5,
}


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("name", IDS)
def test_extreme_routing(name: str, backend: str) -> None:
    """Case 38: gradients of experts without tokens are there, and 0."""
    experts = KINDS["bias"]
    indices = IDS[name]()
    given = tensors_for(experts, indices.shape[0], TOP_K, torch.float32, ids=indices)
    cotangent = cotangent_for(indices.shape[0], experts.hidden, torch.float32)
    found = run(mo.compile(experts, backend=backend), given, cotangent, device_of(backend))
    wanted = exact(experts, given, cotangent)
    check(found, wanted, torch.float32)
    for expert in range(5):
        if not (indices == expert).any():
            for matrix in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"):
                assert (found[f"d_{matrix}"][expert] == 0).all(), f"{matrix} of an expert without tokens"


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("index_dtype", [torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_types_of_indices_and_weights(index_dtype: torch.dtype, weight_dtype: torch.dtype, backend: str) -> None:
    """Case 57; an int64 beyond 32 bits is not here either."""
    experts = KINDS["swiglu"]
    given = tensors_for(experts, 11, TOP_K, torch.bfloat16)
    given["indices"] = given["indices"].to(index_dtype)
    given["weights"] = given["weights"].to(weight_dtype)
    if index_dtype == torch.int64:
        given["indices"][3] = torch.tensor([2**32, 2**32 + 1, -(2**40)])
    strided = torch.zeros(11, 7, dtype=index_dtype)
    strided[:, 2:5] = given["indices"]
    given["indices"] = strided[:, 2:5]
    cotangent = cotangent_for(11, experts.hidden, torch.bfloat16)
    found = run(mo.compile(experts, backend=backend), given, cotangent, device_of(backend))
    check(found, exact(experts, given, cotangent), torch.bfloat16)


@pytest.mark.parametrize("backend", COMPILED)
def test_misaligned_and_strided_rows(backend: str) -> None:
    """Case 28: a base address of odd elements, rows further apart than they are long, matrices cut from larger ones."""
    experts = KINDS["swiglu"]
    given = tensors_for(experts, 10, TOP_K, torch.bfloat16)
    device = device_of(backend)
    cotangent = cotangent_for(10, 24, torch.bfloat16)
    wanted = exact(experts, given, cotangent)
    held = torch.full((1 + 10 * 27,), float("nan"), dtype=torch.bfloat16, device=device)
    x = held[1:].view(10, 27)[:, :24]
    x.copy_(given["x"])
    larger = torch.full((5, 34, 29), float("nan"), dtype=torch.bfloat16, device=device)
    gate_up = larger[:, 1:33, 3:27]
    gate_up.copy_(given["gate_up_proj"])
    inputs = {**{n: t.to(device) for n, t in given.items()}, "x": x, "gate_up_proj": gate_up}
    leaves = {n: t.detach().requires_grad_(t.is_floating_point()) for n, t in inputs.items()}
    layer = mo.compile(experts, backend=backend)
    hidden = layer(**leaves)
    hidden.backward(cotangent.to(device))
    found = {"hidden": hidden.detach().cpu()}
    found |= {f"d_{n}": t.grad.cpu() for n, t in leaves.items() if t.grad is not None}
    check(found, wanted, torch.bfloat16)


@pytest.mark.parametrize("backend", COMPILED)
def test_dead_slots_reach_nothing(backend: str) -> None:
    """Cases 25 and 26, and the three known leaks: what is not here contributes exactly 0, whatever lies around."""
    experts = KINDS["bias"]
    given = tensors_for(experts, 13, TOP_K, torch.float32)
    here = (given["indices"] >= 0) & (given["indices"] < 5)
    given["weights"][~here] = float("nan")
    given["x"][~here.any(1)] = float("inf")
    absent = [e for e in range(5) if not (given["indices"] == e).any()] or [0]
    given["indices"][given["indices"] == absent[0]] = 5
    given["gate_up_proj"][absent[0]] = float("inf")
    given["down_proj"][absent[0]] = float("nan")
    here = (given["indices"] >= 0) & (given["indices"] < 5)
    cotangent = cotangent_for(13, experts.hidden, torch.float32)
    found = run(mo.compile(experts, backend=backend), given, cotangent, device_of(backend))
    live = here.any(1)
    for name, value in found.items():
        rows = value[live] if name in ("d_x",) else value
        assert torch.isfinite(rows).all(), name
    assert (found["d_weights"][~here] == 0).all()
    assert (found["hidden"][~live] == 0).all() and (found["d_x"][~live] == 0).all()
    assert (found["d_gate_up_proj"][absent[0]] == 0).all() and (found["d_down_proj"][absent[0]] == 0).all()


@pytest.mark.emulate
def test_only_what_is_promised_is_saved() -> None:
    """x and the matrices are the caller's; h, the routing and the weights of picks are all that is kept."""
    experts = KINDS["swiglu"]
    given = tensors_for(experts, 13, TOP_K, torch.bfloat16)
    inputs = {n: t.requires_grad_(t.is_floating_point()) for n, t in given.items()}
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    layer = mo.compile(experts, backend="emulate")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        layer(**inputs)
    callers = {t.data_ptr() for t in inputs.values()}
    own = [t for t in saved if t.data_ptr() not in callers]
    floats = [t for t in own if t.is_floating_point()]
    assert [tuple(t.shape) for t in floats] == [(39, 32)] and floats[0].dtype == torch.bfloat16
    assert layer.memory(13).saved == sum(t.numel() * t.element_size() for t in own)


@pytest.mark.parametrize("backend", COMPILED)
def test_recomputing_keeps_the_dispatch_alone(backend: str) -> None:
    experts = KINDS["swiglu"]
    given, cotangent = tensors_for(experts, 13, TOP_K, torch.float32), cotangent_for(13, 24, torch.float32)
    layer = mo.compile(experts, backend=backend, recompute="h")
    inputs = {n: t.to(device_of(backend)).requires_grad_(t.is_floating_point()) for n, t in given.items()}
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        layer(**inputs)
    callers = {t.data_ptr() for t in inputs.values()}
    assert not any(t.is_floating_point() for t in saved if t.data_ptr() not in callers)
    check(run(layer, given, cotangent, device_of(backend)), exact(experts, given, cotangent), torch.float32)
    with pytest.raises(InputError, match="unknown recompute 'x'; known: 'h'"):
        mo.compile(experts, recompute="x")


SWAPPED_ROWS = (17, 0, 64, 90, 105, 122, 136, 141, 257)  # of each expert
HOPPER_TILES: list[tuple[str, dict[str, Any], set[tuple[int, int]]]] = [
    # The gradient of a weight is a sum over 320 columns: three partial sums from two tiles of 256.
    ("cooperative", {"num_experts": 2, "hidden": 128, "intermediate": 320}, {(128, 128), (128, 256), (256, 128)}),
    ("cooperative", {"num_experts": 2, "hidden": 256, "intermediate": 128}, {(128, 128), (128, 256), (256, 128)}),
    ("pingpong", {"num_experts": 2, "hidden": 128, "intermediate": 128}, {(128, 64), (128, 128)}),
    ("", {"num_experts": 2, "hidden": 128, "intermediate": 128}, {(128, 128), (256, 128)}),
    (
        "cooperative",
        {"num_experts": 2, "hidden": 128, "intermediate": 68, "transposed": True},
        {(128, 128), (256, 128)},
    ),
    ("pingpong", {"num_experts": 3, "hidden": 200, "intermediate": 72, "bias": True}, {(128, 64), (128, 128)}),
    # Boxes of 64 columns have 8 of the last, after which biases are added.
    ("cooperative", {"num_experts": 2, "hidden": 200, "intermediate": 136, "bias": True}, {(128, 256), (256, 128)}),
    ("swapped", {"num_experts": 9, "hidden": 136, "intermediate": 136}, {(144, 128), (144, 256), (256, 128)}),
]


@pytest.mark.parametrize(
    ("tile", "kind", "shapes", "backend"),
    [
        *(pytest.param(*HOPPER_TILES[n], "emulate", marks=pytest.mark.emulate) for n in (0, 3, 6, 7)),
        *(pytest.param(*case, "cuda", marks=pytest.mark.gpu) for case in HOPPER_TILES),
    ],
)
def test_tiles_of_hopper(tile: str, kind: dict[str, Any], shapes: set[tuple[int, int]], backend: str) -> None:
    if backend == "cuda":
        skip_without_wgmma()
    experts = mo.Experts(**kind)
    hidden = kind["hidden"]
    tokens = 11 if tile else 90  # of an expert's rows, more than a box has
    ids = None
    if tile == "swapped":  # every width that a tile may have, alone and in pairs
        ids = torch.repeat_interleave(torch.arange(9, dtype=torch.int32), torch.tensor(SWAPPED_ROWS)).reshape(-1, 2)
        tokens = len(ids)
    given = tensors_for(experts, tokens, 2, torch.bfloat16, ids=ids)
    cotangent = cotangent_for(tokens, hidden, torch.bfloat16)
    layer = mo.compile(experts, backend=backend, passes=f"specialize{{tile={tile}}}" if tile else "")
    check(run(layer, given, cotangent, device_of(backend)), exact(experts, given, cotangent), torch.bfloat16)
    kind_of_tile = "SwappedTile" if tile == "swapped" else f"WgmmaTile  schedule={tile or '[a-z]+'}"
    found = re.findall(rf"tile={kind_of_tile} .*?rows=(\d+)  columns=(\d+)", layer.source)
    assert shapes <= {(int(r), int(c)) for r, c in found} and "MmaTile<" not in layer.source.replace("WgmmaTile", "")


def test_large_weights_have_rows_inside_columns() -> None:
    """Of Mixtral a matrix has 117 or 235 MB, which no cache holds; of Qwen3, 3 or 6."""
    for sizes, bands, inside in (
        ((8, 4096, 14336), 4, {"experts_backward_d_down_proj"}),
        ((128, 2048, 768), 0, set[str]()),
    ):
        layer = mo.compile(mo.Experts(*sizes, dtype="bf16"), target="sm_90a").layer(2, weights_dtype="bf16")
        sources = {symbol: kernel.source for symbol, kernel in layer.kernels.items()}
        assert sum("item_of<Tile::kPair, kBand>(" in source for source in sources.values()) == bands
        assert {s for s, source in sources.items() if "rest / kRowItems" in source} == inside


@pytest.mark.emulate
def test_rows_inside_columns_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bands of two pairs, where an expert has up to three, and any weight is large."""
    experts = mo.Experts(3, 520, 136)
    ids = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor((774, 257, 1))).reshape(-1, 2)
    given = tensors_for(experts, len(ids), 2, torch.bfloat16, ids=ids)
    cotangent = cotangent_for(len(ids), 520, torch.bfloat16)
    found = []
    for large in (False, True):
        if large:
            for name, value in (("_LARGE_WEIGHT", 0), ("_BAND", 2), ("_WIDE_MATRIX", 0)):
                monkeypatch.setattr(product_shape, name, value)
        named = mo.Experts(3, 520, 136, name=f"experts_{large}".lower())  # a program of its own
        layer = mo.compile(named, backend="emulate", passes="specialize{tile=cooperative}")
        found.append(run(layer, given, cotangent, "cpu"))
        assert ("kBand" in layer.source) == large and ("rest / kRowItems" in layer.source) == large
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name
    check(found[1], exact(experts, given, cotangent), torch.bfloat16)


@pytest.mark.parametrize("weight_on", ["output", "input", "middle"])
@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_weights_of_few_picks_keep_no_product_from_hopper(weight_on: str, top_k: int) -> None:
    """They are numbers of slots, not rows that warps fetch: that a token's are 2 or 12 bytes is no matter."""
    experts = mo.Experts(4, 256, 512, weight_on=weight_on, dtype="bf16")
    layer = mo.compile(experts, target="sm_90a").layer(top_k, weights_dtype="bf16")
    products = [k.source for k in layer.kernels.values() if "using Tile" in k.source]
    assert len(products) == 6 and all(re.search("WgmmaTile<|SwappedTile<", source) for source in products)
    narrow = mo.compile(mo.Experts(4, 252, 512, dtype="bf16"), target="sm_90a").layer(top_k, weights_dtype="bf16")
    assert "MmaTile<Element" in narrow.kernels["experts_gate_up_proj"].source  # these rows are


@pytest.mark.gpu
def test_tiles_of_hopper_give_the_same_bits() -> None:
    """Tiles together or in turn, narrow or wide, operands swapped: every sum is in one order."""
    skip_without_wgmma()
    experts = mo.Experts(3, 256, 320)
    given, cotangent = tensors_for(experts, 700, 2, torch.bfloat16), cotangent_for(700, 256, torch.bfloat16)
    pingpong, *others = (
        run(mo.compile(experts, backend="cuda", passes=f"specialize{{tile={tile}}}"), given, cotangent, "cuda")
        for tile in ("pingpong", "cooperative", "swapped")
    )
    for other in others:
        for name, found in other.items():
            assert torch.equal(found, pingpong[name]), name


@pytest.mark.nvrtc
def test_products_of_hopper_stay_in_registers_and_in_flight() -> None:
    """The compiler says in its log (C75..) where it gives registers up, or waits for each product before the next."""
    layer = mo.compile(mo.Experts(128, 2048, 768, dtype="bf16"), target="sm_90a").layer(8, weights_dtype="bf16")
    products = [k for k in layer.kernels.values() if re.search("WgmmaTile<|SwappedTile<", k.source)]
    assert len(products) == 6
    assert ["SwappedTile<" in k.source for k in products] == [k.symbol.endswith("_d_gate_up_proj") for k in products]
    for kernel in products:
        compiled = compiled_kernel(kernel, Target.parse("sm_90a"))
        assert not compiled.resources.uses_local_memory, kernel.symbol
        assert "(C75" not in compiled.log, compiled.log
        waits(kernel, compiled)
        assert "griddepcontrol.launch_dependents" in compiled.ptx
        # In what runs, too: the assembler could move loads, which the compiler may take for loads of constants.
        first = re.search(r"\b(LDG|STG|RED|ATOM|LDGSTS|UTMA\w+|CCTL\.IVALL|ACQBULK)\b", disassemble(compiled.cubin))
        early = "beside_kernels_before" in kernel.source
        assert first is not None and first.group() == ("CCTL.IVALL" if early else "ACQBULK")


@pytest.mark.nvrtc
def test_sums_of_the_callers_stay_in_registers_and_in_flight() -> None:
    """They leave by each thread, which reads what it adds to: sums are cleared, a short stage has all its products."""
    layer = mo.compile(
        mo.Experts(128, 2048, 768, dtype="bf16"), target="sm_90a", passes="differentiate{into=gate_up_proj,down_proj}"
    ).layer(8, weights_dtype="bf16")
    products = [k for k in layer.kernels.values() if "before[v] + " in k.source]
    assert len(products) == 2
    for kernel in products:
        compiled = compiled_kernel(kernel, Target.parse("sm_90a"))
        assert not compiled.resources.uses_local_memory and "(C75" not in compiled.log, compiled.log


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("experts", "symbols"),
    [
        (480, ("down_proj", "backward_gate_up_proj")),
        (970, ("backward_d_down_proj", "backward_d_gate_up_proj")),
        (9000, ("down_proj", "backward_down_proj")),
        (8192, ("backward_d_down_proj", "backward_d_gate_up_proj")),
        (16384, ("backward_d_down_proj", "backward_d_gate_up_proj")),
        (20000, ("down_proj", "backward_down_proj", "backward_d_down_proj", "backward_d_gate_up_proj")),
    ],
)
def test_tables_of_many_experts_leave_room(experts: int, symbols: tuple[str, ...]) -> None:
    """What a block has of shared memory beside what the launch gives it counts, too: tables, and where it is told what
    is next. With more experts than fit beside any tile by wgmma, products take others."""
    target = Target.parse("sm_90a")
    layer = mo.compile(mo.Experts(experts, 256, 256, dtype="bf16"), target="sm_90a").layer(8, weights_dtype="bf16")
    for symbol in symbols:
        kernel = layer.kernels[f"experts_{symbol}"]
        own = compiled_kernel(kernel, target).resources.static_shared_bytes
        assert kernel.shared_bytes + own <= target.shared_optin
        most = 16384 if "_d_" in symbol else 4096
        assert ("MmaTile<" in kernel.source.replace("WgmmaTile", "")) == (experts > most)
        assert ("SwappedTile<" in kernel.source) == (symbol == "backward_d_gate_up_proj" and experts <= 8192)
    if experts == 9000:
        asked = mo.compile(
            mo.Experts(experts, 256, 256, dtype="bf16"), target="sm_90a", passes="specialize{tile=cooperative}"
        ).layer(8)
        with pytest.raises(UnsupportedError, match=r"of 9000 experts begin need .* leave tile to the rule"):
            _ = asked.source


# Of a short first stage: from where on, what is replaced in a header, the tile's or that of stages, and by what.
OF_TILE, OF_STAGES = "if (short_steps > 0)", "void multiply_short("
SHORT_STAGES = {
    "none": (OF_TILE, "", ""),
    "full": (OF_TILE, "mbarrier_wait(full(stage_), parity_);", ""),
    "released": (OF_TILE, "release(stage_);", ""),
    "passed": (OF_TILE, "advance();", ""),
    "products": (OF_STAGES, "16 * (kMost - 1)", "16 * kMost"),
    "begins": (OF_STAGES, "/*begins=*/true", "/*begins=*/false"),
    "waited": (OF_STAGES, "wgmma_wait<0>(pending);", ""),
}


@pytest.mark.emulate
@pytest.mark.parametrize("mistake", SHORT_STAGES)
@pytest.mark.parametrize("tile", ["wgmma", "swapped"])  # of down's matrices, and of up's
def test_mistakes_in_a_short_stage_show(
    mistake: str, tile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every expert has one stage of few steps, or one before a whole one; there are more of them than stages."""
    experts = mo.Experts(24, 136, 136, name=f"experts_{mistake}_{tile}")  # a program of its own
    rows = torch.tensor([3, 20, 40, 70] * 6)
    ids = torch.repeat_interleave(torch.arange(24, dtype=torch.int32), rows).reshape(-1, 2)
    given = tensors_for(experts, len(ids), 2, torch.bfloat16, ids=ids)
    cotangent = cotangent_for(len(ids), 136, torch.bfloat16)
    include = tmp_path / "include"
    shutil.copytree(nvrtc.helper_include_dirs()[0], include)
    place, old, new = SHORT_STAGES[mistake]
    header = include / "moesaic" / ("wgmma_stages.cuh" if place == OF_STAGES else f"tile_{tile}.cuh")
    text = header.read_text()
    at = text.index(place)
    assert old in text[at:]
    header.write_text(text[:at] + text[at:].replace(old, new, 1))
    monkeypatch.setattr(nvrtc, "helper_include_dirs", lambda: [include])
    monkeypatch.setattr(RUNNERS["emulate"], "order", 1)  # in which a stage is fetched again in time
    layer = mo.compile(experts, backend="emulate", passes="specialize{tile=swapped}")
    with nullcontext() if mistake == "none" else pytest.raises((AssertionError, EmulationError)):
        check(run(layer, given, cotangent, "cpu"), exact(experts, given, cotangent), torch.bfloat16)


@pytest.mark.nvrtc
def test_results_of_eight_bytes_leave_from_registers() -> None:
    """Gates and ups in turn leave four activated columns with a thread."""
    experts = mo.Experts(4, 256, 256, bias=True, transposed=True, interleaved=True, gating=mo.ClampedSwiGLU(7.0))
    layer = mo.compile(experts, target="sm_90a").layer(4, dtype="bf16", weights_dtype="bf16")
    compiled = compiled_kernel(layer.kernels["experts_gate_up_proj"], Target.parse("sm_90a"))
    assert not compiled.resources.uses_local_memory and "st.global.v2.b32" in compiled.ptx


@pytest.mark.gpu  # which it needs not, but the compiler takes its time
def test_swapped_products_stay_in_registers_and_in_flight() -> None:
    """Whichever width a tile's rows choose: each has a loop of eight products."""
    layer = mo.compile(
        mo.Experts(128, 2048, 768, dtype="bf16"), target="sm_90a", passes="specialize{tile=swapped}"
    ).layer(8, weights_dtype="bf16")
    up, *_ = (k for k in layer.kernels.values() if "SwappedTile" in k.source)
    compiled = compiled_kernel(up, Target.parse("sm_90a"))
    assert not compiled.resources.uses_local_memory
    assert "(C75" not in compiled.log, compiled.log
    sass = disassemble(compiled.cubin)
    widths = (32, 64, 96, 120, 128, 136, 144)
    assert [len(re.findall(rf"HGMMA\.64x{width}x16", sass)) for width in widths] == [8] * len(widths)
    assert "STSM" in sass


def test_tiles_of_hopper_need_hopper() -> None:
    layer = mo.compile(
        mo.Experts(2, 128, 64, dtype="bf16"), target="sm_80", passes="specialize{tile=cooperative}"
    ).layer(2)
    with pytest.raises(UnsupportedError, match="tiles by wgmma need sm_90a, found sm_80"):
        _ = layer.source


@pytest.mark.parametrize("backend", COMPILED)
def test_tf32_only_where_it_is_allowed(backend: str) -> None:
    """Operands have 10 bits of mantissa then: errors of 2^-11 each, and not the 2^-24 of float32."""
    experts = KINDS["wide"]
    given, cotangent = tensors_for(experts, 13, TOP_K, torch.float32), cotangent_for(13, 40, torch.float32)
    wanted = exact(experts, given, cotangent)
    allowed = run(mo.compile(experts, backend=backend, allow_tf32=True), given, cotangent, device_of(backend))
    for name, right in wanted.items():
        error = (allowed[name].double() - right).abs().max() / right.abs().max()
        assert 1e-5 < error < 2.0**-8, f"{name}: {error:.3g}"


@pytest.mark.parametrize("backend", ["reference", *COMPILED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients_add_up_in_main_grads(dtype: torch.dtype, backend: str) -> None:
    """Two micro-batches, in bf16 as well: what is added is not rounded before, and autograd is given nothing."""
    experts = KINDS["bias"]
    device = device_of(backend)
    layer = mo.compile(experts, backend=backend)
    matrices = ("gate_up_proj", "down_proj", "gate_up_proj_bias")
    given = tensors_for(experts, 13, TOP_K, dtype)
    generator = torch.Generator().manual_seed(4)
    start = {n: torch.randn(given[n].shape, generator=generator) for n in matrices}
    mains = {n: t.clone().to(device) for n, t in start.items()}
    sums: Tensors = {}
    for seed in (1, 2):
        batch = tensors_for(experts, 13, TOP_K, dtype, seed=seed)
        batch = {n: t if n in ("x", "indices", "weights") else given[n] for n, t in batch.items()}
        cotangent = cotangent_for(13, 24, dtype)
        inputs = {n: t.detach().to(device).requires_grad_(t.is_floating_point()) for n, t in batch.items()}
        layer(**inputs, main_grads=mains).backward(cotangent.to(device))
        wanted = exact(experts, batch, cotangent)
        for name, tensor in inputs.items():
            assert (tensor.grad is None) == (name in mains or not tensor.is_floating_point()), name
        assert inputs["x"].grad is not None and inputs["down_proj_bias"].grad is not None
        check(
            {"d_x": inputs["x"].grad.cpu(), "d_down_proj_bias": inputs["down_proj_bias"].grad.cpu()},
            {n: wanted[n] for n in ("d_x", "d_down_proj_bias")},
            dtype,
        )
        sums = {n: sums.get(n, 0.0) + wanted[f"d_{n}"] for n in matrices}
    check({n: mains[n].cpu() - start[n] for n in matrices}, sums, dtype)


@pytest.mark.parametrize("backend", ["reference", *COMPILED])
def test_what_is_not_asked_for_adds_nothing_to_main_grads(backend: str) -> None:
    """The gradient of x alone first, as schedules that split backward have it; then that of the matrices."""
    experts, device = KINDS["bias"], device_of(backend)
    given = tensors_for(experts, 13, TOP_K, torch.float32)
    inputs = {n: t.to(device).requires_grad_(t.is_floating_point()) for n, t in given.items()}
    cotangent = cotangent_for(13, 24, torch.float32)
    wanted = exact(experts, given, cotangent)
    mains = {n: torch.zeros_like(inputs[n]) for n in ("gate_up_proj", "down_proj")}
    y = mo.compile(experts, backend=backend)(**inputs, main_grads=mains)
    cotangent = cotangent.to(device)
    [d_x] = torch.autograd.grad(y, inputs["x"], cotangent, retain_graph=True)
    assert not any(main.any() for main in mains.values())
    torch.autograd.grad(y, [inputs[n] for n in mains], cotangent, retain_graph=True, allow_unused=True)
    found = {"d_x": d_x.cpu(), **{f"d_{n}": main.cpu() for n, main in mains.items()}}
    check(found, {n: wanted[n] for n in found}, torch.float32)
    once = {n: main.clone() for n, main in mains.items()}
    torch.autograd.grad(y, inputs["gate_up_proj"], cotangent, allow_unused=True)
    assert torch.equal(mains["down_proj"], once["down_proj"])
    assert not torch.equal(mains["gate_up_proj"], once["gate_up_proj"])


@pytest.mark.parametrize("backend", ["reference", *COMPILED])
def test_a_frozen_matrix_adds_nothing_to_its_main_grad(backend: str) -> None:
    experts, device = KINDS["bias"], device_of(backend)
    inputs = {n: t.to(device) for n, t in tensors_for(experts, 13, TOP_K, torch.float32).items()}
    inputs["x"].requires_grad_()
    inputs["gate_up_proj"].requires_grad_()
    mains = {n: torch.zeros_like(inputs[n]) for n in ("gate_up_proj", "down_proj")}
    mo.compile(experts, backend=backend)(**inputs, main_grads=mains).square().sum().backward()
    assert mains["gate_up_proj"].any() and not mains["down_proj"].any()
    assert inputs["gate_up_proj"].grad is None and inputs["x"].grad is not None


FROZEN = [
    ("down_proj", "down_proj_bias"),
    ("gate_up_proj", "gate_up_proj_bias"),
    ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"),
    ("gate_up_proj_bias",),
    ("down_proj",),  # with a bias that trains, and has its gradient beside this one's
]


@pytest.mark.parametrize("frozen", FROZEN, ids="+".join)
@pytest.mark.parametrize("kept", [None, "h"])
def test_nothing_is_launched_for_a_frozen_matrix(kept: str | None, frozen: tuple[str, ...]) -> None:
    """Of the products that make gradients of matrices, and of biases beside them, those that are asked for are left."""
    module = KINDS["bias"].module(DType.F32, TOP_K)
    passes = "" if kept is None else f"save-products{{recompute={kept}}}"
    whole = program_of(module, passes)
    part = program_by_key(with_gradients(whole.key, passes, (), frozen))
    products = {}
    for name, program in (("whole", whole), ("part", part)):
        function = program.backward_function(program.float_results)
        assert function is not None
        text = program.lower("training").stages["fuse-experts"].split("moe.func")[-1]
        products[name] = {op: text.count(f"= kernel.{op}") for op in ("wgrad", "product")}
        wanted = {f"d_{a.name}" for a in program.function.arguments if a.type.dtype.is_float}
        left_out = {f"d_{n}" for n in frozen if name == "part" and (n.endswith("_bias") or f"{n}_bias" in frozen)}
        assert {*function.result_names} == wanted - left_out
    assert products["whole"]["wgrad"] == 2
    assert products["part"]["wgrad"] == 2 - sum(f"{name}_bias" in frozen for name in frozen)
    assert products["part"]["product"] == products["whole"]["product"]


@pytest.mark.parametrize("backend", COMPILED)
def test_gradients_only_where_asked(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are those of a call that asks for all, and what is not asked for is not made: by plain calls, by the
    operator under torch.compile, and beside sums of the caller's."""
    experts, device = KINDS["swiglu"], device_of(backend)
    inputs = {n: t.to(device) for n, t in tensors_for(experts, 13, TOP_K, torch.float32).items()}
    sent = cotangent_for(13, experts.hidden, torch.float32).to(device)
    layer = mo.compile(experts, backend=backend)
    made: list[tuple[str, ...]] = []
    if backend != "reference":
        runner = RUNNERS[backend]
        launch = runner.run

        def watching(program: Any, kind: str, cotangents: tuple[str, ...], tensors: Any) -> Any:
            if kind == "backward":
                made.append(tuple(program.backward_function(cotangents).result_names))
            return launch(program, kind, cotangents, tensors)

        monkeypatch.setattr(runner, "run", watching)

    def gradients(call: Callable[..., Any], *asked: str, **options: Any) -> dict[str, torch.Tensor]:
        given = {n: t.detach().requires_grad_(n in asked) for n, t in inputs.items()}
        call(**given, **options).backward(sent)
        return {n: t.grad for n, t in given.items() if t.grad is not None}

    wanted = gradients(layer, "x", "weights", "gate_up_proj", "down_proj")
    assert len(wanted) == 4
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for call in (layer, compiled):
        found = gradients(call, "x", "down_proj")
        assert found.keys() == {"x", "down_proj"}
        assert all(torch.allclose(found[n], wanted[n], rtol=1e-5, atol=1e-5) for n in found)
    main = torch.ones_like(wanted["down_proj"])
    assert gradients(layer, "x", "down_proj", main_grads={"down_proj": main}).keys() == {"x"}
    torch.testing.assert_close(main - 1, wanted["down_proj"], rtol=1e-4, atol=1e-5)
    if backend != "reference":
        every = ("d_x", "d_weights", "d_gate_up_proj", "d_down_proj")
        few = ("d_x", "d_weights", "d_down_proj")
        assert made == [every, few, few, ("d_x", "d_weights", "main_down_proj")]


def test_main_grads_that_do_not_fit_are_refused() -> None:
    experts = KINDS["swiglu"]
    given = tensors_for(experts, 4, TOP_K, torch.float32)
    layer = mo.compile(experts, backend="reference")
    main = torch.zeros(5, 24, 16)
    for wrong, message in (
        ({"down_prj": main}, r"'down_prj' is no matrix of this layer; did you mean 'down_proj'"),
        ({"x": main}, r"'x' is no matrix"),
        ({"down_proj": main.bfloat16()}, r"must be float32 \[5, 24, 16\] on cpu, found bfloat16"),
        ({"down_proj": main[:, :, 1:]}, r"found float32 \[5, 24, 15\]"),
        ({"down_proj": main.transpose(1, 2).contiguous().transpose(1, 2)}, r"must be contiguous"),
    ):
        with pytest.raises(InputError, match=message):
            layer(**given, main_grads=wrong)
    with pytest.raises(InputTypeError, match="main_grads must map names of matrices to tensors, found list"):
        layer(**given, main_grads=[main])


@pytest.mark.emulate
def test_main_grads_go_with_a_plain_backward() -> None:
    experts = KINDS["swiglu"]
    given = tensors_for(experts, 4, TOP_K, torch.float32)
    inputs = {n: t.requires_grad_(t.is_floating_point()) for n, t in given.items()}
    result = mo.compile(experts, backend="emulate")(**inputs, main_grads={"down_proj": torch.zeros(5, 24, 16)})
    with pytest.raises(UnsupportedError, match="main_grads are written in place"):
        torch.autograd.grad(result.sum(), inputs["x"], create_graph=True)


@pytest.mark.emulate
def test_inference_saves_nothing() -> None:
    experts = KINDS["swiglu"]
    given = tensors_for(experts, 13, TOP_K, torch.float32)
    layer = mo.compile(experts, backend="emulate")
    with torch.no_grad():
        alone = layer(**given)
    assert not alone.requires_grad
    assert torch.equal(alone, run(layer, given, cotangent_for(13, 24, torch.float32), "cpu")["hidden"])


def test_unknown_inputs_are_named() -> None:
    layer = mo.compile(KINDS["swiglu"], backend="reference")
    given = tensors_for(KINDS["swiglu"], 4, 2, torch.float32)
    with pytest.raises(InputTypeError, match=r"down_prj.*did you mean 'down_proj'"):
        layer(given["x"], given["indices"], given["weights"], given["gate_up_proj"], down_prj=given["down_proj"])
    with pytest.raises(InputTypeError, match=r"down_proj.*missing"):
        layer(given["x"], given["indices"], given["weights"], given["gate_up_proj"])
    with pytest.raises(InputError, match="indices must be int16, int32 or int64, found float32"):
        layer(given["x"], given["weights"], given["weights"], given["gate_up_proj"], given["down_proj"])
    with pytest.raises(InputError, match=r"gate_up_proj must have shape \[5, 32, 24\], found \[5, 24, 32\]"):
        layer(given["x"], given["indices"], given["weights"], given["gate_up_proj"].transpose(1, 2), given["down_proj"])
    with pytest.raises(InputError, match="gate_up_proj must be fp32, found bf16"):
        layer(given["x"], given["indices"], given["weights"], given["gate_up_proj"].bfloat16(), given["down_proj"])
    with pytest.raises(InputError, match="declared for bf16, found x in float32"):
        mo.compile(replace(KINDS["swiglu"], dtype="bf16"))(**given)


def test_leading_dimensions_are_kept() -> None:
    given = tensors_for(KINDS["swiglu"], 6, 2, torch.float32)
    layer = mo.compile(KINDS["swiglu"], backend="reference")
    flat = layer(**given)
    batched = {n: t.reshape(2, 3, -1) if n in ("x", "indices", "weights") else t for n, t in given.items()}
    assert torch.equal(layer(**batched), flat.reshape(2, 3, -1))


def test_copies_and_pickles() -> None:
    given = tensors_for(KINDS["gpt_oss"], 5, 2, torch.float32)
    layer = mo.compile(KINDS["gpt_oss"], backend="reference")
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(**given), layer(**given))
    with pytest.raises(InputError, match=r"its gating .* is a lambda"):
        pickle.dumps(mo.compile(replace(KINDS["swiglu"], gating=lambda g, u: g * u)))


@pytest.mark.parametrize("backend", COMPILED)
def test_weights_that_change_in_place_are_seen(backend: str) -> None:
    """Case 39."""
    one = torch.ones(1, 1, 1, device=device_of(backend))
    up = torch.ones(1, 1, 1, device=device_of(backend))
    layer = mo.compile(mo.Experts(1, 1, 1, gated=False, activation="identity"), backend=backend)
    x, i, w = (torch.ones(1, 1, device=one.device), torch.zeros(1, 1, dtype=torch.int32, device=one.device), one[0])
    seen = [layer(x, i, w, up, one).item()]
    up.add_(1)
    seen.append(layer(x, i, w, up, one).item())
    up.copy_(torch.full_like(up, 5))
    seen.append(layer(x, i, w, up, one).item())
    up.data = torch.full_like(up, 7)
    seen.append(layer(x, i, w, up, one).item())
    assert seen == [1, 2, 5, 7]


@pytest.mark.parametrize("backend", ["reference", *COMPILED])
def test_one_graph_for_any_number_of_tokens(backend: str) -> None:
    experts = KINDS["swiglu"]
    layer = mo.compile(experts, backend=backend)
    device = device_of(backend)
    torch._dynamo.reset()
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    aot_eager = torch._dynamo.lookup_backend("aot_eager")
    compiled = torch.compile(layer, backend=counting, fullgraph=True, dynamic=True)
    for tokens in (13, 29, 7):
        given, cotangent = tensors_for(experts, tokens, TOP_K, torch.float32), cotangent_for(tokens, 24, torch.float32)
        check(run(compiled, given, cotangent, device), exact(experts, given, cotangent), torch.float32)
    assert len(graphs) == 1


@pytest.mark.gpu
def test_captured_in_a_graph_after_warmup() -> None:
    experts = mo.Experts(8, 64, 32, dtype="bf16", name="captured_experts")
    layer = mo.compile(experts)
    given = {n: t.cuda() for n, t in tensors_for(experts, 50, 4, torch.bfloat16).items()}
    layer.warmup(top_k=4)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = layer(**given)
    for seed in (1, 2):
        new = tensors_for(experts, 50, 4, torch.bfloat16, seed=seed)
        for name, tensor in new.items():
            given[name].copy_(tensor)
        graph.replay()
        with torch.no_grad():
            assert torch.equal(captured, layer(**given))


@pytest.mark.gpu
def test_no_synchronisation() -> None:
    experts = mo.Experts(8, 64, 32, dtype="bf16")
    layer = mo.compile(experts)
    given = {n: t.cuda() for n, t in tensors_for(experts, 50, 4, torch.bfloat16).items()}
    leaves = {n: t.requires_grad_(t.is_floating_point()) for n, t in given.items()}
    layer(**leaves).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(**leaves).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")

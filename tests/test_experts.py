"""Experts from declaration to kernels: values and gradients against float64, on the emulator and on a GPU.

Sizes are odd and prime where that matters. Ids lie outside [0, E), repeat within a token, leave experts without tokens.
Cotangents are random. Memory that a kernel is handed is poisoned on the emulator: what it reads too much, or leaves
unwritten, is NaN.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from routing import COMPILED, device_of

import moesaic as mo
from moesaic.ir.errors import InputError, InputTypeError, UnsupportedError
from moesaic.runtime.experts import CompiledExperts

Tensors = dict[str, torch.Tensor]

# Tolerances -----------------------------------------------------------------------------------------------------------

PRODUCT = 2.0**-20
"""Of the largest value, for float32: sums of a few hundred products, and an activation between two of them."""

ROUNDED = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
"""Of the largest value: operands are rounded between products (2^-9 and 2^-12 each), and errors of a sum of n add up
like the root of n where the values do."""

# ----------------------------------------------------------------------------------------------------------------------


def relu2(x: Any) -> Any:
    return mo.math.relu(x) * mo.math.relu(x)


def clamped_after(gate: Any, up: Any) -> Any:
    return mo.math.minimum(mo.math.silu(gate), 0.5) * mo.math.maximum(mo.math.minimum(up, 0.4), -0.4)


GPT_OSS = mo.ClampedSwiGLU(limit=0.6, alpha=1.702, offset=1.0)
# Of one size, and with as many picks in most tests, they share the kernels of dispatch and combine, which the emulator
# builds once.
SIZES = (5, 24, 16)
TOP_K = 3
KINDS: dict[str, mo.Experts] = {
    "swiglu": mo.Experts(*SIZES),
    "odd": mo.Experts(7, 33, 17),
    "narrow": mo.Experts(3, 1, 1),
    "wide": mo.Experts(2, 40, 150),
    "geglu": mo.Experts(*SIZES, activation="gelu_tanh"),
    "bias": mo.Experts(*SIZES, bias=True),
    "gpt_oss": mo.Experts(*SIZES, bias=True, transposed=True, interleaved=True, gating=GPT_OSS),
    "interleaved": mo.Experts(5, 21, 11, interleaved=True),
    "transposed": mo.Experts(*SIZES, transposed=True),
    "clamped_after": mo.Experts(*SIZES, gating=clamped_after),
    "relu2": mo.Experts(*SIZES, gated=False, activation=relu2, bias=True),
    "input": mo.Experts(*SIZES, weight_on="input", transposed=True, bias=True),
    "middle": mo.Experts(*SIZES, weight_on="middle"),
    "aligned": mo.Experts(*SIZES, align=16),
    "capacity": mo.Experts(*SIZES, capacity=0.7, outputs=("hidden", "counts", "dropped")),
    "padded": mo.Experts(*SIZES, capacity=1.2, pad=True, align=16),
    "separate": mo.Experts(*SIZES, separate=True, transposed="down", bias=True),
    "one": mo.Experts(1, 24, 16),
}


def tensors_for(
    experts: mo.Experts, tokens: int, top_k: int, dtype: torch.dtype, *, seed: int = 0, ids: torch.Tensor | None = None
) -> Tensors:
    """Inputs whose products have values near 1; ids from -1 to E + 1, with repeats."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=g, dtype=torch.float64)).to(dtype)

    e, h, i = experts.num_experts, experts.hidden, experts.intermediate
    wide = 2 * i if experts.gated and not experts.separate else i
    up, down = (e, wide, h), (e, h, i)
    if experts.transposed in (True, "up"):
        up = (e, h, wide)
    if experts.transposed in (True, "down"):
        down = (e, i, h)
    made = {
        "x": normal(tokens, h),
        "indices": torch.randint(-1, e + 2, (tokens, top_k), generator=g, dtype=torch.int32) if ids is None else ids,
        "weights": torch.rand((tokens, top_k), generator=g, dtype=torch.float64).float(),
        **{name: normal(*up, scale=h**-0.5) for name in experts.up_names},
        "down_proj": normal(*down, scale=i**-0.5),
    }
    if experts.bias:
        for name in experts.up_names:
            made[f"{name}_bias"] = normal(e, wide, scale=0.3)
        made["down_proj_bias"] = normal(e, h, scale=0.3)
    return made


def run(layer: CompiledExperts, given: Tensors, cotangent: torch.Tensor | None, device: str) -> Tensors:
    """The result, and the gradient of every float input."""
    inputs = {n: t.detach().to(device).requires_grad_(t.is_floating_point()) for n, t in given.items()}
    result = layer(**inputs)
    hidden = result if isinstance(result, torch.Tensor) else result.hidden
    made = {"hidden": hidden.detach().cpu()}
    if not isinstance(result, torch.Tensor):
        made |= {n: getattr(result, n).cpu() for n in result._fields if n != "hidden"}
    if cotangent is not None:
        hidden.backward(cotangent.to(device, hidden.dtype))
        for name, tensor in inputs.items():
            if tensor.is_floating_point():
                assert tensor.grad is not None, f"no gradient of {name}"
                made[f"d_{name}"] = tensor.grad.cpu()
    return made


def exact(experts: mo.Experts, given: Tensors, cotangent: torch.Tensor) -> Tensors:
    """The same by the reference, in float64."""
    layer = mo.compile(replace(experts, dtype=None), backend="reference")
    wide = {n: t.double() if t.is_floating_point() else t for n, t in given.items()}
    return run(layer, wide, cotangent.double(), "cpu")


def check(found: Tensors, wanted: Tensors, dtype: torch.dtype) -> None:
    assert found.keys() == wanted.keys()
    for name, right in wanted.items():
        if not right.is_floating_point():
            assert torch.equal(found[name], right), name
            continue
        allowed = ROUNDED.get(dtype, PRODUCT)
        largest = right.abs().max().item() if right.numel() else 0.0
        error = (found[name].double() - right).abs().max().item() if right.numel() else 0.0
        assert error <= allowed * largest, f"{name}: off by {error:.3g} where the largest is {largest:.3g}"


def cotangent_for(tokens: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("name", KINDS)
def test_values_and_gradients(name: str, backend: str) -> None:
    experts = KINDS[name]
    given = tensors_for(experts, 13, TOP_K, torch.float32)
    cotangent = cotangent_for(13, experts.hidden, torch.float32)
    found = run(mo.compile(experts, backend=backend), given, cotangent, device_of(backend))
    check(found, exact(experts, given, cotangent), torch.float32)


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.bfloat16) for name in ("swiglu", "odd", "gpt_oss", "input", "wide")),
        ("odd", torch.float16),
        ("swiglu", torch.float16),
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


def ids(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


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


@pytest.mark.parametrize("backend", COMPILED)
def test_ranks_with_sentinels_add_up(backend: str) -> None:
    """Experts split over two ranks, ids of the other rank not here: the parts add up to the whole."""
    half = KINDS["swiglu"]
    experts = replace(half, num_experts=10)
    given = tensors_for(experts, 12, TOP_K, torch.float32)
    cotangent = cotangent_for(12, 24, torch.float32)
    device = device_of(backend)
    whole = run(mo.compile(experts, backend=backend), given, cotangent, device)
    of_rank = mo.compile(half, backend=backend)
    parts = []
    for rank, sentinel in ((0, 5), (1, -1)):
        mine = (given["indices"] >= 5 * rank) & (given["indices"] < 5 * rank + 5)
        local = {**given, "indices": torch.where(mine, given["indices"] - 5 * rank, sentinel).int()}
        for matrix in ("gate_up_proj", "down_proj"):
            local[matrix] = given[matrix][5 * rank : 5 * rank + 5]
        parts.append(run(of_rank, local, cotangent, device))
    for name in ("hidden", "d_x", "d_weights"):
        torch.testing.assert_close(parts[0][name] + parts[1][name], whole[name], rtol=1e-5, atol=1e-6)
    for name in ("d_gate_up_proj", "d_down_proj"):
        assert torch.equal(torch.cat([p[name] for p in parts]), whole[name]), name


@pytest.mark.parametrize("backend", COMPILED)
def test_permuting_tokens_and_relabelling_experts(backend: str) -> None:
    experts = KINDS["odd"]
    given = tensors_for(experts, 14, TOP_K, torch.float32)
    layer = mo.compile(experts, backend=backend)
    device = device_of(backend)
    before = run(layer, given, None, device)["hidden"]
    order = torch.randperm(14, generator=torch.Generator().manual_seed(1))
    permuted = {**given, **{n: given[n][order] for n in ("x", "indices", "weights")}}
    assert torch.equal(run(layer, permuted, None, device)["hidden"], before[order])
    label = torch.randperm(7, generator=torch.Generator().manual_seed(2))
    here = (given["indices"] >= 0) & (given["indices"] < 7)
    renamed = torch.where(here, label[given["indices"].clamp(0, 6).long()].int(), given["indices"])
    moved = {**given, "indices": renamed}
    for matrix in ("gate_up_proj", "down_proj"):
        moved[matrix] = torch.empty_like(given[matrix])
        moved[matrix][label] = given[matrix]
    assert torch.equal(run(layer, moved, None, device)["hidden"], before)


@pytest.mark.parametrize("backend", COMPILED)
def test_equal_calls_give_equal_bits(backend: str) -> None:
    """Case 33."""
    experts = KINDS["swiglu"]
    given = tensors_for(experts, 13, TOP_K, torch.bfloat16)
    cotangent = cotangent_for(13, 24, torch.bfloat16)
    layer = mo.compile(experts, backend=backend)
    first = run(layer, given, cotangent, device_of(backend))
    for _ in range(200 if backend == "cuda" else 3):
        again = run(layer, given, cotangent, device_of(backend))
        assert all(torch.equal(again[n], first[n]) for n in first)


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
    with pytest.raises(InputError, match=r"recompute.*'h'.*found 'x'|'x'.*recompute"):
        mo.compile(experts, recompute="x")


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


def test_autocast_decides_the_type() -> None:
    """Case 53."""
    given = tensors_for(KINDS["swiglu"], 6, 2, torch.float32)
    layer = mo.compile(KINDS["swiglu"], backend="reference")
    with torch.autocast("cpu", torch.bfloat16):
        mixed = layer(**{**given, "gate_up_proj": given["gate_up_proj"].bfloat16()})
    assert mixed.dtype == torch.bfloat16
    torch.testing.assert_close(mixed.float(), layer(**given), rtol=0.05, atol=0.05)


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

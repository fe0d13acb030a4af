"""`Experts`: what it refuses, how it prints, and what it computes, against one loop over picks in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from expert_calls import EXPERT_BACKENDS, declared, gradients_by_rule, learned, random_inputs, run_experts
from routing import DOUBLE_GRADIENT, ROUNDING, assert_close, assert_zero, cotangent
from torch.nn import functional

import moesaic as mo
from moesaic.ir.core import Value
from moesaic.ir.diagnostics import DiagnosticError
from moesaic.ir.errors import InputError
from moesaic.ir.experts import ACTIVATIONS, ClampedSwiGLU, Experts
from moesaic.ir.parser import parse
from moesaic.ir.types import DType
from moesaic.ir.verifier import verify_module

F64 = torch.float64
TOKENS, TOP_K, SIZES = 7, 3, (5, 11, 6)

# One loop over picks --------------------------------------------------------------------------------------------------

PLAIN: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x) ** 2,
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}

Plain = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Options of a declaration; `plain` stands for a function among them."""

    options: Mapping[str, Any] = field(default_factory=dict)
    plain: Plain | None = None

    @property
    def experts(self) -> Experts:
        return Experts(*SIZES, **self.options)


def by_pick(case: Case, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, list[int], int]:
    """(hidden, counts, dropped): each pick is computed alone, in the order of tokens."""
    e = case.experts
    ups, down = [inputs[name] for name in e.up_names], inputs["down_proj"]
    if e.transposed in (True, "up"):
        ups = [up.transpose(1, 2) for up in ups]
    if e.transposed in (True, "down"):
        down = down.transpose(1, 2)
    x, ids, weights = inputs["x"], inputs["indices"].tolist(), inputs["weights"]
    counts, dropped = [0] * e.num_experts, 0
    bound = len(ids) * TOP_K
    if e.capacity is not None:
        bound = min(len(ids), math.ceil(e.capacity * (len(ids) * TOP_K) / e.num_experts))
    rows = []
    for token, picks in enumerate(ids):
        row = torch.zeros(e.hidden, dtype=x.dtype)
        for k, expert in enumerate(picks):
            if not 0 <= expert < e.num_experts:
                continue
            if counts[expert] == bound:
                dropped += 1
                continue
            counts[expert] += 1
            weight = weights[token, k]
            first = [up[expert] @ (x[token] * weight if e.weight_on == "input" else x[token]) for up in ups]
            if e.bias:
                first = [h + inputs[f"{name}_bias"][expert] for h, name in zip(first, e.up_names)]
            middle = activated(case, first)
            if e.weight_on == "middle":
                middle = middle * weight
            y = down[expert] @ middle
            if e.bias:
                y = y + inputs["down_proj_bias"][expert]
            row = row + (y * weight if e.weight_on == "output" else y)
        rows.append(row)
    return torch.stack(rows) if rows else x * 0, counts, dropped


def activated(case: Case, first: list[torch.Tensor]) -> torch.Tensor:
    e = case.experts
    if e.gated:
        if e.separate:
            gate, up = first
        elif e.interleaved:
            gate, up = first[0].unflatten(0, (e.intermediate, 2)).unbind(1)
        else:
            gate, up = first[0].chunk(2)
        if e.gating is not None:
            assert case.plain is not None
            return case.plain(gate, up)
    else:
        [gate], up = first, torch.ones(())
    activation = PLAIN.get(e.activation) if isinstance(e.activation, str) else case.plain
    assert activation is not None
    return activation(gate) * up


def clamped(limit: float, alpha: float = 1.0, offset: float = 0.0) -> Plain:
    def gating(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = torch.clamp(gate, max=limit), torch.clamp(up, -limit, limit)
        return (up + offset) * gate * torch.sigmoid(alpha * gate)

    return gating


def clamped_after(gate: Value, up: Value) -> Value:
    """A gating that nobody declared for us."""
    return mo.math.minimum(mo.math.silu(gate), 0.5) * mo.math.clamp(up, min=-0.5, max=0.5)


GPT_OSS = {"bias": True, "interleaved": True, "transposed": True, "gating": ClampedSwiGLU(1.5, 1.702, 1.0)}


def test_each_name_has_an_oracle() -> None:
    missing = set(ACTIVATIONS) - set(PLAIN)
    assert not missing, f"say in PLAIN of this file what torch computes for {', '.join(sorted(missing))}"
    assert all(f"``{name}``" in (Experts.__doc__ or "") for name in ACTIVATIONS), "the docstring names them"


CASES = {
    "plain": Case(),
    **{name: Case({"activation": name}) for name in ACTIVATIONS},
    **{f"{name}, not gated": Case({"activation": name, "gated": False}) for name in ACTIVATIONS},
    "an activation of the user's": Case({"activation": lambda x: mo.math.tanh(x * 2.0)}, lambda x: torch.tanh(x * 2)),
    "a gating of the user's": Case(
        {"gating": clamped_after},
        lambda gate, up: torch.clamp(functional.silu(gate), max=0.5) * torch.clamp(up, -0.5, 0.5),
    ),
    "clamped": Case({"gating": ClampedSwiGLU(0.75)}, clamped(0.75)),
    "as gpt-oss": Case(GPT_OSS, clamped(1.5, 1.702, 1.0)),
    "bias": Case({"bias": True}),
    "bias, not gated": Case({"bias": True, "gated": False, "activation": "relu"}),
    "transposed": Case({"transposed": True}),
    "up transposed": Case({"transposed": "up"}),
    "down transposed": Case({"transposed": "down"}),
    "interleaved": Case({"interleaved": True}),
    "separate": Case({"separate": True}),
    "separate, down transposed": Case({"separate": True, "transposed": "down"}),
    "separate, transposed, bias": Case({"separate": True, "transposed": True, "bias": True, "align": 16}),
    "on the input": Case({"weight_on": "input", "bias": True}),
    "on the input, separate": Case({"weight_on": "input", "separate": True}),
    "in the middle": Case({"weight_on": "middle", "bias": True}),
    "in the middle, not gated": Case({"weight_on": "middle", "gated": False}),
    "aligned": Case({"align": 64, "bias": True}),
    "bounded": Case({"capacity": 0.6, "bias": True}),
    "bounded, on the input": Case({"capacity": 0.6, "weight_on": "input"}),
    "bounded, in the middle, aligned": Case({"capacity": 0.6, "weight_on": "middle", "align": 16}),
    "room for all": Case({"capacity": 7.5}),
    "padded": Case({"capacity": 1.0, "pad": True, "bias": True}),
    "padded, aligned": Case({"capacity": 0.6, "pad": True, "align": 16, "bias": True}),
}

every_case = pytest.mark.parametrize("name", CASES)
every_backend = pytest.mark.parametrize("backend", EXPERT_BACKENDS)


def inputs_of(case: Case, tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    """The first token repeats an expert, nothing of the second is here, and the last expert has nothing."""
    inputs = random_inputs(case.experts, tokens, TOP_K)
    ids = inputs["indices"]
    ids[ids == SIZES[0] - 1] = 0
    ids[:1] = torch.tensor([1, 2, 1])
    ids[1:2] = torch.tensor([-1, SIZES[0], 127])
    return inputs


# What it computes -----------------------------------------------------------------------------------------------------


@every_case
@every_backend
def test_outputs_and_gradients_are_those_of_a_loop_over_picks(name: str, backend: str) -> None:
    """The gradients twice: torch's of what ran, and those of the derived function."""
    case = CASES[name]
    inputs = inputs_of(case)
    hidden = run_experts(case.experts, inputs, backend)["hidden"]
    wanted, counts, dropped = by_pick(case, inputs)
    assert (dropped > 0) == (case.experts.capacity is not None and name != "room for all")
    assert 0 in counts and max(counts) > 1
    assert_close("hidden", hidden, wanted, DOUBLE_GRADIENT)
    assert_zero("the token that is not here", hidden[1])

    sent = cotangent(wanted, seed=9)
    leaves = learned(inputs)
    theirs = torch.autograd.grad(wanted, list(leaves.values()), sent)
    ours = torch.autograd.grad(hidden, list(leaves.values()), sent)
    by_rule = gradients_by_rule(case.experts, inputs, sent)
    assert by_rule.keys() == leaves.keys()
    for leaf, expected, found in zip(leaves, theirs, ours, strict=True):
        assert_close(f"gradient of {leaf}", found, expected, DOUBLE_GRADIENT)
        assert_close(f"gradient of {leaf} by its rule", by_rule[leaf], expected, DOUBLE_GRADIENT)
    for gradients in (dict(zip(leaves, ours, strict=True)), by_rule):
        assert_zero("gradient of the token that is not here", gradients["x"][1])
        assert_zero("gradient of weights that are not here", gradients["weights"][1])
        for leaf in leaves.keys() - {"x", "weights"}:
            assert_zero(f"gradient of {leaf} of an expert without tokens", gradients[leaf][-1])


@every_case
@every_backend
def test_counts_and_dropped(name: str, backend: str) -> None:
    case = CASES[name]
    inputs = inputs_of(case)
    all_outputs = Experts(*SIZES, **case.options, outputs=("dropped", "hidden", "counts"))
    found = run_experts(all_outputs, inputs, backend)
    _, counts, dropped = by_pick(case, inputs)
    assert list(found) == ["dropped", "hidden", "counts"]
    assert found["counts"].tolist() == counts
    assert found["dropped"].tolist() == [dropped]
    assert found["counts"].dtype == found["dropped"].dtype == torch.int32
    alone = run_experts(case.experts, inputs, backend)
    assert list(alone) == ["hidden"]
    assert torch.equal(alone["hidden"], found["hidden"])


@every_case
@every_backend
def test_no_tokens_and_nobody_here(name: str, backend: str) -> None:
    """Every gradient is there, and 0."""
    case = CASES[name]
    nowhere = inputs_of(case)
    nowhere["indices"].fill_(-1)
    for inputs in (inputs_of(case, tokens=0), nowhere):
        hidden = run_experts(case.experts, inputs, backend)["hidden"]
        assert hidden.shape == inputs["x"].shape
        assert_zero("hidden", hidden)
        sent = cotangent(hidden, seed=9)
        leaves = learned(inputs)
        by_rule = gradients_by_rule(case.experts, inputs, sent)
        ours = torch.autograd.grad(hidden, list(leaves.values()), sent)
        for (leaf, values), found in zip(leaves.items(), ours, strict=True):
            assert found.shape == by_rule[leaf].shape == values.shape
            assert_zero(f"gradient of {leaf}", found)
            assert_zero(f"gradient of {leaf} by its rule", by_rule[leaf])


@every_backend
@pytest.mark.parametrize("weight_on", ["output", "input", "middle"])
def test_what_is_not_here_may_be_anything(weight_on: str, backend: str) -> None:
    """Weights of picks that are not here, and of an expert that nobody picked, are NaN: nothing becomes NaN."""
    case = Case({"weight_on": weight_on, "bias": True, "align": 16})
    inputs = inputs_of(case)
    clean = run_experts(case.experts, inputs, backend)["hidden"]
    sent = cotangent(clean, seed=9)
    before = gradients_by_rule(case.experts, inputs, sent)
    with torch.no_grad():
        inputs["weights"][(inputs["indices"] < 0) | (inputs["indices"] >= SIZES[0])] = math.nan
        for leaf in learned(inputs).keys() - {"x", "weights"}:
            inputs[leaf][-1] = math.nan
    assert torch.equal(run_experts(case.experts, inputs, backend)["hidden"], clean)
    after = gradients_by_rule(case.experts, inputs, sent)
    for leaf in before:
        assert torch.equal(after[leaf], before[leaf]), leaf


def test_swapped_halves_change_the_result() -> None:
    """Gates first or last, and in turn or not, are four layouts of one weight."""
    inputs = inputs_of(Case())
    plain = run_experts(Experts(*SIZES), inputs)["hidden"]
    weight = inputs["gate_up_proj"]
    gate, up = weight.chunk(2, 1)
    in_turn = {**inputs, "gate_up_proj": torch.stack([gate, up], 2).flatten(1, 2)}
    interleaved = Experts(*SIZES, interleaved=True)
    separate = {**inputs, "gate_proj": gate, "up_proj": up}
    for experts, given in ((interleaved, in_turn), (Experts(*SIZES, separate=True), separate)):
        assert_close("hidden", run_experts(experts, given)["hidden"], plain, DOUBLE_GRADIENT)
    swapped = {**inputs, "gate_up_proj": torch.cat([up, gate], 1)}
    for experts, given in ((interleaved, inputs), (Experts(*SIZES), swapped)):
        assert (run_experts(experts, given)["hidden"] - plain).abs().max() > 0.1


@pytest.mark.parametrize("indices", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every_backend
def test_types(dtype: torch.dtype, weights: torch.dtype, indices: torch.dtype, backend: str) -> None:
    """x, what lies between, and hidden are in the type of x; a result is off by what each of three roundings may do."""
    experts = Experts(*SIZES, bias=True)
    inputs = random_inputs(experts, TOKENS, TOP_K, dtype=dtype, weights=weights, indices=indices)
    hidden = run_experts(experts, inputs, backend)["hidden"]
    assert hidden.dtype == dtype
    exact, *_ = by_pick(Case({"bias": True}), {n: t.double() if n in learned(inputs) else t for n, t in inputs.items()})
    assert_close("hidden", hidden, exact, 3 * ROUNDING[dtype] + 1e-6)
    leaves = list(learned(inputs).values())
    gradients = torch.autograd.grad(hidden, leaves, torch.ones_like(hidden))
    assert [g.dtype for g in gradients] == [leaf.dtype for leaf in leaves]


# The declared function ------------------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F32, DType.F64])
def test_a_declared_function_prints_and_reads_back(name: str, dtype: DType) -> None:
    module = CASES[name].experts.module(dtype, TOP_K)
    verify_module(module)
    read = parse(str(module))
    assert read == module
    assert str(read) == str(module)


def test_equal_declarations_make_equal_functions() -> None:
    one, two = (Experts(*SIZES, gating=ClampedSwiGLU(7.0, 1.702, 1.0), name="ffn") for _ in range(2))
    assert one == two and hash(one) == hash(two)
    assert (
        str(one.module(DType.BF16, 3)) == str(two.module(DType.BF16, 3)) == str(one.module("bf16", 3, "int32", "fp32"))
    )
    assert one.module(DType.BF16, 3).entry.name == "ffn"
    assert str(one.module(DType.BF16, 3)) != str(one.module(DType.BF16, 2))


def test_inputs_are_named_as_in_checkpoints() -> None:
    def names(**options: Any) -> dict[str, str]:
        arguments = Experts(*SIZES, **options).module(DType.BF16, TOP_K).entry.arguments
        return {a.name: str(a.type).removeprefix("tensor<").removesuffix("xbf16>") for a in arguments[3:]}

    assert names() == {"gate_up_proj": "5x12x11", "down_proj": "5x11x6"}
    assert names(transposed=True) == {"gate_up_proj": "5x11x12", "down_proj": "5x6x11"}
    three = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "5x6x11")
    assert names(transposed="down", separate=True) == three
    assert names(gated=False, bias=True) == {
        "up_proj": "5x6x11",
        "down_proj": "5x11x6",
        "up_proj_bias": "5x6",
        "down_proj_bias": "5x11",
    }
    biases = {"gate_up_proj_bias": "5x12", "down_proj_bias": "5x11"}
    assert names(bias=True) == {"gate_up_proj": "5x12x11", "down_proj": "5x11x6", **biases}


def test_products_are_rounded_once() -> None:
    """Between the two products of bf16 there are two roundings: of what is in the middle, and of each output."""
    text = str(Experts(*SIZES, bias=True).module(DType.BF16, TOP_K))
    assert text.count("math.cast") == 3
    assert "math.cast" not in str(Experts(*SIZES, bias=True).module(DType.F32, TOP_K))


# What it refuses ------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_experts": 0}, "num_experts must be an integer >= 1, found 0"),
    ({"num_experts": True}, "num_experts must be an integer >= 1, found True"),
    ({"hidden": 1.5}, "hidden must be an integer >= 1, found 1.5"),
    ({"intermediate": -3}, "intermediate must be an integer >= 1, found -3"),
    ({"activation": "sillu"}, "unknown activation 'sillu'; did you mean 'silu'?"),
    ({"activation": 3}, "activation must be a name or a function of an IR value, found 3"),
    ({"gating": 3}, "gating is a function of gate and up, and goes with gated=True"),
    ({"gating": clamped_after, "gated": False}, "gating is a function of gate and up, and goes with gated=True"),
    ({"gating": clamped_after, "activation": "gelu"}, "give one of activation and gating"),
    ({"interleaved": True, "gated": False}, "with gated=False there is one of them only"),
    ({"separate": True, "gated": False}, "with gated=False there is one of them only"),
    ({"interleaved": True, "separate": True}, "with separate=True they have two"),
    ({"transposed": "both"}, "unknown transposed 'both'; known: 'up', 'down'"),
    ({"weight_on": "outputs"}, "unknown weight_on 'outputs'; did you mean 'output'?"),
    ({"capacity": 0.0}, "capacity must be a finite number > 0, or None, found 0.0"),
    ({"capacity": math.inf}, "capacity must be a finite number > 0, or None, found inf"),
    ({"capacity": math.nan}, "capacity must be a finite number > 0, or None, found nan"),
    ({"capacity": "1.25"}, "capacity must be a finite number > 0, or None, found '1.25'"),
    ({"pad": True}, "pad gives every expert as many rows as the capacity; give capacity, too"),
    ({"capacity": True}, "capacity must be a finite number > 0, or None, found True"),
    *(
        ({flag: value}, f"{flag} must be True or False, found {found}")
        for flag in ("gated", "bias", "separate", "interleaved", "pad")
        for value, found in (("no", "'no'"), (torch.zeros(3), "Tensor"))
    ),
    *(({"name": name}, f"name must be an identifier of ASCII letters, found {name!r}") for name in (3, "a b")),
    *(({"outputs": given}, f"outputs must be a tuple of names, found {given!r}") for given in (None, "hidden")),
    ({"align": 8}, "align must be one of 1, 16, 64, 128, found 8"),
    ({"outputs": ()}, "outputs must name some of hidden, counts, dropped, each once; found ()"),
    ({"outputs": ("hidden", "hidden")}, "each once; found ('hidden', 'hidden')"),
    ({"outputs": ("hiden",)}, "unknown outputs 'hiden'; did you mean 'hidden'?"),
    ({"dtype": "i32"}, "dtype must be a float type, found i32"),
    ({"dtype": "bf61"}, "'bf61'"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_has_no_meaning_is_refused_when_declared(options: dict[str, Any], message: str) -> None:
    sizes = {"num_experts": 5, "hidden": 11, "intermediate": 6}
    with pytest.raises(InputError) as caught:
        Experts(**{**sizes, **options})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": lambda x: 3}, "activation must give an IR value of the shape of its operand, found int"),
        ({"activation": lambda x: 3, "gated": False}, "activation must give an IR value of the shape of its operand"),
        (
            {"gating": lambda g, u: None},
            "gating must give an IR value of the shape of its operand, found NoneType",
        ),
        (
            {"gated": False, "activation": lambda x: mo.ir.core.create_one("row.sum", x)},
            "activation must give an IR value of the shape of its operand, found tensor<Mx1xf32>",
        ),
    ],
)
def test_functions_of_the_user_are_checked(options: dict[str, Any], message: str) -> None:
    experts = Experts(*SIZES, **options)
    with pytest.raises(InputError) as caught:
        experts.module(DType.BF16, TOP_K)
    assert message in str(caught.value)


def test_types_of_a_call_are_checked() -> None:
    with pytest.raises(InputError, match="indices must hold one pick a token or more, found 0"):
        Experts(*SIZES).module(DType.BF16, 0)
    with pytest.raises(DiagnosticError, match=r"slot.dispatch: indices must be i16, i32 or i64, found tensor<Tx3xf32>"):
        Experts(*SIZES).module(DType.BF16, 3, indices=DType.F32)


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_a_limit_has_to_be_positive(limit: float) -> None:
    with pytest.raises(InputError, match="limit must be a number > 0"):
        ClampedSwiGLU(limit)


def test_declared_types_follow_the_tensors() -> None:
    inputs = random_inputs(Experts(*SIZES), 2, 3, dtype=torch.bfloat16, weights=torch.float32, indices=torch.int64)
    types = [str(a.type) for a in declared(Experts(*SIZES), inputs).entry.arguments]
    assert types[:3] == ["tensor<Tx11xbf16>", "tensor<Tx3xi64>", "tensor<Tx3xf32>"]

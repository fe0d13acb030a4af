"""`Experts` beside the experts of open models: what each family's own module in `transformers` computes.

The modules get random weights; nothing is downloaded. They and the declared experts get the same hidden states, picks
and weights, and the declared ones the module's own parameters, as they lie in memory. Routers have tests of their own:
where a family routes within the module, its routing is replaced by the given picks. `docs/experts.md` has the table of
kinds.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from expert_calls import run_experts
from routing import assert_close, assert_zero, cotangent
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import moesaic as mo
from moesaic.ir.builder import Builder
from moesaic.ir.core import Function, Value
from moesaic.ir.experts import ClampedSwiGLU, Experts
from moesaic.runtime.reference import evaluate

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)

TOKENS, TOP_K = 11, 3
EXPERTS, HIDDEN, INNER = 5, 20, 6
SIZES = (EXPERTS, HIDDEN, INNER)

VALUES = {torch.float32: 1e-5, torch.float64: 1e-12}
"""Of the largest value: sums of products in another order, of up to 20 terms and then of 3."""

GRADIENTS = {torch.float32: 1e-4, torch.float64: 1e-11}
"""The same, through two products and the activation between."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Picks:
    """What both sides get."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def usual(module: Any, p: Picks) -> torch.Tensor:
    y: torch.Tensor = module(p.x, p.ids, p.weights)
    return y


def own(module: Any) -> Tensors:
    """The module's parameters, which are called as the declared inputs."""
    return dict(module.named_parameters())


def as_it_is(y: torch.Tensor, module: Any, p: Picks) -> torch.Tensor:
    return y


@dataclass(frozen=True)
class Kind:
    """Experts of a family, and how they are declared."""

    model: str
    config: str
    module: str
    options: Mapping[str, Any]
    experts: Experts
    call: Callable[[Any, Picks], torch.Tensor] = usual
    tensors: Callable[[Any], Tensors] = own
    """The declared inputs, from the module."""
    around: Callable[[torch.Tensor, Any, Picks], torch.Tensor] = as_it_is
    """What the module does beside its experts."""
    arguments: Callable[[Any], tuple[object, ...]] = lambda config: (config,)
    """What the module is made from."""
    picks: int = EXPERTS - 1
    """Ids are below this number, so that some expert has no tokens."""
    one_tensor: bool = True
    """Whether the module keeps the weights of all experts in one tensor."""
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)


def part_of(model: str, part: str) -> ModuleType:
    try:
        return importlib.import_module(f"transformers.models.{model}.{part}_{model}")
    except ModuleNotFoundError:
        pytest.skip(f"this transformers has no {model}")


def build(kind: Kind, dtype: torch.dtype) -> Any:
    """The module with random weights, as it is after training."""
    config = getattr(part_of(kind.model, "configuration"), kind.config)(**kind.options)
    assert {name: getattr(config, name) for name in kind.options} == kind.options
    module: torch.nn.Module = getattr(part_of(kind.model, "modeling"), kind.module)(*kind.arguments(config))
    generator = torch.Generator().manual_seed(11)
    module = module.to(dtype).eval()
    with torch.no_grad():
        for values in module.parameters():
            values.copy_(0.5 * torch.randn(values.shape, dtype=torch.float64, generator=generator))
    return module


def draw(kind: Kind, dtype: torch.dtype) -> Picks:
    """Hidden states, picks without repetitions, as routers make them, and weights of either sign."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    ids = torch.rand(TOKENS, kind.picks, generator=generator).topk(TOP_K).indices
    weights = torch.randn(TOKENS, TOP_K, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    return Picks(x, ids, weights)


# Modules that take or return something else ---------------------------------------------------------------------------


class Instead(torch.nn.Module):
    """Stands for a part of a module that the comparison leaves out."""

    def __init__(self, result: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.result = result

    def forward(self, x: torch.Tensor) -> Any:
        return self.result(x)


def dense(module: Any, p: Picks) -> torch.Tensor:
    """Llama 4 runs every expert on every token, on inputs times the scores, which are 0 but for the picks."""
    scores = torch.zeros(TOKENS, EXPERTS, dtype=p.x.dtype).scatter(1, p.ids, p.weights)
    module.router = Instead(lambda x: (scores, scores))
    module.shared_expert = Instead(lambda x: x * 0)
    y: torch.Tensor = module(p.x)[0]
    return y


def routed_within(module: Any, p: Picks) -> torch.Tensor:
    module.route_tokens_to_experts = lambda logits: (p.ids, p.weights)
    y: torch.Tensor = module(p.x, None)
    return y


def with_sequences(module: Any, p: Picks) -> torch.Tensor:
    y: torch.Tensor = module(p.x.unsqueeze(0), p.ids, p.weights)
    return y[0]


def by_expert(p: Picks) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int], None]:
    """What JetMoE's router returns: picks in the order of experts."""
    order = p.ids.flatten().argsort(stable=True)
    counts = p.ids.flatten().bincount(minlength=EXPERTS).tolist()
    return order, order // TOP_K, p.weights.flatten()[order], counts, None


def sorted_by_expert(module: Any, p: Picks) -> torch.Tensor:
    module.router = Instead(lambda x: by_expert(p))
    y: torch.Tensor = module(p.x.unsqueeze(0))
    return y[0]


def one_hot(module: Any, p: Picks) -> torch.Tensor:
    y: torch.Tensor = module(p.x, functional.one_hot(p.ids, EXPERTS), p.weights)
    return y


class _Weights(TorchFunctionMode):
    """Gives the weights in place of what `softmax` would."""

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__()
        self.weights = weights

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.weights if func is functional.softmax else func(*args, **(kwargs or {}))


def retrieved(module: Any, p: Picks) -> torch.Tensor:
    """Doge looks its experts up in two tables; the dense layer beside them is left out."""
    for table in (module.down_embed, module.up_embed):
        table.register_forward_pre_hook(lambda table, arguments: (p.ids,))
    module.down_proj = Instead(lambda x: torch.zeros(1, TOKENS, HIDDEN, dtype=p.x.dtype))
    with _Weights(p.weights):
        y: torch.Tensor = module(p.x.unsqueeze(0))[0]
    return y[0]


# Where tensors lie ----------------------------------------------------------------------------------------------------


def under_names(**names: str) -> Callable[[Any], Tensors]:
    """Parameters under the names of the declared inputs."""
    return lambda module: {name: module.get_parameter(path) for name, path in names.items()}


def flat(module: Any) -> Tensors:
    """DBRX: the rows of all experts, one after the other, in three matrices."""
    names = {"gate_proj": "w1", "up_proj": "v1", "down_proj": "w2"}
    return {name: module.mlp.get_parameter(w).view(EXPERTS, INNER, HIDDEN) for name, w in names.items()}


def without_identities(module: Any) -> Tensors:
    """LongCat: the first weight has rows for experts without one, too."""
    return {"gate_up_proj": module.gate_up_proj[:EXPERTS], "down_proj": module.down_proj}


def vectors(module: Any) -> Tensors:
    """Doge: two vectors an expert."""
    return {"up_proj": module.down_embed.weight.unsqueeze(1), "down_proj": module.up_embed.weight.unsqueeze(2)}


def stacked(up: str, down: str, bias: bool = False) -> Callable[[Any], Tensors]:
    """One module an expert."""

    def of(module: Any) -> Tensors:
        def all_of(path: str) -> torch.Tensor:
            return torch.stack([module[f"expert_{e}"].get_parameter(path) for e in range(EXPERTS)])

        weights = {"up_proj": all_of(f"{up}.weight"), "down_proj": all_of(f"{down}.weight")}
        if bias:
            weights |= {"up_proj_bias": all_of(f"{up}.bias"), "down_proj_bias": all_of(f"{down}.bias")}
        return weights

    return of


# What a module does beside its experts --------------------------------------------------------------------------------


def plus_bias(y: torch.Tensor, module: Any, p: Picks) -> torch.Tensor:
    """JetMoE adds one bias to the sum."""
    return y + module.bias


def plus_identities(y: torch.Tensor, module: Any, p: Picks) -> torch.Tensor:
    """LongCat: picks from E on return the input."""
    share = p.weights.masked_fill(p.ids < EXPERTS, 0.0).sum(-1, keepdim=True)
    return y + p.x * share


def token_dropout(y: torch.Tensor, module: Any, p: Picks) -> torch.Tensor:
    """NLLB multiplies by what dropout would keep, when it does not drop."""
    return y * (1 - module.moe_token_dropout)


# The kinds ------------------------------------------------------------------------------------------------------------


def clamped_after(limit: float) -> Callable[[Value, Value], Value]:
    """Step 3.7: the gate is bounded after its activation."""
    return lambda gate, up: mo.math.minimum(mo.math.silu(gate), limit) * mo.math.clamp(up, min=-limit, max=limit)


BOTH = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER}
PLAIN = {"hidden_size": HIDDEN, "intermediate_size": INNER}
LOCAL = {"num_local_experts": EXPERTS}
ROUTED = {"n_routed_experts": EXPERTS}  # where the other name is only mapped to it, and may lose against its default
LIMIT = 0.75  # among the values of gates and ups here, which spread over 2

KINDS = {
    "X1 qwen3_moe": Kind(
        "qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeExperts", {**BOTH, "num_experts": EXPERTS}, Experts(*SIZES)
    ),
    "X1 mixtral": Kind("mixtral", "MixtralConfig", "MixtralExperts", {**PLAIN, **LOCAL}, Experts(*SIZES)),
    "X1 deepseek_v3": Kind("deepseek_v3", "DeepseekV3Config", "DeepseekV3Experts", {**BOTH, **ROUTED}, Experts(*SIZES)),
    "X2 gemma4": Kind(
        "gemma4",
        "Gemma4TextConfig",
        "Gemma4TextExperts",
        {**BOTH, "num_experts": EXPERTS},
        Experts(*SIZES, activation="gelu_tanh"),
    ),
    "X3 deepseek_v4": Kind(
        "deepseek_v4",
        "DeepseekV4Config",
        "DeepseekV4Experts",
        {**BOTH, **ROUTED, "swiglu_limit": LIMIT},
        Experts(*SIZES, gating=ClampedSwiGLU(LIMIT)),
    ),
    "X3 hy_v4": Kind(
        "hy_v4",
        "HYV4Config",
        "HYV4Experts",
        {**BOTH, **ROUTED, "swiglu_limit": LIMIT},
        Experts(*SIZES, gating=ClampedSwiGLU(LIMIT)),
    ),
    "X4 step3p7": Kind(
        "step3p7",
        "Step3p7TextConfig",
        "Step3p7Experts",
        {**BOTH, **ROUTED},
        Experts(*SIZES, gating=clamped_after(LIMIT)),
        arguments=lambda config: (config, LIMIT),
    ),
    "X4 step3p7, no limit": Kind(
        "step3p7",
        "Step3p7TextConfig",
        "Step3p7Experts",
        {**BOTH, **ROUTED},
        Experts(*SIZES),
    ),
    "X5 gpt_oss": Kind(
        "gpt_oss",
        "GptOssConfig",
        "GptOssExperts",
        {**PLAIN, **LOCAL},
        Experts(*SIZES, gating=ClampedSwiGLU(7.0, 1.702, 1.0), bias=True, transposed=True, interleaved=True),
    ),
    "X6 openai_privacy_filter": Kind(
        "openai_privacy_filter",
        "OpenAIPrivacyFilterConfig",
        "OpenAIPrivacyFilterExperts",
        {**PLAIN, **LOCAL},
        Experts(*SIZES, gating=ClampedSwiGLU(7.0, 1.702, 1.0), bias=True, transposed=True),
        dtypes=(torch.float32,),  # the module computes in float32, whatever it is given
    ),
    "X7 minimax_m3_vl": Kind(
        "minimax_m3_vl",
        "MiniMaxM3VLTextConfig",
        "MiniMaxM3VLExperts",
        {**PLAIN, **LOCAL, "swiglu_limit": LIMIT, "swiglu_alpha": 1.25},
        Experts(*SIZES, gating=ClampedSwiGLU(LIMIT, 1.25, 1.0)),
    ),
    "X8 nemotron_h": Kind(
        "nemotron_h",
        "NemotronHConfig",
        "NemotronHExperts",
        {**BOTH, **ROUTED},
        Experts(*SIZES, gated=False, activation="relu2"),
    ),
    "X8 nemotron_h, latent": Kind(
        "nemotron_h",
        "NemotronHConfig",
        "NemotronHExperts",
        {**BOTH, "hidden_size": 4 * HIDDEN, "moe_latent_size": HIDDEN, **ROUTED},
        Experts(*SIZES, gated=False, activation="relu2"),
    ),
    "X9 llama4": Kind(
        "llama4",
        "Llama4TextConfig",
        "Llama4TextMoe",
        {**PLAIN, **LOCAL, "num_experts_per_tok": TOP_K},
        Experts(*SIZES, transposed=True, weight_on="input"),
        dense,
        under_names(gate_up_proj="experts.gate_up_proj", down_proj="experts.down_proj"),
    ),
    "X10 aria": Kind(
        "aria",
        "AriaTextConfig",
        "AriaExperts",
        {**PLAIN, "moe_num_experts": EXPERTS, "moe_topk": TOP_K, "num_attention_heads": 4, "num_key_value_heads": 4},
        Experts(*SIZES, transposed=True),
        routed_within,
        under_names(gate_up_proj="fc1.weight", down_proj="fc2.weight"),
    ),
    "X11 dbrx": Kind(
        "dbrx",
        "DbrxFFNConfig",
        "DbrxExperts",
        {"hidden_size": HIDDEN, "ffn_hidden_size": INNER, "moe_num_experts": EXPERTS},
        Experts(*SIZES, separate=True, transposed="down"),
        with_sequences,
        flat,
    ),
    "X12 jetmoe": Kind(
        "jetmoe",
        "JetMoeConfig",
        "JetMoeMoE",
        {**PLAIN, **LOCAL, "num_experts_per_tok": TOP_K},
        Experts(*SIZES),
        sorted_by_expert,
        under_names(gate_up_proj="input_linear.weight", down_proj="output_linear.weight"),
        plus_bias,
    ),
    "X13 longcat_flash": Kind(
        "longcat_flash",
        "LongcatFlashConfig",
        "LongcatFlashExperts",
        {"hidden_size": HIDDEN, "expert_ffn_hidden_size": INNER, **ROUTED, "zero_expert_num": 4},
        Experts(*SIZES),
        tensors=without_identities,
        around=plus_identities,
        picks=EXPERTS + 4,
    ),
    "X14 zaya": Kind("zaya", "ZayaConfig", "ZayaExperts", {**BOTH, "num_experts": EXPERTS}, Experts(*SIZES)),
    "X15 switch_transformers": Kind(
        "switch_transformers",
        "SwitchTransformersConfig",
        "SwitchTransformersExperts",
        {"d_model": HIDDEN, "d_ff": INNER, "num_experts": EXPERTS},
        Experts(*SIZES, gated=False, activation="relu"),
        one_hot,
        stacked("wi", "wo"),
        one_tensor=False,
    ),
    "X16 nllb_moe": Kind(
        "nllb_moe",
        "NllbMoeConfig",
        "NllbMoeExperts",
        {"d_model": HIDDEN, "num_experts": EXPERTS, "moe_token_dropout": 0.2},
        Experts(*SIZES, gated=False, activation="relu", bias=True),
        tensors=stacked("fc1", "fc2", bias=True),
        around=token_dropout,
        arguments=lambda config: (config, INNER),
        one_tensor=False,
    ),
    "X17 doge": Kind(
        "doge",
        "DogeConfig",
        "DogeCDMoE",
        {**PLAIN, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K},
        Experts(EXPERTS, HIDDEN, 1, gated=False, weight_on="middle"),
        retrieved,
        vectors,
    ),
}

EMULATED = ("X1 qwen3_moe", "X5 gpt_oss", "X8 nemotron_h", "X9 llama4")
"""As different as kinds are: the emulator is slow. A GPU runs them all."""


def runs() -> Iterator[Any]:
    """(name, dtype, backend): the reference in every type, compiled experts in float32."""
    for name, kind in KINDS.items():
        yield from (pytest.param(name, dtype, "reference") for dtype in kind.dtypes)
        yield pytest.param(name, torch.float32, "cuda", marks=pytest.mark.gpu)
        if name in EMULATED:
            yield pytest.param(name, torch.float32, "emulate", marks=pytest.mark.emulate)


@pytest.mark.parametrize(("name", "dtype", "backend"), list(runs()))
def test_declared_experts_are_those_of_the_model(name: str, dtype: torch.dtype, backend: str) -> None:
    kind = KINDS[name]
    module, p = build(kind, dtype), draw(kind, dtype)
    parameters = dict(module.named_parameters())
    wanted = kind.call(module, p)
    tensors = kind.tensors(module)
    hidden = run_experts(kind.experts, {"x": p.x, "indices": p.ids, "weights": p.weights, **tensors}, backend)["hidden"]
    found = kind.around(hidden, module, p)
    assert_close("hidden", found, wanted, VALUES[dtype])

    sent = cotangent(wanted, seed=9)
    leaves = {"x": p.x, "weights": p.weights, **parameters}
    theirs = torch.autograd.grad(wanted, list(leaves.values()), sent, allow_unused=True)
    ours = torch.autograd.grad(found, list(leaves.values()), sent, allow_unused=True)
    reached = set()
    for leaf, mine, expected in zip(leaves, ours, theirs, strict=True):
        if expected is None:  # a part that is left out, or a module of its own for an expert without tokens
            assert mine is None or not mine.any(), leaf
            continue
        assert mine is not None, leaf
        assert_close(f"gradient of {leaf}", mine, expected, GRADIENTS[dtype])
        reached.add(leaf)
    assert {"x", "weights"} < reached

    # The module's own memory.
    memory = {values.untyped_storage().data_ptr() for values in parameters.values()}
    assert all((t.untyped_storage().data_ptr() in memory) == kind.one_tensor for t in tensors.values())


@pytest.mark.parametrize("name", [n for n in KINDS if n.split()[0] in ("X2", "X3", "X4", "X7") and "no limit" not in n])
def test_the_kinds_differ(name: str) -> None:
    """On the numbers drawn here, so that one kind would not pass for another."""
    kind = KINDS[name]
    module, p = build(kind, torch.float64), draw(kind, torch.float64)
    inputs = {"x": p.x, "indices": p.ids, "weights": p.weights, **kind.tensors(module)}
    wanted = kind.call(module, p)
    for other in KINDS.values():
        same_inputs = (other.experts.bias, other.experts.transposed, other.experts.gated) == (False, False, True)
        if same_inputs and not other.experts.separate and other.model != kind.model and other.experts != kind.experts:
            error = (run_experts(other.experts, inputs)["hidden"] - wanted).abs().max() / wanted.abs().max()
            assert error > 0.01, other.model


def test_a_skipped_token_is_one_that_is_not_here() -> None:
    """Zaya's router makes weight 0 and expert 0 of its class "skip". Left as it is, an id of E, it costs no product and
    gives the same, gradients included: of the weight, too, which the router makes 0 without a gradient."""
    kind = KINDS["X14 zaya"]
    module, p = build(kind, torch.float64), draw(kind, torch.float64)
    skipped = torch.zeros_like(p.ids, dtype=torch.bool)
    skipped[::2, 1] = True
    skipped[3] = True
    wanted = module(p.x, p.ids.masked_fill(skipped, 0), p.weights.masked_fill(skipped, 0.0))
    inputs = {"x": p.x, "indices": p.ids.masked_fill(skipped, EXPERTS), "weights": p.weights, **own(module)}
    found = run_experts(kind.experts, inputs)["hidden"]
    assert_close("hidden", found, wanted, VALUES[torch.float64])
    assert_zero("a token without experts", found[3])
    sent = cotangent(wanted, seed=9)
    leaves = [p.x, p.weights, *module.parameters()]
    for mine, expected in zip(*(torch.autograd.grad(y, leaves, sent) for y in (found, wanted)), strict=True):
        assert_close("gradient", mine, expected, GRADIENTS[torch.float64])


# One product an expert ------------------------------------------------------------------------------------------------


def one_product(rows: int, columns: int, *, bias: bool) -> Function:
    """`Experts` has two products; of one, the ops are put together by hand."""
    b = Builder("experts")
    x, ids = b.input("x", f"tensor<Tx{rows}xf64>"), b.input("indices", "tensor<Tx1xi64>")
    weight = b.input("weight", f"tensor<{EXPERTS}x{columns}x{rows}xf64>")
    counts, offsets, tokens, _picks, slots, _dropped = b.op("slot.dispatch", ids, experts=EXPERTS)
    groups = (counts, offsets)
    y = b.op("slot.grouped_linear", b.op("slot.gather", x, tokens, slots), weight, *groups, transposed=False)
    if bias:
        vectors = b.input("bias", f"tensor<{EXPERTS}x{columns}xf64>")
        y = y + b.op("slot.expert_rows", vectors, tokens, *groups)
    return b.build(y=b.op("slot.combine", y, slots, tokens)).entry


def test_one_linear_an_expert() -> None:
    """X18: VitPose picks an expert for each sample; it gives some of the features."""
    config = part_of("vitpose_backbone", "configuration").VitPoseBackboneConfig(
        hidden_size=HIDDEN, mlp_ratio=2, num_experts=EXPERTS, part_features=7
    )
    module = part_of("vitpose_backbone", "modeling").VitPoseNaiveMoe(config).double()
    h = torch.randn(3, 13, 2 * HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).requires_grad_()
    ids = torch.tensor([4, 0, 2])
    wanted = module(h, ids.view(-1, 1, 1))
    inputs = {
        "x": h.flatten(0, 1),
        "indices": ids.repeat_interleave(13).unsqueeze(1),
        "weight": torch.stack([linear.weight for linear in module]),
        "bias": torch.stack([linear.bias for linear in module]),
    }
    [found] = evaluate(one_product(2 * HIDDEN, 7, bias=True), inputs)
    found = found.unflatten(0, (3, 13))
    assert_close("features", found, wanted, VALUES[torch.float64])
    sent = cotangent(wanted, seed=9)
    leaves = [h, *(t for linear in module for t in (linear.weight, linear.bias))]
    both = [torch.autograd.grad(y, leaves, sent) for y in (found, wanted)]
    for number, (mine, expected) in enumerate(zip(*both, strict=True)):
        if number in (0, 1, 2, 5, 6, 9, 10):
            assert_close("gradient", mine, expected, GRADIENTS[torch.float64])
        else:
            assert_zero("gradient of an expert without tokens", mine)


def test_one_linear_before_and_one_after_attention() -> None:
    """X19: JetMoE's attention projects each pick of a token by itself. Every pick is a token with one pick here."""
    config = part_of("jetmoe", "configuration").JetMoeConfig(
        hidden_size=HIDDEN, kv_channels=4, num_key_value_heads=2, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    kind = KINDS["X12 jetmoe"]
    p = draw(kind, torch.float64)
    module = part_of("jetmoe", "modeling").JetMoeMoA(config).double()
    with torch.no_grad():
        for values in module.parameters():
            values.copy_(torch.randn(values.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(11)))
    module.router = Instead(lambda x: by_expert(p))
    mapped, _, routing = module.map(p.x.unsqueeze(0))
    ids = p.ids.reshape(-1, 1)
    before = {"x": p.x.repeat_interleave(TOP_K, 0), "indices": ids, "weight": module.input_linear.weight}
    [found] = evaluate(one_product(HIDDEN, 8, bias=False), before)
    assert_close("mapped", found, mapped.flatten(0, 2), VALUES[torch.float64])

    wanted = module.reduce(torch.tanh(mapped), routing)[0]
    after = {"x": torch.tanh(found), "indices": ids, "weight": module.output_linear.weight}
    [rows] = evaluate(one_product(8, HIDDEN, bias=False), after)
    reduced = (rows.unflatten(0, (TOKENS, TOP_K)) * p.weights.unsqueeze(-1)).sum(1) + module.bias
    assert_close("reduced", reduced, wanted, VALUES[torch.float64])
    sent = cotangent(wanted, seed=9)
    leaves = [p.x, p.weights, *module.parameters()]
    for mine, expected in zip(*(torch.autograd.grad(y, leaves, sent) for y in (reduced, wanted)), strict=True):
        assert_close("gradient", mine, expected, GRADIENTS[torch.float64])

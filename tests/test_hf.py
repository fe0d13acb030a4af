"""`experts_implementation="moesaic"`: the experts of transformers' models, beside transformers' own loop over experts.

Modules get small sizes and random weights; nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import logging
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from routing import device_of, sweep

import moesaic as mo
from moesaic.ir.errors import InputError
from moesaic.ir.experts import ClampedSwiGLU
from moesaic.runtime.transformers_experts import declared, plan_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)

EXPERTS, HIDDEN, INNER, TOP_K = 5, 16, 12, 2
SIZES = {
    HIDDEN: ("hidden_size", "d_model", "moe_latent_size"),
    INNER: ("moe_intermediate_size", "intermediate_size", "expert_ffn_hidden_size", "ffn_hidden_size"),
    EXPERTS: ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    TOP_K: ("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"),
}


DECORATED = re.compile(r"@use_experts_implementation(?:\([^)]*\))?\s*\nclass (\w+)\(")


@pytest.fixture(autouse=True)
def registered() -> None:
    mo.hf.register()
    mo.hf.register("moesaic_emulated", backend="emulate")


def dispatched() -> list[tuple[str, str]]:
    """Model and class of all experts that transformers lets others run."""
    if importlib.util.find_spec("transformers") is None:
        return []
    import transformers.models as models

    found = []
    for model in sorted(m.name for m in pkgutil.iter_modules(models.__path__)):
        spec = importlib.util.find_spec(f"transformers.models.{model}")
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            path = Path(folder) / f"modeling_{model}.py"
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
            found += [(model, m[1]) for m in DECORATED.finditer(text)]
    return found


def small(config: Any) -> Any:
    for size, names in SIZES.items():
        for name in names:
            if isinstance(getattr(config, name, ""), int | None):
                setattr(config, name, size)
    return config


def configs(model: str) -> Iterator[Any]:
    part = importlib.import_module(f"transformers.models.{model}.configuration_{model}")
    for name, kind in sorted(vars(part).items(), key=lambda item: (-len(item[0]), item[0])):
        if inspect.isclass(kind) and name.endswith("Config") and kind.__module__ == part.__name__:
            with contextlib.suppress(Exception):  # some cannot be made without arguments
                yield small(kind())


def build(model: str, name: str) -> Any:
    """The module with random weights; None if no configuration of the model fits it."""
    kind = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)
    for config in configs(model):
        config._experts_implementation = "eager"
        module = None
        with contextlib.suppress(Exception):  # a configuration of another part of the model
            module = kind(config)
        if module is None or module.down_proj.dim() != 3 or module.down_proj.shape[0] != EXPERTS:
            continue
        g = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for tensor in module.parameters():
                tensor.copy_(0.5 * torch.randn(tensor.shape, generator=g))
        return module.eval()
    return None


def run(
    module: Any, implementation: str, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[torch.Tensor]:
    """Output and gradients, in memory that the module has no part in: `to` moves its own in place."""
    module = module.to(device, dtype)
    module.zero_grad()
    module.config._experts_implementation = implementation
    g = torch.Generator().manual_seed(2)
    down = module.down_proj
    hidden = down.shape[-1] if module.is_transposed else down.shape[1]
    x = torch.randn(11, hidden, generator=g).to(device).requires_grad_()
    ids = torch.rand(11, EXPERTS - 1, generator=g).topk(TOP_K).indices.to(device)  # the last expert has no tokens
    weights = torch.rand(11, TOP_K, generator=g).to(device).requires_grad_()
    y = module(x, ids, weights)
    y.backward(torch.randn(11, hidden, generator=g).to(device))
    grads = [p.grad.to("cpu", copy=True) for p in module.parameters() if p.grad is not None]
    assert x.grad is not None and weights.grad is not None
    return [y.detach().cpu(), x.grad.cpu(), weights.grad.cpu(), *grads]


def assert_alike(found: list[torch.Tensor], wanted: list[torch.Tensor], rtol: float = 1e-5) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert b.any()
        torch.testing.assert_close(a, b, rtol=0, atol=rtol * b.abs().max().item())


ALL = dispatched()


def test_there_are_many() -> None:
    built = [name for model, name in ALL if build(model, name) is not None]
    assert len(ALL) >= 50
    assert len(built) >= 0.85 * len(ALL), sorted({n for _, n in ALL} - set(built))


@pytest.mark.parametrize(("model", "name"), ALL, ids=lambda x: x)
def test_every_dispatched_module(model: str, name: str) -> None:
    module = build(model, name)
    if module is None:
        pytest.skip("none of its configurations, made small, fits")
    assert_alike(run(module, "moesaic"), run(module, "eager"))
    assert plan_of(module).experts is not None, "runs as it is, between two layers"


def swiglu() -> Any:
    return build("qwen3_moe", "Qwen3MoeExperts")


@pytest.mark.parametrize(
    ("model", "name", "backend"),
    sweep(
        [("gpt_oss", "GptOssExperts"), ("nemotron_h", "NemotronHExperts"), ("qwen3_moe", "Qwen3MoeExperts")], 2, of=3
    ),
)
def test_compiled(model: str, name: str, backend: str) -> None:
    module = build(model, name)
    wanted = run(module, "eager")
    assert_alike(
        run(module, "moesaic_emulated" if backend == "emulate" else "moesaic", device=device_of(backend)), wanted
    )


def test_what_they_are_declared_as() -> None:
    gpt_oss = declared(build("gpt_oss", "GptOssExperts"))
    assert gpt_oss == mo.Experts(
        EXPERTS,
        HIDDEN,
        INNER,
        gating=ClampedSwiGLU(7.0, 1.702, 1.0),
        bias=True,
        transposed=True,
        interleaved=True,
    )
    gemma = declared(build("diffusion_gemma", "DiffusionGemmaTextExperts"))
    assert gemma is not None and gemma.activation == "gelu_tanh"
    nemotron = declared(build("nemotron_h", "NemotronHExperts"))
    assert nemotron is not None and (nemotron.gated, nemotron.activation) == (False, "relu2")


def test_a_gating_of_its_own_runs_between_two_layers(caplog: pytest.LogCaptureFixture) -> None:
    for model, name in (("qwen3_moe", "Qwen3MoeExperts"), ("gpt_oss", "GptOssExperts")):
        module = build(model, name)
        kind = type(name, (type(module),), {"_apply_gate": lambda self, h: torch.sin(h[..., ::2]) * h[..., 1::2] ** 2})
        module.__class__ = kind
        caplog.clear()
        with caplog.at_level(logging.WARNING, "moesaic.hf"):
            found = run(module, "moesaic")
            run(module, "moesaic")
        assert_alike(found, run(module, "batched_mm"))  # the modules' own loops may not ask for it
        assert plan_of(module).experts is None
        assert len(caplog.records) == 1 and f"{name} computes something" in caplog.text  # it says so once


def test_a_clamp_that_is_never_met_is_not_overlooked() -> None:
    """The formula is that of a plain SwiGLU wherever numbers are small."""
    module = build("deepseek_v4", "DeepseekV4Experts")
    module.limit = 12.0
    found = declared(module)
    assert found is not None and found.gating == ClampedSwiGLU(12.0)


def test_experts_of_other_ranks_and_float32_beside_bf16() -> None:
    module = swiglu()
    module.config._experts_implementation = "moesaic"
    g = torch.Generator().manual_seed(4)
    x, weights = torch.randn(6, HIDDEN, generator=g), torch.rand(6, 2, generator=g)
    ids = torch.tensor([[0, EXPERTS], [EXPERTS, EXPERTS], [2, 1], [EXPERTS, 3], [4, 4], [1, EXPERTS]])
    alone = torch.where(ids == EXPERTS, 0.0, weights)
    y = module(x, ids, weights)
    torch.testing.assert_close(y, module(x, ids.clamp(max=EXPERTS - 1), alone))
    assert not y[1].any() and y[0].any()

    mixed = module.bfloat16()(x, ids, weights)
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, y, rtol=0.05, atol=0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module.float()(x, ids, weights).dtype == torch.float32


def test_weights_of_another_shape_are_looked_at_again() -> None:
    """As where experts are spread over ranks after the first call."""
    module = swiglu()
    run(module, "moesaic")
    before = plan_of(module)
    module.gate_up_proj = torch.nn.Parameter(module.gate_up_proj[:3].detach().clone())
    module.down_proj = torch.nn.Parameter(module.down_proj[:3].detach().clone())
    after = plan_of(module)
    assert before.experts is not None and after.experts is not None
    assert (before.experts.num_experts, after.experts.num_experts) == (EXPERTS, 3)


def test_numbers_and_activations_that_change_are_looked_at_again() -> None:
    module = build("gpt_oss", "GptOssExperts")
    x, ids, weights = torch.randn(9, module.hidden_size), torch.zeros(9, 1, dtype=torch.long), torch.rand(9, 1)

    def both() -> list[torch.Tensor]:
        found = []
        for implementation in ("moesaic", "eager"):
            module.config._experts_implementation = implementation
            found.append(module(x, ids, weights))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
        return found

    before = both()[0]
    module.limit = 0.01
    assert (both()[0] - before).abs().max() > 1e-3
    module = build("qwen3_moe", "Qwen3MoeExperts")
    x = torch.randn(9, module.hidden_dim)
    before = both()[0]
    module.act_fn = torch.nn.ReLU()
    assert (both()[0] - before).abs().max() > 1e-3


def test_in_one_graph() -> None:
    module = swiglu()
    wanted = run(module, "eager")
    module.config._experts_implementation = "moesaic"
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    g = torch.Generator().manual_seed(2)
    x, ids = torch.randn(11, HIDDEN, generator=g), torch.rand(11, EXPERTS - 1, generator=g).topk(TOP_K).indices
    weights = torch.rand(11, TOP_K, generator=g)
    with pytest.raises(Exception, match=r"moesaic\.hf\.prepare"):
        compiled(x, ids, weights)
    torch._dynamo.reset()
    assert mo.hf.prepare(module) == 1
    torch.testing.assert_close(compiled(x, ids, weights), wanted[0], rtol=1e-4, atol=1e-5)


def language_model(model: str, implementation: str) -> Any:
    import transformers

    if model == "qwen3_moe":
        config: Any = transformers.Qwen3MoeConfig(
            vocab_size=37, hidden_size=16, intermediate_size=24, moe_intermediate_size=12, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=6, num_experts_per_tok=2,
            decoder_sparse_step=1, norm_topk_prob=True,
        )  # fmt: skip
        kind: Any = transformers.Qwen3MoeForCausalLM
    else:
        config = transformers.GptOssConfig(
            vocab_size=37, hidden_size=16, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, num_local_experts=6, num_experts_per_tok=2, sliding_window=16,
        )  # fmt: skip
        kind = transformers.GptOssForCausalLM
    torch.manual_seed(0)
    made = kind._from_config(config, experts_implementation=implementation).eval()
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in made.parameters():
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=g))
    return made


@pytest.mark.parametrize("model", ["qwen3_moe", "gpt_oss"])
def test_a_language_model(model: str) -> None:
    """Logits, gradients, and the tokens it writes."""
    ours, theirs = language_model(model, "moesaic"), language_model(model, "eager")
    tokens = torch.randint(0, 37, (2, 9), generator=torch.Generator().manual_seed(1))
    results = [m(tokens, labels=tokens) for m in (ours, theirs)]
    torch.testing.assert_close(results[0].logits, results[1].logits, rtol=1e-4, atol=1e-4)
    for result in results:
        result.loss.backward()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4, msg=name)
    assert sum("experts" in n and p.grad is not None and bool(p.grad.any()) for n, p in ours.named_parameters()) >= 4
    written = [m.generate(tokens, max_new_tokens=8, do_sample=False, pad_token_id=0) for m in (ours, theirs)]
    assert torch.equal(*written)
    assert written[0].shape == (2, 17)


def test_an_old_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(InputError, match="needs transformers 5 or newer"):
        mo.hf.register()

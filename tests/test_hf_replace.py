"""`moesaic.hf.replace`: whole sparse blocks of transformers' models as compiled layers, beside the models as they were.

CI runs some families, one of each way in which a block is made; `python tests/hf_replace.py` runs all of them.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

import moesaic as mo
from moesaic.ir.errors import InputError, InputTypeError
from moesaic.ir.presets import PRESETS, WITHOUT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)

SOME = (
    "deepseek_v3",  # groups, a selection bias, a shared expert
    "gpt_oss",  # biases, gates and ups in turn, a block that returns weights
    "jamba",  # a router that is a linear layer
    "llama4",  # weights on the input
    "gemma4",  # router and experts that are no block
    "longcat_flash",  # experts that return their input
    "qwen2_moe",  # a shared expert behind a gate
)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    from moesaic.runtime.transformers_blocks import say_once

    say_once.cache_clear()
    caplog.set_level(logging.WARNING, "moesaic.hf")
    return caplog


@pytest.mark.parametrize("family", SOME)
def test_logits_gradients_and_greedy_tokens(family: str) -> None:
    from hf_replace import compare

    recorded = compare(family).router_logits
    assert recorded == (2 if family in ("gpt_oss", "jamba", "qwen2_moe") else 0)


def test_the_table_has_every_family_with_a_preset() -> None:
    from moesaic.runtime.transformers_families import LEFT, TABLE

    assert {f.name for f in TABLE} == set(PRESETS) == set(tiny_models.FAMILIES)
    assert {module.split(".")[2] for module, _ in LEFT} == {*WITHOUT, "jetmoe"}
    assert len(PRESETS) == 58
    page = (Path(__file__).resolve().parent.parent / "docs" / "transformers.md").read_text(encoding="utf-8")
    assert not [name for name in (*PRESETS, *WITHOUT) if name not in page]


def pair(family: str, **options: Any) -> tuple[Any, Any, mo.hf.Report]:
    theirs = tiny_models.build(family)
    ours = copy.deepcopy(theirs)
    return ours, theirs, mo.hf.replace(ours, **options)


def tokens(rows: int = 2) -> torch.Tensor:
    return torch.randint(2, tiny_models.VOCABULARY, (rows, 7), generator=torch.Generator().manual_seed(4))


def assert_alike(ours: Any, theirs: Any, ids: torch.Tensor | None = None) -> None:
    ids = tokens() if ids is None else ids
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["mixtral", "minimax"])
def test_the_balance_loss_in_training(family: str) -> None:
    """With a mask, noise on the input (and on the residual of minimax, which is the same tensor), and a forward pass
    that is repeated in backward."""
    ours, theirs, _ = pair(family)
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    losses = []
    for model in (ours, theirs):
        for module in model.modules():
            if hasattr(module, "jitter_noise"):
                module.jitter_noise = 0.1
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.config.router_aux_loss_coef = model.router_aux_loss_coef = 3.0
        torch.manual_seed(5)
        result = model(ids, attention_mask=mask, labels=ids, output_router_logits=True)
        assert result.aux_loss > 1.9
        result.loss.backward()
        losses.append(result.loss.detach())
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert b.grad is not None and b.grad.any()
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4, msg=name)


def test_copies_pickles_checkpoints_and_moves(tmp_path: Path) -> None:
    ours, theirs, report = pair("qwen3_moe")
    kind = type(theirs.model.layers[0].mlp)
    assert isinstance(ours.model.layers[0].mlp, kind) and type(ours.model.layers[0].mlp) is not kind
    assert_alike(copy.deepcopy(ours), theirs)
    again = pickle.loads(pickle.dumps(ours))
    assert type(again.model.layers[0].mlp) is type(ours.model.layers[0].mlp)
    assert_alike(again, theirs)

    ours.save_pretrained(tmp_path)
    assert_alike(type(theirs).from_pretrained(tmp_path), theirs)
    with torch.no_grad():
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            for tensor in (a, b):
                tensor.mul_(1.1)  # as an optimizer does
    assert_alike(ours, theirs)
    ours.load_state_dict(again.state_dict())
    assert_alike(ours, again)

    twice = mo.hf.replace(ours)
    assert not twice.replaced and "already" in str(twice)
    report.restore()
    assert type(ours.model.layers[0].mlp) is kind
    assert not any("oesaic" in type(m).__name__ for m in ours.modules())
    assert not any(hasattr(m, "_moesaic_block") for m in ours.modules())


@pytest.mark.parametrize("family", ["ernie4_5_moe", "inkling"])
def test_bf16(family: str) -> None:
    """As near to float32 as the model itself; ernie's gates stay in float32."""
    from hf_replace import errors_of_rounding

    exact = tiny_models.build(family)
    theirs = copy.deepcopy(exact).to(torch.bfloat16)
    for (name, module), before in zip(theirs.named_modules(), exact.modules(), strict=True):
        if family == "ernie4_5_moe" and name.endswith("gate"):
            module.weight = torch.nn.Parameter(before.weight.detach().clone())
    ours = copy.deepcopy(theirs)
    assert len(mo.hf.replace(ours).replaced) == 2
    errors_of_rounding(ours, theirs, exact, tokens(8))


def test_autocast() -> None:
    ours, theirs, _ = pair("mixtral")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        results = [m(tokens()).logits for m in (ours, theirs)]
    wanted = theirs(tokens()).logits
    errors = [(r.float() - wanted).norm(dim=-1).div(wanted.norm(dim=-1)).median().item() for r in results]
    assert 0 < errors[0] < 1.3 * errors[1] + 1e-3


def test_in_one_graph() -> None:
    """With what the router found, too, for a hook on its module."""
    ours, theirs, _ = pair("qwen3_moe")
    blocks = [m.model.layers[0].mlp for m in (ours, theirs)]
    seen: list[torch.Tensor] = []
    for block in blocks:
        block.gate.register_forward_hook(lambda module, args, result: seen.append(result[0]))
    x = torch.randn(2, 7, tiny_models.HIDDEN)
    compiled = torch.compile(blocks[0], backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), blocks[1](x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-4, atol=1e-5)


def test_what_computes_something_else_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    from moesaic.runtime.transformers_families import FAMILIES

    key, family = next((k, f) for k, f in FAMILIES.items() if f.name == "qwen3_moe")
    wrong = [
        {"arguments": lambda block: {"scale": 1.01}},
        {"arguments": lambda block: {"renormalize": True}},
        {"arguments": lambda block: {"top_k": 3}},
        {"after": lambda block, y: y * 0.0},
        {"after": lambda block, y: y + y.detach() - y},  # no gradient
        {"watched": lambda block, x, r: (2 * r.logits, r.weights, r.indices)},
    ]
    for change in wrong:
        changed = dataclasses.replace(family, **change)
        monkeypatch.setitem(FAMILIES, key, changed)  # type: ignore[arg-type]
        ours, theirs, report = pair("qwen3_moe", experts=False)
        assert not report.replaced and str(report).count("computes something else") == 1, report
        assert type(ours.model.layers[0].mlp) is type(theirs.model.layers[0].mlp)
    assert len(mo.hf.replace(ours, check=False).replaced) == 2


def test_hooks_of_others_are_heeded(log: pytest.LogCaptureFixture) -> None:
    ours, theirs, _ = pair("qwen3_moe")
    assert_alike(ours, theirs)
    assert not log.records
    seen = []
    handle = ours.model.layers[0].mlp.experts.register_forward_hook(lambda module, args, y: seen.append(y))
    for _ in range(2):
        assert_alike(ours, theirs)
    assert len(seen) == 2
    assert (
        len(log.records) == 1 and "Qwen3MoeSparseMoeBlock runs as transformers has it: its part 'experts'" in log.text
    )
    fresh = copy.deepcopy(theirs)
    fresh.model.layers[1].mlp.gate.register_forward_pre_hook(lambda module, args: None)
    report = mo.hf.replace(fresh, experts=False)
    assert report.replaced == ["model.layers.0.mlp"] and "'gate' has hooks" in str(report)
    handle.remove()


def test_parts_that_change_are_heeded(log: pytest.LogCaptureFixture) -> None:
    """As adapters do: a layer of the shared expert becomes one with something added."""

    class Adapted(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + x.sum(-1, keepdim=True)

    ours, theirs, _ = pair("qwen2_moe")
    for model in (ours, theirs):
        model.model.layers[0].mlp.shared_expert.up_proj.__class__ = Adapted
    assert_alike(ours, theirs)
    assert "'shared_expert.up_proj' has become a Adapted" in log.text
    again = copy.deepcopy(theirs)  # replaced after that, the shared expert runs beside the layer
    report = mo.hf.replace(again)
    assert len(report.replaced) == 2 and "its own shared expert" in str(report)
    assert_alike(again, theirs)


def test_a_router_is_told_and_can_be_asked(log: pytest.LogCaptureFixture) -> None:
    ours, theirs, _ = pair("mixtral")
    seen: list[Any] = []
    for model in (ours, theirs):
        model.model.layers[0].mlp.gate.register_forward_hook(lambda module, args, result: seen.append((args, result)))
        model(tokens())
    (_, found), (_, wanted) = seen
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    for model in (ours, theirs):  # a hook may also put something else in the place of what was found
        model.model.layers[1].mlp.gate.register_forward_hook(lambda module, args, r: (r[0], 0.5 * r[1], r[2]))
    assert_alike(ours, theirs)
    assert "changes what that found" in log.text
    x = torch.randn(5, tiny_models.HIDDEN)
    for a, b in zip(ours.model.layers[0].mlp.gate(x), theirs.model.layers[0].mlp.gate(x), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_hook_that_writes_to_what_the_router_found(mode: Any) -> None:
    """As who takes an expert away does it; the block's own forward hears of it, and from then on alone."""
    ours, theirs, _ = pair("qwen3_moe")
    calls: list[torch.Tensor] = []

    def ablate(module: Any, args: Any, result: Any) -> None:
        calls.append(result[1])
        result[1].masked_fill_(result[2] == 3, 0.0)

    with mode():
        before = theirs(tokens()).logits
        for model in (ours, theirs):
            for layer in model.model.layers:
                layer.mlp.gate.register_forward_hook(ablate)
        assert_alike(ours, theirs)
        assert (theirs(tokens()).logits - before).abs().max() > 1e-2
        calls.clear()
        ours(tokens())
    assert len(calls) == len(ours.model.layers)


@pytest.mark.parametrize("family", ["mixtral", "minimax"])
def test_noise_is_drawn_once_whatever_hooks_do(family: str) -> None:
    ours, theirs, _ = pair(family)
    results = []
    for model in (ours, theirs):
        model.train()
        for layer in model.model.layers:
            layer.mlp.jitter_noise = 0.1
            layer.mlp.gate.register_forward_hook(lambda module, args, r: (r[0], 0.5 * r[1], r[2]))
        torch.manual_seed(6)
        results.append([model(tokens()).logits for _ in range(2)])
        assert all(layer.mlp.jitter_noise == 0.1 for layer in model.model.layers)
    for found, wanted in zip(*results, strict=True):
        assert wanted.any()
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_numbers_that_change_are_heeded(log: pytest.LogCaptureFixture) -> None:
    """What a block was read from: the layer would go on with the old ones."""

    def change(family: str, path: str, name: str, value: Any) -> None:
        ours, theirs, _ = pair(family)
        assert_alike(ours, theirs)
        before = theirs(tokens()).logits
        for model in (ours, theirs):
            part = model.model.layers[1].mlp.get_submodule(path)
            assert hasattr(part, name)
            setattr(part, name, value)
        assert_alike(ours, theirs)
        assert (theirs(tokens()).logits - before).abs().max() > 1e-4
        assert f".{name} is {value!r}, and was" in log.text

    change("qwen3_moe", "gate", "top_k", 1)
    change("qwen3_moe", "gate", "norm_topk_prob", True)
    change("gpt_oss", "experts", "limit", 0.01)


def test_calls_as_a_block_takes_them() -> None:
    ours, theirs, _ = pair("qwen3_moe")
    x = torch.randn(1, 7, tiny_models.HIDDEN)
    blocks = [m.model.layers[0].mlp for m in (ours, theirs)]
    torch.testing.assert_close(blocks[0](hidden_states=x), blocks[1](hidden_states=x), rtol=1e-4, atol=1e-5)
    for block in blocks:
        for args, kwargs in (((), {}), ((x, x), {}), ((x,), {"foo": 1})):
            with pytest.raises(TypeError):
                block(*args, **kwargs)


@pytest.mark.parametrize("family", ["qwen2_moe", "nemotron_h"])
def test_whatever_torch_makes_by_default(family: str) -> None:
    theirs = tiny_models.build(family)
    ours = copy.deepcopy(theirs)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            report = mo.hf.replace(ours)
    finally:
        torch.set_default_dtype(torch.float32)
    assert report.replaced and not report.left, report
    assert_alike(ours, theirs)


def test_what_the_table_does_not_have() -> None:
    from transformers import PhimoeConfig, PhimoeForCausalLM
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    class Own(MixtralSparseMoeBlock):
        pass

    model = tiny_models.build("mixtral")
    model.model.layers[1].mlp.__class__ = Own
    theirs = copy.deepcopy(model)
    report = mo.hf.replace(model)
    assert [(b.name, b.replaced) for b in report.blocks] == [
        ("model.layers.0.mlp", "block"),
        ("model.layers.1.mlp", ""),
        ("model.layers.1.mlp.experts", "experts"),
    ]
    assert report.left == ["model.layers.1.mlp"] and "no family of the table has it" in str(report)
    assert_alike(model, theirs)

    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = PhimoeConfig(**sizes, vocab_size=37, num_key_value_heads=1, num_local_experts=4)
    phimoe: Any = PhimoeForCausalLM(config).eval()
    theirs = copy.deepcopy(phimoe)
    report = mo.hf.replace(phimoe)
    assert WITHOUT["phimoe"] in str(report) and report.replaced == ["model.layers.0.mlp.experts"]
    assert_alike(phimoe, theirs)
    assert mo.hf.replace(copy.deepcopy(theirs), experts=False).replaced == []


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(InputTypeError, match=r"takes a torch.nn.Module, found str"):
        mo.hf.replace("mixtral")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="backend"):
        mo.hf.replace(torch.nn.Linear(1, 1), backend="gpu")
    assert "no sparse module" in str(mo.hf.replace(torch.nn.Linear(1, 1)))


def _sharded(rank: int, store: str) -> None:
    """Runs in a process of its own."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    theirs = tiny_models.build("qwen2_moe")
    theirs(tokens()).logits.square().mean().backward()
    for sharded in ("", "mlp", "mlp.experts"):
        ours = copy.deepcopy(theirs)
        ours.zero_grad()
        report = mo.hf.replace(ours, check=False)
        plans = [layer.mlp._moesaic_block for layer in ours.model.layers]
        for layer in ours.model.layers:
            fully_shard(layer.get_submodule(sharded), mesh=mesh)
        fully_shard(ours, mesh=mesh)
        assert_alike(ours, theirs)
        ours(tokens()).logits.square().mean().backward()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=1e-3, atol=1e-5)
        # Experts that are sharded on their own are called as they are.
        assert all((p.layers["moe"].backend == "auto") == (sharded == "mlp.experts") for p in plans)
        if sharded == "mlp":
            with pytest.raises(InputError, match="restore before sharding"):
                report.restore()
    assert "spread over devices" in str(mo.hf.replace(_sharded_block(theirs, mesh)))
    dist.destroy_process_group()


def _sharded_block(model: Any, mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    made = copy.deepcopy(model)
    fully_shard(made, mesh=mesh)
    return made


def test_sharded(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(_sharded, args=(str(tmp_path / "store"),), nprocs=1, start_method="fork")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "family", [*SOME, "mixtral", "deepseek_v4", "ernie4_5_moe", "inkling", "nemotron_h", "step3p7"]
)
def test_on_a_gpu(family: str) -> None:
    from hf_replace import compare, compare_rounded

    compare(family, device="cuda")
    compare_rounded(family, device="cuda")

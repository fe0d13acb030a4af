"""`mo.nn`: layers as modules: parameters and their names, types, checkpoints of transformers, tracking, wrapping."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import os
import pickle
import socket
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import moesaic as mo
from moesaic.ir.errors import InputError

E, H, INNER, K = 5, 24, 16, 3
ROUTER = mo.Router(E, K, score="sigmoid", selection_bias=True, renormalize=True, losses={"z": mo.ZLoss(coef=0.01)})
BIASED = mo.MoE(ROUTER, mo.Experts(E, H, INNER), shared=mo.SharedExpert(20, gate=True))
LEARNED = mo.MoE(
    mo.Router(E, K, gate_bias=True, expert_scale=True, router_scale=True), mo.Experts(E, H, INNER, bias=True)
)


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, H, generator=torch.Generator().manual_seed(seed))


def layer_of(moe: mo.MoE, **options: Any) -> Any:
    torch.manual_seed(1)
    return mo.nn.MoELayer(moe, std=0.3, **options)


def test_parameters_have_the_names_of_inputs() -> None:
    layer = layer_of(BIASED)
    assert {n: tuple(p.shape) for n, p in layer.named_parameters()} == {
        "gate_weight": (E, H),
        "gate_up_proj": (E, 2 * INNER, H),
        "down_proj": (E, H, INNER),
        "shared_gate_up_proj": (40, H),
        "shared_down_proj": (H, 20),
        "shared_gate": (1, H),
    }
    assert [n for n, _ in layer.named_buffers()] == ["bias"]
    learned = layer_of(LEARNED)
    assert {"gate_bias", "expert_scale", "router_scale", "gate_up_proj_bias", "down_proj_bias"} <= {
        n for n, _ in learned.named_parameters()
    }
    assert learned.expert_scale.eq(1).all() and not learned.gate_bias.any() and learned.down_proj.std() > 0.2
    assert "experts=5, top_k=3, hidden=24" in repr(layer)


def test_it_computes_what_is_declared() -> None:
    layer, x = layer_of(BIASED), rows(2, 7)
    found = layer(x)
    own = dict(layer.named_parameters())
    wanted = mo.compile(BIASED)(x, *(own[n] for n in BIASED.parameters), bias=layer.bias)
    assert torch.equal(found.hidden, wanted.hidden)
    assert list(found.losses) == ["z"]
    masked = layer(x, token_mask=torch.zeros(2, 7, dtype=torch.bool))
    assert not masked.counts.any()


@pytest.mark.parametrize("moe", [BIASED, LEARNED], ids=["biased", "learned"])
def test_what_a_router_learns_stays_float32(moe: mo.MoE) -> None:
    layer = layer_of(moe)
    state = {"bias"} if moe is BIASED else {"gate_bias", "expert_scale", "router_scale"}
    with torch.no_grad():
        for name in state:
            getattr(layer, name).uniform_(0.1, 0.2)  # numbers that bf16 does not have
    before = {n: getattr(layer, n).clone() for n in state}
    layer = layer.to(torch.bfloat16)
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        assert tensor.dtype == (torch.float32 if name in state else torch.bfloat16), name
    assert all(torch.equal(getattr(layer, n), before[n]) for n in state)
    assert layer(rows(6).bfloat16()).hidden.dtype == torch.bfloat16
    assert layer.half().float().gate_weight.dtype == torch.float32


def test_made_without_memory() -> None:
    layer = layer_of(LEARNED, device="meta", dtype=torch.bfloat16)
    assert layer.gate_weight.is_meta
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert layer(rows(6).bfloat16()).hidden.isfinite().all()


def test_copies_pickles_and_states() -> None:
    layer, x = layer_of(BIASED), rows(7)
    layer.bias.uniform_(-0.1, 0.1)
    wanted = layer(x).hidden
    other = mo.nn.MoELayer(BIASED)
    other.load_state_dict(layer.state_dict())
    for same in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), other):
        assert torch.equal(same(x).hidden, wanted)


BLOCKS: dict[str, tuple[str, str, dict[str, Any], mo.MoE, dict[str, str]]] = {
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeSparseMoeBlock",
        {"num_experts": 8, "shared_expert_intermediate_size": 10},
        mo.MoE(mo.Router(8, 3), mo.Experts(8, 20, 6), shared=mo.SharedExpert(10, gate=True)),
        {"shared": "shared_expert"},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3MoE",
        {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 2},
        mo.MoE(
            mo.Router.preset("deepseek_v3", num_experts=8, top_k=3, groups=4, groups_kept=2),
            mo.Experts(8, 20, 6),
            shared=mo.SharedExpert(12, separate=True),
        ),
        {},
    ),
}


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("model", BLOCKS)
def test_checkpoints_of_transformers(model: str) -> None:
    """Into ours and back, name by name, inside of a larger module too."""
    config, kind, options, moe, names = BLOCKS[model]
    parts = [importlib.import_module(f"transformers.models.{model}.{p}_{model}") for p in ("configuration", "modeling")]
    sizes = {"num_experts_per_tok": 3, "hidden_size": 20, "moe_intermediate_size": 6}
    block = getattr(parts[1], kind)(getattr(parts[0], config)(**sizes, **options)).eval()
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in (*block.parameters(), *block.buffers()):
            tensor.copy_(0.5 * torch.randn(tensor.shape, generator=g))
    x = torch.randn(2, 7, 20, generator=g)
    model_of_ours = torch.nn.ModuleDict({"mlp": mo.nn.MoELayer(moe)})
    model_of_ours.load_state_dict({f"mlp.{n}": t for n, t in block.state_dict().items()})
    layer: Any = model_of_ours["mlp"]
    torch.testing.assert_close(layer(x).hidden, block(x), rtol=1e-4, atol=1e-5)

    other = getattr(parts[1], kind)(
        block.config if hasattr(block, "config") else getattr(parts[0], config)(**sizes, **options)
    )
    other.load_state_dict(layer.hf_state_dict(**names))
    torch.testing.assert_close(other.eval()(x), block(x), rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["reference", pytest.param("emulate", marks=pytest.mark.emulate)])
def test_in_one_graph(backend: str) -> None:
    layer = layer_of(BIASED, backend=backend)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (7, 11):
        layer.zero_grad()
        plain = layer(rows(tokens))
        plain.hidden.square().sum().backward()
        wanted = {n: p.grad.clone() for n, p in layer.named_parameters()}
        layer.zero_grad()
        found = compiled(rows(tokens))
        found.hidden.square().sum().backward()
        torch.testing.assert_close(found.hidden, plain.hidden, rtol=1e-5, atol=1e-5)
        for name, parameter in layer.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-4, msg=name)


def test_gradients_only_where_asked() -> None:
    """Frozen experts, with an adapter on the result of one of their products' inputs: a router that trains alone."""
    layer = layer_of(BIASED)
    for name in ("gate_up_proj", "down_proj"):
        getattr(layer, name).requires_grad_(False)
    x = rows(7).requires_grad_()
    layer(x).hidden.square().sum().backward()
    assert layer.gate_up_proj.grad is None and layer.down_proj.grad is None
    assert layer.gate_weight.grad.any() and layer.shared_gate.grad.any() and x.grad is not None and x.grad.any()

    low_rank = [torch.zeros(E, 2 * INNER, 2).requires_grad_(), rows(E, 2).requires_grad_()]
    own = {n: getattr(layer, n) for n in (*BIASED.parameters, "bias")}
    own["gate_up_proj"] = layer.gate_up_proj + low_rank[0] @ low_rank[1]
    mo.compile(BIASED)(rows(7), **own).hidden.square().sum().backward()
    assert low_rank[0].grad is not None and low_rank[0].grad.any()


def test_main_grads() -> None:
    layer, plain = layer_of(BIASED, main_grads=True), layer_of(BIASED)
    for name in ("gate_up_proj", "down_proj", "gate_weight"):
        getattr(layer, name).main_grad = torch.zeros(getattr(layer, name).shape)
    for seed in (1, 2):
        for module in (layer, plain):
            module(rows(7, seed=seed)).hidden.square().sum().backward()
    for name, parameter in layer.named_parameters():
        wanted = dict(plain.named_parameters())[name].grad
        held = getattr(parameter, "main_grad", None)
        assert (parameter.grad is None) == (held is not None), name
        torch.testing.assert_close(parameter.grad if held is None else held, wanted, rtol=1e-4, atol=1e-5)


def test_a_tracker_counts_once_and_moves_biases() -> None:
    model = torch.nn.ModuleDict({"first": layer_of(BIASED), "second": layer_of(BIASED)})
    tracker = mo.nn.LoadTracker(model)
    assert list(tracker) == ["first", "second"]
    first: Any = model["first"]
    expected = first(rows(9)).counts
    tracker.reset()
    for again in range(2):
        x = rows(9).requires_grad_()
        checkpoint(lambda t: first(t).hidden, x, use_reentrant=False).sum().backward()
        assert torch.equal(tracker.counts["first"], (again + 1) * expected)  # once each, though computed twice
    assert not tracker.counts["second"].any() and [n.item() for n in tracker.passes.values()] == [2, 0]
    tracked = tracker.losses["first"]["z"].clone()
    torch.testing.assert_close(tracked, 2 * first.eval()(rows(9)).losses["z"])
    first.train()
    counts = tracker.counts["first"].clone()
    assert tracker.metrics()["first"].max == counts.max()

    before = first.bias.clone()
    tracker.update_biases(1e-2)
    moved = first.bias - before
    assert moved.any() and torch.equal(moved.argmax(), counts.argmin())
    assert not tracker.counts["first"].any() and not tracker.losses["first"]["z"].any()
    tracker.close()
    first(rows(9))
    assert not tracker.counts["first"].any()

    with pytest.raises(InputError, match="Linear has no MoELayer"):
        mo.nn.LoadTracker(torch.nn.Linear(2, 2))
    with pytest.raises(InputError, match="layer 'only' does not put out counts"):
        mo.nn.LoadTracker(torch.nn.ModuleDict({"only": layer_of(replace(BIASED, outputs=("hidden",)))}))


def test_it_learns() -> None:
    """A layer learns what another one computes; balancing losses and accumulation included."""
    teacher, student = layer_of(BIASED), mo.nn.MoELayer(BIASED, std=0.2)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
    seen = []
    for step in range(60):
        total = 0.0
        for half in (0, 1):
            x = rows(32, seed=2 * (step % 4) + half)
            result = student(x)
            error = (result.hidden - teacher(x).hidden.detach()).square().mean()
            (error + result.losses["z"]).backward()
            total += error.item()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(total)
    assert sum(seen[-4:]) < 0.3 * sum(seen[:4])


def _wrapped(rank: int, port: int) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        alone = layer_of(BIASED)
        for seed in (0, 1):
            (alone(rows(6, seed=seed)).hidden.square().sum() / 2).backward()
        wanted = {n: p.grad for n, p in alone.named_parameters()}

        parallel: Any = DistributedDataParallel(layer_of(BIASED))
        parallel(rows(6, seed=rank)).hidden.square().sum().backward()
        for name, parameter in parallel.module.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-5)

        sharded: Any = fully_shard(torch.nn.Sequential(layer_of(BIASED)))
        sharded(rows(6, seed=rank)).hidden.square().sum().backward()
        for name, parameter in sharded.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), wanted[name[2:]], rtol=1e-4, atol=1e-5)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_data_parallel_and_sharded() -> None:
    """Two processes with half of the tokens each: DDP, and FSDP2."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(_wrapped, args=(port,), nprocs=2, start_method="fork")

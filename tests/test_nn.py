"""`mo.nn`: layers as modules: parameters and their names, types, checkpoints of transformers, tracking, wrapping."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import pickle
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import parallel_layers
import pytest
import torch
from parallel_layers import BIASED, INNER, E, H, K, layer_of, rows
from routing import BACKENDS, device_of
from torch.utils.checkpoint import checkpoint

import moesaic as mo
from moesaic.ir.errors import InputError, InputTypeError

LEARNED = mo.MoE(
    mo.Router(E, K, gate_bias=True, expert_scale=True, router_scale=True), mo.Experts(E, H, INNER, bias=True)
)


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
    assert learned.router_scale.shape == (1,)  # FSDP2 refuses those without a dimension
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


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_checkpoints_whatever_the_layout(separate: bool, interleaved: bool, transposed: bool) -> None:
    """A shared expert's matrices in a checkpoint are those of three linear modules."""
    if separate and interleaved:
        pytest.skip("there is nothing to alternate")
    plain = layer_of(mo.MoE(mo.Router(8, 3), mo.Experts(8, H, INNER), shared=mo.SharedExpert(10)))
    shared = mo.SharedExpert(10, separate=separate, interleaved=interleaved, transposed=transposed)
    layer = mo.nn.MoELayer(replace(plain.moe, shared=shared))
    theirs = plain.hf_state_dict()
    assert {n: tuple(t.shape) for n, t in theirs.items() if n.startswith("shared")} == {
        "shared_experts.gate_proj.weight": (10, H),
        "shared_experts.up_proj.weight": (10, H),
        "shared_experts.down_proj.weight": (H, 10),
    }
    layer.load_state_dict(dict(theirs))
    wanted = plain(rows(7)).hidden
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(layer(rows(7)).hidden, wanted, rtol=1e-5, atol=1e-5)
    back = layer.hf_state_dict()
    assert back.keys() == theirs.keys() and all(torch.equal(back[n], theirs[n]) for n in theirs)


@pytest.mark.parametrize("assign", [False, True])
def test_checkpoints_in_bf16(assign: bool) -> None:
    """What a router learns is float32 afterwards, too, and can be moved."""
    moe = replace(LEARNED, router=replace(LEARNED.router, selection_bias=True))
    layer = layer_of(moe, dtype=torch.bfloat16)
    narrow = {n: t.bfloat16() for n, t in layer.hf_state_dict().items()}
    narrow["gate.e_score_correction_bias"] = narrow["gate.e_score_correction_bias"][None]  # as ernie has it
    narrow["gate.moe_statics.e_score_correction_bias"] = narrow.pop("gate.e_score_correction_bias")
    other = mo.nn.MoELayer(moe, dtype=torch.bfloat16)
    tracker = mo.nn.LoadTracker(other)
    other.load_state_dict(narrow, assign=assign)
    for name in ("bias", "gate_bias", "expert_scale", "router_scale"):
        assert getattr(other, name).dtype == torch.float32 and getattr(other, name).shape == getattr(layer, name).shape
    other(rows(9).bfloat16())
    tracker.update_biases(1e-3)
    assert other.bias.any()
    with pytest.raises(RuntimeError, match="size mismatch for bias"):
        other.load_state_dict({**layer.state_dict(), "bias": torch.zeros(3)})


def test_gradients_move_with_what_stays_float32() -> None:
    layer = layer_of(LEARNED)
    layer(rows(9)).hidden.square().sum().backward()
    wanted = {n: p.grad.clone() for n, p in layer.named_parameters()}
    layer.bfloat16()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.dtype == parameter.dtype
        assert torch.equal(parameter.grad, wanted[name].to(parameter.dtype)) and parameter.grad.any()
    torch.optim.AdamW(layer.parameters(), foreach=True).step()


def test_what_a_layer_does_not_take() -> None:
    with pytest.raises(InputTypeError, match=r"MoELayer takes a moesaic\.MoE, found Router"):
        mo.nn.MoELayer(mo.Router(4, 2))
    layer = layer_of(BIASED)
    for name in ("bias", "gate_weight"):
        with pytest.raises(InputError, match=f"the layer has a {name} of its own"):
            layer(rows(3), **{name: torch.zeros(E)})


@pytest.mark.emulate
def test_in_one_graph() -> None:
    layer = layer_of(BIASED, backend="emulate")
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


class LowRank(torch.nn.Module):
    """W + B A of each expert, for ``torch.nn.utils.parametrize``."""

    def __init__(self, weight: torch.Tensor, rank: int) -> None:
        super().__init__()
        experts, outer, inner = weight.shape
        self.a = torch.nn.Parameter(0.1 * rows(experts, rank)[..., :inner])
        self.b = torch.nn.Parameter(torch.zeros(experts, outer, rank))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.b @ self.a


def test_gradients_only_where_asked() -> None:
    """Frozen experts under a router that trains, and then with an adapter on one of their matrices."""
    layer, whole = layer_of(BIASED), layer_of(BIASED)
    whole(rows(7)).hidden.square().sum().backward()
    for name in ("gate_up_proj", "down_proj"):
        getattr(layer, name).requires_grad_(False)
    x = rows(7).requires_grad_()
    layer(x).hidden.square().sum().backward()
    assert layer.gate_up_proj.grad is None and layer.down_proj.grad is None and x.grad is not None and x.grad.any()
    for name in ("gate_weight", "shared_gate", "shared_down_proj"):
        torch.testing.assert_close(getattr(layer, name).grad, getattr(whole, name).grad)

    layer.zero_grad()
    adapter = LowRank(layer.gate_up_proj, 2)
    torch.nn.utils.parametrize.register_parametrization(layer, "gate_up_proj", adapter)
    assert torch.equal(layer(rows(7)).hidden, whole(rows(7)).hidden)  # B is 0 at first
    layer(rows(7)).hidden.square().sum().backward()
    torch.testing.assert_close(adapter.b.grad, whole.gate_up_proj.grad @ adapter.a.mT, rtol=1e-4, atol=1e-5)
    assert layer.parametrizations.gate_up_proj.original.grad is None and layer.down_proj.grad is None
    learned = {n for n, p in layer.named_parameters() if p.grad is not None}
    assert {n.rpartition(".")[2] for n in learned if n.startswith("param")} == {"a", "b"} and "gate_weight" in learned


@pytest.mark.parametrize("backend", ["reference", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_checkpointing_picks_alike(backend: str) -> None:
    """All logits are equal, so that anything could be picked: 20 times the same as without checkpointing."""
    moe = mo.MoE(mo.Router(8, 3, losses={"z": mo.ZLoss()}), mo.Experts(8, H, INNER), outputs=("hidden", "indices"))
    layer = layer_of(moe, backend=backend).to(device_of(backend))
    with torch.no_grad():
        layer.gate_weight.zero_()
    picked: list[torch.Tensor] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        result = layer(x)
        picked.append(result.indices)
        return result.hidden + result.losses["z"]

    def gradients(again: bool) -> list[torch.Tensor]:
        layer.zero_grad()
        x = rows(64).to(device_of(backend)).requires_grad_()
        hidden = checkpoint(body, x, use_reentrant=False) if again else body(x)
        hidden.square().sum().backward()
        return [x.grad, *(p.grad.clone() for p in layer.parameters())]

    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        wanted = gradients(False)
        assert all(g.isfinite().all() for g in wanted) and wanted[0].any()
        for _ in range(20):
            assert all(map(torch.equal, gradients(True), wanted))
    assert len(picked) == 41 and all(torch.equal(p, picked[0]) for p in picked)
    assert picked[0].tolist() == [[0, 1, 2]] * 64


def test_autocast() -> None:
    """Operands of products are bf16, what a router computes is float32, gradients have their parameters' type."""
    layer, x = layer_of(LEARNED), rows(9)
    narrow = copy.deepcopy(layer).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = layer(x)
    wanted = narrow(x.bfloat16())
    assert result.hidden.dtype == torch.bfloat16 and torch.equal(result.hidden, wanted.hidden)
    result.hidden.float().square().sum().backward()
    wanted.hidden.float().square().sum().backward()
    for (name, parameter), other in zip(layer.named_parameters(), narrow.parameters(), strict=True):
        assert parameter.grad.dtype == torch.float32, name
        assert parameter.grad.any() and torch.equal(parameter.grad.to(other.dtype), other.grad), name


def test_accumulation() -> None:
    """Gradients of two halves of the tokens add up to those of all, in the parameters, in main grads, and both."""
    whole, halves, mains = layer_of(BIASED), layer_of(BIASED), layer_of(BIASED, main_grads=True)
    for name in BIASED.parameters:
        getattr(mains, name).main_grad = torch.zeros(getattr(mains, name).shape)
    x = rows(10)
    whole(x).hidden.square().sum().backward()
    for half in (x[:6], x[6:]):
        for layer in (halves, mains):
            layer(half).hidden.square().sum().backward()
    for name, parameter in whole.named_parameters():
        assert getattr(mains, name).grad is None
        for found in (getattr(halves, name).grad, getattr(mains, name).main_grad):
            torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_share_a_layer(backend: str) -> None:
    """Forward and backward of different inputs at once."""
    layer = layer_of(BIASED, backend=backend).to(device_of(backend))

    def work(number: int) -> list[torch.Tensor]:
        x = rows(3 + number, seed=number).to(device_of(backend)).requires_grad_()
        hidden = layer(x).hidden
        return [hidden.detach(), *torch.autograd.grad(hidden.square().sum(), [x, layer.gate_weight, layer.down_proj])]

    wanted = [work(number) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for found, right in zip(pool.map(work, range(4)), wanted, strict=True):
                for a, b in zip(found, right, strict=True):
                    assert b.any()
                    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_to_a_gpu_and_back() -> None:
    layer = layer_of(BIASED)
    layer.bias.uniform_(0.1, 0.2)
    wanted, bias = layer(rows(7)).hidden, layer.bias.clone()
    layer = layer.to("cuda", torch.bfloat16)
    assert layer.bias.is_cuda and layer.bias.dtype == torch.float32 and torch.equal(layer.bias.cpu(), bias)
    torch.testing.assert_close(layer(rows(7).cuda().bfloat16()).hidden.float().cpu(), wanted, rtol=0.1, atol=0.05)
    assert torch.equal(layer.to("cpu").bias, bias)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_layers_on_several_gpus() -> None:
    """Each runs where its parameters are, whatever the current device: one after the other, and by threads at once."""
    layer, wanted = layer_of(BIASED), []
    for number in range(2):
        here = copy.deepcopy(layer).to(f"cuda:{number}")
        x = rows(7).to(f"cuda:{number}").requires_grad_()
        hidden = here(x).hidden
        hidden.square().sum().backward()
        assert hidden.device == x.device
        wanted.append([hidden.detach().cpu(), x.grad.cpu(), here.gate_up_proj.grad.cpu()])
    assert all(torch.equal(a, b) for a, b in zip(*wanted, strict=True))
    replicas = torch.nn.parallel.replicate(layer.cuda(), [0, 1])
    found = torch.nn.parallel.parallel_apply(replicas, [(rows(7).to(f"cuda:{i}"),) for i in range(2)])
    for result in found:
        torch.testing.assert_close(result.hidden.cpu(), wanted[0][0])


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


def test_copies_count_for_nobody(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"a": layer_of(BIASED)})
    with torch.inference_mode():
        tracker = mo.nn.LoadTracker(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    wanted = model["a"](rows(9)).counts
    for other in (copy.deepcopy(model), loaded, pickle.loads(pickle.dumps(model))):
        assert torch.equal(other["a"](rows(9)).counts, wanted)
    assert tracker.passes["a"].item() == 1 and torch.equal(tracker.counts["a"], wanted.long()) and wanted.any()
    assert {loss.dtype for loss in tracker.losses["a"].values()} == {torch.float32}


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


@pytest.mark.slow
def test_data_parallel_and_sharded() -> None:
    """Two processes, started anew, with half of the tokens each: DDP, and FSDP2."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(parallel_layers.data_parallel, args=(port,), nprocs=2, start_method="spawn")


def test_in_a_forked_process() -> None:
    """It finds what was made before, threads and locks as they were; those above are spawned and find nothing."""
    layer = layer_of(BIASED)
    context = torch.multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    x = rows(7).requires_grad_()
    hidden = layer(x).hidden
    hidden.square().sum().backward()
    wanted = [t.detach().clone() for t in (hidden, x.grad, layer.gate_up_proj.grad)]
    layer.zero_grad()
    process = context.Process(target=parallel_layers.run_once, args=(layer, found))
    process.start()
    results = found.get()
    process.join(timeout=60)
    assert process.exitcode == 0
    for a, b in zip(results, wanted, strict=True):
        torch.testing.assert_close(torch.from_numpy(a), b, rtol=1e-4, atol=1e-5)  # fewer threads add up in other orders

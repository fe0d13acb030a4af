"""`mo.nn.MoELayer` inside of models: torch.compile and torch.export of the whole, and CUDA graphs of whole steps.

Each is compared with the same model run plainly; what a layer computes is tested elsewhere.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from routing import COMPILED, device_of
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import moesaic as mo

# Layers of test_nn.py and of test_moe.py, whose kernels are built once for all.
E, H, INNER, K, LAYERS = 5, 24, 16, 3, 3
SIGMOID = mo.Router(E, K, score="sigmoid", selection_bias=True, renormalize=True, losses={"z": mo.ZLoss(coef=0.01)})
BIASED = mo.MoE(SIGMOID, mo.Experts(E, H, INNER), shared=mo.SharedExpert(20, gate=True))
LOSSES = {"balance": mo.LoadBalance(coef=0.1), "z": mo.ZLoss(coef=0.01)}
SOFTMAX = mo.MoE(mo.Router(E, K, renormalize=True, losses=LOSSES), mo.Experts(E, H, INNER))

backends = pytest.mark.parametrize("backend", COMPILED)


class Block(nn.Module):
    """A layer, and around it what has no experts."""

    def __init__(self, moe: mo.MoE, backend: str) -> None:
        super().__init__()
        self.norm, self.mix = nn.RMSNorm(H), nn.Linear(H, H, bias=False)
        self.mlp = mo.nn.MoELayer(moe, std=0.3, backend=backend)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.mix(self.norm(x)).tanh()
        result = self.mlp(self.norm(x))
        return x + result.hidden, sum(result.losses.values())


class Model(nn.Module):
    """Two equal layers and one of another kind; gives the last hidden states and the sum of all losses."""

    def __init__(self, backend: str, *, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(Block(SOFTMAX if i == 1 else BIASED, backend) for i in range(LAYERS))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        losses = []
        for block in self.blocks:
            if self.recompute:  # nothing is random here, and a capture may not ask for the generator's state
                x, loss = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x, loss = block(x)
            losses.append(loss)
        return x, torch.stack(losses).sum()


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def rows(tokens: int, device: str, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, H, generator=torch.Generator().manual_seed(seed + 100 * tokens)).to(device)


def trained(
    model: Model, x: torch.Tensor, run: Callable[[torch.Tensor], Any] | None = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Hidden states, the losses, and the gradients of x and of all parameters."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    hidden, losses = (model if run is None else run)(x)
    sent = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(9)).to(x.device)
    ((hidden * sent).sum() + 3 * losses).backward()
    assert x.grad is not None
    gradients = {"x": x.grad} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == 1 + len(list(model.parameters())) and all(g.any() for g in gradients.values())
    return hidden.detach(), losses.detach(), gradients


def assert_alike(found: Any, wanted: Any) -> None:
    for a, b in zip(found[:2], wanted[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    for name, gradient in wanted[2].items():
        allowed = 1e-4 * gradient.abs().max().item()
        torch.testing.assert_close(found[2][name], gradient, rtol=0, atol=allowed, msg=lambda m, n=name: f"{n}: {m}")


# torch.compile --------------------------------------------------------------------------------------------------------


@backends
def test_one_graph_for_any_number_of_tokens(backend: str) -> None:
    """Forward and backward of the whole model: nothing breaks, and no number of tokens compiles anew. Inference is a
    graph of its own."""
    device = device_of(backend)
    model = Model(backend).to(device)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (5, 6, 31):
        x = rows(tokens, device)
        assert_alike(trained(model, x, compiled), trained(model, x))
    assert counters["stats"]["unique_graphs"] == counters["aot_autograd"]["ok"] == 1
    with torch.no_grad():
        for tokens in (5, 9, 33):
            x = rows(tokens, device)
            torch.testing.assert_close(compiled(x)[0], model(x)[0])
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]


@backends
def test_a_tracker_counts_in_one_graph(backend: str) -> None:
    """Also what checkpointing repeats, once; and a second micro-batch finds the graph of the first."""
    device = device_of(backend)
    model = Model(backend, recompute=True).to(device)
    tracker = mo.nn.LoadTracker(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    found = []
    for run in (compiled, model):
        tracker.reset()
        for tokens in (7, 11):
            trained(model, rows(tokens, device), run)
        found.append(
            [
                *(counts.tolist() for counts in tracker.counts.values()),
                *(passes.item() for passes in tracker.passes.values()),
                *(f"{loss.item():.5f}" for losses in tracker.losses.values() for loss in losses.values()),
            ]
        )
    assert found[0] == found[1] and found[0][LAYERS] == 2 and sum(found[0][0]) == (7 + 11) * K
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


# torch.export ---------------------------------------------------------------------------------------------------------


class Inference(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.model(x)[0]
        return hidden


@backends
def test_export_of_inference(backend: str) -> None:
    """The exported program runs any number of tokens, and again from a file; its weights are those of the model."""
    device = device_of(backend)
    model = Inference(Model(backend)).to(device).eval()
    with torch.no_grad():
        exported = torch.export.export(model, (rows(7, device),), dynamic_shapes={"x": {0: torch.export.Dim("T")}})
        file = io.BytesIO()
        torch.export.save(exported, file)
        file.seek(0)
        loaded = torch.export.load(file)
        for program in (exported, loaded):
            assert program.state_dict.keys() == model.state_dict().keys()
            run = program.module()
            for tokens in (7, 2, 130):
                x = rows(tokens, device)
                torch.testing.assert_close(run(x), model(x), rtol=1e-6, atol=1e-6)


# CUDA graphs ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_captured_forward_pass_follows_its_inputs() -> None:
    """Weights and selection biases too: a graph reads them where they are."""
    model = Model("cuda").cuda().eval()
    for block in model.blocks:
        block.mlp.warmup(backward=False)
    x = rows(37, "cuda")
    with torch.no_grad():
        side = torch.cuda.Stream()  # what surrounds the layers needs warming up, too
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            hidden, losses = model(x)
        for seed in (1, 2, 3):
            x.copy_(rows(37, "cuda", seed=seed))
            model.blocks[0].mlp.bias.copy_(0.3 * rows(1, "cuda", seed=seed)[0, :E])
            model.blocks[1].mlp.gate_weight.mul_(0.9)
            hidden.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            wanted = model(x)
            torch.testing.assert_close(hidden, wanted[0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(losses, wanted[1])


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
def test_a_captured_step_trains_like_a_plain_one(recompute: bool) -> None:
    """Forward, backward and the optimizer in one graph, beside a twin that runs the same plainly.

    A tracker counts in replays; its updates of biases, between them, are seen by the next.
    """
    model = Model("cuda", recompute=recompute).cuda()
    tracker = mo.nn.LoadTracker(model)
    options: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "capturable": True}  # a small eps would magnify rounding
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    x, target = rows(37, "cuda"), rows(37, "cuda", seed=50)

    def step(model: Model, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        hidden, losses = model(x)
        loss = (hidden - target).square().mean() + losses
        loss.backward()
        optimizer.step()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(model, optimizer)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()

    twin = Model("cuda", recompute=recompute).cuda()
    twin.load_state_dict(model.state_dict())
    other = torch.optim.AdamW(twin.parameters(), **options)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    watching = mo.nn.LoadTracker(twin)
    tracker.reset()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(model, optimizer)
    assert not any(counts.any() for counts in tracker.counts.values())  # a capture runs nothing
    for seed in range(4):
        x.copy_(rows(37, "cuda", seed=seed))
        target.copy_(rows(37, "cuda", seed=50 + seed))
        graph.replay()
        torch.cuda.synchronize()
        wanted = step(twin, other)
        torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-5)
        for name, counts in tracker.counts.items():
            assert torch.equal(counts, watching.counts[name]) and counts.sum() == 37 * K
        tracker.update_biases(1e-2)
        watching.update_biases(1e-2)
        torch.cuda.synchronize()
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    assert model.blocks[0].mlp.bias.any() and torch.equal(model.blocks[0].mlp.bias, twin.blocks[0].mlp.bias)


@pytest.mark.gpu
def test_cuda_graphs_of_torch_compile() -> None:
    """``mode="reduce-overhead"`` captures what inductor makes of the model, forward and backward."""
    model = Model("cuda").cuda()
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        x = rows(37, "cuda", seed=seed)
        torch.compiler.cudagraph_mark_step_begin()
        hidden, losses, gradients = trained(model, x, compiled)
        found = hidden.clone(), losses.clone(), {n: g.clone() for n, g in gradients.items()}
        assert_alike(found, trained(model, x))

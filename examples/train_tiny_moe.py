"""Trains a small language model with Mixture-of-Experts layers on text that comes with Python, beside plain torch.

    python examples/train_tiny_moe.py                        # 300 steps; minutes on two cores, seconds on a GPU
    python examples/train_tiny_moe.py --steps 1000 --plot training.svg
    python examples/train_tiny_moe.py --hidden 64 --layers 2        # a 10th of the parameters

Two models start from the same weights and see the same text: one with ``mo.nn.MoELayer``, one whose layers are written
as models write them, a loop over experts. Their losses lie on each other; a balance loss and a bias that moves after
every step keep the load even. A GPU is used if there is one.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import moesaic as mo

HEADS, CONTEXT, BATCH = 4, 96, 8
EXPERTS, TOP_K = 8, 2
BALANCE, BIAS_RATE = 3e-2, 1e-2

ROUTER = mo.Router(
    EXPERTS,
    TOP_K,
    score="sigmoid",
    selection_bias=True,
    renormalize=True,
    losses={"balance": mo.LoadBalance(coef=BALANCE)},
)


def layer_of(hidden: int) -> mo.MoE:
    """The layer of a model of that width."""
    return mo.MoE(ROUTER, mo.Experts(EXPERTS, hidden, 3 * hidden // 2), shared=mo.SharedExpert(hidden))


class PlainLayer(nn.Module):
    """The same layer in plain torch, with the parameters of another one."""

    def __init__(self, other: mo.nn.MoELayer) -> None:
        super().__init__()
        for name, parameter in other.named_parameters():
            self.register_parameter(name, nn.Parameter(parameter.detach().clone()))
        self.register_buffer("bias", other.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = x.flatten(0, -2)
        scores = functional.linear(rows, self.gate_weight).float().sigmoid()
        picks = (scores + self.bias).topk(TOP_K).indices
        weights = scores.gather(1, picks)
        weights = weights / weights.sum(-1, keepdim=True)
        y = _swiglu(rows, self.shared_gate_up_proj, self.shared_down_proj)
        for expert in range(EXPERTS):
            token, k = torch.where(picks == expert)
            part = _swiglu(rows[token], self.gate_up_proj[expert], self.down_proj[expert])
            y = y.index_add(0, token, part * weights[token, k, None])
        counts = torch.bincount(picks.flatten(), minlength=EXPERTS)
        share = (scores / scores.sum(-1, keepdim=True)).sum(0)
        loss = BALANCE * EXPERTS / (TOP_K * len(rows) ** 2) * (counts * share).sum()
        return y.view_as(x), counts, loss


def _swiglu(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = functional.linear(x, gate_up).chunk(2, -1)
    return functional.linear(functional.silu(gate) * up, down)


class Block(nn.Module):
    """Attention, then the layer."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.into, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.layer: nn.Module = mo.nn.MoELayer(layer_of(hidden), std=0.8 * hidden**-0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.into(self.norms[0](x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        result = self.layer(self.norms[1](x))
        if hasattr(result, "losses"):
            return x + result.hidden, result.counts, result.losses["balance"]
        y, counts, loss = result
        return x + y, counts, loss


class Model(nn.Module):
    """Bytes in, logits of the next byte out, with the counts and the balance losses of all layers."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.sizes = hidden, layers
        self.embed, self.place = nn.Embedding(256, hidden), nn.Embedding(CONTEXT, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        for table in (self.embed, self.place):
            nn.init.normal_(table.weight, std=0.05)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        counts, losses = [], []
        for block in self.blocks:
            x, count, loss = block(x)
            counts.append(count)
            losses.append(loss)
        return self.norm(x) @ self.embed.weight.T, counts, torch.stack(losses).sum()

    def in_plain_torch(self) -> Model:
        """The same model with plain layers."""
        other = Model(*self.sizes)
        other.load_state_dict(self.state_dict())
        for block in other.blocks:
            block.layer = PlainLayer(block.layer)
        return other


def batches(steps: int, device: str) -> Iterator[torch.Tensor]:
    """Pieces of Python's own documentation, one byte longer than the context."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=generator).tolist()
        yield torch.stack([data[s : s + CONTEXT + 1] for s in starts]).to(device)


def train(model: Model, steps: int, device: str) -> tuple[list[float], list[float], float]:
    """Losses in nats a byte, the largest load over the mean one, and seconds."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    losses, loads = [], []
    start = time.perf_counter()
    for piece in batches(steps, device):
        logits, counts, balance = model(piece[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), piece[:, 1:].flatten())
        (loss + balance).backward()
        optimizer.step()
        optimizer.zero_grad()
        mo.update_bias([b.layer.bias for b in model.blocks], counts, rate=BIAS_RATE)
        losses.append(loss.item())
        loads.append(max((c.max() / c.float().mean()).item() for c in counts))
    return losses, loads, time.perf_counter() - start


def plot(path: Path, curves: dict[str, list[float]]) -> None:
    """Losses over steps as a picture."""
    width, height, top = 640, 320, max(max(c) for c in curves.values())
    steps = len(next(iter(curves.values())))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + 60} {height + 50}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for line in range(6):
        y = height * line / 5 + 10
        parts.append(f'<path d="M40 {y:.0f} H{width + 40}" stroke="#ddd"/>')
        parts.append(f'<text x="4" y="{y + 4:.0f}" font-size="12">{top * (5 - line) / 5:.1f}</text>')
    for number, (name, curve) in enumerate(curves.items()):
        colour, dashes = (("#1f6feb", ""), ("#d29922", "6 6"))[number % 2]
        at = [(40 + width * i / max(steps - 1, 1), 10 + height * (1 - v / top)) for i, v in enumerate(curve)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        style = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"'
        parts.append(f'<polyline points="{points}" {style}/>')
        where = f'x="{60 + 160 * number}" y="{height + 40}"'
        parts.append(f'<text {where} font-size="14" fill="{colour}">{name}</text>')
    parts.append(f'<text x="{width - 150}" y="{height + 40}" font-size="12">nats a byte over {steps} steps</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--hidden", type=int, default=160, help="width of the model (default: 160)")
    parser.add_argument("--layers", type=int, default=4, help="default: 4")
    parser.add_argument("--plot", type=Path, help="write the curves there, as SVG")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    ours = Model(arguments.hidden, arguments.layers)
    plain = ours.in_plain_torch()
    count = sum(p.numel() for p in ours.parameters())
    sizes = f"{arguments.layers} layers of {EXPERTS} experts, {BATCH * CONTEXT} bytes a step"
    print(f"{count:,} parameters, {sizes}, on {device}", flush=True)
    results = {}
    for name, model in (("moesaic", ours), ("plain torch", plain)):
        results[name] = train(model.to(device), arguments.steps, device)
        print(f"{name:12} {results[name][2] / max(arguments.steps, 1) * 1e3:6.1f} ms a step")
    print("step   moesaic   plain torch   largest load over mean")
    (losses, loads, _), (others, _, _) = results.values()
    for step in sorted({round((arguments.steps - 1) * share) for share in (0.0, 0.1, 0.25, 0.5, 1.0)}):
        print(f"{step:4}   {losses[step]:7.4f}   {others[step]:11.4f}   {loads[step]:.2f}")
    if arguments.plot is not None:
        plot(arguments.plot, {name: result[0] for name, result in results.items()})


if __name__ == "__main__":
    main()

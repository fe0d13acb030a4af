"""What processes run that tests of layers start: a module that a fresh interpreter can import."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import moesaic as mo

E, H, INNER, K = 5, 24, 16, 3
BIASED = mo.MoE(
    mo.Router(E, K, score="sigmoid", selection_bias=True, renormalize=True, losses={"z": mo.ZLoss(coef=0.01)}),
    mo.Experts(E, H, INNER),
    shared=mo.SharedExpert(20, gate=True),
)


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, H, generator=torch.Generator().manual_seed(seed))


def layer_of(moe: mo.MoE, **options: Any) -> Any:
    torch.manual_seed(1)
    return mo.nn.MoELayer(moe, std=0.3, **options)


def _step(model: Any, *seeds: int, ranks: int) -> None:
    """The gradient of the mean over ranks of what each sums up over its tokens."""
    for seed in seeds:
        result = model(rows(6, seed=seed))
        ((result.hidden.square().sum() + sum(result.losses.values())) / ranks).backward()


def data_parallel(rank: int, port: int) -> None:
    """One of two processes with half of the tokens each: DDP, and FSDP2, beside a layer that sees all."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        alone = layer_of(BIASED)
        tracker = mo.nn.LoadTracker(alone)
        _step(alone, 0, 1, ranks=2)
        wanted = {n: p.grad for n, p in alone.named_parameters()}
        tracker.update_biases(1e-2)
        assert alone.bias.any() and all(gradient.any() for gradient in wanted.values())

        parallel = DistributedDataParallel(layer_of(BIASED))
        tracker = mo.nn.LoadTracker(parallel)
        _step(parallel, rank, ranks=1)
        for name, parameter in parallel.module.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-5)
        tracker.update_biases(1e-2, group=dist.group.WORLD)  # each has counts of its own tokens
        assert torch.equal(parallel.module.bias, alone.bias)

        sharded: Any = fully_shard(layer_of(BIASED))
        tracker = mo.nn.LoadTracker(sharded)
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        before = {n: p.full_tensor() for n, p in sharded.named_parameters()}
        _step(sharded, rank, ranks=1)
        for name, parameter in sharded.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), wanted[name], rtol=1e-4, atol=1e-5)
        optimizer.step()
        for name, parameter in sharded.named_parameters():
            torch.testing.assert_close(parameter.full_tensor(), before[name] - 0.1 * wanted[name], rtol=1e-4, atol=1e-5)
        tracker.update_biases(1e-2, group=dist.group.WORLD)
        assert torch.equal(sharded.bias, alone.bias)

        frozen = layer_of(BIASED)  # an adapter's case: most of it is sharded, and takes no gradient
        frozen.gate_up_proj.requires_grad_(False)
        frozen.down_proj.requires_grad_(False)
        part: Any = fully_shard(frozen)
        _step(part, rank, ranks=1)
        for name, parameter in part.named_parameters():
            if name in ("gate_up_proj", "down_proj"):
                assert parameter.grad is None
            else:
                torch.testing.assert_close(parameter.grad.full_tensor(), wanted[name], rtol=1e-4, atol=1e-5)

        learned = replace(
            BIASED,
            router=replace(BIASED.router, selection_bias=False, gate_bias=True, expert_scale=True, router_scale=True),
        )
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        cast: Any = fully_shard(layer_of(learned), mp_policy=policy)
        alone = layer_of(learned)
        for layer, seeds, ranks in ((cast, (rank,), 1), (alone, (0, 1), 2)):
            _step(layer, *seeds, ranks=ranks)
        for name, parameter in cast.named_parameters():
            found, right = parameter.grad.full_tensor(), alone.get_parameter(name).grad
            assert found.dtype == torch.float32
            assert (found - right).norm() < 0.1 * right.norm(), name  # of operands in bf16
    finally:
        dist.destroy_process_group()
    # Not by way of the interpreter's end: sharded modules leave the group's threads alive until then, and one that lets
    # go of a tensor while Python is being taken down may abort the process (pytorch/pytorch#179291).
    os._exit(0)


def run_once(layer: Any, found: Any) -> None:
    """Puts what a layer computes here, and sends back."""
    torch.set_num_threads(1)
    x = rows(7).requires_grad_()
    hidden = layer(x).hidden
    hidden.square().sum().backward()
    found.put([t.detach().numpy() for t in (hidden, x.grad, layer.gate_up_proj.grad)])

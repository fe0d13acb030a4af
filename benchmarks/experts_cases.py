"""The experts that are timed: as declared for moesaic, as transformers runs them, and how results are checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from experts_bounds import Cost, Load, layer_cost
from router_cases import WrongResult
from timing import short
from torch import Tensor

import moesaic as mo
from moesaic.ir.core import Module
from moesaic.ir.types import DType
from moesaic.runtime.program import Program, program_of

Run = Callable[["Inputs"], Tensor]
"""Experts on (x, picks, weights of picks): hidden [T, H]."""

# Of a row's error against that row and the mean row together. Operands are rounded to bf16 between products, results
# once more: errors of about 0.003. A step of 16 that a product of depth 2048 leaves out is 0.09, one row of a weight's
# gradient over 4096 rows 0.016. Peers round twice more.
_TOLERANCE = 6e-3
_PEER_TOLERANCE = 9e-3


@dataclass(frozen=True)
class Case:
    """Gated experts with SiLU, matrices as [E, 2I, H] and [E, H, I].

    `passes` are options of passes that ours is compiled with, in place of the compiler's choices.
    """

    name: str
    model: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    passes: str = ""

    @property
    def declared(self) -> mo.Experts:
        return mo.Experts(self.experts, self.hidden, self.intermediate, dtype="bf16")

    @property
    def module(self) -> Module:
        """The declared function for inputs as `make_inputs` makes them."""
        module: Module = self.declared.module(DType.BF16, self.top_k, DType.I32, DType.BF16)
        return module

    @property
    def program(self) -> Program:
        """What moesaic makes of it; the one that the layer runs."""
        return program_of(self.module, self.passes)

    @property
    def small(self) -> Case:
        """The same in small, for the emulator."""
        return replace(
            self,
            hidden=max(32, self.hidden // 64),
            intermediate=self.intermediate // 32 if self.intermediate < 4096 else 72,
            experts=max(self.top_k + 3, self.experts // 16),
        )

    @property
    def matrix_bytes(self) -> int:
        return 6 * self.experts * self.hidden * self.intermediate

    def cost(self, load: Load, backward: bool) -> Cost:
        """What a call needs at least."""
        return layer_cost(self.experts, self.hidden, self.intermediate, load, backward)


CASES = (
    Case("qwen3", "Qwen3-30B-A3B", 2048, 768, 128, 8),
    Case("olmoe", "OLMoE-1B-7B", 2048, 1024, 64, 8),
    Case("mixtral", "Mixtral-8x7B", 4096, 14336, 8, 2),
    Case("deepseek", "DeepSeek-V3, 64 of its 256 experts, all picks among them", 7168, 2048, 64, 8),
)


# ------------------------------------------------------------------------------------------------------------- inputs


@dataclass(frozen=True)
class Matrices:
    """The two matrices, as leaves that want gradients."""

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Inputs:
    """One set. The picks are int32; peers take the same as int64, as torch's top-k gives them. `x` and `weights` want
    gradients; `cotangent` is that of the result."""

    x: Tensor
    indices: Tensor
    wide: Tensor
    weights: Tensor
    cotangent: Tensor


def make_matrices(case: Case, generator: torch.Generator) -> Matrices:
    """Random matrices whose products have values near 1."""
    e, h, i = case.experts, case.hidden, case.intermediate

    def normal(*shape: int, scale: float) -> Tensor:
        made = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
        return made.normal_(0.0, scale, generator=generator).requires_grad_()

    return Matrices(normal(e, 2 * i, h, scale=h**-0.5), normal(e, h, i, scale=i**-0.5))


def make_inputs(case: Case, indices: Tensor, generator: torch.Generator) -> Inputs:
    """Random inputs for given picks; the weight of a pick that is not here is 0, as transformers wants it."""
    tokens, device = indices.shape[0], generator.device

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)

    weights = torch.rand(indices.shape, device=device, generator=generator) + 0.1
    weights = (weights / weights.sum(-1, keepdim=True)).masked_fill(indices >= case.experts, 0.0).bfloat16()
    x, cotangent = normal(tokens, case.hidden), normal(tokens, case.hidden)
    return Inputs(x.requires_grad_(), indices.int(), indices.long(), weights.requires_grad_(), cotangent)


ROUTINGS = ("random", "even", "zipf", "one")


def make_picks(case: Case, tokens: int, generator: torch.Generator, routing: str = "random") -> Tensor:
    """Picks [T, K]: K distinct experts at random, evenly, or with popularity 1 / rank; or one expert for all.

    Even ones of a token are as far apart as they can be. Were they side by side, experts that follow one another would
    read the same rows of x, and could find them in the L2 cache, where those of random picks are not.
    """
    shape, device = (tokens, case.experts), generator.device
    if routing == "one":
        return torch.full((tokens, case.top_k), case.experts // 2, device=device)
    if routing == "even":
        first = torch.randperm(tokens, device=device, generator=generator)[:, None]
        return (first + torch.arange(case.top_k, device=device) * case.experts // case.top_k) % case.experts
    noise = torch.rand(shape, device=device, generator=generator).clamp(1e-12, 1 - 1e-7)
    if routing == "zipf":  # sampling without replacement: the largest of log p plus Gumbel noise
        popularity = 1 / torch.arange(1, case.experts + 1, device=device)
        noise = popularity.log() - (-noise.log()).log()
    return noise.topk(case.top_k, dim=-1)[1]


def keep_share(case: Case, picks: Tensor, share: float, how: str, generator: torch.Generator) -> Tensor:
    """Makes picks E, "not here", so that about `share` stay: any of them (``spread``), or those of the first experts
    (``local``)."""
    if share >= 1:
        return picks
    if how == "local":
        here = picks < round(share * case.experts)
    else:
        here = torch.rand(picks.shape, device=picks.device, generator=generator) < share
    return picks.masked_fill(~here, case.experts)


def load_of(case: Case, picks: Tensor) -> Load:
    """What the picks ask for."""
    live = picks[(picks >= 0) & (picks < case.experts)]
    counts = torch.bincount(live.long(), minlength=case.experts)
    rows = int(counts.sum())
    skew = float(counts.max()) * case.experts / rows if rows else 0.0
    return Load(picks.shape[0], rows, int((counts > 0).sum()), skew)


# ---------------------------------------------------------------------------------------------------- implementations


def ours(case: Case, matrices: Matrices, backend: str) -> Run:
    """The compiled layer."""
    layer = mo.compile(case.declared, backend=backend, passes=case.passes)
    return lambda given: layer(given.x, given.indices, given.weights, matrices.gate_up, matrices.down)


def transformers_module(case: Case, matrices: Matrices, implementation: str) -> torch.nn.Module:
    """The experts of a model of transformers with our matrices: ``grouped_mm``, its default, or ``eager``, its loop."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=case.hidden,
        moe_intermediate_size=case.intermediate,
        num_experts=case.experts,
        num_experts_per_tok=case.top_k,
        hidden_act="silu",
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        module: torch.nn.Module = Qwen3MoeExperts(config)
    for name, matrix in (("gate_up_proj", matrices.gate_up), ("down_proj", matrices.down)):
        delattr(module, name)  # a parameter's place takes no plain tensor
        setattr(module, name, matrix)
    return module


def transformers(case: Case, matrices: Matrices, implementation: str, *, compiled: bool = False) -> Run:
    """The same as a function; `compiled` by torch.compile."""
    module = transformers_module(case, matrices, implementation)
    run = torch.compile(module) if compiled else module
    return lambda given: run(given.x, given.wide, given.weights)


def forward(run: Run, given: Inputs) -> Tensor:
    """Inference."""
    with torch.no_grad():
        return run(given)


def forward_backward(run: Run, given: Inputs, matrices: Matrices) -> tuple[Tensor, ...]:
    """Training: the result, and the gradients of x, of the weights of picks, and of both matrices."""
    hidden = run(given)
    wanted = (given.x, given.weights, matrices.gate_up, matrices.down)
    return (hidden.detach(), *torch.autograd.grad(hidden, wanted, given.cotangent))


# ------------------------------------------------------------------------------------------------------------- checks


def check(case: Case, given: Inputs, matrices: Matrices, runs: Mapping[str, Run]) -> dict[str, str]:
    """Compares results and all gradients with float64 arithmetic, an expert at a time; says what is wrong, by name.

    The memory that an implementation is likely to get is filled with ones first, so that what is not written shows.
    """
    problems: dict[str, str] = {}
    found: dict[str, tuple[Tensor, ...]] = {}
    for name, run in runs.items():
        try:
            _poison(case, given)
            inference = forward(run, given)
            _poison(case, given)
            found[name] = (inference, *forward_backward(run, given, matrices))
        except Exception as error:  # noqa: BLE001 - whatever fails becomes a word in the table
            problems[name] = f"ERROR: {short(error)}"
    _compare(case, given, matrices, found, problems)
    return problems


def _compare(
    case: Case,
    given: Inputs,
    matrices: Matrices,
    found: Mapping[str, tuple[Tensor, ...]],
    problems: dict[str, str],
) -> None:
    def close(
        what: str,
        expected: Tensor,
        part: Callable[[tuple[Tensor, ...]], Tensor],
        loose: float = 1.0,
        whole: bool = False,
    ) -> None:
        for name, results in found.items():
            if name not in problems:
                try:
                    tolerance = loose * (_TOLERANCE if name == "ours" else _PEER_TOLERANCE)
                    _require_close(what, part(results), expected, tolerance, whole)
                except WrongResult as error:
                    problems[name] = f"WRONG: {error}"

    x, cotangent, weights = given.x.detach().double(), given.cotangent.double(), given.weights.detach().double()
    hidden, d_x, d_weights = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(weights)
    for e in range(case.experts):
        tokens, picks = (given.indices == e).nonzero(as_tuple=True)
        gate_up, down = matrices.gate_up.detach()[e].double(), matrices.down.detach()[e].double()
        rows, factors, above = x[tokens], weights[tokens, picks, None], cotangent[tokens]
        gate, up = (rows @ gate_up.T).chunk(2, -1)
        silu, slope = gate * gate.sigmoid(), gate.sigmoid() * (1 + gate * (1 - gate.sigmoid()))
        middle = silu * up
        d_middle = above @ down
        hidden.index_add_(0, tokens, factors * (middle @ down.T))
        d_weights[tokens, picks] = (d_middle * middle).sum(-1)
        d_middle = factors * d_middle
        d_first = torch.cat((d_middle * up * slope, d_middle * silu), -1)
        d_x.index_add_(0, tokens, d_first @ gate_up)
        loose = 1 + 2 * max(len(tokens), 1) ** -0.5  # the errors of a few rows do not average out
        close(f"d_gate_up_proj[{e}]", d_first.T @ rows, partial(_matrix, 4, e), loose)
        close(f"d_down_proj[{e}]", above.T @ (factors * middle), partial(_matrix, 5, e), loose)
    close("hidden of inference", hidden, lambda r: r[0])
    close("hidden of training", hidden, lambda r: r[1])
    close("d_x", d_x, lambda r: r[2])
    # Number by number, which nothing averages: a token that picks one expert only has the same error in all of them.
    close("d_weights", d_weights.reshape(-1, 1), lambda r: r[3].reshape(-1, 1), loose=2.5, whole=True)


def _matrix(place: int, expert: int, results: tuple[Tensor, ...]) -> Tensor:
    """Of the results at a place, an expert's."""
    return results[place][expert]


def _require_close(what: str, found: Tensor, expected: Tensor, tolerance: float, whole: bool) -> None:
    """Each row's error must be small against that row and the mean row together; rows of zeros must be zeros.

    `whole`: a row's numbers are sums of their own, so that errors have to be small against the mean row above all."""
    if found.shape != expected.shape:
        raise WrongResult(f"{what} has shape {list(found.shape)}, expected {list(expected.shape)}")
    size = expected.norm(dim=-1)
    live = size > 0
    error = (found.detach().double() - expected).norm(dim=-1)
    if not bool(live.any()):
        typical = size.new_zeros(())
    elif whole:
        typical = 3 * size[live].mean()
    else:
        typical = size[live].mean()
    allowed = torch.where(live, tolerance * (size + typical), 0.0)
    if not bool((error <= allowed).all()):  # so that NaN fails
        over = torch.where(error <= allowed, 0.0, (error / allowed.clamp(min=1e-300)).nan_to_num(nan=float("inf")))
        row = int(over.argmax())
        raise WrongResult(
            f"{what}: {int((over > 0).sum())} of {len(error)} rows, row {row} is off by {float(error[row]):.3g} where "
            f"its norm is {float(size[row]):.3g}, allowed is {float(allowed[row]):.3g}"
        )


def _poison(case: Case, given: Inputs) -> None:
    """Leaves a block about as large as all that a call makes, all bits set, for the allocator to hand out next."""
    if given.x.device.type != "cuda":
        return
    tokens, picks = given.indices.shape
    rows = tokens * picks
    wanted = 2 * rows * (4 * case.hidden + 6 * case.intermediate) + case.matrix_bytes
    free, _ = torch.cuda.mem_get_info()
    held = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    block = torch.full((min(wanted, (free + held) // 2),), 0xFF, dtype=torch.uint8, device=given.x.device)
    del block

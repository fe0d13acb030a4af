"""``moesaic demo``: one model's router, from its declaration to a kernel that agrees with the model's own module."""

from __future__ import annotations

import argparse
import importlib
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moesaic.ir.errors import InputError, UsageError
from moesaic.runtime import reproducer
from moesaic.runtime.commands import console, lowering, run, show, text
from moesaic.runtime.commands.verbs import Verbs

if TYPE_CHECKING:
    import torch

    from moesaic.ir.declare import Router

    Routing = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """Logits [T, E], weights [T, K] and indices [T, K]."""

_EXAMPLES = """
Needs torch and a C++ compiler, but no GPU. The model's own module comes from transformers (nothing
is downloaded); without it, the same router in plain torch takes its place, and the page says so.

examples:
  moesaic demo
  moesaic demo --family qwen3_moe --tokens 1024
"""

_ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a")
_SHOWN_TARGET = "sm_90a"
_SHOWN_TOKENS = 4


@dataclass(frozen=True)
class Family:
    """One model family: how its router is declared here, and where its own module is.

    `arguments` are those of :class:`moesaic.Router`; the module, its config and `settings` are those of transformers;
    `selection_bias` names the module's buffer with the bias that only selects.
    """

    title: str
    hidden: int
    arguments: Mapping[str, Any]
    module: str
    config: str
    settings: Mapping[str, Any]
    selection_bias: str = ""


FAMILIES: Mapping[str, Family] = {
    "deepseek_v3": Family(
        title="DeepSeek-V3",
        hidden=7168,
        arguments={
            "num_experts": 256,
            "top_k": 8,
            "score": "sigmoid",
            "selection_bias": True,
            "groups": 8,
            "groups_kept": 4,
            "group_score": "sum_top2",
            "renormalize": True,
            "renorm_eps": 1e-20,
            "scale": 2.5,
        },
        module="deepseek_v3:DeepseekV3TopkRouter",
        config="DeepseekV3Config",
        settings={
            "num_experts_per_tok": 8,
            "n_routed_experts": 256,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        selection_bias="e_score_correction_bias",
    ),
    "qwen3_moe": Family(
        title="Qwen3-MoE",
        hidden=2048,
        arguments={"num_experts": 128, "top_k": 8, "score": "softmax", "renormalize": True},
        module="qwen3_moe:Qwen3MoeTopKRouter",
        config="Qwen3MoeConfig",
        settings={"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
    ),
    "mixtral": Family(
        title="Mixtral",
        hidden=4096,
        arguments={"num_experts": 8, "top_k": 2, "score": "softmax", "renormalize": True},
        module="mixtral:MixtralTopKRouter",
        config="MixtralConfig",
        settings={"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "gpt_oss": Family(
        title="GPT-OSS",  # its gate's bias is part of the logits that it hands out
        hidden=2880,
        arguments={"num_experts": 128, "top_k": 4, "score": "softmax", "order": "topk_then_score"},
        module="gpt_oss:GptOssTopKRouter",
        config="GptOssConfig",
        settings={"num_local_experts": 128, "num_experts_per_tok": 4},
    ),
}


def add(verbs: Verbs) -> None:
    """Declares the verb."""
    parser = verbs.add("demo", run_demo, "compile a model's router, show every step, and check the result", _EXAMPLES)
    parser.add_argument("--family", metavar="NAME", default="deepseek_v3", help=f"one of {', '.join(FAMILIES)}")
    parser.add_argument("--tokens", metavar="T", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")


def run_demo(arguments: argparse.Namespace) -> int:
    """The verb."""
    from moesaic.ir.errors import suggestion

    family = FAMILIES.get(arguments.family)
    if family is None:
        near = suggestion(arguments.family, FAMILIES)
        raise UsageError(f"no family {arguments.family!r}{near}; there are: {', '.join(FAMILIES)}")
    if arguments.tokens < 1:
        raise UsageError(f"--tokens must be 1 or more, found {arguments.tokens}")
    run.require_torch()
    from moesaic.ir.declare import Router

    router = Router(**family.arguments, dtype="fp32")
    peer = _peer(family, arguments.seed)
    print(console.heading(f"{family.title}: the router as a person declares it"))
    print(_declaration(family))
    print()
    lowered = _lower(router, _SHOWN_TARGET)
    show.stages(lowered)
    show.decisions(lowered)
    forward = lowered.kernels[0]
    print(console.heading(f"{forward.symbol}.cu", f"the forward kernel, one of {len(lowered.kernels)}"))
    print(text.cuda(forward.source))
    print()
    _resources(router)
    return _compare(router, peer, arguments)


def _declaration(family: Family) -> str:
    lines = [f"    {name}={value!r}," for name, value in family.arguments.items()]
    return "\n".join(["router = moesaic.Router(", *lines, ")"])


def _lower(router: Router, target: str) -> lowering.Lowered:
    from moesaic.codegen.target import Target

    parsed = Target.parse(target)
    return lowering.lower(router.module(), lowering.passes_for("default", parsed))


def _resources(router: Router) -> None:
    """What NVRTC makes of the kernels on three generations of GPUs."""
    from moesaic.codegen.nvrtc import nvrtc_version

    version = ".".join(map(str, nvrtc_version()))
    print(console.heading("compiled", f"by NVRTC {version}; needs no GPU"))
    rows = []
    for name in _ARCHITECTURES:
        lowered = _lower(router, name)
        every = lowering.all_compiled(lowered.kernels, lowered.target)
        for kernel, made in zip(lowered.kernels, every, strict=True):
            rows.append(lowering.resource_row(lowering.resource_record(kernel, made)))
    print(console.table(lowering.RESOURCE_HEADER, rows, right=lowering.RESOURCE_RIGHT))
    print("spills and stack: bytes a thread; shared and cubin: bytes; ms: time to compile")
    print()


# The model's own module -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """A router to compare with: on hidden states it gives logits, weights and indices. Its weights are random."""

    route: Callable[[torch.Tensor], Routing]
    bias: torch.Tensor | None
    """What it adds for selection only."""
    source: str


def _peer(family: Family, seed: int) -> Peer:
    """The module of transformers, else the same in plain torch."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    experts = family.arguments["num_experts"]
    weight = torch.randn(experts, family.hidden, generator=generator) / family.hidden**0.5
    bias = 0.1 * torch.randn(experts, generator=generator)
    selecting = bias if family.selection_bias else None
    folder, _, name = family.module.partition(":")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        with console.progress("importing transformers"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            transformers = importlib.import_module("transformers")
            models = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
            config = getattr(transformers, family.config)(hidden_size=family.hidden, **family.settings)
            module = getattr(models, name)(config)
    except (ImportError, AttributeError) as error:
        console.say(
            f"no {name} of transformers here ({error}); the same router stated in plain torch takes its place. "
            "To compare with the model's own module: pip install 'transformers==5.17.*'",
            kind="warning",
        )
        weight.requires_grad_()
        return Peer(lambda hidden: _in_torch(family, hidden, weight, bias), selecting, "the router in plain torch")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(weight if parameter.shape == weight.shape else bias)
        if family.selection_bias:
            getattr(module, family.selection_bias).copy_(bias)
    return Peer(module, selecting, f"{name} of transformers {transformers.__version__}")


def _in_torch(family: Family, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Routing:
    """The routers of `FAMILIES` in plain torch."""
    import torch

    given = family.arguments
    logits = hidden @ weight.T
    if given.get("order") == "topk_then_score":
        logits = logits + bias
        values, indices = torch.topk(logits, given["top_k"])
        return logits, torch.softmax(values, -1), indices
    scores = torch.sigmoid(logits) if given["score"] == "sigmoid" else torch.softmax(logits, -1)
    selection = scores + bias if family.selection_bias else scores
    if "groups" in given:
        grouped = selection.unflatten(-1, (given["groups"], -1))
        best = grouped.topk(2).values.sum(-1).topk(given["groups_kept"]).indices
        kept = torch.zeros(grouped.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
        selection = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
    indices = selection.topk(given["top_k"]).indices
    weights = scores.gather(-1, indices)
    weights = weights / (weights.sum(-1, keepdim=True) + given.get("renorm_eps", 0.0))
    return logits, weights * given.get("scale", 1.0), indices


# Side by side ---------------------------------------------------------------------------------------------------------


def _compare(router: Router, peer: Peer, arguments: argparse.Namespace) -> int:
    """Runs the kernels in the emulator and the peer in torch; prints both, and whether they agree."""
    import torch

    from moesaic.runtime.commands import tensors
    from moesaic.runtime.compile import compile

    generator = torch.Generator().manual_seed(arguments.seed + 1)
    hidden = torch.randn(arguments.tokens, FAMILIES[arguments.family].hidden, generator=generator)
    # One cotangent for each token and expert, so that the order of the picks does not matter.
    cotangent = torch.randn(arguments.tokens, router.num_experts, generator=generator)

    with console.progress("running the module"):
        logits, weights, indices = peer.route(hidden)
        (gradient,) = torch.autograd.grad((weights * cotangent.gather(1, indices)).sum(), logits)

    leaf = logits.detach().clone().requires_grad_()
    given = {} if peer.bias is None else {"bias": peer.bias}
    module = router.module()
    with (
        reproducer.kept(str(module), "default", "moesaic run --backend emulate"),
        console.progress("running the kernels in the emulator"),
    ):
        ours = compile(module, backend="emulate")(leaf, **given)
        (our_gradient,) = torch.autograd.grad((ours.weights * cotangent.gather(1, ours.indices.long())).sum(), leaf)

    theirs, found = _by_expert(indices, weights), _by_expert(ours.indices, ours.weights)
    print(console.heading("the same tokens through both", f"{arguments.tokens} tokens, seed {arguments.seed}"))
    print(f"module    {peer.source}, random weights, {FAMILIES[arguments.family].hidden} wide")
    print("emulated  the CUDA above, compiled by the host's C++ compiler, lane by lane")
    print()
    _print_tokens(theirs, found)

    differs = (theirs[0] != found[0]).any(1)
    rows = differs.nonzero().flatten()
    inputs = {"logits": leaf.detach(), **given}
    near = tensors.near_ties(
        module.entry, inputs, rows, lambda o: (o["indices"].long().sort(1).values == theirs[0][rows]).all(1)
    )
    same = ~differs
    # Without this, a token whose picks rounding decides would count as a difference of its weights.
    weight = _difference(found[1][same], theirs[1][same])
    slope = _difference(our_gradient[same], gradient[same])
    counted = torch.bincount(ours.indices.flatten().long(), minlength=router.num_experts)
    lines = [
        (
            "experts picked",
            f"{int(same.sum())} of {arguments.tokens} tokens alike",
            _picks_note(rows, near),
            len(rows) == len(near),
        ),
        ("weights", f"{weight[0]:.2g} apart at most", f"allowed {weight[1]:.2g}", weight[0] <= weight[1]),
        ("gradient of the logits", f"{slope[0]:.2g} apart at most", f"allowed {slope[1]:.2g}", slope[0] <= slope[1]),
        ("tokens per expert", f"{int(ours.counts.sum())} counted", "exact", torch.equal(ours.counts.long(), counted)),
    ]
    print(console.table(("", "module and emulated", "", ""), [(*x[:3], "ok" if x[3] else "FAIL") for x in lines]))
    print()
    ok = all(x[3] for x in lines)
    word = console.styled("PASS", "bold", "green") if ok else console.styled("FAIL", "bold", "red")
    verdict = "routes like" if ok else "does not route like"
    print(f"{word}: the generated CUDA {verdict} {peer.source}")
    return 0 if ok else InputError.exit_code


def _by_expert(indices: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Picks and their weights, sorted by expert: two implementations may rank alike and list otherwise."""
    ordered, places = indices.long().sort(1)
    return ordered, weights.detach().gather(1, places)


def _difference(found: torch.Tensor, theirs: torch.Tensor) -> tuple[float, float]:
    """The largest difference, and the largest allowed."""
    from moesaic.runtime.commands.tensors import CHAIN

    if not theirs.numel():
        return 0.0, 0.0
    return float((found - theirs).detach().abs().max()), CHAIN * float(theirs.abs().max())


def _picks_note(rows: torch.Tensor, near: list[int]) -> str:
    return f"{len(near)} of {len(rows)} others are near-ties that rounding decides" if len(rows) else "exact"


def _print_tokens(theirs: tuple[torch.Tensor, torch.Tensor], found: tuple[torch.Tensor, torch.Tensor]) -> None:
    rows = []
    for token in range(min(_SHOWN_TOKENS, len(theirs[0]))):
        for who, (experts, weights) in (("module", theirs), ("emulated", found)):
            picks = zip(experts[token].tolist(), weights[token].tolist(), strict=True)
            rows.append((token if who == "module" else "", who, " ".join(f"{e:3d}:{w:.3f}" for e, w in picks)))
    print(console.table(("token", "", "expert:weight"), rows, right={0}))
    print()

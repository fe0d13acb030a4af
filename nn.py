"""Layers as modules of torch: parameters, state, and what is kept of them over a run.

layer = mo.nn.MoELayer(mo.MoE(router, experts, shared=mo.SharedExpert(2048)), dtype=torch.bfloat16, device="cuda")
out = layer(x)
tracker = mo.nn.LoadTracker(model)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self, Unpack

import torch

from moesaic.ir.errors import InputError, InputTypeError
from moesaic.ir.moe import MoE
from moesaic.ir.types import DType
from moesaic.runtime.compile import Options, compile
from moesaic.runtime.functional import LoadMetrics, load_metrics, update_bias
from moesaic.runtime.reference import TORCH_DTYPES

__all__ = ["LoadTracker", "MoELayer"]

_GATES = ("gate.", "router.", "router.gate.", "gate.wg.")
_BIASES = ("e_score_correction_bias", "gate.moe_statics.e_score_correction_bias", "expert_bias")
_SHARED = ("shared_experts.", "shared_expert.", "shared_mlp.")


class MoELayer(torch.nn.Module):
    """A `MoE` with its parameters, named as its inputs.

    Weights have the type that the module is made with or moved to, and shapes as in checkpoints of transformers. What a
    router learns stays float32, also after ``.to(torch.bfloat16)``: the selection bias, a buffer ``bias``, which
    `LoadTracker` or ``moesaic.update_bias`` move, and the parameters ``gate_bias``, ``expert_scale`` and
    ``router_scale`` ([1]: FSDP2 takes no parameter without a dimension). FSDP2 shards parameters of one type: where
    there are such, keep all in float32, and have its policy cast them.

    ``load_state_dict`` also takes the names of transformers' blocks (``gate.weight``, ``experts.gate_up_proj``,
    ``shared_expert.up_proj.weight`` ...); `hf_state_dict` gives them back.

    Args:
        moe: what is declared.
        device, dtype: of the parameters.
        std: of the normal distribution that matrices are drawn from; biases are 0, scales 1.
        main_grads: whether gradients of matrices are added to ``parameter.main_grad``, float32, where a parameter has
            one, instead of becoming its ``grad``.
        options: ``backend``, ``recompute``, ``allow_tf32`` and others of ``moesaic.compile``.
    """

    def __init__(
        self,
        moe: MoE,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        std: float = 0.02,
        main_grads: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__()
        if not isinstance(moe, MoE):
            raise InputTypeError(f"MoELayer takes a moesaic.MoE, found {type(moe).__name__}")
        self.moe = moe
        self.std = std
        self.main_grads = main_grads
        self._compiled = compile(moe, **options)
        declared = moe.dtype and TORCH_DTYPES[DType.parse(moe.dtype)]
        kind = dtype or declared or torch.get_default_dtype()
        self._state: tuple[str, ...] = ()
        for argument in moe.module(DType.F32).entry.arguments:
            if argument.type.leading in ("T", "N") or argument.name == "num_tokens":
                continue
            shape = [d for d in argument.type.shape if isinstance(d, int)]
            if argument.name in moe.parameters:
                self.register_parameter(argument.name, _parameter(shape, kind, device))
                continue
            self._state += (argument.name,)
            if argument.name == "bias":
                self.register_buffer("bias", torch.empty(shape, dtype=torch.float32, device=device))
            else:
                self.register_parameter(argument.name, _parameter(shape or [1], torch.float32, device))
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(_rename)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws matrices, and sets biases to 0 and scales to 1."""
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if name.endswith("scale"):
                tensor.fill_(1.0)
            elif "bias" in name:
                tensor.zero_()
            else:
                tensor.normal_(0.0, self.std)

    def forward(self, x: torch.Tensor, **inputs: torch.Tensor) -> Any:
        """What the compiled layer gives: a tensor, or a tuple with a field for each output and a mapping of losses.

        Args:
            x: [..., H].
            inputs: ``token_mask`` [...], ``residual`` [..., H], ``num_tokens``, ``indices``, where there are any.

        Raises:
            InputError: an input does not fit, or is the layer's own.
        """
        for name in inputs:
            if name in self.moe.parameters or name in self._state:
                raise InputError(f"the layer has a {name} of its own: leave it out, or set layer.{name}")
        own = {n: getattr(self, n) for n in self.moe.parameters}
        own |= {n: getattr(self, n).float() for n in self._state}  # which FSDP2 casts for a pass, if it casts all
        if "router_scale" in own:
            own["router_scale"] = own["router_scale"].reshape(())
        if self.main_grads and torch.is_grad_enabled():
            mains = {n: own[n].main_grad for n in self.moe.parameters if getattr(own[n], "main_grad", None) is not None}
            if mains:
                return self._compiled(x, **own, **inputs, main_grads=mains)
        return self._compiled(x, **own, **inputs)

    def warmup(self, *, backward: bool = True, token_mask: bool = False) -> None:
        """Prepares everything a call needs, whatever the number of tokens, for parameters where and as they are.

        Call it before a CUDA graph is captured.

        Args:
            backward: also prepare backward, with a cotangent for every float result. Where some of them have none, run
                one step as it will be captured instead.
            token_mask: prepare calls with a token mask instead of calls without.
        """
        weight = self.gate_weight
        frozen = [n for n in self.moe.parameters if not getattr(self, n).requires_grad and getattr(self, n).dim() > 1]
        self._compiled.warmup(
            weight.device, dtype=weight.dtype, backward=backward, token_mask=token_mask, frozen=frozen
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # To another device they go, to another type they do not; nor do their gradients.
        own = [getattr(self, n) for n in self._state]
        kept = [None if t.is_meta else t.detach().clone() for t in own]
        gradients = [None if t.grad is None else t.grad.detach().clone() for t in own]
        super()._apply(fn, recurse)
        for name, value, gradient in zip(self._state, kept, gradients, strict=True):
            moved = getattr(self, name)
            if moved.dtype != torch.float32:
                moved.data = moved.float() if value is None else value.to(moved.device)
                if gradient is not None:
                    moved.grad = gradient.to(moved.device)
        return self

    # ------------------------------------------------------------------------------------------------------- state

    def hf_state_dict(self, *, gate: str = "gate", shared: str = "shared_experts") -> dict[str, torch.Tensor]:
        """The parameters and the bias by the names that transformers' blocks have for them.

        Args:
            gate: what the block calls its router: ``gate``, or ``router``.
            shared: what it calls its shared expert: ``shared_experts`` or ``shared_expert``.
        """
        made: dict[str, torch.Tensor] = {}
        declared = self.moe.shared
        for name, tensor in self.state_dict().items():
            if name.startswith("shared_") and name != "shared_gate" and declared is not None and declared.transposed:
                tensor = tensor.mT
            if name == "gate_weight":
                made[f"{gate}.weight"] = tensor
            elif name == "gate_bias":
                made[f"{gate}.bias"] = tensor
            elif name == "bias":
                made[f"{gate}.e_score_correction_bias"] = tensor
            elif name == "shared_gate":
                made["shared_expert_gate.weight"] = tensor
            elif name == "shared_gate_up_proj":
                interleaved = declared is not None and declared.interleaved
                halves = tensor.unflatten(0, (-1, 2)).unbind(1) if interleaved else tensor.chunk(2)
                made |= {f"{shared}.{n}.weight": t for n, t in zip(("gate_proj", "up_proj"), halves, strict=True)}
            elif name.startswith("shared_"):
                made[f"{shared}.{name.removeprefix('shared_')}.weight"] = tensor
            elif name in ("expert_scale", "router_scale"):
                made[f"{gate}.{name}"] = tensor
            else:
                made[f"experts.{name}"] = tensor
        return made

    def extra_repr(self) -> str:
        moe = self.moe
        return (
            f"experts={moe.experts.num_experts}, top_k={moe.router.top_k}, hidden={moe.experts.hidden}, "
            f"intermediate={moe.experts.intermediate}, shared={moe.shared is not None}"
        )


class LoadTracker:
    """Counts and losses of all `MoELayer` of a model, added up on their devices from one `reset` to the next.

    Such a window may be a step of several micro-batches, or many steps. It holds passes in training mode: those in eval
    mode count nothing, and one that activation checkpointing repeats in backward is counted once. Sums stay where they
    are in memory, so that passes under torch.compile and in a replayed CUDA graph count too. Layers have to put out
    ``counts``.

    Attributes:
        layers: the layers by their names in the model.
        counts: int64 [E] of each layer, the picks of its experts.
        losses: of each layer the sum of each of its losses, float32 scalars.
        passes: of each layer how many passes these are sums of, an int64 scalar.

    Args:
        model: whose layers are watched, from now until `close`.

    Raises:
        InputError: the model has no such layer, or one does not put out counts.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.layers = {name: m for name, m in model.named_modules() if isinstance(m, MoELayer)}
        if not self.layers:
            raise InputError(f"{type(model).__name__} has no MoELayer to track")
        for name, layer in self.layers.items():
            if "counts" not in layer.moe.outputs:
                raise InputError(f"layer {name!r} does not put out counts; add them to the outputs of its MoE")
        self.counts: dict[str, torch.Tensor] = {}
        self.losses: dict[str, dict[str, torch.Tensor]] = {}
        self.passes: dict[str, torch.Tensor] = {}
        for name, layer in self.layers.items():
            self._begin(name, layer.gate_weight.device)
        self._hooks = [m.register_forward_hook(_Counting(self, name)) for name, m in self.layers.items()]

    @torch.inference_mode(False)  # these are written to outside of it as well
    def _begin(self, name: str, device: torch.device) -> None:
        moe = self.layers[name].moe
        self.counts[name] = torch.zeros(moe.router.num_experts, dtype=torch.int64, device=device)
        self.losses[name] = {loss: torch.zeros((), dtype=torch.float32, device=device) for loss in moe.losses}
        self.passes[name] = torch.zeros((), dtype=torch.int64, device=device)

    def _add(self, name: str, result: Any) -> None:
        """Adds a pass to a layer's sums."""
        if self.counts[name].device != result.counts.device:  # the model has moved: another window
            self._begin(name, result.counts.device)
        self.counts[name].add_(result.counts.detach())
        self.passes[name].add_(1)
        for loss, total in self.losses[name].items():
            total.add_(result.losses[loss].detach())

    def metrics(self) -> dict[str, LoadMetrics]:
        """For each layer what ``moesaic.load_metrics`` says of its counts, as tensors: nothing is synchronised."""
        return {name: load_metrics(counts) for name, counts in self.counts.items()}

    def fractions(self) -> dict[str, torch.Tensor]:
        """For each layer the share of the window's picks that each expert has, float32 [E]; zeros without any.

        A balance loss over the window is ``E * (fractions * mean_scores).sum()``, with the mean scores of one
        micro-batch: it does not matter how its tokens are spread over micro-batches.
        """
        return {name: counts / counts.sum().clamp(min=1) for name, counts in self.counts.items()}

    @torch.no_grad()
    def update_biases(self, rate: float, *, group: torch.distributed.ProcessGroup | None = None) -> None:
        """Moves the selection bias of every layer that has one by the sign rule, and begins a new window.

        See ``moesaic.update_bias``.

        Args:
            rate: how far a bias moves.
            group: of processes whose counts are added up before, as where each has a part of the tokens; all of them
                have to call this. ``None``: those of this process alone.
        """
        biased = [n for n, m in self.layers.items() if "bias" in m._state]
        if biased:
            loads = [self.counts[n] for n in biased]
            if group is not None:
                total = torch.cat(loads)
                torch.distributed.all_reduce(total, group=group)
                loads = list(total.split([len(c) for c in loads]))
            update_bias([self.layers[n].bias for n in biased], loads, rate)
        self.reset()

    def reset(self) -> None:
        """Begins a new window."""
        for name in self.layers:
            for total in (self.counts[name], self.passes[name], *self.losses[name].values()):
                total.zero_()

    def close(self) -> None:
        """Stops watching."""
        for hook in self._hooks:
            hook.remove()

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)


class _Counting:
    """A layer's hook, which adds its passes to a tracker's sums. In a copy of the layer, or one that was saved and
    loaded, it is nobody's."""

    def __init__(self, tracker: LoadTracker | None = None, name: str = "") -> None:
        self.tracker = tracker
        self.name = name

    def __call__(self, module: torch.nn.Module, inputs: Any, result: Any) -> None:
        if self.tracker is None or not module.training:
            return
        # A forward pass within backward is a repeated one. What torch.compile repeats, it does not trace again.
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            self.tracker._add(self.name, result)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Counting:
        return _Counting()

    def __reduce__(self) -> tuple[type[_Counting], tuple[()]]:
        return _Counting, ()


def _rename(layer: MoELayer, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Brings names and layouts of transformers' blocks to ours, and what stays float32 to that, in place."""
    found = {k.removeprefix(prefix) for k in state if k.startswith(prefix)}

    def move(theirs: str, ours: str) -> None:
        if theirs in found:
            state[prefix + ours] = state.pop(prefix + theirs)

    for gate in _GATES:
        move(f"{gate}weight", "gate_weight")
        move(f"{gate}bias", "gate_bias")
        move(f"{gate}e_score_correction_bias", "bias")
        move(f"{gate}expert_scale", "expert_scale")
        move(f"{gate}router_scale", "router_scale")
    for bias in _BIASES:
        move(bias, "bias")
    for name in layer._state:
        if prefix + name in state:
            tensor, shape = state[prefix + name].float(), getattr(layer, name).shape
            # A row of numbers, or one number, may have dimensions of 1 besides.
            state[prefix + name] = tensor.reshape(shape) if tensor.numel() == shape.numel() else tensor
    move("shared_expert_gate.weight", "shared_gate")
    for name in [n for n in found if n.startswith("experts.")]:
        move(name, name.removeprefix("experts."))
    declared = layer.moe.shared
    if declared is None:
        return
    for shared in _SHARED:
        names = ("gate_proj", "up_proj", "down_proj")
        given = {n: state.pop(f"{prefix}{shared}{n}.weight") for n in names if f"{prefix}{shared}{n}.weight" in state}
        if declared.gated and not declared.separate and {"gate_proj", "up_proj"} <= given.keys():
            halves = given.pop("gate_proj"), given.pop("up_proj")
            given["gate_up_proj"] = torch.stack(halves, 1).flatten(0, 1) if declared.interleaved else torch.cat(halves)
        for name, tensor in given.items():
            state[f"{prefix}shared_{name}"] = tensor.mT.contiguous() if declared.transposed else tensor


def _parameter(shape: list[int], dtype: torch.dtype, device: torch.device | str | None) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))

"""What a person declares of a whole layer: the product that makes logits, a router, experts, and a shared expert."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from moesaic.ir.builder import Builder
from moesaic.ir.core import Module, OpResult, Value, create_one
from moesaic.ir.declare import LOSS_PREFIX, Router
from moesaic.ir.declare import OUTPUTS as OUTPUTS_OF_ROUTERS
from moesaic.ir.errors import InputError, InputTypeError, check_choice, check_flag, check_identifier, check_names
from moesaic.ir.experts import Activation, Experts, Gating, activated, create_split
from moesaic.ir.ops.slot import stored
from moesaic.ir.types import DType, symbol, tensor

OUTPUTS = ("hidden", "logits", "dropped", *OUTPUTS_OF_ROUTERS)


@dataclass(frozen=True)
class SharedExpert:
    """An expert that every token goes to: a feed-forward network beside the routed ones.

    With x [T, H] and W, V of the expert::

        s_t = V (act(gate of W x_t) * (up of W x_t))         or V act(W x_t) where nothing is gated
        s_t = sigmoid(u . x_t) s_t                            with `gate`

    Several shared experts whose outputs are added are one, with I the sum of theirs. Weights are the inputs
    ``shared_gate_up_proj`` [2I, H], gates first (``shared_up_proj`` [I, H] where nothing is gated,
    ``shared_gate_proj`` and ``shared_up_proj`` where `separate`), ``shared_down_proj`` [H, I], and with `gate` u as
    ``shared_gate`` [1, H].

    Args:
        intermediate: I.
        activation, gated, gating: as of `Experts`.
        separate: gates and ups have weights of their own.
        transposed: weights lie as [H, 2I] and [I, H].
        interleaved: gates and ups alternate in the rows of the first weight.
        gate: whether the output is multiplied by a sigmoid of its own (qwen2_moe, qwen3_next).

    Raises:
        InputError: an argument, or a combination of them, that has no meaning.
    """

    intermediate: int
    activation: Activation = "silu"
    gated: bool = True
    gating: Gating | None = None
    separate: bool = False
    transposed: bool = False
    interleaved: bool = False
    gate: bool = False

    def __post_init__(self) -> None:
        # What is said of both is checked by the same words.
        Experts(
            1,
            1,
            self.intermediate,
            activation=self.activation,
            gated=self.gated,
            gating=self.gating,
            separate=self.separate,
            interleaved=self.interleaved,
        )
        check_flag("transposed", self.transposed)
        check_flag("gate", self.gate)

    @property
    def parameters(self) -> tuple[str, ...]:
        """What its weights are called."""
        if not self.gated:
            ups: tuple[str, ...] = ("shared_up_proj",)
        else:
            ups = ("shared_gate_proj", "shared_up_proj") if self.separate else ("shared_gate_up_proj",)
        return (*ups, "shared_down_proj", *(("shared_gate",) if self.gate else ()))

    def add_to(self, b: Builder, x: Value, *, scale: float = 1.0) -> Value:
        """Adds the expert to a function that has x [T, H]: `scale` times its output, [T, H] in float32.

        The factor, a power of two, stands before the second product, where backward meets it in an epilogue.
        """
        dtype = x.type.dtype
        hidden, wide = x.type.shape[-1], self.intermediate * (2 if self.gated and not self.separate else 1)
        assert isinstance(hidden, int)
        *ups, down = (name for name in self.parameters if name != "shared_gate")

        def product(rows: Value, name: str, outer: int) -> Value:
            inner = rows.type.shape[-1]
            lies = (inner, outer) if self.transposed else (outer, inner)
            made: Value = b.op("slot.linear", rows, b.input(name, tensor(dtype, *lies)), transposed=self.transposed)
            return made

        first = [product(x, name, wide) for name in ups]
        called = ("shared_h",) if len(first) == 1 else ("shared_h_gate", "shared_h_up")
        for value, name in zip(first, called, strict=True):
            value.name = name
        if self.gated and not self.separate:
            first = list(create_split(first[0], self.interleaved))
        middle = activated(first, self.activation, self.gating)
        middle = stored(middle if scale == 1.0 else middle * scale, dtype)
        middle.name = middle.name or "shared_activated"
        y = product(middle, down, hidden)
        if not self.gate:
            return y
        gate = b.op("slot.linear", x, b.input("shared_gate", tensor(dtype, 1, hidden)), transposed=False)
        gate.name = "shared_logit"
        return y * create_one("math.sigmoid", gate)


@dataclass(frozen=True)
class MoE:
    """A whole layer::

        x [T, H]  ->  logits = G x  ->  router  ->  picks, weights
        y_t = sum_k w_{t,k} expert_{i_{t,k}}(x_t)  (+ s_t)  (+ r_t)

    with G [E, H] the input ``gate_weight``, s the output of the shared expert and r the input ``residual`` [T, H]. The
    product that makes logits multiplies in the type of x and adds up in float32; y is added up in float32 and rounded
    once.

    Args:
        router: E is that of its logits. Its learned inputs keep their names; `dtype`, `weights_dtype` and `outputs` of
            the router are not used here.
        experts: E and H; `dtype` and `outputs` of the experts are not used here. They may be fewer than the router's:
            picks from their number on are "not here", as on a rank that has the first experts.
        shared: a `SharedExpert`, or ``None``.
        mean: whether y is half the sum of the routed and the shared output (cohere2_moe).
        residual: input ``residual`` [T, H], added to y.
        logits_dtype: ``"fp32"``, or ``"bf16"`` or ``"fp16"`` to round the logits as a product in that type would.
        outputs: any of ``hidden`` [T, H], ``logits`` [T, E], ``dropped`` [1] i32 (picks beyond the capacity), and those
            of a `Router`. Losses that the router declares come as one mapping after them.
        dtype: of x and the weights; ``None`` takes it from each call.

    Raises:
        InputError: an argument, or a combination of them, that has no meaning.
        InputTypeError: a part is not what it should be.
    """

    router: Router
    experts: Experts
    shared: SharedExpert | None = None
    mean: bool = False
    residual: bool = False
    logits_dtype: str = "fp32"
    outputs: tuple[str, ...] = ("hidden", "counts")
    dtype: str | None = None
    name: str = field(default="moe", kw_only=True)

    def __post_init__(self) -> None:
        for name, wanted in (("router", Router), ("experts", Experts)):
            if not isinstance(getattr(self, name), wanted):
                found = type(getattr(self, name)).__name__
                raise InputTypeError(f"{name} must be a {wanted.__name__}, found {found}")
        if self.shared is not None and not isinstance(self.shared, SharedExpert):
            raise InputTypeError(f"shared must be a SharedExpert or None, found {type(self.shared).__name__}")
        check_flag("mean", self.mean)
        check_flag("residual", self.residual)
        check_identifier("name", self.name)
        if self.mean and self.shared is None:
            raise InputError("mean is that of the routed and the shared output; give shared, too")
        if self.router.shared_experts or self.router.zero_experts:
            raise InputError(
                "shared_experts and zero_experts of a router weigh what lies outside of the routed experts; compile "
                "router and experts each, and add x times the weights of zero experts, or the shared experts times "
                "theirs, to the output"
            )
        if self.experts.num_experts > self.router.num_experts:
            raise InputError(
                f"the router picks among {self.router.num_experts} experts, found {self.experts.num_experts} of them"
            )
        check_choice("logits_dtype", self.logits_dtype, ("fp32", "bf16", "fp16"))
        object.__setattr__(self, "outputs", check_names("outputs", self.outputs))
        if not self.outputs or len(set(self.outputs)) != len(self.outputs):
            raise InputError(f"outputs must name some of {', '.join(OUTPUTS)}, each once; found {self.outputs}")
        for output in self.outputs:
            check_choice("outputs", output, OUTPUTS)
        if self.dtype is not None and not DType.parse(self.dtype).is_float:
            raise InputError(f"dtype must be a float type, found {self.dtype}")

    @property
    def parameters(self) -> tuple[str, ...]:
        """The inputs of a call after x that it takes by place: the gate's weight, matrices of experts and of the shared
        expert, biases."""
        matrices = (*self.experts.up_names, "down_proj")
        biases = tuple(f"{name}_bias" for name in matrices) if self.experts.bias else ()
        return ("gate_weight", *matrices, *biases, *(self.shared.parameters if self.shared is not None else ()))

    @property
    def losses(self) -> tuple[str, ...]:
        """The names of the losses."""
        return tuple(self.router.losses)

    def module(self, dtype: DType | str, *, masked: bool = False) -> Module:
        """The declared function for x and weights of this type, such as ``"bf16"``; `masked` adds the router's
        ``token_mask``.

        Raises:
            InputError: the type is unknown.
        """
        dtype = DType.parse(dtype)
        b = Builder(self.name)
        hidden = self.experts.hidden
        x = b.input("x", tensor(dtype, symbol("T"), hidden))
        gate = b.input("gate_weight", tensor(dtype, self.router.columns, hidden))
        logits: Value = b.op("slot.linear", x, gate, transposed=False, named="logits")
        rounded = DType.parse(self.logits_dtype)
        if rounded is not DType.F32 and dtype is not DType.F64:
            logits = stored(logits, rounded)
        wanted = tuple(name for name in self.outputs if name in OUTPUTS_OF_ROUTERS)
        router = replace(self.router, outputs=wanted or ("indices",), weights_dtype="fp32", dtype=None)
        made, indices, weights = router.add_to(b, logits, masked=masked)
        if isinstance(weights, OpResult):
            weights.name = weights.name or "weights"
        # Half of a sum: half of each weight, which is linear but on the input, and half of the shared output.
        half = 0.5 if self.mean else 1.0
        shared = None if self.shared is None else self.shared.add_to(b, x, scale=half)
        linear = self.experts.weight_on == "output" or (self.experts.weight_on == "middle" and not self.experts.bias)
        routed = self.experts.add_to(b, x, indices, weights * half if self.mean and linear else weights)
        hidden_states = routed["hidden"]
        if self.mean and not linear:
            hidden_states = hidden_states * half
        if shared is not None:
            hidden_states = hidden_states + shared
        if self.residual:
            hidden_states = hidden_states + b.input("residual", tensor(dtype, symbol("T"), hidden))
        made |= {"hidden": stored(hidden_states, dtype), "logits": logits, "dropped": routed["dropped"]}
        return b.build(**{name: made[name] for name in (*self.outputs, *(LOSS_PREFIX + n for n in self.losses))})

"""What a person declares of experts: two products an expert with an activation between, turned into IR."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moesaic.ir.builder import Builder
from moesaic.ir.core import Module, Value, create, create_one
from moesaic.ir.errors import InputError, check_choice, check_flag, check_identifier, check_names, check_number
from moesaic.ir.ops.slot import ALIGNMENTS, stored
from moesaic.ir.types import DType, tensor

Activation = str | Callable[[Value], Value]
Gating = Callable[[Value, Value], Value]


def _gelu(x: Value) -> Value:
    return x * 0.5 * (create_one("math.erf", x * 2**-0.5) + 1.0)


def _relu2(x: Value) -> Value:
    y = create_one("math.relu", x)
    return y * y


# An activation is an expression over a value; to add one, compose ops here or pass the function itself.
ACTIVATIONS: Mapping[str, Callable[[Value], Value]] = {
    "silu": lambda x: create_one("math.silu", x),
    "gelu": _gelu,
    "gelu_tanh": lambda x: create_one("math.gelu_tanh", x),
    "relu": lambda x: create_one("math.relu", x),
    "relu2": _relu2,
    "sigmoid": lambda x: create_one("math.sigmoid", x),
    "identity": lambda x: x,
}

OUTPUTS = ("hidden", "counts", "dropped")


@dataclass(frozen=True)
class ClampedSwiGLU:
    """min(g, limit) sigmoid(alpha min(g, limit)) (clamp(u, -limit, limit) + offset): gpt-oss has limit 7, alpha 1.702,
    offset 1. A gate is bounded from above only.

    Raises:
        InputError: the limit is not positive, or one of the others no finite number.
    """

    limit: float
    alpha: float = 1.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        for name in ("alpha", "offset"):
            check_number(f"clamped_swiglu: {name}", getattr(self, name))
        if isinstance(self.limit, bool) or not isinstance(self.limit, int | float) or not self.limit > 0:
            raise InputError(f"clamped_swiglu: limit must be a number > 0, found {self.limit!r}")

    def __call__(self, gate: Value, up: Value) -> Value:
        gate = create_one("math.minimum", gate, self.limit)
        up = create_one("math.maximum", create_one("math.minimum", up, self.limit), -self.limit)
        scaled = gate if self.alpha == 1.0 else gate * self.alpha
        return (up + self.offset if self.offset else up) * (gate * create_one("math.sigmoid", scaled))


@dataclass(frozen=True)
class Experts:
    """A feed-forward network an expert, and the way of tokens there and back.

    With x the input [T, H], i and w the picks and their weights [T, K], and W, V, b, c those of an expert::

        h_e(x) = W_e x + b_e
        a_e(x) = act(gate of h_e(x)) * (up of h_e(x))        or act(h_e(x)) where nothing is gated
        y_t    = sum_k w_{t,k} (V_e a_e(x_t) + c_e)          with e = i_{t,k}

    Weights lie as [E, 2I, H] and [E, H, I] (I in place of 2I where nothing is gated), gates first, as they are in
    checkpoints of transformers. Products are summed in float32 and rounded once. An id outside [0, E) is "not here": no
    product, a contribution and a gradient of exactly 0. The same expert twice in a token counts twice.

    Args:
        num_experts: E.
        hidden: H.
        intermediate: I.
        activation: a name (``silu``, ``gelu``, ``gelu_tanh``, ``relu``, ``relu2``, ``sigmoid``, ``identity``) or a
            function of an IR value.
        gated: whether half of the first product gates the other.
        gating: in place of ``activation(gate) * up``, a function of gate and up, such as `clamped_swiglu`.
        bias: inputs ``gate_up_proj_bias`` [E, 2I] and ``down_proj_bias`` [E, H].
        separate: gates and ups have weights of their own, ``gate_proj`` and ``up_proj`` [E, I, H], and biases.
        transposed: weights lie as [E, H, 2I] and [E, I, H]; ``"up"`` or ``"down"`` for one of them.
        interleaved: gates and ups alternate in the rows of the first weight.
        weight_on: what the weight of a pick multiplies: the ``"output"`` of its expert, its ``"input"``, or what is in
            the ``"middle"``, after the activation.
        capacity: at most ``ceil(capacity T K / E)`` picks an expert, and at most T: the first ones in the order of
            tokens. ``None`` for no bound.
        pad: every expert has as many rows as the capacity.
        align: rows that the first row of each expert is a multiple of: 1, 16, 64 or 128.
        outputs: any of ``hidden`` [T, H], ``counts`` [E] i32 (picks that were computed), ``dropped`` [1] i32 (picks
            beyond the capacity).
        dtype: of x and the weights; ``None`` takes it from each call.

    Raises:
        InputError: an argument, or a combination of them, that has no meaning.
    """

    num_experts: int
    hidden: int
    intermediate: int
    activation: Activation = "silu"
    gated: bool = True
    gating: Gating | None = None
    bias: bool = False
    separate: bool = False
    transposed: bool | str = False
    interleaved: bool = False
    weight_on: str = "output"
    capacity: float | None = None
    pad: bool = False
    align: int = 1
    outputs: tuple[str, ...] = ("hidden",)
    dtype: str | None = None
    name: str = field(default="experts", kw_only=True)

    def __post_init__(self) -> None:
        for name in ("num_experts", "hidden", "intermediate"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} must be an integer >= 1, found {value!r}")
        for flag in ("gated", "bias", "separate", "interleaved", "pad"):
            check_flag(flag, getattr(self, flag))
        check_identifier("name", self.name)
        if isinstance(self.activation, str):
            check_choice("activation", self.activation, ACTIVATIONS)
        elif not callable(self.activation):
            raise InputError(f"activation must be a name or a function of an IR value, found {self.activation!r}")
        if self.gating is not None and not (self.gated and callable(self.gating)):
            raise InputError("gating is a function of gate and up, and goes with gated=True")
        if self.gating is not None and self.activation != "silu":
            raise InputError("gating stands in place of activation(gate) * up; give one of activation and gating")
        if self.separate and not self.gated:
            raise InputError("separate gives gates and ups a weight each; with gated=False there is one of them only")
        if self.interleaved and not self.gated:
            raise InputError("interleaved tells how gates and ups lie; with gated=False there is one of them only")
        if self.interleaved and self.separate:
            raise InputError("interleaved tells how gates and ups lie in one weight; with separate=True they have two")
        if not isinstance(self.transposed, bool):
            check_choice("transposed", self.transposed, ("up", "down"))
        check_choice("weight_on", self.weight_on, ("output", "input", "middle"))
        if self.capacity is not None and (
            isinstance(self.capacity, bool)
            or not isinstance(self.capacity, int | float)
            or not 0 < self.capacity < float("inf")
        ):
            raise InputError(f"capacity must be a finite number > 0, or None, found {self.capacity!r}")
        if self.pad and self.capacity is None:
            raise InputError("pad gives every expert as many rows as the capacity; give capacity, too")
        if self.align not in ALIGNMENTS or type(self.align) is not int:
            raise InputError(f"align must be one of {', '.join(map(str, ALIGNMENTS))}, found {self.align!r}")
        object.__setattr__(self, "outputs", check_names("outputs", self.outputs))
        if not self.outputs or len(set(self.outputs)) != len(self.outputs):
            raise InputError(f"outputs must name some of {', '.join(OUTPUTS)}, each once; found {self.outputs}")
        for output in self.outputs:
            check_choice("outputs", output, OUTPUTS)
        if self.dtype is not None and not DType.parse(self.dtype).is_float:
            raise InputError(f"dtype must be a float type, found {self.dtype}")

    @property
    def up_names(self) -> tuple[str, ...]:
        """What the weights of the first product are called."""
        if not self.gated:
            return ("up_proj",)
        return ("gate_proj", "up_proj") if self.separate else ("gate_up_proj",)

    def module(
        self, dtype: DType | str, top_k: int, indices: DType | str = DType.I32, weights: DType | str = DType.F32
    ) -> Module:
        """The declared function for inputs of these types, such as ``"bf16"``, of K picks a token.

        Raises:
            InputError: a type is unknown, there are no picks, or activation or gating give something else than they
                should.
        """
        if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
            raise InputError(f"indices must hold one pick a token or more, found {top_k!r}")
        dtype, indices, weights = map(DType.parse, (dtype, indices, weights))
        b = Builder(self.name)
        x = b.input("x", tensor(dtype, "T", self.hidden))
        ids = b.input("indices", tensor(indices, "T", top_k))
        factors = b.input("weights", tensor(weights, "T", top_k))
        made = self.add_to(b, x, ids, factors)
        made["hidden"] = stored(made["hidden"], dtype)
        return b.build(**{name: made[name] for name in self.outputs})

    def add_to(self, b: Builder, x: Value, indices: Value, weights: Value) -> dict[str, Value]:
        """Adds the experts to a function that has x [T, H], the picks and their weights [T, K]: every output,
        ``hidden`` not rounded yet. Weights and biases become inputs."""
        dtype = x.type.dtype
        e, h, i = self.num_experts, self.hidden, self.intermediate
        wide = 2 * i if self.gated and not self.separate else i
        up_transposed, down_transposed = (self.transposed in (True, side) for side in ("up", "down"))
        lies = (h, wide) if up_transposed else (wide, h)
        ups = [b.input(name, tensor(dtype, e, *lies)) for name in self.up_names]
        down_proj = b.input("down_proj", tensor(dtype, e, *((i, h) if down_transposed else (h, i))))

        options: dict[str, Any] = {
            "capacity": self.capacity,
            "pad": self.pad or None,
            "align": None if self.align == 1 else self.align,
        }
        counts, offsets, tokens, picks, slots, dropped = b.op("slot.dispatch", indices, experts=e, **options)
        groups = (counts, offsets)

        def biased(value: Value, name: str, columns: int) -> Value:
            if not self.bias:
                return value
            bias = b.input(name, tensor(dtype, e, columns))
            return value + create_one("slot.expert_rows", bias, tokens, *groups)

        rows = b.op("slot.gather", x, tokens, slots)
        if self.weight_on == "input":
            rows = stored(rows * create_one("slot.of_pick", weights, picks, slots), dtype)
        first = [b.op("slot.grouped_linear", rows, up, *groups, transposed=up_transposed) for up in ups]
        for value, name in zip(first, ("h",) if len(first) == 1 else ("h_gate", "h_up"), strict=True):
            value.name = name
        middle = self._activated([biased(v, f"{n}_bias", wide) for v, n in zip(first, self.up_names, strict=True)])
        if self.weight_on == "middle":
            middle = middle * create_one("slot.of_pick", weights, picks, slots)
        middle = stored(middle, dtype)
        middle.name = middle.name or "activated"
        second = b.op("slot.grouped_linear", middle, down_proj, *groups, transposed=down_transposed)
        second = stored(biased(second, "down_proj_bias", h), dtype)
        second.name = "outputs"
        weighted = (weights, picks) if self.weight_on == "output" else ()
        hidden = b.op("slot.combine", second, slots, tokens, *weighted)
        return {"hidden": hidden, "counts": counts, "dropped": dropped}

    def _activated(self, first: list[Value]) -> Value:
        if self.gated and not self.separate:
            first = list(create_split(first[0], self.interleaved))
        return activated(first, self.activation, self.gating)


def activated(first: list[Value], activation: Activation, gating: Gating | None) -> Value:
    """What follows the first product: act(h), or of gate and up act(gate) * up or gating(gate, up).

    Raises:
        InputError: the functions give something else than a value of the shape of their operand.
    """
    function = ACTIVATIONS[activation] if isinstance(activation, str) else activation
    if len(first) == 1:
        return _checked("activation", function(first[0]), first[0])
    gate, up = first
    if gating is not None:
        return _checked("gating", gating(gate, up), gate)
    return _checked("activation", function(gate), gate) * up


def _checked(what: str, made: object, operand: Value) -> Value:
    if not isinstance(made, Value) or made.type.shape != operand.type.shape:
        found = made.type if isinstance(made, Value) else type(made).__name__
        raise InputError(f"{what} must give an IR value of the shape of its operand, found {found}")
    return made


def create_split(value: Value, interleaved: bool) -> tuple[Value, Value]:
    """Gates and ups of rows."""
    gate, up = create("slot.split", value, interleaved=interleaved or None).results
    return gate, up

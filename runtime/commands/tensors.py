"""Random tensors for a declared function, one run of it with gradients, and a comparison of two runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from moesaic.ir.core import Function, Module
from moesaic.ir.errors import InputError
from moesaic.ir.ops import col
from moesaic.ir.types import Affine, TensorType, dim_value
from moesaic.runtime.compile import compile
from moesaic.runtime.reference import TORCH_DTYPES, evaluate

Tensors = Mapping[str, torch.Tensor]

CHAIN = 1e-5
"""Of the largest value: what a chain of float32 sums and quotients may differ by when it is ordered another way."""

ROUNDING = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Of the value: two float32 numbers next to each other may round to neighbours in a shorter type."""

TOLERANCES = (
    f"tolerance: {CHAIN:g} of the largest value of a tensor; bf16 2^-7 and f16 2^-10 of each value more; integers exact"
)

_NUDGE = 1e-6  # relative; a few times what float32 arithmetic on a score may be off
_NUDGES = 64


@dataclass(frozen=True)
class Outcome:
    """Outputs and gradients (``d_<input>``) of one run, by name."""

    outputs: Tensors
    gradients: Tensors

    def all(self) -> dict[str, torch.Tensor]:
        return {**self.outputs, **self.gradients}


def draw(type: TensorType, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """A random tensor of a type: normal rows, small vectors, mostly true masks."""
    try:
        shape = tuple(dim_value(d, {"T": tokens}) for d in type.shape)
    except InputError as error:
        raise InputError(f"cannot draw a {type}: {error}") from None
    dtype = TORCH_DTYPES[type.dtype]
    if type.dtype.is_float:
        scale = 1.0 if type.rank == 2 else 0.1
        return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
    if dtype in (torch.bool, torch.uint8):
        return (torch.rand(shape, generator=generator) < 0.9).to(dtype)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def draw_inputs(function: Function, tokens: int, seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Random inputs of a function by name, rows by token; equal for equal seeds. Not the one that says how many
    sequences there are, which a layer makes itself."""
    generator = torch.Generator().manual_seed(seed)
    return {a.name: draw(a.type, tokens, generator).to(device) for a in function.arguments if a.type.leading != "N"}


def execute(module: Module, backend: str, inputs: Tensors, seed: int, *, forward_only: bool = False) -> Outcome:
    """Runs a module forward, and backward with random cotangents that depend on the seed alone.

    Where a loss is by sequence, tokens are up to four sequences; inputs and outcome still have a row for each token.
    """
    layer = compile(module, backend=backend)
    leaves = {n: t.clone().requires_grad_(t.is_floating_point() and not forward_only) for n, t in inputs.items()}
    function = module.entry
    segments = col.order_of_sequences(function)
    given = dict(leaves)
    if segments:
        types = {a.name: a.type for a in function.arguments}
        given = {n: _in_sequences(t, segments) if types[n].leading == "T" else t for n, t in leaves.items()}
    (_, first), *others = given.items()
    result = layer(first, **dict(others))
    outputs = dict(zip(result._fields, result, strict=True))
    if segments:
        made = dict(zip(function.result_names, function.result_types, strict=True))
        outputs = {n: o.flatten(0, 1) if made[n].leading == "T" else o for n, o in outputs.items()}
    generator = torch.Generator().manual_seed(seed + 1)
    # Random, because a sum of normalised weights is constant and its gradient would test nothing.
    drawn = {n: torch.randn(o.shape, generator=generator) for n, o in outputs.items() if o.is_floating_point()}
    flowing = {n: c for n, c in drawn.items() if outputs[n].requires_grad}
    gradients = {}
    if flowing:
        cotangents = [c.to(outputs[n].dtype).to(outputs[n].device) for n, c in flowing.items()]
        wanted = {n: t for n, t in leaves.items() if t.requires_grad}
        found = torch.autograd.grad([outputs[n] for n in flowing], [*wanted.values()], cotangents, allow_unused=True)
        gradients = {f"d_{n}": g for n, g in zip(wanted, found, strict=True) if g is not None}
    return Outcome({n: o.detach() for n, o in outputs.items()}, gradients)


def _in_sequences(rows: torch.Tensor, segments: str) -> torch.Tensor:
    """[T, ...] as [sequences, T / sequences, ...], or the other way round."""
    tokens = rows.shape[0]
    count = next(n for n in (4, 3, 2, 1) if tokens % n == 0)
    sizes = (count, tokens // count) if segments == "batch_first" else (tokens // count, count)
    return rows.reshape(*sizes, *rows.shape[1:])


# Comparing ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """How one tensor compares: largest difference, the largest allowed where it occurs, and what was left out."""

    name: str
    error: float
    allowed: float
    ok: bool
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side; `near_ties` are tokens whose picks differ where rounding decides between them."""

    findings: tuple[Finding, ...]
    near_ties: tuple[int, ...]
    differing: tuple[int, ...]

    @property
    def ok(self) -> bool:
        return not self.differing and all(f.ok for f in self.findings)


def compare(function: Function, inputs: Tensors, ours: Outcome, reference: Outcome) -> Comparison:
    """`ours` against `reference`, which has run the same inputs.

    A token whose picks differ is set aside if nudging the inputs by a few roundings makes the reference pick as we did;
    equal inputs are nudged equally, so that an exact tie broken the wrong way is never excused.
    """
    tokens = next(inputs[a.name].shape[0] for a in function.arguments if a.name in inputs and _has_rows(a.type))
    types = dict(zip(function.result_names, function.result_types, strict=True))
    picks = [n for n, t in types.items() if _has_rows(t) and not t.dtype.is_float]
    differs = torch.zeros(tokens, dtype=torch.bool)
    for name in picks:
        differs |= (ours.outputs[name] != reference.outputs[name]).flatten(1).any(1).cpu()
    rows = differs.nonzero().flatten()

    def agrees(outputs: Tensors) -> torch.Tensor:
        same = [(outputs[n] == ours.outputs[n][rows.to(outputs[n].device)]).flatten(1).all(1) for n in picks]
        return torch.stack(same).all(0).cpu()

    near = near_ties(function, inputs, rows, agrees)
    kept = ~differs
    findings = []
    for name, theirs in reference.all().items():
        found = ours.all().get(name)
        if found is None:
            findings.append(Finding(name, float("nan"), 0.0, False, "missing"))
            continue
        findings.append(_finding(name, found.cpu(), theirs.cpu(), kept, tokens, len(near)))
    return Comparison(tuple(findings), tuple(near), tuple(t for t in rows.tolist() if t not in near))


def near_ties(
    function: Function, inputs: Tensors, rows: torch.Tensor, agrees: Callable[[Tensors], torch.Tensor]
) -> list[int]:
    """Those of `rows` for which the reference on nudged inputs gives outputs that `agrees` accepts."""
    if not len(rows):
        return []
    found = torch.zeros(len(rows), dtype=torch.bool)
    for outputs in _nudged(function, inputs, rows):
        found |= agrees(outputs)
    return [int(t) for t in rows[found]]


def _nudged(function: Function, inputs: Tensors, rows: torch.Tensor) -> Iterator[Tensors]:
    declared = {a.name: a.type for a in function.arguments}
    chosen = {n: t[rows.to(t.device)] if _has_rows(declared[n]) else t for n, t in inputs.items()}
    device = next(iter(chosen.values())).device
    # One sequence: picks do not depend on it.
    chosen |= {n: torch.zeros(1, 0, device=device) for n, t in declared.items() if t.leading == "N"}
    for number in range(_NUDGES):
        nudged = {}
        for name, tensor in chosen.items():
            if not tensor.is_floating_point():
                nudged[name] = tensor
                continue
            wide = tensor.float()
            finite = torch.isfinite(wide)
            largest = wide[finite].abs().max() if bool(finite.any()) else wide.new_zeros(())
            noise = _noise(wide, number)
            nudged[name] = torch.where(finite, wide + _NUDGE * largest.clamp_min(0.1) * noise, wide)
        with torch.no_grad():
            yield dict(zip(function.result_names, evaluate(function, nudged), strict=True))


def _noise(values: torch.Tensor, number: int) -> torch.Tensor:
    """Numbers in [-1, 1) that look random but follow from the value alone: equal values stay equal."""
    bits = (values + 0.0).contiguous().view(torch.int32).long() & 0xFFFFFFFF  # + 0.0: -0 is 0
    mixed = (bits ^ (bits >> 15)) * (2 * number + 0x2C1B3C6D) & 0xFFFFFFFF
    mixed = (mixed ^ (mixed >> 12)) * 0x297A2D39 & 0xFFFFFFFF
    return ((mixed ^ (mixed >> 15)).double() / 2**31 - 1.0).float()


def _finding(
    name: str, found: torch.Tensor, theirs: torch.Tensor, kept: torch.Tensor, tokens: int, near: int
) -> Finding:
    if found.shape != theirs.shape or found.dtype != theirs.dtype:
        return Finding(name, float("nan"), 0.0, False, f"is {describe(found)}, expected {describe(theirs)}")
    by_row = theirs.dim() == 2 and theirs.shape[0] == tokens
    if not theirs.is_floating_point():
        difference = (found.long() - theirs.long()).abs()
        if by_row:
            return Finding(name, _largest(difference[kept].double()), 0.0, not bool(difference[kept].any()))
        # A pick that goes to another expert is one too many there and one too few here.
        allowed = 2 * near * tokens if near else 0
        total = int(difference.sum())
        return Finding(
            name, _largest(difference.double()), 0.0, total <= allowed, "near-ties move picks" if near else ""
        )
    if near and not by_row:
        return Finding(name, float("nan"), 0.0, True, "not compared: near-ties reach it")
    a, b = (x.double()[kept] if by_row else x.double() for x in (found, theirs))
    equal = (a == b) | (torch.isnan(a) & torch.isnan(b))
    finite = torch.isfinite(b)
    largest = _largest(b[finite].abs())
    allowed_each = CHAIN * largest + ROUNDING.get(theirs.dtype, 0.0) * torch.where(finite, b.abs(), 0.0)
    difference = torch.where(equal, torch.zeros_like(b), (a - b).abs())
    bad = ~equal & ~(difference <= allowed_each)
    if not difference.numel():
        return Finding(name, 0.0, 0.0, True)
    worst = int((torch.nan_to_num(difference - allowed_each, nan=float("inf"))).argmax())
    note = ""
    if bool(bad.any()):
        place = [int(i) for i in torch.unravel_index(torch.tensor(worst), b.shape)]
        if by_row:
            place[0] = int(kept.nonzero().flatten()[place[0]])
        note = f"{int(bad.sum())} beyond; at {place} {a.flatten()[worst]:.8g}, reference {b.flatten()[worst]:.8g}"
    biggest = int(torch.nan_to_num(difference, nan=float("inf")).argmax())
    return Finding(name, float(difference.flatten()[biggest]), float(allowed_each.flatten()[biggest]), not note, note)


def _largest(values: torch.Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def _has_rows(type: TensorType) -> bool:
    return type.rank == 2 and isinstance(type.shape[0], Affine)


def describe(tensor: torch.Tensor) -> str:
    """Shape and dtype, such as ``[64, 8] f32``."""
    short = {v: k.value for k, v in TORCH_DTYPES.items()}
    return f"{list(tensor.shape)} {short[tensor.dtype]}"

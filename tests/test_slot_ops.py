"""What every slot op computes, against plain loops in float64, and its gradient rule against autograd.

Sizes are primes. Ids lie outside [0, E), too; they repeat within a token; experts go without any; all picks of a token,
or all of them, are nowhere. The loops know nothing of sorting: they give slots one pick after the other.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from routing import assert_zero

from moesaic.ir import core
from moesaic.ir.builder import Builder
from moesaic.ir.core import Function
from moesaic.ir.diagnostics import DiagnosticError
from moesaic.ir.types import DType
from moesaic.passes.differentiate import derive
from moesaic.runtime.reference import TORCH_DTYPES, evaluate

F64 = torch.float64
DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

# Both sides are float64 and add up a few products of numbers of one size, in different orders.
VALUE = {"rtol": 1e-12, "atol": 1e-13}

TESTED = {
    *("slot.dispatch", "slot.gather", "slot.combine", "slot.of_pick", "slot.to_picks"),
    *("slot.linear", "slot.grouped_linear", "slot.wgrad", "slot.grouped_wgrad", "slot.accumulate"),
    *("slot.wgrad_parts", "slot.sum_parts"),
    *("slot.expert_rows", "slot.expert_sums", "slot.split", "slot.join"),
}


def test_every_op_has_a_test_here() -> None:
    assert {name for name in core.OPS if name.startswith("slot.")} == TESTED


# One op ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operand:
    """A tensor, and the symbol of its first dimension; none if that is a constant."""

    values: torch.Tensor
    leading: str = ""

    @property
    def type(self) -> str:
        shape = list(map(str, self.values.shape))
        if self.leading:
            shape[0] = self.leading
        return f"tensor<{''.join(f'{n}x' for n in shape)}{DTYPES[self.values.dtype].value}>"


def function(op: str, types: list[str], attributes: dict[str, Any]) -> Function:
    """`@f(%x0, ...) -> (y0, ...)` of one op."""
    b = Builder("f")
    made = b.op(op, *(b.input(f"x{i}", type) for i, type in enumerate(types)), **attributes)
    results = made if isinstance(made, tuple) else (made,)
    return b.build(**{f"y{i}": r for i, r in enumerate(results)}).entry


def run(op: str, *operands: Operand, **attributes: Any) -> list[torch.Tensor]:
    """Results of one op; their shapes and integer types are those that the op declares."""
    f = function(op, [x.type for x in operands], attributes)
    results = evaluate(f, {f"x{i}": x.values for i, x in enumerate(operands)})
    for value, result in zip(f.returned, results, strict=True):
        assert len(value.type.shape) == result.ndim
        assert all(d == n for d, n in zip(value.type.shape, result.shape) if isinstance(d, int))
        if not value.type.dtype.is_float:
            assert result.dtype == TORCH_DTYPES[value.type.dtype]
    return results


def check_gradient(op: str, *operands: Operand, **attributes: Any) -> dict[int, torch.Tensor]:
    """Our rule against autograd over the reference, for random cotangents; gives our gradients by operand."""
    f = function(op, [x.type for x in operands], attributes)
    floats = [i for i, x in enumerate(operands) if x.values.is_floating_point()]
    inputs = {f"x{i}": x.values.clone().requires_grad_(i in floats) for i, x in enumerate(operands)}
    results = evaluate(f, inputs)
    sent = {n: drawn(r.shape, seed=17 + i) for i, (n, r) in enumerate(zip(f.result_names, results, strict=True))}
    theirs = torch.autograd.grad(results, [inputs[f"x{i}"] for i in floats], [sent[n] for n in f.result_names])
    backward = derive(f)
    assert backward is not None and backward.result_names == [f"d_x{i}" for i in floats]
    given = {**{n: x.detach() for n, x in inputs.items()}, **{f"d_{n}": d for n, d in sent.items()}}
    ours = evaluate(backward, {a.name: given[a.name] for a in backward.arguments})
    for i, mine, wanted in zip(floats, ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted, **VALUE)
        assert mine.shape == operands[i].values.shape
    return dict(zip(floats, ours, strict=True))


def drawn(shape: tuple[int, ...] | torch.Size, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def integers(rows: list[int] | list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


# Slots by hand --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slots:
    """The six results of a dispatch, and what they were made from."""

    experts: int
    top_k: int
    counts: list[int]
    offsets: list[int]
    tokens: list[int]
    picks: list[int]
    slots: list[list[int]]
    dropped: int

    @property
    def used(self) -> list[tuple[int, int, int, int]]:
        """(slot, expert, token, number of the pick in its token) of every slot that is not dead."""
        return [
            (slot, expert, self.tokens[slot], self.picks[slot] % self.top_k)
            for expert in range(self.experts)
            for slot in range(self.offsets[expert], self.offsets[expert] + self.counts[expert])
        ]

    @property
    def results(self) -> dict[str, Operand]:
        return {
            "counts": Operand(integers(self.counts)),
            "offsets": Operand(integers(self.offsets)),
            "tokens": Operand(integers(self.tokens), "M"),
            "picks": Operand(integers(self.picks), "M"),
            "slots": Operand(integers(self.slots).reshape(-1, self.top_k), "T"),
        }

    def __getitem__(self, name: str) -> Operand:
        return self.results[name]


def by_hand(
    ids: list[list[int]], top_k: int, experts: int, *, align: int = 1, capacity: float = 0.0, pad: bool = False
) -> Slots:
    """Gives slots one pick after the other."""
    tokens = len(ids)
    bound = min(tokens, math.ceil(capacity * (tokens * top_k) / experts)) if capacity else tokens * top_k
    queues: list[list[int]] = [[] for _ in range(experts)]
    dropped = 0
    for pick, expert in enumerate(itertools.chain.from_iterable(ids)):
        if not 0 <= expert < experts:
            continue
        if len(queues[expert]) < bound:
            queues[expert].append(pick)
        else:
            dropped += 1
    a, b = (math.ceil(capacity * top_k), experts * align) if pad else (top_k, experts * (align - 1))
    picks = [-1] * (a * tokens + b)
    slots = [[-1] * top_k for _ in ids]
    offsets = [0]
    for queue in queues:
        for rank, pick in enumerate(queue):
            picks[offsets[-1] + rank] = pick
            slots[pick // top_k][pick % top_k] = offsets[-1] + rank
        offsets.append(offsets[-1] + -(-(bound if pad else len(queue)) // align) * align)
    assert offsets[-1] <= len(picks), "more rows than M"
    by_token = [-1 if p < 0 else p // top_k for p in picks]
    return Slots(experts, top_k, [len(q) for q in queues], offsets, by_token, picks, slots, dropped)


def random_ids(tokens: int, top_k: int, experts: int, seed: int = 1) -> list[list[int]]:
    """Ids from -2 to E + 1, of which the last expert has none."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-2, experts + 2, (tokens, top_k), generator=generator)
    return ids.masked_fill(ids == experts - 1, 0).tolist()


ROUTINGS: dict[str, tuple[list[list[int]], int, int]] = {
    "random": (random_ids(13, 3, 5), 3, 5),
    "one expert": (random_ids(7, 2, 1), 2, 1),
    "one pick": (random_ids(11, 1, 7), 1, 7),
    "the same expert again": ([[2, 2, 2], [1, 2, 1], [2, 0, 2]], 3, 5),
    "all to one": ([[4, 4]] * 7, 2, 5),
    "nobody is here": ([[-1, 5], [6, -7], [127, -128]], 2, 5),
    "no tokens": ([], 3, 5),
}

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "aligned": {"align": 16},
    "bounded": {"capacity": 0.7},
    "bounded, aligned": {"capacity": 0.4, "align": 16},
    "room for all": {"capacity": 100.0},
    "padded": {"capacity": 1.1, "pad": True},
    "padded, aligned": {"capacity": 1.1, "pad": True, "align": 64},
}

every_routing = pytest.mark.parametrize("routing", ROUTINGS)
every_option = pytest.mark.parametrize("option", OPTIONS)


def slots_of(routing: str, option: str = "plain") -> Slots:
    ids, top_k, experts = ROUTINGS[routing]
    return by_hand(ids, top_k, experts, **OPTIONS[option])


# Dispatch -------------------------------------------------------------------------------------------------------------


@every_routing
@every_option
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_dispatch(routing: str, option: str, dtype: torch.dtype) -> None:
    ids, top_k, experts = ROUTINGS[routing]
    wanted = slots_of(routing, option)
    indices = Operand(torch.tensor(ids, dtype=dtype).reshape(-1, top_k), "T")
    counts, offsets, tokens, picks, slots, dropped = run("slot.dispatch", indices, experts=experts, **OPTIONS[option])
    assert counts.tolist() == wanted.counts
    assert offsets.tolist() == wanted.offsets
    assert tokens.tolist() == wanted.tokens
    assert picks.tolist() == wanted.picks
    assert slots.tolist() == wanted.slots
    assert dropped.tolist() == [wanted.dropped]


def test_the_routings_differ_in_what_they_test() -> None:
    assert slots_of("random", "bounded").dropped > 0 == slots_of("random").dropped
    assert slots_of("random", "room for all").dropped == slots_of("random").dropped
    assert 0 in slots_of("random").counts
    assert slots_of("nobody is here").used == slots_of("no tokens").used == []
    assert slots_of("all to one", "padded").offsets == [0, 4, 8, 12, 16, 20]
    assert slots_of("all to one", "padded, aligned").offsets == [0, 64, 128, 192, 256, 320]


def test_ids_far_outside_name_no_expert() -> None:
    """2^32 is 0 in 32 bits, and 2^63 - 1 is -1."""
    ids = torch.tensor([[2**32, 2**63 - 1], [-(2**63), 1], [-(2**32), 2**32 + 1]])
    counts, *_, slots, _dropped = run("slot.dispatch", Operand(ids, "T"), experts=2)
    assert counts.tolist() == [0, 1]
    assert slots.tolist() == [[-1, -1], [-1, 0], [-1, -1]]


def test_ids_need_not_be_contiguous() -> None:
    ids = torch.tensor(random_ids(13, 3, 5)).T.contiguous().T
    wanted = slots_of("random")
    assert not ids.is_contiguous()
    assert run("slot.dispatch", Operand(ids, "T"), experts=5)[4].tolist() == wanted.slots


# Between tokens and slots ---------------------------------------------------------------------------------------------


@every_routing
@every_option
def test_gather(routing: str, option: str) -> None:
    s = slots_of(routing, option)
    x = drawn((len(s.slots), 11))
    y = torch.zeros(len(s.tokens), 11, dtype=F64)
    for slot, _, token, _ in s.used:
        y[slot] = x[token]
    operands = (Operand(x, "T"), s["tokens"], s["slots"])
    assert torch.equal(run("slot.gather", *operands)[0], y)
    check_gradient("slot.gather", *operands)


@every_routing
@every_option
@pytest.mark.parametrize("weighted", [False, True])
def test_combine(routing: str, option: str, weighted: bool) -> None:
    """What lies in dead rows, and what picks without a slot weigh, is read by nobody: both are NaN here."""
    s = slots_of(routing, option)
    x = drawn((len(s.tokens), 11))
    w = drawn((len(s.slots), s.top_k), seed=4)
    y = torch.zeros(len(s.slots), 11, dtype=F64)
    d_w = torch.zeros_like(w)
    dy = drawn(y.shape, seed=17)
    for slot, _, token, k in s.used:
        y[token] += x[slot] * (w[token, k] if weighted else 1.0)
        d_w[token, k] = dy[token] @ x[slot]
    others = (Operand(w, "T"), s["picks"]) if weighted else ()
    operands = (Operand(x, "M"), s["slots"], s["tokens"], *others)
    torch.testing.assert_close(run("slot.combine", *operands)[0], y, **VALUE)
    gradients = check_gradient("slot.combine", *operands)
    if weighted:
        torch.testing.assert_close(gradients[3], d_w, **VALUE)

    dead = torch.ones(len(s.tokens), dtype=torch.bool)
    dead[[slot for slot, *_ in s.used]] = False
    x[dead] = math.nan
    w[s["slots"].values < 0] = math.nan
    torch.testing.assert_close(run("slot.combine", *operands)[0], y, **VALUE)


@every_routing
@every_option
def test_numbers_of_picks(routing: str, option: str) -> None:
    s = slots_of(routing, option)
    w = drawn((len(s.slots), s.top_k))
    by_slot = torch.zeros(len(s.tokens), 1, dtype=F64)
    back = torch.zeros_like(w)
    for slot, _, token, k in s.used:
        by_slot[slot] = w[token, k]
        back[token, k] = w[token, k]
    there = (Operand(w, "T"), s["picks"], s["slots"])
    assert torch.equal(run("slot.of_pick", *there)[0], by_slot)
    again = (Operand(by_slot, "M"), s["slots"], s["picks"])
    assert torch.equal(run("slot.to_picks", *again)[0], back)
    check_gradient("slot.of_pick", *there)
    check_gradient("slot.to_picks", *again)


# Products -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 13])
def test_one_weight_for_all_rows(rows: int, transposed: bool) -> None:
    x, weight = drawn((rows, 11)), drawn((7, 11), seed=4)
    y = torch.zeros(rows, 7, dtype=F64)
    for r, i, j in itertools.product(range(rows), range(7), range(11)):
        y[r, i] += weight[i, j] * x[r, j]
    given = Operand(weight.T.contiguous() if transposed else weight)
    for leading in ("T", "M"):
        operands = (Operand(x, leading), given)
        torch.testing.assert_close(run("slot.linear", *operands, transposed=transposed)[0], y, **VALUE)
        check_gradient("slot.linear", *operands, transposed=transposed)

    outer = torch.zeros(7, 11, dtype=F64)
    for r, i, j in itertools.product(range(rows), range(7), range(11)):
        outer[i, j] += y[r, i] * x[r, j]
    torch.testing.assert_close(run("slot.wgrad", Operand(y, "T"), Operand(x, "T"))[0], outer, **VALUE)


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 127, 128, 129, 199, 257])
def test_sums_in_parts(rows: int, parts: int) -> None:
    """Each has as many whole 64s of rows as any other, but for the last rows; the last parts of few rows are 0."""
    a, b = drawn((rows, 3)), drawn((rows, 5), seed=4)
    each = 64
    while each * parts < rows:
        each += 64
    apart = torch.zeros(parts, 3, 5, dtype=F64)
    for r, i, j in itertools.product(range(rows), range(3), range(5)):
        apart[r // each, i, j] += a[r, i] * b[r, j]
    for leading in ("T", "M"):
        found = run("slot.wgrad_parts", Operand(a, leading), Operand(b, leading), parts=parts)[0]
        torch.testing.assert_close(found, apart, **VALUE)
    total = torch.zeros(3, 5, dtype=F64)
    for part in apart:
        total += part
    assert torch.equal(run("slot.sum_parts", Operand(apart))[0], total)
    torch.testing.assert_close(run("slot.wgrad", Operand(a, "T"), Operand(b, "T"))[0], total, **VALUE)


def test_parts_are_added_in_their_order() -> None:
    x = torch.tensor([1.0, 2.0**-24, 2.0**-24]).reshape(3, 1, 1)  # in float32, half a unit is lost twice
    assert run("slot.sum_parts", Operand(x))[0].item() == 1.0
    assert run("slot.sum_parts", Operand(x.flip(0).contiguous()))[0].item() == 1.0 + 2.0**-23


@every_routing
@every_option
@pytest.mark.parametrize("transposed", [False, True])
def test_one_weight_an_expert(routing: str, option: str, transposed: bool) -> None:
    """Dead rows give 0 and take no part in the gradient of a weight, even if they are NaN."""
    s = slots_of(routing, option)
    x, weight = drawn((len(s.tokens), 11)), drawn((s.experts, 7, 11), seed=4)
    y, outer = torch.zeros(len(s.tokens), 7, dtype=F64), torch.zeros_like(weight)
    dy = drawn(y.shape, seed=17)
    for slot, expert, *_ in s.used:
        for i in range(7):
            y[slot, i] = sum(weight[expert, i, j] * x[slot, j] for j in range(11))
            outer[expert, i] += dy[slot, i] * x[slot]
    given = Operand(weight.transpose(1, 2).contiguous() if transposed else weight)
    groups = (s["counts"], s["offsets"])
    operands = (Operand(x, "M"), given, *groups)
    torch.testing.assert_close(run("slot.grouped_linear", *operands, transposed=transposed)[0], y, **VALUE)
    gradients = check_gradient("slot.grouped_linear", *operands, transposed=transposed)
    torch.testing.assert_close(gradients[1], outer.transpose(1, 2) if transposed else outer, **VALUE)

    dead = torch.ones(len(s.tokens), dtype=torch.bool)
    dead[[slot for slot, *_ in s.used]] = False
    x[dead] = math.nan
    torch.testing.assert_close(run("slot.grouped_linear", *operands, transposed=transposed)[0], y, **VALUE)
    pair = (Operand(dy, "M"), Operand(x, "M"))
    torch.testing.assert_close(run("slot.grouped_wgrad", *pair, *groups)[0], outer, **VALUE)


def test_what_accumulates_is_added_in_float32() -> None:
    main, x = drawn((3, 4), seed=1).float(), drawn((3, 4), seed=2).bfloat16()
    found = run("slot.accumulate", Operand(main), Operand(x))[0]
    assert found.dtype == torch.float32 and torch.equal(found, main + x.float())


def test_sums_of_products_of_halves_are_float32() -> None:
    """263 is no bf16: it is kept until somebody rounds it."""
    x = torch.tensor([[256.0, *[1.0] * 7]], dtype=torch.bfloat16)
    ones = torch.ones(1, 8, dtype=torch.bfloat16)
    assert run("slot.linear", Operand(x, "T"), Operand(ones), transposed=False)[0].item() == 263.0
    s = by_hand([[0]], 1, 1)
    weight = Operand(ones.unsqueeze(0))
    [y] = run("slot.grouped_linear", Operand(x, "M"), weight, s["counts"], s["offsets"], transposed=False)
    assert (y.dtype, y.item()) == (torch.float32, 263.0)
    rows = Operand(x.T.contiguous(), "M")
    s = by_hand([[0] * 8], 8, 1)
    assert run("slot.combine", rows, s["slots"], s["tokens"])[0].item() == 263.0
    assert run("slot.expert_sums", rows, s["counts"], s["offsets"])[0].item() == 263.0


# Vectors of experts ---------------------------------------------------------------------------------------------------


@every_routing
@every_option
def test_vectors_of_experts(routing: str, option: str) -> None:
    s = slots_of(routing, option)
    v = drawn((s.experts, 11))
    x = drawn((len(s.tokens), 11), seed=4)
    rows, sums = torch.zeros_like(x), torch.zeros_like(v)
    for slot, expert, *_ in s.used:
        rows[slot] = v[expert]
        sums[expert] += x[slot]
    groups = (s["counts"], s["offsets"])
    operands = (Operand(v), s["tokens"], *groups)
    assert torch.equal(run("slot.expert_rows", *operands)[0], rows)
    check_gradient("slot.expert_rows", *operands)
    torch.testing.assert_close(run("slot.expert_sums", Operand(x, "M"), *groups)[0], sums, **VALUE)
    if not s.used:
        assert_zero("gradient of vectors that nobody read", check_gradient("slot.expert_rows", *operands)[0])


# Gates and ups --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 13])
def test_gates_and_ups(rows: int, interleaved: bool) -> None:
    x = drawn((rows, 14))
    columns = [(2 * i, 2 * i + 1) if interleaved else (i, 7 + i) for i in range(7)]
    gate, up = run("slot.split", Operand(x, "M"), interleaved=interleaved)
    for i, (g, u) in enumerate(columns):
        assert torch.equal(gate[:, i], x[:, g])
        assert torch.equal(up[:, i], x[:, u])
    pair = (Operand(gate.contiguous(), "M"), Operand(up.contiguous(), "M"))
    assert torch.equal(run("slot.join", *pair, interleaved=interleaved)[0], x)
    check_gradient("slot.split", Operand(x, "M"), interleaved=interleaved)
    check_gradient("slot.join", *pair, interleaved=interleaved)


def test_a_half_without_a_cotangent_has_a_gradient_of_zero() -> None:
    b = Builder("f")
    gate, _up = b.op("slot.split", b.input("x", "tensor<Mx6xf64>"))
    backward = derive(b.build(y=gate).entry)
    assert backward is not None
    dy = drawn((5, 3))
    given = {"x": drawn((5, 6)), "d_y": dy}
    [dx] = evaluate(backward, {a.name: given[a.name] for a in backward.arguments})
    assert torch.equal(dx, torch.cat([dy, torch.zeros_like(dy)], 1))


# What does not fit ----------------------------------------------------------------------------------------------------

GROUPS = ["tensor<5xi32>", "tensor<6xi32>"]
TOKENS, SLOTS = "tensor<Mxi32>", "tensor<Tx3xi32>"

M4, T4, WEIGHTS = "tensor<Mx4xf32>", "tensor<Tx4xf32>", "tensor<5x3x4xf32>"
TURNED = GROUPS[::-1]
AS_MN, AS_NM = {"transposed": False}, {"transposed": True}

MISFITS: list[tuple[str, list[str], dict[str, Any], str]] = [
    ("dispatch", ["tensor<Txi32>"], {"experts": 5}, "indices must be [T, K] with a constant K, found tensor<Txi32>"),
    ("dispatch", ["tensor<7x3xi32>"], {"experts": 5}, "indices must be [T, K] with a constant K"),
    ("dispatch", ["tensor<Tx3xf32>"], {"experts": 5}, "indices must be i16, i32 or i64, found tensor<Tx3xf32>"),
    ("dispatch", [SLOTS], {}, "attribute 'experts' (E) is missing"),
    ("dispatch", [SLOTS], {"experts": 0}, "attribute 'experts' expects an integer >= 1, found 0"),
    ("dispatch", [SLOTS], {"experts": 5, "align": 3}, "align must be one of 1, 16, 64, 128, found 3"),
    ("dispatch", [SLOTS], {"experts": 5, "pad": True}, "pad gives every expert as many rows as the capacity"),
    ("dispatch", [SLOTS], {"experts": 5, "capacity": -1.0}, "attribute 'capacity' expects"),
    ("gather", [M4, TOKENS, SLOTS], {}, "expected rows of tokens [T, n], found tensor<Mx4xf32>"),
    ("gather", [T4, SLOTS, TOKENS], {}, "tokens must be tensor<Mxi32>, found tensor<Tx3xi32>"),
    ("gather", [T4, TOKENS, TOKENS], {}, "slots must be [T, K] with a constant K, found tensor<Mxi32>"),
    ("gather", [T4, "tensor<Mxi64>", SLOTS], {}, "tokens must be tensor<Mxi32>, found tensor<Mxi64>"),
    ("gather", [T4, TOKENS, "tensor<Tx3xf32>"], {}, "slots must be [T, K] of i32, found tensor<Tx3xf32>"),
    ("combine", [T4, SLOTS, TOKENS], {}, "x must be rows of slots [M, n], found tensor<Tx4xf32>"),
    ("combine", [M4, TOKENS, TOKENS], {}, "slots must be [T, K] with a constant K"),
    ("combine", [M4, SLOTS, SLOTS], {}, "tokens must be tensor<Mxi32>, found tensor<Tx3xi32>"),
    ("combine", [M4, SLOTS, TOKENS, "tensor<Tx3xf32>"], {}, "weights go with picks"),
    ("combine", [M4, SLOTS, TOKENS, "tensor<Tx2xf32>", TOKENS], {}, "slots tensor<Tx3xi32> differ in K"),
    ("combine", [M4, SLOTS, TOKENS, "tensor<Tx3xf32>", SLOTS], {}, "picks must be tensor<Mxi32>, found"),
    ("of_pick", ["tensor<Mx3xf32>", TOKENS, SLOTS], {}, "x must be [T, K] with a constant K, found tensor<Mx3xf32>"),
    ("of_pick", ["tensor<Tx3xf32>", SLOTS, SLOTS], {}, "picks must be tensor<Mxi32>, found tensor<Tx3xi32>"),
    ("of_pick", ["tensor<Tx2xf32>", TOKENS, SLOTS], {}, "x tensor<Tx2xf32> and slots tensor<Tx3xi32> differ in K"),
    ("to_picks", ["tensor<Tx1xf32>", SLOTS, TOKENS], {}, "x must be rows of slots [M, n], found tensor<Tx1xf32>"),
    ("to_picks", ["tensor<Mx2xf32>", SLOTS, TOKENS], {}, "expected a number for each slot, [M, 1], found"),
    ("to_picks", ["tensor<Mx1xf32>", TOKENS, TOKENS], {}, "slots must be [T, K] with a constant K"),
    ("to_picks", ["tensor<Mx1xf32>", SLOTS, SLOTS], {}, "picks must be tensor<Mxi32>, found tensor<Tx3xi32>"),
    ("linear", [T4, T4], AS_MN, "the weight must be a matrix of constant"),
    ("linear", [T4, WEIGHTS], AS_MN, "the weight must be a matrix, found"),
    ("linear", [T4, "tensor<4x3xf32>"], AS_MN, "do not fit a weight tensor<4x3xf32>, which lies as [m, n]"),
    ("linear", [T4, "tensor<3x4xf32>"], AS_NM, "do not fit a weight tensor<3x4xf32>, which lies as [n, m]"),
    ("linear", [T4, "tensor<3x4xbf16>"], AS_MN, "rows are f32, the weight is bf16; cast one"),
    ("linear", [T4, "tensor<3x4xf32>"], {}, "attribute 'transposed' ("),
    ("linear", ["tensor<Tx4xi32>", "tensor<3x4xi32>"], AS_MN, "rows must be floats, found tensor<Tx4xi32>"),
    ("grouped_linear", [T4, WEIGHTS, *GROUPS], AS_MN, "x must be rows of slots"),
    ("grouped_linear", [M4, "tensor<3x4xf32>", *GROUPS], AS_MN, "one matrix an expert [E, m, n], found"),
    ("grouped_linear", [M4, WEIGHTS, *TURNED], AS_MN, "counts must be tensor<5xi32>, found tensor<6xi32>"),
    ("grouped_linear", [M4, WEIGHTS, GROUPS[0], GROUPS[0]], AS_MN, "offsets must be tensor<6xi32>, found"),
    ("wgrad", [T4, M4], {}, "expected rows [R, m] and [R, n], found tensor<Tx4xf32>"),
    ("wgrad", [T4, "tensor<Tx4xbf16>"], {}, "operands differ in type"),
    ("wgrad", [T4, "tensor<Tx4x4xf32>"], {}, "expected rows [R, m] and [R, n], found tensor<Tx4xf32>"),
    ("wgrad_parts", [T4, M4], {"parts": 2}, "expected rows [R, m] and [R, n], found tensor<Tx4xf32>"),
    ("wgrad_parts", [T4, "tensor<Tx4xbf16>"], {"parts": 2}, "operands differ in type"),
    ("wgrad_parts", [T4, T4], {}, "attribute 'parts' ("),
    ("wgrad_parts", [T4, T4], {"parts": 1}, "attribute 'parts' expects"),
    ("sum_parts", [T4], {}, "expected a matrix for each part, [P, m, n], found tensor<Tx4xf32>"),
    ("sum_parts", ["tensor<Tx4x4xf32>"], {}, "expected a matrix for each part, [P, m, n], found tensor<Tx4x4xf32>"),
    ("sum_parts", ["tensor<2x4x4xbf16>"], {}, "what is added up must be f32, found tensor<2x4x4xbf16>"),
    ("grouped_wgrad", [T4, M4, *GROUPS], {}, "a must be rows of slots [M, n], found"),
    ("grouped_wgrad", [M4, T4, *GROUPS], {}, "b must be rows of slots [M, n], found"),
    ("grouped_wgrad", [M4, "tensor<Mx4xbf16>", *GROUPS], {}, "operands differ in type"),
    ("grouped_wgrad", [M4, "tensor<Mx3xf32>", *TURNED], {}, "offsets must be tensor<7xi32>, found tensor<5xi32>"),
    ("accumulate", [WEIGHTS, "tensor<5x4x3xf32>"], {}, "main must be tensor<5x4x3xf32>, found tensor<5x3x"),
    ("accumulate", ["tensor<6xbf16>", "tensor<6xf32>"], {}, "main must be tensor<6xf32>, found tensor<6xbf16>"),
    ("expert_rows", [M4, TOKENS, *GROUPS], {}, "one vector an expert [E, n], found tensor<Mx4xf32>"),
    ("expert_rows", [WEIGHTS, TOKENS, *GROUPS], {}, "one vector an expert [E, n], found tensor<5x3x"),
    ("expert_rows", ["tensor<5x4xf32>", SLOTS, *GROUPS], {}, "tokens must be tensor<Mxi32>, found tensor<Tx3xi32>"),
    ("expert_rows", ["tensor<5x4xf32>", TOKENS, *TURNED], {}, "counts must be tensor<5xi32>, found"),
    ("expert_sums", [T4, *GROUPS], {}, "x must be rows of slots [M, n], found tensor<Tx4xf32>"),
    ("expert_sums", [M4, *TURNED], {}, "offsets must be tensor<7xi32>, found tensor<5xi32>"),
    ("split", ["tensor<Mx5xf32>"], {}, "expected rows of an even, constant length, found tensor<Mx5xf32>"),
    ("split", ["tensor<6xf32>"], {}, "expected rows of an even, constant length, found tensor<6xf32>"),
    ("join", ["tensor<Mx3xf32>", M4], {}, "expected two times the same rows, found tensor<Mx3xf32> and"),
    ("join", ["tensor<3xf32>", "tensor<3xf32>"], {}, "expected two times the same rows, found tensor<3xf32> and"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "types", "attributes", "message"), MISFITS)
def test_what_does_not_fit_is_named(op: str, types: list[str], attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        function(f"slot.{op}", types, attributes)
    assert f"slot.{op}: " in str(caught.value)
    assert message in str(caught.value)


def test_every_op_has_a_misfit() -> None:
    assert {f"slot.{op}" for op, *_ in MISFITS} == TESTED


def test_products_of_products_have_no_rule() -> None:
    """Ops that only gradients are made of: nothing flows through them, so that there is no backward function."""
    f = function("slot.wgrad", ["tensor<Tx4xf32>", "tensor<Tx3xf32>"], {})
    assert f.returned[0].type.dtype is DType.F32
    assert derive(f) is None

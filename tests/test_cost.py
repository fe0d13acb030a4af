"""What launches move and compute: numbers worked out by hand."""

from __future__ import annotations

import pytest

import moesaic as mo
from moesaic.ir.core import Module
from moesaic.ir.ops.launch import Kernel
from moesaic.ir.types import DType
from moesaic.passes.card import H100
from moesaic.passes.cost import Cost, Extents, cost_of
from moesaic.passes.cost_model import floor_us
from moesaic.passes.differentiate import Differentiate
from moesaic.runtime.program import program_of

TOKENS, ROWS, LIVE = 100, 193, 5
EXTENTS = Extents(TOKENS, ROWS, experts=LIVE)
E, H, INNER, K = 7, 136, 88, 2
EXPERTS = mo.Experts(E, H, INNER, dtype="bf16").module(DType.BF16, K, DType.I32, DType.F32)


def costs(module: Module, kind: str, passes: str = "", extents: Extents = EXTENTS) -> dict[str, tuple[Cost, Cost]]:
    """Of each kernel from its launch alone, and from what its text has an address of."""
    program = program_of(module, passes)
    executable = program.executable(kind, "sm_90a", (), program.float_results if kind == "backward" else ())
    ops = [op for op in executable.module.entry.body.ops if isinstance(op, Kernel)]
    return {
        op.symbol.removeprefix(executable.plan.name + "_"): (
            cost_of(op, extents),
            cost_of(op, extents, kernel.addressed),
        )
        for op, kernel in zip(ops, executable.kernels, strict=True)
    }


def test_a_router() -> None:
    router = mo.Router(60, 6, renormalize=True, losses={"balance": mo.LoadBalance()}).module("fp16")
    rows, _ = costs(router, "training", extents=Extents(TOKENS, 0, blocks={"B": 3}))["rows"]
    partial = 3 * 60 * 4
    assert dict(rows.read) == {0: TOKENS * 60 * 2}
    assert dict(rows.written) == {1: TOKENS * 24, 2: TOKENS * 24, 3: partial, 4: partial}
    assert (rows.product_flops, rows.product_type) == (0, "") and rows.other_flops > TOKENS * 60
    # The finish kernel only wants to know how many tokens there are.
    finish, text = costs(router, "training")["finish"]
    assert finish.bytes - text.bytes == TOKENS * 60 * 2 and text.bytes == 60 * 4 + 4 + 60 * 4


def test_a_router_in_one_launch() -> None:
    """Sums stay in the cluster: no bytes of partial rows. What follows from them is computed all the same."""
    router = mo.Router(60, 6, renormalize=True, losses={"balance": mo.LoadBalance()}).module("fp16")
    made = program_of(router).executable("training", "sm_90a", (), tokens="fewest").module
    [op] = [op for op in made.entry.body.ops if isinstance(op, Kernel)]
    cost = cost_of(op, Extents(TOKENS, 0))
    assert dict(cost.read) == {0: TOKENS * 60 * 2}
    assert dict(cost.written) == {1: TOKENS * 24, 2: TOKENS * 24, 3: 60 * 4, 4: 4}
    parts = costs(router, "training", extents=Extents(TOKENS, 0))
    assert cost.other_flops == sum(part.other_flops for part, _ in parts.values())


def test_what_is_only_gathered_counts_where_it_is_gathered() -> None:
    module = mo.parse("""
    moe.func @pick(%x: tensor<Tx61xbf16>, %ids: tensor<Tx3xi32>) -> (y: tensor<Tx3xf32>) {
      %picks = row.given %ids {size = 61} : tensor<Tx3xi32>
      %wide = math.cast %x {dtype = f32} : tensor<Tx61xf32>
      %y = row.gather %wide, %picks : tensor<Tx3xf32>
      return %y
    }
    """)
    [(cost, text)] = costs(module, "forward").values()
    assert dict(cost.read) == {0: TOKENS * 3 * 2, 1: TOKENS * 3 * 4} and dict(cost.written) == {2: TOKENS * 3 * 4}
    assert text == cost


def test_products_of_experts() -> None:
    up, text = costs(EXPERTS, "training")["gate_up_proj"]
    of_experts = {4: E * 4, 5: (E + 1) * 4}
    assert (
        dict(up.read) == {0: TOKENS * H * 2, 1: ROWS * 4, 2: TOKENS * K * 4, 3: LIVE * 2 * INNER * H * 2} | of_experts
    )
    assert dict(up.written) == {6: ROWS * 2 * INNER * 2, 7: ROWS * INNER * 2}
    assert up.product_flops == 2 * ROWS * H * 2 * INNER and up.product_type == "bf16"
    assert up.bytes == up.bytes_read + up.bytes_written
    assert up.bytes - text.bytes == TOKENS * K * 4  # slots of picks are there for backward
    # Experts that nobody says anything about are as many as there are rows, or all.
    for rows, live in ((3, 3), (ROWS, E)):
        found, _ = costs(EXPERTS, "training", extents=Extents(TOKENS, rows))["gate_up_proj"]
        assert found.read[3] == live * 2 * INNER * H * 2


@pytest.mark.parametrize("main", [False, True])
def test_gradients_of_matrices(main: bool) -> None:
    """All of it is written; a float32 sum that it is added to is read, too."""
    passes = str(Differentiate(into=("down_proj",))) if main else ""
    cost, _ = costs(EXPERTS, "backward", passes)["wgrad" if main else "d_down_proj"]
    [written] = cost.written.values()
    assert written == E * H * INNER * (4 if main else 2)
    rows = TOKENS * H * 2 + ROWS * INNER * 2
    metadata = ROWS * 4 + TOKENS * K * 4 + E * 4 + (E + 1) * 4
    assert cost.bytes_read == rows + metadata + (written if main else 0)
    assert cost.product_flops == 2 * ROWS * H * INNER


def test_floors_of_candidates_come_from_the_same_counting() -> None:
    function = program_of(EXPERTS).planned("training")
    for op in [op for op in function.body.ops if isinstance(op, Kernel)]:
        for extents in (EXTENTS, Extents(10**6, 10**7)):
            cost, floor = cost_of(op, extents), floor_us(op, extents, H100)
            by_bytes, by_flops = 1e6 * cost.bytes / H100.bandwidth, 1e6 * cost.product_flops / H100.dense
            assert floor == max(by_bytes, by_flops, H100.launch_us)

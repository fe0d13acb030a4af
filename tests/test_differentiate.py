"""``differentiate``, and ``choose-saved``, what backward keeps: the IR they make, as FileCheck lines, and what they say and refuse."""

# ruff: noqa: E501 - a line of expected IR is as long as the IR

import re

import pytest
from lowering import file_check, lower
from pass_modules import module, run

import moesaic as mo
from moesaic.ir.builder import Builder
from moesaic.ir.errors import InputError, UnsupportedError

# differentiate ---------------------------------------------------------------------------------------------------------


def test_differentiate():
    m = mo.Router(
        num_experts=5, top_k=2, score="sigmoid", selection_bias=True, gate_bias=True, renormalize=True
    ).module("bf16")
    changed, _ = run("differentiate", m)
    assert changed and [f.name for f in m.functions] == ["route", "route_backward"]
    file_check(
        m,
        """
        CHECK: moe.func @route_backward(%logits: tensor<Tx5xbf16>, %gate_bias: tensor<5xf32>, %bias: tensor<5xf32>, %d_weights: tensor<Tx2xf32>) -> (d_logits: tensor<Tx5xbf16>, d_gate_bias: tensor<5xf32>) {
        CHECK: %scores = math.sigmoid
        CHECK: row.topk
        CHECK: row.normalize
        CHECK: row.scatter {{.*}} {size = 5}
        CHECK-DAG: %d_logits = math.cast {{.*}} {dtype = bf16}
        CHECK-DAG: %d_gate_bias = col.sum
        CHECK: return %d_logits, %d_gate_bias
        """,
    )
    assert not run("differentiate", m)[0], "it has its backward function already"


def test_differentiate_chosen_results():
    router = mo.Router(num_experts=5, top_k=2, outputs=("weights", "probs", "counts"))
    m, _ = lower(router.module(), "differentiate{cotangents=probs}")
    assert [a.name for a in m.function("route_backward").arguments] == ["logits", "d_probs"]
    m, _ = lower(router.module(), "differentiate")
    assert [a.name for a in m.function("route_backward").arguments] == ["logits", "d_weights", "d_probs"]
    with pytest.raises(
        InputError, match=r"'counts' is not a float result of @route; these are: \['weights', 'probs'\]"
    ):
        lower(router.module(), "differentiate{cotangents=counts}")
    with pytest.raises(InputError, match=r"two inputs of @route_backward would be called 'd_probs'"):
        lower(router.module(), "differentiate{cotangents=probs,probs}")


def test_nothing_to_differentiate():
    m, context = lower(mo.Router(num_experts=5, top_k=2, outputs=("indices", "map")).module(), "differentiate")
    assert len(m.functions) == 1
    assert context.remarks == ["differentiate: no gradient reaches an input; there is no backward function"]


def test_a_value_returned_twice_adds_up():
    m, _ = lower(module("%y = math.exp %x", a="y", b="y", c="x"), "differentiate")
    file_check(
        m,
        """
        CHECK: moe.func @f_backward(%x: tensor<Tx5xf32>, %d_a: tensor<Tx5xf32>, %d_b: tensor<Tx5xf32>, %d_c: tensor<Tx5xf32>)
        CHECK: [[S:%.+]] = math.add %d_a, %d_b
        CHECK: [[M:%.+]] = math.mul [[S]], %y
        CHECK: %d_x = math.add %d_c, [[M]]
        """,
    )


@pytest.mark.parametrize("type", ["tensor<1xf32>", "tensor<1x5xf32>"])
def test_gradients_of_other_repetitions_are_refused(type):
    b = Builder("f")
    x, s = b.input("x", "tensor<Tx5xf32>"), b.input("s", type)
    m = b.build(y=b.op("math.mul", x, s))
    with pytest.raises(UnsupportedError, match=r"differentiate: math\.mul repeats an operand of shape"):
        run("differentiate", m)


# choose-saved ----------------------------------------------------------------------------------------------------------


FUSED = "canonicalize,cse,dce,differentiate,expand-rows,sink-gathers,cse,dce,fuse-score-topk,choose-saved,dce"


def test_choose_saved():
    router = mo.Router(num_experts=7, top_k=3, score="sigmoid", selection_bias=True, renormalize=True)
    m, context = lower(router.module("bf16"), FUSED)
    [remark] = context.remarks
    assert re.fullmatch(
        r"choose-saved: keeps indices tensor<Tx3xi32> \(12 B/token\); "
        r"backward computes \d+ forward values again, and reads logits",
        remark,
    )
    assert m.entry.result_names == ["weights", "indices", "counts"]
    file_check(
        m,
        """
        CHECK: moe.func @route_backward(%logits: tensor<Tx7xbf16>, %d_weights: tensor<Tx3xf32>, %indices: tensor<Tx3xi32>)
        CHECK-NOT: row.topk
        CHECK: row.gather %logits, %indices
        CHECK: row.scatter
        """,
    )


def test_choose_saved_adds_a_result():
    """Picks are not among the outputs, and renormalising needs them in backward."""
    m, context = lower(mo.Router(num_experts=7, top_k=3, outputs=("probs", "map"), renormalize=True).module(), FUSED)
    assert m.entry.result_names == ["probs", "map", "saved_indices"]
    assert [str(t) for t in m.entry.result_types] == ["tensor<Tx7xf32>", "tensor<Tx7xu8>", "tensor<Tx3xi32>"]
    [remark] = context.remarks
    assert remark.startswith("choose-saved: keeps saved_indices tensor<Tx3xi32> (12 B/token)")


def test_choose_saved_takes_the_byte_map_where_it_is_smaller():
    """Without a division, backward only asks which experts were picked: 7 bytes a token instead of 3 * 4."""
    m, context = lower(mo.Router(num_experts=7, top_k=3, outputs=("probs", "map")).module(), FUSED)
    assert m.entry.result_names == ["probs", "map"]
    assert context.remarks[0].startswith("choose-saved: keeps map tensor<Tx7xu8> (7 B/token)")
    m, context = lower(mo.Router(num_experts=13, top_k=3, outputs=("probs", "map")).module(), FUSED)
    assert "tensor<Tx3xi32> (12 B/token)" in context.remarks[0]


def test_choose_saved_keeps_nothing_where_nothing_is_selected():
    m, context = lower(module("%y = row.softmax %x"), FUSED)
    [remark] = context.remarks
    assert remark.startswith("choose-saved: keeps nothing (0 B/token)") and remark.endswith("and reads x")
    assert m.entry.result_names == ["y"]
    forward_only, _ = lower(module("%y = row.softmax %x"), "expand-rows,fuse-score-topk")
    assert not run("choose-saved", forward_only)[0]

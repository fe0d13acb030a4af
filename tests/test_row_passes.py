"""The passes that make row programs: ``expand-rows``, ``sink-gathers``, ``fuse-score-topk`` and ``lower-aux-loss``: the IR they make, as FileCheck lines, and what they say and refuse."""

# ruff: noqa: E501 - a line of expected IR is as long as the IR

import pytest
from lowering import file_check, lower
from pass_modules import module, run

import moesaic as mo
from moesaic.ir.diagnostics import DiagnosticError

# expand-rows -----------------------------------------------------------------------------------------------------------


def test_expand_softmax():
    m, _ = lower(module("%y = row.softmax %h"), "expand-rows")
    file_check(
        m,
        """
        CHECK: %largest = row.max %h : tensor<Tx1xf32>
        CHECK-NEXT: [[NONE:%.+]] = math.equal %largest, -inf
        CHECK-NEXT: %shift = math.select [[NONE]], 0.0, %largest
        CHECK-NEXT: %exponentials = math.exp_difference %h, %shift : tensor<Tx5xf32>
        CHECK-NEXT: %total = row.sum %exponentials
        CHECK-NEXT: %y = math.safe_div %exponentials, %total
        CHECK-NEXT: return %y
        """,
    )
    m, _ = lower(module("%y = row.logsumexp %h"), "expand-rows")
    file_check(
        m,
        """
        CHECK: [[L:%.+]] = math.log
        CHECK-NEXT: %y = math.add %shift, [[L]] : tensor<Tx1xf32>
        """,
    )


@pytest.mark.parametrize(
    ("attributes", "checks"),
    [
        ("", "CHECK: %divisor = row.sum %p\nCHECK-NEXT: %y = math.safe_div %p, %divisor"),
        (
            " {eps = 0.5, min = 2.0}",
            (
                "CHECK: [[S:%.+]] = row.sum %p\nCHECK-NEXT: [[E:%.+]] = math.add [[S]], 0.5\n"
                "CHECK-NEXT: %divisor = math.maximum [[E]], 2.0\nCHECK-NEXT: %y = math.safe_div %p, %divisor"
            ),
        ),
    ],
)
def test_expand_normalize(attributes, checks):
    m = module(f"%y = row.normalize %p{attributes}")
    assert run("expand-rows", m)[0]
    file_check(m, checks)
    assert not run("expand-rows", m)[0]


# sink-gathers ----------------------------------------------------------------------------------------------------------


SINKS = {
    "a chain": (
        "%s = math.sigmoid %x\n%t = math.add %s, %v\n%u = math.mul %t, %c\n%y = row.gather %u, %i",
        """
        CHECK: [[X:%.+]] = row.gather %x, %i
        CHECK: [[S:%.+]] = math.sigmoid [[X]]
        CHECK: [[V:%.+]] = row.gather %v, %i
        CHECK: [[T:%.+]] = math.add [[S]], [[V]]
        CHECK-NOT: row.gather %c
        CHECK: %u = math.mul [[T]], %c : tensor<Tx2xf32>
        CHECK: return %u
        """.replace("%u =", "%y =").replace("return %u", "return %y"),
    ),
    "what was ranked": (
        "%val, %ind = row.topk %x {k = 3}\n%y = row.gather %x, %ind",
        "CHECK-NOT: row.gather\nCHECK: return %val",
    ),
    "what was ranked, then scored": (
        "%val, %ind = row.topk %x {k = 3}\n%s = math.sigmoid %x\n%y = row.gather %s, %ind",
        "CHECK: %y = math.sigmoid %val : tensor<Tx3xf32>\nCHECK-NEXT: return %y",
    ),
    "a condition": (
        "%l = math.less %x, %v\n%s = math.select %l, %x, 0.0\n%y = row.gather %s, %i",
        """
        CHECK-DAG: [[X:%.+]] = row.gather %x, %i
        CHECK-DAG: [[V:%.+]] = row.gather %v, %i
        CHECK: [[L:%.+]] = math.less {{.*}} : tensor<Tx2xi1>
        CHECK: %y = math.select [[L]]
        """,
    ),
    "numbers per token": (
        "%m = row.max %x\n%s = math.sub %x, %m\n%b = math.broadcast %m, %x\n%t = math.mul %s, %b\n%y = row.gather %t, %i",
        """
        CHECK: [[X:%.+]] = row.gather %x, %i
        CHECK: [[S:%.+]] = math.sub [[X]], %m : tensor<Tx2xf32>
        CHECK: [[B:%.+]] = math.broadcast %m, %i : tensor<Tx2xf32>
        CHECK: %y = math.mul [[S]], [[B]]
        """,
    ),
    "scatter to select": (
        "%s = math.sigmoid %x\n%g = row.gather %s, %i\n%n = row.sum %g\n%w = math.div %g, %n\n%y = row.scatter %w, %i {size = 5}",
        """
        CHECK: [[D:%.+]] = math.sigmoid %x : tensor<Tx5xf32>
        CHECK: [[W:%.+]] = math.div [[D]], %n : tensor<Tx5xf32>
        CHECK: [[M:%.+]] = row.membership %i {size = 5} : tensor<Tx5xu8>
        CHECK: %y = math.select [[M]], [[W]], 0.0 : tensor<Tx5xf32>
        CHECK-NOT: row.scatter
        """,
    ),
    "a scatter gathered back": (
        "%q = row.scatter %p, %i {size = 5}\n%d2 = math.mul %q, 2.0\n%y = row.gather %d2, %i",
        "CHECK-NOT: row.gather\nCHECK: %y = math.mul %p, 2.0 : tensor<Tx2xf32>",
    ),
}


SINKS["given picks"] = (
    "%here = row.given %i {size = 5}\n%s = math.sigmoid %x\n%g = row.gather %s, %here\n%y = row.scatter %g, %here {size = 5}",
    """
    CHECK: [[X:%.+]] = row.gather %x, %here
    CHECK: [[S:%.+]] = math.sigmoid [[X]]
    CHECK: [[A:%.+]] = math.less %here, 0.0 : tensor<Tx2xi1>
    CHECK: %g = math.select [[A]], 0.0, [[S]] : tensor<Tx2xf32>
    CHECK: %y = row.scatter %g, %here {size = 5}
    """,
)

SINKS["a broadcast scattered"] = (
    (
        "%m = row.sum %p\n%g = row.gather %v, %i\n%b = math.broadcast %m, %g\n%w = math.mul %g, %b\n"
        "%y = row.scatter %w, %i {size = 5}"
    ),
    """
    CHECK: [[W:%.+]] = math.mul %v, %m : tensor<Tx5xf32>
    CHECK: [[M:%.+]] = row.membership %i {size = 5}
    CHECK: %y = math.select [[M]], [[W]], 0.0 : tensor<Tx5xf32>
    """,
)


@pytest.mark.parametrize("case", SINKS)
def test_sink_gathers(case):
    body, checks = SINKS[case]
    m = module(body)
    assert run("sink-gathers", m)[0]
    run("cse", m)
    run("dce", m)
    file_check(m, checks)
    assert not run("sink-gathers", m)[0]


@pytest.mark.parametrize(
    "body",
    [
        "%y = row.gather %x, %i",
        "%y = row.gather %v, %i",
        "%y = row.scatter %p, %i {size = 5}",  # picks that come from outside have no rows
        "%g = row.gather %x, %i\n%w = math.mul %g, %p\n%y = row.scatter %w, %i {size = 5}",
        "%g = row.gather %x, %i\n%val, %ind = row.topk %x {k = 2}\n%y = row.scatter %g, %ind {size = 5}",  # other picks
        "%g = row.gather %x, %i\n%y = row.scatter %g, %i {size = 7}",  # rows of another length
        "%a = row.group_limit %x {groups = 5, keep = 2, score = max}\n%s = math.select %a, %x, 0.0\n%y = row.gather %s, %i",
    ],
)
def test_what_does_not_sink(body):
    m = module(body)
    before = str(m)
    assert not run("sink-gathers", m)[0]
    assert str(m) == before, "a pass that says it changed nothing left something behind"


# fuse-score-topk -------------------------------------------------------------------------------------------------------


def test_fuse():
    router = mo.Router(num_experts=5, top_k=2, score="sigmoid", outputs=("weights", "indices", "counts"))
    m, _ = lower(router.module("bf16"), "expand-rows,sink-gathers,dce,fuse-score-topk")
    file_check(
        m,
        """
        CHECK: moe.func @route(%logits: tensor<Tx5xbf16>)
        CHECK-NEXT: %weights, %indices, %counts_partial = kernel.row_program %logits {blocks = B} (%logits: tensor<Tx5xbf16>) {
        CHECK: row.topk %logits {k = 2}
        CHECK: %counts = col.count %indices {size = 5} : tensor<5xi32>
        CHECK-NEXT: yield {{%.+}}, %indices, %counts
        CHECK-NEXT: } : tensor<Tx2xf32>, tensor<Tx2xi32>, tensor<Bx5xi32>
        CHECK-NEXT: %counts = kernel.col_finish %counts_partial {partials = 1} (%counts: tensor<5xi32>) {
        CHECK-NEXT: yield %counts
        CHECK-NEXT: } : tensor<5xi32>
        CHECK-NEXT: return {{%.+}}, %indices, %counts
        """.replace("%weights, %indices", "{{%.+}}, %indices"),
    )


def test_fuse_passes_inputs_and_constants_through_and_hands_out_each_value_once():
    m, _ = lower(
        module("%y = math.exp %x\n%t = math.add 1.0, 2.0", a="y", b="y", c="x"), "canonicalize,dce,fuse-score-topk"
    )
    file_check(
        m,
        """
        CHECK: %y = kernel.row_program %x {blocks = B} (%x: tensor<Tx5xf32>) {
        CHECK-NEXT: %y = math.exp %x
        CHECK-NEXT: yield %y
        CHECK-NEXT: } : tensor<Tx5xf32>
        CHECK-NEXT: return %y, %y, %x
        """,
    )
    empty = module("", y="x")
    assert not run("fuse-score-topk", empty)[0]


def test_a_column_sum_cannot_be_used_in_its_own_pass():
    m = module("%s = col.sum %x\n%y = math.mul %x, %s")
    with pytest.raises(
        DiagnosticError, match=r"<text>:3:8: error: math\.mul: uses a sum over tokens within the same pass"
    ):
        run("fuse-score-topk", m)


def test_what_follows_sums_is_computed_by_the_last_block():
    m, _ = lower(module("%s = col.sum %x\n%y = math.exp %s\n%t = col.total %y", s="s", t="t"), "fuse-score-topk")
    file_check(
        m,
        """
        CHECK: %s_partial, %ticket = kernel.row_program %x {blocks = B} (%x: tensor<Tx5xf32>) {
        CHECK-NEXT: %s = col.sum %x
        CHECK-NEXT: [[ZERO:%.+]] = kernel.ticket : tensor<i32>
        CHECK-NEXT: yield %s, [[ZERO]]
        CHECK-NEXT: } : tensor<Bx5xf32>, tensor<i32>
        CHECK-NEXT: %s, %t = kernel.col_finish %s_partial, %ticket {partials = 1} (%s: tensor<5xf32>, %ticket: tensor<i32>) {
        CHECK-NEXT: %y = math.exp %s
        CHECK-NEXT: %t = col.total %y
        CHECK-NEXT: yield %s, %t
        CHECK-NEXT: } : tensor<5xf32>, tensor<f32>
        CHECK-NEXT: return %s, %t
        """,
    )


# lower-aux-loss --------------------------------------------------------------------------------------------------------


def test_losses_become_sums():
    router = mo.Router(num_experts=5, top_k=2, losses={"balance": mo.LoadBalance(coef=0.5)}, outputs=("indices",))
    m, _ = lower(router.module(), "lower-aux-loss")
    file_check(
        m,
        """
        CHECK: %scores = row.softmax %logits
        CHECK: [[COUNTS:%.+]] = col.count %indices {size = 5} : tensor<5xi32>
        CHECK: [[T:%.+]] = col.rows %logits : tensor<f32>
        CHECK-NEXT: %score_sums = col.sum %scores : tensor<5xf32>
        CHECK-NEXT: [[SHARE:%.+]] = math.mul [[COUNTS]], %score_sums
        CHECK-NEXT: [[TOTAL:%.+]] = col.total [[SHARE]] : tensor<f32>
        CHECK-NEXT: [[ONCE:%.+]] = math.safe_div [[TOTAL]], [[T]]
        CHECK-NEXT: [[TWICE:%.+]] = math.safe_div [[ONCE]], [[T]]
        CHECK-NEXT: %loss_balance = math.mul [[TWICE]], 1.25
        CHECK-NEXT: return %indices, %loss_balance
        """,
    )
    with pytest.raises(DiagnosticError, match=r"moe\.load_balance_loss: is differentiated after lower-aux-loss"):
        run("differentiate", router.module())


def test_sums_over_tokens_are_handed_to_backward():
    router = mo.Router(num_experts=5, top_k=2, losses={"balance": mo.LoadBalance()}, outputs=("indices",))
    m, _ = lower(router.module(), "lower-aux-loss,cse,dce,differentiate")
    forward, backward = m.functions
    assert forward.result_names[:2] == ["indices", "loss_balance"] and len(forward.result_names) == 3
    assert [a.name for a in backward.arguments] == ["logits", "d_loss_balance", forward.result_names[2]]
    assert not any(op.name in ("col.count", "col.sum") for op in backward.body.ops), "backward recomputes a sum"

"""Each pass by the IR it makes, as FileCheck lines, and by what it says and refuses."""

# ruff: noqa: E501 - a line of expected IR is as long as the IR

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowering import file_check, lower

import moesaic as mo
from moesaic.ir.builder import Builder
from moesaic.ir.diagnostics import DiagnosticError
from moesaic.ir.errors import InputError, UnsupportedError, UsageError
from moesaic.ir.parser import parse
from moesaic.passes.differentiate import derive
from moesaic.passes.manager import PassContext, PassManager, pass_class
from moesaic.passes.specialize import MAX_EXPERTS, Specialize

TYPES = {
    "x": "tensor<Tx5xf32>",
    "z": "tensor<Tx5xf32>",
    "h": "tensor<Tx5xbf16>",
    "d": "tensor<Tx5xf64>",
    "v": "tensor<5xf32>",
    "c": "tensor<Tx1xf32>",
    "i": "tensor<Tx2xi32>",
    "p": "tensor<Tx2xf32>",
}


def module(body, **results):
    """A function over those of the inputs above that the body names; `results` gives names and values."""
    named = results or {"y": "y"}
    used = [n for n in TYPES if re.search(rf"%{n}\b", body + "".join(f"%{v} " for v in named.values()))]
    lines = "\n".join("  " + line.strip() for line in body.strip().splitlines())
    head = ", ".join(f"%{n}: {TYPES[n]}" for n in used)
    b = parse(f"moe.func @f({head}) -> () {{\n{lines}\n  return\n}}\n", verify=False)
    function = b.entry
    by_name = {a.name: a for a in function.arguments} | {r.name: r for op in function.body.walk() for r in op.results}
    function.returned.extend(by_name[v] for v in named.values())
    function.result_names.extend(named)
    return b


def run(name, m, **options):
    """(changed, context) of one pass, in place."""
    context = PassContext()
    return pass_class(name)(**options).run(m, context), context


# canonicalize ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        ("%y = math.mul %x, 1.0", "return %x"),
        ("%y = math.mul 1.0, %x", "return %x"),
        ("%y = math.div %x, 1.0", "return %x"),
        ("%n = math.neg %x\n%y = math.neg %n", "return %x"),
        ("%y = math.cast %x {dtype = f32}", "return %x"),
        ("%y = math.broadcast %x, %z", "return %x"),
        ("%y = math.neg 2.5", "return -2.5"),
        ("%y = math.neg nan", "return nan"),
        ("%y = math.add 1.5, 2.0", "return 3.5"),
        ("%y = math.sub inf, inf", "return nan"),
        ("%y = math.mul 3.0, -0.0", "return -0.0"),
        ("%y = math.div 1.0, 4.0", "return 0.25"),
        ("%a = math.add 1.0, 1.0\n%y = math.mul %a, %a", "return 4.0"),
        ("%y = math.mul 0.1, 0.1", "return 0.010000000707805157"),  # 0.1f * 0.1f in float32, not 0.01
        ("%y = math.div 1.0, 3.0", "return 0.3333333432674408"),
    ],
)
def test_identities_and_constants(body, kept):
    m = module(body)
    assert run("canonicalize", m)[0]
    run("dce", m)
    assert str(m.entry.body.ops[-1].operands[0].type) == str(m.entry.result_types[0])
    file_check(m, f"CHECK: {kept}")
    assert not run("canonicalize", m)[0], "a second run has nothing left to do"


@pytest.mark.parametrize(
    "body",
    [
        "%y = math.mul %h, 1.0",  # also rounds up to float32
        "%y = math.div %h, 1.0",
        "%n = math.neg %h\n%y = math.neg %n",
        "%y = math.cast %h {dtype = f32}",
        "%y = math.broadcast %c, %x",
        "%y = math.broadcast %h, %x",
        "%y = math.add %x, 0.0",  # -0 + 0 is +0
        "%y = math.mul %x, 0.0",  # NaN, infinity and -0 stay what they are
        "%y = math.sub %x, %x",
        "%y = math.div 1.0, %x",
        "%y = math.div %x, %x",
        "%y = math.mul %c, 2.0",
        "%y = math.div 1.0, 0.0",
        "%y = math.add 3e38, 3e38",  # overflows on the device, as the device has it
        "%y = math.add 1e39, 1.0",
        "%y = math.mul %x, -1.0",
        "%y = row.normalize %p",
        "%y = row.softmax %p",
    ],
)
def test_what_is_no_identity_stays(body):
    m = module(body)
    before = str(m)
    changed, context = run("canonicalize", m)
    assert not changed and str(m) == before and not context.warnings


def test_normalising_one_pick_is_constant():
    m = mo.Router(num_experts=7, top_k=1, renormalize=True, scale=2.0).module()
    changed, context = run("canonicalize", m)
    assert changed
    [warning] = context.warnings
    assert "row.normalize over one pick is the constant 1" in warning and "leave the normalisation out" in warning
    file_check(
        m,
        """
        CHECK: %picked_scores = row.gather
        CHECK-NEXT: [[D:%.+]] = math.sub %picked_scores, %picked_scores
        CHECK-NEXT: [[F:%.+]] = math.equal [[D]], 0.0
        CHECK-NEXT: [[N:%.+]] = math.select [[F]], 1.0, nan
        CHECK-NEXT: [[Z:%.+]] = math.equal %picked_scores, 0.0
        CHECK-NEXT: [[W:%.+]] = math.select [[Z]], 0.0, [[N]]
        CHECK-NOT: row.normalize
        """,
    )
    backward = derive(m.entry)
    assert backward is None, "no gradient reaches the router"


def test_normalising_one_pick_keeps_zero_nan_and_infinity():
    torch = pytest.importorskip("torch")
    from moesaic.runtime.reference import evaluate

    b = Builder("f")
    w = b.input("w", "tensor<Tx1xf64>")
    m = b.build(y=b.op("row.normalize", w))
    x = torch.tensor([[0.0], [-0.0], [float("nan")], [float("inf")], [3.0], [1e-30]], dtype=torch.float64)
    wanted = evaluate(m.entry, {"w": x})[0]
    assert run("canonicalize", m)[0]
    found = evaluate(m.entry, {"w": x})[0]
    assert wanted.flatten()[4:].tolist() == [1.0, 1.0]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("options", [{"renorm_eps": 1e-20}, {"renormalize": mo.norm.sum(min=1e-9)}])
def test_normalising_one_pick_with_a_limit_only_warns_and_once(options):
    router = mo.Router(num_experts=7, top_k=1, scale=2.0, gate_bias=True, **{"renormalize": True, **options})
    m = router.module()
    _, context = lower(m, "canonicalize,canonicalize")
    assert len(context.warnings) == 1
    assert "row.normalize" in str(lower(m, "canonicalize")[0])


def test_a_warning_comes_once_whatever_else_changes():
    m = module(
        """
        %one, %j = row.topk %x {k = 1}
        %n = row.normalize %one {eps = 0.5}
        %a = math.mul %n, 1.0
        %b = math.mul %a, 1.0
        %y = math.mul %b, 1.0
        """
    )
    _, context = run("canonicalize", m)
    assert len(context.warnings) == 1


def test_score_after_selecting_one_warns():
    m = mo.Router(num_experts=7, top_k=1, order="topk_then_score").module()
    _, context = run("canonicalize", m)
    [warning] = context.warnings
    assert "row.softmax over one pick is the constant 1" in warning and "score before top-k" in warning
    for fine in (
        mo.Router(num_experts=7, top_k=1),
        mo.Router(num_experts=7, top_k=1, order="topk_then_score", score="sigmoid"),
        mo.Router(num_experts=7, top_k=2, renormalize=True),
    ):
        assert not run("canonicalize", fine.module())[1].warnings


# cse and dce ----------------------------------------------------------------------------------------------------------


def test_cse():
    m = module(
        """
        %a = math.exp %x
        %b = math.exp %x
        %e = math.mul %a, 0.0
        %g = math.mul %b, 0.0
        %k = math.mul %b, -0.0
        %v1, %i1 = row.topk %e {k = 2}
        %v2, %i2 = row.topk %g {k = 2}
        %v3, %i3 = row.topk %g {k = 3}
        %s = math.sub %x, %z
        %t = math.sub %z, %x
        """,
        p="i1",
        q="i2",
        r="i3",
        s="k",
        t="s",
        u="t",
    )
    assert run("cse", m)[0]
    file_check(
        m,
        """
        CHECK: %a = math.exp %x
        CHECK-NEXT: %e = math.mul %a, 0.0
        CHECK-NEXT: %k = math.mul %a, -0.0
        CHECK-NEXT: %v1, %i1 = row.topk %e {k = 2}
        CHECK-NEXT: %v3, %i3 = row.topk %e {k = 3}
        CHECK-NEXT: %s = math.sub %x, %z
        CHECK-NEXT: %t = math.sub %z, %x
        CHECK-NEXT: return %i1, %i1, %i3, %k, %s, %t
        """,
    )
    assert not run("cse", m)[0]


def test_cse_leaves_buffers_and_kernels_alone():
    m, _ = lower(mo.Router(num_experts=5, top_k=2, outputs=("counts", "map")).module(), "forward")
    allocs = sum(op.name == "launch.alloc" for op in m.walk())
    assert allocs == 3 and not run("cse", m)[0]


def test_dce():
    m = module("%a = math.exp %x\n%b = math.exp %a\n%y = math.neg %x\n%n = row.sum %b")
    assert run("dce", m)[0]
    assert [op.name for op in m.walk()] == ["math.neg", "return"]
    assert not run("dce", m)[0]


def test_dce_shrinks_kernels():
    m = parse(
        """
        moe.func @f(%x: tensor<Tx5xf32>, %b: tensor<5xf32>, %v: tensor<5xf32>) -> (t: tensor<Tx5xf32>, s: tensor<5xf32>) {
          %p, %q, %r = kernel.row_program %x, %b, %v {blocks = B} (%x: tensor<Tx5xf32>, %b: tensor<5xf32>, %v: tensor<5xf32>) {
            %e = math.mul %x, %b
            %t = math.add %x, %v
            %s = col.sum %t
            yield %e, %t, %s
          }
          %fin = kernel.col_finish %r {partials = 1} (%r: tensor<5xf32>) {
            yield %r
          }
          %unused = kernel.col_finish %r {partials = 1} (%r: tensor<5xf32>) {
            yield %r
          }
          return %q, %fin
        }
        """
    )
    assert run("dce", m)[0]
    file_check(
        m,
        """
        CHECK: moe.func @f(%x: tensor<Tx5xf32>, %b: tensor<5xf32>, %v: tensor<5xf32>)
        CHECK-NEXT: %q, %r = kernel.row_program %x, %v {blocks = B} (%x: tensor<Tx5xf32>, %v: tensor<5xf32>) {
        CHECK-NEXT: %t = math.add %x, %v
        CHECK-NEXT: %s = col.sum %t
        CHECK-NEXT: yield %t, %s
        CHECK-NEXT: } : tensor<Tx5xf32>, tensor<Bx5xf32>
        CHECK-NEXT: %fin = kernel.col_finish %r {partials = 1} (%r: tensor<5xf32>) {
        CHECK-NEXT: yield %r
        CHECK-NEXT: } : tensor<5xf32>
        CHECK-NEXT: return %q, %fin
        """,
    )
    assert not run("dce", m)[0]


# differentiate --------------------------------------------------------------------------------------------------------


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


# expand-rows ----------------------------------------------------------------------------------------------------------


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


# sink-gathers ---------------------------------------------------------------------------------------------------------

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


# fuse-score-topk ------------------------------------------------------------------------------------------------------


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


# lower-aux-loss -------------------------------------------------------------------------------------------------------


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


# choose-saved ---------------------------------------------------------------------------------------------------------

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


# plan-workspace -------------------------------------------------------------------------------------------------------


def test_plan():
    router = mo.Router(num_experts=5, top_k=2, outputs=("indices", "counts"))
    m, _ = lower(router.module(), "expand-rows,sink-gathers,dce,fuse-score-topk,plan-workspace")
    file_check(
        m,
        """
        CHECK: %indices = launch.alloc {space = result, type = "tensor<Tx2xi32>"} : tensor<Tx2xi32>
        CHECK-NEXT: %counts_partial = launch.alloc {slot = 0, space = workspace, type = "tensor<Bx5xi32>"} : tensor<Bx5xi32>
        CHECK-NEXT: launch.kernel %logits, %indices, %counts_partial {blocks = B, reads = 1, symbol = route_rows, template = row_program} (%logits: tensor<Tx5xf32>) {
        CHECK: yield %indices, %counts
        CHECK: %counts = launch.alloc {space = result, type = "tensor<5xi32>"}
        CHECK-NEXT: launch.kernel %counts_partial, %counts {partials = 1, reads = 1, symbol = route_finish, template = col_finish}
        CHECK: return %indices, %counts
        """,
    )


def chain(reads):
    """Kernels in a row, each writing one [T, 5] value; `reads[n]` says which of the earlier values kernel n reads."""
    lines = []
    for n, earlier in enumerate(reads):
        operands = ", ".join(f"%k{r}" for r in earlier) or "%x"
        arguments = ", ".join(f"%a{i}: tensor<Tx5xf32>" for i in range(max(len(earlier), 1)))
        lines.append(f"%k{n} = kernel.row_program {operands} {{blocks = B}} ({arguments}) {{")
        lines.append("%y = math.exp %a0\nyield %y\n}")
    body = "\n".join(lines)
    return parse(
        f"moe.func @f(%x: tensor<Tx5xf32>) -> (y: tensor<Tx5xf32>) {{\n{body}\nreturn %k{len(reads) - 1}\n}}\n"
    )


def test_slots_are_reused_once_their_last_reader_has_run():
    """k0 is read by k1 only, so k2 may take its place; k1 lives until k3, so k2 may not take that."""
    m = chain([[], [0], [1], [2, 1], [3]])
    lowered, _ = lower(m, "plan-workspace")
    slots = {op.buffer.name: op.slot for op in lowered.walk() if op.name == "launch.alloc" and op.space == "workspace"}
    assert slots == {"k0": 0, "k1": 1, "k2": 0, "k3": 2}


def test_slots_of_one_kernel_are_apart_even_if_nobody_reads_them():
    m = parse(
        """
        moe.func @f(%x: tensor<Tx5xf32>) -> (y: tensor<Tx5xf32>) {
          %a, %b, %c = kernel.row_program %x {blocks = B} (%x: tensor<Tx5xf32>) {
            %p = math.exp %x
            %q = math.tanh %x
            %r = math.neg %x
            yield %p, %q, %r
          }
          %y = kernel.row_program %b {blocks = C} (%b: tensor<Tx5xf32>) {
            %s = math.exp %b
            yield %s
          }
          return %y
        }
        """
    )
    lowered, _ = lower(m, "plan-workspace")
    slots = [op.slot for op in lowered.walk() if op.name == "launch.alloc" and op.space == "workspace"]
    assert sorted(slots) == [0, 1, 2]


def test_slots_of_other_sizes_are_not_shared():
    m = parse(
        """
        moe.func @f(%x: tensor<Tx5xf32>) -> (y: tensor<Tx5xf32>) {
          %a = kernel.row_program %x {blocks = B} (%x: tensor<Tx5xf32>) {
            %s = row.sum %x
            yield %s
          }
          %b = kernel.row_program %x, %a {blocks = C} (%x: tensor<Tx5xf32>, %a: tensor<Tx1xf32>) {
            %s = math.mul %x, %a
            yield %s
          }
          %c = kernel.row_program %b {blocks = D} (%b: tensor<Tx5xf32>) {
            %s = math.cast %b {dtype = bf16}
            yield %s
          }
          %y = kernel.row_program %c {blocks = A} (%c: tensor<Tx5xbf16>) {
            %s = math.exp %c
            yield %s
          }
          return %y
        }
        """
    )
    lowered, _ = lower(m, "plan-workspace")
    slots = [op.slot for op in lowered.walk() if op.name == "launch.alloc" and op.space == "workspace"]
    assert slots == [0, 1, 2]


# specialize -----------------------------------------------------------------------------------------------------------


def configuration(router, pipeline="forward", dtype="f32"):
    m, _ = lower(router.module(dtype), pipeline)
    return [op.configuration for op in m.walk() if op.name == "launch.kernel"]


def test_specialize():
    [rows, finish] = configuration(mo.Router(num_experts=128, top_k=8, score="softmax"), dtype="bf16")
    assert rows["target"] == finish["target"] == "sm_90a"
    assert rows["grid"] == "persistent" and rows["select"] in ("merge", "rounds") and rows["alignment"] == "16"
    assert int(rows["vec"]) == 8
    [rows] = configuration(mo.Router(num_experts=128, top_k=64, outputs=("weights",)))
    assert rows["grid"] == "cover" and rows["select"] == "sort" and int(rows["vec"]) == 4


@settings(max_examples=60)
@given(
    st.one_of(st.integers(1, 1024), st.integers(1025, MAX_EXPERTS)),
    st.sampled_from(["f32", "bf16"]),
    st.sampled_from([("weights", "indices", "counts"), ("probs", "map"), ("indices",)]),
    st.data(),
)
def test_every_number_of_experts_has_a_configuration(experts, dtype, outputs, data):
    k = data.draw(st.integers(1, min(experts, 40)))
    router = mo.Router(num_experts=experts, top_k=k, outputs=outputs, renormalize=True)
    for config in configuration(router, "default", dtype):
        if "lanes" not in config:
            continue
        lanes, vec, threads = (int(config[n]) for n in ("lanes", "vec", "threads"))
        assert lanes & (lanes - 1) == 0 and 1 <= lanes <= 1024 and experts % vec == 0 and vec & (vec - 1) == 0
        assert lanes == threads if experts > 1024 else lanes <= 32
        slots = -(-experts // (lanes * vec)) * vec
        assert lanes * slots >= experts and slots <= 32, "membership packs one bit a slot into a word"
        assert threads % 32 == 0 and threads % lanes == 0 and 32 <= threads <= 1024
        if vec > 1:
            assert vec * (2 if dtype == "bf16" else 4) <= 16


def test_limits_of_specialize():
    assert MAX_EXPERTS == 16384
    assert configuration(mo.Router(num_experts=16384, top_k=3))
    with pytest.raises(UnsupportedError, match="rows of 16385 experts: a row program holds up to 16384 in registers"):
        configuration(mo.Router(num_experts=16385, top_k=3))
    with pytest.raises(UnsupportedError, match="1 lanes cannot hold a row of 128 experts"):
        configuration(mo.Router(num_experts=128, top_k=3), "forward,specialize{lanes=1}")
    assert configuration(mo.Router(num_experts=32, top_k=3), "forward,specialize{lanes=1}")
    with pytest.raises(UnsupportedError, match="1 lanes cannot hold a row of 33 experts"):
        configuration(mo.Router(num_experts=33, top_k=3), "forward,specialize{lanes=1}")
    with pytest.raises(UnsupportedError, match="3 lanes cannot hold"):
        configuration(mo.Router(num_experts=12, top_k=3), "forward,specialize{lanes=3}")
    with pytest.raises(UnsupportedError, match="64 lanes cannot hold a row of 4096 experts"):
        configuration(mo.Router(num_experts=4096, top_k=3), "forward,specialize{lanes=64}")
    with pytest.raises(UsageError, match="64 lanes that share a token are a whole block, not 128 threads"):
        configuration(mo.Router(num_experts=512, top_k=3), "forward,specialize{lanes=64 threads=128}")
    for lanes, way in ((64, "merge"), (16, "radix")):
        with pytest.raises(UsageError, match=f"select={way} does not work over {lanes} lanes"):
            configuration(mo.Router(num_experts=512, top_k=3), f"forward,specialize{{lanes={lanes} select={way}}}")


@pytest.mark.parametrize(
    ("experts", "picks", "dtype", "lanes", "vec", "select"),
    [
        (512, 10, "bf16", 16, 8, "merge"),
        (896, 16, "bf16", 32, 4, "merge"),
        (896, 16, "f32", 32, 4, "radix"),
        (512, 16, "f32", 16, 4, "merge"),
        (512, 17, "bf16", 32, 8, "radix"),
        (256, 17, "bf16", 8, 8, "rounds"),
        (256, 17, "f32", 32, 4, "radix"),
        (256, 64, "bf16", 32, 8, "radix"),
        (128, 64, "bf16", 8, 8, "sort"),
        (1025, 2, "bf16", 64, 1, "rounds"),
        (2304, 36, "bf16", 128, 2, "radix"),
        (4096, 36, "f32", 256, 4, "radix"),
        (4096, 2049, "f32", 256, 4, "sort"),
        (16384, 36, "bf16", 512, 8, "radix"),
    ],
)
def test_specialize_spreads_long_rows_and_many_picks(experts, picks, dtype, lanes, vec, select):
    [rows] = configuration(mo.Router(num_experts=experts, top_k=picks, outputs=("weights",)), dtype=dtype)
    assert (rows["lanes"], rows["vec"], rows["select"]) == (str(lanes), str(vec), select)


def test_options_of_specialize():
    router = mo.Router(num_experts=64, top_k=3, selection_bias=True)
    options = "forward,specialize{target=sm_80 lanes=8 threads=64 select=rounds alignment=2,4}"
    [rows, _] = configuration(router, options)
    wanted = {"target": "sm_80", "lanes": "8", "threads": "64", "select": "rounds", "alignment": "2,4"}
    assert {n: rows[n] for n in wanted} == wanted
    [rows, _] = configuration(router, "forward,specialize{alignment=2}")
    assert rows["alignment"] == "2,16", "an input without an entry has 16"
    assert Specialize() == PassManager("specialize").passes[0]

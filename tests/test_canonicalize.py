"""``canonicalize``: the IR it makes, as FileCheck lines, and what it says and refuses."""

import pytest
from lowering import file_check, lower
from pass_modules import module, run

import moesaic as mo
from moesaic.ir.builder import Builder
from moesaic.passes.differentiate import derive


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
    for kept in ({"eps": 0.1}, {"min": 0.5}):  # the divisor is not the weight
        assert not mo.compile(mo.Router(4, 1, score="sigmoid", renormalize=mo.norm.sum(**kept))).warnings
    [warning] = mo.compile(mo.Router(4, 1, score="sigmoid", renormalize=mo.norm.sum(eps=1e-20))).warnings
    assert "is the constant 1" in warning
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
        %n = row.normalize %one {eps = 1e-20}
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

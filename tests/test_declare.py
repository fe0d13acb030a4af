"""Routers by their arguments: what is refused, with which words, and the IR the rest becomes."""

# ruff: noqa: E501 - a line of expected IR is as long as the IR

import math

import pytest
from lowering import evaluate, file_check

import moesaic as mo
from moesaic.ir.attributes import Call
from moesaic.ir.builder import Builder
from moesaic.ir.errors import InputError
from moesaic.ir.parser import parse
from moesaic.passes.differentiate import derive

BASE = {"num_experts": 12, "top_k": 3}

BAD = [
    ({"num_experts": 0}, "num_experts must be an integer >= 1, found 0"),
    ({"num_experts": 8.0}, "num_experts must be an integer >= 1, found 8.0"),
    ({"num_experts": True}, "num_experts must be an integer >= 1, found True"),
    *(
        ({"num_experts": 8, "top_k": k}, f"top_k must be an integer between 1 and num_experts = 8, found top_k = {k}")
        for k in (0, -1, 9, 16, 2.0)
    ),
    ({"top_k": "2"}, "top_k must be an integer between 1 and num_experts = 12, found top_k = '2'"),
    (
        {"score": "sigmod"},
        "unknown score 'sigmod'; did you mean 'sigmoid'?; known: 'softmax', 'sigmoid', 'sqrtsoftplus'",
    ),
    ({"score": 3}, "score must be a name or a function of an IR value, found 3"),
    ({"order": "topk_then_scor"}, "unknown order 'topk_then_scor'; did you mean 'topk_then_score'?"),
    ({"rank": "scores"}, "unknown rank 'scores'; did you mean 'score'?; known: 'auto', 'score'"),
    ({"groups": 4}, "groups and groups_kept go together: give both or neither"),
    ({"groups_kept": 4}, "groups and groups_kept go together: give both or neither"),
    ({"groups": 5, "groups_kept": 2}, "groups must divide num_experts = 12, found groups = 5"),
    ({"groups": 0, "groups_kept": 0}, "groups must divide num_experts = 12, found groups = 0"),
    ({"groups": 4, "groups_kept": 5}, "groups_kept must be between 1 and groups = 4, found groups_kept = 5"),
    ({"groups": 4, "groups_kept": 0}, "groups_kept must be between 1 and groups = 4, found groups_kept = 0"),
    (
        {"groups": 6, "groups_kept": 1},
        "top_k = 3 is more than the 2 experts of 1 groups kept (12 experts in 6 groups of 2)",
    ),
    (
        {"num_experts": 8, "top_k": 4, "groups": 8, "groups_kept": 4},
        (
            "group_score sums the best 2 of a group, but a group holds 1 experts (8 experts in 8 groups); "
            "use 'max' or sum_top(n) with n <= 1"
        ),
    ),
    ({"groups": 3, "groups_kept": 2, "group_score": mo.sum_top(5)}, "with n <= 4"),
    ({"group_score": "sum_top"}, "unknown group_score 'sum_top'; did you mean 'sum_top2'?; use 'max' or sum_top(n)"),
    ({"group_score": "mex"}, "unknown group_score 'mex'; did you mean 'max'?"),
    ({"group_score": "sum_top0"}, "sum_top: n must be an integer >= 1, found 0"),
    ({"group_score": 2}, "group_score must be 'max', 'sum_top2' or sum_top(n), found 2"),
    ({"renormalize": "sum"}, "renormalize must be True, False, norm.sum(...) or norm.lp(p), found 'sum'"),
    ({"renorm_eps": 1e-20}, "renorm_eps goes with renormalize=True"),
    ({"renorm_eps": -1.0, "renormalize": True}, "norm.sum: eps must be a finite number >= 0, found -1.0"),
    ({"renorm_eps": "tiny", "renormalize": True}, "norm.sum: eps must be a finite number >= 0, found 'tiny'"),
    ({"scale": math.inf}, "scale must be a finite number, found inf"),
    ({"scale": math.nan}, "scale must be a finite number, found nan"),
    ({"scale": "2"}, "scale must be a finite number, found '2'"),
    ({"scale": True}, "scale must be a finite number, found True"),
    *(({"logit_cap": c}, f"logit_cap must be a finite number > 0, or None, found {c!r}") for c in ("3", True, 0)),
    *(
        ({flag: value}, f"{flag} must be True or False, found {found}; its values are an input of each call")
        for flag in ("selection_bias", "gate_bias", "expert_scale", "router_scale")
        for value, found in (("no", "'no'"), ([0.5], "list"), (1, "1"))
    ),
    *(({"name": name}, f"name must be an identifier of ASCII letters, found {name!r}") for name in (3, "a b", "é")),
    *(({"outputs": given}, f"outputs must be a tuple of names, found {given!r}") for given in (None, "weights", 3)),
    *(({"losses": given}, f"losses must map names to losses, found {given!r}") for given in (None, [mo.ZLoss()])),
    ({"losses": {"é": mo.ZLoss()}}, "losses are named by identifiers of ASCII letters, found 'é'"),
    ({"groups": 2, "groups_kept": 1, "group_score": "sum_top²"}, "unknown group_score 'sum_top²'"),
    ({"outputs": ()}, "outputs is empty; name at least one of weights, indices, counts, probs, map"),
    ({"outputs": ("weight",)}, "unknown outputs 'weight'; did you mean 'weights'?"),
    ({"outputs": ("map", "map")}, "outputs names one twice: ('map', 'map')"),
    ({"dtype": "bf61"}, "unknown dtype 'bf61'; did you mean 'bf16'?"),
    ({"dtype": "int32"}, "dtype must be a float type, found int32"),
    ({"weights_dtype": "bool"}, "weights_dtype must be a float type, found bool"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_arguments(arguments, message):
    with pytest.raises(InputError) as caught:
        mo.Router(**{**BASE, **arguments})
    assert message in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("n", [0, -1, 2.0, True, "2"])
def test_bad_group_scores(n):
    with pytest.raises(InputError, match="sum_top: n must be an integer >= 1, found"):
        mo.sum_top(n)


@pytest.mark.parametrize(
    "arguments", [{"eps": -1e-9}, {"min": math.inf}, {"eps": math.nan}, {"min": "1"}, {"eps": True}]
)
def test_bad_normalisations(arguments):
    [name] = arguments
    with pytest.raises(InputError, match=f"norm.sum: {name} must be a finite number >= 0, found"):
        mo.norm.sum(**arguments)


def test_the_largest_k_of_the_kept_groups():
    """Case 6: one group of all experts, and groups of a single expert with a score that fits them."""
    assert mo.Router(num_experts=4, top_k=2, groups=1, groups_kept=1).module()
    assert mo.Router(num_experts=8, top_k=4, groups=8, groups_kept=4, group_score="max").module()
    assert mo.Router(num_experts=8, top_k=4, groups=8, groups_kept=4, group_score=mo.sum_top(1)).module()
    assert mo.Router(num_experts=12, top_k=6, groups=4, groups_kept=2).module()
    with pytest.raises(InputError, match="top_k = 7 is more than the 6 experts of 2 groups kept"):
        mo.Router(num_experts=12, top_k=7, groups=4, groups_kept=2)


# The IR ---------------------------------------------------------------------------------------------------------------


def test_everything_at_once():
    module = mo.Router(
        num_experts=12,
        top_k=3,
        score="sigmoid",
        selection_bias=True,
        gate_bias=True,
        groups=4,
        groups_kept=2,
        group_score=mo.sum_top(3),
        renormalize=True,
        renorm_eps=1e-20,
        scale=2.5,
        outputs=("counts", "weights", "probs", "indices", "map"),
        dtype="bf16",
        weights_dtype="fp16",
        name="deep",
    ).module()
    file_check(
        module,
        """
        CHECK: moe.func @deep(%logits: tensor<Tx12xbf16>, %gate_bias: tensor<12xf32>, %bias: tensor<12xf32>) -> (counts: tensor<12xi32>, weights: tensor<Tx3xf16>, probs: tensor<Tx12xbf16>, indices: tensor<Tx3xi32>, map: tensor<Tx12xu8>) {
        CHECK-NEXT: [[L:%.+]] = math.add %logits, %gate_bias : tensor<Tx12xf32>
        CHECK-NEXT: %scores = math.sigmoid [[L]]
        CHECK-NEXT: %selection = math.add %scores, %bias
        CHECK-NEXT: %allowed = row.group_limit %selection {groups = 4, keep = 2, score = sum_top<3>} : tensor<Tx12xi1>
        CHECK-NEXT: %values, %indices = row.topk %selection, %allowed {k = 3}
        CHECK-NEXT: %picked_scores = row.gather %scores, %indices
        CHECK-NEXT: [[N:%.+]] = row.normalize %picked_scores {eps = 1e-20}
        CHECK-NEXT: [[W:%.+]] = math.mul [[N]], 2.5
        CHECK-NEXT: %counts = col.count %indices {size = 12}
        CHECK-NEXT: %weights = math.cast [[W]] {dtype = f16}
        CHECK-NEXT: [[P:%.+]] = row.scatter [[W]], %indices {size = 12}
        CHECK-NEXT: %probs = math.cast [[P]] {dtype = bf16}
        CHECK-NEXT: %map = row.membership %indices {size = 12}
        CHECK-NEXT: return %counts, %weights, %probs, %indices, %map
        """,
    )
    assert parse(str(module)) == module


def test_the_plain_one():
    file_check(
        mo.Router(num_experts=7, top_k=2).module("bf16"),
        """
        CHECK: moe.func @route(%logits: tensor<Tx7xbf16>) -> (weights: tensor<Tx2xf32>, indices: tensor<Tx2xi32>, counts: tensor<7xi32>) {
        CHECK-NEXT: %scores = row.softmax %logits : tensor<Tx7xf32>
        CHECK-NEXT: %values, %indices = row.topk %logits {k = 2}
        CHECK-NEXT: %picked_scores = row.gather %scores, %indices
        CHECK-NEXT: %counts = col.count %indices {size = 7}
        CHECK-NEXT: return %picked_scores, %indices, %counts
        """,
    )


@pytest.mark.parametrize(
    ("bias", "checks"),
    [
        (
            False,
            "CHECK: %values, %indices = row.topk %logits {k = 2}\nCHECK-NEXT: %scores = math.sigmoid %values : tensor<Tx2xf32>",
        ),
        (
            True,
            """
            CHECK: [[S:%.+]] = math.add %logits, %bias
            CHECK-NEXT: %values, %indices = row.topk [[S]] {k = 2}
            CHECK-NEXT: [[P:%.+]] = row.gather %logits, %indices
            CHECK-NEXT: %scores = math.sigmoid [[P]] : tensor<Tx2xf32>
            """,
        ),
    ],
)
def test_topk_then_score(bias, checks):
    """The bias only selects: weights are scores of the unbiased logits."""
    router = mo.Router(num_experts=7, top_k=2, score="sigmoid", order="topk_then_score", selection_bias=bias)
    file_check(router.module(), checks)


@pytest.mark.parametrize(
    ("score", "chain"),
    [
        ("softmax", ["row.softmax"]),
        ("sigmoid", ["math.sigmoid"]),
        ("sqrtsoftplus", ["math.softplus", "math.sqrt"]),
        (lambda x: mo.math.log1p(mo.math.exp(x)), ["math.exp", "math.log1p"]),
        (lambda x: mo.math.relu(x) * 2.0, ["math.relu", "math.mul"]),
        (lambda x: x * 1.5 + 0.25, ["math.mul", "math.add"]),
    ],
)
def test_scores(score, chain):
    ops = [op.name for op in mo.Router(num_experts=7, top_k=2, score=score).module().walk()]
    assert ops[: len(chain)] == chain
    router = mo.Router(num_experts=7, top_k=2, score=score, order="topk_then_score")
    ops = list(router.module().walk())
    assert [op.name for op in ops[1 : 1 + len(chain)]] == chain
    assert str(ops[1].results[0].type).startswith("tensor<Tx2x")


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (lambda x: 1.0, "score must return an IR value, found float 1.0"),
        (lambda x: None, "score must return an IR value, found NoneType None"),
        (
            lambda x: x.block.append(parse_op(x)).result,
            "score must keep the shape tensor<Tx7xf32>, found tensor<Tx1xf32>",
        ),
    ],
)
def test_bad_score_functions(score, message):
    with pytest.raises(InputError) as caught:
        mo.Router(num_experts=7, top_k=2, score=score).module()
    assert message in str(caught.value)


def parse_op(x):
    from moesaic.ir.ops.row import Sum

    return Sum([x])


RANKED_ON_LOGITS = ["softmax", "sigmoid", "sqrtsoftplus", lambda x: mo.math.tanh(mo.math.softplus(x))]
RANKED_ON_SCORE = [
    lambda x: mo.math.relu(x),
    lambda x: -x,
    lambda x: mo.math.silu(x),
    lambda x: mo.math.sigmoid(x) + 1.0,  # increasing too, but only a chain of one-operand ops is asked
    lambda x: mo.math.clamp(x, min=0.0),
    lambda x: mo.math.sigmoid(-x),
]


def ranked(**options):
    module = mo.Router(num_experts=12, top_k=3, **options).module()
    return next(op for op in module.walk() if op.name == "row.topk"), module


@pytest.mark.parametrize("score", RANKED_ON_LOGITS)
def test_ranking_on_logits(score):
    """Only where the score is strictly increasing and nothing is added to it."""
    topk, module = ranked(score=score)
    assert topk.x is module.entry.argument("logits")
    topk, module = ranked(score=score, gate_bias=True)
    assert topk.x.op.name == "math.add" and topk.x.op.operands[0] is module.entry.argument("logits")
    for options in ({"rank": "score"}, {"selection_bias": True}, {"rank": "score", "selection_bias": True}):
        topk, module = ranked(score=score, **options)
        assert topk.x.name == ("selection" if "selection_bias" in options else "scores")


@pytest.mark.parametrize("score", RANKED_ON_SCORE)
def test_ranking_on_the_score(score):
    topk, _ = ranked(score=score)
    assert topk.x.name == "scores"


def test_groups_are_scored_on_the_score_even_where_picks_rank_on_logits():
    """A sum of two logits orders groups differently from a sum of two scores."""
    topk, module = ranked(score="sigmoid", groups=4, groups_kept=2)
    assert topk.x is module.entry.argument("logits")
    assert topk.allowed.op.x.name == "scores"


def test_the_identity_as_score():
    topk, module = ranked(score=lambda x: x)
    assert topk.x is module.entry.argument("logits")


@pytest.mark.parametrize(
    ("renormalize", "attributes"),
    [
        (True, {}),
        (mo.norm.sum(), {}),
        (mo.norm.sum(eps=0.5), {"eps": 0.5}),
        (mo.norm.sum(min=1e-9), {"min": 1e-9}),
        (mo.norm.sum(eps=1, min=2), {"eps": 1, "min": 2}),
    ],
)
def test_normalisations(renormalize, attributes):
    module = mo.Router(num_experts=7, top_k=2, renormalize=renormalize).module()
    [found] = [op.attributes for op in module.walk() if op.name == "row.normalize"]
    assert found == attributes
    without = mo.Router(num_experts=7, top_k=2).module()
    assert "row.normalize" not in str(without) and "math.mul" not in str(without)


def test_group_score_spellings():
    def limit(**options):
        module = mo.Router(num_experts=12, top_k=2, groups=3, groups_kept=2, **options).module()
        return next(op for op in module.walk() if op.name == "row.group_limit")

    assert limit().best == limit(group_score="sum_top2").best == limit(group_score=mo.sum_top(2)).best == 2
    assert limit(group_score="max").score == "max" and limit(group_score="max").best == 1
    assert limit(group_score="sum_top4").score == Call("sum_top", (4,))


def test_types_of_a_call():
    router = mo.Router(num_experts=7, top_k=2, outputs=("weights", "probs"))
    assert [str(t) for t in router.module().entry.result_types] == ["tensor<Tx2xf32>", "tensor<Tx7xf32>"]
    assert [str(t) for t in router.module("f16").entry.result_types] == ["tensor<Tx2xf32>", "tensor<Tx7xf16>"]
    fixed = mo.Router(num_experts=7, top_k=2, outputs=["probs"], dtype="bf16", weights_dtype="bf16")
    assert fixed.outputs == ("probs",)
    assert str(fixed.module().entry.result_types[0]) == "tensor<Tx7xbf16>"


def test_routers_are_values():
    assert mo.Router(**BASE) == mo.Router(**BASE) and hash(mo.Router(**BASE)) == hash(mo.Router(**BASE))
    assert mo.Router(**BASE) != mo.Router(**BASE, scale=2.0)
    assert mo.Router(**BASE).module() == mo.Router(**BASE).module()


# The cases of issue reports, in float64 -------------------------------------------------------------------------------

LN2, LN3 = math.log(2), math.log(3)


def route(logits, bias=None, **options):
    torch = pytest.importorskip("torch")
    module = mo.Router(num_experts=len(logits[0]), outputs=("weights", "indices"), **options).module()
    inputs = {"logits": torch.tensor(logits, dtype=torch.float64)}
    if bias is not None:
        inputs["bias"] = torch.tensor(bias, dtype=torch.float64)
    weights, indices = evaluate(module.entry, inputs)
    return [[round(w, 5) for w in row] for row in weights.tolist()], indices.tolist()


@pytest.mark.parametrize(
    ("logits", "bias", "options", "weights", "indices"),
    [
        (  # 1: what is excluded is out, however low the rest
            [[0.0] * 4],
            [-1.0, -0.9, -2.0, -2.0],
            {"top_k": 2, "score": "sigmoid", "selection_bias": True, "groups": 2, "groups_kept": 1},
            [[0.5, 0.5]],
            [[1, 0]],
        ),
        (  # 2: a sum that underflows divides nothing
            [[-200.0] * 4, [2.0, 1.0, 0.0, -1.0]],
            None,
            {"top_k": 2, "score": "sigmoid", "renormalize": True},
            [[0.0, 0.0], [0.54645, 0.45355]],
            [[0, 1], [0, 1]],
        ),
        (  # 3: the bias selects and does not weigh
            [[2.0, 1.0, 0.0, -1.0]],
            [0.0, 0.0, 0.0, 10.0],
            {"top_k": 2, "score": "sigmoid", "selection_bias": True},
            [[0.26894, 0.8808]],
            [[3, 0]],
        ),
        ([[LN3, LN2, 0.0, 0.0]], None, {"top_k": 2}, [[0.42857, 0.28571]], [[0, 1]]),  # 4
        ([[LN3, LN2, 0.0, 0.0]], None, {"top_k": 2, "order": "topk_then_score"}, [[0.6, 0.4]], [[0, 1]]),
        ([[LN3, LN2, 0.0, 0.0]], None, {"top_k": 2, "renormalize": True}, [[0.6, 0.4]], [[0, 1]]),
        (  # 10: the limit holds for this order, too
            [[5.0, 0.0, 4.0, 4.0]],
            None,
            {"top_k": 2, "order": "topk_then_score", "groups": 2, "groups_kept": 1},
            [[0.5, 0.5]],
            [[2, 3]],
        ),
    ],
)
def test_cases(logits, bias, options, weights, indices):
    assert route(logits, bias, **options) == (weights, indices)


def test_how_many_experts_score_a_group():
    """Case 8: n is an explicit argument and decides which group stays."""
    score = [[0.9, 0.1, 0.1, 0.1, 0.6, 0.3, 0.3, 0.3]]
    options = {"top_k": 2, "score": lambda x: x, "groups": 2, "groups_kept": 1}
    assert route(score, group_score=mo.sum_top(2), **options)[1] == [[0, 1]]
    assert route(score, group_score=mo.sum_top(4), **options)[1] == [[4, 5]]


def test_gradients_of_one_pick():
    """Cases 35 and 36: softmax first keeps a gradient, dense over all experts; the division removes it."""
    torch = pytest.importorskip("torch")
    from moesaic.passes.differentiate import derive

    def gradient(logits, **options):
        module = mo.Router(num_experts=len(logits), top_k=1, outputs=("weights",), **options).module()
        backward = derive(module.entry)
        inputs = {
            "logits": torch.tensor([logits], dtype=torch.float64),
            "d_weights": torch.ones(1, 1, dtype=torch.float64),
        }
        [d] = evaluate(backward, inputs)
        return [round(x, 5) for x in d[0].tolist()]

    assert gradient([LN3, 0.0]) == [0.1875, -0.1875]
    assert gradient([LN3, 0.0], renormalize=True) == [0.0, 0.0]
    assert gradient([LN3, 0.0], order="topk_then_score") == [0.0, 0.0]
    assert gradient([LN3, LN2, 0.0, 0.0]) == [0.2449, -0.12245, -0.06122, -0.06122]


def test_a_router_is_only_a_function_of_ops():
    """Anything the declaration can say can be built by hand."""
    b = Builder("route")
    x = b.input("logits", "tensor<Tx7xf32>")
    scores = b.op("math.sigmoid", x)
    _, indices = b.op("row.topk", x, k=2)
    weights = b.op("row.gather", scores, indices)
    by_hand = b.build(weights=weights, indices=indices, counts=b.op("col.count", indices, size=7))
    assert by_hand == mo.Router(num_experts=7, top_k=2, score="sigmoid").module()


def test_a_cap_bounds_the_logits_and_picks_rank_below_it() -> None:
    module = mo.Router(16, 2, logit_cap=5.0, renormalize=True).module("bf16")
    text = str(module)
    assert "math.div %logits, 5.0" in text and "math.tanh" in text
    assert "row.softmax %capped" in text
    assert "row.topk %logits" in text  # the cap is strictly increasing: its float32 ties do not decide


def test_a_learned_factor_per_expert_reaches_weights_and_gets_a_gradient() -> None:
    module = mo.Router(16, 2, expert_scale=True).module()
    assert "row.gather %expert_scale, %indices" in str(module)
    backward = derive(module.entry)
    assert backward is not None and "d_expert_scale" in backward.result_names


def test_scores_cover_all_experts_in_float32() -> None:
    module = mo.Router(16, 2, score="sigmoid", outputs=("weights", "scores")).module("bf16")
    assert str(module.entry.result_types[1]) == "tensor<Tx16xf32>"


@pytest.mark.parametrize("cap", [0.0, -1.0, float("inf"), float("nan")])
def test_a_cap_that_cannot_be_is_refused(cap: float) -> None:
    with pytest.raises(InputError, match="logit_cap must be a finite number > 0"):
        mo.Router(16, 2, logit_cap=cap)

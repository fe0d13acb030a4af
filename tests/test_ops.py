"""What every op computes, against plain torch or Python in float64, and its gradient rule against autograd.

Tolerances: both sides are float64 and differ by the rounding of a few operations, so 1e-13 relative; gradients chain
more of them, 1e-11.
"""

import itertools
import math

import pytest

from moesaic.ir import core
from moesaic.ir.builder import Builder
from moesaic.ir.diagnostics import DiagnosticError
from moesaic.passes.differentiate import derive

torch = pytest.importorskip("torch")
reference = pytest.importorskip("moesaic.runtime.reference")

F64 = torch.float64
VALUE = {"rtol": 1e-13, "atol": 0.0, "equal_nan": True}
GRADIENT = {"rtol": 1e-11, "atol": 1e-13, "equal_nan": True}

INF, NAN = math.inf, math.nan
SPECIAL = [0.0, -0.0, INF, -INF, NAN, 5e-324, -5e-324, 1e-310, 1e-160, -1e-8, 0.5, -0.5, 1.0, -1.0, 3.0, -3.0]
SPECIAL += [19.0, -21.0, 37.5, -44.0, 88.8, -104.0, 709.0, 711.0, -745.5, 1e154, -1e154, 1.7e308, -1.7e308]


def tensor(rows, dtype=F64):
    return torch.tensor(rows, dtype=dtype)


def function(op, *operands, attributes=None):
    """`@f(%x0, ...) -> (y0, ...)` of one op over operands given as types, or as numbers for constants."""
    b = Builder("f")
    values = [x if isinstance(x, float) else b.input(f"x{i}", x) for i, x in enumerate(operands)]
    made = b.op(op, *values, **(attributes or {}))
    results = made if isinstance(made, tuple) else (made,)
    return b.build(**{f"y{i}": r for i, r in enumerate(results)}).entry


def type_of(x):
    names = {
        torch.int16: "i16",
        torch.int32: "i32",
        torch.int64: "i64",
        torch.bool: "i1",
        torch.uint8: "u8",
        torch.float64: "f64",
    }
    shape = "".join(f"{'T' if i == 0 and x.ndim == 2 else n}x" for i, n in enumerate(x.shape))
    return f"tensor<{shape}{names[x.dtype]}>"


def run(op, *operands, **attributes):
    """Results of one op on tensors and numbers."""
    f = function(op, *(x if isinstance(x, float) else type_of(x) for x in operands), attributes=attributes)
    results = reference.evaluate(f, {f"x{i}": x for i, x in enumerate(operands) if not isinstance(x, float)})
    for value, result in zip(f.returned, results, strict=True):
        declared = tuple(d if isinstance(d, int) else None for d in value.type.shape)
        assert len(declared) == result.ndim and all(d in (None, n) for d, n in zip(declared, result.shape))
        if not value.type.dtype.is_float:
            assert result.dtype == reference.TORCH_DTYPES[value.type.dtype]
    return results[0] if len(results) == 1 else results


def gradients(op, *operands, cotangents=None, generator=None, **attributes):
    """(cotangents used, {operand index: our gradient}) of one op, with random cotangents."""
    f = function(op, *(x if isinstance(x, float) else type_of(x) for x in operands), attributes=attributes)
    inputs = {f"x{i}": x for i, x in enumerate(operands) if not isinstance(x, float)}
    results = dict(zip(f.result_names, reference.evaluate(f, inputs), strict=True))
    random = torch.Generator().manual_seed(17)
    given = cotangents or {
        n: torch.randn(r.shape, dtype=F64, generator=random) for n, r in results.items() if r.is_floating_point()
    }
    backward = derive(f)
    if backward is None:
        return given, {}
    available = {**inputs, **{f"d_{n}": c for n, c in given.items()}}
    outcome = reference.evaluate(backward, {a.name: available[a.name] for a in backward.arguments})
    return given, {int(n.removeprefix("d_x")): g for n, g in zip(backward.result_names, outcome, strict=True)}


def check_gradient(op, oracle, *operands, **attributes):
    """Our rule against autograd over `oracle`, an expression of plain torch."""
    cotangents, ours = gradients(op, *operands, **attributes)
    leaves = [x.clone().requires_grad_() if not isinstance(x, float) and x.is_floating_point() else x for x in operands]
    result = oracle(*leaves)
    wanted = [i for i, x in enumerate(leaves) if not isinstance(x, float) and x.requires_grad]
    theirs = torch.autograd.grad(
        result, [leaves[i] for i in wanted], cotangents["y0"].expand_as(result), allow_unused=True
    )
    assert sorted(ours) == [i for i, g in zip(wanted, theirs) if g is not None]
    for i, g in zip(wanted, theirs):
        if g is None:
            continue
        assert g.abs().max() > 0, "the test would pass on zeros"
        torch.testing.assert_close(ours[i], g, **GRADIENT)


# Elementwise ops: an oracle in plain torch, and where to compare gradients --------------------------------------------


def softplus(x):
    return torch.clamp(x, min=0.0) + torch.log1p(torch.exp(-x.abs()))


def safe_div(a, b):
    zero = b.abs() < 2.0**-126
    return torch.where(zero, torch.zeros_like(b), a / torch.where(zero, torch.ones_like(b), b))


def gelu_tanh(x):
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


ANY, POSITIVE, ABOVE_MINUS_ONE = (-5.0, 5.0), (0.05, 5.0), (-0.9, 5.0)
UNARY = {
    "math.neg": (torch.neg, ANY),
    "math.abs": (torch.abs, ANY),
    "math.pow": (lambda x: x**2.5, POSITIVE),
    "math.exp": (torch.exp, ANY),
    "math.log": (torch.log, POSITIVE),
    "math.log1p": (torch.log1p, ABOVE_MINUS_ONE),
    "math.sqrt": (torch.sqrt, POSITIVE),
    "math.tanh": (torch.tanh, ANY),
    "math.sigmoid": (torch.sigmoid, ANY),
    "math.softplus": (softplus, ANY),
    "math.relu": (torch.relu, ANY),
    "math.silu": (lambda x: x * torch.sigmoid(x), ANY),
    "math.gelu_tanh": (gelu_tanh, ANY),
    "math.erf": (torch.erf, ANY),
    "math.clamp": (lambda x: torch.clamp(x, -1.25, 2.5), ANY),
    "math.cast": (lambda x: x * 1.0, ANY),
}
BINARY = {
    "math.add": torch.add,
    "math.sub": torch.sub,
    "math.mul": torch.mul,
    "math.div": torch.div,
    "math.safe_div": safe_div,
    "math.maximum": torch.maximum,
    "math.minimum": torch.minimum,
    "math.exp_difference": lambda a, b: torch.exp(a - b),
    "math.less": torch.lt,
    "math.equal": torch.eq,
}
ATTRIBUTES = {"math.pow": {"exponent": 2.5}, "math.clamp": {"min": -1.25, "max": 2.5}, "math.cast": {"dtype": "f64"}}
# Ops with tests of their own further down.
OTHERS = {
    "math.select",
    "math.broadcast",
    *("row.sum", "row.max", "row.softmax", "row.logsumexp", "row.normalize", "row.lp_normalize"),
    *("row.topk", "row.given", "row.group_limit", "row.gather", "row.scatter", "row.membership", "row.bitmap"),
    *("row.squeeze", "row.unsqueeze", "row.first", "row.append"),
    *("col.sum", "col.count", "col.rows", "col.spread", "col.total", "math.and"),
    *("moe.load_balance_loss", "moe.z_loss", "moe.entropy_loss"),
}


def test_every_op_has_a_test_here():
    computed = {n for n in core.OPS if n.startswith(("math.", "row.", "col.", "moe."))}
    missing = computed - set(UNARY) - set(BINARY) - OTHERS
    assert not missing, f"give {sorted(missing)} an oracle in tests/test_ops.py"
    assert not (set(UNARY) | set(BINARY) | OTHERS) - computed


def uniform(shape, low, high, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand(shape, dtype=F64, generator=generator)


@pytest.mark.parametrize("op", UNARY)
def test_unary_values(op):
    oracle, (low, high) = UNARY[op]
    x = torch.cat([tensor(SPECIAL), uniform(101, low, high)])
    torch.testing.assert_close(run(op, x, **ATTRIBUTES.get(op, {})), oracle(x), **VALUE)


def test_the_error_function():
    """Against another library than the one that the reference calls."""
    x = torch.cat([tensor(SPECIAL), uniform(101, -6.0, 6.0)])
    torch.testing.assert_close(run("math.erf", x), tensor([math.erf(v) for v in x.tolist()]), **VALUE)


@pytest.mark.parametrize("op", UNARY)
def test_unary_gradients(op):
    oracle, (low, high) = UNARY[op]
    check_gradient(op, oracle, uniform((7, 13), low, high), **ATTRIBUTES.get(op, {}))


@pytest.mark.parametrize("op", UNARY)
def test_the_rule_and_the_reference_agree_everywhere(op):
    """The reference backend differentiates `reference` by autograd, the compiler uses the rule: at every special
    value, ties and limits included, both give the same, except that only one may find NaN where the value is NaN or
    where infinities meet."""
    x = tensor([*SPECIAL, -1.25, 2.5]).requires_grad_()
    f = function(op, type_of(x), attributes=ATTRIBUTES.get(op))
    [y] = reference.evaluate(f, {"x0": x})
    dy = uniform(y.shape, 0.5, 2.0)
    [theirs] = torch.autograd.grad(y, x, dy)
    _, ours = gradients(op, x.detach(), cotangents={"y0": dy}, **ATTRIBUTES.get(op, {}))
    size = x.detach().abs()
    # Between the float32 denormals and 0 a square root is a divisor that counts as zero; float32 never gets there.
    regular = torch.isfinite(y.detach()) & (size < 1e100) & ((size == 0) | (size >= 2.0**-126))
    assert regular.sum() > 8
    torch.testing.assert_close(ours[0][regular], theirs[regular], rtol=1e-9, atol=1e-300, equal_nan=True)


PAIRS = torch.tensor(list(itertools.product(SPECIAL, SPECIAL)), dtype=F64).T.contiguous()


@pytest.mark.parametrize("op", BINARY)
def test_binary_values(op):
    a, b = PAIRS
    result = run(op, a, b)
    torch.testing.assert_close(result, BINARY[op](a, b), **VALUE)
    if result.dtype == torch.bool:
        assert 0 < result.sum() < len(a)


@pytest.mark.parametrize("op", [n for n in BINARY if n not in ("math.less", "math.equal")])
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((5, 7), (5, 7)),
        ((5, 7), (7,)),
        ((5, 7), (5, 1)),
        ((7,), (5, 7)),
        ((5, 1), (5, 7)),
        ((5, 7), 1.75),
        (0.9, (5, 7)),
    ],
)
def test_binary_gradients(op, left, right):
    """Random cotangents, and sums over whatever an operand was repeated along."""
    operands = [x if isinstance(x, float) else uniform(x, 0.4, 2.0, seed) for x, seed in ((left, 5), (right, 6))]
    oracle = BINARY[op]
    check_gradient(op, lambda *xs: oracle(*(x if torch.is_tensor(x) else tensor(x) for x in xs)), *operands)


def test_comparisons_have_no_gradient():
    x = uniform((3, 5), -1, 1)
    for op in ("math.less", "math.equal"):
        assert gradients(op, x, x) == ({}, {})


@pytest.mark.parametrize(("op", "sign"), [("math.maximum", 1.0), ("math.minimum", -1.0)])
def test_ties_go_to_the_first(op, sign):
    a, b = sign * tensor([1.0, 2.0, 3.0, 0.0]), sign * tensor([1.0, 3.0, 2.0, -0.0])
    dy = tensor([0.3, 0.5, 0.7, 1.1])
    _, ours = gradients(op, a, b, cotangents={"y0": dy})
    assert ours[0].tolist() == [0.3, 0.0, 0.7, 1.1]
    assert ours[1].tolist() == [0.0, 0.5, 0.0, 0.0]
    leaves = [a.requires_grad_(), b.requires_grad_()]
    y = reference.evaluate(function(op, type_of(a), type_of(b)), {"x0": a, "x1": b})
    theirs = torch.autograd.grad(y, leaves, dy)
    assert [t.tolist() for t in theirs] == [ours[0].tolist(), ours[1].tolist()]


@pytest.mark.parametrize(
    ("op", "attributes", "x", "dy"),
    [
        ("math.sqrt", {}, [0.0, -0.0, 4.0], [0.0, 0.0, 0.25]),
        ("math.relu", {}, [0.0, -0.0, 5e-324, -5e-324], [0.0, 0.0, 1.0, 0.0]),
        ("math.clamp", {"min": -1.0, "max": 2.0}, [-1.0, 2.0, -1.5, 2.5, 0.0], [1.0, 1.0, 0.0, 0.0, 1.0]),
    ],
)
def test_derivatives_at_corners(op, attributes, x, dy):
    _, ours = gradients(op, tensor(x), cotangents={"y0": torch.ones(len(x), dtype=F64)}, **attributes)
    assert ours[0].tolist() == dy


def test_division_by_a_zero_that_underflowed():
    tiny = 2.0**-127
    a, b = tensor([3.0, -2.0, 0.0, NAN, 1.0, -1.0]), tensor([0.0, -0.0, 0.0, 0.0, tiny, -tiny])
    assert run("math.safe_div", a, b).tolist() == [0.0] * 6
    _, ours = gradients("math.safe_div", a, b)
    assert ours[0].tolist() == [0.0] * 6 and ours[1].tolist() == [0.0] * 6
    assert run("math.safe_div", tensor([1.0]), tensor([2.0**-126])).tolist() == [2.0**126]


def test_a_divisor_is_not_squared():
    for op, least in (("math.div", 1e-200), ("math.safe_div", 1e-37)):
        b = tensor([least, 1e200])
        _, ours = gradients(op, b * 3.0, b, cotangents={"y0": b})
        torch.testing.assert_close(ours[1], tensor([-3.0, -3.0]), **GRADIENT)


def test_select_ignores_the_other_side():
    condition = tensor([[1, 0, 1], [0, 0, 1]], torch.uint8)
    a, b = uniform((2, 3), -1, 1, 1), uniform((2, 3), -1, 1, 2)
    a[0, 1], b[0, 0] = NAN, INF
    for c in (condition, condition.bool()):
        chosen = run("math.select", c, a, b)
        torch.testing.assert_close(chosen, torch.where(condition.bool(), a, b), rtol=0, atol=0)
        assert chosen.isfinite().all()
        check_gradient("math.select", lambda c, a, b: torch.where(c != 0, a, b), c, a, b)
    check_gradient("math.select", lambda c, a, b: torch.where(c != 0, a, b), condition, uniform((2, 1), 1, 2), 0.5)


def test_cast():
    x = tensor([1.00390625, 257.0, -3.5, 0.0]).float()
    b = Builder("f")
    value = b.input("x0", "tensor<4xf32>")
    f = b.build(**{t: b.op("math.cast", value, dtype=t) for t in ("bf16", "f16", "i32", "u8", "i1")}).entry
    bf16, f16, i32, _, i1 = reference.evaluate(f, {"x0": x})
    assert (bf16.dtype, f16.dtype, i32.dtype) == (torch.bfloat16, torch.float16, torch.int32)
    assert bf16.float().tolist() == [1.0, 256.0, -3.5, 0.0]  # ties to even
    assert i32.tolist() == [1, 257, -3, 0] and i1.tolist() == [True, True, True, False]
    backward = derive(f)
    assert [a.name for a in backward.arguments] == ["x0", "d_bf16", "d_f16"]


def test_broadcast():
    like = uniform((3, 5), -1, 1)
    for x in (uniform((3, 1), 1, 2), uniform((5,), 1, 2), uniform((3, 5), 1, 2)):
        torch.testing.assert_close(run("math.broadcast", x, like), x.expand(3, 5), rtol=0, atol=0)
        check = gradients("math.broadcast", x, like)
        x = x.clone().requires_grad_()
        [theirs] = torch.autograd.grad(x.expand(3, 5), x, check[0]["y0"])
        assert list(check[1]) == [0]
        torch.testing.assert_close(check[1][0], theirs, **GRADIENT)


def test_float32_arithmetic_on_narrow_storage():
    """bf16 operands are widened before the arithmetic, not after."""
    b = Builder("f")
    x = b.input("x", "tensor<3xbf16>")
    f = b.build(y=b.op("math.mul", x, 0.1), z=b.op("math.exp", x)).entry
    x = tensor([1.0, 3.0, -7.0], torch.bfloat16)
    y, z = reference.evaluate(f, {"x": x})
    assert y.dtype == z.dtype == torch.float32
    assert torch.equal(y, x.float() * torch.tensor(0.1)) and torch.equal(z, x.float().exp())


# Rows -----------------------------------------------------------------------------------------------------------------

ROWS = tensor(
    [
        [0.3, -1.2, 0.3, 2.5, -0.7],
        [0.0, -0.0, 0.0, -0.0, 0.0],
        [-INF, 1.0, -INF, 2.0, 1.0],
        [-INF] * 5,
        [700.0, 710.0, -700.0, 0.0, 709.0],
        [NAN, 1.0, -INF, INF, NAN],
        [5e-324, -5e-324, 0.0, 1e-310, -1e-310],
        [NAN] * 5,
        [-1e300, 1e300, 1e-300, 1.0, -1.0],
    ]
)


def order_of(row, allowed=None):
    """Selection order in plain Python: value descending, index ascending; NaN below -inf; what may not be last."""

    def key(i):
        x = row[i]
        nan = x != x
        return (allowed is not None and not allowed[i], nan, 0.0 if nan else -x, i)

    return sorted(range(len(row)), key=key)


def test_sum_and_max():
    torch.testing.assert_close(run("row.sum", ROWS), ROWS.sum(1, keepdim=True), **VALUE)
    torch.testing.assert_close(run("row.max", ROWS), ROWS.amax(1, keepdim=True), **VALUE)
    x = uniform((5, 7), -2, 2)
    x[1, 4] = x[1, 2] = 3.0  # a tie: the gradient is shared
    check_gradient("row.sum", lambda x: x.sum(1, keepdim=True), x)
    check_gradient("row.max", lambda x: x.amax(1, keepdim=True), x)
    _, ours = gradients("row.max", x, cotangents={"y0": torch.ones(5, 1, dtype=F64)})
    assert ours[0][1].tolist() == [0, 0, 0.5, 0, 0.5, 0, 0]


def test_softmax():
    wanted = torch.softmax(ROWS, 1)
    wanted[3] = 0.0  # nothing can be picked: no probability, not NaN
    torch.testing.assert_close(run("row.softmax", ROWS), wanted, rtol=1e-13, atol=1e-320, equal_nan=True)
    x = uniform((5, 7), -3, 3)
    x[2, 3] = x[4, 0] = -INF
    check_gradient("row.softmax", lambda x: torch.softmax(x, 1), x)
    check_gradient("row.softmax", lambda x: torch.softmax(x, 1), uniform((3, 2), 300, 301))
    _, ours = gradients("row.softmax", torch.full((2, 3), -INF, dtype=F64))
    assert ours[0].tolist() == [[0.0] * 3] * 2
    assert run("row.softmax", tensor([[5.0], [-INF]])).tolist() == [[1.0], [0.0]]


def test_logsumexp():
    torch.testing.assert_close(run("row.logsumexp", ROWS), torch.logsumexp(ROWS, 1, keepdim=True), **VALUE)
    x = uniform((5, 7), -3, 3)
    x[2, 3] = x[4, 0] = -INF
    check_gradient("row.logsumexp", lambda x: torch.logsumexp(x, 1, keepdim=True), x)
    x = torch.full((2, 3), -INF, dtype=F64).requires_grad_()
    _, ours = gradients("row.logsumexp", x.detach())
    assert ours[0].tolist() == [[0.0] * 3] * 2
    [y] = reference.evaluate(function("row.logsumexp", type_of(x)), {"x0": x})
    [theirs] = torch.autograd.grad(y.sum(), x)
    assert theirs.tolist() == [[0.0] * 3] * 2, "the reference backend differs from the rule"


@pytest.mark.parametrize(("eps", "least"), [(0.0, 0.0), (1e-20, 0.0), (0.25, 0.0), (0.0, 2.0), (0.5, 3.0)])
def test_normalize(eps, least):
    def oracle(x):
        total = x.sum(1, keepdim=True) + eps
        total = torch.where(total < least, torch.full_like(total, least), total)
        return safe_div(x, total.expand_as(x))

    attributes = {"eps": eps, "min": least}
    x = uniform((5, 7), 0.1, 1.0)
    x[1] = 0.0
    x[2] *= 0.1
    torch.testing.assert_close(run("row.normalize", x, **attributes), oracle(x), **VALUE)
    check_gradient("row.normalize", oracle, x, **attributes)
    x = tensor([[0.0, 0.0], [-0.0, 0.0], [1e-40, 0.0], [NAN, 1.0], [INF, 1.0], [1.0, 3.0]])
    torch.testing.assert_close(run("row.normalize", x, **attributes), oracle(x), **VALUE)
    assert run("row.normalize", x, **attributes)[:2].tolist() == [[0.0, 0.0]] * 2


def test_normalize_at_its_limit():
    """The sum equals `min` exactly: it counts as not limited, in the rule and in the reference."""
    x = tensor([[0.5, 1.5]]).requires_grad_()
    dy = tensor([[1.0, -2.0]])
    _, ours = gradients("row.normalize", x.detach(), cotangents={"y0": dy}, min=2.0)
    [y] = reference.evaluate(function("row.normalize", type_of(x), attributes={"min": 2.0}), {"x0": x})
    [theirs] = torch.autograd.grad(y, x, dy)
    assert ours[0].tolist() == theirs.tolist() == [[1.125, -0.375]]


def test_normalize_of_a_tiny_sum():
    """A sum near the smallest float32 is divided by twice, never by its square (which would be 0 there)."""
    x = tensor([[1e-37, 3e-37]])
    _, ours = gradients("row.normalize", x, cotangents={"y0": tensor([[1e-37, 0.0]])})
    torch.testing.assert_close(ours[0], tensor([[0.1875, -0.0625]]), **GRADIENT)


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, INF])
def test_lp_normalize(p):
    def oracle(x):
        return safe_div(x, torch.linalg.vector_norm(x, p, dim=1, keepdim=True).expand_as(x))

    x = uniform((5, 7), -1.0, 1.0)
    x[1] = 0.0
    x[2] *= 1e-30
    x[3, 3] = 0.0
    close = {**VALUE, "rtol": 1e-12}  # a power and its root
    torch.testing.assert_close(run("row.lp_normalize", x, p=p), oracle(x), **close)
    check_gradient("row.lp_normalize", oracle, x[[0, 3, 4]], p=p)
    special = tensor([[0.0, -0.0], [1e-40, 0.0], [NAN, 1.0], [3.0, -4.0]])
    torch.testing.assert_close(run("row.lp_normalize", special, p=p), oracle(special), **close)
    assert run("row.lp_normalize", special, p=p)[:2].tolist() == [[0.0, 0.0]] * 2
    _, ours = gradients("row.lp_normalize", special[:1], p=p)
    assert ours[0].tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("p", [1.0, 2.0, 7.0, INF])
def test_the_lp_rule_and_its_decomposition_neither_overflow_nor_underflow(p):
    """Powers are taken relative to the largest, and the norm is divided by twice, never by its power."""
    for unit in (1e-37, 1e30):
        x = tensor([[3.0, 4.0, 0.0]]) * unit
        small, _ = gradients("row.lp_normalize", x, p=p)
        _, ours = gradients("row.lp_normalize", x, cotangents=small, p=p)
        _, wanted = gradients("row.lp_normalize", x / unit, cotangents=small, p=p)
        torch.testing.assert_close(ours[0] * unit, wanted[0], **GRADIENT)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_topk_order(k):
    values, indices = run("row.topk", ROWS, k=k)
    assert indices.dtype == torch.int32
    wanted = [order_of(row)[:k] for row in ROWS.tolist()]
    assert indices.tolist() == wanted
    torch.testing.assert_close(
        values, torch.gather(ROWS, 1, tensor(wanted, torch.int64)), rtol=0, atol=0, equal_nan=True
    )


def test_topk_order_written_out():
    rows = tensor([[0.0, -0.0, 1.0, 1.0], [NAN, -INF, NAN, -INF], [NAN] * 4, [-INF, NAN, INF, -1.0]])
    _, indices = run("row.topk", rows, k=4)
    assert indices.tolist() == [[2, 3, 0, 1], [1, 3, 0, 2], [0, 1, 2, 3], [2, 3, 0, 1]]


def test_topk_of_many_ties():
    generator = torch.Generator().manual_seed(5)
    pool = tensor([0.0, -0.0, 1.0, -1.0, NAN, -INF, INF])
    rows = pool[torch.randint(0, 7, (211, 13), generator=generator)]
    allowed = torch.rand(211, 13, generator=generator) < 0.7
    for k in (1, 4, 13):
        _, indices = run("row.topk", rows, k=k)
        assert indices.tolist() == [order_of(r)[:k] for r in rows.tolist()]
        _, indices = run("row.topk", rows, allowed, k=k)
        for row, may, found in zip(rows.tolist(), allowed.tolist(), indices.tolist(), strict=True):
            n = min(k, sum(may))  # with fewer allowed than k there are no more
            assert found[:n] == order_of(row, may)[:n]
            assert found[n:] == [-1] * (k - n)
    one = torch.rand(211, 1, generator=generator) < 0.5
    values, indices = run("row.topk", rows, one, k=4)
    assert (indices[~one[:, 0]] == -1).all() and (values[~one[:, 0]] == 0).all()
    assert indices[one[:, 0]].tolist() == [order_of(r)[:4] for r in rows[one[:, 0]].tolist()]


def test_topk_gradient():
    x = uniform((5, 7), -2, 2)
    check_gradient("row.topk", lambda x: x.topk(3, 1).values, x, k=3)
    allowed = torch.rand(5, 7, generator=torch.Generator().manual_seed(1)) < 0.8
    cotangents, ours = gradients("row.topk", x, allowed, k=2)
    wanted = torch.zeros(5, 7, dtype=F64)
    for t, (row, may) in enumerate(zip(x.tolist(), allowed.tolist())):
        for j, e in enumerate(order_of(row, may)[:2]):
            wanted[t, e] = cotangents["y0"][t, j]
    assert list(ours) == [0] and torch.equal(ours[0], wanted)


def limited(row, groups, keep, best):
    """Group limit in plain Python; `best` 0 for the largest value."""
    size = len(row) // groups
    scores = []
    for g in range(groups):
        part = row[g * size : (g + 1) * size]
        ranked = [part[i] for i in order_of(part)][: max(best, 1)]
        total = ranked[0]
        for x in ranked[1:]:
            total += x
        scores.append(total)
    kept = set(order_of(scores)[:keep])
    return [e // size in kept for e in range(len(row))]


@pytest.mark.parametrize(
    ("experts", "groups", "keep", "best"),
    [
        *((12, 4, 2, 2), (12, 4, 1, 3), (12, 4, 3, 1), (12, 4, 2, 0), (12, 12, 5, 1), (12, 12, 5, 0)),
        *((12, 1, 1, 12), (12, 2, 1, 5), (7, 7, 3, 1), (7, 1, 1, 4), (15, 5, 4, 2), (10, 5, 2, 2)),
    ],
)
def test_group_limit(experts, groups, keep, best):
    generator = torch.Generator().manual_seed(experts + groups)
    ordinary = torch.randn(61, experts, dtype=F64, generator=generator)
    pool = tensor([0.0, -0.0, 1.0, -1.0, 2.0, NAN, -INF])
    odd = pool[torch.randint(0, 7, (151, experts), generator=generator)]
    score = core.attr.Call("sum_top", (best,)) if best else "max"
    for x in (ordinary, odd):
        allowed = run("row.group_limit", x, groups=groups, keep=keep, score=score)
        assert allowed.tolist() == [limited(row, groups, keep, best) for row in x.tolist()]
        assert (allowed.sum(1) == keep * experts // groups).all()


def test_how_many_experts_score_a_group():
    x = tensor([[0.9, 0.1, 0.1, 0.1, 0.6, 0.3, 0.3, 0.3]])
    keeps = {
        n: run("row.group_limit", x, groups=2, keep=1, score=core.attr.Call("sum_top", (n,)))[0].tolist().index(True)
        for n in (1, 2, 3, 4)
    }
    assert keeps == {1: 0, 2: 0, 3: 4, 4: 4}
    assert gradients("row.group_limit", x, groups=2, keep=1) == ({}, {})


def picks(tokens, k, experts, seed=7):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(tokens)]).int()


@pytest.mark.parametrize(("k", "experts"), [(1, 1), (1, 7), (3, 7), (7, 7)])
def test_gather_and_scatter(k, experts):
    i = picks(5, k, experts)
    x, v, p = uniform((5, experts), -1, 1, 1), uniform((experts,), -1, 1, 2), uniform((5, k), -1, 1, 3)
    assert run("row.gather", x, i).tolist() == [[x[t, e].item() for e in i[t]] for t in range(5)]
    assert run("row.gather", v, i).tolist() == [[v[e].item() for e in i[t]] for t in range(5)]
    dense = torch.zeros(5, experts, dtype=F64)
    for t in range(5):
        for j, e in enumerate(i[t].tolist()):
            dense[t, e] = p[t, j]
    assert torch.equal(run("row.scatter", p, i, size=experts), dense)
    member = run("row.membership", i, size=experts)
    assert member.dtype == torch.uint8 and torch.equal(member, (dense != 0).to(torch.uint8))
    assert gradients("row.membership", i, size=experts) == ({}, {})
    check_gradient("row.gather", lambda x, i: x.gather(1, i.long()), x, i)
    check_gradient("row.gather", lambda v, i: v[i.long()], v, i)
    check_gradient(
        "row.scatter",
        lambda p, i: torch.zeros(5, experts, dtype=F64).scatter(1, i.long(), p),
        p,
        i,
        size=experts,
    )


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_given_picks(dtype):
    """What lies outside becomes -1, which reads 0 and writes nothing; an expert picked twice adds up."""
    rows = [[0, 6, 0], [3, -1, 3], [7, -7, 2], [-1, -1, -1]]
    far = 2**32 + 1 if dtype == torch.int64 else 32767
    here = run("row.given", tensor([*rows, [far, 5, -32768]], dtype), size=7)
    assert here.dtype == torch.int32
    assert here.tolist() == [[0, 6, 0], [3, -1, 3], [-1, -1, 2], [-1, -1, -1], [-1, 5, -1]]
    x, v, p = uniform((5, 7), -1, 1, 1), uniform((7,), -1, 1, 2), uniform((5, 3), -1, 1, 3)
    assert run("row.gather", x, here).tolist() == [
        [x[t, e].item() if e >= 0 else 0.0 for e in row] for t, row in enumerate(here.tolist())
    ]
    assert run("row.gather", v, here)[4].tolist() == [0.0, v[5].item(), 0.0]
    dense, seen, counts = torch.zeros(5, 7, dtype=F64), torch.zeros(5, 7, dtype=torch.uint8), [0] * 7
    for t, row in enumerate(here.tolist()):
        for k, e in enumerate(row):
            if e >= 0:
                dense[t, e] += p[t, k]
                seen[t, e] = 1
                counts[e] += 1
    torch.testing.assert_close(run("row.scatter", p, here, size=7), dense, **VALUE)
    assert torch.equal(run("row.membership", here, size=7), seen)
    assert run("col.count", here, size=7).tolist() == counts
    place = here.clamp(min=0).long()
    away = here < 0
    check_gradient("row.gather", lambda x, i: x.gather(1, place).masked_fill(away, 0.0), x, here)
    check_gradient("row.gather", lambda v, i: v[place].masked_fill(away, 0.0), v, here)
    scattered = torch.zeros(5, 7, dtype=F64)
    check_gradient(
        "row.scatter", lambda p, i: scattered.scatter_add(1, place, p.masked_fill(away, 0.0)), p, here, size=7
    )


@pytest.mark.parametrize("experts", [1, 7, 8, 9, 130])
def test_bitmap(experts):
    i = picks(5, min(experts, 4), experts)
    found = run("row.bitmap", i, size=experts)
    assert found.dtype == torch.uint8
    wanted = [
        [sum(2 ** (e - 8 * byte) for e in set(row) if 8 * byte <= e < 8 * byte + 8) for byte in range(-(-experts // 8))]
        for row in i.tolist()
    ]
    assert found.tolist() == wanted
    assert gradients("row.bitmap", i, size=experts) == ({}, {})


def test_one_number_a_token():
    x = uniform((5, 1), -1, 1)
    assert run("row.squeeze", x).tolist() == x.flatten().tolist()
    check_gradient("row.squeeze", lambda x: x[:, 0], x)
    b = Builder("f")
    lifted = b.op("row.unsqueeze", b.input("x", "tensor<Txf64>"))
    b.build(y=lifted)
    assert str(lifted.type) == "tensor<Tx1xf64>"


def test_picks_have_to_fit():
    b = Builder("f")
    x, i = b.input("x", "tensor<Tx7xf32>"), b.input("i", "tensor<Tx2xi64>")
    given = b.op("row.given", i, size=8)
    b.op("row.gather", x, given)
    with pytest.raises(DiagnosticError, match=r"row.gather: these picks are among 8 experts, which do not fit into 7"):
        b.build(y=x)


# Columns --------------------------------------------------------------------------------------------------------------


def test_column_sums_and_counts():
    x = uniform((11, 7), -1, 1)
    torch.testing.assert_close(run("col.sum", x), x.sum(0), **VALUE)
    check_gradient("col.sum", lambda x: x.sum(0), x)
    i = picks(11, 3, 7)
    counts = run("col.count", i, size=7)
    assert counts.dtype == torch.int32
    assert counts.tolist() == [sum(row.count(e) for row in i.tolist()) for e in range(7)] and counts.sum() == 33
    assert gradients("col.count", i, size=7) == ({}, {})
    assert run("col.count", tensor([[1], [1], [1]], torch.int32), size=2).tolist() == [0, 3]


def test_first_columns_and_appended_picks():
    assert run("row.first", uniform((5, 7), 0, 1), n=3).tolist() == [[True] * 3 + [False] * 4] * 5
    i = picks(11, 3, 7)
    assert run("row.append", i, first=7, count=2).tolist() == [[*row, 7, 8] for row in i.tolist()]


def test_totals_and_rows():
    for x in (uniform((7,), -1, 1), uniform((3, 7), -1, 1)):
        f = function("col.total", f"tensor<{'Nx' if x.ndim == 2 else ''}7xf64>")
        torch.testing.assert_close(reference.evaluate(f, {"x0": x})[0], x.sum(), **VALUE)
        dx = reference.evaluate(derive(f), {"x0": x, "d_y0": tensor(2.5)})
        torch.testing.assert_close(dx[0], torch.full_like(x, 2.5), **VALUE)
    assert run("col.rows", uniform((11, 7), 0, 1)).tolist() == 11.0


def sequences_of(x, order, n):
    """[n, S, E] of rows [n * S, E]."""
    return x.view(n, -1, x.shape[-1]) if order == "batch_first" else x.view(-1, n, x.shape[-1]).transpose(0, 1)


@pytest.mark.parametrize("order", ["batch_first", "sequence_first"])
def test_sums_by_sequence(order):
    x, d = uniform((12, 7), -1, 1), uniform((3, 7), -1, 1, seed=5)
    b = Builder("f")
    rows, carrier = b.input("x", "tensor<Tx7xf64>"), b.input("n", "tensor<Nx0xf32>")
    i = b.input("i", "tensor<Tx2xi32>")
    counts = b.op("col.count", b.op("row.given", i, size=7), carrier, size=7, segments=order)
    f = b.build(s=b.op("col.sum", rows, carrier, segments=order), c=counts).entry
    given = {"x": x, "n": torch.empty(3, 0), "i": picks(12, 2, 7)}
    sums, counted = reference.evaluate(f, given)
    torch.testing.assert_close(sums, sequences_of(x, order, 3).sum(1), **VALUE)
    of = sequences_of(given["i"], order, 3)
    assert counted.tolist() == [[int((s == e).sum()) for e in range(7)] for s in of]
    backward = derive(f)
    assert any(op.name == "col.spread" for op in backward.body.ops)
    dx = reference.evaluate(backward, {a.name: {**given, "d_s": d}[a.name] for a in backward.arguments})[0]
    leaf = x.clone().requires_grad_()
    sequences_of(leaf, order, 3).sum(1).backward(d)
    torch.testing.assert_close(dx, leaf.grad, **GRADIENT)


def test_flags_are_joined():
    a, b = torch.rand(11, 7) < 0.5, torch.rand(11, 1) < 0.5
    assert torch.equal(run("math.and", a, b), a & b)


def normalized(tokens, experts, seed=3):
    return torch.softmax(uniform((tokens, experts), -2, 2, seed), -1)


@pytest.mark.parametrize("order", ["", "batch_first", "sequence_first"])
def test_load_balance_loss(order):
    s, n = normalized(12, 7), 3 if order else 1
    b = Builder("f")
    rows = b.input("s", "tensor<Tx7xf64>")
    counts = b.input("c", "tensor<Nx7xi32>" if order else "tensor<7xi32>")
    number = b.input("t", "tensor<Nx1xf64>" if order else "tensor<f64>")
    by = (b.input("n", "tensor<Nx0xf32>"),) if order else ()
    loss = b.op("moe.load_balance_loss", rows, counts, number, *by, coef=0.5, top_k=2, segments=order or None)
    f = b.build(loss=loss).entry
    c = torch.randint(0, 9, (n, 7), dtype=torch.int32, generator=torch.Generator().manual_seed(2))
    t = tensor([[4.0], [3.0], [0.0]])[:n] if order else tensor(11.0)
    each = sequences_of(s, order or "batch_first", n).sum(1) * c
    factor = 0.5 * 7 / 2
    if order:
        expected = factor * (each.sum(-1) / t[:, 0] ** 2)[:2].sum() / 3  # the third has no token that counts
    else:
        expected = factor * each.sum() / 11**2
    given = {"s": s, "c": c if order else c[0], "t": t, "n": torch.empty(n, 0)}
    torch.testing.assert_close(
        reference.evaluate(f, {a.name: given[a.name] for a in f.arguments})[0], expected, **VALUE
    )


def test_z_and_entropy_losses():
    z = torch.cat([uniform((11, 1), -3, 3), tensor([[-INF]])])
    t = tensor(12.0)
    b = Builder("f")
    f = b.build(y=b.op("moe.z_loss", b.input("z", "tensor<Tx1xf64>"), b.input("t", "tensor<f64>"), coef=0.25)).entry
    found = reference.evaluate(f, {"z": z, "t": t})[0]
    torch.testing.assert_close(found, 0.25 * (z[:11] ** 2).sum() / 12, **VALUE)
    s = normalized(12, 7)
    s[3] = tensor([1.0, 0, 0, 0, 0, 0, 0])
    b = Builder("f")
    f = b.build(
        y=b.op("moe.entropy_loss", b.input("s", "tensor<Tx7xf64>"), b.input("t", "tensor<f64>"), coef=3.0)
    ).entry
    found = reference.evaluate(f, {"s": s, "t": t})[0]
    torch.testing.assert_close(found, 3 * torch.special.entr(s).sum() / 12, rtol=1e-12, atol=0.0)
    assert reference.evaluate(f, {"s": s[:0], "t": tensor(0.0)})[0] == 0


def test_no_tokens():
    x, i = torch.zeros(0, 7, dtype=F64), torch.zeros(0, 3, dtype=torch.int32)
    assert run("col.sum", x).tolist() == [0.0] * 7
    assert run("col.count", i, size=7).tolist() == [0] * 7
    assert [tuple(r.shape) for r in run("row.topk", x, k=3)] == [(0, 3), (0, 3)]
    assert run("row.softmax", x).shape == run("row.scatter", x[:, :3], i, size=7).shape == (0, 7)
    assert run("row.group_limit", x, groups=7, keep=1, score="max").shape == (0, 7)


def test_which_ops_keep_the_order_of_their_operand():
    """`strictly_increasing` is what lets a router rank the logits in place of the scores."""
    increasing = {n for n, c in core.OPS.items() if getattr(c, "strictly_increasing", False)}
    x = torch.linspace(0.01, 4.0, 97, dtype=F64)[None]
    for name in increasing:
        assert (run(name, x).diff() > 0).all(), name
    for name in {n for n, c in core.OPS.items() if n in UNARY} - increasing:
        wide = torch.linspace(-6.0, 6.0, 97, dtype=F64)[None]
        rising = (run(name, wide, **ATTRIBUTES.get(name, {})).diff() > 0).all()
        assert not rising or name == "math.cast", f"{name} could say that it is strictly increasing"

"""`parse(print(m)) == m` and `print(parse(print(m))) == print(m)`: for every op, and for generated modules."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moesaic as mo
from moesaic.ir import core
from moesaic.ir.attributes import format_float
from moesaic.ir.builder import Builder
from moesaic.ir.core import Block, Constant, Function, Module, Return, Yield
from moesaic.ir.errors import InputError
from moesaic.ir.ops import math as math_ops
from moesaic.ir.ops.launch import Kernel
from moesaic.ir.parser import parse
from moesaic.ir.types import DType
from moesaic.ir.verifier import verify_module
from moesaic.passes.manager import PassManager


def check(module):
    text = str(module)
    read = parse(text)
    assert read == module, text
    assert str(read) == text
    return read


# Every op -------------------------------------------------------------------------------------------------------------

ROWS = "%x: tensor<Tx6xbf16>, %v: tensor<6xf32>, %i: tensor<Tx2xi32>, %p: tensor<Tx2xf32>, %d: tensor<Tx6xf64>"
ROWS += ", %n: tensor<Nx0xf32>, %f: tensor<Tx6xi1>, %w: tensor<5x4x6xbf16>"
ROWS += ", %u: tensor<5x4xbf16>, %h: tensor<6x4xbf16>"
DISPATCH = (
    "%c, %o, %t, %q, %s, %r = slot.dispatch %i {align = 16, capacity = 1.25, experts = 5, pad = true} : "
    "tensor<5xi32>, tensor<6xi32>, tensor<Mxi32>, tensor<Mxi32>, tensor<Tx2xi32>, tensor<1xi32>"
)
COUNTED = (
    "%b = kernel.dispatch_count %i {align = 16, blocks = C, capacity = 1.25, experts = 5, pad = true} : tensor<Cx5xi32>"
)
SCANNED = (
    f"{COUNTED}\n  %a, %e = kernel.dispatch_scan %b {{align = 16, capacity = 1.25, experts = 5, pad = true}} : "
    "tensor<Cx5xi32>, tensor<5xi32>"
)
GATHER = f"{DISPATCH}\n  %m = slot.gather %x, %t, %s : tensor<Mx6xbf16>"
OF_PICK = f"{DISPATCH}\n  %k = slot.of_pick %p, %q, %s : tensor<Mx1xf32>"
EXAMPLES = {
    "math.add": "%y = math.add %x, %v : tensor<Tx6xf32>",
    "math.and": "%y = math.and %f, %f : tensor<Tx6xi1>",
    "math.sub": "%y = math.sub 1.0, %d : tensor<Tx6xf64>",
    "math.mul": "%y = math.mul %x, -0.0 : tensor<Tx6xf32>",
    "math.div": "%y = math.div %x, inf : tensor<Tx6xf32>",
    "math.safe_div": "%y = math.safe_div %x, nan : tensor<Tx6xf32>",
    "math.maximum": "%y = math.maximum %x, -inf : tensor<Tx6xf32>",
    "math.minimum": "%y = math.minimum %x, 5e-324 : tensor<Tx6xf32>",
    "math.less": "%y = math.less %x, %v : tensor<Tx6xi1>",
    "math.equal": "%y = math.equal %x, 1e-310 : tensor<Tx6xi1>",
    "math.select": "%c = math.less %x, 0.0 : tensor<Tx6xi1>\n  %y = math.select %c, %x, %v : tensor<Tx6xf32>",
    "math.abs": "%y = math.abs %x : tensor<Tx6xf32>",
    "math.pow": "%y = math.pow %x {exponent = 2.5} : tensor<Tx6xf32>",
    "math.neg": "%y = math.neg %x : tensor<Tx6xf32>",
    "math.exp": "%y = math.exp %x : tensor<Tx6xf32>",
    "math.exp_difference": "%y = math.exp_difference %x, 2.0 : tensor<Tx6xf32>",
    "math.log": "%y = math.log %d : tensor<Tx6xf64>",
    "math.log1p": "%y = math.log1p %x : tensor<Tx6xf32>",
    "math.sqrt": "%y = math.sqrt %v : tensor<6xf32>",
    "math.tanh": "%y = math.tanh %x : tensor<Tx6xf32>",
    "math.sigmoid": "%y = math.sigmoid %x : tensor<Tx6xf32>",
    "math.softplus": "%y = math.softplus %x : tensor<Tx6xf32>",
    "math.relu": "%y = math.relu %x : tensor<Tx6xf32>",
    "math.silu": "%y = math.silu %x : tensor<Tx6xf32>",
    "math.gelu_tanh": "%y = math.gelu_tanh %x : tensor<Tx6xf32>",
    "math.erf": "%y = math.erf %x : tensor<Tx6xf32>",
    "math.clamp": "%y = math.clamp %x {max = 7.0, min = -7.0} : tensor<Tx6xf32>",
    "math.cast": "%y = math.cast %d {dtype = f16} : tensor<Tx6xf16>",
    "math.broadcast": "%y = math.broadcast %v, %x : tensor<Tx6xf32>",
    "row.sum": "%y = row.sum %d : tensor<Tx1xf64>",
    "row.max": "%y = row.max %x : tensor<Tx1xf32>",
    "row.softmax": "%y = row.softmax %x : tensor<Tx6xf32>",
    "row.logsumexp": "%y = row.logsumexp %x : tensor<Tx1xf32>",
    "row.normalize": "%y = row.normalize %p {eps = 1e-20, min = 0.5} : tensor<Tx2xf32>",
    "row.lp_normalize": "%y = row.lp_normalize %p {p = inf} : tensor<Tx2xf32>",
    "row.given": "%y = row.given %i {size = 6} : tensor<Tx2xi32>",
    "row.squeeze": "%s = row.sum %x : tensor<Tx1xf32>\n  %y = row.squeeze %s : tensor<Txf32>",
    "row.unsqueeze": (
        "%s = row.sum %x : tensor<Tx1xf32>\n  %t = row.squeeze %s : tensor<Txf32>\n"
        "  %y = row.unsqueeze %t : tensor<Tx1xf32>"
    ),
    "row.topk": (
        "%a = row.group_limit %x {groups = 3, keep = 2} : tensor<Tx6xi1>\n"
        "  %y, %z = row.topk %x, %a {k = 2} : tensor<Tx2xf32>, tensor<Tx2xi32>"
    ),
    "row.group_limit": "%y = row.group_limit %x {groups = 3, keep = 2, score = max<>} : tensor<Tx6xi1>",
    "row.gather": "%y = row.gather %v, %i : tensor<Tx2xf32>",
    "row.scatter": "%y = row.scatter %p, %i {size = 6} : tensor<Tx6xf32>",
    "row.membership": "%y = row.membership %i {size = 6} : tensor<Tx6xu8>",
    "row.bitmap": "%y = row.bitmap %i {size = 6} : tensor<Tx1xu8>",
    "col.sum": "%y = col.sum %x, %n {segments = batch_first} : tensor<Nx6xf32>",
    "row.first": "%y = row.first %x {n = 5} : tensor<Tx6xi1>",
    "row.append": "%y = row.append %i {count = 2, first = 6} : tensor<Tx4xi32>",
    "col.count": (
        "%y = col.count %i {size = 6} : tensor<6xi32>\n"
        "  %z = col.count %i, %n {segments = batch_first, size = 6} : tensor<Nx6xi32>"
    ),
    "col.rows": "%y = col.rows %x : tensor<f32>",
    "col.spread": (
        "%y = col.sum %x, %n {segments = sequence_first} : tensor<Nx6xf32>\n"
        "  %z = col.spread %y, %x {segments = sequence_first} : tensor<Tx6xf32>"
    ),
    "col.total": "%y = col.sum %x : tensor<6xf32>\n  %z = col.total %y : tensor<f32>",
    "moe.load_balance_loss": (
        "%c = col.count %i, %n {segments = batch_first, size = 6} : tensor<Nx6xi32>\n"
        "  %t = col.rows %x : tensor<f32>\n"
        "  %y = moe.load_balance_loss %x, %c, %t, %n {coef = 0.5, segments = batch_first, top_k = 2} : tensor<f32>"
    ),
    "moe.z_loss": (
        "%z = row.logsumexp %x : tensor<Tx1xf32>\n  %t = col.rows %x : tensor<f32>\n"
        "  %y = moe.z_loss %z, %t {coef = 0.5} : tensor<f32>"
    ),
    "moe.entropy_loss": ("%t = col.rows %x : tensor<f32>\n  %y = moe.entropy_loss %x, %t {coef = -0.5} : tensor<f32>"),
    "slot.dispatch": DISPATCH,
    "slot.gather": GATHER,
    "slot.combine": (
        f"{GATHER}\n  %y = slot.combine %m, %s, %t : tensor<Tx6xf32>\n"
        "  %z = slot.combine %m, %s, %t, %p, %q : tensor<Tx6xf32>"
    ),
    "slot.of_pick": OF_PICK,
    "slot.to_picks": f"{OF_PICK}\n  %y = slot.to_picks %k, %s, %q : tensor<Tx2xf32>",
    "slot.linear": "%y = slot.linear %x, %h {transposed = true} : tensor<Tx4xf32>",
    "slot.wgrad": "%y = slot.wgrad %x, %x : tensor<6x6xf32>",
    "slot.wgrad_parts": "%y = slot.wgrad_parts %x, %x {parts = 3} : tensor<3x6x6xf32>",
    "slot.sum_parts": (
        "%g = slot.wgrad_parts %x, %x {parts = 3} : tensor<3x6x6xf32>\n  %y = slot.sum_parts %g : tensor<6x6xf32>"
    ),
    "slot.grouped_linear": (
        f"{GATHER}\n  %y = slot.grouped_linear %m, %w, %c, %o {{transposed = false}} : tensor<Mx4xf32>"
    ),
    "slot.grouped_wgrad": f"{GATHER}\n  %y = slot.grouped_wgrad %m, %m, %c, %o : tensor<5x6x6xf32>",
    "slot.accumulate": "%g = slot.wgrad %x, %x : tensor<6x6xf32>\n  %y = slot.accumulate %g, %g : tensor<6x6xf32>",
    "slot.expert_rows": f"{DISPATCH}\n  %y = slot.expert_rows %u, %t, %c, %o : tensor<Mx4xf32>",
    "slot.expert_sums": f"{GATHER}\n  %y = slot.expert_sums %m, %c, %o : tensor<5x6xf32>",
    "slot.split": "%y, %z = slot.split %x {interleaved = true} : tensor<Tx3xbf16>, tensor<Tx3xbf16>",
    "slot.join": "%y = slot.join %x, %x {interleaved = true} : tensor<Tx12xbf16>",
    "kernel.ticket": (
        "%y, %z = kernel.row_program %x {blocks = B} (%x: tensor<Tx6xbf16>) {\n"
        "    %s = col.sum %x : tensor<6xf32>\n    %t = kernel.ticket : tensor<i32>\n    yield %s, %t\n"
        "  } : tensor<Bx6xf32>, tensor<i32>"
    ),
    "kernel.row_program": (
        "%y, %z = kernel.row_program %x {blocks = B} (%x: tensor<Tx6xbf16>) {\n"
        "    %e = math.exp %x : tensor<Tx6xf32>\n    %s = col.sum %e : tensor<6xf32>\n    yield %e, %s\n"
        "  } : tensor<Tx6xf32>, tensor<Bx6xf32>"
    ),
    "kernel.col_finish": (
        "%y = kernel.col_finish %p {partials = 1} (%a: tensor<2xf32>) {\n"
        "    %b = math.exp %a : tensor<2xf32>\n    yield %b\n  } : tensor<2xf32>"
    ),
    "kernel.dispatch": DISPATCH.replace("slot.", "kernel."),
    "kernel.dispatch_count": COUNTED,
    "kernel.dispatch_scan": SCANNED,
    "kernel.dispatch_scatter": (
        f"{SCANNED}\n  %c, %o, %t, %q, %s, %r = kernel.dispatch_scatter %i, %a, %e {{align = 16, capacity = 1.25, "
        "experts = 5, pad = true} : "
        "tensor<5xi32>, tensor<6xi32>, tensor<Mxi32>, tensor<Mxi32>, tensor<Tx2xi32>, tensor<1xi32>"
    ),
    "kernel.product": (
        f"{DISPATCH}\n  %y = kernel.product %x, %t, %s, %w, %c, %o (%x: tensor<Tx6xbf16>, %t: tensor<Mxi32>, "
        "%s: tensor<Tx2xi32>, %w: tensor<5x4x6xbf16>, %c: tensor<5xi32>, %o: tensor<6xi32>) {\n"
        "    %m = slot.gather %x, %t, %s : tensor<Mx6xbf16>\n"
        "    %g = slot.grouped_linear %m, %w, %c, %o {transposed = false} : tensor<Mx4xf32>\n"
        "    %r = row.sum %g : tensor<Mx1xf32>\n    yield %r\n  } : tensor<Mx1xf32>"
    ),
    "kernel.wgrad": (
        f"{GATHER}\n  %y = kernel.wgrad %m, %c, %o (%m: tensor<Mx6xbf16>, %c: tensor<5xi32>, %o: tensor<6xi32>) {{\n"
        "    %g = slot.grouped_wgrad %m, %m, %c, %o : tensor<5x6x6xf32>\n    yield %g\n  } : tensor<5x6x6xf32>"
    ),
    "kernel.sum_parts": (
        "%g = slot.wgrad_parts %x, %x {parts = 3} : tensor<3x6x6xf32>\n"
        "  %y = kernel.sum_parts %g (%g: tensor<3x6x6xf32>) {\n"
        "    %y = slot.sum_parts %g : tensor<6x6xf32>\n    yield %y\n  } : tensor<6x6xf32>"
    ),
    "kernel.combine": (
        f"{GATHER}\n  %y = kernel.combine %m, %s, %t (%m: tensor<Mx6xbf16>, %s: tensor<Tx2xi32>, "
        "%t: tensor<Mxi32>) {\n"
        "    %y = slot.combine %m, %s, %t : tensor<Tx6xf32>\n    yield %y\n  } : tensor<Tx6xf32>"
    ),
    "kernel.to_picks": (
        f"{OF_PICK}\n  %y = kernel.to_picks %k, %s, %q (%k: tensor<Mx1xf32>, %s: tensor<Tx2xi32>, "
        "%q: tensor<Mxi32>) {\n"
        "    %y = slot.to_picks %k, %s, %q : tensor<Tx2xf32>\n    yield %y\n  } : tensor<Tx2xf32>"
    ),
    "kernel.slot_rows": (
        f"{GATHER}\n  %y = kernel.slot_rows %m (%m: tensor<Mx6xbf16>) {{\n"
        "    %r = math.neg %m : tensor<Mx6xf32>\n    yield %r\n  } : tensor<Mx6xf32>"
    ),
    "launch.alloc": (
        '%y = launch.alloc {slot = 3, space = workspace, type = "tensor<T*8 + 5x6xf32>"} : tensor<T*8 + 5x6xf32>'
    ),
    "launch.kernel": (
        '%o = launch.alloc {space = result, type = "tensor<2xf32>"} : tensor<2xf32>\n'
        '  %own = launch.alloc {slot = 1, space = workspace, type = "tensor<i32>"} : tensor<i32>\n'
        '  %later = launch.alloc {slot = 2, space = workspace, type = "tensor<i32>"} : tensor<i32>\n'
        '  launch.kernel %p, %o, %own, %later {blocks = B, config = ["threads=256", "odd \\"one\\" \\\\n"], '
        'counted = true, early = true, facts = ["experts=5"], partials = 1, reads = 1, symbol = f_finish, '
        "template = col_finish, zeroes = 1} (%a: tensor<2xf32>) {\n"
        "    %b = math.exp %a : tensor<2xf32>\n    yield %b\n  }"
    ),
    "return": "",
    "yield": ("%y = kernel.row_program %x {blocks = B} (%x: tensor<Tx6xbf16>) {\n    yield %x\n  } : tensor<Tx6xbf16>"),
}


@pytest.mark.parametrize("name", sorted(core.OPS))
def test_every_op(name):
    """An op that is added without an example here fails."""
    assert name in EXAMPLES, f"add an example of {name} to EXAMPLES"
    body = EXAMPLES[name]
    text = (
        f"moe.func @f({ROWS}) -> () {{\n  {body}\n  return\n}}\n"
        if body
        else f"moe.func @f({ROWS}) -> () {{\n  return\n}}\n"
    )
    module = parse(text)
    assert str(module) == text  # the examples are in canonical form
    check(module)
    assert name in {op.name for op in module.walk()}
    optional = set(core.OPS[name].attribute_defs)
    given_somewhere = {a for op in module.walk() if op.name == name for a in op.attributes}
    assert given_somewhere == optional - ({"slot"} if name == "launch.kernel" else set())


# Generated modules ----------------------------------------------------------------------------------------------------

SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 5e-324, -1e-310, 1.7976931348623157e308, 1e22, 0.1]
NUMBERS = st.one_of(st.sampled_from(SPECIAL), st.floats(), st.integers(-(10**20), 10**20).map(float))
FINITE = NUMBERS.filter(math.isfinite)
IDENTIFIERS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True).filter(lambda s: s not in ("inf", "nan"))
ODD_NAMES = st.one_of(
    st.just(""),
    st.sampled_from(["x", "x_1", "0", "1", "2nd", "%", "é", "return", "moe.func", "tensor", "inf", "a b", "a\nb", "_"]),
    st.text(max_size=5),
)
UNARY = [n for n, c in core.OPS.items() if issubclass(c, math_ops.Unary) and not c.attribute_defs]
BINARY = [n for n, c in core.OPS.items() if issubclass(c, math_ops.Binary)]


def of(pool, *dtypes, columns=None, rank=2):
    return [
        v
        for v in pool
        if v.type.rank == rank
        and (v.type.dtype in dtypes if dtypes else v.type.dtype.is_float)
        and (columns is None or v.type.shape[-1] == columns)
    ]


@st.composite
def functions(draw, name):
    """A function of random ops; what does not fit together is left out."""
    e = draw(st.sampled_from([1, 2, 3, 5, 6, 7, 12]))
    k = draw(st.integers(1, e))
    b = Builder(name)
    float_type = st.sampled_from(["bf16", "f16", "f32", "f64"])
    names = draw(st.lists(IDENTIFIERS.filter(lambda s: s != "picks"), min_size=4, max_size=4, unique=True))
    shapes = [f"Tx{e}x", f"{e}x", "Tx1x", f"T*8 + 3x{e}x"]
    pool = [b.input(n, f"tensor<{s}{draw(float_type)}>") for n, s in zip(names, shapes, strict=True)]
    pool.append(b.input("picks", f"tensor<Tx{k}xi32>"))

    def one_of(values):
        if not values:
            raise InputError("nothing of this kind yet")
        return draw(st.sampled_from(values))

    def scalar_or(values):
        return draw(st.one_of(st.sampled_from(values), NUMBERS))

    def make(kind):
        if kind == "unary":
            return b.op(draw(st.sampled_from(UNARY)), one_of(pool))
        if kind == "binary":
            return b.op(draw(st.sampled_from(BINARY)), scalar_or(pool), scalar_or(pool))
        if kind == "select":
            return b.op("math.select", one_of(of(pool, DType.I1, DType.U8)), scalar_or(pool), scalar_or(pool))
        if kind == "clamp":
            low, high = sorted((draw(FINITE), draw(FINITE)))
            limits = {n: v for n, v in (("min", low), ("max", high)) if draw(st.booleans())}
            return b.op("math.clamp", one_of(pool), **limits)
        if kind == "cast":
            return b.op("math.cast", one_of(pool), dtype=draw(st.sampled_from(list(DType))).value)
        if kind == "broadcast":
            return b.op("math.broadcast", scalar_or(pool), one_of(pool))
        rows = one_of(of(pool))
        columns = rows.type.shape[-1]
        if kind == "row":
            return b.op(draw(st.sampled_from(["row.sum", "row.max", "row.softmax", "row.logsumexp", "col.sum"])), rows)
        if kind == "normalize":
            return b.op("row.normalize", rows, eps=abs(draw(FINITE)), min=draw(st.one_of(st.none(), FINITE.map(abs))))
        if kind == "topk":
            allowed = of(pool, DType.I1, columns=columns)
            given_too = [one_of(allowed)] if allowed and draw(st.booleans()) else []
            return b.op("row.topk", rows, *given_too, k=draw(st.integers(1, columns)))
        if kind == "group_limit":
            groups = draw(st.sampled_from([g for g in range(1, columns + 1) if columns % g == 0]))
            best = draw(st.integers(0, columns // groups))
            score = mo.sum_top(best) if best else draw(st.sampled_from(["max", core.attr.Call("max")]))
            return b.op("row.group_limit", rows, groups=groups, keep=draw(st.integers(1, groups)), score=score)
        indices = one_of(of(pool, DType.I32))
        size = draw(st.integers(1, 4000))
        if kind == "gather":
            return b.op("row.gather", one_of(of(pool) + of(pool, rank=1)), indices)
        if kind == "scatter":
            return b.op("row.scatter", rows, indices, size=size)
        return b.op(draw(st.sampled_from(["row.membership", "col.count"])), indices, size=size)

    kinds = ["unary", "binary", "select", "clamp", "cast", "broadcast", "row", "normalize", "topk", "group_limit"]
    for kind in draw(st.lists(st.sampled_from([*kinds, "gather", "scatter", "count"]), min_size=1, max_size=9)):
        before = len(b.function.body.ops)
        try:
            made = make(kind)
            b.function.body.ops[-1].verify()
        except InputError:
            del b.function.body.ops[before:]
            continue
        for value in made if isinstance(made, tuple) else (made,):
            value.name = draw(ODD_NAMES)
            pool.append(value)
    returned = draw(st.lists(st.one_of(st.sampled_from(pool), NUMBERS.map(Constant)), max_size=4))
    result_names = draw(st.lists(IDENTIFIERS, min_size=len(returned), max_size=len(returned), unique=True))
    return b.build(**dict(zip(result_names, returned, strict=True))).entry


@st.composite
def modules(draw):
    names = draw(st.lists(IDENTIFIERS, min_size=1, max_size=3, unique=True))
    return Module([draw(functions(n)) for n in names])


@settings(max_examples=80)
@given(modules())
def test_generated_modules(module):
    read = check(module)
    assert check(read.clone()) == module


@settings(max_examples=60)
@given(NUMBERS)
def test_numbers_read_back(value):
    text = f"moe.func @f(%x: tensor<f32>) -> (y: tensor<f32>) {{ %y = math.add %x, {format_float(value)} return %y }}"
    read = next(parse(text).walk()).operands[1].value
    assert repr(read) == repr(value if value == value else math.nan)


TEXTS = st.one_of(
    st.text(max_size=8),
    st.text('\\"nr\n\r\t<>[]{},=%@ inf', max_size=8),
    st.sampled_from(["inf.x", "-inf", "nan-", "tensor<f32>", "true.", "1e5"]),
)


@settings(max_examples=80)
@given(TEXTS, st.lists(TEXTS, max_size=3))
def test_strings_read_back(symbol, config):
    region = Block()
    region.append(Yield([]))
    attributes = {"symbol": symbol, "template": "row_program", "reads": 0, "config": tuple(config)}
    function = Function("f")
    function.body.append(Kernel([], attributes, region=region))
    function.body.append(Return([]))
    read = check(Module([function]))
    assert next(read.walk()).attributes == attributes


@settings(max_examples=20)
@given(st.data())
def test_every_stage_of_a_compilation(data):
    """Through all passes; regions, launches and inferred names included. What is read back goes on to the same end."""
    e = data.draw(st.sampled_from([1, 3, 5, 8]))
    options = {
        "num_experts": e,
        "top_k": data.draw(st.integers(1, e)),
        "score": data.draw(st.sampled_from(["softmax", "sigmoid", "sqrtsoftplus"])),
        "order": data.draw(st.sampled_from(["score_then_topk", "topk_then_score"])),
        "selection_bias": data.draw(st.booleans()),
        "gate_bias": data.draw(st.booleans()),
        "renormalize": data.draw(st.sampled_from([False, True, mo.norm.sum(eps=1e-20, min=1e-9)])),
        "outputs": data.draw(
            st.lists(st.sampled_from(["weights", "indices", "counts", "probs", "map"]), min_size=1, unique=True)
        ),
        "scale": data.draw(st.sampled_from([1.0, 2.5])),
    }
    module = mo.Router(**options).module(data.draw(st.sampled_from(["bf16", "f32"])))
    passes = PassManager("default").passes
    from_text = module.clone()
    for current in passes:
        PassManager([current]).run(module)
        verify_module(module)
        from_text = check(from_text)
        PassManager([current]).run(from_text)
        assert from_text == module
    check(module)

"""Values, ops, blocks and modules; the builder; the verifier; what the printer says of one op."""

import math
import subprocess
import sys

import pytest

import moesaic as mo
from moesaic.ir import core
from moesaic.ir.attributes import Call, format_attribute, format_attributes, format_float
from moesaic.ir.builder import Builder
from moesaic.ir.core import Block, Constant, Function, Module, Op, Return, Yield, create, create_one
from moesaic.ir.diagnostics import DiagnosticError
from moesaic.ir.errors import InputError, InternalError
from moesaic.ir.ops import row
from moesaic.ir.ops.launch import Kernel
from moesaic.ir.parser import parse
from moesaic.ir.printer import print_op
from moesaic.ir.types import tensor
from moesaic.ir.verifier import verify_module


def small():
    b = Builder("route")
    x = b.input("logits", "tensor<Tx7xbf16>")
    s = b.op("math.sigmoid", x)
    v, i = b.op("row.topk", s, k=3)
    return b, x, s, v, i


# Values ---------------------------------------------------------------------------------------------------------------


def test_constants_are_equal_by_their_bits():
    assert Constant(1) == Constant(1.0) and hash(Constant(1)) == hash(Constant(1.0))
    assert Constant(0.0) != Constant(-0.0)
    assert Constant(math.nan) == Constant(-math.nan) == Constant(math.copysign(math.nan, -1))
    assert Constant(1.0) != 1.0
    assert Constant(2.0).block is None


def test_operators_append_ops():
    b, x, *_ = small()
    made = [x + 1.0, 1.0 + x, x - 1.0, 1.0 - x, x * 2.0, 2.0 * x, x / 2.0, 2.0 / x, -x, x + x]
    shown = [print_op(v.op) for v in made]
    assert shown == [
        f"%0 = {text} : tensor<Tx7xf32>"
        for text in (
            "math.add %logits, 1.0",
            "math.add 1.0, %logits",
            "math.sub %logits, 1.0",
            "math.sub 1.0, %logits",
            "math.mul %logits, 2.0",
            "math.mul 2.0, %logits",
            "math.div %logits, 2.0",
            "math.div 2.0, %logits",
            "math.neg %logits",
            "math.add %logits, %logits",
        )
    ]
    assert [op.results[0] for op in b.function.body.ops[-10:]] == made


@pytest.mark.parametrize("bad", [True, "1", None, [1.0], 1j])
def test_not_a_value(bad):
    b, x, *_ = small()
    with pytest.raises(InputError, match="expected an IR value or a number, found"):
        b.op("math.add", x, bad)


def test_an_op_needs_a_home():
    with pytest.raises(InputError, match=r"math\.add: no operand belongs to a function yet"):
        create_one("math.add", 1.0, 2.0)
    with pytest.raises(InputError, match=r"unknown op 'math\.adde'; did you mean 'math\.add'"):
        create_one("math.adde", 1.0, 2.0)
    block = Block()
    assert create_one("math.add", 1.0, 2.0, block=block).block is block


def test_one_result_only():
    _, x, *_ = small()
    with pytest.raises(InternalError, match=r"row\.topk has 2 results, not one"):
        create_one("row.topk", x, k=1)


# Declarations ---------------------------------------------------------------------------------------------------------


def test_declared_fields_read_from_the_op():
    _, _, s, v, i = small()
    topk = v.op
    assert isinstance(topk, row.TopK)
    assert (topk.x, topk.allowed, topk.k, topk.values, topk.indices) == (s, None, 3, v, i)
    assert [d.name for d in row.TopK.operand_defs] == ["x", "allowed"]
    assert [d.name for d in row.TopK.result_defs] == ["values", "indices"]
    assert row.TopK.k.spec.expects == "an integer >= 1"
    assert (v.name, i.name) == ("values", "indices")


def test_defaults():
    _, x, *_ = small()
    limit = create("row.group_limit", x, groups=1, keep=1)
    assert limit.score == Call("sum_top", (2,)) and "score" not in limit.attributes
    assert create("row.normalize", x).eps == 0.0


def test_an_op_name_is_taken_once():
    with pytest.raises(InternalError, match=r"op math\.add is defined twice"):
        type("Again", (Op,), {"name": "math.add"})


@pytest.mark.parametrize("name", sorted(n for n in core.OPS if "." in n))
def test_every_op_says_what_it_is(name):
    cls = core.OPS[name]
    assert cls.__doc__ and cls.__doc__.strip() != (cls.__mro__[1].__doc__ or "").strip()
    for spec in cls.attribute_defs.values():
        assert spec.doc and spec.expects
    assert all(d.doc for d in (*cls.operand_defs, *cls.result_defs))


def test_a_new_op_needs_nothing_else():
    """An op added from outside is parsed, printed and verified by its declaration."""

    class Twice(core.Op):
        """y = 2x."""

        name = "test.twice"
        x = core.operand("anything")
        y = core.result("the same")
        factor = core.number("how often", default=2.0)
        flags = core.integers("marks", default=())
        exact = core.boolean("rounding", default=False)

        def infer(self):
            return [self.x.type]

    try:
        text = (
            "moe.func @f(%x: tensor<f64>) -> (y: tensor<f64>) {\n"
            "  %y = test.twice %x {exact = true, factor = 3.0, flags = [1, -2]} : tensor<f64>\n  return %y\n}\n"
        )
        module = parse(text)
        assert str(module) == text
        op = next(module.walk())
        assert (op.factor, op.flags, op.exact) == (3.0, (1, -2), True)
        for attribute, message in {
            "flags = [a]": r"'flags' expects a list of integers, found list \[a\]",
            "exact = 1": "'exact' expects true or false, found integer 1",
            "factor = nan": "'factor' expects a finite number, found nan",
            "flag = [1]": r"unknown attribute 'flag'; did you mean 'flags'\?; known: factor, flags, exact",
        }.items():
            with pytest.raises(DiagnosticError, match=message):
                parse(text.replace("exact = true, factor = 3.0, flags = [1, -2]", attribute))
    finally:
        del core.OPS["test.twice"]


# Attributes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (8, "8"),
        (8.0, "8.0"),
        (1e-20, "1e-20"),
        (1e16, "1e+16"),
        (-0.0, "-0.0"),
        (5e-324, "5e-324"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (-math.nan, "nan"),
        ("split_halves", "split_halves"),
        ("true", '"true"'),
        ("nan", '"nan"'),
        ("", '""'),
        ("a b", '"a b"'),
        ('q"\\', '"q\\"\\\\"'),
        ("a\nb\r", '"a\\nb\\r"'),
        (Call("sum_top", (2,)), "sum_top<2>"),
        ((1, (2.0, "x"), Call("max")), "[1, [2.0, x], max<>]"),
    ],
)
def test_attribute_text(value, text):
    assert format_attribute(value) == text


def test_attributes_print_in_order_of_their_names():
    assert format_attributes({"b": 1, "a": 2}) == format_attributes({"a": 2, "b": 1}) == "{a = 2, b = 1}"
    assert format_float(3.0) == "3.0"


# Blocks and modules ---------------------------------------------------------------------------------------------------


def test_walk_users_and_replace():
    b, x, s, v, i = small()
    module = b.build(weights=v, indices=i)
    body = module.entry.body
    assert [op.name for op in module.walk()] == ["math.sigmoid", "row.topk", "return"]
    assert [op.name for op in body.users(s)] == ["row.topk"]
    assert body.replace({s: x}) and not body.replace({s: x})
    assert [op.name for op in body.users(x)] == ["math.sigmoid", "row.topk"]
    assert module.entry.argument("logits") is x
    with pytest.raises(InputError, match=r"function @route has no input 'logit'; did you mean 'logits'\?; it has"):
        module.entry.argument("logit")
    with pytest.raises(InputError, match=r"no function @rout; did you mean 'route'\?"):
        module.function("rout")
    with pytest.raises(InputError, match="the module has no function"):
        _ = Module([]).entry


def test_a_clone_is_equal_and_its_own():
    module = mo.Router(
        num_experts=6, top_k=2, score="sqrtsoftplus", selection_bias=True, groups=3, groups_kept=2
    ).module()
    copy = module.clone()
    assert copy == module and str(copy) == str(module)
    for op in list(copy.walk()):
        assert all(v.block is None or v.block is copy.entry.body for v in op.operands)
    copy.entry.body.ops[0].attributes["x"] = 1
    assert copy != module


CHANGES = {
    "a constant's sign": ("math.mul %weights, 0.0", "math.mul %weights, -0.0"),
    "an attribute": ("{k = 2}", "{k = 3}"),
    "operand order": ("math.sub %s, %b", "math.sub %b, %s"),
    "an input's name": ("%b: tensor", "%bias: tensor"),
    "an input's type": ("%b: tensor<5xf32>", "%b: tensor<5xbf16>"),
    "a result's name": ("(w: ", "(v: "),
    "the function's name": ("@route", "@router"),
    "another op": ("math.sigmoid", "math.tanh"),
    "a result less": ("-> (w: tensor<Tx2xf32>, i", "-> (i"),
    "the kind of a number": ("eps = 1.0", "eps = 1"),
}
EXAMPLE = """moe.func @route(%x: tensor<Tx5xf32>, %b: tensor<5xf32>) -> (w: tensor<Tx2xf32>, i: tensor<Tx2xi32>) {
  %s = math.sigmoid %x
  %d = math.sub %s, %b
  %v, %i = row.topk %d {k = 2}
  %weights = row.normalize %v {eps = 1.0}
  %w = math.mul %weights, 0.0
  return %w, %i
}
"""


@pytest.mark.parametrize("change", CHANGES)
def test_modules_that_differ_are_not_equal(change):
    old, new = CHANGES[change]
    text = EXAMPLE.replace(old, new)
    assert text != EXAMPLE
    text = text.replace("%bias: tensor<5xf32>", "%bias: tensor<5xf32>").replace("%s, %b\n", "%s, %b\n")
    if change == "an input's name":
        text = text.replace("%s, %b", "%s, %bias")
    if change == "an attribute":
        text = text.replace("Tx2x", "Tx3x")
    if change == "a result less":
        text = text.replace("return %w, %i", "return %i")
    assert parse(text) != parse(EXAMPLE)
    assert parse(EXAMPLE) == parse(EXAMPLE.replace("%weights", "%other"))  # names inside do not count


def test_equality_with_other_things():
    assert Module([]) == Module([])
    assert Module([]) != "moe.func"
    with pytest.raises(TypeError):
        hash(Module([]))


# The builder ----------------------------------------------------------------------------------------------------------


def test_builder_equals_text():
    b = Builder("route")
    x = b.input("x", "tensor<Tx5xf32>")
    bias = b.input("b", tensor("f32", 5))
    v, i = b.op("row.topk", b.op("math.sub", b.op("math.sigmoid", x), bias), k=2)
    w = b.op("math.mul", b.op("row.normalize", v, eps=1.0), 0.0, named="scaled")
    module = b.build(w=w, i=i)
    assert module == parse(EXAMPLE)
    assert "%scaled = math.mul" in str(module)
    with pytest.raises(InputError, match=r"build\(\) was called before"):
        b.build(w=w)


def test_builder_refuses():
    b = Builder("route")
    b.input("x", "tensor<Tx5xf32>")
    with pytest.raises(InputError, match="input 'x' is declared twice"):
        b.input("x", "tensor<5xf32>")
    with pytest.raises(InputError, match="is not a type"):
        b.input("y", "Tx5")


@pytest.mark.parametrize("name", ["", "a b", "a-b", "1st", "é", "a.b", "x\n", "inf", "nan"])
def test_names_that_text_could_not_spell(name):
    """Whatever verifies must read back, so the builder knows no names that the text does not."""
    with pytest.raises(DiagnosticError, match=r"cannot be the name of a function; use letters, digits and '_'"):
        Builder(name).build()
    b = Builder()
    with pytest.raises(DiagnosticError, match="cannot be the name of an input"):
        b.build(y=b.input(name, "tensor<f32>"))
    b = Builder()
    with pytest.raises(DiagnosticError, match="cannot be the name of a result"):
        b.build(**{name: b.input("x", "tensor<f32>")})


def test_diagnostics_without_text_name_the_op():
    b = Builder()
    x = b.input("x", "tensor<Tx5xf32>")
    with pytest.raises(DiagnosticError) as caught:
        b.op("row.topk", x, k=6)
    assert str(caught.value) == (
        "error: row.topk: k must be between 1 and the 5 experts, found k = 6\n  in: row.topk %x {k = 6}"
    )
    with pytest.raises(DiagnosticError, match=r"attribute 'k' \(picks per token\) is missing"):
        b.op("row.topk", x)


# The verifier ---------------------------------------------------------------------------------------------------------


def problems(module):
    with pytest.raises(DiagnosticError) as caught:
        verify_module(module)
    return [d.message for d in caught.value.diagnostics]


def test_value_of_another_function():
    b, _, s, v, i = small()
    b.build(w=v, i=i)
    other = Builder("other")
    x = other.input("x", "tensor<Tx7xf32>")
    total = create_one("math.add", x, s)
    other.function.body.append(Return([total]))
    other.function.result_names = ["y"]
    assert problems(Module([other.function])) == [
        "math.add: uses %s, which is not defined before it in its block".replace("%s", str(s.type))
    ]


def test_value_used_before_it_is_made():
    module = parse(EXAMPLE)
    ops = module.entry.body.ops
    ops[0], ops[1] = ops[1], ops[0]
    assert problems(module) == ["math.sub: uses %s, which is not defined before it in its block"]


def test_result_types_are_checked():
    module = parse(EXAMPLE)
    module.entry.body.ops[0].results[0].type = tensor("bf16", "T", 5)
    assert problems(module) == [
        "math.sigmoid: results have type tensor<Tx5xbf16>; its operands give tensor<Tx5xf32>",
    ]


def test_attributes_changed_later_are_checked():
    module = parse(EXAMPLE)
    module.entry.body.ops[2].attributes["k"] = "two"
    assert problems(module) == ["row.topk: attribute 'k' expects an integer >= 1, found string 'two'"]


def test_terminators():
    message = "a body ends with one 'return'"
    module = parse(EXAMPLE)
    removed = module.entry.body.ops.pop()
    assert problems(module)[0].startswith("math.mul: " + message)
    module.entry.body.ops.insert(0, Return([]))
    module.entry.body.ops.append(removed)
    assert problems(module)[0].startswith("return: " + message)
    module.entry.body.ops[0] = Yield([])
    assert problems(module)[0].startswith("yield: " + message)
    module.entry.body.ops.clear()
    assert problems(module)[0] == message + ", this one is empty"


def test_signatures():
    module = parse(EXAMPLE)
    module.entry.result_names = ["w"]
    assert problems(module) == ["@route names 1 results and returns 2"]
    module.entry.result_names = ["w", "w"]
    assert problems(module) == ["@route names a result twice"]
    module = parse(EXAMPLE)
    module.entry.arguments[1].name = "x"
    assert problems(module) == ["@route names an input twice"]


def test_regions_are_checked():
    module = mo.Router(num_experts=5, top_k=2).module()
    from moesaic.passes.manager import PassManager

    PassManager("expand-rows,fuse-score-topk").run(module)
    kernel = next(module.walk())
    kernel.region.ops[0].operands[0] = module.entry.arguments[0]
    assert problems(module) == ["row.max: uses %logits, which is not defined before it in its block"]
    kernel.region.ops[0].operands[0] = kernel.region.arguments[0]
    kernel.region.arguments[0].type = tensor("bf16", "T", 5)
    assert "kernel.row_program: the region's arguments differ in type from the operands" in problems(module)


def launch(operands, reads, arguments, yielded):
    region = Block()
    for i, type in enumerate(arguments):
        region.add_argument(type, f"a{i}")
    region.append(Yield(region.arguments[:yielded]))
    attributes = {"symbol": "f", "template": "row_program", "reads": reads}
    return Kernel(operands, attributes, region=region)


@pytest.mark.parametrize(
    ("reads", "arguments", "yielded", "message"),
    [
        (3, 1, 1, "reads 3 of 2 operands"),
        (1, 2, 1, "the region must have one argument for each of the 1 operands read"),
        (1, 1, 0, "the region must yield one value for each of the 1 written"),
    ],
)
def test_launches_are_checked(reads, arguments, yielded, message):
    function = Function("f")
    type = tensor("f32", 3)
    operands = [function.body.add_argument(type, n) for n in "ab"]
    function.body.append(launch(operands, reads, [type] * arguments, yielded))
    function.body.append(Return([]))
    assert problems(Module([function])) == [f"launch.kernel: {message}"]
    legal = Function("f")
    operands = [legal.body.add_argument(type, n) for n in "ab"]
    legal.body.append(launch(operands, 1, [type], 1))
    legal.body.append(Return([]))
    verify_module(Module([legal]))


# math as functions ----------------------------------------------------------------------------------------------------


def test_math_functions_come_from_the_registry():
    _, x, *_ = small()
    assert mo.math.sqrt(mo.math.softplus(x)).op.name == "math.sqrt"
    assert mo.math.clamp(x, min=-1.0, max=2.0).op.attributes == {"min": -1.0, "max": 2.0}
    assert dir(mo.math) == sorted(n[5:] for n in core.OPS if n.startswith("math."))
    assert "tanh(x)" in mo.math.tanh.__doc__ and mo.math.tanh.__name__ == "tanh"
    with pytest.raises(AttributeError, match=r"no op math\.sqr; did you mean 'sqrt'\?; known: abs, add, "):
        mo.math.sqr(x)


def test_text_does_not_depend_on_the_hash_seed():
    code = (
        "import moesaic as mo; from moesaic.passes.manager import PassManager\n"
        "m = mo.Router(num_experts=6, top_k=2, score='sigmoid', gate_bias=True, groups=3, groups_kept=2,"
        " renormalize=True, outputs=('probs', 'counts', 'map')).module('bf16')\n"
        "PassManager('default').run(m); print(m)"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(texts) == 1 and "launch.kernel" in texts.pop()

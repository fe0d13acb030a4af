"""What the parser says about text that is not IR, and where: line, column and caret."""

import re

import pytest

from moesaic.ir.core import Constant
from moesaic.ir.diagnostics import DiagnosticError
from moesaic.ir.parser import parse

HEAD = "moe.func @route(%logits: tensor<Tx8xbf16>, %b: tensor<8xf32>) -> (i: tensor<Tx2xi32>) {\n"
TAIL = "\n}\n"


def failing(text):
    """The only diagnostic of a text, after checking that its rendering points at the place."""
    with pytest.raises(DiagnosticError) as caught:
        parse(text, name="router.moe")
    [diagnostic] = caught.value.diagnostics
    location = diagnostic.location
    first, *rest = str(caught.value).split("\n")
    assert first == f"router.moe:{location.line}:{location.column}: error: {diagnostic.message}"
    line = text.split("\n")[location.line - 1]
    if line.strip():
        assert rest[0] == line
        assert rest[1] == re.sub(r"[^\t]", " ", line[: location.column - 1]) + "^"
    return diagnostic


def at(text, marked):
    """Line and column of the piece of `text` between « and »; the text without the marks."""
    before, _, rest = marked.partition("«")
    plain = marked.replace("«", "").replace("»", "")
    assert rest and "»" in rest
    return plain, before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1


# The piece between « and » is what the diagnostic has to point at.
BODY_ERRORS = {
    "unknown op": ("%s = «math.sigmod» %logits", "unknown op 'math.sigmod'; did you mean 'math.sigmoid'?"),
    "unknown op, nothing near": ("%s = «zzz» %logits", "unknown op 'zzz'"),
    "unknown attribute": (
        "%v, %i = row.topk %logits {«kk» = 2}",
        "row.topk: unknown attribute 'kk'; did you mean 'k'?; known: k",
    ),
    "attribute of an op without any": (
        "%s = math.sigmoid %logits {«k» = 2}",
        "math.sigmoid: unknown attribute 'k'; known: none",
    ),
    "k missing": (
        "%v, %i = «row.topk» %logits",
        "row.topk: attribute 'k' (picks per token) is missing; it expects an integer >= 1",
    ),
    "k a string": (
        '%v, %i = row.topk %logits {«k» = "eight"}',
        "row.topk: attribute 'k' expects an integer >= 1, found string 'eight'",
    ),
    "k a float": (
        "%v, %i = row.topk %logits {«k» = 2.0}",
        "row.topk: attribute 'k' expects an integer >= 1, found float 2.0",
    ),
    "k a bool": (
        "%v, %i = row.topk %logits {«k» = true}",
        "row.topk: attribute 'k' expects an integer >= 1, found bool true",
    ),
    "k a list": (
        "%v, %i = row.topk %logits {«k» = [1]}",
        "row.topk: attribute 'k' expects an integer >= 1, found list [1]",
    ),
    "k zero": ("%v, %i = row.topk %logits {«k» = 0}", "row.topk: attribute 'k' expects an integer >= 1, found 0"),
    "k negative": ("%v, %i = row.topk %logits {«k» = -1}", "row.topk: attribute 'k' expects an integer >= 1, found -1"),
    "k too large": (
        "%v, %i = «row.topk» %logits {k = 9}",
        "row.topk: k must be between 1 and the 8 experts, found k = 9",
    ),
    "attribute twice": ("%v, %i = row.topk %logits {k = 2, «k» = 2}", "attribute 'k' is given twice"),
    "operand missing": (
        "%v, %i = «row.topk» {k = 2}",
        "row.topk: operand 1 ('x': [T, E] values to rank) is missing; expected 1, found 0",
    ),
    "second operand missing": (
        "%s = «math.add» %logits",
        "math.add: operand 2 ('b': broadcasts against a) is missing; expected 2, found 1",
    ),
    "operand after comma missing": ("%s = math.add %logits, «:»", "expected an operand after ',', found ':'"),
    "too many operands": ("%s = «math.neg» %logits, %b", "math.neg: expected at most 1 operands, found 2"),
    "groups do not divide": (
        "%a = «row.group_limit» %logits {groups = 3, keep = 1}",
        "row.group_limit: groups must divide the 8 experts, found groups = 3",
    ),
    "keep above groups": (
        "%a = «row.group_limit» %logits {groups = 4, keep = 5}",
        "row.group_limit: keep must be at most groups = 4, found keep = 5",
    ),
    "group score above group": (
        "%a = «row.group_limit» %logits {groups = 8, keep = 4}",
        "row.group_limit: score sums the best 2 of a group, but a group holds 1 experts (8 experts in 8 groups)",
    ),
    "group score unknown": (
        "%a = row.group_limit %logits {groups = 4, keep = 2, «score» = sum_tap<2>}",
        "row.group_limit: attribute 'score' expects one of max, sum_top<n>, found 'sum_tap'; did you mean 'sum_top'?",
    ),
    "group score without n": (
        "%a = row.group_limit %logits {groups = 4, keep = 2, «score» = sum_top}",
        "row.group_limit: attribute 'score' expects one of max, sum_top<n>, found 'sum_top' without arguments",
    ),
    "group score of none": (
        "%a = row.group_limit %logits {groups = 4, keep = 2, «score» = sum_top<0>}",
        "row.group_limit: attribute 'score' expects one of max, sum_top<n>, found sum_top<0>",
    ),
    "undefined value": ("%s = math.neg «%logit»", "value %logit is not defined; did you mean '%logits'?"),
    "value used before": ("%s = math.neg «%later»\n  %later = math.neg %b", "value %later is not defined"),
    "defined twice": ("%s = math.neg %b\n  «%s» = math.neg %b", "value %s is defined twice"),
    "input redefined": ("«%b» = math.neg %b", "value %b is defined twice"),
    "results share a name": ("%v, «%v» = row.topk %logits {k = 2}", "value %v is defined twice"),
    "too few results": ("%i = «row.topk» %logits {k = 2}", "row.topk has 2 results, 1 are named"),
    "too many results": ("%s, %t = «math.neg» %b", "math.neg has 1 results, 2 are named"),
    "no result named": ("«math.neg» %b", "math.neg has 1 results, 0 are named"),
    "wrong type": (
        "%s = math.neg %logits : «tensor<Tx8xbf16>»",
        "math.neg: result 1 has type tensor<Tx8xf32>, not tensor<Tx8xbf16>",
    ),
    "wrong second type": (
        "%v, %i = row.topk %logits {k = 2} : tensor<Tx2xf32>, «tensor<Tx2xi64>»",
        "row.topk: result 2 has type tensor<Tx2xi32>, not tensor<Tx2xi64>",
    ),
    "type missing": (
        "%v, %i = row.topk %logits {k = 2} : tensor<Tx2xf32>\n  «%z» = math.neg %b",
        "expected ',' and the types of all 2 results, found '%z'",
    ),
    "bad type": (
        "%s = math.neg %b : «tensor<8xfloaty>»",
        "unknown dtype 'floaty'; did you mean 'float'?; known: bf16, f16, f32, f64, i1, u8, i16, i32, i64",
    ),
    "no type at all": ("%s = math.neg %b : «8»", "expected a type such as tensor<Tx256xbf16>, found '8'"),
    "unclosed string": ('%c = math.cast %b {dtype = «"»bf16}', "a string is not closed"),
    "unclosed attributes": (
        "%v, %i = row.topk %logits {k = 2\n  «return» %i",
        "expected ',' or '}' after an attribute, found 'return'",
    ),
    "no attribute value": ("%v, %i = row.topk %logits {k = «}»", "expected an attribute value, found '}'"),
    "no equals": ("%v, %i = row.topk %logits {k «2»}", "expected '=' after an attribute name, found '2'"),
    "attribute name": ("%v, %i = row.topk %logits {«2» = k}", "expected an attribute name, found '2'"),
    "call argument": (
        "%a = row.group_limit %logits {groups = 2, keep = 1, score = sum_top<«two»>}",
        "expected an integer, found 'two'",
    ),
    "call argument a float": (
        "%a = row.group_limit %logits {groups = 2, keep = 1, score = sum_top<«2.5»>}",
        "expected an integer, found '2.5'",
    ),
    "stray character": ("%s = math.neg %b «;»", "unexpected character ';'"),
    "stray percent": ("%s = math.neg «%»", "unexpected character '%'"),
    "no op": ("%s = «%b»", "expected an op name such as math.sigmoid, found '%b'"),
    "no equals after results": ("%s «math.neg» %b", "expected '=' after the results of an op, found 'math.neg'"),
    "shapes": (
        "%v, %i = row.topk %logits {k = 3}\n  %s = «math.add» %v, %b",
        "math.add: shapes [T, 3] and [8] do not broadcast: 3 against 8",
    ),
    "region where none belongs": ("%s = «math.neg» %b (%x: tensor<8xf32>) {\n  yield\n}", "math.neg: takes no region"),
    "region missing": ("«kernel.row_program» %b {blocks = B}", "kernel.row_program: needs a region"),
    "yield in a function": ("«yield» %b", "yield: this body ends with 'return'"),
    "eps infinite": (
        "%n = row.normalize %logits {«eps» = inf}",
        "row.normalize: attribute 'eps' expects a finite number >= 0.0, found inf",
    ),
    "eps negative": (
        "%n = row.normalize %logits {«eps» = -1e-9}",
        "row.normalize: attribute 'eps' expects a finite number >= 0.0, found -1e-09",
    ),
    "eps beyond floats": (
        f"%n = row.normalize %logits {{«eps» = {10**400}}}",
        "row.normalize: attribute 'eps' expects a finite number >= 0.0, found an integer beyond every float",
    ),
    "dtype unknown": (
        "%c = math.cast %b {«dtype» = f23}",
        (
            "math.cast: attribute 'dtype' expects one of bf16, f16, f32, f64, i1, u8, i16, i32, i64, found 'f23'; "
            "did you mean 'f32'?"
        ),
    ),
    "limits crossed": ("%c = «math.clamp» %b {max = 1.0, min = 2.0}", "math.clamp: min 2.0 is above max 1.0"),
    "condition": ("%c = «math.select» %b, 1.0, 2.0", "math.select: condition must be i1 or u8, found tensor<8xf32>"),
}


@pytest.mark.parametrize("case", BODY_ERRORS)
def test_errors_in_a_body(case):
    marked, message = BODY_ERRORS[case]
    tail = "" if "return" in marked else "\n  %_v, %_i = row.topk %logits {k = 2}\n  return %_i"
    text, line, column = at("", HEAD + "  " + marked + tail + TAIL)
    found = failing(text)
    assert (found.message, found.location.line, found.location.column) == (message, line, column)


STRUCTURE_ERRORS = {
    "empty": ("«»", "expected 'moe.func'; the text holds no function"),
    "only a comment": ("// nothing\n«»", "expected 'moe.func'; the text holds no function"),
    "keyword": (
        "«moe.fun» @f() -> () {\n  return\n}",
        "expected 'moe.func', found 'moe.fun'; did you mean 'moe.func'?",
    ),
    "name": ("moe.func «route»() -> () {\n  return\n}", "expected a function name such as @route, found 'route'"),
    "inputs": ("moe.func @f «{»", "expected '(' before the inputs, found '{'"),
    "input": ("moe.func @f(«x»: tensor<f32>)", "expected an input such as %logits, found 'x'"),
    "input type": ("moe.func @f(%x«)» -> ()", "expected ':' before the type, found ')'"),
    "input separator": (
        "moe.func @f(%x: tensor<f32> «%y»: tensor<f32>)",
        "expected ',' or ')' after an input, found '%y'",
    ),
    "input twice": ("moe.func @f(%x: tensor<f32>, «%x»: tensor<f32>) -> ()", "value %x is defined twice"),
    "arrow": ("moe.func @f() «{»", "expected '->' and the results, found '{'"),
    "result list": ("moe.func @f() -> «tensor<f32>» {", "expected '(' before the results, found 'tensor<f32>'"),
    "result name": ("moe.func @f() -> («%x»: tensor<f32>) {", "expected a result name such as weights, found '%x'"),
    "no return": ("moe.func @f() -> () {\n«}»", "expected 'return' before '}'"),
    "end of text": ("moe.func @f() -> () {\n  «»", "expected an op name such as math.sigmoid, found end of text"),
    "after return": ("moe.func @f() -> () {\n  return\n  «return»\n}", "expected '}' after 'return', found 'return'"),
    "return count": (
        "moe.func @f(%x: tensor<f32>) -> (a: tensor<f32>, b: tensor<f32>) {\n  «return» %x\n}",
        "return: the signature has 2 results, found 1",
    ),
    "return type": (
        "moe.func @f(%x: tensor<f32>) -> (a: «tensor<f64>») {\n  return %x\n}",
        "result 'a' is declared tensor<f64>, but tensor<f32> is returned",
    ),
    "result twice": (
        "moe.func @f(%x: tensor<f32>) -> (a: tensor<f32>, «a»: tensor<f32>) {\n  return %x, %x\n}",
        "result 'a' is declared twice",
    ),
    "function twice": (
        "moe.func @f() -> () {\n  return\n}\n«moe.func» @f() -> () {\n  return\n}",
        "function @f is defined twice",
    ),
    "number as input name": (
        "«moe.func» @f(%0: tensor<f32>) -> (a: tensor<f32>) {\n  return %0\n}",
        "@f: '' cannot be the name of an input; use letters, digits and '_'",
    ),
    "dotted result name": (
        "«moe.func» @f(%x: tensor<f32>) -> (a.b: tensor<f32>) {\n  return %x\n}",
        "@f: 'a.b' cannot be the name of a result; use letters, digits and '_'",
    ),
    "tab before": ("moe.func @f(%x: tensor<f32>) -> (a: tensor<f32>) {\n\t%y = «nope» %x\n}", "unknown op 'nope'"),
    "after blank lines": ("\n\n// a\n\n\nmoe.func @f() -> () {\n\n\n\n  «nope»\n}", "unknown op 'nope'"),
    "windows lines": ("moe.func @f() -> () {\r\n  %y = «nope»\r\n}", "unknown op 'nope'"),
    "other line ends in a comment": ("// a\x0cb\x85c\u2028d\nmoe.func @f() -> () {\n  «nope»\n}", "unknown op 'nope'"),
    "other characters": ("moe.func @f() -> () {\n  «é»\n}", "unexpected character 'é'"),
    "return in a region": (
        (
            "moe.func @f(%x: tensor<Tx3xf32>) -> () {\n"
            "  kernel.row_program %x {blocks = B} (%y: tensor<Tx3xf32>) {\n    «return»\n  }\n  return\n}"
        ),
        "return: this body ends with 'yield'",
    ),
    "outer value in a region": (
        (
            "moe.func @f(%x: tensor<Tx3xf32>) -> () {\n"
            "  kernel.row_program %x {blocks = B} (%y: tensor<Tx3xf32>) {\n    yield «%x»\n  }\n  return\n}"
        ),
        "value %x is not defined",
    ),
}


@pytest.mark.parametrize("case", STRUCTURE_ERRORS)
def test_errors_in_the_structure(case):
    marked, message = STRUCTURE_ERRORS[case]
    text, line, column = at("", marked)
    if case == "windows lines":
        with pytest.raises(DiagnosticError) as caught:
            parse(text)
        assert str(caught.value) == "<text>:2:8: error: unknown op 'nope'\n  %y = nope\n       ^"
        return
    found = failing(text)
    assert (found.message, found.location.line, found.location.column) == (message, line, column)


def test_several_faults_are_reported_together():
    text = HEAD + "  %c = math.select %b, 1.0, 2.0\n  %d = math.clamp %b {max = 0.0, min = 1.0}\n"
    with pytest.raises(DiagnosticError) as caught:
        parse(text + "  %v, %i = row.topk %logits {k = 2}\n  return %i" + TAIL)
    assert [d.location.line for d in caught.value.diagnostics] == [2, 3]
    assert str(caught.value).count("^") == 2


def test_unverified_text_can_be_read():
    text = HEAD + "  %c = math.select %b, 1.0, 2.0\n  %v, %i = row.topk %logits {k = 2}\n  return %i" + TAIL
    assert [op.name for op in parse(text, verify=False).walk()] == ["math.select", "row.topk", "return"]


def test_constants_and_attribute_values():
    text = """
    // every kind of number an operand can be
    moe.func @f(%x: tensor<Tx3xf32>) -> (y: tensor<Tx3xf32>) { // behind the brace
      %a = math.add %x, -0.0
      %b = math.add %a, 5e-324
      %c = math.add %b, inf
      %d = math.add %c, -inf
      %e = math.add %d, nan
      %f = math.add 7, %e
      %g = math.add %f, 1.
      %h = math.add %g, 1E+3
      %n = row.normalize %h {eps = 1, min = 1e-30}
      %p = row.group_limit %x {groups = 3, keep = 1, score = max<>}
      return %n
    }
    """
    ops = list(parse(text).walk())
    constants = [v.value for op in ops for v in op.operands if isinstance(v, Constant)]
    assert list(map(repr, constants)) == ["-0.0", "5e-324", "inf", "-inf", "nan", "7.0", "1.0", "1000.0"]
    assert ops[8].attributes == {"eps": 1, "min": 1e-30}


def test_names_that_begin_like_numbers():
    """`inf.x` and `nan-1` are names: reading them as numbers would leave a rest that starts no token."""
    text = """
    moe.func @f() -> () {
      launch.kernel {symbol = inf.x, template = row_program, reads = 0, config = [nan-1, infinite, "inf"]} () {
        yield
      }
      return
    }
    """
    kernel = next(parse(text).walk())
    assert kernel.attributes["symbol"] == "inf.x"
    assert kernel.attributes["config"] == ("nan-1", "infinite", "inf")


def test_locations_reach_later_diagnostics():
    module = parse(HEAD + "  %v, %i = row.topk %logits {k = 2}\n  return %i" + TAIL, name="a.moe")
    topk = next(module.walk())
    assert str(topk.location) == "a.moe:2:12"
    with pytest.raises(DiagnosticError, match=r"^a\.moe:2:12: error: row\.topk: because\n.*\n +\^\n  note: and so$"):
        topk.fail("because", "and so")

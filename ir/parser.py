"""Text to IR: a recursive-descent parser that points at what it did not expect.

Grammar (``?`` optional, ``*`` any number; lists are separated by commas)::

    module    = function*
    function  = "moe.func" @name "(" (%arg ":" type)* ")" "->" "(" (name ":" type)* ")" "{" op* "}"
    op        = (%result* "=")? name operand* attributes? region? (":" type*)?
    operand   = %value | number | "inf" | "-inf" | "nan"
    attributes= "{" (name "=" attribute)* "}"
    attribute = integer | float | "true" | "false" | name | "string" | name "<" integer* ">" | "[" attribute* "]"
    region    = "(" (%arg ":" type)* ")" "{" op* "}"
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeVar

from moesaic.ir.attributes import Attribute, Call, unescape
from moesaic.ir.core import OPS, Block, Constant, Function, Module, Op, Return, Value, Yield, op_class
from moesaic.ir.diagnostics import Diagnostic, DiagnosticError, Source
from moesaic.ir.errors import InputError, suggestion
from moesaic.ir.lexer import Token, tokenize
from moesaic.ir.types import TensorType

T = TypeVar("T")


def parse(text: str, *, name: str = "<text>", verify: bool = True) -> Module:
    """The module that `text` spells; `name` is what diagnostics call it.

    Raises:
        DiagnosticError: the text is not IR, or (with `verify`) the IR is not legal.
    """
    module = _Parser(Source(text, name)).module()
    if verify:
        from moesaic.ir.verifier import verify_module

        verify_module(module)
    return module


class _Parser:
    def __init__(self, source: Source) -> None:
        self._tokens = tokenize(source)
        self._position = 0

    # Tokens.

    @property
    def _token(self) -> Token:
        return self._tokens[self._position]

    def _next(self) -> Token:
        token = self._token
        if token.kind != "end":
            self._position += 1
        return token

    def _at(self, text: str) -> bool:
        return self._token.text == text and self._token.kind in ("punct", "name")

    def _accept(self, text: str) -> bool:
        if self._at(text):
            self._next()
            return True
        return False

    def _expect(self, text: str, why: str) -> Token:
        if not self._at(text):
            self._fail(f"expected {text!r} {why}, found {_shown(self._token)}")
        return self._next()

    def _expect_kind(self, kind: str, what: str) -> Token:
        if self._token.kind != kind:
            self._fail(f"expected {what}, found {_shown(self._token)}")
        return self._next()

    def _fail(self, message: str, token: Token | None = None) -> NoReturn:
        raise DiagnosticError([Diagnostic(message, (token or self._token).location)])

    def _list(self, close: str, item: Callable[[], T], what: str) -> list[T]:
        """Items separated by commas up to `close`, which is consumed."""
        items: list[T] = []
        if self._accept(close):
            return items
        while True:
            items.append(item())
            if self._accept(","):
                continue
            if self._accept(close):
                return items
            self._fail(f"expected ',' or {close!r} after {what}, found {_shown(self._token)}")

    # Structure.

    def module(self) -> Module:
        functions: list[Function] = []
        while self._token.kind != "end":
            start = self._token
            function = self._function()
            if any(f.name == function.name for f in functions):
                self._fail(f"function @{function.name} is defined twice", start)
            functions.append(function)
        if not functions:
            self._fail("expected 'moe.func'; the text holds no function")
        return Module(functions)

    def _function(self) -> Function:
        start = self._token
        if not self._accept("moe.func"):
            self._fail(f"expected 'moe.func', found {_shown(start)}{suggestion(start.text, ['moe.func'])}")
        name = self._expect_kind("symbol", "a function name such as @route")
        body = Block()
        scope: dict[str, Value] = {}
        self._expect("(", "before the inputs")
        self._list(")", lambda: self._argument(body, scope), "an input")
        self._expect("->", "and the results")
        self._expect("(", "before the results")
        results = self._list(")", self._result, "a result")
        self._body(body, scope, Return)
        function = Function(name.text[1:], body, [r[0].text for r in results])
        function.location = start.location
        returned = body.terminator
        if len(returned.operands) != len(results):
            returned.fail(f"the signature has {len(results)} results, found {len(returned.operands)}")
        for (result_name, declared, token), value in zip(results, returned.operands, strict=True):
            if declared != value.type:
                self._fail(f"result {result_name.text!r} is declared {declared}, but {value.type} is returned", token)
        seen: set[str] = set()
        for result_name, _, _ in results:
            if result_name.text in seen:
                self._fail(f"result {result_name.text!r} is declared twice", result_name)
            seen.add(result_name.text)
        return function

    def _argument(self, block: Block, scope: dict[str, Value]) -> None:
        token = self._expect_kind("value", "an input such as %logits")
        self._expect(":", "before the type")
        self._define(scope, token, block.add_argument(self._type(), token.text[1:]))

    def _result(self) -> tuple[Token, TensorType, Token]:
        name = self._expect_kind("name", "a result name such as weights")
        self._expect(":", "before the type")
        token = self._token
        return name, self._type(), token

    def _type(self) -> TensorType:
        token = self._expect_kind("type", "a type such as tensor<Tx256xbf16>")
        try:
            return TensorType.parse(token.text)
        except InputError as error:
            self._fail(str(error), token)

    def _define(self, scope: dict[str, Value], token: Token, value: Value) -> None:
        if token.text in scope:
            self._fail(f"value {token.text} is defined twice", token)
        # A printed number is no name: values that had none stay without one.
        value.name = "" if token.text[1:].isdigit() else token.text[1:]
        scope[token.text] = value

    def _body(self, block: Block, scope: dict[str, Value], terminator: type[Op]) -> None:
        self._expect("{", "before the body")
        while True:
            if self._at("}"):
                self._fail(f"expected {terminator.name!r} before '}}'")
            op = self._op(scope)
            block.append(op)
            if isinstance(op, Return | Yield):
                if not isinstance(op, terminator):
                    op.fail(f"this body ends with {terminator.name!r}")
                break
        self._expect("}", f"after {terminator.name!r}")

    def _op(self, scope: dict[str, Value]) -> Op:
        results: list[Token] = []
        while self._token.kind == "value":
            results.append(self._next())
            if not self._accept(","):
                self._expect("=", "after the results of an op")
                break
        name = self._expect_kind("name", "an op name such as math.sigmoid")
        try:
            cls = op_class(name.text)
        except InputError:
            known = [o for o in OPS if not o.startswith(("kernel.", "launch."))]
            self._fail(f"unknown op {name.text!r}{suggestion(name.text, known)}", name)
        operands: list[Value] = []
        while operands or self._token.kind in ("value", "number"):
            operands.append(self._operand(scope))
            if not self._accept(","):
                break
        attributes, places = self._attributes() if self._at("{") else ({}, {})
        region = None
        if self._at("("):
            self._next()
            region = Block()
            inner: dict[str, Value] = {}
            block = region
            self._list(")", lambda: self._argument(block, inner), "an argument")
            self._body(region, inner, Yield)
        try:
            op = cls(operands, attributes, region=region, location=name.location)
        except DiagnosticError as error:
            raise _moved_to_attribute(error, places) from None
        if len(results) != len(op.results):
            self._fail(f"{name.text} has {len(op.results)} results, {len(results)} are named", name)
        if self._accept(":"):
            for i, r in enumerate(op.results):
                if i:
                    self._expect(",", f"and the types of all {len(op.results)} results")
                token = self._token
                declared = self._type()
                if declared != r.type:
                    self._fail(f"{name.text}: result {i + 1} has type {r.type}, not {declared}", token)
        for token, r in zip(results, op.results, strict=True):
            self._define(scope, token, r)
        return op

    def _operand(self, scope: dict[str, Value]) -> Value:
        token = self._next()
        if token.kind == "number":
            return Constant(float(token.text))
        if token.kind != "value":
            self._fail(f"expected an operand after ',', found {_shown(token)}", token)
        if token.text not in scope:
            self._fail(f"value {token.text} is not defined{suggestion(token.text, scope)}", token)
        return scope[token.text]

    # Attributes.

    def _attributes(self) -> tuple[dict[str, Attribute], dict[str, Token]]:
        attributes: dict[str, Attribute] = {}
        places: dict[str, Token] = {}

        def item() -> None:
            name = self._expect_kind("name", "an attribute name")
            if name.text in attributes:
                self._fail(f"attribute {name.text!r} is given twice", name)
            self._expect("=", "after an attribute name")
            places[name.text] = name
            attributes[name.text] = self._attribute()

        self._expect("{", "before attributes")
        self._list("}", item, "an attribute")
        return attributes, places

    def _attribute(self) -> Attribute:
        token = self._next()
        if token.kind == "number":
            return int(token.text) if token.text.lstrip("-").isdigit() else float(token.text)
        if token.kind == "string":
            return unescape(token.text[1:-1])
        if token.kind == "name":
            if token.text in ("true", "false"):
                return token.text == "true"
            if self._accept("<"):
                return Call(token.text, tuple(self._list(">", self._integer, "an argument")))
            return token.text
        if token.text == "[":
            return tuple(self._list("]", self._attribute, "an element"))
        self._fail(f"expected an attribute value, found {_shown(token)}", token)

    def _integer(self) -> int:
        token = self._expect_kind("number", "an integer")
        if not token.text.lstrip("-").isdigit():
            self._fail(f"expected an integer, found {_shown(token)}", token)
        return int(token.text)


def _moved_to_attribute(error: DiagnosticError, places: dict[str, Token]) -> DiagnosticError:
    """The same error pointing at the attribute it names, where it names one that was written."""
    moved = []
    for d in error.diagnostics:
        token = next((t for n, t in places.items() if f"attribute {n!r}" in d.message), None)
        moved.append(Diagnostic(d.message, token.location if token else d.location, d.where, d.notes))
    return DiagnosticError(moved)


def _shown(token: Token) -> str:
    return token.text if token.kind == "end" else repr(token.text)

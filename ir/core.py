"""SSA values, ops, blocks, functions and modules, and the declarations an op class is made of.

An op class reads as its specification: operands, attributes and results as class-level declarations, the equation
in the docstring, then ``infer`` (result types), ``verify`` (rules between fields), ``reference`` (what it computes)
and ``gradient``. Registration happens by defining the class.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, Self, TypeVar, cast, overload

from moesaic.ir import attributes as attr
from moesaic.ir.attributes import Attribute, AttributeSpec
from moesaic.ir.diagnostics import Diagnostic, DiagnosticError, Location
from moesaic.ir.errors import InputError, InternalError, suggestion
from moesaic.ir.types import DType, TensorType

if TYPE_CHECKING:
    from moesaic.ir.arrays import Array, ArrayNamespace

# ------------------------------------------------------------------------------------------------------- values


class Value:
    """Something an op can use. Arithmetic operators append the matching ``math.`` op where the value lives."""

    def __init__(self, type: TensorType, name: str = "") -> None:
        self.type = type
        self.name = name

    @property
    def block(self) -> Block | None:
        """The block that computes the value; ``None`` for constants, which belong nowhere."""
        return None

    def __add__(self, other: Value | float) -> Value:
        return create_one("math.add", self, other)

    def __radd__(self, other: float) -> Value:
        return create_one("math.add", other, self)

    def __sub__(self, other: Value | float) -> Value:
        return create_one("math.sub", self, other)

    def __rsub__(self, other: float) -> Value:
        return create_one("math.sub", other, self)

    def __mul__(self, other: Value | float) -> Value:
        return create_one("math.mul", self, other)

    def __rmul__(self, other: float) -> Value:
        return create_one("math.mul", other, self)

    def __truediv__(self, other: Value | float) -> Value:
        return create_one("math.div", self, other)

    def __rtruediv__(self, other: float) -> Value:
        return create_one("math.div", other, self)

    def __neg__(self) -> Value:
        return create_one("math.neg", self)


class Constant(Value):
    """A float32 scalar written in place; two constants of equal bits are the same value."""

    def __init__(self, value: float) -> None:
        super().__init__(TensorType((), DType.F32))
        self.value = float(value) if value == value else float("nan")  # text knows one NaN, without sign or payload

    def _bits(self) -> bytes:
        return struct.pack("<d", self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self._bits() == other._bits()

    def __hash__(self) -> int:
        return hash(self._bits())


class BlockArgument(Value):
    """An input of a function or of a region."""

    def __init__(self, type: TensorType, name: str, owner: Block) -> None:
        super().__init__(type, name)
        self.owner = owner

    @property
    def block(self) -> Block:
        return self.owner


class OpResult(Value):
    """One result of an op."""

    def __init__(self, type: TensorType, op: Op, index: int, name: str = "") -> None:
        super().__init__(type, name)
        self.op = op
        self.index = index

    @property
    def block(self) -> Block | None:
        return self.op.parent


def columns_of(value: Value) -> int:
    """The constant length of a value's rows; 1 of a number.

    Raises:
        InternalError: the length is not constant.
    """
    last = value.type.shape[-1] if value.type.shape else 1
    if not isinstance(last, int):
        raise InternalError(f"rows without a constant length: {value.type}")
    return last


def as_value(value: Value | float) -> Value:
    """A value as it is, a Python number as a constant."""
    if isinstance(value, Value):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Constant(value)
    raise InputError(f"expected an IR value or a number, found {type(value).__name__} {value!r}")


# ------------------------------------------------------------------------------------------------- declarations

T = TypeVar("T")


class OperandDef:
    """Declares an operand; reading it from an op gives the :class:`Value`."""

    def __init__(self, doc: str) -> None:
        self.doc = doc
        self.name = ""
        self.index = -1

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, op: None, owner: type) -> Self: ...
    @overload
    def __get__(self, op: Op, owner: type) -> Value: ...
    def __get__(self, op: Op | None, owner: type) -> Self | Value:
        return self if op is None else op.operands[self.index]


class OptionalOperandDef(OperandDef):
    """Declares an operand that may be left out; only the last operands of an op can be."""

    @overload  # type: ignore[override]  # what may be left out is read as a value or None
    def __get__(self, op: None, owner: type) -> Self: ...
    @overload
    def __get__(self, op: Op, owner: type) -> Value | None: ...
    def __get__(self, op: Op | None, owner: type) -> Self | Value | None:
        if op is None:
            return self
        return op.operands[self.index] if self.index < len(op.operands) else None


class ResultDef:
    """Declares a result; reading it from an op gives the :class:`OpResult`."""

    def __init__(self, doc: str) -> None:
        self.doc = doc
        self.name = ""
        self.index = -1

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, op: None, owner: type) -> Self: ...
    @overload
    def __get__(self, op: Op, owner: type) -> OpResult: ...
    def __get__(self, op: Op | None, owner: type) -> Self | OpResult:
        return self if op is None else op.results[self.index]


class AttributeDef(Generic[T]):
    """Declares an attribute; reading it from an op gives its value, or the default."""

    def __init__(self, make: Callable[[str], AttributeSpec]) -> None:
        self._make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self.spec = self._make(name)

    @overload
    def __get__(self, op: None, owner: type) -> Self: ...
    @overload
    def __get__(self, op: Op, owner: type) -> T: ...
    def __get__(self, op: Op | None, owner: type) -> Self | T:
        if op is None:
            return self
        return cast(T, op.attributes.get(self.spec.name, self.spec.default))


def operand(doc: str) -> OperandDef:
    return OperandDef(doc)


def optional_operand(doc: str) -> OptionalOperandDef:
    return OptionalOperandDef(doc)


def result(doc: str) -> ResultDef:
    return ResultDef(doc)


def integer(doc: str, *, minimum: int | None = None, default: int | None = None) -> AttributeDef[int]:
    return AttributeDef(lambda n: attr.IntSpec(n, doc, default is None, default, minimum=minimum))


def number(
    doc: str, *, minimum: float | None = None, default: float | None = None, infinite: bool = False
) -> AttributeDef[float]:
    return AttributeDef(lambda n: attr.FloatSpec(n, doc, default is None, default, minimum=minimum, infinite=infinite))


def string(doc: str, *, choices: tuple[str, ...] = (), default: str | None = None) -> AttributeDef[str]:
    return AttributeDef(lambda n: attr.StringSpec(n, doc, default is None, default, choices=choices))


def boolean(doc: str, *, default: bool | None = None) -> AttributeDef[bool]:
    return AttributeDef(lambda n: attr.BoolSpec(n, doc, default is None, default))


def integers(doc: str, *, default: tuple[int, ...] | None = None) -> AttributeDef[tuple[int, ...]]:
    return AttributeDef(lambda n: attr.ListSpec(n, doc, default is None, default, of=int))


def strings(doc: str, *, default: tuple[str, ...] | None = None) -> AttributeDef[tuple[str, ...]]:
    return AttributeDef(lambda n: attr.ListSpec(n, doc, default is None, default, of=str))


def call(doc: str, arity: Mapping[str, int], *, default: attr.Call | None = None) -> AttributeDef[attr.Call | str]:
    return AttributeDef(lambda n: attr.CallSpec(n, doc, default is None, default, arity=tuple(arity.items())))


# ---------------------------------------------------------------------------------------------------------- ops

OPS: dict[str, type[Op]] = {}


class Op:
    """Base of all ops. Subclasses with a ``name`` are registered under it."""

    name: ClassVar[str] = ""
    variadic: ClassVar[bool] = False
    """Takes any number of operands (kernels, returns) instead of the declared ones."""
    has_region: ClassVar[bool] = False
    pure: ClassVar[bool] = True
    """Has no effect but its results: may be removed when unused and merged with an equal op."""

    operand_defs: ClassVar[tuple[OperandDef, ...]] = ()
    result_defs: ClassVar[tuple[ResultDef, ...]] = ()
    attribute_defs: ClassVar[dict[str, AttributeSpec]] = {}

    def __init_subclass__(cls) -> None:
        operands: list[OperandDef] = []
        results: list[ResultDef] = []
        attributes: dict[str, AttributeSpec] = {}
        for base in reversed(cls.__mro__):
            for item in vars(base).values():
                if isinstance(item, OperandDef):
                    item.index = len(operands)
                    operands.append(item)
                elif isinstance(item, ResultDef):
                    item.index = len(results)
                    results.append(item)
                elif isinstance(item, AttributeDef):
                    attributes[item.spec.name] = item.spec
        cls.operand_defs, cls.result_defs, cls.attribute_defs = tuple(operands), tuple(results), attributes
        if "name" in vars(cls):
            if cls.name in OPS:
                raise InternalError(f"op {cls.name} is defined twice")
            OPS[cls.name] = cls

    def __init__(
        self,
        operands: Sequence[Value],
        attributes: Mapping[str, Attribute] | None = None,
        *,
        region: Block | None = None,
        location: Location | None = None,
        result_names: Sequence[str] = (),
    ) -> None:
        self.operands: list[Value] = list(operands)
        self.attributes: dict[str, Attribute] = dict(attributes or {})
        self.region = region
        self.location = location
        self.parent: Block | None = None
        self.results: list[OpResult] = []
        if region is not None:
            region.owner = self
        self.check_declaration()
        types = self.infer()
        names = list(result_names)
        if not names and len(types) > 1 and len(types) == len(self.result_defs):
            names = [d.name for d in self.result_defs]  # several results are told apart by what they are
        names += [""] * (len(types) - len(names))
        self.results = [OpResult(t, self, i, n) for i, (t, n) in enumerate(zip(types, names, strict=False))]

    # What a subclass gives.

    def infer(self) -> Sequence[TensorType]:
        """Result types from operands and attributes; fails with :meth:`fail` if there are none."""
        return ()

    def verify(self) -> None:
        """Rules between fields; arity, attribute kinds and result types are checked before."""

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array | tuple[Array, ...]:
        """The result computed on arrays of `xp`; what every backend must agree with."""
        raise InternalError(f"{self.name} has no reference semantics")

    def gradient(self, *cotangents: Value | None) -> Sequence[Value | None]:
        """Cotangent of each operand, given one of each result; ``None`` where nothing flows.

        Called on an op of the backward function's block; new ops are appended there. Cotangents may be left in the
        shape of the result: the pass reduces them to the operand's.
        """
        return [None] * len(self.operands)

    def flops(self, size: Callable[[TensorType], float]) -> float:
        """Floating-point operations, a multiplication and an addition being two; `size` gives a type's elements.

        What moves, compares, ranks or counts is none.
        """
        return 0.0

    # What it gets.

    @property
    def result(self) -> OpResult:
        """The only result."""
        if len(self.results) != 1:
            raise InternalError(f"{self.name} has {len(self.results)} results, not one")
        return self.results[0]

    def fail(self, message: str, *notes: str) -> NoReturn:
        """Raises a diagnostic at this op.

        Raises:
            DiagnosticError: always.
        """
        raise DiagnosticError([self.diagnostic(message, *notes)])

    def diagnostic(self, message: str, *notes: str) -> Diagnostic:
        return Diagnostic(f"{self.name}: {message}", self.location, self.summary(), notes)

    def summary(self) -> str:
        """One line that names the op where no source location exists."""
        shown = ", ".join(f"%{v.name}" if v.name else str(v.type) for v in self.operands)
        text = f"{self.name} {shown}".strip()
        return f"{text} {attr.format_attributes(self.attributes)}" if self.attributes else text

    def check_declaration(self) -> None:
        """Arity and attributes against the class.

        Raises:
            DiagnosticError: a missing or surplus operand, an unknown, missing or ill-typed attribute.
        """
        if not self.variadic:
            required = [d for d in self.operand_defs if not isinstance(d, OptionalOperandDef)]
            if len(self.operands) < len(required):
                missing = required[len(self.operands)]
                self.fail(
                    f"operand {len(self.operands) + 1} ({missing.name!r}: {missing.doc}) is missing; "
                    f"expected {len(required)}, found {len(self.operands)}"
                )
            if len(self.operands) > len(self.operand_defs):
                self.fail(f"expected at most {len(self.operand_defs)} operands, found {len(self.operands)}")
        for name, value in self.attributes.items():
            spec = self.attribute_defs.get(name)
            if spec is None:
                known = ", ".join(self.attribute_defs) or "none"
                self.fail(f"unknown attribute {name!r}{suggestion(name, self.attribute_defs)}; known: {known}")
            problem = spec.check(value)
            if problem is not None:
                self.fail(problem)
        for name, spec in self.attribute_defs.items():
            if spec.required and name not in self.attributes:
                self.fail(f"attribute {name!r} ({spec.doc}) is missing; it expects {spec.expects}")
        if self.has_region != (self.region is not None):
            self.fail("needs a region" if self.has_region else "takes no region")

    def walk(self) -> Iterator[Op]:
        """This op and those of its region, outermost first."""
        yield self
        if self.region is not None:
            yield from self.region.walk()

    def clone(self, mapping: dict[Value, Value]) -> Op:
        """A copy whose operands go through `mapping`; the mapping learns the new results."""
        region = self.region.clone() if self.region is not None else None
        copy = type(self)(
            [mapping.get(v, v) for v in self.operands],
            self.attributes,
            region=region,
            location=self.location,
            result_names=[r.name for r in self.results],
        )
        mapping.update(zip(self.results, copy.results, strict=True))
        return copy


class Block:
    """Arguments and a list of ops that ends in a terminator. Values of other blocks are not visible inside."""

    def __init__(self) -> None:
        self.arguments: list[BlockArgument] = []
        self.ops: list[Op] = []
        self.owner: Op | Function | None = None

    def add_argument(self, type: TensorType, name: str) -> BlockArgument:
        argument = BlockArgument(type, name, self)
        self.arguments.append(argument)
        return argument

    def append(self, op: Op) -> Op:
        op.parent = self
        self.ops.append(op)
        return op

    def insert(self, index: int, op: Op) -> Op:
        op.parent = self
        self.ops.insert(index, op)
        return op

    @property
    def terminator(self) -> Op:
        if not self.ops:
            raise InternalError("a block without a terminator")
        return self.ops[-1]

    def walk(self) -> Iterator[Op]:
        for op in list(self.ops):
            yield from op.walk()

    def replace(self, mapping: Mapping[Value, Value]) -> bool:
        """Replaces uses of values in this block; says whether any was found."""
        changed = False
        for op in self.ops:
            for i, used in enumerate(op.operands):
                if used in mapping:
                    op.operands[i] = mapping[used]
                    changed = True
        return changed

    def users(self, value: Value) -> list[Op]:
        return [op for op in self.ops if value in op.operands]

    def clone(self) -> Block:
        copy = Block()
        mapping: dict[Value, Value] = {}
        for argument in self.arguments:
            mapping[argument] = copy.add_argument(argument.type, argument.name)
        for op in self.ops:
            copy.append(op.clone(mapping))
        return copy


class Return(Op):
    """Ends a function; its operands are the results, in the order of the signature."""

    name = "return"
    variadic = True
    pure = False


class Yield(Op):
    """Ends a region; its operands are what the region hands out."""

    name = "yield"
    variadic = True
    pure = False


class Function:
    """A named block whose results have names too, since users read them as ``r.weights``."""

    def __init__(self, name: str, body: Block | None = None, result_names: Sequence[str] = ()) -> None:
        self.name = name
        self.body = body if body is not None else Block()
        self.body.owner = self
        self.result_names = list(result_names)
        self.location: Location | None = None

    @property
    def arguments(self) -> list[BlockArgument]:
        return self.body.arguments

    @property
    def returned(self) -> list[Value]:
        return self.body.terminator.operands

    @property
    def result_types(self) -> list[TensorType]:
        return [v.type for v in self.returned]

    def argument(self, name: str) -> BlockArgument:
        for candidate in self.arguments:
            if candidate.name == name:
                return candidate
        known = [a.name for a in self.arguments]
        raise InputError(f"function @{self.name} has no input {name!r}{suggestion(name, known)}; it has {known}")

    def clone(self) -> Function:
        copy = Function(self.name, self.body.clone(), self.result_names)
        copy.location = self.location
        return copy


class Module:
    """A list of functions. Equality is structural: same ops in the same order, whatever the names of values."""

    def __init__(self, functions: Sequence[Function] = ()) -> None:
        self.functions: list[Function] = list(functions)

    def __str__(self) -> str:
        from moesaic.ir.printer import print_module

        return print_module(self)

    def function(self, name: str) -> Function:
        for function in self.functions:
            if function.name == name:
                return function
        known = [f.name for f in self.functions]
        raise InputError(f"no function @{name}{suggestion(name, known)}; the module has {known}")

    def has_function(self, name: str) -> bool:
        return any(f.name == name for f in self.functions)

    @property
    def entry(self) -> Function:
        """The function the module is about: its first."""
        if not self.functions:
            raise InputError("the module has no function")
        return self.functions[0]

    def walk(self) -> Iterator[Op]:
        for function in self.functions:
            yield from function.body.walk()

    def clone(self) -> Module:
        return Module([f.clone() for f in self.functions])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Module):
            return NotImplemented
        if len(self.functions) != len(other.functions):
            return False
        return all(
            a.name == b.name
            and a.result_names == b.result_names
            and [x.name for x in a.arguments] == [x.name for x in b.arguments]
            and equal_blocks(a.body, b.body)
            for a, b in zip(self.functions, other.functions, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]  # how Python is told that there is none


def equal_blocks(a: Block, b: Block) -> bool:
    """Whether two blocks compute the same in the same order, up to value names."""
    if [x.type for x in a.arguments] != [x.type for x in b.arguments] or len(a.ops) != len(b.ops):
        return False
    same: dict[Value, Value] = dict(zip(a.arguments, b.arguments, strict=True))
    for left, right in zip(a.ops, b.ops, strict=True):
        if type(left) is not type(right) or len(left.operands) != len(right.operands):
            return False
        if not _equal_attributes(left.attributes, right.attributes):
            return False
        for used, other in zip(left.operands, right.operands, strict=True):
            if (used if isinstance(used, Constant) else same.get(used)) != other:
                return False
        if [r.type for r in left.results] != [r.type for r in right.results]:
            return False
        if left.region is not None and right.region is not None and not equal_blocks(left.region, right.region):
            return False
        same.update(zip(left.results, right.results, strict=True))
    return True


def _equal_attributes(a: Mapping[str, Attribute], b: Mapping[str, Attribute]) -> bool:
    # By text: 1 and true are equal in Python, and a NaN is not equal to itself.
    return attr.format_attributes(a) == attr.format_attributes(b)


# ------------------------------------------------------------------------------------------------------ creation


def op_class(name: str) -> type[Op]:
    """The class of a registered op.

    Raises:
        InputError: no op has the name; the message suggests a near one.
    """
    import moesaic.ir.ops  # noqa: F401  (registers every group)

    try:
        return OPS[name]
    except KeyError:
        raise InputError(f"unknown op {name!r}{suggestion(name, OPS)}") from None


def create(name: str, *operands: Value | float, block: Block | None = None, **attributes: Any) -> Op:
    """Appends an op to `block`, by default to the block of its first operand that has one.

    Raises:
        InputError: the op is unknown, or no operand says where it belongs.
        DiagnosticError: operands or attributes do not fit the op.
    """
    values = [as_value(v) for v in operands]
    op = op_class(name)(values, {k: v for k, v in attributes.items() if v is not None})
    home = block or next((v.block for v in values if v.block is not None), None)
    if home is None:
        raise InputError(f"{name}: no operand belongs to a function yet; start from an input of a Builder")
    return home.append(op)


def create_one(name: str, *operands: Value | float, block: Block | None = None, **attributes: Any) -> Value:
    """:func:`create` for an op with one result; gives the result."""
    return create(name, *operands, block=block, **attributes).result

"""Checks a module: declarations, result types, visibility, and each op's own rules."""

from __future__ import annotations

import re

from moesaic.ir.core import Block, Constant, Function, Module, Op, Return, Value, Yield
from moesaic.ir.diagnostics import Diagnostic, DiagnosticError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""What text can spell and Python can take as a keyword: the names of functions, inputs and results."""


def verify_module(module: Module) -> None:
    """Checks every function.

    Raises:
        DiagnosticError: the IR is not legal; carries one diagnostic an op at fault, in order.
    """
    found: list[Diagnostic] = []
    for function in module.functions:
        found.extend(_function_problems(function))
    if found:
        raise DiagnosticError(found)


def _function_problems(function: Function) -> list[Diagnostic]:
    found = _block_problems(function.body, Return)
    if not found and len(function.result_names) != len(function.returned):
        message = f"@{function.name} names {len(function.result_names)} results and returns {len(function.returned)}"
        found.append(Diagnostic(message, function.location))
    for what, names in (
        ("function", [function.name]),
        ("input", [a.name for a in function.arguments]),
        ("result", function.result_names),
    ):
        for name in names:
            if not _NAME.fullmatch(name) or name in ("inf", "nan"):
                message = f"@{function.name}: {name!r} cannot be the name of a {what}; use letters, digits and '_'"
                found.append(Diagnostic(message.replace("of a input", "of an input"), function.location))
    if len(set(function.result_names)) != len(function.result_names):
        found.append(Diagnostic(f"@{function.name} names a result twice", function.location))
    if len({a.name for a in function.arguments}) != len(function.arguments):
        found.append(Diagnostic(f"@{function.name} names an input twice", function.location))
    return found


def _block_problems(block: Block, terminator: type[Op]) -> list[Diagnostic]:
    found: list[Diagnostic] = []
    visible: set[Value] = set(block.arguments)
    for i, op in enumerate(block.ops):
        last = i == len(block.ops) - 1
        if isinstance(op, Return | Yield) != last or (last and not isinstance(op, terminator)):
            found.append(op.diagnostic(f"a body ends with one {terminator.name!r}, as its last op"))
        hidden = [v for v in op.operands if v not in visible and not isinstance(v, Constant)]
        if hidden:
            shown = ", ".join(f"%{v.name}" if v.name else str(v.type) for v in hidden)
            found.append(op.diagnostic(f"uses {shown}, which is not defined before it in its block"))
        else:
            try:
                _verify_op(op)
            except DiagnosticError as error:
                found.extend(error.diagnostics)
        visible.update(op.results)
    if not block.ops:
        found.append(Diagnostic(f"a body ends with one {terminator.name!r}, this one is empty"))
    return found


def _verify_op(op: Op) -> None:
    op.check_declaration()
    expected = list(op.infer())
    if [r.type for r in op.results] != expected:
        shown = ", ".join(str(t) for t in expected)
        op.fail(f"results have type {', '.join(str(r.type) for r in op.results)}; its operands give {shown}")
    op.verify()
    if op.region is not None:
        problems = _block_problems(op.region, Yield)
        if problems:
            raise DiagnosticError(problems)

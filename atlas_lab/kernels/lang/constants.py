"""What Numba's IR knows before types: constants, and integer arithmetic on them folded."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any

from numba.cuda.core import ir
from numba.cuda.core.compiler_machinery import FunctionPass, register_pass
from numba.cuda.core.ir_utils import build_definitions

_FOLD: dict[Callable[..., Any], Callable[..., int]] = {
    f: f
    for f in (
        operator.add,
        operator.sub,
        operator.mul,
        operator.floordiv,
        operator.mod,
        operator.lshift,
        operator.rshift,
        operator.and_,
        operator.or_,
        operator.xor,
        operator.neg,
        operator.invert,
    )
}


class UnknownError(Exception):
    """A value that is not known at compile time."""


_UNKNOWN = object()


class Constants:
    """Values that a function's IR knows: literals, globals, closure variables, attributes of modules, arithmetic."""

    def __init__(self, func_ir: Any) -> None:
        self.definitions: dict[str, list[Any]] = func_ir._definitions
        self._known: dict[str, Any] = {}

    def value(self, variable: Any) -> Any:
        """The Python value of a variable; raises UnknownError."""
        name = variable.name
        if name not in self._known:
            self._known[name] = _UNKNOWN  # also while it is being found: a loop is no constant
            found = self.definitions.get(name, [])
            if len(found) == 1:
                with suppress(UnknownError):
                    self._known[name] = self.of(found[0])
        if self._known[name] is _UNKNOWN:
            raise UnknownError
        return self._known[name]

    def integer(self, variable: Any) -> int:
        """The same, for integers only."""
        value = self.value(variable)
        if type(value) is not int:
            raise UnknownError
        return value

    def of(self, definition: Any) -> Any:
        if isinstance(definition, ir.Const | ir.Global | ir.FreeVar):
            return definition.value
        if isinstance(definition, ir.Var):
            return self.value(definition)
        if isinstance(definition, ir.Expr):
            if definition.op == "getattr":
                module = self.value(definition.value)
                if isinstance(module, ModuleType) and hasattr(module, definition.attr):
                    return getattr(module, definition.attr)
                raise UnknownError
            if definition.op in ("binop", "unary") and definition.fn in _FOLD:
                names = ("lhs", "rhs") if definition.op == "binop" else ("value",)
                try:
                    return _FOLD[definition.fn](*(self.integer(getattr(definition, n)) for n in names))
                except (ArithmeticError, ValueError):
                    raise UnknownError from None
        raise UnknownError


@register_pass(mutates_CFG=False, analysis_only=False)
class FoldIntegers(FunctionPass):  # type: ignore[misc]
    """Integer arithmetic on constants becomes a constant, and a constant index a static one. Needs SSA."""

    _name = "atlas_fold_integers"

    def __init__(self) -> None:
        FunctionPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        constants = Constants(state.func_ir)
        for block in state.func_ir.blocks.values():
            for statement in block.body:
                if isinstance(statement, ir.Assign) and isinstance(statement.value, ir.Expr):
                    statement.value = _folded(statement.value, constants)
        state.func_ir._definitions = build_definitions(state.func_ir.blocks)
        return True


def _folded(expr: Any, constants: Constants) -> Any:
    try:
        if expr.op in ("binop", "unary"):
            value = constants.of(expr)
            return ir.Const(value, expr.loc) if type(value) is int else expr
        if expr.op == "getitem":
            index = constants.integer(expr.index)
            return ir.Expr.static_getitem(expr.value, index, expr.index, expr.loc)
    except UnknownError:
        pass
    return expr

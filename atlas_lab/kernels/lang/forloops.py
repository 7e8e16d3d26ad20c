"""Passes over Numba's IR, before types are known: loops over `unroll` repeated, loops over `range` made plain.

Numba iterates over a range object that counts down beside its index, which LLVM does not see through. As
`while i < stop: …; i += step` with 64-bit integers, addresses become pointer increments and immediate offsets.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

from numba.cuda import types
from numba.cuda.core import ir
from numba.cuda.core.analysis import compute_cfg_from_blocks, compute_live_map, compute_use_defs
from numba.cuda.core.compiler_machinery import FunctionPass, register_pass
from numba.cuda.core.errors import TypingError
from numba.cuda.core.ir_utils import build_definitions, replace_vars_stmt, simplify_CFG

from atlas_lab.kernels.lang.constants import Constants, UnknownError
from atlas_lab.kernels.lang.loops import Unroll


class _For(NamedTuple):
    """A loop `for … in function(*args)`: its blocks, the call's assignment and the iterator's."""

    loop: Any
    function: Any
    call: Any
    iterator: Any


def _loops(func_ir: Any, constants: Constants) -> Iterator[_For]:
    assigned = {s.target.name: s for block in func_ir.blocks.values() for s in block.body if isinstance(s, ir.Assign)}
    for loop in compute_cfg_from_blocks(func_ir.blocks).loops().values():
        for statement in func_ir.blocks[loop.header].body:
            if _is(statement, "iternext"):
                found = _source(statement.value.value, assigned, constants)
                if found is not None:
                    yield _For(loop, *found)


def _source(variable: Any, assigned: dict[str, Any], constants: Constants) -> tuple[Any, Any, Any] | None:
    """Function, call and iterator behind the variable that a loop advances, if they are temporaries of this loop."""

    def only(v: Any) -> Any:
        return assigned[v.name] if v.name.startswith("$") and len(constants.definitions.get(v.name, ())) == 1 else None

    iterator = only(variable)
    while iterator is not None and isinstance(iterator.value, ir.Var):
        iterator = only(iterator.value)
    if iterator is None or not _is(iterator, "getiter"):
        return None
    call = only(iterator.value.value)
    if call is None or not _is(call, "call") or call.value.kws:
        return None
    try:
        return constants.value(call.value.func), call, iterator
    except UnknownError:
        return None


@register_pass(mutates_CFG=True, analysis_only=False)
class UnrollLoops(FunctionPass):  # type: ignore[misc]
    """Repeats the body of every loop over `unroll(...)`; the variables are renamed by the SSA pass that follows."""

    _name = "atlas_unroll_loops"

    def __init__(self) -> None:
        FunctionPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        func_ir = state.func_ir
        func_ir.blocks = simplify_CFG(func_ir.blocks)  # a long loop's header starts with an empty block
        while True:
            constants = Constants(func_ir)
            found = [f for f in _loops(func_ir, constants) if isinstance(f.function, Unroll)]
            if not found:
                return True
            _unroll(func_ir, min(found, key=lambda f: len(f.loop.body)), constants)
            func_ir.blocks = simplify_CFG(func_ir.blocks)
            func_ir._definitions = build_definitions(func_ir.blocks)


def _unroll(func_ir: Any, found: _For, constants: Constants) -> None:
    try:
        counts = range(*(constants.integer(a) for a in found.call.value.args))
    except UnknownError:
        raise TypingError(
            "unroll: its arguments must be known at compile time (literals, globals, closure integers)",
            loc=found.call.loc,
        ) from None
    gone = {found.call.value.func.name, found.call.target.name, found.iterator.target.name}
    for block in func_ir.blocks.values():
        block.body = [s for s in block.body if not (isinstance(s, ir.Assign) and _drops(s, gone))]
    _repeat(func_ir, found.loop, counts)


def _drops(statement: Any, gone: set[str]) -> bool:
    return statement.target.name in gone or (isinstance(statement.value, ir.Var) and statement.value.name in gone)


def _repeat(func_ir: Any, loop: Any, counts: range) -> None:
    blocks = func_ir.blocks
    header = blocks[loop.header]
    scope, branch = header.scope, header.body[-1]
    first = next(s.target for s in header.body if _is(s, "pair_first"))
    kept = [s for s in header.body[:-1] if not any(_is(s, op) for op in ("iternext", "pair_first", "pair_second"))]
    private = _private(blocks, loop)
    body = {label: blocks.pop(label) for label in loop.body if label != loop.header}
    size = len(body) + 1  # a copy is its body's blocks, then the header of the next
    free = max(*blocks, *body) + 1
    starts = [loop.header] + [free + (i + 1) * size - 1 for i in range(len(counts))]
    for i, value in enumerate(counts):
        labels = {old: free + i * size + j for j, old in enumerate(sorted(body))}
        labels[loop.header] = starts[i + 1]
        names = {name: scope.redefine(name, header.loc) for name in private}
        start = ir.Block(scope, header.loc)
        start.body = [ir.Assign(ir.Const(value, header.loc), first, header.loc), *kept]
        start.append(ir.Jump(branch.truebr, header.loc))
        blocks[starts[i]] = _copy(start, labels, names)
        for label, block in body.items():
            blocks[labels[label]] = _copy(block, labels, names)
    end = ir.Block(scope, header.loc)
    end.append(ir.Jump(branch.falsebr, header.loc))
    blocks[starts[-1]] = end


def _private(blocks: dict[int, Any], loop: Any) -> list[str]:
    """Variables of one iteration only: not used outside of the loop, nor carried into its next iteration."""
    uses, defined = compute_use_defs(blocks)
    live = compute_live_map(compute_cfg_from_blocks(blocks), blocks, uses, defined)
    shared = {v.name for label, b in blocks.items() if label not in loop.body for s in b.body for v in s.list_vars()}
    inside = {name for label in loop.body for name in defined[label]}
    return sorted(inside - shared - live[loop.header])


def _copy(block: Any, labels: dict[int, int], names: dict[str, Any]) -> Any:
    made = ir.Block(block.scope, block.loc)
    for statement in block.body:
        copied = _copy_statement(statement, labels)
        replace_vars_stmt(copied, names)
        made.append(copied)
    return made


def _copy_statement(statement: Any, labels: dict[int, int]) -> Any:
    """Later passes change statements in place, so copies share none, nor expressions."""
    if isinstance(statement, ir.Jump):
        return ir.Jump(labels.get(statement.target, statement.target), statement.loc)
    if isinstance(statement, ir.Branch):
        true, false = (labels.get(t, t) for t in (statement.truebr, statement.falsebr))
        return ir.Branch(statement.cond, true, false, statement.loc)
    if isinstance(statement, ir.Assign):
        value = statement.value
        if isinstance(value, ir.Expr):
            parts = {k: list(v) if isinstance(v, list) else v for k, v in value._kws.items()}
            value = ir.Expr(value.op, value.loc, **parts)
        return ir.Assign(value, statement.target, statement.loc)
    return copy.copy(statement)


def _is(statement: Any, op: str) -> bool:
    value = getattr(statement, "value", None)
    return isinstance(statement, ir.Assign) and isinstance(value, ir.Expr) and value.op == op


@register_pass(mutates_CFG=False, analysis_only=False)
class RangeLoops(FunctionPass):  # type: ignore[misc]
    """Loops over `range` whose step is known become `while` loops over 64-bit integers."""

    _name = "atlas_range_loops"

    def __init__(self) -> None:
        FunctionPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        func_ir = state.func_ir
        constants = Constants(func_ir)
        found = [f for f in _loops(func_ir, constants) if f.function is range and 1 <= len(f.call.value.args) <= 3]
        for f in found:
            args = f.call.value.args
            try:
                step = constants.integer(args[2]) if len(args) == 3 else 1
            except UnknownError:
                continue
            if step:
                _plain(func_ir, f, step)
        func_ir._definitions = build_definitions(func_ir.blocks)
        return bool(found)


def _plain(func_ir: Any, found: _For, step: int) -> None:
    args = found.call.value.args
    stop = args[0] if len(args) == 1 else args[1]
    start = None if len(args) == 1 else args[0]
    for block in func_ir.blocks.values():
        # where the range and its iterator were made: their variables now hold the stop and the index
        replaced = []
        for s in block.body:
            if s is found.call:
                replaced += _as_int64(block.scope, s, stop)
            elif s is found.iterator:
                replaced += (
                    [ir.Assign(ir.Const(0, s.loc), s.target, s.loc)]
                    if start is None
                    else _as_int64(block.scope, s, start)
                )
            else:
                replaced.append(s)
        block.body = replaced
    header = func_ir.blocks[found.loop.header]
    header.body = list(_advance(header, found.call.target, step))


def _as_int64(scope: Any, statement: Any, value: Any) -> list[Any]:
    loc = statement.loc
    cast = scope.redefine("$int64", loc)
    return [
        ir.Assign(ir.Global("int64", types.int64, loc), cast, loc),
        ir.Assign(ir.Expr.call(cast, [value], (), loc), statement.target, loc),
    ]


def _advance(header: Any, stop: Any, step: int) -> Iterator[Any]:
    """The header's statements, with the iterator replaced by a compare and an add."""
    scope = header.scope
    index: Any = None
    for s in header.body[:-1]:
        loc = s.loc
        if _is(s, "iternext"):
            index = s.value.value
        elif _is(s, "pair_first"):
            yield ir.Assign(index, s.target, loc)
        elif _is(s, "pair_second"):
            more = operator.lt if step > 0 else operator.gt
            yield ir.Assign(ir.Expr.binop(more, index, stop, loc), s.target, loc)
        else:
            yield s
    loc = header.loc
    by = scope.redefine("$step", loc)
    yield ir.Assign(ir.Const(step, loc), by, loc)
    yield ir.Assign(ir.Expr.binop(operator.add, index, by, loc), index, loc)
    yield header.body[-1]

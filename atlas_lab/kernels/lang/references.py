"""What a kernel's code names: the intrinsics and device functions reachable from it, read from bytecode."""

from __future__ import annotations

import dis
import functools
import types as pytypes
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from atlas_lab.kernels.lang.op import Op
from atlas_lab.kernels.lang.proxy import CudaProxy

_SKIP = {"NOP", "PUSH_NULL", "PRECALL", "CACHE", "COPY_FREE_VARS", "RESUME"}
_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME"}
_FREE = {"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}
_ATTR = {"LOAD_ATTR", "LOAD_METHOD"}
_FOREIGN = object()  # an attribute of `cuda` that only Numba has


class References(NamedTuple):
    """`ops` by name; `foreign`: something of `numba.cuda` is named that `lang.cuda` does not have."""

    ops: tuple[Op, ...]
    foreign: bool


@functools.cache
def references(function: Callable[..., Any]) -> References:
    """Everything `function` reaches through globals, closures, module attributes and device functions."""
    ops: dict[Op, None] = {}
    foreign = False
    seen: set[int] = set()
    todo: list[Any] = [function]
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Op):
            ops[item] = None
        elif isinstance(item, pytypes.FunctionType):
            todo.extend(named(item))
        elif item is _FOREIGN:
            foreign = True
        elif isinstance(item, pytypes.ModuleType):
            foreign = foreign or item.__name__.startswith(("numba.cuda", "numba_cuda"))
        elif isinstance(getattr(item, "function", None), pytypes.FunctionType):
            todo.append(item.function)
        elif isinstance(getattr(item, "py_func", None), pytypes.FunctionType):
            foreign = True
            todo.append(item.py_func)
        elif isinstance(item, tuple | list):
            todo.extend(item)
    return References(tuple(sorted(ops, key=lambda o: o.name)), foreign)


def named(function: pytypes.FunctionType) -> Iterator[Any]:
    """Values of the globals, closure variables and module attributes that a function names, in order; those of the
    comprehensions and lambdas inside it too."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    codes = [function.__code__]
    for code in codes:
        codes += [c for c in code.co_consts if isinstance(c, pytypes.CodeType)]
        yield from _named(code, function.__globals__, cells)


def _named(code: pytypes.CodeType, globals_: dict[str, Any], cells: dict[str, Any]) -> Iterator[Any]:
    value: Any = None
    known = False
    for operation, name in _instructions(code):
        if known and operation in _ATTR and isinstance(value, CudaProxy):
            known, value = not hasattr(CudaProxy, name), _FOREIGN
        elif known and operation in _ATTR:
            known = isinstance(value, pytypes.ModuleType) and hasattr(value, name)
            value = getattr(value, name) if known else None
        elif operation in _GLOBAL:
            known = name in globals_
            value = globals_.get(name)
        elif operation in _FREE and name in cells:
            known, value = _content(cells[name])
        else:
            known = False
        if known:
            yield value


@functools.cache
def _instructions(code: pytypes.CodeType) -> tuple[tuple[str, Any], ...]:
    """Operations and their arguments; read once for all kernels that a family makes of one function."""
    return tuple((i.opname, i.argval) for i in dis.get_instructions(code) if i.opname not in _SKIP)


def _content(cell: Any) -> tuple[bool, Any]:
    try:
        return True, cell.cell_contents
    except ValueError:  # not assigned yet
        return False, None

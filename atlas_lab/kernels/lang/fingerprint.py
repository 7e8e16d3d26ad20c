"""A digest of everything a kernel's machine code is made from, without compiling it.

It covers the code of the kernel and of all it reaches (device functions, lowering functions of intrinsics), the
values of the globals, closure variables and module attributes they name, this package's own source, and the
versions of the compilers. A value it does not know gives no fingerprint: then the kernel is lowered to be looked up.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import sys
import types as pytypes
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from atlas_lab.kernels.lang.kernel import DeviceFunction, Kernel
from atlas_lab.kernels.lang.loops import Unroll
from atlas_lab.kernels.lang.op import Const, Dtype, Needs, Op, Ptr, PtrTo, Vec
from atlas_lab.kernels.lang.proxy import CudaProxy
from atlas_lab.kernels.lang.references import named
from atlas_lab.kernels.lang.types import Parameter, Scalar

_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, enum.Enum, Needs, Const, Dtype, Ptr, PtrTo, Vec)
_WHEELS = ("numba-cuda", "numba", "llvmlite", "cuda-core", "nvidia-nvvm", "nvidia-nvjitlink")


class _UnknownError(Exception):
    """A value of a kind whose meaning its text does not tell."""


def fingerprint(kernel: Kernel, arch: str) -> str | None:
    """The digest, or None."""
    if kernel.dispatcher is not None:
        return None
    text = hashlib.sha256()
    try:
        for part in (arch, kernel.entry, kernel.params, kernel.launch_bounds, kernel.function):
            for piece in _pieces(part, {}):
                text.update(f"{len(piece)}:{piece};".encode())
    except _UnknownError:
        return None
    text.update(_environment())
    return text.hexdigest()


def _pieces(value: Any, seen: dict[int, int]) -> Iterator[str]:
    """Strings that tell a value apart; a function met again is told by its number."""
    if isinstance(value, Scalar):
        yield f"scalar {value.name}"
    elif isinstance(value, _PLAIN):
        yield f"{type(value).__name__} {value!r}"
    elif isinstance(value, Parameter):
        yield f"parameter {value!r}"
    elif isinstance(value, tuple | list):
        yield f"{type(value).__name__} of {len(value)}"
        for item in value:
            yield from _pieces(item, seen)
    elif isinstance(value, dict):
        yield from _pieces(sorted(value.items(), key=repr), seen)
    elif id(value) in seen:
        yield f"seen {seen[id(value)]}"
    else:
        seen[id(value)] = len(seen)
        yield from _object(value, seen)


def _object(value: Any, seen: dict[int, int]) -> Iterator[str]:
    if isinstance(value, pytypes.FunctionType):
        yield from _code(value.__code__, seen)
        for reached in (value.__defaults__, value.__kwdefaults__, *named(value)):
            yield from _pieces(reached, seen)
    elif isinstance(value, Op):
        yield f"op {value.name}"
        facts = (value.operands, value.result, value.ptx, value.effect, value.tied, value.convergent)
        yield from _pieces(facts, seen)
    elif isinstance(value, DeviceFunction):
        yield "device"
        yield from _pieces(value.function, seen)
    elif isinstance(value, Unroll | CudaProxy):
        yield type(value).__name__
    elif isinstance(value, pytypes.ModuleType):
        yield f"module {value.__name__}"
    elif isinstance(value, type | pytypes.BuiltinFunctionType):
        yield f"builtin {value.__module__}.{value.__qualname__}"
    else:
        raise _UnknownError


def _code(code: pytypes.CodeType, seen: dict[int, int]) -> Iterator[str]:
    yield f"code {code.co_code.hex()} {code.co_exceptiontable.hex()} {code.co_flags}"
    yield repr((code.co_argcount, code.co_varnames, code.co_names, code.co_cellvars, code.co_freevars))
    for constant in code.co_consts:
        if isinstance(constant, pytypes.CodeType):
            yield from _code(constant, seen)
        else:
            yield from _pieces(constant, seen)


@functools.cache
def _environment() -> bytes:
    """This package's source and the compilers' versions."""
    text = hashlib.sha256(sys.version.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        text.update(path.name.encode() + path.read_bytes())
    for wheel in _WHEELS:
        try:
            text.update(f"{wheel} {metadata.version(wheel)};".encode())
        except metadata.PackageNotFoundError:
            text.update(f"{wheel};".encode())
    return text.digest()

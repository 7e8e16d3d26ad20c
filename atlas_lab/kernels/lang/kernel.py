"""Kernels: a plain Python function, its annotated parameters, and the compile-time parameters that made it."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from atlas_lab.kernels.lang.op import Needs, Op
from atlas_lab.kernels.lang.references import references
from atlas_lab.kernels.lang.types import Parameter, Scalar

LaunchBounds = int | tuple[int, ...] | None


class KernelError(TypeError):
    """A kernel that cannot be declared, wrapped or compiled; one sentence."""


@dataclass(frozen=True)
class KernelSpec:
    """Which kernel: a family and its compile-time parameters. `entry` is the symbol in cubins and profilers."""

    family: str
    parameters: tuple[tuple[str, Any], ...] = ()
    module: str = ""

    @property
    def entry(self) -> str:
        named = [f"{k.replace('_', '')}{_plain(v)}" for k, v in self.parameters]
        while len("_".join(named)) > 32:
            named.pop()
        short = "_".join(named)
        digest = hashlib.sha256(repr((self.module, self.family, self.parameters)).encode()).hexdigest()[:8]
        return "__".join(p for p in (self.family, short, digest) if p)

    def __str__(self) -> str:
        inner = ", ".join(f"{k}={v}" for k, v in self.parameters)
        return f"{self.family}({inner})"


def _plain(value: Any) -> str:
    return "".join(c for c in str(value) if c.isascii() and (c.isalnum() or c == "_"))


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel as arms and runtimes see it. Equal and hashed by `spec` and function.

    `launch_bounds` is (threads a block, blocks an SM), as in CUDA. `dispatcher` is set for a wrapped
    `numba.cuda.jit` function.
    """

    spec: KernelSpec
    function: Callable[..., None]
    params: tuple[Parameter, ...]
    launch_bounds: LaunchBounds = None
    dispatcher: Any = field(default=None, repr=False)

    @property
    def entry(self) -> str:
        return self.spec.entry

    @property
    def reads(self) -> tuple[int, ...]:
        """Positions of the arguments that the kernel reads."""
        return tuple(i for i, p in enumerate(self.params) if p.reads)

    @property
    def writes(self) -> tuple[int, ...]:
        """Positions of the arguments that the kernel writes."""
        return tuple(i for i, p in enumerate(self.params) if p.writes)

    @functools.cached_property
    def ops(self) -> tuple[Op, ...]:
        """Every intrinsic the function, its closures and its device functions name."""
        return references(self.function).ops

    @functools.cached_property
    def needs(self) -> Needs:
        """The hardware the kernel needs: the union over its intrinsics."""
        need = Needs()
        for op in self.ops:
            try:
                need = need.union(op.needs)
            except ValueError as e:
                raise KernelError(f"kernel {self.entry}: {op.name} conflicts with its other intrinsics: {e}") from None
        return need

    @property
    def interpretable(self) -> bool:
        """False if anything it names has no NumPy meaning: an intrinsic without one, or `numba.cuda` itself."""
        return not references(self.function).foreign and all(op.numpy is not None for op in self.ops)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kernel) and (self.spec, self.function) == (other.spec, other.function)

    def __hash__(self) -> int:
        return hash(self.spec)

    def __call__(self, *_: Any) -> None:
        raise KernelError(f"kernel {self.entry} is not called: put it in a Launch")


def kernel(function: Callable[..., None] | None = None, *, launch_bounds: LaunchBounds = None) -> Any:
    """Declare a kernel: `@kernel` or `@kernel(launch_bounds=(128, 4))`.

    Every parameter is annotated: `In[u8]`, `Out[bf16]`, `InOut[f32]`, or a scalar type such as `i32`. Nothing
    is compiled here. Raises KernelError for a missing or unknown annotation.
    """
    if function is None:
        return functools.partial(kernel, launch_bounds=launch_bounds)
    spec = KernelSpec(function.__name__, (), function.__module__)
    return Kernel(spec, function, _params(function, sys._getframe(1).f_locals), launch_bounds)


def _params(function: Callable[..., None], around: Mapping[str, Any]) -> tuple[Parameter, ...]:
    """Parameters from annotations; those that are text see the names `around` the function too."""
    closure = inspect.getclosurevars(function)
    params = []
    for name, p in inspect.signature(function).parameters.items():
        a = p.annotation
        if isinstance(a, str):
            try:
                a = eval(a, {**function.__globals__, **around, **closure.nonlocals})
            except Exception as e:
                raise KernelError(
                    f"kernel {function.__name__}: the annotation {a!r} of parameter {name!r} cannot be read: {e}"
                ) from None
        if isinstance(a, Scalar):
            a = Parameter("", a, "scalar")
        if not isinstance(a, Parameter):
            raise KernelError(
                f"kernel {function.__name__}: parameter {name!r} is annotated {a!r}, expected In[...], Out[...], "
                "InOut[...], a map such as InMap[...], or a scalar type"
            )
        params.append(replace(a, name=name))
    return tuple(params)


def family(factory: Callable[..., Kernel]) -> Callable[..., Kernel]:
    """Make a function that returns a kernel a family of kernels: its arguments are the compile-time parameters.

    Calls with equal arguments return the same kernel; the kernel is named after the factory and its arguments, which
    are numbers, strings, None, element types, or tuples of these; a parameter that is None by default is left out of
    the name where it is None, so that a family which learns more keeps its kernels' names. Raises KernelError for
    others.
    """
    signature = inspect.signature(factory)
    unnamed = {(name, None) for name, p in signature.parameters.items() if p.default is None}

    @functools.cache
    def build(parameters: tuple[tuple[str, Any], ...]) -> Kernel:
        made = factory(**dict(parameters))
        if not isinstance(made, Kernel):
            raise KernelError(f"family {factory.__name__}: found {made!r} returned, expected a kernel")
        return replace(made, spec=KernelSpec(factory.__name__, parameters, factory.__module__))

    @functools.wraps(factory)
    def call(*args: Any, **kwargs: Any) -> Kernel:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            if not _nameable(value):
                raise KernelError(
                    f"family {factory.__name__}: found {value!r} as {name}, expected a number, a string, None, an "
                    "element type or a tuple of these"
                )
        return build(tuple(item for item in bound.arguments.items() if item[1] is not None or item not in unnamed))

    return call


def _nameable(value: Any) -> bool:
    """Whether a parameter's text is the same in every process."""
    if isinstance(value, tuple):
        return all(map(_nameable, value))
    return value is None or isinstance(value, bool | int | float | str | Scalar)


class DeviceFunction:
    """A helper that kernels call; inlined when compiled, an ordinary call on the interpreter."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def device(function: Callable[..., Any]) -> DeviceFunction:
    """Declare a device function: `@device`."""
    return DeviceFunction(function)


def wrap(dispatcher: Any, signature: Sequence[Parameter | Scalar], *, name: str | None = None) -> Kernel:
    """A kernel from an existing `numba.cuda.jit` dispatcher.

    `signature` has one entry a parameter: `In[...]`, `Out[...]` or `InOut[...]` for a contiguous one-dimensional
    array, a scalar type otherwise. It runs on the interpreter only if it takes `cuda` from `atlas_lab.kernels.lang`
    and all its intrinsics have NumPy meanings. Raises KernelError if the counts differ.
    """
    function = dispatcher.py_func
    names = list(inspect.signature(function).parameters)
    if len(names) != len(signature):
        raise KernelError(
            f"wrapped kernel {function.__name__}: found {len(signature)} annotations, expected {len(names)}"
        )
    params = tuple(
        replace(a, abi="array", name=n) if isinstance(a, Parameter) else Parameter("", a, "scalar", n)
        for n, a in zip(names, signature, strict=True)
    )
    bounds = dispatcher.targetoptions.get("launch_bounds")
    spec = KernelSpec(name or function.__name__, (("wrapped", True),), function.__module__)
    return Kernel(spec, function, params, bounds, dispatcher)

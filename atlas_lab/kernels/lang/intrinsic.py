"""`intrinsic(...)`: a new entry of the table, from anywhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from atlas_lab.kernels.lang.kernel import KernelError
from atlas_lab.kernels.lang.op import Const, Dtype, Effect, Needs, Op, Operand, Ptr, PtrTo, Result, Vec
from atlas_lab.kernels.lang.types import Scalar


def intrinsic(
    name: str,
    operands: Iterable[Operand],
    result: Result | Callable[..., Result] = None,
    *,
    ptx: str | Callable[..., Any],
    numpy: Callable[..., Any] | None = None,
    effect: Effect | str = Effect.PURE,
    needs: Needs | str = Needs(),
    section: str = "",
    tied: tuple[int, ...] = (),
    convergent: bool = False,
    unit_roundoff: float | None = None,
) -> Op:
    """An intrinsic from its PTX and its NumPy meaning; `Op` says what the arguments are.

    `effect` may be spelled "pure", "reads", "writes" or "synchronises"; `needs` "sm_89" or "sm_90a". Without
    `numpy`, kernels that use it run on a GPU only. Raises KernelError for what cannot be lowered.
    """
    operands = tuple(operands)
    if not name.isidentifier():
        raise KernelError(f"intrinsic {name!r}: found no identifier as its name")
    try:
        effect = Effect(effect)
    except ValueError:
        known = ", ".join(repr(e.value) for e in Effect)
        raise KernelError(f"intrinsic {name}: found effect {effect!r}, expected one of {known}") from None
    if isinstance(needs, str):
        try:
            needs = Needs.parse(needs)
        except ValueError as e:
            raise KernelError(f"intrinsic {name}: {e}") from None
    for spec in (*operands, *([] if callable(result) and not isinstance(result, Scalar) else [result])):
        _check_register(name, spec)
    if isinstance(ptx, str):
        _check_text(name, operands, result, ptx)
    return Op(
        name,
        operands,
        result,
        ptx=ptx,
        numpy=numpy,
        effect=effect,
        needs=needs,
        section=section,
        tied=tied,
        convergent=convergent,
        unit_roundoff=unit_roundoff,
    )


def _check_register(name: str, spec: Any) -> None:
    kind = spec.dtype if isinstance(spec, Vec) else spec
    if isinstance(kind, Scalar):
        if not kind.numba or kind.bits < 16:
            raise KernelError(f"intrinsic {name}: found a register of {kind}, expected 16, 32 or 64 bits or f32")
    elif spec is not None and not isinstance(spec, Ptr | PtrTo | Const | Dtype):
        raise KernelError(f"intrinsic {name}: found {spec!r} among operands and result, expected u32, Vec, Ptr, …")


def _check_text(name: str, operands: tuple[Operand, ...], result: Any, ptx: str) -> None:
    if isinstance(result, PtrTo) or (callable(result) and not isinstance(result, Scalar)):
        raise KernelError(f"intrinsic {name}: a result that depends on the operands needs a function as ptx")
    count = sum(_width(spec) for spec in (result, *operands))
    found = {int(n) for n in re.findall(r"\$(\d+)", ptx)}
    beyond = sorted(n for n in found if n >= count)
    if beyond:
        raise KernelError(f"intrinsic {name}: its PTX names ${beyond[0]}, but it has {count} registers")
    missing = sorted(set(range(count)) - found)
    if missing:
        raise KernelError(f"intrinsic {name}: its PTX never names ${missing[0]} of its {count} registers")


def _width(spec: Any) -> int:
    if spec is None or isinstance(spec, Const | Dtype):
        return 0
    return spec.count if isinstance(spec, Vec) else 1

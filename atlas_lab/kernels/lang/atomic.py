"""Atomic read-modify-write of one 32-bit element in global or shared memory, relaxed; each returns the old value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atlas_lab.kernels.lang.arithmetic import add_rn
from atlas_lab.kernels.lang.bits import M32, single
from atlas_lab.kernels.lang.machine import current
from atlas_lab.kernels.lang.op import Effect, Op, Ptr
from atlas_lab.kernels.lang.types import Pointer, Scalar, f32, i32, u32

_ATOM = "9.7.13 atom"
_TARGET = Ptr(("global", "shared"), ("out", "inout"))


def _atomic(name: str, instruction: str, unit: Scalar, change: Callable[[Any, Any], Any]) -> Op:
    def run(p: Pointer, i: int, v: Any) -> Any:
        value = single(v) if unit is f32 else unit(v)
        return current().update(p, i, unit, lambda old: change(old, value))

    run.__doc__ = f"{instruction} on one {unit}."
    return Op(
        name,
        (_TARGET, unit),
        unit,
        ptx=f"atom.{{space}}.{instruction} $0, [$1], $2;",
        numpy=run,
        effect=Effect.WRITE,
        section=_ATOM,
    )


atomic_add_u32 = _atomic("atomic_add_u32", "add.u32", u32, lambda old, v: old + v & M32)
atomic_add_i32 = _atomic("atomic_add_i32", "add.s32", i32, lambda old, v: i32(old + v))
atomic_add_f32 = _atomic("atomic_add_f32", "add.f32", f32, add_rn.run)
atomic_max_u32 = _atomic("atomic_max_u32", "max.u32", u32, max)
atomic_max_i32 = _atomic("atomic_max_i32", "max.s32", i32, max)
atomic_exch_u32 = _atomic("atomic_exch_u32", "exch.b32", u32, lambda old, v: v)


def _cas(p: Pointer, i: int, expected: int, v: int) -> Any:
    """Replace by `v` if equal to `expected`."""
    want, new = u32(expected), u32(v)
    return current().update(p, i, u32, lambda old: new if old == want else old)


atomic_cas_u32 = Op(
    "atomic_cas_u32",
    (_TARGET, u32, u32),
    u32,
    ptx="atom.{space}.cas.b32 $0, [$1], $2, $3;",
    numpy=_cas,
    effect=Effect.WRITE,
    section=_ATOM,
)

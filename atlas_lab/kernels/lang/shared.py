"""Shared memory: static arrays, the launch's dynamic memory, loads and stores. Indexes are as in `memory`."""

from __future__ import annotations

import sys
from typing import Any

from atlas_lab.kernels.lang.kernel import DeviceFunction
from atlas_lab.kernels.lang.machine import current
from atlas_lab.kernels.lang.memory import SHARED, load, store
from atlas_lab.kernels.lang.op import Const, Dtype, Effect, Op, PtrTo
from atlas_lab.kernels.lang.types import Pointer, Scalar, i32

STATIC_ALIGN = 16
DYNAMIC_ALIGN = 1024  # what a 128-byte swizzle needs

_LD, _ST = (f"9.7.9 Data Movement: {i}" for i in ("ld", "st"))

lds_b8, lds_b16, lds_b32, lds_v2_b32, lds_v4_b32, lds_f32, lds_v4_f32 = (
    load(f"lds_{form}", form, "ld.shared", SHARED, Effect.READ, _LD)
    for form in ("b8", "b16", "b32", "v2_b32", "v4_b32", "f32", "v4_f32")
)
sts_b8, sts_b16, sts_b32, sts_v2_b32, sts_v4_b32, sts_f32, sts_v4_f32 = (
    store(f"sts_{form}", form, "st.shared", SHARED, _ST)
    for form in ("b8", "b16", "b32", "v2_b32", "v4_b32", "f32", "v4_f32")
)


def _shared(dtype: Scalar, count: int) -> Pointer:
    """`count` elements of shared memory, 16-byte aligned, uninitialised: one array for each place in the source.

    In a device function: one for the function, however often it is called. Not to be used inside a loop over
    `unroll`, whose iterations are places of their own once compiled.
    """
    # [0] this function, [1] Op.__call__, [2] the kernel or device function, [3] DeviceFunction.__call__ if the latter
    frame = sys._getframe(2)
    caller = frame.f_back
    owner = None
    if caller is not None and caller.f_code is DeviceFunction.__call__.__code__:
        owner = caller.f_locals["self"]
    return current().shared((owner, frame.f_code, frame.f_lasti), dtype, count, STATIC_ALIGN)


def _dynamic(dtype: Scalar, byte_offset: int) -> Pointer:
    """The launch's dynamic shared memory from `byte_offset`; offset 0 is 1024-byte aligned."""
    return current().dynamic_shared(dtype, int(byte_offset))


def _emit_shared(e: Any, dtype: Scalar, count: int) -> Any:
    return e.static_shared(count * dtype.bytes, STATIC_ALIGN)


def _emit_dynamic(e: Any, byte_offset: Any, dtype: Scalar) -> Any:
    return e.builder.add(e.dynamic_shared(DYNAMIC_ALIGN), byte_offset)


shared = Op(
    "shared",
    (Dtype("dtype"), Const("count")),
    lambda dtype, count: PtrTo(dtype, "shared", "inout"),
    ptx=_emit_shared,
    numpy=_shared,
    section="5.1.7 Shared State Space",
)
dynamic_shared = Op(
    "dynamic_shared",
    (Dtype("dtype"), i32),
    lambda dtype: PtrTo(dtype, "shared", "inout"),
    ptx=_emit_dynamic,
    numpy=_dynamic,
    section="5.1.7 Shared State Space",
)

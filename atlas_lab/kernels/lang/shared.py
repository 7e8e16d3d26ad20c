"""Shared memory: static arrays, the launch's dynamic memory, loads and stores. Indexes are as in `memory`."""

from __future__ import annotations

import sys
from typing import Any

from llvmlite import ir

from atlas_lab.kernels.lang.kernel import DeviceFunction
from atlas_lab.kernels.lang.machine import current
from atlas_lab.kernels.lang.memory import SHARED, load, store
from atlas_lab.kernels.lang.op import Const, Dtype, Effect, Op, PtrTo
from atlas_lab.kernels.lang.types import Pointer, Scalar, i32

_LD, _ST = (f"9.7.9 Data Movement: {i}" for i in ("ld", "st"))

lds_b8, lds_b16, lds_b32, lds_v2_b32, lds_v4_b32, lds_f32, lds_v4_f32 = (
    load(f"lds_{form}", form, "ld.shared", SHARED, Effect.READ, _LD)
    for form in ("b8", "b16", "b32", "v2_b32", "v4_b32", "f32", "v4_f32")
)
sts_b8, sts_b16, sts_b32, sts_v2_b32, sts_v4_b32, sts_f32, sts_v4_f32 = (
    store(f"sts_{form}", form, "st.shared", SHARED, _ST)
    for form in ("b8", "b16", "b32", "v2_b32", "v4_b32", "f32", "v4_f32")
)

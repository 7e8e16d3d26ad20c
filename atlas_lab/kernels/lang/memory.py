"""Loads and stores."""

from __future__ import annotations
from atlas_lab.kernels.lang.machine import current
from atlas_lab.kernels.lang.op import Effect, Needs, Op, Ptr, Vec
from atlas_lab.kernels.lang.types import f32, u32

_IN = Ptr(("global",), ("in",))

def _ldg(unit, count):
    def load(p, i):
        v = current().read(p, i, unit, count)
        return v if count > 1 else v[0]
    return load

ldg_b32 = Op("ldg_b32", (_IN,), u32, ptx="ld.global.nc.b32 $0, [$1];", numpy=_ldg(u32, 1))
ldg_v4_b32 = Op("ldg_v4_b32", (_IN,), Vec(u32, 4), ptx="ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", numpy=_ldg(u32, 4))
ldg_f32 = Op("ldg_f32", (_IN,), f32, ptx="ld.global.nc.f32 $0, [$1];", numpy=_ldg(f32, 1))
stg_f32 = Op("stg_f32", (Ptr(("global",), ("out", "inout")), f32), None, ptx="st.global.f32 [$0], $1;", numpy=lambda p, i, v: current().write(p, i, f32, (v,)), effect=Effect.WRITE)

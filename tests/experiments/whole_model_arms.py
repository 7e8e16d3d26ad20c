"""Arms that only plan: what prefill would read of NVFP4 weights. They stand in for arms that are to come."""

from __future__ import annotations

from atlas_lab import Accuracy, Arm, Launch, Rounded, hookimpl, rows_from
from atlas_lab.arms.copies import can_int8, can_q4_k, int8_32, q4_k, transposed_nvfp4
from atlas_lab.kernels import lang as L


@L.kernel
def nothing(x: L.In[L.bf16], y: L.Out[L.bf16], n: L.i32):
    pass


class Copied(Arm):
    """Reads a derived copy of NVFP4 weights."""

    source = "nvfp4"
    kernels = (nothing,)
    tolerance = Rounded("f32", "bf16")
    accuracy = Accuracy(min_snr_db=15)

    def __init__(self, name, copy, roles, rows, can=None):
        self.name, self.copy, self.roles, self.rows, self.can = name, copy, roles, rows, can

    def eligible(self, p, ctx):
        return self.can(p) if self.can else super().eligible(p, ctx)

    def finalize(self, p, ctx):
        return [self.copy(p)]

    def lower(self, c):
        return [Launch(nothing, grid=1, block=32, args=(c.x, c.y, c.n))]


@hookimpl
def atlas_arms():
    return [
        Copied("fake_w4a16_t", transposed_nvfp4, ("*",), rows_from(17)),
        Copied("fake_q4k_mmq", q4_k, ("ffn.*",), rows_from(17), can_q4_k),
        Copied("fake_w4a8_int8", int8_32, ("ffn.*",), rows_from(17), can_int8),
        Copied("fake_int8_always", int8_32, ("ffn.*",), rows_from(1), can_int8),
    ]

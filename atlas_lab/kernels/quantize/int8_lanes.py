"""Activations BF16 to int8 with a scale for 32 of K of a row, codes in F16 in the order in which lanes own K."""

import functools

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.quantize import int8
from atlas_lab.kernels.quantize.nvfp4_lanes import plain
from atlas_lab.kernels.quantize.q8_1 import THREADS, groups_quantizer


@L.device
def _code(v, by):
    return L.i32_f32(int8.code(v, by))


@functools.cache
def int8_lanes_quantizer(pair_of: L.DeviceFunction):
    """A device function as `groups_quantizer` returns it, with the codes and scales of `int8_quantizer`."""
    return groups_quantizer(pair_of, int8.divisor, _code)


_quantize = int8_lanes_quantizer(plain)


@L.kernel(launch_bounds=(THREADS, 4))
def quantize_int8_lanes(
    x: L.In[L.bf16],
    codes: L.Out[L.f16],
    scales: L.Out[L.f32],
    flags: L.Out[L.u32],
    m: L.i32,
    k: L.i32,
    pitch: L.i32,
    words: L.i32,
):
    """x BF16 `[m, k]`, k a multiple of 32, to the codes and scales of `quantize_int8_groups`: codes F16 `[m, k]`,
    scales F32 `[k/32, pitch]`, pitch a multiple of 16 from m on, both in the order of `quantize_q8_1`, blocks as there.
    The first `words` flags become 0. A dependent launch may start at once.
    """
    L.grid_launch_dependents()
    _quantize((L.grid_wait_for(x), k), codes, scales, flags, m, k, pitch, words)

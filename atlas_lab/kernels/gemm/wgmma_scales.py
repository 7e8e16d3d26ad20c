"""Block scales of W in registers: a lane has the scale of one of 32 stages, and of one of the 32 after those.

They come from device memory while everything streams, which takes longer than a stage or two: so each is loaded 32
stages before it is used, or when a tile begins.
"""

from __future__ import annotations

from atlas_lab.kernels import lang as L


@L.device
def scale_at(scales, i, narrow):
    """Scale i of U8 `scales`, BF16 where `narrow`, else F32."""
    if narrow:
        return L.ldg_bf16(L.cast(scales, L.bf16), i)
    return L.ldg_f32(L.cast(scales, L.f32), i)


@L.device
def _own(scales, row, step, end, aside, narrow):
    """The lane's of 32 steps from `step`, those past the last as it: element `row` is that of step 0."""
    at = min(L.i32(step + L.lane_id()), L.i32(end - 1))
    return scale_at(scales, L.i32(row + at * aside), narrow)


@L.device
def begun(scales, row, begin, end, aside, narrow):
    """Scales of a part's first steps and of those after; `scale` takes them."""
    own = _own(scales, row, begin, end, aside, narrow)
    return own, _own(scales, row, L.i32(begin + 32), end, aside, narrow)


@L.device
def moved(held, scales, row, step, begin, end, aside, narrow):
    """Them, for `step`, which follows the step before."""
    if step > begin and (step - begin) & 31 == 0:
        return held[1], _own(scales, row, L.i32(step + 32), end, aside, narrow)
    return held


@L.device
def scale(held, step, begin):
    """The scale of a step."""
    return L.shfl_idx_f32(held[0], L.i32(step - begin) & 31)

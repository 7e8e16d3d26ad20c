"""Up to three projections of one x in one launch of a GEMM on warpgroups: a weight each, their columns of y abreast.

To the walk each begins at a tile of its own: it counts columns as if all projections but the last filled whole tiles.
A launch says how many it counts (its n), where the second and the third projection begin among them (`one`, `two`;
past all tiles where there is none), then the same of y (`columns`, `first`, `second`): they cost a thread no registers.
The loading thread takes the map of the projection that a tile lies in, the store the part of y.
"""

from __future__ import annotations

import functools

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemv.stream import one_of, segment


@functools.cache
def bring_of(bring: L.DeviceFunction):
    """`bring(s, w, col0, step)` of one weight for maps `(w0, w1, w2, one, two)` and a column that the walk counts."""

    @L.device
    def run(s, maps, col0, step):
        w0, w1, w2, one, two = maps
        if col0 >= two:
            bring(s, w2, L.i32(col0 - two), step)
        elif col0 >= one:
            bring(s, w1, L.i32(col0 - one), step)
        else:
            bring(s, w0, col0, step)

    return run


@L.device
def part_of(col, n, borders):
    """Of a column of those n that the walk counts: which projection it is of, its column there, and how many columns
    that one has; `borders` are `(one, two, columns, first, second)`."""
    one, two, columns, first, second = borders
    which, inside, _ = segment(col, n, one, two)
    return which, inside, one_of(which, first, L.i32(second - first), L.i32(columns - second))

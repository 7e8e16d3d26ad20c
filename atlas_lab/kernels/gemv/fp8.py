"""y = x·Wᵀ for one to three rows of activations, FP8 E4M3 weights under a grid of scales or a scale a row."""

import functools

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemv.rows import activations, dots, range_of_warp, rows_of_warp
from atlas_lab.kernels.lang import cuda

CHUNK = 16  # weights a 16-byte load brings
SPAN = 32 * CHUNK  # weights of a row one warp-wide load covers


@functools.cache
def _products(rows: int, m: int, stream: bool, native: bool):
    """A device function `(w, at, x, k, c)`: the sums of products of the lane's 16 weights of each row, from K = c on,
    with the m rows of x: row r of the weights times row i of x is r·m + i."""
    load = L.ldg_v4_b32_line if stream else L.ldg_v4_b32
    widen = L.e4m3x4_f16x2_cvt if native else L.e4m3x4_f16x2
    fetch, dot = activations(m, CHUNK), dots(m, CHUNK, CHUNK)

    @L.device
    def weights(q):
        w = ()
        for j in L.unroll(4):
            lo, hi = widen(q[j])
            w = w + (L.f16_lo(lo), L.f16_hi(lo), L.f16_lo(hi), L.f16_hi(hi))
        return w

    @L.device
    def products(w, at, x, k, c):
        v, s = fetch(x, k, c), ()
        for r in L.unroll(rows):
            s = s + dot(weights(load(w, at[r] + c)), v, 0)
        return s

    return products


@L.family
def gemv_fp8_block(
    warps: int = 4,
    rows: int = 2,
    unroll: int = 4,
    m: int = 1,
    scale: L.Scalar = L.f32,
    stream: bool = True,
    native: bool = False,
    blocks: int = 1,
):
    """W E4M3 `[n, k]` row-major, scales F32 or BF16, x BF16 `[m, k]`, y BF16 `[m, n]`. `native` converts weights by an
    instruction that needs compute capability 8.9, to the same numbers; `blocks` fit on an SM.

    `down` and `across` are how many scales lie between blocks of 128 rows and of 128 K: ceil(k/128) and 1, or 0 and 0
    for one scale of the whole tensor.

    k is a multiple of 16; `rows` divides 128, so that the rows of a warp share their scales. A lane sums 16 products
    of one block, multiplies by the block's scale and adds; lanes are added pairwise, 16 apart first, then the 2**cuts
    ranges of K in order.
    """
    load_scale = L.ldg_f32 if scale is L.f32 else L.ldg_bf16
    begin, end = rows_of_warp(warps, rows, m)
    bounds, products = range_of_warp(SPAN, CHUNK), _products(rows, m, stream, native)

    @L.device
    def add(acc, w, at, scales, across, x, k, c):
        f = load_scale(scales, L.i32((c >> 7) * across))
        s = products(w, at, x, k, c)
        for i in L.unroll(rows * m):
            acc[i] += s[i] * f

    @L.kernel(launch_bounds=(32 * warps, blocks))
    def kernel(
        w: L.In[L.e4m3],
        scales: L.In[scale],
        x: L.In[L.bf16],
        y: L.Out[L.bf16],
        n: L.i32,
        k: L.i32,
        cuts: L.i32,
        down: L.i32,
        across: L.i32,
    ):
        at = cuda.local.array(rows, L.i64)
        acc = cuda.local.array(rows * m, L.f32)
        first = begin(at, acc, n, k, cuts)
        x = L.grid_wait_for(x)
        start, stop = bounds(k, cuts)
        c, stop = L.i32(start), L.i32(stop)
        # rows past the last are not stored, and their scales are not there
        grid = L.offset(scales, (min(first, n - 1) >> 7) * down)
        while L.i32(c + SPAN * (unroll - 1)) < stop:
            for u in L.unroll(unroll):
                add(acc, w, at, grid, across, x, k, L.i32(c + SPAN * u))
            c = L.i32(c + SPAN * unroll)
        while c < stop:
            add(acc, w, at, grid, across, x, k, c)
            c = L.i32(c + SPAN)
        end(y, acc, first, n, cuts)

    return kernel


@L.family
def gemv_fp8_row(
    warps: int = 4,
    rows: int = 2,
    unroll: int = 4,
    m: int = 1,
    scale: L.Scalar = L.f32,
    stream: bool = True,
    native: bool = False,
    blocks: int = 1,
):
    """W E4M3 `[n, k]` row-major, scales F32 or BF16 `[n]`, x BF16 `[m, k]`, y BF16 `[m, n]`; k a multiple of 16;
    `native` and `blocks` as in `gemv_fp8_block`.

    A lane adds sums of 16 products, multiplies by the row's scale; lanes are added pairwise, 16 apart first, then the
    2**cuts ranges of K in order.
    """
    load_scale = L.ldg_f32 if scale is L.f32 else L.ldg_bf16
    begin, end = rows_of_warp(warps, rows, m)
    bounds, products = range_of_warp(SPAN, CHUNK), _products(rows, m, stream, native)

    @L.device
    def add(acc, w, at, x, k, c):
        s = products(w, at, x, k, c)
        for i in L.unroll(rows * m):
            acc[i] += s[i]

    @L.kernel(launch_bounds=(32 * warps, blocks))
    def kernel(
        w: L.In[L.e4m3],
        scales: L.In[scale],
        x: L.In[L.bf16],
        y: L.Out[L.bf16],
        n: L.i32,
        k: L.i32,
        cuts: L.i32,
    ):
        at = cuda.local.array(rows, L.i64)
        acc = cuda.local.array(rows * m, L.f32)
        first = begin(at, acc, n, k, cuts)
        x = L.grid_wait_for(x)
        start, stop = bounds(k, cuts)
        c, stop = L.i32(start), L.i32(stop)
        while L.i32(c + SPAN * (unroll - 1)) < stop:
            for u in L.unroll(unroll):
                add(acc, w, at, x, k, L.i32(c + SPAN * u))
            c = L.i32(c + SPAN * unroll)
        while c < stop:
            add(acc, w, at, x, k, c)
            c = L.i32(c + SPAN)
        for r in L.unroll(rows):
            f = load_scale(scales, min(first + r, n - 1))
            for i in L.unroll(m):
                acc[r * m + i] = L.mul_rn(acc[r * m + i], f)
        end(y, acc, first, n, cuts)

    return kernel

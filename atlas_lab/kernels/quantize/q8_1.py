"""Activations BF16 to int8 codes, a scale and a sum for 32 of K of a row, in the order in which lanes own K."""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda
from atlas_lab.kernels.quantize.words import clear

GROUP = 32
SPAN = 128  # K of a block
PIECES = SPAN // 8  # threads of a row, of 8 elements each
ROWS = 16  # of a block
THREADS = ROWS * PIECES
BLOCK = 256  # K whose sums lie together: those of eight groups, first their upper parts, then their lower ones
SUMS = 2 * BLOCK // GROUP
TINY = 2.0**-126  # the least normal float


@L.device
def _code(v, by):
    """v·by rounded half away from zero, as a float."""
    scaled = L.mul_rn(v, by)
    size = L.abs_f32(scaled)
    whole = L.rint(size)
    if L.add_rn(size, -whole) == L.f32(0.5):
        whole = L.add_rn(whole, L.f32(1))
    return -whole if scaled < L.f32(0) else whole


@L.device
def place(row):
    """Where among the scales of a group that of a row is: of each 16 rows, those of a lane's columns of a transposed
    product lie side by side."""
    return (row & ~15) | (row >> 1 & 3) << 2 | (row >> 3 & 1) << 1 | row & 1


@L.device
def _quantize(x, codes, scales, flags, m, k, pitch, words):
    """Returns a lane's row, its group's number, scale and sum."""
    L.grid_launch_dependents()
    x = L.grid_wait_for(x)
    first = cuda.blockIdx.x + cuda.gridDim.x * cuda.blockIdx.y
    clear(flags, words, first * THREADS + cuda.threadIdx.x, cuda.gridDim.x * cuda.gridDim.y * THREADS)
    piece = L.i32(cuda.threadIdx.x) % PIECES
    row = L.i32(cuda.blockIdx.x * ROWS + cuda.threadIdx.x // PIECES)
    group = L.i32(cuda.blockIdx.y * (SPAN // GROUP) + piece // 4)
    here = row < m
    at = L.i64(row) * k + GROUP * group
    v = ()
    for t in L.unroll(4):
        pair = L.u32(0)
        if here:
            pair = L.ld_waited_b32(x, at + 2 * (piece & 3) + 8 * t)
        v = v + (L.bf16_lo(pair), L.bf16_hi(pair))
    most = L.f32(0)
    for i in L.unroll(8):
        most = L.max_f32(most, L.abs_f32(v[i]))
    for step in L.unroll(1, 3):
        most = L.max_f32(most, L.shfl_xor_f32(most, step))
    d = L.div_rn(most, L.f32(127))
    by = L.f32(0)
    if d >= L.f32(TINY):
        by = L.div_rn(L.f32(1), d)
    total = L.f32(0)
    out = ()
    for j in L.unroll(4):
        low, high = _code(v[2 * j], by), _code(v[2 * j + 1], by)
        total = L.add_rn(total, L.add_rn(low, high))
        out = out + (L.f16x2(low, high),)
    if here:
        L.stg_v4_b32(codes, at + 8 * (piece & 3), out)
    if piece & 3 == 0:
        L.stg_f32(scales, L.i64(group) * pitch + place(row), d)
    return row, group, d, total


@L.family
def quantize_q8_1(with_sums: bool = True):
    """x BF16 `[m, k]`, k a multiple of 256, to codes F16 `[m, k]`, which hold them exactly, scales F32 `[k/32, pitch]`,
    each 16 of a row in the order of `place`, zero from row m to the next multiple of 16, and sums BF16 `[m, k/16]`:
    for 256 of K eight upper parts, then eight lower ones; without them k is a multiple of 128. Block (i, j) makes 16
    rows from 16·i by 128 of K from 128·j. Numbers are those of `formats.q8_1`. The first `words` flags become 0, for
    the product whose blocks meet by them.

    Of each 32 codes, a lane's run of 8 columns is spread as `order_for_lanes` of 8 does. A dependent launch may start
    at once.
    """
    if not with_sums:

        @L.kernel(launch_bounds=(THREADS, 4))
        def kernel_of_codes(
            x: L.In[L.bf16],
            codes: L.Out[L.f16],
            scales: L.Out[L.f32],
            flags: L.Out[L.u32],
            m: L.i32,
            k: L.i32,
            pitch: L.i32,
            words: L.i32,
        ):
            _quantize(x, codes, scales, flags, m, k, pitch, words)

        return kernel_of_codes

    @L.kernel(launch_bounds=(THREADS, 4))
    def kernel(
        x: L.In[L.bf16],
        codes: L.Out[L.f16],
        scales: L.Out[L.f32],
        sums: L.Out[L.bf16],
        flags: L.Out[L.u32],
        m: L.i32,
        k: L.i32,
        pitch: L.i32,
        words: L.i32,
    ):
        row, group, d, total = _quantize(x, codes, scales, flags, m, k, pitch, words)
        for step in L.unroll(1, 3):
            total = L.add_rn(total, L.shfl_xor_f32(total, step))
        if L.i32(cuda.threadIdx.x) & 3 == 0 and row < m:
            scaled = L.mul_rn(total, d)
            upper = L.bf16x2(scaled, L.f32(0))
            lower = L.bf16x2(L.add_rn(scaled, -L.bf16_lo(upper)), L.f32(0))
            of = L.i64(row) * (k // 16) + group // 8 * SUMS + group % 8
            L.stg_b16(sums, of, upper)
            L.stg_b16(sums, of + 8, lower)

    return kernel

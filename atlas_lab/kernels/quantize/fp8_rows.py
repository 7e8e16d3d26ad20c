"""Activations BF16 to E4M3 with a scale a row, as they lie or in the order in which the lanes that hold NVFP4 own K."""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda
from atlas_lab.kernels.quantize.words import clear

THREADS = 256
EACH = 8  # elements of a thread at a time


@L.device
def _greatest(words):
    most = L.f32(0)
    for j in L.unroll(4):
        most = L.max_f32(most, L.max_f32(L.abs_f32(L.bf16_lo(words[j])), L.abs_f32(L.bf16_hi(words[j]))))
    return most


@L.device
def _word(low, high, by):
    """Two pairs of bf16, divided, as four codes."""
    first = L.e4m3x2(L.div_rn(L.bf16_lo(low), by), L.div_rn(L.bf16_hi(low), by))
    second = L.e4m3x2(L.div_rn(L.bf16_lo(high), by), L.div_rn(L.bf16_hi(high), by))
    return L.u32(first | second << 16)


@L.family
def quantize_fp8_rows(ordered: bool):
    """x BF16 `[m, k]` to codes E4M3 `[m, k]` and scales F32 `[m]`: a block a row; k a multiple of 8. The first `words`
    flags become 0, for the product whose blocks meet by them.

    A scale is max|x| / 448, 1 where that is 0; a code x / scale to nearest even, clamped to ±448. True divisions. A
    dependent launch may start at once. `ordered`: codes are in the lanes' order, k a multiple of 64. Of each 64, lane t
    owns the 16 number t. Product p of 32 takes 8·p to 8·p + 7 of every 16: the first four of them become word t of the
    product's first 16, the others of its second.
    """

    @L.kernel(launch_bounds=(THREADS, 4))
    def kernel(
        x: L.In[L.bf16], codes: L.Out[L.e4m3], scales: L.Out[L.f32], flags: L.Out[L.u32], k: L.i32, words: L.i32
    ):
        L.grid_launch_dependents()
        x = L.grid_wait_for(x)
        thread = L.i32(cuda.threadIdx.x)
        clear(flags, words, cuda.blockIdx.x * THREADS + cuda.threadIdx.x, cuda.gridDim.x * THREADS)
        row = L.i64(cuda.blockIdx.x) * k
        most = L.f32(0)
        for column in range(EACH * thread, k, EACH * THREADS):
            most = L.max_f32(most, _greatest(L.ld_waited_v4_b32(x, row + column)))
        of_warps = L.shared(L.f32, THREADS // 32)
        for step in L.unroll(5):
            most = L.max_f32(most, L.shfl_xor_f32(most, 16 >> step))
        if L.lane_id() == 0:
            L.sts_f32(of_warps, L.warp_id(), most)
        cuda.syncthreads()
        for i in L.unroll(THREADS // 32):
            most = L.max_f32(most, L.lds_f32(of_warps, i))
        d = L.div_rn(most, L.f32(448))
        by = d if d > L.f32(0) else L.f32(1)
        if thread == 0:
            L.stg_f32(scales, cuda.blockIdx.x, by)
        for column in range(EACH * thread, k, EACH * THREADS):
            v = L.ld_waited_v4_b32(x, row + column)
            low, high = _word(v[0], v[1], by), _word(v[2], v[3], by)
            if ordered:
                inside = L.i32(column & 63)
                to = row + (column - inside + 32 * ((inside >> 3) & 1) + 4 * (inside >> 4))
                L.stg_b32(codes, to, low)
                L.stg_b32(codes, to + 16, high)
            else:
                L.stg_v2_b32(codes, row + column, (low, high))

    return kernel

"""Kernels that do nothing wrong, for the interpreter's tests."""

from __future__ import annotations

from numba import cuda as numba_cuda
from numba.cuda import types as numba_types

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda
from atlas_lab.kernels.lang.machine import current
from atlas_lab.kernels.lang.memory import WRITABLE

ld_relaxed = L.intrinsic(
    "ld_relaxed", (WRITABLE,), L.u32, ptx="ld.relaxed.gpu.global.b32 $0, [$1];", effect="synchronises",
    numpy=lambda p, i: current().read(p, i, L.u32, 1, "relaxed")[0],
)  # fmt: skip
st_relaxed = L.intrinsic(
    "st_relaxed", (WRITABLE, L.u32), ptx="st.relaxed.gpu.global.b32 [$0], $1;", effect="synchronises",
    numpy=lambda p, i, v: current().write(p, i, L.u32, (v,), "relaxed"),
)  # fmt: skip

MULTIPLY_256, WAIT_256 = L.wgmma(L.bf16, 256), L.wgmma_wait(128)


@L.kernel
def gemv(w: L.In[L.bf16], x: L.In[L.bf16], y: L.Out[L.f32], n: L.i32, k: L.i32):
    """One warp a row, 16-byte loads."""
    row = cuda.blockIdx.x * 4 + L.warp_id()
    if row >= n:
        return
    acc = L.f32(0)
    for c in range(L.lane_id() * 8, k, 256):
        q = L.ldg_v4_b32(w, row * k + c)
        v = L.ldg_v4_b32(x, c)
        for i in range(4):
            acc = L.fma_rn(L.bf16_lo(q[i]), L.bf16_lo(v[i]), acc)
            acc = L.fma_rn(L.bf16_hi(q[i]), L.bf16_hi(v[i]), acc)
    acc = L.warp_sum(acc)
    if L.lane_id() == 0:
        L.stg_f32(y, row, acc)


PITCH = 72


@L.device
def stage(sa, sb, a, b, rows, columns, at, t):
    """Copy a [rows, 16·j] piece of both operands, 128 threads."""
    per_row = columns // 8
    for chunk in range(t, rows * per_row, 128):
        r = chunk // per_row
        c = chunk % per_row * 8
        L.cp_async_16(sa, r * PITCH + at + c, a, r * 64 + at + c, 16)
        L.cp_async_16(sb, r * PITCH + at + c, b, r * 64 + at + c, 16)
    L.cp_async_commit()


@L.kernel
def mma_64x64x64(a: L.In[L.bf16], b: L.In[L.bf16], c: L.Out[L.f32]):
    """C = A Bᵀ, four warps of 32x32 each, K in two groups of copies."""
    sa = L.shared(L.bf16, 64 * 72)
    sb = L.shared(L.bf16, 64 * 72)
    t = cuda.threadIdx.x
    lane = L.lane_id()
    stage(sa, sb, a, b, 64, 32, 0, t)
    stage(sa, sb, a, b, 64, 32, 32, t)
    m0 = (L.warp_id() >> 1) * 32
    n0 = (L.warp_id() & 1) * 32
    acc = L.zeros(32)
    for k in range(0, 64, 16):
        if k == 0:
            L.cp_async_wait(1)
            cuda.syncthreads()
        if k == 32:
            L.cp_async_wait(0)
            cuda.syncthreads()
        fa = L.ldmatrix_tile(2, 16 * PITCH * 2)(sa, (m0 + lane % 16) * PITCH + k + 8 * (lane // 16))
        fb = L.ldmatrix_tile(2, 16 * PITCH * 2)(
            sb, (n0 + lane % 8 + 8 * (lane // 16)) * PITCH + k + 8 * (lane // 8 % 2)
        )
        acc = L.mma_tile(L.bf16, 2, 4)(acc, fa, fb)
    for i in range(2):
        for j in range(4):
            at = (m0 + 16 * i + (lane >> 2)) * 64 + n0 + 8 * j + 2 * (lane & 3)
            e = 4 * (4 * i + j)
            L.stg_f32(c, at, acc[e])
            L.stg_f32(c, at + 1, acc[e + 1])
            L.stg_f32(c, at + 512, acc[e + 2])
            L.stg_f32(c, at + 513, acc[e + 3])


@L.kernel(launch_bounds=(128, 1))
def products_64x256x64(x: L.In[L.u8], y: L.Out[L.u32], groups: L.i32):
    """`groups` times four products of a warpgroup on the same 40 KB of operands; one word a thread."""
    s = L.dynamic_shared(L.u8, 0)
    t = cuda.threadIdx.x
    for i in range(t * 16, 40960, 2048):
        L.sts_v4_b32(s, i, L.ldg_v4_b32(x, i))
    L.fence_proxy_async()
    cuda.syncthreads()
    a = L.matrix_descriptor(s, 0, 128, 16, 1024)
    b = L.matrix_descriptor(s, 8192, 128, 16, 1024)
    acc = L.zeros(128)
    for _ in range(groups):
        L.wgmma_fence()
        for k in range(4):
            acc = MULTIPLY_256(acc, L.descriptor_advance(a, 32 * k), L.descriptor_advance(b, 32 * k), 1)
        L.wgmma_commit()
        acc = WAIT_256(acc, 0)
    L.stg_b32(y, t, L.f32_bits(acc[0]))


@L.kernel
def block_sum(x: L.In[L.f32], y: L.Out[L.f32], n: L.i32):
    """A tree in dynamic shared memory, one block a row."""
    s = L.dynamic_shared(L.f32, 0)
    t = cuda.threadIdx.x
    acc = L.f32(0)
    for i in range(t, n, cuda.blockDim.x):
        acc = L.add_rn(acc, L.ldg_f32(x, cuda.blockIdx.x * n + i))
    L.sts_f32(s, t, acc)
    cuda.syncthreads()
    half = cuda.blockDim.x // 2
    while half > 0:
        if t < half:
            L.sts_f32(s, t, L.add_rn(L.lds_f32(s, t), L.lds_f32(s, t + half)))
        cuda.syncthreads()
        half = half // 2
    if t == 0:
        L.stg_f32(y, cuda.blockIdx.x, L.lds_f32(s, 0))


@L.kernel
def shuffles(y: L.Out[L.u32]):
    """Seven words a lane: every kind of exchange."""
    lane = L.lane_id()
    v = L.u32(lane * lane)
    L.stg_b32(y, lane, L.shfl_xor(v, 5))
    L.stg_b32(y, 32 + lane, L.shfl_down(v, 3))
    L.stg_b32(y, 64 + lane, L.shfl_idx(v, 7))
    L.stg_b32(y, 96 + lane, L.ballot(lane % 3 == 0))
    L.stg_b32(y, 128 + lane, L.u32(L.warp_sum_i32(lane)))
    s = L.shared(L.u32, 32)
    L.sts_b32(s, lane, v)
    cuda.syncwarp()
    L.stg_b32(y, 160 + lane, L.lds_b32(s, 31 - lane))
    L.stg_b32(y, 192 + lane, L.u32(L.any_sync(lane == 9) + 2 * L.all_sync(lane == 9)))


@L.kernel
def producer_consumer(x: L.In[L.u32], y: L.Out[L.u32], rounds: L.i32):
    """Warp 0 fills two slots, warp 1 empties them; barriers 1, 2 say full, 3, 4 say empty."""
    s = L.shared(L.u32, 64)
    lane = L.lane_id()
    if L.warp_id() == 0:
        for i in range(rounds):
            slot = i % 2
            if i >= 2:
                L.barrier_sync(3 + slot, 64)
            L.sts_b32(s, slot * 32 + lane, L.ldg_b32(x, i * 32 + lane))
            L.barrier_arrive(1 + slot, 64)
    else:
        for i in range(rounds):
            slot = i % 2
            L.barrier_sync(1 + slot, 64)
            L.stg_b32(y, i * 32 + lane, L.lds_b32(s, slot * 32 + 31 - lane))
            if i + 2 < rounds:
                L.barrier_arrive(3 + slot, 64)


@L.kernel
def double_buffer(x: L.In[L.u32], y: L.Out[L.u32], tiles: L.i32, last: L.i32):
    """64 threads sum tiles of 256 words; the next tile is in flight; of the last only `last` words exist."""
    s = L.shared(L.u32, 512)
    t = cuda.threadIdx.x
    acc = L.u32(0)
    for i in range(-1, tiles):
        n = i + 1
        if n < tiles:
            valid = 16
            if n == tiles - 1:
                valid = max(0, min(16, (last - t * 4) * 4))
            L.cp_async_16(s, (n % 2) * 256 + t * 4, x, n * 256 + t * 4, valid)
        L.cp_async_commit()
        if i >= 0:
            L.cp_async_wait(1)
            cuda.syncthreads()
            for j in range(4):
                acc = L.u32(acc + L.lds_b32(s, (i % 2) * 256 + (t * 4 + j * 64 + 17) % 256))
            cuda.syncthreads()
    L.stg_b32(y, t, acc)


@L.kernel
def flag_chain(y: L.Out[L.u32], flag: L.InOut[L.u32]):
    """Block b waits for block b + 1, then adds to what that left; the last block of all starts."""
    t = cuda.threadIdx.x
    b = cuda.blockIdx.x
    if b + 1 < cuda.gridDim.x:
        if t == 0:
            while L.ld_acquire_b32(flag, b + 1) == 0:
                L.nanosleep(20)
        cuda.syncthreads()
        L.stg_b32(y, t, L.u32(L.ld_b32(y, t) + b))
    else:
        L.stg_b32(y, t, L.u32(b))
    cuda.syncthreads()
    if t == 0:
        L.st_release_b32(flag, b, 1)


@L.kernel
def last_block(x: L.In[L.u32], part: L.InOut[L.u32], ticket: L.InOut[L.u32], y: L.Out[L.u32]):
    """Every block leaves a part; the one that draws the last ticket sums them. Relaxed atomics between fences."""
    last = L.shared(L.u32, 1)
    t = cuda.threadIdx.x
    L.stg_b32(part, cuda.blockIdx.x * 32 + t, L.u32(L.ldg_b32(x, cuda.blockIdx.x * 32 + t) * 3))
    cuda.syncthreads()
    if t == 0:
        L.fence_gpu()
        drawn = L.atomic_add_u32(ticket, 0, 1)
        L.fence_gpu()
        L.sts_b32(last, 0, L.u32(drawn == cuda.gridDim.x - 1))
    cuda.syncthreads()
    if L.lds_b32(last, 0) == 1:
        acc = L.u32(0)
        for b in range(cuda.gridDim.x):
            acc = L.u32(acc + L.ld_b32(part, b * 32 + t))
        L.stg_b32(y, t, acc)


@L.kernel
def atomics(count: L.InOut[L.u32], top: L.InOut[L.i32], order: L.InOut[L.u32]):
    """Every thread takes a number, raises a maximum, and leaves a mark under its number."""
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    n = L.atomic_add_u32(count, 0, 1)
    L.atomic_max_i32(top, 0, i * 7 % 64)
    L.stg_b32(order, n, L.u32(i))


@L.kernel
def coordinates(y: L.Out[L.u32]):
    """A 2x2x2 grid of 4x3x2 blocks writes where each thread is."""
    t, b, d, g = cuda.threadIdx, cuda.blockIdx, cuda.blockDim, cuda.gridDim
    block = b.x + g.x * (b.y + g.y * b.z)
    tid = t.x + d.x * (t.y + d.y * t.z)
    L.stg_b32(y, block * 24 + tid, L.u32(t.x + 10 * t.y + 100 * t.z + 1000 * b.x + 10000 * b.y + 100000 * b.z))


@L.kernel
def dtypes(a: L.In[L.f32], y: L.Out[L.f32], z: L.Out[L.i8], scale: L.f32, n: L.i32):
    """Scalars, float32 vectors, bytes."""
    t = cuda.threadIdx.x
    s = L.shared(L.f32, 128)
    L.sts_v4_f32(s, 4 * t, (L.ldg_f32(a, t) * scale, L.f32(1), L.f32(-0.0), L.f32(3)))
    v = L.lds_v4_f32(s, 4 * t)
    if t < n:
        L.stg_f32(y, t, v[0] + v[1] + v[2])
        L.stg_b8(z, t, -t)


def _saxpy(y, x, a, n):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < n and i < x.size and i < x.shape[0]:
        y[i] = a * x[i] + y[i]


saxpy = L.wrap(numba_cuda.jit(_saxpy), [L.InOut[L.f32], L.In[L.f32], L.f32, L.i32])


def _foreign(y):
    y[numba_cuda.threadIdx.x] = numba_types.float32(1)


foreign = L.wrap(numba_cuda.jit(_foreign), [L.Out[L.f32]])

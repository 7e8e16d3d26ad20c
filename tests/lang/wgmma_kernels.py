"""Kernels of one warpgroup that multiply with `wgmma`, for the tests of its numbers."""

from __future__ import annotations

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda

STEPS = 4


@L.device
def place(r, k, rows, width):
    """Where byte k of a row lies: K in columns of atoms of `width` bytes a row, chunks exchanged as a swizzle of
    `width` bytes does it."""
    linear = (k // width) * (rows * width) + r * width + k % width
    return linear ^ (((linear >> 7) & (width // 16 - 1)) << 4)


@L.device
def stage(s, at, x, rows, k_bytes, width):
    """Copy a row-major matrix to byte `at`, 16 bytes a thread."""
    chunks = k_bytes // 16
    for i in range(cuda.threadIdx.x, rows * chunks, 128):
        L.sts_v4_b32(s, at + place(i // chunks, i % chunks * 16, rows, width), L.ldg_v4_b32(x, i * 16))


def storing(n: int, integer: bool = False):
    """A function that stores accumulators, as words, to row-major [64, n]."""
    word = L.u32 if integer else L.f32_bits

    @L.device
    def store(y, acc):
        t = cuda.threadIdx.x
        row = 16 * (t >> 5) + ((t & 31) >> 2)
        at = row * n + 2 * (t & 3)
        for j in L.unroll(n // 2):
            L.stg_b32(y, at + 8 * n * ((j >> 1) & 1) + 8 * (j >> 2) + (j & 1), word(acc[j]))

    return store


@L.family
def gemm(dtype: L.Scalar, n: int, swizzle: int = 128, a_registers: bool = False, read_as: int = 0):
    """C [64, n] = A·Bᵀ over four steps of K. x: A [64, K], then B [n, K], as bytes; y: C in words.

    `read_as` is the swizzle of the descriptors, if it is to be another one than the data's.
    """
    k_bytes = 32 * STEPS
    per_row = swizzle // 32  # steps in a row of an atom
    integer = dtype is L.i8
    count = n // 2
    multiply = L.wgmma(dtype, n, a_registers=a_registers)
    wait = L.wgmma_wait(count, L.i32 if integer else L.f32)
    empty, store = L.zeros_i32 if integer else L.zeros, storing(n, integer)
    b_at = 64 * k_bytes
    mode = read_as or swizzle

    @L.kernel(launch_bounds=(128, 1))
    def kernel(x: L.In[L.u8], y: L.Out[L.u32]):
        s = L.dynamic_shared(L.u8, 0)
        t = cuda.threadIdx.x
        stage(s, 0, x, 64, k_bytes, swizzle)
        stage(s, b_at, L.offset(x, b_at), n, k_bytes, swizzle)
        L.fence_proxy_async()
        cuda.syncthreads()
        a = L.matrix_descriptor(s, 0, mode, 16, 8 * swizzle)
        b = L.matrix_descriptor(s, b_at, mode, 16, 8 * swizzle)
        fragments = ()
        if a_registers:
            for k in L.unroll(STEPS):
                row = 16 * (t >> 5) + (t & 15)
                fragments = fragments + L.ldmatrix_x4(s, place(row, 32 * k + 16 * ((t >> 4) & 1), 64, swizzle))
        acc = empty(count)
        L.wgmma_fence()
        for k in L.unroll(STEPS):
            b_k = L.descriptor_advance(b, (k // per_row) * n * swizzle + (k % per_row) * 32)
            if a_registers:
                f = (fragments[4 * k], fragments[4 * k + 1], fragments[4 * k + 2], fragments[4 * k + 3])
                acc = multiply(acc, f, b_k, L.i32(k > 0))
            else:
                a_k = L.descriptor_advance(a, (k // per_row) * 64 * swizzle + (k % per_row) * 32)
                acc = multiply(acc, a_k, b_k, L.i32(k > 0))
        L.wgmma_commit()
        acc = wait(acc, 0)
        store(y, acc)

    return kernel


@L.family
def one_product(n: int, a: tuple[int, int, int, bool], b: tuple[int, int, int, bool], b_at: int):
    """One product of bf16 on operands that lie in x as they shall in shared memory, A at byte 0 and B at `b_at`; each
    is (swizzle, leading, stride, transposed)."""
    multiply = L.wgmma(L.bf16, n, a_transposed=a[3], b_transposed=b[3])
    wait, count, store = L.wgmma_wait(n // 2), n // 2, storing(n)
    a_swizzle, a_leading, a_stride, _ = a
    b_swizzle, b_leading, b_stride, _ = b

    @L.kernel(launch_bounds=(128, 1))
    def kernel(x: L.In[L.u8], y: L.Out[L.u32], size: L.i32):
        s = L.dynamic_shared(L.u8, 0)
        for i in range(cuda.threadIdx.x * 16, size, 2048):
            L.sts_v4_b32(s, i, L.ldg_v4_b32(x, i))
        L.fence_proxy_async()
        cuda.syncthreads()
        L.wgmma_fence()
        left = L.matrix_descriptor(s, 0, a_swizzle, a_leading, a_stride)
        right = L.matrix_descriptor(s, b_at, b_swizzle, b_leading, b_stride)
        acc = multiply(L.zeros(count), left, right, 0)
        L.wgmma_commit()
        acc = wait(acc, 0)
        store(y, acc)

    return kernel


@L.family
def pipelined(n: int):
    """Two sets of accumulators, C [128, n] = A·Bᵀ: the second set's group runs while the first is stored. x: A
    [128, 64] bf16, then B [n, 64]; y: C."""
    multiply, wait, count, store = L.wgmma(L.bf16, n), L.wgmma_wait(n // 2), n // 2, storing(n)

    @L.kernel(launch_bounds=(128, 1))
    def kernel(x: L.In[L.u8], y: L.Out[L.u32]):
        s = L.dynamic_shared(L.u8, 0)
        stage(s, 0, x, 128, 128, 128)
        stage(s, 128 * 128, L.offset(x, 128 * 128), n, 128, 128)
        L.fence_proxy_async()
        cuda.syncthreads()
        low = L.matrix_descriptor(s, 0, 128, 16, 1024)
        high = L.matrix_descriptor(s, 64 * 128, 128, 16, 1024)
        b = L.matrix_descriptor(s, 128 * 128, 128, 16, 1024)
        first = L.zeros(count)
        second = L.zeros(count)
        L.wgmma_fence()
        for k in L.unroll(STEPS):
            first = multiply(first, L.descriptor_advance(low, 32 * k), L.descriptor_advance(b, 32 * k), k)
        L.wgmma_commit()
        L.wgmma_fence()
        for k in L.unroll(STEPS):
            second = multiply(second, L.descriptor_advance(high, 32 * k), L.descriptor_advance(b, 32 * k), k)
        L.wgmma_commit()
        first = wait(first, 1)
        store(y, first)
        second = wait(second, 0)
        store(L.offset(y, 64 * n), second)

    return kernel


@L.family
def loop(dtype: L.Scalar, n: int, a_registers: bool = False, a_transposed: bool = False, b_transposed: bool = False):
    """As a main loop has it: four products a group over `steps` groups; y gets a sum of the accumulators."""
    multiply = L.wgmma(dtype, n, a_registers=a_registers, a_transposed=a_transposed, b_transposed=b_transposed)
    integer, count = dtype is L.i8, n // 2
    wait = L.wgmma_wait(count, L.i32 if integer else L.f32)
    empty, put = (L.zeros_i32, L.stg_b32) if integer else (L.zeros, L.stg_f32)

    @L.kernel(launch_bounds=(128, 1))
    def kernel(x: L.In[L.u32], y: L.Out[L.i32 if integer else L.f32], steps: L.i32):
        s = L.dynamic_shared(L.u8, 0)
        a = L.matrix_descriptor(s, 0, 128, 2048, 1024)
        b = L.matrix_descriptor(s, 8192, 128, 2048, 1024)
        acc = empty(count)
        for step in range(steps):
            f = ()
            if a_registers:
                for k in L.unroll(STEPS):
                    f = f + L.ldg_v4_b32(x, 4 * (128 * (4 * step + k) + cuda.threadIdx.x))
            L.wgmma_fence()
            for k in L.unroll(STEPS):
                b_k = L.descriptor_advance(b, 32 * k)
                if a_registers:
                    acc = multiply(acc, (f[4 * k], f[4 * k + 1], f[4 * k + 2], f[4 * k + 3]), b_k, 1)
                else:
                    acc = multiply(acc, L.descriptor_advance(a, 32 * k), b_k, L.i32(step + k > 0))
            L.wgmma_commit()
            acc = wait(acc, 0)
            cuda.syncthreads()
        total = acc[0]
        for j in L.unroll(1, count):
            total = total + acc[j]
        put(y, cuda.threadIdx.x, total)

    return kernel


TILES = 5
TILE_BYTES = 2304
STAGE_BYTES = 2560  # a multiple of what its swizzle repeats after


@L.family
def producer_and_consumer(stages: int):
    """Two warpgroups: the second fills `stages` stages in turn, the first multiplies them, with `stages` - 1 groups in
    flight while the next is issued; named barriers say which are full (1…) and empty (1 + `stages`…).

    x: TILES of A [64, 16], then B [8, 16], bf16; y: the sum of their A·Bᵀ.
    """
    multiply, wait, store = L.wgmma(L.bf16, 8), L.wgmma_wait(4), storing(8)
    running = stages - 1

    @L.kernel(launch_bounds=(256, 1))
    def kernel(x: L.In[L.u8], y: L.Out[L.u32]):
        s = L.dynamic_shared(L.u8, 0)
        if L.warpgroup_id() == 1:
            L.setmaxnreg_dec(40)
            for tile in range(TILES):
                stage_at = tile % stages
                if tile >= stages:
                    L.barrier_sync(1 + stages + stage_at, 256)
                for i in range(L.warpgroup_thread() * 16, TILE_BYTES, 2048):
                    at = stage_at * STAGE_BYTES + place(i // 32, i % 32, 72, 32)
                    L.sts_v4_b32(s, at, L.ldg_v4_b32(x, tile * TILE_BYTES + i))
                L.fence_proxy_async()
                L.barrier_arrive(1 + stage_at, 256)
        else:
            L.setmaxnreg_inc(232)
            a = L.matrix_descriptor(s, 0, 32, 16, 256)
            b = L.matrix_descriptor(s, 2048, 32, 16, 256)
            acc = L.zeros(4)
            L.wgmma_fence()
            for tile in range(TILES):
                stage_at = tile % stages
                L.barrier_sync(1 + stage_at, 256)
                L.wgmma_fence()
                a_at = L.descriptor_advance(a, stage_at * STAGE_BYTES)
                acc = multiply(acc, a_at, L.descriptor_advance(b, stage_at * STAGE_BYTES), tile)
                L.wgmma_commit()
                acc = wait(acc, running)
                done = tile - running
                if done >= 0 and done + stages < TILES:
                    L.barrier_arrive(1 + stages + done % stages, 256)
            acc = wait(acc, 0)
            store(y, acc)

    return kernel


@L.family
def streamed(n: int):
    """A from global memory straight into registers, two sets of fragments in turn: one is loaded while the products of
    the other run. x: A [64, 64·TILES] bf16, then B [n, 64], the same for every 64 of K; y: C."""
    multiply, wait, store, count = L.wgmma(L.bf16, n, a_registers=True), L.wgmma_wait(n // 2), storing(n), n // 2
    row_bytes = 128 * TILES
    b_at = 64 * row_bytes

    @L.device
    def load(x, tile):
        t = cuda.threadIdx.x
        at = (16 * (t >> 5) + ((t & 31) >> 2)) * row_bytes + 128 * tile + 4 * (t & 3)
        out = ()
        for k in L.unroll(STEPS):
            for c in L.unroll(2):
                for h in L.unroll(2):
                    out = out + (L.ldg_b32(x, at + 8 * row_bytes * h + 32 * k + 16 * c),)
        return out

    @L.device
    def group(acc, f, b, first):
        L.wgmma_fence()
        for k in L.unroll(STEPS):
            registers = (f[4 * k], f[4 * k + 1], f[4 * k + 2], f[4 * k + 3])
            acc = multiply(acc, registers, L.descriptor_advance(b, 32 * k), L.i32(first + k > 0))
        L.wgmma_commit()
        return acc

    @L.kernel(launch_bounds=(128, 1))
    def kernel(x: L.In[L.u8], y: L.Out[L.u32]):
        s = L.dynamic_shared(L.u8, 0)
        stage(s, 0, L.offset(x, b_at), n, 128, 128)
        L.fence_proxy_async()
        cuda.syncthreads()
        b = L.matrix_descriptor(s, 0, 128, 16, 1024)
        acc = L.zeros(count)
        even = load(x, 0)
        for tile in range(0, TILES - 2, 2):
            acc = group(acc, even, b, tile)
            odd = load(x, tile + 1)
            acc = wait(acc, 0)
            acc = group(acc, odd, b, 1)
            even = load(x, tile + 2)
            acc = wait(acc, 0)
        acc = wait(group(acc, even, b, 1), 0)
        store(y, acc)

    return kernel


@L.family
def rotating():
    """Faulty: fragments that a loop exchanges are the registers that products in flight still read."""
    multiply, wait = L.wgmma(L.bf16, 64, a_registers=True), L.wgmma_wait(32)

    @L.kernel(launch_bounds=(128, 1))
    def kernel(x: L.In[L.u32], y: L.Out[L.f32], steps: L.i32):
        b = L.matrix_descriptor(L.dynamic_shared(L.u8, 0), 0, 128, 16, 1024)
        acc = L.zeros(32)
        f = L.ldg_v4_b32(x, 4 * cuda.threadIdx.x)
        for step in range(steps):
            L.wgmma_fence()
            acc = multiply(acc, f, b, 1)
            L.wgmma_commit()
            f = L.ldg_v4_b32(x, 4 * (128 * step + 128 + cuda.threadIdx.x))
            acc = wait(acc, 0)
        L.stg_f32(y, cuda.threadIdx.x, acc[0])

    return kernel


@L.family
def hasty():
    """Faulty: accumulators stored before the wait."""
    multiply, wait = L.wgmma(L.bf16, 64), L.wgmma_wait(32)

    @L.kernel(launch_bounds=(128, 1))
    def kernel(y: L.Out[L.f32]):
        b = L.matrix_descriptor(L.dynamic_shared(L.u8, 0), 0, 128, 16, 1024)
        L.wgmma_fence()
        acc = multiply(L.zeros(32), b, b, 1)
        L.wgmma_commit()
        L.stg_f32(y, cuda.threadIdx.x, acc[0])
        acc = wait(acc, 0)

    return kernel


@L.family
def promoted(n: int):
    """e4m3 summed over 128 of K by the tensor cores and over groups in float32 registers, scaled. x: A [64, 128·TILES],
    then B [n, 128], the same for every group, as bytes; group i is scaled by 1 + i; y: C."""
    multiply, wait, count, store = L.wgmma(L.e4m3, n), L.wgmma_wait(n // 2), n // 2, storing(n)
    row_bytes = 128 * TILES

    @L.kernel(launch_bounds=(128, 1))
    def kernel(x: L.In[L.u8], y: L.Out[L.u32]):
        s = L.dynamic_shared(L.u8, 0)
        stage(s, 8192, L.offset(x, 64 * row_bytes), n, 128, 128)
        a = L.matrix_descriptor(s, 0, 128, 16, 1024)
        b = L.matrix_descriptor(s, 8192, 128, 16, 1024)
        total = L.zeros(count)
        for tile in range(TILES):
            for i in range(cuda.threadIdx.x, 512, 128):
                at = i // 8 * row_bytes + 128 * tile + i % 8 * 16
                L.sts_v4_b32(s, place(i // 8, i % 8 * 16, 64, 128), L.ldg_v4_b32(x, at))
            L.fence_proxy_async()
            cuda.syncthreads()
            part = L.zeros(count)
            L.wgmma_fence()
            for k in L.unroll(STEPS):
                part = multiply(part, L.descriptor_advance(a, 32 * k), L.descriptor_advance(b, 32 * k), k)
            L.wgmma_commit()
            part = wait(part, 0)
            cuda.syncthreads()
            sums = ()
            for j in L.unroll(count):
                sums = sums + (L.fma_rn(part[j], L.f32(1 + tile), total[j]),)
            total = sums
        store(y, total)

    return kernel

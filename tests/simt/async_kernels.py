"""Right kernels of the asynchronous machinery, for the interpreter's tests and a card's."""

from __future__ import annotations

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda

load_many, bulk_load, bulk_load_many, bulk_store = (
    L.tma_load(2, multicast=True),
    L.bulk_load(),
    L.bulk_load(multicast=True),
    L.bulk_store(),
)


@L.family
def show_tile(dtype: L.Scalar, rank: int, nbytes: int, at: int) -> L.Kernel:
    """The `nbytes` bytes that a box at `where` becomes, loaded to byte `at` of shared memory, as words of y."""
    load = L.tma_load(rank)

    @L.device
    def coordinates(c):
        if rank == 1:
            return (c,)
        if rank == 2:
            return (c, c)
        if rank == 3:
            return (c, 0, c)
        if rank == 4:
            return (c, 0, 1, c)
        return (c, 0, 1, c, c)

    @L.kernel(launch_bounds=(64, 1))
    def kernel(m: L.InMap[dtype], y: L.Out[L.u32], where: L.i32):
        tile = L.dynamic_shared(L.u8, at)
        bar = L.dynamic_shared(L.u64, at + nbytes)
        if cuda.threadIdx.x == 0:
            L.mbarrier_init(bar, 0, 1)
            L.fence_mbarrier_init()
            L.mbarrier_arrive_expect_tx(bar, 0, nbytes)
            load(tile, 0, m, coordinates(where), bar, 0)
        cuda.syncthreads()
        L.mbarrier_wait(bar, 0, 0)
        for i in range(cuda.threadIdx.x, nbytes // 4, 64):
            L.stg_b32(y, i, L.lds_b32(tile, 4 * i))

    return kernel


@L.kernel(launch_bounds=(64, 1))
def store_tile(x: L.In[L.u32], m: L.OutMap[L.bf16], row: L.i32, column: L.i32):
    """128 swizzled rows of 64 bytes from x to the box at (row, column), in two groups."""
    tile = L.dynamic_shared(L.u8, 0)
    for i in range(cuda.threadIdx.x, 128 * 4, 64):
        r = i >> 2
        L.sts_v4_b32(tile, r * 64 + (((i & 3) ^ ((r >> 1) & 3)) << 4), L.ld_in_v4_b32(x, 4 * i))
    L.fence_proxy_async()
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        L.tma_store_2d(m, (row, column), tile, 0)
        L.bulk_commit()
        L.tma_store_2d(m, (row + 64, column), tile, 64 * 64)
        L.bulk_commit()
        L.bulk_wait_read(1)
        L.bulk_wait(0)


@L.kernel(launch_bounds=(64, 1))
def bulk_round_trip(x: L.In[L.u32], y: L.Out[L.u32], n: L.i32):
    """y = x + 1, 64 words a turn, two stages, loads and stores by bulk copies."""
    inner = L.shared(L.u32, 128)
    outer = L.shared(L.u32, 64)
    bars = L.shared(L.u64, 2)
    t = cuda.threadIdx.x
    if t == 0:
        L.mbarrier_init(bars, 0, 1)
        L.mbarrier_init(bars, 1, 1)
        L.fence_mbarrier_init()
        for s in range(2):
            L.mbarrier_expect_tx(bars, s, 256)
            bulk_load(inner, 64 * s, x, 64 * s, 256, bars, s)
            L.mbarrier_arrive(bars, s)
    cuda.syncthreads()
    for i in range(n):
        s = i & 1
        while L.mbarrier_try_wait(bars, s, (i >> 1) & 1) == L.u32(0):
            pass
        v = L.lds_b32(inner, 64 * s + t)
        L.sts_b32(outer, t, L.u32(v + 1))
        L.fence_proxy_async()
        cuda.syncthreads()
        if t == 0:
            bulk_store(y, 64 * i, outer, 0, 256)
            L.bulk_commit()
            if i + 2 < n:
                L.mbarrier_arrive_expect_tx(bars, s, 256)
                bulk_load(inner, 64 * s, x, 64 * (i + 2), 256, bars, s)
            L.bulk_wait_read(0)
        cuda.syncthreads()


@L.kernel(launch_bounds=(64, 1))
def plain_mbarrier(x: L.In[L.u32], y: L.Out[L.u32], n: L.i32):
    """A ring of one word a thread between two warps, by arrivals alone; then the mbarriers' bytes hold data."""
    words = L.shared(L.u32, 32)
    bars = L.shared(L.u64, 2)
    lane = L.lane_id()
    if cuda.threadIdx.x == 0:
        L.mbarrier_init(bars, 0, 32)
        L.mbarrier_init(bars, 1, 32)
        L.fence_mbarrier_init()
    cuda.syncthreads()
    for i in range(n):
        parity = i & 1
        if L.warp_id() == 0:
            L.mbarrier_wait(bars, 1, parity ^ 1)
            L.sts_b32(words, lane, L.ldg_b32(x, 32 * i + lane))
            L.mbarrier_arrive(bars, 0)
        else:
            L.mbarrier_wait(bars, 0, parity)
            L.stg_b32(y, 32 * i + lane, L.lds_b32(words, 31 - lane))
            L.mbarrier_arrive(bars, 1)
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        L.mbarrier_inval(bars, 0)
        L.mbarrier_inval(bars, 1)
    cuda.syncthreads()
    again = L.cast(bars, L.u32)
    if cuda.threadIdx.x < 4:
        L.sts_b32(again, cuda.threadIdx.x, 7)


@L.kernel(launch_bounds=(64, 1))
def multicast_tiles(m: L.InMap[L.bf16], x: L.In[L.u32], y: L.Out[L.u32], turns: L.i32):
    """A cluster of 2: each block loads its half of a 16x64 tile and 256 bytes of x for both, `turns` times; both write
    what they see to their part of y. A stage is loaded again when all threads of both blocks are done with it."""
    tile = L.dynamic_shared(L.u8, 0)
    line = L.dynamic_shared(L.u8, 2048)
    bars = L.dynamic_shared(L.u64, 2560)  # full, empty
    t, rank = cuda.threadIdx.x, L.cluster_rank()
    if t == 0:
        L.mbarrier_init(bars, 0, 1)
        L.mbarrier_init(bars, 1, 128)
        L.fence_mbarrier_init()
    L.cluster_arrive()
    L.cluster_wait()
    half = L.i32(rank)
    for i in range(turns):
        if t == 0:
            L.mbarrier_wait_cluster(bars, 1, (i & 1) ^ 1)
            L.mbarrier_arrive_expect_tx(bars, 0, 2048 + 512)
            load_many(tile, 1024 * half, m, (16 * i + 8 * half, 0), bars, 0, 3)
            bulk_load_many(line, 256 * half, x, 128 * i + 64 * half, 256, bars, 0, 3)
        L.mbarrier_wait(bars, 0, i & 1)
        out = (L.i32(cuda.blockIdx.x) * turns + i) * 640
        for j in range(t, 640, 64):
            L.stg_b32(y, out + j, L.lds_b32(tile, 4 * j))
        L.mbarrier_arrive_remote(L.mapa(bars, 0), 1)
        L.mbarrier_arrive_remote(L.mapa(bars, 1), 1)
    L.cluster_arrive()
    L.cluster_wait()


@L.kernel(launch_bounds=(32, 1))
def neighbours(y: L.Out[L.u32]):
    """Each block of a cluster hands its number to the next and adds up what all wrote in block 0."""
    own = L.shared(L.u32, 32)
    all_ = L.shared(L.u32, 8)
    mail = L.shared(L.u32, 32)
    L.cluster_arrive_relaxed()  # all blocks run
    L.cluster_wait()
    lane, rank, size = L.lane_id(), L.cluster_rank(), L.cluster_size()
    number = cuda.blockIdx.x + cuda.gridDim.x * cuda.blockIdx.y
    L.sts_b32(own, lane, L.u32(100 * number + lane))
    L.cluster_arrive()
    L.cluster_wait()
    following = L.u32(rank + 1)
    if following == size:
        following = L.u32(0)
    v = L.ld_cluster_v4_b32(L.mapa(own, following), lane & 28)
    w = L.ld_cluster_f32(L.mapa(own, following), lane)
    if lane == 0:
        L.st_cluster_b32(L.mapa(all_, 0), L.i32(rank), L.u32(rank + 1))
        L.st_cluster_v4_b32(L.mapa(mail, following), 0, (rank, rank + 1, rank + 2, rank + 3))
        L.st_cluster_v4_f32(L.mapa(mail, following), 4, (L.f32(rank), L.f32(1), L.f32(2), L.f32(3)))
        L.st_cluster_f32(L.mapa(mail, following), 8, L.f32(rank))
    L.cluster_arrive()
    L.stg_b32(y, 64 * number + lane, L.u32(v[0] + v[3]))
    L.cluster_wait()
    if lane < size:
        seen = L.ld_cluster_b32(L.mapa(all_, 0), lane)
        L.stg_b32(y, 64 * number + 32 + lane, L.u32(seen + L.f32_bits(w)))
    if lane == 0:
        letter = L.ld_cluster_v4_f32(L.mapa(mail, rank), 4)
        L.stg_v4_b32(y, 64 * number + 40, L.lds_v4_b32(mail, 0))
        for j in L.unroll(4):
            L.stg_b32(y, 64 * number + 44 + j, L.f32_bits(letter[j]))
        L.stg_b32(y, 64 * number + 48, L.lds_b32(mail, 8))
    L.cluster_arrive()
    L.cluster_wait()


@L.kernel(launch_bounds=(64, 1))
def letters(x: L.In[L.f32], y: L.Out[L.f32], turns: L.i32):
    """Each block hands four values a thread to each block of its cluster, itself too, `turns` times; each adds what it
    got, in the order of the ranks."""
    mail, bar = L.dynamic_shared(L.f32, 0), L.dynamic_shared(L.u64, 4096)
    t, rank, size = cuda.threadIdx.x, L.i32(L.cluster_rank()), L.i32(L.cluster_size())
    if t == 0:
        L.mbarrier_init(bar, 0, 1)
        L.fence_mbarrier_init()
    L.cluster_arrive_relaxed()  # after that fence
    L.cluster_wait()
    first = L.i32(4 * (64 * L.i32(cuda.blockIdx.x) + t))
    for i in range(turns):
        if t == 0:
            L.mbarrier_arrive_expect_tx(bar, 0, L.u32(1024 * size))
        for to in range(size):
            v = (L.ldg_f32(x, first), L.ldg_f32(x, first + 1), L.ldg_f32(x, first + 2), L.f32(i))
            L.st_async_v4_f32(L.mapa(mail, L.u32(to)), 256 * rank + 4 * t, v, L.mapa(bar, L.u32(to)), 0)
        L.mbarrier_wait(bar, 0, L.u32(i & 1))
        for j in L.unroll(4):
            total = L.f32(0)
            for sender in range(size):
                total = L.add_rn(total, L.lds_f32(mail, 256 * sender + 4 * t + j))
            L.stg_f32(y, first + j, total)
        L.cluster_arrive()  # they have been read
        L.cluster_wait()


@L.kernel(launch_bounds=(64, 1))
def in_place(m: L.InOutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    """x += 1 by ordinary stores, y = x through a bulk copy; a 2x4x64 box of m is negated where it lies."""
    tile, words = L.dynamic_shared(L.u8, 0), L.dynamic_shared(L.u8, 1024)
    bar = L.dynamic_shared(L.u64, 1280)
    t = cuda.threadIdx.x
    L.stg_b32(x, t, L.u32(L.ld_b32(x, t) + 1))
    L.fence_proxy_async_global()
    if t == 0:
        L.mbarrier_init(bar, 0, 1)
        L.fence_mbarrier_init()
    cuda.syncthreads()
    if t == 0:
        L.mbarrier_arrive_expect_tx(bar, 0, 1024 + 256)
        L.tma_load_3d(tile, 0, m, (0, 0, 0), bar, 0)
        bulk_load(words, 0, x, 0, 256, bar, 0)
    L.mbarrier_wait(bar, 0, 0)
    L.stg_b32(y, t, L.lds_b32(words, 4 * t))
    v = L.lds_v4_b32(tile, 16 * t)
    sign = L.u32(0x80008000)
    L.sts_v4_b32(tile, 16 * t, (v[0] ^ sign, v[1] ^ sign, v[2] ^ sign, v[3] ^ sign))
    L.fence_proxy_async_all()
    cuda.syncthreads()
    if t == 0:
        L.tma_store_3d(m, (0, 0, 0), tile, 0)
        L.bulk_commit()
        L.bulk_wait(0)


@L.kernel(launch_bounds=(64, 1))
def many_mbarriers(x: L.In[L.u32], y: L.Out[L.u32]):
    """40 loads of 16 bytes, each to an mbarrier of its own, waited for one by one."""
    line = L.shared(L.u32, 160)
    bars = L.shared(L.u64, 40)
    t = cuda.threadIdx.x
    if t < 40:
        L.mbarrier_init(bars, t, 1)
        L.fence_mbarrier_init()
        L.mbarrier_arrive_expect_tx(bars, t, 16)
        bulk_load(line, 4 * t, x, 4 * t, 16, bars, t)
    cuda.syncthreads()
    for i in range(40):
        L.mbarrier_wait(bars, i, 0)
        if t < 4:
            L.stg_b32(y, 4 * i + t, L.lds_b32(line, 4 * i + t))

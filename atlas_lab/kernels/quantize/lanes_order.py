"""Activations BF16 in the order in which the lanes that hold weights own K."""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda
from atlas_lab.kernels.quantize.words import clear

THREADS = 128
PIECE = 8  # elements of a thread


def ordered_k(k: int, run: int) -> int:
    """Elements of a row in the lanes' order."""
    return -(-k // (4 * run)) * (4 * run)


def order_grid(m: int, k: int, run: int) -> tuple[int, int]:
    """Blocks of the launch."""
    return m, -(-ordered_k(k, run) // (PIECE * THREADS))


@L.family
def order_for_lanes(run: int):
    """x BF16 `[m, k]`, k a multiple of 2; out BF16 `[m, k rounded up to 4·run]`, zero past k. A thread 8 elements of
    out, `order_grid` blocks.

    Of each 4·run, lane t owns the run number t. Product j takes 4·j to 4·j + 3 of every run: those pairs become pair t
    of the first and of the second 8 of the product's 16. The first `words` flags become 0, for the product whose blocks
    meet by them. A dependent launch may start at once.
    """
    pieces = run // 2  # of 4·run

    @L.kernel(launch_bounds=(THREADS, 8))
    def kernel(x: L.In[L.bf16], out: L.Out[L.bf16], flags: L.Out[L.u32], k: L.i32, words: L.i32):
        L.grid_launch_dependents()
        x = L.grid_wait_for(x)
        i = L.i32(cuda.blockIdx.y * THREADS + cuda.threadIdx.x)
        if cuda.blockIdx.y == 0:
            clear(flags, words, cuda.blockIdx.x * THREADS + cuda.threadIdx.x, cuda.gridDim.x * THREADS)
        chunks = L.i32((k + 4 * run - 1) // (4 * run))
        row = L.i64(cuda.blockIdx.x)
        if i < chunks * pieces:
            first = L.i32(i // pieces * (4 * run) + 2 * (i % pieces))
            v = ()
            for t in L.unroll(4):
                column = L.i32(first + run * t)
                pair = L.ld_waited_b32(x, row * k + (column if column < k else 0))
                v = v + (pair if column < k else L.u32(0),)
            L.stg_v4_b32(out, row * (4 * run) * chunks + PIECE * i, v)

    return kernel

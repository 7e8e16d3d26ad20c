"""Matrix products of a warpgroup (`wgmma`): 64xN += 64xK · KxN, asynchronous; all 128 threads take part, converged.

    multiply, wait = L.wgmma(L.bf16, 128), L.wgmma_wait(64)
    …
    L.wgmma_fence()
    for k in L.unroll(4):
        acc = multiply(acc, L.descriptor_advance(a, 32 * k), L.descriptor_advance(b, 32 * k), L.i32(k > 0))
    L.wgmma_commit()
    acc = wait(acc, 0)

A fragments are values and nothing can overwrite them; but two sets that a loop exchanges (`now = next`) become one set
of registers once compiled, and the assembler then runs one product after the other (C7513, in `check_kernel`): name two
sets and write the loop's body twice.

B is N rows of K in shared memory, so that C = A·Bᵀ of row-major A [64, K] and B [N, K]. Until a wait for their group
returns accumulators they are not to be read, and the shared memory of the operands not to be written. A fence stands
between whatever wrote registers (accumulators, A fragments) and the first product of a group that uses them; shared
memory that ordinary stores wrote needs `fence_proxy_async` by the writing threads, then a barrier.

Fragments, for thread 32·w + 4·g + t of the warpgroup:

    C [64, N]  register 4·j + 2·h + e: row 16·w + g + 8·h, column 8·j + 2·t + e
    A [64, K]  register 2·c + h, element e of its 32 bits: row 16·w + g + 8·h, K = (4·c + t)·per + e, with `per` 2
               elements of 16 bits or 4 of 8 (the A of mma m16n8k16 and m16n8k32, each warp 16 rows)

Rounding: products are exact and their sum with the accumulator is rounded once to float32 on the interpreter; hardware
adds with fewer bits, for e4m3 far fewer. s8 sums wrap.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from atlas_lab.kernels.lang.machine import current
from atlas_lab.kernels.lang.multiply import ELEMENTS, UNIT_ROUNDOFF, accumulate, elements
from atlas_lab.kernels.lang.op import SM90A, Const, Effect, Op, Operand, Vec
from atlas_lab.kernels.lang.types import Scalar, bf16, e4m3, f16, f32, i8, i32, u32, u64

_MMA, _FENCE = "9.7.15.5.2 wgmma.mma_async", "9.7.15.7.1 wgmma.fence"
_COMMIT, _WAIT = "9.7.15.7.2 wgmma.commit_group", "9.7.15.7.3 wgmma.wait_group"
ROWS = 64


@dataclass(frozen=True)
class Product:
    """What one instruction multiplies: 64 rows by `n` columns, K of 32 bytes."""

    dtype: Scalar
    n: int
    a_registers: bool = False
    a_transposed: bool = False
    b_transposed: bool = False

    @property
    def k(self) -> int:
        return 256 // self.dtype.bits

    @property
    def accumulator(self) -> Scalar:
        return i32 if self.dtype is i8 else f32

    @property
    def registers(self) -> int:
        """Accumulators of a thread."""
        return self.n // 2

    @functools.cached_property
    def name(self) -> str:
        options = "_ra" * self.a_registers + "_ta" * self.a_transposed + "_tb" * self.b_transposed
        return f"wgmma_m64n{self.n}k{self.k}_{self.dtype}{options}"

    def matrix(self, chunks: np.ndarray, transposed: bool) -> np.ndarray:
        """Chunks [rows, 2, 16 bytes], or transposed [rows / 8, K, 16 bytes], as float64 [rows, K]."""
        values = elements(chunks, self.dtype)
        if transposed:
            values = values.transpose(0, 2, 1)
        return values.reshape(-1, self.k)

    def a_fragment(self, registers: np.ndarray) -> np.ndarray:
        """A warpgroup's [128, 4] u32 as float64 [64, K]."""
        values = elements(registers, self.dtype).reshape(4, 8, 4, 2, 2, -1)  # warp, g, t, K half, row half, element
        return values.transpose(0, 4, 1, 3, 2, 5).reshape(ROWS, self.k)

    def run(self, c: np.ndarray | None, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Accumulators [128, n / 2] of c + A·Bᵀ; `c` None is zero."""
        product = (a @ b.T).reshape(4, 2, 8, self.n // 8, 4, 2)  # warp, row half, g, column tile, t, pair
        return accumulate(c, product.transpose(0, 2, 4, 3, 1, 5).reshape(128, -1), self.accumulator)


def _check(p: Product) -> None:
    if p.dtype not in (bf16, f16, e4m3, i8):
        raise ValueError(f"wgmma: found {p.dtype}, expected bf16, f16, e4m3 or i8")
    if p.n % 8 or not 8 <= p.n <= 256 or (p.dtype is i8 and p.n > 32 and p.n % 16):
        more = ", above 32 of 16" if p.dtype is i8 else ""
        raise ValueError(f"wgmma: found {p.n} columns, expected a multiple of 8 from 8 to 256{more}")
    if (p.a_transposed or p.b_transposed) and p.dtype.bits != 16:
        raise ValueError(f"wgmma: found a transposed operand of {p.dtype}, expected bf16 or f16")
    if p.a_registers and p.a_transposed:
        raise ValueError("wgmma: found A in registers and transposed, expected one of the two")


def _text(p: Product) -> str:
    """`$0…` are the accumulators, then those tied to them, A, B, scale_d."""
    count = p.registers
    at = 2 * count
    d = ", ".join(f"${i}" for i in range(count))
    a = "{" + ", ".join(f"${at + i}" for i in range(4)) + "}" if p.a_registers else f"${at}"
    at += 4 if p.a_registers else 1
    kind = ELEMENTS[p.dtype].ptx
    accumulator = "s32" if p.accumulator is i32 else "f32"
    immediates = "" if p.dtype is i8 else ", 1, 1"  # the signs of A and B
    if p.dtype.bits == 16:
        immediates += "" if p.a_registers else f", {int(p.a_transposed)}"
        immediates += f", {int(p.b_transposed)}"
    return (
        f"{{ .reg .pred p; setp.ne.b32 p, ${at + 1}, 0; wgmma.mma_async.sync.aligned.m64n{p.n}k{p.k}.{accumulator}."
        f"{kind}.{kind} {{{d}}}, {a}, ${at}, p{immediates}; }}"
    )


@functools.cache
def _wgmma(p: Product) -> Op:
    _check(p)

    def run(acc: Any, a: Any, b: int, scale_d: int) -> Any:
        return current().wgmma(p, acc, a, b, scale_d)

    run.__doc__ = f"Issue m64n{p.n}k{p.k} of {p.dtype}: acc + A·Bᵀ where scale_d is not 0, else A·Bᵀ."
    acc = Vec(p.accumulator, p.registers)
    a: Operand = Vec(u32, 4) if p.a_registers else u64
    return Op(
        p.name,
        (acc, a, u64, i32),
        acc,
        ptx=_text(p),
        numpy=run,
        effect=Effect.READ,
        needs=SM90A,
        section=_MMA,
        tied=(0,),
        convergent=True,
        unit_roundoff=UNIT_ROUNDOFF.get(p.dtype),
    )


def wgmma(
    dtype: Scalar, n: int, *, a_registers: bool = False, a_transposed: bool = False, b_transposed: bool = False
) -> Op:
    """The product m64nNk16 (bf16, f16) or m64nNk32 (e4m3, i8): `(acc, a, b, scale_d) -> acc`.

    acc: Vec(f32 or, for i8, i32; n / 2), tied in place; a: a descriptor (u64), or Vec(u32, 4) with `a_registers`; b: a
    descriptor; scale_d: i32, 0 overwrites acc. `…_transposed`: the operand's rows are contiguous, not K. Raises
    ValueError for a type, a number of columns or a combination that the instruction does not have.
    """
    return _wgmma(Product(dtype, n, a_registers, a_transposed, b_transposed))


@functools.cache
def wgmma_wait(count: int, dtype: Scalar = f32) -> Op:
    """`(acc, pending) -> acc`: all but the newest `pending` groups (0 to 7, known at compile time) are complete.

    Takes `count` accumulators, float32 or i32, and returns them: readable if their products are complete. Several
    sets of accumulators each need a wait. Raises ValueError for another dtype.
    """
    if dtype not in (f32, i32):
        raise ValueError(f"wgmma_wait: found {dtype}, expected f32 or i32")

    def run(acc: Any, pending: int) -> Any:
        if not 0 <= pending <= 7:
            raise ValueError(f"wgmma_wait: found {pending} groups to leave pending, expected 0 to 7")
        return current().wgmma_wait(acc, pending)

    run.__doc__ = "Wait for all but the newest groups and take the accumulators back."
    acc = Vec(dtype, count)
    return Op(
        f"wgmma_wait_{count}_{dtype}",
        (acc, Const("pending")),
        acc,
        ptx="wgmma.wait_group.sync.aligned {pending};",
        numpy=run,
        effect=Effect.SYNC,
        needs=SM90A,
        section=_WAIT,
        tied=(0,),
        convergent=True,
    )


def _fence() -> None:
    """Registers written before are seen by the products after it: A fragments, and accumulators that no product in
    flight holds."""
    current().wgmma_fence()


def _commit() -> None:
    """Close the group of the warpgroup's products so far."""
    current().wgmma_commit()


wgmma_fence = Op(
    "wgmma_fence",
    (),
    None,
    ptx="wgmma.fence.sync.aligned;",
    numpy=_fence,
    effect=Effect.SYNC,
    needs=SM90A,
    section=_FENCE,
    convergent=True,
)
wgmma_commit = Op(
    "wgmma_commit",
    (),
    None,
    ptx="wgmma.commit_group.sync.aligned;",
    numpy=_commit,
    effect=Effect.SYNC,
    needs=SM90A,
    section=_COMMIT,
    convergent=True,
)

"""Worst error of one tensor-core product on this GPU, over |c| + Σ|a·b|: what U_MMA and, a multiply-add, U_MMA_NARROW
in lang/multiply.py must bound.

python tools/measure_roundoff.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

from atlas_lab.core.launch import Launch, Program
from atlas_lab.core.tensor import Tensor
from atlas_lab.formats.dtypes import dtype
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda
from atlas_lab.runtime.device import Device, open_device

TILES = 20_000
KINDS = ("normal", "wide", "cancel", "large c", "small c", "positive", "near one")
G, T = np.arange(32) // 4, np.arange(32) % 4


@L.family
def one_product(kind: str):
    """One warp, one product a block: fragments in, accumulators out."""
    multiply = {"bf16": L.mma_m16n8k16_bf16, "f16": L.mma_m16n8k16_f16, "e4m3": L.mma_m16n8k32_e4m3}[kind]

    @L.kernel(launch_bounds=(32, 1))
    def kernel(a: L.In[L.u32], b: L.In[L.u32], c: L.In[L.f32], d: L.Out[L.f32]):
        i = cuda.blockIdx.x * 32 + cuda.threadIdx.x
        acc = ()
        for j in L.unroll(4):
            acc = acc + (L.ldg_f32(c, i * 4 + j),)
        acc = multiply(acc, L.ldg_v4_b32(a, i * 4), L.ldg_v2_b32(b, i * 2))
        for j in L.unroll(4):
            L.stg_f32(d, i * 4 + j, acc[j])

    return kernel


@L.family
def one_warpgroup_product(kind: str):
    """The same by `wgmma`, one warpgroup a block: each warp's 16 rows have an A of their own, all have the B of the
    block's first warp."""
    multiply = L.wgmma({"bf16": L.bf16, "f16": L.f16, "e4m3": L.e4m3}[kind], 8, a_registers=True)
    wait = L.wgmma_wait(4)

    @L.kernel(launch_bounds=(128, 1))
    def kernel(a: L.In[L.u32], b: L.In[L.u32], c: L.In[L.f32], d: L.Out[L.f32]):
        t = cuda.threadIdx.x
        i = cuda.blockIdx.x * 128 + t
        s = L.shared(L.u32, 64)  # two core matrices of 8 columns by 16 bytes of K
        if t < 32:
            q = L.ldg_v2_b32(b, i * 2)
            L.sts_b32(s, t, q[0])
            L.sts_b32(s, 32 + t, q[1])
        L.fence_proxy_async()
        cuda.syncthreads()
        right = L.matrix_descriptor(s, 0, 0, 128, 256)
        acc = ()
        for j in L.unroll(4):
            acc = acc + (L.ldg_f32(c, i * 4 + j),)
        f = L.ldg_v4_b32(a, i * 4)
        L.wgmma_fence()
        acc = multiply(acc, f, right, 1)
        L.wgmma_commit()
        acc = wait(acc, 0)
        for j in L.unroll(4):
            L.stg_f32(d, i * 4 + j, acc[j])

    return kernel


def operands(kind: str, host: np.dtype, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A `[tiles, 16, K]`, B `[tiles, K, 8]` in the type, K of 32 bytes, C float32 `[tiles, 16, 8]`."""
    k = 32 // host.itemsize
    a, b = rng.standard_normal((TILES, 16, k)), rng.standard_normal((TILES, k, 8))
    c = rng.standard_normal((TILES, 16, 8)) * 4
    half = k // 2
    if kind == "wide":
        a *= 2.0 ** rng.integers(-12, 12, a.shape)
    elif kind == "cancel":
        a[..., half:], b[:, half:], c = -a[..., :half], b[:, :half] * (1 + 2.0**-7), c * 1e-3
    elif kind == "large c":
        c *= 2.0 ** rng.integers(0, 24, c.shape)
    elif kind == "small c":
        c *= 2.0 ** rng.integers(-24, 0, c.shape)
    elif kind == "positive":
        a, b, c = np.abs(a), np.abs(b), np.abs(c)
    elif kind == "near one":
        a, b, c = 1 + rng.random(a.shape) / 2, 1 + rng.random(b.shape) / 2, np.abs(c) * 64
    return np.clip(a, -200, 200).astype(host), b.astype(host), c.astype(np.float32)


def lanes(m: np.ndarray) -> np.ndarray:
    """A `[tiles, 16, 8]` matrix as lanes hold it: `[tiles, 32, 4]`."""
    return np.stack([m[:, G + r, 2 * T + e] for r in (0, 8) for e in (0, 1)], -1)


def fragments(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A and B as lanes hold them, `[tiles, 32, 4]` and `[tiles, 32, 2]`: 16 bytes of K are four words, one a lane."""
    rows = np.ascontiguousarray(a).view(np.uint32)
    columns = np.ascontiguousarray(b.transpose(0, 2, 1)).view(np.uint32)
    left = np.stack([rows[:, G + r, T + k] for k in (0, 4) for r in (0, 8)], -1)
    return left, np.stack([columns[:, G, T + k] for k in (0, 4)], -1)


def worst(device: Device, family: Any, kind: str, name: str, rng: np.random.Generator) -> float:
    """Largest error over |c| + Σ|a·b| of one kind of operands."""
    a, b, c = operands(kind, dtype(name).numpy, rng)
    warps = 4 if family is one_warpgroup_product else 1
    b = b[np.arange(TILES) // warps * warps]
    left, right = fragments(a, b)
    held = {"a": left, "b": right, "c": lanes(c)}
    handles = {n: Tensor("f32" if n == "c" else "u32", v.shape, n) for n, v in held.items()}
    d = Tensor("f32", held["c"].shape, "d")
    buffers = {n: device.allocate(v.nbytes, n) for n, v in held.items()} | {"d": device.allocate(d.bytes, "d")}
    for n, v in held.items():
        device.upload(buffers[n], v)
    launch = Launch(family(name), grid=TILES // warps, block=32 * warps, args=(*handles.values(), d))
    device.bind(Program("one product", (launch,), inputs=tuple(handles.values()), outputs=(d,)), buffers).run()
    found = device.download(buffers["d"], "f32", d.shape).astype(np.float64)
    for buffer in buffers.values():
        buffer.free()
    a, b, c = (v.astype(np.float64) for v in (a, b, c))
    return float((np.abs(found - lanes(a @ b + c)) / lanes(np.abs(a) @ np.abs(b) + np.abs(c))).max())


def main() -> None:
    rng = np.random.default_rng(1)
    with open_device("cuda") as device:
        for family, what in ((one_product, "mma"), (one_warpgroup_product, "wgmma")):
            for name in ("bf16", "f16", "e4m3"):
                for kind in KINDS:
                    error = worst(device, family, kind, name, rng)
                    print(f"{what:5s} {name:5s} {kind:9s} 2**{np.log2(error) if error else -np.inf:.2f}", flush=True)


if __name__ == "__main__":
    main()

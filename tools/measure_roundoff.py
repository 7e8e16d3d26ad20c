"""Worst error of one `mma.m16n8k16` on this GPU, over |c| + Σ|a·b|: what `U_MMA` in lang/multiply.py must bound.

python tools/measure_roundoff.py
"""

from __future__ import annotations

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
    multiply = {"bf16": L.mma_m16n8k16_bf16, "f16": L.mma_m16n8k16_f16}[kind]

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


def operands(kind: str, host: np.dtype, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A `[tiles, 16, 16]`, B `[tiles, 16, 8]` in the type, C float32 `[tiles, 16, 8]`."""
    a, b = rng.standard_normal((TILES, 16, 16)), rng.standard_normal((TILES, 16, 8))
    c = rng.standard_normal((TILES, 16, 8)) * 4
    if kind == "wide":
        a *= 2.0 ** rng.integers(-12, 12, a.shape)
    elif kind == "cancel":
        a[..., 8:], b[:, 8:], c = -a[..., :8], b[:, :8] * (1 + 2.0**-7), c * 1e-3
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


def pairs(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Two 16-bit elements to a register, the first in the low half."""
    return first.view(np.uint16).astype(np.uint32) | second.view(np.uint16).astype(np.uint32) << np.uint32(16)


def worst(device: Device, kind: str, name: str, rng: np.random.Generator) -> float:
    """Largest error over |c| + Σ|a·b| of one kind of operands."""
    a, b, c = operands(kind, dtype(name).numpy, rng)
    fragments = {
        "a": np.stack([pairs(a[:, G + r, 2 * T + k], a[:, G + r, 2 * T + k + 1]) for k in (0, 8) for r in (0, 8)], -1),
        "b": np.stack([pairs(b[:, 2 * T + k, G], b[:, 2 * T + k + 1, G]) for k in (0, 8)], -1),
        "c": lanes(c),
    }
    handles = {n: Tensor("f32" if n == "c" else "u32", v.shape, n) for n, v in fragments.items()}
    d = Tensor("f32", fragments["c"].shape, "d")
    buffers = {n: device.allocate(v.nbytes, n) for n, v in fragments.items()} | {"d": device.allocate(d.bytes, "d")}
    for n, v in fragments.items():
        device.upload(buffers[n], v)
    launch = Launch(one_product(name), grid=len(a), block=32, args=(*handles.values(), d))
    device.bind(Program("one product", (launch,), inputs=tuple(handles.values()), outputs=(d,)), buffers).run()
    found = device.download(buffers["d"], "f32", d.shape).astype(np.float64)
    for buffer in buffers.values():
        buffer.free()
    a, b, c = (v.astype(np.float64) for v in (a, b, c))
    return float((np.abs(found - lanes(a @ b + c)) / lanes(np.abs(a) @ np.abs(b) + np.abs(c))).max())


def main() -> None:
    rng = np.random.default_rng(1)
    with open_device("cuda") as device:
        for name in ("bf16", "f16"):
            for kind in KINDS:
                print(f"{name:5s} {kind:9s} 2**{np.log2(worst(device, kind, name, rng)):.2f}", flush=True)


if __name__ == "__main__":
    main()

"""NVFP4 in the order in which the lanes of a warp multiply it: one 16-byte load a lane, no shuffle afterwards."""

from __future__ import annotations

import numpy as np

from atlas_lab.arms.copies.launches import copied
from atlas_lab.arms.copies.shapes import named, require, two_level
from atlas_lab.core.building import BuildCall
from atlas_lab.core.declare import Arrays, Derived
from atlas_lab.core.launch import Launch
from atlas_lab.core.projection import Projection
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.verdict import Verdict
from atlas_lab.formats import get
from atlas_lab.kernels.quantize import repack

ROWS, SPAN = repack.ROWS, repack.SPAN


def can_repack(p: Projection) -> Verdict:
    """NVFP4 of either convention, N a multiple of 16 and K of 64."""
    return two_level(p, n_multiple=ROWS, k_multiple=SPAN)


def repacked_nvfp4(p: Projection) -> Derived:
    """`weight` u8 `[N/16, K/64, 32, 16]`, `scale` e4m3 `[N/16, K/64, 32, 2]`, `global_scale` as stored. Key
    `nvfp4_lanes`. Raises CopyError.

    A tile is 16 rows by 64 columns, 512 bytes. Lane l of a warp owns rows l/4 and l/4 + 8, and the 16 columns number
    l%4. Word j of its 16 bytes is, byte by byte: columns 4j, 4j + 1 of the first row; of the second; columns 4j + 2,
    4j + 3 of the first; of the second (the lower column in the low nibble). So `e2m1x8_bf16x2` of word j is the
    operand A (four registers) of the j-th `mma.m16n8k16`, with K permuted inside the tile: step j's columns 2t, 2t + 1,
    2t + 8, 2t + 9 of lane group t are the tile's columns 16t + 4j to 16t + 4j + 3. `scale` has the lane's two.
    """
    require(can_repack(p), "repacked NVFP4", p)
    w, n, k = p.weight, p.n, p.k

    def dequantize(t: Arrays) -> np.ndarray:
        return get(w.format).dequantize(unpack(t))

    def device(call: BuildCall) -> list[Launch]:
        s, o = call.source, call.out
        tiles = n // ROWS * (k // SPAN)
        args = (s.weight, s.scale, o.weight, o.scale, tiles, k)
        grid = -(-tiles * 32 // repack.THREADS)
        shuffle = Launch(repack.repack_nvfp4, grid=grid, block=repack.THREADS, args=args, label="repack")
        return [shuffle, copied(s.global_scale, o.global_scale)]

    return Derived(
        named("nvfp4_lanes", p),
        source=w.packed,
        build=pack,
        dequantize=dequantize,
        device=device,
        weight=Tensor("u8", (n // ROWS, k // SPAN, 32, 16)),
        scale=Tensor("e4m3", (n // ROWS, k // SPAN, 32, 2)),
        global_scale=w["global_scale"],
    )


def pack(t: Arrays) -> dict[str, np.ndarray]:
    """Stored tensors by field to the repacked ones."""
    codes, scale = t["weight"], t["scale"]
    n, k = codes.shape[0], 2 * codes.shape[1]
    # row = 16 tile + 8 half + r; byte = 32 span + 8 group + 2 word + pair
    c = codes.reshape(n // ROWS, 2, 8, k // SPAN, 4, 4, 2).transpose(0, 3, 2, 4, 5, 6, 1)
    s = scale.reshape(n // ROWS, 2, 8, k // SPAN, 4).transpose(0, 3, 2, 4, 1)
    return {
        "weight": np.ascontiguousarray(c).reshape(n // ROWS, k // SPAN, 32, 16),
        "scale": np.ascontiguousarray(s).reshape(n // ROWS, k // SPAN, 32, 2),
        "global_scale": t["global_scale"],
    }


def unpack(t: Arrays) -> dict[str, np.ndarray]:
    """Undoes `pack`."""
    tiles, spans = t["weight"].shape[:2]
    c = t["weight"].reshape(tiles, spans, 8, 4, 4, 2, 2).transpose(0, 6, 2, 1, 3, 4, 5)
    s = t["scale"].reshape(tiles, spans, 8, 4, 2).transpose(0, 4, 2, 1, 3)
    return {
        "weight": np.ascontiguousarray(c).reshape(tiles * ROWS, spans * SPAN // 2),
        "scale": np.ascontiguousarray(s).reshape(tiles * ROWS, spans * SPAN // 16),
        "global_scale": t["global_scale"],
    }

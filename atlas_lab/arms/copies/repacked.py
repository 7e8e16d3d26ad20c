"""NVFP4 in the order in which the lanes of a warp multiply it: loads of 16 bytes a lane, no shuffle afterwards."""

from __future__ import annotations

import ml_dtypes
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
from atlas_lab.kernels.lang.lanes import MOVES
from atlas_lab.kernels.quantize import repack

ROWS, SPAN, UNIT = repack.ROWS, repack.SPAN, repack.UNIT
# Scale bytes of the copy by e4m3 code: 2^(e - 10) times 1.m in 5 and 3 bits, subnormals normalised, 0 as the smallest.
_RECODED = np.array([8, 8, 16, 20, 24, 26, 28, 30, *range(32, 152)], np.uint8)
_STORED = np.zeros(256, np.uint8)
_STORED[_RECODED[1:]] = np.arange(1, 128)


def can_repack(p: Projection) -> Verdict:
    """NVFP4 of either convention, K a multiple of 128."""
    return two_level(p, k_multiple=SPAN)


def repacked_nvfp4(p: Projection) -> Derived:
    """`weight` u8 `[ceil(N/16), K/128, 1152]`, `global_scale` as stored. Key `nvfp4_lanes`. Raises CopyError.

    A unit of 1152 bytes is 16 rows by 128 columns as `repack_nvfp4` describes it: 16 bytes a lane of codes, twice, and
    4 of block scales. Rows past N are zero. A code under a block scale of 0 becomes 0, which is what it stands for.
    """
    require(can_repack(p), "repacked NVFP4", p)
    w, n, k = p.weight, p.n, p.k
    tiles, across = -(-n // ROWS), k // SPAN

    def dequantize(t: Arrays) -> np.ndarray:
        return get(w.format).dequantize(unpack(t, n))

    def device(call: BuildCall) -> list[Launch]:
        s, o = call.source, call.out
        args = (s.weight, s.scale, o.weight, tiles * across, n, k)
        grid = -(-tiles * across * 32 // repack.THREADS)
        shuffle = Launch(repack.repack_nvfp4, grid=grid, block=repack.THREADS, args=args, label="repack")
        return [shuffle, copied(s.global_scale, o.global_scale)]

    return Derived(
        named("nvfp4_lanes", p),
        source=w.packed,
        build=pack,
        dequantize=dequantize,
        device=device,
        weight=Tensor("u8", (tiles, across, UNIT)),
        global_scale=w["global_scale"],
    )


def pack(t: Arrays) -> dict[str, np.ndarray]:
    """Stored tensors by field to the repacked ones."""
    n, k = t["weight"].shape[0], 2 * t["weight"].shape[1]
    tiles, across = -(-n // ROWS), k // SPAN
    below = ((0, tiles * ROWS - n), (0, 0))
    scale = np.pad(t["scale"].view(np.uint8), below)
    codes = np.pad(np.ascontiguousarray(t["weight"]), below).view("<u4").reshape(-1, k // 16, 2)
    codes = np.where(scale[..., None] == 0, np.uint32(0), codes)
    # tile, half, row, unit, block, group, word -> tile, unit, block, lane = (row, group), word, half
    c = codes.reshape(tiles, 2, 8, across, 2, 4, 2).transpose(0, 3, 4, 2, 5, 6, 1).reshape(tiles, across, 2, 32, 2, 2)
    words = np.zeros((tiles, across, 2, 32, 2, 2), np.uint32)
    for half, word, rotation, mask in MOVES:
        words[..., word] |= rotated_left(c[..., half], rotation) & np.uint32(mask)
    s = _RECODED[scale].reshape(tiles, 2, 8, across, 2, 4).transpose(0, 3, 2, 5, 4, 1).reshape(tiles, across, -1)
    parts = (words.reshape(tiles, across, -1).view(np.uint8), s)
    return {"weight": np.concatenate(parts, axis=2), "global_scale": t["global_scale"]}


def unpack(t: Arrays, n: int) -> dict[str, np.ndarray]:
    """Undoes `pack`, to `n` rows; a scale of 0 comes back as the smallest, over codes of 0."""
    tiles, across = t["weight"].shape[:2]
    words = np.ascontiguousarray(t["weight"][..., : 512 * 2]).view("<u4").reshape(tiles, across, 2, 32, 2, 2)
    c = np.zeros_like(words)
    for half, word, rotation, mask in MOVES:
        c[..., half] |= rotated_left(words[..., word] & np.uint32(mask), (32 - rotation) % 32)
    codes = c.reshape(tiles, across, 2, 8, 4, 2, 2).transpose(0, 6, 3, 1, 2, 4, 5)
    scale = _STORED[t["weight"][..., 512 * 2 :]].reshape(tiles, across, 8, 4, 2, 2).transpose(0, 5, 2, 1, 4, 3)
    return {
        "weight": np.ascontiguousarray(codes).reshape(tiles * ROWS, -1).view(np.uint8)[:n],
        "scale": np.ascontiguousarray(scale).reshape(tiles * ROWS, -1)[:n].view(ml_dtypes.float8_e4m3fn),
        "global_scale": t["global_scale"],
    }


def rotated_left(words: np.ndarray, count: int) -> np.ndarray:
    """Rotated to the left by `count` bits."""
    return words if count == 0 else words << np.uint32(count) | words >> np.uint32(32 - count)

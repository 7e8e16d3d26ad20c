"""Q4_K in the order in which the lanes of a warp multiply it: no shuffle afterwards."""

from __future__ import annotations

import numpy as np

from atlas_lab.arms.copies.repacked import rotated_left
from atlas_lab.arms.copies.shapes import multiples, require
from atlas_lab.core.building import BuildCall
from atlas_lab.core.declare import Arrays, Derived
from atlas_lab.core.launch import Launch
from atlas_lab.core.projection import Projection
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.verdict import Verdict, no
from atlas_lab.formats import get
from atlas_lab.formats.q4_k import codes, pack_scales, unpack_scales
from atlas_lab.kernels.quantize import repack_q4_k as repack

ROWS, SPAN, BYTES, UNIT = repack.ROWS, repack.SPAN, repack.BYTES, repack.UNIT
SCALES, REST, PLACES = repack.SCALES, repack.REST, repack.PLACES


def can_repack_q4_k(p: Projection) -> Verdict:
    """Q4_K, whose K is a multiple of 256."""
    if p.weight.format != "q4_k":
        return no("source", "made of Q4_K", found=p.weight.format, allowed="q4_k")
    return multiples(p, k_multiple=SPAN)


def repacked_q4_k(p: Projection) -> Derived:
    """`weight` u8 `[ceil(N/16), K/256, 2304]`. Key `q4_k_lanes`. Raises CopyError.

    A unit of 2304 bytes is 16 rows by 256 columns, one block of each row, as `repack_q4_k` describes it: 8 bytes a
    lane of codes, eight times, then scales and minimums of 6 bits, d and dmin as stored. Rows past N are zero.
    """
    require(can_repack_q4_k(p), "repacked Q4_K", p)
    n, k = p.n, p.k
    tiles, across = -(-n // ROWS), k // SPAN

    def dequantize(t: Arrays) -> np.ndarray:
        return get("q4_k").dequantize(unpack(t, n))

    def device(call: BuildCall) -> list[Launch]:
        args = (call.source.blocks, call.out.weight, tiles * across, n, k)
        grid = -(-tiles * across * 32 // repack.THREADS)
        return [Launch(repack.repack_q4_k, grid=grid, block=repack.THREADS, args=args, label="repack")]

    return Derived(
        "q4_k_lanes",
        source=p.weight.packed,
        build=pack,
        dequantize=dequantize,
        device=device,
        weight=Tensor("u8", (tiles, across, UNIT)),
    )


def pack(t: Arrays) -> dict[str, np.ndarray]:
    """`blocks` u8 `[N, K/256 x 144]` to `weight` u8 `[ceil(N/16), K/256, 2304]`."""
    n = t["blocks"].shape[0]
    tiles = -(-n // ROWS)
    blocks = np.pad(t["blocks"], ((0, tiles * ROWS - n), (0, 0))).reshape(-1, BYTES)
    across = blocks.shape[0] // (tiles * ROWS)
    q = codes(blocks).astype(np.uint32).reshape(-1, 8, 4, 8)  # block, group, run, column
    words = np.zeros(q.shape[:3], np.uint32)
    for i, place in enumerate(PLACES):
        words |= rotated_left(q[..., i], place)
    # tile, half, row, unit, group, run -> tile, unit, group, lane = (row, run), half
    words = words.reshape(tiles, 2, 8, across, 8, 4).transpose(0, 3, 4, 2, 5, 1)
    sc, m = unpack_scales(blocks[:, 4:16])
    # of groups, the even before the odd ones
    both, low = ((a.reshape(-1, 4, 2).transpose(0, 2, 1)) for a in (sc | m >> 4 << 6, m & 15))
    # tile, half, row, unit, ... -> tile, unit, row, half, ...
    scales = both.reshape(tiles, 2, 8, across, 8).transpose(0, 3, 2, 1, 4)
    low = low.reshape(tiles, 2, 8, across, 8)
    head = np.ascontiguousarray(blocks[:, :4]).view("<u2").reshape(tiles, 2, 8, across, 2).transpose(0, 3, 2, 4, 1)
    rest = (low[:, 0] | low[:, 1] << 4).transpose(0, 2, 1, 3)
    parts = [a.reshape(tiles, across, -1).view(np.uint8) for a in (words, scales)]
    ends = [head.reshape(tiles, across, 8, 4).view(np.uint8), rest]
    return {"weight": np.concatenate([*parts, np.concatenate(ends, axis=3).reshape(tiles, across, -1)], axis=2)}


def unpack(t: Arrays, n: int) -> dict[str, np.ndarray]:
    """Undoes `pack`, to `n` rows."""
    tiles, across = t["weight"].shape[:2]
    words = np.ascontiguousarray(t["weight"][..., :SCALES]).view("<u4").reshape(tiles, across, 8, 8, 4, 2)
    words = words.transpose(0, 5, 3, 1, 2, 4).reshape(-1, 8, 4)
    q = np.stack([rotated_left(words, 32 - place) & np.uint32(15) for place in PLACES], axis=3).astype(np.uint8)
    q = q.reshape(-1, 4, 2, 32)
    both = t["weight"][..., SCALES:REST].reshape(tiles, across, 8, 2, 2, 4).transpose(0, 3, 2, 1, 5, 4).reshape(-1, 8)
    rest = t["weight"][..., REST:].reshape(tiles, across, 8, 16)
    head = np.ascontiguousarray(rest[..., :8]).view("<u2").reshape(tiles, across, 8, 2, 2).transpose(0, 4, 2, 1, 3)
    low = np.stack([rest[..., 8:] & 15, rest[..., 8:] >> 4], axis=1).reshape(tiles, 2, across, 8, 2, 4)
    low = low.transpose(0, 1, 3, 2, 5, 4).reshape(-1, 8)
    parts = (
        np.ascontiguousarray(head).reshape(-1, 2).view(np.uint8),
        pack_scales(both & 63, low | both >> 6 << 4),
        (q[:, :, 0] | q[:, :, 1] << 4).reshape(-1, SPAN // 2),
    )
    return {"blocks": np.concatenate(parts, axis=1).reshape(tiles * ROWS, -1)[:n]}

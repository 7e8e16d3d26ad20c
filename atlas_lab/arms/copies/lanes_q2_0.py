"""Q2_0 in the order in which the lanes of a warp multiply it: a load of 16 bytes a lane, no shuffle afterwards."""

from __future__ import annotations

import numpy as np

from atlas_lab.arms.copies.shapes import multiples, require
from atlas_lab.core.building import BuildCall
from atlas_lab.core.declare import Arrays, Derived
from atlas_lab.core.launch import Launch
from atlas_lab.core.projection import Projection
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.verdict import Verdict, no
from atlas_lab.formats import get
from atlas_lab.kernels.quantize import repack_q2_0 as repack

ROWS, SPAN, CODES = repack.ROWS, repack.SPAN, repack.CODES
EXCHANGES = tuple(zip(repack.SHIFTS, repack.MASKS, strict=True))


def can_repack_q2_0(p: Projection) -> Verdict:
    """Q2_0 of either group, K a multiple of 128."""
    if p.weight.family != "q2_0":
        return no("source", "made of Q2_0", found=p.weight.format, allowed="q2_0_g64 or q2_0_g128")
    return multiples(p, k_multiple=SPAN)


def repacked_q2_0(p: Projection) -> Derived:
    """`weight` u8 `[ceil(N/16), K/128, 576]` for groups of 64, `[.., 544]` for those of 128. Keys `q2_lanes_64`,
    `q2_lanes_128`. Raises CopyError.

    A unit of 576 or 544 bytes is 16 rows by 128 columns as `repack_q2_0` describes it: 16 bytes a lane of codes, then
    the f16 scales as stored. Rows past N are zero.
    """
    require(can_repack_q2_0(p), "repacked Q2_0", p)
    w, n, k = p.weight, p.n, p.k
    group = w.geometry.group
    tiles, across = -(-n // ROWS), k // SPAN

    def build(t: Arrays) -> dict[str, np.ndarray]:
        return pack(t, group)

    def dequantize(t: Arrays) -> np.ndarray:
        return get(w.format).dequantize(unpack(t, n))

    def device(call: BuildCall) -> list[Launch]:
        args = (call.source.blocks, call.out.weight, tiles * across, n, k)
        grid = -(-tiles * across * 32 // repack.THREADS)
        return [Launch(repack.repack_q2_0(group), grid=grid, block=repack.THREADS, args=args, label="repack")]

    return Derived(
        f"q2_lanes_{group}",
        source=w.packed,
        build=build,
        dequantize=dequantize,
        device=device,
        weight=Tensor("u8", (tiles, across, CODES + 2 * ROWS * SPAN // group)),
    )


def pack(t: Arrays, group: int) -> dict[str, np.ndarray]:
    """`blocks` u8 `[N, K/group x (2 + group/4)]` to `weight` u8 `[ceil(N/16), K/128, 512 + 4096/group]`."""
    n = t["blocks"].shape[0]
    tiles = -(-n // ROWS)
    blocks = t["blocks"].reshape(n, -1, 2 + group // 4)
    across, below = blocks.shape[1] * group // SPAN, ((0, tiles * ROWS - n), (0, 0))
    words = np.ascontiguousarray(blocks[..., 2:]).view("<u4").reshape(n, -1)
    words = np.pad(words, below, constant_values=repack.ZEROS)
    for shift, mask in EXCHANGES:
        words = _exchanged(words, shift, mask)
    # tile, half, row, unit, block, run -> tile, unit, lane = (row, run), block, half
    codes = words.reshape(tiles, 2, 8, across, 2, 4).transpose(0, 3, 2, 5, 4, 1).reshape(tiles, across, -1)
    d = np.pad(np.ascontiguousarray(blocks[..., :2]).view("<u2")[..., 0], below)
    scale = d.reshape(tiles, 2, 8, across, -1).transpose(0, 3, 2, 4, 1).reshape(tiles, across, -1)
    return {"weight": np.concatenate([codes.view(np.uint8), scale.view(np.uint8)], axis=2)}


def unpack(t: Arrays, n: int) -> dict[str, np.ndarray]:
    """Undoes `pack`, to `n` rows."""
    tiles, across, size = t["weight"].shape
    words = np.ascontiguousarray(t["weight"][..., :CODES]).view("<u4").reshape(tiles, across, 8, 4, 2, 2)
    for shift, mask in reversed(EXCHANGES):
        words = _exchanged(words, shift, mask)
    groups = (size - CODES) // (2 * ROWS)
    codes = np.ascontiguousarray(words.transpose(0, 5, 2, 1, 4, 3)).reshape(tiles * ROWS, across * groups, -1)
    scale = np.ascontiguousarray(t["weight"][..., CODES:]).view("<u2").reshape(tiles, across, 8, groups, 2)
    d = np.ascontiguousarray(scale.transpose(0, 4, 2, 1, 3)).reshape(tiles * ROWS, across * groups, 1)
    return {"blocks": np.concatenate([d.view(np.uint8), codes.view(np.uint8)], axis=2).reshape(tiles * ROWS, -1)[:n]}


def _exchanged(words: np.ndarray, shift: int, mask: int) -> np.ndarray:
    """The bits under `mask` in the places of those `shift` above, and the other way round: undoes itself."""
    moved = (words ^ words >> np.uint32(shift)) & np.uint32(mask)
    exchanged: np.ndarray = words ^ moved ^ moved << np.uint32(shift)
    return exchanged

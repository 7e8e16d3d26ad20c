"""The repacked Q4_K: its layout code by code, its way back, and the kernel that reads it."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from copy_cases import Files, projection

from atlas_lab.arms import copies
from atlas_lab.arms.copies.lanes_q4_k import pack, unpack
from atlas_lab.arms.copies.shapes import CopyError
from atlas_lab.core.launch import Launch, Program
from atlas_lab.core.tensor import Tensor
from atlas_lab.formats import get
from atlas_lab.formats.q4_k import codes, unpack_scales
from atlas_lab.kernels.gemv.mma_q4_k_lanes import HELD, mma_q4_k_lanes
from atlas_lab.kernels.quantize.repack_q4_k import PLACES
from atlas_lab.runtime.device import Device, open_device
from atlas_lab.testing.options import device_of


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with open_device(device_of(request.config)) as opened:
        yield opened


def stored(n: int, k: int) -> dict[str, np.ndarray]:
    """Blocks of every code, scale and minimum, under d of 0.001 to 0.1 and dmin of either sign."""
    blocks = Files(projection("ffn.up", n, k, "q4_k"), seed=n).arrays["layers.0.ffn.up.blocks"].reshape(-1, 144)
    rng = np.random.default_rng(n)
    head = rng.uniform(0.001, 0.1, (len(blocks), 2)) * rng.choice([-1, 1], (len(blocks), 2))
    blocks[:, :4] = head.astype(np.float16).view(np.uint8)
    return {"blocks": blocks.reshape(n, -1)}


def test_a_lane_s_words_are_its_rows_codes_and_scales_and_minimums_follow() -> None:
    n, k = 21, 512
    t = stored(n, k)
    blocks = np.pad(t["blocks"], ((0, 11), (0, 0))).reshape(-1, 144)
    q = codes(blocks).reshape(32, 2, 256)
    sc, m = (a.reshape(32, 2, 8) for a in unpack_scales(blocks[:, 4:16]))
    head = blocks[:, :4].copy().view(np.uint16).reshape(32, 2, 2)
    weight = pack(t)["weight"]
    assert weight.shape == (2, 2, 2304)
    for tile, unit in np.ndindex(2, 2):
        words = weight[tile, unit, :2048].view(np.uint32).reshape(8, 32, 2)
        for group, lane, second in np.ndindex(8, 32, 2):
            row, word = 16 * tile + lane // 4 + 8 * second, int(words[group, lane, second])
            found = [(word >> p | word << 32 - p) & 15 for p in PLACES]
            assert found == q[row, unit, 32 * group + 8 * (lane % 4) :][:8].tolist(), (row, group)
        scales = weight[tile, unit, 2048:2176].reshape(8, 2, 2, 4)
        rest = weight[tile, unit, 2176:].reshape(8, 16)
        for r, second, group in np.ndindex(8, 2, 8):
            row = 16 * tile + r + 8 * second
            byte, low = scales[r, second, group % 2, group // 2], rest[r, 8 + 4 * (group % 2) + group // 2]
            assert byte & 63 == sc[row, unit, group], (row, group)
            assert (byte >> 6) << 4 | low >> 4 * second & 15 == m[row, unit, group], (row, group)
            ends = rest[r, :8].view(np.uint16).reshape(2, 2)[:, second]
            assert ends.tolist() == head[row, unit].tolist(), row


def test_a_copy_has_the_bytes_of_its_blocks_and_gives_them_back() -> None:
    d = copies.repacked_q4_k(projection("ffn.up", 32, 512, "q4_k"))
    assert d.key == "q4_k_lanes"
    t = stored(32, 512)
    assert d.tensors["weight"].bytes == t["blocks"].nbytes
    for n in (1, 15, 16, 32):
        rows = {"blocks": t["blocks"][:n]}
        assert unpack(pack(rows), n)["blocks"].tobytes() == rows["blocks"].tobytes()
    assert copies.repacked_q4_k(projection("ffn.up", 17, 512, "q4_k")).tensors["weight"].shape == (2, 2, 2304)


def test_what_is_no_q4_k_is_refused() -> None:
    with pytest.raises(CopyError, match=r"layers\.0\.ffn\.up: no repacked Q4_K copy can be made: made of Q4_K"):
        copies.repacked_q4_k(projection("ffn.up", 16, 256, "q2_0_g64"))


@pytest.mark.parametrize(
    ("m", "n", "k", "warps", "depth", "tiles"), [(1, 41, 768, 2, 2, 1), (3, 72, 512, 4, 3, 2), (13, 40, 768, 2, 1, 2)]
)
def test_the_kernel_multiplies_by_what_the_copy_stands_for(
    device: Device, m: int, n: int, k: int, warps: int, depth: int, tiles: int
) -> None:
    t = stored(n, k)
    values = np.random.default_rng(m).standard_normal((m, k)).astype(ml_dtypes.bfloat16)
    packed = pack(t)["weight"]
    w, x, y = Tensor("u8", packed.shape, "w"), Tensor("bf16", (m, k), "x"), Tensor("bf16", (m, n), "y")
    grid = -(-n // (16 * tiles))
    launch = Launch(
        mma_q4_k_lanes(warps=warps, depth=depth, tiles=tiles, columns=1 if m <= 8 else 2, blocks=1),
        grid=grid,
        block=32 * warps,
        shared=warps * max(depth * HELD, 1280) * tiles,
        args=(w, w, w, x, y, m, n, k, n, n, 0, grid),
    )
    buffers = {a.name: device.allocate(a.bytes, "test", name=a.name) for a in (w, x, y)}
    device.upload(buffers["w"], packed)
    device.upload(buffers["x"], values)
    device.bind(Program("product", (launch,), inputs=(x,), outputs=(y,), persistent=(w,)), buffers).run()
    found = device.download(buffers["y"], "bf16", (m, n)).astype(np.float64)
    for b in buffers.values():
        device.check_guards(b)
        b.free()
    left, right = values.astype(np.float64), get("q4_k").dequantize(t)
    expected, magnitude = left @ right.T, np.abs(left) @ np.abs(right).T
    # one rounding to bf16, and those of the sums
    assert (np.abs(found - expected) <= 2.0**-8 * np.abs(expected) + k * 2.0**-23 * magnitude).all()

"""The repacked Q2_0: its layout code by code, its way back, and the kernel that reads it."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from copy_cases import Files, projection

from atlas_lab.arms import copies
from atlas_lab.arms.copies.lanes_q2_0 import pack, unpack
from atlas_lab.arms.copies.shapes import CopyError
from atlas_lab.core.launch import Launch, Program
from atlas_lab.core.tensor import Tensor
from atlas_lab.formats import get
from atlas_lab.kernels.gemv.mma_q2_0 import mma_q2_0
from atlas_lab.runtime.device import Device, open_device
from atlas_lab.testing.options import device_of

GROUPS = (64, 128)


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with open_device(device_of(request.config)) as opened:
        yield opened


def stored(n: int, k: int, group: int) -> dict[str, np.ndarray]:
    """Blocks of every code under scales of 0.001 to 0.1, of either sign."""
    p = projection("ffn.up", n, k, f"q2_0_g{group}")
    blocks = Files(p, seed=n).of(p)["blocks"].reshape(-1, 2 + group // 4)
    rng = np.random.default_rng(n)
    d = rng.uniform(0.001, 0.1, (len(blocks), 1)) * rng.choice([-1, 1], (len(blocks), 1))
    blocks[:, :2] = d.astype(np.float16).view(np.uint8)
    return {"blocks": blocks.reshape(n, -1)}


@pytest.mark.parametrize("group", GROUPS)
def test_a_lane_s_words_are_its_rows_codes_and_the_scales_follow_as_stored(group: int) -> None:
    n, k, groups = 21, 256, 128 // group
    t = stored(n, k, group)
    blocks = t["blocks"].reshape(n, k // group, -1)
    weight = pack(t, group)["weight"]
    assert weight.shape == (2, 2, 512 + 32 * groups)
    for tile, unit in np.ndindex(2, 2):
        words = weight[tile, unit, :512].view(np.uint32).reshape(32, 2, 2)
        d = weight[tile, unit, 512:].view(np.uint16).reshape(8, groups, 2)
        for lane, half, second in np.ndindex(32, 2, 2):
            row, word = 16 * tile + lane // 4 + 8 * second, int(words[lane, half, second])
            for c in range(16):
                column = 128 * unit + 64 * half + 16 * (lane % 4) + c
                byte, j = divmod(column % group, 4)
                expected = blocks[row, column // group, 2 + byte] >> 2 * j & 3 if row < n else 1
                assert word >> (c // 2 * 2 + c % 2 * 16) & 3 == expected, (row, column)
        for r, g, second in np.ndindex(8, groups, 2):
            row = 16 * tile + r + 8 * second
            expected = blocks[row, groups * unit + g, :2].view(np.uint16) if row < n else 0
            assert d[r, g, second] == expected, (row, g)


@pytest.mark.parametrize("group", GROUPS)
def test_a_copy_has_a_key_of_its_group_and_the_bytes_of_its_blocks(group: int) -> None:
    d = copies.repacked_q2_0(projection("ffn.up", 32, 256, f"q2_0_g{group}"))
    assert d.key == f"q2_lanes_{group}"
    t = stored(32, 256, group)
    assert d.tensors["weight"].bytes == t["blocks"].nbytes
    for n in (1, 15, 16, 32):
        rows = {"blocks": t["blocks"][:n]}
        assert unpack(pack(rows, group), n)["blocks"].tobytes() == rows["blocks"].tobytes()


def test_what_is_no_q2_0_of_a_whole_number_of_units_is_refused() -> None:
    with pytest.raises(CopyError, match=r"layers\.0\.ffn\.up: no repacked Q2_0 copy can be made: K must be a multiple"):
        copies.repacked_q2_0(projection("ffn.up", 16, 64, "q2_0_g64"))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    ("m", "n", "k", "warps", "depth", "tiles"), [(1, 41, 768, 2, 2, 1), (3, 72, 512, 4, 3, 2), (13, 40, 384, 2, 3, 2)]
)
def test_the_kernel_multiplies_by_what_the_copy_stands_for(
    device: Device, group: int, m: int, n: int, k: int, warps: int, depth: int, tiles: int
) -> None:
    t = stored(n, k, group)
    values = np.random.default_rng(m).standard_normal((m, k)).astype(ml_dtypes.bfloat16)
    packed = pack(t, group)["weight"]
    w, x, y = Tensor("u8", packed.shape, "w"), Tensor("bf16", (m, k), "x"), Tensor("bf16", (m, n), "y")
    grid = -(-n // (16 * tiles))
    launch = Launch(
        mma_q2_0(group=group, warps=warps, depth=depth, tiles=tiles, columns=1 if m <= 8 else 2, blocks=1),
        grid=grid,
        block=32 * warps,
        shared=warps * depth * tiles * (512 + 128 * (128 // group)),
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
    left, right = values.astype(np.float64), get(f"q2_0_g{group}").dequantize(t)
    expected, magnitude = left @ right.T, np.abs(left) @ np.abs(right).T
    # one rounding to bf16, and those of the sums
    assert (np.abs(found - expected) <= 2.0**-8 * np.abs(expected) + k * 2.0**-23 * magnitude).all()

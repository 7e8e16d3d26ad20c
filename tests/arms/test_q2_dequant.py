"""Q2_0 made BF16 by a launch before the GEMM on warpgroups: bits, awkward shapes, tiles cut along K, no early start."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from atlas_lab import simt
from atlas_lab.arms import atlas_arms
from atlas_lab.arms.wgmma.tiles import Tile
from atlas_lab.core.target import shipped_targets
from atlas_lab.experiments import oracle
from atlas_lab.experiments.case import Case, base_context
from atlas_lab.experiments.parity import run, run_case
from atlas_lab.formats import get
from atlas_lab.kernels.quantize.q2_0_bf16 import PIECE, THREADS, dequantize_q2_0
from atlas_lab.runtime.device import open_device

ARM = {a.name: a for a in atlas_arms()}["q2_dequant"]
HOPPER = next(t for t in shipped_targets() if t.arch == "sm_90a")
GROUPS = pytest.mark.parametrize("group", [64, 128])


def case_of(m: int, n: int, k: int, group: int) -> Case:
    return Case(ARM.name, ("ffn.up",), m, n, k, f"q2_0_g{group}", values="plain")


@GROUPS
def test_weights_are_code_times_rounded_scale_bit_for_bit(group: int) -> None:
    """All codes, scales of either sign, subnormal, the largest; more threads than pieces, more flags than threads."""
    rng = np.random.default_rng(group)
    n, k = 5, 3 * group
    scales = (rng.standard_normal((n, 3)) * 2.0 ** rng.integers(-20, 10, (n, 3))).astype(np.float16)
    scales[0] = 65504, 2.0**-24, 0
    blocks = rng.integers(0, 256, (n, 3, 2 + group // 4), np.uint8)
    blocks[..., :2] = scales[..., None].view(np.uint8)
    blocks = blocks.reshape(n, -1)
    pieces, words = n * k // PIECE, 700
    given, out = simt.Buffer("blocks", blocks.nbytes, data=blocks), simt.Buffer("out", 2 * n * k)
    flags = simt.Buffer("flags", 4 * 704)
    grid = -(-pieces // THREADS)
    simt.run(dequantize_q2_0(group), grid=grid, block=THREADS, args=(given, out, flags, pieces, words))
    values = get(f"q2_0_g{group}").dequantize({"blocks": blocks})
    found = out.array(ml_dtypes.bfloat16, (n, k)).astype(np.float32)
    assert np.array_equal(found, values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32))
    assert not flags.array(np.uint32, (704,))[:words].any()


@pytest.mark.parametrize(("m", "n", "k"), [(17, 8, 128), (67, 77, 384), (100, 136, 256)])
@GROUPS
def test_awkward_shapes(m: int, n: int, k: int, group: int, device) -> None:
    result = run_case(case_of(m, n, k, group), ARM, device, base_context(device.target))
    assert result.ok, result.sentence
    assert result.launches == 2


def test_tiles_cut_along_k(monkeypatch) -> None:
    """The launch that makes weights clears the flags by which blocks meet."""
    monkeypatch.setattr(Tile, "cut", lambda *a: True)
    target = replace(HOPPER, sms=2)
    with open_device("interpreter", target) as device:
        result = run_case(case_of(33, 16, 1024, 64), ARM, device, base_context(target))
        first, second = (run(case_of(33, 16, 1024, 64), ARM, device, base_context(target)).out for _ in range(2))
    assert result.ok, result.sentence
    assert oracle.same_bits(first, second)


def test_a_product_that_may_start_while_weights_are_made_is_reported(monkeypatch) -> None:
    lower = ARM.lower
    monkeypatch.setattr(ARM, "lower", lambda c: [lower(c)[0], replace(lower(c)[1], pdl=True)])
    with open_device("interpreter", HOPPER) as device, pytest.raises(simt.Unwaited, match="w"):
        run(case_of(17, 8, 128, 64), ARM, device, base_context(HOPPER))


def test_weights_are_scratch_that_a_plan_counts() -> None:
    """Of the product's kernels none is one that bf16_wgmma does not have."""
    bf16 = {a.name: a for a in atlas_arms()}["bf16_wgmma"]
    assert set(ARM.kernels) - set(bf16.kernels) == {dequantize_q2_0(64), dequantize_q2_0(128)}
    with open_device("interpreter", HOPPER) as device:
        ran = run(case_of(17, 40, 256, 128), ARM, device, base_context(HOPPER))
    assert 2 * 40 * 256 in {t.bytes for t in ran.program.temporaries}

"""W4A4 on Hopper in BF16: activations as the formats quantize them, scales of a checkpoint, numbers that are none."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from atlas_lab import simt
from atlas_lab.arms import atlas_arms
from atlas_lab.arms.copies import repacked_nvfp4
from atlas_lab.arms.copies.input_scale import input_scale
from atlas_lab.arms.copies.shapes import CopyError
from atlas_lab.core.target import shipped_targets
from atlas_lab.core.tensor import Tensor
from atlas_lab.experiments import case as cases
from atlas_lab.experiments import parity, values
from atlas_lab.experiments.case import Case, base_context, route_of, site_of, verdict_of
from atlas_lab.experiments.parity import run_case
from atlas_lab.formats import nvfp4_groups
from atlas_lab.kernels.quantize.lanes_order import THREADS, order_grid
from atlas_lab.kernels.quantize.nvfp4 import EACH, quantize_nvfp4
from atlas_lab.kernels.quantize.nvfp4_lanes import quantize_nvfp4_lanes
from atlas_lab.runtime.errors import LoadError

ARMS = {a.name: a for a in atlas_arms()}
ARM = ARMS["nvfp4_w4a4_emulated"]
HOPPER = next(t for t in shipped_targets() if t.arch == "sm_90a")
SCALES = [None, np.float32(0.0371)]
TIES = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -0.75, -1.75, -2.5, -5, -6, -0.0, 0.1])


def activations(m: int, k: int) -> np.ndarray:
    """BF16 over all magnitudes that scales reach and some beyond, zeros and ties among them."""
    rng = np.random.default_rng(m)
    x = rng.standard_normal((m, k)) * 2.0 ** np.repeat(rng.integers(-16, 14, (m, k // 16)), 16, axis=1)
    x[:, :16] = 0
    for i in range(m):
        x[i, 16:32] = TIES * (1, 2.0**-9, 448)[i % 3]
    return x.astype(ml_dtypes.bfloat16)


def buffers(x: np.ndarray, scale: np.float32 | None) -> list[simt.Buffer]:
    given = [simt.Buffer("x", x.nbytes, data=x)]
    return given if scale is None else [*given, simt.Buffer("scale", 4, data=np.asarray(scale))]


def ordered(x: np.ndarray, run: int) -> np.ndarray:
    """Rows in the order of lanes that own `run` K each: pair q of every run."""
    return x.reshape(len(x), -1, 4, run // 2, 2).swapaxes(2, 3).reshape(x.shape)


def in_lanes(x: np.ndarray, scale: np.float32 | None, run: int) -> np.ndarray:
    (m, k), words = x.shape, 700
    out, flags = simt.Buffer("out", x.nbytes), simt.Buffer("flags", 4 * words)
    kernel = quantize_nvfp4_lanes(run, scaled=scale is not None)
    args = (*buffers(x, scale), out, flags, k, words)
    simt.run(kernel, grid=order_grid(m, k, run), block=THREADS, args=args)
    assert not flags.array(np.uint32, (words,)).any()
    return out.array(ml_dtypes.bfloat16, (m, k)).astype(np.float64)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("m", "k"), [(1, 32), (5, 144), (3, 1040)])
def test_codes_and_scales_are_those_of_the_host(m: int, k: int, scale: np.float32 | None) -> None:
    x = activations(m, k)
    codes, scales = simt.Buffer("codes", m * k // 2), simt.Buffer("scales", m * k // 16)
    count = m * k // EACH
    args = (*buffers(x, scale), codes, scales, count)
    simt.run(quantize_nvfp4(scaled=scale is not None), grid=-(-count // THREADS), block=THREADS, args=args)
    expected = nvfp4_groups.quantize(x.astype(np.float32), nvfp4_groups.ONE if scale is None else scale)
    assert np.array_equal(codes.array(np.uint8, (m, k // 2)), expected[0])
    assert np.array_equal(scales.array(np.uint8, (m, k // 16)), expected[1].view(np.uint8))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("run", [16, 32])
@pytest.mark.parametrize(("m", "chunks"), [(1, 1), (4, 5)])
def test_in_the_lanes_order_they_are_the_same_numbers(m: int, chunks: int, run: int, scale: np.float32 | None) -> None:
    x = activations(m, 4 * run * chunks)
    codes, scales = nvfp4_groups.quantize(x.astype(np.float32), nvfp4_groups.ONE if scale is None else scale)
    assert np.array_equal(in_lanes(x, scale, run), ordered(nvfp4_groups.dequantize(codes, scales), run))


def test_a_nan_makes_its_group_one_and_infinity_is_the_largest_value() -> None:
    x = activations(2, 64)
    x[0, 18], x[1, 37], x[1, 38] = np.nan, np.inf, -np.inf
    found = in_lanes(x, None, 16)
    marked = ordered(np.repeat([[0, 1, 0, 0], [0, 0, 0, 0]], 16, axis=1), 16)
    assert np.array_equal(np.isnan(found), marked == 1)
    assert sorted(found[1][np.abs(found[1]) == 2688]) == [-2688, 2688]
    codes, scales = simt.Buffer("codes", 64), simt.Buffer("scales", 8)
    simt.run(quantize_nvfp4(), grid=1, block=THREADS, args=(*buffers(x, None), codes, scales, 16))
    assert list(np.flatnonzero(scales.array(np.uint8, (8,)) == 0x7F)) == [1]


@pytest.fixture
def scaled(monkeypatch):
    """Weights come with a tensor scale of activations, by its name; a function sets it."""
    of_weight, held = cases.weight_source, {}

    def weight_source(prefix: str, case: Case):
        found = tuple((name, Tensor("f32", a.shape, f"{prefix}.{name}")) for name, a in held.items())
        return replace(of_weight(prefix, case), activation=found)

    def read(self, t: Tensor) -> np.ndarray:
        return held.get(t.name.rpartition(".")[2], self.arrays.get(t.name))

    monkeypatch.setattr(cases, "weight_source", weight_source)
    monkeypatch.setattr(values.Stored, "read", read)
    return lambda name, value, shape=(): held.update({name: np.full(shape, value, np.float32)})


@pytest.mark.parametrize(
    ("form", "name", "value", "shape"),
    [
        ("nvfp4", "input_scale", 0.0123, ()),
        ("nvfp4", "input_scale", 2.0**-20, (1,)),
        ("nvfp4_ct", "input_global_scale", 77.7, (1,)),
        ("nvfp4_ct", "input_scale", 0.3, ()),
    ],
)
def test_the_scale_of_a_checkpoint(form: str, name: str, value: float, shape, device, scaled) -> None:
    scaled(name, value, shape)
    case, base = Case(ARM.name, ("ffn.up",), 17, 40, 128, form), base_context(device.target)
    result = run_case(case, ARM, device, base)
    assert result.ok, result.sentence
    assert [d.key.partition("_reciprocal")[0] for d in route_of(case, ARM, base).declarations] == [
        "nvfp4_lanes",
        "input_scale",
    ]
    ran = parity.run(case, ARM, device, base)
    other = replace(case, arm="nvfp4_wgmma")
    alone = parity.run(other, ARMS["nvfp4_wgmma"], device, base)
    assert not np.array_equal(ran.out, alone.out)


def test_a_scale_that_saturates_all_activations_is_seen(device, scaled) -> None:
    """At 2^-20 nothing but the largest value of each group remains of normal numbers: signs times 2688."""
    scaled("input_scale", 2.0**-20)
    case = Case(ARM.name, ("ffn.up",), 17, 8, 128, "nvfp4", values="plain")
    ran = parity.run(case, ARM, device, base_context(device.target))
    assert np.abs(ran.out.astype(np.float64)).max() < 2.0**-20 * 2688 * 128
    assert np.abs(ran.out.astype(np.float64)).max() > 0


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf, 1e-40])
def test_a_scale_that_is_none_is_refused(value: float, device, scaled) -> None:
    scaled("input_scale", value)
    case = Case(ARM.name, ("ffn.up",), 17, 8, 128, "nvfp4")
    with pytest.raises((LoadError, ValueError), match="expected a scale of 2\\^-126 or more that is finite"):
        parity.run(case, ARM, device, base_context(device.target))


def test_two_scales_and_scales_of_other_shapes_are_refused(scaled) -> None:
    case, base = Case(ARM.name, ("ffn.up",), 17, 8, 128, "nvfp4"), base_context(HOPPER)
    scaled("input_scale", 1, (2,))
    assert "scales activations by one f32 (found input_scale f32[2]" in str(verdict_of(case, ARM, base))
    scaled("input_scale", 1)
    scaled("input_global_scale", 1)
    assert not verdict_of(case, ARM, base)
    with pytest.raises(CopyError, match=r"layers\.0\.ffn\.up: no scale of its input can be made"):
        input_scale(site_of(case).projections[0])


def test_it_reads_the_copy_that_decode_reads() -> None:
    (p,) = site_of(Case(ARM.name, ("ffn.up",), 17, 40, 256, "nvfp4")).projections
    (mine,) = ARM.finalize(p, base_context(HOPPER))
    assert mine.identity == repacked_nvfp4(p).identity


def test_it_runs_only_where_it_is_named() -> None:
    assert ARM.accuracy is not None
    elsewhere = base_context(next(t for t in shipped_targets() if t.arch == "sm_120a"))
    assert not verdict_of(Case(ARM.name, ("ffn.up",), 17, 8, 128, "nvfp4"), ARM, elsewhere)

"""NVFP4 in GGML's blocks times block FP4: awkward shapes, every tile, blocks stored and shuffled, broken maps."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from atlas_lab import simt
from atlas_lab.arms import atlas_arms
from atlas_lab.core.launch import Launch
from atlas_lab.core.target import shipped_targets
from atlas_lab.experiments import case as cases
from atlas_lab.experiments import oracle, parity, values
from atlas_lab.experiments.case import Case, base_context, verdict_of
from atlas_lab.experiments.cases import launched
from atlas_lab.experiments.parity import run_case
from atlas_lab.formats import get
from atlas_lab.formats.block_nvfp4 import from_nvfp4
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.wgmma_block_nvfp4 import BLOCK, W_ROW, scales_of, weights
from atlas_lab.runtime.device import open_device

ARMS = {a.name: a for a in atlas_arms()}
ARM = ARMS["nvfp4_mmq"]
HOPPER = next(t for t in shipped_targets() if t.arch == "sm_90a")
SOURCES = {"nvfp4": "nvfp4_mmq", "nvfp4_ct": "nvfp4_mmq", "block_nvfp4": "block_nvfp4_mmq"}


def case_of(m: int, n: int, k: int, form: str = "nvfp4") -> Case:
    return Case(SOURCES[form], ("ffn.up",), m, n, k, form)


def rows_of(m: int, n: int = 40) -> int:
    """Rows of x of the tile that serves so many."""
    return dict(launched(case_of(m, n, 256), ARM, base_context(HOPPER))[-1].spec.parameters)["bm"]


@L.kernel(launch_bounds=(128, 1))
def fragments(rows: L.In[L.u8], out: L.Out[L.u32]):
    """The 16 A fragments of 16 rows of four blocks, `[16, 32, 4]`."""
    tile = L.dynamic_shared(L.u8, 0)
    lane = L.lane_id()
    for i in range(lane, 144, 32):
        L.sts_v4_b32(tile, 16 * i, L.ldg_v4_b32(rows, 16 * i))
    L.cuda.syncwarp()
    at = L.i32((lane >> 2) * W_ROW + BLOCK * (lane & 3))
    upper, lower = scales_of(tile, at), scales_of(tile, at + 8 * W_ROW)
    for quarter in L.unroll(4):
        made = weights(tile, at, quarter, upper, lower)
        for j in L.unroll(4):
            L.stg_v4_b32(out, 128 * (4 * quarter + j) + 4 * lane, made[j])


def test_fragments_are_the_weights_exactly() -> None:
    """All codes under all block scales, in the order in which x is written: pairs of codes of a byte."""
    rng = np.random.default_rng(3)
    for first in range(0, 127, 32):
        scale = ((first + np.arange(256)) % 127).astype(np.uint8).reshape(16, 16).view(ml_dtypes.float8_e4m3fn)
        rows = from_nvfp4(rng.integers(0, 256, (16, 128), dtype=np.uint8), scale)
        out = simt.Buffer("out", 16 * 32 * 16)
        simt.run(
            fragments, grid=1, block=32, shared_bytes=2304, args=(simt.Buffer("rows", rows.nbytes, data=rows), out)
        )
        found = out.array(np.uint16, (16, 8, 4, 2, 2, 2))  # product, g, t, K half, row half, element
        made = (found.astype(np.uint32) << 16).view(np.float32).transpose(4, 1, 0, 3, 2, 5).reshape(16, 256)
        stored = get("block_nvfp4").dequantize({"blocks": rows})
        pairs = stored.reshape(16, 4, 4, 2, 8).swapaxes(-1, -2).reshape(16, 4, 32, 2)  # row, lane, pair, element
        assert np.array_equal(made, pairs.transpose(0, 2, 1, 3).reshape(16, 256))


@pytest.mark.parametrize("form", SOURCES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 256), (29, 136, 512)])
def test_awkward_shapes(m: int, n: int, k: int, form: str, device) -> None:
    case = case_of(m, n, k, form)
    result = run_case(case, ARMS[case.arm], device, base_context(device.target))
    assert result.ok, result.sentence


def test_the_smallest_tile_that_covers_the_rows() -> None:
    assert [rows_of(m) for m in (1, 16, 17, 32, 33, 64, 65, 128, 300)] == [16, 16, 32, 32, 64, 64, 128, 128, 128]


@pytest.mark.parametrize("m", [9, 31, 64, 131])
def test_every_tile_with_ragged_edges_on_one_multiprocessor(m: int) -> None:
    """A block takes several tiles, its ring goes around."""
    target = replace(HOPPER, sms=1)
    with open_device("interpreter", target) as device:
        result = run_case(case_of(m, 130, 1536 if m <= 64 else 512), ARM, device, base_context(target))
    assert result.ok, result.sentence


def test_stored_blocks_and_shuffled_ones_give_the_same_bits(monkeypatch, device) -> None:
    monkeypatch.setattr(values, "_generator", lambda case, what: np.random.default_rng(sum(what.encode())))
    outputs = []
    for form in ("nvfp4", "block_nvfp4"):
        case = case_of(20, 40, 512, form)
        outputs.append(parity.run(case, ARMS[case.arm], device, base_context(device.target)).out)
    assert oracle.same_bits(*outputs)


def test_blocks_without_a_tensor_scale(monkeypatch, device) -> None:
    """A GGUF file may have none beside them: it is 1."""
    of_weight = cases.weight_source

    def alone(prefix: str, case: Case):
        made = of_weight(prefix, case)
        return replace(made, fields=tuple((f, t) for f, t in made.fields if f == "blocks"))

    monkeypatch.setattr(cases, "weight_source", alone)
    case = case_of(17, 40, 256, "block_nvfp4")
    result = run_case(case, ARMS[case.arm], device, base_context(device.target))
    assert result.ok, result.sentence


def test_a_map_of_too_few_rows_is_reported(monkeypatch) -> None:
    lower = ARM.lower

    def spoiled(launch: Launch) -> Launch:
        x, w, *rest = launch.args
        return replace(launch, args=(x, replace(w, box=(64, W_ROW)), *rest))

    monkeypatch.setattr(ARM, "lower", lambda c: [*lower(c)[:-1], spoiled(lower(c)[-1])])
    with open_device("interpreter", HOPPER) as device, pytest.raises(simt.Deadlock, match=r"wgmma_ring\.py"):
        parity.run(case_of(17, 64, 256), ARM, device, base_context(HOPPER))


def test_rows_of_blocks_that_tma_cannot_load_are_refused() -> None:
    base = base_context(HOPPER)
    for form in SOURCES:
        case = case_of(17, 8, 320, form)
        assert "K must be a multiple of 256" in str(verdict_of(case, ARMS[case.arm], base))

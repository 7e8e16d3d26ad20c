"""Builds on the device against the host's, bit for bit; with --device=cuda on a GPU, at full size too."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from copy_cases import KINDS, Files, Kind, projection

from atlas_lab.arms import copies
from atlas_lab.core.building import build_program
from atlas_lab.core.declare import Derived
from atlas_lab.core.projection import Projection
from atlas_lab.core.residency import LoadPlan, derive_steps
from atlas_lab.kernels import lang as L
from atlas_lab.runtime.build import build
from atlas_lab.runtime.device import Device, open_device
from atlas_lab.runtime.load import execute
from atlas_lab.testing.options import device_of

FULL = (17408, 5120)
MIXES = {
    "fp8": ("fp8", {}, [(128, 128), (256, 128)]),
    "fp8-bf16-scales": ("fp8", {"scale": "bf16"}, [(128, 128), (128, 128)]),
    "fp8_tensor": ("fp8_tensor", {}, [(7, 24), (9, 24)]),
    "fp8_row": ("fp8_row", {}, [(7, 24), (9, 24), (3, 24)]),
    "nvfp4": ("nvfp4", {}, [(17, 48), (4, 48)]),
    "nvfp4_ct": ("nvfp4_ct", {}, [(16, 64), (8, 64), (8, 64)]),
    "bf16": ("bf16", {}, [(5, 33), (2, 33)]),
    "q8_0": ("q8_0", {}, [(5, 64), (2, 64)]),
}


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with open_device(device_of(request.config)) as opened:
        yield opened


def siblings(mix: str) -> tuple[Projection, ...]:
    fmt, dtypes, shapes = MIXES[mix]
    return tuple(projection(f"attn.{r}", n, k, fmt, **dtypes) for r, (n, k) in zip("qkv", shapes, strict=False))


def made_on(device: Device, d: Derived, files: Files) -> None:
    """Load `d` with its device build, and compare every bit with the host's."""
    plan = LoadPlan(derive_steps(d, ()))
    with execute(plan, files.read, lambda w, label: None, device, builds="device") as loaded:
        assert set(loaded) == {t.name for t in d.tensors.values()}
        for t, expected in build(d, "test", files.read):
            found = device.download(loaded[t.name], t.dtype, t.shape)
            assert found.tobytes() == expected.tobytes(), t
            device.check_guards(loaded[t.name])
    device.ledger.check_empty()


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_a_build_on_the_device_has_the_bits_of_the_host_s(device: Device, kind: Kind) -> None:
    for n, k in kind.shapes:
        p = projection("ffn.up", n, k, kind.fmt, **kind.dtypes)
        made_on(device, kind.make(p), Files(p, seed=n))


@pytest.mark.parametrize("mix", MIXES)
def test_fusing_on_the_device_has_the_bits_of_the_host_s(device: Device, mix: str) -> None:
    members = siblings(mix)
    made_on(device, copies.fused(members), Files(*members))


EXTREME = [("nvfp4", g) for g in (2.0**-126, 1.1754942e-38, 2.0**-140, 2.0**-149, 2.0**100)]
EXTREME += [("nvfp4_ct", g) for g in (2.0**-100, 2.0**100, 2.0**126, 3.4e38)]


@pytest.mark.parametrize(("fmt", "scale"), EXTREME)
def test_int8_of_extreme_scales(device: Device, fmt: str, scale: float) -> None:
    p = projection("ffn.down", 2, 64, fmt)
    files = Files(p)
    g = p.weight["global_scale"]
    files.arrays[g.name] = np.full(g.shape, scale, np.float32)
    made_on(device, copies.int8_32(p), files)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_full_size(device: Device, kind: Kind) -> None:
    p = projection("ffn.up", *FULL, kind.fmt, **kind.dtypes)
    made_on(device, kind.make(p), Files(p))


@pytest.mark.gpu
def test_the_driver_s_free_memory_moves_with_the_ledger() -> None:
    """Within the 2 MiB that the driver takes at a time for a buffer, and what kernels' code takes."""
    projections = [projection("ffn.down", 4096, 4096, "nvfp4", layer) for layer in range(8)]
    files = Files(*projections)
    with open_device("cuda", guards=False) as device:
        warm = LoadPlan(derive_steps(copies.int8_32(projections[0]), ()))
        execute(warm, files.read, lambda w, label: None, device).close()
        before = device.memory_info()[0]
        plan = LoadPlan(tuple(s for p in projections for s in derive_steps(copies.int8_32(p), ())))
        with execute(plan, files.read, lambda w, label: None, device) as loaded:
            taken = before - device.memory_info()[0]
            assert plan.steady <= taken <= plan.steady + len(loaded) * (2 << 20) + (8 << 20)
        assert abs(before - device.memory_info()[0]) <= 8 << 20


def kernels() -> list[L.Kernel]:
    found: dict[L.Kernel, None] = {}
    for kind in KINDS:
        for n, k in kind.shapes:
            d = kind.make(projection("ffn.up", n, k, kind.fmt, **kind.dtypes))
            found.update(dict.fromkeys(x.kernel for x in build_program(d).launches))
    for mix in MIXES:
        found.update(dict.fromkeys(x.kernel for x in build_program(copies.fused(siblings(mix))).launches))
    return list(found)


@pytest.mark.parametrize("kernel", kernels(), ids=lambda k: k.entry)
def test_build_kernels_compile_clean_everywhere(kernel: L.Kernel) -> None:
    assert L.compiler_missing() is None
    assert L.architectures(kernel.needs) == L.ARCHITECTURES
    for arch in L.ARCHITECTURES:
        assert list(L.check_kernel(kernel, arch)) == []


def test_a_part_reads_what_its_projection_would(device: Device) -> None:
    for mix in MIXES:
        members = siblings(mix)
        files = Files(*members)
        d = copies.fused(members)
        plan = LoadPlan(derive_steps(copies.part(members, members[0]), ()))
        with execute(plan, files.read, lambda w, label: None, device, builds="device") as loaded:
            assert set(loaded) == {t.name for t in d.tensors.values()}, "whoever binds a part keeps the whole"
            for p in members:
                part = copies.part(members, p)
                for field, t in part.tensors.items():
                    found = device.download(loaded[t.name], t.dtype, t.shape, t.offset)
                    assert found.tobytes() == files.arrays[p.weight[field].name].tobytes(), (mix, p.role, field)

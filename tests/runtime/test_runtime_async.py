"""Tensor maps and clusters on their way to a device: bound, encoded, packed, launched."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from runtime_kernels import first_tile, launch, ports, ranks, scale_rows

from atlas_lab.core.launch import Launch, Program
from atlas_lab.core.target import shipped_targets
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.kernels import lang as L
from atlas_lab.runtime import launcher, tensor_map
from atlas_lab.runtime.arguments import Packed, values
from atlas_lab.runtime.bind import Launched, MapPlace, Resolved, resolve
from atlas_lab.runtime.device import open_device
from atlas_lab.runtime.errors import BindError
from atlas_lab.runtime.interpreter import InterpreterDevice
from atlas_lab.simt import Unwaited

X, Y = Tensor("bf16", (24, 72), "x"), Tensor("u32", (64,), "y")
TILES = TensorMap(X.view(72 * 8 + 8, (16, 64), (72, 1)), (8, 16), 32, 256)


@pytest.fixture
def device():
    return open_device("interpreter")


def tile_launch(m: TensorMap = TILES, **more: Any) -> Launch:
    return Launch(first_tile, grid=1, block=64, args=(m, Y), shared=512, **more)


def test_a_map_is_bound_to_its_buffer_and_loaded_from(device):
    program = Program("tile", (tile_launch(),), inputs=(X,), outputs=(Y,))
    buffers = ports(device, program)
    (resolved,) = resolve(program, buffers, device)
    assert resolved.arguments[0] == MapPlace(buffers["x"], 72 * 16 + 16, 1024, TILES)
    x = np.arange(24 * 72, dtype=np.uint16)
    device.upload(buffers["x"], x)
    device.bind(program, buffers).run()
    rows = x.reshape(24, 72)[8:16, 8:24].reshape(8, 2, 8)
    rows[4:] = rows[4:, ::-1]  # the second line of 128 bytes: chunks exchange
    np.testing.assert_array_equal(device.download(buffers["y"], "u32", (64,)).view(np.uint16), rows.reshape(-1))


def test_a_map_of_a_buffer_too_small_is_refused(device):
    declared = Tensor("bf16", (1000,), "x")
    program = Program("tile", (tile_launch(),), inputs=(declared,), outputs=(Y,))
    with pytest.raises(BindError, match="argument 'm': buffer 'x' has 2000 bytes, expected at least 3456"):
        device.bind(program, ports(device, program))


@pytest.mark.parametrize("made", [tile_launch(), Launch(ranks, grid=4, block=32, args=(Y,), cluster=2)])
def test_a_card_without_them_is_refused(made):
    a100 = InterpreterDevice(next(t for t in shipped_targets() if t.name == "a100"))
    program = Program("p", (made,), inputs=(X,), outputs=(Y,))
    with pytest.raises(BindError, match="asks for clusters or tensor maps: found sm_80, expected sm_90 or later"):
        a100.bind(program, ports(a100, program))


def test_more_shared_memory_than_the_card_has_is_refused(device):
    program = Program("tile", (replace(tile_launch(), shared=232449),), inputs=(X,), outputs=(Y,))
    with pytest.raises(BindError, match=r"found 232449 bytes of dynamic shared memory, .* allows a block 232448"):
        device.bind(program, ports(device, program))


def test_clusters_run_on_the_interpreter(device):
    program = Program("p", (Launch(ranks, grid=(2, 4), block=32, args=(Y,), cluster=(1, 4)),), inputs=(), outputs=(Y,))
    buffers = ports(device, program)
    device.bind(program, buffers).run()
    found = device.download(buffers["y"], "u32", (8,))
    assert found.tolist() == [400 + r for r in (0, 0, 1, 1, 2, 2, 3, 3)]


def test_a_tile_of_what_the_launch_before_writes_is_loaded_after_the_wait(device):
    x = Tensor("bf16", (1024,), "x")
    m = TensorMap(x.view(0, (16, 64), (64, 1)), (8, 16), 32)
    early = Launch(first_tile, grid=1, block=64, args=(m, Y), shared=512, pdl=True)
    a = Tensor("bf16", (1024,), "a")
    program = Program("p", (launch(scale_rows, 1024, a, x, 1024, 1.0), early), inputs=(a,), outputs=(x, Y))
    buffers = ports(device, program)
    device.upload(buffers["a"], np.zeros(1024, np.uint16))
    with pytest.raises(Unwaited, match=r"this read of bytes \[0, 32\) of global buffer 'x' comes before grid_wait"):
        device.bind(program, buffers).run()


def encoded(monkeypatch: pytest.MonkeyPatch, m: TensorMap, address: int) -> tuple[Any, ...]:
    """What the driver is asked for a map of a buffer at `address`."""
    asked: list[tuple[Any, ...]] = []

    class Names:
        def __getattr__(self, name: str) -> str:
            return name

    names = ("DataType", "Interleave", "Swizzle", "L2promotion", "FloatOOBfill")
    enums = {f"CUtensorMap{name}": Names() for name in names}
    driver = SimpleNamespace(cuuint64_t=int, cuuint32_t=int, **enums)

    def call(*args: Any) -> Any:
        asked.append(args)
        return SimpleNamespace(opaque=list(range(16)))

    monkeypatch.setattr(tensor_map, "bindings", lambda: driver)
    monkeypatch.setattr(tensor_map, "call", call)
    place = MapPlace(SimpleNamespace(memory=address), m.view.offset, m.view.elements, m)
    words = tensor_map.encode(place, first_tile.params[0])
    assert words.dtype == np.uint64
    assert words.tolist() == list(range(16))
    return asked[0]


def test_what_the_driver_is_asked_to_encode(monkeypatch):
    what, function, *rest = encoded(monkeypatch, TILES, 0x1000)
    assert what == "argument 'm': encoding a tensor map of x: bf16[16, 64]"
    assert function == "cuTensorMapEncodeTiled"
    assert rest == [
        "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16", 2, 0x1000 + 72 * 16 + 16, [64, 16], [144], [16, 8], [1, 1],
        "CU_TENSOR_MAP_INTERLEAVE_NONE", "CU_TENSOR_MAP_SWIZZLE_32B", "CU_TENSOR_MAP_L2_PROMOTION_L2_256B",
        "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
    ]  # fmt: skip
    plain = TensorMap(Tensor("e4m3", (5, 4, 48), "t"), (1, 2, 32), promotion=0)
    rest = encoded(monkeypatch, plain, 0x2000)[2:]
    assert rest[:6] == ("CU_TENSOR_MAP_DATA_TYPE_UINT8", 3, 0x2000, [48, 4, 5], [48, 192], [32, 2, 1])
    assert rest[8:10] == ("CU_TENSOR_MAP_SWIZZLE_NONE", "CU_TENSOR_MAP_L2_PROMOTION_NONE")
    line = TensorMap(Tensor("f32", (100,), "v"), (64,), promotion=64)
    rest = encoded(monkeypatch, line, 0x2000)[2:]
    assert rest[:7] == ("CU_TENSOR_MAP_DATA_TYPE_FLOAT32", 1, 0x2000, [100], [16], [64], [1])
    with pytest.raises(BindError, match=r"argument 'm': .* found address 0x1008, expected a multiple of 16"):
        encoded(monkeypatch, plain, 0x1008)


def test_the_driver_has_every_name_that_is_asked_for():
    driver = pytest.importorskip("cuda.bindings.driver")
    for kind in tensor_map._TYPES.values():
        assert hasattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kind}")
    for swizzle in ("NONE", "32B", "64B", "128B"):
        assert hasattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}")
    for promotion in tensor_map._PROMOTIONS.values():
        assert hasattr(driver.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{promotion}")


def test_a_map_is_packed_by_value(monkeypatch):
    monkeypatch.setattr("atlas_lab.runtime.arguments.encode", lambda a, p: np.arange(16, dtype=np.uint64))
    place = MapPlace(SimpleNamespace(memory=0), 0, 1, TILES)
    packed = Packed(values((*first_tile.params, L.types.Parameter("", L.u8, "scalar", "n")), (place, 5, 7)))
    pointers = (ctypes.c_uint64 * 3).from_address(packed.address)
    assert all(p % 64 == 0 for p in pointers)
    assert ctypes.string_at(pointers[0], 128) == np.arange(16, dtype=np.uint64).tobytes()
    assert ctypes.string_at(pointers[2], 1) == b"\7"


def test_what_the_driver_is_handed_for_a_cluster(monkeypatch):
    driver = SimpleNamespace(
        CUlaunchAttribute=lambda: SimpleNamespace(id=None, value=SimpleNamespace(clusterDim=SimpleNamespace())),
        CUlaunchConfig=SimpleNamespace,
        CUlaunchAttributeID=SimpleNamespace(
            CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION=4
        ),
        cuLaunchKernelEx=lambda *args: handed.append(args) or (0,),
    )
    handed: list[Any] = []
    monkeypatch.setattr(launcher, "bindings", lambda: driver)
    monkeypatch.setattr(launcher, "values", lambda params, arguments: [])
    monkeypatch.setattr(launcher, "Packed", lambda values: SimpleNamespace(address=77))
    kernel, stream = SimpleNamespace(entry="tile", function=5), SimpleNamespace(handle=9)
    for pdl in (False, True):
        made = tile_launch(pdl=pdl) if pdl else Launch(ranks, grid=(4, 2), block=32, args=(Y,), cluster=(2, 2))
        launcher.PackedLauncher(kernel, Resolved(made, ()), stream, "here")()
    (first, *rest), (second, *_) = handed
    assert rest == [5, 77, 0]
    ((attribute,), count) = first.attrs, first.numAttrs
    extents = attribute.value.clusterDim
    assert (attribute.id, extents.x, extents.y, extents.z, count) == (4, 2, 2, 1, 1)
    assert (first.gridDimX, first.gridDimY, first.gridDimZ) == (4, 2, 1)
    assert [a.id for a in second.attrs] == [6]


def test_cuda_core_is_handed_the_grid_in_clusters_and_no_maps(monkeypatch):
    core = SimpleNamespace(LaunchConfig=lambda **config: made.append(config), launch=print)
    monkeypatch.setattr(launcher, "core", lambda: core)
    made: list[Any] = []
    kernel = SimpleNamespace(entry="tile", core=None)
    x = Resolved(Launch(ranks, grid=(4, 6), block=32, args=(Y,), cluster=(2, 3)), (1,))
    assert launcher.CoreLauncher(kernel, x, None, "here").launched == Launched("tile", (4, 6, 1), (32, 1, 1), 0)
    assert made == [{"grid": (2, 2, 1), "block": (32, 1, 1), "shmem_size": 0, "cluster": (2, 3, 1)}]
    mapped = Resolved(tile_launch(), (MapPlace(SimpleNamespace(memory=0), 0, 1, TILES), 1))
    with pytest.raises(BindError, match="here has a tensor map: found the launcher 'core', expected 'packed'"):
        launcher.CoreLauncher(kernel, mapped, None, "here")

"""mbarriers, the copy engine and clusters: what right kernels compute, on the interpreter and with `--device=cuda`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import async_kernels as kernels
import ml_dtypes
import numpy as np
import pytest
from ring import COLUMNS, ring, ring_expected, ring_input, ring_launch

from atlas_lab.core.launch import Launch, Program
from atlas_lab.core.target import shipped_targets
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.formats.dtypes import dtype as host
from atlas_lab.kernels import lang as L
from atlas_lab.runtime.device import Device, open_device
from atlas_lab.runtime.interpreter import InterpreterDevice
from atlas_lab.simt import Options

RNG = np.random.default_rng(5)
H200 = next(t for t in shipped_targets() if t.name == "h200")
WAYS = {
    "program": Options(),
    "unchecked": Options(checks=False),
    "one resident": Options(resident=1),
    **{f"random {i}": Options(order="random", late_async="random") for i in range(3)},
}


@pytest.fixture(params=[*WAYS, pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    if request.param == "cuda":
        if request.config.getoption("--device", "auto") != "cuda":
            pytest.skip("needs --device=cuda")
        with open_device("cuda") as opened:
            yield opened
    else:
        yield InterpreterDevice(H200, seed=len(request.param), options=WAYS[request.param])


def execute(device: Device, launch: Launch, inputs: dict[str, np.ndarray], outputs: dict[str, Tensor]) -> Any:
    """The outputs' whole buffers after the launch."""
    given = {name: Tensor(_dtype(a), a.shape, name) for name, a in inputs.items()}
    program = Program("async", (launch,), inputs=tuple(given.values()), outputs=tuple(outputs.values()))
    buffers = {t.name: device.allocate(t.bytes, "test", name=t.name) for t in program.buffers}
    for name, a in inputs.items():
        device.upload(buffers[name], a)
    device.bind(program, buffers).run()
    found = [device.download(buffers[name], t.dtype, t.shape) for name, t in outputs.items()]
    for b in buffers.values():
        device.check_guards(b)
        b.free()
    return found[0] if len(found) == 1 else found


def _dtype(a: np.ndarray) -> str:
    return next(n for n in ("bf16", "f16", "f32", "u8", "u32") if host(n).numpy == a.dtype)


@pytest.mark.parametrize(
    ("rows", "columns", "pitch", "grid", "stages", "warps"),
    [
        (32, 64, 64, 1, 3, 2),
        (75, 197, 200, 2, 3, 2),
        (129, 328, 328, 2, 2, 2),
        (1, 1, 8, 1, 3, 1),
        (40, 650, 656, 3, 3, 4),
    ],
)
def test_the_ring(device, rows, columns, pitch, grid, stages, warps):
    x = ring_input(rows, pitch, rows)
    view, out = (Tensor("bf16", (rows, columns), name, strides=(pitch, 1)) for name in "xy")
    launch = ring_launch(view, out, grid, stages, warps)
    y = execute(device, launch, {"x": x}, {"y": Tensor("bf16", (rows, pitch), "y")})
    np.testing.assert_array_equal(y[:, :columns].view(np.uint16), ring_expected(x)[:, :columns].view(np.uint16))
    assert (y[:, columns:].view(np.uint16) == 0xFFFF).all()  # still poison


@pytest.mark.parametrize("kernel", [ring(), ring(2, 4)], ids=lambda k: str(k.spec))
def test_the_ring_compiles(kernel, compiler):
    assert L.check_kernel(kernel, "sm_90a") == ()
    sass = L.sass(kernel, "sm_90a")
    assert all(
        op in sass for op in ("UTMALDG.2D", "UTMASTG.2D", "UTMACCTL.PF", "SYNCS.ARRIVE.TRANS64", "FENCE.VIEW.ASYNC")
    )
    text = L.ptx(kernel, "sm_90a")
    assert text.count(".param .align 64 .b8") == 2
    assert ".local" not in text


@pytest.fixture(scope="session")
def compiler() -> None:
    missing = L.compiler_missing()
    if missing:
        pytest.skip(missing)


# dtype, shape, box, swizzle, byte of shared memory, coordinate: the box of `show_tile` may lie outside on every side.
TILES = [
    ("bf16", (40, 100), (16, 64), 128, 0, 8),
    ("bf16", (40, 104), (16, 64), 128, 384, -8),
    ("bf16", (40, 99), (16, 64), 128, 0, 48),
    ("bf16", (20, 48), (24, 32), 64, 256, 16),
    ("f16", (20, 32), (10, 16), 32, 128, -8),
    ("u8", (33, 208), (7, 128), 128, 640, 96),
    ("f32", (9, 20), (5, 12), 0, 128, 4),
    ("f32", (9, 20), (5, 12), 0, 0, -20),
    ("bf16", (200,), (128,), 0, 0, 112),
    ("u8", (5, 3, 64), (2, 3, 32), 32, 0, 0),
    ("u8", (40, 3, 64), (2, 3, 32), 32, 0, 32),
    ("f16", (16, 3, 4, 64), (2, 2, 2, 64), 128, 0, 8),
    ("f32", (6, 3, 4, 5, 20), (2, 2, 1, 3, 8), 32, 0, 4),
]


def address(byte: np.ndarray, swizzle: int) -> np.ndarray:
    """Where a box's byte lies, from its address: 16-byte chunks exchange within 32, 64 or 128 bytes by the number of
    the 128-byte line."""
    chunk, line, within = byte // 16, byte // 128, max(swizzle // 16, 1)
    turned = chunk // within * within + (chunk % within ^ line % within)
    return turned * 16 + byte % 16


@pytest.mark.parametrize(("name", "shape", "box", "swizzle", "at", "where"), TILES)
def test_where_a_tile_lies(device, name, shape, box, swizzle, at, where):
    width = host(name).bytes
    inner = -(-shape[-1] * width // 16) * 16 // width
    x = RNG.integers(0, 255, (*shape[:-1], inner * width), np.uint8).view(host(name).numpy)
    view = Tensor(name, shape, "x", strides=tuple(s // width for s in x.strides))
    nbytes = int(np.prod(box)) * width
    launch = Launch(
        kernels.show_tile(L.types.SCALARS[name], len(shape), nbytes, at),
        grid=1,
        block=64,
        args=(TensorMap(view, box, swizzle), Tensor("u32", (nbytes // 4,), "y"), where),
        shared=at + nbytes + 8,
    )
    found = execute(device, launch, {"x": x}, {"y": Tensor("u32", (nbytes // 4,), "y")}).view(np.uint8)
    middle = {1: (), 2: (where,), 3: (0, where), 4: (0, 1, where), 5: (0, 1, where, where)}[len(box)]
    tile = np.zeros(box, host(name).numpy)
    for index in np.ndindex(*box):
        source = tuple(s + i for s, i in zip((where, *middle), index, strict=True))
        if all(0 <= s < e for s, e in zip(source, shape, strict=True)):
            tile[index] = x[source]
    expected = np.zeros(nbytes, np.uint8)
    expected[address(at + np.arange(nbytes), swizzle) - at] = tile.reshape(-1).view(np.uint8)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("row", "column"), [(0, 0), (16, 8), (-70, -8), (200, 8), (3, 32), (3, 64)])
def test_a_tile_is_stored_where_the_view_has_it(device, row, column):
    shape, pitch = (96, 60), 64
    x = RNG.integers(0, 2**32, 128 * 16, np.uint32)
    view = Tensor("bf16", shape, "y", strides=(pitch, 1))
    args = (Tensor("u32", (x.size,), "x"), TensorMap(view, (64, 32), 64), row, column)
    launch = Launch(kernels.store_tile, grid=1, block=64, args=args, shared=128 * 64)
    found = execute(device, launch, {"x": x}, {"y": Tensor("bf16", (96, pitch), "y")}).view(np.uint16)
    expected = np.full((96, pitch), 0xFFFF, np.uint16)
    for (r, c), v in np.ndenumerate(x.view(np.uint16).reshape(128, 32)):
        if 0 <= row + r < 96 and 0 <= column + c < 60:
            expected[row + r, column + c] = v
    np.testing.assert_array_equal(found, expected)


def test_bulk_copies(device):
    x = RNG.integers(0, 2**32, 5 * 64, np.uint32)
    y = Tensor("u32", x.shape, "y")
    launch = Launch(kernels.bulk_round_trip, grid=1, block=64, args=(Tensor("u32", x.shape, "x"), y, 5))
    np.testing.assert_array_equal(execute(device, launch, {"x": x}, {"y": y}), x + np.uint32(1))


def test_mbarriers_without_copies(device):
    x = RNG.integers(0, 2**32, (7, 32), np.uint32)
    y = Tensor("u32", x.shape, "y")
    launch = Launch(kernels.plain_mbarrier, grid=1, block=64, args=(Tensor("u32", x.shape, "x"), y, 7))
    np.testing.assert_array_equal(execute(device, launch, {"x": x}, {"y": y}), x[:, ::-1])


def test_more_mbarriers_than_the_interpreter_tells_apart(device):
    x = RNG.integers(0, 2**32, 160, np.uint32)
    y = Tensor("u32", x.shape, "y")
    launch = Launch(kernels.many_mbarriers, grid=1, block=64, args=(Tensor("u32", x.shape, "x"), y))
    np.testing.assert_array_equal(execute(device, launch, {"x": x}, {"y": y}), x)


def test_a_cluster_shares_what_it_loads(device):
    turns = 3
    m = RNG.integers(0, 2**16, (16 * turns, COLUMNS), np.uint16).view(ml_dtypes.bfloat16)
    x = RNG.integers(0, 2**32, 128 * turns, np.uint32)
    y = Tensor("u32", (4, turns, 640), "y")
    args = (TensorMap(Tensor("bf16", m.shape, "m"), (8, COLUMNS)), Tensor("u32", x.shape, "x"), y, turns)
    launch = Launch(kernels.multicast_tiles, grid=4, block=64, args=args, cluster=2, shared=2576)
    found = execute(device, launch, {"m": m, "x": x}, {"y": y})
    tiles = m.reshape(turns, 16 * COLUMNS).view(np.uint32)
    expected = np.concatenate([tiles, x.reshape(turns, 128)], axis=1)
    np.testing.assert_array_equal(found, np.broadcast_to(expected, (4, turns, 640)))


@pytest.mark.parametrize(("grid", "cluster"), [((4, 1), (4, 1)), ((8, 1), (2, 1)), ((2, 4), (1, 2)), ((4, 2), (2, 2))])
def test_blocks_of_a_cluster_reach_each_other(device, grid, cluster):
    y = Tensor("u32", (grid[1], grid[0], 64), "y")
    launch = Launch(kernels.neighbours, grid=grid, block=32, args=(y,), cluster=cluster)
    found = execute(device, launch, {}, {"y": y})
    lane, size = np.arange(32), cluster[0] * cluster[1]
    for by, bx in np.ndindex(grid[1], grid[0]):
        rank = bx % cluster[0] + cluster[0] * (by % cluster[1])
        rank = (rank + 1) % size
        nx = bx // cluster[0] * cluster[0] + rank % cluster[0]
        ny = by // cluster[1] * cluster[1] + rank // cluster[0]
        own = 100 * (nx + grid[0] * ny) + lane
        np.testing.assert_array_equal(found[by, bx, :32], own[lane & 28] + own[(lane & 28) + 3])
        np.testing.assert_array_equal(found[by, bx, 32 : 32 + size], lane[:size] + 1 + own[:size])
        before = (rank + size - 2) % size  # the sender
        letter = np.array([before, 1, 2, 3, before], np.float32).view(np.uint32)
        assert found[by, bx, 40:49].tolist() == [before, before + 1, before + 2, before + 3, *letter.tolist()]


@pytest.mark.parametrize("cluster", [1, 2, 4])
def test_what_blocks_store_in_each_other_arrives(device, cluster):
    x = RNG.standard_normal((4, 64, 4)).astype(np.float32)
    y = Tensor("f32", x.shape, "y")
    args = (Tensor("f32", x.shape, "x"), y, 3)
    launch = Launch(kernels.letters, grid=4, block=64, args=args, cluster=cluster, shared=4104)
    found = execute(device, launch, {"x": x}, {"y": y})
    sent = x.copy()
    sent[..., 3] = 2  # the last turn
    expected = np.zeros((4 // cluster, 64, 4), np.float32)
    for sender in range(cluster):
        expected += sent[sender::cluster]
    np.testing.assert_array_equal(found, np.repeat(expected, cluster, axis=0))


def test_a_tile_is_changed_where_it_lies(device):
    m = RNG.integers(0, 2**16, (2, 4, 64), np.uint16).view(ml_dtypes.bfloat16)
    x = RNG.integers(0, 2**32, 64, np.uint32)
    tiles, words, y = Tensor("bf16", m.shape, "m"), Tensor("u32", (64,), "x"), Tensor("u32", (64,), "y")
    launch = Launch(kernels.in_place, 1, 64, (TensorMap(tiles, m.shape), words, y), shared=1288)
    program = Program("in place", (launch,), inputs=(tiles, words), outputs=(y,))
    buffers = {t.name: device.allocate(t.bytes, "test", name=t.name) for t in program.buffers}
    device.upload(buffers["m"], m)
    device.upload(buffers["x"], x)
    device.bind(program, buffers).run()
    for name in "xy":
        np.testing.assert_array_equal(device.download(buffers[name], "u32", (64,)), x + np.uint32(1))
    found = device.download(buffers["m"], "bf16", m.shape)
    np.testing.assert_array_equal(found.view(np.uint16), m.view(np.uint16) ^ np.uint16(0x8000))


@pytest.mark.parametrize(
    "kernel",
    [
        kernels.store_tile,
        kernels.bulk_round_trip,
        kernels.plain_mbarrier,
        kernels.multicast_tiles,
        kernels.neighbours,
        kernels.letters,
        kernels.in_place,
        kernels.many_mbarriers,
        kernels.show_tile(L.f32, 5, 768, 0),
    ],
    ids=lambda k: k.spec.family,
)
def test_they_compile(kernel, compiler):
    assert L.check_kernel(kernel, "sm_90a") == ()

"""The gated product quantized as it is made: the bits of the two launches in a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

from atlas_lab.core.launch import Launch, Program
from atlas_lab.core.tensor import Tensor
from atlas_lab.formats import nvfp4_groups
from atlas_lab.kernels.activation.gated import KINDS, kind_of
from atlas_lab.kernels.activation.product import THREADS, gated_product
from atlas_lab.kernels.activation.quantized import (
    gated_fp8_groups,
    gated_int8_groups,
    gated_nvfp4,
    gated_nvfp4_blocks,
    gated_nvfp4_lanes,
)
from atlas_lab.kernels.lang import Kernel
from atlas_lab.kernels.lang.compile import check_kernel, compiler_missing
from atlas_lab.kernels.quantize import fp8_groups, int8, lanes_order, nvfp4, nvfp4_blocks
from atlas_lab.kernels.quantize.nvfp4_lanes import quantize_nvfp4_lanes
from atlas_lab.runtime.device import open_device

M, K, WORDS = 3, 1088, 500
CODES, SCALES = Tensor("u8", (M, K // 2), "codes"), Tensor("e4m3", (M, K // 16), "scales")
OUT, FLAGS = Tensor("bf16", (M, K), "out"), Tensor("u32", (WORDS,), "flags")
GU, H = Tensor("bf16", (M, 2 * K), "gu"), Tensor("bf16", (M, K), "h")


class Way(NamedTuple):
    """The second of two launches, and the kernel that does both; what they write, their last arguments and those before
    K."""

    second: Launch
    fused: Callable[..., Kernel]
    grid: tuple[int, int]
    threads: int
    outs: tuple[Tensor, ...]
    last: tuple[int, ...]
    first: tuple[int, ...] = ()


def _lanes(run: int) -> Way:
    grid, threads = lanes_order.order_grid(M, K, run), lanes_order.THREADS
    second = Launch(quantize_nvfp4_lanes(run), grid, threads, (H, OUT, FLAGS, K, WORDS))
    return Way(second, lambda clamp: gated_nvfp4_lanes(run, clamp), grid, threads, (OUT, FLAGS), (WORDS,))


def _codes() -> Way:
    count, threads = M * K // nvfp4.EACH, nvfp4.THREADS
    second = Launch(nvfp4.quantize_nvfp4(), -(-count // threads), threads, (H, CODES, SCALES, count))
    return Way(second, gated_nvfp4, (M, -(-K // (nvfp4.EACH * threads))), threads, (CODES, SCALES), ())


def _blocks() -> Way:
    grid, threads = nvfp4_blocks.blocks_grid(M, K), nvfp4_blocks.THREADS
    second = Launch(nvfp4_blocks.quantize_nvfp4_blocks, grid, threads, (H, OUT, FLAGS, K, WORDS))
    return Way(second, gated_nvfp4_blocks, grid, threads, (OUT, FLAGS), (WORDS,))


def _groups(kernel: Kernel, fused: Callable[..., Kernel], codes: str, group: int) -> Way:
    """Of rows of codes of a byte, 128 of K in a block of 256 threads."""
    outs = Tensor(codes, (M, K), "codes"), Tensor("f32", (-(-K // group), M), "scales"), FLAGS
    grid = (1, -(-K // 128))
    return Way(Launch(kernel, grid, 256, (H, *outs, M, K, M, WORDS)), fused, grid, 256, outs, (M, WORDS), (M,))


WAYS = {
    "codes": _codes(),
    "lanes": _lanes(16),
    "blocks": _blocks(),
    "fp8": _groups(fp8_groups.quantize_fp8_groups, gated_fp8_groups, "e4m3", fp8_groups.GROUP),
    "int8": _groups(int8.quantize_int8_groups, gated_int8_groups, "i8", int8.GROUP),
}
EACH = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest):
    if request.param == "cuda" and request.config.getoption("--device", "auto") != "cuda":
        pytest.skip("needs --device=cuda")
    with open_device(request.param) as opened:
        yield opened


def ran(device, launches: tuple[Launch, ...], both: np.ndarray, temporaries: tuple[Tensor, ...]) -> list[np.ndarray]:
    """What launches over the halves of `both` leave in `temporaries`."""
    program = Program("gated", launches, (GU,), temporaries)
    buffers = {t.name: device.allocate(t.bytes, "t", "t", name=t.name) for t in (GU, *temporaries)}
    device.upload(buffers[GU.name], both)
    for t in temporaries:
        device.poison(buffers[t.name])
    device.bind(program, buffers).run()
    found = [device.download(buffers[t.name], t.dtype, t.shape) for t in temporaries]
    for b in buffers.values():
        device.free(b)
    return found


def drawn() -> np.ndarray:
    """g and u side by side, of many magnitudes, with zeros."""
    rng = np.random.default_rng(K)
    both = rng.standard_normal((M, 2 * K)) * 2.0 ** np.repeat(rng.integers(-9, 6, (M, K // 8)), 16, axis=1)
    both[1, :40] = 0
    return both.astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(("kind", "limit"), [(k, limit) for k in KINDS for limit in (0.0, 0.7)])
@EACH
def test_the_bits_of_two_launches(way: Way, kind: str, limit: float, device) -> None:
    both, what = drawn(), kind_of(kind, limit)
    g, u = (GU.view(at, (M, K), (2 * K, 1)) for at in (0, K))
    first = Launch(gated_product(clamp=limit > 0), (M, 2), THREADS, (g, u, H, K, 2 * K, 2 * K, what))
    args = (g, u, *way.outs, *way.first, K, 2 * K, 2 * K, what, *way.last)
    one = Launch(way.fused(clamp=limit > 0), way.grid, way.threads, args)
    h, *expected = ran(device, (first, way.second), both, (H, *way.outs))
    found = ran(device, (one,), both, way.outs)
    for a, b in zip(found, expected, strict=True):
        assert np.array_equal(a.view(np.uint8), b.view(np.uint8))
    assert found[0].any()
    if way.outs[-1] is FLAGS:
        assert not found[-1].any()
    else:
        codes, scales = nvfp4_groups.quantize(h.astype(np.float32))
        assert np.array_equal(found[0], codes)
        assert np.array_equal(found[1].view(np.uint8), scales.view(np.uint8))


@pytest.mark.parametrize("clamp", [False, True])
@EACH
def test_it_compiles_clean(way: Way, clamp: bool) -> None:
    if (missing := compiler_missing()) is not None:
        pytest.skip(missing)
    assert check_kernel(way.fused(clamp=clamp), "sm_90a") == ()

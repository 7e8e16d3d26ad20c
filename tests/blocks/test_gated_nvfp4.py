"""The gated product quantized as it is made: the bits of the two launches in a row."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from atlas_lab.core.launch import Launch, Program
from atlas_lab.core.tensor import Tensor
from atlas_lab.kernels.activation.gated import KINDS, kind_of
from atlas_lab.kernels.activation.product import THREADS, gated_product
from atlas_lab.kernels.activation.quantized import gated_nvfp4_lanes
from atlas_lab.kernels.lang.compile import check_kernel, compiler_missing
from atlas_lab.kernels.quantize import lanes_order
from atlas_lab.kernels.quantize.nvfp4_lanes import quantize_nvfp4_lanes
from atlas_lab.runtime.device import open_device

M, K, WORDS = 3, 512, 500
RUNS = pytest.mark.parametrize(("run", "apart"), [(16, 1), (64, 8)])


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest):
    if request.param == "cuda" and request.config.getoption("--device", "auto") != "cuda":
        pytest.skip("needs --device=cuda")
    with open_device(request.param) as opened:
        yield opened


def ran(device, launches, both: np.ndarray, temporaries: tuple[Tensor, ...]) -> np.ndarray:
    """The last temporary but one, `out`, of launches over the halves of `both`."""
    gu = Tensor("bf16", both.shape, "gu")
    program = Program("gated", launches, (gu,), temporaries)
    buffers = {t.name: device.allocate(t.bytes, "t", "t", name=t.name) for t in (gu, *temporaries)}
    device.upload(buffers["gu"], both)
    for t in temporaries:
        device.poison(buffers[t.name])
    device.bind(program, buffers).run()
    out, flags = (device.download(buffers[t.name], t.dtype, t.shape) for t in temporaries[-2:])
    assert not flags.any()
    for b in buffers.values():
        device.free(b)
    return out


@pytest.mark.parametrize(("kind", "limit"), [(k, limit) for k in KINDS for limit in (0.0, 0.7)])
@RUNS
def test_the_bits_of_two_launches(run: int, apart: int, kind: str, limit: float, device) -> None:
    rng = np.random.default_rng(run)
    both = rng.standard_normal((M, 2 * K)) * 2.0 ** np.repeat(rng.integers(-9, 6, (M, K // 8)), 16, axis=1)
    both[1, :40] = 0
    both = both.astype(ml_dtypes.bfloat16)
    gu, h, out = Tensor("bf16", both.shape, "gu"), Tensor("bf16", (M, K), "h"), Tensor("bf16", (M, K), "out")
    flags = Tensor("u32", (WORDS,), "flags")
    g, u = (gu.view(at, (M, K), (2 * K, 1)) for at in (0, K))
    what, grid = kind_of(kind, limit), lanes_order.order_grid(M, K, run)
    first = Launch(gated_product(clamp=limit > 0), (M, 1), THREADS, (g, u, h, K, 2 * K, 2 * K, what))
    second = Launch(quantize_nvfp4_lanes(run, apart), grid, lanes_order.THREADS, (h, out, flags, K, WORDS))
    fused = gated_nvfp4_lanes(run, apart, clamp=limit > 0)
    one = Launch(fused, grid, lanes_order.THREADS, (g, u, out, flags, K, 2 * K, 2 * K, what, WORDS))
    expected = ran(device, (first, second), both, (h, out, flags))
    found = ran(device, (one,), both, (out, flags))
    assert expected.any()
    assert np.array_equal(found.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("clamp", [False, True])
@RUNS
def test_it_compiles_clean(run: int, apart: int, clamp: bool) -> None:
    if (missing := compiler_missing()) is not None:
        pytest.skip(missing)
    assert check_kernel(gated_nvfp4_lanes(run, apart, clamp), "sm_90a") == ()

"""The gated product's launch: both loads, strided rows, both kinds; what it compiles to."""

from __future__ import annotations

import numpy as np
import pytest

from atlas_lab.core.launch import Launch, Program
from atlas_lab.core.tensor import Tensor
from atlas_lab.experiments.ffn_parity import gated_product as expected
from atlas_lab.experiments.ffn_parity import judged
from atlas_lab.formats.dtypes import dtype
from atlas_lab.kernels.activation.gated import KINDS, kind_of
from atlas_lab.kernels.activation.product import THREADS, gated_product
from atlas_lab.kernels.lang.compile import check_kernel, compiler_missing
from atlas_lab.runtime.device import open_device

M = 2
BF16 = dtype("bf16").numpy


def run(both: np.ndarray, kind: str, vector: bool, dependent: bool, limit: float) -> np.ndarray:
    """h of g and u, the halves of `both`."""
    i = both.shape[1] // 2
    gu, h = Tensor("bf16", (M, 2 * i), "gu"), Tensor("bf16", (M, i), "h")
    g, u = (gu.view(at, (M, i), (2 * i, 1)) for at in (0, i))
    grid = (M, -(-i // (THREADS * (8 if vector else 1))))
    args = (g, u, h, i, 2 * i, 2 * i, kind_of(kind, limit))
    launch = Launch(gated_product(vector=vector, clamp=limit > 0), grid, THREADS, args, pdl=dependent)
    program = Program("gated", (launch,), (gu,), (h,))
    with open_device("interpreter") as device:
        buffers = {t.name: device.allocate(t.bytes, "t", "t", name=t.name) for t in (gu, h)}
        device.upload(buffers["gu"], both)
        device.poison(buffers["h"])
        device.bind(program, buffers).run()
        found = device.download(buffers["h"], "bf16", (M, i))
        for b in buffers.values():
            device.free(b)
    return found


@pytest.mark.parametrize(("kind", "limit"), [(k, limit) for k in KINDS for limit in (0.0, 7.0, 0.7)])
@pytest.mark.parametrize(("vector", "i"), [(True, 1032), (False, 1032), (False, 131)])
@pytest.mark.parametrize("dependent", [False, True])
def test_halves_of_one_buffer(kind: str, limit: float, vector: bool, i: int, dependent: bool):
    rng = np.random.default_rng(1)
    both = np.concatenate([rng.standard_normal((M, i)) * 8, rng.standard_normal((M, i)) * 4], axis=1).astype(BF16)
    both[0, :6] = np.array([0, -0.0, 90, -90, 300, -300]).astype(BF16)
    found = run(both, kind, vector, dependent, limit)
    wide = both.astype(np.float64)
    result = judged("h", found, expected(wide[:, :i], wide[:, i:], kind, limit))
    assert result.passed, result.reason
    if limit:
        assert not judged("h", found, expected(wide[:, :i], wide[:, i:], kind)).passed


@pytest.mark.parametrize("vector", [True, False])
def test_what_a_limit_makes_of_numbers_that_are_none(vector: bool):
    """A NaN stays one, infinities become the limit, but -infinity of g is not clamped, and makes NaN as without it."""
    inf, nan = np.inf, np.nan
    g = np.array([nan, 1, inf, inf, 1, 1, -inf, nan, 8, 3e38, -3e38])
    u = np.array([1, nan, 1, inf, inf, -inf, 1, inf, -8, -3e38, 3e38])
    most = np.array([nan, nan, 7, 7, 1, 1, nan, nan, 7, 7, -3e38]), np.array([1, nan, 1, 7, 7, -7, 1, nan, -7, -7, 7])
    halves = (np.tile(np.resize(v, 16).astype(BF16), (M, 1)) for v in (g, u))
    found = run(np.concatenate(list(halves), axis=1), "silu", vector, False, 7.0)[0, : len(g)]
    assert list(np.isnan(found)) == [bool(np.isnan(a) or np.isnan(b)) for a, b in zip(*most, strict=True)]
    known = ~np.isnan(found)
    with np.errstate(over="ignore"):
        silu = most[0] / (1 + np.exp(-most[0])) * most[1]
    assert np.array_equal(found[known], silu[known].astype(BF16))


@pytest.mark.parametrize("clamp", [True, False])
@pytest.mark.parametrize("vector", [True, False])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_it_compiles_clean(clamp: bool, vector: bool, arch: str):
    if (missing := compiler_missing()) is not None:
        pytest.skip(missing)
    assert check_kernel(gated_product(vector=vector, clamp=clamp), arch) == ()

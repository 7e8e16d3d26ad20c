"""The gated product's launch: both loads, strided rows, both kinds; what it compiles to."""

from __future__ import annotations

import numpy as np
import pytest

from atlas_lab.core.launch import Launch, Program
from atlas_lab.core.tensor import Tensor
from atlas_lab.experiments.ffn_parity import gated_product as expected
from atlas_lab.experiments.ffn_parity import judged
from atlas_lab.formats.dtypes import dtype
from atlas_lab.kernels.activation.gated import KINDS
from atlas_lab.kernels.activation.product import THREADS, gated_product
from atlas_lab.kernels.lang.compile import check_kernel, compiler_missing
from atlas_lab.runtime.device import open_device

M = 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vector", "i"), [(True, 1032), (False, 1032), (False, 131)])
@pytest.mark.parametrize("dependent", [False, True])
def test_halves_of_one_buffer(kind: str, vector: bool, i: int, dependent: bool):
    bf16, rng = dtype("bf16").numpy, np.random.default_rng(1)
    both = np.concatenate([rng.standard_normal((M, i)) * 8, rng.standard_normal((M, i))], axis=1).astype(bf16)
    both[0, :6] = np.array([0, -0.0, 90, -90, 300, -300]).astype(bf16)
    gu, h = Tensor("bf16", (M, 2 * i), "gu"), Tensor("bf16", (M, i), "h")
    g, u = (gu.view(at, (M, i), (2 * i, 1)) for at in (0, i))
    grid = (-(-i // (THREADS * (8 if vector else 1))), M)
    args = (g, u, h, i, 2 * i, 2 * i, KINDS.index(kind))
    launch = Launch(gated_product(vector=vector, dependent=dependent), grid, THREADS, args, pdl=dependent)
    program = Program("gated", (launch,), (gu,), (h,))
    with open_device("interpreter") as device:
        buffers = {t.name: device.allocate(t.bytes, "t", "t", name=t.name) for t in (gu, h)}
        device.upload(buffers["gu"], both)
        device.poison(buffers["h"])
        device.bind(program, buffers).run()
        found = device.download(buffers["h"], "bf16", (M, i))
        for b in buffers.values():
            device.free(b)
    wide = both.astype(np.float64)
    result = judged("h", found, expected(wide[:, :i], wide[:, i:], kind))
    assert result.passed, result.reason


@pytest.mark.parametrize("vector", [True, False])
@pytest.mark.parametrize(
    ("dependent", "arch"), [(False, "sm_80"), (False, "sm_90a"), (True, "sm_90a"), (True, "sm_120a")]
)
def test_it_compiles_clean(vector: bool, dependent: bool, arch: str):
    if (missing := compiler_missing()) is not None:
        pytest.skip(missing)
    assert check_kernel(gated_product(vector=vector, dependent=dependent), arch) == ()

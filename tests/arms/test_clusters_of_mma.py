"""The warps that share a row tile may be spread over the blocks of a cluster: bits stay, settings need a card that has
clusters, and only a tuned table chooses them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import ml_dtypes
import numpy as np
import pytest
from test_rows_of_mma import ARMS, form_of

from atlas_lab import simt
from atlas_lab.arms.mma.forms import Form
from atlas_lab.core.target import shipped_targets
from atlas_lab.core.tuning import Choice, Table, TuningError, chosen, setting
from atlas_lab.experiments.case import Case, base_context
from atlas_lab.experiments.cases import cases, launched
from atlas_lab.experiments.parity import Ran, run
from atlas_lab.kernels.activation.gated import KINDS
from atlas_lab.kernels.gemv.cluster import cluster_bytes
from atlas_lab.kernels.gemv.mma_lanes import UNIT, mma_nvfp4_lanes
from atlas_lab.runtime.device import open_device
from atlas_lab.runtime.interpreter import InterpreterDevice
from atlas_lab.simt import Buffer, Options

TARGETS = {t.name: t for t in shipped_targets()}
FEW = replace(TARGETS["h200"], sms=2)
WARPS, CLUSTERS = 8, (2, 4, 8)
# Rows that end inside a tile, of two tiles on two SMs. Units that the warps do not divide, the last one cut short
# where an arm takes that; of Q4_K fewer than warps.
N, K = 23, 1152
CUT = {
    "bf16_mma": 1096,
    "fp8_mma": 1104,
    "fp8_row_mma": 1104,
    "nvfp4_mma": 1120,
    "q4k_mma": 768,
    "q4k_mma_repacked": 768,
}
CLUSTERED = {name: [f for f in a.forms if f.clustered and not f.units] for name, a in ARMS.items()}
OFFERED = [name for name, forms in CLUSTERED.items() if forms]


@cache
def ran(name: str, k: int, m: int, cluster: int) -> Ran:
    form = ARMS[name].forms[0]._replace(warps=WARPS, cluster=cluster, wide_cluster=cluster)
    arm = type("Clustered", (type(ARMS[name]),), {"forms": (form,)})(name)
    case = Case(name, ("ffn.up",), m, N, k, form_of(arm), setting=form.setting)
    with open_device("interpreter", FEW) as device:
        return run(case, arm, device, base_context(FEW))


@pytest.mark.parametrize("cluster", [c if c in (2, 8) else pytest.param(c, marks=pytest.mark.full) for c in CLUSTERS])
@pytest.mark.parametrize(
    ("name", "k"),
    [pytest.param(n, CUT.get(n, K), marks=() if n in OFFERED else pytest.mark.full) for n in ARMS],
)
def test_bits_do_not_depend_on_the_cluster(name: str, k: int, cluster: int) -> None:
    for m in (3, 16):
        one, spread_out = ran(name, k, m, 1), ran(name, k, m, cluster)
        assert spread_out.out.tobytes() == one.out.tobytes()
        (here,), (there,) = one.program.launches, spread_out.program.launches
        assert there.cluster == (cluster, 1, 1)
        assert there.blocks == cluster * here.blocks
        assert there.threads * cluster == here.threads == 32 * WARPS
    assert np.any(one.out.astype(np.float32)[:, -7:])


@pytest.mark.parametrize("name", OFFERED)
def test_bits_do_not_depend_on_the_order_of_threads_and_stores(name: str) -> None:
    form = CLUSTERED[name][-1]
    case = Case(name, ("ffn.up",), 9, N, K, form_of(ARMS[name]), setting=form.setting)
    drawn = Options(order="random", late_async="random")
    outs = []
    for seed, options in ((0, Options()), (1, drawn)):
        with InterpreterDevice(FEW, seed=seed, options=options) as device:
            outs.append(run(case, ARMS[name], device, base_context(FEW)).out.tobytes())
    assert outs[1:] == outs[:-1]


def test_kernels_of_several_projections_that_wait_and_gate_have_the_same_bits() -> None:
    m, n, k, warps, depth = 5, 48, 640, 4, 2
    rng = np.random.default_rng(7)
    weights = [rng.integers(0, 256, (1, k // 128, UNIT), np.uint8) for _ in range(3)]
    for w in weights:
        w[..., 1024:] &= 0x7F  # scales that are finite
    scale = np.full(1, 0.5, np.float32)
    x = rng.standard_normal((m, 2 * k)).astype(ml_dtypes.bfloat16)
    stored = [Buffer.of(f"{i}", a) for w in weights for i, a in (("w", w), ("g", scale))]
    outs = []
    for cluster, shared in ((1, warps * depth * UNIT), (2, cluster_bytes(2, warps, 1, 1, depth * UNIT))):
        kernel = mma_nvfp4_lanes(warps=warps, depth=depth, joined=True, gate=True, blocks=1, cluster=cluster)
        y = Buffer("y", 2 * m * n)
        args = (*stored, Buffer.of("x", x), y, m, n, k, 16, 32, KINDS.index("silu"), 3, 0)
        grid, block = 3 * cluster, 32 * warps // cluster
        simt.run(kernel, grid=grid, block=block, cluster=cluster, args=args, shared_bytes=shared)
        outs.append(bytes(y.bytes[: 2 * m * n]))
    assert outs[0] == outs[1]
    assert np.isfinite(np.frombuffer(outs[0], ml_dtypes.bfloat16).astype(np.float32)).all()


@pytest.mark.parametrize("name", OFFERED)
def test_parity_tries_every_kernel_over_a_cluster(name: str) -> None:
    arm, base = ARMS[name], base_context(TARGETS["h200"])
    over = {k for k in arm.optional_kernels if dict(k.spec.parameters)["cluster"] > 1}
    assert over
    assert over <= {k for c in cases(arm) for k in launched(c, arm, base)}


@pytest.mark.parametrize("name", OFFERED)
def test_cards_without_clusters_are_offered_none_and_refuse_them(name: str) -> None:
    arm, old, new = ARMS[name], TARGETS["a100"], TARGETS["h200"]
    n, k = 1024, 5120
    forms = [Form(**dict(s)) for s in arm.settings(n, k, old)]
    offered = {f for f in arm.forms if f.units in (0, k / arm.span)}
    assert set(forms) <= offered - {f for f in arm.forms if f.clustered}
    assert {Form(**dict(s)) for s in arm.settings(n, k, new)} == offered
    assert all(old.meets(kernel.needs) for kernel in arm.kernels)
    clustered = CLUSTERED[name][0].setting
    tuned = Table.of([Choice(name, n, k, clustered)])
    assert chosen(arm, n, k, replace(base_context(new), table=tuned)) == clustered
    with pytest.raises(TuningError, match=rf"cluster=.*expected one of the arm's {len(forms)} settings on a100"):
        chosen(arm, n, k, replace(base_context(old), table=tuned))


@pytest.mark.parametrize("name", OFFERED)
def test_settings_of_one_block_are_spelled_as_before_there_were_clusters(name: str) -> None:
    alone = ARMS[name].forms[0]
    warps, depth, wide_depth, wide_tiles, *others = alone
    assert others == [1, 1, 0, 0, 0]
    assert alone.setting == setting(warps=warps, depth=depth, wide_depth=wide_depth, wide_tiles=wide_tiles)
    assert alone._replace(wide_cluster=2).setting == tuple(sorted([*alone.setting, ("wide_cluster", 2)]))


@pytest.mark.parametrize("n", [1024, 17408])
@pytest.mark.parametrize("name", OFFERED)
def test_blocks_that_have_an_sm_alone_come_last(name: str, n: int) -> None:
    last = [Form(**dict(s)).alone for s in ARMS[name].settings(n, 5120, TARGETS["h200"])]
    assert last == sorted(last)


@pytest.mark.parametrize(("warps", "cluster"), [(9, 3), (16, 16), (12, 8)])
def test_warps_that_blocks_cannot_share_alike_are_refused(warps: int, cluster: int) -> None:
    said = f"cluster: found {warps} warps over {cluster} blocks, expected 2, 4 or 8 that divide them"
    with pytest.raises(ValueError, match=said):
        mma_nvfp4_lanes(warps=warps, cluster=cluster)


def test_a_pair_over_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="cluster: found a pair over 2 blocks, expected one block"):
        mma_nvfp4_lanes(warps=4, tiles=2, pair=True, cluster=2)

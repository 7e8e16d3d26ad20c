"""Arms that run on copies, through everything an arm is checked for: views into a fused weight, and a whole one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from atlas_lab.arms import copies
from atlas_lab.arms.bf16 import Bf16Gemv
from atlas_lab.arms.fp8 import Fp8Gemv
from atlas_lab.core.arm import Arm
from atlas_lab.core.call import Call, Operand
from atlas_lab.core.context import Context
from atlas_lab.core.declare import Derived
from atlas_lab.core.launch import Launch
from atlas_lab.core.projection import Site
from atlas_lab.core.rows import rows
from atlas_lab.core.verdict import Verdict
from atlas_lab.experiments.checks import Check, checks_of, run_check
from atlas_lab.runtime.device import Device, open_device
from atlas_lab.testing.options import device_of


class Views(Arm):
    """Gate and up as two launches of a single weight's kernel, over views into their fused weight."""

    roles = ("ffn.gate+ffn.up",)
    rows = rows(1)

    def __init__(self, name: str, single: Arm) -> None:
        self.name, self.single = name, single
        self.source, self.tolerance = single.source, single.tolerance
        self.kernels = (*single.kernels, *single.optional_kernels)

    def eligible(self, p: Site, ctx: Context) -> Verdict:
        mine = (self.single.eligible(q, ctx) for q in p.projections)
        return next((v for v in mine if not v), copies.can_fuse(p.projections))

    def finalize(self, p: Site, ctx: Context) -> list[Derived]:
        return [copies.part(p.projections, q, key=q.role) for q in p.projections]

    def lower(self, c: Call) -> list[Launch]:
        out, at = [], 0
        for role in c.roles:
            w = c.weights[role]
            n = w["weight"].shape[0]
            y = Operand(c.y.data.view(at, (c.m, n)))
            out += self.single.lower(replace(c, roles=(role,), weights={"weight": w}, y=y, n=n))
            at += n
        return out


class Whole(Views):
    """The same in one launch."""

    def finalize(self, p: Site, ctx: Context) -> list[Derived]:
        return [copies.fused(p.projections)]

    def lower(self, c: Call) -> list[Launch]:
        return list(self.single.lower(replace(c, weights={"weight": c.weights["fused"]})))


FP8, BF16 = Views("fp8_views", Fp8Gemv()), Views("bf16_views", Bf16Gemv())
WHOLE = Whole("bf16_whole", Bf16Gemv())


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with open_device(device_of(request.config)) as opened:
        yield opened


def passes(device: Device, arm: Arm, checks: Sequence[Check]) -> None:
    assert checks
    for check in checks:
        found = run_check(check, arm, device)
        assert found.ok, (check.id, found.sentence)
    device.ledger.check_empty()


@pytest.mark.parametrize("arm", [BF16, WHOLE], ids=lambda a: a.name)
def test_an_arm_over_a_fused_weight_passes_what_every_arm_must(device: Device, arm: Arm) -> None:
    kinds = ("cases", "refusal", "bytes", "build", "teeth", "parity")
    passes(device, arm, [c for kind in kinds for c in checks_of(arm, device.target) if c.kind == kind][:8])


def test_one_over_a_fused_grid_of_scales_does_too(device: Device) -> None:
    checks = checks_of(FP8, device.target)
    runs = sorted((c for c in checks if c.kind == "parity" and c.case), key=lambda c: c.case.n * c.case.k)
    passes(device, FP8, [*(c for c in checks if c.kind in ("bytes", "build")), runs[0]])


def test_a_program_over_views_names_each_of_them() -> None:
    from atlas_lab.experiments.case import base_context, route_of
    from atlas_lab.experiments.cases import cases

    arm = BF16
    base = base_context(open_device("interpreter").target)
    case = cases(arm, target=base.target)[0]
    (a,) = route_of(case, arm, base).assignments
    parts = [d.tensors["weight"] for d in a.declarations]
    assert len({t.name for t in parts}) == 1
    assert [t.offset for t in parts] == [0, parts[0].bytes]
    assert isinstance(a.declarations[0], Derived)
    assert len({d.identity for d in a.declarations if isinstance(d, Derived)}) == 1

"""Blocks on a device: their weights, their routes by pins, and a run of one with everything checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from atlas_lab.blocks.ffn import DOWN, GATE, UP
from atlas_lab.core.arm import Arm
from atlas_lab.core.candidate import Entry
from atlas_lab.core.context import Context, Pin, Preferences
from atlas_lab.core.projection import Site
from atlas_lab.core.registry import Registry
from atlas_lab.core.residency import load_plan
from atlas_lab.core.resolve import resolve
from atlas_lab.core.route import Route
from atlas_lab.experiments import trial
from atlas_lab.experiments.ffn_parity import FfnParity
from atlas_lab.experiments.numbers import activations, arrays
from atlas_lab.experiments.plan import block_step
from atlas_lab.formats import get
from atlas_lab.formats.dtypes import dtype
from atlas_lab.runtime.device import open_device
from atlas_lab.runtime.load import execute


def entries_of(arms: Mapping[str, Arm]) -> list[Entry]:
    return [Entry(a, "atlas-lab", "1", "tests", built_in=True) for a in arms.values()]


def routes_of(sites: Iterable[Site], arms: Mapping[str, Arm], first: Arm, second: Arm, ctx: Context) -> list[Route]:
    """Gate and up on arm `first`, down on `second`."""
    pins = tuple(Pin(r, a.name) for r, a in ((GATE, first), (UP, first), (DOWN, second)))
    return [resolve(s, replace(ctx, preferences=Preferences(pins)), entries_of(arms)) for s in sites]


def weights_of(sites: Iterable[Site]) -> dict[str, np.ndarray]:
    """Stored tensors by name, of random weights; gate's are large, so that activations bend."""
    rng, made = np.random.default_rng(7), {}
    for p in (p for s in sites for p in s.projections):
        w = (rng.standard_normal((p.n, p.k)) / np.sqrt(p.k) * (3 if p.role == GATE else 1)).astype(np.float32)
        fields = get(p.weight.format).quantize(w)
        made |= {t.name: fields[f].astype(dtype(t.dtype).numpy) for f, t in p.weight.fields}
    return made


class Ran:
    """A block run on a device with everything checked: outputs by name, and its parity."""

    def __init__(
        self,
        stored: Mapping[str, np.ndarray],
        found: Sequence[Route],
        arms: Mapping[str, Arm],
        m: int,
        ctx: Context,
        on: str = "interpreter",
    ) -> None:
        registry = Registry(entries=entries_of(arms))
        step = block_step(*found, m, ctx, registry)
        assert step.block is not None
        self.program, self.said = step.program, step.block.said
        judge = FfnParity(*found, arms, lambda t: stored[t.name])
        x = activations((0, "ffn", m), found[0].site.k, 3)
        inputs, host = {self.program.inputs[0].name: x}, arrays(step, lambda t: stored[t.name])
        with open_device(on) as device:
            with execute(load_plan(found), lambda t: stored[t.name], lambda w, label: None, device) as weights:
                out = trial.run_program(step.program, step.call, weights, device, inputs, host, step.stages)
            device.ledger.check_empty()
        self.out = trial.apart(out, (step.call.y.data, *step.stages))
        self.parity = judge.parity(self.program, m, ctx.dims, x, lambda name: self.out[name])
        self.judge, self.x = judge, x

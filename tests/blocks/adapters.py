"""Blocks with LoRA adapters and a residual on a device, and what these should add."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
from block_runs import entries_of

from atlas_lab.blocks.ffn import ffn_program, stages
from atlas_lab.blocks.lora import Adapter
from atlas_lab.core.arm import Arm
from atlas_lab.core.context import Context
from atlas_lab.core.launch import Program
from atlas_lab.core.numbers import OUTPUTS
from atlas_lab.core.projection import Projection
from atlas_lab.core.registry import Registry
from atlas_lab.core.residency import load_plan
from atlas_lab.core.route import Route
from atlas_lab.core.tensor import Tensor
from atlas_lab.experiments import trial
from atlas_lab.experiments.ffn_parity import FfnParity, Values
from atlas_lab.experiments.numbers import activations, arrays
from atlas_lab.experiments.plan import block_step
from atlas_lab.formats.dtypes import dtype
from atlas_lab.runtime.device import Device, open_device
from atlas_lab.runtime.load import execute

BF16 = dtype("bf16").numpy
U32 = 2.0**-24


class Adapters:
    """Random ones of some projections, of rank r, which add about as much as a product has."""

    def __init__(self, projections: Iterable[Projection], r: int, scale: float = 0.75) -> None:
        rng = np.random.default_rng(r)
        self.of: dict[str, Adapter] = {}
        self.host: dict[str, np.ndarray] = {}
        for p in projections:
            a, b = (Tensor("bf16", s, f"{p.role}/{name}") for name, s in (("a", (r, p.k)), ("b", (p.n, r))))
            self.of[p.role] = Adapter(a, b, scale)
            self.host[a.name] = (rng.standard_normal((r, p.k)) / np.sqrt(p.k)).astype(BF16)
            self.host[b.name] = (rng.standard_normal((p.n, r)) / np.sqrt(r)).astype(BF16)

    def added(self, role: str, x: np.ndarray) -> Values | None:
        """s·B(A·x) in float64, and how far from it BF16 of FP32 sums may be."""
        if role not in self.of:
            return None
        adapter, wide = self.of[role], x.astype(np.float64)
        a, b = (self.host[t.name].astype(np.float64) for t in (adapter.a, adapter.b))
        value = wide @ a.T @ b.T * adapter.scale
        size = np.abs(wide) @ np.abs(a).T @ np.abs(b).T * abs(adapter.scale)
        bound = U32 * (a.shape[1] + a.shape[0] + 4) * size
        return Values(value, bound + OUTPUTS["bf16"] * (np.abs(value) + bound))

    def upload(self, device: Device, stack: ExitStack) -> dict[str, Any]:
        buffers = {}
        for name, array in self.host.items():
            buffers[name] = device.allocate(array.nbytes, "test", "adapters", name=name)
            stack.callback(device.free, buffers[name])
            device.upload(buffers[name], array)
        return buffers


class Finished:
    """A block with adapters, and a residual where there is a seed for one, run with everything checked."""

    def __init__(
        self,
        stored: Mapping[str, np.ndarray],
        found: tuple[Route, Route],
        arms: Mapping[str, Arm],
        m: int,
        ctx: Context,
        adapters: Adapters,
        residual: bool,
        on: str = "interpreter",
    ) -> None:
        self.program, self.said = ffn_program(*found, m, ctx, arms, residual=residual, adapters=adapters.of)
        step = block_step(*found, m, ctx, Registry(entries=entries_of(arms)))
        self.judge = FfnParity(*found, arms, lambda t: stored[t.name])
        self.m, self.ctx, self.adapters = m, ctx, adapters
        self.x = activations((0, "ffn", m), found[0].site.k, 3)
        self.residual = np.random.default_rng(m).standard_normal((m, found[1].site.projections[0].n)).astype(BF16)
        given = dict(zip((t.name for t in self.program.inputs), (self.x, self.residual), strict=False))
        host = arrays(step, lambda t: stored[t.name])
        with open_device(on, *([ctx.target] if on == "interpreter" else [])) as device, ExitStack() as stack:
            weights = stack.enter_context(
                execute(load_plan(found), lambda t: stored[t.name], lambda w, label: None, device)
            )
            buffers = {**weights, **adapters.upload(device, stack)}
            between = stages(self.program)
            out = trial.run_program(self.program, step.call, buffers, device, given, host, between)
        self.out = trial.apart(out, (step.call.y.data, *between))

    def added(self, role: str, x: np.ndarray) -> Values | None:
        """What the block is to add to a role's product."""
        of_lora = self.adapters.added(role, x) if self.ctx.levers.lora else None
        if role != "ffn.down" or len(self.program.inputs) == 1:
            return of_lora
        wide = self.residual.astype(np.float64)
        if of_lora is None:
            return Values(wide, np.zeros(wide.shape))
        return Values(of_lora.values + wide, of_lora.bound)

    def parity(self, added: Any = None) -> Any:
        """Of all stages, with what the block is to add, or with something else."""
        return self.judge.parity(self.program, self.m, self.ctx.dims, self.x, self.out.__getitem__, added or self.added)


def labels(program: Program) -> list[str]:
    return [x.label for x in program.launches]

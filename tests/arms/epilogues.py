"""Calls of an arm with an epilogue, run on a device with everything checked, and what they should have computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from atlas_lab.arms.wgmma.grouped_x import GROUPED, grouped
from atlas_lab.core.arm import Arm
from atlas_lab.core.call import Call, Epilogue
from atlas_lab.core.context import Context
from atlas_lab.core.launch import Program
from atlas_lab.core.program import program_of, projection_call
from atlas_lab.core.residency import load_plan
from atlas_lab.core.route import Assignment
from atlas_lab.core.tensor import Tensor
from atlas_lab.experiments import oracle, trial, values
from atlas_lab.experiments.case import Case, context_of, route_of, site_of
from atlas_lab.runtime import load
from atlas_lab.runtime.device import Device

BF16 = ml_dtypes.bfloat16


@dataclass(frozen=True)
class Added:
    """An output as it was written, the product that addends were added to, and these, float64 by name."""

    arm: Arm
    call: Call
    program: Program
    out: np.ndarray
    product: oracle.Reference
    addends: dict[str, np.ndarray]

    def compared(self, **changed: np.ndarray) -> oracle.Comparison:
        """The output against the sum of the product and the addends, or of others in their place."""
        added = list((self.addends | changed).values())
        magnitude = self.product.magnitude + sum(np.abs(a) for a in added)
        tolerance = replace(self.arm.tolerance, extra_roundings=self.arm.tolerance.extra_roundings + len(added))
        total = oracle.Reference(self.product.values + sum(added), magnitude)
        return oracle.compare(self.out, total, tolerance, self.call.k)


def planned(case: Case, arm: Arm, base: Context, parts: Iterable[str], **changes: Any) -> tuple[Call, Assignment]:
    """A case's call with addends, `parts` of `lora` and `residual`, and other fields of an epilogue."""
    (a,) = route_of(case, arm, base).assignments
    given = {name: Tensor("bf16", (case.m, case.n), f"test/{name}") for name in parts}
    site = site_of(case)
    return projection_call(site.projections, a, case.m, context_of(case, base), Epilogue(**given, **changes)), a


def addends_of(call: Call, size: float) -> dict[str, np.ndarray]:
    """Random ones of a call, by the tensors' names, `size` large."""
    rng = np.random.default_rng(call.m)
    shape = (call.m, call.n)
    return {t.name: (rng.standard_normal(shape) * size).astype(BF16) for t in call.epilogue.addends}


def run_adding(case: Case, arm: Arm, device: Device, base: Context, parts: Iterable[str]) -> Added:
    """A case with random addends, as large as the product."""
    call, a = planned(case, arm, base, parts)
    program, stored = program_of(arm, call), values.Stored(case, site_of(case))
    x, x_stored = oracle.activations(values.activations(case), arm.activation)
    arrays = oracle.declared(a.declarations, stored.read)
    product = oracle.reference(arm, call, a.declarations, arrays, x)[0]
    added = addends_of(call, float(np.abs(product.values).mean()))
    with load.execute(load_plan([route_of(case, arm, base)]), stored.read, stored.check, device) as loaded:
        out = trial.run_program(program, call, loaded, device, trial.inputs(call.x, x_stored) | added, arrays)
    wide = {name.rpartition("/")[2]: array.astype(np.float64) for name, array in added.items()}
    return Added(arm, call, program, out, product, wide)


def run_quantizing(
    case: Case, arm: Arm, device: Device, base: Context, parts: Iterable[str] = (), *, fused: bool
) -> tuple[np.ndarray, ...]:
    """A case's output as it was written: codes and scales where quantization is `fused`, else BF16."""
    call, _ = planned(case, arm, base, parts, **({"quantize": GROUPED} if fused else {}))
    if fused:
        call = replace(call, y=grouped(call.y.data.name, case.m, case.n))
    x = {call.x.data.name: values.activations(case)} | addends_of(call, 1.0)
    return run_outputs(case, arm, program_of(arm, call), device, base, x)


def run_outputs(
    case: Case, arm: Arm, program: Program, device: Device, base: Context, x: dict[str, np.ndarray]
) -> tuple[np.ndarray, ...]:
    """All outputs of a program over a case's weights."""
    stored = values.Stored(case, site_of(case))
    with load.execute(load_plan([route_of(case, arm, base)]), stored.read, stored.check, device) as loaded:
        ports = (*program.inputs, *program.outputs, *program.temporaries)
        buffers = {t.name: device.allocate(t.bytes, "test", program.name, name=t.name) for t in ports}
        for t in ports:
            device.upload(buffers[t.name], x[t.name]) if t.name in x else device.poison(buffers[t.name])
        device.bind(program, {**loaded, **buffers}).run()
        device.synchronize()
        out = tuple(device.download(buffers[t.name], t.dtype, t.shape) for t in program.outputs)
        for b in buffers.values():
            device.check_guards(b)
            device.free(b)
    return out

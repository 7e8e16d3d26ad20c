"""Parity of one case: the arm's own output against the oracle, and everything that makes the comparison worth having.

What `atlas-lab parity`, `atlas-lab ab`, our tests and a stranger's tests run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from atlas_lab.core.arm import Arm
from atlas_lab.core.call import Call
from atlas_lab.core.context import Context
from atlas_lab.core.declare import Declaration
from atlas_lab.core.launch import Program
from atlas_lab.core.numbers import Exact
from atlas_lab.core.program import program_of, projection_call
from atlas_lab.core.residency import held_bytes, load_plan
from atlas_lab.core.tensor import round_up
from atlas_lab.experiments import oracle, trial, values
from atlas_lab.experiments.case import Case, context_of, route_of, site_of
from atlas_lab.experiments.errors import sentence
from atlas_lab.experiments.oracle import Comparison, Reference
from atlas_lab.runtime import load
from atlas_lab.runtime.device import Buffer, Device


@dataclass(frozen=True)
class ParityResult:
    """What became of one check. `sentence` says why not, or why it was not run (`skipped`); the rest is what was
    measured, None where it did not come to that. `worst` is the largest error over its bound, at `y[m, n]`."""

    ok: bool
    sentence: str = ""
    skipped: bool = False
    worst: float | None = None
    m: int | None = None
    n: int | None = None
    error: float | None = None
    bound: float | None = None
    rel_l2: float | None = None
    cosine: float | None = None
    snr_db: float | None = None
    declared_bytes: int | None = None
    ledger_bytes: int | None = None
    launches: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> ParityResult:
        return cls(**data)


def declared_bytes(declarations: tuple[Declaration, ...]) -> int:
    """Bytes of the declared tensors, each counted once and rounded as every allocation is."""
    return sum(round_up(size) for size in held_bytes(declarations).values())


@dataclass(frozen=True)
class Ran:
    """A case that ran: its call, what was declared, and the output as it was written."""

    case: Case
    arm: Arm
    call: Call
    program: Program
    declarations: tuple[Declaration, ...]
    arrays: dict[str, dict[str, np.ndarray]]
    x: np.ndarray
    out: np.ndarray
    unquantized: np.ndarray
    ledger: int

    @property
    def declared(self) -> int:
        return declared_bytes(self.declarations)


def run(case: Case, arm: Arm, device: Device, context: Context) -> Ran:
    """Resolve, load, bind and run a case; raises what its parts raise, one sentence each."""
    site, here = site_of(case), context_of(case, context)
    stored = values.Stored(case, site)
    route = route_of(case, arm, context)
    (a,) = route.assignments
    call = projection_call(site.projections, a, case.m, here)
    call = replace(call, x=trial.operand(arm.activation, case.m, case.k, call.x.data.name))
    program = program_of(arm, call)

    x, x_stored = oracle.activations(values.activations(case), arm.activation)
    arrays = oracle.declared(a.declarations, stored.read)
    with load.execute(load_plan([route]), stored.read, stored.check, device) as loaded:
        ledger = loaded.ledger.held
        _resident(call, arrays, loaded, device)
        out = trial.run_program(program, call, loaded, device, trial.inputs(call.x, x_stored), arrays)
    unquantized = np.concatenate(stored.unquantized)
    return Ran(case, arm, call, program, a.declarations, arrays, x, out, unquantized, ledger)


def _resident(call: Call, arrays: oracle.Arrays, loaded: Mapping[str, Buffer], device: Device) -> None:
    for key, fields in call.weights.items():
        for field, t in fields.items():
            if not oracle.same_bits(device.download(loaded[t.name], t.dtype, t.shape, t.offset), arrays[key][field]):
                raise trial.TrialError(f"weight {t}: what was loaded is not what building it again gives")


def run_case(
    case: Case, arm: Arm, device: Device, context: Context, peers: Mapping[str, Arm] | None = None
) -> ParityResult:
    """Parity of a case on a device. Never raises for what an arm does or computes: that is its result.

    `context` gives target, dimensions and levers. `peers` are arms by name, for a tolerance that is `Exact` to one.
    """
    return guarded(lambda: _judge(run(case, arm, device, context), device, context, peers or {}))


def guarded(check: Callable[[], ParityResult]) -> ParityResult:
    """`check`'s result, or its exception as one."""
    try:
        return check()
    except (Exception, SystemExit) as e:
        return ParityResult(False, sentence(e))


def _judge(ran: Ran, device: Device, context: Context, peers: Mapping[str, Arm]) -> ParityResult:
    compared = compared_with(ran, reference_of(ran, device, context, peers))
    near = fidelity_of(ran)
    wrong = [] if compared.ok else [str(compared)]
    accuracy = ran.arm.accuracy
    if accuracy is not None and ran.case.values == "plain" and near.snr_db < accuracy.min_snr_db:
        declared = f"expected its declared {accuracy.min_snr_db:g} dB or more"
        wrong.append(f"accuracy: found {near.snr_db:.1f} dB against unquantized weights, {declared}")
    if ran.declared != ran.ledger:
        wrong.append(f"bytes: found {ran.ledger} in the ledger, expected the declared {ran.declared}")
    m, n, k = ran.call.m, ran.call.n, ran.call.k
    if ran.program.flops != 2 * m * n * k:
        expected = f"expected 2·M·N·K = {2 * m * n * k}, which its floor is made of"
        wrong.append(f"flops: found {ran.program.flops} in its launches, {expected}")
    return ParityResult(
        not wrong,
        "; ".join(wrong),
        worst=compared.worst,
        m=compared.m,
        n=compared.n,
        error=compared.error,
        bound=compared.bound,
        rel_l2=near.rel_l2,
        cosine=near.cosine,
        snr_db=near.snr_db,
        declared_bytes=ran.declared,
        ledger_bytes=ran.ledger,
        launches=len(ran.program.launches),
    )


def reference_of(ran: Ran, device: Device, context: Context, peers: Mapping[str, Arm]) -> Reference:
    """What the case should have given: the oracle's product, or the output of the arm it is `Exact` to."""
    tolerance = ran.arm.tolerance
    if isinstance(tolerance, Exact) and tolerance.to != "reference":
        if tolerance.to not in peers:
            raise ValueError(f"arm {ran.arm.name} is exact to {tolerance.to!r}, which is not among the arms loaded")
        other = run(replace(ran.case, arm=tolerance.to), peers[tolerance.to], device, context)
        out = other.out.astype(np.float64)
        return Reference(out, np.abs(out))
    return oracle.reference(ran.arm, ran.call, ran.declarations, ran.arrays, ran.x)[0]


def compared_with(ran: Ran, ref: Reference) -> Comparison:
    return oracle.compare(ran.out, ref, ran.arm.tolerance, ran.call.k)


def fidelity_of(ran: Ran) -> oracle.Fidelity:
    """Against the product of the BF16 weights and activations, unquantized."""
    x = values.activations(ran.case).astype(np.float64)
    return oracle.fidelity(ran.out, x @ ran.unquantized.astype(np.float64).T)

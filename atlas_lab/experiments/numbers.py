"""The numbers of a variant: every step run on its real weights, against the float64 product of its own arithmetic and
against the product of the unquantized weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from atlas_lab.checkpoint import Checkpoint, check_values
from atlas_lab.core.context import Pin, Preferences
from atlas_lab.core.numbers import Exact
from atlas_lab.core.projection import Site
from atlas_lab.core.registry import Registry
from atlas_lab.core.rows import Rows
from atlas_lab.core.tensor import Tensor
from atlas_lab.experiments import oracle, trial
from atlas_lab.experiments.plan import Step, VariantPlan, plan_variant
from atlas_lab.experiments.results import AccuracyResult, ParityResult
from atlas_lab.formats.dtypes import dtype
from atlas_lab.runtime.bind import Bound
from atlas_lab.runtime.device import Buffer, Device
from atlas_lab.runtime.load import Loaded, execute

Key = tuple[int, str, int]


@dataclass(frozen=True)
class Numbers:
    """What one step's run gave. `digest` names the output's bits."""

    parity: ParityResult
    accuracy: AccuracyResult
    digest: str


def activations(key: Key, k: int, seed: int) -> np.ndarray:
    """BF16 `[M, K]`, normal with one channel in 64 eight times as large: the same for every variant."""
    layer, role, m = key
    words = hashlib.sha256(f"{layer}/{role.partition('+')[0]}/{m}/{k}".encode()).digest()
    rng = np.random.default_rng([seed, *words])
    x = rng.standard_normal((m, k), np.float32)
    x[:, rng.permutation(k)[: max(1, k // 64)]] *= 8
    return x.astype(dtype("bf16").numpy)


def digest(y: np.ndarray) -> str:
    """Names an output's bits."""
    return hashlib.sha256(np.ascontiguousarray(y).view(np.uint8).data).hexdigest()


class Bench:
    """A variant's weights on a device, as its load plan left them, and room for its steps' ports.

    A context manager: leaving it frees everything.
    """

    def __init__(self, plan: VariantPlan, held: Checkpoint, device: Device) -> None:
        self.plan, self.device = plan, device
        self._taken: list[Buffer] = []
        self.weights: Loaded = execute(
            plan.load,
            lambda t: held.store.read(t.name),
            lambda w, label: check_values(held.store, w, label),
            device,
        )

    def take(self, t: Tensor, label: str) -> Buffer:
        """A buffer for one tensor, freed with the bench."""
        buffer = self.device.allocate(t.bytes, label, name=t.name)
        self._taken.append(buffer)
        return buffer

    def ports(self, step: Step) -> dict[str, Buffer]:
        """Fresh buffers for everything of a program that is no weight."""
        p = step.program
        return {t.name: self.take(t, "activations") for t in (*p.inputs, *p.outputs, *p.temporaries)}

    def bind(self, step: Step, ports: Mapping[str, Buffer], weights: Mapping[str, Buffer]) -> Bound:
        """The step's program over these ports, and these weights in place of the loaded ones."""
        own = {t.name: self.weights[t.name] for t in step.program.persistent}
        return self.device.bind(step.program, {**own, **weights, **ports})

    def release(self) -> None:
        """Free what was taken since, weights excepted."""
        while self._taken:
            self._taken.pop().free()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.release()
        finally:
            self.weights.close()


class Judge:
    """Judges outputs of one variant: against its own weights as its arms read them, and against the reference's."""

    def __init__(self, registry: Registry, plan: VariantPlan, held: Checkpoint, reference: Checkpoint) -> None:
        self.registry, self.plan, self.held, self.reference = registry, plan, held, reference

    def arrays(self, step: Step) -> dict[str, dict[str, np.ndarray]]:
        """The step's weights on the host, as declared; raises LoadError."""
        return oracle.declared(step.assignment.declarations, lambda t: self.held.store.read(t.name))

    def judge(
        self, step: Step, x: np.ndarray, y: np.ndarray, device: Device, arrays: oracle.Arrays | None = None
    ) -> Numbers:
        """Parity and accuracy of an output; raises OracleError, and what running another arm raises where the
        step's is exact to that."""
        arm = self.registry.arm(step.assignment.arm)
        held = self.arrays(step) if arrays is None else arrays
        if isinstance(arm.tolerance, Exact) and arm.tolerance.to != "reference":
            other = self._output_of(arm.tolerance.to, step, x, device).astype(np.float64)
            expected = oracle.Reference(other, np.abs(other))
        else:
            values, _ = oracle.activations(x, arm.activation)
            expected, _ = oracle.reference(arm, step.call, step.assignment.declarations, held, values)
        found = oracle.compare(y, expected, arm.tolerance, step.call.k)
        fidelity = oracle.fidelity(y, x.astype(np.float64) @ self._unquantized(step).T)
        return Numbers(
            ParityResult(
                passed=found.ok,
                worst=found.worst,
                row=found.m,
                column=found.n,
                error=found.error,
                bound=found.bound,
                reason="" if found.ok else str(found),
            ),
            AccuracyResult(
                rel_l2=fidelity.rel_l2,
                cosine=fidelity.cosine,
                snr_db=fidelity.snr_db,
                worst_row=fidelity.worst_row,
            ),
            digest(y),
        )

    def _output_of(self, arm: str, step: Step, x: np.ndarray, device: Device) -> np.ndarray:
        """What another arm makes of the same weights and input."""
        pins = tuple(Pin(role, arm, origin="tolerance") for role in step.roles)
        context = replace(self.plan.context, preferences=Preferences(pins), rows=(Rows(step.m, step.m),))
        plan = plan_variant(arm, "", [Site(step.projections)], context, [step.m], self.registry)
        (other,) = plan.steps
        with Bench(plan, self.held, device) as bench:
            inputs = {other.call.x.data.name: x}
            return trial.run_program(other.program, other.call, bench.weights, device, inputs, self.arrays(other))

    def _unquantized(self, step: Step) -> np.ndarray:
        store = self.reference.store
        held = {(p.layer, p.role): p for p in self.reference.projections}
        rows = [store.read(held[p.layer, p.role].weight["weight"].name) for p in step.projections]
        return np.concatenate([r.astype(np.float64) for r in rows])


def run_steps(
    plan: VariantPlan, held: Checkpoint, judge: Judge, device: Device, keys: Sequence[Key], seed: int
) -> Iterator[tuple[Step, Numbers | Exception]]:
    """Run and judge steps one after another on one load of the weights.

    A kernel that faults, or an arm without a reference, is that step's answer: the exception. On a GPU it is the last
    one, for the context may be lost. Raises what loading raises.
    """
    steps = {s.key: s for s in plan.steps}
    with Bench(plan, held, device) as bench:
        for key in keys:
            step = steps[key]
            x = activations(key, step.call.k, seed)
            try:
                arrays = judge.arrays(step)
                inputs = {step.call.x.data.name: x}
                y = trial.run_program(step.program, step.call, bench.weights, device, inputs, arrays)
                found: Numbers | Exception = judge.judge(step, x, y, device, arrays)
            except Exception as e:  # whatever an arm, a kernel or a driver does is that cell's result
                found = e
            yield step, found
            if isinstance(found, Exception) and device.name != "interpreter":
                return

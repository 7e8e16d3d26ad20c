"""The numbers of a variant: every step run on its real weights, against the float64 product of its own arithmetic and
against the product of the unquantized weights."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from atlas_lab.checkpoint import Checkpoint, check_values
from atlas_lab.core.arm import Arm
from atlas_lab.core.context import Pin, Preferences
from atlas_lab.core.numbers import Exact
from atlas_lab.core.projection import Projection, Site
from atlas_lab.core.registry import Registry
from atlas_lab.core.rows import Rows
from atlas_lab.core.tensor import Tensor
from atlas_lab.experiments import oracle, trial
from atlas_lab.experiments.ffn_parity import FfnParity, product_of
from atlas_lab.experiments.plan import Block, Step, VariantPlan, plan_variant
from atlas_lab.experiments.results import AccuracyResult, ParityResult
from atlas_lab.formats.dtypes import dtype
from atlas_lab.runtime.bind import Bound
from atlas_lab.runtime.device import Buffer, Device
from atlas_lab.runtime.load import Loaded, Read, execute

Key = tuple[int, str, int]


@dataclass(frozen=True)
class Numbers:
    """What one step's run gave. `digest` names the output's bits."""

    parity: ParityResult
    accuracy: AccuracyResult
    digest: str


@functools.lru_cache(maxsize=2)
def activations(key: Key, k: int, seed: int) -> np.ndarray:
    """BF16 `[M, K]`, normal with one channel in 64 eight times as large: the same for every variant. Read-only."""
    layer, role, m = key
    words = hashlib.sha256(f"{layer}/{role.partition('+')[0]}/{m}/{k}".encode()).digest()
    rng = np.random.default_rng([seed, *words])
    x = rng.standard_normal((m, k), np.float32)
    x[:, rng.permutation(k)[: max(1, k // 64)]] *= 8
    made: np.ndarray = x.astype(dtype("bf16").numpy)
    made.flags.writeable = False
    return made


def reading(held: Checkpoint) -> Read:
    """What reads a checkpoint's tensors."""
    return lambda t: held.store.read(t.name)


def digest(y: np.ndarray) -> str:
    """Names an output's bits."""
    return hashlib.sha256(np.ascontiguousarray(y).view(np.uint8).data).hexdigest()


class Bench:
    """A variant's weights on a device, as its load plan left them, and room for its steps' ports.

    A context manager: leaving it frees everything.
    """

    def __init__(self, plan: VariantPlan, weights: Loaded, device: Device) -> None:
        self.plan, self.weights, self.device = plan, weights, device
        self._taken: list[Buffer] = []

    @classmethod
    def of(cls, plan: VariantPlan, held: Checkpoint, device: Device) -> Bench:
        """With the weights of a checkpoint; raises what loading raises."""
        return cls(
            plan, execute(plan.load, reading(held), lambda w, label: check_values(held.store, w, label), device), device
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


class Products:
    """Float64 products of the unquantized weights, `[M, N]`, of whole blocks what they compute: once for all rows of a
    role, kept for every variant that asks."""

    def __init__(self, reference: Checkpoint, seed: int) -> None:
        self.reference, self.seed = reference, seed
        self._held = {(p.layer, p.role): p for p in reference.projections}
        self._known: dict[Key, np.ndarray] = {}

    def of(self, step: Step, alike: Sequence[Step]) -> np.ndarray:
        """The product for `step`; `alike` are the steps of its roles, of which all that lack theirs get it too."""
        if step.key not in self._known:
            todo = [s for s in alike if s.key not in self._known]
            x = np.concatenate([_wide(activations(s.key, s.call.k, self.seed)) for s in todo])
            for s, y in zip(todo, _split(self._product(step, x), todo), strict=True):
                self._known[s.key] = y
        return self._known[step.key]

    def _product(self, step: Step, x: np.ndarray) -> np.ndarray:
        """Of a block its whole function, nothing between rounded."""
        if step.block is None:
            y: np.ndarray = x @ np.concatenate([self._weight(p) for p in step.projections]).T
            return y
        g, u = (x @ self._weight(p).T for p in step.projections[:2])
        out: np.ndarray = product_of(g, u, step.call.context.dims) @ self._weight(step.projections[2]).T
        return out

    def _weight(self, p: Projection) -> np.ndarray:
        return _wide(self.reference.store.read(self._held[p.layer, p.role].weight["weight"].name))


def _wide(a: np.ndarray) -> np.ndarray:
    """BF16 as float64, by its bits: several times as fast as a cast."""
    wide: np.ndarray = (a.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return wide


def _split(stacked: np.ndarray, steps: Sequence[Step]) -> list[np.ndarray]:
    """Rows of each step from those of all."""
    return np.split(stacked, np.cumsum([s.m for s in steps])[:-1])


class Parity:
    """Judges outputs of one variant against its own weights, as its arms read them: of more than `most` rows (0: any),
    the first, the last and others drawn from `seed`, where rows of the arm's reference do not depend on each other."""

    def __init__(self, registry: Registry, plan: VariantPlan, held: Checkpoint, seed: int, most: int = 0) -> None:
        self.registry, self.plan, self.held, self.seed, self.most = registry, plan, held, seed, most
        self._own: dict[Key, oracle.Reference] = {}
        self._blocks: dict[int, FfnParity] = {}
        self._weights: tuple[str, ...] = ()
        self._arrays: dict[str, dict[str, np.ndarray]] = {}
        self._arrays_of: tuple[str, ...] = ()

    def parity(self, step: Step, y: np.ndarray, device: Device) -> ParityResult:
        """How the output for `activations(step.key)` compares; raises OracleError, LoadError, and what running another
        arm raises where the step's is exact to that."""
        if step.block is not None:
            return self._block(step, step.block, y)
        arm = self.registry.arm(step.assignment.arm)
        rows = self._rows(step)
        found = oracle.compare(y[rows], self._expected(arm, step, device), arm.tolerance, step.call.k)
        found = replace(found, m=int(np.arange(step.m)[rows][found.m]))
        return ParityResult(
            passed=found.ok,
            worst=found.worst,
            row=found.m,
            column=found.n,
            error=found.error,
            bound=found.bound,
            reason="" if found.ok else str(found),
        )

    def foresee(self, step: Step) -> None:
        """Make what an output of a projection is compared with before there is one, where no arm runs for that; raises
        OracleError and LoadError."""
        arm = self.registry.arm(step.assignment.arm)
        if step.block is None and not _other(arm):
            self._kept(arm, step)

    def _block(self, step: Step, block: Block, out: np.ndarray) -> ParityResult:
        """Of every stage of a block; weights of one block are kept until those of another are asked for."""
        if step.layer not in self._blocks:
            arms = {e.arm.name: e.arm for e in self.registry.entries}
            made = FfnParity(block.gate_up, block.down, arms, reading(self.held))
            self._blocks = {step.layer: made}
        found = trial.apart(out, (step.call.y.data, *step.stages))
        judge, dims = self._blocks[step.layer], step.call.context.dims
        return judge.parity(step.program, step.m, dims, self._x(step), found.__getitem__)

    def arrays(self, step: Step) -> dict[str, dict[str, np.ndarray]]:
        """The step's weights on the host, as declared, kept until others are asked for; raises LoadError."""
        names = _names(step)
        if names != self._arrays_of:
            self._arrays, self._arrays_of = arrays(step, reading(self.held)), names
        return self._arrays

    def _expected(self, arm: Arm, step: Step, device: Device) -> oracle.Reference:
        if other := _other(arm):
            y = self._output_of(other, step, device).astype(np.float64)
            return oracle.Reference(y, np.abs(y))
        return self._kept(arm, step)

    def _kept(self, arm: Arm, step: Step) -> oracle.Reference:
        """Of the step's own arithmetic, kept until a step of other weights is asked for: at full size it is what takes
        the time."""
        names = _names(step)
        if names != self._weights:
            self._weights, self._own = names, {}
        if step.key not in self._own:
            if arm.reference is arm.quantized is arm.terms is None and arm.activation == "bf16":
                self._multiply(step)
            else:
                values, _ = oracle.activations(self._judged(step), arm.activation)
                declared = step.assignment.declarations
                self._own[step.key] = oracle.reference(arm, step.call, declared, self.arrays(step), values)[0]
        return self._own[step.key]

    def _multiply(self, step: Step) -> None:
        """The products of all steps that read the same weights."""
        alike = [s for s in self.plan.steps if _names(s) == self._weights and s.roles == step.roles]
        w = oracle.dequantized(step.assignment.declarations, self.arrays(step), step.call.n, step.call.k)
        judged = [self._judged(s) for s in alike]
        made = oracle.product(np.concatenate([_wide(x) for x in judged]), w)
        ends = np.cumsum([x.shape[0] for x in judged])[:-1]
        parts = np.split(made.values, ends), np.split(made.magnitude, ends)
        for s, v, m in zip(alike, *parts, strict=True):
            self._own[s.key] = oracle.Reference(v, m)

    def _rows(self, step: Step) -> np.ndarray | slice:
        """The rows of a projection's output that are judged, as an index."""
        arm = self.registry.arm(step.assignment.arm)
        if not 2 < self.most < step.m or arm.reference is not None or isinstance(arm.tolerance, Exact):
            return slice(None)
        rng = np.random.default_rng([self.seed, step.m])
        between = 1 + rng.choice(step.m - 2, self.most - 2, replace=False)
        return np.concatenate([[0], np.sort(between), [step.m - 1]])

    def _judged(self, step: Step) -> np.ndarray:
        x: np.ndarray = self._x(step)[self._rows(step)]
        return x

    def _x(self, step: Step) -> np.ndarray:
        return activations(step.key, step.call.k, self.seed)

    def _output_of(self, arm: str, step: Step, device: Device) -> np.ndarray:
        """What another arm makes of the same weights and input."""
        pins = tuple(Pin(role, arm, origin="tolerance") for role in step.roles)
        context = replace(self.plan.context, preferences=Preferences(pins), rows=(Rows(step.m, step.m),))
        plan = plan_variant(arm, "", [Site(step.projections)], context, [step.m], self.registry)
        (other,) = plan.steps
        with Bench.of(plan, self.held, device) as bench:
            inputs = {other.call.x.data.name: self._x(step)}
            held = arrays(other, reading(self.held))
            return trial.run_program(other.program, other.call, bench.weights, device, inputs, held)


class Judge(Parity):
    """Judges outputs of one variant: against its own weights as its arms read them, and against the reference's."""

    def __init__(self, registry: Registry, plan: VariantPlan, held: Checkpoint, products: Products) -> None:
        super().__init__(registry, plan, held, products.seed)
        self.products = products

    def judge(self, step: Step, y: np.ndarray, device: Device) -> Numbers:
        """Parity and accuracy of the output for `activations(step.key)`, a block's with its stages beside it; raises
        what `parity` raises."""
        parity = self.parity(step, y, device)
        alike = [s for s in self.plan.steps if (s.layer, s.roles) == (step.layer, step.roles)]
        fidelity = oracle.fidelity(y[:, : step.call.n], self.products.of(step, alike))
        return Numbers(
            parity,
            AccuracyResult(
                rel_l2=fidelity.rel_l2,
                cosine=fidelity.cosine,
                snr_db=fidelity.snr_db,
                worst_row=fidelity.worst_row,
            ),
            digest(y),
        )


def _other(arm: Arm) -> str:
    """The arm whose outputs an arm's are compared with; "" where that is no arm."""
    named = arm.tolerance.to if isinstance(arm.tolerance, Exact) else "reference"
    return "" if named == "reference" else named


def _names(step: Step) -> tuple[str, ...]:
    """The tensors an arm reads, by name: derived ones are named after what they are made of, and how."""
    return tuple(t.name for a in step.assignments for d in a.declarations for t in d.tensors.values())


def arrays(step: Step, read: Read) -> dict[str, dict[str, np.ndarray]]:
    """The step's weights on the host, as declared, by their keys in its call; raises LoadError."""
    out: dict[str, dict[str, np.ndarray]] = {}
    for before, declarations in step.declarations.items():
        made = oracle.declared(declarations, read)
        out |= {before + key: fields for key, fields in made.items()}
    return out


def outputs(
    plan: VariantPlan, held: Checkpoint, device: Device, keys: Sequence[Key], seed: int
) -> Iterator[tuple[Step, np.ndarray | Exception]]:
    """Run steps one after another on one load of the weights, each with everything checked: their outputs, of a block
    with its stages beside it.

    A kernel that faults is that step's answer: the exception. On a GPU it is the last one, for the context may be
    lost. Raises what loading raises.
    """
    steps = {s.key: s for s in plan.steps}
    with Bench.of(plan, held, device) as bench:
        for key in keys:
            step = steps[key]
            inputs = {step.call.x.data.name: activations(key, step.call.k, seed)}
            try:
                found: np.ndarray | Exception = trial.run_program(
                    step.program, step.call, bench.weights, device, inputs, arrays(step, reading(held)), step.stages
                )
            except Exception as e:  # whatever an arm, a kernel or a driver does is that cell's result
                found = e
            yield step, found
            if isinstance(found, Exception) and device.name != "interpreter":
                return

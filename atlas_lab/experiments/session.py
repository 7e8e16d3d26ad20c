"""An experiment with everything decided: its references, and each variant's plan, at full size and at the numbers'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atlas_lab.checkpoint import Checkpoint, CheckpointError
from atlas_lab.core.library import LibraryLaunch, missing_of
from atlas_lab.core.program import PlanError
from atlas_lab.core.projection import Site
from atlas_lab.core.registry import Registry
from atlas_lab.core.route import RouteError
from atlas_lab.core.target import Target
from atlas_lab.experiments.config import Experiment, Loaded
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.plan import VariantPlan, agree, context_for, plan_variant
from atlas_lab.experiments.reference import References, Weights, references, selected, variant_weights
from atlas_lab.experiments.settings import DEFAULT_TARGET, Said
from atlas_lab.kernels.lang import cache

SEED = 20


@dataclass(frozen=True)
class Session:
    """One experiment on one target. `plans` are of the full model; `folder` keeps the checkpoints that are made."""

    loaded: Loaded
    said: Said
    registry: Registry
    target: Target
    name: str
    experiment: Experiment
    references: References
    weights: dict[str, Weights]
    plans: dict[str, VariantPlan]
    folder: Path

    @property
    def where(self) -> str:
        return f"{self.loaded.source.name}: experiment {self.name}"

    def file(self, variant: str) -> Checkpoint:
        """The checkpoint a variant's numbers run on; made where it is not there. Raises ConfigError."""
        try:
            return self.weights[variant].file(self.references, self.folder)
        except CheckpointError as e:
            raise ConfigError(f"{self.where}, variant {variant}: {e}") from None

    def check_libraries(self) -> None:
        """Raise ConfigError, naming variant and extra, where a library that a plan calls is missing here."""
        for v, plan in self.plans.items():
            launches = (x for s in plan.steps for x in s.program.launches)
            missing = missing_of(x.call for x in launches if isinstance(x, LibraryLaunch))
            if missing:
                raise self.loaded.source.error(("experiments", self.name, "variants", v), missing)

    def reference_file(self) -> Checkpoint:
        """The BF16 weights that accuracy is against."""
        return self.references.numbers.file("bf16", self.folder)

    def numbers_plan(self, variant: str, held: Checkpoint) -> VariantPlan:
        """The plan of a variant over the weights in its file; raises ConfigError where another arm would serve them
        than serves the full model's."""
        numbers = self.references.numbers
        sites = selected(held, numbers.layers, numbers.roles)
        made = self._plan(variant, sites)
        agree(self.plans[variant], made, self.where)
        return made

    def _plan(self, variant: str, sites: Sequence[Site]) -> VariantPlan:
        return _plan(self.loaded, self.said, self.registry, self.target, self.name, variant, sites, self.references)


def open_session(
    loaded: Loaded,
    said: Said,
    registry: Registry,
    name: str | None,
    target: Target | None = None,
    *,
    small: bool = True,
) -> Session:
    """Decide everything about an experiment; reads headers, no values. With `small`, numbers run at the interpreter's
    sizes. Raises ConfigError naming file, experiment and variant."""
    name, x = loaded.experiment(name)
    target = target or target_for(loaded, registry)
    models = registry.models
    refs = references(loaded, name, x, small=small, models=models)
    weights = {v: variant_weights(loaded, name, v, x.variants[v], refs.full, models) for v in x.variants}
    plans = {}
    for v, w in weights.items():
        try:
            sites = w.sites(refs.full)
        except CheckpointError as e:
            raise loaded.source.error(("experiments", name, "variants", v), str(e)) from None
        plans[v] = _plan(loaded, said, registry, target, name, v, sites, refs)
    return Session(loaded, said, registry, target, name, x, refs, weights, plans, cache.directory())


def target_for(loaded: Loaded | None, registry: Registry) -> Target:
    """The file's target, else the default one."""
    return registry.target((loaded.config.target if loaded else None) or DEFAULT_TARGET)


def _plan(
    loaded: Loaded,
    said: Said,
    registry: Registry,
    target: Target,
    name: str,
    v: str,
    sites: Sequence[Site],
    refs: References,
) -> VariantPlan:
    x = loaded.config.experiments[name]
    variant = x.variants[v]
    context = context_for(loaded, said, target, refs.full.dims, x.m, v, variant)
    weights = "+".join(dict.fromkeys(p.weight.format for s in sites for p in s.projections))
    try:
        return plan_variant(v, weights, sites, context, x.m, registry, x.blocks)
    except (RouteError, PlanError) as e:
        raise loaded.source.error(("experiments", name, "variants", v), str(e)) from None

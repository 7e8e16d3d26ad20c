"""Configurations by name: a checkpoint under the file's settings, an experiment's variant, or a checkpoint under a
variant's levers, pins and orders."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from atlas_lab.checkpoint import open_checkpoint
from atlas_lab.checkpoint.family import PART
from atlas_lab.core.context import Context, ModelDims
from atlas_lab.core.levers import nearest
from atlas_lab.core.registry import Registry
from atlas_lab.core.target import Target
from atlas_lab.core.tuned_file import shipped_table
from atlas_lab.experiments.config import Loaded
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.plan_blocks import ffn_blocks
from atlas_lab.experiments.session import open_session, target_for
from atlas_lab.experiments.settings import Said, levers_for, preferences_for
from atlas_lab.experiments.whole_model import ModelPlan, others_of, plan_model, plan_routes

UNITS = {"B": 1} | {
    f"{prefix}{i}B": (1024 if i else 1000) ** power for power, prefix in enumerate("KMGT", start=1) for i in ("", "i")
}
KV_DTYPES = {"bf16": "bf16", "f16": "f16", "fp8": "e4m3"}


@dataclass(frozen=True)
class Memory:
    """What the weights share the card with. Without a `budget` it is the target's memory."""

    budget: int | None = None
    reserve: int = 0
    kv_dtype: str = "bf16"
    sequences: int = 1

    def __post_init__(self) -> None:
        if self.kv_dtype not in KV_DTYPES:
            near = nearest(self.kv_dtype, KV_DTYPES)
            raise ConfigError(f"--kv-dtype {self.kv_dtype}: expected one of {', '.join(KV_DTYPES)}{near}")
        if self.budget is not None and self.budget < 1:
            raise ConfigError(f"--memory {self.budget}: expected 1 byte or more")
        if self.sequences < 1:
            raise ConfigError(f"--sequences {self.sequences}: expected an integer of 1 or more")

    def within(self, context: Context) -> Context:
        """The context with this memory."""
        budget = int(context.target.memory.value) if self.budget is None else self.budget
        return replace(
            context,
            memory_budget=budget,
            reserve=self.reserve,
            kv_dtype=KV_DTYPES[self.kv_dtype],
            sequences=self.sequences,
        )


def parse_bytes(option: str, text: str) -> int:
    """`141GB`, `80GiB`, `1.5 GB` or a plain number of bytes; raises ConfigError naming the option."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]*)", text.strip())
    units = {u.lower(): n for u, n in UNITS.items()}
    unit = (match.group(2) or "B").lower() if match else ""
    if match is None or unit not in units:
        raise ConfigError(f"{option} {text}: expected bytes, as a number with one of {', '.join(UNITS)}: 141GB, 80GiB")
    return int(float(match.group(1)) * units[unit])


def parse_rank(text: str) -> tuple[int, int]:
    """`0/2`: rank 0 of 2; raises ConfigError."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
    rank, size = (int(match[1]), int(match[2])) if match else (0, 0)
    if not rank < size:
        raise ConfigError(f"--tensor-parallel {text}: expected RANK/SIZE with 0 <= RANK < SIZE, such as 0/2")
    return rank, size


@dataclass(frozen=True)
class Planner:
    """Plans configurations of one run of the command. `tensor_parallel` (rank, size) cuts checkpoints, not
    experiments."""

    loaded: Loaded
    said: Said
    registry: Registry
    memory: Memory = Memory()
    tensor_parallel: tuple[int, int] = (0, 1)

    def plan(self, name: str) -> ModelPlan:
        """The plan of `CHECKPOINT`, `EXPERIMENT:VARIANT` or `CHECKPOINT@EXPERIMENT:VARIANT`; raises ConfigError and
        what opening and resolving raise."""
        path, _, rest = name.rpartition("@")
        if os.path.exists(name) or ":" not in rest:  # not of pathlib, which raises for a name too long
            return self._checkpoint(name, Path(name), "", "")
        experiment, _, variant = rest.partition(":")
        if path:
            return self._checkpoint(name, Path(path), experiment, variant)
        _known(self.loaded.experiment(experiment)[1].variants, experiment, variant)
        return self.variants(experiment)[variant]

    def variants(self, experiment: str | None) -> dict[str, ModelPlan]:
        """The plan of every variant of an experiment, over its layers and roles."""
        if self.tensor_parallel != (0, 1):
            raise ConfigError("--tensor-parallel: an experiment's layers are whole, expected a CHECKPOINT")
        session = open_session(self.loaded, self.said, self.registry, experiment)
        return {
            v: self._with_blocks(
                plan_routes(f"{session.name}:{v}", p.routes, self.memory.within(p.context), whole=False)
            )
            for v, p in session.plans.items()
        }

    def _with_blocks(self, made: ModelPlan) -> ModelPlan:
        return replace(made, blocks=ffn_blocks(made.routes, made.context, self.registry))

    def _checkpoint(self, name: str, path: Path, experiment: str, variant: str) -> ModelPlan:
        target = target_for(self.loaded, self.registry)
        try:
            held = open_checkpoint(path, self.registry.models or None, tensor_parallel=self.tensor_parallel)
        except OSError as e:
            raise ConfigError(f"{path}: cannot be read: {e.strerror or e}") from None
        context = self.memory.within(self._context(target, held.dims, experiment, variant))
        whole = PART not in held.config
        made = plan_model(name, held.sites, context, self.registry, others_of(held), whole=whole)
        return self._with_blocks(replace(made, missing=held.missing))

    def _context(self, target: Target, dims: ModelDims, experiment: str, variant: str) -> Context:
        chosen = None
        if experiment:
            variants = self.loaded.experiment(experiment)[1].variants
            _known(variants, experiment, variant)
            chosen = variants[variant]
        return Context(
            target=target,
            dims=dims,
            levers=levers_for(self.loaded, self.said, target, chosen),
            tensor_parallel=self.tensor_parallel,
            preferences=preferences_for(self.loaded, variant, chosen),
            table=shipped_table(target.name),
        )


def _known(variants: Mapping[str, object], experiment: str, variant: str) -> None:
    if variant not in variants:
        known = ", ".join(variants)
        said = f"experiment {experiment}: unknown variant {variant!r}, expected one of {known}"
        raise ConfigError(f"{said}{nearest(variant, variants)}")

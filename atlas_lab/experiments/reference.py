"""The BF16 model that an experiment starts from, and its weights in each variant's format: as handles for plans, as
files for numbers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from atlas_lab import checkpoint, formats
from atlas_lab.checkpoint import Checkpoint, CheckpointError, Sizes, open_checkpoint, qwen35
from atlas_lab.checkpoint.naming import convention
from atlas_lab.core.context import ModelDims
from atlas_lab.core.projection import Projection, Site
from atlas_lab.experiments.config import Dims, Experiment, Loaded, ModelSpec, Variant
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.yaml_source import Part

SMALL = Dims(hidden=256, intermediate=384)
FAMILIES = {"qwen3.5": "qwen3.5-27b"}


@dataclass(frozen=True)
class Reference:
    """A synthetic model by `sizes` and `seed`, or `source`, an open BF16 checkpoint; its chosen layers and roles."""

    label: str
    layers: tuple[int, ...]
    roles: tuple[str, ...]
    seed: int = 0
    sizes: Sizes | None = None
    source: Checkpoint | None = None

    @property
    def dims(self) -> ModelDims:
        if self.sizes is not None:
            return self.sizes.dims
        assert self.source is not None
        return self.source.dims

    def sites(self, weights: str = "bf16") -> list[Site]:
        """The chosen sites with weights in a format, as handles; raises CheckpointError."""
        if self.sizes is not None:
            return checkpoint.synthetic_sites(self.sizes, weights, self.layers, self.roles)
        assert self.source is not None
        chosen = selected(self.source, self.layers, self.roles)
        for p in (p for site in chosen for p in site.projections):
            if p.weight.format != "bf16":
                name = p.weight.fields[0][1].name
                raise CheckpointError(f"{self.source.path}: {name}: found {p.weight.format}, expected bf16")
        return chosen if weights == "bf16" else [_converted(site, weights) for site in chosen]

    def file(self, weights: str, folder: Path) -> Checkpoint:
        """The chosen weights in a format as a checkpoint, made in `folder` unless it is there; raises
        CheckpointError."""
        if self.source is not None and weights == "bf16":
            return self._part()
        path = folder / "checkpoints" / self._key(weights)
        if not path.exists():
            try:
                if self.sizes is not None:
                    checkpoint.write_checkpoint(path, self.sizes, weights, self.layers, self.roles, self.seed)
                else:
                    checkpoint.quantize_checkpoint(self._part(), weights, path)
            except CheckpointError:
                if not path.exists():  # else another process made the same files meanwhile
                    raise
        return open_checkpoint(path)

    def _part(self) -> Checkpoint:
        """The open checkpoint with its chosen sites alone."""
        assert self.source is not None
        part = {"layers": list(self.layers), "roles": [p.role for s in self.sites() for p in s.projections]}
        store = replace(self.source.store, config={**self.source.config, qwen35.PART: part})
        return replace(self.source, store=store, sites=tuple(self.sites()), unread=())

    def _key(self, weights: str) -> str:
        """Names the content of a file: what it is made from, and the code that makes it."""
        digest = hashlib.sha256(_recipe().encode())
        if self.sizes is not None:
            digest.update(json.dumps([asdict(self.sizes), self.seed]).encode())
        else:
            assert self.source is not None
            for p in (p for site in self.sites() for p in site.projections):
                digest.update(p.label.encode())
                digest.update(self.source.store.read(p.weight["weight"].name).view("u1").data)
        digest.update(json.dumps([weights, self.layers, self.roles]).encode())
        return f"{weights}-{digest.hexdigest()[:24]}"


def selected(held: Checkpoint, layers: Sequence[int], roles: Sequence[str]) -> list[Site]:
    """The sites of a checkpoint among layers and role patterns; raises CheckpointError for one it has not."""
    layout = held.layout
    wanted = layout.selected(layers, roles) if layout else qwen35.selected(Sizes.of(held.config), layers, roles)
    have = {(p.layer, p.role): p for p in held.projections}
    out = []
    for layer, group in wanted:
        for role in group:
            if (layer, role) not in have:
                raise CheckpointError(f"{held.path}: layers.{layer}.{role}: missing, expected its weight here")
        out.append(Site(tuple(have[layer, role] for role in group)))
    return out


def _converted(site: Site, weights: str) -> Site:
    c = convention(weights)

    def one(p: Projection) -> Projection:
        module = p.weight["weight"].name.removesuffix(".weight")
        return replace(p, weight=qwen35.convention_of(p.role, c).source(module, p.n, p.k))

    return Site(tuple(one(p) for p in site.projections))


@cache
def _recipe() -> str:
    """A digest of the code that writes checkpoints: files of another version are never taken for this one's."""
    digest = hashlib.sha256()
    for package in (checkpoint, formats):
        assert package.__file__ is not None
        for file in sorted(Path(package.__file__).parent.glob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class References:
    """`full` is what plans, bytes and floors are of; `numbers` what parity and accuracy run on (`full` itself on a
    GPU, and for small checkpoints)."""

    full: Reference
    numbers: Reference

    @property
    def same(self) -> bool:
        return self.full is self.numbers


def references(loaded: Loaded, name: str, x: Experiment, *, small: bool, models: Mapping[str, Any]) -> References:
    """The references of an experiment; with `small`, numbers run at the interpreter's sizes. Raises ConfigError."""
    at: tuple[Part, ...] = ("experiments", name)
    layers, roles = tuple(x.layers), tuple(x.roles)
    if x.model is not None:
        s = _sizes(loaded, (*at, "model"), x.model)
        full = Reference(_label(x.model, s), layers, roles, x.model.seed, sizes=s)
    else:
        assert x.checkpoint is not None
        path = loaded.base / x.checkpoint
        try:
            source = open_checkpoint(path, models or None)
        except CheckpointError as e:
            raise loaded.source.error((*at, "checkpoint"), str(e)) from None
        full = Reference(f"checkpoint {path}", layers, roles, source=source)
    _check(loaded, at, full)
    dims = x.interpreter or (SMALL if x.model is not None else None)
    if not small or dims is None or _fits(full, dims):
        return References(full, full)
    if full.source is not None and full.source.family not in FAMILIES:
        said = f"found dimensions for a {full.source.family} checkpoint, expected none: small models are of"
        raise loaded.source.error((*at, "interpreter"), f"{said} {', '.join(FAMILIES)}")
    held = full.sizes or Sizes.of(full.source.config if full.source else {})
    s = checkpoint.sizes(
        "tiny",
        hidden=dims.hidden,
        intermediate=dims.intermediate,
        layers=held.layers,
        interval=held.interval,
        layer_types=held.layer_types,
        output_gate=held.output_gate,
        activation_limit=held.activation_limit,
    )
    label = f"hidden {s.hidden}, intermediate {s.intermediate}, seed {full.seed}"
    return References(full, Reference(label, layers, roles, full.seed, sizes=s))


def _fits(full: Reference, dims: Dims) -> bool:
    """Whether a synthetic model is no larger than the interpreter's sizes."""
    d = full.dims
    return full.sizes is not None and d.hidden <= dims.hidden and d.intermediate <= dims.intermediate


def _check(loaded: Loaded, at: tuple[Part, ...], full: Reference) -> None:
    try:
        full.sites()
    except CheckpointError as e:
        said = str(e)
        where = next((key for key in ("layers", "roles") if said.startswith(f"{key}: ")), "")
        raise loaded.source.error((*at, where) if where else at, said.removeprefix(f"{where}: ")) from None


def _sizes(loaded: Loaded, at: tuple[Part, ...], m: ModelSpec) -> Sizes:
    if m.family is not None and m.family not in FAMILIES:
        raise loaded.source.error((*at, "family"), f"found {m.family!r}, expected {', '.join(FAMILIES)}")
    given = {k: getattr(m, k) for k in ("hidden", "intermediate", "layers") if getattr(m, k) is not None}
    try:
        return checkpoint.sizes(m.preset or FAMILIES[m.family or ""], **given)
    except CheckpointError as e:
        raise loaded.source.error(at, str(e)) from None


def _label(m: ModelSpec, s: Sizes) -> str:
    return f"{m.preset or m.family}, hidden {s.hidden}, intermediate {s.intermediate}, seed {m.seed}"


def variant_weights(loaded: Loaded, name: str, v: str, variant: Variant, full: Reference, models: Any) -> Weights:
    """What a variant's weights are; raises ConfigError where its checkpoint does not fit the reference."""
    if variant.checkpoint is None:
        return Weights(variant.weights or "bf16")
    at = ("experiments", name, "variants", v, "checkpoint")
    try:
        held = open_checkpoint(loaded.base / variant.checkpoint, models or None)
        sites = selected(held, full.layers, full.roles)
    except CheckpointError as e:
        raise loaded.source.error(at, str(e)) from None
    for mine, theirs in zip(sites, full.sites(), strict=True):
        for p, q in zip(mine.projections, theirs.projections, strict=True):
            if (p.n, p.k) != (q.n, q.k):
                said = f"{p.label}: found a weight [{p.n}, {p.k}], expected the reference's [{q.n}, {q.k}]"
                raise loaded.source.error(at, said)
    found = dict.fromkeys(p.weight.format for s in sites for p in s.projections)
    return Weights("+".join(found), held)


@dataclass(frozen=True)
class Weights:
    """A format's name, or an open checkpoint and the formats in it."""

    format: str
    held: Checkpoint | None = None

    def sites(self, reference: Reference) -> list[Site]:
        """Raises CheckpointError."""
        if self.held is not None:
            return selected(self.held, reference.layers, reference.roles)
        return reference.sites(self.format)

    def file(self, references: References, folder: Path) -> Checkpoint:
        """The weights that numbers run on: the checkpoint's own, or the reference converted. Raises CheckpointError,
        ConfigError."""
        if self.held is not None and references.same:
            return self.held
        if "+" in self.format:
            raise ConfigError(
                f"{self.held.path if self.held else ''}: found formats {self.format}, expected one to make small "
                "weights in; leave `interpreter` out to run its own"
            )
        return references.numbers.file(self.format, folder)

"""Result files of `ab`: versioned models, read back as they were written.

A number that is infinite or no number becomes null, with the word for it under `reasons` beside it.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from atlas_lab.core.projection import label_of
from atlas_lab.experiments.errors import ConfigError

AB = "atlas-lab.ab/1"


class Part(BaseModel):
    """Part of a result. Later versions of a schema only add fields, so unknown ones are kept. `reasons` has a word for
    each of its numbers that are null."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)
    reasons: dict[str, str] = {}


class Dimensions(Part):
    """N and K of the full model, and those on which numbers ran."""

    n: int
    k: int
    numbers_n: int
    numbers_k: int


class LaunchResult(Part):
    """One launch of a cell's program at full size, or one call of a library, whose grid and block are 0. `registers`
    and `spills` (bytes) are null where `not_compiled` says why; `problems` are what a compile check would fail it for:
    spills, float64, calls, warnings."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    pipe: str
    flops: int
    bytes: int
    registers: int | None = None
    spills: int | None = None
    not_compiled: str = ""
    problems: list[str] = []


class ParityResult(Part):
    """The output against the float64 product of the arm's own arithmetic: the largest error over its bound, and
    where it stands. `passed` is false for a ratio above 1."""

    passed: bool
    worst: float | None
    row: int = 0
    column: int = 0
    error: float | None = None
    bound: float | None = None
    reason: str = ""


class AccuracyResult(Part):
    """The output against the product of the unquantized BF16 weights."""

    rel_l2: float | None
    cosine: float | None
    snr_db: float | None
    worst_row: int = 0


class TimeResult(Part):
    """Microseconds of the whole program, its median over blocks and the interval of that median; `floor_us` is
    what the ceilings measured in this run allow, `share` floor over median."""

    median_us: float
    ci95: tuple[float, float]
    blocks: list[float]
    floor_us: float | None = None
    share: float | None = None
    bound_by: str = ""


class Cell(Part):
    """One variant, projection (or group, or block) and row count. Of a block `gated` says where its gated product is
    computed, and `notes` what levers ask for and an arm cannot do."""

    variant: str
    layer: int
    role: str
    m: int
    arm: str
    origin: str = ""
    status: Literal["passed", "failed", "crashed", "not run"] = "not run"
    reason: str = ""
    dims: Dimensions
    bytes: int
    flops: int
    launches: list[LaunchResult] = []
    gated: str = ""
    notes: list[str] = []
    parity: ParityResult | None = None
    accuracy: AccuracyResult | None = None
    floor_us: float | None = None
    time: TimeResult | None = None

    @property
    def label(self) -> str:
        return f"{label_of(self.layer, self.role)} M={self.m}"


class Comparison(Part):
    """Time of `b` over time of `a`. Without a role, the sum over all compared roles and layers."""

    a: str
    b: str
    m: int
    layer: int | None = None
    role: str | None = None
    ratio: float | None = None
    ci95: tuple[float, float] | None = None
    verdict: str = "not compared"
    reason: str = ""


class Bound(Part):
    """One `require` bound: null `passed` where it could not be measured, as `reason` says."""

    variant: str
    name: str
    limit: float
    found: float | None = None
    where: str = ""
    passed: bool | None = None
    reason: str = ""


class Residency(Part):
    """Bytes that stay, the most at any time while loading, and what stays by label; of the full model."""

    steady: int
    peak: int
    labels: dict[str, int] = {}


class VariantResult(Part):
    """What a variant was: its weights, levers, routes with their hashes, and memory."""

    weights: str
    levers: dict[str, Any]
    routes: list[dict[str, Any]]
    residency: Residency


class ExperimentResult(Part):
    """One experiment: its settings as the file had them, and everything found."""

    name: str
    config: dict[str, Any]
    variants: dict[str, VariantResult] = {}
    cells: list[Cell] = []
    comparisons: list[Comparison] = []
    require: list[Bound] = []


class AbResult(Part):
    """A whole result file."""

    schema_: Literal["atlas-lab.ab/1"] = Field(default="atlas-lab.ab/1", alias="schema")
    status: Literal["complete", "partial"] = "partial"
    tool: dict[str, str] = {}
    machine: dict[str, Any] = {}
    device: dict[str, Any] = {}
    target: dict[str, Any] = {}
    seed: int = 0
    settings: dict[str, str] = {}
    experiments: list[ExperimentResult] = []


def clean(value: Any) -> Any:
    """`value` with every number that JSON lacks as null, and the reason beside it."""
    if isinstance(value, list | tuple):
        return [clean(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if not isinstance(value, dict):
        return value
    out: dict[str, Any] = {}
    reasons = dict(value.get("reasons") or {})
    for key, v in value.items():
        if isinstance(v, float) and not math.isfinite(v):
            reasons[str(key)] = "not a number" if math.isnan(v) else "infinite"
        if key != "reasons":
            out[str(key)] = clean(v)
    return {**out, "reasons": reasons} if reasons else out


def dumps(result: Part) -> str:
    """The result as JSON text."""
    return json.dumps(clean(result.model_dump(by_alias=True)), indent=1, allow_nan=False) + "\n"


Result = TypeVar("Result", bound=Part)


def read(path: Path, model: type[Result], schema: str) -> Result:
    """A result file; raises ConfigError where it cannot be read or is of another schema."""
    try:
        return model.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror or e}") from None
    except ValueError as e:
        raise ConfigError(f"{path}: no result of schema {schema}: {str(e).splitlines()[0]}") from None


def read_ab(path: Path) -> AbResult:
    """A file that `ab --json` wrote; raises ConfigError as `read`."""
    return read(path, AbResult, AB)


def writable(path: Path, option: str = "--json") -> None:
    """Raise ConfigError, naming the option, where a file could not be written at the end of a run."""
    if path.is_dir():
        raise ConfigError(f"{option} {path}: found a directory, expected a file's path")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: found no directory {path.parent}, expected one that exists")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{option} {path}: found no leave to write in {path.parent}, expected it")


def write(path: Path, text: str) -> None:
    """Write `text` to a temporary name beside `path`, then rename: a reader sees the old file or the whole new one."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            f.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise

"""The answer of `tune` as versioned data: `atlas-lab.tune/1`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from atlas_lab.experiments.results import Part


class TriedSetting(Part):
    """A setting: microseconds a call by M, and the geometric mean over M of time over the read kernel's. `reason` says
    why it failed parity."""

    setting: dict[str, int]
    passed: bool = False
    reason: str = ""
    us: dict[int, float] = Field(default_factory=dict)
    of_read: float | None = None


class TuneCell(Part):
    """An arm on a weight `[n, k]`, or on several in one call, n rows together: `shape` spells them. `legal` counts its
    settings; `tried` are those that ran, best by the model first; `best` is the position of the fastest among them,
    null where nothing was chosen, as `reason` says."""

    arm: str
    format: str
    n: int
    k: int
    shape: str = ""
    status: Literal["tuned", "skipped", "failed", "crashed", "left"] = "left"
    reason: str = ""
    legal: int = 0
    read_us: float | None = None
    tried: list[TriedSetting] = Field(default_factory=list)
    best: int | None = None


class TuneResult(Part):
    """A whole result. Cells that are `left` were not reached within the budget."""

    schema_: Literal["atlas-lab.tune/1"] = Field(default="atlas-lab.tune/1", alias="schema")
    status: Literal["complete", "partial"] = "partial"
    command: str = ""
    tool: dict[str, str] = Field(default_factory=dict)
    machine: dict[str, Any] = Field(default_factory=dict)
    device: dict[str, Any] = Field(default_factory=dict)
    target: str = ""
    seed: int = 0
    cells: list[TuneCell] = Field(default_factory=list)

"""Result files of `bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from atlas_lab.experiments.results import LaunchResult, ParityResult, Part, read
from atlas_lab.experiments.stats import interval, ratio

BENCH = "atlas-lab.bench/1"
SPENT = "the budget was spent"  # why a case was not run
FLOORS = 1.4  # what one row may take before more rows are measured against that


class Measured(Part):
    """Microseconds a call: the median over blocks, its interval, and the blocks."""

    median_us: float
    ci95: tuple[float, float]
    blocks: list[float]


class Relative(Part):
    """Our speed over another's: above 1, we are faster."""

    speed: float
    ci95: tuple[float, float]


def measured(blocks: list[float], seed: int) -> Measured:
    """Blocks in microseconds a call, with their median and its interval."""
    return Measured(median_us=float(np.median(blocks)), ci95=interval(blocks, seed), blocks=blocks)


def relative(theirs: list[float], ours: list[float], seed: int) -> Relative:
    """Our speed over theirs: their time over ours."""
    r = ratio(ours, theirs, seed)
    return Relative(speed=r.value, ci95=(r.low, r.high))


class PeerResult(Part):
    """A peer's time in the same run, over weights in the format `weights`. `rel_l2` is the distance of its output from
    the float64 product of those; `wrong` says why it is no yardstick: its output is too far from that."""

    name: str
    version: str
    weights: str = "bf16"
    kernels: list[str] = Field(default_factory=list)
    reason: str = ""
    time: Measured
    rel_l2: float | None = None
    wrong: str = ""
    ours: Relative


class Must(Part):
    """What a case must reach: `of_peer`, `of_peers`, `of_floor`, `of_one_row` or `of_copy`."""

    name: str
    limit: float
    found: float
    passed: bool


class BenchCell(Part):
    """One case. `read` is the read kernel over the same bytes in the same run, `ahead` the same in dependent launches;
    `floor_us` the larger of `read` and of the operations over their pipe's rate, `share` floor over time. `ours` is the
    product alone where launches before it quantize x, as the peer's is, and `whole` the program with them. `used` says
    which projections of which models have the shape; `peer_failed` why the peer gave no time."""

    name: str
    arm: str
    format: str
    n: int
    k: int
    m: int
    used: list[str] = Field(default_factory=list)
    status: Literal["passed", "failed", "crashed", "not run"] = "not run"
    reason: str = ""
    bytes: int = 0
    flops: int = 0
    launches: list[LaunchResult] = Field(default_factory=list)
    parity: ParityResult | None = None
    ours: Measured | None = None
    whole: Measured | None = None
    read: Measured | None = None
    ahead: Measured | None = None
    floor_us: float | None = None
    bound_by: str = ""
    share: float | None = None
    of_read: Relative | None = None
    peer: PeerResult | None = None
    peer_failed: str = ""
    must: list[Must] = Field(default_factory=list)


def one_row(cell: BenchCell, cells: Sequence[BenchCell]) -> BenchCell | None:
    """The measured case of the same arm and weight for one row."""
    same = (cell.arm, cell.format, cell.n, cell.k, 1)
    return next((c for c in cells if c.ours and (c.arm, c.format, c.n, c.k, c.m) == same), None)


class BenchResult(Part):
    """A whole result file."""

    schema_: Literal["atlas-lab.bench/1"] = Field(default="atlas-lab.bench/1", alias="schema")
    status: Literal["complete", "partial"] = "partial"
    suite: str = ""
    command: str = ""
    tool: dict[str, str] = Field(default_factory=dict)
    machine: dict[str, Any] = Field(default_factory=dict)
    device: dict[str, Any] = Field(default_factory=dict)
    target: dict[str, Any] = Field(default_factory=dict)
    seed: int = 0
    cells: list[BenchCell] = Field(default_factory=list)


def read_bench(path: Path) -> BenchResult:
    """A file that `bench` wrote; raises ConfigError where it cannot be read or is of another schema."""
    return read(path, BenchResult, BENCH)

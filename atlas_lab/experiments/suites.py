"""What `bench` measures: cases of arms at shapes and row counts, each with its peer and what it must reach."""

from __future__ import annotations

from dataclasses import dataclass

from atlas_lab.core.levers import nearest
from atlas_lab.experiments.errors import ConfigError


@dataclass(frozen=True)
class BenchCase:
    """`arm` on a weight `[n, k]` stored in `format`, for `m` rows. `peer` is what one would use instead; `of_peer` and
    `of_floor` are the least speeds relative to the peer and to reading the same bytes (0: none)."""

    arm: str
    format: str
    n: int
    k: int
    m: int
    peer: str = ""
    of_peer: float = 0.0
    of_floor: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.arm} N={self.n} K={self.k} M={self.m}"


# The FFN of a 27B model: gate and up are [17408, 5120], down is [5120, 17408].
WIDE, TALL = (17408, 5120), (5120, 17408)
ROWS = (16, 64, 512, 4096)


def _foundation() -> tuple[BenchCase, ...]:
    formats = ("bf16", "fp8", "nvfp4")
    least = {"bf16": (0.85, 0.0), "fp8": (0.0, 0.75), "nvfp4": (0.0, 0.55)}
    gemv = [BenchCase(f"{f}_gemv", f, *WIDE, 1, "torch.mv", *least[f]) for f in formats]
    gemv += [BenchCase(f"{f}_gemv", f, *TALL, 1, "torch.mv") for f in formats]
    gemm = [BenchCase(f"{f}_gemm", f, *WIDE, m, "torch.mm") for f in formats for m in ROWS]
    must = BenchCase("bf16_gemm", "bf16", *WIDE, 4096, "torch.mm", of_peer=0.5)
    return (*gemv, *(must if c.name == must.name else c for c in gemm))


# `load` measures no arm: `bench_load` makes its one case.
SUITES: dict[str, tuple[BenchCase, ...]] = {"foundation": _foundation(), "load": ()}


def suite(name: str) -> tuple[BenchCase, ...]:
    """The cases of a suite; raises ConfigError naming the nearest."""
    if name not in SUITES:
        known = ", ".join(SUITES)
        raise ConfigError(f"--suite {name}: found no such suite, expected one of {known}{nearest(name, SUITES)}")
    return SUITES[name]

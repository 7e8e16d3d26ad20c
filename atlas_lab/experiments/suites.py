"""What `bench` measures: cases of arms at shapes and row counts, each with its peer and what it must reach."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

from atlas_lab.core.levers import nearest
from atlas_lab.experiments.bench_case import BenchCase, Case
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.suite_decode import decode
from atlas_lab.experiments.suite_prefill import prefill
from atlas_lab.experiments.suite_rows import rows

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
SUITES: dict[str, Callable[[], tuple[Case, ...]]] = {
    "foundation": _foundation,
    "decode": decode,
    "prefill": prefill,
    "rows": rows,
    "load": tuple,
}


def suite(name: str, only: str = "") -> tuple[Case, ...]:
    """The cases of a suite, or those whose name matches one of the patterns `only`, between commas; raises ConfigError
    for a suite there is not, naming the nearest, and for a pattern that names no case."""
    if name not in SUITES:
        known = ", ".join(SUITES)
        raise ConfigError(f"--suite {name}: found no such suite, expected one of {known}{nearest(name, SUITES)}")
    cases = SUITES[name]()
    if not only:
        return cases
    patterns = [p.strip() for p in only.split(",")]
    for p in patterns:
        if not any(fnmatchcase(c.name, p) for c in cases):
            such = f", such as {cases[0].name!r}" if cases else ""
            raise ConfigError(f"--only {p}: found no case, expected a pattern of the {len(cases)} of {name}{such}")
    chosen = tuple(c for c in cases if any(fnmatchcase(c.name, p) for p in patterns))
    return chosen

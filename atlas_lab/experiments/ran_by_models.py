"""The kernels of an arm that models run: those that are checked where checking all would take too long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import product

from atlas_lab.core.arm import Arm
from atlas_lab.core.target import Target
from atlas_lab.experiments.case import STORED, Case, base_context, site_of
from atlas_lab.experiments.cases import launched, role_sets
from atlas_lab.experiments.tune_jobs import shapes_of
from atlas_lab.formats import FORMATS, Format
from atlas_lab.kernels.lang import Kernel

FEW = (1, 16, 17, 64)  # rows of x
MORE = (256, 4096)
MOST = 32768  # rows of a weight: output heads launch what other large weights do


def ran_by_models(
    arm: Arm, target: Target, known: Mapping[str, Format] = FORMATS, *, few: bool = False
) -> frozenset[Kernel]:
    """Of an arm's kernels those that calls on the shipped models' weights launch on a target, with its shipped
    settings, in the first format that the arm starts from; with `few` for no more than 64 rows of x. None of an arm
    whose settings nobody measured there: it is for comparison."""
    form = next((f.name for f in known.values() if arm.source in ("", f.family)), "")
    measured = {c.arm for c in base_context(target).table.choices}
    if not form or (type(arm).settings is not Arm.settings and arm.name not in measured):
        return frozenset()
    return _ran(arm, target, form, FEW if few else FEW + MORE)


@lru_cache(maxsize=256)
def _ran(arm: Arm, target: Target, form: str, rows: tuple[int, ...]) -> frozenset[Kernel]:
    base, out = base_context(target), set[Kernel]()
    plain = Case(arm.name, role_sets(arm)[0], 1, 256, 256, form)
    ways = [s for s in STORED if not s or site_of(replace(plain, stored=s)) != site_of(plain)]
    for (n, k), m, stored in product(shapes_of(), rows, ways):
        if n <= MOST and m in arm.rows:
            out.update(launched(replace(plain, n=n, k=k, m=m, stored=stored), arm, base))
    return frozenset(out)

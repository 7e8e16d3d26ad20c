"""`arms`: what is installed, and from where."""

from __future__ import annotations

import json
from typing import Any

from atlas_lab.cli.common import DONE, Common, app, verb
from atlas_lab.core.arm import kernels_of, required
from atlas_lab.core.numbers import Rounded
from atlas_lab.core.registry import Fault, Plugin
from atlas_lab.core.resolve import Entry
from atlas_lab.experiments.report import row, table
from atlas_lab.kernels.lang.op import Needs


@verb(app, "arms")
def arms(common: Common) -> int:
    """List the arms that are installed, what they serve and where they come from; plugins that failed are rows too."""
    loaded = common.load()
    registry = common.registry(loaded)
    t = table("arm", "roles", "M", "starts from", "needs", "numbers", "from")
    for e in registry.entries:
        row(t, e.arm.name, " ".join(e.arm.roles), e.arm.rows, e.arm.source or "any", _needs(e), _numbers(e), _from(e))
    common.console.print(t)
    if registry.faults:
        t = table("plugin left out", "from", "why")
        for f in registry.faults:
            row(t, f.plugin.name, _origin(f.plugin), f.sentence, style="red")
        common.console.print(t)
    answer = {
        "schema": "atlas-lab.arms/1",
        "arms": [_arm(e) for e in registry.entries],
        "faults": [_fault(f) for f in registry.faults],
    }
    common.give(json.dumps(answer, indent=1) + "\n")
    return DONE


def _needs(e: Entry) -> str:
    need = Needs()
    for x in required(e.arm):
        need = need.union(x.needs)
    return ", ".join((str(need), *(c.library for c in e.arm.library_calls)))


def _numbers(e: Entry) -> str:
    t = e.arm.tolerance
    own = f"rounded ({t.accumulate}, {t.out})" if isinstance(t, Rounded) else f"exact to {t.to}"
    if e.arm.accuracy is not None:
        return f"{own}; changes them, {e.arm.accuracy.min_snr_db:g} dB or more"
    return own if e.default else f"{own}; runs where named"


def _from(e: Entry) -> str:
    return f"{e.distribution} {e.version}" if e.distribution else e.where


def _origin(p: Plugin) -> str:
    return f"{p.distribution} {p.version}, {p.where}" if p.distribution else p.where


def _arm(e: Entry) -> dict[str, Any]:
    return {
        "name": e.arm.name,
        "roles": list(e.arm.roles),
        "rows": [e.arm.rows.first, e.arm.rows.last],
        "source": e.arm.source,
        "activation": e.arm.activation,
        "kernels": [k.entry for k in kernels_of(e.arm)],
        "library_calls": [c.name for c in e.arm.library_calls],
        "needs": _needs(e),
        "min_snr_db": e.arm.accuracy.min_snr_db if e.arm.accuracy else None,
        "reduction_class": e.arm.reduction_class.id if e.arm.reduction_class else None,
        "version": e.arm.version,
        "distribution": e.distribution,
        "distribution_version": e.version,
        "where": e.where,
    }


def _fault(f: Fault) -> dict[str, str]:
    p = f.plugin
    return {"plugin": p.name, "distribution": p.distribution, "version": p.version, "where": p.where, "why": f.sentence}

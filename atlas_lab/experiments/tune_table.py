"""From what `tune` measured to the file of a target's table."""

from __future__ import annotations

import datetime
from pathlib import Path

from atlas_lab.core.tuned_file import Measured, Run, TunedFile, read_tuned
from atlas_lab.core.tuning import Choice, setting
from atlas_lab.experiments.results import write
from atlas_lab.experiments.tune_results import TriedSetting, TuneResult

DIGITS = 3  # of microseconds


def held(path: Path, target: str) -> TunedFile:
    """The file as it is, without entries where there is none; raises TuningError for one that is wrong."""
    return read_tuned(path, target) if path.exists() else TunedFile(target)


def entries(result: TuneResult, date: str = "") -> list[Measured]:
    """An entry for every cell in which a best setting was found. `date` is today's if it is not given."""
    run = Run(
        card=str(result.device.get("name") or "unknown"),
        driver=str(result.device.get("driver") or "unknown"),
        tools=tuple((k if k != "version" else "atlas-lab", v) for k, v in result.tool.items() if k != "name"),
        command=result.command,
        date=date or datetime.date.today().isoformat(),
    )
    out = []
    for c in result.cells:
        if c.best is not None and c.read_us is not None:
            best, first = c.tried[c.best], c.tried[0]
            out.append(
                Measured(
                    choice=Choice(c.arm, c.n, c.k, setting(**best.setting)),
                    format=c.format,
                    us=_times(best),
                    read_us=round(c.read_us, DIGITS),
                    model_setting=setting(**first.setting),
                    model_us=_times(first),
                    run=run,
                )
            )
    return out


def _times(t: TriedSetting) -> tuple[tuple[int, float], ...]:
    return tuple((m, round(us, DIGITS)) for m, us in sorted(t.us.items()))


def save(path: Path, before: TunedFile, result: TuneResult) -> int:
    """Write what was there and what was measured to `path`, whole or not at all; returns how many entries are new.
    Nothing measured, nothing written."""
    new = entries(result)
    if new:
        write(path, before.merged(new).text())
    return len(new)

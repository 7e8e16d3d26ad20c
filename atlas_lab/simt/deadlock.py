"""The report of a launch in which nothing can go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atlas_lab.simt.errors import Deadlock, DivergentCollective, SimtError
from atlas_lab.simt.warp import Gathering

if TYPE_CHECKING:
    from atlas_lab.simt.scheduler import Scheduler
    from atlas_lab.simt.thread import SimThread

_SHOWN = 6


def report(scheduler: Scheduler) -> SimtError:
    """Who waits for what. Lanes that wait for one another in different collectives are a divergence."""
    stuck = [t for b in scheduler.resident for t in b.threads if not t.done]
    for t in stuck:
        if isinstance(t.wait, Gathering):
            for other in t.wait.who:
                if isinstance(other.wait, Gathering) and other.wait is not t.wait:
                    return t.error(
                        DivergentCollective,
                        f"lane {t.lane} of warp {t.warp} would {t.wait.describe()}, but lane {other.lane} would "
                        f"{other.wait.describe()}",
                        site=t.parked(),
                    )
    groups: dict[str, list[SimThread]] = {}
    for t in stuck:
        groups.setdefault(f"block {t.block.index} \0 {t.doing()}", []).append(t)
    parts = []
    for key, threads in list(groups.items())[:_SHOWN]:
        block, text = key.split("\0")
        parts.append(f"{block}{_spell(threads)}{text}")
    if len(groups) > _SHOWN:
        parts.append(f"{len(groups) - _SHOWN} more groups of threads")
    total = scheduler.grid.x * scheduler.grid.y * scheduler.grid.z
    waiting = total - scheduler.started
    late = f"; {waiting} more blocks start only when a resident one ends" if waiting else ""
    return stuck[0].error(Deadlock, "nothing can go on: " + ", ".join(parts) + late, site=stuck[0].parked())


def _spell(threads: list[SimThread]) -> str:
    names = [str(t.index) for t in threads]
    if len(names) == 1:
        return f"thread {names[0]}"
    return f"threads {names[0]} to {names[-1]} ({len(names)})" if len(names) > 2 else f"threads {' and '.join(names)}"

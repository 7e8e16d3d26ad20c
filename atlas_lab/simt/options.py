"""How a launch is interpreted, and what it cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Options:
    """`checks`: initialisation, poison and races; addresses are always checked. `order`: threads run in program
    order, or in one drawn from the seed. `resident`: how many blocks live at a time; a block that waits for one
    further away than that deadlocks, as on a full device (whole clusters, one at least). `late_async`: asynchronous
    copies land when they are waited for, or ("random") at issue or at the wait. `step_limit`: calls of intrinsics
    that reach the thread, a thread; a loop that calls none cannot be caught. `idle_rounds`: how often spinning
    threads look again while nothing changes before that is a deadlock."""

    checks: bool = True
    order: Literal["program", "random"] = "program"
    resident: int = 4
    late_async: Literal[True, "random"] = True
    step_limit: int = 500_000
    idle_rounds: int = 200


@dataclass(frozen=True)
class Stats:
    """What a launch did. `steps` are calls of intrinsics that reached a thread, `shared_bytes` the most that a
    block declared, static and dynamic."""

    blocks: int
    threads: int
    steps: int
    shared_bytes: int
    seconds: float

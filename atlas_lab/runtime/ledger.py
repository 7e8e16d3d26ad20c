"""What is allocated now: by label, to the byte, counted as plans count it."""

from __future__ import annotations

from dataclasses import dataclass

from atlas_lab.core.residency import Row, rows_of
from atlas_lab.core.tensor import round_up
from atlas_lab.runtime.errors import DeviceError


@dataclass(frozen=True, eq=False)
class Entry:
    """One live allocation. `bytes` are rounded to 256; `label` groups rows, `owner` first needed it."""

    name: str
    label: str
    owner: str
    bytes: int


class Ledger:
    """Live allocations of a device, or of one load plan.

    `held` and `peak` are rounded bytes. Guard bands are a test aid and not counted: `guards` has their bytes, which
    the card holds besides.
    """

    def __init__(self) -> None:
        self._live: dict[Entry, int] = {}
        self.held = 0
        self.peak = 0
        self.guards = 0

    def take(self, name: str, nbytes: int, label: str, owner: str = "", guard: int = 0) -> Entry:
        """Count an allocation of `nbytes` (rounded here) beside `guard` uncounted bytes."""
        entry = Entry(name, label, owner, round_up(nbytes))
        self._live[entry] = guard
        self.held += entry.bytes
        self.peak = max(self.peak, self.held)
        self.guards += guard
        return entry

    def give(self, entry: Entry) -> None:
        """Strike an allocation off; raises DeviceError for one that is not live."""
        if entry not in self._live:
            raise DeviceError(f"buffer {entry.name!r} is freed twice")
        self.guards -= self._live.pop(entry)
        self.held -= entry.bytes

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Live allocations, oldest first."""
        return tuple(self._live)

    def rows(self) -> tuple[Row, ...]:
        """Bytes and count by label, largest first: what `LoadPlan.ledger()` forecasts."""
        return rows_of((e.label, e.bytes) for e in self._live)

    def check_empty(self) -> None:
        """Raise DeviceError naming what is still allocated."""
        if self._live:
            names = ", ".join(f"{e.name!r} ({e.bytes} bytes, {e.label})" for e in list(self._live)[:8])
            more = f" and {len(self._live) - 8} more" if len(self._live) > 8 else ""
            raise DeviceError(f"{self.held} bytes are still allocated: {names}{more}")

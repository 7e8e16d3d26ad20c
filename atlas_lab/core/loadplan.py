"""A load plan: the ordered steps that the forecast folds and the loader executes, and what they come to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from atlas_lab.core.declare import Derived
from atlas_lab.core.projection import WeightSource
from atlas_lab.core.tensor import Tensor


@dataclass(frozen=True)
class Check:
    """Check the values of a stored weight on the host, before any device allocation."""

    weight: WeightSource
    label: str


@dataclass(frozen=True)
class Alloc:
    """Take a device buffer of `bytes`, already rounded. `label` groups rows of the ledger, `owner` is the layer's
    projection that first needed it."""

    buffer: str
    bytes: int
    label: str
    owner: str


@dataclass(frozen=True)
class Upload:
    """Copy a stored tensor into its buffer."""

    tensor: Tensor


@dataclass(frozen=True)
class Build:
    """Fill the buffers of a derived weight; those of its sources are filled before, if `derived.device` is set."""

    derived: Derived
    owner: str


@dataclass(frozen=True)
class Free:
    """Give a buffer back."""

    buffer: str


Step = Check | Alloc | Upload | Build | Free


@dataclass(frozen=True)
class Row:
    """One row of a ledger: bytes and count of the buffers that share a label."""

    label: str
    bytes: int
    count: int


def rows_of(entries: Iterable[tuple[str, int]]) -> tuple[Row, ...]:
    """Ledger rows of (label, bytes) pairs, largest first."""
    totals: dict[str, tuple[int, int]] = {}
    for label, size in entries:
        held, count = totals.get(label, (0, 0))
        totals[label] = (held + size, count + 1)
    return tuple(sorted((Row(k, b, c) for k, (b, c) in totals.items()), key=lambda r: (-r.bytes, r.label)))


@dataclass(frozen=True)
class Pruned:
    """A stored tensor that no route binds: never uploaded, or given back once something was built of it."""

    tensor: Tensor
    reason: str


@dataclass(frozen=True)
class Report:
    """What a load left and what it did without, by label: `kept` buffers, those `freed` on the way, and what was `not
    built`, which a loader that builds whatever some arm could read would hold besides."""

    kept: tuple[Row, ...]
    freed: tuple[Row, ...]
    not_built: tuple[Row, ...]

    def lines(self) -> Iterator[str]:
        """One line a row: `kept 96.3 MB in 12 of checkpoint nvfp4`."""
        for what, rows in (("kept", self.kept), ("freed", self.freed), ("not built", self.not_built)):
            for r in rows:
                yield f"{what} {r.bytes / 1e6:.1f} MB in {r.count} of {r.label}"


@dataclass(frozen=True)
class LoadPlan:
    """Steps in order. The forecast folds them, the loader executes them; sizes are rounded to 256 bytes in both."""

    steps: tuple[Step, ...]
    pruned: tuple[Pruned, ...] = ()
    not_built: tuple[Row, ...] = ()

    @property
    def steady(self) -> int:
        """Bytes held after the last step."""
        return sum(r.bytes for r in self.ledger())

    @property
    def peak(self) -> int:
        """Most bytes held at any time."""
        held = most = 0
        sizes: dict[str, int] = {}
        for s in self.steps:
            if isinstance(s, Alloc):
                sizes[s.buffer] = s.bytes
                held += s.bytes
                most = max(most, held)
            elif isinstance(s, Free):
                held -= sizes.pop(s.buffer)
        return most

    def ledger(self) -> tuple[Row, ...]:
        """Rows by label of what stays, largest first."""
        return rows_of((a.label, a.bytes) for a in self._fold()[0])

    def report(self) -> Report:
        """What a load will report."""
        kept, freed = self._fold()
        rows = [rows_of((a.label, a.bytes) for a in found) for found in (kept, freed)]
        return Report(rows[0], rows[1], self.not_built)

    def _fold(self) -> tuple[list[Alloc], list[Alloc]]:
        """Allocations that stay, and those that are freed."""
        live: dict[str, Alloc] = {}
        freed: list[Alloc] = []
        for s in self.steps:
            if isinstance(s, Alloc):
                live[s.buffer] = s
            elif isinstance(s, Free):
                freed.append(live.pop(s.buffer))
        return list(live.values()), freed

    @property
    def reads(self) -> int:
        """Bytes read from the checkpoint."""
        tensors = {t.name: t for s in self.steps if isinstance(s, Check) for t in s.weight.tensors.values()}
        return sum(t.bytes for t in tensors.values())

"""What a suite of `bench` holds."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol


class Case(Protocol):
    """What `bench` measures and gives a row of its page. Those of one `group` follow each other in a suite: they are
    planned, loaded and judged together, by what `bench.KINDS` names for their type."""

    @property
    def name(self) -> str: ...

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms it needs installed."""
        ...

    @property
    def group(self) -> Hashable: ...


@dataclass(frozen=True)
class BenchCase:
    """`arm` on a weight `[n, k]` stored in `format`, for `m` rows. `peer` is what one would use instead; `of_peer` and
    `of_floor` are the least speeds relative to the peer and to reading the same bytes, `of_one_row` the least relative
    to the same arm and weight at M=1, or to 1.4 floors where those take longer, `of_peers` the least geometric mean of
    speeds relative to the peer over all shapes of the suite, `of_more_rows` the least relative to the same format and
    shape with more rows, in time (0: none). `used` says which
    projections of which models have this shape. `again`: the suite has the same case beside another peer, and this one
    is named by its own."""

    arm: str
    format: str
    n: int
    k: int
    m: int
    peer: str = ""
    of_peer: float = 0.0
    of_floor: float = 0.0
    of_one_row: float = 0.0
    of_peers: float = 0.0
    of_more_rows: float = 0.0
    used: tuple[str, ...] = ()
    again: bool = False

    @property
    def name(self) -> str:
        return f"{self.arm} N={self.n} K={self.k} M={self.m}" + f" against {self.peer}" * self.again

    @property
    def arms(self) -> tuple[str, ...]:
        return (self.arm,)

    @property
    def group(self) -> Hashable:
        return (self.arm, self.format, self.n, self.k, self.again)


@dataclass(frozen=True)
class FfnCase:
    """A block of `hidden` and `intermediate` stored in `format` for `m` rows: gate and up on arm `gate_up`, down on
    arm `down`, the gated product where `gated` says, launches dependent with `pdl`. `of_floor` is the least speed
    relative to reading the block's bytes (0: none)."""

    gate_up: str
    down: str
    format: str
    hidden: int
    intermediate: int
    m: int
    gated: str = "epilogue"
    pdl: bool = True
    of_floor: float = 0.0

    @property
    def form(self) -> str:
        return f"ffn gated={self.gated} pdl={'on' if self.pdl else 'off'}"

    @property
    def name(self) -> str:
        return f"{self.form} {self.format} N={self.intermediate} K={self.hidden} M={self.m}"

    @property
    def arms(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.gate_up, self.down)))

    @property
    def group(self) -> Hashable:
        return (self.gate_up, self.down, self.format, self.hidden, self.intermediate)

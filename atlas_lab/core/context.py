"""Everything a decision may depend on, frozen."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from atlas_lab.core.levers import Levers
from atlas_lab.core.rows import Rows
from atlas_lab.core.target import Target
from atlas_lab.core.tuning import Table

SERVED = (Rows(1, 16384),)


@dataclass(frozen=True)
class ModelDims:
    """Model dimensions that decisions and residency need; of one rank, where a model is cut for several.

    `attention_layers` hold KV caches. `kv_width` is the elements of K that one token adds over all layers, where they
    differ; 0 where all have `kv_heads` of `head_dim`. `activation` is that of the gated FFN: `silu` or `gelu_tanh`;
    `activation_limit` clamps its inputs, gate from above and up on both sides, where it is not 0. `state_bytes` is what
    one sequence holds whatever its length: states of recurrences and convolutions.
    """

    family: str
    hidden: int
    intermediate: int
    layers: int
    attention_layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    kv_width: int = 0
    activation: str = "silu"
    activation_limit: float = 0.0
    state_bytes: int = 0

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of K and V one token adds over all attention layers."""
        return 2 * (self.kv_width or self.attention_layers * self.kv_heads * self.head_dim) * element_bytes


@dataclass(frozen=True)
class Pin:
    """An arm demanded for a role pattern, in one layer or all; without `rows`, for the arm's own rows."""

    pattern: str
    arm: str
    layer: int | None = None
    rows: Rows | None = None
    origin: str = "pins"

    @property
    def specificity(self) -> tuple[bool, bool]:
        """Layer before role before glob."""
        return (self.layer is not None, not any(c in self.pattern for c in "*?["))

    def matches(self, layer: int, role: str) -> bool:
        return self.layer in (None, layer) and fnmatchcase(role, self.pattern)

    def __str__(self) -> str:
        where = self.pattern if self.layer is None else f"layers.{self.layer}.{self.pattern}"
        return f"{self.origin}: {where} = {self.arm}"


@dataclass(frozen=True)
class Order:
    """Arms preferred for a role pattern and a range of rows, best first."""

    pattern: str
    rows: Rows
    arms: tuple[str, ...]
    origin: str

    def matches(self, role: str, rows: Rows) -> bool:
        return fnmatchcase(role, self.pattern) and self.rows.intersect(rows) is not None


@dataclass(frozen=True)
class Preferences:
    """Pins, and orders by precedence: the variant's, the base's, the target's tuned table."""

    pins: tuple[Pin, ...] = ()
    orders: tuple[Order, ...] = ()

    def named(self) -> frozenset[str]:
        """Every arm that a pin or an order names."""
        return frozenset([p.arm for p in self.pins] + [a for o in self.orders for a in o.arms])


@dataclass(frozen=True)
class Context:
    """What `resolve` decides from. `rows` is what will be served: a copy that only other row counts need is dead.
    `memory_budget` and `reserve` are bytes; `table` is the target's tuned table."""

    target: Target
    dims: ModelDims
    levers: Levers = Levers()
    preferences: Preferences = Preferences()
    rows: tuple[Rows, ...] = SERVED
    sequences: int = 1
    kv_dtype: str = "bf16"
    kv_page: int = 16
    memory_budget: int = 0
    reserve: int = 0
    tensor_parallel: tuple[int, int] = (0, 1)
    table: Table = Table()

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("context: found no rows to serve, expected at least one range of M")
        rank, size = self.tensor_parallel
        if not 0 <= rank < size:
            raise ValueError(f"context: found tensor-parallel rank {rank} of {size}, expected 0 <= rank < size")

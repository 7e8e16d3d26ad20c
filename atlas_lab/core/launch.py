"""Launches and programs: what runs, over handles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar

from atlas_lab.core.call import Operand
from atlas_lab.core.enqueued import Enqueued, LaunchError
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.kernels.lang import WAITS, Kernel, Scalar
from atlas_lab.kernels.lang.types import FloatScalar, Parameter

GRID_LIMITS = ((1 << 31) - 1, 65535, 65535)  # blocks by dimension
CLUSTER_LIMIT = 8  # blocks that every device with clusters can run as one
Dims = int | tuple[int, ...]
Argument = Tensor | TensorMap | int | float


def dims(value: Dims) -> tuple[int, int, int]:
    """One to three extents as three; raises LaunchError for more."""
    given = (value,) if isinstance(value, int) else value
    if len(given) > 3:
        raise LaunchError(f"found {len(given)} extents, expected one to three")
    x, y, z = (*given, 1, 1)[:3]
    return x, y, z


def _fits(value: int | float, dtype: Scalar) -> bool:
    if isinstance(dtype, FloatScalar):
        return True
    low = -(1 << dtype.bits - 1) if dtype.signed else 0
    return isinstance(value, int) and low <= value < low + (1 << dtype.bits)


@dataclass(frozen=True)
class Launch(Enqueued):
    """One kernel launch: `grid` in blocks, `block` in threads, `shared` dynamic bytes, `args` in parameter order.
    `cluster`: how many blocks run together, by dimension; the grid is a multiple of it.

    An `Operand` among the arguments stands for its values. `pipe` is the math unit that does the work (`fma`,
    `mma_bf16`, …) and `flops` how much, for the roofline. `pdl` lets it start before the launch before it in the
    stream is over, which is that of another program for the first of one; its kernel must wait (`grid_wait`). None: in
    a program that is planned, wherever the kernel does, the target can and the lever `pdl` is on; else not.
    `quantizes`: it makes the quantized operand of x that launches after it multiply, which peers get made. Raises
    LaunchError where counts, dtypes or kinds do not fit the kernel's annotations.
    """

    kind: ClassVar[str] = "kernel"
    kernel: Kernel
    grid: Dims
    block: Dims
    args: tuple[Any, ...]
    shared: int = 0
    cluster: Dims = 1
    flops: int = 0
    pipe: str = "fma"
    cooperative: bool = False
    pdl: bool | None = None
    quantizes: bool = False
    label: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "args", tuple(a.data if isinstance(a, Operand) else a for a in self.args))
        name = self.kernel.entry
        try:
            for extents in ("grid", "block", "cluster"):
                object.__setattr__(self, extents, dims(getattr(self, extents)))
        except LaunchError as e:
            raise LaunchError(f"launch of {name}: {e}") from None
        self._check_count(f"launch of {name}")
        for a, p in zip(self.args, self.params, strict=True):
            if p.mode:
                found = getattr(a, "dtype", type(a).__name__)
                if isinstance(a, TensorMap) is not (p.abi == "map"):
                    kinds = ("a tensor map", "a tensor") if p.abi == "map" else ("a tensor", "a tensor map")
                    other = kinds[1] if isinstance(a, Tensor | TensorMap) else found
                    raise LaunchError(f"launch of {name}: argument {p.name!r} is {other}, expected {kinds[0]}")
                if found != p.dtype.name:
                    raise LaunchError(f"launch of {name}: argument {p.name!r} is {found}, expected {p.dtype}")
            elif not isinstance(a, int | float):
                raise LaunchError(f"launch of {name}: argument {p.name!r} is {a}, expected a number")
            elif not _fits(a, p.dtype):
                raise LaunchError(f"launch of {name}: argument {p.name!r} is {a}, expected {p.dtype}")
        if min(*dims(self.grid), *dims(self.block)) < 1:
            raise LaunchError(f"launch of {name}: found grid {self.grid}, block {self.block}, expected 1 or more")
        if any(g > most for g, most in zip(dims(self.grid), GRID_LIMITS, strict=True)):
            raise LaunchError(f"launch of {name}: found grid {self.grid}, expected at most {GRID_LIMITS}")
        self._check_cluster(name)
        if self.shared < 0:
            raise LaunchError(f"launch of {name}: found {self.shared} bytes of shared memory, expected 0 or more")
        self._check_pipe(f"launch of {name}")
        if self.pdl and not self.waits:
            raise LaunchError(f"launch of {name}: a dependent launch of a kernel without grid_wait would race")
        bounds = self.kernel.launch_bounds
        most = bounds[0] if isinstance(bounds, tuple) else bounds
        if most is not None and self.threads > most:
            raise LaunchError(f"launch of {name}: found {self.threads} threads a block, its launch bounds allow {most}")

    def _check_cluster(self, name: str) -> None:
        cluster = dims(self.cluster)
        if min(cluster) < 1 or prod(cluster) > CLUSTER_LIMIT:
            raise LaunchError(f"launch of {name}: found cluster {cluster}, expected 1 to {CLUSTER_LIMIT} blocks")
        if any(g % c for g, c in zip(dims(self.grid), cluster, strict=True)):
            raise LaunchError(f"launch of {name}: found grid {self.grid}, expected a multiple of cluster {cluster}")

    @property
    def entry(self) -> str:
        return self.kernel.entry

    @property
    def params(self) -> tuple[Parameter, ...]:
        return self.kernel.params

    @property
    def form(self) -> tuple[object, ...]:
        return (self.kernel, self.grid, self.block, self.cluster, self.shared)

    @property
    def waits(self) -> bool:
        """Whether its kernel waits for the launches before it, and so may be dependent."""
        return not WAITS.isdisjoint(self.kernel.ops)

    @property
    def threads(self) -> int:
        return prod(dims(self.block))

    @property
    def blocks(self) -> int:
        return prod(dims(self.grid))


@dataclass(frozen=True)
class Program:
    """Launches in order, calls of libraries among them, and the role of every buffer they name.

    `inputs` and `outputs` are ports, `persistent` buffers are weights, `temporaries` live from the first launch to
    the last that names them. Raises LaunchError for a launch that names a buffer of no role.
    """

    name: str
    launches: tuple[Enqueued, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    persistent: tuple[Tensor, ...] = ()
    temporaries: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        known = {t.name for t in self.buffers}
        for launch in self.launches:
            for t in (*launch.reads, *launch.writes):
                if t.name not in known:
                    raise LaunchError(f"program {self.name}: {launch.entry} names {t}, which has no role in it")

    @property
    def buffers(self) -> Iterator[Tensor]:
        yield from (*self.inputs, *self.outputs, *self.persistent, *self.temporaries)

    def lifetime(self, t: Tensor) -> tuple[int, int]:
        """The first and the last launch that names the buffer of `t`; raises LaunchError where none does."""
        named = [i for i, x in enumerate(self.launches) if any(t.name == u.name for u in (*x.reads, *x.writes))]
        if not named:
            raise LaunchError(f"program {self.name}: no launch names {t}")
        return named[0], named[-1]

    @property
    def flops(self) -> int:
        return sum(x.flops for x in self.launches)

    @property
    def traffic(self) -> int:
        """Fewest bytes the whole program moves: every port and weight once; temporaries stay in the cache."""
        return sum(t.bytes for t in (*self.inputs, *self.outputs, *self.persistent))

    def renamed(self, name: str) -> Program:
        return replace(self, name=name)

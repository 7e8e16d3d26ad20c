"""Running a kernel on the interpreter: arguments in, blocks through the scheduler, errors out."""

from __future__ import annotations

import contextvars
import gc
import time
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from atlas_lab.core.tensor import reach
from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.kernels.lang.kernel import Kernel
from atlas_lab.kernels.lang.types import FloatScalar, Parameter, Pointer, StorageScalar
from atlas_lab.simt.arrays import ArrayPointer
from atlas_lab.simt.block import Block
from atlas_lab.simt.buffer import Buffer
from atlas_lab.simt.cluster import Cluster
from atlas_lab.simt.dependent import Overlap, never_waited
from atlas_lab.simt.errors import SimtError
from atlas_lab.simt.options import Options, Stats
from atlas_lab.simt.scheduler import Scheduler
from atlas_lab.simt.shadow import Shadow
from atlas_lab.simt.thread import Dim3
from atlas_lab.simt.tiles import MapPointer

MAX_THREADS = 1024


def run(
    kernel: Kernel,
    *,
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    args: Sequence[Any],
    cluster: int | tuple[int, ...] = 1,
    shared_bytes: int = 0,
    seed: int = 0,
    options: Options = Options(),
    overlap: Overlap | None = None,
) -> Stats:
    """Run `kernel` over `grid` blocks of `block` threads (each one to three extents) with `shared_bytes` of dynamic
    shared memory; blocks of one `cluster` run together.

    `args` follow the kernel's parameters: a `Buffer` or `(Buffer, byte offset)` for a pointer, `(Buffer, TensorMap)`
    for a map, a Python number for a scalar. The same seed and options give the same run. `overlap` makes it a dependent
    launch. Raises a SimtError for a kernel that cannot be interpreted, arguments that do not fit, and everything a
    kernel does wrong.
    """
    started = time.perf_counter()
    extent = _extent(kernel, "block", block)
    blocks = _extent(kernel, "grid", grid)
    together = _extent(kernel, "cluster", cluster)
    if any(g % c for g, c in zip(blocks, together, strict=True)):
        raise _fail(kernel, f"found grid {tuple(blocks)}, expected a multiple of cluster {tuple(together)}")
    _check_launch(kernel, extent, shared_bytes, options)
    values = _bind(kernel, args)
    written = [b for b, p in zip(_buffers(args), kernel.params, strict=True) if b is not None and p.writes]
    bound = [b for b in _buffers(args) if b is not None]
    # Overflow, infinities and NaN are ordinary values on a GPU. NumPy keeps this in the context; greenlets share it.
    with np.errstate(all="ignore"):
        context = contextvars.copy_context()
    scheduler = Scheduler(kernel, blocks, extent, values, shared_bytes, seed, options, context, overlap, together)
    collecting = gc.isenabled()
    gc.disable()  # everything is let go of by reference counts; looking for cycles costs a sixth of the time
    try:
        if options.checks:
            for b in bound:
                b.shadow = Shadow(b, poison=False) if any(b is w for w in written) else None
                if overlap is not None:
                    b.shadow = overlap.shadow(b, b.shadow)
                b.watched = b.shadow is not None or b.gaps is not None
        scheduler.loop(_clusters(scheduler))
        if overlap is not None and not overlap.waited:
            raise never_waited(kernel.entry)
    finally:
        if collecting:
            gc.enable()
        for b in bound:
            b.shadow, b.watched = None, False
            b.sync.clear()
        if not options.checks:
            for b in written:
                b.gaps = None  # nobody kept account
    return Stats(
        blocks=blocks.x * blocks.y * blocks.z,
        threads=extent.x * extent.y * extent.z,
        steps=scheduler.steps,
        shared_bytes=scheduler.most_shared,
        seconds=time.perf_counter() - started,
    )


def _clusters(scheduler: Scheduler) -> Iterator[Sequence[Block]]:
    """The blocks of each cluster, by rank."""
    g, c = scheduler.grid, scheduler.cluster
    for first in product(range(0, g.z, c.z), range(0, g.y, c.y), range(0, g.x, c.x)):
        blocks = []
        for offset in product(range(c.z), range(c.y), range(c.x)):
            z, y, x = (f + o for f, o in zip(first, offset, strict=True))
            blocks.append(Block(scheduler, x + g.x * (y + g.y * z), (x, y, z)))
        Cluster(blocks)
        yield blocks


def _fail(kernel: Kernel, text: str, buffer: str | None = None) -> SimtError:
    return SimtError(text, kernel=kernel.entry, buffer=buffer)


def _extent(kernel: Kernel, name: str, given: int | tuple[int, ...]) -> Dim3:
    parts = given if isinstance(given, tuple) else (given,)
    if not 1 <= len(parts) <= 3 or not all(isinstance(p, int) and p >= 1 for p in parts):
        raise _fail(kernel, f"found {name} {given!r}, expected one to three integers of 1 or more")
    return Dim3(*parts, *(1,) * (3 - len(parts)))


def _check_launch(kernel: Kernel, block: Dim3, shared_bytes: int, options: Options) -> None:
    threads = block.x * block.y * block.z
    bounds = kernel.launch_bounds
    limit = MAX_THREADS if bounds is None else bounds if isinstance(bounds, int) else bounds[0]
    if threads > limit:
        raise _fail(kernel, f"found a block of {threads} threads, expected at most {limit}")
    if shared_bytes < 0:
        raise _fail(kernel, f"found {shared_bytes} bytes of dynamic shared memory, expected 0 or more")
    for name in ("resident", "step_limit", "idle_rounds"):
        if getattr(options, name) < 1:
            raise _fail(kernel, f"options: found {name}={getattr(options, name)}, expected 1 or more")
    if options.order not in ("program", "random"):
        raise _fail(kernel, f"options: found order={options.order!r}, expected 'program' or 'random'")
    if options.late_async not in (True, "random"):
        raise _fail(kernel, f"options: found late_async={options.late_async!r}, expected True or 'random'")
    lacking = [op.name for op in kernel.ops if op.numpy is None]
    if lacking:
        raise _fail(kernel, f"it runs on a GPU only: {', '.join(lacking)} has no NumPy meaning")
    if not kernel.interpretable:
        raise _fail(kernel, "it names numba.cuda itself, whose intrinsics the interpreter does not know")


def _buffers(args: Sequence[Any]) -> list[Buffer | None]:
    firsts = [a[0] if isinstance(a, tuple) and a else a for a in args]
    return [a if isinstance(a, Buffer) else None for a in firsts]


def _bind(kernel: Kernel, args: Sequence[Any]) -> tuple[Any, ...]:
    if len(args) != len(kernel.params):
        names = ", ".join(p.name for p in kernel.params)
        raise _fail(kernel, f"found {len(args)} arguments, expected {len(kernel.params)}: {names}")
    return tuple(
        _scalar(kernel, p, a) if p.abi == "scalar" else _map(kernel, p, a) if p.abi == "map" else _pointer(kernel, p, a)
        for p, a in zip(kernel.params, args, strict=True)
    )


def _pointer(kernel: Kernel, p: Parameter, arg: Any) -> Pointer:
    buffer, offset = arg if isinstance(arg, tuple) and len(arg) == 2 else (arg, 0)
    if not isinstance(buffer, Buffer) or not isinstance(offset, int):
        raise _fail(kernel, f"parameter {p.name!r}: found {arg!r}, expected a Buffer or (Buffer, byte offset)")
    if not 0 <= offset <= buffer.size or offset % p.dtype.bytes:
        raise _fail(
            kernel,
            f"parameter {p.name!r}: found byte offset {offset} in {buffer} of {buffer.size} bytes, expected one inside "
            f"that is a multiple of {p.dtype.bytes}",
            buffer.name,
        )
    if p.abi == "array":
        return ArrayPointer(buffer, offset, p.dtype, p.mode)
    return Pointer(buffer, offset, p.dtype, "global", p.mode)


def _map(kernel: Kernel, p: Parameter, arg: Any) -> MapPointer:
    buffer, tensor_map = arg if isinstance(arg, tuple) and len(arg) == 2 else (arg, None)
    if not isinstance(buffer, Buffer) or not isinstance(tensor_map, TensorMap):
        raise _fail(kernel, f"parameter {p.name!r}: found {arg!r}, expected (Buffer, TensorMap)")
    view = tensor_map.view
    if view.dtype != p.dtype.name:
        raise _fail(kernel, f"parameter {p.name!r}: found a tensor map of {view}, expected {p.dtype}", buffer.name)
    end = view.offset + (reach(view.shape, view.strides) + 1) * p.dtype.bytes
    if end > buffer.size:
        raise _fail(
            kernel,
            f"parameter {p.name!r}: found {view} up to byte {end} of {buffer}, expected at most {buffer.size}",
            buffer.name,
        )
    return MapPointer(buffer, p.dtype, p.mode, tensor_map)


def _scalar(kernel: Kernel, p: Parameter, arg: Any) -> Any:
    t = p.dtype
    if isinstance(t, StorageScalar):
        raise _fail(kernel, f"parameter {p.name!r}: a scalar of storage type {t} cannot be passed")
    if isinstance(t, FloatScalar):
        if isinstance(arg, bool) or not isinstance(arg, int | float | np.floating | np.integer):
            raise _fail(kernel, f"parameter {p.name!r}: found {arg!r}, expected a number")
        return t(arg)
    low, high = (-(t.mask >> 1) - 1, t.mask >> 1) if t.signed else (0, t.mask)
    if isinstance(arg, bool) or not isinstance(arg, int | np.integer) or not low <= int(arg) <= high:
        raise _fail(kernel, f"parameter {p.name!r}: found {arg!r}, expected an integer from {low} to {high} ({t})")
    return int(arg)

"""Programmatic dependent launch: a grid that starts before the one before it ends.

In a launch with `pdl`, blocks start as soon as every block of the launch before called `grid_launch_dependents` or
exited. What the launches before wrote may be read, and what they read or wrote may be written, only after
`grid_wait`. At least one thread must wait, or the end of this grid would not mean the end of the ones before it. In
a launch without `pdl`, and before compute capability 9.0, both are nothing: everything before it is over when it
starts. One kernel serves both.

Which load to use:

- weights, before `grid_wait`, so that they arrive while the launch before still runs: `ld_in_*`, `ld_in_*_stream` or
  `ld_in_*_line` (or `cp_async_*`). They stay above the wait. `ldg_*` do not: ptxas moves non-coherent loads below it
  (seen: sm_90 and sm_120, in a volatile asm too), which is right and gains nothing.
- what the launch before may have written, after the wait: `ld_waited_*` through the pointer that `grid_wait_for`
  returns. The address depends on the wait, so they stay below it, and are scheduled as freely as `ldg_*` (seen: the
  same registers and order, sm_90). Or `ld_in_*`, `ld_*` through other pointers, or `cp_async_*`, which keep the order
  in which they are written. `ldg_*` may move above it wherever they are written, and their path is only for memory
  that nothing writes while the grid runs: the interpreter reports them.
- weights after the wait: `ldg_*` as ever.
"""

from __future__ import annotations

from typing import Any

from atlas_lab.kernels.lang.machine import current
from atlas_lab.kernels.lang.memory import LD, emit_bf16, load, read_bf16, streaming
from atlas_lab.kernels.lang.op import SM90, Effect, Op, Ptr, PtrTo
from atlas_lab.kernels.lang.types import Pointer, f32

DEPENDENT = SM90
"""What a target needs for launches with `pdl`."""
IN, WAITED = Ptr(("global",), ("in", "waited")), Ptr(("global",), ("waited",))
_ARCH = 900

_CONTROL = "9.7.13 griddepcontrol"


def _wait() -> None:
    """Wait until the grids that this one depends on are over and all they wrote is visible to this grid."""
    current().grid_wait()


def _launch() -> None:
    """Let the next grid start once every block of this one has called this, or exited; the first call of a block
    counts. It promises nothing about memory: the next grid's `grid_wait` waits for the end of this one."""
    current().launch_dependents()


def _wait_for(p: Pointer) -> Pointer:
    """`grid_wait`, then the pointer for loads (`ld_waited_*`) that no compiler moves above it."""
    current().grid_wait()
    return Pointer(p.buffer, p.offset, p.dtype, p.space, "waited")


def _only(text: str) -> Any:
    """The lowering of an instruction that is nothing before compute capability 9.0."""
    return lambda e: e.since(_ARCH, lambda: e.asm(text, [], []))


def _emit_wait_for(e: Any, address: Any) -> Any:
    text = "griddepcontrol.wait; mov.b64 $0, $1;"
    return e.since(_ARCH, lambda: e.asm(text, [address.type], [address])[0], address)


grid_wait = Op(
    "grid_wait", (), None, ptx=_only("griddepcontrol.wait;"), numpy=_wait, effect=Effect.SYNC, section=_CONTROL
)
grid_wait_for = Op(
    "grid_wait_for",
    (Ptr(("global",), ("in",), indexed=False),),
    lambda to: PtrTo(to.dtype, to.space, "waited"),
    ptx=_emit_wait_for,
    numpy=_wait_for,
    effect=Effect.SYNC,
    section=_CONTROL,
)
grid_launch_dependents = Op(
    "grid_launch_dependents",
    (),
    None,
    ptx=_only("griddepcontrol.launch_dependents;"),
    numpy=_launch,
    effect=Effect.SYNC,
    section=_CONTROL,
)
WAITS = frozenset((grid_wait, grid_wait_for))
"""One of these is in each kernel of a dependent launch."""


def _ld_in(form: str) -> Op:
    return load(f"ld_in_{form}", form, "ld.global", IN, Effect.READ, LD)


def _ld_waited(form: str) -> Op:
    return load(f"ld_waited_{form}", form, "ld.global", WAITED, Effect.PURE, LD)


def _ld_in_stream(form: str) -> Op:
    return streaming(f"ld_in_{form}_stream", form, "ld.global", Effect.READ, LD, 256 if form == "v4_b32" else 0)


ld_in_b8, ld_in_b16, ld_in_b32, ld_in_v2_b32, ld_in_v4_b32, ld_in_f32 = map(
    _ld_in, ("b8", "b16", "b32", "v2_b32", "v4_b32", "f32")
)
ld_in_b32_stream, ld_in_v2_b32_stream, ld_in_v4_b32_stream = map(_ld_in_stream, ("b32", "v2_b32", "v4_b32"))
ld_in_bf16 = Op("ld_in_bf16", (IN,), f32, ptx=emit_bf16("ld.global"), numpy=read_bf16, effect=Effect.READ, section=LD)
ld_in_v4_b32_line = streaming("ld_in_v4_b32_line", "v4_b32", "ld.global", Effect.READ, LD, 128)
ld_waited_bf16 = Op("ld_waited_bf16", (WAITED,), f32, ptx=emit_bf16("ld.global"), numpy=read_bf16, section=LD)
ld_waited_b32, ld_waited_v2_b32, ld_waited_v4_b32, ld_waited_f32 = map(_ld_waited, ("b32", "v2_b32", "v4_b32", "f32"))

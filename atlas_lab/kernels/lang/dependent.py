"""Programmatic dependent launch: a grid that starts before the one before it ends.

In a launch with `pdl`, blocks start as soon as every block of the launch before called `grid_launch_dependents` or
exited. What the launches before wrote may be read, and what they read or wrote may be written, only after
`grid_wait`. At least one thread must wait, or the end of this grid would not mean the end of the ones before it. In
a launch without `pdl` both are nothing: everything before it is over when it starts.

Which load to use:

- weights, before `grid_wait`, so that they arrive while the launch before still runs: `ld_in_*` or `ld_in_*_stream`
  (or `cp_async_*`). They stay above the wait. `ldg_*` do not: ptxas moves non-coherent loads below it (seen: sm_90 and
  sm_120, in a volatile asm too), which is right and gains nothing.
- what the launch before may have written, after `grid_wait`: `ld_in_*` through `In` pointers, `ld_*` through others, or
  `cp_async_*`. They stay below the wait. `ldg_*` may move above it wherever they are written, and their path is only
  for memory that nothing writes while the grid runs: the interpreter reports them.
- weights after the wait: `ldg_*` as ever. `ld_in_*` keep the order in which they are written, so a loop over them is
  scheduled worse.

A kernel that names `grid_wait` needs sm_90, whether its launch is dependent or not.
"""

from __future__ import annotations

from atlas_lab.kernels.lang.machine import current
from atlas_lab.kernels.lang.memory import IN, LD, emit_bf16, load, read_bf16, streaming
from atlas_lab.kernels.lang.op import SM90, Effect, Op
from atlas_lab.kernels.lang.types import f32

_CONTROL = "9.7.13 griddepcontrol"


def _wait() -> None:
    """Wait until the grids that this one depends on are over and all they wrote is visible to this grid."""
    current().grid_wait()


def _launch() -> None:
    """Let the next grid start once every block of this one has called this, or exited; the first call of a block
    counts. It promises nothing about memory: the next grid's `grid_wait` waits for the end of this one."""
    current().launch_dependents()


grid_wait = Op(
    "grid_wait",
    (),
    None,
    ptx="griddepcontrol.wait;",
    numpy=_wait,
    effect=Effect.SYNC,
    needs=SM90,
    section=_CONTROL,
)
grid_launch_dependents = Op(
    "grid_launch_dependents",
    (),
    None,
    ptx="griddepcontrol.launch_dependents;",
    numpy=_launch,
    effect=Effect.SYNC,
    needs=SM90,
    section=_CONTROL,
)


def _ld_in(form: str) -> Op:
    return load(f"ld_in_{form}", form, "ld.global", IN, Effect.READ, LD)


def _ld_in_stream(form: str) -> Op:
    return streaming(f"ld_in_{form}_stream", form, "ld.global", Effect.READ, LD, 256 if form == "v4_b32" else 0)


ld_in_b8, ld_in_b16, ld_in_b32, ld_in_v2_b32, ld_in_v4_b32, ld_in_f32 = map(
    _ld_in, ("b8", "b16", "b32", "v2_b32", "v4_b32", "f32")
)
ld_in_b32_stream, ld_in_v2_b32_stream, ld_in_v4_b32_stream = map(_ld_in_stream, ("b32", "v2_b32", "v4_b32"))
ld_in_bf16 = Op("ld_in_bf16", (IN,), f32, ptx=emit_bf16("ld.global"), numpy=read_bf16, effect=Effect.READ, section=LD)

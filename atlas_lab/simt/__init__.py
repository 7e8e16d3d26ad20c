"""The interpreter: kernels, unmodified, on the CPU, one greenlet a CUDA thread, everything checked."""

from atlas_lab.simt.buffer import Buffer
from atlas_lab.simt.dependent import Overlap, Span
from atlas_lab.simt.errors import (
    AsyncError,
    BarrierMismatch,
    Deadlock,
    DivergentCollective,
    MbarrierError,
    Misaligned,
    MissingLane,
    OutOfBounds,
    PoisonRead,
    Race,
    ReadOnlyWrite,
    SimtError,
    StepLimit,
    Unfenced,
    Uninitialised,
    Unwaited,
)
from atlas_lab.simt.options import Options, Stats
from atlas_lab.simt.run import run

__all__ = [
    "AsyncError",
    "BarrierMismatch",
    "Buffer",
    "Deadlock",
    "DivergentCollective",
    "MbarrierError",
    "Misaligned",
    "MissingLane",
    "Options",
    "OutOfBounds",
    "Overlap",
    "PoisonRead",
    "Race",
    "ReadOnlyWrite",
    "SimtError",
    "Span",
    "Stats",
    "StepLimit",
    "Unfenced",
    "Uninitialised",
    "Unwaited",
    "run",
]

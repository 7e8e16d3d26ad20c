"""From a planned step to a cell of the result: dims, bytes, floors, and what the compiler says of its kernels."""

from __future__ import annotations

from atlas_lab.core.enqueued import Enqueued
from atlas_lab.core.launch import Launch
from atlas_lab.core.library import LibraryLaunch
from atlas_lab.core.target import Target
from atlas_lab.experiments.plan import Step, program_floor
from atlas_lab.experiments.results import Cell, Dimensions, LaunchResult
from atlas_lab.kernels.lang import KernelError
from atlas_lab.kernels.lang.compile import check_kernel, compile_kernel, compiler_missing
from atlas_lab.runtime.bind import planned


def cell_of(variant: str, step: Step, target: Target) -> Cell:
    """A cell with nothing measured; its numbers' sizes are the full ones until they run at others."""
    seconds, by = program_floor(target, step.program)
    n, k = step.call.n, step.call.k
    return Cell(
        variant=variant,
        layer=step.layer,
        role=step.role,
        m=step.m,
        arm=step.arm,
        origin=step.origin,
        gated=step.block.gated if step.block else "",
        notes=list(step.block.said) if step.block else [],
        dims=Dimensions(n=n, k=k, numbers_n=n, numbers_k=k),
        bytes=step.program.traffic,
        flops=step.program.flops,
        launches=[launch_result(x) for x in step.program.launches],
        floor_us=None if seconds is None else seconds * 1e6,
        reasons={"floor_us": by} if seconds is None else {},
    )


def launch_result(x: Enqueued) -> LaunchResult:
    """A launch as planned, not compiled."""
    expected = planned(x)
    return LaunchResult(
        kernel=x.entry,
        grid=expected.grid,
        block=expected.block,
        shared=expected.shared,
        pipe=x.pipe,
        flops=x.flops,
        bytes=x.traffic,
        not_compiled=x.said if isinstance(x, LibraryLaunch) else "",
    )


def fill(cell: Cell, step: Step, arch: str) -> None:
    """Registers, spills and compile faults of each of the cell's kernels, or why there are none."""
    for into, launch in zip(cell.launches, step.program.launches, strict=True):
        if not isinstance(launch, Launch):
            continue
        missing = compiler_missing()
        if missing:
            into.not_compiled = missing
            continue
        try:
            made = compile_kernel(launch.kernel, arch)
        except KernelError as e:
            into.not_compiled = str(e)
            continue
        into.registers, into.spills = made.registers, made.spill_stores + made.spill_loads
        into.problems = list(check_kernel(launch.kernel, arch))

"""From a route to a program: the arm's launches for one row count, over named ports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from atlas_lab.core.arm import Arm
from atlas_lab.core.call import Call, Epilogue, Operand, weights_of
from atlas_lab.core.context import Context
from atlas_lab.core.enqueued import Enqueued
from atlas_lab.core.launch import Launch, Program
from atlas_lab.core.library import LibraryLaunch, after_libraries
from atlas_lab.core.projection import Projection, label_of
from atlas_lab.core.route import Assignment
from atlas_lab.core.tensor import Tensor, row_major
from atlas_lab.kernels.lang import DEPENDENT

ALIGNED = 16  # bytes of the widest load


class PlanError(ValueError):
    """A program that cannot be planned; one sentence."""


def projection_call(
    projections: tuple[Projection, ...],
    assignment: Assignment,
    m: int,
    context: Context,
    epilogue: Epilogue = Epilogue(),
) -> Call:
    """The call an assignment's arm is handed for `m` rows: x is BF16 `[m, K]`, y BF16 `[m, N]`, N summed over a
    group. Ports are named `x` and `y` after the projections."""
    label = label_of(projections[0].layer, *(p.role for p in projections))
    n, k = sum(p.n for p in projections), projections[0].k
    return Call(
        roles=assignment.roles,
        weights=weights_of(assignment.declarations),
        x=Operand(Tensor("bf16", (m, k), f"{label}/x")),
        y=Operand(Tensor("bf16", (m, n), f"{label}/y")),
        m=m,
        n=n,
        k=k,
        context=context,
        epilogue=epilogue,
        counts=tuple(p.n for p in projections),
    )


def _launches(arm: Arm, call: Call) -> tuple[Enqueued, ...]:
    made: Any = arm.lower(call)
    launches = tuple(made) if isinstance(made, Iterable) else (made,)
    for x in launches:
        label = f"{call.y.data.name}: arm {arm.name}"
        if isinstance(x, LibraryLaunch):
            if x.call not in arm.library_calls:
                raise PlanError(f"{label} makes the {x.title}, which its `library_calls` do not list")
            continue
        if not isinstance(x, Launch):
            raise PlanError(f"{call.y.data.name}: lower of arm {arm.name} returned {made!r}, expected a list of Launch")
        if x.kernel not in arm.kernels:
            if x.kernel not in arm.optional_kernels:
                raise PlanError(f"{label} launches {x.kernel.spec}, which its `kernels` do not list")
            if not call.context.target.meets(x.kernel.needs):
                target = call.context.target.name
                raise PlanError(f"{label} launches {x.kernel.spec}, which needs {x.kernel.needs}, found {target}")
    read = {t.name for x in launches for t in x.reads}
    for t in call.epilogue.addends:
        if t.name not in read:
            raise PlanError(f"{call.y.data.name}: no launch of arm {arm.name} reads {t}, which it says that it adds")
    return after_libraries([settled(x, call.context) if isinstance(x, Launch) else x for x in launches])


def settled(x: Launch, context: Context) -> Launch:
    """The launch, dependent or not: where it leaves that open it is if its kernel waits, the target can and the lever
    `pdl` is on."""
    if x.pdl is not None:
        return x
    return replace(x, pdl=context.levers.pdl and x.waits and context.target.meets(DEPENDENT))


def _scratch(arm: Arm, call: Call) -> dict[str, Tensor]:
    made: Any = arm.scratch(call)
    if not isinstance(made, Mapping) or not all(isinstance(t, Tensor) for t in made.values()):
        said = f"{call.y.data.name}: scratch of arm {arm.name} returned {made!r}"
        raise PlanError(f"{said}, expected a mapping from names to Tensor")
    return {name: t.named(f"{call.y.data.name}/{name}") for name, t in made.items()}


def _check_epilogue(arm: Arm, call: Call) -> None:
    """Raises PlanError for addends and a format of y that are not what the call's epilogue says."""
    name, e = call.y.data.name, call.epilogue
    halved = call.n // 2 if e.activation else call.n
    for part, t, columns in (("lora", e.lora, call.n), ("residual", e.residual, halved)):
        if t is None:
            continue
        if (t.dtype, t.shape) != ("bf16", (call.m, columns)):
            raise PlanError(f"{name}: {part} is {t.dtype}{list(t.shape)}, expected bf16{[call.m, columns]}")
        if not t.is_contiguous or t.offset % ALIGNED:
            said = f"{part} begins at byte {t.offset}, its strides are {t.strides or row_major(t.shape)}"
            raise PlanError(f"{name}: {said}, expected rows that follow each other from a multiple of {ALIGNED} on")
    if e.quantize and e.quantize not in arm.quantizes:
        raise PlanError(f"{name}: arm {arm.name} quantizes y to {list(arm.quantizes)}, found {e.quantize}")
    if call.y.format != (e.quantize or "bf16"):
        raise PlanError(f"{name}: found y in {call.y.format}, expected {e.quantize or 'bf16'}")


def program_of(arm: Arm, call: Call) -> Program:
    """The program of one call.

    Raises PlanError where the arm serves other row counts, reads activations in another format than the call's, does
    not fuse a prologue or a part of the epilogue that is asked for, or lowers to something else than launches of its
    kernels; and for an addend of another shape or dtype than what it is added to.
    """
    if call.m not in arm.rows:
        raise PlanError(f"{call.x.data.name}: arm {arm.name} serves M {arm.rows}, found M={call.m}")
    if call.x.format != arm.activation and call.x.format not in arm.reads:
        formats = " or ".join((arm.activation, *arm.reads))
        raise PlanError(f"{call.x.data.name}: arm {arm.name} reads {formats}, found {call.x.format}")
    for part in call.epilogue.parts:
        if part not in arm.epilogues:
            raise PlanError(f"{call.y.data.name}: arm {arm.name} does not fuse {part}, expected {list(arm.epilogues)}")
    _check_epilogue(arm, call)
    if call.prologue and call.x.format != arm.activation:
        said = f"found {call.prologue} of x in {call.x.format}, expected {arm.activation}"
        raise PlanError(f"{call.x.data.name}: {said}")
    if call.prologue and call.prologue not in arm.prologues:
        said = f"arm {arm.name} does not fuse {call.prologue} into its input"
        raise PlanError(f"{call.x.data.name}: {said}, expected {list(arm.prologues)}")
    if call.prologue_limit and "limit" not in arm.prologues:
        said = f"arm {arm.name} does not clamp what goes into its gated product"
        raise PlanError(f"{call.x.data.name}: {said}, found a limit of {call.prologue_limit:g}, expected none")
    scratch = _scratch(arm, call)
    call = replace(call, scratch=scratch)
    weights = dict.fromkeys(t for fields in call.weights.values() for t in fields.values())
    return Program(
        name=f"{call.y.data.name.removesuffix('/y')} M={call.m} {arm.name}",
        launches=_launches(arm, call),
        inputs=(call.x.data, *(t for _, t in call.x.scales), *dict.fromkeys(call.epilogue.addends)),
        outputs=(call.y.data, *(t for _, t in call.y.scales)),
        persistent=tuple(weights),
        temporaries=tuple(scratch.values()),
    )

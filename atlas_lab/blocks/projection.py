"""One projection with what is added to it, whatever arm serves it: y = residual + W·x + s·B(A·x).

Where the arm adds neither or only one of both, a launch after it adds them: the product alone is rounded to BF16 once
more, before.
"""

from __future__ import annotations

from dataclasses import replace

from atlas_lab.blocks.lora import Adapter, delta
from atlas_lab.core.arm import Arm
from atlas_lab.core.call import Call, Epilogue
from atlas_lab.core.context import Context
from atlas_lab.core.launch import Launch, Program
from atlas_lab.core.program import program_of, projection_call, settled
from atlas_lab.core.projection import Projection
from atlas_lab.core.route import Assignment
from atlas_lab.core.tensor import Tensor
from atlas_lab.kernels.activation.added import THREADS, VECTOR, added


def projection_program(
    p: Projection,
    assignment: Assignment,
    m: int,
    context: Context,
    arm: Arm,
    *,
    adapter: Adapter | None = None,
    residual: bool = False,
) -> Program:
    """The program of one projection for `m` rows. Ports, named after it: `/x` BF16 `[m, K]` and, with a `residual`,
    `/residual` BF16 `[m, N]` in, `/y` BF16 `[m, N]` out; A and B of the adapter are persistent.

    Without an adapter, or with the lever `lora` off, its launches are those there are without LoRA. Raises PlanError as
    `program_of` and `delta` do.
    """
    call = projection_call((p,), assignment, m, context)
    label = call.y.data.name.removesuffix("/y")
    made = delta(adapter, call.x.data, p.n, context, f"{label}/lora") if adapter and context.levers.lora else None
    beside = Tensor("bf16", (m, p.n), f"{label}/residual") if residual else None
    program = finished(arm, replace(call, epilogue=Epilogue(lora=made.addend if made else None, residual=beside)))
    if made is None:
        return program
    return replace(
        program,
        launches=(*made.launches, *program.launches),
        inputs=tuple(t for t in program.inputs if t != made.addend),
        persistent=(*program.persistent, *made.persistent),
        temporaries=(*made.temporaries, *program.temporaries),
    )


def finished(arm: Arm, call: Call) -> Program:
    """As `program_of`, but addends that the arm does not fuse, a launch adds to y after its own; where it fuses one of
    two, that launch adds both. Raises PlanError as that, so where they come before what the arm is to do itself: an
    activation, quantization."""
    e = call.epilogue
    lacks = [part for part in ("lora", "residual") if getattr(e, part) is not None and part not in arm.epilogues]
    if not lacks or e.activation or e.quantize:
        return program_of(arm, call)
    program = program_of(arm, replace(call, epilogue=replace(e, lora=None, residual=None)))
    add = adding(call.y.data, e.addends, call.context)
    return replace(program, launches=(*program.launches, add), inputs=(*program.inputs, *dict.fromkeys(e.addends)))


def adding(y: Tensor, addends: tuple[Tensor, ...], context: Context) -> Launch:
    """The launch that adds one or two addends BF16 `[M, N]`, whole, to y in place, whose rows may lie apart."""
    m, n = y.shape
    row = y.strides[0] if y.strides else n
    vector = n % VECTOR == 0 and row % VECTOR == 0 and not any(t.offset % 16 for t in (y, *addends))
    launch = Launch(
        added(vector=vector),
        grid=(m, -(-n // (THREADS * (VECTOR if vector else 1)))),
        block=THREADS,
        args=(y, addends[0], addends[-1], n, row, len(addends) - 1),
        label="addends",
    )
    return settled(launch, context)

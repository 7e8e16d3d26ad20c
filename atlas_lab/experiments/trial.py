"""A program run once with everything checked: poisoned outputs, guard bands, inputs and weights left as they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from atlas_lab.core.call import Call, Operand
from atlas_lab.core.launch import Program
from atlas_lab.core.tensor import Tensor
from atlas_lab.experiments.oracle import Arrays, same_bits
from atlas_lab.formats import get
from atlas_lab.runtime.device import Buffer, Device


class TrialError(RuntimeError):
    """A program that wrote where it may not, or not the same twice; one sentence."""


def operand(format: str, m: int, k: int, name: str) -> Operand:
    """x of `m` rows as an arm that reads `format` is handed it; tensors are named after `name` and their field."""
    if format == "bf16":
        return Operand(Tensor("bf16", (m, k), name))
    fields = {
        field: Tensor(s.dtype, s.shape, name if field == "weight" else f"{name}.{field}")
        for field, s in get(format).tensors(m, k).items()
    }
    return Operand(fields.pop("weight"), format, tuple(fields.items()))


def inputs(x: Operand, stored: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays by tensor name, of the fields that `oracle.activations` made."""
    return {x.data.name: stored["weight"], **{t.name: stored[field] for field, t in x.scales}}


def run_program(
    program: Program,
    call: Call,
    weights: Mapping[str, Buffer],
    device: Device,
    x: Mapping[str, np.ndarray],
    arrays: Arrays,
    stages: Sequence[Tensor] = (),
) -> np.ndarray:
    """The output `[M, N]`, in the dtype it was written in, of `program` over `weights` and `x` (arrays by name); after
    its columns those of `stages`, temporaries of M rows in its dtype.

    Raises TrialError, GuardError, and what the device reports. On a GPU it runs twice, over the scratch it left, and
    the outputs must agree.
    """
    with ExitStack() as stack:
        ports = {}
        for t in (*program.inputs, *program.outputs, *program.temporaries):
            ports[t.name] = device.allocate(t.bytes, "parity", program.name, name=t.name)
            stack.callback(device.free, ports[t.name])
        buffers = {**weights, **ports}
        for name, array in x.items():
            device.upload(ports[name], array)
        for t in program.temporaries:
            device.poison(ports[t.name])
        bound = device.bind(program, buffers)
        made = []
        for _ in range(2 if device.name == "cuda" else 1):
            device.poison(ports[call.y.data.name])
            bound.run()
            device.synchronize()
            bound.verify()
            made.append(downloaded(device, ports, (call.y.data, *stages)))
        for t in program.buffers:
            device.check_guards(buffers[t.name])
        _unchanged(device, call, buffers, x, arrays)
        if not same_bits(made[0], made[-1]):
            differ = int((made[0].view(np.uint8) != made[-1].view(np.uint8)).any(axis=-1).sum())
            raise TrialError(f"{program.name}: run twice, {differ} rows of the output differ in their bits")
        return made[0]


def downloaded(device: Device, buffers: Mapping[str, Buffer], tensors: Sequence[Tensor]) -> np.ndarray:
    """Tensors of one dtype and as many rows, side by side."""
    return np.concatenate([device.download(buffers[t.name], t.dtype, t.shape) for t in tensors], axis=1)


def apart(out: np.ndarray, tensors: Sequence[Tensor]) -> dict[str, np.ndarray]:
    """What `downloaded` put side by side, by the last word of each tensor's name."""
    ends = np.cumsum([t.shape[1] for t in tensors])
    parts = np.split(out, ends[:-1], axis=1)
    return {t.name.rpartition("/")[2]: part for t, part in zip(tensors, parts, strict=True)}


def _unchanged(
    device: Device, call: Call, buffers: Mapping[str, Buffer], x: Mapping[str, np.ndarray], arrays: Arrays
) -> None:
    read = [(t, x[t.name]) for t in (call.x.data, *(t for _, t in call.x.scales), *call.epilogue.addends)]
    read += [(t, arrays[key][field]) for key, fields in call.weights.items() for field, t in fields.items()]
    for t, before in read:
        if not same_bits(device.download(buffers[t.name], t.dtype, t.shape, t.offset), before):
            raise TrialError(f"{call.y.data.name}: the program changed {t}, which it only reads")

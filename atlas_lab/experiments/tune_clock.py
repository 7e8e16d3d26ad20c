"""The clock of `tune` on a GPU: graphs over rotated weights and the read kernel, alternated in one run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from atlas_lab.experiments.numbers import activations
from atlas_lab.experiments.timed import MOST_SETS, rotated
from atlas_lab.experiments.tune import READ, Timeable
from atlas_lab.runtime import probe, timing
from atlas_lab.runtime.device import Buffer, Device

ROUNDS = 8


def by_graphs(device: Device, runs: Sequence[Timeable], nbytes: int, seed: int) -> dict[str, float]:
    """Median seconds a call by name, and of the read kernel over `nbytes`; steps over one bench share its rotated
    weights."""
    with ExitStack() as stack:
        sets: dict[int, list[dict[str, Buffer]]] = {}
        timed = []
        for r in runs:
            if id(r.bench) not in sets:
                stack.callback(r.bench.release)
                sets[id(r.bench)] = list(rotated(r.bench, r.step, device.target.l2))
            copies = sets[id(r.bench)]
            ports = r.bench.ports(r.step)
            device.upload(ports[r.step.call.x.data.name], activations(r.step.key, r.step.call.k, seed))
            bound = [r.bench.bind(r.step, ports, c) for c in copies]
            timed.append(timing.rotate(r.name, bound, factor=0 if len(copies) == MOST_SETS else 4))
            stack.callback(timed[-1].keep.close)
        reader = stack.enter_context(probe.Reader(device, nbytes, name=READ))
        found = timing.measure(device, [*timed, reader.timed], rounds=ROUNDS, seed=seed)
        return {name: found.median(name) for name in found.names}

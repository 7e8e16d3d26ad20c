"""A load-time build on the device: what `Derived.device` is handed, and its launches as a program."""

from __future__ import annotations

from dataclasses import dataclass

from atlas_lab.core.call import Fields
from atlas_lab.core.declare import Derived
from atlas_lab.core.enqueued import LaunchError
from atlas_lab.core.launch import Launch, Program


@dataclass(frozen=True)
class BuildCall:
    """The stored tensors of each source by field, and the tensors to write, by field."""

    sources: tuple[Fields, ...]
    out: Fields

    @property
    def source(self) -> Fields:
        """The first source's tensors."""
        return self.sources[0]


def build_program(d: Derived) -> Program:
    """The device build of `d`, or of the whole it is a part of: stored tensors in, derived tensors out.

    Raises LaunchError where `d` has no device build, or its `device` returns anything else than launches that write
    each declared tensor and read nothing but the sources and each other's results.
    """
    d = d.whole
    where = f"derived weight {d.label!r} of {d.owner}"
    if d.device is None:
        raise LaunchError(f"{where}: it has no device build")
    call = BuildCall(tuple(Fields(w.tensors) for w in d.weights), Fields(d.tensors))
    made = tuple(d.device(call))
    for x in made:
        if not isinstance(x, Launch):
            raise LaunchError(f"{where}: device returned {x!r}, expected a list of Launch")
    stored = dict.fromkeys(t for w in d.weights for t in w.tensors.values())
    written = {t.name for x in made for t in x.writes}
    outputs = {t.name: t for t in d.tensors.values()}
    if written != set(outputs):
        found = ", ".join(sorted(written)) or "nothing"
        raise LaunchError(f"{where}: device writes {found}, expected {', '.join(sorted(outputs))}")
    return Program(f"build of {d.owner}/{d.label}", made, inputs=tuple(stored), outputs=tuple(outputs.values()))

"""Binding: every name of a program resolved to a buffer, every argument checked, once."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from atlas_lab.core.enqueued import Enqueued
from atlas_lab.core.launch import Launch, Program, dims
from atlas_lab.core.library import LibraryLaunch
from atlas_lab.core.tensor import Tensor, reach
from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.formats.dtypes import dtype
from atlas_lab.kernels.lang.types import FloatScalar, Parameter, StorageScalar
from atlas_lab.runtime.device import Buffer, Device
from atlas_lab.runtime.errors import BindError, VerifyError


@dataclass(frozen=True)
class Launched:
    """One launch as it was made: entry point, extents, dynamic shared bytes; of what is no launch of a kernel its name,
    and 0."""

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int

    def __str__(self) -> str:
        return f"{self.entry} grid {self.grid} block {self.block} shared {self.shared}"


NOTHING = (0, 0, 0)


def planned(x: Enqueued) -> Launched:
    """What a launch of the plan should be recorded as; a library's call as itself, not as what the library launches."""
    if isinstance(x, Launch):
        return Launched(x.entry, dims(x.grid), dims(x.block), x.shared)
    return Launched(f"{x.kind} {x.entry}", NOTHING, NOTHING, 0)


@dataclass(frozen=True)
class Place:
    """A pointer argument: `offset` in bytes into a buffer, `elements` from there that the launch declares."""

    buffer: Buffer
    offset: int
    elements: int


@dataclass(frozen=True)
class MapPlace(Place):
    """A tensor map argument: `offset` is where its view starts."""

    map: TensorMap


@dataclass(frozen=True)
class Resolved:
    """A launch with its arguments: places, and numbers already checked against their parameter's type."""

    launch: Launch
    arguments: tuple[Place | int | float, ...]


@dataclass(frozen=True)
class ResolvedCall:
    """A library's call with its arguments."""

    launch: LibraryLaunch
    arguments: tuple[Place, ...]


AnyResolved = Resolved | ResolvedCall


class Bound(ABC):
    """A program over buffers. It keeps the buffers alive as objects; freeing one makes the next `run` invalid.

    `record` is what the last `run` launched, as the device was told.
    """

    def __init__(self, program: Program, device: Device, buffers: Mapping[str, Buffer]) -> None:
        self.program, self.device = program, device
        self.buffers = {t.name: buffers[t.name] for t in program.buffers}
        self.record: tuple[Launched, ...] = ()

    @abstractmethod
    def run(self) -> None:
        """Launch everything in order; on a GPU it returns before the work is done."""

    def verify(self) -> None:
        """Raise VerifyError if the last run launched anything but the plan."""
        compare(f"program {self.program.name}", self.record, tuple(planned(x) for x in self.program.launches))


def compare(what: str, found: tuple[Launched, ...], expected: tuple[Launched, ...]) -> None:
    """Raise VerifyError at the first difference."""
    if len(found) != len(expected):
        raise VerifyError(f"{what}: found {len(found)} launches, expected the plan's {len(expected)}")
    for i, (f, e) in enumerate(zip(found, expected, strict=True)):
        if f != e:
            raise VerifyError(f"{what}: launch {i + 1} was {f}, expected the plan's {e}")


def extent(t: Tensor) -> int:
    """Bytes of its buffer that a tensor reaches, from the buffer's start: offset, strides and last element."""
    if 0 in t.shape:
        return t.offset
    return t.offset + (reach(t.shape, t.strides) + 1) * dtype(t.dtype).bytes


def resolve(program: Program, buffers: Mapping[str, Buffer], device: Device) -> tuple[AnyResolved, ...]:
    """Every launch with its arguments resolved; raises BindError."""
    for t in program.buffers:
        _find(t, buffers, device, f"program {program.name}")
    out: list[AnyResolved] = []
    for launch in program.launches:
        where = f"program {program.name}: {launch.title}"
        if isinstance(launch, Launch):
            _supported(launch, device, where)
        named = zip(launch.args, launch.params, strict=True)
        arguments = tuple(_argument(a, p, buffers, device, where) for a, p in named)
        if isinstance(launch, LibraryLaunch):
            out.append(ResolvedCall(launch, tuple(a for a in arguments if isinstance(a, Place))))
        elif isinstance(launch, Launch):
            out.append(Resolved(launch, arguments))
    return tuple(out)


def _supported(launch: Launch, device: Device, where: str) -> None:
    if launch.cooperative:
        raise BindError(f"{where} asks for cooperative launches, which are not supported yet")
    hopper = launch.cluster != (1, 1, 1) or any(p.abi == "map" for p in launch.params)
    if hopper and device.target.capability < (9, 0):
        raise BindError(
            f"{where} asks for clusters or tensor maps: found {device.target.arch}, expected sm_90 or later"
        )


def _argument(a: Any, p: Parameter, buffers: Mapping[str, Buffer], device: Device, where: str) -> Place | int | float:
    if isinstance(a, TensorMap):
        where = f"{where}: argument {p.name!r}"
        return MapPlace(_find(a.view, buffers, device, where), a.view.offset, a.view.elements, a)
    if not isinstance(a, Tensor):
        return number(a, p, where)
    where = f"{where}: argument {p.name!r}"
    buffer = _find(a, buffers, device, where)
    if a.offset % p.dtype.bytes:
        raise BindError(f"{where} is at byte {a.offset} of {a.name!r}, expected a multiple of {p.dtype.bytes}")
    if p.abi == "array" and not a.is_contiguous:
        raise BindError(f"{where} has strides {a.strides}, expected a contiguous tensor for a wrapped dispatcher")
    return Place(buffer, a.offset, a.elements)


def _find(t: Tensor, buffers: Mapping[str, Buffer], device: Device, where: str) -> Buffer:
    buffer = buffers.get(t.name)
    if buffer is None:
        known = ", ".join(map(repr, list(buffers)[:8])) or "none"
        raise BindError(f"{where} needs a buffer {t.name!r} for {t}, found {known}")
    if buffer.device is not device or not buffer.live:
        state = "was freed" if not buffer.live else "belongs to another device"
        raise BindError(f"{where}: buffer {t.name!r} {state}")
    need = extent(t)
    if t.offset < 0 or buffer.bytes < need:
        raise BindError(
            f"{where}: buffer {t.name!r} has {buffer.bytes} bytes, expected at least {need} for {t} at byte {t.offset}"
        )
    return buffer


def number(value: int | float, p: Parameter, where: str) -> int | float:
    """A scalar argument as its parameter's type holds it; raises BindError where it cannot.

    That integers fit was checked when the launch was made.
    """
    kind = p.dtype
    if isinstance(kind, StorageScalar):
        raise BindError(f"{where}: argument {p.name!r} is a scalar {kind}, expected one of a type with arithmetic")
    if not isinstance(kind, FloatScalar):
        return int(value)
    with np.errstate(over="ignore"):
        rounded = float(np.float32(value))
    if math.isinf(rounded) and not math.isinf(value):
        raise BindError(f"{where}: argument {p.name!r} is {value}, which overflows {kind}")
    return rounded

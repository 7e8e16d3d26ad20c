"""Targets: what a card is, as data with sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import yaml

from atlas_lab.kernels.lang import Needs

# Math units that do a kernel's work, CUDA cores and tensor cores by operand.
PIPES = ("fma", "mma_bf16", "mma_f16", "mma_e4m3", "mma_s8", "mma_nvfp4")


@dataclass(frozen=True)
class Figure:
    """A number of a card and where it comes from."""

    value: float
    source: str


@dataclass(frozen=True)
class Target:
    """A card.

    Integers are limits of the architecture. `memory` and `l2` are in bytes; `read_rate` (bytes a second) is what a
    plain read kernel reaches where `read_rate` was measured, the data sheet's bandwidth otherwise; `math` maps a
    pipe (of PIPES) to operations a second, counting a multiply-add as two.
    """

    name: str
    title: str
    arch: str
    capability: tuple[int, int]
    sms: int
    shared_per_block: int
    shared_per_sm: int
    threads_per_sm: int
    registers_per_sm: int
    l2: int
    memory: Figure
    read_rate: Figure
    rates: tuple[tuple[str, Figure], ...]
    levers: tuple[tuple[str, Any], ...] = ()

    @property
    def math(self) -> Mapping[str, Figure]:
        return MappingProxyType(dict(self.rates))

    def meets(self, needs: Needs) -> bool:
        return needs.met_by(self.capability)

    def floor(self, nbytes: int, flops: int, pipe: str) -> float:
        """Seconds no kernel runs faster than: the larger of bytes over the read rate and operations over the pipe's
        rate. Raises KeyError for a pipe this card has no figure for."""
        if flops and pipe not in self.math:
            raise KeyError(f"target {self.name}: no rate of pipe {pipe!r}, expected one of {', '.join(self.math)}")
        return max(nbytes / self.read_rate.value, flops / self.math[pipe].value if flops else 0.0)


def _figure(entry: Mapping[str, Any]) -> Figure:
    return Figure(float(entry["value"]), str(entry["source"]))


def parse_target(name: str, entry: Mapping[str, Any]) -> Target:
    """A target from a mapping with this class's fields; raises KeyError for a missing one."""
    major, minor = entry["capability"]
    return Target(
        name=name,
        title=entry["title"],
        arch=entry["arch"],
        capability=(int(major), int(minor)),
        sms=int(entry["sms"]),
        shared_per_block=int(entry["shared_per_block"]),
        shared_per_sm=int(entry["shared_per_sm"]),
        threads_per_sm=int(entry["threads_per_sm"]),
        registers_per_sm=int(entry["registers_per_sm"]),
        l2=int(entry["l2"]),
        memory=_figure(entry["memory"]),
        read_rate=_figure(entry["read_rate"]),
        rates=tuple((pipe, _figure(f)) for pipe, f in entry["rates"].items()),
        levers=tuple((entry.get("levers") or {}).items()),
    )


@cache
def shipped_targets() -> tuple[Target, ...]:
    """The targets of `core/targets.yaml`."""
    text = files("atlas_lab.core").joinpath("targets.yaml").read_text(encoding="utf-8")
    return tuple(parse_target(name, entry) for name, entry in yaml.safe_load(text).items())

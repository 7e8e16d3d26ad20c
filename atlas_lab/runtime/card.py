"""What card a CUDA device is, as its driver says, and the target it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atlas_lab.core.target import Figure, Target, shipped_targets
from atlas_lab.runtime.driver import bindings, call, text
from atlas_lab.runtime.errors import DeviceError

_ATTRIBUTES = {
    "major": "COMPUTE_CAPABILITY_MAJOR",
    "minor": "COMPUTE_CAPABILITY_MINOR",
    "sms": "MULTIPROCESSOR_COUNT",
    "l2": "L2_CACHE_SIZE",
    "shared_default": "MAX_SHARED_MEMORY_PER_BLOCK",
    "shared_optin": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
    "shared_per_sm": "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
    "threads_per_sm": "MAX_THREADS_PER_MULTIPROCESSOR",
    "registers_per_sm": "MAX_REGISTERS_PER_MULTIPROCESSOR",
    "clock_khz": "CLOCK_RATE",
    "memory_clock_khz": "MEMORY_CLOCK_RATE",
    "bus_bits": "GLOBAL_MEMORY_BUS_WIDTH",
}


@dataclass(frozen=True)
class Card:
    """A GPU: sizes in bytes, limits of one block and one SM, clocks in kHz at most, bus width in bits.

    `shared_default` and `shared_optin` are the most shared bytes a block may have without and with opting in.
    """

    ordinal: int
    name: str
    capability: tuple[int, int]
    bus_id: str
    memory: int
    driver: int
    sms: int
    l2: int
    shared_default: int
    shared_optin: int
    shared_per_sm: int
    threads_per_sm: int
    registers_per_sm: int
    clock_khz: int
    memory_clock_khz: int
    bus_bits: int

    @property
    def cuda(self) -> str:
        """The CUDA version that the driver is for, such as `13.0`."""
        return f"{self.driver // 1000}.{self.driver % 1000 // 10}"


def card_of(ordinal: int) -> Card:
    """The card with this number; raises DeviceError if the driver does not know it."""
    what = f"asking what CUDA device {ordinal} is"
    device = call(what, "cuDeviceGet", ordinal)
    names = bindings().CUdevice_attribute
    found: dict[str, Any] = {}
    for field, name in _ATTRIBUTES.items():
        found[field] = int(call(what, "cuDeviceGetAttribute", getattr(names, f"CU_DEVICE_ATTRIBUTE_{name}"), device))
    return Card(
        ordinal=ordinal,
        name=text(call(what, "cuDeviceGetName", 256, device)),
        capability=(found.pop("major"), found.pop("minor")),
        bus_id=text(call(what, "cuDeviceGetPCIBusId", 64, device)),
        memory=int(call(what, "cuDeviceTotalMem", device)),
        driver=int(call(what, "cuDriverGetVersion")),
        **found,
    )


def target_of(card: Card, wanted: Target | None = None) -> Target:
    """The target to plan for: `wanted`, if its capability is the card's, else the shipped one the card's name and
    SMs say it is, else one made of what the driver says, with no rates of arithmetic."""
    if wanted is not None:
        if wanted.capability != card.capability:
            raise DeviceError(
                f"target {wanted.name} has capability {_spell(wanted.capability)}, found {card.name} with "
                f"{_spell(card.capability)}"
            )
        return wanted
    name = "".join(c for c in card.name.lower() if c.isalnum())
    for t in shipped_targets():
        if (t.capability, t.sms) == (card.capability, card.sms) and t.name in name:
            return t
    # Double data rate: two transfers a clock.
    rate = 2 * card.memory_clock_khz * 1e3 * card.bus_bits / 8
    major, minor = card.capability
    return Target(
        name=name.removeprefix("nvidia"),
        title=card.name,
        arch=f"sm_{major}{minor}" + ("a" if major >= 9 else ""),
        capability=card.capability,
        sms=card.sms,
        shared_per_block=card.shared_optin,
        shared_per_sm=card.shared_per_sm,
        threads_per_sm=card.threads_per_sm,
        registers_per_sm=card.registers_per_sm,
        l2=card.l2,
        memory=Figure(float(card.memory), "the driver"),
        read_rate=Figure(rate, "the driver's memory clock and bus width"),
        rates=(),
    )


def _spell(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"

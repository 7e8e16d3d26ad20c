"""Clocks and power as NVML reads them, where nvidia-ml-py is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atlas_lab.runtime.card import Card


class Meter:
    """Reads one card. `available` is False without nvidia-ml-py or where NVML does not know the card."""

    def __init__(self, card: Card) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        try:
            import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handle = self._find(card)
        except Exception:  # a reading that is not to be had must not stop a measurement
            self._handle = None

    def _find(self, card: Card) -> Any:
        try:
            return self._nvml.nvmlDeviceGetHandleByPciBusId(card.bus_id.encode())
        except Exception:
            return self._nvml.nvmlDeviceGetHandleByIndex(card.ordinal)

    @property
    def available(self) -> bool:
        return self._handle is not None

    def read(self) -> dict[str, float | None] | None:
        """MHz of SM and memory clock, watts, degrees Celsius, and the bit mask of reasons for clocks being held
        back; a reading the card refuses is None, and so is all without NVML."""
        if not self.available:
            return None
        n, h = self._nvml, self._handle
        return {
            "sm_mhz": _or_none(lambda: float(n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM))),
            "memory_mhz": _or_none(lambda: float(n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_MEM))),
            "watts": _or_none(lambda: n.nvmlDeviceGetPowerUsage(h) / 1000),
            "celsius": _or_none(lambda: float(n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU))),
            "held_back": _or_none(lambda: float(n.nvmlDeviceGetCurrentClocksThrottleReasons(h))),
        }

    def driver(self) -> str | None:
        """The driver's version, as nvidia-smi prints it."""
        if not self.available:
            return None
        found: str | bytes | None = _or_none(self._nvml.nvmlSystemGetDriverVersion)
        return found.decode() if isinstance(found, bytes) else found


def _or_none(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception:
        return None

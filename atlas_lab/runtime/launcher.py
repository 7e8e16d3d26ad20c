"""Making one launch, twice: straight through the driver with packed parameters, or through cuda.core.

Both are kept so that the host's cost of either can be measured (`probe.launch_overhead`). cuda.core converts every
argument at each launch; the packed one hands the driver an address prepared when binding.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from atlas_lab.core.launch import dims
from atlas_lab.runtime.arguments import Packed, values
from atlas_lab.runtime.bind import Launched, Resolved
from atlas_lab.runtime.cubin import DeviceKernel
from atlas_lab.runtime.driver import bindings, check, core
from atlas_lab.runtime.errors import DeviceError


class Launcher(Protocol):
    """Enqueues its launch and returns what it launched; raises DeviceError naming kernel and label."""

    def __call__(self) -> Launched: ...


class PackedLauncher:
    """cuLaunchKernel with parameters packed once."""

    def __init__(self, kernel: DeviceKernel, x: Resolved, stream: Any, where: str) -> None:
        self._where = where
        self._kernel = kernel
        self._packed = Packed(values(x.launch.kernel.params, x.arguments))
        grid, block, shared = dims(x.launch.grid), dims(x.launch.block), x.launch.shared
        self.launched = Launched(kernel.entry, grid, block, shared)
        launch = bindings().cuLaunchKernel
        self._launch = partial(launch, kernel.function, *grid, *block, shared, stream.handle, self._packed.address, 0)

    def __call__(self) -> Launched:
        status = self._launch()[0]
        if status:
            check(status, self._where)
        return self.launched


class CoreLauncher:
    """cuda.core.launch with arguments of fixed types."""

    def __init__(self, kernel: DeviceKernel, x: Resolved, stream: Any, where: str) -> None:
        self._where = where
        grid, block, shared = dims(x.launch.grid), dims(x.launch.block), x.launch.shared
        self.launched = Launched(kernel.entry, grid, block, shared)
        config = core().LaunchConfig(grid=grid, block=block, shmem_size=shared)
        arguments = values(x.launch.kernel.params, x.arguments)
        self._launch = partial(core().launch, stream, config, kernel.core, *arguments)

    def __call__(self) -> Launched:
        try:
            self._launch()
        except Exception as e:  # cuda.core's class moved between versions
            raise DeviceError(f"{self._where}: the driver reported {e}") from e
        return self.launched


LAUNCHERS: dict[str, Any] = {"packed": PackedLauncher, "core": CoreLauncher}

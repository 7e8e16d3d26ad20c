"""Making one launch, twice: straight through the driver with packed parameters, or through cuda.core.

Both are kept so that the host's cost of either can be measured (`probe.launch_overhead`). cuda.core converts every
argument at each launch; the packed one hands the driver an address prepared when binding.

A dependent launch carries the attribute PROGRAMMATIC_STREAM_SERIALIZATION: it follows the launch before it in the
stream by that one's `grid_launch_dependents`, and a capture makes a programmatic edge of it (CUDA 12.3 and later).
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from atlas_lab.core.launch import dims
from atlas_lab.runtime.arguments import Packed, values
from atlas_lab.runtime.bind import Launched, MapPlace, Resolved
from atlas_lab.runtime.cubin import DeviceKernel
from atlas_lab.runtime.driver import bindings, check, core
from atlas_lab.runtime.errors import BindError, DeviceError


class Launcher(Protocol):
    """Enqueues its launch and returns what it launched; raises DeviceError naming kernel and label."""

    def __call__(self) -> Launched: ...


class PackedLauncher:
    """cuLaunchKernel, or cuLaunchKernelEx for a dependent launch or one with clusters, with parameters packed once."""

    def __init__(self, kernel: DeviceKernel, x: Resolved, stream: Any, where: str) -> None:
        self._where = where
        self._kernel = kernel
        self._packed = Packed(values(x.launch.params, x.arguments))
        grid, block, shared = dims(x.launch.grid), dims(x.launch.block), x.launch.shared
        self.launched = Launched(kernel.entry, grid, block, shared)
        if x.launch.pdl or x.launch.cluster != (1, 1, 1):
            config = _config(x, self.launched, stream)
            self._launch = partial(bindings().cuLaunchKernelEx, config, kernel.function, self._packed.address, 0)
        else:
            launch = bindings().cuLaunchKernel
            address = self._packed.address
            self._launch = partial(launch, kernel.function, *grid, *block, shared, stream.handle, address, 0)

    def __call__(self) -> Launched:
        status = self._launch()[0]
        if status:
            check(status, self._where)
        return self.launched


def _config(x: Resolved, launched: Launched, stream: Any) -> Any:
    """The CUlaunchConfig of a launch that is dependent or has clusters; it owns its attributes."""
    driver = bindings()
    kinds = driver.CUlaunchAttributeID
    attributes = []
    if x.launch.pdl:
        attribute = driver.CUlaunchAttribute()
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    cluster = dims(x.launch.cluster)
    if cluster != (1, 1, 1):
        attribute = driver.CUlaunchAttribute()
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        extents = attribute.value.clusterDim
        extents.x, extents.y, extents.z = cluster
        attributes.append(attribute)
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launched.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = launched.block
    config.sharedMemBytes, config.hStream = launched.shared, stream.handle
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


class CoreLauncher:
    """cuda.core.launch with arguments of fixed types."""

    def __init__(self, kernel: DeviceKernel, x: Resolved, stream: Any, where: str) -> None:
        self._where = where
        grid, block, shared = dims(x.launch.grid), dims(x.launch.block), x.launch.shared
        self.launched = Launched(kernel.entry, grid, block, shared)
        # cuda.core counts the grid of a launch with clusters in clusters.
        cluster = dims(x.launch.cluster)
        more: dict[str, Any] = {"programmatic_stream_serialization": True} if x.launch.pdl else {}
        if cluster != (1, 1, 1):
            more["cluster"] = cluster
            grid = dims(tuple(g // c for g, c in zip(grid, cluster, strict=True)))
        if any(isinstance(a, MapPlace) for a in x.arguments):
            raise BindError(
                f"{where} has a tensor map: found the launcher 'core', expected 'packed', which passes them"
            )
        try:
            config = core().LaunchConfig(grid=grid, block=block, shmem_size=shared, **more)
        except TypeError:
            if not x.launch.pdl:
                raise
            raise BindError(
                f"{where} is a dependent launch: found a cuda.core without them, expected the launcher 'packed'"
            ) from None
        arguments = values(x.launch.params, x.arguments)
        self._launch = partial(core().launch, stream, config, kernel.core, *arguments)

    def __call__(self) -> Launched:
        try:
            self._launch()
        except Exception as e:  # cuda.core's class moved between versions
            raise DeviceError(f"{self._where}: the driver reported {e}") from e
        return self.launched


LAUNCHERS: dict[str, Any] = {"packed": PackedLauncher, "core": CoreLauncher}

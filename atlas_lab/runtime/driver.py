"""The CUDA driver API through cuda.bindings: imported when first used, every return code checked."""

from __future__ import annotations

from functools import cache
from typing import Any

from atlas_lab.runtime.errors import DeviceError

INSTEAD = "or use --device interpreter"


@cache
def bindings() -> Any:
    """`cuda.bindings.driver`; raises ImportError without the package."""
    try:
        from cuda.bindings import driver
    except ImportError:  # the spelling before cuda-bindings 12.8
        from cuda import cuda as driver
    return driver


@cache
def core() -> Any:
    """`cuda.core`; raises ImportError without the package."""
    import cuda.core

    if hasattr(cuda.core, "ObjectCode"):
        return cuda.core
    import cuda.core.experimental  # where cuda-core had everything before 1.0

    return cuda.core.experimental


def reported(status: Any) -> str:
    """`CUDA_ERROR_NAME (what the driver says about it)` of a CUresult."""
    name = getattr(status, "name", None) or f"CUDA error {int(status)}"
    try:
        found, text = bindings().cuGetErrorString(status)
        said = text.decode() if not int(found) and text else ""
    except Exception:  # the sentence about the first error matters more
        said = ""
    return f"{name} ({said})" if said else str(name)


def check(status: Any, what: str) -> None:
    """Raise DeviceError, beginning with `what`, unless `status` is CUDA_SUCCESS."""
    if int(status):
        raise DeviceError(f"{what}: the driver reported {reported(status)}")


def call(what: str, function: str, *args: Any) -> Any:
    """Call a driver function by name; returns what it returns besides its status (None, a value, or a tuple)."""
    result = getattr(bindings(), function)(*args)
    status, *rest = result if isinstance(result, tuple) else (result,)
    check(status, what)
    return None if not rest else rest[0] if len(rest) == 1 else tuple(rest)


def missing_gpu() -> str:
    """Why there is no GPU to run on, in one sentence with what to do; "" if there is one."""
    try:
        driver = bindings()
        core()
    except ImportError as e:
        return f"no CUDA: {e.name or e} is not installed; pip install 'atlas-lab[cu13]', {INSTEAD}"
    try:
        (status,) = driver.cuInit(0)
    except Exception:  # the class differs between versions of cuda-bindings
        return f"no CUDA: no driver (libcuda) was found; install NVIDIA's, {INSTEAD}"
    count = 0
    if not int(status):
        status, count = driver.cuDeviceGetCount()
    if int(status):
        return f"no CUDA: the driver reported {reported(status)}; see nvidia-smi, {INSTEAD}"
    return "" if count else f"no CUDA: the driver found no device; see nvidia-smi and CUDA_VISIBLE_DEVICES, {INSTEAD}"


def text(value: Any) -> str:
    """A C string as bindings return it: bytes, possibly padded with zeros."""
    return value.split(b"\0")[0].decode() if isinstance(value, bytes | bytearray) else str(value)

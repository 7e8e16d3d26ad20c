"""Building derived weights: on the host by their oracle, or on the device by their launches, with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from atlas_lab import formats
from atlas_lab.core.building import build_program
from atlas_lab.core.declare import Derived
from atlas_lab.core.enqueued import LaunchError
from atlas_lab.core.projection import Packed, WeightSource
from atlas_lab.core.tensor import Tensor
from atlas_lab.formats.dtypes import dtype
from atlas_lab.runtime.device import Buffer, Device
from atlas_lab.runtime.errors import LoadError

Read = Callable[[Tensor], np.ndarray]


def build(d: Derived, owner: str, read: Read) -> list[tuple[Tensor, np.ndarray]]:
    """The tensors of a derived weight, built on the host from its sources; of a part, what it shows of the whole.

    Raises LoadError, naming key and field, unless `build` returns exactly the declared fields, dtypes and shapes.
    """
    whole = d.whole
    where = f"derived weight {whole.label!r} of {owner}"
    arguments = [_source(s, read) for s in whole.sources]
    try:
        made = whole.build(*arguments)
    except Exception as e:
        raise LoadError(f"{where}: build raised {type(e).__name__}: {e}") from e
    if not isinstance(made, Mapping) or set(made) != set(whole.tensors):
        found = sorted(made) if isinstance(made, Mapping) else type(made).__name__
        raise LoadError(f"{where}: build returned {found}, expected the fields {sorted(whole.tensors)}")
    for field, t in whole.tensors.items():
        array, host = made[field], dtype(t.dtype).numpy
        if not isinstance(array, np.ndarray) or array.dtype != host or array.shape != t.shape:
            raise LoadError(f"{where}: field {field!r} is {spell(array)}, expected {host}{list(t.shape)}")
    arrays = d.arrays(made)
    return [(t, arrays[field]) for field, t in d.tensors.items()]


def launch_build(d: Derived, owner: str, device: Device, buffers: Mapping[str, Buffer]) -> None:
    """Enqueue the device build of a derived weight over `buffers`, which hold its sources.

    Raises LoadError for launches that are not a build, BindError and what the device reports.
    """
    try:
        program = build_program(d)
    except LaunchError as e:
        raise LoadError(str(e)) from e
    except Exception as e:
        where = f"derived weight {d.whole.label!r} of {owner}"
        raise LoadError(f"{where}: device raised {type(e).__name__}: {e}") from e
    device.bind(program, buffers).run()


def stored(read: Read, t: Tensor) -> np.ndarray:
    """A stored tensor's array; raises LoadError unless it has the tensor's dtype and shape."""
    array = read(t)
    host = dtype(t.dtype).numpy
    if not isinstance(array, np.ndarray) or array.dtype != host or array.shape != t.shape:
        raise LoadError(f"tensor {t.name!r} was read as {spell(array)}, expected {host}{list(t.shape)}")
    return array


def _source(s: WeightSource | Packed, read: Read) -> np.ndarray | dict[str, np.ndarray]:
    """What `build` is handed: float32 `[N, K]` values, or the stored arrays by field."""
    weight = s.weight if isinstance(s, Packed) else s
    arrays = {field: stored(read, t) for field, t in weight.fields}
    if isinstance(s, Packed):
        return arrays
    return formats.get(weight.format).dequantize(arrays).astype(np.float32)


def spell(array: object) -> str:
    """Dtype and shape of an array, or what it is instead."""
    return f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__

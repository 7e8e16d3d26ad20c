"""Tensors that are no projection's, as the model reads them."""

from __future__ import annotations

import numpy as np

from atlas_lab.checkpoint.layout import Parameter
from atlas_lab.checkpoint.store import Store
from atlas_lab.formats.dtypes import dtype


def read_parameter(store: Store, p: Parameter) -> np.ndarray:
    """The values of a parameter in the dtype it is read as, converted by value: a BF16 `A_log` becomes float32, its
    bytes are never taken for float32. An array of its own; raises CheckpointError for a name the checkpoint has not."""
    values: np.ndarray = store.read(p.tensor.name).astype(dtype(p.dtype).numpy)
    return values

"""Checking the values of a checkpoint: of every weight by what its format allows, of every other tensor that they are
finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from atlas_lab.checkpoint.json_object import CheckpointError
from atlas_lab.checkpoint.recognise import check_values, recognise
from atlas_lab.checkpoint.writer import HEADERS_ONLY
from atlas_lab.core.tensor import Tensor
from atlas_lab.formats import checks, scan

if TYPE_CHECKING:
    from atlas_lab.checkpoint.checkpoint import Checkpoint

_FLOATS = ("bf16", "f16", "f32", "f64", "e4m3", "e5m2")


def faults(checkpoint: Checkpoint) -> Iterator[str]:
    """One sentence for each weight, and each other tensor, with a value that nothing may read.

    Raises CheckpointError for a checkpoint of headers alone, which has no values.
    """
    if checkpoint.config.get(HEADERS_ONLY):
        raise CheckpointError(f"{checkpoint.path}: found headers alone, expected values to verify")
    for check in _checks(checkpoint):
        try:
            check()
        except CheckpointError as e:
            yield str(e)


def _checks(checkpoint: Checkpoint) -> Iterator[Callable[[], None]]:
    store = checkpoint.store
    for p in checkpoint.projections:
        yield partial(check_values, store, p.weight, p.label)
    done: set[str] = set()
    for t in checkpoint.unread:
        if t.name in done:
            continue
        module = t.name.rpartition(".")[0]
        try:
            weight = recognise(store.tensors, module) if len(t.shape) > 1 else None
        except CheckpointError:
            weight = None  # in a form of no projection's: its tensors are looked at one by one
        if weight is None:
            yield partial(_finite, checkpoint, t)
        else:
            done |= {held.name for held in weight.tensors.values()}
            yield partial(check_values, store, weight, module)


def _finite(checkpoint: Checkpoint, t: Tensor) -> None:
    """Raise CheckpointError, with its place, for the first value that is not finite."""
    if t.dtype not in _FLOATS:
        return
    a = checkpoint.store.read(t.name)
    at = scan.first(a, lambda x: ~np.isfinite(x))
    if at is not None:
        found = f"found {checks.show(a[at])}{checks.place(at)}, expected finite values"
        raise CheckpointError(f"{checkpoint.path}: {checkpoint.model.meaning(t.name)}: {t.name}: {found}")

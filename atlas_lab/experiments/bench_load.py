"""The suite `load` of `bench`: loading a checkpoint made on the spot, against the rate of copies to the card."""

from __future__ import annotations

import tempfile
from pathlib import Path

from atlas_lab.experiments.ab import Notify
from atlas_lab.experiments.bench_results import BenchCell, Must, measured, relative
from atlas_lab.kernels.lang import cache
from atlas_lab.runtime.device import Device
from atlas_lab.runtime.load_rate import BYTES, SHAPE, LoadRate, load_rate, write_bulk

SUITE = "load"
LEAST = 0.6  # of the copy rate


def run_load(device: Device, seed: int, notify: Notify, nbytes: int = BYTES) -> BenchCell:
    """Write the checkpoint beside the compile cache, load it, and remove it."""
    cache.directory().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache.directory(), prefix="load-") as folder:
        notify(f"writing {nbytes / 1e9:.1f} GB", 0, 1)
        write_bulk(Path(folder), nbytes)
        return cell_of(load_rate(device, Path(folder), notify=notify), seed)


def cell_of(found: LoadRate, seed: int) -> BenchCell:
    """The result as a case: `ours` a load, `read` the copy of as many bytes from page-locked memory."""
    loads, copies = ([s * 1e6 for s in x] for x in (found.loads, found.copies))
    read = measured(copies, seed)
    name = f"load of {found.bytes / 1e9:.2f} GB in {found.tensors} tensors"
    return BenchCell(
        name=name,
        arm="load",
        format="bf16",
        n=SHAPE[0],
        k=SHAPE[1],
        m=0,
        status="passed",
        bytes=found.bytes,
        ours=measured(loads, seed),
        read=read,
        floor_us=read.median_us,
        bound_by="copy",
        share=found.share,
        of_read=relative(copies, loads, seed),
        must=[Must(name="of_copy", limit=LEAST, found=found.share, passed=found.share >= LEAST)],
    )

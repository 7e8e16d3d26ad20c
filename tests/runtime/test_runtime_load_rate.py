"""The rate of loading: its checkpoint is real, its arithmetic is right, and nothing is measured without a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from atlas_lab.checkpoint import Store
from atlas_lab.experiments.bench_load import cell_of, run_load
from atlas_lab.runtime.device import DeviceError, open_device
from atlas_lab.runtime.load import execute
from atlas_lab.runtime.load_rate import LoadRate, load_rate, plan_of, write_bulk


def test_the_checkpoint_is_as_large_as_asked_finite_and_loads(tmp_path: Path) -> None:
    write_bulk(tmp_path, 100_000, (48, 64))
    store = Store.open(tmp_path)
    assert store.bytes >= 100_000 > store.bytes - 48 * 64 * 2
    arrays = [np.asarray(store.read(name)) for name in store.tensors]
    assert all(np.isfinite(a.astype(np.float32)).all() for a in arrays)
    assert len({a.tobytes() for a in arrays}) == len(arrays)
    device, plan = open_device("interpreter"), plan_of(store)
    with execute(plan, lambda t: store.read(t.name), lambda w, label: None, device) as loaded:
        assert loaded.ledger.held == plan.steady == store.bytes
        for name, a in zip(store.tensors, arrays, strict=True):
            assert device.download(loaded[name], "bf16", a.shape).tobytes() == a.tobytes()
    with pytest.raises(DeviceError, match="no speed is measured without a GPU: found the interpreter"):
        load_rate(device, tmp_path)


def test_the_case_says_what_was_found() -> None:
    found = LoadRate(8 * 10**9, 45, (0.25, 0.2, 0.2, 0.2, 0.3), (0.15, 0.16, 0.14, 0.15, 0.15))
    assert found.rate == 4e10
    cell = cell_of(found, seed=1)
    assert cell.name == "load of 8.00 GB in 45 tensors"
    assert cell.share == pytest.approx(0.75)
    assert cell.of_read is not None
    assert cell.of_read.speed == pytest.approx(0.75)
    assert [(m.name, m.limit, m.passed) for m in cell.must] == [("of_copy", 0.6, True)]
    slow = cell_of(LoadRate(1, 1, (0.3,) * 5, (0.1,) * 5), seed=1)
    assert not slow.must[0].passed


@pytest.mark.gpu
def test_a_load_on_a_gpu_reaches_most_of_the_copy_rate() -> None:
    with open_device("cuda") as device:
        cell = run_load(device, 0, lambda what, done, of: None, 2_000_000_000)
        assert cell.share is not None
        # beside other workers the host's threads and the link are shared
        assert cell.share > (0.05 if "PYTEST_XDIST_WORKER" in os.environ else 0.3)
        device.ledger.check_empty()

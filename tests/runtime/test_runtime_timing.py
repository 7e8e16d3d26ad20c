"""What of timing and probing needs no GPU: orders, statistics, descriptions, refusals, and the kernel itself."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from atlas_lab.kernels.lang.compile import check_kernel, compiler_missing
from atlas_lab.kernels.probe import read_xor
from atlas_lab.runtime import cuda
from atlas_lab.runtime.device import DeviceError, open_device
from atlas_lab.runtime.graph import capture
from atlas_lab.runtime.nvml import Meter
from atlas_lab.runtime.probe import READINGS, Reading, ceilings, describe_device, launch_overhead, read_program
from atlas_lab.runtime.timing import Sample, Timed, Timing, measure, order, rotations


def test_every_round_has_every_name_in_an_order_of_its_own():
    names = ["a", "b", "c"]
    rounds = order(names, 50, seed=1)
    assert all(sorted(r) == names for r in rounds)
    assert len({tuple(r) for r in rounds}) == 6
    assert rounds == order(names, 50, seed=1)
    assert rounds != order(names, 50, seed=2)


@pytest.mark.parametrize(("nbytes", "l2", "sets"), [(100, 100, 4), (250, 100, 2), (10_000, 100, 2), (99, 100, 5)])
def test_rotated_weights_are_at_least_four_times_the_cache(nbytes, l2, sets):
    assert rotations(nbytes, l2) == sets


def timing() -> Timing:
    samples = [
        Sample("a", 0, 0, 2, (1.0, 3.0, 2.0)),
        Sample("b", 0, 1, 2, (4.0,)),
        Sample("b", 1, 2, 2, (6.0,)),
        Sample("a", 1, 3, 2, (3.0, 3.0, 9.0), {"sm_mhz": 1980.0}),
    ]
    return Timing(7, 0.02, tuple(samples), {"a": 2.4, "b": 0.1})


def test_medians_are_of_blocks_and_ratios_of_neighbours():
    t = timing()
    assert t.blocks("a").tolist() == [2.0, 3.0]
    assert t.median("b") == 5.0
    assert t.ratios("a", "b").tolist() == [0.5, 0.5]
    assert t.starved == ("a",)
    with pytest.raises(KeyError, match="'c' was not measured, expected one of a, b"):
        t.blocks("c")


def test_raw_samples_are_kept_in_the_result_file():
    out = json.loads(json.dumps(timing().to_json()))
    assert out["samples"][0]["seconds"] == [1.0, 3.0, 2.0]
    assert out["samples"][3]["clocks"] == {"sm_mhz": 1980.0}
    assert (out["seed"], out["block_s"]) == (7, 0.02)


def test_no_speed_is_measured_on_the_interpreter():
    device = open_device("interpreter")
    with pytest.raises(DeviceError, match="no speed is measured without a GPU: found the interpreter"):
        measure(device, [Timed("a", lambda: None, 1, 0)])
    for refused in (ceilings, launch_overhead):
        with pytest.raises(DeviceError, match="no speed is measured without a GPU"):
            refused(device)
    program = read_program(64, Reading(1, 1), 1)
    buffers = {t.name: device.allocate(t.bytes, "probe", name=t.name) for t in program.buffers}
    with pytest.raises(DeviceError, match="of the interpreter, expected one GPU's"):
        capture(device.bind(program, buffers))
    with pytest.raises(DeviceError, match="found no program to capture"):
        capture([])


def test_the_interpreter_says_what_it_stands_for():
    description = describe_device(open_device("interpreter", "a100"))
    assert description == {"kind": "interpreter", "name": None, "stands_for": "a100"}


def test_without_a_gpu_cuda_is_refused_in_one_sentence_and_auto_interprets():
    missing = cuda.missing_gpu()
    if not missing:
        assert open_device("auto").name == "cuda"
        return
    with pytest.raises(DeviceError, match=r"^no CUDA: .*--device interpreter$"):
        open_device("cuda")
    assert open_device("auto").name == "interpreter"


def test_importing_the_gpu_s_modules_needs_no_gpu_library():
    names = ", ".join(f"atlas_lab.runtime.{m}" for m in ("cuda", "graph", "timing", "probe", "nvml", "child"))
    code = f"import sys, {names}; print(sorted({{'cuda', 'numba', 'llvmlite', 'pynvml'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_meter_that_reads_nothing_is_no_error():
    class Nowhere:
        bus_id = "ffff:ff:1f.0"
        ordinal = 99

    meter = Meter(Nowhere())
    assert meter.available is False
    assert meter.read() is None
    assert meter.driver() is None


@pytest.mark.parametrize("nbytes", [1, 16, 512, 3000, 5000])
@pytest.mark.parametrize("reading", [Reading(1, 2), Reading(2, 1, 2)])
def test_the_read_kernel_reads_everything_once(reading, nbytes):
    device = open_device("interpreter")
    at = 256
    program = read_program(nbytes, reading, 1, at)
    words = np.random.default_rng(0).integers(0, 2**32, (at + nbytes + 15) // 4, np.uint32)
    data = device.allocate(words.nbytes, "probe", name="data")
    out = device.allocate(program.outputs[0].bytes, "probe", name="out")
    device.upload(data, words)
    device.bind(program, {"data": data, "out": out}).run()
    parts = device.download(out, "u32", program.outputs[0].shape)
    used = words[at // 4 : at // 4 + -(-nbytes // 16) * 4]
    assert np.bitwise_xor.reduce(parts) == np.bitwise_xor.reduce(used)


def test_grids_cover_the_data_or_the_card():
    assert Reading(8, 4).grid(1024 * 10, 132) == 10
    assert Reading(8, 4).grid(1024 * 10 + 1, 132) == 11
    assert Reading(8, 4, 2).grid(1024 * 1000, 132) == 264
    assert Reading(8, 4, 2).grid(1, 132) == 1


@pytest.mark.parametrize("reading", READINGS, ids=str)
def test_the_read_kernel_compiles_without_a_blemish(reading):
    if compiler_missing():
        pytest.skip(f"compile check not run: {compiler_missing()}")
    assert check_kernel(read_xor(reading.warps, reading.unroll), "sm_90a") == ()

"""The CUDA device on a GPU: `pytest --device=cuda`."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from runtime_kernels import (
    bf16,
    counting_program,
    expected_count,
    expected_scale,
    first_tile,
    launch,
    ports,
    ranks,
    reverse,
    scale_program,
    scale_rows,
    store_at,
    widths,
)

from atlas_lab.core.launch import Launch, Program
from atlas_lab.core.residency import Alloc, LoadPlan, Upload
from atlas_lab.core.tensor import Tensor, round_up
from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.kernels import lang as L
from atlas_lab.runtime.child import Crash, call
from atlas_lab.runtime.cuda import CudaDevice
from atlas_lab.runtime.device import Device, DeviceError, open_device
from atlas_lab.runtime.errors import BindError, GuardError
from atlas_lab.runtime.graph import capture
from atlas_lab.runtime.load import execute
from atlas_lab.runtime.probe import READINGS, Reader, ceilings, describe_device, launch_overhead, read_program
from atlas_lab.runtime.timing import BLOCK, measure, rotate, rotations

pytestmark = pytest.mark.gpu
KB = 1024


@pytest.fixture
def device(request: pytest.FixtureRequest):
    if request.config.getoption("--device", "auto") != "cuda":
        pytest.skip("needs --device=cuda")
    with open_device("cuda") as opened:
        yield opened
        opened.synchronize()


def filled(device: Device, program: Program, seed: int = 0):
    """Ports of `scale_program`, and x."""
    buffers = ports(device, program)
    x = bf16(np.random.default_rng(seed), *program.inputs[0].shape)
    device.upload(buffers["x"], x)
    return buffers, x


def test_bytes_survive_the_round_trip(device):
    for size in (0, 1, 255, 256, 257, 1_000_003):
        b = device.allocate(size, "test", name=f"b{size}")
        data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        device.upload(b, data)
        np.testing.assert_array_equal(device.download(b, "u8", (size,)), data)
        assert b.memory % 256 == 0
        device.check_guards(b)
    device.upload(b, np.arange(4, dtype=np.uint8), offset=7)
    assert device.download(b, "u8", (4,), 7).tolist() == [0, 1, 2, 3]


def test_fresh_and_poisoned_memory_reads_as_nan(device):
    b = device.allocate(1000, "test", name="b")
    assert np.isnan(device.download(b, "f32", (250,))).all()
    device.upload(b, np.zeros(250, np.float32))
    device.poison(b)
    assert np.isnan(device.download(b, "bf16", (500,)).astype(np.float32)).all()
    device.check_guards(b)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (-1, "byte 1 before its start was overwritten"),
        (25, "byte 1 after its end was overwritten"),
        (25 + 500, "byte 2001 after its end was overwritten"),
    ],
)
def test_a_write_beside_a_buffer_is_found_with_its_byte(device, index, said):
    y = Tensor("u32", (25,), "y")
    program = Program("stray", (launch(store_at, 1, y, index, 0x01020304),), inputs=(), outputs=(y,))
    buffers = ports(device, program)
    device.bind(program, buffers).run()
    with pytest.raises(GuardError, match=f"buffer 'y' of 100 bytes: {said}.*4 bytes of that guard band"):
        device.check_guards(buffers["y"])


def test_too_much_memory_is_refused_and_the_device_lives_on(device):
    with pytest.raises(DeviceError, match=r"buffer 'huge' of \d+ bytes: .*OUT_OF_MEMORY.*; \d+ of \d+ bytes are free"):
        device.allocate(1 << 44, "test", name="huge")
    device.ledger.check_empty()
    b = device.allocate(16, "test")
    device.upload(b, np.arange(16, dtype=np.uint8))
    assert device.download(b, "u8", (16,)).tolist() == list(range(16))


@pytest.mark.parametrize("launcher", ["packed", "core"])
def test_a_program_runs_and_is_recorded(device, launcher):
    device.launcher = launcher
    program = scale_program(1000, by=3.0)
    buffers, x = filled(device, program)
    bound = device.bind(program, buffers)
    for _ in range(2):
        device.poison(buffers["y"])
        bound.run()
        bound.verify()
        y = device.download(buffers["y"], "bf16", (1000,))
        np.testing.assert_array_equal(y.view(np.uint16), expected_scale(x, 3.0).view(np.uint16))
    for b in buffers.values():
        device.check_guards(b)
    assert [r.entry for r in bound.record] == [x.kernel.entry for x in program.launches]


@pytest.mark.parametrize("launcher", ["packed", "core"])
def test_scalars_of_every_width_arrive(device, launcher):
    device.launcher = launcher
    y = Tensor("u32", (8,), "y")
    args = (y, 200, -2, -3, 1.5, -(2**40), 2**63 + 5)
    program = Program("widths", (launch(widths, 1, *args),), inputs=(), outputs=(y,))
    buffers = ports(device, program)
    device.bind(program, buffers).run()
    m = 2**32 - 1
    expected = [200, -2 & m, -3 & m, 0x3FC00000, 0, -(2**8) & m, 5, 2**31]
    assert device.download(buffers["y"], "u32", (8,)).tolist() == expected


def test_a_wrapped_dispatcher_is_handed_its_array(device):
    import numba.cuda

    @numba.cuda.jit
    def array_times_three(y, n):
        i = numba.cuda.grid(1)
        if i < n and i < y.shape[0]:
            y[i] = i * 3

    wrapped = L.wrap(array_times_three, [L.Out[L.i32], L.i32])
    whole = Tensor("i32", (100,), "y")
    program = Program("wrapped", (launch(wrapped, 100, whole.view(10, (50,)), 100),), inputs=(), outputs=(whole,))
    buffers = ports(device, program)
    device.upload(buffers["y"], np.full(100, -1, np.int32))
    device.bind(program, buffers).run()
    expected = np.full(100, -1)
    expected[10:60] = np.arange(50) * 3
    assert device.download(buffers["y"], "i32", (100,)).tolist() == expected.tolist()


@pytest.mark.parametrize("static", [0, 16])
@pytest.mark.parametrize("shared", [48 * KB - 16, 48 * KB, 64 * KB, 200 * KB])
def test_dynamic_shared_memory_of_every_size(device, shared, static):
    words = shared // 4
    x, y = Tensor("u32", (words,), "x"), Tensor("u32", (words,), "y")
    launches = (launch(reverse(static), 1, x, y, words, block=256, shared=shared),)
    program = Program(f"reverse {shared}", launches, inputs=(x,), outputs=(y,))
    buffers = ports(device, program)
    data = np.random.default_rng(0).integers(0, 2**32, words, np.uint32)
    device.upload(buffers["x"], data)
    bound = device.bind(program, buffers)
    bound.run()
    bound.verify()
    np.testing.assert_array_equal(device.download(buffers["y"], "u32", (words,)), data[::-1])


@pytest.mark.parametrize("static", [0, 16])
def test_more_shared_memory_than_the_card_has_is_refused_with_both_numbers(device, static):
    # 16 static bytes below dynamic memory that is aligned to 1024 take 1024.
    most = device.card.shared_optin - (1024 if static else 0)
    x, y = Tensor("u32", (4,), "x"), Tensor("u32", (4,), "y")
    for shared in (most, most + 1):
        launches = (launch(reverse(static), 1, x, y, 4, shared=shared, label="reverse"),)
        program = Program("p", launches, inputs=(x,), outputs=(y,))
        buffers = ports(device, program)
        device.upload(buffers["x"], np.arange(4, dtype=np.uint32))
        if shared == most:
            device.bind(program, buffers).run()
            assert device.download(buffers["y"], "u32", (4,)).tolist() == [3, 2, 1, 0]
            continue
        with pytest.raises(BindError, match=rf"reverse__\w+ \(reverse\): found {shared} bytes .* allows {most} beside"):
            device.bind(program, buffers)


def test_a_load_plan_fills_the_card_as_forecast(device):
    tensors = [Tensor("bf16", (3, 100 * i), f"t{i}") for i in range(1, 5)]
    arrays = {t.name: bf16(np.random.default_rng(0), *t.shape) for t in tensors}
    steps = [s for t in tensors for s in (Alloc(t.name, round_up(t.bytes), "w", "layers.0"), Upload(t))]
    plan = LoadPlan(tuple(steps))
    with execute(plan, lambda t: arrays[t.name], lambda w, label: None, device) as loaded:
        assert device.ledger.rows() == loaded.rows() == plan.ledger()
        assert device.ledger.peak == plan.peak
        assert device.ledger.guards == 2 * device.guard * len(tensors)
        for t in tensors:
            out = device.download(loaded[t.name], "bf16", t.shape)
            np.testing.assert_array_equal(out.view(np.uint16), arrays[t.name].view(np.uint16))
            device.check_guards(loaded[t.name])
    device.ledger.check_empty()


def test_a_graph_replays_rotated_programs(device):
    program = scale_program(500)
    sets = [filled(device, program, seed) for seed in range(3)]
    bound = [device.bind(program, buffers) for buffers, _ in sets]
    with capture(bound) as graph:
        graph.verify()
        assert len(graph.record) == 9
        for _ in range(3):
            for buffers, _ in sets:
                device.poison(buffers["y"])
            graph.replay()
            for buffers, x in sets:
                y = device.download(buffers["y"], "bf16", (500,))
                np.testing.assert_array_equal(y.view(np.uint16), expected_scale(x, 2.0).view(np.uint16))
        # New inputs go into the ports of a captured program.
        x = bf16(np.random.default_rng(9), 500)
        device.upload(sets[1][0]["x"], x)
        graph.replay()
        y = device.download(sets[1][0]["y"], "bf16", (500,))
        np.testing.assert_array_equal(y.view(np.uint16), expected_scale(x, 2.0).view(np.uint16))
        sets[0][0]["t"].free()
        with pytest.raises(BindError, match="buffer 't' was freed after binding"):
            graph.replay()
    with pytest.raises(DeviceError, match="graph of scale and add and 2 more was closed"):
        graph.replay()


def test_a_capture_that_fails_leaves_the_stream_usable(device):
    program = scale_program(500)
    buffers, x = filled(device, program)
    bound = device.bind(program, buffers)
    other, _ = filled(device, program, 1)
    broken = device.bind(program, other)
    other["x"].free()
    with pytest.raises(BindError, match="buffer 'x' was freed"):
        capture([bound, broken])
    bound.run()
    y = device.download(buffers["y"], "bf16", (500,))
    np.testing.assert_array_equal(y.view(np.uint16), expected_scale(x, 2.0).view(np.uint16))


@pytest.mark.parametrize("launcher", ["packed", "core"])
def test_dependent_launches_see_what_was_written_before_them(device, launcher):
    if device.target.capability < (9, 0):
        pytest.skip("needs sm_90")
    device.launcher = launcher
    n, at_once, replays = 64 * 4096, 10, 50
    program = counting_program(n)
    buffers = ports(device, program)
    rng = np.random.default_rng(0)
    w, x = (rng.integers(0, 2**32, n, np.uint32) for _ in range(2))
    for name, data in (("w", w), ("x", x), ("s", np.zeros(n, np.uint32))):
        device.upload(buffers[name], data)
    bound = device.bind(program, buffers)
    bound.run()
    bound.verify()
    with capture([bound] * at_once) as graph:
        graph.verify()
        assert len(graph.record) == 2 * at_once
        for _ in range(replays):
            graph.replay()
        found = device.download(buffers["s"], "u32", (n,))
    np.testing.assert_array_equal(found, expected_count(w, x, 1 + at_once * replays))


@pytest.mark.parametrize("launcher", ["packed", "core"])
def test_clusters_are_launched_and_captured(device, launcher):
    if device.target.capability < (9, 0):
        pytest.skip("needs sm_90")
    device.launcher = launcher
    y = Tensor("u32", (8,), "y")
    program = Program("p", (Launch(ranks, grid=(2, 4), block=32, args=(y,), cluster=(1, 4)),), inputs=(), outputs=(y,))
    buffers = ports(device, program)
    bound = device.bind(program, buffers)
    for _ in range(2):
        bound.run()
        bound.verify()
        assert device.download(buffers["y"], "u32", (8,)).tolist() == [400 + r for r in (0, 0, 1, 1, 2, 2, 3, 3)]
        device.poison(buffers["y"])
    with capture(bound) as graph:
        graph.verify()
        graph.replay()
        assert device.download(buffers["y"], "u32", (8,)).tolist() == [400 + r for r in (0, 0, 1, 1, 2, 2, 3, 3)]


def test_a_tensor_map_stays_valid_in_a_graph(device):
    if device.target.capability < (9, 0):
        pytest.skip("needs sm_90")
    x, y = Tensor("bf16", (16, 16), "x"), Tensor("u32", (64,), "y")
    args = (TensorMap(x, (8, 16)), y)
    program = Program("p", (Launch(first_tile, grid=1, block=64, args=args, shared=512),), inputs=(x,), outputs=(y,))
    buffers = ports(device, program)
    with capture(device.bind(program, buffers)) as graph:
        for seed in range(3):
            data = bf16(np.random.default_rng(seed), 16, 16)
            device.upload(buffers["x"], data)
            graph.replay()
            found = device.download(buffers["y"], "bf16", (8, 16))
            np.testing.assert_array_equal(found.view(np.uint16), data[:8].view(np.uint16))


@pytest.mark.parametrize("reading", READINGS, ids=str)
@pytest.mark.parametrize("nbytes", [16, 40_000, 10_000_016])
def test_the_read_kernel_reads_everything_once(device, reading, nbytes):
    program = read_program(nbytes, reading, device.card.sms)
    buffers = ports(device, program)
    words = np.random.default_rng(0).integers(0, 2**32, nbytes // 4, np.uint32)
    device.upload(buffers["data"], words)
    device.bind(program, buffers).run()
    parts = device.download(buffers["out"], "u32", program.outputs[0].shape)
    assert np.bitwise_xor.reduce(parts) == np.bitwise_xor.reduce(words)


def test_times_are_plausible(device):
    nbytes = 1 << 26
    with (
        Reader(device, nbytes, readings=READINGS[:1]) as small,
        Reader(device, 2 * nbytes, readings=READINGS[:1]) as large,
    ):
        timed = [replace(r.timed, name=n) for n, r in (("small", small), ("same", small), ("large", large))]
        timing = measure(device, timed, rounds=6, seed=3)
    print({n: timing.median(n) for n in timing.names}, timing.host, timing.samples[-1].clocks)
    assert timing.starved == ()
    assert [s.position for s in timing.samples] == list(range(18))
    for s in timing.samples:
        calls = {"small": small, "same": small, "large": large}[s.name].timed.calls_per_replay
        assert sum(s.seconds) * s.replays * calls > 0.7 * BLOCK
    # Reading the same is the same, reading twice as much takes about twice as long.
    assert abs(float(np.median(timing.ratios("same", "small"))) - 1) < 0.03
    assert 1.6 < float(np.median(timing.ratios("large", "small"))) < 2.2
    rate = nbytes / timing.median("small")
    assert 0.3 * device.target.read_rate.value < rate < 1.15 * device.target.read_rate.value
    device.ledger.check_empty()


def test_a_rotation_is_a_graph_of_whole_rounds(device):
    program = scale_program(500)
    bound = [device.bind(program, filled(device, program, seed)[0]) for seed in range(3)]
    timed = rotate("scale", bound)
    assert timed.calls_per_replay == 18
    assert len(timed.keep.record) == 18 * 3
    timing = measure(device, [timed], rounds=2)
    assert 0 < timing.median("scale") < 1e-3


def test_too_few_weights_to_rotate_are_refused_with_how_many_it_takes(device):
    weight, y = Tensor("bf16", (1 << 22,), "w"), Tensor("bf16", (1 << 22,), "y")
    launches = (launch(scale_rows, weight.elements, weight, y, weight.elements, 2.0, block=256),)
    program = Program("read a weight", launches, inputs=(), outputs=(y,), persistent=(weight,))
    out = device.allocate(y.bytes, "ports")
    bound = []
    for _ in range(rotations(weight.bytes, device.target.l2)):
        w = device.allocate(weight.bytes, "weights")
        device.upload(w, np.ones(weight.shape, ml_dtypes.bfloat16))
        bound.append(device.bind(program, {"w": w, "y": out}))
    with pytest.raises(DeviceError, match=rf"in 2 sets, .* 4 times the L2: rotate {len(bound)} sets"):
        rotate("few", bound[:2])
    rate = weight.bytes / measure(device, [rotate("enough", bound)], rounds=2).median("enough")
    assert 0 < rate < 1.15 * device.target.read_rate.value


def test_a_launch_costs_the_host_at_most_ten_microseconds(device):
    spent = {launcher: launch_overhead(device, launcher) * 1e6 for launcher in ("packed", "core")}
    print({k: f"{v:.2f} us" for k, v in spent.items()})
    assert spent["packed"] <= 10


def test_the_probe_measures_the_card(device):
    found = ceilings(device)
    print(found)
    assert found.sms == device.target.sms
    assert 0 < found.free <= found.total
    rate = device.target.read_rate.value
    least = 0.05 if "PYTEST_XDIST_WORKER" in os.environ else 0.6  # beside other workers the card is shared
    assert least * rate < found.read_rate < 1.15 * rate
    description = describe_device(device)
    print(json.dumps(description))
    assert description["kind"] == "cuda"
    assert description["capability"] == list(device.target.capability)
    device.ledger.check_empty()


def test_a_target_of_another_capability_is_refused(device):
    other = "a100" if device.card.capability != (8, 0) else "h200"
    with pytest.raises(DeviceError, match=f"target {other} has capability .*, found "):
        open_device("cuda", other)


def test_a_device_without_guard_bands(device):
    with open_device("cuda", guards=False) as bare:
        assert isinstance(bare, CudaDevice)
        program = scale_program(100)
        buffers, x = filled(bare, program)
        bare.bind(program, buffers).run()
        y = bare.download(buffers["y"], "bf16", (100,))
        assert y.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(y.view(np.uint16), expected_scale(x, 2.0).view(np.uint16))
        bare.check_guards(buffers["y"])
        assert bare.ledger.guards == 0


def test_an_illegal_address_is_the_child_s_result_and_the_rest_goes_on(device):
    crash = call("runtime_children:store_far_away", timeout=120)
    assert isinstance(crash, Crash)
    print(crash)
    assert crash.kind == "error"
    assert "program stray: the driver reported CUDA_ERROR_ILLEGAL_ADDRESS" in crash.sentence
    check_alive(device)


def test_an_endless_kernel_is_the_child_s_result_and_the_rest_goes_on(device):
    crash = call("runtime_children:spin_for_ever", timeout=20)
    assert crash == Crash("timeout", "runtime_children:spin_for_ever had not ended after 20 seconds")
    check_alive(device)


def check_alive(device: Device) -> None:
    program = scale_program(100)
    buffers, x = filled(device, program)
    device.bind(program, buffers).run()
    y = device.download(buffers["y"], "bf16", (100,))
    np.testing.assert_array_equal(y.view(np.uint16), expected_scale(x, 2.0).view(np.uint16))

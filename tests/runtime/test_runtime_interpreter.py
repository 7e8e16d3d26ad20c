"""The interpreter as a device, end to end: memory, real kernels, records."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from runtime_kernels import bf16, expected_scale, launch, ports, reverse, scale_program, store_at, widths

from atlas_lab.core.launch import Program
from atlas_lab.core.residency import Row
from atlas_lab.core.tensor import Tensor
from atlas_lab.runtime.device import Device, DeviceError, open_device
from atlas_lab.runtime.errors import VerifyError
from atlas_lab.simt import OutOfBounds, Uninitialised


@pytest.fixture
def device() -> Device:
    return open_device("interpreter")


def test_a_program_runs_from_input_to_output(device):
    program = scale_program()
    x = bf16(np.random.default_rng(0), 100)
    buffers = ports(device, program)
    device.upload(buffers["x"], x)
    bound = device.bind(program, buffers)
    bound.run()
    bound.verify()
    y = device.download(buffers["y"], "bf16", (100,))
    np.testing.assert_array_equal(y, expected_scale(x, 2.0))
    assert [r.entry for r in bound.record] == [x.kernel.entry for x in program.launches]
    assert bound.record[0].grid == (2, 1, 1)
    assert bound.record[0].block == (64, 1, 1)
    assert len(bound.stats) == 3


def test_a_program_that_did_not_run_does_not_verify(device):
    program = scale_program()
    bound = device.bind(program, ports(device, program))
    with pytest.raises(VerifyError, match="program scale and add: found 0 launches, expected the plan's 3"):
        bound.verify()


def test_a_record_that_differs_from_the_plan_is_refused(device):
    program = scale_program()
    buffers = ports(device, program)
    device.upload(buffers["x"], bf16(np.random.default_rng(0), 100))
    bound = device.bind(program, buffers)
    bound.run()
    bound.record = (bound.record[1], bound.record[1], bound.record[2])
    bound.verify()  # the same kernel with the same extents
    bound.record = (bound.record[2], *bound.record[1:])
    with pytest.raises(VerifyError, match=r"launch 1 was add_one.* expected the plan's scale_rows"):
        bound.verify()


def test_views_reach_the_middle_of_a_buffer(device):
    whole = Tensor("u32", (16,), "x")
    y = Tensor("u32", (4,), "y")
    program = Program(
        "part", (launch(reverse(0), 4, whole.view(8, (4,)), y, 4, shared=16),), inputs=(whole,), outputs=(y,)
    )
    buffers = ports(device, program)
    device.upload(buffers["x"], np.arange(16, dtype=np.uint32))
    device.bind(program, buffers).run()
    assert device.download(buffers["y"], "u32", (4,)).tolist() == [11, 10, 9, 8]


def test_scalars_of_every_width_arrive(device):
    y = Tensor("u32", (8,), "y")
    args = (y, 200, -2, -3, 1.5, -(2**40), 2**63 + 5)
    program = Program("widths", (launch(widths, 1, *args),), inputs=(), outputs=(y,))
    buffers = ports(device, program)
    device.bind(program, buffers).run()
    m = 2**32 - 1
    expected = [200, -2 & m, -3 & m, 0x3FC00000, 0, -(2**8) & m, 5, 2**31]
    assert device.download(buffers["y"], "u32", (8,)).tolist() == expected


def test_an_out_of_bounds_write_is_reported_by_the_interpreter(device):
    y = Tensor("u32", (3,), "y")
    program = Program("stray", (launch(store_at, 1, y, 3, 7),), inputs=(), outputs=(y,))
    bound = device.bind(program, ports(device, program))
    with pytest.raises(OutOfBounds, match="'y'"):
        bound.run()
    assert bound.record == ()


def test_poisoned_memory_reads_as_nan_and_may_not_be_read_by_a_kernel(device):
    program = scale_program()
    buffers = ports(device, program)
    device.upload(buffers["x"], bf16(np.random.default_rng(0), 100))
    device.poison(buffers["x"])
    x = device.download(buffers["x"], "bf16", (100,))
    assert x.dtype == ml_dtypes.bfloat16
    assert np.isnan(x.astype(np.float32)).all()
    with pytest.raises(Uninitialised):
        device.bind(program, buffers).run()


def test_upload_and_download_at_an_offset(device):
    b = device.allocate(10, "test", name="b")
    device.upload(b, np.arange(10, dtype=np.uint8))
    device.upload(b, np.array([7, 8], dtype=">u2").astype(np.uint16)[::-1], offset=4)
    assert device.download(b, "u16", (2,), 4).tolist() == [8, 7]
    assert device.download(b, "u8", (2, 2), 2).tolist() == [[2, 3], [8, 0]]
    device.upload(b, np.float32(2.5), offset=0)
    assert device.download(b, "f32", ()).item() == 2.5
    assert device.download(b, "f32", (0, 4)).shape == (0, 4)
    device.check_guards(b)


@pytest.mark.parametrize("offset", [-1, 7, 11])
def test_copies_outside_a_buffer_are_refused(device, offset):
    b = device.allocate(10, "test", name="b")
    with pytest.raises(DeviceError, match=f"upload: found bytes {offset} to {offset + 4} of buffer 'b', expected at"):
        device.upload(b, np.zeros(4, np.uint8), offset)
    with pytest.raises(DeviceError, match=f"download: found bytes {offset} to {offset + 4} of buffer 'b'"):
        device.download(b, "f32", (1,), offset)


def test_the_ledger_counts_rounded_bytes_and_names_what_is_left(device):
    a = device.allocate(1, "small", "layers.0", name="a")
    b = device.allocate(256, "small", name="b")
    c = device.allocate(257, "large", name="c")
    assert device.ledger.rows() == (Row("large", 512, 1), Row("small", 512, 2))
    assert (device.ledger.held, device.ledger.peak, device.ledger.guards) == (1024, 1024, 0)
    assert (a.owner, c.label) == ("layers.0", "large")
    device.free(b)
    c.free()
    assert (device.ledger.held, device.ledger.peak) == (256, 1024)
    with pytest.raises(DeviceError, match="256 bytes are still allocated: 'a' \\(256 bytes, small\\)"):
        device.ledger.check_empty()
    with pytest.raises(DeviceError, match="buffer 'b' is freed twice"):
        device.free(b)
    with pytest.raises(DeviceError, match="upload: buffer 'b' was freed"):
        device.upload(b, np.zeros(1, np.uint8))
    device.close()
    device.ledger.check_empty()
    assert not a.live


def test_a_buffer_of_another_device_is_refused(device):
    b = open_device("interpreter").allocate(4, "test", name="b")
    with pytest.raises(DeviceError, match="'b' belongs to another device"):
        device.free(b)
    with pytest.raises(DeviceError, match="'b' belongs to another device"):
        device.download(b, "u8", (1,))


def test_an_unknown_device_or_target_is_refused():
    with pytest.raises(DeviceError, match="found device 'gpu', expected one of auto, cuda, interpreter"):
        open_device("gpu")
    with pytest.raises(DeviceError, match="unknown target 'h300', expected one of h200, "):
        open_device("interpreter", "h300")
    assert open_device("interpreter").target.name == "h200"
    assert open_device("interpreter", "a100").target.name == "a100"

"""Binding: what a program and its buffers must agree on, and the sentence where they do not."""

from __future__ import annotations

import math

import pytest
from runtime_kernels import add_one, launch, ports, scale_program, scale_rows, widths

from atlas_lab.core.launch import Program
from atlas_lab.core.tensor import Tensor
from atlas_lab.kernels import lang as L
from atlas_lab.runtime.bind import extent, number
from atlas_lab.runtime.device import open_device
from atlas_lab.runtime.errors import BindError


@pytest.fixture
def device():
    return open_device("interpreter")


@pytest.mark.parametrize("name", ["x", "y", "t"])
def test_a_missing_buffer_is_named(device, name):
    program = scale_program()
    buffers = ports(device, program)
    del buffers[name]
    with pytest.raises(BindError, match=f"program scale and add needs a buffer '{name}' for {name}: bf16.100., found"):
        device.bind(program, buffers)


@pytest.mark.parametrize("name", ["x", "y", "t"])
def test_a_small_buffer_is_named_with_both_sizes(device, name):
    program = scale_program()
    buffers = ports(device, program) | {name: device.allocate(198, "ports", name=name)}
    with pytest.raises(BindError, match=f"buffer '{name}' has 198 bytes, expected at least 200 for {name}: bf16"):
        device.bind(program, buffers)


def test_a_view_past_the_end_is_named(device):
    y = Tensor("bf16", (4,), "y")
    # A strided view is not checked by `view` itself.
    strided = Tensor("bf16", (2, 2), "y", strides=(4, 1))
    program = Program("p", (launch(add_one, 4, strided, 4),), inputs=(), outputs=(y,))
    with pytest.raises(
        BindError, match=r"kernel add_one__.*: argument 'y': buffer 'y' has 8 bytes, expected at least 12"
    ):
        device.bind(program, ports(device, program))


def test_a_freed_or_foreign_buffer_is_refused(device):
    program = scale_program()
    buffers = ports(device, program)
    buffers["t"].free()
    with pytest.raises(BindError, match="buffer 't' was freed"):
        device.bind(program, buffers)
    buffers["t"] = open_device("interpreter").allocate(200, "ports", name="t")
    with pytest.raises(BindError, match="buffer 't' belongs to another device"):
        device.bind(program, buffers)


def test_a_buffer_freed_after_binding_is_refused_when_run(device):
    program = scale_program()
    buffers = ports(device, program)
    bound = device.bind(program, buffers)
    buffers["x"].free()
    with pytest.raises(BindError, match="program scale and add: buffer 'x' was freed after binding"):
        bound.run()


def test_an_offset_that_splits_an_element_is_refused(device):
    y = Tensor("bf16", (4,), "y")
    odd = Tensor("bf16", (2,), "y", offset=3)
    program = Program("p", (launch(add_one, 2, odd, 2),), inputs=(), outputs=(y,))
    with pytest.raises(BindError, match="argument 'y' is at byte 3 of 'y', expected a multiple of 2"):
        device.bind(program, ports(device, program))


def test_a_cooperative_launch_is_refused(device):
    y = Tensor("bf16", (4,), "y")
    program = Program("p", (launch(add_one, 4, y, 4, label="add", cooperative=True),), inputs=(), outputs=(y,))
    sentence = r"kernel add_one__\w+ \(add\) asks for cooperative launches, which are not supported yet"
    with pytest.raises(BindError, match=sentence):
        device.bind(program, ports(device, program))


@pytest.mark.parametrize(
    ("value", "kind", "sentence"),
    [
        (1e39, L.f32, r"argument 'n' is 1e\+39, which overflows f32"),
        (1.0, L.bf16, "is a scalar bf16, expected one of a type with arithmetic"),
    ],
)
def test_numbers_out_of_their_type_are_refused(value, kind, sentence):
    with pytest.raises(BindError, match=sentence):
        number(value, L.types.Parameter("", kind, "scalar", "n"), "kernel k")


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [(255, L.u8, 255), (-128, L.i8, -128), (2**64 - 1, L.u64, 2**64 - 1), (True, L.i32, 1), (3, L.f32, 3.0)],
)
def test_numbers_at_the_ends_of_their_type_pass(value, kind, expected):
    assert number(value, L.types.Parameter("", kind, "scalar", "n"), "kernel k") == expected


def test_floats_are_rounded_to_single_precision_and_infinities_pass():
    p = L.types.Parameter("", L.f32, "scalar", "n")
    assert number(0.1, p, "k") == 0.10000000149011612
    assert math.isinf(number(math.inf, p, "k"))
    assert math.isnan(number(math.nan, p, "k"))


def test_a_bad_number_is_refused_with_program_and_label(device):
    x, y = Tensor("bf16", (4,), "x"), Tensor("bf16", (4,), "y")
    program = Program("p", (launch(scale_rows, 4, x, y, 4, 1e39, label="scale"),), inputs=(x,), outputs=(y,))
    with pytest.raises(BindError, match=r"program p: kernel scale_rows__\w+ \(scale\): argument 'by' is 1e\+39"):
        device.bind(program, ports(device, program))


def test_a_kernel_for_gpus_only_is_refused_on_the_interpreter(device):
    import numba.cuda

    @numba.cuda.jit
    def foreign(y, n):
        i = numba.cuda.grid(1)
        if i < n:
            y[i] = i

    wrapped = L.wrap(foreign, [L.Out[L.i32], L.i32])
    y = Tensor("i32", (4,), "y")
    program = Program("p", (launch(wrapped, 4, y, 4),), inputs=(), outputs=(y,))
    with pytest.raises(BindError, match=r"kernel foreign__\w+ names numba.cuda itself: it runs on a GPU only"):
        device.bind(program, ports(device, program))


@pytest.mark.parametrize(
    ("t", "bytes_"),
    [
        (Tensor("bf16", (3, 4), "a"), 24),
        (Tensor("bf16", (3, 4), "a", offset=6), 30),
        (Tensor("f32", (3, 4), "a", strides=(8, 1)), 80),
        (Tensor("f32", (3, 0), "a", offset=8), 8),
        (Tensor("f32", (), "a"), 4),
    ],
)
def test_extent_is_the_last_byte_a_tensor_reaches(t, bytes_):
    assert extent(t) == bytes_


def test_every_width_is_used_by_the_width_kernel():
    assert [p.dtype.name for p in widths.params[1:]] == ["u8", "i16", "i32", "f32", "i64", "u64"]

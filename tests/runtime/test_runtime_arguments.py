"""Packed arguments: the bytes the driver is handed, followed through the pointers it is handed."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from runtime_kernels import widths

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang.types import Parameter
from atlas_lab.runtime.arguments import Packed, values
from atlas_lab.runtime.bind import Place


class Buffer:
    memory = 0x7F0000001000


def through_pointers(packed: Packed, sizes: list[int]) -> list[bytes]:
    pointers = (ctypes.c_void_p * len(sizes)).from_address(packed.address)
    return [ctypes.string_at(p, size) for p, size in zip(pointers, sizes, strict=True)]


def test_every_value_has_its_parameter_s_width():
    arguments = (Place(Buffer, 256, 8), 200, -2, -3, 1.5, -(2**40), 2**63 + 5)
    scalars = values(widths.params, arguments)
    assert [s.dtype.name for s in scalars] == ["int64", "uint8", "int16", "int32", "float32", "int64", "uint64"]
    found = through_pointers(Packed(scalars), [8, 1, 2, 4, 4, 8, 8])
    expected = [
        np.int64(0x7F0000001100), np.uint8(200), np.int16(-2), np.int32(-3), np.float32(1.5), np.int64(-(2**40)),
        np.uint64(2**63 + 5),
    ]  # fmt: skip
    assert found == [e.tobytes() for e in expected]


def test_values_are_aligned_for_any_width():
    packed = Packed(tuple(np.uint8(i) for i in range(5)))
    pointers = (ctypes.c_uint64 * 5).from_address(packed.address)
    assert all(p % 8 == 0 for p in pointers)


def test_a_kernel_without_parameters_has_an_address_too():
    assert Packed(()).address != 0


@pytest.mark.parametrize(("dtype", "size"), [(L.i32, 4), (L.u8, 1)])
def test_a_wrapped_dispatcher_s_array_is_seven_words(dtype, size):
    array, n = Parameter("out", dtype, "array", "y"), Parameter("", L.i32, "scalar", "n")
    scalars = values((array, n), (Place(Buffer, 16, 10), 7))
    assert [int(s) for s in scalars] == [0, 0, 10, size, 0x7F0000001010, 10, size, 7]
    assert [s.dtype.name for s in scalars] == ["int64"] * 7 + ["int32"]

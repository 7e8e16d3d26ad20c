"""The ring's faulty siblings, and arguments that are no tensor map of their parameter."""

from __future__ import annotations

import numpy as np
import pytest
from ring import FAULTS as RING_FAULTS
from ring import ring_expected, ring_input, ring_launch

from atlas_lab import simt
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.kernels import lang as L
from atlas_lab.simt import Buffer, Options, SimtError, run

RING = {
    "bytes short": (simt.MbarrierError, "found copies of 4096 bytes, expected the 2048 that its arrivals announced"),
    "bytes over": (simt.Deadlock, "which lacks 2048 of the bytes that it expects"),
    "parity of full": (simt.PoisonRead, "of dynamic shared memory are read but nothing has written them yet"),
    "parity of empty": (simt.Deadlock, r"wait for phase 0 \(parity 0\) of the mbarrier .* which lacks 2 of 2 arrivals"),
    "no fence": (simt.Unfenced, "the copy engine reads bytes .* found no fence_proxy_async of that thread"),
    "read early": (simt.PoisonRead, "of dynamic shared memory are read but nothing has written them yet"),
    "no empty": (
        simt.MbarrierError,
        "an arrival in phase 0, whose 1 arrivals are there",
    ),
}


def run_ring(fault: str, options: Options) -> tuple[np.ndarray, np.ndarray]:
    x = ring_input(75, 200)
    source, target = Buffer.of("x", x), Buffer("y", x.nbytes)
    launch = ring_launch(Tensor("bf16", x.shape, "x"), Tensor("bf16", x.shape, "y"), fault=fault)
    args = ((source, launch.args[0]), (target, launch.args[1]), *launch.args[2:])
    run(launch.kernel, grid=2, block=launch.threads, args=args, shared_bytes=launch.shared, options=options)
    return target.array("bf16", x.shape), ring_expected(x)


@pytest.mark.parametrize("fault", RING)
def test_a_broken_ring_is_reported(fault):
    error, words = RING[fault]
    with pytest.raises(error, match=words) as caught:
        run_ring(fault, Options())
    assert "\n" not in str(caught.value)
    assert caught.value.file.endswith("ring.py")


def test_a_wrong_swizzle_gives_wrong_numbers():
    found, expected = run_ring("swizzle", Options())
    assert not np.array_equal(found, expected)
    assert np.array_equal(*run_ring("", Options()))
    assert set(RING) | {"swizzle"} == set(RING_FAULTS)


BAD_ARGUMENTS = {
    "no map": (lambda m, x: (m, x), "found global buffer 'm', expected .Buffer, TensorMap."),
    "another dtype": (
        lambda m, x: ((m, TensorMap(Tensor("f16", (16, 64), "m"), (8, 64))), x),
        "found a tensor map of m: f16.16, 64., expected bf16",
    ),
    "a view past the end": (
        lambda m, x: ((m, TensorMap(Tensor("bf16", (17, 64), "m"), (8, 64))), x),
        "found m: bf16.17, 64. up to byte 2176 of global buffer 'm', expected at most 2048",
    ),
}


@L.kernel
def one_map(m: L.InMap[L.bf16], y: L.Out[L.u32]):
    L.tma_prefetch(m)


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_arguments_that_are_no_map_of_the_parameter(case):
    make, words = BAD_ARGUMENTS[case]
    with pytest.raises(SimtError, match=words):
        run(one_map, grid=1, block=32, args=make(Buffer("m", 2048), Buffer("y", 4)))
    right = TensorMap(Tensor("bf16", (16, 64), "m"), (8, 64))
    run(one_map, grid=2, block=32, cluster=2, args=((Buffer("m", 2048), right), Buffer("y", 4)))


def test_a_grid_is_a_multiple_of_the_cluster():
    with pytest.raises(SimtError, match=r"found grid \(3, 1, 1\), expected a multiple of cluster \(2, 1, 1\)"):
        run(one_map, grid=3, block=32, cluster=2, args=(Buffer("m", 2048), Buffer("y", 4)))

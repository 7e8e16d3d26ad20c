"""Kernels that do nothing wrong give the right numbers, whatever the order of threads and the time of copies."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import simt_kernels as kernels

from atlas_lab.simt import Buffer, Options, run

WAYS = [
    pytest.param(0, Options(), id="program"),
    pytest.param(0, Options(resident=1, late_async="random"), id="one-resident"),
    *(pytest.param(s, Options(order="random", late_async="random"), id=f"random-{s}") for s in (1, 2, 3)),
    pytest.param(4, Options(order="random", resident=7), id="random-7-resident"),
]
ways = pytest.mark.parametrize(("seed", "options"), WAYS)
RNG = np.random.default_rng(5)


def bf16(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(ml_dtypes.bfloat16)


@ways
def test_gemv_is_within_the_bound_of_float64(seed, options):
    n, k = 10, 512
    w, x = bf16(n, k), bf16(k)
    y = Buffer("y", 4 * n)
    args = (Buffer.of("w", w), Buffer.of("x", x), y, n, k)
    run(kernels.gemv, grid=3, block=128, args=args, seed=seed, options=options)
    w64, x64 = w.astype(np.float64), x.astype(np.float64)
    assert not y.unwritten
    assert np.all(np.abs(y.array(np.float32) - w64 @ x64) <= 2.0**-24 * k * (np.abs(w64) @ np.abs(x64)))


@ways
def test_mma_tile(seed, options):
    a, b = bf16(64, 64), bf16(64, 64)
    c = Buffer("c", 4 * 64 * 64)
    args = (Buffer.of("a", a), Buffer.of("b", b), c)
    stats = run(kernels.mma_64x64x64, grid=1, block=128, args=args, seed=seed, options=options)
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    bound = 2.0**-22 * 64 * (np.abs(a64) @ np.abs(b64).T)
    assert np.all(np.abs(c.array(np.float32, (64, 64)) - a64 @ b64.T) <= bound)
    assert stats.shared_bytes == 2 * 64 * 72 * 2


@ways
def test_block_sum(seed, options):
    x = RNG.integers(-50, 50, (5, 200)).astype(np.float32)
    y = Buffer("y", 20)
    args = (Buffer.of("x", x), y, 200)
    run(kernels.block_sum, grid=5, block=64, args=args, shared_bytes=256, seed=seed, options=options)
    assert np.array_equal(y.array(np.float32), x.sum(axis=1))


@ways
def test_shuffles(seed, options):
    y = Buffer("y", 4 * 7 * 32)
    run(kernels.shuffles, grid=1, block=32, args=(y,), seed=seed, options=options)
    lane = np.arange(32)
    square = lane * lane
    expected = [
        square[lane ^ 5],
        np.where(lane + 3 < 32, square[(lane + 3) % 32], square),
        np.full(32, 49),
        np.full(32, sum(1 << i for i in range(0, 32, 3))),
        np.full(32, 496),
        square[::-1],
        np.full(32, 1),
    ]
    assert np.array_equal(y.array("u32", (7, 32)), np.array(expected))


@ways
def test_producer_and_consumer_meet_at_named_barriers(seed, options):
    x = RNG.integers(0, 2**32, (9, 32), dtype=np.uint32)
    y = Buffer("y", x.nbytes)
    run(kernels.producer_consumer, grid=2 - 1, block=64, args=(Buffer.of("x", x), y, 9), seed=seed, options=options)
    assert np.array_equal(y.array(np.uint32, (9, 32)), x[:, ::-1])


@ways
def test_double_buffered_copies(seed, options):
    tiles, last = 4, 101
    x = RNG.integers(0, 2**32, tiles * 256, dtype=np.uint32)
    # Only what exists is allocated: a copy that read past it would be out of bounds.
    source = Buffer.of("x", x[: 3 * 256 + last])
    y = Buffer("y", 4 * 64)
    run(kernels.double_buffer, grid=1, block=64, args=(source, y, tiles, last), seed=seed, options=options)
    full = np.concatenate([x[: 3 * 256 + last], np.zeros(256 - last, np.uint32)]).reshape(tiles, 256)
    index = (np.arange(64)[:, None] * 4 + np.arange(4) * 64 + 17) % 256
    assert np.array_equal(y.array(np.uint32), full[:, index].sum(axis=(0, 2), dtype=np.uint32))


@ways
def test_blocks_wait_for_one_another(seed, options):
    blocks = min(6, options.resident)
    flag = Buffer("flag", 4 * blocks, initialised=True)
    y = Buffer("y", 4 * 32)
    run(kernels.flag_chain, grid=blocks, block=32, args=(y, flag), seed=seed, options=options)
    assert np.array_equal(y.array(np.uint32), np.full(32, blocks * (blocks - 1) // 2))


@ways
def test_the_last_block_sums(seed, options):
    x = RNG.integers(0, 1000, (9, 32), dtype=np.uint32)
    part, ticket, y = Buffer("part", x.nbytes), Buffer("ticket", 4, initialised=True), Buffer("y", 128)
    run(kernels.last_block, grid=9, block=32, args=(Buffer.of("x", x), part, ticket, y), seed=seed, options=options)
    assert np.array_equal(y.array(np.uint32), 3 * x.sum(axis=0))


@ways
def test_atomics(seed, options):
    count, top, order = Buffer("count", 4, initialised=True), Buffer("top", 4, initialised=True), Buffer("order", 384)
    run(kernels.atomics, grid=3, block=32, args=(count, top, order), seed=seed, options=options)
    assert count.array(np.uint32)[0] == 96
    assert top.array(np.int32)[0] == 63
    assert sorted(order.array(np.uint32)) == list(range(96))


def test_a_seed_gives_one_order_and_seeds_differ():
    def drawn(seed: int) -> list[int]:
        buffers = Buffer("count", 4, initialised=True), Buffer("top", 4, initialised=True), Buffer("order", 384)
        run(kernels.atomics, grid=3, block=32, args=buffers, seed=seed, options=Options(order="random"))
        return buffers[2].array(np.uint32).tolist()

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


@ways
def test_coordinates(seed, options):
    y = Buffer("y", 4 * 8 * 24)
    stats = run(kernels.coordinates, grid=(2, 2, 2), block=(4, 3, 2), args=(y,), seed=seed, options=options)
    assert (stats.blocks, stats.threads) == (8, 24)
    block, tid = np.arange(8)[:, None], np.arange(24)[None]
    expected = (
        tid % 4 + 10 * (tid // 4 % 3) + 100 * (tid // 12)
        + 1000 * (block % 2) + 10000 * (block // 2 % 2) + 100000 * (block // 4)
    )  # fmt: skip
    assert np.array_equal(y.array("u32", (8, 24)), expected)


def test_scalars_vectors_and_bytes():
    a = RNG.standard_normal(32).astype(np.float32)
    y, z = Buffer("y", 80), Buffer("z", 20)
    run(kernels.dtypes, grid=1, block=32, args=(Buffer.of("a", a), y, z, 0.1, 20))
    assert np.array_equal(y.array("f32"), (a * np.float32(0.1) + np.float32(1))[:20])
    assert np.array_equal(z.array("i8"), -np.arange(20))


@ways
def test_wrapped_kernels_index_arrays(seed, options):
    x, y = RNG.standard_normal(50).astype(np.float32), RNG.standard_normal(50).astype(np.float32)
    out = Buffer.of("y", y)
    run(kernels.saxpy, grid=2, block=32, args=(out, Buffer.of("x", x), 2.0, 50), seed=seed, options=options)
    assert np.array_equal(out.array("f32"), np.float32(2) * x + y)


def test_without_checks_the_numbers_are_the_same():
    x = RNG.integers(-50, 50, (5, 200)).astype(np.float32)
    y = Buffer("y", 20)
    off = Options(checks=False)
    run(kernels.block_sum, grid=5, block=64, args=(Buffer.of("x", x), y, 200), shared_bytes=256, options=off)
    assert np.array_equal(y.array(np.float32), x.sum(axis=1))
    assert not y.unwritten


def test_infinities_and_nan_are_ordinary_values():
    a = np.array([np.inf, -np.inf, np.nan, 3e38] * 8, np.float32)
    y, z = Buffer("y", 128), Buffer("z", 32)
    with np.errstate(all="raise"):
        run(kernels.dtypes, grid=1, block=32, args=(Buffer.of("a", a), y, z, 10.0, 32))
    assert np.array_equal(y.array("f32")[:4], [np.inf, -np.inf, np.nan, np.inf], equal_nan=True)

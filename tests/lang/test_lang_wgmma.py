"""Products of a warpgroup: their numbers, on the interpreter and with `--device=cuda` on a card; their machine code.

Where elements lie is written out here from the PTX ISA's canonical layouts and swizzles, element by element.
"""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
import wgmma_kernels as kernels

from atlas_lab import simt
from atlas_lab.core.launch import Launch, Program
from atlas_lab.core.tensor import Tensor
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang.descriptor import Descriptor, decode
from atlas_lab.kernels.lang.multiply import U_MMA, U_MMA_NARROW

RNG = np.random.default_rng(23)
HOST = {L.bf16: ml_dtypes.bfloat16, L.f16: np.float16, L.e4m3: ml_dtypes.float8_e4m3fn, L.i8: np.int8}


def run(
    device, kernel: L.Kernel, image: np.ndarray, results: int, shared: int, *more: int, block: int = 128
) -> np.ndarray:
    """The words that `kernel(x, y, …)` stores, one block."""
    x, y = Tensor("u8", (image.size,), "x"), Tensor("u32", (results,), "y")
    launch = Launch(kernel, grid=1, block=block, args=(x, y, *more), shared=shared)
    program = Program("products", (launch,), inputs=(x,), outputs=(y,))
    buffers = {t.name: device.allocate(t.bytes, "test", name=t.name) for t in (x, y)}
    device.upload(buffers["x"], image)
    device.bind(program, buffers).run()
    found = device.download(buffers["y"], "u32", (results,))
    for b in buffers.values():
        b.free()
    return found


def operands(dtype: L.Scalar, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    if dtype is L.i8:
        return RNG.integers(-128, 128, (m, k), np.int8), RNG.integers(-128, 128, (n, k), np.int8)
    return tuple((RNG.standard_normal((rows, k)) * 2).astype(HOST[dtype]) for rows in (m, n))


def check(found: np.ndarray, a: np.ndarray, b: np.ndarray, dtype: L.Scalar = L.bf16) -> None:
    left, right = a.astype(np.float64), b.astype(np.float64)
    exact = left @ right.T
    if dtype is L.i8:
        assert np.array_equal(found.view(np.int32).reshape(exact.shape), exact)
        return
    u = U_MMA_NARROW if dtype is L.e4m3 else U_MMA
    bound = u * left.shape[1] * (np.abs(left) @ np.abs(right).T)
    assert (np.abs(found.view(np.float32).reshape(exact.shape) - exact) <= bound).all()


def flat(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate([p.view(np.uint8).ravel() for p in parts])


@pytest.mark.parametrize(
    ("dtype", "n", "swizzle", "a_registers"),
    [
        (L.bf16, 64, 128, False), (L.bf16, 8, 64, False), (L.bf16, 256, 128, False), (L.bf16, 40, 32, False),
        (L.f16, 24, 128, False), (L.e4m3, 64, 128, False), (L.e4m3, 136, 64, False), (L.i8, 32, 128, False),
        (L.i8, 96, 32, False), (L.bf16, 64, 128, True), (L.f16, 16, 64, True), (L.e4m3, 64, 128, True),
        (L.i8, 48, 64, True),
    ],
    ids=str,
)  # fmt: skip
def test_a_tile_over_four_steps(device, dtype, n, swizzle, a_registers):
    k = 4 * 256 // dtype.bits
    a, b = operands(dtype, 64, n, k)
    kernel = kernels.gemm(dtype, n, swizzle, a_registers)
    check(run(device, kernel, flat(a, b), 64 * n, (64 + n) * 128), a, b, dtype)


@pytest.mark.parametrize(("swizzle", "read_as"), [(128, 64), (64, 32), (128, 32)])
def test_a_descriptor_of_another_swizzle_gives_other_numbers(device, swizzle, read_as):
    a, b = operands(L.i8, 64, 64, 128)
    found = run(device, kernels.gemm(L.i8, 64, swizzle, False, read_as), flat(a, b), 64 * 64, 128 * 128)
    exact = a.astype(np.int64) @ b.astype(np.int64).T
    assert (found.view(np.int32).reshape(64, 64) != exact).mean() > 0.5


def test_groups_in_flight(device):
    a, b = operands(L.bf16, 128, 32, 64)
    check(run(device, kernels.pipelined(32), flat(a, b), 128 * 32, 160 * 128), a, b)


def tiles() -> tuple[np.ndarray, np.ndarray]:
    """Tiles of small integers, and the exact sum of their products."""
    made = RNG.integers(-3, 4, (kernels.TILES, 72, 16)).astype(ml_dtypes.bfloat16)
    return made, sum(t[:64] @ t[64:].T for t in made.astype(np.float64))


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_producer_and_a_consumer(device, stages):
    made, exact = tiles()
    kernel = kernels.producer_and_consumer(stages)
    found = run(device, kernel, flat(made), 64 * 8, stages * kernels.STAGE_BYTES, block=256)
    assert np.array_equal(found.view(np.float32).reshape(64, 8), exact)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("stages", [1, 2])
def test_a_producer_and_a_consumer_in_any_order(stages, seed):
    made, exact = tiles()
    y = simt.Buffer("y", 4 * 64 * 8)
    simt.run(
        kernels.producer_and_consumer(stages), grid=1, block=256, args=(simt.Buffer.of("x", made), y), seed=seed,
        shared_bytes=stages * kernels.STAGE_BYTES, options=simt.Options(order="random", late_async="random"),
    )  # fmt: skip
    assert np.array_equal(y.array(np.float32, (64, 8)), exact)


def test_fragments_loaded_while_products_run(device):
    a, b = operands(L.bf16, 64, 64, 64 * kernels.TILES)
    right = b[:, :64]
    found = run(device, kernels.streamed(64), flat(a, np.ascontiguousarray(right)), 64 * 64, 64 * 128)
    check(found, a, np.tile(right, kernels.TILES))


def test_sums_promoted_to_registers(device):
    a, b = (RNG.integers(-4, 5, (64, k)).astype(ml_dtypes.float8_e4m3fn) for k in (128 * kernels.TILES, 128))
    found = run(device, kernels.promoted(64), flat(a, b), 64 * 64, 2 * 8192)
    groups = a.astype(np.float64).reshape(64, kernels.TILES, 128) * (1 + np.arange(kernels.TILES))[:, None]
    exact = np.einsum("mgk,nk->mn", groups, b.astype(np.float64))
    assert np.array_equal(found.view(np.float32).reshape(64, 64), exact)


def chunk(c: int, line: int, swizzle: int) -> int:
    """Chunk c of a line of an atom, as the swizzle places it: lines of 128, 64 or 32 bytes, eight of them."""
    return c ^ {0: 0, 128: line, 64: line // 2, 32: line // 4}[swizzle]


def place_k_major(m: np.ndarray, image: np.ndarray, at: int, swizzle: int, leading: int, stride: int) -> None:
    """[rows, 16] codes; a core matrix is 8 rows of 16 bytes, an atom 8 rows of `swizzle` bytes."""
    for r in range(len(m)):
        for k in range(16):
            group, line = divmod(r, 8)
            c, e = divmod(k, 8)
            if swizzle:
                byte = group * stride + line * swizzle + 16 * chunk(c, line, swizzle)
            else:
                byte = group * stride + c * leading + 16 * line
            image[at + byte + 2 * e : at + byte + 2 * e + 2].view(np.uint16)[0] = m[r, k]


def place_transposed(m: np.ndarray, image: np.ndarray, at: int, swizzle: int, leading: int, stride: int) -> None:
    """[rows, 16] codes, rows contiguous; an atom is 8 of K by `swizzle` bytes of rows."""
    for r in range(len(m)):
        for k in range(16):
            group, line = divmod(k, 8)
            if swizzle:
                atom, within = divmod(2 * r, swizzle)
                byte = atom * leading + group * stride + line * swizzle + 16 * chunk(within // 16, line, swizzle)
            else:
                byte = 2 * r // 16 * stride + group * leading + 16 * line
            byte += 2 * r % 16
            image[at + byte : at + byte + 2].view(np.uint16)[0] = m[r, k]


# (swizzle, leading, stride, transposed) of 64 and of n rows; offsets larger than needed where they may be.
LAYOUTS = {
    "none": ((0, 128, 256, False), (0, 2048, 128, False)),
    "k-major 32": ((32, 16, 256, False), (32, 16, 512, False)),
    "k-major 64": ((64, 16, 512, False), (64, 16, 1024, False)),
    "k-major 128": ((128, 16, 2048, False), (128, 16, 1024, False)),
    "b transposed 128": ((128, 16, 1024, False), (128, 2048, 1024, True)),
    "b transposed 64": ((64, 16, 512, False), (64, 1024, 512, True)),
    "b transposed 32": ((32, 16, 256, False), (32, 256, 2048, True)),
    "a transposed 128": ((128, 16, 2048, True), (128, 16, 1024, False)),
    "a transposed 64": ((64, 1024, 512, True), (32, 16, 256, False)),
    "both transposed, none": ((0, 1024, 128, True), (0, 128, 256, True)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_operands(device, name):
    n, b_at = 96, 16384
    a_layout, b_layout = LAYOUTS[name]
    a, b = operands(L.bf16, 64, n, 16)
    image = RNG.integers(0, 256, 32768, np.uint8)
    for m, at, layout in ((a, 0, a_layout), (b, b_at, b_layout)):
        (place_transposed if layout[3] else place_k_major)(m.view(np.uint16), image, at, *layout[:3])
    kernel = kernels.one_product(n, a_layout, b_layout, b_at)
    check(run(device, kernel, image, 64 * n, image.size, image.size), a, b)


def test_the_first_product_overwrites_and_s8_wraps(device):
    a, b = np.full((64, 128), -128, np.int8), np.full((8, 128), -128, np.int8)
    found = run(device, kernels.gemm(L.i8, 8), flat(a, b), 64 * 8, 72 * 128)
    assert (found == 128 * 128 * 128).all()
    p = L.wgmma(L.i8, 8)
    assert p.unit_roundoff is None
    assert L.wgmma(L.e4m3, 8).unit_roundoff > L.wgmma(L.bf16, 8).unit_roundoff == U_MMA


def test_descriptor_bits():
    bits = 1 << 62 | 64 << 32 | 1 << 16 | 0x3C00 >> 4
    assert decode(bits) == Descriptor(0x3C00, 16, 1024, 0, 128)
    assert decode(bits | 5 << 49).base_offset == 5
    assert [decode(m << 62).swizzle for m in range(4)] == [0, 128, 64, 32]
    assert decode(L.descriptor_advance(bits, 96)) == Descriptor(0x3C60, 16, 1024, 0, 128)
    assert decode(L.descriptor_advance(bits, -1024)) == Descriptor(0x3800, 16, 1024, 0, 128)
    with pytest.raises(ValueError, match="found 8 bytes, expected a multiple of 16"):
        L.descriptor_advance(bits, 8)


def test_what_does_not_exist_is_refused():
    for arguments, more, text in (
        ((L.f32, 64), {}, "found f32, expected bf16, f16, e4m3 or i8"),
        ((L.bf16, 12), {}, "found 12 columns, expected a multiple of 8 from 8 to 256"),
        ((L.bf16, 264), {}, "found 264 columns"),
        ((L.i8, 40), {}, "found 40 columns, expected a multiple of 8 from 8 to 256, above 32 of 16"),
        ((L.e4m3, 64), {"b_transposed": True}, "found a transposed operand of e4m3, expected bf16 or f16"),
        ((L.bf16, 64), {"a_registers": True, "a_transposed": True}, "found A in registers and transposed"),
    ):
        with pytest.raises(ValueError, match=text):
            L.wgmma(*arguments, **more)
    with pytest.raises(ValueError, match="found u32, expected f32 or i32"):
        L.wgmma_wait(4, L.u32)


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("L.matrix_descriptor(s, 0, 16, 16, 16)", "found swizzle 16, expected 0, 32, 64 or 128 bytes"),
        ("L.matrix_descriptor(s, 0, 128, 16, 1000)", "found stride 1000, expected a multiple of 16 bytes from 0 to"),
        ("L.matrix_descriptor(s, 0, 128, 262144, 16)", "found leading 262144"),
        ("L.setmaxnreg_inc(36)", "found 36 registers, expected a multiple of 8 from 24 to 256"),
    ],
)
def test_constants_are_refused_when_compiling(expression, text, compiler):
    scope = {"L": L}
    source = f"def kernel(y: L.Out[L.u32]):\n    s = L.shared(L.u32, 64)\n    {expression}\n    L.sts_b32(s, 0, 1)\n"
    exec(source, scope)
    with pytest.raises(L.KernelError, match=text):
        L.compile_kernel(L.kernel(scope["kernel"]), "sm_90a")


SHAPES = [
    *((L.bf16, n, {}) for n in (104, 256)),
    (L.f16, 128, {}), (L.e4m3, 256, {}), (L.i8, 256, {}),
    *((d, 128, {"a_registers": True}) for d in (L.bf16, L.e4m3, L.i8)),
    *(
        pytest.param(*shape, marks=pytest.mark.full)
        for shape in (
            (L.bf16, 8, {}), (L.i8, 24, {}), (L.f16, 128, {"a_registers": True}), (L.bf16, 256, {"a_registers": True}),
        )
    ),
    (L.bf16, 64, {"a_transposed": True}), (L.f16, 64, {"b_transposed": True}),
    (L.bf16, 64, {"a_registers": True, "b_transposed": True}),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "n", "options"), SHAPES, ids=str)
def test_a_loop_stays_asynchronous(dtype, n, options, compiler):
    """No spill, no serialised product (a C75xx warning), one wait a group."""
    kernel = kernels.loop(dtype, n, **options)
    assert L.check_kernel(kernel, "sm_90a") == ()
    text = L.sass(kernel, "sm_90a")
    name = {L.e4m3: "QGMMA", L.i8: "IGMMA"}.get(dtype, "HGMMA")
    products = re.findall(rf"\b{name}\.64x{n}x\d+\S*", text)
    waits = len(re.findall(r"\bWARPGROUP\.DEPBAR\b", text))
    assert len(products) == 4 * waits, products


WHOLE = (
    kernels.gemm(L.bf16, 64), kernels.gemm(L.bf16, 64, 128, True), kernels.pipelined(64),
    kernels.producer_and_consumer(1), kernels.producer_and_consumer(2), kernels.streamed(128), kernels.promoted(128),
)  # fmt: skip


@pytest.mark.parametrize("kernel", WHOLE, ids=lambda k: k.entry)
def test_whole_kernels_stay_asynchronous(kernel, compiler):
    assert L.check_kernel(kernel, "sm_90a") == ()


@pytest.mark.parametrize(
    ("kernel", "code"), [(kernels.rotating(), "C7513"), (kernels.hasty(), "C7517")], ids=["rotating", "hasty"]
)
def test_what_the_assembler_serialises_is_told(kernel, code, compiler):
    (problem,) = L.check_kernel(kernel, "sm_90a")
    assert f"warns: ptxas info    : ({code})" in problem

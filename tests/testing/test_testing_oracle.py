"""The oracle: what it takes for right, what it must not, and in which words."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from atlas_lab.core.declare import Bind, Derived
from atlas_lab.core.numbers import Exact, Rounded
from atlas_lab.core.projection import WeightSource
from atlas_lab.core.tensor import Tensor
from atlas_lab.experiments import oracle
from atlas_lab.experiments.case import Case, site_of, weight_source
from atlas_lab.experiments.oracle import Reference
from atlas_lab.experiments.values import Stored, activations, weights
from atlas_lab.formats import FORMATS

BF16 = ml_dtypes.bfloat16
TOLERANCE = Rounded("f32", "bf16")


def product(seed: int = 0, m: int = 4, n: int = 6, k: int = 64) -> tuple[np.ndarray, Reference]:
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((m, k)), rng.standard_normal((n, k))
    ref = oracle.product(x, w)
    return ref.values.astype(BF16), ref


def test_a_rounded_product_is_right() -> None:
    out, ref = product()
    found = oracle.compare(out, ref, TOLERANCE, 64)
    assert found.ok
    assert 0 < found.worst <= 1
    assert str(found).endswith("of the bound)")


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 0.0, 1e30])
def test_one_wrong_output_is_found_and_named(wrong: float) -> None:
    out, ref = product()
    out[2, 5] = wrong
    found = oracle.compare(out, ref, TOLERANCE, 64)
    assert not found.ok
    assert (found.m, found.n, found.outside, found.of) == (2, 5, 1, 24)
    assert str(found).startswith("1 of 24 outputs are outside the tolerance, worst y[2, 5]: found ")


def test_infinity_is_right_only_where_the_reference_overflows() -> None:
    ref = Reference(np.array([[3.4e38, -3.4e38, 3.38e38]]), np.array([[3.4e38, 3.4e38, 3.38e38]]))
    out = np.array([[np.inf, -np.inf, np.inf]]).astype(BF16)
    assert oracle.compare(out[:, :2], Reference(ref.values[:, :2], ref.magnitude[:, :2]), TOLERANCE, 4).ok
    near = Reference(ref.values / 100, ref.magnitude / 100)
    assert oracle.compare(out, near, TOLERANCE, 4).outside == 3
    assert oracle.compare(-out, ref, TOLERANCE, 4).outside >= 2


def test_exact_is_bit_for_bit() -> None:
    out, ref = product()
    assert oracle.compare(out, ref, Exact(), 64).ok
    last = out.copy()
    last.view(np.uint16)[0, 0] ^= 1
    found = oracle.compare(last, ref, Exact(), 64)
    assert (found.outside, found.m, found.n) == (1, 0, 0)
    zero = Reference(np.zeros((1, 1)), np.zeros((1, 1)))
    assert not oracle.compare(np.array([[-0.0]]).astype(BF16), zero, Exact(), 1).ok


def test_fidelity() -> None:
    exact = np.array([[3.0, 4.0], [1.0, 0.0]])
    near = oracle.fidelity(exact + [[0.5, 0], [0, 0]], exact)
    assert near.rel_l2 == pytest.approx(0.5 / np.sqrt(26))
    assert near.snr_db == pytest.approx(10 * np.log10(26 / 0.25))
    assert near.worst_row == 0
    same = oracle.fidelity(exact.astype(BF16), exact)
    assert (same.rel_l2, same.snr_db) == (0, np.inf)
    assert same.cosine == pytest.approx(1)
    assert oracle.fidelity(exact * 0, exact * 0).rel_l2 == 0


def source(n: int = 4, k: int = 32, fmt: str = "bf16") -> WeightSource:
    return weight_source("w", Case("a", ("ffn.up",), 1, n, k, fmt))


def derived(key: str, rows: int, k: int = 32, dtype: type = np.float64) -> Derived:
    return Derived(
        key, source=source(), build=lambda w: {"q": w}, dequantize=lambda t: np.zeros((rows, k), dtype),
        q=Tensor("f32", (4, 32)),
    )  # fmt: skip


def test_rows_of_several_declarations_follow_each_other() -> None:
    one, two = Bind(source(4), "ffn.gate"), Bind(source(2), "ffn.up")
    arrays = {d.key: {"weight": np.full(d.tensors["weight"].shape, i + 1, BF16)} for i, d in enumerate((one, two))}
    w = oracle.dequantized((one, two), arrays, 6, 32)
    assert w[:, 0].tolist() == [1, 1, 1, 1, 2, 2]
    twice = (Bind(source(4), "a"), Bind(source(4), "b"))
    same = dict.fromkeys("ab", arrays["ffn.gate"])
    assert oracle.dequantized(twice, same, 4, 32).shape == (4, 32)


@pytest.mark.parametrize(
    ("declarations", "sentence"),
    [
        ((derived("q", 3),), "weights 'q' [3, 32]: expected rows that add up to [4, 32], or an arm that defines"),
        ((derived("q", 4), derived("r", 3)), "weights 'q' [4, 32], 'r' [3, 32]: expected rows that add up to"),
        ((derived("q", 4, k=31),), "weight 'q': dequantize gave float64[4, 31], expected float64 [rows, 32]"),
        ((derived("q", 4, dtype=np.float32),), "weight 'q': dequantize gave float32[4, 32], expected float64"),
        ((), "weights none: expected rows that add up to [4, 32]"),
    ],
)
def test_weights_that_leave_open_what_they_are(declarations: tuple[Derived, ...], sentence: str) -> None:
    with pytest.raises(oracle.OracleError) as e:
        oracle.dequantized(declarations, {d.key: {} for d in declarations}, 4, 32)
    assert str(e.value).startswith(sentence)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("values", ["heavy", "plain", "huge", "tiny"])
def test_every_format_stores_every_kind_of_value_and_is_reproduced(fmt: str, values: str) -> None:
    case = Case("a", ("ffn.gate", "ffn.up"), 5, 7, 256, fmt, values=values)
    stored = Stored(case, site_of(case))
    again = Stored(case, site_of(case))
    assert all(oracle.same_bits(a, again.arrays[name]) for name, a in stored.arrays.items())
    for p, w in zip(site_of(case).projections, stored.unquantized, strict=True):
        stored.check(p.weight, p.label)
        assert np.array_equal(w.astype(BF16).astype(np.float32), w)
        assert np.isfinite(FORMATS[fmt].dequantize(stored.of(p.weight))).all()
    assert not np.array_equal(*stored.unquantized)


def test_heavy_values_have_what_they_promise() -> None:
    case = Case("a", ("ffn.up",), 5, 9, 512, "nvfp4")
    w, x = weights(case, "ffn.up"), activations(case).astype(np.float32)
    assert not w[4].any()
    assert (np.signbit(w) & (w == 0)).any()
    groups = np.abs(np.delete(w, 4, axis=0)).reshape(8, -1, 16).max(axis=-1)
    assert groups.max() / groups[groups > 0].min() > 2**10
    scales = Stored(case, site_of(case)).of(site_of(case)["ffn.up"].weight)["scale"].astype(np.float32)
    assert (scales < 2**-6).any(), "some block scales are subnormal"
    assert not x[2].any()
    assert np.abs(x).max() > 16
    assert np.array_equal(activations(case, 2), activations(case)[:2])

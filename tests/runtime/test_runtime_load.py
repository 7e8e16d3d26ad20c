"""Load plans: order, exactness, unwinding, and a ledger equal to the forecast whatever happens."""

from __future__ import annotations

from contextlib import suppress

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_lab.core.declare import Derived
from atlas_lab.core.projection import WeightSource
from atlas_lab.core.residency import Alloc, Build, Check, Free, LoadPlan, Upload
from atlas_lab.core.tensor import Tensor, round_up
from atlas_lab.formats import FORMATS
from atlas_lab.runtime.device import DeviceError, open_device, target_named
from atlas_lab.runtime.interpreter import InterpreterDevice
from atlas_lab.runtime.load import LoadError, execute

N, K = 4, 32


def source(prefix: str, name: str = "bf16") -> WeightSource:
    f = FORMATS[name]
    fields = tuple((field, Tensor(s.dtype, s.shape, f"{prefix}.{field}")) for field, s in f.tensors(N, K).items())
    return WeightSource(f.name, f.family, f.geometry, fields)


class Checkpoint:
    """Stored tensors of sources, quantized from random values."""

    def __init__(self, *sources: WeightSource) -> None:
        rng = np.random.default_rng(0)
        self.arrays = {}
        self.values = {}
        for s in sources:
            w = rng.standard_normal((N, K)).astype(np.float32)
            stored = FORMATS[s.format].quantize(w)
            self.values[s] = FORMATS[s.format].dequantize(stored).astype(np.float32)
            for field, t in s.fields:
                self.arrays[t.name] = stored[field]

    def read(self, t: Tensor) -> np.ndarray:
        return self.arrays[t.name]


def doubled(s, build=None, **fields) -> Derived:
    fields = fields or {"q": Tensor("f32", (N, K))}
    return Derived("doubled", source=s, build=build or (lambda w: {"q": w * 2}), dequantize=lambda t: t["q"], **fields)


def allocs(tensors, label="derived") -> list[Alloc]:
    return [Alloc(t.name, round_up(t.bytes), label, "layers.0") for t in tensors]


def no_check(weight, label) -> None:
    pass


def test_a_plan_is_checked_uploaded_and_built_in_order():
    bf, nv = source("a"), source("b", "nvfp4")
    d = doubled(nv)
    file = Checkpoint(bf, nv)
    steps = [*allocs(bf.tensors.values(), "checkpoint"), *[Upload(t) for t in bf.tensors.values()]]
    steps += [*allocs(d.tensors.values()), Build(d, "layers.0"), Check(bf, "a"), Check(nv, "b")]
    plan = LoadPlan(tuple(steps))
    device = open_device("interpreter")
    seen = []

    def check(weight, label):
        seen.append(label)
        assert device.ledger.held == 0

    with execute(plan, file.read, check, device) as loaded:
        assert seen == ["a", "b"]
        assert loaded.rows() == device.ledger.rows() == plan.ledger()
        assert loaded.ledger.peak == device.ledger.peak == plan.peak
        np.testing.assert_array_equal(device.download(loaded["a.weight"], "bf16", (N, K)), file.arrays["a.weight"])
        q = device.download(loaded[d.tensors["q"].name], "f32", (N, K))
        np.testing.assert_array_equal(q, file.values[nv] * 2)
        assert list(loaded) == ["a.weight", d.tensors["q"].name]
    device.ledger.check_empty()
    assert len(loaded) == 0


def test_a_packed_source_is_handed_over_as_stored():
    nv = source("b", "nvfp4")
    file = Checkpoint(nv)
    given = {}

    def build(values, packed):
        given.update(packed)
        assert values.dtype == np.float32
        return {"q": packed["weight"].copy()}

    d = doubled((nv, nv.packed), build, q=Tensor("u8", (N, K // 2)))
    plan = LoadPlan((*allocs(d.tensors.values()), Build(d, "layers.0")))
    with execute(plan, file.read, no_check, open_device("interpreter")) as loaded:
        assert set(given) == set(nv.tensors)
        out = loaded.device.download(loaded[d.tensors["q"].name], "u8", (N, K // 2))
        np.testing.assert_array_equal(out, file.arrays["b.weight"])


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda w: {}, r"build returned \[\], expected the fields \['q'\]"),
        (lambda w: {"q": w, "r": w}, r"build returned \['q', 'r'\], expected the fields \['q'\]"),
        (lambda w: w, r"build returned ndarray, expected the fields \['q'\]"),
        (lambda w: {"q": w.T}, r"field 'q' is float32\[32, 4\], expected float32\[4, 32\]"),
        (lambda w: {"q": w.astype(np.float64)}, r"field 'q' is float64\[4, 32\], expected float32\[4, 32\]"),
        (lambda w: {"q": w.tolist()}, r"field 'q' is list, expected float32\[4, 32\]"),
        (lambda w: 1 // 0, "build raised ZeroDivisionError: "),
    ],
)
def test_a_build_that_breaks_its_declaration_is_named_and_unwound(build, sentence):
    bf = source("a")
    d = doubled(bf, build)
    plan = LoadPlan((*allocs(d.tensors.values()), Build(d, "layers.0.ffn.up")))
    device = open_device("interpreter")
    with pytest.raises(LoadError, match=f"derived weight 'doubled' of layers.0.ffn.up: {sentence}"):
        execute(plan, Checkpoint(bf).read, no_check, device)
    device.ledger.check_empty()


@pytest.mark.parametrize(
    ("array", "found"),
    [
        (np.zeros((N, K), np.float32), r"float32\[4, 32\]"),
        (np.zeros((N, K // 2), ml_dtypes.bfloat16), r"bfloat16\[4, 16\]"),
        (None, "NoneType"),
    ],
)
def test_a_stored_tensor_that_is_not_what_its_header_said_is_named(array, found):
    bf = source("a")
    plan = LoadPlan((*allocs(bf.tensors.values()), Upload(bf["weight"])))
    device = open_device("interpreter")
    with pytest.raises(LoadError, match=rf"tensor 'a.weight' was read as {found}, expected bfloat16\[4, 32\]"):
        execute(plan, lambda t: array, no_check, device)
    device.ledger.check_empty()


def test_a_failed_check_allocates_nothing():
    bf = source("a")
    device = open_device("interpreter")
    plan = LoadPlan((*allocs(bf.tensors.values()), Check(bf, "layers.0.ffn.up")))

    def check(weight, label):
        raise ValueError(f"{label}: bad scale")

    with pytest.raises(ValueError, match=r"layers\.0\.ffn\.up: bad scale"):
        execute(plan, Checkpoint(bf).read, check, device)
    assert device.ledger.peak == 0


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ([Alloc("a", 256, "x", "y"), Alloc("a", 256, "x", "y")], "buffer 'a' is allocated twice"),
        ([Free("a")], "buffer 'a' is freed but not allocated"),
        ([Upload(source("a")["weight"])], "tensor 'a.weight' has no buffer"),
    ],
)
def test_a_plan_at_odds_with_itself_is_refused(steps, sentence):
    device = open_device("interpreter")
    with pytest.raises(LoadError, match=sentence):
        execute(LoadPlan(tuple(steps)), Checkpoint(source("a")).read, no_check, device)
    device.ledger.check_empty()


class Fragile(InterpreterDevice):
    """Fails at the allocation or upload counted by `fail_at`."""

    def __init__(self, fail_at: int) -> None:
        super().__init__(target_named("h200"))
        self.left = fail_at

    def _count(self) -> None:
        if self.left == 0:
            raise DeviceError("injected")
        self.left -= 1

    def _take(self, name, nbytes):
        self._count()
        return super()._take(name, nbytes)

    def _write(self, buffer, offset, raw):
        self._count()
        super()._write(buffer, offset, raw)


@st.composite
def plans(draw) -> LoadPlan:
    """Allocations of odd sizes, each filled or not, some freed again, in any legal order."""
    steps = []
    live = []
    for i in range(draw(st.integers(1, 8))):
        if live and draw(st.booleans()):
            steps.append(Free(live.pop(draw(st.integers(0, len(live) - 1)))))
        size = draw(st.integers(0, 1000))
        t = Tensor("u8", (size,), f"t{i}")
        steps.append(Alloc(t.name, round_up(size), draw(st.sampled_from(["w", "d"])), "layers.0"))
        live.append(t.name)
        if draw(st.booleans()):
            steps.append(Upload(t))
    return LoadPlan(tuple(steps))


def read_bytes(t: Tensor) -> np.ndarray:
    return np.full(t.shape, 7, np.uint8)


@settings(max_examples=60)
@given(plans())
def test_ledger_and_peak_equal_the_forecast(plan):
    device = open_device("interpreter")
    loaded = execute(plan, read_bytes, no_check, device)
    assert loaded.rows() == device.ledger.rows() == plan.ledger()
    assert loaded.ledger.held == plan.steady
    assert loaded.ledger.peak == device.ledger.peak == plan.peak
    loaded.close()
    device.ledger.check_empty()


@settings(max_examples=30)
@given(plans())
def test_a_failure_at_any_step_gives_everything_back(plan):
    for fail_at in range(2 * len(plan.steps)):
        device = Fragile(fail_at)
        with suppress(DeviceError):
            execute(plan, read_bytes, no_check, device).close()
        device.ledger.check_empty()
        if device.left:
            break


def test_an_interruption_gives_everything_back():
    device = open_device("interpreter")

    def read(t):
        raise KeyboardInterrupt

    plan = LoadPlan((*allocs(source("a").tensors.values()), Upload(source("a")["weight"])))
    with pytest.raises(KeyboardInterrupt):
        execute(plan, read, no_check, device)
    device.ledger.check_empty()


def test_a_buffer_allocated_before_does_not_disturb_the_plan_s_own_ledger():
    device = open_device("interpreter")
    device.allocate(1 << 20, "ports")
    bf = source("a")
    plan = LoadPlan((*allocs(bf.tensors.values()), Upload(bf["weight"])))
    with execute(plan, Checkpoint(bf).read, no_check, device) as loaded:
        assert loaded.rows() == plan.ledger()
        assert loaded.ledger.peak == plan.peak
    assert device.ledger.held == 1 << 20

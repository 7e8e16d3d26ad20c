"""Types, kernels, families, wrapped dispatchers, what a kernel names, and new intrinsics."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda
from atlas_lab.kernels.lang.references import references


def test_casts_wrap_and_round():
    assert [L.u8(300), L.i8(200), L.u32(-1), L.i32(2**31), L.u64(-1), L.i64(2**63)] == [
        44, -56, 2**32 - 1, -(2**31), 2**64 - 1, -(2**63),
    ]  # fmt: skip
    assert L.u32(3.9) == 3
    assert L.i32(-3.9) == -3
    assert type(L.f32(0.1)) is np.float32
    assert L.f32(16777217) == np.float32(16777216)
    with pytest.raises(TypeError, match="bf16 is a storage type"):
        L.bf16(1.0)


@pytest.mark.parametrize(
    ("cast", "value"), [(L.i32, 3e9), (L.u32, -1.0), (L.u8, np.float32(256)), (L.i8, -129.0), (L.u64, 2e19)]
)
def test_a_float_outside_an_integer_type_is_refused(cast, value):
    with pytest.raises(OverflowError, match=f"no {cast} holds it"):
        cast(value)
    assert [L.u8(255.9), L.u32(-0.9), L.i32(-2147483648.5)] == [255, 0, -(2**31)]


def test_types_keep_their_identity():
    assert pickle.loads(pickle.dumps(L.bf16)) is L.bf16
    assert str(L.e4m3) == "e4m3"
    assert (L.bf16.bytes, L.i64.bytes, L.e5m2.bytes) == (2, 8, 1)
    with pytest.raises(TypeError, match=r"In\[\.\.\.\] takes an element type"):
        L.In[int]


@L.device
def twice(v):
    return L.add_rn(v, v)


@L.kernel(launch_bounds=(32, 1))
def doubled(x: L.In[L.f32], y: L.Out[L.bf16], z: L.InOut[L.u32], n: L.i32):
    if cuda.threadIdx.x < n:
        L.stg_bf16(y, 0, twice(L.ldg_f32(x, 0)))


def test_a_kernel_knows_its_parameters():
    assert [p.name for p in doubled.params] == ["x", "y", "z", "n"]
    assert [p.mode for p in doubled.params] == ["in", "out", "inout", ""]
    assert [p.dtype for p in doubled.params] == [L.f32, L.bf16, L.u32, L.i32]
    assert (doubled.reads, doubled.writes) == ((0, 2), (1, 2))
    assert doubled.launch_bounds == (32, 1)
    assert doubled.spec.family == "doubled"
    assert doubled.entry.startswith("doubled__")
    with pytest.raises(L.KernelError, match="is not called: put it in a Launch"):
        doubled(1, 2, 3, 4)


def test_a_kernel_knows_what_it_names():
    assert doubled.ops == (L.add_rn, L.ldg_f32, L.stg_bf16)
    assert doubled.needs == L.Needs((8, 0))
    assert doubled.interpretable


@pytest.mark.parametrize("annotation", [int, "L.In", None, "float"])
def test_a_parameter_without_a_type_is_refused(annotation):
    def wrong(x):
        pass

    wrong.__annotations__ = {"x": annotation} if annotation else {}
    with pytest.raises(L.KernelError, match="kernel wrong: parameter 'x' is annotated"):
        L.kernel(wrong)


def test_an_annotation_that_cannot_be_read():
    def wrong(x: L.In[missing]):  # noqa: F821
        pass

    with pytest.raises(L.KernelError, match=r"annotation 'L.In\[missing\]' of parameter 'x' cannot be read: name"):
        L.kernel(wrong)


@L.family
def scaled(tile: int, dtype: L.Scalar = L.bf16, *, name: str = "a-b", ratio: float = 0.5):
    @L.kernel
    def kernel(x: L.In[dtype], y: L.Out[dtype], n: L.i32):
        L.stg_b32(y, tile, L.ldg_b32(x, n))

    return kernel


def test_a_family_makes_each_kernel_once():
    a, b = scaled(4), scaled(tile=4, dtype=L.bf16)
    assert a is b
    assert a != scaled(8)
    assert hash(a) == hash(b)
    assert a.params[0].dtype is L.bf16
    assert scaled(4, L.u8).params[0].dtype is L.u8


def test_an_entry_names_the_family_and_its_parameters():
    kernel = scaled(4)
    assert kernel.spec.parameters == (("tile", 4), ("dtype", L.bf16), ("name", "a-b"), ("ratio", 0.5))
    assert str(kernel.spec) == "scaled(tile=4, dtype=bf16, name=a-b, ratio=0.5)"
    assert kernel.entry.startswith("scaled__tile4_dtypebf16_nameab_ratio05__")
    assert kernel.entry.isidentifier()
    assert kernel.entry.isascii()
    assert len({scaled(t, name=n).entry for t in (1, -1, 10) for n in ("a", "é", "")}) == 9


def test_a_parameter_that_is_none_by_default_names_a_kernel_only_where_it_is_given():
    """A family that learns an option keeps the names of its kernels; None where that is no default does name one."""

    @L.family
    def grown(tile: int, other: int | None = 3, epilogue: str | None = None):
        @L.kernel
        def kernel(y: L.Out[L.f32]):
            L.stg_f32(y, tile, L.f32(2 if epilogue else 1))

        return kernel

    assert grown(4) is grown(4, epilogue=None)
    assert grown(4).spec.parameters == (("tile", 4), ("other", 3))
    assert grown(4, epilogue="add").spec.parameters == (("tile", 4), ("other", 3), ("epilogue", "add"))
    assert grown(4, None).spec.parameters == (("tile", 4), ("other", None))
    assert len({k.entry for k in (grown(4), grown(4, epilogue="add"), grown(4, None))}) == 3


@pytest.mark.parametrize("value", [[1], {"a": 1}, object(), (1, [2])])
def test_a_family_refuses_parameters_it_cannot_name(value):
    with pytest.raises(L.KernelError, match=r"family scaled: found .* as tile, expected a number"):
        scaled(value)


def test_a_family_that_returns_no_kernel():
    @L.family
    def nothing():
        return 3

    with pytest.raises(L.KernelError, match="family nothing: found 3 returned, expected a kernel"):
        nothing()


def test_needs_are_a_union():
    assert L.Needs((8, 0)).union(L.Needs((8, 9))) == L.Needs((8, 9))
    assert L.Needs((9, 0), "a").union(L.Needs((8, 0))) == L.Needs((9, 0), "a")
    assert L.Needs((9, 0)).union(L.Needs((9, 0), "a")) == L.Needs((9, 0), "a").union(L.Needs((9, 0)))
    assert L.Needs((9, 0)).union(L.Needs((9, 0), "a")).suffix == "a"
    assert L.Needs.parse("sm_120a") == L.Needs((12, 0), "a")
    assert str(L.Needs((8, 9))) == "sm_89 or later"
    assert str(L.Needs((9, 0), "a")) == "sm_90a"
    assert L.Needs((9, 0), "a").met_by((9, 0))
    assert not L.Needs((9, 0), "a").met_by((12, 0))
    with pytest.raises(ValueError, match="no architecture is both"):
        L.Needs((9, 0), "a").union(L.Needs((12, 0)))
    with pytest.raises(ValueError, match="found architecture 'hopper'"):
        L.Needs.parse("hopper")


def test_architectures():
    assert L.architectures(L.Needs()) == ("sm_80", "sm_90a", "sm_120a")
    assert L.architectures(L.Needs((8, 9))) == ("sm_90a", "sm_120a")
    assert L.architectures(L.Needs((9, 0), "a")) == ("sm_90a",)
    assert L.architectures(L.Needs((10, 0), "a")) == ()


def test_conflicting_needs_are_told():
    hopper = L.intrinsic("hopper", (), ptx="trap;", effect="writes", needs="sm_90a", numpy=lambda: None)
    later = L.intrinsic("later", (), ptx="trap;", effect="writes", needs="sm_120", numpy=lambda: None)

    @L.kernel
    def both(n: L.i32):
        hopper()
        later()

    with pytest.raises(L.KernelError, match="later conflicts with its other intrinsics: no architecture is both"):
        _ = both.needs


def test_gpu_only_intrinsics_and_cuda_attributes_are_seen():
    gpu_only = L.intrinsic("gpu_only", (L.u32,), L.u32, ptx="mov.b32 $0, $1;")

    @L.kernel
    def no_meaning(y: L.Out[L.u32]):
        L.stg_b32(y, 0, gpu_only(3))

    @L.kernel
    def no_attribute(n: L.i32):
        cuda.threadfence_system()

    @L.kernel
    def fine(n: L.i32):
        cuda.syncthreads()

    assert not no_meaning.interpretable
    assert not no_attribute.interpretable
    assert fine.interpretable
    with pytest.raises(RuntimeError, match="gpu_only has no NumPy meaning"):
        gpu_only(3)


def test_references_follow_closures_modules_tuples_and_helpers():
    loads = (L.ldg_b8, L.ldg_b16)
    helper = L.device(lambda p: loads[0](p, 0))

    def body(p, q):
        return helper(p) + twice(q) + sum(L.popc(v) for v in p)

    found = references(body)
    assert set(found.ops) == {L.ldg_b8, L.ldg_b16, L.add_rn, L.popc}
    assert not found.foreign


class TestIntrinsic:
    def test_works_as_the_tables(self):
        plus = L.intrinsic(
            "plus", (L.u32, L.Vec(L.u32, 2), L.Const("k")), L.u32, ptx="mad.lo.u32 $0, $1, $2, $3; // {k}",
            numpy=lambda a, v, k: a * v[0] + v[1] + k, effect=L.Effect.PURE, needs="sm_80", section="9.7.1",
        )  # fmt: skip
        assert plus(2, (3, 4), 5) == 15
        assert plus.needs == L.Needs((8, 0))
        assert repr(plus) == "<intrinsic plus>"

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            ({"ptx": "mov.b32 $0, $2;"}, r"intrinsic bad: its PTX names \$2, but it has 2 registers"),
            ({"ptx": "mov.b32 $0, 3;"}, r"intrinsic bad: its PTX never names \$1 of its 2 registers"),
            ({"effect": "loads"}, "found effect 'loads', expected one of 'pure', 'reads', 'writes', 'synchronises'"),
            ({"needs": "hopper"}, "intrinsic bad: found architecture 'hopper'"),
            ({"operands": (L.bf16,)}, "found a register of bf16, expected 16, 32 or 64 bits or f32"),
            ({"operands": (L.u8,)}, "found a register of u8"),
            ({"result": L.Vec(L.e4m3, 2)}, "found a register of e4m3"),
            ({"operands": ("u32",)}, "found 'u32' among operands and result"),
            ({"name": "b-d"}, "found no identifier as its name"),
            ({"result": lambda: L.u32}, "a result that depends on the operands needs a function as ptx"),
        ],
    )
    def test_refuses(self, arguments, sentence):
        given = {"name": "bad", "operands": (L.u32,), "result": L.u32, "ptx": "mov.b32 $0, $1;"} | arguments
        with pytest.raises(L.KernelError, match=sentence):
            L.intrinsic(given.pop("name"), given.pop("operands"), given.pop("result"), numpy=None, **given)

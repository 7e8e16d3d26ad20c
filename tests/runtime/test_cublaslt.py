"""The calls that cuBLASLt is handed, on a library that writes them down: what its documentation asks for of row-major
BF16 with W transposed."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from atlas_lab.core.tensor import Tensor
from atlas_lab.runtime import cublaslt

M, N, K = 17, 96, 520
W, X, Y = Tensor("bf16", (N, K), "w"), Tensor("bf16", (M, K), "x"), Tensor("bf16", (M, N), "y")
SPACE = Tensor("u8", (cublaslt.WORKSPACE,), "space")
ADDRESSES = (4096, 8192 + 16, 12288 + 64, 1 << 20)
STREAM, CONTEXT, HANDLE = 5, 7, 11
PRODUCT, PREFERENCE = 100, 200

# cublasOperation_t, cublasComputeType_t, cudaDataType and cublasLt.h
Operation = enum.IntEnum("Operation", {"N": 0, "T": 1})
ComputeType = enum.IntEnum("ComputeType", {"COMPUTE_32F": 68})
DataType = enum.IntEnum("DataType", {"CUDA_R_32F": 0, "CUDA_R_16BF": 14})


class FakeLt:
    """nvmath.bindings.cublasLt, as far as it is called: `calls` in order, `desc` and `preferences` as they were set."""

    MatmulDescAttribute = enum.IntEnum("MatmulDescAttribute", {"TRANSA": 3, "TRANSB": 4})
    MatmulPreferenceAttribute = enum.IntEnum(
        "MatmulPreferenceAttribute",
        {"MAX_WORKSPACE_BYTES": 1, "REDUCTION_SCHEME_MASK": 3}
        | {f"MIN_ALIGNMENT_{x}_BYTES": i for i, x in enumerate("ABCD", 5)},
    )
    MatmulAlgoConfigAttribute = enum.IntEnum(
        "MatmulAlgoConfigAttribute", {"ID": 0, "TILE_ID": 1, "SPLITK_NUM": 2, "STAGES_ID": 6}, start=0
    )
    ReductionScheme = enum.IntEnum("ReductionScheme", {"NONE": 0, "COMPUTE_TYPE": 2})

    def __init__(self, *, found: int = 1, state: int = 0) -> None:
        self.found, self.state = found, state
        self.calls: list[tuple[Any, ...]] = []
        self.desc: dict[str, tuple[int, int]] = {}
        self.preferences: dict[str, tuple[int, int]] = {}
        self.layouts: list[tuple[int, ...]] = []
        self.created = self.destroyed = self.asked = 0

    def get_version(self) -> int:
        return 131002

    def create(self) -> int:
        self.created += 1
        return HANDLE

    def matmul_desc_create(self, compute: int, scale: int) -> int:
        assert (compute, scale) == (ComputeType.COMPUTE_32F, DataType.CUDA_R_32F)
        return PRODUCT

    def matmul_desc_set_attribute(self, desc: int, attribute: int, at: int, size: int) -> None:
        assert desc == PRODUCT
        self.desc[self.MatmulDescAttribute(attribute).name] = (read(at, size), size)

    def matrix_layout_create(self, *extents: int) -> int:
        self.layouts.append(extents)
        return 300 + len(self.layouts)

    def matmul_preference_create(self) -> int:
        return PREFERENCE

    def matmul_preference_set_attribute(self, preference: int, attribute: int, at: int, size: int) -> None:
        assert preference == PREFERENCE
        self.preferences[self.MatmulPreferenceAttribute(attribute).name] = (read(at, size), size)

    def matmul_preference_destroy(self, preference: int) -> None:
        assert preference == PREFERENCE
        self.destroyed += 1

    def MatmulHeuristicResult(self, size: int) -> Any:  # noqa: N802
        assert size == 1
        return SimpleNamespace(ptr=4000 + self.asked, state=self.state)

    def matmul_algo_get_heuristic(self, *args: int) -> None:
        *head, result, count = args
        assert head == [HANDLE, PRODUCT, 301, 302, 303, 303, PREFERENCE, 1]
        assert result == 4000 + self.asked
        self.asked += 1
        ctypes.c_int32.from_address(count).value = self.found

    def get_matmul_algo_config_attribute_dtype(self, attribute: int) -> type[np.generic]:
        return np.uint32

    def matmul_algo_config_get_attribute(
        self, algorithm: int, attribute: int, at: int, size: int, written: int
    ) -> None:
        assert (algorithm, size) == (4000, 4)
        ctypes.c_uint32.from_address(at).value = 60 + attribute

    def matmul(self, *args: int) -> None:
        self.calls.append(args)


def read(at: int, size: int) -> int:
    """The integer of `size` bytes at an address."""
    return int.from_bytes(ctypes.string_at(at, size), "little")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLt]:
    yield from installed(FakeLt(), monkeypatch)


def installed(lt: FakeLt, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLt]:
    modules = cublaslt.Bindings(lt, SimpleNamespace(ComputeType=ComputeType, Operation=Operation), DataType)
    monkeypatch.setattr(cublaslt, "bindings", lambda: modules)
    cublaslt._plan.cache_clear()
    cublaslt._handle.cache_clear()
    yield lt
    cublaslt._plan.cache_clear()
    cublaslt._handle.cache_clear()


def matmul(**changed: Any) -> cublaslt.Matmul:
    given = {"tensors": (W, X, Y, SPACE), "addresses": ADDRESSES, "stream": STREAM, "context": CONTEXT}
    return cublaslt.Matmul(**(given | changed))


def test_the_descriptors_are_columns_first_with_w_transposed(fake: FakeLt) -> None:
    matmul()
    assert fake.desc == {"TRANSA": (Operation.T, 4), "TRANSB": (Operation.N, 4)}
    bf16 = DataType.CUDA_R_16BF
    assert fake.layouts == [(bf16, K, N, K), (bf16, K, M, K), (bf16, N, M, N)]


def test_the_descriptors_mean_the_product(fake: FakeLt) -> None:
    """What they say, done by NumPy on flat memory, columns first."""
    matmul()
    rng = np.random.default_rng(0)
    flat = [rng.integers(-4, 5, e).astype(np.float64) for e in (W.elements, X.elements)]
    a, b = (f.reshape(cols, ld)[:, :rows].T for f, (_, rows, cols, ld) in zip(flat, fake.layouts, strict=False))
    d = (a.T if fake.desc["TRANSA"][0] else a) @ (b.T if fake.desc["TRANSB"][0] else b)
    _, rows, cols, ld = fake.layouts[2]
    assert (d.shape, ld) == ((rows, cols), rows)
    y = d.T.reshape(-1).reshape(M, N)
    assert (y == flat[1].reshape(M, K) @ flat[0].reshape(N, K).T).all()


def test_what_the_heuristic_is_asked_for(fake: FakeLt) -> None:
    matmul()
    assert fake.preferences == {
        "MAX_WORKSPACE_BYTES": (32 << 20, 8),
        "REDUCTION_SCHEME_MASK": (2, 4),  # partial sums in FP32, out of place, or none
        "MIN_ALIGNMENT_A_BYTES": (256, 4),
        "MIN_ALIGNMENT_B_BYTES": (16, 4),
        "MIN_ALIGNMENT_C_BYTES": (64, 4),
        "MIN_ALIGNMENT_D_BYTES": (64, 4),
    }
    assert fake.destroyed == 1


def test_the_call(fake: FakeLt) -> None:
    made = matmul()
    assert fake.calls == []
    made()
    (args,) = fake.calls
    handle, desc, alpha, *rest = args
    a, adesc, b, bdesc, beta, c, cdesc, d, ddesc, algorithm, workspace, size, stream = rest
    assert (handle, desc, stream) == (HANDLE, PRODUCT, STREAM)
    assert (ctypes.c_float.from_address(alpha).value, ctypes.c_float.from_address(beta).value) == (1.0, 0.0)
    w, x, y, space = ADDRESSES
    assert ((a, adesc), (b, bdesc)) == ((w, 301), (x, 302))
    assert ((c, cdesc), (d, ddesc)) == ((y, 303), (y, 303))
    assert (algorithm, workspace, size) == (4000, space, SPACE.bytes)


def test_a_shape_is_asked_about_once(fake: FakeLt) -> None:
    first = matmul()
    again = matmul(addresses=tuple(a + 4096 for a in ADDRESSES))
    assert (fake.asked, fake.created, first.description) == (1, 1, again.description)
    assert first.description == "cuBLASLt 13.10.2, algorithm 60, tile 61, stages 66, parts of K 62"


def test_another_context_has_another_handle(fake: FakeLt, monkeypatch: pytest.MonkeyPatch) -> None:
    cublaslt._handle(1)
    cublaslt._handle(1)
    cublaslt._handle(2)
    assert fake.created == 2


@pytest.mark.parametrize("lt", [FakeLt(found=0), FakeLt(state=15)], ids=["none", "not supported"])
def test_a_shape_without_an_algorithm(lt: FakeLt, monkeypatch: pytest.MonkeyPatch) -> None:
    for fake in installed(lt, monkeypatch):
        with pytest.raises(RuntimeError, match=r"^no algorithm for M=17, N=96, K=520$"):
            matmul()
        assert fake.destroyed == 1


def test_what_is_missing_is_said_in_a_sentence(fake: FakeLt, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cublaslt.missing() == ""

    def absent() -> Any:
        raise ModuleNotFoundError("No module named 'nvmath'", name="nvmath")

    monkeypatch.setattr(cublaslt, "bindings", absent)
    assert cublaslt.missing() == "cuBLASLt: nvmath is not installed; pip install 'atlas-lab[library]'"

    def unfound() -> Any:
        raise RuntimeError('Failure finding "libcublasLt.so.13"\nin many places')

    monkeypatch.setattr(cublaslt, "bindings", unfound)
    assert cublaslt.missing() == (
        'cuBLASLt cannot be loaded (RuntimeError: Failure finding "libcublasLt.so.13"); '
        "pip install 'atlas-lab[library]'"
    )

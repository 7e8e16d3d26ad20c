"""Compiling: reports, refusals in one sentence, the same bytes in every process, the disk cache, nothing imported."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import compile as compiling
from atlas_lab.kernels.lang import cuda
from atlas_lab.kernels.lang.fingerprint import fingerprint

pytestmark = pytest.mark.usefixtures("compiler")
FACTOR = 3


@L.device
def times(v, by):
    return L.mul_rn(v, by)


@L.family
def example(width: int):
    bounds = 32 * width

    @L.kernel(launch_bounds=(bounds, 1))
    def kernel(x: L.In[L.f32], y: L.Out[L.bf16], n: L.i32):
        s = L.shared(L.f32, bounds * 2)
        for i in range(cuda.threadIdx.x, n, bounds):
            L.sts_f32(s, cuda.threadIdx.x, L.ldg_f32(x, i))
            cuda.syncthreads()
            L.stg_bf16(y, i, times(L.lds_f32(s, bounds - 1 - cuda.threadIdx.x), L.f32(FACTOR)))
            cuda.syncthreads()

    return kernel


@pytest.mark.parametrize("arch", L.ARCHITECTURES)
def test_a_report_needs_no_gpu(arch):
    compiled = L.compile_kernel(example(2), arch)
    assert compiled.entry == example(2).entry
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.entry.encode() in compiled.cubin
    assert 8 <= compiled.registers <= 64
    assert (compiled.spill_stores, compiled.spill_loads, compiled.stack) == (0, 0, 0)
    assert compiled.shared >= 512
    assert compiled.barriers == 1
    assert compiled.warnings == ()
    assert "ptxas info" in compiled.log
    assert f".visible .entry {compiled.entry}(" in compiled.ptx
    assert ".maxntid 64" in compiled.ptx
    assert compiled is L.compile_kernel(example(2), arch)
    assert L.check_kernel(example(2), arch) == ()
    assert L.ptx(example(2), arch) == compiled.ptx


def test_machine_code_as_text():
    text = L.sass(example(2), "sm_90a")
    assert "STG" in text
    assert "FMUL" in text


def test_without_a_disassembler(monkeypatch):
    monkeypatch.setattr(compiling, "_nvdisasm", lambda: None)
    with pytest.raises(L.KernelError, match=r"nvdisasm is not installed; install it with: pip install nvidia-cuda"):
        L.sass(example(2), "sm_90a")


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr(compiling, "compiler_missing", lambda: "no compiler here; install it")

    @L.kernel
    def unseen(y: L.Out[L.u32]):
        L.stg_b32(y, 0, 12345)

    with pytest.raises(L.KernelError, match="for sm_80: no compiler here"):
        L.compile_kernel(unseen, "sm_80")


@L.kernel
def wrong_mode(x: L.In[L.u32], y: L.Out[L.u32]):
    L.stg_b32(x, 0, L.ldg_b32(x, 1))


@L.kernel
def wrong_space(y: L.Out[L.u32]):
    L.sts_b32(y, 0, 1)


@L.kernel
def map_as_pointer(m: L.InMap[L.u32], y: L.Out[L.u32]):
    L.stg_b32(y, 0, L.ldg_b32(m, 0))


@L.kernel
def store_to_what_is_read(m: L.InMap[L.bf16]):
    L.tma_store_2d(m, (0, 0), L.dynamic_shared(L.bf16, 0), 0)


@L.kernel
def coordinates_of_another_rank(m: L.InMap[L.bf16]):
    L.tma_load_2d(L.dynamic_shared(L.bf16, 0), 0, m, (0, 0, 0), L.shared(L.u64, 1), 0)


@L.kernel
def own_block_for_another(y: L.Out[L.u32]):
    L.mbarrier_arrive_remote(L.shared(L.u64, 1), 0)


@L.kernel
def not_constant(n: L.i32):
    L.cp_async_wait(n)


@L.kernel
def storage(y: L.Out[L.bf16]):
    L.stg_b32(y, 0, L.bf16(3))


@L.kernel
def few(y: L.Out[L.u32]):
    L.stg_b32(y, 0)


@L.kernel
def named_argument(y: L.Out[L.u32]):
    L.stg_b32(y, 0, v=3)


@L.kernel
def float_for_integer(y: L.Out[L.u32], f: L.f32):
    L.stg_b32(y, 0, f)


@L.kernel
def wrong_tuple(y: L.Out[L.u32]):
    L.stg_v2_b32(y, 0, (1, 2, 3))


@L.kernel
def no_dtype(n: L.i32):
    L.shared(n, 4)


@L.kernel
def element(y: L.Out[L.f32]):
    y[0] = 1.0


@L.kernel
def unknown(y: L.Out[L.f32]):
    missing_name(y)  # noqa: F821


@L.kernel
def dynamic_unroll(n: L.i32):
    for _ in L.unroll(n):
        cuda.syncthreads()


@L.device
def bad_helper(y):
    return L.ldg_b32(y, 0)


@L.kernel
def through_a_helper(y: L.Out[L.u32]):
    L.stg_b32(y, 0, bad_helper(y))


@pytest.mark.parametrize(
    ("kernel", "sentence"),
    [
        (wrong_mode, r"`L\.stg_b32\(x, 0.*`: stg_b32: found global in pointer to u32 as argument 1, expected a "),
        (wrong_space, r"sts_b32: found global out pointer to u32 as argument 1, expected a shared pointer"),
        (map_as_pointer, r"ldg_b32: found map in pointer to u32 as argument 1, expected a global pointer declared in"),
        (store_to_what_is_read, r"tma_store_2d: found map in pointer to bf16 as argument 1, expected a map pointer "),
        (coordinates_of_another_rank, r"tma_load_2d: found .* as argument 4, expected a tuple of 2 i32"),
        (own_block_for_another, r"mbarrier_arrive_remote: found shared inout pointer to u64 .*, expected a cluster "),
        (not_constant, r"`L\.cp_async_wait\(n\)`: cp_async_wait: argument 'n' must be known at compile time"),
        (storage, r"`.*L\.bf16\(3\).*`: bf16 is a storage type: convert with an intrinsic"),
        (few, r"stg_b32: found 2 arguments, expected 3"),
        (named_argument, r"stg_b32: arguments are positional, found v"),
        (float_for_integer, r"stg_b32: found float32 as argument 3, expected u32"),
        (wrong_tuple, r"stg_v2_b32: found UniTuple\(int64 x 3\) as argument 3, expected a tuple of 2 u32"),
        (no_dtype, r"shared: argument 'dtype' must be an element type, found int32"),
        (element, r"`y\[0\] = 1\.0`: No implementation of function .*setitem"),
        (unknown, r"NameError: name 'missing_name' is not defined"),
        (dynamic_unroll, r"unroll: its arguments must be known at compile time"),
        (through_a_helper, r"`return L\.ldg_b32\(y, 0\)`: ldg_b32: found global out pointer to u32"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_a_sentence_with_the_line(kernel, sentence):
    with pytest.raises(L.KernelError, match=sentence) as caught:
        L.compile_kernel(kernel, "sm_90a")
    message = str(caught.value)
    assert message.startswith(f"kernel {kernel.entry} for sm_90a: test_lang_compile.py:")
    assert "\n" not in message


def test_what_hardware_lacks_is_refused_before_compiling():
    @L.kernel
    def fp8(y: L.Out[L.u32], v: L.u32):
        L.stg_b32(y, 0, L.e4m3x2_f16x2(v))

    with pytest.raises(L.KernelError, match="for sm_80: its intrinsics need sm_89 or later"):
        L.compile_kernel(fp8, "sm_80")
    with pytest.raises(L.KernelError, match="found architecture 'hopper'"):
        L.compile_kernel(fp8, "hopper")


def test_invalid_ptx_is_an_error_with_the_linkers_words():
    nonsense = L.intrinsic("nonsense", (L.u32,), L.u32, ptx="frobnicate.b32 $0, $1;")

    @L.kernel
    def bad(y: L.Out[L.u32]):
        L.stg_b32(y, 0, nonsense(3))

    with pytest.raises(L.KernelError, match=r"linking failed: .*frobnicate"):
        L.compile_kernel(bad, "sm_90a")


@L.kernel
def with_float64(y: L.Out[L.f32], n: L.i32):
    L.stg_f32(y, 0, n * 0.1)


@L.kernel
def with_comparison(y: L.Out[L.u32], a: L.u64, b: L.i64):
    if a < b:
        L.stg_b32(y, 0, 1)


TILE = L.mma_tile(L.bf16, 4, 8)
FRAGMENTS = L.ldmatrix_tile(4, 16)


@L.kernel(launch_bounds=(1024, 1))
def with_spills(y: L.Out[L.f32], n: L.i32):  # 128 accumulators where a thread may have 64 registers
    s = L.shared(L.bf16, 4096)
    acc = L.zeros(128)
    for k in range(n):
        a = FRAGMENTS(s, k)
        acc = TILE(acc, a, a)
    for i in L.unroll(128):
        L.stg_f32(y, i, acc[i])


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        (with_float64, "uses 64-bit floating point"),
        (with_comparison, "uses 64-bit floating point"),
        (with_spills, "spills "),
        (with_spills, "has a stack frame of "),
    ],
)
def test_problems_are_found(kernel, problem):
    found = L.check_kernel(kernel, "sm_90a")
    assert any(problem in p for p in found), found
    assert all(p.startswith(f"kernel {kernel.entry} for sm_90a ") and "\n" not in p for p in found)


def test_ptxas_warnings_are_kept():
    log = textwrap.dedent("""
        ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
        ptxas warning : Value of threads per SM is out of range
        ptxas info    : Function properties for k
        ptxas         .     16 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads
        ptxas info    : Used 168 registers, used 3 barriers, 16 bytes smem
    """)
    report = compiling._report(example(2), "sm_90a", log)
    assert [w.split(":")[0].strip() for w in report["warnings"]] == ["ptxas info", "ptxas warning"]
    assert [report[k] for k in ("registers", "spill_stores", "spill_loads", "stack", "shared", "barriers")] == [
        168, 24, 32, 16, 16, 3,
    ]  # fmt: skip
    with pytest.raises(L.KernelError, match="ptxas reported no registers"):
        compiling._report(example(2), "sm_90a", "")


def test_a_wrapped_dispatcher_compiles_without_a_driver():
    from numba import cuda as numba_cuda
    from numba import float32

    @numba_cuda.jit(device=True)
    def helper(v):
        return v * float32(2)

    @numba_cuda.jit(launch_bounds=(128, 2))
    def theirs(x, y, n):
        i = numba_cuda.grid(1)
        if i < n:
            y[i] = helper(x[i])

    kernel = L.wrap(theirs, (L.In[L.f32], L.Out[L.f32], L.i32))
    assert not kernel.interpretable
    assert kernel.launch_bounds == (128, 2)
    assert [p.abi for p in kernel.params] == ["array", "array", "scalar"]
    assert (kernel.reads, kernel.writes) == ((0,), (1,))
    assert L.check_kernel(kernel, "sm_90a") == ()
    assert kernel.entry in L.ptx(kernel, "sm_90a")
    assert fingerprint(kernel, "sm_90a") is None
    with pytest.raises(L.KernelError, match="wrapped kernel theirs: found 1 annotations, expected 3"):
        L.wrap(theirs, (L.i32,))

    fast = numba_cuda.jit(theirs.py_func, fastmath=True)
    with pytest.raises(L.KernelError, match="fastmath is not allowed"):
        L.compile_kernel(L.wrap(fast, (L.In[L.f32], L.Out[L.f32], L.i32), name="fast"), "sm_90a")


SCRIPT = """
import hashlib, sys
sys.path.insert(0, {tests!r})
from test_lang_compile import example
from atlas_lab.kernels.lang import build
from atlas_lab.kernels.lang.fingerprint import fingerprint
if {first}:
    build.llvm_modules(example(7), (9, 0, "a"))
modules = build.llvm_modules(example(2), (9, 0, "a"))
print(hashlib.sha256("".join(modules).encode()).hexdigest(), end=" ")
print(hashlib.sha256(build.ltoir(modules, "sm_90a")).hexdigest(), end=" ")
print(fingerprint(example(2), "sm_90a"), "_Z" in "".join(modules))
"""


def python(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_same_source_gives_the_same_bytes_in_every_process():
    tests = str(Path(__file__).parent)
    a = python(SCRIPT.format(tests=tests, first=False), PYTHONHASHSEED="1")
    b = python(SCRIPT.format(tests=tests, first=True), PYTHONHASHSEED="2")
    assert a == b
    assert a.strip().endswith("False")


def test_importing_the_language_imports_no_compiler():
    loaded = python(
        "import sys, atlas_lab.kernels.lang\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('numba', 'numba_cuda', 'llvmlite', 'cuda')])"
    )
    assert loaded.strip() == "[]"

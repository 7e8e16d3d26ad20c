"""Dependent launches: what the compiler leaves above and below the wait, in PTX and in the assembler's output."""

from __future__ import annotations

import re

import pytest
from lang_threads import run_thread

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda


@L.kernel(launch_bounds=(128, 1))
def ahead(w: L.In[L.bf16], x: L.In[L.bf16], y: L.Out[L.f32], k: L.i32):
    """Two 16-byte loads of weights before the wait, two kinds of x after it, the signal before the store."""
    row = cuda.blockIdx.x * 4 + L.warp_id()
    c = L.lane_id() * 8
    q = L.ld_in_v4_b32_stream(w, row * k + c)
    r = L.ld_in_v4_b32(w, row * k + c + 256)
    L.grid_wait()
    v = L.ld_in_v4_b32(x, c)
    s = L.ld_in_bf16(x, k)
    acc = L.f32(0)
    for i in L.unroll(4):
        acc = L.fma_rn(L.bf16_lo(q[i]), L.bf16_lo(v[i]), acc)
        acc = L.fma_rn(L.bf16_hi(r[i]), s, acc)
    L.grid_launch_dependents()
    L.stg_f32(y, row * 32 + L.lane_id(), acc)


@L.kernel(launch_bounds=(128, 1))
def looped(w: L.In[L.bf16], x: L.In[L.bf16], y: L.Out[L.f32], k: L.i32):
    """The first step's weights before the wait; in the loop the next step's by `ldg_*`, and x."""
    row = cuda.blockIdx.x * 4 + L.warp_id()
    q = L.ld_in_v4_b32_stream(w, row * k + L.lane_id() * 8)
    acc = L.f32(0)
    L.grid_wait()
    for c in range(L.lane_id() * 8, k, 256):
        following = L.ldg_v4_b32_stream(w, row * k + c + 256)
        v = L.ld_in_v4_b32(x, c)
        for i in L.unroll(4):
            acc = L.fma_rn(L.bf16_lo(q[i]), L.bf16_lo(v[i]), acc)
        q = following
    L.stg_f32(y, row * 32 + L.lane_id(), acc)


@L.kernel(launch_bounds=(128, 1))
def through(w: L.In[L.bf16], x: L.In[L.bf16], y: L.Out[L.f32], k: L.i32):
    """The first step's weights before the wait; x through the pointer that the wait returns, in each step."""
    row = cuda.blockIdx.x * 4 + L.warp_id()
    q = L.ld_in_v4_b32_line(w, row * k + L.lane_id() * 8)
    acc = L.f32(0)
    L.grid_launch_dependents()
    x = L.grid_wait_for(x)
    for c in range(L.lane_id() * 8, k, 256):
        v, u = L.ld_waited_v4_b32(x, c), L.ld_waited_v2_b32(x, c)
        for i in L.unroll(4):
            acc = L.fma_rn(L.bf16_lo(q[i]), L.bf16_lo(v[i]), acc)
        acc = L.fma_rn(L.bits_f32(u[0]), L.ld_waited_bf16(x, c + 1), acc)
        acc = L.fma_rn(L.bits_f32(L.ld_waited_b32(x, c)), L.ld_waited_bf16(x, c + 3), acc)
        q = L.ldg_v4_b32_stream(w, row * k + c + 256)
    L.stg_f32(y, row * 32 + L.lane_id(), acc)


@L.kernel(launch_bounds=(128, 1))
def copied(w: L.In[L.bf16], x: L.In[L.bf16], y: L.Out[L.f32]):
    """Weights by cp.async before the wait, x by cp.async after it."""
    s = L.shared(L.bf16, 2048)
    t = cuda.threadIdx.x * 8
    L.cp_async_16(s, t, w, t, 16)
    L.cp_async_commit()
    L.grid_wait()
    L.cp_async_16(s, t + 1024, x, t, 16)
    L.cp_async_commit()
    L.cp_async_wait(0)
    L.stg_f32(y, cuda.threadIdx.x, L.lds_f32(s, t) + L.lds_f32(s, t + 1024))


# Kernel, accesses of global memory before the wait, and at least how many after it.
ORDER = [(ahead, 2, 2), (looped, 1, 2), (through, 1, 5), (copied, 1, 1)]
ARCHITECTURES = L.architectures(L.DEPENDENT)
BEFORE = [a for a in L.architectures(ahead.needs) if a not in ARCHITECTURES]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("kernel", "before", "after"), ORDER)
def test_loads_stay_on_their_side_of_the_wait(kernel, before, after, arch, compiler):
    assert L.check_kernel(kernel, arch) == ()
    for text, wait, access in (
        (L.ptx(kernel, arch), r"griddepcontrol\.wait;", r"\b(ld\.global|cp\.async\.c[ag])\S* "),
        (L.sass(kernel, arch), r"\bACQBULK\b", r"\b(LDG|LDGSTS)\."),
    ):
        above, below = re.split(wait, text)
        assert len(re.findall(access, above)) == before, text
        assert len(re.findall(access, below)) >= after, text


@pytest.mark.parametrize("arch", BEFORE)
@pytest.mark.parametrize("kernel", [k for k, _, _ in ORDER])
def test_before_sm_90_a_wait_and_a_signal_are_nothing(kernel, arch, compiler):
    assert L.check_kernel(kernel, arch) == ()
    assert not re.search("griddepcontrol|reflect", L.ptx(kernel, arch))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_signal_stays_above_the_store(arch, compiler):
    text = L.sass(ahead, arch)
    assert text.index("ACQBULK") < text.index("PREEXIT") < text.index("STG.")


def test_they_ask_the_thread():
    log = []
    x = L.Pointer(None, 4, L.u32, "global", "in")
    after = run_thread(lambda: (L.grid_wait(), L.grid_launch_dependents(), L.grid_wait_for(x)), log)[2]
    assert log == [("grid_wait",), ("launch_dependents",), ("grid_wait",)]
    assert (after.offset, after.dtype, after.space, after.mode) == (4, L.u32, "global", "waited")
    assert L.ld_in_v4_b32.effect is L.Effect.READ
    assert L.ld_waited_v4_b32.effect is L.Effect.PURE
    assert {op.effect for op in (L.grid_wait, L.grid_wait_for, L.grid_launch_dependents)} == {L.Effect.SYNC}


def refused(name: str):
    @L.kernel(launch_bounds=(32, 1))
    def kernel(x: L.In[L.u32], y: L.Out[L.u32]):
        if name == "waited, before":
            L.stg_b32(y, 0, L.ld_waited_b32(x, 0))
        else:
            L.stg_b32(y, 0, L.ldg_b32(L.grid_wait_for(x), 0))

    return kernel


@pytest.mark.parametrize(
    ("name", "says"),
    [("waited, before", "declared waited"), ("ldg, after", "declared in")],
)
def test_a_load_is_refused_a_pointer_of_the_other_side(name, says, compiler):
    with pytest.raises(L.KernelError, match=says):
        L.check_kernel(refused(name), "sm_90a")

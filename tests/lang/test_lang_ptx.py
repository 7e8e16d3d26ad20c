"""Every intrinsic compiles, for every architecture that has it, to the instructions that its entry promises.

Rows are grouped into kernels, so that a row's pattern occurs in its kernel exactly as often as the row says.
"""

from __future__ import annotations

import functools
import linecache
import re
from typing import Any

import ptx_async
import ptx_matrix
import pytest

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang.op import Op

# Row: the op, an expression (or a statement: it has no result), and how often each pattern occurs. A plain string
# stands for {pattern: 1}. Expressions may use x (In[u8]), y (InOut[u32]), s (shared u32), u v w (u32), f g h (f32),
# n (i32) and lane.
Row = tuple[str, str, Any]


def loads(prefix: str, pointer: str, instruction: str, forms: str, suffix: str = "") -> list[Row]:
    types = {"b8": "u8", "b16": "u16", "b32": "b32", "v2_b32": "v2.b32", "v4_b32": "v4.b32", "f32": "f32"}
    types["v4_f32"] = "v4.f32"
    rows = []
    for at, form in enumerate(forms.split()):
        name = f"{prefix}_{form}{suffix}"
        call = f"L.{name}({pointer}, n + {at * 16})"
        sum_of = f"t{form[1]}({call})" if form.startswith("v") else call
        width = ".L2::256B" if suffix and form == "v4_b32" else ""
        rows.append((name, sum_of, re.escape(f"{instruction}{width}.{types[form]} ")))
    return rows


def stores(prefix: str, pointer: str, instruction: str, forms: str) -> list[Row]:
    values = {"b8": "u", "b16": "u", "b32": "u", "v2_b32": "(u, v)", "v4_b32": "(u, v, w, u)", "f32": "f"}
    values["v4_f32"] = "(f, g, h, f)"
    types = {"b8": "u8", "b16": "u16", "v2_b32": "v2.b32", "v4_b32": "v4.b32", "v4_f32": "v4.f32"}
    return [
        (f"{prefix}_{form}", f"L.{prefix}_{form}({pointer}, n + {at * 16}, {values[form]})",
         re.escape(f"{instruction}.{types.get(form, form)} ["))
        for at, form in enumerate(forms.split())
    ]  # fmt: skip


def atomics(pointer: str, space: str) -> list[Row]:
    rows: list[Row] = []
    for name, instruction, value in (
        ("add_u32", "add.u32", "u"), ("add_i32", "add.s32", "n"), ("add_f32", "add.f32", "f"),
        ("max_u32", "max.u32", "u"), ("max_i32", "max.s32", "n"), ("cas_u32", "cas.b32", "u, v"),
        ("exch_u32", "exch.b32", "u"),
    ):  # fmt: skip
        rows.append((f"atomic_{name}", f"L.atomic_{name}({pointer}, n, {value})", rf"atom\.{space}\.{instruction} "))
    return rows


MMA = r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.{0}\.{0}\.f32 "
TILE_A, TILE_B = L.ldmatrix_tile(2, 2048), L.ldmatrix_tile(1, 2048, trans=True)
TILE = L.mma_tile(L.bf16, 2, 2)
FACTORIES = {"ldmatrix_tile": TILE_A, "mma_tile": TILE, **ptx_matrix.FACTORIES, **ptx_async.FACTORIES}

GROUPS: dict[str, list[Row]] = {
    "ldg": loads("ldg", "x", "ld.global.nc", "b8 b16 b32 v2_b32 v4_b32 f32"),
    "ldg_bf16": [("ldg_bf16", "L.ldg_bf16(x, n)", {r"ld\.global\.nc\.u16 ": 1, r"shl\.b32 ": 1})],
    "ldg_stream": loads("ldg", "x", "ld.global.nc.L1::no_allocate", "b8 b16 b32 v2_b32 v4_b32", "_stream"),
    "ldg_line": [
        ("ldg_v4_b32_line", "t4(L.ldg_v4_b32_line(x, n))", {r"ld\.global\.nc\.L1::no_allocate\.L2::128B\.v4\.b32 ": 1})
    ],
    "prefetch": [("prefetch_l2", "L.prefetch_l2(x, n)", r"prefetch\.global\.L2 ")],
    "ld": loads("ld", "y", "ld.global", "b32 f32 v4_b32")
    + [("ld_bf16", "L.ld_bf16(y, n)", r"ld\.global\.u16 ")],
    "ld_in": loads("ld_in", "x", "ld.global", "b8 b16 b32 v2_b32 v4_b32 f32"),
    "ld_in_bf16": [("ld_in_bf16", "L.ld_in_bf16(x, n)", {r"ld\.global\.u16 ": 1, r"shl\.b32 ": 1})],
    "ld_in_line": [
        ("ld_in_v4_b32_line", "t4(L.ld_in_v4_b32_line(x, n))", {r"ld\.global\.L1::no_allocate\.L2::128B\.v4\.b32 ": 1})
    ],
    "ld_waited": loads("ld_waited", "L.grid_wait_for(x)", "ld.global", "b32 v2_b32 v4_b32 f32"),
    "ld_waited_bf16": [
        ("ld_waited_bf16", "L.ld_waited_bf16(L.grid_wait_for(x), n)", {r"ld\.global\.u16 ": 1, r"shl\.b32 ": 1})
    ],
    "ld_in_stream": loads("ld_in", "x", "ld.global.L1::no_allocate", "b32 v2_b32 v4_b32", "_stream"),
    "stg": stores("stg", "y", "st.global", "b8 b16 b32 v2_b32 v4_b32 f32"),
    "stg_bf16": [
        ("stg_bf16", "L.stg_bf16(y, n, f)", {r"cvt\.rn\.bf16\.f32 ": 1, r"st\.global\.b16 ": 1}),
        ("stg_bf16x2", "L.stg_bf16x2(y, n, f, g)", {r"cvt\.rn\.bf16x2\.f32 ": 1, r"st\.global\.b32 ": 1}),
    ],
    "order": [
        ("ld_acquire_b32", "L.ld_acquire_b32(y, n)", r"ld\.acquire\.gpu\.global\.b32 "),
        ("st_release_b32", "L.st_release_b32(y, n, u)", r"st\.release\.gpu\.global\.b32 "),
    ],
    "lds": loads("lds", "s", "ld.shared", "b8 b16 b32 v2_b32 v4_b32 f32 v4_f32"),
    "sts": stores("sts", "s", "st.shared", "b8 b16 b32 v2_b32 v4_b32 f32 v4_f32"),
    "pointers": [
        ("shared", "L.sts_b8(s, n, u)", r"\.shared \.align 16 \.b8 \S+\[256\]"),
        ("dynamic_shared", "L.sts_b16(L.dynamic_shared(L.u16, 64), n, u)", r"\.extern \.shared \.align 1024 \.b8 "),
        ("offset", "L.stg_b8(L.offset(y, n), 0, u)", r"st\.global\.u8 "),
        ("cast", "L.stg_b16(L.cast(y, L.bf16), n, u)", {r"st\.global\.u16 ": 1, r"mul\.wide\.s32 .* 2;": 1}),
    ],
    "bits": [
        ("bits_f32", "L.bits_f32(u)", {r"cvt|shl|and\.b32": 0}),  # another name for the register, at most a move
        ("f32_bits", "L.f32_bits(f)", {r"st\.volatile": 2}),
    ],
    "bf16": [
        ("bf16_lo", "L.bf16_lo(u)", r"shl\.b32 .*16;"),
        ("bf16_hi", "L.bf16_hi(u ^ v)", r"and\.b32 .*-65536;"),
        ("bf16x2", "L.bf16x2(f, g)", r"cvt\.rn\.bf16x2\.f32 "),
    ],
    "f16": [
        ("f16_lo", "L.f16_lo(u)", r"cvt\.f32\.f16 \S+, l;"),
        ("f16_hi", "L.f16_hi(u)", r"cvt\.f32\.f16 \S+, h;"),
        ("f16x2", "L.f16x2(f, g)", r"cvt\.rn\.f16x2\.f32 "),
    ],
    "fp8": [
        ("e4m3x2_f16x2", "L.e4m3x2_f16x2(u)", r"cvt\.rn\.f16x2\.e4m3x2 "),
        ("e5m2x2_f16x2", "L.e5m2x2_f16x2(u)", r"cvt\.rn\.f16x2\.e5m2x2 "),
        ("e4m3x2", "L.e4m3x2(f, g)", r"cvt\.rn\.satfinite\.e4m3x2\.f32 "),
    ],
    "e4m3x4_f16x2_cvt": [
        ("e4m3x4_f16x2_cvt", "t2(L.e4m3x4_f16x2_cvt(u))", {r"cvt\.rn\.f16x2\.e4m3x2 ": 2, r"shr|prmt": 0})
    ],
    "e4m3x4_bf16x2": [
        ("e4m3x4_bf16x2", "L.e4m3x4_bf16x2(u)[0] + L.e4m3x4_bf16x2(u)[1]", {r"prmt\.b32 ": 2, r"fma\.rn\.bf16x2 ": 2})
    ],
    "e4m3x4_f16x2": [
        ("e4m3x4_f16x2", "L.e4m3x4_f16x2(u)[0] + L.e4m3x4_f16x2(u)[1]", {r"prmt\.b32 ": 2, r"fma\.rn\.f16x2 ": 2})
    ],
    "bf16x4_e4m3_small": [
        ("bf16x4_e4m3_small", "L.bf16x4_e4m3_small(u, v)",
         {r"abs\.f16x2 ": 2, r"add\.rn\.f16x2 ": 2, r"prmt\.b32 ": 2, r"cvt": 0}),
    ],
    "e4m3_f32": [("e4m3_f32", "L.e4m3_f32(u)", r"mul\.rn\.f32 ")],
    "e2m1x8_bf16x2": [("e2m1x8_bf16x2", "t4(L.e2m1x8_bf16x2(u))", {r"prmt\.b32 ": 10, r"mul|fma": 0})],
    "e2m1x16_small": [
        ("e2m1x16_small", "t8(L.e2m1x16_small(u, v))",
         {r"lop3\.b32 .* 0xCA;": 2, r"shf\.l\.wrap\.b32 ": 4, r"shl\.b32 ": 3, r"mul|fma|prmt": 0}),
    ],
    "e2m1x16_pack": [
        ("e2m1x16_pack", "t2(L.e2m1x16_pack(u, v))", {r"shf\.l\.wrap\.b32 ": 21, r"mul|fma|prmt": 0}),
    ],
    "e2m1x8_f16x2": [("e2m1x8_f16x2", "t4(L.e2m1x8_f16x2(u))", {r"prmt\.b32 ": 8, r"mul|fma": 0})],
    "round": [
        ("f32_i32", "L.f32_i32(f)", r"cvt\.rni\.s32\.f32 "),
        ("i32_f32", "L.i32_f32(n)", r"cvt\.rn\.f32\.s32 "),
        ("rint", "L.rint(f)", r"cvt\.rni\.f32\.f32 "),
    ],
    "half": [
        ("hadd2", "L.hadd2(u, v)", r"add\.rn\.f16x2 "),
        ("hmul2", "L.hmul2(u, v)", r"mul\.rn\.f16x2 "),
        ("hfma2", "L.hfma2(u, v, w)", r"fma\.rn\.f16x2 "),
    ],
    "badd2": [("badd2", "L.badd2(u, v)", r"fma\.rn\.bf16x2 ")],
    "bmul2": [("bmul2", "L.bmul2(u, v)", r"fma\.rn\.bf16x2 ")],
    "bfma2": [("bfma2", "L.bfma2(u, v, w)", r"fma\.rn\.bf16x2 ")],
    "integer": [
        ("lop3", "L.lop3(u, v, w, 0xEA)", r"lop3\.b32 \S+, \S+, \S+, \S+, 234;"),
        ("prmt", "L.prmt(u, v, w)", r"prmt\.b32 "),
        ("dp4a", "L.dp4a(u, v, n)", r"dp4a\.s32\.s32 "),
        ("dp4a_u32", "L.dp4a_u32(u, v, w)", r"dp4a\.u32\.u32 "),
        ("shf_l", "L.shf_l(u, v, w)", r"shf\.l\.wrap\.b32 "),
        ("shf_r", "L.shf_r(u, v, w)", r"shf\.r\.wrap\.b32 "),
        ("popc", "L.popc(u)", r"popc\.b32 "),
        ("s8", "L.s8(u, 1)", {r"shl\.b32 .*16;": 1, r"shr\.s32 .*24;": 1}),
        ("byte", "L.byte(v, 3)", r"shr\.u32 .*24;"),
    ],
    "arithmetic": [
        ("add_rn", "L.add_rn(f, g)", r"add\.rn\.f32 "),
        ("mul_rn", "L.mul_rn(f, g)", r"mul\.rn\.f32 "),
        ("fma_rn", "L.fma_rn(f, g, h)", r"fma\.rn\.f32 "),
        ("sqrt_rn", "L.sqrt_rn(f)", r"sqrt\.rn\.f32 "),
        ("div_rn", "L.div_rn(f, g)", r"div\.rn\.f32 "),
        ("min_f32", "L.min_f32(f, g)", r"min\.f32 "),
        ("max_f32", "L.max_f32(f, g)", r"max\.f32 "),
        ("min_nan_f32", "L.min_nan_f32(f, g)", r"min\.NaN\.f32 "),
        ("max_nan_f32", "L.max_nan_f32(f, g)", r"max\.NaN\.f32 "),
        ("abs_f32", "L.abs_f32(f)", r"abs\.f32 "),
        ("rcp_approx", "L.rcp_approx(f)", r"rcp\.approx\.f32 "),
        ("exp2_approx", "L.exp2_approx(f)", r"ex2\.approx\.f32 "),
        ("rsqrt_approx", "L.rsqrt_approx(f)", r"rsqrt\.approx\.f32 "),
        ("tanh_approx", "L.tanh_approx(f)", r"tanh\.approx\.f32 "),
    ],
    "warp": [
        ("lane_id", "L.lane_id()", r"mov\.u32 \s*\S+, %laneid;"),
        ("warp_id", "L.warp_id()", r"mov\.u32 \s*\S+, %tid\.x;"),
        ("shfl_xor", "L.shfl_xor(u, n)", {r"shfl\.sync\.bfly\.b32 ": 2}),
        ("shfl_down", "L.shfl_down(u, n)", {r"shfl\.sync\.down\.b32 ": 2}),
        ("shfl_idx", "L.shfl_idx(u, n)", {r"shfl\.sync\.idx\.b32 ": 2}),
        ("shfl_xor_f32", "L.shfl_xor_f32(f, n)", {r"shfl\.sync\.bfly\.b32 ": 2}),
        ("shfl_down_f32", "L.shfl_down_f32(f, n)", {r"shfl\.sync\.down\.b32 ": 2}),
        ("shfl_idx_f32", "L.shfl_idx_f32(f, n)", {r"shfl\.sync\.idx\.b32 ": 2}),
        ("ballot", "L.ballot(f < g)", r"vote\.sync\.ballot\.b32 "),
        ("any_sync", "L.any_sync(n)", r"vote\.sync\.any\.pred "),
        ("all_sync", "L.all_sync(u > v)", r"vote\.sync\.all\.pred "),
        ("warp_sum_i32", "L.warp_sum_i32(n)", r"redux\.sync\.add\.s32 "),
    ],
    "warp_sum": [("warp_sum", "L.warp_sum(f)", {r"shfl\.sync\.bfly": 5, r"add\.rn\.f32 ": 5})],
    "warp_max": [("warp_max", "L.warp_max(f)", {r"shfl\.sync\.bfly": 5, r"max\.f32 ": 5})],
    "ldmatrix": [
        ("ldmatrix_x1", "L.ldmatrix_x1(s, lane)", r"ldmatrix\.sync\.aligned\.m8n8\.x1\.shared\.b16 "),
        ("ldmatrix_x2", "t2(L.ldmatrix_x2(s, lane))", r"ldmatrix\.sync\.aligned\.m8n8\.x2\.shared\.b16 "),
        ("ldmatrix_x4", "t4(L.ldmatrix_x4(s, lane))", r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared\.b16 "),
        ("ldmatrix_x1_trans", "L.ldmatrix_x1_trans(s, lane)", r"m8n8\.x1\.trans\.shared\.b16 "),
        ("ldmatrix_x2_trans", "t2(L.ldmatrix_x2_trans(s, lane))", r"m8n8\.x2\.trans\.shared\.b16 "),
        ("ldmatrix_x4_trans", "t4(L.ldmatrix_x4_trans(s, lane))", r"m8n8\.x4\.trans\.shared\.b16 "),
    ],
    "ldmatrix_tile": [
        ("ldmatrix_tile", "t8(TILE_A(s, lane))", {r"m8n8\.x4\.shared\.b16 .*\+0\]": 1, r"x4\.shared.*\+2048\]": 1}),
        ("ldmatrix_tile", "t4(TILE_B(s, lane))", r"m8n8\.x4\.trans\.shared\.b16 "),
    ],
    "mma": [
        ("mma_m16n8k16_bf16", "t4(L.mma_m16n8k16_bf16((f, g, h, f), (u, v, w, u), (v, w)))", MMA.format("bf16")),
        ("mma_m16n8k16_f16", "t4(L.mma_m16n8k16_f16((f, g, h, f), (u, v, w, u), (v, w)))", MMA.format("f16")),
    ],
    "mma_first": [
        ("mma_m16n8k16_bf16_first", "t4(L.mma_m16n8k16_bf16_first((u, v, w, u), (v, w)))", MMA.format("bf16")),
    ],
    "mma_tile": [
        ("mma_tile", "t16(TILE(L.zeros(16), (u, v, w, u, v, u, w, v), (v, w, u, v)))", {MMA.format("bf16"): 4}),
        ("zeros", "t4(L.zeros(4))", {r"mov\.[fb]32\s+\S+, (0f0+|0);": 1}),
    ],
    "copy": [
        ("cp_async_16", "L.cp_async_16(s, n, x, n, n)", r"cp\.async\.cg\.shared\.global \[\S+\], \[\S+\], 16, %r\d+;"),
        ("cp_async_16_stream", "L.cp_async_16_stream(s, n, x, n, n)",
         r"cp\.async\.cg\.shared\.global\.L2::256B \[\S+\], \[\S+\], 16, %r\d+;"),
        ("cp_async_8", "L.cp_async_8(s, n, y, n, 5)", r"cp\.async\.ca\.shared\.global \[\S+\], \[\S+\], 8, "),
        ("cp_async_4", "L.cp_async_4(s, n, x, n, n)", r"cp\.async\.ca\.shared\.global \[\S+\], \[\S+\], 4, "),
        ("cp_async_commit", "L.cp_async_commit()", r"cp\.async\.commit_group;"),
        ("cp_async_wait", "L.cp_async_wait(2)", r"cp\.async\.wait_group 2;"),
    ],
    "barrier": [
        ("barrier_sync", "L.barrier_sync(1, 64)", r"bar\.sync %r\d+, %r\d+;"),
        ("barrier_arrive", "L.barrier_arrive(2, 64)", r"bar\.arrive %r\d+, %r\d+;"),
        ("fence_block", "L.fence_block()", r"membar\.cta;"),
        ("fence_gpu", "L.fence_gpu()", r"membar\.gl;"),
        ("nanosleep", "L.nanosleep(100)", r"nanosleep\.u32 "),
    ],
    "dependent": [
        ("cluster_arrive_relaxed", "L.cluster_arrive_relaxed()", r"barrier\.cluster\.arrive\.relaxed;"),
        ("grid_wait", "L.grid_wait()", {r"griddepcontrol\.wait;": 2, r"griddepcontrol\.wait; mov": 1}),
        ("grid_wait_for", "L.stg_b32(y, 0, L.ld_waited_b32(L.grid_wait_for(x), n))", r"ld\.global\.b32 "),
        ("grid_launch_dependents", "L.grid_launch_dependents()", r"griddepcontrol\.launch_dependents;"),
    ],
    "atomic_global": atomics("y", "global"),
    "atomic_shared": atomics("s", "shared"),
    **ptx_matrix.GROUPS,
    **ptx_async.GROUPS,
}  # fmt: skip


def summing(count: int) -> Any:
    @L.device
    def total(values):
        t = values[0]
        for i in L.unroll(1, count):
            t = t + values[i]
        return t

    return total


SUMS = {f"t{n}": summing(n) for n in (2, 4, 8, 16)}
# Stores that no pattern counts, so that results are used.
KEEP = {
    kind: L.intrinsic(
        f"keep_{kind}", (L.Ptr(modes=("inout",)), kind), ptx=f"st.volatile.global.b{kind.bits} [$0], $1;",
        effect="writes", numpy=lambda p, i, v: None,
    )
    for kind in (L.u32, L.i32, L.f32, L.u64)
}  # fmt: skip


def op_of(name: str) -> Op:
    return FACTORIES.get(name) or getattr(L, name)


@functools.cache
def kernel_of(group: str) -> L.Kernel:
    text = "".join(row[1] for row in GROUPS[group])
    lines = [
        "@L.kernel(launch_bounds=(128, 1))",
        "def kernel(x: L.In[L.u8], y: L.InOut[L.u32], u: L.u32, v: L.u32, w: L.u32, f: L.f32, g: L.f32, h: L.f32, "
        f"n: L.i32{', m: L.InMap[L.bf16]' * (', m, ' in text)}{', o: L.OutMap[L.bf16]' * ('(o' in text)}):",
    ]
    lines += ["    s = L.shared(L.u32, 64)"] * ("(s, " in text)
    lines += ["    bar = L.shared(L.u64, 8)"] * ("bar, " in text)
    lines += ["    lane = 4 * (n & 31)"] * ("lane" in text)
    for i, (name, expression, _) in enumerate(GROUPS[group]):
        result = op_of(name).result
        kind = result(1) if op_of(name).infers and name.startswith("zeros") else result
        kind = kind.dtype if isinstance(kind, L.Vec) else kind
        statement = not isinstance(kind, L.Scalar) or expression.startswith("L.st")
        lines.append(f"    {expression}" if statement else f"    keep_{kind}(y, {i}, {expression})")
    source = "\n".join(lines) + "\n"
    file = f"<ptx group {group}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    scope = {"L": L, "TILE_A": TILE_A, "TILE_B": TILE_B, "TILE": TILE, **SUMS, **FACTORIES}
    scope |= ptx_matrix.SCOPE
    scope |= {f"keep_{kind}": op for kind, op in KEEP.items()}
    exec(compile(source, file, "exec"), scope)
    made: L.Kernel = scope["kernel"]
    return L.Kernel(L.KernelSpec("ptx", (("group", group),)), made.function, made.params, made.launch_bounds)


CASES = [(group, arch) for group in GROUPS for arch in L.architectures(kernel_of(group).needs)]


@pytest.mark.parametrize(("group", "arch"), CASES)
def test_instructions(group, arch, compiler):
    kernel = kernel_of(group)
    assert L.check_kernel(kernel, arch) == ()
    text = L.ptx(kernel, arch)
    body = text[text.index(".target") :]
    for name, expression, patterns in GROUPS[group]:
        for pattern, count in ({patterns: 1} if isinstance(patterns, str) else patterns).items():
            found = len(re.findall(pattern, body))
            assert found == count, f"{name}: {expression}: {pattern!r} occurs {found} times in\n{body}"


def test_every_intrinsic_has_a_row():
    rows = {row[0] for group in GROUPS.values() for row in group}
    ops = {name for name in L.__all__ if isinstance(getattr(L, name), Op)}
    assert ops - rows == set()
    assert rows - ops == set(FACTORIES)


def test_entries_are_complete():
    for name in L.__all__:
        op = getattr(L, name)
        if isinstance(op, Op):
            assert op.name == name or name.startswith("mma_")
            assert op.numpy is not None
            assert op.section, f"{name} cites no section"
            assert op.section[0].isdigit()
            memory = any(isinstance(o, L.Ptr) and o.indexed for o in op.operands)
            if memory and name != "offset":
                assert op.effect is not L.Effect.PURE or name.startswith(("ldg_", "ld_waited_"))


def test_every_architecture_is_compiled_for():
    archs = {arch for _, arch in CASES}
    assert archs == set(L.ARCHITECTURES)
    assert ("fp8", "sm_80") not in CASES
    assert ("dependent", "sm_89") not in CASES

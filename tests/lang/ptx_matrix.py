"""Rows of `test_lang_ptx` for matrix units from Hopper on: `wgmma`, narrow `mma`, and what they need."""

from __future__ import annotations

from typing import Any

from atlas_lab.kernels import lang as L

STORE_TILE, PACK = L.stmatrix_tile(2, 32), L.pack_tile(L.bf16, 4)
NVFP4_TILE = L.mma_nvfp4_tile(1, 2)
WGMMA, WGMMA_WAIT = L.wgmma(L.bf16, 16), L.wgmma_wait(8)
FACTORIES = {
    "wgmma": WGMMA, "wgmma_wait": WGMMA_WAIT, "stmatrix_tile": STORE_TILE, "pack_tile": PACK,
    "mma_nvfp4_tile": NVFP4_TILE,
}  # fmt: skip


@L.device
def committed(acc):
    L.wgmma_commit()
    return acc


SCOPE = {
    "WGMMA": WGMMA, "WGMMA_WAIT": WGMMA_WAIT, "STORE_TILE": STORE_TILE, "PACK": PACK, "committed": committed,
    "NVFP4_TILE": NVFP4_TILE,
}  # fmt: skip
DESCRIPTOR = "L.matrix_descriptor(s, n, 128, 16, 1024)"

GROUPS: dict[str, list[tuple[str, str, Any]]] = {
    "pack": [("pack_tile", "t2(PACK((f, g, h, f)))", {r"cvt\.rn\.bf16x2\.f32 ": 2})],
    "mma_e4m3": [
        ("mma_m16n8k32_e4m3", "t4(L.mma_m16n8k32_e4m3((f, g, h, f), (u, v, w, u), (v, w)))",
         r"mma\.sync\.aligned\.m16n8k32\.row\.col\.f32\.e4m3\.e4m3\.f32 "),
    ],
    "mma_s8": [
        ("mma_m16n8k32_s8", "t4(L.mma_m16n8k32_s8((n, n, n, n), (u, v, w, u), (v, w)))",
         r"mma\.sync\.aligned\.m16n8k32\.row\.col\.s32\.s8\.s8\.s32 "),
        ("mma_m16n8k16_s8", "t4(L.mma_m16n8k16_s8((n, n, n, n), (u, v), (w,)))",
         r"mma\.sync\.aligned\.m16n8k16\.row\.col\.s32\.s8\.s8\.s32 "),
        ("zeros_i32", "t4(L.zeros_i32(4))", {r"mov\.[bsu]32\s+\S+, 0;": 1}),
    ],
    "mma_nvfp4": [
        ("mma_m16n8k64_nvfp4", "t4(L.mma_m16n8k64_nvfp4((f, g, h, f), (u, v, w, u), (v, w), u, v))",
         {r"mma\.sync\.aligned\.kind::mxf4nvf4\.block_scale\.scale_vec::4X\.m16n8k64\.row\.col\.f32\.e2m1\.e2m1\.f32"
          r"\.ue4m3 ": 3}),  # with those of the tile
        ("mma_nvfp4_tile", "t8(NVFP4_TILE((f, g, h, f, f, g, h, f), (u, v, w, u), (w, v, u, v), (u,), (v, w)))",
         {r"mxf4nvf4": 3}),
    ],
    "stmatrix": [
        ("stmatrix_x1", "L.stmatrix_x1(s, lane, u)", r"m8n8\.x1\.shared\.b16 "),
        ("stmatrix_x2", "L.stmatrix_x2(s, lane, (u, v))", r"m8n8\.x2\.shared\.b16 "),
        ("stmatrix_x4", "L.stmatrix_x4(s, lane, (u, v, w, u))",
         {r"stmatrix\.sync\.aligned\.m8n8\.x4\.shared\.b16 ": 3}),  # with those of the tile
        ("stmatrix_tile", "STORE_TILE(s, lane, (u, v, w, u, v, u, w, v))",
         {r"x4\.shared\.b16 \[\S+\+0\]": 2, r"x4\.shared\.b16 \[\S+\+32\]": 1}),
        ("stmatrix_x1_trans", "L.stmatrix_x1_trans(s, lane, u)", r"m8n8\.x1\.trans\.shared\.b16 "),
        ("stmatrix_x2_trans", "L.stmatrix_x2_trans(s, lane, (u, v))", r"m8n8\.x2\.trans\.shared\.b16 "),
        ("stmatrix_x4_trans", "L.stmatrix_x4_trans(s, lane, (u, v, w, u))", r"m8n8\.x4\.trans\.shared\.b16 "),
    ],
    "warpgroup": [
        ("warpgroup_id", "L.warpgroup_id()", {r"shr\.u32 .*7;|mov\.b32 .* 0;": 1}),  # 0 if known
        ("warpgroup_thread", "L.warpgroup_thread()", r"%tid\.x;"),
        ("elect_sync", "L.elect_sync()", r"elect\.sync _\|p, 0xffffffff;"),
        ("setmaxnreg_dec", "L.setmaxnreg_dec(40)", r"setmaxnreg\.dec\.sync\.aligned\.u32 40;"),
        ("setmaxnreg_inc", "L.setmaxnreg_inc(232)", r"setmaxnreg\.inc\.sync\.aligned\.u32 232;"),
    ],
    "wgmma": [
        ("wgmma_fence", "L.wgmma_fence()", r"wgmma\.fence\.sync\.aligned;"),
        ("wgmma",
         f"t8(WGMMA_WAIT(committed(WGMMA(L.zeros(8), {DESCRIPTOR}, L.descriptor_advance({DESCRIPTOR}, 32), 1)), 0))",
         r"setp\.ne\.b32 p, \S+, 0; wgmma\.mma_async\.sync\.aligned\.m64n16k16\.f32\.bf16\.bf16 \{(%f\d+, ){7}%f\d+\}, "
         r"%rd\d+, %rd\d+, p, 1, 1, 0, 0; "),
        ("matrix_descriptor", DESCRIPTOR, {r"and\.b32 .*, 262128;": 1, r"or\.b64 .*, 4611686293305360384;": 1}),
        ("descriptor_advance", f"L.descriptor_advance({DESCRIPTOR}, 64 * n)", {r"shl\.b32 .*6;": 1}),
    ],
    "wgmma_wait": [
        ("wgmma_fence", "L.wgmma_fence()", r"wgmma\.fence\.sync\.aligned;"),
        ("wgmma_wait", f"t8(WGMMA_WAIT(committed(WGMMA(L.zeros(8), {DESCRIPTOR}, {DESCRIPTOR}, 0)), 0))",
         r"wgmma\.wait_group\.sync\.aligned 0;"),
        ("wgmma_commit", "pass", r"wgmma\.commit_group\.sync\.aligned;"),  # in `committed`
    ],
    "fence_proxy": [("fence_proxy_async", "L.fence_proxy_async()", r"fence\.proxy\.async\.shared::cta;")],
}  # fmt: skip

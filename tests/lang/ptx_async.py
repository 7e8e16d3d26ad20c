"""Rows of `test_lang_ptx` for the asynchronous machinery: mbarriers, bulk and tensor copies, proxy fences, clusters.

Besides the names there, expressions may use bar (shared u64), m (InMap[bf16]) and o (OutMap[bf16]).
"""

from __future__ import annotations

from typing import Any

from atlas_lab.kernels import lang as L

TMA = r"cp\.async\.bulk\.tensor\.{0}d\.shared::{1}\.global\.tile\.mbarrier::complete_tx::bytes"
TMA_OUT = r"cp\.async\.bulk\.tensor\.{0}d\.global\.shared::cta\.tile\.bulk_group"
BULK = r"cp\.async\.bulk\.shared::{0}\.global\.mbarrier::complete_tx::bytes"
POLICY = r"createpolicy\.fractional\.L2::{0}\.b64 "
FACTORIES = {
    "bulk_load": L.bulk_load(),
    "bulk_load_first": L.bulk_load(hint="evict_first"),
    "bulk_load_many": L.bulk_load(multicast=True, hint="evict_last"),
    "bulk_store": L.bulk_store(),
    "bulk_store_last": L.bulk_store(hint="evict_last"),
    "tma_load_1d": L.tma_load(1),
    "tma_load_5d": L.tma_load(5, hint="evict_normal"),
    "tma_load_many": L.tma_load(2, multicast=True),
    "tma_store_1d": L.tma_store(1, hint="evict_first"),
}

GROUPS: dict[str, list[tuple[str, str, Any]]] = {
    "mbarrier": [
        ("mbarrier_init", "L.mbarrier_init(bar, n, u)", r"mbarrier\.init\.shared::cta\.b64 \[%r\d+\], %r\d+;"),
        ("mbarrier_inval", "L.mbarrier_inval(bar, n)", r"mbarrier\.inval\.shared::cta\.b64 "),
        ("mbarrier_arrive", "L.mbarrier_arrive(bar, n)", r"mbarrier\.arrive\.shared::cta\.b64 _, "),
        ("mbarrier_arrive_expect_tx", "L.mbarrier_arrive_expect_tx(bar, n, 4096)",
         r"mbarrier\.arrive\.expect_tx\.shared::cta\.b64 _, "),
        ("mbarrier_expect_tx", "L.mbarrier_expect_tx(bar, n, u)", r"mbarrier\.expect_tx\.relaxed\.cta\.shared::cta\."),
        ("mbarrier_try_wait", "L.mbarrier_try_wait(bar, n, u)", {r"try_wait\.parity\.shared::cta\.b64 p, ": 2}),
        ("mbarrier_wait", "L.mbarrier_wait(bar, n, u)", {r"again: mbarrier\.try_wait\.parity\.shared::cta\.b64 ": 1}),
        ("mbarrier_wait_cluster", "L.mbarrier_wait_cluster(bar, n, u)",
         r"again: mbarrier\.try_wait\.parity\.acquire\.cluster\.shared::cta\.b64 p, .*@!p bra again;"),
        ("fence_mbarrier_init", "L.fence_mbarrier_init()", r"fence\.mbarrier_init\.release\.cluster;"),
    ],
    "proxy": [
        ("fence_proxy_async", "L.fence_proxy_async()", r"fence\.proxy\.async\.shared::cta;"),
        ("fence_proxy_async_global", "L.fence_proxy_async_global()", r"fence\.proxy\.async\.global;"),
        ("fence_proxy_async_all", "L.fence_proxy_async_all()", r"fence\.proxy\.async;"),
    ],
    "bulk": [
        ("bulk_load", "bulk_load(s, n, x, n, u, bar, 0)", BULK.format("cta") + r" \[\S+\], \[\S+\], %r\d+, \[\S+\];"),
        ("bulk_load_first", "bulk_load_first(s, n, y, n, 64, bar, 0)",
         {POLICY.format("evict_first"): 1, BULK.format("cta") + r"\.L2::cache_hint .*, policy;": 1}),
        ("bulk_store", "bulk_store(y, n, s, n, u)",
         r"cp\.async\.bulk\.global\.shared::cta\.bulk_group \[%rd\d+\], \[%r\d+\], %r\d+;"),
        ("bulk_store_last", "bulk_store_last(y, n, s, n, u)",
         {POLICY.format("evict_last"): 1, r"bulk_group\.L2::cache_hint \[\S+\], \[\S+\], %r\d+, policy;": 1}),
        ("bulk_commit", "L.bulk_commit()", r"cp\.async\.bulk\.commit_group;"),
        ("bulk_wait", "L.bulk_wait(1)", r"cp\.async\.bulk\.wait_group 1;"),
        ("bulk_wait_read", "L.bulk_wait_read(3)", r"cp\.async\.bulk\.wait_group\.read 3;"),
    ],
    "multicast": [
        ("bulk_load_many", "bulk_load_many(s, n, x, n, u, bar, 0, 3)",
         BULK.format("cluster") + r"\.multicast::cluster\.L2::cache_hint .*, %r\d+, \[\S+\], %rs\d+, policy;"),
        ("tma_load_many", "tma_load_many(s, n, m, (n, 0), bar, 0, u)",
         TMA.format(2, "cluster") + r"\.multicast::cluster \[\S+\], \[%rd\d+, \{\S+, \S+\}\], \[\S+\], %rs\d+;"),
    ],
    "tma": [
        ("tma_load_1d", "tma_load_1d(s, n, m, (n,), bar, 0)", TMA.format(1, "cta") + r" .*, \[%rd\d+, \{\S+\}\], "),
        ("tma_load_2d", "L.tma_load_2d(s, n, m, (7, u), bar, 0)", TMA.format(2, "cta") + " "),
        ("tma_load_3d", "L.tma_load_3d(s, n, m, (n, 1, 2), bar, 1)", TMA.format(3, "cta") + " "),
        ("tma_load_5d", "tma_load_5d(s, n, m, (n, 1, 2, u, v), bar, 1)",
         {POLICY.format("evict_normal"): 1, TMA.format(5, "cta") + r"\.L2::cache_hint .*, policy;": 1}),
        ("tma_store_1d", "tma_store_1d(o, (n,), s, n)",
         {POLICY.format("evict_first"): 1, TMA_OUT.format(1) + r"\.L2::cache_hint \[%rd\d+, \{\S+\}\], \[\S+\], p": 1}),
        ("tma_store_2d", "L.tma_store_2d(o, (n, 1), s, n)", TMA_OUT.format(2) + " "),
        ("tma_store_3d", "L.tma_store_3d(o, (n, 1, 2), s, n)", TMA_OUT.format(3) + " "),
        ("tma_prefetch", "L.tma_prefetch(o)", r"prefetch\.tensormap \[%rd\d+\];"),
    ],
    "cluster": [
        ("cluster_rank", "L.cluster_rank()", r"mov\.u32 \S+, %cluster_ctarank;"),
        ("cluster_size", "L.cluster_size()", r"mov\.u32 \S+, %cluster_nctarank;"),
        ("cluster_arrive", "L.cluster_arrive()", r"barrier\.cluster\.arrive\.release;"),
        ("cluster_arrive_relaxed", "L.cluster_arrive_relaxed()", r"barrier\.cluster\.arrive\.relaxed;"),
        ("cluster_wait", "L.cluster_wait()", r"barrier\.cluster\.wait\.acquire;"),
        ("mbarrier_arrive_remote", "L.mbarrier_arrive_remote(L.mapa(bar, u), n)",
         r"mbarrier\.arrive\.release\.cluster\.shared::cluster\.b64 _, "),
        ("mbarrier_arrive_remote_relaxed", "L.mbarrier_arrive_remote_relaxed(L.mapa(bar, u), n)",
         r"mbarrier\.arrive\.relaxed\.cluster\.shared::cluster\.b64 _, "),
        ("mapa", "L.sts_b32(s, n, L.ld_cluster_b32(L.mapa(s, v), n))", {r"mapa\.shared::cluster\.u32 ": 2}),
    ],
    "store_async": [
        ("st_async_v4_f32", "L.st_async_v4_f32(L.mapa(s, u), n, (f, g, h, f), L.mapa(bar, u), n)",
         r"st\.async\.shared::cluster\.mbarrier::complete_tx::bytes\.v4\.f32 \[\S+\], \{\S+, \S+, \S+, \S+\}, \["),
    ],
    "cluster_memory": [
        (f"{kind}_cluster_{form}", call, rf"{kind}\.shared::cluster\.{types} ")
        for kind, form, types, call in (
            ("ld", "b32", "b32", "L.ld_cluster_b32(L.mapa(s, u), n)"),
            ("ld", "f32", "f32", "L.ld_cluster_f32(L.mapa(s, u), n)"),
            ("ld", "v4_b32", r"v4\.b32", "t4(L.ld_cluster_v4_b32(L.mapa(s, u), n))"),
            ("ld", "v4_f32", r"v4\.f32", "t4(L.ld_cluster_v4_f32(L.mapa(s, u), n))"),
            ("st", "b32", "b32", "L.st_cluster_b32(L.mapa(s, u), n, v)"),
            ("st", "f32", "f32", "L.st_cluster_f32(L.mapa(s, u), n, f)"),
            ("st", "v4_b32", r"v4\.b32", "L.st_cluster_v4_b32(L.mapa(s, u), n, (u, v, w, u))"),
            ("st", "v4_f32", r"v4\.f32", "L.st_cluster_v4_f32(L.mapa(s, u), n, (f, g, h, f))"),
        )
    ],
}  # fmt: skip

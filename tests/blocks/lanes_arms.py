"""Small arms over repacked NVFP4: one for any projection, one for gate and up in one call, and what lacks a form."""

from __future__ import annotations

from atlas_lab import Arm, Launch, Rounded, hookimpl, rows
from atlas_lab.arms import copies
from atlas_lab.kernels.activation.gated import KINDS, kind_of
from atlas_lab.kernels.gemv.mma_lanes import UNIT, mma_nvfp4_lanes

WARPS, DEPTH, COLUMNS = 2, 2, (1, 2)
BOTH = (False, True)


def kernel(c: int, **more):
    return mma_nvfp4_lanes(warps=WARPS, depth=DEPTH, columns=c, blocks=1, **more)


class Lanes(Arm):
    roles = ("*",)
    rows = rows(1, 16)
    source = "nvfp4"
    kernels = tuple(kernel(c) for c in COLUMNS)
    optional_kernels = (*(kernel(c, gate=True, clamp=clamp) for c in COLUMNS for clamp in BOTH),)
    tolerance = Rounded("mma_bf16", "bf16", depth=lambda k: -(-k // 16), extra_roundings=WARPS + 2)
    prologues = (*KINDS, "limit")
    pdl = None

    def __init__(self, name="lanes", **more):
        self.name = name
        self.__dict__.update(more)

    def eligible(self, p, ctx):
        return copies.can_repack(p)

    def finalize(self, p, ctx):
        return [copies.repacked_nvfp4(p)]

    def launch(self, c, kernel, weights, columns, first, second, kind, tiles, a_block):
        pairs = [t for _, w in weights for t in (w.weight, w.global_scale)]
        divides = int("reciprocal" in weights[0][0])
        grid, shared = -(-columns // a_block), WARPS * DEPTH * tiles * UNIT
        args = (*(pairs + pairs[-2:] * 2)[:6], c.x, c.y, c.m, columns, c.k, first, second, kind, grid, divides)
        return [
            Launch(kernel, grid, 32 * WARPS, args, shared, flops=2 * c.m * c.n * c.k, pipe="mma_bf16", pdl=self.pdl)
        ]

    def lower(self, c):
        kind = kind_of(c.prologue, c.prologue_limit) if c.prologue else 0
        how = {"gate": True, "clamp": c.prologue_limit > 0} if c.prologue else {}
        made = kernel(1 if c.m <= 8 else 2, **how)
        return self.launch(c, made, list(c.weights.items()), c.n, c.n, c.n, kind, 1, 16)


class Joined(Lanes):
    roles = ("ffn.gate+ffn.up",)
    kernels = tuple(kernel(c, joined=True) for c in COLUMNS)
    optional_kernels = (*(kernel(c, tiles=2, pair=True, clamp=clamp) for c in COLUMNS for clamp in BOTH),)
    epilogues = ("activation", "limit")
    prologues = ()

    def eligible(self, p, ctx):
        return next((v for v in map(copies.can_repack, p.projections) if not v), copies.can_repack(p.projections[0]))

    def finalize(self, p, ctx):
        made = [copies.repacked_nvfp4(q) for q in p.projections]
        return [
            d.part(f"{q.role} {d.key}", d.dequantize, **d.tensors) for q, d in zip(p.projections, made, strict=True)
        ]

    def lower(self, c):
        columns, weights, width = 1 if c.m <= 8 else 2, list(c.weights.items()), c.n // 2
        if c.epilogue.activation:
            made = kernel(columns, tiles=2, pair=True, clamp=c.epilogue.limit > 0)
            kind = kind_of(c.epilogue.activation, c.epilogue.limit)
            return self.launch(c, made, weights, width, width, width, kind, 2, 16)
        return self.launch(c, kernel(columns, joined=True), weights, c.n, width, c.n, 0, 1, 16)


LANES, JOINED = Lanes(), Joined("lanes_joined")
PLAIN = Lanes("lanes_plain", prologues=(), pdl=False)
UNFUSED = Joined("lanes_unfused", epilogues=())
UNCLAMPED = Joined("lanes_unclamped_joined", epilogues=("activation",)), Lanes("lanes_unclamped", prologues=KINDS)


@hookimpl
def atlas_arms():
    return [LANES, JOINED, PLAIN, UNFUSED, *UNCLAMPED]

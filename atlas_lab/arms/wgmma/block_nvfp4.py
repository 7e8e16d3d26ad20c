"""The arms over NVFP4 in GGML's blocks on warpgroups, whose activations are quantized alike (MMQ)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from atlas_lab.arms.copies import block_nvfp4, can_block_nvfp4
from atlas_lab.arms.copies.shapes import multiples
from atlas_lab.arms.gated import PROLOGUES, form, source
from atlas_lab.arms.mma.base import JOINED, one_kind, under
from atlas_lab.arms.w4a4 import SNR_DB, rounded_x
from atlas_lab.arms.wgmma.base import OnWarpgroups, parts_of_y
from atlas_lab.arms.wgmma.repacked_tiles import RepackedTile
from atlas_lab.arms.wgmma.tiles import Tile
from atlas_lab.core.arm import projections_of
from atlas_lab.core.call import Call
from atlas_lab.core.context import Context
from atlas_lab.core.declare import Bind, Declaration
from atlas_lab.core.launch import Launch
from atlas_lab.core.numbers import Accuracy, ReductionClass, Rounded
from atlas_lab.core.projection import Projection
from atlas_lab.core.rows import rows_from
from atlas_lab.core.target import Target
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.core.tuning import Setting
from atlas_lab.core.verdict import Verdict
from atlas_lab.kernels.activation.quantized import gated_nvfp4_blocks
from atlas_lab.kernels.gemm.wgmma_block_nvfp4 import PITCH, stage_bytes, wgmma_block_nvfp4
from atlas_lab.kernels.lang import Kernel
from atlas_lab.kernels.quantize.nvfp4 import THREADS
from atlas_lab.kernels.quantize.nvfp4_blocks import blocks_grid, quantize_nvfp4_blocks

K_MULTIPLE = 256  # rows of 144 bytes, which the copy engine takes
COLUMNS = 128  # of y in a tile
BF16_BYTES = 2
MAKING = 250  # instructions of a warp for a stage
MULTIPLIES, DIVIDES, ABSENT = range(3)  # the tensor scale, as the kernel is told


@dataclass(frozen=True)
class BlocksTile(RepackedTile):
    """bm rows of x by bn rows of W in blocks."""

    @property
    def w_bytes(self) -> int:
        return self.bn * PITCH

    @property
    def issued(self) -> int:
        return MAKING

    @property
    def stage(self) -> int:
        return stage_bytes(self.bm, self.bn)


class Nvfp4Mmq(OnWarpgroups):
    """Weights in GGML's blocks of NVFP4, as stored or a shuffle of the stored bits at load time; x is quantized to
    NVFP4 under a tensor scale of 1, once for all projections that share it, and written as code times block scale, in
    the order of the blocks: exact in BF16, as W is; tensor cores (wgmma) fed by TMA, FP32 sums, 16 of K after 16, the
    tensor scale on the sums; tiles of 16, 32, 64 or 128 rows; K a multiple of 256. It changes numbers: it quantizes
    activations."""

    rows = rows_from(2)
    element_bytes, pipe = 2, "mma_bf16"
    row_tiles = (16, 32, 64, 128)
    """The smallest that covers M serves it, for more than 128 the last."""
    tolerance = Rounded(accumulate="mma_bf16", out="bf16", depth=lambda k: -(-k // 16), extra_roundings=2)
    accuracy = Accuracy(min_snr_db=SNR_DB)
    reduction_class = ReductionClass(
        "wgmma.m64k16.bf16", "blocks of 64 K, in parts by M, N, K, target", rounding="x to NVFP4, output"
    )
    quantized = staticmethod(rounded_x)

    def __init__(self, name: str, source: str = "nvfp4", *, joined: bool = False) -> None:
        """Over weights of the family `source`, nvfp4 or block_nvfp4; `joined`: of all projections of a site."""
        self.name, self.source, self.joined = name, source, joined
        self.roles = JOINED if joined else ("*",)  # type: ignore[assignment]
        self.kernels = (quantize_nvfp4_blocks, *(_kernel(BlocksTile(bm, COLUMNS)) for bm in self.row_tiles))
        if not joined:
            self.prologues = PROLOGUES
            self.optional_kernels = (gated_nvfp4_blocks(clamp=False), gated_nvfp4_blocks(clamp=True))

    def settings(self, n: int, k: int, target: Target) -> Sequence[Setting]:
        return ()

    def tile(self, c: Call) -> Tile:
        return BlocksTile(next((bm for bm in self.row_tiles if c.m <= bm), self.row_tiles[-1]), COLUMNS)

    def eligible(self, p: Any, ctx: Context) -> Verdict:
        members = projections_of(p)
        for member in members:
            verdict = multiples(member, k_multiple=K_MULTIPLE)
            if verdict and self.source == "nvfp4":
                verdict = can_block_nvfp4(member)
            if not verdict:
                return verdict
        return one_kind(members)

    def finalize(self, p: Any, ctx: Context) -> Sequence[Declaration]:
        return [self._declare(member, f" {member.role}" if self.joined else "") for member in projections_of(p)]

    def _declare(self, p: Projection, key: str) -> Declaration:
        return under(block_nvfp4(p), key) if self.source == "nvfp4" else Bind(p.weight, key=f"blocks{key}")

    def scratch(self, c: Call) -> dict[str, Tensor]:
        """What products of one projection after the other leave: sums in the same place, flags of each in its own."""
        alone = [super(Nvfp4Mmq, self).scratch(part) for part in self._alone(c)]
        return {
            "parts": max((s["parts"] for s in alone), key=lambda t: t.elements),
            "flags": Tensor("u32", (sum(s["flags"].elements for s in alone),)),
            "x.ordered": Tensor("bf16", (c.m, c.k)),
        }

    def _alone(self, c: Call) -> list[Call]:
        """The calls of a projection each that a call is of."""
        counts = c.counts if self.joined else (c.n,)
        return [
            replace(c, weights={key: w}, y=replace(c.y, data=y), n=n, counts=(n,))
            for (key, w), y, n in zip(c.weights.items(), parts_of_y(c, counts), counts, strict=True)
        ]

    def lower(self, c: Call) -> list[Launch]:
        made, flags = c.scratch["x.ordered"], c.scratch["flags"]
        products, at = [], 0
        for part in self._alone(c):
            own = super().scratch(part)["flags"].elements
            scratch = {"parts": c.scratch["parts"], "flags": flags.view(at, (own,))}
            products.append(self._product(replace(part, scratch=scratch), made, c.n))
            at += own
        quantized = Launch(
            gated_nvfp4_blocks(clamp=c.prologue_limit > 0) if c.prologue else quantize_nvfp4_blocks,
            grid=blocks_grid(c.m, c.k),
            block=THREADS,
            args=(*source(c), made, flags, c.k, *form(c), flags.elements),
            quantizes=True,
            label=f"{self.name} x",
        )
        return [quantized, *products]

    def _product(self, c: Call, x: Tensor, pitch: int) -> Launch:
        """That of one projection, with quantized x, to rows of y that are `pitch` elements apart."""
        t = self.tile(c)
        ((key, w),) = c.weights.items()
        convention = DIVIDES if "_reciprocal" in key else MULTIPLIES if "global_scale" in w else ABSENT
        scale = c.scratch["parts"] if convention == ABSENT else w.global_scale  # one that is absent is not read
        of_w = TensorMap(w.blocks, (t.bn, PITCH), promotion=256)
        odd = c.n | pitch | c.y.data.offset // BF16_BYTES
        args = (self.x_map(c, x, t), of_w, scale, c.y.data)
        return self.launch(c, t, _kernel(t), args, (convention, pitch, odd))


def _kernel(t: Tile) -> Kernel:
    return wgmma_block_nvfp4(t.bm, t.bn, t.stages)

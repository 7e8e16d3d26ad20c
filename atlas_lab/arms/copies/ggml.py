"""GGML's blocks made of NVFP4: its own order of the same numbers, and Q4_K."""

from __future__ import annotations

from typing import Literal

import ml_dtypes
import numpy as np

from atlas_lab.arms.copies.launches import copied
from atlas_lab.arms.copies.shapes import is_reciprocal, multiples, named, require, two_level
from atlas_lab.core.building import BuildCall
from atlas_lab.core.declare import Arrays, Derived
from atlas_lab.core.launch import Launch
from atlas_lab.core.projection import Projection
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.verdict import Verdict
from atlas_lab.formats import get
from atlas_lab.formats.block_nvfp4 import from_nvfp4
from atlas_lab.kernels.quantize.block_nvfp4 import BLOCK, THREADS, nvfp4_to_blocks


def can_block_nvfp4(p: Projection) -> Verdict:
    """NVFP4 of either convention, K a multiple of 64."""
    return two_level(p, k_multiple=BLOCK)


def block_nvfp4(p: Projection) -> Derived:
    """`blocks` u8 `[N, K/64 x 36]` as of the format `block_nvfp4`, a shuffle of the stored bits; `global_scale` as
    stored, which belongs after the product. Key `block_nvfp4`. Raises CopyError."""
    require(can_block_nvfp4(p), "block_nvfp4", p)
    w, n, k, divides = p.weight, p.n, p.k, is_reciprocal(p)

    def build(t: Arrays) -> dict[str, np.ndarray]:
        return {"blocks": from_nvfp4(t["weight"], t["scale"]), "global_scale": t["global_scale"]}

    def dequantize(t: Arrays) -> np.ndarray:
        values, g = get("block_nvfp4").dequantize({"blocks": t["blocks"]}), np.float64(t["global_scale"].reshape(()))
        return values / g if divides else values * g

    def device(call: BuildCall) -> list[Launch]:
        s, o = call.source, call.out
        count = n * (k // BLOCK)
        args = (s.weight, s.scale, o.blocks, count)
        shuffle = Launch(nvfp4_to_blocks, grid=-(-count // THREADS), block=THREADS, args=args, label="block_nvfp4")
        return [shuffle, copied(s.global_scale, o.global_scale)]

    return Derived(
        named("block_nvfp4", p),
        source=w.packed,
        build=build,
        dequantize=dequantize,
        device=device,
        blocks=Tensor("u8", get("block_nvfp4").tensors(n, k)["blocks"].shape),
        global_scale=w["global_scale"],
    )


def can_q4_k(p: Projection) -> Verdict:
    """A weight of any format, K a multiple of 256."""
    return multiples(p, k_multiple=256)


def q4_k(p: Projection, through: Literal["bf16", "f32"] = "bf16") -> Derived:
    """`blocks` u8 `[N, K/256 x 144]` of the format `q4_k`, quantized from the weight's values in float32, rounded to
    BF16 first or not. Key `q4_k`. Built on the host: each block is a search. Raises CopyError."""
    require(can_q4_k(p), "Q4_K", p)

    def build(w: np.ndarray) -> dict[str, np.ndarray]:
        values = w.astype(ml_dtypes.bfloat16).astype(np.float32) if through == "bf16" else w
        return get("q4_k").quantize(values)

    return Derived(
        "q4_k",
        source=p.weight,
        build=build,
        dequantize=get("q4_k").dequantize,
        parameters={"through": through},
        blocks=Tensor("u8", get("q4_k").tensors(p.n, p.k)["blocks"].shape),
    )

"""x quantized with a scale for each group of K of a row: what holds it, the launch that makes it, how TMA reads it."""

from __future__ import annotations

from atlas_lab.arms.gated import form, source
from atlas_lab.core.call import Call
from atlas_lab.core.launch import Launch
from atlas_lab.core.tensor import Tensor, round_up
from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.kernels.lang import Kernel

PITCH = 4  # scales that the rows of x's are rounded up to: 16 bytes
OF_BLOCK = 128  # K of a block that quantizes


def holding(c: Call, dtype: str, group: int) -> dict[str, Tensor]:
    """Scratch for codes `[m, k]` and scales F32 `[ceil(k/group), m]`, m rounded up to PITCH."""
    scales = Tensor("f32", (-(-c.k // group), round_up(c.m, PITCH)))
    return {"x.codes": Tensor(dtype, (c.m, c.k)), "x.scales": scales}


def quantizing(c: Call, kernel: Kernel, rows: int, threads: int, cleared: tuple[Tensor, int], label: str) -> Launch:
    """The launch of a kernel that makes them of x, or of the product that a prologue makes it of, in blocks of `rows`
    and `threads`, and clears flags: `cleared`, these and how many words."""
    codes, scales = c.scratch["x.codes"], c.scratch["x.scales"]
    flags, words = cleared
    return Launch(
        kernel,
        grid=(-(-c.m // rows), -(-c.k // OF_BLOCK)),
        block=threads,
        args=(*source(c), codes, scales, flags, c.m, c.k, *form(c), scales.shape[1], words),
        quantizes=True,
        label=label,
    )


def scales_map(c: Call, groups: int, rows: int) -> TensorMap:
    """Boxes of the scales of `groups` of K of `rows` of x."""
    scales = c.scratch["x.scales"]
    count, pitch = scales.shape
    return TensorMap(scales.view(0, (count, c.m), (pitch, 1)), (groups, rows))

"""Copies of weights that arms share: each a function from a projection to the `Derived` that makes it, with the verdict
that says whether it can be made. Arms that call the same function for the same weight read one buffer.

Every copy holds all that a kernel reads, tensor scales included, as the checkpoint stores them: `global_scale` divides
where the key ends in `_reciprocal` (compressed-tensors), and multiplies where it does not.
"""

from __future__ import annotations

from atlas_lab.arms.copies.fused import can_fuse, fused, part, segments
from atlas_lab.arms.copies.ggml import block_nvfp4, can_block_nvfp4, can_q4_k, q4_k
from atlas_lab.arms.copies.int8 import can_int8, int8_32
from atlas_lab.arms.copies.lanes_q2_0 import can_repack_q2_0, repacked_q2_0
from atlas_lab.arms.copies.lanes_q4_k import can_repack_q4_k, repacked_q4_k
from atlas_lab.arms.copies.repacked import can_repack, repacked_nvfp4
from atlas_lab.arms.copies.transposed import can_transpose_fp8, can_transpose_nvfp4, transposed_fp8, transposed_nvfp4

__all__ = [
    "block_nvfp4",
    "can_block_nvfp4",
    "can_fuse",
    "can_int8",
    "can_q4_k",
    "can_repack",
    "can_repack_q2_0",
    "can_repack_q4_k",
    "can_transpose_fp8",
    "can_transpose_nvfp4",
    "fused",
    "int8_32",
    "part",
    "q4_k",
    "repacked_nvfp4",
    "repacked_q2_0",
    "repacked_q4_k",
    "segments",
    "transposed_fp8",
    "transposed_nvfp4",
]

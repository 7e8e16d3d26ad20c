"""Tensor types of GGUF files: how many bytes hold how many weights, and which format of ours they are.

Numbers and sizes are those of ggml-org/ggml `include/ggml.h` and `src/ggml-common.h`; 142 and 143 are PrismML's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from atlas_lab.formats.base import Format
from atlas_lab.formats.bf16 import Bf16
from atlas_lab.formats.block_nvfp4 import BlockNvfp4
from atlas_lab.formats.q2_0 import Q2_0_G64, Q2_0_G128
from atlas_lab.formats.q4_k import Q4K
from atlas_lab.formats.q6_k import Q6K
from atlas_lab.formats.q8_0 import Q8_0


@dataclass(frozen=True)
class GgmlType:
    """`block` weights of a row take `bytes`. `dtype` is the element type of the stored tensor (u8 for blocks), `format`
    the name of the weight format it is, empty for one that no projection can have."""

    name: str
    block: int
    bytes: int
    dtype: str = "u8"
    format: str = ""

    def stored_bytes(self, elements: int) -> int:
        return elements // self.block * self.bytes

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape in elements of `dtype` of a tensor of this many weights."""
        return (*shape[:-1], shape[-1] // self.block * self.bytes) if self.dtype == "u8" else shape


def _of(name: str, f: Format) -> GgmlType:
    return GgmlType(name, f.geometry.cols, f.bytes(1, f.geometry.cols) - 4 * (f.name == "block_nvfp4"), format=f.name)


TYPES: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4, "f32"),
    1: GgmlType("F16", 1, 2, "f16"),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: _of("Q8_0", Q8_0()),
    9: GgmlType("Q8_1", 32, 36),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: _of("Q4_K", Q4K()),
    13: GgmlType("Q5_K", 256, 176),
    14: _of("Q6_K", Q6K()),
    15: GgmlType("Q8_K", 256, 292),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    24: GgmlType("I8", 1, 1, "i8"),
    25: GgmlType("I16", 1, 2, "i16"),
    26: GgmlType("I32", 1, 4, "i32"),
    27: GgmlType("I64", 1, 8, "i64"),
    28: GgmlType("F64", 1, 8, "f64"),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2, "bf16", Bf16.name),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
    40: _of("NVFP4", BlockNvfp4()),
    41: GgmlType("Q1_0", 128, 18),
    142: _of("PQ2_0", Q2_0_G128),
    143: GgmlType("PTQ1_0", 128, 28),
}

# Type 42 is one of two: upstream's, or that of PrismML's older files. The bytes of a tensor tell.
Q2_0 = 42
Q2_0_KINDS = (_of("Q2_0", Q2_0_G64), _of("Q2_0", Q2_0_G128))

SUPPORTED = tuple(dict.fromkeys(t.name for t in (*TYPES.values(), *Q2_0_KINDS) if t.format))

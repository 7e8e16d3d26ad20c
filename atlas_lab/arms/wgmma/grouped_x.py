"""x quantized with a scale for each group of K of a row: what holds it, the launch that makes it, how TMA reads it;
and y, where it is the x of a call that follows."""

from __future__ import annotations

from atlas_lab.arms.gated import form, source
from atlas_lab.core.call import Call, Operand
from atlas_lab.core.launch import Launch
from atlas_lab.core.program import PlanError
from atlas_lab.core.tensor import Tensor, round_up
from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.kernels.gemm.wgmma_codes import CODES
from atlas_lab.kernels.lang import Kernel
from atlas_lab.kernels.quantize.fp8_groups import GROUP

PITCH = 4  # scales that the rows of x's are rounded up to: 16 bytes
OF_BLOCK = 128  # K of a block that quantizes
GROUPED = CODES
"""The format of an operand `[m, k]` in E4M3 with `scales` F32 `[ceil(k/128), m]`, m rounded up to PITCH."""
ALIGNED = 16  # columns of such a y are a multiple of so many


def grouped(name: str, m: int, k: int) -> Operand:
    """Such an operand, of codes called `name` and scales called after it."""
    scales = Tensor("f32", (-(-k // GROUP), round_up(m, PITCH)), f"{name}.scales")
    return Operand(Tensor("e4m3", (m, k), name), GROUPED, (("scales", scales),))


def codes_of(given: Operand, m: int, k: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of such an operand, whole and from ALIGNED bytes on; raises PlanError for any other."""
    expected = grouped(given.data.name, m, k)
    wanted = (expected.data, *(t for _, t in expected.scales))
    found = (given.data, *(t for name, t in given.scales if name == "scales"))
    fits = [(t.dtype, t.shape) for t in found] == [(t.dtype, t.shape) for t in wanted]
    if not fits or any(t.offset % ALIGNED or not t.is_contiguous for t in found) or k % ALIGNED:
        said = f"found {', '.join(map(str, found))}, expected {', '.join(map(str, wanted))}"
        raise PlanError(f"{given.data.name} in {GROUPED}: {said}, contiguous, the columns a multiple of {ALIGNED}")
    codes, scales = found
    return codes, scales


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


def quantized_x(c: Call) -> tuple[Tensor, Tensor]:
    """Codes and scales of a call's x: those it is handed, or its scratch; raises PlanError as `codes_of` does."""
    if c.x.format == GROUPED:
        return codes_of(c.x, c.m, c.k)
    return c.scratch["x.codes"], c.scratch["x.scales"]


def scales_map(c: Call, groups: int, rows: int) -> TensorMap:
    """Boxes of the scales of `groups` of K of `rows` of x."""
    _, scales = quantized_x(c)
    count, pitch = scales.shape
    return TensorMap(scales.view(0, (count, c.m), (pitch, 1)), (groups, rows))

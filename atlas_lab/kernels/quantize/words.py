"""What quantizers read: 8 elements at a time, of x or of what a function makes of other operands."""

from atlas_lab.kernels import lang as L


@L.device
def plain(source, row, column):
    """8 elements of a row of x, of `(x, pitch)`; `row` is 64 bits wide."""
    x, pitch = source
    return L.ldg_v4_b32(x, row * pitch + column)

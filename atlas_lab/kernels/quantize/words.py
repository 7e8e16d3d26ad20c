"""What quantizers read: 8 elements at a time, of x or of what a function makes of other operands."""

from atlas_lab.kernels import lang as L


@L.device
def plain(source, row, column):
    """8 elements of a row of x, of `(x, pitch)`, after `grid_wait_for`; `row` is 64 bits wide."""
    x, pitch = source
    return L.ld_waited_v4_b32(x, row * pitch + column)


@L.device
def clear(flags, words, first, threads):
    """The first `words` flags become 0: this thread, number `first` of `threads`, does its part."""
    word = L.i32(first)
    while word < words:
        L.stg_b32(flags, word, L.u32(0))
        word = L.i32(word + threads)

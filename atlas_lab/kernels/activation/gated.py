"""The gated product of a feed-forward block: activation(g) times u. One function, wherever it is computed.

Some models clamp its inputs first: g from above at a limit, u to within it on both sides, as DeepSeek-V4 and GLM do
where config.json has a `swiglu_limit`: silu(min(g, limit))·clamp(u, -limit, limit). (gpt-oss has the same clamp and
another product, silu(1.702·g)/1.702·(u + 1), which is not here.) g and u are BF16, and a limit is rounded to BF16 too:
7 and 10, which models have, are exact. A NaN stays one; +infinity of g and both of u become the limit; -infinity of g
makes NaN, as without a clamp.
"""

from atlas_lab.kernels import lang as L

KINDS = ("silu", "gelu_tanh")
LOG2_E = 1.4426950408889634
# 0.5·(1 + tanh(z)) = sigmoid(2z), z = sqrt(2/pi)·(g + 0.044715·g³)
TWICE, CUBIC = 1.5957691216057308, 0.044715


def kind_of(activation: str, limit: float = 0.0) -> int:
    """The kernels' argument `kind`: the activation's index in KINDS, above it the limit's BF16 bits; 0 for none."""
    return L.bf16x2(limit, limit) & 0xFFFF0000 | KINDS.index(activation)


@L.device
def gated(g, u, kind):
    """silu(g)·u, or for kind 1 gelu(g)·u in its tanh form, of float32: g·sigmoid(z)·u by ex2 and rcp, a few ulp of
    float32 from the exact value, with no product left to contract."""
    z = g
    if kind == 1:
        z = L.mul_rn(L.f32(TWICE), L.fma_rn(L.mul_rn(L.f32(CUBIC), g), L.mul_rn(g, g), g))
    down = L.exp2_approx(L.mul_rn(z, L.f32(-LOG2_E)))
    return L.mul_rn(L.mul_rn(g, L.rcp_approx(L.add_rn(L.f32(1), down))), u)


@L.device
def clamped(g, u, kind):
    """`gated` of g and u clamped at the limit that `kind` holds."""
    limit = L.bits_f32(L.u32(kind & 0xFFFF0000))
    within = L.max_nan_f32(L.min_nan_f32(u, limit), -limit)
    return gated(L.min_nan_f32(g, limit), within, L.i32(kind & 0xFFFF))


def gated_of(clamp: bool):
    """The device function `(g, u, kind)`: a kernel without `clamp` knows of no limit, and is the smaller for it."""
    return clamped if clamp else gated

"""The gated product of a feed-forward block: activation(g) times u. One function, wherever it is computed."""

from atlas_lab.kernels import lang as L

KINDS = ("silu", "gelu_tanh")
LOG2_E = 1.4426950408889634
# 0.5·(1 + tanh(z)) = sigmoid(2z), z = sqrt(2/pi)·(g + 0.044715·g³)
TWICE, CUBIC = 1.5957691216057308, 0.044715


@L.device
def gated(g, u, kind):
    """silu(g)·u, or for kind 1 gelu(g)·u in its tanh form, of float32: g·sigmoid(z)·u by ex2 and rcp, a few ulp of
    float32 from the exact value, with no product left to contract."""
    z = g
    if kind == 1:
        z = L.mul_rn(L.f32(TWICE), L.fma_rn(L.mul_rn(L.f32(CUBIC), g), L.mul_rn(g, g), g))
    down = L.exp2_approx(L.mul_rn(z, L.f32(-LOG2_E)))
    return L.mul_rn(L.mul_rn(g, L.rcp_approx(L.add_rn(L.f32(1), down))), u)

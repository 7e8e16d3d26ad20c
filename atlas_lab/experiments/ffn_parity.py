"""What a gated feed-forward block should have computed, stage by stage: each against float64 of what it read.

A bound on y from x alone would add up the roundings of g, u and the gated product over all of K, and notice nothing.
So what lies between is judged too: gate·x and up·x, or their gated product where only that is stored, then y against
the product of down and what the block itself stored before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np

from atlas_lab.blocks.ffn import DOWN, served, stages
from atlas_lab.core.arm import Arm
from atlas_lab.core.context import ModelDims
from atlas_lab.core.launch import Program
from atlas_lab.core.numbers import OUTPUTS, Rounded
from atlas_lab.core.route import Assignment, Route
from atlas_lab.experiments import oracle
from atlas_lab.experiments.results import ParityResult
from atlas_lab.formats.dtypes import dtype
from atlas_lab.runtime.load import Read

STEEPEST = 1.13  # the largest slope of silu (1.10) and gelu (1.13)
FEW_ULP = 2.0**-20  # of float32, for exp and reciprocal by approximation
TINY = float(np.finfo(np.float32).tiny)
GROUP = 128  # of K that are quantized by themselves, at most
MOST = 12  # of them whose BF16 may be one of two
NOTHING = 2.0**-100  # beside what a group's scale is made of


@dataclass(frozen=True)
class Values:
    """float64 `[M, N]` and how far from it a computation may be."""

    values: np.ndarray
    bound: np.ndarray


Added = Callable[[str, np.ndarray], Values | None]
"""Of a role and the x of its projection, `[M, K]`: what is added to their product."""


def clamped(g: np.ndarray, u: np.ndarray, limit: float) -> tuple[np.ndarray, np.ndarray]:
    """Float64 g and u as a gated product with a limit takes them: rounded to BF16, it bounds g from above and u on both
    sides; a NaN stays one. 0 is no limit."""
    if not limit:
        return g, u
    most = float(np.array(limit, dtype("bf16").numpy))
    return np.minimum(g, most), np.clip(u, -most, most)  # both keep a NaN


def activated(g: np.ndarray, kind: str) -> np.ndarray:
    """silu or tanh-gelu of float64."""
    with np.errstate(over="ignore"):
        out: np.ndarray = g / (1 + np.exp(-_exponent(g, kind)))
    return out


def product_of(g: np.ndarray, u: np.ndarray, dims: ModelDims) -> np.ndarray:
    """The gated product of float64 g and u, nothing rounded but the limit."""
    g, u = clamped(g, u, dims.activation_limit)
    h: np.ndarray = activated(g, dims.activation) * u
    return h


def _exponent(g: np.ndarray, kind: str) -> np.ndarray:
    return g if kind == "silu" else 2 * np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)


def gated_product(g: np.ndarray, u: np.ndarray, kind: str, limit: float = 0.0) -> Values:
    """activation(g)·u of float64 g and u as they were stored, clamped where there is a limit, rounded to BF16; the
    bound is 0 unless the value lies so near the middle of two BF16 numbers that float32 may round it to the other."""
    g, u = clamped(g, u, limit)
    exact, bf16 = activated(g, kind) * u, dtype("bf16").numpy
    slack = FEW_ULP * (1 + np.abs(_exponent(g, kind))) * np.abs(exact)
    low, middle, high = ((exact + s * slack).astype(bf16).astype(np.float64) for s in (-1, 0, 1))
    return Values(middle, np.maximum(np.abs(high - middle), np.abs(middle - low)) + TINY * (1 + np.abs(g * u)))


def gated_product_near(g: Values, u: Values, kind: str, limit: float = 0.0) -> Values:
    """activation(g)·u in BF16 of g and u that nobody stored: known within their bounds, which a clamp leaves as wide at
    the most."""
    within = clamped(g.values, u.values, limit)
    g, u = Values(within[0], g.bound), Values(within[1], u.bound)
    act = activated(g.values, kind)
    exact = act * u.values
    bound = STEEPEST * g.bound * (np.abs(u.values) + u.bound) + np.abs(act) * u.bound
    relative = FEW_ULP * (1 + np.abs(_exponent(g.values, kind))) + OUTPUTS["bf16"]
    return Values(exact, bound + relative * (np.abs(exact) + bound) + TINY)


def quantized_near(h: Values, quantized: Callable[[np.ndarray], np.ndarray]) -> Values:
    """What `quantized` makes of BF16 h that nobody stored: of the nearest, and how far from that each element is at
    most, whichever BF16 within their bounds the elements of its `GROUP` are.

    Raises OracleError where more than `MOST` of a group could be one of two.
    """
    m, k = h.values.shape
    whole = np.pad(np.stack([h.values, h.bound]), ((0, 0), (0, 0), (0, -k % GROUP))).reshape(2, -1, GROUP)
    values, ends = whole[0], np.stack([whole[0] - whole[1], whole[0] + whole[1]]).astype(dtype("bf16").numpy)
    unsure = (ends[0] != ends[1]) & (whole[1] > NOTHING)
    count, off = unsure.sum(axis=1), np.zeros(values.shape)
    if count.max() > MOST:
        raise oracle.OracleError(f"h: {count.max()} of {GROUP} of K lie between two BF16, expected {MOST} or fewer")
    for c in np.unique(count[count > 0]):
        groups = np.flatnonzero(count == c)
        at = np.arange(len(groups))[:, None], np.nonzero(unsure[groups])[1].reshape(-1, c)
        given, plain = values[groups], quantized(values[groups])
        for which in product((0, 1), repeat=c):
            given[at] = ends[which, groups[:, None], at[1]]
            off[groups] = np.maximum(off[groups], np.abs(quantized(given) - plain))
    return Values(quantized(h.values), off.reshape(m, -1)[:, :k])


def judged(stage: str, found: np.ndarray, expected: Values) -> ParityResult:
    """A stage's output against what it should be."""
    with np.errstate(invalid="ignore"):
        error = np.abs(found.astype(np.float64) - expected.values)
    ratio = np.where(np.isnan(error), np.inf, error) / np.maximum(expected.bound, TINY)
    m, n = (int(i) for i in np.unravel_index(int(ratio.argmax()), ratio.shape))
    wrong = int((ratio > 1).sum())
    said = (
        f"{wrong} of {ratio.size} outputs of {stage} are outside the tolerance, worst [{m}, {n}]: found "
        f"{float(found[m, n]):.6g}, expected {expected.values[m, n]:.6g} within {expected.bound[m, n]:.3g}"
    )
    return ParityResult(
        passed=not wrong,
        worst=float(ratio[m, n]),
        row=m,
        column=n,
        error=float(error[m, n]),
        bound=float(expected.bound[m, n]),
        reason=said if wrong else "",
    )


class FfnParity:
    """Judges programs of one block whose weights `read` gives; what is computed of them is kept until other arms serve
    it.

    Raises LoadError, OracleError for weights without a reference, for an arm that is not of `Rounded` tolerance or
    whose product only its `reference` knows, and as `quantized_near`.
    """

    def __init__(self, gate_up: Route, down: Route, arms: Mapping[str, Arm], read: Read) -> None:
        self.gate_up, self.down, self.arms = gate_up, down, arms
        self._read = read
        self._arms: tuple[str, ...] = ()
        self._made: dict[tuple[str, ...], tuple[oracle.Arrays, np.ndarray]] = {}
        self._products: dict[tuple[tuple[str, ...], bytes], Values] = {}

    def parity(
        self,
        program: Program,
        m: int,
        dims: ModelDims,
        x: np.ndarray,
        output: Callable[[str], np.ndarray],
        added: Added = lambda role, x: None,
    ) -> ParityResult:
        """Every stage of a program for x BF16 `[m, hidden]`: the first that is wrong, else y. `dims` say the
        activation and its limit; `output(name)` is what it stored in the last buffer of that name (`h`, `gu`, `g`,
        `u`, `y`), BF16; `added(role, x)` what is added to a projection's product, if anything, which may be rounded
        before."""
        kind, limit = dims.activation, dims.activation_limit
        stored = {t.name.rpartition("/")[2] for t in stages(program)}
        assignments = self._served(m)
        width = self.down.site.k
        products = [self._with(self._product(a, x), a, x, added) for a in assignments[:-1]]
        near = np.concatenate([p.values for p in products], axis=1)
        bound = np.concatenate([p.bound for p in products], axis=1)
        results = []
        if "h" in stored and not stored & {"gu", "g"}:
            g, u = (Values(near[:, c], bound[:, c]) for c in (slice(width), slice(width, None)))
            h = output("h")
            results.append(judged("h", h, gated_product_near(g, u, kind, limit)))
        else:
            gu = output("gu") if "gu" in stored else np.concatenate([output("g"), output("u")], axis=1)
            results.append(judged("gate and up", gu, Values(near, bound)))
            wide = gu.astype(np.float64)
            made = gated_product(wide[:, :width], wide[:, width:], kind, limit)
            if "h" in stored:
                h = output("h")
                results.append(judged("h", h, made))
        if "h" in stored:
            made = Values(h.astype(np.float64), np.zeros(h.shape))
        y = self._with(self._down(assignments[-1], made), assignments[-1], made.values, added)
        results.append(judged("y", output("y"), y))
        return next((r for r in results if not r.passed), results[-1])

    def _with(self, made: Values, a: Assignment, x: np.ndarray, added: Added) -> Values:
        """The product of x by an assignment's projections plus what is added to them, that sum rounded too."""
        parts, start = [], 0
        for role in a.roles:
            end = start + (self.down if role == DOWN else self.gate_up).site[role].n
            of_role, more = Values(made.values[:, start:end], made.bound[:, start:end]), added(role, x)
            if more is not None:
                total, bound = of_role.values + more.values, of_role.bound + more.bound
                of_role = Values(total, bound + OUTPUTS["bf16"] * (np.abs(total) + bound))
            parts.append(of_role)
            start = end
        return Values(*(np.concatenate([getattr(p, f) for p in parts], axis=1) for f in ("values", "bound")))

    def _served(self, m: int) -> tuple[Assignment, ...]:
        found = served(self.gate_up, self.down, m)
        arms = tuple(a.arm for a in found)
        if arms != self._arms:
            self._arms, self._made, self._products = arms, {}, {}
        return found

    def _weights(self, a: Assignment) -> tuple[oracle.Arrays, np.ndarray]:
        """Those of an assignment, as declared, and float64 `[N, K]`."""
        if a.roles not in self._made:
            site = self.down.site if a.roles == (DOWN,) else self.gate_up.site
            arrays = oracle.declared(a.declarations, self._read)
            n = sum(site[role].n for role in a.roles)
            self._made[a.roles] = arrays, oracle.dequantized(a.declarations, arrays, n, site.k)
        return self._made[a.roles]

    def _tolerance(self, a: Assignment) -> Rounded:
        arm = self.arms[a.arm]
        if not isinstance(arm.tolerance, Rounded) or arm.reference is not None or arm.activation != "bf16":
            said = "expected a product of BF16, or of what `quantized` says, with a bound on its rounding"
            raise oracle.OracleError(f"arm {arm.name}: {said}")
        return arm.tolerance

    def _product(self, a: Assignment, x: np.ndarray) -> Values:
        key = (a.roles, x.tobytes())
        if key not in self._products:
            tolerance, (arrays, w) = self._tolerance(a), self._weights(a)
            made = oracle.product(oracle.multiplied(self.arms[a.arm], x.astype(np.float64), arrays), w)
            bound = tolerance.bound(made.values, made.magnitude, x.shape[1])
            self._products[key] = Values(made.values, bound)
        return self._products[key]

    def _down(self, a: Assignment, h: Values) -> Values:
        arm, tolerance, (arrays, w) = self.arms[a.arm], self._tolerance(a), self._weights(a)
        if arm.quantized is not None:
            h = quantized_near(h, lambda x: oracle.multiplied(arm, x, arrays))
        made = oracle.product(h.values, w)
        off = oracle.product(h.bound, w).magnitude
        bound = tolerance.bound(made.values, made.magnitude + off, h.values.shape[1])
        return Values(made.values, bound + off * (1 + OUTPUTS["bf16"]))

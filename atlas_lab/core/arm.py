"""An arm: one way of computing a projection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atlas_lab.core.call import Call
from atlas_lab.core.context import Context
from atlas_lab.core.declare import Declaration
from atlas_lab.core.enqueued import Enqueued
from atlas_lab.core.library import LibraryCall
from atlas_lab.core.numbers import Accuracy, Exact, ReductionClass, Rounded
from atlas_lab.core.projection import Projection
from atlas_lab.core.rows import Rows
from atlas_lab.core.target import Target
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.tuning import Setting
from atlas_lab.core.verdict import Verdict, yes
from atlas_lab.kernels.lang import Kernel


class Arm:
    """Subclass it; one class may have several instances that differ in `name`.

    An arm describes and never acts: no stream, no device, no memory. Its methods are pure functions of their
    arguments, called while planning on machines with no GPU.
    """

    name: str = ""
    """Unique among all arms of a run."""
    roles: Sequence[str] = ()
    """Role patterns (`ffn.*`). A pattern with `+` (`ffn.gate+ffn.up`) is served as a group, in one call."""
    rows: Rows
    """Token rows M the kernels serve."""
    source: str = ""
    """Family of the stored format it starts from: `bf16`, `fp8`, `nvfp4`."""
    activation: str = "bf16"
    """Format of x that the kernels read."""
    kernels: Sequence[Kernel] = ()
    """The kernels `lower` may launch; their hardware needs are checked before `eligible`."""
    tolerance: Rounded | Exact
    """The kernel against its own arithmetic."""
    accuracy: Accuracy | None = None
    """Set by arms that change numbers; such an arm runs only where an order or a pin names it."""
    reduction_class: ReductionClass | None = None
    """Set by arms that promise equal bits across M to others of the class."""
    epilogues: Sequence[str] = ()
    """Parts of `Epilogue` that the kernels fuse."""
    quantizes: Sequence[str] = ()
    """Formats that they quantize y to, where `quantize` is one of the parts."""
    reads: Sequence[str] = ()
    """Formats of x, beside `activation`, that a call may hand it: what launches before quantized already."""
    prologues: Sequence[str] = ()
    """Activations whose gated product the kernels compute as they read x (`Call.prologue`); and `limit` where they
    clamp what goes into it."""
    optional_kernels: Sequence[Kernel] = ()
    """More kernels that `lower` may launch, for calls that ask for more than a product and for settings that not all
    cards have; the arm may serve cards that lack what they need."""
    library_calls: Sequence[LibraryCall] = ()
    """The calls of libraries that `lower` may make, checked as `kernels` are. An arm that has any runs only where an
    order or a pin names it: installing a library changes no route."""
    first_on: Sequence[str] = ()
    """Architectures on which it stands before all arms of the built-in order that are not first there: where arms that
    share a copy of the weights serve every M, and others would keep a second one."""
    instead: str = ""
    """The arm that computes the same numbers on cards that lack what the kernels need; a refusal names it."""
    version: str = "1"
    """Changed when the numbers or the layout change; part of a route's hash."""

    def eligible(self, p: Any, ctx: Context) -> Verdict:
        """May this arm serve projection (or, for a group pattern, site) `p`? Pure; sees no weight values."""
        return yes()

    def finalize(self, p: Any, ctx: Context) -> Sequence[Declaration]:
        """What it reads in place and what it builds at load time."""
        raise NotImplementedError

    def settings(self, n: int, k: int, target: Target) -> Sequence[Setting]:
        """Every legal choice of its compile-time parameters for a weight `[n, k]` on a card, best by the chip model
        (`chip.ranked`) first; () where there is nothing to tune. Never a function of M. `lower` asks
        `tuning.chosen(self, c.n, c.k, c.context)` which one to run."""
        return ()

    def scratch(self, call: Call) -> dict[str, Tensor]:
        """Temporaries of one call, by name."""
        return {}

    def lower(self, call: Call) -> Sequence[Enqueued]:
        """The launches of one call, and calls of libraries among them."""
        raise NotImplementedError

    # reference(call, x, weights) -> float64 [M, N]: defined only by an arm whose arithmetic is not "dequantize the
    # weights, multiply in float64".
    reference: Any = None

    # quantized(x, weights) -> float64 [M, K]: defined, in place of `reference`, by an arm that multiplies weights by a
    # quantized x: what that stands for. With `prologues` each 128 of K, from a multiple of 128 on, by themselves.
    quantized: Any = None

    # terms(weights) -> float64 [N, K]: defined by an arm that makes a weight of terms which may cancel; the sum of
    # their magnitudes, which its rounding errors scale with where others' scale with |W|.
    terms: Any = None

    def __repr__(self) -> str:
        return f"<arm {self.name}>"


def kernels_of(arm: Arm) -> tuple[Kernel, ...]:
    """Every kernel an arm may launch, each once, the optional ones last."""
    return tuple(dict.fromkeys((*arm.kernels, *arm.optional_kernels)))


def required(arm: Arm) -> tuple[Kernel | LibraryCall, ...]:
    """What an arm's calls need the hardware of, whatever else they ask for."""
    return (*arm.kernels, *arm.library_calls)


def epilogue_of(kernel: Kernel) -> str | None:
    """The compile-time parameter `epilogue` of a kernel that finishes a product otherwise than by storing it: only
    calls whose epilogue asks for that launch it."""
    found: str | None = dict(kernel.spec.parameters).get("epilogue")
    return found


def is_group(pattern: str) -> bool:
    return "+" in pattern


def projections_of(p: Any) -> tuple[Projection, ...]:
    """The projections of what an arm was handed: a site's, or the one itself."""
    return (p,) if isinstance(p, Projection) else tuple(p.projections)

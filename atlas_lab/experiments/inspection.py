"""An arm's kernels as machine code: which run at a shape, what each takes of an SM, and what it is made of."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from atlas_lab.arms.wgmma.grouped_x import ALIGNED, GROUPED, grouped
from atlas_lab.checkpoint.qwen35 import MODULES
from atlas_lab.core.arm import Arm
from atlas_lab.core.call import Call, Epilogue, Operand
from atlas_lab.core.chip import WARP, limits
from atlas_lab.core.context import Context, ModelDims, Pin, Preferences
from atlas_lab.core.launch import Launch
from atlas_lab.core.program import program_of
from atlas_lab.core.projection import Projection, Site, WeightSource
from atlas_lab.core.registry import Registry
from atlas_lab.core.rows import Rows
from atlas_lab.core.target import Target
from atlas_lab.core.tensor import Tensor, round_up
from atlas_lab.core.tuned_file import shipped_table
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.plan import plan_variant
from atlas_lab.formats.base import Format
from atlas_lab.kernels.activation.gated import KINDS
from atlas_lab.kernels.lang.compile import Compiled

ROWS = (1, 16, 64, 4096)
LIMIT = 7.0  # of clamped inputs: any, it is an argument


@dataclass(frozen=True)
class Occupancy:
    """Blocks of a launch that an SM holds at once, the share of its threads they are, and what limits them."""

    blocks: int
    share: float
    limit: str

    def __str__(self) -> str:
        return f"{self.blocks} blocks, {100 * self.share:.0f} % ({self.limit})"


def occupancy(made: Compiled, threads: int, dynamic_shared: int, target: Target) -> Occupancy:
    """How many blocks an SM of the target holds; the cluster and launch-time choices of shared memory are left out."""
    blocks_by = limits(made.registers, threads, made.shared + dynamic_shared, target)
    limit = min(blocks_by, key=lambda name: blocks_by[name])
    blocks = blocks_by[limit]
    held = blocks * round_up(threads, WARP)
    return Occupancy(blocks, held / target.threads_per_sm, limit)


@dataclass(frozen=True)
class Run:
    """A launch of an arm at one shape, and the row counts that make the same launch but for its grid."""

    launch: Launch
    rows: tuple[int, ...]


def launches(registry: Registry, arm: Arm, target: Target, n: int, k: int, rows: Sequence[int]) -> list[Run]:
    """The launches of an arm on a weight `[n, k]` for these row counts (those it serves), those with a gated product in
    its epilogue or its input, with clamped inputs and without, with addends and with y quantized, where it fuses that;
    equal kernels once.

    Raises ConfigError where the arm refuses the shape, serves none of the rows, or launches no kernel of its own.
    """
    if not arm.kernels:
        called = ", ".join(f"{c.library} ({c.name})" for c in arm.library_calls)
        raise ConfigError(f"inspect {arm.name}: found a library call, {called}, expected kernels of its own to compile")
    served = [m for m in rows if m in arm.rows] or ([arm.rows.first] if tuple(rows) == ROWS else [])
    if not served:
        raise ConfigError(f"inspect {arm.name}: found M {', '.join(map(str, rows))}, expected {arm.rows}")
    context = Context(
        target=target,
        dims=ModelDims("inspect", hidden=k, intermediate=n, layers=1),
        preferences=Preferences(tuple(Pin(role, arm.name, origin="inspect") for role in _roles(arm))),
        rows=tuple(Rows(m, m) for m in served),
        table=shipped_table(target.name),
    )
    site = _site(registry, arm, n, k, context)
    plan = plan_variant(arm.name, "", [site], context, served, registry)
    found: dict[tuple[object, ...], list[int]] = {}
    first: dict[tuple[object, ...], Launch] = {}
    for step in plan.steps:
        for x in (x for c in _calls(arm, step.call) for x in program_of(arm, c).launches):
            if not isinstance(x, Launch):
                continue
            key = (x.kernel, x.block, x.shared)
            first.setdefault(key, x)
            found.setdefault(key, []).append(step.m)
    return [Run(first[key], tuple(dict.fromkeys(ms))) for key, ms in found.items()]


def _calls(arm: Arm, plain: Call) -> list[Call]:
    """A call, and what else the arm can be asked for instead."""
    out, limits = [plain], (0.0, LIMIT)
    m, n, k = plain.m, plain.n, plain.k
    if "activation" in arm.epilogues and len(plain.roles) == 2:
        y = Operand(Tensor(plain.y.data.dtype, (m, n // 2), plain.y.data.name))
        made = [Epilogue(activation=KINDS[0], limit=x) for x in limits if not x or "limit" in arm.epilogues]
        out += [replace(plain, y=y, epilogue=e) for e in made]
    if "residual" in arm.epilogues:
        out.append(replace(plain, epilogue=Epilogue(residual=Tensor("bf16", (m, n), "inspect/residual"))))
    if GROUPED in arm.quantizes and n % ALIGNED == 0:
        of_groups = grouped(plain.y.data.name, m, n)
        out += [replace(c, y=of_groups, epilogue=replace(c.epilogue, quantize=GROUPED)) for c in (plain, out[-1])]
    if KINDS[0] in arm.prologues:
        x = Operand(Tensor(plain.x.data.dtype, (m, 2 * k), plain.x.data.name))
        made_of = [limit for limit in limits if not limit or "limit" in arm.prologues]
        out += [replace(plain, x=x, prologue=KINDS[0], prologue_limit=limit) for limit in made_of]
    return out


def _roles(arm: Arm) -> tuple[str, ...]:
    pattern = arm.roles[0]
    roles = []
    for part in pattern.split("+"):
        roles.append(next((r for r in ("ffn.gate", *MODULES) if fnmatchcase(r, part) and r not in roles), part))
    return tuple(roles)


def _site(registry: Registry, arm: Arm, n: int, k: int, context: Context) -> Site:
    """Weights in the first format of the family the arm starts from that it takes, or in the first of all."""
    mine = [f for f in registry.formats.values() if f.family == (arm.source or "bf16")]
    if not mine:
        raise ConfigError(f"inspect {arm.name}: found no format of the family {arm.source!r} that it starts from")
    sites = [Site(tuple(_projection(role, n, k, f) for role in _roles(arm))) for f in mine]
    taken = (s for s in sites if arm.eligible(s.projections[0] if len(s.projections) == 1 else s, context))
    return next(taken, sites[0])


def _projection(role: str, n: int, k: int, form: Format) -> Projection:
    fields = {f: Tensor(s.dtype, s.shape, f"inspect.{role}.{f}") for f, s in form.tensors(n, k).items()}
    return Projection(0, role, n, k, WeightSource(form.name, form.family, form.geometry, tuple(fields.items())))


_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)


def instructions(sass: str) -> Counter[str]:
    """Machine instructions by name without modifiers (`LDG`, `HMMA`), as they stand in the code, not as they run."""
    return Counter(_INSTRUCTION.findall(sass))


def target_of(targets: Iterable[Target], arch: str) -> Target | None:
    """The first target of an architecture."""
    return next((t for t in targets if t.arch == arch), None)

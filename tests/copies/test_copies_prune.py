"""Residency by liveness: whatever arms, orders, pins and levers meet, a tensor is there if and only if a route binds
it, from before it is needed; and the loader does what the forecast says, to the byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from copy_arms import FFN, NAMES, QKV, catalog, context, site
from copy_cases import Files
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_lab.core.context import Context, Pin
from atlas_lab.core.declare import Bind, Derived
from atlas_lab.core.levers import Levers
from atlas_lab.core.projection import Site
from atlas_lab.core.residency import Alloc, Build, Check, Free, LoadPlan, Upload, held_bytes, load_plan
from atlas_lab.core.resolve import resolve
from atlas_lab.core.route import Route, RouteError
from atlas_lab.core.rows import Rows, rows, rows_from
from atlas_lab.core.tensor import Tensor, round_up
from atlas_lab.runtime.build import build
from atlas_lab.runtime.device import open_device
from atlas_lab.runtime.load import execute

FORMATS = ("nvfp4", "nvfp4_ct", "fp8", "fp8_tensor", "bf16")
SHAPES = ((128, 256), (48, 128), (16, 32))


@dataclass
class World:
    sites: list[Site]
    context: Context

    def routes(self) -> list[Route]:
        return [resolve(s, self.context, catalog()) for s in self.sites]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Layers of sites in several formats, served by whatever random orders, pins and levers say."""
    sites = []
    for layer in draw(st.permutations(range(draw(st.integers(1, 3))))):
        for roles in (FFN, ("ffn.down",), QKV):
            if draw(st.booleans()) or roles == FFN:
                n, k = draw(st.sampled_from(SHAPES))
                formats = draw(st.lists(st.sampled_from(FORMATS), min_size=1, max_size=len(roles)))
                sites.append(site(layer, roles, n, k, *formats))
    if draw(st.booleans()):  # a weight that two layers share
        tied = draw(st.sampled_from(sites))
        sites.append(Site(tuple(replace(p, layer=7) for p in tied.projections)))
    orders = []
    for served in draw(st.lists(st.sampled_from([rows(1), rows(2, 16), rows_from(17)]), min_size=1, max_size=3)):
        orders.append((served, draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1, max_size=5))))
    pins = []
    for s in sites:
        if draw(st.integers(0, 4)) == 0:
            pin = Pin(s.roles[0], draw(st.sampled_from(NAMES)), s.layer)
            try:
                resolve(s, context(pins=[pin]), catalog())
            except RouteError:
                continue
            pins.append(pin)
    served = draw(st.sampled_from([(rows(1, 64),), (rows(1),), (rows(1), rows(32)), (Rows(1, 16384),)]))
    levers = Levers(graph=draw(st.booleans()))
    return World(sites, context(*served, orders=orders, pins=pins, levers=levers))


def routes_of(world: World) -> list[Route]:
    """Its routes; a pin that serves none of the run's rows is dropped."""
    try:
        return world.routes()
    except RouteError:
        world.context = context(*world.context.rows, levers=world.context.levers)
        return world.routes()


def simulate(plan: LoadPlan) -> tuple[dict[str, int], int]:
    """Live buffers and the peak after every step, each checked: nothing is used that is not there, filled and large
    enough; nothing taken, filled or freed twice; nothing freed before its last use."""
    live: dict[str, int] = {}
    filled: Counter[str] = Counter()
    seen: set[Tensor] = set()
    peak = 0
    for s in plan.steps:
        if isinstance(s, Check):
            assert not peak, "values are checked before anything is allocated"
        elif isinstance(s, Alloc):
            assert s.buffer not in live
            assert s.bytes % 256 == 0
            live[s.buffer] = s.bytes
            peak = max(peak, sum(live.values()))
        elif isinstance(s, Upload):
            assert s.tensor not in seen, "uploaded twice"
            assert s.tensor.offset + s.tensor.bytes <= live[s.tensor.name]
            seen.add(s.tensor)
            filled[s.tensor.name] += 1
        elif isinstance(s, Build):
            assert s.derived is s.derived.whole
            for w in s.derived.weights if s.derived.device else ():
                for t in w.tensors.values():
                    assert t.name in live, "a source is freed before its build"
                    assert t in seen
            for t in s.derived.tensors.values():
                assert t.bytes <= live[t.name]
                assert not filled[t.name], "built twice"
                filled[t.name] += 1
        elif isinstance(s, Free):
            assert filled[s.buffer], "freed unused"
            del live[s.buffer]
            del filled[s.buffer]
            seen = {t for t in seen if t.name != s.buffer}
    assert set(live) == {name for name, count in filled.items() if count}
    return live, peak


@settings(max_examples=150)
@given(worlds())
def test_what_stays_is_what_routes_bind(world: World) -> None:
    routes = routes_of(world)
    plan = load_plan(routes)
    live, peak = simulate(plan)
    declared = [d for r in routes for a in r.assignments for d in a.declarations]
    assert live == {name: round_up(size) for name, size in held_bytes(declared).items()}
    assert plan.peak == peak
    assert plan.steady == sum(live.values())
    for d in declared:
        for t in d.tensors.values():
            assert t.name in live, "a view without its parent"
            assert t.offset + t.bytes <= live[t.name]
    bound = {t.name for d in declared if isinstance(d, Bind) for t in d.tensors.values()}
    stored = {t.name for r in routes for p in r.site.projections for t in p.weight.tensors.values()}
    assert stored & set(live) == bound
    assert {x.tensor.name for x in plan.pruned} == stored - bound
    _about_the_report(plan, routes, declared)
    assert load_plan(routes) == plan


def _about_the_report(plan: LoadPlan, routes: Sequence[Route], declared: Sequence[object]) -> None:
    report = plan.report()
    assert report.kept == plan.ledger()
    assert sum(r.count for r in report.freed) == sum(isinstance(s, Free) for s in plan.steps)
    assert all(r.label.startswith("staged ") for r in report.freed)
    built = {d.identity for d in declared if isinstance(d, Derived)}
    could = {
        d.identity: d.whole
        for r in routes
        for c in r.considered
        if c.verdict and c.rank >= 0
        for d in c.declarations
        if isinstance(d, Derived)
    }
    spare = [t for i, d in could.items() if i not in built for t in d.tensors.values()]
    assert sum(r.bytes for r in report.not_built) == sum(round_up(t.bytes) for t in spare)
    assert len(list(report.lines())) == len(report.kept) + len(report.freed) + len(report.not_built)


@settings(max_examples=40)
@given(worlds(), st.integers(0, 100))
def test_the_ledger_is_the_forecast_and_every_byte_is_right(world: World, seed: int) -> None:
    routes = routes_of(world)
    plan = load_plan(routes)
    files = Files(*(p for s in world.sites for p in s.projections), seed=seed)
    before = {name: a.tobytes() for name, a in files.arrays.items()}
    device = open_device("interpreter")
    with execute(plan, files.read, lambda w, label: None, device) as loaded:
        assert loaded.rows() == device.ledger.rows() == plan.ledger()
        assert loaded.ledger.held == device.ledger.held == plan.steady
        assert loaded.ledger.peak == device.ledger.peak == plan.peak
        assert loaded.report() == plan.report()
        for d in (d for r in routes for d in r.declarations):
            expected = [(t, files.read(t)) for t in d.tensors.values()] if isinstance(d, Bind) else []
            if isinstance(d, Derived):
                expected = build(d, "test", files.read)
            for t, array in expected:
                found = device.download(loaded[t.name], t.dtype, t.shape, t.offset)
                assert found.tobytes() == array.tobytes(), t
    device.ledger.check_empty()
    assert before == {name: a.tobytes() for name, a in files.arrays.items()}


def test_memory_and_bits_are_the_same_wherever_things_are_built() -> None:
    kinds = [(0, FFN, 128, "nvfp4"), (0, ("ffn.down",), 32, "nvfp4"), (1, QKV, 16, "nvfp4_ct")]
    sites = [site(layer, roles, n, 128, fmt) for layer, roles, n, fmt in kinds]
    ctx = context(rows(1, 64), orders=[(rows_from(2), ["fused", "mmq"]), (rows(1), ["lanes"])])
    plan = load_plan([resolve(s, ctx, catalog()) for s in sites])
    files = Files(*(p for s in sites for p in s.projections))
    found = []
    for builds in ("host", "device"):
        device = open_device("interpreter")
        with execute(plan, files.read, lambda w, label: None, device, builds=builds) as loaded:
            assert (loaded.rows(), loaded.ledger.peak) == (plan.ledger(), plan.peak)
            assert loaded.report() == plan.report()
            assert {r.label for r in loaded.report().freed} == {"staged nvfp4", "staged nvfp4_ct"}
            found.append({n: device.download(b, "u8", (b.bytes,)).tobytes() for n, b in loaded.items()})
    assert found[0] == found[1]
    assert len(found[0]) == sum(r.count for r in plan.ledger())

"""Our own figures: arms at full size against their peers and the read kernel, alternated in one run on one card."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from atlas_lab import checkpoint
from atlas_lab.core.context import Context, Pin, Preferences
from atlas_lab.core.registry import Registry
from atlas_lab.core.rows import Rows
from atlas_lab.core.target import Target
from atlas_lab.experiments import bench_load, peers
from atlas_lab.experiments.ab import Notify, machine, silent, tool
from atlas_lab.experiments.bench_results import BenchCell, BenchResult, Must, PeerResult, measured, relative
from atlas_lab.experiments.cells import launch_result
from atlas_lab.experiments.errors import ConfigError, sentence
from atlas_lab.experiments.numbers import Bench, Judge, Products, activations, digest, outputs
from atlas_lab.experiments.plan import Step, VariantPlan, plan_variant
from atlas_lab.experiments.reference import Reference
from atlas_lab.experiments.settings import Said, levers_for
from atlas_lab.experiments.suites import BenchCase
from atlas_lab.experiments.timed import floor_of, rotated
from atlas_lab.kernels.lang import cache
from atlas_lab.runtime import probe, timing
from atlas_lab.runtime.device import Device, open_device
from atlas_lab.runtime.driver import INSTEAD, missing_gpu

ROUNDS = 20
OURS, READ, PEER = "ours", "read", "peer"


def run_bench(
    suite: str,
    cases: Sequence[BenchCase],
    registry: Registry,
    said: Said,
    *,
    with_peers: bool,
    seed: int,
    command: str,
    result: BenchResult,
    notify: Notify = silent,
) -> BenchResult:
    """Measure `cases` into `result`, whose status is `partial` until the end.

    Raises ConfigError without a GPU: figures are measured or they are not figures.
    """
    if said.device == "interpreter":
        raise ConfigError("bench: found --device interpreter, expected a GPU: the interpreter's times mean nothing")
    missing = missing_gpu()
    if missing:
        raise ConfigError(f"bench: no speed is measured without a GPU: {missing.removesuffix(', ' + INSTEAD)}")
    with open_device("cuda") as device:
        result.suite, result.command, result.seed = suite, command, seed
        result.tool, result.machine, result.device = tool(), machine(), device.describe()
        target = device.target
        result.target = {"name": target.name, "title": target.title, "arch": target.arch}
        products: dict[Path, Products] = {}
        for done, case in enumerate(cases):
            notify(case.name, done, len(cases))
            cell = BenchCell(name=case.name, arm=case.arm, format=case.format, n=case.n, k=case.k, m=case.m)
            result.cells.append(cell)
            _case(case, cell, registry, said, device, products, with_peers, seed)
        if suite == bench_load.SUITE:
            result.cells.append(bench_load.run_load(device, seed, notify))
    result.status = "complete"
    return result


def reference_of(case: BenchCase) -> Reference:
    """Synthetic BF16 weights `[n, k]`: the gate of an FFN with these sizes."""
    s = checkpoint.sizes("qwen3.5-27b", hidden=case.k, intermediate=case.n)
    return Reference(case.name, (0,), ("ffn.gate",), seed=1, sizes=s)


def plan_of(case: BenchCase, registry: Registry, said: Said, target: Target) -> VariantPlan:
    """The case's arm pinned to its weight; raises RouteError where it is refused."""
    ref = reference_of(case)
    context = Context(
        target=target,
        dims=ref.dims,
        levers=levers_for(None, said, target),
        preferences=Preferences((Pin("ffn.gate", case.arm, origin="bench"),)),
        rows=(Rows(case.m, case.m),),
    )
    return plan_variant(case.name, case.format, ref.sites(case.format), context, [case.m], registry)


def _case(
    case: BenchCase,
    cell: BenchCell,
    registry: Registry,
    said: Said,
    device: Device,
    products: dict[Path, Products],
    with_peers: bool,
    seed: int,
) -> None:
    plan = plan_of(case, registry, said, device.target)
    (step,) = plan.steps
    ref = reference_of(case)
    folder = cache.directory()
    held, plain = ref.file(case.format, folder), ref.file("bf16", folder)
    cell.bytes, cell.flops = step.program.traffic, step.program.flops
    cell.launches = [launch_result(x) for x in step.program.launches]
    judge = Judge(registry, plan, held, products.setdefault(plain.path, Products(plain, seed)))
    before = ""
    for _, y in outputs(plan, held, device, [step.key], seed):
        if isinstance(y, Exception):
            cell.status, cell.reason = "crashed", sentence(y)
            return
        found = judge.judge(step, y, device)
        cell.parity, before = found.parity, found.digest
        cell.status, cell.reason = ("passed" if found.parity.passed else "failed"), found.parity.reason
    if cell.status == "passed":
        w = plain.store.read(step.projections[0].weight.fields[0][1].name.rpartition(".")[0] + ".weight")
        with Bench(plan, held, device) as bench:
            _time(case, cell, step, bench, judge, before, np.asarray(w), with_peers, seed)


def _time(
    case: BenchCase,
    cell: BenchCell,
    step: Step,
    bench: Bench,
    judge: Judge,
    before: str,
    w: np.ndarray,
    with_peers: bool,
    seed: int,
) -> None:
    """Ours, the read kernel over the same bytes, and the peer, in one run. `before` is the digest of the output that
    passed parity."""
    device, x = bench.device, activations(step.key, step.call.k, seed)
    with ExitStack() as stack:
        ports = bench.ports(step)
        stack.callback(bench.release)
        device.upload(ports[step.call.x.data.name], x)
        ours = timing.rotate(OURS, [bench.bind(step, ports, c) for c in rotated(bench, step, device.target.l2)])
        stack.callback(ours.keep.close)
        reader = stack.enter_context(probe.Reader(device, step.program.traffic, name=READ))
        timed = [ours, reader.timed]
        peer = None
        if with_peers and case.peer:
            peer = peers.make(case.peer, w, x, timing.rotations(w.nbytes, device.target.l2))
            timed.append(replace(peer.timed, name=PEER))
        found = timing.measure(device, timed, rounds=ROUNDS, seed=seed)
        y = step.call.y.data
        now = device.download(ports[y.name], y.dtype, y.shape)
        if digest(now) != before:  # other bits than those that passed: right, or not?
            again = judge.judge(step, now, device).parity
            if not again.passed:
                cell.status, cell.reason = "failed", f"after the timed loop: {again.reason}"
                return
        blocks = {t.name: [float(s) * 1e6 for s in found.blocks(t.name)] for t in timed}
        fill(cell, step, blocks, device.target, seed)
        if peer is not None:
            cell.peer = _peer(peer, blocks, w, x, seed)
        cell.must = musts(case, cell)


def fill(cell: BenchCell, step: Step, blocks: dict[str, list[float]], target: Target, seed: int) -> None:
    """Times, floor and share from the blocks of ours and of the read kernel."""
    cell.ours, cell.read = measured(blocks[OURS], seed), measured(blocks[READ], seed)
    cell.of_read = relative(blocks[READ], blocks[OURS], seed)
    cell.floor_us, cell.bound_by = floor_of(cell.read.median_us, step.program.launches, target)
    cell.share = cell.floor_us / cell.ours.median_us


def _peer(peer: peers.Peer, blocks: dict[str, list[float]], w: np.ndarray, x: np.ndarray, seed: int) -> PeerResult:
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    return PeerResult(
        name=peer.name,
        version=peer.version,
        kernels=list(peer.kernels),
        reason=peer.reason,
        time=measured(blocks[PEER], seed),
        rel_l2=float(np.linalg.norm(peer.output - exact) / np.linalg.norm(exact)),
        ours=relative(blocks[PEER], blocks[OURS], seed),
    )


def musts(case: BenchCase, cell: BenchCell) -> list[Must]:
    """What the case must reach, and whether it did; without a peer's time nothing is said of it."""
    out = []
    found: dict[str, tuple[float, Any]] = {
        "of_peer": (case.of_peer, cell.peer and cell.peer.ours.speed),
        "of_floor": (case.of_floor, cell.of_read and cell.of_read.speed),
    }
    for name, (limit, value) in found.items():
        if limit and value is not None:
            out.append(Must(name=name, limit=limit, found=value, passed=value >= limit))
    return out


def says_no(result: BenchResult) -> bool:
    """Whether a case failed parity, or what it must reach."""
    failed = any(c.status in ("failed", "crashed") for c in result.cells)
    return failed or any(not m.passed for c in result.cells for m in c.must)

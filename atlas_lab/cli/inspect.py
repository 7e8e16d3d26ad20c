"""`inspect`: an arm's kernels through the compiler, with no GPU."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from atlas_lab.cli.common import DONE, Common, app, verb
from atlas_lab.core.registry import Registry
from atlas_lab.core.target import Target
from atlas_lab.experiments import settings
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.inspection import ROWS, Run, instructions, launches, occupancy, target_of
from atlas_lab.experiments.report import row, table
from atlas_lab.kernels.lang import KernelError
from atlas_lab.kernels.lang.compile import architectures, check_kernel, compile_kernel, compiler_missing, ptx, sass

SHOWN = 14


@verb(app, "inspect")
def inspect(
    common: Common,
    arm: Annotated[str, typer.Argument(help="An arm's name.")],
    arch: Annotated[list[str] | None, typer.Option(help="sm_90a ...; without it, all that the kernels allow.")] = None,
    n: Annotated[int, typer.Option("-n", help="Rows of the weight.", min=1)] = 17408,
    k: Annotated[int, typer.Option("-k", help="Columns of the weight.", min=1)] = 5120,
    m: Annotated[list[int] | None, typer.Option("-m", help="Token rows; may be repeated.", min=1)] = None,
    show_ptx: Annotated[bool, typer.Option("--ptx", help="Print the PTX that is assembled.")] = False,
    show_sass: Annotated[bool, typer.Option("--sass", help="Print the machine code.")] = False,
) -> int:
    """Compile the kernels an arm launches at a shape: registers, spills, shared memory, occupancy, instructions."""
    loaded = common.load()
    registry = common.registry(loaded)
    settings.known_arm(registry, arm)
    missing = compiler_missing()
    if missing:
        raise ConfigError(f"inspect {arm}: {missing}")
    found = _rows(registry, arm, arch, n, k, tuple(m) if m else ROWS)
    if show_ptx or show_sass:
        for _, a, x, _ in found:
            show = ptx if show_ptx else sass
            common.console.print(_text(show, x, a), markup=False, soft_wrap=True)
    else:
        _print(common, found)
    answer = {"schema": "atlas-lab.inspect/1", "arm": arm, "n": n, "k": k, "kernels": [_plain(*f) for f in found]}
    common.give(json.dumps(answer, indent=1) + "\n")
    return DONE


Found = tuple[Target, str, Run, dict[str, int] | str]


def _rows(registry: Registry, name: str, archs: list[str] | None, n: int, k: int, ms: tuple[int, ...]) -> list[Found]:
    arm = registry.arm(name)
    out: list[Found] = []
    needs = [kernel.needs for kernel in arm.kernels]
    allowed = [a for a in architectures(needs[0]) if all(a in architectures(need) for need in needs)]
    for a in archs or allowed:
        target = target_of(registry.targets.values(), a)
        if target is None:
            known = ", ".join(dict.fromkeys(t.arch for t in registry.targets.values()))
            raise ConfigError(f"--arch {a}: found no target of it, expected one of {known}")
        for x in launches(registry, arm, target, n, k, ms):
            try:
                compile_kernel(x.launch.kernel, a)
                counts: dict[str, int] | str = dict(instructions(sass(x.launch.kernel, a)).most_common())
            except KernelError as e:
                if "nvdisasm" not in str(e):
                    raise ConfigError(str(e)) from None
                counts = str(e)
            out.append((target, a, x, counts))
    return out


def _text(show: Any, x: Run, arch: str) -> str:
    try:
        return str(show(x.launch.kernel, arch))
    except KernelError as e:
        raise ConfigError(str(e)) from None


def _print(common: Common, found: list[Found]) -> None:
    t = table("kernel", "arch", "M", ">threads", ">regs", ">spills", ">shared", ">warnings", "an SM holds")
    for target, a, x, _ in found:
        made = compile_kernel(x.launch.kernel, a)
        held = occupancy(made, x.launch.threads, x.launch.shared, target)
        shared = made.shared + x.launch.shared
        spills = made.spill_stores + made.spill_loads
        ms = " ".join(map(str, x.rows))
        row(
            t,
            *(x.launch.kernel.spec, a, ms, x.launch.threads, made.registers, spills, shared, len(made.warnings), held),
        )
    common.console.print(t)
    for _, a, x, _ in found:
        for problem in check_kernel(x.launch.kernel, a):
            common.console.print(problem, markup=False)
    for _, a, x, counts in found:
        if isinstance(counts, str):
            common.console.print(f"instructions not counted: {counts}", markup=False)
            break
        most = ", ".join(f"{name} {count}" for name, count in list(counts.items())[:SHOWN])
        total = sum(counts.values())
        common.console.print(f"{x.launch.kernel.spec} {a}: {total} instructions: {most}", markup=False)


def _plain(target: Target, arch: str, x: Run, counts: dict[str, int] | str) -> dict[str, Any]:
    made = compile_kernel(x.launch.kernel, arch)
    held = occupancy(made, x.launch.threads, x.launch.shared, target)
    return {
        "kernel": x.launch.kernel.entry,
        "arch": arch,
        "m": list(x.rows),
        "threads": x.launch.threads,
        "registers": made.registers,
        "spill_stores": made.spill_stores,
        "spill_loads": made.spill_loads,
        "stack": made.stack,
        "shared_static": made.shared,
        "shared_dynamic": x.launch.shared,
        "warnings": list(made.warnings),
        "problems": list(check_kernel(x.launch.kernel, arch)),
        "occupancy": {"target": target.name, "blocks": held.blocks, "share": held.share, "limit": held.limit},
        "instructions": counts if isinstance(counts, dict) else None,
        "reasons": {} if isinstance(counts, dict) else {"instructions": counts},
    }

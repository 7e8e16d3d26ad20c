"""`inspect`: an arm's kernels through the compiler, with no GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from atlas_lab.cli.common import DONE, Common, app, verb
from atlas_lab.core.arm import Arm, required
from atlas_lab.core.registry import Registry
from atlas_lab.core.route import RouteError
from atlas_lab.core.target import Target
from atlas_lab.experiments import results, settings
from atlas_lab.experiments.ab import tool
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.inspection import ROWS, Run, instructions, launches, occupancy, target_of
from atlas_lab.experiments.report import row, table
from atlas_lab.kernels.lang import KernelError
from atlas_lab.kernels.lang.compile import architectures, check_kernel, compile_kernel, compiler_missing, ptx, sass

SHOWN = 14


@verb(app, "inspect")
def inspect(
    common: Common,
    arms: Annotated[list[str], typer.Argument(metavar="ARM...", help="Names or patterns.")],
    arch: Annotated[list[str] | None, typer.Option(help="sm_90a ...; without it, all that the kernels allow.")] = None,
    n: Annotated[int, typer.Option("-n", help="Rows of the weight.", min=1)] = 17408,
    k: Annotated[int, typer.Option("-k", help="Columns of the weight.", min=1)] = 5120,
    m: Annotated[list[int] | None, typer.Option("-m", help="Token rows; may be repeated.", min=1)] = None,
    show_ptx: Annotated[bool, typer.Option("--ptx", help="Print the PTX that is assembled.")] = False,
    show_sass: Annotated[bool, typer.Option("--sass", help="Print the machine code.")] = False,
    page: Annotated[Path | None, typer.Option(help="Write the table as a Markdown page, too.")] = None,
) -> int:
    """Compile the kernels that arms launch at a shape: registers, spills, shared memory, occupancy, instructions.

    Of several arms, those that do not run there are told apart by a sentence each.
    """
    loaded = common.load()
    registry = common.registry(loaded)
    chosen = settings.chosen_arms(registry, arms)
    missing = compiler_missing()
    if missing:
        raise ConfigError(f"inspect {' '.join(arms)}: {missing}")
    if page is not None:
        results.writable(page, "--page")
    found, refused = _of_all(registry, chosen, arch, n, k, tuple(m) if m else ROWS)
    if show_ptx or show_sass:
        for _, _, a, x, _ in found:
            show = ptx if show_ptx else sass
            common.console.print(_text(show, x, a), markup=False, soft_wrap=True)
    else:
        _print(common, found)
    for sentence in refused:
        common.console.print(sentence, markup=False)
    kernels = [_plain(*f) for f in found]
    if page is not None:
        said = [*(f"'{a}'" for a in arms), *(f"--arch {a}" for a in arch or ())]
        results.write(page, _page(kernels, refused, n, k, " ".join(said)))
        common.console.print(f"written: {page}", markup=False)
    answer = {"schema": "atlas-lab.inspect/2", "n": n, "k": k, "kernels": kernels}
    common.give(json.dumps({**answer, "refused": refused}, indent=1) + "\n")
    return DONE


Found = tuple[Arm, Target, str, Run, dict[str, int] | str]


def _of_all(
    registry: Registry, arms: Sequence[Arm], archs: list[str] | None, n: int, k: int, ms: tuple[int, ...]
) -> tuple[list[Found], list[str]]:
    """What was found of the arms, and a sentence for each that does not run there; of one alone it is raised."""
    out: list[Found] = []
    refused: list[str] = []
    for arm in arms:
        try:
            out += _rows(registry, arm, archs, n, k, ms)
        except (ConfigError, RouteError) as e:
            if len(arms) == 1:
                raise
            refused.append(f"{arm.name}: {e}")
    return out, refused


def _rows(registry: Registry, arm: Arm, archs: list[str] | None, n: int, k: int, ms: tuple[int, ...]) -> list[Found]:
    out: list[Found] = []
    able = [architectures(x.needs) for x in required(arm)]
    for a in archs or [a for a in able[0] if all(a in other for other in able)]:
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
            out.append((arm, target, a, x, counts))
    return out


def _text(show: Any, x: Run, arch: str) -> str:
    try:
        return str(show(x.launch.kernel, arch))
    except KernelError as e:
        raise ConfigError(str(e)) from None


def _print(common: Common, found: list[Found]) -> None:
    t = table("kernel", "arch", "M", ">threads", ">regs", ">spills", ">shared", ">warnings", "an SM holds")
    for _, target, a, x, _ in found:
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
    for _, _, a, x, _ in found:
        for problem in check_kernel(x.launch.kernel, a):
            common.console.print(problem, markup=False)
    for _, _, a, x, counts in found:
        if isinstance(counts, str):
            common.console.print(f"instructions not counted: {counts}", markup=False)
            break
        most = ", ".join(f"{name} {count}" for name, count in list(counts.items())[:SHOWN])
        total = sum(counts.values())
        common.console.print(f"{x.launch.kernel.spec} {a}: {total} instructions: {most}", markup=False)


def _plain(arm: Arm, target: Target, arch: str, x: Run, counts: dict[str, int] | str) -> dict[str, Any]:
    made = compile_kernel(x.launch.kernel, arch)
    held = occupancy(made, x.launch.threads, x.launch.shared, target)
    return {
        "arm": arm.name,
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


HEAD = ("arm", "M", "kernel", "threads", "registers", "spills", "shared memory", "warnings", "blocks an SM holds")


def _page(kernels: Sequence[dict[str, Any]], refused: Sequence[str], n: int, k: int, said: str) -> str:
    """The table as Markdown, one architecture after another."""
    command = f"atlas-lab inspect {said} -n {n} -k {k}"
    lines = [
        "# Kernels: registers and occupancy",
        "",
        f"<!-- written by `{command} --page`; do not edit -->",
        "",
        f"What arms launch for a weight of {n} x {k} at these M, shared memory in bytes; "
        + ", ".join(f"{name} {version}" for name, version in tool().items() if name not in ("name", "version"))
        + f"; atlas-lab {tool()['version']}.",
    ]
    for arch in dict.fromkeys(f["arch"] for f in kernels):
        mine = [f for f in kernels if f["arch"] == arch]
        lines += ["", f"## {arch}", "", "| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
        for f in mine:
            held, shared = f["occupancy"], f["shared_static"] + f["shared_dynamic"]
            row = (
                *(f["arm"], " ".join(map(str, f["m"])), f"`{f['kernel']}`", f["threads"], f["registers"]),
                *(f["spill_stores"] + f["spill_loads"], shared, len(f["warnings"])),
                f"{held['blocks']} ({held['limit']})",
            )
            lines.append("| " + " | ".join(map(str, row)) + " |")
    lines += ["", "## Not there", "", *(f"- {sentence}" for sentence in refused)] if refused else []
    return "\n".join(lines) + "\n"

"""Pages of figures, generated from result files of `bench`: no figure in them was typed by hand."""

from __future__ import annotations

import re
from pathlib import Path

from atlas_lab.experiments.bench_results import FLOORS, SPENT, BenchCell, BenchResult, Relative, one_row

LOADING = (
    "A checkpoint that lies in the page cache is loaded through page-locked staging slots that several threads fill; "
    "in turn with it, as many bytes are copied from 2 GB of page-locked memory. Those copies are a yardstick and no "
    "ceiling: a figure above 1 says that they were slower than the loads, and why was not established. Medians; the "
    "bracket is the 95 % bootstrap interval."
)
RUNNING = (
    "Ours, the read kernel over the same bytes and the peer alternate in blocks of at least 20 ms in random order, "
    "as CUDA graphs over rotated weights of at least four times the L2. A time is the median over blocks; the "
    "bracket is the 95 % bootstrap interval. The floor is the larger of the read kernel's time and the operations "
    "over their pipe's rate. Speeds relative to a peer hold across runs, absolute times drift."
)
AHEAD = (
    "Our launches are dependent where the card can: one begins to fetch its weights while the one before it ends, and "
    "waits for that before it reads what that wrote. A launch of the read kernel begins when the one before it is "
    "over, so a share can pass 1. Read ahead is the same kernel in dependent launches: what ours are bounded by."
)
CHECKED = (
    "The error is that of a peer's whole output against the float64 product of what it multiplied: the weights it "
    "read, and x as it quantized it where it does, in time that is not counted."
)
TITLES = {
    "decode": "Decode: 1 to 16 rows",
    "prefill": "Prefill: 17 rows and more",
    "rows": "Time against rows",
}
LOAD_HEAD = ("case", "load, ms", "copies, ms", "rate of the copies' [95 %]")
HEAD = (
    *("case", "N", "K", "M", "ours, us", "read, us", "floor, us", "share of floor"),
    *("peer", "peer, us", "our speed over the peer's"),
)


def render(result: BenchResult, source: Path, plot: str = "") -> str:
    """The page as Markdown, with the picture of that name, if any."""
    d, ahead = result.device, any(c.ahead for c in result.cells)
    lines = [
        f"# {TITLES.get(result.suite, 'Performance')}",
        "",
        f"<!-- generated from {source.as_posix()} by `atlas-lab bench --render`; do not edit -->",
        "",
        f"{d.get('name') or 'unknown card'}, driver {d.get('driver') or 'unknown'}, CUDA {d.get('cuda') or 'unknown'}; "
        + ", ".join(f"{k} {v}" for k, v in result.tool.items() if k not in ("name", "version"))
        + f"; atlas-lab {result.tool.get('version', 'unknown')}, one run, seed {result.seed}."
        + _left_out(result),
        "",
        f"    {result.command}",
        "",
        LOADING if result.suite == "load" else RUNNING,
        *(["", AHEAD] if ahead else []),
        "",
    ]
    if plot:
        lines += [f"![Time against rows]({plot})", ""]
    if result.suite == "load":
        lines += _table(LOAD_HEAD, [_load_row(c) for c in result.cells])
    else:
        head = (*HEAD, "read ahead, us") if ahead else HEAD
        lines += _table(head, [_row(c) + ((_ahead(c),) if ahead else ()) for c in result.cells])
    lines += ["", "## What must hold", "", *_musts(result)]
    lines += _wholes(result) + _rows(result) + _shapes(result) + _peers(result)
    return "\n".join(lines) + "\n"


def _left_out(result: BenchResult) -> str:
    """Whether the run ended before its last case, and why."""
    left = sum(c.reason == SPENT for c in result.cells)
    if left:
        return f" **Its budget of seconds was spent before the last {left} of {len(result.cells)} cases.**"
    return " **The run was interrupted.**" if result.status == "partial" else ""


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(r) + " |" for r in rows)]


def _load_row(c: BenchCell) -> tuple[str, ...]:
    if c.ours is None or c.read is None or c.of_read is None:
        return (c.name, f"{c.status}: {c.reason}", "", "")
    return (c.name, f"{c.ours.median_us / 1e3:.1f}", f"{c.read.median_us / 1e3:.1f}", relative(c.of_read))


def _row(c: BenchCell) -> tuple[str, ...]:
    if c.ours is None or c.read is None or c.floor_us is None or c.share is None:
        return (c.arm, str(c.n), str(c.k), str(c.m), f"{c.status}: {c.reason}", "", "", "", "", "", "")
    peer = ("", "", "")
    if c.peer:
        peer = (c.peer.name, f"{c.peer.time.median_us:.2f}", relative(c.peer.ours))
    return (
        c.arm,
        str(c.n),
        str(c.k),
        str(c.m),
        f"{c.ours.median_us:.2f}",
        f"{c.read.median_us:.2f}",
        f"{c.floor_us:.2f} ({c.bound_by})",
        f"{c.share:.3f}",
        *peer,
    )


def _ahead(c: BenchCell) -> str:
    return f"{c.ahead.median_us:.2f}" if c.ahead else ""


def _wholes(result: BenchResult) -> list[str]:
    """Programs that quantize x, with that."""
    rows: list[tuple[str, ...]] = [
        (c.arm, str(c.n), str(c.k), str(c.m), f"{c.ours.median_us:.2f}", f"{c.whole.median_us:.2f}")
        for c in result.cells
        if c.ours and c.whole
    ]
    head = ("arm", "N", "K", "M", "product, us", "with its x quantized, us")
    return ["", "## With the launch that quantizes x", "", *_table(head, rows)] if rows else []


def _rows(result: BenchResult) -> list[str]:
    """Every number of rows against one row of the same arm and weight, where both were measured."""
    out = []
    for c in result.cells:
        one = one_row(c, result.cells)
        if c.m > 1 and one and one.ours and c.ours and c.floor_us:
            least = max(one.ours.median_us, FLOORS * c.floor_us)
            found = (f"{c.ours.median_us / t:.3f}" for t in (one.ours.median_us, least))
            us = (f"{t:.2f}" for t in (one.ours.median_us, c.ours.median_us))
            out.append((c.arm, str(c.n), str(c.k), str(c.m), *us, *found))
    if not out:
        return []
    head = ("arm", "N", "K", "M", "M=1, us", "M rows, us", "over M=1", f"over the larger of M=1 and {FLOORS:g} floors")
    return ["", "## Rows against one row", "", *_table(head, out)]


def _shapes(result: BenchResult) -> list[str]:
    """Which projections each shape is of."""
    used = {(c.n, c.k): ", ".join(c.used) for c in result.cells if c.used}
    return ["", "## Shapes", "", *(f"- N={n} K={k}: {what}" for (n, k), what in used.items())] if used else []


def _peers(result: BenchResult) -> list[str]:
    """Each peer once a shape: version, weights it read, distance from their float64 product, kernels of one call; and
    those that gave no time."""
    out = {}
    for c in result.cells:
        shape = f"N={c.n} K={c.k} M={c.m}"
        if c.peer:
            p = c.peer
            kernels = ", ".join(f"`{short(k)}`" for k in p.kernels) or p.reason
            read = "unquantized BF16" if p.weights == "bf16" else p.weights
            error = f"relative error {p.rel_l2:.2e}" + (f" (**wrong**: {p.wrong})" if p.wrong else "")
            out[p.name, p.weights, shape] = (
                f"- {p.name} {shape}: {p.version}; read the {read} weights; {error}; {kernels}"
            )
        elif c.peer_failed:
            out[c.format, c.peer_failed, shape] = f"- {shape}: **{c.peer_failed}**"
    return ["", "## Peers", "", CHECKED, "", *out.values()] if out else []


def short(kernel: str) -> str:
    """A kernel's name without its return type, template arguments and parameters."""
    return re.split(r"[<(]", kernel.removeprefix("void "), maxsplit=1)[0].strip()


def relative(r: Relative) -> str:
    return f"{r.speed:.3f} [{r.ci95[0]:.3f}, {r.ci95[1]:.3f}]"


def _musts(result: BenchResult) -> list[str]:
    words = {
        "of_peer": "of its peer's speed",
        "of_peers": "of its peer's speed in the geometric mean over the shapes",
        "of_floor": "of the read kernel's rate over the same bytes",
        "of_one_row": f"of the speed of one row, or of {FLOORS:g} floors where those take longer",
        "of_more_rows": "of the speed of more rows, in time",
        "of_copy": "of the rate of copies from page-locked memory",
    }
    out = []
    for c in result.cells:
        for m in c.must:
            word = "met" if m.passed else "**not met**"
            out.append(f"- {c.name}: at least {m.limit:g} {words[m.name]}: {word}, {m.found:.3f}")
    return out or ["- nothing was measured against a bound"]

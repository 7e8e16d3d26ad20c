"""The plot of the suite `rows`: time against rows, ours, the peer's and the floor, one panel a format."""

from __future__ import annotations

import io
from collections.abc import Sequence

from atlas_lab.experiments.bench_results import BenchCell, BenchResult
from atlas_lab.experiments.errors import ConfigError

SIZE = (7.5, 4.2)  # inches a panel


def plot(result: BenchResult) -> str:
    """An SVG. Raises ConfigError where matplotlib is not installed, and for a result that timed nothing."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("the plot of suite rows needs matplotlib, which is not installed: atlas-lab[plot]") from None
    lines: dict[str, list[BenchCell]] = {}
    for c in sorted((c for c in result.cells if c.ours), key=lambda c: c.m):
        lines.setdefault(c.format, []).append(c)
    if not lines:
        raise ConfigError("the plot of suite rows: found no case that was timed, expected one or more")
    # text as paths and fixed names of marks: the same result gives the same file
    with matplotlib.rc_context({"svg.hashsalt": "rows", "svg.fonttype": "path", "font.size": 9}):
        figure = Figure(figsize=(SIZE[0], SIZE[1] * len(lines)), layout="constrained")
        for axes, (format, cells) in zip(figure.subplots(len(lines), squeeze=False)[:, 0], lines.items(), strict=True):
            for name, marker, points in _curves(cells):
                axes.plot([m for m, _ in points], [us for _, us in points], marker, label=name, markersize=3)
            axes.set(yscale="log", xlabel="rows of x", ylabel="us")
            axes.set_xscale("log", base=2)
            axes.set_title(f"{format}, N={cells[0].n} K={cells[0].k}")
            axes.grid(visible=True, which="both", linewidth=0.3)
            axes.legend()
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _curves(cells: Sequence[BenchCell]) -> list[tuple[str, str, list[tuple[int, float]]]]:
    """The name of each curve, how it is drawn, and its rows and microseconds."""
    ours = " and ".join(dict.fromkeys(c.arm for c in cells))
    peers = " and ".join(dict.fromkeys(c.peer.name for c in cells if c.peer))
    found = [
        (ours, "o-", [(c.m, c.ours.median_us) for c in cells if c.ours]),
        (peers, "s-", [(c.m, c.peer.time.median_us) for c in cells if c.peer]),
        ("floor", "k--", [(c.m, c.floor_us) for c in cells if c.floor_us]),
    ]
    return [curve for curve in found if curve[2]]

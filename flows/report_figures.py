"""Figures of a report as inline SVG that follows the page's light and dark colours."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

NUM_COLOURS = 8
"""Colours a page defines as --s0 to --s7, besides --ink and --line."""

# Colours that nothing else uses stand in for the page's variables while matplotlib draws.
_INK, _LINE = "#010203", "#040506"
_SERIES = tuple(f"#0a0b{index:02x}" for index in range(NUM_COLOURS))


@dataclass(frozen=True, slots=True)
class Line:
    """One curve: (x, y) points in order."""

    points: Sequence[tuple[int, float]]
    colour: int
    is_mean: bool


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of a comparison: a value with its interval and the seeds behind it."""

    name: str
    value: float
    low: float | None
    high: float | None
    seeds: Sequence[float]
    colour: int


def curves(lines: Sequence[Line], *, y_label: str) -> str:
    """Thin lines for seeds, thick ones for means, over policy updates."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.subplots()
    for line in sorted(lines, key=lambda line: line.is_mean):
        axes.plot(
            [x for x, _ in line.points],
            [y for _, y in line.points],
            color=_SERIES[line.colour % NUM_COLOURS],
            linewidth=2.4 if line.is_mean else 0.9,
            alpha=1.0 if line.is_mean else 0.4,
            marker="o" if len(line.points) == 1 else None,
            solid_capstyle="round",
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("policy updates")
    axes.set_ylabel(y_label)
    return _svg(figure, axes, grid_axis="y")


def comparison(bars: Sequence[Bar], *, x_label: str) -> str:
    """Means with their intervals, one row each, the seeds as hollow dots."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 0.9 + 0.55 * len(bars)), layout="constrained")
    axes = figure.subplots()
    for row, bar in enumerate(reversed(bars)):
        colour = _SERIES[bar.colour % NUM_COLOURS]
        if bar.low is not None and bar.high is not None:
            axes.plot([bar.low, bar.high], [row, row], color=colour, linewidth=6, alpha=0.35, solid_capstyle="round")
        axes.plot(bar.seeds, [row] * len(bar.seeds), "o", color="none", markeredgecolor=colour, markersize=6)
        axes.plot([bar.value], [row], "D", color=colour, markersize=7)
    axes.set_yticks(range(len(bars)), [bar.name for bar in reversed(bars)])
    axes.set_ylim(-0.6, len(bars) - 0.4)
    axes.set_xlabel(x_label)
    return _svg(figure, axes, grid_axis="x")


def _svg(figure, axes, *, grid_axis: str) -> str:  # matplotlib's types are not imported before they are needed
    import matplotlib

    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_LINE)
    axes.grid(axis=grid_axis, color=_LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(color=_LINE, labelcolor=_INK, labelsize=9)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(_INK)
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "a3r"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _themed(buffer.getvalue())


def _themed(svg: str) -> str:
    svg = svg[svg.index("<svg") :]
    for colour, variable in [(_INK, "ink"), (_LINE, "line"), *((c, f"s{i}") for i, c in enumerate(_SERIES))]:
        svg = svg.replace(colour, f"var(--{variable})")
    return svg

"""The report's figures, as SVG text to embed in a page."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from commlib.cli.demo.summary import SPLIT, Record, Summary

COLORS = {
    "ddp": "#8b8f98",
    "ddp-sparse": "#d98e32",
    "exact": "#1769aa",
    "sketch": "#b0306a",
    "embrace-2d": "#2c8a57",
}
"""Color of each method, in figures and page."""

_INK = "#2b2f36"
_GRID = "#e6e4df"
_SPLIT_COLORS = {
    "forward": "#cfd3d8",
    "backward": "#aeb4bc",
    "scan": "#f0b429",
    "exchange": "#c8452f",
    "decode": "#7a4fa3",
    "wait": "#e9a99d",
    "optimizer": "#dfe2e6",
}
_RC: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 11,
    "svg.fonttype": "none",
    "svg.hashsalt": "commlib",
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": "#b9b6ae",
    "xtick.color": _INK,
    "ytick.color": _INK,
}


def loss_by_step(records: Sequence[Record]) -> str:
    """Draws validation loss against training step."""
    with matplotlib.rc_context(_RC):
        figure, axes = _axes("step", "validation loss")
        for idx, record in enumerate(records):
            points = record["validation"]
            # Exact methods lie on each other: earlier lines are wider, so that all are seen.
            axes.plot(
                [point["step"] for point in points],
                [point["loss"] for point in points],
                color=_color(record["method"]),
                linewidth=2 + 2.2 * (len(records) - 1 - idx),
                label=record["method"],
                solid_capstyle="round",
            )
        axes.legend(frameon=False)
        return _svg(figure)


def loss_by_second(records: Sequence[Record]) -> str:
    """Draws validation loss against seconds of training."""
    with matplotlib.rc_context(_RC):
        figure, axes = _axes("seconds of training", "validation loss")
        for record in records:
            points = record["validation"]
            seconds = [point["train_s"] for point in points]
            losses = [point["loss"] for point in points]
            color = _color(record["method"])
            axes.plot(seconds, losses, color=color, linewidth=2.2, label=record["method"])
            axes.plot(seconds[-1:], losses[-1:], "o", color=color, markersize=6)
        axes.legend(frameon=False)
        return _svg(figure)


def bytes_by_step(records: Sequence[Record]) -> str:
    """Draws the megabytes that a rank sends for tables in each step, and the lower bound."""
    with matplotlib.rc_context(_RC):
        figure, axes = _axes("step", "MB sent per rank")
        for record in records:
            steps = record["steps"]
            axes.plot(
                [step["step"] for step in steps],
                [step["sparse_bytes"] / 1e6 for step in steps],
                color=_color(record["method"]),
                linewidth=2,
                label=record["method"],
            )
        steps = records[-1]["steps"]
        axes.plot(
            [step["step"] for step in steps],
            [step["bound_bytes"] / 1e6 for step in steps],
            color=_INK,
            linewidth=1.2,
            linestyle=(0, (4, 3)),
            label="lower bound (exact)",
        )
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.legend(frameon=False, loc=(0.6, 0.52))
        return _svg(figure)


def split_by_method(summaries: Sequence[Summary]) -> str:
    """Draws the parts of a mean step, one bar per method."""
    with matplotlib.rc_context(_RC):
        figure, axes = _axes("milliseconds per step", "")
        names = [one.method for one in summaries]
        left = [0.0] * len(summaries)
        for part in SPLIT:
            widths = [one.split_s[part] * 1e3 for one in summaries]
            if not any(widths):
                continue
            axes.barh(names, widths, left=left, color=_SPLIT_COLORS[part], label=part, height=0.62)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for idx, end in enumerate(left):
            axes.text(end + max(left) * 0.012, idx, f"{end:.0f}", va="center", weight="bold")
        axes.invert_yaxis()
        axes.set_xlim(0, max(left) * 1.08)
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        figure.legend(
            frameon=False,
            ncols=len(SPLIT),
            loc="outside lower center",
            fontsize=9,
            handlelength=0.9,
            handletextpad=0.4,
            columnspacing=1.0,
        )
        return _svg(figure)


def _axes(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, 3.7), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)
    return figure, axes


def _color(method: str) -> str:
    return COLORS.get(method, _INK)


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]

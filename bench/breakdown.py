"""Where a step's time goes: compute, communication that it waits for, communication under compute.

    |────────────── step_s ──────────────|
    |── compute_s ─────────|─ exposed_s ─|
          |── hidden_s ────|                    hidden: a part of compute, under which requests run

compute_s            A step of the same model, its gradients sparse or dense as in the method, on
                     every rank at once, whole tables, nothing communicated: forward, backward, and
                     the update with the rank's own gradient (`commlib/cli/demo/compute.py`).
exposed_s            step_s - compute_s: what communication adds to a step, its processor time and
                     waits for slower ranks included.
hidden_s             Seconds a step in which Gloo was at work while the training thread was in one
                     of torch's operators: torch's profiler, all threads, mean over ranks, of steps
                     that are not timed. What Python does meanwhile is left out. None for Horovod,
                     whose Gloo torch's profiler does not see.
busy_s               Seconds a step in which Gloo was at work, from the same profile.
exposed_embedding_s  Partitioned tables only: median seconds in which the training thread waited
                     for rows and for the exchange of their gradients. Measured by itself, so with
                     noise it can exceed exposed_s.

    python -m bench.breakdown train.json train.png       draws what `bench.train --json` wrote
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from commlib.cli.demo.driver import Driver

_PARTS = {
    "compute": "#c3c8cf",
    "waiting for tables": "#8e2f20",
    "other exposed communication": "#dc7a5c",
}
Span = tuple[float, float]
"""From when to when."""

_HATCH = "////"
_STEP = "bench.step"
_CUT = 3.0  # bars longer than this times the median bar are cut


@dataclass(frozen=True)
class Traffic:
    """Communication in a step, as the module says."""

    busy_s: float
    hidden_s: float


@dataclass(frozen=True)
class Breakdown:
    """A step's seconds by part, as the module says."""

    step_s: float
    compute_s: float
    exposed_s: float
    hidden_s: float | None
    exposed_embedding_s: float | None
    busy_s: float | None


def split(
    step_s: float, compute_s: float, traffic: Traffic | None, exposed_embedding_s: float | None
) -> Breakdown:
    """Splits a step.

    Args:
        step_s: Median seconds of a step.
        compute_s: Seconds of one that communicates nothing; where noise makes it longer than the
            step, all of the step is compute.
        traffic: What the profiler saw, if it can see it.
        exposed_embedding_s: As in the module.
    """
    compute_s = min(compute_s, step_s)
    return Breakdown(
        step_s=step_s,
        compute_s=compute_s,
        exposed_s=step_s - compute_s,
        hidden_s=None if traffic is None else min(traffic.hidden_s, compute_s),
        exposed_embedding_s=exposed_embedding_s,
        busy_s=None if traffic is None else traffic.busy_s,
    )


def measure_traffic(driver: Driver, first_step: int, num_steps: int = 4) -> Traffic:
    """Takes some more steps and looks at them with the profiler; collective."""
    dist.barrier()
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as profiler:
        for step in range(first_step, first_step + num_steps):
            with record_function(_STEP):
                driver.step(step)
        driver.flush()
    events = list(profiler.events() or ())
    training = {event.thread for event in events if event.name == _STEP}
    at_work = [_span(event) for event in events if event.name.startswith("gloo:")]
    computing = [
        _span(event)
        for event in events
        if event.name.startswith("aten::") and event.thread in training
    ]
    return Traffic(
        busy_s=_mean_over_ranks(covered(at_work) / 1e6 / num_steps),
        hidden_s=_mean_over_ranks(overlap(at_work, computing) / 1e6 / num_steps),
    )


def overlap(some: Sequence[Span], others: Sequence[Span]) -> float:
    """Returns how long at least one span of each side is there."""
    return covered(some) + covered(others) - covered([*some, *others])


def covered(spans: Iterable[Span]) -> float:
    """Returns how long at least one of the spans is there."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _span(event: FunctionEvent) -> Span:
    return event.time_range.start, event.time_range.end


def _mean_over_ranks(seconds: float) -> float:
    mean = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def plot(records: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Draws a bar a method, from records as `bench.train` writes them."""
    with matplotlib.rc_context({"font.size": 11, "hatch.linewidth": 1.2}):
        figure = Figure(figsize=(9.2, 1.7 + 0.48 * len(records)), layout="constrained")
        axes = figure.subplots()
        ends = [record["step_s"] * 1e3 for record in records]
        limit = min(max(ends), _CUT * statistics.median(ends))
        for idx, record in enumerate(records):
            _bar(axes, idx, record, limit)
        axes.set_yticks(range(len(records)), [record["method"] for record in records])
        axes.invert_yaxis()
        axes.set_xlim(0, limit * 1.1)
        axes.set_xlabel("milliseconds a step")
        axes.grid(axis="x", color="#e6e4df", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set_title("{model}, {num_ranks} ranks, link {link}".format(**records[0]), loc="left")
        handles = [Patch(color=color, label=label) for label, color in _PARTS.items()]
        hidden = Patch(
            facecolor=_PARTS["compute"],
            edgecolor="white",
            hatch=_HATCH,
            label="compute that hides communication",
        )
        handles.insert(1, hidden)
        figure.legend(handles=handles, frameon=False, ncols=2, loc="outside lower center")
        figure.savefig(path, dpi=130)


def _bar(axes: Axes, idx: int, record: Mapping[str, Any], limit: float) -> None:
    compute, exposed, hidden = (
        (record[f"{part}_s"] or 0.0) * 1e3 for part in ("compute", "exposed", "hidden")
    )
    tables = min((record["exposed_embedding_s"] or 0.0) * 1e3, exposed)
    widths = (compute, tables, exposed - tables)
    left = 0.0
    for width, color in zip(widths, _PARTS.values(), strict=True):
        axes.barh(idx, width, left=left, color=color, height=0.64)
        left += width
    axes.barh(
        idx,
        hidden,
        left=compute - hidden,
        facecolor="none",
        edgecolor="white",
        hatch=_HATCH,
        height=0.64,
        linewidth=0,
    )
    if left > limit:
        place, text, color = limit * 1.09, f"{left:.0f} →", "white"
        axes.text(place, idx, text, va="center", ha="right", weight="bold", color=color)
    else:
        axes.text(left + limit * 0.01, idx, f"{left:.0f}", va="center", weight="bold")


def main() -> None:
    """Draws a file of records."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("json", type=Path, help="what `bench.train --json` wrote")
    parser.add_argument("plot", type=Path, help="picture to write")
    args = parser.parse_args()
    plot(json.loads(args.json.read_text()), args.plot)


if __name__ == "__main__":
    main()

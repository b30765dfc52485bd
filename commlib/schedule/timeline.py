"""What every rank computed and sent, and when: a Chrome trace, and a picture."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path
from typing import Any

import torch.distributed as dist

from commlib.schedule.lane import Lane
from commlib.stats import complete_event, now_s, write_trace

COMPUTE = "compute"
_KINDS = {
    ".ids": "ids",
    ".announce": "ids",
    ".prior": "prior gradients",
    ".delayed": "delayed gradients",
    ".grads": "gradients",
    ".early": "early rows",
    ".rows": "rows",
    "block": "dense",
    "bucket": "dense",
}
_COLORS = {
    COMPUTE: "#c3c8cf",
    "ids": "#8a8f98",
    "rows": "#2a5d9f",
    "early rows": "#8fb3dd",
    "prior gradients": "#b03a2e",
    "gradients": "#b03a2e",
    "delayed gradients": "#e3a08f",
    "dense": "#4f8a5b",
    "other": "#7d6b99",
}


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that took time.

    Args:
        rank: Whose.
        lane: "compute", or the lane that carried it.
        name: What it was.
        kind: What it is drawn as.
        start_s: When it began; a request: when it was issued. `time.perf_counter`'s clock.
        end_s: When it ended; a request: when its answer was there.
        ready_s: A request: when it was submitted; else `start_s`.
        num_bytes: Bytes that the rank sent.
    """

    rank: int
    lane: str
    name: str
    kind: str
    start_s: float
    end_s: float
    ready_s: float
    num_bytes: int = 0


class Timeline:
    """Collects spans of one rank, and on rank 0 those of all.

    timeline = Timeline(rank)
    with timeline.span("forward"):
        ...
    timeline.take(lane)
    timeline.gather()
    if rank == 0:
        timeline.save("trace.json")
        timeline.plot("trace.png")

    Args:
        rank: This rank.

    Source: ours; the file is Chrome's trace event JSON.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.spans: list[Span] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record what runs within as compute of this rank."""
        start = now_s()
        try:
            yield
        finally:
            end = now_s()
            self.spans.append(Span(self.rank, COMPUTE, name, COMPUTE, start, end, start))

    def take(self, lane: Lane, since_s: float = float("-inf")) -> None:
        """Record the requests that a lane has carried to their end.

        Args:
            lane: Whose log is read.
            since_s: Requests issued before are left out.
        """
        for name, slice_idx, num_slices, _, num_bytes, ready, start, end in lane.log():
            if not isnan(end) and start >= since_s:
                part = f"{name} [{slice_idx + 1}/{num_slices}]" if num_slices > 1 else name
                short = lane.name.removeprefix("commlib.")
                self.spans.append(
                    Span(self.rank, short, part, kind_of(name), start, end, ready, num_bytes)
                )

    def gather(self, group: dist.ProcessGroup | None = None) -> None:
        """Bring all ranks' spans to the group's first rank; collective.

        Ranks of other hosts have other clocks: theirs are set by a barrier, so they are as exact as
        that is.
        """
        dist.barrier(group)
        mine = (socket.gethostname(), now_s(), self.spans)
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, mine, group)
        host, zero_s, _ = everyone[0]
        if dist.get_rank(group) == 0:
            self.spans = [
                _shift(span, 0.0 if theirs == host else zero_s - there_s)
                for theirs, there_s, spans in everyone
                for span in spans
            ]

    def save(self, path: str | Path) -> None:
        """Write a Chrome trace: a process a rank, a thread a lane; open it in ui.perfetto.dev."""
        write_trace(
            Path(path),
            [
                complete_event(
                    span.name,
                    span.kind,
                    span.start_s,
                    span.end_s - span.start_s,
                    span.rank,
                    span.lane,
                    bytes_sent=span.num_bytes,
                    waited_s=span.start_s - span.ready_s,
                )
                for span in self.spans
            ],
        )

    def plot(self, path: str | Path, *, title: str = "") -> None:
        """Draw the spans as a Gantt picture, a row for each rank and lane, and write it as PNG.

        Raises:
            ValueError: There is nothing to draw.
        """
        if not self.spans:
            raise ValueError("the timeline is empty: record spans, or take a lane, first")
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        rows = sorted({(s.rank, s.lane != COMPUTE, s.lane) for s in self.spans})
        place = {(rank, lane): i for i, (rank, _, lane) in enumerate(rows)}
        zero = min(span.start_s for span in self.spans)
        figure = Figure(figsize=(12, 0.8 + 0.32 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for span in self.spans:
            axes.broken_barh(
                [((span.start_s - zero) * 1e3, (span.end_s - span.start_s) * 1e3)],
                (place[span.rank, span.lane] - 0.4, 0.8),
                facecolors=_COLORS[span.kind],
                edgecolors="white",
                linewidth=0.4,
            )
        axes.set_yticks(range(len(rows)), [f"rank {rank}  {lane}" for rank, _, lane in rows])
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds")
        axes.set_title(title, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        seen = {span.kind for span in self.spans}
        handles = [
            Patch(color=color, label=kind) for kind, color in _COLORS.items() if kind in seen
        ]
        axes.legend(
            handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8
        )
        figure.savefig(path, dpi=130)


def kind_of(request: str) -> str:
    """What a request is drawn as, by its name."""
    for mark, kind in _KINDS.items():
        if mark in request:
            return kind
    return "other"


def _shift(span: Span, by_s: float) -> Span:
    return replace(
        span, start_s=span.start_s + by_s, end_s=span.end_s + by_s, ready_s=span.ready_s + by_s
    )


__all__: Sequence[str] = ["COMPUTE", "Span", "Timeline", "kind_of"]

"""What each reduction did and took: records for `stats()`, and a Chrome trace of them."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MAX_RECORDS = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One reduction of one parameter on this rank.

    Args:
        step: Reductions of this parameter before.
        parameter: Its name; `bucket{i}` for the dense parameters of a DDP bucket.
        reducer: The algorithm that ran, what `auto` chose included.
        density: Rows of this rank over V; -1 where nobody looked.
        union_density: U/V; -1 where unknown.
        gamma: U over S (this rank's rows where the mean is unknown); -1 where unknown.
        bytes_sent: Bytes this rank sent, indices included.
        bytes_received: Bytes it received.
        bound_bytes: The exact lower bound w D (S + U (n-2)/n); -1 where unknown.
        omega: Expected squared error over signal, 0 if exact.
        scan_s: Seconds to find the rows.
        exchange_s: Seconds in exchanges of the values.
        decode_s: Seconds of all other local work.
        index_s: Seconds in the index round, under the forward and backward pass if announced.
        wait_s: Seconds that the values waited for that index round.
        start_s: When it began, on `time.perf_counter`'s clock.
    """

    step: int
    parameter: str
    reducer: str
    density: float = -1.0
    union_density: float = -1.0
    gamma: float = -1.0
    bytes_sent: int = 0
    bytes_received: int = 0
    bound_bytes: float = -1.0
    omega: float = 0.0
    scan_s: float = 0.0
    exchange_s: float = 0.0
    decode_s: float = 0.0
    index_s: float = 0.0
    wait_s: float = 0.0
    start_s: float = 0.0

    @property
    def bytes_over_bound(self) -> float:
        """Bytes sent or received, the larger, over the bound; -1 where unknown."""
        busiest = max(self.bytes_sent, self.bytes_received)
        return busiest / self.bound_bytes if self.bound_bytes > 0 else -1.0

    def as_dict(self) -> dict[str, Any]:
        """All fields, and `bytes_over_bound`."""
        return {**asdict(self), "bytes_over_bound": self.bytes_over_bound}


class Recorder:
    """Keeps the newest records, and writes them as a Chrome trace where a path is given.

    Args:
        rank: This rank.
        trace: Path for rank 0; rank r > 0 writes beside it, `name-rank{r}.json`.

    Source: ours; the format is Chrome's trace event JSON.
    """

    def __init__(self, rank: int, trace: str | Path | None) -> None:
        self._rank = rank
        self._records: deque[Record] = deque(maxlen=MAX_RECORDS)
        if trace is not None and not isinstance(trace, (str, Path)):
            raise TypeError(f"trace = {trace!r} must be the path of a file, or None")
        self._path = None if trace is None else _rank_path(Path(trace), rank)
        if self._path is not None and not self._path.parent.is_dir():
            raise ValueError(f"trace = {str(trace)!r}: the folder does not exist; make it first")
        if self._path is not None and self._path.is_dir():
            raise ValueError(f"trace = {str(trace)!r} is a folder: give the path of a file in it")

    def add(self, record: Record) -> None:
        """Append; the oldest falls out beyond 20,000."""
        self._records.append(record)

    def records(self) -> list[Record]:
        """The records, oldest first."""
        return list(self._records)

    def clear(self) -> None:
        """Forget all records."""
        self._records.clear()

    def write(self) -> None:
        """Write the trace file, if one was asked for."""
        if self._path is not None:
            events = [event for record in self.records() for event in _events(record, self._rank)]
            write_trace(self._path, events)


def _rank_path(path: Path, rank: int) -> Path:
    return path if rank == 0 else path.with_name(f"{path.stem}-rank{rank}{path.suffix}")


def _events(record: Record, rank: int) -> Sequence[dict[str, Any]]:
    """The phases of one record, one behind the other, as complete events in microseconds."""
    phases = {
        "wait for index": record.wait_s,
        "scan": record.scan_s,
        "exchange": record.exchange_s,
        "local work": record.decode_s,
    }
    events, start = [], record.start_s
    for phase, seconds in phases.items():
        if seconds > 0:
            events.append(
                complete_event(
                    f"{record.parameter}: {phase}",
                    record.reducer,
                    start,
                    seconds,
                    rank,
                    "dense" if record.parameter.startswith("bucket") else "data",
                    step=record.step,
                    reducer=record.reducer,
                    bytes_sent=record.bytes_sent,
                )
            )
        start += seconds
    return events


def complete_event(
    name: str, category: str, start_s: float, seconds: float, rank: int, lane: str, **facts: Any
) -> dict[str, Any]:
    """One bar of a Chrome trace: a process a rank, a thread a lane."""
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": start_s * 1e6,
        "dur": seconds * 1e6,
        "pid": rank,
        "tid": lane,
        "args": facts,
    }


def write_trace(path: Path, events: Sequence[dict[str, Any]]) -> None:
    """Write events as Chrome trace JSON."""
    path.write_text(json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"}))


def now_s() -> float:
    """The clock of all records."""
    return time.perf_counter()

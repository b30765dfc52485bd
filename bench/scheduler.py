"""How long from submit to issue, and how many requests a second? The core against a Python queue.

    python -m bench.scheduler --json scheduler.json

Three faces of the same work (priority, credit, order log): the core called from C++, the core
called from Python, and a `queue.PriorityQueue` in Python. With DEPTH requests queued:

    latency    one thread submits an urgent request and takes it out again
    cycle      the same, with the request completed
    burst      DEPTH requests are submitted while another thread issues and completes: per request
    handover   from submit until another thread, asleep in next, has the request (DEPTH 1)

Then what an announcement costs: native ranks in one process, control connections over loopback TCP.
"""

from __future__ import annotations

import argparse
import math
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import track
from rich.table import Table

import commlib.ops  # noqa: F401  loads torch's libraries, which the extension links to
from bench.harness import Timing, write_json
from commlib._C import Scheduler

ROOT = Path(__file__).resolve().parent.parent
DEPTHS = (1, 10, 100, 1000, 10_000)
ANNOUNCED_RANKS = (1, 2, 4)
CREDIT_BYTES = 1 << 40
TIMEOUT_S = 60.0
FACES = ("core, C++", "core, Python", "PriorityQueue")
Samples = dict[str, list[float]]  # seconds of each series


class Lane(Protocol):
    """What the core and the queue have in common."""

    def submit(self, name: str, priority: int, num_bytes: int) -> None: ...
    def next(self, timeout_s: float) -> tuple[str, int, int] | None: ...
    def done(self, name: str) -> None: ...


class QueueLane:
    """The same work on one rank with what Python brings: a PriorityQueue, a condition, a list."""

    def __init__(self, credit_bytes: int) -> None:
        self.credit_bytes = credit_bytes
        self.log: list[list[Any]] = []
        self._queue: queue.PriorityQueue[tuple[int, int, str, int, float]] = queue.PriorityQueue()
        self._names: dict[str, list[Any] | None] = {}
        self._num_submitted = 0
        self._in_flight_bytes = 0
        self._num_in_flight = 0
        self._changed = threading.Condition()

    def submit(self, name: str, priority: int, num_bytes: int) -> None:
        """Queue a request."""
        with self._changed:
            if name in self._names:
                raise ValueError(f"{name!r} is queued or in flight already")
            self._names[name] = None
            self._num_submitted += 1
            number = self._num_submitted
        self._queue.put((priority, number, name, num_bytes, time.perf_counter()))

    def next(self, timeout_s: float) -> tuple[str, int, int] | None:
        """Wait for a request, then for its credit."""
        try:
            item = self._queue.get(block=timeout_s > 0, timeout=timeout_s)
        except queue.Empty:
            return None
        priority, _, name, num_bytes, submit_s = item
        with self._changed:
            while self._num_in_flight and self._in_flight_bytes + num_bytes > self.credit_bytes:
                self._changed.wait(timeout_s)
            self._num_in_flight += 1
            self._in_flight_bytes += num_bytes
            entry = [name, 0, 1, priority, num_bytes, submit_s, time.perf_counter(), math.nan]
            self._names[name] = entry
            self.log.append(entry)
        return name, 0, 1

    def done(self, name: str) -> None:
        """Give the credit back."""
        with self._changed:
            entry = self._names.pop(name)
            assert entry is not None
            entry[7] = time.perf_counter()
            self._num_in_flight -= 1
            self._in_flight_bytes -= entry[4]
            self._changed.notify()


def hold(lane: Lane, depth: int, names: Sequence[str]) -> Samples:
    """Latency and cycle with `depth` requests queued."""
    for i in range(depth - 1):
        lane.submit(f"queued.{i}", 1, 100)
    latency, cycle = [], []
    clock = time.perf_counter
    for name in names:
        begin = clock()
        lane.submit(name, 0, 100)
        lane.next(0)
        issued = clock()
        lane.done(name)
        complete = clock()
        latency.append(issued - begin)
        cycle.append(complete - begin)
    return {"latency": latency, "cycle": cycle}


def bursts(lane: Lane, depth: int, names: Sequence[str]) -> Samples:
    """Seconds a request in bursts of `depth` through a thread; for one, also until it is issued."""
    complete = threading.Semaphore(0)
    issued_s = []

    def issue() -> None:
        for i in range(len(names)):
            unit = lane.next(TIMEOUT_S)
            issued_s.append(time.perf_counter())
            assert unit is not None
            lane.done(unit[0])
            if (i + 1) % depth == 0:
                complete.release()

    thread = threading.Thread(target=issue)
    thread.start()
    burst, handover = [], []
    for first in range(0, len(names), depth):
        begin = time.perf_counter()
        for i in range(first, first + depth):
            lane.submit(names[i], i % 7, 100)
        complete.acquire()
        burst.append((time.perf_counter() - begin) / depth)
        handover.append(issued_s[first] - begin)
    thread.join()
    return {"burst": burst, "handover": handover} if depth == 1 else {"burst": burst}


def in_python(make: Callable[[], Lane], depth: int, count: int) -> Samples:
    """All four series of a lane called from Python."""
    names = [f"table.{i}.values" for i in range(count)]
    return {**hold(make(), depth, names), **bursts(make(), depth, names)}


def compile_native(folder: str) -> str:
    """Builds bench/scheduler.cpp with the core; needs a C++20 compiler."""
    core = [p for p in (ROOT / "csrc/scheduler").glob("*.cpp") if p.name != "python.cpp"]
    target = f"{folder}/scheduler"
    compiler = os.environ.get("CXX", "c++")
    flags = ["-std=c++20", "-O3", "-pthread", f"-I{ROOT / 'csrc'}"]
    sources = [str(p) for p in (ROOT / "bench/scheduler.cpp", *core)]
    subprocess.run([compiler, *flags, *sources, "-o", target], check=True)
    return target


def in_native(program: str, mode: str, size: int, count: int) -> Samples:
    """Runs the native side and reads its series."""
    command = [program, mode, str(size), str(count)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    samples: Samples = {}
    for line in done.stdout.split():
        if line[0].isalpha():
            series = samples[line] = []
        else:
            series.append(float(line) * 1e-9)
    return samples


def measure(args: argparse.Namespace, program: str) -> list[dict[str, Any]]:
    """One record a depth, face and series, and a ranks and series of announcements."""
    gathered: dict[tuple[str, int, str], list[float]] = {}
    for step in track(range(args.rounds), description="rounds"):
        first = step % len(FACES)
        for depth in DEPTHS:
            count = max(args.count // depth, 1) * depth
            run = {
                FACES[0]: lambda d=depth, c=count: in_native(program, "queue", d, c),
                FACES[1]: lambda d=depth, c=count: in_python(
                    lambda: Scheduler(0, 1, [], CREDIT_BYTES, TIMEOUT_S), d, c
                ),
                FACES[2]: lambda d=depth, c=count: in_python(lambda: QueueLane(CREDIT_BYTES), d, c),
            }
            for face in FACES[first:] + FACES[:first]:
                for series, samples in run[face]().items():
                    gathered.setdefault((face, depth, series), []).extend(samples)
        for ranks in ANNOUNCED_RANKS:
            for series, samples in in_native(program, "announce", ranks, args.count // 4).items():
                gathered.setdefault(("announce", ranks, series), []).extend(samples)
    records = []
    for (face, size, series), samples in gathered.items():
        timing = Timing.of(samples)
        records.append(
            {
                "face": face,
                "ranks" if face == "announce" else "depth": size,
                "series": series,
                "median_us": timing.median_s * 1e6,
                "p10_us": timing.p10_s * 1e6,
                "p90_us": timing.p90_s * 1e6,
                "per_second": len(samples) / sum(samples),
                "samples": timing.num_samples,
            }
        )
    return records


def cell(record: dict[str, Any]) -> str:
    """Median (p10, p90) in microseconds."""
    return f"{record['median_us']:.2f} ({record['p10_us']:.2f}, {record['p90_us']:.2f})"


def show(records: list[dict[str, Any]]) -> None:
    """Microseconds and requests a second, faces by depth; then the announcements."""
    console = Console(width=130)
    queued = {(r["series"], r["face"], r["depth"]): r for r in records if "depth" in r}
    for series, depths in (
        ("latency", DEPTHS),
        ("cycle", DEPTHS),
        ("burst", DEPTHS),
        ("handover", DEPTHS[:1]),
    ):
        rate = series in ("cycle", "burst")
        unit = "thousand requests a second" if rate else "us, median (p10, p90)"
        table = Table(title=f"{series}: {unit}")
        table.add_column("face")
        for depth in depths:
            table.add_column(f"{depth} queued", justify="right")
        for face in FACES:
            cells = [queued[series, face, depth] for depth in depths]
            table.add_row(
                face, *(f"{r['per_second'] / 1e3:.0f}" if rate else cell(r) for r in cells)
            )
        for face in FACES[:2]:
            pairs = [(queued[series, FACES[2], d], queued[series, face, d]) for d in depths]
            ratios = [theirs["median_us"] / ours["median_us"] for theirs, ours in pairs]
            table.add_row(f"over {face}", *(f"{r:.1f}x" for r in ratios), style="dim")
        console.print(table)
    table = Table(title="announcements over loopback TCP: us, median (p10, p90)")
    for column in ("followers", "the leader's next", "submit until the last follower has it"):
        table.add_column(column, justify="right")
    told = {(r["series"], r["ranks"]): cell(r) for r in records if "ranks" in r}
    for ranks in ANNOUNCED_RANKS:
        table.add_row(
            str(ranks - 1), told["next", ranks], told.get(("reach", ranks), "no follower")
        )
    console.print(table)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=4000, help="requests a round and depth")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", help="file to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        records = measure(args, compile_native(folder))
    show(records)
    if args.json:
        write_json(args.json, records)


if __name__ == "__main__":
    main()

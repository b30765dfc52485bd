"""Timing that peers share fairly: interleaved calls, medians, and the machine in the record.

Every candidate runs once a round, and the one that goes first rotates, so noise of a shared machine
and frequency drift fall on all alike:

    round 0:  a b c
    round 1:  b c a
    round 2:  c a b
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call."""

    median_s: float
    p10_s: float
    p90_s: float
    num_samples: int

    @staticmethod
    def of(samples: Sequence[float]) -> Timing:
        """Summarises samples in seconds (at least one)."""
        ordered = sorted(samples)
        last = len(ordered) - 1
        p10, p90 = ordered[round(0.1 * last)], ordered[round(0.9 * last)]
        return Timing(statistics.median(ordered), p10, p90, len(ordered))


def interleave(
    candidates: Mapping[str, Callable[[int], object]],
    *,
    num_rounds: int = 11,
    num_warmups: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Times candidates side by side.

    Args:
        candidates: name to function; it gets the round's number, to rotate its buffers. What it
            returns is dropped outside the timed span. It must wait for its own work (synchronise
            a device, complete a collective).
        num_rounds: timed calls of each candidate.
        num_warmups: untimed rounds before.
        clock: seconds.

    Returns:
        name to Timing, in the order of ``candidates``.
    """
    names = list(candidates)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for step in range(-num_warmups, num_rounds):
        first = step % len(names)
        for name in names[first:] + names[:first]:
            run = candidates[name]
            begin = clock()
            result = run(step + num_warmups)
            elapsed = clock() - begin
            del result
            if step >= 0:
                samples[name].append(elapsed)
    return {name: Timing.of(times) for name, times in samples.items()}


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """What a reader needs to judge a figure: processor, cores, versions, date."""
    about: dict[str, Any] = {
        "cpu": cpu_name(),
        "num_cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
    if torch.cuda.is_available():
        about["gpu"] = torch.cuda.get_device_name()
        about["num_gpus"] = torch.cuda.device_count()
    return about


def write_json(path: str | Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Writes a list of records, each with the machine it was measured on."""
    about = machine()
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps([{**r, "machine": about} for r in records], indent=1) + "\n")

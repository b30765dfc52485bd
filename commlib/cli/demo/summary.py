"""A run's record reduced to the numbers that people compare."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

Record = dict[str, Any]
"""What `Trainer.finish` returns."""

SPLIT = ("forward", "backward", "scan", "exchange", "decode", "wait", "optimizer")
"""Parts of a step's seconds, in the order in which they happen."""


@dataclasses.dataclass(frozen=True)
class Summary:
    """One method's run.

    Attributes:
        method: The method's name.
        title: The method's name, for people.
        step_s: Median seconds of a step.
        step_mean_s: Mean seconds of a step.
        step_p10_s: 10th percentile of it.
        step_p90_s: 90th percentile of it.
        tokens_per_s: Words, or other samples, trained per second by all ranks.
        sparse_bytes: Mean bytes per step that a rank sends for embedding tables.
        over_bound: Those bytes over the least that an exact method can send.
        train_loss: Mean training loss of the last ten steps.
        valid_loss: Last validation loss.
        speedup: Plain DDP's median step over this one; None without a plain DDP run.
        split_s: Mean seconds of a step by part; see `SPLIT`.
    """

    method: str
    title: str
    step_s: float
    step_mean_s: float
    step_p10_s: float
    step_p90_s: float
    tokens_per_s: float
    sparse_bytes: float
    over_bound: float
    train_loss: float
    valid_loss: float
    speedup: float | None
    split_s: dict[str, float]


def summarize(records: Sequence[Record]) -> list[Summary]:
    """Summarises runs; those of plain DDP among them set the speed-up of 1."""
    base = next((_median_step(r) for r in records if r["method"] == "ddp"), None)
    return [_summarize_one(record, base) for record in records]


def timed_steps(record: Record) -> list[dict[str, Any]]:
    """Returns a run's steps after the warm-up, or all where there are no more."""
    steps: list[dict[str, Any]] = record["steps"]
    return steps[record["settings"]["warmup_steps"] :] or steps


def _summarize_one(record: Record, base: float | None) -> Summary:
    steps = timed_steps(record)
    seconds = [step["step_s"] for step in steps]
    step_s = statistics.median(seconds)
    sparse_bytes = _mean(step["sparse_bytes"] for step in steps)
    bound = _mean(step["bound_bytes"] for step in steps)
    return Summary(
        method=record["method"],
        title=record["title"],
        step_s=step_s,
        step_mean_s=_mean(seconds),
        step_p10_s=_percentile(seconds, 0.1),
        step_p90_s=_percentile(seconds, 0.9),
        tokens_per_s=record["num_ranks"] * record["num_samples"] / step_s,
        sparse_bytes=sparse_bytes,
        over_bound=sparse_bytes / bound if bound else float("nan"),
        train_loss=_mean(step["loss"] for step in steps[-10:]),
        valid_loss=record["validation"][-1]["loss"],
        speedup=base / step_s if base is not None else None,
        split_s=split_step(record),
    )


def split_step(record: Record) -> dict[str, float]:
    """Splits the mean step into parts.

    What the passes take beyond those of a step that communicates nothing is communication: of the
    backward pass, and where tables are partitioned of the forward pass too, which waits for their
    rows. Where commlib timed scanning, exchange and decoding they fill it, shrunk if they ran at
    the same time as other work; the rest is waiting, for dense parameters among other things.
    Without such timings it is all exchange.
    """
    steps = timed_steps(record)
    mean = {
        key: _mean(step[f"{key}_s"] for step in steps)
        for key in ("forward", "backward", "optimizer")
    }
    parts = {
        key: _mean(step.get(f"{key}_s", 0.0) for step in steps)
        for key in ("scan", "exchange", "decode")
    }
    passes = ["backward"]
    if all(step.get("embedding_wait_s") is not None for step in steps):
        parts["exchange"] = _mean(step["embedding_wait_s"] for step in steps)
        passes.append("forward")
    exposed = 0.0
    for name in passes:
        compute = min(mean[name], record["compute"][f"{name}_s"])
        exposed += mean[name] - compute
        mean[name] = compute
    measured = sum(parts.values())
    if measured == 0.0:
        parts["exchange"] = exposed
    elif measured > exposed:
        parts = {key: value * exposed / measured for key, value in parts.items()}
    wait = exposed - sum(parts.values())
    return {**mean, **parts, "wait": max(0.0, wait)}


def _median_step(record: Record) -> float:
    return float(statistics.median(step["step_s"] for step in timed_steps(record)))


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[round(share * (len(ordered) - 1))]

"""Measures the link once at start-up; the ranks agree on the slowest of their readings."""

from __future__ import annotations

import time
import typing
from collections.abc import Callable
from statistics import median
from typing import TypeVar

import torch

from commlib import ops
from commlib.collectives.requests import AllReduce, AllToAll, Protocol, ask
from commlib.topology.link import Link

T = TypeVar("T")
_PROBE_PART_BYTES = 1 << 20
_PROBE_RING_ELEMENTS = 1 << 19
_PROBE_ROWS, _PROBE_DIM = 16_384, 128


class Runner(typing.Protocol):
    """What runs protocols over a link: a lane."""

    @property
    def num_ranks(self) -> int:
        """Ranks on the link."""

    def run(self, name: str, protocol: Protocol[T]) -> T:
        """Run a protocol to its end."""


def probe_link(lane: Runner, *, num_trials: int = 5, ring_steps: int = 2) -> Link:
    """Time a direct exchange of nothing and of 1 MiB a peer, a ring of 2 MiB, and local work.

    Collective: every rank of the lane calls it. Takes about 0.2 s on a 1 Gbit/s
    link with four ranks.

    Args:
        lane: An idle lane.
        num_trials: Repetitions, of which the median counts.
        ring_steps: Latencies in a ring: two parts of one, or one where it is negotiated.

    Returns:
        The same link on every rank.

    Source: ours.
    """
    num_ranks = lane.num_ranks
    empty = torch.zeros(8 * num_ranks, dtype=torch.uint8)
    full = torch.zeros(_PROBE_PART_BYTES * num_ranks, dtype=torch.uint8)
    summed = torch.zeros(_PROBE_RING_ELEMENTS)

    def exchange(data: torch.Tensor) -> None:
        sizes = (len(data) // num_ranks,) * num_ranks
        lane.run("probe", ask(AllToAll(name="probe", tensor=data, send=sizes, recv=sizes)))

    def ring() -> None:
        lane.run("probe", ask(AllReduce(name="probe.ring", tensor=summed)))

    alpha = _median_s(lambda: exchange(empty), num_trials)
    whole = _median_s(lambda: exchange(full), max(3, num_trials // 2))
    around = _median_s(ring, num_trials)
    sent = _PROBE_PART_BYTES * (num_ranks - 1)
    ring_sent = 2 * (num_ranks - 1) / num_ranks * summed.numel() * 4
    beta = max(0.0, whole - alpha) / sent if sent else 0.0
    ring_beta = max(0.0, around - ring_steps * alpha) / ring_sent if sent else 0.0
    readings = torch.tensor([alpha, beta, ring_beta, _memory_s(num_trials)], dtype=torch.float64)
    agreed: torch.Tensor = lane.run(
        "probe", ask(AllReduce(name="probe.agree", tensor=readings, op="mean"))
    )
    alpha_s, beta_s, ring_s, memory_s = agreed.tolist()
    return Link(alpha_s=alpha_s, beta_s=beta_s, ring_s=ring_s, memory_s=memory_s)


def _memory_s(num_trials: int) -> float:
    """Seconds per byte of rows gathered into fresh memory, as reducers do, larger than caches."""
    rows = torch.zeros(_PROBE_ROWS, _PROBE_DIM)
    order = torch.arange(_PROBE_ROWS)
    return _median_s(lambda: ops.gather_rows(rows, order), num_trials) / (rows.numel() * 4)


def _median_s(call: Callable[[], object], num_trials: int) -> float:
    call()
    readings = []
    for _ in range(num_trials):
        start = time.perf_counter()
        call()
        readings.append(time.perf_counter() - start)
    return median(readings)

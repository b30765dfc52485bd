"""Measures the link once at start-up; the ranks agree on the slowest of their readings."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from commlib import ops
from commlib.collectives.c10d import C10dTransport
from commlib.collectives.requests import AllReduce, AllToAll
from commlib.topology.link import Link

_PROBE_PART_BYTES = 1 << 20
_PROBE_ROWS, _PROBE_DIM = 4096, 128


def probe_link(transport: C10dTransport, *, num_trials: int = 5) -> Link:
    """Time a direct exchange of nothing and of 1 MiB a peer, and a scatter-add of rows.

    Collective: every rank of the transport's group calls it. Takes about 0.1 s on a 1 Gbit/s
    link with four ranks.

    Args:
        transport: An idle transport.
        num_trials: Repetitions, of which the median counts.

    Returns:
        The same link on every rank.

    Source: ours.
    """
    num_ranks = transport.num_ranks
    empty = torch.zeros(8 * num_ranks, dtype=torch.uint8)
    full = torch.zeros(_PROBE_PART_BYTES * num_ranks, dtype=torch.uint8)

    def exchange(data: torch.Tensor) -> None:
        sizes = (len(data) // num_ranks,) * num_ranks
        transport.carry(AllToAll(name="probe", tensor=data, send=sizes, recv=sizes))

    alpha = _median_s(lambda: exchange(empty), num_trials)
    whole = _median_s(lambda: exchange(full), max(2, num_trials // 2))
    sent = _PROBE_PART_BYTES * (num_ranks - 1)
    beta = max(0.0, whole - alpha) / sent if sent else 0.0

    rows = torch.zeros(_PROBE_ROWS, _PROBE_DIM)
    order = torch.arange(_PROBE_ROWS)
    target = torch.zeros_like(rows)
    memory = _median_s(lambda: ops.scatter_add_rows_(target, order, rows), num_trials)
    readings = torch.tensor([alpha, beta, memory / (rows.numel() * 4)], dtype=torch.float64)
    agreed = transport.carry(AllReduce(name="probe.agree", tensor=readings, op="mean"))
    assert isinstance(agreed, torch.Tensor)
    alpha_s, beta_s, memory_s = agreed.tolist()
    return Link(alpha_s=alpha_s, beta_s=beta_s, memory_s=memory_s)


def _median_s(call: Callable[[], object], num_trials: int) -> float:
    call()
    readings = []
    for _ in range(num_trials):
        start = time.perf_counter()
        call()
        readings.append(time.perf_counter() - start)
    return median(readings)

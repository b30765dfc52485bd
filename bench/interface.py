"""Bytes that network interfaces counted, acknowledgements and most headers included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

_CLASS = Path("/sys/class/net")


def count_bytes(root: Path = _CLASS) -> tuple[int, int]:
    """Returns the bytes sent and received so far by this host's interfaces but the loopback."""
    sent = received = 0
    for interface in root.iterdir():
        if interface.name != "lo":
            counters = interface / "statistics"
            sent += int((counters / "tx_bytes").read_text())
            received += int((counters / "rx_bytes").read_text())
    return sent, received


def busiest_rank(call: Callable[[], object], num_calls: int) -> float:
    """Returns the bytes of one call at the busiest rank, in the larger direction; collective.

    Only right where every rank has a host of its own, as on `netlab`'s emulated links.
    """
    dist.barrier()
    before = count_bytes()
    for _ in range(num_calls):
        call()
    after = count_bytes()
    most = max(end - start for start, end in zip(before, after, strict=True))
    busiest = torch.tensor([most / num_calls], dtype=torch.float64)
    dist.all_reduce(busiest, op=dist.ReduceOp.MAX)
    return float(busiest)

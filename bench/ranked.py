"""Timing of collectives: a barrier before each call, and the slowest rank counts.

Candidates take turns as in `harness.interleave`, in an order that is the same on every rank. In its
turn each is called twice, and the second call counts: TCP restarts slowly after a pause of a round
trip's timeout, and a training loop, unlike a benchmark of many methods, has no such pauses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from bench.harness import Timing


def interleave_ranks(
    candidates: Mapping[str, Callable[[], object]], *, num_rounds: int, num_warmups: int = 1
) -> dict[str, Timing]:
    """Times collective calls side by side; every rank calls this with the same names.

    Args:
        candidates: Name to a collective call that waits for its own end.
        num_rounds: Timed calls of each.
        num_warmups: Untimed rounds before.

    Returns:
        Name to the timing of the slowest rank, round by round; the same on every rank.
    """
    names = list(candidates)
    seconds = torch.zeros(len(names), num_rounds, dtype=torch.float64)
    for step in range(-num_warmups, num_rounds):
        first = step % len(names)
        for name in names[first:] + names[:first]:
            candidates[name]()
            dist.barrier()
            begin = time.perf_counter()
            result = candidates[name]()
            elapsed = time.perf_counter() - begin
            del result
            if step >= 0:
                seconds[names.index(name), step] = elapsed
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return {name: Timing.of(row.tolist()) for name, row in zip(names, seconds, strict=True)}

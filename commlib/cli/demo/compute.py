"""What a step takes that communicates nothing: the same model, whole, on every rank at once."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from commlib.cli.demo.workload import Workload


@dataclass(frozen=True)
class Compute:
    """Seconds of a step without communication, and of its passes."""

    step_s: float
    forward_s: float
    backward_s: float


def measure_compute(workload: Workload, *, sparse: bool, num_steps: int = 7) -> Compute:
    """Takes steps with a rank's own gradients; mean over ranks of their medians. Collective.

    Args:
        workload: What is trained; it is built anew.
        sparse: Whether the tables' gradients are sparse tensors.
        num_steps: Steps, after a first one that is not timed.
    """
    model = workload.build(sparse=sparse)
    optimizer = workload.optimizer(model.parameters())
    seconds: list[tuple[float, float, float]] = []
    for step in range(num_steps + 1):
        batch = workload.batch(step)
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = model(*batch)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        optimizer.step()
        end = time.perf_counter()
        seconds.append((end - start, forward - start, backward - forward))
    medians = torch.tensor(
        [statistics.median(part) for part in zip(*seconds[1:], strict=True)], dtype=torch.float64
    )
    dist.all_reduce(medians)
    return Compute(*(medians / dist.get_world_size()).tolist())

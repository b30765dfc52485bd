"""One method at work on one model: wraps it, and takes its steps."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from commlib.cli.demo.touched import table_shapes
from commlib.cli.demo.workload import Workload

if TYPE_CHECKING:
    from commlib.cli.demo.methods import Method, State
    from commlib.cli.demo.settings import Settings


@dataclass(frozen=True)
class Step:
    """A step taken, and the seconds of its parts.

    Attributes:
        loss: Of this rank's batch. []
        forward_s: From the start, with the batch to be had, to the loss.
        backward_s: The backward pass, with what communication it waits for.
        optimizer_s: The update.
        embedding_wait_s: Of those, waiting for rows of partitioned tables and for the exchange of
            their gradients; None where tables are not partitioned.
        sparse_bytes: Bytes that this rank sent for tables; None where the driver does not count.
    """

    loss: Tensor
    forward_s: float
    backward_s: float
    optimizer_s: float
    embedding_wait_s: float | None = None
    sparse_bytes: float | None = None

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.forward_s + self.backward_s + self.optimizer_s


class Driver:
    """The plain way: the model in DDP, and the method's hook on it.

    A method that changes the model before DDP sees it overrides `wrap`; one that joins the ranks
    by other means than DDP, `join`; one that chooses when batches are read or what a step does,
    `batch` or `step`; one that keeps work back, or holds threads, `flush` and `close`.

    Args:
        method: How gradients are averaged.
        workload: What is trained.
        settings: The same on every rank.

    Attributes:
        tables: The model's tables, before `wrap`.
        num_parameters: Elements of all its parameters, before `wrap`.
        model: After `wrap`.
        ddp: What a step calls: the model, joined with those of the other ranks.
        state: commlib's, where there is one.
        optimizer: Of its parameters.
    """

    ddp: nn.Module
    state: State | None
    optimizer: torch.optim.Optimizer

    def __init__(self, method: Method, workload: Workload, settings: Settings) -> None:
        self.workload = workload
        self.method = method
        whole = workload.build(sparse=method.sparse)
        self.tables = table_shapes(whole)
        self.num_parameters = sum(parameter.numel() for parameter in whole.parameters())
        self.model = self.wrap(whole)
        self.join(settings)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Returns the model for DDP."""
        return model

    def join(self, settings: Settings) -> None:
        """Joins the ranks' models: sets `ddp`, `state` and `optimizer`; collective."""
        ddp = DistributedDataParallel(self.model, bucket_cap_mb=self.method.bucket_cap_mb)
        self.state = self.method.attach(ddp, settings)
        self.optimizer = self.workload.optimizer(ddp.parameters())
        self.ddp = ddp

    def batch(self, step: int) -> tuple[Tensor, ...]:
        """Returns the batch of a step; steps come one after the other."""
        return self.workload.batch(step)

    def step(self, step: int) -> Step:
        """Trains one step, counted from 0."""
        start = time.perf_counter()
        batch = self.batch(step)
        self.optimizer.zero_grad()
        loss = self.ddp(*batch)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        end = time.perf_counter()
        return Step(loss.detach(), forward - start, backward - forward, end - backward)

    def flush(self) -> None:
        """Ends what is under way, so that the weights are those after the last step."""

    def close(self) -> None:
        """Gives threads and groups back; collective."""
        if self.state is not None:
            self.state.close()

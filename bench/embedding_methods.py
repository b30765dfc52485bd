"""What `bench.embedding` compares: one table, kept and updated in several ways."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bench.gradients import zipf_tokens
from bench.partitioned import Meter
from bench.torchrec_peer import TorchrecTable
from commlib import ddp as commlib_ddp
from commlib import embrace

NUM_BATCHES = 4
"""Different batches that steps go round."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One point of the benchmark.

    Attributes:
        rows: V.
        dim: D.
        tokens: Ids that each rank looks up in a step.
        zipf: Exponent of their skew.
    """

    rows: int
    dim: int
    tokens: int
    zipf: float = 1.0

    @property
    def table_bytes(self) -> int:
        """Bytes of the table, fp32."""
        return self.rows * self.dim * 4

    @property
    def lr(self) -> float:
        """SGD's step size: no row, however frequent, overshoots."""
        return 4 / self.tokens

    def ids(self, step: int, rank: int) -> Tensor:
        """A rank's ids of a step. [tokens]"""
        seed = (step % NUM_BATCHES) * 1_000 + rank
        return zipf_tokens(self.rows, self.tokens, self.zipf, seed=seed)

    def weight(self) -> Tensor:
        """The table before the first step, the same on every rank. [V, D]"""
        return torch.randn(self.rows, self.dim, generator=torch.Generator().manual_seed(7))

    def target(self, rank: int) -> Tensor:
        """What a rank's rows should become. [tokens, D]"""
        return torch.randn(self.tokens, self.dim, generator=torch.Generator().manual_seed(rank))


class Method(Protocol):
    """A table that trains: half the squared distance of the looked-up rows from a target."""

    def step(self, ids: Tensor, target: Tensor) -> None:
        """Forward, backward and update. ids [T], target [T, D]"""

    def weight(self) -> Tensor:
        """The whole table; collective. [V, D]"""

    def sent_bytes(self) -> float | None:
        """Bytes that this rank sent in the last step by the method's own count, if it counts."""

    def close(self) -> None:
        """Gives threads and groups back; collective."""


class DdpTable:
    """`nn.Embedding` in DDP, dense or sparse, with commlib's hook or without."""

    def __init__(self, shape: Shape, *, sparse: bool, exact: bool = False) -> None:
        table = nn.Embedding(shape.rows, shape.dim, _weight=shape.weight(), sparse=sparse)
        self.ddp = DistributedDataParallel(table, gradient_as_bucket_view=not sparse)
        self.state = commlib_ddp.register(self.ddp) if exact else None
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=shape.lr)

    def step(self, ids: Tensor, target: Tensor) -> None:
        """As `Method`."""
        self.optimizer.zero_grad()
        output = self.ddp(ids)
        output.backward(output.detach() - target)
        self.optimizer.step()

    def weight(self) -> Tensor:
        """As `Method`."""
        table: Tensor = self.ddp.module.weight.detach()
        return table

    def sent_bytes(self) -> float | None:
        """As `Method`."""
        if self.state is None:
            return None
        return float(self.state.stats()[-1]["bytes_sent"])

    def close(self) -> None:
        """As `Method`."""
        if self.state is not None:
            self.state.close()


class EmbraceTable:
    """The table partitioned by columns, with sparse gradients."""

    def __init__(self, shape: Shape) -> None:
        table = nn.Embedding(shape.rows, shape.dim, _weight=shape.weight(), sparse=True)
        self.table = embrace.shard(table)
        self.meter = Meter(self.table)
        self.optimizer = torch.optim.SGD(self.table.parameters(), lr=shape.lr)

    def step(self, ids: Tensor, target: Tensor) -> None:
        """As `Method`."""
        self.meter.take_sent_bytes()
        self.optimizer.zero_grad()
        output = self.table(ids)
        output.backward(output.detach() - target)
        self.optimizer.step()

    def weight(self) -> Tensor:
        """As `Method`."""
        return cast(DTensor, self.table.weight).full_tensor().detach()

    def sent_bytes(self) -> float | None:
        """As `Method`."""
        return float(self.meter.take_sent_bytes())

    def close(self) -> None:
        """As `Method`."""
        embrace.close(self.table)


def _torchrec(shape: Shape, *, by: str, unique: bool = False) -> Method:
    return TorchrecTable(shape.weight(), shape.lr, by=by, unique=unique)


METHODS: dict[str, Callable[[Shape], Method]] = {
    "torchrec-cw": functools.partial(_torchrec, by="columns"),
    "torchrec-cw-unique": functools.partial(_torchrec, by="columns", unique=True),
    "torchrec-rw": functools.partial(_torchrec, by="rows"),
    "torchrec-rw-unique": functools.partial(_torchrec, by="rows", unique=True),
    "ddp-dense": functools.partial(DdpTable, sparse=False),
    "ddp-sparse": functools.partial(DdpTable, sparse=True),
    "exact": functools.partial(DdpTable, sparse=True, exact=True),
    "embrace": EmbraceTable,
}
"""Every method by name, in the order in which their tables are made."""


def verified(shape: Shape, method: Method, num_steps: int = 2) -> bool:
    """Takes the first steps; returns whether the table equals one trained by a single process."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    target = shape.target(rank)
    for step in range(num_steps):
        method.step(shape.ids(step, rank), target)
    ids = [[shape.ids(step, peer) for peer in range(num_ranks)] for step in range(num_steps)]
    union = torch.unique(torch.cat([torch.cat(batch) for batch in ids]))
    first = shape.weight()
    expected = first[union].double()
    for batch in ids:
        gradient = torch.zeros_like(expected)
        for peer, peer_ids in enumerate(batch):
            position = torch.searchsorted(union, peer_ids)
            difference = expected[position] - shape.target(peer).double()
            gradient.index_add_(0, position, difference / num_ranks)
        expected -= shape.lr * gradient
    table = method.weight()
    update = table[union].double() - first[union]
    # Relative to the update, so that a row left out is seen however large its weights are.
    right = torch.allclose(update, expected - first[union], rtol=1e-3, atol=1e-6)
    unchanged = (table == first).all(dim=1)
    unchanged[union] = True
    agreed = torch.tensor([right and bool(unchanged.all())], dtype=torch.int32)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return bool(agreed)

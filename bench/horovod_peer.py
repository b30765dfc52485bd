"""Horovod's two ways to reduce a table's gradient, and a lane over Horovod; needs `hvd.init()`."""

from __future__ import annotations

import importlib

from torch import Tensor

from commlib.schedule import Lane
from commlib.topology import Link, probe_link

INDEX_BYTES = 8
_TIMEOUT_S = 120.0


def gathered_bytes(num_ranks: int, num_lookups: int, row_bytes: int) -> float:
    """Bytes that a rank sends in Horovod's sparse allreduce: (n-1) · L · (D·w + 8).

    It sends what it is given, in two all-gathers, indices and values. The gradient of
    `nn.Embedding(sparse=True)` has an entry a lookup, so ids that a rank looks up twice go twice.

    Args:
        num_ranks: n.
        num_lookups: L, entries of a rank's gradient.
        row_bytes: D·w.
    """
    return float((num_ranks - 1) * num_lookups * (row_bytes + INDEX_BYTES))


def reduce_dense(table: Tensor) -> Tensor:
    """Horovod's allreduce of the whole table, to the mean, in place; bytes 2(n-1)/n V D w."""
    hvd = importlib.import_module("horovod.torch")
    reduced: Tensor = hvd.allreduce_(table, name="bench.dense", op=hvd.Average)
    return reduced


def reduce_sparse(gradient: Tensor) -> Tensor:
    """Horovod's sparse allreduce, to the mean; equal ids are not summed. Bytes `gathered_bytes`."""
    hvd = importlib.import_module("horovod.torch")
    wait = hvd.sparse_allreduce_async(gradient, name="bench.sparse", op=hvd.Average)
    reduced: Tensor = wait()
    return reduced


def open_lane() -> tuple[Lane, Link]:
    """A lane over Horovod, and what its link costs; collective."""
    peers = importlib.import_module("commlib.schedule.horovod").HorovodPeers()
    lane: Lane = peers.open_lane("bench", _TIMEOUT_S)
    return lane, probe_link(lane)

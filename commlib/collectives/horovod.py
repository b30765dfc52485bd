"""Carries single requests by Horovod's collectives, which match by name.

    AllReduce of fp32 or fp64 (sum, mean)   Horovod's allreduce, which it may fuse with others
    AllReduce, all others                   as elsewhere: parts to the rank that sums, sums to all
    AllGather, AllToAll                     bytes, with uneven rows
    Broadcast                               bytes

So a bitwise OR is an all-to-all, a local OR and an all-gather, and any dtype travels. Nobody tells
when an operation has ended, so a lane polls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from torch import Tensor

from commlib.collectives.blame import Blame
from commlib.collectives.carried import sum_directly
from commlib.collectives.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Protocol,
    Request,
)
from commlib.errors import CommError

_SUMMED = (torch.float32, torch.float64)
_GRACE_S = 1.0


class HorovodCommError(CommError, HorovodInternalError):  # type: ignore[misc]
    """A CommError from which `hvd.elastic.run` recovers."""


@dataclass(slots=True)
class Operation:
    """A Horovod operation under way; handle None where nothing has to travel."""

    handle: int | None

    def when_landed(self, wake: Callable[[], None]) -> bool:
        """As `Flying`: Horovod tells nobody."""
        return self.handle is None

    def landed(self) -> bool:
        """Whether it has ended, well or not."""
        return self.handle is None or bool(hvd.poll(self.handle))


@dataclass(slots=True)
class Named:
    """A request, prepared.

    Args:
        tensor: What is handed to Horovod: 2-D uint8 rows, or the values to sum.
        out: The answer's shape and dtype; rows may differ in number.
        output: What Horovod gave.
    """

    request: Request
    tensor: Tensor
    out: Tensor
    num_ranks: int
    output: Any = None

    def result(self) -> Tensor:
        """The answer."""
        match self.request:
            case AllReduce(op=op):
                summed: Tensor = self.output if self.output is not None else self.tensor
                return summed.div_(self.num_ranks) if op == "mean" else summed
            case AllToAll():
                rows = self.tensor if self.output is None else self.output[0]
            case _:
                rows = self.tensor if self.output is None else self.output
        return _from_bytes(rows, self.out)


@dataclass(slots=True)
class HorovodTransport:
    """Starts requests as Horovod operations, and waits for them.

    Args:
        process_set: Who takes part.
        scope: Put before the names of requests; agreed, and used by one transport only.
        blame: Finds out who broke it.
        timeout_s: Longest wait for one request.

    Raises (from all that starts or waits):
        HorovodCommError: A peer failed, died or did not come in time; names rank and request.

    Source: ours.
    """

    process_set: hvd.ProcessSet
    scope: str
    blame: Blame
    timeout_s: float
    failed: CommError | None = None
    rank: int = field(init=False)
    num_ranks: int = field(init=False)

    def __post_init__(self) -> None:
        self.rank, self.num_ranks = int(self.process_set.rank()), int(self.process_set.size())

    @property
    def ordered(self) -> bool:
        """Requests match by name."""
        return False

    def expand(self, request: Request) -> Protocol[Tensor] | None:
        """The requests that this one is made of; None for what is carried as it is."""
        if not isinstance(request, AllReduce):
            return None
        if request.op in ("sum", "mean") and request.tensor.dtype in _SUMMED:
            return None
        return sum_directly(request, self.rank, self.num_ranks)

    def prepare(self, request: Request) -> Named:
        """Lay out the buffers of a request."""
        tensor = request.tensor.contiguous()
        match request:
            case AllReduce():
                return Named(request, tensor, tensor, self.num_ranks)
            case Broadcast():
                return Named(request, _as_bytes(tensor).clone(), tensor, self.num_ranks)
        return Named(request, _as_bytes(tensor), tensor, self.num_ranks)

    def start(self, request: Request, carried: Named, slice_idx: int, num_slices: int) -> Operation:
        """Begin a prepared request, whole; returns at once."""
        assert num_slices == 1
        if self.failed is not None:
            raise self.failed
        if self.num_ranks == 1 or _is_nothing(request):
            return Operation(None)
        try:
            return Operation(self._enqueue(request, carried.tensor))
        except (HorovodInternalError, ValueError) as error:
            raise self._lost(request, str(error)) from error

    def _enqueue(self, request: Request, tensor: Tensor) -> int:
        name = f"{self.scope}.{request.name}"
        process_set = self.process_set
        match request:
            case AllReduce():
                handle = hvd.allreduce_async_(
                    tensor, name=name, op=hvd.Sum, process_set=process_set
                )
            case AllGather():
                handle = hvd.allgather_async(tensor, name=name, process_set=process_set)
            case AllToAll(send=send):
                splits = torch.tensor(send, dtype=torch.int32)
                handle = hvd.alltoall_async(tensor, splits, name=name, process_set=process_set)
            case Broadcast(root=root):
                ranks = process_set.ranks
                handle = hvd.broadcast_async_(
                    tensor, ranks[root] if ranks else root, name=name, process_set=process_set
                )
        return int(handle)

    def finish(self, request: Request, exchange: Operation, carried: Named) -> None:
        """Take over what arrived."""
        if exchange.handle is None:
            return
        try:
            carried.output = hvd.synchronize(exchange.handle)
        except HorovodInternalError as error:
            raise self._lost(request, str(error)) from error

    def look_around(self, request: Request, start_s: float) -> None:
        """Raise if another rank has failed, or a request is under way for too long."""
        reported = bool(self.blame.board.read())
        if reported or time.monotonic() > start_s + self.timeout_s + _GRACE_S:
            self.failed = self.blame.late(request.name, None if reported else self.timeout_s)
            raise self.failed

    def close(self) -> None:
        """Refuse further requests; those under way are Horovod's."""
        if self.failed is None:
            self.failed = HorovodCommError(
                "this transport is closed", remedy="make a new optimizer"
            )

    def _lost(self, request: Request, why: str) -> CommError:
        self.failed = self.blame.lost(request.name, why)
        return self.failed


def _is_nothing(request: Request) -> bool:
    """Whether all ranks know that no byte has to travel."""
    width = request.tensor.shape[1:].numel()
    return width == 0 or (isinstance(request, AllGather) and sum(request.sizes) == 0)


def _as_bytes(tensor: Tensor) -> Tensor:
    """`[rows, bytes of a row]`, uint8."""
    rows = tensor.shape[0] if tensor.dim() else 1
    width = tensor.shape[1:].numel() * tensor.element_size()
    return tensor.view(-1).view(torch.uint8).view(rows, width)


def _from_bytes(rows: Tensor, like: Tensor) -> Tensor:
    if not like.dim():
        return rows.view(-1).view(like.dtype).view(())
    return (
        rows.view(-1).view(like.dtype).view(-1, *like.shape[1:])
        if rows.numel()
        else (like.new_empty((rows.shape[0], *like.shape[1:])))
    )

"""How a request becomes exchanges over a process group: whole, or slice by slice.

    AllToAll, AllGather, Broadcast   one exchange, whose parts may be cut into slices
    AllReduce, long fp32 or fp64     Gloo's ring, which may be cut into slices
    AllReduce, all others            two requests: parts to the rank that sums them, sums to all

A slice takes the same share of every part, so both ends of a part cut it alike without knowing the
other parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commlib.collectives.exchange import Exchange, start_exchange
from commlib.collectives.reduce import combine
from commlib.collectives.requests import (
    RING_BYTES,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Protocol,
    Request,
    chunk_sizes,
)

_RING_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
}


@dataclass(slots=True)
class Direct:
    """An exchange of parts, prepared.

    Args:
        parts: What goes to each rank, 1-D uint8.
        arriving: What comes from each rank, 1-D uint8, views of `out`.
        out: The answer, once every slice has arrived.
    """

    parts: Sequence[Tensor]
    arriving: Sequence[Tensor]
    out: Tensor

    def start(self, group: dist.ProcessGroup, slice_idx: int, num_slices: int) -> Exchange:
        """Begin one slice."""
        return start_exchange(
            group,
            [_slice(part, slice_idx, num_slices) for part in self.parts],
            [_slice(part, slice_idx, num_slices) for part in self.arriving],
        )

    def result(self) -> Tensor:
        """The answer."""
        return self.out


@dataclass(slots=True)
class Ring:
    """A sum in place by Gloo's ring, prepared."""

    request: AllReduce
    tensor: Tensor
    num_ranks: int

    def start(self, group: dist.ProcessGroup, slice_idx: int, num_slices: int) -> Exchange:
        """Begin one slice."""
        options = dist.AllreduceOptions()
        options.reduceOp = _RING_OPS[self.request.op]
        flat = _slice(self.tensor.view(-1), slice_idx, num_slices)
        return Exchange(gate=group.allreduce([flat], options))

    def result(self) -> Tensor:
        """The answer."""
        mean = self.request.op == "mean"
        return self.tensor.div_(self.num_ranks) if mean else self.tensor


Carried = Direct | Ring


def prepare(request: Request, rank: int, num_ranks: int) -> Carried:
    """Lay out the buffers of a request that `expand` leaves as it is.

    The answer's memory is taken here; the request's tensor is in use until the last slice ended.
    """
    match request:
        case AllToAll(tensor=tensor, send=send, recv=recv):
            out = tensor.new_empty((sum(recv), *tensor.shape[1:]))
            return Direct(_parts(tensor.contiguous(), send), _parts(out, recv), out)
        case AllGather(tensor=tensor, sizes=sizes):
            out = tensor.new_empty((sum(sizes), *tensor.shape[1:]))
            return Direct([_as_bytes(tensor.contiguous())] * num_ranks, _parts(out, sizes), out)
        case Broadcast(tensor=tensor, root=root):
            out = tensor.contiguous().clone()
            data, nothing = _as_bytes(out), _as_bytes(out)[:0]
            if rank == root:
                parts = [nothing if peer == rank else data for peer in range(num_ranks)]
                return Direct(parts, [nothing] * num_ranks, out)
            arriving = [data if peer == root else nothing for peer in range(num_ranks)]
            return Direct([nothing] * num_ranks, arriving, out)
        case AllReduce(tensor=tensor):
            return Ring(request, tensor.contiguous(), num_ranks)


def expand(request: Request, rank: int, num_ranks: int) -> Protocol[Tensor] | None:
    """The requests that an allreduce is made of; None for what one exchange carries."""
    if not isinstance(request, AllReduce):
        return None
    tensor = request.tensor
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes >= RING_BYTES and tensor.dtype in (torch.float32, torch.float64):
        return None
    return sum_directly(request, rank, num_ranks)


def sum_directly(request: AllReduce, rank: int, num_ranks: int) -> Protocol[Tensor]:
    """An allreduce by parts: each rank sums one, and gives it to all."""
    flat = request.tensor.contiguous().view(-1)
    chunks = chunk_sizes(flat.numel(), num_ranks)
    mine = chunks[rank]
    arrived = yield AllToAll(
        name=f"{request.name}/sum", tensor=flat, send=chunks, recv=(mine,) * num_ranks
    )
    own = combine(arrived.view(num_ranks, mine).unbind(0), request.op)
    out: Tensor = yield AllGather(name=f"{request.name}/spread", tensor=own, sizes=chunks)
    return out.view(request.tensor.shape)


def _parts(tensor: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    width = tensor.shape[1:].numel() * tensor.element_size()
    parts: Sequence[Tensor] = _as_bytes(tensor).split([size * width for size in sizes])
    return parts


def _slice(flat: Tensor, slice_idx: int, num_slices: int) -> Tensor:
    if num_slices == 1:
        return flat
    length = len(flat)
    return flat[length * slice_idx // num_slices : length * (slice_idx + 1) // num_slices]


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)

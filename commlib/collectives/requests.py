"""What a protocol may ask of a transport.

A protocol is a generator that yields requests and is sent the answers. It yields one request, or
a tuple of requests that travel at once; it is sent one answer, or a tuple of answers.
`Later(request)` is answered at once with a `Ticket`, and yielding the ticket gives the request's
answer, so that work goes on while bytes travel. Sizes in a request are agreed values: each rank
computed them from what every rank already knows.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

ReduceOp = Literal["sum", "mean", "max", "bor"]

# From here on Gloo's ring moves a sum faster than direct exchanges (docs/results/transport.md).
RING_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class AllReduce:
    """Reduce a tensor of one shape over all ranks; the answer is the result, same shape and dtype.

    Half types are accumulated in fp32 and rounded once; `mean` divides before that rounding.
    `bor` is for uint8. The request's tensor may be overwritten with the answer.
    Steps 2, or a ring from `RING_BYTES` of fp32 or fp64 on; bytes 2(n-1)/n of the tensor.
    """

    name: str
    tensor: Tensor
    op: ReduceOp = "sum"


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class AllGather:
    """Concatenate every rank's tensor along dim 0; rank r gives `sizes[r]` entries.

    Step 1, bytes (n-1) of the own tensor.
    """

    name: str
    tensor: Tensor
    sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class AllToAll:
    """Send `send[p]` entries (along dim 0, in rank order) to rank p, receive `recv[p]` from it.

    The answer is the concatenation of what arrived, in rank order. Step 1.
    """

    name: str
    tensor: Tensor
    send: tuple[int, ...]
    recv: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Broadcast:
    """Give every rank the root's tensor; shapes agree beforehand. Step 1."""

    name: str
    tensor: Tensor
    root: int = 0


Request: TypeAlias = AllReduce | AllGather | AllToAll | Broadcast


@dataclass(frozen=True, eq=False, slots=True)
class Later:
    """Start a request; the answer is a `Ticket`. Its tensor must stay as it is until redeemed."""

    request: Request


@dataclass(frozen=True, eq=False, slots=True)
class Ticket:
    """A request under way. Yielding it, once, gives the request's answer.

    Args:
        request: What is under way.
        redeem: The transport's: waits, and returns the answer.
    """

    request: Request
    redeem: Callable[[], Tensor]


Yielded: TypeAlias = Request | Later | Ticket | tuple[Request, ...]
T = TypeVar("T")
Protocol: TypeAlias = Generator[Yielded, Any, T]


def ask(request: Request) -> Protocol[Any]:
    """The protocol of a single request; gives its answer."""
    answer = yield request
    return answer


def started(yielded: Yielded) -> tuple[Request, ...]:
    """The requests that begin to travel when this is yielded."""
    if isinstance(yielded, Ticket):
        return ()
    if isinstance(yielded, Later):
        return (yielded.request,)
    return yielded if isinstance(yielded, tuple) else (yielded,)


def chunk_sizes(total: int, num_ranks: int) -> tuple[int, ...]:
    """Split `total` entries into one contiguous chunk a rank, the first ones larger by one."""
    base, extra = divmod(total, num_ranks)
    return tuple(base + (r < extra) for r in range(num_ranks))


def request_bytes(request: Request, rank: int, num_ranks: int) -> tuple[int, int]:
    """Bytes that `rank` sends to and receives from other ranks for one request."""
    if num_ranks == 1:
        return 0, 0
    total = request.tensor.numel() * request.tensor.element_size()
    width = request.tensor.shape[1:].numel() * request.tensor.element_size()
    match request:
        case AllToAll(send=send, recv=recv):
            return (sum(send) - send[rank]) * width, (sum(recv) - recv[rank]) * width
        case AllGather(sizes=sizes):
            return (num_ranks - 1) * sizes[rank] * width, (sum(sizes) - sizes[rank]) * width
        case Broadcast(root=root):
            return ((num_ranks - 1) * total, 0) if rank == root else (0, total)
        case AllReduce(tensor=tensor):
            size = tensor.element_size()
            own = chunk_sizes(tensor.numel(), num_ranks)[rank] * size
            moved = total + (num_ranks - 2) * own
            return moved, moved


def check_request(request: Request, rank: int, num_ranks: int) -> None:
    """Refuse a request that could not be carried, before any byte moves.

    Raises:
        ValueError: Sizes that are negative, of the wrong number, or not those of the tensor.
        TypeError: An op that the dtype does not have.

    Source: ours (pytorch #117486 is the failure it prevents).
    """
    rows = request.tensor.shape[0] if request.tensor.dim() else 1
    match request:
        case AllGather(sizes=sizes):
            _check_sizes(request.name, "sizes", sizes, num_ranks)
            if sizes[rank] != rows:
                raise ValueError(
                    f"request '{request.name}' on rank {rank}: sizes[{rank}] = {sizes[rank]}"
                    f" but the tensor has {rows} entries along dim 0"
                )
        case AllToAll(send=send, recv=recv):
            _check_sizes(request.name, "send", send, num_ranks)
            _check_sizes(request.name, "recv", recv, num_ranks)
            if sum(send) != rows:
                raise ValueError(
                    f"request '{request.name}' on rank {rank}: send sums to {sum(send)}"
                    f" but the tensor has {rows} entries along dim 0"
                )
            if send[rank] != recv[rank]:
                raise ValueError(
                    f"request '{request.name}' on rank {rank}: send[{rank}] = {send[rank]} and"
                    f" recv[{rank}] = {recv[rank]} must be equal, both are this rank's own"
                )
        case AllReduce(op=op, tensor=tensor):
            if (op == "bor") != (tensor.dtype == torch.uint8):
                raise TypeError(
                    f"request '{request.name}': op '{op}' does not go with {tensor.dtype};"
                    " use 'bor' for uint8 bitmaps and the others for floating point"
                )
        case Broadcast(root=root):
            if not 0 <= root < num_ranks:
                raise ValueError(
                    f"request '{request.name}': root = {root} is not a rank of {num_ranks}"
                )


def _check_sizes(name: str, what: str, sizes: tuple[int, ...], num_ranks: int) -> None:
    if len(sizes) != num_ranks or any(size < 0 for size in sizes):
        raise ValueError(
            f"request '{name}': {what} = {sizes} must hold one non-negative number for each of"
            f" the {num_ranks} ranks"
        )

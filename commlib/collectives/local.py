"""n ranks in one process: their generators driven in lockstep, every byte counted.

No threads and no network, so it is deterministic, and 64 ranks are as easy as two. Tests use it
for exact byte counts, `bench.scale` to look beyond the machine at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from commlib.collectives.reduce import combine
from commlib.collectives.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Later,
    Protocol,
    Request,
    T,
    Ticket,
    Yielded,
    check_request,
    chunk_sizes,
)
from commlib.errors import CommError


@dataclass(frozen=True, slots=True)
class RequestTraffic:
    """One request of the lockstep run: bytes that each rank sent and received."""

    name: str
    kind: str
    sent_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]


@dataclass(slots=True)
class LocalTransport:
    """Drives one generator a rank in lockstep and keeps the traffic of all requests.

    Args:
        num_ranks: n.

    Source: ours; the sans-I/O shape follows h11 and wsproto.
    """

    num_ranks: int
    traffic: list[RequestTraffic] = field(default_factory=list)
    num_rounds: int = 0
    _due: dict[str, int] = field(default_factory=dict)

    def run(self, protocols: Sequence[Protocol[T]]) -> list[T]:
        """Run `protocols[r]` as rank r until all return; gives their results in rank order.

        Raises:
            ValueError: Not one protocol a rank, or ranks that ask for different things.
            CommError: One rank ended while others still wait for it.
        """
        if len(protocols) != self.num_ranks:
            raise ValueError(f"{len(protocols)} protocols given for {self.num_ranks} ranks")
        results: dict[int, T] = {}
        answers: list[object] = [None] * self.num_ranks
        while True:
            yielded: list[Yielded] = []
            for rank, protocol in enumerate(protocols):
                try:
                    yielded.append(protocol.send(answers[rank]))
                except StopIteration as stop:
                    results[rank] = stop.value
            if not yielded:
                return [results[rank] for rank in range(self.num_ranks)]
            if results:
                name = _requests(yielded[0])[0].name
                raise CommError(
                    f"ranks {sorted(results)} have ended while others wait",
                    request=name,
                    remedy="every rank must yield the same requests",
                )
            answers = self._exchange(yielded)

    def sent_bytes(self) -> tuple[int, ...]:
        """Bytes sent by each rank over all requests so far."""
        return self._total([entry.sent_bytes for entry in self.traffic])

    def received_bytes(self) -> tuple[int, ...]:
        """Bytes received by each rank over all requests so far."""
        return self._total([entry.received_bytes for entry in self.traffic])

    def busiest_bytes(self) -> int:
        """The larger of what the busiest rank sent and what the busiest rank received."""
        return max(*self.sent_bytes(), *self.received_bytes())

    def _total(self, entries: list[tuple[int, ...]]) -> tuple[int, ...]:
        return tuple(sum(entry[r] for entry in entries) for r in range(self.num_ranks))

    def _exchange(self, yielded: list[Yielded]) -> list[object]:
        if any(isinstance(item, Ticket) for item in yielded):
            return [self._redeem(item, yielded[0]) for item in yielded]
        if isinstance(yielded[0], Later):
            self._due[yielded[0].request.name] = self.num_rounds + 1
        else:
            self.num_rounds += 1
        batches = [_requests(item) for item in yielded]
        if len({len(batch) for batch in batches}) != 1:
            raise ValueError(f"ranks yielded different numbers of requests: {batches}")
        columns = [self._carry(list(column)) for column in zip(*batches, strict=True)]
        rows = list(zip(*columns, strict=True))
        answers: list[object] = []
        for item, row in zip(yielded, rows, strict=True):
            if isinstance(item, Later):
                answers.append(Ticket(item.request, partial(_answer, row[0])))
            else:
                answers.append(row if isinstance(item, tuple) else row[0])
        return answers

    def _redeem(self, item: Yielded, first: Yielded) -> Tensor:
        if not (isinstance(item, Ticket) and isinstance(first, Ticket)):
            raise ValueError(f"some ranks redeem a ticket while others ask: {item} and {first}")
        if item.request.name != first.request.name:
            raise ValueError(
                f"ranks redeem different tickets: '{first.request.name}' and '{item.request.name}'"
            )
        self.num_rounds = max(self.num_rounds, self._due[item.request.name])
        return item.redeem()

    def _carry(self, requests: list[Request]) -> list[Tensor]:
        first = requests[0]
        for rank, request in enumerate(requests):
            if type(request) is not type(first) or request.name != first.name:
                raise ValueError(
                    f"rank 0 asks for {type(first).__name__} '{first.name}' but rank {rank} for"
                    f" {type(request).__name__} '{request.name}'"
                )
            check_request(request, rank, self.num_ranks)
        tensors = [request.tensor for request in requests]
        match first:
            case AllReduce(op=op):
                result = combine(tensors, op)
                flows = _all_reduce_flows(result, self.num_ranks)
                answers = [result.clone() for _ in requests]
            case AllGather():
                result = torch.cat(tensors)
                own = [_num_bytes(tensor) for tensor in tensors]
                flows = [[size] * self.num_ranks for size in own]
                answers = [result.clone() for _ in requests]
            case AllToAll():
                answers, flows = _all_to_all(requests)
            case Broadcast(root=root):
                answers = [tensors[root].clone() for _ in requests]
                flows = [
                    [_num_bytes(tensors[root]) if r == root else 0] * self.num_ranks
                    for r in range(self.num_ranks)
                ]
        self._count(first, flows)
        return answers

    def _count(self, request: Request, flows: list[list[int]]) -> None:
        ranks = range(self.num_ranks)
        self.traffic.append(
            RequestTraffic(
                request.name,
                type(request).__name__,
                tuple(sum(flows[r][p] for p in ranks if p != r) for r in ranks),
                tuple(sum(flows[p][r] for p in ranks if p != r) for r in ranks),
            )
        )


def _requests(item: Yielded) -> tuple[Request, ...]:
    if isinstance(item, (Later, Ticket)):
        return (item.request,)
    return item if isinstance(item, tuple) else (item,)


def _answer(answer: Tensor) -> Tensor:
    return answer


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _all_reduce_flows(tensor: Tensor, num_ranks: int) -> list[list[int]]:
    """Bytes from rank r to rank p: p's chunk to be summed, then r's chunk summed."""
    chunks = [size * tensor.element_size() for size in chunk_sizes(tensor.numel(), num_ranks)]
    return [[chunks[p] + chunks[r] for p in range(num_ranks)] for r in range(num_ranks)]


def _all_to_all(requests: list[Request]) -> tuple[list[Tensor], list[list[int]]]:
    batches = [request for request in requests if isinstance(request, AllToAll)]
    pieces = [request.tensor.split(list(request.send)) for request in batches]
    for rank, request in enumerate(batches):
        for peer, size in enumerate(request.recv):
            if pieces[peer][rank].shape[0] != size:
                raise ValueError(
                    f"request '{request.name}': rank {rank} expects {size} entries from rank"
                    f" {peer}, which sends {pieces[peer][rank].shape[0]}"
                )
    ranks = range(len(batches))
    answers = [torch.cat([pieces[peer][rank] for peer in ranks]) for rank in ranks]
    flows = [[_num_bytes(pieces[rank][peer]) for peer in ranks] for rank in ranks]
    return answers, flows

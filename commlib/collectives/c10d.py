"""Carries protocols over a torch.distributed process group, one request batch after another."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commlib.collectives.board import Board
from commlib.collectives.exchange import Exchange, start_exchange
from commlib.collectives.reduce import combine
from commlib.collectives.requests import (
    RING_BYTES,
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
    request_bytes,
    started,
)
from commlib.errors import CommError

_POLL_S = 0.5
_ROLL_CALL_S = 2.0
_LATE = "no answer"
_LOST = "lost its peers in"
_RING_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
}


@dataclass(slots=True)
class Usage:
    """What one protocol took: seconds in exchanges, and bytes of this rank."""

    exchange_s: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(slots=True)
class C10dTransport:
    """Runs protocols over one process group that nobody else uses.

    Args:
        group: Process group; every rank carries the same protocols in the same order over it.
        board: Where failures are told to the other ranks.
        timeout_s: Longest wait for one request.

    Raises (from `run`):
        CommError: A peer failed, died or did not come in time; names the rank and the request.

    Source: ours.
    """

    group: dist.ProcessGroup
    board: Board
    timeout_s: float
    failed: CommError | None = None
    log: list[str] = field(default_factory=list)

    @property
    def rank(self) -> int:
        """This rank within the group."""
        return self.group.rank()

    @property
    def num_ranks(self) -> int:
        """Ranks in the group."""
        return self.group.size()

    def run(self, protocol: Protocol[T], usage: Usage | None = None) -> T:
        """Run a protocol to its end and return its result."""
        usage = usage or Usage()
        answer: object = None
        while True:
            try:
                yielded = protocol.send(answer)
            except StopIteration as stop:
                result: T = stop.value
                return result
            start = time.perf_counter()
            answer = self.carry(yielded)
            usage.exchange_s += time.perf_counter() - start
            for request in started(yielded):
                sent, received = request_bytes(request, self.rank, self.num_ranks)
                usage.sent_bytes += sent
                usage.received_bytes += received

    def carry(self, yielded: Yielded) -> object:
        """Carry one request, or several at once, and return the answers in the same form."""
        if self.failed is not None:
            raise self.failed
        if isinstance(yielded, Ticket):
            return self._guarded(yielded.request, yielded.redeem)
        batch = started(yielded)
        for request in batch:
            check_request(request, self.rank, self.num_ranks)
        running = [self._guarded(r, partial(_START[type(r)], self, r)) for r in batch]
        self.log = [*self.log[-63:], *(request.name for request in batch)]
        if isinstance(yielded, Later):
            return Ticket(yielded.request, running[0])
        answers = tuple(self._guarded(r, step) for r, step in zip(batch, running, strict=True))
        return answers if isinstance(yielded, tuple) else answers[0]

    def _guarded(self, request: Request, step: Callable[[], Any]) -> Any:
        """Run a step of a request; what breaks in it comes out as a CommError."""
        try:
            return step()
        except CommError:
            raise
        except RuntimeError as error:
            raise self._lost(request, str(error)) from error

    def fail(self, text: str) -> None:
        """Tell the other ranks that this one stopped, and why."""
        self.board.post(text)

    def close(self) -> None:
        """Give the group's threads and connections back; one that failed keeps what hangs in it."""
        if self.failed is None:
            self.failed = CommError("this transport is closed", remedy="register a new hook")
            del self.group

    def wait(self, exchange: Exchange, request: Request) -> None:
        """Wait for an exchange, looking at the board now and then so that a failed peer ends it."""
        deadline = time.monotonic() + self.timeout_s
        while exchange.gate is not None and not _done(exchange.gate):
            if self.board.read():
                raise self._lost(request, f"{_LATE}, as other ranks report")
            if time.monotonic() > deadline:
                raise self._lost(request, f"{_LATE} within {self.timeout_s:g} s")
        for work in exchange.direct:
            work.wait(timedelta(seconds=self.timeout_s))

    def _lost(self, request: Request, why: str) -> CommError:
        """Find out whose fault it is: a rank that says so, else those that say nothing any more."""
        reasons = self._reasons()
        if not reasons:
            self.fail(f"{_LOST} '{request.name}': {why}")
            silent = self.board.missing(_ROLL_CALL_S)
            reasons = self._reasons()
            if silent and not reasons:
                who = f"rank {silent[0]} is" if len(silent) == 1 else f"ranks {silent} are"
                return self._broken(f"{who} gone or stuck ({why})", request)
        for peer, text in reasons.items():
            return self._broken(f"rank {peer} failed: {text}", request)
        if why.startswith(_LATE):
            return self._broken(
                f"{why}, though all ranks are alive: some rank has not asked for this; did every"
                " rank run the same training forward and backward passes?",
                request,
            )
        return self._broken(f"the connection broke ({why})", request)

    def _reasons(self) -> dict[int, str]:
        """What other ranks say of themselves, not of their peers."""
        return {r: text for r, text in self.board.read().items() if not text.startswith(_LOST)}

    def _broken(self, reason: str, request: Request) -> CommError:
        self.failed = CommError(reason, rank=self.rank, request=request.name)
        return self.failed

    # Each _start_* begins a request and returns the step that waits for it and gives the answer.

    def _start_all_to_all(self, request: AllToAll) -> Any:
        tensor = request.tensor.contiguous()
        row = tensor.shape[1:]
        out = tensor.new_empty((sum(request.recv), *row))
        width = row.numel() * tensor.element_size()
        exchange = start_exchange(
            self.group,
            _as_bytes(tensor).split([size * width for size in request.send]),
            _as_bytes(out).split([size * width for size in request.recv]),
        )
        return lambda: self._end(exchange, request, out)

    def _start_all_gather(self, request: AllGather) -> Any:
        tensor = request.tensor.contiguous()
        row = tensor.shape[1:]
        out = tensor.new_empty((sum(request.sizes), *row))
        width = row.numel() * tensor.element_size()
        exchange = start_exchange(
            self.group,
            [_as_bytes(tensor)] * self.num_ranks,
            _as_bytes(out).split([size * width for size in request.sizes]),
        )
        return lambda: self._end(exchange, request, out)

    def _start_broadcast(self, request: Broadcast) -> Any:
        out = request.tensor.contiguous().clone()
        data, nothing = _as_bytes(out), _as_bytes(out)[:0]
        ranks = range(self.num_ranks)
        if self.rank == request.root:
            parts, arriving = [data] * self.num_ranks, [nothing] * self.num_ranks
            parts[self.rank] = nothing
        else:
            parts = [nothing] * self.num_ranks
            arriving = [data if r == request.root else nothing for r in ranks]
        exchange = start_exchange(self.group, parts, arriving)
        return lambda: self._end(exchange, request, out)

    def _start_all_reduce(self, request: AllReduce) -> Any:
        tensor = request.tensor
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes >= RING_BYTES and tensor.dtype in (torch.float32, torch.float64):
            return self._start_ring(request)
        flat = tensor.contiguous().view(-1)
        chunks = chunk_sizes(flat.numel(), self.num_ranks)
        mine = chunks[self.rank]
        width = tensor.element_size()
        arrived = flat.new_empty(mine * self.num_ranks)
        scatter = start_exchange(
            self.group,
            _as_bytes(flat).split([size * width for size in chunks]),
            _as_bytes(arrived).split([mine * width] * self.num_ranks),
        )

        def gather() -> Tensor:
            self._end(scatter, request, arrived)
            own = combine(arrived.view(self.num_ranks, mine).unbind(0), request.op)
            out = torch.empty_like(flat)
            gathering = start_exchange(
                self.group,
                [_as_bytes(own)] * self.num_ranks,
                _as_bytes(out).split([size * width for size in chunks]),
            )
            return self._end(gathering, request, out).view(tensor.shape)

        return gather

    def _start_ring(self, request: AllReduce) -> Any:
        tensor = request.tensor.contiguous()
        options = dist.AllreduceOptions()
        options.reduceOp = _RING_OPS[request.op]
        exchange = Exchange(gate=self.group.allreduce([tensor.view(-1)], options))

        def finish() -> Tensor:
            self._end(exchange, request, tensor)
            return tensor.div_(self.num_ranks) if request.op == "mean" else tensor

        return finish

    def _end(self, exchange: Exchange, request: Request, out: Tensor) -> Tensor:
        self.wait(exchange, request)
        exchange.finish()
        return out


def _done(work: dist.Work) -> bool:
    """Wait a little; whether the work is done.

    The text tells the end of this wait from Gloo's own timeout. Whether the work is complete does
    not: it may have completed between the two.
    """
    try:
        work.wait(timedelta(seconds=_POLL_S))
    except RuntimeError as error:
        if "Operation timed out" not in str(error):
            raise
        return False
    return True


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


_START: dict[type[Request], Any] = {
    AllToAll: C10dTransport._start_all_to_all,
    AllGather: C10dTransport._start_all_gather,
    Broadcast: C10dTransport._start_broadcast,
    AllReduce: C10dTransport._start_all_reduce,
}

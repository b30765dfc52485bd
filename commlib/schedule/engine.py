"""What a lane's thread does: one turn at a time, always the most useful step there is.

    1  issue   every request that the schedule allows now; their bytes travel from here on
    2  finish  a slice that has arrived, the most urgent one first
    3  work    of a protocol: the one that was answered first, else the most urgent new one, which
               goes before where nothing travels

Where there is none, the thread sleeps until a slice arrives, a request is submitted, or the leader
announces one. So while one protocol decodes its rows, the next one's exchange is under way. A
protocol is preempted at each of its requests, and at each slice of a large one.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from typing import Any

from torch import Tensor

from commlib._C import Scheduler
from commlib.collectives.requests import (
    Later,
    Request,
    Ticket,
    check_request,
    request_bytes,
    started,
)
from commlib.collectives.transport import Transport
from commlib.schedule.task import Call, Flight, Task


class Engine:
    """Drives tasks over one transport, in the order of one scheduler; for one thread at a time.

    Args:
        transport: Carries the requests.
        scheduler: Says which is next.
        slice_bytes: Requests that send more are cut into slices of about this size.

    Source: ours.
    """

    def __init__(self, transport: Transport, scheduler: Scheduler, slice_bytes: int) -> None:
        self.transport = transport
        self._scheduler = scheduler
        self._slice_bytes = slice_bytes
        self._new: list[Task] = []
        self._answered: deque[tuple[Task, Any]] = deque()
        self._ready: dict[str, Call] = {}
        self._tickets: dict[str, Call] = {}
        self._flying: list[Flight] = []
        self._running: set[Task] = set()
        self.current: Task | None = None

    @property
    def tasks(self) -> list[Task]:
        """All that have not ended."""
        return [*self._new, *self._running]

    def drop(self) -> list[Task]:
        """Forget all tasks; gives those that have not ended."""
        left = self.tasks
        self._new.clear()
        self._running.clear()
        return left

    def add(self, task: Task) -> None:
        """Take a task on; it begins in one of the next turns."""
        heapq.heappush(self._new, task)

    def turn(self) -> bool:
        """Do one step; whether there was one to do. What it raises ends the lane.

        `current` is the task at fault then, where it is one.
        """
        self.current = None
        self._begin_urgent()
        while (unit := self._scheduler.next(0.0)) is not None:
            self.issue(*unit)
            self._begin_urgent()
        landed = [flight for flight in self._flying if flight.exchange.landed()]
        if landed:
            self._finish(min(landed, key=lambda flight: flight.call.task.priority))
        elif self._answered and (self._flying or not self._new):
            self._advance(*self._answered.popleft())
        elif self._new:
            self._begin()
        else:
            return False
        return True

    @property
    def waits(self) -> bool:
        """Whether something is under way."""
        return bool(self._flying)

    @property
    def polls(self) -> bool:
        """Whether something is under way of whose arrival nobody tells."""
        return any(flight.polled for flight in self._flying)

    def look_around(self) -> None:
        """Nothing has arrived for a while: raise if the oldest slice is overdue or lost."""
        if self._flying:
            oldest = self._flying[0]
            self.current = oldest.call.task
            self.transport.look_around(oldest.call.request, oldest.start_s)

    def issue(self, name: str, slice_idx: int, num_slices: int) -> None:
        """Start what the schedule says is next."""
        call = self._ready[name]
        assert call.carried is not None
        self.current = call.task
        exchange = self.transport.start(call.request, call.carried, slice_idx, num_slices)
        flight = Flight(call, slice_idx, exchange, time.monotonic())
        self._flying.append(flight)
        flight.polled = not exchange.when_landed(self._scheduler.wake)
        if slice_idx == 0:
            call.num_left = num_slices
        if slice_idx == num_slices - 1:
            del self._ready[name]
        if call.later:
            call.later = False
            self._answered.append((call.task, Ticket(call.asked, _refuse)))

    def _begin_urgent(self) -> None:
        """Begin new tasks that are more urgent than what is about to be issued."""
        while self._new and self._ready:
            if self._new[0].priority >= min(call.task.priority for call in self._ready.values()):
                return
            self._begin()

    def _begin(self) -> None:
        task = heapq.heappop(self._new)
        self._running.add(task)
        self.current = task
        task.protocol = task.make()
        self._advance(task, None)

    def _advance(self, task: Task, answer: object) -> None:
        """Let a protocol work up to its next request, or its end."""
        self.current = task
        assert task.protocol is not None
        task.usage.resume()
        try:
            yielded = task.protocol.send(answer)
        except StopIteration as stop:
            task.usage.pause()
            self._running.remove(task)
            task.future.set_result(stop.value)
            return
        task.usage.pause()
        if isinstance(yielded, Ticket):
            self._redeem(yielded)
            return
        later = isinstance(yielded, Later)
        calls = [self._call(task, request, later) for request in started(yielded)]
        if not later:
            task.calls = calls
            task.as_tuple = isinstance(yielded, tuple)
            if not calls:
                self._answered.append((task, ()))
        for call in calls:
            self._submit(call)

    def _call(self, task: Task, request: Request, later: bool) -> Call:
        rank, num_ranks = self.transport.rank, self.transport.num_ranks
        check_request(request, rank, num_ranks)
        inner = self.transport.expand(request)
        first = request if inner is None else next_of(inner, None)
        call = Call(task, request, later, inner, first)
        if later:
            self._tickets[request.name] = call
        return call

    def _submit(self, call: Call) -> None:
        request = call.request
        call.carried = self.transport.prepare(request)
        sent, received = request_bytes(request, self.transport.rank, self.transport.num_ranks)
        call.task.usage.sent_bytes += sent
        call.task.usage.received_bytes += received
        num_slices = max(1, -(-sent // self._slice_bytes))
        self._ready[request.name] = call
        self._scheduler.submit(request.name, call.task.priority, sent, num_slices)

    def _finish(self, flight: Flight) -> None:
        call = flight.call
        self.current = call.task
        self._flying.remove(flight)
        self.transport.finish(call.request, flight.exchange, call.carried)
        self._scheduler.done(call.request.name, flight.slice_idx)
        call.num_left -= 1
        if call.num_left > 0:
            return
        assert call.carried is not None
        answer = call.carried.result()
        if call.inner is not None:
            try:
                call.request = next_of(call.inner, answer)
            except StopIteration as stop:
                answer = stop.value
            else:
                self._submit(call)
                return
        self._answer(call, answer)

    def _answer(self, call: Call, answer: Tensor) -> None:
        call.answer = answer
        task = call.task
        if call.asked.name in self._tickets:
            if call.awaited:
                del self._tickets[call.asked.name]
                self._answered.append((task, answer))
        elif all(other.answer is not None for other in task.calls):
            answers = tuple(other.answer for other in task.calls)
            task.calls = []
            self._answered.append((task, answers if task.as_tuple else answers[0]))

    def _redeem(self, ticket: Ticket) -> None:
        call = self._tickets[ticket.request.name]
        if call.answer is None:
            call.awaited = True
        else:
            del self._tickets[call.asked.name]
            self._answered.append((call.task, call.answer))


def next_of(inner: Any, answer: Tensor | None) -> Request:
    """The next request of a protocol that asks for one at a time."""
    request: Request = inner.send(answer)
    return request


def _refuse() -> Tensor:
    raise TypeError("a ticket of a lane is redeemed by yielding it")

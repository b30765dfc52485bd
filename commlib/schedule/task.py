"""A protocol under way on a lane, and the requests it has asked for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from commlib.collectives.requests import Protocol, Request
from commlib.collectives.transport import Flying, Prepared
from commlib.collectives.usage import Usage


@dataclass(slots=True, eq=False)
class Task:
    """A protocol that was submitted.

    Args:
        name: Names it in errors.
        priority: Of all its requests; lower goes first.
        number: Of its submission on this rank.
        make: Gives the protocol; called on the lane's thread.
        usage: What it takes.
        future: Its result.
        protocol: Once it has begun.
        calls: What it waits for.
        as_tuple: Whether it asked for several requests at once.
    """

    name: str
    priority: int
    number: int
    make: Callable[[], Protocol[Any]]
    usage: Usage
    future: Future[Any] = field(default_factory=Future)
    protocol: Protocol[Any] | None = None
    calls: list[Call] = field(default_factory=list)
    as_tuple: bool = False

    def __lt__(self, other: Task) -> bool:
        return (self.priority, self.number) < (other.priority, other.number)


@dataclass(slots=True, eq=False)
class Call:
    """One request of a task, until it is answered.

    Args:
        task: Who asked.
        asked: The request.
        later: The task goes on as soon as the request travels, and redeems a ticket.
        inner: The requests it is made of, where it is made of several.
        request: What is carried now: the request itself, or one of `inner`.
        carried: Its buffers.
        answer: Once it is there.
        awaited: The task has redeemed the ticket and waits.
        num_left: Slices of `request` that have not arrived.
    """

    task: Task
    asked: Request
    later: bool
    inner: Protocol[Tensor] | None
    request: Request
    carried: Prepared | None = None
    answer: Tensor | None = None
    awaited: bool = False
    num_left: int = 0


@dataclass(slots=True, eq=False)
class Flight:
    """A slice on its way, since `start_s` on `time.monotonic`'s clock.

    `polled` where nobody wakes the lane when it arrives.
    """

    call: Call
    slice_idx: int
    exchange: Flying
    start_s: float
    polled: bool = False

"""Two protocols at once: their requests of each round travel together."""

from __future__ import annotations

from typing import Any, TypeVar

from commlib.collectives.requests import Later, Protocol, Request, Ticket, Yielded

A = TypeVar("A")
B = TypeVar("B")


class _Running:
    """One protocol, its pending requests, and its result once it has ended."""

    def __init__(self, protocol: Protocol[Any]) -> None:
        self._protocol = protocol
        self.yielded: Yielded | None = None
        self.result: Any = None
        self.advance(None)

    def advance(self, answer: object) -> None:
        try:
            self.yielded = self._protocol.send(answer)
        except StopIteration as stop:
            self.yielded, self.result = None, stop.value

    def requests(self) -> tuple[Request, ...]:
        if self.yielded is None:
            return ()
        if isinstance(self.yielded, (Later, Ticket)):
            raise TypeError("a protocol that runs together with another cannot use Later")
        return self.yielded if isinstance(self.yielded, tuple) else (self.yielded,)

    def take(self, answers: tuple[Any, ...]) -> None:
        if self.yielded is not None:
            self.advance(answers if isinstance(self.yielded, tuple) else answers[0])


def together(first: Protocol[A], second: Protocol[B]) -> Protocol[tuple[A, B]]:
    """Run both; a round of the result holds a round of each that has not ended.

    Takes as many rounds as the longer of the two. Source: ours.
    """
    left, right = _Running(first), _Running(second)
    while left.requests() or right.requests():
        num_left = len(left.requests())
        answers = yield (*left.requests(), *right.requests())
        left.take(answers[:num_left])
        right.take(answers[num_left:])
    return left.result, right.result

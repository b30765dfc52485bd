"""Submits what the schedule sends, and knows how long the training thread waited for it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future

from commlib.collectives.requests import Protocol, T
from commlib.embrace.exchange import Exchange


class Runner:
    """The lanes of an exchange, as the schedule uses them.

    Args:
        exchange: Of the tables; rows, gradients and dense blocks share its lane of rows, so that
            one order holds for all.

    Attributes:
        waited_s: Seconds that the training thread waited, by what for: "ids", "rows" (lookups),
            "gradients" (of tables) and "dense".
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.waited_s: dict[str, float] = defaultdict(float)

    def submit(self, name: str, make: Callable[[], Protocol[T]], priority: int) -> Future[T]:
        """Queue a protocol on the lane of rows; with one rank it has asked nobody and is done."""
        if self.exchange.rows is not None:
            return self.exchange.rows.submit(name, make, priority=priority)
        return done(self.exchange.run(name, make))

    def wait(self, future: Future[T], name: str, what: str) -> T:
        """The result of a request; the time it took counts as waited for `what`."""
        if future.done():
            return future.result()
        start = time.perf_counter()
        try:
            return self.exchange.wait(future, name)
        finally:
            self.waited_s[what] += time.perf_counter() - start


def done(result: T) -> Future[T]:
    """A future that has its result."""
    future: Future[T] = Future()
    future.set_result(result)
    return future

"""One lane: a thread that runs jobs one after another, in the order they were submitted.

Off the training thread, so that backward goes on; nobody waits inside a callback. The same order
on every rank is the submitter's duty.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from commlib.collectives.c10d import C10dTransport
from commlib.errors import CommError

T = TypeVar("T")
_Job = tuple[str, Callable[[], Any], "Future[Any]"]


class Driver:
    """Runs jobs over one transport.

    Args:
        name: Names the thread.
        transport: The transport that the jobs use, and nobody else.

    The first job that raises ends the lane: the other ranks are told, and every later job fails
    with a CommError that repeats the reason. The thread is a daemon, started at the first job.

    Source: ours.
    """

    def __init__(self, name: str, transport: C10dTransport) -> None:
        self.name = name
        self.transport = transport
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, request: str, job: Callable[[], T]) -> Future[T]:
        """Queue a job; `request` names it in errors. Returns at once."""
        future: Future[T] = Future()
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=self.name, daemon=True)
            self._thread.start()
        self._jobs.put((request, job, future))
        return future

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread after the jobs that are queued."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout_s)
            self._thread = None

    def _loop(self) -> None:
        while (item := self._jobs.get()) is not None:
            request, job, future = item
            try:
                if self.transport.failed is not None:
                    raise self.transport.failed
                result = job()
            except BaseException as error:
                self._fail(request, error)
                future.set_exception(error)
            else:
                future.set_result(result)
            del item, job, future

    def _fail(self, request: str, error: BaseException) -> None:
        if self.transport.failed is not None:
            return
        text = f"{type(error).__name__}: {error}"
        if not isinstance(error, CommError):
            self.transport.fail(f"'{request}' raised {text}")
        self.transport.failed = CommError(
            f"this lane ended earlier ({text})", rank=self.transport.rank, request=request
        )

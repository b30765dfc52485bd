"""One lane: a process group of its own, and the order in which requests are carried over it.

    submit ──► new tasks ──► engine ──► scheduler ──► transport
    any        most urgent   one step   the leader's  Gloo
    thread     first         a turn     order

The lane's thread turns the engine; nobody waits inside a callback, and backward goes on meanwhile.
"""

from __future__ import annotations

import atexit
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from commlib._C import Scheduler
from commlib.collectives.requests import Protocol, T
from commlib.collectives.transport import Transport
from commlib.collectives.usage import Usage
from commlib.errors import CommError
from commlib.schedule.engine import Engine
from commlib.schedule.task import Task

SLICE_BYTES = 4 << 20
CREDIT_BYTES = 2 * SLICE_BYTES
LogEntry: TypeAlias = tuple[str, int, int, int, int, float, float, float]

_IDLE_S = 3_600.0
_LOOK_AROUND_S = 0.5
_CLOSING_S = 0.05
_POLL_S = 0.0005


class Lane:
    """Carries protocols in an order that is the same on every rank.

    Args:
        name: Names the thread.
        transport: A transport that nobody else uses.
        control: File descriptors of the control connections; the lane owns them. None are needed
            where requests match by name.
        slice_bytes: Requests that send more are cut into slices of about this size, between
            which a more urgent one may go. Less lets it go sooner; more costs less per byte.
        credit_bytes: Bytes under way at a time. Less leaves more to the order, more fills a link
            of long latency.

    Rank 0's order is the schedule: among its requests that are ready, the one with the lowest
    priority number goes first, of equal ones the one submitted first. The other ranks follow,
    whatever the order in which they submit. So a request must not be submitted only after
    another has ended that the program submits later on rank 0.

    The first protocol that raises ends the lane: the other ranks are told, and every other
    protocol fails with a CommError that repeats the reason. The thread is a daemon, started when
    first used.

    Source: ours; the leader's order follows the design of Horovod's coordinator.
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        control: list[int],
        *,
        slice_bytes: int = SLICE_BYTES,
        credit_bytes: int = CREDIT_BYTES,
    ) -> None:
        self.name = name
        self.transport = transport
        # Where requests match by name, each rank goes by its own order.
        self._scheduler = Scheduler(
            rank=transport.rank if transport.ordered else 0,
            num_ranks=transport.num_ranks if transport.ordered else 1,
            fds=control,
            credit_bytes=credit_bytes,
            timeout_s=transport.timeout_s,
        )
        self._engine = Engine(transport, self._scheduler, slice_bytes)
        self._inbox: SimpleQueue[Task] = SimpleQueue()
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # of the inbox, against a lane that ends
        self._thread: threading.Thread | None = None
        self._closing = False
        self._looked_s = 0.0
        _open_lanes.add(self)

    @property
    def rank(self) -> int:
        """This rank within the group."""
        return self.transport.rank

    @property
    def num_ranks(self) -> int:
        """Ranks in the group."""
        return self.transport.num_ranks

    @property
    def timeout_s(self) -> float:
        """Longest wait for one request."""
        return self.transport.timeout_s

    def submit(
        self,
        name: str,
        make: Callable[[], Protocol[T]],
        *,
        priority: int = 0,
        usage: Usage | None = None,
    ) -> Future[T]:
        """Queue a protocol and return at once; from any thread.

        Args:
            name: Names the protocol in errors; its requests have agreed names of their own.
            make: Gives the protocol; called on the lane's thread, where the protocol runs.
            priority: Lower goes first. Rank 0's counts.
            usage: Filled with what the protocol takes.

        Returns:
            The protocol's result, or what it raised, or the CommError that ended the lane.
        """
        task = Task(name, priority, next(self._numbers), make, usage or Usage())
        with self._lock:
            if self.transport.failed is not None:
                task.future.set_exception(self.transport.failed.naming(name))
                return task.future
            self._inbox.put(task)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self.name, daemon=True)
                self._thread.start()
        self._scheduler.wake()
        return task.future

    def run(self, name: str, protocol: Protocol[T], usage: Usage | None = None) -> T:
        """Run a protocol to its end: here, while the lane has no thread yet, else on its thread."""
        if self._thread is not None:
            return self.submit(name, lambda: protocol, usage=usage).result()
        task = Task(name, 0, next(self._numbers), lambda: protocol, usage or Usage())
        if self.transport.failed is not None:
            raise self.transport.failed
        self._inbox.put(task)
        while not task.future.done():
            self._turn()
        result: T = task.future.result()
        return result

    def log(self) -> list[LogEntry]:
        """The newest requests in the order in which they were issued, the same on every rank.

        Name, slice, number of slices, priority, bytes, and the seconds at which this rank
        submitted it, issued it and had its answer (nan until then), on `time.perf_counter`'s
        clock.
        """
        return self._scheduler.log()

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread after what is queued, and give the group and the connections back."""
        self._closing = True
        self._scheduler.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        self._scheduler.close()
        self.transport.close()

    def _loop(self) -> None:
        while self.transport.failed is None and not (self._closing and self._idle()):
            self._turn()
        if not self._idle():  # closed before they ended
            self._take_new()
            self._end_all(None, None)

    def _turn(self) -> None:
        """One step, or a wait for something to do; whatever goes wrong ends the lane."""
        try:
            self._take_new()
            if not self._engine.turn() and self._inbox.empty():
                patience_s = self._patience_s()
                start = time.monotonic()
                unit = self._scheduler.next(patience_s)
                if unit is not None:
                    self._engine.issue(*unit)
                elif self._scheduler.failure is not None or time.monotonic() >= start + patience_s:
                    self._look_around()
        except BaseException as error:
            self._fail(error)

    def _look_around(self) -> None:
        now = time.monotonic()
        if now < self._looked_s + _LOOK_AROUND_S and self._engine.polls:
            return
        self._looked_s = now
        self._watch()
        self._engine.look_around()

    def _patience_s(self) -> float:
        """How long to sleep; what comes in wakes the thread before."""
        if self._engine.polls:
            return _POLL_S
        if self._closing:
            return _CLOSING_S
        return _LOOK_AROUND_S if self._engine.waits else _IDLE_S

    def _idle(self) -> bool:
        return self._inbox.empty() and not self._engine.tasks

    def _take_new(self) -> None:
        try:
            while True:
                self._engine.add(self._inbox.get_nowait())
        except Empty:
            return

    def _watch(self) -> None:
        """Raise what the control connections tell of other ranks, or of this one."""
        self._scheduler.poll()
        failure = self._scheduler.failure
        if failure is not None:
            rank, text = failure
            if rank == self.rank:
                self.transport.blame.fail(f"it {text}")
            else:  # another lane may know better why
                known = self.transport.blame.reasons().get(rank)
                text = text if known is None else f"failed: {known}"
                self.transport.blame.answer_roll_call(f"rank {rank} {text}")
            raise CommError(f"rank {rank} {text}", rank=self.rank, request=self._oldest())

    def _oldest(self) -> str | None:
        tasks = self._engine.tasks
        return min(tasks, key=lambda task: task.number).name if tasks else None

    def _fail(self, error: BaseException) -> None:
        """End the lane: `error` to the task at fault, a CommError that repeats it to the others."""
        at_fault = self._engine.current
        request = at_fault.name if at_fault is not None else self._oldest()
        text = f"{type(error).__name__}: {error}"
        if self.transport.failed is None and self._scheduler.failure is None:  # nobody knows yet
            self.transport.blame.fail(f"'{request}' raised {text}")
            self._scheduler.fail(f"failed: '{request}' raised {text}")
        with self._lock:
            if self.transport.failed is None:
                ended = error if isinstance(error, CommError) else None
                self.transport.failed = ended or CommError(
                    f"this lane ended earlier ({text})", rank=self.rank, request=request
                )
            self._take_new()
        self._end_all(at_fault, error)

    def _end_all(self, at_fault: Task | None, error: BaseException | None) -> None:
        for task in self._engine.drop():
            failed = self.transport.failed
            others = None if failed is None else failed.naming(task.name)
            task.future.set_exception(error if task is at_fault else others)


_open_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()


@atexit.register
def close_open_lanes() -> None:
    """End every lane of this process: at exit, else the interpreter ends threads within C++."""
    for lane in list(_open_lanes):
        lane.close(timeout_s=1.0)


__all__: list[Any] = ["CREDIT_BYTES", "SLICE_BYTES", "Lane", "LogEntry", "close_open_lanes"]

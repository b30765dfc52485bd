"""The compiled extension: importing it registers the ops; its member is the scheduler's core."""

from collections.abc import Sequence
from typing import final

@final
class Scheduler:
    """One lane's order of collectives: rank 0's priority queue is the schedule, others replay it.

    Every method may be called by any thread; `next` by one thread at a time. The GIL is released
    where a call may wait (`next` with a timeout, `close`) and kept where it cannot.

    Args:
        rank: This rank, in [0, num_ranks).
        num_ranks: Ranks of the lane.
        fds: Connected stream sockets (``socket.detach()``), owned from here on: on rank 0 one to
            each of ranks 1..n-1 in order, on other ranks one to rank 0. Empty: this rank decides
            alone (one rank, or a transport that matches collectives by name).
        credit_bytes: Bytes in flight on the rank that decides. A unit goes if it fits, or if
            nothing is in flight; 0 means one unit at a time.
        timeout_s: Seconds after which a rank that does not submit, or announce, has failed.
        log_size: Entries of the log that are kept.

    Raises:
        ValueError, TypeError: For an argument out of range; `fds` then still belong to the caller.
        OSError: No descriptors are left.

    Source: ours.
    """

    def __new__(
        cls,
        rank: int,
        num_ranks: int,
        fds: Sequence[int],
        credit_bytes: int,
        timeout_s: float,
        log_size: int = 65536,
    ) -> Scheduler: ...
    @property
    def failure(self) -> tuple[int, str] | None:
        """The first failure heard of: the rank that failed, and what happened."""

    @property
    def num_queued(self) -> int:
        """Requests submitted here with a slice that is not issued yet."""

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of the units issued and not done."""

    @property
    def total_issued(self) -> int:
        """Units ever issued, also those no longer in the log."""

    def submit(self, name: str, priority: int, num_bytes: int, num_slices: int = 1) -> None:
        """Queue a request that is ready on this rank. Never waits.

        Args:
            name: The same on every rank; at most 65535 bytes of UTF-8.
            priority: Lower goes first, ties in the order of submission. Only rank 0's counts.
            num_bytes: What it moves, at most 2**50.
            num_slices: Units that it is issued in, each of num_bytes / num_slices bytes, so that a
                more urgent request goes between two. Only rank 0's counts.

        Raises:
            ValueError: The name is queued or in flight already, or empty, or too long; a number is
                out of range; the scheduler is closed.
        """

    def next(self, timeout_s: float) -> tuple[str, int, int] | None:
        """Wait for the next unit to issue.

        Args:
            timeout_s: How long to wait; 0 does not.

        Returns:
            (name, slice_idx, num_slices), in flight until `done`; or None when the time is over,
            `wake` or `close` was called, or a rank has failed.

        Raises:
            RuntimeError: Another thread is in `next`.
        """

    def done(self, name: str, slice_idx: int = 0) -> None:
        """A unit is complete: its credit comes back.

        Raises:
            ValueError: It is not in flight.
        """

    def wake(self) -> None:
        """Make the waiting `next`, or the one to come, return None, once."""

    def poll(self) -> None:
        """Look at connections and deadlines without waiting.

        For a thread that waits elsewhere: it hears of failures, and a leader sends what a
        connection did not take at once (as `next`, `submit` and `close` do).
        """

    def fail(self, text: str, /) -> None:
        """This rank has failed: every rank is told. The first failure of a lane stands."""

    def close(self) -> None:
        """Say goodbye, close the connections, end a waiting `next`. Idempotent."""

    def log(self) -> list[tuple[str, int, int, int, int, float, float, float]]:
        """What was issued, in order, the newest `log_size` units.

        Returns:
            (name, slice_idx, num_slices, priority, num_bytes, submit_s, issue_s, done_s) of each
            unit: bytes of the slice, seconds on `time.perf_counter`'s clock; done_s is NaN while
            the unit is in flight.
        """

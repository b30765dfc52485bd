"""Carries single requests over a torch.distributed process group, and knows who broke it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from commlib.collectives.board import Board
from commlib.collectives.carried import Carried, prepare
from commlib.collectives.exchange import Exchange
from commlib.collectives.requests import Request
from commlib.errors import CommError

_ROLL_CALL_S = 2.0
_GRACE_S = 1.0  # a rank that has not submitted says so itself, which is the better message
_LATE = "no answer"
_LOST = "lost its peers:"


@dataclass(slots=True)
class C10dTransport:
    """Starts requests on one process group that nobody else uses, and waits for them.

    Args:
        group: Process group; every rank starts the same requests in the same order on it.
        board: Where failures are told to the other ranks.
        timeout_s: Longest wait for one request.

    Raises (from all that starts or waits):
        CommError: A peer failed, died or did not come in time; names the rank and the request.

    Source: ours.
    """

    group: dist.ProcessGroup
    board: Board
    timeout_s: float
    failed: CommError | None = None

    @property
    def rank(self) -> int:
        """This rank within the group."""
        return self.group.rank()

    @property
    def num_ranks(self) -> int:
        """Ranks in the group."""
        return self.group.size()

    def prepare(self, request: Request) -> Carried:
        """Lay out the buffers of a request."""
        return prepare(request, self.rank, self.num_ranks)

    def start(
        self, request: Request, carried: Carried, slice_idx: int, num_slices: int
    ) -> Exchange:
        """Begin one slice of a prepared request; returns at once."""
        if self.failed is not None:
            raise self.failed
        try:
            return carried.start(self.group, slice_idx, num_slices)
        except RuntimeError as error:
            raise self._lost(request, str(error)) from error

    def finish(self, request: Request, exchange: Exchange) -> None:
        """Wait for a slice that was started, and that every rank has come to."""
        try:
            if exchange.gate is not None:
                exchange.gate.wait(timedelta(seconds=self.timeout_s))
            for work in exchange.direct:
                work.wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise self._lost(request, str(error)) from error
        exchange.finish()

    def look_around(self, request: Request, start_s: float) -> None:
        """Raise if another rank has failed, or a slice is under way for too long.

        Args:
            request: What is waited for.
            start_s: When it was started, on `time.monotonic`'s clock.
        """
        if self.board.read():
            raise self._lost(request, f"{_LATE}, as other ranks report")
        if time.monotonic() > start_s + self.timeout_s + _GRACE_S:
            raise self._lost(request, f"{_LATE} within {self.timeout_s:g} s")

    def fail(self, text: str) -> None:
        """Tell the other ranks that this one stopped, and why."""
        self.board.post(text)

    def answer_roll_call(self, text: str) -> None:
        """Tell the other ranks that this one stopped, but that another is at fault."""
        self.fail(f"{_LOST} {text}")

    def close(self) -> None:
        """Give the group's threads and connections back; one that failed keeps what hangs in it."""
        if self.failed is None:
            self.failed = CommError("this transport is closed", remedy="register a new hook")
            del self.group

    def _lost(self, request: Request, why: str) -> CommError:
        """Find out whose fault it is: a rank that says so, else those that say nothing any more."""
        reasons = self.reasons()
        if not reasons:
            self.answer_roll_call(f"'{request.name}': {why}")
            silent = self.board.missing(_ROLL_CALL_S)
            reasons = self.reasons()
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

    def reasons(self) -> dict[int, str]:
        """What other ranks say of themselves, not of their peers."""
        return {r: text for r, text in self.board.read().items() if not text.startswith(_LOST)}

    def _broken(self, reason: str, request: Request) -> CommError:
        self.failed = CommError(reason, rank=self.rank, request=request.name)
        return self.failed

"""Carries single requests over a torch.distributed process group, and knows who broke it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from commlib.collectives.blame import Blame
from commlib.collectives.carried import Carried, expand, prepare
from commlib.collectives.exchange import Exchange
from commlib.collectives.requests import Protocol, Request
from commlib.errors import CommError

_GRACE_S = 1.0  # a rank that has not submitted says so itself, which is the better message


@dataclass(slots=True)
class C10dTransport:
    """Starts requests on one process group that nobody else uses, and waits for them.

    Args:
        group: Process group; every rank starts the same requests in the same order on it.
        blame: Finds out who broke it.
        timeout_s: Longest wait for one request.

    Raises (from all that starts or waits):
        CommError: A peer failed, died or did not come in time; names the rank and the request.

    Source: ours.
    """

    group: dist.ProcessGroup
    blame: Blame
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

    @property
    def ordered(self) -> bool:
        """Requests match by the order in which they start."""
        return True

    def expand(self, request: Request) -> Protocol[Tensor] | None:
        """The requests that this one is made of; None for what is carried as it is."""
        return expand(request, self.rank, self.num_ranks)

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

    def finish(self, request: Request, exchange: Exchange, carried: Carried) -> None:
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
        reported = bool(self.blame.board.read())
        if reported or time.monotonic() > start_s + self.timeout_s + _GRACE_S:
            self.failed = self.blame.late(request.name, None if reported else self.timeout_s)
            raise self.failed

    def close(self) -> None:
        """Give the group's threads and connections back; one that failed keeps what hangs in it."""
        if self.failed is None:
            self.failed = CommError("this transport is closed", remedy="register a new hook")
            del self.group

    def _lost(self, request: Request, why: str) -> CommError:
        self.failed = self.blame.lost(request.name, why)
        return self.failed

"""What a lane needs of a transport, whichever it is."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

from torch import Tensor

from commlib.collectives.blame import Blame
from commlib.collectives.requests import Protocol, Request
from commlib.errors import CommError


class Flying(typing.Protocol):
    """A slice of a request under way."""

    def when_landed(self, wake: Callable[[], None]) -> bool:
        """Have `wake` called on arrival; False where nobody does, and `landed` must be polled."""

    def landed(self) -> bool:
        """Whether `finish` will not wait for another rank."""


class Prepared(typing.Protocol):
    """A request with its buffers laid out."""

    def result(self) -> Tensor:
        """The answer, once every slice has been finished."""


class Transport(typing.Protocol):
    """Starts requests, and waits for them. `C10dTransport` documents each of these."""

    timeout_s: float
    failed: CommError | None
    blame: Blame

    @property
    def rank(self) -> int:
        """This rank within the group."""

    @property
    def num_ranks(self) -> int:
        """Ranks in the group."""

    @property
    def ordered(self) -> bool:
        """Whether ranks must start requests in the same order; else they match by name."""

    def expand(self, request: Request) -> Protocol[Tensor] | None:
        """The requests that this one is made of; None for what is carried as it is."""

    def prepare(self, request: Request) -> Any:
        """Lay out the buffers of a request; gives a `Prepared`."""

    def start(self, request: Request, carried: Any, slice_idx: int, num_slices: int) -> Any:
        """Begin one slice of a prepared request; gives a `Flying`, at once."""

    def finish(self, request: Request, exchange: Any, carried: Any) -> None:
        """Wait for a slice that was started, and take over what arrived."""

    def look_around(self, request: Request, start_s: float) -> None:
        """Raise if another rank has failed, or a slice is under way for too long."""

    def close(self) -> None:
        """Give back what the transport holds."""

"""What one protocol took."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(slots=True)
class Usage:
    """Seconds and bytes of one protocol on this rank; whoever drives the protocol keeps it.

    Args:
        exchange_s: Seconds in which the protocol waited for answers.
        local_s: Seconds of its own work up to where it last waited.
        sent_bytes: Bytes sent to other ranks.
        received_bytes: Bytes received from them.
    """

    exchange_s: float = 0.0
    local_s: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    _since_s: float = -1.0

    def resume(self) -> None:
        """The protocol goes on."""
        now = time.perf_counter()
        if self._since_s >= 0:
            self.exchange_s += now - self._since_s
        self._since_s = now

    def pause(self) -> None:
        """The protocol waits, or has ended."""
        now = time.perf_counter()
        self.local_s += now - self._since_s
        self._since_s = now

    def local_so_far_s(self) -> float:
        """Seconds of own work, for the protocol itself to ask."""
        return self.local_s + time.perf_counter() - self._since_s

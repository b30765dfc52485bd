"""Partitioned tables in the benches: what they move, and how long the training thread waits."""

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import Future
from typing import Any

from torch import nn

from commlib import embrace
from commlib.cli.demo.driver import Driver, Step
from commlib.embrace.ranks import TransportName


class Meter:
    """Watches the exchange of a model's partitioned tables.

    Args:
        model: After `embrace.shard`, all tables in one call.
    """

    def __init__(self, model: nn.Module) -> None:
        tables = (table for table in model.modules() if isinstance(table, embrace.ShardedTable))
        self._exchange = next(tables).exchange
        self._wait = self._exchange.wait
        self._thread = threading.current_thread()
        self._wait_s = 0.0
        self._issued_s = 0.0
        self._exchange.wait = self._timed_wait  # type: ignore[method-assign]

    def take_wait_s(self) -> float:
        """Returns the seconds that this thread waited for the exchange since the last call."""
        taken, self._wait_s = self._wait_s, 0.0
        return taken

    def take_sent_bytes(self) -> int:
        """Returns the bytes that this rank sent, ids included, since the last call."""
        lanes = (self._exchange.rows, self._exchange.ids)
        log = [unit for lane in lanes if lane is not None for unit in lane.log()]
        new = [(issued_s, num_bytes) for *_, num_bytes, _, issued_s, _ in log]
        new = [unit for unit in new if unit[0] > self._issued_s]
        self._issued_s = max((issued_s for issued_s, _ in new), default=self._issued_s)
        return sum(num_bytes for _, num_bytes in new)

    def _timed_wait(self, future: Future[Any], name: str) -> Any:
        start = time.perf_counter()
        try:
            return self._wait(future, name)
        finally:
            if threading.current_thread() is self._thread:
                self._wait_s += time.perf_counter() - start


class EmbraceDriver(Driver):
    """Tables partitioned by columns, the rest in DDP; nothing else."""

    transport: TransportName = "c10d"
    """What carries the bytes of tables."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """As `Driver`."""
        model = embrace.shard(model, transport=self.transport)
        self.meter = Meter(model)
        return model

    def step(self, step: int) -> Step:
        """As `Driver`."""
        self.meter.take_wait_s()
        taken = super().step(step)
        return dataclasses.replace(
            taken,
            embedding_wait_s=self.meter.take_wait_s(),
            sparse_bytes=self.meter.take_sent_bytes(),
        )

    def close(self) -> None:
        """As `Driver`."""
        super().close()
        embrace.close(self.model)

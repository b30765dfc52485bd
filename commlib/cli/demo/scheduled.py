"""EmbRace at work on one model: partitioned tables, and the 2D schedule around its steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

from commlib import embrace
from commlib.cli.demo.driver import Driver, Step
from commlib.cli.demo.workload import Workload

if TYPE_CHECKING:
    from commlib.cli.demo.methods import Method
    from commlib.cli.demo.settings import Settings

_TABLE_WAITS = ("ids", "rows", "gradients")


class ScheduledDriver(Driver):
    """Tables partitioned by columns, everything in the order of the 2D schedule."""

    def __init__(self, method: Method, workload: Workload, settings: Settings) -> None:
        super().__init__(method, workload, settings)
        tables = [m for m in self.model.modules() if isinstance(m, embrace.ShardedTable)]
        self._exchange = tables[0].exchange
        self._num_units = 0
        batches = (workload.batch(step) for step in itertools.count())
        self.schedule = embrace.schedule(batches, self.ddp, self.optimizer, ids=workload.ids)
        self._loop: Iterator[tuple[Tensor, ...]] = iter(self.schedule)
        self._sent_bytes()  # partitioning the tables is no part of a step

    def wrap(self, model: nn.Module) -> nn.Module:
        """As `Driver`."""
        return embrace.shard(model)

    def step(self, step: int) -> Step:
        """As `Driver`."""
        waited_s = self._waited_s()
        start = time.perf_counter()
        batch = next(self._loop)
        loss = self.ddp(*batch)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        end = time.perf_counter()
        return Step(
            loss.detach(),
            forward - start,
            backward - forward,
            end - backward,
            embedding_wait_s=self._waited_s() - waited_s,
            sparse_bytes=self._sent_bytes(),
        )

    def flush(self) -> None:
        """As `Driver`."""
        self.schedule.flush()

    def close(self) -> None:
        """As `Driver`."""
        self._loop.close()  # type: ignore[attr-defined]
        super().close()
        embrace.close(self.model)

    def _waited_s(self) -> float:
        return sum(self.schedule.waited_s.get(what, 0.0) for what in _TABLE_WAITS)

    def _sent_bytes(self) -> int:
        """Bytes that this rank sent for tables since the last call, ids included."""
        lanes = (self._exchange.rows, self._exchange.ids)
        units = [unit for lane in lanes if lane is not None for unit in lane.log()]
        units.sort(key=lambda unit: unit[6])
        new, self._num_units = units[self._num_units :], len(units)
        return sum(num_bytes for name, _, _, _, num_bytes, *_ in new if name[:6] != "block.")

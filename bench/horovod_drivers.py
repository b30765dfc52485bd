"""Training under Horovod: the model itself, no DDP, and an optimizer that reduces gradients.

    horovod-dense      hvd.DistributedOptimizer, dense gradients
    horovod-sparse     hvd.DistributedOptimizer, sparse gradients: two all-gathers of what is there
    horovod-exact      commlib.horovod.DistributedOptimizer
    horovod-sketch     the same, reducer=commlib.S2(...)
    horovod-embrace    commlib.embrace.shard(model, transport="horovod"), the rest as horovod-exact

Communication is waited for in the update, which holds here what DDP's backward pass holds.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch
import torch.distributed as dist

import commlib
from bench.horovod_peer import gathered_bytes
from bench.partitioned import EmbraceDriver
from commlib.cli.demo.driver import Driver, Step
from commlib.cli.demo.settings import Settings


class HorovodDriver(Driver):
    """The model under Horovod's own optimizer."""

    def join(self, settings: Settings) -> None:
        """As `Driver`."""
        theirs = importlib.import_module("commlib.horovod")
        theirs.broadcast_parameters(self.model.state_dict(), root_rank=0)
        plain = self.workload.optimizer(self.model.parameters())
        named = list(self.model.named_parameters())
        self.optimizer = self.distribute(plain, named, settings)
        # Horovod makes the optimizer anew from its groups, and Adagrad starts from zeros then.
        self.optimizer.state.update(plain.state)
        self.state = getattr(self.optimizer, "commlib", None)
        self.ddp = self.model

    def distribute(
        self,
        plain: torch.optim.Optimizer,
        named: list[tuple[str, torch.nn.Parameter]],
        settings: Settings,
    ) -> Any:
        """Returns the optimizer that reduces gradients."""
        hvd = importlib.import_module("horovod.torch")
        return hvd.DistributedOptimizer(plain, named_parameters=named)


class HorovodSparseDriver(HorovodDriver):
    """The same, and counts lookups, of which Horovod sends each."""

    def step(self, step: int) -> Step:
        """As `Driver`."""
        ids = self.workload.ids(self.batch(step))
        sent_bytes = sum(
            gathered_bytes(dist.get_world_size(), ids[table.name].numel(), table.row_bytes)
            for table in self.tables
            if table.name in ids
        )
        return dataclasses.replace(super().step(step), sparse_bytes=sent_bytes)


class HorovodExactDriver(HorovodDriver):
    """The model under commlib's optimizer."""

    def reducer(self, settings: Settings) -> Any:
        """Returns what reduces tables; None for the cheapest exact one."""
        return None

    def distribute(
        self,
        plain: torch.optim.Optimizer,
        named: list[tuple[str, torch.nn.Parameter]],
        settings: Settings,
    ) -> Any:
        """As `HorovodDriver`."""
        theirs = importlib.import_module("commlib.horovod")
        reducer = self.reducer(settings)
        return theirs.DistributedOptimizer(plain, named_parameters=named, reducer=reducer)


class HorovodSketchDriver(HorovodExactDriver):
    """The same with a sketch, of the demo's size."""

    def reducer(self, settings: Settings) -> Any:
        """As `HorovodExactDriver`."""
        return commlib.S2(ratio=settings.sketch_ratio)


class HorovodEmbraceDriver(EmbraceDriver, HorovodExactDriver):
    """Tables partitioned by columns, over Horovod; the rest under commlib's optimizer."""

    transport = "horovod"

"""Which models the schedule accepts."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from commlib.embrace.table import ShardedTable


def tables_of(root: nn.Module) -> list[ShardedTable]:
    """A model's partitioned tables, sorted by name.

    Raises:
        ValueError: There is none, or they come from two `shard` calls.
    """
    tables = sorted(
        (m for m in root.modules() if isinstance(m, ShardedTable)), key=lambda table: table.name
    )
    if not tables:
        raise ValueError(
            f"{type(root).__name__} has no partitioned table: embrace.shard(model) first"
        )
    if any(table.exchange is not tables[0].exchange for table in tables):
        raise ValueError("the tables do not share an exchange: shard them in one call")
    return tables


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer that reduces gradients itself.

    Raises:
        ValueError: It is Horovod's distributed one.
    """
    if hasattr(optimizer, "skip_synchronize"):
        raise ValueError(
            "the schedule reduces all gradients itself: pass it the optimizer that"
            " DistributedOptimizer was made from, or leave the schedule out"
        )


def check_wrapped(model: nn.Module, tables: Iterable[ShardedTable]) -> None:
    """Refuse DDP that would do what the schedule does, or that does not know of the tables.

    Raises:
        ValueError: Buffers that DDP would broadcast, or DDP older than the tables' partitions.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    if model.will_sync_module_buffers():
        raise ValueError(
            "DDP broadcasts this model's buffers in each forward pass, which the schedule takes"
            " over: pass forward_sync_buffers=False (before torch 2.13: broadcast_buffers=False)"
            " to DistributedDataParallel"
        )
    shards = {id(table.local_weight) for table in tables}
    late = [
        name
        for name, parameter in model.module.named_parameters()
        if id(parameter) in shards and name not in model.parameters_to_ignore
    ]
    if late:
        raise ValueError(
            f"DDP was made before {late} were partitioned: call embrace.shard(model) first, then"
            " DistributedDataParallel(model)"
        )

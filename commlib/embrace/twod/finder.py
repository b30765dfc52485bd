"""Which tensors of a batch are the ids that a table looks up, so that the next batch's are known.

Either the user says so, or the first forward pass shows it: ids that are a tensor of the batch, or
one slice of it along some dimension, are found by their memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from commlib.collectives.requests import AllReduce, Protocol
from commlib.embrace.exchange import Exchange
from commlib.embrace.table import ShardedTable

IdsOf = Callable[[Any], Mapping[Any, Any]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where ids lie in a batch.

    Args:
        leaf: Which tensor of the flattened batch.
        select: `(dim, index)` of the slice; None for the whole tensor.
    """

    leaf: int
    select: tuple[int, int] | None

    def ids(self, batch: Any) -> Tensor | None:
        """The ids in another batch of the same structure; None where it has none there."""
        leaves = pytree.tree_leaves(batch)
        if self.leaf >= len(leaves) or not isinstance(leaves[self.leaf], Tensor):
            return None
        tensor: Tensor = leaves[self.leaf]
        if self.select is None:
            return tensor
        dim, index = self.select
        return tensor.select(dim, index) if tensor.shape[dim] > index else None


def find(batch: Any, ids: Tensor) -> Place | None:
    """Where `ids` lie in `batch`; None where they were computed from it."""
    for i, leaf in enumerate(pytree.tree_leaves(batch)):
        if not isinstance(leaf, Tensor) or leaf.dtype != ids.dtype:
            continue
        if leaf.data_ptr() == ids.data_ptr() and leaf.numel() == ids.numel():
            return Place(i, None)
        for dim in range(leaf.dim()):
            step = leaf.stride(dim) * leaf.element_size()
            offset = ids.data_ptr() - leaf.data_ptr()
            if step <= 0 or offset % step or not 0 <= offset // step < leaf.shape[dim]:
                continue
            index = offset // step
            view = leaf.select(dim, index)
            if view.shape == ids.shape and view.stride() == ids.stride():
                return Place(i, (dim, index))
    return None


def given(ids_of: IdsOf, batch: Any, tables: Sequence[ShardedTable]) -> dict[ShardedTable, Tensor]:
    """The ids that the user's function names, by table.

    Args:
        ids_of: Gives `{module or its name: ids, or a list of ids}`.
        batch: A batch.
        tables: All partitioned tables of the model.

    Raises:
        ValueError: A name that is no table's.
        TypeError: Not a mapping to tensors.
    """
    named = {table.name: table for table in tables}
    asked = ids_of(batch)
    if not isinstance(asked, Mapping):
        raise TypeError(f"ids(batch) gave {type(asked).__name__}: it must map tables to their ids")
    found = {}
    for key, value in asked.items():
        table = key if isinstance(key, ShardedTable) else named.get(key)
        if table is None:
            raise ValueError(f"ids(batch) names {key!r}, which is no table; there are {[*named]}")
        parts = list(value) if isinstance(value, (list, tuple)) else [value]
        if not all(isinstance(part, Tensor) for part in parts):
            raise TypeError(f"ids(batch) gave {type(value).__name__} for table '{table.name}'")
        found[table] = (
            parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
        )
    return found


def agree(
    known: Collection[ShardedTable], tables: Sequence[ShardedTable], exchange: Exchange
) -> list[ShardedTable]:
    """The tables whose ids every rank knows ahead; collective.

    Args:
        known: Those that this rank does.
        tables: All, in the order that every rank uses.
        exchange: Theirs.
    """
    found = torch.tensor([float(table in known) for table in tables])
    name = exchange.request_name("schedule.places")

    def protocol() -> Protocol[Tensor]:
        if exchange.num_ranks == 1:
            return found
        everywhere: Tensor = yield AllReduce(name=name, tensor=found, op="mean")
        return everywhere

    everywhere = exchange.run(name, protocol).tolist()
    return [table for table, share in zip(tables, everywhere, strict=True) if share == 1.0]

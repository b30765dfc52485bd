"""TorchRec's partitioned tables, as a peer: column-wise and row-wise, on CPU and Gloo.

Each rank keeps a part of the table; ids and rows travel by all-to-all; the update (SGD) is fused
into the backward pass. What this took, with TorchRec 1.8 on CPU:

* Plans are written by hand (`construct_module_sharding_plan`). The planner costs GPU hosts.
* The fused kernel is used: the separate optimizer's (`dense`) ends the process by a bad free.
* TorchRec removes repeated ids by a kernel that there is for CUDA only. `unique=True` does the same
  outside, before the ids go in and after the rows come out, as one would by hand.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

INSTALL = "pip install 'commlib[bench]' && pip install --no-deps torchrec==1.8.0"
"""Without --no-deps TorchRec brings `fbgemm-gpu`, the CUDA build of what the extra has for CPU."""

_TABLE, _FEATURE = "table", "ids"


def why_not() -> str | None:
    """Returns why TorchRec cannot be used here, or None if it can."""
    try:
        _import("torchrec")
    except ImportError as error:
        return f"{error}; to install it: {INSTALL}"
    return None


def _import(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in ("torchrec", "torch.fx", "tensordict"):
            logging.getLogger(logger).setLevel(logging.ERROR)
        return importlib.import_module(name)


class TorchrecTable:
    """One table in TorchRec's sharded `EmbeddingCollection`, in the default process group.

    Args:
        weight: The table's first weights, the same on every rank. [V, D]
        lr: Step size of SGD.
        by: "columns" or "rows".
        unique: Whether repeated ids are removed before TorchRec sees them.

    Raises:
        ImportError: TorchRec is not there; names the command that installs it.
        ValueError: `by` is neither, or the columns cannot be divided evenly.
    """

    def __init__(self, weight: Tensor, lr: float, *, by: str, unique: bool) -> None:
        reason = why_not()
        if reason is not None:
            raise ImportError(reason)
        num_ranks = dist.get_world_size()
        if by == "columns" and weight.shape[1] % num_ranks:
            raise ValueError(
                f"TorchRec divides columns evenly: D = {weight.shape[1]} on {num_ranks} ranks"
            )
        if by not in ("columns", "rows"):
            raise ValueError(f"by = {by!r} is neither 'columns' nor 'rows'")
        self.shape = weight.shape
        self.unique = unique
        self.jagged = _import("torchrec.sparse.jagged_tensor").KeyedJaggedTensor
        self.sharded = _shard(weight, lr, by)

    def step(self, ids: Tensor, target: Tensor) -> None:
        """Looks up, and takes one step towards `target`. ids [T], target [T, D]"""
        output = self.lookup(ids)
        output.backward(output.detach() - target)

    def lookup(self, ids: Tensor) -> Tensor:
        """Returns the ids' rows; collective. [T] to [T, D]"""
        if not self.unique:
            return self._rows(ids)
        kept, position = torch.unique(ids, return_inverse=True)
        return nn.functional.embedding(position, self._rows(kept))

    def _rows(self, ids: Tensor) -> Tensor:
        feature = self.jagged(keys=[_FEATURE], values=ids, lengths=torch.tensor([len(ids)]))
        rows: Tensor = self.sharded(feature)[_FEATURE].values()
        return rows

    def weight(self) -> Tensor:
        """Returns the whole table; collective. [V, D]"""
        table = torch.zeros(self.shape)
        state = self.sharded.state_dict()[f"embeddings.{_TABLE}.weight"]
        for shard in state.local_shards():
            row, column = shard.metadata.shard_offsets
            rows, columns = shard.metadata.shard_sizes
            table[row : row + rows, column : column + columns] = shard.tensor
        dist.all_reduce(table)
        return table

    def sent_bytes(self) -> None:
        """TorchRec does not count bytes."""

    def close(self) -> None:
        """Nothing to give back."""


def _shard(weight: Tensor, lr: float, by: str) -> nn.Module:
    torchrec = _import("torchrec")
    plans = _import("torchrec.distributed.sharding_plan")
    device, num_ranks = torch.device("cpu"), dist.get_world_size()
    config = torchrec.EmbeddingConfig(
        name=_TABLE,
        num_embeddings=weight.shape[0],
        embedding_dim=weight.shape[1],
        feature_names=[_FEATURE],
    )
    collection = torchrec.EmbeddingCollection(tables=[config], device=device)
    with torch.no_grad():
        collection.embeddings[_TABLE].weight.copy_(weight)
    fuse = _import("torch.distributed.optim")._apply_optimizer_in_backward
    fuse(torch.optim.SGD, collection.parameters(), {"lr": lr})
    sharder = _import("torchrec.distributed.embedding").EmbeddingCollectionSharder()
    cut = plans.column_wise(list(range(num_ranks))) if by == "columns" else plans.row_wise()
    plan = plans.construct_module_sharding_plan(
        collection,
        {_TABLE: cut},
        sharder=sharder,
        local_size=num_ranks,
        world_size=num_ranks,
        device_type="cpu",
    )
    types = _import("torchrec.distributed.types")
    env = types.ShardingEnv.from_process_group(dist.group.WORLD)
    sharded: nn.Module = sharder.shard(collection, plan, env, device)
    return sharded

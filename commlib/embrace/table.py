"""A table that is partitioned by columns, as a module: what both kinds of embedding share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from commlib.embrace.columns import mark
from commlib.embrace.exchange import Exchange
from commlib.embrace.parts import Part


class ShardedTable(nn.Module):
    """Holds this rank's columns of a `[V, D]` table and looks up whole rows, with the other ranks.

    The registered parameter is a plain one of shape `[V, d_r]`, because optimizers that take
    row-sparse gradients ask tensors in ways that no DTensor answers. To everybody else the
    table is a DTensor: `weight` and `state_dict()` give one of shape `[V, D]`, placed `Shard(1)`,
    in the same memory.

    Args:
        local: `[V, d_r]`, this rank's columns.
        embedding_dim: D.
        exchange: What tables share.
        name: Names requests and errors; the same on every rank.
        padding_idx: Row whose gradient is zero.
        scale_grad_by_freq: Divide gradients by how often this rank's batch has the id.
        sparse: Give row-sparse gradients.
        requires_grad: Whether the table is trained.
    """

    def __init__(
        self,
        local: Tensor,
        embedding_dim: int,
        exchange: Exchange,
        name: str,
        *,
        padding_idx: int | None,
        scale_grad_by_freq: bool,
        sparse: bool,
        requires_grad: bool,
    ) -> None:
        super().__init__()
        self.num_embeddings = int(local.shape[0])
        self.embedding_dim = embedding_dim
        self.name = name
        self.exchange = exchange
        self.padding_idx = _row(padding_idx, self.num_embeddings)
        self.scale_grad_by_freq = scale_grad_by_freq
        self.sparse = sparse
        self.columns = exchange.columns(self.num_embeddings, embedding_dim)
        self.register_parameter("weight", Parameter(local, requires_grad=requires_grad))
        self.register_state_dict_post_hook(_give_dtensor)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_take_columns)  # type: ignore[no-untyped-call]
        self._mark()

    @property
    def weight(self) -> DTensor:
        """The table `[V, D]` as a DTensor, differentiable, in the memory of `local_weight`."""
        return self.columns.wrap(self.local_weight)

    @property
    def local_weight(self) -> Parameter:
        """This rank's columns `[V, d_r]`: the registered parameter, which has the gradient."""
        parameter = self._parameters.get("weight")
        if parameter is None:
            raise AttributeError("weight is not registered yet")
        return parameter

    def part(self, indices: Tensor, counts: tuple[int, ...]) -> Part:
        """Rows of this table for an exchange; see `Part`."""
        weight = self.local_weight.detach()
        wire = self.exchange.wire_of(weight.dtype)
        return Part(weight, indices, counts, self.columns.widths, wire)

    def positions(self, ids: Tensor, unique: Tensor) -> Tensor:
        """Where each id of a batch is among its unique ids; int64, the shape of `ids`."""
        flat = ids.reshape(-1).to(torch.int64).contiguous()
        return torch.searchsorted(unique, flat).view(ids.shape)

    def padding_position(self, unique: Tensor) -> int | None:
        """Where the padding row is among the unique ids; None where it is not."""
        if self.padding_idx is None:
            return None
        place = int(torch.searchsorted(unique, self.padding_idx))
        found = place < len(unique) and int(unique[place]) == self.padding_idx
        return place if found else None

    def extra_repr(self) -> str:
        held = f"{self.num_embeddings}, {self.embedding_dim}, columns={self.columns.widths}"
        return f"{held}, rank={self.exchange.rank}, sparse={self.sparse}"

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "weight":
            super().__setattr__(name, value)
        elif isinstance(value, Parameter) and tuple(value.shape) == self.columns.local_shape:
            self._parameters[name] = value
            self._mark()
        else:
            raise AttributeError(
                f"the weight of partitioned table '{self.name}' can only be replaced by a"
                f" Parameter of the own columns {self.columns.local_shape}: use load_state_dict, or"
                " copy into local_weight"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ShardedTable:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark()
        return self

    def _mark(self) -> None:
        """A copied or converted parameter is another one."""
        mark(self.local_weight, self.columns)
        self.exchange.tables.add(self)


def _row(padding_idx: int | None, num_rows: int) -> int | None:
    if padding_idx is None:
        return None
    if not -num_rows <= padding_idx < num_rows:
        raise ValueError(f"padding_idx = {padding_idx} must be a row of a table of {num_rows} rows")
    return padding_idx % num_rows


def _give_dtensor(
    module: ShardedTable, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    state_dict[f"{prefix}weight"] = module.columns.wrap(state_dict[f"{prefix}weight"])


def _take_columns(
    module: ShardedTable,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    key = f"{prefix}weight"
    if key in state_dict:
        try:
            state_dict[key] = module.columns.unwrap(state_dict[key], key)
        except ValueError as mistake:
            errors.append(str(mistake))
            del state_dict[key]

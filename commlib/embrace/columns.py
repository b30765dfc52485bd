"""Who holds which columns of a table, and how a shard looks to the rest of PyTorch: a DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from commlib.collectives.requests import AllGather, AllToAll, Protocol

_MARK = "_commlib_columns"


def column_widths(dim: int, num_ranks: int) -> tuple[int, ...]:
    """Columns that each rank holds, as DTensor's `Shard(1)` and `torch.chunk` cut them.

    D = 10 on 4 ranks: 3, 3, 3, 1. Ranks beyond the last chunk hold none.
    """
    width = -(-dim // num_ranks)
    return tuple(max(0, min(width, dim - rank * width)) for rank in range(num_ranks))


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """What one rank holds of a `[V, D]` table.

    Args:
        shape: V and D.
        widths: Columns of each rank.
        rank: This rank in the mesh.
        mesh: The ranks, as a one-dimensional device mesh.
    """

    shape: tuple[int, int]
    widths: tuple[int, ...]
    rank: int
    mesh: DeviceMesh

    @property
    def local_shape(self) -> tuple[int, int]:
        """V and the own columns."""
        return self.shape[0], self.widths[self.rank]

    def own(self, full: Tensor) -> Tensor:
        """A copy of the own columns of a full `[V, D]` tensor."""
        first = sum(self.widths[: self.rank])
        return full[:, first : first + self.widths[self.rank]].clone(
            memory_format=torch.contiguous_format
        )

    def wrap(self, local: Tensor) -> DTensor:
        """The `[V, D]` DTensor whose local part is `local`, memory shared, differentiable."""
        tensor: DTensor = DTensor.from_local(
            local,
            self.mesh,
            [Shard(1)],
            run_check=False,
            shape=torch.Size(self.shape),
            stride=(self.shape[1], 1),
        )
        return tensor

    def unwrap(self, value: Tensor, what: str) -> Tensor:
        """The own columns of a DTensor, or of a full `[V, D]` tensor; a local one as it is.

        Collective where a DTensor is cut in another way.

        Raises:
            ValueError: Another shape; `what` names the tensor.
        """
        shape = tuple(value.shape)
        if isinstance(value, DTensor) and shape == self.shape:
            if value.device_mesh == self.mesh and value.placements == (Shard(1),):
                return value.to_local()
            return self.own(value.full_tensor())
        if shape == self.shape:
            return self.own(value)
        if shape == self.local_shape and not isinstance(value, DTensor):
            return value
        raise ValueError(
            f"{what} has shape {shape}; rank {self.rank} of {len(self.widths)} takes the whole"
            f" table {self.shape}, as a tensor or DTensor, or its own columns {self.local_shape}"
        )


def mark(parameter: Parameter, columns: Columns) -> None:
    """Note on a parameter that it holds columns of a table."""
    setattr(parameter, _MARK, columns)


def columns_of(parameter: Tensor) -> Columns | None:
    """What a parameter holds of a table; None where it is no shard."""
    columns: Columns | None = getattr(parameter, _MARK, None)
    return columns


def deal_columns(
    name: str, table: Tensor, widths: tuple[int, ...], rank: int, num_ranks: int
) -> Protocol[Tensor]:
    """Rank 0's columns to those who hold them: `[V, d_me]`, whatever the other ranks have.

    Steps 1, bytes of rank 0: V (D - d_0) w.

    Source: ours.
    """
    if num_ranks == 1:
        return table.clone(memory_format=torch.contiguous_format)
    num_rows = table.shape[0]
    blocks = table.split(list(widths), 1) if rank == 0 else (table[:0, :0],)
    flat = yield AllToAll(
        name=name,
        tensor=torch.cat([block.reshape(-1) for block in blocks]),
        send=tuple(num_rows * width if rank == 0 else 0 for width in widths),
        recv=tuple(num_rows * widths[rank] if peer == 0 else 0 for peer in range(num_ranks)),
    )
    whole: Tensor = flat.view(num_rows, widths[rank])
    return whole


def gather_columns(
    name: str, local: Tensor, widths: tuple[int, ...], rank: int, num_ranks: int
) -> Protocol[Tensor]:
    """The whole table `[V, D]` on every rank, from everybody's columns.

    Steps 1, bytes of rank r: (n-1) V d_r w.

    Source: ours.
    """
    if num_ranks == 1:
        return local.clone()
    num_rows = local.shape[0]
    sizes = tuple(num_rows * width for width in widths)
    flat = yield AllGather(name=name, tensor=local.reshape(-1), sizes=sizes)
    return side_by_side(flat, num_rows, widths)


def side_by_side(flat: Tensor, num_rows: int, widths: Sequence[int]) -> Tensor:
    """`[num_rows, d_r]` of each rank, one behind the other, to `[num_rows, D]`."""
    blocks = flat.split([num_rows * width for width in widths])
    return torch.cat(
        [block.view(num_rows, width) for block, width in zip(blocks, widths, strict=True)], 1
    )

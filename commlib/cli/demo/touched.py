"""The rows that the ranks touch, counted: what bounds and byte formulas are made of."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import nn

from commlib.cli.demo.workload import Workload


@dataclasses.dataclass(frozen=True)
class Touched:
    """The rows of one table that the ranks touched in one step.

    Attributes:
        num_ranks: n.
        num_rows: V, rows of the table.
        row_bytes: D·w, bytes of a row.
        mean_rows: S, mean over the ranks of the rows that each touched.
        max_rows: Rows that the busiest rank touched.
        union_rows: U, rows that any rank touched.
    """

    num_ranks: int
    num_rows: int
    row_bytes: int
    mean_rows: float
    max_rows: int
    union_rows: int

    @property
    def bound_bytes(self) -> float:
        """Least bytes that a rank can send on average, and average exactly: D·w·(S + U(n-2)/n)."""
        if self.num_ranks == 1:
            return 0.0
        return self.row_bytes * (
            self.mean_rows + self.union_rows * (self.num_ranks - 2) / self.num_ranks
        )


@dataclasses.dataclass(frozen=True)
class TableShape:
    """An embedding table: its module's name, V, D, and w."""

    name: str
    num_rows: int
    dim: int
    element_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, D·w."""
        return self.dim * self.element_bytes

    @property
    def num_parameters(self) -> int:
        """Elements of the table, V·D."""
        return self.num_rows * self.dim


def table_shapes(model: nn.Module) -> list[TableShape]:
    """Lists a model's embedding tables, in the order of its modules."""
    return [
        TableShape(name, module.num_embeddings, module.embedding_dim, module.weight.element_size())
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    ]


def count_touched(
    workload: Workload, tables: list[TableShape], num_steps: int
) -> list[list[Touched]]:
    """Counts every step's rows in the default group: one entry a table, for each step. Collective.

    Args:
        workload: Whose batches.
        tables: Its tables; those that a batch does not look up have no rows.
        num_steps: Steps, from 0.
    """
    num_ranks = dist.get_world_size()
    sizes = [table.num_rows for table in tables]
    counted = []
    for step in range(num_steps):
        ids = workload.ids(workload.batch(step))
        masks = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        for table, mask in zip(tables, masks, strict=True):
            if table.name in ids:
                mask[ids[table.name].flatten()] = 1
        own = torch.tensor([int(mask.sum()) for mask in masks])
        counts = [torch.empty_like(own) for _ in range(num_ranks)]
        dist.all_gather(counts, own)
        by_rank = torch.stack(counts)
        union = torch.cat(masks)
        dist.all_reduce(union, dist.ReduceOp.MAX)
        counted.append(
            [
                Touched(
                    num_ranks=num_ranks,
                    num_rows=table.num_rows,
                    row_bytes=table.row_bytes,
                    mean_rows=float(by_rank[:, idx].double().mean()),
                    max_rows=int(by_rank[:, idx].max()),
                    union_rows=int(mask.sum()),
                )
                for idx, (table, mask) in enumerate(zip(tables, union.split(sizes), strict=True))
            ]
        )
    return counted

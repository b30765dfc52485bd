"""A drop-in partitioned `nn.Embedding`.

It fetches the unique rows of a batch, `[u, D]`, and then looks up positions in them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from commlib import ops
from commlib.embrace.build import check_table, deal, prepare
from commlib.embrace.exchange import Exchange
from commlib.embrace.source import Rows
from commlib.embrace.table import ShardedTable
from commlib.rows import accumulate_dtype


class ShardedEmbedding(ShardedTable):
    """`nn.Embedding` whose columns are spread over the ranks; construction is collective.

    A forward pass is collective too, in training and evaluation: all ranks look up the same tables
    in the same order, with whatever ids, also none.

    Args:
        num_embeddings: V.
        embedding_dim: D.
        padding_idx: Row whose gradient is zero; it starts as zeros.
        max_norm: Must be None: no rank holds whole rows.
        norm_type: Taken for the sake of the signature; of use with `max_norm` only.
        scale_grad_by_freq: Divide gradients by how often this rank's batch has the id.
        sparse: Give row-sparse gradients (COO, sorted unique indices).
        dtype: Of the weight.
        exchange: What tables share; None opens one with its defaults.
        name: Names requests and errors; the same on every rank.

    Raises:
        ValueError, TypeError: Options that a partitioned table cannot have.

    Source: EmbRace, column-wise partitioned embeddings.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        dtype: torch.dtype | None = None,
        *,
        exchange: Exchange | None = None,
        name: str = "embedding",
        _local: Tensor | None = None,
        _requires_grad: bool = True,
    ) -> None:
        exchange, local = prepare(
            num_embeddings, embedding_dim, max_norm, dtype, exchange, name, _local
        )
        super().__init__(
            local,
            embedding_dim,
            exchange,
            name,
            padding_idx=padding_idx,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            requires_grad=_requires_grad,
        )
        if _local is None and self.padding_idx is not None:
            local[self.padding_idx] = 0

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding,
        *,
        exchange: Exchange | None = None,
        name: str = "embedding",
        sparse: bool | None = None,
    ) -> ShardedEmbedding:
        """Partition an embedding; rank 0's weights count. Collective.

        Args:
            embedding: Left as it is.
            exchange: What tables share; None opens one.
            name: Names requests and errors.
            sparse: Overrides the embedding's own flag.
        """
        check_table(embedding.weight, embedding.max_norm, f"table '{name}'")
        exchange = exchange or Exchange()
        return cls(
            embedding.num_embeddings,
            embedding.embedding_dim,
            embedding.padding_idx,
            scale_grad_by_freq=embedding.scale_grad_by_freq,
            sparse=embedding.sparse if sparse is None else sparse,
            exchange=exchange,
            name=name,
            _local=deal(exchange, name, embedding.weight),
            _requires_grad=embedding.weight.requires_grad,
        ).train(embedding.training)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        *,
        exchange: Exchange | None = None,
        name: str = "embedding",
        **options: Any,
    ) -> ShardedEmbedding:
        """Partition given weights `[V, D]`; rank 0's count. Collective.

        Args:
            embeddings: `[V, D]`.
            freeze: Whether the table is not trained.
            exchange: What tables share; None opens one.
            name: Names requests and errors.
            **options: As `nn.Embedding.from_pretrained` has them.
        """
        whole = nn.Embedding.from_pretrained(embeddings, freeze, **options)
        return cls.from_embedding(whole, exchange=exchange, name=name)

    def forward(self, input: Tensor) -> Tensor:
        """The rows of `input`, `[*, D]`."""
        return self.of_rows(self.exchange.source.rows(self, input), input)

    def of_rows(self, rows: Rows, input: Tensor) -> Tensor:
        """The output for rows that are there already."""
        unique, values = rows
        positions, padding = self.positions(input, unique), self.padding_position(unique)
        if self.scale_grad_by_freq:
            return functional.embedding(positions, values, padding, scale_grad_by_freq=True)
        flat = positions.view(-1)
        out: Tensor = _Lookup.apply(values, flat, padding)  # type: ignore[no-untyped-call]
        return out.view(*input.shape, self.embedding_dim)

    def whole(self, weight: Tensor) -> nn.Embedding:
        """The ordinary module with these weights `[V, D]`."""
        module: nn.Embedding = nn.Embedding.from_pretrained(
            weight,
            not self.local_weight.requires_grad,
            self.padding_idx,
            scale_grad_by_freq=self.scale_grad_by_freq,
            sparse=self.sparse,
        )
        return module.train(self.training)


class _Lookup(torch.autograd.Function):
    """`values[positions]` by the kernels; torch's own backward takes several times as long.

    The gradient is summed in order of occurrence, halves in fp32.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, positions: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.padding, ctx.shape, ctx.dtype = padding, values.shape, values.dtype
        return ops.gather_rows(values, positions)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (positions,) = ctx.saved_tensors
        total = torch.zeros(ctx.shape, dtype=accumulate_dtype(ctx.dtype))
        ops.scatter_add_rows_(total, positions, gradient)
        if ctx.padding is not None:
            total[ctx.padding] = 0
        return total.to(ctx.dtype), None, None

"""A drop-in partitioned `nn.EmbeddingBag`.

It fetches the unique rows of a batch, `[u, D]`, and then calls torch's own functional with
positions in them, so every option, and its gradient, is torch's.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from commlib.embrace.build import check_table, deal, prepare
from commlib.embrace.exchange import Exchange
from commlib.embrace.source import Rows
from commlib.embrace.table import ShardedTable

Mode = Literal["sum", "mean", "max"]


class ShardedEmbeddingBag(ShardedTable):
    """`nn.EmbeddingBag` whose columns are spread over the ranks; construction is collective.

    A forward pass is collective too, in training and evaluation. Every mode may have row-sparse
    gradients, also "max", as what is reduced is the gradient of the unique rows.

    Args:
        num_embeddings: V.
        embedding_dim: D.
        max_norm: Must be None: no rank holds whole rows.
        norm_type: Taken for the sake of the signature; of use with `max_norm` only.
        scale_grad_by_freq: Divide gradients by how often this rank's batch has the id.
        mode: "sum", "mean" or "max".
        sparse: Give row-sparse gradients (COO, sorted unique indices).
        include_last_offset: `offsets` ends with the number of ids.
        padding_idx: Row that no bag contains; it starts as zeros.
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
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: Mode = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        dtype: torch.dtype | None = None,
        *,
        exchange: Exchange | None = None,
        name: str = "embedding",
        _local: Tensor | None = None,
        _requires_grad: bool = True,
    ) -> None:
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"mode = {mode!r} must be 'sum', 'mean' or 'max'")
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
        self.mode: Mode = mode
        self.include_last_offset = include_last_offset
        if _local is None and self.padding_idx is not None:
            local[self.padding_idx] = 0

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.EmbeddingBag,
        *,
        exchange: Exchange | None = None,
        name: str = "embedding",
        sparse: bool | None = None,
    ) -> ShardedEmbeddingBag:
        """Partition an embedding bag; rank 0's weights count. Collective.

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
            scale_grad_by_freq=embedding.scale_grad_by_freq,
            mode=embedding.mode,  # type: ignore[arg-type]
            sparse=embedding.sparse if sparse is None else sparse,
            include_last_offset=embedding.include_last_offset,
            padding_idx=embedding.padding_idx,
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
    ) -> ShardedEmbeddingBag:
        """Partition given weights `[V, D]`; rank 0's count. Collective.

        Args:
            embeddings: `[V, D]`.
            freeze: Whether the table is not trained.
            exchange: What tables share; None opens one.
            name: Names requests and errors.
            **options: As `nn.EmbeddingBag.from_pretrained` has them.
        """
        whole = nn.EmbeddingBag.from_pretrained(embeddings, freeze, **options)
        return cls.from_embedding(whole, exchange=exchange, name=name)

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """One row a bag, `[num_bags, D]`; arguments as in `nn.EmbeddingBag`."""
        rows = self.exchange.source.rows(self, input)
        return self.of_rows(rows, input, offsets, per_sample_weights)

    def of_rows(
        self,
        rows: Rows,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """The output for rows that are there already."""
        unique, values = rows
        return functional.embedding_bag(
            self.positions(input, unique),
            values,
            offsets if offsets is None else offsets.to(torch.int64),
            scale_grad_by_freq=self.scale_grad_by_freq,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_position(unique),
        )

    def whole(self, weight: Tensor) -> nn.EmbeddingBag:
        """The ordinary module with these weights `[V, D]`."""
        return nn.EmbeddingBag.from_pretrained(
            weight,
            not self.local_weight.requires_grad,
            scale_grad_by_freq=self.scale_grad_by_freq,
            mode=self.mode,
            sparse=self.sparse,
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
        ).train(self.training)

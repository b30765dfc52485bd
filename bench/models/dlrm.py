"""Click prediction as in DLRM: many tables of very different sizes, looked up by bags of ids.

    13 numbers ──► bottom MLP ──┐
    26 bags of ids ──► tables ──┴─► dot products of all pairs ──► top MLP ──► click?

Cardinalities are those of the Criteo display-advertising data, cut to 10 to 120,000 rows; bags are
as long as in MLPerf's multi-hot version of it, at most 10. A hidden linear model draws the clicks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.gradients import zipf_edges
from commlib import embrace
from commlib.cli.demo.settings import Settings

# fmt: off
_CRITEO_ROWS = (
    1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194,
    27, 14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
)
_BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 10, 10, 10, 10, 3, 1, 1)
# fmt: on
MIN_ROWS, MAX_ROWS = 10, 120_000
NUM_ROWS = tuple(min(max(rows, MIN_ROWS), MAX_ROWS) for rows in _CRITEO_ROWS)
"""Rows V of each table."""
NUM_NUMBERS = 13
_BOTTOM, _TOP = (128, 64), (128, 64)
_VALID_STEP = 1 << 20  # batches from here on are never trained


class Dlrm(nn.Module):
    """Tables, two MLPs and the products between.

    Args:
        num_rows: Rows V of each table.
        dim: Columns D of all tables.
        sparse: Whether the tables' gradients are sparse tensors.
    """

    def __init__(self, *, num_rows: Sequence[int], dim: int, sparse: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(
                rows, dim, mode="sum", sparse=sparse, _weight=torch.randn(rows, dim) * dim**-0.5
            )
            for rows in num_rows
        )
        num_vectors = len(num_rows) + 1
        self.pairs = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.bottom = _mlp(NUM_NUMBERS, *_BOTTOM, dim)
        self.top = _mlp(dim + self.pairs.shape[1], *_TOP, 1)

    def forward(self, numbers: Tensor, clicked: Tensor, *bags: Tensor) -> Tensor:
        """Returns the mean binary cross-entropy.

        Args:
            numbers: [batch, 13]
            clicked: 0 or 1. [batch]
            bags: Ids of each table. [batch, bag length]
        """
        dense = self.bottom(numbers)
        vectors = torch.stack([dense, *self._pool(bags)], 1)
        products = torch.bmm(vectors, vectors.mT)[:, self.pairs[0], self.pairs[1]]
        logit = self.top(torch.cat([dense, products], 1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(logit, clicked)

    def _pool(self, bags: Sequence[Tensor]) -> list[Tensor]:
        """Sums each bag's rows, those of partitioned tables together. [batch, D] each"""
        asked: dict[embrace.ShardedEmbedding | embrace.ShardedEmbeddingBag, Any] = {
            table: bag
            for table, bag in zip(self.tables, bags, strict=True)
            if isinstance(table, embrace.ShardedEmbeddingBag)
        }
        found = embrace.lookup(asked) if asked else {}
        return [
            found[table] if isinstance(table, embrace.ShardedEmbeddingBag) else table(bag)
            for table, bag in zip(self.tables, bags, strict=True)
        ]


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DlrmWorkload:
    """Synthetic clicks on skewed ids.

    Args:
        settings: The same on every rank.
        rank: This rank.
        num_ranks: n.
    """

    def __init__(self, settings: Settings, *, rank: int, num_ranks: int) -> None:
        self.settings = settings
        self.rank, self.num_ranks = rank, num_ranks
        self.num_samples = settings.batch
        self.batch = functools.cache(self._draw)
        hidden = torch.Generator().manual_seed(settings.seed)
        self._edges = [zipf_edges(rows, 1.0) for rows in NUM_ROWS]
        self._row_effects = [torch.randn(rows, generator=hidden) for rows in NUM_ROWS]
        self._number_effects = torch.randn(NUM_NUMBERS, generator=hidden)
        # A frequent id is any row, and not the first one, as where ids come from hashes.
        self._shuffled = [torch.randperm(rows, generator=hidden) for rows in NUM_ROWS]

    def build(self, *, sparse: bool) -> nn.Module:
        """As `Workload`."""
        torch.manual_seed(self.settings.seed)
        return Dlrm(num_rows=NUM_ROWS, dim=self.settings.dim, sparse=sparse)

    def ids(self, batch: tuple[Tensor, ...]) -> Mapping[str, Tensor]:
        """As `Workload`."""
        return {f"tables.{idx}": bag for idx, bag in enumerate(batch[2:])}

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """As `Workload`."""
        start = self.settings.initial_accumulator
        return torch.optim.Adagrad(parameters, lr=self.settings.lr, initial_accumulator_value=start)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> Tensor:
        """As `Workload`, on batches that are not trained."""
        num_batches = max(1, self.settings.eval_tokens // (self.num_samples * self.num_ranks))
        losses = [model(*self.batch(_VALID_STEP + idx)) for idx in range(num_batches)]
        return torch.stack(losses).mean()

    def _draw(self, step: int) -> tuple[Tensor, ...]:
        """Draws numbers, clicks and 26 bags."""
        seed = (self.settings.seed << 40) + step * self.num_ranks + self.rank
        generator = torch.Generator().manual_seed(seed)
        size = self.settings.batch
        numbers = torch.randn(size, NUM_NUMBERS, generator=generator)
        bags = []
        score = numbers @ self._number_effects
        for length, edges, shuffled, effects in zip(
            _BAGS, self._edges, self._shuffled, self._row_effects, strict=True
        ):
            draws = torch.rand(size, length, generator=generator, dtype=torch.float64)
            rank = torch.searchsorted(edges, draws).clamp_(max=len(edges) - 1)
            bags.append(shuffled[rank])
            score += effects[bags[-1]].mean(1)
        clicks = torch.bernoulli(torch.sigmoid(score / 2), generator=generator)
        return numbers, clicks, *bags

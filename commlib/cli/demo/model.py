"""A word-level LSTM language model whose parameters are almost all embedding rows."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional


class LogUniform:
    """Samples word ids with P(id) = log((id+2)/(id+1)) / log(V+1), which is near Zipf's law.

    Args:
        num_rows: Rows V of the table, ids in order of frequency.
        num_samples: Samples of a draw, with replacement.
    """

    def __init__(self, num_rows: int, num_samples: int) -> None:
        self.num_rows = num_rows
        self.num_samples = num_samples
        ids = torch.arange(num_rows, dtype=torch.float64)
        probability = torch.log1p(1 / (ids + 1)) / math.log(num_rows + 1)
        self.log_expected = torch.log(num_samples * probability).float()
        """Log of the expected number of times that an id is drawn. [V]"""

    def draw(self, seed: int) -> Tensor:
        """Draws ids, the same for the same seed. [num_samples]"""
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand(self.num_samples, generator=generator, dtype=torch.float64)
        ids = torch.exp(uniform * math.log(self.num_rows + 1)).long() - 1
        return ids.clamp_(0, self.num_rows - 1)


def sampled_softmax(
    hidden: Tensor, targets: Tensor, negatives: Tensor, table: nn.Module, log_expected: Tensor
) -> Tensor:
    """Returns the mean loss of each target against the negatives.

    Args:
        hidden: The state after each word. [num_words, D]
        targets: The word after each of them, `num_words` ids of any shape.
        negatives: Sampled ids, shared by all words; those that hit a word's target do not count for
            that word. [num_negatives]
        table: Output table, looked up like an embedding.
        log_expected: Log of the expected count of each id among the negatives. [V]
    """
    labels = targets.flatten()
    rows = table(torch.cat([labels, negatives]))
    positive, negative = rows[: len(labels)], rows[len(labels) :]
    positive_logits = (hidden * positive).sum(1) - log_expected[labels]
    negative_logits = hidden @ negative.T - log_expected[negatives]
    negative_logits = negative_logits.masked_fill(labels[:, None] == negatives, -torch.inf)
    logits = torch.cat([positive_logits[:, None], negative_logits], 1)
    loss: Tensor = (torch.logsumexp(logits, 1) - positive_logits).mean()
    return loss


def full_softmax(hidden: Tensor, targets: Tensor, table: nn.Module) -> Tensor:
    """Returns the mean loss against the whole vocabulary. Shapes as in `sampled_softmax`."""
    weight = cast(Tensor, table.weight)
    if isinstance(weight, DTensor):
        weight = weight.full_tensor()
    return functional.cross_entropy(hidden @ weight.T, targets.flatten())


class LanguageModel(nn.Module):
    """Embedding, LSTM, projection, and a sampled softmax over a second embedding.

    The output table is looked up like an embedding, so that both tables get row-sparse gradients
    and everything that a step touches is touched inside `forward`, where DDP sees it.

    Args:
        num_rows: Rows V of both tables.
        dim: Columns D of both tables.
        hidden: Units of the LSTM.
        log_expected: Log of the expected count of each id among the negatives. [V]
        sparse: Whether the tables' gradients are sparse tensors.
    """

    def __init__(
        self, *, num_rows: int, dim: int, hidden: int, log_expected: Tensor, sparse: bool
    ) -> None:
        super().__init__()
        self.input_table = nn.Embedding(num_rows, dim, sparse=sparse)
        self.lstm = nn.LSTM(dim, hidden, batch_first=True)
        self.project = nn.Linear(hidden, dim)
        self.output_table = nn.Embedding(num_rows, dim, sparse=sparse)
        self.log_expected = log_expected
        for table in (self.input_table, self.output_table):
            nn.init.normal_(table.weight, std=dim**-0.5)

    def forward(self, inputs: Tensor, targets: Tensor, negatives: Tensor) -> Tensor:
        """Returns the mean sampled-softmax loss.

        Args:
            inputs: Word ids. [batch, length]
            targets: The word after each of them. [batch, length]
            negatives: Sampled ids, shared by the batch; those that hit a word's target do not count
                for that word. [num_negatives]
        """
        hidden = self._encode(inputs)
        return sampled_softmax(hidden, targets, negatives, self.output_table, self.log_expected)

    @torch.no_grad()
    def full_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean loss against the whole vocabulary. Shapes as in `forward`.

        Collective where the tables are partitioned.
        """
        return full_softmax(self._encode(inputs), targets, self.output_table)

    def _encode(self, inputs: Tensor) -> Tensor:
        """Returns the state after each word. [batch * length, D]"""
        states: Tensor = self.lstm(self.input_table(inputs))[0]
        projected: Tensor = self.project(states)
        return projected.flatten(0, 1)

"""A transformer language model whose parameters are for the most part dense."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from commlib.cli.demo.model import full_softmax, sampled_softmax
from commlib.cli.demo.workload import LanguageWorkload

NUM_LAYERS, NUM_HEADS, WIDTH = 4, 4, 320


class Transformer(nn.Module):
    """Embedding, causal transformer layers, and a sampled softmax over a second embedding.

    Args:
        num_rows: Rows V of both tables.
        dim: Columns D of both tables, which a linear layer widens to the transformer's.
        length: Most words of a sequence.
        log_expected: Log of the expected count of each id among the negatives. [V]
        sparse: Whether the tables' gradients are sparse tensors.
    """

    def __init__(
        self, *, num_rows: int, dim: int, length: int, log_expected: Tensor, sparse: bool
    ) -> None:
        super().__init__()
        self.input_table = nn.Embedding(num_rows, dim, sparse=sparse)
        self.widen = nn.Linear(dim, WIDTH)
        self.position = nn.Parameter(torch.zeros(length, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, NUM_HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, NUM_LAYERS, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False
        )
        self.project = nn.Linear(WIDTH, dim)
        self.output_table = nn.Embedding(num_rows, dim, sparse=sparse)
        self.log_expected = log_expected
        self.mask = nn.Transformer.generate_square_subsequent_mask(length)
        for table in (self.input_table, self.output_table):
            nn.init.normal_(table.weight, std=dim**-0.5)

    def forward(self, inputs: Tensor, targets: Tensor, negatives: Tensor) -> Tensor:
        """Returns the mean sampled-softmax loss; shapes as in `LanguageModel.forward`."""
        hidden = self._encode(inputs)
        return sampled_softmax(hidden, targets, negatives, self.output_table, self.log_expected)

    @torch.no_grad()
    def full_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean loss against the whole vocabulary.

        Collective where the tables are partitioned.
        """
        return full_softmax(self._encode(inputs), targets, self.output_table)

    def _encode(self, inputs: Tensor) -> Tensor:
        """Returns the state after each word. [batch * length, D]"""
        wide = self.widen(self.input_table(inputs)) + self.position[: inputs.shape[1]]
        states: Tensor = self.project(self.layers(wide, mask=self.mask, is_causal=True))
        return states.flatten(0, 1)


class TransformerWorkload(LanguageWorkload):
    """The transformer on the demo's text; arguments as `LanguageWorkload`."""

    def build(self, *, sparse: bool) -> nn.Module:
        """As `Workload`."""
        torch.manual_seed(self.settings.seed)
        return Transformer(
            num_rows=self.num_rows,
            dim=self.settings.dim,
            length=self.settings.length,
            log_expected=self.batches.sampler.log_expected,
            sparse=sparse,
        )

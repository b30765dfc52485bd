"""What is trained: a model and its batches, for a trainer and methods that know no model."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from commlib.cli.demo.corpus import Corpus
from commlib.cli.demo.model import LanguageModel, LogUniform
from commlib.cli.demo.settings import Settings


class Workload(Protocol):
    """One rank's view of what is trained; the same seeds give every method the same.

    Attributes:
        num_samples: Words, or clicks, that a rank trains in a step.
    """

    num_samples: int

    def build(self, *, sparse: bool) -> nn.Module:
        """Returns a new model with the same weights each time; `model(*batch)` is the mean loss.

        Args:
            sparse: Whether the gradients of its tables are sparse tensors.
        """

    def batch(self, step: int) -> tuple[Tensor, ...]:
        """Returns this rank's batch of a step, counted from 0."""

    def ids(self, batch: tuple[Tensor, ...]) -> Mapping[str, Tensor]:
        """Returns what a batch looks up: for each table, by its module's name, ids of any shape."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Returns the optimizer, one that takes sparse gradients."""

    def evaluate(self, model: nn.Module) -> Tensor:
        """Returns the mean loss of this rank's part of the validation data. []

        Collective where the model's tables are partitioned.
        """


class Batch(NamedTuple):
    """One rank's input of one step; shapes as in `LanguageModel.forward`."""

    inputs: Tensor
    targets: Tensor
    negatives: Tensor


class Batches:
    """Cuts the training text into one lane per sequence of each rank, and steps along the lanes.

    A batch depends on the seed, the step and the rank only, so every method sees the same.
    """

    def __init__(self, corpus: Corpus, settings: Settings, *, rank: int, num_ranks: int) -> None:
        self.settings = settings
        self.rank = rank
        self.num_ranks = num_ranks
        self.sampler = LogUniform(corpus.num_rows, settings.negatives)
        lane = len(corpus.train) // (num_ranks * settings.batch)
        if lane <= settings.length:
            raise ValueError(
                f"the text has {len(corpus.train)} training words; {num_ranks} ranks of "
                f"{settings.batch} sequences of {settings.length} need more than "
                f"{num_ranks * settings.batch * (settings.length + 1)}"
            )
        words = torch.from_numpy(corpus.train[: lane * num_ranks * settings.batch])
        self.lanes = words.view(num_ranks, settings.batch, lane)[rank].long()
        """This rank's lanes. [batch, num_words]"""

    def __getitem__(self, step: int) -> Batch:
        """Returns the batch of a step, counted from 0; the text repeats."""
        length = self.settings.length
        start = step % ((self.lanes.shape[1] - 1) // length) * length
        seed = (self.settings.seed << 40) + step * self.num_ranks + self.rank
        return Batch(
            inputs=self.lanes[:, start : start + length],
            targets=self.lanes[:, start + 1 : start + length + 1],
            negatives=self.sampler.draw(seed),
        )


class LanguageWorkload:
    """The demo's language model on a text.

    Args:
        corpus: The text; the same on every rank.
        settings: The same on every rank.
        rank: This rank.
        num_ranks: n.
    """

    def __init__(self, corpus: Corpus, settings: Settings, *, rank: int, num_ranks: int) -> None:
        self.settings = settings
        self.num_rows = corpus.num_rows
        self.num_samples = settings.batch * settings.length
        self.batches = Batches(corpus, settings, rank=rank, num_ranks=num_ranks)
        self.valid = _valid_slice(corpus, settings, rank, num_ranks)
        self.batch = functools.cache(self.batches.__getitem__)

    def build(self, *, sparse: bool) -> nn.Module:
        """As `Workload`."""
        torch.manual_seed(self.settings.seed)
        return LanguageModel(
            num_rows=self.num_rows,
            dim=self.settings.dim,
            hidden=self.settings.hidden,
            log_expected=self.batches.sampler.log_expected,
            sparse=sparse,
        )

    def ids(self, batch: tuple[Tensor, ...]) -> Mapping[str, Tensor]:
        """As `Workload`."""
        inputs, targets, negatives = batch
        return {"input_table": inputs, "output_table": torch.cat([targets.flatten(), negatives])}

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """As `Workload`."""
        return torch.optim.Adagrad(
            parameters,
            lr=self.settings.lr,
            initial_accumulator_value=self.settings.initial_accumulator,
        )

    def evaluate(self, model: nn.Module) -> Tensor:
        """As `Workload`, against the whole vocabulary."""
        return cast(LanguageModel, model).full_loss(*self.valid)


def _valid_slice(
    corpus: Corpus, settings: Settings, rank: int, num_ranks: int
) -> tuple[Tensor, Tensor]:
    """Returns a rank's part of the validation slice. Two of [num_sequences, length]"""
    length = settings.length
    available = (len(corpus.valid) - 1) // length
    wanted = max(1, settings.eval_tokens // (length * num_ranks))
    num_sequences = min(wanted, available // num_ranks)
    if num_sequences == 0:
        raise ValueError(
            f"the text has {len(corpus.valid)} validation words; {num_ranks} ranks need "
            f"at least {num_ranks * length + 1}"
        )
    stride = available // (num_sequences * num_ranks)
    sequence_idx = torch.arange(num_sequences) * num_ranks + rank
    window = (sequence_idx * stride * length)[:, None] + torch.arange(length + 1)
    words = torch.from_numpy(corpus.valid).long()[window]
    return words[:, :-1], words[:, 1:]

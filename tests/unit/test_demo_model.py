"""The demo's model: gradients are row-sparse, and the same either way."""

import numpy as np
import pytest
import torch

from commlib.cli.demo.corpus import Corpus
from commlib.cli.demo.model import LanguageModel, LogUniform
from commlib.cli.demo.settings import Settings
from commlib.cli.demo.workload import Batches

NUM_ROWS, DIM = 200, 8


def build(*, sparse: bool) -> LanguageModel:
    torch.manual_seed(0)
    log_expected = LogUniform(NUM_ROWS, 16).log_expected
    return LanguageModel(
        num_rows=NUM_ROWS, dim=DIM, hidden=6, log_expected=log_expected, sparse=sparse
    )


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, NUM_ROWS, (2, 6), generator=generator)
    return words[:, :-1], words[:, 1:], LogUniform(NUM_ROWS, 16).draw(3)


@pytest.fixture
def corpus():
    generator = np.random.default_rng(0)
    words = tuple(f"w{idx}" for idx in range(50))
    train, valid = (generator.integers(0, 50, size, dtype=np.int32) for size in (4_000, 500))
    return Corpus(words=words, train=train, valid=valid, source="random")


def test_gradients_touch_only_the_rows_that_were_looked_up(batch):
    inputs, targets, negatives = batch
    model = build(sparse=True)
    model(*batch).backward()
    for table, ids in (
        (model.input_table, inputs.flatten()),
        (model.output_table, torch.cat([targets.flatten(), negatives])),
    ):
        gradient = table.weight.grad
        assert gradient.is_sparse
        assert set(gradient.coalesce().indices()[0].tolist()) == set(ids.tolist())


def test_sparse_and_dense_gradients_are_equal(batch):
    sparse, dense = build(sparse=True), build(sparse=False)
    for model in (sparse, dense):
        model(*batch).backward()
    for one, other in zip(sparse.parameters(), dense.parameters(), strict=True):
        gradient = one.grad.to_dense() if one.grad.is_sparse else one.grad
        torch.testing.assert_close(gradient, other.grad)


def test_all_words_as_negatives_are_the_full_softmax(batch):
    inputs, targets, _ = batch
    model = build(sparse=False)
    model.log_expected = torch.zeros(NUM_ROWS)
    sampled = model(inputs, targets, torch.arange(NUM_ROWS))
    torch.testing.assert_close(sampled, model.full_loss(inputs, targets))


def test_tables_are_almost_all_parameters():
    settings = Settings()
    log_expected = torch.zeros(settings.max_vocab)
    model = LanguageModel(
        num_rows=settings.max_vocab,
        dim=settings.dim,
        hidden=settings.hidden,
        log_expected=log_expected,
        sparse=True,
    )
    total = sum(parameter.numel() for parameter in model.parameters())
    assert 2 * settings.max_vocab * settings.dim / total > 0.95


def test_log_uniform_draws_what_it_expects():
    sampler = LogUniform(20, 200_000)
    counts = torch.bincount(sampler.draw(0), minlength=20)
    torch.testing.assert_close(counts.float(), sampler.log_expected.exp(), rtol=0.05, atol=0)
    assert torch.equal(sampler.draw(7), sampler.draw(7))
    assert not torch.equal(sampler.draw(7), sampler.draw(8))


def test_ranks_get_different_batches_and_targets_follow_inputs(corpus):
    settings = Settings(batch=3, length=10, negatives=5)
    ranks = [Batches(corpus, settings, rank=rank, num_ranks=2) for rank in range(2)]
    first, second = ranks[0][4], ranks[0][5]
    assert torch.equal(first.inputs[:, 1:], first.targets[:, :-1])
    assert torch.equal(first.targets[:, -1], second.inputs[:, 0])
    assert not torch.equal(first.inputs, ranks[1][4].inputs)
    assert not torch.equal(first.negatives, ranks[1][4].negatives)


def test_the_text_repeats(corpus):
    batches = Batches(corpus, Settings(batch=3, length=10), rank=0, num_ranks=2)
    num_steps = (batches.lanes.shape[1] - 1) // 10
    assert torch.equal(batches[0].inputs, batches[num_steps].inputs)


def test_too_little_text_is_an_error(corpus):
    with pytest.raises(ValueError, match="4000 training words"):
        Batches(corpus, Settings(batch=1_000), rank=0, num_ranks=4)

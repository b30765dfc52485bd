"""The workloads of bench.train: deterministic, sparse where they say, tables as promised."""

import numpy as np
import pytest
import torch

from bench.models import MODELS
from commlib.cli.demo.corpus import Corpus
from commlib.cli.demo.settings import Settings
from commlib.cli.demo.touched import table_shapes

SHARES = {"lm": (0.97, 0.99), "transformer": (0.22, 0.28), "dlrm": (0.98, 1.0)}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Random words of a vocabulary as large as the models ask for."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.npz"

    def save(num_rows):
        generator = np.random.default_rng(0)
        words = tuple(f"w{idx}" for idx in range(num_rows))
        train, valid = (generator.integers(0, num_rows, n, dtype=np.int32) for n in (9_000, 900))
        Corpus(words=words, train=train, valid=valid, source="random").save(path)
        return path

    return save


def load(name, corpus, rank=0, **changed):
    settings = Settings(**{**MODELS[name].settings, **changed})
    path = corpus(settings.max_vocab)
    return MODELS[name].load(path, settings, rank=rank, num_ranks=2)


@pytest.mark.parametrize("name", MODELS)
def test_the_tables_share_of_the_parameters(name, corpus):
    model = load(name, corpus).build(sparse=True)
    total = sum(parameter.numel() for parameter in model.parameters())
    share = sum(table.num_parameters for table in table_shapes(model)) / total
    low, high = SHARES[name]
    assert low < share < high


@pytest.mark.parametrize("name", MODELS)
def test_ids_are_exactly_the_rows_with_gradient(name, corpus):
    workload = load(name, corpus)
    model = workload.build(sparse=True)
    batch = workload.batch(3)
    model(*batch).backward()
    ids = workload.ids(batch)
    assert set(ids) == {table.name for table in table_shapes(model)}
    for table, looked_up in ids.items():
        gradient = model.get_submodule(table).weight.grad
        assert gradient.is_sparse
        rows = gradient.coalesce().indices()[0]
        assert torch.equal(rows, torch.unique(looked_up))


@pytest.mark.parametrize("name", MODELS)
def test_every_method_gets_the_same(name, corpus):
    workload = load(name, corpus)
    one, other = workload.build(sparse=True), workload.build(sparse=False)
    for sparse, dense in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(sparse, dense)
    batch = workload.batch(2)
    for tensor, repeated in zip(batch, load(name, corpus).batch(2), strict=True):
        assert torch.equal(tensor, repeated)
    assert torch.equal(one(*batch), other(*batch))


@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_the_optimizer_takes_sparse_gradients(name, corpus):
    workload = load(name, corpus, eval_tokens=64)
    model = workload.build(sparse=True)
    optimizer = workload.optimizer(model.parameters())
    before = workload.evaluate(model)
    for _ in range(3):
        optimizer.zero_grad()
        model(*workload.batch(0)).backward()
        optimizer.step()
    assert torch.isfinite(workload.evaluate(model))
    assert not torch.equal(workload.evaluate(model), before)


def test_ranks_and_steps_draw_different_clicks(corpus):
    first = load("dlrm", corpus)
    for other in (first.batch(1), load("dlrm", corpus, rank=1).batch(0)):
        assert not torch.equal(first.batch(0)[0], other[0])
        assert not torch.equal(first.batch(0)[-1], other[-1])

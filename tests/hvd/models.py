"""Small models with sparse and dense gradients, and what trains them."""

import horovod.torch as hvd
import torch
from torch import nn

from commlib.horovod import DistributedOptimizer
from commlib.topology import Link

LINK = Link()  # measuring it takes longer than these tests
ROWS = 300


class Model(nn.Module):
    """A sparse table, a dense one, and two linear layers."""

    def __init__(self, sparse=True):
        super().__init__()
        self.words = nn.Embedding(ROWS, 8, sparse=sparse)
        self.kinds = nn.Embedding(70, 8)
        self.hidden = nn.Linear(8, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, ids):
        return self.out(self.hidden(self.words(ids) + self.kinds(ids % 70)).tanh()).pow(2).mean()


class Split:
    """Two optimizers as one: SparseAdam takes sparse gradients only."""

    def __init__(self, model, make):
        sparse = [("words.weight", model.words.weight)]
        dense = [(n, p) for n, p in model.named_parameters() if n != "words.weight"]
        self.both = [
            make(torch.optim.SparseAdam([p for _, p in sparse], lr=0.01), sparse),
            make(torch.optim.Adam([p for _, p in dense], lr=0.01), dense),
        ]

    def zero_grad(self):
        for optimizer in self.both:
            optimizer.zero_grad()

    def step(self):
        for optimizer in self.both:
            optimizer.step()


def batches(num, rank=None, size=6):
    """Skewed ids of one rank."""
    generator = torch.Generator().manual_seed(hvd.rank() if rank is None else rank)
    return [(torch.rand(size, generator=generator) ** 2 * ROWS).long() for _ in range(num)]


def ours(optimizer, named, **options):
    """commlib's optimizer."""
    return DistributedOptimizer(optimizer, named, link=LINK, timeout_s=30.0, **options)


def theirs(optimizer, named, **options):
    """Horovod's, without commlib's options."""
    options.pop("reducer", None)
    return hvd.DistributedOptimizer(optimizer, named, **options)


def build(make, optimizer, sparse=True, dtype=torch.float32, **options):
    """A model and its wrapped optimizer, from the same weights each time."""
    torch.manual_seed(0)
    model = Model(sparse).to(dtype)
    return model, make(optimizer(model.parameters()), model.named_parameters(), **options)


def weights(model):
    """A copy of all weights, flat."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def same_everywhere(tensor):
    """Whether all ranks hold the same bits."""
    gathered = hvd.allgather(tensor.view(1, -1).contiguous(), name="test.same")
    return all(torch.equal(gathered[0], row) for row in gathered)

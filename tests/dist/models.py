"""Small models, and training with and without the hook side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP

import commlib
from tests.dist.harness import same_everywhere

V, D = 50, 6


class Words(nn.Module):
    """A table, a linear layer, and a small second table."""

    def __init__(self, sparse: bool = False, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(V, D, sparse=sparse, **options)
        self.linear = nn.Linear(D, 3)
        self.kinds = nn.Embedding(4, D, sparse=sparse)

    def forward(self, ids: Tensor) -> Tensor:
        return self.linear(self.words(ids) + self.kinds(ids % 4)).square().mean()


class Tied(nn.Module):
    """The table is the output layer's weight too, so its gradient is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(V, D)
        self.out = nn.Linear(D, V, bias=False)
        self.out.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return functional.cross_entropy(
            self.out(self.words(ids)).flatten(0, 1), ids.flip(0).flatten()
        )


class Outside(nn.Module):
    """From the second step on, one rank looks its table up outside the module as well."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(V, D)
        self.rank = torch.distributed.get_rank()
        self.steps = 0

    def forward(self, ids: Tensor) -> Tensor:
        out = self.words(ids).square().mean()
        if self.steps >= 1 and self.rank == 0:
            out = out + functional.embedding((ids + 7) % V, self.words.weight).sum()
        self.steps += 1
        return out


class Sometimes(nn.Module):
    """The second table is used by rank 0 only, the third by nobody."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(V, D, sparse=sparse)
        self.rare = nn.Embedding(V, D, sparse=sparse)
        self.never = nn.Embedding(V, D)
        self.linear = nn.Linear(D, 1)
        self.rank = torch.distributed.get_rank()

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.words(ids)
        if self.rank == 0:
            hidden = hidden + self.rare(ids)
        return self.linear(hidden).square().mean()


class Bag(nn.Module):
    """An EmbeddingBag in some mode, with whatever its forward takes."""

    def __init__(
        self, mode: str, sparse: bool, weighted: bool = False, last: bool = False, **options: Any
    ) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(
            V, D, mode=mode, sparse=sparse, include_last_offset=last, **options
        )
        self.linear = nn.Linear(D, 2)
        self.weighted, self.last = weighted, last

    def forward(self, ids: Tensor) -> Tensor:
        ids = ids.flatten()
        offsets = [0, 1, 1, len(ids) // 2]  # the second bag is empty
        if self.last:
            offsets.append(len(ids))
        weights = torch.linspace(0.5, 1.5, len(ids)) if self.weighted else None
        bags = self.bag(ids, torch.tensor(offsets), per_sample_weights=weights)
        return self.linear(bags).square().mean()


class ByKeyword(Words):
    """Gives ids by keyword, as users may."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.linear(self.words(input=ids)).square().mean() + 0 * self.kinds(ids % 4).sum()


class Hidden(nn.Module):
    """A table that no module names: 2048 x 64, of which few rows are used."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2048, 64))
        self.full = nn.Parameter(torch.randn(2048, 64))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[ids].square().mean() + (self.full * self.full).sum() * 1e-3


def batches(rank: int, steps: int, high: int = V, low: int = 0) -> Iterator[Tensor]:
    """Ids unlike those of other ranks, from a fixed seed."""
    generator = torch.Generator().manual_seed(17 + rank)
    for _ in range(steps):
        yield torch.randint(low, high, (2, 5), generator=generator)


Step = Callable[[nn.Module, Tensor, int], None]


def plain_step(model: nn.Module, ids: Tensor, step: int) -> None:
    model(ids).backward()


def train(
    ddp: nn.Module,
    rank: int,
    steps: int = 4,
    step_fn: Step = plain_step,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    lr: float = 0.1,
    set_to_none: bool = True,
    context: Any = None,
) -> None:
    optim = optimizer(ddp.parameters(), lr=lr)
    with context if context is not None else nullcontext():
        for step, ids in enumerate(batches(rank, steps)):
            optim.zero_grad(set_to_none=set_to_none)
            step_fn(ddp, ids, step)
            optim.step()


def side_by_side(
    rank: int,
    n: int,
    build: Callable[[], nn.Module],
    reducer: Any = None,
    *,
    ddp_options: dict[str, Any] | None = None,
    register: dict[str, Any] | None = None,
    exact: bool | None = None,
    tolerance: float = 1e-6,
    replicas: bool = True,
    **training: Any,
) -> commlib.ddp.State:
    """Train the same model with and without the hook; parameters agree, and all ranks' are equal.

    Equal to the bit for two ranks (a sum of two does not depend on the order), else to rounding.
    The twin's tables are not sparse, which may add repeated ids in another order.
    """
    torch.manual_seed(5)
    model = build()
    twin = copy.deepcopy(model)
    for table in twin.modules():
        # DDP without a hook gives wrong gradients for a model of two sparse tables (torch 2.13).
        if isinstance(table, (nn.Embedding, nn.EmbeddingBag)):
            table.sparse = False
    reference = DDP(twin, **(ddp_options or {}))
    ddp = DDP(model, **(ddp_options or {}))
    state = commlib.ddp.register(ddp, reducer, **{"timeout_s": 40.0, **(register or {})})
    train(reference, rank, **training)
    train(ddp, rank, **training)
    exact = n <= 2 if exact is None else exact
    theirs = dict(reference.module.named_parameters())
    for name, parameter in ddp.module.named_parameters():
        if replicas:
            assert same_everywhere(parameter), f"{name} differs between ranks"
        if exact:
            assert torch.equal(parameter, theirs[name]), name
        else:
            assert torch.allclose(parameter, theirs[name], rtol=1e-5, atol=tolerance), (
                name,
                float((parameter - theirs[name]).detach().abs().max()),
            )
    return state


def counts(state: commlib.ddp.State, parameter: str) -> list[str]:
    """The reducers that ran for a parameter, step by step."""
    return [record["reducer"] for record in state.stats() if record["parameter"] == parameter]

"""How a partitioned table gets its columns: checked, drawn anew, or dealt out by rank 0."""

from __future__ import annotations

import torch
from torch import Tensor

from commlib.embrace.columns import deal_columns
from commlib.embrace.exchange import Exchange
from commlib.rows import FLOAT_DTYPES


def check_table(weight: Tensor, max_norm: float | None, what: str) -> None:
    """Refuse tables that cannot be partitioned.

    Raises:
        ValueError: `max_norm`, or a weight that is not on the CPU.
        TypeError: A dtype that has no kernels.
    """
    if max_norm is not None:
        raise ValueError(
            f"{what} has max_norm = {max_norm}: renormalising a row needs all its columns, which"
            " no rank holds; leave the table out (filter=...) or clip gradients instead"
        )
    if weight.device.type != "cpu":
        raise ValueError(f"{what} is on {weight.device}: the kernels built here are for the CPU")
    if weight.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{what} is {weight.dtype}; it must be one of {FLOAT_DTYPES}")


def random_columns(
    num_embeddings: int, embedding_dim: int, exchange: Exchange, dtype: torch.dtype | None
) -> Tensor:
    """This rank's columns of a new table, from N(0, 1) as `nn.Embedding` has it; collective.

    Every rank draws its own columns, from rank 0's seed and its number, so that nobody needs the
    memory of the whole table.
    """
    generator = torch.Generator().manual_seed(exchange.seed() + exchange.rank)
    shape = exchange.columns(num_embeddings, embedding_dim).local_shape
    return torch.empty(shape, dtype=dtype).normal_(generator=generator)


def prepare(
    num_embeddings: int,
    embedding_dim: int,
    max_norm: float | None,
    dtype: torch.dtype | None,
    exchange: Exchange | None,
    name: str,
    local: Tensor | None,
) -> tuple[Exchange, Tensor]:
    """The exchange, and the own columns: those given, or new ones."""
    if num_embeddings < 1 or embedding_dim < 1:
        raise ValueError(
            f"table '{name}' of {num_embeddings} rows and {embedding_dim} columns: both must be"
            " at least 1"
        )
    if local is None:
        check_table(torch.empty(0, dtype=dtype), max_norm, f"table '{name}'")
        exchange = exchange or Exchange()
        local = random_columns(num_embeddings, embedding_dim, exchange, dtype)
    return exchange or Exchange(), local


def deal(exchange: Exchange, name: str, weight: Tensor) -> Tensor:
    whole = weight.detach()
    request = exchange.request_name(f"{name}.deal")
    widths = exchange.columns(*whole.shape).widths
    return exchange.run(
        request,
        lambda: deal_columns(request, whole, widths, exchange.rank, exchange.num_ranks),
    )

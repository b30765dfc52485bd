"""The inputs of the collective benches: sparse embedding gradients with a known skew."""

from __future__ import annotations

import torch
from torch import Tensor


def zipf_tokens(num_rows: int, num_tokens: int, exponent: float, seed: int) -> Tensor:
    """Token ids `[num_tokens]` in `[0, num_rows)`, id i with probability ~ 1/(i+1)^exponent."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(num_tokens, generator=generator, dtype=torch.float64)
    return torch.searchsorted(zipf_edges(num_rows, exponent), draws).clamp_(max=num_rows - 1)


def zipf_edges(num_rows: int, exponent: float) -> Tensor:
    """The share of ids up to and with id i, `[num_rows]`: where a uniform draw falls is the id."""
    weights = torch.arange(1, num_rows + 1, dtype=torch.float64) ** -exponent
    return weights.cumsum(0) / weights.sum()


def distinct_rows(num_rows: int, count: int, exponent: float, seed: int) -> Tensor:
    """`count` different ids, drawn one after another with Zipf weights; unsorted."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(num_rows, generator=generator, dtype=torch.float64).clamp_(min=1e-300)
    keys = -torch.log(-torch.log(noise))
    keys -= exponent * torch.log(torch.arange(1, num_rows + 1, dtype=torch.float64))
    return torch.topk(keys, count).indices


def sparse_gradient(ids: Tensor, num_rows: int, dim: int, seed: int) -> Tensor:
    """What an embedding's backward gives: one row a token, repeated ids not summed."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(len(ids), dim, generator=generator)
    return torch.sparse_coo_tensor(ids.unsqueeze(0), values, (num_rows, dim))

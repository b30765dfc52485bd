"""Which parameters are tables: found by module, by name, later by measured density."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from commlib.rows import FLOAT_DTYPES


@dataclass(frozen=True, slots=True)
class Table:
    """A parameter whose gradient is reduced by rows.

    Args:
        name: As in `named_parameters()` of the wrapped module.
        shape: `[V, D]`, trailing dimensions of the parameter flattened.
        modules: The embeddings that look it up, whose forward tells its ids; empty where ids are
            known from the gradient alone.
    """

    name: str
    shape: tuple[int, int]
    modules: tuple[nn.Embedding | nn.EmbeddingBag, ...] = ()


def matrix_shape(parameter: Tensor) -> tuple[int, int]:
    """`[V, D]` of a parameter: its first dimension, and all others flattened."""
    return int(parameter.shape[0]), int(parameter.shape[1:].numel())


def find_tables(module: nn.Module, named: Iterable[str] = ()) -> dict[str, Table]:
    """Weights that only `nn.Embedding` and `nn.EmbeddingBag` own, and those in `named`.

    A weight that another module shares (a tied output layer) has a dense gradient and is left out,
    unless named or sparse=True; who else looks it up is not known then, so it is not announced.
    Frozen weights are left out.

    Args:
        module: The unwrapped model.
        named: Names of further parameters with at least two dimensions.

    Raises:
        ValueError: A name that is no parameter, or one without rows.
        TypeError: A named parameter of a dtype that has no kernels.

    Source: ours.
    """
    parameters = dict(module.named_parameters())
    owners: dict[int, list[nn.Module]] = {}
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(owner)
    tables = {}
    for name, parameter in parameters.items():
        embeddings = [
            owner
            for owner in owners.get(id(parameter), ())
            if isinstance(owner, (nn.Embedding, nn.EmbeddingBag))
        ]
        only_embeddings = len(embeddings) == len(owners.get(id(parameter), ())) > 0
        if not (parameter.requires_grad and parameter.dtype in FLOAT_DTYPES):
            continue
        if only_embeddings:
            tables[name] = Table(name, matrix_shape(parameter), tuple(embeddings))
        elif any(embedding.sparse for embedding in embeddings):
            tables[name] = Table(name, matrix_shape(parameter))
    for name in named:
        if name not in parameters:
            close = [known for known in parameters if known.endswith(name.split(".")[-1])]
            raise ValueError(
                f"tables names {name!r}, which is no parameter of the model;"
                f" did you mean one of {close or sorted(parameters)[:10]}?"
            )
        parameter = parameters[name]
        if parameter.dim() < 2:
            raise ValueError(
                f"tables names {name!r} of shape {tuple(parameter.shape)}: a table needs rows,"
                " so at least two dimensions"
            )
        if parameter.dtype not in FLOAT_DTYPES:
            raise TypeError(
                f"tables names {name!r} of {parameter.dtype}: use one of {FLOAT_DTYPES}"
            )
        tables.setdefault(name, Table(name, matrix_shape(parameter)))
    return tables


def may_become_table(parameter: torch.nn.Parameter) -> bool:
    """Whether a dense parameter is worth measuring: large, and with many rows."""
    return (
        parameter.dim() >= 2
        and parameter.shape[0] >= 1024
        and parameter.numel() >= 1 << 17
        and parameter.dtype in FLOAT_DTYPES
        and parameter.is_contiguous()
    )

"""Several tables looked up together: one round of ids and one all-to-all for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from commlib.embrace.bag import ShardedEmbeddingBag
from commlib.embrace.embedding import ShardedEmbedding

Table = ShardedEmbedding | ShardedEmbeddingBag
Arguments = Tensor | tuple[Any, ...] | Mapping[str, Any]


def lookup(asked: Mapping[Table, Arguments]) -> dict[Table, Tensor]:
    """Look up several tables at once, instead of calling one module after the other.

    The outputs are those of the modules. Ids of all tables travel in one round, rows in one
    all-to-all, gradients in one all-to-all, which with many small tables is most of the time.
    Collective: all ranks ask for the same tables.

    Args:
        asked: For each module what its forward takes: ids, or `(ids, offsets, ...)`, or keywords.

    Returns:
        The outputs, by module.

    Raises:
        ValueError: No tables, or tables that do not share an exchange (of two `shard` calls).
        TypeError: Not a partitioned table.
        IndexError: An id that its table does not have; on the other ranks a CommError.

    Source: ours.
    """
    if not asked:
        raise ValueError("no tables to look up")
    for table in asked:
        if not isinstance(table, ShardedEmbedding | ShardedEmbeddingBag):
            raise TypeError(f"{type(table).__name__} is no partitioned table: shard(model) first")
    # By name, so that the order of a rank's mapping does not matter.
    tables = sorted(asked, key=lambda table: table.name)
    exchange = tables[0].exchange
    for table in tables:
        if table.exchange is not exchange:
            raise ValueError(
                f"tables '{tables[0].name}' and '{table.name}' do not share an exchange: shard them"
                " in one call"
            )
    calls = [_keywords(table, asked[table]) for table in tables]
    found = exchange.source.rows_together(tables, [call["input"] for call in calls])
    outputs = {
        table: table.of_rows(rows, **call)
        for table, rows, call in zip(tables, found, calls, strict=True)
    }
    return {table: outputs[table] for table in asked}


def _keywords(table: Table, arguments: Arguments) -> dict[str, Any]:
    if isinstance(arguments, Mapping):
        return dict(arguments)
    given = arguments if isinstance(arguments, tuple) else (arguments,)
    return dict(zip(("input", "offsets", "per_sample_weights"), given, strict=False))

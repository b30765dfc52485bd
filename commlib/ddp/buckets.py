"""Takes a DDP bucket apart: tables that go by rows, and stretches of everything else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from commlib.frontend.tables import Table


@dataclass(frozen=True, slots=True)
class TablePart:
    """A table's gradient within a bucket, `[V, D]`, the bucket's own memory."""

    table: Table
    matrix: Tensor


@dataclass(frozen=True, slots=True)
class DensePart:
    """A stretch of the bucket that holds the gradients of `names`, flat."""

    names: tuple[str, ...]
    flat: Tensor
    gradients: tuple[Tensor, ...]


def split_bucket(
    bucket: GradBucket, names: Mapping[int, str], tables: Mapping[str, Table]
) -> list[TablePart | DensePart]:
    """The bucket's parts in memory order.

    Args:
        bucket: A dense bucket.
        names: Parameter name by `id` of the parameter.
        tables: Tables by name; one whose gradient is not contiguous is treated as dense.
    """
    buffer = bucket.buffer()
    parts: list[TablePart | DensePart] = []
    run: list[tuple[str, Tensor]] = []
    end = 0

    def close_run() -> None:
        if run:
            start = _offset(run[0][1], buffer)
            flat = buffer[start:end]
            parts.append(
                DensePart(tuple(name for name, _ in run), flat, tuple(grad for _, grad in run))
            )
            run.clear()

    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        name = names[id(parameter)]
        table = tables.get(name)
        if table is not None and gradient.is_contiguous():
            close_run()
            parts.append(TablePart(table, gradient.view(table.shape)))
        else:
            if run and _offset(gradient, buffer) != end:
                close_run()
            run.append((name, gradient))
        end = _offset(gradient, buffer) + gradient.numel()
    close_run()
    return parts


def _offset(gradient: Tensor, buffer: Tensor) -> int:
    return int(gradient.storage_offset()) - int(buffer.storage_offset())

"""Ordinary tables become partitioned ones, in place, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from commlib.embrace.bag import ShardedEmbeddingBag
from commlib.embrace.build import check_table
from commlib.embrace.columns import gather_columns
from commlib.embrace.embedding import ShardedEmbedding
from commlib.embrace.exchange import Exchange, Op, WireName, check_options
from commlib.embrace.ranks import TransportName, find_ranks
from commlib.embrace.replicas import ignore_shards
from commlib.frontend.agree import check_agreement

Filter = Callable[[str, nn.Module], bool]
Embedding = nn.Embedding | nn.EmbeddingBag
Sharded = ShardedEmbedding | ShardedEmbeddingBag

_KINDS = (nn.Embedding, nn.EmbeddingBag)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_FACTS = ("padding_idx", "scale_grad_by_freq", "sparse", "mode", "include_last_offset")


def shard(
    model: nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
    transport: TransportName = "c10d",
    op: Op = "mean",
    wire: WireName | None = None,
    min_bytes: int = 0,
    filter: Filter | None = None,
    sparse: bool | None = None,
    timeout_s: float = 300.0,
) -> nn.Module:
    """Partition a model's embedding tables by columns over the ranks; collective.

    Every `nn.Embedding` and `nn.EmbeddingBag` becomes a `ShardedEmbedding` or
    `ShardedEmbeddingBag`, in place, with rank 0's weights. Their subclasses stay as they are: their
    forward may use the whole weight. DDP is told to leave the shards alone, so wrap the model
    afterwards; build optimizers afterwards too.

    Args:
        model: On every rank the same, before DDP.
        group: The ranks; the default group where None. The one that DDP will use.
        transport: "c10d", or "horovod": Horovod's ranks and collectives. torch.distributed is
            then initialised on the same ranks, if it is not, for what `state_dict` holds.
        op: What becomes of the ranks' gradients: their mean, as in DDP, or their sum.
        wire: "bf16" or "fp16": rows and gradients travel so, sums stay fp32. Half the bytes.
        min_bytes: Leave smaller tables to DDP. Each partitioned table costs a lookup two
            exchanges; see `lookup` for asking several together.
        filter: `filter(name, module)` says whether a table is partitioned.
        sparse: Overrides the modules' own flags.
        timeout_s: Longest wait for one request before a CommError.

    Returns:
        The model; the new module where the model is itself a table.

    Raises:
        ValueError: No process group, a wrong option, a table that cannot be partitioned (its name
            and the remedy), nothing to partition, or models that differ between ranks.
        TypeError: A dtype without kernels.

    Source: EmbRace, hybrid communication.
    """
    _, peers = find_ranks(group, transport)
    options = {"op": op, "wire": wire, "timeout_s": timeout_s, "sparse": sparse}
    try:
        check_options(op, wire, timeout_s)
        chosen = _choose(model, min_bytes, filter)
    except Exception as mistake:  # whatever it is, the other ranks must not wait for this one
        check_agreement({}, peers, mistake)
        raise
    check_agreement(_facts(options, chosen), peers)
    exchange = Exchange(group, transport=transport, op=op, wire=wire, timeout_s=timeout_s)
    new: dict[nn.Module, nn.Module] = {}
    for name, table in chosen.items():
        if isinstance(table, nn.Embedding):
            new[table] = ShardedEmbedding.from_embedding(
                table, exchange=exchange, name=name, sparse=sparse
            )
        else:
            new[table] = ShardedEmbeddingBag.from_embedding(
                table, exchange=exchange, name=name, sparse=sparse
            )
    return _replace(model, new)


def unshard(model: nn.Module) -> nn.Module:
    """Make partitioned tables ordinary ones again, whole on every rank, in place; collective.

    The exchange is closed where no other module uses it. Optimizers have to be built anew.

    Returns:
        The model; the new module where the model is itself a table.

    Raises:
        ValueError: No partitioned table in the model.
    """
    tables = _tables(model)
    new: dict[nn.Module, nn.Module] = {table: table.whole(_gather(table)) for table in tables}
    model = _replace(model, new)
    for exchange in {table.exchange for table in tables}:
        if all(table in new for table in exchange.tables):
            exchange.close()
    return model


def close(model: nn.Module) -> None:
    """End the threads and give back the groups of a model's partitioned tables.

    Lookups are errors from then on; weights and `state_dict` stay.

    Raises:
        ValueError: No partitioned table in the model.
    """
    for exchange in {table.exchange for table in _tables(model)}:
        exchange.close()


def _tables(model: nn.Module) -> list[Sharded]:
    tables = [module for module in model.modules() if isinstance(module, Sharded)]
    if not tables:
        raise ValueError(f"{type(model).__name__} has no partitioned table: shard(model) first")
    return tables


def _gather(table: Sharded) -> Tensor:
    exchange, local = table.exchange, table.local_weight.detach()
    name = exchange.request_name(f"{table.name}.gather")
    return exchange.run(
        name,
        lambda: gather_columns(
            name, local, table.columns.widths, exchange.rank, exchange.num_ranks
        ),
    )


def _choose(model: nn.Module, min_bytes: int, filter: Filter | None) -> dict[str, Embedding]:
    """The tables to partition, by name."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model = {type(model).__name__} must be a torch.nn.Module")
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError("the model is wrapped in DDP already: shard it first, then wrap it")
    owners: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for own, parameter in module.named_parameters(path, recurse=False):
            owners.setdefault(id(parameter), []).append(own)
    chosen: dict[str, Embedding] = {}
    for path, module in model.named_modules():
        if type(module) not in _KINDS:
            continue
        assert isinstance(module, _KINDS)
        name, weight = path or "embedding", module.weight
        if weight.numel() * weight.element_size() < min_bytes:
            continue
        if filter is not None and not filter(path, module):
            continue
        check_table(weight, module.max_norm, f"table '{name}'")
        _check_alone(name, module, owners[id(weight)])
        chosen[name] = module
    if not chosen:
        raise ValueError(
            f"{type(model).__name__} has no nn.Embedding or nn.EmbeddingBag to partition"
            f" (min_bytes = {min_bytes}, filter = {filter})"
        )
    return chosen


def _check_alone(name: str, module: nn.Module, owners: list[str]) -> None:
    if len(owners) > 1:
        raise ValueError(
            f"the weight of table '{name}' is tied, it is {' and '.join(owners)}: whoever else"
            " uses it would have this rank's columns only; leave it out, shard(model,"
            f" filter=lambda name, module: name != {name!r}), or untie it"
        )
    for hooks in _HOOKS:
        if getattr(module, hooks, None):
            raise ValueError(
                f"table '{name}' has hooks ({hooks}), which the new module would not have:"
                " register them after shard(model)"
            )


def _facts(options: Mapping[str, Any], chosen: Mapping[str, Embedding]) -> dict[str, Any]:
    """What has to be equal between ranks."""
    facts = dict(options)
    for name, table in chosen.items():
        weight = table.weight
        facts[f"table '{name}'"] = (
            type(table).__name__,
            tuple(weight.shape),
            str(weight.dtype),
            f"requires_grad={weight.requires_grad}",
            *(f"{fact}={getattr(table, fact)}" for fact in _FACTS if hasattr(table, fact)),
        )
    return facts


def _replace(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> nn.Module:
    if model in new:
        model = new[model]
    else:
        for parent in list(model.modules()):
            for name, child in list(parent._modules.items()):  # named_children leaves out repeats
                if child is not None and child in new:
                    setattr(parent, name, new[child])
    for module in model.modules():
        ignore_shards(module)
    return model

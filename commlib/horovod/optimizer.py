"""`hvd.DistributedOptimizer`, with tables reduced by rows."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from commlib.embrace.columns import columns_of
from commlib.frontend.agree import check_agreement
from commlib.horovod import elastic
from commlib.horovod.adapter import Adapter, is_elastic, parameter_names
from commlib.horovod.options import Options
from commlib.horovod.state import State
from commlib.reducers import Reducer, as_reducer
from commlib.schedule.horovod import HorovodPeers
from commlib.topology import Link

_global = hvd.global_process_set


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = hvd.Compression.none,
    backward_passes_per_step: int = 1,
    op: int = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: hvd.ProcessSet = _global,
    *,
    reducer: Reducer | str | None = None,
    link: Link | None = None,
    timeout_s: float = 300.0,
    trace: str | Path | None = None,
) -> Any:
    """Wrap an optimizer so that gradients are reduced over ranks before each step; collective.

    It is Horovod's own optimizer: arguments, methods and errors are those of
    `hvd.DistributedOptimizer`, and dense gradients take Horovod's fused allreduce. Gradients of
    embedding tables, sparse or dense, go by rows instead.

    Args:
        optimizer: The optimizer to wrap.
        named_parameters: As Horovod's; the same on every rank.
        compression: As Horovod's, for dense gradients.
        backward_passes_per_step: As Horovod's.
        op: `hvd.Average` or `hvd.Sum`.
        gradient_predivide_factor: As Horovod's, for dense gradients; tables do not overflow.
        num_groups: As Horovod's.
        groups: As Horovod's, for dense gradients.
        sparse_as_dense: As Horovod's: sparse gradients are made dense, and are no tables.
        process_set: As Horovod's.
        reducer: `commlib.S2(...)`: lossy, with error feedback. None: exact, the cheapest algorithm
            chosen per table and step. Or a config or name from `commlib.reducers`.
        link: `commlib.topology.Link`; None measures it at once (about 0.1 s), where needed.
        timeout_s: Longest wait for one request of a table before a CommError.
        trace: Path of a Chrome trace.

    Returns:
        The optimizer; `optimizer.commlib` is the `State` of its tables: `stats()`,
        `state_dict()`, `close()`.

    Raises:
        ValueError: As Horovod's; an op without a meaning for rows; SparseAdam with
            `sparse_as_dense`; parameters or arguments that differ between ranks.
        TypeError: A reducer or link of no known kind.

    Source: ours, around Horovod's.
    """
    if named_parameters is not None:
        named_parameters = list(named_parameters)
    mistake: Exception | None = None
    wrapped: Any = None
    state: State | None = None
    try:
        _check(optimizer, op, sparse_as_dense)
        options = Options(
            reducer=as_reducer(reducer),
            average=op == hvd.Average,
            sparse_as_dense=sparse_as_dense,
            link=link,
            timeout_s=timeout_s,
            process_set=process_set,
        )
        wrapped = hvd.DistributedOptimizer(
            optimizer,
            named_parameters,
            compression,
            backward_passes_per_step,
            op,
            gradient_predivide_factor,
            num_groups,
            groups,
            sparse_as_dense,
            process_set,
        )
        wrapped.state.update(optimizer.state)  # Horovod's is made from the groups alone
        state = State(_by_name(wrapped, named_parameters), options, trace)
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        mistake = error
    several = hvd.is_initialized() and hvd.size() > 1
    if several and not is_elastic() and process_set.included():
        _agree(state, process_set, wrapped, mistake)
    if mistake is not None:
        raise mistake
    assert state is not None
    wrapped.commlib = state
    if several or is_elastic():
        adapter = Adapter(wrapped, state)
        if is_elastic():  # workers that were here before do not come along
            elastic.register()
            state.watch()
        elif process_set.included():
            adapter.open()
    return wrapped


def _check(optimizer: torch.optim.Optimizer, op: int, sparse_as_dense: bool) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer = {type(optimizer).__name__} must be a torch.optim.Optimizer")
    if op not in (hvd.Average, hvd.Sum):
        raise ValueError(
            f"op = {op} must be hvd.Average or hvd.Sum: rows of a table are averaged or summed;"
            " for others use hvd.DistributedOptimizer"
        )
    if sparse_as_dense and isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            "SparseAdam takes sparse gradients only: leave sparse_as_dense=True out, rows travel"
            " sparse here, or use torch.optim.Adam"
        )


def _by_name(
    wrapped: Any, named_parameters: Iterable[tuple[str, Any]] | None
) -> dict[str, torch.nn.Parameter]:
    """What ranks hold copies of and train, in order of definition where it is known."""
    names = parameter_names(wrapped)
    own = {id(p) for group in wrapped.param_groups for p in group["params"]}
    order = named_parameters or [(name, p) for p, name in names.items()]
    return {
        name: p for name, p in order if p.requires_grad and id(p) in own and columns_of(p) is None
    }


def _agree(
    state: State | None, process_set: hvd.ProcessSet, wrapped: Any, mistake: Exception | None
) -> None:
    facts: dict[str, Any] = {}
    if state is not None:
        options = state.options
        facts = {
            "reducer": options.reducer,
            "op": "Average" if options.average else "Sum",
            "sparse_as_dense": options.sparse_as_dense,
            "link": options.link,
            "timeout_s": options.timeout_s,
            "backward_passes_per_step": wrapped.backward_passes_per_step,
        }
        for name, parameter in state.parameters.items():
            facts[f"parameter {name!r}"] = (tuple(parameter.shape), str(parameter.dtype))
    check_agreement(facts, HorovodPeers(process_set), mistake)

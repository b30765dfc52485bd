"""The state of the DDP hook: what is a table, how it is reduced, and what that took."""

from __future__ import annotations

import atexit
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from commlib.ddp import checkpoint
from commlib.ddp.density import DensityWatch
from commlib.ddp.jobs import Jobs
from commlib.frontend.agree import check_agreement
from commlib.frontend.announce import Announcer
from commlib.frontend.lanes import Lanes
from commlib.frontend.table_jobs import TableJobs
from commlib.frontend.tables import find_tables, matrix_shape, may_become_table
from commlib.reducers import Reducer, ReducerState, as_reducer
from commlib.schedule.peers import GroupPeers
from commlib.stats import Recorder
from commlib.topology import Link, probe_link

DenseWire = Literal["fp16", "bf16"]
MAX_TIMEOUT_S = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Everything `register` takes besides the DDP instance; validated once, equal on all ranks.

    Args:
        reducer: For tables: a config, a name, or None for exact and automatic.
        tables: Further parameters to reduce by rows.
        dense: Wire dtype of all other parameters; None sends them as they are.
        find_sparse: Measure large parameters in the first steps, and treat as tables those
            whose rows are mostly zero.
        link: Cost of the network; None measures it.
        timeout_s: Longest wait for one request.
    """

    reducer: Reducer
    tables: tuple[str, ...] = ()
    dense: DenseWire | None = None
    find_sparse: bool = True
    link: Link | None = None
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if self.dense not in (None, "fp16", "bf16"):
            raise ValueError(f"dense = {self.dense!r} must be 'fp16', 'bf16' or None")
        if self.link is not None and not isinstance(self.link, Link):
            raise TypeError(f"link = {self.link!r} must be a commlib.topology.Link or None")
        if not isinstance(self.find_sparse, bool):
            raise TypeError(f"find_sparse = {self.find_sparse!r} must be True or False")
        number = isinstance(self.timeout_s, (int, float)) and not isinstance(self.timeout_s, bool)
        if not (number and 0 < self.timeout_s <= MAX_TIMEOUT_S):
            raise ValueError(
                f"timeout_s = {self.timeout_s!r} must be a number of seconds > 0,"
                f" at most {MAX_TIMEOUT_S:g}"
            )


class State:
    """State of `commlib.ddp.hook` for one DDP instance; construction is collective over its ranks.

    Args:
        ddp: The DDP instance; its own process group decides who reduces, and the mean is over
            that group.
        reducer: `commlib.S2(...)`, another config of `commlib.reducers`, a name such as "minimal",
            or None: exact, chosen per table and step.
        tables: Names of parameters (as in `ddp.module.named_parameters()`) to reduce by rows, in
            addition to the weights of `nn.Embedding` and `nn.EmbeddingBag`, which are found.
        dense: Send all other gradients as "fp16" or "bf16" (sums are fp32).
        find_sparse: See whether other large parameters have mostly zero rows, and reduce those
            by rows from the fourth step on.
        link: `commlib.topology.Link`; None measures it at once (about 0.1 s), where needed, and
            takes the default under `torch.use_deterministic_algorithms`.
        timeout_s: Longest wait for one request before a CommError. Ranks have to run the same
            training forward passes and backward passes; a rank that skips or adds one (under
            `no_grad` or in evaluation mode it may) ends all of them after this time.
        trace: Path of a Chrome trace, written by `write_trace`, `close` or at exit.

    Raises:
        ValueError: A wrong value, no process group, or arguments that differ between ranks.
        TypeError: Not a DDP instance, or a reducer of no known kind.

    Source: ours.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        reducer: Reducer | str | None = None,
        *,
        tables: Iterable[str] = (),
        dense: DenseWire | None = None,
        find_sparse: bool = True,
        link: Link | None = None,
        timeout_s: float = 300.0,
        trace: str | Path | None = None,
    ) -> None:
        peers = GroupPeers(_group_of(ddp))
        if getattr(ddp, "_comm_hooks", None):
            raise ValueError(
                "this DDP instance has a communication hook already, and DDP takes one only:"
                " wrap the model anew to register another"
            )
        self.rank, self.num_ranks = peers.rank, peers.num_ranks
        left_alone = ddp.parameters_to_ignore  # partitioned tables, and what the user names
        named = {n: p for n, p in ddp.module.named_parameters() if n not in left_alone}
        try:
            _check_devices(named)
            self.options = Options(
                reducer=as_reducer(reducer),
                tables=_names(tables),
                dense=dense,
                find_sparse=find_sparse,
                link=link,
                timeout_s=timeout_s,
            )
            self.tables = find_tables(ddp.module, self.options.tables)
            self.recorder = Recorder(self.rank, trace)
        except Exception as mistake:  # whatever it is, the other ranks must not wait for this one
            check_agreement({}, peers, mistake)
            raise
        check_agreement(_facts(self.options, named, self.tables), peers)
        self.reducer_states = {name: ReducerState() for name in self.tables}
        self.lanes = Lanes.open(peers, timeout_s)
        self.link = link or self._probe()
        self.announcer = Announcer(
            lambda: ddp.training, self.lanes.index, self.tables, self._wants_announcement
        )
        self._after_forward = ddp.register_forward_hook(self._announce)
        watched = {
            name: matrix_shape(parameter)
            for name, parameter in named.items()
            if find_sparse and name not in self.tables and may_become_table(parameter)
        }
        self.density = DensityWatch(watched)
        self.names = {id(parameter): name for name, parameter in named.items()}
        self.table_jobs = TableJobs(
            self.lanes.data,
            self.announcer,
            self.options.reducer,
            self.reducer_states,
            self.link,
            self.recorder,
            self.names.values(),
        )
        self.jobs = Jobs(self)
        self._closed = False
        atexit.register(self.write_trace)

    def _probe(self) -> Link:
        # A measured link may lead to other choices, so to other roundings, in the next run.
        if self.options.reducer.name != "auto" or torch.are_deterministic_algorithms_enabled():
            return Link()
        return probe_link(self.lanes.data)

    def _announce(self, ddp: torch.nn.Module, inputs: object, output: object) -> None:
        # Not in evaluation mode: one rank may evaluate alone, with gradients left on.
        assert isinstance(ddp, DistributedDataParallel)
        if ddp.training and torch.is_grad_enabled() and ddp.require_backward_grad_sync:
            self.announcer.announce()

    def _wants_announcement(self, name: str) -> bool:
        uses_index = self.options.reducer.uses_index
        return uses_index and self.reducer_states[name].announce

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the reduction of one bucket; the future holds its averaged gradients."""
        if self._closed:
            raise ValueError("this commlib state is closed: register a new one on a new DDP")
        return self.jobs.submit(bucket)

    def stats(self) -> list[dict[str, Any]]:
        """One record a parameter and step, oldest first; the fields of `commlib.stats.Record`."""
        return [record.as_dict() for record in self.recorder.records()]

    def clear_stats(self) -> None:
        """Forget all records."""
        self.recorder.clear()

    def write_trace(self) -> None:
        """Write the Chrome trace of the records at hand to the path given at construction."""
        self.recorder.write()

    def close(self) -> None:
        """Write the trace, stop watching the model, end the threads, give the groups back."""
        if not self._closed:
            self._closed = True
            self.write_trace()
            atexit.unregister(self.write_trace)
            self._after_forward.remove()
            self.announcer.close()
            self.lanes.close()

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, of this rank: residuals are its own, so save on each rank.

        Only tensors, numbers and text, so `torch.load(weights_only=True)` reads it.
        """
        return checkpoint.save(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, on the same rank of as many ranks.

        Raises:
            ValueError: Another world size, rank, reducer or set of tables; nothing is changed.
        """
        checkpoint.load(self, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self.options, "state_dict": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Groups and threads stay behind: a copy carries the numbers, and goes on through
        # `State(ddp, ...).load_state_dict(copy.state_dict())`.
        self.options = state["options"]
        self._saved = state["state_dict"]
        self._closed = True
        self.state_dict = lambda: self._saved  # type: ignore[method-assign]


def _group_of(ddp: DistributedDataParallel) -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "no process group: call torch.distributed.init_process_group before registering"
        )
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"ddp = {type(ddp).__name__} must be a DistributedDataParallel: wrap the model first"
        )
    group: dist.ProcessGroup = ddp.process_group
    return group


def _names(tables: Iterable[str]) -> tuple[str, ...]:
    names = (tables,) if isinstance(tables, str) else tuple(tables)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                f"tables holds {type(name).__name__}: give parameters by name, as in"
                " ddp.module.named_parameters()"
            )
    return names


def _check_devices(named: Mapping[str, torch.nn.Parameter]) -> None:
    for name, parameter in named.items():
        if parameter.device.type != "cpu":
            raise ValueError(
                f"parameter {name!r} is on {parameter.device}: the kernels built here are for the"
                " CPU; move the model there, or leave this hook out"
            )


def _facts(
    options: Options, named: Mapping[str, torch.nn.Parameter], tables: Iterable[str]
) -> dict[str, Any]:
    """What has to be equal between ranks before the first gradient moves."""
    facts = {
        field: getattr(options, field)
        for field in ("reducer", "tables", "dense", "find_sparse", "link", "timeout_s")
    }
    facts["the set of tables"] = sorted(tables)
    for name, parameter in named.items():
        facts[f"parameter {name!r}"] = (
            tuple(parameter.shape),
            str(parameter.dtype),
            parameter.requires_grad,
        )
    return facts

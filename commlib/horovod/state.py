"""How an optimizer's tables are reduced: which they are, by what, and what that took."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from commlib.errors import CommError
from commlib.frontend.announce import Announcer
from commlib.frontend.lanes import Lanes
from commlib.frontend.results import sparse_result, write_back
from commlib.frontend.saved import agreed_part, from_saved
from commlib.frontend.table_jobs import TableJobs
from commlib.frontend.tables import Table, matrix_shape
from commlib.horovod import checkpoint
from commlib.horovod.discovery import Discovery
from commlib.horovod.layout import Layout
from commlib.horovod.options import Options
from commlib.reducers import ReducerState
from commlib.reducers.gradient import DenseGradient, SparseGradient
from commlib.rows import FLOAT_DTYPES
from commlib.schedule.horovod import HorovodPeers
from commlib.stats import Recorder
from commlib.topology import Link, probe_link


@dataclass(slots=True)
class _Open:
    """What lives as long as the ranks stay the same."""

    peers: HorovodPeers
    lanes: Lanes
    link: Link
    announcer: Announcer | None = None
    jobs: TableJobs | None = None


class State:
    """The tables of one optimizer; `optimizer.commlib`.

    Args:
        parameters: All that the optimizer updates, by name, in order of definition.
        options: The arguments.
        trace: Path of a Chrome trace, written by `write_trace`, `close` or at exit.

    Which parameters are tables is agreed in the first step: those whose gradient is sparse on some
    rank, and those that only `nn.Embedding` and `nn.EmbeddingBag` look up.

    Source: ours.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        options: Options,
        trace: str | Path | None,
    ) -> None:
        self.options = options
        self.parameters = dict(parameters)
        self.layouts: dict[str, Layout] = {}
        self.settled = False
        self.reducer_states: dict[str, ReducerState] = {}
        process_set = options.process_set
        self.recorder = Recorder(process_set.rank() if process_set.included() else 0, trace)
        self._names = {id(p): name for name, p in self.parameters.items()}
        self._discovery: Discovery | None = None
        self._open: _Open | None = None
        self.closed = False
        atexit.register(self.write_trace)

    # Opening, and agreeing on what the tables are.

    def open(self) -> None:
        """Open lanes on the ranks of now, and take over what rank 0 knows; collective.

        Called again after Horovod was initialised anew: what was agreed with the ranks of before
        is rank 0's now, and a residual stays with the rank that has it.
        """
        self._close_lanes()
        options = self.options
        peers = HorovodPeers(options.process_set)
        link = self._open.link if self._open is not None else options.link
        agreed = {name: agreed_part(state) for name, state in self.reducer_states.items()}
        first = peers.gather("state", (self.settled, self.layouts, agreed, link))[0]
        self.settled, self.layouts, theirs, link = first
        kept = {name: state.residual for name, state in self.reducer_states.items()}
        self.reducer_states = {
            name: from_saved({**entry, "residual": kept.get(name)})
            for name, entry in theirs.items()
        }
        lanes = Lanes.open(peers, options.timeout_s)
        self._open = _Open(peers, lanes, link or self._probe(lanes))
        self.watch()
        if self.settled:
            self._start_jobs()

    def watch(self) -> None:
        """See from now on which modules look up which parameters, until `settle`."""
        if self._discovery is None:
            self._discovery = Discovery(self._names)

    def settle(self, sparse: set[str]) -> bool:
        """The end of the first step: agree on what the tables are, once; collective then.

        Args:
            sparse: Names of parameters that have sparse gradients on this rank.

        Returns:
            Whether lookups are watched from now on, so that those of this step are not known.
        """
        discovery, opened = self._discovery, self._open
        assert opened is not None
        if discovery is None:
            return False
        discovery.close()
        self._discovery = None
        if not self.settled:
            mine = (sparse, discovery.tables(), discovery.shared)
            everyone = opened.peers.gather("tables", mine)
            any_sparse, looked_up, shared = (
                set().union(*sets) for sets in zip(*everyone, strict=True)
            )
            for name, parameter in self.parameters.items():
                known = name in looked_up - shared
                is_table = name in any_sparse or (known and parameter.dtype in FLOAT_DTYPES)
                if is_table and not (name in any_sparse and self.options.sparse_as_dense):
                    self.layouts[name] = Layout(name in any_sparse, known)
            self.reducer_states = {
                name: self.reducer_states.get(name) or ReducerState() for name in self.layouts
            }
            self.settled = True
            self._start_jobs()
        assert opened.announcer is not None
        for name, modules in discovery.modules.items():
            for module in modules:
                opened.announcer.watch(name, module)
        return True

    def adopt(self, layouts: dict[str, Layout], reducer_states: dict[str, ReducerState]) -> None:
        """Go on where another run was; before the first step, or between two."""
        self.reducer_states.update(reducer_states)
        if layouts and not self.settled:
            self.layouts, self.settled = layouts, True
            if self._open is not None:
                self._start_jobs()

    def _start_jobs(self) -> None:
        opened = self._open
        assert opened is not None
        announced = {name for name, layout in self.layouts.items() if layout.announced}
        tables = {name: self.table(name) for name in sorted(self.layouts)}
        opened.announcer = Announcer(
            lambda: True, opened.lanes.index, tables, self._wants_announcement, announced
        )
        opened.jobs = TableJobs(
            opened.lanes.data,
            opened.announcer,
            self.options.reducer,
            self.reducer_states,
            opened.link,
            self.recorder,
            self.parameters,
            average=self.options.average,
        )

    def _probe(self, lanes: Lanes) -> Link:
        # A measured link may lead to other choices, so to other roundings, in the next run.
        if self.options.reducer.name != "auto" or torch.are_deterministic_algorithms_enabled():
            return Link()
        return probe_link(lanes.data, ring_steps=1)

    def _wants_announcement(self, name: str) -> bool:
        return self.options.reducer.uses_index and self.reducer_states[name].announce

    # Reducing.

    def table(self, name: str) -> Table:
        """A table by its parameter's name."""
        return Table(name, matrix_shape(self.parameters[name]))

    def announce(self) -> None:
        """Start index rounds with the ids that were looked up; once before a table is reduced."""
        assert self._open is not None and self._open.announcer is not None
        self._open.announcer.announce()

    def submit(self, name: str) -> Future[Tensor]:
        """Queue the reduction of a table's gradient; the future holds the gradient to step with."""
        if self.closed:
            raise ValueError("this commlib state is closed: make a new optimizer")
        assert self._open is not None and self._open.jobs is not None
        table, gradient = self.table(name), self._gradient(name)
        submit = self._open.jobs.submit
        if gradient.is_sparse:
            result: Callable[..., Tensor] = partial(sparse_result, shape=gradient.shape)
            return submit(table, SparseGradient(gradient), result)
        matrix = gradient.view(table.shape)

        def put_back(reduced: Any) -> Tensor:
            write_back(reduced, matrix)
            return gradient

        return submit(table, DenseGradient(matrix), put_back)

    def _gradient(self, name: str) -> Tensor:
        """This rank's gradient; empty, or zeros, where the backward pass gave none."""
        parameter = self.parameters[name]
        gradient = parameter.grad
        if gradient is None and self.layouts[name].sparse:
            gradient = torch.sparse_coo_tensor(
                torch.empty(1, 0, dtype=torch.int64),
                parameter.new_empty(0, *parameter.shape[1:]),
                tuple(parameter.shape),
                is_coalesced=True,
                check_invariants=False,
            )
        elif gradient is None:
            gradient = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        if not gradient.is_sparse:
            gradient = gradient.contiguous()
        parameter.grad = gradient
        return gradient

    def wait(self, future: Future[Tensor], name: str) -> Tensor:
        """The result of `submit`.

        Raises:
            CommError: A peer failed or did not come in time; `hvd.elastic.run` recovers from it.
        """
        try:
            # The lane itself gives up after `timeout_s` a request; this ends what it does not.
            return future.result(4 * self.options.timeout_s)
        except TimeoutError:
            raise CommError(
                f"no result within {4 * self.options.timeout_s:g} s", request=name
            ) from None

    def late(self, name: str) -> CommError:
        """The error of a dense gradient that is overdue; finds out which rank did not come."""
        assert self._open is not None
        return self._open.lanes.data.transport.blame.late(name, self.options.timeout_s)

    # What users call.

    def stats(self) -> list[dict[str, Any]]:
        """One record a table and step, oldest first; the fields of `commlib.stats.Record`."""
        return [record.as_dict() for record in self.recorder.records()]

    def clear_stats(self) -> None:
        """Forget all records."""
        self.recorder.clear()

    def write_trace(self) -> None:
        """Write the Chrome trace of the records at hand to the path given at construction."""
        self.recorder.write()

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

    def close(self) -> None:
        """Write the trace, stop watching modules, end the thread."""
        if not self.closed:
            self.closed = True
            self.write_trace()
            atexit.unregister(self.write_trace)
            if self._discovery is not None:
                self._discovery.close()
            self._close_lanes()

    def _close_lanes(self) -> None:
        if self._open is not None:
            if self._open.announcer is not None:
                self._open.announcer.close()
            self._open.lanes.close()

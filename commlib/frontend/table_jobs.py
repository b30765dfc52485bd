"""Reduces gradients of tables on the data lane, each once its index round has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import TypeVar

from commlib.collectives.requests import Protocol
from commlib.collectives.usage import Usage
from commlib.frontend.announce import Announced, Announcer
from commlib.frontend.tables import Table
from commlib.reducers.base import Context, Reduced, Reducer, ReducerState
from commlib.reducers.gradient import Gradient
from commlib.schedule import Lane
from commlib.stats import Record, Recorder, now_s
from commlib.topology.link import Link, Workload

T = TypeVar("T")
U = TypeVar("U")


class TableJobs:
    """Submits gradients of tables.

    Args:
        lane: The data lane.
        announcer: Knows the index rounds under way.
        reducer: How tables are reduced.
        states: What each table keeps from step to step.
        link: The agreed link.
        recorder: Told of each reduction.
        names: All parameters in order of definition: what the next forward pass needs first goes
            first.
        average: Mean over ranks; else their sum.

    Source: ours.
    """

    def __init__(
        self,
        lane: Lane,
        announcer: Announcer,
        reducer: Reducer,
        states: Mapping[str, ReducerState],
        link: Link,
        recorder: Recorder,
        names: Iterable[str],
        *,
        average: bool = True,
    ) -> None:
        self._lane = lane
        self._announcer = announcer
        self._reducer = reducer
        self._states = states
        self._link = link
        self._recorder = recorder
        self._order = {name: i for i, name in enumerate(names)}
        self._average = average

    def priority(self, name: str) -> int:
        """What the next forward pass needs first goes first: parameters in order of definition."""
        return self._order[name]

    def submit(self, table: Table, gradient: Gradient, result: Callable[[Reduced], T]) -> Future[T]:
        """Queue a table's reduction once its index round, if there is one, has ended."""
        announced = self._announcer.take(table.name, lambda: gradient.rows().indices)
        ready_s, usage = now_s(), Usage()

        def submit(known: Announced | None) -> Future[T]:
            return self._lane.submit(
                table.name,
                lambda: self._table(table, gradient, known, ready_s, usage, result),
                priority=self.priority(table.name),
                usage=usage,
            )

        return submit(None) if announced is None else _then(announced, submit)

    def _table(
        self,
        table: Table,
        gradient: Gradient,
        known: Announced | None,
        ready_s: float,
        usage: Usage,
        result: Callable[[Reduced], T],
    ) -> Protocol[T]:
        state, lane = self._states[table.name], self._lane
        start = now_s()
        context = Context(
            name=table.name,
            rank=lane.rank,
            num_ranks=lane.num_ranks,
            average=self._average,
            link=self._link,
            index=None if known is None else known.index,
        )
        reduced = yield from self._reducer.protocol(gradient, state, context)
        answer = result(reduced)
        workload = _workload(gradient, state, reduced, known, lane.num_ranks)
        record = _record(table, gradient, state, reduced, known, usage, workload, ready_s, start)
        self._recorder.add(record)
        state.step += 1
        return answer


def _workload(
    gradient: Gradient,
    state: ReducerState,
    reduced: Reduced,
    known: Announced | None,
    num_ranks: int,
) -> Workload:
    rows = known.index.mean_rows if known is not None else float(reduced.local_rows)
    union = len(reduced.rows.indices) if reduced.rows is not None else state.union
    return Workload(
        num_ranks=num_ranks,
        num_rows=gradient.num_rows,
        dim=gradient.dim,
        element_bytes=gradient.dtype.itemsize,
        rows=rows,
        union=union,
    )


def _record(
    table: Table,
    gradient: Gradient,
    state: ReducerState,
    reduced: Reduced,
    known: Announced | None,
    usage: Usage,
    facts: Workload,
    ready_s: float,
    start_s: float,
) -> Record:
    num_rows = max(1, gradient.num_rows)
    seen = facts.rows >= 0 and facts.union >= 0
    extra = known.usage if known is not None else Usage()
    return Record(
        step=state.step,
        parameter=table.name,
        reducer=reduced.reducer,
        density=reduced.local_rows / num_rows if reduced.local_rows >= 0 else -1.0,
        union_density=facts.union / num_rows if facts.union >= 0 else -1.0,
        gamma=facts.gamma if seen else -1.0,
        bytes_sent=usage.sent_bytes + extra.sent_bytes,
        bytes_received=usage.received_bytes + extra.received_bytes,
        bound_bytes=facts.bound_bytes() if seen else -1.0,
        omega=reduced.omega,
        scan_s=gradient.scan_s,
        exchange_s=usage.exchange_s,
        decode_s=max(0.0, usage.local_so_far_s() - gradient.scan_s),
        index_s=extra.exchange_s,
        wait_s=start_s - ready_s,
        start_s=start_s,
    )


def _then(first: Future[U], submit: Callable[[U], Future[T]]) -> Future[T]:
    """What `submit` gives for the result of `first`; an error of either is the result's."""
    outer: Future[T] = Future()

    def pass_on(done: Future[T]) -> None:
        error = done.exception()
        if error is None:
            outer.set_result(done.result())
        else:
            outer.set_exception(error)

    def go_on(done: Future[U]) -> None:
        error = done.exception()
        if error is None:
            submit(done.result()).add_done_callback(pass_on)
        else:
            outer.set_exception(error)

    first.add_done_callback(go_on)
    return outer

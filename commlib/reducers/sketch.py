"""sketch (S2 Reducer): fewer bytes than exact rows need, at a known error.

Rows are added up in buckets, signed, and read back out of them. Two forms:

    hashed   buckets by a fresh hash each step, as in the paper. Its size is agreed before the step
             (from the last step's union), so bitmap and sketch travel at once, in one allreduce's
             rounds. A parameter's first step runs the bitmap alone before.
    placed   where ids were announced in the forward pass, all ranks know the union: rows go to
             buckets in turn, so none collide while there are as many buckets as rows, and only
             buckets that a rank fills travel, along `minimal`'s route. No bitmap.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from commlib import ops
from commlib.collectives.requests import Protocol
from commlib.collectives.together import together
from commlib.reducers.base import Context, Reduced, Reducer, ReducerState, request_name
from commlib.reducers.buckets import Buckets
from commlib.reducers.coded_sum import CodedSum, sum_all_rows, sum_routed_rows
from commlib.reducers.feedback import Feedback
from commlib.reducers.gradient import Gradient
from commlib.reducers.guard import Guard
from commlib.reducers.index import Index
from commlib.reducers.union import all_reduce_steps, union_rows
from commlib.reducers.wire import WIRES, Wire
from commlib.route import minimal_route
from commlib.rows import SparseRows, accumulate_dtype
from commlib.topology.link import Step, Workload

Decoder = Literal["mean", "median", "peel"]
WireName = Literal["fp32", "bf16", "int8", "int6", "int4"]
MAX_RATIO = 1000.0  # a sketch so large is a mistake
_HASHES: dict[str, int] = {"mean": 1, "median": 3, "peel": 3}
_FINEST_FIRST = ("fp32", "bf16", "int8", "int6", "int4")


@dataclass(frozen=True, kw_only=True)
class S2(Reducer):
    """Count-sketch compressed allreduce with error feedback.

    Hashed: steps 2 (4 at first), bytes 2(n-1)/n (ratio U D 4 + V/8). Placed: steps 2, bytes
    about ratio D 4 (S + U (n-2)/n).

    Args:
        ratio: Bytes of the sketch over those of the union's rows in fp32. More is more exact. With
            fp32 on the wire this is r c / U, the paper's.
        decoder: `mean` is linear, which error feedback and the placed form need; `median` shrugs
            off single collisions; `peel` is exact from a ratio of 1.3 up, on fp32.
        num_hashes: r; by default 1 for `mean` (more gains nothing there), 3 for the others.
        error_feedback: Keep what a step did not deliver and add it to the next gradient of those
            rows. By default on for `mean`; other decoders cannot have it.
        wire: Format of a bucket. By default, placed: the finest in which every row has a bucket
            of its own; hashed: int8 for `mean`, so four times the buckets, and fp32 for the
            others. "fp32" with `mean` is the paper's sketch.

    Raises:
        ValueError: A ratio that is not positive and finite, an unknown decoder or wire, hashes
            outside 1 to 16, feedback with a decoder that is not linear.

    Source: S2 Reducer (ICASSP 2022); feedback, coded wires and the placed form are ours.
    """

    ratio: float = 0.25
    decoder: Decoder = "mean"
    num_hashes: int | None = None
    error_feedback: bool | None = None
    wire: WireName | None = None

    name: ClassVar[str] = "sketch"
    lossy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.ratio, (int, float)) or isinstance(self.ratio, bool):
            raise TypeError(f"ratio = {self.ratio!r} must be a number, for instance 0.25")
        if not (math.isfinite(self.ratio) and 0 < self.ratio <= MAX_RATIO):
            raise ValueError(
                f"ratio = {self.ratio} must be a finite number > 0, for instance 0.25, at most"
                f" {MAX_RATIO:g}"
            )
        if self.error_feedback not in (None, True, False):
            raise TypeError(f"error_feedback = {self.error_feedback!r} must be a bool or None")
        if not isinstance(self.decoder, str) or self.decoder not in _HASHES:
            raise ValueError(f"decoder = {self.decoder!r} must be one of {sorted(_HASHES)}")
        if self.wire is not None and str(self.wire) not in WIRES:
            raise ValueError(f"wire = {self.wire!r} must be None or one of {sorted(WIRES)}")
        if not (self.num_hashes is None or type(self.num_hashes) is int):
            raise TypeError(f"num_hashes = {self.num_hashes!r} must be a whole number or None")
        if self.num_hashes is not None and not 1 <= self.num_hashes <= ops.MAX_HASHES:
            raise ValueError(
                f"num_hashes = {self.num_hashes} must lie between 1 and {ops.MAX_HASHES}"
            )
        if self.error_feedback and self.decoder != "mean":
            raise ValueError(
                f"error_feedback needs the linear decoder 'mean', not {self.decoder!r}:"
                " leave one of them at its default"
            )

    @property
    def hashes(self) -> int:
        """Tables of the sketch, r."""
        return self.num_hashes or _HASHES[self.decoder]

    @property
    def feeds_back(self) -> bool:
        """Whether residuals are kept."""
        return self.decoder == "mean" if self.error_feedback is None else self.error_feedback

    @property
    def uses_index(self) -> bool:
        """Announced ids allow the placed form."""
        return self.decoder == "mean" and self.hashes == 1

    def layout(self, union: int, *, placed: bool) -> tuple[Wire, int]:
        """The wire, and c, the buckets of each table, for a union of that many rows."""
        wire = self._wire(placed)
        buckets = math.ceil(self.ratio * union * 32 / wire.bits / self.hashes)
        return wire, max(1, min(buckets, union) if placed else buckets)

    def _wire(self, placed: bool) -> Wire:
        if self.wire is not None:
            return WIRES[self.wire]
        if placed:
            fitting = [name for name in _FINEST_FIRST if self.ratio * 32 >= WIRES[name].bits]
            return WIRES[(*fitting, "int4")[0]]
        return WIRES["int8" if self.decoder == "mean" else "fp32"]

    def protocol(
        self, gradient: Gradient, state: ReducerState, context: Context
    ) -> Protocol[Reduced]:
        rows = gradient.rows()
        if context.index is not None and self.uses_index:
            result = yield from self._placed(rows, context.index, state, context)
            if result is not None:
                return result
            state.announce = False
        return (yield from self._hashed(rows, state, context))

    def _hashed(self, rows: SparseRows, state: ReducerState, context: Context) -> Protocol[Reduced]:
        feedback = self._feedback(rows, state)
        name = request_name(context, state, "sketch")
        union: Tensor | None = None
        if state.union < 0:
            union = yield from union_rows(rows, state, context)
            state.union = len(union)
        wire, count = self.layout(state.union, placed=False)
        buckets = Buckets.hashed(self.hashes, count, _seed(context.name, state.step), self.decoder)
        sketch = buckets.encode(rows.indices, feedback.signal)
        adding = sum_all_rows(name, sketch, wire, context)
        if union is None:
            coded, union = yield from together(adding, union_rows(rows, state, context))
        else:
            coded = yield from adding
        return self._finish(rows, feedback, coded, buckets, wire, union, state, context)

    def _placed(
        self, rows: SparseRows, index: Index, state: ReducerState, context: Context
    ) -> Protocol[Reduced | None]:
        rank = context.rank
        covered = index.cover(rows, rank)
        guard = Guard(active=index.announced, raised=covered is None)
        known = index.zeros(rows, rank) if covered is None else covered
        feedback = self._feedback(known, state)
        union = index.union()
        wire, count = self.layout(len(union), placed=True)
        buckets = Buckets.placed(union, count, _seed(context.name, state.step))
        filled, counts = buckets.filled(index)
        own = filled.split(counts.tolist())[rank]
        sketch = buckets.encode_filled(known.indices, feedback.signal, own)
        coded = yield from sum_routed_rows(
            request_name(context, state, "sketch"),
            sketch,
            own,
            minimal_route(filled, counts, count, rank),
            wire,
            context,
            guard,
        )
        if coded is None:
            return None
        state.rows = index.mean_rows
        return self._finish(known, feedback, coded, buckets, wire, union, state, context)

    def _feedback(self, rows: SparseRows, state: ReducerState) -> Feedback:
        return Feedback(rows, state, active=self.feeds_back)

    def _finish(
        self,
        rows: SparseRows,
        feedback: Feedback,
        coded: CodedSum,
        buckets: Buckets,
        wire: Wire,
        union: Tensor,
        state: ReducerState,
        context: Context,
    ) -> Reduced:
        state.union = len(union)
        collisions = buckets.omega(len(union))
        shrink = 1.0 / (1.0 + collisions) if self.feeds_back else 1.0
        out = buckets.decode(coded.total, union, shrink).to(rows.values.dtype)
        if self.feeds_back:
            feedback.keep(union, buckets.decode(coded.share, union, shrink), out, context.scale)
        return Reduced(
            self.name,
            rows=SparseRows(union, out, rows.num_rows),
            local_rows=len(rows.indices),
            omega=collisions + wire.omega,
        )

    def steps(self, workload: Workload) -> tuple[Step, ...]:
        n, union = workload.num_ranks, workload.union
        placed = workload.announced and self.uses_index
        wire, count = self.layout(union, placed=placed)
        wide = accumulate_dtype(
            {2: torch.float16, 8: torch.float64}.get(workload.element_bytes, torch.float32)
        )
        coded = wire.row_bytes(workload.dim, wide)
        exchange: Sequence[Step]
        if placed:
            push = (workload.rows - count / n) * coded if n > 1 else 0.0
            exchange = (Step("exchange", push), Step("exchange", (n - 1) * count / n * coded))
        else:
            num_bytes = self.hashes * count * coded + workload.bitmap_bytes
            exchange = all_reduce_steps(num_bytes, n)
        decodes = 2 if self.feeds_back else 1
        return (
            Step("local", (workload.rows + count) * self.hashes * workload.row_bytes),
            *exchange,
            Step("local", decodes * union * self.hashes * workload.row_bytes),
        )


def _seed(name: str, step: int) -> int:
    """Fresh each step, the same on every rank, in every run."""
    return (zlib.crc32(name.encode()) + 0x9E3779B1 * step) & 0xFFFFFFFF

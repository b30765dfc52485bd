"""sketch (S2 Reducer): a count sketch of the rows, and a bitmap of which rows there are.

The sketch's size is agreed before the step (from the last step's union), so it does not wait for
the bitmap: both travel at once. Only a parameter's first step runs the bitmap alone before.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from commlib import ops
from commlib.collectives.requests import AllReduce, Protocol
from commlib.reducers.base import Context, Reduced, Reducer, ReducerState, request_name
from commlib.reducers.feedback import Feedback
from commlib.reducers.gradient import Gradient
from commlib.reducers.union import union_rows
from commlib.rows import SparseRows, accumulate_dtype
from commlib.topology.link import Step, Workload

Decoder = Literal["mean", "median", "peel"]
WireName = Literal["fp32", "bf16"]
_HASHES: dict[str, int] = {"mean": 1, "median": 3, "peel": 3}
_WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class S2(Reducer):
    """Count-sketch compressed allreduce; steps 2 (4 at first), bytes 2(n-1)/n (r c D w + V/8).

    Args:
        ratio: Sketch rows per union row, r c / U. More is more exact, and more bytes. The error of
            one reduction, relative to the signal, squared, is omega = (U-1)/(r c), about 1/ratio.
        decoder: `mean` is linear, which error feedback needs; `median` shrugs off single
            collisions; `peel` is exact from a ratio of 1.3 up.
        num_hashes: r; by default 1 for `mean` (more gains nothing there), 3 for the others.
        error_feedback: Keep what a step did not deliver and add it to the next gradient of those
            rows. By default on for `mean`; other decoders cannot have it.
        wire: Dtype of the sketch on the wire. `bf16` halves the bytes; sums are fp32 all the same.

    Raises:
        ValueError: A ratio that is not positive and finite, an unknown decoder or wire, hashes
            outside 1 to 16, feedback with a decoder that is not linear.

    Source: S2 Reducer (ICASSP 2022), sections 3.1-3.3; seeds, feedback and one-round form ours.
    """

    ratio: float = 0.25
    decoder: Decoder = "mean"
    num_hashes: int | None = None
    error_feedback: bool | None = None
    wire: WireName = "fp32"

    name: ClassVar[str] = "sketch"
    lossy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.ratio, (int, float)) or isinstance(self.ratio, bool):
            raise TypeError(f"ratio = {self.ratio!r} must be a number, for instance 0.25")
        if not (math.isfinite(self.ratio) and self.ratio > 0):
            raise ValueError(f"ratio = {self.ratio} must be a finite number > 0, for instance 0.25")
        if self.decoder not in _HASHES:
            raise ValueError(f"decoder = {self.decoder!r} must be one of {sorted(_HASHES)}")
        if self.wire not in _WIRES:
            raise ValueError(f"wire = {self.wire!r} must be one of {sorted(_WIRES)}")
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
        """R."""
        return self.num_hashes or _HASHES[self.decoder]

    @property
    def feeds_back(self) -> bool:
        """Whether residuals are kept."""
        return self.decoder == "mean" if self.error_feedback is None else self.error_feedback

    def num_buckets(self, union: int) -> int:
        """Buckets of each table, c, for a union of that many rows."""
        return max(1, math.ceil(self.ratio * union / self.hashes))

    def protocol(
        self, gradient: Gradient, state: ReducerState, context: Context
    ) -> Protocol[Reduced]:
        rows = gradient.rows()
        feedback = Feedback(rows, state) if self.feeds_back else None
        source = feedback.signal if feedback else rows.values
        union: Tensor | None = None
        if state.union < 0:
            union = yield from union_rows(rows, state, context)
            state.union = len(union)
        buckets = self.num_buckets(state.union)
        seed = _seed(context.name, state.step)
        sketch = ops.sketch_encode(rows.indices, source, self.hashes, buckets, seed)
        sent = self._to_wire(sketch)
        request = AllReduce(
            name=request_name(context, state, "sketch"),
            tensor=sent.clone() if feedback else sent,
            op="mean" if context.average else "sum",
        )
        if union is None:
            bitmap = AllReduce(
                name=request_name(context, state, "bitmap"),
                tensor=ops.indices_to_bitmap(rows.indices, rows.num_rows),
                op="bor",
            )
            total, packed = yield (request, bitmap)
            union = ops.bitmap_to_indices(packed, rows.num_rows)
        else:
            total = yield request

        state.union = len(union)
        omega = max(0, len(union) - 1) / (self.hashes * buckets)
        shrink = 1.0 / (1.0 + omega) if feedback else 1.0
        wide = accumulate_dtype(rows.values.dtype)
        values = self._decode(total.to(wide), union, seed) * shrink
        if feedback:
            share = self._decode(sent.to(wide), union, seed) * (shrink * context.scale)
            feedback.keep(union, share, values, context.scale)
        return Reduced(
            self.name,
            rows=SparseRows(union, values.to(rows.values.dtype), rows.num_rows),
            local_rows=len(rows.indices),
            omega=omega,
        )

    def _to_wire(self, sketch: Tensor) -> Tensor:
        return sketch.to(_WIRES[self.wire]) if sketch.dtype == torch.float32 else sketch

    def _decode(self, sketch: Tensor, union: Tensor, seed: int) -> Tensor:
        if self.decoder == "peel":
            return ops.sketch_peel(sketch, union, seed)[0]
        return ops.sketch_decode(sketch, union, seed, self.decoder)

    def steps(self, workload: Workload) -> tuple[Step, ...]:
        n, row = workload.num_ranks, workload.row_bytes
        sketch_rows = self.hashes * self.num_buckets(workload.union)
        wire_bytes = _WIRES[self.wire].itemsize if workload.element_bytes < 8 else 8
        half = (n - 1) / n * (sketch_rows * workload.dim * wire_bytes + workload.bitmap_bytes)
        decodes = 2 if self.feeds_back else 1
        return (
            Step("local", (workload.rows * self.hashes + sketch_rows) * row),
            Step("exchange", half),
            Step("exchange", half),
            Step("local", decodes * workload.union * self.hashes * row),
        )


def _seed(name: str, step: int) -> int:
    """Fresh each step, the same on every rank, in every run."""
    return (zlib.crc32(name.encode()) + 0x9E3779B1 * step) & 0xFFFFFFFF

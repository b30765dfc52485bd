"""Error feedback: what a step did not deliver joins the next gradient of the same rows.

With a linear decoder every rank knows its own share of the output, so what it keeps is exact:
mean_r(g + e) = out + mean_r(e') for the whole parameter, whoever's rows collided with whose.
"""

from __future__ import annotations

import torch
from torch import Tensor

from commlib import ops
from commlib.reducers.base import ReducerState
from commlib.rows import SparseRows, accumulate_dtype


class Feedback:
    """The residual of one parameter over one reduction.

    Args:
        rows: The local gradient.
        state: Holds the residual `[V, D]` (fp32, fp64 for fp64 gradients), made at the first use;
            only rows that were ever in the union take memory.
        active: Without, the signal is the gradient and nothing is kept.

    `signal` `[R, D]` is gradient plus residual of the rows at hand. Rows of the residual that
    this step's gradient does not touch wait for a step that does.

    Source: error feedback for linear compressors; the form for sketches of unlike rows is ours.
    """

    def __init__(self, rows: SparseRows, state: ReducerState, *, active: bool = True) -> None:
        wide = accumulate_dtype(rows.values.dtype)
        if active and state.residual is None:
            state.residual = torch.zeros(rows.num_rows, rows.dim, dtype=wide)
        self._rows = rows
        self._residual = state.residual if active else None
        self.signal = rows.values.to(wide)
        if self._residual is not None:
            self.signal = self.signal + ops.gather_rows(self._residual, rows.indices)

    def keep(self, union: Tensor, share: Tensor, out: Tensor, scale: float) -> None:
        """Store e' = (g + e) - own share, over the union's rows.

        Args:
            union: `[U]` rows of the output.
            share: `[U, D]` this rank's part of the output, `scale` included.
            out: `[U, D]` the output, the same on all ranks.
            scale: What the ranks' sum was multiplied with; residuals are held unscaled.

        A step whose output is not finite leaves every residual as it was, on every rank alike:
        a loss scaler skips that step, and its gradient with it.
        """
        if self._residual is None or not _finite(out):
            return
        ops.scatter_rows_(self._residual, self._rows.indices, self.signal)
        ops.scatter_add_rows_(self._residual, union, share, -1.0 / scale)


def _finite(tensor: Tensor) -> bool:
    """Whether every element is finite; by the extremes, many times faster than asking each."""
    if tensor.numel() == 0:
        return True
    least, most = torch.aminmax(tensor)
    return bool(torch.isfinite(least) & torch.isfinite(most))

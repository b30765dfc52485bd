"""The methods of `bench.train`: the demo's, torch's hooks, the baselines, EmbRace, Horovod."""

# No `from __future__ import annotations` here: DDP compares a hook's annotations as objects.
import importlib
import math

import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from bench import horovod_drivers as horovod
from bench.partitioned import EmbraceDriver
from commlib.cli.demo.methods import METHODS as DEMO
from commlib.cli.demo.methods import Method, dense_bytes
from commlib.cli.demo.settings import Settings
from commlib.cli.demo.touched import Touched

POWERSGD_RANK = 4
POWERSGD_START = 5
BASELINES = {
    "coo-allgather": "all-gather of COO elements",
    "dense-scan": "dense allreduce",
    "gather-bcast": "gather and broadcast",
    "union-fp32": "union of rows, float32 bitmap",
}
"""The baselines of the S2 paper, in `bench/baselines.py`."""


def powersgd_bytes(touched: Touched, element_bytes: int = 4) -> float:
    """Bytes that a rank sends for a table: two factors [V, r] and [D, r], in ring allreduces."""
    num_ranks = touched.num_ranks
    factors = touched.num_rows * element_bytes + touched.row_bytes
    return 2 * (num_ranks - 1) / num_ranks * factors * POWERSGD_RANK


def _attach_nothing(ddp: DistributedDataParallel, settings: Settings) -> None:
    """Leaves DDP as it is."""


def _attach_noop(ddp: DistributedDataParallel, settings: Settings) -> None:
    ddp.register_comm_hook(None, _noop)


def _noop(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _attach_fp16(ddp: DistributedDataParallel, settings: Settings) -> None:
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)


def _attach_powersgd(ddp: DistributedDataParallel, settings: Settings) -> None:
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=POWERSGD_START
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _baseline(name: str) -> Method:
    def attach(ddp: DistributedDataParallel, settings: Settings) -> None:
        ddp.register_comm_hook(None, importlib.import_module("bench.baselines").hook(name))

    def estimate(touched: Touched) -> float:
        baselines = importlib.import_module("bench.baselines")
        known = getattr(baselines, "estimate_bytes", None)
        return math.nan if known is None else known(name, touched)

    return Method(name, BASELINES[name], name != "dense-scan", attach, estimate)


_OTHERS = (
    Method("embrace", "EmbRace, not scheduled", True, _attach_nothing, driver=EmbraceDriver),
    Method("fp16", "DDP, fp16 hook", False, _attach_fp16, lambda t: dense_bytes(t) / 2),
    # What would free communication give? Ranks drift apart: for the step time only.
    Method("noop", "no communication", True, _attach_noop, lambda t: 0.0),
    # The hook issues collectives from callbacks, which Gloo runs in any order: one bucket only.
    Method("powersgd", "DDP, PowerSGD hook", False, _attach_powersgd, powersgd_bytes, 4_096),
    *(_baseline(name) for name in BASELINES),
)
# Horovod's have no DDP to attach to; they need `bench/horovod_ranks.py`.
_HOROVOD = (
    Method(
        "horovod-dense",
        "Horovod, dense gradients",
        False,
        _attach_nothing,
        dense_bytes,
        driver=horovod.HorovodDriver,
    ),
    *(
        Method(f"horovod-{name}", title, True, _attach_nothing, driver=driver)
        for name, title, driver in (
            ("sparse", "Horovod, sparse gradients", horovod.HorovodSparseDriver),
            ("exact", "commlib exact, Horovod", horovod.HorovodExactDriver),
            ("sketch", "commlib sketch (S2), Horovod", horovod.HorovodSketchDriver),
            ("embrace", "EmbRace, not scheduled, Horovod", horovod.HorovodEmbraceDriver),
        )
    ),
)
METHODS = DEMO | {method.name: method for method in (*_OTHERS, *_HOROVOD)}
"""Every method by name."""

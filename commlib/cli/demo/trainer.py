"""One method's training on one rank: steps, validation, and a record of both."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commlib.cli.demo.compute import Compute, measure_compute
from commlib.cli.demo.methods import Method
from commlib.cli.demo.settings import Settings
from commlib.cli.demo.touched import Touched, count_touched
from commlib.cli.demo.workload import Workload

_STATS_TIMES = ("scan_s", "exchange_s", "decode_s")


class Trainer:
    """Trains a workload with one method, on this rank, in the default process group.

    Every method starts from the same weights and sees the same batches. Sums over the ranks that
    only the record needs are taken in `validate` and `finish`, outside the timed steps.

    Args:
        method: How gradients are averaged.
        workload: What is trained.
        settings: The same on every rank.
    """

    def __init__(self, method: Method, workload: Workload, settings: Settings) -> None:
        self.method = method
        self.workload = workload
        self.settings = settings
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.driver = method.driver(method, workload, settings)
        self.lr = [group["lr"] for group in self.driver.optimizer.param_groups]
        self.steps: list[dict[str, Any]] = []
        self.validation: list[dict[str, float]] = []
        self.losses: list[Tensor] = []
        self.train_s = 0.0

    def step(self) -> float:
        """Trains one step; returns its seconds."""
        ramp = min(1.0, (len(self.steps) + 1) / self.settings.lr_ramp_steps)
        for group, lr in zip(self.driver.optimizer.param_groups, self.lr, strict=True):
            group["lr"] = lr * ramp
        step = self.driver.step(len(self.steps))
        self.train_s += step.step_s
        self.losses.append(step.loss)
        self.steps.append(
            {
                "step": len(self.steps),
                "step_s": step.step_s,
                "forward_s": step.forward_s,
                "backward_s": step.backward_s,
                "optimizer_s": step.optimizer_s,
                "embedding_wait_s": step.embedding_wait_s,
                **self._read_stats(),
            }
        )
        if step.sparse_bytes is not None:
            self.steps[-1]["sparse_bytes"] = step.sparse_bytes
        return step.step_s

    def settle(self) -> None:
        """Ends what is under way, at the expense of the last step."""
        start = time.perf_counter()
        self.driver.flush()
        settle_s = time.perf_counter() - start
        self.train_s += settle_s
        self.steps[-1]["step_s"] += settle_s

    def validate(self) -> float:
        """Returns the mean loss on the validation data."""
        self.driver.flush()
        loss = self.workload.evaluate(self.driver.model).detach()
        dist.all_reduce(loss)
        valid_loss = loss.item() / self.num_ranks
        self.validation.append(
            {"step": len(self.steps), "train_s": self.train_s, "loss": valid_loss}
        )
        return valid_loss

    def finish(
        self,
        touched: Sequence[Sequence[Touched]] | None = None,
        compute: Compute | None = None,
    ) -> dict[str, Any]:
        """Returns the record of the run, equal on every rank but for its timings.

        Fills in what needs the other ranks: mean losses, the rows that all touched, and with them
        the lower bound and the bytes of methods that do not count their own.

        Args:
            touched: What `count_touched` gives for these steps, where it is known already.
            compute: What `measure_compute` gives for this workload, likewise.
        """
        losses = torch.stack(self.losses)
        dist.all_reduce(losses)
        compute = compute or measure_compute(self.workload, sparse=self.method.sparse)
        touched = touched or count_touched(self.workload, self.driver.tables, len(self.steps))
        for record, loss, tables in zip(self.steps, losses, touched, strict=True):
            record["loss"] = loss.item() / self.num_ranks
            record["bound_bytes"] = sum(table.bound_bytes for table in tables)
            if self.method.estimate_bytes is not None:
                estimate = sum(map(self.method.estimate_bytes, tables))
                record.setdefault("sparse_bytes", estimate)
        return {
            "method": self.method.name,
            "title": self.method.title,
            "num_ranks": self.num_ranks,
            "settings": dataclasses.asdict(self.settings),
            "num_rows": self.driver.tables[0].num_rows,
            "num_samples": self.workload.num_samples,
            "num_parameters": self.driver.num_parameters,
            "table_parameters": sum(table.num_parameters for table in self.driver.tables),
            "compute": dataclasses.asdict(compute),
            "steps": self.steps,
            "validation": self.validation,
        }

    def _read_stats(self) -> dict[str, Any]:
        """Adds up what commlib's state recorded for the tables since the last step."""
        state = self.driver.state
        if state is None:
            return {}
        tables = {f"{table.name}.weight" for table in self.driver.tables}
        records = [record for record in state.stats() if record["parameter"] in tables]
        state.clear_stats()
        sums: dict[str, Any] = {
            key: sum(record.get(key) or 0.0 for record in records) for key in _STATS_TIMES
        }
        sums["sparse_bytes"] = sum(record["bytes_sent"] for record in records)
        sums["reducers"] = sorted({str(record["reducer"]) for record in records})
        omegas = [record["omega"] for record in records if record.get("omega") is not None]
        if omegas:
            sums["omega"] = sum(omegas) / len(omegas)
        return sums

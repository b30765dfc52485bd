"""One method's model on one rank: steps, validation, and a record of both."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from commlib.cli.demo.corpus import Corpus
from commlib.cli.demo.methods import Method, State, Touched
from commlib.cli.demo.model import LanguageModel, LogUniform
from commlib.cli.demo.settings import Settings

_TABLES = ("input_table", "output_table")
_STATS_TIMES = ("scan_s", "exchange_s", "decode_s")


@dataclasses.dataclass(frozen=True)
class Batch:
    """One rank's input of one step; shapes as in `LanguageModel.forward`."""

    inputs: Tensor
    targets: Tensor
    negatives: Tensor


class Batches:
    """Cuts the training text into one lane per sequence of each rank, and steps along the lanes.

    A batch depends on the seed, the step and the rank only, so every method sees the same.
    """

    def __init__(self, corpus: Corpus, settings: Settings, *, rank: int, num_ranks: int) -> None:
        self.settings = settings
        self.rank = rank
        self.num_ranks = num_ranks
        self.sampler = LogUniform(corpus.num_rows, settings.negatives)
        lane = len(corpus.train) // (num_ranks * settings.batch)
        if lane <= settings.length:
            raise ValueError(
                f"the text has {len(corpus.train)} training words; {num_ranks} ranks of "
                f"{settings.batch} sequences of {settings.length} need more than "
                f"{num_ranks * settings.batch * (settings.length + 1)}"
            )
        words = torch.from_numpy(corpus.train[: lane * num_ranks * settings.batch])
        self.lanes = words.view(num_ranks, settings.batch, lane)[rank].long()
        """This rank's lanes. [batch, num_words]"""

    def __getitem__(self, step: int) -> Batch:
        """Returns the batch of a step, counted from 0; the text repeats."""
        length = self.settings.length
        start = step % ((self.lanes.shape[1] - 1) // length) * length
        seed = (self.settings.seed << 40) + step * self.num_ranks + self.rank
        return Batch(
            inputs=self.lanes[:, start : start + length],
            targets=self.lanes[:, start + 1 : start + length + 1],
            negatives=self.sampler.draw(seed),
        )


class Trainer:
    """Trains the model with one method, on this rank, in the default process group.

    Every method starts from the same weights and sees the same batches. Sums over the ranks that
    only the record needs are taken in `validate` and `finish`, outside the timed steps.

    Args:
        method: How gradients are averaged.
        corpus: The text; the same on every rank.
        settings: The same on every rank.
    """

    def __init__(self, method: Method, corpus: Corpus, settings: Settings) -> None:
        self.method = method
        self.settings = settings
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.batches = Batches(corpus, settings, rank=self.rank, num_ranks=self.num_ranks)
        torch.manual_seed(settings.seed)
        model = LanguageModel(
            num_rows=corpus.num_rows,
            dim=settings.dim,
            hidden=settings.hidden,
            log_expected=self.batches.sampler.log_expected,
            sparse=method.sparse,
        )
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=method.bucket_cap_mb)
        self.state: State | None = method.attach(self.ddp, settings)
        self.optimizer = torch.optim.Adagrad(
            model.parameters(),
            lr=settings.lr,
            initial_accumulator_value=settings.initial_accumulator,
        )
        self.valid = self._valid_slice(corpus)
        self.steps: list[dict[str, Any]] = []
        self.validation: list[dict[str, float]] = []
        self.losses: list[Tensor] = []
        self.train_s = 0.0

    @property
    def model(self) -> LanguageModel:
        """The model inside DDP."""
        return cast(LanguageModel, self.ddp.module)

    def step(self) -> float:
        """Trains one step; returns its seconds."""
        batch = self.batches[len(self.steps)]
        start = time.perf_counter()
        ramp = min(1.0, (len(self.steps) + 1) / self.settings.lr_ramp_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * ramp
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.ddp(batch.inputs, batch.targets, batch.negatives)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        end = time.perf_counter()
        self.train_s += end - start
        self.losses.append(loss.detach())
        self.steps.append(
            {
                "step": len(self.steps),
                "step_s": end - start,
                "forward_s": forward - start,
                "backward_s": backward - forward,
                "optimizer_s": end - backward,
                **self._read_stats(),
            }
        )
        return end - start

    def validate(self) -> float:
        """Returns the mean loss of the validation slice against the whole vocabulary."""
        loss = self.model.full_loss(*self.valid)
        dist.all_reduce(loss)
        valid_loss = loss.item() / self.num_ranks
        self.validation.append(
            {"step": len(self.steps), "train_s": self.train_s, "loss": valid_loss}
        )
        return valid_loss

    def finish(self) -> dict[str, Any]:
        """Returns the record of the run, equal on every rank but for its timings.

        Fills in what needs the other ranks: mean losses, the rows that all touched, and with them
        the lower bound and the bytes of methods that do not count their own.
        """
        losses = torch.stack(self.losses)
        dist.all_reduce(losses)
        num_bytes, bounds = self._count_bytes()
        for idx, record in enumerate(self.steps):
            record["loss"] = losses[idx].item() / self.num_ranks
            record["bound_bytes"] = bounds[idx]
            record.setdefault("sparse_bytes", num_bytes[idx])
        tables = sum(p.numel() for name in _TABLES for p in getattr(self.model, name).parameters())
        return {
            "method": self.method.name,
            "title": self.method.title,
            "num_ranks": self.num_ranks,
            "settings": dataclasses.asdict(self.settings),
            "num_rows": self.model.input_table.num_embeddings,
            "num_parameters": sum(p.numel() for p in self.model.parameters()),
            "table_parameters": tables,
            "compute_backward_s": self._measure_backward(),
            "steps": self.steps,
            "validation": self.validation,
        }

    def _read_stats(self) -> dict[str, Any]:
        """Adds up what commlib's state recorded for the tables since the last step."""
        if self.state is None:
            return {}
        tables = {f"{name}.weight" for name in _TABLES}
        records = [record for record in self.state.stats() if record["parameter"] in tables]
        self.state.clear_stats()
        sums: dict[str, Any] = {
            key: sum(record.get(key) or 0.0 for record in records) for key in _STATS_TIMES
        }
        sums["sparse_bytes"] = sum(record["bytes_sent"] for record in records)
        sums["reducers"] = sorted({str(record["reducer"]) for record in records})
        omegas = [record["omega"] for record in records if record.get("omega") is not None]
        if omegas:
            sums["omega"] = sum(omegas) / len(omegas)
        return sums

    def _count_bytes(self) -> tuple[list[float], list[float]]:
        """Counts touched rows; returns every step's bytes by the method's formula, and bound."""
        num_bytes = [0.0] * len(self.steps)
        bounds = [0.0] * len(self.steps)
        table = self.model.input_table
        for step in range(len(self.steps)):
            batch = self.batches[step]
            lookups = (batch.inputs, torch.cat([batch.targets.flatten(), batch.negatives]))
            for ids in lookups:
                mask = torch.zeros(table.num_embeddings, dtype=torch.int32)
                mask[ids.flatten()] = 1
                own = int(mask.sum())
                counts = [torch.empty(1, dtype=torch.int64) for _ in range(self.num_ranks)]
                dist.all_gather(counts, torch.tensor([own]))
                dist.all_reduce(mask, dist.ReduceOp.MAX)
                touched = Touched(
                    num_ranks=self.num_ranks,
                    num_rows=table.num_embeddings,
                    row_bytes=table.embedding_dim * table.weight.element_size(),
                    mean_rows=sum(int(count) for count in counts) / self.num_ranks,
                    max_rows=max(int(count) for count in counts),
                    union_rows=int(mask.sum()),
                )
                bounds[step] += touched.bound_bytes
                if self.method.estimate_bytes is not None:
                    num_bytes[step] += self.method.estimate_bytes(touched)
        return num_bytes, bounds

    def _measure_backward(self, num_repeats: int = 5) -> float:
        """Returns the median seconds of a backward pass that communicates nothing."""
        batch = self.batches[0]
        seconds = []
        for _ in range(num_repeats):
            self.optimizer.zero_grad(set_to_none=True)
            with self.ddp.no_sync():
                loss = self.ddp(batch.inputs, batch.targets, batch.negatives)
                dist.barrier()
                start = time.perf_counter()
                loss.backward()
                seconds.append(time.perf_counter() - start)
        self.optimizer.zero_grad(set_to_none=True)
        return sorted(seconds)[num_repeats // 2]

    def _valid_slice(self, corpus: Corpus) -> tuple[Tensor, Tensor]:
        """Returns this rank's part of the validation slice. Two of [num_sequences, length]"""
        length = self.settings.length
        available = (len(corpus.valid) - 1) // length
        wanted = max(1, self.settings.eval_tokens // (length * self.num_ranks))
        num_sequences = min(wanted, available // self.num_ranks)
        if num_sequences == 0:
            raise ValueError(
                f"the text has {len(corpus.valid)} validation words; {self.num_ranks} ranks need "
                f"at least {self.num_ranks * length + 1}"
            )
        stride = available // (num_sequences * self.num_ranks)
        sequence_idx = torch.arange(num_sequences) * self.num_ranks + self.rank
        window = (sequence_idx * stride * length)[:, None] + torch.arange(length + 1)
        words = torch.from_numpy(corpus.valid).long()[window]
        return words[:, :-1], words[:, 1:]

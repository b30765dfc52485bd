"""The demo's worker: `torchrun ... -m commlib.cli.demo.train`, one process per rank.

Rank 0 prints a line of JSON per step, for the progress bar, and writes the record at the end.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from commlib.cli.demo.corpus import Corpus
from commlib.cli.demo.methods import METHODS
from commlib.cli.demo.settings import Settings
from commlib.cli.demo.trainer import Trainer
from commlib.cli.demo.workload import LanguageWorkload
from commlib.cli.leave import leave

PROGRESS = "@step "
"""Starts a line of progress on standard output."""


def train(method: str, corpus: Corpus, settings: Settings, record_path: Path) -> None:
    """Trains one method and writes its record (rank 0)."""
    workload = LanguageWorkload(
        corpus, settings, rank=dist.get_rank(), num_ranks=dist.get_world_size()
    )
    trainer = Trainer(METHODS[method], workload, settings)
    valid_loss = trainer.validate()
    for step in range(1, settings.steps + 1):
        step_s = trainer.step()
        if step % settings.eval_every == 0 or step == settings.steps:
            valid_loss = trainer.validate()
        if trainer.rank == 0:
            progress = {"step": step, "step_s": step_s, "valid_loss": valid_loss}
            sys.stdout.write(f"{PROGRESS}{json.dumps(progress)}\n")
            sys.stdout.flush()
    record = trainer.finish()
    trainer.driver.close()
    if trainer.rank == 0:
        record_path.write_text(json.dumps(record), encoding="utf-8")


def main() -> None:
    """Reads the command line, joins the process group and trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--settings", type=Settings.from_json, required=True)
    parser.add_argument("--record", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    timeout_s = float(os.environ.get("COMMLIB_TIMEOUT_S", "120"))
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))
    train(args.method, Corpus.load(args.corpus), args.settings, args.record)
    leave()


if __name__ == "__main__":
    main()

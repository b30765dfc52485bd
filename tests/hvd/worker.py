"""One rank of `run_horovod`."""

import faulthandler
import os
import pickle
import sys
import time
import traceback
from pathlib import Path

from tests.hvd.harness import HASH_SEEDS, find


def main() -> None:
    rank = os.environ["HOROVOD_RANK"]
    if os.environ.pop(HASH_SEEDS, None):  # a seed of its own for each rank
        os.environ["PYTHONHASHSEED"] = str(1 + int(rank))
        os.execv(sys.executable, [sys.executable, "-m", "tests.hvd.worker", *sys.argv[1:]])
    folder = Path(sys.argv[1])
    module, name, args, timeout_s = pickle.loads((folder / "what").read_bytes())
    faulthandler.dump_traceback_later(timeout_s, exit=True)

    import horovod.torch as hvd
    import torch

    torch.set_num_threads(1)
    hvd.init()
    try:
        ended = ("result", find(module, name)(*args))
    except BaseException as error:
        ended = (type(error).__name__, f"rank {rank}: {error}\n{traceback.format_exc()}")
    (folder / f"writing{rank}").write_bytes(pickle.dumps(ended))
    (folder / f"writing{rank}").rename(folder / f"result{rank}")
    from commlib.schedule.lane import close_open_lanes

    close_open_lanes()
    # Where one leaves, Horovod aborts the others.
    results, deadline = [folder / f"result{peer}" for peer in range(hvd.size())], time.time() + 15
    while not all(file.exists() for file in results) and time.time() < deadline:
        time.sleep(0.02)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

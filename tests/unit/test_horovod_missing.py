"""commlib without Horovod: everything else works, and the error says what to run."""

import subprocess
import sys

CODE = """
import sys
sys.modules["horovod"] = None
import commlib
assert "horovod" in dir(commlib)
import torch
table = torch.nn.Embedding(4, 2)
for use in (
    lambda: commlib.horovod,
    lambda: commlib.embrace.shard(table, transport="horovod"),
):
    try:
        use()
    except ImportError as error:
        assert "commlib install-horovod" in str(error), error
    else:
        raise AssertionError("no error")
"""


def test_the_error_names_the_command():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

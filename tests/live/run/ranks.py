"""Start a script's ranks as torchrun does, which itself takes two seconds to import torch: `ranks.py 2 train.py`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from shardviz.live.world.torchrun import variables


def main(number: int, *script: str) -> int:
    """Return the exit code of the first rank that fails; 0 if none does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    environments = [os.environ | meeting | variables(rank, number, number) for rank in range(number)]
    ranks = [subprocess.Popen((sys.executable, *script), env=environ) for environ in environments]
    return next((code for rank in ranks if (code := rank.wait())), 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))

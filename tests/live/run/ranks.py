"""Start a script's ranks as torchrun does, with options of its, without the two seconds in which it imports torch.

With `--forked` it imports torch itself, once for all of them: each is a fork of this process.
"""

from __future__ import annotations

import argparse
import os
import random
import runpy
import socket
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from shardviz.live.world.torchrun import variables

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


def free_port() -> str:
    """Return a port below those that systems hand out by themselves: gloo's ranks of other tests get theirs there."""
    for port in random.SystemRandom().sample(range(15000, 32000), 100):
        with suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return str(port)
    raise AssertionError("none of 100 ports is free")


def main() -> int:
    """Return the exit code of the first rank that fails; 0 if none does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nproc-per-node", type=int, default=1)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--master-addr", default="127.0.0.1")
    parser.add_argument("--master-port", default=free_port())
    parser.add_argument("--forked", action="store_true")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    job = parser.parse_args()
    number, meeting = job.nproc_per_node, {"MASTER_ADDR": job.master_addr, "MASTER_PORT": job.master_port}
    local = range(job.node_rank * number, (job.node_rank + 1) * number)
    environments = [os.environ | variables(rank, job.nnodes * number, number) | meeting for rank in local]
    if job.forked:
        return forked(job.script, environments)
    ranks = [subprocess.Popen((sys.executable, *job.script), env=environ) for environ in environments]
    return next((code for rank in ranks if (code := rank.wait())), 0)


def forked(script: Sequence[str], environments: Iterable[Mapping[str, str]]) -> int:
    """Run a script in a fork for each environment; return what `main` does, and 0 in a fork whose script has ended."""
    import torch  # noqa: F401

    pids = []
    for environ in environments:
        if not (pid := os.fork()):
            os.environ.update(environ)
            sys.argv, sys.path[0] = list(script), os.path.dirname(os.path.abspath(script[0]))
            runpy.run_path(script[0], run_name="__main__")
            return 0
        pids.append(pid)
    return next((code for pid in pids if (code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))), 0)


if __name__ == "__main__":
    sys.exit(main())
